"""``docs/where_things_are.md`` and the other pages name files, links and arguments that exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import hasten

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "where_things_are.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])
MOST_GLOSSARY_TERMS = 25


def section(title: str) -> str:
    """Return the text below a heading, up to the next heading of the same level."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_named_on_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {f"src/{path}" for path in re.findall(r"`(?:src/)?(hasten(?:_\w+)?/[\w/]*(?:\.py|/))`", text)}
    named |= set(re.findall(r"`((?:tests|scripts|benchmarks|docs)/[\w/.]+)`", text))
    assert sorted(path for path in named if not (ROOT / path).exists()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not link.startswith("..") and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("front", [hasten.Trainer, hasten.Fabric])
def test_the_table_of_arguments_is_complete(front: type) -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| ([\w, ]+) \| .*`hasten/", section("Where an argument is implemented"), re.MULTILINE
    )
    in_table = {name for name, owners in rows if front.__name__ in owners.split(", ")}
    parameters = set(inspect.signature(front).parameters) - {"unknown"}
    assert sorted(parameters ^ in_table) == []


def test_the_glossary_is_short() -> None:
    terms = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", section("Glossary"), re.MULTILINE)
    assert 3 <= len(terms) - 2 <= MOST_GLOSSARY_TERMS
