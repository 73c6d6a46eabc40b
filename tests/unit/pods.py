"""Pods of a preflight for the tests of what they write: its own code in a process for each pod.

What a pod has of the image is stood in for: of the suite some steps, without torch; of the launcher
a program that writes what NCCL and train/bandwidth.py write on two nodes with InfiniBand.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.unit.conftest import ROOT

from muster.bandwidth.results import Collective

NCCL = ROOT / "tests/unit/explain_healthy/infiniband_2.27.log"
POD = """
import socket, sys
from pathlib import Path
root, host, *arguments = sys.argv[1:]
socket.gethostname = lambda: host
from muster import preflight
preflight.ROOT = Path(root)
preflight.LAUNCHER = (sys.executable, f"{root}/launcher.py", host)
sys.exit(preflight.main(arguments))
"""
CONFTEST = """
def pytest_addoption(parser):
    for name in ("--steps", "--nproc-per-node", "--train", "--on-purpose"):
        parser.addoption(name)

def pytest_collection_modifyitems(config, items):
    names = config.getoption("--steps").split(",")
    items[:] = [item for item in items if item.name.removeprefix("test_") in names]
"""
STEPS = """
import os, time
import pytest

def test_versions(record_property):
    record_property("version", ["torch", "2.13.0"])
    record_property("hash", ["bom.json", "9c" * 32])
    record_property("measure", "torch 2.13.0")

def test_shm_size(record_property):
    record_property("measure", "64 MiB")

def test_memlock(record_property):
    HERE

def test_rdma_libraries():
    pytest.skip("no InfiniBand here")
"""
PASSES = 'record_property("measure", "64 MiB locked")'
FINDING = {
    "severity": "error",
    "what": "mlock of 64 MiB fails",
    "where": "memlock",
    "evidence": "mlock: Cannot allocate memory",
    "cause": "the limit is low",
    "remedy": "LimitMEMLOCK=infinity",
}
FAILS = f'record_property("finding", {FINDING!r}); assert False'
DIES = "os._exit(9)"
LAUNCHER = """
import json, os, sys
from pathlib import Path
host, index = sys.argv[1], os.environ["JOB_COMPLETION_INDEX"]
path = os.environ["NCCL_DEBUG_FILE"].replace("%h", host).replace("%p", "2000")
said = Path(__file__).with_name("nccl.log").read_text().splitlines(keepends=True)
own = "".join(line for line in said if line.startswith(f"node-{index}:"))
Path(path).write_text(own.replace("node-", "demo-"))
if index == "0":
    print(Path(__file__).with_name("result.json").read_text())
print("what the ranks say")
"""


@dataclass(frozen=True)
class Written:
    """A pod's log and its exit status."""

    text: str
    status: int


def result(busbw: float = 340.0, nranks: int = 16) -> str:
    """What train/bandwidth.py writes at rank 0."""
    algbw = busbw / Collective.ALL_REDUCE.factor(nranks)
    row = {"bytes": 2**30, "seconds": 2**30 / algbw / 1e9, "algbw": algbw, "busbw": busbw}
    rows = [{**row, "wrong": 0}]
    facts = {"script": "bandwidth", "backend": "nccl", "world_size": nranks, "all_reduce": rows}
    return json.dumps(facts)


def pod(
    folder: Path,
    index: int,
    *,
    memlock: str = PASSES,
    nnodes: str = "2",
    measured: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Written:
    """Run the gate of pod `index`; `memlock` is the body of that step, `measured` rank 0's line."""
    (folder / "smoke").mkdir(exist_ok=True)
    (folder / "smoke/conftest.py").write_text(CONFTEST)
    (folder / "smoke/pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
    (folder / "smoke/test_steps.py").write_text(STEPS.replace("HERE", memlock))
    (folder / "launcher.py").write_text(LAUNCHER)
    (folder / "result.json").write_text(result() if measured is None else measured)
    (folder / "nccl.log").write_bytes(NCCL.read_bytes())
    own = {"JOB_COMPLETION_INDEX": str(index), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [
            *(sys.executable, "-c", POD, str(folder), f"demo-{index}", "--floor-gb-s=300"),
            *("--", f"--nnodes={nnodes}", "--nproc-per-node=8", "bandwidth.py"),
        ],
        env={**os.environ, **own, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Written(done.stdout, done.returncode)
