"""nnodes, nproc_per_node and what follows from them, in torchrun's words."""

import re
from dataclasses import dataclass

from muster.errors import NotANumber, NotNodes

# the parallelism that Kubernetes allows an Indexed Job: maxParallelismForIndexedJob in
# https://github.com/kubernetes/kubernetes/blob/master/pkg/apis/batch/validation/validation.go
MOST_NODES = 100_000
_NODES = re.compile(r"([0-9]{1,18})(?::([0-9]{1,18}))?")


@dataclass(frozen=True)
class Topology:
    """`nnodes` machines that each run `nproc_per_node` ranks."""

    nnodes: int
    nproc_per_node: int

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node


@dataclass(frozen=True)
class NodeRange:
    """torchrun's --nnodes: one number of machines, or for an elastic job `least` to `most`."""

    least: int
    most: int

    @classmethod
    def parse(cls, flag: str, text: str) -> "NodeRange":
        """The nodes that `text` spells, "4" or "2:4", or NotNodes naming `flag`."""
        match = _NODES.fullmatch(text)
        if match is None:
            raise NotNodes(flag, text, "is neither a number of nodes nor a MIN:MAX")
        nodes = cls(int(match[1]), int(match[2] or match[1]))
        if nodes.least == 0:
            raise NotNodes(flag, text, "asks for no node")
        if nodes.least > nodes.most:
            raise NotNodes(flag, text, "has its MIN over its MAX")
        if nodes.most > MOST_NODES:
            raise NotNodes(flag, text, f"is over {MOST_NODES} nodes, the most of an Indexed Job")
        return nodes

    @property
    def elastic(self) -> bool:
        return self.least < self.most

    def __str__(self) -> str:
        return f"{self.least}:{self.most}" if self.elastic else str(self.most)


def positive(flag: str, text: str) -> int:
    """The whole number above 0 that `text` spells, or NotANumber naming `flag`."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise NotANumber(flag, text)
    return int(text)
