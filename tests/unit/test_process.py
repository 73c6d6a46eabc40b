"""The door to other programs, with real ones: what they said, their limit, nothing left behind."""

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tests.unit.conftest import runs, wait_until

from muster import process
from muster.process import Completed

# a program, one that it starts, and one in a session of its own as torchrun starts its ranks;
# each writes its process id to the folder that it is given
FAMILY = """
import os, pathlib, subprocess, sys, time
folder, generation = pathlib.Path(sys.argv[1]), int(sys.argv[2])
(folder / f"{generation}.tmp").write_text(str(os.getpid()))
(folder / f"{generation}.tmp").rename(folder / f"{generation}.pid")
if generation:
    child = [sys.executable, "-S", __file__, str(folder), str(generation - 1)]
    subprocess.Popen(child, start_new_session=generation == 1)
    while not (folder / "0.pid").exists():
        time.sleep(0.01)
if generation == 2:
    print("all there", flush=True)
time.sleep(60)
"""


@dataclass
class Family:
    """The three of them, started by `argv`."""

    folder: Path

    @property
    def argv(self) -> list[str]:
        return [sys.executable, "-S", str(self.folder / "family.py"), str(self.folder), "2"]

    def has_ended(self) -> bool:
        pids = [int(path.read_text()) for path in self.folder.glob("*.pid")]
        assert len(pids) == 3
        return not any(runs(pid) for pid in pids)


@pytest.fixture
def family(tmp_path: Path) -> Family:
    (tmp_path / "family.py").write_text(FAMILY)
    return Family(tmp_path)


def sh(script: str, limit_s: float = 20) -> Completed:
    return process.run(["sh", "-c", script], limit_s=limit_s)


def test_output_is_both_streams_in_order_line_by_line() -> None:
    heard: list[str] = []
    done = process.run(
        ["sh", "-c", r"echo a; echo b >&2; printf 'c\r\n\n\377'"], on_line=heard.append
    )
    assert heard == ["a", "b", "c", "", "\N{REPLACEMENT CHARACTER}"]
    assert done.output.splitlines() == heard
    assert done.last_lines(2) == ["c", "\N{REPLACEMENT CHARACTER}"]
    assert done.argv[:2] == ("sh", "-c")


@pytest.mark.parametrize(
    ("script", "ok", "ending"),
    [
        ("exit 0", True, "exit code 0"),
        ("exit 3", False, "exit code 3"),
        ("kill -KILL $$", False, "signal SIGKILL"),
    ],
)
def test_how_it_ended_is_told(script: str, ok: bool, ending: str) -> None:
    done = sh(script)
    assert (done.ok, done.ending, done.timed_out) == (ok, ending, False)


def test_environment_and_folder_are_those_given(tmp_path: Path) -> None:
    done = process.run(["/bin/sh", "-c", "echo $A-$HOME; pwd"], env={"A": "1"}, cwd=tmp_path)
    assert done.output.splitlines() == ["1-", str(tmp_path)]


def test_a_program_that_reads_its_input_finds_none() -> None:
    code = "from muster import process; print(process.run(['cat'], limit_s=5).ok)"
    # the command's own input is open, as on a terminal
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as command:
        assert command.stdout is not None
        assert command.stdout.read() == b"True\n"


def test_what_is_no_program_raises() -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        process.run(["no-such-program"])


def test_the_limit_ends_the_whole_family(family: Family) -> None:
    done = process.run(family.argv, limit_s=2)
    assert (done.timed_out, done.ok, done.ending) == (True, False, "time limit")
    assert "all there" in done.output
    assert done.seconds < 4
    wait_until(family.has_ended, "the family has ended", 2)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_while_reading_ends_the_whole_family(
    family: Family, error: type[BaseException]
) -> None:
    def interrupt(_line: str) -> None:
        raise error

    with pytest.raises(error):
        process.run(family.argv, on_line=interrupt)
    wait_until(family.has_ended, "the family has ended", 2)


def test_leaving_start_ends_the_whole_family(family: Family) -> None:
    with process.start(family.argv) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"all there\n"
        # the child is out of reach of Ctrl-C on our terminal
        assert os.getsid(child.pid) == child.pid
    assert child.returncode == -signal.SIGTERM
    wait_until(family.has_ended, "the family has ended", 2)


def test_a_program_that_ignores_sigterm_is_killed_after_the_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "TERM_GRACE_S", 0.4)
    done = sh("trap '' TERM; while :; do sleep 0.1; done", limit_s=0.3)
    assert (done.timed_out, done.returncode) == (True, -signal.SIGKILL)
    assert 0.7 <= done.seconds < 3


def test_a_program_may_clean_up_on_sigterm(tmp_path: Path) -> None:
    script = f"trap 'echo tidy > {tmp_path}/out; exit 0' TERM; while :; do sleep 0.1; done"
    done = sh(script, limit_s=0.3)
    assert (tmp_path / "out").read_text() == "tidy\n"
    assert done.seconds < process.TERM_GRACE_S
    assert not done.ok


@pytest.mark.parametrize(
    "script",
    ["sleep 4.125 & exit 0", "exec >&- 2>&-; exec sleep 4.125"],
    ids=["ends before what it started", "closes its output"],
)
def test_the_limit_holds_for_a_program_that(script: str) -> None:
    started = time.monotonic()
    done = sh(script, limit_s=0.4)
    assert time.monotonic() - started < 3
    assert done.timed_out
    wait_until(
        lambda: all(each.info["cmdline"] != ["sleep", "4.125"] for each in everything()),
        "what it started has ended",
        1,
    )


def everything() -> list[psutil.Process]:
    return list(psutil.process_iter(["cmdline"]))


def test_ending_what_has_ended_does_nothing() -> None:
    with process.start(["true"]) as child:
        child.wait()
    process.end(child)
    assert child.returncode == 0


def test_a_descriptor_can_be_handed_over() -> None:
    reader, writer = os.pipe()
    with process.start(["sh", "-c", f"echo here >/dev/fd/{writer}"], pass_fds=[writer]) as child:
        os.close(writer)
        child.wait()
    with os.fdopen(reader) as handed:
        assert handed.read() == "here\n"


def test_a_daemon_may_be_forgotten_while_it_runs(tmp_path: Path) -> None:
    # a Popen that is dropped while its program runs warns, and a warning fails the tests
    daemon = weakref.ref(process.spawn(["sleep", "60"], tmp_path / "log"))
    gc.collect()
    kept = daemon()
    assert kept is not None
    process.end(kept)


def test_a_daemon_has_its_own_session_and_appends_to_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    daemon = process.spawn(["sh", "-c", "echo out; echo err >&2; exec sleep 60"], log)
    try:
        wait_until(lambda: log.read_text() == "before\nout\nerr\n", "the log has both streams")
        assert daemon.poll() is None
        assert os.getsid(daemon.pid) == daemon.pid
    finally:
        process.end(daemon)
