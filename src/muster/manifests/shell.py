"""The commands of a shell script, as far as they can be told without running it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_VARIABLE = re.compile(r"\$(?:(?P<plain>\w+)|\{(?P<braced>\w+)(?::?-(?P<default>[^}]*))?\})")
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
_CLOSING = {"$(": ")", "${": "}"}
_KEYWORDS = frozenset(
    {"if", "then", "else", "elif", "do", "while", "until", "!", "{", "time", "export"}
)
# inside double quotes a backslash takes the meaning of these only
_ESCAPED = frozenset('"\\$`\n')


@dataclass(frozen=True)
class Word:
    """A word without its quotes; `row` is its line in the script, from 0.

    What the shell would put in place of $… stays as it is written.
    """

    text: str
    row: int
    quoted: bool = False


Command = tuple[Word, ...]


def commands(script: str) -> tuple[Command, ...]:
    """The simple commands in their order, without redirections and comments."""
    return tuple(_Scanner(script).commands())


def assignments(command: Command) -> dict[str, str]:
    """What the words at the beginning of a command assign, `export` included."""
    found = {}
    for word in command:
        match = _ASSIGNMENT.fullmatch(word.text)
        if match is not None:
            found[match["name"]] = match["value"]
        elif word.text not in _KEYWORDS:
            break
    return found


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`text` with the variables that are known, and the defaults of those that are not."""

    def value(match: re.Match[str]) -> str:
        name = match["plain"] or match["braced"]
        if name in variables:
            return variables[name]
        return match[0] if match["default"] is None else match["default"]

    return _VARIABLE.sub(value, text)


def is_variable(word: Word) -> bool:
    """Whether the whole word is what an unquoted variable holds: none, one or several words."""
    return not word.quoted and _VARIABLE.fullmatch(word.text) is not None


class _Scanner:
    def __init__(self, script: str) -> None:
        self._script = script
        self._at = 0
        self._row = 0

    def commands(self) -> Iterator[Command]:
        command: list[Word] = []
        skip_next = False
        while self._at < len(self._script):
            char = self._script[self._at]
            if char in "\n;|()" or char == "&":
                self._step()
                if command:
                    yield tuple(command)
                command, skip_next = [], False
            elif char in "<>":
                skip_next = self._redirection(command)
            elif char in " \t\r" or self._script.startswith("\\\n", self._at):
                self._step(2 if char == "\\" else 1)
            elif char == "#":
                self._step(self._until("\n"))
            else:
                word = self._word()
                if not skip_next:
                    command.append(word)
                skip_next = False
        if command:
            yield tuple(command)

    def _redirection(self, command: list[Word]) -> bool:
        """Steps over <, >, >>, 2>&1 and the like; whether a word follows that is no argument."""
        if command and command[-1].text.isdigit() and self._script[self._at - 1].isdigit():
            command.pop()
        while self._at < len(self._script) and self._script[self._at] in "<>&|":
            self._step()
        return True

    def _word(self) -> Word:
        row, quoted = self._row, False
        text: list[str] = []
        while self._at < len(self._script) and self._script[self._at] not in " \t\r\n;|&()<>":
            char = self._script[self._at]
            if char in "'\"":
                quoted = True
            text.append(self._part())
        return Word("".join(text), row, quoted)

    def _part(self) -> str:
        """One character, or all that quotes or $( ) hold together."""
        char = self._script[self._at]
        if char == "\\":
            return self._take(2).removeprefix("\\").removeprefix("\n")
        if char == "'":
            return self._take(self._until("'", 1) + 1)[1:].removesuffix("'")
        if char == '"':
            return self._double()
        if char == "`":
            return self._take(self._until("`", 1) + 1)
        closing = _CLOSING.get(self._script[self._at : self._at + 2])
        if closing is not None:
            return self._take(2) + self._nested(closing)
        return self._take(1)

    def _double(self) -> str:
        self._step()
        text: list[str] = []
        while self._at < len(self._script) and self._script[self._at] != '"':
            char, following = self._script[self._at], self._script[self._at + 1 : self._at + 2]
            plain = char == "'" or (char == "\\" and following not in _ESCAPED)
            text.append(self._take(1) if plain else self._part())
        self._step()
        return "".join(text)

    def _nested(self, closing: str) -> str:
        """What stands up to the bracket that closes, quotes kept."""
        text: list[str] = []
        while self._at < len(self._script):
            char = self._script[self._at]
            if char == closing:
                return "".join(text) + self._take(1)
            start = self._at
            part = self._part() if char != "(" else self._take(1) + self._nested(")")
            text.append(self._script[start : self._at] if char in "'\"\\" else part)
        return "".join(text)

    def _until(self, end: str, offset: int = 0) -> int:
        """How many characters stand before `end`, or before the end of the script."""
        found = self._script.find(end, self._at + offset)
        return (len(self._script) if found < 0 else found) - self._at

    def _take(self, count: int) -> str:
        text = self._script[self._at : self._at + count]
        self._step(count)
        return text

    def _step(self, count: int = 1) -> None:
        self._row += self._script.count("\n", self._at, self._at + count)
        self._at += count
