"""Lines of logs that are still being written, as `tail -F` gives them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from muster.errors import LogUnreadable
from muster.explain.lines import LONGEST_LINE, STDIN, Line, Sift, made, read

_BLOCK = 2**20


@dataclass(slots=True)
class _Growing:
    path: Path
    file: BufferedReader
    number: int = 0
    begun: bytes = b""

    def lines(self, sift: Sift) -> Iterator[Line]:
        """What has come since the last time; the begin of a line waits for its end."""
        if self.path.stat().st_size < self.file.tell():
            # written anew, by a restarted job or a log's rotation
            self.file.seek(0)
            self.number, self.begun = 0, b""
        while block := self.file.read1(_BLOCK):
            raws = block.split(b"\n")
            raws[0] = self.begun + raws[0]
            self.begun = raws.pop()[:LONGEST_LINE]
            if raws:
                for place, raw in sift(raws):
                    yield from made(str(self.path), self.number + 1 + place, raw)
                self.number += len(raws)


def follow(
    paths: Sequence[Path], wait: Callable[[], bool], *, sift: Sift = enumerate
) -> Iterator[Line]:
    """The Lines of `paths`, and those that are written to them as long as `wait` says to go on.

    `wait` is called when there is nothing new. Standard input ends by itself. What is packed can
    not grow, and is not unpacked here. Raises LogUnreadable.
    """
    if list(paths) == [STDIN]:
        yield from read(paths, sift=sift)
        return
    with ExitStack() as stack:
        growing = [_opened(stack, path) for path in paths]
        while True:
            for log in growing:
                yield from log.lines(sift)
            if not wait():
                return


def _opened(stack: ExitStack, path: Path) -> _Growing:
    try:
        return _Growing(path, stack.enter_context(path.open("rb")))
    except OSError as error:
        raise LogUnreadable(str(path), error.strerror or str(error)) from None
