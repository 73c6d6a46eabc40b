"""The gate before training: what it asks of a node, of a network, of a bandwidth; when it is left
out; what it writes and how it ends.
"""

import json
from pathlib import Path

import pytest
from tests.unit import pods

from muster import preflight, suite
from muster.doctor.examine import CHECKS
from muster.finding import Finding
from muster.launch import ExitStatus
from muster.process import Completed

USED = "host:1:2 [0] NCCL INFO Using network {}\n"
FOUND = "host:1:2 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>\n"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with NVIDIA's driver."""
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(preflight, "NVIDIA", tmp_path / "nvidiactl")


def network(wanted: list[str], *logs: str) -> list[Finding]:
    return list(preflight.network(logs, wanted))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (["IB"], FOUND + USED.format("IB")),
        (["GPUDirectTCPX"], USED.format("GPUDirectTCPX_v7")),
        (["Libfabric", "AWS Libfabric"], USED.format("AWS Libfabric")),
        ([], USED.format("Socket")),
    ],
)
def test_the_fabrics_own_network_is_no_finding(wanted: list[str], said: str) -> None:
    assert network(wanted, said) == []


@pytest.mark.usefixtures("gpu")
def test_a_silent_fall_to_sockets_is_an_error_though_the_hca_was_found() -> None:
    (finding,) = network(["IB"], FOUND + USED.format("IB"), FOUND + USED.format("Socket"))
    assert finding.what == "NCCL uses the network IB, Socket, not IB"
    assert "mlx5_0" in finding.evidence


@pytest.mark.usefixtures("gpu")
def test_no_word_of_a_network_is_an_error() -> None:
    (finding,) = network(["IB"], "host:1:2 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>\n")
    assert finding.what == "NCCL uses the network none, not IB"


def test_without_gpus_there_is_no_nccl_to_ask() -> None:
    assert network(["IB"], "") == []


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"MUSTER_FAILURES": "0", "MUSTER_IGNORED_FAILURES": ""}, False),
        ({"MUSTER_FAILURES": "2"}, True),
        ({"MUSTER_FAILURES": "0", "MUSTER_IGNORED_FAILURES": "1"}, True),
    ],
)
def test_a_pod_knows_whether_it_replaces_another(
    environment: dict[str, str], expected: bool
) -> None:
    assert preflight.is_replacement(environment) is expected


# ---- the node's steps --------------------------------------------------------------------------


def test_a_pod_runs_the_steps_that_one_node_does_on_its_own() -> None:
    assert set(preflight.NODE_STEPS) <= suite.BY_NAME.keys()
    assert {"versions", "memlock", "nccl_switches", "dataloader_shm"} <= set(preflight.NODE_STEPS)
    # the doctor is asked apart, and the proofs of an image take minutes
    assert not {"doctor", "image", "all_reduce"} & set(preflight.NODE_STEPS)
    assert preflight.WORLD in suite.BY_NAME


def examined(output: str) -> tuple[list[str], list[str]]:
    """The names of the checks, and what was found."""
    done = Completed(("doctor",), 0, output, timed_out=False, seconds=0.1)
    checks, findings = preflight.examined(done)
    return [each["name"] for each in checks], [each.what for each in findings]


def check(name: str) -> dict[str, object]:
    finding = {**pods.FINDING, "what": f"{name} is wrong"}
    return {"name": name, "outcome": "failed", "measure": "", "findings": [finding]}


def test_what_the_doctor_sees_of_the_node_beside_the_pod_is_no_finding() -> None:
    assert {each.__name__ for each in CHECKS} >= preflight.NOT_JUDGED
    checks = [check(name) for name in ("gpus", *sorted(preflight.NOT_JUDGED))]
    names, found = examined(json.dumps({"checks": checks}))
    assert set(names) == {"gpus", *preflight.NOT_JUDGED}
    assert found == ["gpus is wrong"]


def test_a_doctor_that_breaks_off_is_a_finding_with_its_last_words() -> None:
    done = Completed(("doctor",), -11, "NVML says\nnothing", timed_out=False, seconds=0.1)
    checks, (finding,) = preflight.examined(done)
    assert checks == ()
    assert finding.what == "the doctor broke off (signal SIGSEGV)"
    assert finding.evidence == "NVML says\nnothing"


# ---- bandwidth ---------------------------------------------------------------------------------


def test_what_rank_0_measured_is_held_against_the_fabrics_floor() -> None:
    series = preflight.measured(f"a line\n{pods.result(340.0)}\nanother\n", 300.0)
    assert series.claimed
    assert series.backend == "nccl"
    assert series.floor is not None
    assert (series.floor.busbw, series.largest and series.largest.busbw) == (300.0, 340.0)


def test_without_a_floor_or_on_a_cpu_nothing_is_claimed_of_a_link() -> None:
    assert preflight.measured(pods.result(), None).floor is None
    assert not preflight.measured(pods.result().replace("nccl", "gloo"), None).claimed
    alone = pods.result().replace('"world_size": 16', '"world_size": 1')
    assert not preflight.measured(alone.replace('"busbw": 340.0', '"busbw": 0.0'), None).claimed


def test_no_results_are_a_run_that_failed() -> None:
    assert preflight.measured("nothing", 300.0).run.failure == "it wrote no results"


@pytest.mark.parametrize(
    ("measured", "what"),
    [
        (pods.result(4.2), "all_reduce by torch reaches 4.2 GB/s busbw, under the floor of 300"),
        (
            pods.result().replace('"wrong": 0', '"wrong": 7'),
            "all_reduce by torch gives wrong results",
        ),
        ("", "all_reduce by torch has no results"),
    ],
)
def test_a_bad_bandwidth_refuses_the_job(tmp_path: Path, measured: str, what: str) -> None:
    written = pods.pod(tmp_path, 0, measured=measured)
    assert written.status == ExitStatus.NOT_READY
    assert f"error in all nodes: {what}\n" in written.text
    assert written.text.rstrip().endswith("\nNOT READY")


# ---- a whole pod -------------------------------------------------------------------------------


def test_a_pod_that_passes_says_so_and_ends_with_0(tmp_path: Path) -> None:
    written = pods.pod(tmp_path, 0)
    assert written.status == 0, written.text
    assert "\nshm_size: passed" in written.text
    assert "16 ranks by nccl, 340.0 GB/s busbw with 1 GiB, floor 300" in written.text
    assert written.text.rstrip().endswith("\nREADY")


def test_a_step_that_fails_ends_the_gate_before_the_nodes_meet(tmp_path: Path) -> None:
    written = pods.pod(tmp_path, 1, memlock=pods.FAILS)
    assert written.status == ExitStatus.NOT_READY
    assert "what the ranks say" not in written.text
    assert "nodes_bandwidth: not run" in written.text
    # the error stands last, where the end of a log is looked at
    assert written.text.splitlines()[-5] == "error in memlock: mlock of 64 MiB fails"


def test_a_suite_that_dies_is_a_finding_that_names_the_step(tmp_path: Path) -> None:
    written = pods.pod(tmp_path, 1, memlock=pods.DIES)
    assert written.status == ExitStatus.NOT_READY
    assert "error in memlock: the node steps broke off (exit code 9)" in written.text


def test_a_pod_that_replaces_another_looks_at_its_own_node_only(tmp_path: Path) -> None:
    written = pods.pod(tmp_path, 1, environment={"MUSTER_FAILURES": "1"})
    assert written.status == 0, written.text
    assert "shm_size: passed" in written.text
    assert "nodes_bandwidth: not applicable" in written.text
    assert "what the ranks say" not in written.text
