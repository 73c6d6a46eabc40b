"""The suite on several machines: one container on each host, in the host's own network."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from muster import switches
from muster.dossier import Dossier, ImageRef
from muster.engine import AskRefused, ContainerSpec
from muster.errors import MoreNodesThanHosts, RanksOfHostsUnknown
from muster.fabric import Fabric
from muster.finding import Finding
from muster.node import Node
from muster.pins import Accelerator, Variant
from muster.progress import Progress
from muster.smoke import container, ssh
from muster.smoke.command import Among
from muster.smoke.gather import Occasion, dossier
from muster.smoke.hosts import Command, Host, docker_run
from muster.smoke.listen import listen
from muster.smoke.settings import Settings, Wish
from muster.topology import positive

_VERBS = "/dev/infiniband"


@dataclass(frozen=True)
class Hosts:
    """The machines that are the nodes, and what joins them."""

    hosts: tuple[Host, ...]
    fabric: Fabric | None

    @classmethod
    def of(cls, hosts: Sequence[Host], fabric: Fabric | None, nnodes: int | None) -> "Hosts":
        """The first `nnodes` of them. Raises MoreNodesThanHosts."""
        if nnodes is not None and nnodes > len(hosts):
            raise MoreNodesThanHosts(nnodes, len(hosts))
        return cls(tuple(hosts[:nnodes]), fabric)

    @property
    def infiniband(self) -> bool:
        """Whether the fabric needs the verbs devices."""
        return self.fabric is not None and _VERBS in self.fabric.docker.devices

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.hosts)


def node_of(variant: Variant, hosts: Hosts, wish: Wish) -> Node:
    """What each host is taken to have: nobody can look at it from here."""
    if variant.accelerator is Accelerator.CPU:
        return Node(0, hosts.infiniband)
    if wish.nproc_per_node is None:
        raise RanksOfHostsUnknown(variant.name)
    # as many as are asked for: a host that has fewer fails its own steps
    gpus = positive("--nproc-per-node", wish.nproc_per_node) * len(hosts.hosts)
    return Node(gpus, hosts.infiniband)


def commands(
    variant: Variant,
    ref: str,
    hosts: Hosts,
    settings: Settings,
    refused: Mapping[Host, Iterable[AskRefused]],
) -> list[Command]:
    """What each host runs; without what it refuses."""
    run = uuid.uuid4().hex[:12]
    found = []
    for rank, host in enumerate(hosts.hosts):
        spec = _spec(variant, ref, hosts, settings, rank)
        for each in refused.get(host, ()):
            spec = container.without(spec, each.ask)
        name = f"muster-smoke-{run}-{rank}"
        found.append(Command(host, name, docker_run(spec, hosts.fabric, name)))
    return found


def on_hosts(
    variant: Variant,
    ref: str,
    hosts: Hosts,
    settings: Settings,
    command_line: str,
    progress: Progress,
) -> Dossier:
    """Run the suite on all hosts by ssh. Raises HostsNotReady and HostsDisagree before that."""
    image = ssh.image_id(hosts.hosts, ref)
    refused = ssh.refusals(hosts.hosts, _spec(variant, ref, hosts, settings, 0), hosts.fabric)
    findings = _findings(refused)
    run = {
        "hosts": ", ".join(hosts.names),
        "fabric": hosts.fabric.name if hosts.fabric else "not named",
        "nproc_per_node": str(settings.topology.nproc_per_node),
    }
    occasion = Occasion(command_line=command_line, image=ImageRef(ref=ref, id=image), run=run)
    progress.say(f"{ref} on {', '.join(hosts.names)}")
    with ssh.started(commands(variant, ref, hosts, settings, refused)) as suites:
        heard = listen(dict(zip(hosts.names, suites, strict=True)), settings.repeat, progress)
    return dossier(heard, occasion, findings)


def _findings(refused: Mapping[Host, Iterable[AskRefused]]) -> list[Finding]:
    return [
        replace(found, where=f"{host.name}: {found.where}")
        for host, each in refused.items()
        for found in map(container.refusal, each)
    ]


def _spec(variant: Variant, ref: str, hosts: Hosts, settings: Settings, rank: int) -> ContainerSpec:
    gpus = 0 if variant.accelerator is Accelerator.CPU else settings.topology.nproc_per_node
    fabric = hosts.fabric
    node = Node(gpus, hosts.infiniband)
    if fabric is not None:
        on_purpose = tuple(name for name in fabric.environment if name in switches.DEBUG_SWITCHES)
        settings = replace(
            settings, on_purpose=on_purpose, nodes_floor_gb_s=fabric.busbw_floor_gb_s
        )
    return container.spec_of(variant, ref, node, settings, Among(hosts.names, rank))
