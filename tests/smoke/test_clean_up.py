"""Two runs in a row: does the second find what the first left, and is all of it gone?"""

import sys
import uuid
from pathlib import Path

from conftest import Step, free_port

_MARK = "MUSTER_RUN"


def test_clean_up(step: Step) -> None:
    """The same port twice, at once; then no process, no port, no shared memory is left."""
    port, mark = free_port(), uuid.uuid4().hex
    before = _shared()
    argv = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--node-rank=0"),
        *("--master-addr=127.0.0.1", f"--master-port={port}"),
        *(f"--nproc-per-node={step.nproc_per_node}", "all_reduce.py"),
    ]
    for _ in range(2):
        done = step.nccl(argv, {_MARK: mark})
        if not done.ok:
            step.fail_ranks("all_reduce.py", done)
    left = [f"process {name}" for name in _processes(mark)]
    left += [f"/dev/shm/{name}" for name in sorted(_shared() - before)]
    left += [f"port {port}"] if _is_listened_on(port) else []
    if left:
        step.fail(
            what=f"{len(left)} things are left behind by a run that ended",
            evidence="\n".join(left),
            cause="a rank did not end with its torchrun, or was killed before it could clean up",
            remedy="end the processes and remove the files; then run this step again",
        )
    step.measure(f"2 runs on port {port}, nothing left")


def _shared() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _processes(mark: str) -> list[str]:
    """The processes whose environment has the mark, by their commands."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                found.append(f"{process.name} {' '.join(words)[:80]}")
        except OSError:
            continue
    return found


def _is_listened_on(port: int) -> bool:
    """Whether a socket of this network listens there: state 0A in the kernel's table."""
    tables = [path for path in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")) if path.exists()]
    rows = [line.split() for path in tables for line in path.read_text().splitlines()[1:]]
    return any(int(row[1].rpartition(":")[2], 16) == port and row[3] == "0A" for row in rows)
