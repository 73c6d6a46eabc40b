"""The static rendezvous, torchrun's default: each node is told its rank and who is the first."""

from collections.abc import Iterator
from typing import Final

from muster.finding import Finding, error
from muster.manifests.invocation import DEFAULT_BACKEND, DEFAULT_MASTER_ADDR
from muster.manifests.rules import Manifest, Rule, at_flag, joins_many, many_by, nodes
from muster.manifests.workloads import INDEX_VARIABLE


def static_node_rank(manifest: Manifest) -> Iterator[Finding]:
    for group, invocation in many_by(manifest, DEFAULT_BACKEND):
        rank = invocation.node_rank
        if rank is None and invocation.complete:
            what, evidence = "torchrun is not told the node's rank", "no --node-rank"
        elif rank is not None and rank.isdigit() and group.replicas > 1:
            what, evidence = f"every pod is the node of rank {rank}", f"--node-rank {rank}"
        else:
            continue
        yield error(
            at_flag(group, invocation, "node_rank"),
            what,
            evidence=f"{evidence}, {group.replicas} pods, nnodes {invocation.nnodes}",
            cause="a static rendezvous, torchrun's default, waits for each node's own rank; with"
            " c10d the nodes agree on them",
            remedy=f"give --node-rank $({INDEX_VARIABLE}), or --rdzv-backend c10d and an endpoint",
        )


def static_master(manifest: Manifest) -> Iterator[Finding]:
    for group, invocation in many_by(manifest, DEFAULT_BACKEND):
        if invocation.master_addr or invocation.rdzv_endpoint or not invocation.complete:
            continue
        variable = group.environment.get("MASTER_ADDR")
        yield error(
            at_flag(group, invocation, "master_addr"),
            "torchrun is not told where the first node is",
            evidence="no --master-addr"
            + ("" if variable is None else f"; the variable MASTER_ADDR={variable} is not read"),
            cause=f"each node then looks for it at {DEFAULT_MASTER_ADDR}; torchrun sets MASTER_ADDR"
            " for its workers and reads --master-addr or PET_MASTER_ADDR itself",
            remedy="give --master-addr $(MASTER_ADDR)"
            if variable is not None
            else f"give --master-addr {group.fqdn(0) or 'the full name of the first pod'}",
        )


def static_elastic(manifest: Manifest) -> Iterator[Finding]:
    for group, invocation in many_by(manifest, DEFAULT_BACKEND):
        found = nodes(invocation)
        if found is not None and found[0] < found[1]:
            yield error(
                at_flag(group, invocation, "nnodes"),
                "an elastic number of nodes with a static rendezvous",
                evidence=f"--nnodes {invocation.nnodes}, no --rdzv-backend",
                cause="a static rendezvous always waits for the larger number",
                remedy="give --rdzv-backend c10d and an endpoint, or one number of nodes",
            )


def standalone_nodes(manifest: Manifest) -> Iterator[Finding]:
    for group, invocation in manifest.trainers:
        if invocation.standalone and joins_many(group, invocation):
            pods = f"{group.replicas} pods, nnodes {invocation.nnodes or 'not given'}"
            yield error(
                at_flag(group, invocation, "standalone"),
                "--standalone joins no other node",
                evidence=f"--standalone, {pods}",
                cause="it meets at a free port of its own localhost, whatever else is given",
                remedy="take --standalone out and give --rdzv-backend c10d and an endpoint",
            )


RULES: Final = (
    Rule("static-node-rank", static_node_rank),
    Rule("static-master", static_master),
    Rule("static-elastic", static_elastic),
    Rule("standalone-nodes", standalone_nodes),
)
