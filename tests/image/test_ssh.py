"""Containers over ssh: a real sshd on this machine is every host, the real Engine is behind each.

The hosts differ in what the user's ssh configuration says of them: their port, their key, and the
PATH that docker is found on there.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import docker
import psutil
import pytest
from tests.image.harness import ROOT, Recorder, run, wait_until

from muster import apt, fabric
from muster.engine import Ask, AskRefused, ContainerSpec, Engine
from muster.errors import HostsDisagree, HostsNotReady
from muster.smoke import ssh
from muster.smoke.hosts import Command, Host, docker_run

pytestmark = pytest.mark.usefixtures("built", "sshd", "users_ssh")

IMAGE = "muster:cpu"
ONE, TWO = Host("one"), Host("two")
SERVER = """
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
AcceptEnv HOST_PATH DOCKER_HOST
ForceCommand PATH="$HOST_PATH" exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"
"""
CLIENT = """
Host off
    Port {closed}
Host refusing
    IdentityFile {folder}/other_key
Host stranger
    UserKnownHostsFile /dev/null
Host without-docker
    SetEnv HOST_PATH=/nowhere
Host other-image
    SetEnv HOST_PATH={folder}/other-image:{path}
Host * !refusing
    IdentityFile {folder}/user_key
Host *
    HostName 127.0.0.1
    HostKeyAlias muster-test
    Port {port}
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    SetEnv HOST_PATH={path} {engine}
"""


@dataclass(frozen=True)
class Server:
    """The sshd, and the folder with its files and the user's."""

    folder: Path
    process: psutil.Popen

    def cut(self) -> None:
        """Break every connection that it has."""
        for session in self.process.children(recursive=False):
            session.kill()


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    if shutil.which("sshd", path=path) is None:
        apt.install(["openssh-server"], Recorder())
    program = shutil.which("sshd", path=path)
    assert program is not None
    if os.geteuid() == 0:
        # its own start script makes it; sshd refuses to run as root without
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host_key", "user_key", "other_key"):
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(keygen, check=True)
    public = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"muster-test {public}")
    port = _free_port()
    (folder / "sshd_config").write_text(SERVER.format(port=port, folder=folder))
    _configure_client(folder, port)
    log = folder / "sshd.log"
    with log.open("wb") as output:
        argv = [program, "-D", "-e", "-f", str(folder / "sshd_config")]
        server = psutil.Popen(argv, stdin=subprocess.DEVNULL, stderr=output)
    try:
        wait_until(lambda: _listens(port) or server.poll() is not None, "sshd listens")
        assert server.poll() is None, log.read_text()
        yield Server(folder, server)
    finally:
        server.terminate()
        server.wait(10)


def _configure_client(folder: Path, port: int) -> None:
    """An ssh with this configuration for the user's, which no variable leads the real one to."""
    engine = os.environ.get("DOCKER_HOST")
    config = CLIENT.format(
        closed=_free_port(),
        folder=folder,
        port=port,
        path=os.environ["PATH"],
        engine=f"DOCKER_HOST={engine}" if engine else "",
    )
    (folder / "config").write_text(config)
    _write_program(folder / "bin/ssh", f'exec {shutil.which("ssh")} -F {folder}/config "$@"')
    # under the image's name is another one there, and the shell greets
    changed = f'echo Welcome; {shutil.which("docker")} "$@" | sed s/^sha256:...../sha256:aaaaa/'
    _write_program(folder / "other-image/docker", changed)


def _write_program(path: Path, script: str) -> None:
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        return int(taken.getsockname()[1])


def _listens(port: int) -> bool:
    with closing(socket.socket()) as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def users_ssh(sshd: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{sshd.folder}/bin{os.pathsep}{os.environ['PATH']}")


@pytest.fixture(autouse=True)
def nothing_left_on_hosts(client: docker.DockerClient) -> Iterator[None]:
    """After each test, no container over ssh is on the Engine, and no ssh runs here."""
    before = _containers(client)
    yield
    assert _containers(client) <= before
    assert [each.name() for each in psutil.Process().children() if each.name() == "ssh"] == []


def _containers(client: docker.DockerClient) -> set[str]:
    found = client.containers.list(all=True, filters={"name": "muster-smoke-"}, ignore_removed=True)
    return {str(each.name) for each in found}


def spec(*command: str, asks: Sequence[Ask] = ()) -> ContainerSpec:
    return ContainerSpec(
        image=IMAGE, command=command, shm_bytes=2**26, asks=frozenset(asks), cap_add=("IPC_LOCK",)
    )


def command(host: Host, *words: str) -> Command:
    name = f"muster-smoke-{uuid.uuid4().hex[:12]}"
    return Command(host, name, docker_run(spec(*words), None, name))


# ---- a container that runs ---------------------------------------------------------------------


def test_each_hosts_lines_come_apart_and_its_exit_code_is_known() -> None:
    script = 'echo "out $1"; echo "err $1" >&2; printf rest; exit "$2"'
    hostile = 'it\'s "$HOME" `id` * \\'
    commands = [
        command(ONE, "sh", "-c", script, "sh", hostile, "0"),
        command(TWO, "sh", "-c", script, "sh", "two words", "3"),
    ]
    with ssh.started(commands) as (one, two):
        assert list(one.lines()) == [f"out {hostile}", "rest"]
        assert list(two.lines()) == ["out two words", "rest"]
        assert one.ending("a test") == "exit code 0"
        assert two.ending("a test") == "exit code 3"
        assert list(one.stderr) == [f"err {hostile}"]
        assert list(two.stderr) == ["err two words"]


def test_a_descriptor_past_the_outputs_leads_out_as_the_report_log_needs() -> None:
    script = ["sh", "-c", 'exec "$@" 3>&1', "sh", "sh", "-c", "echo report > /dev/fd/3"]
    with ssh.started([command(ONE, *script)]) as (one,):
        assert list(one.lines()) == ["report"]


def test_whoever_leaves_early_leaves_nothing_behind(client: docker.DockerClient) -> None:
    commands = [command(host, "sh", "-c", "seq 200000; sleep 600") for host in (ONE, TWO)]
    with ssh.started(commands) as (one, two):
        assert next(one.lines()) == next(two.lines()) == "1"
        assert {each.container for each in commands} <= _containers(client)


def test_whoever_leaves_before_the_container_is_there_leaves_nothing_behind() -> None:
    with ssh.started([command(ONE, "sleep", "600")]):
        pass


PROGRAM = """
import sys
from muster.smoke import ssh
from muster.smoke.hosts import Command, Host
with ssh.started([Command(Host("one"), sys.argv[1], tuple(sys.argv[2:]))]) as (one,):
    for line in one.lines():
        print(line, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_that_ends_the_command_ends_its_container(
    number: signal.Signals, client: docker.DockerClient
) -> None:
    each = command(ONE, "sh", "-c", "echo up; sleep 600")
    with psutil.Popen(
        [sys.executable, "-c", PROGRAM, each.container, *each.argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    ) as muster:
        assert muster.stdout.readline() == b"up\n"
        (ours,) = muster.children()
        muster.send_signal(number)
        muster.wait(60)
    # after SIGKILL the host itself sees to it
    wait_until(lambda: each.container not in _containers(client), "the container is gone")
    wait_until(lambda: not ours.is_running(), "ssh has ended")


def test_a_connection_that_breaks_is_told_and_its_container_goes(
    sshd: Server, client: docker.DockerClient
) -> None:
    each = command(ONE, "sh", "-c", "echo up; sleep 600")
    with ssh.started([each]) as (one,):
        lines = one.lines()
        assert next(lines) == "up"
        sshd.cut()
        assert list(lines) == []
        assert one.ending("a test").startswith("no connection to one during a test: ")
        wait_until(lambda: each.container not in _containers(client), "the container is gone")


def test_a_host_that_cannot_be_reached_is_told_and_the_other_runs() -> None:
    commands = [command(Host("off"), "true"), command(ONE, "echo", "here")]
    with ssh.started(commands) as (off, one):
        assert list(off.lines()) == []
        assert list(one.lines()) == ["here"]
        ending = off.ending("a test")
    assert ending.startswith("no connection to off during a test: ssh: connect to host 127.0.0.1")
    assert ending.endswith("Connection refused")


# ---- before anything starts --------------------------------------------------------------------


def test_an_image_that_all_hosts_have_is_known_by_its_id(engine: Engine) -> None:
    image = engine.image(IMAGE)
    assert image is not None
    assert ssh.image_id([ONE, TWO], IMAGE) == image.id


def test_every_host_that_is_not_ready_is_named_with_its_reason() -> None:
    names = ["off", "one", "refusing", "stranger", "without-docker"]
    with pytest.raises(HostsNotReady) as told:
        ssh.image_id([Host(name) for name in names], IMAGE)
    problems = dict(line.strip(" |").split(": ", 1) for line in told.value.what.splitlines()[1:])
    assert problems.keys() == {"off", "refusing", "stranger", "without-docker"}
    assert "Connection refused" in problems["off"]
    assert "Permission denied (publickey)" in problems["refusing"]
    assert "Host key verification failed" in problems["stranger"]
    assert "docker" in problems["without-docker"]
    assert "not found" in problems["without-docker"] or "No such file" in problems["without-docker"]
    assert told.value.exit_code == 3


def test_hosts_without_the_image_are_named_with_the_ways_to_bring_it() -> None:
    with pytest.raises(HostsNotReady) as told:
        ssh.image_id([ONE, TWO], "muster:no-such")
    assert told.value.what.splitlines()[1:] == [
        "  | one: has no image muster:no-such",
        "  | two: has no image muster:no-such",
    ]
    assert told.value.remedy.count("docker save muster:no-such | ssh HOST docker load") == 1


def test_hosts_whose_images_differ_are_named_with_each_id(engine: Engine) -> None:
    image = engine.image(IMAGE)
    assert image is not None
    with pytest.raises(HostsDisagree) as told:
        ssh.image_id([ONE, Host("other-image"), TWO], IMAGE)
    assert told.value.what.splitlines()[1:] == [
        f"  | {image.id}: one, two",
        f"  | sha256:aaaaa{image.id[12:]}: other-image",
    ]


def refused_here(engine: Engine, ask: Ask) -> bool:
    try:
        with engine.run(spec("true", asks=[ask])):
            return False
    except AskRefused:
        return True


def test_what_a_host_refuses_is_what_its_engine_refuses(engine: Engine) -> None:
    expected = {ask for ask in Ask if refused_here(engine, ask)}
    found = ssh.refusals([ONE], spec("false", asks=list(Ask)), None)
    assert found.keys() == {ONE}
    assert {each.ask for each in found[ONE]} == expected
    assert len(found[ONE]) == len(expected)
    assert all("docker: " in each.evidence for each in found[ONE])


def test_a_host_that_lacks_the_fabrics_device_is_named() -> None:
    tcpxo = fabric.read(ROOT / "k8s/fabrics", "gke-tcpxo")
    with pytest.raises(HostsNotReady, match=r"one: .*/dev/aperture_devices"):
        ssh.refusals([ONE], spec("true"), tcpxo)


# ---- the suite ---------------------------------------------------------------------------------


def test_the_suite_runs_on_the_hosts_of_a_file(tmp_path: Path) -> None:
    # names that the containers reach each other by, too
    file, report = tmp_path / "hosts", tmp_path / "out.json"
    file.write_text("127.0.0.1\nlocalhost  # the same machine, by another name\n")
    only = ("--only", "versions,nodes_meet,nodes_all_reduce")
    code, output = run(
        *("smoke", "--variant", "cpu", "--hosts", str(file), *only, "--json", str(report))
    )
    assert code == 0, output
    result = json.loads(report.read_text())
    assert [node["host"] for node in result["nodes"]] == ["127.0.0.1", "localhost"]
    assert {step["name"]: step["outcome"] for step in result["steps"]} == dict.fromkeys(
        ("versions", "nodes_meet", "nodes_all_reduce"), "passed"
    )
    assert result["steps"][-1]["measure"] == "4 ranks on 2 nodes, gloo, sum 6"


def test_what_a_host_is_to_run_is_printed_and_runs_when_it_is_pasted(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("127.0.0.1\n")
    words = ("smoke", "--variant", "cpu", "--hosts", str(file), "--only", "versions", "--print")
    code, output = run(*words)
    assert code == 0, output
    heading, line = output.splitlines()
    assert heading == "# on 127.0.0.1"
    # this Engine may refuse what a host's would give
    pasted = line.replace(" --ulimit memlock=-1", "")
    done = subprocess.run(["sh", "-c", pasted], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"nodeid": "test_environment.py::test_versions"' in done.stdout


def test_more_nodes_than_hosts_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("one\ntwo\n")
    code, output = run("smoke", "--variant", "cpu", "--hosts", str(file), "--nnodes", "3")
    assert code == 2
    assert "--nnodes 3, and the file has 2 hosts" in output
