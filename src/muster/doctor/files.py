"""Reading of /proc, /sys and the like, where anything may be missing, forbidden or odd."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

# more than any file here has to say; a broken driver may say more
MOST_BYTES = 2**20
MOST_TEXT = 4096

_Value = TypeVar("_Value")


def clean(text: str) -> str:
    """`text` for a terminal and for JSON: odd bytes and control characters are replaced."""
    whole = text.encode(errors="surrogateescape").decode(errors="replace")[:MOST_TEXT]
    return "".join(each if each.isprintable() else "\ufffd" for each in whole)


@dataclass(frozen=True)
class Files:
    """The files of a machine under `root`, / on this one; what could not be read is kept."""

    root: Path = Path("/")
    unread: dict[str, str] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def attempt(self, name: str, read: Callable[[], _Value], otherwise: _Value) -> _Value:
        """What `read` gives; if it fails, `otherwise`, and the reason in `unread` by `name`."""
        try:
            return read()
        except Exception as error:  # noqa: BLE001  a machine may be broken in ways nobody foresaw
            self.unread[name] = clean(str(error)) or type(error).__name__
            return otherwise

    def text(self, name: str) -> str | None:
        """The file's text without its last line end; None when there is none to be read."""
        try:
            with self.path(name).open("rb") as file:
                return file.read(MOST_BYTES).decode(errors="replace").rstrip("\n")
        except (OSError, ValueError):
            return None

    def word(self, name: str) -> str | None:
        """A text of one line, cleaned."""
        text = self.text(name)
        return None if text is None else clean(text.strip())

    def number(self, name: str) -> int | None:
        """The whole number that the file holds, if it is one of 64 bits."""
        try:
            number = int(self.text(name) or "", 0)
        except ValueError:
            return None
        return number if abs(number) < 2**64 else None

    def raw(self, name: str, most: int = MOST_BYTES) -> bytes:
        try:
            with self.path(name).open("rb") as file:
                return file.read(most)
        except (OSError, ValueError):
            return b""

    def names(self, folder: str) -> list[str]:
        """What is in a folder, sorted as people count: mlx5_2 before mlx5_10."""
        try:
            return sorted((each.name for each in self.path(folder).iterdir()), key=_natural)
        # a NUL in a name is a ValueError
        except (OSError, ValueError):
            return []

    def exists(self, name: str) -> bool:
        try:
            return self.path(name).exists()
        except OSError:
            return False

    def any_exists(self, names: Iterable[str]) -> bool:
        return any(map(self.exists, names))

    def link(self, name: str) -> str | None:
        """Where a path really leads, from the root."""
        try:
            real = self.path(name).resolve(strict=True)
            return f"/{real.relative_to(self.root.resolve())}"
        except (OSError, RuntimeError, ValueError):
            return None


def _natural(name: str) -> list[tuple[int, str]]:
    # isdecimal is true of digits of every script, of which int() knows the value
    return [
        (int(part), "") if part.isdecimal() and len(part) < 20 else (-1, part)
        for part in _runs(name)
    ]


def _runs(name: str) -> list[str]:
    """`name` cut where digits begin and end."""
    runs: list[str] = []
    for each in name:
        if runs and runs[-1][-1].isdecimal() == each.isdecimal():
            runs[-1] += each
        else:
            runs.append(each)
    return runs
