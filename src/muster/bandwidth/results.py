"""What nccl-tests and train/bandwidth.py measured, read into the same rows.

Success is what was written, not how the program ended: nccl-tests ends with 0 after an option that
it does not know, and a failed run leaves a JSON without results. Its JSON holds the environment of
the process, secrets included; nothing of that is kept, nor named in a failure.
https://github.com/NVIDIA/nccl-tests/blob/master/src/util.cu
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

# what nccl-tests call JSON_FILE_VERSION
NCCL_TESTS_VERSION: Final = 3
SCRIPT: Final = "bandwidth"
_MICROSECOND: Final = 1e-6
# nccl-tests write six digits behind the point
_LAST_DIGIT: Final = 1e-6
# more than any size or speed
_LIMIT: Final = 2.0**63


class Collective(StrEnum):
    """Spelled as torch has them, and alltoall and sendrecv as nccl-tests do: NAME_perf."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    SENDRECV = "sendrecv"

    def factor(self, nranks: int) -> float:
        """What algbw is multiplied by to give busbw.

        https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
        """
        if self in {Collective.BROADCAST, Collective.SENDRECV}:
            return 1.0
        once = (nranks - 1) / nranks
        return 2 * once if self is Collective.ALL_REDUCE else once

    @property
    def column(self) -> str:
        """The column of nccl-tests that works as torch does: in place, or from one to another."""
        in_place = self in {Collective.ALL_REDUCE, Collective.BROADCAST}
        return "in_place" if in_place else "out_of_place"


class Tool(StrEnum):
    NCCL_TESTS = "nccl-tests"
    TORCH = "torch"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One size. algbw and busbw in GB/s (10^9), seconds of one run; `wrong` is None unchecked.

    nccl-tests give the mean over the ranks, train/bandwidth.py the slowest rank's time.
    """

    bytes: int
    seconds: float
    algbw: float
    busbw: float
    wrong: int | None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One collective by one tool over all its sizes; with a `failure` there are no rows."""

    tool: Tool
    collective: Collective
    nranks: int
    rows: tuple[Row, ...]
    failure: str | None = None

    @property
    def wrong(self) -> int:
        """Wrong elements of all rows that were checked."""
        return sum(row.wrong or 0 for row in self.rows)

    @property
    def is_checked(self) -> bool:
        return all(row.wrong is not None for row in self.rows)


class _Unreadable(Exception):
    """Why the rows cannot be read; of the file's own text only NCCL's error is ever in it."""


def read_nccl_tests(text: str, collective: Collective) -> Run:
    """The JSON of NAME_perf -J FILE, format 3. A run that failed has its `failure`."""
    try:
        said = _object(_parsed(text), "the file")
        return _nccl_tests_run(said, collective)
    except _Unreadable as why:
        return _failed(Tool.NCCL_TESTS, collective, str(why))


def read_torch(output: str, collective: Collective) -> Run:
    """What train/bandwidth.py wrote among other lines. A run that failed has its `failure`."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    try:
        if not lines:
            raise _Unreadable("it wrote no results")
        return _torch_run(_object(_parsed(lines[-1]), "the line"), collective)
    except _Unreadable as why:
        return _failed(Tool.TORCH, collective, str(why))


def _failed(tool: Tool, collective: Collective, why: str) -> Run:
    return Run(tool=tool, collective=collective, nranks=0, rows=(), failure=why)


# ---- nccl-tests --------------------------------------------------------------------------------


def _nccl_tests_run(said: Mapping[str, Any], collective: Collective) -> Run:
    version = said.get("version")
    if type(version) is not int:
        raise _Unreadable("it has no version, so it is no JSON of nccl-tests")
    if version != NCCL_TESTS_VERSION:
        raise _Unreadable(f"its format is {version}, and {NCCL_TESTS_VERSION} is what can be read")
    if "results" not in said or "out_of_bounds" not in said:
        raise _Unreadable(_why_it_failed(said))
    nranks = _ranks(_object(said.get("config"), "config"))
    columns = [
        _object(each, f"result {at}") for at, each in enumerate(_list(said["results"], "results"))
    ]
    rows = tuple(
        _nccl_tests_row(each, f"result {at}", collective, nranks)
        for at, each in enumerate(columns)
        # with few bytes for many ranks nccl-tests have rows that move nothing
        if each.get("size") != 0
    )
    if not rows:
        raise _Unreadable("it has no results")
    _agree(_object(said["out_of_bounds"], "out_of_bounds"), sum(row.wrong or 0 for row in rows))
    return Run(tool=Tool.NCCL_TESTS, collective=collective, nranks=nranks, rows=rows)


def _why_it_failed(said: Mapping[str, Any]) -> str:
    """A file without results, in NCCL's own words where it has them."""
    errors = said.get("errors")
    words = [each for each in errors if each] if isinstance(errors, list) else []
    if "config" not in said:
        return "it ended before it had a GPU"
    return f"it ended before its results: {words[0]}" if words else "it ended before its results"


def _ranks(config: Mapping[str, Any]) -> int:
    """Ranks: each process has threads with GPUs, and lists one device; without MPI it is one."""
    processes = len(_list(config.get("devices"), "devices"))
    threads, gpus = _whole(config, "nthreads", "config"), _whole(config, "ngpus", "config")
    if not processes * threads * gpus:
        raise _Unreadable("its config has no ranks")
    return processes * threads * gpus


def _nccl_tests_row(
    result: Mapping[str, Any], where: str, collective: Collective, nranks: int
) -> Row:
    column = _object(result.get(collective.column), f"{where}.{collective.column}")
    # the other column's wrong elements count too; alltoall and sendrecv check only one of them
    wrongs = [
        _whole(each, "nwrong", where)
        for each in (result.get("out_of_place"), result.get("in_place"))
        if isinstance(each, dict) and each.get("nwrong") is not None
    ]
    values = {
        "bytes": result.get("size"),
        "seconds": column.get("time"),
        "algbw": column.get("alg_bw"),
        "busbw": column.get("bus_bw"),
        "wrong": sum(wrongs) if wrongs else None,
    }
    row = _row(values, where, collective, nranks)
    return replace(row, seconds=row.seconds * _MICROSECOND)


def _agree(out_of_bounds: Mapping[str, Any], wrong: int) -> None:
    """That the sum under the table is the table's: booleans are strings here."""
    okay = out_of_bounds.get("okay")
    if okay not in ("true", "false"):
        raise _Unreadable("out_of_bounds.okay is neither true nor false")
    if (okay == "true") != (wrong == 0):
        count = _whole(out_of_bounds, "count", "out_of_bounds")
        raise _Unreadable(f"it counts {count} values out of bounds, and {wrong} in its rows")


# ---- train/bandwidth.py ------------------------------------------------------------------------


def _torch_run(said: Mapping[str, Any], collective: Collective) -> Run:
    if said.get("script") != SCRIPT:
        raise _Unreadable("its last object is not that of train/bandwidth.py")
    if collective not in said:
        raise _Unreadable(f"it did not measure {collective}")
    nranks = _whole(said, "world_size", "the line")
    if not nranks:
        raise _Unreadable("its world_size is 0")
    rows = tuple(
        _row(_object(each, f"row {at}"), f"row {at}", collective, nranks)
        for at, each in enumerate(_list(said[collective], collective))
    )
    if not rows:
        raise _Unreadable("it has no results")
    return Run(tool=Tool.TORCH, collective=collective, nranks=nranks, rows=rows)


# ---- values ------------------------------------------------------------------------------------


def _row(values: Mapping[str, Any], where: str, collective: Collective, nranks: int) -> Row:
    size = _whole(values, "bytes", where)
    seconds, algbw, busbw = (_number(values, name, where) for name in ("seconds", "algbw", "busbw"))
    if not size or not seconds:
        raise _Unreadable(f"{where} has no bytes or took no time")
    # a number of ranks that was misread would make every busbw mean something else
    expected = algbw * collective.factor(nranks)
    if not math.isclose(busbw, expected, rel_tol=1e-3, abs_tol=2 * _LAST_DIGIT):
        raise _Unreadable(f"{where}: busbw is {busbw:g}, and {nranks} ranks give {expected:g}")
    wrong = None if values.get("wrong") is None else _whole(values, "wrong", where)
    return Row(bytes=size, seconds=seconds, algbw=algbw, busbw=busbw, wrong=wrong)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        cut = "" if text.rstrip().endswith("}") else ": it was cut off"
        raise _Unreadable(f"it is no JSON from character {error.pos} on{cut}") from None
    except (RecursionError, ValueError):
        # Python reads no deeper than its own stack, and no number of thousands of digits
        raise _Unreadable("it is no JSON that a tool would write") from None


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Unreadable(f"{where} is missing or no object")
    return value


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _Unreadable(f"{where} is missing or no list")
    return value


def _number(values: Mapping[str, Any], name: str, where: str) -> float:
    """A number of 0 or more; nccl-tests write "nan" for one that is none."""
    value = values.get(name)
    # to Python a bool is an int
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < _LIMIT:
        raise _Unreadable(f"{where}.{name} is not a number of 0 or more")
    return float(value)


def _whole(values: Mapping[str, Any], name: str, where: str) -> int:
    value = _number(values, name, where)
    if not value.is_integer():
        raise _Unreadable(f"{where}.{name} is not a whole number")
    return int(value)
