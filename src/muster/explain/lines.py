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
from itertools import zip_longest
from pathlib import Path

from muster.errors import LogMissing, LogUnreadable

STDIN = Path("-")
# a line of torch with a C++ backtrace reaches 20 KiB; what is longer is no log
LONGEST_LINE = 2**16
_BLOCK = 2**20
# below it a second process costs more than it gives
_SMALLEST_PART = 2**23


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


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a file from a line's begin to a line's end; without `end`, to the file's."""

    path: Path
    begin: int = 0
    end: int | None = None


def parts(path: Path, count: int) -> tuple[Part, ...]:
    """`path` in up to `count` parts of about a size, so that as many processes can read it."""
    if path == STDIN or not path.is_file():
        return (Part(path),)
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.peek(4).startswith(_WHOLE) or size < count * _SMALLEST_PART:
            return (Part(path),)
        begins = [0]
        for number in range(1, count):
            file.seek(number * size // count)
            while (read := file.readline(LONGEST_LINE)) and not read.endswith(b"\n"):
                pass
            if begins[-1] < file.tell() < size:
                begins.append(file.tell())
    return tuple(Part(path, begin, end) for begin, end in zip_longest(begins, begins[1:]))


def read(
    sources: Iterable[Path | Part], *, sift: Sift = enumerate, notes: list[str] | None = None
) -> Iterator[Line]:
    """The Lines of `sources`, one after the other, that `sift` leaves.

    What is odd about a file (cut short, no text) goes to `notes`. Raises LogUnreadable.
    """
    said: list[str] = [] if notes is None else notes
    for source in sources:
        part = source if isinstance(source, Part) else Part(source)
        name = "standard input" if part.path == STDIN else str(part.path)
        try:
            with _opened(part.path) as file:
                first = 1 + _skipped(file, part.begin)
                for raws in _blocks(_bytes(file, part, name, said)):
                    for place, raw in sift(raws):
                        if raw:
                            yield from made(name, first + place, raw)
                    first += len(raws)
        except OSError as error:
            raise LogUnreadable(name, error.strerror or str(error)) from None


def made(file: str, number: int, raw: bytes) -> Iterator[Line]:
    """The Line of `raw`; several where a progress bar has written over itself."""
    text = clean(raw[:LONGEST_LINE].decode("utf-8", "replace"))
    for part in text.split("\r"):
        source, rest = unwrapped(part)
        if rest.strip():
            yield Line(file, number, rest, source)


# ---- bytes to lines ----------------------------------------------------------------------------


def _opened(path: Path) -> BufferedReader:
    return open(sys.stdin.fileno() if path == STDIN else path, "rb", closefd=path != STDIN)


def _skipped(file: BufferedReader, size: int) -> int:
    """Pass over `size` bytes; the number of lines in them."""
    return sum(block.count(b"\n") for block in _read(file, size))


def _blocks(read: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The lines in what was read, some thousand at a time. Of a long one the begin is kept."""
    begun = b""
    for block in read:
        raws = block.split(b"\n")
        raws[0] = begun + raws[0]
        begun = raws.pop()[:LONGEST_LINE]
        if raws:
            yield raws
    if begun:
        yield [begun]


_GZIP = b"\x1f\x8b"
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_WHOLE = (_GZIP, *_UTF16)
# what lies beside logs in a job's folder, and would be read for hours
_NO_LOGS = {
    b"\x7fELF": "a program or a core dump",
    b"PK\x03\x04": "a zip file or a checkpoint",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"\x28\xb5\x2f\xfd": "packed by zstd, to be unpacked first",
    b"\xfd7zX": "packed by xz, to be unpacked first",
    b"BZh": "packed by bzip2, to be unpacked first",
}


def _bytes(file: BufferedReader, part: Part, name: str, notes: list[str]) -> Iterator[bytes]:
    """UTF-8 of whatever `file` holds: text, gzip, UTF-16 as PowerShell writes it."""
    head = b"" if part.begin else file.peek(4)[:4]
    if head.startswith(_GZIP):
        yield from _unzipped(file, name, notes)
    elif head.startswith(_UTF16):
        decoder = codecs.getincrementaldecoder("utf-16")("replace")
        yield from (decoder.decode(block).encode() for block in _read(file, None))
    elif what := next((what for magic, what in _NO_LOGS.items() if head.startswith(magic)), None):
        notes.append(f"{name}: not read, it is {what}")
    else:
        yield from _read(file, None if part.end is None else part.end - part.begin)


def _unzipped(file: BufferedReader, name: str, notes: list[str]) -> Iterator[bytes]:
    try:
        with gzip.open(file, "rb") as unzipped:
            while block := unzipped.read1(_BLOCK):
                yield block
    except (EOFError, gzip.BadGzipFile, zlib.error):
        notes.append(f"{name}: the gzip file is cut short or damaged; read as far as it goes")


def _read(file: BufferedReader, size: int | None) -> Iterator[bytes]:
    # read1 gives what is there: a pipe's line is seen when it comes, not a block later
    left = size
    while left != 0 and (block := file.read1(_BLOCK if left is None else min(left, _BLOCK))):
        left = None if left is None else left - len(block)
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
