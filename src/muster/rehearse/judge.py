"""What a rehearsal that is over comes to: did the job do what it is to do, and if not, why."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from muster.explain.explanation import with_cause
from muster.finding import Finding, Severity
from muster.launch import ExitStatus
from muster.manifests.documents import mapping
from muster.manifests.workloads import PodGroup
from muster.rehearse.actor import Actor
from muster.rehearse.faults import Fault, Plan
from muster.topology import NodeRange

# faults that come while the ranks run
STRIKES: Final = {
    *(Fault.NODE_KILLED, Fault.LEADER_KILLED, Fault.PREEMPTED, Fault.RANK_HANGS),
    *(Fault.SCALE_UP, Fault.SCALE_DOWN),
}
_CAUSES: Final = {
    ExitStatus.USAGE: "the launcher or the script was started with wrong arguments",
    ExitStatus.WORKER_FAILED: "a rank failed; its own words are above",
    ExitStatus.RENDEZVOUS_FAILED: "the nodes did not meet, or the one that hosts the store left",
    ExitStatus.PREEMPTED: "the pod was told to end",
    ExitStatus.NOT_READY: "the preflight found this: the node or its environment is not ready",
    126: "the program of the container cannot be run",
    127: "the program of the container is not in the image",
    137: "SIGKILL: the kernel sends it when memory runs out",
}


@dataclass(frozen=True)
class Play:
    """A rehearsal that is over. `failure` is the policy's reason when the job failed."""

    group: PodGroup
    pods: int
    plan: Plan
    nodes: NodeRange | None
    cast: Sequence[Actor]
    past: Sequence[Actor]
    succeeded: frozenset[int]
    away: frozenset[int]
    failure: str | None
    struck: bool
    cut_off: bool

    @property
    def complete(self) -> bool:
        """Whether every pod that was to succeed did, and any was."""
        awaited = {*range(self.pods)} - self.away
        return bool(self.succeeded) and self.succeeded >= awaited

    @property
    def goes_on_without_one(self) -> bool:
        """Whether fewer nodes than pods are enough for torchrun."""
        return self.nodes is not None and self.nodes.least < self.pods


def findings(play: Play) -> Iterator[Finding]:
    """What is wrong; nothing when the job did what it is to do."""
    if play.cut_off:
        return  # that it did not end is said already
    match play.plan.fault:
        case fault if fault in STRIKES and not play.struck:
            yield _not_played(play)
        case Fault.RANK_RAISES if play.complete and not _started_again(play):
            yield _not_raised(play)
        case Fault.MISSING_NODE if not play.goes_on_without_one:
            yield from _gave_up(play)
        case Fault.RANK_HANGS:
            yield from _deadline(play)
        case Fault.TINY_SHM:
            if not play.complete:
                yield _failed(play, Severity.WARNING)
        case _:
            if not play.complete:
                yield _failed(play, Severity.ERROR)
            else:
                yield from _size(play)
    yield from _order(play)


def _where(play: Play) -> str:
    return play.group.document.where(*play.group.trainer_path)


def _root(play: Play) -> Actor | None:
    """The pod whose end explains the others: the first that failed by itself, ranks first."""
    own = [
        actor
        for actor in play.past
        if actor.exit_code not in {0, None} and not actor.killed and actor.told_to_end is None
    ]
    followers = (ExitStatus.RENDEZVOUS_FAILED, 1)
    return min(
        own, key=lambda actor: (actor.exit_code in followers, actor.ended or 0.0), default=None
    )


def _failed(play: Play, severity: Severity) -> Finding:
    root = _root(play)
    why = play.failure or "a pod was given up"
    happens = f" when {play.plan.story.partition(':')[0]}" if play.plan.fault else ""
    cause = "all pods that failed were ended by the rehearsal, and the policy gives no further try"
    shown = []
    if root is not None and root.exit_code is not None:
        cause = _CAUSES.get(root.exit_code, "not known: read the last lines")
        shown = [f"{root.name}: exit code {root.exit_code}", *root.last_lines()]
    failed = Finding(
        severity=severity,
        what=f"the job does not complete{happens}: {why}",
        where=_where(play),
        evidence="\n".join(shown) or why,
        cause=cause,
        remedy=_remedy(play),
    )
    return failed if root is None else with_cause(failed, "\n".join(root.output))


def _remedy(play: Play) -> str:
    if play.plan.fault in STRIKES:
        return (
            "let the policy start pods again: backoffLimitPerIndex, and Ignore for DisruptionTarget"
            " in podFailurePolicy; in a JobSet failurePolicy.maxRestarts"
        )
    return "mend what the last lines name, and rehearse again"


def _not_played(play: Play) -> Finding:
    root = _root(play)
    shown = "every pod ended before" if root is None else "\n".join(root.last_lines())
    return Finding(
        severity=Severity.ERROR,
        what=f"{play.plan.fault} was not played: the job was over, or its nodes never met",
        where=_where(play),
        evidence=shown,
        cause="the fault comes when the ranks run, and they did not, or not for long enough",
        remedy="rehearse without a fault first; then with a script that runs for half a minute",
    )


def _started_again(play: Play) -> bool:
    """Whether torchrun started ranks again, or the policy a pod."""
    return any(actor.generation > 0 or len(actor.meetings) > 1 for actor in play.past)


def _not_raised(play: Play) -> Finding:
    return Finding(
        severity=Severity.ERROR,
        what=f"{play.plan.fault} was not played: no rank was started again",
        where=_where(play),
        evidence="every pod met once, and succeeded",
        cause="the rank did not read the rehearsal's sitecustomize.py: the script sets PYTHONPATH,"
        " or starts no Python",
        remedy="leave PYTHONPATH as the container has it; or rehearse node-killed",
    )


def _gave_up(play: Play) -> Iterator[Finding]:
    """That all pods ended by themselves, and none with 0."""
    if play.succeeded:
        yield Finding(
            severity=Severity.ERROR,
            what=f"{len(play.succeeded)} pods succeed although a node is missing",
            where=_where(play),
            evidence=f"exit code 0: pods {', '.join(map(str, sorted(play.succeeded)))}",
            cause="each pod runs a job of its own: they do not meet",
            remedy="give all of them the same --rdzv-endpoint, and --nnodes as many as pods",
        )


def _deadline(play: Play) -> Iterator[Finding]:
    spec = mapping(play.group.document.data.get("spec"))
    if not any("activeDeadlineSeconds" in each for each in (play.group.job, spec)):
        yield Finding(
            severity=Severity.WARNING,
            what="nothing in the manifest ends a job that hangs",
            where=_where(play),
            evidence="no activeDeadlineSeconds",
            cause="torch's own timeout is 10 minutes with NCCL and 30 with gloo, if it comes",
            remedy="set activeDeadlineSeconds (render --deadline-s)",
        )


def _size(play: Play) -> Iterator[Finding]:
    """That as many nodes met as the fault leaves."""
    most = play.pods
    if play.nodes is None:
        return
    expected = most - 1 if play.plan.fault in {Fault.SCALE_DOWN, Fault.MISSING_NODE} else most
    sizes = [
        actor.meeting.group_world_size
        for actor in play.cast
        if actor.meeting and actor.index not in play.away
    ]
    if sizes and max(sizes) != expected:
        yield Finding(
            severity=Severity.ERROR,
            what=f"{max(sizes)} nodes met, and {expected} were to",
            where=_where(play),
            evidence=f"group_world_size {', '.join(map(str, sizes))}",
            cause="--nnodes is not the number of pods, or some pods joined too late",
            remedy="set --nnodes to the Job's completions, and join_timeout above the skew",
        )


def _order(play: Play) -> Iterator[Finding]:
    """That the nodes' ranks are the pods' indexes, where their number is fixed."""
    if (
        not play.group.indexed
        or play.nodes is None
        or play.nodes.elastic
        or play.pods != play.group.replicas
    ):
        return
    ranks = {
        actor.index: actor.meeting.group_rank for actor in play.cast if actor.meeting is not None
    }
    if any(index != rank for index, rank in ranks.items()):
        yield Finding(
            severity=Severity.WARNING,
            what="the nodes' ranks are not the pods' indexes",
            where=_where(play),
            evidence=", ".join(f"pod {index} is node {rank}" for index, rank in ranks.items()),
            cause="c10d sorts the nodes by --local-addr as text, and ignores --node-rank:"
            " neighbours by index, placed near each other, are no neighbours by rank",
            remedy="run torchrun under Muster's launcher, or give each pod a --local-addr that"
            " sorts by index",
        )


def grace_exceeded(actor: Actor) -> Finding:
    """The Finding of a pod that had to be ended by force."""
    return Finding(
        severity=Severity.ERROR,
        what=f"{actor.name} did not end within its grace period of {actor.cast.grace_s} s",
        where=actor.name,
        evidence="\n".join(actor.last_lines(4)) or "no output",
        cause="the first process does not pass SIGTERM on, or the ranks take longer to end",
        remedy="start torchrun with exec, and set terminationGracePeriodSeconds above its"
        " --shutdown-timeout",
    )


def too_long(play: Play, limit_s: int) -> Finding:
    """The Finding of a job that did not end within the rehearsal's limit."""
    rows = [
        f"{actor.name}: {'ended' if not actor.plays else 'met' if actor.meeting else 'waits'}"
        for actor in play.cast
    ]
    waiting = next((actor for actor in play.cast if actor.plays), None)
    last = [] if waiting is None else waiting.last_lines(6)
    return Finding(
        severity=Severity.ERROR,
        what=f"the job did not end within {limit_s} s",
        where=_where(play),
        evidence="\n".join([*rows, *last]),
        cause="nodes that wait did not find each other: the endpoint's name, --nnodes or the"
        " number of pods is wrong; or the script runs longer",
        remedy="./invokew lint-manifest the file; for a long script give --limit SECONDS",
    )
