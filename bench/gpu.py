"""What a machine with NVIDIA GPUs does, without Docker: one JSON, and NCCL's own logs beside it.

    python bench/gpu.py LOGS

in an interpreter whose torch has CUDA. LOGS is a new folder. It runs train/all_reduce.py and
train/ddp_demo.py on all GPUs, then all_reduce over growing sizes; every process writes its NCCL log
(INFO) to LOGS. Without a GPU it says so and ends with status 3.

algbw is size over time; busbw is algbw times 2(n-1)/n for n ranks, what the links carry:
https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. On one GPU that is 0.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from muster import launch  # noqa: E402  the path above leads to it
from muster.topology import Topology  # noqa: E402

SUBSYSTEMS = "INIT,BOOTSTRAP,ENV,NET,GRAPH"
SIZES = tuple(2**exponent for exponent in range(10, 31, 2))
WARM_UP, ROUNDS = 5, 20
LIMIT_S = 600


# ---- what every rank runs ----------------------------------------------------------------------


def measure() -> None:
    """all_reduce of each size on every rank; one JSON line from rank 0."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    try:
        rows = [row(device, size_bytes) for size_bytes in SIZES]
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps({"bandwidth": rows}) + "\n")
    finally:
        dist.destroy_process_group()


def row(device: torch.device, size_bytes: int) -> dict[str, float]:
    """Seconds and GB/s (10^9) of one all_reduce of `size_bytes`, float32."""
    values = torch.ones(size_bytes // 4, device=device)
    for _ in range(WARM_UP):
        dist.all_reduce(values)
    finish(device)
    started = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(values)
    finish(device)
    seconds = (time.perf_counter() - started) / ROUNDS
    algbw, ranks = size_bytes / seconds / 1e9, dist.get_world_size()
    return {
        "size_bytes": size_bytes,
        "seconds": seconds,
        "algbw_gb_per_s": algbw,
        "busbw_gb_per_s": algbw * 2 * (ranks - 1) / ranks,
    }


def finish(device: torch.device) -> None:
    """Wait for what was only queued on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---- what starts the ranks ----------------------------------------------------------------------


def run(script: Path, gpus: int, logs: Path) -> dict[str, Any]:
    """The script's JSON line, its exit code, its seconds; NCCL logs into a file a process."""
    settings = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": SUBSYSTEMS,
        "NCCL_DEBUG_FILE": str(logs / f"{script.stem}.%h.%p.log"),
    }
    started = time.monotonic()
    done = subprocess.run(
        launch.torchrun(Topology(1, gpus), str(script)),
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    (logs / f"{script.stem}.out").write_text(done.stdout + done.stderr)
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return {
        "script": script.name,
        "exit_code": done.returncode,
        "seconds": round(time.monotonic() - started, 3),
        "result": json.loads(found[-1]) if found else None,
    }


def versions() -> dict[str, Any]:

    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        # what torch was compiled with; the logs say which one was loaded
        "nccl_header": ".".join(map(str, torch.cuda.nccl.version())),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def main() -> int:
    if "RANK" in os.environ:
        measure()
        return 0
    if len(sys.argv) != 2:
        sys.stderr.write(f"give one new folder for the logs: python {sys.argv[0]} LOGS\n")
        return 2

    if not torch.cuda.is_available():
        sys.stderr.write("no NVIDIA GPU that torch can use here: nothing was measured\n")
        return 3
    logs = Path(sys.argv[1])
    logs.mkdir(parents=True)
    gpus = torch.cuda.device_count()
    scripts = (ROOT / "train/all_reduce.py", ROOT / "train/ddp_demo.py", Path(__file__))
    runs = [run(script.resolve(), gpus, logs) for script in scripts]
    sys.stdout.write(json.dumps({**versions(), "runs": runs}, indent=1) + "\n")
    return 1 if any(each["exit_code"] for each in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
