"""A plugin of pytest that puts what the suite looks for at fixed paths where $STANDIN says."""

import json
import os
import sys
from pathlib import Path

from muster import bom

MACHINE = json.loads(Path(os.environ["STANDIN"]).read_text())


def pytest_collection_finish() -> None:
    sys.modules["gpus"].CONTROL = Path(MACHINE["control"])  # type: ignore[attr-defined]
    bom.PATH = Path(MACHINE["bom"])
