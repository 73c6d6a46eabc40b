"""Objects against the schemas of a Kubernetes version: every field known, every type right.

The schemas use few of JSON Schema's words, and these are checked here: to import jsonschema takes
as long as all the rest of a lint.
"""

import difflib
import functools
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from muster.errors import UnknownKubernetes
from muster.manifests.documents import Document, KeyPath, at

VERSIONS: Final = ("1.34", "1.35", "1.36", "1.37")
# the name that Kubernetes's schemas give themselves
DEFINITIONS: Final = "https://kubernetes.io/api/_definitions.json"
CRDS: Final = Path(__file__).with_name("crds.json")
_CRDS_ID: Final = "https://muster/crds.json"
_POD_SPEC: Final = "io.k8s.api.core.v1.PodSpec"


class Fault(StrEnum):
    """What is wrong with a value."""

    UNKNOWN_FIELD = "unknown field"
    WRONG_TYPE = "wrong type"
    MISSING = "missing"
    UNKNOWN_KIND = "unknown kind"
    UNCHECKED = "unchecked"


@dataclass(frozen=True)
class Misfit:
    """A value that does not fit; `what` says it in words, `near` what may have been meant."""

    document: Document
    path: KeyPath
    fault: Fault
    what: str
    near: str | None = None

    @property
    def readable(self) -> bool:
        """Whether the rest of the object can be read all the same."""
        return self.fault in {Fault.UNKNOWN_FIELD, Fault.UNCHECKED}


def misfits(document: Document, kubernetes: str) -> tuple[Misfit, ...]:
    """Everything in the object that its schema does not allow; UnknownKubernetes."""
    if kubernetes not in VERSIONS:
        raise UnknownKubernetes(kubernetes, VERSIONS)
    found = [*_null_items(document, document.data, ())]
    reference = _reference(document, kubernetes)
    if isinstance(reference, Misfit):
        found.append(reference)
        for path in _pod_specs(document.data, ()):
            found += _errors(document, f"{DEFINITIONS}#/$defs/{_POD_SPEC}", path, kubernetes)
    else:
        found += _errors(document, reference, (), kubernetes)
    # a JobSet's pods are checked twice, by Kubernetes's schema and by the CRD's
    once = {(each.path, each.fault): each for each in found}.values()
    return tuple(sorted(once, key=lambda each: document.line(*each.path)))


@functools.cache
def definitions(kubernetes: str) -> dict[str, Any]:
    """kubernetes-validate's schemas of every type of a version, unknown fields refused.

    The package itself is not imported: its checks end at the first error.
    """
    package = importlib.util.find_spec("kubernetes_validate")
    assert package is not None
    assert package.submodule_search_locations
    folder = Path(package.submodule_search_locations[0]) / "kubernetes-json-schema"
    path = folder / f"v{kubernetes}.0-local-strict/_definitions.json"
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


@functools.cache
def _crds() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(CRDS.read_bytes())
    return found


@functools.cache
def _kinds(kubernetes: str) -> Mapping[tuple[str, str], str]:
    """The schema of each API version and kind."""
    found = {}
    for name, schema in definitions(kubernetes)["$defs"].items():
        for each in schema.get("x-kubernetes-group-version-kind", ()):
            group, version = each["group"], each["version"]
            api_version = f"{group}/{version}" if group else version
            found[api_version, each["kind"]] = f"{DEFINITIONS}#/$defs/{name}"
    for api_version, kinds in _crds()["kinds"].items():
        for kind, reference in kinds.items():
            found[api_version, kind] = f"{_CRDS_ID}{reference}"
    return found


def _reference(document: Document, kubernetes: str) -> str | Misfit:
    """The schema of the object, or why there is none."""
    for field in ("apiVersion", "kind"):
        if not isinstance(document.data.get(field), str):
            return Misfit(document, (), Fault.MISSING, f"the object has no {field}")
    api_version, kind = document.api_version, str(document.data["kind"])
    known = _kinds(kubernetes)
    if (api_version, kind) in known:
        return known[api_version, kind]
    near = _near_kind(api_version, kind, known)
    groups = {_group(version) for version, _ in known}
    if _group(api_version) not in groups:
        what = f"{kind} ({api_version}) is not checked: no schema of it is at hand"
        return Misfit(document, ("kind",), Fault.UNCHECKED, what, near)
    others = _others(kubernetes, lambda version: (api_version, kind) in _kinds(version))
    what = f"there is no {kind} in {api_version} of Kubernetes {kubernetes}{_has(others)}"
    return Misfit(document, ("kind",), Fault.UNKNOWN_KIND, what, near)


def _group(api_version: str) -> str:
    return api_version.rpartition("/")[0]


def _near_kind(api_version: str, kind: str, known: Mapping[tuple[str, str], str]) -> str | None:
    versions = [version for version, each in known if each == kind]
    if versions:
        return f"{kind} in {' or '.join(versions)}"
    kinds = [each for version, each in known if version == api_version]
    return next(iter(difflib.get_close_matches(kind, kinds, n=1)), None)


def _others(kubernetes: str, known_to: Callable[[str], bool]) -> list[str]:
    """The versions at hand that know what this one does not."""
    return [version for version in VERSIONS if version != kubernetes and known_to(version)]


def _has(versions: list[str]) -> str:
    return f"; {', '.join(versions)} has it" if versions else ""


def _errors(document: Document, reference: str, path: KeyPath, kubernetes: str) -> Iterator[Misfit]:
    for error in _checker(kubernetes).errors(at(document.data, path), reference, path):
        if error.word == "additionalProperties":
            yield from _unknown(document, reference, path, kubernetes, error)
        elif error.word == "required":
            for name in error.wanted:
                if name not in error.value:
                    what = f"{dotted(error.path) or 'the object'} has no {name}"
                    yield Misfit(document, (*error.path, name), Fault.MISSING, what)
        else:
            wanted = _wanted(error)
            what = f"{dotted(error.path)} is {_said(error.value)}, where {wanted} must be"
            yield Misfit(document, error.path, Fault.WRONG_TYPE, what, _quoted(error))


def _unknown(
    document: Document, reference: str, path: KeyPath, kubernetes: str, error: "_Error"
) -> Iterator[Misfit]:
    fields = error.schema["properties"]
    for name in sorted(set(error.value) - set(fields)):

        def known_to(version: str, name: str = name) -> bool:
            others = _checker(version).errors(at(document.data, path), reference, path)
            return not any(
                each.word == "additionalProperties"
                and each.path == error.path
                and name not in each.schema["properties"]
                for each in others
            )

        others = _others(kubernetes, known_to)
        near = None if others else next(iter(difflib.get_close_matches(name, fields, n=1)), None)
        where = (*error.path, name)
        what = f"{dotted(where)} is no field of Kubernetes {kubernetes}{_has(others)}"
        yield Misfit(document, where, Fault.UNKNOWN_FIELD, what, near)


def _null_items(document: Document, value: object, path: KeyPath) -> Iterator[Misfit]:
    """Items that are null: the API server makes empty objects and texts of them."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _null_items(document, item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if item is None:
                what = f"{dotted((*path, index))} is empty, where a value must be"
                yield Misfit(document, (*path, index), Fault.WRONG_TYPE, what)
            yield from _null_items(document, item, (*path, index))


def _pod_specs(value: object, path: KeyPath) -> Iterator[KeyPath]:
    """Where the specs of pods stand in an object that has no schema."""
    if isinstance(value, dict):
        if isinstance(value.get("containers"), list):
            yield path
            return
        for key, item in value.items():
            yield from _pod_specs(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _pod_specs(item, (*path, index))


def dotted(path: KeyPath) -> str:
    """A path as one writes it: spec.containers[0].name."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.removeprefix(".")


def _said(value: object) -> str:
    words = {dict: "an object", list: "a list"}
    if isinstance(value, dict | list):
        return words[type(value)]
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {value}"
    return f"the text {value!r}"


def _wanted(error: "_Error") -> str:
    if error.word == "enum":
        return " or ".join(map(repr, error.wanted))
    words = {
        "string": "text",
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "object": "an object",
        "array": "a list",
    }
    return " or ".join(words[name] for name in _types(error.wanted))


def _types(wanted: object) -> list[str]:
    """The types of `type` and of `oneOf`, null left out."""
    if isinstance(wanted, str):
        return [] if wanted == "null" else [wanted]
    if isinstance(wanted, Mapping):
        return _types(wanted.get("type", []))
    assert isinstance(wanted, list)
    return [name for each in wanted for name in _types(each)]


def _quoted(error: "_Error") -> str | None:
    """The same value as text, where only the quotes are missing."""
    plain = isinstance(error.value, bool | int | float)
    if error.word == "enum" or not plain or "string" not in _types(error.wanted):
        return None
    return json.dumps(str(error.value).lower())


# ---- JSON Schema -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Error:
    """A value, and the word of a schema that does not allow it."""

    path: KeyPath
    value: Any
    word: str
    schema: Mapping[str, Any]

    @property
    def wanted(self) -> Any:  # noqa: ANN401 - each word has a value of its own kind
        return self.schema[self.word]


class _Checker:
    """Values against the schemas of a version."""

    def __init__(self, kubernetes: str) -> None:
        self._files = {DEFINITIONS: definitions(kubernetes)["$defs"], _CRDS_ID: _crds()["$defs"]}

    def errors(self, value: object, reference: str, path: KeyPath) -> Iterator[_Error]:
        """What the schema at `reference` does not allow in `value`, which stands at `path`."""
        file, _, name = reference.partition("#/$defs/")
        return self._check(value, self._files[file][name], file, path)

    def _check(
        self, value: object, schema: Mapping[str, Any], file: str, path: KeyPath
    ) -> Iterator[_Error]:
        if reference := schema.get("$ref"):
            whole = f"{file}{reference}" if reference.startswith("#") else reference
            yield from self.errors(value, whole, path)
        for word, allows in _ALLOWS.items():
            if word in schema and not allows(value, schema):
                yield _Error(path, value, word, schema)
        for key, item, part in _parts(value, schema):
            if not isinstance(part, bool):
                yield from self._check(item, part, file, (*path, key))


_checker = functools.cache(_Checker)


def _parts(value: object, schema: Mapping[str, Any]) -> Iterator[tuple[str | int, object, Any]]:
    """Key, value and schema of each entry; True for a schema allows all, as False allows none."""
    if isinstance(value, dict):
        fields, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        for key, item in value.items():
            yield key, item, fields.get(key, others)
    elif isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield index, item, schema["items"]


def _is_of(value: object, wanted: str | list[str]) -> bool:
    """Whether the value is of the type, or of one of the types, that `type` may name."""
    names = {wanted} if isinstance(wanted, str) else {*wanted}
    if isinstance(value, bool):  # which Python takes for a number
        return "boolean" in names
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return (
        (value is None and "null" in names)
        or (isinstance(value, str) and "string" in names)
        or (isinstance(value, dict) and "object" in names)
        or (isinstance(value, list) and "array" in names)
        or (whole and "integer" in names)
        or (isinstance(value, int | float) and "number" in names)
    )


def _has_only_known(value: object, schema: Mapping[str, Any]) -> bool:
    if not isinstance(value, dict) or schema["additionalProperties"] is not False:
        return True
    return {*value} <= {*schema.get("properties", ())}


def _has_required(value: object, schema: Mapping[str, Any]) -> bool:
    return not isinstance(value, dict) or {*value} >= {*schema["required"]}


_ALLOWS: Final[Mapping[str, Callable[[Any, Mapping[str, Any]], bool]]] = {
    "type": lambda value, schema: _is_of(value, schema["type"]),
    "enum": lambda value, schema: value in schema["enum"],
    "oneOf": lambda value, schema: (
        sum(_is_of(value, each["type"]) for each in schema["oneOf"]) == 1
    ),
    "additionalProperties": _has_only_known,
    "required": _has_required,
}
