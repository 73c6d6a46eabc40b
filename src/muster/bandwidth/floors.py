"""The busbw that a healthy machine reaches, by GPU and link: floors.toml, or a file of the user's.

What is not in the file has no floor, and no claim is made: a figure of another GPU, another link or
another number of ranks says nothing.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeVar

from muster.bandwidth.results import Collective
from muster.errors import FloorsWrong
from muster.finding import Severity

FILE: Final = Path(__file__).with_name("floors.toml")
SCHEMA: Final = 1
# nccl-tests take a run for slow below 90% of NCCL_TESTS_MIN_BW
# https://github.com/NVIDIA/nccl-tests/blob/master/src/util.cu
TOLERANCE: Final = 0.9


class Link(StrEnum):
    """What the ranks talk over: the slowest link that all of them need."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    INFINIBAND = "infiniband"
    ROCE = "roce"
    EFA = "efa"

    @property
    def is_network(self) -> bool:
        return self not in {Link.NVLINK, Link.PCIE}


class Basis(StrEnum):
    """Why a figure is a floor."""

    GIVEN = "given"  # the user asks for it
    THRESHOLD = "threshold"  # an operator refuses what is slower
    MEASURED = "measured"  # 90% of what somebody measured


@dataclass(frozen=True)
class Place:
    """Where a run takes place. `gpu` as NVML has it; rails are the adapters of one node."""

    gpu: str
    link: Link
    nranks: int
    rails: int = 0
    rail_gbit_s: int = 0


@dataclass(frozen=True, kw_only=True)
class Floor:
    """busbw in GB/s (10^9) that buffers of `bytes` and more must reach."""

    busbw: float
    bytes: int
    basis: Basis
    source: str

    @property
    def severity(self) -> Severity:
        """How bad it is to be under it: what others measured refuses no machine."""
        return Severity.WARNING if self.basis is Basis.MEASURED else Severity.ERROR


def given(gb_s: float) -> Floor:
    """The user's --floor, which the fastest row must reach."""
    return Floor(busbw=gb_s, bytes=0, basis=Basis.GIVEN, source="--floor")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One figure of the file: for `nranks` within a node, or for each rail of `rail_gbit_s`."""

    gpu: str
    link: Link
    nranks: int | None
    rail_gbit_s: int | None
    collectives: frozenset[Collective]
    floor: Floor

    def fits(self, place: Place, collective: Collective) -> bool:
        if (self.gpu, self.link) != (place.gpu, place.link) or collective not in self.collectives:
            return False
        if self.link.is_network:
            return self.rail_gbit_s == place.rail_gbit_s and place.rails > 0
        return self.nranks == place.nranks


@dataclass(frozen=True)
class Floors:
    """The figures of one file."""

    entries: tuple[Entry, ...]

    def floor_for(self, place: Place, collective: Collective) -> Floor | None:
        """The floor of `collective` there; None where no figure is known."""
        for entry in self.entries:
            if entry.fits(place, collective):
                rails = place.rails if place.link.is_network else 1
                return replace(entry.floor, busbw=entry.floor.busbw * rails)
        return None


# ---- the file ----------------------------------------------------------------------------------


def read(path: Path = FILE) -> Floors:
    """Read a file of floors. Raises FloorsWrong for one that is missing or not as floors.toml."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FloorsWrong(path, error.strerror or str(error)) from None
    except ValueError as error:
        raise FloorsWrong(path, f"it is no TOML: {error}") from None
    return parse(text, path)


def parse(text: str, path: Path) -> Floors:
    """The text of such a file, which came from `path`. Raises FloorsWrong."""
    try:
        said = tomllib.loads(text)
    except ValueError as error:
        raise FloorsWrong(path, f"it is no TOML: {error}") from None
    try:
        return _floors(said)
    except ValueError as error:
        raise FloorsWrong(path, str(error)) from None


_NEEDED: Final[Mapping[str, type]] = {
    "gpu": str,
    "link": str,
    "collectives": list,
    "bytes": int,
    "source": str,
}
_Kind = TypeVar("_Kind", bound=StrEnum)
_EITHER: Final = (("nranks", "rail_gbit_s"), ("threshold_gb_s", "measured_gb_s"))


def _floors(said: Mapping[str, Any]) -> Floors:
    if said.get("schema") != SCHEMA:
        raise ValueError(f"schema is {said.get('schema')!r}, not {SCHEMA}")
    if unknown := sorted(said.keys() - {"schema", "floor"}):
        raise ValueError(f"there is no key {unknown[0]!r}, only schema and [[floor]]")
    tables = said.get("floor")
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise ValueError("it has no [[floor]]")
    entries = tuple(_entry(each, f"floor {at}") for at, each in enumerate(tables, start=1))
    seen: dict[tuple[object, ...], int] = {}
    for at, entry in enumerate(entries, start=1):
        for collective in sorted(entry.collectives):
            key = (entry.gpu, entry.link, entry.nranks, entry.rail_gbit_s, collective)
            if seen.setdefault(key, at) != at:
                raise ValueError(f"floor {at} has {collective} of floor {seen[key]} once more")
    return Floors(entries)


def _entry(table: Mapping[str, Any], where: str) -> Entry:
    for name, kind in _NEEDED.items():
        if type(table.get(name)) is not kind or not table[name]:
            raise ValueError(f"{where}: {name} is missing or wrong")
    either = [name for pair in _EITHER for name in pair]
    for pair in _EITHER:
        if len(table.keys() & set(pair)) != 1:
            raise ValueError(f"{where} needs one of {' and '.join(pair)}")
    if unknown := sorted(table.keys() - _NEEDED.keys() - set(either)):
        raise ValueError(f"{where}: there is no key {unknown[0]!r}")
    for name in ("bytes", *(name for name in either if name in table)):
        _above_zero(table[name], f"{where}: {name}", whole=not name.endswith("_gb_s"))
    link = _member(Link, table["link"], f"{where}: link")
    if link.is_network != ("rail_gbit_s" in table):
        raise ValueError(f"{where}: {'rail_gbit_s' if link.is_network else 'nranks'} fits {link}")
    measured = table.get("measured_gb_s")
    return Entry(
        gpu=table["gpu"],
        link=link,
        nranks=table.get("nranks"),
        rail_gbit_s=table.get("rail_gbit_s"),
        collectives=frozenset(
            _member(Collective, str(each), f"{where}: collectives") for each in table["collectives"]
        ),
        floor=Floor(
            busbw=table["threshold_gb_s"] if measured is None else measured * TOLERANCE,
            bytes=table["bytes"],
            basis=Basis.THRESHOLD if measured is None else Basis.MEASURED,
            source=table["source"],
        ),
    )


def _member(kind: type[_Kind], text: str, where: str) -> _Kind:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{where}: {text!r} is none of {', '.join(kind)}") from None


def _above_zero(value: object, where: str, *, whole: bool) -> None:
    kinds = {int} if whole else {int, float}
    if type(value) not in kinds or not 0 < float(str(value)) < float("inf"):
        raise ValueError(f"{where} is {value!r}, not a {'whole ' if whole else ''}number above 0")
