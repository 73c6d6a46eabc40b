"""The pod itself: shared memory, network, image, hardening."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from muster.finding import Finding, error, warning
from muster.manifests.documents import mapping, mappings, strings
from muster.manifests.rules import (
    GPU,
    Manifest,
    Rule,
    all_containers,
    amount,
    at_container,
    at_template,
    gpus,
    limits,
    mib,
    nproc_per_node,
)
from muster.manifests.workloads import PodGroup

DEV_SHM: Final = "/dev/shm"
# ---- shared memory -----------------------------------------------------------------------------


def _shm(group: PodGroup) -> Mapping[str, Any] | None:
    """The volume that the training container has at /dev/shm."""
    names = [
        mount.get("name")
        for mount in mappings(group.trainer.get("volumeMounts"))
        if str(mount.get("mountPath", "")).rstrip("/") == DEV_SHM
    ]
    return next((volume for _, volume in _volumes(group) if volume.get("name") in names), None)


def _volumes(group: PodGroup) -> Iterator[tuple[int, dict[str, Any]]]:
    return enumerate(mappings(group.template.get("volumes")))


def shm(manifest: Manifest) -> Iterator[Finding]:
    for group, invocation in manifest.whole_trainers:
        ranks, devices = nproc_per_node(invocation), gpus(group.trainer)
        mounted = any(
            str(mount.get("mountPath", "")).rstrip("/") == DEV_SHM
            for mount in mappings(group.trainer.get("volumeMounts"))
        )
        if mounted or group.template.get("hostIPC") is True or (ranks == 1 and devices < 2):
            continue
        report = error if devices > 1 else warning
        yield report(
            at_container(group, "volumeMounts"),
            "the container has 64 MiB of shared memory",
            evidence=f"no volume at {DEV_SHM}; nproc_per_node"
            f" {invocation.nproc_per_node or 1}, {GPU} {devices}",
            cause="NCCL and the workers of a DataLoader hand data from process to process there:"
            " they end with SIGBUS or 'No space left on device'",
            remedy="mount a volume with emptyDir: {medium: Memory, sizeLimit: …} at /dev/shm",
        )


def shm_kind(manifest: Manifest) -> Iterator[Finding]:
    for group, _ in manifest.whole_trainers:
        for index, volume in _volumes(group):
            if volume is not _shm(group):
                continue
            where = at_template(group, "volumes", index)
            if "hostPath" in volume:
                yield warning(
                    where,
                    f"{DEV_SHM} is the machine's own, shared by all its pods",
                    evidence=f"hostPath: {mapping(volume['hostPath']).get('path')}",
                    cause="what a killed pod left stays there and counts for the next one, and"
                    " names may clash",
                    remedy="write emptyDir: {medium: Memory, sizeLimit: …}",
                )
            elif "emptyDir" in volume and mapping(volume["emptyDir"]).get("medium") != "Memory":
                yield warning(
                    where,
                    f"{DEV_SHM} is on the machine's disk",
                    evidence=f"emptyDir: {volume['emptyDir']}",
                    cause="an emptyDir is memory only with medium: Memory",
                    remedy="write emptyDir: {medium: Memory, sizeLimit: …}",
                )


def shm_size(manifest: Manifest) -> Iterator[Finding]:
    for group, _ in manifest.whole_trainers:
        empty = mapping((_shm(group) or {}).get("emptyDir"))
        size, memory = amount(empty.get("sizeLimit")), amount(limits(group.trainer).get("memory"))
        index = next((at for at, each in _volumes(group) if each is _shm(group)), 0)
        where = at_template(group, "volumes", index, "emptyDir", "sizeLimit")
        if size is not None and memory is not None and size > memory:
            yield warning(
                where,
                f"{DEV_SHM} may grow over the container's memory limit",
                evidence=f"sizeLimit {mib(size)}, memory limit {mib(memory)}",
                cause="what is written there counts as the container's memory: it is killed before"
                " the sizeLimit is reached",
                remedy="set sizeLimit to half the memory limit or less",
            )
        elif size is not None and size < 64 * 2**20:
            yield warning(
                where,
                f"{DEV_SHM} has less than it would have without a volume",
                evidence=f"sizeLimit {mib(size)}, 64 MiB without a volume",
                cause="NCCL and the workers of a DataLoader need gigabytes there",
                remedy="write sizeLimit: 1Gi a rank",
            )


# ---- network, image, hardening -----------------------------------------------------------------


def host_network(manifest: Manifest) -> Iterator[Finding]:
    for group, _ in manifest.trainers:
        policy = group.template.get("dnsPolicy", "ClusterFirst")
        if group.template.get("hostNetwork") is True and policy == "ClusterFirst":
            yield error(
                at_template(group, "hostNetwork"),
                "with hostNetwork the pods do not know the cluster's names",
                evidence=f"hostNetwork: true, dnsPolicy:"
                f" {group.template.get('dnsPolicy', 'not set')}",
                cause="with the machine's network a pod uses the machine's DNS, also under"
                " ClusterFirst: no Service's name resolves",
                remedy="write dnsPolicy: ClusterFirstWithHostNet",
            )


def image_missing(manifest: Manifest) -> Iterator[Finding]:
    for group in manifest.groups:
        for path, container in all_containers(group):
            if group.whole and not container.get("image"):
                yield error(
                    group.document.where(*path),
                    f"the container {container.get('name')!r} has no image",
                    evidence="image is missing",
                    cause="the API server refuses it",
                    remedy="give image: REPOSITORY@sha256:…",
                )


def image_digest(manifest: Manifest) -> Iterator[Finding]:
    for group, _ in manifest.trainers:
        image = str(group.trainer.get("image", ""))
        if not image or "@sha256:" in image:
            continue
        tag = image.rpartition("/")[2].partition(":")[2]
        yield warning(
            at_container(group, "image"),
            f"the image {image} is named by {'its tag' if tag else 'no tag: latest'}",
            evidence=f"image: {image}",
            cause="a tag can be moved: nodes that pull at different times may run different"
            " versions of torch and NCCL",
            remedy="write REPOSITORY@sha256:…; docker buildx imagetools inspect shows the digest",
        )


def service_account(manifest: Manifest) -> Iterator[Finding]:
    for group, _ in manifest.whole_trainers:
        if group.template.get("automountServiceAccountToken") is not False:
            yield warning(
                at_template(group, "automountServiceAccountToken"),
                "every rank has a key to the API server",
                evidence="automountServiceAccountToken is not false",
                cause="a token of the namespace's service account is mounted unless it is said"
                " otherwise, and training needs none",
                remedy="write automountServiceAccountToken: false",
            )


def service_links(manifest: Manifest) -> Iterator[Finding]:
    for group, _ in manifest.whole_trainers:
        if group.template.get("enableServiceLinks") is not False:
            yield warning(
                at_template(group, "enableServiceLinks"),
                "every Service of the namespace adds variables to every rank",
                evidence="enableServiceLinks is not false",
                cause="they are there for old programs; a Service that is called as one of torch's"
                " variables begins sets it, and thousands of Services stop the container",
                remedy="write enableServiceLinks: false",
            )


def istio(manifest: Manifest) -> Iterator[Finding]:
    for group, _ in manifest.trainers:
        marks = {**group.labels, **mapping(group.metadata.get("annotations"))}
        injected = {
            key: value for key, value in marks.items() if key == "sidecar.istio.io/inject"
        } or _namespace_marks(manifest, group)
        if injected and str(next(iter(injected.values()))).lower() not in {"false", "disabled"}:
            name, value = next(iter(injected.items()))
            yield warning(
                group.document.where(*group.metadata_path),
                "a sidecar of Istio is put into the pods",
                evidence=f"{name}: {value}",
                cause="it takes the connections between the nodes over, which are no HTTP, before"
                " it is ready itself; and it may not end with the training",
                remedy='label the pods sidecar.istio.io/inject: "false"',
            )


def _namespace_marks(manifest: Manifest, group: PodGroup) -> dict[str, str]:
    for document in manifest.of_kind("Namespace"):
        labels = mapping(mapping(document.data.get("metadata")).get("labels"))
        if document.name == group.namespace and "istio-injection" in labels:
            return {"istio-injection": str(labels["istio-injection"])}
    return {}


def claim_access(manifest: Manifest) -> Iterator[Finding]:
    """A volume that one machine at a time may mount, for pods on several."""
    claims = {
        (claim.namespace, claim.name): claim for claim in manifest.of_kind("PersistentVolumeClaim")
    }
    for group, _ in manifest.trainers:
        for index, volume in _volumes(group):
            name = str(mapping(volume.get("persistentVolumeClaim")).get("claimName", ""))
            claim = claims.get((group.namespace, name))
            if claim is None or group.replicas < 2:
                continue
            modes = strings(claim.data.get("spec", {}).get("accessModes"))
            if not {"ReadWriteMany", "ReadOnlyMany"} & set(modes):
                yield warning(
                    at_template(group, "volumes", index),
                    f"{group.replicas} pods share the claim {name!r}, which one machine may mount",
                    evidence=f"accessModes: {', '.join(modes) or 'none'}",
                    cause="pods on other machines stay in ContainerCreating",
                    remedy="claim ReadWriteMany from a storage class that has it",
                )


RULES: Final = (
    Rule("shm", shm, fault="shm-too-small"),
    Rule("shm-kind", shm_kind, fault="shm-too-small"),
    Rule("shm-size", shm_size, fault="shm-too-small"),
    Rule("host-network", host_network, fault="dns"),
    Rule("image-missing", image_missing),
    Rule("image-digest", image_digest),
    Rule("service-account", service_account),
    Rule("service-links", service_links),
    Rule("istio", istio),
    Rule("claim-access", claim_access),
)
