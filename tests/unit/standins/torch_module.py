"""A stand-in for the little of torch that the smoke suite asks, with the GPUs that $STANDIN has."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

MACHINE = json.loads(Path(os.environ["STANDIN"]).read_text())

__version__ = "0.stand-in"


class cuda:  # noqa: N801  it stands for the module of that name
    @staticmethod
    def is_available() -> bool:
        return bool(MACHINE["torch_sees"])

    @staticmethod
    def device_count() -> int:
        return len(MACHINE["torch_sees"])

    @staticmethod
    def get_device_properties(index: int) -> SimpleNamespace:
        gpu = MACHINE["gpus"][MACHINE["torch_sees"][index]]
        uuid = gpu["uuid"].removeprefix("GPU-")
        return SimpleNamespace(name=gpu["name"], total_memory=gpu["memory"], uuid=uuid)


class version:  # noqa: N801
    cuda: str | None = MACHINE["cuda"]
