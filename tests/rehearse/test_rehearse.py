"""Rehearsals on the real Engine: what the job does when all goes well, and when it does not."""

import json
import signal
from pathlib import Path
from typing import Any

import docker
import pytest
from tests.image.harness import ROOT, Muster, Recorder, left_on, run, stages_left_on, wait_until
from tests.rehearse.conftest import Write

from muster import podlogs, preflight
from muster.dossier import Dossier
from muster.engine import Engine
from muster.finding import Outcome, Severity, Verdict
from muster.launch import ExitStatus
from muster.manifests import documents
from muster.manifests.pod import PREFLIGHT
from muster.rehearse import rehearsal
from muster.rehearse.actor import Actor

pytestmark = pytest.mark.usefixtures("built")

KILLED = 137
RENDEZVOUS, PREEMPTED = ExitStatus.RENDEZVOUS_FAILED, ExitStatus.PREEMPTED


def rehearse(path: Path, *words: str, code: int = 0) -> dict[str, Any]:
    report = path.with_suffix(".json")
    status, output = run("rehearse", str(path), "--json", str(report), *words)
    assert status == code, output
    result: dict[str, Any] = json.loads(report.read_text())
    assert output.rstrip().splitlines()[-1] == result["verdict"]
    return result


def tries(result: dict[str, Any]) -> dict[int, list[int]]:
    """The exit codes of each pod, try after try."""
    found: dict[int, list[int]] = {}
    for pod in result["pods"]:
        found.setdefault(pod["index"], []).append(pod["exit_code"])
    return found


def assert_in_order(result: dict[str, Any]) -> None:
    """Rank and index are equal wherever nodes met."""
    assert [pod for pod in result["pods"] if pod["group_rank"] not in {None, pod["index"]}] == []


def test_the_example_completes_with_rank_equal_to_index() -> None:
    path = ROOT / "k8s/examples/tcp-2x2-job.yaml"
    status, output = run("rehearse", str(path), "--image", "muster:cpu")
    assert status == 0, output
    assert "demo-0: node 0 of 2, ranks 0, 1" in output
    assert "demo-1: node 1 of 2, ranks 2, 3" in output
    assert output.rstrip().splitlines()[-1] == "READY"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("late-node:8", {0: [0], 1: [0]}),
        ("late-dns:8", {0: [0], 1: [0]}),
        ("tiny-shm", {0: [0], 1: [0]}),
        ("missing-node", {0: [RENDEZVOUS]}),
        ("node-killed", {0: [0], 1: [KILLED, 0]}),
        ("leader-killed", {0: [KILLED, 0], 1: [RENDEZVOUS, 0]}),
        ("preempted", {0: [PREEMPTED, 0], 1: [PREEMPTED, 0]}),
        ("port-taken", {0: [RENDEZVOUS, 0], 1: [0]}),
        ("rank-raises", {0: [0], 1: [0]}),
        ("rank-hangs", {0: [PREEMPTED], 1: [PREEMPTED]}),
    ],
)
def test_the_job_does_what_its_policy_promises(
    write: Write, fault: str, expected: dict[int, list[int]]
) -> None:
    result = rehearse(write(deadline_s="3600"), "--fault", fault)
    assert result["verdict"] == "READY"
    assert result["findings"] == []
    assert tries(result) == expected
    assert_in_order(result)


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_a_jobset_starts_all_pods_again(write: Write, kind: str) -> None:
    result = rehearse(write(kind=kind), "--fault", "leader-killed")
    assert tries(result)[0] == [KILLED, 0]
    # it is told to end, and may have noticed by itself before
    assert tries(result)[1][0] in {PREEMPTED, RENDEZVOUS}
    assert tries(result)[1][1:] == [0]
    assert_in_order(result)


def test_twelve_nodes_have_rank_equal_to_index(write: Write) -> None:
    result = rehearse(write(nnodes="12", memory="512m", arguments=["1"]))
    ranks = [(pod["index"], pod["group_rank"], pod["ranks"]) for pod in result["pods"]]
    assert sorted(ranks) == [(index, index, [index]) for index in range(12)]


def test_an_elastic_job_grows(write: Write) -> None:
    path = write(nnodes="1:2", arguments=["15"])
    result = rehearse(path, "--fault", "scale-up")
    assert result["findings"] == []
    assert tries(result) == {0: [0], 1: [0]}


def test_an_elastic_job_goes_on_with_fewer(write: Write) -> None:
    path = write(nnodes="1:2", arguments=["10"])
    result = rehearse(path, "--fault", "scale-down")
    assert result["findings"] == []
    assert tries(result) == {0: [0], 1: [KILLED]}


def test_nodes_share_their_claim_and_write_to_it_as_an_ordinary_user(write: Write) -> None:
    path = write(checkpoint="pvc:results", arguments=["1"])
    result = rehearse(path)
    assert tries(result) == {0: [0], 1: [0]}


def test_a_preflight_that_passes_lets_the_job_train_and_its_replacements_too(write: Write) -> None:
    path = write(preflight=True, memory="2g", arguments=["4"])
    result = rehearse(path, "--fault", "leader-killed")
    assert tries(result) == {0: [KILLED, 0], 1: [RENDEZVOUS, 0]}


def test_a_preflight_that_finds_something_ends_the_job_before_training(write: Write) -> None:
    path = write(preflight=True, memory="2g", env=["NCCL_P2P_DISABLE=1"])
    result = rehearse(path, code=1)
    assert all(codes[0] in {13, PREEMPTED} for codes in tries(result).values())
    assert all(pod["group_rank"] is None for pod in result["pods"])
    (finding,) = result["findings"]
    assert "PodFailurePolicy" in finding["what"]
    assert "NCCL_P2P_DISABLE" in finding["evidence"]


@pytest.fixture
def logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file where the gates of the pods go on writing, as kubectl logs --prefix shows them."""
    path = tmp_path / "pods.log"
    hear = Actor.hear

    def heard(actor: Actor, role: str, line: str) -> bool:
        if role == PREFLIGHT:
            with path.open("a") as log:
                log.write(f"[pod/{actor.name}-abcde/{role}] {line}\n")
        return hear(actor, role, line)

    monkeypatch.setattr(Actor, "hear", heard)
    return path


def read_back(engine: Engine, manifest: Path, logged: Path, verdict: Verdict) -> Dossier:
    """The report on the gates of a rehearsal that ends with `verdict`."""
    result = rehearsal.rehearse(engine, documents.read(manifest), rehearsal.Wish(), Recorder())
    assert result.verdict is verdict, result
    status, output = run("report", "--", str(logged))
    assert output.rstrip().splitlines()[-1] == verdict
    assert status == (0 if verdict is Verdict.READY else 1), output
    found = podlogs.read([logged])
    assert found.verdict is verdict
    return found


def test_the_logs_of_the_gates_are_one_report_on_all_nodes(
    write: Write, engine: Engine, logged: Path
) -> None:
    path = write(preflight=True, memory="2g", arguments=["1"])
    found = read_back(engine, path, logged, Verdict.READY)
    hosts = ("demo-0", "demo-1")
    assert [(node.host, node.missing) for node in found.nodes] == [(host, None) for host in hosts]
    assert all("shm" in node.facts for node in found.nodes)
    assert {"Python", "torch", "variant"} <= found.versions.keys()
    assert {"bom.json"} <= found.hashes.keys()
    outcomes = {step.name: step.outcome for step in found.steps}
    assert outcomes.keys() == {*preflight.NODE_STEPS, preflight.DOCTOR, preflight.WORLD}
    assert outcomes[preflight.WORLD] is outcomes["versions"] is Outcome.PASSED
    (series,) = found.bandwidth
    assert (series.nodes, series.backend, series.claimed) == (hosts, "gloo", False)


def test_what_the_gates_found_is_read_back_with_its_nodes(
    write: Write, engine: Engine, logged: Path
) -> None:
    path = write(preflight=True, memory="2g", env=["NCCL_P2P_DISABLE=1"])
    found = read_back(engine, path, logged, Verdict.NOT_READY)
    errors = [each for each in found.findings if each.severity is Severity.ERROR]
    (switches,) = (each for each in errors if "NCCL_P2P_DISABLE" in each.evidence)
    assert "demo-" in switches.where
    assert switches.where.endswith(": nccl_switches")


def test_a_policy_without_another_try_is_a_finding(write: Write) -> None:
    path = write(deadline_s="3600")
    text = path.read_text().replace("backoffLimitPerIndex: 3", "backoffLimitPerIndex: 0")
    head, _, tail = text.partition("    rules:\n")
    path.write_text(f"{head}    rules: []\n{tail[tail.index('  template:') :]}")
    result = rehearse(path, "--fault", "node-killed", code=1)
    (finding,) = result["findings"]
    assert "the job does not complete when the last pod's node dies" in finding["what"]
    assert "backoffLimitPerIndex is 0" in finding["what"]


def test_pods_without_a_service_do_not_meet(write: Write) -> None:
    path = write()
    _, _, rest = path.read_text().partition("---\n")
    path.write_text(rest.replace("      subdomain: demo", "      hostname: x"))
    result = rehearse(path, "--limit", "25", code=1)
    (finding,) = result["findings"]
    assert finding["what"] == "the job did not end within 25 s"


def test_a_script_that_fails_is_shown_with_its_last_words(write: Write, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise RuntimeError('no data at /data')\n")
    result = rehearse(write(script=str(script), max_restarts="0"), code=1)
    (finding,) = result["findings"]
    assert "RuntimeError: no data at /data" in finding["evidence"]
    assert finding["what"].startswith("the job does not complete: MaxFailedIndexesExceeded")


HAND_WRITTEN = """
apiVersion: v1
kind: Service
metadata: {name: train}
spec: {clusterIP: None, publishNotReadyAddresses: true, selector: {job-name: train}}
---
apiVersion: batch/v1
kind: Job
metadata: {name: train}
spec:
  completionMode: Indexed
  completions: 2
  parallelism: 2
  template:
    spec:
      subdomain: train
      restartPolicy: Never
      containers:
        - name: torch
          image: registry.example/other:1
          command: [sh, -c]
          args:
            - >-
              exec torchrun --nnodes=2 --nproc_per_node 8 --rdzv_id=$JOB --rdzv_backend=c10d
              --rdzv_endpoint=train-0.train:29400 --local-addr=$(hostname -f)
              --rdzv-conf is_host=$([ "$JOB_COMPLETION_INDEX" = 0 ] && echo true || echo false)
              /opt/muster/train/all_reduce.py
          env: [{name: JOB, value: own}]
          resources: {limits: {nvidia.com/gpu: 8}}
"""


def test_a_manifest_of_somebody_elses_is_played_too(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(HAND_WRITTEN)
    result = rehearse(path, "--image", "muster:cpu", "--nproc-per-node", "1")
    assert tries(result) == {0: [0], 1: [0]}
    assert any("nproc_per_node is 1 in place of 8" in note for note in result["notes"])


@pytest.mark.parametrize(
    ("words", "text", "says"),
    [
        ((), HAND_WRITTEN, "registry.example/other:1"),
        ((), HAND_WRITTEN.replace("torchrun", "true"), "no container here runs torchrun"),
        ((), HAND_WRITTEN.replace(": 2", ": 65"), "65 pods"),
        ((), "a: [", "own.yaml:2"),
        (("--fault", "sunspots"), HAND_WRITTEN, "sunspots"),
        (("--fault", "scale-up", "--image", "muster:cpu"), HAND_WRITTEN, "MIN:MAX"),
        (("--limit", "0"), HAND_WRITTEN, "--limit"),
    ],
)
def test_wrong_input_is_refused_with_its_remedy(
    tmp_path: Path, words: tuple[str, ...], text: str, says: str
) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    status, output = run("rehearse", str(path), *words)
    assert status == 2, output
    assert says in output
    assert "  do: " in output
    assert "Traceback" not in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_it_is_ended(
    write: Write, client: docker.DockerClient, number: signal.Signals
) -> None:
    command = Muster("rehearse", str(write(arguments=["60"])))
    command.read_until("node 1 of 2")
    command.send(number)
    code, output = command.finish()
    assert code == (128 + number if number is signal.SIGINT else -number), output
    # after SIGKILL the reaper needs a moment
    wait_until(lambda: left_on(client) + stages_left_on(client) == [], "all is removed")
