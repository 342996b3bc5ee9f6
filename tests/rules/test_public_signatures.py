"""The public names and signatures, compared with ``public_signatures.txt``.

A change of this file is a change of the public interface. Write it again with

    PYTHONPATH=src python tests/rules/test_public_signatures.py

and read its difference: a name, a parameter, its kind or its default may only change by decision. Annotations are not
in the file.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import hasten
from hasten._lib.names import Elsewhere
from hasten.extend.origin import ROOTS
from hasten.module.log_methods import Unlisted

SNAPSHOT = Path(__file__).with_name("public_signatures.txt")
WRITE_IT = "If this is meant, run: PYTHONPATH=src python tests/rules/test_public_signatures.py"

# The modules that programs import from; each lists its names in `__all__`.
MODULES = (
    "hasten",
    "hasten.accelerators",
    "hasten.callbacks",
    "hasten.cli",
    "hasten_lightning",
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
    "hasten.transformers",
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


def signature_of(function: Any) -> str:
    """Return the parameters and their defaults, without annotations, addresses and the modules where classes live."""
    # The parameters of Python's own classes differ with its version.
    if inspect.isclass(function) and issubclass(function, Enum | set):
        return "(value)" if issubclass(function, Enum) else ""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    parameters = [
        one.replace(annotation=inspect.Parameter.empty)
        for one in signature.parameters.values()
        if one.name not in ("self", "cls")
    ]
    text = str(inspect.Signature(parameters))
    return re.sub(r" at 0x[0-9a-f]+|\bhasten(?:_\w+)?\.[\w.]*\.(?=\w)", "", text)


def members_of(cls: type) -> dict[str, str]:
    """Return the signatures of the public members that a class has from this package; "" for what is no function."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.split(".")[0] in ROOTS:
            found |= vars(base)
    plain = {
        name: member.__func__ if isinstance(member, classmethod | staticmethod | Unlisted) else member
        for name, member in sorted(found.items())
        if not name.startswith("_") and not isinstance(member, Elsewhere)
    }
    return {name: signature_of(member) if inspect.isfunction(member) else "" for name, member in plain.items()}


def lines_now() -> Iterator[str]:
    """Yield the public names; the members of a class or function stand under the first of its names."""
    names = {
        f"{module}.{name}": getattr(importlib.import_module(module), name)
        for module in MODULES
        for name in sorted(importlib.import_module(module).__all__)
    }
    classes: dict[type, str] = {}
    for path, value in names.items():
        if inspect.isclass(value) and value.__module__.split(".")[0] in ROOTS:
            classes.setdefault(value, path)
    functions: set[int] = set()
    for path, value in names.items():
        if classes.get(value if inspect.isclass(value) else object) == path:
            yield path + signature_of(value)
            # Without those that a public base class has with the same parameters.
            inherited = [members_of(base).items() for base in value.__mro__[1:] if base in classes]
            for member in members_of(value).items():
                if not any(member in items for items in inherited):
                    yield f"{path}.{member[0]}{member[1]}"
        elif inspect.isfunction(value) and id(value) not in functions:
            functions.add(id(value))
            yield path + signature_of(value)
        else:
            yield path


def test_public_names_parameters_and_defaults_are_those_of_the_snapshot() -> None:
    before, now = SNAPSHOT.read_text(encoding="utf-8").splitlines(), list(lines_now())
    assert sorted(set(before) - set(now)) == [], f"gone or changed. {WRITE_IT}"
    assert sorted(set(now) - set(before)) == [], f"new or changed. {WRITE_IT}"


def main() -> None:
    SNAPSHOT.write_text("".join(f"{line}\n" for line in lines_now()), encoding="utf-8")
    print(f"wrote {SNAPSHOT}")


if __name__ == "__main__":
    assert hasten.__file__ is not None
    main()
