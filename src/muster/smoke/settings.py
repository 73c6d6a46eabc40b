"""What the user chose for a run of the suite, held against this node."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from muster import size, suite
from muster.bandwidth import floors
from muster.errors import MoreProcessesThanGpus, MoreRanksThanGpus, NotAFloor
from muster.node import Node
from muster.pins import Accelerator, Pins, Variant
from muster.topology import Topology, positive

DEFAULT_NPROC_PER_NODE = 2
SHM_FLAG = "--shm-size"


@dataclass(frozen=True)
class Wish:
    """What the user wrote for the run, unread; None where nothing was.

    `only` and `skip` are names of steps with commas, `floor` GB/s or the path of a file.
    """

    nproc_per_node: str | None = None
    shm_size: str | None = None
    step_timeout: str | None = None
    nnodes: str | None = None
    only: str | None = None
    skip: str | None = None
    quick: bool = False
    floor: str | None = None

    def words(self) -> list[str]:
        """The flags that say the same of how, and nothing of which steps."""
        values = {
            "--nnodes": self.nnodes,
            "--nproc-per-node": self.nproc_per_node,
            SHM_FLAG: self.shm_size,
            "--step-timeout": self.step_timeout,
            "--floor": self.floor,
        }
        given = [(flag, value) for flag, value in values.items() if value is not None]
        return [word for pair in given for word in pair]


@dataclass(frozen=True)
class Settings:
    """The run. `shm_named_by` says where `shm_bytes` comes from, `steps` are the names to run.

    `floors` is a busbw in GB/s or the TOML of a file, `repeat` the command without its steps. A
    fabric sets the switches `on_purpose`, and `nodes_floor_gb_s` for an all_reduce of all nodes.
    """

    topology: Topology
    shm_bytes: int
    shm_named_by: str
    step_timeout_s: int | None
    steps: tuple[str, ...] | None = None
    floors: str | None = None
    repeat: str = "./invokew smoke"
    on_purpose: tuple[str, ...] = ()
    nodes_floor_gb_s: float | None = None


def settings(
    pinned: Pins, variant: Variant, node: Node, wish: Wish, words: Sequence[str] = ()
) -> Settings:
    """What `wish` and the defaults come to on this node; `words` are the command's other flags."""
    topology = _topology(wish, node, variant)
    named = wish.shm_size is not None
    return Settings(
        topology=topology,
        shm_bytes=size.parse(wish.shm_size) if wish.shm_size is not None else pinned.shm_bytes,
        shm_named_by=SHM_FLAG if named else "docker/pins.toml",
        step_timeout_s=_number("--step-timeout", wish.step_timeout),
        steps=_steps(wish, topology.nnodes),
        floors=None if wish.floor is None else _floors(wish.floor),
        repeat=shlex.join(["./invokew", "smoke", *words, *wish.words()]),
    )


def _number(flag: str, text: str | None) -> int | None:
    return None if text is None else positive(flag, text)


def _steps(wish: Wish, nnodes: int) -> tuple[str, ...] | None:
    """The chosen steps; None for all of one node."""
    if nnodes == 1 and not (wish.only or wish.skip or wish.quick):
        return None
    return suite.chosen(
        nnodes=nnodes, quick=wish.quick, only=_names(wish.only), skip=_names(wish.skip)
    )


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _floors(text: str) -> str:
    """`text` if it is a number of GB/s, or the contents of the file that it names."""
    try:
        gb_s = float(text)
    except ValueError:
        path = Path(text)
        floors.read(path)
        return path.read_text(encoding="utf-8")
    if not 0 < gb_s < math.inf:
        raise NotAFloor(text)
    return text


def _topology(wish: Wish, node: Node, variant: Variant) -> Topology:
    """By default one rank a GPU, which the nodes on this machine share out; on a CPU two a node."""
    nnodes = _number("--nnodes", wish.nnodes) or 1
    nproc_per_node = _number("--nproc-per-node", wish.nproc_per_node)
    if variant.accelerator is Accelerator.CPU or node.gpus == 0:
        return Topology(nnodes, nproc_per_node or DEFAULT_NPROC_PER_NODE)
    nproc_per_node = nproc_per_node or max(1, node.gpus // nnodes)
    if nnodes * nproc_per_node > node.gpus:
        if nnodes == 1:
            raise MoreProcessesThanGpus(nproc_per_node, node.gpus)
        raise MoreRanksThanGpus(nnodes, nproc_per_node, node.gpus)
    return Topology(nnodes, nproc_per_node)
