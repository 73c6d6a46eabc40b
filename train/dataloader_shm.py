"""Does /dev/shm hold what a DataLoader worker hands to its rank?

A worker is a process of its own: it puts each batch into shared memory, and the rank maps it.
A container has 64 MiB of that unless it is given more, and one sample of 80 MiB exceeds it.
Here one worker hands over one such sample, and the rank compares every byte that arrives.

A question about one node, so no torchrun and no GPU; on two nodes, the same line on each:
    python train/dataloader_shm.py
In a container it fails with the first line and passes with the second:
    docker run --rm --shm-size=64m IMAGE python train/dataloader_shm.py
    docker run --rm --shm-size=1g IMAGE python train/dataloader_shm.py
"""

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

SHM = Path("/dev/shm")
MIB = 2**20


class OneSample(Dataset[torch.Tensor]):
    """One sample whose every 8 bytes differ, so nothing lost or moved goes unnoticed."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(index, self.size_bytes // 8, dtype=torch.int64)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sample-mib",
        type=int,
        default=80,
        metavar="MIB",
        help="size of the sample in MiB (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=int,
        default=60,
        metavar="SECONDS",
        help="how long the rank waits for its worker (default: %(default)s)",
    )
    arguments = parser.parse_args()
    if min(arguments.sample_mib, arguments.timeout) < 1:
        parser.error("--sample-mib and --timeout must be at least 1")
    return arguments


def what_went_wrong(size_bytes: int, timeout: int) -> str | None:
    """Torch's own words or ours if the sample did not arrive intact; None if it did."""
    dataset = OneSample(size_bytes)
    # A batch, even of one: its worker builds it in shared memory and reports when that fails.
    # Without batches the copy is made in a background thread, whose failure only looks like a hang.
    loader = DataLoader(dataset, batch_size=1, num_workers=1, timeout=timeout)
    try:
        (batch,) = loader
    except (RuntimeError, OSError) as error:
        # The last line is the cause; the lines above it are the worker's traceback.
        return str(error).strip().splitlines()[-1]
    arrived = batch[0]
    if not arrived.is_shared():
        return "the sample arrived, but not through shared memory"
    differ = int((arrived != dataset[0]).sum().item())
    return f"{differ} of {arrived.numel()} numbers arrived changed" if differ else None


def main() -> int:
    arguments = parse_arguments()
    if not SHM.is_dir():
        sys.stderr.write(f"{SHM} is missing: mount a tmpfs of at least 1 GiB there\n")
        return 1
    started = time.perf_counter()
    shm = shutil.disk_usage(SHM)
    sample_bytes = arguments.sample_mib * MIB
    wrong = what_went_wrong(sample_bytes, arguments.timeout)
    facts = {
        "script": "dataloader_shm",
        "ok": wrong is None,
        "shm_bytes": shm.total,
        "shm_free_bytes": shm.free,
        "sample_bytes": sample_bytes,
        "seconds": round(time.perf_counter() - started, 3),
        "torch": torch.__version__,
    }
    sys.stdout.write(json.dumps(facts) + "\n")
    if wrong is not None:
        remedy = "; give the container more: --shm-size=1g, or a memory emptyDir in its pod"
        sys.stderr.write(
            f"{SHM} ({shm.total / MIB:.0f} MiB, {shm.free / MIB:.0f} MiB free) did not carry"
            f" a sample of {arguments.sample_mib} MiB from a DataLoader worker: {wrong}"
            f"{remedy if shm.free < sample_bytes else ''}\n"
        )
    return 0 if wrong is None else 1


if __name__ == "__main__":
    sys.exit(main())
