"""What the scripts of train/ have in common: each stands alone, so what they share is in each."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.conftest import ROOT

SCRIPTS = sorted((ROOT / "train").glob("*.py"))
# the one that has no ranks, and the one that itself judges the GPUs
ALONE, OF_ITS_OWN = "dataloader_shm.py", "devices.py"
OF_RANKS = [path for path in SCRIPTS if path.name != ALONE]


def name_of(path: Path) -> str:
    return path.name


def function(path: Path, name: str) -> str:
    """Its source, without its place in the file; a script that lacks it fails."""
    (found,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return ast.unparse(found)


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
            yield node


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_a_script_begins_with_its_question_and_its_command(path: Path) -> None:
    told = ast.get_docstring(ast.parse(path.read_text())) or ""
    runner = "python" if path.name == ALONE else "torchrun"
    assert "?" in told
    assert re.search(rf"{runner} (.*\\\n\s+)?.*train/{path.name}", told)


@pytest.mark.parametrize("path", OF_RANKS, ids=name_of)
def test_the_group_has_a_time_limit_and_ends_whatever_happens(path: Path) -> None:
    tree = ast.parse(path.read_text())
    (init,) = calls(tree, "dist.init_process_group")
    assert {"store", "timeout"} <= {keyword.arg for keyword in init.keywords}
    tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try)]
    ends = [ast.unparse(line) for each in tries for line in each.finalbody]
    assert any("dist.destroy_process_group()" in end for end in ends)
    assert list(calls(tree, "faulthandler.dump_traceback_later"))


@pytest.mark.parametrize("name", ["bind_device", "meet"])
def test_what_the_scripts_share_is_the_same_in_each(name: str) -> None:
    others = [path for path in OF_RANKS if path.name != OF_ITS_OWN]
    assert len({function(path, name) for path in others}) == 1
