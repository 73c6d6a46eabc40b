"""faults.toml, the catalogue of what can go wrong, read strictly into frozen dataclasses.

A pattern is a piece of a log line with gaps: `{name}` is kept, `{}` is not, and a blank around a
gap is part of the text. Its pieces are looked for one after the other from the left, so matching
takes one walk over the line whatever the line holds.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from string import Formatter
from typing import Any

from muster.errors import CatalogueBroken
from muster.finding import Severity

# patterns for NCCL's information, of which there are millions of lines, are found by their start
START = 6
FILE = Path(__file__).with_name("faults.toml")


class Logged(StrEnum):
    """Which lines of a log a pattern is held against."""

    WARN = "warn"  # NCCL's warnings, and torch's repetition of the last of them
    INFO = "info"  # NCCL's information
    TEXT = "text"  # what torch, torchrun, CUDA, Python and the rest wrote


class Sure(StrEnum):
    CERTAIN = "certain"  # the line says it
    LIKELY = "likely"  # the line has other causes, all of them rare
    POSSIBLE = "possible"  # the line fits; `decide` tells


class Level(StrEnum):
    """What a line can be: the less sure it is to be the root, the further down."""

    ROOT = "root"  # is never the consequence of another fault
    MAY_FOLLOW = "may follow"  # also follows when another rank died first
    SYMPTOM = "symptom"  # says that something went wrong, not what
    CONSEQUENCE = "consequence"  # another process ended first


@dataclass(frozen=True)
class Pattern:
    """`text` cut into the pieces to find, with the name of the gap behind each ("" keeps nothing).

    With `starts`, the first piece is the start of the message.
    """

    logged: Logged
    text: str
    pieces: tuple[str, ...]
    gaps: tuple[str, ...]
    starts: bool

    @classmethod
    def of(cls, logged: Logged, text: str) -> "Pattern":
        """Raise ValueError for a pattern that no line or any line would match."""
        pieces: list[str] = []
        gaps: list[str] = []
        for piece, name, form, conversion in Formatter().parse(text):
            if form or conversion:
                raise ValueError(f"{text!r}: a gap is {{name}} or {{}}")
            if not piece and pieces:
                raise ValueError(f"{text!r}: two gaps with nothing between them")
            pieces.append(piece)
            gaps.append(name or "")
        if pieces and not pieces[0]:
            raise ValueError(f"{text!r} begins with a gap, which says nothing")
        if max(map(len, pieces), default=0) < 6:
            raise ValueError(f"{text!r} has no piece of six characters or more")
        starts = logged is Logged.INFO
        if starts and len(pieces[0]) < START:
            raise ValueError(f"{text!r}: a pattern for information begins with six characters")
        return cls(logged, text, tuple(pieces), tuple(gaps), starts)

    @property
    def keyword(self) -> str | None:
        """The longest word that stands between blanks in each line that matches."""
        words = [word for piece in self.pieces for word in piece.split(" ")[1:-1]]
        return max(words, key=len, default="") or None

    def match(self, message: str) -> dict[str, str] | None:
        """Return what stood in the named gaps, or None where the pattern does not fit."""
        at = message.find(self.pieces[0])
        if at < 0 or (self.starts and at > 0):
            return None
        at += len(self.pieces[0])
        found: dict[str, str] = {}
        for name, piece in zip(self.gaps, (*self.pieces[1:], ""), strict=True):
            end = message.find(piece, at) if piece else len(message)
            if end < 0:
                return None
            if name:
                found[name] = message[at:end].strip()
            at = end + len(piece)
        return found


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that can go wrong, with what shows it and what to do.

    It is there when one line fits `see` and not `not_see`, or the log as a whole shows `derived`;
    where `see_also` is not empty another line has to fit that, and none may fit `unless`. What is
    `retried` has to be given up in the end. It `tells_more` than the faults it names: those are
    left out beside it. `remaining` are the causes between which the log cannot tell; the command
    `decide` can. `unnamed` says what stands in a gap of the texts where the line that was seen does
    not name it.
    """

    id: str
    class_: str
    title: str
    unnamed: Mapping[str, str]
    level: Level
    severity: Severity
    sure: Sure
    see: tuple[Pattern, ...]
    derived: str
    see_also: tuple[Pattern, ...]
    not_see: tuple[Pattern, ...]
    unless: tuple[Pattern, ...]
    retried: bool
    versions: str
    tells_more: tuple[str, ...]
    cause: str
    remaining: tuple[str, ...]
    remedy: str
    decide: str
    link: str
    look_alikes: tuple[str, ...]

    def stands_for(self, version: tuple[int, ...]) -> bool:
        """Say whether NCCL of `version`, for example (2, 27, 5), can have this fault."""
        return all(_holds(version, bound) for bound in self.versions.split(",") if bound)

    def patterns(self) -> Iterator[Pattern]:
        for group in (self.see, self.see_also, self.not_see, self.unless):
            yield from group


@dataclass(frozen=True)
class Catalogue:
    """`gave_up` are lines that end what is retried, `harmless` are warnings that say nothing."""

    faults: tuple[Fault, ...]
    gave_up: tuple[Pattern, ...]
    harmless: tuple[Pattern, ...]

    def __getitem__(self, fault_id: str) -> Fault:
        return next(fault for fault in self.faults if fault.id == fault_id)

    @property
    def classes(self) -> dict[str, int]:
        """How many faults each class has, in the order of the file."""
        counts: dict[str, int] = {}
        for fault in self.faults:
            counts[fault.class_] = counts.get(fault.class_, 0) + 1
        return counts


def read(path: Path = FILE) -> Catalogue:
    """Read and check a catalogue; raise CatalogueBroken that names the fault and the key."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as why:
        raise CatalogueBroken(path, str(why)) from why
    try:
        faults = tuple(_fault(entry) for entry in data["fault"])
        _check_ids(faults)
        gave_up = _patterns(data["gave_up"], Logged.TEXT)
        harmless = _patterns(data["harmless"], Logged.WARN)
    except (ValueError, KeyError, TypeError) as why:
        raise CatalogueBroken(path, f"{why}") from why
    return Catalogue(faults, gave_up, harmless)


_TEXTS = ("cause", "remedy", "link", "title")
_KEYS = {
    *(
        "id",
        "class",
        "title",
        "unnamed",
        "level",
        "severity",
        "sure",
        "logged",
        "see",
        "derived",
        "see_also",
    ),
    *(
        "not_see",
        "unless",
        "retried",
        "versions",
        "tells_more",
        "cause",
        "remaining",
        "remedy",
        "decide",
    ),
    *("link", "look_alikes"),
}


def _fault(entry: Mapping[str, Any]) -> Fault:
    fault_id = entry.get("id")
    if not isinstance(fault_id, str):
        raise ValueError("a fault has no id")  # noqa: TRY004 - all that is wrong is one error
    try:
        return _checked(entry)
    except (ValueError, KeyError, TypeError) as why:
        raise ValueError(f"fault {fault_id}: {why}") from why


def _checked(entry: Mapping[str, Any]) -> Fault:
    if unknown := sorted(entry.keys() - _KEYS):
        raise ValueError(f"there is no key {', '.join(unknown)}")
    if missing := [key for key in _TEXTS if not entry.get(key)]:
        raise ValueError(f"{', '.join(missing)} is missing")
    default = Logged(entry.get("logged", Logged.WARN))
    fault = Fault(
        id=entry["id"],
        class_=entry["class"],
        title=entry["title"],
        unnamed=dict(entry.get("unnamed", {})),
        level=Level(entry.get("level", Level.ROOT)),
        severity=Severity(entry.get("severity", Severity.ERROR)),
        sure=Sure(entry["sure"]),
        see=_patterns(entry.get("see", ()), default),
        derived=entry.get("derived", ""),
        see_also=_patterns(entry.get("see_also", ()), default),
        not_see=_patterns(entry.get("not_see", ()), default),
        unless=_patterns(entry.get("unless", ()), default),
        retried=entry.get("retried", False) is True,
        versions=entry.get("versions", ""),
        tells_more=tuple(entry.get("tells_more", ())),
        cause=entry["cause"],
        remaining=tuple(entry.get("remaining", ())),
        remedy=entry["remedy"],
        decide=entry.get("decide", ""),
        link=entry["link"],
        look_alikes=tuple(entry.get("look_alikes", ())),
    )
    _check(fault)
    return fault


def _check(fault: Fault) -> None:
    if not fault.see and not fault.derived:
        raise ValueError("nothing shows it: give see or derived")
    if fault.remaining and not fault.decide:
        raise ValueError("it names remaining causes and no command that decides between them")
    if not fault.link.startswith("https://"):
        raise ValueError(f"link {fault.link!r} is no https address")
    for bound in filter(None, fault.versions.split(",")):
        _holds((2,), bound)
    _check_gaps(fault)


def _check_gaps(fault: Fault) -> None:
    """Raise ValueError where a text has a gap that a line may leave open."""
    texts = (fault.title, fault.cause, fault.remedy, fault.decide)
    gaps = {field for text in texts for _, field, _, _ in Formatter().parse(text) if field}
    for pattern in fault.see:
        if left := sorted(gaps - fault.unnamed.keys() - set(pattern.gaps)):
            raise ValueError(f"{pattern.text!r} does not name {', '.join(left)}, nor does unnamed")


def _patterns(entries: Iterable[str | Mapping[str, str]], default: Logged) -> tuple[Pattern, ...]:
    """Read patterns: a text is held against the fault's own lines; {info = text} against others."""
    patterns: list[Pattern] = []
    for entry in entries:
        if isinstance(entry, str):
            patterns.append(Pattern.of(default, entry))
            continue
        patterns += [Pattern.of(Logged(logged), text) for logged, text in entry.items()]
    return tuple(patterns)


def _check_ids(faults: tuple[Fault, ...]) -> None:
    known: set[str] = set()
    for fault in faults:
        if fault.id in known:
            raise ValueError(f"there are two faults {fault.id}")
        known.add(fault.id)
    for fault in faults:
        if unknown := set(fault.tells_more) - known:
            raise ValueError(f"fault {fault.id}: tells_more names no fault: {', '.join(unknown)}")


def _holds(version: tuple[int, ...], bound: str) -> bool:
    """Say whether `version` is within a bound such as >=2.26.2 or <2.27."""
    if bound.startswith(">="):
        return version >= _numbers(bound[2:])
    if bound.startswith("<"):
        return version < _numbers(bound[1:])
    raise ValueError(f"a bound of versions is >=2.26 or <2.27, not {bound!r}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
