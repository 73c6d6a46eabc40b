"""What a check is: a function of the facts that says what it saw and what is wrong with that."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from muster.doctor.facts import Facts
from muster.finding import Finding, Outcome, Verdict, verdict


@dataclass(frozen=True)
class Seen:
    """A measure in one line, or why the check does not apply here; and the Findings."""

    measure: str
    findings: tuple[Finding, ...] = ()
    applies: bool = True

    @property
    def outcome(self) -> Outcome:
        if not self.applies:
            return Outcome.NOT_APPLICABLE
        return Outcome.PASSED if verdict(self.findings) is Verdict.READY else Outcome.FAILED


Check = Callable[[Facts], Seen]


def seen(measure: str, findings: Iterable[Finding] = ()) -> Seen:
    return Seen(measure, tuple(findings))


def not_here(reason: str) -> Seen:
    """The check does not apply, or what it needs is not known."""
    return Seen(reason, applies=False)


def listed(words: Iterable[str], most: int = 6) -> str:
    """`words` with commas; of a long list the first ones and how many there are more."""
    every = list(words)
    more = [f"{len(every) - most} more"] if len(every) > most else []
    return ", ".join([*every[:most], *more])


def counted(count: int, noun: str, plural: str | None = None) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {plural or f'{noun}s'}"


def may_join_others(facts: Facts) -> bool:
    """Whether a job here is likely to have other nodes: it says so, or there are GPUs."""
    return gpu_count(facts) > 0 or facts.job.nnodes > 1


def gpu_count(facts: Facts) -> int:
    """The GPUs that are here for a job; by their device files where NVML cannot be asked."""
    return len(facts.gpus.devices) or facts.gpus.device_files
