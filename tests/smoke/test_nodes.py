"""All nodes together: do they meet, compute as one group, and which node or link is bad?"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import conftest
import pytest
import torch
from conftest import Step, last_json
from meeting import PORT, REACH_S, Meeting, missed, together

from muster import bom, launch, process
from muster.bandwidth import judge, pairs, place, results
from muster.bandwidth.pairs import Pair
from muster.bandwidth.results import Collective
from muster.bandwidth.series import Series
from muster.doctor.check import counted
from muster.finding import Finding
from muster.launch import Rendezvous
from muster.topology import NodeRange

# a job of each: one that ends slowly does not hold the next one's
WORLD_PORT, PAIR_PORT = PORT + 1, PORT + 2
# without it gloo takes the address of the host's own name, which may be one of the loopback's
_GLOO = "GLOO_SOCKET_IFNAME"
# how long the nodes that have said that they are there wait for each other's torchrun
JOIN_S = 60
# between nodes that are containers on a CPU the size says little, and takes long
CPU_BYTES, GPU_BYTES = 2**22, 2**28
# without them nothing is to be had from a node
_FIT = ("versions", "devices", "all_reduce")


def test_nodes_meet(step: Step, meeting: Meeting) -> None:
    """Every node comes, is fit, and has the same versions."""
    own = {"unfit": [name for name in _FIT if name in conftest.unfit], "versions": _versions()}
    with missed(step):
        meeting.say("here", own, REACH_S)
        said = dict(zip(meeting.names, meeting.hear("here", step.limit_s), strict=True))
    _fit(step, said)
    _alike(step, said)
    step.measure(f"{len(said)} nodes, alike in {', '.join(own['versions'])}")


def _versions() -> dict[str, str]:
    known = {"torch": str(torch.__version__), "Python": platform.python_version()}
    if torch.cuda.is_available():
        known["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    if bom.PATH.exists():
        known["image"] = hashlib.sha256(bom.PATH.read_bytes()).hexdigest()[:12]
    return known


def _fit(step: Step, said: Mapping[str, Any]) -> None:
    unfit = {node: each["unfit"] for node, each in said.items() if each["unfit"]}
    if unfit:
        step.fail(
            what=f"{', '.join(unfit)} cannot take part",
            evidence="; ".join(
                f"{node}: {', '.join(steps)} failed" for node, steps in unfit.items()
            ),
            cause="what a node cannot do alone it cannot do with others",
            remedy=f"mend {next(iter(unfit))} first: its own steps say what is wrong",
        )


def _alike(step: Step, said: Mapping[str, Any]) -> None:
    """Versions that differ hang or crash a job, often without a word."""
    names = {name for each in said.values() for name in each["versions"]}
    differ = {}
    for name in sorted(names):
        values = {node: each["versions"].get(name, "none") for node, each in said.items()}
        if len(set(values.values())) > 1:
            differ[name] = ", ".join(f"{node} has {value}" for node, value in values.items())
    if differ:
        step.fail(
            what=f"the nodes have different versions of {', '.join(differ)}",
            evidence="\n".join(f"{name}: {told}" for name, told in differ.items()),
            cause="an image or an environment that is older on some nodes",
            remedy="give all nodes one image, by its digest",
        )


# ---- one group ---------------------------------------------------------------------------------


def test_nodes_all_reduce(step: Step, meeting: Meeting) -> None:
    """One group over all nodes; every rank gets the sum of all."""
    with together(step, meeting):
        if result := _run(step, meeting, "all_reduce.py"):
            ranks = f"{result['world_size']} ranks on {len(meeting.names)} nodes"
            step.measure(f"{ranks}, {result['backend']}, sum {result['expected']:g}")


def test_nodes_subgroups(step: Step, meeting: Meeting) -> None:
    """Tensor parallelism within each node, data parallelism across them."""
    with together(step, meeting):
        tp = str(step.nproc_per_node)
        if result := _run(step, meeting, "subgroups.py", "--tp", tp):
            step.measure(f"tp {result['tp'][0]} within, dp {result['dp'][0]} across nodes")


def test_nodes_ddp_demo(step: Step, meeting: Meeting) -> None:
    """DDP training over all nodes."""
    with together(step, meeting):
        if result := _run(step, meeting, "ddp_demo.py"):
            first, last = result["loss_first"], result["loss_last"]
            step.measure(f"{result['world_size']} ranks, loss {first:.3f} to {last:.3f}")


def _run(step: Step, meeting: Meeting, script: str, *arguments: str) -> dict[str, Any]:
    """Run a script over all nodes; what rank 0 prints, which is nothing on other nodes."""
    done = _torchrun(step, meeting, range(len(meeting.names)), WORLD_PORT, script, *arguments)
    if not done.ok:
        step.fail_ranks(script, done)
    return last_json(done.output) if meeting.rank == 0 else {}


def _torchrun(
    step: Step, meeting: Meeting, nodes: Sequence[int], port: int, script: str, *arguments: str
) -> process.Completed:
    """Run a script on this node as one of `nodes`, whose first hosts torchrun's store."""
    job = "-".join([step.name, *map(str, nodes)])
    same = launch.arguments(
        NodeRange(len(nodes), len(nodes)),
        step.nproc_per_node,
        Rendezvous(job, meeting.names[nodes[0]], port, JOIN_S, JOIN_S),
        max_restarts=0,
        script=script,
        script_arguments=arguments,
    )
    own = launch.for_index(same, nodes.index(meeting.rank))
    environment = {}
    if _GLOO not in os.environ and meeting.ifname is not None:
        environment[_GLOO] = meeting.ifname
    return step.nccl([sys.executable, "-m", "muster.agent", *own], environment)


# ---- bandwidth ---------------------------------------------------------------------------------


def test_pairs(step: Step, meeting: Meeting) -> None:
    """Every two nodes by themselves: a bad node is bad with all others, a bad link with one."""
    if len(meeting.names) == 2:
        pytest.skip("two nodes are one pair: what is measured over all nodes is about it")
    measured: list[Pair] = []
    for number, couples in enumerate(pairs.rounds(len(meeting.names))):
        own = next((couple for couple in couples if meeting.rank in couple), None)
        told: dict[str, Any] = {}
        with missed(step):
            meeting.say(f"round/{number}", value=True)
            meeting.hear(f"round/{number}", step.limit_s)
            if own is not None:
                told = _pair(step, meeting, own)
            meeting.say(f"pair/{number}", told)
            measured += _heard(meeting.hear(f"pair/{number}", step.limit_s))
    if meeting.rank == 0:
        findings = list(pairs.judge(measured, step.name))
        if findings:
            raise conftest.StepFailed(findings)
        speeds = [pair.busbw for pair in measured if pair.busbw is not None]
        slowest = f", the slowest {min(speeds):.3g} GB/s busbw" if speeds else ""
        step.measure(f"{counted(len(measured), 'pair')}{slowest}")


def _pair(step: Step, meeting: Meeting, couple: tuple[int, int]) -> dict[str, Any]:
    """What the first of the two says of both; nothing by the other."""
    size = str(GPU_BYTES if step.has_gpus else CPU_BYTES)
    done = _torchrun(step, meeting, couple, PAIR_PORT, "bandwidth.py", "--bytes", size)
    names = [meeting.names[rank] for rank in couple]
    if meeting.rank != couple[0]:
        # a failure shows on either side, and either may be the one that knows
        return {} if done.ok else {"nodes": names, "failure": _last_word(done)}
    if not done.ok:
        return {"nodes": names, "failure": _last_word(done)}
    run = results.read_torch(done.output, Collective.ALL_REDUCE)
    backend = str(last_json(done.output)["backend"])
    claimed = backend == "nccl"
    step.series(Series(run=run, backend=backend, nodes=tuple(names), claimed=claimed, floor=None))
    speed = run.rows[-1].busbw if claimed and run.rows else None
    return {"nodes": names, "busbw": speed, "failure": run.failure}


def _last_word(done: process.Completed) -> str:
    failure = launch.first_failure(done.output)
    return str(failure) if failure else next(iter(done.last_lines(1)), done.ending)


def _heard(told: Sequence[Mapping[str, Any]]) -> Iterator[Pair]:
    """One of each pair; of a pair that failed on one side that side's word."""
    by_nodes: dict[tuple[str, str], Pair] = {}
    for each in told:
        if each:
            one, other = each["nodes"]
            pair = Pair((one, other), each.get("busbw"), each.get("failure"))
            if pair.nodes not in by_nodes or pair.failure:
                by_nodes[pair.nodes] = pair
    yield from by_nodes.values()


def test_nodes_bandwidth(step: Step, meeting: Meeting, request: pytest.FixtureRequest) -> None:
    """The collectives over all nodes."""
    with together(step, meeting):
        size = str(GPU_BYTES if step.has_gpus else CPU_BYTES)
        arguments = ["--max-bytes", size, "--factor", "4", "--collective", *Collective]
        if result := _run(step, meeting, "bandwidth.py", *arguments):
            fabrics_own = request.config.getoption("--nodes-floor")
            text = request.config.getoption("--floors") or (fabrics_own and str(fabrics_own))
            _judge(step, meeting, result, text)


def _judge(step: Step, meeting: Meeting, result: dict[str, Any], text: str | None) -> None:
    findings: list[Finding] = []
    for collective in Collective:
        run = results.read_torch(json.dumps(result), collective)
        floor = place.floor_of(text, None, collective)
        backend = str(result["backend"])
        step.series(
            Series(
                run=run,
                backend=backend,
                nodes=meeting.names,
                claimed=backend == "nccl",
                floor=floor,
            )
        )
        findings += judge.judge(run, floor, step.name)
        if collective is Collective.ALL_REDUCE and run.rows:
            step.measure(f"{run.nranks} ranks, all_reduce {run.rows[-1].busbw:.3g} GB/s busbw")
    conftest.conclude(step, findings)
