"""A stand-in for NVIDIA's pynvml that knows the GPUs which $STANDIN has, and what lies between."""

import json
import os
from collections.abc import Callable
from pathlib import Path

MACHINE = json.loads(Path(os.environ["STANDIN"]).read_text())

NVML_NVLINK_MAX_LINKS = 18
NVML_P2P_CAPS_INDEX_NVLINK = 2
_LEVELS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}


class NVMLError(Exception):
    pass


def __getattr__(name: str) -> Callable[..., object]:
    """Every other call is one that this driver does not support."""
    if not name.startswith("nvml"):
        raise AttributeError(name)

    def refuse(*_arguments: object) -> object:
        raise NVMLError(f"{name}: Not Supported")

    return refuse


def nvmlInit() -> None:  # noqa: N802
    if not MACHINE["gpus"]:
        raise NVMLError("Driver Not Loaded")


def nvmlShutdown() -> None:  # noqa: N802
    pass


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return len(MACHINE["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:  # noqa: N802
    return index


def nvmlDeviceGetName(handle: int) -> str:  # noqa: N802
    return str(MACHINE["gpus"][handle]["name"])


def nvmlDeviceGetUUID(handle: int) -> str:  # noqa: N802
    return str(MACHINE["gpus"][handle]["uuid"])


def nvmlDeviceGetP2PStatus(one: int, other: int, index: int) -> int:  # noqa: N802
    if index == NVML_P2P_CAPS_INDEX_NVLINK:
        return 0 if MACHINE["path"] == "NVLINK" or [one, other] in MACHINE["bridged"] else 5
    return int(MACHINE["p2p_status"])


def nvmlDeviceGetTopologyCommonAncestor(_one: int, _other: int) -> int:  # noqa: N802
    return _LEVELS.get(MACHINE["path"], 50)
