"""The first table of docs/scaling.md: its lines are those that were planned, and strategies take them."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from hasten.resolve import runtime

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    """The rows of the page, as the script reads them."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return list(runpy.run_path(str(BENCHMARKS / "scaling.py"))["rows"]())
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_each_line_has_a_plan_that_fits(rows: list[Any]) -> None:
    found = json.loads((BENCHMARKS / "results" / "scaling.json").read_text(encoding="utf-8"))
    assert [list(row) for row in rows] == [[one[name] for name in rows[0]._fields] for one in found]
    assert all(one["fits"] for one in found)


def test_each_line_divides_its_devices(rows: list[Any]) -> None:
    assert len(rows) > 8
    for row in rows:
        given = row.arguments
        if "strategy" in given:
            nodes = given.get("num_nodes", 1)
            made = runtime(accelerator="cpu", devices=given["devices"], num_nodes=nodes, strategy=given["strategy"])
            assert made.strategy.world_size == row.gpus
