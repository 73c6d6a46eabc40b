"""Checks of socket interfaces: what there is, and what NCCL and gloo make of it."""

import ipaddress
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from muster.doctor import matching
from muster.doctor.check import Seen, counted, gpu_count, listed, may_join_others, not_here, seen
from muster.doctor.facts import Facts, Interface
from muster.finding import Finding, error, warning

IFNAME = "NCCL_SOCKET_IFNAME"
GLOO_IFNAME = "GLOO_SOCKET_IFNAME"
FAMILY = "NCCL_SOCKET_FAMILY"
# what containers, tunnels and virtual machines make; NCCL itself leaves out docker, lo and virbr
_VIRTUAL = re.compile(
    r"(veth|cni|cali|flannel|cilium|lxc|br-|docker|virbr|vnet|tap|tun|wg|tailscale|zt|kube-|nerdctl"
    r"|podman|dummy|nodelocaldns|vxlan|geneve|weave|antrea|ovs|ifb)"
)
# less than a GPU node's training is bearable on
SLOW_MBIT_PER_S = 10_000
# what IPv6 asks of every link: https://www.rfc-editor.org/rfc/rfc8200#section-5
LEAST_MTU = 1280


def selected(facts: Facts) -> tuple[str, ...]:
    """The interfaces that NCCL opens sockets on here, its bootstrap's first."""
    value = facts.job.variable(IFNAME)
    return matching.interfaces(facts.network.addresses, value, facts.job.variable(FAMILY))


def _loops(facts: Facts) -> set[str]:
    addresses = facts.network.addresses
    parsed = ((each.ifname, matching.ip(each.address)) for each in addresses)
    return {name for name, address in parsed if address is not None and address.is_loopback}


# ---- what there is ------------------------------------------------------------------------------


def interfaces(facts: Facts) -> Seen:
    """An interface joins this node with others: it has an address and a carrier."""
    if "addresses" in facts.unread:
        return not_here(f"not known: {facts.why('addresses')}")
    outward = list(dict.fromkeys(_outward(facts)))
    findings = list(_without_carrier(facts))
    if not outward and facts.job.nnodes > 1:
        findings.append(_only_loopback(facts))
    return seen(listed(outward) or "loopback alone", findings)


def _outward(facts: Facts) -> Iterator[str]:
    loops = _loops(facts)
    for each in facts.network.addresses:
        if each.running and each.ifname not in loops:
            yield each.ifname


def _only_loopback(facts: Facts) -> Finding:
    return error(
        what="there is no interface to other nodes",
        where="interfaces",
        evidence=f"the job has {facts.job.nnodes} nodes; running: loopback alone",
        cause="no link is up, or the container has no network",
        remedy="ip -br addr; docker run --network host, or a network that joins the nodes",
    )


def _without_carrier(facts: Facts) -> Iterator[Finding]:
    addressed = {each.ifname for each in facts.network.addresses}
    for each in facts.network.interfaces:
        if each.physical and each.up and each.carrier is False and each.name in addressed:
            yield warning(
                what=f"{each.name} has an address and no carrier",
                where=each.name,
                evidence=f"/sys/class/net/{each.name}/carrier is 0",
                cause="no cable, or the switch's port is off; older releases of NCCL take it all"
                " the same",
                remedy=f"look at the cable and the switch; else ip link set {each.name} down",
            )


def speed(facts: Facts) -> Seen:
    """The interfaces that NCCL uses are fast and alike."""
    chosen = _chosen(facts)
    if not chosen:
        return not_here("NCCL finds no interface")
    measure = listed(f"{each.name} {_speed(each)}, MTU {each.mtu or 'unknown'}" for each in chosen)
    if not may_join_others(facts):
        return seen(measure)
    return seen(measure, [*_slow(facts, chosen), *_mtu(chosen)])


def _chosen(facts: Facts) -> list[Interface]:
    """Those that NCCL would use, but for the loopback and what only nccl_interface has to say."""
    unasked = facts.job.variable(IFNAME) is None
    left_out = {each for each in selected(facts) if unasked and _VIRTUAL.match(each)}
    names = set(selected(facts)) - _loops(facts) - left_out
    return [each for each in facts.network.interfaces if each.name in names]


def _speed(interface: Interface) -> str:
    known = interface.speed_mbit_per_s
    return "of unknown speed" if known is None else f"{known / 1000:g} Gb/s"


def _slow(facts: Facts, chosen: Sequence[Interface]) -> Iterator[Finding]:
    # over HCAs the data takes another way, and one node needs none
    if not gpu_count(facts) or facts.job.nnodes < 2 or _uses_hcas(facts):
        return
    slow = [each for each in chosen if 0 < (each.speed_mbit_per_s or 0) < SLOW_MBIT_PER_S]
    if slow:
        yield warning(
            what=f"NCCL moves gradients over {listed(each.name for each in slow)}",
            where=slow[0].name,
            evidence=listed(f"{each.name} {_speed(each)}" for each in slow),
            cause="no HCA is used, and the link is slow for GPUs: they wait for it",
            remedy=f"name a faster one in {IFNAME}; look whether the link trained at full speed:"
            f" ethtool {slow[0].name}",
        )


def _uses_hcas(facts: Facts) -> bool:
    off = facts.job.variable("NCCL_IB_DISABLE") not in (None, "0")
    return not off and bool(matching.ports(facts.network.hcas, facts.job.variable("NCCL_IB_HCA")))


def _mtu(chosen: Sequence[Interface]) -> Iterator[Finding]:
    sizes = {each.name: each.mtu for each in chosen if each.mtu is not None}
    small = {name: mtu for name, mtu in sizes.items() if mtu < LEAST_MTU}
    if len(set(sizes.values())) > 1 or small:
        yield warning(
            what=f"{next(iter(small))} has an MTU of {min(small.values())}"
            if small
            else "NCCL uses interfaces of different MTU",
            where=next(iter(small or sizes)),
            evidence=listed(f"{name}: {mtu}" for name, mtu in sizes.items()),
            cause="a tunnel's leftover, or one of them is not of the network that joins the nodes:"
            " large messages stall where the way does not carry them",
            remedy=f"ip link set dev NAME mtu 9000 on all nodes and switches alike, or name one in"
            f" {IFNAME}",
        )


def subnets(facts: Facts) -> Seen:
    """No two interfaces are in one subnet, where traffic may leave by the other one."""
    shared = {net: names for net, names in _nets(facts).items() if len(names) > 1}
    if not shared:
        return seen("each of its own")
    if not may_join_others(facts):
        return seen(f"{counted(len(shared), 'subnet')} shared; nothing here depends on it")
    net, names = next(iter(shared.items()))
    finding = warning(
        what=f"{listed(names)} are in one subnet",
        where=str(net),
        evidence=listed(f"{each}: {listed(those)}" for each, those in shared.items()),
        cause="the routing table decides by which of them traffic leaves, whatever"
        f" {IFNAME} says and NCCL's log shows; it may differ on each node",
        remedy="give each its own subnet, or the routes different metrics: ip route",
    )
    return seen(f"{counted(len(shared), 'subnet')} shared", [finding])


def _nets(facts: Facts) -> dict[ipaddress.IPv4Network | ipaddress.IPv6Network, list[str]]:
    """The interfaces of every subnet, without those that containers and tunnels make."""
    nets: dict[ipaddress.IPv4Network | ipaddress.IPv6Network, list[str]] = defaultdict(list)
    for each in facts.network.addresses:
        address = matching.ip(each.address)
        if address is None or not each.running or address.is_link_local or address.is_loopback:
            continue
        if _VIRTUAL.match(each.ifname) or each.prefix >= address.max_prefixlen:
            continue
        net = ipaddress.ip_network(f"{address}/{each.prefix}", strict=False)
        if each.ifname not in nets[net]:
            nets[net].append(each.ifname)
    return nets


# ---- what NCCL makes of it ----------------------------------------------------------------------


def nccl_interface(facts: Facts) -> Seen:
    """NCCL finds an interface, and it is one that reaches the other nodes."""
    if "addresses" in facts.unread:
        return not_here(f"not known: {facts.why('addresses')}")
    value = facts.job.variable(IFNAME)
    names = selected(facts)
    said = f"{IFNAME}={value}" if value is not None else "by default"
    if not names:
        return seen(f"{said}: none", [_nothing_selected(facts, value)])
    findings = [*_ignored(value), *_leads_nowhere(facts, names, value)]
    return seen(f"{said}: {listed(names)}", findings)


def _nothing_selected(facts: Facts, value: str | None) -> Finding:
    running = dict.fromkeys(each.ifname for each in facts.network.addresses if each.running)
    family = facts.job.variable(FAMILY)
    return error(
        what=f"{IFNAME}={value} selects no interface" if value else "NCCL finds no interface",
        where=IFNAME if value else "interfaces",
        evidence=f"running here: {listed(running) or 'none'}"
        + (f"; {FAMILY}={family}" if family else ""),
        cause="NCCL compares beginnings of names (= at the front: whole names, ^: all but these),"
        " and ends with: no socket interface found"
        if value
        else "none is up, or none has an address of the family that is asked for",
        remedy=f"name one of these, or unset {IFNAME}"
        if value
        else f"look with ip -br addr{f'; unset {FAMILY}' if family else ''}",
    )


def _ignored(value: str | None) -> Iterator[Finding]:
    if value is not None and not matching.is_set(value):
        yield warning(
            what=f"{IFNAME}={value!r} has no effect",
            where=IFNAME,
            evidence="NCCL passes over a value of fewer than two characters",
            cause="it is empty, or a list was cut",
            remedy="unset it, or write a whole name",
        )


def _leads_nowhere(facts: Facts, names: Sequence[str], value: str | None) -> Iterator[Finding]:
    loops = _loops(facts)
    others = [name for name in dict.fromkeys(_outward(facts)) if not _VIRTUAL.match(name)]
    several = facts.job.nnodes > 1
    if names[0] in loops:
        # with one node the loopback does, and someone may have asked for it
        if several and others:
            yield _first(names, value, "the loopback", listed(others), several=True)
        elif value is not None and value.startswith("^") and others:
            yield _first(names, value, "the loopback", listed(others), several=False)
        return
    virtual = [name for name in names if _VIRTUAL.match(name)]
    if virtual and others and value is None and may_join_others(facts):
        yield _first(
            virtual,
            value,
            "an interface of containers or tunnels",
            listed(others),
            several=several and names[0] in virtual,
        )


def _first(
    names: Sequence[str], value: str | None, kind: str, others: str, *, several: bool
) -> Finding:
    make = error if several else warning
    return make(
        what=f"NCCL would use {names[0]}, {kind}",
        where=names[0],
        evidence=f"{IFNAME}={value}"
        if value
        else f"{IFNAME} is not set; selected: {listed(names)}",
        cause="other nodes do not reach it: ranks hang in init, or connect to themselves",
        remedy=f"export {IFNAME}=={others.partition(',')[0]} on this node; here are: {others}",
    )


# ---- what gloo makes of it ----------------------------------------------------------------------


def gloo_interface(facts: Facts) -> Seen:
    """gloo, which torch uses beside NCCL, binds to an address that others reach."""
    value = facts.job.variable(GLOO_IFNAME)
    if value:
        return _gloo_names(facts, value)
    addresses = facts.network.hostname_addresses
    measure = f"by the hostname: {listed(addresses) or 'not resolved'}"
    parsed = [matching.ip(address) for address in addresses]
    inward = [each for each in parsed if each is not None and each.is_loopback]
    if facts.job.nnodes < 2 or (parsed and len(inward) < len(parsed)):
        return seen(measure)
    finding = warning(
        what=f"the name {facts.machine.hostname} leads to {listed(addresses) or 'no address'}",
        where=GLOO_IFNAME,
        evidence=facts.why("hostname") if not addresses else measure,
        cause="gloo takes the address of the host's own name, and offers it to the other nodes",
        remedy=f"export {GLOO_IFNAME}=NAME of the interface, or have its address in /etc/hosts",
    )
    return seen(measure, [finding])


def _gloo_names(facts: Facts, value: str) -> Seen:
    known = {each.ifname for each in facts.network.addresses}
    missing = [name for name in value.split(",") if name not in known]
    measure = f"{GLOO_IFNAME}={value}"
    if not missing:
        return seen(measure)
    finding = error(
        what=f"{measure} names no interface here: {listed(missing)}",
        where=GLOO_IFNAME,
        evidence=f"with an address: {listed(sorted(known)) or 'none'}",
        cause="gloo takes whole names, not beginnings as NCCL does, and fails with Unable to find"
        " interface",
        remedy=f"name one of these, or unset {GLOO_IFNAME}",
    )
    return seen(measure, [finding])
