"""The sieve takes out of the bytes of a log what tells nothing that was not told before.

Most of a large log is a few thousand shapes of lines, each said again by every rank and channel.
A line without its digits is its shape; whether a shape counts each time is found once.
"""

import re
from collections.abc import Iterator
from enum import Enum, auto

# what every line has to be read for: it names a rank, or it may be the one that counts
_EACH_COUNTS = re.compile(
    rb"WARN|Using network|Init (?:START|COMPLETE)|nRanks|NCCL_\w+ set |NCCL version|"
    rb"cudaDriverVersion|coll channels|:\d+ (?:\([^)]{1,80}\) )?-> \d|multicast support|"
    rb"Connected (?:all|binomial|NVLS)|"
    rb"\[[WEF]\d{3,4} |\[[WEF] |\b[WEF]\d{4} |last enqueued|Watchdog|"
    rb"\b(?:time|host|rank|exitcode|error_file|traceback) +: |^\[\d+\]:\s*$|Root Cause|"
    rb"^\s*\d+ +\d+ +\w+ +\w+ +-?\d+ +\d|bus bandwidth|# +Rank |clients joined|"
    rb"(?i:error|fail|fatal|abort|killed|timeout|timed out|no device|not found|mismatch|denied|"
    rb"unable|could not|cannot|refused|corrupt|warning|signal|missing|retry|hint:|exception|stuck)"
)
_CONNECTION = re.compile(rb"\] NCCL INFO Channel \d+(?:/\d+)? : \d+\[\w+\] -> ")
_DIGITS = b"0123456789"
# what is left of 0x7f31f804e4c0 without its digits
_POINTER = re.compile(rb"(?<!\w)x[a-f]*")
_DEVICE = len(" [0] NCCL INFO") + 1
_CHANNEL = len(" Channel 00")
_LONGEST = 4000
_MOST_SHAPES = 100_000
_MOST_CONNECTIONS = 200_000


class _Worth(Enum):
    EACH = auto()
    ONCE = auto()
    CONNECTION = auto()
    WRAPPED_CONNECTION = auto()  # something is before the process: a time makes every line new


class Sieve:
    """Remembers shapes and connections, a bounded number of them; one for a stream of lines."""

    def __init__(self) -> None:
        self._shapes: dict[bytes, _Worth] = {}
        self._connections: set[bytes] = set()

    def sift(self, raws: list[bytes]) -> Iterator[tuple[int, bytes]]:
        """Those of `raws` (one at least), with their places, that say what no line said before.

        This loop is what the speed on a large log hangs on: most lines leave it at `continue`.
        """
        shapes = b"\n".join(raws).translate(None, _DIGITS).split(b"\n")
        worth_of, connections = self._shapes.get, self._connections
        once, connection, wrapped = _Worth.ONCE, _Worth.CONNECTION, _Worth.WRAPPED_CONNECTION
        for place, (raw, shape) in enumerate(zip(raws, shapes, strict=True)):
            worth = worth_of(shape)
            if worth is once:
                continue
            if worth is connection or worth is wrapped:
                # the same ranks on another channel: the two digits of its number are cut out
                number = raw.find(b" Channel ")
                begin = raw.rfind(b" ", 0, number - _DEVICE) if worth is wrapped else 0
                key = raw[begin:number] + raw[number + _CHANNEL :]
                if key in connections:
                    continue
                self._remember(key)
            elif worth is None and not self._new(shape, raw):
                continue
            yield place, raw

    def _new(self, shape: bytes, raw: bytes) -> bool:
        """Learn what `raw` is worth; whether more than its pointers is new in it."""
        if len(raw) > _LONGEST:
            return True
        plain = _POINTER.sub(b"", shape)
        known = self._shapes.get(plain)
        if known is None:
            if len(self._shapes) >= _MOST_SHAPES:
                self._shapes.clear()
            self._shapes[plain] = _worth(raw)
        return known is not _Worth.ONCE

    def _remember(self, key: bytes) -> None:
        if len(self._connections) >= _MOST_CONNECTIONS:
            self._connections.clear()
        self._connections.add(key)


def _worth(raw: bytes) -> _Worth:
    if match := _CONNECTION.search(raw):
        bare = raw.find(b" ", 0, match.start()) == raw.rfind(b" ", 0, match.start())
        return _Worth.CONNECTION if bare else _Worth.WRAPPED_CONNECTION
    return _Worth.EACH if _EACH_COUNTS.search(raw) else _Worth.ONCE
