"""The launcher with the image's real torchrun: ranks, exit statuses, signals, nodes that go."""

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from tests.image.harness import ROOT, wait_until

from muster.engine import ContainerSpec, Engine
from muster.launch import ExitStatus

pytestmark = pytest.mark.usefixtures("built")

IMAGE = "muster:cpu"
FLAGS = ("--nnodes=1", "--rdzv-id=test", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29400")


@dataclass(frozen=True)
class Played:
    """How a scene of nodes.py ended, by index. `seconds` is from the scene's last act on."""

    nodes: dict[str, dict[str, Any]]
    seconds: float

    @property
    def statuses(self) -> list[int]:
        return [node["status"] for node in self.nodes.values()]

    @property
    def logs(self) -> str:
        return "\n".join(str(node["log"]) for node in self.nodes.values())

    def met(self, index: int) -> list[list[int]]:
        """Index, rank and world size, once for each time that its rank met the others."""
        met: list[list[int]] = self.nodes[str(index)]["met"]
        return met

    def last_line(self, index: int) -> str:
        return str(self.nodes[str(index)]["log"]).splitlines()[-1]


Play = Callable[..., Played]


@pytest.fixture
def play(engine: Engine) -> Play:
    """Plays a scene of nodes.py in a container of the image."""
    scenes = (ROOT / "tests/image/nodes.py").read_text()

    def run(*scene: str, **environment: str) -> Played:
        spec = ContainerSpec(
            image=IMAGE,
            command=("python", "-c", scenes, *scene),
            shm_bytes=2**26,
            environment={"OMP_NUM_THREADS": "1", **environment},
        )
        with engine.run(spec) as container:
            lines = list(container.lines())
            assert lines, "\n".join(container.stderr)
            return Played(**json.loads(lines[-1]))

    return run


def test_the_ranks_of_12_nodes_are_their_indexes(play: Play) -> None:
    played = play("all_meet", "12")
    assert played.statuses == [0] * 12, played.logs
    assert [played.met(index) for index in range(12)] == [[[i, i, 12]] for i in range(12)]


def test_nodes_wait_for_a_leader_that_is_late(play: Play) -> None:
    played = play("leader_late", "6")
    assert played.statuses == [0, 0, 0], played.logs


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_rank_that_fails_is_told_by_its_node(play: Play, index: int, restarts: str) -> None:
    played = play("rank_ends_with_3", str(index), restarts)
    assert played.statuses[index] == ExitStatus.WORKER_FAILED, played.logs
    line = f"muster: rank {index} ended with exit code 3; exit status 10 = worker failed"
    assert played.last_line(index) == line
    assert len(played.met(index)) == 1 + int(restarts)
    assert 0 not in played.statuses


@pytest.mark.parametrize("index", [0, 1])
def test_a_node_that_is_told_to_end_is_preempted_within_seconds(play: Play, index: int) -> None:
    played = play("told_to_end", str(index))
    assert played.statuses[index] == ExitStatus.PREEMPTED, played.logs
    line = "muster: SIGTERM was received; exit status 12 = preempted"
    assert played.last_line(index) == line
    assert "Traceback" not in played.nodes[str(index)]["log"]
    assert played.seconds < 20


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_without_their_leader_the_others_have_no_rendezvous(play: Play, restarts: str) -> None:
    played = play("leader_killed", restarts)
    assert played.statuses[1:] == [ExitStatus.RENDEZVOUS_FAILED] * 2, played.logs
    assert played.last_line(1).endswith("exit status 11 = rendezvous failed")


def test_a_node_that_is_lost_comes_back_and_the_job_succeeds(play: Play) -> None:
    played = play("follower_replaced")
    assert played.statuses == [0, 0, 0], played.logs
    assert [played.met(index) for index in range(3)] == [[[i, i, 3]] * 2 for i in range(3)]


# ---- as PID 1 ----------------------------------------------------------------------------------


def pod(*arguments: str, **environment: str) -> ContainerSpec:
    return ContainerSpec(
        image=IMAGE,
        command=("python", "-m", "muster.launcher", *arguments),
        shm_bytes=2**26,
        environment={"JOB_COMPLETION_INDEX": "0", **environment},
        init=False,
    )


def test_pid_1_passes_the_signal_on_and_ends_within_seconds(engine: Engine) -> None:
    spec = pod(*FLAGS, "--no-python", "sh", "-c", "echo started; exec sleep 300")
    with engine.run(spec) as container:
        lines = container.lines()
        assert next(lines) == "started"
        sent = time.monotonic()
        container.send(signal.SIGTERM)
        list(lines)
        assert container.exit_code() == ExitStatus.PREEMPTED
        assert time.monotonic() - sent < 20
        errors = list(container.stderr)
    assert errors[-1] == "muster: SIGTERM was received; exit status 12 = preempted"


def test_pid_1_that_still_imports_torch_ends_at_once(engine: Engine) -> None:
    with engine.run(pod(*FLAGS, "--no-python", "sleep", "300")) as container:
        agents = "import glob; print(*(open(f).read() for f in glob.glob('/proc/*/cmdline')))"
        wait_until(
            lambda: "muster.agent" in container.execute(["python", "-c", agents]), "it has begun"
        )
        sent = time.monotonic()
        container.send(signal.SIGTERM)
        list(container.lines())
        assert container.exit_code() == ExitStatus.PREEMPTED
        assert time.monotonic() - sent < 10


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ((*FLAGS, "/no/such/script.py"), {}, "there is no script '/no/such/script.py'"),
        ((*FLAGS, "/opt"), {"JOB_COMPLETION_INDEX": ""}, "JOB_COMPLETION_INDEX is not set"),
        (("--nnodes=2", "/opt"), {}, "the launcher needs --rdzv-backend=c10d"),
        # what only torchrun knows to be wrong
        ((*FLAGS, "--no-such-flag=1", "/opt"), {}, "unrecognized arguments: --no-such-flag=1"),
        ((*FLAGS, "--max-restarts=many", "/opt"), {}, "invalid int value: 'many'"),
    ],
)
def test_wrong_usage_has_the_same_status_from_both(
    engine: Engine, arguments: tuple[str, ...], environment: dict[str, str], words: str
) -> None:
    with engine.run(pod(*arguments, **environment)) as container:
        list(container.lines())
        assert container.exit_code() == ExitStatus.USAGE
        errors = "\n".join(container.stderr)
    assert words in errors
    assert "Traceback" not in errors
