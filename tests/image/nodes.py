"""Several nodes in one container: launchers that differ in their index alone, played a scene.

test_launcher.py runs this in the image and reads the one line of JSON at its end.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path("/tmp/nodes")
LIMIT_S = 240
SCRIPT = FOLDER / "ranks.py"

# `argv[1]` collectives, 0.1 s apart; the node named by the second ends with 3 after five of them
RANKS = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

index = int(os.environ["JOB_COMPLETION_INDEX"])
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
sys.stdout.write(f"MET {index} {dist.get_rank()} {dist.get_world_size()}\\n")
sys.stdout.flush()
for step in range(int(sys.argv[1])):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.1)
    if step == 5 and index == int(sys.argv[2]):
        os._exit(3)
dist.destroy_process_group()
"""


@dataclass
class Node:
    """One launcher, started as in a pod; started again, it goes on in the same log."""

    index: int
    nodes: int
    restarts: int = 0
    work: tuple[str, ...] = ("0", "-1")
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def log(self) -> str:
        path = FOLDER / str(self.index)
        return path.read_text(errors="replace") if path.exists() else ""

    def start(self) -> None:
        flags = [
            *(f"--nnodes={self.nodes}", "--nproc-per-node=1", f"--max-restarts={self.restarts}"),
            *("--rdzv-id=test", "--rdzv-backend=c10d"),
            f"--rdzv-endpoint={socket.gethostname()}:29400",
            "--rdzv-conf=join_timeout=200,read_timeout=100",
        ]
        with (FOLDER / str(self.index)).open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "muster.launcher", *flags, str(SCRIPT), *self.work],
                env={**os.environ, "JOB_COMPLETION_INDEX": str(self.index)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def end(self) -> int:
        assert self.process is not None
        return self.process.wait(timeout=LIMIT_S)

    def kill(self) -> None:
        """End all its processes at once, as the loss of the machine does."""
        assert self.process is not None
        family = [self.process.pid]
        for pid in family:
            with contextlib.suppress(OSError):
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
                family += [int(word) for word in children.split()]
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def until_met(self, times: int = 1) -> None:
        deadline = time.monotonic() + LIMIT_S
        while self.log.count("MET ") < times:
            if time.monotonic() > deadline:
                raise TimeoutError(f"node {self.index} did not meet the others:\n{self.log}")
            time.sleep(0.1)


def several(count: int, restarts: int = 0, work: tuple[str, ...] = ("0", "-1")) -> list[Node]:
    return [Node(index, count, restarts, work) for index in range(count)]


def together(nodes: list[Node]) -> None:
    for node in nodes:
        node.start()
    for node in nodes:
        node.until_met()


def all_meet(count: str) -> list[Node]:
    nodes = several(int(count))
    # the last index first: the order of arrival must not be the order of the ranks
    for node in reversed(nodes):
        node.start()
    return nodes


def leader_late(seconds: str) -> list[Node]:
    nodes = several(3)
    for node in nodes[1:]:
        node.start()
    time.sleep(float(seconds))
    nodes[0].start()
    return nodes


def rank_ends_with_3(index: str, restarts: str) -> list[Node]:
    nodes = several(3, int(restarts), ("600", index))
    together(nodes)
    return nodes


def told_to_end(index: str) -> list[Node]:
    nodes = several(2, 0, ("600", "-1"))
    together(nodes)
    process = nodes[int(index)].process
    assert process is not None
    process.terminate()
    return nodes


def leader_killed(restarts: str) -> list[Node]:
    nodes = several(3, int(restarts), ("600", "-1"))
    together(nodes)
    nodes[0].kill()
    return nodes


def follower_replaced() -> list[Node]:
    nodes = several(3, 1, ("100", "-1"))
    together(nodes)
    nodes[1].kill()
    nodes[1].start()
    for node, times in zip(nodes, (2, 2, 2), strict=True):
        node.until_met(times)
    return nodes


SCENES: dict[str, Callable[..., list[Node]]] = {
    scene.__name__: scene
    for scene in (
        *(all_meet, leader_late, rank_ends_with_3, told_to_end),
        *(leader_killed, follower_replaced),
    )
}


def main() -> None:
    FOLDER.mkdir()
    SCRIPT.write_text(RANKS)
    scene, *arguments = sys.argv[1:]
    nodes = SCENES[scene](*arguments)
    started = time.monotonic()
    ends: dict[str, Any] = {}
    for node in nodes:
        status = node.end()
        met = [line.split()[1:] for line in node.log.splitlines() if line.startswith("MET ")]
        ends[str(node.index)] = {
            "status": status,
            "met": [[int(word) for word in words] for words in met],
            "log": node.log,
        }
    seconds = time.monotonic() - started
    sys.stdout.write(json.dumps({"nodes": ends, "seconds": seconds}) + "\n")


if __name__ == "__main__":
    main()
