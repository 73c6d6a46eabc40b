"""Checks of the GPUs, their driver and what joins them within the node."""

from collections import Counter
from collections.abc import Iterator

from muster import size
from muster.doctor.check import Seen, counted, gpu_count, listed, not_here, seen
from muster.doctor.facts import FabricState, Facts, Gpu
from muster.finding import Finding, error, warning

# https://docs.nvidia.com/deploy/cuda-compatibility/: the oldest driver branch for a CUDA major
# version, as docker/pins.toml has it for the variants cu12 and cu13
OLDEST_DRIVER = {12: 525, 13: 580}
# ReqRedir, CmpltRedir, UpstreamFwd: what sends traffic between peers up to the root complex
ACS_REDIRECTS = 0x1C
# errors of hardware and driver, not of a program: https://docs.nvidia.com/deploy/xid-errors/
HARDWARE_XIDS = frozenset({48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 110, 119, 120, 136, 140, 143})
FALLEN_OFF = 79

NO_GPU = "no NVIDIA GPU here"


def driver(facts: Facts) -> Seen:
    """The driver answers, and its branch is one that a variant of the image runs on."""
    gpus = facts.gpus
    # /proc shows the host's driver to every container
    inside = facts.machine.container is not None
    if not gpu_count(facts) and (gpus.driver.version is None or inside):
        return _without_driver(facts)
    if gpus.driver.error is not None:
        return seen("does not answer", [_no_answer(facts, gpus.driver.error)])
    version = gpus.driver.version or "unknown"
    branch = version.partition(".")[0]
    if not branch.isdecimal():
        return not_here(f"the driver's version is not known: {facts.why('NVML')}")
    cuda = f", CUDA {gpus.driver.cuda}" if gpus.driver.cuda else ""
    return seen(f"{version}{cuda}", _too_old(facts, int(branch)))


def _without_driver(facts: Facts) -> Seen:
    if not facts.gpus.on_pci:
        return not_here(NO_GPU)
    inside = facts.machine.container is not None
    finding = warning(
        what=f"{counted(facts.gpus.on_pci, 'GPU')} on the bus, and no driver for them",
        where="NVIDIA driver",
        evidence="there is no /dev/nvidia0",
        cause="the container was started without GPUs"
        if inside
        else "the driver is not installed, or its module is not loaded",
        remedy="docker run --gpus all; in a pod, ask for nvidia.com/gpu"
        if inside
        else "install NVIDIA's driver 580 or newer, then modprobe nvidia and look at dmesg",
    )
    return seen("none loaded", [finding])


def _no_answer(facts: Facts, why: str) -> Finding:
    mismatch = "mismatch" in why.lower()
    return error(
        what=f"NVML does not answer: {why}",
        where="NVIDIA driver",
        evidence=f"the loaded module is {facts.gpus.driver.version}",
        cause="the driver's libraries were updated, and the old kernel module is still loaded"
        if mismatch
        else "a GPU has failed, a device file is missing, or library and module do not fit",
        remedy="reboot, or unload and load the nvidia modules"
        if mismatch
        else "run nvidia-smi and look for NVRM in dmesg; in a container, start it anew",
    )


def _too_old(facts: Facts, branch: int) -> Iterator[Finding]:
    cuda = facts.gpus.image_cuda
    needed = OLDEST_DRIVER.get(cuda or 0, min(OLDEST_DRIVER.values()))
    if branch >= needed:
        return
    subject = f"this image's CUDA {cuda}" if cuda else "any CUDA variant of the image"
    yield error(
        what=f"driver {facts.gpus.driver.version} is too old for {subject}",
        where="NVIDIA driver",
        evidence=f"branch {branch}, and {needed} is the oldest that will do",
        cause="each major version of CUDA needs a driver of its time",
        remedy=f"install driver {needed} or newer"
        + (", or use the image's variant cu12" if cuda == 13 and branch >= 525 else ""),
    )


# ---- the GPUs one by one ------------------------------------------------------------------------


def gpus(facts: Facts) -> Seen:
    """The GPUs are of one kind, all there, whole, and not slowed down by heat or power."""
    devices = facts.gpus.devices
    if not devices:
        return _no_gpus(facts)
    names = Counter(gpu.name for gpu in devices)
    findings = [finding for gpu in devices for finding in _broken(gpu)]
    if len(names) > 1:
        findings.append(_mixed(names))
    findings += _missing(facts)
    return seen(", ".join(f"{count} x {name}" for name, count in names.items()), findings)


def _no_gpus(facts: Facts) -> Seen:
    if not gpu_count(facts):
        return not_here(NO_GPU)
    return not_here(f"what they are is not known: {facts.why('NVML')}")


def _mixed(names: Counter[str]) -> Finding:
    return warning(
        what=f"{len(names)} kinds of GPU in one node",
        where="GPUs",
        evidence=", ".join(f"{count} x {name}" for name, count in names.items()),
        cause="every step waits for the slowest rank, and its memory bounds the batch of all",
        remedy="leave the others out with CUDA_VISIBLE_DEVICES",
    )


def _missing(facts: Facts) -> Iterator[Finding]:
    shown = len(facts.gpus.devices)
    lost = facts.gpus.device_files > shown
    # a container has a part of what is on the bus
    if not lost and (facts.gpus.on_pci <= shown or facts.machine.container is not None):
        return
    # the driver had taken those with a device file; an old card beside them it may not know
    make, there = (error, facts.gpus.device_files) if lost else (warning, facts.gpus.on_pci)
    yield make(
        what=f"{counted(there, 'GPU')} {'taken by' if lost else 'on the bus, not all known to'} the"
        f" driver, and it shows {shown}",
        where="GPUs",
        evidence=f"shown: {listed(gpu.bus_id for gpu in facts.gpus.devices)}",
        cause="a GPU did not start, fell off the bus, was handed to a guest, or is one that this"
        " driver does not support",
        remedy="look for NVRM in dmesg; power-cycle the node; if it stays so, have the GPU changed",
    )


def _broken(gpu: Gpu) -> Iterator[Finding]:
    where = f"GPU {gpu.index} ({gpu.bus_id})"
    if gpu.repair_failed:
        yield error(
            what="bad memory could not be replaced",
            where=where,
            evidence="NVML: a remapping of rows has failed",
            cause="no spare row is left for a bad one",
            remedy="take the GPU out of service: it has to be changed",
        )
    if gpu.uncorrected:
        yield warning(
            what=f"{counted(gpu.uncorrected, 'uncorrected memory error')} since the driver started",
            where=where,
            evidence=f"NVML: {gpu.uncorrected} uncorrected ECC errors (volatile)",
            cause="memory has failed; what ran then was ended, and the next job may be too",
            remedy=f"drain the node, then nvidia-smi --gpu-reset -i {gpu.index}, or reboot",
        )
    elif gpu.repair_pending:
        yield warning(
            what="bad memory waits to be replaced by a spare",
            where=where,
            evidence="NVML: a remapping of rows, or a page retirement, is pending",
            cause="an error in memory was found, and only a reset of the GPU completes the repair",
            remedy=f"when it is idle: nvidia-smi --gpu-reset -i {gpu.index}, or reboot",
        )
    if gpu.slowed_by:
        yield warning(
            what=f"its clocks are held down: {', '.join(gpu.slowed_by)}",
            where=where,
            evidence="NVML: current clocks event reasons",
            cause="the GPU is too hot, or its power supply tells it to save",
            remedy="look at fans, airflow and power: nvidia-smi -q -d PERFORMANCE,POWER",
        )


def mig(facts: Facts) -> Seen:
    """No GPU is cut into MIG instances, or whoever did so knows what NCCL makes of them."""
    cut = [gpu for gpu in facts.gpus.devices if gpu.mig]
    if not facts.gpus.devices:
        return _no_gpus(facts)
    if not cut:
        return seen("off")
    finding = warning(
        what=f"MIG is on for {counted(len(cut), 'GPU')}",
        where=listed(f"GPU {gpu.index}" for gpu in cut),
        evidence=listed(name for gpu in cut for name in gpu.mig_devices) or "no instance exists",
        cause="a process sees one instance, and NCCL has neither NVLink nor P2P between them",
        remedy="nvidia-smi -mig 0 for training over several GPUs; else one rank an instance, with"
        " CUDA_VISIBLE_DEVICES=MIG-... and device 0",
    )
    return seen(f"on for {len(cut)} of {len(facts.gpus.devices)}", [finding])


def persistence(facts: Facts) -> Seen:
    """The driver stays loaded between jobs."""
    known = [gpu for gpu in facts.gpus.devices if gpu.persistence is not None]
    if not known:
        return _no_gpus(facts)
    off = [gpu for gpu in known if not gpu.persistence]
    if not off:
        return seen("on")
    finding = warning(
        what=f"persistence mode is off for {counted(len(off), 'GPU')}",
        where=listed(f"GPU {gpu.index}" for gpu in off),
        evidence="NVML: persistence mode disabled",
        cause="with no process on a GPU the driver lets it go: each start then takes seconds a GPU,"
        " and settings are lost",
        remedy="systemctl enable --now nvidia-persistenced",
    )
    return seen(f"off for {len(off)} of {len(known)}", [finding])


def xid(facts: Facts) -> Seen:
    """The kernel's log has no report of broken hardware from the driver."""
    if not facts.gpus.on_pci and not facts.gpus.xids:
        return not_here(NO_GPU)
    if "kernel log" in facts.unread and not facts.gpus.xids:
        return not_here(f"the kernel's log cannot be read: {facts.why('kernel log')}")
    numbered = [(number_of(line), line) for line in facts.gpus.xids]
    bad = [(number, line) for number, line in numbered if number in HARDWARE_XIDS]
    if not bad:
        return seen(counted(len(numbered), "report") + ", none of broken hardware")
    fallen = [line for number, line in bad if number == FALLEN_OFF]
    make = error if fallen else warning
    finding = make(
        what=f"the driver reported Xid {listed(dict.fromkeys(str(number) for number, _ in bad))}",
        where="kernel log",
        evidence=fallen[-1] if fallen else bad[-1][1],
        cause="a GPU has fallen off the bus"
        if fallen
        else "memory, NVLink or the GPU's own processor had an error since this machine started",
        remedy="reboot the node, and watch whether it comes back; the numbers are explained at"
        " https://docs.nvidia.com/deploy/xid-errors/",
    )
    return seen(counted(len(bad), "report") + " of broken hardware", [finding])


def number_of(line: str) -> int | None:
    """79 in the line "NVRM: Xid (PCI:0000:1b:00): 79, pid=..."; None in a line of another form."""
    words = line.rpartition("): ")[2].partition(",")[0]
    return int(words) if words.isdecimal() and len(words) < 6 else None


# ---- between them -------------------------------------------------------------------------------


def topology(facts: Facts) -> Seen:
    """Every GPU may read every other one's memory, over NVLink where there is NVLink."""
    peers = facts.gpus.peers
    if not peers:
        return not_here("fewer than 2 GPUs are known here")
    paths = Counter(each.path for each in peers)
    return seen(
        f"{counted(len(peers), 'pair')}: " + ", ".join(f"{n} {path}" for path, n in paths.items()),
        [*_no_p2p(facts), *_links_missing(facts)],
    )


def _no_p2p(facts: Facts) -> Iterator[Finding]:
    without = [each for each in facts.gpus.peers if each.p2p not in ("OK", "unknown")]
    if not without or any(gpu.mig for gpu in facts.gpus.devices):
        return
    # switches join every pair; a bridge may join two cards of four
    linked = [each for each in without if facts.gpus.switches or each.path == "NVLINK"]
    make = error if linked else warning
    worst = linked or without
    yield make(
        what=f"{counted(len(worst), 'pair')} of GPUs without P2P",
        where=listed(f"GPU {each.first} and {each.second}" for each in worst),
        evidence=f"NVML: {worst[0].p2p} ({worst[0].path})",
        cause="NVLink is up, and P2P is not: NCCL ends with an error about that"
        if linked
        else "the GPUs (GeForce cards cannot), the chipset or a registry key forbids it: NCCL goes"
        " through /dev/shm instead",
        remedy="look for NVLink errors: nvidia-smi nvlink -s; reset the GPUs"
        if linked
        else "nothing on GeForce; else nvidia-smi topo -p2p r, and the platform's settings",
    )


def _links_missing(facts: Facts) -> Iterator[Finding]:
    linked = [gpu for gpu in facts.gpus.devices if gpu.links_up is not None]
    most = max((gpu.links_up or 0 for gpu in linked), default=0)
    # a bridge joins two cards, and a third one beside them has no link; switches join them all
    joined = linked if facts.gpus.switches else [gpu for gpu in linked if gpu.links_up]
    fewer = [gpu for gpu in joined if (gpu.links_up or 0) < most]
    if not fewer or len({gpu.name for gpu in joined}) > 1:
        return
    yield warning(
        what=f"{counted(len(fewer), 'GPU')} with fewer NVLinks than the others",
        where=listed(f"GPU {gpu.index}" for gpu in fewer),
        evidence=listed(f"GPU {gpu.index}: {gpu.links_up} up" for gpu in linked),
        cause="a link did not train, or was switched off after errors",
        remedy="nvidia-smi nvlink -s and -e; look for Xid 74 in dmesg; reset the GPUs or reboot",
    )


def fabric_manager(facts: Facts) -> Seen:
    """Where NVSwitches join the GPUs, the fabric manager has set them up."""
    states = [gpu for gpu in facts.gpus.devices if gpu.fabric not in (None, _NO_FABRIC)]
    if not states:
        return _by_process(facts)
    waiting = [gpu for gpu in states if gpu.fabric is not FabricState.COMPLETED]
    failed = [gpu for gpu in states if gpu.fabric_status and gpu not in waiting]
    if not waiting and not failed:
        return seen(f"completed on {counted(len(states), 'GPU')}")
    gpu = (waiting or failed)[0]
    finding = error(
        what=f"the NVLink fabric of {counted(len(waiting or failed), 'GPU')} is not set up",
        where=listed(f"GPU {each.index}" for each in waiting or failed),
        evidence=f"NVML: fabric state {gpu.fabric}, {gpu.fabric_status or 'no status'}",
        cause="the fabric manager does not run, is of another version than the driver, or was"
        " restarted under running GPUs: CUDA then ends with error 802, or NVLS with error 1",
        remedy="systemctl status nvidia-fabricmanager; install the version of the driver; after a"
        " restart of it reset the GPUs, or reboot",
    )
    return seen(f"{gpu.fabric} on {len(waiting or failed)} of {len(states)}", [finding])


_NO_FABRIC = FabricState.NOT_SUPPORTED


def _by_process(facts: Facts) -> Seen:
    """GPUs before Hopper do not tell; on a host its process does."""
    if not facts.gpus.switches:
        return not_here("no NVSwitch here")
    if facts.machine.container is not None or facts.gpus.fabric_manager is None:
        return not_here("the GPUs do not tell, and the host's processes are not to be seen")
    if facts.gpus.fabric_manager:
        return seen("runs")
    finding = error(
        what="the fabric manager does not run",
        where="NVSwitch",
        evidence=f"{counted(facts.gpus.switches, 'NVSwitch')}, and no process nv-fabricmanager",
        cause="without it the NVSwitches are not set up, and CUDA ends with error 802",
        remedy="install nvidia-fabricmanager of the driver's version, then systemctl enable --now"
        " nvidia-fabricmanager",
    )
    return seen("does not run", [finding])


def acs(facts: Facts) -> Seen:
    """No PCI bridge sends traffic between GPUs and HCAs up to the root complex."""
    if not _p2p_matters(facts):
        return not_here("no two devices here that would talk over PCI")
    known = [bridge for bridge in facts.bridges if bridge.acs is not None]
    if not known:
        return not_here("the bridges do not show their settings: only root may read them")
    redirecting = [bridge for bridge in known if (bridge.acs or 0) & ACS_REDIRECTS]
    measure = f"{len(redirecting)} of {counted(len(known), 'bridge')} redirect"
    if not redirecting:
        return seen(measure)
    finding = warning(
        what=f"ACS is on for {counted(len(redirecting), 'PCI bridge')}",
        where=listed(bridge.bus_id for bridge in redirecting),
        evidence=listed(f"{bridge.bus_id}: {bridge.acs:#06x}" for bridge in redirecting),
        cause="P2P over PCI takes the way through the root complex: it is slow, and on some"
        " platforms collectives hang",
        remedy="turn ACS off in the BIOS, or for each bridge: setpci -s BRIDGE ECAP_ACS+6.w=0000;"
        " a virtual machine may need it on",
    )
    return seen(measure, [finding])


def iommu(facts: Facts) -> Seen:
    """The IOMMU passes the GPUs' traffic through."""
    if not _p2p_matters(facts):
        return not_here("no two devices here that would talk over PCI")
    kinds = {gpu.bus_id: gpu.iommu for gpu in facts.gpus.devices if gpu.iommu}
    translated = [bus_id for bus_id, kind in kinds.items() if kind != "identity"]
    if not translated:
        return seen("passes through" if kinds else "off")
    finding = warning(
        what=f"the IOMMU translates for {counted(len(translated), 'GPU')}",
        where=listed(translated),
        evidence=listed(f"{bus_id}: {kinds[bus_id]}" for bus_id in translated),
        cause="P2P and GPUDirect over PCI are slow through it, or hang; NCCL says so in no line",
        remedy="boot with iommu=pt, or turn VT-d or AMD-Vi off in the BIOS",
    )
    return seen(f"translates for {len(translated)} of {len(kinds)}", [finding])


def _p2p_matters(facts: Facts) -> bool:
    return len(facts.gpus.devices) > 1 or bool(facts.gpus.devices and facts.network.hcas)


# ---- containers and other processes -------------------------------------------------------------


def container_toolkit(facts: Facts) -> Seen:
    """Docker can hand the GPUs to containers."""
    if facts.machine.container is not None:
        return not_here("this is a container: the host has the toolkit")
    if not gpu_count(facts):
        return not_here(NO_GPU)
    kit = facts.toolkit
    if not kit.docker:
        return not_here("no Docker here")
    ways = ["Docker's --gpus"] * kit.hook + ["the runtime nvidia"] * kit.runtime + list(kit.cdi)
    if ways:
        return seen(", ".join(ways))
    finding = error(
        what="Docker cannot give GPUs to a container",
        where="container toolkit",
        evidence="no nvidia-container-runtime-hook on PATH, no runtime nvidia in"
        " /etc/docker/daemon.json, no CDI specification of nvidia.com/gpu",
        cause="NVIDIA's container toolkit is not installed, or Docker does not know of it",
        remedy="apt-get install nvidia-container-toolkit; nvidia-ctk runtime configure"
        " --runtime=docker; systemctl restart docker",
    )
    return seen("none", [finding])


def gpu_processes(facts: Facts) -> Seen:
    """No earlier job is still on the GPUs."""
    if not facts.gpus.devices:
        return _no_gpus(facts)
    busy = [(gpu, each) for gpu in facts.gpus.devices for each in gpu.processes]
    if not busy:
        return seen("none")
    pids = dict.fromkeys(each.pid for _, each in busy)
    finding = warning(
        what=f"{counted(len(pids), 'process', 'processes')} already on the GPUs",
        where=listed(dict.fromkeys(f"GPU {gpu.index}" for gpu, _ in busy)),
        evidence=listed(
            f"{each.pid} {each.name}"
            + (f" {size.binary(each.memory)}" if each.memory is not None else "")
            for _, each in busy
        ),
        cause="a job runs there, or an earlier one did not end with all its processes",
        remedy=f"look with ps -fp {','.join(map(str, list(pids)[:6]))}; end what is a leftover",
    )
    return seen(counted(len(pids), "process", "processes"), [finding])
