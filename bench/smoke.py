"""The smoke suite on a CPU with 2 ranks: how long it takes, and what it costs beside bare scripts.

    ./invokew bench

The suite's own cost: its steps that do nothing but start torchrun, as a whole command, beside one
container in which sh runs the same commands in a row. The commands are read from the suite's own
report. Nothing is subtracted: the command's start, pytest's and the report are in the suite's time.
"""

import functools
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.image import ROOT, Bench, Row, call, invoke, seconds, told

from muster import dossier, launch
from muster.dossier import Dossier
from muster.page import page
from muster.smoke import command

ROUNDS = 3
# of what takes minutes
LONG_ROUNDS = 2
NPROC_PER_NODE = "2"
BARE = (
    *("all_reduce", "subgroups", "collectives", "ddp_demo", "elastic_restart", "bandwidth"),
    "clean_up",
)
# a step prints the command that it starts, by an absolute path
STARTED = "+ /"

GOAL_FULL_S = 150
GOAL_QUICK_S = 30
GOAL_COST = 1.10
GOAL_NODES_S = 60
GOAL_PAGE_BYTES = 500e3
GOAL_PAGE_S = 1
GOAL_LOOP = 1.05


@dataclass(frozen=True)
class Run:
    """A run of ./invokew smoke: seconds of the whole command, and its report."""

    seconds: float
    report: Dossier


def smoke(*words: str) -> Run:
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        path = Path(folder, "report.json")
        argv = ["smoke", "--variant", "cpu", "--nproc-per-node", NPROC_PER_NODE]
        took = seconds(lambda: invoke(ROOT, *argv, "--json", str(path), *words))
        return Run(took, dossier.read(path))


def best(*words: str, rounds: int) -> Run:
    return min((smoke(*words) for _ in range(rounds)), key=lambda run: run.seconds)


# ---- the suite ---------------------------------------------------------------------------------


def whole() -> list[Row]:
    """All of it on one node, the quick part, and all of it on two nodes with the page of that."""
    one, two = (best(*words, rounds=LONG_ROUNDS) for words in ((), ("--nnodes", "2")))
    more = two.seconds - one.seconds
    beside = f"{two.seconds:.1f} s", f"{one.seconds:.1f} s", f"{more:+.1f} s"
    return [
        timed("full suite", one, GOAL_FULL_S),
        timed("--quick", best("--quick", rounds=ROUNDS), GOAL_QUICK_S),
        Row(("--nnodes 2, beside one", *beside), f"+{GOAL_NODES_S} s", more < GOAL_NODES_S),
        *paged(two.report),
    ]


def timed(what: str, run: Run, goal_s: int) -> Row:
    return Row((what, f"{run.seconds:.1f} s", "", ""), f"{goal_s} s", run.seconds < goal_s)


def paged(report: Dossier) -> list[Row]:
    """The page of the larger report; its first making, for a command makes one."""
    made: list[bytes] = []
    took = seconds(lambda: made.append(page.page(report)))
    count = len(made[0])
    return [
        Row(
            ("HTML of --nnodes 2", f"{count / 1e3:.0f} KB", "", ""),
            f"{GOAL_PAGE_BYTES / 1e3:.0f} KB",
            count < GOAL_PAGE_BYTES,
        ),
        Row(("made in", f"{took:.3f} s", "", ""), f"{GOAL_PAGE_S} s", took < GOAL_PAGE_S),
    ]


# ---- its own cost ------------------------------------------------------------------------------


def cost(bench: Bench) -> Row:
    ours, bare = [], []
    for _ in range(ROUNDS):
        run = smoke("--only", ",".join(BARE))
        ours.append(run.seconds)
        argv = [*container(bench), "sh", "-ec", in_a_row(run.report)]
        bare.append(seconds(functools.partial(call, argv)))
    ratio = min(ours) / min(bare)
    cells = (f"{len(BARE)} steps, beside sh", f"{min(ours):.1f} s", f"{min(bare):.1f} s")
    return Row((*cells, f"{ratio:.2f} times"), f"{GOAL_COST:.2f} times", ratio < GOAL_COST)


def in_a_row(report: Dossier) -> str:
    """The commands that the steps of `report` started, each a line for sh."""
    lines = [line for step in report.steps for line in step.output.splitlines()]
    commands = [line.removeprefix("+ ") for line in lines if line.startswith(STARTED)]
    assert len(commands) >= len(BARE)
    return "\n".join(shlex.join(line.split(" ")) for line in commands)


def container(bench: Bench, *flags: str) -> list[str]:
    """A container as the suite's, in the folder of the scripts."""
    environment = [f"--env={name}={value}" for name, value in launch.ENVIRONMENT.items()]
    return [
        *(*bench.docker, "run", "--rm", "--init", "--shm-size", "1g", *environment, *flags),
        *("--workdir", str(command.ROOT / "train"), bench.variant.image_ref),
    ]


# ---- bandwidth.py ------------------------------------------------------------------------------


def loop(bench: Bench) -> Row:
    """Of each row the median; rows of all collectives and sizes added up."""
    text = (ROOT / "bench/bare_loop.py").read_text()
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", NPROC_PER_NODE, "--no-python"]
    argv = [*container(bench, f"--env=PYTHONPATH={command.ROOT}"), *torchrun, "python", "-c", text]
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    rows: list[list[tuple[float, float]]] = json.loads(done.stdout)
    script, bare = (
        sum(statistics.median(both[which] for both in row) for row in rows) for which in (0, 1)
    )
    ratio = script / bare
    cells = ("bandwidth.py, beside a loop", f"{script * 1e3:.0f} ms", f"{bare * 1e3:.0f} ms")
    return Row((*cells, f"{ratio:.2f} times"), f"{GOAL_LOOP:.2f} times", ratio <= GOAL_LOOP)


def main() -> int:
    bench = Bench(ROOT)
    bench.build()
    rows = [*whole(), cost(bench), loop(bench)]
    return told(("what", "muster", "beside", "difference"), rows)


if __name__ == "__main__":
    sys.exit(main())
