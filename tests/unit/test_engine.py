"""Which Engine is meant, what it is asked for, and what its refusals become.

The SDK is the real one; at the other end of its socket a small server answers as an Engine does,
with the refusals that no Engine gives on demand. The real Engine is in tests/image.
"""

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any

import psutil
import pytest
from docker.context import ContextAPI
from tests.unit.conftest import Recorder, wait_until

from muster import engine as engines
from muster.engine import (
    LABEL_OWNER,
    LABEL_RUN,
    Address,
    Ask,
    AskRefused,
    ContainerSpec,
    Engine,
    RegistryUnreachable,
    connect,
    ensure,
)
from muster.errors import (
    DigestGone,
    DiskFull,
    EngineLost,
    EngineRefused,
    NoEngine,
    UnknownEnginePolicy,
)


@dataclass
class Script:
    """What the server answers to "METHOD /path", the API's version left out, and what it got."""

    answers: dict[str, tuple[int, Any]] = field(
        default_factory=lambda: {
            "GET /version": (200, {"Version": "29.0", "ApiVersion": "1.47", "Arch": "amd64"}),
            "GET /_ping": (200, b"OK"),
            "GET /containers/json": (200, []),
            "GET /networks": (200, []),
            "GET /volumes": (200, {"Volumes": []}),
        }
    )
    calls: list[str] = field(default_factory=list)
    created: dict[str, Any] = field(default_factory=dict)
    # a container says nothing before it starts
    started: threading.Event = field(default_factory=threading.Event)

    def containers(self, owners: dict[str, str]) -> None:
        """Containers by id, each with its owner's label; the run has the id's name."""
        listed = []
        for name, owner in owners.items():
            labels = {LABEL_OWNER: owner, LABEL_RUN: name}
            listed.append({"Id": name, "Labels": labels})
            self.answers[f"GET /containers/{name}/json"] = (
                200,
                {"Id": name, "Config": {"Labels": labels}},
            )
            self.answers[f"DELETE /containers/{name}"] = (204, b"")
        self.answers["GET /containers/json"] = (200, listed)


class _Handler(BaseHTTPRequestHandler):
    def _answer(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        call = f"{self.command} {self.path.partition('?')[0]}"
        call = call.replace("/v1.47", "")
        server.script.calls.append(call)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if call == "POST /containers/create":
            server.script.created = json.loads(body)
        status, content = server.script.answers.get(call, (500, {"message": f"no answer: {call}"}))
        if status == 0:
            return  # hang up
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        if call.endswith("/start"):
            server.script.started.set()
        if call.endswith("/attach"):
            server.script.started.wait(5)
        self.wfile.write(raw)

    do_GET = do_POST = do_DELETE = do_HEAD = _answer  # noqa: N815  http.server's names

    def address_string(self) -> str:
        return "the SDK"

    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""


class _Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True

    def __init__(self, path: str, script: Script) -> None:
        super().__init__(path, _Handler)
        self.script = script

    def handle_error(self, *_arguments: object) -> None:
        """Say nothing: the SDK hangs up when it has what it needs."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """The words of the server that DOCKER_HOST names."""
    found = Script()
    # not tmp_path: a socket's path has 107 characters at most
    with (
        tempfile.TemporaryDirectory() as folder,
        _Server(f"{folder}/docker.sock", found) as server,
    ):
        monkeypatch.setenv("DOCKER_HOST", f"unix://{folder}/docker.sock")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield found
        server.shutdown()
        thread.join()


@pytest.fixture
def engine(script: Script) -> Iterator[Engine]:
    found = connect()
    script.calls.clear()
    yield found
    found._client.close()  # noqa: SLF001  a command leaves it to its end


SPEC = ContainerSpec(image="muster:cpu", command=("true",), shm_bytes=2**30, asks=frozenset(Ask))


# ---- where it is --------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without a docker configuration, and an XDG_RUNTIME_DIR."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    (tmp_path / "runtime").mkdir()
    return tmp_path


def configure(home: Path, context: str, host: str | None) -> None:
    """Make `context` the current one, and where `host` is given make the context too."""
    (home / ".docker").mkdir()
    (home / ".docker/config.json").write_text(json.dumps({"currentContext": context}))
    if host is not None:
        ContextAPI.create_context(name=context, host=host)


def addresses() -> list[Address]:
    return engines._addresses()  # noqa: SLF001  what connect() tries is seen by no other way


def test_docker_host_comes_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(home, "far", "tcp://far:2376")
    monkeypatch.setenv("DOCKER_HOST", "tcp://near:2376")
    monkeypatch.setenv("DOCKER_CONTEXT", "other")
    (address,) = addresses()
    assert str(address) == "DOCKER_HOST: tcp://near:2376"
    assert address.client_flags == ["--host", "tcp://near:2376"]
    assert (address.builder, address.socket) == ("default", None)


@pytest.mark.parametrize(("variable", "name"), [("other", "other"), (None, "far"), ("", "far")])
def test_a_docker_context_comes_next_and_leads_the_client_too(
    home: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, name: str
) -> None:
    configure(home, "far", "tcp://far:2376")
    if variable is not None:
        monkeypatch.setenv("DOCKER_CONTEXT", variable)
    (address,) = addresses()
    assert str(address) == f"docker context: {name}"
    assert address.client_flags == ["--context", name]
    assert (address.builder, address.socket) == (name, None)


def test_else_the_sockets_of_the_system_and_of_the_user(home: Path) -> None:
    system = Path("/var/run/docker.sock")
    here = [system] if system.exists() else []
    assert [address.socket for address in addresses()] == [system]
    for path in (home / "runtime/docker.sock", home / ".docker/run/docker.sock"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        here.append(path)
        assert [address.socket for address in addresses()] == here
    assert addresses()[-1].client_flags == ["--host", f"unix://{here[-1]}"]


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("DOCKER_HOST", "unix:///nonexistent", r"DOCKER_HOST: unix:///nonexistent No such file"),
        ("DOCKER_HOST", "tcp://127.0.0.1:1", r"DOCKER_HOST: tcp://127\.0\.0\.1:1 .*refused"),
        ("DOCKER_HOST", "banana", r"DOCKER_HOST: banana .*port is required"),
        ("DOCKER_CONTEXT", "gone", r"docker context: gone .*not found"),
    ],
)
def test_where_none_answers_it_is_said_why(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(NoEngine, match=says):
        connect()


def test_a_current_context_that_is_gone_is_named(home: Path) -> None:
    configure(home, "gone", None)
    with pytest.raises(NoEngine, match=r"docker context: gone .*not found"):
        connect()


# what connect() says to a user without the right to the socket; root gives its rights up
_AS_NOBODY = """
import os
from muster import engine, errors
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
try:
    engine.connect()
except errors.MusterError as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("folder_mode", "socket_mode", "variable", "errors"),
    [
        (0o711, 0, "DOCKER_HOST", {"EngineRefusesUser"}),
        (0, 0o666, "DOCKER_HOST", {"EngineRefusesUser", "NoEngine"}),
        (0, 0o666, "XDG_RUNTIME_DIR", {"EngineRefusesUser", "NoEngine"}),
    ],
    ids=["the socket", "its folder", "the runtime folder"],
)
def test_a_user_without_the_right_is_told(
    folder_mode: int, socket_mode: int, variable: str, errors: set[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        path = Path(folder) / "docker.sock"
        server.bind(str(path))
        path.chmod(socket_mode)
        Path(folder).chmod(folder_mode)
        value = f"unix://{path}" if variable == "DOCKER_HOST" else folder
        environment = {**os.environ, "HOME": "/nonexistent", variable: value}
        argv = [sys.executable, "-c", _AS_NOBODY]
        done = subprocess.run(argv, env=environment, text=True, capture_output=True, check=False)
        Path(folder).chmod(stat.S_IRWXU)
    assert done.stderr == ""
    assert done.stdout.strip() in errors


# ---- ensure -------------------------------------------------------------------------------------


@dataclass
class No:
    """A user who refuses, and what they were asked."""

    asked: list[str] = field(default_factory=list)

    def __call__(self, question: str) -> bool:
        self.asked.append(question)
        return False


@pytest.mark.usefixtures("script")
def test_an_engine_that_answers_is_taken_without_a_question(progress: Recorder) -> None:
    with contextlib.closing(ensure(No(), progress)._client):  # noqa: SLF001
        assert progress.said == []


@pytest.mark.usefixtures("home")
def test_the_policy_forbids_to_start_one(
    monkeypatch: pytest.MonkeyPatch, progress: Recorder
) -> None:
    monkeypatch.setattr(engines, "connect", _no_engine)
    with pytest.raises(NoEngine, match="MUSTER_ENGINE=existing forbids"):
        ensure(No(), progress)


@pytest.mark.usefixtures("home")
def test_an_unknown_policy_is_refused(monkeypatch: pytest.MonkeyPatch, progress: Recorder) -> None:
    monkeypatch.setattr(engines, "connect", _no_engine)
    monkeypatch.setenv("MUSTER_ENGINE", "never")
    with pytest.raises(UnknownEnginePolicy):
        ensure(No(), progress)


def _no_engine() -> Engine:
    raise NoEngine(["nothing"], "start it")


@pytest.mark.parametrize("host", ["tcp://127.0.0.1:1", "unix:///nonexistent/docker.sock"])
def test_none_is_started_where_another_is_named(
    monkeypatch: pytest.MonkeyPatch,
    progress: Recorder,
    program: Callable[[str, str], Path],
    host: str,
) -> None:
    program("dockerd", "exit 1")
    monkeypatch.setenv("DOCKER_HOST", host)
    monkeypatch.delenv("MUSTER_ENGINE")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    user = No()
    with pytest.raises(NoEngine, match=host):
        ensure(user, progress)
    assert user.asked == []


def test_a_user_who_says_no_gets_none(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    progress: Recorder,
    program: Callable[[str, str], Path],
) -> None:
    monkeypatch.setattr(engines, "connect", _no_engine)
    started = program("dockerd", f"touch {home}/started")
    monkeypatch.delenv("MUSTER_ENGINE")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    user = No()
    with pytest.raises(NoEngine, match="nothing"):
        ensure(user, progress)
    assert user.asked == ["No Docker Engine answers. Start dockerd?"]
    assert started.exists()
    assert not (home / "started").exists()


# ---- what it is asked, and what it refuses ------------------------------------------------------


def test_a_container_is_asked_for_with_all_that_its_spec_says(
    engine: Engine, script: Script
) -> None:
    spec = ContainerSpec(
        image="muster:cpu",
        command=("pytest", "-x"),
        shm_bytes=2**30,
        asks=frozenset(Ask),
        cap_add=("IPC_LOCK",),
        user="0:0",
        environment={"A": "1"},
    )
    with pytest.raises(EngineRefused), engine.run(spec):
        pass
    asked, host = script.created, script.created["HostConfig"]
    assert (asked["Image"], asked["Cmd"], asked["User"]) == ("muster:cpu", ["pytest", "-x"], "0:0")
    assert asked["Env"] == ["A=1"]
    assert (host["ShmSize"], host["CapAdd"], host["Init"]) == (2**30, ["IPC_LOCK"], True)
    assert host["Ulimits"] == [{"Name": "memlock", "Soft": -1, "Hard": -1}]
    assert (host["DeviceRequests"][0]["Count"], host["DeviceRequests"][0]["Capabilities"]) == (
        -1,
        [["gpu"]],
    )
    assert host["Devices"][0]["PathInContainer"] == "/dev/infiniband"


def test_what_is_not_asked_for_is_not_in_the_container(engine: Engine, script: Script) -> None:
    spec = ContainerSpec(image="muster:cpu", command=("true",), shm_bytes=2**26)
    with pytest.raises(EngineRefused), engine.run(spec):
        pass
    host = script.created["HostConfig"]
    assert not {"Ulimits", "DeviceRequests", "Devices", "Privileged"} & host.keys()
    assert host["ShmSize"] == 2**26


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (Ask.MEMLOCK, "runc create failed: error setting rlimit type 8: operation not permitted"),
        (Ask.MEMLOCK, "error setting rlimits for ready process: RLIMIT_MEMLOCK"),
        (Ask.GPUS, 'could not select device driver "" with capabilities: [[gpu]]'),
        (Ask.GPUS, "nvidia-container-cli: initialization error: load library failed"),
        (Ask.GPUS, "CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=all"),
        (Ask.INFINIBAND, 'error gathering device information while adding "/dev/infiniband"'),
    ],
)
def test_a_refused_ask_is_told_by_its_name(
    engine: Engine, script: Script, ask: Ask, message: str
) -> None:
    script.answers["POST /containers/create"] = (500, {"message": f"{message}\nand more"})
    with pytest.raises(AskRefused) as caught, engine.run(SPEC):
        pass
    assert caught.value.ask is ask
    assert message in caught.value.evidence
    assert "and more" not in caught.value.evidence


def test_what_was_not_asked_for_is_not_the_ask_s_refusal(engine: Engine, script: Script) -> None:
    script.answers["POST /containers/create"] = (500, {"message": "error setting rlimit type 8"})
    spec = ContainerSpec(image="i", command=("true",), shm_bytes=1, asks=frozenset({Ask.GPUS}))
    with pytest.raises(EngineRefused, match="a container of i: error setting rlimit") as caught:
        engine.run(spec).__enter__()
    assert not isinstance(caught.value, AskRefused)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((500, {"message": "write /x: no space left on device"}), DiskFull),
        ((409, {"message": "somehow"}), EngineRefused),
        ((0, b""), EngineLost),
    ],
)
def test_other_endings_of_a_start(
    engine: Engine, script: Script, answer: tuple[int, Any], error: type[Exception]
) -> None:
    script.answers["POST /containers/create"] = answer
    with pytest.raises(error) as caught, engine.run(SPEC):
        pass
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((404, {"message": "manifest unknown"}), DigestGone),
        ((500, {"message": "dial tcp: lookup registry: no such host"}), RegistryUnreachable),
        ((0, b""), EngineLost),
    ],
)
def test_endings_of_a_pull(
    engine: Engine, script: Script, answer: tuple[int, Any], error: type[Exception]
) -> None:
    script.answers["POST /images/create"] = answer
    with pytest.raises(error):
        engine.pull("debian@sha256:1")


def test_an_image_is_looked_up_and_never_pulled(engine: Engine, script: Script) -> None:
    script.answers["GET /images/muster:cpu/json"] = (
        200,
        {"Id": "sha256:1", "Size": 5, "Architecture": "amd64", "Config": {"Labels": {"a": "b"}}},
    )
    script.answers["GET /images/absent/json"] = (404, {"message": "No such image: absent"})
    found = engine.image("muster:cpu")
    assert found == engines.Image("muster:cpu", "sha256:1", 5, {"a": "b"}, "amd64")
    assert engine.image("absent") is None
    assert not any(call.startswith("POST") for call in script.calls)


def test_whether_it_still_answers(engine: Engine, script: Script) -> None:
    assert engine.answers()
    script.answers["GET /_ping"] = (0, b"")
    assert not engine.answers()
    script.answers["GET /images/i/json"] = (0, b"")
    with pytest.raises(EngineLost, match="a look at its images"):
        engine.image("i")


# ---- a container that runs ----------------------------------------------------------------------


def frame(stream: int, content: bytes) -> bytes:
    """A frame of a container's output: 1 is standard output, 2 standard error."""
    return bytes([stream, 0, 0, 0]) + len(content).to_bytes(4) + content


@pytest.fixture
def running(script: Script) -> Script:
    """The server holds one container, that starts and ends with exit code 3."""
    script.containers({"made": "somebody"})
    config = {"Tty": False, "Labels": {}}
    script.answers |= {
        "POST /containers/create": (201, {"Id": "made", "Warnings": []}),
        "GET /containers/made/json": (
            200,
            {"Id": "made", "Config": config, "State": {"OOMKilled": False}},
        ),
        "POST /containers/made/attach": (
            200,
            frame(1, b"one\ntw") + frame(2, b"error\n") + frame(1, b"o\n\xff") + frame(1, b"end"),
        ),
        "POST /containers/made/start": (204, b""),
        "POST /containers/made/wait": (200, {"StatusCode": 3}),
    }
    return script


def test_output_comes_by_lines_whatever_the_frames(engine: Engine, running: Script) -> None:
    with engine.run(SPEC) as container:
        assert list(container.lines()) == ["one", "two", "\N{REPLACEMENT CHARACTER}end"]
        assert list(container.stderr) == ["error"]
        assert container.ending("the test") == "exit code 3"
        assert removed(running) == []
    assert removed(running) == ["made"]


def test_memory_that_ran_out_is_told(engine: Engine, running: Script) -> None:
    running.answers["GET /containers/made/json"][1]["State"]["OOMKilled"] = True
    with engine.run(SPEC) as container:
        assert container.ending("the test") == "out of memory, exit code 3"


def test_a_container_that_somebody_removes_is_told(engine: Engine, running: Script) -> None:
    running.answers["POST /containers/made/wait"] = (404, {"message": "No such container"})
    with engine.run(SPEC) as container:
        assert container.ending("the test") == "removed by somebody else"


def test_an_engine_that_goes_while_it_runs_is_lost(engine: Engine, running: Script) -> None:
    running.answers["POST /containers/made/wait"] = (0, b"")
    with pytest.raises(EngineLost, match="the test"), engine.run(SPEC) as container:
        container.ending("the test")


# ---- nothing left behind ------------------------------------------------------------------------


def own_label(engine: Engine, script: Script) -> str:
    with pytest.raises(EngineRefused), engine.run(SPEC):
        pass
    return str(script.created["Labels"][LABEL_OWNER])


def removed(script: Script) -> list[str]:
    prefix = "DELETE /containers/"
    return [call.removeprefix(prefix) for call in script.calls if call.startswith(prefix)]


def test_a_run_that_did_not_start_is_removed_by_its_label(engine: Engine, script: Script) -> None:
    script.containers({"made": "somebody"})
    own_label(engine, script)
    assert len(script.created["Labels"][LABEL_RUN]) == 12
    assert set(removed(script)) == {"made"}


_RUNS = """
import time
from muster.engine import ContainerSpec, connect
with connect().run(ContainerSpec(image="i", command=("true",), shm_bytes=1)):
    print("started", flush=True)
    time.sleep(60)
"""


def test_a_command_that_is_killed_leaves_no_container(running: Script) -> None:
    with subprocess.Popen([sys.executable, "-c", _RUNS], stdout=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == b"started\n"
        assert removed(running) == []
        command.kill()
    wait_until(lambda: removed(running) == ["made"], "the container is removed")


def test_a_sweep_removes_containers_of_commands_that_are_gone_alone(
    engine: Engine, script: Script
) -> None:
    mine = own_label(engine, script)
    host, pid, started = mine.rsplit(" ", 2)
    assert (host, int(pid)) == (socket.gethostname(), os.getpid())
    unused = next(each for each in range(4_000_000, 2, -1) if not psutil.pid_exists(each))
    script.containers({"mine": mine, "elsewhere": f"not-{host} {unused} {started}"})
    assert engine.sweep() == 0
    assert removed(script) == []

    script.containers({"gone": f"{host} {unused} {started}"})
    assert engine.sweep() == 1
    assert removed(script) == ["gone"]

    script.calls.clear()
    script.containers({"reused": f"{host} {pid} {float(started) - 60:.1f}"})
    assert engine.sweep() == 1
    assert removed(script) == ["reused"]


def test_a_container_that_another_removes_meanwhile_is_no_error(
    engine: Engine, script: Script
) -> None:
    script.containers({"gone": f"{socket.gethostname()} {os.getpid()} 1.0"})
    script.answers["GET /containers/gone/json"] = (404, {"message": "No such container: gone"})
    script.answers["DELETE /containers/gone"] = (404, {"message": "No such container: gone"})
    engine.sweep()
    engine.remove_run("gone")
