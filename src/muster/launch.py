"""How torchrun is started, and what it says when a rank fails."""

import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from muster.topology import Topology

# torchrun's summary of the rank that failed first, under "Root Cause (first observed failure):"
# https://docs.pytorch.org/docs/stable/elastic/errors.html
_ROOT_CAUSE = re.compile(
    r"Root Cause.*?rank\s*:\s*(?P<rank>\d+)\s+\(local_rank:\s*(?P<local_rank>\d+)\)"
    r"\s*exitcode\s*:\s*(?P<exitcode>-?\d+)",
    re.DOTALL,
)


@dataclass(frozen=True)
class RankFailure:
    """The rank that failed first; `exitcode` is negative for a signal, as torchrun prints it."""

    rank: int
    local_rank: int
    exitcode: int

    def __str__(self) -> str:
        if self.exitcode < 0:
            return f"rank {self.rank} was ended by {signal.Signals(-self.exitcode).name}"
        return f"rank {self.rank} ended with exit code {self.exitcode}"


def torchrun(topology: Topology, script: str, arguments: Sequence[str] = ()) -> list[str]:
    """torchrun's argv for one node on its own, under this interpreter.

    --standalone takes a free port, so that two jobs on one machine cannot meet.
    """
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nnodes={topology.nnodes}", f"--nproc-per-node={topology.nproc_per_node}"),
        *(script, *arguments),
    ]


def first_failure(output: str) -> RankFailure | None:
    """The rank that torchrun's output names as the root cause, if it names one."""
    match = _ROOT_CAUSE.search(output)
    if match is None:
        return None
    return RankFailure(int(match["rank"]), int(match["local_rank"]), int(match["exitcode"]))
