"""What is said of every log, with whole small logs."""

import pytest

from muster.explain import lines, reader
from muster.explain import sketch as sketches
from muster.explain.events import Event
from muster.explain.lines import Line
from muster.explain.picture import Channels, Picture, Ranks, drawn, picture
from muster.explain.sketch import Sketch


def events_of(log: list[str]) -> list[Event]:
    unwrapped = [lines.unwrapped(text) for text in log]
    return list(reader.events(Line("log", n, text, src) for n, (src, text) in enumerate(unwrapped)))


def seen(log: list[str]) -> Picture:
    return picture(events_of(log))


def rank_log(
    rank: int,
    *said: str,
    nranks: int = 4,
    per_node: int = 2,
    done: bool = True,
    network: str = "IB",
    version: str = "2.27.5+cuda12.8",
) -> list[str]:
    """What one rank of a healthy job writes, with `said` between its start and its end."""
    node, device = divmod(rank, per_node)
    head = f"node-{node}:{100 + device}:{200 + device} [{device}] NCCL INFO"
    init = (
        f"ncclCommInitRankConfig comm 0x55d{rank} rank {rank} nranks {nranks} cudaDev {device}"
        f" nvmlDev {device} busId {device}9000 commId 0xab - Init"
    )
    messages = [
        "cudaDriverVersion 12080",
        f"NCCL version {version}",
        f"Using network {network}",
        f"{init} START",
        *said,
        *([f"{init} COMPLETE"] if done else []),
    ]
    return [f"{head} {message}" for message in messages]


def job(**changes: list[str]) -> list[str]:
    """Four ranks on two nodes; `rank2=[...]` takes the place of what rank 2 writes."""
    return [line for rank in range(4) for line in changes.get(f"rank{rank}", rank_log(rank))]


def test_the_network_is_what_nccl_uses_and_not_what_it_found() -> None:
    found = "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>"
    log = job(rank1=rank_log(1, found, network="Socket"))
    first, second = seen(log).nodes
    assert (first.host, first.networks, list(first.ranks)) == ("node-0", ("IB", "Socket"), [0, 1])
    assert (second.host, second.networks, list(second.ranks)) == ("node-1", ("IB",), [2, 3])


@pytest.mark.parametrize(
    ("via", "direct"), [("NET/IB/0/GDRDMA(PCI)", True), ("NET/IB/0", False), ("P2P/IPC", None)]
)
def test_gpudirect_is_proved_by_a_connection_alone(via: str, direct: bool | None) -> None:
    connection = f"Channel 00/0 : 1[1] -> 2[0] [send] via {via}"
    first, _ = seen(
        job(rank1=rank_log(1, "DMA-BUF is available on GPU device 1", connection))
    ).nodes
    assert first.gpu_direct is direct


def test_how_gpus_talk_is_counted_by_pairs_of_ranks() -> None:
    log = job(
        rank0=rank_log(
            0,
            "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
            "Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read",
            "Channel 00/0 : 3[1] -> 0[0] [receive] via NET/IB/0/GDRDMA",
        ),
        rank1=rank_log(1, "Channel 00/0 : 1[1] -> 0[0] via P2P/CUMEM"),
        rank2=rank_log(2, "Channel 00/0 : 2[0] -> 3[1] [send] via NET/IB/1"),
        rank3=rank_log(3, "Channel 00 : 3[1] -> 2[0] via SHM/direct/direct"),
    )
    first, second = seen(log).nodes
    assert first.links == {"P2P/CUMEM": 1, "NET/IB": 1}
    assert second.links == {"NET/IB within the node": 1, "SHM": 1}


def test_where_communicators_of_two_sizes_share_ranks_no_link_is_called_inner() -> None:
    pair = "comm 0x9 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 9000 commId 0xcd - Init START"
    link = "Channel 00/0 : 0[0] -> 1[1] [send] via NET/IB/1"
    first, _ = seen(job(rank0=rank_log(0, pair, link))).nodes
    assert first.links == {"NET/IB": 1}


def test_rings_trees_and_nvls_are_named() -> None:
    found = seen(
        rank_log(
            0,
            "NVLS multicast support is available on dev 0",
            "Channel 00/24 :    0   1   2   3",
            "Trees [0] 1/-1/-1->0->-1",
            "24 coll channels, 24 collnet channels, 16 nvls channels, 32 p2p channels, 2 p2p"
            " channels per peer",
        )
    )
    assert found.channels == Channels(
        rings=24, collectives=24, nvls=16, p2p=32, trees=True, nvls_available=True
    )


def test_a_log_without_channels_has_none() -> None:
    assert seen(["step 1"]).channels is None


def test_mixed_versions_are_counted() -> None:
    found = seen(job(rank3=rank_log(3, version="2.28.9+cuda13.0")))
    assert found.nccl_versions == {"2.27.5+cuda12.8": 3, "2.28.9+cuda13.0": 1}
    assert found.mixed_versions
    assert found.cuda_drivers == {"12080": 4}


def test_the_older_banner_is_a_version_too() -> None:
    assert seen(["NCCL version 2.20.5+cuda12.4"]).nccl_versions == {"2.20.5+cuda12.4": 1}


def test_ranks_that_never_came_and_ranks_that_never_finished_are_told_apart() -> None:
    (comm,) = seen(job(rank0=rank_log(0, done=False), rank2=[])).communicators
    assert (comm.key, comm.nranks, comm.started) == ("0xab", 4, 3)
    assert (str(comm.missing), str(comm.unfinished)) == ("2", "0")


def test_of_nccl_that_says_only_the_end_of_an_init_no_rank_is_called_unfinished() -> None:
    log = [line for line in job() if "Init START" not in line]
    (comm,) = seen(log).communicators
    assert (comm.started, len(comm.missing), len(comm.unfinished)) == (4, 0, 0)


def test_a_split_that_was_not_finished_is_counted() -> None:
    split = (
        "ncclCommSplit comm 0x9{0} rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 9000 parent 0x55d0"
        " splitCount 1 color 1 key 0{1}"
    )
    log = rank_log(
        0,
        split.format(0, "- Init START"),
        split.format(0, " - Init COMPLETE"),
        split.format(1, "- Init START"),
        nranks=1,
    )
    assert seen(log).splits_unfinished == 1


def status(rank: int, enqueued: int, group: int = 0) -> str:
    return (
        f"[rank{rank}]:[E ProcessGroupNCCL.cpp:1785] [PG ID {group} PG GUID {group} Rank {rank}]"
        " timeout failure detected by watchdog at work sequence id: 19 PG status: last enqueued"
        f" work: {enqueued}, last completed work: 18"
    )


def test_the_rank_behind_is_the_one_that_enqueued_least_and_the_silent_one_said_nothing() -> None:
    (work,) = seen([*job(), status(0, 19), status(1, 18), status(2, 19)]).last_work
    assert work.enqueued == {0: 19, 1: 18, 2: 19}
    assert (str(work.behind), str(work.silent)) == ("1", "3")


def test_where_all_ranks_are_as_far_none_is_behind() -> None:
    (work,) = seen([status(rank, 19) for rank in range(3)]).last_work
    assert (len(work.behind), len(work.silent)) == (0, 0)


def test_process_groups_are_kept_apart() -> None:
    first, second = seen([*job(), status(0, 19), status(1, 7, group=2)]).last_work
    assert (first.group, second.group) == ("0", "2")
    assert len(second.silent) == 0


def test_switches_left_on_come_first() -> None:
    log = rank_log(
        0,
        "NCCL_IB_HCA set to mlx5",
        "NCCL_SHM_DISABLE set by environment to 0.",
        "NCCL_P2P_DISABLE set by environment to 1.",
        "NCCL_NVLS_ENABLE set by environment to 0.",
    )
    found = seen(log).variables
    assert [(variable.name, variable.switch) for variable in found] == [
        ("NCCL_NVLS_ENABLE", True),
        ("NCCL_P2P_DISABLE", True),
        ("NCCL_IB_HCA", False),
        ("NCCL_SHM_DISABLE", False),
    ]
    assert found[1].values == {"1": 1}


def test_a_variable_with_two_values_shows_both() -> None:
    log = job(
        rank0=rank_log(0, "NCCL_SOCKET_IFNAME set by environment to eth0"),
        rank1=rank_log(1, "NCCL_SOCKET_IFNAME set by environment to eth0"),
        rank2=rank_log(2, "NCCL_SOCKET_IFNAME set by environment to eth1"),
    )
    (variable,) = seen(log).variables
    assert variable.values == {"eth0": 2, "eth1": 1}


def test_the_bandwidth_of_nccl_tests_is_kept() -> None:
    assert seen(["# Avg bus bandwidth    : 118.214"]).busbw_gb_s == 118.214


@pytest.mark.parametrize("cut", [0, 1, 7, 11, 25])
def test_a_log_read_in_two_parts_gives_the_picture_of_the_whole(cut: int) -> None:
    log = [
        *job(
            rank0=rank_log(
                0,
                "Channel 00/02 :    0   1",
                "Trees [0] x",
                "NCCL_P2P_DISABLE set by environment to 1.",
            ),
            rank1=rank_log(1, "Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0/GDRDMA"),
            rank2=rank_log(2, done=False),
        ),
        status(0, 19),
        status(1, 18),
    ]
    parts = Sketch(), Sketch()
    for number, event in enumerate(events_of(log)):
        parts[number >= cut].add(event)
    parts[0].join(parts[1])
    assert drawn(parts[0]) == seen(log)


def test_memory_ends_where_text_is_hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketches, "_MOST_KEPT", 100)
    texts = []
    for n in range(300):
        head = f"node-{n % 3}:{n % 7}:1 [0] NCCL INFO"
        texts += [
            f"{head} NCCL_X{n} set by environment to {n}",
            f"{head} comm 0x1 rank {n} nranks 900 cudaDev 0 busId 1 commId 0x{n % 9} - Init START",
            status(n, n, n % 5),
        ]
    sketch = Sketch()
    for event in events_of(texts):
        sketch.add(event)
    kept = sum(len(process.variables) for process in sketch.processes.values())
    kept += sum(map(len, sketch.enqueued.values()))
    kept += sum(len(comm.started) for comm in sketch.comms.values())
    assert 90 < kept <= 100
    drawn(sketch)


@pytest.mark.parametrize(
    "text",
    [
        "# Avg bus bandwidth    : .",
        "# Avg bus bandwidth    : 1.2.3",
        "# Avg bus bandwidth    : \u0663",
        "last enqueued work: -1, last completed work: -1",
    ],
)
def test_what_is_nearly_a_number_is_no_stumble(text: str) -> None:
    assert seen([text]).busbw_gb_s in {None, 1.2, 3.0}


def test_an_empty_log_has_an_empty_picture() -> None:
    empty = seen([])
    assert (empty.nodes, empty.communicators, empty.last_work, empty.variables) == ((), (), (), ())
    assert not empty.mixed_versions


def test_ranks_are_written_as_runs() -> None:
    assert str(Ranks.of([3, 1, 2, 7])) == "1-3, 7"
    assert str(Ranks.without(4096, [5])) == "0-4, 6-4095"
    assert str(Ranks.without(2, [0, 1, 9])) == ""
    assert str(Ranks.of(range(0, 100_000, 2))).endswith("56, 58, and 49970 more")
    assert (list(Ranks.without(3, [1])), len(Ranks.without(4096, [5]))) == ([0, 2], 4095)
