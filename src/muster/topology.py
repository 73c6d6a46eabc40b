"""nnodes, nproc_per_node and what follows from them, in torchrun's words."""

from dataclasses import dataclass

from muster.errors import NotANumber


@dataclass(frozen=True)
class Topology:
    """`nnodes` machines that each run `nproc_per_node` ranks."""

    nnodes: int
    nproc_per_node: int

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node


def positive(flag: str, text: str) -> int:
    """The whole number above 0 that `text` spells, or NotANumber naming `flag`."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise NotANumber(flag, text)
    return int(text)
