"""Reports side by side: who is behind, who is odd, and what cannot be compared."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.conftest import ROOT
from tests.unit.dossiers import cluster, dossier, node, written

from muster.compare import Comparison, compare
from muster.dossier import Dossier, ImageRef
from muster.errors import (
    ReportBroken,
    ReportOfOtherSchema,
    ReportsOfDifferentImages,
    ReportUnreadable,
    TooFewReports,
)
from muster.finding import Outcome, Severity

COMMAND = (sys.executable, "-m", "muster", "compare")


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """./invokew compare, as a user runs it in `folder`."""
    plain = {name: text for name, text in os.environ.items() if name != "FORCE_COLOR"}
    return subprocess.run(
        [*COMMAND, *words],
        cwd=folder,
        env={**plain, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )


def compared(folder: Path, *found: Dossier) -> Comparison:
    return compare([written(folder / f"{at}.json", each) for at, each in enumerate(found)])


def test_nodes_that_are_alike_are_ranked_and_none_is_odd(tmp_path: Path) -> None:
    found = compared(tmp_path, dossier("a", 350), dossier("b", 360), dossier("c", 355))
    assert [rank.node for rank in found.ranks] == ["b", "c", "a"]
    assert (found.findings, found.differences) == ((), ())
    assert len(found.rankings) == 12


def test_a_slow_node_is_named_once_with_the_figures_of_all(tmp_path: Path) -> None:
    found = compared(tmp_path, dossier("a"), dossier("b", 200), dossier("c"))
    (finding,) = found.findings
    assert (finding.severity, finding.where) == (Severity.ERROR, "b")
    assert finding.what.startswith("b is 44% behind the other nodes in ")
    assert finding.evidence == "nccl-tests, 8 GiB, busbw in GB/s: a 359.7, c 359.7, b 199.9"
    assert [rank.node for rank in found.ranks] == ["a", "c", "b"]
    # a slow one among the others makes none of them fast
    assert [rank.ratio for rank in found.ranks[:2]] == [1, 1]


def test_of_two_nodes_the_slower_is_named_and_no_fact_is_odd(tmp_path: Path) -> None:
    other = replace(dossier("b", 200), versions={"torch": "2.9.1"})
    found = compared(tmp_path, dossier("a"), other)
    (finding,) = found.findings
    assert finding.what.startswith("b is 44% behind the other nodes in ")
    assert "version of torch" in {each.what for each in found.differences}


def test_who_alone_has_another_driver_is_odd(tmp_path: Path) -> None:
    other = replace(dossier("c"), nodes=(node("c", driver="570.86.15"),))
    found = compared(tmp_path, dossier("a"), dossier("b"), other)
    (finding,) = found.findings
    assert (finding.severity, finding.where) == (Severity.WARNING, "c")
    assert finding.what == "c alone differs in driver"
    assert "c: 570.86.15; the other 2: 580" in finding.evidence


def test_two_against_two_are_different_and_none_is_odd(tmp_path: Path) -> None:
    nodes = [node(host, driver="570" if host in "cd" else "580") for host in "abcd"]
    found = compared(tmp_path, *(replace(dossier(n.host), nodes=(n,)) for n in nodes))
    (difference,) = found.differences
    assert difference.values == {"580": ("a", "b"), "570": ("c", "d")}
    assert found.findings == ()


def test_what_moves_on_a_node_that_is_well_is_no_difference(tmp_path: Path) -> None:
    nodes = [node(host, shm=f"63.{at} GiB free of 64 GiB") for at, host in enumerate("abc")]
    found = compared(tmp_path, *(replace(dossier(n.host), nodes=(n,)) for n in nodes))
    assert (found.differences, found.findings) == ((), ())


def test_who_alone_fails_a_step_is_odd_and_does_not_apply_is_no_failure(tmp_path: Path) -> None:
    steps = dossier().steps
    failing = (replace(steps[0], outcome=Outcome.FAILED), *steps[1:])
    skipping = (*steps[:2], replace(steps[2], outcome=Outcome.NOT_APPLICABLE), steps[3])
    found = compared(
        tmp_path,
        dossier("a"),
        replace(dossier("b"), steps=failing),
        replace(dossier("c"), steps=skipping),
    )
    (finding,) = found.findings
    assert (finding.severity, finding.what) == (Severity.ERROR, "b alone differs in step doctor")


def test_the_nodes_of_one_report_are_compared_without_the_one_that_left_none(
    tmp_path: Path,
) -> None:
    found = compared(tmp_path, cluster(4))
    assert {rank.node for rank in found.ranks} == {"gpu-0", "gpu-1", "gpu-2"}
    assert found.missing == ("gpu-3",)
    assert [each.what for each in found.findings] == ["gpu-2 alone differs in driver"]


def test_nodes_of_one_name_are_told_apart_by_their_files(tmp_path: Path) -> None:
    found = compared(tmp_path, dossier("a"), dossier("a", 100), dossier("b"))
    assert [each.where for each in found.findings] == [f"a ({tmp_path / '1.json'})"]


def test_a_busbw_of_nothing_is_behind_and_breaks_nothing(tmp_path: Path) -> None:
    nothing = dossier("c")
    silent = tuple(
        replace(
            each, run=replace(each.run, rows=tuple(replace(r, busbw=0.0) for r in each.run.rows))
        )
        for each in nothing.bandwidth
    )
    found = compared(tmp_path, dossier("a"), dossier("b"), replace(nothing, bandwidth=silent))
    assert [each.where for each in found.findings] == ["c"]
    assert found.ranks[-1].ratio == 0


def test_figures_that_claim_nothing_are_not_ranked(tmp_path: Path) -> None:
    def unclaimed(host: str, peak: float) -> Dossier:
        found = dossier(host, peak)
        none = tuple(replace(each, claimed=False) for each in found.bandwidth)
        return replace(found, bandwidth=none)

    found = compared(tmp_path, unclaimed("a", 1), unclaimed("b", 5))
    assert (found.rankings, found.findings) == ((), ())
    assert [rank.ratio for rank in found.ranks] == [None, None]


def test_reports_of_different_images_are_refused_naming_both(tmp_path: Path) -> None:
    other = replace(dossier("b"), image=ImageRef(ref="muster:cu13", id="sha256:other"))
    with pytest.raises(ReportsOfDifferentImages, match=r"sha256:3f.*sha256:other"):
        compared(tmp_path, dossier("a"), other)
    with pytest.raises(ReportsOfDifferentImages, match="no image"):
        compared(tmp_path, dossier("a"), replace(other, image=None))


def test_a_file_that_is_given_twice_counts_once(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", dossier("a"))
    (tmp_path / "again.json").symlink_to(path)
    with pytest.raises(TooFewReports, match="hold 1 nodes"):
        compare([path, tmp_path / "again.json"])


def test_one_node_is_too_few(tmp_path: Path) -> None:
    with pytest.raises(TooFewReports, match="hold 1 nodes"):
        compared(tmp_path, dossier("a"))


def test_another_schema_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", dossier())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 1}))
    with pytest.raises(ReportOfOtherSchema, match="has schema 1, this Muster reads 2"):
        compare([path])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_truncated_report_is_refused(tmp_path: Path, share: float) -> None:
    path = written(tmp_path / "a.json", dossier())
    text = path.read_text()
    path.write_text(text[: int(len(text) * share)])
    with pytest.raises(ReportBroken, match="not all of it is here"):
        compare([path])


def test_a_report_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportUnreadable, match="No such file"):
        compare([tmp_path / "none.json"])
    with pytest.raises(ReportUnreadable, match="Is a directory"):
        compare([tmp_path])


def test_a_comparison_is_json(tmp_path: Path) -> None:
    found = compared(tmp_path, dossier("a"), dossier("b", 200), dossier("c"))
    told = json.loads(json.dumps(found.to_dict()))
    assert (told["schema"], told["command"]) == (1, "compare")
    assert told["ranks"][-1]["node"] == "b"


# ---- the command --------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a user has reports, with tasks.py beside them for Invoke to find."""
    (tmp_path / "tasks.py").symlink_to(ROOT / "tasks.py")
    written(tmp_path / "a.json", dossier("a"))
    written(tmp_path / "b.json", dossier("b"))
    written(tmp_path / "slow.json", dossier("slow", 200))
    written(tmp_path / "image.json", replace(dossier("c"), image=None))
    whole = (tmp_path / "a.json").read_text()
    (tmp_path / "cut.json").write_text(whole[: len(whole) // 2])
    (tmp_path / "old.json").write_text('{"schema": 1, "command": "smoke", "verdict": "READY"}')
    return tmp_path


def test_nodes_that_are_alike_end_with_0(folder: Path) -> None:
    done = command(folder, "--", "a.json", "b.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "no node is odd"


def test_a_node_that_is_behind_ends_with_1_and_stands_in_the_json(folder: Path) -> None:
    done = command(folder, "--json", "out.json", "--", "a.json", "slow.json", "b.json")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1] == "odd: slow"
    told = json.loads((folder / "out.json").read_text())
    assert [each["where"] for each in told["findings"]] == ["slow"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("a.json cut.json", r"cut\.json: it is not JSON, or not all of it is here"),
        ("a.json old.json", r"old\.json has schema 1, this Muster reads 2"),
        ("a.json image.json", r"a\.json is of the image sha256:3f\w+, image\.json of no image"),
        ("a.json none.json", r"cannot read none\.json: No such file"),
        ("a.json", r"the reports hold 1 nodes"),
        ("", r"the reports hold 0 nodes"),
    ],
)
def test_what_cannot_be_compared_ends_with_2_and_one_message(
    folder: Path, words: str, says: str
) -> None:
    done = command(folder, "--", *words.split())
    assert (done.returncode, done.stdout) == (2, "")
    message, remedy = done.stderr.splitlines()
    assert re.match(rf"muster: .*{says}", message), message
    assert re.match(r"  do: \S", remedy)
