"""The Docker Engine: find it or start one, what images it holds, run a container, leave nothing.

The one room that imports the docker SDK. Building is the docker client's work (buildkit.py): the
SDK has no BuildKit, https://github.com/docker/docker-py/issues/2230.
"""

import contextlib
import io
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import docker
import docker.errors
import docker.models.containers
import docker.types
import psutil
import requests.exceptions
import urllib3.exceptions
from docker.context import Context, ContextAPI
from docker.context.config import get_current_context_name
from docker.types.daemon import CancellableStream

from muster import dockerd, process
from muster.errors import (
    DigestGone,
    DiskFull,
    EngineLost,
    EngineRefused,
    EngineRefusesUser,
    MachineLacks,
    NoEngine,
)
from muster.progress import Progress

LABEL_RUN = "io.muster.run"
LABEL_OWNER = "io.muster.owner"

DEFAULT_SOCKET = Path("/var/run/docker.sock")
CONNECT_LIMIT_S = 15
ANSWER_LIMIT_S = 300
START_LIMIT_S = 60.0

# an errno's words, printed by str() or by repr()
_ERRNO = re.compile(r"\[Errno -?\d+\] ([\w ]+)|Error\(\d+, '([^']+)'\)")
_LOST = (
    requests.exceptions.ConnectionError,
    requests.exceptions.ReadTimeout,
    requests.exceptions.ChunkedEncodingError,
    urllib3.exceptions.HTTPError,
    ConnectionError,
)


@dataclass(frozen=True)
class Address:
    """Where an Engine may be: a URL or a docker context, and who named it."""

    named_by: str
    url: str | None = None
    context: str | None = None

    @property
    def client_flags(self) -> list[str]:
        """The docker client's global flags that lead it to the same Engine."""
        if self.context is not None:
            return ["--context", self.context]
        return ["--host", self.url] if self.url is not None else []

    @property
    def builder(self) -> str:
        """buildx's name for the builder inside that Engine."""
        return self.context or "default"

    @property
    def socket(self) -> Path | None:
        scheme, _, path = (self.url or "").partition("://")
        return Path(path) if scheme == "unix" else None

    def __str__(self) -> str:
        return f"{self.named_by}: {self.context or self.url}"


@dataclass(frozen=True)
class Image:
    """An image on the Engine. `size` in bytes, as `docker images` shows it."""

    ref: str
    id: str
    size: int
    labels: Mapping[str, str]
    architecture: str
    user: str = ""
    entrypoint: tuple[str, ...] = ()


class Ask(StrEnum):
    """What a container asks of the Engine beyond the ordinary, and the Engine may refuse."""

    MEMLOCK = "memlock"
    GPUS = "gpus"
    INFINIBAND = "infiniband"


# what the Engine says at the start of a container when it refuses
_REFUSALS = {
    Ask.MEMLOCK: re.compile(r"rlimit", re.IGNORECASE),
    Ask.GPUS: re.compile(r"could not select device driver|nvidia-container-cli|unresolvable CDI"),
    Ask.INFINIBAND: re.compile(r"device information|/dev/infiniband"),
}


class AskRefused(EngineRefused):
    """The Engine refused one of the asks; the same container may start without it."""

    def __init__(self, ask: Ask, evidence: str) -> None:
        super().__init__(f"a container with {ask}", evidence)
        self.ask = ask
        self.evidence = evidence


class RegistryUnreachable(MachineLacks):
    """The registry did not answer; the base can still be made from Debian's packages."""

    def __init__(self, ref: str, evidence: str) -> None:
        super().__init__(f"the registry of {ref} cannot be reached: {evidence}", "give --base REF")
        self.evidence = evidence


@dataclass(frozen=True, kw_only=True)
class ContainerSpec:
    """One container: what runs in it and what it asks of the Engine. `shm_bytes` is /dev/shm.

    `user` and `entrypoint` are the image's own unless given.
    """

    image: str
    command: tuple[str, ...]
    shm_bytes: int
    asks: frozenset[Ask] = frozenset()
    cap_add: tuple[str, ...] = ()
    user: str | None = None
    entrypoint: tuple[str, ...] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    # reaps what torchrun's ranks leave, as a pod's pause process does
    init: bool = True


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a container of a Stage stands, as a pod does: its names, its files, its rights.

    `aliases` are its further names on the Stage's network, `tmpfs` and `volumes` (by name) are
    mounted at their folders. `beside` is a container whose network it shares.
    """

    hostname: str | None = None
    domain: str | None = None
    aliases: tuple[str, ...] = ()
    beside: "Container | None" = None
    tmpfs: tuple[str, ...] = ()
    volumes: Mapping[str, str] = field(default_factory=dict)
    memory_bytes: int | None = None
    groups: tuple[str, ...] = ()
    cap_drop: tuple[str, ...] = ()
    read_only: bool = False
    no_new_privileges: bool = False
    working_folder: str | None = None


class Container:
    """A container that runs; its standard output line by line, its exit code at the end."""

    def __init__(
        self,
        container: docker.models.containers.Container,
        # quoted: generic in its stubs alone
        output: "CancellableStream[tuple[bytes | None, bytes | None]]",
    ) -> None:
        self._container = container
        self._output = output
        self.stderr: deque[str] = deque(maxlen=40)

    @property
    def name(self) -> str:
        return str(self._container.name)

    def all_lines(self) -> Iterator[str]:
        """Lines of both outputs, as they come, until the container ends."""
        rest = {0: b"", 1: b""}
        with contextlib.suppress(*_LOST):
            for parts in self._output:
                for number, part in enumerate(parts):
                    *whole, rest[number] = (rest[number] + (part or b"")).split(b"\n")
                    for line in whole:
                        yield line.decode(errors="replace")
        yield from (last.decode(errors="replace") for last in rest.values() if last)

    def exit_code(self) -> int | None:
        """Its exit code; None while it runs. EngineLost when nobody answers."""
        with _answers("a look at a container"):
            self._container.reload()
        state = self._container.attrs["State"]
        return None if state["Running"] or state["Status"] == "created" else int(state["ExitCode"])

    def send(self, number: signal.Signals) -> None:
        """Send a signal to its first process, if that still runs."""
        # 409: it ended a moment ago
        with _answers("a signal"), contextlib.suppress(docker.errors.APIError):
            self._container.kill(signal=number.name)

    def execute(self, argv: Sequence[str], *, user: str = "") -> str:
        """What `argv` prints, run in the container; "" when that ended a moment ago."""
        with _answers("a command in a container"), contextlib.suppress(docker.errors.APIError):
            done = self._container.exec_run(list(argv), user=user)
            assert isinstance(done.output, bytes)
            return done.output.decode(errors="replace")
        return ""

    def lines(self) -> Iterator[str]:
        """Lines of standard output until the container ends; `stderr` keeps the other's last."""
        rest = b""
        with contextlib.suppress(*_LOST):  # exit_code() says what it was
            for out, err in self._output:
                self.stderr.extend((err or b"").decode(errors="replace").splitlines())
                *whole, rest = (rest + (out or b"")).split(b"\n")
                for line in whole:
                    yield line.decode(errors="replace")
        if rest:
            yield rest.decode(errors="replace")

    def ending(self, during: str) -> str:
        """How it ended, in words: "exit code 1", "out of memory"; EngineLost if nobody knows."""
        try:
            with _answers(during):
                exit_code = int(self._container.wait(timeout=CONNECT_LIMIT_S)["StatusCode"])
                self._container.reload()
        except docker.errors.NotFound:
            return "removed by somebody else"
        if self._container.attrs["State"].get("OOMKilled"):
            return f"out of memory, exit code {exit_code}"
        return f"exit code {exit_code}"


class Engine:
    """A Docker Engine that answers."""

    def __init__(self, client: docker.DockerClient, address: Address) -> None:
        self._client = client
        self.address = address
        with _answers("the first look"):
            version: dict[str, Any] = client.version()
        self.version = str(version["Version"])
        self.architecture = str(version["Arch"])

    @property
    def host(self) -> str:
        """The name of the machine that it runs on."""
        with _answers("a look at its machine"):
            return str(self._client.info()["Name"])

    def answers(self) -> bool:
        """Whether it still does."""
        try:
            return bool(self._client.ping())
        except (docker.errors.DockerException, *_LOST):
            return False

    def image(self, ref: str) -> Image | None:
        """The image `ref` if it is on this Engine; nothing is pulled."""
        with _answers("a look at its images"):
            try:
                found = self._client.images.get(ref)
            except docker.errors.ImageNotFound:
                return None
        config: Mapping[str, Any] = found.attrs.get("Config") or {}
        return Image(
            ref,
            str(found.id),
            int(found.attrs["Size"]),
            found.labels or {},
            str(found.attrs["Architecture"]),
            user=config.get("User") or "",
            entrypoint=tuple(config.get("Entrypoint") or ()),
        )

    def pull(self, ref: str) -> None:
        """Pull `ref`; DigestGone when the registry says so, RegistryUnreachable otherwise."""
        with _answers("a pull"):
            try:
                self._client.images.pull(ref)
            except docker.errors.NotFound as error:
                raise DigestGone(ref) from error
            except docker.errors.APIError as error:
                raise RegistryUnreachable(ref, _first_line(error)) from error

    def registry_digest(self, image: str) -> tuple[str, str, tuple[str, ...]]:
        """What `image` is in its registry now: digest, media type, architectures. Pulls nothing.

        DigestGone when the registry says that it has none, RegistryUnreachable otherwise.
        """
        with _answers("a look at a registry"):
            try:
                found = self._client.images.get_registry_data(image)
            except docker.errors.NotFound as error:
                raise DigestGone(image) from error
            except docker.errors.APIError as error:
                raise RegistryUnreachable(image, _first_line(error)) from error
        descriptor: Mapping[str, Any] = found.attrs["Descriptor"]
        # an Engine that does not look into a manifest says nothing of platforms
        architectures = tuple(str(row["architecture"]) for row in found.attrs["Platforms"] or ())
        return str(descriptor["digest"]), str(descriptor.get("mediaType", "")), architectures

    def import_image(self, tar: Path, ref: str, labels: Mapping[str, str]) -> None:
        """Make the image `ref` of one layer from the root filesystem in `tar`."""
        repository, _, tag = ref.partition(":")
        changes = [f'LABEL {name}="{value}"' for name, value in labels.items()]
        with _answers("an import"), _refuses(f"to import {ref}"):
            self._client.api.import_image(
                src=str(tar), repository=repository, tag=tag, changes=changes
            )

    def read_file(self, ref: str, path: str) -> bytes:
        """The file `path` of the image `ref`; EngineRefused when it has none."""
        run_id = uuid.uuid4().hex[:12]
        with _answers("a look into an image"), _refuses(f"to read {path} of {ref}"):
            container = self._client.containers.create(ref, labels=_labels(run_id))
            try:
                chunks, _ = container.get_archive(path)
                with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
                    member = archive.extractfile(archive.getmembers()[0])
                    return member.read() if member else b""
            finally:
                container.remove(force=True)

    def save(self, ref: str) -> Iterator[bytes]:
        """The archive that `docker save` writes of the image `ref`, in chunks as they come."""
        with _answers("the saving of an image"), _refuses(f"to save {ref}"):
            yield from self._client.api.get_image(ref, chunk_size=2**20)

    def discard(self, image: Image) -> None:
        """Remove an image that a newer one took the name from, unless something still uses it."""
        with _answers("the clean-up"), contextlib.suppress(docker.errors.APIError):
            if not self._client.images.get(image.id).tags:
                self._client.images.remove(image.id)

    @contextlib.contextmanager
    def stage(self) -> Iterator["Stage"]:
        """A network of its own for containers that stand for pods; all is removed on leaving."""
        with self._begin() as run:
            yield Stage(self._client, run)

    @contextlib.contextmanager
    def run(self, spec: ContainerSpec) -> Iterator[Container]:
        """The started container of `spec`; removed by force on leaving, however that happens.

        Raises AskRefused when the Engine refuses one of its asks, EngineRefused for the rest.
        """
        with self._begin() as run:
            yield run.start(f"muster-{run.id}", spec, _create_options(spec))

    @contextlib.contextmanager
    def _begin(self) -> Iterator["_Run"]:
        """A run with a name of its own; all that it made is removed on leaving."""
        run_id = uuid.uuid4().hex[:12]
        with _reaper(run_id), contextlib.ExitStack() as open_streams:
            try:
                yield _Run(self._client, run_id, open_streams)
            finally:
                with contextlib.suppress(EngineLost):  # the next sweep tries again
                    self.remove_run(run_id)

    def remove_run(self, run_id: str) -> None:
        """Remove all that the run `run_id` made on this Engine."""
        self._remove(f"{LABEL_RUN}={run_id}")

    def sweep(self) -> int:
        """Remove containers of Muster's commands on this host that are gone; how many."""
        with _answers("a sweep"):
            mine = self._containers(LABEL_OWNER)
            networks = self._client.networks.list(filters={"label": LABEL_OWNER})
        stale = [each for each in mine if _is_gone(each.labels[LABEL_OWNER])]
        labels = [each.labels for each in stale]
        labels += [each.attrs["Labels"] for each in networks]
        for run_id in {each[LABEL_RUN] for each in labels if _is_gone(each[LABEL_OWNER])}:
            self.remove_run(run_id)
        return len(stale)

    def _containers(self, label: str) -> list[docker.models.containers.Container]:
        # another may remove one while the SDK looks at them one by one
        return self._client.containers.list(all=True, filters={"label": label}, ignore_removed=True)

    def _remove(self, label: str) -> None:
        with _answers("the clean-up"):
            for container in self._containers(label):
                with contextlib.suppress(docker.errors.APIError):
                    container.remove(force=True, v=True)
            for network in self._client.networks.list(filters={"label": label}):
                with contextlib.suppress(docker.errors.APIError):
                    network.remove()
            for volume in self._client.volumes.list(filters={"label": label}):
                with contextlib.suppress(docker.errors.APIError):
                    volume.remove(force=True)


@dataclass(frozen=True)
class _Run:
    """What one command makes on the Engine: labelled with `id`, so that all of it is found."""

    client: docker.DockerClient
    id: str
    open_streams: contextlib.ExitStack

    def start(self, name: str, spec: ContainerSpec, options: Mapping[str, Any]) -> Container:
        """The started container `name`. Raises AskRefused, EngineRefused."""
        with _answers("the start of a container"), _refuses_asks(spec):
            container = self.client.containers.create(name=name, labels=_labels(self.id), **options)
            # attached before the start: no line is missed, whatever the log driver
            output = self.client.api.attach(str(container.id), stream=True, demux=True)
            self.open_streams.callback(_close, output)
            try:
                container.start()
            except docker.errors.APIError:
                # another may be started in its place while the rest of the run goes on
                container.remove(force=True, v=True)
                raise
        return Container(container, output)


class Stage:
    """A network on the Engine and the containers on it."""

    def __init__(self, client: docker.DockerClient, run: "_Run") -> None:
        self._client = client
        self._run = run
        self._count = itertools.count()
        self._network = self._new_network()

    def _new_network(self) -> str:
        with _answers("the making of a network"), _refuses("a network"):
            name = f"muster-{self._run.id}-{next(self._count)}"
            made = self._client.networks.create(
                name, driver="bridge", check_duplicate=True, labels=_labels(self._run.id)
            )
        return str(made.name)

    def volume(self, name: str, files: Mapping[str, bytes], image: str) -> str:
        """A volume that every user may write, with `files` by name; its name on the Engine.

        `image` needs a chmod: the Engine makes volumes that only root may write.
        """
        full = f"muster-{self._run.id}-{name}"
        with _answers("the making of a volume"), _refuses("a volume"):
            self._client.volumes.create(full, labels=_labels(self._run.id))
            container = self._client.containers.create(
                image,
                entrypoint=["chmod", "0777", "/volume"],
                user="0:0",
                labels=_labels(self._run.id),
                volumes={full: {"bind": "/volume", "mode": "rw"}},
                network_mode="none",
            )
            container.put_archive("/volume", _archive(files))
            container.start()
            container.wait(timeout=CONNECT_LIMIT_S)
            container.remove(force=True)
        return full

    def start(self, spec: ContainerSpec, place: Place) -> Container:
        """The started container; its names are known on the network from now on."""
        options = _create_options(spec) | _place_options(place)
        if place.beside is not None:
            options["network_mode"] = f"container:{place.beside.name}"
        else:
            options["network"] = self._network
            config = self._client.api.create_endpoint_config(aliases=list(place.aliases))
            options["networking_config"] = {self._network: config}
        return self._run.start(f"muster-{self._run.id}-{next(self._count)}", spec, options)

    def second_network(self) -> str:
        """Another network, for `connect`."""
        return self._new_network()

    def connect(self, network: str, container: Container, aliases: Sequence[str]) -> None:
        """Put a container on another network too, under `aliases` there."""
        with _answers("a network"), _refuses(f"to connect {container.name}"):
            self._client.networks.get(network).connect(container.name, aliases=list(aliases))


# ---- finding one -------------------------------------------------------------------------------


def connect() -> Engine:
    """The Engine that DOCKER_HOST, the docker context or the default sockets name."""
    tried: list[str] = []
    denied: list[Address] = []
    for address in _addresses():
        try:
            return Engine(_client(address), address)
        except (docker.errors.DockerException, EngineLost) as error:
            if address.socket and _is_denied(address.socket):
                denied.append(address)
            tried.append(f"{address} {_plain(error)}")
    if denied:
        raise EngineRefusesUser(str(denied[0]))
    raise NoEngine(tried, "start Docker, or name another Engine in DOCKER_HOST")


def ensure(confirm: Callable[[str], bool], progress: Progress) -> Engine:
    """The Engine that answers; if none does, install and start the distribution's, if allowed.

    `confirm` is asked before anything is installed or started, with what would be done.
    """
    try:
        return connect()
    except NoEngine as error:
        if not any(address.socket == DEFAULT_SOCKET for address in _addresses()):
            raise  # the user named another Engine: one that is started here would not be used
        if why := dockerd.forbidden():
            remedy = "install docker.io (Debian, Ubuntu) or Docker's own packages, and start it"
            raise NoEngine([*error.tried, why], f"{remedy}; or run this as root") from None
        missing = not dockerd.is_installed()
        doing = "install docker.io and start dockerd" if missing else "start dockerd"
        if not confirm(f"No Docker Engine answers. {doing.capitalize()}?"):
            raise
    if missing:
        dockerd.install(progress)
    return _start(progress)


def _start(progress: Progress) -> Engine:
    # the package may have started it on its own by now
    with contextlib.suppress(NoEngine):
        return connect()
    daemon = dockerd.start(progress)
    try:
        engine = _wait_for(daemon)
    except BaseException:
        # nobody could stop it later: it is not noted as ours
        if daemon is not None:
            process.end(daemon)
        raise
    if daemon is not None:
        dockerd.remember(daemon)
    return engine


def _wait_for(daemon: subprocess.Popen[bytes] | None) -> Engine:
    """The Engine once it answers; DockerdFailed when `daemon` ends before or takes too long."""
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        try:
            return connect()
        except NoEngine as error:
            late = time.monotonic() > deadline
            if daemon is not None and (late or daemon.poll() is not None):
                raise dockerd.failure(daemon) from None
            if late:
                raise error from None
            time.sleep(0.2)


def _addresses() -> list[Address]:
    """Where to look, in the docker client's own order; the first that is named is the only one."""
    if host := os.environ.get("DOCKER_HOST"):
        return [Address("DOCKER_HOST", url=host)]
    name = os.environ.get("DOCKER_CONTEXT") or str(get_current_context_name())
    if name != "default":
        return [Address("docker context", context=name)]
    sockets = [DEFAULT_SOCKET, Path.home() / ".docker/run/docker.sock"]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        sockets.insert(1, Path(runtime) / "docker.sock")
    present = [path for path in sockets if _is_there(path)] or sockets[:1]
    return [Address("default socket", url=f"unix://{path}") for path in present]


def _is_there(path: Path) -> bool:
    """Whether the socket `path` exists, or this user may not even know."""
    try:
        path.stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _is_denied(path: Path) -> bool:
    return _is_there(path) and not os.access(path, os.W_OK)


def _client(address: Address) -> docker.DockerClient:
    if address.named_by == "DOCKER_HOST":
        client = docker.from_env(timeout=CONNECT_LIMIT_S)
    elif address.context is not None:
        client = _context_client(address.context)
    else:
        client = docker.DockerClient(base_url=address.url, timeout=CONNECT_LIMIT_S)
    client.api.timeout = ANSWER_LIMIT_S
    return client


def _context_client(name: str) -> docker.DockerClient:
    context: Context | None = ContextAPI.get_context(name)
    if context is None:
        raise docker.errors.ContextNotFound(name)
    return docker.DockerClient(
        base_url=context.Host,
        tls=context.TLSConfig or False,
        timeout=CONNECT_LIMIT_S,
        use_ssh_client=str(context.Host).startswith("ssh://"),
    )


# ---- what it refuses, and when it is gone -------------------------------------------------------


@contextlib.contextmanager
def _answers(during: str) -> Iterator[None]:
    """A lost connection becomes EngineLost."""
    try:
        yield
    except _LOST as error:
        raise EngineLost(during, _plain(error)) from error


@contextlib.contextmanager
def _refuses(doing: str) -> Iterator[None]:
    """What the Engine answers with an error becomes EngineRefused, or DiskFull."""
    try:
        yield
    except docker.errors.APIError as error:
        evidence = _first_line(error)
        if "no space left on device" in evidence:
            raise DiskFull("the Engine's", evidence) from error
        raise EngineRefused(doing, evidence) from error


@contextlib.contextmanager
def _refuses_asks(spec: ContainerSpec) -> Iterator[None]:
    """The same, and a refusal of one of the asks becomes AskRefused."""
    try:
        with _refuses(f"a container of {spec.image}"):
            yield
    except EngineRefused as error:
        if (ask := refused(spec, error.what)) is not None:
            raise AskRefused(ask, error.what) from error
        raise


def refused(spec: ContainerSpec, said: str) -> Ask | None:
    """Which of the asks of `spec` an Engine refuses that says `said`; None for none of them."""
    return next((ask for ask in sorted(spec.asks) if _REFUSALS[ask].search(said)), None)


def _first_line(error: docker.errors.APIError) -> str:
    return str(error.explanation or error).strip().splitlines()[0]


def _plain(error: BaseException) -> str:
    """The innermost reason, without the wrappers' class names around it."""
    reasons = _ERRNO.findall(str(error))
    return "".join(reasons[-1]) if reasons else str(error)


def _create_options(spec: ContainerSpec) -> dict[str, Any]:
    options: dict[str, Any] = {
        "image": spec.image,
        "command": list(spec.command),
        "shm_size": spec.shm_bytes,
        "cap_add": list(spec.cap_add),
        "environment": dict(spec.environment),
        "user": spec.user,
        "entrypoint": None if spec.entrypoint is None else list(spec.entrypoint),
        "init": spec.init,
    }
    if Ask.MEMLOCK in spec.asks:
        options["ulimits"] = [docker.types.Ulimit(name="memlock", soft=-1, hard=-1)]
    if Ask.GPUS in spec.asks:
        options["device_requests"] = [docker.types.DeviceRequest(count=-1, capabilities=[["gpu"]])]
    if Ask.INFINIBAND in spec.asks:
        options["devices"] = ["/dev/infiniband:/dev/infiniband:rwm"]
    return options


def _place_options(place: Place) -> dict[str, Any]:
    options: dict[str, Any] = {
        "hostname": place.hostname,
        "domainname": place.domain,
        # as Kubernetes makes an emptyDir
        "tmpfs": dict.fromkeys(place.tmpfs, "mode=0777"),
        "volumes": {name: {"bind": at, "mode": "rw"} for name, at in place.volumes.items()},
        "mem_limit": place.memory_bytes,
        "group_add": list(place.groups),
        "cap_drop": list(place.cap_drop),
        "read_only": place.read_only,
        "security_opt": ["no-new-privileges"] if place.no_new_privileges else [],
        "working_dir": place.working_folder,
    }
    return {name: value for name, value in options.items() if value}


def _archive(files: Mapping[str, bytes]) -> bytes:
    """`files` by name as the tar archive that the Engine unpacks, for every user to read."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _labels(run_id: str) -> dict[str, str]:
    return {LABEL_RUN: run_id, LABEL_OWNER: _owner()}


def _close(output: "CancellableStream[tuple[bytes | None, bytes | None]]") -> None:
    # over ssh the SDK cannot, and a dead Engine's socket is closed already
    with contextlib.suppress(docker.errors.DockerException, OSError):
        output.close()


# ---- nothing left behind ------------------------------------------------------------------------


@contextlib.contextmanager
def _reaper(run_id: str) -> Iterator[None]:
    """While this lasts, a process that removes the run if this one ends, even by SIGKILL."""
    with subprocess.Popen(
        [sys.executable, "-m", "muster.reaper", run_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as reaper:
        yield
        # after an exception it lives on for one more look: its pipe closes, and we wait for it
        reaper.kill()


def _owner() -> str:
    """This process, so that another can tell whether it still lives: host, pid, start time."""
    me = psutil.Process()
    return f"{socket.gethostname()} {me.pid} {me.create_time():.1f}"


def _is_gone(owner: str) -> bool:
    host, pid, started = owner.rsplit(" ", 2)
    if host != socket.gethostname():
        return False
    try:
        return f"{psutil.Process(int(pid)).create_time():.1f}" != started
    except psutil.NoSuchProcess:
        return True
