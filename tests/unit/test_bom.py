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
    assert json.loads(capsys.readouterr().out) == {
        "schema": bom.SCHEMA,
        "variant": "cpu",
        "wheels": [],
        "python": platform.python_version(),
        "debian": [
            {"name": "libc6", "version": "2.41-12", "architecture": "amd64"},
            {"name": "python3", "version": "3.13.5-1", "architecture": "amd64"},
        ],
    }
