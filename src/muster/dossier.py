"""All that a run of the smoke suite leaves, as `smoke --json` writes it and others read it.

docs/smoke.schema.json is the same for readers in other languages.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from muster.bandwidth.floors import Floor
from muster.bandwidth.results import Row, Run
from muster.errors import ReportBroken, ReportOfOtherSchema, ReportUnreadable
from muster.explain.picture import Picture
from muster.finding import Finding, Outcome, Verdict
from muster.shape import Misshapen, shaped

SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the suite. `measure` is what it measured, or why it does not apply or did not run.

    `command` repeats it, and nothing else, on one line.
    """

    name: str
    outcome: Outcome
    seconds: float
    limit_s: float | None
    measure: str
    findings: tuple[Finding, ...]
    output: str
    command: str


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


@dataclass(frozen=True, kw_only=True)
class Watched:
    """The three things to watch: the network chosen, how GPUs talk, rings and trees.

    The fields are those of muster.explain.picture's Node and Channels.
    """

    networks: tuple[str, ...]
    gpu_direct: bool | None
    links: Mapping[str, int]
    rings: int
    trees: bool
    nvls: int


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine of the run. `missing` says why of one that left no results of its own.

    `facts` are the doctor's measures by the names of its checks; `watched` is None where no NCCL
    ran.
    """

    host: str
    missing: str | None
    facts: Mapping[str, str]
    watched: Watched | None


@dataclass(frozen=True, kw_only=True)
class ImageRef:
    """The image that the suite ran in: as it is called, and the hash of its content."""

    ref: str
    id: str


@dataclass(frozen=True, kw_only=True)
class Dossier:
    """`started` is a time in UTC, as ISO 8601 writes it. `image` is None of a run without one.

    `command_line` repeats the whole run; `run` are its flags, `versions` and `hashes` what ran.
    """

    verdict: Verdict
    started: str
    seconds: float
    muster: str
    command_line: str
    image: ImageRef | None
    run: Mapping[str, str]
    versions: Mapping[str, str]
    hashes: Mapping[str, str]
    nodes: tuple[Node, ...]
    steps: tuple[Step, ...]
    findings: tuple[Finding, ...]
    bandwidth: tuple[Series, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "command": "smoke", **asdict(self)}


def watched(picture: Picture) -> dict[str, Watched]:
    """The three things by host, from what explain drew of NCCL's logs."""
    channels = picture.channels
    return {
        node.host: Watched(
            networks=node.networks,
            gpu_direct=node.gpu_direct,
            links=node.links,
            rings=channels.rings if channels else 0,
            trees=channels.trees if channels else False,
            nvls=channels.nvls if channels else 0,
        )
        for node in picture.nodes
    }


def read(path: Path) -> Dossier:
    """The dossier that `smoke --json` wrote to `path`.

    Raises ReportUnreadable, ReportBroken (truncated, or of another shape), ReportOfOtherSchema.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ReportUnreadable(path, error.strerror or str(error)) from None
    try:
        document = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ReportBroken(path, "it is nested too deeply") from None
    except ValueError as error:
        raise ReportBroken(path, f"it is not JSON, or not all of it is here: {error}") from None
    return _dossier(path, document)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _dossier(path: Path, document: object) -> Dossier:
    if not isinstance(document, dict) or document.get("command") != "smoke":
        raise ReportBroken(path, "it is not a report of smoke: it has no command smoke")
    if document.get("schema") != SCHEMA or type(document["schema"]) is not int:
        raise ReportOfOtherSchema(path, document.get("schema"), SCHEMA)
    fields = {key: value for key, value in document.items() if key not in {"schema", "command"}}
    try:
        return shaped(Dossier, fields)
    except Misshapen as wrong:
        raise ReportBroken(path, str(wrong)) from None
