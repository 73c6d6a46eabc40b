"""Lines as torchrun and gloo of torch 2.13 write them, in the cases in which they once misled."""

from pathlib import Path

import pytest

from muster.explain import explanation

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
RESET = f"RuntimeError: {GLOO}pair.cc:537] Read error [172.19.0.2]:25792: Connection reset by peer."
BARRIER = "failed to pass monitoredBarrier in 3000 ms"


def table(rank: int, code: int, told: str = "", others: str = "  <NO_OTHER_FAILURES>") -> str:
    """What torchrun writes when `rank` was the first to fail; `told` names its signal."""
    traceback = f"Signal {-code} ({told}) received by PID 150" if told else "To enable traceback"
    return f"""\
E1130 00:27:14.163000 135 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: \
{code}) local_rank: {rank} (pid: 150) of binary: /opt/venv/bin/python
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
============================================================
/work/train.py FAILED
------------------------------------------------------------
Failures:
{others}
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-30_00:27:14
  host      : node-0
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 150) {f"({told})" if told else ""}
  error_file: <N/A>
  traceback : {traceback}
============================================================
"""


# what torchrun says of the rank that it ended itself
ENDED = """\
[1]:
  time      : 2026-11-30_00:27:14
  host      : node-0
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 149)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 149"""


def launch(
    node: int, run_id: str = "job-1", nnodes: int = 2, endpoint: str = "node-0:29400"
) -> str:
    """What torchrun writes with LOGLEVEL=INFO."""
    head = f"I1130 00:15:19.649000 2{node} torch/distributed/launcher/api.py:254]   "
    settings = {"run_id": run_id, "rdzv_backend": "c10d", "rdzv_endpoint": endpoint}
    settings |= {"min_nodes": str(nnodes), "max_nodes": str(nnodes)}
    return "\n".join(f"{head}{name:<25}: {value}" for name, value in settings.items()) + "\n"


GAVE_UP = "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError\n"


def titles(text: str) -> list[tuple[str, str]]:
    return [(each.fault.id, each.title) for each in explanation.of_text(text).diagnoses]


def ids_of(folder: Path, *texts: str) -> list[str]:
    """The faults of a job with a log on each node."""
    for node, text in enumerate(texts):
        (folder / f"node-{node}.log").write_text(text)
    return [each.fault.id for each in explanation.explain(sorted(folder.iterdir())).diagnoses]


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        (f"[rank0]:[E1130 00:08:01.038 ProcessGroupGloo.cpp:67] [Rank 0]: Rank 1 {BARRIER}", "1"),
        (f"[rank0]: RuntimeError: [Rank 0]: Rank 1 {BARRIER}", "1"),
        (f"[rank0]: RuntimeError: [Rank 0]: Ranks 1, 3 {BARRIER}", "1, 3"),
    ],
)
def test_the_rank_that_is_not_at_the_barrier_is_named_and_not_the_one_that_waits(
    line: str, ranks: str
) -> None:
    named = titles(line + "\n" + table(0, 1))
    assert named == [("monitored-barrier", f"rank {ranks} did not come to monitored_barrier")]


def test_the_exception_of_the_rank_that_is_missing_comes_before_the_barrier() -> None:
    raised = "[rank1]: KeyError: 'labels'\n[rank0]: RuntimeError: [Rank 0]: Rank 1 " + BARRIER
    assert [name for name, _ in titles(f"{raised}\n{table(1, 1)}")] == ["rank-raised"]


def test_a_rank_that_waits_for_one_that_has_gone_is_no_exception_of_the_program() -> None:
    reached = (
        "[rank1]: RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors"
        " while waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.\n"
        f"[rank1]:  Original exception:\n[rank1]: {GLOO}pair.cc:553] Connection closed by peer"
        " [127.0.0.1]:11947.\n"
    )
    title = "rank 0 is not in the collective in which another rank waits for it"
    assert titles(reached + table(1, 1)) == [("barrier-left", title)]


@pytest.mark.parametrize(
    "lost",
    [
        f"RuntimeError: {GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:1741.",
        f"RuntimeError: {GLOO}pair.cc:553] Connection closed by peer [::1]:1741.",
        RESET,
        f"RuntimeError: {GLOO}pair.cc:271] writev [10.0.0.1]:2: Broken pipe",
    ],
)
def test_a_connection_that_was_lost_is_not_why_the_first_rank_failed(lost: str) -> None:
    found = explanation.of_text(f"[rank0]: {lost}\n{table(1, 3, others=ENDED)}").diagnoses
    assert [each.fault.id for each in found] == ["child-failed"]
    assert found[0].title.startswith("rank 1 ended with exit code 3")
    assert [name for name, _ in found[0].followed_by] == ["gloo-peer-gone"]


def test_where_the_first_to_fail_only_lost_another_that_one_had_left() -> None:
    (named,) = titles(f"[rank0]: {RESET}\n{table(0, 1)}")
    assert named[0] == "left-early"
    assert "rank 0 was in a collective when another rank left" in named[1]


@pytest.mark.parametrize(
    ("told", "fault"), [("SIGKILL", "killed"), ("SIGTERM", "terminated"), ("SIGABRT", "aborted")]
)
def test_where_a_rank_ended_by_a_signal_none_had_left(told: str, fault: str) -> None:
    code = {"SIGKILL": -9, "SIGTERM": -15, "SIGABRT": -6}[told]
    named = titles(f"[rank0]: {RESET}\n{table(1, code, told, ENDED)}")
    assert [name for name, _ in named] == [fault]
    assert named[0][1].startswith("rank 1 ")


def test_the_signal_by_which_torchrun_ends_the_others_is_no_fault() -> None:
    named = titles(f"[rank1]: KeyError: 'labels'\n{table(1, 1, others=ENDED)}")
    assert [name for name, _ in named] == ["rank-raised"]


def test_an_uncaught_exception_of_native_code_is_shown() -> None:
    thrown = "terminate called after throwing an instance of 'std::runtime_error'\n"
    named = titles(thrown + "  what():  no space in the ring\n" + table(1, -6, "SIGABRT"))
    assert named == [("aborted", "rank 1 aborted itself (SIGABRT): no space in the ring")]


def test_a_name_without_an_address_is_told_without_its_port() -> None:
    refused = (
        "[W1130 00:12:32.280618607 socket.cpp:764] [c10d] The IPv6 network addresses of"
        " (no-such-node, 29608) cannot be retrieved (gai error: -2 - Name or service not known).\n"
        "torch.distributed.DistNetworkError: The client socket has timed out after 6000ms while"
        " trying to connect to (no-such-node, 29608).\n"
    )
    assert titles(refused) == [("dns", "no-such-node has no address")]


def test_a_store_that_does_not_answer_is_told_with_its_port() -> None:
    timed_out = (
        "[E1130 00:12:23.393058784 TCPStore.cpp:328] [c10d] TCP client failed to connect/validate"
        " to host node-0:29607 - timed out (try=1, timeout=5000ms): The client socket has timed out"
        " after 5000ms while trying to connect to (node-0, 29607).\n"
        "torch.distributed.DistNetworkError: The client socket has timed out after 5000ms while"
        " trying to connect to (node-0, 29607).\n"
    )
    title = "rank 0's store at node-0:29607 does not answer (timed out)"
    assert titles(timed_out) == [("store-unreachable", title)]


def test_the_key_that_a_rank_waited_for_is_told() -> None:
    waited = (
        "torch.distributed.DistStoreError: wait timeout after 5000ms, keys: /default_pg/0//cpu//0/2"
    )
    title = "a rank waited in vain for /default_pg/0//cpu//0/2"
    assert titles(waited) == [("store-timeout", title)]


def test_a_rank_that_did_not_come_is_named_before_the_call_that_waited_for_it(
    tmp_path: Path,
) -> None:
    waits = (
        f"[rank0]: RuntimeError: {GLOO}unbound_buffer.cc:78] Timed out waiting 5000ms for recv\n"
    )
    waited = "torch.distributed.DistStoreError: wait timeout after 5000ms, keys: /cpu//0/2\n"
    assert ids_of(tmp_path, waits, waited) == ["store-timeout"]


def test_what_a_later_line_names_is_told_with_the_first() -> None:
    (found,) = explanation.of_text(
        "[rank1]: RuntimeError: Expected to have finished reduction in the prior iteration before"
        " starting a new one.\n[rank1]: Parameters which did not receive grad for rank 1:"
        f" idle.bias, idle.weight\n{table(1, 1)}"
    ).diagnoses
    assert found.fault.id == "unused-parameters"
    assert found.cause.endswith("idle.bias, idle.weight")


def test_calls_that_differ_are_told_in_torch_s_short_form() -> None:
    named = titles(
        "[rank0]: RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running"
        " collective: CollectiveFingerPrint(SequenceNumber=0, OpType=ALLREDUCE), but Rank 1 is"
        " running collective: CollectiveFingerPrint(SequenceNumber=0, OpType=BROADCAST).Collectives"
        f" differ in the following aspects: \t Op type: ALLREDUCEvs BROADCAST\n{table(0, 1)}"
    )
    title = "ranks called different collectives: Op type: ALLREDUCEvs BROADCAST"
    assert named == [("collective-fingerprint", title)]


def test_what_nodes_were_started_with_is_compared(tmp_path: Path) -> None:
    logs = (launch(0) + GAVE_UP, launch(1, "job-2") + GAVE_UP)
    assert ids_of(tmp_path, *logs) == ["launches-differ"]


@pytest.mark.parametrize(
    "logs",
    [
        # the same, and a node that did not come
        (launch(0) + GAVE_UP, launch(1) + GAVE_UP),
        # one node that was started twice
        (launch(0) + launch(0, "job-2") + GAVE_UP,),
    ],
)
def test_nodes_that_were_started_alike_do_not_differ(logs: tuple[str, ...], tmp_path: Path) -> None:
    assert ids_of(tmp_path, *logs) == ["rendezvous-timeout"]


def test_nodes_that_met_are_well_whatever_they_were_started_with(tmp_path: Path) -> None:
    assert ids_of(tmp_path, launch(0), launch(1, nnodes=3)) == []


def test_torchrun_s_debug_lines_of_sockets_are_no_fault() -> None:
    assert (
        titles(
            "[I1130 00:08:21.904121400 socket.cpp:955] [c10d] The client socket has connected to"
            " [::ffff:127.0.0.1]:39345 on SocketImpl(fd=13).\n"
            "[I1130 00:08:24.799459776 TCPStoreLibUvBackend.cpp:1354] [c10d] uv_loop_close failed"
            " with:-16 errn:EBUSY desc:resource busy or locked\n"
        )
        == []
    )


PARTED = """\
[W1130 00:47:42.747573220 TCPStore.cpp:115] [c10d] recvVector failed on SocketImpl(fd=3, \
addr=[node-1]:58382, remote=[node-0]:29631): Failed to recv, got 0 bytes. Connection was likely \
closed. Did the remote server shutdown or crash?
Exception raised from recvBytes at /__w/pytorch/torch/csrc/distributed/c10d/Utils.hpp:787 (most \
recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7fd354379b8d in libc10.so)
W1130 00:47:42.757000 70 torch/distributed/elastic/rendezvous/dynamic_rendezvous.py:1298] The node \
'node-1_70_0' has failed to shutdown the rendezvous 'job-1' due to an error of type \
RendezvousConnectionError.
"""
STORE_GONE = """\
torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did \
the remote server shutdown or crash?
torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d \
store has failed. See inner exception for details.
"""


def test_a_torchrun_that_leaves_after_the_first_node_s_is_well() -> None:
    assert titles('{"script": "ddp_demo", "ok": true}\n' + PARTED) == []


@pytest.mark.parametrize("why", [STORE_GONE, f"[rank1]: {RESET}\n{table(1, 1)}"])
def test_a_torchrun_that_failed_with_the_same_words_is_not(why: str) -> None:
    assert titles(PARTED + why)


@pytest.mark.parametrize(
    ("said", "fault", "title"),
    [
        (
            "Rank 0 fails: no sign of rank 1, rank 3 in 60 s",
            "ranks-not-seen",
            "rank 1, rank 3 never came: no sign in 60 s",
        ),
        # two ranks that end at once write into one line
        (
            "Rank 3 waited 60 s in vain for rank 8, rank 9Rank 1 waited 60 s in vain for rank 8",
            "ranks-not-seen",
            "rank 8, rank 9 never came: no sign in 60 s",
        ),
        (
            (
                "Rank 0 fails: rank 0 has torch 2.13.0 for cpu, but rank 1 has torch 2.0.1 for cpu"
                "Rank 1 fails: rank 0 has torch 2.13.0 for cpu, but rank 1 has torch 2.0.1 for cpu"
            ),
            "torch-versions-differ",
            "not every rank has the torch of rank 0: rank 1 has torch 2.0.1",
        ),
        # the facts that rank 0 writes before it fails
        (
            (
                '{"script": "devices", "wrong": ["torch is not the same everywhere:'
                ' 2.13.0 on rank 0, 2.0.1 on rank 1"]}\n'
                "Rank 1 fails: torch is not the same everywhere: 2.13.0 on rank 0, 2.0.1 on rank 1"
            ),
            "torch-versions-differ",
            "not every rank has the torch of rank 0: 2.13.0 on rank 0, 2.0.1 on rank 1",
        ),
        (
            "Rank 1 fails: rank 0 has torch 2.13.0 for cuda, but rank 1 has torch 2.13.0 for cpu",
            "no-gpu",
            "there is no GPU for rank 1",
        ),
        (
            "Rank 0 disproves: no name in it starts with module.: {'prefixed': ['module.weight']}",
            "claim-disproved",
            "ddp_demo.py disproved one of its claims: no name in it starts with module.",
        ),
    ],
)
def test_what_a_script_says_itself_is_the_cause_and_torchrun_s_table_follows(
    said: str, fault: str, title: str
) -> None:
    (found,) = explanation.of_text(f"{said}\n{table(1, 1, others=ENDED)}").diagnoses
    assert (found.fault.id, found.title) == (fault, title)
    assert [name for name, _ in found.followed_by] == ["child-failed"]
