"""Pairs of nodes, each measured on its own: which node or which link is the bad one."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from muster.finding import Finding, error

# the share of what good pairs reach below which a pair is slow
SLOW: Final = 0.7


@dataclass(frozen=True)
class Pair:
    """Two nodes by name, and their busbw in GB/s; None where it says nothing of their link.

    `failure` is in words.
    """

    nodes: tuple[str, str]
    busbw: float | None = None
    failure: str | None = None


def rounds(nnodes: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Rounds of pairs: every two nodes once, and in no round a node twice.

    The circle method of round-robin tournaments: one stays, the others move on by a place.
    """
    places: list[int | None] = [*range(nnodes), *([None] if nnodes % 2 else [])]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        yield tuple(
            (min(one, other), max(one, other))
            for one, other in facing
            if one is not None and other is not None
        )
        places = [places[0], places[-1], *places[1:-1]]


def judge(pairs: Sequence[Pair], where: str) -> Iterator[Finding]:
    """A node whose pairs are all bad is named, and of what is left each bad link."""
    bad = {pair for pair in pairs if pair.failure is not None} | set(_slow(pairs))
    of_node: defaultdict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        for node in pair.nodes:
            of_node[node].append(pair)
    if len(pairs) > 1 and len(bad) == len(pairs):
        yield _all_bad(pairs, where)
        return
    culprits = [node for node, own in of_node.items() if len(own) > 1 and set(own) <= bad]
    for node in culprits:
        yield _bad_node(node, of_node[node], where)
    for pair in pairs:
        if pair in bad and not set(pair.nodes) & set(culprits):
            yield _bad_link(pair, pairs, where)


def _slow(pairs: Sequence[Pair]) -> Iterator[Pair]:
    """Held against the upper quartile: of three or four nodes a bad one is in half of all pairs."""
    measured = [pair for pair in pairs if pair.busbw is not None]
    speeds = sorted(pair.busbw or 0.0 for pair in measured)
    good = speeds[(3 * len(speeds) - 1) // 4] if speeds else 0.0
    yield from (pair for pair in measured if (pair.busbw or 0.0) < SLOW * good)


def _bad_node(node: str, own: Sequence[Pair], where: str) -> Finding:
    return error(
        where,
        f"{node} is slow or fails with every other node",
        evidence="; ".join(map(_told, own[:8])),
        cause="its adapter, cable, switch port, or the way between its GPUs and its adapters",
        remedy=f"./invokew doctor on {node}; run without it: the others do well with each other",
    )


def _all_bad(pairs: Sequence[Pair], where: str) -> Finding:
    return error(
        where,
        f"each of {len(pairs)} pairs of nodes fails",
        evidence="; ".join(map(_told, pairs[:8])),
        cause="what all nodes share: the image, a firewall, the interface that is chosen",
        remedy="./invokew doctor on one node for its interfaces; set NCCL_SOCKET_IFNAME or"
        " GLOO_SOCKET_IFNAME to the one that the nodes share",
    )


def _bad_link(pair: Pair, pairs: Sequence[Pair], where: str) -> Finding:
    others = [each for each in pairs if each != pair and each.failure is None]
    beside = f"; the other pairs: {', '.join(map(_told, others[:4]))}" if others else ""
    one, other = pair.nodes
    return error(
        where,
        f"the link between {one} and {other} {'is slow' if pair.failure is None else 'fails'}",
        evidence=f"{_told(pair)}{beside}",
        cause="a cable or switch port between them, a firewall, or a subnet that one cannot reach",
        remedy=f"ping and iperf3 (TCP), ib_write_bw (RDMA) from {one} to {other}, both ways",
    )


def _told(pair: Pair) -> str:
    how = pair.failure or ("well" if pair.busbw is None else f"{pair.busbw:.3g} GB/s")
    return f"{pair.nodes[0]} with {pair.nodes[1]} {how}"
