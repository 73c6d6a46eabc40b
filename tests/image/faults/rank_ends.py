"""Rank 1 ends amid the work, as `argv[1]` says: by a signal or an exception, with an exit code, or
together with its torchrun.
"""

import os
import signal
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 1:
    how = sys.argv[1]
    if how == "node":
        os.kill(os.getppid(), signal.SIGKILL)
        how = "SIGKILL"
    if how == "raise":
        try:
            raise KeyError("labels")
        except KeyError:
            # gloo's threads may abort a Python that takes its time to end: another exit code
            traceback.print_exc()
            os._exit(1)
    if how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
    os._exit(int(how))
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
