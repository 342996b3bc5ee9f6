"""Limits on what a reader must hold, measured by ``scripts/crossings.py``. The numbers here may only fall.

``python scripts/crossings.py --list capabilities`` (or another measure) names the places that are counted.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from tests.rules import trees
from tests.rules.trees import crossings

ROOT = Path(__file__).resolve().parents[2]

AT_MOST = {
    "capabilities": 15,
    "world_size": 20,
    "device": 33,
    "introspection": 14,
    "Strategy": 35,
    "Run": 25,
    "batch loop": 10,
    "complex": 51,
    "very complex": 0,
    "type: ignore": 82,
    "any value": 211,
    "read: batch": 18,
    "read: save": 12,
    "read: sharding": 4,
}


@pytest.fixture
def sources() -> list[Any]:
    return trees.sources()


def test_every_measure_has_a_limit() -> None:
    assert list(AT_MOST) == list(crossings.MEASURES)


def test_nothing_is_asked_in_more_places(sources: Any) -> None:
    too_many = []
    for name, most in AT_MOST.items():
        places = crossings.MEASURES[name](sources)
        if len(places) > most:
            too_many += [f"{name}: {len(places)}, at most {most}", *places]
        elif len(places) < most:
            print(f"[tests/rules/test_crossings.py] {name!r} can be lowered to {len(places)}")
    assert too_many == []


def test_the_documented_walks_name_each_file_to_read(sources: Any) -> None:
    documented = crossings.documented((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    for walk in crossings.WALKS:
        missing = crossings.files_to_read(sources, walk).keys() - set(documented[walk])
        assert sorted(missing) == [], f"{walk}: run: python scripts/reading.py --write"


def test_reading_follows_imports_annotations_and_methods_and_stops_at_other_files(tmp_path: Path) -> None:
    files = {
        "loops/fit.py": (
            "from hasten.loops.run import Run\nfrom hasten.data import position\nfrom hasten._lib.names import near\n"
            "def train_epoch(run: Run):\n    data = run.data\n    helper(data.next_batch)\n    run.state_dict()\n"
            "    near()\n    def inner(other: 'Other'):\n        position.Position().state_dict()\n"
            "def helper(read):\n    if isinstance(read, Unused):\n        report()\n"
            "from hasten.report import Unused, report\n"
        ),
        "loops/run.py": "from hasten.data.stream import Stream\nclass Run:\n    data: Stream\n",
        "data/stream.py": "from hasten.data.deep import deep\nclass Base:\n    def next_batch(self): deep()\n"
        "class Stream(Base):\n    pass\n",
        "data/position.py": "class Position:\n    def __init__(self): pass\n",
        "data/deep.py": "def deep(): pass\n",
        "report/__init__.py": "from hasten.report.text import report\nclass Unused: pass\n",
        "report/text.py": "def report(): pass\n",
        "_lib/names.py": "def near(): pass\n",
    }
    for name, text in files.items():
        path = tmp_path / "src" / "hasten" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    found = crossings.files_to_read(crossings.read_sources(tmp_path), "batch")
    assert found == {
        "loops/fit.py": {"train_epoch", "helper"}, "data/stream.py": {"next_batch"}, "report/text.py": {"report"},
    }  # fmt: skip


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
