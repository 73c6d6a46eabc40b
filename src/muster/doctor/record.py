"""Frozen dataclasses as JSON and back."""

import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, Self, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Recorded:
    """A dataclass of dataclasses, tuples, dicts of text and plain values, with a recorded form."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, recorded: Mapping[str, Any]) -> Self:
        """What to_dict gave, also after a way through JSON; TypeError when it is something else."""
        made: Self = _value(cls, recorded)
        return made


def _value(kind: Any, recorded: Any) -> Any:  # noqa: ANN401  a type is a value here
    """`recorded` as a value of the type `kind`."""
    if is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, recorded)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        return None if recorded is None else _value(arguments[0], recorded)
    if origin is tuple:
        kinds = arguments[:1] * len(recorded) if arguments[1:] == (...,) else arguments
        return tuple(map(_value, kinds, recorded))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(recorded)
    return dict(recorded) if origin is dict else recorded


def _dataclass(kind: type, recorded: Any) -> Any:  # noqa: ANN401
    if not isinstance(recorded, Mapping):
        raise TypeError(f"a {kind.__name__} is recorded as an object, not as {recorded!r}")
    hints = get_type_hints(kind)
    known = {each.name for each in fields(kind)}
    given = {name: _value(hints[name], text) for name, text in recorded.items() if name in known}
    return kind(**given)
