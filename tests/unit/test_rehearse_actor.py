"""What a pod that plays is heard to say, in torchrun's own lines."""

import pytest

from muster.engine import ContainerSpec, Place
from muster.rehearse.actor import Actor, Meeting
from muster.rehearse.pods import Cast, Role


def actor() -> Actor:
    spec = ContainerSpec(image="muster:cpu", command=(), shm_bytes=2**26)
    return Actor(0, 0, "demo-0", Cast((), Role("train", spec, Place()), 30))


# as torch 2.13 prints it; 2.9 to 2.14 differ in the line's number and in the last value
MET = """\
I1129 21:24:09.684000 1 torch/distributed/elastic/agent/server/api.py:707] [default] Rendezvous'ing worker group
I1129 21:24:10.231000 1 torch/distributed/elastic/agent/server/api.py:553] [default] Rendezvous complete for workers. Result:
I1129 21:24:10.231000 1 torch/distributed/elastic/agent/server/api.py:553]   restart_count=0
I1129 21:24:10.231000 1 torch/distributed/elastic/agent/server/api.py:553]   master_addr=demo-0.demo.default.svc.cluster.local
I1129 21:24:10.231000 1 torch/distributed/elastic/agent/server/api.py:553]   master_port=35813
I1129 21:24:10.231000 1 torch/distributed/elastic/agent/server/api.py:553]   group_rank=3
I1129 21:24:10.231000 1 torch/distributed/elastic/agent/server/api.py:553]   group_world_size=12
I1129 21:24:10.231000 1 torch/distributed/elastic/agent/server/api.py:553]   local_ranks=[0, 1]
I1129 21:24:10.231000 1 torch/distributed/elastic/agent/server/api.py:553]   role_ranks=[6, 7]
I1129 21:24:10.231000 1 torch/distributed/elastic/agent/server/api.py:553]   global_ranks=[6, 7]
I1129 21:24:10.231000 1 torch/distributed/elastic/agent/server/api.py:553]   role_world_sizes=[24, 24]
I1129 21:24:10.231000 1 torch/distributed/elastic/agent/server/api.py:553]   global_world_sizes=[24, 24]
I1129 21:24:10.231000 1 torch/distributed/elastic/agent/server/api.py:553]   event_log_handler=null
I1129 21:24:10.231000 1 torch/distributed/elastic/agent/server/api.py:553] 
""".splitlines()  # noqa: E501, W291


def heard(one: Actor, lines: list[str], role: str = "train") -> list[str]:
    """The lines with which a meeting was complete."""
    return [line for line in lines if one.hear(role, line)]


def test_a_meeting_is_read_from_torchruns_log() -> None:
    one = actor()
    (last,) = heard(one, MET)
    assert last.endswith("  global_ranks=[6, 7]")
    assert one.meeting == Meeting(group_rank=3, group_world_size=12, ranks=(6, 7))


@pytest.mark.parametrize(
    "head",
    [
        # torch 2.4 told the thread, later ones the process
        "I0922 12:00:00.123000 140238513375040 torch/distributed/elastic/agent/server/api.py:568]",
        "I0922 12:00:00.123000 7 torch/distributed/elastic/agent/server/api.py:525]",
        "I0922 12:00:00.123000 1 site-packages/torch/distributed/elastic/agent/server/api.py:1]",
    ],
)
def test_the_head_of_a_line_may_differ(head: str) -> None:
    one = actor()
    assert len(heard(one, [f"{head} {line.partition('] ')[2]}" for line in MET])) == 1


def test_each_round_is_a_meeting_of_its_own_and_the_last_one_counts() -> None:
    one = actor()
    heard(one, MET)
    assert len(heard(one, [line.replace("group_rank=3", "group_rank=2") for line in MET])) == 1
    assert [meeting.group_rank for meeting in one.meetings] == [3, 2]
    assert one.meeting == one.meetings[1]


def test_before_it_met_a_pod_has_no_meeting() -> None:
    one = actor()
    heard(one, MET[:7])
    assert one.meeting is None


def test_what_a_script_prints_in_these_words_is_no_meeting() -> None:
    one = actor()
    lines = ["[train] global_ranks=[0, 1]", "[x]  group_rank=two", "group_world_size=3"]
    assert heard(one, lines) == []
    assert one.meetings == []
    assert one.last_lines() == lines


def test_another_containers_torchrun_is_not_the_jobs() -> None:
    one = actor()
    assert heard(one, MET, role="preflight") == []
    assert one.meeting is None


def test_the_last_lines_are_the_pods_own_and_not_torchruns_log() -> None:
    one = actor()
    head = "0801 04:55:28.464000 140238513375040 torch/distributed/elastic/multiprocessing/api.py"
    lines = [
        "step 1",
        "",
        f"W{head}:858] Sending process 28548 closing signal SIGTERM",
        "[W602 11:17:52.185053341 socket.cpp:767] [c10d] The client socket has failed to connect",
        "ValueError: no data",
        f"E{head}:833] failed (exitcode: 1) local_rank: 0 (pid: 28553) of binary: /usr/bin/python",
        "Traceback (most recent call last):",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    ]
    heard(one, MET + lines)
    assert one.last_lines() == [lines[0], lines[3], lines[4]]
    assert one.last_lines(1) == ["ValueError: no data"]


def test_a_pod_plays_until_it_has_ended() -> None:
    one = actor()
    assert one.plays
    one.ended = 1.0
    assert not one.plays


def test_of_much_output_only_the_end_is_kept() -> None:
    one = actor()
    heard(one, [f"step {number}" for number in range(1000)])
    assert len(one.output) < 1000
    assert one.last_lines(1) == ["step 999"]
