"""The pitfalls of the first runs, in the image: each is caught there too, with its words."""

import re

import pytest
from tests.image.harness import ROOT

from muster.engine import ContainerSpec, Engine

pytestmark = pytest.mark.usefixtures("built")


def test_every_pitfall_is_caught_in_the_image(engine: Engine) -> None:
    pytest_there = ("python", "-m", "pytest", "-q", "-rpsx", "/opt/muster/smoke/pitfalls")
    spec = ContainerSpec(image="muster:cpu", command=pytest_there, shm_bytes=2**30)
    with engine.run(spec) as container:
        lines = [*container.lines()]
        ending = container.ending("the pitfalls")
    output = "\n".join([ending, *lines, *container.stderr])
    assert ending == "exit code 0", output
    # read, not imported: it is a program of the image's, with torch
    planted = (ROOT / "tests/smoke/pitfalls/test_pitfalls.py").read_text()
    names = re.findall(r'^        name="(.*)",$', planted, re.MULTILINE)
    told = [re.match(r"PASSED .*\[(.*)\]$", line) for line in lines]
    assert {match[1] for match in told if match} == set(names), output
    # and nothing beside: no skip, no warning
    assert re.fullmatch(r"\d+ passed in .*", lines[-1]), output
