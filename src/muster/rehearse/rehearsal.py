"""A manifest played on the Engine: one container a pod, the controllers' decisions, a Verdict."""

import heapq
import itertools
import queue
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import psutil

from muster import finding, launch
from muster.engine import Container, ContainerSpec, Engine, Place, Stage
from muster.errors import NotNodes, PodImageMissing, TooManyPods
from muster.finding import Finding, Verdict
from muster.manifests import lint
from muster.manifests.documents import Document
from muster.manifests.workloads import PodGroup
from muster.progress import Progress
from muster.rehearse import actor as actors
from muster.rehearse import controller as controllers
from muster.rehearse import faults, judge
from muster.rehearse.actor import Actor, Broke, Ended, Event, Said
from muster.rehearse.controller import Action, Controller, Decision, PodEnd
from muster.rehearse.faults import Fault, Plan
from muster.rehearse.judge import Play
from muster.rehearse.pods import FAULT_FOLDER, Cast, Change, Tailor, Wardrobe
from muster.topology import NodeRange

SCHEMA: Final = 1
MOST_PODS: Final = 64
LIMIT_S: Final = 300
# after the ranks have been started: a rank imports torch for some seconds before it can do anything
SETTLE_S: Final = 2.0
# between the end of a pod and its replacement; a cluster takes longer
REPLACE_S: Final = 0.5
# the Engine's own time, beyond a pod's grace period
GRACE_MARGIN_S: Final = 5.0


@dataclass(frozen=True)
class Wish:
    """What the user chose: another image, ranks a node, the limit in seconds, a fault."""

    image: str | None = None
    nproc_per_node: int | None = None
    limit_s: int = LIMIT_S
    plan: Plan = field(default_factory=Plan)


@dataclass(frozen=True)
class Pod:
    """How one try of a pod went; `group_rank` is torchrun's number of the node, if it met."""

    name: str
    index: int
    generation: int
    group_rank: int | None
    ranks: tuple[int, ...]
    exit_code: int | None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """What the rehearsal found. `notes` says what it had otherwise than a cluster."""

    verdict: Verdict
    file: str
    fault: str | None
    story: str
    pods: tuple[Pod, ...]
    decisions: tuple[str, ...]
    notes: tuple[str, ...]
    findings: tuple[Finding, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "command": "rehearse", **asdict(self)}


def rehearse(
    engine: Engine, documents: Sequence[Document], wish: Wish, progress: Progress
) -> Result:
    """Play the pods of the manifest that run torchrun.

    Raises NoTorchrun, TooManyPods, PodImageMissing, FaultNeedsNodes for what cannot be played.
    """
    groups = _groups(documents)
    nodes = _nodes(groups[0])
    pods = sum(group.replicas for group in groups)
    faults.check(wish.plan, pods, nodes)
    for group in groups:
        image = wish.image or str(group.trainer.get("image", ""))
        if engine.image(image) is None:
            raise PodImageMissing(image, group.hostname(0))
    if swept := engine.sweep():
        progress.say(f"removed what {swept} killed commands left")
    notes: dict[str, None] = {}
    with engine.stage() as stage:
        wardrobe = Wardrobe(stage, documents, image)
        tailors = [
            Tailor(group, wardrobe, _change(group, pods, wish, notes), notes) for group in groups
        ]
        return _Rehearsal(stage, tailors, wish, nodes, progress).run()


def _groups(documents: Sequence[Document]) -> tuple[PodGroup, ...]:
    groups = lint.require_torchrun(documents)
    pods = sum(group.replicas for group in groups)
    if pods > MOST_PODS:
        raise TooManyPods(pods, MOST_PODS)
    return groups


def _nodes(group: PodGroup) -> NodeRange | None:
    """torchrun's --nnodes; None where the manifest does not tell it."""
    assert group.invocation is not None
    try:
        return NodeRange.parse("--nnodes", group.invocation.nnodes or "")
    except NotNodes:
        return None


def _change(group: PodGroup, pods: int, wish: Wish, notes: dict[str, None]) -> Change:
    """What is otherwise on this machine."""
    assert group.invocation is not None
    written = group.invocation.nproc_per_node or "1"
    ranks = wish.nproc_per_node or _ranks(written, pods)
    if str(ranks) != written:
        notes[f"nproc_per_node is {ranks} in place of {written}: no GPUs, and few cores"] = None
    fault = wish.plan.fault
    return Change(
        image=wish.image,
        nproc_per_node=ranks,
        join_timeout_s=faults.SHORT_JOIN_TIMEOUT_S if fault is Fault.MISSING_NODE else None,
        shm_bytes=faults.TINY_SHM_BYTES if fault is Fault.TINY_SHM else None,
    )


def _ranks(written: str, pods: int) -> int:
    """As many ranks a pod as the manifest has, or as two a core leave to each."""
    most = max(1, 2 * (psutil.cpu_count() or 1) // pods)
    return min(int(written), most) if written.isdecimal() else 1


@dataclass(frozen=True)
class _Part:
    """A pod of the manifest: number `index` of its group."""

    tailor: Tailor
    controller: Controller
    index: int

    @property
    def name(self) -> str:
        return self.tailor.group.hostname(self.index)


class _Rehearsal:
    """The play itself: one event after the other, and timers. Pods are numbered over all groups."""

    def __init__(
        self,
        stage: Stage,
        tailors: Sequence[Tailor],
        wish: Wish,
        nodes: NodeRange | None,
        progress: Progress,
    ) -> None:
        self._stage = stage
        self._parts = [
            _Part(tailor, controller, index)
            for tailor in tailors
            for controller in [controllers.controller(tailor.group)]
            for index in range(tailor.group.replicas)
        ]
        self._notes = tailors[0].notes
        self._group = tailors[0].group
        self._wish = wish
        self._plan = wish.plan
        self._nodes = nodes
        self._progress = progress
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._cast: dict[int, Actor] = {}
        self._past: list[Actor] = []
        self._succeeded: set[int] = set()
        self._away: set[int] = set()
        self._coming: set[int] = set()
        self._decisions: list[str] = []
        self._findings: list[Finding] = []
        self._failure: str | None = None
        self._restarting = False
        self._struck = False
        self._played = False
        self._cut_off = False
        self._holder: Container | None = None
        self._started = time.monotonic()

    # ---- from start to end ----

    def run(self) -> Result:
        self._progress.say(f"{len(self._parts)} pods; {self._plan.story}")
        for index in range(len(self._parts)):
            self._enter(index)
        deadline = self._started + self._wish.limit_s
        while not self._is_over():
            now = time.monotonic()
            if now > deadline:
                self._findings.append(judge.too_long(self._as_play(), self._wish.limit_s))
                self._cut_off = True
                break
            self._ring(now)
            self._show()
            try:
                self._take(self._events.get(timeout=self._patience(deadline)))
            except queue.Empty:
                continue
        return self._result()

    def _is_over(self) -> bool:
        if any(actor.plays for actor in self._cast.values()):
            return False
        if self._failure is not None:
            return True
        return not self._coming and not self._restarting

    def _patience(self, deadline: float) -> float:
        until = min([deadline, *(at for at, _, _ in self._timers[:1])])
        return max(0.01, min(0.5, until - time.monotonic()))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._count), action))

    def _ring(self, now: float) -> None:
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()

    def _take(self, event: Event) -> None:
        match event:
            case Said(actor, role, line):
                if actor.hear(role, line):
                    self._met(actor)
            case Ended(actor, role, exit_code):
                self._pod_ended(actor, role, exit_code)
            case Broke(error):
                raise error

    def _show(self) -> None:
        words = []
        for index, actor in sorted(self._cast.items()):
            meeting = actor.meeting
            state = "starts" if meeting is None else f"rank {meeting.group_rank}"
            if actor.ended is not None:
                state = f"exit code {actor.exit_code}"
            words.append(f"{index}: {state}")
        self._progress.detail(f"{time.monotonic() - self._started:.0f} s  {', '.join(words)}")

    # ---- pods come ----

    def _enter(self, index: int) -> None:
        """Pod `index` for the first time, as the fault has it."""
        fault, last = self._plan.fault, len(self._parts) - 1
        if fault is Fault.MISSING_NODE and index == last:
            self._away.add(index)
        elif fault is Fault.LATE_NODE and index == last:
            self._play_after(self._plan.seconds, index, 0)
        elif fault is Fault.SCALE_UP and self._nodes and index >= self._nodes.least:
            self._away.add(index)
        else:
            self._play(index, 0)

    def _play_after(self, seconds: float, index: int, generation: int) -> None:
        self._coming.add(index)
        self._after(seconds, lambda: self._play(index, generation))

    def _play(self, index: int, generation: int) -> None:
        """Start pod `index`."""
        self._away.discard(index)
        self._coming.discard(index)
        part = self._parts[index]
        tailor = replace(part.tailor, generation=generation)
        if generation == 0 and self._plan.fault is Fault.RANK_RAISES:
            tailor = replace(tailor, change=self._with_raise(tailor.change))
        cast = tailor.cast(part.index)
        if generation == 0 and index == 0:
            cast = self._with_fault_at_pod_0(cast)
        actor = Actor(index, generation, part.name, cast)
        self._cast[index] = actor
        self._past.append(actor)
        again = f", try {generation + 1}" if generation else ""
        self._progress.say(f"{part.name}: starts{again}")
        actors.play(actor, self._stage, self._events.put)

    def _with_raise(self, change: Change) -> Change:
        ranks = len(self._parts) * (change.nproc_per_node or 1)
        environment = {"PYTHONPATH": FAULT_FOLDER, "MUSTER_FAULT_RANK": str(ranks - 1)}
        return replace(change, environment=environment, files={"sitecustomize.py": faults.RAISE})

    def _with_fault_at_pod_0(self, cast: Cast) -> Cast:
        place = cast.trainer.place
        if self._plan.fault is Fault.LATE_DNS:
            self._after(self._plan.seconds, lambda: self._publish(place.aliases))
            return cast.placed(replace(place, aliases=()))
        if self._plan.fault is Fault.PORT_TAKEN:
            self._holder = self._hold_port(cast)
            alone = replace(place, hostname=None, domain=None, aliases=(), beside=self._holder)
            return cast.placed(alone)
        return cast

    def _publish(self, names: Sequence[str]) -> None:
        """Make pod 0 known by `names`: on a network that joins all pods, from now on."""
        network = self._stage.second_network()
        for index, actor in self._cast.items():
            if actor.plays and actor.container is not None:
                self._stage.connect(network, actor.container, names if index == 0 else ())
        self._progress.say(f"{self._cast[0].name}: its name is in DNS")

    def _hold_port(self, cast: Cast) -> Container:
        assert self._group.invocation is not None
        _, port = launch.host_and_port(self._group.invocation.rdzv_endpoint or "")
        spec = ContainerSpec(
            image=cast.trainer.spec.image,
            entrypoint=("python", "-c", faults.HOLD_PORT),
            command=(str(port),),
            shm_bytes=cast.trainer.spec.shm_bytes,
            init=False,
        )
        names = cast.trainer.place
        place = Place(hostname=names.hostname, domain=names.domain, aliases=names.aliases)
        return self._stage.start(spec, place)

    # ---- pods meet ----

    def _met(self, actor: Actor) -> None:
        meeting = actor.meeting
        assert meeting is not None
        ranks = ", ".join(map(str, meeting.ranks))
        self._progress.say(
            f"{actor.name}: node {meeting.group_rank} of {meeting.group_world_size}, ranks {ranks}"
        )
        playing = [each for each in self._cast.values() if each.plays]
        if not self._struck and all(each.meeting is not None for each in playing):
            self._struck = True
            self._after(SETTLE_S, self._strike)

    def _strike(self) -> None:
        """Play the fault that comes while the ranks run."""
        self._played = any(actor.plays for actor in self._cast.values())
        last = max(self._cast)
        match self._plan.fault:
            case Fault.NODE_KILLED:
                self._kill(last)
            case Fault.LEADER_KILLED:
                self._kill(0)
            case Fault.SCALE_DOWN:
                self._away.add(last)
                self._kill(last)
            case Fault.SCALE_UP:
                for index in sorted(self._away):
                    self._play(index, 0)
            case Fault.PREEMPTED:
                for actor in self._cast.values():
                    actor.disrupted = True
                    self._tell_to_end(actor)
            case Fault.RANK_HANGS:
                self._hang(last)
            case _:
                pass

    def _kill(self, index: int) -> None:
        actor = self._cast[index]
        if actor.container is None or not actor.plays:
            return
        self._progress.say(f"{actor.name}: its node dies")
        actor.disrupted = actor.killed = True
        actor.container.send(signal.SIGKILL)

    def _hang(self, index: int) -> None:
        actor = self._cast[index]
        meeting = actor.meeting
        if actor.container is None or meeting is None or not actor.plays:
            return
        rank = max(meeting.ranks)
        self._progress.say(f"{actor.name}: rank {rank} hangs")
        actor.container.execute(["python", "-c", faults.STOP_RANK, str(rank)])
        self._after(faults.HANG_S, lambda: self._fail("DeadlineExceeded: the job hangs"))

    # ---- pods end ----

    def _pod_ended(self, actor: Actor, role: str, exit_code: int) -> None:
        actor.ended, actor.exit_code = time.monotonic(), exit_code
        lasted = actor.ended - (actor.started or actor.ended)
        self._progress.say(f"{actor.name}: {role} ended with exit code {exit_code}, {lasted:.1f} s")
        if self._holder is not None and actor.index == 0:
            self._holder.send(signal.SIGKILL)
            self._holder = None
        if exit_code == 0:
            self._succeeded.add(actor.index)
        if not (self._restarting or self._failure is not None or actor.index in self._away):
            self._ask_controller(actor, role)
        if self._restarting and not any(each.plays for each in self._cast.values()):
            self._restart_all()

    def _ask_controller(self, actor: Actor, role: str) -> None:
        part = self._parts[actor.index]
        if actor.exit_code == 0:
            decision = part.controller.succeeded(part.index)
        elif self._plan.fault is Fault.MISSING_NODE and not (self._nodes and self._nodes.elastic):
            return  # another try would wait as long again, and end as this one
        else:
            decision = part.controller.ended(_pod_end(actor, part.index, role))
        if decision is not None:
            self._follow(decision, actor)

    def _follow(self, decision: Decision, actor: Actor) -> None:
        self._decisions.append(decision.why)
        self._progress.say(f"{actor.name}: {decision.action} ({decision.why})")
        match decision.action:
            case Action.REPLACE:
                self._play_after(REPLACE_S, actor.index, actor.generation + 1)
            case Action.RESTART_ALL:
                self._restarting = True
                self._tell_all_to_end()
            case Action.FAIL:
                self._fail(decision.why)
            case Action.NOTHING:
                pass  # the index is given up, and the Job fails when the others are done

    def _restart_all(self) -> None:
        self._restarting = False
        self._succeeded.clear()
        for actor in list(self._cast.values()):
            self._play(actor.index, actor.generation + 1)

    def _fail(self, why: str) -> None:
        self._failure = why
        self._timers.clear()
        self._coming.clear()
        self._tell_all_to_end()

    def _tell_all_to_end(self) -> None:
        for actor in self._cast.values():
            self._tell_to_end(actor)

    def _tell_to_end(self, actor: Actor) -> None:
        """SIGTERM now, SIGKILL after the grace period, as the kubelet does."""
        if not actor.plays or actor.told_to_end is not None:
            return
        actor.told_to_end = time.monotonic()
        if actor.container is not None:
            actor.container.send(signal.SIGTERM)
        self._after(actor.cast.grace_s + GRACE_MARGIN_S, lambda: self._end_by_force(actor))

    def _end_by_force(self, actor: Actor) -> None:
        if actor.plays and actor.container is not None:
            self._findings.append(judge.grace_exceeded(actor))
            actor.container.send(signal.SIGKILL)

    # ---- the verdict ----

    def _result(self) -> Result:
        self._findings += judge.findings(self._as_play())
        return Result(
            verdict=finding.verdict(self._findings),
            file=self._group.document.file,
            fault=self._plan.fault,
            story=self._plan.story,
            pods=tuple(_pod(actor) for actor in self._past),
            decisions=tuple(self._decisions),
            notes=tuple(self._notes),
            findings=tuple(self._findings),
            seconds=round(time.monotonic() - self._started, 3),
        )

    def _as_play(self) -> Play:
        return Play(
            group=self._group,
            pods=len(self._parts),
            plan=self._plan,
            nodes=self._nodes,
            cast=[actor for _, actor in sorted(self._cast.items())],
            past=self._past,
            succeeded=frozenset(self._succeeded),
            away=frozenset(self._away),
            failure=self._failure,
            struck=self._played,
            cut_off=self._cut_off,
        )


def _pod_end(actor: Actor, index: int, role: str) -> PodEnd:
    # a node that died tells no exit code
    exit_code = None if actor.killed else actor.exit_code
    return PodEnd(index, role, exit_code, actor.disrupted)


def _pod(actor: Actor) -> Pod:
    meeting = actor.meeting
    began, ended = actor.started, actor.ended
    return Pod(
        name=actor.name,
        index=actor.index,
        generation=actor.generation,
        group_rank=None if meeting is None else meeting.group_rank,
        ranks=() if meeting is None else meeting.ranks,
        exit_code=actor.exit_code,
        seconds=0.0 if began is None or ended is None else round(ended - began, 3),
    )
