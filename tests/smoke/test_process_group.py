"""One process group: do the ranks meet, compute the right sum, and train to equal parameters?"""

import pytest
from conftest import Step


@pytest.mark.limit(120)
def test_all_reduce(step: Step) -> None:
    """Every rank gets the sum of all ranks."""
    result = step.torchrun("all_reduce.py")
    step.measure(f"{result['world_size']} ranks, {result['backend']}, sum {result['expected']:g}")


@pytest.mark.limit(120)
def test_ddp_demo(step: Step) -> None:
    """DDP training: disjoint shards, equal parameters, a falling loss, a checkpoint that loads."""
    result = step.torchrun("ddp_demo.py")
    first, last = result["loss_first"], result["loss_last"]
    step.measure(
        f"{result['backend']}, {result['samples']} samples, loss {first:.3f} to {last:.3f}"
    )
