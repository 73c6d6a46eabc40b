"""NetworkPolicies against what torch and NCCL do: any port between the pods, and DNS."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from muster.finding import Finding, error
from muster.launch import RDZV_PORT
from muster.manifests.documents import Document, mapping, mappings
from muster.manifests.invocation import Invocation
from muster.manifests.rules import Manifest, Rule, endpoint, joins_many, selects
from muster.manifests.workloads import PodGroup

# Linux's own range for ports that the kernel picks: net.ipv4.ip_local_port_range
_EPHEMERAL: Final = (32768, 60999)
_DNS_PORT: Final = 53
_NAMESPACE_LABEL: Final = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class _Direction:
    """Ingress or egress, by the words that NetworkPolicy has for each."""

    type: str
    field: str
    peers: str
    word: str


_DIRECTIONS: Final = (
    _Direction("Ingress", "ingress", "from", "from"),
    _Direction("Egress", "egress", "to", "to"),
)


def policy_peers(manifest: Manifest) -> Iterator[Finding]:
    for group, _, direction, policies in _closed(manifest):
        if not _between_pods(policies, direction, group):
            yield error(
                policies[0].where("spec", direction.field),
                f"the NetworkPolicy {policies[0].name!r} lets no traffic {direction.word} the"
                " job's own pods pass",
                evidence=_names(policies, direction),
                cause="the nodes of a training talk to each other, all to all",
                remedy=f"add a rule with {direction.peers}: [podSelector that selects the pods]"
                " and no ports",
            )


def policy_ports(manifest: Manifest) -> Iterator[Finding]:
    for group, invocation, direction, policies in _closed(manifest):
        rules = _between_pods(policies, direction, group)
        if rules and not _any_port(rules, _rendezvous_port(invocation)):
            ports = [
                f"{port.get('port')}-{port['endPort']}" if "endPort" in port else port.get("port")
                for rule in rules
                for port in mappings(rule.get("ports"))
            ]
            yield error(
                policies[0].where("spec", direction.field),
                f"the NetworkPolicy {policies[0].name!r} blocks ports that the nodes need",
                evidence=f"{direction.field}: ports {', '.join(map(str, ports))}",
                cause="the rendezvous has one port; MASTER_PORT, NCCL and gloo listen on ports"
                " that the kernel picks",
                remedy="leave ports out of the rule between the job's own pods",
            )


def policy_dns(manifest: Manifest) -> Iterator[Finding]:
    for _, _, direction, policies in _closed(manifest):
        rules = [rule for each in policies for rule in _rules(each, direction)]
        if direction.type == "Egress" and not any(map(_lets_dns, rules)):
            yield error(
                policies[0].where("spec", direction.field),
                f"the NetworkPolicy {policies[0].name!r} blocks DNS",
                evidence=_names(policies, direction),
                cause="the nodes find each other by name",
                remedy="add an egress rule with ports 53 UDP and TCP",
            )


def _closed(
    manifest: Manifest,
) -> Iterator[tuple[PodGroup, Invocation, _Direction, list[Document]]]:
    """The pods that policies close, with the direction and the policies that close it."""
    for group, invocation in manifest.trainers:
        if not joins_many(group, invocation):
            continue
        for direction in _DIRECTIONS:
            policies = [
                policy
                for policy in manifest.of_kind("NetworkPolicy")
                if policy.namespace == group.namespace
                and direction.type in _types(policy)
                and selects(mapping(policy.data.get("spec")).get("podSelector"), group.labels)
            ]
            if policies:
                yield group, invocation, direction, policies


def _types(policy: Document) -> Sequence[str]:
    spec = mapping(policy.data.get("spec"))
    default = ["Ingress", "Egress"] if "egress" in spec else ["Ingress"]
    return list(spec.get("policyTypes", default))


def _names(policies: Sequence[Document], direction: _Direction) -> str:
    names = ", ".join(policy.name for policy in policies)
    rules = sum(len(_rules(policy, direction)) for policy in policies)
    return f"{direction.type} of {names}: {rules} rules"


def _rules(policy: Document, direction: _Direction) -> list[dict[str, Any]]:
    return mappings(mapping(policy.data.get("spec")).get(direction.field))


def _between_pods(
    policies: Sequence[Document], direction: _Direction, group: PodGroup
) -> list[dict[str, Any]]:
    """The rules that let the job's pods reach each other."""
    return [
        rule
        for policy in policies
        for rule in _rules(policy, direction)
        if not rule.get(direction.peers)
        or any(_is_peer(peer, group) for peer in mappings(rule[direction.peers]))
    ]


def _is_peer(peer: Mapping[str, Any], group: PodGroup) -> bool:
    if "ipBlock" in peer:
        # whose pods have these addresses only the cluster knows
        return True
    namespaces = mapping(mapping(peer.get("namespaceSelector")).get("matchLabels"))
    if namespaces.get(_NAMESPACE_LABEL, group.namespace) != group.namespace:
        return False
    return selects(peer.get("podSelector"), group.labels)


def _rendezvous_port(invocation: Invocation) -> int:
    place = endpoint(invocation)
    return int(place[1]) if place is not None and place[1].isdigit() else RDZV_PORT


def _any_port(rules: Sequence[Mapping[str, Any]], rendezvous: int) -> bool:
    return any(_covers(rule, *_EPHEMERAL) for rule in rules) and any(
        _covers(rule, rendezvous, rendezvous) for rule in rules
    )


def _covers(rule: Mapping[str, Any], first: int, last: int, protocol: str = "TCP") -> bool:
    """Whether a rule lets these ports pass; one without ports lets all."""
    if not rule.get("ports"):
        return True
    for entry in mappings(rule["ports"]):
        port = entry.get("port")
        if entry.get("protocol", "TCP") != protocol:
            continue
        if port is None or (
            isinstance(port, int) and port <= first and last <= entry.get("endPort", port)
        ):
            return True
    return False


def _lets_dns(rule: Mapping[str, Any]) -> bool:
    # the DNS servers are in another namespace than the pods
    peers = mappings(rule.get("to"))
    is_beyond = not peers or any({"ipBlock", "namespaceSelector"} & peer.keys() for peer in peers)
    named = any("dns" in str(port.get("port")) for port in mappings(rule.get("ports")))
    return is_beyond and (named or _covers(rule, _DNS_PORT, _DNS_PORT, "UDP"))


RULES: Final = (
    Rule("network-policy-peers", policy_peers, fault="store-unreachable"),
    Rule("network-policy-ports", policy_ports, fault="connect-timeout"),
    Rule("network-policy-dns", policy_dns, fault="dns"),
)
