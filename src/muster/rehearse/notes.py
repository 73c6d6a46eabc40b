"""What of a pod a rehearsal leaves out, or has otherwise than a cluster, in words."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from muster.manifests.documents import mapping, mappings
from muster.manifests.workloads import ConfigMaps, PodGroup

# what a node has beside its devices and its hugepages
_PLAIN_RESOURCES: Final = {"cpu", "memory", "ephemeral-storage"}


def of_pod(group: PodGroup) -> Iterator[str]:
    """What is left out of a pod as a whole."""
    for container in mappings(group.template.get("initContainers")):
        if container.get("restartPolicy") == "Always":
            yield f"the sidecar {container.get('name')} is left out"
    for position, container in enumerate(group.containers):
        if position != group.container:
            yield f"the container {container.get('name')} beside torchrun is left out"
    if group.template.get("hostNetwork") is True:
        yield "hostNetwork is played on a network of its own"


def of_container(container: Mapping[str, Any]) -> Iterator[str]:
    """What is left out of a container that is played."""
    name = container.get("name")
    resources = mapping(container.get("resources"))
    asked = {**mapping(resources.get("requests")), **mapping(resources.get("limits"))}
    for resource in asked:
        if resource not in _PLAIN_RESOURCES:
            yield f"{resource} is left out: the containers have no devices"
    if "claims" in resources:
        yield "resource claims are left out: the containers have no devices"
    if mapping(container.get("securityContext")).get("privileged") is True:
        yield f"the container {name} is not privileged here"
    if any(key.endswith("Probe") or key == "lifecycle" for key in container):
        yield f"the probes and hooks of the container {name} are left out"


def of_variables(
    container: Mapping[str, Any], values: Mapping[str, str], namespace: str, maps: ConfigMaps
) -> Iterator[str]:
    """What is left out of a container's environment, of which `values` are known."""
    for source in mappings(container.get("envFrom")):
        secret, config_map = (
            mapping(source.get(key)).get("name") for key in ("secretRef", "configMapRef")
        )
        if secret is not None:
            yield f"the variables of the Secret {secret} are left out"
        if config_map is not None and (namespace, str(config_map)) not in maps:
            yield f"the variables of the ConfigMap {config_map} are left out: it is not in the file"
    for entry in mappings(container.get("env")):
        name, origin = entry.get("name"), mapping(entry.get("valueFrom"))
        if origin and name not in values:
            yield f"the variable {name} is left out: only a cluster has it"
        elif mapping(origin.get("fieldRef")).get("fieldPath") == "status.podIP":
            yield f"the variable {name} is the pod's name, not its address"
