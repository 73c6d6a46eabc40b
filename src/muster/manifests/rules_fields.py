"""What the schema lets pass and the API server refuses: names of choices, quantities, volumes."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from muster.finding import Finding, error, warning
from muster.manifests import schema
from muster.manifests.documents import Document, KeyPath, at, mapping, mappings
from muster.manifests.rules import Manifest, Rule, all_containers, amount, limits, near, requests
from muster.manifests.schema import Fault
from muster.manifests.workloads import PodGroup

Choices = Mapping[str, frozenset[str]]


def _choices(text: str) -> Choices:
    lines = (line.split() for line in text.strip().splitlines())
    return {path: frozenset(values) for path, *values in lines}


# https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/
_POD: Final = _choices("""
restartPolicy Always OnFailure Never
dnsPolicy ClusterFirst ClusterFirstWithHostNet Default None
preemptionPolicy Never PreemptLowerPriority
securityContext.fsGroupChangePolicy OnRootMismatch Always
securityContext.seccompProfile.type RuntimeDefault Unconfined Localhost
containers.*.imagePullPolicy Always IfNotPresent Never
containers.*.terminationMessagePolicy File FallbackToLogsOnError
containers.*.ports.*.protocol TCP UDP SCTP
containers.*.securityContext.seccompProfile.type RuntimeDefault Unconfined Localhost
containers.*.securityContext.procMount Default Unmasked
initContainers.*.imagePullPolicy Always IfNotPresent Never
initContainers.*.restartPolicy Always OnFailure Never
initContainers.*.terminationMessagePolicy File FallbackToLogsOnError
tolerations.*.operator Exists Equal Lt Gt
tolerations.*.effect NoSchedule PreferNoSchedule NoExecute
topologySpreadConstraints.*.whenUnsatisfiable DoNotSchedule ScheduleAnyway
volumes.*.emptyDir.medium Memory HugePages HugePages-2Mi HugePages-1Gi
""")
# https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/
_JOB: Final = _choices("""
completionMode Indexed NonIndexed
podReplacementPolicy TerminatingOrFailed Failed
podFailurePolicy.rules.*.action FailJob FailIndex Ignore Count
podFailurePolicy.rules.*.onExitCodes.operator In NotIn
podFailurePolicy.rules.*.onPodConditions.*.status True False Unknown
""")
# https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/
_JOB_SET: Final = _choices("""
failurePolicy.restartStrategy Recreate BlockingRecreate InPlaceRestart
failurePolicy.rules.*.action FailJobSet RestartJobSet RestartJobSetAndIgnoreMaxRestarts \
RestartJob RestartJobAndIgnoreMaxRestarts
successPolicy.operator All Any
startupPolicy.startupPolicyOrder AnyOrder InOrder
replicatedJobs.*.dependsOn.*.status Ready Complete
""")
_OBJECTS: Final[Mapping[str, tuple[KeyPath, Choices]]] = {
    "JobSet": (("spec",), _JOB_SET),
    "TrainingRuntime": (("spec", "template", "spec"), _JOB_SET),
    "ClusterTrainingRuntime": (("spec", "template", "spec"), _JOB_SET),
    "CronJob": (("spec",), _choices("concurrencyPolicy Allow Forbid Replace")),
    "Service": (
        ("spec",),
        _choices("""
type ClusterIP NodePort LoadBalancer ExternalName
ports.*.protocol TCP UDP SCTP
sessionAffinity ClientIP None
ipFamilyPolicy SingleStack PreferDualStack RequireDualStack
"""),
    ),
    "NetworkPolicy": (
        ("spec",),
        _choices("""
policyTypes.* Ingress Egress
ingress.*.ports.*.protocol TCP UDP SCTP
egress.*.ports.*.protocol TCP UDP SCTP
"""),
    ),
    "PersistentVolumeClaim": (
        ("spec",),
        _choices("accessModes.* ReadWriteOnce ReadOnlyMany ReadWriteMany ReadWriteOncePod"),
    ),
}


def enum(manifest: Manifest) -> Iterator[Finding]:
    """A choice that is none of those there are."""
    for document in manifest.documents:
        if document.kind in _OBJECTS:
            yield from _wrong_choices(document, *_OBJECTS[document.kind])
    for group in manifest.groups:
        if group.job_path:
            yield from _wrong_choices(group.document, group.job_path, _JOB)
        yield from _wrong_choices(group.document, group.template_path, _POD)


def _wrong_choices(document: Document, base: KeyPath, choices: Choices) -> Iterator[Finding]:
    for pattern, known in choices.items():
        for path, value in _matches(at(document.data, base), tuple(pattern.split(".")), base):
            if value and value not in known:
                yield error(
                    document.where(*path),
                    f"{schema.dotted(path)} is {value!r}, which is no choice of it",
                    evidence=f"{path[-1]}: {value}",
                    cause="the schema knows that a text must be here, only the API server knows"
                    " which",
                    remedy=f"write {near(str(value), known)}",
                )


def _matches(
    value: object, pattern: tuple[str, ...], path: KeyPath
) -> Iterator[tuple[KeyPath, object]]:
    if not pattern:
        yield path, value
    elif pattern[0] == "*":
        for index, item in enumerate(value if isinstance(value, list) else []):
            yield from _matches(item, pattern[1:], (*path, index))
    elif isinstance(value, dict) and pattern[0] in value:
        yield from _matches(value[pattern[0]], pattern[1:], (*path, pattern[0]))


# ---- quantities --------------------------------------------------------------------------------


def quantity(manifest: Manifest) -> Iterator[Finding]:
    """A text where only a number with Kubernetes's suffixes may be."""
    for document, path, value in _quantities(manifest):
        if amount(value) is None:
            yield error(
                document.where(*path),
                f"{schema.dotted(path)} is {str(value)!r}, which is no quantity",
                evidence=f"{path[-1]}: {value}",
                cause="Kubernetes knows Ki, Mi, Gi, Ti for powers of 1024, k, M, G, T for powers"
                " of 1000, m for thousandths, and no others",
                remedy="write e.g. 64Gi, 500m, 8",
            )


def _quantities(manifest: Manifest) -> Iterator[tuple[Document, KeyPath, object]]:
    for group in manifest.groups:
        for path, container in all_containers(group):
            for key in ("limits", "requests"):
                found = mapping(mapping(container.get("resources")).get(key))
                for name, value in found.items():
                    yield group.document, (*path, "resources", key, name), value
        for index, volume in enumerate(mappings(group.template.get("volumes"))):
            empty = mapping(volume.get("emptyDir"))
            if "sizeLimit" in empty:
                path = (*group.template_path, "volumes", index, "emptyDir", "sizeLimit")
                yield group.document, path, empty["sizeLimit"]
    for document in manifest.of_kind("PersistentVolumeClaim"):
        path = ("spec", "resources", "requests", "storage")
        if at(document.data, path) is not None:
            yield document, path, at(document.data, path)


def resource_limits(manifest: Manifest) -> Iterator[Finding]:
    """Requests over limits; devices that are asked for in parts, or in requests only."""
    for group in manifest.groups:
        for path, container in all_containers(group):
            for name in {**limits(container), **requests(container)}:
                fault = _limit_fault(name, container)
                if fault is not None:
                    key = "requests" if name in requests(container) else "limits"
                    yield error(
                        group.document.where(*path, "resources", key, name),
                        f"{name} of container {container.get('name')!r} {fault}",
                        evidence=f"requests {requests(container).get(name, 'none')},"
                        f" limits {limits(container).get(name, 'none')}",
                        cause="the API server takes no request over its limit, and devices only"
                        " whole and with a limit that is the request",
                        remedy=f"give {name} under limits, and the same or nothing under requests",
                    )


def _limit_fault(name: str, container: Mapping[str, Any]) -> str | None:
    request, limit = requests(container).get(name), limits(container).get(name)
    asked, most = amount(request), amount(limit)
    is_device = "/" in name and not name.startswith(("kubernetes.io/", "requests."))
    if is_device and request is not None and limit is None:
        return "is requested without a limit"
    if is_device and most is not None and most != int(most):
        return "is not a whole number"
    if asked is None or most is None:
        return None
    if is_device and asked != most:
        return "has a limit that is not the request"
    return "is requested over its limit" if asked > most else None


# ---- volumes -----------------------------------------------------------------------------------


def volume_missing(manifest: Manifest) -> Iterator[Finding]:
    for group in manifest.groups:
        if not group.whole:
            continue
        known = _volumes(group)
        for path, container in all_containers(group):
            for index, mount in enumerate(mappings(container.get("volumeMounts"))):
                name = str(mount.get("name", ""))
                if name not in known:
                    yield error(
                        group.document.where(*path, "volumeMounts", index),
                        f"container {container.get('name')!r} mounts the volume {name!r}, which"
                        " the pod does not have",
                        evidence=f"volumes: {', '.join(sorted(known)) or 'none'}",
                        cause="the API server refuses a pod whose mounts have no volume",
                        remedy=f"add a volume {name!r} to the pod, or correct the name",
                    )


def volume_unused(manifest: Manifest) -> Iterator[Finding]:
    for group in manifest.groups:
        mounted = {
            mount.get("name")
            for _, container in all_containers(group)
            for key in ("volumeMounts", "volumeDevices")
            for mount in mappings(container.get(key))
        }
        for index, volume in enumerate(mappings(group.template.get("volumes"))):
            if volume.get("name") not in mounted:
                yield warning(
                    group.document.where(*group.template_path, "volumes", index),
                    f"no container mounts the volume {volume.get('name')!r}",
                    evidence=f"volumes[{index}].name: {volume.get('name')}",
                    cause="a volume does nothing until a container has a volumeMount of its name",
                    remedy="mount it, or take it out",
                )


def mount_twice(manifest: Manifest) -> Iterator[Finding]:
    for group in manifest.groups:
        for path, container in all_containers(group):
            seen: dict[str, str] = {}
            for index, mount in enumerate(mappings(container.get("volumeMounts"))):
                place, name = str(mount.get("mountPath", "")), str(mount.get("name", ""))
                if place in seen:
                    yield error(
                        group.document.where(*path, "volumeMounts", index),
                        f"container {container.get('name')!r} mounts two volumes at {place}",
                        evidence=f"{seen[place]} and {name}",
                        cause="the API server takes each mountPath once",
                        remedy="give one of them another mountPath",
                    )
                seen.setdefault(place, name)


def _volumes(group: PodGroup) -> set[str]:
    """The pod's volumes, those that a StatefulSet or a JobSet makes for it too."""
    spec = mapping(group.document.data.get("spec"))
    claims = [
        *mappings(spec.get("volumeClaimTemplates")),
        *(
            template
            for policy in mappings(spec.get("volumeClaimPolicies"))
            for template in mappings(policy.get("templates"))
        ),
    ]
    names = {str(mapping(claim.get("metadata")).get("name")) for claim in claims}
    return names | {str(volume.get("name")) for volume in mappings(group.template.get("volumes"))}


# ---- the schema --------------------------------------------------------------------------------

_CAUSES: Final = {
    Fault.UNKNOWN_FIELD: "the API server drops what it does not know, and kubectl refuses it",
    Fault.WRONG_TYPE: "the API server refuses the whole object",
    Fault.MISSING: "the API server refuses the whole object",
    Fault.UNKNOWN_KIND: "the API server does not know it",
}


def misfit(found: schema.Misfit) -> Finding:
    """The Finding of a value that does not fit its schema."""
    document = found.document
    where = document.where(*found.path)
    value = at(document.data, found.path)
    evidence = found.what if isinstance(value, dict | list | None) else f"{found.path[-1]}: {value}"
    if found.fault is Fault.UNCHECKED:
        return warning(
            where,
            found.what,
            evidence=f"apiVersion: {document.api_version}",
            cause="it is neither Kubernetes's own, nor a JobSet, nor a TrainJob; only the pods in"
            " it are looked at",
            remedy=f"was {found.near} meant?"
            if found.near
            else "check it on the cluster with kubectl apply --dry-run=server",
        )
    remedy = f"write {found.near}" if found.near else "correct it"
    if found.fault is Fault.MISSING:
        remedy = f"give it {found.path[-1]}" if found.path else "give it apiVersion and kind"
    elif found.fault is Fault.UNKNOWN_FIELD and not found.near:
        remedy = "take it out, or put it where it belongs"
    return error(where, found.what, evidence=evidence, cause=_CAUSES[found.fault], remedy=remedy)


RULES: Final = (
    Rule("enum", enum),
    Rule("quantity", quantity),
    Rule("resource-limits", resource_limits),
    Rule("volume-missing", volume_missing),
    Rule("volume-unused", volume_unused),
    Rule("mount-twice", mount_twice),
)
