"""The wheelhouse: the locks' wheels in the user's cache, fetched by the host's pip, each by hash.

The host's pip, so that its mirrors, proxies, CA bundle and find-links count; the hashes, so that
it does not matter where a wheel came from.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from muster import process
from muster.errors import (
    CannotWrite,
    DiskFull,
    MusterError,
    WheelHashDiffers,
    WheelhouseIncomplete,
    WheelsNotFetched,
)
from muster.pins import Wheel
from muster.progress import Progress

# pip expands none of these downwards except 2014 to 2010 and 1, and wheels use all five
_PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_25_x86_64",
    "manylinux_2_18_x86_64",
    "manylinux2014_x86_64",
)


STALE_S = 24 * 3600.0


@dataclass(frozen=True)
class Target:
    """Which wheels pip is to choose: for that CPython ("3.11") on x86_64 Linux."""

    python: str

    def takes(self, wheel_file: Path) -> bool:
        """Whether a wheel of that name installs there, its platform apart."""
        digits = self.python.replace(".", "")
        tags = parse_wheel_filename(wheel_file.name)[3]
        return any(
            tag.interpreter in (f"cp{digits}", f"py{digits}", "py3")
            or _is_older_abi3(tag, self.python)
            for tag in tags
        )

    @property
    def pip_flags(self) -> list[str]:
        platforms = [word for tag in _PLATFORMS for word in ("--platform", tag)]
        return ["--implementation", "cp", "--python-version", self.python, *platforms]


def _is_older_abi3(tag: Tag, python: str) -> bool:
    """Whether `tag` is of the stable ABI, from that Python or an older one."""
    digits = tag.interpreter.removeprefix("cp3")
    return tag.abi == "abi3" and digits.isdigit() and int(digits) <= int(python.split(".")[1])


class Wheelhouse:
    """A folder of wheels, shared by all variants; only files that match their hash come in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fetch(
        self, wheels: Sequence[Wheel], target: Target, offline: bool, progress: Progress
    ) -> dict[Wheel, Path]:
        """The files of all `wheels`; what was missing is fetched by pip first."""
        found = self.find(wheels, target)
        missing = [wheel for wheel in wheels if wheel not in found]
        if not missing:
            return found
        if offline:
            raise WheelhouseIncomplete([str(wheel) for wheel in missing], self.folder)
        progress.say(f"fetching {len(missing)} wheels into {self.folder}")
        with _disk_full_named(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            # what a fetch that was killed left; two of one variant never fetch at once
            for stale in self.folder.glob(".incoming-*"):
                if time.time() - stale.stat().st_mtime > STALE_S:
                    shutil.rmtree(stale, ignore_errors=True)
            # beside the wheels: moved in when whole, gone after an interruption
            with tempfile.TemporaryDirectory(prefix=".incoming-", dir=self.folder) as incoming:
                _download(missing, target, Path(incoming), progress)
                for path in sorted(Path(incoming).glob("*.whl")):
                    path.replace(self.folder / path.name)
        return self.find(wheels, target)

    def find(self, wheels: Sequence[Wheel], target: Target) -> dict[Wheel, Path]:
        """Those of `wheels` that lie here; WheelHashDiffers names one that is another file."""
        releases = {(wheel.name, Version(wheel.version)): wheel for wheel in wheels}
        stamps = _Stamps(self.folder / ".sha256.json")
        found: dict[Wheel, Path] = {}
        others: dict[Wheel, tuple[Path, str]] = {}
        for path in sorted(self.folder.glob("*.whl")):
            release = _release(path)
            wheel = releases.get(release) if release else None
            if wheel is None or not target.takes(path):
                continue
            sha256 = stamps.sha256(path)
            if sha256 == wheel.sha256:
                found[wheel] = path
            else:
                others[wheel] = (path, sha256)
        stamps.write()
        for wheel, (path, sha256) in others.items():
            if wheel not in found:
                raise WheelHashDiffers(str(path), wheel.sha256, sha256)
        return found


class _Stamps:
    """The hashes of files that did not change since: 3 GB of wheels take seconds to hash."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._new = False
        try:
            self._known = json.loads(path.read_text())
        except (OSError, ValueError):
            self._known = {}

    def sha256(self, path: Path) -> str:
        stat = path.stat()
        # the inode change time too: copying a file over another may keep size and mtime
        now = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        known = self._known.get(path.name)
        if known is None or known[:-1] != now:
            with path.open("rb") as wheel:
                known = [*now, hashlib.file_digest(wheel, "sha256").hexdigest()]
            self._known[path.name] = known
            self._new = True
        return str(known[-1])

    def write(self) -> None:
        if self._new:
            whole = self._path.with_suffix(f".{os.getpid()}")
            # only a help: a full disk is told by what needs the room
            with contextlib.suppress(OSError):
                whole.write_text(json.dumps(self._known))
                whole.replace(self._path)


def _download(wheels: Sequence[Wheel], target: Target, into: Path, progress: Progress) -> None:
    requirements = into / "requirements.txt"
    requirements.write_text("".join(f"{wheel} --hash=sha256:{wheel.sha256}\n" for wheel in wheels))
    done = process.run(
        [
            *(sys.executable, "-m", "pip", "download", "--no-input", "--no-deps"),
            *("--progress-bar", "off", "--disable-pip-version-check", "--only-binary", ":all:"),
            *("--require-hashes", "--requirement", str(requirements), "--dest", str(into)),
            *target.pip_flags,
        ],
        on_line=progress.detail,
    )
    if not done.ok:
        raise _pip_error(done, wheels)


def _pip_error(done: process.Completed, wheels: Sequence[Wheel]) -> MusterError:
    """What pip's output says went wrong, in our words."""
    differs = re.search(
        r"^\s+(\S+) from \S+.*\n\s+Expected sha256 (\w+)\s+Got\s+(\w+)", done.output, re.MULTILINE
    )
    if differs is not None:
        return WheelHashDiffers(f"{differs[1]} as pip fetched it", differs[2], differs[3])
    if "No space left on device" in done.output:
        return DiskFull("the wheelhouse's", done.last_lines(1)[0])
    errors = [line for line in done.output.splitlines() if line.startswith("ERROR: ")]
    missing = [str(wheel) for wheel in wheels if any(str(wheel) in line for line in errors)]
    evidence = (errors or done.last_lines(1) or [done.ending])[0]
    return WheelsNotFetched(missing or [str(wheel) for wheel in wheels], evidence)


@contextlib.contextmanager
def _disk_full_named(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise CannotWrite(folder, error.strerror or str(error)) from error
        raise DiskFull("the wheelhouse's", str(error)) from error


def _release(path: Path) -> tuple[str, Version] | None:
    """Name and version that a wheel's file name spells; None for what is no wheel's name."""
    try:
        name, version, _, _ = parse_wheel_filename(path.name)
    except InvalidWheelFilename:
        return None
    return name, version
