"""A Muster command as a user starts it, and what the tests on a real Engine share."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import docker
import psutil
import pytest

from muster.engine import LABEL_OWNER

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Recorder:
    """Progress that keeps what was said."""

    said: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.said.append(text)

    def detail(self, text: str) -> None:
        """Not kept."""


def yes(_question: str) -> bool:
    return True


def wait_until(holds: Callable[[], bool], what: str, limit_s: float = 30) -> None:
    """Poll until `holds()`; fail naming `what` at the limit."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.1)


class Muster:
    """A Muster command as a user starts it, its output read while it runs."""

    def __init__(self, *words: str, root: Path = ROOT, **environment: str) -> None:
        self._output: list[str] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "invoke", *words],
            cwd=root,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def read_until(self, pattern: str) -> str:
        """The first line that `pattern` is found in; fails at the end of the output."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._output.append(line)
            if re.search(pattern, line):
                return line
        pytest.fail(f"{pattern!r} is nowhere in:\n{''.join(self._output)}")

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def close_output(self) -> None:
        """As `| head` does when it has seen enough."""
        assert self._process.stdout is not None
        self._process.stdout.close()

    def finish(self) -> tuple[int, str]:
        """Exit status and the whole output."""
        assert self._process.stdout is not None
        if not self._process.stdout.closed:
            self._output += self._process.stdout.readlines()
            self._process.stdout.close()
        self._process.wait(timeout=300)
        return self._process.returncode, "".join(self._output)


def run(*words: str, root: Path = ROOT, **environment: str) -> tuple[int, str]:
    """A Muster command from start to end: exit status and output."""
    return Muster(*words, root=root, **environment).finish()


def left_on(client: docker.DockerClient) -> list[str]:
    """The containers of this test's commands on the Engine; another run's are none of ours."""
    containers = client.containers.list(
        all=True, filters={"label": LABEL_OWNER}, ignore_removed=True
    )
    return [str(each.name) for each in containers if _is_ours(each.labels[LABEL_OWNER])]


def stages_left_on(client: docker.DockerClient) -> list[str]:
    """The networks and volumes of this test's rehearsals on the Engine."""
    found = {"label": LABEL_OWNER}
    labels = {each.name: each.attrs["Labels"] for each in client.networks.list(filters=found)}
    labels |= {each.name: each.attrs["Labels"] for each in client.volumes.list(filters=found)}
    return [str(name) for name, own in labels.items() if _is_ours(own[LABEL_OWNER])]


def _is_ours(owner: str) -> bool:
    """Whether a command of this process, or one that has ended, owns the container."""
    _, pid, started = owner.rsplit(" ", 2)
    try:
        process = psutil.Process(int(pid))
        if f"{process.create_time():.1f}" != started:
            return True
        return os.getpid() in (process.pid, *(parent.pid for parent in process.parents()))
    except psutil.NoSuchProcess:
        return True
