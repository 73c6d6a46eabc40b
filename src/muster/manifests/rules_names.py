"""Names that DNS can hold, also with the index that is added to them."""

import re
from collections.abc import Iterator
from typing import Final

from muster.finding import Finding, error, warning
from muster.manifests import schema
from muster.manifests.documents import Document, KeyPath, at, mappings
from muster.manifests.rules import Manifest, Rule, all_containers, at_template
from muster.manifests.workloads import PodGroup

# https://kubernetes.io/docs/concepts/overview/working-with-objects/names/
LABEL_LENGTH: Final = 63
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
# the kernel's HOST_NAME_MAX
FQDN_LENGTH: Final = 64
# -abcde, which makes a pod's own name unique
_POD_SUFFIX: Final = 6

_LABELED: Final = frozenset(
    {"Job", "JobSet", "TrainJob", "Pod", "StatefulSet", "Service", "Namespace", "CronJob"}
)


def name_label(manifest: Manifest) -> Iterator[Finding]:
    for document, path in _labels(manifest):
        value = str(at(document.data, path))
        if not _LABEL.fullmatch(value):
            yield error(
                document.where(*path),
                f"{schema.dotted(path)} {value!r} is no DNS label",
                evidence=_first_wrong(value),
                cause="it becomes a part of a host name: lower-case letters, digits and -, with"
                " a letter or digit at both ends",
                remedy=f"write e.g. {_lowered(value)}",
            )
    for document in manifest.documents:
        if document.kind in _LABELED or not document.name:
            continue
        if not _SUBDOMAIN.fullmatch(document.name):
            yield error(
                document.where("metadata", "name"),
                f"the name {document.name!r} of a {document.kind} is no DNS name",
                evidence=_first_wrong(document.name),
                cause="the API server takes lower-case letters, digits, - and . only",
                remedy=f"write e.g. {_lowered(document.name)}",
            )


def _labels(manifest: Manifest) -> Iterator[tuple[Document, KeyPath]]:
    """Where a value stands that must be a DNS label."""
    for document in manifest.documents:
        paths: list[KeyPath] = [("metadata", "namespace")]
        if document.kind in _LABELED:
            paths.append(("metadata", "name"))
        if document.kind in {"JobSet", "TrainingRuntime", "ClusterTrainingRuntime"}:
            base: KeyPath = ("spec",) if document.kind == "JobSet" else ("spec", "template", "spec")
            replicated = mappings(at(document.data, (*base, "replicatedJobs")))
            paths += [(*base, "replicatedJobs", index, "name") for index in range(len(replicated))]
        yield from ((document, path) for path in paths if at(document.data, path) is not None)
    for group in manifest.groups:
        paths = [(*group.template_path, key) for key in ("subdomain", "hostname")]
        paths += [(*path, "name") for path, _ in all_containers(group)]
        volumes = mappings(group.template.get("volumes"))
        paths += [(*group.template_path, "volumes", index, "name") for index in range(len(volumes))]
        yield from (
            (group.document, path) for path in paths if at(group.document.data, path) is not None
        )


def _first_wrong(value: str) -> str:
    wrong = re.search(r"[^-a-z0-9]", value)
    if wrong is not None:
        return f"{wrong[0]!r} at character {wrong.start() + 1}"
    return f"begins with {value[0]!r}, ends with {value[-1]!r}" if value else "it is empty"


def _lowered(value: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", value.lower()).strip("-") or "demo"


def name_missing(manifest: Manifest) -> Iterator[Finding]:
    for document in manifest.documents:
        if document.name:
            continue
        generated = document.data.get("metadata", {}).get("generateName")
        # kubectl create takes it, and nobody can know the pods' names beforehand
        report = error if generated is None else warning
        yield report(
            document.where("metadata"),
            f"the {document.kind} has no name",
            evidence=f"generateName: {generated}" if generated else "metadata.name is missing",
            cause="kubectl apply finds an object by its name",
            remedy="give it metadata.name",
        )


def name_length(manifest: Manifest) -> Iterator[Finding]:
    """Names that grow too long, if not by themselves then by the index."""
    for document in manifest.of_kind("Service", "Job", "JobSet", "TrainJob"):
        if len(document.name) > LABEL_LENGTH:
            yield _too_long(document.where("metadata", "name"), document.name, document.kind)
    for group in manifest.groups:
        if not group.indexed or len(group.name) > LABEL_LENGTH or group.replicas < 1:
            continue
        name = group.hostname(group.replicas - 1)
        # the JobSet controller counts what makes the pod's name unique too
        most = LABEL_LENGTH - (_POD_SUFFIX if group.pods_per_job is not None else 0)
        if len(name) > most:
            yield _too_long(_named_at(group), name, "pod", most)


def _too_long(where: str, name: str, kind: str, most: int = LABEL_LENGTH) -> Finding:
    return error(
        where,
        f"the {kind}'s name {name!r} is too long",
        evidence=f"{len(name)} characters, {most} fit",
        cause="a host name is a DNS label, which has at most 63 characters; pods of an index get"
        " it added",
        remedy=f"take {len(name) - most} characters from the name",
    )


def _named_at(group: PodGroup) -> str:
    return group.document.where("metadata", "name")


def name_fqdn(manifest: Manifest) -> Iterator[Finding]:
    for group in manifest.groups:
        if group.template.get("setHostnameAsFQDN") is not True or group.replicas < 1:
            continue
        name = group.fqdn(group.replicas - 1)
        if name is not None and len(name) > FQDN_LENGTH:
            yield error(
                at_template(group, "setHostnameAsFQDN"),
                f"the full name {name} is too long for a host name",
                evidence=f"{len(name)} characters, {FQDN_LENGTH} fit",
                cause="with setHostnameAsFQDN the kernel must hold the full name, and it holds 64"
                " characters: the pod stays Pending",
                remedy="leave setHostnameAsFQDN out and give torchrun --local-addr, or shorten"
                " the names",
            )


RULES: Final = (
    Rule("name-missing", name_missing),
    Rule("name-label", name_label),
    Rule("name-length", name_length),
    Rule("name-fqdn", name_fqdn),
)
