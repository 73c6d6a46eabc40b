"""GPUs and what is around them: NVML, the driver's files, the PCI bus, the container toolkit."""

import ctypes
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

from muster import bom
from muster.doctor.facts import (
    Bridge,
    Driver,
    FabricState,
    Gpu,
    GpuProcess,
    Gpus,
    Peers,
    Toolkit,
)
from muster.doctor.files import Files, clean

PCI = "/sys/bus/pci/devices"

_NVIDIA = 0x10DE
# https://pci-ids.ucw.cz/read/PD: VGA and 3D controllers; bridges; NVSwitches are "other" bridges
_GPU_CLASSES = (0x0300, 0x0302)
_BRIDGE_CLASS = 0x0604
_SWITCH_CLASS = 0x0680

_VERSION = re.compile(r"Kernel Module[^\n]*?\s(\d+\.\d+(?:\.\d+)*)")
_CUDA = re.compile(r"cu(\d+)")

# NVML_P2P_STATUS_* of nvml.h
_P2P = {
    0: "OK",
    1: "the chipset does not support it",
    2: "the GPU does not support it",
    3: "the topology does not support it",
    4: "disabled by a registry key",
    5: "not supported",
}
# NVML_TOPOLOGY_* of nvml.h, as nvidia-smi topo -m spells them
_PATHS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_FABRIC_STATES = tuple(FabricState)
# nvmlClocksEventReason* that a fault causes, not load: https://docs.nvidia.com/deploy/nvml-api
_SLOWDOWNS = {
    0x8: "hardware slowdown",
    0x20: "thermal limit (software)",
    0x40: "thermal limit (hardware)",
    0x80: "power brake",
}
_MOST_XIDS = 20

# extended capability 13 of https://pcisig.com/specifications: its control register lies 6 bytes in
_ACS = 0x000D
_EXTENDED = 0x100


def gpus(files: Files) -> Gpus:
    on_pci = list(_of_class(files, _GPU_CLASSES))
    found = Gpus(
        driver=_driver(files),
        on_pci=len(on_pci),
        device_files=sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in files.names("/dev")),
        switches=len(list(_of_class(files, (_SWITCH_CLASS,)))),
        fabric_manager=_runs(files, "nv-fabricmanage"),
        xids=files.attempt("kernel log", lambda: _xids(files), ()),
        image_cuda=files.attempt("bill of materials", lambda: _image_cuda(files), None),
    )
    return files.attempt("NVML", lambda: _asked(files, found), found)


def _driver(files: Files) -> Driver:
    text = files.text("/proc/driver/nvidia/version")
    if text is None:
        return Driver()
    version = _VERSION.search(text)
    return Driver(version[1] if version else None, open_module="Open Kernel Module" in text)


def _of_class(files: Files, classes: tuple[int, ...]) -> Iterator[str]:
    """NVIDIA's devices of these PCI classes."""
    for name in files.names(PCI):
        if files.number(f"{PCI}/{name}/vendor") == _NVIDIA:
            kind = files.number(f"{PCI}/{name}/class")
            if kind is not None and kind >> 8 in classes:
                yield name


def _runs(files: Files, comm: str) -> bool | None:
    """Whether a process of that name runs here; names are cut at 15 characters."""
    pids = [name for name in files.names("/proc") if name.isdecimal()]
    return any(files.text(f"/proc/{pid}/comm") == comm for pid in pids) if pids else None


def _xids(files: Files) -> tuple[str, ...]:
    """The driver's last error reports in the kernel's log, which root alone may read."""
    path = files.path("/dev/kmsg")
    lines: list[str] = []
    log = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        # one record a read, and EAGAIN after the last; a file in its place ends with nothing
        while record := _record(log):
            lines += [line for line in record.splitlines() if "NVRM: Xid" in line]
    finally:
        os.close(log)
    return tuple(clean(line.partition(";")[2] or line) for line in lines[-_MOST_XIDS:])


def _record(log: int) -> str:
    while True:
        try:
            return os.read(log, 2**16).decode(errors="replace")
        except BlockingIOError:
            return ""
        except BrokenPipeError:
            # the kernel wrote over what was to be read next: that goes on with what is left
            continue


def _image_cuda(files: Files) -> int | None:
    if not files.exists(str(bom.PATH)):
        return None
    version = _CUDA.fullmatch(str(bom.read(files.raw(str(bom.PATH), 2**26)).get("variant")))
    return int(version[1]) if version else None


# ---- NVML ---------------------------------------------------------------------------------------


def _asked(files: Files, found: Gpus) -> Gpus:
    """`found` with what NVML says, where its module and the driver are."""
    # in an image it may be missing: what the files say is there all the same
    import pynvml  # noqa: PLC0415

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        files.unread["NVML"] = clean(str(error))
        # with no driver there is nothing that it could answer
        failed = clean(str(error)) if found.driver.version else None
        return _with_driver(found, found.driver.version, None, failed)
    try:
        return _answers(pynvml, files, found)
    finally:
        pynvml.nvmlShutdown()


def _with_driver(found: Gpus, version: str | None, cuda: str | None, error: str | None) -> Gpus:
    driver = Driver(version, cuda, found.driver.open_module, error)
    return Gpus(**{**vars(found), "driver": driver})


def _answers(nvml: Any, files: Files, found: Gpus) -> Gpus:  # noqa: ANN401  it has no types
    ask = _Asker(nvml)
    cuda = ask(nvml.nvmlSystemGetCudaDriverVersion_v2)
    version = ask(nvml.nvmlSystemGetDriverVersion) or found.driver.version
    named = None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}"
    handles = [
        handle
        for index in range(nvml.nvmlDeviceGetCount())
        if (handle := ask(nvml.nvmlDeviceGetHandleByIndex, index)) is not None
    ]
    devices = tuple(_gpu(ask, files, index, handle) for index, handle in enumerate(handles))
    peers = tuple(
        _peers(ask, (first, handles[first]), (second, handles[second]))
        for first in range(len(handles))
        for second in range(first + 1, len(handles))
    )
    known = _with_driver(found, None if version is None else str(version), named, None)
    return Gpus(**{**vars(known), "devices": devices, "peers": peers})


class _Asker:
    """Calls NVML; None where it does not answer, as older GPUs and drivers do not."""

    def __init__(self, nvml: Any) -> None:  # noqa: ANN401
        self.nvml = nvml

    def __call__(self, function: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
        try:
            return function(*arguments)
        except (self.nvml.NVMLError, AttributeError, TypeError, ValueError):
            return None


def _gpu(ask: _Asker, files: Files, index: int, handle: object) -> Gpu:
    nvml = ask.nvml
    pci = ask(nvml.nvmlDeviceGetPciInfo, handle)
    bus_id = _bus_id(str(getattr(pci, "busId", "")))
    memory = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    ecc = ask(nvml.nvmlDeviceGetEccMode, handle)
    mig = ask(nvml.nvmlDeviceGetMigMode, handle)
    uuid = ask(nvml.nvmlDeviceGetUUID, handle)
    pending, failed = _repairs(ask, handle)
    links = list(_links(ask, handle))
    state, status = _fabric(ask, handle)
    reasons = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
    return Gpu(
        index=index,
        name=clean(str(ask(nvml.nvmlDeviceGetName, handle) or "unknown")),
        bus_id=bus_id,
        uuid=None if uuid is None else clean(str(uuid)),
        numa_node=numa_node(files, bus_id),
        iommu=files.word(f"{PCI}/{bus_id}/iommu_group/type"),
        memory=None if memory is None else int(memory.total),
        persistence=_truth(ask(nvml.nvmlDeviceGetPersistenceMode, handle)),
        mig=None if mig is None else bool(mig[0]),
        mig_devices=_mig_devices(ask, handle) if mig and mig[0] else (),
        ecc=None if ecc is None else bool(ecc[0]),
        uncorrected=ask(nvml.nvmlDeviceGetTotalEccErrors, handle, 1, 0),
        repair_pending=pending,
        repair_failed=failed,
        links_up=sum(links) if links else None,
        fabric=state,
        fabric_status=status,
        slowed_by=tuple(text for bit, text in _SLOWDOWNS.items() if reasons & bit),
        processes=_processes(ask, files, handle),
    )


def _truth(answer: int | None) -> bool | None:
    return None if answer is None else bool(answer)


def _links(ask: _Asker, handle: object) -> Iterator[int]:
    """1 for each NVLink that is up and 0 for each that is not; nothing for a GPU without any."""
    for link in range(ask.nvml.NVML_NVLINK_MAX_LINKS):
        state = ask(ask.nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            return
        yield int(bool(state))


def _bus_id(text: str) -> str:
    """NVML writes 00000000:1B:00.0."""
    domain, colon, rest = text.lower().partition(":")
    return f"{domain[-4:]}{colon}{rest}"


def _mig_devices(ask: _Asker, handle: object) -> tuple[str, ...]:
    nvml = ask.nvml
    most = ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    instances = (
        ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, each) for each in range(most)
    )
    names = [ask(nvml.nvmlDeviceGetUUID, each) for each in instances if each is not None]
    return tuple(str(name) for name in names if name is not None)


def _repairs(ask: _Asker, handle: object) -> tuple[bool | None, bool | None]:
    """Whether a reset would replace bad memory, and whether that failed: rows, or pages before."""
    # correctable, uncorrectable, pending, failed
    rows = ask(ask.nvml.nvmlDeviceGetRemappedRows, handle)
    if rows is not None:
        return bool(rows[2]), bool(rows[3])
    return _truth(ask(ask.nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)), None


def _fabric(ask: _Asker, handle: object) -> tuple[FabricState | None, str | None]:
    nvml = ask.nvml

    def answer() -> Any:  # noqa: ANN401
        info = nvml.c_nvmlGpuFabricInfoV_t()
        nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
        return info

    info = ask(answer)
    if info is None or not 0 <= int(info.state) < len(_FABRIC_STATES):
        return None, None
    status = int(info.status)
    return _FABRIC_STATES[int(info.state)], clean(str(nvml.NVMLError(status))) if status else None


def _processes(ask: _Asker, files: Files, handle: object) -> tuple[GpuProcess, ...]:
    running = ask(ask.nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    return tuple(
        GpuProcess(
            int(each.pid),
            files.word(f"/proc/{each.pid}/comm") or "of another container or user",
            None if each.usedGpuMemory is None else int(each.usedGpuMemory),
        )
        for each in running
    )


def _peers(ask: _Asker, first: tuple[int, object], second: tuple[int, object]) -> Peers:
    nvml = ask.nvml
    # reading is 0; in pynvml the name of that number is a tuple
    status = ask(nvml.nvmlDeviceGetP2PStatus, first[1], second[1], 0)
    by_links = ask(
        nvml.nvmlDeviceGetP2PStatus, first[1], second[1], nvml.NVML_P2P_CAPS_INDEX_NVLINK
    )
    level = ask(nvml.nvmlDeviceGetTopologyCommonAncestor, first[1], second[1])
    path = "NVLINK" if by_links == 0 else _PATHS.get(level, "unknown")
    return Peers(first[0], second[0], path, _P2P.get(status, "unknown"))


# ---- the PCI bus --------------------------------------------------------------------------------


def numa_node(files: Files, bus_id: str) -> int | None:
    """-1 is the kernel's word for not knowing."""
    node = files.number(f"{PCI}/{bus_id}/numa_node") if bus_id else None
    return None if node is None or node < 0 else node


def bridges(files: Files) -> tuple[Bridge, ...]:
    """The bridges above GPUs and network adapters that do RDMA, with what they do to P2P."""
    above: dict[str, None] = {}
    for name in files.names(PCI):
        if _talks_to_peers(files, name):
            parts = PurePosixPath(files.link(f"{PCI}/{name}") or "").parts[:-1]
            above |= dict.fromkeys(part for part in parts if _is_bridge(files, part))
    return tuple(Bridge(name, acs_control(files.raw(f"{PCI}/{name}/config"))) for name in above)


def _talks_to_peers(files: Files, name: str) -> bool:
    if files.exists(f"{PCI}/{name}/infiniband"):
        return True
    kind = files.number(f"{PCI}/{name}/class") or 0
    return kind >> 8 in _GPU_CLASSES and files.number(f"{PCI}/{name}/vendor") == _NVIDIA


def _is_bridge(files: Files, name: str) -> bool:
    return (files.number(f"{PCI}/{name}/class") or 0) >> 8 == _BRIDGE_CLASS


def acs_control(config: bytes) -> int | None:
    """The ACS control register in a PCI configuration space; 0 without ACS.

    None when the extended part is not there: the kernel shows the first 64 bytes to those who are
    not root.
    """
    offset, seen = _EXTENDED, set[int]()
    if len(config) < _EXTENDED + 4:
        return None
    while offset >= _EXTENDED and offset not in seen and offset + 8 <= len(config):
        seen.add(offset)
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == _ACS:
            return int.from_bytes(config[offset + 6 : offset + 8], "little")
        offset = header >> 20
    return 0


# ---- NVIDIA's container toolkit -----------------------------------------------------------------


def toolkit(files: Files) -> Toolkit:
    """What Docker would need to hand GPUs on; the programs are looked up on this PATH."""
    specs = [
        f"{folder}/{name}"
        for folder in ("/etc/cdi", "/var/run/cdi")
        for name in files.names(folder)
    ]
    return Toolkit(
        docker=files.exists("/var/run/docker.sock") or shutil.which("dockerd") is not None,
        runtime="nvidia" in _runtimes(files),
        hook=shutil.which("nvidia-container-runtime-hook") is not None,
        cdi=tuple(clean(spec) for spec in specs if "nvidia.com/gpu" in (files.text(spec) or "")),
    )


def _runtimes(files: Files) -> dict[str, Any]:
    """https://docs.docker.com/reference/cli/dockerd/#daemon-configuration-file"""
    try:
        settings = json.loads(files.text("/etc/docker/daemon.json") or "{}")
    except ValueError:
        return {}
    runtimes = settings.get("runtimes") if isinstance(settings, dict) else None
    return runtimes if isinstance(runtimes, dict) else {}
