"""What a step of the smoke suite has: its options, its time limit, its measure, its Findings.

smoke.py on the host starts the suite, by pytest in the container, and reads the report log: the
properties "limit", "measure" and "finding" of each step are for it.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from muster import launch, process
from muster.finding import Finding, Severity
from muster.topology import Topology

# beyond a step's own limit, for a step that hangs in Python instead of in what it started
BACKSTOP_S = 20.0
DEFAULT_LIMIT_S = 30.0


class StepFailed(Exception):
    """The step found something wrong; the Findings say what."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__(findings[0].what)
        self.findings = findings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nproc-per-node", type=int, required=True, help="ranks to start")
    parser.addoption("--shm-bytes", type=int, help="the size that /dev/shm must have")
    parser.addoption("--infiniband", action="store_true", help="verbs devices were passed")
    parser.addoption("--train", type=Path, required=True, help="the folder train/")
    on_purpose = "a switch that the fabric sets, and nobody left on"
    parser.addoption("--on-purpose", action="append", default=[], help=on_purpose)
    parser.addoption("--step-timeout", type=float, help="seconds for every step, not its own limit")


def _limit_s(item: pytest.Item) -> float:
    chosen = item.config.getoption("--step-timeout")
    marker = item.get_closest_marker("limit")
    own = float(marker.args[0]) if marker else DEFAULT_LIMIT_S
    return float(chosen) if chosen is not None else own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.timeout(_limit_s(item) + BACKSTOP_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    if call.excinfo is not None and isinstance(call.excinfo.value, StepFailed):
        for finding in call.excinfo.value.findings:
            item.user_properties.append(("finding", finding.to_dict()))
    return (yield)


@dataclass
class Step:
    """One step while it runs."""

    name: str
    limit_s: float
    nproc_per_node: int
    train: Path
    properties: list[tuple[str, object]]

    def measure(self, text: str) -> None:
        """What the step measured, for the table."""
        self.properties.append(("measure", text))

    def note(self, text: str) -> None:
        """A line that is kept with the step, for the report."""
        print(text)

    def warn(self, **texts: str) -> None:
        """A Finding that does not fail the step."""
        finding = Finding(severity=Severity.WARNING, where=self.name, **texts)
        self.properties.append(("finding", finding.to_dict()))

    def fail(self, **texts: str) -> NoReturn:
        """The Finding that fails the step."""
        raise StepFailed([Finding(severity=Severity.ERROR, where=self.name, **texts)])

    def run(self, argv: Sequence[str]) -> process.Completed:
        """Run a program within the step's limit; its output is kept with the step."""
        print("+", *argv)
        done = process.run(argv, limit_s=self.limit_s, cwd=self.train)
        print(done.output)
        return done

    def torchrun(self, script: str) -> dict[str, Any]:
        """Run a script of train/ on every rank; the JSON line that rank 0 prints."""
        topology = Topology(nnodes=1, nproc_per_node=self.nproc_per_node)
        done = self.run(launch.torchrun(topology, script))
        if not done.ok:
            self._fail_ranks(script, done)
        return last_json(done)

    def _fail_ranks(self, script: str, done: process.Completed) -> NoReturn:
        failure = launch.first_failure(done.output)
        if done.timed_out:
            what = f"{script} did not end within {self.limit_s:g} s"
            cause = "a rank hangs: it waits for another one, for a lock or for the network"
        else:
            what = f"{script} failed: {failure or f'torchrun ended with {done.ending}'}"
            cause = "the rank's own error stands in the last lines"
            if failure is not None and failure.exitcode == -9:
                cause = "SIGKILL comes from the kernel when memory runs out, or from a person"
        self.fail(
            what=what,
            evidence="\n".join(done.last_lines()),
            cause=cause,
            remedy=f"repeat it alone: {' '.join(['torchrun', *done.argv[3:]])}",
        )


def last_json(done: process.Completed) -> dict[str, Any]:
    """The last line of the output that is a JSON object."""
    lines = [line for line in done.output.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


@pytest.fixture
def step(request: pytest.FixtureRequest) -> Step:
    limit_s = _limit_s(request.node)
    properties: list[tuple[str, object]] = request.node.user_properties
    properties.append(("limit", limit_s))
    return Step(
        name=request.node.name.removeprefix("test_"),
        limit_s=limit_s,
        nproc_per_node=request.config.getoption("--nproc-per-node"),
        train=request.config.getoption("--train"),
        properties=properties,
    )


@pytest.fixture
def python() -> str:
    return sys.executable
