"""Switches that help to find a fault, and are a fault themselves when they are left on.

Each costs speed, or turns a transport off.
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

DEBUG_SWITCHES = (
    "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_IB_DISABLE",
    "NCCL_NET",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_SHM_DISABLE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_LAUNCH_ORDER_IMPLICIT",
    "CUDA_LAUNCH_BLOCKING",
    "TORCH_DISTRIBUTED_DEBUG",
)

# what a log must have for explain to name networks and links: the default leaves out NET and GRAPH
SUBSYSTEMS = "INIT,BOOTSTRAP,ENV,NET,GRAPH"

# on by default where the hardware can; with 0 they are switches of the same kind
OFF_WITH_0 = (
    "NCCL_CUMEM_ENABLE",
    "NCCL_CUMEM_HOST_ENABLE",
    "NCCL_DMABUF_ENABLE",
    "NCCL_MNNVL_ENABLE",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NVLS_ENABLE",
)


def left_on(variable: str, value: str) -> bool:
    """Whether `variable` with `value` is a switch for finding faults that is on."""
    if variable in OFF_WITH_0:
        return value.upper() in {"0", "LOC"}
    if variable == "NCCL_NET_PLUGIN":
        return value == "none"
    return variable in DEBUG_SWITCHES and not (variable.endswith("_DISABLE") and value == "0")
