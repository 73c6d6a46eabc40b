"""Sizes as Docker spells them."""

import pytest

from muster import size
from muster.errors import NotASize


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("512b", 512),
        ("2k", 2048),
        ("64m", 64 * 2**20),
        ("64M", 64 * 2**20),
        ("64MB", 64 * 2**20),
        ("64MiB", 64 * 2**20),
        (" 1 g ", 2**30),
        ("1.5g", 3 * 2**29),
        ("2t", 2**41),
    ],
)
def test_reads_sizes_in_binary_units(text: str, count: int) -> None:
    assert size.parse(text) == count


@pytest.mark.parametrize(
    "text",
    [
        *("", "banana", "g", "-1g", "+1g", "1x", "1gg", "1.g", ".5g", "1,5g", "1e9", "1g 1g"),
        *("0", "0g", "0.5b", "٣g", "nan", "inf", "8388608t", "9" * 400 + "g"),
    ],
)
def test_refuses_what_is_no_size_and_shows_it(text: str) -> None:
    with pytest.raises(NotASize) as caught:
        size.parse(text)
    assert repr(text) in caught.value.what


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (8, "8 B"),
        (2**10 - 1, "1023 B"),
        (64 * 2**10, "64 KiB"),
        (64 * 2**20, "64 MiB"),
        (2**30, "1 GiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**30 - 2**20, "1023 MiB"),
        (2**40, "1024 GiB"),
    ],
)
def test_shows_memory_in_binary_units(count: int, text: str) -> None:
    assert size.binary(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(999_000_000, "999 MB"), (10**9, "1 GB"), (1_234_567_890, "1.23 GB")]
)
def test_shows_images_in_decimal_units_as_docker_does(count: int, text: str) -> None:
    assert size.decimal(count) == text
