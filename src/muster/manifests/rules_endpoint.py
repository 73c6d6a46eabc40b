"""The place to meet: a pod of this manifest, by a name that all the others can resolve."""

import ipaddress
import re
from collections.abc import Iterator
from typing import Final

from muster.finding import Finding, error, warning
from muster.launch import RDZV_PORT
from muster.manifests.documents import Document
from muster.manifests.invocation import DEFAULT_BACKEND, Invocation, Program
from muster.manifests.rules import (
    C10D,
    Manifest,
    Rule,
    at_flag,
    backend,
    endpoint,
    joins_many,
    selects,
)
from muster.manifests.workloads import CLUSTER_DOMAIN, PodGroup, services


def joining(manifest: Manifest) -> Iterator[tuple[PodGroup, Invocation]]:
    """The pods that are to meet at one of them, of kinds whose controllers set nothing else."""
    for group, invocation in manifest.trainers:
        at_a_pod = backend(invocation) in {C10D, DEFAULT_BACKEND} and not invocation.standalone
        if at_a_pod and group.known and joins_many(group, invocation):
            yield group, invocation


def _flag(invocation: Invocation) -> str:
    return "rdzv_endpoint" if invocation.rdzv_endpoint is not None else "master_addr"


def spelled(invocation: Invocation) -> str:
    return f"--{_flag(invocation).replace('_', '-')} {invocation.value(_flag(invocation))}"


def endpoint_missing(manifest: Manifest) -> Iterator[Finding]:
    for group, invocation in joining(manifest):
        met = backend(invocation)
        if met == C10D and invocation.complete and not invocation.rdzv_endpoint:
            yield error(
                at_flag(group, invocation, "rdzv_backend"),
                "torchrun joins several nodes, and is not told where",
                evidence="no --rdzv-endpoint and no PET_RDZV_ENDPOINT",
                cause="without an endpoint each node meets at its own localhost, and waits there"
                " until join_timeout",
                remedy=f"give --rdzv-endpoint {_recommended(group)}:{RDZV_PORT}",
            )


def _recommended(group: PodGroup) -> str:
    return group.fqdn(0) or f"{group.hostname(0)}.SERVICE.{group.namespace}.svc.{CLUSTER_DOMAIN}"


def endpoint_port(manifest: Manifest) -> Iterator[Finding]:
    for group, invocation in manifest.trainers:
        place = endpoint(invocation)
        if place is None or not place[1]:
            continue
        if not place[1].isdigit() or not 0 < int(place[1]) < 2**16:
            yield error(
                at_flag(group, invocation, _flag(invocation)),
                f"the endpoint's port {place[1]!r} is none",
                evidence=spelled(invocation),
                cause="a port is a number from 1 to 65535",
                remedy=f"write {place[0]}:{RDZV_PORT}",
            )


def endpoint_local(manifest: Manifest) -> Iterator[Finding]:
    """localhost, which each pod has; an address, which a pod loses when it is replaced."""
    for group, invocation in joining(manifest):
        place = endpoint(invocation)
        if place is None:
            continue
        host = place[0]
        where = at_flag(group, invocation, _flag(invocation))
        remedy = f"write {_recommended(group)}:{place[1] or RDZV_PORT}"
        if _is_loopback(host):
            yield error(
                where,
                f"the nodes are to meet at {host}, which is in each pod another",
                evidence=spelled(invocation),
                cause="every node waits for the others in its own pod",
                remedy=remedy,
            )
        elif is_address(host):
            yield warning(
                where,
                f"the nodes are to meet at the address {host}",
                evidence=spelled(invocation),
                cause="a pod that is replaced has another address, and the name that it keeps",
                remedy=remedy,
            )


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def endpoint_host(manifest: Manifest) -> Iterator[Finding]:
    """The endpoint names a pod of this file by a name that resolves."""
    for group, invocation in joining(manifest):
        place = endpoint(invocation)
        if place is None or is_address(place[0]) or _is_loopback(place[0]):
            continue
        fault = _host_fault(manifest, group, place[0])
        if fault is not None:
            what, cause = fault
            yield error(
                at_flag(group, invocation, _flag(invocation)),
                f"the endpoint's host {place[0]} {what}",
                evidence=spelled(invocation),
                cause=cause,
                remedy=f"write {_recommended(group)}:{place[1] or RDZV_PORT}",
            )


def _host_fault(manifest: Manifest, group: PodGroup, host: str) -> tuple[str, str] | None:
    """What is wrong with a host name, and why that matters."""
    first, *rest = host.rstrip(".").split(".")
    service = _service_called(manifest, group, first, rest)
    if service is not None:
        return _service_fault(group, service)
    owner, index = _pod_called(manifest, group, first)
    if owner is None:
        return _no_pod_fault(manifest, group, rest)
    if index >= owner.replicas:
        pods = f"{owner.hostname(0)} to {owner.hostname(owner.replicas - 1)}"
        return "is no pod's", f"there are {owner.replicas} pods: {pods}"
    if not owner.named:
        return _unnamed_fault(owner)
    return _domain_fault(owner, first, rest)


def _domain_fault(owner: PodGroup, first: str, rest: list[str]) -> tuple[str, str] | None:
    if owner.subdomain is None:
        return (
            "does not resolve: the pods have no subdomain",
            "a pod has a name in DNS only with the subdomain of a headless Service",
        )
    if not rest:
        return "resolves in that pod only", f"the others know it as {first}.{owner.subdomain}"
    if rest[0] != owner.subdomain:
        return (
            f"is not under the pods' subdomain {owner.subdomain}",
            f"their names are {first}.{owner.subdomain}",
        )
    return _tail_fault(owner, rest[1:])


def _tail_fault(owner: PodGroup, tail: list[str]) -> tuple[str, str] | None:
    if tail and tail[0] != owner.namespace:
        return (
            f"is in the namespace {tail[0]}",
            f"the pods are in the namespace {owner.namespace}",
        )
    if len(tail) > 1 and tail[1] != "svc":
        return "does not resolve", "a Service's name goes on with its namespace and svc"
    return None


def _unnamed_fault(owner: PodGroup) -> tuple[str, str]:
    if owner.kind == "Pod":
        return (
            "does not resolve: the pod has no hostname",
            "DNS knows a pod by spec.hostname, not by its metadata.name",
        )
    return (
        "does not resolve: the pods have no index",
        f"pods of a {owner.kind} are called by a random name, unless completionMode is Indexed",
    )


def _service_called(
    manifest: Manifest, group: PodGroup, first: str, rest: list[str]
) -> Document | None:
    """The Service of this file that a host name is of, by itself."""
    namespace = rest[0] if rest else group.namespace
    for service in services(manifest.documents):
        if service.name == first and service.namespace == namespace:
            return service
    return None


def _service_fault(group: PodGroup, service: Document) -> tuple[str, str] | None:
    selector = service.data.get("spec", {}).get("selector", {})
    if group.replicas > 1 and selector and selects({"matchLabels": selector}, group.labels):
        return (
            "is the Service's, and so any pod's",
            "each node would look for the store in another pod: it is in one",
        )
    return None


def _no_pod_fault(manifest: Manifest, group: PodGroup, rest: list[str]) -> tuple[str, str] | None:
    """Of a host that is neither a pod nor a Service here; it may be one outside the file."""
    if rest and rest[0] == group.subdomain:
        return "is no pod's", f"the pods are called {group.hostname(0)} and so on"
    if not rest or rest[0] in {service.name for service in services(manifest.documents)}:
        return "is neither a pod's nor a Service's of this file", "nobody answers there"
    return None


def _pod_called(manifest: Manifest, group: PodGroup, first: str) -> tuple[PodGroup | None, int]:
    """The pods that a host name is of, and the index in it; those of `group` come first."""
    for owner in sorted(manifest.groups, key=lambda each: each is not group):
        index = _index(owner, first)
        if index is not None:
            return owner, index
    return None, 0


def _index(group: PodGroup, hostname: str) -> int | None:
    if group.kind == "Pod":
        return 0 if hostname in {group.stem, group.name} else None
    numbers = r"-(\d+)" if group.pods_per_job is None else r"-(\d+)-(\d+)"
    match = re.fullmatch(re.escape(group.stem) + numbers, hostname)
    if match is None:
        return None
    if group.pods_per_job is None:
        return int(match[1])
    job, pod = int(match[1]), int(match[2])
    return group.replicas if pod >= group.pods_per_job else job * group.pods_per_job + pod


def endpoint_index(manifest: Manifest) -> Iterator[Finding]:
    """Muster's launcher, and most scripts, let the pod of index 0 hold the store."""
    for group, invocation in joining(manifest):
        place = endpoint(invocation)
        if place is None or invocation.program is not Program.LAUNCHER:
            continue
        owner, index = _pod_called(manifest, group, place[0].split(".")[0])
        if owner is not None and 0 < index < owner.replicas:
            yield error(
                at_flag(group, invocation, "rdzv_endpoint"),
                f"the endpoint is pod {index}, and the launcher lets pod 0 hold the store",
                evidence=spelled(invocation),
                cause="the others would ask a pod that holds none",
                remedy=f"write {_recommended(group)}:{place[1] or RDZV_PORT}",
            )


RULES: Final = (
    Rule("endpoint-missing", endpoint_missing),
    Rule("endpoint-port", endpoint_port),
    Rule("endpoint-local", endpoint_local, fault="rendezvous-timeout"),
    Rule("endpoint-host", endpoint_host, fault="dns"),
    Rule("endpoint-index", endpoint_index),
)
