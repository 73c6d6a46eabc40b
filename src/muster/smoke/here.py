"""The suite without a container: under an interpreter of this machine."""

import os
import socket
import tempfile
from pathlib import Path

from muster import process
from muster.dossier import Dossier
from muster.errors import (
    NodesWithoutContainers,
    NotAPython,
    ShmSizeWithoutContainer,
    WrongPython,
)
from muster.node import Node
from muster.progress import Progress
from muster.smoke import command
from muster.smoke.command import Among
from muster.smoke.gather import Heard, Occasion, dossier
from muster.smoke.settings import SHM_FLAG, Settings
from muster.steps import Log

_NEEDED = ("torch", "pytest", "pytest_timeout", "pytest_reportlog")


def here(
    root: Path,
    python: str,
    node: Node,
    settings: Settings,
    command_line: str,
    progress: Progress,
) -> Dossier:
    """Run the suite of the checkout `root` under the interpreter `python`."""
    if settings.shm_named_by == SHM_FLAG:
        raise ShmSizeWithoutContainer
    if settings.topology.nnodes > 1:
        raise NodesWithoutContainers(settings.topology.nnodes)
    _check_python(python)
    run = {"python": python, "nproc_per_node": str(settings.topology.nproc_per_node)}
    occasion = Occasion(command_line=command_line, image=None, run=run)
    among = Among((socket.gethostname(),))
    argv = command.suite(
        settings,
        among,
        python=python,
        root=root,
        folder="tests/smoke",
        infiniband=node.infiniband,
    )
    # what the interpreter was seen to have it may have from PYTHONPATH
    path = os.pathsep.join(filter(None, [str(root / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    log = Log(progress, settings.repeat)
    # torchrun leaves a folder of logs behind in TMPDIR at every start
    with tempfile.TemporaryDirectory(prefix="muster-smoke-") as folder:
        environment["TMPDIR"] = folder
        done = process.run(argv, env=environment, on_line=log.read_line)
    errors = [line for line in done.last_lines(40) if not line.startswith("{")]
    heard = Heard(host=among.node, log=log, ending=done.ending, errors=errors)
    return dossier([heard], occasion, [])


def _check_python(python: str) -> None:
    """That `python` runs and has what the suite needs; WrongPython names what is missing."""
    code = (
        "import importlib.util as u, sys\n"
        f"print(' '.join(n for n in {_NEEDED!r} if u.find_spec(n) is None))"
    )
    try:
        found = process.run([python, "-c", code], limit_s=60)
    except OSError as error:
        raise NotAPython(python, error.strerror or str(error)) from None
    if not found.ok:
        raise NotAPython(python, found.ending)
    if missing := found.output.split():
        raise WrongPython(python, [name.replace("_", "-") for name in missing])
