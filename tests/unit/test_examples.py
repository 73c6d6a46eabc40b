"""k8s/examples is what render writes today, and nothing else."""

from pathlib import Path

from muster.manifests.examples import examples

ROOT = Path(__file__).resolve().parents[2]


def test_the_examples_are_current() -> None:
    folder = ROOT / "k8s/examples"
    found = {path.name: path.read_text() for path in folder.iterdir()}
    # to write them anew: ./invokew examples
    assert found == examples(ROOT)
