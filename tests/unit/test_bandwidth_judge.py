"""Rows held against what must be right, against a floor and against the other tool."""

import pytest

from muster.bandwidth import floors
from muster.bandwidth.floors import Basis, Floor
from muster.bandwidth.judge import GAP, LARGE_BYTES, gap, judge
from muster.bandwidth.results import Collective, Row, Run, Tool
from muster.finding import Finding, Severity

MIB, GIB = 2**20, 2**30
ACCEPTED = Floor(busbw=460, bytes=16 * GIB, basis=Basis.THRESHOLD, source="https://example.org")
MEASURED = Floor(busbw=333, bytes=GIB, basis=Basis.MEASURED, source="https://example.org")


def row(size: int, busbw: float, wrong: int | None = 0) -> Row:
    return Row(bytes=size, seconds=0.01, algbw=busbw, busbw=busbw, wrong=wrong)


def run(*rows: Row, nranks: int = 8, tool: Tool = Tool.NCCL_TESTS) -> Run:
    return Run(tool=tool, collective=Collective.ALL_REDUCE, nranks=nranks, rows=rows)


def findings(of: Run, floor: Floor | None = None) -> list[Finding]:
    return list(judge(of, floor, "node1"))


def apart(tests: float, torch: float, size: int = GIB) -> list[Finding]:
    return list(gap(run(row(size, tests)), run(row(size, torch), tool=Tool.TORCH), "node1"))


# ---- right and wrong -----------------------------------------------------------------------------


def test_right_results_without_a_floor_are_no_finding() -> None:
    assert findings(run(row(8, 0.1), row(GIB, 3.0))) == []


def test_a_run_without_results_is_an_error_with_the_reason() -> None:
    failed = Run(
        tool=Tool.NCCL_TESTS,
        collective=Collective.ALLTOALL,
        nranks=0,
        rows=(),
        failure="it ended before its results",
    )
    (finding,) = findings(failed, ACCEPTED)
    assert finding.severity is Severity.ERROR
    assert finding.what == "alltoall by nccl-tests has no results"
    assert (finding.where, finding.evidence) == ("node1", "it ended before its results")


def test_wrong_results_are_an_error_however_fast_they_came() -> None:
    (finding,) = findings(run(row(8, 0.1), row(MIB, 40.0, 2), row(16 * GIB, 470.0, 5)), ACCEPTED)
    assert finding.severity is Severity.ERROR
    assert finding.what == "all_reduce by nccl-tests gives wrong results"
    assert "wrong elements: 7 over 8 ranks, in 2 of 3 sizes" in finding.evidence
    assert "smallest has 1048576 bytes" in finding.evidence


def test_results_that_nobody_checked_are_a_warning() -> None:
    (finding,) = findings(run(row(8, 0.1, None), row(GIB, 400.0, None)))
    assert finding.severity is Severity.WARNING
    assert "was not checked" in finding.what


# ---- the floor -----------------------------------------------------------------------------------


def test_the_fastest_large_row_is_held_against_the_floor() -> None:
    assert findings(run(row(16 * GIB, 461.0), row(32 * GIB, 455.0)), ACCEPTED) == []


def test_a_slow_machine_is_refused_with_the_figure_and_its_source() -> None:
    (finding,) = findings(run(row(MIB, 500.0), row(16 * GIB, 431.26)), ACCEPTED)
    assert finding.severity is Severity.ERROR
    assert finding.what.endswith("reaches 431.3 GB/s busbw, under the floor of 460")
    assert finding.evidence.startswith("16 GiB over 8 ranks")
    assert ACCEPTED.source in finding.evidence


def test_under_what_others_measured_is_a_warning() -> None:
    (finding,) = findings(run(row(GIB, 300.0)), MEASURED)
    assert finding.severity is Severity.WARNING
    assert "90% of what others measured" in finding.evidence


def test_small_buffers_are_not_held_against_a_floor_and_that_is_said() -> None:
    (finding,) = findings(run(row(8, 0.0), row(GIB, 200.0)), ACCEPTED)
    assert finding.severity is Severity.WARNING
    assert finding.what.endswith("was not held against its floor")
    assert "for 16 GiB and more, and the largest buffer had 1 GiB" in finding.evidence


@pytest.mark.parametrize(("busbw", "found"), [(299.9, 1), (300.0, 0)])
def test_the_users_floor_counts_for_any_size(busbw: float, found: int) -> None:
    assert len(findings(run(row(MIB, busbw)), floors.given(300))) == found


@pytest.mark.parametrize("floor", [ACCEPTED, floors.given(300)])
def test_on_one_gpu_no_bandwidth_is_claimed(floor: Floor) -> None:
    assert findings(run(row(16 * GIB, 0.0), nranks=1), floor) == []
    (finding,) = findings(run(row(16 * GIB, 0.0, 3), nranks=1), floor)
    assert "wrong results" in finding.what


# ---- side by side --------------------------------------------------------------------------------


@pytest.mark.parametrize(("tests", "torch"), [(400.0, 400.0), (400.0, 361.0), (361.0, 400.0)])
def test_two_tools_within_ten_percent_agree(tests: float, torch: float) -> None:
    assert apart(tests, torch) == []


@pytest.mark.parametrize(
    ("tests", "torch", "slower"), [(400.0, 300.0, "torch"), (300.0, 400.0, "nccl-tests")]
)
def test_a_wider_gap_names_the_slower_one(tests: float, torch: float, slower: str) -> None:
    (finding,) = apart(tests, torch)
    assert finding.severity is Severity.WARNING
    assert finding.what == f"all_reduce: {slower} is 25% slower than the other"
    assert finding.evidence == (f"with 1 GiB: nccl-tests {tests:.1f} GB/s busbw, torch {torch:.1f}")


def test_of_many_sizes_the_widest_gap_is_shown_and_small_ones_do_not_count() -> None:
    tests = run(row(8, 1.0), row(LARGE_BYTES, 100.0), row(GIB, 100.0), row(2 * GIB, 100.0))
    torch = run(row(8, 0.1), row(LARGE_BYTES, 80.0), row(GIB, 50.0), row(4 * GIB, 1.0))
    (finding,) = gap(tests, torch, "node1")
    assert "50% slower" in finding.what
    assert finding.evidence.startswith("with 1 GiB")


def test_no_common_large_size_is_no_gap() -> None:
    assert apart(400.0, 1.0, LARGE_BYTES - 1) == []
    assert list(gap(run(row(GIB, 400.0)), run(row(2 * GIB, 1.0)), "node1")) == []
    assert apart(0.0, 0.0) == []
    assert GAP == 0.1


def test_one_rank_or_a_failed_run_has_no_gap() -> None:
    alone = run(row(GIB, 1.0), nranks=1)
    failed = Run(
        tool=Tool.TORCH, collective=Collective.ALL_REDUCE, nranks=0, rows=(), failure="gone"
    )
    assert list(gap(alone, run(row(GIB, 400.0)), "node1")) == []
    assert list(gap(run(row(GIB, 400.0)), failed, "node1")) == []
