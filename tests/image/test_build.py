"""The build on a real Engine: what it makes, when it does nothing, how it breaks off."""

import io
import json
import re
import shutil
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from tests.image.harness import ROOT, Muster, Recorder, run, wait_until, yes

from muster import cache, context, image, pins
from muster.engine import Engine
from muster.errors import BaseNotFound, BuildFailed, WheelhouseIncomplete
from muster.pins import Pins, Variant

pytestmark = pytest.mark.usefixtures("built")


def in_image(client: docker.DockerClient, *argv: str) -> str:
    output: bytes = client.containers.run("muster:cpu", list(argv), remove=True)
    return output.decode()


@pytest.fixture
def checkout(tmp_path: Path, built: image.Result, engine: Engine) -> Iterator[Path]:
    """A copy of this checkout to change; muster:cpu is this checkout's again afterwards."""
    copy = tmp_path / "checkout"
    ignored = shutil.ignore_patterns(".venv*", ".git", ".*_cache", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=ignored)
    yield copy
    assert run("build")[0] == 0
    restored = engine.image("muster:cpu")
    assert restored is not None
    assert restored.labels == built.image.labels


@pytest.fixture
def tagged(engine: Engine) -> str:
    """The id of muster:cpu before the test."""
    found = engine.image("muster:cpu")
    assert found is not None
    return found.id


def build(engine: Engine, checkout: Path, **wishes: str | bool) -> image.Result:
    pinned = pins.read(checkout / "docker")
    variant = pinned.variant("cpu")
    base, offline = wishes.get("base"), bool(wishes.get("offline"))
    request = image.Request(
        variant, pins.read_lock(pinned, variant), base=str(base) if base else None, offline=offline
    )
    return image.build(engine, context.Checkout(checkout), pinned, request, yes, Recorder())


def layers(client: docker.DockerClient, image_id: str) -> list[str]:
    names: list[str] = client.images.get(image_id).attrs["RootFS"]["Layers"]
    return names


# ---- what it makes ------------------------------------------------------------------------------


def test_unchanged_inputs_build_nothing(built: image.Result, tmp_path: Path) -> None:
    code, output = run("build", "--json", str(tmp_path / "out.json"))
    assert code == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert not result["built"]
    assert result["image"]["labels"] == built.image.labels
    assert "muster:cpu" in output
    assert "up to date" in output


def test_the_bill_of_materials_is_the_lock_and_dpkgs_list(
    built: image.Result, client: docker.DockerClient, pinned: Pins, cpu: Variant
) -> None:
    bom = json.loads(in_image(client, "cat", "/opt/muster/bom.json"))
    locked = {(w.name, w.version, w.sha256) for w in pins.read_lock(pinned, cpu)}
    assert {(w["name"], w["version"], w["sha256"]) for w in bom["wheels"]} == locked
    dpkg = in_image(client, "dpkg-query", "-f", "${Package} ${Version} ${Architecture}\n", "-W")
    listed = {f"{p['name']} {p['version']} {p['architecture']}" for p in bom["debian"]}
    assert listed == set(dpkg.splitlines())
    assert {p["name"] for p in bom["debian"]} >= {
        *("libibverbs1", "ibverbs-providers", "librdmacm1", "ibverbs-utils"),
        *("infiniband-diags", "perftest", "iproute2"),
    }
    assert next(iter(bom["parts"])) == "torch"
    assert bom["base"]["origin"] == built.image.labels[image.LABEL_BASE]


def test_the_sbom_lists_what_the_bill_of_materials_lists(
    client: docker.DockerClient, tmp_path: Path
) -> None:
    code, output = run("build", "--sbom", str(tmp_path / "cpu.cdx.json"))
    assert code == 0, output
    assert re.search(r"^torch +\d+ MB *$", output, re.MULTILINE)
    sbom = json.loads((tmp_path / "cpu.cdx.json").read_text())
    bom = json.loads(in_image(client, "cat", "/opt/muster/bom.json"))
    assert sbom["bomFormat"] == "CycloneDX"
    names = {component["name"] for component in sbom["components"]}
    assert names >= {part["name"] for part in [*bom["wheels"], *bom["debian"]]}


def test_it_runs_as_an_ordinary_user_who_cannot_change_it(client: docker.DockerClient) -> None:
    assert in_image(client, "id", "-u").strip() == "1000"
    writable = "find /opt /usr /etc -xdev -writable -not -type l -not -path '/proc/*'"
    assert in_image(client, "sh", "-c", f"{writable} 2>/dev/null || true") == ""


def test_the_program_is_pid_1_and_gets_the_signals(client: docker.DockerClient) -> None:
    assert in_image(client, "sh", "-c", "echo $$").strip() == "1"
    script = "trap 'exit 7' TERM; echo ready; while :; do sleep 0.1; done"
    container = client.containers.run("muster:cpu", ["sh", "-c", script], detach=True)
    try:
        wait_until(lambda: container.logs() == b"ready\n", "the shell is ready")
        container.kill("SIGTERM")
        assert container.wait(timeout=10)["StatusCode"] == 7
    finally:
        container.remove(force=True)


def test_the_labels_say_what_it_is_and_where_the_base_is_from(built: image.Result) -> None:
    labels = built.image.labels
    assert labels["org.opencontainers.image.title"] == "muster cpu"
    assert labels["org.opencontainers.image.base.name"] == "debian:bookworm-slim"
    assert labels[image.LABEL_BASE] in ("registry", "mmdebstrap")
    assert labels[image.LABEL_VARIANT] == "cpu"


def test_no_wheel_no_list_and_no_secret_stays_in_the_image(client: docker.DockerClient) -> None:
    unwanted = (
        r"find / -xdev \( -name '*.whl' -o -path '/var/lib/apt/lists/?*' -o -name '*.pem'"
        r" -path '/root/*' -o -name id_rsa -o -path '*/.cache/pip' \) 2>/dev/null || true"
    )
    assert in_image(client, "sh", "-c", unwanted) == ""
    history = json.dumps(client.images.get("muster:cpu").history()).lower()
    assert not [word for word in ("password", "token", "proxy") if word in history]


# ---- what changes ------------------------------------------------------------------------------


def test_a_change_in_train_changes_one_small_layer(
    checkout: Path, engine: Engine, client: docker.DockerClient, tagged: str
) -> None:
    before = layers(client, tagged)
    script = checkout / "train/all_reduce.py"
    script.write_text(script.read_text() + "\n# changed\n")
    result = build(engine, checkout)
    after = layers(client, result.image.id)
    assert result.built
    assert len(after) == len(before)
    assert sum(a != b for a, b in zip(after, before, strict=True)) == 1
    changed = next(each for each in client.images.get("muster:cpu").history() if each["Size"])
    assert changed["Size"] < 10**6


def test_the_image_that_was_replaced_is_gone(checkout: Path, engine: Engine) -> None:
    (checkout / "train/all_reduce.py").write_text("# replaced\n")
    first = build(engine, checkout)
    (checkout / "train/all_reduce.py").write_text("# replaced again\n")
    build(engine, checkout)
    assert engine.image(first.image.id) is None


def test_offline_builds_from_the_wheelhouse_alone(
    checkout: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "train/all_reduce.py").write_text("# offline\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert build(engine, checkout, offline=True).built


def test_offline_names_the_wheels_that_are_missing(
    checkout: Path, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = tmp_path / "cache/muster/wheels"
    house.mkdir(parents=True)
    for wheel in (cache.folder() / "wheels").glob("*.whl"):
        if not wheel.name.startswith(("jinja2", "torch")):
            shutil.copy(wheel, house)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (checkout / "train/all_reduce.py").write_text("# offline\n")
    with pytest.raises(WheelhouseIncomplete, match=r"jinja2==.*torch==") as caught:
        build(engine, checkout, offline=True)
    assert "typing-extensions" not in caught.value.what


def test_a_second_build_without_cache_has_the_same_contents(client: docker.DockerClient) -> None:
    client.images.get("muster:cpu").tag("muster-test:before")
    try:
        code, output = run("build", "--no-cache")
        assert code == 0, output
        code, output = run("compare-images", "muster-test:before", "muster:cpu")
        assert (code, output.splitlines()[-1]) == (0, "equal"), output
    finally:
        client.images.remove("muster-test:before")


# ---- the base ----------------------------------------------------------------------------------


def test_another_base_is_built_on_and_named_in_the_labels(
    checkout: Path, engine: Engine, client: docker.DockerClient
) -> None:
    base = json.loads(in_image(client, "cat", "/opt/muster/bom.json"))["base"]
    client.images.get(base["id"]).tag("muster-test-base:given")
    try:
        result = build(engine, checkout, base="muster-test-base:given")
        assert result.image.labels[image.LABEL_BASE] == "given"
        name = result.image.labels["org.opencontainers.image.base.name"]
        assert name == "muster-test-base:given"
    finally:
        client.images.remove("muster-test-base:given")


def test_a_base_that_nobody_has_is_wrong_input(engine: Engine) -> None:
    with pytest.raises(BaseNotFound, match="muster-test-base:missing"):
        build(engine, ROOT, base="muster-test-base:missing")


# ---- how it breaks off --------------------------------------------------------------------------


@pytest.fixture
def empty_base(client: docker.DockerClient) -> Iterator[str]:
    """A base with nothing in it: the first step cannot run there."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("empty"))
    client.api.import_image_from_data(tar.getvalue(), "muster-test-base", "empty")
    yield "muster-test-base:empty"
    client.images.remove("muster-test-base:empty")


def test_a_step_that_fails_is_named_and_tags_nothing(
    engine: Engine, tagged: str, empty_base: str
) -> None:
    with pytest.raises(BuildFailed, match=r"the build failed at \[os 2/3\] RUN"):
        build(engine, ROOT, base=empty_base)
    after = engine.image("muster:cpu")
    assert after is not None
    assert after.id == tagged
    assert not (cache.folder() / "context/cpu").exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_build_and_leaves_nothing(
    checkout: Path, engine: Engine, tagged: str, number: signal.Signals, status: int
) -> None:
    lock = checkout / "docker/locks/cpu.txt"
    lock.write_text(lock.read_text() + f"# {number.name} makes pip's step run again\n")
    command = Muster("build", root=checkout)
    command.read_until(r"^\[venv")
    command.send(number)
    code, output = command.finish()
    assert code == status
    assert "Traceback" not in output
    after = engine.image("muster:cpu")
    assert after is not None
    assert after.id == tagged
    assert not (cache.folder() / "context/cpu").exists()


def test_the_second_of_two_builds_waits_and_finds_nothing_to_do(checkout: Path) -> None:
    (checkout / "train/all_reduce.py").write_text("# two at once\n")
    first, second = Muster("build", root=checkout), Muster("build", root=checkout)
    ends = [first.finish(), second.finish()]
    assert [code for code, _ in ends] == [0, 0]
    assert sorted("up to date" in output for _, output in ends) == [False, True]


def test_output_into_a_pipe_that_closes_ends_quietly(checkout: Path) -> None:
    (checkout / "train/all_reduce.py").write_text("# piped\n")
    command = Muster("build", root=checkout)
    command.read_until(r"^\[os")
    command.close_output()
    code, output = command.finish()
    assert code == 141
    assert "Traceback" not in output
