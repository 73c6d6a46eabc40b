"""nnodes, nproc_per_node, and the numbers a user writes."""

import pytest

from muster.errors import NotANumber, NotNodes
from muster.topology import NodeRange, Topology, positive


def test_world_size_is_the_ranks_of_all_nodes() -> None:
    assert Topology(nnodes=3, nproc_per_node=8).world_size == 24


def test_a_whole_number_above_0_is_read() -> None:
    assert positive("--nproc-per-node", "12") == 12


@pytest.mark.parametrize(
    "text", ["0", "-1", "+2", "two", "", " 2", "2.0", "1e3", "0x2", "²", "٣", "9" * 5000]
)
def test_anything_else_is_refused_with_the_flag_and_the_text(text: str) -> None:
    with pytest.raises(NotANumber) as caught:
        positive("--nproc-per-node", text)
    assert caught.value.what.startswith(f"--nproc-per-node {text!r}")


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("4", NodeRange(4, 4)),
        ("1", NodeRange(1, 1)),
        ("2:4", NodeRange(2, 4)),
        ("3:3", NodeRange(3, 3)),
        ("100000", NodeRange(100_000, 100_000)),
    ],
)
def test_nodes_are_one_number_or_a_range(text: str, nodes: NodeRange) -> None:
    assert NodeRange.parse("--nnodes", text) == nodes


def test_nodes_are_spelled_as_torchrun_reads_them() -> None:
    assert [str(NodeRange(4, 4)), str(NodeRange(2, 4))] == ["4", "2:4"]


def test_only_a_range_is_elastic() -> None:
    assert [NodeRange(2, 4).elastic, NodeRange(4, 4).elastic] == [True, False]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is neither"),
        ("four", "is neither"),
        ("-1", "is neither"),
        ("2:", "is neither"),
        (":4", "is neither"),
        ("1:2:3", "is neither"),
        ("2-4", "is neither"),
        (" 2", "is neither"),
        ("2.0", "is neither"),
        ("1e9", "is neither"),
        ("²", "is neither"),
        ("٣", "is neither"),
        ("9" * 5000, "is neither"),
        ("0", "asks for no node"),
        ("0:4", "asks for no node"),
        ("4:2", "has its MIN over its MAX"),
        ("100001", "is over 100000 nodes"),
        ("1:100001", "is over 100000 nodes"),
        ("1000000000", "is over 100000 nodes"),
    ],
)
def test_other_nodes_are_refused_with_the_flag_the_text_and_the_reason(text: str, why: str) -> None:
    with pytest.raises(NotNodes) as caught:
        NodeRange.parse("--nnodes", text)
    assert caught.value.what.startswith(f"--nnodes {text!r} {why}")
    assert "--nnodes 2:4" in caught.value.remedy
