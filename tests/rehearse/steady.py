"""All ranks add ones, over and over, for some seconds; a rank that is lost ends them all."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 6.0

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, world_size = dist.get_rank(), dist.get_world_size()
start = time.monotonic()
while True:
    # all ranks stop after the same round
    ones = torch.tensor([1.0, float(time.monotonic() - start > SECONDS)])
    dist.all_reduce(ones)
    assert ones[0] == world_size
    if ones[1]:
        break
    time.sleep(0.1)
shared = Path("/checkpoint")
if shared.exists():
    (shared / f"rank-{rank}").touch()
    dist.barrier()
    assert len(list(shared.glob("rank-*"))) == world_size, "every rank sees what the others wrote"
    assert os.getuid() == 1000
dist.destroy_process_group()
