"""What every rule of the lint is made of: the manifest it looks at, and the Findings it makes."""

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias

from muster.finding import Finding
from muster.manifests import quantities
from muster.manifests.documents import Document, KeyPath, mapping
from muster.manifests.invocation import DEFAULT_BACKEND, Invocation
from muster.manifests.workloads import PodGroup

if TYPE_CHECKING:
    # it reads fabrics with ruamel.yaml, whose import takes as long as a lint
    from muster.fabric import Fabric

C10D = "c10d"
GPU = "nvidia.com/gpu"
# what NCCL and torch take for a switch that is on
ON = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True)
class Manifest:
    """A file's objects and the pods that they make; `fabric` is what the job is meant for."""

    documents: tuple[Document, ...]
    groups: tuple[PodGroup, ...]
    fabric: "Fabric | None"

    @property
    def trainers(self) -> Iterator[tuple[PodGroup, Invocation]]:
        """The pods with a torchrun."""
        for group in self.groups:
            if group.invocation is not None:
                yield group, group.invocation

    @property
    def whole_trainers(self) -> Iterator[tuple[PodGroup, Invocation]]:
        """The pods with a torchrun whose template is in the file."""
        return ((group, invocation) for group, invocation in self.trainers if group.whole)

    def peers(self, group: PodGroup) -> list[PodGroup]:
        """All the pods that meet where those of `group` do, these included."""
        assert group.invocation is not None
        place = _meeting(group, group.invocation)
        if place is None:
            return [group]
        return [each for each, invocation in self.trainers if _meeting(each, invocation) == place]

    def of_kind(self, *kinds: str) -> Iterator[Document]:
        return (document for document in self.documents if document.kind in kinds)


Check: TypeAlias = Callable[[Manifest], Iterator[Finding]]


@dataclass(frozen=True)
class Rule:
    """A rule by the id that its Findings end with.

    `fault` is what explain/faults.toml calls it, where the logs of a job with it show a fault.
    """

    id: str
    check: Check
    fault: str = ""


# ---- where -------------------------------------------------------------------------------------


def at_template(group: PodGroup, *path: str | int) -> str:
    return group.document.where(*group.template_path, *path)


def at_container(group: PodGroup, *path: str | int) -> str:
    return group.document.where(*group.trainer_path, *path)


def at_job(group: PodGroup, *path: str | int) -> str:
    return group.document.where(*group.job_path, *path)


def at_flag(group: PodGroup, invocation: Invocation, name: str) -> str:
    """Where a flag stands, or where torchrun does when it is not given."""
    flag = invocation.flags.get(name)
    if flag is None:
        return group.document.where(*invocation.path, row=invocation.row)
    return group.document.where(*flag.path, row=flag.row)


def at_variable(group: PodGroup, name: str) -> str:
    """Where the container's variable stands, or where its variables come from."""
    names = [mapping(entry).get("name") for entry in group.trainer.get("env", [])]
    if name in names:
        return at_container(group, "env", names.index(name))
    return at_container(group, "envFrom")


# ---- torchrun ----------------------------------------------------------------------------------


def backend(invocation: Invocation) -> str:
    if invocation.standalone:
        return C10D
    return (invocation.rdzv_backend or DEFAULT_BACKEND).lower()


def nodes(invocation: Invocation) -> tuple[int, int] | None:
    """MIN and MAX of --nnodes; None where a variable holds it."""
    if invocation.nnodes is None:
        return (1, 1) if invocation.complete else None
    least, colon, most = invocation.nnodes.partition(":")
    if not (least.isdigit() and (most.isdigit() or not colon)):
        return None
    return int(least), int(most or least)


def nproc_per_node(invocation: Invocation) -> int | None:
    """The number of ranks on each node; None where torchrun counts them or a variable says it."""
    if invocation.nproc_per_node is None:
        return 1 if invocation.complete else None
    return int(invocation.nproc_per_node) if invocation.nproc_per_node.isdigit() else None


def joins_many(group: PodGroup, invocation: Invocation) -> bool:
    """Whether nodes are to meet: more than one is asked for, or more than one pod started."""
    found = nodes(invocation)
    return group.replicas > 1 if found is None else found[1] > 1


def many_by(manifest: Manifest, name: str) -> Iterator[tuple[PodGroup, Invocation]]:
    """The pods with a torchrun that joins several nodes by this backend."""
    for group, invocation in manifest.trainers:
        met = backend(invocation) == name and not invocation.standalone
        if met and joins_many(group, invocation):
            yield group, invocation


def is_known(text: str | None) -> bool:
    """Whether a value can be told without running a shell."""
    return text is not None and "$" not in text and "`" not in text


def endpoint(invocation: Invocation) -> tuple[str, str] | None:
    """Host and port (which may be missing) of the place to meet; None where it is not known."""
    text = invocation.rdzv_endpoint
    if text is None and backend(invocation) == DEFAULT_BACKEND:
        text = invocation.master_addr
    if text is None or not is_known(text):
        return None
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        return host, port.removeprefix(":")
    host, colon, port = text.rpartition(":")
    return (host, port) if colon else (text, "")


def _meeting(group: PodGroup, invocation: Invocation) -> tuple[str, str, str] | None:
    """What pods that meet have in common."""
    place = invocation.rdzv_endpoint or invocation.master_addr
    if place is None or "$" in place:
        return None
    return group.namespace, backend(invocation), place


# ---- containers --------------------------------------------------------------------------------


def limits(container: Mapping[str, Any]) -> dict[str, Any]:
    return mapping(mapping(container.get("resources")).get("limits"))


def requests(container: Mapping[str, Any]) -> dict[str, Any]:
    return mapping(mapping(container.get("resources")).get("requests"))


def gpus(container: Mapping[str, Any]) -> int:
    """The whole GPUs that a container asks for; shares of one (MIG) not counted."""
    count = amount(limits(container).get(GPU, requests(container).get(GPU, 0)))
    return int(count or 0)


def amount(value: object) -> Decimal | None:
    """A quantity as a number, None where it is none."""
    return quantities.parse(str(value))


def mib(size: Decimal) -> str:
    return f"{size / 2**20:.0f} MiB"


def selects(selector: object, labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes pods with these labels; an empty one takes all."""
    found = mapping(selector)
    wanted = mapping(found.get("matchLabels")).items()
    return all(labels.get(key) == value for key, value in wanted) and all(
        _fits(mapping(expression), labels) for expression in found.get("matchExpressions", [])
    )


def _fits(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = expression.get("key", ""), expression.get("values", [])
    match expression.get("operator"):
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case _:
            return key not in labels


def all_containers(group: PodGroup) -> Iterator[tuple[KeyPath, Mapping[str, Any]]]:
    """Every container of the pod and its path, those that run first too."""
    for key in ("initContainers", "containers"):
        for index, container in enumerate(group.template.get(key, [])):
            yield (*group.template_path, key, index), container


def near(name: str, known: Collection[str], cutoff: float = 0.6) -> str:
    """A word for a remedy: what may have been meant, or all that there is."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return found[0] if found else f"one of: {', '.join(sorted(known))}"
