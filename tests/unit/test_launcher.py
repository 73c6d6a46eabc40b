"""The launcher with a small program in torchrun's place: its arguments, signals and statuses."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from tests.unit.conftest import ROOT, runs, wait_until

from muster import launcher
from muster.errors import ExitCode
from muster.launch import SHUTDOWN_VARIABLE, ExitStatus
from muster.launcher import PASSED_ON

FLAGS = ("--nnodes=4", "--rdzv-backend=c10d", "--rdzv-endpoint=demo-0.demo:29400")

# the launcher as a parent that orphans come to, as PID 1 is, with another program as the agent
DRIVER = """
import ctypes, sys
from muster import launcher
PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
launcher.LAST_WAIT_S = 1
sys.exit(launcher.main(sys.argv[2:], [sys.executable, sys.argv[1]]))
"""

# what it does is its last argument; "ready" is said when its handlers are in place
AGENT = """
import json, os, signal, sys, time

def say(text):
    sys.stdout.write(text + "\\n")
    sys.stdout.flush()

does, _, number = sys.argv[-1].partition("=")
if does == "exit":
    sys.exit(int(number))
if does == "kill":
    os.kill(os.getpid(), int(number))
if does == "show":
    masked = [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    own = {name: value for name, value in os.environ.items() if name.startswith("TORCH")}
    say(json.dumps({"argv": sys.argv[1:], "masked": masked, "environment": own}))
    sys.exit(0)
if does == "orphan":
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(0.2)  # its parent is gone by now
            os._exit(7)
        os._exit(0)
    os.wait()
    time.sleep(1)
    say(open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read())
    sys.exit(int(number))
if does in ("report", "ends", "saves"):
    def handler(received, _frame):
        say(signal.Signals(received).name)
        if does == "ends":
            sys.exit(int(number))
        if does == "saves":
            time.sleep(float(number))
            say("saved")
            sys.exit(12)
    for each in (1, 2, 3, 10, 12, 15):
        signal.signal(each, handler)
say("ready")
time.sleep(60)
"""

Start = Callable[..., "Launched"]


class Launched:
    """A launcher that runs; what it and the agent print goes to files."""

    def __init__(self, folder: Path, words: list[str], environment: Mapping[str, str]) -> None:
        self._out, self._err = folder / "out", folder / "err"
        self._agent = folder / "agent.py"
        self._agent.write_text(AGENT)
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-c", DRIVER, str(self._agent), *words],
                env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=folder,
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def agents(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(word) for word in children.read_text().split()]

    def until(self, text: str) -> None:
        wait_until(lambda: text in self.out, f"the agent says {text!r}")

    def until_it_listens(self) -> None:
        """Until it waits for signals; SIGCHLD it blocks all along."""
        wait_until(lambda: self._blocked() >> (signal.SIGCHLD - 1) & 1 == 1, "it listens")

    def _blocked(self) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk"))

    def end(self) -> int:
        return self.process.wait(timeout=30)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a launcher of node 1 whose agent does the last word; flags are 4 nodes' unless given.

    With `index` None, JOB_COMPLETION_INDEX is not set.
    """
    (tmp_path / "train.py").touch()
    started: list[Launched] = []

    def launch(
        *words: str, flags: tuple[str, ...] = FLAGS, index: str | None = "1", **environment: str
    ) -> Launched:
        if index is not None:
            environment["JOB_COMPLETION_INDEX"] = index
        started.append(Launched(tmp_path, [*flags, *words], environment))
        return started[-1]

    yield launch
    for each in started:
        for pid in each.agents() if each.process.poll() is None else []:
            os.kill(pid, signal.SIGKILL)
        each.process.kill()
        each.process.wait()


def test_the_agent_gets_torchruns_arguments_and_what_its_index_adds(start: Start) -> None:
    launched = start("train.py", "--lr", "1", "show")
    assert launched.end() == 0
    assert json.loads(launched.out)["argv"] == [
        *FLAGS,
        "--rdzv-conf=is_host=false",
        "--local-addr=~node-00001",
        *("train.py", "--lr", "1", "show"),
    ]
    assert launched.err == ""


def test_the_agent_has_the_environment_that_lets_nodes_come_back(start: Start) -> None:
    launched = start("train.py", "show")
    assert launched.end() == 0
    environment = json.loads(launched.out)["environment"]
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_what_the_user_set_in_the_environment_stays(start: Start) -> None:
    launched = start("train.py", "show", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="0")
    assert launched.end() == 0
    environment = json.loads(launched.out)["environment"]
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "0"


def test_the_agent_starts_with_no_signal_blocked(start: Start) -> None:
    launched = start("train.py", "show")
    assert launched.end() == 0
    assert json.loads(launched.out)["masked"] == []


@pytest.mark.parametrize("status", [0, 1, 2, *sorted(set(ExitStatus))])
def test_the_agents_status_is_the_launchers(start: Start, status: int) -> None:
    launched = start("train.py", f"exit={status}")
    assert launched.end() == status
    assert launched.err == ""  # the agent has said why


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_an_agent_that_a_signal_ended_is_told_as_a_shell_tells_it(
    start: Start, number: signal.Signals
) -> None:
    launched = start("train.py", f"kill={int(number)}")
    assert launched.end() == 128 + number
    assert number.name in launched.err


@pytest.mark.parametrize("number", sorted(PASSED_ON))
def test_a_signal_is_passed_on_at_once(start: Start, number: signal.Signals) -> None:
    launched = start("train.py", "ends=1")
    launched.until("ready")
    sent = time.monotonic()
    launched.process.send_signal(number)
    assert launched.end() == ExitStatus.PREEMPTED
    assert time.monotonic() - sent < 5
    assert launched.out.splitlines() == ["ready", number.name]
    words = f"{number.name} was received; exit status 12 = preempted"
    assert launched.err == f"muster: {words}\n"


def test_every_signal_of_several_is_passed_on(start: Start) -> None:
    launched = start("--shutdown-timeout=30", "train.py", "report")
    launched.until("ready")
    said = "ready\n"
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        launched.process.send_signal(number)
        said += f"{number.name}\n"
        launched.until(said)
    assert launched.process.poll() is None


def test_an_agent_that_takes_its_shutdown_timeout_is_not_killed_before(start: Start) -> None:
    launched = start("--shutdown-timeout=3", "train.py", "saves=2.5")
    launched.until("ready")
    launched.process.terminate()
    assert launched.end() == ExitStatus.PREEMPTED
    assert launched.out.splitlines()[-1] == "saved"


@pytest.mark.parametrize(
    ("flags", "environment"),
    [(("--shutdown-timeout=2",), {}), ((), {SHUTDOWN_VARIABLE: "2"})],
)
def test_an_agent_that_takes_no_signal_is_killed_after_its_shutdown_timeout(
    start: Start, flags: tuple[str, ...], environment: dict[str, str]
) -> None:
    launched = start(*flags, "train.py", "report", **environment)
    launched.until("ready")
    sent = time.monotonic()
    launched.process.terminate()
    assert launched.end() == ExitStatus.PREEMPTED
    assert 3 <= time.monotonic() - sent < 10
    assert "SIGTERM was received" in launched.err


def test_an_agent_that_ends_well_after_a_signal_has_ended_well(start: Start) -> None:
    launched = start("train.py", "ends=0")
    launched.until("ready")
    launched.process.terminate()
    assert launched.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_start_delay_ends_it_before_the_agent_starts(
    start: Start, number: signal.Signals
) -> None:
    launched = start("train.py", "show", flags=("--nnodes=1000", *FLAGS[1:]), index="999")
    launched.until_it_listens()
    sent = time.monotonic()
    launched.process.send_signal(number)
    assert launched.end() == ExitStatus.PREEMPTED
    assert time.monotonic() - sent < 5
    assert launched.out == ""
    assert f"{number.name} came before the start" in launched.err


def test_a_signal_reaches_an_agent_that_has_no_handler_yet(start: Start) -> None:
    # as one that still imports torch
    launched = start("train.py", "sleep")
    launched.until("ready")
    launched.process.terminate()
    assert launched.end() == ExitStatus.PREEMPTED
    assert "SIGTERM was received" in launched.err


def test_orphans_are_taken_in_and_the_agents_status_is_kept(start: Start) -> None:
    launched = start("train.py", "orphan=10")
    assert launched.end() == 10
    # the agent alone is left of the launcher's children, and no dead orphan
    assert len(launched.out.split()) == 1


def test_the_launcher_stays_while_an_orphan_ends_in_the_start_delay(start: Start) -> None:
    flags = ("--nnodes=65", *FLAGS[1:])
    launched = start("train.py", "show", flags=flags, index="30")
    launched.until_it_listens()
    os.kill(launched.process.pid, signal.SIGCHLD)
    assert launched.end() == 0


def test_ctrl_c_on_a_terminal_comes_to_the_agent_once(start: Start) -> None:
    launched = start("train.py", "ends=1")
    launched.until("ready")
    (agent,) = launched.agents()
    assert os.getpgid(agent) == agent
    assert runs(agent)


# ---- what is wrong before the start --------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (None, "JOB_COMPLETION_INDEX is not set"),
        ("", "JOB_COMPLETION_INDEX is not set"),
        ("one", "JOB_COMPLETION_INDEX is 'one'"),
        ("-1", "JOB_COMPLETION_INDEX is '-1'"),
        ("٣", "JOB_COMPLETION_INDEX is "),
        ("4", "JOB_COMPLETION_INDEX is '4', with --nnodes=4"),
        ("9" * 5000, "JOB_COMPLETION_INDEX is "),
    ],
)
def test_a_pod_without_its_number_is_told_how_it_gets_one(
    start: Start, index: str | None, words: str
) -> None:
    launched = start("train.py", "show", index=index, PYTHONIOENCODING="utf-8")
    assert launched.end() == ExitStatus.USAGE
    assert words in launched.err
    assert "completionMode: Indexed" in launched.err
    assert launched.out == ""


def test_the_last_node_of_an_elastic_job_is_one_of_them(start: Start) -> None:
    assert start("train.py", "exit=0", flags=("--nnodes=2:4", *FLAGS[1:]), index="3").end() == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "needs --nnodes"),
        (FLAGS[1:], "needs --nnodes"),
        (("--nnodes=0", *FLAGS[1:]), "--nnodes '0' asks for no node"),
        (("--nnodes", "two", *FLAGS[1:]), "--nnodes 'two' is neither"),
        ((FLAGS[0], FLAGS[2]), "needs --rdzv-backend=c10d"),
        ((FLAGS[0], "--rdzv-backend=static", FLAGS[2]), "it is 'static'"),
        (FLAGS[:2], "needs --rdzv-endpoint"),
    ],
)
def test_flags_without_which_no_node_would_meet_another_are_asked_for(
    start: Start, flags: tuple[str, ...], words: str
) -> None:
    launched = start("train.py", "show", flags=flags)
    assert launched.end() == ExitStatus.USAGE
    assert words in launched.err
    assert "  do: " in launched.err
    assert "Traceback" not in launched.err
    assert launched.out == ""


def test_a_script_that_is_not_there_is_told_before_the_start(start: Start) -> None:
    launched = start("trian.py", "show")
    assert launched.end() == ExitStatus.USAGE
    assert "there is no script 'trian.py'" in launched.err
    assert launched.out == ""


@pytest.mark.parametrize("switch", ["-m", "--module", "--no-python", "--no_python"])
def test_a_module_or_a_program_is_not_looked_for_as_a_file(start: Start, switch: str) -> None:
    assert start(switch, "no_such_file", "exit=0").end() == 0


def test_wrong_usage_has_one_status_in_all_of_muster() -> None:
    assert int(ExitStatus.USAGE) == int(ExitCode.WRONG_INPUT)


def test_a_cache_of_triton_that_cannot_be_written_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, temporary = tmp_path / "cache", tmp_path / "tmp"
    (cache / "key").mkdir(parents=True)
    (cache / "key/helper.so").write_bytes(b"helper")
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    environment = {"TRITON_CACHE_DIR": str(cache)}
    assert launcher.writable_cache(environment) == {}
    # root may write wherever the filesystem lets it
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    found = launcher.writable_cache(environment)
    assert (Path(found["TRITON_CACHE_DIR"]) / "key/helper.so").read_bytes() == b"helper"
    assert launcher.writable_cache({}) == {}
