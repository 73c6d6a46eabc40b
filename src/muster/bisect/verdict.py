"""From runs to the layer at fault: what they prove, and what takes from their weight."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from muster.bisect import pairs
from muster.bisect.layers import Layer
from muster.bisect.pairs import Pair, Place
from muster.bisect.trial import Heard, Trial

REMINDER = (
    "Switches are for finding a fault, not for running: each costs speed or turns a transport off."
    " Mend the layer, and start the job without them."
)


class Outcome(StrEnum):
    PASSES = "passes as it is"
    FOUND = "the layer is found"
    PLACED = "the GPUs are found, and no layer"
    NOT_FOUND = "no single change helps"
    FLAKY = "fails and passes as it is"


@dataclass(frozen=True, kw_only=True)
class Blame:
    """`helped` are the changes of the layer under which the command passed."""

    layer: Layer
    helped: tuple[Trial, ...]


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """`beside` are changes that helped too, as they go around a blamed layer. `says` are sentences
    on what else the runs tell, and on what takes from their weight.
    """

    outcome: Outcome
    blames: tuple[Blame, ...]
    beside: tuple[str, ...]
    says: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome,
            "layers": [
                {**asdict(each.layer), "helped": [trial.change.name for trial in each.helped]}
                for each in self.blames
            ],
            "beside": list(self.beside),
            "says": list(self.says),
        }


@dataclass(frozen=True, kw_only=True)
class Runs:
    """`again` is the command as it is once more, after all others; None where nothing helped."""

    first: Trial
    changed: tuple[Trial, ...] = ()
    paired: Mapping[Pair, Trial] = field(default_factory=dict)
    again: Trial | None = None

    @property
    def helped(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.changed if trial.passed)

    @property
    def place(self) -> Place:
        return pairs.place({pair: trial.passed for pair, trial in self.paired.items()})

    def __iter__(self) -> Iterator[Trial]:
        yield self.first
        yield from self.changed
        yield from self.paired.values()
        if self.again is not None:
            yield self.again


def conclude(runs: Runs) -> Conclusion:
    """What `runs` come to."""
    blames: tuple[Blame, ...] = ()
    if runs.first.passed:
        outcome = Outcome.PASSES
    elif runs.again is not None and runs.again.passed:
        outcome = Outcome.FLAKY
    else:
        blames = _blames(runs.helped)
        placed = Outcome.PLACED if runs.place != Place() else Outcome.NOT_FOUND
        outcome = Outcome.FOUND if blames else placed
    blamed = {trial.change.name for blame in blames for trial in blame.helped}
    beside = [t.change.name for t in runs.helped if blames and t.change.name not in blamed]
    return Conclusion(
        outcome=outcome,
        blames=blames,
        beside=tuple(beside),
        says=tuple(_says(runs, outcome, blames)),
    )


def _blames(helped: Sequence[Trial]) -> tuple[Blame, ...]:
    """The layers of `helped` but for those that only go around another of them."""
    layers = {trial.change.layer.name: trial.change.layer for trial in helped if trial.change.layer}
    around = {name for layer in layers.values() for name in layer.around}
    return tuple(
        Blame(layer=layer, helped=tuple(t for t in helped if t.change.layer == layer))
        for name, layer in layers.items()
        if name not in around
    )


def _says(runs: Runs, outcome: Outcome, blames: Sequence[Blame]) -> Iterator[str]:
    if outcome is Outcome.PASSES:
        yield "one run that passed says nothing of speed: pass and fail are all that is compared"
    elif outcome is Outcome.FLAKY:
        yield (
            "the same command failed at first and passed at the end with nothing changed: what"
            " passed in between passed perhaps by luck, and no layer can be blamed. Give COMMAND"
            " more work, so that it fails each time, or run this again"
        )
    elif outcome is Outcome.NOT_FOUND:
        yield (
            "more than one layer may be broken, or the fault lies in none that a switch turns off:"
            " rendezvous, names, firewall, versions, memory, the program itself"
        )
    if len(blames) > 1:
        yield (
            f"{len(blames)} layers help, each by itself, and none contains the other: the fault"
            " shows only where they meet, or one of the runs passed by luck. Repeat each of them"
            " before you act"
        )
    if outcome is not Outcome.FLAKY:
        yield from _places(runs)
    yield from _weights(runs)


def _places(runs: Runs) -> Iterator[str]:
    passed = [trial.passed for trial in runs.paired.values()]
    tried = ", ".join("+".join(pair) for pair in runs.paired)
    if passed and not any(passed):
        yield f"GPUs in twos ({tried}): no pair passes, so they do not tell where it is"
    elif passed and all(passed):
        yield (
            f"GPUs in twos ({tried}): each pair passes, so it takes more than two GPUs, or two that"
            " were not a pair here"
        )
    for gpu in runs.place.gpus:
        yield f"GPU {gpu} fails with each partner, while pairs without it pass: look at it first"
    for one, other in runs.place.links:
        yield f"GPUs {one} and {other} fail together and work with others: look at what joins them"


def _weights(runs: Runs) -> Iterator[str]:
    """What a reader has to know before believing the runs."""
    if runs.first.ended.cut:
        yield (
            f"as it is, it was not done after {runs.first.limit_s:g} s: if it does no more than"
            " take longer, give it a larger --timeout"
        )
    if not runs.first.passed and runs.first.heard is Heard.SILENT:
        yield (
            "NCCL wrote no log: COMMAND ends before NCCL, does without it (gloo), or does not hand"
            " its environment on (docker run needs -e NAME, mpirun -x NAME, ssh takes none)"
        )
    for trial in runs.helped:
        if trial.heard is not Heard.YES and runs.first.heard is not Heard.SILENT:
            yield f"{trial.change.name} passed, but {trial.heard}: it may have passed by luck"
    if left := sum(trial.ended.left for trial in runs):
        yield (
            f"COMMAND left {left} processes running when it had ended; they were ended, and that"
            " it passed says nothing of them"
        )
    if stuck := sorted({pid for trial in runs for pid in trial.ended.stuck}):
        yield (
            f"processes {', '.join(map(str, stuck))} obey no signal, as when a driver holds them:"
            " what ran after them may have failed for it; reset the GPU or restart the node"
        )
