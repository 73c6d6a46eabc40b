"""The pitfalls of the first runs, in the image: each ends there in words that explain names."""

import re

import pytest
from tests.image.harness import ROOT

from muster.engine import ContainerSpec, Engine
from muster.explain.explanation import of_text

pytestmark = pytest.mark.usefixtures("built")

# each by its name in tests/smoke/pitfalls, and the fault of explain's catalogue
FAULTS = {
    "the port is in use": "port-in-use",
    "a rank is missing": "ranks-not-seen",
    "a rank is missing from the store of rank 0": "ranks-not-seen",
    "a node is missing": "rendezvous-timeout",
    "the address of the rendezvous is wrong": "store-unreachable",
    "the address of rank 0 is wrong": "store-unreachable",
    "the interface is wrong": "gloo-no-interface",
    "versions differ": "torch-versions-differ",
    "no rank has a GPU": "no-gpu",
    "no rank picks its GPU": "same-gpu",
    "every rank takes itself for the first of its node": "same-gpu",
    "all ranks see one GPU alone": "invalid-device",
    "a GPU has not the memory": "cuda-oom",
    "no sampler: every rank trains on everything": "no-sampler",
    "no set_epoch: every epoch repeats the order of the first": "no-set-epoch",
    "parameters take no part in the loss": "unused-parameters",
    "every rank writes the checkpoint": "every-rank-writes",
}


def test_all_pitfalls_are_here() -> None:
    # read, not imported: it is a program of the image's, with torch
    planted = (ROOT / "tests/smoke/pitfalls/test_pitfalls.py").read_text()
    assert re.findall(r'^        name="(.*)",$', planted, re.MULTILINE) == list(FAULTS)


def test_every_pitfall_is_caught_and_named(engine: Engine) -> None:
    # -rP: what each wrote
    pytest_there = ("python", "-m", "pytest", "-q", "-rPsx", "/opt/muster/smoke/pitfalls")
    spec = ContainerSpec(image="muster:cpu", command=pytest_there, shm_bytes=2**30)
    with engine.run(spec) as container:
        lines = [*container.lines()]
        ending = container.ending("the pitfalls")
    output = "\n".join([*lines, *container.stderr])
    assert ending == "exit code 0", output
    # and nothing beside: no skip, no warning
    assert re.fullmatch(r"\d+ passed in .*", lines[-1]), output
    heading = re.compile(r"^_+ test_it_ends_in_words\[(.*)\] _+$", re.MULTILINE)
    _, *parts = heading.split(output)
    said = dict(zip(parts[::2], parts[1::2], strict=True))
    named = {name: of_text(text).diagnoses[0].fault.id for name, text in said.items()}
    assert named == FAULTS
