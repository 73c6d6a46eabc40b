r"""Who shares a tensor, who the data, who the pipeline: the subgroups of tp x dp x pp ranks?

A rank is a place in a box: tp runs fastest, so that the ranks that talk most are neighbours on one
node, then dp, then pp. A subgroup is a line of the box: the ranks that differ in one way alone.

One node, CPU; each of 8 ranks is in a tp group of 2 such as {0, 1}, and a dp group of 4 such as
{0, 2, 4, 6}:
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=8 train/subgroups.py --tp 2 --dp 4
Two nodes with 8 GPUs each; the same on both, HOST is the name of one of them:
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=subgroups --rdzv-backend=c10d \
        --rdzv-endpoint=HOST:29400 train/subgroups.py --tp 8 --pp 2
"""

import argparse
import faulthandler
import json
import math
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, what in (("tp", "tensor"), ("dp", "data"), ("pp", "pipeline")):
        told = f"ranks of {what} parallelism" + (" (default: the rest)" if name == "dp" else "")
        parser.add_argument(f"--{name}", type=int, metavar="N", help=told)
    arguments = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error(f"run torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    world_size = int(os.environ["WORLD_SIZE"])
    arguments.tp, arguments.pp = arguments.tp or 1, arguments.pp or 1
    if arguments.dp is None:
        arguments.dp = max(1, world_size // (arguments.tp * arguments.pp))
    sizes = arguments.tp, arguments.dp, arguments.pp
    if min(sizes) < 1 or math.prod(sizes) != world_size:
        told = " x ".join(map(str, sizes))
        parser.error(
            f"tp x dp x pp is {told} = {math.prod(sizes)}, and there are {world_size} ranks"
        )
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


def lines(world_size: int, size: int, stride: int) -> list[list[int]]:
    """The groups of `size` ranks, `stride` apart: of 8 ranks 4 and 2 give {0,2,4,6}, {1,3,5,7}."""
    firsts = [rank for rank in range(world_size) if rank // stride % size == 0]
    return [[first + place * stride for place in range(size)] for first in firsts]


def own_group(groups: list[list[int]]) -> tuple[dist.ProcessGroup, list[int]]:
    """The group that this rank is in. Every rank makes every group, in the same order: new_group
    is a collective of all ranks, and one that leaves out the groups of others hangs them.
    """
    rank = dist.get_rank()
    made = [(dist.new_group(ranks), ranks) for ranks in groups]
    return next((group, ranks) for group, ranks in made if rank in ranks)


def sum_within(group: dist.ProcessGroup, device: torch.device) -> int:
    value = torch.tensor([dist.get_rank()], dtype=torch.int64, device=device)
    dist.all_reduce(value, group=group)
    return int(value.item())


def wrong_sums(group: dist.ProcessGroup, ranks: list[int], device: torch.device) -> int:
    """How many ranks of the job have another sum than their group's, known to every rank."""
    wrong = torch.tensor([int(sum_within(group, device) != sum(ranks))], device=device)
    dist.all_reduce(wrong)
    return int(wrong.item())


def check(arguments: argparse.Namespace, device: torch.device) -> dict[str, object]:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    kinds = {
        "tp": lines(world_size, arguments.tp, 1),
        "dp": lines(world_size, arguments.dp, arguments.tp),
        "pp": lines(world_size, arguments.pp, arguments.tp * arguments.dp),
    }
    facts: dict[str, object] = {"script": "subgroups", "ok": True, "world_size": world_size}
    for kind, groups in kinds.items():
        group, ranks = own_group(groups)
        wrong = wrong_sums(group, ranks, device)
        facts[kind] = groups
        if wrong:
            facts["ok"] = False
            sys.stderr.write(
                f"Rank {rank} fails: {wrong} ranks have another sum in {kind} {ranks}\n"
            )
    return facts


def main() -> int:
    arguments = parse_arguments()
    # the group's timeout does not cover NCCL's own start, which can hang: a deadline for the whole
    faulthandler.dump_traceback_later(2 * TIMEOUT.seconds, exit=True)
    device = bind_device()
    try:
        store, rank, world_size = meet(device, TIMEOUT)
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
        facts = check(arguments, device)
        if dist.get_rank() == 0:
            facts.update(backend=dist.get_backend(), torch=torch.__version__)
            sys.stdout.write(json.dumps(facts) + "\n")
            sys.stdout.flush()
        return 0 if facts["ok"] else 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
