"""Several reports of the smoke suite side by side: nodes by rank, and the odd one out.

Nodes of one kind measure within some percent of each other; whoever is behind the others, or alone
with a driver, a network or a failed step, is where to look first.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from muster import dossier, size
from muster.bandwidth.results import Collective, Tool
from muster.bandwidth.series import Series
from muster.dossier import Dossier, Node
from muster.errors import ReportsOfDifferentImages, TooFewReports
from muster.finding import Finding, Outcome, Severity

# the share of the others' median busbw below which a node is behind them
BEHIND = 0.9
# with two that differ, nothing says which of them is odd
_ENOUGH_TO_JUDGE = 3
# the doctor's measures that move on a node that is well
_MOVING = frozenset(
    {"shm", "locked_memory", "gpu_processes", "held_ports", "clock", "leftover_shm"}
)


@dataclass(frozen=True)
class Place:
    """A node's busbw in one measure. `ratio` is to the median of the other nodes."""

    node: str
    busbw: float
    ratio: float


@dataclass(frozen=True)
class Ranking:
    """The places of all nodes that were measured so, the fastest first, at one size."""

    collective: Collective
    tool: Tool
    size_bytes: int
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Rank:
    """A node and the geometric mean of its ratios; None where it has no bandwidth to rank by."""

    node: str
    ratio: float | None


@dataclass(frozen=True)
class Difference:
    """A fact that the nodes do not share: each value, and who has it."""

    what: str
    values: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Comparison:
    """`ranks` are the nodes, the fastest first; `findings` name the odd ones out.

    `missing` are nodes whose suite did not come to its end.
    """

    ranks: tuple[Rank, ...]
    rankings: tuple[Ranking, ...]
    differences: tuple[Difference, ...]
    missing: tuple[str, ...]
    findings: tuple[Finding, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, "command": "compare", **asdict(self)}


@dataclass(frozen=True)
class _Contestant:
    """A node of a report: what was measured on it alone, and what is known of it."""

    name: str
    bandwidth: tuple[Series, ...]
    facts: Mapping[str, str]


def compare(paths: Sequence[Path]) -> Comparison:
    """The nodes of the reports that `smoke --json` wrote to `paths`; a file counts once.

    Raises ReportUnreadable, ReportBroken, ReportOfOtherSchema, ReportsOfDifferentImages and
    TooFewReports.
    """
    once = {path.resolve(): path for path in paths}.values()
    reports = [(path, dossier.read(path)) for path in once]
    for path, report in reports[1:]:
        if _image(report) != _image(reports[0][1]):
            raise ReportsOfDifferentImages(
                reports[0][0], _image(reports[0][1]), path, _image(report)
            )
    contestants = list(_contestants(reports))
    if len(contestants) < 2:
        raise TooFewReports(len(contestants))
    rankings = tuple(_rankings(contestants))
    differences = tuple(_differences(contestants))
    return Comparison(
        ranks=_ranks(contestants, rankings),
        rankings=rankings,
        differences=differences,
        missing=tuple(
            node.host for _, report in reports for node in report.nodes if node.missing is not None
        ),
        findings=(*_behind(rankings), *_alone(differences, len(contestants))),
    )


def _image(report: Dossier) -> str:
    return "no image" if report.image is None else f"the image {report.image.id}"


# ---- who takes part ----------------------------------------------------------------------------


def _contestants(reports: Iterable[tuple[Path, Dossier]]) -> Iterator[_Contestant]:
    """Every node that is not missing; its report's name is added where two nodes have one name."""
    known = [(path, report, node) for path, report in reports for node in report.nodes]
    hosts = [node.host for _, _, node in known]
    for path, report, node in known:
        if node.missing is None:
            name = node.host if hosts.count(node.host) == 1 else f"{node.host} ({path})"
            yield _contestant(name, report, node)


def _contestant(name: str, report: Dossier, node: Node) -> _Contestant:
    own = tuple(each for each in report.bandwidth if each.nodes == (node.host,) and each.claimed)
    facts = {key: value for key, value in node.facts.items() if key not in _MOVING}
    facts |= {f"version of {key}": value for key, value in report.versions.items()}
    if node.watched is not None:
        facts["network chosen"] = node.watched.network
        facts["GPUs talk by"] = node.watched.talk
    if len(report.nodes) == 1:
        facts |= {f"step {each.name}": _outcome(each.outcome) for each in report.steps}
    return _Contestant(name, own, facts)


def _outcome(outcome: Outcome) -> str:
    return "no failure" if outcome in {Outcome.PASSED, Outcome.NOT_APPLICABLE} else outcome.value


# ---- bandwidth ---------------------------------------------------------------------------------


def _rankings(contestants: Sequence[_Contestant]) -> Iterator[Ranking]:
    """One of each collective and tool, at the largest size that all who ran it have."""
    measured: defaultdict[tuple[Collective, Tool, str, int], dict[str, Series]] = defaultdict(dict)
    for each in contestants:
        for series in each.bandwidth:
            key = (series.run.collective, series.run.tool, series.backend, series.run.nranks)
            measured[key][each.name] = series
    for (collective, tool, _, _), by_node in measured.items():
        speeds = {
            name: {row.bytes: row.busbw for row in series.run.rows}
            for name, series in by_node.items()
        }
        shared = set.intersection(*(set(each) for each in speeds.values()))
        if len(speeds) > 1 and shared:
            largest = max(shared)
            at_size = {name: each[largest] for name, each in speeds.items()}
            yield Ranking(collective, tool, largest, _places(at_size))


def _places(speeds: Mapping[str, float]) -> tuple[Place, ...]:
    places = []
    for node, speed in speeds.items():
        # of an even number the upper one: a slow node of three makes the other two no faster
        median = statistics.median_high(other for name, other in speeds.items() if name != node)
        places.append(Place(node, speed, round(speed / median, 3) if median else 1.0))
    return tuple(sorted(places, key=lambda place: -place.busbw))


def _ranks(contestants: Iterable[_Contestant], rankings: Iterable[Ranking]) -> tuple[Rank, ...]:
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    for ranking in rankings:
        for place in ranking.places:
            ratios[place.node].append(place.ratio)
    ranks = [Rank(each.name, _mean(ratios[each.name])) for each in contestants]
    return tuple(sorted(ranks, key=lambda rank: -(rank.ratio or 0.0)))


def _mean(ratios: Sequence[float]) -> float | None:
    """The geometric one, as ratios want it; 0 where one of them is."""
    if not ratios:
        return None
    return round(statistics.geometric_mean(ratios), 3) if all(ratios) else 0.0


def _behind(rankings: Iterable[Ranking]) -> Iterator[Finding]:
    """A Finding for each node that is behind the others in anything, the most telling measure."""
    worst: dict[str, tuple[Place, Ranking]] = {}
    for ranking in rankings:
        for place in ranking.places:
            if place.ratio < BEHIND and place.ratio < _ratio_of(worst.get(place.node)):
                worst[place.node] = place, ranking
    for place, ranking in worst.values():
        shown = ", ".join(f"{each.node} {each.busbw:.4g}" for each in ranking.places[:8])
        share = round((1 - place.ratio) * 100)
        yield Finding(
            severity=Severity.ERROR,
            what=f"{place.node} is {share}% behind the other nodes in {ranking.collective}",
            where=place.node,
            evidence=f"{ranking.tool}, {size.binary(ranking.size_bytes)}, busbw in GB/s: {shown}",
            cause="a slower link, GPU clock or path between GPUs and HCAs than the others have",
            remedy=f"look at how its facts differ, then run ./invokew doctor on {place.node}",
        )


def _ratio_of(found: tuple[Place, Ranking] | None) -> float:
    return 1.0 if found is None else found[0].ratio


# ---- facts -------------------------------------------------------------------------------------


def _differences(contestants: Sequence[_Contestant]) -> Iterator[Difference]:
    """The facts with more than one value, in the order in which the nodes tell them."""
    names = dict.fromkeys(name for each in contestants for name in each.facts)
    for what in names:
        values: defaultdict[str, list[str]] = defaultdict(list)
        for each in contestants:
            values[each.facts.get(what, "not told")].append(each.name)
        if len(values) > 1:
            ordered = sorted(values.items(), key=lambda item: -len(item[1]))
            yield Difference(what, {value: tuple(nodes) for value, nodes in ordered})


def _alone(differences: Iterable[Difference], count: int) -> Iterator[Finding]:
    """A Finding where one node alone differs from all others, who agree."""
    for each in differences:
        (common, many), *rest = each.values.items()
        if count < _ENOUGH_TO_JUDGE or len(rest) != 1 or len(many) != count - 1:
            continue
        ((value, (node,)),) = rest
        failed = each.what.startswith("step ") and value == Outcome.FAILED
        yield Finding(
            severity=Severity.ERROR if failed else Severity.WARNING,
            what=f"{node} alone differs in {each.what}",
            where=node,
            evidence=f"{node}: {value}; the other {len(many)}: {common}",
            cause="this node was set up otherwise than the others, or something on it broke",
            remedy=f"bring {node} to what the others have, or find out why it must differ",
        )
