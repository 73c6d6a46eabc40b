"""What a run says of the machine: results that are missing, wrong or too slow, as Findings."""

from collections.abc import Iterator
from typing import Final

from muster import size
from muster.bandwidth.floors import Basis, Floor
from muster.bandwidth.results import Row, Run
from muster.finding import Finding, error, warning

# below it a run measures how soon it begins, not how fast it moves
LARGE_BYTES: Final = 2**27
GAP: Final = 0.1


def judge(run: Run, floor: Floor | None, where: str) -> Iterator[Finding]:
    """Hold one run against what must be right and, where a floor is known, against that.

    With one rank nothing crosses a link: the run counts for correctness alone.
    """
    if run.failure is not None:
        yield _missing(run, run.failure, where)
        return
    if run.wrong:
        yield _wrong(run, where)
    elif not run.is_checked:
        yield _unchecked(run, where)
    if floor is not None and run.nranks > 1:
        yield from _speed(run, floor, where)


def gap(nccl_tests: Run, torch: Run, where: str) -> Iterator[Finding]:
    """That torch moves large buffers as fast as nccl-tests, within 10% of the faster."""
    if min(nccl_tests.nranks, torch.nranks) < 2:
        return
    others = {row.bytes: row for row in torch.rows}
    pairs = [
        (row, others[row.bytes])
        for row in nccl_tests.rows
        if row.bytes >= LARGE_BYTES and row.bytes in others
    ]
    widest = max(pairs, key=lambda pair: _gap(*pair), default=None)
    if widest is not None and _gap(*widest) > GAP:
        yield _apart(nccl_tests, widest, where)


def _gap(one: Row, other: Row) -> float:
    faster = max(one.busbw, other.busbw)
    return abs(one.busbw - other.busbw) / faster if faster else 0.0


def _speed(run: Run, floor: Floor, where: str) -> Iterator[Finding]:
    large = [row for row in run.rows if row.bytes >= floor.bytes]
    if not large:
        yield _too_small(run, floor, where)
        return
    # the link's speed is what the best of them shows; the others were disturbed
    best = max(large, key=lambda row: row.busbw)
    if best.busbw < floor.busbw:
        yield _slow(run, best, floor, where)


# ---- the Findings ------------------------------------------------------------------------------


def _missing(run: Run, why: str, where: str) -> Finding:
    return error(
        where,
        f"{run.collective} by {run.tool} has no results",
        evidence=why,
        cause="it failed, was ended from outside, or did not know one of its options",
        remedy="run it alone with NCCL_DEBUG=INFO, then ./invokew explain on what it writes",
    )


def _wrong(run: Run, where: str) -> Finding:
    sizes = [row.bytes for row in run.rows if row.wrong]
    return error(
        where,
        f"{run.collective} by {run.tool} gives wrong results",
        evidence=f"wrong elements: {run.wrong} over {run.nranks} ranks, in {len(sizes)} of"
        f" {len(run.rows)} sizes; the smallest has {min(sizes)} bytes",
        cause="memory, a GPU or a link damages data, or direct access between GPUs (P2P) does:"
        " an IOMMU that is on, or PCIe's access control (ACS)",
        remedy="turn off P2P to see whether it is right then: NCCL_P2P_DISABLE=1; look for Xid and"
        " ECC errors (./invokew doctor); train nothing on this machine before",
    )


def _unchecked(run: Run, where: str) -> Finding:
    return warning(
        where,
        f"{run.collective} by {run.tool} was not checked for correctness",
        evidence="no row has a number of wrong elements",
        cause="nccl-tests ran with -c 0",
        remedy="run them with -c 1",
    )


def _too_small(run: Run, floor: Floor, where: str) -> Finding:
    largest = max(row.bytes for row in run.rows)
    return warning(
        where,
        f"{run.collective} by {run.tool} was not held against its floor",
        evidence=f"the floor of {floor.busbw:g} GB/s is for {size.binary(floor.bytes)} and more,"
        f" and the largest buffer had {size.binary(largest)} ({floor.source})",
        cause="small buffers do not show how fast a link is",
        remedy="measure larger ones, or give the floor that these must reach: --floor",
    )


def _slow(run: Run, best: Row, floor: Floor, where: str) -> Finding:
    why = {
        Basis.GIVEN: "asked for",
        Basis.THRESHOLD: "where such a machine is refused",
        Basis.MEASURED: "90% of what others measured on such a machine",
    }[floor.basis]
    return Finding(
        severity=floor.severity,
        what=f"{run.collective} by {run.tool} reaches {best.busbw:.1f} GB/s busbw, under the floor"
        f" of {floor.busbw:g}",
        where=where,
        evidence=f"{size.binary(best.bytes)} over {run.nranks} ranks in {best.seconds:.6f} s;"
        f" the floor is {why} ({floor.source})",
        cause="a link that is down or slower than its kind, traffic that takes another way than"
        " meant (no P2P, no GPUDirect), or one slow GPU that all others wait for",
        remedy="./invokew doctor for links, clocks and ACS; in NCCL's log, what the channels go"
        " via; --floor for a machine that is built slower",
    )


def _apart(nccl_tests: Run, widest: tuple[Row, Row], where: str) -> Finding:
    tests, torch = widest
    slower = "torch" if torch.busbw < tests.busbw else "nccl-tests"
    return warning(
        where,
        f"{nccl_tests.collective}: {slower} is {_gap(*widest):.0%} slower than the other",
        evidence=f"with {size.binary(tests.bytes)}: nccl-tests {tests.busbw:.1f} GB/s busbw, torch"
        f" {torch.busbw:.1f}",
        cause="the two loaded different NCCLs or have different switches, or something else ran"
        " on this machine during one of them",
        remedy="./invokew verify for one NCCL in the image; compare the version and the ENV lines"
        " of both logs; run both again",
    )
