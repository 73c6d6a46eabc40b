"""The sieve takes out of the bytes of a log what tells nothing that was not told before.

Most of a large log is a few thousand shapes of lines, each said again by every rank and channel.
A line without its digits is its shape; whether a shape counts each time is found once.
"""

import re
from enum import Enum, auto

# what every line has to be read for: it names a rank, or it may be the one that counts
_EACH_COUNTS = re.compile(
    rb"WARN|Using network|Init (?:START|COMPLETE)|nRanks|NCCL_\w+ set |NCCL version|"
    rb"cudaDriverVersion|coll channels| -> \d+(?: |$)|multicast support|Connected |"
    rb"\[[WEF]\d{3,4} |\[[WEF] |\b[WEF]\d{4} |last enqueued|Watchdog|"
    rb"\b(?:time|host|rank|exitcode|error_file|traceback) +: |^\[\d+\]:\s*$|Root Cause|"
    rb"^\s*\d+ +\d+ +\w+ +\w+ +-?\d+ +\d|bus bandwidth|# +Rank |clients joined|"
    rb"(?i:error|fail|fatal|abort|killed|timeout|timed out|no device|not found|mismatch|denied|"
    rb"unable|could not|cannot|refused|corrupt|warning|signal|missing|retry|hint:|exception|stuck)"
)
_CONNECTION = re.compile(rb"\] NCCL INFO Channel \d+(?:/\d+)? : \d+\[\w+\] -> ")
_DIGITS = b"0123456789"
_LONGEST_SHAPE = 2000
_MOST_SHAPES = 50_000
_MOST_CONNECTIONS = 200_000


class _Worth(Enum):
    EACH = auto()
    ONCE = auto()
    CONNECTION = auto()


class Sieve:
    """Remembers shapes and connections, a bounded number of them; one for a stream of lines."""

    def __init__(self) -> None:
        self._shapes: dict[bytes, _Worth] = {}
        self._connections: set[bytes] = set()

    def dull(self, raw: bytes) -> bool:
        """Whether `raw` says nothing that an earlier line did not say."""
        if len(raw) > _LONGEST_SHAPE:
            return False
        shape = raw.translate(None, _DIGITS)
        worth = self._shapes.get(shape)
        if worth is None:
            self._learn(shape, raw)
            return False
        if worth is _Worth.CONNECTION:
            return self._known_connection(raw)
        return worth is _Worth.ONCE

    def _learn(self, shape: bytes, raw: bytes) -> None:
        if len(self._shapes) >= _MOST_SHAPES:
            self._shapes.clear()
        if _CONNECTION.search(raw):
            self._shapes[shape] = _Worth.CONNECTION
            self._known_connection(raw)
        else:
            self._shapes[shape] = _Worth.EACH if _EACH_COUNTS.search(raw) else _Worth.ONCE

    def _known_connection(self, raw: bytes) -> bool:
        """The same ranks on another channel: what is before the process and the number is cut."""
        number = raw.rfind(b" NCCL INFO Channel ")
        process = raw.rfind(b" [", 0, number)
        key = raw[raw.rfind(b" ", 0, process) + 1 : process] + raw[raw.find(b" : ", number) :]
        if key in self._connections:
            return True
        if len(self._connections) >= _MOST_CONNECTIONS:
            self._connections.clear()
        self._connections.add(key)
        return False
