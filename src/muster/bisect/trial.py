"""A run of the command under one change, and what its log says."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from muster.bisect import runs
from muster.bisect.changes import Change
from muster.bisect.keeper import Ended
from muster.explain.diagnose import Diagnosis
from muster.explain.explanation import Explanation
from muster.finding import Severity


class Heard(StrEnum):
    """Whether NCCL says in its log that the change has reached it."""

    YES = "its log shows the change"
    OTHERWISE = "its log shows another value than the change's"
    NOT_SHOWN = "its log does not show the change"
    SILENT = "NCCL wrote no log"


@dataclass(frozen=True, kw_only=True)
class Trial:
    change: Change
    ended: Ended
    limit_s: float
    folder: Path
    explained: Explanation

    @property
    def passed(self) -> bool:
        return self.ended.returncode == 0 and not self.ended.cut

    @property
    def outcome(self) -> str:
        """How it went, in words: "passed", "failed (exit code 1)"."""
        return "passed" if self.passed else f"failed ({runs.ending(self.ended, self.limit_s)})"

    @property
    def fault(self) -> Diagnosis | None:
        """The first error that explain finds; none where the run passed."""
        errors = (d for d in self.explained.diagnoses if d.fault.severity is Severity.ERROR)
        return None if self.passed else next(errors, None)

    @property
    def networks(self) -> tuple[str, ...]:
        """What NCCL used, on any node."""
        return tuple(
            sorted({name for node in self.explained.picture.nodes for name in node.networks})
        )

    @property
    def heard(self) -> Heard:
        picture = self.explained.picture
        if not (picture.nccl_versions or picture.variables or picture.nodes):
            return Heard.SILENT
        read = {each.name: set(each.values) for each in picture.variables}
        wanted = {name: {value} for name, value in self.change.sets.items() if name[:5] == "NCCL_"}
        if any(name in read for name in self.change.unsets):
            return Heard.OTHERWISE
        if any(read.get(name, values) != values for name, values in wanted.items()):
            return Heard.OTHERWISE
        return Heard.YES if wanted.keys() <= read.keys() else Heard.NOT_SHOWN

    def to_dict(self) -> dict[str, Any]:
        return {
            "change": self.change.name,
            "sets": dict(self.change.sets),
            "unsets": list(self.change.unsets),
            "passed": self.passed,
            "outcome": self.outcome,
            "seconds": round(self.ended.seconds, 1),
            "left_running": self.ended.left,
            "stuck": list(self.ended.stuck),
            "heard": self.heard,
            "networks": list(self.networks),
            "findings": [each.to_dict() for each in self.explained.diagnoses],
            "log": str(self.folder),
        }
