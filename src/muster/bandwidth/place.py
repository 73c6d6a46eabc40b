"""Where a run takes place, what it must reach there, and how large its buffers get."""

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from muster.bandwidth import floors
from muster.bandwidth.floors import Entry, Floor, Floors, Link, Place
from muster.bandwidth.results import Collective
from muster.errors import FloorsWrong
from muster.finding import Finding, warning

# as the doctor spells what lies between two GPUs
NVLINK: Final = "NVLINK"
# where the text of floors comes from: the option of smoke
OPTION: Final = Path("--floor")

# NVLink 5 reaches its peak at 4 GiB (coreweave/nccl-tests#43), PCIe long before 1 GiB
_MOST_BY_NVLINK: Final = 2**33
_MOST: Final = 2**30
# of the device's memory that one buffer takes; nccl-tests have three of them, torch up to that
_SHARE: Final = 1 / 8
# and where a floor is for larger ones
_LARGEST_SHARE: Final = 1 / 4


def within_node(gpus: Collection[str], paths: Collection[str]) -> Place | None:
    """The place of ranks on one node, each on one of `gpus` (NVML's names).

    `paths` are what lies between the pairs, as nvidia-smi topo -m spells it: the slowest counts.
    None where nothing lies between them, or no figure can be for them: the GPUs are of two kinds.
    """
    if not paths or len(set(gpus)) != 1:
        return None
    link = Link.NVLINK if set(paths) == {NVLINK} else Link.PCIE
    return Place(next(iter(gpus)), link, len(gpus))


def floor_of(text: str | None, place: Place | None, collective: Collective) -> Floor | None:
    """What `collective` must reach there; None where no figure is known.

    `text` is the user's: GB/s for all_reduce, or a file of floors, else floors.toml holds. Raises
    FloorsWrong.
    """
    if text is None:
        known = floors.read()
    elif (gb_s := _number(text)) is not None:
        return floors.given(gb_s) if collective is Collective.ALL_REDUCE else None
    else:
        known = floors.parse(text, OPTION)
    return None if place is None else known.floor_for(place, collective)


def _number(text: str) -> float | None:
    """`text` in GB/s; None when it is no number. Raises FloorsWrong for one of 0 or less."""
    try:
        gb_s = float(text)
    except ValueError:
        return None
    if not 0 < gb_s < math.inf:
        raise FloorsWrong(OPTION, f"{text.strip()} is not a number of GB/s above 0")
    return gb_s


def unused(text: str | None, place: Place | None, where: str) -> Iterator[Finding]:
    """That the user's file of floors has one for this place. Raises FloorsWrong."""
    if text is None or _number(text) is not None:
        return
    known = floors.parse(text, OPTION)
    if place is not None and any(known.floor_for(place, each) for each in Collective):
        return
    found = "GPUs of one kind, with a link that is known" if place is None else _words(place)
    yield warning(
        where,
        f"the file of floors has none for this machine: {'no ' if place is None else ''}{found}",
        evidence=f"it has floors for {'; '.join(_listed(known))}",
        cause="a floor holds for one GPU, one link and one number of ranks",
        remedy="add a [[floor]] for this machine, gpu spelled as nvidia-smi -L has it; or give a"
        " number of GB/s for all_reduce",
    )


def _words(place: Place | Entry) -> str:
    if place.link.is_network:
        return f"{place.gpu}, {place.link} with {place.rail_gbit_s} Gbit/s a rail"
    return f"{place.gpu}, {place.link}, {place.nranks} ranks"


def _listed(known: Floors) -> list[str]:
    return list(dict.fromkeys(_words(entry) for entry in known.entries))


def largest_bytes(memory: int, place: Place | None, floor: Floor | None) -> int:
    """The largest buffer to measure on devices with `memory` bytes: a power of 2.

    Large enough for the floor, where the memory is.
    """
    by_nvlink = place is not None and place.link is Link.NVLINK
    most = min(_MOST_BY_NVLINK if by_nvlink else _MOST, memory * _SHARE)
    enough = 2 ** (max(1, int(most)).bit_length() - 1)
    asked = 1 if floor is None else 2 ** math.ceil(math.log2(max(1, floor.bytes)))
    return asked if enough < asked <= memory * _LARGEST_SHARE else enough
