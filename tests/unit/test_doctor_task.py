"""The doctor as a user runs it, on this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.unit.conftest import ROOT

from muster.doctor.examine import CHECKS
from muster.doctor.facts import Facts

Done = subprocess.CompletedProcess[str]


def doctor(*words: str, **environment: str) -> Done:
    return subprocess.run(
        [sys.executable, "-m", "muster", "doctor", *words],
        cwd=ROOT,
        env={
            **{name: text for name, text in os.environ.items() if name != "FORCE_COLOR"},
            "DOCKER_HOST": "unix:///nonexistent",
            "PYTHONPATH": str(ROOT / "src"),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_lists_every_check_and_ends_with_a_verdict_that_its_exit_status_repeats(
    tmp_path: Path,
) -> None:
    # wide enough that no measure of this machine is wrapped
    done = doctor("--json", str(tmp_path / "out.json"), COLUMNS="1000")
    document = json.loads((tmp_path / "out.json").read_text())
    lines = done.stdout.splitlines()
    assert done.stderr == ""
    assert lines[-1] == document["verdict"] == ("READY" if done.returncode == 0 else "NOT READY")
    wrong = [each for each in document["findings"] if each["severity"] == "error"]
    assert done.returncode == (1 if wrong else 0)
    named = [line.split()[0] for line in lines[2 : 2 + len(CHECKS)]]
    assert named == [each["name"] for each in document["checks"]]
    assert named == [check.__name__ for check in CHECKS]
    assert Facts.from_dict(document["facts"]).machine.cpus == len(os.sched_getaffinity(0))


def test_what_stops_training_is_shown_whole_and_is_1() -> None:
    done = doctor(NCCL_SOCKET_IFNAME="no-such-\x1b[31minterface")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1] == "NOT READY"
    assert "error in NCCL_SOCKET_IFNAME: NCCL_SOCKET_IFNAME=no-such-" in done.stdout
    for name in ("evidence", "cause", "remedy"):
        assert f"{name} " in done.stdout
    assert "\x1b" not in done.stdout


def test_what_slows_is_said_and_is_0(tmp_path: Path) -> None:
    before = doctor().returncode
    done = doctor(NCCL_P2P_DISABLE="1", HOME=str(tmp_path))
    assert done.returncode == before
    assert "warning in environment: 1 debug switch left on" in done.stdout
    assert "unset NCCL_P2P_DISABLE" in done.stdout


def test_a_file_that_cannot_be_written_is_told_before_the_look() -> None:
    done = doctor("--json=/nonexistent/out.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot write /nonexistent/out.json" in done.stderr
