"""The commands as a user runs them: exit code, one message with its remedy, never a traceback."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from tests.unit.conftest import ROOT, runs, wait_until

Done = subprocess.CompletedProcess[str]

GOOD = 'def test_good(step): step.measure("fine")\n'
BAD = 'def test_bad(step): step.fail(what="too small", evidence="e", cause="c", remedy="r")\n'
SLEEPS = """
import os, pathlib, subprocess, sys, time
def test_sleeps(step):
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    pids = f"{os.getpid()} {started.pid}"
    pathlib.Path(__file__).with_name("pids.tmp").write_text(pids)
    pathlib.Path(__file__).with_name("pids.tmp").rename(pathlib.Path(__file__).with_name("pids"))
    time.sleep(60)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """tasks.py and what it reads, with one step of its own; the library is this repository's."""
    folder = tmp_path / "checkout"
    (folder / "train").mkdir(parents=True)
    shutil.copy(ROOT / "tasks.py", folder)
    shutil.copytree(ROOT / "docker", folder / "docker")
    ignored = shutil.ignore_patterns("test_*.py", "__pycache__")
    shutil.copytree(ROOT / "tests/smoke", folder / "tests/smoke", ignore=ignored)
    (folder / "tests/smoke/test_step.py").write_text(GOOD)
    (folder / "src").symlink_to(ROOT / "src")
    # an empty module in torch's place lets --here take this interpreter
    (folder / "stand-in").mkdir()
    (folder / "stand-in/torch.py").touch()
    return folder


def start(checkout: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(checkout / "src"), str(checkout / "stand-in")])
    return subprocess.Popen(
        [sys.executable, "-m", "muster", *words],
        cwd=checkout,
        env={
            **{name: text for name, text in os.environ.items() if name != "FORCE_COLOR"},
            "DOCKER_HOST": "unix:///nonexistent",
            "PYTHONPATH": path,
            **environment,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(checkout: Path, *words: str, **environment: str) -> Done:
    running = start(checkout, *words, **environment)
    out, err = running.communicate(timeout=60)
    return Done(running.args, running.returncode, out, err)


def assert_refused(done: Done, code: int, says: str) -> None:
    """One message and its remedy, on standard error alone."""
    assert (done.returncode, done.stdout) == (code, "")
    assert re.search(says, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    message, remedy = done.stderr.splitlines()
    assert message.startswith("muster: ")
    assert re.match(r"  do: \S", remedy)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("build --variant=tpu", r"no variant 'tpu'\n  do: use one of: .*cpu"),
        ("smoke --nproc-per-node=-1", r"--nproc-per-node '-1' is not a whole number above 0"),
        ("smoke --nproc-per-node=two", r"--nproc-per-node 'two'"),
        ("smoke --shm-size=banana", r"'banana' is not a size\n  do: write .*64m"),
        ("smoke --json=/nonexistent/a.json", r"cannot write /nonexistent/a\.json: there is no"),
        ("smoke --junit=/nonexistent/a.xml", r"cannot write /nonexistent/a\.xml"),
        ("smoke --html=/nonexistent/a.html", r"cannot write /nonexistent/a\.html: there is no"),
        ("smoke --here=/nonexistent/python", r"/nonexistent/python does not run \(No such file"),
        ("smoke --only nosuch", r"no step 'nosuch'\n  do: its steps are: versions, .*, pairs, "),
        ("smoke --skip versions,nosuch", r"no step 'nosuch'\n  do: its steps are: versions, "),
        ("smoke --only pairs", r"step pairs is between nodes.*\n  do: .*--nnodes 2"),
        ("smoke --only image --skip image", r"no step of the smoke suite is left"),
        ("smoke --step-timeout 0", r"--step-timeout '0' is not a whole number above 0"),
        ("smoke --floor 0", r"--floor '0' is not a bandwidth.*\n  do: give GB/s above 0"),
        ("smoke --floor nosuch.toml", r"nosuch\.toml: No such file.*\n  do: .*floors\.toml shows"),
        ("smoke --floor docker/pins.toml", r"docker/pins\.toml: "),
        ("smoke --nnodes 0", r"--nnodes '0' is not a whole number above 0"),
        ("smoke --nnodes 1:2", r"--nnodes '1:2' is not a whole number"),
        ("smoke --here --nnodes 2", r"--nnodes 2 stands for nodes by containers"),
        ("smoke --here --shm-size 1g", r"--shm-size.*\n  do: "),
    ],
)
def test_what_the_user_gave_is_refused_with_2(checkout: Path, command: str, says: str) -> None:
    assert_refused(run(checkout, *command.split()), 2, says)


def test_broken_pins_are_refused_with_2(checkout: Path) -> None:
    (checkout / "docker/pins.toml").write_text("schema = 1\n")
    says = r"pins\.toml: the file lacks bases, nccl_tests, run, variants"
    assert_refused(run(checkout, "build"), 2, says)


@pytest.mark.parametrize("command", ["engine", "build", "smoke"])
def test_no_engine_is_told_with_3(checkout: Path, command: str) -> None:
    done = run(checkout, command)
    assert_refused(done, 3, r"no Docker Engine answers .*unix:///nonexistent")


def test_an_interpreter_without_torch_is_told_with_2(checkout: Path) -> None:
    (checkout / "stand-in/torch.py").unlink()
    done = run(checkout, "smoke", f"--here={sys.executable}")
    assert_refused(done, 2, r"cannot import torch\n  do: .*-m pip install torch")


@pytest.mark.parametrize("package", ["docker", "pynvml"])
def test_a_package_that_is_missing_leads_to_the_wrapper(tmp_path: Path, package: str) -> None:
    # every installed package but that one; in the root lies a folder that is called docker
    (tmp_path / "site").mkdir()
    installed = Path(pytest.__file__).parents[1]
    for path in installed.iterdir():
        if path.stem != package:
            (tmp_path / "site" / path.name).symlink_to(path)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "invoke", "engine"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{tmp_path / 'site'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "")
    says = rf"muster: the package {package} is missing: run \./invokew in place of invoke\n"
    assert re.fullmatch(says, done.stderr), done.stderr


# ---- a suite that runs --------------------------------------------------------------------------


def test_ready_is_0_and_the_last_word(checkout: Path, tmp_path: Path) -> None:
    files = tmp_path / "out.json", tmp_path / "out.xml"
    done = run(checkout, "smoke", "--here", f"--json={files[0]}", f"--junit={files[1]}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "READY"
    assert "\x1b" not in done.stdout
    assert json.loads(files[0].read_text())["verdict"] == "READY"
    assert ET.parse(files[1]).find(".//testcase[@name='good']") is not None


def test_not_ready_is_1_and_the_last_word(checkout: Path, tmp_path: Path) -> None:
    (checkout / "tests/smoke/test_step.py").write_text(BAD)
    done = run(checkout, "smoke", "--here", f"--json={tmp_path / 'out.json'}")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[-1] == "NOT READY"
    assert "error in bad: too small" in done.stdout
    assert json.loads((tmp_path / "out.json").read_text())["findings"][0]["what"] == "too small"


def test_chosen_steps_and_what_is_kept_of_them(checkout: Path, tmp_path: Path) -> None:
    (checkout / "tests/smoke/test_step.py").write_text(
        "def test_memlock(step): step.measure('locked')\n"
        "def test_versions(step): step.measure('torch')\n"
        f"{GOOD}"
    )
    kept, page = tmp_path / "out.json", tmp_path / "out.html"
    words = ["--here", "--variant", "cpu", "--step-timeout", "9", "--only", "memlock,versions"]
    words += [f"--json={kept}", f"--html={page}"]
    done = run(checkout, "smoke", *words)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(kept.read_text())
    assert [(step["name"], step["limit_s"]) for step in report["steps"]] == [
        ("versions", 9),
        ("memlock", 9),
    ]
    # by this interpreter, whichever the next ./invokew has
    how = f"./invokew smoke --variant=cpu --here={sys.executable} --step-timeout 9"
    assert report["steps"][1]["command"] == f"{how} --only memlock"
    assert report["command_line"] == f"./invokew smoke {' '.join(words)}"
    assert f"{how} --only memlock" in page.read_text()


def test_a_reader_that_goes_ends_it_without_a_word(checkout: Path) -> None:
    running = start(checkout, "smoke", "--here")
    assert running.stdout is not None
    assert running.stderr is not None
    running.stdout.close()
    assert (running.stderr.read(), running.wait()) == ("", 128 + signal.SIGPIPE)
    running.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_in_order(checkout: Path, number: signal.Signals) -> None:
    (checkout / "tests/smoke/test_step.py").write_text(SLEEPS)
    running = start(checkout, "smoke", "--here")
    pids = checkout / "tests/smoke/pids"
    wait_until(pids.exists, "the step has begun")
    running.send_signal(number)
    out, err = running.communicate(timeout=20)
    assert running.returncode == 128 + number
    assert err == "muster: interrupted; nothing was left behind\n"
    assert "READY" not in out
    assert [pid for pid in map(int, pids.read_text().split()) if runs(pid)] == []


def test_every_task_says_in_its_first_line_what_it_does_and_how_long() -> None:
    done = run(ROOT, "--list", "--list-format=json")
    tasks = {each["name"]: each["help"] for each in json.loads(done.stdout)["tasks"]}
    assert {"build", "smoke", "engine", "test", "lint"} <= tasks.keys()
    for name, line in tasks.items():
        assert re.fullmatch(r"[A-Z].*\.", line), name
        assert re.search(r"second|[Mm]inute|[Hh]our", line), name


@pytest.mark.parametrize(("turned_off", "kept"), [("", True), ("1", False)])
def test_a_start_leaves_byte_code_to_the_next_unless_that_is_turned_off(
    checkout: Path, tmp_path: Path, turned_off: str, kept: bool
) -> None:
    folder = tmp_path / "byte-code"
    environment = {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": turned_off}
    assert run(checkout, "--list", **environment).returncode == 0
    own = folder.joinpath(*checkout.parts[1:])  # Invoke has a tasks.py too
    assert any(own.glob("tasks.*.pyc")) is kept
