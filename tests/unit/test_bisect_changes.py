"""What is changed for a run, and what stays: the caller's environment, its values unseen."""

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from muster import switches
from muster.bisect import changes, layers
from muster.bisect.changes import AS_IT_IS, Change, Machine

NOWHERE = Machine(interfaces=(), gpus=())
DEFAULT = [f"{each.variable}={each.value}" for each in layers.SWITCHES]


def names(environ: dict[str, str], machine: Machine = NOWHERE) -> list[str]:
    return [change.name for change in changes.changes(environ, machine)[0]]


def skipped(environ: dict[str, str], machine: Machine = NOWHERE) -> list[str]:
    return [each.name for each in changes.changes(environ, machine)[1]]


# ---- which changes ------------------------------------------------------------------------------


def test_every_switch_and_every_interface_is_a_change() -> None:
    machine = Machine(interfaces=("ib0", "lo"), gpus=())
    ifnames = ["NCCL_SOCKET_IFNAME==ib0", "NCCL_SOCKET_IFNAME==lo"]
    assert names({"HOME": "/root"}, machine) == [*DEFAULT, *ifnames]
    assert skipped({}) == []


def test_a_change_sets_what_its_name_says_and_has_a_layer() -> None:
    made, _ = changes.changes({}, Machine(interfaces=("eth0",), gpus=()))
    for change in made:
        ((variable, value),) = change.sets.items()
        assert change.name == f"{variable}={value}"
        assert change.layer is not None


@pytest.mark.parametrize("switch", layers.SWITCHES, ids=lambda switch: switch.variable)
def test_a_switch_that_is_on_already_is_taken_out_in_place_of_set(switch: layers.Switch) -> None:
    environ = {switch.variable: switch.value}
    name = f"{switch.variable}={switch.value}"
    assert skipped(environ) == [name]
    assert names(environ) == [f"without {switch.variable}", *(n for n in DEFAULT if n != name)]


@pytest.mark.parametrize(
    "environ",
    [
        {"NCCL_P2P_DISABLE": "0"},
        {"NCCL_P2P_DISABLE": ""},
        {"NCCL_CUMEM_ENABLE": "1"},
        {"NCCL_NET_PLUGIN": "aws-ofi"},
        {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "ALL", "NCCL_DEBUG_FILE": "/x"},
        {"NCCL_SOCKET_IFNAME": ""},
        {"SHELL": "/bin/sh", "NOT_NCCL_P2P_DISABLE": "1"},
    ],
    ids=" ".join,
)
def test_what_is_no_switch_left_on_changes_nothing(environ: dict[str, str]) -> None:
    assert names(environ) == DEFAULT
    assert skipped(environ) == []


@pytest.mark.parametrize("variable", ["NCCL_IB_HCA", "NCCL_SOCKET_IFNAME", "NCCL_ALGO"])
def test_a_setting_of_the_callers_is_taken_out_first(variable: str) -> None:
    made, _ = changes.changes({variable: "mlx5"}, NOWHERE)
    assert made[0].name == f"without {variable}"
    assert made[0].unsets == (variable,)
    assert made[0].sets == {}


def test_several_settings_are_taken_out_together_and_those_left_on_one_by_one() -> None:
    environ = {"NCCL_IB_HCA": "mlx5", "NCCL_BUFFSIZE": "1", "NCCL_DEBUG": "INFO"}
    made, _ = changes.changes(environ, NOWHERE)
    assert made[0].name == "without your 2 NCCL_ variables"
    assert made[0].unsets == ("NCCL_BUFFSIZE", "NCCL_IB_HCA")
    assert made[1].name == "without NCCL_IB_HCA"
    assert made[2].name == DEFAULT[0]


def test_an_interface_that_is_set_already_is_not_set_again() -> None:
    machine = Machine(interfaces=("eth0", "eth1"), gpus=())
    environ = {"NCCL_SOCKET_IFNAME": "=eth0"}
    assert skipped(environ, machine) == ["NCCL_SOCKET_IFNAME==eth0"]
    assert names(environ, machine)[-1] == "NCCL_SOCKET_IFNAME==eth1"
    # without = it may be others too
    assert skipped({"NCCL_SOCKET_IFNAME": "eth0"}, machine) == []


def test_every_switch_is_told_of_when_left_on() -> None:
    assert all(switches.left_on(each.variable, each.value) for each in layers.SWITCHES)


def test_layers_go_around_layers_that_exist() -> None:
    known = {each.layer.name for each in layers.SWITCHES}
    assert len(known) == len(layers.SWITCHES)
    for each in layers.SWITCHES:
        assert set(each.layer.around) <= known - {each.layer.name}


# ---- one run's environment ----------------------------------------------------------------------


def test_a_run_has_the_callers_environment_with_the_change_and_nccls_log() -> None:
    caller = {"HOME": "/root", "NCCL_IB_HCA": "mlx5_0", "NCCL_DEBUG": "WARN"}
    change = Change(name="c", sets={"NCCL_P2P_DISABLE": "1"}, unsets=("NCCL_IB_HCA",))
    assert change.environment(caller, Path("/logs/50%")) == {
        "HOME": "/root",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET,GRAPH",
        # NCCL reads %% as %
        "NCCL_DEBUG_FILE": "/logs/50%%/nccl.%h.%p",
    }
    assert caller == {"HOME": "/root", "NCCL_IB_HCA": "mlx5_0", "NCCL_DEBUG": "WARN"}


def test_the_callers_choice_of_subsystems_is_kept() -> None:
    environment = AS_IT_IS.environment({"NCCL_DEBUG_SUBSYS": "ALL"}, Path("/logs"))
    assert environment["NCCL_DEBUG_SUBSYS"] == "ALL"


def test_the_line_to_repeat_a_run_does_what_the_run_did() -> None:
    change = Change(name="c", sets={"NCCL_X": "=a b"}, unsets=("SECRET",))
    script = 'printf "%s|" "$NCCL_X" "${SECRET-unset}" "$NCCL_DEBUG" "$@"'
    line = change.line(["sh", "-c", script, "sh", "it's", "a  b", "$HOME", ""])
    done = subprocess.run(
        ["sh", "-c", line],
        env={**os.environ, "SECRET": "hunter2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "=a b|unset|INFO|it's|a  b|$HOME||"
    assert "hunter2" not in line


def test_a_pair_of_gpus_is_all_that_the_command_sees() -> None:
    change = changes.only(("GPU-1", "3"))
    assert change.name == "CUDA_VISIBLE_DEVICES=GPU-1,3"
    assert change.environment({"CUDA_VISIBLE_DEVICES": "0"}, Path("/x"))[
        "CUDA_VISIBLE_DEVICES"
    ] == ("GPU-1,3")
    assert change.layer is None


# ---- this machine -------------------------------------------------------------------------------


def test_interfaces_are_those_of_this_machine_that_are_up_with_lo_last() -> None:
    found = changes.look({}).interfaces
    states = psutil.net_if_stats()
    assert found[-1] == "lo"
    assert all(states[name].isup for name in found)
    assert len(set(found)) == len(found)


def test_a_bridge_of_containers_is_left_out_and_one_with_a_network_card_is_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "lo/bridge").mkdir(parents=True)
    (tmp_path / "lo/brif/veth1").mkdir(parents=True)
    (tmp_path / "veth1").mkdir()
    found = changes.look({}, tmp_path)
    assert found.bridges == ("lo",)
    assert "lo" not in found.interfaces
    assert "NCCL_SOCKET_IFNAME==lo" in skipped({}, found)
    (tmp_path / "lo/brif/eno1").mkdir()
    (tmp_path / "eno1/device").mkdir(parents=True)
    found = changes.look({}, tmp_path)
    assert found.bridges == ()
    assert "lo" in found.interfaces


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("0,1", ("0", "1")),
        (" 2 , GPU-abc", ("2", "GPU-abc")),
        ("0,-1,1", ("0",)),
        ("", ()),
        ("-1", ()),
    ],
)
def test_gpus_are_those_that_the_caller_shows(visible: str, gpus: tuple[str, ...]) -> None:
    assert changes.look({"CUDA_VISIBLE_DEVICES": visible}).gpus == gpus
