"""A Finding is one thing that is wrong: what, where, the evidence, the cause and the remedy."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum


class Severity(StrEnum):
    """An error makes the verdict NOT READY; a warning is said and does not."""

    ERROR = "error"
    WARNING = "warning"


class Outcome(StrEnum):
    """How a step of the suite or a proof of an image ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"
    NOT_RUN = "not run"  # what it stands on failed


class Verdict(StrEnum):
    READY = "READY"
    NOT_READY = "NOT READY"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong. `evidence` is the line or the measure that shows it."""

    severity: Severity
    what: str
    where: str
    evidence: str
    cause: str
    remedy: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, str]) -> "Finding":
        texts = {name: text for name, text in fields.items() if name != "severity"}
        return cls(severity=Severity(fields["severity"]), **texts)


def error(where: str, what: str, *, evidence: str, cause: str, remedy: str) -> Finding:
    """What will fail, hang, or stop training."""
    return Finding(
        severity=Severity.ERROR,
        what=what,
        where=where,
        evidence=evidence,
        cause=cause,
        remedy=remedy,
    )


def warning(where: str, what: str, *, evidence: str, cause: str, remedy: str) -> Finding:
    """What is risky, slows training down, or comes as a surprise later."""
    return Finding(
        severity=Severity.WARNING,
        what=what,
        where=where,
        evidence=evidence,
        cause=cause,
        remedy=remedy,
    )


def verdict(findings: Iterable[Finding]) -> Verdict:
    """READY unless one of the Findings is an error."""
    wrong = any(finding.severity is Severity.ERROR for finding in findings)
    return Verdict.NOT_READY if wrong else Verdict.READY
