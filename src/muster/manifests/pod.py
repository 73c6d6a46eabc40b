"""The pod template of base/job.yaml, patched by the fabric and filled from a Spec."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ruamel.yaml.comments import CommentedBase, CommentedMap, CommentedSeq
from ruamel.yaml.scalarstring import DoubleQuotedScalarString as Quoted

from muster import launch, patch
from muster.launch import Rendezvous
from muster.manifests import quantities
from muster.manifests.quoting import text
from muster.manifests.spec import Spec, hostname, job_name
from muster.manifests.workloads import CLUSTER_DOMAIN, FAILURE_COUNTS
from muster.switches import DEBUG_SWITCHES

IMAGE_FOLDER: Final = "/opt/muster"
PREFLIGHT: Final = "preflight"
PREFLIGHT_PORT: Final = launch.RDZV_PORT + 1
# what the all_reduce of the gate sums: the vendors' floors are for large buffers
CPU_BYTES: Final = 2**24
GPU_BYTES: Final = 2**30
FLOOR_BYTES: Final = 2**34
CODE_FOLDER: Final = "/workspace/code"
CHECKPOINT_FOLDER: Final = "/checkpoint"
# what a rank takes where nobody says more: enough for the scripts of train/, not for a model
RANK_MEMORY_CPU: Final = 2 * 2**30
RANK_MEMORY_GPU: Final = 32 * 2**30
RANK_SHM: Final = 2**30


def rendezvous(spec: Spec) -> Rendezvous:
    """Pod 0 holds the store, and is known by its full name: it is the same after a restart."""
    host = f"{hostname(spec, 0)}.{spec.name}.{spec.namespace}.svc.{CLUSTER_DOMAIN}"
    return Rendezvous(
        spec.name,
        host,
        read_timeout_s=launch.read_timeout_s(spec.deadline_s),
        join_timeout_s=launch.join_timeout_s(spec.deadline_s),
    )


def fill(template: CommentedMap, spec: Spec, script: str) -> None:
    """Make `template` the pods of `spec`, whose ranks run `script`, a path in the container."""
    _patch(template, spec)
    pod = template["spec"]
    container = pod["containers"][0]
    container["image"] = text(spec.image)
    if "@" in spec.image:
        container.ca.items.pop("image", None)  # it has the digest that the base's comment wants
    container["args"] = CommentedSeq(map(text, _arguments(spec, script)))
    container["envFrom"][0]["configMapRef"]["name"] = f"{spec.name}-environment"
    for name, value in spec.env.items():
        container["env"].append(CommentedMap(name=name, value=Quoted(value)))
    _fill_resources(pod, container, spec)
    _fill_names(template, spec)
    _fill_grace(pod, spec)
    _fill_choice_of_nodes(pod, spec)
    if spec.preflight:
        pod["initContainers"] = CommentedSeq(
            [*pod.get("initContainers", ()), _preflight(container, spec)]
        )
    if spec.checkpoint is not None:
        claim = CommentedMap(claimName=text(spec.checkpoint))
        mount(pod, "checkpoint", CHECKPOINT_FOLDER, {"persistentVolumeClaim": claim})


def mount(pod: CommentedMap, name: str, folder: str, volume: Mapping[str, Any]) -> None:
    """Add the volume `name` to the pod, and to its container at `folder`."""
    pod["volumes"].append(CommentedMap(name=name, **volume))
    place = CommentedMap(name=name, mountPath=folder)
    pod["containers"][0]["volumeMounts"].append(place)


def explain(node: CommentedBase, key: str, comment: str) -> None:
    """Put `comment` behind `key`, in the place of the one that stood there."""
    node.ca.items.pop(key, None)
    node.yaml_add_eol_comment(f"# {comment}", key, column=0)


def _patch(template: CommentedMap, spec: Spec) -> None:
    fabric = spec.fabric
    template["metadata"] = patch.merged(template["metadata"], fabric.metadata)
    pod = template["spec"] = patch.merged(template["spec"], fabric.pod)
    pod["containers"][0] = patch.merged(pod["containers"][0], fabric.container)


def _preflight(container: CommentedMap, spec: Spec) -> CommentedMap:
    """The gate: the training container's image, environment and rights, for the all_reduce."""
    gate = CommentedMap(name=PREFLIGHT)
    for key in ("image", "envFrom", "env", "resources", "securityContext", "volumeMounts"):
        gate[key] = patch.copied(container[key])
    for name, annotation in zip(launch.FAILURE_COUNTS, FAILURE_COUNTS, strict=True):
        path = f"metadata.annotations['{annotation}']"
        field = CommentedMap(fieldRef=CommentedMap(fieldPath=path))
        gate["env"].append(CommentedMap(name=name, valueFrom=field))
    gate["command"] = CommentedSeq(["python", "-m", "muster.preflight"])
    gate["args"] = CommentedSeq(map(text, _preflight_arguments(spec)))
    return gate


def _preflight_arguments(spec: Spec) -> list[str]:
    floor = spec.fabric.busbw_floor_gb_s
    flags = [f"--using-network={name}" for name in spec.fabric.using_network]
    flags += [f"--on-purpose={name}" for name in DEBUG_SWITCHES if name in spec.fabric.environment]
    if floor is not None:
        flags.append(f"--floor-gb-s={floor:g}")
    meeting = rendezvous(spec)
    # another port: pod 0 may be in training before the last pod has left its gate
    apart = replace(meeting, rdzv_id=f"{spec.name}-{PREFLIGHT}", port=PREFLIGHT_PORT)
    size = CPU_BYTES if spec.cpu else GPU_BYTES if floor is None else FLOOR_BYTES
    script = f"{IMAGE_FOLDER}/train/bandwidth.py"
    return [*flags, "--", *_torchrun(spec, apart, script, 0, ("--bytes", str(size)))]


def _arguments(spec: Spec, script: str) -> list[str]:
    return _torchrun(spec, rendezvous(spec), script, spec.max_restarts, spec.arguments)


def _torchrun(
    spec: Spec, meeting: Rendezvous, script: str, max_restarts: int, arguments: Sequence[str]
) -> list[str]:
    return launch.arguments(
        spec.nnodes,
        spec.nproc_per_node,
        meeting,
        max_restarts=max_restarts,
        script=script,
        script_arguments=arguments,
    )


def _fill_resources(pod: CommentedMap, container: CommentedMap, spec: Spec) -> None:
    ranks = spec.nproc_per_node
    memory = spec.memory_bytes or ranks * (RANK_MEMORY_CPU if spec.cpu else RANK_MEMORY_GPU)
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    requests["cpu"] = Quoted(str(ranks))
    requests["memory"] = limits["memory"] = text(quantities.binary(memory))
    if not spec.cpu:
        limits["nvidia.com/gpu"] = ranks
        explain(limits, "nvidia.com/gpu", "one a rank: NCCL refuses two ranks on one")
    shm = spec.shm_bytes or min(ranks * RANK_SHM, memory // 2)
    pod["volumes"][0]["emptyDir"]["sizeLimit"] = text(quantities.binary(shm))


def _fill_names(template: CommentedMap, spec: Spec) -> None:
    template["metadata"]["labels"]["app.kubernetes.io/name"] = text(spec.name)
    pod = template["spec"]
    pod["subdomain"] = text(spec.name)
    explain(
        pod, "subdomain", f"the Service: gives the pods their names {hostname(spec, 0)}.{spec.name}"
    )
    spread = pod["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"]
    spread["batch.kubernetes.io/job-name"] = text(job_name(spec))
    if spec.topology is not None and spec.queue is not None:
        annotations = template["metadata"].setdefault("annotations", CommentedMap())
        # https://kueue.sigs.k8s.io/docs/concepts/topology_aware_scheduling/
        annotations["kueue.x-k8s.io/podset-required-topology"] = text(spec.topology)


def _fill_grace(pod: CommentedMap, spec: Spec) -> None:
    env = pod["containers"][0]["env"]
    key = "terminationGracePeriodSeconds"
    pod[key] = launch.grace_s(spec.checkpoint_s)
    shutdown = launch.shutdown_timeout_s(spec.checkpoint_s)
    explain(
        pod, key, f"the {shutdown} s that torchrun gives its ranks, and {launch.SPARE_S} s to spare"
    )
    (variable,) = (each for each in env if each["name"] == launch.SHUTDOWN_VARIABLE)
    variable["value"] = Quoted(str(shutdown))
    seconds = f"seconds for a rank that was told to end: {spec.checkpoint_s} for its checkpoint"
    explain(variable, "value", seconds)


def _fill_choice_of_nodes(pod: CommentedMap, spec: Spec) -> None:
    if spec.node_selector:
        selector = pod.setdefault("nodeSelector", CommentedMap())
        selector.update({key: Quoted(value) for key, value in spec.node_selector.items()})
    tolerations = pod.get("tolerations", CommentedSeq())
    if not spec.cpu:
        tolerations.append(CommentedMap(key="nvidia.com/gpu", operator="Exists"))
    for each in spec.tolerations:
        entry = CommentedMap(key=text(each.key))
        entry["operator"] = "Exists" if each.value is None else "Equal"
        if each.value is not None:
            entry["value"] = Quoted(each.value)
        if each.effect is not None:
            entry["effect"] = each.effect
        tolerations.append(entry)
    if tolerations:
        pod["tolerations"] = tolerations
    if spec.priority_class is not None:
        pod["priorityClassName"] = text(spec.priority_class)
