"""Whole files to an Explanation, by one process or several, and logs that still grow."""

import gzip
import os
import threading
from pathlib import Path

import pytest
from bench import logs

from muster.errors import LogUnreadable
from muster.explain.diagnose import Diagnosis
from muster.explain.explanation import Explanation, explain, of_text
from muster.explain.watch import Watch

SHM = (
    "node-0:101:202 [3] misc/shmutils.cc:88 NCCL WARN Error: failed to extend /dev/shm/nccl-Ab12Cd"
    " to 9637892 bytes, error: No space left on device (28)\n"
)
INIT = (
    "node-0:101:202 [3] NCCL INFO ncclCommInitRank comm 0x55d0 rank 3 nranks 8 cudaDev 3 nvmlDev 3"
    " busId 4b000 commId 0x1f - Init {}\n"
)


def ids(found: Explanation) -> list[str]:
    return [each.fault.id for each in found.diagnoses]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "job.log"
    logs.write(path, 70_000_000, 256)
    return path


def test_two_processes_find_what_one_finds(large: Path) -> None:
    one, two = explain([large], processes=1), explain([large], processes=2)
    assert one.to_dict() == two.to_dict()
    assert ids(one) == ["shm-too-small"]
    assert (one.diagnoses[0].ranks.runs, one.diagnoses[0].count) == (((3, 3),), 1)
    assert [len(node.ranks) for node in one.picture.nodes] == [8] * 32


def test_many_files_are_shared_among_processes(large: Path, tmp_path: Path) -> None:
    text = large.read_bytes()
    third = text.index(b"\n", len(text) // 3) + 1
    names = [tmp_path / name for name in ("a.log", "b.log", "c.log.gz")]
    names.insert(0, tmp_path / "empty.log")
    names[0].touch()
    names[1].write_bytes(text[:third])
    names[2].write_bytes(text[third : 2 * third])
    names[3].write_bytes(gzip.compress(text[2 * third :], 1))
    assert explain(names, processes=2).picture == explain(names, processes=1).picture
    assert ids(explain(names)) == ["shm-too-small"]


def test_the_rank_of_a_process_is_known_from_another_part(tmp_path: Path) -> None:
    first, second = tmp_path / "1.log", tmp_path / "2.log"
    first.write_text(SHM)
    second.write_text(INIT.format("START"))
    (found, *_) = explain([first, second]).diagnoses
    assert list(found.ranks) == [3]


def test_what_cannot_be_read_is_a_note_beside_what_can(tmp_path: Path) -> None:
    good, gone = tmp_path / "good.log", tmp_path / "gone.log"
    good.write_text(SHM)
    found = explain([gone, good])
    assert ids(found) == ["shm-too-small"]
    assert found.notes == (f"{gone}: not read, No such file or directory",)
    with pytest.raises(LogUnreadable, match="gone"):
        explain([gone])


def test_a_log_without_nccl_says_how_to_see_more(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("step 1 loss 2.0\n")
    found = explain([log])
    assert found.diagnoses == ()
    (note,) = found.notes
    assert "NCCL_DEBUG=INFO" in note
    assert found.lines == 1


def test_a_text_is_explained_as_a_file_is(tmp_path: Path) -> None:
    log = tmp_path / "output"
    log.write_text(INIT.format("START") + SHM)
    assert of_text(log.read_text(), str(log)) == explain([log])


def test_secrets_are_masked_in_all_that_is_told(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("RuntimeError: login failed for https://me:hunter2pass@host/x\n")
    told = str(explain([log]).to_dict())
    assert "login failed" in told
    assert "hunter2pass" not in told


# ---- a log that grows --------------------------------------------------------------------------


class Ended(Exception):
    """Stands for Ctrl-C."""


def watched(
    path: Path, monkeypatch: pytest.MonkeyPatch, *written: str, quiet_s: float = 1e9
) -> tuple[list[str], Explanation]:
    """What is told of `path` while each of `written` is appended at a pause."""
    pauses = iter(written)
    told: list[Diagnosis] = []
    watch = Watch(told.append)

    def pause(_seconds: float) -> None:
        try:
            text = next(pauses)
        except StopIteration:
            raise Ended from None
        with path.open("a") as file:
            file.write(text)

    monkeypatch.setattr("muster.explain.watch.time.sleep", pause)
    monkeypatch.setattr("muster.explain.watch.QUIET_S", quiet_s)
    with pytest.raises(Ended):
        watch.follow([path])
    return [each.fault.id for each in told], watch.explanation()


def test_a_fault_is_told_once_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "job.log"
    log.write_text(INIT.format("START"))
    told, found = watched(log, monkeypatch, SHM, SHM, SHM[:40], SHM[40:])
    assert told == ["shm-too-small"]
    assert found.diagnoses[0].count == 3


def test_ranks_that_have_not_met_yet_are_told_of_once_the_job_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "job.log"
    log.write_text(INIT.format("START"))
    told, found = watched(log, monkeypatch, "step 1\n", "")
    assert told == []
    assert ids(found) == ["init-not-finished"]
    told, _ = watched(log, monkeypatch, "", "", quiet_s=-1)
    assert told == ["init-not-finished"]


def test_a_pipe_is_followed_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    told: list[str] = []

    def write() -> None:
        with os.fdopen(writing, "w") as file:
            # it ends without the end of its line
            file.write(INIT.format("START") + SHM.rstrip())

    writer = threading.Thread(target=write)
    writer.start()
    watch = Watch(lambda each: told.append(each.fault.id))
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        watch.follow([Path("-")])
    writer.join()
    assert told == ["shm-too-small"]
