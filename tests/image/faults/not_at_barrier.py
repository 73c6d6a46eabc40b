"""Rank 1 does not come to monitored_barrier in time."""

import time
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
if dist.get_rank() == 1:
    time.sleep(30)
dist.monitored_barrier(timeout=timedelta(seconds=3))
dist.destroy_process_group()
