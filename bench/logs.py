"""python -m bench.logs FILE MEGABYTES RANKS: a large log of a job of many ranks.

It is in the format of NCCL 2.27, and ends with a fault of one rank that all others complain of.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path

GPUS = 8
CHANNELS = 32
# ranks whose lines come mixed, as they do from a pipe that many write into
BLOCK = 64
COMMS = 5
FAULT = (
    "misc/shmutils.cc:88 NCCL WARN Error: failed to extend /dev/shm/nccl-uQ9mKe to 33030532 bytes,"
    " error: No space left on device (28)"
)


@dataclass(frozen=True)
class Rank:
    rank: int
    nranks: int

    @property
    def device(self) -> int:
        return self.rank % GPUS

    @property
    def head(self) -> str:
        pid = 20_000 + self.rank % 977
        return f"node-{self.rank // GPUS}:{pid}:{pid + 300} [{self.device}] "

    @property
    def bus(self) -> str:
        return f"{0x1B000 + 0x10000 * self.device:x}"


def write(path: Path, size: int, nranks: int) -> None:
    """Write about `size` bytes: the init of each communicator, then steps, then the fault."""
    ranks = [Rank(rank, nranks) for rank in range(nranks)]
    with path.open("w", encoding="utf-8") as file:
        file.writelines(mixed(ranks, process))
        for comm in range(COMMS):
            file.writelines(mixed(ranks, partial(init, comm)))
        step = 0
        while file.tell() < size:
            file.writelines(steps(ranks, step))
            step += 1
        file.write(f"\n{ranks[3].head}{FAULT}\n")
        file.writelines(mixed(ranks, ending))


def mixed(ranks: list[Rank], said: Callable[[Rank], Iterator[str]]) -> Iterator[str]:
    for begin in range(0, len(ranks), BLOCK):
        block = ranks[begin : begin + BLOCK]
        for row in zip_longest(*(said(rank) for rank in block), fillvalue=""):
            yield "".join(row)


def process(rank: Rank) -> Iterator[str]:
    """What a process says once."""
    host = rank.rank // GPUS
    address = f"10.{host // 250}.{host % 250}.{rank.device + 1}"
    hcas = " ".join(f"[{number}]mlx5_{number}:1/IB" for number in range(GPUS))
    yield from (
        f"{rank.head}NCCL INFO {text}\n"
        for text in (
            "NCCL_SOCKET_IFNAME set by environment to eth0",
            f"Bootstrap: Using eth0:{address}<0>",
            "cudaDriverVersion 13000",
            "NCCL version 2.27.5+cuda12.9",
            "NCCL_IB_HCA set to mlx5",
            "NET/Plugin: Could not find: libnccl-net.so.",
            f"NET/IB : Using {hcas} [RO]; OOB eth0:{address}<0>",
            "Initialized NET plugin IB",
            "Assigned NET plugin IB to comm",
            "Using network IB",
            f"DMA-BUF is available on GPU device {rank.device}",
        )
    )


def init(comm: int, rank: Rank) -> Iterator[str]:
    """How a communicator comes up, with the subsystems INIT, NET and GRAPH."""
    head, number, nranks = f"{rank.head}NCCL INFO ", rank.rank, rank.nranks
    pointer = f"0x{0x55D0_0000_0000 + 0x1000 * (number * COMMS + comm):x}"
    who = (
        f"comm {pointer} rank {number} nranks {nranks} cudaDev {rank.device} nvmlDev {rank.device}"
        f" busId {rank.bus} commId 0x{0x8F3A_1100_0000_0000 + comm:x}"
    )
    yield f"{head}ncclCommInitRankConfig {who} - Init START\n"
    yield from topology(rank, head)
    yield (
        f"{head}comm {pointer} rank {number} nRanks {nranks} nNodes {nranks // GPUS} localRanks"
        f" {GPUS} localRank {rank.device} MNNVL 0\n"
    )
    after, before = (number + 1) % nranks, (number - 1) % nranks
    trees = " ".join(f"[{c}] {after}/-1/-1->{number}->{before}" for c in range(CHANNELS))
    yield f"{head}Trees {trees}\n"
    yield f"{head}P2P Chunksize set to 131072\n"
    for channel in range(CHANNELS):
        yield f"{head}Ring {channel:02d} : {before} -> {number} -> {after}\n"
    for channel in range(CHANNELS):
        yield from connections(rank, head, channel)
    yield f"{head}Connected all rings, use ring PXN 0 GDR 1\n"
    yield f"{head}Connected all trees\n"
    yield f"{head}threadThresholds 8/8/64 | {8 * nranks}/8/64 | 512 | 512\n"
    yield (
        f"{head}{CHANNELS} coll channels, {CHANNELS} collnet channels, 0 nvls channels,"
        f" {CHANNELS} p2p channels, 2 p2p channels per peer\n"
    )
    yield f"{head}ncclCommInitRankConfig {who} - Init COMPLETE\n"


def topology(rank: Rank, head: str) -> Iterator[str]:
    yield f"{head}=== System : maxBw 48.0 totalBw 360.0 ===\n"
    for number in range(GPUS):
        bus = f"{0x1B000 + 0x10000 * number:x}"
        yield f"{head}+ PCI[48.0] - PCI/{number}-{bus} (15b3197b15b31979)\n"
        yield f"{head}              + PCI[48.0] - GPU/{rank.rank // GPUS}-{bus} ({number})\n"
        yield f"{head}                            + NVL[360.0] - NVS/0\n"
        yield f"{head}              + PCI[48.0] - NIC/{rank.rank // GPUS}-{number:x}2000\n"
    yield f"{head}==========================================\n"
    for pattern in range(3):
        yield (
            f"{head}Pattern {pattern}, crossNic 0, nChannels 16, bw 40.0/40.0, type NVL/PIX,"
            " sameChannels 0\n"
        )


def connections(rank: Rank, head: str, channel: int) -> Iterator[str]:
    number, nranks, device = rank.rank, rank.nranks, rank.device
    for other in ((number + 1) % nranks, (number - 1) % nranks):
        if other // GPUS == number // GPUS:
            via, way = "P2P/CUMEM/read", ""
        else:
            via, way = f"NET/IB/{channel % GPUS}/GDRDMA", " [send]"
        yield (
            f"{head}Channel {channel:02d}/0 : {number}[{device}] -> {other}[{other % GPUS}]{way}"
            f" via {via}\n"
        )


def steps(ranks: list[Rank], step: int) -> Iterator[str]:
    """What a training loop prints on every rank."""
    for rank in ranks:
        loss = 11 / (1 + step / 100) + rank.rank % 7 / 1000
        yield (
            f"[rank{rank.rank}]: step {step} loss {loss:.4f} lr 3.0e-04 grad_norm"
            f" {loss / 7:.3f} tokens/s {11000 + (rank.rank * 7 + step) % 900} mem 61.2 GiB\n"
        )


def ending(rank: Rank) -> Iterator[str]:
    """The others only see that the first has gone."""
    yield (
        f"\n{rank.head}misc/socket.cc:64 NCCL WARN socketProgress: Connection closed by remote peer"
        " node-0.cluster<54321>\n"
    )
    yield f"{rank.head}NCCL INFO proxy.cc:1521 -> 6\n"


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]) * 10**6, int(sys.argv[3]))
