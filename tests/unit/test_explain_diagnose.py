"""Diagnoses of the corpus (explain_corpus.toml) in the forms of several NCCL versions."""

import pickle
import re
import time
import tomllib
from itertools import chain
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest

from muster.explain import catalogue, lines
from muster.explain.diagnose import Diagnosis, Examiner, diagnose
from muster.explain.events import Event
from muster.explain.lines import Sift
from muster.explain.picture import drawn
from muster.explain.reader import events
from muster.explain.sieve import Sieve
from muster.explain.sketch import Sketch
from muster.finding import Severity

CORPUS = tomllib.loads((Path(__file__).parent / "explain_corpus.toml").read_text(encoding="utf-8"))
OLD, NEW = "2.21.5", "2.30.7"
SHORT = re.compile(r"(WARN|INFO)@(\d+) (?:\[(\S+)\] )?(.*)")


def said(line: str, nccl: str) -> str:
    """WARN@3 [at] text in the form that NCCL of this version writes."""
    if not (match := SHORT.fullmatch(line)):
        return line
    loud, rank, at, text = match[1] == "WARN", int(match[2]), match[3], match[4]
    who = f"node-{rank // 4}:{2000 + rank}:{3000 + rank} [{rank % 4}]"
    if not loud:
        return f"{who} NCCL INFO {text}"
    if nccl == OLD:
        return f"\n{who} {at} NCCL WARN {text}"
    return f"\n[2026-04-22 21:34:20] {who} {at} (ncclFunction) NCCL WARN {text}"


def noise(begin: int, nccl: str) -> list[str]:
    """A hundred lines of a job that is well, without any that a fault depends on."""
    made = []
    for index in range(begin, begin + 100):
        rank = index % 4
        made.append(
            said(
                f"INFO@{rank} Channel {index % 24:02d}/0 : {rank}[{rank}] -> {rank ^ 1}[{rank ^ 1}]"
                " via P2P/CUMEM",
                nccl,
            )
            if index % 3
            else f"[rank{rank}]: read shard {index} of 4096"
        )
    return made


def log(text: str, nccl: str) -> list[str]:
    made = [said(line, nccl) for line in text.strip("\n").split("\n")]
    if "NCCL version" not in text:
        made.insert(0, f"NCCL version {nccl}+cuda12.4")
    return "\n".join([*noise(0, nccl), *made, *noise(100, nccl)]).split("\n")


def read(texts: list[str], sift: Sift = lines.every) -> list[Event]:
    with NamedTemporaryFile(suffix=".log") as file:
        file.write("\n".join(texts).encode())
        file.flush()
        return list(events(lines.read([Path(file.name)], sift=sift)))


def explained(text: str, nccl: str = NEW) -> tuple[Diagnosis, ...]:
    return diagnose(read(log(text, nccl)))


def ids(diagnoses: tuple[Diagnosis, ...]) -> list[str]:
    return [diagnosis.fault.id for diagnosis in diagnoses]


def entries(kind: str) -> list[Any]:
    return [
        pytest.param(entry, nccl, id=f"{entry['fault']}-{index}-{nccl}")
        for index, entry in enumerate(CORPUS[kind])
        for nccl in entry.get("nccl", (OLD, NEW))
    ]


@pytest.mark.parametrize(("entry", "nccl"), entries("case"))
def test_a_fault_is_named_and_nothing_else(entry: dict[str, Any], nccl: str) -> None:
    assert ids(explained(entry["log"], nccl)) == [entry["fault"], *entry.get("also", ())]


@pytest.mark.parametrize(("entry", "nccl"), entries("look_alike"))
def test_a_look_alike_does_not_fire(entry: dict[str, str], nccl: str) -> None:
    assert entry["fault"] not in ids(explained(entry["log"], nccl))


@pytest.mark.parametrize(("entry", "nccl"), entries("case"))
def test_the_sieve_of_large_logs_loses_no_fault(entry: dict[str, str], nccl: str) -> None:
    texts = [*noise(0, nccl), *log(entry["log"], nccl)]
    assert ids(diagnose(read(texts, Sieve().sift))) == ids(diagnose(read(texts)))


def test_every_fault_has_a_case() -> None:
    shown = [(entry["fault"], *entry.get("also", ())) for entry in CORPUS["case"]]
    without = {fault.id for fault in catalogue.read().faults} - {*chain.from_iterable(shown)}
    assert not without


HEALTHY = """
INFO@{r} Bootstrap: Using eth0:10.0.0.{r}<0>
INFO@{r} NCCL version 2.30.7+cuda13.0
INFO@{r} NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
INFO@{r} NCCL_SOCKET_IFNAME set by environment to eth0
INFO@{r} NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
INFO@{r} Initialized NET plugin IB
INFO@{r} Using network IB
INFO@{r} [Rank {r}] ncclCommInitRankConfig comm 0x5{r} rank {r} nranks 8 cudaDev {d} nvmlDev {d} \
busId {d}8000 commId 0xabc - Init START
INFO@{r} comm 0x5{r} rank {r} nRanks 8 nNodes 2 localRanks 4 localRank {d} MNNVL 0
INFO@{r} NVLS multicast support is available on dev {d} (NVLS_NCHANNELS 16)
INFO@{r} Channel 00/0 : {r}[{d}] -> {n}[{d}] [send] via NET/IB/0/GDRDMA
INFO@{r} Connected all rings, use ring PXN 0 GDR 1
INFO@{r} ncclCommInitRankConfig comm 0x5{r} rank {r} nranks 8 cudaDev {d} nvmlDev {d} \
busId {d}8000 commId 0xabc - Init COMPLETE
[rank{r}]: epoch 0 step 10 loss 3.2
"""


def healthy() -> list[str]:
    texts = (HEALTHY.format(r=rank, d=rank % 4, n=(rank + 4) % 8) for rank in range(8))
    return [said(line, NEW) for text in texts for line in text.strip().split("\n")]


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["WARNING: destroy_process_group() was not called before program exit"],
        ["master_addr is only used for static rdzv_backend and when rdzv_endpoint is not given"],
        ["/opt/x.py:3: FutureWarning: this will change"],
        ["retrying after an error: 3 of 5", "validation error rate 0.1", "0 failed, 12 passed"],
    ],
)
def test_nothing_is_found_in_a_healthy_log(more: list[str]) -> None:
    assert ids(diagnose(read([*healthy(), *more, *healthy()]))) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # a cluster without InfiniBand
        (
            "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>",
            "NET/IB : No device found.",
        ),
        # GeForce has no peer access
        ("NVLS multicast support", "P2P is disabled between connected GPUs 0 and 1. NVLS"),
        # a plugin of which the fabric is not there
        ("Initialized NET plugin IB", "Failed to initialize NET plugin IB"),
        # RoCE with a GID that was set, and a ring that was asked for
        ("NCCL_SOCKET_IFNAME set by environment to eth0", "NCCL_IB_GID_INDEX set to 3"),
    ],
)
def test_nothing_is_found_in_a_healthy_log_of_another_kind(old: str, new: str) -> None:
    text = "\n".join(healthy())
    assert old in text
    if "No device" in new:
        text = text.replace("Using network IB", "Using network Socket")
    assert ids(diagnose(read([text.replace(old, new)]))) == []


def test_nothing_is_found_in_an_empty_log() -> None:
    assert diagnose([]) == ()


def test_the_first_real_line_beats_thousands_of_followers() -> None:
    followers = [
        said(
            f"WARN@{rank} [misc/socket.cc:58] socketProgress: Connection closed by remote peer"
            f" node-9<{rank}>",
            NEW,
        )
        for rank in range(4095)
    ]
    followers.insert(3000, said("WARN@9 [include/alloc.h:238] Failed to CUDA calloc 99 bytes", NEW))
    (diagnosis,) = diagnose(read(followers))
    assert (diagnosis.fault.id, diagnosis.count) == ("nccl-oom", 1)
    assert diagnosis.followed_by == (("peer-gone", 4095),)


def test_causes_that_the_log_cannot_tell_apart_are_named_with_the_command_that_decides() -> None:
    finding = explained(
        "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients."
        " 1/3 clients joined."
    )[0].finding()
    assert finding.what == "only 1 of 3 ranks came [ranks-missing]"
    assert "the log cannot tell which" in finding.cause
    assert "to decide:" in finding.remedy
    assert finding.where.endswith(".log:102")


def test_an_unknown_failure_is_shown_with_its_first_lines() -> None:
    (diagnosis,) = explained(
        "WARN@0 [some/new.cc:12] The flux capacitor is out of phase\n"
        "WARN@1 [misc/socket.cc:58] socketProgress: Connection closed by remote peer node-0<1>"
    )
    assert diagnosis.fault.id == "not-known"
    assert "flux capacitor" in diagnosis.finding().evidence
    assert diagnosis.followed_by == (("peer-gone", 1),)


def test_an_unknown_warning_of_a_job_that_does_not_fail_is_but_a_warning() -> None:
    (diagnosis,) = explained("WARN@0 [some/new.cc:12] The flux capacitor is out of phase")
    assert (diagnosis.fault.id, diagnosis.fault.severity) == ("not-known", Severity.WARNING)


def test_an_unknown_line_stands_before_a_symptom() -> None:
    named = explained(
        "WARN@0 [some/new.cc:12] The flux capacitor is out of phase\n"
        "[rank2]:[E602 11:17:52.185053341 ProcessGroupNCCL.cpp:632] [Rank 2] Watchdog caught"
        " collective operation timeout: WorkNCCL(SeqNum=19, OpType=ALLREDUCE, NumelIn=1,"
        " NumelOut=1, Timeout(ms)=1800000) ran for 1800093 milliseconds before timing out."
    )
    assert ids(named) == ["not-known", "watchdog-timeout"]


TORCHRUN_FAILS = """
[rank1]: Traceback (most recent call last):
[rank1]:   File "/srv/job/train.py", line 40, in <module>
[rank1]:     main()
[rank1]: {error}
E1120 10:00:00.100000 4242 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: \
1) local_rank: 1 (pid: 28553) of binary: /opt/venv/bin/python
Traceback (most recent call last):
  File "/opt/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_10:00:00
  host      : node-0
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 28553)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        ("KeyError: 'labels'", "rank-raised"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "cuda-oom"),
        (
            "DistBackendError: NCCL error, remote process exited or there was a network error",
            "child-failed",
        ),
        ("RuntimeError: gloo says something new", "not-known"),
    ],
)
def test_the_first_cause_in_a_failure_of_torchrun_is_named(error: str, fault: str) -> None:
    (diagnosis,) = explained(TORCHRUN_FAILS.format(error=error))
    assert diagnosis.fault.id == fault


def test_an_exception_of_another_rank_is_shown_where_there_is_nothing_else() -> None:
    (diagnosis,) = explained("torch.distributed.DistBackendError: something new")
    assert diagnosis.fault.id == "not-known"


def test_a_warning_hides_no_error_and_stands_behind_it() -> None:
    named = explained(
        "INFO@0 NCCL_P2P_DISABLE set by environment to 1.\n"
        "WARN@0 [include/alloc.h:238] Failed to CUDA calloc 99 bytes"
    )
    assert ids(named) == ["nccl-oom", "debug-switch"]
    assert [d.fault.severity for d in named] == [Severity.ERROR, Severity.WARNING]


def test_an_exception_long_before_the_end_of_a_job_that_goes_on_is_no_fault() -> None:
    for error in ("ValueError: caught and logged", "requests.ConnectionError: tried again"):
        assert ids(explained(error + "\nall is well" * 100)) == []


def test_a_version_outside_its_bounds_has_not_the_fault() -> None:
    text = "INFO@0 cuMem host allocations do not appear to be working; falling back"
    assert ids(explained(text, "2.26.5")) == ["cumem-host"]
    assert ids(explained(text, OLD)) == []


def test_parts_of_a_log_joined_say_what_the_whole_says() -> None:
    for entry in CORPUS["case"]:
        whole = read(log(entry["log"], entry.get("nccl", [NEW])[0]))
        for cut in (len(whole) // 2, 102):
            first, second, sketch = Examiner(), Examiner(), Sketch()
            for at, event in enumerate(whole):
                sketch.add(event)
                (first if at < cut else second).add(event)
            first.join(pickle.loads(pickle.dumps(second)))  # noqa: S301 - its own
            assert ids(first.diagnoses(drawn(sketch))) == ids(diagnose(whole)), entry["fault"]


def test_hostile_lines_take_no_longer_than_others() -> None:
    pieces = {piece for f in catalogue.read().faults for p in f.patterns() for piece in p.pieces}
    hostile = "".join(sorted(pieces)) * 3 + "Error: failed to extend " * 2000
    event = read([hostile[:65_000]])[0]
    begin = time.perf_counter()
    examiner = Examiner()
    for _ in range(20):
        examiner.add(event)
    assert time.perf_counter() - begin < 1.0


def test_a_diagnosis_of_log_text_with_braces_is_shown_as_it_is() -> None:
    text = "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 {x} {0} %s"
    assert "{x} {0} %s" in explained(text)[0].cause
