"""docs/learn.md: every command is run as it stands, and prints what the page shows after it."""

import functools
import re
import subprocess
from dataclasses import dataclass

import pytest
from tests.image.harness import ROOT

PAGE = (ROOT / "docs/learn.md").read_text()
# a heading, and what stands under it
START, *PARTS = re.split(r"^## ", PAGE, flags=re.MULTILINE)
LIMIT_S = 300


@dataclass(frozen=True)
class Shown:
    """The commands of one block, and of what they print the lines that the page shows."""

    heading: str
    commands: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return self.heading


def shown_in(part: str) -> list[Shown]:
    blocks = re.findall(
        r"^```sh\n(.*?)^```\n(?:```text\n(.*?)^```$)?", part, re.DOTALL | re.MULTILINE
    )
    heading = part.partition("\n")[0]
    return [Shown(heading, commands, tuple(lines.splitlines())) for commands, lines in blocks]


SHOWN = [shown for part in (START, *PARTS) for shown in shown_in(part)]


@functools.cache
def output_of(commands: str) -> str:
    """What the page's shell prints, on both streams; the page says where a command fails."""
    done = subprocess.run(
        ["sh", "-e", "-c", commands],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def missing_from(output: str, lines: tuple[str, ...]) -> list[str]:
    """Those of `lines` that `output` lacks, spaces at the end apart; … stands for any text."""
    printed = {line.rstrip() for line in output.splitlines()}
    patterns = {line: ".*".join(map(re.escape, line.split("…"))) for line in lines}
    return [
        line
        for line, pattern in patterns.items()
        if not any(re.fullmatch(pattern, each) for each in printed)
    ]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("shown", SHOWN, ids=str)
def test_a_command_of_the_page_prints_what_the_page_shows(shown: Shown) -> None:
    output = output_of(shown.commands)
    assert missing_from(output, shown.lines) == [], output


@pytest.mark.usefixtures("built")
def test_the_killed_job_ends_with_the_digest_of_the_undisturbed_one() -> None:
    (elastic,) = (shown for shown in SHOWN if "elastic_demo.py" in shown.commands)
    undisturbed, killed = re.findall(r'"digest": "(\w+)"', output_of(elastic.commands))
    assert undisturbed == killed


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.partition("\n")[0])
def test_a_part_has_a_command_its_output_and_a_question(part: str) -> None:
    blocks = shown_in(part)
    assert blocks
    assert all(shown.lines for shown in blocks)
    assert len(re.findall(r"^\*\*[^*]+\?\*\*", part, re.MULTILINE)) == len(blocks)


def test_the_page_has_the_nine_parts() -> None:
    assert [part.split(maxsplit=1)[0] for part in PARTS] == list("123456789")


def test_no_command_of_the_page_stands_outside_of_what_is_run() -> None:
    prose = re.sub(r"^```\w+\n.*?^```$", "", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert not re.findall(r"docker run|\./invokew|torchrun -|python -m", prose)
    assert len(SHOWN) == PAGE.count("```sh\n")


def test_the_files_that_the_page_names_exist() -> None:
    named = re.findall(r"\b(?:docs|src|tests|train)/[\w./]*\w", PAGE)
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_what_the_table_of_pitfalls_says_is_what_they_say() -> None:
    planted = (ROOT / "tests/smoke/pitfalls/test_pitfalls.py").read_text()
    rows = [row.split("|") for row in PARTS[-1].splitlines() if row.startswith("| ")]
    said = [words for row in rows for words in re.findall(r"`(.+?)`", row[2])]
    assert said
    assert [words for words in said if words not in planted] == []
