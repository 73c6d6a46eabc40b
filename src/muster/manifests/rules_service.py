"""Service, subdomain, selector and the place to meet: they must speak of the same pods."""

from collections.abc import Iterator
from typing import Final

from muster.finding import Finding, error, warning
from muster.launch import RDZV_PORT
from muster.manifests.documents import Document, mappings
from muster.manifests.rules import Manifest, Rule, at_job, at_template, endpoint, selects
from muster.manifests.rules_endpoint import is_address, joining, spelled
from muster.manifests.workloads import PodGroup, services

_POD_INDEX: Final = "batch.kubernetes.io/job-completion-index"


def _headless(manifest: Manifest) -> Iterator[tuple[PodGroup, Document | None]]:
    """The pods that need a Service for their names, and that Service where it is in the file."""
    for group, invocation in joining(manifest):
        place = endpoint(invocation)
        by_address = place is not None and is_address(place[0])
        if group.subdomain is None or group.makes_service or by_address:
            continue
        found = [
            service
            for service in services(manifest.documents)
            if (service.name, service.namespace) == (group.subdomain, group.namespace)
        ]
        yield group, (found[0] if found else None)


def service_missing(manifest: Manifest) -> Iterator[Finding]:
    for group, service in _headless(manifest):
        if service is None:
            names = [f"{each.namespace}/{each.name}" for each in services(manifest.documents)]
            yield error(
                at_template(group, "subdomain"),
                f"there is no Service {group.subdomain!r} in the namespace {group.namespace!r}",
                evidence=f"subdomain: {group.subdomain}; Services here:"
                f" {', '.join(names) or 'none'}",
                cause="the pods' names resolve only with a headless Service that is called as"
                " their subdomain",
                remedy=f"add a Service {group.subdomain!r} with clusterIP: None before the"
                f" {group.kind}",
            )


def service_headless(manifest: Manifest) -> Iterator[Finding]:
    for _, service in _headless(manifest):
        if service is None:
            continue
        address = service.data.get("spec", {}).get("clusterIP")
        if address != "None":
            yield error(
                service.where("spec", "clusterIP"),
                f"the Service {service.name!r} is not headless",
                evidence=f"clusterIP: {address or 'not set'}",
                cause="with an address of its own it has one name for all pods, and the pods have"
                " none",
                remedy="write clusterIP: None",
            )


def service_selector(manifest: Manifest) -> Iterator[Finding]:
    for group, service in _headless(manifest):
        if service is None:
            continue
        selector = dict(service.data.get("spec", {}).get("selector", {}))
        # one pod of the group, as for a Service that is for the store only
        one = selector.pop(_POD_INDEX, None)
        if (selector or one) and selects({"matchLabels": selector}, group.labels):
            continue
        labels = ", ".join(f"{key}={value}" for key, value in sorted(group.labels.items()))
        yield error(
            service.where("spec", "selector"),
            f"the Service {service.name!r} does not select the pods of {group.name!r}",
            evidence=f"selector: {selector or 'none'}; the pods' labels: {labels or 'none'}",
            cause="a pod's name resolves only while the Service selects it",
            remedy=f"select batch.kubernetes.io/job-name: {group.name}"
            if group.job_path and group.pods_per_job is None
            else "select labels that the pod template has",
        )


def service_not_ready(manifest: Manifest) -> Iterator[Finding]:
    for _, service in _headless(manifest):
        spec = {} if service is None else service.data.get("spec", {})
        if service is not None and spec.get("publishNotReadyAddresses") is not True:
            yield warning(
                service.where("spec", "publishNotReadyAddresses"),
                f"the Service {service.name!r} names its pods only when they are ready",
                evidence="publishNotReadyAddresses is not true",
                cause="the nodes look for each other before any is ready, and a name that was not"
                " found stays so in DNS caches for half a minute",
                remedy="write publishNotReadyAddresses: true",
            )


def service_order(manifest: Manifest) -> Iterator[Finding]:
    for group, service in _headless(manifest):
        if service is not None and service.index > group.document.index:
            yield warning(
                service.where("kind"),
                f"the Service {service.name!r} stands after the {group.kind}",
                evidence=f"lines {group.document.line('kind')} and {service.line('kind')}",
                cause="kubectl applies them in this order: pods may ask for their names before"
                " there are any, and a name that was not found stays so for half a minute",
                remedy=f"put the Service before the {group.kind}",
            )


def service_port(manifest: Manifest) -> Iterator[Finding]:
    """An endpoint that is a Service with an address must find its port there."""
    for group, invocation in joining(manifest):
        place = endpoint(invocation)
        if place is None:
            continue
        for service in services(manifest.documents):
            spec = service.data.get("spec", {})
            is_it = service.name == place[0].split(".")[0]
            if not is_it or service.namespace != group.namespace or spec.get("clusterIP") == "None":
                continue
            ports = [str(port.get("port")) for port in mappings(spec.get("ports"))]
            if (place[1] or str(RDZV_PORT)) not in ports:
                yield error(
                    service.where("spec", "ports"),
                    f"the Service {service.name!r} does not lead to the endpoint's port",
                    evidence=f"{spelled(invocation)}; ports: {', '.join(ports) or 'none'}",
                    cause="a Service with an address passes on only the ports that it lists",
                    remedy=f"add port {place[1] or RDZV_PORT}, or meet at a pod's own name",
                )


def job_indexed(manifest: Manifest) -> Iterator[Finding]:
    """Several pods of a Job without an index are all called by chance."""
    for group, invocation in joining(manifest):
        if group.kind == "Job" and not group.indexed and endpoint(invocation) is None:
            yield warning(
                at_job(group, "completionMode"),
                "the Job's pods have no index",
                evidence=f"completionMode: {group.job.get('completionMode', 'not set')}",
                cause="without an index no pod has a name that the others can know, and none knows"
                " whether it is the first",
                remedy="write completionMode: Indexed",
            )


RULES: Final = (
    Rule("service-missing", service_missing, fault="dns"),
    Rule("service-headless", service_headless),
    Rule("service-selector", service_selector, fault="dns"),
    Rule("service-not-ready", service_not_ready, fault="dns"),
    Rule("service-order", service_order),
    Rule("service-port", service_port),
    Rule("job-indexed", job_indexed, fault="dns"),
)
