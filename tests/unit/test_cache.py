"""Where Muster keeps what it fetched."""

from pathlib import Path

import pytest

from muster import cache


@pytest.mark.parametrize(
    ("xdg", "expected"),
    [("/x", "/x/muster"), ("", "/home/me/.cache/muster"), (None, "/home/me/.cache/muster")],
)
def test_the_cache_is_where_the_user_keeps_caches(
    monkeypatch: pytest.MonkeyPatch, xdg: str | None, expected: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if xdg is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
    assert cache.folder() == Path(expected)
