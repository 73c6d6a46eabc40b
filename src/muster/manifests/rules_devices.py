"""The network devices of a pod: how many, what they need, and whether NCCL is kept from them."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from muster.finding import Finding, error, warning
from muster.manifests.documents import mapping, strings
from muster.manifests.rules import (
    GPU,
    ON,
    Manifest,
    Rule,
    amount,
    at_container,
    at_variable,
    limits,
    requests,
)

EFA: Final = "vpc.amazonaws.com/efa"
# devices whose user space registers memory with the card
_RDMA_PREFIXES: Final = (
    "rdma/",
    EFA,
    "nvidia.com/hostdev",
    "nvidia.com/mlnxnics",
    "nvidia.com/sriov",
    "nvidia.com/rdma",
)
# CoreWeave's, a switch without a number, whose nodes have no limit on locked memory
_UNLIMITED: Final = {"rdma/ib": 1}
# GPUs and EFA interfaces of AWS's instances: torchx/specs/named_resources_aws.py and
# https://github.com/awslabs/awsome-distributed-ai 1.architectures/efa-cheatsheet.md
_INSTANCES: Final = {
    "p4d.24xlarge": (8, 4),
    "p4de.24xlarge": (8, 4),
    "p5.48xlarge": (8, 32),
    "p5e.48xlarge": (8, 32),
    "p5en.48xlarge": (8, 16),
    "p6-b200.48xlarge": (8, 8),
    "p6-b300.48xlarge": (8, 16),
}
_INSTANCE_LABEL: Final = "node.kubernetes.io/instance-type"


def rdma_devices(container: Mapping[str, Any]) -> dict[str, int]:
    """The network devices of a container that go around the kernel, and how many."""
    found = {**requests(container), **limits(container)}
    return {
        name: int(amount(count) or 0)
        for name, count in found.items()
        if name.startswith(_RDMA_PREFIXES) and amount(count)
    }


def ipc_lock(manifest: Manifest) -> Iterator[Finding]:
    for group, _ in manifest.trainers:
        devices = rdma_devices(group.trainer)
        context = mapping(group.trainer.get("securityContext"))
        wanted = manifest.fabric is None or _adds_ipc_lock(manifest.fabric.container)
        if not devices or not wanted or devices == _UNLIMITED:
            continue
        if not context.get("privileged") and not _adds_ipc_lock(group.trainer):
            names = ", ".join(f"{name}: {count}" for name, count in devices.items())
            yield warning(
                at_container(group, "securityContext"),
                "the container may not lock memory for its network card",
                evidence=f"{names}, no IPC_LOCK",
                cause="registering memory fails where a machine limits locked memory, often to"
                " 8 MiB: NCCL then falls back to TCP, or ends",
                remedy="add capabilities: {add: [IPC_LOCK]} to the container's securityContext",
            )


def _adds_ipc_lock(container: Mapping[str, Any]) -> bool:
    capabilities = mapping(mapping(container.get("securityContext")).get("capabilities"))
    return "IPC_LOCK" in strings(capabilities.get("add"))


def ipc_lock_user(manifest: Manifest) -> Iterator[Finding]:
    for group, _ in manifest.trainers:
        pod = mapping(group.template.get("securityContext"))
        context = {**pod, **mapping(group.trainer.get("securityContext"))}
        user = context.get("runAsUser")
        is_other = user not in {None, 0} or (user is None and context.get("runAsNonRoot") is True)
        if _adds_ipc_lock(group.trainer) and is_other:
            yield warning(
                at_container(group, "securityContext", "capabilities", "add"),
                "IPC_LOCK does nothing for a user other than root",
                evidence=f"runAsUser {user if user is not None else 'not set'}, runAsNonRoot"
                f" {str(context.get('runAsNonRoot', False)).lower()}",
                cause="an added capability is lost when the container's process is not root"
                " (nvidia-container-toolkit#2037)",
                remedy="run as root, or set LimitMEMLOCK=infinity for the machines' containerd",
            )


def fabric_resources(manifest: Manifest) -> Iterator[Finding]:
    """What the fabric asks for against what the container does."""
    if manifest.fabric is None:
        return
    wanted = limits(manifest.fabric.container)
    for group, _ in manifest.whole_trainers:
        found = limits(group.trainer)
        for name, count in wanted.items():
            if amount(found.get(name)) != amount(count):
                yield error(
                    at_container(group, "resources", "limits", name),
                    f"the fabric {manifest.fabric.name} needs {name}: {count}",
                    evidence=f"{name}: {found.get(name, 'none')}",
                    cause="without all its network devices a node has less bandwidth, or none but"
                    " TCP",
                    remedy=f"write {name}: {count} under resources.limits",
                )


def instance_resources(manifest: Manifest) -> Iterator[Finding]:
    """More or less devices than the instance that is asked for has."""
    for group, _ in manifest.trainers:
        instance = mapping(group.template.get("nodeSelector")).get(_INSTANCE_LABEL)
        if instance not in _INSTANCES:
            continue
        for name, there in zip((GPU, EFA), _INSTANCES[instance], strict=True):
            asked = int(amount(limits(group.trainer).get(name, 0)) or 0)
            where = at_container(group, "resources", "limits", name)
            evidence = f"{name}: {asked}; {instance} has {there}"
            if asked > there:
                yield error(
                    where,
                    f"{asked} {name}, and a {instance} has {there}",
                    evidence=evidence,
                    cause="no node can take the pod: it stays Pending",
                    remedy=f"write {name}: {there}",
                )
            elif 0 < asked < there and name == EFA:
                yield warning(
                    where,
                    f"{asked} of the {there} network devices of a {instance}",
                    evidence=evidence,
                    cause="the others are left unused, and the bandwidth with them",
                    remedy=f"write {name}: {there}",
                )


def fabric_disabled(manifest: Manifest) -> Iterator[Finding]:
    """Network cards that are asked for and not to be used."""
    for group, _ in manifest.trainers:
        devices = rdma_devices(group.trainer)
        for name, value in (
            ("NCCL_IB_DISABLE", group.environment.get("NCCL_IB_DISABLE", "")),
            ("NCCL_NET", group.environment.get("NCCL_NET", "")),
        ):
            # EFA is reached by a plugin, which NCCL_IB_DISABLE does not turn off
            is_off = value.lower() in (ON if name == "NCCL_IB_DISABLE" else {"socket"})
            is_verbs = name == "NCCL_NET" or any("efa" not in device for device in devices)
            if devices and is_off and is_verbs:
                yield warning(
                    at_variable(group, name),
                    f"{name}={value}: NCCL uses TCP, and the pod asks for {next(iter(devices))}",
                    evidence=", ".join(f"{device}: {count}" for device, count in devices.items()),
                    cause="the switch keeps NCCL from the cards that the pod has",
                    remedy=f"take {name} out",
                )


RULES: Final = (
    Rule("ipc-lock", ipc_lock, fault="memlock"),
    Rule("ipc-lock-user", ipc_lock_user, fault="memlock"),
    Rule("fabric-resources", fabric_resources, fault="ib-fell-to-sockets"),
    Rule("instance-resources", instance_resources),
    Rule("fabric-disabled", fabric_disabled, fault="ib-disabled"),
)
