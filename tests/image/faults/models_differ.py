"""The model of rank 1 is larger than that of rank 0."""

from datetime import timedelta

import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
nn.parallel.DistributedDataParallel(nn.Linear(4, 4 + dist.get_rank()))
dist.destroy_process_group()
