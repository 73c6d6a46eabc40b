"""The steps `nccl_tests` and `bandwidth` on made machines: what is judged, kept and reported."""

import dataclasses
from pathlib import Path

import pytest
from tests.unit.standins.machine import H100, Machine, gpus

from muster.bandwidth.results import Collective, Tool
from muster.bandwidth.series import Series
from muster.finding import Outcome, Severity
from muster.steps import Log, Step

GIB = 2**30
BOTH = "nccl_tests,bandwidth"
# over the floors of floors.toml for eight of them
FAST = {"all_reduce": 480.0, "all_gather": 380.0, "reduce_scatter": 380.0}
EIGHT = Machine(gpus=gpus(8), nccl_tests=FAST, torch=FAST)
CPU = Machine(has_control=False)

OWN_FLOORS = """\
schema = 1
[[floor]]
gpu = "NVIDIA L40S"
link = "pcie"
nranks = 4
collectives = ["all_reduce"]
bytes = 1048576
threshold_gb_s = 18.5
source = "our own acceptance test"
"""


def whats(step: Step) -> list[str]:
    return [finding.what for finding in step.findings]


def of(log: Log, collective: Collective, tool: Tool = Tool.NCCL_TESTS) -> Series:
    (found,) = (
        series
        for series in log.series
        if (series.run.collective, series.run.tool) == (collective, tool)
    )
    return found


# ---- a machine that is well ----------------------------------------------------------------------


def test_a_fast_machine_passes_both_steps_and_its_six_collectives_are_kept(tmp_path: Path) -> None:
    log = EIGHT.run(tmp_path, BOTH, 8)
    assert [(step.outcome, step.findings) for step in log.steps] == [(Outcome.PASSED, ())] * 2
    measure = "6 collectives, all_reduce 480 GB/s busbw (16 GiB)"
    assert [step.measure for step in log.steps] == [measure, measure]
    assert [series.run.collective for series in log.series] == [*Collective] * 2
    assert {(series.backend, series.nodes, series.claimed) for series in log.series} == {
        ("nccl", ("node-0",), True)
    }
    # and what NCCL wrote in every program
    assert sorted(log.nccl["nccl_tests"]) == [
        f"NCCL INFO stand-in of {collective}\n" for collective in sorted(Collective)
    ]


def test_sizes_go_from_8_bytes_to_what_memory_and_the_floor_want(tmp_path: Path) -> None:
    log = EIGHT.run(tmp_path, BOTH, 8)
    largest = {
        collective: max(row.bytes for row in of(log, collective).run.rows)
        for collective in Collective
    }
    # the floor of all_reduce is for 16 GiB, that of all_gather for 1 GiB
    assert largest.pop(Collective.ALL_REDUCE) == 16 * GIB
    assert set(largest.values()) == {8 * GIB}
    assert {min(row.bytes for row in series.run.rows) for series in log.series} == {8}
    floor = of(log, Collective.ALL_REDUCE, Tool.TORCH).floor
    assert floor is not None
    assert (floor.busbw, floor.bytes) == (460, 16 * GIB)
    assert of(log, Collective.SENDRECV).floor is None


def test_fewer_ranks_than_gpus_use_as_many_and_have_no_floor_of_a_full_node(
    tmp_path: Path,
) -> None:
    log = EIGHT.run(tmp_path, BOTH, 4)
    assert {(series.run.nranks, series.floor) for series in log.series} == {(4, None)}
    assert max(row.bytes for row in of(log, Collective.ALL_REDUCE).run.rows) == 8 * GIB


def test_on_one_gpu_all_is_checked_and_no_bandwidth_claimed(tmp_path: Path) -> None:
    machine = Machine(gpus=gpus(1))
    log = machine.run(tmp_path, BOTH, 1, "--floors", "300")
    assert [(step.outcome, step.findings) for step in log.steps] == [(Outcome.PASSED, ())] * 2
    assert [step.measure for step in log.steps] == [
        "6 collectives right to 1 GiB; one rank crosses no link",
        # torch lets no rank send to itself
        "5 collectives right to 1 GiB; one rank crosses no link",
    ]
    assert {(series.claimed, series.floor) for series in log.series} == {(False, None)}


def test_without_a_gpu_nccl_tests_do_not_apply_and_gloo_is_measured(tmp_path: Path) -> None:
    nccl_tests, bandwidth = (log := CPU.run(tmp_path, BOTH, 2)).steps
    assert (nccl_tests.outcome, nccl_tests.measure) == (Outcome.NOT_APPLICABLE, "no GPU here")
    assert (bandwidth.outcome, bandwidth.findings) == (Outcome.PASSED, ())
    assert bandwidth.measure == "6 collectives by gloo, all_reduce 94.4 GB/s busbw (16 MiB)"
    assert {(series.backend, series.claimed) for series in log.series} == {("gloo", False)}


# ---- what is wrong with a program ----------------------------------------------------------------


def test_all_that_is_wrong_with_nccl_tests_is_said_at_once(tmp_path: Path) -> None:
    faults = {
        "all_reduce": "is wrong",
        "all_gather": "is cut off",
        "reduce_scatter": "has a nan",
        "broadcast": "no results",
        "alltoall": "before JSON",
    }
    log = dataclasses.replace(EIGHT, faults=faults).run(tmp_path, "nccl_tests", 8)
    (step,) = log.steps
    assert step.outcome is Outcome.FAILED
    assert step.measure == "1 of 6 collectives right"
    assert whats(step) == [
        "all_reduce by nccl-tests gives wrong results",
        "all_gather by nccl-tests has no results",
        "reduce_scatter by nccl-tests has no results",
        "broadcast by nccl-tests has no results",
        "alltoall by nccl-tests has no results",
    ]
    wrong, cut, nan, none, unknown = (finding.evidence for finding in step.findings)
    assert "wrong elements: 6 over 8 ranks" in wrong
    assert "it was cut off (exit code 0)" in cut
    assert "bus_bw is not a number" in nan or "busbw is not a number" in nan
    assert "(exit code 3)\nbroadcast_perf: Test NCCL failure" in none
    # which ends with 0
    assert unknown.startswith("it wrote no file (exit code 0)\ninvalid option 'J'")
    kept = [series.run.collective for series in log.series]
    assert kept == [Collective.ALL_REDUCE, Collective.SENDRECV]


def test_a_collective_that_hangs_leaves_the_others_their_time(tmp_path: Path) -> None:
    machine = dataclasses.replace(EIGHT, faults={"all_reduce": "hangs"})
    step = machine.step(tmp_path, "nccl_tests", 8, "--step-timeout", "18")
    assert whats(step) == ["all_reduce by nccl-tests has no results"]
    assert step.findings[0].evidence == "it wrote no file (time limit)"
    assert step.measure == "5 of 6 collectives right"


def test_torch_with_wrong_elements_names_the_collective(tmp_path: Path) -> None:
    machine = dataclasses.replace(CPU, torch_wrong="alltoall")
    step = machine.step(tmp_path, "bandwidth", 2)
    assert (step.outcome, whats(step)) == (
        Outcome.FAILED,
        ["alltoall by torch gives wrong results"],
    )


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    step = dataclasses.replace(CPU, rank_dies=True).step(tmp_path, "bandwidth", 2)
    assert whats(step) == ["bandwidth.py failed: rank 1 was ended by SIGKILL"]


# ---- programs that are not there -----------------------------------------------------------------


def test_an_image_without_nccl_tests_fails_where_there_are_gpus(tmp_path: Path) -> None:
    bare = dataclasses.replace(EIGHT, programs=())
    in_image = dataclasses.replace(bare, is_image=True).step(tmp_path, "nccl_tests", 8)
    assert whats(in_image) == ["nccl-tests are missing, and there are GPUs to test"]
    elsewhere = bare.step(tmp_path, "nccl_tests", 8)
    assert elsewhere.outcome is Outcome.NOT_APPLICABLE
    assert elsewhere.measure == "no nccl-tests in /opt/nccl-tests/bin or on PATH"


def test_a_program_that_is_missing_among_the_others_is_named(tmp_path: Path) -> None:
    some = dataclasses.replace(EIGHT, programs=tuple(Collective)[1:])
    (finding,) = some.step(tmp_path, "nccl_tests", 8).findings
    assert finding.evidence.endswith("PATH has all_reduce_perf")


# ---- too slow ------------------------------------------------------------------------------------


def test_under_a_threshold_is_an_error_and_under_what_others_measured_a_warning(
    tmp_path: Path,
) -> None:
    slow = dataclasses.replace(EIGHT, nccl_tests={"all_reduce": 400.0, "all_gather": 200.0})
    step = slow.step(tmp_path, "nccl_tests", 8)
    assert step.outcome is Outcome.FAILED
    assert {(each.what.partition(" ")[0], each.severity) for each in step.findings} == {
        ("all_reduce", Severity.ERROR),
        ("all_gather", Severity.WARNING),
        ("reduce_scatter", Severity.WARNING),
    }


def test_a_number_of_the_users_is_for_all_reduce_alone_on_gpus_and_on_gloo(tmp_path: Path) -> None:
    log = EIGHT.run(tmp_path, BOTH, 8, "--floors", "500")
    assert [whats(step) for step in log.steps] == [
        [f"all_reduce by {tool} reaches 479.8 GB/s busbw, under the floor of 500"] for tool in Tool
    ]
    on_gloo = CPU.step(tmp_path, "bandwidth", 2, "--floors", "120")
    assert on_gloo.outcome is Outcome.FAILED
    assert "all_reduce by torch reaches 94.4 GB/s busbw, under the floor of 120" in whats(on_gloo)
    enough = CPU.step(tmp_path, "bandwidth", 2, "--floors", "94")
    assert (enough.outcome, enough.findings) == (Outcome.PASSED, ())


def test_a_file_of_the_users_without_this_gpu_is_said_once_with_what_it_has(tmp_path: Path) -> None:
    nccl_tests, bandwidth = EIGHT.run(tmp_path, BOTH, 8, "--floors", OWN_FLOORS).steps
    (finding,) = nccl_tests.findings
    assert (nccl_tests.outcome, finding.severity) == (Outcome.PASSED, Severity.WARNING)
    assert f"{H100}, nvlink, 8 ranks" in finding.what
    assert finding.evidence == "it has floors for NVIDIA L40S, pcie, 4 ranks"
    assert bandwidth.findings == ()
    alone = EIGHT.step(tmp_path, "bandwidth", 8, "--floors", OWN_FLOORS)
    assert whats(alone) == [finding.what]


def test_a_file_of_the_users_holds_for_its_gpus(tmp_path: Path) -> None:
    four = Machine(gpus=gpus(4, "NVIDIA L40S"), path="PHB", nccl_tests={"all_reduce": 15.0})
    step = four.step(tmp_path, "nccl_tests", 4, "--floors", OWN_FLOORS)
    assert whats(step) == [
        "all_reduce by nccl-tests reaches 15.0 GB/s busbw, under the floor of 18.5"
    ]


def test_torch_that_is_slower_than_nccl_tests_is_a_warning(tmp_path: Path) -> None:
    apart = dataclasses.replace(EIGHT, torch=FAST | {"sendrecv": 80.0, "broadcast": 95.0})
    nccl_tests, bandwidth = apart.run(tmp_path, BOTH, 8).steps
    assert nccl_tests.findings == ()
    (finding,) = bandwidth.findings
    assert (bandwidth.outcome, finding.severity) == (Outcome.PASSED, Severity.WARNING)
    assert finding.what == "sendrecv: torch is 20% slower than the other"


@pytest.mark.parametrize("text", ["0", "-3", "nan", "schema = 1", "fast"])
def test_floors_that_are_none_break_the_step_off_with_why(tmp_path: Path, text: str) -> None:
    step = CPU.step(tmp_path, "bandwidth", 2, f"--floors={text}")
    assert step.outcome is Outcome.FAILED
    assert "--floor: " in whats(step)[0]
