"""How torchrun is started, on one node and on several, and what is read from its summary."""

import shlex
import sys
from collections.abc import Sequence

import pytest

from muster import launch
from muster.errors import NoRendezvous
from muster.launch import CommandLine, ExitStatus, RankFailure, Rendezvous
from muster.topology import NodeRange, Topology

HOST = "demo-0.demo.default.svc.cluster.local"
MEETING = Rendezvous("demo", HOST)


def same_on_every_node(
    nodes: NodeRange = NodeRange(4, 4),  # noqa: B008  frozen
    *,
    rendezvous: Rendezvous = MEETING,
    script_arguments: Sequence[str] = (),
) -> list[str]:
    return launch.arguments(
        nodes,
        8,
        rendezvous,
        max_restarts=3,
        script="train.py",
        script_arguments=script_arguments,
    )


# the words of torch.distributed.elastic's ChildFailedError
SUMMARY = """
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
all_reduce.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-01-01_00:00:01
  host      : node-0
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 11)
  error_file: <N/A>
  traceback : To enable traceback see: torch's documentation of elastic/errors
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : node-1
  rank      : 13 (local_rank: 5)
  exitcode  : {exitcode} (pid: 12)
  error_file: <N/A>
  traceback : -
============================================================
"""


def test_torchrun_is_started_under_this_interpreter_with_a_free_port() -> None:
    argv = launch.torchrun(Topology(nnodes=1, nproc_per_node=4), "ddp_demo.py", ["--steps", "9"])
    assert argv == [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nnodes=1", "--nproc-per-node=4", "ddp_demo.py", "--steps", "9"),
    ]


@pytest.mark.parametrize(
    ("exitcode", "words"),
    [
        (1, "rank 13 ended with exit code 1"),
        (-9, "rank 13 was ended by SIGKILL"),
        (-6, "rank 13 was ended by SIGABRT"),
    ],
)
def test_the_rank_that_failed_first_is_the_root_cause(exitcode: int, words: str) -> None:
    failure = launch.first_failure(SUMMARY.format(exitcode=exitcode))
    assert failure == RankFailure(rank=13, local_rank=5, exitcode=exitcode)
    assert str(failure) == words


@pytest.mark.parametrize("output", ["", "rank : 1 (local_rank: 1)\nexitcode : 1", "Root Cause"])
def test_output_without_a_root_cause_names_no_rank(output: str) -> None:
    assert launch.first_failure(output) is None


# ---- several nodes -----------------------------------------------------------------------------


def test_the_arguments_are_torchruns_with_the_full_name_of_node_0() -> None:
    assert same_on_every_node(script_arguments=["--lr", "1"]) == [
        "--nnodes=4",
        "--nproc-per-node=8",
        "--rdzv-id=demo",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={HOST}:29400",
        "--rdzv-conf=join_timeout=1800,read_timeout=900",
        "--max-restarts=3",
        "train.py",
        "--lr",
        "1",
    ]


def test_an_elastic_job_has_a_range_of_nodes() -> None:
    assert same_on_every_node(NodeRange(2, 4))[0] == "--nnodes=2:4"


def test_no_flag_is_given_that_torch_2_10_does_not_know() -> None:
    assert not any("shutdown" in word for word in same_on_every_node())


@pytest.mark.parametrize(("nnodes", "slow"), [(128, False), (129, True), (100_000, True)])
def test_heartbeats_come_less_often_in_a_large_job(nnodes: int, slow: bool) -> None:
    flags = same_on_every_node(NodeRange(nnodes, nnodes))
    assert any("keep_alive_interval=60" in flag for flag in flags) is slow


def test_an_ipv6_address_stands_in_brackets_and_comes_out_of_them() -> None:
    endpoint = Rendezvous("demo", "fd00::1").endpoint
    assert endpoint == "[fd00::1]:29400"
    assert launch.host_and_port(endpoint) == ("fd00::1", 29400)


@pytest.mark.parametrize(
    ("endpoint", "parts"),
    [("a.b:1", ("a.b", 1)), ("a.b", ("a.b", 29400)), ("[fd00::1]", ("fd00::1", 29400))],
)
def test_an_endpoint_without_a_port_has_c10ds(endpoint: str, parts: tuple[str, int]) -> None:
    assert launch.host_and_port(endpoint) == parts


def test_node_0_hosts_the_store_and_gives_its_name() -> None:
    assert launch.for_index(same_on_every_node(), 0)[-3:] == [
        "--rdzv-conf=join_timeout=1800,read_timeout=900,is_host=true",
        f"--local-addr={HOST}",
        "train.py",
    ]


def test_another_node_does_not_host_it() -> None:
    conf, _, script = launch.for_index(same_on_every_node(), 3)[-3:]
    assert conf == "--rdzv-conf=join_timeout=1800,read_timeout=900,is_host=false"
    assert script == "train.py"


@pytest.mark.parametrize("host", [HOST, "zzzz-0.zzzz", "Z_0", "10.0.0.1", "fd00::1"])
def test_addresses_sort_as_indexes_do_whatever_node_0_is_called(host: str) -> None:
    same = same_on_every_node(rendezvous=Rendezvous("demo", host))
    indexes = [0, 1, 2, 9, 10, 11, 99, 100, 1000, 9999, 10_000, 99_999]
    lines = [CommandLine.read(launch.for_index(same, index)) for index in indexes]
    addresses = [str(line.value("local-addr")) for line in lines]
    assert addresses[0] == host
    assert addresses == sorted(set(addresses))


@pytest.mark.parametrize(
    "written",
    [
        [f"--rdzv_endpoint={HOST}:29400", "--rdzv_conf=a=1,b=2"],
        ["--rdzv-endpoint", f"{HOST}:29400", "--rdzv-conf", "a=1,b=2"],
    ],
)
def test_flags_written_by_hand_are_read_in_every_spelling(written: list[str]) -> None:
    script = ["-m", "train", "--rdzv-conf=the script's own", "--local-addr=too"]
    line = CommandLine.read(launch.for_index(["--nnodes", "2", *written, *script], 1))
    assert line.value("nnodes") == "2"
    assert line.value("rdzv-conf") == "a=1,b=2,is_host=false"
    assert line.has("m")
    assert line.command == ("train", *script[2:])


def test_what_was_there_before_is_replaced_not_repeated() -> None:
    once = launch.for_index(same_on_every_node(), 1)
    twice = launch.for_index(once, 1)
    assert sum(word.startswith("--local-addr") for word in twice) == 1
    assert sum(word.startswith("--rdzv-conf") for word in twice) == 1


def test_without_an_endpoint_there_is_no_rendezvous() -> None:
    with pytest.raises(NoRendezvous):
        launch.for_index(["--nnodes=2", "train.py"], 1)


def test_a_command_by_hand_is_torchruns_alone_and_the_shell_reads_it_back() -> None:
    arguments = ["--name", "two words", "$HOME"]
    text = launch.by_hand(NodeRange(2, 2), 8, MEETING, "my train.py", arguments, 1)
    assignment, program, *words = shlex.split(text)
    assert (assignment, program) == ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "torchrun")
    line = CommandLine.read(words)
    assert line.value("nnodes") == "2"
    assert str(line.value("rdzv-conf")).endswith("is_host=false")
    assert line.value("local-addr") == "~node-00001"
    assert line.command == ("my train.py", *arguments)
    assert "'~node-00001'" in text or "'--local-addr=~node-00001'" in text


# ---- how long, and how many at once --------------------------------------------------------------


@pytest.mark.parametrize(
    ("deadline_s", "join_s", "read_s"),
    [(None, 1800, 900), (86_400, 1800, 900), (600, 300, 120), (2, 1, 1), (1, 1, 1)],
)
def test_the_rendezvous_fails_before_the_deadline_cuts_it_off(
    deadline_s: int | None, join_s: int, read_s: int
) -> None:
    assert launch.join_timeout_s(deadline_s) == join_s
    assert launch.read_timeout_s(deadline_s) == read_s


def test_the_grace_period_holds_the_shutdown_the_checkpoint_and_30_s() -> None:
    assert launch.grace_s(0) == 60
    assert launch.grace_s(300) == 360
    assert launch.shutdown_timeout_s(300) == launch.grace_s(300) - 30


@pytest.mark.parametrize("nnodes", [1, 2, 64])
def test_a_small_job_starts_at_once(nnodes: int) -> None:
    assert {launch.start_delay_s(index, nnodes) for index in range(nnodes)} == {0.0}


@pytest.mark.parametrize(
    ("nnodes", "span_s"), [(65, 65 / 16), (320, 20.0), (1000, 30.0), (100_000, 30.0)]
)
def test_a_large_job_comes_evenly_and_within_half_a_minute(nnodes: int, span_s: float) -> None:
    delays = [launch.start_delay_s(index, nnodes) for index in range(nnodes)]
    assert delays[0] == 0
    assert delays == sorted(delays)
    assert delays[-1] == pytest.approx(span_s * (nnodes - 1) / nnodes)
    assert delays[nnodes // 2] == pytest.approx(span_s * (nnodes // 2) / nnodes)


@pytest.mark.parametrize("world_size", [1, 128, 1024, 16_384])
def test_nccls_start_needs_nothing_up_to_128_roots(world_size: int) -> None:
    assert launch.staggering(world_size) == {}


@pytest.mark.parametrize(("world_size", "ranks"), [(16_385, "129"), (800_000, "6250")])
def test_a_start_of_more_ranks_keeps_128_roots(world_size: int, ranks: str) -> None:
    assert launch.staggering(world_size) == {"TORCH_NCCL_RANKS_PER_ROOT": ranks}


# ---- how it ends -------------------------------------------------------------------------------


def test_exit_statuses_are_told_apart_from_those_of_python_shells_and_signals() -> None:
    own = set(ExitStatus) - {ExitStatus.USAGE}
    assert len(own) == 4
    assert not own & {0, 1, 2, *range(124, 256)}


def test_the_last_line_says_what_happened_and_the_status_in_words() -> None:
    line = ExitStatus.WORKER_FAILED.line("rank 3 ended with exit code 1")
    assert line == "muster: rank 3 ended with exit code 1; exit status 10 = worker failed\n"
