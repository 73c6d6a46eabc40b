"""Lines to Events: who speaks, how loud, and what is in it. One pass; memory grows with ranks only.

Reads NCCL 2.16 to 2.30 (nccl.py), torch 2.4 to 2.14 (torchrun.py), nccl-tests, and the errors of
CUDA, of DataLoader and of Python.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from muster.explain import nccl, torchrun
from muster.explain.events import Event, Field, Kind, Severity, What
from muster.explain.lines import Line

# more ranks than any job has; a log of hostile text ends at the same memory
_MOST_KNOWN = 200_000


def events(lines: Iterable[Line]) -> Iterator[Event]:
    """Every line as an Event; a line into which several ranks wrote at once as several."""
    reader = _Reader()
    for line in lines:
        yield from reader.read(line)


class _Reader:
    def __init__(self) -> None:
        # the rank of a process, and the size of the communicator that it has it in
        self._ranks: dict[tuple[str | None, int | None], tuple[int, int]] = {}
        self._tables: dict[tuple[str, str], torchrun.Table] = {}

    def read(self, line: Line) -> Iterator[Event]:
        speaks = False
        if "NCCL " in line.text:
            for said in nccl.said(line.text):
                speaks = True
                yield self._nccl(line, said)
        if not speaks:
            yield self._tabled(_other(line))

    def _nccl(self, line: Line, said: nccl.Said) -> Event:
        found = nccl.facts(said.message)
        rank = found.rank
        if said.host is not None:
            process = (said.host, said.pid)
            if rank is not None and found.what in _NAMES_RANK:
                self._learn(process, rank, int(found.fields[Field.NRANKS]))
            if rank is None and process in self._ranks:
                rank = self._ranks[process][0]
        return Event(
            line=line,
            kind=Kind.NCCL,
            severity=said.severity,
            message=said.message,
            what=found.what,
            host=said.host,
            pid=said.pid,
            device=said.device,
            rank=_rank_of(line) if rank is None else rank,
            fields={**said.fields, **found.fields},
        )

    def _learn(self, process: tuple[str | None, int | None], rank: int, nranks: int) -> None:
        if len(self._ranks) >= _MOST_KNOWN:
            self._ranks.clear()
        if nranks >= self._ranks.get(process, (0, 0))[1]:
            self._ranks[process] = (rank, nranks)

    def _tabled(self, event: Event) -> Event:
        """`event`, with what the rows before it say where it ends a rank of torchrun's table."""
        place = (event.line.file, event.line.source)
        table = self._tables.get(place)
        if table is None:
            if not torchrun.tells_of_failure(event.message):
                return event
            if len(self._tables) >= _MOST_KNOWN:
                self._tables.clear()
            table = self._tables[place] = torchrun.Table()
        if table.ended_by(event.message):
            del self._tables[place]
        last = table.take(event.message)
        if torchrun.tells_of_failure(event.message):
            event = replace(event, kind=Kind.TORCHRUN)
        if not last:
            return event
        return replace(
            event,
            severity=Severity.ERROR,
            what=What.FAILURE,
            host=table.host,
            rank=table.rank,
            pid=table.pid,
            fields=dict(table.fields),
        )


_NAMES_RANK = frozenset({What.INIT_START, What.INIT_COMPLETE, What.TOPOLOGY})

# ---- all but NCCL ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Form:
    """`mark` is in every such line; None for a `kind` or `severity` that the line's head says."""

    mark: str
    pattern: re.Pattern[str]
    kind: Kind | None = None
    severity: Severity | None = None
    what: What = What.TEXT


_BANNER = r"^NCCL version (?P<version>\d[\w.+-]{0,60})"
_STATUS = (
    r"(?:\[PG (?:ID )?(?P<group>\d{1,6}).{0,300}?)?"
    r"last enqueued (?:NCCL )?work: (?P<last_enqueued>-?\d{1,18}),"
    r" last completed (?:NCCL )?work: (?P<last_completed>-?\d{1,18})"
)
_TIMEOUT = (
    r"SeqNum=(?P<sequence>\d{1,18}), OpType=(?P<operation>\w{1,60})"
    r"(?:, NumelIn=(?P<numel_in>\d{1,18}), NumelOut=(?P<numel_out>\d{1,18}))?"
)
# size count type redop root, then time algbw busbw wrong, out of place and in place
_BANDWIDTH = (
    r"^ *(?P<size>\d{1,18}) +\d{1,18} +[a-z]\w{1,20} +[a-z]\w{1,20} +-?\d{1,7}"
    r" +[\d.]{1,20} +(?P<algbw>[\d.]{1,20}) +(?P<busbw>[\d.]{1,20}) +(?P<wrong>\d{1,18}|N/A)"
)
_DEVICE = (
    r"^# +Rank +(?P<rank>\d{1,7}) (?:Group +\d{1,5} )?Pid +(?P<pid>\d{1,10})"
    r" on +(?P<host>[\w.-]{1,255}) device +(?P<device>\d{1,5}) \[(?P<bus_id>[\w:.]{1,20})\]"
)
_TESTS = r"^# (?:nThread|nccl-tests|Using devices|Out of bounds|Reducing)|^ *\S{1,255}: Test "
_CUDA = (
    r"CUDA (?:error|failure|out of memory|initialization|driver)|[Cc]uda (?:error|failure)|"
    r"cuda runtime error|cudaError[A-Z]|CUDA kernel errors|CUDA_ERROR_"
)
_FORMS = tuple(
    _Form(mark, re.compile(pattern), kind, severity, what)
    for mark, pattern, kind, severity, what in (
        ("last enqueued", _STATUS, Kind.C10D, Severity.ERROR, What.WATCHDOG_STATUS),
        ("Watchdog caught", _TIMEOUT, Kind.C10D, Severity.ERROR, What.WATCHDOG_TIMEOUT),
        (
            "clients joined",
            r"\b(?P<joined>\d{1,7})/(?P<expected>\d{1,7}) clients joined",
            None,
            Severity.ERROR,
            What.CLIENTS_JOINED,
        ),
        ("NCCL version ", _BANNER, Kind.NCCL, Severity.INFO, What.VERSION),
        ("DataLoader worker", "", Kind.DATALOADER, Severity.ERROR, What.TEXT),
        ("bus error encountered in worker", "", Kind.DATALOADER, Severity.ERROR, What.TEXT),
        (
            "# Avg bus bandwidth",
            r": (?P<busbw>\d{1,9}(?:\.\d{1,9})?)",
            Kind.NCCL_TESTS,
            None,
            What.AVERAGE_BANDWIDTH,
        ),
        ("# ", _DEVICE, Kind.NCCL_TESTS, None, What.RANK_DEVICE),
        ("Test ", r": Test \w{0,10} ?failure ", Kind.NCCL_TESTS, Severity.ERROR, What.TEXT),
        ("# ", _TESTS, Kind.NCCL_TESTS, None, What.TEXT),
        (" ", _BANDWIDTH, Kind.NCCL_TESTS, None, What.BANDWIDTH),
    )
)
_EXCEPTION = re.compile(
    r"^(?:\w{1,80}\.){0,12}"
    r"(?P<error>\w{0,80}(?:Error|Exception|Interrupt|Exit|Timeout))(?=: |:?$)"
)
_WARNING = re.compile(r"\d: (?P<error>\w{0,60}Warning): |^(?:\[?WARN(?:ING)?\b)")
_LOUD = re.compile(
    r"\b(?:ERROR|FATAL|CRITICAL|PANIC)\b|^\s{0,8}(?:[\w./-]{1,80}: )?(?:[Ee]rror|[Ff]atal|panic)\b"
    r"|Segmentation fault|Bus error|core dumped|\bKilled\b|\bAborted\b|terminate called|FAILED"
)


def _other(line: Line) -> Event:
    head = torchrun.head(line.text)
    message = line.text[head.begin :] if head else line.text
    rank = head.rank if head and head.rank is not None else _rank_of(line)
    event = Event(
        line=line,
        kind=head.kind if head else Kind.OTHER,
        severity=head.severity if head else Severity.INFO,
        message=message,
        rank=rank,
        fields=head.fields if head else {},
    )
    event = _raised(event)
    for form in _FORMS:
        if form.mark in message and (match := form.pattern.search(message)):
            return _formed(event, form, match)
    return event


def _formed(event: Event, form: _Form, match: re.Match[str]) -> Event:
    groups = {name: text for name, text in match.groupdict().items() if text is not None}
    rank, pid, device = (groups.pop(name, None) for name in ("rank", "pid", "device"))
    return replace(
        event,
        kind=form.kind or event.kind,
        severity=form.severity or event.severity,
        what=form.what,
        host=groups.pop("host", None),
        rank=event.rank if rank is None else int(rank),
        pid=None if pid is None else int(pid),
        device=None if device is None else int(device),
        fields={**event.fields, **{Field(name): text for name, text in groups.items()}},
    )


def _raised(event: Event) -> Event:
    """`event` as an exception or a warning of Python's, an error of CUDA's, or as it is."""
    kind, severity, fields = event.kind, event.severity, event.fields
    if match := _EXCEPTION.search(event.message):
        kind, severity = Kind.PYTHON_TRACEBACK, Severity.ERROR
        fields = {**fields, Field.ERROR: match["error"]}
    elif match := _WARNING.search(event.message):
        severity = Severity.WARN
        if match["error"]:
            kind, fields = Kind.PYTHON_TRACEBACK, {**fields, Field.ERROR: match["error"]}
    elif _LOUD.search(event.message):
        severity = Severity.ERROR
    if ("CUDA" in event.message or "uda " in event.message) and _SPEAKS_CUDA.search(event.message):
        kind = Kind.CUDA
        severity = Severity.ERROR if severity is Severity.INFO else severity
    if kind is event.kind and severity is event.severity:
        return event
    return replace(event, kind=kind, severity=severity, fields=fields)


_SPEAKS_CUDA = re.compile(_CUDA)
_SOURCE_RANK = re.compile(r"\[rank(\d{1,7})\]|\[[\w.@-]{0,80}\d,(\d{1,7})\]")


def _rank_of(line: Line) -> int | None:
    """Torch writes [rank3], mpirun [1,3]; torchrun's [default3] is a local rank, which is none."""
    if not line.source or not (match := _SOURCE_RANK.search(line.source)):
        return None
    return int(match[1] or match[2])
