"""The doctor inside the image: it has what it needs there, and judges the container it is in."""

import json
from collections.abc import Callable

import pytest

from muster.engine import ContainerSpec, Engine

pytestmark = pytest.mark.usefixtures("built")

HIDDEN = "hf_0123456789abcdef"
Doctor = Callable[..., tuple[int | None, list[str]]]


@pytest.fixture
def doctor(engine: Engine) -> Doctor:
    """Runs it in a container of the image, as the image's user: its exit status and its lines."""

    def run(*words: str, **environment: str) -> tuple[int | None, list[str]]:
        spec = ContainerSpec(
            image="muster:cpu",
            command=("python", "-m", "muster.doctor", *words),
            shm_bytes=2**30,
            environment=environment,
        )
        with engine.run(spec) as container:
            lines = [*container.lines()]
            container.ending("the doctor")
            return container.exit_code(), [*lines, *container.stderr]

    return run


def test_a_good_container_is_ready(doctor: Doctor) -> None:
    status, lines = doctor()
    assert (status, lines[-1]) == (0, "READY"), lines
    assert any(line.startswith("shm: passed. 1 GiB free") for line in lines), lines


def test_what_stops_training_there_is_found(doctor: Doctor) -> None:
    status, lines = doctor("--json", NCCL_SOCKET_IFNAME="ib0", HF_TOKEN=HIDDEN)
    document = json.loads("\n".join(lines))
    assert (status, document["verdict"]) == (1, "NOT READY")
    assert "NCCL_SOCKET_IFNAME" in [each["where"] for each in document["findings"]]
    assert HIDDEN not in str(document)
