"""Files are written whole or not at all; what is cached is read back, or counts as absent."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import pytest

from hasten._lib.files import (
    TEMPORARY,
    cache_folder,
    read_json,
    remember_json,
    remove_abandoned,
    replacing,
    write_atomically,
)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("old")

    def fail(file: IO[bytes]) -> None:
        file.write(b"half")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write_atomically(target, fail)
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_only_files_whose_writer_has_gone_are_removed(tmp_path: Path) -> None:
    left = tmp_path / f".a.txt.1{TEMPORARY}"
    left.touch()
    with replacing(tmp_path / "a.txt"):
        assert remove_abandoned(tmp_path) == [left]
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert remove_abandoned(tmp_path / "absent") == []


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HASTEN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "hasten"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert cache_folder("x") == Path.home() / ".cache" / "hasten" / "x"
    monkeypatch.setenv("HASTEN_CACHE", "~/chosen")
    assert cache_folder("x") == Path.home() / "chosen" / "x"


def test_cached_values_are_read_back_and_damaged_ones_are_absent(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.json"
    assert read_json(path) is None
    assert remember_json(path, {"workers": 2})
    assert read_json(path) == {"workers": 2}
    path.write_text('{"work')
    assert read_json(path) is None
    assert not remember_json(path / "below-a-file.json", 1)
