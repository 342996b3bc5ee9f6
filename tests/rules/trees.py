"""The sources as Python reads them: each is parsed once in a test process, for all rules that look through it."""

from __future__ import annotations

import ast
import functools
from typing import Any

from tests.programs import ROOT, load_script

crossings = load_script("crossings")


@functools.cache
def sources() -> list[Any]:
    """Return the files below ``src`` (``structure.Source``), which are not to be changed."""
    found: list[Any] = crossings.read_sources(ROOT)
    return found


@functools.cache
def _by_text() -> dict[str, Any]:
    return {source.text: source for source in sources()}


def parsed(text: str) -> ast.Module:
    """Return the tree of one of the sources, which is not to be changed, or of another text."""
    known = _by_text().get(text)
    return known.tree if known else ast.parse(text)


def nodes(text: str) -> list[ast.AST]:
    """Return all nodes of one of the sources or of another text, in the order of ``ast.walk``."""
    known = _by_text().get(text)
    return known.nodes if known else list(ast.walk(ast.parse(text)))
