"""The gate before training, in each pod: the suite's node steps, then an all_reduce over all nodes.

    python -m muster.preflight --using-network=IB --floor-gb-s=300 --on-purpose=NCCL_NET -- ARGS

ARGS are the launcher's; the script among them is train/bandwidth.py. --on-purpose names a
switch that the fabric sets, and that would be a leftover otherwise. Ends with
ExitStatus.NOT_READY when something is wrong, so that the Job's policy can stop all pods.

A pod that replaces another comes alone, while the others wait for it in training: it looks at its
own node, and leaves out what needs all of them.
"""

import argparse
import json
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from muster import process, steps
from muster.finding import Finding, Severity, Verdict, verdict
from muster.launch import ExitStatus

ROOT: Final = Path("/opt/muster")
# those that one node does on its own
NODE_STEPS: Final = ("smoke/test_environment.py", "smoke/test_shared_memory.py")
# from the annotations batch.kubernetes.io/job-index-(ignored-)failure-count
# https://kubernetes.io/docs/reference/labels-annotations-taints/#job-index-failure-count
FAILURE_COUNTS: Final = ("MUSTER_FAILURES", "MUSTER_IGNORED_FAILURES")
SUITE_LIMIT_S: Final = 900.0
NVIDIA: Final = Path("/dev/nvidiactl")
# NCCL's line decides, not "NET/IB : Using": that one names devices that were only found. Plugins
# may append a version. https://github.com/NVIDIA/nccl/blob/master/src/plugin/net.cc
_USING = re.compile(r"Using network (.+?)(_v\d+)?\s*$", re.MULTILINE)
_DEBUG: Final = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV"}


class Said:
    """Progress on the pod's log."""

    def say(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def detail(self, text: str) -> None:
        """A log has no line that changes."""


def main(argv: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, _end)
    arguments = _parse(argv)
    told = Said()
    found = list(_node(arguments.on_purpose, told))
    if verdict(found) is Verdict.READY and not is_replacement(os.environ):
        found += _world(arguments, told)
    for finding in found:
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


# ---- this node ---------------------------------------------------------------------------------


def _node(on_purpose: Sequence[str], told: Said) -> Iterator[Finding]:
    log = steps.Log(told)
    argv = [
        *(sys.executable, "-m", "pytest", *(str(ROOT / name) for name in NODE_STEPS)),
        *("-p", "no:terminal", "--report-log", steps.REPORT),
        *("--nproc-per-node", "1", "--train", str(ROOT / "train")),
        *(f"--on-purpose={name}" for name in on_purpose),
    ]
    if Path("/dev/infiniband").exists():
        argv.append("--infiniband")
    done = process.run(steps.reporting(argv), limit_s=SUITE_LIMIT_S, on_line=log.read_line)
    for step in log.steps:
        yield from step.findings
    if not log.is_whole:
        yield Finding(
            severity=Severity.ERROR,
            what=f"the node steps broke off ({done.ending})",
            where=log.running or "before the first step",
            evidence="\n".join(done.last_lines(5)),
            cause="they were ended from outside, or could not begin",
            remedy="run them alone on this node: ./invokew smoke",
        )


# ---- all nodes ---------------------------------------------------------------------------------


def _world(arguments: argparse.Namespace, told: Said) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix="muster-preflight-") as folder:
        environment = {**os.environ, **_DEBUG, "NCCL_DEBUG_FILE": f"{folder}/%h.%p"}
        argv = [sys.executable, "-m", "muster.launcher", *arguments.torchrun]
        done = process.run(argv, env=environment, on_line=told.say)
        logs = [path.read_text(errors="replace") for path in sorted(Path(folder).iterdir())]
    if not done.ok:
        yield _did_not_run(done)
        return
    yield from network(logs, arguments.using_network)
    yield from bandwidth(measured(done), arguments.floor_gb_s)


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


def measured(done: process.Completed) -> dict[str, Any]:
    """What rank 0 measured; empty on the other nodes, which do not know it."""
    lines = [line for line in done.output.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
    return found


def bandwidth(facts: Mapping[str, Any], floor: float | None) -> Iterator[Finding]:
    if not facts or floor is None:
        return
    largest = max(facts["all_reduce"], key=lambda row: row["bytes"])
    if largest["busbw"] < floor:
        yield Finding(
            severity=Severity.ERROR,
            what=f"busbw is {largest['busbw']:.1f} GB/s, under the fabric's {floor:g}",
            where="all nodes",
            evidence=f"all_reduce of {largest['bytes']} bytes over {facts['world_size']} ranks",
            cause="a slow node or link holds all others up, or GPUDirect is off",
            remedy="test pairs of nodes to find it; then ./invokew smoke on that node",
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
