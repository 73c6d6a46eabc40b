"""What a run of the smoke suite tells beside its steps, for a terminal.

The three things to watch on each node, who is missing, and how fast the collectives were.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from muster import size
from muster.page.words import hosts, line
from muster.tables import bare

if TYPE_CHECKING:
    # no command but smoke needs them loaded
    from muster.bandwidth.series import Series
    from muster.dossier import Dossier, Node

# the JSON has them all
_MOST_ROWS = 12
_ELSEWHERE = "--json FILE has them all"


def summary(dossier: "Dossier") -> Iterator[RenderableType]:
    """A part for each thing that the run has anything to tell of."""
    if any(node.watched is not None for node in dossier.nodes):
        yield Group(*_watched(dossier.nodes))
    if missing := [node for node in dossier.nodes if node.missing is not None]:
        yield Group(*_missing(missing))
    if dossier.bandwidth:
        yield Group(_bandwidth(dossier), *_unclaimed(dossier.bandwidth))


# ---- nodes -------------------------------------------------------------------------------------


def _watched(nodes: "Sequence[Node]") -> Iterator[RenderableType]:
    """Nodes that are alike in one row, the most common first."""
    alike: defaultdict[tuple[str, str, str], list[str]] = defaultdict(list)
    for node in nodes:
        if node.missing is None:
            alike[_looks(node)].append(node.host)
    rows = sorted(alike.items(), key=lambda row: -len(row[1]))
    table = bare("nodes", "network", "GPUs talk by", "rings and trees", wraps=4)
    for looks, names in rows[:_MOST_ROWS]:
        table.add_row(*map(Text, (hosts(names, len(nodes)), *map(line, looks))))
    yield table
    if more := sum(len(names) for _, names in rows[_MOST_ROWS:]):
        yield Text(f"{more} more: {_ELSEWHERE}")


def _looks(node: "Node") -> tuple[str, str, str]:
    found = node.watched
    return ("no NCCL ran", "", "") if found is None else (found.network, found.talk, found.graph)


def _missing(nodes: "Sequence[Node]") -> Iterator[Text]:
    for node in nodes[:_MOST_ROWS]:
        yield Text.assemble(
            (f"{line(node.host)} is missing", "bold red"), f": {line(node.missing or '')}"
        )
    if len(nodes) > _MOST_ROWS:
        yield Text(f"{len(nodes) - _MOST_ROWS} more are missing: {_ELSEWHERE}")


# ---- bandwidth ---------------------------------------------------------------------------------


def _bandwidth(dossier: "Dossier") -> Table:
    """A row for each kind of run; of many groups of nodes the slowest, for it holds back all."""
    kinds: defaultdict[tuple[object, ...], list[Series]] = defaultdict(list)
    for each in dossier.bandwidth:
        run = each.run
        kinds[run.collective, run.tool, each.backend, run.nranks, len(each.nodes)].append(each)
    table = bare("collective", "tool", "size", "busbw GB/s", "floor", "ranks", "between")
    for kind in kinds.values():
        slowest = min(kind, key=_speed)
        between = hosts(slowest.nodes, len(dossier.nodes))
        between += f" (slowest of {len(kind)})" if len(kind) > 1 else ""
        table.add_row(*_figures(slowest), Text(between))
    return table


def _speed(series: "Series") -> float:
    return series.largest.busbw if series.largest else 0.0


def _figures(series: "Series") -> Iterator[Text]:
    """The collective, the tool, the largest size, its busbw, the floor, the number of ranks."""
    row, floor = series.largest, series.floor
    yield Text(series.run.collective)
    yield Text(series.run.tool)
    if row is None:
        yield from (Text(), Text("no result", "bold red"))
    else:
        yield Text(size.binary(row.bytes), justify="right")
        slow = floor is not None and row.bytes >= floor.bytes and row.busbw < floor.busbw
        yield Text(f"{row.busbw:.4g}", "bold red" if slow else "", justify="right")
    if not series.claimed:
        yield Text("not claimed", "dim")
    else:
        yield Text(f"{floor.busbw:.4g}" if floor else "none", justify="right")
    yield Text(str(series.run.nranks), justify="right")


def _unclaimed(bandwidth: "Sequence[Series]") -> Iterator[Text]:
    reasons = dict.fromkeys(_why(each) for each in bandwidth if not each.claimed)
    for reason in reasons:
        yield Text(f"not claimed: {reason}", "dim")


def _why(series: "Series") -> str:
    if series.run.nranks == 1:
        return "with one rank nothing crosses a link"
    if series.backend == "gloo":
        return "gloo on a CPU shows that it works, not how fast a link is"
    return f"{line(series.backend)} here shows that it works, not how fast a link is"
