from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.shared.errors import ModelError
from headrace.worker.models.cache import cache_folder, entry_folder, get_or_build


def build(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def test_the_folder_is_the_one_that_the_variable_names(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == cache
    monkeypatch.setenv("HEADRACE_CACHE", "~/models")
    assert cache_folder() == Path.home() / "models"
    monkeypatch.delenv("HEADRACE_CACHE")
    assert cache_folder().name == "headrace"


def test_entries_of_different_sources_are_different() -> None:
    assert entry_folder("a", "one") != entry_folder("a", "two")
    assert entry_folder("a", "one") == entry_folder("a", "one")


def test_an_entry_is_built_once() -> None:
    built: list[Path] = []

    def build_and_count(folder: Path) -> None:
        built.append(folder)
        build(folder)

    for _ in range(2):
        assert (get_or_build(entry_folder("a", "x"), build_and_count) / "config.json").is_file()
    assert len(built) == 1


def test_a_failed_build_leaves_nothing() -> None:
    def fail(folder: Path) -> None:
        build(folder)
        raise ModelError("no")

    entry = entry_folder("a", "x")
    with pytest.raises(ModelError, match="no"):
        get_or_build(entry, fail)
    assert list(entry.parent.iterdir()) == []


def test_of_several_that_build_at_once_all_get_the_entry() -> None:
    together = threading.Barrier(4)

    def build_together(folder: Path) -> None:
        build(folder)
        together.wait(timeout=10)

    entry = entry_folder("a", "x")
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: get_or_build(entry, build_together), range(4))) == {entry}
    assert list(entry.parent.iterdir()) == [entry]


def test_what_a_killed_process_left_is_removed_after_a_day() -> None:
    entry = entry_folder("a", "x")
    old, young = entry.parent / ".partial-old", entry.parent / ".partial-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (time.time() - 2 * 24 * 3600,) * 2)
    get_or_build(entry, build)
    assert not old.exists()
    assert young.exists()


def test_a_cache_that_can_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="another folder with HEADRACE_CACHE"):
        get_or_build(entry_folder("a", "x"), build)
