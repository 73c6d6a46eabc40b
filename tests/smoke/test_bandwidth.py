"""The bandwidth: are six collectives right at every size, and as fast as this machine can be?

First by nccl-tests, which have nothing of torch, then by torch.distributed in the same sizes.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import gpus
import pytest
from conftest import Step, conclude

from muster import bom, launch, process, size
from muster.bandwidth import judge, place, results
from muster.bandwidth.floors import Floor, Place
from muster.bandwidth.results import Collective, Run, Tool
from muster.bandwidth.series import Series
from muster.doctor.check import counted
from muster.finding import Finding
from muster.topology import Topology

# where the image has them; without it they may be on PATH
NCCL_TESTS = Path("/opt/nccl-tests/bin")
MIN_BYTES = 8
# gloo on a CPU is at its full speed with it, and two cores have it done in seconds
GLOO_BYTES = 2**24

BY_NCCL_TESTS = pytest.StashKey[dict[Collective, Run]]()


def test_nccl_tests(step: Step, request: pytest.FixtureRequest) -> None:
    """nccl-tests, on every GPU at once, from 8 bytes to what memory allows."""
    used = gpus.needed(step)
    programs = _programs(step)
    goal = _goal(request.config, used)
    runs: dict[Collective, Run] = {}
    deadline = time.monotonic() + step.limit_s
    for left, collective in zip(range(len(programs), 0, -1), programs, strict=True):
        # a collective that hangs takes only its own share of the time
        share = (deadline - time.monotonic()) / left
        argv = [programs[collective], "-b", str(MIN_BYTES), "-e", str(goal.largest([collective]))]
        argv += ["-f", "2", "-g", str(len(used))]
        runs[collective] = _nccl_tests(replace(step, limit_s=share), argv, collective)
    request.config.stash[BY_NCCL_TESTS] = runs
    findings = [*place.unused(goal.text, goal.place, step.name)] if len(used) > 1 else []
    _judge(step, goal, runs.values(), "nccl", findings)


def test_bandwidth(step: Step, request: pytest.FixtureRequest) -> None:
    """The same collectives, sizes and columns by torch.distributed."""
    goal = _goal(request.config, gpus.visible()[: step.nproc_per_node])
    arguments = ["--max-bytes", str(goal.largest(Collective)), "--collective", *Collective]
    topology = Topology(nnodes=1, nproc_per_node=step.nproc_per_node)
    done = step.nccl(launch.torchrun(topology, "bandwidth.py", arguments))
    # torch lets no rank send to itself
    wanted = [
        each for each in Collective if topology.world_size > 1 or each is not Collective.SENDRECV
    ]
    runs = [results.read_torch(done.output, each) for each in wanted]
    # wrong elements end it with 1, and the rows say which; any other end is no result
    if not done.ok and not any(run.wrong for run in runs):
        step.fail_ranks("bandwidth.py", done)
    before = request.config.stash.get(BY_NCCL_TESTS, {})
    findings = [
        finding
        for run in runs
        if run.collective in before
        for finding in judge.gap(before[run.collective], run, step.name)
    ]
    if not before and topology.world_size > 1:
        findings += place.unused(goal.text, goal.place, step.name)
    # as the script picks it
    backend = "gloo" if goal.memory is None else "nccl"
    _judge(step, goal, runs, backend, findings)


# ---- what to reach -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """What is to be reached where the ranks are; `memory` of the smallest GPU, None on a CPU."""

    text: str | None
    place: Place | None
    memory: int | None

    def floor(self, collective: Collective) -> Floor | None:
        return place.floor_of(self.text, self.place, collective)

    def largest(self, collectives: Iterable[Collective]) -> int:
        """The largest buffer that these collectives are measured with."""
        memory = self.memory
        if memory is None:
            return GLOO_BYTES
        return max(
            place.largest_bytes(memory, self.place, self.floor(each)) for each in collectives
        )


def _goal(config: pytest.Config, used: tuple[gpus.Device, ...]) -> Goal:
    return Goal(
        text=config.getoption("--floors"),
        place=gpus.where_ranks_are(used),
        memory=min((each.memory for each in used), default=None),
    )


# ---- nccl-tests --------------------------------------------------------------------------------


def _programs(step: Step) -> Mapping[Collective, str]:
    """NAME_perf of every collective."""
    folders = os.pathsep.join([str(NCCL_TESTS), *os.get_exec_path()])
    found = {each: shutil.which(f"{each}_perf", path=folders) for each in Collective}
    there = {each: path for each, path in found.items() if path is not None}
    if not there and not bom.PATH.exists():
        pytest.skip(f"no nccl-tests in {NCCL_TESTS} or on PATH")
    if missing := [f"{each}_perf" for each in Collective if each not in there]:
        step.fail(
            what="nccl-tests are missing, and there are GPUs to test",
            evidence=f"neither {NCCL_TESTS} nor PATH has {', '.join(missing)}",
            cause="the image was built for a CPU, or where their source could not be had",
            remedy="./invokew build --nccl-tests-source CLONE; or go without them: smoke --skip"
            " nccl_tests",
        )
    return there


def _nccl_tests(step: Step, argv: list[str], collective: Collective) -> Run:
    """One of the programs, read from the JSON that it writes."""
    with tempfile.TemporaryDirectory(prefix="muster-nccl-tests-") as folder:
        # they never write over a file
        path = Path(folder, "results.json")
        done = step.nccl([*argv, "-J", str(path)])
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else None
    if text is None:
        why = "it wrote no file"
        run = Run(tool=Tool.NCCL_TESTS, collective=collective, nranks=0, rows=(), failure=why)
    else:
        run = results.read_nccl_tests(text, collective)
    return run if run.failure is None else replace(run, failure=_ended(run.failure, done))


def _ended(why: str, done: process.Completed) -> str:
    return "\n".join([f"{why} ({done.ending})", *done.last_lines(5)])


# ---- what came of it ---------------------------------------------------------------------------


def _judge(
    step: Step, goal: Goal, runs: Iterable[Run], backend: str, findings: list[Finding]
) -> None:
    """Judge the runs, keep them, and fail with all that is wrong at once."""
    kept = [
        Series(
            run=run,
            backend=backend,
            nodes=(step.host,),
            claimed=backend == "nccl" and run.nranks > 1,
            floor=goal.floor(run.collective) if run.nranks > 1 else None,
        )
        for run in runs
    ]
    for series in kept:
        findings += judge.judge(series.run, series.floor, step.name)
        if series.run.failure is None:
            step.series(series)
    step.measure(_measure([series for series in kept if series.run.failure is None], len(kept)))
    conclude(step, findings)


def _measure(whole: list[Series], count: int) -> str:
    right = [series for series in whole if not series.run.wrong]
    told = counted(count, "collective")
    if len(right) != count:
        return f"{len(right)} of {told} right"
    first = whole[0]
    largest = first.largest
    assert largest is not None  # a run without a failure has rows
    if first.run.nranks == 1:
        return f"{told} right to {size.binary(largest.bytes)}; one rank crosses no link"
    speed = f"{first.run.collective} {largest.busbw:.3g} GB/s busbw ({size.binary(largest.bytes)})"
    return f"{told}, {speed}" if first.claimed else f"{told} by {first.backend}, {speed}"
