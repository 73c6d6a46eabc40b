"""Results for people and machines."""

import io
import json
import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from muster import image, report
from muster.engine import Image
from muster.errors import CannotWrite
from muster.finding import Finding, Outcome, Severity, verdict
from muster.smoke import Result
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


def step(name: str, outcome: Outcome, *findings: Finding, output: str = "") -> Step:
    return Step(name, outcome, 1.25, 30.0, f"measure of [{name}]", findings, output)


def result(*steps: Step, others: tuple[Finding, ...] = ()) -> Result:
    findings = (*others, *(each for one in steps for each in one.findings))
    return Result(
        verdict=verdict(findings), run={"gpus": "none"}, steps=steps, findings=findings, seconds=4.5
    )


PASSED = step("versions", Outcome.PASSED)
SKIPPED = step("rdma", Outcome.NOT_APPLICABLE)
FAILED = step("memlock", Outcome.FAILED, finding(), output="+ mlock")


def shown(found: Result, *, terminal: bool = False) -> str:
    output = io.StringIO()
    console = Console(
        file=output,
        width=100,
        soft_wrap=True,
        force_terminal=terminal,
        color_system="standard" if terminal else None,
    )
    console.print(report.smoke(found))
    return output.getvalue()


def test_the_table_has_a_line_a_step_and_the_verdict_stands_alone_at_the_end() -> None:
    lines = [line.split() for line in shown(result(PASSED, SKIPPED, FAILED)).splitlines()]
    assert lines[1:5] == [
        ["step", "outcome", "seconds", "measure"],
        ["versions", "passed", "1.2", "measure", "of", "[versions]"],
        ["rdma", "not", "applicable", "1.2", "measure", "of", "[rdma]"],
        ["memlock", "failed", "1.2", "measure", "of", "[memlock]"],
    ]
    assert lines[-1] == ["NOT", "READY"]
    assert shown(result(PASSED)).splitlines()[-1] == "READY"


def test_a_finding_is_shown_whole() -> None:
    text = shown(result(FAILED))
    assert "error in memlock: mlock [fails]" in text
    for name, words in (("evidence", "mlock: no"), ("cause", "the limit"), ("remedy", "raise it")):
        assert f"{name} {words}" in text
    assert "limit 64 KiB" in text


def test_a_parametrized_step_keeps_its_brackets() -> None:
    parametrized = Step("all_reduce[nccl]", Outcome.PASSED, 1.0, None, "", (), "")
    assert "all_reduce[nccl]" in shown(result(parametrized))


@pytest.mark.parametrize(("steps", "colour"), [((PASSED,), "32"), ((FAILED,), "31")])
def test_the_verdict_has_its_colour_on_a_terminal(steps: tuple[Step, ...], colour: str) -> None:
    assert re.search(rf"\x1b\[1;{colour}m(NOT )?READY", shown(result(*steps), terminal=True))


@pytest.mark.parametrize(("built", "words"), [(True, "built"), (False, "up to date")])
def test_a_build_is_one_line(built: bool, words: str) -> None:
    found = Image("muster:cpu", "sha256:0123456789abcdef", 1_500_000_000, {}, "amd64")
    line = report.build(image.Result(found, built, False, 12.34))
    assert line == f"muster:cpu 0123456789ab 1.5 GB, {words} in 12.3 s"


def test_junit_counts_and_tells_what_failed() -> None:
    (suite,) = ET.fromstring(report.junit(result(PASSED, SKIPPED, FAILED)))
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    assert suite.get("time") == "4.500"
    passed, skipped, failed = suite
    assert (passed.get("name"), passed.get("time"), list(passed)) == ("versions", "1.250", [])
    assert [child.tag for child in skipped] == ["skipped"]
    assert skipped[0].get("message") == "measure of [rdma]"
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
    assert (found["schema"], found["command"], found["verdict"]) == (1, "smoke", "NOT READY")
    assert found["run"] == {"gpus": "none"}
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
