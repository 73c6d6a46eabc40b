"""A bare loop of each collective beside train/bandwidth.py: the same ranks, sizes and iterations.

    PYTHONPATH=. torchrun --standalone --nproc-per-node=2 bench/bare_loop.py

Size by size both run right after each other, now the one first and now the other, so that what
else the machine does is in both. Rank 0 prints the seconds of each row: the script's, the loop's.
bench/smoke.py runs it in the image.
"""

import json
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from train import bandwidth

ROUNDS = 8
ITERATIONS = 10
# as the suite on a CPU, from the least that two ranks share as they are asked to
SIZES = [2**power for power in range(5, 25)]


def by_script(name: str, size: int) -> float:
    (row,) = bandwidth.measure(name, [size], ITERATIONS, torch.device("cpu"))
    return row["seconds"]


def by_loop(name: str, size: int) -> float:
    """Seconds of one call: the slowest rank's mean, its first call not counted, as the script's."""
    run = collective(name, size)
    run()
    dist.barrier()
    started = time.perf_counter()
    for _ in range(ITERATIONS):
        run()
    mean = (time.perf_counter() - started) / ITERATIONS
    means = [0.0] * dist.get_world_size()
    dist.all_gather_object(means, mean)
    return max(means)


def collective(name: str, size: int) -> Callable[[], object]:
    whole, other = torch.zeros(size // 4), torch.zeros(size // 4)
    part = torch.zeros(size // 4 // dist.get_world_size())
    known: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_single(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "alltoall": lambda: dist.all_to_all_single(other, whole),
        "sendrecv": lambda: ring(other, whole),
    }
    return known[name]


def ring(receive: torch.Tensor, send: torch.Tensor) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sends = dist.P2POp(dist.isend, send, (rank + 1) % ranks)
    receives = dist.P2POp(dist.irecv, receive, (rank - 1) % ranks)
    for work in dist.batch_isend_irecv([sends, receives]):
        work.wait()


def main() -> int:
    dist.init_process_group("gloo")
    rows: dict[tuple[str, int], list[tuple[float, float]]] = {
        (name, size): [] for name in bandwidth.COLLECTIVES for size in SIZES
    }
    for number in range(ROUNDS):
        for (name, size), seconds in rows.items():
            if number % 2:
                loop = by_loop(name, size)
                seconds.append((by_script(name, size), loop))
            else:
                script = by_script(name, size)
                seconds.append((script, by_loop(name, size)))
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(list(rows.values())) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
