"""The facts of a log that the picture is made of, a bounded number of them for each rank."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from sys import intern
from typing import NamedTuple

from muster.explain.events import Event, Field, What

DEFAULT_GROUP = "0"
# more than any job has; a log of hostile text ends at the same memory
_MOST_RANKS = 1_000_000
_MOST_PROCESSES = 200_000
_MOST_COMMS = 100_000
_MOST_GROUPS = 1_000
_MOST_LINKS = 500_000
# ranks of all communicators, works of all groups and variables of all processes
_MOST_KEPT = 2_000_000
_MOST_BANNERS = 1_000
_UNKNOWN = ""


class ProcessId(NamedTuple):
    host: str
    pid: int


@dataclass(slots=True)
class Process:
    rank: int | None = None
    nranks: int = 0
    network: str | None = None
    version: str | None = None
    driver: str | None = None
    variables: dict[str, str] = field(default_factory=dict)

    def join(self, other: "Process") -> None:
        if other.nranks >= self.nranks:
            self.rank, self.nranks = other.rank, other.nranks
        self.network = other.network or self.network
        self.version = other.version or self.version
        self.driver = other.driver or self.driver
        self.variables.update(other.variables)


@dataclass(slots=True)
class Comm:
    nranks: int
    started: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)


class Link(NamedTuple):
    """A pair of ranks, the lower first: where one talks to the other, the other answers."""

    host: str
    low: int
    high: int
    via: str


@dataclass(slots=True)
class Sketch:
    """The facts so far. `splits` are communicators without a commId: whether their init is done.

    `direct`: whether a host's connections through the network use GPUDirect. `channels` are the
    most that were said of each kind, `enqueued` is each rank's last work in a process group. `kept`
    counts what grows with ranks, so that it can end.
    """

    processes: dict[ProcessId, Process] = field(default_factory=dict)
    comms: dict[str, Comm] = field(default_factory=dict)
    splits: dict[tuple[ProcessId, str], bool] = field(default_factory=dict)
    links: set[Link] = field(default_factory=set)
    direct: dict[str, bool] = field(default_factory=dict)
    enqueued: dict[str, dict[int, int]] = field(default_factory=dict)
    banners: set[str] = field(default_factory=set)
    channels: dict[Field, int] = field(default_factory=dict)
    trees: bool = False
    nvls_available: bool | None = None
    busbw_gb_s: float | None = None
    kept: int = 0

    def add(self, event: Event) -> None:
        """Take in what `event` says."""
        if event.what is What.WATCHDOG_STATUS and event.rank is not None:
            group = event.fields.get(Field.GROUP, DEFAULT_GROUP)
            if group in self.enqueued or len(self.enqueued) < _MOST_GROUPS:
                ranks = self.enqueued.setdefault(group, {})
                if self._is_kept(event.rank, ranks):
                    ranks[event.rank] = int(event.fields[Field.LAST_ENQUEUED])
        elif event.what is What.AVERAGE_BANDWIDTH:
            self.busbw_gb_s = float(event.fields[Field.BUSBW])
        elif event.what in _OF_A_PROCESS:
            self._of_a_process(event)
        elif event.what is What.CONNECTION:
            self._connection(event)
        elif event.what in _OF_AN_INIT:
            self._init(event)
        elif event.what in _OF_THE_CHANNELS:
            self._channel(event)

    def _is_kept(self, item: int | str, known: Container[int | str]) -> bool:
        """Whether `item` is known or there is room for it, which it then takes."""
        if item in known:
            return True
        self.kept += self.kept < _MOST_KEPT
        return self.kept < _MOST_KEPT

    def _of_a_process(self, event: Event) -> None:
        fields = event.fields
        if event.what is What.VERSION and event.host is None:
            # to 2.21 the banner has no header, and rank 0 alone writes it
            if len(self.banners) < _MOST_BANNERS:
                self.banners.add(fields[Field.VERSION])
            return
        process = self._process(event)
        if event.what is What.ENVIRONMENT:
            if self._is_kept(fields[Field.VARIABLE], process.variables):
                process.variables[intern(fields[Field.VARIABLE])] = intern(fields[Field.VALUE])
        elif event.what is What.USING_NETWORK:
            process.network = intern(fields[Field.NETWORK])
        elif event.what is What.VERSION:
            process.version = intern(fields[Field.VERSION])
        else:
            process.driver = intern(fields[Field.DRIVER])

    def _process(self, event: Event) -> Process:
        name = ProcessId(event.host or _UNKNOWN, event.pid or 0)
        if name not in self.processes and len(self.processes) >= _MOST_PROCESSES:
            return Process()
        return self.processes.setdefault(name, Process())

    def _connection(self, event: Event) -> None:
        via, host = event.fields[Field.VIA], event.host or _UNKNOWN
        source, target = (int(event.fields[end]) for end in (Field.SOURCE_RANK, Field.TARGET_RANK))
        if via.startswith("NET/") and (host in self.direct or len(self.direct) < _MOST_PROCESSES):
            self.direct[host] = self.direct.get(host, False) or "GDRDMA" in via
        if len(self.links) < _MOST_LINKS:
            low, high = sorted((source, target))
            self.links.add(Link(host, low, high, intern(_transport(via))))

    def _init(self, event: Event) -> None:
        rank, nranks = event.rank, int(event.fields[Field.NRANKS])
        if rank is None or nranks > _MOST_RANKS:
            return
        process = self._process(event)
        if nranks >= process.nranks:
            process.rank, process.nranks = rank, nranks
        if event.what is What.TOPOLOGY:
            return
        done = event.what is What.INIT_COMPLETE
        if (key := event.fields.get(Field.COMM_ID)) is None:
            name = (ProcessId(event.host or _UNKNOWN, event.pid or 0), event.fields[Field.COMM])
            if done or len(self.splits) < _MOST_COMMS:
                self.splits[name] = done
        elif key in self.comms or len(self.comms) < _MOST_COMMS:
            comm = self.comms.setdefault(key, Comm(nranks))
            ranks = comm.finished if done else comm.started
            if self._is_kept(rank, ranks):
                ranks.add(rank)

    def _channel(self, event: Event) -> None:
        self._most({name: int(text) for name, text in event.fields.items() if name in _COUNTED})
        if event.what is What.NVLS:
            self.nvls_available = event.fields[Field.AVAILABLE] == "available"
        self.trees = self.trees or event.what is What.TREES or "all trees" in event.message

    def _most(self, channels: Mapping[Field, int]) -> None:
        for name, count in channels.items():
            self.channels[name] = max(count, self.channels.get(name, 0))

    def join(self, other: "Sketch") -> None:
        """Take in what the sketch of a later part of the log holds."""
        for name, process in other.processes.items():
            self.processes.setdefault(name, Process()).join(process)
        for key, comm in other.comms.items():
            mine = self.comms.setdefault(key, Comm(comm.nranks))
            mine.started |= comm.started
            mine.finished |= comm.finished
        for split, done in other.splits.items():
            self.splits[split] = done or self.splits.get(split, False)
        for host, direct in other.direct.items():
            self.direct[host] = direct or self.direct.get(host, False)
        for group, enqueued in other.enqueued.items():
            self.enqueued.setdefault(group, {}).update(enqueued)
        self._most(other.channels)
        self.trees = self.trees or other.trees
        self.kept += other.kept
        if other.nvls_available is not None:
            self.nvls_available = other.nvls_available
        self.links |= other.links
        self.banners |= other.banners
        self.busbw_gb_s = self.busbw_gb_s if other.busbw_gb_s is None else other.busbw_gb_s


_OF_A_PROCESS = frozenset({What.ENVIRONMENT, What.USING_NETWORK, What.VERSION, What.DRIVER})
_OF_AN_INIT = frozenset({What.INIT_START, What.INIT_COMPLETE, What.TOPOLOGY})
_OF_THE_CHANNELS = frozenset({What.RINGS, What.TREES, What.NVLS, What.CHANNELS, What.CONNECTED})
_COUNTED = frozenset({Field.CHANNELS, Field.COLL_CHANNELS, Field.NVLS_CHANNELS, Field.P2P_CHANNELS})


def _transport(via: str) -> str:
    """P2P/CUMEM of "P2P/CUMEM/read", SHM of "SHM/direct", NET/IB of "NET/IB/0/GDRDMA"."""
    parts = via.split("/")
    return parts[0] if parts[0] == "SHM" else "/".join(parts[:2])
