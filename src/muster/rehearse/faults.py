"""What can be made to go wrong in a rehearsal, and what the job is to do about it."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from muster.errors import FaultNeedsNodes, UnknownFault
from muster.topology import NodeRange

# no GPU program runs in so little, and a DataLoader's worker dies of it
TINY_SHM_BYTES: Final = 2**20
# what missing-node has in the place of the manifest's join_timeout, which is half an hour
SHORT_JOIN_TIMEOUT_S: Final = 20
# how long a job that hangs is looked at before it is told to end
HANG_S: Final = 10


class Fault(StrEnum):
    """One thing that goes wrong. "last" is the pod with the highest index."""

    LATE_NODE = "late-node"
    MISSING_NODE = "missing-node"
    NODE_KILLED = "node-killed"
    LEADER_KILLED = "leader-killed"
    LATE_DNS = "late-dns"
    TINY_SHM = "tiny-shm"
    PREEMPTED = "preempted"
    PORT_TAKEN = "port-taken"
    RANK_RAISES = "rank-raises"
    RANK_HANGS = "rank-hangs"
    SCALE_UP = "scale-up"
    SCALE_DOWN = "scale-down"


# what happens, in words, and what the job is to do then
STORIES: Final = {
    Fault.LATE_NODE: ("the last pod comes late", "the others wait for it"),
    Fault.MISSING_NODE: ("the last pod never comes", "the others end, and say why"),
    Fault.NODE_KILLED: ("the last pod's node dies", "its replacement joins, and the job completes"),
    Fault.LEADER_KILLED: ("pod 0's node dies", "all meet again at its replacement"),
    Fault.LATE_DNS: ("pod 0's name is late in DNS", "the others ask again until it is there"),
    Fault.TINY_SHM: ("/dev/shm has 1 MiB", "the job completes without it, or ends and says so"),
    Fault.PREEMPTED: ("every pod is told to end", "all end in their grace, and start again"),
    Fault.PORT_TAKEN: ("pod 0's rendezvous port is taken", "pod 0 ends, its replacement serves"),
    Fault.RANK_RAISES: ("the last rank raises at its start", "torchrun starts the ranks again"),
    Fault.RANK_HANGS: ("the last rank hangs", "all pods still end in their grace when told to"),
    Fault.SCALE_UP: ("the pods above MIN come later", "they join, and all ranks start again"),
    Fault.SCALE_DOWN: ("the last pod goes and stays away", "the others go on without it"),
}
_SECONDS: Final = {Fault.LATE_NODE: 20, Fault.LATE_DNS: 20}
_OF_SEVERAL: Final = {
    *(Fault.LATE_NODE, Fault.MISSING_NODE, Fault.LATE_DNS, Fault.SCALE_UP, Fault.SCALE_DOWN),
}

RAISE: Final = b'''\
import os


class RaisedByTheRehearsal(BaseException):
    """No Exception: Python's site module swallows those."""


if os.environ.get("RANK") == os.environ.get("MUSTER_FAULT_RANK"):
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        raise RaisedByTheRehearsal("this rank was to fail once")
'''

# in the pod: stops the process of one rank, which then answers to nothing
STOP_RANK: Final = """
import os, signal, sys
from pathlib import Path
for process in Path("/proc").glob("[0-9]*"):
    try:
        environment = (process / "environ").read_bytes().split(b"\\0")
    except OSError:
        continue
    if b"RANK=" + sys.argv[1].encode() in environment:
        os.kill(int(process.name), signal.SIGSTOP)
"""

# beside pod 0, in its network: holds the port until it is killed
HOLD_PORT: Final = """
import signal, socket, sys
held = socket.create_server(("", int(sys.argv[1])))
signal.pause()
"""


@dataclass(frozen=True)
class Plan:
    """The fault to play, if one; `seconds` for those that last."""

    fault: Fault | None = None
    seconds: int = 0

    @property
    def story(self) -> str:
        """What happens and what is to follow."""
        if self.fault is None:
            return "nothing goes wrong, and the job completes"
        happens, follows = STORIES[self.fault]
        late = f" ({self.seconds} s)" if self.seconds else ""
        return f"{happens}{late}: {follows}"


def parse(text: str) -> Plan:
    """NAME or NAME:SECONDS. Raises UnknownFault."""
    name, colon, seconds = text.partition(":")
    if name not in list(Fault) or (colon and not re.fullmatch(r"[1-9]\d{0,3}", seconds)):
        raise UnknownFault(text, list(Fault))
    fault = Fault(name)
    if colon and fault not in _SECONDS:
        raise UnknownFault(text, list(Fault))
    return Plan(fault, int(seconds) if colon else _SECONDS.get(fault, 0))


def check(plan: Plan, pods: int, nodes: NodeRange | None) -> None:
    """FaultNeedsNodes when the manifest has not the nodes for the fault."""
    fault = plan.fault
    if fault is None:
        return
    if fault in _OF_SEVERAL and pods < 2:
        raise FaultNeedsNodes(fault, "the manifest has one pod only")
    if fault not in {Fault.SCALE_UP, Fault.SCALE_DOWN}:
        return
    if not (nodes and nodes.elastic):
        raise FaultNeedsNodes(fault, "--nnodes is not MIN:MAX")
    if pods <= nodes.least:
        raise FaultNeedsNodes(fault, f"--nnodes {nodes} needs all {pods} pods")
