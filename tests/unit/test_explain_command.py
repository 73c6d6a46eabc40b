"""./invokew explain as a user runs it: words, pipes, exit codes, Ctrl-C, and the terminal."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.conftest import ROOT, wait_until
from tests.unit.test_explain_explanation import INIT, SHM

HEALTHY = INIT.format("START") + INIT.format("COMPLETE")
COMMAND = (sys.executable, "-m", "muster", "explain")


def environment() -> dict[str, str]:
    plain = {name: text for name, text in os.environ.items() if name != "FORCE_COLOR"}
    return {**plain, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "300"}


def explain(*words: str, log: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words],
        cwd=ROOT,
        env=environment(),
        input=log or "",
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_fault_is_told_with_its_line_and_ends_with_1(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(HEALTHY + SHM)
    done = explain(str(log))
    assert done.returncode == 1
    assert done.stderr == ""
    assert f"error in {log}:3: /dev/shm is too small for NCCL [shm-too-small]" in done.stdout
    assert "--shm-size=1g" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 fault found in 3 lines"


def test_nothing_wrong_ends_with_0_and_shows_the_picture(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(HEALTHY + HEALTHY.replace("INFO ncclComm", "INFO Using network IB\n#"))
    done = explain(str(log))
    assert (done.returncode, done.stderr) == (0, "")
    (row,) = (line.split() for line in done.stdout.splitlines() if line.startswith("node-0"))
    assert row == ["node-0", "3", "IB"]
    assert done.stdout.splitlines()[-1].startswith("nothing wrong found in")


@pytest.mark.parametrize("words", [(), ("-",), ("--", "-")])
def test_a_log_is_read_from_a_pipe(words: tuple[str, ...]) -> None:
    done = explain(*words, log=SHM)
    assert done.returncode == 1
    assert "error in standard input:1:" in done.stdout


def test_directories_globs_and_several_words_are_one_log(tmp_path: Path) -> None:
    below = tmp_path / "logs"
    below.mkdir()
    (below / "a.log").write_text(SHM)
    (below / "b.log").write_text(HEALTHY)
    (tmp_path / "c.txt").write_text(HEALTHY)
    assert explain(str(below)).stdout.endswith("found in 3 lines\n")
    assert explain(f"{below}/b*").returncode == 0
    assert explain("--", str(below / "a.log"), str(tmp_path / "c.txt")).stdout.endswith("3 lines\n")


@pytest.mark.parametrize("words", [("--json", "{}", "{log}"), ("{log}", "-j", "{}")])
def test_the_result_is_written_as_json(tmp_path: Path, words: tuple[str, ...]) -> None:
    log, path = tmp_path / "job.log", tmp_path / "result.json"
    log.write_text(HEALTHY + SHM)
    done = explain(*(word.replace("{log}", str(log)).replace("{}", str(path)) for word in words))
    assert done.returncode == 1
    written = json.loads(path.read_text())
    (finding,) = written["findings"]
    assert (finding["id"], finding["class"], finding["ranks"]) == (
        *("shm-too-small", "shared memory"),
        "3",
    )
    assert written["picture"]["nodes"][0]["host"] == "node-0"


@pytest.mark.parametrize("word", ["/nonexistent/job.log", "no*such"])
def test_what_is_not_there_ends_with_2(word: str) -> None:
    done = explain(word)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"muster: there is no log '{word}'\n  do: ")


def test_a_terminal_is_no_log() -> None:
    leader, follower = os.openpty()
    try:
        done = subprocess.run(
            COMMAND, cwd=ROOT, env=environment(), stdin=follower, capture_output=True, check=False
        )
    finally:
        os.close(leader)
        os.close(follower)
    assert done.returncode == 2
    assert b"standard input is this terminal" in done.stderr


def test_escapes_in_a_log_do_not_reach_the_terminal(tmp_path: Path) -> None:
    log = tmp_path / "job\x1b[31m.log"
    log.write_text(SHM.replace("9637892", "\x1b]0;owned\x07\x1b[2J9637892\u202e"))
    done = explain(str(log))
    assert done.returncode == 1
    assert [each for each in done.stdout if not each.isprintable() and each != "\n"] == []


def test_following_tells_at_once_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    log, told = tmp_path / "job.log", tmp_path / "told"
    log.write_text(HEALTHY)
    with told.open("w") as file:
        following = subprocess.Popen(
            [*COMMAND, "--follow", str(log)], cwd=ROOT, env=environment(), stdout=file
        )
    try:
        with log.open("a") as file:
            file.write(SHM)
        wait_until(lambda: "shm-too-small" in told.read_text(), "the fault is told")
        following.send_signal(signal.SIGINT)
        assert following.wait(20) == 1
    finally:
        following.kill()
        following.wait()
    assert told.read_text().splitlines()[-1] == "1 fault found in 3 lines"


def test_ctrl_c_ends_the_readers_too(tmp_path: Path) -> None:
    log = tmp_path / "large.log"
    log.write_text(HEALTHY)
    # a hole, as a log has that was emptied under its writer: it takes no space, and long to read
    os.truncate(log, 100 * 2**30)
    reading = subprocess.Popen(
        [*COMMAND, str(log)],
        cwd=ROOT,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_until(lambda: len(processes_of(reading.pid)) == 3, "two readers run")
        # as a terminal does it
        os.killpg(reading.pid, signal.SIGINT)
        _, said = reading.communicate(timeout=20)
    finally:
        reading.kill()
        reading.wait()
    assert reading.returncode == 130
    assert said == "muster: interrupted; nothing was left behind\n"
    wait_until(lambda: not processes_of(reading.pid), "the readers end")


def processes_of(session: int) -> list[str]:
    def session_of(stat: Path) -> int:
        try:
            return int(stat.read_text().rpartition(")")[2].split()[3])
        except (OSError, IndexError):
            return 0

    return [
        stat.parent.name
        for stat in Path("/proc").glob("[0-9]*/stat")
        if session_of(stat) == session
    ]
