"""The messages on the page of errors are those of the code, and the tests behind promises exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from hasten._lib.explain import remedy_for
from tests.rules.trees import nodes

ROOT = Path(__file__).parents[2]


def text_of(node: ast.AST) -> str | None:
    """Return a text of the source with ``{}`` for what is filled in; None for anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def said_in_turn(statements: list[ast.stmt]) -> list[str]:
    """Return what is assigned to ``what``, joined with the fix in one of the next two statements."""
    found = []
    for index, one in enumerate(statements):
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "what" and (what := text_of(one.value)):
            for node in (node for after in statements[index + 1 : index + 3] for node in ast.walk(after)):
                is_fix = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "fix"
                if (is_fix or (isinstance(node, ast.keyword) and node.arg == "fix")) and (fix := text_of(node.value)):
                    found.append(f"{what} {fix}")
    return found


def messages() -> str:
    """Return all texts of the package, one on a line, with ``{}`` for what is filled in and without backticks.

    What is wrong and its ``fix=`` are one text.
    """
    texts = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in nodes(path.read_text(encoding="utf-8")):
            if (text := text_of(node)) is not None:
                texts.append(text)
            if isinstance(node, ast.Call):
                parts = [
                    *map(text_of, node.args),
                    *(text_of(each.value) for each in node.keywords if each.arg == "fix"),
                ]
                texts.append(" ".join(part for part in parts if part is not None))
            for statements in (getattr(node, name, None) for name in ("body", "orelse")):
                if isinstance(statements, list):
                    texts += said_in_turn(statements)
    return "\n".join(texts).replace("`", "")


def test_each_message_of_the_page_is_one_of_the_code() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)
    known = messages()
    assert len(shown) > 50
    # Shorter ones would be found in other messages too.
    assert min(map(len, shown)) >= 17
    # Those of torch are known by what is told to write for them.
    assert [message for message in shown if message not in known and not remedy_for(message)] == []


def test_the_tests_behind_the_promises_exist() -> None:
    pages = ("reliability.md", "faults.md", "kills.md")
    page = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in pages)
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert len(named) > 30
    assert [name for path, name in named if f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")] == []
    for command in re.findall(r"`python (benchmarks/\w+\.py)`", page):
        assert (ROOT / command).exists(), command


def test_all_saved_figures_are_listed_with_their_dates() -> None:
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|[^|]+\| (\d{4}-\d\d-\d\d) \|[^|]+\|[^|]*/results/(\w+\.json)\)", page, re.MULTILINE)
    files = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert {name for _, name in rows} == set(files)
    for date, name in rows:
        recorded = re.search(r'"date": "(\d{4}-\d\d-\d\d)', files[name])
        assert recorded is None or recorded[1] == date, name
