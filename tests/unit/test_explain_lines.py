"""Log files to lines: what wraps a line, what breaks a file, what a terminal would obey."""

import codecs
import gzip
import hashlib
import os
import re
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.errors import LogMissing, LogUnreadable
from muster.explain import lines
from muster.explain.lines import Line
from muster.explain.sieve import Sieve

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
    assert [(line.number, line.text) for line in lines.read([log])] == [(1, NCCL), (2, "next")]


@pytest.mark.parametrize("size", [lines.LONGEST_LINE + 1, 2**20 - 3, 2**20, 5_000_000])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_of_a_long_line_the_begin_and_the_end_are_kept(log: Path, size: int, end: bytes) -> None:
    log.write_bytes(b"before\nBEGIN" + b"x" * size + b"END" + end)
    before, begin, last = lines.read([log])
    assert (before.number, begin.number, last.number) == (1, 2, 2)
    assert (begin.text[:6], last.text[-4:]) == ("BEGINx", "xEND")
    assert lines.LONGEST_LINE - 2 <= len(begin.text) + len(last.text) <= lines.LONGEST_LINE


def test_a_line_of_the_longest_length_is_whole(log: Path) -> None:
    log.write_bytes(b"x" * lines.LONGEST_LINE)
    (line,) = lines.read([log])
    assert len(line.text) == lines.LONGEST_LINE


def test_what_is_said_behind_hours_of_progress_is_read_and_the_progress_is_not(log: Path) -> None:
    bars = "".join(f"\r{at}%|#   | {at}/99 [00:10<00:14, 4.1it/s]" for at in range(99))
    log.write_text(f"start{bars * 30}{NCCL}\n")
    first, *_, last = lines.read([log])
    assert (first.text, last.text.endswith(NCCL)) == ("start", True)
    # of the bars where the middle was left out, a piece may be
    assert len(list(lines.read([log]))) <= 4


def test_the_hole_in_a_log_that_was_emptied_under_its_writer_hides_nothing(log: Path) -> None:
    with log.open("wb") as file:
        file.seek(3 * 2**20 + 7)
        file.write(b"after the hole\nnext\n")
    assert [(line.number, line.text) for line in lines.read([log])] == [
        (1, "after the hole"),
        (2, "next"),
    ]


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


@pytest.mark.parametrize("order", ["le", "be"])
def test_what_powershell_wrote_is_read(log: Path, order: str) -> None:
    mark = {"le": codecs.BOM_UTF16_LE, "be": codecs.BOM_UTF16_BE}[order]
    text = "one\r\nzwölf\r\n" * 100_000
    log.write_bytes(mark + text.encode(f"utf-16-{order}"))
    read = list(lines.read([log], sift=Sieve().sift))
    assert [line.text for line in read[:2]] == ["one", "zwölf"]
    assert read[-1].number == 200_000


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "latin-1", "cp1252", "utf-8-sig"])
def test_what_is_plain_in_a_wrong_encoding_is_found_by_the_sieve_too(
    log: Path, encoding: str
) -> None:
    texts_in = [
        "Gerät läuft",
        *(f"n:1:2 [0] x.cc:1 NCCL WARN Fehler {n}" for n in range(9)),
        "Ende",
    ]
    log.write_bytes("\n".join(texts_in).encode(encoding))
    read = texts(lines.read([log], sift=Sieve().sift))
    assert [text for text in read if "WARN" in text] == texts_in[1:-1]
    assert read[-1] == "Ende"
    assert read[0].startswith("Ger")


def test_an_empty_log_has_no_lines(log: Path) -> None:
    log.write_bytes(b"\n\n\n")
    assert list(lines.read([log], sift=Sieve().sift)) == []
    log.write_bytes(b"")
    assert list(lines.read([log], sift=Sieve().sift)) == []


def test_a_directory_stands_for_all_files_below_it(tmp_path: Path) -> None:
    (tmp_path / "attempt_0" / "1").mkdir(parents=True)
    (tmp_path / "attempt_0" / "1" / "stderr.log").write_text("b")
    (tmp_path / "a.log").write_text("a")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert texts(lines.read(lines.files([str(tmp_path)]))) == ["a", "b"]


def test_pipes_and_what_else_is_no_file_are_passed_over_below_a_directory(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("a")
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "broken.log").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop.log").symlink_to(tmp_path / "loop.log")
    with socket.socket(socket.AF_UNIX) as open_socket:
        open_socket.bind(str(tmp_path / "socket.log"))
        for word in (str(tmp_path), f"{tmp_path}/*.log", f"{tmp_path}/**/*.log"):
            assert lines.files([word]) == (tmp_path / "job.log",)


def test_a_link_to_the_current_log_is_no_second_log(tmp_path: Path) -> None:
    (tmp_path / "job-3.log").write_text("a")
    (tmp_path / "latest.log").symlink_to("job-3.log")
    (tmp_path / "hard.log").hardlink_to(tmp_path / "job-3.log")
    assert len(lines.files([str(tmp_path), str(tmp_path / "latest.log")])) == 1


def test_links_to_their_own_parents_end(tmp_path: Path) -> None:
    for name in "abcdef":
        (tmp_path / name).symlink_to(tmp_path)
    (tmp_path / "job.log").write_text("x")
    assert lines.files([str(tmp_path)]) == (tmp_path / "job.log",)
    assert lines.files([f"{tmp_path}/**"]) == (tmp_path / "job.log",)


def test_a_directory_of_thousands_of_files_is_read(tmp_path: Path) -> None:
    for rank in range(5_000):
        (tmp_path / f"rank{rank}.log").write_text(f"of {rank}\n")
    assert len(list(lines.read(lines.files([str(tmp_path)])))) == 5_000


def test_a_file_named_as_standard_input_is_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-").write_text("in the file\n")
    for word in ("./-", ".", "*"):
        assert texts(lines.read(lines.files([word]))) == ["in the file"]
    assert lines.files(["-"]) == (lines.STDIN,)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\x1b[2Jb\nc.log", "a\ufffd[2Jb\ufffdc.log"),
        ("a\u202egol.b", "a\ufffdgol.b"),
        ("a\udcff\x9b.log", "a\ufffd\ufffd.log"),
        ("Gerät 1.log", "Gerät 1.log"),
    ],
)
def test_a_name_is_read_as_it_is_and_shown_without_what_a_terminal_obeys(
    tmp_path: Path, name: str, shown: str
) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b"x")[:-4])
    notes: list[str] = []
    list(lines.read(lines.files([str(tmp_path)]), notes=notes))
    assert notes[0].startswith(f"{tmp_path}/{shown}: the gzip file is cut")
    (tmp_path / name).write_bytes(b"x")
    (line,) = lines.read(lines.files([str(tmp_path / name)]))
    assert line.file == f"{tmp_path}/{shown}"
    with pytest.raises(LogUnreadable) as unreadable:
        list(lines.read([tmp_path / name / "below"]))
    assert unreadable.value.file == f"{tmp_path}/{shown}/below"


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


@pytest.mark.parametrize(
    "word",
    ["nothing.log", "nothing*", "empty", "", "a\0b", "a\0*", "**x", "broken", "loop", "x/../y"],
)
def test_a_log_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").symlink_to("not there")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(LogMissing, match=re.escape(repr(word))):
        lines.files([word])


def test_a_name_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(LogUnreadable, match="name too long"):
        lines.files([str(tmp_path / ("x" * 5_000))])


def test_standard_input_that_is_closed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(LogUnreadable, match="cannot read standard input: it is closed"):
        list(lines.read([lines.STDIN]))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(LogUnreadable, match="Is a directory"):
        list(lines.read([tmp_path]))


def test_only_what_the_sieve_leaves_becomes_a_line(log: Path) -> None:
    log.write_text("a\nb\na\n")
    read = lines.read([log], sift=lambda block: [(1, block.split(b"\n")[1])])
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


@given(st.lists(st.binary(max_size=40), max_size=60), st.integers(1, 5))
def test_no_byte_of_a_file_is_lost_or_read_twice_between_its_parts(
    pieces: list[bytes], count: int
) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.NamedTemporaryFile() as file:
        patch.setattr(lines, "_SMALLEST_PART", 1)
        file.write(b"\n" * 30 + b"\n".join(pieces))
        file.flush()
        parts = lines.parts(Path(file.name), count)
        assert [part.begin for part in parts[1:]] == [part.end for part in parts[:-1]]
        assert list(lines.read(parts)) == list(lines.read([Path(file.name)]))


def test_what_is_small_or_packed_is_not_parted(log: Path) -> None:
    for content in (b"small", gzip.compress(os.urandom(2**25), compresslevel=0)):
        log.write_bytes(content)
        assert lines.parts(log, 2) == (lines.Part(log),)


def test_a_core_dump_is_not_parted_and_so_not_read(log: Path) -> None:
    with log.open("wb") as file:
        file.write(b"\x7fELF")
        file.seek(2**25)
        file.write(b"\nRuntimeError: not of this job\n")
    assert lines.parts(log, 2) == (lines.Part(log),)


@pytest.mark.parametrize("prefix", ["", "[default0]:", "[pod/train-0/t] "])
@pytest.mark.parametrize("before", [0, 3, 6, 7, 8, 20, 150])
def test_no_part_begins_within_a_table(
    log: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, before: int
) -> None:
    monkeypatch.setattr(lines, "_SMALLEST_PART", 1)
    step = "step {n} " + "x" * 90 + "\n"
    names = ("time", "host", "rank", "exitcode", "error_file", "traceback")
    row = [f"{prefix}[1]:", *(f"{prefix}  {name:<10}: x" for name in names)]
    table = "\n".join([f"{prefix}Root Cause (first observed failure):", *row * 20]) + "\n"
    log.write_text(step * (200 - before) + table + step * 200)
    _, part = lines.parts(log, 2)
    first, *_ = lines.read([part])
    *_, rows = (line for line in lines.read([log]) if "  :" in line.text)
    assert first.number > rows.number
    assert first.text.startswith("step")


def test_a_log_whose_lines_all_speak_of_time_and_rank_is_parted(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_SMALLEST_PART", 1)
    log.write_text("time: 3.2 rank: 7  time : 1  rank : 3 traceback : none\n" * 400)
    assert len(lines.parts(log, 2)) == 2


@pytest.mark.parametrize(
    ("begin", "what"),
    [
        (b"\x7fELF\x02", "core dump"),
        (b"PK\x03\x04", "checkpoint"),
        (b"\x80\x04\x95", "pickle"),
        (bytes(range(256)) * 50, "binary"),
        (b"\0" * 9 + hashlib.shake_128(b"noise").digest(20_000), "binary"),
    ],
)
def test_what_lies_beside_logs_is_named_and_not_read(log: Path, begin: bytes, what: str) -> None:
    log.write_bytes(begin + b"\nRuntimeError: not of this job\n")
    notes: list[str] = []
    assert list(lines.read([log], notes=notes)) == []
    assert notes == [f"{log}: not read, it is {what}" if what == "binary" else notes[0]]
    assert what in notes[0]
    log.write_bytes(gzip.compress(log.read_bytes()))
    assert list(lines.read([log], notes=notes)) == []
    assert notes[0] == notes[1]
