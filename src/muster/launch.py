"""How torchrun is started, how it ends, and what it says when a rank fails."""

import re
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from muster.errors import NoRendezvous
from muster.topology import NodeRange, Topology

# torchrun's summary of the rank that failed first, under "Root Cause (first observed failure):"
# https://docs.pytorch.org/docs/stable/elastic/errors.html
_ROOT_CAUSE = re.compile(
    r"Root Cause.*?rank\s*:\s*(?P<rank>\d+)\s+\(local_rank:\s*(?P<local_rank>\d+)\)"
    r"\s*exitcode\s*:\s*(?P<exitcode>-?\d+)",
    re.DOTALL,
)

# c10d's own default: torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py
RDZV_PORT = 29400
# How long a node tries to reach the store, and waits for each answer of it. A node gives up after
# about 2.3 times this, so half an hour: pod 0 may still pull its image, and a name that did not
# resolve once is denied for 30 s more (https://coredns.io/plugins/cache). torch's default is 60.
READ_TIMEOUT_S = 900
# How long the nodes that have met wait for the rest to be scheduled; torch's default is 600. The
# well-known key `timeout` does nothing with c10d.
JOIN_TIMEOUT_S = 1800
# torchrun's default between a worker's SIGTERM and its SIGKILL, and the variable for another one.
# torch 2.10 knows no other, and passes over a variable, where it would refuse the flag:
# https://github.com/pytorch/pytorch/pull/172596
SHUTDOWN_TIMEOUT_S = 30
SHUTDOWN_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
# what a pod's grace period has beyond the shutdown, for the agents' and the kubelet's own work
SPARE_S = 30

# from the annotations batch.kubernetes.io/job-index-(ignored-)failure-count
# https://kubernetes.io/docs/reference/labels-annotations-taints/#job-index-failure-count
FAILURE_COUNTS = ("MUSTER_FAILURES", "MUSTER_IGNORED_FAILURES")

# The workers get a store of their own. With the agents' store shared, a node that joins later than
# the first round waits for a MASTER_ADDR that nobody sets again, and every agent dies of it.
# https://github.com/pytorch/pytorch/issues/150916
ENVIRONMENT: Mapping[str, str] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

# Every join rewrites the one list of all nodes, and whoever loses the race tries again. Measured
# with all of them on two cores: 64 at once meet in 10 to 14 s, 128 at once in 35 s; 128 that come
# 16 a second know their ranks 1.5 s after the last has come.
# https://github.com/pytorch/pytorch/issues/121486
_NODES_AT_ONCE = 64
_JOINS_PER_S = 16
MOST_START_DELAY_S = 30.0
# So does every heartbeat. 256 nodes with torch's 5 s did not meet in 150 s there; with 60 s they
# had met 1.3 s after the last came. A node that dies is then missed after 180 s, not after 15.
_MOST_NODES_AT_5_S = 128
_SLOW_HEARTBEAT_S = 60

# Each root of NCCL's start has this many ranks, from torch 2.7 on.
# https://github.com/pytorch/pytorch/pull/144794
_RANKS_PER_ROOT = 128
_MOST_ROOTS = 128


class ExitStatus(IntEnum):
    """How the launcher ends when not with 0, for podFailurePolicy.onExitCodes.

    torchrun itself ends with 1 whatever happened. None of these is a status that others use: 1 is
    Python's for an exception, 126 and 127 are the shell's for a program that does not run, 124 and
    125 timeout's and docker's, 128 and more a signal's. 2 is argparse's, for all wrong usage.
    https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy
    """

    USAGE = 2
    WORKER_FAILED = 10
    RENDEZVOUS_FAILED = 11
    PREEMPTED = 12
    NOT_READY = 13

    def line(self, what: str) -> str:
        """The launcher's last line: `what` happened, and this status in words."""
        return f"muster: {what}; exit status {self:d} = {self.name.lower().replace('_', ' ')}\n"


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


def torchrun(
    topology: Topology, script: str, arguments: Sequence[str] = (), *, flags: Sequence[str] = ()
) -> list[str]:
    """torchrun's argv for one node on its own, under this interpreter; `flags` are further ones.

    --standalone takes a free port, so that two jobs on one machine cannot meet.
    """
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nnodes={topology.nnodes}", f"--nproc-per-node={topology.nproc_per_node}"),
        *(*flags, script, *arguments),
    ]


def first_failure(output: str) -> RankFailure | None:
    """The rank that torchrun's output names as the root cause, if it names one."""
    match = _ROOT_CAUSE.search(output)
    if match is None:
        return None
    return RankFailure(int(match["rank"]), int(match["local_rank"]), int(match["exitcode"]))


# ---- several nodes -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Rendezvous:
    """Where the nodes meet. `host` is the full name of the node with index 0, for all others."""

    rdzv_id: str
    host: str
    port: int = RDZV_PORT
    read_timeout_s: int = READ_TIMEOUT_S
    join_timeout_s: int = JOIN_TIMEOUT_S

    @property
    def endpoint(self) -> str:
        # a literal IPv6 address goes in brackets
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def conf(self) -> dict[str, str]:
        return {
            "join_timeout": str(self.join_timeout_s),
            "read_timeout": str(self.read_timeout_s),
        }


def arguments(
    nodes: NodeRange,
    nproc_per_node: int,
    rendezvous: Rendezvous,
    *,
    max_restarts: int,
    script: str,
    script_arguments: Sequence[str],
) -> list[str]:
    """torchrun's arguments that are the same on every node."""
    flags = [
        f"--nnodes={nodes}",
        f"--nproc-per-node={nproc_per_node}",
        f"--rdzv-id={rendezvous.rdzv_id}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={rendezvous.endpoint}",
        f"--rdzv-conf={_conf(nodes, rendezvous)}",
        f"--max-restarts={max_restarts}",
    ]
    return [*flags, script, *script_arguments]


def for_index(arguments: Sequence[str], index: int) -> list[str]:
    """The same with what only the node `index` is given. Raises NoRendezvous.

    Who hosts the store is said, not guessed from host names, which fails for a pod's short name,
    a second interface or a name that is not published yet.
    https://github.com/pytorch/pytorch/issues/73380

    The ranks follow the order of --local-addr, as text, and only that of rank 0 is ever dialled
    (https://github.com/pytorch/pytorch/issues/191190). So index 0 gives its name, and the others
    what sorts after any name in the order of the indexes: rank and index are equal.
    """
    line = CommandLine.read(arguments)
    endpoint = line.value("rdzv-endpoint")
    if not endpoint:
        raise NoRendezvous("--rdzv-endpoint", "there is none")
    leads = index == 0
    conf = [line.value("rdzv-conf"), f"is_host={'true' if leads else 'false'}"]
    address = host_and_port(endpoint)[0] if leads else f"~node-{index:05d}"
    return [
        *line.flags_without("rdzv-conf", "local-addr"),
        f"--rdzv-conf={','.join(each for each in conf if each)}",
        f"--local-addr={address}",
        *line.command,
    ]


def by_hand(
    nodes: NodeRange,
    nproc_per_node: int,
    rendezvous: Rendezvous,
    script: str,
    script_arguments: Sequence[str],
    index: int,
) -> str:
    """The shell command that starts node `index` without Kubernetes, with torchrun alone."""
    same = arguments(
        nodes,
        nproc_per_node,
        rendezvous,
        max_restarts=0,
        script=script,
        script_arguments=script_arguments,
    )
    environment = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    return shlex.join([*environment, "torchrun", *for_index(same, index)])


def host_and_port(endpoint: str) -> tuple[str, int]:
    """The two parts of an --rdzv-endpoint, as torchrun takes it apart."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdecimal():
        host, port = endpoint, str(RDZV_PORT)
    return host.removeprefix("[").removesuffix("]"), int(port)


def _conf(nodes: NodeRange, rendezvous: Rendezvous) -> str:
    conf = rendezvous.conf
    if nodes.most > _MOST_NODES_AT_5_S:
        conf["keep_alive_interval"] = str(_SLOW_HEARTBEAT_S)
    return ",".join(f"{key}={value}" for key, value in conf.items())


# ---- how long, and how many at once --------------------------------------------------------------


def join_timeout_s(deadline_s: int | None) -> int:
    """The join timeout of a job that Kubernetes ends after `deadline_s`.

    Half of it: the rendezvous fails, and says so, before the deadline cuts the job off in silence.
    """
    return JOIN_TIMEOUT_S if deadline_s is None else max(1, min(JOIN_TIMEOUT_S, deadline_s // 2))


def read_timeout_s(deadline_s: int | None) -> int:
    """The read timeout of such a job: 2.3 times this, too, are within half of the deadline."""
    return READ_TIMEOUT_S if deadline_s is None else max(1, min(READ_TIMEOUT_S, deadline_s // 5))


def shutdown_timeout_s(checkpoint_s: int) -> int:
    """The shutdown timeout for workers that need `checkpoint_s` after a SIGTERM to save their work.

    torchrun kills them at the end of it, however long the pod's grace period is.
    """
    return SHUTDOWN_TIMEOUT_S + checkpoint_s


def grace_s(checkpoint_s: int) -> int:
    """The pod's terminationGracePeriodSeconds: the agent is done before the kubelet kills it."""
    return shutdown_timeout_s(checkpoint_s) + SPARE_S


def start_delay_s(index: int, nnodes: int) -> float:
    """How long the node `index` waits before it joins, so that a large job does not come at once.

    The nodes come evenly, in the order of their indexes; index 0, which hosts the store, at once.
    """
    if nnodes <= _NODES_AT_ONCE:
        return 0.0
    return index / nnodes * min(nnodes / _JOINS_PER_S, MOST_START_DELAY_S)


def staggering(world_size: int) -> dict[str, str]:
    """The environment that spreads the start of NCCL over its roots, by the number of ranks.

    Empty up to 16384 ranks. torch gives each 128 ranks a root, and NCCL (from 2.23) staggers on its
    own where a root has more than 256: NCCL_UID_STAGGER_THRESHOLD, at NCCL_UID_STAGGER_RATE = 7000
    ranks a second. https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html

    Above that every rank would read the ids of hundreds of roots, 128 bytes each, from the one
    store of rank 0. So the roots stay 128, and each has more ranks.
    """
    ranks_per_root = -(-world_size // _MOST_ROOTS)
    if ranks_per_root <= _RANKS_PER_ROOT:
        return {}
    return {"TORCH_NCCL_RANKS_PER_ROOT": str(ranks_per_root)}


# ---- reading a command line ----------------------------------------------------------------------

# torchrun's flags without a value; every other takes the next word unless it has a "="
_SWITCHES = frozenset(
    {"standalone", "m", "module", "no-python", "run-path", "virtual-local-rank", "h", "help"}
)


@dataclass(frozen=True)
class CommandLine:
    """torchrun's arguments, taken apart as torchrun does: its own flags, then the script's."""

    flags: tuple[tuple[str, ...], ...]
    command: tuple[str, ...]

    @classmethod
    def read(cls, arguments: Sequence[str]) -> "CommandLine":
        flags: list[tuple[str, ...]] = []
        rest = list(arguments)
        while rest and rest[0].startswith("-"):
            takes_next = "=" not in rest[0] and _name(rest[0]) not in _SWITCHES
            flags.append(tuple(rest[: 2 if takes_next else 1]))
            del rest[: len(flags[-1])]
        return cls(tuple(flags), tuple(rest))

    def value(self, name: str) -> str | None:
        """The value of the flag `name`, the last one if it is there twice."""
        values = [
            flag[1] if len(flag) == 2 else flag[0].partition("=")[2]
            for flag in self.flags
            if _name(flag[0]) == name
        ]
        return values[-1] if values else None

    def has(self, *names: str) -> bool:
        return any(_name(flag[0]) in names for flag in self.flags)

    def flags_without(self, *names: str) -> list[str]:
        return [word for flag in self.flags if _name(flag[0]) not in names for word in flag]


def _name(word: str) -> str:
    """A flag's name in one of torchrun's two spellings: --rdzv_conf=x is rdzv-conf."""
    return word.lstrip("-").partition("=")[0].replace("_", "-")
