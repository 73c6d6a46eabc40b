"""The controllers' decisions, pod by pod, over manifests as a user writes them."""

from collections.abc import Sequence

import pytest
import yaml
from tests.unit.conftest import ROOT

from muster.manifests import documents, workloads
from muster.manifests.workloads import PodGroup
from muster.rehearse import controller as controllers
from muster.rehearse.controller import Action, Controller, Decision, PodEnd

NOTHING, REPLACE, FAIL = Action.NOTHING, Action.REPLACE, Action.FAIL
RESTART_ALL = Action.RESTART_ALL


def group(text: str) -> PodGroup:
    return workloads.pod_groups(documents.parse(text, "job.yaml"))[0]


def job(settings: str, *, pods: int = 3, restart_policy: str = "Never") -> Controller:
    """The controller of a Job with `settings`, YAML in braces or empty."""
    spec = {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        **yaml.safe_load(settings or "{}"),
        "template": {
            "spec": {
                "restartPolicy": restart_policy,
                "containers": [{"name": "train", "command": ["torchrun", "a.py"]}],
            }
        },
    }
    data = {"kind": "Job", "metadata": {"name": "demo", "namespace": "ml"}, "spec": spec}
    return controllers.controller(group(yaml.safe_dump(data)))


def job_set(policy: str, *, jobs: int = 1, pods: int = 2, settings: str = "{}") -> Controller:
    """The controller of a JobSet with the failurePolicy `policy`, over Jobs with `settings`."""
    pod = {"containers": [{"name": "train", "command": ["torchrun", "a.py"]}]}
    spec = {
        "completions": pods,
        "parallelism": pods,
        "backoffLimit": 0,
        **yaml.safe_load(settings),
        "template": {"spec": {"restartPolicy": "Never", **pod}},
    }
    replicated = {"name": "node", "replicas": jobs, "template": {"spec": spec}}
    data = {
        "kind": "JobSet",
        "metadata": {"name": "js"},
        "spec": {"failurePolicy": yaml.safe_load(policy), "replicatedJobs": [replicated]},
    }
    return controllers.controller(group(yaml.safe_dump(data)))


def end(
    index: int = 0, code: int | None = 1, *, container: str = "train", disrupted: bool = False
) -> PodEnd:
    return PodEnd(index, container, code, disrupted)


def decisions(controller: Controller, ends: Sequence[PodEnd]) -> list[Decision]:
    return [controller.ended(each) for each in ends]


def actions(controller: Controller, ends: Sequence[PodEnd]) -> list[Action]:
    return [decision.action for decision in decisions(controller, ends)]


# ---- a Job's limits ----------------------------------------------------------------------------


def test_without_a_limit_a_job_fails_with_the_seventh_pod_whatever_its_index() -> None:
    ends = [end(index % 3) for index in range(7)]
    *before, last = decisions(job(""), ends)
    assert {decision.action for decision in before} == {REPLACE}
    assert (last.action, last.reason) == (FAIL, "BackoffLimitExceeded")
    assert "failure 7 of all pods, backoffLimit is 6" in last.why


def test_with_backoff_limit_0_the_first_failure_is_the_end() -> None:
    assert actions(job("{backoffLimit: 0}"), [end()]) == [FAIL]


def test_a_limit_by_index_counts_each_index_alone() -> None:
    controller = job("{backoffLimitPerIndex: 1}")
    ends = [end(0), end(1), end(2), end(1)]
    assert actions(controller, ends) == [REPLACE, REPLACE, REPLACE, NOTHING]


def test_a_limit_by_index_alone_sets_none_for_all() -> None:
    controller = job("{backoffLimitPerIndex: 100}")
    assert set(actions(controller, [end(index % 3) for index in range(30)])) == {REPLACE}


def test_a_limit_for_all_holds_beside_one_by_index() -> None:
    controller = job("{backoffLimitPerIndex: 5, backoffLimit: 2}")
    *_, last = decisions(controller, [end(0), end(1), end(2)])
    assert (last.action, last.reason) == (FAIL, "BackoffLimitExceeded")


def test_more_failed_indexes_than_allowed_fail_the_job_at_once() -> None:
    controller = job("{backoffLimitPerIndex: 0, maxFailedIndexes: 1}")
    first, second = decisions(controller, [end(0), end(2)])
    assert (first.action, second.action) == (NOTHING, FAIL)
    assert second.reason == "MaxFailedIndexesExceeded"


def test_a_job_goes_on_without_an_index_and_fails_when_the_last_pod_succeeds() -> None:
    controller = job("{backoffLimitPerIndex: 0}")
    assert controller.ended(end(1)).action is NOTHING
    assert controller.succeeded(0) is None
    last = controller.succeeded(2)
    assert last is not None
    assert (last.action, last.reason) == (FAIL, "FailedIndexes")
    assert last.why.endswith("indexes given up: 1")


def test_a_job_whose_last_pod_is_given_up_fails_for_its_failed_indexes() -> None:
    controller = job("{backoffLimitPerIndex: 0}")
    controller.succeeded(0)
    controller.succeeded(1)
    last = controller.ended(end(2))
    assert (last.action, last.reason) == (FAIL, "FailedIndexes")


def test_success_alone_is_followed_by_nothing() -> None:
    controller = job("{backoffLimitPerIndex: 0}")
    assert [controller.succeeded(index) for index in range(3)] == [None, None, None]


# ---- restartPolicy OnFailure -------------------------------------------------------------------


def test_restarts_of_containers_may_not_reach_the_limit() -> None:
    controller = job("{backoffLimit: 2}", restart_policy="OnFailure")
    assert actions(controller, [end(0), end(1)]) == [REPLACE, FAIL]


def test_with_backoff_limit_0_no_container_is_started_again() -> None:
    assert actions(job("{backoffLimit: 0}", restart_policy="OnFailure"), [end()]) == [FAIL]


def test_restarts_of_a_pod_that_succeeded_are_forgotten() -> None:
    controller = job("{backoffLimit: 2}", restart_policy="OnFailure")
    controller.ended(end(0))
    controller.succeeded(0)
    assert actions(controller, [end(1), end(1)]) == [REPLACE, FAIL]


def test_a_pod_that_is_evicted_is_a_failure_and_no_restart() -> None:
    controller = job("{backoffLimit: 1}", restart_policy="OnFailure")
    assert actions(controller, [end(0, disrupted=True)]) == [REPLACE]
    assert actions(controller, [end(0, disrupted=True)]) == [FAIL]


# ---- podFailurePolicy --------------------------------------------------------------------------

IGNORE_DISRUPTED = "{action: Ignore, onPodConditions: [{type: DisruptionTarget, status: 'True'}]}"
FAIL_ON_2 = "{action: FailJob, onExitCodes: {operator: In, values: [2]}}"


def with_rules(*rules: str, more: str = "backoffLimit: 0") -> Controller:
    return job(f"{{{more}, podFailurePolicy: {{rules: [{', '.join(rules)}]}}}}")


def test_what_is_ignored_is_never_counted() -> None:
    controller = with_rules(IGNORE_DISRUPTED)
    assert actions(controller, [end(disrupted=True)] * 20) == [REPLACE] * 20
    assert actions(controller, [end()]) == [FAIL]


def test_the_first_rule_that_fits_counts() -> None:
    disrupted_with_2 = end(code=2, disrupted=True)
    assert actions(with_rules(IGNORE_DISRUPTED, FAIL_ON_2), [disrupted_with_2]) == [REPLACE]
    assert actions(with_rules(FAIL_ON_2, IGNORE_DISRUPTED), [disrupted_with_2]) == [FAIL]


def test_a_node_that_died_tells_no_exit_code() -> None:
    controller = with_rules(FAIL_ON_2.replace("In, values: [2]", "NotIn, values: [3]"))
    first = controller.ended(end(code=None, disrupted=True))
    assert first.reason == "BackoffLimitExceeded"
    assert first.why.startswith("BackoffLimitExceeded: pod 0 with the condition DisruptionTarget,")


@pytest.mark.parametrize(
    ("codes", "code", "fits"),
    [
        ("{operator: In, values: [2, 3]}", 3, True),
        ("{operator: In, values: [2, 3]}", 4, False),
        ("{operator: NotIn, values: [2, 3]}", 4, True),
        ("{operator: NotIn, values: [2, 3]}", 2, False),
        ("{operator: NotIn, values: [2, 3]}", 0, False),
        ("{operator: In, values: [1], containerName: train}", 1, True),
        ("{operator: In, values: [1], containerName: log}", 1, False),
        ("{operator: NotIn, values: [2], containerName: log}", 1, False),
    ],
)
def test_a_rule_for_exit_codes_fits_by_code_and_container(
    codes: str, code: int, fits: bool
) -> None:
    rule = f"{{action: FailJob, onExitCodes: {codes}}}"
    decision = with_rules(rule, more="backoffLimit: 5").ended(end(code=code))
    assert (decision.reason == "PodFailurePolicy") is fits


def test_the_exit_code_of_an_init_container_counts_too() -> None:
    (decision,) = decisions(with_rules(FAIL_ON_2), [end(code=2, container="data")])
    assert decision.reason == "PodFailurePolicy"
    assert decision.message == (
        "Container data for pod ml/demo-0 failed with exit code 2 matching FailJob rule at index 0"
    )


@pytest.mark.parametrize(("status", "fits"), [("'True'", True), ("'False'", False)])
def test_a_condition_fits_with_its_status_only(status: str, fits: bool) -> None:
    rule = IGNORE_DISRUPTED.replace("'True'", status)
    (action,) = actions(with_rules(rule), [end(disrupted=True)])
    assert (action is REPLACE) is fits


def test_the_status_of_a_condition_is_true_where_it_is_left_out() -> None:
    rule = IGNORE_DISRUPTED.replace(", status: 'True'", "")
    assert actions(with_rules(rule), [end(disrupted=True)]) == [REPLACE]


def test_a_rule_can_count_what_a_later_one_would_end() -> None:
    rules = [FAIL_ON_2.replace("FailJob", "Count"), FAIL_ON_2]
    assert actions(with_rules(*rules, more="backoffLimit: 1"), [end(code=2)]) == [REPLACE]


def test_fail_index_gives_an_index_up_before_its_limit() -> None:
    rule = FAIL_ON_2.replace("FailJob", "FailIndex")
    controller = with_rules(rule, more="backoffLimitPerIndex: 3")
    assert actions(controller, [end(0, 1), end(0, 2)]) == [REPLACE, NOTHING]


# ---- a JobSet ----------------------------------------------------------------------------------


def test_a_job_set_starts_all_again_as_often_as_it_says() -> None:
    controller = job_set("{maxRestarts: 2}")
    made = decisions(controller, [end(0), end(1), end(0)])
    assert [decision.action for decision in made] == [RESTART_ALL, RESTART_ALL, FAIL]
    assert made[1].why.endswith("restart 2 of 2")
    assert made[2].why.endswith("maxRestarts is 2")


def test_a_job_set_without_a_policy_fails_with_its_first_job() -> None:
    (decision,) = decisions(job_set("{}"), [end()])
    assert decision.action is FAIL
    assert decision.why.endswith("the JobSet has no failurePolicy")


def test_a_restart_begins_to_count_anew() -> None:
    controller = job_set("{maxRestarts: 1}", settings="{backoffLimit: 1}")
    ends = [end(0), end(1), end(0), end(1)]
    assert actions(controller, ends) == [REPLACE, RESTART_ALL, REPLACE, FAIL]


def test_each_job_of_a_job_set_has_its_own_limit() -> None:
    controller = job_set("{maxRestarts: 9}", jobs=3, pods=1, settings="{backoffLimit: 1}")
    assert actions(controller, [end(0), end(1), end(2)]) == [REPLACE] * 3
    assert actions(controller, [end(1)]) == [RESTART_ALL]


@pytest.mark.parametrize(
    ("settings", "ends", "reason"),
    [
        ("{backoffLimit: 0}", [end()], "BackoffLimitExceeded"),
        (f"{{podFailurePolicy: {{rules: [{FAIL_ON_2}]}}}}", [end(code=2)], "PodFailurePolicy"),
        (
            "{backoffLimit: 9, backoffLimitPerIndex: 0, maxFailedIndexes: 0}",
            [end()],
            "MaxFailedIndexesExceeded",
        ),
        ("{backoffLimit: 9, backoffLimitPerIndex: 0}", [end(0), end(1)], "FailedIndexes"),
    ],
)
def test_a_rule_fits_the_reason_of_the_jobs_failure(
    settings: str, ends: list[PodEnd], reason: str
) -> None:
    policy = "{maxRestarts: 5, rules: [{action: FailJobSet, onJobFailureReasons: [REASON]}]}"
    fitting = job_set(policy.replace("REASON", reason), settings=settings)
    assert decisions(fitting, ends)[-1].why.endswith("its rule says FailJobSet")
    other = job_set(policy.replace("REASON", "DeadlineExceeded"), settings=settings)
    assert decisions(other, ends)[-1].action is RESTART_ALL


def test_the_first_rule_of_a_job_set_that_fits_counts() -> None:
    rules = "[{action: RestartJobSet}, {action: FailJobSet}]"
    assert actions(job_set(f"{{maxRestarts: 1, rules: {rules}}}"), [end()]) == [RESTART_ALL]
    rules = "[{action: FailJobSet}, {action: RestartJobSet}]"
    assert actions(job_set(f"{{maxRestarts: 1, rules: {rules}}}"), [end()]) == [FAIL]


@pytest.mark.parametrize(("target", "action"), [("node", FAIL), ("driver", RESTART_ALL)])
def test_a_rule_holds_for_the_replicated_jobs_that_it_names(target: str, action: Action) -> None:
    rule = f"{{action: FailJobSet, targetReplicatedJobs: [{target}]}}"
    assert actions(job_set(f"{{maxRestarts: 1, rules: [{rule}]}}"), [end()]) == [action]


@pytest.mark.parametrize(
    ("pattern", "action"), [("exit code 2 matching", FAIL), ("exit code 3", RESTART_ALL)]
)
def test_a_rule_reads_the_message_of_the_jobs_failure(pattern: str, action: Action) -> None:
    rule = f"{{action: FailJobSet, onJobFailureMessagePatterns: ['{pattern}']}}"
    controller = job_set(
        f"{{maxRestarts: 1, rules: [{rule}]}}",
        settings=f"{{podFailurePolicy: {{rules: [{FAIL_ON_2}]}}}}",
    )
    assert actions(controller, [end(code=2)]) == [action]


def test_a_restart_that_is_not_counted_never_ends() -> None:
    rule = "{action: RestartJobSetAndIgnoreMaxRestarts}"
    controller = job_set(f"{{maxRestarts: 0, rules: [{rule}]}}")
    assert actions(controller, [end()] * 5) == [RESTART_ALL] * 5


def test_a_job_of_one_pod_is_started_again_alone() -> None:
    policy = "{maxRestarts: 1, rules: [{action: RestartJob}]}"
    controller = job_set(policy, jobs=3, pods=1)
    assert actions(controller, [end(0), end(1), end(0)]) == [REPLACE, REPLACE, FAIL]


def test_the_only_job_of_a_job_set_is_started_again_with_all_its_pods() -> None:
    policy = "{maxRestarts: 1, rules: [{action: RestartJobAndIgnoreMaxRestarts}]}"
    assert actions(job_set(policy), [end()] * 3) == [RESTART_ALL] * 3


def test_each_job_of_a_job_set_fails_for_its_own_failed_indexes() -> None:
    settings = "{backoffLimit: 9, backoffLimitPerIndex: 0}"
    controller = job_set("{maxRestarts: 1}", jobs=3, settings=settings)
    assert controller.ended(end(2)).action is NOTHING
    assert controller.succeeded(0) is None
    last = controller.succeeded(3)
    assert last is not None
    assert last.why.startswith("FailedIndexes: ")


def test_a_job_set_restarts_for_an_index_that_was_given_up_before_the_last_success() -> None:
    settings = "{backoffLimit: 9, backoffLimitPerIndex: 0}"
    controller = job_set("{maxRestarts: 1}", settings=settings)
    assert controller.ended(end(0)).action is NOTHING
    last = controller.succeeded(1)
    assert last is not None
    assert last.action is RESTART_ALL


# ---- the repository's own manifests ------------------------------------------------------------


def base_job() -> Controller:
    text = (ROOT / "k8s" / "base" / "job.yaml").read_text()
    return controllers.controller(group(text))


@pytest.mark.parametrize(
    ("ends", "action"),
    [
        ([end(code=None, disrupted=True)] * 9, REPLACE),
        ([end(code=12)] * 9, REPLACE),
        ([end(code=2)], FAIL),
        ([end(0, 10)] * 3, REPLACE),
        ([end(0, 10)] * 4, FAIL),
    ],
)
def test_the_base_job_ignores_preemption_and_gives_each_index_four_tries(
    ends: list[PodEnd], action: Action
) -> None:
    assert decisions(base_job(), ends)[-1].action is action


def kind(name: str) -> Controller:
    """The controller of k8s/kinds/NAME.yaml, its empty spec filled with the base's Job."""
    base = (ROOT / "k8s" / "base" / "job.yaml").read_text()
    spec = next(each for each in yaml.safe_load_all(base) if each["kind"] == "Job")["spec"]
    found = list(yaml.safe_load_all((ROOT / "k8s" / "kinds" / "jobset.yaml").read_text()))
    job_set, own = found
    del spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]
    job_set["spec"]["replicatedJobs"][0]["template"]["spec"] = {**spec, **own}
    if name == "jobset":
        return controllers.controller(group(yaml.safe_dump(job_set)))
    runtime, train_job = yaml.safe_load_all((ROOT / "k8s" / "kinds" / "trainjob.yaml").read_text())
    template = job_set["spec"]["replicatedJobs"][0]["template"]
    template["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] = "trainer"
    runtime["spec"]["template"]["spec"] = job_set["spec"]
    return controllers.controller(group(yaml.safe_dump_all([runtime, train_job])))


@pytest.mark.parametrize("name", ["jobset", "trainjob"])
def test_the_job_set_restarts_without_counting_when_a_pod_was_disrupted(name: str) -> None:
    controller = kind(name)
    assert actions(controller, [end(code=None, disrupted=True)] * 9) == [RESTART_ALL] * 9
    assert actions(controller, [end(1, 10)] * 4) == [RESTART_ALL] * 3 + [FAIL]


@pytest.mark.parametrize("name", ["jobset", "trainjob"])
def test_the_job_set_fails_at_once_for_wrong_arguments(name: str) -> None:
    (decision,) = decisions(kind(name), [end(code=2)])
    assert decision.action is FAIL
    assert decision.why.endswith("its rule says FailJobSet")


# ---- without a Job -----------------------------------------------------------------------------

POD = """\
kind: Pod
metadata: {name: demo}
spec:
  RESTART
  containers: [{name: train, command: [torchrun, a.py]}]
"""


@pytest.mark.parametrize(
    ("restart", "disrupted", "action"),
    [
        ("restartPolicy: Never", False, FAIL),
        ("restartPolicy: OnFailure", False, REPLACE),
        ("nodeName: a", False, REPLACE),
        ("restartPolicy: OnFailure", True, FAIL),
    ],
)
def test_a_bare_pod_is_started_again_by_the_kubelet_only(
    restart: str, disrupted: bool, action: Action
) -> None:
    controller = controllers.controller(group(POD.replace("RESTART", restart)))
    assert actions(controller, [end(disrupted=disrupted)]) == [action]
    assert controller.succeeded(0) is None


def test_a_stateful_set_replaces_a_pod_that_was_evicted() -> None:
    text = """\
kind: StatefulSet
metadata: {name: demo}
spec: {template: {spec: {containers: [{name: train, command: [torchrun, a.py]}]}}}
"""
    assert actions(controllers.controller(group(text)), [end(disrupted=True)]) == [REPLACE]
