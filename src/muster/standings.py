"""Several reports of the smoke suite side by side, for a terminal: ranks, speeds, differences."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from muster import size
from muster.page.words import hosts, line
from muster.tables import bare

if TYPE_CHECKING:
    # no command but compare needs it loaded
    from muster.compare import Comparison

# of values that differ from node to node, so many are shown
_MOST_VALUES = 4
_MOST_ROWS = 40


def standings(found: "Comparison") -> Iterator[RenderableType]:
    """A part for each thing that the comparison came to, the Findings apart."""
    yield _ranks(found)
    if found.rankings:
        yield _rankings(found)
    if found.differences:
        yield _differences(found)
    if found.missing:
        yield Text(f"not compared, for they are missing: {named(found.missing)}")


def named(nodes: Sequence[str]) -> str:
    """The first of `nodes`, and how many more there are."""
    return hosts(nodes, 0)


def _ranks(found: "Comparison") -> Table:
    """Of many nodes the last: those that are ahead stop nobody."""
    table = bare("node", "busbw to the others' median")
    if len(found.ranks) > _MOST_ROWS:
        table.add_row(f"{len(found.ranks) - _MOST_ROWS} faster ones")
    for rank in found.ranks[-_MOST_ROWS:]:
        share = "not measured" if rank.ratio is None else f"{rank.ratio:.0%}"
        table.add_row(Text(line(rank.node)), share)
    return table


def _rankings(found: "Comparison") -> Table:
    table = bare("collective", "tool", "size", "fastest, GB/s", "slowest, GB/s", wraps=2)
    for each in found.rankings:
        ends = each.places[0], each.places[-1]
        shown = (Text(f"{place.busbw:.4g} {line(place.node)}") for place in ends)
        table.add_row(each.collective, each.tool, size.binary(each.size_bytes), *shown)
    return table


def _differences(found: "Comparison") -> Table:
    table = bare("differs", "value", "nodes", wraps=2)
    for each in found.differences:
        name = line(each.what)
        for value, nodes in list(each.values.items())[:_MOST_VALUES]:
            table.add_row(Text(name), Text(line(value)), Text(named(nodes)))
            name = ""
        if len(each.values) > _MOST_VALUES:
            table.add_row("", f"{len(each.values) - _MOST_VALUES} more values are in --json FILE")
    return table
