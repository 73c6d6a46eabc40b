"""The sieve leaves out what was said before, and nothing that counts."""

import time
import tracemalloc

import pytest

from muster.explain.sieve import Sieve


def left(*texts: str, sieve: Sieve | None = None) -> list[str]:
    raws = [text.encode() for text in texts]
    return [raw.decode() for _, raw in (sieve or Sieve()).sift(raws)]


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
    assert left("step 2", "", "new", sieve=sieve) == ["", "new"]


def test_each_line_keeps_its_place() -> None:
    assert list(Sieve().sift([b"step 1", b"step 2", b"end"])) == [(0, b"step 1"), (2, b"end")]


@pytest.mark.parametrize("unit", ["a", "1", "NCCL_", "NCCL_1", " ", "[", " -> 1", "1 ", "\0", "]"])
def test_hostile_bytes_take_no_longer_than_others(unit: str) -> None:
    raws = [(unit * (size // len(unit))).encode() for size in (1_000_000, 3_999, 1_900)]
    begin = time.process_time()
    list(Sieve().sift(raws))
    assert time.process_time() - begin < 1


def test_memory_stays_bounded_when_every_line_is_new() -> None:
    sieve = Sieve()
    words = [f"{number:x}".translate(_LETTERS).encode() for number in range(300_000)]
    tracemalloc.start()
    kept = sum(1 for at in range(0, len(words), 1000) for _ in sieve.sift(words[at : at + 1000]))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept == len(words)
    # all of them would take three times as much
    assert held < 16_000_000


_LETTERS = str.maketrans("0123456789abcdef", "ghijklmnopqrstuv")
