"""Logs that grow while they are read."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from muster.errors import LogUnreadable
from muster.explain.follow import follow
from muster.explain.sieve import Sieve


def then(*steps: Callable[[], object]) -> Callable[[], bool]:
    """A wait that takes one step each time, and says to stop after the last."""
    left: Iterator[Callable[[], object]] = iter(steps)

    def wait() -> bool:
        step = next(left, None)
        if step is not None:
            step()
        return step is not None

    return wait


def append(path: Path, text: str) -> Callable[[], object]:
    def write() -> None:
        with path.open("a") as file:
            file.write(text)

    return write


def test_what_is_written_later_is_read_and_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("one\ntw")
    read = follow([log], then(append(log, "o\nthree\nfo"), append(log, "ur")))
    assert [(line.number, line.text) for line in read] == [(1, "one"), (2, "two"), (3, "three")]


def test_several_logs_grow_side_by_side(tmp_path: Path) -> None:
    first, second = tmp_path / "0.log", tmp_path / "1.log"
    first.write_text("a\n")
    second.write_text("b\n")
    read = follow([first, second], then(append(second, "c\n"), append(first, "d\n")))
    assert [line.text for line in read] == ["a", "b", "c", "d"]


def test_a_log_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("first\nrun\n")
    read = follow([log], then(lambda: log.write_text("again\n")))
    assert [(line.number, line.text) for line in read] == [(1, "first"), (2, "run"), (1, "again")]


def test_the_sieve_knows_what_an_earlier_look_saw(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("step 1\n")
    read = follow([log], then(append(log, "step 2\nend\n")), sift=Sieve().sift)
    assert [(line.number, line.text) for line in read] == [(1, "step 1"), (3, "end")]


def test_a_log_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LogUnreadable, match="No such file"):
        list(follow([tmp_path / "nothing"], then()))
