"""The suite in containers of this machine, one for each node, on a network of their own."""

from collections.abc import Callable
from dataclasses import replace

from muster.dossier import Dossier, ImageRef
from muster.engine import Ask, Container, ContainerSpec, Engine, Place, Stage
from muster.finding import Finding
from muster.node import Node
from muster.pins import Variant
from muster.progress import Progress
from muster.smoke import container
from muster.smoke.command import Among
from muster.smoke.gather import Occasion, dossier
from muster.smoke.listen import Running, listen
from muster.smoke.settings import Settings
from muster.suite import BY_NAME, Reach


def in_containers(
    engine: Engine,
    variant: Variant,
    ref: str,
    node: Node,
    settings: Settings,
    command_line: str,
    progress: Progress,
) -> Dossier:
    """Run the suite in `ref`, a `variant`, once for each node; go on without what is refused."""
    image = container.image_of(engine, variant, ref, progress)
    names = _names(engine, settings.topology.nnodes)
    findings: list[Finding] = []
    suites: dict[str, Running] = {}
    with engine.stage() as stage:
        first: ContainerSpec | None = None
        for rank, name in enumerate(names):
            among = Among(names, rank)
            spec = container.spec_of(variant, ref, node, own_steps(settings, rank), among)
            if first is not None:
                # what the Engine refused once it will not be asked again
                spec = replace(spec, asks=first.asks, user=first.user)
            spec = with_own_gpus(spec, settings, rank)
            suites[name], given = container.started(_start(stage, name, names), spec, findings)
            first = first or given
        assert first is not None
        flags = container.flags(first, settings)
        occasion = Occasion(
            command_line=command_line,
            image=ImageRef(ref=image.ref, id=image.id),
            run={"engine": engine.version, **flags},
        )
        progress.say(f"{image.ref} with {', '.join(f'{k}: {v}' for k, v in flags.items())}")
        heard = listen(suites, settings.repeat, progress)
    return dossier(heard, occasion, findings)


def _names(engine: Engine, nnodes: int) -> tuple[str, ...]:
    """A node on its own is the machine itself, by the name that it has."""
    return (engine.host,) if nnodes == 1 else tuple(f"node-{rank}" for rank in range(nnodes))


def own_steps(settings: Settings, rank: int) -> Settings:
    """What the machine can do is asked once, by the first of the nodes that share it."""
    if rank == 0 or settings.steps is None:
        return settings
    own = (name for name in settings.steps if BY_NAME[name].reach is not Reach.MACHINE)
    return replace(settings, steps=tuple(own))


def with_own_gpus(spec: ContainerSpec, settings: Settings, rank: int) -> ContainerSpec:
    """With this node's share of the machine's GPUs, where there are several nodes."""
    topology = settings.topology
    if topology.nnodes == 1 or Ask.GPUS not in spec.asks:
        return spec
    first = rank * topology.nproc_per_node
    devices = ",".join(map(str, range(first, first + topology.nproc_per_node)))
    return replace(spec, environment={**spec.environment, "CUDA_VISIBLE_DEVICES": devices})


def _start(stage: Stage, name: str, names: tuple[str, ...]) -> Callable[[ContainerSpec], Container]:
    # a machine's own name may be longer than a container's may be
    place = Place() if len(names) == 1 else Place(hostname=name, aliases=(name,))
    return lambda spec: stage.start(spec, place)
