"""Containers on other machines, by the user's own ssh: its configuration, its agent, its keys."""

import contextlib
import queue
import shlex
import subprocess
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from muster import engine, process
from muster.engine import AskRefused, ContainerSpec
from muster.errors import HostsDisagree, HostsNotReady, MissingTool
from muster.fabric import Fabric
from muster.smoke.hosts import Command, Host, docker_run

ASK_LIMIT_S: Final = 60.0
LEAVE_LIMIT_S: Final = 15.0
# https://man.openbsd.org/ssh#EXIT_STATUS: of ssh itself; all others are the remote command's
_SSH_FAILED: Final = 255
_OPTIONS: Final = (
    # no terminal, which would join the two outputs
    "-T",
    # nobody is there to type a password, or to vouch for a host's key
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=10"),
    # a host that loses its power says no goodbye
    *("-o", "ServerAliveInterval=10", "-o", "ServerAliveCountMax=3"),
    # a connection that others then share would outlive the command
    *("-o", "ControlMaster=no"),
)
# Runs on the host: docker run, beside a guard that removes the container when standard input
# ends. That is when Muster leaves, by whatever way, and when the connection is lost. It removes
# again and again: the container may not be there yet.
_GUARDED: Final = (
    'exec 3<&0 </dev/null; name=$1; shift; "$@" 3<&- & run=$!;'
    ' (read -r _ <&3; while kill -0 $run; do docker rm --force "$name"; sleep 1; done)'
    " >/dev/null 2>&1 & guard=$!;"
    " wait $run; code=$?; kill $guard 2>/dev/null; exit $code"
)


class Running:
    """A container on a host; its standard output line by line, how it ended at the end."""

    def __init__(self, host: Host, child: subprocess.Popen[bytes]) -> None:
        self.host = host
        self.stderr: deque[str] = deque(maxlen=40)
        self._child = child
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        _read_all(child.stdout, self._said.put)
        self._errors = _read_all(child.stderr, self._keep)

    def lines(self) -> Iterator[str]:
        """Lines of standard output until the container ends; `stderr` keeps the other's last."""
        return iter(self._said.get, None)

    def ending(self, during: str) -> str:
        """How it ended, in words: "exit code 1", or what ssh said when it lost the host."""
        returncode = self.wait(LEAVE_LIMIT_S)
        if returncode is None:
            return f"ssh to {self.host.name} did not end during {during}"
        if returncode == _SSH_FAILED:
            return f"no connection to {self.host.name} during {during}: {self.words}"
        return process.ending(returncode)

    def wait(self, limit_s: float) -> int | None:
        """Its exit code, ssh's own included; None when it still runs after `limit_s` seconds."""
        try:
            returncode = self._child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        self._errors.join(limit_s)
        return returncode

    @property
    def words(self) -> str:
        """What standard error ended with."""
        return _words(self.stderr)

    def _keep(self, line: str | None) -> None:
        if line is not None:
            self.stderr.append(line)


@contextlib.contextmanager
def started(commands: Sequence[Command]) -> Iterator[tuple[Running, ...]]:
    """The containers of all hosts, in the order of `commands`; gone on leaving, whatever happens.

    A host that cannot be reached raises nothing here: its Running has ended, and tells.
    """
    children: list[tuple[Command, subprocess.Popen[bytes]]] = []
    with contextlib.ExitStack() as stack:
        try:
            for each in commands:
                argv = ["sh", "-c", _GUARDED, "sh", each.container, *each.argv]
                child = stack.enter_context(_ssh(each.host, argv, stdin=subprocess.PIPE))
                children.append((each, child))
            yield tuple(Running(each.host, child) for each, child in children)
        finally:
            _leave(children)


def _leave(children: Sequence[tuple[Command, subprocess.Popen[bytes]]]) -> None:
    """Let each host's guard do its work; where that is in doubt, ask once more."""
    for _, child in children:
        assert child.stdin is not None
        child.stdin.close()
    deadline = time.monotonic() + LEAVE_LIMIT_S
    doubtful: dict[Host, list[str]] = {}
    for each, child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.1, deadline - time.monotonic()))
        if child.poll() in {None, _SSH_FAILED}:
            doubtful[each.host] = ["docker", "rm", "--force", each.container]
    _ask(doubtful, LEAVE_LIMIT_S)


def _read_all(
    stream: Iterable[bytes] | None, heed: Callable[[str | None], None]
) -> threading.Thread:
    """A thread that gives `heed` the lines of `stream`, and None when it ends."""
    assert stream is not None

    def read() -> None:
        # closed under us is an end too
        with contextlib.suppress(ValueError, OSError):
            for raw in stream:
                heed(raw.decode(errors="replace").rstrip("\r\n"))
        heed(None)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    return reading


# ---- before anything starts --------------------------------------------------------------------


def image_id(hosts: Sequence[Host], ref: str) -> str:
    """The id of the image `ref`, which all hosts have. Raises HostsNotReady, HostsDisagree."""
    look = ["docker", "image", "inspect", "--format", "{{.Id}}", ref]
    answers = _ask(dict.fromkeys(hosts, look), ASK_LIMIT_S)
    lacks = [lack for host, answer in answers.items() if (lack := _lack(host, answer, ref))]
    if lacks:
        raise _not_ready(lacks)
    having: dict[str, list[str]] = {}
    for host, answer in answers.items():
        # before it may stand what the user's shell there greets with
        *_, one = answer.output.split()
        having.setdefault(one, []).append(host.name)
    if len(having) > 1:
        raise HostsDisagree(ref, [f"{one}: {', '.join(names)}" for one, names in having.items()])
    return next(iter(having))


def refusals(
    hosts: Sequence[Host], spec: ContainerSpec, fabric: Fabric | None
) -> dict[Host, tuple[AskRefused, ...]]:
    """What each host's Engine refuses of the asks of `spec`, to a container that does nothing.

    Raises HostsNotReady where one does not start without them either.
    """
    found: dict[Host, tuple[AskRefused, ...]] = dict.fromkeys(hosts, ())
    pending = dict.fromkeys(hosts, replace(spec, command=("true",)))
    lacks: list[_Lack] = []
    while pending:
        ended = _tried(pending, fabric)
        tried, pending = pending, {}
        for host, answer in ended.items():
            if answer.returncode == 0:
                continue
            ask = engine.refused(tried[host], answer.words)
            if ask is None:
                lacks += filter(None, [_lack(host, answer, spec.image)])
                continue
            found[host] += (AskRefused(ask, answer.words),)
            pending[host] = replace(tried[host], asks=tried[host].asks - {ask})
    if lacks:
        raise _not_ready(lacks)
    return found


def _tried(specs: Mapping[Host, ContainerSpec], fabric: Fabric | None) -> "dict[Host, _Answer]":
    """How a container of each spec ended on its host."""
    names = {host: f"muster-smoke-{uuid.uuid4().hex[:12]}" for host in specs}
    commands = [
        Command(host, names[host], docker_run(spec, fabric, names[host]))
        for host, spec in specs.items()
    ]
    deadline = time.monotonic() + ASK_LIMIT_S
    with started(commands) as trials:
        return {
            each.host: _Answer(each.wait(max(0.1, deadline - time.monotonic())), "", each.words)
            for each in trials
        }


@dataclass(frozen=True)
class _Answer:
    """How a command on a host ended: `returncode` is None when it did not, ssh's own is 255."""

    returncode: int | None
    output: str
    words: str


@dataclass(frozen=True)
class _Lack:
    """What keeps a host from being a node."""

    problem: str
    remedy: str


def _lack(host: Host, answer: _Answer, ref: str) -> _Lack | None:
    """What `answer` says that the host lacks; None where docker did as it was told."""
    if answer.returncode == 0:
        return None
    if answer.returncode is None:
        return _Lack(
            f"{host.name}: no answer within {ASK_LIMIT_S:.0f} s",
            "see what keeps docker there from answering",
        )
    if answer.returncode == _SSH_FAILED:
        return _Lack(
            f"{host.name}: {answer.words}",
            "make `ssh -o BatchMode=yes HOST true` work: it may ask for nothing, so a key that"
            " needs no typing, and a host key that is known",
        )
    if "no such image" in answer.words.lower():
        return _Lack(
            f"{host.name}: has no image {ref}",
            f"copy it there, docker save {ref} | ssh HOST docker load; or push it to a registry,"
            " and docker pull it on every host",
        )
    return _Lack(
        f"{host.name}: {answer.words}",
        "docker on that host must do this for the user that ssh comes as",
    )


def _not_ready(lacks: Sequence[_Lack]) -> HostsNotReady:
    remedies = dict.fromkeys(lack.remedy for lack in lacks)
    return HostsNotReady([lack.problem for lack in lacks], list(remedies))


def _words(said: Iterable[str]) -> str:
    """Docker's own error, or else the last line."""
    telling = [line.strip() for line in said if line.strip()] or ["without a word"]
    # more comes after it: where to read on, and what the client itself stumbles over then
    return next((line for line in telling if line.startswith("docker: ")), telling[-1])


# ---- ssh ---------------------------------------------------------------------------------------


def _ask(questions: Mapping[Host, Sequence[str]], limit_s: float) -> dict[Host, _Answer]:
    """What each host answers to its command; all are asked at once."""
    deadline = time.monotonic() + limit_s
    with contextlib.ExitStack() as stack:
        asked = {
            host: stack.enter_context(_ssh(host, argv, stdin=subprocess.DEVNULL))
            for host, argv in questions.items()
        }
        return {host: _answer(child, deadline) for host, child in asked.items()}


def _answer(child: subprocess.Popen[bytes], deadline: float) -> _Answer:
    try:
        output, errors = child.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return _Answer(None, "", "")
    words = _words(errors.decode(errors="replace").splitlines())
    return _Answer(child.returncode, output.decode(errors="replace"), words)


@contextlib.contextmanager
def _ssh(host: Host, argv: Sequence[str], *, stdin: int) -> Iterator[subprocess.Popen[bytes]]:
    """`argv` on the host, its two outputs apart; ssh is ended on leaving."""
    port = [] if host.port is None else ["-p", str(host.port)]
    command = ["ssh", *_OPTIONS, *port, "--", host.destination, shlex.join(argv)]
    with contextlib.ExitStack() as stack:
        try:
            child = stack.enter_context(process.start(command, stdin=stdin, stderr=subprocess.PIPE))
        except FileNotFoundError:
            raise MissingTool("ssh", "install openssh-client") from None
        yield child
