"""Where the marks of a plot stand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.dossiers import rows as measured_rows

from muster.bandwidth.floors import Basis, Floor
from muster.bandwidth.results import Collective, Row, Run, Tool
from muster.page.plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, plot

RUN = Run(tool=Tool.TORCH, collective=Collective.ALL_REDUCE, nranks=8, rows=measured_rows(360))


def measured(*rows: tuple[int, float]) -> Run:
    made = tuple(
        Row(bytes=size, seconds=1.0, algbw=speed, busbw=speed, wrong=None) for size, speed in rows
    )
    return replace(RUN, rows=made)


def floor(speed: float, from_bytes: int = 1024) -> Floor:
    return Floor(busbw=speed, bytes=from_bytes, basis=Basis.GIVEN, source="here")


def test_sizes_stand_by_their_logarithm_and_speeds_straight() -> None:
    found = plot([measured((2**10, 0), (2**20, 50), (2**30, 100))], None)
    assert found is not None
    ((first, middle, last),) = (line.marks for line in found.lines)
    assert first == (LEFT, BOTTOM)
    assert middle == pytest.approx(((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2))
    assert last == (RIGHT, TOP)
    assert found.lines[0].points == " ".join(f"{x},{y}" for x, y in (first, middle, last))


def test_both_series_share_the_axes() -> None:
    other = replace(measured((2**5, 10), (2**30, 200)), tool=Tool.NCCL_TESTS)
    found = plot([measured((2**10, 10), (2**20, 50)), other], None)
    assert found is not None
    assert [line.tool for line in found.lines] == [Tool.TORCH, Tool.NCCL_TESTS]
    assert found.lines[1].marks[0][0] == LEFT < found.lines[0].marks[0][0]


def test_the_floor_is_a_level_line_and_the_axis_reaches_it() -> None:
    found = plot([measured((2**10, 10), (2**20, 50))], floor(400, 2**15))
    assert found is not None
    assert found.floor is not None
    assert (found.floor.start, found.floor.at) == ((LEFT + RIGHT) / 2, TOP)


def test_a_floor_from_beyond_the_sizes_stays_inside() -> None:
    found = plot([measured((2**10, 10), (2**20, 50))], floor(10, 2**40))
    assert found is not None
    assert found.floor is not None
    assert found.floor.start == RIGHT


def test_a_floor_at_every_size_begins_with_the_plot() -> None:
    found = plot([measured((2**10, 10), (2**20, 50))], floor(10, 0))
    assert found is not None
    assert found.floor is not None
    assert found.floor.start == LEFT


@pytest.mark.parametrize("rows", [(), ((8, 1.0),), ((8, 1.0), (8, 2.0))])
def test_one_size_is_no_plot(rows: tuple[tuple[int, float], ...]) -> None:
    assert plot([measured(*rows)], None) is None
    assert plot([], None) is None


@pytest.mark.parametrize(
    ("highest", "labels"),
    [
        (400, ["0", "100", "200", "300", "400"]),
        (359.7, ["0", "100", "200", "300", "400"]),
        (1.9, ["0", "0.5", "1", "1.5", "2"]),
        (0.03, ["0", "0.01", "0.02", "0.03"]),
        (0, ["0", "0.5", "1"]),
    ],
)
def test_speeds_have_round_ticks(highest: float, labels: list[str]) -> None:
    found = plot([measured((8, 0), (64, highest))], None)
    assert found is not None
    assert [tick.label for tick in found.y_ticks] == labels


def test_sizes_have_ticks_at_powers_of_two_with_room_for_their_labels() -> None:
    found = plot([RUN], None)
    assert found is not None
    assert [tick.label for tick in found.x_ticks] == [
        "8 B",
        "512 B",
        "32 KiB",
        "2 MiB",
        "128 MiB",
        "8 GiB",
    ]


SIZED = st.tuples(st.integers(1, 2**50), st.floats(0, 1e6))


@given(st.lists(SIZED, min_size=2, max_size=30), st.none() | st.floats(1e-6, 1e6))
def test_every_mark_is_in_the_frame(rows: list[tuple[int, float]], least: float | None) -> None:
    found = plot([measured(*rows)], None if least is None else floor(least))
    if found is None:
        assert len({size for size, _ in rows}) == 1
        return
    for x, y in found.lines[0].marks:
        assert LEFT <= x <= RIGHT
        assert TOP - 0.5 <= y <= BOTTOM
    ticks = [tick.at for tick in found.x_ticks]
    assert ticks == sorted(ticks)
    assert len(ticks) <= 6
    assert 2 <= len(found.y_ticks) <= 8
    assert RIGHT < WIDTH
    assert BOTTOM < HEIGHT
