"""The layers of NCCL that a switch turns off, and what it proves that a command passes without one.

What the switches do, and since when: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layer:
    """`proves` and `leaves_open` speak of a command that fails with the layer and passes without.

    `decide` are commands that tell between what is left open. `since` is the NCCL version that
    knows the switch, "" where every version does. `around` names layers that a switch turns off
    as well or goes around: they help whenever this one does, and say less. `may_stay`: what was
    changed is configuration, not a switch for finding faults.
    """

    name: str
    proves: str
    leaves_open: str
    decide: str
    since: str = ""
    around: tuple[str, ...] = ()
    may_stay: bool = False


@dataclass(frozen=True)
class Switch:
    """`variable` with `value` turns `layer` off."""

    variable: str
    value: str
    layer: Layer


P2P = Layer(
    name="direct access between the GPUs of a node (P2P, over NVLink or PCIe)",
    proves="the same GPUs, ranks and network work when the data goes through host memory",
    leaves_open="why: ACS or an IOMMU that redirects it, a virtual machine that passes GPUs"
    " through, NVLink hardware and the driver all look like this, and none of them is shown",
    decide="./invokew doctor; lspci -vvv | grep ACSCtl; nvidia-smi topo -p2p r; nvidia-smi nvlink"
    " -s; dmesg | grep -i -e xid -e iommu",
)
IB = Layer(
    name="InfiniBand or RoCE (verbs)",
    proves="between the same ranks sockets work: names, routes and the firewall are in order, and"
    " so are the GPUs",
    leaves_open="which of lockable memory, GID, partition key, choice of HCAs, GPUDirect, ACS,"
    " cable and switch it is",
    decide="ulimit -l; ibv_devinfo -v; ./invokew doctor; COMMAND once with NCCL_NET_GDR_LEVEL=LOC"
    " tells GPUDirect from the rest",
)
SHM = Layer(
    name="shared memory between the processes of a node",
    proves="the same ranks work when they talk through the network instead",
    leaves_open="whether /dev/shm is too small, not shared between the ranks' containers, or swept"
    " while the job runs (RemoveIPC)",
    decide="df -h /dev/shm, where the ranks run; docker run --shm-size or --ipc; an emptyDir with"
    " medium: Memory on Kubernetes",
)
NVLS = Layer(
    name="NVLink SHARP (NVLS, multicast in the NVSwitches)",
    proves="the same GPUs work over NVLink without multicast",
    leaves_open="whether it is the fabric manager's state, an NVSwitch, or a partition of a"
    " virtual machine",
    decide="systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A3 Fabric; dmesg | grep"
    " -i sxid",
    since="2.17",
    around=(P2P.name,),
)
CUMEM = Layer(
    name="GPU memory from cuMem*, and how its handles are passed on",
    proves="the same transports work on memory from cudaMalloc",
    leaves_open="whether the container or the virtual machine keeps handles from being passed on,"
    " peer mappings are used up (more than 8 GPUs), or it is a fault of driver or NCCL",
    decide="nvidia-smi -q | grep -A3 BAR1; COMMAND with another version of NCCL",
    since="2.18",
    around=(P2P.name,),
)
CUMEM_HOST = Layer(
    name="host memory from cuMem*",
    proves="host memory from /dev/shm works in its place",
    leaves_open="whether the container forbids the NUMA calls, the kernel has no NUMA, or it is a"
    " fault of driver or NCCL",
    decide="docker run --cap-add SYS_NICE; numactl -H, in the container; NCCL 2.26.5 or newer goes"
    " back to /dev/shm by itself",
    since="2.23",
    around=(SHM.name,),
)
PLUGIN = Layer(
    name="the external network plugin",
    proves="NCCL's own network works between the same ranks",
    leaves_open="whether the plugin is of another version than NCCL wants, lacks a library, or is"
    " configured wrongly",
    decide="ldconfig -p | grep -e nccl-net -e fabric; the plugin's own log",
    since="2.11",
    around=(IB.name,),
)
INTERFACE = Layer(
    name="the choice of the network interface",
    proves="over this interface the ranks reach each other",
    leaves_open="why not over the one that NCCL takes by itself: a firewall, a bridge of"
    " containers, a VPN, or a network that other nodes are not in; and whether the name is the same"
    " on every node",
    decide="the line Bootstrap: Using of each rank; ./invokew doctor; ip -br address",
    may_stay=True,
)

# the first are those that real reports end with most often
SWITCHES = (
    Switch("NCCL_P2P_DISABLE", "1", P2P),
    Switch("NCCL_SHM_DISABLE", "1", SHM),
    Switch("NCCL_IB_DISABLE", "1", IB),
    Switch("NCCL_CUMEM_HOST_ENABLE", "0", CUMEM_HOST),
    Switch("NCCL_CUMEM_ENABLE", "0", CUMEM),
    Switch("NCCL_NVLS_ENABLE", "0", NVLS),
    Switch("NCCL_NET_PLUGIN", "none", PLUGIN),
)


def own_setting(variable: str) -> Layer:
    """What the caller's own environment sets, where COMMAND passes without it."""
    return Layer(
        name=f"your own setting of {variable}",
        proves="NCCL does better by its own choice",
        leaves_open=f"what {variable} was set for: that fault, if it is still there, will be next",
        decide=f"grep -r {variable} in job scripts, images, /etc/nccl.conf and ~/.nccl.conf",
        around=(OWN_SETTINGS.name,),
        may_stay=True,
    )


OWN_SETTINGS = Layer(
    name="your own NCCL settings, all taken together",
    proves="NCCL does better by its own choice than with what your environment sets",
    leaves_open="which of them it is, where no single one shows it below",
    decide="env | grep -o '^NCCL_[A-Z0-9_]*', and leave out one half, then the other",
    may_stay=True,
)
