"""What this machine has: GPUs and InfiniBand or RoCE devices."""

from dataclasses import dataclass
from pathlib import Path

import pynvml


@dataclass(frozen=True)
class Node:
    """This machine: how many GPUs the driver shows, and whether there is a verbs device."""

    gpus: int
    infiniband: bool


def look() -> Node:
    """The facts of this machine, read now."""
    # rdma_cm alone is there wherever the module is loaded; a device has a uverbs file
    return Node(_gpus(), any(Path("/dev/infiniband").glob("uverbs*")))


def _gpus() -> int:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
