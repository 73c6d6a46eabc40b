"""What is to be said of logs, one small file or many large ones: the picture and the causes.

Large logs are read by two processes, each a stretch of them; what the stretches show is joined.
"""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from muster import switches
from muster.errors import LogUnreadable
from muster.explain.catalogue import Level
from muster.explain.diagnose import Diagnosis, Examiner
from muster.explain.events import Event
from muster.explain.lines import ForEach, Line, Part, clean, made, parts, read
from muster.explain.picture import Picture, drawn
from muster.explain.reader import events
from muster.explain.sieve import Sieve
from muster.explain.sketch import Sketch
from muster.finding import Finding

# more cores than two are rarely free where a log lies, and each takes the memory of one reader
_MOST_PROCESSES = 2
# bytes that are read in less time than it takes to start a second process and to join the two
_SMALL = 2**25
# bytes of a stretch at most: what a process holds depends on it, and not on the size of the log
_SHARE = 2**26
# stretches for each process at least: where jobs start there is more to read than where they train
_FINE = 4
# what Ctrl-C, a closed terminal and a supervisor send
_ENDING = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
# what NCCL's text comes to, unpacked
_PACKED = 12
_NO_NCCL = (
    "NCCL says nothing in it; of a job on GPUs more is known with NCCL_DEBUG=INFO and"
    f" NCCL_DEBUG_SUBSYS={switches.SUBSYSTEMS}"
)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """`notes` tell what could not be read of the logs, `lines` is how many there were."""

    picture: Picture
    diagnoses: tuple[Diagnosis, ...]
    notes: tuple[str, ...]
    lines: int

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(each.finding() for each in self.diagnoses)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "command": "explain",
            "lines": self.lines,
            "notes": list(self.notes),
            "picture": self.picture.to_dict(),
            "findings": [each.to_dict() for each in self.diagnoses],
        }


@dataclass
class Study:
    """What is known of a log so far. Those of its parts can be joined, in the order of the parts.

    `unread` says why of the files that could not be read.
    """

    sketch: Sketch = field(default_factory=Sketch)
    examiner: Examiner = field(default_factory=Examiner)
    notes: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)

    def take(self, lines: Iterable[Line]) -> None:
        for event in events(lines):
            self.add(event)

    def add(self, event: Event) -> None:
        self.sketch.add(event)
        self.examiner.add(event)

    def join(self, later: "Study") -> None:
        self.sketch.join(later.sketch)
        self.examiner.join(later.examiner)
        self.notes += later.notes
        self.unread |= later.unread

    def explanation(self) -> Explanation:
        """What it comes to; more may be taken in afterwards."""
        self.examiner.name_ranks(self.sketch.processes)
        picture = drawn(self.sketch)
        diagnoses = self.examiner.diagnoses(picture)
        notes = [*self.notes]
        notes += [f"{file}: not read, {why}" for file, why in self.unread.items()]
        notes += [] if self.sketch.processes or diagnoses else [_NO_NCCL]
        return Explanation(
            picture=picture,
            diagnoses=diagnoses,
            notes=tuple(map(clean, notes)),
            lines=sum(file.last for file in self.examiner.files.values()),
        )


def explain(paths: Sequence[Path], *, processes: int | None = None) -> Explanation:
    """Read `paths`, which lines.files() makes of words; what cannot be read is a note.

    `processes` are two where this process may use two cores. Raises LogUnreadable where nothing can
    be read.
    """
    processes = processes or min(_MOST_PROCESSES, _cores())
    every = [Part(path) for path in paths]
    size = sum(map(_size, every))
    small = processes == 1 or size < _SMALL
    share = min(_SHARE, size // (processes * _FINE))
    known = study(every) if small else _shared(paths, processes, share)
    if len(known.unread) == len(paths):
        raise LogUnreadable(*next(iter(known.unread.items())))
    return known.explanation()


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _shared(paths: Sequence[Path], processes: int, share: int) -> Study:
    # forked: each has the modules and the catalogue already
    forked = multiprocessing.get_context("fork")
    joined = Study()
    with _held(), forked.Pool(processes, initializer=_obey) as pool:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        for each in pool.imap(study, _stretches(paths, share, pool.map)):
            joined.join(each)
    return joined


@contextmanager
def _held() -> Iterator[None]:
    """No signal until the readers know how to obey one: before, they would take it as we do."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def of_text(text: str, name: str = "output") -> Explanation:
    """The same of a text that is in no file, such as what a command printed."""
    known = Study()
    raws = enumerate(text.encode("utf-8", "surrogatepass").split(b"\n"), start=1)
    known.take(line for number, raw in raws for line in made(name, number, raw))
    return known.explanation()


def with_cause(finding: Finding, output: str) -> Finding:
    """`finding` with the cause and the remedy that the catalogue has for what a program wrote.

    As it is where the catalogue knows none.
    """
    first = next(iter(of_text(output).diagnoses), None)
    if first is None or first.fault.level not in {Level.ROOT, Level.MAY_FOLLOW}:
        return finding
    known = first.finding()
    return replace(
        finding,
        cause=f"{known.what}\n{known.cause}",
        remedy=f"{known.remedy}\n{finding.remedy}",
    )


def _stretches(paths: Sequence[Path], share: int, each: ForEach) -> list[list[Part]]:
    """The parts of `paths` in their order, in runs of about `share` bytes."""
    runs: list[list[Part]] = []
    room = 0
    for path in paths:
        for part in parts(path, max(1, _size(Part(path)) // share), each=each):
            size = _size(part)
            if not runs or room < size // 2:
                runs.append([])
                room = share
            runs[-1].append(part)
            room -= size
    return runs


def _size(part: Part) -> int:
    """Bytes to read, about."""
    try:
        size = part.path.stat().st_size
    except OSError:
        return 0
    whole = size * _PACKED if part.path.suffix == ".gz" else size
    return (whole if part.end is None else part.end) - part.begin


def _obey() -> None:
    """A reader ends at once and without a word: it holds nothing that must be cleaned up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    # what a log leaves behind has no cycles, and to look for them takes a tenth of the time
    gc.disable()


def study(run: Sequence[Part]) -> Study:
    """What is known after `run`, of which what cannot be read is kept in `unread`."""
    known = Study()
    known.take(_lines(run, known))
    return known


def _lines(run: Sequence[Part], known: Study) -> Iterator[Line]:
    sieve = Sieve()
    for part in run:
        try:
            yield from read([part], sift=sieve.sift, notes=known.notes)
        except LogUnreadable as error:
            known.unread[error.file] = error.why
