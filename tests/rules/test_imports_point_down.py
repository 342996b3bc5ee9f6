"""Imports point down the layers, never up, and never in a circle."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rules.trees import nodes, parsed

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
# Rooms of the core with a private name that its other roots may import, as if they were in it. May only become fewer.
HELPERS = {"_lib"}


def layers() -> dict[str, int]:
    """Return the layer of each package and module, from the table in ``docs/architecture.md``."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return {name: int(layer) for layer, name in re.findall(r"^\| (\d+) \| `([\w.]+)` \|", page, re.MULTILINE)}


LAYER_OF_PACKAGE = layers()


def modules() -> dict[str, Path]:
    """Return every module of the package with its file."""
    found = {}
    for path in sorted(SOURCE.glob("hasten*/**/*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
ROOTS = {module for module in MODULES if "." not in module}


def package_of(module: str) -> str:
    """Return the package of a module as the table has it: in the core without its root."""
    root, _, rest = module.partition(".")
    room = rest.partition(".")[0]
    if root == "hasten":
        return room or "__init__"
    return f"{root}.{room}" if f"{root}.{room}" in LAYER_OF_PACKAGE else root


def layer_of(module: str) -> int | None:
    """Return the layer of a module; None if the table does not have its package."""
    return LAYER_OF_PACKAGE.get(package_of(module))


def _run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every node but those under ``if TYPE_CHECKING:``; what a function imports counts too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from _run_time_nodes(other)
            continue
        yield child
        yield from _run_time_nodes(child)


def imports_of(module: str, source: str, known: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, imported module of the package)."""
    package = module if MODULES.get(module, Path()).name == "__init__.py" else module.rpartition(".")[0]
    for node in _run_time_nodes(parsed(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in ROOTS:
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base] if base else parent)
            if base.split(".")[0] in ROOTS:
                for alias in node.names:
                    name = f"{base}.{alias.name}"
                    yield node.lineno, name if name in known else base


@functools.cache
def imports_in(module: str) -> list[tuple[int, str]]:
    return list(imports_of(module, MODULES[module].read_text(encoding="utf-8"), frozenset(MODULES)))


def test_the_table_of_layers_has_every_package_and_no_other() -> None:
    packages = {package_of(module) for module in MODULES} - (ROOTS - LAYER_OF_PACKAGE.keys())
    assert sorted(packages - LAYER_OF_PACKAGE.keys()) == [], "add them to the table in docs/architecture.md"
    assert sorted(LAYER_OF_PACKAGE.keys() - packages) == [], "take them out of docs/architecture.md"


def test_imports_point_down() -> None:
    wrong = []
    for module in sorted(MODULES.keys() - (ROOTS - LAYER_OF_PACKAGE.keys() - {"hasten"})):
        mine = layer_of(module)
        assert mine is not None, module
        for line, imported in imports_in(module):
            theirs = layer_of(imported)
            if theirs is not None and theirs > mine:
                wrong.append(f"{module}:{line} (layer {mine}) imports {imported} (layer {theirs})")
    assert wrong == []


def rooms_seen_by(room: str) -> set[str]:
    """Return the rooms that the modules of a room import; an empty name for the package's own face."""
    members = [module for module in MODULES if package_of(module) == room]
    assert members
    return {imported.partition(".")[2].partition(".")[0] for module in members for _, imported in imports_in(module)}


def test_the_front_doors_do_not_know_each_other() -> None:
    assert "fabric" not in rooms_seen_by("trainer")
    assert "trainer" not in rooms_seen_by("fabric")


@pytest.mark.parametrize("room", ["loops", "strategies", "precision", "logged_values"])
def test_nothing_below_the_front_doors_sees_them(room: str) -> None:
    assert not rooms_seen_by(room) & {"trainer", "fabric", ""}


def modules_in_core(*, core: bool) -> list[str]:
    """Return the modules of hasten itself, or those of the other roots."""
    return sorted(module for module in MODULES if (module.partition(".")[0] == "hasten") == core)


def test_the_core_imports_no_other_root() -> None:
    """Neither at the top of a module nor in a function; for type checkers it may."""
    assert [
        f"{module} imports {name}"
        for module in modules_in_core(core=True)
        for _, name in imports_in(module)
        if name.partition(".")[0] != "hasten"
    ] == []


@pytest.mark.parametrize("backend", ["hasten_deepspeed", "hasten_xla"])
def test_a_backend_imports_the_core_alone(backend: str) -> None:
    imported = {
        name.partition(".")[0]
        for module in MODULES
        if module.partition(".")[0] == backend
        for _, name in imports_in(module)
    }
    assert imported <= {"hasten", backend}


def private_imports(module: str) -> list[str]:
    """Return the private names and modules of other roots that a module imports."""
    root = module.partition(".")[0]
    found = []
    for node in nodes(MODULES[module].read_text(encoding="utf-8")):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] not in ROOTS - {root}:
            continue
        names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        found += [f"{node.module}: {name}" for name in names if name.startswith("_") and name not in HELPERS]
    return found


def test_other_roots_import_public_names_of_the_core() -> None:
    found = {module: private_imports(module) for module in modules_in_core(core=False)}
    assert {module: names for module, names in found.items() if names} == {}


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Return the names of one circle of the graph, or an empty list."""
    done: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        path.append(name)
        for following in sorted(graph.get(name, ())):
            if circle := visit(following):
                return circle
        done.add(path.pop())
        return []

    for name in sorted(graph):
        if circle := visit(name):
            return circle
    return []


def test_no_imports_in_a_circle() -> None:
    graph = {
        module: {name for _, name in imports_in(module) if name != module and name in MODULES}
        for module in MODULES
        if module != "hasten"  # The public names: nobody below may import them, see above.
    }
    assert circle_in(graph) == []
