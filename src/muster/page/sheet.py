"""What the page shows of a dossier, in its order, as plain values for the template."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from muster import size
from muster.bandwidth.floors import Floor
from muster.bandwidth.results import Collective, Tool
from muster.bandwidth.series import Series
from muster.dossier import Dossier, Node, Watched
from muster.finding import Finding, Outcome, Severity
from muster.page import plot, words
from muster.steps import Step

# more would make a page that nobody reads and no ticket takes; the JSON has them all
MOST_PLOTS = 18
MOST_ROWS = 200
MOST_OF_A_KIND = 8
MOST_FINDINGS = 60
# nodes whose own plots a page still holds beside those of them all
_FEW = 2
_MOST_VALUES = 6
# the share of the median of its kind below which a figure is not level with it
BEHIND = 0.9
_Group = tuple[Collective, tuple[str, ...], int]
_TOLD_OUTCOMES = {
    Outcome.PASSED: "passed",
    Outcome.FAILED: "failed",
    Outcome.NOT_RUN: "not run",
    Outcome.NOT_APPLICABLE: "not applicable",
}


@dataclass(frozen=True)
class Figure:
    """A collective's plot, and its numbers: `rows` hold a size, then each series' busbw."""

    collective: Collective
    hosts: str
    ranks: int
    series: tuple[Series, ...]
    best: tuple[tuple[Tool, str], ...]
    plot: plot.Plot | None
    floor: Floor | None
    rows: tuple[tuple[str, ...], ...]

    @property
    def claimed(self) -> bool:
        return all(each.claimed for each in self.series)


@dataclass(frozen=True)
class Other:
    """A figure that is not drawn. `share` is of the median of its kind, where it has others."""

    figure: Figure
    share: float | None


@dataclass(frozen=True)
class Seen:
    """A node and the three things to watch, where NCCL ran; or the words why it is missing."""

    host: str
    missing: str | None
    watched: Watched | None
    talk: str


@dataclass(frozen=True)
class Fact:
    """What the doctor saw: its check's name, each value, and who has it unless all agree."""

    name: str
    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Sheet:
    """`more_findings`, `more_rows` and `more_nodes` count what was left out.

    `claims` tells whether any figure says how fast a link is. Of the figures that are not drawn,
    `behind` need a look, and `level` are as fast as the others of their kind.
    """

    dossier: Dossier
    counts: str
    missing: int
    claims: bool
    findings: tuple[Finding, ...]
    more_findings: int
    figures: tuple[Figure, ...]
    behind: tuple[Other, ...]
    level: tuple[Other, ...]
    more_rows: int
    seen: tuple[Seen, ...]
    more_nodes: int
    facts: tuple[Fact, ...]
    outputs: tuple[Step, ...]


def sheet(dossier: Dossier) -> Sheet:
    """What the page of `dossier` holds: errors before warnings, plots before the table."""
    found = sorted(dossier.findings, key=lambda each: each.severity is not Severity.ERROR)
    figures = list(_figures(dossier))
    drawn = [each for each in figures if each.plot is not None][:MOST_PLOTS]
    rest = [each for each in figures if each not in drawn]
    others = tuple(_others(rest))[:MOST_ROWS]
    return Sheet(
        dossier=dossier,
        counts=_counts(dossier),
        missing=sum(node.missing is not None for node in dossier.nodes),
        claims=any(each.claimed for each in dossier.bandwidth),
        findings=tuple(found[:MOST_FINDINGS]),
        more_findings=max(0, len(found) - MOST_FINDINGS),
        figures=tuple(drawn),
        behind=tuple(each for each in others if _is_behind(each)),
        level=tuple(each for each in others if not _is_behind(each)),
        more_rows=len(rest) - len(others),
        seen=tuple(map(_seen, dossier.nodes[:MOST_ROWS])),
        more_nodes=max(0, len(dossier.nodes) - MOST_ROWS),
        facts=tuple(_facts(dossier.nodes))[:MOST_ROWS],
        outputs=tuple(s for s in dossier.steps if s.outcome is Outcome.FAILED and s.output),
    )


def _counts(dossier: Dossier) -> str:
    outcomes = Counter(step.outcome for step in dossier.steps)
    told = [f"{outcomes[each]} {word}" for each, word in _TOLD_OUTCOMES.items() if outcomes[each]]
    return ", ".join(told) or "no step ran"


# ---- bandwidth ---------------------------------------------------------------------------------


def _figures(dossier: Dossier) -> Iterator[Figure]:
    groups: defaultdict[_Group, list[Series]] = defaultdict(list)
    for series in dossier.bandwidth:
        groups[series.run.collective, series.nodes, series.run.nranks].append(series)
    widest = max((len(nodes) for _, nodes, _ in groups), default=0)
    for (collective, nodes, ranks), group in groups.items():
        floor = next((each.floor for each in group if each.floor is not None), None)
        beside = tuple(sorted(group, key=lambda each: each.run.tool))
        # single nodes and pairs of many are for a table: what counts is which of them falls behind
        shown = len(nodes) == widest or len(dossier.nodes) <= _FEW
        yield Figure(
            collective=collective,
            hosts=words.hosts(nodes, len(dossier.nodes)),
            ranks=ranks,
            series=beside,
            best=tuple((each.run.tool, _best(each)) for each in beside),
            plot=plot.plot([each.run for each in beside], floor) if shown else None,
            floor=floor,
            rows=tuple(_rows(beside)) if shown else (),
        )


def _others(figures: Sequence[Figure]) -> Iterator[Other]:
    """The slowest of each kind: one that falls behind the rest of them is a bad node or link."""
    kinds: defaultdict[tuple[Collective, int], list[Figure]] = defaultdict(list)
    for figure in figures:
        kinds[figure.collective, figure.ranks].append(figure)
    for kind in kinds.values():
        median = statistics.median(map(_speed, kind))
        for figure in sorted(kind, key=_speed)[:MOST_OF_A_KIND]:
            yield Other(figure, _speed(figure) / median if median and len(kind) > 1 else None)


def _is_behind(other: Other) -> bool:
    return other.share is None or other.share < BEHIND


def _speed(figure: Figure) -> float:
    """busbw at the largest size, of the slower tool; 0 without a result."""
    rows = [each.largest for each in figure.series]
    return min((row.busbw for row in rows if row is not None), default=0.0)


def _best(series: Series) -> str:
    row = series.largest
    if row is None:
        return f"no result: {series.run.failure}" if series.run.failure else "no result"
    return f"{row.busbw:.4g} GB/s at {size.binary(row.bytes)}"


def _rows(series: Sequence[Series]) -> Iterator[tuple[str, ...]]:
    by_size = [{row.bytes: row.busbw for row in each.run.rows} for each in series]
    for size_bytes in sorted({key for each in by_size for key in each}):
        cells = (each.get(size_bytes) for each in by_size)
        yield (
            size.binary(size_bytes),
            *("" if cell is None else f"{cell:.4g}" for cell in cells),
        )


# ---- nodes -------------------------------------------------------------------------------------


def _seen(node: Node) -> Seen:
    links = node.watched.links if node.watched else {}
    talk = ", ".join(f"{via} x {count}" for via, count in links.items())
    return Seen(node.host, node.missing, node.watched, talk or "not told")


def _facts(nodes: Sequence[Node]) -> Iterator[Fact]:
    """Each fact with its values, the commonest first: whose differs from the others' stands out."""
    values: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for node in nodes:
        for name, value in node.facts.items():
            values[name][value].append(node.host)
    told = sum(bool(node.facts) for node in nodes)
    for name, by_value in values.items():
        rows = sorted(by_value.items(), key=lambda row: -len(row[1]))
        shared = len(rows) == 1 and len(rows[0][1]) == told
        shown = [
            (value, "" if shared else words.hosts(hosts, len(nodes)))
            for value, hosts in rows[:_MOST_VALUES]
        ]
        if more := rows[_MOST_VALUES:]:
            shown.append((f"{len(more)} other values, in the JSON", ""))
        yield Fact(name, tuple(shown))
