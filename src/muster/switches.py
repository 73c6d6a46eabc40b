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
