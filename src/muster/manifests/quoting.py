"""Values as YAML 1.1, which kubectl reads, takes them for what they are."""

import re

from ruamel.yaml.scalarstring import DoubleQuotedScalarString as Quoted

# a flag, a path or a quantity with its unit: no number, no truth value, no mark of YAML's own
_PLAIN = re.compile(
    r"(--[a-z][a-z-]*=|/)[A-Za-z0-9_./=,@~-]+(:[A-Za-z0-9_./=,@~-]+)*|[1-9][0-9]*[KMG]i"
)


# a name that begins with a letter; of these, YAML 1.1 takes some for truth values or for nothing
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_NO_NAMES = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def text(content: str) -> str:
    """`content` in quotes, unless it is sure to be read as a text without."""
    is_name = _NAME.fullmatch(content) and content not in _NO_NAMES
    return content if is_name or _PLAIN.fullmatch(content) else Quoted(content)
