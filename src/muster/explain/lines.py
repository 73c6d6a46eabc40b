"""Log files to Lines: of any wrapping, with the prefixes that launchers put before a line removed.

Memory does not grow with a file or with the length of its lines. What a Line holds is safe to show
on a terminal.
"""

import codecs
import glob
import gzip
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from muster.errors import LogMissing, LogUnreadable

STDIN = Path("-")
# a line of torch with a C++ backtrace reaches 20 KiB; what is longer is no log
LONGEST_LINE = 2**16
_BLOCK = 2**20


@dataclass(frozen=True, slots=True)
class Line:
    """`number` counts from 1. `source` is the prefix that was before `text`, without its time:
    "[rank3]", "[default0]", "[pod/train-0/trainer]", "" where there was none.
    """

    file: str
    number: int
    text: str
    source: str = ""


# what of some lines is worth reading, each with its place among them; sieve.py has one
Sift = Callable[[list[bytes]], Iterable[tuple[int, bytes]]]


def files(words: Sequence[str]) -> tuple[Path, ...]:
    """The files that `words` name: files, directories (all below), globs, "-"; standard input for
    none. Raises LogMissing.
    """
    found: dict[Path, None] = {}
    for word in words or ("-",):
        named = _named(word)
        if not named:
            raise LogMissing(word)
        found.update(dict.fromkeys(named))
    return tuple(found)


def _named(word: str) -> list[Path]:
    path = Path(word)
    if path == STDIN:
        return [STDIN]
    if path.is_dir():
        return _below(path)
    if path.exists():
        return [path]
    matches = [Path(match) for match in sorted(glob.glob(word, recursive=True))]  # noqa: PTH207 (it may begin with /)
    return [file for match in matches for file in (_below(match) if match.is_dir() else [match])]


def _below(folder: Path) -> list[Path]:
    # os.walk follows no links to directories, so a link to its own parent ends
    found = (Path(root, name) for root, _, names in os.walk(folder) for name in names)
    return sorted(file for file in found if file.is_file())


def read(
    paths: Sequence[Path], *, sift: Sift = enumerate, notes: list[str] | None = None
) -> Iterator[Line]:
    """The Lines of `paths`, file after file, that `sift` leaves.

    What is odd about a file (cut short, not text) goes to `notes`. Raises LogUnreadable.
    """
    said: list[str] = [] if notes is None else notes
    for path in paths:
        name = "standard input" if path == STDIN else str(path)
        first = 1
        for raws in _blocks(path, name, said):
            for place, raw in sift(raws):
                if raw:
                    yield from _lines(name, first + place, raw)
            first += len(raws)


def _lines(file: str, number: int, raw: bytes) -> Iterator[Line]:
    """One Line, or several where a progress bar has written over itself."""
    text = clean(raw[:LONGEST_LINE].decode("utf-8", "replace"))
    for part in text.split("\r"):
        source, rest = unwrapped(part)
        if rest.strip():
            yield Line(file, number, rest, source)


# ---- bytes to lines ----------------------------------------------------------------------------


def _blocks(path: Path, name: str, notes: list[str]) -> Iterator[list[bytes]]:
    """The lines of a file, some thousand at a time. Of a long one the begin is kept."""
    begun = b""
    for block in _bytes(path, name, notes):
        parts = block.split(b"\n")
        parts[0] = begun + parts[0]
        begun = parts.pop()[:LONGEST_LINE]
        yield parts
    if begun:
        yield [begun]


def _bytes(path: Path, name: str, notes: list[str]) -> Iterator[bytes]:
    place = sys.stdin.fileno() if path == STDIN else path
    try:
        with open(place, "rb", closefd=path != STDIN) as file:
            yield from _decoded(file, name, notes)
    except OSError as error:
        raise LogUnreadable(name, error.strerror or str(error)) from None


def _decoded(file: BufferedReader, name: str, notes: list[str]) -> Iterator[bytes]:
    """UTF-8 of whatever `file` holds: text, gzip, UTF-16 as PowerShell writes it."""
    head = file.peek(4)[:4]
    if head.startswith(b"\x1f\x8b"):
        yield from _unzipped(file, name, notes)
    elif head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        decoder = codecs.getincrementaldecoder("utf-16")("replace")
        yield from (decoder.decode(block).encode() for block in _read(file))
    else:
        yield from _read(file)


def _unzipped(file: BufferedReader, name: str, notes: list[str]) -> Iterator[bytes]:
    try:
        with gzip.open(file, "rb") as unzipped:
            while block := unzipped.read1(_BLOCK):
                yield block
    except (EOFError, gzip.BadGzipFile, zlib.error):
        notes.append(f"{name}: the gzip file is cut short or damaged; read as far as it goes")


def _read(file: BufferedReader) -> Iterator[bytes]:
    # read1 gives what is there: a pipe's line is seen when it comes, not a block later
    while block := file.read1(_BLOCK):
        yield block


# ---- text --------------------------------------------------------------------------------------

_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # colours, cursor
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # titles, links
    r"|\x1b[ -/]*[0-~]?"
)
# what a terminal obeys or hides: C0 but for tab and CR, DEL, C1, and marks that turn text around
_OBEYED = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]"
)


def clean(text: str) -> str:
    """`text` without terminal escapes and other control characters, and without CR at its end."""
    if text.isprintable():
        return text
    return _OBEYED.sub("", _ESCAPES.sub("", text)).rstrip("\r\n")


_TIME = (
    r"\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?"
    r"|\[?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\]?"
    r"|(?:[A-Z][a-z]{2} )?[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?: \d{4})?"
)
_WRAPPING = re.compile(
    rf"\s*(?:(?P<time>(?:{_TIME})(?: std(?:out|err) [FP])?(?=[ \t\[(]|$))[ \t]?"
    r"|(?P<source>"
    r"\[(?:rank|default|trainer|worker|local_rank|role)_?\d+\](?=:)"  # torchrun --tee, torch
    r"|\[[\w.@-]*\d,\d+\](?:<std(?:out|err|diag)>)?(?=:)"  # mpirun --tag-output
    r"|\[pod/[\w./-]+\](?= )"  # kubectl logs --prefix
    r"|\([\w.:-]+(?: [\w.:=-]+,?)*? pid=\d+(?:, [\w.:=-]+)*\)(?= )"  # ray, vllm
    r"|\d{1,6}(?=: )"  # srun -l
    r"|[\w.-]+(?= +\| )"  # docker compose
    r")(?::| +\|)? ?)"
)
_MOST_WRAPPINGS = 5


def unwrapped(text: str) -> tuple[str, str]:
    """The prefixes that launchers put before a line, without times, and the rest of `text`."""
    sources: list[str] = []
    at = 0
    for _ in range(_MOST_WRAPPINGS):
        match = _WRAPPING.match(text, at)
        if match is None or match.end() == at:
            break
        if match["source"]:
            sources.append(match["source"])
        at = match.end()
    return " ".join(sources), text[at:]
