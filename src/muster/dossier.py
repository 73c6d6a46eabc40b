"""All that a run of the smoke suite leaves, as `smoke --json` writes it and others read it.

docs/smoke.schema.json is the same for readers in other languages.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from muster.bandwidth.series import Series
from muster.errors import ReportBroken, ReportOfOtherSchema, ReportUnreadable
from muster.explain.picture import Picture
from muster.finding import Finding, Verdict
from muster.shape import Misshapen, shaped
from muster.steps import Step

SCHEMA = 2


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

    @property
    def network(self) -> str:
        direct = {True: ", GPUDirect", False: ", no GPUDirect", None: ""}[self.gpu_direct]
        return f"{' and '.join(self.networks) or 'not told'}{direct}"

    @property
    def talk(self) -> str:
        """How GPUs talk, without the counts: they differ with a node's place in the rings."""
        return ", ".join(sorted(self.links)) or "not told"

    @property
    def graph(self) -> str:
        told = [f"{self.rings} rings"] if self.rings else []
        told += ["trees"] if self.trees else []
        told += [f"{self.nvls} NVLS channels"] if self.nvls else []
        return ", ".join(told) or "not told"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine of the run. `missing` says why of one that left not all of its results.

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
