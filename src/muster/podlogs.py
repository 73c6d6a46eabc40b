"""The logs of a Kubernetes preflight's pods, read back as one run of the suite on several nodes.

    kubectl logs --prefix --tail=-1 -l app.kubernetes.io/name=demo -c preflight > demo.log

One file for all pods or one for each, with kubectl's prefixes and times or without.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from muster import finding, podlines
from muster.doctor.check import listed
from muster.dossier import Dossier, Node, watched
from muster.errors import NotNodes, PodLogBroken, PodLogWithoutResults
from muster.explain import lines
from muster.explain.explanation import of_text
from muster.explain.lines import Line, clean
from muster.finding import Finding, Severity, Verdict
from muster.podlines import Began, Closed, Ended, Found, Known, Measured, Nccl, Opened, Record
from muster.shape import Misshapen
from muster.smoke import gather
from muster.smoke.gather import Heard, Occasion
from muster.steps import Log
from muster.topology import NodeRange

_LAST_WORDS: Final = 5
_MOST_NAMES: Final = 8
_NO_LOG: Final = "no log of it is here"


class _Silent:
    """Progress of what is over."""

    def say(self, text: str) -> None:
        """It was said in the pod."""

    def detail(self, text: str) -> None:
        """It was said in the pod."""


@dataclass
class _Pod:
    """What one pod wrote; another that takes its place has the same host."""

    host: str
    opened: Opened | None = None
    closed: Closed | None = None
    log: Log = field(default_factory=lambda: Log(_Silent()))
    nccl: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    last: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_WORDS))

    @property
    def started(self) -> str:
        return self.opened.started if self.opened else ""

    @property
    def index(self) -> int | None:
        return self.opened.index if self.opened else None

    @property
    def missing(self) -> str | None:
        """Why it came to no verdict; None where it did."""
        if self.closed is not None:
            return None
        return f"its log ends {f'during {self.log.running}' if self.log.running else self._between}"

    @property
    def _between(self) -> str:
        return f"after {self.log.steps[-1].name}" if self.log.steps else "before its first step"

    def take(self, record: Record) -> None:
        """Raises ValueError for NCCL's lines that were damaged."""
        match record:
            case Opened():
                self.opened = record
            case Began(step):
                self.log.running = step
            case Ended(step):
                self.log.running = None
                self.log.steps.append(step)
            case Known():
                self.log.facts.update(record.facts)
                self.log.versions.update(record.versions)
                self.log.hashes.update(record.hashes)
            case Measured(series):
                self.log.series.append(series)
            case Nccl():
                self.nccl.append(record.text)
            case Found(found):
                self.findings.append(found)
            case Closed():
                self.closed = record
                self.log.exit_status = 0

    @property
    def all_findings(self) -> list[Finding]:
        return [*self.findings, *(each for step in self.log.steps for each in step.findings)]


def read(paths: Sequence[Path]) -> Dossier:
    """The run that the logs at `paths` tell of. Of pods that replaced each other the last counts.

    Raises LogUnreadable, PodLogWithoutResults, and PodLogBroken for what no preflight of this
    Muster wrote.
    """
    pods = _latest(pod for path in paths for pod in _pods(path))
    absent = _absent(pods)
    _name_nodes(pods, absent)
    first = next((pod.opened for pod in pods if pod.opened), None)
    run = {"preflight": f"the logs of {len(pods)} pods"}
    if first is not None:
        run["nnodes"] = first.nnodes
    occasion = Occasion(command_line=first.command if first else "", image=None, run=run)
    gathered = gather.dossier([_heard(pod) for pod in pods], occasion, _own_findings(pods))
    nodes = [*_nodes(pods)]
    nodes += [Node(host=host, missing=_NO_LOG, facts={}, watched=None) for host in absent]
    findings = (*_left_none(absent, pods), *gathered.findings)
    return replace(
        gathered,
        verdict=finding.verdict(findings),
        started=min((pod.started for pod in pods if pod.opened), default=""),
        seconds=max((pod.closed.seconds for pod in pods if pod.closed), default=0.0),
        muster=first.version if first else gathered.muster,
        nodes=tuple(nodes),
        findings=findings,
    )


# ---- one file ----------------------------------------------------------------------------------


def _pods(path: Path) -> Iterable[_Pod]:
    pods: list[_Pod] = []
    # by what kubectl puts before a line, and by the host that a record names
    known: dict[tuple[str, str], _Pod] = {}
    speaking: dict[str, _Pod] = {}
    for line in lines.read([path]):
        told = _told(line)
        if told is None:
            if line.source in speaking:
                speaking[line.source].last.append(line.text)
            continue
        host, record = told
        pod = known.get((line.source, host))
        if pod is None or isinstance(record, Opened):
            pod = known[line.source, host] = _Pod(host)
            pods.append(pod)
        _take(pod, record, line)
        speaking[line.source] = pod
    if not pods:
        raise PodLogWithoutResults(lines.shown(path))
    return pods


def _told(line: Line) -> tuple[str, Record] | None:
    try:
        return podlines.read(line.text, _washed)
    except Misshapen as wrong:
        raise PodLogBroken(line.file, line.number, str(wrong)) from None


def _take(pod: _Pod, record: Record, line: Line) -> None:
    try:
        pod.take(record)
    except ValueError as error:
        raise PodLogBroken(line.file, line.number, str(error)) from None


def _washed(text: str) -> str:
    """Safe to show on a terminal."""
    return "\n".join(map(clean, text.split("\n")))


# ---- all pods ----------------------------------------------------------------------------------


def _latest(pods: Iterable[_Pod]) -> list[_Pod]:
    """The last pod of each host, in the order of their numbers."""
    latest: dict[str, _Pod] = {}
    for pod in pods:
        other = latest.get(pod.host)
        if other is None or _age(other) <= _age(pod):
            latest[pod.host] = pod
    return sorted(latest.values(), key=lambda pod: (pod.index is None, pod.index or 0, pod.host))


def _age(pod: _Pod) -> tuple[str, bool]:
    # of two copies of one log the whole one
    return pod.started, pod.closed is not None


def _absent(pods: Sequence[_Pod]) -> list[str]:
    """The names of the nodes whose logs are not here, as far as the others tell them."""
    here = {pod.index for pod in pods if pod.index is not None}
    # an elastic job is whole with the least of its nodes
    nnodes = max((_least(pod.opened.nnodes) for pod in pods if pod.opened), default=0)
    names = [_name(index, pods) for index in range(nnodes) if index not in here] if here else []
    # of a log without its begin the host is known, and not the number
    return [name for name in names if name not in {pod.host for pod in pods}]


def _least(nnodes: str) -> int:
    try:
        return NodeRange.parse("--nnodes", nnodes).least
    except NotNodes:
        return 0


def _name(index: int, pods: Iterable[_Pod]) -> str:
    """A Job calls its pods' hosts NAME-INDEX."""
    for pod in pods:
        if pod.index is not None and pod.host.endswith(f"-{pod.index}"):
            return f"{pod.host.removesuffix(str(pod.index))}{index}"
    return f"node {index}"


def _name_nodes(pods: Iterable[_Pod], absent: Iterable[str]) -> None:
    """Bandwidth is of all nodes, and the pod that measured it does not know their names."""
    hosts = (*(pod.host for pod in pods), *absent)
    for pod in pods:
        pod.log.series[:] = [replace(each, nodes=hosts) for each in pod.log.series]


def _nodes(pods: Sequence[_Pod]) -> Iterator[Node]:
    # all together: rank 0 alone tells of the rings
    said = "".join(text for pod in pods for text in pod.nccl)
    seen = watched(of_text(said).picture) if said else {}
    for pod in pods:
        # NCCL writes a host's name up to its first dot
        own = seen.get(pod.host.partition(".")[0])
        yield Node(host=pod.host, missing=pod.missing, facts=pod.log.facts, watched=own)


def _heard(pod: _Pod) -> Heard:
    return Heard(host=pod.host, log=pod.log, ending="its log ends there", errors=list(pod.last))


# ---- Findings ----------------------------------------------------------------------------------


def _own_findings(pods: Iterable[_Pod]) -> Iterator[Finding]:
    """Those that no step made."""
    for pod in pods:
        for each in pod.findings:
            yield replace(each, where=f"{pod.host}: {each.where}")
        refused = pod.closed is not None and pod.closed.verdict is Verdict.NOT_READY
        if refused and not any(each.severity is Severity.ERROR for each in pod.all_findings):
            yield finding.error(
                pod.host,
                f"{pod.host} is NOT READY, and its log does not hold why",
                evidence="\n".join(pod.last) or "no line beside the results",
                cause="lines of it were lost or cut on their way here",
                remedy="take the log from the cluster itself: kubectl logs --tail=-1",
            )


def _left_none(absent: Sequence[str], pods: Sequence[_Pod]) -> Iterator[Finding]:
    if absent:
        yield finding.error(
            listed(absent, _MOST_NAMES),
            f"{len(absent)} of {len(absent) + len(pods)} nodes left no log",
            evidence=f"logs are here of {listed([pod.host for pod in pods], _MOST_NAMES)}",
            cause="the pod was not started, or its log was not given",
            remedy="kubectl get pods -o wide shows the pod and its node; give the logs of all"
            " pods, whole: kubectl logs --prefix --tail=-1 -l app.kubernetes.io/name=NAME"
            " -c preflight",
        )
