"""Rewrite the imports of a program: what ``hasten migrate`` does to one file. Needs libcst."""

# ruff: noqa: N802 - libcst names the methods after its classes

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, PositionProvider, QualifiedNameProvider, QualifiedNameSource

from hasten._lib.errors import is_absent
from hasten._lib.lazy import homes_of
from hasten.compat.modules import ROOTS, TABLE, relative
from hasten.compat.names import alternative_to

_FAMILIES = {
    package: homes_of(package) for package in ("hasten.callbacks", "hasten.demos", "hasten.loggers", "hasten.profilers")
}
# Reached as attributes after `import hasten`.
_PACKAGES = frozenset(_FAMILIES) | {
    f"hasten.{name}" for name in ("accelerators", "cli", "data", "plugins", "strategies", "tuner", "utilities")
}
DOTTED = re.compile(rf"(?<![\w./-])(?:{'|'.join(ROOTS)})(?:\.[A-Za-z_]\w*)+")


def place_of(module: str, name: str) -> tuple[str, str] | None:
    """Return (module of hasten, name there) for a name in a module of Lightning, or None.

    Example::

        >>> place_of("lightning.pytorch.callbacks.early_stopping", "EarlyStopping")
        ('hasten.callbacks', 'EarlyStopping')

    """
    found = TABLE.get(relative(module) or "", {}).get(name)
    if found is None or found[0] == "hasten.compat.names":
        return None
    home, there = found
    utilities = homes_of("hasten.utilities")
    if name in utilities and (home.startswith("hasten.utilities") or utilities[name] == found):
        return "hasten.utilities", name
    for family, names in _FAMILIES.items():
        if names.get(name) == found and there == name:
            return family, name
    return home, there


def can_be_made(place: tuple[str, str]) -> bool:
    """Return whether a name of hasten is more than a class that can only be imported."""
    module, name = place
    return not is_absent(getattr(importlib.import_module(module or name), name, None))


def module_for(module: str) -> str | None:
    """Return the module of hasten that has all names of a module of Lightning, or None.

    Example::

        >>> module_for("lightning.pytorch"), module_for("pytorch_lightning.trainer.states")
        ('hasten', 'hasten.utilities')

    """
    place = relative(module)
    if place in ("", "pytorch"):
        return "hasten"
    names = TABLE.get(place or "", {})
    homes = {place_of(module, name) for name in names if not name.startswith("__")}
    modules = {found[0] for found in homes if found is not None}
    same = all(found is not None and found[1] in names for found in homes)
    return modules.pop() if len(modules) == 1 and same else None


def as_attribute(base: str, place: tuple[str, str]) -> str | None:
    """Return the attribute path to a name from a variable that holds the module ``base``, or None.

    Example::

        >>> as_attribute("hasten", ("hasten.callbacks", "Timer")), as_attribute("hasten", ("hasten.optim", "parse"))
        ('callbacks.Timer', None)

    """
    module, name = place
    if module == base:
        return name
    return f"{module.removeprefix('hasten.')}.{name}" if base == "hasten" and module in _PACKAGES else None


def rewritten(dotted: str) -> str | None:
    """Return the name in hasten for a dotted name of Lightning, or None.

    Example::

        >>> rewritten("pytorch_lightning.callbacks.ModelCheckpoint")
        'hasten.callbacks.ModelCheckpoint'
        >>> rewritten("lightning.pytorch.Trainer.fit")
        'hasten.Trainer.fit'

    """
    words = dotted.split(".")
    for end in range(len(words) - 1, 0, -1):
        module = ".".join(words[:end])
        if relative(module) in TABLE:
            place = place_of(module, words[end])
            if place is not None:
                return ".".join([*place, *words[end + 1 :]])
            break
    return module_for(dotted) if relative(dotted) in TABLE else None


@dataclass
class Rewritten:
    """A rewritten file.

    Args:
        data: its bytes.
        by_hand: (line, what to do) for what could not be rewritten.

    """

    data: bytes
    by_hand: list[tuple[int, str]] = field(default_factory=list)


def python(data: bytes) -> Rewritten:
    """Rewrite a Python file; everything else in it stays as it is.

    Args:
        data: the file.

    Raises:
        ValueError: it cannot be parsed as Python.

    """
    if not any(root.encode() in data for root in ROOTS):
        return Rewritten(data)
    try:
        module = cst.parse_module(data)
    except (cst.ParserSyntaxError, UnicodeDecodeError, LookupError) as error:
        line = getattr(error, "raw_line", 1)
        raise ValueError(f"line {line}: it cannot be read as Python") from None
    if module.bytes != data:
        raise ValueError("line 1: its encoding would not survive: rewrite it by hand")
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    plan = _Plan(wrapper)
    wrapper.visit(plan)
    plan.collect_uses = True
    wrapper.visit(plan)
    changed = module.visit(_Change(plan))
    return Rewritten(changed.bytes, sorted(set(plan.by_hand)))


def yaml(data: bytes) -> Rewritten:
    """Rewrite the class paths in a YAML file; comments and order stay."""
    by_hand: list[tuple[int, str]] = []
    lines = data.decode("utf-8").split("\n")
    for number, line in enumerate(lines, 1):

        def replace(match: re.Match[str], number: int = number) -> str:
            new = rewritten(match.group())
            if new is None:
                by_hand.append((number, _advice(match.group())))
                return match.group()
            return new

        lines[number - 1] = DOTTED.sub(replace, line)
    return Rewritten("\n".join(lines).encode("utf-8"), by_hand)


def _advice(dotted: str) -> str:
    advice = alternative_to(relative(dotted) or "") or "hasten has no such name."
    return f"{dotted}: {advice}"


def _expression(dotted: str) -> Any:
    first, *rest = dotted.split(".")
    node: Any = cst.Name(first)
    for word in rest:
        node = cst.Attribute(node, cst.Name(word))
    return node


class _Plan(cst.CSTVisitor):  # type: ignore[misc,unused-ignore]
    """Collects replacements: first for the imports, then for the uses of the names they bind."""

    METADATA_DEPENDENCIES = (QualifiedNameProvider, PositionProvider)

    def __init__(self, wrapper: Any) -> None:
        super().__init__()
        self.collect_uses = False
        self.nodes: dict[Any, Any] = {}
        # `from` statements: (module of hasten, whether the module itself is imported) -> aliases.
        self.statements: dict[Any, list[Any]] = {}
        self.by_hand: list[tuple[int, str]] = []
        # Name in the program -> (module of hasten it is bound to, new name).
        self.bound: dict[str, tuple[str, str]] = {}
        self._seen: set[Any] = set()

    def _line(self, node: Any) -> int:
        return int(self.get_metadata(PositionProvider, node).start.line)

    def _hand(self, node: Any, text: str) -> None:
        self.by_hand.append((self._line(node), text))

    # -- imports

    def visit_Import(self, node: Any) -> bool:
        if self.collect_uses:
            return False
        names, kept = [], set()
        for alias in node.names:
            name = get_full_name_for_node(alias.name)
            if name is None or relative(name) is None:
                names.append(alias)
                continue
            if relative(name) not in TABLE:
                self._hand(node, _advice(name))
                return False
            if alias.asname is None:
                # Binds only the first word.
                self.bound[name.partition(".")[0]] = ("hasten", "hasten")
                if "hasten" in kept:
                    continue
                kept.add("hasten")
                names.append(alias.with_changes(name=cst.Name("hasten")))
                continue
            target = module_for(name)
            if target is None:
                self._hand(node, f"{name}: its names are in several modules of hasten: import each one by itself.")
                return False
            asname = get_full_name_for_node(alias.asname.name)
            self.bound[str(asname)] = (target, str(asname))
            names.append(alias.with_changes(name=_expression(target)))
        if [alias.name for alias in names] != [alias.name for alias in node.names]:
            names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            self.nodes[node] = node.with_changes(names=names)
        return False

    def visit_ImportFrom(self, node: Any) -> bool:
        if self.collect_uses or node.module is None or node.relative:
            return False
        module = get_full_name_for_node(node.module)
        if module is None or relative(module) is None:
            return False
        if relative(module) not in TABLE:
            self._hand(node, _advice(module))
            return False
        if isinstance(node.names, cst.ImportStar):
            target = module_for(module)
            if target is None:
                self._hand(node, f"from {module} import *: import the names one by one.")
            else:
                self.nodes[node] = node.with_changes(module=_expression(target))
            return False
        groups: dict[str, list[Any]] = {}
        for alias in node.names:
            name = alias.name.value
            # The name in the program stays, whatever it is called in hasten.
            given = get_full_name_for_node(alias.asname.name) if alias.asname is not None else name
            place = place_of(module, name)
            if place is None and relative(f"{module}.{name}") in TABLE:
                target = module_for(f"{module}.{name}")
                if target is not None:
                    self.bound[str(given)] = (target, str(given))
                    parent, _, last = target.rpartition(".")
                    place = (parent, last)
            if place is None:
                self._hand(node, _advice(f"{module}.{name}"))
                groups.setdefault(module, []).append(alias)
                continue
            if not can_be_made(place):
                self._hand(node, f"{name} can be imported, but not made, in this version of hasten.")
            home, there = place
            if there != given:
                alias = alias.with_changes(
                    name=cst.Name(there), asname=alias.asname or cst.AsName(cst.Name(str(given)))
                )
            groups.setdefault(home, []).append(alias)
        if list(groups) == [module]:
            return False
        if len(groups) == 1 and "" not in groups:
            ((home, aliases),) = groups.items()
            self.nodes[node] = node.with_changes(module=_expression(home), names=aliases)
            return False
        self.statements[node] = [self._statement(home, aliases) for home, aliases in sorted(groups.items())]
        return False

    def _statement(self, home: str, aliases: list[Any]) -> Any:
        plain = [
            cst.ImportAlias(
                alias.name, alias.asname and cst.AsName(cst.Name(get_full_name_for_node(alias.asname.name)))
            )
            for alias in aliases
        ]
        if not home:
            return cst.Import(plain)
        return cst.ImportFrom(_expression(home), plain)

    # -- uses

    def visit_Attribute(self, node: Any) -> bool:
        if not self.collect_uses or node in self._seen:
            return True
        dotted = self._qualified(node)
        if dotted is None:
            return True
        written = get_full_name_for_node(node)
        base = str(written).partition(".")[0]
        if base not in self.bound:
            return True
        module, _, name = dotted.rpartition(".")
        if relative(module) in TABLE and name in TABLE[relative(module) or ""]:
            place = place_of(module, name)
        elif relative(dotted) in TABLE and (target := module_for(dotted)) is not None:
            place = (target.rpartition(".")[0], target.rpartition(".")[2])
            if target == self.bound[base][0]:
                self._replace(node, self.bound[base][1])
                return False
        elif relative(module) in TABLE:
            place = None
        else:
            return True
        self._mark(node)
        new = None if place is None else as_attribute(self.bound[base][0], place)
        if new is None:
            far = f" It is {'.'.join(place)} there." if place is not None and place[0] else ""
            self._hand(node, f"{written}: {far.strip() or _advice(dotted).partition(': ')[2]}")
            return False
        if place is not None and place[0] and not can_be_made(place):
            self._hand(node, f"{name} can be imported, but not made, in this version of hasten.")
        self._replace(node, f"{self.bound[base][1]}.{new}")
        return False

    def visit_Name(self, node: Any) -> None:
        if not self.collect_uses or node in self._seen or node.value not in ROOTS:
            return
        if self._qualified(node) == node.value and self.bound.get(node.value, ("", ""))[1] == "hasten":
            self.nodes[node] = cst.Name("hasten")

    def visit_SimpleString(self, node: Any) -> None:
        if not self.collect_uses or "b" in node.prefix.lower():
            return
        text = node.raw_value
        if not DOTTED.search(text):
            return
        new = rewritten(text) if DOTTED.fullmatch(text) else None
        if new is not None:
            self.nodes[node] = node.with_changes(value=f"{node.prefix}{node.quote}{new}{node.quote}")
        else:
            self._hand(node, f"a text names {DOTTED.search(text).group()}")  # type: ignore[union-attr]

    def _replace(self, node: Any, dotted: str) -> None:
        self._mark(node)
        if get_full_name_for_node(node) != dotted:
            self.nodes[node] = _expression(dotted).with_changes(lpar=node.lpar, rpar=node.rpar)

    def _mark(self, node: Any) -> None:
        """Skip the parts of an attribute chain that was handled as a whole."""
        while isinstance(node, cst.Attribute):
            self._seen.add(node)
            node = node.value
        self._seen.add(node)

    def _qualified(self, node: Any) -> str | None:
        names = self.get_metadata(QualifiedNameProvider, node, set())
        found = {name.name for name in names if name.source is QualifiedNameSource.IMPORT}
        mine = {name for name in found if relative(name) is not None}
        return mine.pop() if len(mine) == 1 and len(found) == 1 else None


class _Change(cst.CSTTransformer):  # type: ignore[misc,unused-ignore]
    """Applies the replacements."""

    def __init__(self, plan: _Plan) -> None:
        super().__init__()
        self._plan = plan

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if isinstance(original_node, cst.SimpleStatementLine) and len(original_node.body) == 1:
            statements = self._plan.statements.get(original_node.body[0])
            if statements is not None:
                lines = [cst.SimpleStatementLine([statement]) for statement in statements]
                lines[0] = lines[0].with_changes(leading_lines=original_node.leading_lines)
                lines[-1] = lines[-1].with_changes(trailing_whitespace=original_node.trailing_whitespace)
                return cst.FlattenSentinel(lines)
        if original_node in self._plan.nodes:
            return self._plan.nodes[original_node]
        if original_node in self._plan.statements:
            return cst.FlattenSentinel(self._plan.statements[original_node])
        return super().on_leave(original_node, updated_node)
