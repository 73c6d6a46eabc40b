"""The three things to watch on each node, taken from what NCCL's logs show."""

from dataclasses import replace

import pytest

from muster.dossier import Watched, watched
from muster.explain.events import Event
from muster.explain.explanation import of_text
from muster.explain.picture import Channels, Node, Picture, Ranks, picture

NODE = Node(
    host="gpu-1",
    ranks=Ranks.of(range(8)),
    networks=("IB",),
    gpu_direct=True,
    links={"P2P/CUMEM": 56},
)
CHANNELS = Channels(rings=16, collectives=16, nvls=24, p2p=32, trees=True, nvls_available=True)
NOTHING: list[Event] = []


def drawn(*nodes: Node, channels: Channels | None = CHANNELS) -> Picture:
    return replace(picture(NOTHING), nodes=nodes, channels=channels)


def test_each_node_has_its_network_and_links_and_the_jobs_channels() -> None:
    found = watched(drawn(NODE, replace(NODE, host="gpu-2", networks=("Socket",))))
    assert found["gpu-1"] == Watched(
        networks=("IB",),
        gpu_direct=True,
        links={"P2P/CUMEM": 56},
        rings=16,
        trees=True,
        nvls=24,
    )
    assert found["gpu-2"].networks == ("Socket",)


def test_what_a_log_does_not_say_is_nought() -> None:
    found = watched(drawn(NODE, channels=None))["gpu-1"]
    assert (found.rings, found.trees, found.nvls) == (0, False, 0)


def test_a_log_of_gloo_tells_of_no_node() -> None:
    assert watched(of_text("[rank0]: step 1 loss 0.5").picture) == {}


SEEN = Watched(
    networks=("IB",),
    gpu_direct=True,
    links={"P2P/CUMEM": 56, "NET/IB": 16},
    rings=16,
    trees=True,
    nvls=0,
)


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (SEEN, "IB, GPUDirect"),
        (replace(SEEN, gpu_direct=False), "IB, no GPUDirect"),
        (replace(SEEN, gpu_direct=None), "IB"),
        (replace(SEEN, networks=("IB", "Socket"), gpu_direct=None), "IB and Socket"),
        (replace(SEEN, networks=(), gpu_direct=None), "not told"),
    ],
)
def test_the_network_is_told_in_words(seen: Watched, told: str) -> None:
    assert seen.network == told


def test_how_gpus_talk_is_the_same_wherever_a_node_stands_in_the_rings() -> None:
    elsewhere = replace(SEEN, links={"NET/IB": 2, "P2P/CUMEM": 8})
    assert SEEN.talk == elsewhere.talk == "NET/IB, P2P/CUMEM"
    assert replace(SEEN, links={}).talk == "not told"


def test_rings_and_trees_are_told_in_words() -> None:
    assert SEEN.graph == "16 rings, trees"
    assert replace(SEEN, nvls=24).graph == "16 rings, trees, 24 NVLS channels"
    assert replace(SEEN, rings=0, trees=False).graph == "not told"
