"""The real Engine and image of tests/image, and manifests to rehearse."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.image.conftest import built, client, cpu, engine, nothing_left, pinned
from tests.image.harness import ROOT

from muster.manifests import render
from muster.manifests import spec as specs

__all__ = ["built", "client", "cpu", "engine", "nothing_left", "pinned"]

Write = Callable[..., Path]
STEADY = Path(__file__).with_name("steady.py")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Renders a manifest for one rank a node, without GPUs, that carries steady.py."""

    def rendered(**flags: object) -> Path:
        least: dict[str, object] = {
            "name": "demo",
            "image": "muster:cpu",
            "nnodes": "2",
            "nproc_per_node": "1",
            "cpu": True,
            "memory": "1g",
            "checkpoint_s": "0",
            "script": str(STEADY),
            "code": "configmap",
        }
        spec = specs.build(specs.from_flags({**least, **flags}), ROOT / "k8s/fabrics")
        path = tmp_path / "job.yaml"
        path.write_text(render.render(spec, ROOT))
        return path

    return rendered
