"""Which pairs of GPUs are tried, and what they show: every GPU and every link broken in turn."""

from collections.abc import Callable
from itertools import combinations

import pytest

from muster.bisect import pairs
from muster.bisect.pairs import Pair, Place

NUMBERS = range(3, 17)


def gpus(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def tried(count: int, works: Callable[[Pair], bool]) -> dict[Pair, bool]:
    passed = {pair: works(pair) for pair in pairs.neighbours(gpus(count))}
    return passed | {pair: works(pair) for pair in pairs.crossings(passed)}


@pytest.mark.parametrize("count", NUMBERS)
def test_a_broken_gpu_is_found_whichever_it_is(count: int) -> None:
    for broken in gpus(count):
        passed = tried(count, lambda pair: broken not in pair)  # noqa: B023 (called at once)
        assert pairs.place(passed) == Place(gpus=(broken,))


@pytest.mark.parametrize("count", NUMBERS)
def test_a_broken_link_between_neighbours_is_found(count: int) -> None:
    for broken in pairs.neighbours(gpus(count)):
        passed = tried(count, lambda pair: set(pair) != set(broken))  # noqa: B023
        assert pairs.place(passed) == Place(links=(broken,))


def test_two_broken_gpus_of_one_pair_are_found() -> None:
    passed = tried(8, lambda pair: not {"2", "3"} & set(pair))
    assert pairs.place(passed) == Place(gpus=("2", "3"))


def test_one_broken_gpu_of_eight_takes_six_runs_and_not_twenty_eight() -> None:
    assert len(tried(8, lambda pair: "5" not in pair)) == 6
    assert len(list(combinations(gpus(8), 2))) == 28


@pytest.mark.parametrize("count", NUMBERS)
def test_every_gpu_is_tried_and_no_pair_twice(count: int) -> None:
    chosen = pairs.neighbours(gpus(count))
    assert {gpu for pair in chosen for gpu in pair} == set(gpus(count))
    assert len({frozenset(pair) for pair in chosen}) == len(chosen)
    assert all(one != other for one, other in chosen)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_gpus_have_no_pair(count: int) -> None:
    assert pairs.neighbours(gpus(count)) == ()


@pytest.mark.parametrize("works", [True, False])
def test_where_all_pairs_go_alike_they_show_no_place(works: bool) -> None:
    passed = tried(8, lambda _pair: works)
    assert len(passed) == 4
    assert pairs.place(passed) == Place()


def test_where_nothing_was_tried_there_is_no_place() -> None:
    assert pairs.place({}) == Place()
