"""Where the suites of several nodes meet: a store that the first of them hosts.

Each says there that it is alive and how it fared, so that one that is gone is missed by its name,
and nobody waits for it longer than needed.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch.distributed import TCPStore

from muster.doctor.links import addresses
from muster.launch import RDZV_PORT

if TYPE_CHECKING:
    from conftest import Step

# not torchrun's own, at which a job may run; the steps' jobs meet at the ports above this one
PORT = RDZV_PORT + 10
_ANSWER_S = 10.0
_BEAT_S = 1.0
# a node whose heart has not beaten for so long is gone; a busy machine may make it skip many
GONE_S = 30.0
_LOOK_S = 0.1
# how long a node that is done with its own steps waits for the store to be there
REACH_S = 120.0
# the host of the store leaves last: how long it waits for the others to have read all
_LEAVE_S = 20.0


class Gone(Exception):
    """Nodes that were awaited and did not come, by name; `why` in words."""

    def __init__(self, nodes: Sequence[str], why: str) -> None:
        super().__init__(f"{', '.join(nodes)} {why}")
        self.nodes, self.why = tuple(nodes), why


class Meeting:
    """This node, `names[rank]`, among the nodes."""

    def __init__(self, names: Sequence[str], rank: int) -> None:
        self.names, self.rank = tuple(names), rank
        self._store: TCPStore | None = None
        self._trouble = "it has not answered yet"
        self._over = threading.Event()
        self._beats: dict[int, tuple[int, float]] = {}
        # from the start on, though they meet only when their own steps are done
        threading.Thread(target=self._live, daemon=True).start()

    def _live(self) -> None:
        while not self._over.is_set():
            try:
                store = self._store or self._open()
                store.add(_beat(self.rank), 1)
                self._store = store
            except RuntimeError as error:
                self._trouble = str(error).splitlines()[0]
            self._over.wait(_BEAT_S)

    def _open(self) -> TCPStore:
        return TCPStore(
            self.names[0],
            PORT,
            is_master=self.rank == 0,
            timeout=timedelta(seconds=_ANSWER_S),
            wait_for_workers=False,
        )

    @cached_property
    def ifname(self) -> str | None:
        """The interface by which this node reaches another; None where that is not known."""
        other = self.names[1 if self.rank == 0 else 0]
        address = socket.getaddrinfo(other, PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(address[0], address[1]) as probe:
            # of a datagram socket this sends nothing: it asks the routes
            probe.connect(address[4])
            own = str(probe.getsockname()[0])
        return next((each.ifname for each in addresses() if each.address == own), None)

    # ---- saying and hearing -----------------------------------------------------------------

    def say(self, what: str, value: object, limit_s: float = _ANSWER_S) -> None:
        """Tell all nodes. Raises Gone when the store does not answer within `limit_s`."""
        with self._answer(limit_s) as store:
            store.set(f"{what}/{self.rank}", json.dumps(value))

    def hear(self, what: str, limit_s: float) -> list[Any]:
        """What each node says of it, in their order. Raises Gone."""
        deadline = time.monotonic() + limit_s
        awaited = set(range(len(self.names)))
        while awaited:
            with self._answer() as store:
                awaited = {rank for rank in awaited if not store.check([f"{what}/{rank}"])}
                dead = {rank for rank in awaited if self._is_gone(store, rank)}
            if dead:
                raise Gone(self._named(dead), "no longer answers")
            if awaited and time.monotonic() > deadline:
                raise Gone(self._named(awaited), f"did not come within {limit_s:g} s")
            if awaited:
                time.sleep(_LOOK_S)
        with self._answer() as store:
            said = [store.get(f"{what}/{rank}") for rank in range(len(self.names))]
        return [json.loads(each) for each in said]

    @contextlib.contextmanager
    def _answer(self, limit_s: float = _ANSWER_S) -> Iterator[TCPStore]:
        """The store. Raises Gone, naming its host, when it does not answer."""
        latest = time.monotonic() + limit_s
        while self._store is None and time.monotonic() < latest:
            time.sleep(_LOOK_S)
        if self._store is None:
            raise Gone(self.names[:1], f"hosts no store at port {PORT}: {self._trouble}")
        try:
            yield self._store
        except RuntimeError as error:
            raise Gone(self.names[:1], f"no longer answers: {str(error).splitlines()[0]}") from None

    def _is_gone(self, store: TCPStore, rank: int) -> bool:
        """Whether its heart stood still. One that never beat may yet come."""
        if not store.check([_beat(rank)]):
            return False
        count = store.add(_beat(rank), 0)
        before, since = self._beats.get(rank, (-1, 0.0))
        if count != before:
            self._beats[rank] = count, time.monotonic()
            return False
        return time.monotonic() - since > GONE_S

    def _named(self, ranks: Collection[int]) -> list[str]:
        return [self.names[rank] for rank in sorted(ranks)]

    def leave(self) -> None:
        """The last word; the host of the store stays for the others'."""
        with contextlib.suppress(Gone):
            self.say("left", value=True)
            if self.rank == 0:
                self.hear("left", _LEAVE_S)
        self._over.set()


def _beat(rank: int) -> str:
    return f"beat/{rank}"


@contextlib.contextmanager
def together(step: "Step", meeting: Meeting) -> Iterator[None]:
    """A step that begins when all nodes have come to it, and passes when it does on each."""
    with missed(step):
        meeting.say(f"at/{step.name}", value=True)
        meeting.hear(f"at/{step.name}", step.limit_s)
    fared = False
    try:
        yield
        fared = True
    finally:
        with contextlib.suppress(Gone):
            meeting.say(f"fared/{step.name}", fared)
    with missed(step):
        well = meeting.hear(f"fared/{step.name}", step.limit_s)
    if failed := [name for name, fine in zip(meeting.names, well, strict=True) if not fine]:
        step.fail(
            what=f"it failed on {', '.join(failed)}, and passed here",
            evidence=f"{len(failed)} of {len(well)} nodes say so",
            cause="theirs to tell",
            remedy=f"read what {failed[0]} says of this step",
        )


@contextlib.contextmanager
def missed(step: "Step") -> Iterator[None]:
    """Whoever does not come is what fails the step."""
    try:
        yield
    except Gone as gone:
        step.fail(
            what=str(gone),
            evidence="the nodes meet in a store that the first of them hosts, and say there once a"
            " second that they are alive",
            cause="the node or its suite was ended, hangs, was never started, or its name and port"
            f" {PORT} cannot be reached from here",
            remedy=f"look at {gone.nodes[0]}: its suite's last words, dmesg; from here at its name"
            f" (getent hosts {gone.nodes[0]}) and at firewalls",
        )
