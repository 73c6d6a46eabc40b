"""A stand-in for NAME_perf of nccl-tests: its options and its JSON, without a GPU.

How fast it is, and what is wrong with it, stands in the file that $STANDIN names; see machine.py.
https://github.com/NVIDIA/nccl-tests/blob/master/src/util.cu
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

MACHINE = json.loads(Path(os.environ["STANDIN"]).read_text())
KNOWN = ["-b", "-e", "-f", "-g", "-n", "-c", "-J"]


def main(argv: list[str]) -> int:
    name = Path(argv[0]).name.removesuffix("_perf")
    fault = MACHINE["faults"].get(name)
    known = [each for each in KNOWN if (fault, each) != ("before JSON", "-J")]
    options = dict(zip(argv[1::2], argv[2::2], strict=True))
    for option in options:
        if option not in known:
            sys.stdout.write(f"invalid option '{option[1:]}'\nUSAGE: {name}_perf\n")
            return 0
    log = os.environ["NCCL_DEBUG_FILE"].replace("%h", socket.gethostname())
    Path(log.replace("%p", str(os.getpid()))).write_text(f"NCCL INFO stand-in of {name}\n")
    if fault == "hangs":
        time.sleep(600)
    said = begun(argv, int(options["-g"]))
    path = Path(options["-J"])
    if fault == "no results":
        sys.stdout.write(f"{name}_perf: Test NCCL failure common.cu:1 'unhandled cuda error'\n")
        path.write_text(json.dumps(said))
        return 3
    said |= measured(name, options, fault)
    text = json.dumps(said).replace('"a nan"', '"nan"')
    path.write_text(text[: len(text) // 2] if fault == "is cut off" else text)
    return 7 if fault == "is wrong" else 0


def begun(argv: list[str], gpus: int) -> dict[str, Any]:
    """What it has before it measures: the whole environment is in it."""
    return {
        "version": 3,
        "args": argv,
        "env": [f"{name}={value}" for name, value in os.environ.items()],
        "nccl_version": 23007,
        "config": {"nthreads": 1, "ngpus": gpus, "devices": [{"rank": 0, "device": 0}]},
        "errors": [None],
    }


def measured(name: str, options: dict[str, str], fault: str | None) -> dict[str, Any]:
    ranks, wrong = int(options["-g"]), 0
    sizes = [int(options["-b"])]
    while sizes[-1] * int(options["-f"]) <= int(options["-e"]):
        sizes.append(sizes[-1] * int(options["-f"]))
    rows = []
    for size in sizes:
        column = timed(name, size, ranks, MACHINE["nccl_tests"].get(name, 100.0))
        if fault == "is wrong" and size == sizes[-1]:
            column["nwrong"] = wrong = 3
        if fault == "has a nan":
            column["bus_bw"] = "nan"
        rows.append({"size": size, "out_of_place": column, "in_place": column})
    okay = "false" if wrong else "true"
    return {"results": rows, "out_of_bounds": {"count": 2 * wrong, "okay": okay}}


def timed(name: str, size: int, ranks: int, gb_s: float) -> dict[str, Any]:
    """A column of the table: microseconds, GB/s; on one rank busbw of all_reduce is 0."""
    once = (ranks - 1) / ranks
    factor = {"all_reduce": 2 * once, "broadcast": 1.0, "sendrecv": 1.0}.get(name, once)
    us = round(10 + size * (factor or 1.0) / gb_s / 1e3, 6)
    algbw = size / us / 1e3
    return {
        "time": us,
        "alg_bw": round(algbw, 6),
        "bus_bw": round(algbw * factor, 6),
        "nwrong": 0,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv))
