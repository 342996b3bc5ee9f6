"""Each package says in its ``__init__`` what it is for and what it must not import, and keeps to it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.rules.trees import parsed

SOURCE = Path(__file__).resolve().parents[2] / "src"
PACKAGES = sorted(path.parent for path in SOURCE.rglob("__init__.py"))
SENTENCE = re.compile(r"must not import ((?:``[\w.]+``(?:, | or )?)+)")


def docstring(package: Path) -> str:
    tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
    return " ".join((ast.get_docstring(tree) or "").split())


def imports(node: ast.AST) -> Iterator[str]:
    """Yield the names of modules that are imported, also inside functions; not under ``TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (name.name for name in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.module is not None, "relative imports are not used"
            yield child.module
            yield from (f"{child.module}.{name.name}" for name in child.names)
        else:
            yield from imports(child)


@cache
def imports_of(path: Path) -> frozenset[str]:
    return frozenset(imports(parsed(path.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.relative_to(SOURCE).as_posix())
def test_a_package_says_what_it_must_not_import_and_does_not(package: Path) -> None:
    sentence = SENTENCE.search(docstring(package))
    assert sentence is not None, f"Say in {package}/__init__.py what the package is for and what it must not import."
    forbidden = re.findall(r"``([\w.]+)``", sentence[1])
    missing = [name for name in forbidden if not list(SOURCE.glob(f"{name.replace('.', '/')}*"))]
    assert missing == []
    imported = {
        (path.relative_to(SOURCE).as_posix(), name) for path in package.rglob("*.py") for name in imports_of(path)
    }
    wrong = [
        f"{path} imports {name}"
        for path, name in sorted(imported)
        if any(name == other or name.startswith(f"{other}.") for other in forbidden)
    ]
    assert wrong == []
