"""Run a script of train/ whose rank 1 has another torch: `other_torch.py SCRIPT ARGUMENT...`."""

import os
import runpy
import sys

import torch

if os.environ["RANK"] == "1":
    torch.__version__ = "2.0.1"
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
