"""Read a program: where it uses hasten, and which parts of hasten it needs. The rest of its text is not changed."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeGuard

# The packages whose names a program may use.
PACKAGES = frozenset({"hasten", "lightning", "pytorch_lightning"})
MODEL, DATA, CALLBACK, TRAINER = "LightningModule", "LightningDataModule", "Callback", "Trainer"


class EjectError(Exception):
    """The program cannot be ejected; the message says why, and where."""


@dataclass
class ProgramCall:
    """A call in the program, and the arguments by name; ``spread`` is the text behind ``**``."""

    node: ast.Call
    positional: list[ast.expr]
    named: dict[str, ast.expr]
    spread: list[ast.expr]

    @classmethod
    def of(cls, node: ast.Call) -> ProgramCall:
        named = {one.arg: one.value for one in node.keywords if one.arg is not None}
        spread = [one.value for one in node.keywords if one.arg is None]
        return cls(node, list(node.args), named, spread)


@dataclass
class Source:
    """The text of a program, its syntax tree, and the changes to make."""

    text: str
    # Of its file, for messages.
    name: str
    tree: ast.Module = field(init=False)
    # Name in the program: full name in hasten.
    imported: dict[str, str] = field(default_factory=dict)
    _changes: list[tuple[int, int, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        try:
            self._bytes = self.text.encode()
            self.tree = ast.parse(self.text)
        except SyntaxError as error:
            raise EjectError(f"{self.name}, line {error.lineno}: {error.msg}.") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise EjectError(f"{self.name} cannot be read as Python: {error}.") from None
        self._starts = [0]
        for line in self._bytes.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._parents = {child: parent for parent in ast.walk(self.tree) for child in ast.iter_child_nodes(parent)}
        self.imports = [node for node in ast.walk(self.tree) if self._imports_hasten(node)]
        for node in self.imports:
            self._read_import(node)

    # -- what is where

    def _imports_hasten(self, node: ast.AST) -> TypeGuard[ast.Import | ast.ImportFrom]:
        if isinstance(node, ast.Import):
            return any(alias.name.split(".")[0] in PACKAGES for alias in node.names)
        return isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in PACKAGES

    def _read_import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                if alias.name == "*":
                    self.refuse(node, f"from {node.module} import * hides which names are used. Import them by name")
                self.imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif alias.name.split(".")[0] in PACKAGES:
                shown = alias.asname or alias.name.split(".")[0]
                self.imported[shown] = alias.name if alias.asname else alias.name.split(".")[0]

    def hasten_name(self, node: ast.AST | None) -> str | None:
        """Return the last part of a name that is hasten's, such as ``Trainer`` of ``L.Trainer``; else None."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.imported:
            return None
        return ".".join([self.imported[node.id], *reversed(parts)]).rsplit(".", 1)[-1]

    def is_type(self, node: ast.AST) -> bool:
        """Return whether a name of hasten's is one for annotations."""
        base = node
        while isinstance(base, ast.Attribute):
            base = base.value
        full = self.imported.get(base.id, "") if isinstance(base, ast.Name) else ""
        return ".types" in full or (isinstance(node, ast.Attribute) and ".types." in self.segment(node))

    def uses(self) -> Iterator[tuple[ast.expr, str]]:
        """Yield each longest expression that names something of hasten, with its last part."""
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Name, ast.Attribute)) and not isinstance(self._parents.get(node), ast.Attribute):
                # The parts of an attribute of a call are found when they are walked.
                name = self.hasten_name(node)
                if name is not None:
                    yield node, name
            elif isinstance(node, ast.Attribute):
                parent = self._parents[node]
                if self.hasten_name(node) is not None and self.hasten_name(parent) is None:
                    yield node, self.hasten_name(node) or ""

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._parents.get(node)

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the function or module around a node."""
        found: ast.AST | None = self._parents.get(node)
        while found is not None and not isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            found = self._parents.get(found)
        return found or self.tree

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the class around a node."""
        found: ast.AST | None = self._parents.get(node)
        while found is not None and not isinstance(found, ast.ClassDef):
            found = self._parents.get(found)
        return found

    def kind_of(self, node: ast.ClassDef, seen: frozenset[str] = frozenset()) -> str | None:
        """Return which class of hasten a class of the program derives from."""
        for base in node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            if (name := self.hasten_name(base)) is not None:
                return name
            if isinstance(base, ast.Name) and base.id not in seen:
                for other in self.classes():
                    if other.name == base.id and (kind := self.kind_of(other, seen | {base.id})) is not None:
                        return kind
        return None

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))

    def segment(self, node: ast.AST) -> str:
        """Return the text of a node."""
        start, end = self._span(node)
        return self._bytes[start:end].decode()

    def refuse(self, node: ast.AST, why: str) -> NoReturn:
        raise EjectError(f"{self.name}, line {getattr(node, 'lineno', '?')}: {why}.")

    # -- changes

    def _span(self, node: Any) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def replace(self, node: ast.AST, new: str) -> None:
        """Write something else in place of a node."""
        self._changes.append((*self._span(node), new.encode()))

    def remove_statement(self, node: ast.stmt) -> None:
        """Remove a statement with its line; the only one of a block becomes ``pass``."""
        parent = self._parents[node]
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(parent, block, None)
            if isinstance(statements, list) and statements == [node] and not isinstance(parent, ast.Module):
                self.replace(node, "pass")
                return
        start, end = self._starts[node.lineno - 1], self._starts[node.end_lineno or node.lineno]
        own_start, own_end = self._span(node)
        if self._bytes[start:own_start].strip() or self._bytes[own_end:end].partition(b"#")[0].strip():
            self.replace(node, "pass")  # Other statements are on its line.
        else:
            self._changes.append((start, end, b""))

    def replace_call(self, call: ProgramCall, function: str | None, arguments: Iterable[str]) -> None:
        """Write a call with other arguments, on one line if it fits."""
        function = self.segment(call.node.func) if function is None else function
        arguments = list(arguments)
        start, end = self._span(call.node)
        line_start = self._starts[call.node.lineno - 1]
        rest = self._bytes[end:].partition(b"\n")[0]
        before = self._bytes[line_start:start].decode()
        one_line = f"{function}({', '.join(arguments)})"
        if len(before) + len(one_line) + len(rest) > 100 and arguments:
            indent = " " * (len(before) - len(before.lstrip()))
            lines = "".join(f"{indent}    {argument},\n" for argument in arguments)
            one_line = f"{function}(\n{lines}{indent})"
        # What is nested in it was written as a whole already.
        self._changes = [change for change in self._changes if not (start <= change[0] and change[1] <= end)]
        self._changes.append((start, end, one_line.encode()))

    def changed(self, node: ast.AST) -> str:
        """Return the text of a node with the changes made within it so far."""
        start, end = self._span(node)
        return self._apply(start, end)

    def _apply(self, start: int, end: int) -> str:
        inside = sorted({change for change in self._changes if start <= change[0] and change[1] <= end})
        # Of nested changes, the outer one counts.
        outer = [
            one for one in inside if not any(two != one and two[0] <= one[0] and one[1] <= two[1] for two in inside)
        ]
        parts, at = [], start
        for first, last, new in outer:
            parts += [self._bytes[at:first], new]
            at = last
        return b"".join([*parts, self._bytes[at:end]]).decode()

    def result(self) -> str:
        """Return the program with all changes."""
        return self._apply(0, len(self._bytes))


def rows_of(text: str) -> list[str]:
    """Return the lines of a program as its syntax tree counts them: a form feed does not end one.

    Example::

        >>> rows_of("a = 1\\x0c\\r\\nb = 2\\n")
        ['a = 1\\x0c', 'b = 2', '']

    """
    return re.split("\r\n|\r|\n", text)


# -- names that nothing uses any more


def loaded_names(tree: ast.AST) -> set[str]:
    """Return the names that a program reads, also within annotations that are strings."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
            names.update(re.findall(r"[A-Za-z_]\w*", node.value) if " " not in node.value.strip() else [])
    return names


def without_unused(text: str, keep: Callable[[str], bool]) -> str:
    """Return a program without imports and local variables that only removed code used.

    ``keep`` says whether a name was unused before already.
    """
    for _ in range(5):
        source = Source(text, "the program")
        names = loaded_names(source.tree) | _exported(source.tree)

        def is_used(name: str, names: set[str] = names) -> bool:
            return name in names or keep(name)

        for node in ast.walk(source.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                remove_unused_imports(source, node, is_used)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and _is_unused_local(source, node, is_used):
                source.remove_statement(node)
        new = source.result()
        if new == text:
            break
        text = new
    return text


def remove_unused_imports(source: Source, node: ast.Import | ast.ImportFrom, is_used: Callable[[str], bool]) -> None:
    """Remove those names of an import statement that are not used; the statement, if none is left."""
    if isinstance(node, ast.ImportFrom) and node.module == "__future__":
        return
    used = [alias for alias in node.names if is_used((alias.asname or alias.name).split(".")[0])]
    if not used:
        source.remove_statement(node)
    elif len(used) < len(node.names):
        names = ", ".join(one.name if one.asname is None else f"{one.name} as {one.asname}" for one in used)
        origin = f"from {'.' * node.level}{node.module or ''} " if isinstance(node, ast.ImportFrom) else ""
        source.replace(node, f"{origin}import {names}")


def _is_unused_local(source: Source, node: ast.Assign | ast.AnnAssign, is_used: Callable[[str], bool]) -> bool:
    """Return whether an assignment gives a value without an effect to a local variable that nothing reads."""
    if isinstance(source.scope(node), ast.Module) or isinstance(source.parent(node), ast.ClassDef):
        return False
    name, value = assigned(node)
    return name is not None and not is_used(name) and _does_nothing(value)


def assigned(node: ast.AST) -> tuple[str | None, ast.expr | None]:
    """Return the variable that a statement assigns, and the value; None for other statements."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, node.value
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id, node.value
    return None, None


def _exported(tree: ast.Module) -> set[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return {str(one.value) for one in ast.walk(node.value) if isinstance(one, ast.Constant)}
    return set()


def _does_nothing(value: ast.expr | None) -> bool:
    """Return whether an expression has no effect but its value."""
    effects = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
    return value is None or not any(isinstance(node, effects) for node in ast.walk(value))


def is_builtin(name: str) -> bool:
    return hasattr(builtins, name)
