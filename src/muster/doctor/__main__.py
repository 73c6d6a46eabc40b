"""The doctor in a container, where the standard library is all there is.

    python -m muster.doctor [--json]

Prints each check and each Finding, or one JSON document; ends with 1 when something stops training.
"""

import json
import sys
from collections.abc import Iterator, Sequence

from muster.doctor.examine import Result, doctor
from muster.errors import ExitCode
from muster.finding import Finding, Verdict


def main(arguments: Sequence[str]) -> int:
    if any(argument != "--json" for argument in arguments):
        sys.stderr.write("usage: python -m muster.doctor [--json]\n")
        return ExitCode.WRONG_INPUT
    result = doctor()
    text = json.dumps(result.to_dict(), indent=2) if arguments else "\n".join(lines(result))
    # where the terminal is not one of UTF-8
    sys.stdout.write(f"{text.encode('ascii', 'backslashreplace').decode()}\n")
    return 0 if result.verdict is Verdict.READY else ExitCode.FINDINGS


def lines(result: Result) -> Iterator[str]:
    for each in result.examinations:
        yield f"{each.name}: {each.outcome}. {each.measure}"
    for finding in result.findings:
        yield from _finding(finding)
    yield result.verdict


def _finding(finding: Finding) -> Iterator[str]:
    yield f"{finding.severity} in {finding.where}: {finding.what}"
    for name in ("evidence", "cause", "remedy"):
        yield f"  {name}: {getattr(finding, name)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
