"""What runs come to: the layer, what is left open, and when they prove nothing."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from muster.bisect import changes, layers, verdict
from muster.bisect.changes import AS_IT_IS, Change, Machine
from muster.bisect.keeper import Ended
from muster.bisect.layers import CUMEM, CUMEM_HOST, IB, INTERFACE, NVLS, P2P, PLUGIN, SHM, Layer
from muster.bisect.pairs import Pair
from muster.bisect.trial import Heard, Trial
from muster.bisect.verdict import Conclusion, Outcome, Runs
from muster.explain import explanation

HEAD = "n1:7:7 [0] NCCL INFO "
SPEAKS = f"{HEAD}NCCL version 2.27.5+cuda12.8\n"
P2P_OFF = Change(name="NCCL_P2P_DISABLE=1", sets={"NCCL_P2P_DISABLE": "1"}, layer=P2P)


def of(layer: Layer, name: str = "") -> Change:
    return Change(name=name or layer.name, layer=layer)


def trial(
    change: Change,
    passed: bool,
    log: str = SPEAKS,
    *,
    cut: bool = False,
    left: int = 0,
    stuck: tuple[int, ...] = (),
) -> Trial:
    return Trial(
        change=change,
        ended=Ended(returncode=0 if passed else 1, cut=cut, left=left, stuck=stuck),
        limit_s=120,
        folder=Path("logs"),
        explained=explanation.of_text(log),
    )


def conclude(*helped: Change, failed: Sequence[Change] = (), again: bool = False) -> Conclusion:
    tried = [trial(change, passed=True) for change in helped]
    tried += [trial(change, passed=False) for change in failed]
    return verdict.conclude(
        Runs(
            first=trial(AS_IT_IS, passed=False),
            changed=tuple(tried),
            again=trial(AS_IT_IS, passed=again) if helped else None,
        )
    )


def blamed(found: Conclusion) -> list[Layer]:
    return [each.layer for each in found.blames]


# ---- outcomes -----------------------------------------------------------------------------------


def test_a_command_that_passes_has_no_fault_and_its_speed_is_not_judged() -> None:
    found = verdict.conclude(Runs(first=trial(AS_IT_IS, passed=True)))
    assert found.outcome is Outcome.PASSES
    assert found.blames == ()
    assert "speed" in found.says[0]


def test_a_run_that_was_cut_short_has_not_passed_however_it_ended() -> None:
    assert not trial(AS_IT_IS, passed=True, cut=True).passed


@pytest.mark.parametrize("switch", layers.SWITCHES, ids=lambda switch: switch.variable)
def test_the_one_switch_that_helps_names_its_layer(switch: layers.Switch) -> None:
    others = [each.layer for each in layers.SWITCHES if each != switch]
    found = conclude(of(switch.layer), failed=[of(layer) for layer in others])
    assert found.outcome is Outcome.FOUND
    assert blamed(found) == [switch.layer]
    assert found.beside == ()


def test_where_nothing_helps_nothing_is_blamed() -> None:
    found = conclude(failed=[of(P2P), of(SHM)])
    assert found.outcome is Outcome.NOT_FOUND
    assert found.blames == ()
    assert "rendezvous" in found.says[0]


def test_a_command_that_passes_at_last_as_it_is_voids_every_blame() -> None:
    found = conclude(of(P2P), again=True)
    assert found.outcome is Outcome.FLAKY
    assert found.blames == ()
    assert found.beside == ()
    assert "no layer can be blamed" in found.says[0]


# ---- several help -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("narrow", "broad"), [(CUMEM_HOST, SHM), (CUMEM, P2P), (NVLS, P2P), (PLUGIN, IB)]
)
def test_a_layer_that_is_part_of_another_is_the_one(narrow: Layer, broad: Layer) -> None:
    found = conclude(of(broad), of(narrow))
    assert blamed(found) == [narrow]
    assert found.beside == (broad.name,)
    assert blamed(conclude(of(broad), failed=[of(narrow)])) == [broad]


def test_layers_apart_are_both_named_with_a_doubt() -> None:
    found = conclude(of(P2P), of(IB))
    assert found.outcome is Outcome.FOUND
    assert blamed(found) == [P2P, IB]
    assert any("Repeat each of them" in text for text in found.says)


def test_interfaces_that_pass_are_one_layer() -> None:
    found = conclude(of(INTERFACE, "=ib0"), of(INTERFACE, "=eth1"), failed=[of(INTERFACE, "=lo")])
    (blame,) = found.blames
    assert [each.change.name for each in blame.helped] == ["=ib0", "=eth1"]


def test_one_setting_of_ones_own_says_more_than_all_of_them() -> None:
    environ = {"NCCL_IB_HCA": "mlx5_9", "NCCL_BUFFSIZE": "1"}
    both, single, *_ = changes.changes(environ, Machine((), ()))[0]
    found = conclude(both, single)
    assert [layer.name for layer in blamed(found)] == ["your own setting of NCCL_IB_HCA"]
    assert [layer.name for layer in blamed(conclude(both))] == [layers.OWN_SETTINGS.name]


def test_only_switches_are_told_to_be_taken_off_again() -> None:
    assert not P2P.may_stay
    assert INTERFACE.may_stay
    assert layers.own_setting("NCCL_IB_HCA").may_stay


# ---- GPUs ---------------------------------------------------------------------------------------


def placed(passed: dict[Pair, bool], *helped: Change) -> Conclusion:
    return verdict.conclude(
        Runs(
            first=trial(AS_IT_IS, passed=False),
            changed=tuple(trial(change, passed=True) for change in helped),
            paired={pair: trial(changes.only(pair), well) for pair, well in passed.items()},
            again=trial(AS_IT_IS, passed=False),
        )
    )


def test_a_gpu_is_named_beside_the_layer_and_without_one() -> None:
    passed = {("0", "1"): True, ("2", "3"): False, ("2", "0"): False, ("3", "0"): True}
    says = "GPU 2 fails with each partner"
    assert any(says in text for text in placed(passed, P2P_OFF).says)
    assert placed(passed, P2P_OFF).outcome is Outcome.FOUND
    alone = placed(passed)
    assert alone.outcome is Outcome.PLACED
    assert any(says in text for text in alone.says)


def test_a_link_is_named_by_its_two_gpus() -> None:
    passed = {("0", "1"): True, ("2", "3"): False, ("2", "0"): True, ("3", "0"): True}
    assert any("GPUs 2 and 3 fail together" in text for text in placed(passed).says)


@pytest.mark.parametrize(
    ("well", "says"), [(True, "more than two GPUs"), (False, "no pair passes")]
)
def test_pairs_that_all_go_alike_name_no_gpu(well: bool, says: str) -> None:
    found = placed({("0", "1"): well, ("2", "3"): well})
    assert found.outcome is Outcome.NOT_FOUND
    assert any(says in text for text in found.says)


# ---- what takes from their weight ---------------------------------------------------------------


def test_a_log_that_shows_the_change_is_believed() -> None:
    log = f"{SPEAKS}{HEAD}NCCL_P2P_DISABLE set by environment to 1.\n"
    assert trial(P2P_OFF, True, log).heard is Heard.YES


@pytest.mark.parametrize(
    ("log", "heard"),
    [
        (SPEAKS, Heard.NOT_SHOWN),
        (f"{SPEAKS}{HEAD}NCCL_P2P_DISABLE set by environment to 0.\n", Heard.OTHERWISE),
    ],
)
def test_a_pass_whose_log_does_not_show_the_change_is_doubted(log: str, heard: Heard) -> None:
    passed = trial(P2P_OFF, True, log)
    assert passed.heard is heard
    found = verdict.conclude(
        Runs(
            first=trial(AS_IT_IS, False),
            changed=(passed,),
            again=trial(AS_IT_IS, False),
        )
    )
    assert f"NCCL_P2P_DISABLE=1 passed, but {heard}: it may have passed by luck" in found.says


def test_a_variable_that_is_taken_out_and_read_all_the_same_is_doubted() -> None:
    log = f"{SPEAKS}{HEAD}NCCL_IB_HCA set to mlx5_0\n"
    change = Change(name="without NCCL_IB_HCA", unsets=("NCCL_IB_HCA",))
    assert trial(change, True, log).heard is Heard.OTHERWISE
    assert trial(change, True).heard is Heard.YES


def test_a_command_in_whose_log_nccl_never_speaks_is_told_once() -> None:
    found = verdict.conclude(
        Runs(
            first=trial(AS_IT_IS, False, "hello\n"),
            changed=(trial(P2P_OFF, True, "hello\n"),),
            again=trial(AS_IT_IS, False, "hello\n"),
        )
    )
    assert [text for text in found.says if "docker run needs -e" in text] == list(found.says)


def test_a_hang_may_be_no_more_than_a_short_limit() -> None:
    found = verdict.conclude(Runs(first=trial(AS_IT_IS, False, cut=True)))
    assert any("not done after 120 s" in text and "--timeout" in text for text in found.says)


def test_processes_that_stayed_are_told() -> None:
    runs = Runs(first=trial(AS_IT_IS, True, left=2))
    assert any("left 2 processes running" in text for text in verdict.conclude(runs).says)
    runs = Runs(first=trial(AS_IT_IS, False, cut=True, stuck=(7, 8)))
    assert any("processes 7, 8 obey no signal" in text for text in verdict.conclude(runs).says)


def test_the_fault_of_a_run_is_explains_first_error_and_none_where_it_passed() -> None:
    log = "n1:7:7 [0] init.cc:1 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on"
    log += " CUDA device 100000\n"
    failed = trial(AS_IT_IS, False, log)
    assert failed.fault is not None
    assert failed.fault.fault.id == "same-gpu"
    assert trial(AS_IT_IS, True, log).fault is None
