"""YAML as kubectl reads it, every value with its line."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from muster.errors import ManifestUnreadable

Key = str | int
KeyPath = tuple[Key, ...]

MOST_BYTES = 4 * 2**20
# the API server takes objects of up to 3 MiB (etcd 1.5): no manifest comes near these
MOST_DEPTH = 100
MOST_VALUES = 1_000_000

DEFAULT_NAMESPACE = "default"

# the kinds that Muster knows by name, and the group whose kind it is: others use the same names
_GROUPS = {
    "ClusterTrainingRuntime": "trainer.kubeflow.org",
    "ConfigMap": "",
    "CronJob": "batch",
    "DaemonSet": "apps",
    "Deployment": "apps",
    "Job": "batch",
    "JobSet": "jobset.x-k8s.io",
    "Namespace": "",
    "NetworkPolicy": "networking.k8s.io",
    "PersistentVolumeClaim": "",
    "Pod": "",
    "ReplicaSet": "apps",
    "Service": "",
    "StatefulSet": "apps",
    "TrainJob": "trainer.kubeflow.org",
    "TrainingRuntime": "trainer.kubeflow.org",
}


class _Loader(yaml.CSafeLoader):
    """YAML's scalars as the Go library under kubectl takes them.

    Beyond PyYAML it takes y and n as booleans and 1e3 as a number; it knows no base 60 and leaves
    dates as text. https://github.com/kubernetes-sigs/yaml/blob/master/goyaml.v2/resolve.go
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012 # as PyYAML declares it
    bool_values = {**yaml.CSafeLoader.bool_values, "y": True, "n": False}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Keys as text, as in JSON, and without what is null: to the API server it is absent."""
        self.flatten_mapping(node)
        found = {}
        for key, item in node.value:
            if not isinstance(key, yaml.ScalarNode):
                problem = "a key that is no plain value"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            value = self.construct_object(item, deep=deep)
            if value is not None:
                found[_key(self.construct_object(key))] = value
        return found


_SCALARS = (
    ("bool", r"y|Y|yes|Yes|YES|n|N|no|No|NO|true|True|TRUE|false|False|FALSE", "yYnNtTfF"),
    ("bool", r"on|On|ON|off|Off|OFF", "oO"),
    ("int", r"[-+]?(0b[01_]+|0[0-7_]+|0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+0123456789."),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
)
for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first)
    )


def _key(key: object) -> str:
    if isinstance(key, bool):
        return str(key).lower()
    return str(key)


@dataclass(frozen=True)
class Document:
    """One object of a manifest: `data` is plain Python, null values left out."""

    index: int
    data: dict[str, Any]
    file: str
    node: yaml.MappingNode = field(repr=False, compare=False)

    @property
    def kind(self) -> str:
        """The kind; with its group behind it where it only shares the name of a known one."""
        kind, group = str(self.data.get("kind", "")), self.api_version.rpartition("/")[0]
        if self.api_version and _GROUPS.get(kind, group) != group:
            return f"{kind}.{group}"
        return kind

    @property
    def api_version(self) -> str:
        return str(self.data.get("apiVersion", ""))

    @property
    def name(self) -> str:
        return str(mapping(self.data.get("metadata")).get("name", ""))

    @property
    def namespace(self) -> str:
        return str(mapping(self.data.get("metadata")).get("namespace", DEFAULT_NAMESPACE))

    def line(self, *path: Key, row: int | None = None) -> int:
        """The line, from 1, of the value at `path`, or of its nearest parent that is there.

        `row` counts the lines of a block scalar's text, from 0.
        """
        line, node = self._find(path)
        if row is not None and isinstance(node, yaml.ScalarNode) and node.style in {"|", ">"}:
            return int(node.start_mark.line) + 2 + row
        return line

    def where(self, *path: Key, row: int | None = None) -> str:
        """FILE:LINE of the value at `path`."""
        return f"{self.file}:{self.line(*path, row=row)}"

    def _find(self, path: KeyPath) -> tuple[int, yaml.Node]:
        node: yaml.Node = self.node
        line = node.start_mark.line + 1
        for key in path:
            found = _child(node, key)
            if found is None:
                break
            line, node = found
        return line, node


def _child(node: yaml.Node, key: Key) -> tuple[int, yaml.Node] | None:
    """The line and the node of an entry; a mapping's entry begins where its key does."""
    if isinstance(node, yaml.MappingNode):
        # the last one counts: what << merges in stands first
        for name, value in reversed(node.value):
            if name.value == str(key):
                return name.start_mark.line + 1, value
    elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        value = node.value[key]
        return value.start_mark.line + 1, value
    return None


def mapping(value: object) -> dict[str, Any]:
    """`value` where it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def mappings(value: object) -> list[dict[str, Any]]:
    """The items of a list, each of which is a mapping or taken as an empty one."""
    return [mapping(item) for item in value] if isinstance(value, list) else []


def strings(value: object) -> list[str]:
    """The items of a list as text."""
    return [str(item) for item in value] if isinstance(value, list) else []


def at(data: object, path: KeyPath) -> object:
    """The value at `path`, or None."""
    for key in path:
        if isinstance(data, dict):
            data = data.get(str(key))
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        else:
            return None
    return data


def whole(value: object, default: int) -> int:
    """`value` where it is a whole number, else the default."""
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def read(path: Path) -> tuple[Document, ...]:
    """The objects of a file; ManifestUnreadable where kubectl could not read it either."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ManifestUnreadable(str(path), None, error.strerror or str(error)) from error
    if len(content) > MOST_BYTES:
        raise ManifestUnreadable(str(path), None, f"larger than {MOST_BYTES // 2**20} MiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        what = f"not text: byte 0x{content[error.start]:02x} is not UTF-8"
        raise ManifestUnreadable(str(path), line, what) from error
    return parse(text, str(path))


def parse(text: str, file: str) -> tuple[Document, ...]:
    """The objects of a text; those of a List each on its own."""
    found = [
        Document(index, data, file, node) for index, (data, node) in enumerate(_objects(text, file))
    ]
    if not found:
        raise ManifestUnreadable(file, None, "holds no object")
    return tuple(found)


def _objects(text: str, file: str) -> Iterator[tuple[dict[str, Any], yaml.MappingNode]]:
    loader = _Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None
            _Shape(file).check(node)
            data = loader.construct_document(node)
            if data is not None:
                yield from _items(data, node, file)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        raise ManifestUnreadable(file, line, _problem(error, text, line)) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        what = f"not text: the character {error.character!r} is not allowed in YAML"
        raise ManifestUnreadable(file, line, what) from error
    except ValueError as error:
        # a number that Python does not read, as 0x_
        raise ManifestUnreadable(file, None, str(error)) from error
    finally:
        loader.dispose()


def _problem(error: yaml.MarkedYAMLError, text: str, line: int | None) -> str:
    lines = text.splitlines()
    if line is not None and line <= len(lines) and re.match(r"\s*\t", lines[line - 1]):
        return "a tab indents it, and YAML takes only spaces"
    words = [word for word in (error.context, error.problem) if word]
    return ", ".join(words) or "not YAML"


def _items(
    data: object, node: yaml.Node, file: str
) -> Iterator[tuple[dict[str, Any], yaml.MappingNode]]:
    if not isinstance(data, dict) or not isinstance(node, yaml.MappingNode):
        line = node.start_mark.line + 1
        raise ManifestUnreadable(file, line, f"a {_word(data)}, where an object must be")
    items = data.get("items")
    if data.get("kind") != "List" or not isinstance(items, list):
        yield data, node
        return
    found = _child(node, "items")
    assert found is not None
    for item, child in zip(items, found[1].value, strict=True):
        yield from _items(item, child, file)


def _word(value: object) -> str:
    return "list" if isinstance(value, list) else "plain value"


class _Shape:
    """What kubectl refuses and PyYAML takes: keys twice, anchors in themselves or without end."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._sizes: dict[int, int] = {}
        self._open: set[int] = set()

    def check(self, node: yaml.Node, depth: int = 0) -> int:
        """How many values the node holds, with each anchor counted wherever it is used."""
        if id(node) in self._sizes:
            return self._sizes[id(node)]
        if id(node) in self._open:
            raise self._unreadable(node, "an anchor that holds itself")
        if depth > MOST_DEPTH:
            raise self._unreadable(node, f"nested deeper than {MOST_DEPTH} levels")
        self._open.add(id(node))
        values = 1 + sum(self.check(child, depth + 1) for child in self._children(node))
        if values > MOST_VALUES:
            raise self._unreadable(node, f"its anchors make more than {MOST_VALUES} values")
        self._open.discard(id(node))
        self._sizes[id(node)] = values
        return values

    def _children(self, node: yaml.Node) -> Iterator[yaml.Node]:
        if isinstance(node, yaml.SequenceNode):
            yield from node.value
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            for key, value in node.value:
                line = key.start_mark.line + 1
                if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                    if key.value in lines:
                        what = f"the key {key.value!r} stands on line {lines[key.value]} already"
                        raise self._unreadable(key, what)
                    lines[key.value] = line
                yield key
                yield value

    def _unreadable(self, node: yaml.Node, what: str) -> ManifestUnreadable:
        return ManifestUnreadable(self._file, node.start_mark.line + 1, what)
