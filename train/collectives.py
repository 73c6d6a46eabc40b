r"""Is every collective right here, once, between these ranks?

Each rank holds numbers that follow from its rank alone, so that every result is known beforehand.
A collective that the backend does not have is said, and is no failure: NCCL has no barrier that
names the missing rank, and gloo of some versions exchanges no lists.

One node, CPU:
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 train/collectives.py
Two nodes with 8 GPUs each; the same on both, HOST is the name of one of them:
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=collectives --rdzv-backend=c10d \
        --rdzv-endpoint=HOST:29400 train/collectives.py
"""

import argparse
import faulthandler
import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(seconds=60)
WIDTH = 4  # elements that each rank contributes
# torch 2.13 has new names for two of them, and warns of the old ones
ALL_GATHER_SINGLE = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER_SINGLE = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# what a backend says of a collective that it does not have
LACKS = ("does not support", "not supported", "not implemented", "only for GLOO", "no backend type")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments = parser.parse_args()
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


class Ranks:
    """This rank, all ranks, and the numbers that each of them contributes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.rank, self.size = device, dist.get_rank(), dist.get_world_size()
        self.after, self.before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        self.every = self.numbers(WIDTH)
        self.wide = self.numbers(WIDTH * self.size)  # with a part for each rank

    def numbers(self, width: int) -> list[Tensor]:
        """Those of every rank: its rank times 100, counting up."""
        firsts = range(0, 100 * self.size, 100)
        return [torch.arange(first, first + width, device=self.device) for first in firsts]

    def own(self) -> Tensor:
        return self.every[self.rank].clone()

    def parts(self) -> list[Tensor]:
        """What this rank has for each."""
        return list(self.wide[self.rank].chunk(self.size))

    def part(self, of: Tensor) -> Tensor:
        """This rank's share of what has a share for each."""
        return of.chunk(self.size)[self.rank]

    def room(self) -> list[Tensor]:
        return [torch.empty_like(each) for each in self.every]


def same(got: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(map(torch.equal, got, wanted)) and len(got) == len(wanted)


# -- one to all, all to one, all to all -----------------------------------------------------------


def broadcast(ranks: Ranks) -> bool:
    value = ranks.own()
    dist.broadcast(value, src=0)
    return same([value], [ranks.every[0]])


def reduce(ranks: Ranks) -> bool:
    value = ranks.own()
    dist.reduce(value, dst=0)
    return ranks.rank != 0 or same([value], [torch.stack(ranks.every).sum(dim=0)])


def all_reduce(ranks: Ranks) -> bool:
    rows = torch.stack(ranks.every) % 7 + 1  # small ones, for the product
    wanted = {
        dist.ReduceOp.SUM: rows.sum(dim=0),
        dist.ReduceOp.MAX: rows.amax(dim=0),
        dist.ReduceOp.MIN: rows.amin(dim=0),
        dist.ReduceOp.PRODUCT: rows.prod(dim=0),
    }
    got = [rows[ranks.rank].clone() for _ in wanted]
    for value, operation in zip(got, wanted, strict=True):
        dist.all_reduce(value, operation)
    return same(got, list(wanted.values()))


def gather(ranks: Ranks) -> bool:
    room = ranks.room() if ranks.rank == 0 else None
    dist.gather(ranks.own(), room, dst=0)
    return room is None or same(room, ranks.every)


def scatter(ranks: Ranks) -> bool:
    (value, *_) = ranks.room()
    dist.scatter(value, ranks.every if ranks.rank == 0 else None, src=0)
    return same([value], [ranks.own()])


def all_gather(ranks: Ranks) -> bool:
    room = ranks.room()
    dist.all_gather(room, ranks.own())
    return same(room, ranks.every)


def all_gather_single(ranks: Ranks) -> bool:
    room = torch.cat(ranks.room())
    ALL_GATHER_SINGLE(room, ranks.own())
    return same([room], [torch.cat(ranks.every)])


def reduce_scatter(ranks: Ranks) -> bool:
    (value, *_) = ranks.room()
    dist.reduce_scatter(value, ranks.parts())
    return same([value], [ranks.part(torch.stack(ranks.wide).sum(dim=0))])


def reduce_scatter_single(ranks: Ranks) -> bool:
    (value, *_) = ranks.room()
    REDUCE_SCATTER_SINGLE(value, torch.cat(ranks.parts()))
    return same([value], [ranks.part(torch.stack(ranks.wide).sum(dim=0))])


def all_to_all(ranks: Ranks) -> bool:
    room = ranks.room()
    dist.all_to_all(room, ranks.parts())
    return same(room, [ranks.part(each) for each in ranks.wide])


def all_to_all_single(ranks: Ranks) -> bool:
    room = torch.cat(ranks.room())
    dist.all_to_all_single(room, torch.cat(ranks.parts()))
    return same([room], [torch.cat([ranks.part(each) for each in ranks.wide])])


# -- one to one, round the ring; a rank alone has none, and torch lets it not send to itself -------


def send_recv(ranks: Ranks) -> bool:
    """Even ranks send first, so that no two wait for each other."""
    value = ranks.own()
    for turn in (0, 1) if ranks.size > 1 else ():
        if ranks.rank % 2 == turn:
            dist.send(ranks.own(), ranks.after)
        else:
            dist.recv(value, ranks.before)
    return same([value], [ranks.every[ranks.before]])


def batch_isend_irecv(ranks: Ranks) -> bool:
    value = ranks.own()
    both = [
        dist.P2POp(dist.isend, ranks.own(), ranks.after),
        dist.P2POp(dist.irecv, value, ranks.before),
    ]
    for work in dist.batch_isend_irecv(both) if ranks.size > 1 else ():
        work.wait()
    return same([value], [ranks.every[ranks.before]])


# -- objects, and waiting -------------------------------------------------------------------------


def all_gather_object(ranks: Ranks) -> bool:
    room: list[object] = [None] * ranks.size
    dist.all_gather_object(room, {"rank": ranks.rank})
    return room == [{"rank": rank} for rank in range(ranks.size)]


def gather_object(ranks: Ranks) -> bool:
    room: list[object] | None = [None] * ranks.size if ranks.rank == 0 else None
    dist.gather_object({"rank": ranks.rank}, room, dst=0)
    return room is None or room == [{"rank": rank} for rank in range(ranks.size)]


def broadcast_object_list(ranks: Ranks) -> bool:
    value: list[object] = [{"rank": ranks.rank}]
    dist.broadcast_object_list(value, src=0)
    return value == [{"rank": 0}]


def scatter_object_list(ranks: Ranks) -> bool:
    value: list[object] = [None]
    given = [{"rank": rank} for rank in range(ranks.size)] if ranks.rank == 0 else None
    dist.scatter_object_list(value, given, src=0)
    return value == [{"rank": ranks.rank}]


def barrier(_ranks: Ranks) -> bool:
    dist.barrier()
    return True


def monitored_barrier(_ranks: Ranks) -> bool:
    dist.monitored_barrier(timeout=TIMEOUT)
    return True


COLLECTIVES: tuple[Callable[[Ranks], bool], ...] = (
    *(broadcast, reduce, all_reduce, gather, scatter, all_gather, all_gather_single),
    *(reduce_scatter, reduce_scatter_single, all_to_all, all_to_all_single),
    *(send_recv, batch_isend_irecv),
    *(all_gather_object, gather_object, broadcast_object_list, scatter_object_list),
    *(barrier, monitored_barrier),
)


def outcome(collective: Callable[[Ranks], bool], ranks: Ranks) -> str:
    """How it went on all ranks: a rank that is wrong makes it wrong for each."""
    try:
        wrong = torch.tensor([int(not collective(ranks))], device=ranks.device)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        # every rank is refused alike, before anything is sent
        if any(word in str(error) for word in LACKS):
            return "not in this backend"
        raise
    dist.all_reduce(wrong)
    return f"wrong on {int(wrong)} ranks" if int(wrong) else "right"


def main() -> int:
    parse_arguments()
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
        ranks = Ranks(device)
        found = {each.__name__: outcome(each, ranks) for each in COLLECTIVES}
        wrong = [f"{name}: {how}" for name, how in found.items() if how.startswith("wrong")]
        if ranks.rank == 0:
            facts = {"script": "collectives", "ok": not wrong, "backend": dist.get_backend()}
            facts |= {"world_size": ranks.size, "collectives": found, "torch": torch.__version__}
            sys.stdout.write(json.dumps(facts) + "\n")
            sys.stdout.flush()
        if wrong:
            sys.stderr.write(f"Rank {ranks.rank} fails: {'; '.join(wrong)}\n")
        return 1 if wrong else 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
