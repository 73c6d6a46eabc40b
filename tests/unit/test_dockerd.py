"""The machine's own dockerd: when Muster may touch it, and that it stops only its own."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.unit.conftest import Recorder, wait_until

from muster import apt, dockerd, process
from muster.errors import DockerdFailed, NotOurEngine, UnknownEnginePolicy

Program = Callable[[str, str], Path]
Daemon = subprocess.Popen[bytes]
Sleeper = Callable[..., Daemon]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state and its log are in the test's own folder."""
    monkeypatch.setattr(dockerd, "STATE", tmp_path / "run/dockerd.json")
    monkeypatch.setattr(dockerd, "LOG", tmp_path / "dockerd.log")
    monkeypatch.setattr(dockerd, "PID_FILES", {tmp_path / "docker.pid": "dockerd"})


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    """A process in dockerd's place, ended after the test if it still runs."""
    with contextlib.ExitStack() as stack:

        def start(code: str = "pass") -> Daemon:
            code = f"import signal, time; {code}; print(flush=True); time.sleep(60)"
            daemon = stack.enter_context(process.start([sys.executable, "-c", code]))
            assert daemon.stdout is not None
            daemon.stdout.readline()
            return daemon

        yield start


def remember(daemon: Daemon, **differing: float) -> None:
    dockerd.remember(daemon)
    state = json.loads(dockerd.STATE.read_text())
    dockerd.STATE.write_text(json.dumps({**state, **differing}))


@pytest.mark.parametrize(
    ("wish", "euid", "installed", "debian", "why"),
    [
        ("existing", 0, True, True, "MUSTER_ENGINE=existing"),
        (None, 1000, True, True, "only root"),
        (None, 0, False, False, "Debian and Ubuntu alone"),
        (None, 0, True, False, None),
        (None, 0, False, True, None),
        ("", 0, True, True, None),
    ],
)
def test_muster_may_start_one_as_root_where_it_can_unless_forbidden(
    monkeypatch: pytest.MonkeyPatch,
    program: Program,
    tmp_path: Path,
    wish: str | None,
    euid: int,
    installed: bool,
    debian: bool,
    why: str | None,
) -> None:
    monkeypatch.delenv("MUSTER_ENGINE")
    if wish is not None:
        monkeypatch.setenv("MUSTER_ENGINE", wish)
    monkeypatch.setattr(os, "geteuid", lambda: euid)
    monkeypatch.setattr(apt, "is_debian", lambda: debian)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    if installed:
        program("dockerd", "exit 1")
    found = dockerd.forbidden()
    assert (found is None) if why is None else (why in str(found))
    assert dockerd.is_installed() is installed


@pytest.mark.parametrize("wish", ["Existing", "no", "existing "])
def test_another_policy_is_refused_by_its_value(monkeypatch: pytest.MonkeyPatch, wish: str) -> None:
    monkeypatch.setenv("MUSTER_ENGINE", wish)
    with pytest.raises(UnknownEnginePolicy, match=repr(wish)):
        dockerd.forbidden()


def test_one_that_muster_started_is_stopped_and_forgotten(
    sleeper: Sleeper, progress: Recorder
) -> None:
    daemon = sleeper()
    remember(daemon)
    dockerd.stop(progress)
    assert not psutil.pid_exists(daemon.pid)
    assert progress.said == [f"stopping dockerd (process {daemon.pid})"]
    with pytest.raises(NotOurEngine, match="nothing in"):
        dockerd.stop(progress)


def test_one_that_does_not_heed_sigterm_is_killed(
    sleeper: Sleeper, progress: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dockerd, "STOP_LIMIT_S", 0.2)
    daemon = sleeper("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    remember(daemon)
    dockerd.stop(progress)
    assert daemon.wait(5) == -signal.SIGKILL
    assert not dockerd.STATE.exists()


def test_another_process_with_its_number_is_left_alone(
    sleeper: Sleeper, progress: Recorder
) -> None:
    other = sleeper()
    remember(other, started=psutil.Process(other.pid).create_time() - 5)
    with pytest.raises(NotOurEngine, match=rf"process {other.pid} is gone"):
        dockerd.stop(progress)
    assert other.poll() is None
    assert not dockerd.STATE.exists()


def test_one_that_is_gone_is_forgotten(sleeper: Sleeper, progress: Recorder) -> None:
    daemon = sleeper()
    remember(daemon)
    process.end(daemon)
    with pytest.raises(NotOurEngine, match=rf"process {daemon.pid} is gone"):
        dockerd.stop(progress)
    assert not dockerd.STATE.exists()


@pytest.mark.parametrize("content", ["", "{"])
def test_a_state_that_was_half_written_is_none(progress: Recorder, content: str) -> None:
    dockerd.STATE.parent.mkdir()
    dockerd.STATE.write_text(content)
    with pytest.raises(NotOurEngine):
        dockerd.stop(progress)


def test_where_systemd_runs_the_machine_it_starts_and_stops_dockerd(
    program: Program, progress: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dockerd, "_has_systemd", lambda: True)
    program("systemctl", f'echo "$@" >> {tmp_path}/calls')
    assert dockerd.start(progress) is None
    dockerd.stop(progress)
    assert (tmp_path / "calls").read_text().splitlines() == [
        "start docker",
        "stop docker.socket docker.service",
    ]
    assert not dockerd.STATE.exists()


def test_a_start_that_systemd_refuses_says_its_words(
    program: Program, progress: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dockerd, "_has_systemd", lambda: True)
    program("systemctl", "echo Unit docker.service is masked.; exit 1")
    with pytest.raises(DockerdFailed, match=r"Unit docker\.service is masked\."):
        dockerd.start(progress)
    assert not dockerd.STATE.exists()


def test_a_dockerd_that_ends_at_once_is_reported_with_its_last_words(
    program: Program, progress: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dockerd, "_has_systemd", lambda: False)
    program("dockerd", "printf '%s\\n' first second third 'no iptables'; exit 1")
    daemon = dockerd.start(progress)
    assert daemon is not None
    wait_until(lambda: daemon.poll() is not None, "it has ended")
    failure = dockerd.failure(daemon)
    assert "exit code 1: second / third / no iptables" in failure.what
    assert str(dockerd.LOG) in failure.remedy


def test_a_dockerd_that_runs_is_muster_s_to_stop(
    program: Program, progress: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dockerd, "_has_systemd", lambda: False)
    program("dockerd", f"exec {shutil.which('sleep')} 60")
    daemon = dockerd.start(progress)
    assert daemon is not None
    try:
        dockerd.remember(daemon)
        dockerd.stop(progress)
        assert not psutil.pid_exists(daemon.pid)
    finally:
        process.end(daemon)


@pytest.mark.parametrize(
    ("content", "stays"),
    [("", False), ("4194305", False), (str(os.getpid()), False), ("dockerd", True)],
    ids=["no number", "no process", "another process", "a dockerd that runs"],
)
@pytest.mark.usefixtures("files")
def test_a_pid_file_that_a_killed_dockerd_left_goes_before_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: Program,
    progress: Recorder,
    content: str,
    stays: bool,
) -> None:
    monkeypatch.setattr(dockerd, "_has_systemd", lambda: False)
    # the name of a process is that of its file
    running = program("dockerd", "sleep 60")
    shutil.copy(shutil.which("sleep") or "sleep", running.with_name("running"))
    running.with_name("running").rename(running)
    pid_file = tmp_path / "docker.pid"
    with process.start([str(running), "60"]) as other:
        pid_file.write_text(str(other.pid) if content == "dockerd" else content)
        daemon = dockerd.start(progress)
        assert daemon is not None
        process.end(daemon)
    assert pid_file.exists() == stays
