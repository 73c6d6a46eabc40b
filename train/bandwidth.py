r"""How fast is an all_reduce between these ranks, and is it right?

The columns are those of nccl-tests: algbw is the size over the time, busbw is algbw times
2(N-1)/N, which a ring of N ranks moves over each link, so that it can be compared with the link.
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

One node, CPU:
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 train/bandwidth.py
Two nodes with 8 GPUs each; the same on both, HOST is the name of one of them:
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=bandwidth --rdzv-backend=c10d \
        --rdzv-endpoint=HOST:29400 train/bandwidth.py --bytes 1073741824
"""

import argparse
import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

ELEMENT_BYTES = 4  # float32


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = [2**20, 2**24]
    many = "sizes of the buffer that is summed (default: 1 MiB and 16 MiB)"
    parser.add_argument("--bytes", type=int, nargs="+", default=sizes, metavar="N", help=many)
    parser.add_argument("--iterations", type=int, default=10, metavar="N", help="timed, each size")
    arguments = parser.parse_args()
    if arguments.iterations < 1 or any(size < ELEMENT_BYTES for size in arguments.bytes):
        parser.error(f"at least one iteration, and {ELEMENT_BYTES} bytes")
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


def wait(device: torch.device) -> None:
    """Until all that was asked of the GPU is done: an all_reduce returns before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_for(buffer: torch.Tensor, iterations: int) -> float:
    """Seconds of one all_reduce: the slowest rank's mean, since all wait for it."""
    wait(buffer.device)
    dist.barrier()
    started = time.perf_counter()
    for _ in range(iterations):
        dist.all_reduce(buffer)
    wait(buffer.device)
    mean = torch.tensor((time.perf_counter() - started) / iterations, device=buffer.device)
    dist.all_reduce(mean, dist.ReduceOp.MAX)
    return float(mean)


def wrong_elements(buffer: torch.Tensor) -> int:
    """How many elements are not the sum of all ranks, on any rank."""
    buffer.fill_(dist.get_rank() + 1)
    dist.all_reduce(buffer)
    world_size = dist.get_world_size()
    wrong = (buffer != world_size * (world_size + 1) // 2).sum()
    dist.all_reduce(wrong)
    return int(wrong)


def measure(size: int, iterations: int, device: torch.device) -> dict[str, float]:
    """One row: bytes, seconds, algbw and busbw in GB/s (10^9), wrong elements."""
    buffer = torch.zeros(size // ELEMENT_BYTES, dtype=torch.float32, device=device)
    dist.all_reduce(buffer)  # the first one opens the connections
    seconds = seconds_for(buffer, iterations)
    world_size = dist.get_world_size()
    algbw = size / seconds / 1e9
    return {
        "bytes": size,
        "seconds": seconds,
        "algbw": algbw,
        "busbw": algbw * 2 * (world_size - 1) / world_size,
        "wrong": wrong_elements(buffer),
    }


def main() -> int:
    arguments = parse_arguments()
    device = bind_device()
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=300),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        rows = [measure(size, arguments.iterations, device) for size in arguments.bytes]
        ok = not any(row["wrong"] for row in rows)
        if dist.get_rank() == 0:
            facts = {
                "script": "bandwidth",
                "ok": ok,
                "backend": dist.get_backend(),
                "world_size": dist.get_world_size(),
                "all_reduce": rows,
                "torch": torch.__version__,
            }
            sys.stdout.write(json.dumps(facts) + "\n")
            sys.stdout.flush()
    finally:
        dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
