"""A container of the suite: what it asks of the Engine, and what to do where that is refused."""

from collections.abc import Callable
from dataclasses import replace

from muster import finding, size
from muster.engine import Ask, AskRefused, Container, ContainerSpec, Engine, Image
from muster.errors import ImageNotBuilt, NotMustersImage
from muster.finding import Finding, Severity
from muster.node import Node
from muster.pins import LABEL_VARIANT, Accelerator, Variant
from muster.progress import Progress
from muster.smoke import command
from muster.smoke.command import Among
from muster.smoke.settings import Settings


def image_of(engine: Engine, variant: Variant, ref: str, progress: Progress) -> Image:
    """Muster's image `ref`; containers of commands that were killed are removed on the way."""
    image = engine.image(ref)
    if image is None:
        raise ImageNotBuilt(ref, variant.name)
    if LABEL_VARIANT not in image.labels:
        raise NotMustersImage(ref, LABEL_VARIANT)
    if swept := engine.sweep():
        progress.say(f"removed {swept} containers of commands that were killed")
    return image


def spec_of(
    variant: Variant, ref: str, node: Node, settings: Settings, among: Among
) -> ContainerSpec:
    """The one place that says how a container of the suite is run.

    The stack limit is left alone: unlimited makes glibc give every thread 2 MB.
    """
    asks = {Ask.MEMLOCK}
    if node.gpus and variant.accelerator is Accelerator.CUDA:
        asks.add(Ask.GPUS)
    if node.infiniband:
        asks.add(Ask.INFINIBAND)
    return ContainerSpec(
        image=ref,
        command=tuple(command.in_image(settings, among, infiniband=node.infiniband)),
        shm_bytes=settings.shm_bytes,
        asks=frozenset(asks),
        cap_add=("IPC_LOCK",),
    )


def started(
    start: Callable[[ContainerSpec], Container], spec: ContainerSpec, findings: list[Finding]
) -> tuple[Container, ContainerSpec]:
    """The started container, without what the Engine refused; a Finding for each refusal."""
    while True:
        try:
            return start(spec), spec
        except AskRefused as refused:
            findings.append(refusal(refused))
            spec = without(spec, refused.ask)


def without(spec: ContainerSpec, ask: Ask) -> ContainerSpec:
    """`spec` as it can run where `ask` is refused."""
    spec = replace(spec, asks=spec.asks - {ask})
    # IPC_LOCK lifts the limit too, but only for root: other users do not inherit it
    return replace(spec, user="0:0") if ask is Ask.MEMLOCK else spec


def refusal(refused: AskRefused) -> Finding:
    """What it means that the Engine refused this."""
    what, remedy, severity = {
        Ask.MEMLOCK: (
            "the Engine refuses --ulimit memlock=-1; the suite ran as root with IPC_LOCK instead",
            "give dockerd the right: LimitMEMLOCK=infinity in its unit, or CAP_SYS_RESOURCE",
            # step memlock decides whether memory can be locked all the same
            Severity.WARNING,
        ),
        Ask.GPUS: (
            "the Engine cannot give GPUs to a container; the suite ran without",
            "install nvidia-container-toolkit, run nvidia-ctk runtime configure, restart dockerd",
            Severity.ERROR,
        ),
        Ask.INFINIBAND: (
            "the Engine cannot give /dev/infiniband to a container; the suite ran without",
            "check that the Engine runs on this node and may pass devices",
            Severity.ERROR,
        ),
    }[refused.ask]
    told = finding.error if severity is Severity.ERROR else finding.warning
    return told(
        "the Docker Engine",
        what,
        evidence=refused.evidence,
        cause="this Engine or the machine it runs on lacks the right or the device",
        remedy=remedy,
    )


def flags(spec: ContainerSpec, settings: Settings) -> dict[str, str]:
    """The run's flags in words, as the output and the report state them."""
    named = {
        "shm": f"{size.binary(spec.shm_bytes)} ({settings.shm_named_by})",
        "memlock": "unlimited" if Ask.MEMLOCK in spec.asks else "refused, so root with IPC_LOCK",
        "gpus": "all" if Ask.GPUS in spec.asks else "none",
        "infiniband": "/dev/infiniband" if Ask.INFINIBAND in spec.asks else "none",
        "nproc_per_node": str(settings.topology.nproc_per_node),
    }
    nnodes = settings.topology.nnodes
    return named if nnodes == 1 else {"nnodes": str(nnodes), **named}
