"""The one look at a machine: at made trees of /proc and /sys, at odd ones, and at this one."""

import ctypes
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.unit.conftest import ROOT

from muster import context
from muster.doctor import devices, host, links, remains
from muster.doctor.examine import CHECKS, examine
from muster.doctor.facts import Bridge, Clock, FabricState, Facts, Gid, GpuProcess, Peers
from muster.doctor.files import Files, clean
from muster.doctor.look import look

IB = "sys/class/infiniband"
PCI = "sys/bus/pci/devices"
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (x)  Tue"
    "\nGCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1)"
)
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024"


def plant(root: Path, contents: Mapping[str, str | bytes | Path]) -> Files:
    """Files with these contents under `root`; a Path is what a link leads to, from the root."""
    for name, content in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            (root / content).mkdir(parents=True, exist_ok=True)
            path.symlink_to(root / content)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    return Files(root)


# ---- files --------------------------------------------------------------------------------------


def test_what_cannot_be_read_is_none_and_no_error(tmp_path: Path) -> None:
    files = plant(tmp_path, {"word": "  x y\n", "number": "0x15b3\n", "odd": "a\x1b[31m\0b\n"})
    assert (files.word("/word"), files.number("/number"), files.number("/word")) == (
        "x y",
        5555,
        None,
    )
    assert files.word("odd") == "a\ufffd[31m\ufffdb"
    for name in ("absent", "/", "nul\0name", "word/below", "x" * 5000):
        assert files.text(name) is None
        assert files.number(name) is None
        assert files.names(name) in ([], ["number", "odd", "word"])
        assert files.raw(name) == b""
    assert not files.exists("nul\0name")
    assert files.link("absent") is None


def test_names_are_sorted_as_people_count(tmp_path: Path) -> None:
    files = plant(tmp_path, dict.fromkeys(("mlx5_10", "mlx5_2", "mlx5_1", "a"), ""))
    assert files.names("/") == ["a", "mlx5_1", "mlx5_2", "mlx5_10"]


@given(st.lists(st.text(max_size=8), max_size=6))
def test_any_names_can_be_sorted(names: list[str]) -> None:
    from muster.doctor.files import _natural  # noqa: PLC0415

    assert sorted(sorted(names, key=_natural)) == sorted(names)


@given(st.text(st.characters(), max_size=40))
def test_a_cleaned_text_can_be_printed_and_encoded(text: str) -> None:
    cleaned = clean(text)
    assert cleaned.isprintable()
    assert clean(cleaned) == cleaned
    cleaned.encode()


def test_a_link_of_a_loop_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert Files(tmp_path).link("loop") is None
    assert Files(tmp_path).text("loop") is None


def test_what_fails_is_kept_with_its_reason() -> None:
    files = Files()

    def fails() -> int:
        raise PermissionError(1, "not\x1b allowed")

    assert files.attempt("shm", fails, 7) == 7
    assert files.unread == {"shm": "[Errno 1] not\ufffd allowed"}


# ---- HCAs and interfaces ------------------------------------------------------------------------


def test_an_hca_is_read_from_sysfs(tmp_path: Path) -> None:
    device = Path("sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0")
    port = f"{IB}/mlx5_2/ports/1"
    files = plant(
        tmp_path,
        {
            f"{IB}/mlx5_2/device": device,
            f"{device}/driver": Path("sys/bus/pci/drivers/mlx5_core"),
            f"{PCI}/0000:16:00.0/numa_node": "1\n",
            f"{port}/state": "4: ACTIVE\n",
            f"{port}/phys_state": "5: LinkUp\n",
            f"{port}/link_layer": "Ethernet\n",
            f"{port}/rate": "400 Gb/sec (4X NDR)\n",
            f"{port}/gid_attrs/ndevs/0": "rdma0\n",
            f"{port}/gids/0": "fe80:0000:0000:0000:a088:c2ff:fe00:0001\n",
            f"{port}/gids/1": "0000:0000:0000:0000:0000:0000:0000:0000\n",
            f"{port}/gids/10": "0000:0000:0000:0000:0000:ffff:0a00:0001\n",
            f"{port}/gid_attrs/types/0": "IB/RoCE v1\n",
            f"{port}/gid_attrs/types/10": "RoCE v2\n",
            "sys/class/infiniband_verbs/uverbs7/ibdev": "mlx5_2\n",
            "sys/class/infiniband_verbs/abi_version": "6\n",
            "dev/infiniband/uverbs7": "",
            "sys/module/nvidia_peermem/refcnt": "0\n",
        },
    )
    network = links.network(files)
    (hca,) = network.hcas
    assert (hca.name, hca.driver, hca.numa_node) == ("mlx5_2", "mlx5_core", 1)
    assert (hca.bus_id, hca.uverbs) == ("0000:16:00.0", "uverbs7")
    assert (hca.device_file, hca.accessible) == (True, True)
    (found,) = hca.ports
    assert (found.number, found.state, found.physical_state) == (1, "ACTIVE", "LinkUp")
    assert (found.link_layer, found.rate_gbit_per_s, found.ifname) == ("Ethernet", 400.0, "rdma0")
    assert found.gids == (
        Gid(0, "fe80:0000:0000:0000:a088:c2ff:fe00:0001", "IB/RoCE v1"),
        Gid(10, "0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2"),
    )
    assert network.peermem


def test_an_hca_of_which_nothing_can_be_read_is_still_an_hca(tmp_path: Path) -> None:
    files = plant(tmp_path, {f"{IB}/mlx5_0/ports/1/state": b"\xff\0", f"{IB}/mlx5_0/ports/x/y": ""})
    (hca,) = links.network(files).hcas
    assert (hca.uverbs, hca.device_file, hca.accessible, hca.bus_id) == (None, False, None, None)
    (port,) = hca.ports
    assert (port.state, port.link_layer, port.rate_gbit_per_s) == ("unknown", "unknown", None)


def test_an_interface_is_read_from_sysfs(tmp_path: Path) -> None:
    net = "sys/class/net/eno1"
    files = plant(
        tmp_path,
        {
            f"{net}/flags": "0x1003\n",
            f"{net}/carrier": "1\n",
            f"{net}/speed": "25000\n",
            f"{net}/mtu": "9000\n",
            f"{net}/device/numa_node": "-1\n",
            "sys/class/net/bad\udcff/speed": "-1\n",
            "sys/class/net/zero/speed": "0\n",
        },
    )
    odd, eno1, zero = links.network(files).interfaces
    assert (eno1.name, eno1.up, eno1.carrier, eno1.mtu) == ("eno1", True, True, 9000)
    assert (eno1.speed_mbit_per_s, eno1.physical, eno1.numa_node) == (25000, True, None)
    assert (odd.name, odd.up, odd.physical) == ("bad\ufffd", False, False)
    assert (odd.speed_mbit_per_s, zero.speed_mbit_per_s) == (None, None)


def test_addresses_here_are_those_that_psutil_lists() -> None:
    families = {socket.AF_INET, socket.AF_INET6}
    known = {
        (name, each.address.partition("%")[0])
        for name, every in psutil.net_if_addrs().items()
        for each in every
        if each.family in families
    }
    assert {(each.ifname, each.address) for each in links.addresses()} == known
    states = {name: "running" in state.flags for name, state in psutil.net_if_stats().items()}
    assert all(each.running is states[each.ifname] for each in links.addresses())


# ---- GPUs and the bus ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "version", "is_open"), [(OPEN, "580.95.05", True), (CLOSED, "550.54.15", False)]
)
def test_the_driver_names_itself_in_proc(
    tmp_path: Path, text: str, version: str, *, is_open: bool
) -> None:
    files = plant(
        tmp_path, {"proc/driver/nvidia/version": text, "dev/nvidia0": "", "dev/nvidiactl": ""}
    )
    found = devices.gpus(files)
    assert (found.driver.version, found.driver.open_module) == (version, is_open)
    assert found.device_files == 1
    # the module is loaded, and NVML is not to be had here
    assert found.driver.error == files.unread["NVML"] == "NVML Shared Library Not Found"


def test_what_is_on_the_bus_is_counted_by_its_class(tmp_path: Path) -> None:
    kinds = {
        "1b": ("0x10de", "0x030200"),
        "2b": ("0x10de", "0x030000"),
        "05": ("0x10de", "0x068000"),
    }
    others = {"3b": ("0x10de", "0x040300"), "4b": ("0x1002", "0x030000"), "5b": ("?", "")}
    files = plant(
        tmp_path,
        {
            f"{PCI}/0000:{bus}:00.0/{name}": f"{value}\n"
            for bus, pair in {**kinds, **others}.items()
            for name, value in zip(("vendor", "class"), pair, strict=True)
        },
    )
    found = devices.gpus(files)
    assert (found.on_pci, found.switches) == (2, 1)


def test_reports_of_the_driver_are_taken_from_the_kernels_log(tmp_path: Path) -> None:
    line = "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', GPU has fallen off the bus."
    log = f"6,1,2,-;eth0: link up\n4,3,4,-;{line}\n SUBSYSTEM=pci\n6,5,6,-;\x1b[31mNVRM: Xid\n"
    files = plant(tmp_path, {"dev/kmsg": log})
    assert devices.gpus(files).xids == (line, "\ufffd[31mNVRM: Xid")
    assert "kernel log" not in files.unread
    absent = Files(tmp_path / "absent")
    assert devices.gpus(absent).xids == ()
    assert "No such file" in absent.unread["kernel log"]


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ('{"variant": "cu13"}', 13),
        ('{"variant": "cu12"}', 12),
        ('{"variant": "cpu"}', None),
        ("[]", None),
        ("{", None),
    ],
)
def test_the_cuda_of_an_image_is_its_variants(tmp_path: Path, text: str, cuda: int | None) -> None:
    assert devices.gpus(plant(tmp_path, {"opt/muster/bom.json": text})).image_cuda == cuda


def configuration(*capabilities: tuple[int, int]) -> bytes:
    """A PCI configuration space with these extended capabilities, each with its control word."""
    space = bytearray(4096)
    for index, (number, control) in enumerate(capabilities):
        at = 0x100 + 0x40 * index
        after = at + 0x40 if index + 1 < len(capabilities) else 0
        space[at : at + 4] = (number | 1 << 16 | after << 20).to_bytes(4, "little")
        space[at + 6 : at + 8] = control.to_bytes(2, "little")
    return bytes(space)


@pytest.mark.parametrize(
    ("config", "control"),
    [
        (configuration((0x0001, 0xFFFF), (0x000D, 0x001D)), 0x1D),
        (configuration((0x000D, 0)), 0),
        (configuration((0x0001, 0xFFFF)), 0),
        (configuration(), 0),
        (configuration()[:64], None),
        (b"", None),
        # a list that leads back to itself, and one that leads out of the space
        (bytes(0x100) + (1 | 0x100 << 20).to_bytes(4, "little") + bytes(4), 0),
        (bytes(0x100) + (1 | 0xFFF << 20).to_bytes(4, "little") + bytes(4), 0),
    ],
)
def test_acs_is_read_from_the_configuration_space(config: bytes, control: int | None) -> None:
    assert devices.acs_control(config) == control


@given(st.binary(max_size=600))
def test_no_configuration_space_breaks_the_reading(config: bytes) -> None:
    devices.acs_control(bytes(0x100) + config)


def test_the_bridges_above_gpus_and_hcas_are_looked_at(tmp_path: Path) -> None:
    root = "sys/devices/pci0000:15"
    gpu, nic, disk = (f"{root}/0000:15:01.0/0000:1{x}:00.0" for x in "689")
    alone = f"{root}/0000:15:02.0"
    files = plant(
        tmp_path,
        {
            f"{PCI}/0000:15:01.0": Path(f"{root}/0000:15:01.0"),
            f"{PCI}/0000:15:02.0": Path(alone),
            **{f"{PCI}/{Path(each).name}": Path(each) for each in (gpu, nic, disk)},
            f"{root}/0000:15:01.0/class": "0x060400\n",
            f"{root}/0000:15:01.0/config": configuration((0x000D, 0x1D)),
            f"{alone}/class": "0x060400\n",
            f"{gpu}/class": "0x030200\n",
            f"{gpu}/vendor": "0x10de\n",
            f"{nic}/infiniband/mlx5_0/x": "",
            f"{disk}/class": "0x010802\n",
            f"{disk}/vendor": "0x10de\n",
            # of another vendor, under the other bridge
            f"{PCI}/0000:17:00.0": Path(f"{alone}/0000:17:00.0"),
            f"{alone}/0000:17:00.0/class": "0x030200\n",
            f"{alone}/0000:17:00.0/vendor": "0x1002\n",
        },
    )
    assert devices.bridges(files) == (Bridge("0000:15:01.0", 0x1D),)


def test_the_toolkit_is_what_docker_and_cdi_have_been_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    told = '{"runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}'
    files = plant(
        tmp_path,
        {
            "var/run/docker.sock": "",
            "etc/docker/daemon.json": told,
            "etc/cdi/nvidia.yaml": "kind: nvidia.com/gpu\n",
            "etc/cdi/other.yaml": "kind: example.com/net\n",
        },
    )
    found = devices.toolkit(files)
    assert (found.docker, found.runtime, found.hook) == (True, True, False)
    assert found.cdi == ("/etc/cdi/nvidia.yaml",)
    for text in ("[]", "{", '{"runtimes": 3}', ""):
        assert not devices.toolkit(plant(tmp_path, {"etc/docker/daemon.json": text})).runtime


# ---- NVML: its own Python module, over a library that is none -----------------------------------


class Library:
    """Stands for libnvidia-ml.so.1: two GPUs as its functions of C answer; others are missing."""

    def __init__(self, **wishes: Any) -> None:  # noqa: ANN401
        self.wishes = wishes

    def nvmlInitWithFlags(self, _flags: int) -> int:  # noqa: N802
        return int(self.wishes.get("init", 0))

    def nvmlShutdown(self) -> int:  # noqa: N802
        return 0

    def nvmlErrorString(self, code: int) -> bytes:  # noqa: N802
        return f"error {code}".encode()

    def nvmlSystemGetDriverVersion(self, text: Any, _size: Any) -> int:  # noqa: ANN401, N802
        text.value = b"580.95.05"
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, number: Any) -> int:  # noqa: ANN401, N802
        number._obj.value = 13000  # noqa: SLF001
        return 0

    def nvmlDeviceGetCount_v2(self, number: Any) -> int:  # noqa: ANN401, N802
        number._obj.value = 2  # noqa: SLF001
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:  # noqa: ANN401, N802
        ctypes.memmove(handle, ctypes.byref(ctypes.c_void_p(index.value + 1)), 8)
        return 0

    def nvmlDeviceGetName(self, _handle: Any, text: Any, _size: Any) -> int:  # noqa: ANN401, N802
        text.value = b"NVIDIA H100 \x1b[31m"
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, _size: Any) -> int:  # noqa: ANN401, N802
        text.value = b"GPU-%d" % (ctypes.cast(handle, ctypes.c_void_p).value or 0)
        return 0

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, info: Any) -> int:  # noqa: ANN401, N802
        number = ctypes.cast(handle, ctypes.c_void_p).value
        info._obj.busId = f"00000000:{number}B:00.0".encode()  # noqa: SLF001
        return 0

    def nvmlDeviceGetPersistenceMode(self, _handle: Any, mode: Any) -> int:  # noqa: ANN401, N802
        mode._obj.value = 0  # noqa: SLF001
        return 0

    def nvmlDeviceGetRemappedRows(self, _handle: Any, *numbers: Any) -> int:  # noqa: ANN401, N802
        for number, value in zip(numbers, (0, 1, 1, 0), strict=True):
            number._obj.value = value  # noqa: SLF001
        return 0

    def nvmlDeviceGetNvLinkState(self, _handle: Any, link: int, state: Any) -> int:  # noqa: ANN401, N802
        state._obj.value = int(link != 3)  # noqa: SLF001
        return 0 if link < 18 else pynvml.NVML_ERROR_INVALID_ARGUMENT

    def nvmlDeviceGetGpuFabricInfoV(self, _handle: Any, info: Any) -> int:  # noqa: ANN401, N802
        info._obj.state, info._obj.status = self.wishes["fabric"]  # noqa: SLF001
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(  # noqa: N802
        self,
        _handle: Any,  # noqa: ANN401
        count: Any,  # noqa: ANN401
        rows: Any,  # noqa: ANN401
    ) -> int:
        if rows is None:
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        rows[0].pid, rows[0].usedGpuMemory = os.getpid(), 2**30
        count._obj.value = 1  # noqa: SLF001
        return 0

    def nvmlDeviceGetP2PStatus(self, _one: Any, _other: Any, index: int, status: Any) -> int:  # noqa: ANN401, N802
        status._obj.value = 5 if index == pynvml.NVML_P2P_CAPS_INDEX_NVLINK else 1  # noqa: SLF001
        return 0

    def nvmlDeviceGetTopologyCommonAncestor(self, _one: Any, _other: Any, level: Any) -> int:  # noqa: ANN401, N802
        level._obj.value = pynvml.NVML_TOPOLOGY_SYSTEM  # noqa: SLF001
        return 0


Loads = Callable[[Library], None]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loads]:
    def load(library: Library) -> None:
        monkeypatch.setattr(pynvml, "nvmlLib", library)
        pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001

    yield load
    pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001


def test_gpus_are_asked_through_nvml(tmp_path: Path, loads: Loads) -> None:
    loads(Library(fabric=(2, 0)))
    files = plant(
        tmp_path,
        {
            "proc/driver/nvidia/version": OPEN,
            f"{PCI}/0000:1b:00.0/numa_node": "1\n",
            f"{PCI}/0000:2b:00.0/iommu_group/type": "DMA-FQ\n",
            f"proc/{os.getpid()}/comm": "python\n",
        },
    )
    found = devices.gpus(files)
    assert (found.driver.version, found.driver.cuda, found.driver.error) == (
        "580.95.05",
        "13.0",
        None,
    )
    assert found.driver.open_module
    first, second = found.devices
    assert (first.index, first.name, first.bus_id) == (0, "NVIDIA H100 \ufffd[31m", "0000:1b:00.0")
    assert (first.uuid, second.uuid) == ("GPU-1", "GPU-2")
    assert (first.numa_node, first.iommu) == (1, None)
    assert (second.bus_id, second.numa_node, second.iommu) == ("0000:2b:00.0", None, "DMA-FQ")
    assert (first.persistence, first.repair_pending, first.repair_failed) == (False, True, False)
    assert (first.links_up, first.fabric, first.fabric_status) == (
        17,
        FabricState.IN_PROGRESS,
        None,
    )
    # what this library does not have
    assert (first.ecc, first.mig, first.memory, first.uncorrected) == (None, None, None, None)
    assert first.processes == (GpuProcess(os.getpid(), "python", 2**30),)
    assert found.peers == (Peers(0, 1, "SYS", "the chipset does not support it"),)
    broken = {each.name: each for each in examine(Facts(gpus=found))}
    assert broken["fabric_manager"].findings
    assert broken["topology"].findings


def test_nvml_names_the_driver_where_proc_does_not(tmp_path: Path, loads: Loads) -> None:
    loads(Library(fabric=(0, 0)))
    files = plant(tmp_path, {f"{PCI}/0000:1b:00.0/numa_node": "0\n"})
    found = devices.gpus(files)
    assert (found.driver.version, found.driver.open_module) == ("580.95.05", None)
    assert [gpu.numa_node for gpu in found.devices] == [0, None]


@pytest.mark.parametrize(
    ("name", "runs"), [("nv-fabricmanage", True), ("python", False), (None, None)]
)
def test_the_fabric_manager_is_known_by_its_process(
    tmp_path: Path, name: str | None, *, runs: bool | None
) -> None:
    files = plant(tmp_path, {"proc/7/comm": f"{name}\n"} if name else {})
    assert devices.gpus(files).fabric_manager is runs


def test_the_state_of_a_fabric_comes_with_its_error(tmp_path: Path, loads: Loads) -> None:
    loads(Library(fabric=(3, 15)))
    (first, _) = devices.gpus(Files(tmp_path)).devices
    assert first.fabric is FabricState.COMPLETED
    assert first.fabric_status


def test_a_state_that_nobody_knows_yet_is_none(tmp_path: Path, loads: Loads) -> None:
    loads(Library(fabric=(9, 0)))
    (first, _) = devices.gpus(Files(tmp_path)).devices
    assert (first.fabric, first.fabric_status) == (None, None)


@pytest.mark.parametrize(("module", "error"), [(OPEN, True), (None, False)])
def test_nvml_that_fails_is_an_error_where_the_driver_is_loaded(
    tmp_path: Path, loads: Loads, module: str | None, *, error: bool
) -> None:
    loads(Library(init=18))
    files = plant(tmp_path, {"proc/driver/nvidia/version": module} if module else {})
    found = devices.gpus(files)
    assert (found.driver.error is not None) is error
    assert "NVML" in files.unread
    assert found.devices == ()


# ---- limits, memory, the clock ------------------------------------------------------------------

GROUPS = [
    # v2, with a limit further out
    (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/memory.max": "1073741824\n",
            "sys/fs/cgroup/a/b/pids.max": "500\n",
            "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n",
        },
        (2**30, 500, 1.5),
    ),
    # v1
    (
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/d\n4:memory:/d\n3:pids:/d\n1:name=systemd:/d\n",
            "sys/fs/cgroup/memory/d/memory.limit_in_bytes": "2147483648\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/pids/d/pids.max": "max\n",
            "sys/fs/cgroup/cpu,cpuacct/d/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu,cpuacct/d/cpu.cfs_period_us": "100000\n",
        },
        (2**31, None, 4.0),
    ),
    # in a container of v1 the path is the host's, and the mount begins at the group
    (
        {
            "proc/self/cgroup": "4:memory:/docker/0123\n2:cpu:/docker/0123\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "1048576\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        (2**20, None, None),
    ),
    ({}, (None, None, None)),
    # a path out of the mount, a period of nothing, a limit of words
    (
        {
            "proc/self/cgroup": "0::/../../x\nodd\n0::\n",
            "sys/fs/cgroup/cpu.max": "5 0\n",
            "sys/fs/cgroup/memory.max": "much\n",
        },
        (None, None, None),
    ),
]


@pytest.mark.parametrize(("contents", "limits"), GROUPS)
def test_the_limits_of_all_groups_around_are_looked_at(
    tmp_path: Path, contents: dict[str, str], limits: tuple[int | None, int | None, float | None]
) -> None:
    found = host.limits(plant(tmp_path, contents))
    assert (found.cgroup_memory, found.cgroup_pids, found.cgroup_cpus) == limits


def test_the_limits_of_the_process_are_its_own_and_unlimited_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda which: (
            (soft, hard)
            if which == resource.RLIMIT_NOFILE
            else (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        ),
    )
    found = host.limits(Files())
    assert (found.open_files, found.open_files_hard) == (soft, hard)
    assert (found.locked_memory, found.processes) == (None, None)


@pytest.mark.parametrize(
    ("code", "status", "synchronised"), [(0, 0, True), (5, 0, False), (0, 0x40, False)]
)
def test_the_clock_is_kept_right_when_both_words_of_the_kernel_say_so(
    monkeypatch: pytest.MonkeyPatch, code: int, status: int, *, synchronised: bool
) -> None:
    def adjtimex(state: Any) -> int:  # noqa: ANN401
        state._obj.status, state._obj.most_error = status, 1500  # noqa: SLF001
        return code

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(adjtimex=adjtimex))
    assert host.clock() == Clock(synchronised, 0.0015)


def test_the_clock_of_this_machine_can_be_asked() -> None:
    assert host.clock().error_s >= 0


def test_a_size_that_no_limit_allows_is_not_locked() -> None:
    # more than any machine has
    found = host.locked(2**50)
    assert found.why


def test_locking_leaves_nothing_locked_and_agrees_with_the_limit() -> None:
    small = host.locked(2**12)
    assert small.why == ""
    assert "VmLck:\t       0 kB" in Path("/proc/self/status").read_text()


def test_a_lock_that_is_refused_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    # the limit binds whoever has no right to lock memory
    lowered = "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))"
    dropped = "os.getuid() or os.setuid(65534)"
    # another user may not be let into the interpreter's folder to import more
    code = f"import ctypes, mmap, os, resource, sys\n{lowered}\n{dropped}\n{host._LOCK}"  # noqa: SLF001
    monkeypatch.setattr(host, "_LOCK", code)
    assert host.locked(2**20).why in ("Operation not permitted", "Cannot allocate memory")


def test_the_memory_is_that_of_the_machine() -> None:
    found = host.memory(Files())
    assert found.total == psutil.virtual_memory().total
    shm = os.statvfs("/dev/shm")
    assert found.shm_total == shm.f_frsize * shm.f_blocks


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        ({".dockerenv": ""}, "/.dockerenv"),
        ({"run/.containerenv": ""}, "/run/.containerenv"),
        ({"var/run/secrets/kubernetes.io/token": ""}, "/var/run/secrets/kubernetes.io"),
        ({}, None),
    ],
)
def test_a_container_is_told_by_what_its_engine_leaves(
    tmp_path: Path, contents: dict[str, str], says: str | None
) -> None:
    found = host.machine(plant(tmp_path, contents))
    assert found.container == says


@pytest.mark.parametrize(
    ("namespace", "says"), [("4026531836", None), ("4026532001", "a PID namespace of its own")]
)
def test_a_container_without_a_mark_is_told_by_its_processes(
    tmp_path: Path, namespace: str, says: str | None
) -> None:
    files = plant(tmp_path, {"proc/self/ns/x": ""})
    (tmp_path / "proc/self/ns/pid").symlink_to(f"pid:[{namespace}]")
    assert host.machine(files).container == says


def test_numa_nodes_are_counted(tmp_path: Path) -> None:
    nodes = {f"sys/devices/system/node/{name}/x": "" for name in ("node0", "node1", "power")}
    files = plant(tmp_path, {**nodes, "proc/sys/kernel/numa_balancing": "1\n"})
    found = host.machine(files)
    assert (found.numa_nodes, found.numa_balancing) == (2, True)
    files = plant(tmp_path, {"proc/sys/kernel/numa_balancing": "0\n"})
    assert host.machine(files).numa_balancing is False


# ---- the job ------------------------------------------------------------------------------------


def test_only_what_matters_of_the_environment_is_kept_and_no_secret(tmp_path: Path) -> None:
    environment = {
        "NCCL_DEBUG": "INFO\x1b[31m",
        "RANK": "0",
        "LOCAL_WORLD_SIZE": "8",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NVIDIA_API_KEY": "nvapi-secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "PASSWORD": "secret",
        "PATH": "/secret",
        "nccl_debug": "secret",
    }
    kept = remains.job(Files(tmp_path), environment).environment
    assert kept == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "LOCAL_WORLD_SIZE": "8",
        "NCCL_DEBUG": "INFO\ufffd[31m",
        "NVIDIA_API_KEY": "***",
        "RANK": "0",
    }


def test_ncclss_files_are_read_in_its_order_and_the_environment_stands(tmp_path: Path) -> None:
    files = plant(
        tmp_path,
        {
            "home/me/.nccl.conf": "# x\nNCCL_IB_HCA=mlx5_0\nHTTPS_PROXY=http://u:secret@p\nodd\n",
            "etc/nccl.conf": "NCCL_IB_HCA=mlx5_9\nNCCL_NET=IB\n NCCL_ALGO=Ring\nNCCL_DEBUG=INFO",
        },
    )
    job = remains.job(files, {"HOME": "/home/me", "NCCL_DEBUG": "WARN"})
    assert [each.path for each in job.configurations] == ["/home/me/.nccl.conf", "/etc/nccl.conf"]
    assert job.configurations[0].settings == (("NCCL_IB_HCA", "mlx5_0"), ("HTTPS_PROXY", "***"))
    assert job.variable("NCCL_IB_HCA") == "mlx5_0"
    assert job.variable("NCCL_NET") == "IB"
    assert job.variable("NCCL_DEBUG") == "WARN"
    assert job.variable("NCCL_ALGO") is None
    assert "secret" not in json.dumps(Facts(job=job).to_dict())


def test_another_file_may_be_named_in_place_of_the_users(tmp_path: Path) -> None:
    files = plant(tmp_path, {"my.conf": "NCCL_NET=Socket\n", "home/me/.nccl.conf": "NCCL_NET=IB\n"})
    job = remains.job(files, {"HOME": "/home/me", "NCCL_CONF_FILE": "/my.conf"})
    assert job.variable("NCCL_NET") == "Socket"


@given(st.text(max_size=60))
def test_any_file_of_nccls_can_be_read(text: str) -> None:
    for name, value in remains.settings_of(text):
        assert (name + value).isprintable()


def test_a_name_that_does_not_resolve_says_why() -> None:
    found = links.resolve("no-such-host.invalid")
    assert found.addresses == ()
    assert found.why
    assert links.resolve("127.0.0.1").addresses == ("127.0.0.1",)
    assert links.resolve("x" * 300).why
    assert links.resolve("a\udcff").why


def test_a_resolver_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [][: over.wait()])
    assert links.resolve("somewhere", 0.05).why == "no answer within 0.05 s"
    over.set()


def test_who_listens_on_a_port_is_found_here() -> None:
    for family, host_address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family, socket.SOCK_STREAM) as server:
            server.bind((host_address, 0))
            port = server.getsockname()[1]
            assert links.listeners(Files(), frozenset({port})) == ()
            server.listen()
            (found,) = links.listeners(Files(), frozenset({port}))
            assert (found.port, found.pid) == (port, os.getpid())
            assert found.name


def test_a_port_whose_owner_cannot_be_seen_is_held_all_the_same(tmp_path: Path) -> None:
    rows = "sl local\n0: 00000000:733C 00000000:0000 0A 0:0 0:0 0 0 0 651 1\nodd\n"
    (found,) = links.listeners(plant(tmp_path, {"proc/net/tcp": rows}), frozenset({29500}))
    assert (found.port, found.pid, found.name) == (29500, None, None)


# Python's own mmap keeps the file open as well
MAPS = """
import ctypes, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
assert libc.mmap(None, ctypes.c_size_t(4096), 3, 1, file, ctypes.c_long(0)) > 0
os.close(file)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_segment_is_held_for_as_long_as_a_process_has_it() -> None:
    path = Path(f"/dev/shm/nccl-muster{os.getpid()}")
    path.write_bytes(b"x" * 4096)
    try:
        with path.open("rb"):
            assert mine(path).held is True
        assert mine(path).held is not True
        argv = [sys.executable, "-c", MAPS, str(path)]
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "ready\n"
            assert mine(path).held is True
            holder.communicate()
        assert mine(path).size == 4096
    finally:
        path.unlink()


def mine(path: Path) -> Any:  # noqa: ANN401
    (found,) = [each for each in remains.job(Files(), {}).shm_files if each.name == path.name]
    return found


@pytest.mark.parametrize(("namespace", "held"), [("4026531836", False), ("4026532001", None)])
def test_what_nobody_holds_may_be_held_by_those_out_of_sight(
    tmp_path: Path, namespace: str, *, held: bool | None
) -> None:
    files = plant(
        tmp_path,
        {
            "dev/shm/nccl-Ab12": "x",
            "proc/7/fd/0": "",
            "proc/self/ns/x": "",
        },
    )
    # what the link leads to is a name, as /proc has it
    (tmp_path / "proc/self/ns/pid").symlink_to(f"pid:[{namespace}]")
    (found,) = remains.job(files, {}).shm_files
    assert found.held is held


def test_only_files_of_ranks_are_listed(tmp_path: Path) -> None:
    names = ("nccl-Ab12", "torch_4711_123_0", "sem.other", "cuda.shm.0.1.1", "important")
    files = plant(tmp_path, {f"dev/shm/{name}": "x" for name in names})
    (tmp_path / "dev/shm/nccl-link").symlink_to("/etc/passwd")
    found = [each.name for each in remains.job(files, {}).shm_files]
    assert sorted(found) == ["cuda.shm.0.1.1", "nccl-Ab12", "torch_4711_123_0"]


# ---- whole machines -----------------------------------------------------------------------------


def test_a_machine_of_which_nothing_can_be_read_is_judged_all_the_same(tmp_path: Path) -> None:
    facts = look(Files(tmp_path / "absent"), {})
    assert facts.memory.shm_total is None
    assert facts.unread["shm"]
    assert len(examine(facts)) == len(CHECKS)
    assert not any(
        "broke off" in finding.what for each in examine(facts) for finding in each.findings
    )


HUGE = [b"9" * 18, b"9" * 4000, b"9" * 5000, b"-1", b"0x" + b"f" * 300, b"9" * 400 + b" Gb/sec"]


@settings(max_examples=20)
@given(st.binary(max_size=40) | st.sampled_from(HUGE), st.integers(0, 3))
@example(HUGE[0], 0)
@example(HUGE[1], 0)
@example(HUGE[2], 0)
@example(HUGE[4], 0)
@example(HUGE[5], 0)
@example(b"MemTotal: " + HUGE[1] + b" kB\n", 0)
@example(b"1.2.3 Gb/sec 0::/\n", 0)
def test_odd_contents_break_no_reading_and_no_check(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, cut: int
) -> None:
    names = (
        *("proc/self/cgroup", "proc/self/status", "proc/meminfo", "proc/net/tcp", "proc/1/cgroup"),
        *("proc/driver/nvidia/version", "proc/sys/kernel/numa_balancing", "etc/nccl.conf"),
        *(f"{IB}/m/ports/1/{name}" for name in ("state", "rate", "link_layer", "gids/0", "gids/x")),
        *(f"sys/class/net/e/{name}" for name in ("flags", "carrier", "speed", "mtu")),
        *(f"{PCI}/0000:01:00.0/{name}" for name in ("class", "vendor", "config", "numa_node")),
        *("etc/docker/daemon.json", "etc/cdi/x.json", "opt/muster/bom.json", "dev/kmsg"),
        *("proc/7/comm", "proc/7/maps", "dev/shm/nccl-x"),
    )
    root = tmp_path_factory.mktemp("odd")
    whole = content * (1 + cut * 20)
    facts = look(plant(root, dict.fromkeys(names, whole)), {"NCCL_IB_HCA": repr(content)})
    found = [finding.what for each in examine(facts) for finding in each.findings]
    assert not [what for what in found if "broke off" in what]
    assert Facts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts


def test_this_machine_is_read_and_survives_json() -> None:
    facts = look()
    assert facts.machine.hostname == clean(socket.gethostname())
    assert facts.memory.total > 0
    assert any(each.address == "127.0.0.1" for each in facts.network.addresses)
    assert Facts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts
    assert len(examine(facts)) == len(CHECKS)


# ---- in a container -----------------------------------------------------------------------------


def without_packages(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The doctor with this library, the standard library, and nothing that is installed."""
    return subprocess.run(
        [sys.executable, "-S", "-m", "muster.doctor", *arguments],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_standard_library_is_enough() -> None:
    done = without_packages()
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[-1] == ("READY" if done.returncode == 0 else "NOT READY")
    assert [line.partition(":")[0] for line in lines[: len(CHECKS)]] == [
        check.__name__ for check in CHECKS
    ]


def test_the_exit_status_agrees_with_the_verdict_and_the_findings() -> None:
    done = without_packages("--json", NCCL_SOCKET_IFNAME="no-such-interface", LANG="C")
    document = json.loads(done.stdout)
    assert (done.returncode, document["verdict"]) == (1, "NOT READY")
    assert "NCCL_SOCKET_IFNAME" in [each["where"] for each in document["findings"]]
    assert Facts.from_dict(document["facts"]).job.environment == {
        "NCCL_SOCKET_IFNAME": "no-such-interface"
    }


def test_what_it_does_not_know_is_refused() -> None:
    done = without_packages("--help")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "usage: python -m muster.doctor [--json]\n"


def test_it_imports_only_what_the_image_has() -> None:
    code = "import sys, muster.doctor.__main__; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    of_muster = {name.split(".")[1] for name in done.stdout.split() if name.startswith("muster.")}
    in_the_image = {Path(name).parts[0].removesuffix(".py") for name in context.LIBRARY}
    assert of_muster <= in_the_image | {*context.PACKAGES}
