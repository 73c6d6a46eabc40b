"""nnodes, nproc_per_node, and the numbers a user writes."""

import pytest

from muster.errors import NotANumber
from muster.topology import Topology, positive


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
