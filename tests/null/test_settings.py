# Owns: tests of what the environment may say.
# Promises: a cache that cannot be one is refused with the variable's name and the remedy, a readable one is taken.
# Never: reads this machine's own settings.
"""core/settings.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ratoon.core import settings


@pytest.mark.parametrize("below", [".", "models", "models/ratoon"])
@pytest.mark.parametrize(("variable", "ending"), [("RATOON_CACHE", ""), ("XDG_CACHE_HOME", "/ratoon")])
def test_a_file_in_the_place_of_the_cache_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, ending: str, below: str
) -> None:
    file = tmp_path / "cache"
    file.write_text("")
    monkeypatch.delenv("RATOON_CACHE", raising=False)
    monkeypatch.setenv(variable, str(file / below))
    with pytest.raises(ValueError, match="set RATOON_CACHE to a directory") as told:
        settings.cache_dir()
    assert variable in str(told.value) and f"{file} is no directory" in str(told.value)


def test_a_cache_that_may_not_be_entered_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATOON_CACHE", str(tmp_path / "a" / "b"))
    monkeypatch.setattr(os, "access", lambda path, right: Path(path) != tmp_path)
    with pytest.raises(ValueError, match=f"no right to enter {tmp_path}; set RATOON_CACHE"):
        settings.cache_dir()


def test_a_cache_that_is_there_or_can_be_made_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path, tmp_path / "a" / "b"):
        monkeypatch.setenv("RATOON_CACHE", str(path))
        assert settings.cache_dir() == path
    assert not (tmp_path / "a").exists(), "only asked, not made"


@pytest.mark.parametrize(("value", "wanted"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_kernels_are_interpreted_where_triton_says_so(
    monkeypatch: pytest.MonkeyPatch, value: str, wanted: bool
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert settings.interprets_kernels() is wanted
