"""How torchrun is started, and what is read from its summary."""

import sys

import pytest

from muster import launch
from muster.launch import RankFailure
from muster.topology import Topology

# the words of torch.distributed.elastic's ChildFailedError
SUMMARY = """
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
all_reduce.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-01-01_00:00:01
  host      : node-0
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 11)
  error_file: <N/A>
  traceback : To enable traceback see: torch's documentation of elastic/errors
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : node-1
  rank      : 13 (local_rank: 5)
  exitcode  : {exitcode} (pid: 12)
  error_file: <N/A>
  traceback : -
============================================================
"""


def test_torchrun_is_started_under_this_interpreter_with_a_free_port() -> None:
    argv = launch.torchrun(Topology(nnodes=1, nproc_per_node=4), "ddp_demo.py", ["--steps", "9"])
    assert argv == [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nnodes=1", "--nproc-per-node=4", "ddp_demo.py", "--steps", "9"),
    ]


@pytest.mark.parametrize(
    ("exitcode", "words"),
    [
        (1, "rank 13 ended with exit code 1"),
        (-9, "rank 13 was ended by SIGKILL"),
        (-6, "rank 13 was ended by SIGABRT"),
    ],
)
def test_the_rank_that_failed_first_is_the_root_cause(exitcode: int, words: str) -> None:
    failure = launch.first_failure(SUMMARY.format(exitcode=exitcode))
    assert failure == RankFailure(rank=13, local_rank=5, exitcode=exitcode)
    assert str(failure) == words


@pytest.mark.parametrize("output", ["", "rank : 1 (local_rank: 1)\nexitcode : 1", "Root Cause"])
def test_output_without_a_root_cause_names_no_rank(output: str) -> None:
    assert launch.first_failure(output) is None
