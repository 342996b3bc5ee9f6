"""Where classes, functions and files come from (hasten, a library, the program), and what code of a program uses.

hasten ships several packages in one wheel. Only this module decides whether an object is hasten's, so that code may be
in any of these packages.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from os import path
from types import CodeType, FunctionType, MethodType
from typing import Any

# The packages of the wheel.
ROOTS = frozenset({"hasten", "hasten_deepspeed", "hasten_lightning", "hasten_tools", "hasten_xla"})
# The folder that holds them, with a separator at its end.
SOURCE = path.join(path.abspath(__file__).rpartition(path.join("hasten", "extend"))[0], "")
# The folders of their source, each with a separator at its end, for ``str.startswith``.
FOLDERS = tuple(sorted(path.join(SOURCE, root, "") for root in ROOTS))


def module_of(thing: object) -> str:
    """Return the name of the module that defines a class, a function or a method, or ``""``.

    Example::

        >>> import collections
        >>> module_of(collections.OrderedDict)
        'collections'

    """
    return str(getattr(thing, "__module__", None) or "")


def package_of(thing: object) -> str:
    """Return the outermost package that defines a class, a function or a method, or ``""``.

    Example::

        >>> import torch
        >>> package_of(torch.optim.SGD)
        'torch'

    """
    return str(getattr(thing, "__module__", None) or "").partition(".")[0]


def comes_from(thing: object, *packages: str) -> bool:
    """Return whether a class, a function or a method is defined in one of these packages or modules, or below them.

    Example::

        >>> import torch
        >>> comes_from(torch.nn.Linear, "torch.optim", "torch.nn")
        True

    """
    module = f"{getattr(thing, '__module__', None)}."
    for package in packages:  # noqa: SIM110 - a generator would be a Python call for each package.
        if module.startswith(f"{package}."):
            return True
    return False


def is_builtin(thing: object) -> bool:
    """Return whether a class, a function or a method is part of hasten.

    Example::

        >>> from hasten.callbacks import Timer
        >>> is_builtin(Timer), is_builtin(type("Mine", (Timer,), {"__module__": "train"}))
        (True, False)

    """
    return str(getattr(thing, "__module__", None) or "").partition(".")[0] in ROOTS


def source_file(function: object) -> str:
    """Return the file in which a function is written, or ``""`` for one that is not written in Python.

    Decorators copy the name and the module of a function, but not this.

    Example::

        >>> import inspect, torch
        >>> source_file(torch.nn.Linear.forward) == inspect.getfile(torch.nn.Linear), source_file(len)
        (True, '')

    """
    code: CodeType | None = getattr(function, "__code__", None)
    return "" if code is None else code.co_filename


def is_builtin_file(file: str) -> bool:
    """Return whether a source file is part of hasten."""
    return file.startswith(FOLDERS)


def full_name(thing: object) -> str:
    """Return the name of a class or a function with its module.

    Example::

        >>> import collections
        >>> full_name(collections.OrderedDict)
        'collections.OrderedDict'

    """
    return f"{module_of(thing)}.{getattr(thing, '__qualname__', '')}"


# -- what the code of a program uses

# Their functions are not looked into.
_LIBRARIES = {"torch", *ROOTS}


def names_in(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of globals and attributes in the code of a function, and of those defined inside it.

    Example::

        >>> def save(trainer):
        ...     return [trainer.save_checkpoint(str(each)) for each in range(2)]
        >>> sorted(names_in(save) & {"save_checkpoint", "str", "trainer"})
        ['save_checkpoint', 'str']

    """
    return _names_in(getattr(function, "__code__", None))


# In every fit of a program the same functions are looked at.
@functools.lru_cache(maxsize=4096)
def _names_in(code: CodeType | None) -> frozenset[str]:
    found: set[str] = set()
    waiting = [] if code is None else [code]
    for each in waiting:
        found.update(each.co_names)
        waiting += [inner for inner in each.co_consts if isinstance(inner, CodeType)]
    return frozenset(found)


def functions_reached(
    functions: Iterable[Any], member: Callable[[str], Any] | None = None, *, depth: int = sys.maxsize
) -> Iterator[FunctionType]:
    """Yield functions of a program, and those that their code calls by a name, in turn, ``depth`` calls deep.

    ``member`` returns what a name stands for beside the globals of a function, such as a method; None for nothing.
    """
    seen: set[FunctionType] = set()
    waiting = deque([(each, 0) for each in functions])
    while waiting:
        found, calls = waiting.popleft()
        function: Any = getattr(found, "__func__", found)
        function = inspect.unwrap(function) if hasattr(function, "__wrapped__") else function
        if not isinstance(function, FunctionType) or function in seen:
            continue
        # package_of(function), without a Python call for each method in every fit.
        if (function.__module__ or "").partition(".")[0] in _LIBRARIES:
            continue
        seen.add(function)
        yield function
        if calls < depth:
            for name in names_in(function):
                waiting.append((function.__globals__.get(name), calls + 1))
                if member is not None:
                    waiting.append((member(name), calls + 1))


def mentions(name: str, *objects: object) -> bool:
    """Return whether a name is used by the code of the program in the classes of these objects, or that it calls."""
    functions = (value for each in objects for base in type(each).__mro__ for value in vars(base).values())
    return any(name in names_in(function) for function in functions_reached(functions))


def arguments_read(function: Callable[..., object]) -> set[str]:
    """Return which arguments the code of a function reads.

    Example::

        >>> sorted(arguments_read(lambda batch, batch_idx: batch + 1))
        ['batch']

    """
    import dis

    code = function.__code__
    taken = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    loaded = [each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD")]
    return {name for value in loaded for name in (value if isinstance(value, tuple) else (value,)) if name in taken}


def uses_argument(function: Callable[..., object], argument: str, owner: object = None) -> bool:
    """Return whether a function uses an argument, beyond passing it on to functions that do not.

    Calls are followed that the code writes as ``self.name(...)``, ``super().name(...)``, ``name(...)`` or
    ``Class.name(...)``, if they lead to functions of a program. Any other call uses what it is given.

    ``owner`` is what ``self`` is in the function; None where it has no such argument.

    Example::

        >>> def shown(batch, batch_idx):
        ...     return print(batch_idx)
        >>> uses_argument(shown, "batch_idx")
        True

    """
    return _uses(function, argument, owner, set())


def _uses(function: Callable[..., object], argument: str, owner: object, seen: set[tuple[object, str]]) -> bool:
    plain: Any = getattr(function, "__func__", function)
    if argument not in arguments_read(plain) or (plain, argument) in seen:
        return False
    seen.add((plain, argument))
    tree = _tree_of(plain.__code__)
    if tree is None:
        return True
    passed_on: set[ast.AST] = set()
    for call, place, value in _passed(tree, argument):
        called, its_owner = _called(call, plain, owner)
        name = _parameter(called, place)
        if name is None or _uses(called, name, its_owner, seen):
            return True
        passed_on.add(value)
    return any(_reads(node, argument) and node not in passed_on for node in ast.walk(tree))


def source_of(thing: Callable[..., object] | type | CodeType) -> str | None:
    """Return the source of a function, its code or a class; None if there is none."""
    try:
        source = inspect.getsource(thing)
    except (OSError, TypeError):
        return None
    name = getattr(thing, "co_name", "") or getattr(thing, "__name__", "")
    # Python 3.13 and newer return the text of ``python -c`` for functions made by ``exec``: both are in "<string>".
    return source if name == "<lambda>" or name in source else None


def _tree_of(code: CodeType) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(source_of(code) or "?"))
    except SyntaxError:
        return None


def _reads(node: ast.AST, name: str) -> bool:
    """Return whether a node of a source reads this name."""
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)


def _passed(tree: ast.AST, argument: str) -> Iterator[tuple[ast.Call, int | str | None, ast.expr]]:
    """Yield the calls that are given an argument as it is, with its position or its name there, and its node."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    for call in calls:
        if not any(isinstance(each, ast.Starred) for each in call.args):
            given: list[tuple[int | str | None, ast.expr]] = [*enumerate(call.args)]
            given += [(each.arg, each.value) for each in call.keywords]
            yield from ((call, place, value) for place, value in given if _reads(value, argument))


def _called(call: ast.Call, function: FunctionType, owner: object) -> tuple[Any, object]:
    """Return the function of a program that a call in ``function`` leads to, and its ``self``; None if unknown."""
    taken = function.__code__.co_varnames[:1]
    found: Any = None
    match call.func:
        case ast.Name(id=name):
            found = _named(name, function)
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            found = getattr(owner if (name,) == taken else _named(name, function), attribute, None)
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super"), args=[]), attr=attribute) if owner is not None:
            kinds, kind = type(owner).__mro__, _named("__class__", function)
            above = kinds[kinds.index(kind) + 1 :] if kind in kinds else ()
            found = next((vars(each)[attribute] for each in above if attribute in vars(each)), None)
            found = MethodType(found, owner) if isinstance(found, FunctionType) else None
    plain = getattr(found, "__func__", found)
    if not isinstance(plain, FunctionType) or package_of(plain) in _LIBRARIES:
        return None, None
    gets_self = bool(call.args) and isinstance(call.args[0], ast.Name) and (call.args[0].id,) == taken
    return found, getattr(found, "__self__", owner if gets_self else None)


def _parameter(function: Callable[..., object] | None, place: int | str | None) -> str | None:
    """Return the parameter that gets an argument by its position or its name; None if none is known."""
    if function is None or place is None:
        return None
    code, is_bound = getattr(function, "__func__", function).__code__, hasattr(function, "__self__")
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if isinstance(place, str):
        return place if place in names else None
    positional = names[int(is_bound) : code.co_argcount]
    return positional[place] if place < len(positional) else None


def _named(name: str, function: FunctionType) -> Any:
    """Return what a name that a function does not assign stands for in its code; None if that is unknown."""
    free = function.__code__.co_freevars
    if name in free and function.__closure__ is not None:
        return function.__closure__[free.index(name)].cell_contents
    return function.__globals__.get(name)
