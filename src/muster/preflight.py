"""The gate before training, in each pod: the suite's node steps, then an all_reduce over all nodes.

    python -m muster.preflight --using-network=IB --floor-gb-s=300 --on-purpose=NCCL_NET -- ARGS

ARGS are the launcher's; the script among them is train/bandwidth.py. --on-purpose names a
switch that the fabric sets, and that would be a leftover otherwise. Ends with
ExitStatus.NOT_READY when something is wrong, so that the Job's policy can stop all pods.

A pod that replaces another comes alone, while the others wait for it in training: it looks at its
own node, and leaves out what needs all of them.

What it finds also goes to the pod's log as lines of JSON, which ./invokew report reads: podlines.
"""

import argparse
import json
import os
import re
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from muster import __version__, podlines, process, size, steps, suite, switches
from muster.bandwidth import floors
from muster.bandwidth.floors import Floor
from muster.bandwidth.judge import judge
from muster.bandwidth.results import Collective, read_torch
from muster.bandwidth.series import Series
from muster.finding import Finding, Outcome, Severity, Verdict, verdict
from muster.launch import FAILURE_COUNTS, CommandLine, ExitStatus
from muster.podlines import Began, Closed, Ended, Found, Known, Measured, Opened, Record
from muster.steps import Step
from muster.suite import Reach

ROOT: Final = Path("/opt/muster")
DOCTOR: Final = "doctor"
# those that one node does on its own; the doctor is asked apart from them
NODE_STEPS: Final = (
    *(s.name for s in suite.STEPS if s.reach is Reach.CONTAINER and s.name != DOCTOR),
    "dataloader_shm",
)
# Checks of the doctor that judge a pod wrongly: sysfs shows it HCAs that it was not given, whose
# addresses and locked memory mean nothing here; another pod's name may come later than this one;
# and switches may be there on purpose. The steps memlock and nccl_switches know better, and so do
# the nodes when they meet.
NOT_JUDGED: Final = frozenset({"locked_memory", "gids", "master_addr", "debug_switches"})
# the name in the suite's plan of what all nodes do here
WORLD: Final = "nodes_bandwidth"
LAUNCHER: Final = (sys.executable, "-m", "muster.launcher")
SUITE_LIMIT_S: Final = 900.0
NVIDIA: Final = Path("/dev/nvidiactl")
# NCCL's line decides, not "NET/IB : Using": that one names devices that were only found. Plugins
# may append a version. https://github.com/NVIDIA/nccl/blob/master/src/plugin/net.cc
_USING = re.compile(r"Using network (.+?)(_v\d+)?\s*$", re.MULTILINE)
_DEBUG: Final = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": switches.SUBSYSTEMS}
# of what one process of NCCL's wrote; the lines of its start, which matter, come first
_MOST_OF_A_LOG: Final = 2**18
# of a failed step's output in the pod's log: characters, the last ones
_MOST_OF_OUTPUT: Final = 8000


@dataclass(frozen=True)
class Told:
    """Progress on the pod's log, and the records beside it."""

    host: str

    def say(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def detail(self, text: str) -> None:
        """A log has no line that changes."""

    def write(self, record: Record) -> None:
        self.say(podlines.line(self.host, record))

    def ended(self, step: Step) -> None:
        kept = step.output[-_MOST_OF_OUTPUT:] if step.outcome is Outcome.FAILED else ""
        self.write(Ended(replace(step, output=kept)))


def main(argv: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, _end)
    arguments = _parse(argv)
    told = Told(socket.gethostname())
    started = time.monotonic()
    told.write(_opened(arguments, argv))
    found = [*_doctor(told), *_node(arguments.on_purpose, told)]
    found += _world(arguments, found, told)
    seconds = round(time.monotonic() - started, 3)
    told.write(Closed(verdict=verdict(found), seconds=seconds))
    # the errors last: they are what the end of a log is to show
    for finding in sorted(found, key=lambda each: each.severity is Severity.ERROR):
        told.say(f"{finding.severity} in {finding.where}: {finding.what}")
        for name in ("evidence", "cause", "remedy"):
            told.say(f"  {name}: {getattr(finding, name)}")
    told.say(verdict(found))
    return 0 if verdict(found) is Verdict.READY else ExitStatus.NOT_READY


def is_replacement(environment: Mapping[str, str]) -> bool:
    """Whether an earlier pod of this index failed, as the Job controller counts them."""
    return any(environment.get(name, "0") not in {"", "0"} for name in FAILURE_COUNTS)


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    # what runs is ended on the way out
    raise SystemExit(ExitStatus.PREEMPTED)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m muster.preflight")
    parser.add_argument("--using-network", action="append", default=[])
    parser.add_argument("--floor-gb-s", type=float)
    parser.add_argument("--on-purpose", action="append", default=[])
    parser.add_argument("torchrun", nargs="+")
    return parser.parse_args(argv)


def _opened(arguments: argparse.Namespace, argv: Sequence[str]) -> Opened:
    return Opened(
        schema=podlines.SCHEMA,
        version=__version__,
        started=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        index=_index(),
        nnodes=CommandLine.read(arguments.torchrun).value("nnodes") or "",
        replaces=is_replacement(os.environ),
        command=shlex.join(["python", "-m", "muster.preflight", *argv]),
    )


def _index() -> int | None:
    """This pod's, which is the rank of its node; None where the launcher will refuse it."""
    text = os.environ.get("JOB_COMPLETION_INDEX", "")
    return int(text) if text.isascii() and text.isdigit() else None


# ---- this node ---------------------------------------------------------------------------------


def _doctor(told: Told) -> Iterable[Finding]:
    """What the doctor sees here, as a step: in a process of its own, which may not hang."""
    limit_s = suite.BY_NAME[DOCTOR].limit_s
    told.write(Began(DOCTOR))
    # a warning of Python's would stand in the JSON
    argv = [sys.executable, "-W", "ignore", "-m", "muster.doctor", "--json"]
    done = process.run(argv, limit_s=limit_s)
    checks, findings = examined(done)
    step = Step(
        name=DOCTOR,
        outcome=_outcome(findings),
        seconds=round(done.seconds, 3),
        limit_s=limit_s,
        measure=f"{len(checks)} checks",
        findings=findings,
        output=done.output,
        command="./invokew doctor",
    )
    told.say(steps.line(step))
    told.ended(step)
    facts = {str(each["name"]): str(each["measure"]) for each in checks}
    told.write(Known(facts=facts, versions={}, hashes={}))
    return findings


def examined(done: process.Completed) -> tuple[Sequence[Mapping[str, Any]], tuple[Finding, ...]]:
    """The doctor's checks, and the Findings of those that can judge a pod."""
    try:
        checks = json.loads(done.output)["checks"]
    except ValueError:
        return (), (_broken_off(done, DOCTOR, "the doctor", "python -m muster.doctor"),)
    judged = (each["findings"] for each in checks if each["name"] not in NOT_JUDGED)
    return checks, tuple(Finding.from_dict(each) for found in judged for each in found)


def _node(on_purpose: Sequence[str], told: Told) -> Iterator[Finding]:
    log = steps.Log(told)
    argv = [
        *(sys.executable, "-m", "pytest", str(ROOT / "smoke"), "-p", "no:terminal"),
        *("--report-log", steps.REPORT, "--steps", ",".join(NODE_STEPS)),
        *("--nproc-per-node", "1", "--train", str(ROOT / "train")),
        *(f"--on-purpose={name}" for name in on_purpose),
    ]
    if Path("/dev/infiniband").exists():
        argv.append("--infiniband")
    done = process.run(
        steps.reporting(argv), limit_s=SUITE_LIMIT_S, on_line=lambda line: _follow(log, line, told)
    )
    for step in log.steps:
        yield from step.findings
    told.write(Known(facts=log.facts, versions=log.versions, hashes=log.hashes))
    if not log.is_whole:
        where = log.running or "before the first step"
        finding = _broken_off(done, where, "the node steps", "./invokew smoke")
        told.write(Found(finding))
        yield finding


def _follow(log: steps.Log, line: str, told: Told) -> None:
    running, ended = log.running, len(log.steps)
    log.read_line(line)
    if log.running is not None and log.running != running:
        told.write(Began(log.running))
    for step in log.steps[ended:]:
        told.ended(step)


def _broken_off(done: process.Completed, where: str, what: str, command: str) -> Finding:
    return Finding(
        severity=Severity.ERROR,
        what=f"{what} broke off ({done.ending})",
        where=where,
        evidence="\n".join(done.last_lines(5)),
        cause="ended from outside, or could not begin",
        remedy=f"run this alone on this node: {command}",
    )


# ---- all nodes ---------------------------------------------------------------------------------


def _world(
    arguments: argparse.Namespace, before: Iterable[Finding], told: Told
) -> Iterable[Finding]:
    """The Findings of what all nodes do together, unless it is left out after those `before`."""
    errors = [each.what for each in before if each.severity is Severity.ERROR]
    if errors:
        step = _left_out(arguments, Outcome.NOT_RUN, f"this node is not ready: {errors[0]}")
    elif is_replacement(os.environ):
        why = "this pod replaces another: the others are in training"
        step = _left_out(arguments, Outcome.NOT_APPLICABLE, why)
    else:
        step = _together(arguments, told)
    told.say(steps.line(step))
    told.ended(step)
    return step.findings


def _left_out(arguments: argparse.Namespace, outcome: Outcome, why: str) -> Step:
    return Step(
        name=WORLD,
        outcome=outcome,
        seconds=0.0,
        limit_s=None,
        measure=why,
        findings=(),
        output="",
        command=_command(arguments),
    )


def _command(arguments: argparse.Namespace) -> str:
    return shlex.join(["python", "-m", "muster.launcher", *arguments.torchrun])


def _together(arguments: argparse.Namespace, told: Told) -> Step:
    told.write(Began(WORLD))
    with tempfile.TemporaryDirectory(prefix="muster-preflight-") as folder:
        environment = {**os.environ, **_DEBUG, "NCCL_DEBUG_FILE": f"{folder}/%h.%p"}
        done = process.run([*LAUNCHER, *arguments.torchrun], env=environment, on_line=told.say)
        logs = [
            path.read_bytes()[:_MOST_OF_A_LOG].decode(errors="replace")
            for path in sorted(Path(folder).iterdir())
        ]
    for piece in (each for log in logs for each in podlines.packed(log)):
        told.write(piece)
    findings = [_did_not_run(done)] if not done.ok else [*network(logs, arguments.using_network)]
    measure = ""
    # rank 0 alone knows what was measured, and the ranks are in the order of the pods
    if done.ok and _index() == 0:
        series = measured(done.output, arguments.floor_gb_s)
        findings += judge(series.run, series.floor, "all nodes")
        measure = _measure(series)
        told.write(Measured(series))
    return Step(
        name=WORLD,
        outcome=_outcome(findings),
        seconds=round(done.seconds, 3),
        limit_s=None,
        measure=measure,
        findings=tuple(findings),
        output=done.output,
        command=_command(arguments),
    )


def _did_not_run(done: process.Completed) -> Finding:
    causes: Mapping[int, str] = {
        ExitStatus.RENDEZVOUS_FAILED: "the nodes did not meet, or one of them is not ready",
        ExitStatus.WORKER_FAILED: "a rank failed: its own words are above",
    }
    return Finding(
        severity=Severity.ERROR,
        what=f"the all_reduce over all nodes did not run ({done.ending})",
        where="all nodes",
        evidence="\n".join(done.last_lines(8)),
        cause=causes.get(done.returncode, "not known"),
        remedy="read the other pods' logs: the one that failed first says why",
    )


def network(logs: Sequence[str], wanted: Sequence[str]) -> Iterator[Finding]:
    """That NCCL moved the data over the fabric, and not, unsaid, over sockets."""
    if not wanted or not NVIDIA.exists():
        return
    used = sorted({match[1] for log in logs for match in _USING.finditer(log)})
    if not used or not set(used) <= set(wanted):
        yield Finding(
            severity=Severity.ERROR,
            what=f"NCCL uses the network {', '.join(used) or 'none'}, not {' or '.join(wanted)}",
            where=socket.gethostname(),
            evidence="\n".join(_lines(logs, "NET/")[:6]) or "no line of NCCL's about a network",
            cause="the fabric's devices, its plugin or the right to lock memory is missing here",
            remedy="./invokew smoke on this node; the lines above say what NCCL found",
        )


def _lines(logs: Sequence[str], word: str) -> list[str]:
    return [line for log in logs for line in log.splitlines() if word in line]


def measured(output: str, floor_gb_s: float | None) -> Series:
    """What rank 0 wrote of the all_reduce, and the floor of the fabric that it must reach."""
    run = read_torch(output, Collective.ALL_REDUCE)
    backend = "" if run.failure else _backend(output)
    return Series(
        run=run,
        backend=backend,
        nodes=(),
        claimed=backend == "nccl" and run.nranks > 1,
        floor=None if floor_gb_s is None else _floor(floor_gb_s),
    )


def _floor(gb_s: float) -> Floor:
    return replace(floors.given(gb_s), source="--floor-gb-s, the fabric's own")


def _backend(output: str) -> str:
    # the run was read from the same line
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return str(json.loads(lines[-1]).get("backend", ""))


def _measure(series: Series) -> str:
    largest = series.largest
    if largest is None:
        return ""
    ranks = f"{series.run.nranks} ranks by {series.backend}"
    if not series.claimed:
        return f"{ranks}, right up to {size.binary(largest.bytes)}"
    floor = f", floor {series.floor.busbw:g}" if series.floor else ""
    return f"{ranks}, {largest.busbw:.1f} GB/s busbw with {size.binary(largest.bytes)}{floor}"


def _outcome(findings: Iterable[Finding]) -> Outcome:
    return Outcome.PASSED if verdict(findings) is Verdict.READY else Outcome.FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
