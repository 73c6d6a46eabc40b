"""The smoke suite on a real Engine: READY, each planted fault by name, and nothing left behind."""

import json
import signal
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import docker
import jsonschema  # type: ignore[import-untyped]
import pytest
from tests.image.harness import ROOT, Muster, left_on, run, wait_until

from muster import suite
from muster.engine import Ask, AskRefused, ContainerSpec, Engine

pytestmark = pytest.mark.usefixtures("built")

# enough for what a test is about: each step takes its seconds
ENVIRONMENT = ["versions", "shm_size", "memlock", "rdma_libraries", "nccl_switches"]
JOBS = ["all_reduce", "ddp_demo"]
FEW = ("--only", ",".join([*ENVIRONMENT, *JOBS]))
GPUS_ALONE = ("devices", "nccl_tests")


def outcomes(result: dict[str, Any]) -> dict[str, str]:
    return {step["name"]: step["outcome"] for step in result["steps"]}


def step(result: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in result["steps"] if each["name"] == name)
    return found


def in_container(client: docker.DockerClient, code: str) -> str:
    """Run Python code in the one container of Muster's that runs."""
    (name,) = left_on(client)
    done = client.containers.get(name).exec_run(["python", "-c", code], user="0:0")
    assert isinstance(done.output, bytes)
    return done.output.decode()


def ranks_of(client: docker.DockerClient, script: str) -> list[int]:
    """The pids, inside the container, of the ranks of `script`, in the order of the ranks."""
    code = f"""
from pathlib import Path
found = {{}}
for process in Path("/proc").glob("[0-9]*"):
    try:
        words = (process / "cmdline").read_bytes().split(b"\\0")
        environment = (process / "environ").read_bytes().split(b"\\0")
    except OSError:
        continue
    rank = [entry[5:] for entry in environment if entry.startswith(b"RANK=")]
    if rank and b"{script}" in words:
        found[int(rank[0])] = process.name
print(*(found[rank] for rank in sorted(found)))
"""
    return [int(word) for word in in_container(client, code).split()]


def send_to_rank(client: docker.DockerClient, script: str, rank: int, number: int) -> None:
    wait_until(lambda: len(ranks_of(client, script)) == 2, f"both ranks of {script} run")
    pid = ranks_of(client, script)[rank]
    in_container(client, f"import os; os.kill({pid}, {number})")


def test_a_healthy_node_is_ready(tmp_path: Path) -> None:
    kept = {name: tmp_path / f"out.{name}" for name in ("json", "junit", "html")}
    code, output = run(
        "smoke", *(word for k, path in kept.items() for word in (f"--{k}", str(path)))
    )
    assert code == 0, output
    assert output.splitlines()[-1] == "READY"
    assert "1 GiB (docker/pins.toml)" in output
    result = json.loads(kept["json"].read_text())
    steps = suite.chosen()
    reasons = dict.fromkeys(GPUS_ALONE, "not applicable")
    assert outcomes(result) == {**dict.fromkeys(steps, "passed"), **reasons}
    assert {step(result, name)["measure"] for name in GPUS_ALONE} == {"no GPU here"}
    assert step(result, "all_reduce")["measure"] == "2 ranks, gloo, sum 1"
    assert "as {0,1}, dp 2 of 4 as {0,2,4,6}" in step(result, "subgroups")["measure"]
    assert step(result, "collectives")["measure"] == "19 right by gloo"
    # the parameters after a loss are those of the run that nothing befell
    digests = {step(result, f"elastic_{each}")["measure"][-16:] for each in ("restart", "nodes")}
    assert len(digests) == 1
    assert step(result, "elastic_nodes")["measure"].startswith("2, 1, 2 nodes in turn")
    jsonschema.validate(result, json.loads((ROOT / "docs/smoke.schema.json").read_text()))
    cases = ET.parse(kept["junit"]).getroot().findall("testsuite/testcase")
    assert [case.get("name") for case in cases] == list(steps)
    page = kept["html"].read_text()
    assert "./invokew smoke --variant=cpu --only all_reduce" in page
    assert len(page) < 500_000


def test_a_floor_that_is_not_reached_is_a_finding(tmp_path: Path) -> None:
    report = tmp_path / "out.json"
    code, _ = run("smoke", "--only", "bandwidth", "--floor", "10000", "--json", str(report))
    assert code == 1
    result = json.loads(report.read_text())
    (finding,) = step(result, "bandwidth")["findings"]
    assert "all_reduce by torch reaches" in finding["what"]
    assert "under the floor of 10000" in finding["what"]
    floors = {each["run"]["collective"]: each["floor"] for each in result["bandwidth"]}
    assert floors["all_reduce"]["source"] == "--floor"


def test_three_ranks_are_three(tmp_path: Path) -> None:
    report = tmp_path / "out.json"
    words = ("--only", "all_reduce", "--nproc-per-node", "3", "--json", str(report))
    assert run("smoke", *words)[0] == 0
    measure = step(json.loads(report.read_text()), "all_reduce")["measure"]
    assert measure == "3 ranks, gloo, sum 3"


def test_a_small_shm_fails_the_step_that_uses_it_and_no_other(tmp_path: Path) -> None:
    report = tmp_path / "out.json"
    few = (*ENVIRONMENT, "all_reduce", "dataloader_shm")
    words = ("--only", ",".join(few), "--shm-size", "64m", "--json", str(report))
    code, output = run("smoke", *words)
    assert code == 1
    assert output.splitlines()[-1] == "NOT READY"
    result = json.loads(report.read_text())
    assert outcomes(result) == {**dict.fromkeys(few, "passed"), "dataloader_shm": "failed"}
    (finding,) = step(result, "dataloader_shm")["findings"]
    assert finding["severity"] == "error"
    assert "/dev/shm" in finding["what"]
    assert "--shm-size" in finding["remedy"]
    assert "unable to allocate shared memory" in finding["evidence"]


def test_a_refused_limit_is_a_finding_and_an_accepted_one_is_there(tmp_path: Path) -> None:
    report = tmp_path / "out.json"
    assert run("smoke", "--only", "memlock", "--json", str(report))[0] == 0
    result = json.loads(report.read_text())
    refusals = [each for each in result["findings"] if "memlock" in each["what"]]
    assert "64 MiB locked" in step(result, "memlock")["measure"]
    if result["run"]["memlock"] == "unlimited":
        assert not refusals
        assert "limit unlimited" in step(result, "memlock")["measure"]
    else:
        assert [each["severity"] for each in refusals] == ["warning"]
        assert "rlimit" in refusals[0]["evidence"]


@pytest.mark.parametrize("ask", [Ask.GPUS, Ask.INFINIBAND])
def test_a_device_that_is_missing_is_refused_by_name(engine: Engine, ask: Ask) -> None:
    spec = ContainerSpec(
        image="muster:cpu", command=("true",), shm_bytes=2**20, asks=frozenset({ask})
    )
    with pytest.raises(AskRefused) as refused, engine.run(spec):
        pytest.skip(f"this node has {ask}")
    assert refused.value.ask is ask


def test_a_rank_that_hangs_fails_its_step_at_the_limit_and_what_stands_on_it_is_not_run(
    tmp_path: Path, client: docker.DockerClient
) -> None:
    report = tmp_path / "out.json"
    words = (*FEW, "--step-timeout", "30", "--json", str(report))
    command = Muster("smoke", *words)
    command.read_until("^nccl_switches: passed")
    send_to_rank(client, "all_reduce.py", 1, signal.SIGSTOP)
    code, _ = command.finish()
    assert code == 1
    result = json.loads(report.read_text())
    assert outcomes(result) == {
        **dict.fromkeys(ENVIRONMENT, "passed"),
        "all_reduce": "failed",
        "ddp_demo": "not run",
    }
    assert step(result, "ddp_demo")["measure"] == "all_reduce failed, and this stands on it"
    hung = step(result, "all_reduce")
    assert hung["findings"][0]["what"] == "all_reduce.py did not end within 30 s"
    assert 30 <= hung["seconds"] < 45


def test_a_rank_that_is_killed_is_named_with_its_signal(
    tmp_path: Path, client: docker.DockerClient
) -> None:
    report = tmp_path / "out.json"
    command = Muster("smoke", "--only", "versions,all_reduce", "--json", str(report))
    command.read_until("^versions: passed")
    send_to_rank(client, "all_reduce.py", 1, signal.SIGKILL)
    code, _ = command.finish()
    assert code == 1
    result = json.loads(report.read_text())
    (finding,) = step(result, "all_reduce")["findings"]
    assert finding["what"] == "all_reduce.py failed: rank 1 was ended by SIGKILL"
    assert "torchrun --standalone" in finding["remedy"]


def test_a_container_that_is_killed_keeps_the_steps_before(
    tmp_path: Path, client: docker.DockerClient
) -> None:
    report = tmp_path / "out.json"
    command = Muster("smoke", *FEW, "--json", str(report))
    command.read_until("^nccl_switches: passed")
    wait_until(lambda: len(ranks_of(client, "all_reduce.py")) == 2, "all_reduce runs")
    (name,) = left_on(client)
    client.containers.get(name).kill()
    code, _ = command.finish()
    assert code == 1
    result = json.loads(report.read_text())
    assert list(outcomes(result)) == ENVIRONMENT
    what = result["findings"][-1]["what"]
    assert what == "the suite broke off during all_reduce (exit code 137)"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_suite_and_leaves_nothing(
    client: docker.DockerClient, number: signal.Signals, status: int
) -> None:
    command = Muster("smoke")
    command.read_until("^versions: passed")
    command.send(number)
    code, output = command.finish()
    assert code == status
    assert "Traceback" not in output
    assert left_on(client) == []


def test_even_sigkill_leaves_nothing(client: docker.DockerClient) -> None:
    command = Muster("smoke")
    command.read_until("^versions: passed")
    assert len(left_on(client)) == 1
    command.send(signal.SIGKILL)
    command.finish()
    wait_until(lambda: left_on(client) == [], "the reaper has removed the container")


def test_two_at_once_are_both_ready() -> None:
    first, second = Muster("smoke", *FEW), Muster("smoke", *FEW)
    assert [first.finish()[0], second.finish()[0]] == [0, 0]


def test_output_into_a_pipe_that_closes_leaves_nothing(client: docker.DockerClient) -> None:
    command = Muster("smoke")
    command.read_until("^versions: passed")
    command.close_output()
    assert command.finish()[0] == 141
    assert left_on(client) == []
