"""The heads of torch's log lines, 2.4 to 2.14, and torchrun's table of the ranks that failed.

https://github.com/pytorch/pytorch: c10/util/Logging.cpp, torch/_logging, and for the table
torch/distributed/elastic/multiprocessing/errors/__init__.py.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from muster.explain.events import Field, Kind, Severity

_LETTERS = {
    "I": Severity.INFO,
    "V": Severity.INFO,
    "D": Severity.INFO,
    "W": Severity.WARN,
    "E": Severity.ERROR,
    "F": Severity.ERROR,
    "C": Severity.ERROR,
}
# as in "[W602 11:17:52.185053341 socket.cpp:767] [c10d] "; 2.3 and older "[W socket.cpp:663] "
_GLOG = re.compile(
    r"\[(?P<level>[IWEFV])(?:\d{3,4} [\d:.]{8,20})? "
    r"(?P<at>[\w./+-]{1,200}\.(?:cpp|hpp|h|cc|cu|cuh):\d{1,6})\] (?:\[c10d\] )?"
)
# as in "W0801 04:55:28.464000 140238513375040 torch/distributed/run.py:778] "
_ELASTIC = re.compile(
    r"(?:^|(?<=[ \]:]))(?P<level>[IWEFVDC])\d{4} [\d:.]{8,20} +\d{1,20} "
    r"(?P<at>[\w./+-]{1,300}\.py:\d{1,6})\] ?"
)
# as in "[INFO] torch.distributed.launcher.api: ", "WARNING:torch.distributed.run:"
_LOGGER = re.compile(
    r"(?:^|(?<= ))\[?(?P<level>DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL)\]?[: -]{1,3}"
    r"(?P<at>torch\.distributed[\w.]{0,100})[: -]{1,3}"
)
_AGENT = re.compile(r"elastic|launch|[./]run\b")
_RANK = re.compile(r"\b[Rr]ank[: ](?P<rank>\d{1,7})\b")
_NAMED_WITHIN = 200


@dataclass(frozen=True, slots=True)
class Head:
    """What stands before a message; `begin` is where that begins."""

    kind: Kind
    severity: Severity
    begin: int
    rank: int | None
    fields: Mapping[Field, str]


def head(text: str) -> Head | None:
    """The head of a line of torch's, None where it has none."""
    if "[" in text and (match := _GLOG.search(text)):
        named = _RANK.search(text, match.end(), match.end() + _NAMED_WITHIN)
        return _head(Kind.C10D, match, int(named["rank"]) if named else None)
    if match := _ELASTIC.search(text) or _LOGGER.search(text):
        torch = Kind.TORCHRUN if _AGENT.search(match["at"]) else Kind.C10D
        return _head(torch if "distributed" in match["at"] else Kind.OTHER, match, None)
    return None


def _head(kind: Kind, match: re.Match[str], rank: int | None) -> Head:
    fields = {Field.LEVEL: match["level"], Field.AT: match["at"]}
    return Head(kind, _LETTERS[match["level"][0]], match.end(), rank, fields)


# ---- the table ---------------------------------------------------------------------------------

_FAILURES = "Failures:"
_ROOT_CAUSE = "Root Cause (first observed failure):"
_ROW = re.compile(r" {0,8}(time|host|rank|exitcode|error_file|traceback) {1,10}: ?(.{0,400})")
_RANKS = re.compile(r"(\d{1,7}) \(local_rank: (\d{1,5})\)")
_EXIT = re.compile(r"(-?\d{1,10}) \(pid: (\d{1,10})\)(?: +\((SIG\w{1,10})\))?")
_SIGNAL = re.compile(r"Signal \d{1,3} \((SIG\w{1,10})\)")


def tells_of_failure(message: str) -> bool:
    """Whether `message` is of a table; one whose head was cut off begins with a row."""
    return message.strip() in {_FAILURES, _ROOT_CAUSE} or _ROW.match(message) is not None


@dataclass(slots=True)
class Table:
    """What the rows so far say of the rank that is being told of."""

    root_cause: bool = False
    host: str | None = None
    rank: int | None = None
    pid: int | None = None
    fields: dict[Field, str] = field(default_factory=dict)

    def take(self, message: str) -> bool:
        """Whether `message` is the last row of a rank, so that all is known of it."""
        text = message.strip()
        if text in {_FAILURES, _ROOT_CAUSE}:
            self.root_cause = text == _ROOT_CAUSE
        if (match := _ROW.match(message)) is None:
            return False
        self._note(match[1], match[2])
        return match[1] == "traceback"

    def ended_by(self, message: str) -> bool:
        return self.root_cause and self.rank is not None and message.startswith("====")

    def _note(self, name: str, value: str) -> None:
        if name == "time":
            self.host = self.rank = self.pid = None
            self.fields = {Field.ROOT_CAUSE: "yes"} if self.root_cause else {}
        elif name == "host":
            self.host = value.strip()
        elif name == "rank" and (ranks := _RANKS.match(value)):
            self.rank = int(ranks[1])
            self.fields[Field.LOCAL_RANK] = ranks[2]
        elif name == "exitcode" and (ending := _EXIT.match(value)):
            self.pid = int(ending[2])
            self.fields[Field.EXIT_CODE] = ending[1]
            self._signal(ending[3])
        elif name == "traceback" and (signal := _SIGNAL.search(value)):
            self._signal(signal[1])

    def _signal(self, name: str | None) -> None:
        if name:
            self.fields[Field.SIGNAL] = name
