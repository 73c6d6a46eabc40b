"""The wheelhouse, filled by the real pip from a folder: only what matches its hash comes in."""

import hashlib
import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest
from tests.unit.conftest import Recorder

from muster.errors import (
    CannotWrite,
    WheelHashDiffers,
    WheelhouseIncomplete,
    WheelsNotFetched,
)
from muster.pins import Wheel
from muster.wheelhouse import Target, Wheelhouse

PYTHON_311 = Target("3.11")


def make_wheel(
    folder: Path,
    name: str = "tiny",
    version: str = "1.0",
    tag: str = "py3-none-any",
    content: str = "",
) -> Wheel:
    """A wheel that pip takes, in `folder`; its line of a lock."""
    escaped = name.replace("-", "_")
    info = f"{escaped}-{version}.dist-info"
    path = folder / f"{escaped}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{escaped}.py", content)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(
            f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return Wheel(name, version, hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def house(tmp_path: Path) -> Wheelhouse:
    return Wheelhouse(tmp_path / "cache/wheels")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".sha256.json")


def test_missing_wheels_are_fetched_once(
    served: Path, house: Wheelhouse, progress: Recorder
) -> None:
    wheels = [make_wheel(served), make_wheel(served, "big-one", "2.0+cpu")]
    files = house.fetch(wheels, PYTHON_311, False, progress)
    assert {wheel: path.name for wheel, path in files.items()} == {
        wheels[0]: "tiny-1.0-py3-none-any.whl",
        wheels[1]: "big_one-2.0+cpu-py3-none-any.whl",
    }
    assert progress.said == [f"fetching 2 wheels into {house.folder}"]
    assert len(names(house.folder)) == 2  # the folder of the download is gone

    shutil.rmtree(served)
    assert house.fetch(wheels, PYTHON_311, False, progress) == files
    assert house.fetch(wheels, PYTHON_311, True, progress) == files
    assert len(progress.said) == 1


def test_what_pip_takes_for_the_lock_is_found_again_however_it_is_named(
    served: Path, house: Wheelhouse, progress: Recorder
) -> None:
    tags = {
        "py2.py3-none-any": "1.0",
        "py311-none-any": "1.0",
        "cp311-cp311-manylinux_2_28_x86_64": "1.0",
        "cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64": "1.0",
        "cp38-abi3-manylinux2014_x86_64": "1.0",
        "py3-none-any": "1.0.0",
    }
    wheels = [
        Wheel(name, "1.0", make_wheel(served, name, version, tag).sha256)
        for name, (tag, version) in zip("abcdef", tags.items(), strict=True)
    ]
    found = house.fetch(wheels, PYTHON_311, False, progress)
    assert [wheel for wheel in wheels if wheel not in found] == []


@pytest.mark.parametrize(
    ("tag", "takes"),
    [
        ("py3-none-any", True),
        ("cp311-cp311-manylinux_2_28_x86_64", True),
        ("cp39-abi3-manylinux_2_28_x86_64", True),
        ("cp313-cp313-manylinux_2_28_x86_64", False),
        ("py2-none-any", False),
    ],
)
def test_wheels_of_another_python_are_not_taken(tag: str, takes: bool) -> None:
    assert PYTHON_311.takes(Path(f"tiny-1.0-{tag}.whl")) is takes


def test_a_wheel_of_another_python_does_not_hide_the_right_one(house: Wheelhouse) -> None:
    house.folder.mkdir(parents=True)
    wheel = make_wheel(house.folder, tag="cp311-cp311-manylinux2014_x86_64")
    make_wheel(house.folder, tag="cp313-cp313-manylinux2014_x86_64")
    (house.folder / "notes.whl").touch()
    assert [path.name for path in house.find([wheel], PYTHON_311).values()] == [
        "tiny-1.0-cp311-cp311-manylinux2014_x86_64.whl"
    ]


def test_offline_names_the_wheels_that_are_missing(house: Wheelhouse, progress: Recorder) -> None:
    house.folder.mkdir(parents=True)
    here = make_wheel(house.folder)
    missing = [Wheel(name, "1", "0" * 64) for name in ("absent", "away")]
    with pytest.raises(WheelhouseIncomplete, match=r"lacks 2 .*: absent==1, away==1\n"):
        house.fetch([here, *missing], PYTHON_311, True, progress)
    assert progress.said == []


def test_another_file_in_the_wheelhouse_is_named_with_both_hashes(
    tmp_path: Path, house: Wheelhouse, progress: Recorder
) -> None:
    house.folder.mkdir(parents=True)
    pinned = make_wheel(tmp_path)
    other = make_wheel(house.folder, content="# altered")
    with pytest.raises(WheelHashDiffers) as caught:
        house.fetch([pinned], PYTHON_311, True, progress)
    for part in (str(house.folder / "tiny-1.0-py3-none-any.whl"), pinned.sha256, other.sha256):
        assert part in caught.value.what


def test_another_file_from_the_index_is_named_and_stays_out(
    tmp_path: Path, served: Path, house: Wheelhouse, progress: Recorder
) -> None:
    pinned = make_wheel(tmp_path)
    other = make_wheel(served, content="# altered")
    with pytest.raises(WheelHashDiffers) as caught:
        house.fetch([pinned], PYTHON_311, False, progress)
    for part in ("tiny==1.0", pinned.sha256, other.sha256):
        assert part in caught.value.what
    assert names(house.folder) == []


def test_what_no_index_has_for_that_python_is_named_alone(
    served: Path, house: Wheelhouse, progress: Recorder
) -> None:
    other = make_wheel(served, "other", "3.0+cpu", "cp313-cp313-manylinux_2_28_x86_64")
    with pytest.raises(WheelsNotFetched, match=r"could not fetch other==3\.0\+cpu: ERROR: "):
        house.fetch([make_wheel(served), other], PYTHON_311, False, progress)
    assert names(house.folder) == []


def test_a_wheel_that_changes_is_hashed_again_whatever_its_times_say(house: Wheelhouse) -> None:
    house.folder.mkdir(parents=True)
    pinned = make_wheel(house.folder)
    (path,) = house.find([pinned], PYTHON_311).values()
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(WheelHashDiffers):
        house.find([pinned], PYTHON_311)


def test_a_wheel_that_did_not_change_is_not_hashed_again(house: Wheelhouse) -> None:
    house.folder.mkdir(parents=True)
    wheel = make_wheel(house.folder)
    house.find([wheel], PYTHON_311)
    stamps = house.folder / ".sha256.json"
    remembered = json.loads(stamps.read_text())
    remembered["tiny-1.0-py3-none-any.whl"][-1] = "remembered"
    stamps.write_text(json.dumps(remembered))
    with pytest.raises(WheelHashDiffers, match="sha256 remembered"):
        house.find([wheel], PYTHON_311)


@pytest.mark.parametrize("content", ["", "{"])
def test_broken_stamps_are_made_anew(house: Wheelhouse, content: str) -> None:
    house.folder.mkdir(parents=True)
    wheel = make_wheel(house.folder)
    stamps = house.folder / ".sha256.json"
    stamps.write_text(content)
    assert list(house.find([wheel], PYTHON_311)) == [wheel]
    assert wheel.sha256 in stamps.read_text()


def test_a_wheelhouse_that_cannot_be_made_is_named(tmp_path: Path, progress: Recorder) -> None:
    (tmp_path / "file").touch()
    house = Wheelhouse(tmp_path / "file/wheels")
    with pytest.raises(CannotWrite, match=r"file/wheels: Not a directory"):
        house.fetch([Wheel("tiny", "1.0", "0" * 64)], PYTHON_311, False, progress)
