"""A job that loses a rank or a node: does it end where an undisturbed one ends?"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Step, free_port, last_json

from muster import launch, process
from muster.launch import Rendezvous
from muster.topology import NodeRange

# seconds of each step of the demo: time to take a node away, and to bring one back
PAUSE_S = 0.2
# what torchrun says at its level INFO each time when nodes have met
_MET = re.compile(r"group_world_size=(\d+)")


def test_elastic_restart(step: Step) -> None:
    """A rank is killed; torchrun starts all again, and they end with the same parameters."""
    undisturbed = _undisturbed(step, step.nproc_per_node)
    victim = step.nproc_per_node - 1
    disturbed = step.torchrun(
        *("elastic_demo.py", "--die", f"{victim}@12"), flags=("--max-restarts=1",)
    )
    _same(step, undisturbed, disturbed)
    if not disturbed["restarts"]:
        step.fail(
            what=f"rank {victim} was not killed, so nothing was proved",
            evidence=str(disturbed),
            cause="elastic_demo.py did not reach its step 12",
            remedy="read the step's output in the report (--json FILE)",
        )
    step.measure(f"resumed from step {disturbed['resumed_from']}, digest {disturbed['digest']}")


_known: dict[int, dict[str, Any]] = {}


def _undisturbed(step: Step, ranks: int) -> dict[str, Any]:
    """The run to compare with; once for each number of ranks."""
    if ranks not in _known:
        _known[ranks] = step.torchrun("elastic_demo.py", nproc_per_node=ranks)
    return _known[ranks]


def _same(step: Step, undisturbed: dict[str, Any], disturbed: dict[str, Any]) -> None:
    if undisturbed["digest"] != disturbed["digest"]:
        step.fail(
            what="the job that was disturbed ended with other parameters",
            evidence=f"undisturbed {undisturbed}\ndisturbed {disturbed}",
            cause="the checkpoint is not whole, or the data do not follow from the step alone",
            remedy="compare the two runs in the step's output (--json FILE)",
        )


def test_elastic_nodes(step: Step) -> None:
    """Of two nodes one is killed, and one comes in its place: --nnodes=1:2."""
    if step.has_gpus and step.nproc_per_node < 2:
        pytest.skip("it needs two GPUs, one for each of two nodes")
    undisturbed = _undisturbed(step, 2)
    with tempfile.TemporaryDirectory() as folder:
        job = _Job(step, Path(folder))
        with contextlib.ExitStack() as nodes:
            nodes.callback(lambda: step.note(job.said()))
            stays = nodes.enter_context(job.node(0))
            with job.node(1):
                job.wait_until("two nodes have met", lambda: job.met()[-1:] == [2])
                job.wait_until("there is a checkpoint", job.checkpoint.exists)
            job.wait_until("the node that is left goes on", lambda: job.met()[-1:] == [1])
            nodes.enter_context(job.node(1))
            job.wait_until("the job has ended", lambda: stays.poll() is not None)
        disturbed, met = last_json(job.said()), job.met()
    _same(step, undisturbed, disturbed)
    step.measure(f"{', '.join(map(str, met))} nodes in turn, digest {disturbed['digest']}")


class _Job:
    """An elastic job of one or two nodes, each a torchrun with one rank."""

    def __init__(self, step: Step, folder: Path) -> None:
        self._step = step
        self._folder = folder
        self._deadline = time.monotonic() + step.limit_s
        self._count = 0
        # who is lost is missed after 3 s instead of 15, who may still come waited for 1 s, not 30
        conf = {"keep_alive_interval": "1", "last_call_timeout": "1"}
        place = Rendezvous("elastic", "127.0.0.1", free_port(), 30, 60)
        arguments = launch.arguments(
            NodeRange(1, 2),
            1,
            place,
            max_restarts=9,
            script="elastic_demo.py",
            script_arguments=["--checkpoint", str(folder), "--pause", str(PAUSE_S)],
        )
        self._arguments = [
            f"{word},{','.join(f'{k}={v}' for k, v in conf.items())}"
            if word.startswith("--rdzv-conf=")
            else word
            for word in arguments
        ]

    @property
    def checkpoint(self) -> Path:
        return self._folder / "elastic_demo.pt"

    @contextlib.contextmanager
    def node(self, index: int) -> Iterator[subprocess.Popen[bytes]]:
        """A node that is there until the block ends, and goes as one that loses its power."""
        self._count += 1
        log = self._folder / f"node-{index}.{self._count}.log"
        log.touch()
        argv = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *launch.for_index(self._arguments, index),
        ]
        environment = {**os.environ, **launch.ENVIRONMENT, "LOGLEVEL": "INFO"}
        if self._step.has_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = str(index)
        to_log = ["sh", "-c", 'exec "$@" >"$0" 2>&1', str(log), *argv]
        with process.start(to_log, env=environment, cwd=self._step.train) as node:
            yield node
            if node.poll() is None:
                process.kill(node)

    def said(self) -> str:
        """What the node that stays wrote."""
        return (self._folder / "node-0.1.log").read_text(errors="replace")

    def met(self) -> list[int]:
        """How many nodes there were, each time when they met."""
        return [int(count) for count in _MET.findall(self.said())]

    def wait_until(self, what: str, is_so: Callable[[], bool]) -> None:
        while not is_so():
            if time.monotonic() > self._deadline:
                self._step.fail(
                    what=f"it did not come to this within {self._step.limit_s:g} s: {what}",
                    evidence="\n".join(self.said().splitlines()[-15:]),
                    cause="torchrun did not let the nodes meet again after one was lost",
                    remedy="read the step's output in the report (--json FILE)",
                )
            time.sleep(0.1)
