"""A Spec to the YAML that `kubectl apply -f` takes: k8s/base, patched by the fabric and the Spec.

Comments travel with the values that they stand beside, so that the result says why. The same Spec
gives the same bytes.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.scalarstring import DoubleQuotedScalarString as Quoted
from ruamel.yaml.scalarstring import LiteralScalarString

from muster import launch, patch
from muster.errors import SpecWrong
from muster.launch import ExitStatus
from muster.manifests import emitter, pod
from muster.manifests.quoting import text
from muster.manifests.spec import Code, Kind, Spec, job_name

# a ConfigMap may hold 1 MiB, and the rest of the object is in it too
# https://kubernetes.io/docs/concepts/configuration/configmap/
MOST_CODE_BYTES: Final = 1_000_000
# what only a Job on its own has: in a JobSet the JobSet decides what follows a failure
_JOB_ALONE: Final = (
    *("backoffLimitPerIndex", "maxFailedIndexes", "podReplacementPolicy", "podFailurePolicy"),
)
_QUEUED: Final = {Kind.JOB: "Job", Kind.JOBSET: "JobSet", Kind.TRAINJOB: "TrainJob"}


@dataclass(frozen=True)
class Base:
    """The hand-written objects of k8s/base."""

    service: CommentedMap
    policy: CommentedMap
    environment: CommentedMap
    job: CommentedMap


@dataclass(frozen=True)
class Kinds:
    """Those of k8s/kinds; `job` is laid over the Job in a JobSet."""

    jobset: CommentedMap
    job: CommentedMap
    runtime: CommentedMap
    trainjob: CommentedMap


def render(spec: Spec, root: Path) -> str:
    """The manifest of `spec` by `root`/k8s; the scripts that the image has are in `root`/train.

    Raises SpecWrong for a script that is not there, or that no ConfigMap can carry.
    """
    base = Base(*_objects(root / "k8s/base/job.yaml"))
    template = base.job["spec"]["template"]
    code = _code(spec)
    pod.fill(template, spec, _script(spec, root))
    if code is not None:
        volume = CommentedMap(name=f"{spec.name}-code")
        pod.mount(template["spec"], "code", pod.CODE_FOLDER, {"configMap": volume})
    _fill_environment(base.environment, spec)
    _fill_selectors(base, spec)
    objects = [base.policy, base.environment]
    if code is not None:
        objects.append(_code_map(base.environment, spec, code))
    if spec.kind is Kind.JOB:
        _fill_job(base.job["spec"], spec)
        objects = [base.service, *objects, base.job]
    else:
        files = (root / f"k8s/kinds/{name}.yaml" for name in (Kind.JOBSET, Kind.TRAINJOB))
        kinds = Kinds(*(each for file in files for each in _objects(file)))
        _fill_jobset(base.job["spec"], kinds, spec)
        objects += [kinds.jobset] if spec.kind is Kind.JOBSET else _trainjob(kinds, spec)
    for each in objects:
        _name(each, spec)
    return _header(spec) + emitter.emitted(objects)


# ---- k8s/ --------------------------------------------------------------------------------------


def _objects(path: Path) -> tuple[CommentedMap, ...]:
    """The objects of a file, to be changed."""
    return tuple(patch.copied(each) for each in _written(path))


@cache
def _written(path: Path) -> tuple[CommentedMap, ...]:
    yaml = YAML()
    yaml.preserve_quotes = True
    documents = tuple(yaml.load_all(path))
    # what the file as a whole is said to be; the rendered file has its own header
    documents[0].ca.comment = None
    for document in documents:
        patch.settle(document)
    return documents


def _header(spec: Spec) -> str:
    ranks = spec.nproc_per_node
    return (
        f"# nnodes {spec.nnodes}, nproc_per_node {ranks}, fabric {spec.fabric.name},"
        f" for Kubernetes {spec.kubernetes}. Made by ./invokew render.\n"
        f"# The namespace must admit pods of Pod Security level {spec.fabric.pod_security}.\n"
    )


# ---- the script --------------------------------------------------------------------------------


def _script(spec: Spec, root: Path) -> str:
    """The path of the script in the container."""
    if spec.code is Code.CONFIGMAP:
        return f"{pod.CODE_FOLDER}/{Path(spec.script).name}"
    if spec.script.startswith("/"):
        return spec.script
    inside = Path(spec.script)
    known = sorted(f"train/{each.name}" for each in (root / "train").glob("*.py"))
    if str(inside) not in known:
        raise SpecWrong(
            "--script",
            spec.script,
            f"one that the image has ({', '.join(known)}), an absolute path in an image of your"
            " own, or --code configmap to send a file of this machine along",
        )
    return f"{pod.IMAGE_FOLDER}/{inside}"


def _code(spec: Spec) -> str | None:
    """The text that the manifest carries; None when the script is in the image."""
    if spec.code is Code.IMAGE:
        return None
    path = Path(spec.script)
    try:
        code = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecWrong("--script", spec.script, f"a file that can be read ({error})") from None
    if len(code.encode()) > MOST_CODE_BYTES:
        raise SpecWrong("--script", spec.script, "at most 1 MB: more is for --code image")
    return code


def _code_map(like: CommentedMap, spec: Spec, code: str) -> CommentedMap:
    found = CommentedMap(apiVersion="v1", kind="ConfigMap")
    found["metadata"] = patch.copied(like["metadata"])
    found["metadata"]["name"] = "demo-code"
    found["data"] = CommentedMap({Path(spec.script).name: _block(code)})
    return found


def _block(code: str) -> str:
    """As lines, where a YAML block can hold them; else in quotes."""
    lines = code.split("\n")
    # a block would lose tabs at the beginning of a line, and every carriage return
    is_block = all(line.isprintable() for line in lines)
    found: str = LiteralScalarString(code) if is_block and code[:1] != " " else Quoted(code)
    return found


# ---- the objects -------------------------------------------------------------------------------


def _name(item: CommentedMap, spec: Spec) -> None:
    """The names of `spec` in the place of the base's."""
    metadata = item["metadata"]
    metadata["name"] = text(metadata["name"].replace("demo", spec.name, 1))
    metadata.insert(1, "namespace", text(spec.namespace))
    metadata["labels"]["app.kubernetes.io/name"] = text(spec.name)
    if spec.queue is not None and item["kind"] == _QUEUED[spec.kind]:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = text(spec.queue)


def _fill_environment(environment: CommentedMap, spec: Spec) -> None:
    data = environment["data"] = patch.copied(spec.fabric.environment)
    staggering = launch.staggering(spec.nnodes.most * spec.nproc_per_node)
    data.update({name: Quoted(value) for name, value in staggering.items()})


def _fill_selectors(base: Base, spec: Spec) -> None:
    policy = base.policy["spec"]
    for selector in (policy["podSelector"], policy["ingress"][0]["from"][0]["podSelector"]):
        selector["matchLabels"]["batch.kubernetes.io/job-name"] = text(job_name(spec))
    base.service["spec"]["selector"]["batch.kubernetes.io/job-name"] = text(job_name(spec))


def _fill_job(job: CommentedMap, spec: Spec) -> None:
    job["backoffLimitPerIndex"] = spec.max_restarts
    preempted = job["podFailurePolicy"]["rules"][1]["onExitCodes"]
    preempted["values"] = CommentedSeq([int(ExitStatus.PREEMPTED)])
    _fill_size(job, spec)
    if spec.ttl_s is not None:
        job.insert(3, "ttlSecondsAfterFinished", spec.ttl_s)
    if spec.gang:
        scheduling = CommentedMap()
        scheduling["schedulingPolicy"] = {"gang": {"minCount": spec.nnodes.least}}
        if spec.topology is not None:
            scheduling["schedulingConstraints"] = {"topology": [{"key": text(spec.topology)}]}
        job.insert(3, "scheduling", scheduling)
        pod.explain(job, "scheduling", "dropped without the feature gate WorkloadWithJob")


def _fill_size(job: CommentedMap, spec: Spec) -> None:
    """The part that a Job has on its own and in a JobSet."""
    if spec.preflight:
        job["podFailurePolicy"]["rules"].insert(0, _gate_rule())
    job["completions"] = job["parallelism"] = spec.nnodes.most
    numbered = (
        f"each pod has a number, a host name {job_name(spec)}-NUMBER, and one success to bring"
    )
    pod.explain(job, "completionMode", numbered)
    if spec.deadline_s is not None:
        job.insert(3, "activeDeadlineSeconds", spec.deadline_s)


def _gate_rule() -> CommentedMap:
    rule = CommentedMap(action="FailJob")
    rule["onExitCodes"] = CommentedMap(
        containerName=pod.PREFLIGHT,
        operator="In",
        values=CommentedSeq([int(ExitStatus.NOT_READY)]),
    )
    pod.explain(rule, "action", "no training on nodes that are not ready for it")
    return rule


def _fill_jobset(job: CommentedMap, kinds: Kinds, spec: Spec) -> None:
    """Put the Job of base/job.yaml into the JobSet, with the JobSet's own policy."""
    for key in _JOB_ALONE:
        del job[key]
    job = patch.merged(job, kinds.job)
    _fill_size(job, spec)
    jobset = kinds.jobset["spec"]
    jobset["network"]["subdomain"] = text(spec.name)
    jobset["failurePolicy"]["maxRestarts"] = spec.max_restarts
    if spec.ttl_s is not None:
        jobset["ttlSecondsAfterFinished"] = spec.ttl_s
    replicated = jobset["replicatedJobs"][0]["template"]
    replicated["metadata"]["labels"]["app.kubernetes.io/name"] = text(spec.name)
    _put(replicated, "spec", job)


def _put(node: CommentedMap, key: str, value: CommentedMap) -> None:
    """Fill in what a file of k8s/kinds leaves to another, without the comment that says so."""
    node.ca.items.pop(key, None)
    node[key] = value


def _trainjob(kinds: Kinds, spec: Spec) -> list[CommentedMap]:
    """A runtime of the job's own, with that JobSet in it, and the TrainJob that asks for it."""
    kinds.runtime["spec"]["mlPolicy"]["numNodes"] = spec.nnodes.most
    jobset = kinds.jobset["spec"]
    _put(kinds.runtime["spec"]["template"], "spec", jobset)
    _call_node(jobset["replicatedJobs"][0]["template"])
    kinds.trainjob["spec"]["runtimeRef"]["name"] = text(spec.name)
    return [kinds.runtime, kinds.trainjob]


def _call_node(template: CommentedMap) -> None:
    """What the trainer looks for: its label, and the container's name.

    https://www.kubeflow.org/docs/components/trainer/operator-guides/job-template/
    """
    template["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] = "trainer"
    job = template["spec"]
    job["template"]["spec"]["containers"][0]["name"] = "node"
    for rule in job["podFailurePolicy"]["rules"]:
        if rule.get("onExitCodes", {}).get("containerName") == "train":
            rule["onExitCodes"]["containerName"] = "node"
