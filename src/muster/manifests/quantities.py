"""Kubernetes' quantities of memory.

https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
"""

import re
from decimal import Decimal

_DECIMAL = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_SMALL = {"m": 10**3, "u": 10**6, "n": 10**9}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_QUANTITY = re.compile(
    r"(?P<number>[+-]?(\d+\.?\d*|\.\d+))(?P<unit>[KMGTPE]i|[numkMGTPE]?|[eE][+-]?\d{1,3})"
)


def parse(text: str) -> Decimal | None:
    """The number that `text` spells ("2Gi" is 2147483648, "500m" is 0.5); None when none."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    number, unit = Decimal(match["number"]), match["unit"]
    if unit in _SMALL:
        return number / _SMALL[unit]
    if unit[:1] in {"e", "E"} and len(unit) > 1 and unit != "Ei":
        return number * Decimal(f"1{unit}")
    return number * (_DECIMAL | _BINARY).get(unit, 1)


def binary(count: int) -> str:
    """Bytes in the largest unit that is exact: 2Gi, 1536Mi."""
    for unit in ("Gi", "Mi", "Ki"):
        if count % _BINARY[unit] == 0:
            return f"{count // _BINARY[unit]}{unit}"
    return str(count)
