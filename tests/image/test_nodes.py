"""Several nodes on a real Engine: containers on one network, and hosts that ssh reaches."""

import json
import signal
from pathlib import Path
from typing import Any

import docker
import pytest
from tests.image.harness import Muster, left_on, run, stages_left_on

from muster import suite

pytestmark = pytest.mark.usefixtures("built")

TOGETHER = [each.name for each in suite.STEPS if each.reach is suite.Reach.NODES]


def steps_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {step["name"]: step for step in result["steps"]}


def test_two_nodes_are_ready(tmp_path: Path, client: docker.DockerClient) -> None:
    report = tmp_path / "out.json"
    words = ("--nnodes", "2", "--only", ",".join(["versions", *TOGETHER]), "--json", str(report))
    code, output = run("smoke", *words)
    assert code == 0, output
    result = json.loads(report.read_text())
    assert [node["host"] for node in result["nodes"]] == ["node-0", "node-1"]
    steps = steps_of(result)
    assert {name: step["outcome"] for name, step in steps.items()} == {
        **dict.fromkeys(["versions", *TOGETHER], "passed"),
        "pairs": "not applicable",
    }
    assert steps["nodes_all_reduce"]["measure"] == "4 ranks on 2 nodes, gloo, sum 6"
    assert steps["nodes_subgroups"]["measure"] == "tp [0, 1] within, dp [0, 2] across nodes"
    between = {tuple(each["nodes"]) for each in result["bandwidth"]}
    assert between == {("node-0", "node-1")}
    assert left_on(client) == []
    assert stages_left_on(client) == []


def test_every_two_of_three_nodes_are_measured(tmp_path: Path) -> None:
    report = tmp_path / "out.json"
    words = ("--nproc-per-node", "1", "--only", "nodes_meet,pairs", "--json", str(report))
    code, output = run("smoke", "--nnodes", "3", *words)
    assert code == 0, output
    result = json.loads(report.read_text())
    assert steps_of(result)["pairs"]["measure"] == "3 pairs"
    assert sorted(each["nodes"] for each in result["bandwidth"]) == [
        ["node-0", "node-1"],
        ["node-0", "node-2"],
        ["node-1", "node-2"],
    ]


def test_ctrl_c_ends_all_nodes_and_leaves_nothing(client: docker.DockerClient) -> None:
    command = Muster("smoke", "--nnodes", "2", "--quick")
    command.read_until("^node-1: versions: passed")
    command.send(signal.SIGINT)
    code, output = command.finish()
    assert code == 130
    assert "Traceback" not in output
    assert left_on(client) == []
    assert stages_left_on(client) == []


def test_a_node_that_is_killed_is_named_and_the_rest_is_kept(
    tmp_path: Path, client: docker.DockerClient
) -> None:
    report = tmp_path / "out.json"
    only = "versions,nodes_meet,nodes_all_reduce,nodes_ddp_demo"
    command = Muster("smoke", "--nnodes", "2", "--only", only, "--json", str(report))
    command.read_until("^node-1: nodes_meet: passed")
    (victim,) = (
        name
        for name in left_on(client)
        if client.containers.get(name).attrs["Config"]["Hostname"] == "node-1"
    )
    client.containers.get(victim).kill()
    code, output = command.finish()
    assert code == 1, output
    result = json.loads(report.read_text())
    zero, one = result["nodes"]
    assert zero["missing"] is None
    assert one["missing"].startswith("its suite broke off during")
    assert "exit code 137" in one["missing"]
    steps = steps_of(result)
    assert steps["versions"]["outcome"] == steps["nodes_meet"]["outcome"] == "passed"
    assert steps["nodes_all_reduce"]["outcome"] == "failed"
    assert steps["nodes_ddp_demo"]["outcome"] == "not run"
    errors = [each["what"] for each in result["findings"] if each["severity"] == "error"]
    assert any("node-1's suite broke off" in what for what in errors)
    assert output.splitlines()[-1] == "NOT READY"
    assert left_on(client) == []
