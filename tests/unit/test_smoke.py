"""The suite's settings, and its report log read into a verdict.

The log is that of a real pytest: steps written for the test, with the suite's own conftest.py, run
by --here. torch is not needed; an empty module of its name lets the interpreter pass.
"""

import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.conftest import ROOT, Recorder, runs, wait_until

from muster import pins, process
from muster.dossier import Dossier
from muster.errors import (
    FloorsWrong,
    MoreProcessesThanGpus,
    MoreRanksThanGpus,
    MusterError,
    NodesWithoutContainers,
    NoStepLeft,
    NoSuchStep,
    NotAFloor,
    NotANumber,
    NotAPython,
    NotASize,
    ShmSizeWithoutContainer,
    StepNeedsNodes,
    SuiteDidNotReport,
    WrongPython,
)
from muster.finding import Outcome, Severity, Verdict
from muster.node import Node
from muster.pins import Pins
from muster.smoke import command
from muster.smoke import settings as wishes
from muster.smoke.command import Among
from muster.smoke.here import here
from muster.smoke.settings import Settings, Wish
from muster.steps import Log
from muster.suite import BY_NAME
from muster.topology import Topology

CPU = Node(gpus=0, infiniband=False)
SETTINGS = Settings(Topology(1, 2), 2**30, "docker/pins.toml", None)

# ---- what the user wishes -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def pinned() -> Pins:
    return pins.read(ROOT / "docker")


def settings(pinned: Pins, wish: Wish, gpus: int = 0, variant: str = "cu13") -> Settings:
    return wishes.settings(pinned, pinned.variant(variant), Node(gpus, infiniband=False), wish)


def test_without_a_wish_the_pins_decide(pinned: Pins) -> None:
    assert settings(pinned, Wish()) == SETTINGS


@pytest.mark.parametrize(
    ("variant", "gpus", "wish", "nproc_per_node"),
    [
        ("cu13", 8, None, 8),
        ("cu13", 8, "3", 3),
        ("cu13", 8, "8", 8),
        ("cu13", 0, None, 2),
        ("cu13", 0, "5", 5),
        ("cpu", 8, None, 2),
        ("cpu", 1, "5", 5),
    ],
)
def test_ranks_are_one_a_gpu_and_two_without(
    pinned: Pins, variant: str, gpus: int, wish: str | None, nproc_per_node: int
) -> None:
    found = settings(pinned, Wish(nproc_per_node=wish), gpus, variant)
    assert found.topology == Topology(1, nproc_per_node)


def test_a_wish_for_shm_and_time_is_kept_and_named(pinned: Pins) -> None:
    found = settings(pinned, Wish(shm_size="64m", step_timeout="7"))
    assert (found.shm_bytes, found.shm_named_by, found.step_timeout_s) == (2**26, "--shm-size", 7)


@pytest.mark.parametrize(
    ("wish", "error", "says"),
    [
        (Wish(nproc_per_node="0"), NotANumber, "--nproc-per-node '0'"),
        (Wish(nproc_per_node="-1"), NotANumber, "--nproc-per-node '-1'"),
        (Wish(nproc_per_node="two"), NotANumber, "--nproc-per-node 'two'"),
        (Wish(nproc_per_node=""), NotANumber, "--nproc-per-node ''"),
        (Wish(nproc_per_node="5"), MoreProcessesThanGpus, "--nproc-per-node 5 .* 4 GPUs"),
        (Wish(step_timeout="0.5"), NotANumber, "--step-timeout '0.5'"),
        (Wish(shm_size="banana"), NotASize, "'banana'"),
        (Wish(shm_size="0"), NotASize, "'0'"),
        (Wish(nnodes="0"), NotANumber, "--nnodes '0'"),
        (Wish(nnodes="1:2"), NotANumber, "--nnodes '1:2'"),
        (Wish(nnodes="5"), MoreRanksThanGpus, "--nnodes 5 with --nproc-per-node 1 .* 4 GPUs"),
        (Wish("3", nnodes="2"), MoreRanksThanGpus, "--nnodes 2 with --nproc-per-node 3 .* 4 GPUs"),
        (Wish(only="nosuch"), NoSuchStep, "no step 'nosuch'\n.* versions, .*nodes_bandwidth"),
        (Wish(skip="versions,nosuch"), NoSuchStep, "no step 'nosuch'"),
        (Wish(only="versions,pairs"), StepNeedsNodes, "pairs is between nodes.*\n.*--nnodes 2"),
        (Wish(only="versions", skip="versions"), NoStepLeft, "no step .* is left"),
        (Wish(floor="0"), NotAFloor, "--floor '0'"),
        (Wish(floor="-3"), NotAFloor, "--floor '-3'"),
        (Wish(floor="nan"), NotAFloor, "--floor 'nan'"),
        (Wish(floor="inf"), NotAFloor, "--floor 'inf'"),
        (Wish(floor="nosuch.toml"), FloorsWrong, "nosuch.toml: No such file"),
        (Wish(floor="."), FloorsWrong, "Is a directory"),
    ],
)
def test_a_wrong_wish_is_refused_with_its_flag(
    pinned: Pins, wish: Wish, error: type[MusterError], says: str
) -> None:
    with pytest.raises(error, match=says):
        settings(pinned, wish, gpus=4)


def test_nodes_on_this_machine_share_its_gpus_out(pinned: Pins) -> None:
    assert settings(pinned, Wish(nnodes="2"), gpus=8).topology == Topology(2, 4)
    assert settings(pinned, Wish(nnodes="3"), gpus=8).topology == Topology(3, 2)
    assert settings(pinned, Wish(nnodes="3"), variant="cpu").topology == Topology(3, 2)


def test_all_steps_of_one_node_are_not_named_one_by_one(pinned: Pins) -> None:
    # steps of a site's own that lie beside them run too
    assert settings(pinned, Wish()).steps is None
    assert settings(pinned, Wish(nnodes="1")).steps is None


def test_chosen_steps_are_named_in_the_order_of_the_plan(pinned: Pins) -> None:
    found = settings(pinned, Wish(only=" all_reduce , versions,,devices", skip="devices"))
    assert found.steps == ("versions", "all_reduce")


def test_several_nodes_have_steps_between_them(pinned: Pins) -> None:
    found = settings(pinned, Wish(nnodes="2", quick=True))
    assert found.steps is not None
    assert found.steps[0] == "versions"
    assert found.steps[-2:] == ("nodes_meet", "nodes_all_reduce")


def test_a_floor_is_gb_s_or_the_text_of_a_file(pinned: Pins, tmp_path: Path) -> None:
    assert settings(pinned, Wish(floor="12.5")).floors == "12.5"
    path = tmp_path / "floors.toml"
    path.write_text((ROOT / "src/muster/bandwidth/floors.toml").read_text())
    assert settings(pinned, Wish(floor=str(path))).floors == path.read_text()
    path.write_text("floor = 3")
    with pytest.raises(FloorsWrong, match=r"floors\.toml: "):
        settings(pinned, Wish(floor=str(path)))


def test_the_command_to_repeat_has_every_flag_but_those_of_steps_and_files(pinned: Pins) -> None:
    wish = Wish("2", "1g", "7", "2", only="pairs", skip="memlock", quick=True, floor="300")
    found = wishes.settings(pinned, pinned.variant("cpu"), CPU, wish, ["--variant", "cpu"])
    assert found.repeat == (
        "./invokew smoke --variant cpu --nnodes 2 --nproc-per-node 2 --shm-size 1g"
        " --step-timeout 7 --floor 300"
    )


# ---- the report log -----------------------------------------------------------------------------

Suite = Callable[..., Dossier]


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: Recorder) -> Suite:
    """Runs a step file as the smoke suite of a checkout of its own."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "train").mkdir()
    (tmp_path / "src").symlink_to(ROOT / "src")
    (tmp_path / "stand-in").mkdir()
    (tmp_path / "stand-in/torch.py").touch()
    shutil.copytree(
        ROOT / "tests/smoke",
        tmp_path / "tests/smoke",
        ignore=shutil.ignore_patterns("test_*.py", "__pycache__"),
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stand-in"))

    def run(steps: str, chosen: Settings = SETTINGS, node: Node = CPU) -> Dossier:
        (tmp_path / "tests/smoke/test_steps.py").write_text(steps)
        return here(tmp_path, sys.executable, node, chosen, "./invokew smoke --here", progress)

    return run


STEPS = """
import os, sys, time
import pytest

def test_good(step):
    os.write(1, b"to descriptor 1\\n")
    print("to stderr", file=sys.stderr)
    step.measure("3 [of] 3")

def test_warned(step):
    step.warn(what="low", evidence="e", cause="c", remedy="r")

def test_elsewhere(step):
    pytest.skip("no InfiniBand here")
"""

FAILING = """
def test_foreseen(step):
    step.fail(what="too small", evidence="e", cause="c", remedy="r")

def test_unforeseen(step):
    raise ValueError("first line\\nsecond line")
"""


OUTPUT_TELLS = """
def test_loader(step):
    step.run(["echo", "RuntimeError: DataLoader worker (pid 13) is killed by signal: Bus error."])
    step.fail(what="too small", evidence="e", cause="c", remedy="r")
"""


def test_steps_become_outcomes_measures_and_warnings(suite: Suite, progress: Recorder) -> None:
    result = suite(STEPS)
    assert result.verdict is Verdict.READY
    good, warned, elsewhere = result.steps
    assert [step.name for step in result.steps] == ["good", "warned", "elsewhere"]
    assert (good.outcome, good.measure, good.findings) == (Outcome.PASSED, "3 [of] 3", ())
    assert "to descriptor 1" in good.output
    assert "to stderr" in good.output
    assert (good.limit_s, warned.limit_s) == (30, 30)
    # which is in no plan, so that it cannot be chosen
    assert good.command == "./invokew smoke"
    assert 0 <= good.seconds <= result.seconds
    assert (elsewhere.outcome, elsewhere.measure) == (
        Outcome.NOT_APPLICABLE,
        "no InfiniBand here",
    )
    (low,) = result.findings
    assert warned.findings == (low,)
    assert (warned.outcome, low.severity, low.where) == (Outcome.PASSED, Severity.WARNING, "warned")
    assert progress.details[:2] == ["step good", "step warned"]
    assert progress.said[0].startswith("good: passed, ")
    assert result.run == {"python": sys.executable, "nproc_per_node": "2"}
    assert (result.command_line, result.image) == ("./invokew smoke --here", None)
    assert [(node.host, node.missing) for node in result.nodes] == [(socket.gethostname(), None)]


def test_a_step_that_fails_has_the_cause_that_its_output_shows(suite: Suite) -> None:
    (finding,) = suite(OUTPUT_TELLS).findings
    assert (finding.what, finding.evidence) == ("too small", "e")
    assert "[dataloader-bus-error]" in finding.cause
    assert "--shm-size" in finding.remedy
    assert finding.remedy.endswith("\nr")


def test_failures_make_it_not_ready_each_with_its_finding(suite: Suite) -> None:
    result = suite(FAILING)
    assert result.verdict is Verdict.NOT_READY
    assert [step.outcome for step in result.steps] == [Outcome.FAILED, Outcome.FAILED]
    foreseen, unforeseen = result.findings
    assert (foreseen.what, foreseen.where) == ("too small", "foreseen")
    assert unforeseen.what == "the step unforeseen itself broke off: ValueError: first line"
    assert "second line" in unforeseen.evidence
    assert {foreseen.severity, unforeseen.severity} == {Severity.ERROR}


@pytest.mark.parametrize(
    "steps",
    [
        "import pytest\n@pytest.fixture\ndef a(): 1 / 0\ndef test_a(step, a): ...",
        "import pytest\n@pytest.fixture\ndef a():\n    yield\n    1 / 0\ndef test_a(step, a): ...",
        "import pytest\ndef test_a(step): pytest.exit('enough')",
    ],
    ids=["in a fixture", "after a step", "by an exit"],
)
def test_a_suite_that_breaks_is_never_ready(suite: Suite, steps: str) -> None:
    assert suite(steps).verdict is Verdict.NOT_READY


@pytest.mark.parametrize(
    ("steps", "says"),
    [("import no_such_library\ndef test_a(step): ...", "no_such_library"), ("", "exit code 5")],
    ids=["that cannot be imported", "without any step"],
)
def test_a_suite_gives_no_verdict(suite: Suite, steps: str, says: str) -> None:
    with pytest.raises(SuiteDidNotReport, match=says):
        suite(steps)


@pytest.mark.parametrize(
    ("steps", "where", "when"),
    [
        ("def test_good(step): ...\ndef test_bad(step): kill()", "bad", "during bad"),
        (
            "@pytest.fixture\ndef a():\n    yield\n    kill()\ndef test_good(step, a): ...",
            "between two steps",
            "between two steps",
        ),
    ],
)
def test_a_suite_that_is_killed_says_in_which_step(
    suite: Suite, steps: str, where: str, when: str
) -> None:
    result = suite(f"import os, pytest\ndef kill(): os.kill(os.getpid(), 9)\n{steps}")
    assert result.verdict is Verdict.NOT_READY
    assert [step.name for step in result.steps] == ["good"]
    (finding,) = result.findings
    assert finding.where == where
    assert finding.what.startswith(f"the suite broke off {when} (")
    assert "report_type" not in finding.evidence


def test_a_suite_that_cannot_start_says_its_last_words(suite: Suite, tmp_path: Path) -> None:
    (tmp_path / "tests/smoke/conftest.py").write_text("raise RuntimeError('no such thing')")
    with pytest.raises(SuiteDidNotReport, match=r"(?s)exit code 4.*no such thing"):
        suite(STEPS)


def test_the_settings_reach_the_suite(suite: Suite) -> None:
    shown = """
def test_shown(request, step):
    step.measure(" ".join(str(request.config.getoption(name)) for name in
        ("--nproc-per-node", "--step-timeout", "--infiniband", "--shm-bytes", "--floors",
         "--nodes-floor", "--on-purpose", "--nodes", "--train")))
"""
    chosen = Settings(
        *(Topology(1, 5), 2**30, "docker/pins.toml", 9),
        floors="300",
        on_purpose=("NCCL_DEBUG",),
        nodes_floor_gb_s=40.5,
    )
    (step,) = suite(shown, chosen, Node(gpus=0, infiniband=True)).steps
    *told, train = step.measure.split()
    flags = ["5", "9.0", "True", str(2**30), "300", "40.5", "['NCCL_DEBUG']"]
    assert told == [*flags, socket.gethostname()]
    assert train.endswith("/train")
    assert step.limit_s == 9


def test_a_step_that_hangs_is_ended_and_the_next_one_runs(suite: Suite) -> None:
    hangs = """
def test_hangs(step):
    done = step.run(["sh", "-c", "echo begun; exec sleep 60"])
    assert done.timed_out
    step.measure(done.output)

def test_next(step): ...
"""
    result = suite(hangs, Settings(Topology(1, 2), 2**30, "", 1))
    assert [(step.name, step.measure) for step in result.steps] == [
        ("hangs", "begun"),
        ("next", ""),
    ]
    assert 1 <= result.steps[0].seconds < 30


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """As many open files as a program that starts Muster may hold."""
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    yield
    for each in held:
        os.close(each)


@pytest.mark.usefixtures("many_descriptors")
def test_the_report_comes_through_whatever_else_is_open(suite: Suite) -> None:
    assert len(suite(STEPS).steps) == 3


@pytest.mark.timeout(60)
def test_a_suite_that_says_much_at_its_end_does_not_hang(suite: Suite) -> None:
    result = suite("""
import atexit, os
def test_good(step):
    atexit.register(os.write, 2, b"x" * 200_000)
""")
    assert result.verdict is Verdict.READY


def test_an_interruption_ends_the_suite(suite: Suite, tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(_number: int, _frame: object) -> None:
        raise Interrupted

    def send() -> None:
        wait_until((tmp_path / "pid").is_symlink, "the step has begun")
        os.kill(os.getpid(), signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, interrupt)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(Interrupted):
            suite(f"""
import os, time
def test_sleeps(step):
    os.symlink(str(os.getpid()), {str(tmp_path / "pid")!r})
    time.sleep(60)
""")
    finally:
        sender.join()
        signal.signal(signal.SIGALRM, before)
    assert not runs(int((tmp_path / "pid").readlink().name))


def test_other_words_among_the_report_are_passed_over(suite: Suite) -> None:
    (step,) = suite(r"""
import os
def test_good(step):
    os.write(3, b'NCCL WARN\n3\nnull\n"{"\n[]\n\xff\n')
""").steps
    assert step.outcome is Outcome.PASSED


def test_what_the_steps_leave_in_tmpdir_is_gone(suite: Suite) -> None:
    (step,) = suite("import tempfile\ndef test_a(step): step.measure(tempfile.mkdtemp())").steps
    assert Path(step.measure).is_absolute()
    assert not Path(step.measure).exists()


def test_a_size_of_dev_shm_needs_a_container(suite: Suite) -> None:
    with pytest.raises(ShmSizeWithoutContainer):
        suite(STEPS, Settings(Topology(1, 2), 2**30, "--shm-size", None))


def test_several_nodes_need_containers(suite: Suite) -> None:
    with pytest.raises(NodesWithoutContainers, match=r"--nnodes 2 .* --here has none"):
        suite(STEPS, Settings(Topology(2, 2), 2**30, "docker/pins.toml", None))


# ---- the plan in the suite ----------------------------------------------------------------------

WELL = """
def test_own(step): ...
def test_elastic_nodes(step): ...
def test_subgroups(step): ...
def test_dataloader_shm(step): ...
def test_elastic_restart(step): ...
def test_versions(step): ...
"""
FAILS = "step.fail(what='a rank is missing', evidence='e', cause='c', remedy='r')"


def outcomes(dossier: Dossier) -> dict[str, Outcome]:
    return {step.name: step.outcome for step in dossier.steps}


def test_steps_run_in_the_order_of_the_plan_and_those_that_it_lacks_last(suite: Suite) -> None:
    assert list(outcomes(suite(WELL))) == [
        "versions",
        "subgroups",
        "dataloader_shm",
        "elastic_restart",
        "elastic_nodes",
        "own",
    ]


@pytest.mark.parametrize(
    "failing",
    [
        f"def test_all_reduce(step): {FAILS}",
        "def test_all_reduce(step): raise ValueError",
        "import pytest\n@pytest.fixture\ndef a(): 1 / 0\ndef test_all_reduce(step, a): ...",
    ],
    ids=["as foreseen", "by an exception", "in a fixture"],
)
def test_what_stands_on_a_failed_step_is_not_run_and_says_why(suite: Suite, failing: str) -> None:
    result = suite(f"{WELL}{failing}")
    assert outcomes(result) == {
        "versions": Outcome.PASSED,
        "all_reduce": Outcome.FAILED,
        "subgroups": Outcome.NOT_RUN,
        "dataloader_shm": Outcome.PASSED,
        "elastic_restart": Outcome.NOT_RUN,
        # which stands on elastic_restart alone
        "elastic_nodes": Outcome.NOT_RUN,
        "own": Outcome.PASSED,
    }
    why = {step.measure for step in result.steps if step.outcome is Outcome.NOT_RUN}
    assert why == {"all_reduce failed, and this stands on it"}
    assert result.verdict is Verdict.NOT_READY
    assert [finding.where for finding in result.findings] == ["all_reduce"]


def test_a_step_that_does_not_apply_holds_nothing_up(suite: Suite) -> None:
    result = suite(f"{WELL}import pytest\ndef test_all_reduce(step): pytest.skip('no ranks')")
    assert outcomes(result).pop("all_reduce") is Outcome.NOT_APPLICABLE
    assert outcomes(result)["elastic_nodes"] is Outcome.PASSED
    assert result.verdict is Verdict.READY


def test_chosen_steps_run_alone_without_what_they_stand_on(suite: Suite) -> None:
    chosen = replace(SETTINGS, steps=("versions", "elastic_nodes"))
    result = suite(f"{WELL}def test_all_reduce(step): {FAILS}", chosen)
    assert outcomes(result) == {"versions": Outcome.PASSED, "elastic_nodes": Outcome.PASSED}


def test_a_step_of_the_plan_is_repeated_alone(suite: Suite) -> None:
    (step,) = suite("def test_versions(step): ...", replace(SETTINGS, repeat="smoke --slim")).steps
    assert step.command == "smoke --slim --only versions"


def test_nodes_without_a_step_between_them_do_not_meet(
    suite: Suite, tmp_path: Path, progress: Recorder
) -> None:
    # the stand-in for torch has no store to meet in
    suite("def test_memlock(step): step.measure(step.host)")
    log = Log(progress)
    argv = command.suite(
        replace(SETTINGS, topology=Topology(2, 2), steps=("memlock",)),
        Among(("node-0", "node-1"), 1),
        python=sys.executable,
        root=tmp_path,
        folder="tests/smoke",
        infiniband=False,
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'src'}:{tmp_path / 'stand-in'}"}
    process.run(argv, limit_s=60, env=environment, on_line=log.read_line)
    assert log.is_whole
    assert [step.measure for step in log.steps] == ["node-1"]


def test_a_choice_without_a_step_of_this_node_is_known_by_its_end(suite: Suite) -> None:
    # as of the second of two containers that are to do what one machine does once
    with pytest.raises(SuiteDidNotReport, match="exit code 5"):
        suite(WELL, replace(SETTINGS, steps=()))


def test_in_the_image_something_ends_a_suite_that_nobody_ends() -> None:
    argv = command.in_image(SETTINGS, Among(("vm",)), infiniband=True)
    assert argv[:3] == ["timeout", "--kill-after=10", str(command.SUITE_LIMIT_S)]
    assert argv[7:11] == ["python", "-m", "pytest", "/opt/muster/smoke"]
    assert "--infiniband" in argv


def test_a_step_has_the_limit_of_the_plan_unless_one_is_given_for_all(suite: Suite) -> None:
    steps = "def test_nccl_tests(step): step.measure(f'{step.limit_s:g}')\ndef test_own(step): ..."
    own, given = suite(steps), suite(steps, replace(SETTINGS, step_timeout_s=7))
    assert [step.limit_s for step in own.steps] == [BY_NAME["nccl_tests"].limit_s, 30]
    assert [step.limit_s for step in given.steps] == [7, 7]
    assert [run.steps[0].measure for run in (own, given)] == ["900", "7"]


# ---- the interpreter ----------------------------------------------------------------------------


def test_an_interpreter_without_the_suite_s_needs_is_told_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: Recorder
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    needed = "torch, pytest, pytest-timeout, pytest-reportlog"
    with pytest.raises(WrongPython, match=rf"cannot import {needed}"):
        here(ROOT, str(bare), CPU, SETTINGS, "", progress)


@pytest.mark.parametrize(
    ("script", "why"),
    [(None, "No such file"), ("#!/bin/sh\nexit 3\n", "exit code 3"), ("\x7fELF", "Exec format")],
)
def test_what_is_no_interpreter_is_refused(
    tmp_path: Path, progress: Recorder, script: str | None, why: str
) -> None:
    python = tmp_path / "python"
    if script is not None:
        python.write_text(script)
        python.chmod(0o755)
    with pytest.raises(NotAPython, match=why):
        here(ROOT, str(python), CPU, SETTINGS, "", progress)
