"""What differs under Lightning's names is decided in one place, and the documentation lists all of it.

``python -m tests.rules.test_conventions`` writes the table of ``docs/differences.md`` again.
"""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

from hasten.elsewhere import conventions
from hasten.elsewhere.conventions import HASTEN, Conventions
from hasten_lightning.conventions import LIGHTNING
from tests.rules.trees import sources

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "differences.md"
TABLE = re.compile(r"(<!-- decisions: .* -->\n).*(<!-- end of decisions -->)", re.DOTALL)
# A new decision needs a reason that a user of either name would accept.
AT_MOST = 30


def page() -> str:
    table = "\n".join(["", *conventions.table(), "", ""])
    return TABLE.sub(lambda found: f"{found[1]}{table}{found[2]}", PAGE.read_text(encoding="utf-8"))


def test_the_page_lists_the_decisions() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.rules.test_conventions"


def test_there_are_few_decisions_and_the_two_sides_differ_in_each() -> None:
    names = [each.name for each in fields(Conventions)]
    assert len(names) <= AT_MOST
    assert [name for name in names if getattr(HASTEN, name) == getattr(LIGHTNING, name)] == []


def test_each_decision_is_read_somewhere_and_nothing_asks_which_side_it_is() -> None:
    read: set[str] = set()
    asks: list[str] = []
    for source in sources():
        attributes = {node.attr for node in source.nodes if isinstance(node, ast.Attribute)}
        names = attributes | {node.id for node in source.nodes if isinstance(node, ast.Name)}
        read |= attributes
        own = source.path.name == "conventions.py" or source.root == "hasten_lightning"
        if not own and names & {"HASTEN", "LIGHTNING"}:
            asks.append(source.path.name)
    assert {each.name for each in fields(Conventions)} <= read
    # The advisor starts the program once more under the same names.
    assert asks == ["auto.py"]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
