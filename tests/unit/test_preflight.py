"""The gate before training: what it says of a network, of a bandwidth, and when it is skipped."""

import json
from pathlib import Path
from typing import Any

import pytest

from muster import preflight
from muster.finding import Finding
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


def facts(*rows: tuple[int, float]) -> dict[str, Any]:
    listed = [{"bytes": size, "busbw": busbw} for size, busbw in rows]
    return {"world_size": 16, "all_reduce": listed}


@pytest.mark.parametrize(
    ("measured", "floor"),
    [(facts((2**20, 1.0), (2**34, 300.0)), 300.0), (facts((2**34, 1.0)), None), ({}, 300.0)],
)
def test_enough_bandwidth_or_none_to_judge_is_no_finding(
    measured: dict[str, Any], floor: float | None
) -> None:
    assert list(preflight.bandwidth(measured, floor)) == []


def test_the_largest_buffer_is_held_against_the_floor() -> None:
    (finding,) = preflight.bandwidth(facts((2**20, 900.0), (2**34, 4.2)), 300.0)
    assert finding.what == "busbw is 4.2 GB/s, under the fabric's 300"
    assert "17179869184 bytes over 16 ranks" in finding.evidence


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


def test_what_rank_0_measured_is_the_last_object_of_the_output() -> None:
    row = {"script": "bandwidth", "all_reduce": []}
    output = f"a line\n{json.dumps(row)}\nanother\n"
    assert preflight.measured(Completed(("x",), 0, output, timed_out=False, seconds=1.0)) == row
    assert preflight.measured(Completed(("x",), 0, "none", timed_out=False, seconds=1.0)) == {}
