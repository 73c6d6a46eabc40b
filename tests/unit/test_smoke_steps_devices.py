"""The step `devices` on machines that stand-ins make: whose GPU is whose, and who reaches whom."""

import dataclasses
from pathlib import Path

from tests.unit.standins.machine import Machine, gpus

from muster.finding import Outcome, Severity

EIGHT = Machine(gpus=gpus(8))


def test_eight_ranks_on_eight_gpus_that_all_reach_each_other_pass(tmp_path: Path) -> None:
    step = EIGHT.step(tmp_path, "devices", 8)
    assert (step.outcome, step.findings) == (Outcome.PASSED, ())
    assert step.measure == "8 GPUs, 28 of 28 pairs P2P"


def test_fewer_ranks_than_gpus_are_counted_and_no_fault(tmp_path: Path) -> None:
    step = EIGHT.step(tmp_path, "devices", 1)
    assert (step.outcome, step.measure) == (Outcome.PASSED, "1 of 8 GPUs, 28 of 28 pairs P2P")


def test_two_ranks_on_one_gpu_are_named_with_it(tmp_path: Path) -> None:
    machine = dataclasses.replace(EIGHT, ranks_on=(0, 1, 1))
    step = machine.step(tmp_path, "devices", 3)
    (finding,) = step.findings
    assert (step.outcome, finding.severity) == (Outcome.FAILED, Severity.ERROR)
    assert "ranks share GPU 1" in finding.what


def test_gpus_with_nvlink_that_cannot_reach_each_other_fail_the_step(tmp_path: Path) -> None:
    # torch's order is not NVML's: rank 0 has the GPU that NVML calls 5
    machine = dataclasses.replace(EIGHT, torch_sees=(5, 4, 3, 2), closed=((5, 3),))
    step = machine.step(tmp_path, "devices", 4)
    (finding,) = step.findings
    assert (step.outcome, finding.severity) == (Outcome.FAILED, Severity.ERROR)
    assert (finding.what, finding.where) == (
        "1 pair of GPUs with NVLink and without P2P",
        "GPU 0 and 2",
    )
    assert step.measure == "4 GPUs, 5 of 6 pairs P2P"


def test_whose_link_a_pair_has_is_looked_up_by_uuid(tmp_path: Path) -> None:
    bridges = Machine(gpus=gpus(4), path="SYS", bridged=((0, 1), (2, 3)), torch_sees=(0, 2, 1, 3))
    far = dataclasses.replace(bridges, closed=((0, 2), (1, 3))).step(tmp_path, "devices", 4)
    assert (far.outcome, far.findings) == (Outcome.PASSED, ())
    broken = dataclasses.replace(bridges, closed=((2, 3),)).step(tmp_path, "devices", 4)
    (finding,) = broken.findings
    assert (finding.severity, finding.where) == (Severity.ERROR, "GPU 1 and 3")


def test_gpus_on_one_pcie_switch_that_cannot_reach_each_other_are_a_warning(
    tmp_path: Path,
) -> None:
    machine = dataclasses.replace(EIGHT, path="PIX", p2p_status=4, closed=((0, 1), (2, 3)))
    step = machine.step(tmp_path, "devices", 8)
    (finding,) = step.findings
    assert (step.outcome, finding.severity) == (Outcome.PASSED, Severity.WARNING)
    assert finding.where == "GPU 0 and 1, GPU 2 and 3"
    assert "PIX, P2P disabled by a registry key" in finding.evidence


def test_what_a_card_cannot_or_a_long_way_forbids_is_no_fault(tmp_path: Path) -> None:
    unable = dataclasses.replace(EIGHT, path="PIX", p2p_status=2, closed=((0, 1),))
    far = dataclasses.replace(EIGHT, path="SYS", p2p_status=3, closed=((0, 1),))
    for machine in (unable, far):
        step = machine.step(tmp_path, "devices", 2)
        assert (step.outcome, step.findings) == (Outcome.PASSED, ())
        assert step.measure == "2 of 8 GPUs, 27 of 28 pairs P2P"


def test_more_ranks_than_gpus_fail_before_any_starts(tmp_path: Path) -> None:
    machine = dataclasses.replace(EIGHT, torch_sees=(0, 1), rank_dies=True)
    step = machine.step(tmp_path, "devices", 8)
    (finding,) = step.findings
    assert finding.what == "8 ranks, and 2 GPUs for them"


def test_a_driver_without_a_gpu_for_torch_fails_and_no_driver_does_not_apply(
    tmp_path: Path,
) -> None:
    blind = dataclasses.replace(EIGHT, torch_sees=())
    (finding,) = blind.step(tmp_path, "devices", 2).findings
    assert finding.what == "torch sees no GPU, and the driver is here"
    without = Machine(has_control=False).step(tmp_path, "devices", 2)
    assert (without.outcome, without.measure) == (Outcome.NOT_APPLICABLE, "no GPU here")
    on_cpu = dataclasses.replace(blind, cuda=None).step(tmp_path, "devices", 2)
    assert on_cpu.outcome is Outcome.NOT_APPLICABLE
    assert on_cpu.measure == "torch 0.stand-in has no CUDA"


def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    machine = dataclasses.replace(EIGHT, rank_dies=True)
    (finding,) = machine.step(tmp_path, "devices", 8).findings
    assert finding.what == "devices.py failed: rank 1 was ended by SIGKILL"
