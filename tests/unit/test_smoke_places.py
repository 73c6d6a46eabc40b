"""What a container of the suite asks for: on its own, as one of several, on a host of a file."""

import shlex
from dataclasses import replace

import pytest
from tests.unit.conftest import ROOT

from muster import fabric, pins
from muster.engine import Ask, AskRefused
from muster.errors import MoreNodesThanHosts, NotANumber, RanksOfHostsUnknown
from muster.finding import Severity
from muster.node import Node
from muster.pins import Variant
from muster.smoke import command, container, nodes, remote
from muster.smoke.command import Among
from muster.smoke.hosts import Host
from muster.smoke.remote import Hosts
from muster.smoke.settings import Settings, Wish
from muster.suite import BY_NAME, Reach, chosen
from muster.topology import Topology

CPU, GPUS = Node(0, infiniband=False), Node(8, infiniband=True)
ALONE = Among(("gpu-1",))
PAIR = (Host("alpha"), Host("beta", user="root", port=2222))


def settings(nnodes: int = 1, nproc_per_node: int = 8) -> Settings:
    steps = chosen(nnodes=nnodes) if nnodes > 1 else None
    return Settings(Topology(nnodes, nproc_per_node), 2**30, "docker/pins.toml", None, steps=steps)


@pytest.fixture(scope="module")
def cu13() -> Variant:
    return pins.read(ROOT / "docker").variant("cu13")


@pytest.fixture(scope="module")
def cpu() -> Variant:
    return pins.read(ROOT / "docker").variant("cpu")


def ib_shared() -> fabric.Fabric:
    return fabric.read(ROOT / "k8s/fabrics", "ib-shared")


# ---- one container -----------------------------------------------------------------------------


def test_a_container_asks_for_what_its_node_has(cpu: Variant, cu13: Variant) -> None:
    asks = container.spec_of(cu13, "muster:cu13", GPUS, settings(), ALONE).asks
    assert asks == {Ask.MEMLOCK, Ask.GPUS, Ask.INFINIBAND}
    assert container.spec_of(cu13, "muster:cu13", CPU, settings(), ALONE).asks == {Ask.MEMLOCK}
    on_gpu_node = container.spec_of(cpu, "muster:cpu", GPUS, settings(), ALONE).asks
    assert on_gpu_node == {Ask.MEMLOCK, Ask.INFINIBAND}


def test_memory_that_cannot_be_unlimited_is_locked_by_root(cu13: Variant) -> None:
    spec = container.spec_of(cu13, "muster:cu13", GPUS, settings(), ALONE)
    without_limit = container.without(spec, Ask.MEMLOCK)
    assert (without_limit.user, Ask.MEMLOCK in without_limit.asks) == ("0:0", False)
    without_gpus = container.without(spec, Ask.GPUS)
    assert (without_gpus.user, Ask.GPUS in without_gpus.asks) == (None, False)


@pytest.mark.parametrize("ask", list(Ask))
def test_a_refusal_is_an_error_unless_another_step_decides(ask: Ask) -> None:
    found = container.refusal(AskRefused(ask, "the Engine's words"))
    assert found.evidence.endswith("the Engine's words")
    assert (found.severity is Severity.WARNING) == (ask is Ask.MEMLOCK)


def test_the_flags_say_how_it_was_run(cu13: Variant) -> None:
    spec = container.spec_of(cu13, "muster:cu13", GPUS, settings(), ALONE)
    assert container.flags(container.without(spec, Ask.MEMLOCK), settings()) == {
        "shm": "1 GiB (docker/pins.toml)",
        "memlock": "refused, so root with IPC_LOCK",
        "gpus": "all",
        "infiniband": "/dev/infiniband",
        "nproc_per_node": "8",
    }
    assert container.flags(spec, settings(2, 4))["nnodes"] == "2"


def test_the_settings_are_the_options_of_the_suite() -> None:
    given = replace(
        settings(),
        step_timeout_s=7,
        steps=("versions", "memlock"),
        floors="300",
        on_purpose=("NCCL_NET",),
        nodes_floor_gb_s=180.0,
    )
    words = shlex.join(command.in_image(given, Among(("a", "b"), 1), infiniband=True))
    for option in (
        "--nodes a,b --node-rank 1 --infiniband --step-timeout 7 --steps versions,memlock",
        "--on-purpose=NCCL_NET --nodes-floor 180.0 --floors 300",
        "-c /opt/muster/smoke/pytest.ini",
    ):
        assert option in words


# ---- several on one machine ---------------------------------------------------------------------


def test_what_the_machine_can_do_is_asked_by_the_first_container_alone() -> None:
    both = settings(2, 4)
    first, second = (nodes.own_steps(both, rank).steps for rank in (0, 1))
    assert first == both.steps
    assert second is not None
    assert {BY_NAME[name].reach for name in second} == {Reach.CONTAINER, Reach.NODES}


def test_containers_share_the_gpus_of_the_machine_out(cu13: Variant) -> None:
    both = settings(2, 4)
    spec = container.spec_of(cu13, "muster:cu13", GPUS, both, Among(("node-0", "node-1"), 1))
    shares = [
        nodes.with_own_gpus(spec, both, rank).environment["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)
    ]
    assert shares == ["0,1,2,3", "4,5,6,7"]
    assert nodes.with_own_gpus(spec, settings(), 0).environment == {}
    without = container.without(spec, Ask.GPUS)
    assert nodes.with_own_gpus(without, both, 1).environment == {}


# ---- hosts -------------------------------------------------------------------------------------


def test_every_host_runs_the_same_but_for_its_rank(cu13: Variant) -> None:
    hosts = Hosts.of(PAIR, ib_shared(), None)
    made = remote.commands(cu13, "muster:cu13", hosts, settings(2), {})
    assert [each.host for each in made] == list(PAIR)
    assert made[0].container != made[1].container
    words = [shlex.join(each.argv) for each in made]
    for rank, line in enumerate(words):
        assert f"--nodes alpha,beta --node-rank {rank} " in line
        assert "--network host" in line
        assert "--gpus all" in line
        assert "--device /dev/infiniband" in line
        # the fabric sets it, so the suite takes it for no leftover
        assert "--env NCCL_NET=IB" in line
        assert "--on-purpose=NCCL_NET" in line


def test_a_fabric_s_floor_is_that_of_all_nodes(cu13: Variant) -> None:
    meant = replace(ib_shared(), busbw_floor_gb_s=350.0)
    hosts = Hosts.of(PAIR, meant, None)
    made = remote.commands(cu13, "muster:cu13", hosts, settings(2), {})
    assert "--nodes-floor 350.0" in shlex.join(made[0].argv)


def test_a_host_is_not_asked_for_what_it_refuses(cu13: Variant) -> None:
    refused = {PAIR[1]: (AskRefused(Ask.MEMLOCK, "operation not permitted"),)}
    hosts = Hosts.of(PAIR, None, None)
    made = remote.commands(cu13, "muster:cu13", hosts, settings(2), refused)
    assert ["memlock=-1" in each.argv for each in made] == [True, False]
    assert ["0:0" in each.argv for each in made] == [False, True]


def test_the_first_hosts_are_taken_and_never_more_than_there_are() -> None:
    assert Hosts.of(PAIR, None, 1).names == ("alpha",)
    with pytest.raises(MoreNodesThanHosts, match="--nnodes 3, and the file has 2 hosts"):
        Hosts.of(PAIR, None, 3)


def test_ranks_on_hosts_with_gpus_must_be_said(cpu: Variant, cu13: Variant) -> None:
    hosts = Hosts.of(PAIR, ib_shared(), None)
    assert remote.node_of(cpu, hosts, Wish()) == Node(0, infiniband=True)
    assert remote.node_of(cu13, hosts, Wish(nproc_per_node="8")) == Node(16, infiniband=True)
    with pytest.raises(RanksOfHostsUnknown, match="cu13"):
        remote.node_of(cu13, hosts, Wish())
    with pytest.raises(NotANumber, match="--nproc-per-node 'eight'"):
        remote.node_of(cu13, hosts, Wish(nproc_per_node="eight"))
