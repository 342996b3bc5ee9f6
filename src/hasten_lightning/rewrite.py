"""Rewrite the imports of one file of a program, for ``hasten migrate``. Needs libcst."""

# ruff: noqa: N802 - libcst names the methods after its classes

from __future__ import annotations

import functools
import importlib
import re
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, PositionProvider, QualifiedNameProvider, QualifiedNameSource

from hasten._lib.errors import is_absent
from hasten_lightning.facades import Facade, original
from hasten_lightning.modules import ROOTS, TABLE, relative
from hasten_lightning.names import alternative_to

# Packages that have the names of the modules below them; the first that has a name counts.
_COLLECTIONS = ("hasten.utilities", "hasten.callbacks", "hasten.demos", "hasten.loggers", "hasten.profilers")
# Attributes of hasten.
_PACKAGES = (
    *_COLLECTIONS,
    *("hasten.accelerators", "hasten.cli", "hasten.data", "hasten.plugins", "hasten.strategies", "hasten.tuner"),
)
DOTTED = re.compile(rf"(?<![\w./-])(?:{'|'.join(ROOTS)})(?:\.[A-Za-z_]\w*)+")


@functools.cache
def rewritten(dotted: str) -> str | None:
    """Return the name in hasten for a module or name of Lightning, or None.

    A module becomes the one that has all its names.

    Example::

        >>> rewritten("lightning.pytorch.callbacks.early_stopping.EarlyStopping")
        'hasten.callbacks.EarlyStopping'
        >>> rewritten("lightning.pytorch.Trainer.fit"), rewritten("pytorch_lightning.trainer.states")
        ('hasten.Trainer.fit', 'hasten.utilities')

    """
    module, rest = dotted, ""
    while "." in module:
        module, _, name = module.rpartition(".")
        if relative(module) in TABLE:
            new = _new_name(module, name)
            if new is not None:
                return new + rest
            break
        rest = f".{name}{rest}"
    return _new_module(dotted)


def _new_name(module: str, name: str) -> str | None:
    found = _home(module, name)
    if found is None:
        return None
    home, there = found
    if home == "hasten_lightning.cli":
        home = "hasten.cli"  # Not imported: jsonargparse may not be installed.
    if there == "StrategyRegistry":
        home = "hasten.utilities.enums"
    if home == "hasten" or (home in _PACKAGES and there == name):
        return f"{home}.{there}"
    value = getattr(importlib.import_module(home), there)
    is_facade = isinstance(value, Facade)
    if is_facade:
        value = original(value)
    for package in ("hasten", *_PACKAGES) if is_facade else _COLLECTIONS:
        public = importlib.import_module(package)
        if name in public.__all__ and getattr(public, name) is value:
            return f"{package}.{name}"
    return f"{home}.{there}"


def _home(module: str, name: str) -> tuple[str, str] | None:
    """Return the module and the name that hasten has in place of a name, if a program without the alias can use it."""
    home, there = TABLE[relative(module) or ""].get(name, ("hasten_lightning.names", ""))
    # Of spike detection, hasten.callbacks has the Trainer's, whose hook is called with other arguments.
    of_fabric = home == "hasten_lightning._classes.fabric_callbacks"
    return None if home == "hasten_lightning.names" or of_fabric else (home, there)


def _new_module(module: str) -> str | None:
    place = relative(module)
    if place in ("", "pytorch"):
        return "hasten"
    names = {name: _new_name(module, name) for name in TABLE.get(place or "", {}) if not name.startswith("__")}
    homes = {str(new).removesuffix(f".{name}") for name, new in names.items()}
    home = homes.pop() if len(homes) == 1 else None
    return home if all(new == f"{home}.{name}" for name, new in names.items()) else None


@dataclass
class Rewritten:
    """A rewritten file."""

    data: bytes
    by_hand: list[tuple[int, str]] = field(default_factory=list)  # (line, what to do) for what could not be rewritten.


def python(data: bytes) -> Rewritten:
    """Rewrite a Python file; everything else in it stays unchanged.

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
    plan = _Plan()
    wrapper.visit(plan)
    plan.collect_uses = True
    wrapper.visit(plan)
    changed = module.visit(_Change(plan))
    return Rewritten(changed.bytes, sorted(set(plan.by_hand)))


def yaml(data: bytes) -> Rewritten:
    """Rewrite the class paths in a YAML file; comments and order stay."""
    text = data.decode("utf-8")
    by_hand: list[tuple[int, str]] = []

    def replace(match: re.Match[str]) -> str:
        new = rewritten(match.group())
        if new is None:
            by_hand.append((text.count("\n", 0, match.start()) + 1, _advice(match.group())))
        return new or match.group()

    return Rewritten(DOTTED.sub(replace, text).encode("utf-8"), by_hand)


def _advice(dotted: str) -> str:
    return f"{dotted}: {alternative_to(relative(dotted) or '') or 'hasten does not have this name.'}"


def _scattered(module: str) -> str:
    return f"{module}: its names are in several modules of hasten: import each one by itself."


def _expression(dotted: str) -> Any:
    first, *rest = dotted.split(".")
    node: Any = cst.Name(first)
    for word in rest:
        node = cst.Attribute(node, cst.Name(word))
    return node


class _Plan(cst.CSTVisitor):  # type: ignore[misc,unused-ignore]
    """Collects replacements: first for the imports, then for the uses of the names they bind."""

    METADATA_DEPENDENCIES = (QualifiedNameProvider, PositionProvider)

    def __init__(self) -> None:
        super().__init__()
        self.collect_uses = False
        self.nodes: dict[Any, Any] = {}
        # A `from` statement that becomes several.
        self.statements: dict[Any, list[Any]] = {}
        self.by_hand: list[tuple[int, str]] = []
        # Name in the program -> (module of hasten it is bound to, new name).
        self.bound: dict[str, tuple[str, str]] = {}

    def _hand(self, node: Any, text: str) -> None:
        self.by_hand.append((self.get_metadata(PositionProvider, node).start.line, text))

    # -- imports

    def visit_Import(self, node: Any) -> bool:
        if self.collect_uses:
            return False
        names, has_hasten = [], False
        for alias in node.names:
            name = get_full_name_for_node(alias.name) or ""
            if relative(name) is None:
                names.append(alias)
                continue
            if relative(name) not in TABLE:
                self._hand(node, _advice(name))
                return False
            if alias.asname is None:
                # Binds only the first word.
                self.bound[name.partition(".")[0]] = ("hasten", "hasten")
                if not has_hasten:
                    names.append(alias.with_changes(name=cst.Name("hasten")))
                has_hasten = True
                continue
            target, asname = _new_module(name), str(get_full_name_for_node(alias.asname.name))
            if target is None:
                self._hand(node, _scattered(name))
                return False
            self.bound[asname] = (target, asname)
            names.append(alias.with_changes(name=_expression(target)))
        if names != list(node.names):
            names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
            self.nodes[node] = node.with_changes(names=names)
        return False

    def visit_ImportFrom(self, node: Any) -> bool:
        module = None if node.module is None or node.relative else get_full_name_for_node(node.module)
        if self.collect_uses or module is None or relative(module) is None:
            return False
        if relative(module) not in TABLE:
            self._hand(node, _advice(module))
            return False
        if isinstance(node.names, cst.ImportStar):
            target = _new_module(module)
            if target is None:
                self._hand(node, f"from {module} import *: import the names one by one.")
            else:
                self.nodes[node] = node.with_changes(module=_expression(target))
            return False
        groups: dict[str, list[Any]] = {}
        for alias in node.names:
            home, alias = self._rewritten_alias(node, module, alias)
            groups.setdefault(home, []).append(alias)
        if len(groups) == 1 and "" not in groups:
            ((home, aliases),) = groups.items()
            if home != module:
                self.nodes[node] = node.with_changes(module=_expression(home), names=aliases)
        else:
            self.statements[node] = [_import_of(home, aliases) for home, aliases in sorted(groups.items())]
        return False

    def _rewritten_alias(self, node: Any, module: str, alias: Any) -> tuple[str, Any]:
        """Return the new module and name of an import; return them unchanged if there is no new place."""
        old = f"{module}.{alias.name.value}"
        new = self._new(node, old)
        if new is None:
            self._hand(node, _scattered(old) if TABLE.get(relative(old) or "") else _advice(old))
            return module, alias
        # The name in the program stays, whatever it is called in hasten.
        given = alias.name.value if alias.asname is None else str(get_full_name_for_node(alias.asname.name))
        if relative(old) in TABLE:
            self.bound[given] = (new, given)
        home, _, there = new.rpartition(".")
        if alias.name.value != there or (alias.asname is None and there != given):
            asname = None if there == given else alias.asname or cst.AsName(cst.Name(given))
            alias = alias.with_changes(name=cst.Name(there), asname=asname)
        return home, alias

    def _new(self, node: Any, dotted: str) -> str | None:
        """Return the new name, and list it if it can only be imported."""
        new = rewritten(dotted)
        home, _, name = (new or "").rpartition(".")
        # All classes of hasten.cli can be made, and jsonargparse may not be installed here.
        if home not in ("", "hasten.cli") and is_absent(getattr(importlib.import_module(home), name, None)):
            self._hand(node, f"{name} can be imported, but not made, in this version of hasten.")
        return new

    # -- uses

    def visit_Attribute(self, node: Any) -> bool:
        written = str(get_full_name_for_node(node))
        base = written.partition(".")[0]
        if not self.collect_uses or base not in self.bound:
            return True
        dotted = self._qualified(node)
        if dotted is None or not {relative(dotted), relative(dotted.rpartition(".")[0])} & TABLE.keys():
            return True
        new = self._new(node, dotted)
        home, name = self.bound[base]
        module = (new or "").rpartition(".")[0]
        if new is not None and (home in (new, module) or (home == "hasten" and module in _PACKAGES)):
            there = f"{name}{new.removeprefix(home)}"
            if there != written:
                self.nodes[node] = _expression(there).with_changes(lpar=node.lpar, rpar=node.rpar)
        else:
            advice = _advice(dotted).partition(": ")[2] if new is None else f"It is {new} there."
            self._hand(node, f"{written}: {advice}")
        return False

    def visit_Name(self, node: Any) -> None:
        if not self.collect_uses or node.value not in ROOTS:
            return
        if self._qualified(node) == node.value and self.bound.get(node.value, ("", ""))[1] == "hasten":
            self.nodes[node] = cst.Name("hasten")

    def visit_SimpleString(self, node: Any) -> None:
        if not self.collect_uses or "b" in node.prefix.lower():
            return
        text = node.raw_value
        named = DOTTED.search(text)
        if named is None:
            return
        new = rewritten(text) if DOTTED.fullmatch(text) else None
        if new is not None:
            self.nodes[node] = node.with_changes(value=f"{node.prefix}{node.quote}{new}{node.quote}")
        else:
            self._hand(node, f"a text names {named.group()}")

    def _qualified(self, node: Any) -> str | None:
        names = self.get_metadata(QualifiedNameProvider, node, set())
        found = {name.name for name in names if name.source is QualifiedNameSource.IMPORT}
        mine = {name for name in found if relative(name) is not None}
        return mine.pop() if len(mine) == 1 and len(found) == 1 else None


def _import_of(home: str, aliases: list[Any]) -> Any:
    plain = []
    for alias in aliases:
        asname = alias.asname and cst.AsName(cst.Name(get_full_name_for_node(alias.asname.name)))
        plain.append(cst.ImportAlias(alias.name, asname))
    return cst.ImportFrom(_expression(home), plain) if home else cst.Import(plain)


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
