"""Find the files that a reader opens to follow a walk, such as a training batch or a checkpoint that is saved.

    python scripts/reading.py          the files of each walk, with what is called there
    python scripts/reading.py ../main  of another checkout
    python scripts/reading.py --write  renew the lists in docs/architecture.md

A walk begins at a function and goes through the files that tell its story: ``WALKS`` names them. Each function there
that the first one calls or names is followed, and each file with a function or a class that they call or name has to be
read. Methods are found by annotations: ``run: Run`` and the fields of ``Run`` say what ``run.data.train.open()`` is.

Not counted are the small helpers in ``_lib``, which are understood by their names, and ``state_dict`` and
``load_state_dict``, PyTorch's protocol for the state of a part: it says enough where it is called, also on a part that
is made for this call alone, ``RandomGenerators().state_dict()``.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

from structure import ROOT, Source, read_sources

# Where each walk begins, and the files through which it is followed.
WALKS = {
    "batch": ("loops/fit.py", "train_epoch", {"loops/fit.py"}),
    "save": ("trainer/trainer.py", "Trainer.save_checkpoint", {"trainer/trainer.py", "loops/resume.py"}),
    "logged value": ("logged_values.py", "LoggedValues.record", {"logged_values.py"}),
    "restore": ("loops/resume.py", "RunState.restore", {"loops/resume.py"}),
    "Fabric.setup": ("fabric/fabric.py", "Fabric.setup", {"fabric/fabric.py"}),
}
_PROTOCOL = {"state_dict", "load_state_dict"}
_MADE_WITH = {"__init__", "__post_init__", "__enter__", "__exit__", "__call__"}
_PROPERTIES = {"property", "cached_property", "functools.cached_property"}


class Found(NamedTuple):
    """A function or a class, and the file that defines it."""

    file: str
    node: ast.FunctionDef | ast.ClassDef


class Member(NamedTuple):
    """A member of a class: its function, if it is a method or a property, and the class of its value, if known."""

    file: str
    function: ast.FunctionDef | None
    value: Found | None


@dataclass
class _File:
    defined: dict[str, ast.FunctionDef | ast.ClassDef] = field(default_factory=dict)
    # Local name: (module, name there).
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)


class Names:
    """What names and attributes mean in the files of a checkout, as far as imports and annotations say."""

    def __init__(self, sources: Iterable[Source]) -> None:
        self._files: dict[str, _File] = {}
        self._modules: dict[str, str] = {}
        for source in sources:
            path = source.path.as_posix()
            parts = [*(("hasten",) if source.root == "hasten" else ()), *source.path.with_suffix("").parts]
            self._modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
            self._files[path] = file = _File()
            for node in source.nodes:
                if isinstance(node, ast.ImportFrom) and node.module is not None:
                    file.imported |= {each.asname or each.name: (node.module, each.name) for each in node.names}
            for node in source.tree.body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    file.defined[node.name] = node

    def find(self, file: str, name: str) -> Found | None:
        """Return what a global name of a file means."""
        known = self._files[file]
        if name in known.defined:
            return Found(file, known.defined[name])
        return self._defined_in(*known.imported.get(name, ("", "")))

    def _defined_in(self, module: str, name: str) -> Found | None:
        for _ in range(4):  # A package passes on what its modules define.
            path = self._modules.get(module)
            if path is None:
                return None
            if name in self._files[path].defined:
                return Found(path, self._files[path].defined[name])
            module, name = self._files[path].imported.get(name, ("", ""))
        return None

    def find_in_module(self, file: str, module_name: str, name: str) -> Found | None:
        """Return what ``module_name.name`` means in a file that has imported a module."""
        module, there = self._files[file].imported.get(module_name, ("", ""))
        return self._defined_in(f"{module}.{there}", name)

    def class_of(self, file: str, annotation: ast.expr | None) -> Found | None:
        """Return the class that an annotation names, the first one of a union."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):
            return self.class_of(file, annotation.left) or self.class_of(file, annotation.right)
        if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "ReadOnly":
            return self.class_of(file, annotation.slice)
        found = self.find(file, annotation.id) if isinstance(annotation, ast.Name) else None
        return found if found is not None and isinstance(found.node, ast.ClassDef) else None

    def member(self, owner: Found, name: str) -> Member | None:
        """Return a member of a class or of one of its bases."""
        file, node = owner
        assert isinstance(node, ast.ClassDef)
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == name and not _is_overload(each):
                return Member(file, each, self.class_of(file, each.returns))
            if isinstance(each, ast.AnnAssign) and ast.unparse(each.target) == name:
                return Member(file, None, self.class_of(file, each.annotation))
            if isinstance(each, ast.Assign) and name in map(ast.unparse, each.targets):
                made = each.value.func if isinstance(each.value, ast.Call) else None
                return Member(file, None, self.class_of(file, made))
        for target, value, annotation, function in _assigned_to_self(node):
            if target == name:
                kind = self.class_of(file, annotation) or self.value_of(file, value, _parameters(function))
                return Member(file, None, kind)
        bases = (self.class_of(file, base) for base in node.bases)
        return next((found for base in bases if base is not None and (found := self.member(base, name))), None)

    def value_of(self, file: str, value: ast.expr | None, annotations: dict[str, ast.expr | None]) -> Found | None:
        """Return the class of a value: of a parameter, or of what is called to make it."""
        if isinstance(value, ast.Name):
            return self.class_of(file, annotations.get(value.id))
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
            called = self.find(file, value.func.id)
            if called is not None and isinstance(called.node, ast.FunctionDef):
                return self.class_of(called.file, called.node.returns)
            return called
        return None


def _parameters(function: ast.AST) -> dict[str, ast.expr | None]:
    found: dict[str, ast.expr | None] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.arguments):
            found |= {each.arg: each.annotation for each in (*node.posonlyargs, *node.args, *node.kwonlyargs)}
    return found


def _assignments(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None, ast.expr | None]]:
    """Yield (target, value, annotation) of each assignment, also of those of several at once."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            yield node.target, node.value, node.annotation
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from ((one, value, None) for one, value in zip(target.elts, node.value.elts, strict=False))
                else:
                    yield target, node.value, None


def _assigned_to_self(
    node: ast.ClassDef,
) -> Iterator[tuple[str, ast.expr | None, ast.expr | None, ast.FunctionDef]]:
    for function in node.body:
        if isinstance(function, ast.FunctionDef):
            for target, value, annotation in _assignments(function):
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    yield target.attr, value, annotation, function


class Uses:
    """What one function calls and names.

    Args:
        names: of the checkout.
        file: the file of the function.
        function: the function.
        owner: the class of which it is a method, or None.

    """

    def __init__(self, names: Names, file: str, function: ast.FunctionDef, owner: Found | None) -> None:
        self._names, self._file, self._function = names, file, function
        self._local = {name: names.class_of(file, note) for name, note in _parameters(function).items()}
        if owner is not None:
            self._local["self"] = owner
        for _ in range(2):  # A name may be made of one that a later line defines, in an inner function.
            for target, value, annotation in _assignments(function):
                if isinstance(target, ast.Name):
                    kind = names.class_of(file, annotation) or (None if value is None else self._class_of(value))
                    if kind is not None or target.id not in self._local:
                        self._local[target.id] = kind

    def _class_of(self, value: ast.expr) -> Found | None:
        if isinstance(value, ast.Name):
            return self._local.get(value.id)
        if isinstance(value, ast.Attribute):
            member = self._member(value)
            is_value = member is not None and (member.function is None or _is_property(member.function))
            return member.value if member is not None and is_value else None
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            member = self._member(value.func)
            return None if member is None else member.value
        return self._names.value_of(self._file, value, {})

    def _member(self, value: ast.Attribute) -> Member | None:
        owner = self._class_of(value.value)
        return None if owner is None else self._names.member(owner, value.attr)

    def all(self) -> Iterator[tuple[Found, Found | None]]:
        """Yield each function and class that is called or named, with the class of a method."""
        notes = {
            id(inner)
            for node in ast.walk(self._function)
            for note in (getattr(node, "annotation", None), getattr(node, "returns", None))
            if isinstance(note, ast.AST)
            for inner in ast.walk(note)
        }
        called = {id(node.func) for node in ast.walk(self._function) if isinstance(node, ast.Call)}
        called -= {
            id(node.value.func)
            for node in ast.walk(self._function)
            if isinstance(node, ast.Attribute) and node.attr in _PROTOCOL and isinstance(node.value, ast.Call)
        }
        for node in ast.walk(self._function):
            found: Found | None = None
            if isinstance(node, ast.Name) and id(node) not in notes and node.id not in self._local:
                found = self._names.find(self._file, node.id)
            elif isinstance(node, ast.Attribute):
                if isinstance(node.value, ast.Name) and node.value.id not in self._local:
                    found = self._names.find_in_module(self._file, node.value.id, node.attr)
                elif (member := self._member(node)) is not None and member.function is not None:
                    yield Found(member.file, member.function), self._class_of(node.value)
            # A class that is not called is a name for a test or an error, or an enumeration.
            if found is not None and (isinstance(found.node, ast.FunctionDef) or id(node) in called):
                yield found, None


def _is_overload(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(each) == "overload" for each in function.decorator_list)


def _is_property(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(each) in _PROPERTIES for each in function.decorator_list)


@functools.cache
def _names_in(sources: tuple[Source, ...]) -> Names:
    return Names(sources)


def files_to_read(sources: list[Source], walk: str) -> dict[str, set[str]]:
    """Return the files to read for a walk, each with the names of what is called or named there."""
    names = _names_in(tuple(sources))
    file, entry, through = WALKS[walk]
    owner_name, _, name = entry.rpartition(".")
    owner = names.find(file, owner_name) if owner_name else None
    first = names.find(file, name) if owner is None else None
    function = first.node if first is not None else names.member(owner, name).function
    waiting = [(file, function, owner)]
    found: dict[str, set[str]] = defaultdict(set)
    found[file].add(name)
    followed: set[int] = set()
    while waiting:
        file, function, owner = waiting.pop()
        if id(function) in followed:
            continue
        followed.add(id(function))
        for used, of in Uses(names, file, function, owner).all():
            if used.file.startswith("_lib/") or used.node.name in _PROTOCOL:
                continue
            found[used.file].add(used.node.name)
            if used.file not in through:
                continue
            if isinstance(used.node, ast.FunctionDef):
                waiting.append((used.file, used.node, of))
            else:
                methods = (each for each in used.node.body if isinstance(each, ast.FunctionDef))
                waiting += [(used.file, each, used) for each in methods if each.name in _MADE_WITH]
    return dict(found)


def documented(page: str) -> dict[str, list[str]]:
    """Return the files that ``docs/architecture.md`` lists for each walk, named as below ``hasten``."""
    blocks = re.findall(r"^<!-- read: (.+?) -->\n(.*?)(?:\n\n|\Z)", page, re.MULTILINE | re.DOTALL)
    return {name: re.findall(r"`hasten/([^`]+)`", text) for name, text in blocks}


def with_reading(page: str, sources: list[Source]) -> str:
    """Return ``docs/architecture.md`` with the files of now in place of those that it lists."""

    def block(found: re.Match[str]) -> str:
        files = ", ".join(f"`hasten/{path}`" for path in sorted(files_to_read(sources, found[1])))
        return f"<!-- read: {found[1]} -->\n" + textwrap.fill(f"Files to read: {files}.", 120, break_on_hyphens=False)

    return re.sub(r"^<!-- read: (.+?) -->(?:\n(?!\n).+)*", block, page, flags=re.MULTILINE)


def main() -> None:
    """Print the files to read for each walk, or write them into the documentation."""
    if sys.argv[1:] == ["--write"]:
        page = ROOT / "docs" / "architecture.md"
        page.write_text(with_reading(page.read_text(encoding="utf-8"), read_sources()), encoding="utf-8")
        return
    sources = read_sources(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)
    for walk in WALKS:
        files = files_to_read(sources, walk)
        print(f"{walk}: {len(files)} files")
        for path, used in sorted(files.items()):
            print(f"    {path:28} {', '.join(sorted(used))}")


if __name__ == "__main__":
    main()
