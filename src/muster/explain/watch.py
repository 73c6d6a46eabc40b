"""A log that is still being written: each fault is told once, as soon as the log shows it."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from muster.explain.catalogue import Fault, Level
from muster.explain.diagnose import Diagnosis
from muster.explain.events import Event
from muster.explain.explanation import Explanation, Study
from muster.explain.follow import follow
from muster.explain.reader import events
from muster.explain.sieve import Sieve

_PAUSE_S = 0.5
# A job that says nothing for so long waits for something. Before that, ranks that have not met yet
# and a connection that is tried again are no faults.
QUIET_S = 30.0


class Watch:
    """Follows logs and calls `tell` with each Diagnosis."""

    def __init__(self, tell: Callable[[Diagnosis], None]) -> None:
        self._tell = tell
        self._told: set[str] = set()
        self._study = Study()
        self._seen = 0
        self._last_line = time.monotonic()

    def follow(self, paths: Sequence[Path]) -> None:
        """Stay until standard input ends, for files until interrupted. Raises LogUnreadable."""
        for event in events(follow(paths, self._wait, sift=Sieve().sift, notes=self._study.notes)):
            self._take(event)

    def explanation(self) -> Explanation:
        """What all of it comes to, so far."""
        return self._study.explanation()

    def _take(self, event: Event) -> None:
        self._last_line = time.monotonic()
        self._study.add(event)
        seen = len(self._study.examiner.sights)
        if seen > self._seen:
            self._seen = seen
            self._tell_new(_is_sure)

    def _wait(self) -> bool:
        if time.monotonic() - self._last_line > QUIET_S:
            self._last_line = float("inf")
            self._tell_new(lambda _: True)
        time.sleep(_PAUSE_S)
        return True

    def _tell_new(self, is_meant: Callable[[Fault], bool]) -> None:
        for each in self._study.explanation().diagnoses:
            if is_meant(each.fault) and each.title not in self._told:
                self._told.add(each.title)
                self._tell(each)


def _is_sure(fault: Fault) -> bool:
    """Whether a line alone shows it, whatever comes after that line."""
    return bool(fault.see) and not fault.retried and fault.level in {Level.ROOT, Level.MAY_FOLLOW}
