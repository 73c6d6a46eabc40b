r"""Does every rank receive what every other rank contributed?

Each rank contributes its rank to one all_reduce, so on each of N ranks the sum must be N(N-1)/2.
Every sum is then gathered to every rank: one wrong sum on one rank fails them all.

One node, CPU:
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 train/all_reduce.py
Two nodes with 8 GPUs each; the same on both, HOST is the name of one of them:
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=all_reduce --rdzv-backend=c10d \
        --rdzv-endpoint=HOST:29400 train/all_reduce.py
"""

import argparse
import faulthandler
import json
import os
import sys
import time
from datetime import timedelta
from typing import TextIO

import torch
import torch.distributed as dist


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--timeout",
        type=int,
        default=60,
        metavar="SECONDS",
        help="how long a rank waits for the others; the run gets twice that (default: %(default)s)",
    )
    arguments = parser.parse_args()
    if arguments.timeout < 1:
        parser.error(f"--timeout must be at least 1 second, not {arguments.timeout}")
    if not dist.is_torchelastic_launched():
        parser.error(f"run torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    return arguments


def bind_device() -> torch.device:
    """The GPU that local_rank names, or the CPU; before the group exists, or all open GPU 0."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def meet(device: torch.device, timeout: timedelta) -> tuple[dist.Store, int, int]:
    """The store where every rank has told of itself, this rank, and how many there are.

    Exits with the names of the ranks that are missing, have another torch or share a GPU: the start
    of the group would only hang, or run out of memory.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        # torchrun has a store for its ranks, or leaves it to rank 0
        is_master=rank == 0 and os.environ["TORCHELASTIC_USE_AGENT_STORE"] != "True",
        wait_for_workers=False,
        timeout=timeout,
    )
    names, gpu = [f"rank {each}" for each in range(world_size)], f"none for {rank}"
    if device.type == "cuda":
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    store.set(names[rank], f"torch {torch.__version__} for {device.type}|{gpu}")
    try:
        store.wait(names, timeout)
    except dist.DistStoreError:
        missing = ", ".join(name for name in names if not store.check([name]))
        sys.exit(f"Rank {rank} fails: no sign of {missing} in {timeout.total_seconds():g} s")
    kinds, gpus = zip(*(each.decode().split("|") for each in store.multi_get(names)), strict=True)
    other = {name: kind for name, kind in zip(names, kinds, strict=True) if kind != kinds[0]}
    if other:
        told = f"{', '.join(other)} has {', '.join(set(other.values()))}"
        sys.exit(f"Rank {rank} fails: rank 0 has {kinds[0]}, but {told}")
    sharing = [name for name, its in zip(names, gpus, strict=True) if gpus.count(its) > 1]
    if sharing:
        sys.exit(f"Rank {rank} fails: not every rank has a GPU of its own: {', '.join(sharing)}")
    return store, rank, world_size


def init(device: torch.device, timeout: timedelta) -> None:
    store, rank, world_size = meet(device, timeout)
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )


def sum_of_ranks(device: torch.device) -> torch.Tensor:
    value = torch.tensor([dist.get_rank()], dtype=torch.int64, device=device)
    dist.all_reduce(value)
    return value


def gather(value: torch.Tensor) -> list[int]:
    """The value of every rank, in the order of the ranks, on every rank."""
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    return [int(each.item()) for each in values]


def write_line(text: str, stream: TextIO = sys.stdout) -> None:
    # One write a line: print() may make two, and lines of other ranks would fall between them.
    stream.write(text + "\n")
    stream.flush()


def check(timeout: int) -> int:
    started = time.perf_counter()
    device = bind_device()
    init(device, timedelta(seconds=timeout))
    rank, world_size = dist.get_rank(), dist.get_world_size()

    own = sum_of_ranks(device)
    write_line(f"Rank {rank}: {int(own.item())}")
    values = gather(own)

    expected = world_size * (world_size - 1) // 2
    wrong = [f"rank {r} has {value}" for r, value in enumerate(values) if value != expected]
    if rank == 0:
        facts = {
            "script": "all_reduce",
            "ok": not wrong,
            "backend": dist.get_backend(),
            "world_size": world_size,
            "expected": expected,
            "values": values,
            "seconds": round(time.perf_counter() - started, 3),
            "torch": torch.__version__,
        }
        write_line(json.dumps(facts))
    if wrong:
        text = f"all_reduce of {world_size} ranks must give {expected}, but {', '.join(wrong)}"
        write_line(f"Rank {rank} fails: {text}", sys.stderr)
    return 1 if wrong else 0


def main() -> int:
    arguments = parse_arguments()
    # The group's timeout does not cover NCCL's own start, which can hang: a deadline for the whole.
    faulthandler.dump_traceback_later(2 * arguments.timeout, exit=True)
    try:
        return check(arguments.timeout)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
