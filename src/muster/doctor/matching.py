"""How NCCL picks socket interfaces, HCAs and GIDs: its rules, on the facts of a node.

https://github.com/NVIDIA/nccl/blob/master/src/misc/utils.cc (parseStringList, matchIfList),
src/misc/socket.cc (ncclFindInterfaces) and src/transport/net_ib/ (ncclIbInitDevices,
ncclIbGetGidIndex).
"""

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from muster.doctor.facts import Address, Gid, Hca, Port

# MAX_IFS and MAX_IB_DEVS: what stands behind them in a list is not read
MOST_INTERFACES = 16
MOST_HCAS = 32

# tried one after the other when NCCL_SOCKET_IFNAME is not set
DEFAULTS = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")


@dataclass(frozen=True)
class Wanted:
    """One name of a list; without a port every port of it is meant."""

    name: str
    port: int | None = None


@dataclass(frozen=True)
class Selection:
    """A value of NCCL_SOCKET_IFNAME or NCCL_IB_HCA: beginnings of names, or with = whole names."""

    wanted: tuple[Wanted, ...]
    exact: bool = False
    inverted: bool = False

    @classmethod
    def parse(cls, value: str, most: int = MOST_INTERFACES) -> "Selection":
        """What `value` says; ^ stands before = when both are there, and only at the beginning."""
        inverted = value.startswith("^")
        value = value.removeprefix("^")
        exact = value.startswith("=")
        names = (_wanted(word) for word in value.removeprefix("=").split(","))
        return cls(tuple(each for each in names if each.name)[:most], exact, inverted)

    def matches(self, name: str, port: int | None = None) -> bool:
        return (not self.wanted or any(self._is(each, name, port) for each in self.wanted)) != (
            self.inverted
        )

    def _is(self, wanted: Wanted, name: str, port: int | None) -> bool:
        same = name == wanted.name if self.exact else name.startswith(wanted.name)
        return same and (port is None or wanted.port is None or port == wanted.port)


def _wanted(word: str) -> Wanted:
    name, colon, port = word.partition(":")
    # atoi: what is no number is 0
    digits = re.match(r"\s*([+-]?[0-9]{1,9})", port)
    return Wanted(name, (int(digits[1]) if digits else 0) if colon else None)


# ---- socket interfaces --------------------------------------------------------------------------


def is_set(value: str | None) -> bool:
    """NCCL takes a value of one character for none."""
    return value is not None and len(value) > 1


def interfaces(
    addresses: Sequence[Address], value: str | None, family: str | None = None
) -> tuple[str, ...]:
    """The interfaces that NCCL opens sockets on; the first one is its bootstrap's.

    Without torch a job may give NCCL_COMM_ID, and NCCL then looks for the subnet of that address:
    that is left out here.
    """
    usable = tuple(_usable(addresses, family))
    choices = (value,) if value is not None and is_set(value) else DEFAULTS
    for choice in choices:
        selection = Selection.parse(choice)
        names = dict.fromkeys(each.ifname for each in usable if selection.matches(each.ifname))
        if names:
            return tuple(names)[:MOST_INTERFACES]
    return ()


def _usable(addresses: Iterable[Address], family: str | None) -> Iterable[Address]:
    version = {"AF_INET": 4, "AF_INET6": 6}.get(family or "")
    for each in addresses:
        parsed = ip(each.address)
        if parsed is None or not each.running or (parsed.version == 6 and parsed.is_loopback):
            continue
        if version in (None, parsed.version):
            yield each


def ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `text` spells, with or without a scope (fe80::1%eth0)."""
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None


# ---- HCAs ---------------------------------------------------------------------------------------


def is_usable(hca: Hca, port: Port) -> bool:
    """Whether NCCL would take the port, if no variable keeps it from doing so."""
    return hca.device_file and port.state == "ACTIVE"


def ports(hcas: Iterable[Hca], value: str | None) -> tuple[tuple[Hca, Port], ...]:
    """The ports of HCAs that NCCL uses under this value of NCCL_IB_HCA."""
    selection = Selection.parse(value or "", MOST_HCAS)
    return tuple(
        (hca, port)
        for hca in hcas
        for port in hca.ports
        if is_usable(hca, port) and selection.matches(hca.name, port.number)
    )


# ---- GIDs ---------------------------------------------------------------------------------------


def is_ipv4(gid: Gid) -> bool:
    parsed = _ipv6(gid)
    return parsed is not None and parsed.ipv4_mapped is not None


def is_routable(gid: Gid) -> bool:
    """Set, and no link-local address."""
    parsed = _ipv6(gid)
    return parsed is not None and int(parsed) != 0 and not parsed.is_link_local


def roce_gid(port: Port, *, ipv6: bool = False, version: int = 2) -> Gid | None:
    """The GID that NCCL takes for a RoCE port when NCCL_IB_GID_INDEX is not set."""
    chosen = next((gid for gid in port.gids if gid.index == 0), None)
    for candidate in port.gids:
        if candidate.index == 0 or is_ipv4(candidate) is ipv6:
            continue
        if chosen is None or is_ipv4(chosen) is ipv6 or _is_better(candidate, chosen, version):
            chosen = candidate
    return chosen


def _is_better(candidate: Gid, chosen: Gid, version: int) -> bool:
    if not is_routable(candidate) or candidate.type != f"RoCE v{version}":
        return False
    return chosen.type != candidate.type or not is_routable(chosen)


def _ipv6(gid: Gid) -> ipaddress.IPv6Address | None:
    try:
        return ipaddress.IPv6Address(gid.gid)
    except ValueError:
        return None
