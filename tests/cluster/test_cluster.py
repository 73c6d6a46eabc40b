"""A rendered job on a real cluster: dry run, apply, the pods' own words, delete."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.conftest import DELETE_LIMIT_S, Kubectl
from tests.image.harness import run, wait_until

# an image may have to be pulled by two machines first
END_LIMIT_S = 900
NNODES = 2
INDEX = "batch.kubernetes.io/job-completion-index"
CRD = "jobsets.jobset.x-k8s.io"

pytestmark = pytest.mark.timeout(END_LIMIT_S + 2 * DELETE_LIMIT_S)


@pytest.fixture(params=["job", "jobset"])
def manifest(
    request: pytest.FixtureRequest, image: str, namespace: Kubectl, tmp_path: Path
) -> Path:
    """Rendered for two pods with one rank each, on tcp and without GPUs."""
    kind = str(request.param)
    if kind == "jobset" and namespace.run("get", "crd", CRD).returncode:
        pytest.skip(f"the cluster has no {CRD}")
    path = tmp_path / "demo.yaml"
    status, output = run(
        *("render", "--name", "demo", "--namespace", namespace.namespace, "--image", image),
        *("--kind", kind, "--fabric", "tcp", "--nnodes", str(NNODES), "--nproc-per-node", "1"),
        *("--cpu", "--memory", "1g", "--script", "train/all_reduce.py", "--output", str(path)),
    )
    # a tag in the place of a digest is a warning, and the user's choice here
    assert status == 0, output
    return path


def test_the_api_server_admits_it_without_a_warning(namespace: Kubectl, manifest: Path) -> None:
    done = namespace.run("apply", "--dry-run=server", "--filename", str(manifest))
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert namespace.items("pods") == []


def test_the_pods_meet_with_rank_equal_to_index(namespace: Kubectl, manifest: Path) -> None:
    namespace.say("apply", "--filename", str(manifest))
    wait_until(lambda: ended(namespace) is not None, "the job ends", END_LIMIT_S)
    assert ended(namespace) == "Complete", what_happened(namespace)
    logs = {pod["metadata"]["labels"][INDEX]: log(namespace, pod) for pod in succeeded(namespace)}
    assert sorted(logs) == [str(index) for index in range(NNODES)]
    for index, lines in logs.items():
        assert f"Rank {index}: {sum(range(NNODES))}" in lines
    (result,) = (json.loads(line) for line in logs["0"] if line.startswith("{"))
    assert result["ok"]
    assert result["world_size"] == NNODES

    timeout = f"--timeout={DELETE_LIMIT_S}s"
    namespace.say("delete", "--filename", str(manifest), timeout)
    wait_until(lambda: namespace.items("pods") == [], "the pods are gone", DELETE_LIMIT_S)
    left = namespace.say(
        *("get", "--filename", str(manifest), "--ignore-not-found", "--output", "name")
    )
    assert left == ""


def ended(namespace: Kubectl) -> str | None:
    """Complete or Failed, as the Job's controller says; None while it runs."""
    (job,) = namespace.items("jobs") or [{}]
    for condition in job.get("status", {}).get("conditions", ()):
        if condition["type"] in {"Complete", "Failed"} and condition["status"] == "True":
            return str(condition["type"])
    return None


def succeeded(namespace: Kubectl) -> list[dict[str, Any]]:
    """The pods that came to their end; one that was replaced is none of them."""
    return namespace.items("pods", "--field-selector", "status.phase=Succeeded")


def log(namespace: Kubectl, pod: dict[str, Any]) -> list[str]:
    return namespace.say("logs", pod["metadata"]["name"]).splitlines()


def what_happened(namespace: Kubectl) -> str:
    """Everything that may explain it: pods, events, the last words of each pod."""
    last = ("\n".join(log(namespace, pod)[-40:]) for pod in namespace.items("pods"))
    return "\n".join([namespace.say("get", "pods,events"), *last])
