"""Where ranks are, which floor holds there, and how large a buffer shows it."""

import pytest

from muster.bandwidth import floors, place
from muster.bandwidth.floors import Basis, Floor, Link, Place
from muster.bandwidth.results import Collective
from muster.errors import FloorsWrong

GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3"
A100 = "NVIDIA A100-SXM4-40GB"

OWN = """\
schema = 1
[[floor]]
gpu = "NVIDIA L40S"
link = "pcie"
nranks = 4
collectives = ["all_reduce"]
bytes = 1048576
threshold_gb_s = 18.5
source = "our own acceptance test"
[[floor]]
gpu = "NVIDIA L40S"
link = "roce"
rail_gbit_s = 200
collectives = ["all_reduce"]
bytes = 1048576
measured_gb_s = 20
source = "our own machines"
"""


def floor(size: int) -> Floor:
    return Floor(busbw=1, bytes=size, basis=Basis.GIVEN, source="")


@pytest.mark.parametrize(
    ("paths", "link"),
    [
        ({"NVLINK"}, Link.NVLINK),
        (["NVLINK", "PHB", "NVLINK"], Link.PCIE),
        ({"PIX"}, Link.PCIE),
        ({"unknown"}, Link.PCIE),
    ],
)
def test_the_slowest_path_is_the_link(paths: set[str], link: Link) -> None:
    assert place.within_node([H100] * 4, paths) == Place(H100, link, 4)


def test_one_gpu_or_gpus_of_two_kinds_are_no_place_with_a_floor() -> None:
    assert place.within_node([H100], []) is None
    assert place.within_node([], []) is None
    assert place.within_node([H100, A100], ["NVLINK"]) is None


def test_without_a_wish_the_floors_of_this_repository_hold() -> None:
    eight = Place(H100, Link.NVLINK, 8)
    for collective in Collective:
        expected = floors.read().floor_for(eight, collective)
        assert place.floor_of(None, eight, collective) == expected
    assert place.floor_of(None, None, Collective.ALL_REDUCE) is None


def test_a_number_is_for_all_reduce_wherever_it_runs() -> None:
    assert place.floor_of("1.5", None, Collective.ALL_REDUCE) == floors.given(1.5)
    eight = Place(H100, Link.NVLINK, 8)
    assert place.floor_of("300", eight, Collective.ALL_REDUCE) == floors.given(300)
    assert place.floor_of("300", eight, Collective.ALL_GATHER) is None


def test_a_file_is_for_the_place_it_names_and_for_no_other() -> None:
    four = Place("NVIDIA L40S", Link.PCIE, 4)
    found = place.floor_of(OWN, four, Collective.ALL_REDUCE)
    assert found is not None
    assert found.busbw == 18.5
    assert place.floor_of(OWN, Place(H100, Link.NVLINK, 8), Collective.ALL_REDUCE) is None
    assert place.floor_of(OWN, None, Collective.ALL_REDUCE) is None
    assert list(place.unused(OWN, four, "here")) == []


def test_a_file_without_this_place_is_a_warning_that_names_what_it_has() -> None:
    (finding,) = place.unused(OWN, Place(H100, Link.NVLINK, 8), "here")
    assert finding.what.endswith(f"{H100}, nvlink, 8 ranks")
    assert finding.evidence == (
        "it has floors for NVIDIA L40S, pcie, 4 ranks; NVIDIA L40S, roce with 200 Gbit/s a rail"
    )
    (finding,) = place.unused(OWN, None, "here")
    assert "no GPUs of one kind" in finding.what


@pytest.mark.parametrize("text", [None, "300", " 1e2 "])
def test_where_no_file_is_given_none_is_unused(text: str | None) -> None:
    assert list(place.unused(text, None, "here")) == []


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "", "floors.toml", "schema = 1"])
def test_what_is_neither_a_number_nor_floors_is_refused_with_the_option(text: str) -> None:
    with pytest.raises(FloorsWrong, match="--floor: "):
        place.floor_of(text, None, Collective.ALL_REDUCE)


@pytest.mark.parametrize(
    ("memory", "link", "wanted", "expected"),
    [
        (80 * GIB, Link.NVLINK, None, 8 * GIB),
        (40 * GIB, Link.NVLINK, None, 4 * GIB),
        (180 * GIB, Link.NVLINK, None, 8 * GIB),
        (80 * GIB, Link.PCIE, None, GIB),
        (2 * GIB, Link.PCIE, None, GIB // 4),
        # for the floor more, as long as four of them are there
        (80 * GIB, Link.NVLINK, floor(16 * GIB), 16 * GIB),
        (60 * GIB, Link.NVLINK, floor(16 * GIB), 4 * GIB),
        (80 * GIB, Link.PCIE, floor(3 * GIB), 4 * GIB),
        (80 * GIB, Link.NVLINK, floor(GIB), 8 * GIB),
        (80 * GIB, Link.NVLINK, floors.given(300), 8 * GIB),
    ],
)
def test_buffers_are_as_large_as_memory_link_and_floor_want(
    memory: int, link: Link, wanted: Floor | None, expected: int
) -> None:
    assert place.largest_bytes(memory, Place(H100, link, 8), wanted) == expected


def test_where_the_link_is_not_known_buffers_are_small() -> None:
    assert place.largest_bytes(80 * GIB, None, None) == GIB
