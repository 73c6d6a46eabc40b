"""Sizes in bytes, read and written the way Docker does: binary units, 1k = 1024."""

import re
from decimal import Decimal

from muster.errors import NotASize

_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_BINARY = ("B", "KiB", "MiB", "GiB")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([bkmgt]?)(?:i?b)?", re.IGNORECASE | re.ASCII)


def parse(text: str) -> int:
    """Bytes in `text` ("64m" is 67108864); NotASize when it is none or is 0."""
    match = _SIZE.fullmatch(text.strip())
    size = int(Decimal(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if not 0 < size < 2**63:
        raise NotASize(text)
    return size


def binary(size: int) -> str:
    """`size` bytes in the largest unit to GiB that they fill: "8 B", "64 MiB", "1.5 GiB"."""
    unit = min(max(size.bit_length() - 1, 0) // 10, len(_BINARY) - 1)
    return f"{size / 2 ** (10 * unit):.4g} {_BINARY[unit]}"


def decimal(size: int) -> str:
    """`size` bytes in MB or GB, as `docker images` shows an image's size."""
    unit, name = (10**9, "GB") if size >= 10**9 else (10**6, "MB")
    return f"{size / unit:.3g} {name}"
