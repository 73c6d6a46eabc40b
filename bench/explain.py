"""explain beside grep -c and wc -l of the same log, and doctor; whole processes, in one run.

    ./invokew bench

The log is of 4,096 ranks (bench/logs.py). Memory is what the processes of one command hold at the
same time, what they share counted once (PSS).
"""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from bench import logs
from bench.image import ROOT, Row, seconds, told

RANKS = 4096
MEGABYTES = 1000
FILES = 64
ROUNDS = 3
SMALL = (2, 16)

GOAL_ONE_CORE = 100.0
GOAL_TWO_CORES = 180.0
GOAL_MEMORY_MB = 200.0
# over half of the log: what grows with it would show as more
FLAT = 1.1
GOAL_SMALL_S = 0.5
GOAL_DOCTOR_S = 3.0


@dataclass(frozen=True)
class Measured:
    seconds: float
    memory_mb: float


def explain(*words: str) -> list[str]:
    return [sys.executable, "-m", "muster", "explain", *words]


def measured(argv: Sequence[str], cores: str = "") -> Measured:
    """The best of some runs; with `cores`, on these alone."""
    pinned = ["taskset", "--cpu-list", cores, *argv] if cores else argv
    memory = Memory()
    return Measured(min(seconds(lambda: memory.run(pinned)) for _ in range(ROUNDS)), memory.most)


class Memory:
    """The most that a command and its children held, in MB."""

    def __init__(self) -> None:
        self.most = 0.0

    def run(self, argv: Sequence[str]) -> None:
        # findings end with 1
        with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL) as started:
            over = threading.Event()
            watcher = threading.Thread(target=self._watch, args=(started.pid, over))
            watcher.start()
            status = started.wait()
            over.set()
            watcher.join()
        if status not in (0, 1):
            raise subprocess.CalledProcessError(status, argv)

    def _watch(self, pid: int, over: threading.Event) -> None:
        while not over.wait(0.1):
            self.most = max(self.most, _held(pid))


def _held(pid: int) -> float:
    total = 0
    try:
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            total += process.memory_full_info().pss
    except psutil.Error:
        return 0.0
    return total / 1e6


def reading(large: Path, half: Path, many: Path) -> list[Row]:
    size = large.stat().st_size / 1e6
    grep = size / best(lambda: quietly(["grep", "-c", "WARN", str(large)]))
    wc = size / best(lambda: quietly(["wc", "-l", str(large)]))

    def row(name: str, found: Measured, goal: float) -> Row:
        rate = size / found.seconds
        held = rate >= goal and found.memory_mb <= GOAL_MEMORY_MB
        cells = (name, f"{rate:.0f} MB/s", f"{rate / grep:.3f}", f"{found.memory_mb:.0f} MB")
        return Row(cells, f"{goal:.0f} MB/s, {GOAL_MEMORY_MB:.0f} MB", held)

    two = measured(explain(str(large)))
    small = measured(explain(str(half)))
    flat = two.memory_mb <= small.memory_mb * FLAT
    return [
        Row(("grep -c", f"{grep:.0f} MB/s", "1", "")),
        Row(("wc -l", f"{wc:.0f} MB/s", f"{wc / grep:.2f}", "")),
        row("explain, one core", measured(explain(str(large)), "0"), GOAL_ONE_CORE),
        row("explain, two cores", two, GOAL_TWO_CORES),
        row(f"the same in {FILES} files", measured(explain(str(many))), GOAL_TWO_CORES),
        Row(("half of it", "", "", f"{small.memory_mb:.0f} MB"), "flat", flat),
    ]


def whole(small: Path) -> list[Row]:
    rows = []
    for name, argv, goal in (
        ("explain, a log of 2 MB", explain(str(small)), GOAL_SMALL_S),
        ("doctor", [sys.executable, "-m", "muster", "doctor"], GOAL_DOCTOR_S),
    ):
        found = measured(argv)
        rows.append(Row((name, f"{found.seconds:.2f} s"), f"{goal} s", found.seconds <= goal))
    return rows


def best(action: Callable[[], object]) -> float:
    return min(seconds(action) for _ in range(ROUNDS))


def quietly(argv: Sequence[str]) -> None:
    # "grep" of bytes, as the sieve reads them: no locale
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"})


def split(large: Path, folder: Path) -> Path:
    folder.mkdir()
    chunks = ["split", f"--number=l/{FILES}", "--additional-suffix=.log", str(large)]
    subprocess.run([*chunks, str(folder / "part-")], check=True)
    return folder


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as name:
        folder = Path(name)
        large, half, small = (folder / each for each in ("large", "half", "small"))
        logs.write(large, MEGABYTES * 10**6, RANKS)
        logs.write(half, MEGABYTES * 10**6 // 2, RANKS)
        logs.write(small, SMALL[0] * 10**6, SMALL[1])
        many = split(large, folder / "many")
        statuses = [
            told(
                ("a log of 4,096 ranks", "rate", "of grep's", "memory"),
                reading(large, half, many),
            ),
            told(("whole process", "best of 3"), whole(small)),
        ]
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
