"""The build's context: when an image is up to date, one build at a time, and what is staged."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.conftest import ROOT, Recorder, wait_until

from muster import context, pins
from muster.context import Checkout
from muster.pins import Variant


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    """A copy of what the image is made from, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for folder in ("docker", "src/muster", "tests/smoke", "train"):
        shutil.copytree(ROOT / folder, tmp_path / "checkout" / folder)
    return Checkout(tmp_path / "checkout")


@pytest.fixture
def cpu(checkout: Checkout) -> Variant:
    return pins.read(checkout.docker).variant("cpu")


def append(path: Path) -> None:
    path.write_text(path.read_text() + "\n# changed\n")


@pytest.mark.parametrize(
    "change",
    [
        lambda checkout: append(checkout.docker / "Dockerfile"),
        lambda checkout: append(checkout.docker / "entrypoint.sh"),
        lambda checkout: append(checkout.docker / "locks/cpu.txt"),
        lambda checkout: append(checkout.root / "src/muster/size.py"),
        lambda checkout: append(checkout.root / "tests/smoke/conftest.py"),
        lambda checkout: append(checkout.root / "train/ddp_demo.py"),
        lambda checkout: (checkout.root / "train/new.py").touch(),
        lambda checkout: (checkout.docker / "entrypoint.sh").chmod(0o644),
    ],
)
def test_what_goes_into_the_image_makes_another_one(
    checkout: Checkout, cpu: Variant, change: Callable[[Checkout], None]
) -> None:
    before = context.fingerprint(checkout, cpu, "base")
    change(checkout)
    assert context.fingerprint(checkout, cpu, "base") != before


@pytest.mark.parametrize(
    "change",
    [
        lambda checkout: os.utime(checkout.docker / "Dockerfile", (0, 0)),
        lambda checkout: append(checkout.docker / "pins.toml"),
        lambda checkout: append(checkout.root / "src/muster/engine.py"),
        lambda checkout: (checkout.root / "train/notes").mkdir(),
    ],
)
def test_what_does_not_leaves_it_up_to_date(
    checkout: Checkout, cpu: Variant, change: Callable[[Checkout], None]
) -> None:
    before = context.fingerprint(checkout, cpu, "base")
    change(checkout)
    assert context.fingerprint(checkout, cpu, "base") == before


def test_another_base_makes_another_image(checkout: Checkout, cpu: Variant) -> None:
    one, other = (context.fingerprint(checkout, cpu, base) for base in ("sha256:1", "sha256:2"))
    assert one != other


def holding(*wheels: Path) -> context.Contents:
    return context.Contents(wheels, (), None, "")


def test_the_staged_folder_holds_all_and_is_gone_afterwards(
    checkout: Checkout, cpu: Variant, tmp_path: Path
) -> None:
    wheel = tmp_path / "cache/tiny-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"wheel")
    with context.staged(checkout, cpu, holding(wheel), {"variant": "cpu"}) as folder:
        names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert names == {
            *checkout.staged(),
            "venv/lock.txt",
            "facts.json",
            f"venv/wheels/{wheel.name}",
        }
        assert (folder / "venv/lock.txt").read_bytes() == cpu.lock_path.read_bytes()
        assert json.loads((folder / "facts.json").read_text()) == {"variant": "cpu"}
        # gigabytes of wheels are not copied
        assert (folder / "venv/wheels" / wheel.name).samefile(wheel)
        assert os.access(folder / "entrypoint.sh", os.X_OK)
    assert not folder.exists()
    assert wheel.exists()


def test_the_staged_folder_is_gone_after_an_error_and_anew_after_a_kill(
    checkout: Checkout, cpu: Variant
) -> None:
    with pytest.raises(KeyError), context.staged(checkout, cpu, holding(), {}) as folder:
        raise KeyError
    assert not folder.exists()
    folder.mkdir()
    (folder / "left over").touch()
    with context.staged(checkout, cpu, holding(), {}) as again:
        assert again == folder
        assert not (again / "left over").exists()


def test_a_second_build_of_a_variant_says_that_it_waits_and_waits(
    cpu: Variant, progress: Recorder
) -> None:
    order: list[str] = []

    def second() -> None:
        with context.lock(cpu, progress):
            order.append("second")

    waiting = threading.Thread(target=second)
    with context.lock(cpu, progress):
        assert progress.said == []
        waiting.start()
        wait_until(lambda: len(progress.said) == 1, "the second waits")
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]
    assert progress.said == ["another build of cpu is at work: waiting for it"]


def test_builds_of_two_variants_do_not_wait_for_each_other(
    checkout: Checkout, progress: Recorder
) -> None:
    pinned = pins.read(checkout.docker)
    with (
        context.lock(pinned.variant("cpu"), progress),
        context.lock(pinned.variant("cu13"), progress),
    ):
        assert progress.said == []
