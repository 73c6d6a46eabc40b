"""The machine's own dockerd: may Muster install and start it, doing so, and stopping it again."""

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import psutil

from muster import apt, process
from muster.errors import DockerdFailed, DockerdNotStopped, NotOurEngine, UnknownEnginePolicy
from muster.progress import Progress

STATE = Path("/run/muster/dockerd.json")
LOG = Path("/var/log/muster-dockerd.log")
# docker-cli is a package of its own since Debian 13; docker-buildx does not exist in Debian 12
PACKAGES = ("docker.io", "docker-cli", "docker-buildx")
# by these dockerd and its containerd tell whether another one runs: a number that another process
# has by now, after a kill or a crash, keeps them from starting
PID_FILES = {
    Path("/var/run/docker.pid"): "dockerd",
    Path("/var/run/docker/containerd/containerd.pid"): "containerd",
}
STOP_LIMIT_S = 60.0


def forbidden() -> str | None:
    """Why Muster may not install or start a dockerd here; None when it may.

    Raises UnknownEnginePolicy when MUSTER_ENGINE holds anything but "existing".
    """
    wish = os.environ.get("MUSTER_ENGINE", "")
    if wish == "existing":
        return "MUSTER_ENGINE=existing forbids installing or starting one"
    if wish:
        raise UnknownEnginePolicy(wish)
    if os.geteuid() != 0:
        return "only root may install or start one"
    if shutil.which("dockerd") is None and not apt.is_debian():
        return "Muster installs one on Debian and Ubuntu alone"
    return None


def is_installed() -> bool:
    return shutil.which("dockerd") is not None


def install(progress: Progress) -> None:
    """Install the distribution's docker.io and what of PACKAGES it has beside it."""
    apt.install(PACKAGES, progress)


def start(progress: Progress) -> subprocess.Popen[bytes] | None:
    """Start dockerd, by systemd where systemd runs the machine; the process, if it is ours."""
    if _has_systemd():
        progress.say("systemctl start docker")
        started = process.run(["systemctl", "start", "docker"])
        if not started.ok:
            raise DockerdFailed("; ".join(started.last_lines(3)), Path("journalctl -u docker"))
        _write_state({"systemd": True})
        return None
    _remove_stale_pid_files()
    progress.say(f"starting dockerd (log: {LOG})")
    return process.spawn(["dockerd"], LOG)


def _remove_stale_pid_files() -> None:
    for path, name in PID_FILES.items():
        try:
            running = psutil.Process(int(path.read_text())).name()
        except (OSError, ValueError, psutil.NoSuchProcess):
            running = ""
        if running != name:
            path.unlink(missing_ok=True)


def remember(daemon: subprocess.Popen[bytes]) -> None:
    """Note that this dockerd is ours to stop."""
    _write_state({"pid": daemon.pid, "started": psutil.Process(daemon.pid).create_time()})


def failure(daemon: subprocess.Popen[bytes]) -> DockerdFailed:
    """The error for a dockerd that ended or never answered, with its own last words."""
    lines = LOG.read_text(errors="replace").splitlines()[-3:] if LOG.exists() else []
    exit_code = daemon.poll()
    ending = "it does not answer" if exit_code is None else f"exit code {exit_code}"
    return DockerdFailed(f"{ending}: {' / '.join(lines)}", LOG)


def stop(progress: Progress) -> None:
    """Stop the dockerd that Muster started; NotOurEngine when there is none."""
    try:
        state = json.loads(STATE.read_text())
    except (OSError, ValueError):
        raise NotOurEngine(f"nothing in {STATE}") from None
    if state.get("systemd"):
        progress.say("systemctl stop docker.socket docker.service")
        process.run(["systemctl", "stop", "docker.socket", "docker.service"])
    else:
        _terminate(state, progress)
    STATE.unlink(missing_ok=True)


def _terminate(state: dict[str, float], progress: Progress) -> None:
    try:
        daemon = psutil.Process(int(state["pid"]))
        # the same number may be another process by now
        ours = abs(daemon.create_time() - state["started"]) < 1.0
    except psutil.NoSuchProcess:
        ours = False
    if not ours:
        STATE.unlink(missing_ok=True)
        raise NotOurEngine(f"process {int(state['pid'])} is gone")
    progress.say(f"stopping dockerd (process {daemon.pid})")
    try:
        daemon.terminate()
    except psutil.AccessDenied:
        raise DockerdNotStopped(daemon.pid) from None
    with contextlib.suppress(psutil.NoSuchProcess):
        try:
            daemon.wait(STOP_LIMIT_S)
        except psutil.TimeoutExpired:
            daemon.kill()


def _write_state(state: dict[str, float | bool]) -> None:
    STATE.parent.mkdir(parents=True, exist_ok=True)
    STATE.write_text(json.dumps(state))


def _has_systemd() -> bool:
    # the test of sd_booted(3)
    return Path("/run/systemd/system").is_dir()
