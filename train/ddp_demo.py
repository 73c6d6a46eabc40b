r"""What does DistributedDataParallel do, in five parts, and does each hold here?

One node, CPU:
    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node=2 train/ddp_demo.py
Two nodes with 8 GPUs each; the same on both, HOST is the name of one of them:
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-id=ddp_demo --rdzv-backend=c10d \
        --rdzv-endpoint=HOST:29400 train/ddp_demo.py
"""

import argparse
import faulthandler
import json
import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TIMEOUT = timedelta(seconds=60)
SAMPLES, FEATURES, EPOCHS = 1000, 8, 4
facts: dict[str, object] = {"script": "ddp_demo", "ok": False, "samples": SAMPLES}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Teach DDP in five parts, and prove each.")
    where = "where rank 0 writes the model (default: a temporary folder, removed at the end)"
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help=where)
    arguments = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error(f"run torchrun --standalone --nproc-per-node=2 {sys.argv[0]}")
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


def prove(claim: str, *, holds: bool, **numbers: object) -> None:
    facts.update(numbers)
    if not holds:
        sys.stderr.write(f"Rank {dist.get_rank()} disproves: {claim}: {numbers}\n")
        sys.exit(1)


def gather(own: Tensor) -> Tensor:
    """One row a rank: every rank judges the same numbers, so a proof fails on all or on none."""
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, own)
    return torch.stack(rows)


def weights_apart(model: nn.Module) -> float:
    rows = gather(nn.utils.parameters_to_vector(model.parameters()).detach())
    return float((rows - rows[0]).abs().max())


def plain_model(device: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)


def train(ddp: nn.Module, device: torch.device) -> tuple[Tensor, Tensor]:
    """What every rank saw, as rank x epoch x index, and its losses, as rank x epoch x batch."""
    inputs = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(torch.arange(SAMPLES), inputs, inputs.sum(dim=1, keepdim=True))
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(dataset)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    seen, losses = [], []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # without it, every epoch repeats the order of the first
        for indices, features, targets in DataLoader(dataset, batch_size=20, sampler=sampler):
            loss = nn.functional.mse_loss(ddp(features.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
            optimizer.step()
            seen.append(indices.to(device))
            losses.append(loss.detach())
    return gather(torch.cat(seen).view(EPOCHS, -1)), gather(torch.stack(losses).view(EPOCHS, -1))


def prove_loop(seen: Tensor, losses: Tensor) -> None:
    # A rank with a batch less would leave the others waiting in backward(): where the shards do
    # not divide, DistributedSampler repeats a few samples, fewer than there are ranks.
    epochs = seen.transpose(0, 1).flatten(1).tolist()
    padding, unique = len(epochs[0]) - SAMPLES, [len(set(indices)) for indices in epochs]
    whole = unique == [SAMPLES] * EPOCHS and padding < len(seen)
    prove("shards are whole, disjoint but for padding", holds=whole, padding=padding, unique=unique)
    orders = len({tuple(indices) for indices in epochs})
    prove("set_epoch gives every epoch its own order", holds=orders == EPOCHS, orders=orders)
    first, *_, last = losses.mean(dim=(0, 2)).tolist()
    prove("the loss falls", holds=last < first, loss_first=first, loss_last=last)


def save(model: nn.Module, path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        torch.save(model.state_dict(), unfinished)
        unfinished.replace(path)  # whoever opens path finds a whole checkpoint, old or new
    finally:
        unfinished.unlink(missing_ok=True)
    return path.stat().st_size


@torch.no_grad()
def prove_checkpoint(ddp: DistributedDataParallel, path: Path, device: torch.device) -> None:
    size = save(ddp.module, path) if dist.get_rank() == 0 else 0  # .module: the model unwrapped
    sizes = gather(torch.tensor(size, device=device)).tolist()
    prove("rank 0 alone writes", holds=sizes[0] > 0 == sum(sizes[1:]), bytes_written=sizes)
    if dist.get_rank() == 0:  # what follows needs no group: one process and a plain model
        state = torch.load(path, weights_only=True)
        prefixed = [name for name in state if name.startswith("module.")]
        prove("no name in it starts with module.", holds=not prefixed, prefixed=prefixed)
        plain, probe = plain_model(device), torch.ones(1, FEATURES, device=device)
        plain.load_state_dict(state)
        off = (plain(probe) - ddp(probe)).abs().max().item()
        prove("a plain model gives the same output", holds=off == 0, output_apart=off)


def main() -> None:
    checkpoint = parse_arguments().checkpoint
    # -- 1 set_device: local_rank picks the GPU; before init, or every rank also opens GPU 0 -------
    device = bind_device()
    # -- 2 init: the ranks meet and form one group, with nccl on GPUs, with gloo on CPUs -----------
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    # the group's timeout does not cover NCCL's own start, which can hang: a deadline until then
    faulthandler.dump_traceback_later(2 * TIMEOUT.seconds, exit=True)
    store, rank, world_size = meet(device, TIMEOUT)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT, device_id=device_id
    )
    faulthandler.cancel_dump_traceback_later()
    facts.update(backend=backend, world_size=world_size, torch=torch.__version__)
    try:
        # -- 3 wrap: DDP sends the weights of rank 0 to all, and hooks itself into backward() ------
        torch.manual_seed(dist.get_rank())  # each rank starts elsewhere: only DDP makes them equal
        model = plain_model(device)
        apart = weights_apart(model)
        prove("ranks start apart", holds=apart > 0 or dist.get_world_size() == 1, start_apart=apart)
        ddp = DistributedDataParallel(model, device_ids=[device] if device_id else None)
        apart = weights_apart(ddp)
        prove("DDP gives all ranks the same weights", holds=apart == 0, wrapped_apart=apart)
        # -- 4 loop: a shard a rank; backward() averages the gradients, so the weights stay equal --
        prove_loop(*train(ddp, device))
        apart = weights_apart(ddp)
        prove("all ranks end with equal weights", holds=apart == 0, trained_apart=apart)
        with tempfile.TemporaryDirectory() as folder:
            prove_checkpoint(ddp, checkpoint or Path(folder, "model.pt"), device)
        # DDP keeps gloo's threads beyond destroy: one that still lets go of the last collective's
        # tensors while Python ends would abort the rank. They are idle once all ranks met again.
        dist.barrier()
        facts.update(ok=True)
    finally:
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps(facts) + "\n")
        # -- 5 destroy: also after a failure, so that the others learn of it at once ---------------
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
