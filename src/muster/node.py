"""What this machine has: GPUs and InfiniBand or RoCE devices."""

from dataclasses import dataclass
from pathlib import Path

import pynvml


@dataclass(frozen=True)
class Node:
    """This machine: its GPUs, the driver that shows them, and whether verbs devices exist."""

    gpus: int
    infiniband: bool
    driver: str | None = None


def look() -> Node:
    """The facts of this machine, read now."""
    # rdma_cm alone is there wherever the module is loaded; a device has a uverbs file
    infiniband = any(Path("/dev/infiniband").glob("uverbs*"))
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return Node(0, infiniband)
    try:
        gpus, driver = pynvml.nvmlDeviceGetCount(), pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()
    return Node(int(gpus), infiniband, str(driver))
