import pytest

from muster.manifests import documents, workloads
from muster.manifests.workloads import PodGroup


def groups(text: str) -> tuple[PodGroup, ...]:
    return workloads.pod_groups(documents.parse(text, "job.yaml"))


JOB = """\
apiVersion: batch/v1
kind: Job
metadata: {name: demo, namespace: ml}
spec:
  completionMode: Indexed
  parallelism: 4
  completions: 3
  template:
    metadata: {labels: {app: demo}}
    spec:
      subdomain: svc
      containers:
      - name: log
      - name: train
        command: [torchrun, --nnodes=3, train.py]
"""


def test_a_job_makes_its_pods_with_names_by_index() -> None:
    (group,) = groups(JOB)
    assert (group.kind, group.name, group.namespace, group.replicas) == ("Job", "demo", "ml", 3)
    assert group.hostname(2) == "demo-2"
    assert group.fqdn(2) == "demo-2.svc.ml.svc.cluster.local"
    assert group.fqdn(0, "corp") == "demo-0.svc.ml.svc.corp"
    assert group.labels == {
        "app": "demo",
        "batch.kubernetes.io/job-name": "demo",
        "job-name": "demo",
    }


def test_the_container_with_the_torchrun_is_the_one() -> None:
    (group,) = groups(JOB)
    assert (group.container, group.trainer["name"]) == (1, "train")
    assert group.trainer_path == ("spec", "template", "spec", "containers", 1)
    assert group.invocation is not None
    assert group.document.line(*group.invocation.flags["nnodes"].path) == 15


def test_without_an_index_no_pod_has_a_name_of_its_own() -> None:
    (group,) = groups(JOB.replace("Indexed", "NonIndexed"))
    assert (group.named, group.fqdn(0)) == (False, None)


def test_without_a_subdomain_no_pod_has_a_full_name() -> None:
    (group,) = groups(JOB.replace("      subdomain: svc\n", ""))
    assert (group.named, group.fqdn(0)) == (True, None)


JOBSET = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: js}
spec:
  NETWORK
  replicatedJobs:
  - name: leader
    template: &job
      spec:
        parallelism: 2
        completions: 2
        template:
          spec:
            containers: [{name: a, command: [torchrun, a.py]}]
  - name: workers
    replicas: 3
    template: *job
"""


def test_a_job_set_makes_the_pods_of_each_replicated_job() -> None:
    leader, workers = groups(JOBSET.replace("NETWORK", "suspend: false"))
    assert (leader.replicas, workers.replicas) == (2, 6)
    assert [workers.hostname(index) for index in (0, 1, 2, 5)] == [
        "js-workers-0-0",
        "js-workers-0-1",
        "js-workers-1-0",
        "js-workers-2-1",
    ]
    assert leader.fqdn(1) == "js-leader-0-1.js.default.svc.cluster.local"
    assert leader.labels["batch.kubernetes.io/job-name"] == "js-leader-0"
    assert "batch.kubernetes.io/job-name" not in workers.labels
    assert workers.job["parallelism"] == 2
    assert workers.document.line(*workers.job_path) == 9


@pytest.mark.parametrize(
    ("network", "subdomain"),
    [
        ("network: {subdomain: other}", "other"),
        ("network: {enableDNSHostnames: true}", "js"),
        ("network: {enableDNSHostnames: false}", None),
    ],
)
def test_a_job_sets_network_names_the_subdomain(network: str, subdomain: str | None) -> None:
    assert {each.subdomain for each in groups(JOBSET.replace("NETWORK", network))} == {subdomain}


TRAINJOB = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: tj}
spec:
  runtimeRef: {name: rt, kind: TrainingRuntime}
  trainer:
    numNodes: 3
    command: [torchrun, train.py]
    env: [{name: A, value: "1"}]
    resourcesPerNode: {limits: {nvidia.com/gpu: 8}}
"""
RUNTIME = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata: {name: rt}
spec:
  mlPolicy: {POLICY}
  template:
    spec:
      network: {subdomain: sub}
      replicatedJobs:
      - name: data
        template:
          spec: {template: {spec: {containers: [{name: init}]}}}
      - name: node
        template:
          metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}
          spec:
            template:
              spec:
                containers:
                - {name: side}
                - {name: node, image: torch, command: [python, -m, torch.distributed.run, own.py]}
---
"""


def test_a_train_job_without_its_runtime_has_what_kubeflow_gives_it() -> None:
    (group,) = groups(TRAINJOB)
    assert (group.replicas, group.whole, group.kind) == (3, False, "TrainJob")
    assert group.fqdn(2) == "tj-node-0-2.tj.default.svc.cluster.local"
    assert group.invocation is not None
    assert (group.invocation.nnodes, group.invocation.master_addr) == ("3", "tj-node-0-0.tj")
    assert (group.environment["A"], group.trainer["resources"]) == (
        "1",
        {"limits": {"nvidia.com/gpu": 8}},
    )
    assert group.document.line(*group.invocation.path) == 8


def test_a_train_job_has_the_pods_of_its_runtime_under_its_own_name() -> None:
    data, node = groups(RUNTIME.replace("POLICY", "torch: {}") + TRAINJOB)
    assert (data.invocation, data.hostname(0)) == (None, "tj-data-0-0")
    assert (node.replicas, node.whole, node.container) == (3, True, 1)
    assert node.fqdn(1) == "tj-node-0-1.sub.default.svc.cluster.local"
    assert node.trainer["image"] == "torch"
    assert node.invocation is not None
    assert (node.invocation.script, node.invocation.nnodes) == ("train.py", "3")


def test_a_runtime_without_torch_in_its_policy_sets_no_flags() -> None:
    job = TRAINJOB.partition("  trainer:")[0]
    _, node = groups(RUNTIME.replace("POLICY", "numNodes: 5") + job)
    assert node.invocation is not None
    assert (node.replicas, node.invocation.script, node.invocation.nnodes) == (5, "own.py", None)


POD = """\
apiVersion: v1
kind: Pod
metadata: {name: node-0}
spec:
  HOSTNAME
  subdomain: svc
  containers: [{name: a, command: [torchrun, a.py]}]
"""


@pytest.mark.parametrize(
    ("hostname", "fqdn"),
    [("hostname: first", "first.svc.default.svc.cluster.local"), ("nodeName: x", None)],
)
def test_a_pod_is_known_by_its_hostname_only(hostname: str, fqdn: str | None) -> None:
    (group,) = groups(POD.replace("HOSTNAME", hostname))
    assert (group.replicas, group.fqdn(0)) == (1, fqdn)
    assert group.hostname(0) == ("first" if fqdn else "node-0")


def test_a_stateful_set_is_called_by_its_service() -> None:
    text = """\
kind: StatefulSet
metadata: {name: s}
spec:
  replicas: 2
  serviceName: svc
  template: {spec: {containers: [{name: a}]}}
"""
    (group,) = groups(text)
    assert (group.replicas, group.fqdn(1)) == (2, "s-1.svc.default.svc.cluster.local")


def test_templates_in_other_kinds_are_found_where_they_stand() -> None:
    text = """\
kind: PyTorchJob
metadata: {name: p}
spec:
  pytorchReplicaSpecs:
    Master: {template: {spec: {containers: [{name: a, command: [torchrun, a.py]}]}}}
    Worker:
      replicas: 3
      template:
        metadata: {labels: {x: "y"}}
        spec: {containers: [{name: b}]}
"""
    master, worker = groups(text)
    assert (master.replicas, worker.replicas) == (1, 3)
    assert (worker.document.line(*worker.template_path), worker.labels) == (10, {"x": "y"})


@pytest.mark.parametrize(
    "text",
    [
        "kind: Job",
        "kind: Job\nspec: []",
        "kind: Job\nmetadata: x\nspec: {template: {spec: {containers: [1, {command: x}]}}}",
        "kind: JobSet\nspec: {replicatedJobs: [x, {template: 1}]}",
        "kind: TrainJob\nspec: {trainer: []}",
        "kind: Pod\nspec: {containers: {}}",
        "kind: [a]",
    ],
)
def test_objects_of_the_wrong_shape_are_read_all_the_same(text: str) -> None:
    for group in groups(text):
        assert group.invocation is None
        assert isinstance(group.hostname(0), str)


# ---- the environment -----------------------------------------------------------------------------

CONTAINER = """\
envFrom:
- configMapRef: {name: here}
- {prefix: P_, configMapRef: {name: here}}
- configMapRef: {name: elsewhere}
env:
- {name: A, value: "1"}
- {name: B, value: $(A)-$(P_X)-$(LATER)-$A}
- {name: X, value: own}
- {name: EMPTY}
- {name: KEY, valueFrom: {configMapKeyRef: {name: here, key: X}}}
- {name: NONE, valueFrom: {configMapKeyRef: {name: here, key: nothing}}}
- {name: IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: LATER, value: "2"}
"""


def test_the_environment_is_what_the_manifest_tells_of_it() -> None:
    text = "kind: ConfigMap\nmetadata: {name: here}\ndata: {X: x, Z: z}"
    maps = workloads.config_maps(documents.parse(text, "job.yaml"))
    (container,) = documents.parse(CONTAINER, "job.yaml")
    assert workloads.environment(container.data, "default", maps) == {
        "X": "own",
        "Z": "z",
        "P_X": "x",
        "P_Z": "z",
        "A": "1",
        "B": "1-x-$(LATER)-$A",
        "EMPTY": "",
        "KEY": "x",
        "LATER": "2",
    }
    assert "Z" not in workloads.environment(container.data, "other", maps)


def test_a_flag_may_come_from_a_config_map() -> None:
    text = (
        "kind: ConfigMap\nmetadata: {name: c, namespace: ml}\ndata: {PET_NNODES: '3'}\n---\n"
        + JOB.replace("--nnodes=3, ", "").replace(
            "- name: train", "- name: train\n        envFrom: [{configMapRef: {name: c}}]"
        )
    )
    (group,) = groups(text)
    assert group.invocation is not None
    assert group.invocation.nnodes == "3"
