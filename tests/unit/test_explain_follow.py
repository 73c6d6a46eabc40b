"""Logs that grow while they are read."""

import gzip
import resource
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
    assert [(line.number, line.text) for line in read] == [
        (1, "one"),
        (2, "two"),
        (3, "three"),
        (4, "four"),
    ]


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


def test_a_log_that_was_moved_away_is_followed_by_the_one_in_its_place(tmp_path: Path) -> None:
    log, old = tmp_path / "a.log", tmp_path / "a.log.1"
    log.write_text("first\nunended")

    def rotate() -> None:
        log.rename(old)

    read = follow([log], then(rotate, append(log, "longer than the first was\nsecond\n")))
    assert [(line.number, line.text) for line in read] == [
        (1, "first"),
        (2, "unended"),
        (1, "longer than the first was"),
        (2, "second"),
    ]


def test_what_is_emptied_while_it_is_read_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("one\n")
    read = follow([log], then(lambda: log.write_text(""), append(log, "two\n")))
    assert [(line.number, line.text) for line in read] == [(1, "one"), (1, "two")]


@pytest.mark.parametrize(
    "content", [gzip.compress(b"packed\n"), "packed\n".encode("utf-16")], ids=["gzip", "utf-16"]
)
def test_what_cannot_grow_is_read_once(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "old.log").write_bytes(content)
    (tmp_path / "log").write_text("a\n")
    (tmp_path / "core").write_bytes(b"\x7fELF\n")
    paths = [tmp_path / name for name in ("log", "core", "old.log")]
    notes: list[str] = []
    read = follow(paths, then(append(tmp_path / "log", "b\n")), notes=notes)
    assert [line.text for line in read] == ["packed", "a", "b"]
    assert notes == [f"{tmp_path}/core: not read, it is a program or a core dump"]


def test_more_logs_are_followed_than_files_may_be_open(tmp_path: Path) -> None:
    logs = [tmp_path / str(rank) for rank in range(300)]
    for log in logs:
        log.write_text("a\n")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, before[1]))
    try:
        assert len(list(follow(logs, then(append(logs[299], "b\n"))))) == 301
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_sieve_knows_what_an_earlier_look_saw(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("step 1\n")
    read = follow([log], then(append(log, "step 2\nend\n")), sift=Sieve().sift)
    # the last line of each look is always read
    assert [(line.number, line.text) for line in read] == [(1, "step 1"), (3, "end")]


def test_a_log_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LogUnreadable, match="No such file"):
        list(follow([tmp_path / "nothing"], then()))
