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
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

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


# -- the collectives ------------------------------------------------------------------------------


class Exchange(NamedTuple):
    """One collective on buffers of one size, and what proves it.

    `sent` has the value of each equal part of `send`, `wanted` that of `receive` afterwards: small
    whole numbers, since float32 has no others that add up exactly. No two parts of a rank are
    alike, nor are the same parts of two ranks.
    """

    run: Callable[[], object]
    send: Tensor
    sent: list[int]
    receive: Tensor
    wanted: list[int]


class Ranks:
    """This rank and all ranks, and buffers on this rank's device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank: int = dist.get_rank()
        self.size: int = dist.get_world_size()

    def buffer(self, size: int) -> Tensor:
        """A buffer of `size` bytes, rounded down to an element."""
        return torch.zeros(size // ELEMENT_BYTES, dtype=torch.float32, device=self.device)

    def share(self, size: int) -> int:
        """Bytes of each rank's share of `size` bytes: one element at least."""
        return max(size // self.size // SHARE_BYTES * SHARE_BYTES, ELEMENT_BYTES)


def all_reduce(ranks: Ranks, size: int) -> Exchange:
    buffer = ranks.buffer(size)
    total = ranks.size * (ranks.size + 1) // 2
    return Exchange(lambda: dist.all_reduce(buffer), buffer, [ranks.rank + 1], buffer, [total])


def broadcast(ranks: Ranks, size: int) -> Exchange:
    buffer = ranks.buffer(size)
    return Exchange(lambda: dist.broadcast(buffer, 0), buffer, [ranks.rank + 1], buffer, [1])


def all_gather(ranks: Ranks, size: int) -> Exchange:
    share = ranks.share(size)
    send, receive = ranks.buffer(share), ranks.buffer(share * ranks.size)
    wanted = [rank + 1 for rank in range(ranks.size)]
    return Exchange(
        lambda: ALL_GATHER_SINGLE(receive, send), send, [ranks.rank + 1], receive, wanted
    )


def reduce_scatter(ranks: Ranks, size: int) -> Exchange:
    share = ranks.share(size)
    send, receive = ranks.buffer(share * ranks.size), ranks.buffer(share)
    sent = [ranks.rank + part + 1 for part in range(ranks.size)]
    wanted = [ranks.size * (ranks.size + 1) // 2 + ranks.size * ranks.rank]
    return Exchange(lambda: REDUCE_SCATTER_SINGLE(receive, send), send, sent, receive, wanted)


def alltoall(ranks: Ranks, size: int) -> Exchange:
    share = ranks.share(size) * ranks.size
    send, receive = ranks.buffer(share), ranks.buffer(share)
    sent = [ranks.rank * ranks.size + part + 1 for part in range(ranks.size)]
    wanted = [rank * ranks.size + ranks.rank + 1 for rank in range(ranks.size)]
    return Exchange(lambda: dist.all_to_all_single(receive, send), send, sent, receive, wanted)


def sendrecv(ranks: Ranks, size: int) -> Exchange:
    """Round a ring: each rank sends to the next and receives from the one before, at once."""
    send, receive = ranks.buffer(size), ranks.buffer(size)
    after, before = (ranks.rank + 1) % ranks.size, (ranks.rank - 1) % ranks.size

    def run() -> None:
        both = [dist.P2POp(dist.isend, send, after), dist.P2POp(dist.irecv, receive, before)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return Exchange(run, send, [ranks.rank + 1], receive, [before + 1])


# each with the factor from algbw to busbw for n ranks
COLLECTIVES: dict[str, tuple[Callable[[Ranks, int], Exchange], Callable[[int], float]]] = {
    "all_reduce": (all_reduce, lambda n: 2 * (n - 1) / n),
    "all_gather": (all_gather, lambda n: (n - 1) / n),
    "reduce_scatter": (reduce_scatter, lambda n: (n - 1) / n),
    "broadcast": (broadcast, lambda _: 1),
    "alltoall": (alltoall, lambda n: (n - 1) / n),
    "sendrecv": (sendrecv, lambda _: 1),
}


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


def wrong_elements(exchange: Exchange) -> int:
    """How many elements are not what they must be after one run, on all ranks together."""
    exchange.receive.zero_()
    parts = exchange.send.chunk(len(exchange.sent))
    for part, value in zip(parts, exchange.sent, strict=True):
        part.fill_(value)
    exchange.run()
    parts = exchange.receive.chunk(len(exchange.wanted))
    pairs = zip(parts, exchange.wanted, strict=True)
    wrong = torch.stack([(part != value).sum() for part, value in pairs]).sum()
    dist.all_reduce(wrong)
    return int(wrong)


def measure(
    name: str, sizes: Iterable[int], iterations: int, ranks: Ranks
) -> list[dict[str, float]]:
    """Rows of bytes, seconds, algbw and busbw in GB/s (10^9) and wrong elements, one for a size."""
    prepare, factor = COLLECTIVES[name]
    rows: dict[int, dict[str, float]] = {}
    for wish in sizes:
        exchange = prepare(ranks, wish)
        size = max(exchange.send.nbytes, exchange.receive.nbytes)
        if size in rows:  # the least that can be shared is more than was wished
            continue
        seconds = seconds_for(exchange.run, iterations, ranks.device)
        algbw = size / seconds / 1e9
        rows[size] = {
            "bytes": size,
            "seconds": seconds,
            "algbw": algbw,
            "busbw": algbw * factor(ranks.size),
            "wrong": wrong_elements(exchange),
        }
    return list(rows.values())


def main() -> int:
    arguments = parse_arguments()
    sizes = sizes_of(arguments)
    device = bind_device()
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=300),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        ranks = Ranks(device)
        # torch lets no rank send to itself
        left_out = {"sendrecv"} if ranks.size == 1 else set()
        names = [name for name in arguments.collective if name not in left_out]
        rows = {name: measure(name, sizes, arguments.iterations, ranks) for name in names}
        ok = not any(row["wrong"] for each in rows.values() for row in each)
        if ranks.rank == 0:
            facts = {
                "script": "bandwidth",
                "ok": ok,
                "backend": dist.get_backend(),
                "world_size": ranks.size,
                **rows,
                "torch": torch.__version__,
            }
            sys.stdout.write(json.dumps(facts) + "\n")
            sys.stdout.flush()
    finally:
        dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
