"""What joins the nodes, and what a pod and a container need to use it: k8s/fabrics, a file each."""

import difflib
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, SingleQuotedScalarString

from muster import patch
from muster.errors import FabricWrong, UnknownFabric


class Network(StrEnum):
    """What NCCL moves the data over."""

    TCP = "tcp"
    INFINIBAND = "ib"
    ROCE = "roce"
    EFA = "efa"
    TCPX = "tcpx"
    TCPXO = "tcpxo"
    GIB = "gib"


class PodSecurity(StrEnum):
    """The levels of the Pod Security Standards, the strictest first.

    https://kubernetes.io/docs/concepts/security/pod-security-standards/
    """

    RESTRICTED = "restricted"
    BASELINE = "baseline"
    PRIVILEGED = "privileged"


class DockerNetwork(StrEnum):
    """The network of a container that docker run starts."""

    BRIDGE = "bridge"
    HOST = "host"


@dataclass(frozen=True)
class DockerNeeds:
    """What docker run needs for the same; `note` says what it cannot be given by a flag."""

    devices: tuple[str, ...]
    cap_add: tuple[str, ...]
    network: DockerNetwork
    note: str


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """A fabric, or one shape of it.

    `using_network` are the names in NCCL's "Using network" line that mean this fabric, without the
    version that some plugins append (GPUDirectTCPX_v7). `busbw_floor_gb_s` is the busbw, in GB/s,
    that a large all_reduce must reach. `metadata`, `pod` and `container` are patches on the pod
    template's metadata, its spec, and the training container.
    """

    name: str
    summary: str
    network: Network
    using_network: tuple[str, ...]
    pod_security: PodSecurity
    gpus_per_node: int | None
    busbw_floor_gb_s: float | None
    sources: tuple[str, ...]
    docker: DockerNeeds
    metadata: CommentedMap
    pod: CommentedMap
    container: CommentedMap
    environment: CommentedMap


def names(folder: Path) -> tuple[str, ...]:
    """Every fabric by the name it is chosen by, sorted: efa-p5 where a fabric comes in shapes."""
    found: list[str] = []
    for path in folder.glob("*.yaml"):
        shapes = _reader(path, _text(path)).shapes
        found += [f"{path.stem}-{shape}" for shape in shapes] or [path.stem]
    return tuple(sorted(found))


def read(folder: Path, name: str) -> Fabric:
    """The fabric of this name; reads no other's file.

    Raises UnknownFabric, and FabricWrong with the line for a file that says what it may not.
    """
    for path, shape in _candidates(folder, name):
        reader = _reader(path, _text(path))
        if shape in (reader.shapes or [""]):
            return reader.fabric(name, shape)
    known = names(folder)
    shapes = [each for each in known if name and each.startswith(f"{name}-")]
    raise UnknownFabric(name, shapes or difflib.get_close_matches(name, known, n=2), known)


def _candidates(folder: Path, name: str) -> Iterator[tuple[Path, str]]:
    """A file and the shape in it, "" for none, of which `name` may be the name."""
    words = name.split("-") if _NAME.fullmatch(name) else []
    for count in range(len(words), 0, -1):
        path = folder / f"{'-'.join(words[:count])}.yaml"
        if path.is_file():
            yield path, "-".join(words[count:])


# ---- what a file may say -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Rule:
    """What a value has to be: `holds` decides, `wanted` says it."""

    wanted: str
    holds: Callable[[object], bool]


@dataclass(frozen=True)
class _Each:
    """A map of any keys, each value under the same rule."""

    rule: "_Rule | _Table"


_Table: TypeAlias = Mapping[str, "_Rule | _Each | _Table"]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are(holds: Callable[[str], bool]) -> Callable[[object], bool]:
    """Holds for a list of strings that all `holds` holds for."""
    return lambda value: (
        isinstance(value, list) and all(isinstance(item, str) and holds(item) for item in value)
    )


def _one_of(kind: type[StrEnum]) -> _Rule:
    known = [member.value for member in kind]
    return _Rule(f"one of: {', '.join(known)}", lambda value: value in known)


_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_QUOTED = (DoubleQuotedScalarString, SingleQuotedScalarString)
_TEXT = _Rule("a text", _is_text)
_TEXTS = _Rule("a list of texts", _are(_is_text))
_MAP = _Rule("a map", lambda value: isinstance(value, CommentedMap))
_DOCKER: _Table = {
    "devices": _TEXTS,
    "cap_add": _TEXTS,
    "network": _one_of(DockerNetwork),
    "note": _TEXT,
}
_SECTION: _Table = {
    "summary": _TEXT,
    "network": _one_of(Network),
    "using_network": _TEXTS,
    "pod_security": _one_of(PodSecurity),
    "gpus_per_node": _Rule(
        "a whole number above 0, or null",
        lambda value: value is None or (type(value) is int and value > 0),
    ),
    "busbw_floor_gb_s": _Rule(
        "a number above 0, or null",
        lambda value: (
            value is None
            or (isinstance(value, int | float) and not isinstance(value, bool) and value > 0)
        ),
    ),
    "sources": _Rule("a list of https:// addresses", _are(lambda url: url.startswith("https://"))),
    "docker": _DOCKER,
    "metadata": {"annotations": _Each(_TEXT), "labels": _Each(_TEXT)},
    "pod": _MAP,
    "container": _MAP,
    # unquoted, kubectl reads no, on and 1 as what they are not here
    "environment": _Each(_Rule("a text in quotes", lambda value: isinstance(value, _QUOTED))),
}
_REQUIRED = ("summary", "network", "using_network", "pod_security", "sources", "docker")


class _Reader:
    """Reads one file strictly: what is unknown, missing or of another type is named by its line."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.document = self._load(text)
        self._check(self.document, "", {**_SECTION, "shapes": _Each(_SECTION)})
        shapes = self.document.get("shapes", CommentedMap())
        for shape in shapes:
            if not (isinstance(shape, str) and _NAME.fullmatch(shape)):
                raise self._wrong(shapes, shape, f"shapes.{shape}", "is no name: a-z, 0-9 and -")
        self.shapes = tuple(shapes)

    def fabric(self, name: str, shape: str) -> Fabric:
        """The fabric under its full name, with what `shape` ("" for none) says laid over it."""
        said = patch.merged(self.document, {"shapes": None})
        if shape:
            said = patch.merged(said, self.document["shapes"][shape])
        lacks = [key for key in _REQUIRED if key not in said]
        lacks += [f"docker.{key}" for key in _DOCKER if key not in said.get("docker", _DOCKER)]
        if lacks:
            raise FabricWrong(self.path, 1, "", f"lacks {', '.join(lacks)}")
        return _fabric(name, said)

    def _load(self, text: str) -> CommentedMap:
        reader = YAML()
        reader.preserve_quotes = True
        try:
            document = reader.load(text)
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line = mark.line + 1 if mark else 1
            why = ", ".join(filter(None, (error.context, error.problem)))
            raise FabricWrong(self.path, line, "", why) from None
        except YAMLError as error:
            raise _unreadable(self.path, error) from None
        if not isinstance(document, CommentedMap):
            raise FabricWrong(self.path, 1, "", "is not a map")
        patch.settle(document)
        return document

    def _check(self, section: CommentedMap, where: str, table: _Table) -> None:
        for key in section:
            path = f"{where}.{key}" if where else str(key)
            if key not in table:
                raise self._wrong(section, key, path, f"is unknown; known: {', '.join(table)}")
            self._check_one(section, key, path, table[key])

    def _check_one(
        self, section: CommentedMap, key: object, path: str, rule: "_Rule | _Each | _Table"
    ) -> None:
        value = section[key]
        if isinstance(rule, _Rule):
            if not rule.holds(value):
                raise self._wrong(section, key, path, f"is {value!r}, not {rule.wanted}")
        elif not isinstance(value, CommentedMap):
            raise self._wrong(section, key, path, f"is {value!r}, not a map")
        elif isinstance(rule, _Each):
            self._check(value, path, dict.fromkeys(value, rule.rule))
        else:
            self._check(value, path, rule)

    def _wrong(self, section: CommentedMap, key: object, path: str, why: str) -> FabricWrong:
        line = section.lc.data[key][0] if key in section.lc.data else section.lc.line
        return FabricWrong(self.path, line + 1, path, why)


# ruamel takes long to read a file; the text is a part of the key, for a file may change
_reader = functools.cache(_Reader)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> FabricWrong:
    why = str(error).partition("\n")[0]
    return FabricWrong(path, 1, "", f"cannot be read: {why}")


def _fabric(name: str, said: CommentedMap) -> Fabric:
    docker = said["docker"]
    floor = said.get("busbw_floor_gb_s")
    return Fabric(
        name=name,
        summary=str(said["summary"]),
        network=Network(said["network"]),
        using_network=tuple(said["using_network"]),
        pod_security=PodSecurity(said["pod_security"]),
        gpus_per_node=said.get("gpus_per_node"),
        busbw_floor_gb_s=None if floor is None else float(floor),
        sources=tuple(said["sources"]),
        docker=DockerNeeds(
            tuple(docker["devices"]),
            tuple(docker["cap_add"]),
            DockerNetwork(docker["network"]),
            str(docker["note"]),
        ),
        metadata=said.get("metadata", CommentedMap()),
        pod=said.get("pod", CommentedMap()),
        container=said.get("container", CommentedMap()),
        environment=said.get("environment", CommentedMap()),
    )
