"""The catalogue as it stands, and that a wrong one is refused."""

from pathlib import Path

import pytest

from muster.errors import CatalogueBroken
from muster.explain.catalogue import Logged, Pattern, Sure, read
from muster.explain.signs import DERIVED

GOOD = """
gave_up = ["DistNetworkError"]
harmless = ["a warning of no weight"]
[[fault]]
id = "one"
class = "tests"
title = "{thing} is broken"
sure = "likely"
see = ["the {thing} is broken"]
cause = "a cause"
remedy = "a remedy"
link = "https://example.com"
"""


def written(path: Path, text: str) -> Path:
    file = path / "faults.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_the_catalogue_holds_at_least_sixty_faults_over_all_classes() -> None:
    known = read()
    assert len(known.faults) >= 60
    assert {
        *("shared memory", "interfaces", "firewall", "IB not used", "IB errors", "P2P"),
        *("NVLink hardware", "NCCL versions", "driver", "rendezvous", "port in use", "DNS"),
        *("one GPU, many ranks", "unequal collectives", "MIG and vGPU", "fabric manager", "NVLS"),
        *("cuMem", "MNNVL", "out of memory", "DataLoader", "training code", "plugins"),
    } <= known.classes.keys()


def test_every_derived_fault_is_worked_out_and_nothing_else_is() -> None:
    derived = {fault.derived for fault in read().faults if fault.derived}
    assert derived == {*DERIVED, "rank raised"}


def test_a_pattern_keeps_what_stands_in_its_gaps() -> None:
    pattern = Pattern.of(Logged.WARN, "failed to extend {path} to {size} bytes, error: {}")
    found = pattern.match("Error: failed to extend /dev/shm/a to 99 bytes, error: No space")
    assert found == {"path": "/dev/shm/a", "size": "99"}


@pytest.mark.parametrize(
    "message", ["", "failed to extend /dev/shm/a", "bytes, error: failed to extend a to 9"]
)
def test_a_pattern_does_not_fit_a_line_without_all_its_pieces_in_order(message: str) -> None:
    pattern = Pattern.of(Logged.WARN, "failed to extend {path} to {size} bytes, error: {}")
    assert pattern.match(message) is None


def test_a_pattern_for_information_fits_at_the_start_of_a_message_only() -> None:
    pattern = Pattern.of(Logged.INFO, "Failed to initialize NET plugin {plugin}")
    assert pattern.match("Failed to initialize NET plugin x") == {"plugin": "x"}
    assert pattern.match("not so: Failed to initialize NET plugin x") is None


def test_a_word_of_each_pattern_is_in_every_line_that_fits_it() -> None:
    for fault in read().faults:
        for pattern in fault.patterns():
            line = "(x)".join(pattern.pieces)
            assert pattern.match(line) is not None, pattern.text
            assert pattern.keyword is None or pattern.keyword in f"x{line}y".split()


def test_a_good_catalogue_is_read(tmp_path: Path) -> None:
    known = read(written(tmp_path, GOOD))
    assert [fault.id for fault in known.faults] == ["one"]
    assert known["one"].sure is Sure.LIKELY


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('title = "{thing} is broken"', "", "fault one: title is missing"),
        ('sure = "likely"', 'sure = "perhaps"', "perhaps"),
        ('remedy = "a remedy"', 'remedy = "mend {other}"', "does not name other"),
        ('remedy = "a remedy"', 'remedy = "a remedy"\nhue = "red"', "no key hue"),
        ('see = ["the {thing} is broken"]', "see = []", "nothing shows it"),
        ('"the {thing} is broken"', '"{thing} is broken"', "begins with a gap"),
        ('"the {thing} is broken"', '"the {thing}{of} is broken"', "nothing between"),
        ('"the {thing} is broken"', '"the {thing:d} is broken"', "a gap is"),
        ('"the {thing} is broken"', '"a {thing} b"', "six characters"),
        ("https://example.com", "example.com", "no https address"),
        ('sure = "likely"', 'sure = "likely"\nremaining = ["a", "b"]', "no command that decides"),
        ('sure = "likely"', 'sure = "likely"\nversions = "2.26"', "a bound of versions"),
        ('sure = "likely"', 'sure = "likely"\nunless = ["short"]', "six characters"),
        ('sure = "likely"', 'sure = "likely"\ntells_more = ["two"]', "names no fault"),
        ('gave_up = ["DistNetworkError"]', "", "gave_up"),
        ('harmless = ["a warning of no weight"]', "", "harmless"),
        ("[[fault]]", "[[fault", "line"),
    ],
)
def test_a_wrong_catalogue_is_refused_with_what_is_wrong(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    assert old in GOOD
    with pytest.raises(CatalogueBroken, match=says):
        read(written(tmp_path, GOOD.replace(old, new)))


def test_two_faults_of_one_id_are_refused(tmp_path: Path) -> None:
    twice = GOOD + GOOD.partition("\n[[fault]]")[1] + GOOD.partition("\n[[fault]]")[2]
    with pytest.raises(CatalogueBroken, match="two faults one"):
        read(written(tmp_path, twice))


def test_a_fault_stands_within_its_versions_only(tmp_path: Path) -> None:
    bound = GOOD.replace('sure = "likely"', 'sure = "likely"\nversions = ">=2.26.3,<2.28"')
    fault = read(written(tmp_path, bound))["one"]
    stands = [fault.stands_for(v) for v in ((2, 26, 2), (2, 26, 3), (2, 27, 7), (2, 28, 3))]
    assert stands == [False, True, True, False]
