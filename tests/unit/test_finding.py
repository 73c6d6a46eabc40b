"""Findings and the verdict that follows from them."""

import json

import pytest

from muster.finding import Finding, Severity, Verdict, verdict


def finding(severity: Severity) -> Finding:
    return Finding(severity=severity, what="a", where="b", evidence="c", cause="d", remedy="e")


@pytest.mark.parametrize(
    ("severities", "expected"),
    [
        ([], Verdict.READY),
        ([Severity.WARNING, Severity.WARNING], Verdict.READY),
        ([Severity.WARNING, Severity.ERROR], Verdict.NOT_READY),
        ([Severity.ERROR, Severity.WARNING], Verdict.NOT_READY),
    ],
)
def test_errors_alone_decide_the_verdict(severities: list[Severity], expected: Verdict) -> None:
    assert verdict(map(finding, severities)) is expected


@pytest.mark.parametrize("severity", Severity)
def test_a_finding_survives_json(severity: Severity) -> None:
    original = finding(severity)
    assert Finding.from_dict(json.loads(json.dumps(original.to_dict()))) == original
