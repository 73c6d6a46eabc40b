"""Pods of a manifest as the containers that are to play them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import psutil
import pytest
import yaml
from tests.unit.conftest import ROOT

from muster.engine import ContainerSpec, Place, Stage
from muster.manifests import documents, workloads
from muster.rehearse.pods import (
    CONTAINER_SHM,
    FAULT_FOLDER,
    Cast,
    Change,
    Tailor,
    Wardrobe,
    aliases,
)

NO_CHANGE = Change()


@dataclass
class Shelf:
    """A Stage's volumes without an Engine: their files by name."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def volume(self, name: str, files: Mapping[str, bytes], image: str) -> str:
        assert image == "muster:cpu"
        assert name not in self.files
        self.files[name] = dict(files)
        return name


@dataclass
class Fitting:
    """A manifest's tailor, and what it made."""

    tailor: Tailor
    shelf: Shelf

    def cast(self, index: int = 0) -> Cast:
        return self.tailor.cast(index)

    def spec(self, index: int = 0) -> ContainerSpec:
        return self.cast(index).trainer.spec

    def place(self, index: int = 0) -> Place:
        return self.cast(index).trainer.place

    @property
    def notes(self) -> list[str]:
        self.cast()
        return list(self.tailor.notes)


def fitting(text: str, change: Change = NO_CHANGE) -> Fitting:
    found = documents.parse(text, "job.yaml")
    (group,) = workloads.pod_groups(found)
    shelf = Shelf()
    wardrobe = Wardrobe(cast("Stage", shelf), found, "muster:cpu")
    return Fitting(Tailor(group, wardrobe, change, {}), shelf)


def job(
    container: Mapping[str, Any] | None = None,
    pod: Mapping[str, Any] | None = None,
    *,
    change: Change = NO_CHANGE,
    further: str = "",
) -> Fitting:
    """An Indexed Job of three pods with a container and a pod spec of these fields."""
    trainer = {"name": "train", "image": "muster:cpu", "command": ["torchrun", "a.py"]}
    template = {
        "metadata": {"labels": {"app": "demo"}, "annotations": {"note": "a"}},
        "spec": {
            "subdomain": "svc",
            "restartPolicy": "Never",
            "containers": [{**trainer, **(container or {})}],
            **(pod or {}),
        },
    }
    spec = {"completionMode": "Indexed", "completions": 3, "parallelism": 3, "template": template}
    data = {"kind": "Job", "metadata": {"name": "demo", "namespace": "ml"}, "spec": spec}
    return fitting(f"{yaml.safe_dump(data)}---\n{further}", change)


def words(made: Fitting) -> list[str]:
    spec = made.spec()
    return [*(spec.entrypoint or ()), *spec.command]


# ---- the repository's own manifest -------------------------------------------------------------


def test_the_base_job_keeps_its_rights_its_limits_and_its_names() -> None:
    made = fitting((ROOT / "k8s" / "base" / "job.yaml").read_text())
    pod = made.cast(1)
    assert pod.before == ()
    assert pod.grace_s == 120
    spec, place = pod.trainer.spec, pod.trainer.place
    assert (spec.image, spec.user, spec.cap_add) == ("muster:cpu", "1000:1000", ())
    assert spec.entrypoint == ("python",)
    assert spec.command[:3] == ("-m", "muster.launcher", "--nnodes=2")
    assert spec.shm_bytes == 2 * 2**30
    assert spec.environment["JOB_COMPLETION_INDEX"] == "1"
    assert spec.environment["NCCL_SOCKET_IFNAME"] == "eth0"
    assert spec.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert place == Place(
        hostname="demo-1",
        domain="demo.default.svc.cluster.local",
        aliases=(
            "demo-1.demo",
            "demo-1.demo.default",
            "demo-1.demo.default.svc",
            "demo-1.demo.default.svc.cluster.local",
        ),
        tmpfs=("/tmp",),
        memory_bytes=4 * 2**30,
        groups=("1000",),
        cap_drop=("ALL",),
        read_only=True,
        no_new_privileges=True,
    )
    assert made.notes == []


# ---- rights ------------------------------------------------------------------------------------


def test_a_containers_security_context_goes_before_the_pods() -> None:
    own = {"runAsUser": 7, "capabilities": {"add": ["IPC_LOCK"], "drop": ["ALL"]}}
    made = job(
        {"securityContext": own},
        {"securityContext": {"runAsUser": 5, "runAsGroup": 6, "fsGroup": 8}},
    )
    assert made.spec().user == "7:6"
    assert made.spec().cap_add == ("IPC_LOCK",)
    assert made.place().cap_drop == ("ALL",)
    assert made.place().groups == ("8",)


def test_the_supplemental_groups_are_the_processes_too() -> None:
    made = job(pod={"securityContext": {"fsGroup": 8, "supplementalGroups": [8, 9]}})
    assert made.place().groups == ("8", "9")


def test_without_a_security_context_the_image_decides() -> None:
    made = job()
    place = made.place()
    assert made.spec().user is None
    assert (place.groups, place.cap_drop, place.read_only) == ((), (), False)
    assert not place.no_new_privileges


# ---- command and environment -------------------------------------------------------------------


def test_a_command_takes_the_place_of_the_entrypoint_and_arguments_alone_do_not() -> None:
    made = job({"command": ["torchrun", "--nnodes=3"], "args": ["a.py"]})
    assert (made.spec().entrypoint, made.spec().command) == (("torchrun",), ("--nnodes=3", "a.py"))
    text = """\
kind: Job
metadata: {name: demo}
spec:
  template:
    spec:
      initContainers:
      - {name: data, image: a, args: [fetch]}
      containers: [{name: train, image: muster:cpu, command: [torchrun, a.py]}]
"""
    (before,) = fitting(text).cast().before
    assert (before.spec.entrypoint, before.spec.command) == (None, ("fetch",))


def test_variables_are_put_in_the_place_of_their_names() -> None:
    env = [
        {"name": "A", "value": "1"},
        {"name": "B", "value": "$(A)$(C)$$(A)"},
        {"name": "C", "value": "3"},
    ]
    made = job({"env": env, "command": ["torchrun", "$(B)", "$(JOB_COMPLETION_INDEX)", "$(NO)"]})
    assert made.spec(2).command == ("1$(C)$(A)", "2", "$(NO)")


def test_a_variable_of_the_containers_own_goes_before_one_from_a_config_map() -> None:
    maps = """\
kind: ConfigMap
metadata: {name: first, namespace: ml}
data: {A: first, B: first, C: first}
---
kind: ConfigMap
metadata: {name: second, namespace: ml}
data: {B: second, C: second}
---
kind: ConfigMap
metadata: {name: first, namespace: other}
data: {A: other}
"""
    env_from = [{"configMapRef": {"name": name}} for name in ("first", "second")]
    key = {"configMapKeyRef": {"name": "second", "key": "B"}}
    env = [{"name": "C", "value": "own"}, {"name": "D", "valueFrom": key}]
    values = job({"envFrom": env_from, "env": env}, further=maps).spec().environment
    assert [values[name] for name in "ABCD"] == ["first", "second", "own", "second"]


def field_of(path: str) -> dict[str, Any]:
    return {"name": path, "valueFrom": {"fieldRef": {"fieldPath": path}}}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metadata.name", "demo-1-xxxxx"),
        ("metadata.namespace", "ml"),
        ("spec.nodeName", "rehearsal-1"),
        ("status.podIP", "demo-1.svc.ml.svc.cluster.local"),
        ("metadata.labels['app']", "demo"),
        ("metadata.labels['job-name']", "demo"),
        ("metadata.annotations['note']", "a"),
        ("metadata.labels['batch.kubernetes.io/job-completion-index']", "1"),
        ("metadata.annotations['batch.kubernetes.io/job-completion-index']", "1"),
    ],
)
def test_a_pod_is_told_about_itself(path: str, value: str) -> None:
    assert job({"env": [field_of(path)]}).spec(1).environment[path] == value


def test_a_bare_pod_has_its_own_name_and_no_index() -> None:
    text = """\
kind: Pod
metadata: {name: one}
spec:
  hostname: node-0
  containers:
  - name: train
    image: muster:cpu
    command: [torchrun, a.py]
    env: [{name: NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
"""
    made = fitting(text)
    assert made.spec().environment["NAME"] == "one"
    assert "JOB_COMPLETION_INDEX" not in made.spec().environment
    assert made.place().hostname == "node-0"


def test_the_pods_of_a_stateful_set_have_no_completion_index() -> None:
    text = """\
kind: StatefulSet
metadata: {name: demo}
spec:
  replicas: 2
  serviceName: svc
  template:
    spec:
      containers:
      - name: train
        image: muster:cpu
        command: [torchrun, a.py]
        env:
        - name: NUMBER
          valueFrom:
            fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}
"""
    values = fitting(text).spec(1).environment
    assert values["NUMBER"] == "1"
    assert "JOB_COMPLETION_INDEX" not in values


JOBSET = """\
kind: JobSet
metadata: {name: js}
spec:
  replicatedJobs:
  - name: node
    replicas: 2
    template:
      spec:
        parallelism: 2
        completions: 2
        template:
          spec:
            containers:
            - name: train
              image: muster:cpu
              command: [torchrun, a.py]
              env:
              - name: JOB
                valueFrom:
                  fieldRef: {fieldPath: "metadata.annotations['jobset.sigs.k8s.io/job-index']"}
"""


def test_a_pod_of_a_job_set_has_its_index_in_its_own_job() -> None:
    made = fitting(JOBSET)
    values = made.spec(3).environment
    assert (values["JOB"], values["JOB_COMPLETION_INDEX"]) == ("1", "1")
    assert made.place(3).hostname == "js-node-1-1"
    assert made.place(3).aliases[0] == "js-node-1-1.js"


def test_kubeflows_variables_are_in_a_train_jobs_pods() -> None:
    text = """\
kind: TrainJob
metadata: {name: tj}
spec:
  trainer: {numNodes: 2, image: muster:cpu, command: [torchrun, a.py]}
"""
    values = fitting(text).spec(1).environment
    assert values["PET_NODE_RANK"] == "1"
    assert values["PET_NNODES"] == "2"
    assert values["PET_MASTER_ADDR"] == "tj-node-0-0.tj"


def test_torchrun_tells_how_the_nodes_met_whatever_the_manifest_wants() -> None:
    made = job({"env": [{"name": "LOGLEVEL", "value": "ERROR"}]})
    assert made.spec().environment["LOGLEVEL"] == "INFO"


# ---- fewer ranks, less patience ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (["torchrun", "--nproc-per-node=8", "a.py"], ["torchrun", "--nproc-per-node=2", "a.py"]),
        (["torchrun", "--nproc_per_node", "8"], ["torchrun", "--nproc_per_node", "2"]),
        (["torchrun", "--nproc-per-node", "$(N)"], ["torchrun", "--nproc-per-node", "2"]),
        (["torchrun", "--nproc=auto"], ["torchrun", "--nproc=2"]),
        (["sh", "-c", "torchrun --nproc_per_node 8 a.py"], "torchrun --nproc_per_node 2 a.py"),
        (["sh", "-c", "torchrun --nproc-per-node=$GPUS a.py"], "torchrun --nproc-per-node=2 a.py"),
        (["sh", "-c", 'torchrun --nproc_per_node="8" a.py'], "torchrun --nproc_per_node=2 a.py"),
        (
            ["sh", "-c", "torchrun --nproc-per-node \\\n 8 a.py"],
            "torchrun --nproc-per-node \\\n 2 a.py",
        ),
        (
            ["sh", "-c", "torchrun --nproc_per_node=$(nvidia-smi -L | wc -l) a.py"],
            "torchrun --nproc_per_node=2 a.py",
        ),
        (["sh", "-c", "torchrun --nproc_per_node=8; date"], "torchrun --nproc_per_node=2; date"),
        (["torchrun", "--nnodes=8", "a.py"], ["torchrun", "--nnodes=8", "a.py"]),
        (["torchrun", "a.py", "--my-nproc=8"], ["torchrun", "a.py", "--my-nproc=8"]),
    ],
)
def test_the_ranks_are_fewer_however_they_are_spelled(
    given: list[str], made: list[str] | str
) -> None:
    found = words(job({"command": given}, change=Change(nproc_per_node=2)))
    assert (found[-1] if isinstance(made, str) else found) == made


def test_a_flag_and_its_value_may_stand_in_command_and_args() -> None:
    container = {"command": ["torchrun", "--nproc-per-node"], "args": ["8", "a.py"]}
    found = words(job(container, change=Change(nproc_per_node=2)))
    assert found == ["torchrun", "--nproc-per-node", "2", "a.py"]


@pytest.mark.parametrize("env", [[], [{"name": "PET_NPROC_PER_NODE", "value": "8"}]])
def test_the_ranks_are_set_in_the_environment_too(env: list[dict[str, str]]) -> None:
    made = job({"env": env}, change=Change(nproc_per_node=2))
    assert made.spec().environment["PET_NPROC_PER_NODE"] == "2"
    assert "PET_NPROC_PER_NODE" not in job().spec().environment


SHORT = "join_timeout=20,timeout=20"


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (
            ["torchrun", "--rdzv-conf=join_timeout=1800,read_timeout=900"],
            ["torchrun", f"--rdzv-conf=join_timeout=1800,read_timeout=900,{SHORT}"],
        ),
        (
            ["torchrun", "--rdzv_conf", "read_timeout=900"],
            ["torchrun", "--rdzv_conf", f"read_timeout=900,{SHORT}"],
        ),
        (
            ["sh", "-c", "torchrun --rdzv-conf 'read_timeout=900' a.py"],
            f"torchrun --rdzv-conf 'read_timeout=900,{SHORT}' a.py",
        ),
        (
            ["sh", "-c", "torchrun --rdzv_conf=is_host=$HOST a.py"],
            f"torchrun --rdzv_conf=is_host=$HOST,{SHORT} a.py",
        ),
        (
            ["python", "-m", "muster.launcher", "a.py"],
            ["python", "-m", "muster.launcher", f"--rdzv-conf={SHORT}", "a.py"],
        ),
        (
            ["sh", "-c", "exec python -m muster.launcher a.py"],
            f"exec python -m muster.launcher --rdzv-conf={SHORT} a.py",
        ),
        (["torchrun", "a.py"], ["torchrun", "a.py"]),
    ],
)
def test_the_last_timeout_of_a_rendezvous_is_a_short_one(
    given: list[str], made: list[str] | str
) -> None:
    found = words(job({"command": given}, change=Change(join_timeout_s=20)))
    assert (found[-1] if isinstance(made, str) else found) == made


@pytest.mark.parametrize(
    ("env", "conf"),
    [
        ([], SHORT),
        ([{"name": "PET_RDZV_CONF", "value": "read_timeout=9"}], f"read_timeout=9,{SHORT}"),
    ],
)
def test_without_the_flag_the_environment_has_the_short_timeout(
    env: list[dict[str, str]], conf: str
) -> None:
    made = job({"env": env}, change=Change(join_timeout_s=20))
    assert made.spec().environment["PET_RDZV_CONF"] == conf
    assert "PET_RDZV_CONF" not in job().spec().environment


def test_a_faults_module_stands_before_the_manifests_own() -> None:
    change = Change(environment={"PYTHONPATH": FAULT_FOLDER}, files={"sitecustomize.py": b"x"})
    made = job({"env": [{"name": "PYTHONPATH", "value": "/code"}]}, change=change)
    assert made.spec().environment["PYTHONPATH"] == f"{FAULT_FOLDER}:/code"
    assert made.place().volumes == {"fault": FAULT_FOLDER}
    assert made.shelf.files == {"fault": {"sitecustomize.py": b"x"}}


def test_another_image_is_in_all_containers() -> None:
    change = Change(image="muster:cu13")
    made = job(pod={"initContainers": [{"name": "data", "image": "a"}]}, change=change)
    pod = made.cast()
    assert [role.spec.image for role in (*pod.before, pod.trainer)] == ["muster:cu13"] * 2


# ---- memory ------------------------------------------------------------------------------------


def shm(empty_dir: Mapping[str, str] | None, memory: str | None, change: Change = NO_CHANGE) -> int:
    container: dict[str, Any] = {}
    pod: dict[str, Any] = {}
    if memory is not None:
        container["resources"] = {"limits": {"memory": memory}}
    if empty_dir is not None:
        container["volumeMounts"] = [{"name": "dshm", "mountPath": "/dev/shm"}]
        pod["volumes"] = [{"name": "dshm", "emptyDir": empty_dir}]
    return job(container, pod, change=change).spec().shm_bytes


@pytest.mark.parametrize(
    ("empty_dir", "memory", "size"),
    [
        (None, "4Gi", CONTAINER_SHM),
        ({"medium": "Memory", "sizeLimit": "2Gi"}, "4Gi", 2 * 2**30),
        ({"medium": "Memory", "sizeLimit": "8Gi"}, "4Gi", 4 * 2**30),
        ({"medium": "Memory"}, "4Gi", 4 * 2**30),
        ({"medium": "Memory", "sizeLimit": "2Gi"}, None, 2 * 2**30),
        ({"medium": "Memory"}, None, psutil.virtual_memory().total),
    ],
)
def test_shared_memory_is_the_smaller_of_its_limit_and_the_memorys(
    empty_dir: dict[str, str] | None, memory: str | None, size: int
) -> None:
    assert shm(empty_dir, memory) == size


def test_a_fault_sets_the_shared_memory() -> None:
    assert shm({"medium": "Memory"}, "4Gi", Change(shm_bytes=2**20)) == 2**20


def test_the_memory_limit_is_the_containers_own() -> None:
    made = job({"resources": {"requests": {"memory": "1Gi"}, "limits": {"memory": "2G"}}})
    assert made.place().memory_bytes == 2 * 10**9
    assert job({"resources": {"requests": {"memory": "1Gi"}}}).place().memory_bytes is None


# ---- volumes -----------------------------------------------------------------------------------

CODE = """\
kind: ConfigMap
metadata: {name: code, namespace: ml}
data: {a.py: "print(1)", b.py: "print(2)"}
"""


def mount(name: str, folder: str, **more: str) -> dict[str, str]:
    return {"name": name, "mountPath": folder, **more}


def test_a_config_map_is_a_volume_with_its_files_for_all_pods() -> None:
    volume = {"name": "code", "configMap": {"name": "code"}}
    made = job({"volumeMounts": [mount("code", "/code")]}, {"volumes": [volume]}, further=CODE)
    assert made.place(0).volumes == made.place(1).volumes == {"configmap-code": "/code"}
    assert made.shelf.files == {"configmap-code": {"a.py": b"print(1)", "b.py": b"print(2)"}}


def test_two_volumes_of_one_config_map_hold_each_its_items() -> None:
    volumes = [
        {"name": name, "configMap": {"name": "code", "items": [{"key": key, "path": path}]}}
        for name, key, path in (("one", "a.py", "main.py"), ("two", "b.py", "lib/b.py"))
    ]
    mounts = [mount("one", "/one"), mount("two", "/two")]
    made = job({"volumeMounts": mounts}, {"volumes": volumes}, further=CODE)
    assert made.place().volumes == {"configmap-one": "/one", "configmap-two": "/two"}
    assert made.shelf.files == {
        "configmap-one": {"main.py": b"print(1)"},
        "configmap-two": {"lib/b.py": b"print(2)"},
    }


def test_a_claim_is_one_volume_for_all_pods() -> None:
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "ckpt"}}
    mounts = [mount("data", "/ckpt"), mount("data", "/logs", subPath="a/logs")]
    made = job({"volumeMounts": mounts}, {"volumes": [volume]})
    both = {"claim-ckpt": "/ckpt", "claim-ckpt-a-logs": "/logs"}
    assert made.place(0).volumes == made.place(2).volumes == both


def test_an_empty_folder_of_one_container_is_its_own_in_every_pod() -> None:
    volumes = [{"name": "tmp", "emptyDir": {}}, {"name": "big", "ephemeral": {}}]
    mounts = [mount("tmp", "/tmp"), mount("big", "/big")]
    made = job({"volumeMounts": mounts}, {"volumes": volumes})
    assert made.place().tmpfs == ("/tmp", "/big")
    assert made.shelf.files == {}


def test_what_an_init_container_leaves_in_an_empty_folder_is_there_for_the_ranks() -> None:
    data = {"name": "data", "image": "a", "volumeMounts": [mount("work", "/out")]}
    pod = {"initContainers": [data], "volumes": [{"name": "work", "emptyDir": {}}]}
    made = job({"volumeMounts": [mount("work", "/in")]}, pod)
    first, other, again = made.cast(0), made.cast(1), made.cast(0)
    (volume,) = first.trainer.place.volumes
    assert first.trainer.place.volumes == {volume: "/in"}
    assert first.before[0].place.volumes == {volume: "/out"}
    assert first.trainer.place.tmpfs == ()
    # another pod has another, and so has the one that comes in its place
    assert len({volume, *other.trainer.place.volumes, *again.trainer.place.volumes}) == 3


def test_shared_memory_is_each_containers_own() -> None:
    mounts = {"volumeMounts": [mount("dshm", "/dev/shm")]}
    pod = {
        "initContainers": [{"name": "data", "image": "a", **mounts}],
        "volumes": [{"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}],
    }
    made = job(mounts, pod)
    roles = (*made.cast().before, made.cast().trainer)
    assert [role.spec.shm_bytes for role in roles] == [2**30] * 2
    assert made.shelf.files == {}


def test_init_containers_come_first_in_their_order() -> None:
    initial = [{"name": name, "image": "a", "args": [name]} for name in ("b", "a")]
    made = job(pod={"initContainers": initial})
    assert [role.name for role in made.cast().before] == ["b", "a"]
    assert made.cast().before[0].spec.environment["JOB_COMPLETION_INDEX"] == "0"


# ---- what is left out --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("container", "pod", "note"),
    [
        (
            {"resources": {"limits": {"nvidia.com/gpu": 8, "cpu": 1, "memory": "1Gi"}}},
            {},
            "nvidia.com/gpu is left out: the containers have no devices",
        ),
        (
            {"resources": {"limits": {"hugepages-2Mi": "5Gi"}}},
            {},
            "hugepages-2Mi is left out: the containers have no devices",
        ),
        (
            {"resources": {"claims": [{"name": "gpu"}]}},
            {},
            "resource claims are left out: the containers have no devices",
        ),
        (
            {"securityContext": {"privileged": True}},
            {},
            "the container train is not privileged here",
        ),
        (
            {"livenessProbe": {}},
            {},
            "the probes and hooks of the container train are left out",
        ),
        ({}, {"hostNetwork": True}, "hostNetwork is played on a network of its own"),
        (
            {},
            {"initContainers": [{"name": "rxdm", "image": "a", "restartPolicy": "Always"}]},
            "the sidecar rxdm is left out",
        ),
        (
            {},
            {
                "containers": [
                    {"name": "log", "image": "a"},
                    {"name": "train", "image": "muster:cpu", "command": ["torchrun", "a.py"]},
                ]
            },
            "the container log beside torchrun is left out",
        ),
        (
            {"envFrom": [{"secretRef": {"name": "token"}}]},
            {},
            "the variables of the Secret token are left out",
        ),
        (
            {"envFrom": [{"configMapRef": {"name": "far"}}]},
            {},
            "the variables of the ConfigMap far are left out: it is not in the file",
        ),
        (
            {"env": [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}]},
            {},
            "the variable KEY is left out: only a cluster has it",
        ),
        (
            {"env": [field_of("status.podIP")]},
            {},
            "the variable status.podIP is the pod's name, not its address",
        ),
        (
            {"volumeMounts": [mount("host", "/host")]},
            {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]},
            "/host is left out: only a cluster has what is mounted there",
        ),
        (
            {"volumeMounts": [mount("code", "/code")]},
            {"volumes": [{"name": "code", "configMap": {"name": "far"}}]},
            "/code is left out: only a cluster has what is mounted there",
        ),
        (
            {"volumeMounts": [mount("data", "/a"), mount("data", "/b")]},
            {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "ckpt"}}]},
            "/b is left out: its volume is mounted at /a too",
        ),
    ],
)
def test_what_is_otherwise_than_in_a_cluster_is_said_once(
    container: dict[str, Any], pod: dict[str, Any], note: str
) -> None:
    made = job(container, pod)
    made.cast(1)
    assert made.notes == [note]


def test_a_config_maps_file_under_a_sub_path_is_said_to_be_left_out() -> None:
    volume = {"name": "code", "configMap": {"name": "code"}}
    mounts = [mount("code", "/a.py", subPath="a.py")]
    made = job({"volumeMounts": mounts}, {"volumes": [volume]}, further=CODE)
    assert made.place().volumes == {}
    assert made.notes == ["/a.py is left out: only a cluster has what is mounted there"]


# ---- names -------------------------------------------------------------------------------------


def test_without_a_service_a_pod_has_no_name_in_dns() -> None:
    made = job(pod={"subdomain": None})
    assert (made.place().hostname, made.place().domain, made.place().aliases) == (
        "demo-0",
        None,
        (),
    )


def test_a_pod_answers_to_what_a_resolver_completes_and_not_to_its_bare_name() -> None:
    names = aliases("demo-0.svc.ml.svc.corp.example")
    assert names == (
        "demo-0.svc",
        "demo-0.svc.ml",
        "demo-0.svc.ml.svc",
        "demo-0.svc.ml.svc.corp.example",
    )
    assert aliases(None) == ()


@pytest.mark.parametrize(
    ("grace", "seconds"), [({}, 30), ({"terminationGracePeriodSeconds": 0}, 0)]
)
def test_the_grace_period_is_the_manifests_or_kubernetes_own(
    grace: dict[str, int], seconds: int
) -> None:
    assert job(pod=grace).cast().grace_s == seconds
