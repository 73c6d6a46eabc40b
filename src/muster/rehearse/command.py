"""A container's command with fewer ranks, or with less patience, than the manifest has."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

_NPROC: Final = r"--nproc(?:[-_]per(?:[-_]node)?)?"
_RDZV_CONF: Final = r"--rdzv[-_]conf"
_LAUNCHER: Final = "muster.launcher"
# between a flag and its value, and the value, in a shell script
_GAP: Final = r"(?:=|(?:\s|\\\n)+)"
_VALUE: Final = r"""(?P<value>"[^"]*"|'[^']*'|\$\([^()]*\)|[^\s"';&|]+)"""


def with_ranks(words: Iterable[str], nproc_per_node: int) -> list[str]:
    """The words with another number wherever torchrun is given one."""
    return list(_with_flag(words, _NPROC, lambda _: str(nproc_per_node)))


def with_join_timeout(words: Sequence[str], seconds: int) -> list[str]:
    """The words with a short timeout wherever torchrun is given an --rdzv-conf.

    Without one torchrun reads PET_RDZV_CONF; not under the launcher, for that adds the flag.
    """
    if not any(re.search(_RDZV_CONF, word) for word in words):
        return list(_after_launcher(words, f"--rdzv-conf={impatient('', seconds)}"))
    return list(_with_flag(words, _RDZV_CONF, lambda conf: impatient(conf, seconds)))


def impatient(conf: str, seconds: int) -> str:
    """An --rdzv-conf with short timeouts, c10d's and static's, at its end: the last one counts."""
    quote = conf[:1] if conf[:1] in {"'", '"'} else ""
    short = f"join_timeout={seconds},timeout={seconds}"
    return quote + ",".join(filter(None, (conf.strip(quote or None), short))) + quote


def _with_flag(words: Iterable[str], flag: str, change: Callable[[str], str]) -> Iterator[str]:
    """The words with the values of `flag` changed, also where a word is a script."""
    inside = re.compile(rf"(?P<start>{flag}{_GAP}){_VALUE}")
    is_value = False
    for word in words:
        if is_value:
            yield change(word)
        elif whole := re.match(rf"{flag}=", word):
            yield whole[0] + change(word[whole.end() :])
        else:
            yield inside.sub(lambda match: match["start"] + change(match["value"]), word)
        is_value = re.fullmatch(flag, word) is not None


def _after_launcher(words: Iterable[str], flag: str) -> Iterator[str]:
    """The words with `flag` as the launcher's first argument, also where a word is a script."""
    for word in words:
        yield re.sub(rf"(-m\s+{re.escape(_LAUNCHER)})(?=\s|$)", rf"\1 {flag}", word)
        if word == _LAUNCHER:
            yield flag
