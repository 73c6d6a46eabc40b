"""Rank 1 makes another call than rank 0, as `argv[1]` says."""

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, how = dist.get_rank(), sys.argv[1]
group = dist.new_group(timeout=timedelta(seconds=3))
dist.all_reduce(torch.ones(4))

if how == "shape":
    dist.all_reduce(torch.ones(4 + 4 * rank), group=group)
elif how == "kind" and rank == 1:
    dist.broadcast(torch.ones(4), src=1, group=group)
    dist.barrier(group)
elif how == "kind" or rank == 1:
    dist.all_reduce(torch.ones(4), group=group)
elif how == "one more beside a busy rank":
    time.sleep(30)
dist.destroy_process_group()
