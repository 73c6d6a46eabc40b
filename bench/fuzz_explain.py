"""python -m bench.fuzz_explain [SECONDS]: explain on what no program writes, one minute by default.

First each pattern on text that is made to slow it, then atheris, which changes the corpus of the
tests so that it reaches more and more of the code. What it fails on is left in the current folder.
Google's package atheris has to be installed for it.
"""

import importlib
import multiprocessing
import pkgutil
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "tests" / "unit" / "explain_corpus.toml"
FAILED = Path("explain-failed.log")
SECONDS = 60
# four is in proportion, sixteen is what must not be
MOST_GROWTH = 8.0
PIECES = (
    *("a", "1", ".", ":", " ", "[", "]", "(", "-", "_", "=", "/", "#", "x", "0x1", '"', "'", "\t"),
    *(
        "a.",
        "a:1",
        "1 ",
        "[1",
        "[W ",
        "W0801 ",
        "NCCL ",
        "NCCL_",
        "NCCL INFO ",
        "a:1:1 [0] NCCL INFO ",
    ),
    *("comm 0x1 rank 1 nranks 1 ", "1 coll channels, ", "Channel 1/1 : ", " -> 1", "[PG ID 0 "),
    *(
        "last enqueued work: 1",
        "(a pid=1, ",
        " pid=1,",
        "[pod/",
        "[1,",
        "\x1b[",
        "\x1b]",
        "\x1b[0 ",
    ),
    *(
        "token=",
        "://",
        "://a:",
        "eyJ",
        "--password ",
        "authorization: ",
        "-----BEGIN ",
        "error",
        "\r",
    ),
)
LENGTH = 2**14
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


# ---- patterns ----------------------------------------------------------------------------------


def patterns() -> Iterator[tuple[str, re.Pattern[Any]]]:
    package = importlib.import_module("muster.explain")
    for module in pkgutil.iter_modules(package.__path__, "muster.explain."):
        for name, value in vars(importlib.import_module(module.name)).items():
            for pattern in kept(value):
                yield f"{module.name}.{name}", pattern


def kept(value: object) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from kept(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from kept(getattr(value, part.name))


def growth(pattern: re.Pattern[Any], piece: str) -> float:
    """How many times as long four times the text takes; 1 where that is too short to tell."""
    one, four = (took(pattern, piece * (length // len(piece))) for length in (LENGTH, 4 * LENGTH))
    return four / one if four > 0.005 else 1.0


def took(pattern: re.Pattern[Any], text: str) -> float:
    subject = text.encode() if isinstance(pattern.pattern, bytes) else text
    best = float("inf")
    for _ in range(3):
        begin = time.process_time()
        for _ in pattern.finditer(subject):
            pass
        best = min(best, time.process_time() - begin)
    return best


def slowest() -> tuple[float, str, str]:
    return max(
        (growth(pattern, piece), name, piece) for name, pattern in patterns() for piece in PIECES
    )


# ---- coverage ----------------------------------------------------------------------------------


class Target:
    """One file, written anew for each input and explained with and without the sieve."""

    def __init__(self, folder: Path) -> None:
        self.explanation = importlib.import_module("muster.explain.explanation")
        self.lines = importlib.import_module("muster.explain.lines")
        self.sieve = importlib.import_module("muster.explain.sieve")
        self.file = folder / "job.log"

    def __call__(self, data: bytes) -> None:
        self.file.write_bytes(data)
        for sift in (self.lines.every, self.sieve.Sieve().sift):
            study = self.explanation.Study()
            study.take(self.lines.read([self.file], sift=sift, notes=study.notes))
            self.check(study.explanation())

    def check(self, found: Any) -> None:  # noqa: ANN401  of modules that atheris has changed
        for finding in found.findings:
            for part in fields(finding):
                assert not OBEYED.search(str(getattr(finding, part.name))), finding
        found.to_dict()


def seeds(folder: Path) -> None:
    for number, case in enumerate(tomllib.loads(CORPUS.read_text(encoding="utf-8"))["case"]):
        text = re.sub(r"(?m)^(WARN|INFO)@(\d+) (\[\S+\] )?", _head, case["log"])
        (folder / str(number)).write_text(text, encoding="utf-8")


def _head(match: re.Match[str]) -> str:
    at = "" if match[3] is None else f"{match[3][1:-2]} "
    return f"node-0:1{match[2]}:2 [{match[2]}] {at}NCCL {match[1]} "


def main() -> None:
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    try:
        atheris: Any = importlib.import_module("atheris")
    except ImportError:
        sys.exit("atheris is not installed; see the head of bench/fuzz_explain.py")
    with tempfile.TemporaryDirectory(prefix="muster-fuzz-") as name:
        folder = Path(name)
        (folder / "seeds").mkdir()
        seeds(folder / "seeds")
        with atheris.instrument_imports(include=["muster.explain"]):
            target = Target(folder)
        times, pattern, piece = slowest()
        held = "held" if times < MOST_GROWTH else "TOO SLOW"
        say(f"four times the text: {times:.1f} times as long, {pattern} on {piece!r}: {held}")
        # libFuzzer ends the process it is in
        process = multiprocessing.get_context("fork").Process(
            target=fuzz, args=(atheris, target, folder / "seeds", seconds)
        )
        process.start()
        process.join()
        if process.exitcode:
            shutil.copy(target.file, FAILED)
    say(f"explain FAILED on {FAILED}" if process.exitcode else "explain held")
    sys.exit(process.exitcode or held != "held")


def fuzz(atheris: Any, target: Target, seeds: Path, seconds: int) -> None:  # noqa: ANN401
    limits = [f"-max_total_time={seconds}", "-timeout=10", "-max_len=2000", "-rss_limit_mb=1000"]
    atheris.Setup([sys.argv[0], *limits, "-verbosity=0", str(seeds)], target)
    atheris.Fuzz()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
