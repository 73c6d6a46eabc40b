"""Suites that run at the same time, each read to its end; what a reader meets comes to the caller.

Most are processes, which say what a report log would.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from tests.unit.conftest import Recorder

from muster import process
from muster.errors import EngineLost
from muster.finding import Outcome
from muster.smoke.listen import listen


@dataclass
class Program:
    """A suite that is a Python program."""

    code: str
    stderr: list[str] = field(default_factory=list)
    during: str = ""
    returncode: int | None = None

    def lines(self) -> Iterator[str]:
        with subprocess.Popen(
            [sys.executable, "-c", f"import sys, time\n{self.code}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as child:
            assert child.stdout is not None
            assert child.stderr is not None
            yield from child.stdout
            self.stderr += child.stderr.read().splitlines()
        self.returncode = child.returncode

    def ending(self, during: str) -> str:
        self.during = during
        assert self.returncode is not None
        return process.ending(self.returncode)


@dataclass
class Script:
    """A suite that does what it is told when its lines are read."""

    read: Callable[[], Iterator[str]]
    stderr: Sequence[str] = ()

    def lines(self) -> Iterator[str]:
        return self.read()

    def ending(self, during: str) -> str:
        return f"ended, {during}"


def entry(kind: str, **fields: object) -> str:
    return json.dumps({"$report_type": kind, **fields})


def report(name: str, when: str = "call", **properties: object) -> str:
    return entry(
        "TestReport",
        nodeid=f"test_steps.py::test_{name}",
        when=when,
        outcome="passed",
        longrepr=None,
        duration=0.5,
        sections=[],
        user_properties=list(properties.items()),
    )


def finish(exit_status: int = 0) -> str:
    return entry("SessionFinish", exitstatus=exit_status)


def saying(*lines: str) -> str:
    return "\n".join(f"print({line!r}, flush=True)" for line in lines)


# ---- to their ends -----------------------------------------------------------------------------


def test_a_suite_is_heard_to_its_end_with_its_last_words(progress: Recorder) -> None:
    code = saying("not of the log", report("versions", measure="torch 2.13"), finish(1))
    suite = Program(f"{code}\nprint('last words', file=sys.stderr)\nsys.exit(1)")
    (heard,) = listen({"vm": suite}, "./invokew smoke --here", progress)
    assert (heard.host, heard.ending, heard.errors) == ("vm", "exit code 1", ["last words"])
    assert suite.during == "the smoke suite"
    assert heard.log.exit_status == 1
    (step,) = heard.log.steps
    assert (step.outcome, step.measure) == (Outcome.PASSED, "torch 2.13")
    assert step.command == "./invokew smoke --here --only versions"


def test_a_suite_alone_is_told_without_its_name_and_several_with_theirs() -> None:
    one, several = Recorder(), Recorder()
    code = saying(report("versions", "setup"), report("versions"), finish())
    listen({"vm": Program(code)}, "", one)
    listen({"node-0": Program(code), "node-1": Program("")}, "", several)
    assert (one.said, one.details) == (["versions: passed, 0.5 s. "], ["step versions"])
    assert several.said == ["node-0: versions: passed, 0.5 s. "]
    assert several.details == ["node-0: step versions"]


def test_suites_run_at_the_same_time_and_each_keeps_its_order(progress: Recorder) -> None:
    together = threading.Barrier(3, timeout=60)

    def lines() -> Iterator[str]:
        for number in range(50):
            if number % 10 == 0:
                together.wait()
            yield report(f"step_{number}")
        yield finish()

    heard = listen({f"node-{rank}": Script(lines) for rank in range(3)}, "", progress)
    assert [each.host for each in heard] == ["node-0", "node-1", "node-2"]
    for each in heard:
        assert [step.name for step in each.log.steps] == [f"step_{n}" for n in range(50)]
        assert each.missing is None


def test_a_suite_that_is_killed_is_heard_and_so_are_the_others(progress: Recorder) -> None:
    killed = saying(report("versions"), report("memlock", "setup"))
    suites = {
        "node-0": Program(saying(report("versions"), report("memlock"), finish())),
        "node-1": Program(f"import os\n{killed}\nos.kill(os.getpid(), 9)"),
    }
    well, gone = listen(suites, "", progress)
    assert well.missing is None
    assert [step.name for step in well.log.steps] == ["versions", "memlock"]
    assert gone.missing is not None
    assert gone.missing.startswith("its suite broke off during memlock (")
    assert [step.name for step in gone.log.steps] == ["versions"]


def test_a_suite_that_never_says_anything_is_waited_for_until_it_ends(progress: Recorder) -> None:
    (heard,) = listen({"vm": Program("sys.exit(4)")}, "", progress)
    assert (heard.ending, heard.log.steps, heard.log.exit_status) == ("exit code 4", [], None)


# ---- what a reader meets -----------------------------------------------------------------------


@pytest.mark.parametrize("error", [EngineLost("the smoke suite", "EOF"), KeyboardInterrupt()])
def test_what_a_reader_meets_reaches_the_caller_though_others_still_run(
    progress: Recorder, error: BaseException
) -> None:
    leave, waited = threading.Event(), threading.Event()

    def breaks() -> Iterator[str]:
        yield report("versions")
        raise error

    def waits() -> Iterator[str]:
        leave.wait(60)
        waited.set()
        yield finish()

    try:
        with pytest.raises(type(error)) as met:
            listen({"node-0": Script(waits), "node-1": Script(breaks)}, "", progress)
        assert met.value is error
        assert not waited.is_set()
    finally:
        leave.set()
    # what it had said before has been heard
    assert progress.said == ["node-1: versions: passed, 0.5 s. "]
