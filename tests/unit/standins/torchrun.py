"""A stand-in for torchrun that writes what train/devices.py and train/bandwidth.py would."""

import json
import os
import sys
from pathlib import Path
from typing import Any

MACHINE = json.loads(Path(os.environ["STANDIN"]).read_text())

ROOT_CAUSE = """\
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 77)
"""


def main(argv: list[str]) -> int:
    at = next(at for at, word in enumerate(argv) if at and not word.startswith("-"))
    ranks = int(dict(word.split("=") for word in argv[1:at] if "=" in word)["--nproc-per-node"])
    if MACHINE["rank_dies"]:
        sys.stdout.write(ROOT_CAUSE)
        return 1
    said = devices(ranks) if argv[at] == "devices.py" else bandwidth(ranks, argv[at + 1 :])
    sys.stdout.write(json.dumps(said) + "\n")
    return 0 if said["ok"] else 1


def devices(ranks: int) -> dict[str, Any]:
    sees = MACHINE["torch_sees"]
    held = (MACHINE["ranks_on"] or sees)[:ranks]
    closed = [set(pair) for pair in MACHINE["closed"]]
    wrong = [f"ranks share GPU {index}" for index in sorted(held) if held.count(index) > 1]
    return {
        "script": "devices",
        "ok": not wrong,
        "world_size": ranks,
        "gpus": [
            {
                "rank": rank,
                "local_rank": rank,
                "host": "node",
                "uuid": MACHINE["gpus"][index]["uuid"],
            }
            for rank, index in enumerate(held)
        ],
        "p2p": [
            [one, other, {sees[one], sees[other]} not in closed]
            for one in range(len(sees))
            for other in range(one + 1, len(sees))
        ],
        "wrong": wrong,
    }


def bandwidth(ranks: int, arguments: list[str]) -> dict[str, Any]:
    largest = int(arguments[arguments.index("--max-bytes") + 1])
    names = arguments[arguments.index("--collective") + 1 :]
    wrong = {name: int(name == MACHINE["torch_wrong"]) for name in names}
    return {
        "script": "bandwidth",
        "ok": not any(wrong.values()),
        "backend": "nccl" if MACHINE["torch_sees"] else "gloo",
        "world_size": ranks,
        **{
            name: rows(name, ranks, largest, wrong[name])
            for name in names
            if ranks > 1 or name != "sendrecv"
        },
    }


def rows(name: str, ranks: int, largest: int, wrong: int) -> list[dict[str, float]]:
    once = (ranks - 1) / ranks
    factor = {"all_reduce": 2 * once, "broadcast": 1.0, "sendrecv": 1.0}.get(name, once)
    sizes = [8]
    while sizes[-1] * 2 <= largest:
        sizes.append(sizes[-1] * 2)
    found = []
    for size in sizes:
        seconds = 1e-5 + size * (factor or 1.0) / MACHINE["torch"].get(name, 100.0) / 1e9
        algbw = size / seconds / 1e9
        row = {"bytes": size, "seconds": seconds, "algbw": algbw, "busbw": algbw * factor}
        found.append(row | {"wrong": wrong})
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv))
