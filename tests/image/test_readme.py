"""The README's commands are run, and the commands that its table names exist."""

import re
import subprocess

import pytest
from tests.image.harness import ROOT

README = (ROOT / "README.md").read_text()
# lines that are indented by four spaces, a backslash joins the next one, which has eight
COMMANDS = [
    " ".join(block.replace("\\\n", " ").split())
    for block in re.findall(r"^    \S.*\n(?:^        \S.*\n)*", README, re.MULTILINE)
]


def test_the_readme_shows_these_commands() -> None:
    shown = [command.split()[:2] for command in COMMANDS]
    tasks = ("build", "test", "smoke", "render", "rehearse", "explain")
    assert shown == [*(["./invokew", task] for task in tasks), ["docker", "run"]]
    # this very run
    assert COMMANDS[1] == "./invokew test"


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("command", [COMMANDS[0], COMMANDS[-1]])
def test_a_command_of_the_readme_works(command: str) -> None:
    run(command)


@pytest.mark.usefixtures("built")
def test_the_readmes_nodes_are_ready_and_leave_a_page() -> None:
    page = ROOT / "report.html"
    try:
        assert run(COMMANDS[2]).splitlines()[-1] == "READY"
        assert "<h1>READY</h1>" in page.read_text()
    finally:
        page.unlink(missing_ok=True)


def test_the_readmes_log_is_explained() -> None:
    log = ROOT / "job.log"
    log.write_text("RuntimeError: DataLoader worker (pid 13) is killed by signal: Bus error.\n")
    try:
        assert "[dataloader-bus-error]" in run(COMMANDS[5], status=1)
    finally:
        log.unlink()


@pytest.mark.usefixtures("built")
def test_the_readmes_job_is_written_and_survives_the_loss_of_its_leader() -> None:
    try:
        run(COMMANDS[3])
        assert run(COMMANDS[4]).splitlines()[-1] == "READY"
    finally:
        (ROOT / "demo.yaml").unlink(missing_ok=True)


def run(command: str, status: int = 0) -> str:
    done = subprocess.run(
        ["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout.rstrip()


def test_every_command_of_the_table_exists() -> None:
    named = set(re.findall(r"`\./invokew ([a-z][\w-]*)", README))
    listed = subprocess.run(
        ["./invokew", "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert named <= set(re.findall(r"^  ([\w-]+)", listed.stdout, re.MULTILINE))
