"""Every test reads its own words, not those of pytest, and has the same seed."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["program.py"])
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("COLUMNS", "200")
