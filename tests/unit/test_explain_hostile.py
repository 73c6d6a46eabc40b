"""Logs as nobody means to write them: broken, huge, foreign, still being written, hostile."""

import gzip
import importlib
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from io import StringIO
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from muster import explain as package
from muster import report
from muster.errors import LogUnreadable
from muster.explain import lines, reader
from muster.explain.diagnose import diagnose
from muster.explain.events import Event
from muster.explain.explanation import Explanation, Study, explain, of_text
from muster.explain.lines import Sift
from muster.explain.picture import drawn
from muster.explain.sieve import Sieve
from muster.explain.sketch import Sketch

HERE = Path(__file__).parent
CORPUS = tomllib.loads((HERE / "explain_corpus.toml").read_text(encoding="utf-8"))
SHORT = re.compile(r"(WARN|INFO)@(\d+) (?:\[(\S+)\] )?(.*)")


def said(line: str) -> str:
    """WARN@3 [at] text, as NCCL 2.27 writes it."""
    if not (match := SHORT.fullmatch(line)):
        return line
    rank, at = int(match[2]), f"{match[3]} " if match[1] == "WARN" else ""
    return (
        f"node-{rank // 4}:{2000 + rank}:{3000 + rank} [{rank % 4}] {at}NCCL {match[1]} {match[4]}"
    )


CASES = [[said(line) for line in case["log"].strip("\n").split("\n")] for case in CORPUS["case"]]
KNOWN = sorted({line for case in CASES for line in case})
SHM = said("WARN@0 [misc/shmutils.cc:88] Error: failed to extend /dev/shm/nccl-AAAAAA to 99 bytes")


def of(log: Path) -> Explanation:
    return explain(lines.files([str(log)]), processes=1)


def ids(found: Explanation) -> list[str]:
    return [diagnosis.fault.id for diagnosis in found.diagnoses]


def events(raw: bytes, sift: Sift = lines.every) -> list[Event]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(raw)
        file.flush()
        return list(reader.events(lines.read([Path(file.name)], sift=sift)))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "job.log"


# ---- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (b"", None),
        (b"\n \n", None),
        (bytes(range(256)) * 40, "not read, it is binary"),
        (b"\x80\x04\x95", "not read, it is a pickle"),
        (gzip.compress(b"x" * 9000, mtime=0)[:20], "cut short"),
        (gzip.compress(b"x" * 9000, mtime=0)[:5], "cut short"),
        (b"\x1f\x8b", "cut short"),
        (b"\x1f\x8b" + b"no gzip at all" * 99, "cut short or damaged"),
    ],
)
def test_what_says_nothing_has_no_finding(log: Path, content: bytes, note: str | None) -> None:
    log.write_bytes(content)
    found = of(log)
    assert found.findings == ()
    assert (note or "nothing") in "".join(found.notes)


def test_what_stands_behind_noise_is_found(log: Path) -> None:
    noise = "Gerät".encode("latin-1") + b"\0\xff\xfe\x1b[2J\x9b"
    log.write_bytes(b"\n".join([noise * 99, SHM.encode(), noise]))
    assert ids(of(log)) == ["shm-too-small"]


def test_a_log_that_grows_while_it_is_read_is_read_to_its_new_end(log: Path) -> None:
    log.write_bytes(b"noise of a job\n" * 200_000)
    read = lines.read([log])
    next(read)
    with log.open("a") as file:
        file.write(f"{SHM}\n")
    *_, last = read
    assert (last.number, last.text) == (200_001, SHM)


@pytest.mark.parametrize("change", ["emptied", "removed", "replaced"])
def test_a_log_that_goes_while_it_is_read_is_no_stumble(log: Path, change: str) -> None:
    log.write_bytes(b"noise of a job\n" * 200_000)
    read = lines.read([log])
    next(read)
    if change == "emptied":
        log.write_bytes(b"")
    else:
        log.unlink()
    if change == "replaced":
        log.write_text("another\n")
    assert all("noise of a job".startswith(line.text) for line in read)


def test_a_stretch_of_a_log_that_was_cut_since_has_no_lines(log: Path) -> None:
    log.write_bytes(b"noise of a job\n" * 2_000_000)
    _, part = lines.parts(log, 2)
    log.write_bytes(b"noise of a job\n" * 10)
    assert list(lines.read([part])) == []


def test_in_a_log_of_two_jobs_the_one_that_failed_is_found(log: Path) -> None:
    init = "comm 0x1 rank {r} nranks 2 cudaDev {r} nvmlDev {r} busId {r}8000 commId 0x{job}"
    well = [
        said(f"INFO@{r} {init.format(r=r, job=job)} - Init {step}")
        for job in ("aa", "bb")
        for step in ("START", "COMPLETE")
        for r in (0, 1)
    ]
    log.write_text("\n".join([*well[:4], "step 1", *well[4:], "step 1", SHM]))
    found = of(log)
    assert ids(found) == ["shm-too-small"]
    assert [comm.key for comm in found.picture.communicators] == ["0xaa", "0xbb"]


def test_of_a_log_that_holds_only_the_tail_the_fault_is_named() -> None:
    text = "\n".join([SHM[len("node-0:20") :], "  raise ValueError", SHM.partition(" [0] ")[2]])
    assert [each.fault.id for each in diagnose(events(text.encode()))] == ["shm-too-small"]


def test_a_directory_with_a_file_that_may_not_be_read_is_explained_without_it() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for file, mode in (("a.log", 0o644), ("locked.log", 0)):
            (folder / file).write_text(SHM)
            (folder / file).chmod(mode)
        (folder / "locked").mkdir(mode=0)
        as_nobody = multiprocessing.get_context("fork").Pool(1, initializer=_be_nobody)
        with as_nobody as pool:
            found = pool.apply(_told, (name,))
            alone = [pool.apply(_told, (f"{name}/{word}",)) for word in ("locked.log", "locked")]
    assert found == (["shm-too-small"], f"{name}/locked.log: not read, Permission denied")
    for (named, told), word in zip(alone, ("locked.log", "locked"), strict=True):
        assert (named, f"cannot read {name}/{word}: Permission denied" in told) == ([], True)


def _be_nobody() -> None:
    if os.getuid() == 0:
        os.setgid(65534)
        os.setuid(65534)


def _told(word: str) -> tuple[list[str], str]:
    try:
        found = explain(lines.files([word]), processes=1)
    except LogUnreadable as error:
        return [], str(error)
    return ids(found), " ".join(found.notes)


# ---- size --------------------------------------------------------------------------------------

IN_BOUNDS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))
from muster.explain import lines
from muster.explain.explanation import explain
found = explain(lines.files([]), processes=1)
print(found.lines, *(d.fault.id for d in found.diagnoses), sep=" ")
"""


def explained_within(megabytes: int, written: Iterable[bytes]) -> list[str]:
    """What a process that may not take more memory says of a log on its standard input."""
    code = IN_BOUNDS.format(limit=megabytes * 2**20)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for block in written:
            process.stdin.write(block)
        process.stdin.close()
        return process.stdout.read().decode().split()


def test_a_line_of_200_mb_takes_no_memory() -> None:
    written = [b"begin\n", *[b"x" * 2**20] * 200, SHM.encode(), b"\nend\n"]
    assert explained_within(400, written) == ["3", "shm-too-small"]


def test_zeros_that_unpack_to_much_take_no_memory() -> None:
    # gzip files one after the other are one gzip file
    zeros = gzip.compress(bytes(2**24), compresslevel=1)
    written = [*[zeros] * 16, gzip.compress(f"\n{SHM}\n".encode())]
    assert explained_within(400, written) == ["2", "shm-too-small"]


def test_a_job_of_100_000_ranks_is_explained() -> None:
    def written() -> Iterator[bytes]:
        for rank in range(100_000):
            head = f"node-{rank // 8}:{rank}:{rank} [{rank % 8}] NCCL INFO"
            init = (
                f"comm 0x{rank:x} rank {rank} nranks 100000 cudaDev 0 busId {rank % 8} commId 0xab"
            )
            yield f"{head} {init} - Init START\n".encode() * (rank != 77_777)

    assert explained_within(700, written()) == ["99999", "init-not-finished"]


# ---- any text ----------------------------------------------------------------------------------

NASTY = (
    *(
        "\x1b[31m",
        "\x1b]0;title\x07",
        "\x1b",
        "\x9b2J",
        "\x00",
        "\x08",
        "\r",
        "\t",
        "\u202e",
        "\ufeff",
    ),
    *("\u2028", "\x85", "\udc80", "{x}", "{0}", "%s", "[bold]", "[/]", "\\", "NCCL WARN ", "-> 3"),
    *(
        "[rank3]:",
        "[default0]:",
        "2026-04-22T21:34:20.123Z ",
        " 3: ",
        "(x pid=1, ip=y) ",
        "train-1  | ",
    ),
    *(
        "Failures:",
        "  rank      : 3 (local_rank: 3)",
        "=" * 60,
        "\u0663",
        "9" * 30,
        "NCCL version ",
    ),
)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A line that programs write, cut, doubled, joined to another, or with something in it."""
    line, other = draw(st.sampled_from(KNOWN)), draw(st.sampled_from(KNOWN))
    at, to = draw(st.integers(0, len(line))), draw(st.integers(0, len(other)))
    nasty = draw(st.sampled_from(NASTY))
    return draw(
        st.sampled_from(
            (
                *(line[:at], line[at:], line * 2, line[:at] + other[to:], line + nasty),
                *(line[:at] + other + line[at:], line[:at] + nasty + line[at:], nasty + line),
            )
        )
    )


LOGS = st.lists(
    st.sampled_from(KNOWN) | mutated() | st.text(max_size=60) | st.sampled_from(NASTY), max_size=40
)


def encoded(log: Sequence[str]) -> bytes:
    return "\n".join(log).encode("utf-8", "surrogatepass")


def harmless(texts: Iterable[str]) -> bool:
    # blanks of other scripts, and what a font lacks, are but shown
    controls = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
    return not any(controls.search(text) for text in texts)


@given(LOGS)
def test_whatever_is_written_is_explained_and_no_terminal_obeys_it(log: list[str]) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(encoded(log))
        file.flush()
        found = explain([Path(file.name)], processes=1)
    for finding in found.findings:
        assert harmless(map(str, (getattr(finding, part.name) for part in fields(finding))))
    output = StringIO()
    Console(file=output, width=100, force_terminal=False).print(report.explanation(found))
    assert harmless([output.getvalue()])
    assert len(found.diagnoses) < 40


@given(st.binary(max_size=2_000))
def test_whatever_bytes_there_are_become_lines_that_no_terminal_obeys(raw: bytes) -> None:
    for event in events(raw):
        assert harmless([event.line.text, event.line.source, event.message])
        assert "\n" not in event.line.text


@given(LOGS)
def test_a_log_in_parts_gives_the_picture_of_the_whole(log: list[str]) -> None:
    whole, joined = Sketch(), Sketch()
    for event in events(encoded(log)):
        whole.add(event)
    for begin in range(0, len(log), 7):
        part = Sketch()
        for event in events(encoded(log[begin : begin + 7])):
            part.add(event)
        joined.join(part)
    assert drawn(joined) == drawn(whole)


def study(events_of_it: Iterable[Event], before: int = 0) -> Study:
    made = Study()
    for event in events_of_it:
        line = replace(event.line, file="job.log", number=event.line.number + before)
        made.add(replace(event, line=line))
    return made


@given(LOGS)
def test_a_log_in_parts_is_explained_as_the_whole(log: list[str]) -> None:
    joined = Study()
    for begin in range(0, len(log), 7):
        joined.join(study(events(encoded(log[begin : begin + 7])), begin))
    assert ids(joined.explanation()) == ids(study(events(encoded(log))).explanation())


@given(LOGS, st.integers(1, 5))
def test_the_sieve_changes_nothing_in_a_log_of_anything(log: list[str], times: int) -> None:
    raw = encoded([line for time in range(times) for line in (*log, f"step {time} loss 3.1")])
    whole, sifted = (study(events(raw, sift)).explanation() for sift in (lines.every, Sieve().sift))
    assert ids(sifted) == ids(whole)
    assert sifted.picture == whole.picture


def test_a_pipe_that_is_named_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = Thread(target=(tmp_path / "pipe").write_text, args=(f"{SHM}\n",))
    writer.start()
    assert ids(of(tmp_path / "pipe")) == ["shm-too-small"]
    writer.join()


def test_the_output_of_a_command_may_hold_what_is_no_text() -> None:
    assert ids(of_text(f"\udc80\x1b[2J\n{SHM}\udcff")) == ["shm-too-small"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0][:40])
def test_the_sieve_changes_nothing_in_a_log_that_says_all_of_it_again(case: list[str]) -> None:
    steps = [f"[rank{rank}]: step {{n}} loss 3.{rank}" for rank in range(4)]
    text = [
        line.replace("{n}", str(at))
        for at in range(30)
        for line in (*steps, *case[at % 3 :], *steps)
    ]
    raw = encoded(text)
    sketches = [Sketch(), Sketch()]
    found = []
    sifts: tuple[Sift, Sift] = (lines.every, Sieve().sift)
    for sketch, sift in zip(sketches, sifts, strict=True):
        said_in_it = events(raw, sift)
        for event in said_in_it:
            sketch.add(event)
        found.append([each.fault.id for each in diagnose(said_in_it)])
    assert found[0] == found[1]
    assert drawn(sketches[0]) == drawn(sketches[1])


# ---- patterns ----------------------------------------------------------------------------------

parser: Any = importlib.import_module("re._parser")
constants: Any = importlib.import_module("re._constants")
# what a search for it looks at again from each place on, at most
FAR = 1_000
LETTERS = set(map(chr, range(256)))


def patterns() -> dict[str, re.Pattern[Any]]:
    """Every regex of the package, wherever it is kept."""
    found: dict[str, re.Pattern[Any]] = {}
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            for number, pattern in enumerate(_kept(value)):
                found[f"{module.name}.{name}.{number}"] = pattern
    return found


def _kept(value: object) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _kept(each)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from _kept(getattr(value, part.name))


PATTERNS = patterns()
REPEATS = (constants.MAX_REPEAT, constants.MIN_REPEAT, constants.POSSESSIVE_REPEAT)


Op = tuple[Any, Any]


def letters_at(end: Literal["begin", "end"], items: Iterable[Op]) -> set[str]:
    """The letters with which what `items` match can begin or end; all where that may be empty."""
    ordered = list(items)
    for op, value in ordered if end == "begin" else reversed(ordered):
        if op in {constants.ASSERT, constants.ASSERT_NOT, constants.AT}:
            continue
        if op is constants.SUBPATTERN:
            return letters_at(end, value[-1])
        if op is constants.BRANCH:
            return set().union(*(letters_at(end, way) for way in value[1]))
        if op in REPEATS:
            return LETTERS if value[0] == 0 else letters_at(end, value[2])
        return {letter for letter in LETTERS if _matches((op, value), letter)}
    return LETTERS


def _matches(item: Op, letter: str) -> bool:
    op, value = item
    if op is constants.ANY:
        return letter != "\n"
    if op in {constants.LITERAL, constants.NOT_LITERAL}:
        return bool((value == ord(letter)) is (op is constants.LITERAL))
    assert op is constants.IN, op
    negated = value[0][0] is constants.NEGATE
    return any(_is_in(each, letter) for each in value[negated:]) is not negated


def _is_in(item: Op, letter: str) -> bool:
    kind, what = item
    if kind is constants.LITERAL:
        return bool(what == ord(letter))
    if kind is constants.RANGE:
        return bool(what[0] <= ord(letter) <= what[1])
    return re.match(CLASSES[what], letter) is not None


CLASSES = {
    constants.CATEGORY_DIGIT: r"\d",
    constants.CATEGORY_SPACE: r"\s",
    constants.CATEGORY_WORD: r"\w",
    constants.CATEGORY_NOT_SPACE: r"\S",
    constants.CATEGORY_NOT_WORD: r"\W",
    constants.CATEGORY_NOT_DIGIT: r"\D",
}


def walks_far(items: Iterable[Op], before: set[str]) -> Iterator[str]:
    """The repeats without a near end that can begin at several places of what they match, or that
    hold another repeat. `before` are the letters that can stand right before `items`.
    """
    ordered = list(items)
    for at, (op, value) in enumerate(ordered):
        if op in REPEATS:
            # what can fail behind it sends the search back
            fails = any(other not in REPEATS or most[0] > 0 for other, most in ordered[at + 1 :])
            yield from _repeat_walks_far(value, before, fails=fails)
        elif op is constants.SUBPATTERN:
            yield from walks_far(value[-1], before)
        elif op is constants.BRANCH:
            for way in value[1]:
                yield from walks_far(way, before)
        before = _behind((op, value), before)


def _repeat_walks_far(value: Any, before: set[str], *, fails: bool) -> Iterator[str]:  # noqa: ANN401
    _, most, inner = value
    if most <= FAR:
        yield from walks_far(inner, before)
    elif len(inner) > 1 or inner[0][0] in {*REPEATS, constants.SUBPATTERN, constants.BRANCH}:
        yield f"a repeat in a repeat: {inner}"
    elif fails and letters_at("begin", inner) & before:
        yield f"it may begin within itself: {inner}"


def _behind(item: Op, before: set[str]) -> set[str]:
    op, value = item
    if op is constants.AT:
        return set()
    if op is constants.ASSERT_NOT:
        return before - letters_at("begin", value[1])
    if op in REPEATS and value[0] == 0:
        return before | letters_at("end", value[2])
    return letters_at("end", [item])


def test_there_are_patterns() -> None:
    assert len(PATTERNS) > 60


@pytest.mark.parametrize("name", PATTERNS)
def test_no_pattern_walks_a_line_more_than_once(name: str) -> None:
    text = PATTERNS[name].pattern
    tree = parser.parse(text.decode("latin-1") if isinstance(text, bytes) else text)
    assert list(walks_far(tree, LETTERS)) == []


@pytest.mark.parametrize(
    "bad", [r"a+b", r"x(\w+ )*y", r"\s*\d+\s*$", r"(a|b+)*c", r" (\w+,?)+ pid", r"\w{1,9999}:"]
)
def test_a_pattern_that_walks_a_line_again_and_again_would_be_seen(bad: str) -> None:
    assert list(walks_far(parser.parse(bad), LETTERS))
