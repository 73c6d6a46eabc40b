"""A command as it is, then under one change at a time; the caller's environment stays as it is."""

import contextlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.bisect import changes, pairs, runs, verdict
from muster.bisect.changes import AS_IT_IS, Change, Machine, Skipped
from muster.bisect.pairs import Pair, Place
from muster.bisect.trial import Trial
from muster.bisect.verdict import Conclusion, Outcome, Runs
from muster.errors import CannotWrite, NoCommand
from muster.explain import explanation
from muster.progress import Progress

# NCCL needs up to 60 s until it gives up a socket and 30 s for a message over InfiniBand, and a
# start of torch with CUDA up to 30 s: what is cut earlier leaves no error in its log.
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-retry-sleep-msec
LIMIT_S = 120
# faults that show that the command wants more GPUs than it was left
_WANTS_MORE = frozenset({"invalid-device", "same-gpu"})


@dataclass(frozen=True, kw_only=True)
class Result:
    """`logs` has a folder for every run; None where they were not kept."""

    command: tuple[str, ...]
    runs: Runs
    skipped: tuple[Skipped, ...]
    conclusion: Conclusion
    logs: Path | None
    seconds: float

    @property
    def passes(self) -> bool:
        return self.conclusion.outcome is Outcome.PASSES

    @property
    def reminders(self) -> tuple[str, ...]:
        """That switches do not stay on; of no use where it is configuration that was changed."""
        switched = any(not blame.layer.may_stay for blame in self.conclusion.blames)
        return (verdict.REMINDER,) if switched else ()

    @property
    def lines(self) -> tuple[str, ...]:
        """What to type to repeat the runs that the conclusion rests on."""
        shown = [trial for blame in self.conclusion.blames for trial in blame.helped]
        if self.runs.place != Place():
            shown += [trial for trial in self.runs.paired.values() if not trial.passed]
        return tuple(trial.change.line(self.command) for trial in (self.runs.first, *shown))

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "command": "bisect",
            "argv": list(self.command),
            "conclusion": self.conclusion.to_dict(),
            "repeat": list(self.lines),
            "runs": [trial.to_dict() for trial in self.runs],
            "skipped": [{"change": each.name, "why": each.why} for each in self.skipped],
            "logs": None if self.logs is None else str(self.logs),
            "seconds": round(self.seconds, 1),
        }


def bisect(
    command: Sequence[str],
    environ: Mapping[str, str],
    progress: Progress,
    *,
    limit_s: float = LIMIT_S,
    logs: Path | None = None,
    look: Callable[[Mapping[str, str]], Machine] = changes.look,
) -> Result:
    """Find the layer without which `command` passes, each run `limit_s` seconds at most.

    The logs go to a new folder in `logs`, or to a temporary one that stays where the command fails.
    Raises NoCommand, CommandNotStarted and CannotWrite.
    """
    if not command:
        raise NoCommand
    started = time.monotonic()
    with _folder(logs) as folder:
        runner = _Runner(tuple(command), environ, limit_s, folder, progress)
        first = runner.run(AS_IT_IS)
        if first.passed:
            done, skipped = Runs(first=first), list[Skipped]()
        else:
            done, skipped = _changed(runner, first, look(environ))
        conclusion = verdict.conclude(done)
        kept = conclusion.outcome is not Outcome.PASSES or logs is not None
        if not kept:
            shutil.rmtree(folder)
    return Result(
        command=tuple(command),
        runs=done,
        skipped=tuple(skipped),
        conclusion=conclusion,
        logs=folder if kept else None,
        seconds=time.monotonic() - started,
    )


@dataclass
class _Runner:
    """Runs `command` under one change after the other, and says how each went."""

    command: tuple[str, ...]
    environ: Mapping[str, str]
    limit_s: float
    folder: Path
    progress: Progress
    count: int = 0

    def run(self, change: Change) -> Trial:
        self.count += 1
        folder = self.folder / f"{self.count:02}-{_file_name(change.name)}"
        folder.mkdir()
        self.progress.detail(f"{change.name}: {self.limit_s:g} s at most")
        environment = change.environment(self.environ, folder)
        done = runs.run(self.command, environment, folder, self.limit_s)
        trial = Trial(
            change=change,
            ended=done.ended,
            limit_s=self.limit_s,
            folder=folder,
            explained=explanation.study(done.log).explanation(),
        )
        says = [f"{change.name}: {trial.outcome}, {done.ended.seconds:.1f} s"]
        says += [f"using {', '.join(trial.networks)}"] if trial.networks else []
        says += [trial.fault.title] if trial.fault else []
        self.progress.say("; ".join(says))
        return trial


def _changed(runner: _Runner, first: Trial, machine: Machine) -> tuple[Runs, list[Skipped]]:
    """Every change that this machine and the environment leave to make."""
    made, skipped = changes.changes(runner.environ, machine)
    about = len(made) + len(pairs.neighbours(machine.gpus)) + 1
    runner.progress.say(
        f"as it is it fails: about {about} more runs of {runner.limit_s:g} s at most; the logs are"
        f" in {runner.folder}"
    )
    changed = tuple(map(runner.run, made))
    paired, unpaired = _paired(runner, machine.gpus)
    # what fails now and then makes any change look good
    helped = any(trial.passed for trial in (*changed, *paired.values()))
    again = runner.run(AS_IT_IS) if helped else None
    left_out = [*skipped, *unpaired]
    for each in left_out:
        runner.progress.say(f"{each.name}: skipped, {each.why}")
    return Runs(first=first, changed=changed, paired=paired, again=again), left_out


def _paired(
    runner: _Runner, gpus: Sequence[str]
) -> tuple[Mapping[Pair, Trial], tuple[Skipped, ...]]:
    if len(gpus) < pairs.FEWEST:
        why = f"of {len(gpus)} GPUs no pair is fewer than all" if gpus else "no GPU is seen here"
        return {}, (Skipped(changes.VISIBLE, why),)
    tried: dict[Pair, Trial] = {}
    for pair in _twos(gpus, tried):
        tried[pair] = runner.run(changes.only(pair))
        fault = tried[pair].fault
        if fault is not None and fault.fault.id in _WANTS_MORE:
            why = "COMMAND wants more than two GPUs; torchrun --nproc-per-node=gpu adapts"
            return {}, (Skipped(changes.VISIBLE, why),)
    return tried, ()


def _twos(gpus: Sequence[str], tried: Mapping[Pair, Trial]) -> Iterator[Pair]:
    """The pairs to try; the later ones by how those before them went."""
    yield from pairs.neighbours(gpus)
    yield from pairs.crossings({pair: trial.passed for pair, trial in tried.items()})


@contextlib.contextmanager
def _folder(parent: Path | None) -> Iterator[Path]:
    """A new folder: one in `parent` stays, a temporary one goes when an error or a signal comes."""
    try:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="muster-bisect-", dir=parent)).resolve()
    except OSError as error:
        raise CannotWrite(Path(parent or tempfile.gettempdir()), str(error.strerror)) from None
    try:
        yield folder
    except BaseException:
        if parent is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _file_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=-]+", "-", text)[:60]
