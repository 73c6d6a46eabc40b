"""The picture of a job for a terminal: what NCCL chose, node by node, alike nodes in one row."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster.explain.picture import Communicator, LastWork, Node, Picture, Ranks, Variable
from muster.tables import bare

# of values that differ from process to process, so many are shown
_MOST_VALUES = 3
_MOST_ROWS = 20
_DIRECT = {True: "yes", False: "no", None: ""}


def portrait(picture: Picture) -> RenderableType:
    """The table of nodes, then a line for each other thing that the log tells; nothing of nothing.

    Whether GPUs of a node talk by NVLink or PCIe the log does not say: both are P2P there.
    """
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    for name, text in _facts(picture):
        facts.add_row(name, Text(text))
    parts: list[RenderableType] = [_nodes(picture.nodes), Text()] if picture.nodes else []
    return Group(*parts, facts)


# ---- nodes -------------------------------------------------------------------------------------


def _nodes(nodes: Iterable[Node]) -> Table:
    table = bare("nodes", "ranks", "network", "GPUDirect", "ranks talk by", wraps=5)
    alike: defaultdict[tuple[str, str, str], list[Node]] = defaultdict(list)
    for node in nodes:
        alike[_looks(node)].append(node)
    rows = sorted(alike.items(), key=lambda row: -len(row[1]))
    for (network, direct, links), group in rows[:_MOST_ROWS]:
        ranks = str(Ranks.of(rank for node in group for rank in node.ranks))
        table.add_row(*map(Text, (_names(group), ranks, network, direct, links)))
    if left := sum(len(group) for _, group in rows[_MOST_ROWS:]):
        table.add_row(Text(f"{left} more: --json FILE has them all"))
    return table


def _looks(node: Node) -> tuple[str, str, str]:
    """What is the same on every node of a healthy job, whichever its place in the rings is."""
    return ", ".join(node.networks), _DIRECT[node.gpu_direct], ", ".join(sorted(node.links))


def _names(group: list[Node]) -> str:
    names = [node.host or "not named" for node in group]
    return (
        ", ".join(names) if len(names) <= _MOST_VALUES else f"{names[0]} and {len(names) - 1} more"
    )


# ---- the rest ----------------------------------------------------------------------------------


def _facts(picture: Picture) -> Iterator[tuple[str, str]]:
    if channels := picture.channels:
        told = [f"{channels.rings or channels.collectives} rings"]
        told += ["trees"] if channels.trees else []
        if channels.nvls_available is not None or channels.nvls:
            told.append(f"{channels.nvls} NVLS channels")
        if channels.nvls_available is False:
            told.append("no multicast for NVLS")
        told += [f"{channels.p2p} p2p channels"] if channels.p2p else []
        yield "channels", ", ".join(told)
    if picture.nccl_versions:
        yield "NCCL", _counted(picture.nccl_versions, "processes")
    if picture.cuda_drivers:
        drivers = {_cuda(text): count for text, count in picture.cuda_drivers.items()}
        yield "CUDA driver", _counted(drivers, "processes")
    yield from _inits(picture)
    for work in picture.last_work:
        yield "last work", _last_work(work)
    if picture.busbw_gb_s is not None:
        yield "busbw", f"{picture.busbw_gb_s:g} GB/s on average"
    for variable in picture.variables:
        yield ("left on" if variable.switch else "set"), _variable(variable)


def _cuda(version: str) -> str:
    """12.8 of 12080."""
    return f"{int(version) // 1000}.{int(version) % 1000 // 10}" if version.isdigit() else version


def _counted(counts: Mapping[str, int], what: str) -> str:
    """Each with its count where they differ, the commonest first."""
    if len(counts) == 1:
        return next(iter(counts))
    shown = [f"{name} ({count} {what})" for name, count in list(counts.items())[:_MOST_VALUES]]
    return ", ".join([*shown, "..."] if len(counts) > _MOST_VALUES else shown)


def _inits(picture: Picture) -> Iterator[tuple[str, str]]:
    """The communicators whose ranks did not all come through, or that all did."""
    wrong = [each for each in picture.communicators if each.missing or each.unfinished]
    for each in wrong[:_MOST_VALUES]:
        yield "init", _init(each)
    if len(wrong) > _MOST_VALUES:
        yield "init", f"{len(wrong) - _MOST_VALUES} more like these"
    whole = [each.nranks for each in picture.communicators if each not in wrong]
    if whole:
        communicators = "communicator" if len(whole) == 1 else "communicators"
        yield "init", f"{len(whole)} {communicators} of up to {max(whole)} ranks complete"
    if picture.splits_unfinished:
        yield "init", f"{picture.splits_unfinished} split off and not complete"


def _init(communicator: Communicator) -> str:
    told = [f"{communicator.started} of {communicator.nranks} ranks started"]
    if communicator.missing:
        told.append(f"never appeared: {communicator.missing}")
    if communicator.unfinished:
        told.append(f"not finished: {communicator.unfinished}")
    return f"{communicator.key}: {'; '.join(told)}"


def _last_work(work: LastWork) -> str:
    low, high = min(work.enqueued.values()), max(work.enqueued.values())
    told = [f"group {work.group}: all {len(work.enqueued)} ranks enqueued {high}"]
    if work.behind:
        told = [f"group {work.group}: up to {high}", f"behind at {low}: ranks {work.behind}"]
    if work.silent:
        told.append(f"silent: ranks {work.silent}")
    return "; ".join(told)


def _variable(variable: Variable) -> str:
    if len(variable.values) == 1:
        return f"{variable.name}={next(iter(variable.values))}"
    return f"{variable.name}: {_counted(variable.values, 'processes')}"
