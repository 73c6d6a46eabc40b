"""Text of a run made fit for a page: no control characters, no endless logs."""

from collections.abc import Sequence

from muster.explain.lines import clean

MOST_OF_A_LINE = 600
MOST_OF_A_TEXT = 4000
MOST_LINES = 60
_NAMED = 4


def line(text: str) -> str:
    """`text` on one line, cut where it is too long for one."""
    return _head(" ".join(plain(text).split()), MOST_OF_A_LINE)


def block(text: str) -> str:
    """`text` with its lines, from its beginning."""
    return _head(plain(text).strip("\n"), MOST_OF_A_TEXT)


def tail(text: str) -> str:
    """The last lines of `text`: what a log says last is what counts."""
    whole = plain(text).strip("\n")
    kept = "\n".join(whole[-MOST_OF_A_TEXT:].split("\n")[-MOST_LINES:])
    if len(kept) == len(whole):
        return whole
    # from the beginning of a line, unless all of it is one
    kept = kept if whole[-len(kept) - 1] == "\n" else kept.partition("\n")[2] or kept
    return f"[the {len(whole) - len(kept)} characters before this are in the JSON]\n{kept}"


def plain(text: str) -> str:
    """Without terminal escapes, control characters and halves of surrogate pairs."""
    whole = text.encode("utf-8", "replace").decode("utf-8")
    return "\n".join(clean(each) for each in whole.split("\n"))


def hosts(names: Sequence[str], total: int) -> str:
    """`names` in words, where the run has `total` hosts."""
    if len(names) == total:
        return "all nodes" if total > 1 else ", ".join(map(line, names))
    shown = ", ".join(map(line, names[:_NAMED]))
    return shown if len(names) <= _NAMED else f"{shown} and {len(names) - _NAMED} more"


def _head(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} [{len(text) - most} more characters]"
