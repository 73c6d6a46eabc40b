r"""Does a job that loses a rank go on from its checkpoint, and end where it would have ended?

torchrun starts all ranks again when one fails, on the nodes that are left; the program has to find
its own way back. What it takes: a checkpoint that is whole or not there, a place in the data that
follows from the step alone, and a batch that is the same for any number of ranks.

The uninterrupted run, then one whose rank 1 dies at step 12; both print the same digest. Ranks that
begin anew meet in a store of their own: in torchrun's they may find addresses of those that died.
    export OMP_NUM_THREADS=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node=2 train/elastic_demo.py
    torchrun --standalone --nproc-per-node=2 --max-restarts=1 train/elastic_demo.py --die 1@12
Two to four nodes that may come and go; the same on each, HOST is the name of one that stays, and
/shared is a folder that all of them see:
    torchrun --nnodes=2:4 --nproc-per-node=8 --max-restarts=9 --rdzv-id=elastic_demo \
        --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 train/elastic_demo.py --checkpoint /shared
"""

import argparse
import faulthandler
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

TIMEOUT = timedelta(seconds=60)
FEATURES, BATCH, EVERY = 8, 96, 5


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    where = "a folder that all nodes see (default: a temporary one, for a single node)"
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help=where)
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="default: %(default)s")
    pause = "in each step, so that there is time to take a node away"
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help=pause)
    parser.add_argument("--die", metavar="RANK@STEP", help="kill this rank there, the first time")
    arguments = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error(f"run torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1, not {arguments.steps}")
    return arguments


def bind_device() -> torch.device:
    """The GPU that local_rank names, or the CPU; before the group exists, or all open GPU 0."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def meet(device: torch.device, timeout: timedelta) -> tuple[dist.Store, int, int]:
    """The store where every rank has told of itself, this rank, and how many there are.

    Exits with the names of the ranks that are missing, have another torch or share a GPU: the start
    of the group would only hang, or run out of memory.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        # torchrun has a store for its ranks, or leaves it to rank 0
        is_master=rank == 0 and os.environ["TORCHELASTIC_USE_AGENT_STORE"] != "True",
        wait_for_workers=False,
        timeout=timeout,
    )
    names, gpu = [f"rank {each}" for each in range(world_size)], f"none for {rank}"
    if device.type == "cuda":
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    store.set(names[rank], f"torch {torch.__version__} for {device.type}|{gpu}")
    try:
        store.wait(names, timeout)
    except dist.DistStoreError:
        missing = ", ".join(name for name in names if not store.check([name]))
        sys.exit(f"Rank {rank} fails: no sign of {missing} in {timeout.total_seconds():g} s")
    kinds, gpus = zip(*(each.decode().split("|") for each in store.multi_get(names)), strict=True)
    other = {name: kind for name, kind in zip(names, kinds, strict=True) if kind != kinds[0]}
    if other:
        told = f"{', '.join(other)} has {', '.join(set(other.values()))}"
        sys.exit(f"Rank {rank} fails: rank 0 has {kinds[0]}, but {told}")
    sharing = [name for name, its in zip(names, gpus, strict=True) if gpus.count(its) > 1]
    if sharing:
        sys.exit(f"Rank {rank} fails: not every rank has a GPU of its own: {', '.join(sharing)}")
    return store, rank, world_size


# -- the way back ----------------------------------------------------------------------------------


def save(path: Path, state: dict[str, object]) -> None:
    """A whole checkpoint or the one before: a rank may be killed in the middle of writing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())  # the name must not come before the contents
    unfinished.replace(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The step to go on with, which rank 0 says for all: a folder may be late on some node."""
    found = torch.load(path, weights_only=True) if path.exists() else None
    step = torch.tensor([found["step"] if found else 0])
    dist.broadcast(step, src=0)
    if int(step) and (found is None or found["step"] != int(step)):
        raise RuntimeError(f"rank 0 goes on with step {int(step)}; {path} here has another or none")
    if found and int(step):
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
    return int(step)


# -- the loop --------------------------------------------------------------------------------------


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """This rank's share of the step's batch: it follows from the step, whoever was there before."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, FEATURES, generator=generator, dtype=torch.float64)
    own = inputs[dist.get_rank() :: dist.get_world_size()]
    return own, own.sum(dim=1, keepdim=True)


def train(arguments: argparse.Namespace, path: Path, device: torch.device) -> dict[str, object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1)).double().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    first = load(path, model, optimizer)
    ddp = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    for step in range(first, arguments.steps):
        die_if_told(arguments.die, step)
        inputs, targets = batch_of(step)
        errors = (ddp(inputs.to(device)) - targets.to(device)) ** 2
        # DDP takes the mean over ranks, whose shares may differ by one: so no mean here
        loss = errors.sum() * dist.get_world_size() / BATCH
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(arguments.pause)
        if (step + 1) % EVERY == 0 and dist.get_rank() == 0:
            state = {"step": step + 1, "model": model.state_dict()}
            save(path, {**state, "optimizer": optimizer.state_dict()})
    weights = nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
    return {"resumed_from": first, "digest": digest(weights), "norm": float(weights.norm())}


def digest(weights: Tensor) -> str:
    # other ranks add in another order, which changes the last of 16 digits
    return hashlib.sha256(weights.round(decimals=9).numpy().tobytes()).hexdigest()[:16]


def die_if_told(told: str | None, step: int) -> None:
    """As a node does that loses its power: without a word, and not again after the restart."""
    lives = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if told == f"{dist.get_rank()}@{step}" and lives == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def checkpoint_of(arguments: argparse.Namespace) -> Path:
    # one name for all lives of the job: torchrun's id of this run
    run = os.environ["TORCHELASTIC_RUN_ID"]
    folder = arguments.checkpoint or Path(tempfile.gettempdir()) / f"elastic_demo-{run}"
    return folder / "elastic_demo.pt"


def main() -> None:
    arguments = parse_arguments()
    device = bind_device()
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    # the group's timeout does not cover NCCL's own start, which can hang: a deadline until then
    faulthandler.dump_traceback_later(2 * TIMEOUT.seconds, exit=True)
    store, rank, world_size = meet(device, TIMEOUT)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
            device_id=device_id,
        )
        faulthandler.cancel_dump_traceback_later()
        facts = train(arguments, checkpoint_of(arguments), device)
        # no rank leaves while another is not done: it would be taken for one that was lost
        dist.barrier()
        if dist.get_rank() == 0:
            if arguments.checkpoint is None:
                checkpoint_of(arguments).unlink(missing_ok=True)
                checkpoint_of(arguments).parent.rmdir()
            restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            facts.update(script="elastic_demo", ok=True, restarts=restarts, backend=backend)
            facts.update(world_size=dist.get_world_size(), torch=torch.__version__)
            sys.stdout.write(json.dumps(facts) + "\n")
            sys.stdout.flush()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
