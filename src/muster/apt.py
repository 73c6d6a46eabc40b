"""Debian's packages on this machine: is this a Debian, has it a package, install some."""

import os
from collections.abc import Sequence
from pathlib import Path

from muster import process
from muster.errors import PackagesNotInstalled
from muster.progress import Progress


def is_debian() -> bool:
    """Whether this machine is a Debian or one made from it, Ubuntu among them."""
    try:
        release = Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError:
        return False
    fields = dict(line.split("=", 1) for line in release.splitlines() if "=" in line)
    families = f"{fields.get('ID', '')} {fields.get('ID_LIKE', '')}".replace('"', "").split()
    return "debian" in families or "ubuntu" in families


def install(packages: Sequence[str], progress: Progress) -> None:
    """Install, as root, those of `packages` that the distribution has."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    progress.detail("apt-get update")
    # its failure shows in the install: an old list may well do
    process.run(["apt-get", "update"], env=environment, on_line=progress.detail)
    known = [name for name in packages if _has(name)] or list(packages)
    progress.say(f"apt-get install {' '.join(known)}")
    installed = process.run(
        # another apt-get may be at work on a new machine: wait for it
        ["apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "--yes", *known],
        env=environment,
        on_line=progress.detail,
    )
    if not installed.ok:
        raise PackagesNotInstalled(known, installed.last_lines())


def _has(package: str) -> bool:
    shown = process.run(["apt-cache", "show", "--no-all-versions", package])
    return shown.ok and f"Package: {package}" in shown.output
