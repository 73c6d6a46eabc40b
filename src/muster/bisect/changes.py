"""What is changed for one run: a switch set, one of the caller's taken out, or fewer GPUs."""

import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from muster import node, switches
from muster.bisect import layers
from muster.bisect.layers import Layer

VISIBLE = "CUDA_VISIBLE_DEVICES"
_IFNAME = "NCCL_SOCKET_IFNAME"
# the log itself, its subsystems, file and time stamps
_DEBUG = "NCCL_DEBUG"
# they choose devices: what once fitted a node is the first to be wrong on another
_CHOICES = (_IFNAME, "NCCL_IB_HCA")


@dataclass(frozen=True, kw_only=True)
class Change:
    """`sets` and `unsets` are variables. It has no layer where it changes nothing, or only GPUs."""

    name: str
    sets: Mapping[str, str] = field(default_factory=dict)
    unsets: tuple[str, ...] = ()
    layer: Layer | None = None

    def environment(self, environ: Mapping[str, str], folder: Path) -> dict[str, str]:
        """`environ` with this change, where NCCL tells what it does in files of `folder`."""
        kept = {name: value for name, value in environ.items() if name not in self.unsets}
        # a file each process and none for the standard output: there several ranks write into each
        # other's lines, and what a killed one had not flushed is lost. Where the folder is not to
        # be had, as in a container, NCCL writes to the standard output as it always does.
        log = f"{str(folder).replace('%', '%%')}/nccl.%h.%p"
        debug = {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": environ.get("NCCL_DEBUG_SUBSYS") or switches.SUBSYSTEMS,
            "NCCL_DEBUG_FILE": log,
        }
        return {**kept, **debug, **self.sets}

    def line(self, command: Sequence[str]) -> str:
        """What to type to run `command` under this change alone; no value of the caller's."""
        unset = [word for name in self.unsets for word in ("-u", name)]
        sets = [f"{name}={value}" for name, value in self.sets.items()]
        return shlex.join(["env", *unset, *sets, "NCCL_DEBUG=INFO", *command])


@dataclass(frozen=True)
class Skipped:
    """A change that is not made, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Machine:
    """Interfaces and GPUs of this machine, each as the variable for it names them.

    `bridges` are those of containers, to which no other machine is joined.
    """

    interfaces: tuple[str, ...]
    gpus: tuple[str, ...]
    bridges: tuple[str, ...] = ()


AS_IT_IS = Change(name="as it is")


def look(environ: Mapping[str, str], sysfs: Path = Path("/sys/class/net")) -> Machine:
    """This machine now; of its GPUs those that `environ` shows."""
    known = _interfaces(sysfs)
    bridges = tuple(name for name in known if _is_of_containers(sysfs / name))
    rest = tuple(name for name in known if name not in bridges)
    return Machine(rest, _gpus(environ), bridges)


def changes(
    environ: Mapping[str, str], machine: Machine
) -> tuple[tuple[Change, ...], tuple[Skipped, ...]]:
    """Every change but for GPUs, the caller's own settings first; and those that change nothing."""
    made: list[Change] = list(_without(environ))
    why = "a bridge of containers, which no other machine is joined to"
    skipped = [Skipped(f"{_IFNAME}=={name}", why) for name in machine.bridges]
    for each in layers.SWITCHES:
        name = f"{each.variable}={each.value}"
        if _left_on(each.variable, environ.get(each.variable, "")):
            skipped.append(Skipped(name, "your environment has it already: see the run without"))
        else:
            made.append(Change(name=name, sets={each.variable: each.value}, layer=each.layer))
    for interface in machine.interfaces:
        # with = it is this name; without, every name that begins so
        value = f"={interface}"
        if environ.get(_IFNAME) == value:
            skipped.append(Skipped(f"{_IFNAME}={value}", "your environment has it already"))
            continue
        change = Change(name=f"{_IFNAME}={value}", sets={_IFNAME: value}, layer=layers.INTERFACE)
        made.append(change)
    return tuple(made), tuple(skipped)


def only(gpus: Sequence[str]) -> Change:
    """COMMAND sees no other GPUs than these."""
    return Change(name=f"{VISIBLE}={','.join(gpus)}", sets={VISIBLE: ",".join(gpus)})


def _without(environ: Mapping[str, str]) -> Iterator[Change]:
    own = sorted(
        name for name in environ if name.startswith("NCCL_") and not name.startswith(_DEBUG)
    )
    if len(own) > 1:
        name = f"without your {len(own)} NCCL_ variables"
        yield Change(name=name, unsets=tuple(own), layer=layers.OWN_SETTINGS)
    for name, value in sorted(environ.items()):
        if _left_on(name, value) or (name in _CHOICES and value):
            yield Change(name=f"without {name}", unsets=(name,), layer=layers.own_setting(name))


def _left_on(name: str, value: str) -> bool:
    # NCCL takes an empty value for none; its log is on in every run
    return bool(value) and not name.startswith(_DEBUG) and switches.left_on(name, value)


def _interfaces(sysfs: Path) -> tuple[str, ...]:
    """Those that are up and have an address that another machine could reach, real ones first."""
    states = psutil.net_if_stats()
    found = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if name in states and states[name].isup
        if any(_reachable(each.family, each.address) for each in addresses)
    ]
    # in a container none is a device
    return tuple(
        sorted(found, key=lambda name: (name == "lo", not (sysfs / name / "device").exists(), name))
    )


def _reachable(family: int, address: str) -> bool:
    # a link-local address comes with every interface, and says nothing
    return family == socket.AF_INET or (family == socket.AF_INET6 and address[:4] != "fe80")


def _is_of_containers(interface: Path) -> bool:
    """Whether it is a bridge that holds no network card: a node has one a container network."""
    ports = (interface / "brif").glob("*")
    return (interface / "bridge").exists() and not any(
        (interface.parent / port.name / "device").exists() for port in ports
    )


def _gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    visible = environ.get(VISIBLE)
    if visible is None:
        return tuple(map(str, range(node.look().gpus)))
    names = [name.strip() for name in visible.split(",")]
    # CUDA ignores all that follows an invalid name, such as -1
    stop = next((at for at, name in enumerate(names) if not name or name[0] == "-"), len(names))
    return tuple(names[:stop])
