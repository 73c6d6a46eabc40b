"""How many: the nodes and ranks that torchrun is told of against the pods and GPUs there are."""

from collections.abc import Iterator
from typing import Final

from muster.finding import Finding, error, warning
from muster.manifests.documents import whole
from muster.manifests.invocation import Invocation
from muster.manifests.rules import (
    GPU,
    Manifest,
    Rule,
    at_flag,
    at_job,
    at_variable,
    gpus,
    is_known,
    joins_many,
    nodes,
    nproc_per_node,
)
from muster.manifests.workloads import PodGroup


def nnodes(manifest: Manifest) -> Iterator[Finding]:
    """The nodes that torchrun waits for against the pods that there are."""
    for group, invocation in manifest.trainers:
        found = nodes(invocation)
        if found is None:
            if is_known(invocation.nnodes):
                yield _no_nnodes(group, invocation)
            continue
        if not 0 < found[0] <= found[1]:
            yield _no_nnodes(group, invocation)
        elif all(peer.known for peer in manifest.peers(group)):
            yield from _uncounted(manifest, group, invocation, found)


def _uncounted(
    manifest: Manifest, group: PodGroup, invocation: Invocation, found: tuple[int, int]
) -> Iterator[Finding]:
    """More or fewer pods than nodes."""
    least, most = found
    pods = sum(each.replicas for each in manifest.peers(group))
    where = at_flag(group, invocation, "nnodes")
    evidence = f"nnodes {invocation.nnodes or 1}, {pods} pods"
    if pods < least:
        yield error(
            where,
            f"torchrun waits for {least} nodes, and there are {pods} pods",
            evidence=evidence,
            cause="the rendezvous ends only when all have come, or at join_timeout",
            remedy=_sizes(group, least),
        )
    elif pods > most and (most > 1 or invocation.rdzv_endpoint or invocation.master_addr):
        yield error(
            where,
            f"torchrun joins {most} nodes, and there are {pods} pods",
            evidence=evidence,
            cause="the rendezvous is full with the first of them: the rest wait and fail",
            remedy=f"give --nnodes {pods}, or {_sizes(group, most)}",
        )


def _no_nnodes(group: PodGroup, invocation: Invocation) -> Finding:
    return error(
        at_flag(group, invocation, "nnodes"),
        f"--nnodes {invocation.nnodes} is no number of nodes",
        evidence=f"--nnodes {invocation.nnodes}",
        cause="torchrun takes a number above 0, or MIN:MAX with MIN not over MAX",
        remedy="write e.g. --nnodes 4, --nnodes 2:4",
    )


def _sizes(group: PodGroup, count: int) -> str:
    if group.job_path:
        return f"set parallelism and completions to {count}"
    return f"make {count} pods"


def completions(manifest: Manifest) -> Iterator[Finding]:
    for group, invocation in manifest.trainers:
        parallelism = whole(group.job.get("parallelism"), 1)
        wanted = whole(group.job.get("completions"), parallelism)
        if joins_many(group, invocation) and group.job_path and wanted > parallelism:
            yield error(
                at_job(group, "completions"),
                f"{wanted} pods are to complete, and {parallelism} run at a time",
                evidence=f"completions {wanted}, parallelism {parallelism}",
                cause="the pods of a training wait for each other: they have to run together",
                remedy="set both to the number of nodes",
            )


def nproc(manifest: Manifest) -> Iterator[Finding]:
    """The ranks of a node against its GPUs."""
    for group, invocation in manifest.trainers:
        there, asked = gpus(group.trainer), nproc_per_node(invocation)
        where = at_flag(group, invocation, "nproc_per_node")
        said = invocation.nproc_per_node or "1, torchrun's own default"
        evidence = f"nproc_per_node {said}, {GPU} {there}"
        if asked is None and invocation.nproc_per_node == "gpu" and not there and group.whole:
            if group.template.get("resourceClaims"):
                continue
            yield error(
                where,
                "one rank a GPU, and the container has no GPU",
                evidence=evidence,
                cause="torchrun ends when it finds none",
                remedy=f"ask for {GPU} under resources.limits, or give a number of ranks",
            )
        elif asked is not None and there and asked > there:
            yield error(
                where,
                f"{asked} ranks for {there} GPUs",
                evidence=evidence,
                cause="NCCL refuses two ranks on one GPU",
                remedy=f"give --nproc-per-node {there}, or ask for {asked} GPUs",
            )
        elif asked is not None and there > asked:
            yield warning(
                where,
                f"{asked} ranks for {there} GPUs: {there - asked} of them have nothing to do",
                evidence=evidence,
                cause="torchrun starts one process a rank, and a rank uses one GPU",
                remedy=f"give --nproc-per-node {there}, or ask for {asked} GPUs",
            )


def world_size(manifest: Manifest) -> Iterator[Finding]:
    """A WORLD_SIZE that is not nnodes x nproc_per_node."""
    for group, invocation in manifest.trainers:
        found, ranks = nodes(invocation), nproc_per_node(invocation)
        said = group.environment.get("WORLD_SIZE", "")
        if found is None or ranks is None or found[0] < found[1] or not said.isdigit():
            continue
        if int(said) != found[1] * ranks:
            yield warning(
                at_variable(group, "WORLD_SIZE"),
                f"WORLD_SIZE is {said}, and {found[1]} nodes with {ranks} ranks each make"
                f" {found[1] * ranks}",
                evidence=f"WORLD_SIZE={said}, nnodes {found[1]}, nproc_per_node {ranks}",
                cause="torchrun sets WORLD_SIZE for its workers; what reads it before them is told"
                " something else",
                remedy="take WORLD_SIZE out",
            )


RULES: Final = (
    Rule("nnodes", nnodes, fault="rendezvous-timeout"),
    Rule("completions", completions),
    Rule("nproc-per-node", nproc, fault="invalid-device"),
    Rule("world-size", world_size),
)
