"""The faults by their names, the nodes they need, and the programs that play them."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.conftest import wait_until

from muster.errors import FaultNeedsNodes, UnknownFault
from muster.rehearse import faults
from muster.rehearse.faults import Fault, Plan
from muster.topology import NodeRange

TWO = NodeRange(2, 2)
ELASTIC = NodeRange(2, 4)


@pytest.mark.parametrize("fault", Fault)
def test_each_fault_has_a_name_and_a_story(fault: Fault) -> None:
    plan = faults.parse(fault.value)
    assert plan.fault is fault
    happens, _, follows = plan.story.partition(": ")
    assert happens
    assert follows


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("late-node", Plan(Fault.LATE_NODE, 20)),
        ("late-node:90", Plan(Fault.LATE_NODE, 90)),
        ("late-dns:1", Plan(Fault.LATE_DNS, 1)),
        ("missing-node", Plan(Fault.MISSING_NODE)),
    ],
)
def test_a_fault_that_lasts_has_seconds(text: str, plan: Plan) -> None:
    assert faults.parse(text) == plan


def test_the_story_tells_the_seconds() -> None:
    assert (
        faults.parse("late-node:90").story
        == "the last pod comes late (90 s): the others wait for it"
    )
    assert "(" not in faults.parse("missing-node").story
    assert Plan().story == "nothing goes wrong, and the job completes"


@pytest.mark.parametrize(
    "text",
    [
        *("", "late", "LATE-NODE", "late-node:", "late-node:0", "late-node:-1", "late-node:1.5"),
        *("late-node:12345", "late-node:x", "late-node:1:2", "node-killed:5", ":5", "late-node :5"),
    ],
)
def test_what_is_no_fault_is_refused_with_the_names_of_all(text: str) -> None:
    with pytest.raises(UnknownFault) as raised:
        faults.parse(text)
    assert repr(text) in str(raised.value)
    assert all(fault.value in raised.value.remedy for fault in Fault)


@pytest.mark.parametrize(
    ("fault", "pods", "nodes", "why"),
    [
        (Fault.LATE_NODE, 1, None, "one pod only"),
        (Fault.MISSING_NODE, 1, NodeRange(1, 1), "one pod only"),
        (Fault.LATE_DNS, 1, None, "one pod only"),
        (Fault.SCALE_UP, 1, ELASTIC, "one pod only"),
        (Fault.SCALE_UP, 2, TWO, "not MIN:MAX"),
        (Fault.SCALE_DOWN, 4, None, "not MIN:MAX"),
        (Fault.SCALE_UP, 2, ELASTIC, "--nnodes 2:4 needs all 2 pods"),
        (Fault.SCALE_DOWN, 2, ELASTIC, "--nnodes 2:4 needs all 2 pods"),
    ],
)
def test_a_fault_needs_nodes_to_come_and_go(
    fault: Fault, pods: int, nodes: NodeRange | None, why: str
) -> None:
    with pytest.raises(FaultNeedsNodes, match=why):
        faults.check(Plan(fault), pods, nodes)


@pytest.mark.parametrize(
    ("fault", "pods", "nodes"),
    [
        (None, 1, None),
        (Fault.LEADER_KILLED, 1, None),
        (Fault.MISSING_NODE, 2, None),
        (Fault.SCALE_UP, 3, ELASTIC),
        (Fault.SCALE_DOWN, 4, ELASTIC),
    ],
)
def test_a_fault_with_its_nodes_is_played(
    fault: Fault | None, pods: int, nodes: NodeRange | None
) -> None:
    faults.check(Plan(fault), pods, nodes)


# ---- the programs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "restart", "fails"), [("3", "0", True), ("2", "0", False), ("3", "1", False)]
)
def test_one_rank_raises_before_its_script_and_only_the_first_time(
    tmp_path: Path, rank: str, restart: str, fails: bool
) -> None:
    (tmp_path / "sitecustomize.py").write_bytes(faults.RAISE)
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "MUSTER_FAULT_RANK": "3",
        "RANK": rank,
        "TORCHELASTIC_RESTART_COUNT": restart,
    }
    ran = subprocess.run(
        [sys.executable, "-c", "print('runs')"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode != 0) is fails
    assert ("RaisedByTheRehearsal" in ran.stderr) is fails
    assert (ran.stdout == "runs\n") is not fails


def test_a_process_that_is_no_rank_does_not_raise(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_bytes(faults.RAISE)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in {"RANK", "TORCHELASTIC_RESTART_COUNT"}
    }
    environment |= {"PYTHONPATH": str(tmp_path), "MUSTER_FAULT_RANK": "3"}
    subprocess.run([sys.executable, "-c", ""], env=environment, check=True)


def state(process: subprocess.Popen[bytes]) -> str:
    """R, S, T for stopped."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2][0]


def test_the_process_of_one_rank_is_stopped_and_no_other() -> None:
    # ranks that no other process of this machine has
    ranks = [f"7{os.getpid()}", f"7{os.getpid()}0"]
    wait = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    processes = [
        subprocess.Popen(wait, env={**os.environ, "RANK": rank}, stdout=subprocess.PIPE)
        for rank in ranks
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        subprocess.run([sys.executable, "-c", faults.STOP_RANK, ranks[0]], check=True)
        wait_until(lambda: state(processes[0]) == "T", "the rank is stopped")
        assert state(processes[1]) != "T"
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_port_is_held_until_its_holder_is_killed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    holder = subprocess.Popen([sys.executable, "-c", faults.HOLD_PORT, str(port)])
    try:
        wait_until(lambda: not is_free(port), "the port is held")
        assert holder.poll() is None
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert is_free(port)


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
