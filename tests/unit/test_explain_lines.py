"""Log files to lines: what wraps a line, what breaks a file, what a terminal would obey."""

import gzip
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from muster.errors import LogMissing, LogUnreadable
from muster.explain import lines
from muster.explain.lines import Line

NCCL = "node-0:2020:2022 [0] NCCL INFO Using network Socket"


def texts(read: Iterable[Line]) -> list[str]:
    return [line.text for line in read]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "job.log"


@pytest.mark.parametrize(
    ("wrapped", "source", "text"),
    [
        (f"[default0]:{NCCL}", "[default0]", NCCL),
        (f"[trainer12]: {NCCL}", "[trainer12]", NCCL),
        (f"[rank5]:{NCCL}", "[rank5]", NCCL),
        (f" 3: {NCCL}", "3", NCCL),
        (f"12: [rank5]: {NCCL}", "12 [rank5]", NCCL),
        (f"[1,26]<stdout>:{NCCL}", "[1,26]<stdout>", NCCL),
        (f"[1,26]<stderr>: {NCCL}", "[1,26]<stderr>", NCCL),
        (f"[prterun-node-0-77@1,3]<stdout>: {NCCL}", "[prterun-node-0-77@1,3]<stdout>", NCCL),
        (f"[pod/train-0-x/trainer] {NCCL}", "[pod/train-0-x/trainer]", NCCL),
        (f"[pod/a/b] 2026-04-22T21:34:20.123456789Z {NCCL}", "[pod/a/b]", NCCL),
        (f"2026-04-22T21:34:20.123456789Z stdout F {NCCL}", "", NCCL),
        (f"2026-04-22 21:34:20,123 {NCCL}", "", NCCL),
        (f"[2026-04-22 21:34:20] {NCCL}", "", NCCL),
        (f"Wed Apr 22 21:34:20 2026[1,0]<stdout>:{NCCL}", "[1,0]<stdout>", NCCL),
        (f"train-1  | {NCCL}", "train-1", NCCL),
        (f"(Worker pid=7, ip=10.0.0.3) {NCCL}", "(Worker pid=7, ip=10.0.0.3)", NCCL),
        ("[rank0]:   File 'x'", "[rank0]", "  File 'x'"),
        (NCCL, "", NCCL),
    ],
)
def test_what_a_launcher_puts_before_a_line_becomes_its_source(
    wrapped: str, source: str, text: str
) -> None:
    assert lines.unwrapped(wrapped) == (source, text)


@pytest.mark.parametrize(
    "text",
    [
        "W0801 04:55:28.464000 140238513375040 torch/distributed/run.py:778] x",
        "[W602 11:17:52.185053341 socket.cpp:767] [c10d] x",
        "[E ProcessGroupNCCL.cpp:563] [Rank 2] x",
        "[1]:",
        "           8             2     float     sum      -1    12.30    0.00    0.00      0",
        "  rank      : 3 (local_rank: 3)",
        "http://node-0:8080/x",
    ],
)
def test_what_belongs_to_the_line_stays_in_it(text: str) -> None:
    assert lines.unwrapped(text) == ("", text)


def test_lines_are_numbered_as_an_editor_does(log: Path) -> None:
    log.write_text("first\n\n\nfourth\r\nfifth, cut")
    assert list(lines.read([log])) == [
        Line(str(log), 1, "first"),
        Line(str(log), 4, "fourth"),
        Line(str(log), 5, "fifth, cut"),
    ]


def test_numbers_go_on_over_the_blocks_that_a_file_is_read_in(log: Path) -> None:
    log.write_text("x" * 99 + "\n" * 1 + ("y" * 99 + "\n") * 30_000 + "last\n")
    *_, last = lines.read([log])
    assert (last.number, last.text) == (30_002, "last")


def test_what_a_terminal_would_obey_never_reaches_it(log: Path) -> None:
    log.write_bytes(
        b"\x1b[31mred\x1b[0m \x1b]0;title\x07bell\x07 \x9b\xc2\x9b2J \x1b]8;;http://x\x1b\\link"
        b" \x00nul \xe2\x80\xaeback \x1b(B\x1bcreset\ttab\n"
    )
    (line,) = lines.read([log])
    assert line.text.replace("�", "") == "red bell 2J link nul back reset\ttab"


def test_a_progress_bar_that_wrote_over_itself_hides_no_message(log: Path) -> None:
    log.write_text(f"10%|#   |\r20%|##  |\r{NCCL}\r\nnext\n")
    assert [(line.number, line.text) for line in lines.read([log])][-2:] == [(1, NCCL), (2, "next")]


def test_a_line_without_end_is_kept_up_to_a_length(log: Path) -> None:
    with log.open("wb") as file:
        file.truncate(0)
        file.write(b"x" * 5_000_000 + b"\nafter\n" + b"y" * 3_000_000)
    long, after, unended = lines.read([log])
    assert (len(long.text), after.text) == (lines.LONGEST_LINE, "after")
    assert (after.number, len(unended.text)) == (2, lines.LONGEST_LINE)


def test_gzip_is_known_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_bytes(gzip.compress(b"one\ntwo\n"))
    assert texts(lines.read([tmp_path / "job.log"])) == ["one", "two"]


def test_of_a_gzip_file_cut_short_the_begin_is_read_and_the_cut_is_noted(log: Path) -> None:
    whole = gzip.compress(b"".join(b"line %d\n" % i for i in range(100_000)))
    log.write_bytes(whole[: len(whole) // 2])
    notes: list[str] = []
    read = texts(lines.read([log], notes=notes))
    assert read[:2] == ["line 0", "line 1"]
    assert len(read) > 10_000
    assert notes == [f"{log}: the gzip file is cut short or damaged; read as far as it goes"]


def test_what_powershell_wrote_is_read(log: Path) -> None:
    log.write_bytes("one\r\nzwölf\r\n".encode("utf-16"))
    assert texts(lines.read([log])) == ["one", "zwölf"]


@pytest.mark.parametrize("noise", [b"", b"\n\n\n", bytes(range(256)) * 50, os.urandom(20_000)])
def test_noise_is_read_without_a_stumble(log: Path, noise: bytes) -> None:
    log.write_bytes(noise)
    assert all(line.text.strip() for line in lines.read([log]))


def test_a_directory_stands_for_all_files_below_it(tmp_path: Path) -> None:
    (tmp_path / "attempt_0" / "1").mkdir(parents=True)
    (tmp_path / "attempt_0" / "1" / "stderr.log").write_text("b")
    (tmp_path / "a.log").write_text("a")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert texts(lines.read(lines.files([str(tmp_path)]))) == ["a", "b"]


def test_a_glob_is_expanded_and_a_file_is_read_once(tmp_path: Path) -> None:
    for name in ("rank0.log", "rank1.log", "other.txt"):
        (tmp_path / name).write_text(name)
    words = [str(tmp_path / "rank1.log"), str(tmp_path / "rank*.log")]
    assert [path.name for path in lines.files(words)] == ["rank1.log", "rank0.log"]


def test_a_file_whose_name_is_a_pattern_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "log[1]").write_text("x")
    assert lines.files([str(tmp_path / "log[1]")]) == (tmp_path / "log[1]",)


def test_without_a_word_standard_input_is_read(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.write_text("piped\n")
    with log.open() as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        assert list(lines.read(lines.files([]))) == [Line("standard input", 1, "piped")]


@pytest.mark.parametrize("word", ["nothing.log", "nothing*", "empty"])
def test_a_log_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(LogMissing, match=word.replace("*", r"\*")):
        lines.files([word])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(LogUnreadable, match="Is a directory"):
        list(lines.read([tmp_path]))


def test_only_what_the_sieve_leaves_becomes_a_line(log: Path) -> None:
    log.write_text("a\nb\na\n")
    read = lines.read([log], sift=lambda raws: [(1, raws[1])])
    assert list(read) == [Line(str(log), 2, "b")]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "job.log"
    path.write_bytes(b"".join(b"line %d %s\n" % (n, b"x" * (n % 977)) for n in range(1, 60_001)))
    return path


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_parts_of_a_large_file_are_the_whole_with_the_same_numbers(
    large: Path, count: int
) -> None:
    parts = lines.parts(large, count)
    assert len(parts) == count
    read = [line for part in parts for line in lines.read([part])]
    assert [line.number for line in read] == list(range(1, 60_001))
    assert all(line.text.startswith(f"line {line.number} ") for line in read)


def test_one_endless_line_is_one_part(log: Path) -> None:
    log.write_bytes(b"x" * 2**25)
    assert lines.parts(log, 2) == (lines.Part(log, 0, None),)


@pytest.mark.parametrize("content", [b"small", gzip.compress(os.urandom(2**25), compresslevel=0)])
def test_what_is_small_or_packed_is_not_parted(log: Path, content: bytes) -> None:
    log.write_bytes(content)
    assert lines.parts(log, 2) == (lines.Part(log),)


@pytest.mark.parametrize(
    ("begin", "what"),
    [(b"\x7fELF\x02", "core dump"), (b"PK\x03\x04", "checkpoint"), (b"\x80\x04\x95", "pickle")],
)
def test_what_lies_beside_logs_is_named_and_not_read(log: Path, begin: bytes, what: str) -> None:
    log.write_bytes(begin + b"\nRuntimeError: not of this job\n")
    notes: list[str] = []
    assert list(lines.read([log], notes=notes)) == []
    assert what in notes[0]
