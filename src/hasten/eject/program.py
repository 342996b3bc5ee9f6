"""Eject a program: keep the user's code as it is written, and put a plain training loop in hasten's place."""

from __future__ import annotations

import ast
import sys

from hasten.eject import writer
from hasten.eject.changes import Changes
from hasten.eject.facts import Facts
from hasten.eject.reader import UseReader
from hasten.eject.source import EjectError, Source, loaded_names, without_unused
from hasten.eject.writer import Use

# What makes or replaces the Trainer of a program: the program is refused before it runs.
_OTHER_LOOPS = {
    "Fabric": "Fabric leaves the loop to the program, which has one already",
    "LightningCLI": "LightningCLI makes model and Trainer from the command line. Make them in the program",
}


def check(text: str, name: str) -> None:
    """Refuse a program in which there is no loop to write, without running it.

    Raises:
        EjectError: the message says why, and where.

    """
    source = Source(text, name)
    for node, used in source.uses():
        if used in _OTHER_LOOPS:
            source.refuse(node, _OTHER_LOOPS[used])
    for other in ast.walk(source.tree):
        if isinstance(other, ast.Import) and any(alias.name.split(".")[0] == "ray" for alias in other.names):
            source.refuse(other, "Ray starts its processes. Eject the function that trains, as a program for torchrun")
    attributes = {node.attr for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)}
    if not attributes & {"fit", "eject"}:
        raise EjectError(f"{name}: it does not call Trainer.fit: there is no loop to write.")


def ejected(text: str, name: str, facts: Facts, *, stem: str) -> str:
    """Return the plain program.

    Args:
        text: the program.
        name: of its file, for messages and the first lines.
        facts: what its first fit has.
        stem: names the folder for checkpoints and logs.

    Raises:
        EjectError: the program needs something that a short loop does not have.

    """
    source = Source(text, name)
    unused = _unused_before(source)
    use = Use()
    comments: list[str] = []
    UseReader(source, facts, use, comments).read()
    # Lightning divides by the full size of a window also in the last, shorter one.
    use.as_lightning = any(not full.startswith("hasten") for full in source.imported.values())
    filled = writer.values(facts, use, stem)
    if filled["precision"] == "bf16-true":
        comments.append("bf16-true: hasten keeps the bits that weights lose here, so small updates differ")
    Changes(source, facts, use, comments, filled).make()
    body = without_unused(source.result(), unused.__contains__)
    lines = writer.generated(filled)
    _check_names(body, lines, name)
    return _assembled(body, lines, comments, name)


def _check_names(body: str, generated: list[str], name: str) -> None:
    """Refuse a program that defines a name which the generated part defines."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    own, new = (
        {node.name for node in ast.parse(text).body if isinstance(node, kinds)} for text in (body, "\n".join(generated))
    )
    if both := sorted(own & new):
        raise EjectError(f"{name} defines {', '.join(both)}, as the ejected loop does. Rename it before ejecting.")


def _assembled(body: str, generated: list[str], comments: list[str], name: str) -> str:
    """Put the generated part behind the imports of the program, and add what it imports."""
    text = "\n".join(generated)
    tree = ast.parse(body)
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    present = {alias.asname or alias.name for node in imports for alias in node.names}
    needed = writer.used_by(text) | ({"SimpleNamespace"} if "SimpleNamespace(" in body else set())
    needed |= {"Any"} & loaded_names(tree)
    lines = {
        "dist": "import torch.distributed as dist",
        "Any": "from typing import Any",
        "Path": "from pathlib import Path",
        "SimpleNamespace": "from types import SimpleNamespace",
    }
    added = [lines.get(one, f"import {one}") for one in sorted(needed - present)]
    notes = [f"# {note}." for note in comments]
    banner = [f"# -- the training loop of {name}: what hasten did for it", *notes]
    rows = body.splitlines()
    start, end = _imports_at_top(tree)
    block = _sorted_imports(rows[start:end], added)
    tail = rows[end:]
    while tail and not tail[0].strip():
        tail.pop(0)
    parts = [*rows[:start], *([""] if start and rows[start - 1].strip() else []), *block, "", *banner, "", ""]
    whole = [*parts, *generated, "", "", "# -- the program", "", "", *tail]
    return "\n".join(whole).rstrip() + "\n"


def _imports_at_top(tree: ast.Module) -> tuple[int, int]:
    """Return which lines have the imports at the top of a program: the index of the first, and behind the last."""
    start = end = 0
    for index, node in enumerate(tree.body):
        is_text = index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            start = start or node.lineno
            end = node.end_lineno or node.lineno
        elif is_text:
            end = node.end_lineno or node.lineno
        else:
            break
    return (start - 1 if start else end), end


def _sorted_imports(rows: list[str], added: list[str]) -> list[str]:
    """Return import lines in groups: the future, the standard library, others.

    Where comments stand between them they stay as they are.
    """
    tree = ast.parse("\n".join(rows))
    if any("#" in row for row in rows) or not all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in tree.body):
        return [*added, *rows]
    entries: list[tuple[int, bool, str, str]] = []
    for node in [*tree.body, *ast.parse("\n".join(added)).body]:
        is_from = isinstance(node, ast.ImportFrom)
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name  # type: ignore[attr-defined]
        local = isinstance(node, ast.ImportFrom) and node.level > 0
        first = module.split(".")[0]
        group = 0 if module == "__future__" else 3 if local else 1 if first in sys.stdlib_module_names else 2
        end = node.end_lineno or node.lineno
        text = "\n".join(rows[node.lineno - 1 : end]) if node in tree.body else ast.unparse(node)
        entries.append((group, is_from, module.lower(), text))
    lines: list[str] = []
    for index, entry in enumerate(sorted(entries)):
        lines += [""] if index and entry[0] != sorted(entries)[index - 1][0] else []
        lines.append(entry[3])
    return lines


def _unused_before(source: Source) -> set[str]:
    """Return the names that the program imports or assigns without reading them: they stay as they are."""
    names = loaded_names(source.tree)
    found: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found - names
