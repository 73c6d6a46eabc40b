"""One process group: do the ranks meet, compute the right sum, and train to equal parameters?"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from conftest import Step

# without GPUs as many as two groups of tensor parallelism and a data-parallel group of four need
CPU_RANKS = 8


def test_all_reduce(step: Step) -> None:
    """Every rank gets the sum of all ranks."""
    result = step.torchrun("all_reduce.py")
    step.measure(f"{result['world_size']} ranks, {result['backend']}, sum {result['expected']:g}")


def test_subgroups(step: Step) -> None:
    """Groups of tensor, data and pipeline parallelism, each with the sum of its own ranks."""
    ranks = step.nproc_per_node if step.has_gpus else CPU_RANKS
    tp = 2 if ranks % 2 == 0 else 1
    result = step.torchrun("subgroups.py", "--tp", str(tp), nproc_per_node=ranks)
    told = [f"{kind} {_groups(result[kind])}" for kind in ("tp", "dp") if len(result[kind]) > 1]
    step.measure(f"{ranks} ranks, {result['backend']}: {', '.join(told) or 'one group'}")


def _groups(groups: list[list[int]]) -> str:
    first = ",".join(map(str, groups[0]))
    return f"{len(groups)} of {len(groups[0])} as {{{first}}}"


def test_collectives(step: Step) -> None:
    """Every public collective is right, once, by each backend that is here."""
    told = [_told(step.torchrun("collectives.py"))]
    if step.has_gpus:
        hidden = {"CUDA_VISIBLE_DEVICES": ""}
        told.append(_told(step.torchrun("collectives.py", environment=hidden)))
    step.measure("; ".join(told))


def _told(result: Mapping[str, Any]) -> str:
    counts = Counter(result["collectives"].values())
    backend, lacks = result["backend"], counts["not in this backend"]
    return f"{counts['right']} right by {backend}{f', {lacks} not in it' if lacks else ''}"


def test_ddp_demo(step: Step) -> None:
    """DDP training: disjoint shards, equal parameters, a falling loss, a checkpoint that loads."""
    result = step.torchrun("ddp_demo.py")
    first, last = result["loss_first"], result["loss_last"]
    step.measure(
        f"{result['backend']}, {result['samples']} samples, loss {first:.3f} to {last:.3f}"
    )
