"""NCCL's and torch's variables: switches for debugging left on, names that nobody reads."""

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from muster.finding import Finding, error, warning
from muster.manifests.rules import ON, Manifest, Rule, at_variable, joins_many

# a variable, the values of it that are for debugging only, and what they cost
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
_SWITCHES: Final = (
    ("NCCL_DEBUG", frozenset({"trace"}), "it writes a line a call, to every rank's log"),
    ("NCCL_P2P_DISABLE", ON, "GPUs of a node no longer reach each other by NVLink or PCIe"),
    ("NCCL_SHM_DISABLE", ON, "ranks of a node talk over the network"),
    ("NCCL_NVLS_ENABLE", frozenset({"0"}), "all_reduce no longer adds up in the NVLink switches"),
    ("NCCL_CHECK_POINTERS", ON, "every call checks its pointers"),
    ("CUDA_LAUNCH_BLOCKING", ON, "every kernel waits for the one before: nothing overlaps"),
    ("TORCH_DISTRIBUTED_DEBUG", frozenset({"detail"}), "all ranks compare each collective first"),
    ("TORCH_NCCL_BLOCKING_WAIT", ON, "every collective is waited for on the CPU"),
    ("TORCH_NCCL_DESYNC_DEBUG", ON, "every collective is written to the store"),
    ("TORCH_NCCL_NAN_CHECK", ON, "every buffer is read once more before it is sent"),
)
_INTERFACES: Final = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_PREFIXES: Final = ("NCCL_", "TORCH_NCCL_", "GLOO_", "TORCH_GLOO_", "TORCH_FR_")
# so near that it is the same word with a letter more, less or wrong
_CUTOFF: Final = 0.85


def debug_switch(manifest: Manifest) -> Iterator[Finding]:
    for group, _ in manifest.trainers:
        for name, values, cost in _SWITCHES:
            value = group.environment.get(name, "")
            if value.lower() in values:
                yield warning(
                    at_variable(group, name),
                    f"{name}={value} is for debugging and was left on",
                    evidence=f"{name}={value}",
                    cause=cost,
                    remedy=f"take {name} out",
                )


def interface(manifest: Manifest) -> Iterator[Finding]:
    for group, invocation in manifest.trainers:
        for name in _INTERFACES:
            value = group.environment.get(name, "")
            first = value.removeprefix("=").split(",")[0]
            if first in {"lo", "localhost"} and joins_many(group, invocation):
                yield error(
                    at_variable(group, name),
                    f"{name}={value} leads to no other node",
                    evidence=f"{name}={value}, nnodes {invocation.nnodes}",
                    cause="lo is the pod's own loopback",
                    remedy=f"write {name}=eth0, or leave it out",
                )


def misspelled(manifest: Manifest) -> Iterator[Finding]:
    known = _known()
    for group, _ in manifest.trainers:
        for name in group.environment:
            if not name.startswith(_PREFIXES) or name in known:
                continue
            close = difflib.get_close_matches(name, known, n=1, cutoff=_CUTOFF)
            if close:
                yield warning(
                    at_variable(group, name),
                    f"nobody reads the variable {name}",
                    evidence=f"{name}={group.environment[name]}",
                    cause="NCCL and torch pass over names that they do not know, and say nothing",
                    remedy=f"write {close[0]}",
                )


def _known() -> list[str]:
    lines = Path(__file__).with_name("variables.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


RULES: Final = (
    Rule("debug-switch", debug_switch, fault="debug-switch"),
    Rule("interface", interface, fault="different-interfaces"),
    Rule("misspelled", misspelled),
)
