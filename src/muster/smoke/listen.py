"""What the suites of all nodes say while they run, each to a report log of its own."""

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from muster.progress import Progress
from muster.smoke.gather import Heard
from muster.steps import Log


class Running(Protocol):
    """A suite that runs somewhere, such as engine.Container; `stderr` are its last words."""

    @property
    def stderr(self) -> Sequence[str]: ...

    def lines(self) -> Iterator[str]: ...

    def ending(self, during: str) -> str: ...


def listen(suites: Mapping[str, Running], repeat: str, progress: Progress) -> list[Heard]:
    """Read the suites, by their nodes' names, until all have ended."""
    several = len(suites) > 1
    logs = {host: Log(_Of(host, progress) if several else progress, repeat) for host in suites}
    for host, line in _lines(suites):
        logs[host].read_line(line)
    return [
        Heard(
            host=host,
            log=logs[host],
            ending=suite.ending("the smoke suite"),
            errors=list(suite.stderr),
        )
        for host, suite in suites.items()
    ]


@dataclass(frozen=True)
class _Of:
    """Progress that says which node it is about."""

    host: str
    progress: Progress

    def say(self, text: str) -> None:
        self.progress.say(f"{self.host}: {text}")

    def detail(self, text: str) -> None:
        self.progress.detail(f"{self.host}: {text}")


def _lines(suites: Mapping[str, Running]) -> Iterator[tuple[str, str]]:
    """Each line with its node, in the order in which they come; read by one thread a node."""
    said: queue.Queue[tuple[str, str | BaseException | None]] = queue.Queue()

    def read(host: str, suite: Running) -> None:
        try:
            for line in suite.lines():
                said.put((host, line))
            said.put((host, None))
        except BaseException as error:  # noqa: BLE001  it is raised again where it is handled
            said.put((host, error))

    for host, suite in suites.items():
        # whoever leaves early ends what the thread reads from
        threading.Thread(target=read, args=(host, suite), daemon=True).start()
    left = len(suites)
    while left:
        host, line = said.get()
        if isinstance(line, BaseException):
            raise line
        if line is None:
            left -= 1
        else:
            yield host, line
