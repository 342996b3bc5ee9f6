"""Limits on what a reader must hold, measured by ``scripts/crossings.py``. The numbers here may only fall.

``python scripts/crossings.py --list capabilities`` (or another measure) names the places that are counted.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

AT_MOST = {
    "capabilities": 30,
    "world_size": 24,
    "device": 33,
    "introspection": 64,
    "Strategy": 35,
    "Run": 25,
    "batch loop": 10,
    "complex": 59,
    "very complex": 0,
    "type: ignore": 129,
}


def load_script() -> Any:
    """Import ``scripts/crossings.py``, which is in no package."""
    spec = importlib.util.spec_from_file_location("crossings", ROOT / "scripts" / "crossings.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["crossings"] = module
    spec.loader.exec_module(module)
    return module


crossings = load_script()


@pytest.fixture(scope="module")
def sources() -> Any:
    return crossings.read_sources(ROOT)


def test_every_measure_has_a_limit() -> None:
    assert list(AT_MOST) == list(crossings.MEASURES)


@pytest.mark.parametrize("name", AT_MOST)
def test_it_is_not_asked_in_more_places(name: str, sources: Any) -> None:
    places = crossings.MEASURES[name](sources)
    assert len(places) <= AT_MOST[name], "\n".join(["too many:", *places])
    if len(places) < AT_MOST[name]:
        print(f"[tests/rules/test_crossings.py] {name!r} can be lowered to {len(places)}")


@pytest.mark.parametrize(
    ("body", "number"),
    [
        ("pass", 1),
        ("if a and b or c: pass", 4),
        ("return [x for x in y if x] if y else None", 3),
        ("while a:\n        try: pass\n        except E: pass", 3),
        ("def inner():\n        if a: pass", 1),
    ],
)
def test_complexity_counts_branches_of_the_function_itself(body: str, number: int) -> None:
    function = ast.parse(f"def f():\n    {body}").body[0]
    assert crossings.complexity(function) == number
