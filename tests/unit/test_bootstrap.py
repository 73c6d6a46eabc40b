"""A base by mmdebstrap: a stand-in of its name says what the real one would."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.conftest import ROOT, Recorder

from muster import apt, bootstrap
from muster.errors import BaseNotMade, DiskFull, MissingTool

Program = Callable[[str, str], Path]


def make(progress: Recorder, tmp_path: Path) -> None:
    bootstrap.make("trixie", ROOT / "docker", tmp_path / "base.tar", lambda _: False, progress)


def test_the_base_is_made_from_the_recipe(
    program: Program, progress: Recorder, tmp_path: Path
) -> None:
    program("mmdebstrap", f'printf "%s\\n" "$@" > {tmp_path}/base.tar')
    make(progress, tmp_path)
    assert (tmp_path / "base.tar").read_text().splitlines() == [
        "--variant=minbase",
        "--include=ca-certificates",
        f"--dpkgopt={ROOT / 'docker/slim.dpkg'}",
        "trixie",
        str(tmp_path / "base.tar"),
    ]


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        ("E: unable to fetch Release", BaseNotMade, r"(?s)Debian trixie\n.*unable to fetch Rel"),
        ("tar: write: No space left on device", DiskFull, "No space left on device"),
    ],
)
def test_a_failure_is_told_in_mmdebstrap_s_words(
    program: Program,
    progress: Recorder,
    tmp_path: Path,
    words: str,
    error: type[Exception],
    says: str,
) -> None:
    program("mmdebstrap", f"echo '{words}' >&2; exit 1")
    with pytest.raises(error, match=says):
        make(progress, tmp_path)


@pytest.mark.parametrize("debian", [True, False])
def test_mmdebstrap_is_not_installed_without_a_yes(
    progress: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, debian: bool
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(apt, "is_debian", lambda: debian)
    with pytest.raises(MissingTool, match=r"(?s)mmdebstrap is not on PATH.*--base REF"):
        make(progress, tmp_path)
    assert progress.said == []


def test_another_recipe_has_another_hash(tmp_path: Path) -> None:
    slim = tmp_path / bootstrap.RECIPE
    slim.write_text("path-exclude /a\n")
    before = bootstrap.recipe(tmp_path)
    assert bootstrap.recipe(tmp_path) == before
    slim.write_text("path-exclude /b\n")
    assert bootstrap.recipe(tmp_path) != before
