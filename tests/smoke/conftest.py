"""What a step of the smoke suite has: its options, its time limit, its measure, its Findings.

smoke on the host starts the suite, by pytest in the container, and reads the report log: the
properties of each step are for it. The plan of the steps, their order and what each stands on, is
muster.suite.
"""

import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch

from muster import launch, process, steps, suite, switches
from muster.bandwidth.series import Series
from muster.finding import Finding, Severity
from muster.topology import Topology

if TYPE_CHECKING:
    from meeting import Meeting

# beyond a step's own limit, for a step that hangs in Python instead of in what it started
BACKSTOP_S = 20.0
# of a step that is not in the plan
DEFAULT_LIMIT_S = 30.0
# of what one process of NCCL's wrote; the lines of its start, which matter, come first
MOST_OF_A_LOG = 2**20

# programs for learners, run by a pytest of their own
collect_ignore = ["pitfalls"]


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
    parser.addoption("--steps", help="the names of those to run, with commas (default: all)")
    parser.addoption("--floors", help="busbw that must be reached: GB/s, or the TOML of a file")
    parser.addoption("--nodes-floor", type=float, help="the same between all nodes, in GB/s")
    parser.addoption("--nodes", help="the names of all nodes, with commas, the first hosts stores")
    parser.addoption("--node-rank", type=int, default=0, help="which of them this is")


def _name(item: pytest.Item) -> str:
    return item.name.removeprefix("test_")


def _limit_s(item: pytest.Item) -> float:
    chosen = item.config.getoption("--step-timeout")
    return float(chosen) if chosen is not None else _planned(item).limit_s


def _planned(item: pytest.Item) -> suite.Planned:
    own = suite.Planned(_name(item), suite.Reach.CONTAINER, DEFAULT_LIMIT_S)
    return suite.BY_NAME.get(own.name, own)


# ---- the plan ----------------------------------------------------------------------------------


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The chosen steps in the order of the plan."""
    chosen = config.getoption("--steps")
    names = suite.chosen(nnodes=len(nodes_of(config))) if chosen is None else chosen.split(",")
    order = {name: at for at, name in enumerate(names)}
    # a site's own steps come last, where nothing is chosen
    own = [] if chosen is not None else [item for item in items if _name(item) not in suite.BY_NAME]
    planned = [item for item in items if _name(item) in order]
    items[:] = [*sorted(planned, key=lambda item: order[_name(item)]), *own]
    for item in items:
        item.add_marker(pytest.mark.timeout(_limit_s(item) + BACKSTOP_S))


def nodes_of(config: pytest.Config) -> tuple[str, ...]:
    return tuple((config.getoption("--nodes") or "node-0").split(","))


# the steps that failed or were not run, each with the reason for what stands on it
unfit: dict[str, str] = {}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A step is not run when one that it stands on failed, or was not run itself."""
    for name in _planned(item).on:
        if name in unfit:
            unfit[_name(item)] = unfit[name]
            pytest.skip(f"{steps.NOT_RUN}{unfit[name]}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    if call.excinfo is not None and isinstance(call.excinfo.value, StepFailed):
        for finding in call.excinfo.value.findings:
            item.user_properties.append(("finding", finding.to_dict()))
    if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
        unfit.setdefault(_name(item), f"{_name(item)} failed, and this stands on it")
    return (yield)


# ---- a step ------------------------------------------------------------------------------------


@dataclass
class Step:
    """One step while it runs. `host` is this node's name."""

    name: str
    limit_s: float
    nproc_per_node: int
    train: Path
    host: str
    properties: list[tuple[str, object]]

    @property
    def has_gpus(self) -> bool:
        return bool(torch.cuda.is_available())

    def measure(self, text: str) -> None:
        """What the step measured, for the table."""
        self.properties.append(("measure", text))

    def fact(self, name: str, text: str) -> None:
        """What is known of this node, for the report."""
        self.properties.append(("fact", [name, text]))

    def version(self, name: str, text: str) -> None:
        """Of what the suite ran with."""
        self.properties.append(("version", [name, text]))

    def hash(self, name: str, text: str) -> None:
        """The SHA-256 of what the suite ran with."""
        self.properties.append(("hash", [name, text]))

    def series(self, series: Series) -> None:
        """A bandwidth, for the report's plots."""
        self.properties.append(("series", asdict(series)))

    def note(self, text: str) -> None:
        """A line that is kept with the step, for the report."""
        print(text)

    def found(self, finding: Finding) -> None:
        """A Finding that does not fail the step by itself."""
        self.properties.append(("finding", finding.to_dict()))

    def warn(self, **texts: str) -> None:
        self.found(Finding(severity=Severity.WARNING, where=self.name, **texts))

    def fail(self, **texts: str) -> NoReturn:
        """The Finding that fails the step."""
        raise StepFailed([Finding(severity=Severity.ERROR, where=self.name, **texts)])

    def run(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None
    ) -> process.Completed:
        """Run a program within the step's limit; its output is kept with the step."""
        print("+", *argv)
        done = process.run(argv, limit_s=self.limit_s, cwd=self.train, env=env)
        print(done.output)
        return done

    def nccl(
        self, argv: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})
    ) -> process.Completed:
        """Run a program that may start NCCL: what NCCL writes is for the report."""
        with tempfile.TemporaryDirectory(prefix="muster-nccl-") as folder:
            switched = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": switches.SUBSYSTEMS}
            switched["NCCL_DEBUG_FILE"] = f"{folder}/%h.%p"
            given = {**launch.ENVIRONMENT, **switched, **environment}
            done = self.run(argv, env={**os.environ, **given})
            for path in sorted(Path(folder).iterdir()):
                text = path.read_bytes()[:MOST_OF_A_LOG].decode(errors="replace")
                self.properties.append(("nccl", text))
        return done

    def torchrun(
        self,
        script: str,
        *arguments: str,
        nproc_per_node: int | None = None,
        flags: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Run a script of train/ on every rank of this node; the JSON line that rank 0 prints."""
        topology = Topology(nnodes=1, nproc_per_node=nproc_per_node or self.nproc_per_node)
        argv = launch.torchrun(topology, script, arguments, flags=flags)
        done = self.nccl(argv, environment)
        if not done.ok:
            self.fail_ranks(script, done)
        return last_json(done.output)

    def fail_ranks(self, script: str, done: process.Completed) -> NoReturn:
        """The Finding of a torchrun that did not end well."""
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


def conclude(step: Step, findings: Sequence[Finding]) -> None:
    """Fail with all that is wrong at once; warnings alone do not."""
    for each in findings:
        if each.severity is Severity.WARNING:
            step.found(each)
    if errors := [each for each in findings if each.severity is Severity.ERROR]:
        raise StepFailed(errors)


def free_port() -> int:
    """One that nobody holds now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def last_json(output: str) -> dict[str, Any]:
    """The last line of `output` that is a JSON object."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


@pytest.fixture
def step(request: pytest.FixtureRequest) -> Step:
    limit_s = _limit_s(request.node)
    properties: list[tuple[str, object]] = request.node.user_properties
    properties.append(("limit", limit_s))
    config = request.config
    return Step(
        name=_name(request.node),
        limit_s=limit_s,
        nproc_per_node=config.getoption("--nproc-per-node"),
        train=config.getoption("--train"),
        host=nodes_of(config)[config.getoption("--node-rank")],
        properties=properties,
    )


@pytest.fixture(scope="session", autouse=True)
def meeting(
    pytestconfig: pytest.Config, request: pytest.FixtureRequest
) -> "Iterator[Meeting | None]":
    """The nodes, from the first step on: while each does its own, it is heard by the others."""
    names = nodes_of(pytestconfig)
    if not any(_planned(item).reach is suite.Reach.NODES for item in request.session.items):
        yield None
        return
    # torch's store, which no other step needs
    from meeting import Meeting  # noqa: PLC0415

    made = Meeting(names, pytestconfig.getoption("--node-rank"))
    yield made
    made.leave()


@pytest.fixture
def python() -> str:
    return sys.executable
