"""Eject a program: keep the user's code unchanged, and put a plain training loop in hasten's place."""

from __future__ import annotations

import ast
import sys
from typing import Any

from hasten._lib.errors import make_error
from hasten_tools.eject import writer
from hasten_tools.eject.changes import Changes
from hasten_tools.eject.facts import Facts
from hasten_tools.eject.reader import UseReader
from hasten_tools.eject.source import TRAINER, EjectError, Source, loaded_names, rows_of, without_unused
from hasten_tools.eject.use import Use

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

    Raises:
        EjectError: the program needs something that a short loop does not have.

    """
    source = Source(text, name)
    unused = _unused_before(source)
    use = Use()
    comments: list[str] = []
    reader = UseReader(source, facts, use, comments)
    reader.read()
    # Lightning divides by the full size of a window also in the last, shorter one.
    use.as_lightning = any(not full.startswith("hasten") for full in source.imported.values())
    filled = writer.values(facts, use, stem)
    if facts.verbs_before:
        _check_before_fit(facts, use, filled, name)
    if filled["precision"] == "bf16-true":
        comments.append("bf16-true: hasten keeps the bits that weights lose here, so small updates differ")
    Changes(source, facts, use, reader.objects, filled).make()
    body = without_unused(source.result(), unused.__contains__)
    lines = writer.generated(filled)
    _check_names(body, lines, name)
    return _assembled(body, lines, comments, name)


def _check_before_fit(facts: Facts, use: Use, filled: dict[str, Any], name: str) -> None:
    """Refuse an evaluation before the fit where only the ejected fit prepares the model."""
    hooks = (use.model_hooks | use.user_hooks) & {"configure_model", "prepare_data", "setup"}
    why = f"the hook {min(hooks)}" if hooks else f"precision={filled['precision']!r}" if filled["weights"] else ""
    if why:
        verb = facts.verbs_before[0]
        what = f"{name}: it calls Trainer.{verb} before Trainer.fit, with {why}."
        raise make_error(EjectError, what, fix="Move that call behind fit.")


def with_one_branch(text: str, name: str, line: int) -> str:
    """Return a program in which only that branch of an ``if`` remains which makes the Trainer of a line.

    A branch that makes another Trainer ends the program instead: the ejected loop is not the one that it needs.
    """
    source = Source(text, name)
    made = [node for node in ast.walk(source.tree)
            if isinstance(node, ast.Call) and source.hasten_name(node.func) == TRAINER]  # fmt: skip
    before = rows_of(text)
    rows, ends = list(before), f'raise SystemExit("{name} was ejected with arguments that take the other branch")'
    for node in sorted((one for one in ast.walk(source.tree) if isinstance(one, ast.If)), key=lambda one: -one.lineno):
        for body, other in ((node.body, node.orelse), (node.orelse, node.body)):
            runs = any(call.lineno <= line <= (call.end_lineno or 0) for call in _nodes_within(body, made))
            if not runs or not _nodes_within(other, made):
                continue
            start, end = other[0].lineno - 1, other[-1].end_lineno
            if rows[start].lstrip().startswith("elif "):
                rows[start:end] = [" " * node.col_offset + "else:", " " * (node.col_offset + 4) + ends]
            elif not rows[start][: other[0].col_offset].strip():
                rows[start:end] = [" " * other[0].col_offset + ends]
    return "\n".join(rows) if rows != before else text


def _nodes_within(body: list[ast.stmt], nodes: list[ast.Call]) -> list[ast.Call]:
    inside = {id(each) for statement in body for each in ast.walk(statement)}
    return [node for node in nodes if id(node) in inside]


def _check_names(body: str, generated: list[str], name: str) -> None:
    """Refuse a program that defines a name which the generated part defines."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    own, new = (
        {node.name for node in ast.parse(text).body if isinstance(node, kinds)} for text in (body, "\n".join(generated))
    )
    if both := sorted(own & new):
        raise make_error(
            EjectError, f"{name} defines {', '.join(both)}, as the ejected loop does.", fix="Rename it before ejecting."
        )


def _assembled(body: str, generated: list[str], comments: list[str], name: str) -> str:
    """Put the generated part behind the imports of the program, and add what it imports."""
    text = "\n".join(generated)
    tree = ast.parse(body)
    start, end = _imports_at_top(tree)
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)) and node.lineno <= end]
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
    rows = rows_of(body)
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

    Imports with comments between them, or several on a line, are not changed: new ones stand before them, behind those
    of ``__future__``.
    """
    tree = ast.parse("\n".join(rows))
    if not _can_be_sorted(tree, rows):
        first = max((node.end_lineno or 0 for node in tree.body if _is_future(node)), default=0)
        return [*rows[:first], *added, *rows[first:]]
    entries: list[tuple[int, bool, str, str]] = []
    for node in [*tree.body, *ast.parse("\n".join(added)).body]:
        assert isinstance(node, (ast.Import, ast.ImportFrom))
        end = node.end_lineno or node.lineno
        text = "\n".join(rows[node.lineno - 1 : end]) if node in tree.body else ast.unparse(node)
        entries.append((*_import_order(node), text))
    lines: list[str] = []
    for index, entry in enumerate(sorted(entries)):
        lines += [""] if index and entry[0] != sorted(entries)[index - 1][0] else []
        lines.append(entry[3])
    return lines


def _can_be_sorted(tree: ast.Module, rows: list[str]) -> bool:
    plain = all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in tree.body)
    return plain and not any("#" in row for row in rows) and len({node.lineno for node in tree.body}) == len(tree.body)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _import_order(node: ast.Import | ast.ImportFrom) -> tuple[int, bool, str]:
    """Return what imports are sorted by: group, whether it is ``from ... import``, module."""
    if isinstance(node, ast.Import):
        module, is_local = node.names[0].name, False
    else:
        module, is_local = node.module or "", node.level > 0
    if _is_future(node):
        group = 0
    elif is_local:
        group = 3
    else:
        group = 1 if module.split(".")[0] in sys.stdlib_module_names else 2
    return group, isinstance(node, ast.ImportFrom), module.lower()


def _unused_before(source: Source) -> set[str]:
    """Return the names that the program imports or assigns without reading them: these lines are not changed."""
    names = loaded_names(source.tree)
    found: set[str] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found - names
