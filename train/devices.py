r"""Does every rank have a GPU of its own, whose memory it can use?

One process, one GPU: local_rank picks it. A launcher or a CUDA_VISIBLE_DEVICES that gets this wrong
puts several ranks on one GPU, which shows much later, as memory that runs out or a start of NCCL
that hangs. So each rank says the UUID of its GPU, which is the same by whatever number it goes, and
that over a group of the hosts' CPUs, which works also where the GPUs do not. Only then memory is
allocated, written and read back. At last: which GPUs of rank 0's node reach each other's memory?

All GPUs of one node:
    torchrun --standalone --nproc-per-node=gpu train/devices.py
Two nodes with 8 GPUs each; the same on both, HOST is the name of one of them:
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=devices --rdzv-backend=c10d \
        --rdzv-endpoint=HOST:29400 train/devices.py
Where no rank has a GPU, each says so and ends with 3; with 1 when something is wrong.
"""

import argparse
import faulthandler
import itertools
import json
import os
import socket
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

MIB = 2**20
NO_GPU = 3


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    patience = "how long a rank waits for the others; the run gets twice that (default: 60)"
    parser.add_argument("--timeout", type=int, default=60, metavar="SECONDS", help=patience)
    share = "device memory that each rank writes and reads back (default: %(default)s)"
    parser.add_argument("--mib", type=int, default=256, metavar="MIB", help=share)
    arguments = parser.parse_args()
    if min(arguments.timeout, arguments.mib) < 1:
        parser.error("--timeout and --mib must be at least 1")
    if not dist.is_torchelastic_launched():
        parser.error(f"run torchrun --standalone --nproc-per-node=gpu {sys.argv[0]}")
    return arguments


def bind() -> dict[str, Any]:
    """What this rank knows of itself and of its GPU; `lacks` says why it has none."""
    local_rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    facts = {"rank": int(os.environ["RANK"]), "host": socket.gethostname(), "gpus": gpus}
    facts |= {"local_rank": local_rank, "visible_devices": visible, "torch": torch.__version__}
    if local_rank >= gpus:
        what = f"local_rank is {local_rank}, and torch sees {gpus} GPUs"
        return {**facts, "lacks": f"{what}, CUDA_VISIBLE_DEVICES={visible}"}
    try:
        torch.cuda.set_device(local_rank)
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    except RuntimeError as error:  # said by CUDA, in many lines; the others must hear of it
        return {**facts, "lacks": str(error).partition("\n")[0]}
    return {**facts, "uuid": str(gpu.uuid), "name": gpu.name, "memory_bytes": gpu.total_memory}


def meet(timeout: timedelta) -> None:
    """The group of all ranks; exits with the names of those that do not come."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        # torchrun has a store for its ranks, or leaves it to rank 0
        is_master=rank == 0 and os.environ["TORCHELASTIC_USE_AGENT_STORE"] != "True",
        wait_for_workers=False,
        timeout=timeout,
    )
    names = [f"rank {each}" for each in range(world_size)]
    store.set(names[rank], "here")
    try:
        store.wait(names, timeout)
    except dist.DistStoreError:
        missing = ", ".join(name for name in names if not store.check([name]))
        sys.exit(f"Rank {rank} waited {timeout.seconds} s in vain for {missing}")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def gather(own: object) -> list[Any]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def what_is_wrong(ranks: list[dict[str, Any]]) -> list[str]:
    """Every fault of the binding, in words that are the same on every rank."""
    wrong = [f"rank {r['rank']} on {r['host']}: {r['lacks']}" for r in ranks if "lacks" in r]
    users: dict[str, list[dict[str, Any]]] = {}
    for each in ranks:
        users.setdefault(each.get("uuid", f"none {each['rank']}"), []).append(each)
    for uuid, sharing in users.items():
        if len(sharing) > 1:
            numbers = " and ".join(str(each["rank"]) for each in sharing)
            places = sorted(
                {f"{r['host']}, CUDA_VISIBLE_DEVICES={r['visible_devices']}" for r in sharing}
            )
            name = sharing[0]["name"]
            wrong.append(f"ranks {numbers} share GPU {uuid} ({name}) on {' and on '.join(places)}")
    if len({each["torch"] for each in ranks}) > 1:
        told = ", ".join(f"{each['torch']} on rank {each['rank']}" for each in ranks)
        wrong.append(f"torch is not the same everywhere: {told}")
    return wrong


def use_memory(size: int) -> str | None:
    """What goes wrong when `size` bytes of the GPU are allocated, written and read; or None."""
    device = torch.device("cuda", torch.cuda.current_device())
    differ = 0
    try:
        memory = torch.empty(size // 8, dtype=torch.int64, device=device)
        torch.arange(len(memory), out=memory)
        for first in range(0, len(memory), MIB):  # in parts, for the host's memory
            part = memory[first : first + MIB].cpu()
            differ += int((part != torch.arange(first, first + len(part))).sum())
    except RuntimeError as error:  # that memory runs out is one of them
        return str(error).partition("\n")[0]
    return f"{differ} of {len(memory)} numbers came back changed" if differ else None


def peers() -> list[tuple[int, int, bool]]:
    """Each two GPUs of this node, and whether each can use the memory of the other."""
    reach = torch.cuda.can_device_access_peer
    pairs = itertools.combinations(range(torch.cuda.device_count()), 2)
    return [(one, other, reach(one, other) and reach(other, one)) for one, other in pairs]


def check(arguments: argparse.Namespace) -> int:
    own = bind()
    meet(timedelta(seconds=arguments.timeout))
    ranks = gather(own)
    if not any(each["gpus"] for each in ranks):
        sys.stderr.write(f"Rank {own['rank']} on {own['host']}: no GPU here\n")
        return NO_GPU
    wrong = what_is_wrong(ranks)
    if not wrong:  # else memory may run out, and hide why
        ends = enumerate(gather(use_memory(arguments.mib * MIB)))
        wrong = [f"the memory of rank {rank}'s GPU: {end}" for rank, end in ends if end]
    if own["rank"] == 0:
        told = ("rank", "host", "local_rank", "uuid", "name", "memory_bytes", "visible_devices")
        facts = {
            "script": "devices",
            "ok": not wrong,
            "world_size": len(ranks),
            "gpus": [{name: each.get(name) for name in told} for each in ranks],
            "p2p": peers(),
            "wrong": wrong,
            "torch": torch.__version__,
        }
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()
    dist.barrier()  # torchrun ends all ranks when one fails: not before rank 0 has written
    if wrong:
        sys.stderr.write(f"Rank {own['rank']} fails: {'; '.join(wrong)}\n")
    return 1 if wrong else 0


def main() -> int:
    arguments = parse_arguments()
    # a driver that hangs holds a rank without end: a deadline for the whole
    faulthandler.dump_traceback_later(2 * arguments.timeout, exit=True)
    try:
        return check(arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
