"""A real Engine, the real image, and the check that a test leaves nothing on the Engine."""

from collections.abc import Iterator

import docker
import pytest
from tests.image.harness import ROOT, Recorder, left_on, stages_left_on, yes

from muster import context, image, pins
from muster import engine as engines
from muster.engine import Engine
from muster.pins import Pins, Variant


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The Engine of this machine. Missing, it is installed and started: never a skip."""
    return engines.ensure(yes, Recorder())


@pytest.fixture(scope="session")
def client(engine: Engine) -> docker.DockerClient:
    if engine.address.url is not None:
        return docker.DockerClient(base_url=engine.address.url)
    return docker.from_env()


@pytest.fixture(scope="session")
def pinned() -> Pins:
    return pins.read(ROOT / "docker")


@pytest.fixture(scope="session")
def cpu(pinned: Pins) -> Variant:
    return pinned.variant("cpu")


@pytest.fixture(scope="session")
def built(engine: Engine, pinned: Pins, cpu: Variant) -> image.Result:
    """The image muster:cpu, built by Muster from this checkout."""
    request = image.Request(cpu, pins.read_lock(pinned, cpu))
    return image.build(engine, context.Checkout(ROOT), pinned, request, yes, Recorder())


@pytest.fixture(autouse=True)
def nothing_left(client: docker.DockerClient) -> Iterator[None]:
    """After each test, nothing of Muster's is on the Engine."""
    yield
    assert left_on(client) + stages_left_on(client) == []
