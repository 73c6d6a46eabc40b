"""What preflight writes into a pod's log beside its words: an object of JSON on a line of its own.

    {"muster":"ended","host":"demo-0","step":{...}}

Each is written when it is known, so that a log that was cut off tells what there is; each names its
host, so that the lines of several pods may lie in one file, with whatever a tool puts before them.
"""

import base64
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from muster.bandwidth.series import Series
from muster.finding import Finding, Verdict
from muster.shape import Misshapen, shaped
from muster.steps import Step

SCHEMA: Final = 1
_KEY: Final = "muster"
# what such a line begins with
BEGIN: Final = f'{{"{_KEY}":"'
# packed, as many lines of NCCL's take some KiB: container runtimes split a line at 16 KiB
_NCCL_LINES: Final = 400
# characters that a piece may unpack to; a hostile one unpacks to a thousand times its size
_MOST_UNPACKED: Final = 2**22


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The first one. `nnodes` as torchrun has it, `started` in UTC as ISO 8601 writes it.

    `index` is the pod's, None of one without. `replaces`: an earlier pod of this index failed.
    """

    schema: int
    version: str
    started: str
    index: int | None
    nnodes: str
    replaces: bool
    command: str


@dataclass(frozen=True)
class Began:
    """A step that runs from now on."""

    step: str


@dataclass(frozen=True)
class Ended:
    """A step that has run, or was left out."""

    step: Step


@dataclass(frozen=True, kw_only=True)
class Known:
    """The doctor's measures by the names of its checks; what runs here, with its hashes."""

    facts: Mapping[str, str]
    versions: Mapping[str, str]
    hashes: Mapping[str, str]


@dataclass(frozen=True)
class Measured:
    """A bandwidth; its `nodes` are none, since a pod does not know the others' names."""

    series: Series


@dataclass(frozen=True)
class Nccl:
    """Some lines of a process's NCCL, packed: base64 of zlib."""

    packed: str

    @property
    def text(self) -> str:
        """Raises ValueError where it was damaged."""
        raw = base64.b64decode(self.packed, validate=True)
        try:
            return zlib.decompressobj().decompress(raw, _MOST_UNPACKED).decode(errors="replace")
        except zlib.error as error:
            raise ValueError(str(error)) from None


@dataclass(frozen=True)
class Found:
    """A Finding that no step made."""

    finding: Finding


@dataclass(frozen=True, kw_only=True)
class Closed:
    """The last one: the pod came to its verdict after `seconds`."""

    verdict: Verdict
    seconds: float


Record = Opened | Began | Ended | Known | Measured | Nccl | Found | Closed
_KINDS: Final[Mapping[str, type[Record]]] = {
    kind.__name__.lower(): kind
    for kind in (Opened, Began, Ended, Known, Measured, Nccl, Found, Closed)
}


def line(host: str, record: Record) -> str:
    """`record` of `host`, in ASCII: no terminal obeys it."""
    fields = {_KEY: type(record).__name__.lower(), "host": host, **asdict(record)}
    return json.dumps(fields, separators=(",", ":"))


def read(text: str, wash: Callable[[str], str]) -> tuple[str, Record] | None:
    """The host and the record of a log's line; None of any other line, and of one cut short.

    Every text in it goes through `wash`: JSON can hide what a terminal obeys. Raises Misshapen for
    what another Muster wrote, or nobody.
    """
    begin = text.find(BEGIN)
    if begin < 0:
        return None
    try:
        fields: dict[str, Any] = _washed(json.loads(text[begin:]), wash)
    except (ValueError, RecursionError):
        return None
    kind, host = fields.pop(_KEY), fields.pop("host", None)
    if kind not in _KINDS or not isinstance(host, str):
        raise Misshapen("$", f"{kind!r:.40} of {host!r:.40} is no line of preflight's")
    if kind == Opened.__name__.lower() and fields.get("schema") != SCHEMA:
        raise Misshapen("$.schema", f"is {fields.get('schema')!r:.40}, this Muster reads {SCHEMA}")
    return host, shaped(_KINDS[kind], fields)


def _washed(value: Any, wash: Callable[[str], str]) -> Any:  # noqa: ANN401  it is any JSON
    if isinstance(value, str):
        return wash(value)
    if isinstance(value, list):
        return [_washed(each, wash) for each in value]
    if isinstance(value, dict):
        return {wash(key): _washed(each, wash) for key, each in value.items()}
    return value


def packed(text: str) -> Iterator[Nccl]:
    """What a process's NCCL wrote, in pieces of whole lines."""
    lines = text.splitlines(keepends=True)
    for at in range(0, len(lines), _NCCL_LINES):
        piece = "".join(lines[at : at + _NCCL_LINES]).encode("utf-8", "replace")
        yield Nccl(base64.b64encode(zlib.compress(piece)).decode())
