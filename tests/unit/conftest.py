"""What the unit tests share: no Engine, no torch, no network, and nothing of the user's machine."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

# the tests time nothing, and the same examples come at every run
settings.register_profile(
    "muster",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("muster")

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Recorder:
    """Progress that keeps what it was told."""

    said: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.said.append(text)

    def detail(self, text: str) -> None:
        self.details.append(text)


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test installs or starts an Engine, or is led to one by the environment it runs in."""
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MUSTER_ENGINE", "existing")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is all that pip finds wheels in."""
    folder = tmp_path / "served"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def progress() -> Recorder:
    return Recorder()


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Writes a shell script that is the first of its name on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def write(name: str, script: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    return write


def wait_until(holds: Callable[[], bool], what: str, limit_s: float = 20) -> None:
    """Poll until `holds()`; fail naming `what` at the limit."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """Whether the process does anything: one that nobody has waited for yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
