"""What is read back from a preflight's pods, whatever became of their logs on the way."""

import base64
import json
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest
from tests.unit import pods
from tests.unit.conftest import ROOT

from muster import dossier, podlines, podlogs
from muster.dossier import Dossier
from muster.errors import LogUnreadable, PodLogBroken, PodLogWithoutResults, WrongInput
from muster.finding import Finding, Outcome, Severity, Verdict
from muster.podlines import Began, Closed, Found, Nccl
from muster.steps import Step

SCHEMA = json.loads((ROOT / "docs/smoke.schema.json").read_text())


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The logs of two pods that are well."""
    written = [pods.pod(tmp_path_factory.mktemp("pod"), index) for index in range(2)]
    assert [each.status for each in written] == [0, 0], written
    return [each.text for each in written]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The log of pod 1, of which a step fails."""
    return pods.pod(tmp_path_factory.mktemp("pod"), 1, memlock=pods.FAILS).text


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Dossier]:
    """Reads logs, each in a file of its own."""

    def reading(*logs: str) -> Dossier:
        paths = [tmp_path / f"{number}.log" for number in range(len(logs))]
        for path, log in zip(paths, logs, strict=True):
            path.write_text(log)
        found = podlogs.read(paths)
        jsonschema.validate(json.loads(json.dumps(found.to_dict())), SCHEMA)
        return found

    return reading


Read = Callable[..., Dossier]


def step(found: Dossier, name: str) -> Step:
    (wanted,) = (each for each in found.steps if each.name == name)
    return wanted


def errors(found: Dossier) -> list[Finding]:
    return [each for each in found.findings if each.severity is Severity.ERROR]


def without_warnings(found: Dossier) -> Dossier:
    """The doctor's warnings are of the machine that the tests run on."""
    return replace(found, findings=tuple(errors(found)))


# ---- pods that are well ------------------------------------------------------------------------


def test_the_pods_become_the_nodes_of_one_run(read: Read, passed: list[str]) -> None:
    found = read(*passed)
    assert (found.verdict, errors(found)) == (Verdict.READY, [])
    assert [(node.host, node.missing) for node in found.nodes] == [
        ("demo-0", None),
        ("demo-1", None),
    ]
    assert found.run["nnodes"] == "2"
    assert found.command_line.startswith("python -m muster.preflight --floor-gb-s=300 -- --nnodes")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", found.started)
    assert found.versions == {"torch": "2.13.0"}
    assert found.hashes == {"bom.json": "9c" * 32}


def test_a_step_of_all_pods_is_one_row(read: Read, passed: list[str]) -> None:
    found = read(*passed)
    names = ["versions", "doctor", "shm_size", "memlock", "rdma_libraries", "nodes_bandwidth"]
    assert [each.name for each in found.steps] == names
    assert step(found, "shm_size").measure == "64 MiB"
    skipped = step(found, "rdma_libraries")
    assert (skipped.outcome, skipped.measure) == (Outcome.NOT_APPLICABLE, "no InfiniBand here")
    # rank 0 alone knows it
    world = step(found, "nodes_bandwidth")
    assert "340.0 GB/s" in world.measure
    assert "python -m muster.launcher --nnodes=2" in world.command


def test_the_bandwidth_is_that_of_all_nodes_with_the_fabrics_floor(
    read: Read, passed: list[str]
) -> None:
    (series,) = read(*passed).bandwidth
    assert series.nodes == ("demo-0", "demo-1")
    assert series.claimed
    assert series.floor is not None
    assert series.floor.busbw == 300.0
    assert series.largest is not None
    assert (series.largest.bytes, series.largest.busbw) == (2**30, 340.0)


def test_each_node_has_its_doctors_facts_and_what_its_nccl_chose(
    read: Read, passed: list[str]
) -> None:
    for node in read(*passed).nodes:
        assert {"driver", "shm", "locked_memory", "hcas"} <= node.facts.keys()
        assert node.watched is not None
        assert node.watched.networks == ("IB",)
        assert node.watched.links
        assert node.watched.rings > 0


# ---- the same, as tools hand logs on -----------------------------------------------------------


def prefixed(log: str, index: int) -> list[str]:
    return [f"[pod/demo-{index}-abcde/preflight] {line}" for line in log.splitlines()]


def timed(lines: Sequence[str]) -> list[str]:
    return [
        re.sub(r"^(\[\S+\] )?", r"\g<1>2026-11-30T03:43:51.123456789Z ", line) for line in lines
    ]


def interleaved(*logs: Sequence[str]) -> list[str]:
    return [line for line in chain.from_iterable(zip_longest(*logs)) if line is not None]


@pytest.mark.parametrize(
    "handed",
    [
        lambda one, two: [*one.splitlines(), *two.splitlines()],
        lambda one, two: [*prefixed(two, 1), *prefixed(one, 0)],
        lambda one, two: interleaved(prefixed(one, 0), prefixed(two, 1)),
        lambda one, two: timed(interleaved(prefixed(one, 0), prefixed(two, 1))),
        lambda one, two: timed([*one.splitlines(), *two.splitlines()]),
        lambda one, two: interleaved(one.splitlines(), two.splitlines()),
        lambda one, two: [f"anything> {line}" for line in [*one.splitlines(), *two.splitlines()]],
    ],
    ids=["after another", "prefixes", "interleaved", "times", "times alone", "no prefix", "other"],
)
def test_one_file_of_both_pods_says_the_same(
    read: Read, passed: list[str], handed: Callable[[str, str], list[str]]
) -> None:
    one_file = read("\n".join(handed(*passed)))
    assert one_file.to_dict() == read(*passed).to_dict()


def test_a_log_that_is_given_twice_counts_once(read: Read, passed: list[str]) -> None:
    cut = "\n".join(passed[0].splitlines()[:4])
    assert read(*passed, passed[1], cut).to_dict() == read(*passed).to_dict()


# ---- pods that are not well --------------------------------------------------------------------


def test_a_step_that_failed_in_one_pod_names_it_and_keeps_the_rest(
    read: Read, passed: list[str], refused: str
) -> None:
    found = read(passed[0], refused)
    assert found.verdict is Verdict.NOT_READY
    assert [each.where for each in errors(found)] == ["demo-1: memlock"]
    assert step(found, "memlock").outcome is Outcome.FAILED
    assert step(found, "shm_size").outcome is Outcome.PASSED
    world = step(found, "nodes_bandwidth")
    assert world.outcome is Outcome.NOT_RUN
    assert "this node is not ready: mlock of 64 MiB fails" in world.measure
    assert len(found.bandwidth) == 1


def test_a_log_that_ends_anywhere_before_its_verdict_is_a_node_that_is_missing(
    read: Read, passed: list[str]
) -> None:
    lines = passed[1].splitlines()
    verdict = next(at for at, line in enumerate(lines) if '{"muster":"closed"' in line)
    for at in range(1, verdict + 1):
        # in the middle of a line, too
        found = read(passed[0], "\n".join([*lines[:at], lines[at][: len(lines[at]) // 2]]))
        assert found.verdict is Verdict.NOT_READY
        missing = {node.host: node.missing for node in found.nodes}
        assert missing["demo-0"] is None
        assert str(missing["demo-1"]).startswith("its log ends ")
        assert any("demo-1" in each.what for each in errors(found)), at


def test_a_cut_log_says_during_which_step_and_what_was_said_last(
    read: Read, passed: list[str]
) -> None:
    head, _, _ = passed[1].partition('{"muster":"began","host":"demo-1","step":"memlock"}')
    found = read(
        passed[0], f'{head}{{"muster":"began","host":"demo-1","step":"memlock"}}\nKilled\n'
    )
    assert found.nodes[1].missing == "its log ends during memlock"
    (error,) = errors(found)
    assert error.where == "demo-1: memlock"
    assert error.evidence.endswith("Killed")
    assert step(found, "shm_size").measure == "64 MiB"


def test_a_pod_whose_log_is_not_there_is_named(read: Read, passed: list[str]) -> None:
    found = read(passed[1])
    assert found.verdict is Verdict.NOT_READY
    assert {node.host: node.missing for node in found.nodes} == {
        "demo-1": None,
        "demo-0": "no log of it is here",
    }
    (error,) = errors(found)
    assert (error.where, error.what) == ("demo-0", "1 of 2 nodes left no log")


def test_an_elastic_job_is_whole_with_the_least_of_its_nodes(read: Read, tmp_path: Path) -> None:
    found = read(pods.pod(tmp_path, 0, nnodes="1:2").text)
    assert (found.verdict, len(found.nodes)) == (Verdict.READY, 1)


def test_of_pods_that_replaced_each_other_the_last_counts(
    read: Read, passed: list[str], refused: str
) -> None:
    earlier = re.sub(r'"started":"\d{4}', '"started":"2020', refused)
    assert read(*passed, earlier).verdict is Verdict.READY
    assert read(earlier, *passed).verdict is Verdict.READY
    # in one file, in the order in which kubectl lists the pods
    together = [*prefixed(passed[0], 0), *prefixed(passed[1], 1), *prefixed(earlier, 1)]
    assert read("\n".join(together)).verdict is Verdict.READY


def test_a_suite_that_died_in_a_pod_is_a_finding_of_that_node(
    read: Read, passed: list[str], tmp_path: Path
) -> None:
    found = read(passed[0], pods.pod(tmp_path, 1, memlock=pods.DIES).text)
    (error,) = errors(found)
    assert error.where == "demo-1: memlock"
    assert error.what == "the node steps broke off (exit code 9)"


def test_a_refusal_whose_reason_was_lost_stays_a_refusal(
    read: Read, passed: list[str], refused: str
) -> None:
    kept = [line for line in refused.splitlines() if '"name":"memlock"' not in line]
    (error,) = errors(read(passed[0], "\n".join(kept)))
    assert error.what == "demo-1 is NOT READY, and its log does not hold why"


def test_a_log_without_its_begin_is_still_a_node(read: Read, passed: list[str]) -> None:
    _, _, tail = passed[1].partition("\n")
    found = read(passed[0], tail)
    assert [node.host for node in found.nodes] == ["demo-0", "demo-1"]
    assert errors(found) == []


# ---- wrong input -------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "epoch 1\nloss 0.3\n", '{"muster": "ended"}\n', "\0" * 99])
def test_a_log_of_something_else_is_refused_by_its_name(
    read: Read, passed: list[str], text: str
) -> None:
    with pytest.raises(
        PodLogWithoutResults, match=r"1\.log has no results of a preflight"
    ) as raised:
        read(passed[0], text)
    assert "./invokew explain" in raised.value.remedy


@pytest.mark.parametrize(
    "line",
    [
        '{"muster":"ended","host":"demo-0"}',
        '{"muster":"ended","host":"demo-0","step":{"name":"x"}}',
        '{"muster":"elsewhere","host":"demo-0"}',
        '{"muster":"began","host":7,"step":"memlock"}',
        '{"muster":"closed","host":"demo-0","verdict":"MAYBE","seconds":1}',
        '{"muster":"nccl","host":"demo-0","packed":"no base64!"}',
        '{"muster":"nccl","host":"demo-0","packed":"bm8gemxpYg=="}',
        '{"muster":"opened","host":"demo-0","schema":99}',
    ],
)
def test_a_line_that_no_preflight_of_this_muster_wrote_is_named(read: Read, line: str) -> None:
    with pytest.raises(PodLogBroken, match=r"0\.log:2: ") as raised:
        read(f"first\n{line}\n")
    assert isinstance(raised.value, WrongInput)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogUnreadable):
        podlogs.read([tmp_path / "absent.log"])


def test_what_a_terminal_would_obey_is_gone(read: Read) -> None:
    finding = Finding.from_dict({**pods.FINDING, "evidence": "\x1b]0;owned\x07red\nand \x9bmore"})
    closed = Closed(verdict=Verdict.NOT_READY, seconds=1.0)
    written = [podlines.line("\x1b[31mdemo-0", each) for each in (Found(finding), closed)]
    found = read("\n".join(written))
    (node,) = found.nodes
    assert node.host == "demo-0"
    assert errors(found)[0].evidence == "red\nand more"


def test_nnodes_that_are_none_name_nobody(read: Read, passed: list[str]) -> None:
    odd = [re.sub(r'"nnodes":"2"', '"nnodes":"many"', log) for log in passed]
    assert len(read(*odd).nodes) == 2
    assert len(read(odd[0]).nodes) == 1


# ---- lines -------------------------------------------------------------------------------------


def test_every_line_of_a_pod_fits_what_a_container_runtime_keeps_in_one(
    passed: list[str],
) -> None:
    records = [line for line in passed[0].splitlines() if line.startswith('{"muster":')]
    assert len(records) > 10
    assert max(map(len, records)) < 2**14
    assert all(line.isascii() for line in records)


def test_nccls_lines_come_back_as_they_were() -> None:
    said = pods.NCCL.read_text() * 10
    pieces = list(podlines.packed(said))
    assert len(pieces) > 1
    assert "".join(each.text for each in pieces) == said
    assert max(len(podlines.line("demo-0", each)) for each in pieces) < 2**14


def test_a_piece_that_unpacks_to_too_much_is_cut() -> None:
    bomb = base64.b64encode(zlib.compress(b"\0" * 2**26)).decode()
    assert len(Nccl(bomb).text) < 2**23


def test_a_line_of_another_program_is_none_of_ours() -> None:
    for text in ("", "a line", '{"script": "bandwidth"}', '{"muster":"began","host":"de'):
        assert podlines.read(text, str) is None
    assert podlines.read(podlines.line("demo-0", Began("memlock")), str) == (
        "demo-0",
        Began("memlock"),
    )


# ---- the command -------------------------------------------------------------------------------


def report(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "invoke", "report", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_command_writes_what_people_and_machines_read(
    tmp_path: Path, passed: list[str]
) -> None:
    log = tmp_path / "pods.log"
    log.write_text("".join(passed))
    kept = {name: tmp_path / f"report.{name}" for name in ("json", "junit", "html")}
    done = report(*(f"--{name}={path}" for name, path in kept.items()), "--", str(log))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip().splitlines()[-1] == "READY"
    assert dossier.read(kept["json"]) == podlogs.read([log])
    assert b"nodes_bandwidth" in kept["junit"].read_bytes()
    assert b"demo-1" in kept["html"].read_bytes()


def test_the_command_ends_with_1_when_a_pod_was_refused(tmp_path: Path, refused: str) -> None:
    (tmp_path / "pod-1.log").write_text(refused)
    # a folder of logs
    done = report("--", str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.rstrip().splitlines()[-1] == "NOT READY"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "there is no log to read"),
        (("--", "absent.log"), "there is no log 'absent.log'"),
        (("--", "README.md"), "README.md has no results of a preflight"),
    ],
)
def test_the_command_ends_with_2_for_what_it_cannot_read(words: tuple[str, ...], says: str) -> None:
    done = report(*words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"muster: {says}")
    assert "  do: " in done.stderr
