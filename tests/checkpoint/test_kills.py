"""Runs that are killed at random moments leave whole checkpoints, and resume as if nothing had happened."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.programs import ROOT, run_imported


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the runs from one process")
def test_killed_runs_leave_whole_checkpoints_and_resume_bit_exact(tmp_path: Path) -> None:
    found = []
    # `make kills` has the other kinds, and more kills.
    for kills, only in ((18, "one process"), (2, "two processes, sharded folders, saved in the background")):
        figures, words = tmp_path / f"{kills}.json", ("--kills", str(kills), "--only", only, "--json")
        done = run_imported(ROOT / "benchmarks" / "kills.py", *words, figures, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        found += json.loads(figures.read_text()).values()
    kills = sum(kind["kills"] for kind in found)
    assert kills >= 20
    assert sum(kind["torn"] for kind in found) == 0
    assert sum(kind["resumed_exactly"] for kind in found) == kills
    # If the kills missed the saves, this would show little.
    assert sum(kind["within_a_save"] for kind in found) > 2
