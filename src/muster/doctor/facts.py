"""What is known of a node: plain values, read by look.py, judged by the checks, kept as JSON.

None says that a value was not to be had; `unread` says why, by the name of what was read. Sizes are
in bytes, names of PCI devices are spelled as in /sys/bus/pci/devices (0000:1b:00.0).
"""

from dataclasses import dataclass, field
from enum import StrEnum

from muster.doctor.record import Recorded

# ---- the machine ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """`container` is what says that this is one, None on a host."""

    hostname: str = ""
    kernel: str = ""
    container: str | None = None
    uid: int = 0
    may_lock: bool | None = None  # CAP_IPC_LOCK is effective
    cpus: int = 1  # that this process may use
    numa_nodes: int = 1
    numa_balancing: bool | None = None


@dataclass(frozen=True)
class Memory:
    total: int = 0
    shm_total: int | None = None
    shm_free: int | None = None
    shm_writable: bool | None = None
    hugepages: int = 0
    hugepages_free: int = 0
    hugepage_size: int = 0


@dataclass(frozen=True)
class Locked:
    """What came of mlock: `why` is empty when `size` bytes were locked."""

    size: int
    why: str


@dataclass(frozen=True)
class Limits:
    """Soft limits of this process; None is unlimited."""

    locked_memory: int | None = None
    open_files: int | None = None
    open_files_hard: int | None = None
    processes: int | None = None
    cgroup_memory: int | None = None
    cgroup_pids: int | None = None
    cgroup_cpus: float | None = None


@dataclass(frozen=True)
class Clock:
    """As adjtimex has it: whether something keeps it right, and the error it admits."""

    synchronised: bool
    error_s: float


# ---- GPUs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Driver:
    """`error` is NVML's own word when it does not answer though the kernel module is loaded."""

    version: str | None = None
    cuda: str | None = None
    open_module: bool | None = None
    error: str | None = None


@dataclass(frozen=True)
class GpuProcess:
    pid: int
    name: str
    memory: int | None


class FabricState(StrEnum):
    """Where the fabric manager stands with a GPU: NVML_GPU_FABRIC_STATE_* of nvml.h."""

    NOT_SUPPORTED = "not supported"
    NOT_STARTED = "not started"
    IN_PROGRESS = "in progress"
    COMPLETED = "completed"


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    bus_id: str
    uuid: str | None = None
    numa_node: int | None = None
    iommu: str | None = None  # the type of its group: identity, DMA, DMA-FQ
    memory: int | None = None
    persistence: bool | None = None
    mig: bool | None = None
    mig_devices: tuple[str, ...] = ()
    ecc: bool | None = None
    uncorrected: int | None = None  # ECC errors since the driver was loaded
    repair_pending: bool | None = None  # rows or pages that a reset would replace
    repair_failed: bool | None = None
    links_up: int | None = None  # of NVLink
    fabric: FabricState | None = None
    fabric_status: str | None = None
    slowed_by: tuple[str, ...] = ()
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True)
class Peers:
    """Two GPUs by index: what lies between them, and whether one may read the other's memory."""

    first: int
    second: int
    path: str  # as nvidia-smi topo -m spells it: NVLINK, PIX, PXB, PHB, NODE, SYS
    p2p: str  # OK, or why not


@dataclass(frozen=True)
class Bridge:
    """A PCI bridge over a GPU or an HCA; `acs` is the control register, None where unreadable."""

    bus_id: str
    acs: int | None


@dataclass(frozen=True)
class Gpus:
    """`on_pci` counts NVIDIA's GPUs on the bus, `device_files` /dev/nvidia0 and so on."""

    driver: Driver = Driver()
    devices: tuple[Gpu, ...] = ()
    peers: tuple[Peers, ...] = ()
    on_pci: int = 0
    device_files: int = 0
    switches: int = 0  # NVSwitches
    fabric_manager: bool | None = None  # runs, as far as processes can be seen
    xids: tuple[str, ...] = ()  # lines of the kernel's log
    image_cuda: int | None = None  # the CUDA major version of the torch in Muster's image


@dataclass(frozen=True)
class Toolkit:
    """What lets containers have GPUs: Docker, NVIDIA's runtime in its configuration, CDI specs."""

    docker: bool = False
    runtime: bool = False
    hook: bool = False  # the program that Docker's --gpus needs
    cdi: tuple[str, ...] = ()


# ---- the network ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Address:
    """One address of an interface, in getifaddrs' own order, which is NCCL's."""

    ifname: str
    address: str
    prefix: int
    running: bool


@dataclass(frozen=True)
class Interface:
    name: str
    up: bool
    carrier: bool | None
    mtu: int | None
    speed_mbit_per_s: int | None  # 10^6 bits a second, as /sys says it
    physical: bool
    numa_node: int | None = None


@dataclass(frozen=True)
class Gid:
    index: int
    gid: str
    type: str  # "IB/RoCE v1" or "RoCE v2"


@dataclass(frozen=True)
class Port:
    number: int
    state: str  # ACTIVE, INIT, DOWN, ARMED
    physical_state: str  # LinkUp, Polling, Disabled
    link_layer: str  # InfiniBand or Ethernet
    rate_gbit_per_s: float | None  # 10^9 bits a second
    ifname: str | None = None
    gids: tuple[Gid, ...] = ()


@dataclass(frozen=True)
class Hca:
    """A device of /sys/class/infiniband; `device_file` is its uverbs file, where that exists."""

    name: str
    driver: str = ""
    numa_node: int | None = None
    bus_id: str | None = None
    uverbs: str | None = None
    device_file: bool = False
    accessible: bool | None = None
    ports: tuple[Port, ...] = ()


@dataclass(frozen=True)
class Network:
    addresses: tuple[Address, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    hcas: tuple[Hca, ...] = ()
    hostname_addresses: tuple[str, ...] = ()
    peermem: bool = False  # nvidia_peermem or nv_peer_mem is loaded


# ---- the job -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Configuration:
    """A file of NCCL's that exists: its assignments in order, None where it cannot be read."""

    path: str
    settings: tuple[tuple[str, str], ...] | None


@dataclass(frozen=True)
class Master:
    """What MASTER_ADDR is to the resolver; `why` is empty when it resolved."""

    addresses: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Listener:
    """A TCP port on which something listens; who does, where that can be seen."""

    port: int
    pid: int | None = None
    name: str | None = None


@dataclass(frozen=True)
class ShmFile:
    """A file in /dev/shm that a rank made; `held` is whether any process has it open or mapped."""

    name: str
    size: int
    age_s: float
    held: bool | None


@dataclass(frozen=True)
class Job:
    """What the environment says of a job, and what others have left here."""

    environment: dict[str, str] = field(default_factory=dict)
    configurations: tuple[Configuration, ...] = ()
    master: Master | None = None
    listeners: tuple[Listener, ...] = ()
    shm_files: tuple[ShmFile, ...] = ()

    def variable(self, name: str) -> str | None:
        """Its value for NCCL, which reads its files after the environment and lets that stand."""
        if name in self.environment:
            return self.environment[name]
        for each in self.configurations:
            for key, value in each.settings or ():
                if key == name:
                    return value
        return None

    def number(self, *names: str) -> int | None:
        """The first of these variables that is set to a whole number."""
        values = (self.environment.get(name, "") for name in names)
        # 20 digits fit no 64 bits, and are no count of anything here
        numbers = (value for value in values if value.isascii() and value.isdigit())
        return next((int(value) for value in numbers if len(value) < 19), None)

    @property
    def nnodes(self) -> int:
        """As many as the job's variables say; 1 when they are silent."""
        world, local = self.number("WORLD_SIZE"), self.number("LOCAL_WORLD_SIZE")
        if world and local:
            return max(1, world // local)
        return self.number("PET_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1


# ---- all of it -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts(Recorded):
    machine: Machine = Machine()
    memory: Memory = Memory()
    locked: Locked | None = None
    limits: Limits = Limits()
    clock: Clock | None = None
    gpus: Gpus = Gpus()
    bridges: tuple[Bridge, ...] = ()
    toolkit: Toolkit = Toolkit()
    network: Network = Network()
    job: Job = Job()
    unread: dict[str, str] = field(default_factory=dict)

    def why(self, name: str) -> str:
        """Why a value is not known."""
        return self.unread.get(name, "not said here")
