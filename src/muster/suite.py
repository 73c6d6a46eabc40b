"""The plan of the smoke suite: its steps, what each stands on, and how long each may take.

tests/smoke has a function test_NAME for each; this is the one place that knows their order.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Final

from muster.errors import NoStepLeft, NoSuchStep, StepNeedsNodes


class Reach(Enum):
    """Whom a step is about. Containers that stand for nodes share one machine."""

    CONTAINER = "container"  # each node's own container: its limits, its files
    MACHINE = "machine"  # what the machine can do: once for all containers on it
    NODES = "nodes"  # all nodes together; only where there are several


@dataclass(frozen=True)
class Planned:
    """A step. `on` are the steps without which it says nothing; `limit_s` what it may take.

    `quick` steps are those of smoke --quick.
    """

    name: str
    reach: Reach
    limit_s: float
    on: tuple[str, ...] = ()
    quick: bool = False


# from the ground up: nobody tunes against a broken group
STEPS: Final = (
    Planned("versions", Reach.CONTAINER, 30, quick=True),
    Planned("image", Reach.MACHINE, 180, ("versions",)),
    Planned("doctor", Reach.CONTAINER, 60, quick=True),
    Planned("shm_size", Reach.CONTAINER, 30, quick=True),
    Planned("memlock", Reach.CONTAINER, 30, quick=True),
    Planned("rdma_libraries", Reach.CONTAINER, 30, quick=True),
    Planned("nccl_switches", Reach.CONTAINER, 30, quick=True),
    Planned("devices", Reach.MACHINE, 120, ("versions",), quick=True),
    Planned("all_reduce", Reach.MACHINE, 120, ("versions", "devices"), quick=True),
    Planned("subgroups", Reach.MACHINE, 120, ("all_reduce",)),
    Planned("collectives", Reach.MACHINE, 180, ("all_reduce",)),
    Planned("ddp_demo", Reach.MACHINE, 120, ("all_reduce",), quick=True),
    Planned("dataloader_shm", Reach.MACHINE, 60, ("versions",), quick=True),
    Planned("elastic_restart", Reach.MACHINE, 180, ("all_reduce",)),
    Planned("elastic_nodes", Reach.MACHINE, 240, ("elastic_restart",)),
    Planned("nccl_tests", Reach.MACHINE, 900, ("all_reduce",)),
    Planned("bandwidth", Reach.MACHINE, 600, ("all_reduce",)),
    Planned("clean_up", Reach.MACHINE, 120, ("all_reduce",)),
    Planned("nodes_meet", Reach.NODES, 600, quick=True),
    Planned("nodes_all_reduce", Reach.NODES, 180, ("nodes_meet",), quick=True),
    Planned("pairs", Reach.NODES, 1800, ("nodes_meet",)),
    Planned("nodes_subgroups", Reach.NODES, 180, ("nodes_all_reduce",)),
    Planned("nodes_ddp_demo", Reach.NODES, 180, ("nodes_all_reduce",)),
    Planned("nodes_bandwidth", Reach.NODES, 900, ("nodes_all_reduce",)),
)
BY_NAME: Final = {step.name: step for step in STEPS}


def chosen(
    *,
    nnodes: int = 1,
    quick: bool = False,
    only: Collection[str] = (),
    skip: Collection[str] = (),
) -> tuple[str, ...]:
    """The names of the steps to run, in their order. `only` takes them quick or not.

    Raises NoSuchStep, StepNeedsNodes for one of `only` that takes several, NoStepLeft.
    """
    for name in (*only, *skip):
        if name not in BY_NAME:
            raise NoSuchStep(name, tuple(BY_NAME))
    for name in only:
        if nnodes == 1 and BY_NAME[name].reach is Reach.NODES:
            raise StepNeedsNodes(name)
    names = tuple(
        step.name
        for step in STEPS
        if (nnodes > 1 or step.reach is not Reach.NODES)
        and (step.name in only if only else step.quick or not quick)
        and step.name not in skip
    )
    if not names:
        raise NoStepLeft
    return names
