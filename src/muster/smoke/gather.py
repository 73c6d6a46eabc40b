"""What the suites of one node or of several left, gathered into one Dossier."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from muster import __version__, finding, suite
from muster.dossier import Dossier, ImageRef, Node, Watched, watched
from muster.errors import SuiteDidNotReport
from muster.explain.explanation import of_text, with_cause
from muster.finding import Finding, Outcome
from muster.steps import Log, Step

# the worst first: what a step of several nodes comes to
_WORST = (Outcome.FAILED, Outcome.NOT_RUN, Outcome.PASSED, Outcome.NOT_APPLICABLE)
# of many nodes that measured different things, as many are told
_MOST_MEASURES = 4
# whose NCCL is drawn: the widest group that ran and is as a job's own
_DRAWN = ("nodes_all_reduce", "all_reduce")


@dataclass(frozen=True, kw_only=True)
class Occasion:
    """Of a run as a whole: the command as it was written, the image, the flags in words."""

    command_line: str
    image: ImageRef | None
    run: Mapping[str, str]
    began: datetime = field(default_factory=lambda: datetime.now(UTC))
    _clock: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._clock, 3)


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What a node's suite left: its report log, how it ended, its last words beside the log."""

    host: str
    log: Log
    ending: str
    errors: Sequence[str]

    @property
    def missing(self) -> str | None:
        """Why the node has not told all; None where it has, or had nothing to tell."""
        if self.log.is_whole or self.log.is_idle:
            return None
        return f"its suite broke off {self.when} ({self.ending})"

    @property
    def when(self) -> str:
        if self.log.running is not None:
            return f"during {self.log.running}"
        return "between two steps" if self.log.steps else "before its first step"


def dossier(heard: Sequence[Heard], occasion: Occasion, findings: Iterable[Finding]) -> Dossier:
    """The run as a whole; `findings` are those that no step made.

    Raises SuiteDidNotReport when no node left anything.
    """
    if not any(each.log.steps or each.log.running or each.log.is_whole for each in heard):
        first = heard[0]
        raise SuiteDidNotReport(first.ending, [*first.errors, *first.log.complaints][-10:])
    several = len(heard) > 1
    steps = tuple(map(_with_causes, merged({each.host: each.log for each in heard})))
    found = [*findings, *(_broken_off(each, several) for each in heard if each.missing)]
    found += [each for step in steps for each in step.findings]
    return Dossier(
        verdict=finding.verdict(found),
        started=occasion.began.isoformat(timespec="seconds").replace("+00:00", "Z"),
        seconds=occasion.seconds,
        muster=__version__,
        command_line=occasion.command_line,
        image=occasion.image,
        run=occasion.run,
        versions=_joined(each.log.versions for each in heard),
        hashes=_joined(each.log.hashes for each in heard),
        nodes=_nodes(heard),
        steps=steps,
        findings=tuple(found),
        bandwidth=tuple(series for each in heard for series in each.log.series),
    )


def _joined(known: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """One of each name; nodes that differ in one are told by the step that they meet in."""
    return {name: text for each in reversed(list(known)) for name, text in each.items()}


def _nodes(heard: Sequence[Heard]) -> tuple[Node, ...]:
    seen = _watched({each.host: each.log.nccl for each in heard})
    return tuple(
        Node(
            host=each.host,
            missing=each.missing if len(heard) > 1 else None,
            facts=each.log.facts,
            watched=seen.get(each.host),
        )
        for each in heard
    )


def _watched(nccl: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, Watched]:
    """The three things by host, of one step: of several after each other they would add up."""
    steps = dict.fromkeys([*_DRAWN, *(name for own in nccl.values() for name in own)])
    step = next((name for name in steps if any(own.get(name) for own in nccl.values())), None)
    if step is None:
        return {}
    texts = {host: "\n".join(own[step]) for host, own in nccl.items() if own.get(step)}
    # rank 0 alone tells of rings and trees: all are drawn together
    together = watched(of_text("\n".join(texts.values())).picture)
    # NCCL has its own name for each host
    known = {host: next(iter(watched(of_text(text).picture)), None) for host, text in texts.items()}
    return {host: together[name] for host, name in known.items() if name in together}


def _with_causes(step: Step) -> Step:
    """`step`, and of one that failed the cause that its ranks' output shows."""
    if step.outcome is not Outcome.FAILED:
        return step
    return replace(step, findings=tuple(with_cause(each, step.output) for each in step.findings))


def _broken_off(heard: Heard, several: bool) -> Finding:
    whose = f"{heard.host}'s suite" if several else "the suite"
    where = heard.log.running or heard.when
    return finding.error(
        f"{heard.host}: {where}" if several else where,
        f"{whose} broke off {heard.when} ({heard.ending})",
        evidence="\n".join(heard.errors[-5:]) or heard.ending,
        cause="it was ended from outside: by the kernel when memory ran out, or by somebody",
        remedy="look at the node's memory (dmesg), then run the suite again",
    )


# ---- several nodes -----------------------------------------------------------------------------


def merged(logs: Mapping[str, Log]) -> tuple[Step, ...]:
    """The steps of all nodes in the order of the plan: one for each name, as the worst node's."""
    if len(logs) == 1:
        return tuple(next(iter(logs.values())).steps)
    by_name: dict[str, dict[str, Step]] = {}
    for host, log in logs.items():
        for step in log.steps:
            by_name.setdefault(step.name, {})[host] = step
    order = {name: at for at, name in enumerate(suite.BY_NAME)}
    names = sorted(by_name, key=lambda name: order.get(name, len(order)))
    return tuple(_merged(by_name[name]) for name in names)


def _merged(steps: Mapping[str, Step]) -> Step:
    one = next(iter(steps.values()))
    worst = next(each for each in _WORST if any(s.outcome is each for s in steps.values()))
    telling = {host: step for host, step in steps.items() if step.outcome is worst}
    return replace(
        one,
        outcome=worst,
        seconds=max(step.seconds for step in steps.values()),
        measure=_measure(telling),
        findings=tuple(_findings(steps)),
        output="\n".join(f"== {host} ==\n{s.output}" for host, s in steps.items() if s.output),
    )


def _measure(steps: Mapping[str, Step]) -> str:
    """What all measured, or what each did."""
    by_text: dict[str, list[str]] = {}
    for host, step in steps.items():
        if step.measure:
            by_text.setdefault(step.measure, []).append(host)
    told = [
        text if len(by_text) == 1 else f"{', '.join(hosts)}: {text}"
        for text, hosts in list(by_text.items())[:_MOST_MEASURES]
    ]
    more = len(by_text) - len(told)
    return "; ".join([*told, *([f"{more} more"] if more else [])])


def _findings(steps: Mapping[str, Step]) -> Iterator[Finding]:
    """Each Finding once, with the nodes that made it."""
    hosts: dict[Finding, list[str]] = {}
    for host, step in steps.items():
        for each in step.findings:
            hosts.setdefault(each, []).append(host)
    for each, whose in hosts.items():
        yield replace(each, where=f"{', '.join(whose)}: {each.where}")
