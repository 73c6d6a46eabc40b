"""docs/smoke.schema.json and the code that reads such JSON agree on every field."""

import functools
import json
import operator
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from tests.unit.conftest import ROOT
from tests.unit.dossiers import cluster, dossier, ill, written

from muster import dossier as dossier_
from muster.dossier import SCHEMA, Dossier
from muster.errors import ReportBroken

PATH = ROOT / "docs/smoke.schema.json"
WRITTEN = json.loads(PATH.read_text())
VALIDATOR = jsonschema.Draft202012Validator(WRITTEN)
KEPT = ("schema", "command")
FREE = (("run",), ("versions",), ("hashes",), ("facts",), ("links",))


def as_json(found: Dossier) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(found.to_dict()))
    return document


def small() -> dict[str, Any]:
    """Everything that the schema knows, once."""
    document = as_json(cluster(2))
    document["bandwidth"] = as_json(dossier())["bandwidth"][:1]
    document["bandwidth"][0]["run"]["rows"] = document["bandwidth"][0]["run"]["rows"][:1]
    document["steps"] = document["steps"][1:2]
    document["nodes"] = document["nodes"][:1]
    document["findings"] = document["findings"][:1]
    return document


SMALL = json.dumps(small())


def places(value: object, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value within `value`."""
    entries: Iterable[tuple[Any, object]] = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    for key, entry in entries:
        yield (*way, key)
        yield from places(entry, (*way, key))


def spoiled(way: tuple[Any, ...], value: object) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(SMALL)
    at(document, way[:-1])[way[-1]] = value
    return document


def is_read(folder: Path, document: object) -> bool:
    path = folder / "report.json"
    path.write_text(json.dumps(document))
    try:
        dossier_.read(path)
    except ReportBroken:
        return False
    return True


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(WRITTEN)
    assert WRITTEN["properties"]["schema"]["const"] == SCHEMA


@pytest.mark.parametrize("found", [dossier(), ill(), cluster(5)])
def test_what_is_written_is_valid_and_read_back_the_same(tmp_path: Path, found: Dossier) -> None:
    VALIDATOR.validate(as_json(found))
    assert dossier_.read(written(tmp_path / "report.json", found)) == found


@pytest.mark.parametrize("value", [None, True, 0, -1, 0.5, "", "text", [], {}, [0], {"a": 0}])
def test_schema_and_reader_refuse_the_same_values(tmp_path: Path, value: object) -> None:
    for way in places(json.loads(SMALL)):
        if way[0] not in KEPT:
            document = spoiled(way, value)
            assert VALIDATOR.is_valid(document) == is_read(tmp_path, document), way


def test_schema_and_reader_ask_for_every_field_and_no_other(tmp_path: Path) -> None:
    records = [way for way in [(), *places(json.loads(SMALL))] if is_record(way)]
    assert len(records) > 9
    for way in records:
        for change in ("less", "more"):
            document = json.loads(SMALL)
            record = at(document, way)
            if change == "more":
                record["unheard_of"] = 1
            else:
                record.pop(next(name for name in record if name not in KEPT))
            assert not VALIDATOR.is_valid(document), way
            assert not is_read(tmp_path, document), way


def is_record(way: tuple[Any, ...]) -> bool:
    """Whether fields stand there, and not names that the run chose."""
    return isinstance(at(json.loads(SMALL), way), dict) and way[-1:] not in FREE


def at(document: Any, way: tuple[Any, ...]) -> Any:  # noqa: ANN401
    return functools.reduce(operator.getitem, way, document)


def test_a_broken_report_is_named_by_the_place_of_the_fault(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(spoiled(("steps", 0, "outcome"), "fine")))
    with pytest.raises(ReportBroken, match=r"\$\.steps\[0\]\.outcome: 'fine' is not one of: pass"):
        dossier_.read(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not all of it is here"),
        ("[]", "no command smoke"),
        ('{"schema": 1, "command": "doctor"}', "no command smoke"),
        ("[" * 100_000, "nested too deeply"),
        ('{"command": "smoke", "schema": NaN}', "NaN is not JSON"),
        ("9" * 5000, "not all of it is here"),
    ],
)
def test_what_is_no_report_of_smoke_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ReportBroken, match=why):
        dossier_.read(path)


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400])
def test_a_number_beyond_all_is_refused(tmp_path: Path, number: str) -> None:
    path = tmp_path / "report.json"
    text = json.dumps(spoiled(("seconds",), 12345.75)).replace("12345.75", number)
    path.write_text(text)
    with pytest.raises(ReportBroken, match=r"\$\.seconds: is beyond what a number holds"):
        dossier_.read(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(ReportBroken):
        dossier_.read(path)
