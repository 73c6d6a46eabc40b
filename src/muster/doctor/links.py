"""The network: socket interfaces as getifaddrs lists them, HCAs, names and ports."""

import ctypes
import ipaddress
import os
import queue
import re
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import PurePosixPath

from muster.doctor.devices import numa_node
from muster.doctor.facts import Address, Gid, Hca, Interface, Listener, Master, Network, Port
from muster.doctor.files import Files, clean

INFINIBAND = "/sys/class/infiniband"
VERBS = "/sys/class/infiniband_verbs"
NET = "/sys/class/net"
RESOLVE_LIMIT_S = 1.5

# https://man7.org/linux/man-pages/man7/netdevice.7.html
_IFF_UP = 0x1
_IFF_RUNNING = 0x40
_STATE = re.compile(r"\d+:\s*(\w+)")
_RATE = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec", re.ASCII)
# a table of 256 GIDs is mostly empty, and each is a file
_MOST_GIDS = 256
_TCP_LISTEN = "0A"


def network(files: Files) -> Network:
    hostname = socket.gethostname()
    found = resolve(hostname)
    if found.why:
        files.unread["hostname"] = found.why
    modules = ("nvidia_peermem", "nv_peer_mem")
    return Network(
        addresses=files.attempt("addresses", lambda: tuple(addresses()), ()),
        interfaces=tuple(_interface(files, name) for name in files.names(NET)),
        hcas=tuple(_hca(files, name) for name in files.names(INFINIBAND)),
        hostname_addresses=found.addresses,
        peermem=files.any_exists(f"/sys/module/{name}" for name in modules),
    )


# ---- socket interfaces --------------------------------------------------------------------------


class _Ifaddrs(ctypes.Structure):
    """struct ifaddrs of https://man7.org/linux/man-pages/man3/getifaddrs.3.html"""


_Ifaddrs._fields_ = (
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("mask", ctypes.c_void_p),
    ("destination", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
)


def addresses() -> Iterator[Address]:
    """Every address of every interface, by the call that NCCL makes and in its order."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.freeifaddrs.argtypes = [ctypes.c_void_p]
    head = ctypes.POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        entry = head
        while entry:
            if found := _address(entry.contents):
                yield found
            entry = entry.contents.next
    finally:
        libc.freeifaddrs(head)


def _address(entry: _Ifaddrs) -> Address | None:
    packed = _packed(entry.address)
    if packed is None:
        return None
    mask = _packed(entry.mask)
    bits = int.from_bytes(mask, "big").bit_count() if mask else len(packed) * 8
    return Address(
        ifname=clean(os.fsdecode(entry.name)),
        address=str(ipaddress.ip_address(packed)),
        prefix=bits,
        running=bool(entry.flags & _IFF_RUNNING),
    )


def _packed(pointer: int | None) -> bytes | None:
    """The address in a struct sockaddr, if it is one of IPv4 or IPv6."""
    if not pointer:
        return None
    (family,) = struct.unpack("=H", ctypes.string_at(pointer, 2))
    if family == socket.AF_INET:
        return ctypes.string_at(pointer + 4, 4)
    return ctypes.string_at(pointer + 8, 16) if family == socket.AF_INET6 else None


def _interface(files: Files, name: str) -> Interface:
    folder = f"{NET}/{name}"
    flags = files.number(f"{folder}/flags") or 0
    carrier = files.number(f"{folder}/carrier")
    speed = files.number(f"{folder}/speed")
    return Interface(
        name=clean(name),
        up=bool(flags & _IFF_UP),
        carrier=None if carrier is None else carrier > 0,
        mtu=files.number(f"{folder}/mtu"),
        speed_mbit_per_s=speed if speed and speed > 0 else None,
        physical=files.exists(f"{folder}/device"),
        numa_node=_numa(files.number(f"{folder}/device/numa_node")),
    )


def _numa(node: int | None) -> int | None:
    return None if node is None or node < 0 else node


# ---- HCAs ---------------------------------------------------------------------------------------


def _hca(files: Files, name: str) -> Hca:
    folder = f"{INFINIBAND}/{name}"
    device = files.link(f"{folder}/device")
    bus_id = PurePosixPath(device).name if device else None
    driver = files.link(f"{folder}/device/driver")
    uverbs = _uverbs(files, name)
    node = f"/dev/infiniband/{uverbs}"
    there = uverbs is not None and files.exists(node)
    numbers = [number for number in files.names(f"{folder}/ports") if number.isdecimal()]
    return Hca(
        name=clean(name),
        driver=PurePosixPath(driver).name if driver else "",
        numa_node=numa_node(files, bus_id or ""),
        bus_id=bus_id,
        uverbs=uverbs,
        device_file=there,
        accessible=os.access(files.path(node), os.R_OK | os.W_OK) if there else None,
        ports=tuple(_port(files, folder, int(number)) for number in numbers),
    )


def _uverbs(files: Files, name: str) -> str | None:
    for each in files.names(VERBS):
        if files.word(f"{VERBS}/{each}/ibdev") == name:
            return each
    return None


def _port(files: Files, folder: str, number: int) -> Port:
    path = f"{folder}/ports/{number}"
    rate = _RATE.search(files.word(f"{path}/rate") or "")
    return Port(
        number=number,
        state=_state(files.word(f"{path}/state")),
        physical_state=_state(files.word(f"{path}/phys_state")),
        link_layer=files.word(f"{path}/link_layer") or "unknown",
        rate_gbit_per_s=float(rate[1]) if rate else None,
        ifname=_ifname(files, folder, path),
        gids=tuple(_gids(files, path)),
    )


def _state(text: str | None) -> str:
    """ACTIVE, of "4: ACTIVE"."""
    match = _STATE.match(text or "")
    return match[1] if match else "unknown"


def _ifname(files: Files, folder: str, path: str) -> str | None:
    of_gid = files.word(f"{path}/gid_attrs/ndevs/0")
    return of_gid or next(iter(files.names(f"{folder}/device/net")), None)


def _gids(files: Files, path: str) -> Iterator[Gid]:
    """Those that are set; https://docs.kernel.org/infiniband/sysfs.html"""
    for index in files.names(f"{path}/gids")[:_MOST_GIDS]:
        gid = files.word(f"{path}/gids/{index}")
        if gid and gid.strip("0:") and index.isdecimal():
            kind = files.word(f"{path}/gid_attrs/types/{index}") or "unknown"
            yield Gid(int(index), gid, kind)


# ---- names and ports ----------------------------------------------------------------------------


def resolve(host: str, limit_s: float = RESOLVE_LIMIT_S) -> Master:
    """The addresses of a host, A and AAAA; a resolver that does not answer is not waited for."""
    answers: queue.SimpleQueue[Master] = queue.SimpleQueue()
    # a thread that is a daemon does not hold up the end
    threading.Thread(target=_resolve, args=(host, answers), daemon=True).start()
    try:
        return answers.get(timeout=limit_s)
    except queue.Empty:
        return Master((), f"no answer within {limit_s:g} s")


def _resolve(host: str, answers: "queue.SimpleQueue[Master]") -> None:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        answers.put(Master(tuple(dict.fromkeys(str(each[4][0]) for each in found)), ""))
    # a name of odd bytes, or with a label that is too long, is a UnicodeError
    except (OSError, UnicodeError) as error:
        answers.put(Master((), clean(str(error))))


def listeners(files: Files, ports: frozenset[int]) -> tuple[Listener, ...]:
    """Who listens on these TCP ports here, by /proc/net/tcp and tcp6."""
    held: dict[int, str] = {}
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (files.text(name) or "").splitlines()[1:]:
            words = line.split()
            port = int(words[1].rpartition(":")[2], 16) if len(words) > 9 else 0
            if port in ports and words[3] == _TCP_LISTEN:
                held[port] = words[9]
    owners = _owners(files, frozenset(held.values())) if held else {}
    return tuple(
        Listener(port, owners.get(inode), _comm(files, owners.get(inode)))
        for port, inode in sorted(held.items())
    )


def _comm(files: Files, pid: int | None) -> str | None:
    return None if pid is None else files.word(f"/proc/{pid}/comm")


def _owners(files: Files, inodes: frozenset[str]) -> dict[str, int]:
    """The process of each socket, where its descriptors may be looked at."""
    names = {f"socket:[{inode}]": inode for inode in inodes}
    owners: dict[str, int] = {}
    for pid, _, target in open_files(files):
        if target in names:
            owners.setdefault(names[target], pid)
    return owners


def open_files(files: Files) -> Iterator[tuple[int, str, str | None]]:
    """Process, descriptor and what that leads to; no descriptor where it may not be looked at."""
    for pid in filter(str.isdecimal, files.names("/proc")):
        folder = files.path(f"/proc/{pid}/fd")
        try:
            descriptors = list(folder.iterdir())
        except PermissionError:
            yield int(pid), "", None
            continue
        except OSError:
            # it has ended
            continue
        for descriptor in descriptors:
            try:
                yield int(pid), descriptor.name, str(descriptor.readlink())
            except OSError:
                continue
