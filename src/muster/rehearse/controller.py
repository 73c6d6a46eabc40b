"""What Kubernetes' controllers decide when a pod has ended, by the policy of the manifest.

Only the decisions: no waiting between two tries, no scheduling.
https://kubernetes.io/docs/concepts/workloads/controllers/job/#pod-failure-policy
https://jobset.sigs.k8s.io/docs/concepts/#failure-policy
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

from muster.manifests.documents import at, mapping, mappings, whole
from muster.manifests.workloads import DEFAULT_BACKOFF_LIMIT, PodGroup

# backoffLimit's default where backoffLimitPerIndex is set
NO_LIMIT: Final = 2**31 - 1
# where a replicated job stands in a JobSet's spec: replicatedJobs, its number, template, spec
_DEPTH_OF_JOB: Final = 4


@dataclass(frozen=True)
class PodEnd:
    """A pod that ended. `disrupted` is what the condition DisruptionTarget says.

    `exit_code` is None where its node died: then nobody is left to tell it.
    """

    index: int
    container: str
    exit_code: int | None
    disrupted: bool


class Action(StrEnum):
    """What follows."""

    NOTHING = "nothing"
    REPLACE = "replace the pod"
    RESTART_ALL = "start all pods again"
    FAIL = "fail"


@dataclass(frozen=True)
class Decision:
    """What follows, and by which part of the policy.

    `reason` and `message` are those of the condition Failed of a Job that fails: a JobSet's rules
    read them.
    """

    action: Action
    why: str
    reason: str = ""
    message: str = ""


class Controller(Protocol):
    """Decides, pod by pod; it remembers what it counted."""

    def ended(self, end: PodEnd) -> Decision:
        """What follows the end of a pod that did not succeed."""

    def succeeded(self, index: int) -> Decision | None:
        """What follows the success of a pod; None when nothing does."""


@dataclass
class JobController:
    """One Job's: counts failures by index or in all.

    https://github.com/kubernetes/kubernetes/blob/master/pkg/controller/job/job_controller.go
    """

    group: PodGroup
    failures: dict[int, int] = field(default_factory=dict)
    restarts: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)

    def ended(self, end: PodEnd) -> Decision:
        position, rule = self._rule(end)
        action = str(rule.get("action", "Count"))
        if action == "FailJob":
            message = f"{self._told(end, rule)} matching FailJob rule at index {position}"
            return _failed("PodFailurePolicy", message, f"{_why(end)} matches FailJob")
        if action == "Ignore":
            return Decision(Action.REPLACE, f"{_why(end)} is ignored by podFailurePolicy")
        if self.group.template.get("restartPolicy") == "OnFailure" and not end.disrupted:
            return self._restart(end)
        return self._count(end, gives_up=action == "FailIndex")

    def succeeded(self, index: int) -> Decision | None:
        self.done.add(index)
        self.restarts.pop(index, None)
        return self._over(f"pod {index} was the last to end")

    def _rule(self, end: PodEnd) -> tuple[int, Mapping[str, Any]]:
        """The first rule that fits, and its number."""
        rules = mappings(mapping(self.group.job.get("podFailurePolicy")).get("rules"))
        fitting = ((at, rule) for at, rule in enumerate(rules) if _matches(rule, end))
        return next(fitting, (0, {}))

    def _told(self, end: PodEnd, rule: Mapping[str, Any]) -> str:
        """What happened, in the controller's own words."""
        pod = f"{self.group.namespace}/{self.group.hostname(end.index)}"
        if "onExitCodes" in rule:
            return f"Container {end.container} for pod {pod} failed with exit code {end.exit_code}"
        return f"Pod {pod} has condition DisruptionTarget"

    def _restart(self, end: PodEnd) -> Decision:
        """The kubelet starts the container again, and the restarts of pods that run are counted."""
        self.restarts[end.index] = self.restarts.get(end.index, 0) + 1
        count, limit = sum(self.restarts.values()), self._backoff_limit
        why = f"{_why(end)}, restart {count} of all pods, backoffLimit is {limit}"
        # unlike failures of pods, restarts may not reach the limit
        if count >= max(limit, 1):
            return _backoff_limit_exceeded(why)
        return Decision(Action.REPLACE, why)

    def _count(self, end: PodEnd, *, gives_up: bool) -> Decision:
        self.restarts.pop(end.index, None)
        self.failures[end.index] = self.failures.get(end.index, 0) + 1
        count, limit = sum(self.failures.values()), self._backoff_limit
        why = f"{_why(end)}, failure {count} of all pods, backoffLimit is {limit}"
        if count > limit:
            return _backoff_limit_exceeded(why)
        if gives_up:
            return self._give_up(end.index, f"{_why(end)} matches FailIndex")
        if "backoffLimitPerIndex" in self.group.job:
            return self._count_of_index(end)
        return Decision(Action.REPLACE, why)

    def _count_of_index(self, end: PodEnd) -> Decision:
        count, limit = self.failures[end.index], whole(self.group.job["backoffLimitPerIndex"], 0)
        why = f"{_why(end)}, failure {count} of index {end.index}, backoffLimitPerIndex is {limit}"
        return self._give_up(end.index, why) if count > limit else Decision(Action.REPLACE, why)

    @property
    def _backoff_limit(self) -> int:
        by_index = "backoffLimitPerIndex" in self.group.job
        return whole(
            self.group.job.get("backoffLimit"), NO_LIMIT if by_index else DEFAULT_BACKOFF_LIMIT
        )

    def _give_up(self, index: int, why: str) -> Decision:
        self.given_up.add(index)
        most = self.group.job.get("maxFailedIndexes")
        if most is not None and len(self.given_up) > whole(most, 0):
            message = "Job has exceeded the specified maximal number of failed indexes"
            return _failed("MaxFailedIndexesExceeded", message, why)
        return self._over(why) or Decision(Action.NOTHING, f"index {index} is given up: {why}")

    def _over(self, why: str) -> Decision | None:
        """That the Job fails now that its last pod has ended: one without success is enough."""
        pods = self.group.pods_per_job or self.group.replicas
        if not self.given_up or len(self.given_up | self.done) < pods:
            return None
        indexes = ", ".join(map(str, sorted(self.given_up)))
        message = "Job has failed indexes"
        return _failed("FailedIndexes", message, f"{why}; indexes given up: {indexes}")


@dataclass
class JobSetController:
    """A JobSet's, over the Jobs of one replicated job: restarts, or fails.

    https://github.com/kubernetes-sigs/jobset/blob/main/pkg/controllers/failure_policy.go
    """

    group: PodGroup
    jobs: dict[int, JobController] = field(default_factory=dict)
    restarts: int = 0
    restarts_of_job: dict[int, int] = field(default_factory=dict)

    def ended(self, end: PodEnd) -> Decision:
        return self._follow(self._job(end.index).ended(end), self._number(end.index))

    def succeeded(self, index: int) -> Decision | None:
        decision = self._job(index).succeeded(index)
        return None if decision is None else self._follow(decision, self._number(index))

    def _number(self, index: int) -> int:
        return index // (self.group.pods_per_job or 1)

    def _job(self, index: int) -> JobController:
        return self.jobs.setdefault(self._number(index), JobController(self.group))

    def _follow(self, decision: Decision, number: int) -> Decision:
        """What follows from what happens to the Job `number`."""
        if decision.action is not Action.FAIL:
            return decision
        path = (*self.group.job_path[:-_DEPTH_OF_JOB], "failurePolicy")
        policy = mapping(at(self.group.document.data, path))
        if not policy:
            return Decision(Action.FAIL, f"{decision.why}; the JobSet has no failurePolicy")
        rules = mappings(policy.get("rules"))
        rule = next((each for each in rules if self._fits(each, decision)), {})
        action = str(rule.get("action", "RestartJobSet"))
        if action == "FailJobSet":
            return Decision(Action.FAIL, f"{decision.why}; its rule says FailJobSet")
        most = whole(policy.get("maxRestarts"), 0)
        alone = action.startswith("RestartJob") and not action.startswith("RestartJobSet")
        if action.endswith("IgnoreMaxRestarts"):
            told = "this restart is not counted"
        elif max(self.restarts, self.restarts_of_job.get(number, 0) if alone else 0) >= most:
            return Decision(Action.FAIL, f"{decision.why}; maxRestarts is {most}")
        else:
            told = f"restart {self._counted(number if alone else None)} of {most}"
        return self._restart(f"{decision.why}; {told}", number if alone else None)

    def _counted(self, number: int | None) -> int:
        """One restart more, of all or of the Job `number`."""
        if number is None:
            self.restarts += 1
            return self.restarts
        self.restarts_of_job[number] = self.restarts_of_job.get(number, 0) + 1
        return self.restarts_of_job[number]

    def _restart(self, why: str, number: int | None) -> Decision:
        if number is not None and self.group.pods_per_job == 1:
            self.jobs.pop(number)
            return Decision(Action.REPLACE, why)
        # a Job of several pods among several Jobs is the one that is not played alone
        self.jobs.clear()
        return Decision(Action.RESTART_ALL, why)

    def _fits(self, rule: Mapping[str, Any], failed: Decision) -> bool:
        reasons = _texts(rule.get("onJobFailureReasons"))
        patterns = _texts(rule.get("onJobFailureMessagePatterns"))
        targets = _texts(rule.get("targetReplicatedJobs"))
        name = self.group.labels.get("jobset.sigs.k8s.io/replicatedjob-name", "")
        return (
            (not reasons or failed.reason in reasons)
            and (not targets or name in targets)
            and (not patterns or any(re.search(pattern, failed.message) for pattern in patterns))
        )


@dataclass(frozen=True)
class PodController:
    """No Job's: the kubelet starts a pod again, if at all, and nobody one that stood alone."""

    group: PodGroup

    def ended(self, end: PodEnd) -> Decision:
        # https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#restart-policy
        restart_policy = self.group.template.get("restartPolicy", "Always")
        why = f"{_why(end)}, restartPolicy is {restart_policy}"
        if restart_policy == "Never" or (self.group.kind == "Pod" and end.disrupted):
            return Decision(Action.FAIL, f"{why}, and no controller that is played replaces it")
        return Decision(Action.REPLACE, why)

    def succeeded(self, index: int) -> Decision | None:  # noqa: ARG002
        return None


def controller(group: PodGroup) -> Controller:
    """What decides over the pods of `group`."""
    if not group.job:
        return PodController(group)
    return JobController(group) if group.kind == "Job" else JobSetController(group)


# ---- rules -------------------------------------------------------------------------------------


def _matches(rule: Mapping[str, Any], end: PodEnd) -> bool:
    """As pod_failure_policy.go, in the folder of the Job controller, has it."""
    conditions = mappings(rule.get("onPodConditions"))
    codes = mapping(rule.get("onExitCodes"))
    if not codes:
        wanted = {"type": "DisruptionTarget", "status": "True"}
        return end.disrupted and any({"status": "True", **each} == wanted for each in conditions)
    if end.exit_code in {0, None} or codes.get("containerName", end.container) != end.container:
        return False
    listed = end.exit_code in _numbers(codes.get("values"))
    return listed if codes.get("operator") == "In" else not listed


def _numbers(value: object) -> list[int]:
    return [each for each in value if isinstance(each, int)] if isinstance(value, list) else []


def _texts(value: object) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else []


def _failed(reason: str, message: str, why: str) -> Decision:
    return Decision(Action.FAIL, f"{reason}: {why}", reason, message)


def _backoff_limit_exceeded(why: str) -> Decision:
    return _failed("BackoffLimitExceeded", "Job has reached the specified backoff limit", why)


def _why(end: PodEnd) -> str:
    parts = [] if end.exit_code is None else [f"exit code {end.exit_code}"]
    if end.disrupted:
        parts.append("the condition DisruptionTarget")
    return f"pod {end.index} with {' and '.join(parts)}"
