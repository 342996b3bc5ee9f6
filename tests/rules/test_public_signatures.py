"""The public names and signatures, compared with ``public_signatures.txt``.

A change of this file is a change of the public interface. Write it again with

    PYTHONPATH=src python tests/rules/test_public_signatures.py

and read its difference: a name, a parameter, its kind or its default may only change by decision. Annotations may be
added and refined without writing the file again.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import hasten

SNAPSHOT = Path(__file__).with_name("public_signatures.txt")
WRITE_IT = "If this is meant, run: PYTHONPATH=src python tests/rules/test_public_signatures.py"

# The modules that programs import from; each lists its names in `__all__`.
MODULES = (
    "hasten",
    "hasten.accelerators",
    "hasten.callbacks",
    "hasten.cli",
    "hasten.compat",
    "hasten.data",
    "hasten.demos",
    "hasten.fabric",
    "hasten.loggers",
    "hasten.optim",
    "hasten.plugins",
    "hasten.precision",
    "hasten.profilers",
    "hasten.report",
    "hasten.strategies",
    "hasten.tuner",
    "hasten.utilities",
    "hasten.utilities.data",
    "hasten.utilities.enums",
    "hasten.utilities.exceptions",
    "hasten.utilities.hooks",
    "hasten.utilities.imports",
    "hasten.utilities.memory",
    "hasten.utilities.parsing",
    "hasten.utilities.rank_zero",
    "hasten.utilities.types",
    "hasten.utilities.warnings",
)

KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "positional",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "either",
    inspect.Parameter.KEYWORD_ONLY: "keyword",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}
NOTHING_SAID = ("", "Any", "typing.Any")


class Parameter(NamedTuple):
    """A parameter without its annotation, as far as callers depend on it."""

    name: str
    kind: str
    default: str


class Entry(NamedTuple):
    """One line of the snapshot: a name, or one parameter of a function."""

    path: str
    parameter: Parameter | None
    annotation: str

    def __str__(self) -> str:
        if self.parameter is None:
            return f"{self.path} -> {self.annotation}" if self.annotation else self.path
        name, kind, default = self.parameter
        text = f"{self.path} | {kind} {name}"
        text += f": {self.annotation}" if self.annotation else ""
        return f"{text} = {default}" if default else text

    @classmethod
    def parse(cls, line: str) -> Entry:
        if " | " not in line.split(" -> ")[0].split(": ")[0]:
            path, _, annotation = line.partition(" -> ")
            return cls(path, None, annotation)
        path, _, rest = line.partition(" | ")
        rest, _, default = rest.partition(" = ")
        rest, _, annotation = rest.partition(": ")
        kind, _, name = rest.partition(" ")
        return cls(path, Parameter(name, kind, default), annotation)


def _text(value: object) -> str:
    """Return a default or an annotation as text that does not depend on addresses and on where classes live."""
    text = value if isinstance(value, str) else inspect.formatannotation(value)
    return re.sub(r"\s+", " ", re.sub(r"\bhasten\.[\w.]*\.(?=\w)", "", text))


def _default_text(value: object) -> str:
    return _text(re.sub(r" at 0x[0-9a-f]+", "", repr(value)))


def _of_function(path: str, function: Any) -> Iterator[Entry]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        yield Entry(path, None, "")
        return
    empty = inspect.Parameter.empty
    yield Entry(path, None, "" if signature.return_annotation is empty else _text(signature.return_annotation))
    for one in signature.parameters.values():
        if one.name in ("self", "cls"):
            continue
        default = "" if one.default is empty else _default_text(one.default)
        annotation = "" if one.annotation is empty else _text(one.annotation)
        yield Entry(path, Parameter(one.name, KINDS[one.kind], default), annotation)


def _members(cls: type) -> dict[str, Any]:
    """Return the public members that a class has from this package, without the wrapping of class methods."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.split(".")[0] == "hasten":
            found |= vars(base)
    return {
        name: member.__func__ if isinstance(member, classmethod | staticmethod) else member
        for name, member in sorted(found.items())
        if not name.startswith("_")
    }


def _of_member(path: str, member: Any) -> list[Entry]:
    return list(_of_function(path, member)) if inspect.isfunction(member) else [Entry(path, None, "")]


def _of_class(path: str, cls: type, public_classes: dict[type, str]) -> Iterator[Entry]:
    """Yield the constructor and the members, except those that a public base class has with the same parameters."""
    yield from _of_function(path, cls)
    inherited = [_members(base) for base in cls.__mro__[1:] if base in public_classes]
    for name, member in _members(cls).items():
        entries = _of_member(f"{path}.{name}", member)
        if not any(
            _parameters(_of_member("", members[name])) == _parameters(entries)
            for members in inherited
            if name in members
        ):
            yield from entries


def entries_now() -> Iterator[Entry]:
    """Yield the public names; the members of a class or function stand under the first of its names."""
    names = {
        f"{module}.{name}": getattr(importlib.import_module(module), name)
        for module in MODULES
        for name in sorted(importlib.import_module(module).__all__)
    }
    classes: dict[type, str] = {}
    for path, value in names.items():
        if inspect.isclass(value) and value.__module__.split(".")[0] == "hasten":
            classes.setdefault(value, path)
    functions: set[int] = set()
    for path, value in names.items():
        if classes.get(value if inspect.isclass(value) else object) == path:
            yield from _of_class(path, value, classes)
        elif inspect.isfunction(value) and id(value) not in functions:
            functions.add(id(value))
            yield from _of_function(path, value)
        else:
            yield Entry(path, None, "")


def by_path(entries: Iterator[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.path, []).append(entry)
    return found


@pytest.fixture(scope="module")
def before() -> dict[str, list[Entry]]:
    return by_path(Entry.parse(line) for line in SNAPSHOT.read_text(encoding="utf-8").splitlines() if line)


@pytest.fixture(scope="module")
def now() -> dict[str, list[Entry]]:
    return by_path(entries_now())


def test_every_public_name_is_still_there(before: dict[str, list[Entry]], now: dict[str, list[Entry]]) -> None:
    assert sorted(set(before) - set(now)) == [], WRITE_IT


def test_every_public_name_is_in_the_snapshot(before: dict[str, list[Entry]], now: dict[str, list[Entry]]) -> None:
    assert sorted(set(now) - set(before)) == [], f"New public names. {WRITE_IT}"


def test_parameters_keep_their_names_order_kinds_and_defaults(
    before: dict[str, list[Entry]], now: dict[str, list[Entry]]
) -> None:
    changed = [
        f"{path}: {_parameters(before[path])} became {_parameters(now[path])}"
        for path in before
        if path in now and _parameters(before[path]) != _parameters(now[path])
    ]
    assert changed == [], WRITE_IT


def test_annotations_are_not_lost(before: dict[str, list[Entry]], now: dict[str, list[Entry]]) -> None:
    lost = [
        f"{entry} was {old.annotation}"
        for path in before
        for old, entry in zip(before[path], now.get(path, []), strict=False)
        if old.annotation not in NOTHING_SAID and entry.annotation in NOTHING_SAID
    ]
    assert lost == [], WRITE_IT


def _parameters(entries: list[Entry]) -> list[Parameter]:
    return [entry.parameter for entry in entries if entry.parameter is not None]


def test_a_line_of_the_snapshot_can_be_read_again() -> None:
    for entry in (
        Entry("hasten.seed", None, ""),
        Entry("hasten.f", None, "dict[str, int] | None"),
        Entry("hasten.f", Parameter("x", "either", "'a: b = c'"), "Literal['a: b']"),
        Entry("hasten.f", Parameter("args", "*", ""), ""),
    ):
        assert str(Entry.parse(str(entry))) == str(entry)


def main() -> None:
    SNAPSHOT.write_text("".join(f"{entry}\n" for entry in entries_now()), encoding="utf-8")
    print(f"wrote {SNAPSHOT}")


if __name__ == "__main__":
    assert hasten.__file__ is not None
    main()
