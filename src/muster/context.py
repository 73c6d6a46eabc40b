"""The build's context: what goes into it, a fingerprint of that, and staging it for BuildKit."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster import __version__, cache, nccl_tests
from muster.pins import Variant
from muster.progress import Progress

# the floors of muster that the smoke suite and the bill of materials need in the image
LIBRARY = (
    "__init__.py",
    "agent.py",
    "bom.py",
    "errors.py",
    "finding.py",
    "launch.py",
    "launcher.py",
    "podlines.py",
    "preflight.py",
    "process.py",
    "progress.py",
    "proofs.py",
    "shape.py",
    "size.py",
    "steps.py",
    "suite.py",
    "switches.py",
    "topology.py",
)
# and those that are packages
PACKAGES = ("bandwidth", "doctor")


@dataclass(frozen=True)
class Checkout:
    """The folders of this repository that the image is made from."""

    root: Path

    @property
    def docker(self) -> Path:
        return self.root / "docker"

    def staged(self) -> dict[str, Path]:
        """Every file of the context that is one of this repository: its name there, its path."""
        files = {name: self.docker / name for name in ("Dockerfile", "entrypoint.sh", "triton.sh")}
        files["nccl-tests/nccl-tests.sh"] = self.docker / "nccl-tests.sh"
        venv = ("venv.sh", "trim.txt", "trim-slim.txt", "strip.txt")
        files |= {f"venv/{name}": self.docker / name for name in venv}
        library = self.root / "src/muster"
        files |= {f"muster/{name}": library / name for name in LIBRARY}
        parts = (path for name in PACKAGES for path in (library / name).iterdir())
        parts = (path for path in parts if path.suffix in {".py", ".toml"})
        files |= {f"muster/{path.relative_to(library)}": path for path in parts}
        suite = self.root / "tests/smoke"
        files |= {
            f"smoke/{path.name}": path for path in [*suite.glob("*.py"), suite / "pytest.ini"]
        }
        planted = suite / "pitfalls"
        files |= {
            f"smoke/{path.relative_to(suite)}": path
            for path in planted.rglob("*")
            if path.suffix in {".py", ".ini"}
        }
        files |= {f"train/{path.name}": path for path in (self.root / "train").glob("*.py")}
        return files

    def globs(self, name: str) -> list[str]:
        """The globs of one of the lists in docker/, trim.txt for one."""
        lines = (self.docker / name).read_text(encoding="utf-8").splitlines()
        return [glob for line in lines for glob in line.partition("#")[0].split()]


@dataclass(frozen=True)
class Contents:
    """What the context holds beside the repository's files, each by its path on this machine."""

    wheels: tuple[Path, ...]
    nvcc_wheels: tuple[Path, ...]
    nccl_tests: Path | None  # a git directory
    nccl_tests_commit: str


def fingerprint(
    checkout: Checkout, variant: Variant, wishes: str, *, without: tuple[str, ...] = ()
) -> str:
    """A hash over all that goes into the image, `wishes` among it: same hash, same image.

    Files whose name in the context begins with one of `without` do not count.
    """
    digest = hashlib.sha256()
    staged = checkout.staged().items()
    files = {name: path for name, path in staged if not name.startswith(without)}
    files["lock.txt"] = variant.lock_path
    if variant.nvcc_lock_path.is_file():
        files["nvcc.txt"] = variant.nvcc_lock_path
    for name, path in sorted(files.items()):
        digest.update(f"{name} {path.stat().st_mode:o}\n".encode())
        digest.update(path.read_bytes())
    digest.update(f"{variant} {wishes} {__version__}".replace(str(checkout.root), "").encode())
    return digest.hexdigest()


@contextlib.contextmanager
def lock(variant: Variant, progress: Progress) -> Iterator[None]:
    """One build of a variant at a time: a second waits, then finds nothing to do."""
    folder = cache.folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{variant.name}.lock").open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say(f"another build of {variant.name} is at work: waiting for it")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def staged(
    checkout: Checkout, variant: Variant, contents: Contents, facts: Mapping[str, Any]
) -> Iterator[Path]:
    """The context's folder, always at the same path: BuildKit then sends only what changed."""
    folder = cache.folder() / "context" / variant.name
    shutil.rmtree(folder, ignore_errors=True)
    try:
        for name, path in checkout.staged().items():
            _place(path, folder / name)
        for path in contents.wheels:
            _place(path, folder / "venv/wheels" / path.name, link=True)
        _place(variant.lock_path, folder / "venv/lock.txt")
        if contents.nccl_tests is not None:
            for path in contents.nvcc_wheels:
                _place(path, folder / "nccl-tests/wheels" / path.name, link=True)
            _place(variant.nvcc_lock_path, folder / "nccl-tests/nvcc.txt")
            source = folder / "nccl-tests/source"
            nccl_tests.export(contents.nccl_tests, contents.nccl_tests_commit, source)
        (folder / "facts.json").write_text(json.dumps(facts, indent=1))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _place(source: Path, target: Path, *, link: bool = False) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if link:
        os.link(source, target)
    else:
        shutil.copy2(source, target)
