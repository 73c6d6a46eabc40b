"""The sieve takes out of the bytes of a log what tells nothing that was not told before.

Most of a large log is a few thousand shapes of lines, each said again by every rank and channel.
A line without its digits is its shape; whether a shape counts each time is found once.
"""

import re
from collections.abc import Iterator
from enum import Enum, auto
from itertools import count

# What every line has to be read for: it names a rank, or it may be the one that counts. One regex
# of it all takes five times as long.
_NAMES = (
    *(b"Using network", b"Init START", b"Init COMPLETE", b"nRanks", b"NCCL version"),
    *(b"cudaDriverVersion", b"multicast support", b"last enqueued", b"Watchdog", b"Root Cause"),
    *(b"bus bandwidth", b"clients joined"),
)
_TROUBLE = (
    b"warn",
    *(b"error", b"fail", b"fatal", b"abort", b"killed", b"timeout", b"timed out", b"no device"),
    *(b"not found", b"mismatch", b"denied", b"unable", b"could not", b"cannot", b"refused"),
    *(b"corrupt", b"signal", b"missing", b"retry", b"hint:", b"exception", b"stuck"),
)
_FORMS = tuple(
    map(
        re.compile,
        (
            rb"NCCL_\w{1,80} set ",
            rb":\d{1,6} (?:\([^)]{1,80}\) )?-> \d",
            rb"\[[WEF] |[WEF]\d{3,4} ",
            # rows of torchrun
            rb"\b(?:time|host|rank|exitcode|error_file|traceback) {1,20}: ",
            rb"\b(?:run_id|max_nodes|rdzv_\w{1,20}) {1,20}: |^\[\d{1,7}\]:\s{0,2}$",
            # rows of nccl-tests
            rb"\d {1,80}\d{1,18} {1,80}\w{1,20} {1,80}\w{1,20} {1,80}-?\d{1,7} {1,80}\d",
            rb"# {1,80}Rank ",
        ),
    )
)
# a job that goes on after an error says so in the shape that it had before
_GOES_ON = re.compile(
    rb"(?i:\b(?:step|epoch|loss|iter|iteration)\b)|Connected (?:all|binomial|NVLS)"
)
# what ranks say alike, but for who they are
_ALIKE = b" coll channels"
_HEAD = b" NCCL INFO "
_CONNECTION = re.compile(rb"\] NCCL INFO Channel \d+(?:/\d+)? : \d+\[\w+\] -> ")
_DIGITS = b"0123456789"
# what is left of 0x7f31f804e4c0 without its digits
_POINTER = re.compile(rb"(?<!\w)x[a-f]*")
_DEVICE = len(" [0] NCCL INFO") + 1
_CHANNEL = len("00")
_LONGEST = 4000
_MOST_HELD = 2**26
# lines that are left out at one look
_RUN = 256
# bytes that remembering takes beside what is remembered
_BESIDE = 240


class _Worth(Enum):
    TROUBLE = auto()
    EACH = auto()
    ONCE = auto()
    AGAIN = auto()  # once, and once after each line that tells of trouble
    ALIKE = auto()
    CONNECTION = auto()
    WRAPPED_CONNECTION = auto()  # something is before the process: a time makes every line new


class Sieve:
    """Remembers shapes and connections, a bounded number of them; one for a stream of lines."""

    def __init__(self) -> None:
        self._shapes: dict[bytes, _Worth] = {}
        self._connections: set[bytes] = set()
        self._held = 0
        self._goes_on = True
        # shapes as they stand, to be left out always, and as long as the job goes on
        self._left_out: set[bytes] = {b""}
        self._left_out_now: set[bytes] = {b""}

    def sift(self, block: bytes) -> Iterator[tuple[int, bytes]]:
        """Those lines of `block`, with their places, that say what no line said before.

        The last is always among them, since it tells how far the log goes. What the speed on a
        large log hangs on: most runs of lines have nothing that counts, and no line is looked at.
        """
        shapes = block.translate(None, _DIGITS).split(b"\n")
        raws: list[bytes] = []
        left = -1
        for begin in range(0, len(shapes), _RUN):
            run = shapes[begin : begin + _RUN]
            if self._left_out.issuperset(run) or (
                self._goes_on and self._left_out_now.issuperset(run)
            ):
                continue
            raws = raws or block.split(b"\n")
            for place in self._counting(begin, raws[begin : begin + _RUN], run):
                yield place, raws[place]
                left = place
        end = len(block.rstrip())
        begin = block.rfind(b"\n", 0, end) + 1
        last = block.count(b"\n", 0, begin)
        if end and last > left:
            yield last, block[begin:].partition(b"\n")[0]

    def _counting(self, begin: int, raws: list[bytes], shapes: list[bytes]) -> Iterator[int]:
        """The places, from `begin` on, of those of `raws` that say something new."""
        worth_of, connections = self._shapes.get, self._connections
        once, connection, wrapped = _Worth.ONCE, _Worth.CONNECTION, _Worth.WRAPPED_CONNECTION
        for place, raw, shape, worth in zip(count(begin), raws, shapes, map(worth_of, shapes)):
            if worth is once:
                continue
            if worth is connection or worth is wrapped:
                # the same ranks on another channel: the two digits of its number are cut out
                head, _, ends = raw.partition(b" Channel ")
                if worth is wrapped:
                    head = head[head.rfind(b" ", 0, -_DEVICE) :]
                key = head + ends[_CHANNEL:]
                if key in connections:
                    continue
                self._hold(key)
                connections.add(key)
            elif not self._counts(worth, shape, raw):
                continue
            yield place

    def _counts(self, worth: _Worth | None, shape: bytes, raw: bytes) -> bool:
        """Whether more than digits and pointers is new in `raw`; learn what it is worth."""
        if worth is None:
            if len(raw) > _LONGEST:
                return True
            plain = _POINTER.sub(b"", shape)
            worth = self._shapes.get(plain)
            if worth is None:
                self._hold(plain)
                worth = self._shapes[plain] = _worth(raw)
                self._leave_out(plain, worth)
                self._goes_on = self._goes_on and worth is not _Worth.TROUBLE
                return not raw.isspace() and raw != b""
        if worth is _Worth.ONCE:
            return False
        if worth is _Worth.AGAIN:
            new, self._goes_on = not self._goes_on, True
            return new
        if worth is _Worth.ALIKE:
            return self._is_new(raw[max(raw.find(_HEAD), 0) :])
        self._goes_on = self._goes_on and worth is not _Worth.TROUBLE
        return True

    def _is_new(self, what: bytes) -> bool:
        if what in self._connections:
            return False
        self._hold(what)
        self._connections.add(what)
        return True

    def _leave_out(self, shape: bytes, worth: _Worth) -> None:
        if worth is _Worth.ONCE:
            self._left_out.add(shape)
        if worth in (_Worth.ONCE, _Worth.AGAIN):
            self._left_out_now.add(shape)

    def _hold(self, what: bytes) -> None:
        self._held += len(what) + _BESIDE
        if self._held > _MOST_HELD:
            self._shapes.clear()
            self._left_out = {b""}
            self._left_out_now = {b""}
            self._connections.clear()
            self._held = 0


def _worth(raw: bytes) -> _Worth:
    if match := _CONNECTION.search(raw):
        bare = raw.find(b" ", 0, match.start()) == raw.rfind(b" ", 0, match.start())
        return _Worth.CONNECTION if bare else _Worth.WRAPPED_CONNECTION
    small = raw.lower()
    if any(word in small for word in _TROUBLE):
        return _Worth.TROUBLE
    if any(name in raw for name in _NAMES) or any(form.search(raw) for form in _FORMS):
        return _Worth.EACH
    if _ALIKE in raw:
        return _Worth.ALIKE
    return _Worth.AGAIN if _GOES_ON.search(raw) else _Worth.ONCE
