"""A run in its place: between which nodes it was, and what it must reach."""

from dataclasses import dataclass

from muster.bandwidth.floors import Floor
from muster.bandwidth.results import Row, Run


@dataclass(frozen=True, kw_only=True)
class Series:
    """One run of a collective over its sizes, across the hosts of `nodes`, and what it must reach.

    `claimed` is false where the figures say nothing of a link: on one GPU, or by gloo on a CPU.
    """

    run: Run
    backend: str
    nodes: tuple[str, ...]
    claimed: bool
    floor: Floor | None

    def __post_init__(self) -> None:
        if any(row.bytes < 1 or row.busbw < 0 for row in self.run.rows):
            raise ValueError("a row has at least 1 byte, and a busbw of at least 0 GB/s")
        if self.floor is not None and (self.floor.bytes < 0 or self.floor.busbw < 0):
            raise ValueError("a floor is not below 0")

    @property
    def largest(self) -> Row | None:
        return max(self.run.rows, key=lambda row: row.bytes, default=None)
