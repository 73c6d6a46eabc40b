"""A patch laid over a YAML document, in which comments stay with what they explain.

ruamel.yaml hangs a comment on the value before it: taken out of its document, a part would leave
its own first comment behind and bring the next part's along. `settle` hangs every comment on the
key or item that it stands at or above.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import CommentMark
from ruamel.yaml.scalarstring import FoldedScalarString, LiteralScalarString
from ruamel.yaml.tokens import CommentToken

# a map, a list or a scalar, plain or ruamel's; and what finds a part in it: a key or an index
_Yaml: TypeAlias = Any
_Key: TypeAlias = Any
_Tokens: TypeAlias = Any
_Commented = CommentedMap | CommentedSeq
_BlockScalar = LiteralScalarString | FoldedScalarString
_T = TypeVar("_T")

# a list of maps is a map by one of their keys: by name, but one volume may be mounted twice
_IDENTITY = {"volumeMounts": "mountPath"}


def settle(document: CommentedMap | CommentedSeq) -> None:
    """Hang each comment of a document, as read, on the key or item it stands at or above.

    What stands above the first key, the document's heading, and below the last one stays there.
    """
    _leave_below(document, _settle(document, []))


def merged(base: _T, patch: object) -> _T:
    """`base` with `patch` laid over it, of base's own kind; both are left as they are.

    Maps merge key by key, and None removes the key. Lists merge item by item where both have a map
    of the same name (of the same mountPath in volumeMounts); other items are appended. Anything
    else is replaced. What the patch comments is commented so in the result.
    """
    result: _Yaml = copied(base)
    incoming: _Yaml = copied(patch)
    below = _settle(result, []) if isinstance(result, _Commented) else []
    if isinstance(incoming, _Commented):
        _settle(incoming, _heading(incoming))
    if isinstance(result, dict) and isinstance(incoming, Mapping):
        _merge_map(result, incoming)
    elif isinstance(result, list) and isinstance(incoming, list):
        _merge_list(result, incoming, "name")
    else:
        kinds = f"{type(incoming).__name__} over {type(result).__name__}"
        raise TypeError(f"a patch is a map over a map or a list over a list, not {kinds}")
    _leave_below(result, below)
    return result  # type: ignore[no-any-return]


def copied(value: _T) -> _T:
    """A deep copy with its comments; copy.deepcopy copies all the places in the text as well."""
    if not isinstance(value, dict | list):
        return value
    twin: _Yaml = type(value)()
    for key, part in _entries(value):
        if isinstance(twin, dict):
            twin[key] = copied(part)
        else:
            twin.append(copied(part))
    if isinstance(value, _Commented):
        twin.ca.comment, twin.ca.end = value.ca.comment, value.ca.end
        twin.ca.items.update(value.ca.items)
        if value.fa.flow_style():
            twin.fa.set_flow_style()
        twin._yaml_set_line_col(value.lc.line, value.lc.col)  # noqa: SLF001 - no other setter
    return twin  # type: ignore[no-any-return]


# ---- merging -----------------------------------------------------------------------------------


def _merge_map(base: dict[_Key, _Yaml], patch: Mapping[_Key, _Yaml]) -> None:
    for key, value in patch.items():
        if value is None:
            _remove(base, key)
            continue
        _merge_entry(base, key, value, _IDENTITY.get(key, "name"), _shift(base, patch))
        _carry(base, key, patch, key)


def _merge_list(base: list[_Yaml], patch: Sequence[_Yaml], identity: str) -> None:
    for index, item in enumerate(patch):
        position = _position(base, item, identity)
        if position == len(base):
            base.append(None)
        _merge_entry(base, position, item, identity, _shift(base, patch))
        _carry(base, position, patch, index)


def _merge_entry(base: _Yaml, key: _Key, value: _Yaml, identity: str, shift: int) -> None:
    """Lay `value` over base[key]: merged if both are maps or both lists, else put in its place."""
    present = base[key] if isinstance(base, list) else base.get(key)
    if isinstance(present, dict) and isinstance(value, Mapping):
        _open(present, base)
        _merge_map(present, value)
    elif isinstance(present, list) and isinstance(value, list):
        _open(present, base)
        _merge_list(present, value, identity)
    else:
        base[key] = _brought(value, shift)


def _position(items: Sequence[_Yaml], item: _Yaml, identity: str) -> int:
    """Where the list has an item of the same identity, or its length."""
    name = item.get(identity) if isinstance(item, Mapping) else None
    if name is not None:
        for position, present in enumerate(items):
            if isinstance(present, Mapping) and present.get(identity) == name:
                return position
    return len(items)


def _remove(base: dict[_Key, _Yaml], key: _Key) -> None:
    base.pop(key, None)
    if isinstance(base, CommentedMap):
        base.ca.items.pop(key, None)


def _brought(value: _Yaml, shift: int) -> _Yaml:
    """A patch's value as it stands in the result: without the keys to remove, comments in line."""
    if isinstance(value, dict):
        for key in [key for key, part in value.items() if part is None]:
            _remove(value, key)
    if isinstance(value, dict | list):
        for key, part in _entries(value):
            value[key] = _brought(part, shift)
    if isinstance(value, _Commented):
        _indent(value, _column(value) + shift)
    return value


# ---- columns: a comment on a line of its own is written at the column that it has ---------------


def _column(node: _Yaml) -> int:
    return (node.lc.col or 0) if isinstance(node, _Commented) else 0


def _shift(base: _Yaml, patch: _Yaml) -> int:
    """By how many columns what the patch brings moves to the right."""
    known = isinstance(base, _Commented) and isinstance(patch, _Commented)
    return _column(base) - _column(patch) if known else 0


def _indent(node: CommentedMap | CommentedSeq, column: int) -> None:
    node._yaml_set_line_col(node.lc.line, column)  # noqa: SLF001 - there is no other setter
    for key, _ in _entries(node):
        Comments.of(node, key).hang_on(node, key)


def _open(node: _Yaml, parent: _Yaml) -> None:
    """Write a map or list in braces as a block: a comment in braces would hide what follows."""
    if isinstance(node, _Commented) and node.fa.flow_style():
        node.fa.set_block_style()
        _indent(node, _column(parent) + 2)


# ---- comments ----------------------------------------------------------------------------------


@dataclass
class Comments:
    """The comment lines of one key or item: above it, at its end, and what ruamel hangs below it.

    `header` is what a block scalar has behind its | or >.
    """

    above: list[str] = field(default_factory=list)
    end: str = ""
    below: list[str] = field(default_factory=list)
    header: _Tokens = None

    @classmethod
    def of(cls, node: CommentedMap | CommentedSeq, key: _Key) -> "Comments":
        at_end, above, header = _slots(node, key)
        lines = _lines([at_end] if at_end else [])
        if isinstance(node[key], _BlockScalar):
            return cls(_lines(above), "", lines, header)
        return cls(_lines(above), "".join(lines[:1]).strip(), lines[1:] + _lines(header))

    def __bool__(self) -> bool:
        return bool(self.above or self.end or self.header)

    def hang_on(self, node: CommentedMap | CommentedSeq, key: _Key) -> None:
        """Write them where ruamel keeps them; what is below is not written."""
        mark = CommentMark(_column(node))
        above = [CommentToken(f"{line.strip()}\n", mark) for line in self.above] or None
        end = CommentToken(self.end, CommentMark(0)) if self.end else None
        if isinstance(node, CommentedMap):
            slots = [None, above, end, self.header]
        else:
            slots = [end, above, None, None]
        if any(slots):
            node.ca.items[key] = slots
        else:
            node.ca.items.pop(key, None)


def _settle(node: CommentedMap | CommentedSeq, above: list[str]) -> list[str]:
    """Settle what is inside `node`, `above` on its first key; returns what is left at the end.

    Lines that wait for their key keep their indentation: where none comes, they stay as they are.
    """
    for key, value in _entries(node):
        comments = Comments.of(node, key)
        comments.above = above + comments.above
        comments.hang_on(node, key)
        above = comments.below
        if isinstance(value, _Commented) and not value.fa.flow_style():
            value.ca.comment = None  # the same tokens as those of the key, which has handed them on
            above = _settle(value, above)
    above += _lines(node.ca.end)
    node.ca.end = []
    return above


def _carry(base: _Yaml, key: _Key, patch: _Yaml, patch_key: _Key) -> None:
    """The patch's comments take the place of the base's; where it has none, those stay."""
    both = isinstance(base, _Commented) and isinstance(patch, _Commented)
    if both and (comments := Comments.of(patch, patch_key)):
        comments.hang_on(base, key)


def _heading(document: CommentedMap | CommentedSeq) -> list[str]:
    """The lines above the first key of a document, or of a part that was not settled."""
    at_end, above = [*(document.ca.comment or []), None, None][:2]
    return [*_lines([at_end] if at_end else [])[1:], *_lines(above)]


def _leave_below(node: _Yaml, lines: list[str]) -> None:
    """Hang `lines` below the last line of `node`, as they are."""
    if not (lines and isinstance(node, _Commented) and len(node)):
        return
    key, value = _entries(node)[-1]
    if isinstance(value, _Commented) and len(value) and not value.fa.flow_style():
        _leave_below(value, lines)
        return
    comments = Comments.of(node, key)
    first = [] if isinstance(value, _BlockScalar) else [comments.end]
    comments.end = "\n".join([*first, *lines, ""])
    comments.hang_on(node, key)


def _entries(node: dict[_Key, _Yaml] | list[_Yaml]) -> list[tuple[_Key, _Yaml]]:
    return list(node.items() if isinstance(node, dict) else enumerate(node))


def _slots(node: CommentedMap | CommentedSeq, key: _Key) -> tuple[_Tokens, _Tokens, _Tokens]:
    """Where ruamel keeps an entry's comments: at its end, above it, between key and value."""
    kept = [*(node.ca.items.get(key) or []), None, None, None, None][:4]
    return (kept[2] if isinstance(node, CommentedMap) else kept[0]), kept[1], kept[3]


def _lines(tokens: _Tokens) -> list[str]:
    text = "".join(token.value for token in tokens or [])
    return text.removesuffix("\n").split("\n") if text else []
