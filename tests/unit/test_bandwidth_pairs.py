"""Pairs of nodes: who meets whom when, and which node or link is to be named."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.bandwidth.pairs import SLOW, Pair, judge, rounds
from muster.finding import Finding, Severity


def findings(pairs: list[Pair]) -> list[Finding]:
    return list(judge(pairs, "pairs"))


def whats(pairs: list[Pair]) -> list[str]:
    return [finding.what for finding in findings(pairs)]


def cluster(count: int, speed: float | None = 40.0, **bad: float | str) -> list[Pair]:
    """All pairs of nodes a, b, c, ..; those of `bad` ("ab", "c") at that speed, or failing so."""
    found = []
    for one, other in combinations("abcdefghij"[:count], 2):
        told = next((bad[key] for key in (one + other, one, other) if key in bad), speed)
        failure = told if isinstance(told, str) else None
        found.append(Pair((one, other), None if isinstance(told, str) else told, failure))
    return found


# ---- rounds ------------------------------------------------------------------------------------


@given(nnodes=st.integers(2, 9))
def test_every_two_nodes_meet_once_and_no_node_is_in_two_pairs_at_a_time(nnodes: int) -> None:
    planned = list(rounds(nnodes))
    for couples in planned:
        nodes = [node for couple in couples for node in couple]
        assert len(nodes) == len(set(nodes))
    met = [couple for couples in planned for couple in couples]
    assert sorted(met) == list(combinations(range(nnodes), 2))


@given(nnodes=st.integers(2, 9))
def test_there_are_as_few_rounds_as_can_be(nnodes: int) -> None:
    assert len(list(rounds(nnodes))) == (nnodes - 1 if nnodes % 2 == 0 else nnodes)
    # all nodes are at it in each, or all but one
    assert all(len(couples) == nnodes // 2 for couples in rounds(nnodes))


def test_one_node_has_no_pair() -> None:
    assert [couple for couples in rounds(1) for couple in couples] == []


# ---- what is named -----------------------------------------------------------------------------


@given(speeds=st.lists(st.floats(SLOW * 40, 40), min_size=1, max_size=45))
def test_pairs_that_are_much_alike_are_no_finding(speeds: list[float]) -> None:
    names = list(combinations("abcdefghij", 2))
    assert findings([Pair(nodes, busbw) for nodes, busbw in zip(names, speeds, strict=False)]) == []


def test_pairs_whose_speed_says_nothing_are_fine_when_they_ran() -> None:
    assert findings(cluster(4, speed=None)) == []
    assert findings([]) == []


@pytest.mark.parametrize("count", [3, 4, 8])
@pytest.mark.parametrize("told", [10.0, "NCCL error: no route to host"])
def test_a_node_that_is_bad_with_every_other_is_named_alone(count: int, told: float | str) -> None:
    (finding,) = findings(cluster(count, b=told))
    assert finding.severity is Severity.ERROR
    assert finding.what == "b is slow or fails with every other node"
    assert finding.where == "pairs"
    assert ("a with b 10 GB/s" if told == 10.0 else f"a with b {told}") in finding.evidence
    assert "./invokew doctor on b" in finding.remedy


def test_two_bad_nodes_are_named_each_once() -> None:
    assert whats(cluster(6, b=5.0, e="timed out")) == [
        "b is slow or fails with every other node",
        "e is slow or fails with every other node",
    ]


@pytest.mark.parametrize(
    ("told", "what"),
    [(10.0, "the link between b and d is slow"), ("timed out", "the link between b and d fails")],
)
def test_a_bad_link_is_named_by_its_two_nodes(told: float | str, what: str) -> None:
    (finding,) = findings(cluster(4, bd=told))
    assert (finding.what, finding.severity) == (what, Severity.ERROR)
    # beside the others, which are well
    assert finding.evidence.startswith("b with d ")
    assert "a with b 40 GB/s" in finding.evidence
    assert "from b to d" in finding.remedy


def test_a_bad_node_and_a_bad_link_elsewhere_are_both_named() -> None:
    assert whats(cluster(6, a=3.0, ef=9.0)) == [
        "a is slow or fails with every other node",
        "the link between e and f is slow",
    ]


def test_when_every_pair_fails_it_is_what_all_share() -> None:
    (finding,) = findings(cluster(4, speed=None, **dict.fromkeys("abcd", "connection refused")))
    assert finding.what == "each of 6 pairs of nodes fails"
    assert "a with b connection refused" in finding.evidence
    assert "NCCL_SOCKET_IFNAME" in finding.remedy


def test_the_only_pair_that_fails_is_a_link() -> None:
    assert whats([Pair(("a", "b"), failure="timed out")]) == ["the link between a and b fails"]


def test_slow_is_held_against_the_pairs_that_are_good_though_half_are_bad() -> None:
    # of four nodes one is in three of six pairs: the median would already be half way down
    assert whats(cluster(4, d=10.0)) == ["d is slow or fails with every other node"]
    just = SLOW * 40
    assert whats(cluster(4, ab=just)) == []
    assert whats(cluster(4, ab=just - 0.1)) == ["the link between a and b is slow"]


def test_one_pair_that_is_far_ahead_makes_no_other_slow() -> None:
    assert findings(cluster(5, ab=400.0)) == []


def test_a_failure_says_nothing_of_the_speed_of_others() -> None:
    assert whats(cluster(4, ab="timed out")) == ["the link between a and b fails"]
