"""The floors by GPU and link: what is known, what is not, and a user's file that is wrong."""

from pathlib import Path

import pytest

from muster.bandwidth import floors
from muster.bandwidth.floors import Basis, Link, Place
from muster.bandwidth.results import Collective
from muster.errors import ExitCode, FloorsWrong
from muster.finding import Severity

H100 = "NVIDIA H100 80GB HBM3"

GOOD = """\
schema = 1

[[floor]]
gpu = "NVIDIA L40S"
link = "pcie"
nranks = 4
collectives = ["all_reduce", "alltoall"]
bytes = 1073741824
threshold_gb_s = 18.5
source = "our own acceptance test"

[[floor]]
gpu = "NVIDIA L40S"
link = "roce"
rail_gbit_s = 200
collectives = ["all_reduce"]
bytes = 1073741824
measured_gb_s = 20
source = "our own machines"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "floors.toml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(FloorsWrong) as refused:
        floors.read(written(folder, text))
    assert refused.value.exit_code is ExitCode.WRONG_INPUT
    assert str(folder) in refused.value.what
    return refused.value.what


# ---- the file of this repository -----------------------------------------------------------------


def test_every_figure_has_its_source() -> None:
    entries = floors.read().entries
    assert entries
    assert all(entry.floor.source.startswith("https://") for entry in entries)


def test_a_full_node_of_a_known_gpu_has_a_floor() -> None:
    floor = floors.read().floor_for(Place(H100, Link.NVLINK, 8), Collective.ALL_REDUCE)
    assert floor is not None
    assert (floor.busbw, floor.bytes, floor.severity) == (460, 16 * 2**30, Severity.ERROR)


@pytest.mark.parametrize(
    ("place", "collective"),
    [
        (Place("NVIDIA H999", Link.NVLINK, 8), Collective.ALL_REDUCE),
        (Place(H100.lower(), Link.NVLINK, 8), Collective.ALL_REDUCE),
        (Place(H100, Link.PCIE, 8), Collective.ALL_REDUCE),
        (Place(H100, Link.NVLINK, 4), Collective.ALL_REDUCE),
        (Place(H100, Link.NVLINK, 8), Collective.SENDRECV),
        (Place(H100, Link.INFINIBAND, 16), Collective.ALL_REDUCE),
        (Place(H100, Link.INFINIBAND, 16, rails=8, rail_gbit_s=100), Collective.ALL_REDUCE),
    ],
)
def test_for_what_nobody_published_no_floor_is_known(place: Place, collective: Collective) -> None:
    assert floors.read().floor_for(place, collective) is None


@pytest.mark.parametrize(("rails", "busbw"), [(1, 41.4), (4, 165.6), (8, 331.2)])
def test_between_nodes_every_adapter_adds_to_the_floor(rails: int, busbw: float) -> None:
    place = Place(H100, Link.INFINIBAND, 16, rails=rails, rail_gbit_s=400)
    floor = floors.read().floor_for(place, Collective.ALL_GATHER)
    assert floor is not None
    assert floor.busbw == pytest.approx(busbw)
    assert (floor.basis, floor.severity) == (Basis.MEASURED, Severity.WARNING)


def test_no_adapters_together_are_asked_for_more_than_nvlink_gives() -> None:
    known = floors.read()
    for entry in known.entries:
        within = known.floor_for(Place(entry.gpu, Link.NVLINK, 8), Collective.ALL_REDUCE)
        if entry.link.is_network and within is not None:
            assert entry.floor.busbw * 8 < within.busbw


# ---- a file of the user's ------------------------------------------------------------------------


def test_a_file_of_the_users_is_read_the_same_way(tmp_path: Path) -> None:
    known = floors.read(written(tmp_path, GOOD))
    inside = known.floor_for(Place("NVIDIA L40S", Link.PCIE, 4), Collective.ALLTOALL)
    assert inside is not None
    assert (inside.busbw, inside.basis) == (18.5, Basis.THRESHOLD)
    place = Place("NVIDIA L40S", Link.ROCE, 8, rails=2, rail_gbit_s=200)
    between = known.floor_for(place, Collective.ALL_REDUCE)
    assert between is not None
    assert between.busbw == pytest.approx(36)
    assert known.floor_for(Place(H100, Link.NVLINK, 8), Collective.ALL_REDUCE) is None


def test_a_text_of_floors_is_refused_with_the_place_it_came_from(tmp_path: Path) -> None:
    assert floors.parse(GOOD, Path("--floors")) == floors.read(written(tmp_path, GOOD))
    with pytest.raises(FloorsWrong, match="--floors: schema is 2"):
        floors.parse(GOOD.replace("schema = 1", "schema = 2"), Path("--floors"))


def test_the_floor_that_the_user_gives_is_for_every_size() -> None:
    floor = floors.given(300)
    assert (floor.busbw, floor.bytes, floor.severity) == (300, 0, Severity.ERROR)


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(FloorsWrong, match="No such file"):
        floors.read(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("schema = 1", "schema = 2", "schema is 2, not 1"),
        ("schema = 1\n", "", "schema is None"),
        ("schema = 1", "schema = 1\nfloors = 3", "no key 'floors'"),
        ("schema = 1", "schema =", "it is no TOML"),
        ('"NVIDIA L40S"', '""', "floor 1: gpu is missing"),
        ('"NVIDIA L40S"', "3", "floor 1: gpu is missing or wrong"),
        ('"pcie"', '"nvlnk"', "link: 'nvlnk' is none of nvlink, pcie"),
        ('"pcie"', '"roce"', "floor 1: rail_gbit_s fits roce"),
        ('"roce"', '"pcie"', "floor 2: nranks fits pcie"),
        ('"alltoall"', '"all_to_all"', "'all_to_all' is none of all_reduce"),
        ('"alltoall"', "7", "'7' is none of all_reduce"),
        ('["all_reduce", "alltoall"]', "[]", "collectives is missing"),
        ("nranks = 4", "nranks = 0", "nranks is 0, not a whole number above 0"),
        ("nranks = 4", "nranks = true", "nranks is True"),
        ("nranks = 4", "nranks = 4.0", "nranks is 4.0, not a whole"),
        ("nranks = 4\n", "", "needs one of nranks and rail_gbit_s"),
        ("bytes = 1073741824", 'bytes = "1g"', "floor 1: bytes is missing or wrong"),
        ("bytes = 1073741824", "bytes = -1", "bytes is -1"),
        ("18.5", "nan", "threshold_gb_s is nan, not a number above 0"),
        ("18.5", "inf", "threshold_gb_s is inf"),
        ("18.5", "-3", "threshold_gb_s is -3"),
        ("18.5", "18.5\nmeasured_gb_s = 3", "one of threshold_gb_s and measured_gb_s"),
        ("18.5", "18.5\nbusbw = 3", "no key 'busbw'"),
        ('source = "our own acceptance test"\n', "", "source is missing"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_place(
    tmp_path: Path, old: str, new: str, expected: str
) -> None:
    assert expected in refusal(tmp_path, GOOD.replace(old, new, 1))


def test_two_figures_for_one_place_are_refused(tmp_path: Path) -> None:
    _, first, _ = GOOD.split("[[floor]]")
    assert "floor 3 has all_reduce of floor 1" in refusal(tmp_path, f"{GOOD}\n[[floor]]{first}")


@pytest.mark.parametrize("text", ["", "schema = 1", "schema = 1\nfloor = 3", "\x00", "floor = []"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    assert refusal(tmp_path, text)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "floors.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FloorsWrong, match="no TOML"):
        floors.read(path)
