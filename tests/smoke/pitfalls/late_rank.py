"""Run a script of train/ whose last rank never comes: `late_rank.py SCRIPT ARGUMENT...`.

It hangs before the group exists, as one does that waits for a lock or for its data.
"""

import os
import runpy
import signal
import sys

if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
    signal.pause()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
