"""The bill of materials, /opt/muster/bom.json: every Debian package, every wheel, every pin.

Runs inside the image during its build and adds to what the host knows what only the image can
tell. Reading it needs no torch.
"""

import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from muster import process

PATH = Path("/opt/muster/bom.json")
SCHEMA = 1


def debian_packages() -> list[dict[str, str]]:
    """Name, version and architecture of every installed package, from dpkg."""
    listed = process.run(
        ["dpkg-query", "--show", "--showformat=${Package}\t${Version}\t${Architecture}\n"]
    )
    fields = ("name", "version", "architecture")
    return [dict(zip(fields, line.split("\t"), strict=True)) for line in listed.output.splitlines()]


def parts() -> dict[str, int]:
    """Bytes on disk of every wheel that is installed here, the largest first."""
    sizes: dict[str, int] = {}
    for wheel in metadata.distributions():
        files = [Path(str(wheel.locate_file(file))) for file in wheel.files or ()]
        # what the trimming took is still listed
        sizes[wheel.name] = sum(path.stat().st_size for path in files if path.is_file())
    return dict(sorted(sizes.items(), key=lambda part: -part[1]))


def complete(facts: dict[str, Any]) -> dict[str, Any]:
    """`facts` of the host (variant, base, wheels) with the image's own Python and packages."""
    return {
        "schema": SCHEMA,
        **facts,
        "python": platform.python_version(),
        "debian": debian_packages(),
        "parts": parts(),
    }


def read(text: bytes) -> dict[str, Any]:
    """The facts of a bom.json."""
    facts: dict[str, Any] = json.loads(text)
    return facts


def main() -> None:
    facts = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.stdout.write(json.dumps(complete(facts), indent=1) + "\n")


if __name__ == "__main__":
    main()
