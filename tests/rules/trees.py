"""The sources as Python reads them: each is parsed once, for all rules that look through it."""

from __future__ import annotations

import ast
import functools


@functools.cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a source, which is not to be changed."""
    return ast.parse(source)
