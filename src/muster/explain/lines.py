"""Log files to Lines: of any wrapping, with the prefixes that launchers put before a line removed.

Memory does not grow with a file or with the length of its lines. What a Line holds is safe to show
on a terminal.
"""

import codecs
import contextlib
import errno
import gzip
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from itertools import accumulate, chain, filterfalse, zip_longest
from pathlib import Path

from muster.errors import LogMissing, LogUnreadable

STDIN = Path("-")
# a line of torch with a C++ backtrace reaches 20 KiB; of what is longer the middle is left out
LONGEST_LINE = 2**16
_HALF_A_LINE = LONGEST_LINE // 2 - 1
# as in " 42%|####      | 42/100 [00:10<00:14, 4.1it/s, loss=3.2]", which is of no use
_LONGEST_PROGRESS = 250
_BLOCK = 2**20
# below it a second process costs more than it gives
_SMALLEST_PART = 2**23


@dataclass(frozen=True, slots=True)
class Line:
    """`number` counts from 1. `source` is the prefix that was before `text`, without its time:
    "[rank3]", "[default0]", "[pod/train-0/trainer]", "" where there was none. `file` is its name as
    `shown` gives it.
    """

    file: str
    number: int
    text: str
    source: str = ""


# what of some lines is worth reading, each with its place among them; sieve.py has one
Sift = Callable[[bytes], Iterable[tuple[int, bytes]]]


def every(block: bytes) -> Iterable[tuple[int, bytes]]:
    """The Sift that leaves all of a block's lines."""
    return enumerate(block.split(b"\n"))


def files(words: Sequence[str]) -> tuple[Path, ...]:
    """The files that `words` name, each once: files, directories (all below), globs, "-"; standard
    input for none. Raises LogMissing, and LogUnreadable for a directory.
    """
    found: dict[object, Path] = {}
    for word in words or ("-",):
        try:
            named = _named(word)
        except OSError as error:
            raise LogUnreadable(shown(Path(word)), error.strerror or str(error)) from None
        if not named:
            raise LogMissing(word)
        for path in named:
            found.setdefault(_identity(path), path)
    return tuple(found.values())


def shown(path: Path) -> str:
    """The name of `path` for a terminal, which may not obey what is in it."""
    if path == STDIN:
        return "standard input"
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in str(path))


def _named(word: str) -> list[Path]:
    if word == str(STDIN):
        return [STDIN]
    # the file "-" of a folder is no standard input
    return [path.absolute() if path == STDIN else path for path in _found(word)]


def _found(word: str) -> list[Path]:
    path = Path(word)
    if not word:
        return []
    if path.is_dir():
        os.scandir(path).close()  # one that may not be read is no empty one
        return _below(path)
    if path.exists():
        return [path]
    return [file for match in _matching(path) for file in _below(match)]


def _matching(pattern: Path) -> list[Path]:
    try:
        # it follows no links to directories below **, so a link to its own parent ends
        return sorted(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))
    except ValueError:
        return []


def _below(path: Path) -> list[Path]:
    """The files at and below `path`, without pipes, sockets and devices; no link to a directory is
    followed.
    """
    if path.is_file():
        return [path]
    found: list[Path] = []
    folders = [str(path)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif _is_file(entry):
                    found.append(Path(entry.path))
    return sorted(found)


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link to itself
        return False


def _identity(path: Path) -> object:
    """The same for two names of one file."""
    if path == STDIN:
        return STDIN
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return path


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a file from the begin of line `first` to a line's end; without `end`, to the
    file's.
    """

    path: Path
    begin: int = 0
    end: int | None = None
    first: int = 1


# map, or the same by several processes
ForEach = Callable[[Callable[[Part], int], list[Part]], Iterable[int]]


def parts(path: Path, count: int, *, each: ForEach = map) -> tuple[Part, ...]:
    """`path` in up to `count` parts of about a size, so that as many processes can read it.

    None begins within torchrun's table of failures, which is read as a whole. `each` is what counts
    the lines of the parts, map or one that does so in several processes.
    """
    try:
        if path == STDIN or not path.is_file():
            return (Part(path),)
        size = path.stat().st_size
        with path.open("rb") as file:
            if size < count * _SMALLEST_PART or not _is_plain(file.peek(_HEAD)):
                return (Part(path),)
            begins = [0]
            for number in range(1, count):
                file.seek(number * size // count)
                begin = _between_tables(file)
                if begins[-1] < begin < size:
                    begins.append(begin)
    except OSError:  # whoever reads it will say so
        return (Part(path),)
    found = [Part(path, begin, end) for begin, end in zip_longest(begins, begins[1:])]
    firsts = accumulate(each(_lines_in, found[:-1]), initial=1)
    return tuple(replace(part, first=first) for part, first in zip(found, firsts, strict=True))


_OF_A_TABLE = re.compile(
    rb"  (?:time {6}|host {6}|rank {6}|exitcode {2}|error_file|traceback ): |Failures:|Root Cause"
)
# a rank has seven rows; other programs may write between them
_LINES_APART = 20


def _between_tables(file: BufferedReader) -> int:
    """Where the first line begins that has no row of a table right before it."""
    _first_of(file)
    apart = 0
    while apart < _LINES_APART and (raw := _first_of(file)):
        apart = 0 if _OF_A_TABLE.search(raw) else apart + 1
    return file.tell()


def _first_of(file: BufferedReader) -> bytes:
    """Read a line to its end; its begin."""
    begin = raw = file.readline(LONGEST_LINE)
    while raw and not raw.endswith(b"\n"):
        raw = file.readline(LONGEST_LINE)
    return begin


def read(
    sources: Iterable[Path | Part], *, sift: Sift = every, notes: list[str] | None = None
) -> Iterator[Line]:
    """The Lines of `sources`, one after the other, that `sift` leaves.

    What is odd about a file (cut short, no text) goes to `notes`. Raises LogUnreadable.
    """
    said: list[str] = [] if notes is None else notes
    for source in sources:
        part = source if isinstance(source, Part) else Part(source)
        name = shown(part.path)
        try:
            with _opened(part.path) as file:
                first = part.first
                if part.begin:
                    file.seek(part.begin)
                for block in _blocks(_bytes(file, part, name, said)):
                    for place, raw in sift(block):
                        if raw:
                            yield from made(name, first + place, raw)
                    first += lines_in(block)
        except OSError as error:
            raise LogUnreadable(name, error.strerror or str(error)) from None


def made(file: str, number: int, raw: bytes) -> Iterator[Line]:
    """The Line of `raw`; several where a progress bar has written over itself."""
    text = clean(shortened(raw).decode("utf-8", "replace"))
    *overwritten, last = text.split("\r")
    for part in (*filterfalse(_is_progress, overwritten), last):
        source, rest = unwrapped(part)
        if rest.strip():
            yield Line(file, number, rest, source)


def _is_progress(text: str) -> bool:
    return "%|" in text and len(text) < _LONGEST_PROGRESS


# ---- bytes to lines ----------------------------------------------------------------------------


def _opened(path: Path) -> BufferedReader:
    if path != STDIN:
        return path.open("rb")
    if sys.stdin is None:
        raise OSError(errno.EBADF, "it is closed")
    return open(sys.stdin.fileno(), "rb", closefd=False)


def _lines_in(part: Part) -> int:
    """The number of lines; 0 where it cannot be read, which whoever reads it will say."""
    try:
        with part.path.open("rb") as file:
            file.seek(part.begin)
            return sum(block.count(b"\n") for block in _read(file, (part.end or 0) - part.begin))
    except OSError:
        return 0


def _blocks(read: Iterable[bytes]) -> Iterator[bytes]:
    """Whole lines, some thousand in a block, without the end of the last."""
    begun = b""
    for block in read:
        whole, begun = split(begun, block)
        if whole is not None:
            yield whole
    if begun:
        yield begun


def split(begun: bytes, block: bytes) -> tuple[bytes | None, bytes]:
    """The lines that end in `block`, of which the first was begun before, and the begun last."""
    # a log that was emptied under its writer has a hole; UTF-16 without its mark has every second
    text = block.translate(None, b"\0") if b"\0" in block else block
    head, end, tail = text.rpartition(b"\n")
    if not end:
        return None, shortened(begun + tail)
    return begun + head, shortened(tail)


def lines_in(block: bytes) -> int:
    return block.count(b"\n") + 1


def shortened(raw: bytes) -> bytes:
    """`raw`, of a long one the begin and the end: a progress bar's line ends with the error."""
    if len(raw) <= LONGEST_LINE:
        return raw
    return raw[:_HALF_A_LINE] + b"\r" + raw[-_HALF_A_LINE:]


_GZIP = b"\x1f\x8b"
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_HEAD = 4096
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
# no text has them; colours, bells and progress bars have the others
_NEVER_WRITTEN = bytes({*range(1, 32)} - {*b"\a\b\t\n\f\r\x1b"})
_FEW = 32


def _no_log(head: bytes) -> str | None:
    """What a file is that begins so and is no log."""
    for magic, what in _NO_LOGS.items():
        if head.startswith(magic):
            return what
    head = head[:_HEAD].replace(b"\0", b"")
    odd = len(head) - len(head.translate(None, _NEVER_WRITTEN))
    # of noise every tenth byte is odd
    return "binary" if odd > max(_FEW, len(head) // 20) else None


def _is_plain(head: bytes) -> bool:
    return not head.startswith((_GZIP, *_UTF16)) and _no_log(head) is None


def grows(path: Path) -> bool:
    """Whether what is appended to `path` can be read on its own. Raises OSError."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return _is_plain(file.peek(_HEAD))


def _bytes(file: BufferedReader, part: Part, name: str, notes: list[str]) -> Iterator[bytes]:
    """UTF-8 of whatever `file` holds: text, gzip, UTF-16 as PowerShell writes it."""
    if part.begin:
        return _read(file, None if part.end is None else part.end - part.begin)
    if file.peek(2).startswith(_GZIP):
        return _text(_unzipped(file, name, notes), name, notes)
    return _text(_read(file, part.end), name, notes)


def _text(blocks: Iterator[bytes], name: str, notes: list[str]) -> Iterator[bytes]:
    first = next(blocks, b"")
    if first.startswith(_UTF16):
        decoder = codecs.getincrementaldecoder("utf-16")("replace")
        yield from (decoder.decode(block).encode() for block in chain((first,), blocks))
    elif what := _no_log(first):
        notes.append(f"{name}: not read, it is {what}")
    else:
        yield first
        yield from blocks


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
# what a terminal obeys or hides: C0 but for tab and CR, DEL, C1, marks that turn text around or are
# not seen, surrogates
_OBEYED = re.compile(
    r"[\x00-\x08\x0a-\x0c\x0e-\x1f\x7f-\x9f\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    r"\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff]"
)


def clean(text: str) -> str:
    """`text` without terminal escapes and other control characters, and without CR at its end."""
    if text.isprintable():
        return text
    return _OBEYED.sub("", _ESCAPES.sub("", text)).rstrip("\r")


_TIME = (
    r"\[?\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?"
    r"|\[?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\]?"
    r"|(?:[A-Z][a-z]{2} )?[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?: \d{4})?"
)
_WRAPPING = re.compile(
    rf"\s{{0,20}}(?:(?P<time>(?:{_TIME})(?: std(?:out|err) [FP])?(?=[ \t\[(]|$))[ \t]?"
    r"|(?P<source>"
    r"\[(?:rank|default|trainer|worker|local_rank|role)_?\d{1,7}\](?=:)"  # torchrun --tee, torch
    r"|\[[\w.@-]{0,100}\d,\d{1,7}\](?:<std(?:out|err|diag)>)?(?=:)"  # mpirun --tag-output
    r"|\[pod/[\w./-]{1,400}\](?= )"  # kubectl logs --prefix
    # ray, vllm
    r"|\([\w.:-]{1,99}(?: [\w.:=-]{1,99},?){0,4}? pid=\d{1,10}(?:, [\w.:=-]{1,99}){0,4}\)(?= )"
    r"|\d{1,6}(?=: )"  # srun -l
    r"|[\w.-]{1,255}(?= {1,80}\| )"  # docker compose
    r")(?::| {1,80}\|)? ?)"
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
