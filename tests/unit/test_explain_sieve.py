"""The sieve leaves out what was said before, and nothing that counts."""

import tracemalloc

import pytest

from muster.explain import catalogue
from muster.explain import sieve as sieves
from muster.explain.sieve import Sieve


def left(*texts: str, sieve: Sieve | None = None) -> list[str]:
    """What of `texts` is left, where a line that is always left comes last."""
    block = "\n".join((*texts, END)).encode()
    *kept, end = (raw.decode() for _, raw in (sieve or Sieve()).sift(block))
    assert end == END
    return kept


END = "error at the end"


def channels(head: str, *vias: str) -> list[str]:
    return [
        f"{head} Channel {number:02d}/{connection} : 0[0] -> 1[1] via {via}"
        for via in vias
        for number in range(16)
        for connection in (0, 1)
    ]


@pytest.mark.parametrize("before", ["", "[default0]:", "2026-04-22T21:34:20.{0:03d}Z ", "3: "])
def test_a_connection_is_left_once_for_each_way_however_many_channels_it_has(before: str) -> None:
    lines = channels("node-0:1:2 [0] NCCL INFO", "P2P/CUMEM", "SHM/direct/direct")
    timed = [before.format(number) + line for number, line in enumerate(lines)]
    ways = [line.rpartition(" via ")[2] for line in left(*timed)]
    assert set(ways) == {"P2P/CUMEM", "SHM/direct/direct"}
    # the first of a shape teaches it, and a connection has two ends
    assert len(ways) <= 6


@pytest.mark.parametrize("device", [0, 7, 12])
def test_connections_of_two_processes_are_both_left(device: int) -> None:
    heads = [f"node-{node}:86:143 [{device}] NCCL INFO" for node in (0, 1)]
    lines = [line for head in heads for line in channels(head, "P2P/CUMEM")]
    assert {line.partition(":")[0] for line in left(*lines)} == {"node-0", "node-1"}


@pytest.mark.parametrize(
    "text",
    [
        "node-{0}:1:2 [0] NCCL INFO Using network IB",
        "node-{0}:1:2 [0] NCCL INFO comm 0x1 rank {0} nranks 8 cudaDev 0 busId 1 - Init START",
        "node-{0}:1:2 [0] NCCL INFO comm 0x1 rank {0} nranks 8 cudaDev 0 busId 1 - Init COMPLETE",
        "node-{0}:1:2 [0] NCCL INFO comm 0x1 rank {0} nRanks 8 nNodes 1 localRanks 8 localRank 0",
        "node-{0}:1:2 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.",
        "node-{0}:1:2 [0] NCCL INFO NCCL version 2.27.5+cuda12.8",
        "node-{0}:1:2 [0] NCCL INFO init.cc:{0} -> 2",
        "node-{0}:1:2 [0] NCCL INFO init.cc:{0} (ncclCommInitRankFunc) -> 2 [Async thread]",
        "node-{0}:1:2 [0] init.cc:88 NCCL WARN x {0}",
        "node-{0}:1:2 [0] NCCL INFO NET/IB : No device found.",
        "[E602 11:17:52.185053341 ProcessGroupNCCL.cpp:632] [Rank {0}] x",
        "W0801 04:55:28.464000 {0} torch/distributed/run.py:778] x",
        "  rank      : {0} (local_rank: 0)",
        "[{0}]:",
        "RuntimeError: rank {0}",
        " 1024 256 float sum -1 12.{0} 0.00 0.00 0",
        "#  Rank  {0} Group  0 Pid 1 on node-0 device  0 [0000:07:00] x",
        "{0}/3 clients joined",
    ],
)
def test_what_counts_for_every_rank_is_left_for_every_rank(text: str) -> None:
    lines = [text.format(rank) for rank in range(1, 9)]
    assert left(*lines) == lines


def test_of_a_step_s_line_the_first_is_left() -> None:
    lines = [f"step {step} loss {step / 7:.4f} tokens/s {step * 991}" for step in range(1, 99)]
    assert left(*lines) == lines[:1]


def test_after_a_line_that_counts_a_job_is_seen_to_go_on() -> None:
    trouble = ["connect returned refused, retrying", "shard 1"]
    steps = [f"step {step} loss 3.1" for step in range(9)]
    lines = [*steps[:3], *trouble, *steps[3:6], *trouble, *steps[6:]]
    assert left(*lines) == [steps[0], *trouble, steps[3], trouble[0], steps[6]]


RETRIED = [fault for fault in catalogue.read().faults if fault.retried]


@pytest.mark.parametrize(
    "trouble", [pattern.text for fault in RETRIED for pattern in (*fault.see, *fault.see_also)]
)
def test_after_what_is_retried_a_job_is_seen_to_go_on(trouble: str) -> None:
    ring = "node-0:1:2 [0] NCCL INFO Connected all rings"
    lines = ["epoch 1", ring, "epoch 2", ring, trouble, "epoch 3", "epoch 4", trouble, ring, ring]
    assert left(*lines) == [lines[0], ring, trouble, lines[5], trouble, ring]


def test_what_ranks_say_alike_is_left_once_and_each_number_is() -> None:
    lines = [
        f"node-{rank // 8}:{rank}:{rank} [{rank % 8}] NCCL INFO {16 + rank // 9} coll channels, x"
        for rank in range(18)
    ]
    assert left(*lines) == [lines[0], lines[1], lines[9]]
    cut = [line.partition("INFO ")[2] for line in lines]
    assert left(*cut) == [cut[0], cut[1], cut[9]]


@pytest.mark.parametrize("blank", [[], [b""], [b"", b"\r", b"  "]])
def test_how_far_a_log_goes_is_seen_from_its_last_line(blank: list[bytes]) -> None:
    raws = [*(b"shard %d of 99" % shard for shard in range(99)), *blank]
    assert list(Sieve().sift(b"\n".join(raws))) == [(0, raws[0]), (98, raws[98])]


def test_where_nothing_is_written_nothing_is_left() -> None:
    assert list(Sieve().sift(b"\n \n\r")) == []


def test_pointers_make_no_line_new() -> None:
    head = "node-0:1:2 [0] NCCL INFO Connected to proxy localRank 0 -> connection"
    pointers = [f"0x{number * 0x9E3779B97F4A7C15 % 2**48:012x}" for number in range(1, 50)]
    lines = [f"{head} {pointer}" for pointer in pointers]
    assert left(*lines) == lines[:1]


def test_of_the_rings_of_the_graph_subsystem_the_first_is_left() -> None:
    lines = [f"node-0:1:2 [0] NCCL INFO Ring {n:02d} : {n} -> {n + 1} -> {n + 2}" for n in range(9)]
    assert left(*lines) == lines[:1]


def test_what_was_learned_is_known_in_the_next_lines() -> None:
    sieve = Sieve()
    assert left("step 1", sieve=sieve) == ["step 1"]
    assert left("shard 1", "step 2", "shard 3", sieve=sieve) == ["shard 1", "step 2"]
    assert left("shard 4", "new", sieve=sieve) == ["new"]


def test_each_line_keeps_its_place() -> None:
    assert list(Sieve().sift(b"step 1\nstep 2\nend")) == [(0, b"step 1"), (2, b"end")]


@pytest.mark.parametrize(
    "what", ["word {}", "n:1:2 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via {}"]
)
def test_memory_stays_bounded_when_every_line_is_new(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(sieves, "_MOST_HELD", 2**20)
    sieve = Sieve()
    tracemalloc.start()
    kept = 0
    for begin in range(0, 2_000, 100):
        words = (f"{number:x}".translate(_LETTERS) for number in range(begin, begin + 100))
        raws = [what.format(word).ljust(3_000, "x").encode() for word in words]
        kept += len(list(sieve.sift(b"\n".join(raws))))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept == 2_000
    # all of them would take six times as much
    assert held < 2**20 + 2**18


_LETTERS = str.maketrans("0123456789abcdef", "ghijklmnopqrstuv")
