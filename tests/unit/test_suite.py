"""The plan of the smoke suite: one function for each step, each after what it stands on."""

import ast
from collections.abc import Iterator

import pytest
from tests.unit.conftest import ROOT

from muster.errors import NoStepLeft, NoSuchStep, StepNeedsNodes
from muster.suite import BY_NAME, STEPS, Planned, Reach, chosen

NAMES = [step.name for step in STEPS]


def functions() -> Iterator[ast.FunctionDef]:
    """The test functions of tests/smoke, those of its programs for learners left out."""
    for path in sorted((ROOT / "tests/smoke").glob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield node


# ---- the plan ----------------------------------------------------------------------------------


def test_every_step_has_one_function_and_every_function_is_a_step() -> None:
    assert sorted(each.name for each in functions()) == sorted(f"test_{name}" for name in NAMES)


def test_every_function_says_what_it_asks_and_takes_a_step() -> None:
    for each in functions():
        assert ast.get_docstring(each), each.name
        assert "step" in [argument.arg for argument in each.args.args], each.name


def test_the_functions_of_steps_between_nodes_are_those_that_meet() -> None:
    meeting = {each.name for each in functions() if "meeting" in [a.arg for a in each.args.args]}
    assert meeting == {f"test_{step.name}" for step in STEPS if step.reach is Reach.NODES}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_step_stands_on_earlier_ones_that_run_wherever_it_does(step: Planned) -> None:
    earlier = NAMES[: NAMES.index(step.name)]
    assert set(step.on) <= set(earlier)
    runs_with = {
        Reach.CONTAINER: {Reach.CONTAINER},
        # containers on one machine leave its steps to the first of them, which has all of its own
        Reach.MACHINE: {Reach.CONTAINER, Reach.MACHINE},
        Reach.NODES: {Reach.NODES},
    }
    assert {BY_NAME[name].reach for name in step.on} <= runs_with[step.reach]
    if step.quick:
        assert all(BY_NAME[name].quick for name in step.on)


def test_every_step_has_a_time_limit() -> None:
    assert all(0 < step.limit_s <= 1800 for step in STEPS)


# ---- what is chosen of it ----------------------------------------------------------------------


def test_one_node_has_all_steps_but_those_between_nodes() -> None:
    between = {step.name for step in STEPS if step.reach is Reach.NODES}
    assert chosen() == tuple(name for name in NAMES if name not in between)
    assert between


@pytest.mark.parametrize("nnodes", [2, 64])
def test_several_nodes_have_all_steps(nnodes: int) -> None:
    assert chosen(nnodes=nnodes) == tuple(NAMES)


def test_quick_steps_are_some_of_them_from_the_ground_up() -> None:
    assert chosen(quick=True) == (
        *("versions", "doctor", "shm_size", "memlock", "rdma_libraries", "nccl_switches"),
        *("devices", "all_reduce", "ddp_demo", "dataloader_shm"),
    )
    assert chosen(nnodes=2, quick=True) == (*chosen(quick=True), "nodes_meet", "nodes_all_reduce")


def test_only_names_steps_in_any_order_quick_or_not() -> None:
    assert chosen(only=["bandwidth", "versions", "bandwidth"]) == ("versions", "bandwidth")
    assert chosen(only=["bandwidth"], quick=True) == ("bandwidth",)
    assert chosen(nnodes=2, only=["pairs"]) == ("pairs",)


def test_skip_takes_steps_away_from_whatever_is_chosen() -> None:
    assert chosen(skip=["image"]) == tuple(name for name in chosen() if name != "image")
    assert chosen(only=["versions", "image"], skip=["image"]) == ("versions",)
    assert "ddp_demo" not in chosen(quick=True, skip=["ddp_demo"])
    # one that is not among them anyway
    assert chosen(skip=["pairs"]) == chosen()


@pytest.mark.parametrize("words", [{"only": ["nosuch"]}, {"skip": ["versions", "nosuch"]}])
def test_a_name_that_is_no_steps_is_told_with_those_that_are(words: dict[str, list[str]]) -> None:
    with pytest.raises(NoSuchStep, match="no step 'nosuch'") as error:
        chosen(**words)  # type: ignore[arg-type]
    assert error.value.remedy.partition(": ")[2].split(", ") == NAMES


def test_a_step_between_nodes_asked_of_one_node_is_told_and_not_left_out() -> None:
    with pytest.raises(StepNeedsNodes, match="the step pairs is between nodes"):
        chosen(only=["versions", "pairs"])


def test_a_choice_that_leaves_no_step_is_told() -> None:
    with pytest.raises(NoStepLeft):
        chosen(skip=NAMES)
    with pytest.raises(NoStepLeft):
        chosen(only=["versions"], skip=["versions"])
