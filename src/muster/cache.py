"""Muster's folder in the user's cache."""

import os
from pathlib import Path


def folder() -> Path:
    """XDG_CACHE_HOME/muster, else ~/.cache/muster; it may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "muster"
