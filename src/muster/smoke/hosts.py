"""The hosts that a file names, and the `docker run` that makes each of them a node."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster.engine import Ask, ContainerSpec
from muster.errors import HostsUnreadable, HostsWrong, NoHosts
from muster.fabric import Fabric

# no part begins with "-", which ssh would take for an option, or holds what a shell reads
_HOST: Final = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][\w.+-]*)@)?(?P<name>[A-Za-z0-9][\w.-]*)(?::(?P<port>[0-9]{1,5}))?",
    re.ASCII,
)
_LAST_PORT: Final = 65535
# by them a fabric names the interfaces of a pod; the host's have names of their own
_POD_INTERFACES: Final = frozenset({"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES"})


@dataclass(frozen=True)
class Host:
    """A machine that is a node. `name` is its node's, and what the other hosts reach it by.

    `user` and `port` are those that ssh finds by itself where they are None.
    """

    name: str
    user: str | None = None
    port: int | None = None

    @property
    def destination(self) -> str:
        """What ssh takes for it, beside the port."""
        return self.name if self.user is None else f"{self.user}@{self.name}"


@dataclass(frozen=True)
class Command:
    """What one host runs: `argv` there starts the container `container`."""

    host: Host
    container: str
    argv: tuple[str, ...]


def read(path: Path) -> tuple[Host, ...]:
    """The hosts of the file, in its order: [user@]name[:port], one a line; # begins a comment.

    Raises HostsUnreadable, HostsWrong with the line, NoHosts.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise HostsUnreadable(path, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise HostsUnreadable(path, "it is no text in UTF-8") from None
    lines: dict[str, int] = {}
    hosts: list[Host] = []
    for number, written in _written(text):
        host = _host(path, number, written)
        # a second container there would want the ports of the first
        if (before := lines.setdefault(host.name.lower(), number)) != number:
            raise HostsWrong(path, number, f"{host.name} is there already, in line {before}")
        hosts.append(host)
    if not hosts:
        raise NoHosts(path)
    return tuple(hosts)


def _written(text: str) -> Iterator[tuple[int, str]]:
    """What each line says, with its number, without comments and what is empty."""
    for number, line in enumerate(text.split("\n"), start=1):
        if said := line.partition("#")[0].strip():
            yield number, said


def _host(path: Path, number: int, written: str) -> Host:
    found = _HOST.fullmatch(written)
    if found is None:
        shown = written if len(written) <= 80 else f"{written[:80]}…"
        raise HostsWrong(path, number, f"{shown!r} is no host")
    port = None if found["port"] is None else int(found["port"])
    if port is not None and not 0 < port <= _LAST_PORT:
        raise HostsWrong(path, number, f"{port} is no port, which are 1 to {_LAST_PORT}")
    return Host(found["name"], found["user"], port)


def docker_run(spec: ContainerSpec, fabric: Fabric | None, container: str) -> tuple[str, ...]:
    """`docker run` of `spec` as the container `container`, in the host's own network.

    It has what `fabric` needs too, but for what its docker.note says that no flag can give.
    """
    argv = [
        *("docker", "run", "--rm", "--name", container),
        # a name that the host does not know must not be pulled from a stranger's registry
        *("--pull", "never", "--network", "host", "--shm-size", str(spec.shm_bytes)),
    ]
    if spec.init:
        argv += ["--init"]
    if Ask.MEMLOCK in spec.asks:
        argv += ["--ulimit", "memlock=-1"]
    if Ask.GPUS in spec.asks:
        argv += ["--gpus", "all"]
    argv += _each("--device", _devices(spec, fabric))
    argv += _each("--cap-add", [*spec.cap_add, *(fabric.docker.cap_add if fabric else ())])
    environment = {**(_environment(fabric) if fabric else {}), **spec.environment}
    argv += _each("--env", [f"{name}={value}" for name, value in environment.items()])
    if spec.user is not None:
        argv += ["--user", spec.user]
    entrypoint = spec.entrypoint or ()
    if entrypoint:
        # the flag takes a program alone; its arguments go before the command
        argv += ["--entrypoint", entrypoint[0]]
    return (*argv, spec.image, *entrypoint[1:], *spec.command)


def _each(flag: str, values: Sequence[str]) -> list[str]:
    return [word for value in dict.fromkeys(values) for word in (flag, value)]


def _devices(spec: ContainerSpec, fabric: Fabric | None) -> list[str]:
    infiniband = ["/dev/infiniband"] if Ask.INFINIBAND in spec.asks else []
    return [*infiniband, *(fabric.docker.devices if fabric else ())]


def _environment(fabric: Fabric) -> Mapping[str, str]:
    """What the fabric sets, without the names of interfaces that a pod alone has."""
    pod = not fabric.pod.get("hostNetwork", False)
    return {
        str(name): str(value)
        for name, value in fabric.environment.items()
        if not (pod and name in _POD_INTERFACES)
    }
