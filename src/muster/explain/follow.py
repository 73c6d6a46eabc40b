"""Lines of logs that are still being written, as `tail -F` gives them."""

import os
import select
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.errors import LogUnreadable
from muster.explain.lines import STDIN, Line, Sift, every, grows, lines_in, made, read, shown, split

_BLOCK = 2**20


@dataclass(slots=True)
class _Tail:
    """Where the reading of a log stands: after line `number`, with the begin of the next."""

    name: str
    number: int = 0
    begun: bytes = b""

    def lines(self, block: bytes, sift: Sift) -> Iterator[Line]:
        """The Lines that end in `block`; the begin of one waits for its end."""
        whole, self.begun = split(self.begun, block)
        if whole is not None:
            for place, raw in sift(whole):
                yield from made(self.name, self.number + 1 + place, raw)
            self.number += lines_in(whole)

    def rest(self) -> Iterator[Line]:
        """The line whose end never came."""
        yield from made(self.name, self.number + 1, self.begun)
        self.begun = b""


@dataclass(slots=True)
class _Growing:
    """A log as far as it was read. It is open only while there is more: a job has thousands."""

    path: Path
    tail: _Tail
    file: tuple[int, int] = (0, 0)
    read: int = 0

    def lines(self, sift: Sift) -> Iterator[Line]:
        """What has come since the last time."""
        try:
            status = self.path.stat()
            file = (status.st_dev, status.st_ino)
            if file != self.file or status.st_size < self.read:
                # written anew, by a restarted job or a log's rotation
                yield from self.tail.rest()
                self.file, self.read, self.tail.number = file, 0, 0
            if status.st_size > self.read:
                yield from self._more(sift)
        except OSError:  # moved away; another may come in its place
            return

    def _more(self, sift: Sift) -> Iterator[Line]:
        with self.path.open("rb") as file:
            file.seek(self.read)
            while block := file.read1(_BLOCK):
                self.read += len(block)
                yield from self.tail.lines(block, sift)


@dataclass(slots=True)
class _Piped:
    """A pipe on standard input, such as that of kubectl logs --follow."""

    tail: _Tail
    ended: bool = False

    def lines(self, sift: Sift) -> Iterator[Line]:
        """What has come since the last time; at its end also a line that has none."""
        source = sys.stdin.fileno()
        while not self.ended and select.select([source], [], [], 0)[0]:
            block = os.read(source, _BLOCK)
            if not block:
                self.ended = True
                yield from self.tail.rest()
                return
            yield from self.tail.lines(block, sift)


def follow(
    paths: Sequence[Path],
    wait: Callable[[], bool],
    *,
    sift: Sift = every,
    notes: list[str] | None = None,
) -> Iterator[Line]:
    """The Lines of `paths`, and those that are written to them as long as `wait` says to go on.

    `wait` is called when there is nothing new. A pipe on standard input ends by itself. What cannot
    grow (gzip, UTF-16) is read once, before the rest. Raises LogUnreadable.
    """
    growing: list[_Growing | _Piped] = []
    for path in paths:
        if path == STDIN and _is_pipe():
            growing.append(_Piped(_Tail(shown(path))))
        elif _grows(path):
            growing.append(_Growing(path, _Tail(shown(path))))
        else:
            yield from read([path], sift=sift, notes=notes)
    while growing:
        for log in growing:
            yield from log.lines(sift)
        growing = [log for log in growing if not (isinstance(log, _Piped) and log.ended)]
        if not (growing and wait()):
            break
    for log in growing:
        if isinstance(log, _Growing):
            yield from log.tail.rest()


def _is_pipe() -> bool:
    return sys.stdin is not None and not stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode)


def _grows(path: Path) -> bool:
    try:
        return path != STDIN and grows(path)
    except OSError as error:
        raise LogUnreadable(shown(path), error.strerror or str(error)) from None
