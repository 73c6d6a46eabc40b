"""What goes wrong without a GPU, made to happen with the image's torchrun and gloo, and explained.

Two containers stand for two nodes. All scenes are played in them, some at a time, each on a port of
its own; what a scene printed on each node is a file, as a user has it.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count, repeat
from pathlib import Path
from types import MappingProxyType

import docker
import pytest
from tests.image.harness import ROOT, left_on, run, stages_left_on

from muster.engine import Container, ContainerSpec, Engine, Place
from muster.explain import explanation as explanations

FAULTS = ROOT / "tests/image/faults"
FOLDER = "/tmp/faults"
TRAIN = "/opt/muster/train"
# each of its processes imports torch, a second of a core; then most only wait
AT_ONCE = 1 + (os.cpu_count() or 1)
# what one process may take, in a container, before it is ended
LIMIT_S = 90
NOTHING: Mapping[str, str] = MappingProxyType({})
WRITE = f"""
import json, pathlib, sys
folder = pathlib.Path("{FOLDER}")
folder.mkdir()
for name, text in json.loads(sys.argv[1]).items():
    (folder / name).write_text(text)
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A command on a node, started `after_s` seconds after its scene."""

    argv: tuple[str, ...]
    node: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    after_s: float = 0

    def words(self, port: int) -> list[str]:
        """The argv for a container, with both outputs in one and `port` for <port>."""
        told = [f"{name}={value}" for name, value in self.environment.items()]
        shell = ["sh", "-c", 'exec "$@" 2>&1', "sh", "timeout", "-s", "KILL", str(LIMIT_S)]
        words = ["env", *told, *shell, *self.argv]
        return [word.replace("<port>", str(port)) for word in words]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """`ids` are the faults to be diagnosed, the first of which is told with `words` and has a
    remedy that names its `cure`.
    """

    name: str
    runs: tuple[Run, ...]
    ids: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    cure: str = ""


# ---- how ranks are started ---------------------------------------------------------------------


def script(name: str) -> str:
    return f"{FOLDER}/{name}.py"


def ranks(
    *words: str,
    nproc: int = 2,
    flags: tuple[str, ...] = (),
    node: int = 0,
    environment: Mapping[str, str] = NOTHING,
) -> Run:
    """So many ranks on one node."""
    torchrun = ("python", "-m", "torch.distributed.run", "--standalone")
    argv = (*torchrun, f"--nproc-per-node={nproc}", *flags, *words)
    return Run(argv=argv, environment=environment, node=node)


def rank(number: int, host: str = "node-0", beside: str = "") -> Run:
    """A rank of two that no torchrun started, each on its node; `beside` is a script that has the
    master's port.
    """
    settings = {"MASTER_ADDR": host, "MASTER_PORT": "<port>", "RANK": str(number)}
    argv: tuple[str, ...] = ("python", script("meet"))
    if beside:
        shell = 'python "$0" <port> & python "$1"; kill $!'
        argv = ("sh", "-c", shell, script(beside), script("meet"))
    return Run(argv=argv, node=min(number, 1), environment={**settings, "WORLD_SIZE": "2"})


def agent(
    node: int,
    *words: str,
    after_s: float = 0,
    environment: Mapping[str, str] = NOTHING,
    **flags: str,
) -> Run:
    """Torchrun with one rank on one of two nodes, which runs ddp_demo or `words`."""
    settings = {
        "nnodes": "2",
        "nproc-per-node": "1",
        "rdzv-id": "job-1",
        "rdzv-backend": "c10d",
        "rdzv-endpoint": "node-0:<port>",
        "rdzv-conf": "join_timeout=6,read_timeout=6,timeout=6",
    }
    settings |= {name.replace("_", "-"): value for name, value in flags.items()}
    given = [f"--{name}={value}" for name, value in settings.items() if value]
    program = words or (f"{TRAIN}/ddp_demo.py",)
    return Run(
        argv=("python", "-m", "torch.distributed.run", *given, *program),
        node=node,
        environment=environment,
        after_s=after_s,
    )


def static(node: int) -> Run:
    return agent(
        node,
        rdzv_id="",
        rdzv_backend="",
        rdzv_endpoint="",
        node_rank=str(node),
        master_addr="node-0",
        master_port="<port>",
    )


DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
TELLING = {"LOGLEVEL": "INFO"}
PATIENT = "join_timeout=60,read_timeout=60,timeout=60"
SCENES = (
    # ---- a rank that ends ----------------------------------------------------------------------
    Scene(
        name="a rank raises, in torchrun's words of each rank",
        runs=(
            ranks(
                script("rank_ends"),
                "raise",
                flags=("--tee=3",),
                environment={"TORCH_CPP_LOG_LEVEL": "INFO"},
            ),
        ),
        ids=("rank-raised",),
        words=("KeyError: 'labels'",),
        cure="traceback",
    ),
    Scene(
        name="a rank raises, and its output is in a file",
        runs=(ranks(script("rank_ends"), "raise", flags=("--redirects=3", "--log-dir=/tmp")),),
        ids=("child-failed",),
        words=("rank 1 ended with exit code 1",),
        cure="--tee 3",
    ),
    Scene(
        name="a rank raises while calls are compared",
        runs=(ranks(script("rank_ends"), "raise", environment=DETAIL),),
        ids=("rank-raised",),
        words=("KeyError: 'labels'",),
    ),
    Scene(
        name="a rank is killed for memory",
        runs=(ranks(script("memory"), node=1),),
        ids=("killed",),
        words=("rank 1 was killed (SIGKILL)",),
        cure="raise the memory limit",
    ),
    Scene(
        name="a rank crashes",
        runs=(ranks(script("rank_ends"), "SIGSEGV"),),
        ids=("segfault",),
        words=("rank 1 crashed (SIGSEGV)",),
        cure="PYTHONFAULTHANDLER=1",
    ),
    Scene(
        name="torchrun is told to end",
        runs=(ranks("sh", "-c", "kill -TERM $PPID; exec sleep 30", flags=("--no-python",)),),
        ids=("preempted",),
        words=("SIGTERM from outside",),
        cure="save checkpoints",
    ),
    # ---- calls that differ ---------------------------------------------------------------------
    Scene(
        name="a rank makes one call more",
        runs=(ranks(script("calls_differ"), "one more"),),
        ids=("left-early",),
        words=("rank 1 was in a collective when another rank left",),
        cure="same collectives",
    ),
    Scene(
        name="a rank makes one call more beside a busy one",
        runs=(ranks(script("calls_differ"), "one more beside a busy rank"),),
        ids=("gloo-timeout",),
        words=("a gloo collective timed out",),
        cure="TORCH_DISTRIBUTED_DEBUG=DETAIL",
    ),
    Scene(
        name="a rank makes one call more beside a busy one while calls are compared",
        runs=(ranks(script("calls_differ"), "one more beside a busy rank", environment=DETAIL),),
        ids=("barrier-left",),
        words=("rank 0 is not in the collective in which another rank waits",),
        cure="read the log of rank 0",
    ),
    Scene(
        name="shapes differ",
        runs=(ranks(script("calls_differ"), "shape"),),
        ids=("gloo-sizes-differ",),
        words=("different sizes", "8 vs 4"),
        cure="same shapes",
    ),
    Scene(
        name="kinds of calls differ while calls are compared",
        runs=(ranks(script("calls_differ"), "kind", environment=DETAIL),),
        ids=("collective-fingerprint",),
        words=("ALLREDUCE", "BROADCAST"),
        cure="same order",
    ),
    Scene(
        name="a rank does not come to monitored_barrier",
        runs=(ranks(script("not_at_barrier")),),
        ids=("monitored-barrier",),
        words=("rank 1 did not come to monitored_barrier",),
        cure="log of rank 1",
    ),
    # ---- the training program ------------------------------------------------------------------
    Scene(
        name="parameters are unused",
        runs=(
            ranks(
                script("unused_parameters"),
                nproc=1,
                environment={"TORCH_DISTRIBUTED_DEBUG": "INFO"},
            ),
        ),
        ids=("unused-parameters",),
        words=("took no part in the loss", "1.bias, 1.weight"),
        cure="find_unused_parameters=True",
    ),
    Scene(
        name="models differ",
        runs=(ranks(script("models_differ")),),
        ids=("models-differ",),
        words=("different models", "sizes [5, 4]"),
        cure="same configuration",
    ),
    Scene(
        name="the group is made twice",
        runs=(ranks(script("init_twice"), nproc=1),),
        ids=("init-twice",),
        cure="is_initialized()",
    ),
    Scene(
        name="a package is missing",
        runs=(ranks(script("package_missing")),),
        ids=("rank-raised",),
        words=("No module named 'no_such_package'",),
    ),
    Scene(
        name="gloo's interface is missing",
        runs=(ranks(script("meet"), nproc=1, environment={"GLOO_SOCKET_IFNAME": "eth9"}),),
        ids=("gloo-no-interface",),
        words=("GLOO_SOCKET_IFNAME=eth9 names no interface",),
        cure="unset it",
    ),
    Scene(
        name="the script is missing",
        runs=(ranks("/work/no_such.py"),),
        ids=("script-missing",),
        words=("there is no script /work/no_such.py",),
        cure="full path",
    ),
    Scene(
        name="shared memory is too small",
        runs=(Run(argv=("python", f"{TRAIN}/dataloader_shm.py")),),
        ids=("dataloader-shm-full",),
        words=("/dev/shm is too small",),
        cure="--shm-size",
    ),
    Scene(
        name="shared memory is too small for a file that a worker maps",
        runs=(Run(argv=("python", script("bus_error"))),),
        ids=("dataloader-bus-error",),
        words=("bus error", "shared memory is too small"),
        cure="--shm-size",
    ),
    # ---- ranks that meet by the environment ----------------------------------------------------
    Scene(
        name="no torchrun",
        runs=(Run(argv=("python", script("meet"))),),
        ids=("env-missing",),
        words=("RANK is not set",),
        cure="torchrun",
    ),
    Scene(
        name="rank 1 is missing",
        runs=(rank(0),),
        ids=("ranks-missing",),
        words=("only 1 of 2 ranks came",),
        cure="start as many nodes",
    ),
    Scene(
        name="rank 0 is missing",
        runs=(rank(1),),
        ids=("store-unreachable",),
        words=("node-0",),
        cure="MASTER_ADDR",
    ),
    Scene(
        name="a rank is beyond the world",
        runs=(rank(0), rank(2)),
        ids=("rank-beyond-world",),
        words=("rank 2 is beyond the world", "there are 2 ranks"),
        cure="WORLD_SIZE = nnodes x nproc_per_node",
    ),
    Scene(
        name="the port is taken",
        runs=(rank(0, beside="ssh_banner"),),
        ids=("port-in-use",),
        words=("port <port> is taken",),
        cure="another port",
    ),
    Scene(
        name="another program has the port",
        runs=(rank(1, "node-1", beside="ssh_banner"),),
        ids=("foreign-server",),
        words=("what listens at node-1:<port> is not torch's store",),
        cure="choose a port",
    ),
    Scene(
        name="the master has no address",
        runs=(rank(1, "no-such-node"),),
        ids=("dns",),
        words=("no-such-node has no address",),
        cure="MASTER_ADDR",
    ),
    # ---- torchrun on two nodes -----------------------------------------------------------------
    Scene(
        name="a node comes late and in time",
        runs=(agent(0, rdzv_conf=PATIENT), agent(1, rdzv_conf=PATIENT, after_s=3)),
    ),
    Scene(
        name="a node comes too late",
        runs=(agent(0, rdzv_conf="join_timeout=3"), agent(1, after_s=20)),
        ids=("store-unreachable",),
        words=("rank 0's store at node-0:<port>", "or gave up before"),
        cure="first node",
    ),
    Scene(
        name="a node is lost",
        runs=tuple(agent(node, script("rank_ends"), "node", rdzv_conf=PATIENT) for node in (0, 1)),
        ids=("left-early",),
        words=("rank 0 was in a collective when another rank left", "is on another node"),
        cure="logs of all nodes together",
    ),
    Scene(
        name="a node is missing",
        runs=(agent(0),),
        ids=("rendezvous-timeout",),
        cure="start every node",
    ),
    Scene(
        name="a node of a static rendezvous is missing",
        runs=(static(0),),
        ids=("ranks-missing",),
        words=("only 1 of 2 ranks came",),
    ),
    Scene(
        name="nodes differ in their id",
        runs=(agent(0), agent(1, rdzv_id="job-2")),
        ids=("rendezvous-timeout",),
        cure="same --rdzv-id",
    ),
    Scene(
        name="nodes differ in their id, and tell of it",
        runs=(agent(0, environment=TELLING), agent(1, environment=TELLING, rdzv_id="job-2")),
        ids=("launches-differ",),
        words=("different --rdzv-id: job-1, job-2",),
        cure="same --rdzv-id",
    ),
    Scene(
        name="a node asks at another port",
        runs=(agent(0), agent(1, rdzv_endpoint="node-0:9")),
        ids=("store-unreachable",),
        words=("at node-0:9 ",),
        cure="--rdzv-endpoint",
    ),
    Scene(
        name="the endpoint has no address",
        runs=(agent(1, rdzv_endpoint="no-such-node:<port>"),),
        ids=("dns",),
        words=("no-such-node has no address",),
        cure="use the IP address",
    ),
)


TOLD_IDS = next(scene for scene in SCENES if scene.ids == ("launches-differ",))

# ---- the stage ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True, scope="module")
def nothing_left(client: docker.DockerClient) -> Iterator[None]:
    """After all scenes, nothing of Muster's is on the Engine."""
    yield
    assert left_on(client) + stages_left_on(client) == []


@pytest.fixture(scope="module")
def nodes(engine: Engine, built: object) -> Iterator[list[Container]]:
    """Two nodes with the scripts of faults/ and Docker's small /dev/shm; the second has a limit of
    its memory.
    """
    assert built
    scripts = {path.name: path.read_text() for path in FAULTS.glob("*.py")}
    spec = ContainerSpec(
        image="muster:cpu",
        command=("sleep", "900"),
        shm_bytes=2**26,
        environment={"OMP_NUM_THREADS": "1"},
    )
    with engine.stage() as stage:
        started = [
            stage.start(spec, Place(hostname=name, aliases=(name,), memory_bytes=limit))
            for name, limit in (("node-0", None), ("node-1", 2**31))
        ]
        for node in started:
            assert node.execute(["python", "-c", WRITE, json.dumps(scripts)]) == ""
        yield started


Told = Callable[[Scene], tuple[int, list[Path]]]


@pytest.fixture(scope="module")
def told(
    nodes: list[Container],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Told]:
    """What the scenes printed: the port of a scene, and its files. All asked for begin at once."""
    wanted = {item.name for item in request.session.items}
    ports, folders = count(29600), tmp_path_factory.mktemp("scenes")

    def start(run: Run, port: int, path: Path) -> None:
        time.sleep(run.after_s)
        path.write_text(nodes[run.node].execute(run.words(port)))

    def play(scene: Scene) -> tuple[int, list[Path]]:
        port = next(ports)
        folder = folders / str(port)
        folder.mkdir()
        paths = [folder / f"node-{run.node}.log" for run in scene.runs]
        with ThreadPoolExecutor(len(paths)) as together:
            list(together.map(start, scene.runs, repeat(port), paths))
        return port, paths

    with ThreadPoolExecutor(AT_ONCE) as pool:
        plays: dict[str, Future[tuple[int, list[Path]]]] = {
            scene.name: pool.submit(play, scene)
            for scene in SCENES
            if any(f"[{scene.name}]" in name for name in wanted)
        }
        yield lambda scene: plays[scene.name].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_a_real_fault_is_named_with_its_cure(scene: Scene, told: Told) -> None:
    port, paths = told(scene)
    output = "\n".join(path.read_text() for path in paths)
    found = explanations.explain(paths)
    assert [each.fault.id for each in found.diagnoses] == list(scene.ids), output
    for finding in found.findings[:1]:
        said = f"{finding.what}\n{finding.evidence}\n{finding.cause}"
        for word in scene.words:
            assert word.replace("<port>", str(port)) in said
        assert scene.cure in finding.remedy


@pytest.mark.parametrize("scene", [TOLD_IDS], ids=lambda scene: scene.name)
def test_the_command_names_a_real_fault_in_the_logs_of_two_nodes(scene: Scene, told: Told) -> None:
    _, paths = told(scene)
    status, output = run("explain", str(paths[0].parent), COLUMNS="300")
    assert status == 1
    assert "different --rdzv-id: job-1, job-2 [launches-differ]" in output
