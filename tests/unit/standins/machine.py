"""A machine with GPUs that is none: the suite's own steps run on it, under a real pytest.

What stands in is in the files beside this one: for torch's few calls, for NVML, for torchrun with
the scripts it starts, for nccl-tests. The steps, how they judge and what they report are real.
"""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.unit.conftest import ROOT, Recorder

from muster import process, steps
from muster.bandwidth.results import Collective
from muster.steps import Log, Step

HERE = Path(__file__).parent
H100 = "NVIDIA H100 80GB HBM3"
SECRET = "hf_Zx81kQpLmN0r"  # noqa: S105  what nccl-tests' JSON must not bring into a report


@dataclass(frozen=True)
class Gpu:
    name: str
    uuid: str
    memory: int


def gpus(count: int, name: str = H100, memory: int = 80 * 2**30) -> tuple[Gpu, ...]:
    return tuple(Gpu(name, f"GPU-{index:08x}", memory) for index in range(count))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`path` lies between any two GPUs, NVLink between those of `bridged` too.

    `closed` are the pairs whose memory CUDA cannot open to each other.

    `torch_sees` and `ranks_on` are GPUs by NVML's index, `nccl_tests` and `torch` GB/s by
    collective, `faults` what is wrong with nccl-tests' programs.
    """

    gpus: tuple[Gpu, ...] = ()
    torch_sees: tuple[int, ...] | None = None
    ranks_on: tuple[int, ...] = ()
    cuda: str | None = "13.0"
    path: str = "NVLINK"
    bridged: tuple[tuple[int, int], ...] = ()
    p2p_status: int = 0
    closed: tuple[tuple[int, int], ...] = ()
    nccl_tests: Mapping[str, float] = field(default_factory=dict)
    torch: Mapping[str, float] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    torch_wrong: str | None = None
    rank_dies: bool = False
    programs: Sequence[str] = tuple(Collective)
    has_control: bool = True
    is_image: bool = False

    def run(self, folder: Path, names: str, nproc_per_node: int, *options: str) -> Log:
        """The steps `names`, with commas, on this machine."""
        log = Log(Recorder())
        argv = [
            *(sys.executable, "-m", "pytest", "-c", str(ROOT / "tests/smoke/pytest.ini")),
            *(
                str(ROOT / "tests/smoke" / name)
                for name in ("test_devices.py", "test_bandwidth.py")
            ),
            *("-p", "no:terminal", "-p", "places", "--report-log", steps.REPORT),
            *("--nproc-per-node", str(nproc_per_node), "--train", str(folder)),
            *("--steps", names, *options),
        ]
        environment = {**os.environ, **self._stand_in(folder), "HF_TOKEN": SECRET}
        done = process.run(
            steps.reporting(argv), limit_s=300, env=environment, on_line=log.read_line
        )
        assert log.is_whole, done.output
        assert SECRET not in done.output
        return log

    def step(self, folder: Path, name: str, nproc_per_node: int, *options: str) -> Step:
        (step,) = self.run(folder, name, nproc_per_node, *options).steps
        return step

    def _stand_in(self, folder: Path) -> dict[str, str]:
        """Write the stand-ins; the environment that leads to them."""
        modules, programs = folder / "modules", folder / "bin"
        shutil.rmtree(modules, ignore_errors=True)
        shutil.rmtree(programs, ignore_errors=True)
        (modules / "torch/distributed").mkdir(parents=True)
        programs.mkdir()
        shutil.copy(HERE / "torch_module.py", modules / "torch/__init__.py")
        shutil.copy(HERE / "torchrun.py", modules / "torch/distributed/run.py")
        (modules / "torch/distributed/__init__.py").touch()
        shutil.copy(HERE / "pynvml_module.py", modules / "pynvml.py")
        shutil.copy(HERE / "places.py", modules)
        for name in self.programs:
            path = programs / f"{name}_perf"
            path.write_text(f"#!{sys.executable}\n{(HERE / 'nccl_perf.py').read_text()}")
            path.chmod(0o755)
        (folder / "control").touch()
        facts = asdict(self)
        if self.torch_sees is None:
            facts["torch_sees"] = list(range(len(self.gpus)))
        facts["control"] = str(folder / ("control" if self.has_control else "nothing"))
        facts["bom"] = str(folder / ("control" if self.is_image else "nothing"))
        (folder / "machine.json").write_text(json.dumps(facts))
        return {
            "STANDIN": str(folder / "machine.json"),
            "PYTHONPATH": os.pathsep.join([str(modules), str(ROOT / "src")]),
            "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
        }
