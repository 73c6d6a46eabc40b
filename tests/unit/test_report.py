"""Results for people and machines."""

import io
import json
import os
import re
import stat
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console, RenderableType
from tests.unit.dossiers import cluster, dossier, ill, node, reworded, series, step, written

from muster import image, report
from muster.bandwidth.floors import Basis, Floor
from muster.bandwidth.results import Collective, Tool
from muster.bandwidth.series import Series
from muster.compare import compare
from muster.dossier import Dossier, Watched
from muster.engine import Image
from muster.errors import CannotWrite
from muster.finding import Finding, Outcome, Severity, verdict
from muster.steps import Step


def finding(severity: Severity = Severity.ERROR, where: str = "memlock") -> Finding:
    return Finding(
        severity=severity,
        what="mlock [fails]",
        where=where,
        evidence="mlock: no\nlimit 64 KiB",
        cause="the limit",
        remedy="raise it",
    )


def result(*steps: Step, others: tuple[Finding, ...] = ()) -> Dossier:
    """A run that tells of its steps alone."""
    findings = (*others, *(each for one in steps for each in one.findings))
    return replace(
        dossier(),
        verdict=verdict(findings),
        steps=steps,
        findings=findings,
        seconds=4.5,
        nodes=(),
        bandwidth=(),
    )


PASSED = step("versions", Outcome.PASSED, "torch [2.14]")
SKIPPED = step("rdma", Outcome.NOT_APPLICABLE, "no HCA")
FAILED = step("memlock", Outcome.FAILED, "64 KiB", finding(), output="+ mlock")
NOT_RUN = step("nccl_tests", Outcome.NOT_RUN, "memlock failed, and this stands on it")


def printed(what: RenderableType, *, width: int = 100, terminal: bool = False) -> str:
    output = io.StringIO()
    console = Console(
        file=output,
        width=width,
        soft_wrap=True,
        force_terminal=terminal,
        color_system="standard" if terminal else None,
    )
    console.print(what)
    return output.getvalue()


def shown(found: Dossier, *, terminal: bool = False) -> str:
    return printed(report.smoke(found), terminal=terminal)


def lines_of(text: str) -> list[str]:
    """Without the blanks that only fill columns."""
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_table_has_a_line_a_step_and_the_verdict_stands_alone_at_the_end() -> None:
    lines = lines_of(shown(result(PASSED, SKIPPED, FAILED, NOT_RUN)))
    assert lines[1:6] == [
        "step outcome seconds measure",
        "versions passed 4.2 torch [2.14]",
        "rdma not applicable 4.2 no HCA",
        "memlock failed 4.2 64 KiB",
        "nccl_tests not run memlock failed, and this stands on it",
    ]
    assert lines[-1] == "NOT READY"
    assert lines_of(shown(result(PASSED)))[1:] == [*lines[1:3], "", "READY"]


def test_a_finding_is_shown_whole() -> None:
    text = shown(result(FAILED))
    assert "error in memlock: mlock [fails]" in text
    for name, words in (("evidence", "mlock: no"), ("cause", "the limit"), ("remedy", "raise it")):
        assert f"{name} {words}" in text
    assert "limit 64 KiB" in text


@pytest.mark.parametrize(("steps", "colour"), [((PASSED,), "32"), ((FAILED,), "31")])
def test_the_verdict_has_its_colour_on_a_terminal(steps: tuple[Step, ...], colour: str) -> None:
    assert re.search(rf"\x1b\[1;{colour}m(NOT )?READY", shown(result(*steps), terminal=True))


def test_each_outcome_has_a_look_of_its_own_on_a_terminal() -> None:
    text = shown(result(PASSED, SKIPPED, FAILED, NOT_RUN), terminal=True)
    words = ("passed", "not applicable", "failed", "not run")
    looks = [re.search(rf"(\x1b\[[0-9;]+m){word}", text) for word in words]
    assert len({look[1] for look in looks if look}) == 4


# ---- what to watch ------------------------------------------------------------------------------


def test_nodes_that_chose_alike_are_one_line() -> None:
    alike = replace(dossier(), nodes=tuple(map(node, ("a", "b", "c"))))
    lines = lines_of(shown(alike))
    at = lines.index("nodes network GPUs talk by rings and trees")
    told = "IB, GPUDirect NET/IB/GDRDMA, P2P/CUMEM 16 rings, trees, 16 NVLS channels"
    assert lines[at + 1 : at + 3] == [f"all nodes {told}", ""]


def test_a_node_that_chose_otherwise_has_its_own_line() -> None:
    slow = Watched(
        networks=("Socket",),
        gpu_direct=None,
        links={"NET/Socket": 2},
        rings=2,
        trees=False,
        nvls=0,
    )
    nodes = (*map(node, ("a", "b")), replace(node("c"), watched=slow))
    lines = lines_of(shown(replace(dossier(), nodes=nodes)))
    at = lines.index("nodes network GPUs talk by rings and trees")
    assert lines[at + 1].startswith("a, b IB, GPUDirect")
    assert lines[at + 2] == "c Socket NET/Socket 2 rings"


def test_where_no_nccl_ran_there_is_nothing_to_watch() -> None:
    silent = replace(node("a"), watched=None)
    assert "network" not in shown(replace(dossier(), nodes=(silent,)))
    lines = lines_of(shown(replace(dossier(), nodes=(node("b"), silent))))
    assert "a no NCCL ran" in lines


def test_a_node_that_is_missing_is_named_with_the_reason() -> None:
    lines = lines_of(shown(cluster(4)))
    assert "gpu-3 is missing: its container ended (137) during ddp_demo" in lines
    assert lines[-1] == "NOT READY"
    gone = tuple(replace(each, missing="ssh: refused", watched=None) for each in cluster(40).nodes)
    lines = lines_of(shown(replace(cluster(4), nodes=gone, bandwidth=())))
    assert sum(" is missing: " in line for line in lines) == 12
    assert "28 more are missing: --json FILE has them all" in lines


def test_nodes_that_are_all_unlike_are_not_all_shown() -> None:
    unlike = [
        replace(each, watched=each.watched and replace(each.watched, rings=at))
        for at, each in enumerate(map(node, map(str, range(30))))
    ]
    lines = lines_of(shown(replace(dossier(), nodes=tuple(unlike))))
    assert "18 more: --json FILE has them all" in lines


# ---- bandwidth ----------------------------------------------------------------------------------


def bandwidth_lines(*bandwidth: Series) -> list[str]:
    found = replace(dossier(), bandwidth=bandwidth)
    lines = lines_of(shown(found))
    at = lines.index("collective tool size busbw GB/s floor ranks between")
    return lines[at + 1 : lines.index("", at)]


SERIES = series(Collective.ALL_REDUCE, Tool.TORCH, 360, "gpu-1")
FLOOR = Floor(busbw=330, bytes=2**30, basis=Basis.GIVEN, source="--floor")


def test_a_bandwidth_stands_beside_its_floor() -> None:
    assert bandwidth_lines(replace(SERIES, floor=FLOOR), SERIES) == [
        "all_reduce torch 8 GiB 359.7 330 8 gpu-1 (slowest of 2)"
    ]
    tests = series(Collective.ALL_REDUCE, Tool.NCCL_TESTS, 300, "gpu-1")
    assert bandwidth_lines(replace(SERIES, floor=FLOOR), tests) == [
        "all_reduce torch 8 GiB 359.7 330 8 gpu-1",
        "all_reduce nccl-tests 8 GiB 299.8 none 8 gpu-1",
    ]


def test_what_is_under_its_floor_is_marked() -> None:
    for busbw, marked in ((330.0, False), (400.0, True)):
        floor = replace(FLOOR, busbw=busbw)
        found = replace(dossier(), bandwidth=(replace(SERIES, floor=floor),))
        red = re.search(r"\x1b\[1;31m *359\.7", shown(found, terminal=True))
        assert (red is not None) is marked


@pytest.mark.parametrize(
    ("backend", "nranks", "why"),
    [
        ("gloo", 2, "gloo on a CPU shows that it works, not how fast a link is"),
        ("nccl", 1, "with one rank nothing crosses a link"),
        ("nccl", 2, "nccl here shows that it works, not how fast a link is"),
    ],
)
def test_what_is_not_claimed_says_so_once_and_why(backend: str, nranks: int, why: str) -> None:
    found = [
        replace(series(each, Tool.TORCH, 2, "gpu-1", nranks=nranks), claimed=False, backend=backend)
        for each in (Collective.ALL_REDUCE, Collective.BROADCAST)
    ]
    *rows, reason = bandwidth_lines(*found)
    assert rows == [
        f"{each} torch 8 GiB 2 not claimed {nranks} gpu-1" for each in ("all_reduce", "broadcast")
    ]
    assert reason == f"not claimed: {why}"


def test_a_run_that_failed_has_no_result() -> None:
    failed = replace(SERIES, run=replace(SERIES.run, rows=(), failure="NCCL error"))
    assert bandwidth_lines(failed) == ["all_reduce torch no result none 8 gpu-1"]


def test_of_many_groups_the_slowest_is_shown() -> None:
    pairs = [
        series(Collective.ALL_REDUCE, Tool.TORCH, 80 if pair == ("a", "c") else 170, *pair)
        for pair in (("a", "b"), ("a", "c"), ("b", "c"))
    ]
    assert bandwidth_lines(*pairs) == ["all_reduce torch 8 GiB 79.99 none 8 a, c (slowest of 3)"]


@pytest.mark.parametrize("found", [dossier(), ill(), cluster(8)], ids=["well", "ill", "cluster"])
def test_a_run_is_readable_in_80_columns_without_a_terminal(found: Dossier) -> None:
    text = printed(report.smoke(found), width=80)
    assert "\x1b" not in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_no_text_of_a_run_moves_the_terminals_cursor() -> None:
    def word(text: str) -> str:
        return f"\x1b[2J\x1b]0;title\x07\r\ud800{text}"

    for found in (reworded(ill(), word), reworded(cluster(3), word)):
        assert not set(shown(found)) & set("\x1b\x07\r\ud800")


# ---- reports side by side -----------------------------------------------------------------------


def compared(folder: Path, *found: Dossier) -> list[str]:
    paths = [written(folder / f"{at}.json", each) for at, each in enumerate(found)]
    return lines_of(printed(report.compare(compare(paths)), width=80))


def test_the_slowest_node_is_last_and_named_at_the_end(tmp_path: Path) -> None:
    lines = compared(tmp_path, dossier("a"), dossier("b", 200), dossier("c"))
    assert lines[1:6] == ["node busbw to the others' median", "a 100%", "c 100%", "b 56%", ""]
    assert "all_reduce nccl-tests 8 GiB 359.7 a 199.9 b" in lines
    assert "error in b: b is 44% behind the other nodes in all_reduce" in lines
    assert lines[-1] == "odd: b"


def test_what_differs_is_told_with_who_has_it_and_who_was_not_compared(tmp_path: Path) -> None:
    lines = compared(tmp_path, cluster(4))
    at = lines.index("differs value nodes")
    assert lines[at + 1 : at + 3] == [
        "driver 580.95.05, CUDA 13.0, open kernel modules gpu-0, gpu-1",
        "570.86.15, CUDA 12.8, open kernel modules gpu-2",
    ]
    assert "not compared, for they are missing: gpu-3" in lines
    assert lines[-1] == "odd: gpu-2"


def test_no_text_of_a_report_moves_the_terminals_cursor(tmp_path: Path) -> None:
    def word(text: str) -> str:
        return f"\x1b[2J\r\u202e{text}"

    found = replace(dossier("c"), nodes=(node("c", driver="570"),))
    told = "".join(
        compared(tmp_path, *(reworded(each, word) for each in (dossier("a"), dossier("b"), found)))
    )
    assert "alone differs in driver" in told
    assert not set(told) & set("\x1b\r\u202e")


def test_nodes_that_are_alike_end_in_one_word_for_it(tmp_path: Path) -> None:
    lines = compared(tmp_path, dossier("a"), dossier("b"))
    assert lines[-1] == "no node is odd"
    assert "differs value nodes" not in lines


def test_of_many_nodes_the_fastest_and_of_many_values_the_rarest_are_left_out(
    tmp_path: Path,
) -> None:
    hosts = [f"n{at:02}" for at in range(50)]
    unlike = [node(host, driver=str(at // 2)) for at, host in enumerate(hosts)]
    speeds = [
        series(Collective.ALL_REDUCE, Tool.TORCH, 400 - at, host) for at, host in enumerate(hosts)
    ]
    found = replace(dossier(), nodes=tuple(unlike), bandwidth=tuple(speeds))
    lines = compared(tmp_path, found)
    assert lines[2] == "10 faster ones"
    assert lines[3].startswith("n10 ")
    assert "21 more values are in --json FILE" in lines


# ---- builds, files ------------------------------------------------------------------------------


@pytest.mark.parametrize(("built", "words"), [(True, "built"), (False, "up to date")])
def test_a_build_is_one_line(built: bool, words: str) -> None:
    found = Image("muster:cpu", "sha256:0123456789abcdef", 1_500_000_000, {}, "amd64")
    line = report.build(image.Result(found, built, False, 12.34))
    assert line == f"muster:cpu 0123456789ab 1.5 GB, {words} in 12.3 s"


def test_junit_counts_and_tells_what_failed() -> None:
    (suite,) = ET.fromstring(report.junit(result(PASSED, SKIPPED, FAILED, NOT_RUN)))
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "1", "2")
    assert suite.get("time") == "4.500"
    passed, skipped, failed, not_run = suite
    assert (passed.get("name"), passed.get("time"), list(passed)) == ("versions", "4.200", [])
    assert [child.tag for child in skipped] == [child.tag for child in not_run] == ["skipped"]
    assert skipped[0].get("message") == "no HCA"
    assert not_run[0].get("message") == "not run: memlock failed, and this stands on it"
    assert [child.tag for child in failed] == ["failure", "system-out"]
    assert failed[0].get("message") == "mlock [fails]"
    assert "remedy: raise it" in (failed[0].text or "")
    assert failed[1].text == "+ mlock"


def test_junit_of_what_is_not_ready_has_a_failure() -> None:
    others = finding(where="the Docker Engine"), finding(Severity.WARNING, where="elsewhere")
    broken_off = result(PASSED, others=others)
    (suite,) = ET.fromstring(report.junit(broken_off))
    assert int(suite.get("failures", 0)) + int(suite.get("errors", 0)) == 1
    assert [case.get("name") for case in suite if len(case)] == ["the Docker Engine"]


@pytest.mark.parametrize("character", ["\x1b", "\0", "\x0b", "\ud800", "\ufffe", "\uffff"])
def test_junit_is_xml_whatever_a_step_printed(character: str) -> None:
    printed = f"<&>\t\n\N{GRINNING FACE}\ue000{character}"
    (suite,) = ET.fromstring(report.junit(result(step("a", Outcome.PASSED, output=printed))))
    assert suite[0][0].text == "<&>\t\n\N{GRINNING FACE}\ue000\N{REPLACEMENT CHARACTER}"


def test_a_result_as_json_says_everything(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    report.write_json(path, result(PASSED, FAILED).to_dict())
    found = json.loads(path.read_text())
    assert (found["schema"], found["command"], found["verdict"]) == (2, "smoke", "NOT READY")
    assert found["run"]["engine"] == "28.2.2"
    assert [each["outcome"] for each in found["steps"]] == ["passed", "failed"]
    assert found["findings"] == [finding().to_dict()] == found["steps"][1]["findings"]


@pytest.mark.parametrize(
    ("name", "why"),
    [("", "it is a folder"), ("absent/out.json", "there is no folder"), ("file/x", "there is no")],
)
def test_a_path_that_cannot_be_written_is_refused_beforehand(
    tmp_path: Path, name: str, why: str
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotWrite, match=rf"cannot write {tmp_path / name}: {why}"):
        report.check_writable(tmp_path / name)


def test_a_path_that_can_be_written_is_not_touched_beforehand(tmp_path: Path) -> None:
    report.check_writable(tmp_path / "out.json")
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_nothing_half_made(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    (target / "in the way").mkdir(parents=True)
    with pytest.raises(CannotWrite, match=r"out\.json"):
        report.write(target, b"{}")
    assert list(tmp_path.iterdir()) == [target]


def test_a_device_is_never_replaced_by_a_file(tmp_path: Path) -> None:
    link = tmp_path / "null"
    link.symlink_to(os.devnull)
    with suppress(CannotWrite):
        report.check_writable(link)
        report.write(link, b"{}")
    assert stat.S_ISCHR(link.stat().st_mode)
