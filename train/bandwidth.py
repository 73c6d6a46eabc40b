r"""How fast are the collectives between these ranks, and are they right?

Sizes and columns are those of nccl-tests, so that both can stand side by side. A row's size is the
larger of what a rank sends and what it receives in all. algbw is the size over the time, of the
slowest rank; busbw is algbw times a factor for the collective, so that it can be compared with the
speed of a link whatever the number of ranks.
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
all_reduce and broadcast work in place, as torch has them; the others from one buffer to another.

One node, CPU:
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 train/bandwidth.py
Two nodes with 8 GPUs each; the same on both, HOST is the name of one of them:
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=bandwidth --rdzv-backend=c10d \
        --rdzv-endpoint=HOST:29400 train/bandwidth.py --max-bytes 1073741824 \
        --collective all_reduce all_gather reduce_scatter broadcast alltoall sendrecv
"""

import argparse
import faulthandler
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(seconds=60)
ELEMENT_BYTES = 4  # float32
# nccl-tests gives each rank a multiple of this, where there is as much
SHARE_BYTES = 16
# torch 2.13 has new names for two of them, and warns of the old ones
ALL_GATHER_SINGLE = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER_SINGLE = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--collective",
        nargs="+",
        choices=COLLECTIVES,
        default=["all_reduce"],
        help="which to measure (default: all_reduce)",
    )
    parser.add_argument("--min-bytes", type=int, default=8, metavar="N", help="%(default)s")
    parser.add_argument("--max-bytes", type=int, default=2**24, metavar="N", help="%(default)s")
    parser.add_argument("--factor", type=int, default=2, metavar="N", help="size to next size")
    parser.add_argument("--bytes", type=int, nargs="+", metavar="N", help="just these sizes")
    parser.add_argument("--iterations", type=int, default=10, metavar="N", help="timed, each size")
    arguments = parser.parse_args()
    smallest = min(arguments.bytes or [arguments.min_bytes])
    if arguments.iterations < 1 or smallest < ELEMENT_BYTES or arguments.factor < 2:
        parser.error(f"at least one iteration, {ELEMENT_BYTES} bytes and a factor of 2")
    if arguments.max_bytes < arguments.min_bytes:
        parser.error("--max-bytes is under --min-bytes")
    if not dist.is_torchelastic_launched():
        parser.error(f"run torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    return arguments


def sizes_of(arguments: argparse.Namespace) -> list[int]:
    sizes: list[int] = arguments.bytes or [arguments.min_bytes]
    while not arguments.bytes and sizes[-1] * arguments.factor <= arguments.max_bytes:
        sizes.append(sizes[-1] * arguments.factor)
    return sizes


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


# -- the collectives: each fills `receive` from `send`, which is the same buffer for some --------


def ring(receive: Tensor, send: Tensor) -> None:
    """Each rank sends to the next and receives from the one before, at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sends = dist.P2POp(dist.isend, send, (rank + 1) % size)
    receives = dist.P2POp(dist.irecv, receive, (rank - 1) % size)
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()


COLLECTIVES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "all_reduce": lambda receive, _: dist.all_reduce(receive),
    "all_gather": ALL_GATHER_SINGLE,
    "reduce_scatter": REDUCE_SCATTER_SINGLE,
    "broadcast": lambda receive, _: dist.broadcast(receive, 0),
    "alltoall": dist.all_to_all_single,
    "sendrecv": ring,
}
IN_PLACE = ("all_reduce", "broadcast")
IN_SHARES = ("all_gather", "reduce_scatter", "alltoall")


def values(name: str, rank: int, size: int) -> tuple[list[int], list[int]]:
    """What this rank of `size` ranks sends, and what it must receive: the value of each equal part.

    Small whole numbers, since float32 adds no others up exactly. No two parts of a rank are alike,
    nor are the same parts of two ranks.
    """
    own, every = rank + 1, list(range(1, size + 1))
    return {
        "all_reduce": ([own], [sum(every)]),
        "all_gather": ([own], every),
        "reduce_scatter": ([rank + each for each in every], [sum(every) + size * rank]),
        "broadcast": ([own], [1]),
        "alltoall": ([rank * size + each for each in every], [r * size + own for r in range(size)]),
        "sendrecv": ([own], [(rank - 1) % size + 1]),
    }[name]


def busbw_factor(name: str, size: int) -> float:
    """From algbw to busbw: how much each link carries of every byte, with `size` ranks."""
    share = (size - 1) / size
    return {"all_reduce": 2 * share, "broadcast": 1, "sendrecv": 1}.get(name, share)


# -- time and proof -------------------------------------------------------------------------------


def wait(device: torch.device) -> None:
    """Until all that was asked of the GPU is done: a collective returns before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_for(run: Callable[[], object], iterations: int, device: torch.device) -> float:
    """Seconds of one run: the slowest rank's mean, since all wait for it."""
    run()  # the first one opens the connections
    wait(device)
    dist.barrier()
    started = time.perf_counter()
    for _ in range(iterations):
        run()
    wait(device)
    mean = torch.tensor((time.perf_counter() - started) / iterations, device=device)
    dist.all_reduce(mean, dist.ReduceOp.MAX)
    return float(mean)


def measure(
    name: str, sizes: Iterable[int], iterations: int, device: torch.device
) -> list[dict[str, float]]:
    """Rows of bytes, seconds, algbw and busbw in GB/s (10^9) and wrong elements, one for a size."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sent, wanted = values(name, rank, world_size)
    rows: dict[int, dict[str, float]] = {}
    for wish in sizes:
        share = max(wish // world_size // SHARE_BYTES * SHARE_BYTES, ELEMENT_BYTES)
        part = (share if name in IN_SHARES else wish) // ELEMENT_BYTES
        send = torch.zeros(part * len(sent), dtype=torch.float32, device=device)
        receive = send if name in IN_PLACE else send.new_zeros(part * len(wanted))
        size = max(send.nbytes, receive.nbytes)
        if size in rows:  # the least that can be shared is more than was wished
            continue
        run = functools.partial(COLLECTIVES[name], receive, send)
        seconds = seconds_for(run, iterations, device)
        # one more, for the proof: a row of the view for each part
        receive.zero_()
        send.view(-1, part).copy_(torch.tensor(sent, device=device).unsqueeze(1))
        run()
        wrong = (receive.view(-1, part) != torch.tensor(wanted, device=device).unsqueeze(1)).sum()
        dist.all_reduce(wrong)
        algbw = size / seconds / 1e9
        busbw = algbw * busbw_factor(name, world_size)
        rows[size] = {"bytes": size, "seconds": seconds, "algbw": algbw, "busbw": busbw}
        rows[size]["wrong"] = int(wrong)
    return list(rows.values())


def main() -> int:
    arguments = parse_arguments()
    sizes = sizes_of(arguments)
    device = bind_device()
    # the group's timeout does not cover NCCL's own start, which can hang: a deadline until then
    faulthandler.dump_traceback_later(2 * TIMEOUT.seconds, exit=True)
    store, rank, world_size = meet(device, TIMEOUT)
    try:
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=5 * TIMEOUT,  # many large ones may be on their way at once
            device_id=device if device.type == "cuda" else None,
        )
        faulthandler.cancel_dump_traceback_later()
        # torch lets no rank send to itself
        left_out = {"sendrecv"} if world_size == 1 else set()
        names = [name for name in arguments.collective if name not in left_out]
        rows = {name: measure(name, sizes, arguments.iterations, device) for name in names}
        ok = not any(row["wrong"] for each in rows.values() for row in each)
        if rank == 0:
            facts = {
                "script": "bandwidth",
                "ok": ok,
                "backend": dist.get_backend(),
                "world_size": world_size,
                **rows,
                "torch": torch.__version__,
            }
            sys.stdout.write(json.dumps(facts) + "\n")
            sys.stdout.flush()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
