"""bisect with real commands that behave as a broken layer does, by itself and as a user runs it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.conftest import ROOT, Recorder, runs, wait_until

from muster.bisect import bisection
from muster.bisect.bisection import Result
from muster.bisect.changes import Machine
from muster.bisect.verdict import Outcome
from muster.errors import CannotWrite, CommandNotStarted, NoCommand

NO_GPUS = Machine(interfaces=("eth0", "eth1"), gpus=())
# what NCCL writes of itself, into a file each process as it does
NCCL = """
log=$(echo "$NCCL_DEBUG_FILE" | sed "s/%h/n1/; s/%p/$$/")
say() { echo "n1:$$:$$ [0] NCCL INFO $1" >> "$log"; }
[ "$NCCL_DEBUG" = INFO ] || exit 9
say "NCCL version 2.27.5+cuda12.8"
env | grep '^NCCL_' | sort | while IFS='=' read -r name value
do
    # of a number it says it with a full stop
    case "$value" in *[!0-9]*) ;; *) value="$value.";; esac
    say "$name set by environment to $value"
done
say "Using network Socket"
"""
FAILS = 'echo "RuntimeError: all is lost" >&2; exit 1\n'


def job(script: str) -> list[str]:
    return ["sh", "-c", NCCL + script, "job", "a b"]


def bisect(
    command: list[str],
    progress: Recorder,
    machine: Machine = NO_GPUS,
    *,
    limit_s: float = 30,
    logs: Path | None = None,
    **environ: str,
) -> Result:
    return bisection.bisect(
        command,
        {"PATH": os.environ["PATH"], **environ},
        progress,
        limit_s=limit_s,
        logs=logs,
        look=lambda _environ: machine,
    )


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that temporary folders are made in."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


# ---- the layer ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "value", "layer"),
    [
        ("NCCL_P2P_DISABLE", "1", "direct access between the GPUs of a node"),
        ("NCCL_CUMEM_HOST_ENABLE", "0", "host memory from cuMem*"),
        ("NCCL_SOCKET_IFNAME", "=eth1", "the choice of the network interface"),
    ],
)
def test_a_layer_that_fails_until_it_is_turned_off_is_named(
    progress: Recorder, variable: str, value: str, layer: str
) -> None:
    found = bisect(job(f'[ "${variable}" = "{value}" ] && exit 0\n{FAILS}'), progress)
    assert found.conclusion.outcome is Outcome.FOUND
    (blame,) = found.conclusion.blames
    assert blame.layer.name.startswith(layer)
    assert [trial.change.name for trial in blame.helped] == [f"{variable}={value}"]
    assert found.lines[0].startswith("env NCCL_DEBUG=INFO sh -c ")
    assert found.lines[1].startswith(f"env {variable}={value} NCCL_DEBUG=INFO sh -c ")
    assert found.lines[1].endswith(" job 'a b'")
    assert not any("luck" in text for text in found.conclusion.says)
    # as it is, seven switches, two interfaces, as it is again
    assert len(list(found.runs)) == 11
    shown = {line.partition(": ")[0]: line for line in progress.said}
    assert "passed, " in shown[f"{variable}={value}"]
    assert "failed (exit code 1)" in shown["as it is"]
    assert "the program itself failed first" in shown["as it is"]
    assert len([line for line in progress.said if "failed (exit code 1)" in line]) == 10


def test_a_layer_that_hangs_until_it_is_turned_off_is_named(progress: Recorder) -> None:
    hangs = '[ "$NCCL_SHM_DISABLE" = 1 ] && exit 0\nexec sleep 60\n'
    found = bisect(job(hangs), progress, Machine((), ()), limit_s=2)
    assert [blame.layer.name for blame in found.conclusion.blames] == [
        "shared memory between the processes of a node"
    ]
    assert any("not done after 2 s" in line for line in progress.said)


def test_what_a_run_says_because_it_is_stopped_is_not_taken_for_its_fault(
    progress: Recorder,
) -> None:
    script = "trap 'echo \"W1130 api.py:1] Received Signals.SIGTERM death signal\"; exit 1' TERM\n"
    command = job(script + "while :; do sleep 0.05; done\n")
    found = bisect(command, progress, Machine((), ()), limit_s=1)
    assert "death signal" in (found.runs.first.folder / "output.log").read_text()
    assert found.runs.first.fault is None


def test_every_run_has_a_log_that_explain_has_read(progress: Recorder) -> None:
    found = bisect(job(FAILS), progress, Machine((), ()))
    assert found.conclusion.outcome is Outcome.NOT_FOUND
    folders = [trial.folder for trial in found.runs]
    assert found.logs is not None
    assert sorted(found.logs.iterdir()) == folders
    for trial in found.runs:
        assert (trial.folder / "output.log").read_text() == "RuntimeError: all is lost\n"
        assert len(list(trial.folder.glob("nccl.n1.*"))) == 1
        assert trial.networks == ("Socket",)
        assert [each.fault.id for each in trial.explained.diagnoses][:1] == ["rank-raised"]


def test_where_nothing_helps_nothing_is_run_twice(progress: Recorder) -> None:
    found = bisect(job(FAILS), progress, Machine((), ()))
    assert found.runs.again is None
    assert found.lines == (found.runs.first.change.line(found.command),)


def test_a_setting_of_the_callers_that_breaks_it_is_named_without_its_value(
    progress: Recorder,
) -> None:
    found = bisect(
        job(f'[ -z "$NCCL_IB_HCA" ] && exit 0\n{FAILS}'),
        progress,
        NCCL_IB_HCA="mlx5_77",
        NCCL_BUFFSIZE="8388608",
        API_KEY="hunter2",
    )
    (blame,) = found.conclusion.blames
    assert blame.layer.name == "your own setting of NCCL_IB_HCA"
    assert found.conclusion.beside == ("without your 2 NCCL_ variables",)
    assert found.lines[1].startswith("env -u NCCL_IB_HCA NCCL_DEBUG=INFO sh ")
    assert found.reminders == ()
    shown = "".join([*found.lines, *progress.said, *found.conclusion.says])
    assert "hunter2" not in shown
    assert "8388608" not in shown


def test_a_switch_that_the_caller_has_on_is_said_to_be_skipped(progress: Recorder) -> None:
    found = bisect(job(FAILS), progress, NCCL_P2P_DISABLE="1")
    assert "NCCL_P2P_DISABLE=1" in [each.name for each in found.skipped]
    assert any(line.startswith("NCCL_P2P_DISABLE=1: skipped, ") for line in progress.said)
    assert any(line.startswith("without NCCL_P2P_DISABLE: failed") for line in progress.said)


# ---- what proves nothing ------------------------------------------------------------------------


def test_a_command_that_passes_is_run_once_and_leaves_no_logs(
    progress: Recorder, temporary: Path
) -> None:
    found = bisect(job("exit 0"), progress)
    assert found.passes
    assert len(list(found.runs)) == 1
    assert found.logs is None
    assert list(temporary.iterdir()) == []


def test_a_command_that_fails_once_blames_nothing(progress: Recorder, tmp_path: Path) -> None:
    found = bisect(job(f'mkdir "{tmp_path}/ran" || exit 0\n{FAILS}'), progress)
    assert found.conclusion.outcome is Outcome.FLAKY
    assert found.conclusion.blames == ()
    assert found.reminders == ()
    assert not found.passes


def test_a_command_that_daemonises_is_ended_and_told(progress: Recorder, tmp_path: Path) -> None:
    script = f"(setsid sh -c 'echo $$ > \"{tmp_path}/pid\"; exec sleep 60' &)\n"
    script += f'while [ ! -s "{tmp_path}/pid" ]; do sleep 0.02; done\n'
    found = bisect(job(script), progress)
    assert found.passes
    assert any("left 1 processes running" in text for text in found.conclusion.says)
    assert not runs(int((tmp_path / "pid").read_text()))


# ---- GPUs ---------------------------------------------------------------------------------------

ONE_IS_BROKEN = '[ "$CUDA_VISIBLE_DEVICES" ] || exit 1\n'
ONE_IS_BROKEN += 'case ",$CUDA_VISIBLE_DEVICES," in *,5,*) exit 1;; esac\nexit 0\n'


def test_a_broken_gpu_is_found_by_pairs(progress: Recorder) -> None:
    found = bisect(job(ONE_IS_BROKEN), progress, Machine((), tuple("01234567")))
    assert found.conclusion.outcome is Outcome.PLACED
    assert len(found.runs.paired) == 6
    assert any("GPU 5 fails with each partner" in text for text in found.conclusion.says)
    assert found.runs.again is not None
    assert [line.split()[1] for line in found.lines[1:]] == [
        "CUDA_VISIBLE_DEVICES=4,5",
        "CUDA_VISIBLE_DEVICES=5,0",
    ]


def test_a_command_that_wants_more_gpus_than_two_is_not_tried_in_pairs(progress: Recorder) -> None:
    script = 'say "x"; echo "RuntimeError: CUDA error: invalid device ordinal"; exit 1\n'
    found = bisect(job(script), progress, Machine((), ("0", "1", "2", "3")))
    assert found.runs.paired == {}
    (skipped,) = [each for each in found.skipped if each.name == "CUDA_VISIBLE_DEVICES"]
    assert "--nproc-per-node=gpu" in skipped.why
    assert len([line for line in progress.said if line.startswith("CUDA_VISIBLE_DEVICES=")]) == 1


# ---- wrong input --------------------------------------------------------------------------------


def test_no_command_is_told(progress: Recorder) -> None:
    with pytest.raises(NoCommand):
        bisect([], progress)


def test_what_is_no_program_is_told_and_leaves_nothing(progress: Recorder, temporary: Path) -> None:
    with pytest.raises(CommandNotStarted):
        bisect(["no-such-program"], progress)
    assert list(temporary.iterdir()) == []


def test_logs_go_where_they_are_told_to_and_stay(progress: Recorder, tmp_path: Path) -> None:
    first = bisect(job("exit 0"), progress, logs=tmp_path / "new" / "logs")
    second = bisect(job("exit 0"), progress, logs=tmp_path / "new" / "logs")
    assert first.logs != second.logs
    for found in (first, second):
        assert found.logs is not None
        assert found.logs.parent == tmp_path / "new" / "logs"
        assert (found.logs / "01-as-it-is" / "output.log").exists()


def test_logs_that_cannot_be_written_are_told(progress: Recorder, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotWrite):
        bisect(job("exit 0"), progress, logs=tmp_path / "file")


# ---- as a user runs it --------------------------------------------------------------------------


@contextlib.contextmanager
def started(*words: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    inherited = {
        name: text for name, text in os.environ.items() if not name.startswith(("NCCL_", "FORCE_"))
    }
    with subprocess.Popen(
        [sys.executable, "-m", "muster", "bisect", *words],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "100", **environ},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        yield running


def run(*words: str, **environ: str) -> tuple[int, str, str]:
    with started(*words, **environ) as running:
        out, err = running.communicate(timeout=120)
        return running.returncode, out, err


def test_the_command_says_the_layer_and_what_to_type_and_exits_with_1(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    hangs = job(f'[ "$NCCL_P2P_DISABLE" = 1 ] && exit 0\n{FAILS}')
    code, out, err = run("--timeout", "20", f"--json={file}", "--", *hangs)
    assert (code, err) == (1, "")
    assert "at fault: direct access between the GPUs of a node (P2P" in out
    assert "leaves open" in out
    assert "env NCCL_P2P_DISABLE=1 NCCL_DEBUG=INFO sh -c " in out
    assert "Switches are for finding a fault, not for running" in out
    assert out.splitlines()[-1] == "the layer is found"
    document = json.loads(file.read_text())
    assert document["command"] == "bisect"
    assert document["argv"] == hangs
    assert document["conclusion"]["layers"][0]["helped"] == ["NCCL_P2P_DISABLE=1"]
    assert [each["passed"] for each in document["runs"]].count(True) == 1
    assert Path(document["logs"], "01-as-it-is/output.log").exists()


def test_a_command_that_passes_exits_with_0() -> None:
    code, out, err = run("--", "true")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "passes as it is"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--timeout", "0", "--", "true"], "--timeout '0' is not a whole number above 0"),
        (["--timeout=-3", "--", "true"], "--timeout '-3'"),
        (["--timeout", "soon", "--", "true"], "--timeout 'soon'"),
        ([], "there is no command to run"),
        (["--"], "there is no command to run"),
        (["--", "no-such-program"], "cannot run 'no-such-program': No such file"),
        (["--", "torchrun train.py"], "cannot run 'torchrun train.py'"),
        (["--json=/nonexistent/a.json", "--", "true"], "cannot write /nonexistent/a.json"),
    ],
)
def test_what_the_user_gave_is_refused_with_2(words: list[str], says: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert says in err
    assert "\n  do: " in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_of_it_after_ctrl_c(
    tmp_path: Path, temporary: Path, number: signal.Signals
) -> None:
    script = (
        f"sh -c 'echo $$ > \"{tmp_path}/child\"; exec sleep 60' &\n"
        f"(setsid sh -c 'echo $$ > \"{tmp_path}/daemon\"; exec sleep 60' &)\n"
        "exec sleep 60\n"
    )
    pids = [tmp_path / "child", tmp_path / "daemon"]
    with started("--", "sh", "-c", script) as running:
        wait_until(lambda: all(path.exists() and path.read_text() for path in pids), "the command")
        running.send_signal(number)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 128 + number
    assert err == "muster: interrupted; nothing was left behind\n"
    assert not any(runs(int(path.read_text())) for path in pids)
    assert list(temporary.iterdir()) == []
