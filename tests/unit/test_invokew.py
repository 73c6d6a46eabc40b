"""The wrapper, really run: one .venv, made once, made whole, made again when it no longer fits.

In Invoke's place stands a wheel of that name, made here, that says how it was called: no index is
needed.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.unit.conftest import ROOT, wait_until

STAND_IN = """
import json, sys
print(json.dumps({"argv": sys.argv[1:], "path": sys.path, "prefix": sys.prefix}))
"""


@dataclass
class Wrapper:
    """A checkout with nothing but the wrapper and its requirements."""

    root: Path
    environment: dict[str, str]

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.root / "invokew"), *words],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *words: str) -> tuple[dict[str, Any], str]:
        """What the stand-in says, and what the wrapper said before."""
        return self.result(self.start(*words))

    def result(self, running: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
        out, err = running.communicate()
        assert running.returncode == 0, err
        said: dict[str, Any] = json.loads(out)
        return said, err

    def begins_to_make(self) -> bool:
        """Whether a start makes .venv; it is killed when it has said so."""
        running = self.start()
        assert running.stderr is not None
        first = running.stderr.readline()
        os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
        return "making" in first

    def require(self, text: str) -> None:
        (self.root / "requirements.txt").write_text(text)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    with zipfile.ZipFile(folder / "invoke-0.0.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("invoke/__init__.py", "")
        wheel.writestr("invoke/__main__.py", STAND_IN)
        info = "invoke-0.0.1.dist-info"
        metadata = "Metadata-Version: 2.1\nName: invoke\nVersion: 0.0.1\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture(scope="module")
def environment(wheels: Path) -> dict[str, str]:
    """This process's, with pip kept to the folder of wheels, and this Python first."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PIP_")}
    base = Path(sys.executable).resolve().parent
    return {
        **kept,
        "PATH": f"{base}{os.pathsep}{os.environ['PATH']}",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(wheels),
    }


def new_checkout(root: Path, wheels: Path, environment: dict[str, str]) -> Wrapper:
    package = root / "src/muster"
    package.mkdir(parents=True)
    # the library's own start, with nothing of the library
    start = 'import runpy\nrunpy.run_module("invoke", run_name="__main__")\n'
    (package / "__main__.py").write_text(start)
    shutil.copy(ROOT / "invokew", root)
    (wheel,) = wheels.glob("*.whl")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    found = Wrapper(root, environment)
    found.require(f"invoke==0.0.1 --hash=sha256:{sha256}\n")
    return found


@dataclass
class Made:
    """A checkout whose .venv two starts at once have made, and what each of them said.

    A copy of it, elsewhere, is started too: that takes its seconds while other tests run.
    """

    wrapper: Wrapper
    said: list[dict[str, Any]]
    before: list[str]
    moved: Wrapper
    moved_start: subprocess.Popen[str]


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, wheels: Path, environment: dict[str, str]
) -> Made:
    folder = tmp_path_factory.mktemp("made")
    wrapper = new_checkout(folder / "a checkout", wheels, environment)
    both = [wrapper.start("build", f"--variant=a {word}") for word in ("b", "c")]
    results = [wrapper.result(each) for each in both]
    moved = Wrapper(folder / "moved", environment)
    shutil.copytree(wrapper.root, moved.root, symlinks=True)
    said, before = [said for said, _ in results], [before for _, before in results]
    return Made(wrapper, said, before, moved, moved.start())


def test_the_first_start_makes_the_venv_and_hands_every_word_on(made: Made) -> None:
    root = made.wrapper.root
    for said, word in zip(made.said, "bc", strict=True):
        assert said["prefix"] == f"{root}/.venv"
        assert said["argv"] == ["--search-root", str(root), "build", f"--variant=a {word}"]


def test_of_two_starts_at_once_one_makes_it(made: Made) -> None:
    making = f"invokew: making {made.wrapper.root}/.venv from requirements.txt\n"
    assert sorted(made.before) == ["", making]


def test_the_next_start_makes_nothing(made: Made) -> None:
    assert made.wrapper.run("build", "--variant=a b") == (made.said[0], "")


def test_new_requirements_make_it_again_whole_even_after_a_kill_in_the_middle(made: Made) -> None:
    wrapper = made.wrapper
    wrapper.require(f"# changed\n{(wrapper.root / 'requirements.txt').read_text()}")
    (installed,) = wrapper.root.glob(".venv/lib/*/site-packages/invoke")
    killed = wrapper.start()
    wait_until(lambda: not installed.exists(), "the making has begun")
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    said, before = wrapper.run("again")
    assert "making" in before
    assert said["argv"][-1] == "again"
    assert wrapper.run()[1] == ""


def test_requirements_that_pip_cannot_install_are_told_and_tried_again(made: Made) -> None:
    made.wrapper.require(f"absent==1.0 --hash=sha256:{'0' * 64}\n")
    running = made.wrapper.start()
    out, err = running.communicate()
    assert (running.returncode, out) == (3, "")
    assert "No matching distribution found for absent==1.0" in err
    assert "invokew: pip could not install requirements.txt; check the network" in err
    assert made.wrapper.begins_to_make()


def test_a_checkout_that_was_moved_uses_its_own_library(made: Made) -> None:
    said, _ = made.moved.result(made.moved_start)
    assert said["prefix"] == f"{made.moved.root}/.venv"
    assert f"{made.moved.root}/src" in said["path"]
    assert not made.moved.begins_to_make()


def test_a_venv_of_another_python_is_made_again(made: Made, tmp_path: Path) -> None:
    # as after an upgrade of the system: the link leads to one that does not see the old packages
    python = made.moved.root / ".venv/bin/python"
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {python.resolve()} "$@"\n')
    other.chmod(0o755)
    python.unlink()
    python.symlink_to(other)
    assert made.moved.begins_to_make()


@pytest.mark.parametrize("found", [None, "exit 1"], ids=["no Python", "an older Python"])
def test_without_a_python_that_will_do_it_is_told_what_is_needed(
    tmp_path: Path, wheels: Path, environment: dict[str, str], found: str | None
) -> None:
    path = tmp_path / "bin"
    path.mkdir()
    # what the wrapper itself uses, without apt-get: nothing can be installed
    for name in ("dirname", "cksum", "id", "cat"):
        program = shutil.which(name)
        assert program is not None
        (path / name).symlink_to(program)
    if found is not None:
        (path / "python3").write_text(f"#!/bin/sh\n{found}\n")
        (path / "python3").chmod(0o755)
    wrapper = new_checkout(tmp_path / "new", wheels, {**environment, "PATH": str(path)})
    running = wrapper.start()
    out, err = running.communicate()
    assert (running.returncode, out) == (3, "")
    assert err.startswith("invokew: needs Python 3.11 or newer with its venv module")
    assert not (wrapper.root / ".venv").exists()
