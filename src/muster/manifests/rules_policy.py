"""What happens when a pod fails, is drained, or ends: the policies against what torchrun does."""

from collections.abc import Iterator
from typing import Any, Final

from muster.finding import Finding, error, warning
from muster.launch import ENVIRONMENT, SHUTDOWN_TIMEOUT_S, SHUTDOWN_VARIABLE, SPARE_S
from muster.manifests.documents import Key, mapping, mappings, whole
from muster.manifests.invocation import Invocation, Program
from muster.manifests.rules import (
    C10D,
    Manifest,
    Rule,
    at_flag,
    at_job,
    at_template,
    at_variable,
    many_by,
    nodes,
)
from muster.manifests.workloads import DEFAULT_BACKOFF_LIMIT, DEFAULT_GRACE_S, PodGroup

# torchrun's own end, and the kernel's SIGKILL of all
_PLAIN_CODES: Final = frozenset({0, 1, 137})


def _restart_policy(group: PodGroup) -> str:
    # a JobSet's controller has its own default
    default = "Always" if group.pods_per_job is None else "OnFailure"
    return str(group.template.get("restartPolicy", default))


def restart_policy(manifest: Manifest) -> Iterator[Finding]:
    for group in manifest.groups:
        if _restart_policy(group) != "Always":
            continue
        said = group.template.get("restartPolicy", "not set: Always")
        if group.job_path:
            yield error(
                at_template(group, "restartPolicy"),
                f"restartPolicy Always in a {group.kind}",
                evidence=f"restartPolicy: {said}",
                cause="a Job's pods must end: the API server takes Never and OnFailure",
                remedy="write restartPolicy: Never",
            )
        elif group.kind == "Pod" and group.invocation is not None:
            yield warning(
                at_template(group, "restartPolicy"),
                "the training begins again whenever it has ended",
                evidence=f"restartPolicy: {said}",
                cause="Always restarts a container that ended well too",
                remedy="write restartPolicy: Never",
            )


def never_ends(manifest: Manifest) -> Iterator[Finding]:
    for group, _ in manifest.trainers:
        if group.kind in {
            "Deployment",
            "StatefulSet",
            "ReplicaSet",
            "DaemonSet",
            "LeaderWorkerSet",
        }:
            yield warning(
                group.document.where("kind"),
                f"a {group.kind} never completes",
                evidence=f"kind: {group.kind}",
                cause="it starts a pod that has ended again, also when the training is done",
                remedy="make it an Indexed Job, or a JobSet",
            )


def needs_never(manifest: Manifest) -> Iterator[Finding]:
    """Policies that the API server takes with restartPolicy Never only."""
    for group in manifest.groups:
        policy = _restart_policy(group)
        for name in ("podFailurePolicy", "backoffLimitPerIndex"):
            if name in group.job and policy == "OnFailure":
                yield error(
                    at_job(group, name),
                    f"{name} with restartPolicy {policy}",
                    evidence=f"restartPolicy: {policy}",
                    cause="it counts pods that failed, and with another restartPolicy than Never"
                    " the kubelet starts containers again inside the pod",
                    remedy="write restartPolicy: Never",
                )


def per_index(manifest: Manifest) -> Iterator[Finding]:
    for group in manifest.groups:
        for name in ("backoffLimitPerIndex", "maxFailedIndexes"):
            if name in group.job and not group.indexed:
                yield error(
                    at_job(group, name),
                    f"{name} in a Job without an index",
                    evidence=f"completionMode: {group.job.get('completionMode', 'not set')}",
                    cause="the API server takes it with completionMode Indexed only",
                    remedy="write completionMode: Indexed",
                )
        if "maxFailedIndexes" in group.job and "backoffLimitPerIndex" not in group.job:
            yield error(
                at_job(group, "maxFailedIndexes"),
                "maxFailedIndexes without backoffLimitPerIndex",
                evidence=f"maxFailedIndexes: {group.job['maxFailedIndexes']}",
                cause="the API server takes it with backoffLimitPerIndex only",
                remedy="add backoffLimitPerIndex, or take it out",
            )


def _retries(group: PodGroup) -> bool:
    """Whether a pod that failed is replaced by another."""
    return whole(group.job.get("backoffLimit"), DEFAULT_BACKOFF_LIMIT) > 0


def backoff_limit(manifest: Manifest) -> Iterator[Finding]:
    """With pod 0 all pods fail at once, and each of them counts."""
    for group, _ in many_by(manifest, C10D):
        if not group.job_path or "backoffLimitPerIndex" in group.job or not _retries(group):
            continue
        limit = whole(group.job.get("backoffLimit"), DEFAULT_BACKOFF_LIMIT)
        if limit < group.replicas:
            in_set = group.pods_per_job is not None
            said = "" if "backoffLimit" in group.job else ", Kubernetes's own default"
            yield warning(
                at_job(group, "backoffLimit"),
                f"one failure of pod 0 uses up the backoffLimit of {limit}",
                evidence=f"backoffLimit {limit}{said}; {group.replicas} pods",
                cause="the store is in pod 0: when it fails, all the others fail within a second,"
                " and each of them counts",
                remedy="set backoffLimit: 0 and failurePolicy.maxRestarts of the JobSet"
                if in_set
                else "set backoffLimitPerIndex (with restartPolicy Never), or backoffLimit: 0 for"
                " no second try",
            )


def replacement_policy(manifest: Manifest) -> Iterator[Finding]:
    for group, invocation in manifest.trainers:
        policy = group.job.get("podReplacementPolicy")
        if not group.job_path or policy == "Failed":
            continue
        if policy is not None and "podFailurePolicy" in group.job:
            yield error(
                at_job(group, "podReplacementPolicy"),
                f"podReplacementPolicy {policy} with a podFailurePolicy",
                evidence=f"podReplacementPolicy: {policy}",
                cause="the API server takes only Failed beside a podFailurePolicy",
                remedy="write podReplacementPolicy: Failed",
            )
        elif "podFailurePolicy" not in group.job and group.indexed and _retries(group):
            if not _joins(group, invocation):
                continue
            yield warning(
                at_job(group, "podReplacementPolicy"),
                "two pods may have one name at a time",
                evidence=f"podReplacementPolicy: {policy or 'not set: TerminatingOrFailed'}",
                cause="the next pod of an index starts while the last one still ends: both answer"
                " to the same name",
                remedy="write podReplacementPolicy: Failed",
            )


def _joins(group: PodGroup, invocation: Invocation) -> bool:
    found = nodes(invocation)
    return group.replicas > 1 and (found is None or found[1] > 1)


def share_store(manifest: Manifest) -> Iterator[Finding]:
    """Without the variables of launch.ENVIRONMENT no node can join later than the first round."""
    for group, invocation in many_by(manifest, C10D):
        found = nodes(invocation)
        missing = dict(ENVIRONMENT.items() - group.environment.items())
        if not missing or found is None or not group.whole:
            continue
        ((name, value),) = missing.items()
        is_elastic = found[0] < found[1]
        is_replaced = group.job_path and group.pods_per_job is None and _retries(group)
        if not is_elastic and not is_replaced:
            continue
        report = error if is_elastic else warning
        yield report(
            at_variable(group, name),
            "an elastic job that breaks when its nodes change"
            if is_elastic
            else "a pod that is replaced cannot join again",
            evidence=f"{name} is not {value}; nnodes {invocation.nnodes}",
            cause="with the agents' store shared, a node that joins after the first round waits"
            " for a MASTER_ADDR that nobody sets again; after read_timeout every agent dies of it"
            " (pytorch#150916)",
            remedy=f'set {name}: "{value}" in the container\'s env',
        )


def grace_period(manifest: Manifest) -> Iterator[Finding]:
    for group, invocation in manifest.trainers:
        if not group.whole:
            continue
        said = invocation.shutdown_timeout or group.environment.get(
            SHUTDOWN_VARIABLE, str(SHUTDOWN_TIMEOUT_S)
        )
        grace = whole(group.template.get("terminationGracePeriodSeconds"), DEFAULT_GRACE_S)
        if said.isdigit() and grace < int(said) + SPARE_S:
            yield warning(
                at_template(group, "terminationGracePeriodSeconds"),
                "the pod is killed before torchrun has ended its workers",
                evidence=f"terminationGracePeriodSeconds {grace}, shutdown timeout {said} s",
                cause="after SIGTERM torchrun waits for its workers, which may write a checkpoint,"
                " and only then ends itself",
                remedy=f"write terminationGracePeriodSeconds: {int(said) + SPARE_S}, and more by"
                " the time that a checkpoint takes",
            )


def signals(manifest: Manifest) -> Iterator[Finding]:
    for group, invocation in manifest.trainers:
        if not invocation.pid1:
            yield warning(
                at_flag(group, invocation, ""),
                "a shell is in front of torchrun and keeps the signals to itself",
                evidence="torchrun is one of several commands, without exec",
                cause="SIGTERM goes to the first process of the container: a shell does not pass it"
                " on, and the workers are killed without a checkpoint when the grace period ends",
                remedy="write exec torchrun …",
            )


def exit_codes(manifest: Manifest) -> Iterator[Finding]:
    """Exit codes that plain torchrun never ends with."""
    for group, invocation in manifest.trainers:
        if invocation.program is Program.LAUNCHER or not invocation.pid1:
            continue
        for path, rule in _exit_code_rules(group):
            name = rule.get("containerName", group.trainer.get("name"))
            values = [code for code in rule.get("values", []) if isinstance(code, int)]
            never = sorted(set(values) - _PLAIN_CODES)
            if never and name == group.trainer.get("name"):
                yield warning(
                    at_job(group, *path, "values"),
                    f"torchrun never ends with {', '.join(map(str, never))}",
                    evidence=f"onExitCodes: {rule.get('operator')} {values}",
                    cause="torchrun ends with 1 whatever its workers end with, also when one is"
                    " killed and when it is told to end itself",
                    remedy="tell by onPodConditions (DisruptionTarget), or start it by python -m"
                    " muster.launcher, which has a code for each",
                )


def _exit_code_rules(group: PodGroup) -> Iterator[tuple[tuple[Key, ...], dict[str, Any]]]:
    rules = mappings(mapping(group.job.get("podFailurePolicy")).get("rules"))
    for index, rule in enumerate(rules):
        if "onExitCodes" in rule:
            yield (
                ("podFailurePolicy", "rules", index, "onExitCodes"),
                mapping(rule["onExitCodes"]),
            )


def failure_rule(manifest: Manifest) -> Iterator[Finding]:
    """A rule of podFailurePolicy that the API server refuses, or that is for nobody."""
    for group in manifest.groups:
        names = {container.get("name") for container in group.containers}
        names |= {each.get("name") for each in mappings(group.template.get("initContainers"))}
        for path, rule in _exit_code_rules(group):
            name, values = rule.get("containerName"), rule.get("values", [])
            if name is not None and name not in names:
                yield error(
                    at_job(group, *path, "containerName"),
                    f"a failure policy for the container {name!r}, which the pod does not have",
                    evidence=f"containers: {', '.join(sorted(map(str, names)))}",
                    cause="the API server refuses it",
                    remedy="name one of the pod's containers, or none",
                )
            if not values or (0 in values and rule.get("operator") == "In"):
                yield error(
                    at_job(group, *path, "values"),
                    "a failure policy for exit code 0"
                    if values
                    else "a failure policy for no exit code",
                    evidence=f"values: {values}",
                    cause="the API server wants at least one code, and not 0 with In",
                    remedy="give the codes that the rule is for",
                )


RULES: Final = (
    Rule("restart-policy", restart_policy),
    Rule("never-ends", never_ends),
    Rule("needs-restart-never", needs_never),
    Rule("per-index", per_index),
    Rule("backoff-limit", backoff_limit),
    Rule("pod-replacement-policy", replacement_policy),
    Rule("share-store", share_store),
    Rule("grace-period", grace_period),
    Rule("signals", signals),
    Rule("exit-codes", exit_codes),
    Rule("failure-rule", failure_rule),
)
