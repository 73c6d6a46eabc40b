"""What one suite or several left, made into one dossier: whole, broken off, or not there at all."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from tests.unit.conftest import ROOT, Recorder
from tests.unit.dossiers import finding, series, step

from muster.bandwidth.results import Collective, Tool
from muster.dossier import Dossier, ImageRef, Node, Watched, watched
from muster.errors import SuiteDidNotReport
from muster.explain.explanation import of_text
from muster.finding import Outcome, Severity, Verdict
from muster.smoke import gather
from muster.smoke.gather import Heard, Occasion, merged
from muster.steps import Log, Step

KILLED = "killed by SIGKILL"
NO_TESTS = 5  # of pytest


def log(*steps: Step, exit_status: int | None = 0, running: str | None = None) -> Log:
    return Log(Recorder(), steps=list(steps), exit_status=exit_status, running=running)


def heard(host: str, of: Log, ending: str = "exit code 0", *errors: str) -> Heard:
    return Heard(host=host, log=of, ending=ending, errors=errors)


def occasion() -> Occasion:
    image = ImageRef(ref="muster:cpu", id="sha256:1")
    return Occasion(command_line="./invokew smoke", image=image, run={"shm": "1 GiB"})


def gathered(*suites: Heard) -> Dossier:
    return gather.dossier(suites, occasion(), [])


def missing(dossier: Dossier) -> dict[str, str | None]:
    return {node.host: node.missing for node in dossier.nodes}


# ---- one node ----------------------------------------------------------------------------------


def test_one_nodes_dossier_is_what_its_log_holds() -> None:
    steps = step("versions", measure="torch 2.13.0"), step("memlock", Outcome.NOT_APPLICABLE)
    told = log(*steps)
    told.facts["gpus"] = "none"
    told.versions["torch"] = "2.13.0"
    told.hashes["bom.json"] = "9c"
    told.series.append(series(Collective.ALL_REDUCE, Tool.TORCH, 3.0, "vm"))
    began = datetime.now(UTC).replace(microsecond=0)
    found = gathered(heard("vm", told))
    assert found.verdict is Verdict.READY
    assert (found.steps, found.findings) == (steps, ())
    assert found.nodes == (Node(host="vm", missing=None, facts={"gpus": "none"}, watched=None),)
    assert (found.versions, found.hashes) == ({"torch": "2.13.0"}, {"bom.json": "9c"})
    assert found.bandwidth == tuple(told.series)
    assert (found.command_line, found.run) == ("./invokew smoke", {"shm": "1 GiB"})
    assert found.image == ImageRef(ref="muster:cpu", id="sha256:1")
    assert found.started.endswith("Z")
    assert timedelta() <= datetime.fromisoformat(found.started) - began < timedelta(hours=1)
    assert found.seconds >= 0


def test_findings_that_no_step_made_stand_first_and_count() -> None:
    refused = finding(where="the Docker Engine")
    own = finding(Severity.WARNING)
    suites = [heard("vm", log(step("memlock", Outcome.PASSED, "", own)))]
    found = gather.dossier(suites, occasion(), [refused])
    assert found.findings == (refused, own)
    assert found.verdict is Verdict.NOT_READY


@pytest.mark.parametrize(
    ("told", "where", "what"),
    [
        (
            log(step("versions"), exit_status=None, running="bandwidth"),
            "bandwidth",
            f"the suite broke off during bandwidth ({KILLED})",
        ),
        (
            log(step("versions"), exit_status=None),
            "between two steps",
            f"the suite broke off between two steps ({KILLED})",
        ),
        (
            log(exit_status=None, running="versions"),
            "versions",
            f"the suite broke off during versions ({KILLED})",
        ),
        # pytest's own words for an internal error, and for one that was interrupted
        (log(step("versions"), exit_status=3), "between two steps", "the suite broke off between"),
        (log(step("versions"), exit_status=2), "between two steps", "the suite broke off between"),
    ],
)
def test_a_suite_that_broke_off_says_where_and_keeps_its_steps(
    told: Log, where: str, what: str
) -> None:
    found = gathered(heard("vm", told, KILLED, *map(str, range(7))))
    assert found.steps == tuple(told.steps)
    (broken,) = found.findings
    assert broken.what.startswith(what)
    assert (broken.where, broken.evidence) == (where, "2\n3\n4\n5\n6")
    assert found.verdict is Verdict.NOT_READY
    # of the only node nobody says that it is missing
    assert missing(found) == {"vm": None}


def test_a_suite_that_broke_off_without_a_word_shows_how_it_ended() -> None:
    (broken,) = gathered(heard("vm", log(exit_status=None, running="versions"), KILLED)).findings
    assert broken.evidence == KILLED


def test_suites_that_left_nothing_are_no_dossier() -> None:
    first = log(exit_status=None)
    first.complaints += ["E   no module named torch"]
    suites = [
        heard("node-0", first, "exit code 4", *(f"line {number}" for number in range(20))),
        heard("node-1", log(exit_status=NO_TESTS), "exit code 5"),
    ]
    with pytest.raises(SuiteDidNotReport) as error:
        gathered(*suites)
    said = error.value.what.splitlines()
    assert said[0] == "the smoke suite ended without a report (exit code 4)"
    assert said[1:] == [
        *(f"  | line {number}" for number in range(11, 20)),
        "  | E   no module named torch",
    ]


def test_a_step_that_failed_has_the_cause_that_its_output_shows() -> None:
    bus = "RuntimeError: DataLoader worker (pid 13) is killed by signal: Bus error."
    failed = step("dataloader_shm", Outcome.FAILED, "", finding(), output=bus)
    warned = step("memlock", Outcome.PASSED, "", finding(Severity.WARNING), output=bus)
    alone = gathered(heard("vm", log(failed, warned)))
    together = gathered(heard("node-0", log()), heard("node-1", log(failed, warned)))
    for found in (alone, together):
        causes = {step.name: step.findings[0].cause for step in found.steps}
        assert "[dataloader-bus-error]" in causes["dataloader_shm"]
        assert causes["memlock"] == finding().cause
        assert {each.cause for each in found.findings} == set(causes.values())


# ---- several nodes -----------------------------------------------------------------------------


def test_a_node_that_broke_off_is_missing_by_its_name_and_the_others_results_are_kept() -> None:
    found = gathered(
        heard("node-0", log(step("versions"), step("all_reduce", measure="sum 3"))),
        heard("node-1", log(step("versions"), exit_status=None, running="memlock"), KILLED),
        heard("node-2", log(exit_status=None), "exit code 4", "no such file"),
    )
    assert missing(found) == {
        "node-0": None,
        "node-1": f"its suite broke off during memlock ({KILLED})",
        "node-2": "its suite broke off before its first step (exit code 4)",
    }
    assert [(each.where, each.what, each.evidence) for each in found.findings] == [
        ("node-1: memlock", f"node-1's suite broke off during memlock ({KILLED})", KILLED),
        (
            "node-2: before its first step",
            "node-2's suite broke off before its first step (exit code 4)",
            "no such file",
        ),
    ]
    assert [(each.name, each.measure) for each in found.steps] == [
        ("versions", ""),
        ("all_reduce", "sum 3"),
    ]
    assert found.verdict is Verdict.NOT_READY


def test_a_node_that_had_no_step_to_run_is_not_missing() -> None:
    idle = heard("node-1", log(exit_status=NO_TESTS), "exit code 5")
    found = gathered(heard("node-0", log(step("all_reduce"))), idle)
    assert missing(found) == {"node-0": None, "node-1": None}
    assert found.verdict is Verdict.READY


def test_versions_and_bandwidth_are_those_of_all_nodes_and_facts_each_nodes_own() -> None:
    logs = [log(step("versions")), log(step("versions"))]
    for number, told in enumerate(logs):
        told.versions |= {"torch": f"2.{number}", f"only {number}": "x"}
        told.hashes |= {"bom.json": str(number)}
        told.facts |= {"gpus": str(number)}
        told.series.append(series(Collective.ALL_REDUCE, Tool.TORCH, 3.0, f"node-{number}"))
    found = gathered(*(heard(f"node-{number}", told) for number, told in enumerate(logs)))
    assert found.versions == {"torch": "2.0", "only 0": "x", "only 1": "x"}
    assert found.hashes == {"bom.json": "0"}
    assert [node.facts for node in found.nodes] == [{"gpus": "0"}, {"gpus": "1"}]
    assert [each.nodes for each in found.bandwidth] == [("node-0",), ("node-1",)]


def merge(*steps: Step) -> Step:
    """The one step that those of node-0, node-1, .. come to."""
    (found,) = merged({f"node-{number}": log(each) for number, each in enumerate(steps)})
    return found


def test_steps_of_several_nodes_are_in_the_order_of_the_plan_and_a_sites_own_last() -> None:
    logs = {
        "node-0": log(step("versions"), step("all_reduce"), step("own"), step("pairs")),
        "node-1": log(step("memlock"), step("pairs"), step("versions"), step("other")),
    }
    assert [each.name for each in merged(logs)] == [
        *("versions", "memlock", "all_reduce", "pairs"),
        *("own", "other"),
    ]


@pytest.mark.parametrize(
    ("outcomes", "worst"),
    [
        ("passed, passed", "passed"),
        ("passed, failed, not run", "failed"),
        ("not run, passed", "not run"),
        ("not applicable, passed", "passed"),
        ("not applicable, not applicable", "not applicable"),
    ],
)
def test_a_step_comes_to_what_the_worst_node_says(outcomes: str, worst: str) -> None:
    each = [step("memlock", Outcome(outcome)) for outcome in outcomes.split(", ")]
    assert merge(*each).outcome is Outcome(worst)


def test_a_step_takes_as_long_as_on_the_slowest_node_and_is_repeated_in_the_same_way() -> None:
    quick, slow = replace(step("memlock"), seconds=1.0), replace(step("memlock"), seconds=9.0)
    found = merge(quick, slow, quick)
    assert found.seconds == 9.0
    assert (found.limit_s, found.command) == (quick.limit_s, quick.command)


def test_a_measure_is_told_once_or_with_the_nodes_that_measured_it() -> None:
    def measure(*texts: str) -> str:
        return merge(*(step("shm_size", measure=text) for text in texts)).measure

    assert measure("1 GiB", "1 GiB") == "1 GiB"
    assert measure("1 GiB", "2 GiB", "1 GiB") == "node-0, node-2: 1 GiB; node-1: 2 GiB"
    assert measure("", "") == ""
    assert measure("a", "b", "c", "d", "e", "f", "a").endswith("node-3: d; 2 more")


def test_the_measure_of_a_step_is_that_of_the_nodes_where_it_went_worst() -> None:
    passed = step("memlock", measure="64 MiB")
    failed = step("memlock", Outcome.FAILED, "64 KiB", finding())
    assert merge(passed, failed, passed).measure == "64 KiB"


def test_a_finding_is_told_once_with_the_nodes_that_made_it() -> None:
    same, other = finding(), replace(finding(), what="only 32 KiB can be locked")
    found = merge(
        step("memlock", Outcome.FAILED, "", same),
        step("memlock", Outcome.FAILED, "", other),
        step("memlock", Outcome.FAILED, "", same),
    )
    assert [(each.what, each.where) for each in found.findings] == [
        (same.what, "node-0, node-2: memlock"),
        (other.what, "node-1: memlock"),
    ]


def test_output_stands_under_its_nodes_name() -> None:
    found = merge(step("doctor", output="a\nb"), step("doctor"), step("doctor", output="c"))
    assert found.output == "== node-0 ==\na\nb\n== node-2 ==\nc"


# ---- what NCCL wrote ---------------------------------------------------------------------------

HEADER = re.compile(r"(node-\d):(\d+):\d+ \[")


def files(name: str) -> dict[str, list[str]]:
    """What the processes of each host wrote, as if each had done so into a file of its own."""
    by_process: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for line in (ROOT / "tests/unit/explain_healthy" / name).read_text().splitlines():
        if head := HEADER.match(line):
            by_process[head[1], head[2]].append(line)
    found: defaultdict[str, list[str]] = defaultdict(list)
    for (host, _), lines in by_process.items():
        found[host].append("\n".join(lines))
    return found


IB, EFA, ALONE = map(files, ("infiniband_2.27.log", "efa_2.27.log", "nvlink_node_2.30.log"))


def seen(**nccl: Mapping[str, Sequence[str]]) -> list[Watched | None]:
    """What is seen of nodes of which each wrote that in its steps, by their names."""
    suites = []
    for host, steps in nccl.items():
        told = log(step("versions"))
        told.nccl |= {name: list(texts) for name, texts in steps.items()}
        suites.append(heard(host, told))
    return [node.watched for node in gathered(*suites).nodes]


def test_rings_that_rank_0_alone_tells_are_those_of_every_node() -> None:
    alone = watched(of_text("\n".join(IB["node-1"])).picture)
    assert alone["node-1"].rings == 0
    one, other = seen(a={"nodes_all_reduce": IB["node-0"]}, b={"nodes_all_reduce": IB["node-1"]})
    assert one is not None
    assert one == other
    assert (one.networks, one.gpu_direct, one.rings, one.trees) == (("IB",), True, 4, True)
    assert one.links == {"P2P/CUMEM": 3, "NET/IB": 1}


def test_what_is_watched_is_each_nodes_own_by_whatever_name_it_is_run() -> None:
    # the second in the order of the run is the one that NCCL calls node-0
    first, second = seen(
        gpu7={"nodes_all_reduce": IB["node-1"]}, gpu3={"nodes_all_reduce": EFA["node-0"]}
    )
    assert first is not None
    assert second is not None
    assert (first.networks, second.networks) == (("IB",), ("Libfabric",))


def test_the_widest_group_is_drawn_and_no_other_is_added_to_it() -> None:
    # the node's own group has eight links within it
    (found, _) = seen(
        a={"all_reduce": ALONE["node-0"], "nodes_all_reduce": IB["node-0"]},
        b={"nodes_all_reduce": IB["node-1"]},
    )
    assert found is not None
    assert found.links == {"P2P/CUMEM": 3, "NET/IB": 1}
    assert found.rings == 4


def test_of_one_node_its_own_group_is_drawn_before_that_of_other_steps() -> None:
    steps = {"bandwidth": IB["node-0"], "all_reduce": ALONE["node-0"]}
    (found,) = seen(vm=steps)
    assert found is not None
    assert found.networks == ("Socket",)
    (found,) = seen(vm={"bandwidth": IB["node-0"]})
    assert found is not None
    assert found.networks == ("IB",)


def test_a_node_where_no_nccl_ran_has_nothing_to_watch() -> None:
    first, second = seen(a={"all_reduce": ALONE["node-0"]}, b={})
    assert first is not None
    assert second is None
    assert seen(vm={}) == [None]
    assert seen(vm={"all_reduce": ["gloo says nothing of it"]}) == [None]
