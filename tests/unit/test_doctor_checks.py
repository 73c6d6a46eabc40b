"""Every check on recorded nodes: silent on a healthy one, and heard when one fact is changed."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.conftest import ROOT

from muster.doctor import checks_gpus, checks_job
from muster.doctor.check import Check, listed
from muster.doctor.examine import CHECKS, Examination, Result, examine
from muster.doctor.facts import (
    Address,
    Bridge,
    Configuration,
    FabricState,
    Facts,
    Gid,
    GpuProcess,
    Interface,
    Listener,
    Locked,
    Master,
    Peers,
    ShmFile,
)
from muster.finding import Finding, Outcome, Severity, Verdict

NODES = ROOT / "tests/unit/nodes"
ERROR, WARNING = Severity.ERROR, Severity.WARNING
GIB = 2**30


def node(name: str) -> Facts:
    recorded = json.loads((NODES / f"made-{name}.json").read_text())
    return Facts.from_dict(recorded["facts"])


BIG, LAPTOP, VM, CONTAINER = map(node, ("8-gpus-8-hcas", "laptop", "cloud-vm", "container"))


def changed(facts: Any, path: str, value: object) -> Any:  # noqa: ANN401
    """`facts` with another value at "gpus.devices.0.name"; "*" is every place of a tuple."""
    head, _, rest = path.partition(".")
    if isinstance(facts, tuple):
        indexes = range(len(facts)) if head == "*" else (int(head),)
        new = {index: changed(facts[index], rest, value) if rest else value for index in indexes}
        return tuple(new.get(index, each) for index, each in enumerate(facts))
    if isinstance(facts, dict):
        return {**facts, head: value}
    return replace(facts, **{head: changed(getattr(facts, head), rest, value) if rest else value})


def with_facts(facts: Facts, changes: Iterable[tuple[str, object]]) -> Facts:
    for path, value in changes:
        facts = changed(facts, path, value)
    return facts


def roce(facts: Facts) -> Facts:
    """The same node, its HCAs on Ethernet with an address each."""
    for index in range(len(facts.network.hcas)):
        address = f"0000:0000:0000:0000:0000:ffff:0a01:{index:02x}01"
        table = (
            Gid(0, "fe80:0000:0000:0000:a088:c2ff:fe00:0001", "IB/RoCE v1"),
            Gid(1, address, "IB/RoCE v1"),
            Gid(3, address, "RoCE v2"),
        )
        port = f"network.hcas.{index}.ports.0"
        changes = ((f"{port}.link_layer", "Ethernet"), (f"{port}.gids", table))
        facts = with_facts(facts, changes)
    return with_facts(facts, [("network.interfaces.*.mtu", 9000)])


ROCE = roce(BIG)
ALONE = replace(BIG, job=replace(BIG.job, environment={}, master=None))


def named(name: str) -> Check:
    return next(check for check in CHECKS if check.__name__ == name)


# ---- a healthy node is not bothered -------------------------------------------------------------


@pytest.mark.parametrize(
    "facts", [BIG, ROCE, ALONE, LAPTOP, VM], ids=["8 GPUs", "RoCE", "no job", "laptop", "VM"]
)
def test_a_healthy_node_is_ready_without_a_finding(facts: Facts) -> None:
    result = Result(facts, examine(facts), 0.1)
    assert result.findings == ()
    assert result.verdict is Verdict.READY


def test_a_container_as_docker_makes_it_has_too_little_shared_memory_and_nothing_else() -> None:
    result = Result(CONTAINER, examine(CONTAINER), 0.1)
    assert [(each.severity, each.what) for each in result.findings] == [
        (ERROR, "/dev/shm has 64 MiB")
    ]
    assert result.verdict is Verdict.NOT_READY


def test_without_a_gpu_nothing_of_gpus_applies() -> None:
    assert named("xid")(LAPTOP).measure == named("gpus")(LAPTOP).measure == "no NVIDIA GPU here"
    outcomes = {each.name: each.outcome for each in examine(LAPTOP)}
    of_gpus = {check.__name__ for check in CHECKS if check.__module__ == checks_gpus.__name__}
    assert {outcomes[name] for name in of_gpus} == {Outcome.NOT_APPLICABLE}


def test_nothing_known_is_no_finding_but_the_missing_shared_memory() -> None:
    found = [finding for each in examine(Facts()) for finding in each.findings]
    assert {finding.where for finding in found} == {"/dev/shm", "interfaces"}


# ---- each check is heard ------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    check: str
    facts: Facts
    changes: Sequence[tuple[str, object]]
    severity: Severity
    says: str
    where: str = ""
    kept: dict[str, object] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.check}: {self.says}"


def virtual(*names: str) -> tuple[Address, ...]:
    return tuple(Address(name, "fe80::5", 64, True) for name in names)


ADDRESSES = BIG.network.addresses
INTERFACES = BIG.network.interfaces
OLD = ShmFile("nccl-AbCdEf", 33 * 2**20, 3600.0, False)
TWO_NODES = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}

CASES = [
    # GPUs
    Case(
        "driver", BIG, [("gpus.driver.version", "520.61.05")], ERROR, "520.61.05 is too old for any"
    ),
    Case(
        "driver",
        CONTAINER,
        [("gpus.driver.version", "570.1")],
        ERROR,
        "old for this image's CUDA 13",
    ),
    Case(
        "driver",
        BIG,
        [("gpus.driver.error", "Driver/library version mismatch")],
        ERROR,
        "NVML does not answer: Driver/library version mismatch",
    ),
    Case("driver", LAPTOP, [("gpus.on_pci", 1)], WARNING, "1 GPU on the bus, and no driver"),
    Case(
        "driver",
        LAPTOP,
        [("gpus.on_pci", 8), ("machine.container", "/.dockerenv")],
        WARNING,
        "8 GPUs on the bus",
    ),
    Case(
        "driver",
        CONTAINER,
        [("gpus.devices", ()), ("gpus.device_files", 0), ("gpus.driver.error", "not found")],
        WARNING,
        "8 GPUs on the bus",
    ),
    Case("gpus", BIG, [("gpus.devices.7.name", "NVIDIA A100")], WARNING, "2 kinds of GPU"),
    Case(
        "gpus", BIG, [("gpus.on_pci", 9)], WARNING, "9 GPUs on the bus, not all known to the driver"
    ),
    Case(
        "gpus", BIG, [("gpus.device_files", 9)], ERROR, "9 GPUs taken by the driver, and it shows 8"
    ),
    Case(
        "gpus", BIG, [("gpus.devices.3.repair_failed", True)], ERROR, "could not be", "GPU 3 (0000"
    ),
    Case("gpus", BIG, [("gpus.devices.3.uncorrected", 2)], WARNING, "2 uncorrected memory errors"),
    Case("gpus", BIG, [("gpus.devices.3.repair_pending", True)], WARNING, "bad memory waits"),
    Case(
        "gpus", BIG, [("gpus.devices.0.slowed_by", ("power brake",))], WARNING, "down: power brake"
    ),
    Case(
        "xid",
        BIG,
        [("gpus.xids", ("NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.",))],
        ERROR,
        "Xid 79",
    ),
    Case("xid", BIG, [("gpus.xids", ("NVRM: Xid (PCI:0000:1b:00): 74, x",))], WARNING, "Xid 74"),
    Case("mig", BIG, [("gpus.devices.0.mig", True)], WARNING, "MIG is on for 1 GPU"),
    Case("persistence", BIG, [("gpus.devices.*.persistence", False)], WARNING, "off for 8 GPUs"),
    Case(
        "topology",
        BIG,
        [("gpus.peers.0", Peers(0, 1, "SYS", "not supported"))],
        ERROR,
        "1 pair of GPUs without P2P",
        "GPU 0 and 1",
    ),
    Case(
        "topology",
        BIG,
        [
            ("gpus.switches", 0),
            *((f"gpus.peers.*.{name}", text) for name, text in (("path", "SYS"), ("p2p", "no"))),
        ],
        WARNING,
        "28 pairs of GPUs without P2P",
    ),
    Case(
        "topology",
        BIG,
        [("gpus.switches", 0), ("gpus.peers.27.p2p", "not supported")],
        ERROR,
        "1 pair of GPUs without P2P",
        "GPU 6 and 7",
    ),
    Case("topology", BIG, [("gpus.devices.5.links_up", 16)], WARNING, "1 GPU with fewer NVLinks"),
    Case(
        "fabric_manager",
        BIG,
        [("gpus.devices.*.fabric", FabricState.IN_PROGRESS)],
        ERROR,
        "NVLink fabric of 8 GPUs is not set up",
    ),
    Case(
        "fabric_manager",
        BIG,
        [("gpus.devices.2.fabric_status", "x")],
        ERROR,
        "of 1 GPU is",
        "GPU 2",
    ),
    Case(
        "fabric_manager",
        BIG,
        [("gpus.devices.*.fabric", None), ("gpus.fabric_manager", False)],
        ERROR,
        "the fabric manager does not run",
    ),
    Case(
        "acs", BIG, [("bridges.2", Bridge("0000:3c:00.0", 0x1D))], WARNING, "1 PCI bridge", "3c:00"
    ),
    Case("iommu", BIG, [("gpus.devices.*.iommu", "DMA-FQ")], WARNING, "translates for 8 GPUs"),
    Case(
        "container_toolkit",
        VM,
        [("toolkit.hook", False), ("toolkit.runtime", False)],
        ERROR,
        "Docker cannot give GPUs",
    ),
    Case(
        "gpu_processes",
        BIG,
        [("gpus.devices.1.processes", (GpuProcess(4711, "python", 3 * GIB),))],
        WARNING,
        "1 process already on the GPUs",
        "GPU 1",
    ),
    # memory and limits
    Case("shm", BIG, [("memory.shm_total", None)], ERROR, "no /dev/shm"),
    Case("shm", BIG, [("memory.shm_writable", False)], ERROR, "cannot be written to"),
    Case("shm", BIG, [("memory.shm_total", 64 * 2**20)], ERROR, "/dev/shm has 64 MiB"),
    Case("shm", LAPTOP, [("memory.shm_total", 64 * 2**20)], WARNING, "/dev/shm has 64 MiB"),
    Case(
        "shm",
        BIG,
        [("memory.shm_total", 512 * 2**20), ("memory.shm_free", 512 * 2**20)],
        WARNING,
        "/dev/shm has 512 MiB",
    ),
    Case("shm", BIG, [("memory.shm_free", 2**20)], WARNING, "1 MiB left of 1024 GiB"),
    Case(
        "locked_memory",
        BIG,
        [("locked", Locked(64 * 2**20, "Cannot allocate memory"))],
        ERROR,
        "mlock of 64 MiB fails",
    ),
    Case("open_files", BIG, [("limits.open_files", 1024)], WARNING, "1024 files open"),
    Case("open_files", LAPTOP, [("limits.open_files", 256)], WARNING, "256 files open"),
    Case("processes", BIG, [("limits.cgroup_pids", 4096)], WARNING, "4096 processes and threads"),
    Case("processes", LAPTOP, [("limits.processes", 500)], WARNING, "for 1 rank"),
    Case(
        "control_group",
        CONTAINER,
        [("limits.cgroup_memory", 64 * 2**20)],
        WARNING,
        "/dev/shm may grow to 64 MiB",
    ),
    Case("control_group", BIG, [("limits.cgroup_cpus", 4.0)], WARNING, "4 CPUs for 8 GPUs"),
    Case("control_group", BIG, [("machine.cpus", 1)], WARNING, "1 CPU for 8 GPUs"),
    Case("numa", BIG, [("machine.numa_balancing", True)], WARNING, "balancing is on"),
    Case(
        "hugepages",
        LAPTOP,
        [("memory.hugepages", 4096), ("memory.hugepages_free", 4096)],
        WARNING,
        "8 GiB of memory are set aside",
    ),
    Case("clock", BIG, [("clock.synchronised", False)], WARNING, "nothing keeps the clock right"),
    # interfaces
    Case("interfaces", BIG, [("network.addresses", ADDRESSES[:1])], ERROR, "no interface to other"),
    Case(
        "interfaces", BIG, [("network.interfaces.1.carrier", False)], WARNING, "no carrier", "eno1"
    ),
    Case(
        "speed",
        BIG,
        [("network.interfaces.1.speed_mbit_per_s", 1000), ("network.hcas", ())],
        WARNING,
        "NCCL moves gradients over eno1",
    ),
    Case("speed", BIG, [("network.interfaces.1.mtu", 576)], WARNING, "eno1 has an MTU of 576"),
    Case(
        "speed",
        BIG,
        [
            ("network.addresses", (*ADDRESSES, Address("eno2", "10.0.1.1", 24, True))),
            ("network.interfaces", (*INTERFACES, Interface("eno2", True, True, 1500, 25000, True))),
        ],
        WARNING,
        "interfaces of different MTU",
    ),
    Case(
        "subnets",
        BIG,
        [
            ("network.addresses", (*ADDRESSES, Address("eno2", "10.0.0.7", 24, True))),
            ("network.interfaces", (*INTERFACES, Interface("eno2", True, True, 9000, 25000, True))),
        ],
        WARNING,
        "eno1, eno2 are in one subnet",
        "10.0.0.0/24",
    ),
    Case(
        "nccl_interface",
        BIG,
        [("job.environment.NCCL_SOCKET_IFNAME", "enp")],
        ERROR,
        "NCCL_SOCKET_IFNAME=enp selects no interface",
    ),
    Case(
        "nccl_interface",
        BIG,
        [
            (
                "job.configurations",
                (Configuration("/etc/nccl.conf", (("NCCL_SOCKET_IFNAME", "x0"),)),),
            )
        ],
        ERROR,
        "NCCL_SOCKET_IFNAME=x0 selects no interface",
    ),
    Case(
        "nccl_interface",
        LAPTOP,
        [("job.environment.NCCL_SOCKET_FAMILY", "AF_INET"), ("network.addresses", ())],
        ERROR,
        "NCCL finds no interface",
    ),
    Case(
        "nccl_interface", BIG, [("job.environment.NCCL_SOCKET_IFNAME", "e")], WARNING, "no effect"
    ),
    Case(
        "nccl_interface",
        BIG,
        [("job.environment.NCCL_SOCKET_IFNAME", "^docker")],
        ERROR,
        "NCCL would use lo, the loopback",
    ),
    Case(
        "nccl_interface",
        ALONE,
        [("job.environment.NCCL_SOCKET_IFNAME", "^docker")],
        WARNING,
        "NCCL would use lo, the loopback",
    ),
    Case(
        "nccl_interface",
        BIG,
        [("network.addresses", (*ADDRESSES, *virtual("veth0a1b2c3")))],
        WARNING,
        "NCCL would use veth0a1b2c3, an interface of containers",
    ),
    Case(
        "nccl_interface",
        BIG,
        [("network.addresses", (*virtual("cni0"), *ADDRESSES))],
        ERROR,
        "NCCL would use cni0, an interface of containers",
    ),
    Case(
        "gloo_interface",
        BIG,
        [("job.environment.GLOO_SOCKET_IFNAME", "eno")],
        ERROR,
        "names no interface here: eno",
    ),
    Case(
        "gloo_interface",
        BIG,
        [("network.hostname_addresses", ("127.0.1.1",))],
        WARNING,
        "node-0 leads to 127.0.1.1",
    ),
    # HCAs
    Case(
        "hcas", BIG, [("network.hcas.2.ports.0.state", "INIT")], WARNING, "linked, and", "mlx5_2:1"
    ),
    Case(
        "hcas", BIG, [("network.hcas.*.ports.0.state", "DOWN")], WARNING, "no port of 8 HCA ports"
    ),
    Case(
        "hcas", BIG, [("network.hcas.4.ports.0.rate_gbit_per_s", 200.0)], WARNING, "1 port slower"
    ),
    Case("verbs_files", BIG, [("network.hcas.*.device_file", False)], WARNING, "no file for them"),
    Case(
        "verbs_files",
        BIG,
        [("network.hcas.0.accessible", False)],
        WARNING,
        "1 HCA cannot be opened",
    ),
    Case("nccl_hca", BIG, [("job.environment.NCCL_IB_HCA", "=mlx5_9")], ERROR, "selects no HCA"),
    Case("nccl_hca", BIG, [("job.environment.NCCL_IB_HCA", "^mlx5")], ERROR, "selects no HCA"),
    Case("nccl_hca", VM, [("job.environment.NCCL_IB_HCA", "mlx5")], WARNING, "there is no HCA"),
    Case(
        "nccl_hca",
        BIG,
        [("network.hcas.1.ports.0.link_layer", "Ethernet")],
        WARNING,
        "InfiniBand and RoCE side by side",
    ),
    Case(
        "gids", ROCE, [("network.hcas.5.ports.0.gids", ())], WARNING, "without a routable", "mlx5_5"
    ),
    Case("gids", ROCE, [("job.environment.NCCL_IB_GID_INDEX", "0")], ERROR, "on 8 ports"),
    Case(
        "gids", ROCE, [("job.environment.NCCL_IB_GID_INDEX", "7")], ERROR, "no address that others"
    ),
    Case("roce_mtu", ROCE, [("network.interfaces.*.mtu", 1500)], WARNING, "8 RoCE ports is small"),
    Case(
        "gpudirect",
        BIG,
        [("network.peermem", False), ("gpus.driver.open_module", False)],
        WARNING,
        "no way for GPUDirect",
    ),
    Case("affinity", BIG, [("network.hcas.*.numa_node", 1)], WARNING, "4 GPUs far from every HCA"),
    # the job
    Case(
        "master_addr",
        BIG,
        [("job.master", Master((), "[Errno -2] Name or service not known"))],
        ERROR,
        "MASTER_ADDR node-0 does not resolve",
    ),
    Case(
        "master_addr", BIG, [("job.master", Master(("127.0.1.1",), ""))], ERROR, "is the loopback"
    ),
    Case(
        "master_addr", BIG, [("job.master", Master(("10.0.0.9",), ""))], WARNING, "node 0 is here"
    ),
    Case(
        "master_port", BIG, [("job.environment.MASTER_PORT", "tcp://10.0.0.1:80")], ERROR, "no port"
    ),
    Case(
        "master_addr",
        BIG,
        [("job.master", Master(("fd00::9",), "")), ("job.environment.NODE_RANK", "1")],
        ERROR,
        "has IPv6 alone, and this node IPv4",
    ),
    Case("master_port", BIG, [("job.environment.MASTER_PORT", "9" * 5000)], ERROR, "is no port"),
    Case(
        "master_port",
        BIG,
        [("job.listeners", (Listener(29500, 4711, "python"),))],
        ERROR,
        "MASTER_PORT 29500 is taken",
    ),
    Case("held_ports", VM, [("job.listeners", (Listener(29400),))], WARNING, "port 29400 is taken"),
    Case("ranks", VM, [("job.environment", {"RANK": "8", "WORLD_SIZE": "8"})], ERROR, "not below"),
    Case("ranks", BIG, [("job.environment.WORLD_SIZE", "12")], WARNING, "no multiple"),
    Case(
        "visible_devices",
        BIG,
        [("job.environment.CUDA_VISIBLE_DEVICES", "0,8")],
        ERROR,
        "'8', which",
    ),
    Case("visible_devices", BIG, [("job.environment.CUDA_VISIBLE_DEVICES", "1,1")], ERROR, "twice"),
    Case(
        "visible_devices",
        BIG,
        [("job.environment.CUDA_VISIBLE_DEVICES", "")],
        WARNING,
        "hides every",
    ),
    Case(
        "visible_devices",
        BIG,
        [("job.environment.CUDA_VISIBLE_DEVICES", "0,1,2,3")],
        ERROR,
        "8 ranks on this node, and CUDA shows 4 GPUs",
    ),
    Case(
        "visible_devices",
        VM,
        [("job.environment.LOCAL_RANK", "1")],
        ERROR,
        "2 ranks on this node, and CUDA shows 1 GPU",
    ),
    Case("leftover_shm", BIG, [("job.shm_files", (OLD,))], WARNING, "1 file in /dev/shm of ranks"),
    Case("leftover_shm", BIG, [("job.shm_files", (OLD,) * 40)], WARNING, "40 files in /dev/shm"),
    Case(
        "debug_switches",
        BIG,
        [("job.environment.NCCL_P2P_DISABLE", "1")],
        WARNING,
        "1 debug switch",
    ),
    Case(
        "nccl_conf",
        VM,
        [("job.configurations", (Configuration("/etc/nccl.conf", (("NCCL_DEBUG", "INFO"),)),))],
        WARNING,
        "1 debug switch left on in /etc/nccl.conf",
    ),
    Case(
        "nccl_conf",
        VM,
        [("job.configurations", (Configuration("/etc/nccl.conf", (("NCCL_IB_HCA ", " mlx5"),)),))],
        WARNING,
        "has no effect: NCCL_IB_HCA",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id[:70])
def test_a_changed_fact_is_found(case: Case) -> None:
    found = named(case.check)(with_facts(case.facts, case.changes))
    assert [each.severity for each in found.findings] == [case.severity], found
    (finding,) = found.findings
    assert case.says in finding.what
    assert case.where in finding.where
    assert found.outcome is (Outcome.FAILED if case.severity is ERROR else Outcome.PASSED)


def test_every_check_is_heard_in_one_of_the_cases() -> None:
    assert {case.check for case in CASES} == {check.__name__ for check in CHECKS}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id[:70])
def test_what_is_said_is_whole_and_in_one_line(case: Case) -> None:
    found = named(case.check)(with_facts(case.facts, case.changes))
    for finding in found.findings:
        for name, text in finding.to_dict().items():
            assert text == text.strip(), name
            assert text, name
        assert "\n" not in finding.what
        assert not finding.what.endswith(".")
        assert not re.search(r"\bNone\b", str(finding.to_dict()))
    assert found.measure


NO_PEERMEM = with_facts(BIG, [("network.peermem", False)])
NO_HCAS = with_facts(BIG, [("network.hcas", ())])
PAGES = with_facts(LAPTOP, [("memory.hugepages", 4096)])
MASTER_PORT = "job.environment.MASTER_PORT"

BORDERS: list[tuple[str, Facts, str, object, object]] = [
    ("driver", BIG, "gpus.driver.version", "525.60.13", "524.99"),
    ("driver", CONTAINER, "gpus.driver.version", "580.1", "579.99"),
    ("shm", LAPTOP, "memory.shm_total", 64 * 2**20 + 1, 64 * 2**20),
    ("shm", BIG, "memory.shm_total", GIB, GIB - 1),
    ("shm", BIG, "memory.shm_free", GIB, GIB - 1),
    ("open_files", BIG, "limits.open_files", 4096, 4095),
    ("open_files", LAPTOP, "limits.open_files", 1024, 1023),
    ("processes", VM, "limits.cgroup_pids", 1024, 1023),
    ("processes", BIG, "limits.processes", 8192, 8191),
    ("control_group", BIG, "machine.cpus", 8, 7),
    ("control_group", BIG, "limits.cgroup_cpus", 8.0, 7.9),
    ("control_group", CONTAINER, "limits.cgroup_memory", 2**26 + 1, 2**26),
    ("hugepages", PAGES, "memory.hugepages_free", 2047, 2048),
    ("speed", NO_HCAS, "network.interfaces.1.speed_mbit_per_s", 10_000, 9_999),
    ("speed", BIG, "network.interfaces.1.mtu", 1280, 1279),
    ("roce_mtu", ROCE, "network.interfaces.*.mtu", 4200, 4199),
    ("gpudirect", NO_PEERMEM, "machine.kernel", "5.12.0", "5.11.9"),
    ("gpudirect", NO_PEERMEM, "machine.kernel", "6.1", "4.18.0-553.el8"),
    ("leftover_shm", BIG, "job.shm_files", (replace(OLD, age_s=60.0),), (OLD,)),
    ("ranks", BIG, "job.environment.RANK", "15", "16"),
    ("ranks", BIG, "job.environment.LOCAL_RANK", "7", "8"),
    ("master_port", BIG, MASTER_PORT, "65535", "65536"),
    ("master_port", BIG, MASTER_PORT, "1", "0"),
    ("gids", ROCE, "job.environment.NCCL_IB_GID_INDEX", "1", "2"),
    ("nccl_interface", BIG, "job.environment.NCCL_SOCKET_IFNAME", "en", "e"),
]


@pytest.mark.parametrize(("check", "facts", "path", "right", "wrong"), BORDERS)
def test_the_border_lies_where_it_is_said_to_be(
    check: str, facts: Facts, path: str, right: object, wrong: object
) -> None:
    assert named(check)(with_facts(facts, [(path, right)])).findings == ()
    assert named(check)(with_facts(facts, [(path, wrong)])).findings


@pytest.mark.parametrize(("version", "fits"), [("525.1", True), ("579.1", True), ("524.1", False)])
def test_a_driver_too_old_for_cuda_13_is_told_of_the_variant_that_it_can_run(
    version: str, *, fits: bool
) -> None:
    facts = with_facts(CONTAINER, [("gpus.driver.version", version)])
    (finding,) = named("driver")(facts).findings
    assert ("variant cu12" in finding.remedy) is fits


EVIDENCE = [
    (
        "gloo_interface",
        BIG,
        [("job.environment.GLOO_SOCKET_IFNAME", "eno")],
        "with an address: docker0, eno1, lo",
    ),
    (
        "fabric_manager",
        BIG,
        [("gpus.devices.2.fabric_status", "broken")],
        "NVML: fabric state completed, broken",
    ),
    (
        "fabric_manager",
        BIG,
        [("gpus.devices.2.fabric", FabricState.NOT_STARTED)],
        "NVML: fabric state not started, no status",
    ),
    (
        "gpu_processes",
        BIG,
        [("gpus.devices.1.processes", (GpuProcess(4711, "python", 3 * GIB),))],
        "4711 python 3 GiB",
    ),
    (
        "roce_mtu",
        ROCE,
        [("network.interfaces.2.mtu", 1500), ("network.interfaces.3.mtu", None)],
        ", ".join(
            ["ibp24s0 1500", "ibp64s0 unknown"]
            + [f"{name} 9000" for name in ("ibp79s0", "ibp94s0", "ibp154s0", "ibp192s0")]
            + ["2 more"]
        ),
    ),
    (
        "acs",
        BIG,
        [("bridges.2.acs", 0x1D), ("bridges.4.acs", None)],
        "0000:3c:00.0: 0x001d",
    ),
    (
        "visible_devices",
        VM,
        [("job.environment.LOCAL_RANK", "1")],
        "LOCAL_RANK=1",
    ),
    (
        "held_ports",
        VM,
        [("job.listeners", (Listener(29400), Listener(29500, 7, "python")))],
        "29400: a process that cannot be seen from here, 29500: process 7 (python)",
    ),
]


@pytest.mark.parametrize(("check", "facts", "changes", "evidence"), EVIDENCE)
def test_the_evidence_is_what_was_read(
    check: str, facts: Facts, changes: list[tuple[str, object]], evidence: str
) -> None:
    (finding,) = named(check)(with_facts(facts, changes)).findings
    assert finding.evidence == evidence


REMEDIES = [
    (
        "nccl_hca",
        BIG,
        [("network.hcas.1.ports.0.link_layer", "Ethernet")],
        "export NCCL_IB_HCA=^=mlx5_1",
    ),
    ("nccl_interface", BIG, [("job.environment.NCCL_SOCKET_IFNAME", "^docker")], "IFNAME==eno1 "),
    ("hcas", BIG, [("network.hcas.4.ports.0.rate_gbit_per_s", 200.0)], "NCCL_IB_HCA=^mlx5_4"),
    (
        "leftover_shm",
        BIG,
        [("job.shm_files", (OLD,) * 2)],
        "rm /dev/shm/nccl-AbCdEf /dev/shm/nccl-",
    ),
    ("debug_switches", BIG, [("job.environment.NCCL_DEBUG", "INFO")], "unset NCCL_DEBUG"),
]


@pytest.mark.parametrize(("check", "facts", "changes", "says"), REMEDIES)
def test_the_remedy_names_what_is_here(
    check: str, facts: Facts, changes: list[tuple[str, object]], says: str
) -> None:
    (finding,) = named(check)(with_facts(facts, changes)).findings
    assert says in finding.remedy


@pytest.mark.parametrize(
    ("may_lock", "uid", "told"),
    [(False, 1000, True), (True, 1000, False), (False, 0, False), (None, 1000, False)],
)
def test_a_user_who_is_not_root_is_told_that_the_capability_does_nothing(
    *, may_lock: bool | None, uid: int, told: bool
) -> None:
    changes = [("machine.may_lock", may_lock), ("machine.uid", uid)]
    facts = with_facts(BIG, [*changes, ("locked", Locked(2**26, "Cannot allocate memory"))])
    (finding,) = named("locked_memory")(facts).findings
    assert ("IPC_LOCK does nothing" in finding.cause) is told


@pytest.mark.parametrize("check", ["acs", "iommu"])
def test_one_gpu_and_an_hca_talk_over_pci_and_one_gpu_alone_does_not(check: str) -> None:
    one = with_facts(BIG, [("gpus.devices", BIG.gpus.devices[:1])])
    assert named(check)(one).applies
    assert not named(check)(with_facts(one, [("network.hcas", ())])).applies
    assert named(check)(with_facts(BIG, [("network.hcas", ())])).applies


# ---- what looks alike, and is no fault ----------------------------------------------------------


SILENT = [
    # cannot lock memory, and has no HCA that would need it
    ("locked_memory", LAPTOP, []),
    # what the other ranks of a machine leave to it
    ("shm", VM, [("memory.shm_total", 256 * 2**20), ("memory.shm_free", 256 * 2**20)]),
    # the container has a part of the host's GPUs
    ("gpus", CONTAINER, []),
    # a file of a rank that runs, of one whose processes are out of sight, and of one that begins
    ("leftover_shm", BIG, [("job.shm_files", (replace(OLD, held=True),))]),
    ("leftover_shm", BIG, [("job.shm_files", (replace(OLD, held=None),))]),
    ("leftover_shm", BIG, [("job.shm_files", (replace(OLD, age_s=2.0),))]),
    # a program's error, not the hardware's
    ("xid", BIG, [("gpus.xids", ("NVRM: Xid (PCI:0000:1b:00): 31, pid=1, name=python",))]),
    ("xid", BIG, [("gpus.xids", ("NVRM: Xid of another form",))]),
    # SrcValid and others leave P2P alone
    ("acs", BIG, [("bridges.*.acs", 0x01)]),
    ("acs", LAPTOP, [("bridges", (Bridge("0000:00:01.0", 0x1D),))]),
    # two cards by a bridge, and a third one without
    (
        "topology",
        BIG,
        [("gpus.switches", 0), ("gpus.devices.*.links_up", 12), ("gpus.devices.7.links_up", 0)],
    ),
    # containers' interfaces are told of once
    (
        "speed",
        BIG,
        [
            ("network.addresses", (*ADDRESSES, *virtual("veth0a1b2c3"))),
            (
                "network.interfaces",
                (*INTERFACES, Interface("veth0a1b2c3", True, True, 1500, 1, False)),
            ),
        ],
    ),
    # one node does not wait for its interfaces
    ("speed", ALONE, [("network.interfaces.1.speed_mbit_per_s", 1000), ("network.hcas", ())]),
    # the port that this job asks for has a check of its own
    (
        "held_ports",
        BIG,
        [("job.listeners", (Listener(29500),))],
    ),
    ("held_ports", VM, [("job.listeners", (Listener(4711),))]),
    # with one node the loopback does, and the hostname may lead there
    ("nccl_interface", ALONE, [("job.environment.NCCL_SOCKET_IFNAME", "lo")]),
    ("gloo_interface", ALONE, [("network.hostname_addresses", ("127.0.1.1",))]),
    # the list of another node's names too
    ("nccl_interface", BIG, [("job.environment.NCCL_SOCKET_IFNAME", "eno1,enp6s0")]),
    ("nccl_interface", BIG, [("job.environment.NCCL_SOCKET_IFNAME", "=eno1")]),
    # asked for by name, a bridge is meant
    (
        "nccl_interface",
        BIG,
        [
            ("network.addresses", (*ADDRESSES, *virtual("br-data"))),
            ("job.environment.NCCL_SOCKET_IFNAME", "br-data"),
        ],
    ),
    # a laptop with wire and wireless in one net
    (
        "subnets",
        LAPTOP,
        [
            (
                "network.addresses",
                (*LAPTOP.network.addresses, Address("e", "192.168.1.9", 24, True)),
            ),
            ("network.interfaces", (*LAPTOP.network.interfaces, replace(INTERFACES[1], name="e"))),
        ],
    ),
    # a bridge of containers is not told of here
    (
        "subnets",
        BIG,
        [("network.addresses", (*ADDRESSES, Address("br-0a1b", "10.0.0.5", 24, True)))],
    ),
    # one node needs no other
    ("interfaces", ALONE, [("network.addresses", ADDRESSES[:1])]),
    # a point-to-point address is no subnet
    (
        "subnets",
        BIG,
        [("network.addresses", (*ADDRESSES, Address("eno1", "10.0.0.1", 32, True)))],
    ),
    # unused ports of an HCA are no fault
    ("hcas", BIG, [("network.hcas.2.ports.0.state", "DOWN")]),
    ("nccl_hca", BIG, [("job.environment.NCCL_IB_HCA", "=mlx5_0:1,mlx5_3")]),
    (
        "nccl_hca",
        BIG,
        [("job.environment.NCCL_IB_DISABLE", "1"), ("job.environment.NCCL_IB_HCA", "zz")],
    ),
    ("gids", ROCE, [("job.environment.NCCL_IB_GID_INDEX", "3")]),
    ("gids", ROCE, [("job.environment.NCCL_IB_GID_INDEX", "-1")]),
    ("gpudirect", BIG, [("network.peermem", False)]),
    # the port of the job that runs, by its agent; and of another node
    (
        "master_port",
        BIG,
        [("job.environment.GROUP_RANK", "0"), ("job.listeners", (Listener(29500),))],
    ),
    (
        "master_port",
        BIG,
        [("job.master", Master(("10.0.0.9",), "")), ("job.listeners", (Listener(29500),))],
    ),
    # one GPU a rank, as device plugins and srun share them out
    (
        "visible_devices",
        BIG,
        [("job.environment", {"CUDA_VISIBLE_DEVICES": "3", "LOCAL_RANK": "3"})],
    ),
    (
        "visible_devices",
        BIG,
        [("job.environment.CUDA_VISIBLE_DEVICES", "3"), ("job.environment.LOCAL_RANK", "3")],
    ),
    ("visible_devices", BIG, [("job.environment.CUDA_VISIBLE_DEVICES", "0, 1,2,3,4,5,6,7")]),
    ("debug_switches", BIG, [("job.environment.NCCL_IB_DISABLE", "0")]),
    ("debug_switches", BIG, [("job.environment.NCCL_IB_HCA", "mlx5")]),
    (
        "nccl_conf",
        BIG,
        [("job.configurations", (Configuration("/etc/nccl.conf", (("NCCL_IB_HCA", "mlx5"),)),))],
    ),
    ("nccl_conf", BIG, [("job.configurations", (Configuration("/etc/nccl.conf", None),))]),
]


@pytest.mark.parametrize(("check", "facts", "changes"), SILENT)
def test_a_look_alike_is_left_alone(
    check: str, facts: Facts, changes: list[tuple[str, object]]
) -> None:
    assert named(check)(with_facts(facts, changes)).findings == ()


# ---- what is not known --------------------------------------------------------------------------

UNKNOWN = [
    ("gpus", BIG, [("gpus.devices", ())]),
    ("gpu_processes", BIG, [("gpus.devices", ())]),
    ("mig", BIG, [("gpus.devices", ())]),
    ("persistence", BIG, [("gpus.devices.*.persistence", None)]),
    ("driver", BIG, [("gpus.driver.version", None)]),
    ("xid", CONTAINER, []),
    ("acs", CONTAINER, []),
    ("clock", BIG, [("clock", None)]),
    ("locked_memory", BIG, [("locked", None)]),
    ("hugepages", BIG, [("memory.total", 0)]),
    ("interfaces", BIG, [("unread", {"addresses": "getifaddrs: x"})]),
    ("nccl_interface", BIG, [("unread", {"addresses": "getifaddrs: x"})]),
    ("held_ports", BIG, [("unread", {"listeners": "x"})]),
    ("leftover_shm", BIG, [("unread", {"shm files": "x"})]),
]


@pytest.mark.parametrize(("check", "facts", "changes"), UNKNOWN)
def test_what_is_not_known_is_said_and_no_fault(
    check: str, facts: Facts, changes: list[tuple[str, object]]
) -> None:
    found = named(check)(with_facts(facts, changes))
    assert found.outcome is Outcome.NOT_APPLICABLE
    assert found.findings == ()
    assert found.measure


def test_a_check_that_breaks_off_says_so_and_stops_no_other() -> None:
    def breaks(_facts: Facts) -> Any:  # noqa: ANN401
        raise ZeroDivisionError("of a clock")

    first, second = examine(BIG, (breaks, named("shm")))
    assert first.outcome is Outcome.PASSED
    assert [each.what for each in first.findings] == ["the check breaks itself broke off"]
    assert first.findings[0].evidence == "ZeroDivisionError: of a clock"
    assert second == Examination("shm", Outcome.PASSED, second.measure, ())


# ---- recorded form and odd values ---------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(NODES.glob("*.json")), ids=lambda path: path.stem)
def test_a_recorded_node_says_that_it_is_made_and_survives_being_written(path: Path) -> None:
    recorded = json.loads(path.read_text())
    assert recorded["made"].startswith("by hand")
    facts = Facts.from_dict(recorded["facts"])
    assert json.loads(json.dumps(facts.to_dict())) == recorded["facts"]
    assert Facts.from_dict(facts.to_dict()) == facts


def test_facts_of_another_release_are_read_as_far_as_they_are_known() -> None:
    recorded = {**BIG.to_dict(), "weather": "fine"}
    del recorded["clock"]
    assert Facts.from_dict(recorded) == replace(BIG, clock=None)


@pytest.mark.parametrize("recorded", [{"machine": 3}, {"network": {"hcas": [None]}}])
def test_what_is_no_record_is_refused(recorded: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="is recorded as an object"):
        Facts.from_dict(recorded)


VALUES = st.text(max_size=30) | st.sampled_from(
    ["9" * 400, "-1", "^", "=", "٣", "0x10", ",,,:", "1:"]
)
VARIABLES = st.sampled_from(
    [
        *("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_SOCKET_FAMILY"),
        *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        *("PET_NNODES", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE"),
    ]
)


@given(st.dictionaries(VARIABLES, VALUES), st.sampled_from([BIG, ROCE, LAPTOP, VM, CONTAINER]))
def test_no_value_in_the_environment_breaks_a_check(
    environment: dict[str, str], facts: Facts
) -> None:
    odd = replace(facts, job=replace(facts.job, environment=environment))
    for each in examine(odd):
        assert "broke off" not in str(each.findings), each


@given(st.text(st.sampled_from("7): ,x٣"), max_size=12))
def test_any_line_of_the_kernels_log_has_a_number_or_none(line: str) -> None:
    number = checks_gpus.number_of(f"NVRM: Xid (PCI:0000:1b:00): {line}")
    assert number is None or number >= 0


@given(st.text(), st.integers(0, 9))
def test_what_cuda_shows_is_never_more_than_there_is(value: str, count: int) -> None:
    shown, wrong = checks_job.visible(value, count)
    assert len(set(shown)) == len(shown) <= max(count, value.count("-"))
    assert wrong is not None or shown


@given(st.lists(st.text("ab", min_size=1), max_size=20), st.integers(1, 8))
def test_a_list_that_is_cut_tells_how_many_there_are_more(words: list[str], most: int) -> None:
    said = listed(words, most)
    more = re.search(r"(\d+) more$", said)
    assert (int(more[1]) if more else 0) == max(0, len(words) - most)


def test_a_finding_survives_the_report(tmp_path: Path) -> None:
    facts = changed(BIG, "memory.shm_free", 2**20)
    document = Result(facts, examine(facts), 0.25).to_dict()
    (tmp_path / "out.json").write_text(json.dumps(document))
    read = json.loads((tmp_path / "out.json").read_text())
    assert (read["schema"], read["command"], read["verdict"]) == (1, "doctor", "READY")
    assert Facts.from_dict(read["facts"]) == facts
    assert [Finding.from_dict(each).where for each in read["findings"]] == ["/dev/shm"]
    assert len(read["checks"]) == len(CHECKS)
