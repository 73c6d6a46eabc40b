"""Rehearsals that are over, to Findings."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from muster.engine import ContainerSpec, Place
from muster.finding import Finding, Severity
from muster.launch import ExitStatus
from muster.manifests import documents, workloads
from muster.manifests.workloads import PodGroup
from muster.rehearse import judge
from muster.rehearse.actor import Actor, Meeting
from muster.rehearse.faults import Fault, Plan
from muster.rehearse.judge import STRIKES, Play
from muster.rehearse.pods import Cast, Role
from muster.topology import NodeRange

JOB = """\
apiVersion: batch/v1
kind: Job
metadata: {name: demo}
spec:
  completionMode: Indexed
  parallelism: 3
  completions: 3
  template:
    spec:
      containers:
      - name: log
      - name: train
        command: [torchrun, --nnodes=3, train.py]
"""
TRAINER = "job.yaml:12"
THREE = NodeRange(3, 3)
ELASTIC = NodeRange(2, 3)
EVERY_FAULT = [None, *Fault]


def group(text: str = JOB) -> PodGroup:
    return workloads.pod_groups(documents.parse(text, "job.yaml"))[0]


@dataclass
class Pod:
    """A pod as a test tells it. `nodes` are the sizes of its rounds, `rank` its rank in all."""

    index: int
    code: int | None = 0
    nodes: Sequence[int] = (3,)
    rank: int | None = None
    generation: int = 0
    ended: float = 10.0
    killed: bool = False
    told: bool = False
    says: Sequence[str] = field(default_factory=list)

    def actor(self) -> Actor:
        spec = ContainerSpec(image="muster:cpu", command=(), shm_bytes=2**26)
        rank = self.index if self.rank is None else self.rank
        actor = Actor(
            self.index,
            self.generation,
            f"demo-{self.index}",
            Cast((), Role("train", spec, Place()), 30),
            meetings=[Meeting(rank, size, (rank,)) for size in self.nodes],
            started=0.0,
            ended=None if self.code is None else self.ended,
            told_to_end=5.0 if self.told else None,
            exit_code=self.code,
            killed=self.killed,
        )
        actor.output.extend(self.says)
        return actor


def play(
    pods: Sequence[Pod],
    fault: Fault | None = None,
    *,
    nodes: NodeRange | None = THREE,
    away: frozenset[int] = frozenset(),
    failure: str | None = None,
    struck: bool = True,
    cut_off: bool = False,
    text: str = JOB,
) -> Play:
    """The play in which the pods came in this order; the last one of an index is on stage."""
    past = [pod.actor() for pod in pods]
    on_stage = {actor.index: actor for actor in past}
    return Play(
        group=group(text),
        pods=group(text).replicas,
        plan=Plan(fault),
        nodes=nodes,
        cast=[actor for _, actor in sorted(on_stage.items())],
        past=past,
        succeeded=frozenset(index for index, each in on_stage.items() if each.exit_code == 0),
        away=away,
        failure=failure,
        struck=struck,
        cut_off=cut_off,
    )


def found(over: Play) -> Finding:
    (finding,) = judge.findings(over)
    return finding


ALL_SUCCEED = (Pod(0), Pod(1), Pod(2))


# ---- nothing is wrong --------------------------------------------------------------------------


def test_a_job_that_completes_is_in_order() -> None:
    assert list(judge.findings(play(ALL_SUCCEED))) == []


@pytest.mark.parametrize(
    "fault",
    [
        *(Fault.LATE_NODE, Fault.LATE_DNS, Fault.PORT_TAKEN, Fault.TINY_SHM, Fault.PREEMPTED),
        *(Fault.NODE_KILLED, Fault.LEADER_KILLED),
    ],
)
def test_a_job_that_completes_in_spite_of_a_fault_is_in_order(fault: Fault) -> None:
    pods = [Pod(0, ExitStatus.RENDEZVOUS_FAILED), Pod(2, 137, killed=True), *ALL_SUCCEED]
    assert list(judge.findings(play(pods, fault))) == []


@pytest.mark.parametrize("fault", EVERY_FAULT)
def test_of_a_job_that_was_cut_off_nothing_more_is_said(fault: Fault | None) -> None:
    over = play([Pod(0, None), Pod(1, 1, rank=0)], fault, struck=False, cut_off=True)
    assert list(judge.findings(over)) == []


# ---- the job does not complete -----------------------------------------------------------------


def test_a_job_that_fails_is_explained_by_the_pod_that_failed_first() -> None:
    pods = [
        Pod(0, ExitStatus.WORKER_FAILED, ended=9.0, says=["ValueError: no data"]),
        Pod(1, 1, ended=3.0, says=["connection lost"]),
        Pod(2, ExitStatus.RENDEZVOUS_FAILED, ended=2.0),
    ]
    finding = found(play(pods, failure="BackoffLimitExceeded: pod 0"))
    assert finding.severity is Severity.ERROR
    assert finding.what == "the job does not complete: BackoffLimitExceeded: pod 0"
    assert finding.where == TRAINER
    # 1 and 11 are what the others end with when one fails
    assert finding.evidence == "demo-0: exit code 10\nValueError: no data"
    # as the catalogue has it
    assert finding.cause.startswith("the program itself failed first: ValueError: no data [")
    assert finding.remedy.endswith("\nmend what the last lines name, and rehearse again")


def test_what_the_catalogue_does_not_know_is_left_to_the_last_lines() -> None:
    pods = [Pod(0, ExitStatus.WORKER_FAILED, says=["no more to say"]), Pod(1), Pod(2)]
    finding = found(play(pods, failure="BackoffLimitExceeded: pod 0"))
    assert finding.cause == "a rank failed; its own words are above"
    assert finding.remedy == "mend what the last lines name, and rehearse again"


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (ExitStatus.USAGE, "wrong arguments"),
        (ExitStatus.PREEMPTED, "told to end"),
        (126, "cannot be run"),
        (127, "not in the image"),
        (137, "memory runs out"),
        (3, "not known: read the last lines"),
    ],
)
def test_the_exit_code_tells_the_cause(code: int, cause: str) -> None:
    assert cause in found(play([Pod(0, code), Pod(1), Pod(2)])).cause


def test_a_pod_that_was_given_up_is_no_success() -> None:
    finding = found(play([Pod(0), Pod(1), Pod(2, 1)]))
    assert finding.what == "the job does not complete: a pod was given up"


def test_pods_that_the_rehearsal_ended_explain_nothing() -> None:
    pods = [Pod(0, 12, told=True), Pod(1, 12, told=True), Pod(2, 137, killed=True)]
    finding = found(play(pods, Fault.PREEMPTED, failure="BackoffLimitExceeded"))
    assert finding.what.startswith("the job does not complete when every pod is told to end: ")
    assert finding.evidence == "BackoffLimitExceeded"
    assert "gives no further try" in finding.cause
    assert "podFailurePolicy" in finding.remedy


@pytest.mark.parametrize("fault", sorted(STRIKES - {Fault.RANK_HANGS}))
def test_a_job_that_a_fault_ends_needs_another_policy(fault: Fault) -> None:
    finding = found(play([Pod(0), Pod(1), Pod(2, 11)], fault, failure="why", nodes=ELASTIC))
    assert finding.severity is Severity.ERROR
    assert "maxRestarts" in finding.remedy


def test_a_job_that_says_it_needs_shared_memory_is_a_warning() -> None:
    finding = found(play([Pod(0), Pod(1), Pod(2, 10)], Fault.TINY_SHM, failure="why"))
    assert finding.severity is Severity.WARNING
    assert finding.what == "the job does not complete when /dev/shm has 1 MiB: why"


def test_nobodys_success_is_no_completion() -> None:
    over = play([Pod(0, 1), Pod(1, 1)], nodes=ELASTIC, away=frozenset({0, 1, 2}))
    assert not over.complete


# ---- the fault was not played ------------------------------------------------------------------


@pytest.mark.parametrize("fault", sorted(STRIKES))
def test_a_fault_that_never_came_is_an_error(fault: Fault) -> None:
    over = play(ALL_SUCCEED, fault, struck=False)
    finding = found(over)
    assert finding.severity is Severity.ERROR
    assert finding.what.startswith(f"{fault} was not played: ")
    assert finding.evidence == "every pod ended before"
    failed = replace(over, past=[Pod(0, 1, says=["no module a"]).actor()])
    assert found(failed).evidence == "no module a"


def test_a_rank_that_did_not_raise_is_an_error() -> None:
    finding = found(play(ALL_SUCCEED, Fault.RANK_RAISES))
    assert finding.severity is Severity.ERROR
    assert finding.what == "rank-raises was not played: no rank was started again"


@pytest.mark.parametrize(
    "pods",
    [
        [Pod(index, nodes=(3, 3)) for index in range(3)],
        [Pod(2, 10), Pod(0), Pod(1), Pod(2, generation=1)],
    ],
)
def test_a_rank_that_raised_was_started_again_by_torchrun_or_by_the_policy(pods: list[Pod]) -> None:
    assert list(judge.findings(play(pods, Fault.RANK_RAISES))) == []


def test_a_rank_that_raises_for_good_fails_the_job() -> None:
    over = play([Pod(0, 11), Pod(1, 11), Pod(2, 10)], Fault.RANK_RAISES, failure="why")
    assert (
        found(over).what == "the job does not complete when the last rank raises at its start: why"
    )


# ---- a node is missing -------------------------------------------------------------------------


def test_when_a_node_is_missing_the_others_give_up() -> None:
    pods = [Pod(index, ExitStatus.RENDEZVOUS_FAILED, nodes=()) for index in range(2)]
    over = play(pods, Fault.MISSING_NODE, away=frozenset({0, 1, 2}))
    assert list(judge.findings(over)) == []


def test_pods_that_succeed_without_a_node_run_jobs_of_their_own() -> None:
    pods = [Pod(0, nodes=(1,)), Pod(1, nodes=(1,), rank=1)]
    finding = found(play(pods, Fault.MISSING_NODE, away=frozenset({2})))
    assert finding.severity is Severity.ERROR
    assert finding.what == "2 pods succeed although a node is missing"
    assert finding.evidence == "exit code 0: pods 0, 1"


def test_an_elastic_job_goes_on_without_a_node() -> None:
    pods = [Pod(0, nodes=(2,)), Pod(1, nodes=(2,))]
    over = play(pods, Fault.MISSING_NODE, nodes=ELASTIC, away=frozenset({2}))
    assert list(judge.findings(over)) == []


def test_an_elastic_job_that_ends_without_a_node_is_an_error() -> None:
    pods = [Pod(0, 1, nodes=()), Pod(1, 1, nodes=())]
    over = play(pods, Fault.MISSING_NODE, nodes=ELASTIC, away=frozenset({0, 1, 2}))
    assert found(over).severity is Severity.ERROR


# ---- a rank hangs ------------------------------------------------------------------------------


def test_a_job_that_hangs_needs_a_deadline() -> None:
    pods = [Pod(index, 12, told=True) for index in range(3)]
    finding = found(play(pods, Fault.RANK_HANGS, failure="DeadlineExceeded"))
    assert finding.severity is Severity.WARNING
    assert finding.what == "nothing in the manifest ends a job that hangs"
    with_deadline = JOB.replace("  parallelism", "  activeDeadlineSeconds: 60\n  parallelism")
    over = play(pods, Fault.RANK_HANGS, failure="DeadlineExceeded", text=with_deadline)
    assert list(judge.findings(over)) == []


def test_a_job_sets_deadline_stands_at_its_jobs() -> None:
    text = """\
kind: JobSet
metadata: {name: js}
spec:
  replicatedJobs:
  - name: node
    template:
      spec:
        DEADLINE
        template: {spec: {containers: [{name: train, command: [torchrun, a.py]}]}}
"""
    pods = [Pod(0, 12, nodes=(1,), told=True)]
    with_deadline = text.replace("DEADLINE", "activeDeadlineSeconds: 60")
    assert list(judge.findings(play(pods, Fault.RANK_HANGS, text=with_deadline))) == []
    without = text.replace("DEADLINE", "backoffLimit: 0")
    assert found(play(pods, Fault.RANK_HANGS, text=without)).evidence == "no activeDeadlineSeconds"


# ---- how many met, and in which order ----------------------------------------------------------


def test_fewer_nodes_than_pods_are_an_error() -> None:
    finding = found(play([Pod(0, nodes=(2,)), Pod(1, nodes=(2,)), Pod(2, nodes=())]))
    assert finding.severity is Severity.ERROR
    assert finding.what == "2 nodes met, and 3 were to"
    assert finding.evidence == "group_world_size 2, 2"


def test_the_last_round_is_the_one_that_counts() -> None:
    pods = [Pod(index, nodes=(2, 3)) for index in range(3)]
    assert list(judge.findings(play(pods, Fault.SCALE_UP, nodes=ELASTIC))) == []
    pods = [Pod(index, nodes=(3, 2)) for index in range(3)]
    assert found(play(pods, Fault.SCALE_UP, nodes=ELASTIC)).what == "2 nodes met, and 3 were to"


def test_after_a_node_went_there_is_one_less() -> None:
    gone = Pod(2, 137, nodes=(3,), killed=True)
    pods = [Pod(0, nodes=(3, 2)), Pod(1, nodes=(3, 2)), gone]
    over = play(pods, Fault.SCALE_DOWN, nodes=ELASTIC, away=frozenset({2}))
    assert list(judge.findings(over)) == []


def test_nodes_whose_number_is_not_known_are_not_counted() -> None:
    assert (
        list(
            judge.findings(play([Pod(index, nodes=(1,), rank=0) for index in range(3)], nodes=None))
        )
        == []
    )


def test_ranks_in_another_order_than_the_indexes_are_a_warning() -> None:
    finding = found(play([Pod(0, rank=1), Pod(1, rank=0), Pod(2)]))
    assert finding.severity is Severity.WARNING
    assert finding.what == "the nodes' ranks are not the pods' indexes"
    assert finding.evidence == "pod 0 is node 1, pod 1 is node 0, pod 2 is node 2"


def test_the_order_of_an_elastic_jobs_nodes_is_nobodys() -> None:
    pods = [Pod(0, rank=1), Pod(1, rank=0), Pod(2)]
    assert list(judge.findings(play(pods, nodes=ELASTIC))) == []


# ---- the Findings of a play that lasts ---------------------------------------------------------


def test_a_pod_that_does_not_end_is_told_with_its_grace_and_its_words() -> None:
    finding = judge.grace_exceeded(Pod(1, None, says=["saving"]).actor())
    assert finding.what == "demo-1 did not end within its grace period of 30 s"
    assert finding.evidence == "saving"
    assert judge.grace_exceeded(Pod(1, None).actor()).evidence == "no output"


def test_a_job_that_lasts_too_long_tells_where_each_pod_stands() -> None:
    pods = [Pod(0), Pod(1, None), Pod(2, None, nodes=(), says=["waiting for data"])]
    finding = judge.too_long(play(pods), 300)
    assert finding.what == "the job did not end within 300 s"
    assert finding.evidence == "demo-0: ended\ndemo-1: met\ndemo-2: waits"
    alone = judge.too_long(play([Pod(0), Pod(1), pods[2]]), 300)
    assert alone.evidence.endswith("demo-2: waits\nwaiting for data")
