"""Rendered manifests: what they hold by kind and fabric, and that all pass schema and lint."""

import itertools
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from muster import fabric as fabrics
from muster import launch
from muster.errors import SpecWrong
from muster.finding import Severity
from muster.launch import ExitStatus
from muster.manifests import documents, lint, render
from muster.manifests import spec as specs
from muster.manifests.documents import Document
from muster.manifests.spec import Kind, Spec
from muster.manifests.workloads import PodGroup, pod_groups

ROOT = Path(__file__).resolve().parents[2]
FABRICS = ROOT / "k8s/fabrics"
IMAGE = f"registry.example/muster@sha256:{'0' * 64}"
ALL = fabrics.names(FABRICS)


def spec(**flags: object) -> Spec:
    least = {"name": "demo", "image": IMAGE, "nnodes": "2", "nproc_per_node": "2"}
    return specs.build(specs.from_flags({**least, **flags}), FABRICS)


def rendered(**flags: object) -> tuple[Document, ...]:
    return documents.parse(render.render(spec(**flags), ROOT), "demo.yaml")


def group(**flags: object) -> PodGroup:
    (found,) = (each for each in pod_groups(rendered(**flags)) if each.invocation is not None)
    return found


def of_kind(found: tuple[Document, ...], kind: str) -> dict[str, Any]:
    (document,) = (each for each in found if each.kind == kind)
    return document.data


def errors(found: tuple[Document, ...], asked: Spec) -> list[str]:
    every = lint.lint(found, kubernetes=asked.kubernetes, fabric=asked.fabric)
    return [each.what for each in every if each.severity is Severity.ERROR]


# ---- what it is --------------------------------------------------------------------------------


def test_the_base_is_what_is_rendered_for_two_nodes_without_gpus() -> None:
    found = rendered(image="muster:cpu", cpu=True)
    base = documents.read(ROOT / "k8s/base/job.yaml")
    for document in found:
        del document.data["metadata"]["namespace"]
    assert [each.data for each in found] == [each.data for each in base]


@pytest.mark.parametrize("path", ["base/job.yaml"])
def test_the_base_passes_the_lint_but_for_its_tag(path: str) -> None:
    found = lint.lint(documents.read(ROOT / "k8s" / path))
    assert [each.what.rpartition(" ")[2] for each in found] == ["[image-digest]"]


def test_the_same_spec_gives_the_same_bytes() -> None:
    asked = spec(fabric="efa-p5", nproc_per_node="8")
    assert render.render(asked, ROOT) == render.render(asked, ROOT)


def test_the_size_of_the_job_changes_numbers_alone() -> None:
    small, large = (
        render.render(spec(nnodes=nodes, nproc_per_node="8"), ROOT) for nodes in ("8231", "8237")
    )
    assert small.replace("8231", "8237") == large


def test_the_service_stands_before_the_job_and_finds_its_pods() -> None:
    found = rendered()
    assert [each.kind for each in found] == ["Service", "NetworkPolicy", "ConfigMap", "Job"]
    service = found[0].data["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    assert service["selector"] == {"batch.kubernetes.io/job-name": "demo"}


@pytest.mark.parametrize(
    ("kind", "host"),
    [("job", "demo-0"), ("jobset", "demo-node-0-0"), ("trainjob", "demo-node-0-0")],
)
def test_the_endpoint_is_the_full_name_of_pod_0(kind: str, host: str) -> None:
    found = group(kind=kind, namespace="team")
    assert found.fqdn(0) == f"{host}.demo.team.svc.cluster.local"
    assert found.invocation is not None
    assert found.invocation.rdzv_endpoint == f"{found.fqdn(0)}:29400"


def test_the_launchers_statuses_are_those_of_the_policy() -> None:
    rules = of_kind(rendered(), "Job")["spec"]["podFailurePolicy"]["rules"]
    codes = {rule["action"]: rule["onExitCodes"]["values"] for rule in rules[1:]}
    assert codes == {"Ignore": [ExitStatus.PREEMPTED], "FailJob": [ExitStatus.USAGE]}


@pytest.mark.parametrize(("deadline", "join"), [(None, "1800"), ("86400", "1800"), ("600", "300")])
def test_the_rendezvous_gives_up_before_the_deadline(deadline: str | None, join: str) -> None:
    found = group(deadline_s=deadline)
    assert found.invocation is not None
    assert found.invocation.rdzv_conf["join_timeout"] == join
    assert found.job.get("activeDeadlineSeconds") == (int(deadline) if deadline else None)


def test_the_grace_period_has_room_for_the_checkpoint() -> None:
    found = group(checkpoint_s="300")
    assert found.template["terminationGracePeriodSeconds"] == launch.grace_s(300) == 360
    assert found.environment[launch.SHUTDOWN_VARIABLE] == "330"


def test_an_elastic_job_has_pods_for_the_most_and_meets_with_the_least() -> None:
    found = group(nnodes="2:4")
    assert found.replicas == 4
    assert found.invocation is not None
    assert found.invocation.nnodes == "2:4"


def test_gpus_are_one_a_rank_and_none_for_a_cpu() -> None:
    limits = group(nproc_per_node="8").trainer["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == 8
    limits = group(nproc_per_node="8", cpu=True).trainer["resources"]["limits"]
    assert set(limits) == {"memory"}


def test_shared_memory_is_within_the_memory() -> None:
    found = group(memory="8g", shm_size="3g")
    (volume,) = (each for each in found.template["volumes"] if each["name"] == "dshm")
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "3Gi"}
    assert found.trainer["resources"]["limits"]["memory"] == "8Gi"


def test_what_the_user_adds_is_there() -> None:
    found = group(
        checkpoint="pvc:results",
        priority_class="high",
        node_selector=["a=true"],
        tolerations=["dedicated=ml:NoSchedule"],
        env=["A=on", "B=1"],
        queue="team",
        topology="cloud.example/rack",
        arguments=["--epochs", "3", "two words", "yes", "é\n"],
    )
    template, trainer = found.template, found.trainer
    assert template["priorityClassName"] == "high"
    assert template["nodeSelector"] == {"a": "true"}
    toleration = {"key": "dedicated", "operator": "Equal", "value": "ml", "effect": "NoSchedule"}
    assert toleration in template["tolerations"]
    assert {"name": "A", "value": "on"} in trainer["env"]
    assert trainer["args"][-5:] == ["--epochs", "3", "two words", "yes", "é\n"]
    assert {"name": "checkpoint", "mountPath": "/checkpoint"} in trainer["volumeMounts"]
    labels = found.document.data["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "team"
    annotations = found.metadata["annotations"]
    assert annotations["kueue.x-k8s.io/podset-required-topology"] == "cloud.example/rack"


def test_a_gang_is_asked_of_kubernetes_1_37_alone() -> None:
    scheduling = group(gang=True, topology="rack", nnodes="4").job["scheduling"]
    assert scheduling["schedulingPolicy"] == {"gang": {"minCount": 4}}
    assert scheduling["schedulingConstraints"] == {"topology": [{"key": "rack"}]}
    assert "scheduling" not in group().job


def test_a_jobset_starts_all_again_and_fails_on_wrong_input() -> None:
    found = rendered(kind="jobset", max_restarts="5", ttl_s="60")
    assert [each.kind for each in found] == ["NetworkPolicy", "ConfigMap", "JobSet"]
    jobset = found[2].data["spec"]
    assert jobset["ttlSecondsAfterFinished"] == 60
    assert jobset["failurePolicy"]["maxRestarts"] == 5
    (replicated,) = jobset["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert job["backoffLimit"] == 0
    assert not {"backoffLimitPerIndex", "maxFailedIndexes"} & job.keys()
    assert [rule["action"] for rule in job["podFailurePolicy"]["rules"]] == ["FailJob", "FailJob"]


def test_a_trainjob_brings_its_own_runtime() -> None:
    found = rendered(kind="trainjob", nnodes="3", queue="team")
    runtime, trainjob = of_kind(found, "TrainingRuntime"), of_kind(found, "TrainJob")
    assert trainjob["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"] == "demo"
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 3}
    assert trainjob["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert "kueue.x-k8s.io/queue-name" not in runtime["metadata"]["labels"]


# ---- the script --------------------------------------------------------------------------------


def test_a_script_of_the_image_is_named_by_its_full_path() -> None:
    found = group(script="train/all_reduce.py")
    assert found.invocation is not None
    assert found.invocation.script == "/opt/muster/train/all_reduce.py"


def test_a_script_that_the_image_has_not_is_refused() -> None:
    with pytest.raises(SpecWrong, match=r"train/nope\.py") as caught:
        render.render(spec(script="train/nope.py"), ROOT)
    assert "train/ddp_demo.py" in caught.value.remedy


@pytest.mark.parametrize(
    "code",
    ["print(1)\n", "\tif x:\n", "  first = 1\n", "x = 'é'\r\n", "no end", "\n\n", "a: b # c\n"],
)
def test_code_travels_in_the_manifest_as_it_is(tmp_path: Path, code: str) -> None:
    script = tmp_path / "own.py"
    script.write_bytes(code.encode())
    found = rendered(script=str(script), code="configmap")
    (own,) = (each for each in found if each.name == "demo-code")
    assert own.data["data"] == {"own.py": code}
    (trainer,) = (each for each in pod_groups(found) if each.invocation)
    assert trainer.invocation is not None
    assert trainer.invocation.script == "/workspace/code/own.py"


@pytest.mark.parametrize("content", [b"\xff", b"#" * 1_000_001])
def test_code_that_no_configmap_takes_is_refused(tmp_path: Path, content: bytes) -> None:
    script = tmp_path / "own.py"
    script.write_bytes(content)
    with pytest.raises(SpecWrong, match=r"own\.py"):
        render.render(spec(script=str(script), code="configmap"), ROOT)


# ---- all of them -------------------------------------------------------------------------------


@pytest.mark.parametrize("kubernetes", specs.KUBERNETES)
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("name", ALL)
def test_every_fabric_and_kind_passes_schema_and_lint(
    name: str, kind: Kind, kubernetes: str
) -> None:
    asked = spec(fabric=name, kind=kind, kubernetes=kubernetes, nproc_per_node="4")
    found = documents.parse(render.render(asked, ROOT), "demo.yaml")
    assert errors(found, asked) == []


@cache
def names() -> st.SearchStrategy[str]:
    return st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
durations = st.none() | st.integers(120, 10**6).map(str)


@settings(max_examples=40)
@given(
    flags=st.fixed_dictionaries(
        {
            "name": names(),
            "namespace": names(),
            "nnodes": st.integers(1, 1000).map(str)
            | st.tuples(st.integers(1, 9), st.integers(10, 99)).map(lambda n: f"{n[0]}:{n[1]}"),
            "nproc_per_node": st.integers(1, 4).map(str),
            "fabric": st.sampled_from(ALL),
            "kind": st.sampled_from(["job", "jobset"]),
            "kubernetes": st.sampled_from(specs.KUBERNETES),
            "deadline_s": durations,
            "ttl_s": durations,
            "max_restarts": st.integers(0, 9).map(str),
            "checkpoint": st.none() | names().map(lambda name: f"pvc:{name}"),
            "checkpoint_s": st.integers(0, 3600).map(str),
            "queue": st.none() | names(),
            "arguments": st.lists(texts, max_size=4),
            "env": st.dictionaries(
                st.from_regex(r"[A-Z]{3,8}_[A-Z]{3,8}", fullmatch=True), texts, max_size=3
            ).map(lambda values: [f"{name}={value}" for name, value in values.items()]),
        }
    )
)
def test_whatever_is_accepted_renders_to_what_passes(flags: dict[str, object]) -> None:
    asked = spec(**flags)
    text = render.render(asked, ROOT)
    found = documents.parse(text, "demo.yaml")
    assert errors(found, asked) == []
    # what kubectl reads, YAML 1.1, is what was meant
    (job,) = (each for each in pod_groups(found) if each.invocation)
    assert tuple(job.trainer["args"][len(job.trainer["args"]) - len(asked.arguments) :]) == (
        asked.arguments
    )
    variables = {each["name"]: each["value"] for each in job.trainer["env"]}
    assert {name: variables[name] for name in asked.env} == asked.env
    assert all(yaml.safe_load_all(text))


def test_no_comment_stands_apart_from_its_value() -> None:
    text = render.render(spec(fabric="gke-tcpxo", kind="jobset", nproc_per_node="8"), ROOT)
    for above, below in itertools.pairwise(text.splitlines()):
        if above.lstrip().startswith("#") and below.strip() not in {"", "---"}:
            indent = len(above) - len(above.lstrip())
            assert len(below) - len(below.lstrip()) == indent, textwrap.dedent(above)
