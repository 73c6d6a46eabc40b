"""The bill of materials, with a stand-in for dpkg-query."""

import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muster import bom


def test_the_host_s_facts_are_completed_by_what_the_image_can_tell(
    program: Callable[[str, str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    program("dpkg-query", r"printf 'libc6\t2.41-12\tamd64\npython3\t3.13.5-1\tamd64\n'")
    (tmp_path / "facts.json").write_text('{"variant": "cpu", "wheels": []}')
    monkeypatch.setattr(sys, "argv", ["bom", str(tmp_path / "facts.json")])
    bom.main()
    complete = json.loads(capsys.readouterr().out)
    sizes = list(complete.pop("parts").values())
    assert sizes == sorted(sizes, reverse=True)
    assert complete == {
        "schema": bom.SCHEMA,
        "variant": "cpu",
        "wheels": [],
        "python": platform.python_version(),
        "debian": [
            {"name": "libc6", "version": "2.41-12", "architecture": "amd64"},
            {"name": "python3", "version": "3.13.5-1", "architecture": "amd64"},
        ],
    }


def test_a_wheel_weighs_what_is_left_of_it_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "tiny-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
    (info / "RECORD").write_text("tiny.py,,\ntrimmed.a,,\n")
    (tmp_path / "tiny.py").write_bytes(b"x" * 1234)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert bom.parts() == {"tiny": 1234}
