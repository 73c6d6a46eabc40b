"""What no single line shows: facts that only many lines together give, each for a fault that names
it as `derived` in faults.toml.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from sys import intern

from muster.explain.events import Event, Field, Kind, Severity, What
from muster.explain.picture import Picture, Ranks

# more than any job has; a log of hostile text ends at the same memory
_MOST = 200_000
# each may hold a line of 64 KiB
_MOST_EVENTS = 20_000
_NO_RANKS = Ranks()


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What shows a derived fault: the line where one does, and what fills the fault's gaps."""

    event: Event | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    ranks: Ranks = _NO_RANKS


@dataclass(frozen=True, slots=True)
class _Gpu:
    comm: str
    host: str
    bus_id: str


@dataclass(slots=True)
class Signs:
    """The facts so far. Those of a later part of the log can be joined."""

    gpus: dict[_Gpu, tuple[int, int]] = field(default_factory=dict)
    shared_gpus: dict[str, Event] = field(default_factory=dict)
    completed: set[str] = field(default_factory=set)
    node_counts: dict[int, Event] = field(default_factory=dict)
    local_ranks: set[int] = field(default_factory=set)
    interfaces: dict[tuple[str, str, str], Event] = field(default_factory=dict)
    banners: dict[tuple[str, int], str] = field(default_factory=dict)
    networks: dict[tuple[str, int], str] = field(default_factory=dict)
    hcas: dict[str, str] = field(default_factory=dict)
    sockets: dict[str, Event] = field(default_factory=dict)
    firsts: dict[str, Event] = field(default_factory=dict)
    calls: dict[int, dict[tuple[str, str], Event]] = field(default_factory=dict)
    ended: dict[str, Event] = field(default_factory=dict)
    restarted: bool = False
    # what a plugin has set itself is no one's switch
    set_by_plugin: set[str] = field(default_factory=set)
    versions: set[tuple[int, ...]] = field(default_factory=set)
    launches: dict[str, dict[str, Event]] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        take = _TAKES.get(event.what)
        if take is not None:
            take(self, event)
        elif event.what is What.TEXT:
            self._text(event)

    def join(self, other: "Signs") -> None:
        """Take in what is known of a later part of the log."""
        for gpu, (rank, pid) in other.gpus.items():
            known = self.gpus.setdefault(gpu, (rank, pid))
            if known != (rank, pid) and gpu.comm in other.firsts:
                self.shared_gpus.setdefault(gpu.comm, other.firsts[gpu.comm])
        for sequence, calls in other.calls.items():
            mine = self.calls.setdefault(sequence, {})
            for call, event in calls.items():
                mine.setdefault(call, event)
        for flag, values in other.launches.items():
            self.launches[flag] = values | self.launches.get(flag, {})
        self.completed |= other.completed
        self.local_ranks |= other.local_ranks
        self.versions |= other.versions
        self.banners = other.banners | self.banners
        self.networks |= other.networks
        self.shared_gpus = other.shared_gpus | self.shared_gpus
        self.node_counts = other.node_counts | self.node_counts
        self.interfaces = other.interfaces | self.interfaces
        self.hcas = other.hcas | self.hcas
        self.sockets = other.sockets | self.sockets
        self.firsts = other.firsts | self.firsts
        self.ended = other.ended if other.restarted else other.ended | self.ended
        self.restarted = self.restarted or other.restarted
        self.set_by_plugin |= other.set_by_plugin

    def _first(self, name: str, event: Event) -> None:
        if len(self.firsts) < _MOST_EVENTS:
            self.firsts.setdefault(name, event)

    def _init(self, event: Event) -> None:
        comm, bus_id = event.fields.get(Field.COMM_ID), event.fields.get(Field.BUS_ID)
        if comm is None or bus_id is None or event.rank is None or len(self.gpus) >= _MOST:
            return
        self._first(comm, event)
        gpu, holder = _Gpu(comm, event.host or "", bus_id), (event.rank, event.pid or 0)
        if self.gpus.setdefault(gpu, holder) != holder:
            self.shared_gpus.setdefault(comm, event)

    def _done(self, event: Event) -> None:
        if len(self.completed) < _MOST:
            self.completed.add(event.fields.get(Field.COMM_ID, ""))

    def _topology(self, event: Event) -> None:
        if len(self.node_counts) < _MOST_EVENTS:
            self.node_counts.setdefault(int(event.fields[Field.NNODES]), event)
            self.local_ranks.add(int(event.fields[Field.LOCAL_RANKS]))
        if " MNNVL 1" in event.message:
            self._first("mnnvl", event)

    def _network(self, event: Event) -> None:
        network = event.fields[Field.NETWORK]
        if len(self.networks) < _MOST:
            self.networks[intern(event.host or ""), event.pid or 0] = intern(network)
        self._first(f"network {network}", event)
        if network == "Socket" and len(self.sockets) < _MOST_EVENTS:
            self.sockets.setdefault(event.host or "", event)

    def _version(self, event: Event) -> None:
        self._learn(event.fields[Field.VERSION])
        if event.host is not None and len(self.banners) < _MOST:
            process = (intern(event.host), event.pid or 0)
            self.banners.setdefault(process, intern(event.fields[Field.VERSION]))
        self._first(f"version {event.fields[Field.VERSION]}", event)

    def _learn(self, version: str) -> None:
        if len(self.versions) < 1000 and (match := _VERSION.match(version)):
            self.versions.add(tuple(int(part) for part in match[0].split(".")))

    def _variable(self, event: Event) -> None:
        self._first(f"variable {event.fields[Field.VARIABLE]}", event)

    def _connection(self, event: Event) -> None:
        if event.fields[Field.VIA].startswith("NET/"):
            self._first("net", event)

    def _status(self, event: Event) -> None:
        """Keep the first of each group's last completed work."""
        group = event.fields.get(Field.GROUP, "0")
        self._first(f"completed {group} {event.fields[Field.LAST_COMPLETED]}", event)

    def _timeout(self, event: Event) -> None:
        # of other groups than the default one the log does not say who is in them
        if (group := _GROUP.search(event.message)) and group[1] != "0":
            return
        if len(self.calls) >= 1000 or Field.SEQUENCE not in event.fields:
            return
        operation = event.fields[Field.OPERATION]
        numel = event.fields.get(Field.NUMEL_IN, "") if operation in _SAME_SIZE else ""
        calls = self.calls.setdefault(int(event.fields[Field.SEQUENCE]), {})
        if len(calls) < 100:
            calls.setdefault((operation, numel), event)

    def _failure(self, event: Event) -> None:
        self._end(event.fields.get(Field.SIGNAL, ""), event.fields.get(Field.EXIT_CODE, ""), event)

    def _end(self, signal: str, code: str, event: Event) -> None:
        how = signal if signal in _NUMBERS else _SIGNALS.get(code, "exit")
        self.ended.setdefault(how, event)
        if Field.ROOT_CAUSE in event.fields:
            # torchrun names it again at the end, and that one counts
            self.ended[f"root {how}"] = event

    def _text(self, event: Event) -> None:
        if event.kind is Kind.NCCL:
            self._nccl_text(event)
        elif match := _CHILD.match(event.message):
            self._end("", match["code"], event)
        elif event.kind is Kind.PYTHON_TRACEBACK:
            if any(words in event.message for words in _LOST_PEER):
                self._first(f"lost peer {event.rank}", event)
        elif event.message.startswith("  "):
            self._indented(event)
        elif "attempts left; will restart worker group" in event.message:
            self.ended, self.restarted = {}, True
        elif event.message.count("memory in use.") > 1:
            self._first("memory in use", event)
        elif "NCCL version " in event.message:
            self._learn(event.message.rpartition("NCCL version ")[2])

    def _indented(self, event: Event) -> None:
        """Take what an uncaught C++ exception says, and what torchrun was started with."""
        if event.message.startswith("  what():"):
            self._first("what", event)
        elif match := _LAUNCHED.fullmatch(event.message):
            values = self.launches.setdefault(_FLAGS[match[1]], {})
            if len(values) < 1000:
                values.setdefault(match[2], event)

    def _nccl_text(self, event: Event) -> None:
        if event.severity is not Severity.INFO:
            self._warning(event)
        elif event.message.startswith(("Bootstrap : Using", "Bootstrap: Using")):
            self._interface(event, _ADDRESS.findall(event.message)[:1])
        elif event.message.startswith("NET/Socket : Using"):
            self._interface(event, _ADDRESS.findall(event.message))
        elif event.message.startswith("NET/IB : Using"):
            self._hcas(event, _HCA.findall(event.message))
        elif event.message.startswith("MNNVL busId"):
            if (mask := _MASK.search(event.message)) and _unhealthy(int(mask[1], 16)):
                self._first("mnnvl unhealthy", event)
        elif event.message.startswith("NET/Plugin: Could not find"):
            self._first("plugin not found", event)
        elif (match := _ADDED.match(event.message)) and len(self.set_by_plugin) < 100:
            self.set_by_plugin.add(match[1])

    def _warning(self, event: Event) -> None:
        if event.message.startswith("Failed to CUDA"):
            self._first("no gpu memory", event)
        elif event.message.startswith("Call to ibv_modify_qp failed"):
            self._first("no connection", event)
        elif event.message.startswith("Cuda failure"):
            of_memory = "'out of memory'" in event.message
            if "nvls.cc" in event.fields.get(Field.AT, "") and not of_memory:
                self._first("nvls cuda failure", event)
            # 101 is an invalid device: the peer's GPU is not to be seen here
            if "p2p.cc" in event.fields.get(Field.AT, "") and "101" in event.message[:18]:
                self._first("import refused", event)
            if of_memory:
                self._first("cuda out of memory", event)

    def _hcas(self, event: Event, found: Iterable[tuple[str, str]]) -> None:
        named = list(found)
        if named and len(self.hcas) < _MOST:
            self.hcas.setdefault(event.host or "", ", ".join(name for name, _ in named))
        if len({link for _, link in named}) > 1:
            self._first("mixed links", event)

    def _interface(self, event: Event, found: Iterable[tuple[str, str]]) -> None:
        if len(self.interfaces) < _MOST_EVENTS:
            for name, address in found:
                self.interfaces.setdefault((event.host or "", name, address), event)


_TAKES: dict[What, Callable[[Signs, Event], None]] = {
    What.INIT_START: Signs._init,  # noqa: SLF001 - the class's own table
    What.INIT_COMPLETE: Signs._done,  # noqa: SLF001
    What.TOPOLOGY: Signs._topology,  # noqa: SLF001
    What.USING_NETWORK: Signs._network,  # noqa: SLF001
    What.VERSION: Signs._version,  # noqa: SLF001
    What.ENVIRONMENT: Signs._variable,  # noqa: SLF001
    What.CONNECTION: Signs._connection,  # noqa: SLF001
    What.WATCHDOG_STATUS: Signs._status,  # noqa: SLF001
    What.WATCHDOG_TIMEOUT: Signs._timeout,  # noqa: SLF001
    What.FAILURE: Signs._failure,  # noqa: SLF001
}
_VERSION = re.compile(r"\d{1,3}\.\d{1,3}(?:\.\d{1,3})?")
_ADDRESS = re.compile(r"([\w.@-]{1,32}):(\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3})<")
_HCA = re.compile(r"\](\w{1,32}):\d{1,3}/(IB|RoCE)\b")
# https://github.com/aws/aws-ofi-nccl, src/platform-aws.cpp
_ADDED = re.compile(r"NET/OFI (?:Adding|Setting) (NCCL_\w{1,60})\b")
_MASK = re.compile(r"healthMask 0x([0-9a-f]{1,8})")
_GROUP = re.compile(r"\[PG (?:ID )?(\d{1,6})")
_CHILD = re.compile(
    r"failed \(exitcode: (?P<code>-?\d{1,5})\) local_rank: \d{1,6} \(pid: \d{1,9}\)"
)
_PROCESS = re.compile(r"Process (\d{1,9}) has ")
# of what torchrun writes with LOGLEVEL=INFO when it starts
_FLAGS = {
    "run_id": "--rdzv-id",
    "rdzv_backend": "--rdzv-backend",
    "max_nodes": "--nnodes",
    "rdzv_endpoint": "--rdzv-endpoint",
}
_LAUNCHED = re.compile(rf" {{0,20}}({'|'.join(_FLAGS)}) +: (\S{{1,300}})")
# gloo's words for it
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
_NUMBERS = {"SIGABRT": 6, "SIGBUS": 7, "SIGKILL": 9, "SIGSEGV": 11, "SIGTERM": 15}
# a shell in between gives 128 and the signal
_SIGNALS = {
    str(code): name for name, number in _NUMBERS.items() for code in (-number, 128 + number)
}
# only of these have all ranks to give as much
_SAME_SIZE = frozenset({"ALLREDUCE", "BROADCAST", "REDUCE", "ALLGATHER", "_ALLGATHER_BASE"})
_VIRTUAL = ("veth", "virbr", "br-", "cni", "flannel", "cali", "tun", "tap", "wg", "tailscale", "zt")
_IB_WANTED = ("NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_TC", "NCCL_IB_SL", "NCCL_NET_GDR_LEVEL")


def _unhealthy(mask: int) -> bool:
    """Whether NVML's health mask tells of a fault: each of its four first fields is of two bits,
    1 for true; the next is the kind of wrong configuration, from 2 on.

    https://docs.nvidia.com/deploy/nvml-api/group__nvmlFabricDefs.html
    """
    return any(mask >> shift & 3 == 1 for shift in (0, 2, 4, 6)) or mask >> 8 & 15 > 1


# ---- what they come to -------------------------------------------------------------------------


def _variables(picture: Picture) -> dict[str, frozenset[str]]:
    return {variable.name: frozenset(variable.values) for variable in picture.variables}


def _several_nodes(signs: Signs, picture: Picture) -> bool:
    return len(picture.nodes) > 1 or max(signs.node_counts, default=1) > 1


def _all_came(signs: Signs, picture: Picture) -> bool:
    """Whether every init that began came to its end, so that all ranks reached each other."""
    return bool(signs.completed) and not any(comm.unfinished for comm in picture.communicators)


def _virtual_interface(signs: Signs, picture: Picture) -> Shown | None:
    if _all_came(signs, picture) or max(signs.node_counts, default=2) < 2:
        return None
    for (_, name, _), event in signs.interfaces.items():
        if name.startswith(_VIRTUAL) and event.message.startswith("Bootstrap"):
            return Shown(event=event, fields={"ifname": name})
    return None


def _loopback(signs: Signs, picture: Picture) -> Shown | None:
    if _all_came(signs, picture) or not _several_nodes(signs, picture):
        return None
    for (host, _, address), event in signs.interfaces.items():
        if address.startswith("127.") and event.message.startswith("Bootstrap"):
            return Shown(event=event, fields={"host": host or "a node"})
    return None


def _one_subnet(signs: Signs, _picture: Picture) -> Shown | None:
    subnets: dict[tuple[str, str], set[str]] = defaultdict(set)
    for (host, name, address), event in signs.interfaces.items():
        names = subnets[host, address.rpartition(".")[0]]
        names.add(name)
        if len(names) > 1 and not address.startswith("127."):
            fields = {"host": host or "a node", "ifname": " and ".join(sorted(names))}
            return Shown(event=event, fields=fields)
    return None


def _nodes_of_one_name(signs: Signs, picture: Picture) -> Shown | None:
    shown = _same_gpu(signs, picture)
    if shown and shown.event and shown.event.host == "localhost":
        return Shown(event=shown.event, fields={"host": "localhost"})
    return None


def _same_gpu(signs: Signs, picture: Picture) -> Shown | None:
    if "1" in _variables(picture).get("NCCL_MULTI_RANK_GPU_ENABLE", ()):
        return None
    if max(signs.node_counts, default=1) > max(len(picture.nodes), 1):
        return None  # nodes of one name, which NCCL told apart
    for comm, event in signs.shared_gpus.items():
        if comm not in signs.completed:
            return Shown(event=event)
    return None


def _ib_disabled(signs: Signs, picture: Picture) -> Shown | None:
    variables = _variables(picture)
    off = {"NCCL_IB_DISABLE": variables.get("NCCL_IB_DISABLE", frozenset()) - {"0"}}
    off["NCCL_NET"] = variables.get("NCCL_NET", frozenset()) & {"Socket"}
    named = [name for name, values in off.items() if values]
    if not named:
        return None
    event = signs.firsts.get(f"variable {named[0]}")
    return Shown(event=event, fields={"variable": " and ".join(named)})


def _ib_listed(signs: Signs, picture: Picture) -> Shown | None:
    if _ib_disabled(signs, picture):
        return None
    for host, event in signs.sockets.items():
        if host in signs.hcas:
            return Shown(event=event, fields={"hca": signs.hcas[host]})
    return None


def _ib_asked_for(signs: Signs, picture: Picture) -> Shown | None:
    if _ib_disabled(signs, picture) or _ib_listed(signs, picture) or not signs.sockets:
        return None
    variables = _variables(picture)
    wanted = [name for name in _IB_WANTED if name in variables]
    if "IB" in variables.get("NCCL_NET", ()):
        wanted.append("NCCL_NET=IB")
    if not wanted:
        return None
    return Shown(event=next(iter(signs.sockets.values())), fields={"variable": wanted[0]})


def _of_several_jobs(signs: Signs, said: Mapping[tuple[str, int], str]) -> bool:
    """Whether what processes `said` differs between communicators only, never within one."""
    within: dict[str, set[str]] = defaultdict(set)
    for gpu, (_, pid) in signs.gpus.items():
        if (gpu.host, pid) in said:
            within[gpu.comm].add(said[gpu.host, pid])
    return bool(within) and all(len(texts) == 1 for texts in within.values())


def _networks_differ(signs: Signs, picture: Picture) -> Shown | None:
    hosts: dict[str, set[str]] = defaultdict(set)
    for node in picture.nodes:
        for network in node.networks:
            hosts[network].add(node.host)
    if len(hosts) < 2 or _of_several_jobs(signs, signs.networks):
        return None
    rarest = min(hosts, key=lambda network: (len(hosts[network]), network == "IB"))
    told = ", ".join(f"{name} on {len(on)}" for name, on in sorted(hosts.items()))
    event = signs.firsts.get(f"network {rarest}")
    return Shown(event=event, fields={"networks": told})


def _first_collective(signs: Signs, picture: Picture) -> Shown | None:
    if not signs.completed or any(work.behind for work in picture.last_work):
        return None
    for name, event in signs.firsts.items():
        if name in {"completed 0 -1", "completed 0 0"}:
            sequence = event.fields.get(Field.LAST_ENQUEUED, "1")
            return Shown(event=event, fields={"group": "group 0", "sequence": sequence})
    return None


def _mnnvl_hangs(signs: Signs, picture: Picture) -> Shown | None:
    return _first_collective(signs, picture) if "mnnvl" in signs.firsts else None


def _mixed_links(signs: Signs, _picture: Picture) -> Shown | None:
    """InfiniBand and RoCE in one list, and a connection that could not be made."""
    event = signs.firsts.get("no connection")
    listed = signs.firsts.get("mixed links")
    return Shown(event=event) if event and listed else None


def _one_gpu_per_host(signs: Signs, _picture: Picture) -> Shown | None:
    if signs.local_ranks != {1} or max(signs.node_counts, default=0) < 2:
        return None
    buses = [gpu.bus_id for gpu in signs.gpus]
    if (
        len(buses) < 2
        or len(set(buses)) < len(buses)
        or len({gpu.host for gpu in signs.gpus}) < len(buses)
    ):
        return None
    event = signs.node_counts[max(signs.node_counts)]
    return Shown(event=event, fields={"hosts": str(len(buses))})


def _net_within_node(signs: Signs, picture: Picture) -> Shown | None:
    places = {(rank, gpu.host) for gpu, (rank, _) in signs.gpus.items()}
    if len(places) > len({rank for rank, _ in places}):
        return None  # several jobs: whose ranks a connection names is not said
    for node in picture.nodes:
        if any(link.endswith("within the node") for link in node.links):
            fields = {"ranks": str(node.ranks), "host": node.host or "a node"}
            return Shown(event=signs.firsts.get("net"), fields=fields)
    return None


def _versions_differ(signs: Signs, picture: Picture) -> Shown | None:
    if not picture.mixed_versions or _of_several_jobs(signs, signs.banners):
        return None
    rarest = min(picture.nccl_versions, key=lambda version: picture.nccl_versions[version])
    return Shown(event=signs.firsts.get(f"version {rarest}"))


def _init_not_finished(signs: Signs, picture: Picture) -> Shown | None:
    for comm in picture.communicators:
        if comm.unfinished:
            missing = f"ranks {comm.missing} never appear in this log, and these wait for them"
            fields = {
                "ranks": str(comm.unfinished),
                "missing": missing if comm.missing else "all ranks came, and wait for each other",
            }
            event = signs.firsts.get(comm.key)
            return Shown(event=event, fields=fields, ranks=comm.unfinished)
    return None


def _many_on_one_gpu(signs: Signs, _picture: Picture) -> Shown | None:
    event = signs.firsts.get("memory in use")
    pids = set(_PROCESS.findall(event.message)) if event else set()
    return Shown(event=event, fields={"count": str(len(pids))}) if len(pids) > 2 else None


def _collectives_differ(signs: Signs, _picture: Picture) -> Shown | None:
    for sequence, calls in sorted(signs.calls.items()):
        ranks = {event.rank for event in calls.values()}
        if len(calls) > 1 and len(ranks) > 1:
            told = "; ".join(
                f"rank {event.rank}: {operation} of {numel or 'any'} elements"
                for (operation, numel), event in calls.items()
            )
            fields = {"collectives": told, "sequence": str(sequence), "group": "0"}
            return Shown(event=next(iter(calls.values())), fields=fields)
    return None


def _straggler(signs: Signs, picture: Picture) -> Shown | None:
    for work in picture.last_work:
        if work.behind:
            fields = {
                "ranks": str(work.behind),
                "behind": str(min(work.enqueued.values())),
                "ahead": str(max(work.enqueued.values())),
            }
            starts = f"completed {work.group} "
            event = next((e for name, e in signs.firsts.items() if name.startswith(starts)), None)
            return Shown(event=event, fields=fields, ranks=work.behind)
    return None


def _ended_by(signal: str) -> Callable[[Signs, Picture], Shown | None]:
    def shown(signs: Signs, _picture: Picture) -> Shown | None:
        if any(name.startswith("root ") for name in signs.ended):
            event = signs.ended.get(f"root {signal}")
        else:
            event = signs.ended.get(signal)
        if event is None:
            return None
        rank = "?" if event.rank is None else str(event.rank)
        child = _CHILD.match(event.message)
        code = child["code"] if child else event.fields.get(Field.EXIT_CODE, "not 0")
        return Shown(event=event, fields={"rank": rank, "code": code})

    return shown


def _aborted(signs: Signs, picture: Picture) -> Shown | None:
    shown = _ended_by("SIGABRT")(signs, picture)
    said = signs.firsts.get("what")
    if shown is None:
        return None
    what = said.message.partition("what():")[2].strip() if said else "it did not say why"
    return replace(shown, fields={**shown.fields, "what": what[:200]})


def _terminated(signs: Signs, picture: Picture) -> Shown | None:
    # torchrun ends the others by the same signal: only the root counts
    return _ended_by("SIGTERM")(signs, picture) if "root SIGTERM" in signs.ended else None


def _left_early(signs: Signs, _picture: Picture) -> Shown | None:
    """Show the rank that torchrun saw fail first, if all that failed it is a connection that closed
    and no rank had an end of its own.
    """
    root = signs.ended.get("root exit")
    if root is None or signs.ended.keys() - {"root exit", "exit", "SIGTERM"}:
        return None
    event = signs.firsts.get(f"lost peer {root.rank}")
    return Shown(event=event, fields={"rank": str(root.rank)}) if event else None


def _launches_differ(signs: Signs, _picture: Picture) -> Shown | None:
    for flag in _FLAGS.values():
        values = signs.launches.get(flag, {})
        places = {(event.line.file, event.line.source) for event in values.values()}
        if len(values) > 1 and len(places) > 1:
            told = ", ".join(sorted(values))
            event = next(iter(values.values()))
            return Shown(event=event, fields={"flag": flag, "values": told})
    return None


def _cumem_oom(signs: Signs, _picture: Picture) -> Shown | None:
    if "no gpu memory" in signs.firsts:
        return None
    event = signs.firsts.get("cuda out of memory")
    return Shown(event=event) if event else None


def _first_seen(name: str) -> Callable[[Signs, Picture], Shown | None]:
    def shown(signs: Signs, _picture: Picture) -> Shown | None:
        event = signs.firsts.get(name)
        mask = _MASK.search(event.message) if event else None
        return (
            Shown(event=event, fields={"mask": f"0x{mask[1]}" if mask else ""}) if event else None
        )

    return shown


def _plugin_missing(signs: Signs, picture: Picture) -> Shown | None:
    named = _variables(picture).get("NCCL_NET_PLUGIN", frozenset()) - {"none", "NONE"}
    event = signs.firsts.get("plugin not found")
    return Shown(event=event, fields={"plugin": min(named)}) if named and event else None


def _debug_switch(signs: Signs, picture: Picture) -> Shown | None:
    left = [
        f"{variable.name}={'/'.join(sorted(variable.values))}"
        for variable in picture.variables
        if variable.switch and variable.name not in _SAID_ELSEWHERE | signs.set_by_plugin
    ]
    if not left:
        return None
    event = signs.firsts.get(f"variable {left[0].partition('=')[0]}")
    return Shown(event=event, fields={"variable": ", ".join(left)})


# NCCL_DEBUG made the log; ib-disabled speaks of the two others
_SAID_ELSEWHERE = frozenset({"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_IB_DISABLE", "NCCL_NET"})

DERIVED: Mapping[str, Callable[[Signs, Picture], Shown | None]] = {
    "virtual interface": _virtual_interface,
    "loopback across nodes": _loopback,
    "two interfaces in one subnet": _one_subnet,
    "nodes of one name": _nodes_of_one_name,
    "same gpu": _same_gpu,
    "ib disabled": _ib_disabled,
    "ib listed, socket used": _ib_listed,
    "ib asked for, socket used": _ib_asked_for,
    "networks differ": _networks_differ,
    "first collective hangs": _first_collective,
    "one gpu per host": _one_gpu_per_host,
    "mixed links": _mixed_links,
    "mnnvl hangs": _mnnvl_hangs,
    "net within node": _net_within_node,
    "nccl versions differ": _versions_differ,
    "init not finished": _init_not_finished,
    "many processes on one gpu": _many_on_one_gpu,
    "collectives differ": _collectives_differ,
    "straggler": _straggler,
    "killed": _ended_by("SIGKILL"),
    "segfault": _ended_by("SIGSEGV"),
    "bus error": _ended_by("SIGBUS"),
    "child failed": _ended_by("exit"),
    "aborted": _aborted,
    "terminated": _terminated,
    "left early": _left_early,
    "launches differ": _launches_differ,
    "cumem oom": _cumem_oom,
    "nvls cuda failure": _first_seen("nvls cuda failure"),
    "import refused": _first_seen("import refused"),
    "mnnvl unhealthy": _first_seen("mnnvl unhealthy"),
    "plugin missing": _plugin_missing,
    "debug switch": _debug_switch,
}
