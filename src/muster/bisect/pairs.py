"""Which GPUs to try in twos, so that few runs show the one that fails with every other.

All pairs of 8 GPUs are 28 runs. Each GPU once with a neighbour is 4, and a GPU of a pair that
failed with one that is known to work is 1 more: 6 runs find one broken GPU of 8, or one broken link
between neighbours. A link between GPUs that were not paired stays unseen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

Pair = tuple[str, str]

# two GPUs are one pair, and that is the command as it is
FEWEST = 3


@dataclass(frozen=True)
class Place:
    """GPUs that fail with each partner they had, and pairs that fail while both work otherwise."""

    gpus: tuple[str, ...] = ()
    links: tuple[Pair, ...] = ()


def neighbours(gpus: Sequence[str]) -> tuple[Pair, ...]:
    """Every GPU once; the last of an odd number goes with the first. None of too few."""
    if len(gpus) < FEWEST:
        return ()
    if len(gpus) == FEWEST:
        # of two pairs the GPU that is in both would take both down
        return tuple(combinations(gpus, 2))
    pairs = list(zip(gpus[::2], gpus[1::2], strict=False))
    if len(gpus) % 2:
        pairs.append((gpus[-1], gpus[0]))
    return tuple(pairs)


def crossings(passed: Mapping[Pair, bool]) -> tuple[Pair, ...]:
    """Each GPU that has not been in a pair that passed, with one that has; none where none passed.

    `passed` says of each pair whether it did.
    """
    good = _good(passed)
    if not good:
        return ()
    suspects = dict.fromkeys(gpu for pair in passed for gpu in pair if gpu not in good)
    return tuple((suspect, _partner(suspect, good, passed)) for suspect in suspects)


def place(passed: Mapping[Pair, bool]) -> Place:
    """Where it fails; nowhere when no pair passed, for then it is not the GPUs that differ."""
    good = _good(passed)
    if not good:
        return Place()
    gpus = dict.fromkeys(gpu for pair in passed for gpu in pair if gpu not in good)
    failed = [pair for pair, well in passed.items() if not well]
    return Place(tuple(gpus), tuple(pair for pair in failed if good.issuperset(pair)))


def _good(passed: Mapping[Pair, bool]) -> set[str]:
    return {gpu for pair, well in passed.items() if well for gpu in pair}


def _partner(suspect: str, good: set[str], passed: Mapping[Pair, bool]) -> str:
    """One that works and has not been its partner, where there is such a one."""
    had = {gpu for pair in passed if suspect in pair for gpu in pair}
    return min(sorted(good), key=lambda gpu: gpu in had)
