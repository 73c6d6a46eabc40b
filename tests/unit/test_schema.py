import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from referencing import Registry, Resource

from muster.errors import UnknownKubernetes
from muster.manifests import crds, documents, schema

EXAMPLES = Path(__file__).resolve().parents[2] / "k8s/examples"
JOB = """\
apiVersion: batch/v1
kind: Job
metadata: {name: demo}
spec:
  template:
    spec:
      containers:
      - name: train
"""
JOBSET = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: demo}
spec:
  replicatedJobs:
  - name: node
    template:
      spec:
        template:
          spec:
            containers:
            - name: train
"""
TRAINJOB = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: demo}
spec:
  runtimeRef: {name: torch-distributed}
  trainer: {numNodes: 2, command: [torchrun, a.py]}
"""


def misfits(text: str, kubernetes: str = "1.37") -> list[str]:
    """Each misfit as line, fault and words."""
    return [
        f"{document.line(*each.path)} {each.fault}: {each.what}"
        + (f" ({each.near})" if each.near else "")
        for document in documents.parse(text, "job.yaml")
        for each in schema.misfits(document, kubernetes)
    ]


@pytest.mark.parametrize("kubernetes", schema.VERSIONS)
@pytest.mark.parametrize("text", [JOB, JOBSET, TRAINJOB])
def test_objects_as_they_should_be_fit_every_version(text: str, kubernetes: str) -> None:
    assert misfits(text, kubernetes) == []


def test_every_error_is_named_not_only_the_first() -> None:
    text = """\
apiVersion: batch/v1
kind: Job
metadata: {name: demo, label: {}}
spec:
  paralelism: 2
  completions: "2"
  suspend: 1
  template:
    spec:
      containers:
      - image: a
        args:
        - 1
        -
        env: {A: B}
      - name: b
        resources: {limits: {cpu: [1], memory: 1}}
"""
    container = "spec.template.spec.containers"
    assert misfits(text) == [
        "3 unknown field: metadata.label is no field of Kubernetes 1.37 (labels)",
        "5 unknown field: spec.paralelism is no field of Kubernetes 1.37 (parallelism)",
        "6 wrong type: spec.completions is the text '2', where a whole number must be",
        "7 wrong type: spec.suspend is the number 1, where true or false must be",
        f"11 missing: {container}[0] has no name",
        f'13 wrong type: {container}[0].args[0] is the number 1, where text must be ("1")',
        f"14 wrong type: {container}[0].args[1] is empty, where a value must be",
        f"15 wrong type: {container}[0].env is an object, where a list must be",
        (
            f"17 wrong type: {container}[1].resources.limits.cpu is a list, where text or a number"
            " must be"
        ),
    ]


@pytest.mark.parametrize(
    ("field", "versions"),
    [
        ("scheduling: {schedulingPolicy: {gang: {minCount: 2}}}", ["1.37"]),
        (
            "template: {spec: {containers: [], schedulingGroup: {podGroupName: a}}}",
            ["1.36", "1.37"],
        ),
        ("template: {spec: {containers: [], workloadRef: {name: a, podGroup: b}}}", ["1.35"]),
    ],
)
def test_a_field_is_known_in_its_versions_only(field: str, versions: list[str]) -> None:
    text = JOB.partition("  template:")[0] + f"  {field}\n"
    if "template" not in field:
        text += "  template: {spec: {containers: []}}\n"
    assert [version for version in schema.VERSIONS if not misfits(text, version)] == versions
    (other,) = misfits(text, "1.34")
    assert other.endswith(f"is no field of Kubernetes 1.34; {', '.join(versions)} has it")


@pytest.mark.parametrize(
    ("text", "misfit"),
    [
        ("kind: Job", "1 missing: the object has no apiVersion"),
        ("apiVersion: v1\nkind: [Pod]", "1 missing: the object has no kind"),
        (
            "apiVersion: v1\nkind: Job",
            "2 unknown kind: there is no Job in v1 of Kubernetes 1.37 (Job in batch/v1)",
        ),
        (
            "apiVersion: batch/v1\nkind: Jobb",
            "2 unknown kind: there is no Jobb in batch/v1 of Kubernetes 1.37 (Job)",
        ),
        (
            "apiVersion: scheduling.k8s.io/v1beta1\nkind: PodGroup",
            (
                "2 unknown kind: there is no PodGroup in scheduling.k8s.io/v1beta1 of Kubernetes"
                " 1.36; 1.37 has it (PodGroup in scheduling.k8s.io/v1alpha2)"
            ),
        ),
        (
            "apiVersion: jobset.x-k8s.io/v1alpha9\nkind: JobSet",
            (
                "2 unknown kind: there is no JobSet in jobset.x-k8s.io/v1alpha9 of Kubernetes 1.37"
                " (JobSet in jobset.x-k8s.io/v1alpha2)"
            ),
        ),
        (
            "apiVersion: kueue.x-k8s.io/v1beta2\nkind: LocalQueue",
            (
                "2 unchecked: LocalQueue (kueue.x-k8s.io/v1beta2) is not checked: no schema of it"
                " is at hand"
            ),
        ),
    ],
)
def test_a_kind_that_is_not_known_is_said(text: str, misfit: str) -> None:
    assert misfits(text, "1.36" if "PodGroup" in text else "1.37") == [misfit]


def test_the_pods_in_an_object_without_a_schema_are_checked() -> None:
    text = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
spec:
  replicas:
    Worker:
      template:
        spec:
          containers:
          - name: 1
"""
    unchecked, pod = misfits(text)
    assert "unchecked" in unchecked
    assert pod.startswith("9 wrong type: spec.replicas.Worker.template.spec.containers[0].name is")


def test_a_version_that_is_not_at_hand_is_refused() -> None:
    with pytest.raises(UnknownKubernetes, match=r"'1.33'.*\n.*1.34, 1.35, 1.36, 1.37"):
        misfits(JOB, "1.33")


# ---- JobSet and TrainJob -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "misfit"),
    [
        (
            JOBSET.replace("replicatedJobs", "replicated_jobs"),
            "5 unknown field: spec.replicated_jobs is no field of Kubernetes 1.37 (replicatedJobs)",
        ),
        (
            JOBSET.replace("- name: node", '- name: node\n    replicas: "2"'),
            (
                "7 wrong type: spec.replicatedJobs[0].replicas is the text '2', where a whole"
                " number must be"
            ),
        ),
        (
            JOBSET.replace(
                "spec:\n        template", "spec:\n        scheduling: {}\n        template"
            ),
            (
                "9 unknown field: spec.replicatedJobs[0].template.spec.scheduling is no field of"
                " Kubernetes 1.37"
            ),
        ),
        (
            JOBSET.replace("- name: train", "- nam: train"),
            (
                "12 missing: spec.replicatedJobs[0].template.spec.template.spec.containers[0] has"
                " no name"
            ),
        ),
        (
            TRAINJOB.replace("runtimeRef", "runtime"),
            "4 missing: spec has no runtimeRef",
        ),
        (
            TRAINJOB.replace("numNodes", "nodes"),
            "6 unknown field: spec.trainer.nodes is no field of Kubernetes 1.37",
        ),
    ],
)
def test_job_set_and_train_job_are_checked_as_strictly(text: str, misfit: str) -> None:
    assert misfit in [each.partition(" (")[0] for each in misfits(text)] + misfits(text)


def test_a_job_sets_pods_are_checked_by_the_version_too() -> None:
    text = JOBSET.replace(
        "containers:", "schedulingGroup: {podGroupName: a}\n            containers:"
    )
    assert [bool(misfits(text, version)) for version in schema.VERSIONS] == [
        True,
        True,
        False,
        False,
    ]


def test_crds_json_is_what_the_models_say() -> None:
    newest = schema.definitions(schema.VERSIONS[-1])["$defs"]
    assert json.loads(schema.CRDS.read_text()) == crds.made(newest)
    assert schema.CRDS.read_text() == crds.text(crds.made(newest))


# ---- JSON Schema ---------------------------------------------------------------------------------


def schemas(part: object) -> Iterator[dict[str, Any]]:
    """A schema and all that are in it."""
    if isinstance(part, dict):
        yield part
        inside = [part.get("items"), part.get("additionalProperties"), *part.get("oneOf", [])]
        for child in [*inside, *part.get("properties", {}).values()]:
            yield from schemas(child)


@pytest.mark.parametrize("kubernetes", schema.VERSIONS)
def test_the_schemas_use_no_word_that_is_not_checked(kubernetes: str) -> None:
    words = {
        word
        for part in schema.definitions(kubernetes)["$defs"].values()
        for each in schemas(part)
        for word in each
        if not word.startswith("x-kubernetes-")
    }
    # format asks for nothing in a validator that is not told to look
    assert words - {"description", "format"} == {
        *("$ref", "type", "enum", "oneOf", "properties", "additionalProperties", "required"),
        "items",
    }


def test_a_wrong_choice_is_named_with_the_right_one() -> None:
    text = """\
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: demo}
spec:
  serviceName: demo
  selector: {}
  template: {spec: {containers: []}}
  volumeClaimTemplates:
  - kind: Claim
"""
    assert misfits(text) == [
        (
            "9 wrong type: spec.volumeClaimTemplates[0].kind is the text 'Claim', where"
            " 'PersistentVolumeClaim' must be"
        )
    ]


def registry() -> Registry[Any]:
    """The schemas as jsonschema reads them."""
    dialect = "https://json-schema.org/draft/2020-12/schema"
    crds_json = {"$schema": dialect, **json.loads(schema.CRDS.read_text())}
    contents = {schema.DEFINITIONS: schema.definitions("1.37"), CRDS_ID: crds_json}
    return Registry().with_resources(
        (name, Resource.from_contents(each)) for name, each in contents.items()
    )


CRDS_ID = "https://muster/crds.json"
REGISTRY = registry()
OBJECTS = [
    each
    for name in ("tcp-2x2-job", "tcp-2x2-jobset", "tcp-2x2-trainjob", "efa-p5-4x8-job")
    for each in documents.read(EXAMPLES / f"{name}.yaml")
]


def refused_by_jsonschema(document: documents.Document) -> set[tuple[object, ...]]:
    """The paths that jsonschema does not allow."""
    models = json.loads(schema.CRDS.read_text())["kinds"]
    crd = models.get(document.api_version, {}).get(document.kind)
    names = {
        (kind["group"], kind["version"], kind["kind"]): name
        for name, each in schema.definitions("1.37")["$defs"].items()
        for kind in each.get("x-kubernetes-group-version-kind", ())
    }
    group, _, version = document.api_version.rpartition("/")
    own = f"{schema.DEFINITIONS}#/$defs/{names.get((group, version, document.kind))}"
    reference = own if crd is None else f"{CRDS_ID}{crd}"
    validator = jsonschema.Draft202012Validator({"$ref": reference}, registry=REGISTRY)
    found: set[tuple[object, ...]] = set()
    for error in validator.iter_errors(document.data):
        path = (*error.absolute_path,)
        if error.validator == "required":
            found |= {(*path, name) for name in error.validator_value if name not in error.instance}
        elif error.validator == "additionalProperties":
            found |= {(*path, name) for name in {*error.instance} - {*error.schema["properties"]}}
        else:
            found.add(path)
    return found


def places(value: object, path: documents.KeyPath = ()) -> Iterator[documents.KeyPath]:
    yield path
    entries: Any = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    for key, item in entries:
        yield from places(item, (*path, key))


VALUES = st.sampled_from([1, 1.0, 1.5, True, "1", "", {}, {"nmae": 1}, [], ["a"], [1], "remove"])


@settings(max_examples=150)
@given(st.sampled_from(OBJECTS), st.data())
def test_what_is_refused_is_what_jsonschema_refuses(
    document: documents.Document, data: st.DataObject
) -> None:
    text = json.dumps(document.data)
    (changed,) = documents.parse(text, document.file)
    kept = {("apiVersion",), ("kind",), ()}
    path = data.draw(st.sampled_from([each for each in places(changed.data) if each not in kept]))
    parent: Any = documents.at(changed.data, path[:-1])
    value = data.draw(VALUES)
    if value == "remove":
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    assert {each.path for each in schema.misfits(changed, "1.37")} == (
        refused_by_jsonschema(changed)
    )
