"""A Debian base without any registry: mmdebstrap makes it from Debian's own packages."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from muster import apt, process
from muster.errors import BaseNotMade, DiskFull, MissingTool
from muster.progress import Progress

# the keyring is another package than mmdebstrap on Ubuntu
PACKAGES = ("mmdebstrap", "debian-archive-keyring")
RECIPE = "slim.dpkg"


def recipe(docker: Path) -> str:
    """A hash that changes when the base would be made otherwise."""
    text = (docker / RECIPE).read_text(encoding="utf-8")
    return hashlib.sha256("\n".join([*_flags(Path(RECIPE)), text]).encode()).hexdigest()


def make(
    suite: str, docker: Path, tar: Path, confirm: Callable[[str], bool], progress: Progress
) -> None:
    """Write the root filesystem of Debian `suite` to `tar`; BaseNotMade says why it failed."""
    _ensure_tool(confirm, progress)
    progress.say(f"making Debian {suite} from its packages with mmdebstrap (half a minute)")
    made = process.run(
        ["mmdebstrap", *_flags(docker / RECIPE), suite, str(tar)], on_line=progress.detail
    )
    if made.ok:
        return
    if "No space left on device" in made.output:
        raise DiskFull(str(tar.parent), made.last_lines(1)[0])
    raise BaseNotMade(suite, made.last_lines(8))


def _flags(slim: Path) -> list[str]:
    return ["--variant=minbase", "--include=ca-certificates", f"--dpkgopt={slim}"]


def _ensure_tool(confirm: Callable[[str], bool], progress: Progress) -> None:
    if shutil.which("mmdebstrap") is not None:
        return
    may_install = os.geteuid() == 0 and apt.is_debian()
    if not may_install or not confirm("A base has to be made. Install mmdebstrap?"):
        raise MissingTool(
            "mmdebstrap",
            "install it (apt-get install mmdebstrap), or give an image with --base REF",
        )
    apt.install(PACKAGES, progress)
