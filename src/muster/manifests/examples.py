"""The manifests in k8s/examples: every fabric as a Job, every kind without GPUs."""

from pathlib import Path

from muster import fabric as fabrics
from muster.manifests import render
from muster.manifests import spec as specs
from muster.manifests.spec import Kind


def examples(root: Path) -> dict[str, str]:
    """Name of the file, and what is in it."""
    known = fabrics.names(root / "k8s/fabrics")
    asked = [_flags("tcp", kind, nnodes=2, nproc_per_node=2, cpu=True) for kind in Kind]
    asked += [_flags(fabric, Kind.JOB, nnodes=4, nproc_per_node=8) for fabric in known]
    return {_name(flags): _text(flags, root) for flags in asked}


def _flags(
    fabric: str, kind: Kind, *, nnodes: int, nproc_per_node: int, cpu: bool = False
) -> dict[str, object]:
    return {
        "name": "demo",
        "image": "muster:cpu" if cpu else "muster:cu13",
        "nnodes": str(nnodes),
        "nproc_per_node": str(nproc_per_node),
        "fabric": fabric,
        "kind": kind,
        "cpu": cpu,
    }


def _name(flags: dict[str, object]) -> str:
    size = f"{flags['nnodes']}x{flags['nproc_per_node']}"
    return f"{flags['fabric']}-{size}-{flags['kind']}.yaml"


def _text(flags: dict[str, object], root: Path) -> str:
    spec = specs.build(specs.from_flags(flags), root / "k8s/fabrics")
    return render.render(spec, root)
