"""Sizes in bytes, read and written the way Docker does: binary units, 1k = 1024."""

import re
from decimal import Decimal

from muster.errors import NotASize

_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([bkmgt]?)(?:i?b)?", re.IGNORECASE | re.ASCII)


def parse(text: str) -> int:
    """Bytes in `text` ("64m" is 67108864); NotASize when it is none or is 0."""
    match = _SIZE.fullmatch(text.strip())
    size = int(Decimal(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if not 0 < size < 2**63:
        raise NotASize(text)
    return size


def binary(size: int) -> str:
    """`size` bytes in MiB or GiB, e.g. "64 MiB", "1.5 GiB"."""
    unit, name = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
    return f"{size / unit:.4g} {name}"


def decimal(size: int) -> str:
    """`size` bytes in MB or GB, as `docker images` shows an image's size."""
    unit, name = (10**9, "GB") if size >= 10**9 else (10**6, "MB")
    return f"{size / unit:.3g} {name}"
