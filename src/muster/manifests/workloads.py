"""The pods that a manifest makes: how many, their template, their names in the cluster."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from muster.manifests import invocation
from muster.manifests.documents import Document, KeyPath, at, mapping, mappings, whole
from muster.manifests.invocation import Invocation

CLUSTER_DOMAIN = "cluster.local"
INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
# https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/job-v1/
DEFAULT_BACKOFF_LIMIT = 6
# https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#pod-termination
DEFAULT_GRACE_S = 30
# how often earlier pods of the same index failed, counted against its limit and not
# https://kubernetes.io/docs/reference/labels-annotations-taints/#job-index-failure-count
FAILURE_COUNTS = (
    "batch.kubernetes.io/job-index-failure-count",
    "batch.kubernetes.io/job-index-ignored-failure-count",
)

# Kubeflow's names for a TrainJob's own job and container, and the label that marks that job
# https://www.kubeflow.org/docs/components/trainer/operator-guides/job-template/
TRAINER = "node"
ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
TRAIN_JOB_PORT = 29500

# kinds whose controllers add nothing to a pod's command and environment, and whose pods are counted
_KNOWN = frozenset(
    {
        "Job",
        "JobSet",
        "TrainJob",
        "Pod",
        "StatefulSet",
        "Deployment",
        "ReplicaSet",
        "DaemonSet",
        "CronJob",
    }
)

ConfigMaps = Mapping[tuple[str, str], Mapping[str, str]]
_NO_FIELDS: Mapping[str, str] = {}


@dataclass(frozen=True)
class PodGroup:
    """Pods made from one template.

    `template` is the pod's spec, which stands at `template_path`; `metadata` is the template's,
    at `metadata_path`. `job` is the spec of the Job around it, at `job_path`; empty for others.
    `stem` is what a pod's host name begins with; `subdomain` is the headless Service that the
    pod's full name holds, None where it has none; `makes_service` says that the kind's controller
    makes that Service. `container` is the index of the container with the torchrun. `whole` is
    False where most of the template is not in the file: a TrainJob's is in the runtime it names.
    """

    kind: str
    name: str
    namespace: str
    document: Document
    template_path: KeyPath
    metadata_path: KeyPath
    template: Mapping[str, Any]
    metadata: Mapping[str, Any]
    replicas: int
    indexed: bool
    stem: str
    subdomain: str | None
    pods_per_job: int | None = None
    job_path: KeyPath = ()
    job: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    container: int | None = None
    invocation: Invocation | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    makes_service: bool = False
    whole: bool = True

    def hostname(self, index: int) -> str:
        """The host name of a pod, also where its full name does not resolve."""
        if not self.indexed:
            return self.stem if self.replicas == 1 else f"{self.stem}-{index}"
        if self.pods_per_job is None:
            return f"{self.stem}-{index}"
        return f"{self.stem}-{index // self.pods_per_job}-{index % self.pods_per_job}"

    def fqdn(self, index: int, cluster_domain: str = CLUSTER_DOMAIN) -> str | None:
        """The name under the headless Service; None where a pod has no such name."""
        if self.subdomain is None or not self.named:
            return None
        service = f"{self.subdomain}.{self.namespace}.svc.{cluster_domain}"
        return f"{self.hostname(index)}.{service}"

    @property
    def named(self) -> bool:
        """Whether a pod's host name is its own in DNS: the index or the manifest gives it."""
        return self.indexed or (self.kind == "Pod" and "hostname" in self.template)

    @property
    def known(self) -> bool:
        """Whether it is known how many pods the kind makes, and that no flags are added to them."""
        return self.kind in _KNOWN

    @property
    def containers(self) -> list[dict[str, Any]]:
        return mappings(self.template.get("containers"))

    @property
    def trainer(self) -> Mapping[str, Any]:
        """The container with the torchrun; empty where there is none."""
        return {} if self.container is None else self.containers[self.container]

    @property
    def trainer_path(self) -> KeyPath:
        assert self.container is not None
        if not self.whole:
            return self.template_path
        return (*self.template_path, "containers", self.container)


def pod_groups(documents: Sequence[Document]) -> tuple[PodGroup, ...]:
    """Every template of a manifest that makes pods, in the file's order."""
    maps = config_maps(documents)
    runtimes = [each for each in documents if each.kind.endswith("TrainingRuntime")]
    return tuple(group for document in documents for group in _groups(document, runtimes, maps))


def services(documents: Sequence[Document]) -> tuple[Document, ...]:
    return of_kind(documents, "Service")


def of_kind(documents: Sequence[Document], kind: str) -> tuple[Document, ...]:
    return tuple(document for document in documents if document.kind == kind)


def config_maps(documents: Sequence[Document]) -> dict[tuple[str, str], dict[str, str]]:
    """The values of each ConfigMap, by namespace and name."""
    return {
        (document.namespace, document.name): {
            key: str(value) for key, value in mapping(document.data.get("data")).items()
        }
        for document in of_kind(documents, "ConfigMap")
    }


def environment(
    container: Mapping[str, Any],
    namespace: str,
    maps: ConfigMaps,
    fields: Mapping[str, str] = _NO_FIELDS,
) -> dict[str, str]:
    """A container's variables as far as the manifest itself tells them, $(NAME) substituted.

    What comes from a Secret, from a ConfigMap that is not in the file or from a field of the pod
    that is not in `fields` is left out.
    """
    values: dict[str, str] = {}
    for source in mappings(container.get("envFrom")):
        name = str(mapping(source.get("configMapRef")).get("name", ""))
        prefix = str(source.get("prefix", ""))
        for key, value in maps.get((namespace, name), {}).items():
            values[prefix + key] = value
    for entry in mappings(container.get("env")):
        name = str(entry.get("name", ""))
        origin = mapping(entry.get("valueFrom"))
        reference = mapping(origin.get("configMapKeyRef"))
        if reference:
            found = maps.get((namespace, str(reference.get("name", ""))), {})
            key = str(reference.get("key", ""))
            if key in found:
                values[name] = found[key]
        elif origin:
            values.pop(name, None)
            field_path = str(mapping(origin.get("fieldRef")).get("fieldPath", ""))
            if field_path in fields:
                values[name] = fields[field_path]
        else:
            values[name] = invocation.substitute(str(entry.get("value", "")), values)
    return values


def _groups(
    document: Document, runtimes: Sequence[Document], maps: ConfigMaps
) -> Iterator[PodGroup]:
    spec = mapping(document.data.get("spec"))
    match document.kind:
        case "Job":
            yield _job(document, maps)
        case "JobSet":
            yield from _replicated_jobs(document, maps, ("spec",), document.name)
        case "TrainJob":
            yield from _train_job(document, runtimes, maps)
        case "TrainingRuntime" | "ClusterTrainingRuntime":
            # its pods are those of the TrainJobs that name it
            pass
        case "Pod":
            stem = str(spec.get("hostname", document.name))
            yield replace(_group(document, maps, ("spec",)), stem=stem)
        case "StatefulSet":
            group = _group(document, maps, ("spec", "template", "spec"))
            yield replace(
                group,
                replicas=whole(spec.get("replicas"), 1),
                indexed=True,
                # the controller sets it from its own serviceName
                subdomain=str(spec["serviceName"]) if "serviceName" in spec else None,
            )
        case _:
            yield from _others(document, maps, document.data, ())


def _job(document: Document, maps: ConfigMaps) -> PodGroup:
    job = mapping(document.data.get("spec"))
    group = _group(document, maps, ("spec", "template", "spec"))
    return replace(
        group,
        replicas=pods_of_job(job),
        indexed=job.get("completionMode") == "Indexed",
        job_path=("spec",),
        job=job,
        labels={**group.labels, **_job_name(document.name)},
    )


def pods_of_job(job: Mapping[str, Any]) -> int:
    """How many pods of a Job run at one time."""
    parallelism = whole(job.get("parallelism"), 1)
    return min(parallelism, whole(job.get("completions"), parallelism))


def _replicated_jobs(
    document: Document, maps: ConfigMaps, path: KeyPath, name: str
) -> Iterator[PodGroup]:
    """The pods of each replicated job of the JobSet `name`, whose spec stands at `path`.

    The controller makes the headless Service for them, and calls them
    <jobset>-<replicated job>-<job>-<pod>.<subdomain>: https://jobset.sigs.k8s.io/docs/concepts
    """
    spec = mapping(at(document.data, path))
    network = mapping(spec.get("network"))
    for index, replicated in enumerate(mappings(spec.get("replicatedJobs"))):
        job_path: KeyPath = (*path, "replicatedJobs", index, "template", "spec")
        job = mapping(mapping(replicated.get("template")).get("spec"))
        stem = f"{name}-{replicated.get('name', '')}"
        jobs, per_job = whole(replicated.get("replicas"), 1), pods_of_job(job)
        added = {
            "jobset.sigs.k8s.io/jobset-name": name,
            "jobset.sigs.k8s.io/replicatedjob-name": str(replicated.get("name", "")),
        }
        if jobs == 1:
            added |= _job_name(f"{stem}-0")
        group = _group(document, maps, (*job_path, "template", "spec"))
        if network.get("enableDNSHostnames", True):
            subdomain = str(network.get("subdomain", name))
            group = replace(group, subdomain=subdomain, makes_service=True)
        yield replace(
            group,
            name=name,
            replicas=jobs * per_job,
            # the controller sets completionMode where it is left out
            indexed=job.get("completionMode", "Indexed") == "Indexed",
            stem=stem,
            pods_per_job=max(1, per_job),
            job_path=job_path,
            job=job,
            labels={**group.labels, **added},
        )


def _job_name(name: str) -> dict[str, str]:
    """What the Job controller labels its pods with; the second is the older name."""
    return {"batch.kubernetes.io/job-name": name, "job-name": name}


# ---- TrainJob ----------------------------------------------------------------------------------


def _train_job(
    document: Document, runtimes: Sequence[Document], maps: ConfigMaps
) -> Iterator[PodGroup]:
    """The pods of a TrainJob: those of the runtime that it names, where that is in the file too."""
    named = mapping(mapping(document.data.get("spec")).get("runtimeRef")).get("name")
    kind = mapping(mapping(document.data.get("spec")).get("runtimeRef")).get("kind")
    for runtime in runtimes:
        if runtime.name == named and runtime.kind == (kind or "ClusterTrainingRuntime"):
            groups = _replicated_jobs(runtime, maps, ("spec", "template", "spec"), document.name)
            yield from (_trained(document, runtime, group, maps) for group in groups)
            return
    yield _trained(document, None, _bare(document), maps)


def _bare(document: Document) -> PodGroup:
    """What is known without the runtime: the names that the torch plugin counts on."""
    path: KeyPath = ("spec", "trainer")
    return PodGroup(
        kind=document.kind,
        name=document.name,
        namespace=document.namespace,
        document=document,
        template_path=path,
        metadata_path=("metadata",),
        template={"containers": [{}]},
        metadata={},
        replicas=1,
        indexed=True,
        stem=f"{document.name}-{TRAINER}",
        subdomain=document.name,
        pods_per_job=1,
        makes_service=True,
        whole=False,
    )


def _trained(
    document: Document, runtime: Document | None, group: PodGroup, maps: ConfigMaps
) -> PodGroup:
    """The pods with what the TrainJob itself says in the place of what its runtime does.

    https://www.kubeflow.org/docs/components/trainer/operator-guides/job-template/
    """
    steps = mapping(at(group.document.data, (*group.job_path[:-1], "metadata", "labels")))
    if runtime is not None and steps.get(ANCESTOR) != "trainer":
        return replace(group, kind=document.kind, namespace=document.namespace)
    trainer = mapping(mapping(document.data.get("spec")).get("trainer"))
    policy = mapping(mapping((runtime or document).data.get("spec")).get("mlPolicy"))
    nodes = whole(trainer.get("numNodes"), whole(policy.get("numNodes"), 1))
    containers = [dict(container) for container in group.containers]
    own = {
        ("resources" if key == "resourcesPerNode" else key): value for key, value in trainer.items()
    }
    position = next(
        (at for at, each in enumerate(containers) if each.get("name", TRAINER) == TRAINER), 0
    )
    containers[position].update(own)
    injected = {}
    if runtime is None or "torch" in policy:
        injected = _torch_plugin(group, nodes, str(trainer.get("numProcPerNode", "auto")))
    return _with_torchrun(
        replace(
            group,
            kind=document.kind,
            namespace=document.namespace,
            replicas=nodes,
            pods_per_job=max(1, nodes),
            template={**group.template, "containers": containers},
        ),
        maps,
        injected,
    )


def _torch_plugin(group: PodGroup, nodes: int, nproc_per_node: str) -> dict[str, str]:
    """Torchrun's flags that Kubeflow sets in the environment, for a static rendezvous.

    https://github.com/kubeflow/trainer/blob/master/pkg/runtime/framework/plugins/torch/torch.go
    """
    return {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": nproc_per_node,
        "PET_NODE_RANK": f"$({INDEX_VARIABLE})",
        "PET_MASTER_ADDR": f"{group.stem}-0-0.{group.subdomain}",
        "PET_MASTER_PORT": str(TRAIN_JOB_PORT),
    }


# ---- templates ---------------------------------------------------------------------------------


def _others(
    document: Document, maps: ConfigMaps, value: object, path: KeyPath, replicas: int = 1
) -> Iterator[PodGroup]:
    """Pod templates wherever they stand in an object of another kind."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _others(document, maps, item, (*path, index), replicas)
    elif isinstance(value, dict) and isinstance(value.get("containers"), list):
        yield replace(_group(document, maps, path), replicas=replicas)
    elif isinstance(value, dict):
        counts = (whole(value.get(key), 0) for key in ("replicas", "parallelism", "numNodes"))
        replicas = next((count for count in counts if count), replicas)
        for key, item in value.items():
            yield from _others(document, maps, item, (*path, key), replicas)


def _group(document: Document, maps: ConfigMaps, path: KeyPath) -> PodGroup:
    """One pod from the template whose spec stands at `path`, as yet without an index."""
    template = mapping(at(document.data, path))
    metadata_path: KeyPath = (*path[:-1], "metadata")
    metadata = mapping(at(document.data, metadata_path))
    group = PodGroup(
        kind=document.kind,
        name=document.name,
        namespace=document.namespace,
        document=document,
        template_path=path,
        metadata_path=metadata_path,
        template=template,
        metadata=metadata,
        replicas=1,
        indexed=False,
        stem=document.name,
        subdomain=str(template["subdomain"]) if "subdomain" in template else None,
        labels={key: str(value) for key, value in mapping(metadata.get("labels")).items()},
    )
    return _with_torchrun(group, maps, {})


def _with_torchrun(group: PodGroup, maps: ConfigMaps, injected: Mapping[str, str]) -> PodGroup:
    """The group with the first container that starts torchrun; `injected` is in each of them."""
    for index, container in enumerate(group.containers):
        path = replace(group, container=index).trainer_path
        values = {**environment(container, group.namespace, maps), **injected}
        found = invocation.find(container, path, values)
        if found is not None:
            if not group.known:
                # controllers of other kinds may set PET_ variables
                found = replace(found, complete=False)
            return replace(group, container=index, invocation=found, environment=values)
    return group
