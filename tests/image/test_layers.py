"""Images that a real Engine built twice and saved, compared layer by layer."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest

from muster import buildkit, image, layers, process
from muster.engine import Engine
from muster.errors import EngineRefused
from muster.layers import Chunks, Comparison, What

# what most of the tests build: a file, its link, a script that is copied
STEP = "mkdir /srv/data && echo 1 >/srv/data/one && ln -s one /srv/data/two"

Build = Callable[..., str]
Compare = Callable[..., Comparison]


@pytest.fixture(scope="module")
def make(
    tmp_path_factory: pytest.TempPathFactory,
    engine: Engine,
    client: docker.DockerClient,
    built: image.Result,
) -> Iterator[Build]:
    """Builds a small image on the base of muster:cpu, every step anew; returns its name."""
    bom = client.containers.run(built.image.ref, ["cat", "/opt/muster/bom.json"], remove=True)
    base = json.loads(bom)["base"]["ref"]
    builder = buildkit.find_client(engine.address.client_flags, engine.address.builder)
    refs: list[str] = []

    def build(step: str = STEP, script: str = "exit 0", config: str = "USER 0") -> str:
        folder = tmp_path_factory.mktemp("context")
        (folder / "script.sh").write_text(script)
        steps = [f"FROM {base}", f"RUN {step}", "COPY script.sh /srv/", config]
        (folder / "Dockerfile").write_text("\n".join(steps))
        ref = f"muster-test-layers:{len(refs)}"
        argv = [*builder.build_argv, "--no-cache", "--tag", ref, str(folder)]
        done = process.run(argv, env={**os.environ, "DOCKER_BUILDKIT": "1"})
        assert done.ok, done.output
        refs.append(ref)
        return ref

    yield build
    for ref in refs:
        client.images.remove(ref)


@pytest.fixture(scope="module")
def saved(make: Build, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image that the others are compared with, as the docker client saves it."""
    path = tmp_path_factory.mktemp("saved") / "image.tar"
    argv = ["docker", *engine.address.client_flags, "save", "--output", str(path), make()]
    subprocess.run(argv, check=True)
    return path


@pytest.fixture
def compare(saved: Path, engine: Engine) -> Compare:
    """Compares the saved image with another, as the Engine sends that one."""

    def with_saved(ref: str, *, ignore_times: bool = True) -> Comparison:
        return layers.compare(saved, Chunks(engine.save(ref)), ignore_times=ignore_times)

    return with_saved


def test_two_builds_of_the_same_are_equal_but_for_their_times(
    make: Build, compare: Compare
) -> None:
    # a second apart at least, as the clock of tar counts
    ref = make(f"sleep 1 && {STEP}")
    found = compare(ref)
    assert found.equal
    assert found.layers > found.same >= 1  # the base
    assert found.times > 0
    exact = compare(ref, ignore_times=False)
    assert not exact.equal
    assert exact.first is not None
    assert exact.first.what is What.TIME


def test_an_image_equals_itself_without_a_look_at_its_members(
    saved: Path, compare: Compare
) -> None:
    found = compare("muster-test-layers:0", ignore_times=False)
    assert found.equal
    assert found.same == found.layers == layers.compare(saved, saved).same


@pytest.mark.parametrize(
    ("change", "path", "what", "texts"),
    [
        ("chmod 0600 /srv/data/one", "srv/data/one", What.MODE, ("0644", "0600")),
        ("chown 7:8 /srv/data/one", "srv/data/one", What.OWNER, ("0:0", "7:8")),
        ("ln -sf two /srv/data/two", "srv/data/two", What.TARGET, ("one", "two")),
        ("touch /srv/data/three", "srv/data/three", What.PRESENCE, ("absent", "file")),
        ("rm /etc/motd", "etc/.wh.motd", What.PRESENCE, ("absent", "file")),
    ],
)
def test_what_a_step_changed_is_named_alone(
    make: Build,
    compare: Compare,
    change: str,
    path: str,
    what: What,
    texts: tuple[str, str],
) -> None:
    found = compare(make(f"{STEP} && {change}"))
    assert found.first is not None
    assert (found.first.path, found.first.what) == (path, what)
    assert (found.first.left, found.first.right) == texts
    assert STEP in found.first.created_by
    assert found.paths == 1


def test_a_copied_file_that_changed_is_named_with_its_step(make: Build, compare: Compare) -> None:
    found = compare(make(script="exit 1"))
    assert found.first is not None
    assert (found.first.path, found.first.what) == ("srv/script.sh", What.CONTENT)
    assert "COPY script.sh" in found.first.created_by
    assert (found.first.layer, found.paths) == (found.layers - 1, 1)


def test_another_configuration_is_named_and_no_layer(make: Build, compare: Compare) -> None:
    found = compare(make(config="ENV A=1\nUSER 1000\nENTRYPOINT []"))
    assert found.first is None
    assert found.config == ("Env", "User")


def test_an_image_that_is_not_there_is_refused(compare: Compare) -> None:
    with pytest.raises(EngineRefused, match="to save muster-test-layers:absent"):
        compare("muster-test-layers:absent")
