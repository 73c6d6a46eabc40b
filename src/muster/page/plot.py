"""Where the marks of a plot of busbw over size stand: numbers for an SVG, no text of any run."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from muster import size
from muster.bandwidth.floors import Floor
from muster.bandwidth.results import Row, Run, Tool

WIDTH, HEIGHT = 360, 226
LEFT, RIGHT, TOP, BOTTOM = 40, 338, 26, 190
_MOST_X_TICKS = 6
_WANTED_Y_TICKS = 4


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class Line:
    """`points` as SVG's polyline wants them, `marks` the same one by one."""

    tool: Tool
    points: str
    marks: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Level:
    """The floor: a level line from `start` to the right end."""

    start: float
    at: float


@dataclass(frozen=True)
class Plot:
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    lines: tuple[Line, ...]
    floor: Level | None


@dataclass(frozen=True)
class _Scale:
    """Sizes by their logarithm to the x of the plot, GB/s to the y."""

    low: float
    high: float
    top: float

    def x(self, size_bytes: int) -> float:
        share = (math.log2(size_bytes) - self.low) / (self.high - self.low)
        return round(LEFT + min(max(share, 0.0), 1.0) * (RIGHT - LEFT), 1)

    def y(self, gb_per_s: float) -> float:
        return round(BOTTOM - gb_per_s / self.top * (BOTTOM - TOP), 1)


def plot(runs: Sequence[Run], floor: Floor | None) -> Plot | None:
    """The runs in one plot with the floor, or None where none has two sizes."""
    shown = [each for each in runs if len({row.bytes for row in each.rows}) > 1]
    if not shown:
        return None
    rows = [row for each in shown for row in each.rows]
    step, top = _steps([row.busbw for row in rows], floor)
    sizes = [math.log2(row.bytes) for row in rows]
    scale = _Scale(min(sizes), max(sizes), top)
    return Plot(
        x_ticks=tuple(_x_ticks(scale)),
        y_ticks=tuple(_y_ticks(scale, step)),
        lines=tuple(_line(each, scale) for each in shown),
        floor=None if floor is None else _level(floor, scale),
    )


def _steps(speeds: Iterable[float], floor: Floor | None) -> tuple[float, float]:
    """The distance between ticks, 1, 2 or 5 times a power of ten, and the end of the axis."""
    highest = max([*speeds, floor.busbw if floor else 0.0]) or 1.0
    power = 10.0 ** math.floor(math.log10(highest / _WANTED_Y_TICKS))
    step = next(s * power for s in (1, 2, 5, 10) if s * power * _WANTED_Y_TICKS >= highest * 0.999)
    return step, step * math.ceil(highest / step * 0.999)


def _y_ticks(scale: _Scale, step: float) -> Iterator[Tick]:
    for count in range(round(scale.top / step) + 1):
        yield Tick(scale.y(count * step), f"{count * step:.4g}")


def _x_ticks(scale: _Scale) -> Iterator[Tick]:
    """Powers of two, as far apart as their labels need."""
    first, last = math.ceil(scale.low), math.floor(scale.high)
    apart = max(1, math.ceil((last - first) / (_MOST_X_TICKS - 1)))
    for power in range(first, last + 1, apart):
        yield Tick(scale.x(2**power), size.binary(2**power))


def _level(floor: Floor, scale: _Scale) -> Level:
    return Level(scale.x(max(floor.bytes, 1)), scale.y(floor.busbw))


def _line(run: Run, scale: _Scale) -> Line:
    rows: list[Row] = sorted(run.rows, key=lambda row: row.bytes)
    marks = tuple((scale.x(row.bytes), scale.y(row.busbw)) for row in rows)
    return Line(run.tool, " ".join(f"{x},{y}" for x, y in marks), marks)
