"""What nccl-tests and train/bandwidth.py write, read into rows, and what is no result."""

import ast
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.conftest import ROOT

from muster.bandwidth import results
from muster.bandwidth.results import Collective, Run, Tool

SECRET = "hf_Zx81kQpLmN0r"  # noqa: S105  no password, but what must not survive
GIB = 2**30


# ---- the JSON of nccl-tests, as its util.cu writes format 3 --------------------------------------


def column(
    collective: Collective, nranks: int, size: int, us: float, wrong: float | None
) -> dict[str, float | None]:
    algbw = size / us / 1e3
    return {
        "time": round(us, 6),
        "alg_bw": round(algbw, 6),
        "bus_bw": round(algbw * collective.factor(nranks), 6),
        "nwrong": wrong,
    }


def result(
    collective: Collective, nranks: int, size: int, *, wrong: float | None = 0.0
) -> dict[str, Any]:
    is_reduced = collective in {Collective.ALL_REDUCE, Collective.REDUCE_SCATTER}
    # alltoall and sendrecv are not checked in place
    one_sided = collective in {Collective.ALLTOALL, Collective.SENDRECV}
    return {
        "size": size,
        "count": size // 4,
        "type": "float",
        "redop": "sum" if is_reduced else "none",
        "root": "     0" if collective is Collective.BROADCAST else "    -1",
        "out_of_place": column(collective, nranks, size, 20.0 + size / 1e5, wrong),
        "in_place": column(
            collective, nranks, size, 21.0 + size / 1e5, None if one_sided else wrong
        ),
        "actual_iterations": 20,
        "experiment_name": "",
    }


def begun(collective: Collective = Collective.ALL_REDUCE) -> dict[str, Any]:
    """What stands in the file before a GPU was asked for."""
    return {
        "version": 3,
        "start_time": "2026-11-02 10:00:00",
        "args": [f"/opt/nccl-tests/{collective}_perf", "-g", "8", "-J", "out.json"],
        "env": ["PATH=/usr/bin", f"HF_TOKEN={SECRET}", "NCCL_DEBUG=INFO"],
        "nccl_version": 23007,
    }


def configured(collective: Collective, gpus: int, processes: int) -> dict[str, Any]:
    return {
        **begun(collective),
        "config": {
            "nthreads": 1,
            "ngpus": gpus,
            "minimum_bytes": 8,
            "maximum_bytes": GIB,
            "step_factor": 2,
            "warmup_iters": 1,
            "iterations": 20,
            "aggregated_iterations": 1,
            "validation": 1,
            "graph": 0,
            "blocking_collectives": "false",
            "per_iter_timing": "false",
            "per_iter_skip": 0,
            "parallel_init": "false",
            "devices": [
                {
                    "rank": rank * gpus,
                    "group": 0,
                    "pid": 100 + rank,
                    "hostname": f"node{rank}",
                    "device": 0,
                    "device_hex": "0000:18:00",
                    "device_info": "NVIDIA H100 80GB HBM3",
                }
                for rank in range(processes)
            ],
        },
    }


def complete(
    collective: Collective = Collective.ALL_REDUCE,
    *,
    gpus: int = 8,
    processes: int = 1,
    sizes: tuple[int, ...] = (8, 2**20, GIB),
    wrong: float | None = 0.0,
) -> dict[str, Any]:
    """The file of a run that came to its end."""
    bad = int(wrong or 0) * len(sizes)
    return {
        **configured(collective, gpus, processes),
        "results": [
            result(collective, gpus * processes, size, wrong=wrong if size else 0.0)
            for size in sizes
        ],
        "out_of_bounds": {"count": bad, "okay": "false" if bad else "true"},
        "average_bus_bandwidth": {"bandwidth": 12.5, "okay": "unchecked"},
        "errors": [""],
        "end_time": "2026-11-02 10:00:09",
    }


def read(said: object, collective: Collective = Collective.ALL_REDUCE) -> Run:
    return results.read_nccl_tests(json.dumps(said), collective)


def why(said: object) -> str:
    run = read(said)
    assert run.rows == ()
    assert run.failure is not None
    return run.failure


@pytest.mark.parametrize("collective", Collective)
def test_a_run_that_came_to_its_end_is_read_row_by_row(collective: Collective) -> None:
    run = read(complete(collective), collective)
    assert (run.tool, run.failure, run.nranks) == (Tool.NCCL_TESTS, None, 8)
    assert [row.bytes for row in run.rows] == [8, 2**20, GIB]
    assert (run.wrong, run.is_checked) == (0, True)
    last = run.rows[-1]
    in_place = collective in {Collective.ALL_REDUCE, Collective.BROADCAST}
    assert last.seconds == pytest.approx(((21 if in_place else 20) + GIB / 1e5) * 1e-6)
    assert last.algbw == pytest.approx(GIB / last.seconds / 1e9, rel=1e-4)
    assert last.busbw == pytest.approx(last.algbw * collective.factor(8), rel=1e-4)


def test_every_process_with_mpi_has_as_many_gpus_as_it_was_given() -> None:
    assert read(complete(gpus=1, processes=16)).nranks == 16
    assert read(complete(gpus=4, processes=2)).nranks == 8


@pytest.mark.parametrize("keep", [True, False], ids=["results", "no results"])
def test_nothing_of_the_environment_is_kept(keep: bool) -> None:
    said = complete() if keep else begun()
    for text in (json.dumps(said), json.dumps(said)[:-9], json.dumps(said)[:300]):
        run = results.read_nccl_tests(text, Collective.ALL_REDUCE)
        assert SECRET not in repr(dataclasses.asdict(run))


def test_wrong_values_of_both_columns_count() -> None:
    run = read(complete(wrong=3.0))
    assert [row.wrong for row in run.rows] == [6, 6, 6]
    assert run.wrong == 18


def test_a_collective_that_is_checked_one_way_counts_that_way() -> None:
    run = read(complete(Collective.ALLTOALL, wrong=3.0), Collective.ALLTOALL)
    assert [row.wrong for row in run.rows] == [3, 3, 3]


def test_rows_that_were_not_checked_say_so() -> None:
    run = read(complete(wrong=None))
    assert [row.wrong for row in run.rows] == [None, None, None]
    assert not run.is_checked


def test_a_row_that_moves_nothing_is_left_out() -> None:
    said = complete(Collective.ALL_GATHER, sizes=(0, 0, 128))
    assert [row.bytes for row in read(said, Collective.ALL_GATHER).rows] == [128]


def test_what_the_sum_says_against_the_rows_is_not_believed() -> None:
    said = complete()
    said["out_of_bounds"] = {"count": 5, "okay": "false"}
    assert why(said) == "it counts 5 values out of bounds, and 0 in its rows"


def test_a_real_boolean_is_not_what_nccl_tests_write() -> None:
    said = complete()
    said["out_of_bounds"]["okay"] = True
    assert "okay is neither" in why(said)


def test_a_run_that_failed_says_it_in_nccls_words_where_there_are_some() -> None:
    failed = configured(Collective.ALL_REDUCE, 8, 1)
    assert why(failed) == "it ended before its results"
    assert why(begun()) == "it ended before it had a GPU"
    failed["errors"] = ["ncclCommInitRank: unhandled cuda error"]
    assert why(failed).endswith("results: ncclCommInitRank: unhandled cuda error")


def test_results_without_the_sum_below_them_are_no_success() -> None:
    said = complete()
    del said["out_of_bounds"]
    assert why(said) == "it ended before its results"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no JSON from character 0 on: it was cut off"),
        (json.dumps(complete())[:500], "it was cut off"),
        ("# nccl-tests version 2.19.6", "no JSON from character 0"),
        ("[]", "the file is missing or no object"),
        ("{}", "it has no version"),
        ("[" * 100_000, "no JSON"),
        ('{"version": ' + "9" * 5000 + "}", "no JSON that a tool would write"),
        (json.dumps({**complete(), "version": 4}), "its format is 4, and 3 is what can be read"),
        (json.dumps({**complete(), "version": True}), "it has no version"),
        (json.dumps({**complete(), "results": []}), "it has no results"),
        (json.dumps({**complete(), "results": {}}), "results is missing or no list"),
        (json.dumps({**complete(), "config": None}), "config is missing or no object"),
    ],
)
def test_a_file_that_is_cut_off_or_another_has_no_rows(text: str, expected: str) -> None:
    run = results.read_nccl_tests(text, Collective.ALL_REDUCE)
    assert expected in (run.failure or "")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("time", "nan", "seconds is not a number"),
        ("time", 0.0, "took no time"),
        ("alg_bw", None, "algbw is not a number"),
        ("alg_bw", -1.0, "algbw is not a number"),
        ("bus_bw", True, "busbw is not a number"),
        ("bus_bw", 1e300, "busbw is not a number"),
        ("nwrong", 0.5, "nwrong is not a whole number"),
    ],
)
def test_a_value_that_cannot_be_spoils_the_run(name: str, value: object, expected: str) -> None:
    said = complete()
    said["results"][1]["in_place"][name] = value
    assert expected in why(said)
    assert why(said).startswith("result 1")


def test_a_busbw_of_another_number_of_ranks_is_not_believed() -> None:
    said = complete(gpus=8)
    said["config"]["ngpus"] = 2
    assert "and 2 ranks give" in why(said)


# ---- the line of train/bandwidth.py --------------------------------------------------------------


def line(collective: Collective, nranks: int, *sizes: int, **more: object) -> str:
    rows = []
    for size in sizes:
        algbw = size / 1e-3 / 1e9
        busbw = algbw * collective.factor(nranks)
        row = {"bytes": size, "seconds": 1e-3, "algbw": algbw, "busbw": busbw, "wrong": 0}
        rows.append(row)
    facts = {"script": "bandwidth", "ok": True, "backend": "gloo", "world_size": nranks}
    return json.dumps({**facts, str(collective): rows, "torch": "2.13.0", **more})


@pytest.mark.parametrize("collective", Collective)
def test_what_torch_measured_is_read_into_the_same_rows(collective: Collective) -> None:
    output = f"a warning\n{line(collective, 4, 64, GIB)}\nanother\n"
    run = results.read_torch(output, collective)
    assert (run.tool, run.nranks, run.failure) == (Tool.TORCH, 4, None)
    assert [row.bytes for row in run.rows] == [64, GIB]
    last = run.rows[-1]
    assert (last.seconds, last.algbw, last.wrong) == (1e-3, GIB / 1e6, 0)
    assert last.busbw == pytest.approx(last.algbw * collective.factor(4))


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("Traceback", "it wrote no results"),
        ('{"script": "all_reduce"}', "not that of train/bandwidth.py"),
        (line(Collective.BROADCAST, 2, 8), "it did not measure all_reduce"),
        (line(Collective.ALL_REDUCE, 2), "it has no results"),
        (line(Collective.ALL_REDUCE, 2, 8, world_size=0), "world_size is 0"),
        (line(Collective.ALL_REDUCE, 2, 8)[:-20], "it was cut off"),
        (line(Collective.ALL_REDUCE, 2, 2**20, world_size=8), "8 ranks give"),
    ],
)
def test_what_torch_did_not_measure_has_no_rows(output: str, expected: str) -> None:
    run = results.read_torch(output, Collective.ALL_REDUCE)
    assert run.rows == ()
    assert expected in (run.failure or "")


# ---- the factors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("collective", "two", "eight"),
    [
        (Collective.ALL_REDUCE, 1.0, 1.75),
        (Collective.ALL_GATHER, 0.5, 0.875),
        (Collective.REDUCE_SCATTER, 0.5, 0.875),
        (Collective.ALLTOALL, 0.5, 0.875),
        (Collective.BROADCAST, 1.0, 1.0),
        (Collective.SENDRECV, 1.0, 1.0),
    ],
)
def test_busbw_is_algbw_by_the_factor_of_nccl_tests(
    collective: Collective, two: float, eight: float
) -> None:
    assert collective.factor(2) == two
    assert collective.factor(8) == eight


def test_the_script_has_the_same_collectives_and_factors() -> None:
    # the host has no torch to import the script with
    tree = ast.parse((ROOT / "train/bandwidth.py").read_text())
    (table,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id == "COLLECTIVES"
        and isinstance(node.value, ast.Dict)
    )
    names = [ast.literal_eval(key) for key in table.keys if key is not None]
    assert names == list(Collective)
    (function,) = (
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "busbw_factor"
    )
    script: dict[str, Any] = {}
    exec(ast.unparse(function), script)  # noqa: S102  the script is our own
    for name in names:
        for nranks in (1, 2, 3, 8, 72):
            expected = Collective(name).factor(nranks)
            assert script["busbw_factor"](name, nranks) == pytest.approx(expected)


# ---- whatever a file holds -----------------------------------------------------------------------

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["nan", "true", "false", SECRET]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["time", "size", "okay", "nwrong"]), inner, max_size=3)
    ),
    max_leaves=6,
)
PLACES = st.sampled_from(
    [("config",), ("results",), ("out_of_bounds",), ("version",), ("config", "ngpus")]
    + [("results", 0, name) for name in ("size", "in_place", "out_of_place")]
    + [("results", 0, "in_place", name) for name in ("time", "alg_bw", "bus_bw", "nwrong")]
)


@given(place=PLACES, value=VALUES)
def test_any_value_in_any_place_gives_rows_that_hold_or_a_failure(
    place: tuple[str | int, ...], value: object
) -> None:
    said: Any = complete(sizes=(2**20,))
    at = said
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = value
    run = read(said)
    assert (run.failure is None) == bool(run.rows)
    for row in run.rows:
        assert row.bytes > 0
        assert row.seconds > 0
        assert row.busbw == pytest.approx(
            row.algbw * run.collective.factor(run.nranks), rel=1e-2, abs=1e-5
        )
    assert SECRET not in (run.failure or "")


@given(end=st.integers(0, len(json.dumps(complete())) - 1))
def test_a_file_cut_off_anywhere_is_a_failure_without_the_secret(end: int) -> None:
    run = results.read_nccl_tests(json.dumps(complete())[:end], Collective.ALL_REDUCE)
    assert run.failure is not None
    assert SECRET not in run.failure


@given(st.text())
def test_any_text_is_read_without_an_error(text: str) -> None:
    assert results.read_nccl_tests(text, Collective.SENDRECV).failure is not None
    assert results.read_torch(text, Collective.SENDRECV).failure is not None


@given(
    collective=st.sampled_from(Collective),
    gpus=st.integers(1, 8),
    processes=st.integers(1, 64),
    exponents=st.sets(st.integers(3, 34), min_size=1),
    wrong=st.sampled_from([None, 0.0, 2.0]),
)
def test_what_nccl_tests_write_is_read_back(
    collective: Collective,
    gpus: int,
    processes: int,
    exponents: set[int],
    wrong: float | None,
) -> None:
    sizes = tuple(2**exponent for exponent in sorted(exponents))
    said = complete(collective, gpus=gpus, processes=processes, sizes=sizes, wrong=wrong)
    run = read(said, collective)
    assert run.failure is None
    assert run.nranks == gpus * processes
    assert [row.bytes for row in run.rows] == list(sizes)
    assert run.is_checked == (wrong is not None)
    assert (run.wrong > 0) == bool(wrong)
