"""JSON made into dataclasses, strictly: what is not of their shape is named by its place."""

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

_Shape = TypeVar("_Shape")


class Misshapen(Exception):
    """A value that is not of the wanted shape: `where` it stands, and `why`."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"{where}: {why}")
        self.where, self.why = where, why


def shaped(kind: type[_Shape], value: object, where: str = "$") -> _Shape:
    """`value`, as json.loads made it, as the dataclass `kind`.

    Its fields may be dataclasses, enums, str, int, float, bool, tuple[X, ...], Mapping[str, X], and
    any of them or None. Raises Misshapen, also where `kind` itself raises a ValueError.
    """
    made: _Shape = _shaped(kind, value, where)
    return made


def _shaped(kind: Any, value: object, where: str) -> Any:  # noqa: ANN401  it is what `kind` says
    if isinstance(kind, UnionType):
        (some,) = (each for each in get_args(kind) if each is not type(None))
        return None if value is None else _shaped(some, value, where)
    origin = get_origin(kind)
    if origin is tuple:
        items = _of_type(list, value, where)
        each = get_args(kind)[0]
        return tuple(_shaped(each, item, f"{where}[{at}]") for at, item in enumerate(items))
    if origin is Mapping:
        entries = _of_type(dict, value, where)
        each = get_args(kind)[1]
        return {key: _shaped(each, entry, f"{where}.{key}") for key, entry in entries.items()}
    if dataclasses.is_dataclass(kind):
        return _record(kind, _of_type(dict, value, where), where)
    if issubclass(kind, Enum):
        return _member(kind, value, where)
    return _scalar(kind, value, where)


def _record(kind: Any, fields: Mapping[str, object], where: str) -> Any:  # noqa: ANN401
    hints = _hints(kind)
    if missing := [name for name in hints if name not in fields]:
        raise Misshapen(where, f"lacks {', '.join(missing)}")
    if unknown := [name for name in fields if name not in hints]:
        raise Misshapen(where, f"has unknown keys: {', '.join(unknown)}")
    made = {name: _shaped(hint, fields[name], f"{where}.{name}") for name, hint in hints.items()}
    try:
        return kind(**made)
    except ValueError as error:
        raise Misshapen(where, str(error)) from None


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _member(kind: type[Enum], value: object, where: str) -> Enum:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(each.value) for each in kind)
        raise Misshapen(where, f"{value!r:.80} is not one of: {known}") from None


def _scalar(kind: type, value: object, where: str) -> object:
    # JSON has one kind of number; True is an int to Python, and none to JSON
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 2**1000 else math.inf
    found = _of_type(kind, value, where)
    if isinstance(found, float) and not math.isfinite(found):
        raise Misshapen(where, "is beyond what a number holds")
    return found


def _of_type(kind: type, value: object, where: str) -> Any:  # noqa: ANN401
    if type(value) is not kind:
        raise Misshapen(where, f"{value!r:.80} is not of type {kind.__name__}")
    return value
