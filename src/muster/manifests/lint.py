"""Manifests before they are applied: against the schemas, and against what torchrun needs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from muster.errors import NoTorchrun
from muster.finding import Finding
from muster.manifests import (
    rules_devices,
    rules_endpoint,
    rules_environment,
    rules_fields,
    rules_names,
    rules_nccl,
    rules_network,
    rules_pod,
    rules_policy,
    rules_rendezvous,
    rules_service,
    rules_sizes,
    rules_static,
    schema,
)
from muster.manifests.documents import Document
from muster.manifests.rules import Manifest, Rule
from muster.manifests.workloads import PodGroup, pod_groups

if TYPE_CHECKING:
    from muster.fabric import Fabric

SCHEMA: Final = "schema"
RULES: Final[tuple[Rule, ...]] = (
    *rules_fields.RULES,
    *rules_environment.RULES,
    *rules_names.RULES,
    *rules_endpoint.RULES,
    *rules_service.RULES,
    *rules_rendezvous.RULES,
    *rules_static.RULES,
    *rules_sizes.RULES,
    *rules_network.RULES,
    *rules_policy.RULES,
    *rules_pod.RULES,
    *rules_devices.RULES,
    *rules_nccl.RULES,
)


def lint(
    documents: Sequence[Document],
    *,
    kubernetes: str = schema.VERSIONS[-1],
    fabric: "Fabric | None" = None,
) -> tuple[Finding, ...]:
    """Everything that is wrong with a manifest; `what` ends with the rule's id in brackets.

    Where an object does not have the shape of its kind, the rules about its meaning wait until it
    has. Raises UnknownKubernetes.
    """
    misfits = [each for document in documents for each in schema.misfits(document, kubernetes)]
    found = [_marked(rules_fields.misfit(each), SCHEMA) for each in misfits]
    if all(each.readable for each in misfits):
        found += _meaning(Manifest(tuple(documents), pod_groups(documents), fabric))
    return tuple(dict.fromkeys(found))


def _meaning(manifest: Manifest) -> Iterator[Finding]:
    for rule in RULES:
        for finding in rule.check(manifest):
            yield _marked(_as_in_a_log(finding, rule), rule.id)


def _as_in_a_log(finding: Finding, rule: Rule) -> Finding:
    """`finding`, and what explain calls it once such a job has run."""
    if not rule.fault:
        return finding
    return replace(finding, cause=f"{finding.cause} (in a log: {rule.fault})")


def _marked(finding: Finding, rule: str) -> Finding:
    return replace(finding, what=f"{finding.what} [{rule}]")


def require_torchrun(documents: Sequence[Document]) -> tuple[PodGroup, ...]:
    """The pods that run torchrun; NoTorchrun where there are none."""
    found = tuple(group for group in pod_groups(documents) if group.invocation is not None)
    if not found:
        raise NoTorchrun(documents[0].file, [document.kind for document in documents])
    return found
