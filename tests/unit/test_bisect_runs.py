"""One run of a command with real programs: its limit, its output, and nothing left of it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.unit.conftest import ROOT, runs, wait_until

from muster.bisect import runs as running
from muster.bisect.keeper import Ended
from muster.errors import CommandNotStarted
from muster.explain.lines import Part

# every process notes its id; the shell that daemonises is gone before its child is
NOTE = 'note() { echo "$1" > "$PIDS/.$2"; mv "$PIDS/.$2" "$PIDS/$2"; }\n'
FAMILY = (
    NOTE
    + """
note $$ parent
sh -c 'echo $$ > "$PIDS/.child"; mv "$PIDS/.child" "$PIDS/child"; exec sleep 60' &
setsid sh -c 'echo $$ > "$PIDS/.session"; mv "$PIDS/.session" "$PIDS/session"; exec sleep 60' &
(setsid sh -c 'trap "" TERM HUP INT; echo $$ > "$PIDS/.daemon"
mv "$PIDS/.daemon" "$PIDS/daemon"; while :; do sleep 1; done' &)
while [ ! -e "$PIDS/child" ] || [ ! -e "$PIDS/session" ] || [ ! -e "$PIDS/daemon" ]
do sleep 0.02; done
echo all there
"""
)


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    folder = tmp_path / "pids"
    folder.mkdir()
    return folder


def ended_all(pids: Path, count: int) -> bool:
    found = [int(path.read_text()) for path in pids.iterdir()]
    assert len(found) == count
    return not any(runs(pid) for pid in found)


def run(folder: Path, *command: str, limit_s: float = 30, **environ: str) -> Ended:
    return running.run(command, {**os.environ, **environ}, folder, limit_s).ended


def sh(folder: Path, script: str, limit_s: float = 30, **environ: str) -> Ended:
    return run(folder, "sh", "-c", script, limit_s=limit_s, **environ)


def output(folder: Path) -> bytes:
    return (folder / running.OUTPUT).read_bytes()


# ---- how it ends --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "returncode", "ending"),
    [
        ("exit 0", 0, "exit code 0"),
        ("exit 3", 3, "exit code 3"),
        ("kill -SEGV $$", -11, "signal SIGSEGV"),
        ("kill -40 $$", -40, "signal 40"),
    ],
)
def test_how_a_command_ends_is_told(
    tmp_path: Path, script: str, returncode: int, ending: str
) -> None:
    ended = sh(tmp_path, script)
    assert (ended.returncode, ended.cut, ended.left, ended.stuck) == (returncode, False, 0, ())
    assert running.ending(ended, 30) == ending


def test_both_streams_are_in_the_log_in_their_order_byte_by_byte(tmp_path: Path) -> None:
    sh(tmp_path, r"echo a; echo b >&2; printf '\000\377\033[31m'; echo c")
    assert output(tmp_path) == b"a\nb\n\x00\xff\x1b[31mc\n"


def test_words_reach_the_command_as_they_are(tmp_path: Path) -> None:
    words = ["a b", "it's", '"', "$HOME", "*", "", "--", "-c", "new\nline", "ü"]
    run(tmp_path, "sh", "-c", r'for word; do printf "%s\0" "$word"; done', "sh", *words)
    assert output(tmp_path).decode().split("\0")[:-1] == words


def test_a_command_that_asks_is_not_waited_for(tmp_path: Path) -> None:
    assert run(tmp_path, "cat").returncode == 0


def test_the_environment_is_the_one_given_and_ours_stays(tmp_path: Path) -> None:
    before = dict(os.environ)
    script = 'printf "%s" "$NCCL_P2P_DISABLE ${HOME-none}"'
    environ = {"PATH": os.environ["PATH"], "NCCL_P2P_DISABLE": "1"}
    running.run(["sh", "-c", script], environ, tmp_path, 30)
    assert output(tmp_path) == b"1 none"
    assert dict(os.environ) == before


def test_what_the_callers_environment_does_to_python_does_not_reach_the_keeper(
    tmp_path: Path,
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": ""}
    done = running.run(["sh", "-c", 'printf "%s" "$PYTHONPATH"'], environ, tmp_path, 30)
    assert done.ended.returncode == 0
    assert output(tmp_path) == str(tmp_path).encode()


def test_a_hundred_megabytes_of_output_stay_out_of_memory(tmp_path: Path) -> None:
    before = psutil.Process().memory_info().rss
    ended = sh(tmp_path, "head -c 100000000 /dev/zero")
    assert ended.returncode == 0
    assert (tmp_path / running.OUTPUT).stat().st_size == 100_000_000
    assert psutil.Process().memory_info().rss - before < 30_000_000


@pytest.mark.parametrize("kind", ["missing", "folder", "no program", "not on PATH"])
def test_what_is_no_program_is_told(tmp_path: Path, kind: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "no program").write_text("echo\n")
    name = kind if kind == "not on PATH" else str(tmp_path / kind)
    says = re.escape(f"cannot run {name!r}: ")
    with pytest.raises(CommandNotStarted, match=says):
        run(tmp_path, name, "x")


# ---- nothing left -------------------------------------------------------------------------------


def test_at_the_limit_all_are_ended_wherever_they_went(tmp_path: Path, pids: Path) -> None:
    # the limit is long enough for all to start: the command says so, and then does not end
    script = FAMILY + "exec sleep 60\n"
    ended = sh(tmp_path, script, limit_s=5, PIDS=str(pids))
    assert ended.cut
    assert ended.stuck == ()
    assert running.ending(ended, 5) == "not done after 5 s"
    assert output(tmp_path) == b"all there\n"
    assert ended_all(pids, 4)


def test_what_a_command_leaves_running_is_counted_and_ended(tmp_path: Path, pids: Path) -> None:
    ended = sh(tmp_path, FAMILY, PIDS=str(pids))
    assert (ended.returncode, ended.cut) == (0, False)
    # the daemon's own sleep is another
    assert ended.left >= 3
    assert ended_all(pids, 4)


def test_a_command_that_takes_no_sigterm_is_killed(tmp_path: Path, pids: Path) -> None:
    script = NOTE + 'trap "" TERM; note $$ pid; while :; do sleep 1; done'
    ended = sh(tmp_path, script, limit_s=2, PIDS=str(pids))
    assert ended.cut
    assert ended.returncode == -signal.SIGKILL
    assert ended_all(pids, 1)


def test_a_command_may_clean_up_when_its_time_is_over(tmp_path: Path) -> None:
    script = 'trap "echo cleaned; exit 0" TERM; while :; do sleep 0.05; done'
    ended = sh(tmp_path, script, limit_s=2)
    # it ended well, and only because it was told to
    assert (ended.returncode, ended.cut) == (0, True)
    assert output(tmp_path).endswith(b"cleaned\n")


def test_of_a_run_that_was_cut_the_log_ends_where_it_was_told_to_end(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    script = f"echo before; echo nccl > {logs}/nccl.n1.7\n"
    script += 'trap "echo preempted; exit 0" TERM; while :; do sleep 0.05; done'
    done = running.run(["sh", "-c", script], os.environ, logs, 2)
    assert done.log == (Part(logs / "nccl.n1.7", 0, 5), Part(logs / running.OUTPUT, 0, 7))
    assert output(logs).endswith(b"preempted\n")


def test_of_a_run_that_ended_by_itself_the_log_is_whole(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    done = running.run(["true"], os.environ, logs, 30)
    assert done.log == (Part(logs / running.OUTPUT),)


def test_nothing_is_left_when_we_are_killed(tmp_path: Path, pids: Path) -> None:
    script = FAMILY + "exec sleep 60\n"
    ours = (
        "import os, pathlib, sys; from muster.bisect import runs\n"
        "runs.run(['sh', '-c', sys.argv[1]], os.environ, pathlib.Path(sys.argv[2]), 60)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PIDS": str(pids)}
    with subprocess.Popen(
        [sys.executable, "-c", ours, script, str(tmp_path)], env=environ
    ) as killed:
        wait_until(
            lambda: (tmp_path / running.OUTPUT).exists() and output(tmp_path) == b"all there\n",
            "the command's family",
        )
        killed.kill()
    wait_until(lambda: ended_all(pids, 4), "the end of the command's family")
