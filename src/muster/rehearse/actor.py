"""One pod while it plays: its containers one after the other, what torchrun says in them."""

import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from muster.engine import Container, Stage
from muster.errors import MusterError
from muster.podlines import BEGIN
from muster.rehearse.pods import Cast, Role

# torchrun tells how the nodes met, one value a line, after "Rendezvous complete for workers"
# https://github.com/pytorch/pytorch/blob/main/torch/distributed/elastic/agent/server/api.py
_MET = re.compile(
    r"torch/distributed/elastic/agent/server/api\.py:\d+\]\s+"
    r"(group_rank|group_world_size|global_ranks)=(\d+|\[[\d, ]*\])$"
)
# after this line torchrun speaks, in a traceback and a summary of its own
_RANK_FAILED = re.compile(r"failed \(exitcode: -?\d+\) local_rank: \d+")
_AGENT_LOG = re.compile(r"[IWE]\d{4} [\d:.]+ \d+ torch/")


@dataclass(frozen=True)
class Meeting:
    """How one node stands in a round of the rendezvous."""

    group_rank: int
    group_world_size: int
    ranks: tuple[int, ...]


@dataclass
class Actor:
    """A pod in its try number `generation`. Times in seconds of the monotonic clock."""

    index: int
    generation: int
    name: str
    cast: Cast
    container: Container | None = None
    meetings: list[Meeting] = field(default_factory=list)
    started: float | None = None
    ended: float | None = None
    told_to_end: float | None = None
    exit_code: int | None = None
    disrupted: bool = False
    killed: bool = False
    output: deque[str] = field(default_factory=lambda: deque(maxlen=400))
    _met: dict[str, str] = field(default_factory=dict)

    @property
    def plays(self) -> bool:
        return self.ended is None

    @property
    def meeting(self) -> Meeting | None:
        return self.meetings[-1] if self.meetings else None

    def hear(self, role: str, line: str) -> bool:
        """Take in a line of the container `role`; whether it was the last one of a meeting."""
        match = _MET.search(line)
        if match is None or role != self.cast.trainer.name:
            self.output.append(line)
            return False
        self._met[match[1]] = match[2]
        if match[1] != "global_ranks":
            return False
        ranks = tuple(int(rank) for rank in re.findall(r"\d+", match[2]))
        rank, size = int(self._met["group_rank"]), int(self._met["group_world_size"])
        self.meetings.append(Meeting(rank, size, ranks))
        return True

    def last_lines(self, count: int = 12) -> list[str]:
        """The end of what its ranks said, without torchrun's log and summary, and podlines."""
        lines = [line for line in self.output if line.strip() and not line.startswith(BEGIN)]
        failed = [at for at, line in enumerate(lines) if _RANK_FAILED.search(line)]
        ranks = lines[: failed[-1]] if failed else lines
        return [line for line in ranks if not _AGENT_LOG.match(line)][-count:]


class Event:
    """What an actor's thread tells the rehearsal."""


@dataclass(frozen=True)
class Said(Event):
    """A line of the container `role`."""

    actor: Actor
    role: str
    line: str


@dataclass(frozen=True)
class Ended(Event):
    """The pod has ended: the container `role` with `exit_code`."""

    actor: Actor
    role: str
    exit_code: int


@dataclass(frozen=True)
class Broke(Event):
    """The Engine refused, or is gone."""

    error: BaseException


def play(actor: Actor, stage: Stage, tell: Callable[[Event], None]) -> None:
    """Start the thread in which the actor's containers run."""
    threading.Thread(target=_play, args=(actor, stage, tell), daemon=True).start()


def _play(actor: Actor, stage: Stage, tell: Callable[[Event], None]) -> None:
    try:
        for role in (*actor.cast.before, actor.cast.trainer):
            exit_code = _run(actor, role, stage, tell)
            if exit_code != 0 or actor.told_to_end is not None:
                break
        tell(Ended(actor, role.name, exit_code))
    except (MusterError, OSError, ValueError) as error:
        tell(Broke(error))


def _run(actor: Actor, role: Role, stage: Stage, tell: Callable[[Event], None]) -> int:
    container = stage.start(role.spec, role.place)
    actor.container = container
    if actor.started is None:
        actor.started = time.monotonic()
    if actor.told_to_end is not None:
        container.send(signal.SIGTERM)  # it was told before there was a container
    for line in container.all_lines():
        tell(Said(actor, role.name, line))
    while (exit_code := container.exit_code()) is None:
        time.sleep(0.05)  # its output closes a moment before it ends
    return exit_code
