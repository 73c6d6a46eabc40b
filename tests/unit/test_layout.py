"""The layout's own rules, each of which would fail late or in silence when broken."""

import ast
import inspect
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from tests.unit.conftest import ROOT

from muster import context, engine, errors
from muster.errors import ExitCode, MusterError

SRC = ROOT / "src/muster"
PACKAGES = {path.parent.name for path in SRC.glob("*/__init__.py")}
MODULES = {path.stem for path in SRC.glob("*.py")} - {"__init__"} | PACKAGES
IN_IMAGE = {Path(name).stem for name in context.LIBRARY} | set(context.PACKAGES)


def imported(path: Path) -> set[str]:
    """The modules of muster that a file imports, wherever in it that stands."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "muster":
            found |= {f"muster.{name.name}" for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    names = {name.split(".")[1] for name in found if name.startswith("muster.")}
    return names & MODULES


@pytest.mark.parametrize("folder", ["docker", "train", "k8s", "tests"])
def test_no_folder_of_the_root_is_a_package(folder: str) -> None:
    # it would shadow the docker SDK, or what torchrun finds first on sys.path
    assert list((ROOT / folder).rglob("__init__.py")) == []


def test_no_folder_of_tests_is_called_docker() -> None:
    assert not (ROOT / "tests/docker").exists()


def test_no_train_script_hides_another_module() -> None:
    scripts = {path.stem for path in (ROOT / "train").glob("*.py")}
    assert scripts
    assert not scripts & (sys.stdlib_module_names | {"torch", "numpy", "muster"})


ROOMS = ["muster", *sorted(f"muster.{name}" for name in PACKAGES)]


def test_every_room_of_several_modules_is_looked_at() -> None:
    assert {"muster.bandwidth", "muster.explain", "muster.page", "muster.smoke"} <= set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_every_module_has_its_floor(room: str) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = (
        each
        for each in settings["tool"]["importlinter"]["contracts"]
        if each.get("containers") == [room]
    )
    assert contract["exhaustive"]
    named = [name.strip() for layer in contract["layers"] for name in layer.split("|")]
    folder = ROOT / "src" / room.replace(".", "/")
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    modules |= {path.parent.name for path in folder.glob("*/__init__.py")}
    assert sorted(named) == sorted(modules)


def test_only_one_module_imports_the_docker_sdk() -> None:
    importing = [
        path.stem
        for path in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Import) and any(a.name == "docker" for a in node.names))
        or (isinstance(node, ast.ImportFrom) and str(node.module).startswith("docker"))
    ]
    assert set(importing) == {"engine"}


def test_the_image_has_all_that_its_part_of_muster_imports() -> None:
    packaged = [path for name in context.PACKAGES for path in (SRC / name).glob("*.py")]
    assert packaged
    for path in [*(SRC / name for name in context.LIBRARY), *packaged]:
        assert imported(path) <= IN_IMAGE, path.name


@pytest.mark.parametrize("path", sorted((ROOT / "tests/smoke").rglob("*.py")), ids=lambda p: p.name)
def test_the_image_has_all_that_the_smoke_suite_imports(path: Path) -> None:
    assert imported(path) <= IN_IMAGE


def test_train_imports_torch_and_the_standard_library_alone() -> None:
    for path in (ROOT / "train").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            roots = {name.split(".")[0] for name in names}
            assert roots <= sys.stdlib_module_names | {"torch"}, path.name


def test_every_file_of_the_context_exists_and_none_of_the_suite_is_left_out() -> None:
    staged = context.Checkout(ROOT).staged()
    assert all(path.is_file() for path in staged.values())
    assert {"Dockerfile", "entrypoint.sh", "muster/__init__.py"} <= staged.keys()
    for folder, source in (("smoke", "tests/smoke"), ("train", "train")):
        paths = [path for path in (ROOT / source).rglob("*") if path.is_file()]
        files = {
            f"{folder}/{path.relative_to(ROOT / source)}"
            for path in paths
            if path.parent.name != "__pycache__"
        }
        assert files == {name for name in staged if name.startswith(f"{folder}/")}


# ---- errors -------------------------------------------------------------------------------------


def every_error(base: type[MusterError] = MusterError) -> Iterator[type[MusterError]]:
    for each in base.__subclasses__():
        yield each
        yield from every_error(each)


def example(error: type[MusterError]) -> MusterError:
    """An error of that class, from a value for each parameter's type."""
    values: dict[Any, object] = {
        str: "a text",
        object: "a value",
        int: 3,
        int | None: 3,
        Path: Path("a/path"),
        Sequence[str]: ["one", "two"],
        engine.Ask: engine.Ask.GPUS,
    }
    hints = get_type_hints(error.__init__)
    make: Callable[..., MusterError] = error
    return make(*(values[hints[name]] for name in inspect.signature(error).parameters))


ABSTRACT = {errors.WrongInput, errors.MachineLacks}
ERRORS = sorted(set(every_error()) - ABSTRACT, key=lambda error: error.__name__)


def test_errors_of_every_room_are_looked_at() -> None:
    assert {errors.NotASize, errors.DiskFull, engine.AskRefused} <= set(ERRORS)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_an_error_says_what_happened_what_to_do_and_its_exit_code(
    error: type[MusterError],
) -> None:
    found = example(error)
    assert found.exit_code in set(ExitCode)
    assert isinstance(found, tuple(ABSTRACT))
    assert found.what.strip()
    assert found.remedy.strip()
    assert str(found) == f"{found.what}\n  do: {found.remedy}"


def test_exit_codes_are_those_of_the_documents() -> None:
    assert (ExitCode.FINDINGS, ExitCode.WRONG_INPUT, ExitCode.MACHINE_LACKS) == (1, 2, 3)
    assert errors.WrongInput.exit_code == 2
    assert errors.MachineLacks.exit_code == 3


def test_every_error_is_raised_somewhere() -> None:
    sources = "".join(path.read_text() for path in [*SRC.rglob("*.py"), ROOT / "tasks.py"])
    # the class statement itself is the first place with its name and a parenthesis
    assert [
        each.__name__
        for each in ERRORS
        if sources.count(f"{each.__name__}(") < 2 and f"raise {each.__name__}" not in sources
    ] == []
