"""Run a script of train/ as on a machine with 2 GPUs: `stand_in_gpus.py SCRIPT ARGUMENT...`.

What the script asks torch.cuda is answered here; what it allocates on a GPU is on the CPU.
CUDA_VISIBLE_DEVICES hides and orders the two, as CUDA does.
"""

import functools
import os
import runpy
import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch

UUIDS = ("11111111-aaaa", "22222222-bbbb")
MEMORY_BYTES = 2**30


class Cuda:
    """The part of torch.cuda that the scripts use."""

    def __init__(self, visible: str) -> None:
        self.uuids = [UUIDS[int(number)] for number in visible.split(",") if number]
        self.current = 0

    def is_available(self) -> bool:
        return bool(self.uuids)

    def device_count(self) -> int:
        return len(self.uuids)

    def current_device(self) -> int:
        return self.current

    def set_device(self, device: int | torch.device) -> None:
        number = device if isinstance(device, int) else device.index
        if number >= len(self.uuids):
            raise RuntimeError("CUDA error: invalid device ordinal")
        self.current = number

    def get_device_properties(self, number: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=self.uuids[number], name="Stand-in", total_memory=MEMORY_BYTES)

    def can_device_access_peer(self, one: int, other: int) -> bool:
        return one != other


def on_the_cpu(
    empty: Callable[..., torch.Tensor],
    *sizes: int,
    device: object = None,
    **settings: object,
) -> torch.Tensor:
    """What torch.empty gives, and no more of a GPU than it has."""
    made = empty(*sizes, **settings)
    if str(device).startswith("cuda") and made.nbytes > MEMORY_BYTES:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {made.nbytes} bytes.")
    return made


def main() -> None:
    stand_in = Cuda(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1"))
    for name in (name for name in vars(Cuda) if not name.startswith("_")):
        setattr(torch.cuda, name, getattr(stand_in, name))
    torch.empty = functools.partial(on_the_cpu, torch.empty)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
