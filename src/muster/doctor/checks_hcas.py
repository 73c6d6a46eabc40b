"""Checks of HCAs, the devices of InfiniBand and RoCE, and of what NCCL makes of them."""

from collections import Counter
from collections.abc import Iterator, Sequence

from muster.doctor import matching
from muster.doctor.check import Seen, counted, listed, not_here, seen
from muster.doctor.facts import Facts, Hca, Port
from muster.finding import Finding, error, warning

HCA = "NCCL_IB_HCA"
GID_INDEX = "NCCL_IB_GID_INDEX"
NO_HCA = "no HCA here"
ETHERNET = "Ethernet"
# RoCE's largest payload is 4096 bytes, and its headers have to fit in as well
ROCE_MTU = 4200
# since 5.12 the kernel shares a GPU's memory by dma-buf, with NVIDIA's open module:
# https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/gpu-operator-rdma.html
DMABUF_KERNEL = (5, 12)


def _off(facts: Facts) -> bool:
    return facts.job.variable("NCCL_IB_DISABLE") not in (None, "0")


def _chosen(facts: Facts) -> tuple[tuple[Hca, Port], ...]:
    return matching.ports(facts.network.hcas, facts.job.variable(HCA))


def _name(hca: Hca, port: Port) -> str:
    return f"{hca.name}:{port.number}"


# ---- what there is ------------------------------------------------------------------------------


def hcas(facts: Facts) -> Seen:
    """The ports of the HCAs are up, and those of one kind at one speed."""
    ports = [(hca, port) for hca in facts.network.hcas for port in hca.ports]
    if not ports:
        return not_here(NO_HCA)
    active = [each for each in ports if each[1].state == "ACTIVE"]
    kinds = Counter(f"{port.link_layer} {port.rate_gbit_per_s or 0:g} Gb/s" for _, port in active)
    measure = f"{len(active)} of {len(ports)} ports active"
    if kinds:
        measure += ": " + ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return seen(measure, [*_not_active(ports, active), *_slower(active)])


_Ports = Sequence[tuple[Hca, Port]]


def _not_active(ports: _Ports, active: _Ports) -> Iterator[Finding]:
    waiting = [each for each in ports if each[1].state in ("INIT", "ARMED")]
    if waiting:
        yield warning(
            what=f"{counted(len(waiting), 'port')} linked, and not active",
            where=listed(_name(*each) for each in waiting),
            evidence=listed(f"{_name(*each)} {each[1].state}" for each in waiting),
            cause="no subnet manager has set the port up",
            remedy="start opensm on one node of the fabric or on the switch; ibstat, sminfo",
        )
    down = [each for each in ports if each not in active and each not in waiting]
    if down and not active:
        yield warning(
            what=f"no port of {counted(len(ports), 'HCA port')} is active",
            where=listed(_name(*each) for each in down),
            evidence=listed(f"{_name(*each)} {_states(each[1])}" for each in down),
            cause="no cable, or the switch's port is off: NCCL goes over sockets and says so in one"
            " line only",
            remedy="look at cables and switch; ibstat; for RoCE ip link set NAME up",
        )


def _states(port: Port) -> str:
    return f"{port.state}, {port.physical_state}"


def _slower(active: _Ports) -> Iterator[Finding]:
    """A port of InfiniBand at less than the others: all are rails of the GPUs."""
    rates = {_name(hca, port): port.rate_gbit_per_s or 0 for hca, port in active if _is_ib(port)}
    most = max(rates.values(), default=0)
    slow = [each for each, rate in rates.items() if rate < most]
    if slow:
        name = slow[0].partition(":")[0]
        yield warning(
            what=f"{counted(len(slow), 'port')} slower than the others",
            where=listed(slow),
            evidence=listed(f"{each}: {rate:g} Gb/s" for each, rate in rates.items()),
            cause="a lane of the link did not train (a cable, a transceiver), or the device is no"
            " rail of the GPUs",
            remedy=f"iblinkinfo, mlxlink -d {name}; if it is of another network, leave it out:"
            f" {HCA}=^{name}",
        )


def _is_ib(port: Port) -> bool:
    return port.link_layer == "InfiniBand"


def verbs_files(facts: Facts) -> Seen:
    """Each HCA has its file in /dev/infiniband, and this user may open it."""
    found = facts.network.hcas
    if not found:
        return not_here(NO_HCA)
    there = [hca for hca in found if hca.device_file]
    measure = f"{len(there)} of {counted(len(found), 'HCA')}"
    if not there:
        return seen(measure, [_no_file(facts)])
    shut = [hca for hca in there if hca.accessible is False]
    if not shut:
        return seen(measure)
    finding = warning(
        what=f"{counted(len(shut), 'HCA')} cannot be opened by this user",
        where=listed(hca.name for hca in shut),
        evidence=listed(f"/dev/infiniband/{hca.uverbs}" for hca in shut)
        + f": not to be read and written by user id {facts.machine.uid}",
        cause="the mode of the device files is not 0666, or the container's rules forbid them",
        remedy="rdma-core's udev rules set the mode; docker run --device /dev/infiniband",
    )
    return seen(measure, [finding])


def _no_file(facts: Facts) -> Finding:
    inside = facts.machine.container is not None
    return warning(
        what="HCAs, and no file for them in /dev/infiniband",
        where="/dev/infiniband",
        evidence=f"in /sys/class/infiniband: {listed(hca.name for hca in facts.network.hcas)}",
        cause=("the container was started without them" if inside else "ib_uverbs is not loaded")
        + ": NCCL says No device found, and goes over sockets",
        remedy="docker run --device /dev/infiniband --cap-add IPC_LOCK --ulimit memlock=-1; in a"
        " pod, ask for the RDMA device plugin's resource"
        if inside
        else "modprobe ib_uverbs",
    )


# ---- what NCCL makes of it ----------------------------------------------------------------------


def nccl_hca(facts: Facts) -> Seen:
    """NCCL_IB_HCA selects ports that are there, and all of one link layer."""
    value = facts.job.variable(HCA)
    found = facts.network.hcas
    said = f"{HCA}={value}" if value else "by default"
    if not found:
        return _without_hcas(value)
    chosen = _chosen(facts)
    names = listed((_name(*each) for each in chosen), 10) or "none"
    if _off(facts):
        return seen(f"{said}: {names}; NCCL_IB_DISABLE keeps NCCL from all")
    if not chosen and value and any(matching.is_usable(hca, p) for hca in found for p in hca.ports):
        return seen(f"{said}: none", [_selects_nothing(facts, value)])
    return seen(f"{said}: {names}", _mixed(chosen))


def _without_hcas(value: str | None) -> Seen:
    if not value:
        return not_here(NO_HCA)
    finding = warning(
        what=f"{HCA}={value} is set, and there is no HCA",
        where=HCA,
        evidence="/sys/class/infiniband is empty or not there",
        cause="the drivers are not loaded, the container does not show them, or the value is"
        " another cluster's: NCCL goes over sockets",
        remedy=f"modprobe mlx5_ib; or unset {HCA}",
    )
    return seen(f"{HCA}={value}: none", [finding])


def _selects_nothing(facts: Facts, value: str) -> Finding:
    usable = [
        _name(hca, port)
        for hca in facts.network.hcas
        for port in hca.ports
        if matching.is_usable(hca, port)
    ]
    return error(
        what=f"{HCA}={value} selects no HCA",
        where=HCA,
        evidence=f"active here: {listed(usable)}",
        cause="NCCL compares beginnings of names (= at the front: whole names, ^: all but these);"
        " with none left it goes over sockets, many times slower",
        remedy=f"name some of these, or unset {HCA} to use them all",
    )


def _mixed(chosen: _Ports) -> Iterator[Finding]:
    layers = Counter(port.link_layer for _, port in chosen)
    if len(layers) < 2:
        return
    rare = min(layers, key=lambda layer: layers[layer])
    others = list(dict.fromkeys(hca.name for hca, port in chosen if port.link_layer == rare))
    yield warning(
        what="NCCL would use InfiniBand and RoCE side by side",
        where=HCA,
        evidence=listed(f"{_name(hca, port)} {port.link_layer}" for hca, port in chosen),
        cause="a port of one kind connects to none of the other: Attempted to connect incompatible"
        " devices, or ibv_modify_qp fails with Invalid argument",
        remedy=f"leave the few out: export {HCA}=^={','.join(others)}",
    )


def gids(facts: Facts) -> Seen:
    """Each RoCE port has an address by which other nodes reach it, and NCCL takes that one."""
    roce = [each for each in _chosen(facts) if each[1].link_layer == ETHERNET]
    if not facts.network.hcas:
        return not_here(NO_HCA)
    if not roce or _off(facts):
        return not_here("NCCL uses no RoCE port here")
    index = facts.job.variable(GID_INDEX)
    if index is None or index.lstrip().startswith("-"):
        return _chosen_gids(facts, roce)
    return _given_gids(index, roce)


def _chosen_gids(facts: Facts, roce: _Ports) -> Seen:
    ipv6 = facts.job.variable("NCCL_IB_ADDR_FAMILY") == "AF_INET6"
    picked = {_name(hca, port): matching.roce_gid(port, ipv6=ipv6) for hca, port in roce}
    bad = [
        name
        for name, gid in picked.items()
        if gid is None or not matching.is_routable(gid) or gid.type != "RoCE v2"
    ]
    measure = "index " + listed(
        f"{'?' if gid is None else gid.index} on {name}" for name, gid in picked.items()
    )
    if not bad:
        return seen(measure)
    gid = picked[bad[0]]
    finding = warning(
        what=f"{counted(len(bad), 'RoCE port')} without a routable RoCE v2 address",
        where=listed(bad),
        evidence=f"{bad[0]}: " + (f"index {gid.index} {gid.gid} {gid.type}" if gid else "no GID"),
        cause="the interface has no IP address, so NCCL takes a link-local or RoCE v1 one: other"
        " nodes are not reached, and retries run out (status 12)",
        remedy="give each RoCE interface an IPv4 address; in a pod, attach its network",
    )
    return seen(measure, [finding])


def _given_gids(index: str, roce: _Ports) -> Seen:
    measure = f"{GID_INDEX}={index}"
    number = int(index) if index.isdecimal() and len(index) < 6 else None
    at = {
        _name(hca, port): next((gid for gid in port.gids if gid.index == number), None)
        for hca, port in roce
    }
    bad = [name for name, gid in at.items() if gid is None or not matching.is_routable(gid)]
    if not bad:
        return seen(measure)
    gid = at[bad[0]]
    finding = error(
        what=f"{measure} is no address that others reach, on {counted(len(bad), 'port')}",
        where=listed(bad),
        evidence=f"{bad[0]} index {index}: {gid.gid if gid else 'empty'}",
        cause="the order of GIDs differs between nodes and changes with addresses: NCCL then fails"
        " to connect, or retries run out (status 12)",
        remedy=f"unset {GID_INDEX}: NCCL 2.21 and newer finds the right one by itself",
    )
    return seen(measure, [finding])


def roce_mtu(facts: Facts) -> Seen:
    """The interfaces under RoCE carry packets of its full size."""
    roce = [each for each in _chosen(facts) if each[1].link_layer == ETHERNET]
    if not roce:
        return not_here("NCCL uses no RoCE port here")
    mtus = {each.name: each.mtu for each in facts.network.interfaces}
    known = {port.ifname: mtus.get(port.ifname or "") for _, port in roce if port.ifname}
    measure = listed(f"{name} {mtu or 'unknown'}" for name, mtu in known.items()) or "unknown"
    small = [name for name, mtu in known.items() if mtu is not None and mtu < ROCE_MTU]
    # EFA has its own packets
    if not small or any(hca.driver == "efa" for hca, _ in roce):
        return seen(measure)
    finding = warning(
        what=f"the MTU under {counted(len(small), 'RoCE port')} is small",
        where=listed(str(name) for name in small),
        evidence=measure,
        cause="RoCE takes the largest of 256 to 4096 that fits: with 1500 it is 1024, and a quarter"
        " of what each packet could carry",
        remedy="ip link set dev NAME mtu 9000 on all nodes, and on the switches before",
    )
    return seen(measure, [finding])


# ---- HCAs and GPUs ------------------------------------------------------------------------------


def gpudirect(facts: Facts) -> Seen:
    """HCAs may read and write the GPUs' memory."""
    chosen = _chosen(facts)
    if not facts.gpus.devices or not chosen:
        return not_here("no GPU with an active HCA here")
    if all(hca.driver == "efa" for hca, _ in chosen):
        return not_here("EFA brings its own")
    if facts.network.peermem:
        return seen("nvidia_peermem")
    if facts.gpus.driver.open_module and _kernel(facts) >= DMABUF_KERNEL:
        return seen("dma-buf")
    finding = warning(
        what="no way for GPUDirect RDMA",
        where="GPUDirect",
        evidence=f"nvidia_peermem is not loaded; kernel {facts.machine.kernel},"
        f" {'open' if facts.gpus.driver.open_module else 'closed'} kernel module",
        cause="every buffer between nodes goes through the host's memory: NCCL's log has NET/IB"
        " without GDRDMA",
        remedy="modprobe nvidia_peermem, on the host; or NVIDIA's open kernel module on 5.12 and"
        " newer",
    )
    return seen("none", [finding])


def _kernel(facts: Facts) -> tuple[int, ...]:
    words = facts.machine.kernel.partition("-")[0].split(".")[:2]
    return tuple(int(word) for word in words if word.isdecimal())


def affinity(facts: Facts) -> Seen:
    """Each GPU has an HCA on its own NUMA node."""
    hca_nodes = {hca.numa_node for hca, _ in _chosen(facts)} - {None}
    known = [gpu for gpu in facts.gpus.devices if gpu.numa_node is not None]
    if facts.machine.numa_nodes < 2 or not known or not hca_nodes:
        return not_here("no GPUs and HCAs on several NUMA nodes")
    far = [gpu for gpu in known if gpu.numa_node not in hca_nodes]
    measure = f"GPUs on {_nodes({gpu.numa_node for gpu in known})}, HCAs on {_nodes(hca_nodes)}"
    if not far:
        return seen(measure)
    finding = warning(
        what=f"{counted(len(far), 'GPU')} far from every HCA that NCCL uses",
        where=listed(f"GPU {gpu.index}" for gpu in far),
        evidence=measure,
        cause="their traffic crosses to the other processor, and has no GPUDirect",
        remedy=f"let {HCA} take HCAs of every node; else the cards are in the wrong slots:"
        " nvidia-smi topo -m",
    )
    return seen(measure, [finding])


def _nodes(nodes: "set[int | None]") -> str:
    return "NUMA " + ",".join(
        str(node) for node in sorted(node for node in nodes if node is not None)
    )
