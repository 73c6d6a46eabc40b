"""Reports of the smoke suite for the tests of what reads them: of one node and of many."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from muster.bandwidth.floors import Basis, Floor
from muster.bandwidth.results import Collective, Row, Run, Tool
from muster.bandwidth.series import Series
from muster.dossier import Dossier, ImageRef, Node, Watched
from muster.finding import Finding, Outcome, Severity, Verdict
from muster.steps import Step

SIZES = tuple(2**power for power in range(3, 34, 2))


def rows(peak: float, sizes: Sequence[int] = SIZES) -> tuple[Row, ...]:
    """A latency of 20 us, and `peak` GB/s where the size hides it."""
    times = [(size, 20e-6 + size / (peak * 1e9)) for size in sizes]
    return tuple(
        Row(
            bytes=size,
            seconds=seconds,
            algbw=round(size / seconds / 1e9, 2),
            busbw=round(size / seconds / 1e9, 2),
            wrong=0,
        )
        for size, seconds in times
    )


def series(collective: Collective, tool: Tool, peak: float, *nodes: str, nranks: int = 8) -> Series:
    run = Run(tool=tool, collective=collective, nranks=nranks, rows=rows(peak))
    return Series(run=run, backend="nccl", nodes=nodes, claimed=True, floor=None)


def finding(severity: Severity = Severity.ERROR, where: str = "memlock") -> Finding:
    return Finding(
        severity=severity,
        what="only 64 KiB can be locked",
        where=where,
        evidence="mlock of 32 MiB: Cannot allocate memory\nulimit -l: 64",
        cause="the Engine gives the container the limit of its own unit",
        remedy="set LimitMEMLOCK=infinity in dockerd's unit and restart it",
    )


def step(
    name: str,
    outcome: Outcome = Outcome.PASSED,
    measure: str = "",
    *findings: Finding,
    output: str = "",
) -> Step:
    return Step(
        name=name,
        outcome=outcome,
        seconds=4.2 if outcome is not Outcome.NOT_RUN else 0.0,
        limit_s=120.0,
        measure=measure,
        findings=findings,
        output=output,
        command=f"./invokew smoke --variant cu13 --only {name}",
    )


def node(host: str, **facts: str) -> Node:
    known = {
        "driver": "580.95.05, CUDA 13.0, open kernel modules",
        "gpus": "8 x NVIDIA H100 80GB HBM3, no ECC error",
        "topology": "NV18 between all pairs",
        "shm": "64 GiB free of 64 GiB",
        "locked_memory": "64 MiB locked (limit 64 KiB)",
        "hcas": "8 active, 400 Gb/s",
    }
    return Node(
        host=host,
        missing=None,
        facts={**known, **facts},
        watched=Watched(
            networks=("IB",),
            gpu_direct=True,
            links={"P2P/CUMEM": 56, "NET/IB/GDRDMA": 16},
            rings=16,
            trees=True,
            nvls=16,
        ),
    )


def dossier(host: str = "gpu-1", peak: float = 360.0) -> Dossier:
    """One node with eight GPUs that is well."""
    floor = Floor(busbw=330, bytes=2**30, basis=Basis.THRESHOLD, source="floors.toml")
    bandwidth = [
        replace(
            series(each, tool, speed, host),
            floor=floor if each is Collective.ALL_REDUCE else None,
        )
        for each in Collective
        for tool, speed in (
            (Tool.NCCL_TESTS, peak),
            (Tool.TORCH, peak * 0.97),
        )
    ]
    return Dossier(
        verdict=Verdict.READY,
        started="2026-11-30T00:55:00Z",
        seconds=143.2,
        muster="0.1.0",
        command_line="./invokew smoke --variant cu13 --json report.json --html report.html",
        image=ImageRef(ref="muster:cu13", id=f"sha256:{'3f' * 32}"),
        run={"engine": "28.2.2", "shm": "1 GiB (docker/pins.toml)", "memlock": "unlimited"},
        versions={"torch": "2.14.1", "NCCL": "2.30.7", "CUDA": "13.0", "Python": "3.13.5"},
        hashes={"bom.json": "9c" * 32, "docker/locks/cu13.txt": "77" * 32},
        nodes=(node(host),),
        steps=(
            step("doctor", measure="39 checks, nothing stops training"),
            step("all_reduce[nccl]", measure="8 ranks, sum right"),
            step("nccl_tests", measure=f"all_reduce {peak:.0f} GB/s at 8 GiB, floor 330"),
            step("rdma", Outcome.NOT_APPLICABLE, "no HCA that is active"),
        ),
        findings=(),
        bandwidth=tuple(bandwidth),
    )


def ill() -> Dossier:
    """The same node with a step that failed and what stood on it not run."""
    error, warning = finding(), finding(Severity.WARNING, "the Docker Engine")
    log = "\n".join(f"rank0: line {number}" for number in range(2000))
    return replace(
        dossier(),
        verdict=Verdict.NOT_READY,
        steps=(
            *dossier().steps[:1],
            step("memlock", Outcome.FAILED, "64 KiB", error, output=log),
            step("nccl_tests", Outcome.NOT_RUN, "it stands on memlock, which failed"),
        ),
        findings=(warning, error),
    )


def cluster(count: int) -> Dossier:
    """`count` nodes; the last left no results, and one that did has another driver."""
    hosts = tuple(f"gpu-{number}" for number in range(count))
    nodes = [node(host) for host in hosts]
    nodes[-2] = node(hosts[-2], driver="570.86.15, CUDA 12.8, open kernel modules")
    nodes[-1] = replace(
        nodes[-1], missing="its container ended (137) during ddp_demo", facts={}, watched=None
    )
    pairs = [(one, other) for at, one in enumerate(hosts) for other in hosts[at + 1 :]]
    wide = [series(each, Tool.TORCH, 180, *hosts, nranks=8 * count) for each in Collective]
    alone = [series(each, Tool.TORCH, 350, host) for each in Collective for host in hosts]
    between = [series(Collective.ALL_REDUCE, Tool.TORCH, 170, *pair, nranks=16) for pair in pairs]
    return replace(ill(), nodes=tuple(nodes), bandwidth=(*alone, *wide, *between))


def reworded(found: Dossier, word: Callable[[str], str]) -> Dossier:
    """`found` with every text that comes from a machine or a log replaced by `word` of it."""

    def told(each: Finding) -> Finding:
        texts = {name: word(text) for name, text in each.to_dict().items() if name != "severity"}
        return Finding.from_dict({"severity": each.severity, **texts})

    def mapped(texts: dict[str, str]) -> dict[str, str]:
        return {word(name): word(text) for name, text in texts.items()}

    hosts = {each.host: word(each.host) for each in found.nodes}
    return replace(
        found,
        started=word(found.started),
        command_line=word(found.command_line),
        muster=word(found.muster),
        image=ImageRef(ref=word("ref"), id=word("id")),
        run=mapped(dict(found.run)),
        versions=mapped(dict(found.versions)),
        hashes=mapped(dict(found.hashes)),
        findings=tuple(map(told, found.findings)),
        steps=tuple(
            replace(
                each,
                name=word(each.name),
                measure=word(each.measure),
                output=word(each.output) if each.output else "",
                command=word(each.command),
                findings=tuple(map(told, each.findings)),
            )
            for each in found.steps
        ),
        nodes=tuple(
            replace(
                each,
                host=hosts[each.host],
                missing=None if each.missing is None else word(each.missing),
                facts=mapped(dict(each.facts)),
                watched=each.watched
                and replace(
                    each.watched,
                    networks=tuple(map(word, each.watched.networks)),
                    links={word(via): count for via, count in each.watched.links.items()},
                ),
            )
            for each in found.nodes
        ),
        bandwidth=tuple(
            replace(
                each,
                run=replace(each.run, failure=each.run.failure and word(each.run.failure)),
                floor=each.floor and replace(each.floor, source=word(each.floor.source)),
                backend=word(each.backend),
                nodes=tuple(hosts[host] for host in each.nodes),
            )
            for each in found.bandwidth
        ),
    )


def written(path: Path, found: Dossier) -> Path:
    path.write_text(json.dumps(found.to_dict()))
    return path
