"""docs/smoke.md tells of the steps as they are planned, and of files and commands that exist."""

import re

from tests.unit.conftest import ROOT

from muster.suite import STEPS, Reach

TEXT = (ROOT / "docs/smoke.md").read_text()


def rows() -> list[list[str]]:
    """The cells of the table of steps: step, proves, does not apply, stands on, limit, quick."""
    lines = re.findall(r"^\| (`\w+` \|.*) ?\|$", TEXT, re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def test_the_table_has_the_steps_in_their_order_with_what_is_planned_of_each() -> None:
    planned = [
        [f"`{step.name}`", ", ".join(step.on), f"{step.limit_s:g}", "yes" if step.quick else ""]
        for step in STEPS
    ]
    assert [[name, on, limit, quick] for name, _, _, on, limit, quick in rows()] == planned


def test_what_is_between_nodes_does_not_apply_to_one() -> None:
    between = {f"`{step.name}`" for step in STEPS if step.reach is Reach.NODES}
    assert {row[0] for row in rows() if row[2].startswith("one node")} == between


def test_every_step_is_said_to_prove_something() -> None:
    assert all(row[1] for row in rows())
