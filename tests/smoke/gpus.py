"""The GPUs of this node: torch's, in its order, and what NVML knows of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from conftest import Step

from muster.bandwidth import place
from muster.bandwidth.floors import Place
from muster.doctor import devices
from muster.doctor.facts import Peers
from muster.doctor.files import Files

# the driver's, there whenever a process may use any GPU
CONTROL = Path("/dev/nvidiactl")


@dataclass(frozen=True)
class Device:
    """`name` and `uuid` as NVML spells them; memory in bytes."""

    name: str
    uuid: str
    memory: int


def visible() -> tuple[Device, ...]:
    """What torch sees: CUDA_VISIBLE_DEVICES may leave out some and change their order."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    return tuple(Device(each.name, spelled(each.uuid), each.total_memory) for each in properties)


def spelled(uuid: object) -> str:
    """A UUID as NVML has it; torch leaves out the prefix."""
    return f"GPU-{str(uuid).removeprefix('GPU-')}"


def needed(step: Step) -> tuple[Device, ...]:
    """A GPU for each rank. Without any the step does not apply; with too few it fails."""
    found = visible()
    if not found and not CONTROL.exists():
        pytest.skip("no GPU here")
    if not found and torch.version.cuda is None:
        pytest.skip(f"torch {torch.__version__} has no CUDA")
    if not found:
        step.fail(
            what="torch sees no GPU, and the driver is here",
            evidence=f"{CONTROL} exists; torch.cuda.is_available() is false, its CUDA is"
            f" {torch.version.cuda}",
            cause="the driver is older than this CUDA needs, CUDA_VISIBLE_DEVICES names no GPU that"
            " is here, or the fabric manager does not run",
            remedy="./invokew doctor names the driver and what is wrong with it",
        )
    if len(found) < step.nproc_per_node:
        step.fail(
            what=f"{step.nproc_per_node} ranks, and {len(found)} GPUs for them",
            evidence=f"torch sees {', '.join(each.uuid for each in found)}",
            cause="--nproc-per-node is too large, or CUDA_VISIBLE_DEVICES leaves GPUs out",
            remedy=f"--nproc-per-node {len(found)}, or give this job all GPUs",
        )
    return found[: step.nproc_per_node]


def between(uuids: Sequence[str]) -> Mapping[frozenset[str], Peers]:
    """What NVML says of the pairs among these GPUs; of those that it does not know, nothing."""
    known = devices.gpus(Files())
    by_index = {gpu.index: gpu.uuid for gpu in known.devices}
    pairs = {
        frozenset(str(by_index[index]) for index in (each.first, each.second)): each
        for each in known.peers
    }
    return {pair: peers for pair, peers in pairs.items() if pair <= set(uuids)}


def where_ranks_are(used: Sequence[Device]) -> Place | None:
    """The place of ranks on these GPUs; None where NVML does not know what lies between all."""
    pairs = between([each.uuid for each in used])
    if len(pairs) != len(used) * (len(used) - 1) // 2:
        return None
    return place.within_node([each.name for each in used], [each.path for each in pairs.values()])
