"""Rank 1 takes more memory than the container has."""

from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
held = []
while dist.get_rank() == 1:
    held.append(torch.ones(2**25))
dist.barrier()
