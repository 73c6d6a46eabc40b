"""A part of the model takes no part in the loss."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
# a call that leaves the second out
model.forward = model[0].forward

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
ddp = nn.parallel.DistributedDataParallel(model)
for _ in range(2):
    ddp(torch.ones(2, 4)).sum().backward()
dist.destroy_process_group()
