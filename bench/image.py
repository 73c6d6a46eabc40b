"""Muster beside plain docker, in one run: the cpu image's build, its rebuilds and its suite.

    ./invokew bench

Ratios, since the machine's own speed is in both numbers. The wheels are in the wheelhouse before
the clock starts. "cold" changes the first step of the Dockerfile, so that no layer is reused.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from muster import buildkit, context, engine, image, pins, size
from muster.engine import Engine
from muster.pins import Variant
from muster.suite import chosen

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 3


@dataclass(frozen=True)
class Row:
    """What was measured, a cell of the table each; `held` is None where nothing is to be held."""

    cells: tuple[str, ...]
    goal: str = ""
    held: bool | None = None


class Quiet:
    def say(self, text: str) -> None:
        """The clock runs: nothing is shown."""

    def detail(self, text: str) -> None:
        """The clock runs: nothing is shown."""


def seconds(action: Callable[[], object]) -> float:
    started = time.monotonic()
    action()
    return time.monotonic() - started


def call(argv: Sequence[str], cwd: Path = ROOT, **environment: str) -> None:
    subprocess.run(
        argv, cwd=cwd, check=True, capture_output=True, env={**os.environ, **environment}
    )


def invoke(checkout: Path, *words: str) -> None:
    call([sys.executable, "-m", "invoke", *words], cwd=checkout)


@contextlib.contextmanager
def copied() -> Iterator[Path]:
    """A copy of this checkout to change."""
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        copy = Path(folder) / "checkout"
        left_out = shutil.ignore_patterns(".venv*", ".git", ".*_cache", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=left_out)
        yield copy


class Bench:
    """A copy of the checkout to change, and a plain `docker build` of the same context."""

    def __init__(self, checkout: Path, row: str = "cpu") -> None:
        self.checkout = context.Checkout(checkout)
        self.engine = engine.ensure(lambda _question: True, Quiet())
        self.pins = pins.read(self.checkout.docker)
        variant = self.pins.variant(row)
        self.request = image.Request(variant, pins.read_lock(self.pins, variant))
        self.client = buildkit.find_client(
            self.engine.address.client_flags, self.engine.address.builder
        )
        self.plain_context = checkout.parent / "plain"

    @property
    def variant(self) -> Variant:
        return self.request.variant

    @property
    def docker(self) -> list[str]:
        return [str(self.client.path), *self.client.engine_flags]

    def build(self) -> image.Result:
        return image.build(
            self.engine, self.checkout, self.pins, self.request, lambda _question: True, Quiet()
        )

    def freshen(self) -> None:
        """Make the next build of the checkout a cold one."""
        dockerfile = self.checkout.docker / "Dockerfile"
        text = dockerfile.read_text()
        mark = f"RUN : cold {uuid.uuid4().hex}\n"
        head, _, tail = text.partition("FROM ${BASE} AS os\n")
        tail = tail.split("\n", 1)[1] if tail.startswith("RUN : cold") else tail
        dockerfile.write_text(f"{head}FROM ${{BASE}} AS os\n{mark}{tail}")

    def change_script(self) -> None:
        """One more line in a script of train/."""
        with (self.checkout.root / "train/all_reduce.py").open("a") as script:
            script.write(f"# change {uuid.uuid4().hex}\n")

    def plain_build(self) -> None:
        """Plain `docker build` of what Muster stages, kept in a folder of its own."""
        call(
            [
                *(*self.client.build_argv, "--quiet", "--tag", "muster-bench:plain"),
                *("--build-arg", f"BASE={self.base_ref()}"),
                *("--build-arg", "ACCELERATOR=cpu", "--build-arg", "NCCL_TESTS=none"),
                str(self.plain_context),
            ],
            DOCKER_BUILDKIT="1",
        )

    def base_ref(self) -> str:
        labels = found(self.engine, self.request.ref).labels
        mmdebstrap = labels[image.LABEL_BASE] == image.Origin.MMDEBSTRAP
        return f"muster-base:{self.variant.base.suite}" if mmdebstrap else self.variant.base.ref

    def keep_context(self) -> None:
        wheels = image.fetch_wheels(self.request, self.request.wheels, Quiet()).values()
        contents = context.Contents(tuple(wheels), (), None, "")
        with context.staged(self.checkout, self.variant, contents, {"wheels": []}) as folder:
            shutil.rmtree(self.plain_context, ignore_errors=True)
            shutil.copytree(folder, self.plain_context)


def found(on: Engine, ref: str) -> engine.Image:
    there = on.image(ref)
    assert there is not None
    return there


def cold(bench: Bench) -> Row:
    ours, plain = [], []
    for _ in range(ROUNDS - 1):
        bench.freshen()
        ours.append(seconds(lambda: invoke(bench.checkout.root, "build")))
        bench.freshen()
        bench.keep_context()
        plain.append(seconds(bench.plain_build))
    ratio = min(ours) / min(plain)
    cells = ("cold build", f"{min(ours):.1f} s", f"{min(plain):.1f} s", f"{ratio:.2f} times")
    return Row(cells, "1.2 times", ratio <= 1.2)


def unchanged(bench: Bench) -> Row:
    ours = min(seconds(lambda: invoke(bench.checkout.root, "build")) for _ in range(ROUNDS))
    plain = min(seconds(bench.plain_build) for _ in range(ROUNDS))
    difference = f"{ours - plain:+.2f} s"
    cells = ("build, nothing changed", f"{ours:.2f} s", f"{plain:.2f} s", difference)
    return Row(cells, "+1 s", ours - plain <= 1)


def changed_script(bench: Bench) -> Row:
    times = []
    for _ in range(ROUNDS):
        bench.change_script()
        times.append(seconds(lambda: invoke(bench.checkout.root, "build")))
    cells = ("build, train/ changed", f"{min(times):.2f} s", "", "")
    return Row(cells, "3 s", min(times) <= 3)


def suite(bench: Bench) -> Row:
    """Its quick part; all of it is bench/smoke.py's."""
    by_hand = [
        *(*bench.docker, "run", "--rm", "--init"),
        *("--shm-size", "1g", "--cap-add", "IPC_LOCK", "--user", "0:0", bench.variant.image_ref),
        *("python", "-m", "pytest", "/opt/muster/smoke", "--train", "/opt/muster/train"),
        *("--nproc-per-node", "2", "--steps", ",".join(chosen(quick=True))),
    ]
    ours, plain = [], []
    for _ in range(ROUNDS):
        ours.append(seconds(lambda: invoke(bench.checkout.root, "smoke", "--quick")))
        plain.append(seconds(lambda: call(by_hand)))
    ratio = min(ours) / min(plain)
    cells = ("smoke --quick", f"{min(ours):.1f} s", f"{min(plain):.1f} s", f"{ratio:.2f} times")
    return Row(cells, "1.15 times, 60 s", ratio <= 1.15 and min(ours) <= 60)


def weight(bench: Bench) -> Row:
    there = found(bench.engine, bench.variant.image_ref)
    return Row(("image", size.decimal(there.size), "", ""), "1.2 GB", there.size <= 1.2e9)


def told(titles: Sequence[str], rows: Sequence[Row]) -> int:
    """Print the table; the exit status is 1 when a goal is not held."""
    table = Table(*titles, "goal", "held", box=None)
    for row in rows:
        table.add_row(*row.cells, row.goal, {True: "yes", False: "NO", None: ""}[row.held])
    Console().print(table)
    return 1 if any(row.held is False for row in rows) else 0


def main() -> int:
    with copied() as copy:
        bench = Bench(copy)
        bench.build()
        rows = [measure(bench) for measure in (cold, unchanged, changed_script, suite, weight)]
        call([*bench.docker, "rmi", "muster-bench:plain"])
    invoke(ROOT, "build")
    return told(("what", "muster", "plain docker", "difference"), rows)


if __name__ == "__main__":
    sys.exit(main())
