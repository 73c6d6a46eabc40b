"""Documents as YAML text, with the comments that patch.settle hung on their keys and items.

As ruamel's own emitter writes them, which takes longer than all the rest of a render.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.scalarstring import (
    DoubleQuotedScalarString,
    LiteralScalarString,
    SingleQuotedScalarString,
)

from muster.patch import Comments

# a map, a list or a scalar, plain or ruamel's
_Yaml: TypeAlias = Any

# what needs no quotes: it begins as no number does, and holds no mark of YAML's own
_PLAIN: Final = re.compile(
    r"(?:[A-Za-z/]|--?[A-Za-z]|[1-9][0-9]*[KMG]i$)[A-Za-z0-9_./=,@~-]*(?::[A-Za-z0-9_./=,@~-]+)*"
)
# YAML 1.1 takes them for truth values or for nothing
_NO_TEXTS: Final = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
_ESCAPES: Final = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_UNUSUAL: Final = re.compile(r'[\\"]|[^ -~]')
_NONE: Final = Comments()


def emitted(documents: Iterable[CommentedMap]) -> str:
    """The documents as a text, one after the other."""
    return "---\n".join("\n".join(_document(each)) + "\n" for each in documents)


def _document(document: CommentedMap) -> Iterator[str]:
    heading = (document.ca.comment or [None, None])[1]
    for token in heading or ():
        yield token.value.rstrip("\n")
    yield from _map(document, 0)


def _map(node: Mapping[str, _Yaml], column: int) -> Iterator[str]:
    """The lines of a map whose keys stand at `column`."""
    for key, value in node.items():
        yield from _entry(node, key, f"{_scalar(key)}:", value, column)


def _list(node: list[_Yaml], column: int) -> Iterator[str]:
    """The lines of a list whose dashes stand at `column`."""
    for index, value in enumerate(node):
        yield from _entry(node, index, "-", value, column)


def _entry(node: _Yaml, key: str | int, head: str, value: _Yaml, column: int) -> Iterator[str]:
    """The lines of an entry of `node`: `head`, a key or a dash, and the value behind or below."""
    comments = Comments.of(node, key) if isinstance(node, CommentedMap | CommentedSeq) else _NONE
    indent = " " * column
    yield from (f"{indent}{line.strip()}" for line in comments.above)
    if isinstance(value, LiteralScalarString):
        yield from _block(f"{indent}{head}", value, column + 2, comments)
    elif not isinstance(value, dict | list) or not value:
        yield _with(f"{indent}{head} {_scalar(value)}", comments.end)
    else:
        inside = _map(value, column + 2) if isinstance(value, dict) else _list(value, column + 2)
        if head == "-" and not comments.end:
            first = next(inside)
            yield f"{indent}- {first.lstrip()}"
        else:
            yield _with(f"{indent}{head}", comments.end)
        yield from inside
    yield from comments.below


def _block(head: str, text: str, column: int, comments: Comments) -> Iterator[str]:
    """A text as lines at `column`, which `head` | begins."""
    body = text.rstrip("\n")
    ends = len(text) - len(body)
    # from a text that begins with a blank or an empty line YAML could not tell the indentation
    hint = "2" if text[:1] in {" ", "\n"} else ""
    keep = "-" if not ends else "+" if ends > 1 or not body else ""
    yield _with(f"{head} |{hint}{keep}", "".join(comments.header or ()))
    lines = text.removesuffix("\n").split("\n")
    yield from (f"{' ' * column}{line}" if line else "" for line in lines)


def _with(line: str, comment: str) -> str:
    return f"{line} {comment.strip()}" if comment else line


def _scalar(value: _Yaml) -> str:
    # JSON's numbers, truth values and empty braces are YAML's
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(text: str) -> str:
    if isinstance(text, SingleQuotedScalarString) and text.isprintable():
        return "'{}'".format(text.replace("'", "''"))
    is_plain = _PLAIN.fullmatch(text) and text.lower() not in _NO_TEXTS
    if is_plain and not isinstance(text, DoubleQuotedScalarString):
        return str(text)
    return f'"{_UNUSUAL.sub(_escaped, text)}"'


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    if character in _ESCAPES:
        return _ESCAPES[character]
    number = ord(character)
    code = f"\\u{number:04x}" if number < 2**16 else f"\\U{number:08x}"
    return character if character.isprintable() else code
