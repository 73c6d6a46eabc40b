"""What goes wrong in the first runs, made to happen: each ends with words, and none hangs.

Not steps of smoke: nothing here is about this node. It needs torch, pytest and train/, and no GPU:
    python -m pytest tests/smoke/pitfalls
"""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
# beside tests/ in the repository, beside smoke/ in the image
TRAIN = next(folder / "train" for folder in HERE.parents if (folder / "train").is_dir())
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
# far beyond what any takes, since a script that hangs is what must not be
LIMIT_S = 120
# most of them wait; what costs is that each process imports torch
AT_ONCE = 1 + (os.cpu_count() or 1)


@dataclass(frozen=True, kw_only=True)
class Pitfall:
    """A fault, planted by what is run or by one line of the script, and the words that tell it.

    `run` is what follows torchrun: <port> in it is a port where nobody listens, <held> one that is
    taken, <broken> the script `script` with the line that `line` is part of replaced by `by`.
    """

    name: str
    run: tuple[str, ...]
    says: tuple[str, ...]
    script: str = ""
    line: str = ""
    by: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def ranks(count: int, *words: str) -> tuple[str, ...]:
    """On one node: one where that is enough, since each costs seconds."""
    return ("--standalone", f"--nproc-per-node={count}", *words)


def ranks_with(count: int, *words: str) -> tuple[str, ...]:
    """Whose environment is not as torchrun made it."""
    return ranks(count, "--no-python", "env", *words)


def one_of_two_nodes(*flags: str) -> tuple[str, ...]:
    return ("--nnodes=2", "--nproc-per-node=1", *flags, "all_reduce.py")


def meeting_at(endpoint: str, settings: str) -> tuple[str, ...]:
    told = ("--rdzv-backend=c10d", "--rdzv-id=pitfall", f"--rdzv-endpoint={endpoint}")
    return one_of_two_nodes(*told, f"--rdzv-conf={settings}")


PITFALLS = (
    # ---- the ranks do not meet -----------------------------------------------------------------
    Pitfall(
        name="the port is in use",
        run=("--nproc-per-node=2", "--master-port=<held>", "all_reduce.py"),
        says=("DistNetworkError", "port: <held>,", "address already in use"),
    ),
    Pitfall(
        name="a rank is missing",
        run=ranks(2, "late_rank.py", "all_reduce.py", "--timeout=5"),
        says=("Rank 0 fails: no sign of rank 1 in 5 s",),
    ),
    Pitfall(
        name="a rank is missing from the store of rank 0",
        run=ranks(2, "late_rank.py", "all_reduce.py", "--timeout=5"),
        environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        says=("Rank 0 fails: no sign of rank 1 in 5 s",),
    ),
    Pitfall(
        name="a node is missing",
        run=meeting_at("localhost:0", "join_timeout=3"),
        says=("RendezvousTimeoutError",),
    ),
    Pitfall(
        name="the address of the rendezvous is wrong",
        run=meeting_at("127.0.0.1:<port>", "is_host=0,read_timeout=3"),
        says=(
            "timed out after 3000ms while trying to connect to (127.0.0.1, <port>)",
            "RendezvousConnectionError",
        ),
    ),
    Pitfall(
        name="the address of rank 0 is wrong",
        run=ranks_with(
            1,
            "MASTER_ADDR=127.0.0.9",
            "MASTER_PORT=<port>",
            "<python>",
            "all_reduce.py",
            "--timeout=5",
        ),
        says=("timed out after 5000ms while trying to connect to (127.0.0.9, <port>)",),
    ),
    Pitfall(
        name="the interface is wrong",
        run=ranks(1, "all_reduce.py"),
        environment={"GLOO_SOCKET_IFNAME": "nosuch"},
        says=("Unable to find address for: nosuch",),
    ),
    Pitfall(
        name="versions differ",
        run=ranks(2, "other_torch.py", "all_reduce.py"),
        says=("fails: rank 0 has torch ", " for cpu, but rank 1 has torch 2.0.1 for cpu"),
    ),
    # ---- GPUs ----------------------------------------------------------------------------------
    Pitfall(
        name="no rank has a GPU",
        run=ranks(1, "devices.py"),
        says=("no GPU here", "exitcode  : 3 "),
    ),
    Pitfall(
        name="no rank picks its GPU",
        run=ranks(2, "stand_in_gpus.py", "<broken>"),
        environment={"CUDA_VISIBLE_DEVICES": "1,0"},
        script="devices.py",
        line="torch.cuda.set_device(local_rank)",
        by="pass",
        says=("fails: ranks 0 and 1 share GPU 22222222-bbbb (Stand-in) on ",),
    ),
    Pitfall(
        name="every rank takes itself for the first of its node",
        run=ranks_with(2, "LOCAL_RANK=0", "<python>", "stand_in_gpus.py", "all_reduce.py"),
        environment={"CUDA_VISIBLE_DEVICES": "0,1"},
        says=("fails: not every rank has a GPU of its own: rank 0, rank 1",),
    ),
    Pitfall(
        name="all ranks see one GPU alone",
        run=ranks(2, "stand_in_gpus.py", "devices.py"),
        environment={"CUDA_VISIBLE_DEVICES": "0"},
        says=("local_rank is 1, and torch sees 1 GPUs, CUDA_VISIBLE_DEVICES=0",),
    ),
    Pitfall(
        name="a GPU has not the memory",
        run=ranks(1, "stand_in_gpus.py", "devices.py", "--mib=1025"),
        environment={"CUDA_VISIBLE_DEVICES": "0"},
        says=("fails: the memory of rank 0's GPU: CUDA out of memory. Tried to allocate ",),
    ),
    # ---- the training program ------------------------------------------------------------------
    Pitfall(
        name="no sampler: every rank trains on everything",
        run=ranks(2, "<broken>"),
        script="ddp_demo.py",
        line="in DataLoader(dataset, batch_size=20, sampler=sampler):",
        by="for indices, features, targets in DataLoader(dataset, batch_size=20):",
        says=("disproves: shards are whole, disjoint but for padding: {'padding': 1000, ",),
    ),
    Pitfall(
        name="no set_epoch: every epoch repeats the order of the first",
        run=ranks(1, "<broken>"),
        script="ddp_demo.py",
        line="sampler.set_epoch(epoch)",
        by="pass",
        says=("disproves: set_epoch gives every epoch its own order: {'orders': 1}",),
    ),
    Pitfall(
        name="parameters take no part in the loss",
        run=ranks(1, "<broken>"),
        script="ddp_demo.py",
        line="return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))",
        by=(
            "model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1));"
            " model[1].spare = nn.Linear(2, 2); return model.to(device)"
        ),
        says=("your module has parameters that were not used in producing loss",),
    ),
    Pitfall(
        name="every rank writes the checkpoint",
        run=ranks(2, "<broken>"),
        script="ddp_demo.py",
        line="size = save(ddp.module, path) if dist.get_rank() == 0 else 0",
        by="size = save(ddp.module, path)",
        says=("disproves: rank 0 alone writes: {'bytes_written': [",),
    ),
)


def broken_copy(pitfall: Pitfall, folder: Path) -> Path:
    """The script with its one line replaced, and nothing else."""
    lines = (TRAIN / pitfall.script).read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, line in enumerate(lines) if pitfall.line in line)
    indent = re.match(" *", lines[number])
    assert indent is not None
    lines[number] = indent[0] + pitfall.by
    path = folder / pitfall.script
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def path_of(word: str) -> str:
    found = [folder / word for folder in (TRAIN, HERE) if (folder / word).is_file()]
    return str(found[0]) if found else word


def play(words: Iterable[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Torchrun's exit code, and all that it and its ranks wrote."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TORCH")}
    own |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    with subprocess.Popen(
        [*TORCHRUN, *map(path_of, words)],
        env=own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as torchrun:
        try:
            output, _ = torchrun.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            torchrun.terminate()  # which ends its ranks, as a kill would not
            raise
        return torchrun.returncode, output


@dataclass(frozen=True)
class Played:
    """How torchrun ended, and the words that were to be said."""

    code: int
    output: str
    says: tuple[str, ...]


def plant(pitfall: Pitfall, folder: Path) -> Played:
    with socket.create_server(("", 0)) as held, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # and does not listen: nobody else can take the port
        names = {"<held>": str(held.getsockname()[1]), "<port>": str(silent.getsockname()[1])}
        names["<python>"] = sys.executable
        if pitfall.script:
            names["<broken>"] = str(broken_copy(pitfall, folder))
        run, says = (
            tuple(re.sub("<[a-z]+>", lambda name: names[name[0]], word) for word in words)
            for words in (pitfall.run, pitfall.says)
        )
        return Played(*play(run, pitfall.environment), says)


@pytest.fixture(scope="session")
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Pitfall], Played]]:
    """All pitfalls that are asked for, some at a time."""
    ids = [item.name for item in request.session.items]
    asked = [each for each in PITFALLS if f"test_it_ends_in_words[{each.name}]" in ids]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        started = {
            pitfall.name: pool.submit(plant, pitfall, tmp_path_factory.mktemp("broken"))
            for pitfall in asked
        }
        yield lambda pitfall: started[pitfall.name].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("pitfall", PITFALLS, ids=lambda pitfall: pitfall.name)
def test_it_ends_in_words(pitfall: Pitfall, played: Callable[[Pitfall], Played]) -> None:
    end = played(pitfall)
    print(end.output)  # for whoever asks for it, with -rP
    assert end.code == 1, end.output  # torchrun's own, whatever a rank's was
    for words in end.says:
        assert words in end.output


def test_two_gpus_for_two_ranks_are_no_pitfall() -> None:
    """The stand-in GPUs are good ones: what fails on them above is planted."""
    code, output = play(ranks(2, "stand_in_gpus.py", "devices.py"), {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert code == 0, output
    facts = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert [gpu["uuid"] for gpu in facts["gpus"]] == ["11111111-aaaa", "22222222-bbbb"]
    assert (facts["ok"], facts["p2p"]) == (True, [[0, 1, True]])
