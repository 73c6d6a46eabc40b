"""The command that runs the suite on one node: pytest, with the settings as its options."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster import steps
from muster.smoke.settings import Settings

# in the image
ROOT: Final = Path("/opt/muster")
# a backstop inside a container; every step has its own, shorter limit
SUITE_LIMIT_S: Final = 7200


@dataclass(frozen=True)
class Among:
    """Which of the nodes, by their names, a suite runs on; the first hosts what they meet in."""

    nodes: tuple[str, ...]
    node_rank: int = 0

    @property
    def node(self) -> str:
        return self.nodes[self.node_rank]


def suite(
    settings: Settings, among: Among, *, python: str, root: Path, folder: str, infiniband: bool
) -> list[str]:
    """The suite in `folder` of `root`; its report log goes to standard output."""
    steps_of = root / folder
    argv = [
        # named, or pytest would take another one that it finds above all paths that are given
        *(python, "-m", "pytest", str(steps_of), "-c", str(steps_of / "pytest.ini")),
        *("-p", "no:terminal"),
        *("--report-log", steps.REPORT, "--train", str(root / "train")),
        *("--nproc-per-node", str(settings.topology.nproc_per_node)),
        *("--shm-bytes", str(settings.shm_bytes)),
        *("--nodes", ",".join(among.nodes), "--node-rank", str(among.node_rank)),
    ]
    if infiniband:
        argv += ["--infiniband"]
    if settings.step_timeout_s is not None:
        argv += ["--step-timeout", str(settings.step_timeout_s)]
    if settings.steps is not None:
        argv += ["--steps", ",".join(settings.steps)]
    argv += [f"--on-purpose={name}" for name in settings.on_purpose]
    if settings.nodes_floor_gb_s is not None:
        argv += ["--nodes-floor", str(settings.nodes_floor_gb_s)]
    if settings.floors is not None:
        argv += ["--floors", settings.floors]
    return steps.reporting(argv)


def in_image(settings: Settings, among: Among, *, infiniband: bool) -> Sequence[str]:
    """The same in a container of the image, which ends it when nobody else does."""
    argv = suite(settings, among, python="python", root=ROOT, folder="smoke", infiniband=infiniband)
    return ["timeout", "--kill-after=10", str(SUITE_LIMIT_S), *argv]
