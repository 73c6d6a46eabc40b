"""What a user asks of `render`, from flags or a file, read and checked."""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from muster import fabric as fabrics
from muster import size
from muster.errors import NotASize, NotNodes, SpecWrong
from muster.fabric import Fabric
from muster.manifests import documents
from muster.topology import NodeRange

KUBERNETES: Final = ("1.34", "1.35", "1.36", "1.37")
# https://kubernetes.io/docs/concepts/overview/working-with-objects/names/#dns-label-names
LABEL_LENGTH: Final = 63
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL_KEY = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]*(@sha256:[0-9a-f]{64})?")
# taints as kubectl writes them: KEY[=VALUE][:EFFECT]
_TOLERATION = re.compile(
    r"(?P<key>[^=:]+)(=(?P<value>[^:]*))?(:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)
MAX_NPROC_PER_NODE: Final = 1024


class Kind(StrEnum):
    """What the cluster is asked to run."""

    JOB = "job"
    JOBSET = "jobset"
    TRAINJOB = "trainjob"


class Code(StrEnum):
    """Where the script is: in the image, or carried by the manifest."""

    IMAGE = "image"
    CONFIGMAP = "configmap"


@dataclass(frozen=True)
class Toleration:
    """A taint that the pods bear; without `value` any value, without `effect` any effect."""

    key: str
    value: str | None
    effect: str | None


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One training job. Durations in seconds, sizes in bytes."""

    name: str
    image: str
    nnodes: NodeRange
    nproc_per_node: int
    fabric: Fabric
    kind: Kind = Kind.JOB
    kubernetes: str = KUBERNETES[-1]
    namespace: str = "default"
    script: str = "train/ddp_demo.py"
    arguments: tuple[str, ...] = ()
    code: Code = Code.IMAGE
    cpu: bool = False
    memory_bytes: int | None = None
    shm_bytes: int | None = None
    max_restarts: int = 3
    checkpoint: str | None = None
    checkpoint_s: int = 60
    deadline_s: int | None = None
    ttl_s: int | None = None
    queue: str | None = None
    topology: str | None = None
    gang: bool = False
    preflight: bool = False
    priority_class: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


# ---- values ------------------------------------------------------------------------------------


class Unfit(Exception):
    """A value is not what its field takes; the text says what that is."""


def _text(value: object) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise Unfit("a text")
    return value


def _matching(pattern: re.Pattern[str], what: str, length: int = 253) -> Callable[[object], str]:
    def read(value: object) -> str:
        text = _text(value)
        if not pattern.fullmatch(text) or len(text) > length:
            raise Unfit(what)
        return text

    return read


def _whole(least: int, most: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise Unfit(f"a whole number from {least} to {most}")
        return value

    return read


def _nnodes(value: object) -> NodeRange:
    try:
        return NodeRange.parse("nnodes", str(value))
    except NotNodes:
        raise Unfit("a number of nodes from 1 to 100000, or MIN:MAX of an elastic job") from None


def _size(value: object) -> int:
    try:
        return size.parse(_text(value))
    except NotASize as error:
        raise Unfit(error.remedy) from None


def _switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise Unfit("true or false")
    return value


def _one_of(kind: type[StrEnum]) -> Callable[[object], Any]:
    def read(value: object) -> StrEnum:
        if value not in list(kind):
            raise Unfit(f"one of: {', '.join(kind)}")
        return kind(str(value))

    return read


def _kubernetes(value: object) -> str:
    if value not in KUBERNETES:
        raise Unfit(f"one of: {', '.join(KUBERNETES)} (in a file, in quotes)")
    return str(value)


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise Unfit("a list of texts")
    return tuple(value)


def _pairs(
    key: re.Pattern[str], text: re.Pattern[str] | None
) -> Callable[[object], dict[str, str]]:
    """A mapping, or a list of KEY=VALUE."""

    def read(value: object) -> dict[str, str]:
        if isinstance(value, list | tuple):
            entries = [str(each).partition("=") for each in value]
            if not all(equals for _, equals, _ in entries):
                raise Unfit("KEY=VALUE")
            value = {name: text for name, _, text in entries}
        if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
            raise Unfit("KEY=VALUE, the values in quotes in a file")
        for name, content in value.items():
            if not key.fullmatch(str(name)) or (text and not text.fullmatch(content)):
                raise Unfit(
                    f"names and values that Kubernetes takes, which {name}={content} is not"
                )
        return dict(value)

    return read


def _tolerations(value: object) -> tuple[Toleration, ...]:
    found = [_TOLERATION.fullmatch(text) for text in _texts(value)]
    if not all(found):
        raise Unfit("taints as kubectl writes them: KEY[=VALUE][:EFFECT]")
    return tuple(Toleration(each["key"], each["value"], each["effect"]) for each in found if each)


def _checkpoint(value: object) -> str:
    kind, _, name = _text(value).partition(":")
    if kind != "pvc" or not _DNS_NAME.fullmatch(name):
        raise Unfit("pvc:NAME, a PersistentVolumeClaim that every node may write (ReadWriteMany)")
    return name


_YEAR_S = 366 * 24 * 3600
_READERS: dict[str, Callable[[object], Any]] = {
    "name": _matching(_DNS_LABEL, "a DNS label: a-z, 0-9 and -, a letter first", LABEL_LENGTH),
    "image": _matching(_IMAGE, "an image: REGISTRY/NAME@sha256:DIGEST", 512),
    "nnodes": _nnodes,
    "nproc_per_node": _whole(1, MAX_NPROC_PER_NODE),
    "fabric": _text,
    "kind": _one_of(Kind),
    "kubernetes": _kubernetes,
    "namespace": _matching(_DNS_LABEL, "a DNS label: a-z, 0-9 and -", LABEL_LENGTH),
    "script": _text,
    "arguments": _texts,
    "code": _one_of(Code),
    "cpu": _switch,
    "memory": _size,
    "shm_size": _size,
    "max_restarts": _whole(0, 1000),
    "checkpoint": _checkpoint,
    "checkpoint_s": _whole(0, 24 * 3600),
    "deadline_s": _whole(120, _YEAR_S),
    "ttl_s": _whole(0, _YEAR_S),
    "queue": _matching(_DNS_NAME, "the name of a LocalQueue"),
    "topology": _matching(_LABEL_KEY, "the label of a topology level, e.g. kubernetes.io/hostname"),
    "gang": _switch,
    "preflight": _switch,
    "priority_class": _matching(_DNS_NAME, "the name of a PriorityClass"),
    "node_selector": _pairs(_LABEL_KEY, _LABEL_VALUE),
    "tolerations": _tolerations,
    "env": _pairs(_VARIABLE, None),
}
_FIELDS = {"memory": "memory_bytes", "shm_size": "shm_bytes"}
REQUIRED: Final = ("name", "image", "nnodes", "nproc_per_node")


# ---- where they come from ----------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """A value as the user gave it, and where: "--nnodes", "job.toml:3"."""

    value: object
    where: str


def from_flags(flags: Mapping[str, object]) -> dict[str, Given]:
    """The flags that were given; a flag that was not is None, False or ()."""
    return {
        name: Given(value, f"--{name.replace('_', '-')}")
        for name, value in flags.items()
        if value not in (None, False, (), [])
    }


def from_file(path: Path) -> dict[str, Given]:
    """The values of a TOML or YAML file, by field.

    Raises SpecWrong for what cannot be read and for a key that no field has.
    """
    values, line = _toml(path) if path.suffix == ".toml" else _yaml(path)
    found = {key: Given(value, f"{path}:{line(key)}") for key, value in values.items()}
    for key, given in found.items():
        if key not in _READERS:
            raise SpecWrong(given.where, key, f"one of these keys: {', '.join(_READERS)}")
    return found


def _toml(path: Path) -> tuple[dict[str, Any], Callable[[str], int]]:
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise SpecWrong(str(path), "", f"a file that can be read ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise SpecWrong(str(path), "", f"TOML ({error})") from None
    lines = text.splitlines()

    def line(key: str) -> int:
        starts = re.compile(rf"\s*\[?\s*[\"']?{re.escape(key)}[\"']?\s*[].=]")
        return next((n for n, each in enumerate(lines, 1) if starts.match(each)), 1)

    return values, line


def _yaml(path: Path) -> tuple[dict[str, Any], Callable[[str], int]]:
    found = documents.read(path)
    if len(found) != 1 or not isinstance(found[0].data, dict):
        raise SpecWrong(str(path), "", "one mapping of fields to values")
    return {str(key): value for key, value in found[0].data.items()}, found[0].line


# ---- together ----------------------------------------------------------------------------------


def build(given: Mapping[str, Given], folder: Path) -> Spec:
    """The Spec of `given`, on a fabric of `folder` (k8s/fabrics).

    Raises SpecWrong, naming where the value stands, for one that does not fit its field or another.
    """
    if missing := [name for name in REQUIRED if name not in given]:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise SpecWrong(flags, "", "a value: without it no job can be written")
    values: dict[str, Any] = {}
    for name, each in given.items():
        try:
            values[_FIELDS.get(name, name)] = _READERS[name](each.value)
        except Unfit as unfit:
            raise SpecWrong(each.where, each.value, str(unfit)) from None
    values["fabric"] = fabrics.read(folder, values.get("fabric", "tcp"))
    assert values.keys() <= {each.name for each in fields(Spec)}
    spec = Spec(**values)
    _check_together(spec, given)
    return spec


def hostname(spec: Spec, index: int) -> str:
    """The host name of pod `index`: what the Job, JobSet or TrainJob controller calls it."""
    return f"{job_name(spec)}-{index}"


def job_name(spec: Spec) -> str:
    """The name of the Job that makes the pods: JobSet's controller adds its own parts.

    https://jobset.sigs.k8s.io/docs/concepts/#jobset
    """
    return spec.name if spec.kind is Kind.JOB else f"{spec.name}-node-0"


def _check_together(spec: Spec, given: Mapping[str, Given]) -> None:
    for name, fits, wanted in _conditions(spec):
        if not fits:
            there = given.get(name, Given(getattr(spec, name, ""), f"--{name.replace('_', '-')}"))
            raise SpecWrong(there.where, there.value, wanted)


def _conditions(spec: Spec) -> list[tuple[str, bool, str]]:
    """Field, whether it fits the others, and what would fit."""
    longest = hostname(spec, spec.nnodes.most - 1)
    room = LABEL_LENGTH - (len(longest) - len(spec.name))
    gpus = spec.fabric.gpus_per_node
    return [
        (
            "name",
            len(longest) <= LABEL_LENGTH,
            f"at most {room} letters: the pod {longest} would have more than {LABEL_LENGTH}",
        ),
        (
            "nproc_per_node",
            gpus is None or spec.nproc_per_node <= gpus,
            f"at most {gpus}, the GPUs of a node of {spec.fabric.name}",
        ),
        (
            "cpu",
            not spec.cpu or spec.fabric.name == "tcp",
            f"left out: the fabric {spec.fabric.name} is for nodes with GPUs",
        ),
        (
            "kind",
            not (spec.nnodes.elastic and spec.kind is Kind.TRAINJOB),
            "job or jobset: a TrainJob has a fixed number of nodes",
        ),
        ("topology", spec.topology is None or bool(spec.queue or spec.gang), "--queue beside it"),
        (
            "gang",
            not spec.gang or (spec.kind is Kind.JOB and spec.kubernetes == "1.37"),
            "left out: only a Job of Kubernetes 1.37 is scheduled as a gang without an add-on",
        ),
        ("gang", not (spec.gang and spec.queue), "left out: Kueue admits all pods or none"),
        (
            "shm_size",
            spec.shm_bytes is None
            or spec.memory_bytes is None
            or spec.shm_bytes < spec.memory_bytes,
            "less than --memory: what is in /dev/shm counts against it",
        ),
    ]
