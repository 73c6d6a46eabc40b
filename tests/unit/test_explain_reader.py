"""Lines to events, in the formats of NCCL 2.16 to 2.30 and torch 2.4 to 2.14."""

import time

import pytest

from muster.explain import lines, reader
from muster.explain.events import Event, Field, Kind, Severity, What
from muster.explain.lines import Line


def events(*texts: str) -> list[Event]:
    """What the reader makes of a log of these lines."""
    unwrapped = [lines.unwrapped(text) for text in texts]
    return list(
        reader.events(
            Line("job.log", number, text, source)
            for number, (source, text) in enumerate(unwrapped, start=1)
        )
    )


def event(text: str) -> Event:
    (only,) = events(text)
    return only


# ---- NCCL's header -----------------------------------------------------------------------------

SHM = "Error: failed to extend /dev/shm/nccl-AAAAAA to 9637892 bytes"


@pytest.mark.parametrize(
    ("text", "at", "function", "host", "device"),
    [
        (
            f"node-0:20:22 [3] misc/shmutils.cc:88 NCCL WARN {SHM}",
            "misc/shmutils.cc:88",
            None,
            "node-0",
            3,
        ),
        (
            f"[2026-04-22 21:34:20] node-0:20:22 [3] misc/shmutils.cc:88 NCCL WARN {SHM}",
            "misc/shmutils.cc:88",
            None,
            "node-0",
            3,
        ),
        (
            f"Wed 21h34 node-0:20:22 [3] os/linux.cc:88 (shmOpen) NCCL WARN {SHM}",
            "os/linux.cc:88",
            "shmOpen",
            "node-0",
            3,
        ),
        (
            f"node-0:20:22 [3] get_ofi_provider:312 NCCL WARN {SHM}",
            "get_ofi_provider:312",
            None,
            "node-0",
            3,
        ),
        (f"[3] include/shm.h:28 NCCL WARN {SHM}", "include/shm.h:28", None, None, 3),
        (f"graph/topo.h:230 NCCL WARN {SHM}", "graph/topo.h:230", None, None, None),
        (f"NCCL WARN {SHM}", None, None, None, None),
        (f"[default3]:node-0:20:22 [3] NCCL WARN {SHM}", None, None, "node-0", 3),
        (f"\\noise node-0:20:22 [-1] NCCL WARN {SHM}", None, None, "node-0", -1),
    ],
)
def test_a_warn_is_read_in_every_version_s_header_and_in_half_a_one(
    text: str, at: str | None, function: str | None, host: str | None, device: int | None
) -> None:
    found = event(text)
    assert (found.kind, found.severity, found.message) == (Kind.NCCL, Severity.WARN, SHM)
    assert (found.fields.get(Field.AT), found.fields.get(Field.FUNCTION)) == (at, function)
    assert (found.host, found.device) == (host, device)


def test_what_two_ranks_wrote_into_one_line_is_two_events() -> None:
    first, second = events(
        "node-0:1:2 [0] NCCL INFO Connected all rinode-0:3:4 [1] NCCL INFO Using network IB"
    )
    assert (first.pid, first.message) == (1, "Connected all ri")
    assert (second.pid, second.message, second.what) == (3, "Using network IB", What.USING_NETWORK)
    assert first.line is second.line


@pytest.mark.parametrize(
    "text",
    ["run it with NCCL INFO on", "see NCCL WARN lines above", "NCCL INFORMATION", "the NCCL team"],
)
def test_who_only_speaks_of_nccl_is_not_nccl(text: str) -> None:
    assert event(text).kind is Kind.OTHER


def test_a_message_that_names_nccl_info_is_one_event() -> None:
    text = "node-0:1:2 [0] NCCL INFO see NCCL INFO lines"
    assert event(text).message == "see NCCL INFO lines"


# ---- NCCL's facts ------------------------------------------------------------------------------

START = "cudaDev 1 nvmlDev 1 busId 19000"


@pytest.mark.parametrize(
    ("message", "what", "fields"),
    [
        ("Using network AWS Libfabric", What.USING_NETWORK, {Field.NETWORK: "AWS Libfabric"}),
        ("cudaDriverVersion 12080", What.DRIVER, {Field.DRIVER: "12080"}),
        ("NCCL version 2.27.5+cuda12.8", What.VERSION, {Field.VERSION: "2.27.5+cuda12.8"}),
        (
            "NCCL_IB_DISABLE set by environment to 1.",
            What.ENVIRONMENT,
            {Field.VARIABLE: "NCCL_IB_DISABLE", Field.VALUE: "1"},
        ),
        (
            "NCCL_SOCKET_IFNAME set by environment to eth0.100",
            What.ENVIRONMENT,
            {Field.VARIABLE: "NCCL_SOCKET_IFNAME", Field.VALUE: "eth0.100"},
        ),
        (
            "NCCL_IB_HCA set to ^mlx5_3",
            What.ENVIRONMENT,
            {Field.VARIABLE: "NCCL_IB_HCA", Field.VALUE: "^mlx5_3"},
        ),
        (
            "NET/Plugin: Plugin name set by env to none",
            What.ENVIRONMENT,
            {Field.VARIABLE: "NCCL_NET_PLUGIN", Field.VALUE: "none"},
        ),
        ("TUNER/Plugin: Plugin name set by env to x", What.TEXT, {}),
        ("This application was compiled with NCCL version 2.30.3", What.TEXT, {}),
        # 2.18.3 to 2.20
        (
            f"comm 0x55d0 rank 1 nranks 16 {START} commId 0xab - Init START",
            What.INIT_START,
            {
                Field.COMM: "0x55d0",
                Field.NRANKS: "16",
                Field.BUS_ID: "19000",
                Field.COMM_ID: "0xab",
            },
        ),
        # 2.29
        (
            (
                f"[Rank 1] ncclCommInitRankConfig comm 0x55d0 rank 1 nranks 16 {START} commId 0xab"
                " - Init START"
            ),
            What.INIT_START,
            {
                Field.COMM: "0x55d0",
                Field.NRANKS: "16",
                Field.BUS_ID: "19000",
                Field.COMM_ID: "0xab",
            },
        ),
        # 2.16
        (
            "comm 0x55d0 rank 1 nranks 16 cudaDev 1 busId 19000 commId 0xab - Init COMPLETE",
            What.INIT_COMPLETE,
            {
                Field.COMM: "0x55d0",
                Field.NRANKS: "16",
                Field.BUS_ID: "19000",
                Field.COMM_ID: "0xab",
            },
        ),
        # 2.24 to 2.28
        (
            (
                f"ncclCommSplit comm 0x55d0 rank 1 nranks 8 {START} parent 0x77 splitCount 1"
                " color 3 key 1- Init START"
            ),
            What.INIT_START,
            {Field.COMM: "0x55d0", Field.NRANKS: "8", Field.BUS_ID: "19000"},
        ),
        (
            "comm 0x55d0 rank 1 nRanks 16 nNodes 2 localRanks 8 localRank 1 MNNVL 0",
            What.TOPOLOGY,
            {
                Field.COMM: "0x55d0",
                Field.NRANKS: "16",
                Field.NNODES: "2",
                Field.LOCAL_RANKS: "8",
                Field.LOCAL_RANK: "1",
            },
        ),
        (
            "16 coll channels, 16 nvls channels, 16 p2p channels, 2 p2p channels per peer",
            What.CHANNELS,
            {Field.COLL_CHANNELS: "16", Field.NVLS_CHANNELS: "16", Field.P2P_CHANNELS: "16"},
        ),
        (
            (
                "24 coll channels, 24 collnet channels, 0 nvls channels, 32 p2p channels, 32 p2p"
                " channels per peer"
            ),
            What.CHANNELS,
            {
                Field.COLL_CHANNELS: "24",
                Field.COLLNET_CHANNELS: "24",
                Field.NVLS_CHANNELS: "0",
                Field.P2P_CHANNELS: "32",
            },
        ),
        (
            "Channel 01/02 :    0   1   2",
            What.RINGS,
            {Field.CHANNEL: "01", Field.CHANNELS: "02", Field.RING: "    0   1   2"},
        ),
        ("Trees [0] 1/-1/-1->0->-1 [1] 1/-1/-1->0->-1", What.TREES, {}),
        (
            "NVLS multicast support is not available on dev 0",
            What.NVLS,
            {Field.AVAILABLE: "not available"},
        ),
        ("Connected all rings, use ring PXN 0 GDR 1", What.CONNECTED, {}),
        ("init.cc:1089 -> 2", What.PROPAGATION, {Field.AT: "init.cc:1089", Field.RESULT: "2"}),
        (
            "init.cc:1089 (ncclCommInitRankFunc) -> 2 [Async thread]",
            What.PROPAGATION,
            {Field.AT: "init.cc:1089", Field.FUNCTION: "ncclCommInitRankFunc", Field.RESULT: "2"},
        ),
        ("NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>", What.TEXT, {}),
    ],
)
def test_the_facts_of_a_line_of_nccl_are_taken_apart(
    message: str, what: What, fields: dict[Field, str]
) -> None:
    found = event(f"node-0:20:22 [1] NCCL INFO {message}")
    assert (found.what, found.fields, found.message) == (what, fields, message)


@pytest.mark.parametrize(
    ("message", "ends", "via"),
    [
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/direct pointer", "01", "P2P/direct pointer"),
        ("Channel 00/0 : 0[7000] -> 1[8f000] via P2P/IPC/read", "01", "P2P/IPC/read"),
        ("Channel 15/1 : 3[3] -> 2[2] via P2P/MNNVL", "32", "P2P/MNNVL"),
        ("Channel 00 : 1[1] -> 0[0] via SHM/direct/direct", "10", "SHM/direct/direct"),
        ("Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/0", "12", "NET/Socket/0"),
        (
            "Channel 00/0 : 1[1] -> 2[0] [receive] via NET/IB/0(3)/GDRDMA(PCI)",
            "12",
            "NET/IB/0(3)/GDRDMA(PCI)",
        ),
    ],
)
def test_a_connection_is_read_in_all_its_forms(message: str, ends: str, via: str) -> None:
    found = event(f"node-0:20:22 [1] NCCL INFO {message}")
    assert found.what is What.CONNECTION
    assert found.fields[Field.SOURCE_RANK] + found.fields[Field.TARGET_RANK] == ends
    assert found.fields[Field.VIA] == via


def test_the_banner_of_older_nccl_has_no_header() -> None:
    found = event("NCCL version 2.20.5+cuda12.4")
    assert (found.kind, found.what) == (Kind.NCCL, What.VERSION)
    assert found.fields == {Field.VERSION: "2.20.5+cuda12.4"}


def test_a_process_s_later_lines_carry_the_rank_of_its_largest_communicator() -> None:
    head = "node-0:20:22 [1] NCCL INFO"
    world = f"{head} comm 0x1 rank 9 nranks 16 {START} commId 0xab - Init START"
    pair = f"{head} comm 0x2 rank 1 nranks 2 {START} commId 0xcd - Init START"
    read = events(f"{head} Using network IB", world, pair, "node-0:20:99 [1] NCCL WARN x")
    assert [event.rank for event in read] == [None, 9, 1, 9]


# ---- torch -------------------------------------------------------------------------------------


def test_the_watchdog_names_rank_work_and_operation() -> None:
    found = event(
        "[rank2]:[E602 11:17:52.185053341 ProcessGroupNCCL.cpp:632] [Rank 2] Watchdog caught"
        " collective operation timeout: WorkNCCL(SeqNum=19, OpType=ALLREDUCE, NumelIn=1,"
        " NumelOut=1, Timeout(ms)=1800000) ran for 1800093 milliseconds before timing out."
    )
    assert (found.kind, found.severity, found.rank) == (Kind.C10D, Severity.ERROR, 2)
    assert found.what is What.WATCHDOG_TIMEOUT
    assert found.fields[Field.AT] == "ProcessGroupNCCL.cpp:632"
    assert (found.fields[Field.SEQUENCE], found.fields[Field.OPERATION]) == ("19", "ALLREDUCE")


@pytest.mark.parametrize(
    "message",
    [
        # 2.4, 2.5 and 2.6, 2.8 and newer
        (
            "[PG 3 Rank 2] Exception (either an error or timeout) detected by watchdog at work: 19,"
            " last enqueued NCCL work: 19, last completed NCCL work: 18."
        ),
        (
            "[PG ID 3 PG GUID 3(default_pg) Rank 2] Exception (either an error or timeout) detected"
            " by watchdog at work: 19, last enqueued NCCL work: 19, last completed NCCL work: 18."
        ),
        (
            "[PG ID 3 PG GUID 3 Rank 2] timeout failure detected by watchdog at work sequence"
            " id: 19 PG status: last enqueued work: 19, last completed work: 18"
        ),
    ],
)
def test_the_watchdog_s_status_is_read_in_every_version(message: str) -> None:
    found = event(f"[E ProcessGroupNCCL.cpp:1785] {message}")
    assert (found.what, found.rank) == (What.WATCHDOG_STATUS, 2)
    assert found.fields[Field.GROUP] == "3"
    assert (found.fields[Field.LAST_ENQUEUED], found.fields[Field.LAST_COMPLETED]) == ("19", "18")


@pytest.mark.parametrize(
    ("text", "kind", "severity", "message"),
    [
        (
            "[W602 11:17:52.185053341 socket.cpp:767] [c10d] The client",
            Kind.C10D,
            Severity.WARN,
            "The client",
        ),
        ("[W socket.cpp:663] [c10d] The client", Kind.C10D, Severity.WARN, "The client"),
        (
            "W0801 04:55:28.464000 140238513375040 torch/distributed/elastic/agent/api.py:858] x",
            Kind.TORCHRUN,
            Severity.WARN,
            "x",
        ),
        (
            "[rank0]:E0801 04:55:28.464000 71 site-packages/torch/distributed/run.py:8] x",
            Kind.TORCHRUN,
            Severity.ERROR,
            "x",
        ),
        (
            "I0801 04:55:28.464000 71 torch/distributed/distributed_c10d.py:8] x",
            Kind.C10D,
            Severity.INFO,
            "x",
        ),
        ("WARNING:torch.distributed.run:x", Kind.TORCHRUN, Severity.WARN, "x"),
        ("[INFO] torch.distributed.launcher.api: x", Kind.TORCHRUN, Severity.INFO, "x"),
    ],
)
def test_heads_of_torch_say_who_speaks_and_how_loud(
    text: str, kind: Kind, severity: Severity, message: str
) -> None:
    found = event(text)
    assert (found.kind, found.severity, found.message) == (kind, severity, message)


TABLE = """\
Failures:
[1]:
  time      : 2026-04-22_21:34:20
  host      : node-1
  rank      : 3 (local_rank: 1)
  exitcode  : -9 (pid: 123)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 123
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-04-22_21:34:19
  host      : node-0
  rank      : 2 (local_rank: 0)
  exitcode  : -11 (pid: 122)  (SIGSEGV)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
  rank      : no table any more
""".splitlines()


@pytest.mark.parametrize(
    "head", ["", "E0801 04:55:28.464000 71 torch/distributed/elastic/multiprocessing/api.py:8] "]
)
def test_of_torchrun_s_table_each_rank_is_one_failure(head: str) -> None:
    follower, root = (
        event for event in events(*(head + row for row in TABLE)) if event.what is What.FAILURE
    )
    assert (follower.host, follower.rank, follower.pid) == ("node-1", 3, 123)
    assert follower.fields[Field.SIGNAL] == "SIGKILL"
    assert Field.ROOT_CAUSE not in follower.fields
    assert (root.host, root.rank, root.pid) == ("node-0", 2, 122)
    assert (root.fields[Field.EXIT_CODE], root.fields[Field.SIGNAL]) == ("-11", "SIGSEGV")
    assert root.fields[Field.ROOT_CAUSE] == "yes"
    assert root.severity is Severity.ERROR


def test_two_tables_written_at_once_are_kept_apart_by_their_source() -> None:
    rows = [f"[pod/train-{pod}/t] {row}" for row in TABLE[1:8] for pod in (0, 1)]
    failures = [event for event in events(*rows) if event.what is What.FAILURE]
    assert [(failure.rank, failure.pid) for failure in failures] == [(3, 123), (3, 123)]


# ---- the others --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "severity", "error"),
    [
        ("ValueError: bad", Kind.PYTHON_TRACEBACK, Severity.ERROR, "ValueError"),
        (
            "[rank3]: torch.distributed.DistBackendError: NCCL error in: x",
            Kind.PYTHON_TRACEBACK,
            Severity.ERROR,
            "DistBackendError",
        ),
        (
            "ncclSystemError: System call failed",
            Kind.PYTHON_TRACEBACK,
            Severity.ERROR,
            "ncclSystemError",
        ),
        ("KeyboardInterrupt", Kind.PYTHON_TRACEBACK, Severity.ERROR, "KeyboardInterrupt"),
        ("/a/b.py:12: FutureWarning: x", Kind.PYTHON_TRACEBACK, Severity.WARN, "FutureWarning"),
        (
            "/a/b.py:12: UserWarning: CUDA initialization: The NVIDIA driver",
            Kind.CUDA,
            Severity.WARN,
            "UserWarning",
        ),
        ("RuntimeError: CUDA error: out of memory", Kind.CUDA, Severity.ERROR, "RuntimeError"),
        (
            "RuntimeError: cuda runtime error (802) : system not yet initialized",
            Kind.CUDA,
            Severity.ERROR,
            "RuntimeError",
        ),
        (
            "RuntimeError: DataLoader worker (pid 572) is killed by signal: Bus error.",
            Kind.DATALOADER,
            Severity.ERROR,
            "RuntimeError",
        ),
        (
            "ERROR: Unexpected bus error encountered in worker.",
            Kind.DATALOADER,
            Severity.ERROR,
            None,
        ),
        (
            "node-0: Test CUDA failure common.cu:941 'system not yet initialized'",
            Kind.NCCL_TESTS,
            Severity.ERROR,
            None,
        ),
        ("Segmentation fault (core dumped)", Kind.OTHER, Severity.ERROR, None),
        ("epoch 3: validation error: 0.12", Kind.OTHER, Severity.INFO, None),
        ("The ErrorHandler: is fine", Kind.OTHER, Severity.INFO, None),
        ("step 10 loss 2.3", Kind.OTHER, Severity.INFO, None),
    ],
)
def test_other_programs_are_told_apart(
    text: str, kind: Kind, severity: Severity, error: str | None
) -> None:
    found = event(text)
    assert (found.kind, found.severity, found.fields.get(Field.ERROR)) == (kind, severity, error)


def test_ranks_that_never_came_are_counted() -> None:
    found = event(
        "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients."
        " 1/3 clients joined."
    )
    assert (found.what, found.severity) == (What.CLIENTS_JOINED, Severity.ERROR)
    assert (found.fields[Field.JOINED], found.fields[Field.EXPECTED]) == ("1", "3")
    assert found.fields[Field.ERROR] == "DistStoreError"


def test_nccl_tests_say_device_and_bandwidth() -> None:
    device, row, average = events(
        "#  Rank  0 Group  0 Pid  1234 on     node-0 device  0 [0000:07:00] NVIDIA H100 80GB HBM3",
        "     8388608       2097152     float     sum      -1    123.4   67.98  118.96      0"
        "    122.1   68.70  120.23    N/A",
        "# Avg bus bandwidth    : 118.214",
    )
    assert (device.what, device.host, device.pid, device.rank) == (
        What.RANK_DEVICE,
        "node-0",
        1234,
        0,
    )
    assert (row.what, row.fields[Field.SIZE], row.fields[Field.BUSBW]) == (
        What.BANDWIDTH,
        "8388608",
        "118.96",
    )
    assert (average.what, average.fields[Field.BUSBW]) == (What.AVERAGE_BANDWIDTH, "118.214")


@pytest.mark.parametrize(
    ("text", "rank"),
    [("[rank7]: x", 7), ("[1,26]<stdout>: x", 26), ("[default3]: x", None), ("3: x", None)],
)
def test_a_rank_is_taken_from_a_prefix_that_names_one(text: str, rank: int | None) -> None:
    assert event(text).rank == rank


@pytest.mark.parametrize(
    "unit",
    [
        "a", "a.", "1", "a:1", "[", "[1,", "(", "NCCL ", "NCCL INFO ", "a:1:1 [0] NCCL INFO ",
        "NCCL_", "comm 0x1 rank 1 nranks 1 ", "1 coll channels, ", "Channel 1/1 : ", " -> 1",
        "[PG ID 0 ", "last enqueued work: 1", "W0801 ", "[W602 ", "torch.distributed.", "\t ",
        "2026-01-01 00:00:00 ", "[rank1]:", "[1,2]<stdout>:", "x.py:1: ", "Error", "ERROR:",
    ],
)  # fmt: skip
def test_hostile_text_takes_no_longer_than_other_text(unit: str) -> None:
    raw = f"node-0:1:2 [0] {unit * (lines.LONGEST_LINE // len(unit))} via  set  -> Init START"
    begin = time.process_time()
    source, text = lines.unwrapped(lines.clean(raw))
    assert list(reader.events([Line("job.log", 1, text, source)]))
    # quadratic time would be a minute
    assert time.process_time() - begin < 2
