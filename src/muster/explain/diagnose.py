"""Events to Diagnoses by the catalogue: the root before what follows from it.

One pass, and memory that grows with faults and files only. Lines are held against the few patterns
that share a word with them, never against all.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from muster import switches
from muster.explain import catalogue
from muster.explain.catalogue import START, Catalogue, Fault, Level, Logged, Pattern, Sure
from muster.explain.events import Event, Field, Kind, Severity, What
from muster.explain.mask import masked
from muster.explain.picture import Picture, Ranks, drawn
from muster.explain.signs import DERIVED, Shown, Signs
from muster.explain.sketch import Process, ProcessId, Sketch
from muster.finding import Finding
from muster.finding import Severity as Verdict

# a traceback, and a retry, so many lines before the end of a file was its last word
_LAST_WORDS = 40
_LAST_RETRY = 400
# a traceback has no more lines
_LONGEST = 40
_MOST_UNEXPLAINED = 3
# characters of a line
_LONGEST_SHOWN = 1000
_MOST_FILES = 10_000
_MOST_RANKS = 200_000

NOT_KNOWN = Fault(
    id="not-known",
    class_="not known",
    title="the job failed, and the cause is not known",
    unnamed={},
    level=Level.SYMPTOM,
    severity=Verdict.ERROR,
    sure=Sure.POSSIBLE,
    see=(),
    derived="",
    see_also=(),
    not_see=(),
    unless=(),
    retried=False,
    versions="",
    tells_more=(),
    cause="no fault of the catalogue fits; these are the first lines that tell of an error",
    remaining=(),
    remedy="read on from the first of them, in the logs of all ranks; with NCCL in it run again"
    f" with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS={switches.SUBSYSTEMS}",
    decide="./invokew bisect -- COMMAND finds the layer that breaks",
    link="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
    look_alikes=(),
)

# NCCL warns of much that does no harm
_NOT_KNOWN_WARNING = replace(
    NOT_KNOWN, severity=Verdict.WARNING, title="NCCL warned of what the catalogue does not know"
)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A fault that this log shows. `event` is the first line of it, None where it took them all.

    `count` lines show it, of `ranks`. `followed_by` are the faults that are but its consequences,
    with how many lines each had. `unexplained` are error lines that fit no fault.
    """

    fault: Fault
    title: str
    cause: str
    remedy: str
    decide: str
    event: Event | None
    count: int
    ranks: Ranks
    followed_by: tuple[tuple[str, int], ...]
    unexplained: tuple[Event, ...]

    def finding(self) -> Finding:
        fault = self.fault
        told = [self.cause]
        if fault.remaining:
            told.append(f"the log cannot tell which: {'; '.join(fault.remaining)}")
        elif fault.sure is not Sure.CERTAIN:
            told.append(f"({fault.sure})")
        if self.followed_by:
            counted = ", ".join(f"{name} ({count} lines)" for name, count in self.followed_by)
            told.append(f"what only follows from it here: {counted}")
        remedy = [self.remedy]
        if self.decide:
            remedy.append(f"to decide: {self.decide}")
        return Finding(
            severity=fault.severity,
            what=f"{self.title} [{fault.id}]",
            where=_where(self.event),
            evidence=self.evidence,
            cause="\n".join(told),
            remedy="\n".join([*remedy, fault.link]),
        )

    @property
    def evidence(self) -> str:
        if self.unexplained:
            return "\n".join(_shown(event.line.text) for event in self.unexplained)
        if self.event is None:
            return "the log as a whole"
        more = [f"{self.count} lines"] if self.count > 1 else []
        more += [f"ranks {self.ranks}"] if len(self.ranks) > 1 else []
        return _shown(self.event.line.text) + (f"  ({', '.join(more)})" if more else "")

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.fault.id,
            "class": self.fault.class_,
            "sure": str(self.fault.sure),
            "remaining": list(self.fault.remaining),
            "link": self.fault.link,
            "count": self.count,
            "ranks": str(self.ranks),
            "followed_by": dict(self.followed_by),
            **self.finding().to_dict(),
        }


def _shown(text: str) -> str:
    whole = masked(text)
    return whole if len(whole) <= _LONGEST_SHOWN else f"{whole[:_LONGEST_SHOWN]} ..."


def _where(event: Event | None) -> str:
    return f"{event.line.file}:{event.line.number}" if event else "log"


def diagnose(events: Iterable[Event]) -> tuple[Diagnosis, ...]:
    """Name what went wrong, the root first; empty where nothing did."""
    sketch, examiner = Sketch(), Examiner()
    for event in events:
        sketch.add(event)
        examiner.add(event)
    examiner.name_ranks(sketch.processes)
    return examiner.diagnoses(drawn(sketch))


# ---- lines to patterns -------------------------------------------------------------------------


class _Index:
    """Which of `patterns` a line can fit: by its first characters, or by a word in it."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        self._starts: dict[str, list[Pattern]] = defaultdict(list)
        self._words: dict[str, list[Pattern]] = defaultdict(list)
        self._always: list[Pattern] = []
        self._known: frozenset[str] = frozenset()
        for pattern in patterns:
            if pattern.starts:
                self._starts[pattern.pieces[0][:START]].append(pattern)
            elif (word := pattern.keyword) is not None:
                self._words[word].append(pattern)
            else:
                self._always.append(pattern)
        self._known = frozenset(self._words)

    def fits(self, message: str) -> list[tuple[Pattern, dict[str, str]]]:
        candidates = list(self._starts.get(message[:START], ()))
        if self._known:
            for word in self._known.intersection(message.split()):
                candidates += self._words[word]
        candidates += self._always
        if not candidates:
            return []
        found = ((pattern, pattern.match(message)) for pattern in candidates)
        return [(pattern, fields) for pattern, fields in found if fields is not None]


@dataclass(frozen=True)
class _Book:
    """The catalogue with its indexes. `see` has the faults that a pattern shows."""

    catalogue: Catalogue
    see: dict[Pattern, tuple[str, ...]]
    beside: frozenset[Pattern]
    not_see: dict[str, frozenset[Pattern]]
    gave_up: frozenset[Pattern]
    indexes: dict[Logged, _Index]


@cache
def _book() -> _Book:
    known = catalogue.read()
    see: dict[Pattern, tuple[str, ...]] = {}
    beside: set[Pattern] = set()
    for fault in known.faults:
        for pattern in fault.see:
            see[pattern] = (*see.get(pattern, ()), fault.id)
        beside.update((*fault.see_also, *fault.unless))
    not_see = {fault.id: frozenset(fault.not_see) for fault in known.faults}
    unsaid = frozenset().union(*not_see.values())
    every = dict.fromkeys((*see, *beside, *unsaid, *known.gave_up, *known.harmless))
    by = {logged: [p for p in every if p.logged is logged] for logged in Logged}
    indexes = {
        Logged.INFO: _Index(by[Logged.INFO]),
        Logged.WARN: _Index(by[Logged.WARN]),
        # torch repeats NCCL's last warning without its header
        Logged.TEXT: _Index([*by[Logged.TEXT], *by[Logged.WARN]]),
    }
    return _Book(
        catalogue=known,
        see=see,
        beside=frozenset(beside),
        not_see=not_see,
        gave_up=frozenset(known.gave_up),
        indexes=indexes,
    )


# ---- one pass ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sight:
    """Where a fault was seen: `fields` are of the first line, `files` hold the last in each.

    `processes` said so without a rank: their logs may have named it before or elsewhere.
    """

    event: Event
    fields: dict[str, str]
    count: int = 0
    ranks: set[int] = field(default_factory=set)
    processes: set[ProcessId] = field(default_factory=set)
    files: dict[str, int] = field(default_factory=dict)

    def join(self, later: "_Sight") -> None:
        self.fields = later.fields | self.fields
        self.count += later.count
        self.ranks |= later.ranks
        self.processes |= later.processes
        self.files |= later.files


@dataclass(slots=True)
class _File:
    """Lines of a file: the last, where a connection was last given up, where all was well, and
    where Python last said that it ignores the exception that follows.
    """

    last: int = 0
    ignored: int = -_LONGEST
    gave_up: int = 0
    well: int = 0

    def join(self, later: "_File") -> None:
        self.last = max(self.last, later.last)
        self.gave_up = max(self.gave_up, later.gave_up)
        self.well = max(self.well, later.well)
        self.ignored = max(self.ignored, later.ignored)


class Examiner:
    """What is known so far. Those of parts of a log can be joined, in the order of the parts."""

    def __init__(self) -> None:
        self.sights: dict[str, _Sight] = {}
        self.beside: set[Pattern] = set()
        self.files: dict[str, _File] = {}
        self.signs = Signs()
        self.unexplained: list[Event] = []
        # the first and the last: either may be what the job ended with
        self.raised: list[Event] = []
        # exceptions that other ranks' failures raise; told of where there is nothing else
        self.passed_on: list[Event] = []
        # whether a line was an error, and whether torchrun says that it was not the first to leave
        self.failed = False
        self.parted = False

    def add(self, event: Event) -> None:
        """Take in what `event` says."""
        self.signs.add(event)
        file = self._file(event)
        file.last = event.line.number
        watched = self.sights or self.raised or not file.well
        if event.what in _ALL_IS_WELL or (watched and _trains(event)):
            file.well = event.line.number
        self.failed = self.failed or event.severity is Severity.ERROR
        self.parted = self.parted or (event.kind is Kind.TORCHRUN and _PARTED in event.message)
        if event.kind is Kind.NCCL:
            info = event.severity is Severity.INFO
            index = _book().indexes[Logged.INFO if info else Logged.WARN]
        else:
            index = _book().indexes[Logged.TEXT]
        fits = index.fits(event.message)
        if fits:
            self._seen(event, file, fits)
        elif event.severity is not Severity.INFO:
            self._not_explained(event, file)
        elif _IGNORED in event.message:
            file.ignored = event.line.number

    def _file(self, event: Event) -> _File:
        name = event.line.file
        if name not in self.files and len(self.files) >= _MOST_FILES:
            name = next(reversed(self.files))
        return self.files.setdefault(name, _File())

    def _seen(self, event: Event, file: _File, fits: list[tuple[Pattern, dict[str, str]]]) -> None:
        book = _book()
        hit = set[str]()
        patterns = {pattern for pattern, _ in fits}
        for pattern, fields in fits:
            if pattern in book.gave_up:
                file.gave_up = event.line.number
            if pattern in book.beside:
                self.beside.add(pattern)
            for fault_id in book.see.get(pattern, ()):
                if not book.not_see[fault_id].isdisjoint(patterns):
                    continue
                sight = self.sights.get(fault_id)
                if sight is None:
                    sight = self.sights[fault_id] = _Sight(event, fields)
                elif fields.keys() - sight.fields.keys():
                    sight.fields = fields | sight.fields
                hit.add(fault_id)
        for fault_id in hit:
            self._count(self.sights[fault_id], event)

    def _count(self, sight: _Sight, event: Event) -> None:
        sight.count += 1
        if event.rank is not None and len(sight.ranks) < _MOST_RANKS:
            sight.ranks.add(event.rank)
        elif event.pid is not None and len(sight.processes) < _MOST_RANKS:
            sight.processes.add(ProcessId(event.host or "", event.pid))
        if len(sight.files) < _MOST_FILES:
            sight.files[event.line.file] = event.line.number

    def _not_explained(self, event: Event, file: _File) -> None:
        if event.what not in _TELLS or _says_little(event):
            return
        if event.kind is Kind.PYTHON_TRACEBACK and 0 <= event.line.number - file.ignored < _LONGEST:
            return
        if event.kind is not Kind.PYTHON_TRACEBACK:
            self.unexplained = [*self.unexplained, event][:_MOST_UNEXPLAINED]
        elif not _of_a_peer(event):
            self.raised = [*self.raised[:1], event]
        elif event.fields.get(Field.ERROR) not in _ENDINGS:
            self.passed_on = [*self.passed_on, event][:_MOST_UNEXPLAINED]

    def join(self, later: "Examiner") -> None:
        """Take in what is known of a later part of the log."""
        for fault_id, sight in later.sights.items():
            if fault_id in self.sights:
                self.sights[fault_id].join(sight)
            else:
                self.sights[fault_id] = sight
        for name, file in later.files.items():
            self.files.setdefault(name, _File()).join(file)
        self.beside |= later.beside
        self.signs.join(later.signs)
        self.unexplained = [*self.unexplained, *later.unexplained][:_MOST_UNEXPLAINED]
        self.passed_on = [*self.passed_on, *later.passed_on][:_MOST_UNEXPLAINED]
        raised = [*self.raised, *later.raised]
        self.raised = [*raised[:1], *raised[1:][-1:]]
        self.failed = self.failed or later.failed
        self.parted = self.parted or later.parted

    def name_ranks(self, processes: Mapping[ProcessId, Process]) -> None:
        """Find the ranks of processes in whose lines there was none."""
        for sight in self.sights.values():
            known = (processes[name].rank for name in sight.processes & processes.keys())
            sight.ranks.update(rank for rank in known if rank is not None)

    # ---- what it comes to ----------------------------------------------------------------------

    def diagnoses(self, picture: Picture) -> tuple[Diagnosis, ...]:
        """Name what went wrong, the root first, then what is only worth a look."""
        found = self._found(picture)
        silenced = {other for fault, _ in found for other in fault.tells_more}
        found = [(fault, sight) for fault, sight in found if fault.id not in silenced]
        errors = [pair for pair in found if pair[0].severity is Verdict.ERROR]
        warnings = [pair for pair in found if pair[0].severity is Verdict.WARNING]
        told = self._errors(errors)
        return (*told, *(_diagnosis(fault, sight) for fault, sight in warnings))

    def _errors(self, found: list[tuple[Fault, _Sight]]) -> list[Diagnosis]:
        found = [(fault, sight) for fault, sight in found if not self._parted_well(fault, sight)]
        lasting = [(fault, sight) for fault, sight in found if not self._survived(sight)]
        # where all the rest may follow from it, it was not survived after all
        if not lasting or any(fault.level is Level.ROOT for fault, _ in lasting):
            found = lasting
        kept = _roots(found)
        levels = {fault.level for fault, _ in kept}
        mute = all(fault.id in _MUTE for fault, _ in kept)
        passed_on = list(filter(self._ended_with, self.passed_on)) if mute else []
        unknown = [
            event
            for event in self.unexplained
            if event.kind is Kind.NCCL or self._ended_with(event)
        ] or passed_on
        told: list[Diagnosis] = []
        if unknown and not levels & {Level.ROOT, Level.MAY_FOLLOW}:
            failed = bool(found or self.signs.ended or passed_on)
            told.append(_not_known(tuple(unknown), failed=failed))
            # what only follows says nothing beside the first lines
            kept = [] if mute or Level.CONSEQUENCE in levels else kept
        told += [_diagnosis(fault, sight) for fault, sight in kept]
        chosen = {fault.id for fault, _ in kept}
        followed = tuple((f.id, sight.count) for f, sight in found if f.id not in chosen)
        return [replace(told[0], followed_by=followed), *told[1:]] if told else []

    def _survived(self, sight: _Sight) -> bool:
        """Whether it is an exception after which the job went on training for long."""
        if self.signs.ended or sight.event.severity is not Severity.ERROR:
            return False
        files = ((self.files.get(name, _File()), at) for name, at in sight.files.items())
        went_on = all(file.well > at and file.last - at > _LAST_RETRY for file, at in files)
        return sight.event.kind in _EXCEPTIONS and bool(sight.files) and went_on

    def _parted_well(self, fault: Fault, sight: _Sight) -> bool:
        """Whether torch only warns, at the end of a job that was well, that a rank left first."""
        warns = sight.event.kind is Kind.C10D and sight.event.severity is Severity.WARN
        well = any(file.well for file in self.files.values()) or (self.parted and not self.failed)
        return warns and well and fault.level is Level.CONSEQUENCE and not self.signs.ended

    def _found(self, picture: Picture) -> list[tuple[Fault, _Sight]]:
        """Every fault that this log shows, in the order in which they came up."""
        found = []
        for fault in _book().catalogue.faults:
            sight = self._sight(fault, picture)
            if sight is not None and self._stands(fault):
                found.append((fault, sight))
        order = {name: place for place, name in enumerate(self.files)}
        most = len(order)
        return sorted(
            found,
            key=lambda pair: (
                order.get(pair[1].event.line.file, most),
                pair[1].event.line.number,
            ),
        )

    def _sight(self, fault: Fault, picture: Picture) -> _Sight | None:
        sight = self.sights.get(fault.id)
        if sight is not None and not (fault.retried and self._came_right(sight)):
            return sight
        if fault.derived == _RANK_RAISED:
            return self._rank_raised()
        if fault.derived and (shown := DERIVED[fault.derived](self.signs, picture)):
            return self._of_shown(shown)
        return None

    def _of_shown(self, shown: Shown) -> _Sight | None:
        ranks = {rank for first, last in shown.ranks.runs for rank in range(first, last + 1)}
        if shown.event is None:
            return None
        if shown.event.rank is not None and not ranks:
            ranks.add(shown.event.rank)
        return _Sight(shown.event, dict(shown.fields), 1, ranks)

    def _stands(self, fault: Fault) -> bool:
        versions = self.signs.versions
        if fault.versions and versions and not any(map(fault.stands_for, versions)):
            return False
        if not self.beside.isdisjoint(fault.unless):
            return False
        return not fault.see_also or not self.beside.isdisjoint(fault.see_also)

    def _came_right(self, sight: _Sight) -> bool:
        """Whether each file in which it was retried goes on well."""
        return all(
            self._went_on(self.files.get(name, _File()), at) for name, at in sight.files.items()
        )

    @staticmethod
    def _went_on(file: _File, last: int) -> bool:
        if file.well > last:
            return True
        return file.gave_up < last and file.last - last > _LAST_RETRY

    def _rank_raised(self) -> _Sight | None:
        """Return the first exception of the program's own, where the job ended with it."""
        raised = list(filter(self._ended_with, self.raised))
        for event in [event for event in raised if not self._trained_on(event)] or raised:
            ranks = set() if event.rank is None else {event.rank}
            return _Sight(event, {"error": event.message.strip()[:200]}, 1, ranks)
        return None

    def _trained_on(self, event: Event) -> bool:
        well = self.files.get(event.line.file, _File()).well
        return well - event.line.number > _LAST_WORDS

    def _ended_with(self, event: Event) -> bool:
        """Whether the job ended with what `event` says, rather than that it went on."""
        if event.fields.get(Field.ERROR) == "DistBackendError":  # nobody goes on after it
            return True
        last = self.files.get(event.line.file, _File()).last
        return bool(self.signs.ended) or last - event.line.number <= _LAST_WORDS


_RANK_RAISED = "rank raised"
# the agent of the first node takes the store away with it
_PARTED = "has failed to shutdown the rendezvous"
_ALL_IS_WELL = frozenset(
    {What.INIT_COMPLETE, What.CONNECTED, What.BANDWIDTH, What.AVERAGE_BANDWIDTH}
)
_TRAINING = re.compile(
    r"(?i:\b(?:step|epoch|loss|iter|iteration)\b)|^\[Gloo\] Rank \d{1,7} is connected"
)
_IGNORED = "Exception ignored in"  # ... a destructor, as a process ends
# a launcher that says only that a rank ended
_MUTE = frozenset({"child-failed", "srun-task-failed"})
_WORKER_ENDED = re.compile(r"killed|exited|[Ee]rror|timed out")
_EXCEPTIONS = frozenset({Kind.PYTHON_TRACEBACK, Kind.CUDA})
_TELLS = frozenset({What.TEXT, What.CLIENTS_JOINED})
# exceptions that say that another rank failed, or that pass on a failure
_PASSED_ON = frozenset(
    {
        *(
            "DistBackendError",
            "DistNetworkError",
            "DistStoreError",
            "DistError",
            "ChildFailedError",
        ),
        *(
            "RendezvousError",
            "RendezvousClosedError",
            "RendezvousTimeoutError",
            "RendezvousStateError",
        ),
        *("RendezvousConnectionError", "RendezvousGracefulExitError", "SignalException"),
        *("KeyboardInterrupt", "SystemExit", "BrokenPipeError", "ConnectionResetError"),
    }
)
_ENDINGS = frozenset({"ChildFailedError", "SignalException", "KeyboardInterrupt", "SystemExit"})
_OF_A_PEER = ("NCCL", "ProcessGroup", "Socket", "gloo", "Connection", "connectFullMesh", "TCPStore")


def _trains(event: Event) -> bool:
    """Whether it is a training loop that speaks, or gloo that is connected: all ranks have met."""
    if event.kind is not Kind.OTHER or event.severity is not Severity.INFO:
        return False
    return _TRAINING.search(event.message[:200]) is not None


def _of_a_peer(event: Event) -> bool:
    if event.fields.get(Field.ERROR, "") in _PASSED_ON:
        return True
    return any(word in event.message for word in _OF_A_PEER)


def _says_little(event: Event) -> bool:
    """Whether a loud line tells of no failure, or only that there was one."""
    if event.kind is Kind.NCCL:
        return False
    if event.severity is Severity.WARN or event.kind is Kind.OTHER:
        return True
    if event.kind is Kind.DATALOADER and not _WORKER_ENDED.search(event.message):
        return True
    return event.message.startswith("failed (exitcode: ")


def _roots(found: list[tuple[Fault, _Sight]]) -> list[tuple[Fault, _Sight]]:
    """Those that follow from no other of `found`, which is in the order of the log: all sure roots,
    or else the surest of the rest.
    """
    roots = [pair for pair in found if pair[0].level is Level.ROOT]
    if roots:
        sure = [pair for pair in roots if pair[0].sure is not Sure.POSSIBLE]
        return sure or roots
    for level in (Level.MAY_FOLLOW, Level.SYMPTOM, Level.CONSEQUENCE):
        same = [pair for pair in found if pair[0].level is level]
        if same:
            return [min(same, key=lambda pair: _SURENESS[pair[0].sure])]
    return []


_SURENESS = {Sure.CERTAIN: 0, Sure.LIKELY: 1, Sure.POSSIBLE: 2}


def _diagnosis(fault: Fault, sight: _Sight) -> Diagnosis:
    gaps = {**fault.unnamed, **{name: _shown(text) for name, text in sight.fields.items()}}
    return Diagnosis(
        fault=fault,
        title=fault.title.format_map(gaps),
        cause=fault.cause.format_map(gaps),
        remedy=fault.remedy.format_map(gaps),
        decide=fault.decide.format_map(gaps),
        event=sight.event,
        count=sight.count,
        ranks=Ranks.of(sight.ranks),
        followed_by=(),
        unexplained=(),
    )


def _not_known(events: tuple[Event, ...], *, failed: bool) -> Diagnosis:
    loud = failed or any(event.severity is Severity.ERROR for event in events)
    fault = NOT_KNOWN if loud else _NOT_KNOWN_WARNING
    return replace(_diagnosis(fault, _Sight(events[0], {}, len(events))), unexplained=events)
