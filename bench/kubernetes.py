"""render and lint beside kubectl kustomize and torchx, rehearse beside docker run.

    ./invokew bench

Whole processes are timed as a user starts them, with Python's byte code in place, the best of five;
CPU seconds stand beside, for a machine that has other work too. torchx comes into a .venv of its
own, which goes again; where it cannot be installed, that is said. The jobs play on the cpu image:
the containers started by hand run the same torchrun commands on a network of their own, and the
table of sizes is of rehearsals with one process a node.
"""

import contextlib
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

from bench.image import ROOT, Bench, Quiet, Row, call, invoke, seconds, told

from muster.engine import LABEL_OWNER
from muster.finding import Verdict
from muster.manifests import documents, lint, quantities, render, workloads
from muster.manifests import spec as specs
from muster.manifests.workloads import PodGroup
from muster.rehearse import rehearsal

ROUNDS = 5
WARM_ROUNDS = 30
LARGE = 10_000
NPROC_PER_NODE = 8
SIZES = (2, 4, 8, 16)
REHEARSAL_LIMIT_S = 600
TORCHX = "torchx[kubernetes]==0.7.0"
IMAGE = f"registry.example/muster@sha256:{'0' * 64}"
SCRIPT = "train/all_reduce.py"
# ranks that share two cores with fifteen others import torch at very different times
PATIENCE = ("--timeout", "300")
NO_BYTE_CODE = "PYTHONDONTWRITEBYTECODE"

GOAL_COMMAND_S = 0.6
# for the staggering and the patience of a large job
SETTINGS_BYTES = 200
GOAL_LIBRARY_S = 0.02
GOAL_REHEARSAL_S = 5.0


# ---- the clock ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timed:
    """The best of several runs: seconds on the wall, and of the CPU."""

    wall: float
    cpu: float

    @property
    def cells(self) -> tuple[str, str]:
        return f"{self.wall:.2f} s", f"{self.cpu:.2f} s"


def best(action: Callable[[], object]) -> Timed:
    """A program's own start is over when the clock starts: the first run is not counted."""
    action()
    walls, cpus = [], []
    for _ in range(ROUNDS):
        before = children_cpu()
        walls.append(seconds(action))
        cpus.append(children_cpu() - before)
    return Timed(min(walls), min(cpus))


def children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# ---- render ------------------------------------------------------------------------------------


def flags(nnodes: int) -> dict[str, object]:
    return {
        "name": "demo",
        "image": IMAGE,
        "fabric": "ib-shared",
        "nnodes": str(nnodes),
        "nproc_per_node": str(NPROC_PER_NODE),
    }


def rendering(folder: Path) -> list[Row]:
    """The whole command and the library's call, each beside the others' nearest."""
    commands = {nnodes: rendered(folder, nnodes) for nnodes in (8, LARGE)}
    rows = [
        Row(
            (f"render and lint, {nnodes} nodes", *timed.cells),
            f"{GOAL_COMMAND_S} s",
            timed.wall <= GOAL_COMMAND_S,
        )
        for nnodes, timed in commands.items()
    ]
    rows.append(sizes([manifest(folder, nnodes) for nnodes in commands]))
    once = library_call()
    cells = ("specs, render, parse, lint: warm call", f"{once * 1e3:.1f} ms", "")
    rows.append(Row(cells, f"{GOAL_LIBRARY_S * 1e3:.0f} ms", once <= GOAL_LIBRARY_S))
    rows.append(Row(("kubectl kustomize, a small folder", *kustomized(folder).cells)))
    beside = torchx(folder)
    rows.append(
        Row(("torchx 0.7 dry run, 4x8", *(beside.cells if beside else ("not measured", ""))))
    )
    return rows


def sizes(paths: Sequence[Path]) -> Row:
    """Nothing is written once a node; a large job has some settings of its own."""
    small, large = (len(re.sub(r"\d", "", path.read_text())) for path in paths)
    sizes = " and ".join(str(path.stat().st_size) for path in paths)
    cells = ("bytes of both", sizes, "")
    return Row(cells, f"+{SETTINGS_BYTES}, digits apart", large - small <= SETTINGS_BYTES)


def manifest(folder: Path, nnodes: int) -> Path:
    return folder / f"{nnodes}.yaml"


def rendered(folder: Path, nnodes: int) -> Timed:
    words = [
        *(f"--{name.replace('_', '-')}={value}" for name, value in flags(nnodes).items()),
        f"--output={manifest(folder, nnodes)}",
    ]
    environment = {name: text for name, text in os.environ.items() if name != NO_BYTE_CODE}
    environment["PYTHONPYCACHEPREFIX"] = str(folder / "byte-code")
    return best(
        lambda: subprocess.run(
            [ROOT / "invokew", "render", *words],
            cwd=ROOT,
            check=True,
            capture_output=True,
            env=environment,
        )
    )


def library_call() -> float:
    def once() -> None:
        spec = specs.build(specs.from_flags(flags(8)), ROOT / "k8s/fabrics")
        objects = documents.parse(render.render(spec, ROOT), "demo.yaml")
        lint.lint(objects, kubernetes=spec.kubernetes, fabric=spec.fabric)

    return min(seconds(once) for _ in range(WARM_ROUNDS))


def kustomized(folder: Path) -> Timed:
    small = folder / "kustomize"
    small.mkdir()
    (small / "job.yaml").write_text((ROOT / "k8s/base/job.yaml").read_text())
    (small / "kustomization.yaml").write_text("namePrefix: my-\nresources: [job.yaml]\n")
    return best(
        lambda: call([str(Path(sys.executable).with_name("kubectl")), "kustomize", str(small)])
    )


def torchx(folder: Path) -> Timed | None:
    """torchx's own command, in a .venv made for it; None where it cannot be installed."""
    python = folder / "torchx/bin/python"
    try:
        call([sys.executable, "-m", "venv", str(folder / "torchx")])
        call([str(python), "-m", "pip", "install", "--quiet", TORCHX])
    except subprocess.CalledProcessError:
        return None
    (folder / "train.py").touch()
    words = [
        *("run", "--workspace", "", "--dryrun", "--scheduler", "kubernetes"),
        *("--scheduler_args", "queue=default", "dist.ddp", "-j", "4x8", "--image", IMAGE),
        *("--script", "train.py"),
    ]
    return best(lambda: call([str(python.with_name("torchx")), *words], cwd=folder))


# ---- rehearse ----------------------------------------------------------------------------------


def played(nnodes: int) -> tuple[str, PodGroup, dict[str, str]]:
    """A job of one rank a node: the manifest, its pods, and their environment."""
    asked = {
        "name": "demo",
        "image": "muster:cpu",
        "cpu": True,
        "nnodes": str(nnodes),
        "nproc_per_node": "1",
        "script": SCRIPT,
        "arguments": PATIENCE,
    }
    text = render.render(specs.build(specs.from_flags(asked), ROOT / "k8s/fabrics"), ROOT)
    objects = documents.parse(text, "demo.yaml")
    (group,) = workloads.pod_groups(objects)
    maps = workloads.config_maps(objects)
    return text, group, workloads.environment(group.trainer, group.namespace, maps)


def rehearsing(bench: Bench, folder: Path) -> Row:
    """Two nodes from the command's start to its end, and the same two containers by hand."""
    text, group, environment = played(2)
    path = folder / "demo.yaml"
    path.write_text(text)
    ours = best(lambda: invoke(ROOT, "rehearse", str(path)))
    by_hand = best(lambda: start_by_hand(bench.docker, group, environment))
    more = ours.wall - by_hand.wall
    cells = ("rehearse, 2 nodes", f"{ours.wall:.1f} s", f"{by_hand.wall:.1f} s", f"{more:+.1f} s")
    return Row(cells, f"+{GOAL_REHEARSAL_S:.0f} s", more <= GOAL_REHEARSAL_S)


def start_by_hand(docker: Sequence[str], group: PodGroup, environment: dict[str, str]) -> None:
    """Network, containers, their ends, and all away again, as one would type it."""
    name = f"muster-bench-{uuid.uuid4().hex[:8]}"
    pods = [f"{name}-{index}" for index in range(group.replicas)]
    try:
        call([*docker, "network", "create", name])
        for index, pod in enumerate(pods):
            values = {**environment, "JOB_COMPLETION_INDEX": str(index)}
            call(
                [
                    *(*docker, "run", "--detach", "--name", pod, "--network", name),
                    *("--hostname", group.hostname(index)),
                    *("--network-alias", str(group.fqdn(index)), "--shm-size", "1g"),
                    *(f"--env={key}={value}" for key, value in values.items()),
                    *("--entrypoint", group.trainer["command"][0], group.trainer["image"]),
                    *(*group.trainer["command"][1:], *group.trainer["args"]),
                ]
            )
        done = subprocess.run([*docker, "wait", *pods], check=True, capture_output=True, text=True)
        assert done.stdout.split() == ["0"] * len(pods), done.stdout
    finally:
        subprocess.run([*docker, "rm", "--force", *pods], capture_output=True, check=False)
        subprocess.run([*docker, "network", "rm", name], capture_output=True, check=False)


# ---- how it grows ------------------------------------------------------------------------------


@dataclass
class Meetings(Quiet):
    """Progress that notes when the first pod started, and when the last one met the others."""

    started: float | None = None
    met: float = 0.0

    def say(self, text: str) -> None:
        now = time.monotonic()
        if text.endswith(": starts"):
            self.started = self.started or now
        elif re.search(r": node \d+ of \d+", text):
            self.met = now

    @property
    def seconds(self) -> float:
        return self.met - (self.started or self.met)


@dataclass
class Memory:
    """The most that this process's containers had together, in bytes, as `docker stats` has it."""

    docker: Sequence[str]
    most: Decimal = Decimal(0)
    _over: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        watcher = threading.Thread(target=self._watch)
        watcher.start()
        try:
            yield
        finally:
            self._over.set()
            watcher.join()

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            self.most = max(self.most, self._now())

    def _now(self) -> Decimal:
        mine = self._mine()
        if not mine:
            return Decimal(0)
        lines = self._lines("stats", "--no-stream", "--format", "{{.MemUsage}}", *mine)
        # "181.2MiB / 2GiB"; one that is gone meanwhile has "--"
        used = (quantities.parse(line.partition(" /")[0].removesuffix("B")) for line in lines)
        return sum(filter(None, used), Decimal(0))

    def _mine(self) -> list[str]:
        form = f'{{{{.ID}}}} {{{{.Label "{LABEL_OWNER}"}}}}'
        lines = self._lines("ps", "--filter", f"label={LABEL_OWNER}", "--format", form)
        return [line.split()[0] for line in lines if line.split()[-2] == str(os.getpid())]

    def _lines(self, *words: str) -> list[str]:
        done = subprocess.run([*self.docker, *words], capture_output=True, text=True, check=False)
        return done.stdout.splitlines()


def growing(bench: Bench, nnodes: int) -> Row:
    text, _, _ = played(nnodes)
    meetings, memory = Meetings(), Memory(bench.docker)
    wish = rehearsal.Wish(limit_s=REHEARSAL_LIMIT_S)
    with memory.watched():
        result = rehearsal.rehearse(
            bench.engine, documents.parse(text, "demo.yaml"), wish, meetings
        )
    met = result.verdict is Verdict.READY and all(
        pod.group_rank == pod.index for pod in result.pods
    )
    mib = float(memory.most) / 2**20
    cells = (
        *(str(nnodes), f"{meetings.seconds:.1f} s", f"{result.seconds:.1f} s"),
        *(f"{mib:.0f} MiB", f"{mib / nnodes:.0f} MiB"),
    )
    return Row(cells, "READY, in order", met)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        statuses = [told(("what", "best of 5", "CPU"), rendering(Path(folder)))]
        invoke(ROOT, "build", "--variant", "cpu")
        bench = Bench(ROOT)
        titles = ("what", "muster", "docker run", "difference")
        statuses.append(told(titles, [rehearsing(bench, Path(folder))]))
    columns = ("nodes", "last meeting", "whole job", "memory, all", "a node")
    statuses.append(told(columns, [growing(bench, nnodes) for nnodes in SIZES]))
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
