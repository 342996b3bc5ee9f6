"""Names, durations, optional packages, and what only the first process says."""

from __future__ import annotations

import importlib.metadata
import logging
import warnings
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.programs import ROOT, run_python
from tests.refusals import refused, warned
from torch import nn

from hasten._lib.durations import parse_duration
from hasten._lib.optional import install_line, installed, need
from hasten._lib.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn, warn_once


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("00:00:00:30", 30), ("01:02:03:04", 93784), ("90min", 5400), ("2h", 7200), ("1.5 hours", 5400), ("45s", 45),
     ("3d", 259200), ({"minutes": 2}, 120), (timedelta(seconds=7), 7)],
)  # fmt: skip
def test_durations_as_users_write_them(written: Any, seconds: float) -> None:
    assert parse_duration(written, argument="max_time") == timedelta(seconds=seconds)


@pytest.mark.parametrize("written", ["soon", "12", "1:2:3", "5 parsecs", {"minuets": 3}])
def test_durations_that_cannot_be_read(written: Any) -> None:
    with refused(ValueError, "max_time"):
        parse_duration(written, argument="max_time")


def test_a_missing_package_is_named_with_the_line_that_installs_it() -> None:
    assert installed("torch")
    assert not installed("no_such_package_at_all")
    with refused(ModuleNotFoundError, says="no_such_package_at_all"):
        need("no_such_package_at_all.part", purpose="Trick")
    assert need("json", purpose="Trick").dumps([1]) == "[1]"


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        ('{"url": "file://FOLDER", "dir_info": {"editable": true}}', "pip install 'FOLDER[plots]'"),
        ('{"url": "file://FOLDER/hasten.whl"}', "pip install 'hasten[plots] @ file://FOLDER/hasten.whl'"),
        (
            '{"url": "https://a.org/h.git", "vcs_info": {"vcs": "git", "commit_id": "1f"}}',
            "pip install 'hasten[plots] @ git+https://a.org/h.git@1f'",
        ),
        (None, f"pip install '{ROOT}[plots]'"),
    ],
)
def test_an_extra_is_installed_from_where_hasten_came(
    origin: str | None, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = None if origin is None else origin.replace("FOLDER", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    monkeypatch.chdir(tmp_path.parent)
    assert install_line("plots") == line.replace("FOLDER", str(tmp_path))
    monkeypatch.chdir(ROOT)
    if origin is None:
        assert install_line("plots") == "pip install '.[plots]'"


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_process_speaks(
    rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", rank)
    calls: list[int] = []
    rank_zero_only(calls.append)(1)
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.INFO):
        warnings.simplefilter("always")
        rank_zero_warn("careful")
        rank_zero_info("hello")
        for _ in range(3):
            warn_once(f"key {rank}", "only once")
    spoken = [str(warning.message) for warning in caught]
    assert spoken == ([] if rank else ["careful", "only once"])
    assert calls == ([] if rank else [1])
    assert ("hello" in caplog.text) is (rank == 0)


def test_a_warning_about_an_object_is_given_for_the_next_one_at_its_address() -> None:
    for _ in range(3):
        # Each one is freed before the next one is made, which then has its id.
        layer = nn.Identity()
        with warned(UserWarning, says="careful"):
            warn_once("of a layer", "careful", of=layer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_once("of a layer", "careful", of=layer)
        del layer


def test_a_name_that_is_near_is_given_once() -> None:
    done = run_python("-c", "import hasten; hasten.Trainr")
    last = done.stderr.splitlines()[-1]
    assert last == "AttributeError: module 'hasten' has no attribute 'Trainr'. Did you mean 'Trainer'?"
