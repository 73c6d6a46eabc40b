"""An Engine of the test's own: one that is empty, full, or dies in the middle. Needs root."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import docker
import psutil
import pytest
from tests.image.harness import ROOT, Muster, Recorder, run, wait_until

from muster import dockerd
from muster.engine import Engine
from muster.errors import NotOurEngine

pytestmark = [
    pytest.mark.usefixtures("built"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a second dockerd"),
]


@dataclass
class Scratch:
    """A second dockerd with nothing on it: its own socket, folder and network."""

    folder: Path
    daemon: subprocess.Popen[bytes]

    @property
    def host(self) -> str:
        return f"unix://{self.folder}/docker.sock"

    def client(self) -> docker.DockerClient:
        return docker.DockerClient(base_url=self.host)


def start_scratch(folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [
                # a network of its own: without one it would take the other dockerd's bridge away
                *("unshare", "--net", "dockerd"),
                *("--host", f"unix://{folder}/docker.sock", "--pidfile", str(folder / "pid")),
                *("--data-root", str(folder / "data"), "--exec-root", str(folder / "exec")),
                "--iptables=false",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def answers(host: str) -> bool:
    try:
        return bool(docker.DockerClient(base_url=host).ping())
    except docker.errors.DockerException:
        return False


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name, as a socket's path needs, on a disk of 900 MB."""
    path = Path(f"/run/muster-test-{os.getpid()}")
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=900m", "muster-test", path], check=True)
    yield path
    for mount in reversed(Path("/proc/mounts").read_text().splitlines()):
        if (point := mount.split()[1]).startswith(str(path)):
            subprocess.run(["umount", "--lazy", point], check=True)
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def scratch(folder: Path) -> Iterator[Scratch]:
    scratch = Scratch(folder, start_scratch(folder))
    wait_until(lambda: answers(scratch.host), "the second dockerd answers")
    yield scratch
    if scratch.daemon.poll() is None:
        scratch.daemon.terminate()
    scratch.daemon.wait(timeout=60)
    # containers outlive a dockerd that was killed
    for process in psutil.process_iter(["cmdline"]):
        if str(folder) in " ".join(process.info["cmdline"] or ()):
            for each in (*process.children(recursive=True), process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()


@pytest.fixture
def slow_base(scratch: Scratch, client: docker.DockerClient) -> str:
    """The base on the scratch Engine, its apt-get replaced by a script that never ends."""
    return base_with_apt_get(scratch, client, "sleep 60")


def base_with_apt_get(scratch: Scratch, client: docker.DockerClient, script: str) -> str:
    """The image's own base on the scratch Engine, `script` in the place of its apt-get."""
    bom = client.containers.run("muster:cpu", ["cat", "/opt/muster/bom.json"], remove=True)
    base = client.images.get(json.loads(bom)["base"]["id"])
    (loaded,) = scratch.client().images.load(b"".join(base.save()))
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        dockerfile = f"FROM {loaded.id}\nCOPY --chown=0:0 apt-get /usr/bin/apt-get\n"
        for name, text in (("Dockerfile", dockerfile), ("apt-get", f"#!/bin/sh\n{script}\n")):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text), 0o755
            archive.addfile(entry, io.BytesIO(text.encode()))
    context.seek(0)
    scratch.client().images.build(
        fileobj=context, custom_context=True, tag="muster-test-base:stand-in", rm=True
    )
    return "muster-test-base:stand-in"


def test_an_image_that_was_not_built_is_named_with_the_command_that_builds_it(
    scratch: Scratch,
) -> None:
    code, output = run("smoke", DOCKER_HOST=scratch.host)
    assert code == 2
    assert "the image muster:cpu is not on this Engine" in output
    assert "./invokew build --variant cpu" in output


def test_an_engine_that_dies_during_the_build_is_said(scratch: Scratch, slow_base: str) -> None:
    command = Muster("build", "--base", slow_base, DOCKER_HOST=scratch.host)
    command.read_until(r"^\[os 2/3\]")
    scratch.daemon.kill()
    code, output = command.finish()
    assert code == 3
    assert "the Docker Engine stopped answering during the build" in output
    assert "Traceback" not in output


def test_a_full_disk_during_the_build_is_said(
    scratch: Scratch, client: docker.DockerClient
) -> None:
    base = base_with_apt_get(scratch, client, "dd if=/dev/zero of=/tmp/fill bs=1048576")
    code, output = run("build", "--base", base, DOCKER_HOST=scratch.host)
    assert code == 3
    assert "the disk is full" in output
    assert "docker system df" in output
    assert not scratch.client().images.list("muster")


def test_an_engine_that_dies_during_the_suite_is_said(
    scratch: Scratch, client: docker.DockerClient
) -> None:
    subprocess.run(["mount", "-o", "remount,size=6g", str(scratch.folder)], check=True)
    image = client.images.get("muster:cpu")
    scratch.client().images.load(b"".join(image.save(named=True)))
    command = Muster("smoke", DOCKER_HOST=scratch.host)
    command.read_until("^versions: passed")
    scratch.daemon.kill()
    code, output = command.finish()
    assert code == 3
    assert "the Docker Engine stopped answering during the smoke suite" in output
    assert "Traceback" not in output


def test_a_wheelhouse_on_a_full_disk_is_said_and_keeps_nothing(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=20m", str(folder)], check=True)
    code, output = run("build", "--base", "muster:cpu", XDG_CACHE_HOME=str(folder))
    assert code == 3
    assert "the disk is full" in output
    assert not list(folder.rglob("*.whl"))


def test_stopping_an_engine_that_muster_did_not_start_is_refused(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dockerd, "STATE", tmp_path / "none.json")
    with pytest.raises(NotOurEngine):
        dockerd.stop(Recorder())
    assert engine.answers()


def test_no_engine_and_no_leave_to_start_one_says_what_to_install() -> None:
    # an empty /run in a mount namespace of its own: the default socket is not there
    program = 'mount -t tmpfs none /run && exec "$@"'
    done = subprocess.run(
        [
            *("unshare", "--mount", "sh", "-c", program, "sh"),
            *(sys.executable, "-m", "invoke", "smoke"),
        ],
        cwd=ROOT,
        env={**os.environ, "MUSTER_ENGINE": "existing"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3
    assert "MUSTER_ENGINE=existing forbids" in done.stderr
    assert "install docker.io" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_signal_is_not_lost_while_the_engine_is_silent(scratch: Scratch, slow_base: str) -> None:
    command = Muster("build", "--base", slow_base, DOCKER_HOST=scratch.host)
    command.read_until(r"^\[os 2/3\]")
    scratch.daemon.send_signal(signal.SIGSTOP)
    try:
        command.send(signal.SIGTERM)
        code, _ = command.finish()
    finally:
        scratch.daemon.send_signal(signal.SIGCONT)
    assert code == 143
