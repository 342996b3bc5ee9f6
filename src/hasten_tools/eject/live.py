"""``Trainer.eject``: the plain program for a Trainer and a model that exist already, in a script or a notebook."""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hasten import Callback, LightningDataModule, LightningModule
from hasten._lib.errors import make_error
from hasten.extend.origin import is_builtin, module_of, source_file
from hasten_tools.eject.facts import Facts, gather
from hasten_tools.eject.objects import ONLY_SHOW
from hasten_tools.eject.program import ejected
from hasten_tools.eject.reader import SIGNATURES
from hasten_tools.eject.source import EjectError, rows_of

if TYPE_CHECKING:
    from hasten import LightningModule, Trainer

# Modules of names for annotations, which do not say where they come from.
_TYPES = ("typing", "hasten.types")
# Attributes of hasten's callbacks that have another name than the argument.
_STORED = {
    "swa_lrs": "_swa_lrs",
    "swa_epoch_start": "_swa_epoch_start",
    "annealing_epochs": "_annealing_epochs",
    "annealing_strategy": "_annealing_strategy",
}


def eject(trainer: Trainer, model: LightningModule, data: dict[str, Any], output: str | os.PathLike[str] | None) -> str:
    """Return the plain program, and write it to ``output``; see ``Trainer.eject``."""
    facts = gather(trainer, model, **data)
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if module_of(facts.trained) == "__main__" and file is not None and os.path.isfile(file):
        text, name = _as_fit(Path(file).read_text(encoding="utf-8")), Path(file).name
    else:
        text, name = _around(facts, data), f"a Trainer of {facts.trained.__name__}"
    stem = Path(output).stem if output is not None else Path(name).stem.rpartition(" ")[2]
    program = ejected(text, name, facts, stem=stem)
    if output is not None:
        Path(output).write_text(program, encoding="utf-8")
    return program


def _as_fit(text: str) -> str:
    """Return a script in which ``trainer.eject(...)`` is gone, or is ``trainer.fit(...)`` if nothing else fits."""
    tree = ast.parse(text)
    calls = {name: [node for node in ast.walk(tree) if _calls(node, name)] for name in ("fit", "eject")}
    lines = [f"{row}\n" for row in rows_of(text)]
    for statement in sorted((n for n in ast.walk(tree) if isinstance(n, ast.stmt)), key=lambda n: -n.lineno):
        own = [node for node in calls["eject"] if node in list(ast.walk(statement))]
        if not own or any(isinstance(node, ast.stmt) for node in list(ast.walk(statement))[1:]):
            continue
        call: Any = own[0]
        call.func.attr = "fit"
        call.keywords = [one for one in call.keywords if one.arg != "output"]
        new = "pass" if calls["fit"] else ast.unparse(call)
        indent = " " * statement.col_offset
        lines[statement.lineno - 1 : statement.end_lineno] = [f"{indent}{new}\n"]
    return "".join(lines)


def _calls(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name


# -- without a script: the classes, what they use, and a function that trains


def _around(facts: Facts, data: dict[str, Any]) -> str:
    """Return a program with the module's class, everything that it uses, and a function that makes the Trainer."""
    parts = _Definitions()
    parts.need(facts.trained.__name__, facts.trained)
    given = facts.arguments
    arguments, own = _arguments_of_trainer(given, parts)
    users = isinstance(given.get("callbacks"), (list, tuple, Callback)) and any(
        not is_builtin(type(one)) for one in _listed(given["callbacks"])
    )
    if facts.datamodule is not None:
        parts.need(facts.datamodule.__name__, facts.datamodule)
    if own:
        arguments.append(f"callbacks=[{', '.join(own)}]")
    elif users:
        arguments.append("callbacks=callbacks")
    names = {
        "call": ["train_dataloaders", *(["val_dataloaders"] if data.get("val_dataloaders") is not None else [])],
        "datamodule": ["datamodule"],
        "model": [],
    }[facts.data_from]
    passed = ", ".join(["model", *(f"{one}={one}" for one in names)])
    parameters = ", ".join(["model", *names, *(["callbacks=()"] if users and not own else [])])
    imported = sorted(one.partition("(")[0] for one in own if one.partition("(")[0] in SIGNATURES)
    imports = f"from hasten.callbacks import {', '.join(imported)}\n" if imported else ""
    return (
        f"from __future__ import annotations\n{parts.imports_text()}\nimport hasten as hasten_\n{imports}\n\n"
        f"{parts.text()}\n\n\n"
        f"def train({parameters}):\n"
        '    """Train a model, as the session did that this program was written in: it does not know its data."""\n'
        f"    trainer = hasten_.Trainer({', '.join(arguments)})\n"
        f"    trainer.fit({passed})\n"
        "    return trainer\n"
    )


def _arguments_of_trainer(given: dict[str, Any], parts: _Definitions) -> tuple[list[str], list[str]]:
    """Return the code of plain arguments of a Trainer, and the code of hasten's callbacks."""
    arguments: list[str] = []
    callbacks: list[str] = []
    for name, value in given.items():
        if name == "callbacks":
            callbacks = [code for one in _listed(value) if (code := _made(one, parts))]
        elif isinstance(value, (bool, int, float, str, type(None))):
            arguments.append(f"{name}={value!r}")
        elif name != "logger":
            what = f"Trainer({name}={value!r}) is an object, which a program cannot be written for."
            raise make_error(EjectError, what, argument=name)
    return arguments, callbacks


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _made(callback: Any, parts: _Definitions) -> str | None:
    """Return the code that makes a callback of hasten's; None for one that only shows something, or the user's."""
    name = type(callback).__name__
    if not is_builtin(type(callback)):
        parts.need(name, type(callback))
        return None
    if name in ONLY_SHOW:
        return None
    if name not in SIGNATURES:
        raise EjectError(f"{name} has no short equivalent.")
    shown = []
    for argument in SIGNATURES[name]:
        value = getattr(callback, _STORED.get(argument, argument))
        if argument == "min_delta":
            value = abs(value)
        shown.append(f"{argument}={value!r}")
    return f"{name}({', '.join(shown)})"


class _Definitions:
    """The source of classes and functions, and of what they use of their module or notebook."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._imports: dict[str, str] = {}
        self._texts: list[str] = []

    def need(self, name: str, value: Any) -> None:
        """Take the definition of a class or function, after those that it uses."""
        if name in self._seen:
            return
        self._seen.add(name)
        text, known = _source(value), _names_around(value)
        used = [node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
        for one in dict.fromkeys(used):
            if one in known and one != name and not hasattr(builtins, one):
                self._use(one, known[one], value)
        self._texts.append(text.strip("\n"))

    def _use(self, name: str, value: Any, user: Any) -> None:
        if isinstance(value, ModuleType):
            self._imports[name] = f"import {value.__name__}" + ("" if value.__name__ == name else f" as {name}")
            return
        home, own_name = str(getattr(value, "__module__", None)), getattr(value, "__name__", name)
        is_definition = isinstance(value, type) or inspect.isroutine(value)
        if is_definition and (home == module_of(user) or _derives_from_hasten(value)):
            self.need(name, value)
        elif is_definition and getattr(sys.modules.get(home), own_name, None) is value:
            as_name = "" if own_name == name else f" as {name}"
            # The public place of a name: torch.utils.data, not torch.utils.data.dataloader.
            while getattr(sys.modules.get(home.rpartition(".")[0]), own_name, None) is value:
                home = home.rpartition(".")[0]
            self._imports[name] = f"from {home} import {own_name}{as_name}"
        elif of_types := next((one for one in _TYPES if getattr(sys.modules.get(one), name, None) is value), ""):
            self._imports[name] = f"from {of_types} import {name}"
        elif name not in self._seen and _is_plain(value):
            self._seen.add(name)
            self._texts.append(f"{name} = {value!r}")
        elif name not in self._seen:
            raise make_error(
                EjectError,
                f"{user.__name__} uses {name}, a {type(value).__name__} whose code is not known.",
                fix="Put the program into a file and use `hasten eject`.",
            )

    def imports_text(self) -> str:
        """Return the imports, with all names of a module in one line."""
        lines: dict[str, list[str]] = {}
        for one in dict.fromkeys(self._imports.values()):
            start, _, name = one.partition(" import ")
            lines.setdefault(start if name and " as " not in name else one, []).append(name)
        joined = {start: ", ".join(sorted(names, key=str.lower)) for start, names in lines.items()}
        return "\n".join(f"{start} import {names}" if " import " not in start and start.startswith("from") else start
                         for start, names in joined.items())  # fmt: skip

    def text(self) -> str:
        return "\n\n\n".join(self._texts)


def _derives_from_hasten(value: Any) -> bool:
    """Return whether a value is a class of the user's that is a LightningModule, a datamodule or a callback."""
    bases = (LightningModule, LightningDataModule, Callback)
    return isinstance(value, type) and not is_builtin(value) and issubclass(value, bases)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(one) for pair in value.items() for one in pair)
    return isinstance(value, (bool, int, float, str, bytes, type(None)))


def _function_of(value: Any) -> Any:
    """Return a function that tells where a class or function was written."""
    if inspect.isfunction(value):
        return inspect.unwrap(value)
    found = (inspect.unwrap(one) for one in vars(value).values() if inspect.isfunction(one))
    return next((one for one in found if module_of(one) == module_of(value)), None)


def _names_around(value: Any) -> dict[str, Any]:
    function = _function_of(value)
    if function is None:
        return dict(vars(sys.modules.get(module_of(value), builtins)))
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    inner: dict[str, Any] = {}
    for name, cell in cells:
        if name != "__class__":
            inner[name] = cell.cell_contents
    if isinstance(value, type):
        for one in vars(value).values():
            if inspect.isfunction(one) and one.__closure__:
                free = zip(one.__code__.co_freevars, one.__closure__, strict=True)
                inner |= {name: cell.cell_contents for name, cell in free if name != "__class__"}
    return {**function.__globals__, **inner}


def _source(value: Any) -> str:
    """Return the text of a class or function: from its file, or the cell of the notebook that defined it."""
    function = _function_of(value)
    file = source_file(function)
    lines = linecache.getlines(file) if file else []
    wanted: Callable[[ast.AST], bool] = lambda node: (  # noqa: E731
        isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == value.__name__
    )
    found: list[Any] = []
    if lines:
        line = function.__code__.co_firstlineno
        tree = ast.parse("".join(lines))
        found = [n for n in ast.walk(tree) if wanted(n) and n.lineno <= line <= (n.end_lineno or 0) + 1]  # type: ignore[attr-defined]
        found = found or [node for node in ast.walk(tree) if wanted(node)]
    if not found:
        what = f"the source of {value.__name__} cannot be read: it was not written in a file or a notebook."
        raise make_error(EjectError, what, fix="Put it into a file and use `hasten eject`.")
    node = found[-1]
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    return textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))
