"""Faults that people reported in public (explain_reports.toml), within the log of a job as NCCL of
their version writes it, and jobs that are well, of which nothing is to be found.
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from muster.explain import lines
from muster.explain.diagnose import Diagnosis, Examiner, diagnose
from muster.explain.lines import Sift
from muster.explain.picture import drawn, picture
from muster.explain.reader import events
from muster.explain.sieve import Sieve
from muster.explain.sketch import Sketch
from muster.finding import Severity

HERE = Path(__file__).parent
TOLD = tomllib.loads((HERE / "explain_reports.toml").read_text(encoding="utf-8"))
REPORTS: list[dict[str, Any]] = TOLD["report"]
HEALTHY = sorted((HERE / "explain_healthy").glob("*.log"))
# of each form of NCCL's log one
VERSIONS = (
    "2.16.5",
    "2.18.6",
    "2.20.5",
    "2.21.5",
    "2.23.4",
    "2.26.2",
    "2.27.5",
    "2.28.9",
    "2.30.7",
)


# ---- a job that is well ------------------------------------------------------------------------


class Said(NamedTuple):
    """A line and the rank that wrote it."""

    rank: int
    text: str


@dataclass(frozen=True)
class Job:
    nccl: str
    nodes: int = 2
    local: int = 4
    network: str = "IB"

    @property
    def version(self) -> tuple[int, ...]:
        return tuple(map(int, self.nccl.split(".")))

    @property
    def ranks(self) -> range:
        return range(self.nodes * self.local)

    def who(self, rank: int) -> str:
        device = rank % self.local
        return f"node-{rank // self.local}:{2000 + rank}:{3000 + rank} [{device}]"

    def info(self, rank: int, text: str) -> Said:
        return Said(rank, f"{self.who(rank)} NCCL INFO {text}")

    def warn(self, rank: int, at: str, text: str) -> Iterator[Said]:
        """NCCL begins a new line before it; 2.26 puts the time, 2.30.7 the function in."""
        yield Said(rank, "")
        time = "[2026-04-22 21:34:20] " if self.version >= (2, 26) else ""
        function = " (ncclFunction)" if self.version >= (2, 30, 7) else ""
        yield Said(rank, f"{time}{self.who(rank)} {at}{function} NCCL WARN {text}")

    # ---- what a rank says, in this order ----

    def greeting(self) -> Iterator[Said]:
        """What torchrun and the program say before NCCL does."""
        yield Said(0, "W1120 10:00:00.100000 4242 torch/distributed/run.py:774] ")
        yield Said(0, "W1120 10:00:00.100000 4242 torch/distributed/run.py:774] " + "*" * 41)
        yield Said(
            0,
            "W1120 10:00:00.100000 4242 torch/distributed/run.py:774] Setting OMP_NUM_THREADS"
            " environment variable for each process to be 1 in default, to avoid your system being"
            " overloaded, please further tune the variable for optimal performance in your"
            " application as needed.",
        )
        for rank in self.ranks:
            yield Said(rank, f"rank {rank} of {len(self.ranks)}: reading 4096 shards")
            for shard in range(6):
                yield Said(rank, f"shard {shard:05d}.tar: 1024 samples, 0 errors, 0 skipped")
            yield Said(rank, "tokenizer: 32000 words; failed downloads: 0; retries: 0")

    def _network(self, where: str) -> Iterator[str]:
        infiniband = self.network == "IB"
        if infiniband:
            yield f"NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB {where}"
        else:
            yield "NET/IB : No device found."
            if self.version >= (2, 24):
                yield f"NET/IB : Using [RO]; OOB {where}"
            if self.version >= (2, 27):
                yield "Failed to initialize NET plugin IB"
            yield f"NET/Socket : Using [0]{where}"
        if self.version >= (2, 27):
            yield f"Initialized NET plugin {self.network}"
            yield f"Assigned NET plugin {self.network} to comm"
        if (2, 19) <= self.version < (2, 22):
            yield "Using non-device net plugin version 0"
        yield f"Using network {self.network}"

    def _plugin(self) -> str:
        if self.version < (2, 19):
            return "NET/Plugin : No plugin found (libnccl-net.so), using internal implementation"
        if self.version < (2, 27):
            return "NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin."
        return "NET/Plugin: Could not find: libnccl-net.so"

    def _comm(self, rank: int, *, end: str) -> str:
        name = (
            f"comm 0x55{rank:04x} rank {rank} nranks {len(self.ranks)} cudaDev {rank % self.local}"
        )
        nvml = f" nvmlDev {rank % self.local}" if self.version >= (2, 18, 3) else ""
        bus = f"{name}{nvml} busId {rank % self.local + 1}8000"
        if self.version < (2, 18, 3):
            return f"{bus} commId 0xabc123 - Init {end}" if end == "COMPLETE" else ""
        begin = "ncclCommInitRank " if (2, 21) <= self.version < (2, 23) else ""
        begin = "ncclCommInitRankConfig " if self.version >= (2, 23) else begin
        if end == "START" and self.version >= (2, 29):
            begin = f"[Rank {rank}] {begin}"
        return f"{begin}{bus} commId 0xabc123 - Init {end}"

    def begun(self, rank: int) -> Iterator[Said]:
        """A rank up to where it waits for the others."""
        where = f"eth0:10.0.0.{1 + rank // self.local}<0>"
        banner = f"NCCL version {self.nccl}+cuda{'13.0' if self.version >= (2, 28) else '12.4'}"
        if self.version < (2, 22):
            if rank == 0:
                yield Said(0, banner)
        else:
            yield self.info(rank, banner)
        yield self.info(rank, "cudaDriverVersion 13000")
        yield self.info(rank, "NCCL_SOCKET_IFNAME set by environment to eth0")
        colon = " :" if self.version < (2, 24) else ":"
        yield self.info(rank, f"Bootstrap{colon} Using {where}")
        yield self.info(rank, self._plugin())
        if (2, 23) <= self.version < (2, 26):
            yield self.info(rank, "PROFILER/Plugin: Could not find: libnccl-profiler.so.")
        for text in self._network(where):
            yield self.info(rank, text)
        if start := self._comm(rank, end="START"):
            yield self.info(rank, start)

    def joined(self, rank: int) -> Iterator[Said]:
        """A rank from where all have come to where it may train."""
        device, count = rank % self.local, len(self.ranks)
        if self.version < (2, 28):
            yield self.info(rank, f"Setting affinity for GPU {device} to ff,00000000,000000ff")
        if self.version >= (2, 17):
            yield self.info(rank, f"NVLS multicast support is available on dev {device}")
        if self.version >= (2, 20):
            yield self.info(
                rank,
                f"comm 0x55{rank:04x} rank {rank} nRanks {count} nNodes {self.nodes}"
                f" localRanks {self.local} localRank {device} MNNVL 0",
            )
        if rank == 0:
            ring = "".join(f"{other:5d}" for other in self.ranks)
            for channel in range(4):
                yield self.info(rank, f"Channel {channel:02d}/04 :{ring}")
        yield self.info(rank, f"Trees [0] {rank + 1}/-1/-1->{rank}->{rank - 1}")
        yield self.info(rank, "P2P Chunksize set to 131072")
        for channel in range(4):
            yield self.info(rank, self._channel(rank, channel))
        ring_said = "Connected all rings"
        if self.version >= (2, 24):
            ring_said += f", use ring PXN 0 GDR {int(self.network == 'IB')}"
        yield self.info(rank, ring_said)
        yield self.info(rank, "Connected all trees")
        yield self.info(rank, "threadThresholds 8/8/64 | 64/8/64 | 512 | 512")
        nvls = " 0 collnet channels, 0 nvls channels," if self.version >= (2, 20) else ""
        yield self.info(rank, f"4 coll channels,{nvls} 4 p2p channels, 2 p2p channels per peer")
        yield self.info(rank, self._comm(rank, end="COMPLETE"))

    def _channel(self, rank: int, channel: int) -> str:
        other = (rank + 1) % len(self.ranks)
        old = self.version < (2, 18, 3)
        source, target = (
            f"{each}[{each % self.local + 1}8000]" if old else f"{each}[{each % self.local}]"
            for each in (rank, other)
        )
        if other // self.local == rank // self.local:
            via = "P2P/IPC" if self.version < (2, 18) else "P2P/CUMEM"
            return f"Channel {channel:02d}/0 : {source} -> {target} via {via}"
        way = "NET/IB/0/GDRDMA" if self.network == "IB" else f"NET/{self.network}/0"
        return f"Channel {channel:02d}/0 : {source} -> {target} [send] via {way}"

    def trained(self, begin: int, end: int) -> Iterator[Said]:
        for step in range(begin, end):
            for rank in self.ranks:
                yield Said(rank, f"epoch 0 step {step} rank {rank} loss {4 - step / 100:.3f}")

    # ---- all of it ----

    def up_to(self, stage: str) -> list[Said]:
        """What a job that is well says until the fault comes: 100 lines, at least."""
        said = list(self.greeting())
        if stage == "torch":
            return [*said, *self.filler(100 - len(said))]
        said += interleaved(self.begun(rank) for rank in self.ranks)
        if stage == "init":
            return [*said, *self.filler(100 - len(said))]
        said += interleaved(self.joined(rank) for rank in self.ranks)
        return [*said, *self.trained(0, 10)]

    def filler(self, count: int) -> Iterator[Said]:
        for index in range(count):
            yield Said(index % len(self.ranks), f"prefetch: {index} of 4096 shards in the cache")

    def after(self) -> list[Said]:
        """What other programs still say when a job has failed: 100 lines."""
        programs = (
            "kubelet: container trainer is still running",
            "wandb: Synced 5 W&B file(s), 0 media file(s), 0 artifact file(s)",
            "node_exporter: collector filesystem took 0.01 s",
            "gc: heap 1.2 GiB, 0 objects freed",
        )
        last = len(self.ranks) - 1
        return [Said(last, f"{programs[each % 4]} ({each})") for each in range(100)]


def interleaved(parts: Iterable[Iterable[Said]]) -> list[Said]:
    """As several processes write into one file: now this one, now that one."""
    rows = zip_longest(*parts)
    return [said for said in chain.from_iterable(rows) if said is not None]


# ---- a report in it ----------------------------------------------------------------------------

MARKED = re.compile(r"(?P<loud>WARN|INFO|TEXT)@(?P<rank>\d+) (?:\[(?P<at>\S+)\] )?(?P<text>.*)")


def spelled(job: Job, text: str) -> Iterator[Said]:
    """WARN@3 [at] text, INFO@3 text and TEXT@3 text of rank 3; what has no mark is of rank 0."""
    for line in text.strip("\n").split("\n"):
        match = MARKED.fullmatch(line)
        if match is None:
            yield Said(0, line)
            continue
        rank, said = int(match["rank"]), match["text"]
        if match["loud"] == "WARN":
            yield from job.warn(rank, match["at"], said)
        elif match["loud"] == "INFO":
            yield job.info(rank, said)
        else:
            yield Said(rank, said)


def job_of(report: Mapping[str, Any]) -> Job:
    return Job(
        nccl=report.get("nccl", "2.27.5"),
        nodes=report.get("nodes", 2),
        local=report.get("local", 4),
        network=report.get("network", "IB"),
    )


def told(report: Mapping[str, Any]) -> list[Said]:
    """The report's lines inside 200 lines of a job that is well otherwise.

    What only follows is before the root in the file too: another rank wrote it first.
    """
    job = job_of(report)
    noise = job.up_to(report.get("stage", "trained"))
    if "instead" in report:
        noise = [said for said in noise if not any(old in said.text for old in report["instead"])]
    noise += job.filler(100 - len(noise))
    parts = [report[name] for name in ("before", "log", "after") if name in report]
    decisive = [said for part in parts for said in spelled(job, part)]
    return [*noise, *decisive, *job.after()]


class Wrapping(NamedTuple):
    """What a launcher or a collector of logs puts around each line."""

    name: str
    before: str = ""
    after: str = ""

    def around(self, said: Said, local: int) -> str:
        node, local_rank = divmod(said.rank, local)
        before = self.before.format(rank=said.rank, node=node, local_rank=local_rank)
        return f"{before}{said.text}{self.after}"


WRAPPINGS = (
    Wrapping("plain"),
    Wrapping("torchrun tee", "[default{local_rank}]:"),
    Wrapping("srun", "{rank}: "),
    Wrapping("mpirun", "[1,{rank}]<stdout>:"),
    Wrapping("kubectl", "[pod/train-{node}/trainer] "),
    Wrapping("kubectl and its times", "[pod/train-{node}/trainer] 2026-11-20T10:00:00.123456789Z "),
    Wrapping("compose", "trainer-{node}  | "),
    Wrapping("colours", "\x1b[36m", "\x1b[0m"),
    Wrapping("windows", "", "\r"),
    Wrapping("srun and tee", "{node}: [default{local_rank}]:"),
)


def written(path: Path, texts: Iterable[str]) -> Path:
    path.write_bytes("".join(f"{text}\n" for text in texts).encode())
    return path


def explained(paths: Sequence[Path], sift: Sift = lines.every) -> tuple[Diagnosis, ...]:
    return diagnose(events(lines.read(paths, sift=sift)))


def outline(diagnoses: Iterable[Diagnosis]) -> list[tuple[str, int, tuple[tuple[str, int], ...]]]:
    return [(each.fault.id, each.count, each.followed_by) for each in diagnoses]


def check(report: Mapping[str, Any], diagnoses: tuple[Diagnosis, ...]) -> None:
    assert diagnoses, "nothing was found"
    ids = [each.fault.id for each in diagnoses]
    assert ids[0] == report["fault"], ids
    assert diagnoses[0].fault.class_ == report["class"]
    loud = [each.fault.id for each in diagnoses if each.fault.severity is Severity.ERROR]
    assert set(loud) <= {report["fault"], *report.get("also", ())}, ids
    quiet = set(ids) - set(loud) - {report["fault"]}
    assert quiet == set(report.get("warnings", ())), ids
    finding = diagnoses[0].finding()
    text = f"{finding.cause} {finding.remedy}"
    assert not [word for word in report["remedy"] if word not in text], text


def names(report: Mapping[str, Any]) -> str:
    return re.sub(r"[^\w.-]+", "-", str(report["name"]))


EVERY = [pytest.param(report, id=names(report)) for report in REPORTS]
# what is shown by its own lines, whatever else is in the log
ALONE = [
    pytest.param(report, id=names(report)) for report in REPORTS if not report.get("whole", False)
]
WRAPPED = [
    pytest.param(report, wrapping, id=f"{names(report)}-{wrapping.name}")
    for index, report in enumerate(REPORTS)
    # plain, and three others in turn, so that each form holds a third of the reports
    for wrapping in (WRAPPINGS[0], *(WRAPPINGS[1 + (index + n * 3) % 9] for n in range(3)))
]


@pytest.mark.parametrize(("report", "wrapping"), WRAPPED)
def test_a_report_is_named_within_a_log_of_any_wrapping(
    tmp_path: Path, report: dict[str, Any], wrapping: Wrapping
) -> None:
    local = job_of(report).local
    texts = [wrapping.around(said, local) for said in told(report)]
    assert len(texts) > 200
    log = written(tmp_path / "job.log", texts)
    diagnoses = explained([log])
    check(report, diagnoses)
    assert outline(explained([log], Sieve().sift)) == outline(diagnoses)


@pytest.mark.parametrize("report", EVERY)
def test_a_report_is_named_from_a_file_of_each_rank(tmp_path: Path, report: dict[str, Any]) -> None:
    by_rank: dict[int, list[str]] = {}
    for said in told(report):
        by_rank.setdefault(said.rank, []).append(said.text)
    logs = [written(tmp_path / f"rank-{rank:05d}.log", by_rank[rank]) for rank in sorted(by_rank)]
    diagnoses = explained(logs)
    check(report, diagnoses)
    assert outline(explained(logs, Sieve().sift)) == outline(diagnoses)


# ---- nothing is wrong --------------------------------------------------------------------------


@pytest.mark.parametrize("nccl", VERSIONS)
@pytest.mark.parametrize(
    ("nodes", "local", "network"), [(1, 8, "Socket"), (4, 4, "IB"), (3, 2, "Socket")]
)
def test_nothing_is_found_in_a_healthy_log(
    tmp_path: Path, nccl: str, nodes: int, local: int, network: str
) -> None:
    job = Job(nccl, nodes, local, network)
    said = [*job.up_to("trained"), *job.trained(10, 20), *job.after()]
    log = written(tmp_path / "job.log", (each.text for each in said))
    assert outline(explained([log])) == []
    assert outline(explained([log], Sieve().sift)) == []


def test_there_are_healthy_logs_of_other_kinds() -> None:
    assert len(HEALTHY) >= 8


@pytest.mark.parametrize("log", HEALTHY, ids=lambda log: log.stem)
@pytest.mark.parametrize("sift", [lines.every, None], ids=["whole", "sifted"])
def test_nothing_is_found_in_a_log_of_a_job_that_came_right(log: Path, sift: Sift | None) -> None:
    assert outline(explained([log], sift or Sieve().sift)) == []


@pytest.mark.parametrize("log", HEALTHY, ids=lambda log: log.stem)
def test_nothing_is_found_in_its_parts_joined(log: Path) -> None:
    whole = list(events(lines.read([log])))
    for cut in range(10, len(whole), len(whole) // 7):
        first, second, sketch = Examiner(), Examiner(), Sketch()
        for at, event in enumerate(whole):
            sketch.add(event)
            (first if at < cut else second).add(event)
        first.join(second)
        assert outline(first.diagnoses(drawn(sketch))) == [], cut


# ---- more than one thing in a log --------------------------------------------------------------


@pytest.mark.parametrize("report", ALONE)
def test_the_job_that_failed_is_named_beside_one_that_was_well(
    tmp_path: Path, report: dict[str, Any]
) -> None:
    """Two jobs in one log, on other nodes, with another NCCL and another network."""
    well = (HERE / "explain_healthy" / "efa_2.27.log").read_text(encoding="utf-8")
    other = well.replace("node-", "cloud-").replace("0xabc123", "0xdef456")
    texts = [*other.split("\n"), *(said.text for said in told(report))]
    check(report, explained([written(tmp_path / "jobs.log", texts)], Sieve().sift))


@pytest.mark.parametrize("report", ALONE)
def test_a_report_is_named_where_only_the_end_of_the_log_was_kept(
    tmp_path: Path, report: dict[str, Any]
) -> None:
    decisive = [
        said
        for name in ("before", "log", "after")
        if name in report
        for said in spelled(job_of(report), report[name])
    ]
    texts = [said.text for said in (*decisive, *job_of(report).after())]
    diagnoses = explained([written(tmp_path / "tail.log", texts)])
    assert diagnoses, "nothing was found"
    assert report["fault"] in [each.fault.id for each in diagnoses], outline(diagnoses)


def test_one_real_line_is_named_among_thousands_that_follow_from_it(tmp_path: Path) -> None:
    job = Job("2.27.5", nodes=512, local=8)
    gone = "socketProgress: Connection closed by remote peer node-9<{}>"
    said = [
        *chain.from_iterable(
            job.warn(rank, "misc/socket.cc:58", gone.format(40000 + rank)) for rank in range(4095)
        ),
        *job.warn(4095, "include/alloc.h:238", "Failed to CUDA calloc 10485760 bytes"),
    ]
    log = written(tmp_path / "job.log", (each.text for each in said))
    for sift in (lines.every, Sieve().sift):
        (diagnosis,) = explained([log], sift)
        assert (diagnosis.fault.id, diagnosis.count) == ("nccl-oom", 1)
        assert diagnosis.followed_by == (("peer-gone", 4095),)
        assert diagnosis.event is not None
        assert "node-511" in diagnosis.event.line.text


def test_an_error_that_was_survived_is_none_however_much_is_left_out_of_the_log(
    tmp_path: Path,
) -> None:
    job = Job("2.27.5", 1, 2, "Socket")
    error = [Said(0, "Traceback (most recent call last):"), Said(0, "ValueError: tried again")]
    said = [*job.up_to("trained"), *error, *job.trained(10, 400), *job.after()]
    log = written(tmp_path / "job.log", (each.text for each in said))
    assert outline(explained([log])) == outline(explained([log], Sieve().sift)) == []


OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
GONE = "socketProgress: Connection closed by remote peer node-0<41123>"


@pytest.mark.parametrize(
    ("at", "text", "names"),
    [
        ("include/alloc.h:238", "Failed to CUDA host alloc 4194304 bytes", ["nccl-host-oom"]),
        ("misc/socket.cc:58", GONE, ["cuda-oom"]),
    ],
)
def test_an_error_counts_as_survived_only_where_another_explains_the_end(
    tmp_path: Path, at: str, text: str, names: list[str]
) -> None:
    job = Job("2.27.5", 1, 2, "Socket")
    said = [*job.up_to("trained"), Said(0, OUT_OF_MEMORY), *job.trained(10, 300)]
    said += job.warn(1, at, text)
    log = written(tmp_path / "job.log", (each.text for each in said))
    for sift in (lines.every, Sieve().sift):
        assert [each.fault.id for each in explained([log], sift)] == names


def test_the_exception_that_ended_a_job_is_named_not_one_that_it_survived(tmp_path: Path) -> None:
    job = Job("2.27.5", 1, 2, "Socket")
    said = [
        *job.up_to("trained"),
        Said(0, "ValueError: tried again"),
        *job.trained(10, 40),
        *(Said(1, "WARNING: the disk is slow, retry 1 of 3"), *job.trained(40, 80)),
        Said(1, "KeyError: 'labels'"),
        Said(
            0,
            "E1120 10:00:00.100000 4242 torch/distributed/elastic/multiprocessing/api.py:882]"
            " failed (exitcode: 1) local_rank: 1 (pid: 28553) of binary: /opt/venv/bin/python",
        ),
    ]
    log = written(tmp_path / "job.log", (each.text for each in said))
    for sift in (lines.every, Sieve().sift):
        (diagnosis,) = explained([log], sift)
        assert diagnosis.title == "the program itself failed first: KeyError: 'labels'"


def test_switches_that_were_left_on_are_warned_of_in_a_job_that_is_well(tmp_path: Path) -> None:
    job = Job("2.27.5", 2, 4, "Socket")
    switches = [
        job.info(rank, f"NCCL_{name}_DISABLE set by environment to 1.")
        for rank in job.ranks
        for name in ("IB", "P2P")
    ]
    log = written(tmp_path / "job.log", (each.text for each in [*switches, *job.up_to("trained")]))
    diagnoses = explained([log], Sieve().sift)
    assert [each.fault.id for each in diagnoses] == ["ib-disabled", "debug-switch"]
    assert {each.fault.severity for each in diagnoses} == {Severity.WARNING}


def test_where_a_log_tells_of_no_fault_the_picture_tells_of_the_network(tmp_path: Path) -> None:
    """Without --device /dev/infiniband and without a variable that asks for it, nothing is amiss
    that could not be a cluster of sockets: what NCCL chose is said all the same.
    """
    job = Job("2.27.5", 2, 4, "Socket")
    log = written(tmp_path / "job.log", (each.text for each in job.up_to("trained")))
    drawing = picture(events(lines.read([log])))
    assert outline(explained([log])) == []
    assert [(node.networks, node.gpu_direct) for node in drawing.nodes] == [
        (("Socket",), False)
    ] * 2
