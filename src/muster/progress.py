"""How long work tells what it is doing, without knowing where that is shown."""

from typing import Protocol


class Progress(Protocol):
    """Where a long command says what it does; tasks.py decides how that looks."""

    def say(self, text: str) -> None:
        """A milestone: worth a line in any log."""

    def detail(self, text: str) -> None:
        """What happens right now: replaces the detail before it, on a terminal alone."""
