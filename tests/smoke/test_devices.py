"""The devices: has each rank a GPU of its own, and can the GPUs reach each other?"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gpus
from conftest import Step, conclude, last_json

from muster import launch, process
from muster.doctor.check import counted, listed
from muster.doctor.facts import Peers
from muster.finding import Finding, error, warning
from muster.topology import Topology

# what nvidia-smi topo -m calls a way through PCIe switches alone
SWITCHED = frozenset({"PIX", "PXB"})
# a GeForce card's own limit: nothing is wrong with the machine
UNABLE = "the GPU does not support it"


def test_devices(step: Step) -> None:
    """Every rank computes on a GPU of its own; GPUs read each other's memory as their links let."""
    gpus.needed(step)
    there = [each.uuid for each in gpus.visible()]
    topology = Topology(nnodes=1, nproc_per_node=step.nproc_per_node)
    done = step.nccl(launch.torchrun(topology, "devices.py"))
    said = _said(step, done)
    open_ = sum(possible for _, _, possible in said["p2p"])
    used = f"{step.nproc_per_node} of " if step.nproc_per_node < len(there) else ""
    pairs = f", {open_} of {counted(len(said['p2p']), 'pair')} P2P" if said["p2p"] else ""
    step.measure(f"{used}{counted(len(there), 'GPU')}{pairs}")
    conclude(step, [*_without_p2p(_closed(said, there), gpus.between(there))])


def _said(step: Step, done: process.Completed) -> dict[str, Any]:
    """What rank 0 says of all; a rank that shares a GPU or cannot use it fails the step."""
    said = last_json(done.output) if "\n{" in f"\n{done.output}" else {}
    if wrong := said.get("wrong"):
        step.fail(
            what=f"not every rank has a GPU that it can use: {wrong[0]}",
            evidence="\n".join(wrong),
            cause="CUDA_VISIBLE_DEVICES is another one for some ranks or names a GPU twice, another"
            " job holds the memory, or the GPU itself is faulty",
            remedy="leave CUDA_VISIBLE_DEVICES the same for all ranks, each takes the device that"
            " LOCAL_RANK names; nvidia-smi and ./invokew doctor for who else is on the GPU",
        )
    if not done.ok:
        step.fail_ranks("devices.py", done)
    return said


def _closed(said: Mapping[str, Any], uuids: Sequence[str]) -> dict[frozenset[str], str]:
    """The pairs of GPUs that cannot read each other's memory, and their numbers for torch."""
    return {
        frozenset({uuids[one], uuids[other]}): f"GPU {one} and {other}"
        for one, other, possible in said["p2p"]
        if not possible
    }


def _without_p2p(
    closed: Mapping[frozenset[str], str], pairs: Mapping[frozenset[str], Peers]
) -> Iterator[Finding]:
    """Pairs without P2P where the topology promises it."""
    known = {pair: pairs[pair] for pair in closed if pair in pairs}
    linked = [pair for pair, peers in known.items() if peers.path == "NVLINK"]
    switched = [
        pair for pair, peers in known.items() if peers.path in SWITCHED and peers.p2p != UNABLE
    ]
    if linked:
        yield error(
            listed(closed[pair] for pair in linked),
            f"{counted(len(linked), 'pair')} of GPUs with NVLink and without P2P",
            evidence=f"CUDA: no peer access; NVML: {_by_nvml(known, linked)}",
            cause="a link that did not train, a fabric that is not set up, or a container that was"
            " given the GPUs without what joins them",
            remedy="nvidia-smi nvlink -s; ./invokew doctor for the fabric manager; reset the GPUs",
        )
    if switched:
        yield warning(
            listed(closed[pair] for pair in switched),
            f"{counted(len(switched), 'pair')} of GPUs on one PCIe switch and without P2P",
            evidence=f"CUDA: no peer access; NVML: {_by_nvml(known, switched)}",
            cause="a virtual machine, an IOMMU that is on, PCIe's access control (ACS) or a key in"
            " the driver's registry: NCCL goes through /dev/shm instead",
            remedy="nvidia-smi topo -p2p r; ./invokew doctor for ACS and the IOMMU",
        )


def _by_nvml(known: Mapping[frozenset[str], Peers], pairs: Sequence[frozenset[str]]) -> str:
    return listed(dict.fromkeys(f"{known[each].path}, P2P {known[each].p2p}" for each in pairs))
