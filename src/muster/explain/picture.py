"""What a log says of a job even when nothing failed: networks, links, channels, versions, ranks."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from typing import Any

from muster import switches
from muster.explain.events import Event, Field
from muster.explain.mask import masked
from muster.explain.sketch import DEFAULT_GROUP, Comm, Sketch

_MOST_RUNS = 30


@dataclass(frozen=True)
class Ranks:
    """Ranks as runs, first and last of each: few, where 4,095 of 4,096 are meant."""

    runs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, ranks: Iterable[int]) -> "Ranks":
        runs: list[tuple[int, int]] = []
        for rank in sorted(set(ranks)):
            if runs and runs[-1][1] == rank - 1:
                runs[-1] = (runs[-1][0], rank)
            else:
                runs.append((rank, rank))
        return cls(tuple(runs))

    @classmethod
    def without(cls, nranks: int, ranks: Iterable[int]) -> "Ranks":
        """Those from 0 to `nranks` that are not among `ranks`."""
        bounds = [-1, *sorted({rank for rank in ranks if rank < nranks}), nranks]
        gaps = ((before + 1, after - 1) for before, after in pairwise(bounds))
        return cls(tuple((first, last) for first, last in gaps if first <= last))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(range(first, last + 1) for first, last in self.runs)

    def __len__(self) -> int:
        return sum(last - first + 1 for first, last in self.runs)

    def __str__(self) -> str:
        """The runs; of many the first, and how many ranks there are beside them."""
        shown = Ranks(self.runs[:_MOST_RUNS])
        runs = [str(first) if first == last else f"{first}-{last}" for first, last in shown.runs]
        if more := len(self) - len(shown):
            runs.append(f"and {more} more")
        return ", ".join(runs)


@dataclass(frozen=True, kw_only=True)
class Node:
    """`networks` are what "Using network" named there: more than one is worth a look.

    `gpu_direct`: whether a connection through the network uses it; None where the log shows none.
    `links` counts pairs of ranks by how they talk, {"P2P/CUMEM": 28, "NET/IB": 2}; what ends in
    "within the node" goes through the network between GPUs of one node.
    """

    host: str
    ranks: Ranks
    networks: tuple[str, ...]
    gpu_direct: bool | None
    links: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Channels:
    """What NCCL built. None and 0 where the log does not say."""

    rings: int
    collectives: int
    nvls: int
    p2p: int
    trees: bool
    nvls_available: bool | None


@dataclass(frozen=True, kw_only=True)
class Communicator:
    """How the init of a communicator went. `key` is its commId.

    `missing` never started it, as far as this log goes; `unfinished` started and did not finish.
    """

    key: str
    nranks: int
    started: int
    missing: Ranks
    unfinished: Ranks


@dataclass(frozen=True, kw_only=True)
class LastWork:
    """The last enqueued work of every rank that said it, in one process group.

    `behind` are the ranks with the lowest number, where they are not all equal: they never called
    the collective that the others wait in. `silent` ranks are known and said nothing.
    """

    group: str
    enqueued: Mapping[int, int]
    behind: Ranks
    silent: Ranks


@dataclass(frozen=True, kw_only=True)
class Variable:
    """`values` counts the processes that said each. `switch`: it is for finding faults only."""

    name: str
    values: Mapping[str, int]
    switch: bool


@dataclass(frozen=True, kw_only=True)
class Picture:
    nodes: tuple[Node, ...]
    channels: Channels | None
    nccl_versions: Mapping[str, int]
    cuda_drivers: Mapping[str, int]
    communicators: tuple[Communicator, ...]
    splits_unfinished: int
    last_work: tuple[LastWork, ...]
    variables: tuple[Variable, ...]
    busbw_gb_s: float | None

    @property
    def mixed_versions(self) -> bool:
        return len(self.nccl_versions) > 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def picture(events: Iterable[Event]) -> Picture:
    sketch = Sketch()
    for event in events:
        sketch.add(event)
    return drawn(sketch)


def drawn(sketch: Sketch) -> Picture:
    """What all of it comes to."""
    processes = sketch.processes.values()
    versions = Counter(process.version for process in processes if process.version)
    # a banner counts once; of NCCL that puts the version into every process's log it is known
    versions.update(sketch.banners - versions.keys())
    return Picture(
        nodes=_nodes(sketch),
        channels=_channels(sketch),
        nccl_versions=dict(versions.most_common()),
        cuda_drivers=dict(Counter(p.driver for p in processes if p.driver).most_common()),
        communicators=tuple(_communicator(key, comm) for key, comm in sketch.comms.items()),
        splits_unfinished=sum(not done for done in sketch.splits.values()),
        last_work=tuple(_last_work(sketch, group) for group in sorted(sketch.enqueued)),
        variables=_variables(sketch),
        busbw_gb_s=sketch.busbw_gb_s,
    )


def _nodes(sketch: Sketch) -> tuple[Node, ...]:
    links = _counted_links(sketch)
    ranks: defaultdict[str, set[int]] = defaultdict(set)
    networks: defaultdict[str, set[str]] = defaultdict(set)
    for name, process in sketch.processes.items():
        if process.rank is not None:
            ranks[name.host].add(process.rank)
        if process.network:
            networks[name.host].add(process.network)
    return tuple(
        Node(
            host=host,
            ranks=Ranks.of(ranks[host]),
            networks=tuple(sorted(networks[host])),
            gpu_direct=sketch.direct.get(host),
            links=dict(links[host].most_common()) if host in links else {},
        )
        for host in sorted(ranks.keys() | networks.keys() | links.keys())
    )


def _counted_links(sketch: Sketch) -> dict[str, Counter[str]]:
    place = _place(sketch)
    links: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for link in sketch.links:
        low, high = place.get(link.low), place.get(link.high)
        within = link.via.startswith("NET/") and low is not None and low == high
        links[link.host][f"{link.via} within the node" if within else link.via] += 1
    return links


def _place(sketch: Sketch) -> dict[int, str]:
    """The host of each rank, where all communicators are of one size: a connection's ranks are
    those of its communicator, which the log does not name.
    """
    sizes = {comm.nranks for comm in sketch.comms.values()}
    if len(sizes) != 1 or sketch.splits:
        return {}
    known = sketch.processes.items()
    return {process.rank: name.host for name, process in known if process.rank is not None}


def _channels(sketch: Sketch) -> Channels | None:
    if not (sketch.channels or sketch.trees or sketch.nvls_available is not None):
        return None
    count = sketch.channels.get
    return Channels(
        rings=count(Field.CHANNELS, 0),
        collectives=count(Field.COLL_CHANNELS, 0),
        nvls=count(Field.NVLS_CHANNELS, 0),
        p2p=count(Field.P2P_CHANNELS, 0),
        trees=sketch.trees,
        nvls_available=sketch.nvls_available,
    )


def _last_work(sketch: Sketch, group: str) -> LastWork:
    enqueued = dict(sorted(sketch.enqueued[group].items()))
    lowest, highest = min(enqueued.values()), max(enqueued.values())
    behind = [rank for rank, last in enqueued.items() if last == lowest < highest]
    world = max((process.nranks for process in sketch.processes.values()), default=0)
    # who is in another group than the default one, the log does not say
    silent = Ranks.without(world if group == DEFAULT_GROUP else 0, enqueued)
    return LastWork(group=group, enqueued=enqueued, behind=Ranks.of(behind), silent=silent)


def _variables(sketch: Sketch) -> tuple[Variable, ...]:
    values: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for process in sketch.processes.values():
        for name, value in process.variables.items():
            values[name][value] += 1
    found = [
        Variable(
            name=name,
            values={masked(value): count for value, count in counts.most_common()},
            switch=any(switches.left_on(name, value) for value in counts),
        )
        for name, counts in values.items()
    ]
    return tuple(sorted(found, key=lambda variable: (not variable.switch, variable.name)))


def _communicator(key: str, comm: Comm) -> Communicator:
    seen = comm.started | comm.finished
    return Communicator(
        key=key,
        nranks=comm.nranks,
        started=len(seen),
        missing=Ranks.without(comm.nranks, seen),
        unfinished=Ranks.of(comm.started - comm.finished),
    )
