"""The steps of the smoke suite, read from the report log of pytest while it runs."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from muster import suite
from muster.bandwidth.series import Series
from muster.finding import Finding, Outcome, Severity
from muster.progress import Progress
from muster.shape import shaped

# the reason of a step that was not run begins with it: pytest knows no other than skipped
NOT_RUN = "not run: "
# pytest captures the descriptors 1 and 2 of the steps: the report log goes out by another
_REPORT_FD = 3
REPORT = f"/dev/fd/{_REPORT_FD}"


def reporting(suite: Sequence[str]) -> list[str]:
    """`suite` with its report log on standard output, by a descriptor that no capture touches."""
    return ["sh", "-c", f'exec "$@" {_REPORT_FD}>&1', "sh", *suite]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the suite. `measure` is what it measured, or why it does not apply or did not run.

    `command` repeats it on one line, and nothing else if the plan has it.
    """

    name: str
    outcome: Outcome
    seconds: float
    limit_s: float | None
    measure: str
    findings: tuple[Finding, ...]
    output: str
    command: str


@dataclass
class Log:
    """The report log of the plugin pytest-reportlog, line by line.

    `repeat` is the command that runs the suite again in the same way. `facts` are the doctor's
    measures by the names of its checks, `nccl` what each step's NCCL wrote, a text a process.
    """

    progress: Progress
    repeat: str = "./invokew smoke"
    steps: list[Step] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    series: list[Series] = field(default_factory=list)
    nccl: dict[str, list[str]] = field(default_factory=dict)
    running: str | None = None
    # https://docs.pytest.org/en/stable/reference/exit-codes.html
    exit_status: int | None = None
    complaints: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether every step ran to its end, passed or failed."""
        return self.exit_status in (0, 1)

    @property
    def is_idle(self) -> bool:
        """Whether there was no step for it to run."""
        return self.exit_status == 5

    def read_line(self, line: str) -> None:
        """One line of the suite's output; what is not the report log's is passed over."""
        with contextlib.suppress(ValueError):
            self._read(json.loads(line))

    def _read(self, entry: object) -> None:
        if not isinstance(entry, dict):
            return
        kind = entry.get("$report_type")
        if kind == "SessionFinish":
            self.exit_status = entry["exitstatus"]
        if kind == "CollectReport" and entry["outcome"] == "failed":
            self.complaints += str(entry["longrepr"]).splitlines()
        if kind == "TestReport":
            self._read_step(entry)

    def _read_step(self, entry: dict[str, Any]) -> None:
        name = entry["nodeid"].rpartition("::test_")[2]
        if entry["when"] == "setup" and entry["outcome"] == "passed":
            self.running = name
            self.progress.detail(f"step {name}")
        elif entry["when"] == "call" or entry["outcome"] != "passed":
            self.running = None
            # a site's own steps, which the plan has not, run with all others
            alone = f"{self.repeat} --only {name}" if name in suite.BY_NAME else self.repeat
            self.steps.append(_step(name, entry, alone))
            self._read_measures(name, entry["user_properties"])
            self.progress.say(line(self.steps[-1]))

    def _read_measures(self, step: str, properties: Sequence[Sequence[Any]]) -> None:
        named = {"fact": self.facts, "version": self.versions, "hash": self.hashes}
        for key, value in properties:
            if key in named:
                named[key][value[0]] = value[1]
            if key == "series":
                self.series.append(shaped(Series, value))
            if key == "nccl":
                self.nccl.setdefault(step, []).append(value)


def line(step: Step) -> str:
    return f"{step.name}: {step.outcome}, {step.seconds:.1f} s. {step.measure}"


def _step(name: str, entry: dict[str, Any], command: str) -> Step:
    properties: list[tuple[str, Any]] = [(key, value) for key, value in entry["user_properties"]]
    named = dict(properties)
    findings = [Finding.from_dict(value) for key, value in properties if key == "finding"]
    output = "\n".join(text for _, text in entry["sections"]).strip()
    outcome = {"passed": Outcome.PASSED, "skipped": Outcome.NOT_APPLICABLE}.get(
        entry["outcome"], Outcome.FAILED
    )
    measure = str(named.get("measure", ""))
    if outcome is Outcome.NOT_APPLICABLE:
        measure = str(entry["longrepr"][2]).removeprefix("Skipped: ")
        if measure.startswith(NOT_RUN):
            outcome, measure = Outcome.NOT_RUN, measure.removeprefix(NOT_RUN)
    if outcome is Outcome.FAILED and not any(f.severity is Severity.ERROR for f in findings):
        findings.append(_unforeseen(name, entry))
    return Step(
        name=name,
        outcome=outcome,
        seconds=round(entry["duration"], 3),
        limit_s=named.get("limit"),
        measure=measure,
        findings=tuple(findings),
        output=output,
        command=command,
    )


def _unforeseen(name: str, entry: dict[str, Any]) -> Finding:
    """The Finding of a step that failed otherwise than it foresaw."""
    crash = (entry["longrepr"] or {}).get("reprcrash") or {}
    message = str(crash.get("message") or entry["longrepr"])
    return Finding(
        severity=Severity.ERROR,
        what=f"the step {name} itself broke off: {message.splitlines()[0]}",
        where=name,
        evidence=message,
        cause="not known: the step did not foresee this",
        remedy="read the step's output in the report (--json FILE)",
    )
