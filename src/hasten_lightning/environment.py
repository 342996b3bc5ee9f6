"""hasten's own arguments of Trainer and Fabric for programs that cannot name them, from environment variables.

``HASTEN_PACKED=1`` is ``packed=True`` for each Trainer of a program that runs under Lightning's names, where the
Trainer has the parameters of Lightning's alone. ``hasten run --packed program.py`` sets the same variable, so the
processes that the program starts find it, too.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hasten._lib.errors import make_error
from hasten._lib.rank_zero import rank_zero_warn
from hasten.arguments import SPEED_NAMES, check_one

Function = TypeVar("Function", bound=Callable[..., Any])

# hasten's own parameters, by class.
OWNERS: dict[str, tuple[str, ...]] = {
    "Trainer": ("uneven", "on_bad_loss", *SPEED_NAMES),
    "Fabric": ("matmul_precision", "fused_optimizer", "compile"),
}
# Those that are on or off: "1" is True and not a number.
_SWITCHES = ("compile", "packed", "resident", "fused_optimizer")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    "none": None,
}


def variable(name: str) -> str:
    """Return the environment variable of an argument.

    Example::

        >>> variable("num_workers")
        'HASTEN_NUM_WORKERS'

    """
    return f"HASTEN_{name.upper()}"


def parse(name: str, text: str) -> Any:
    """Return the value of an argument from its text, checked.

    Args:
        name: of the argument.
        text: "1", "true", "yes", "on" and their opposites for what is on or off, a number, a word, or JSON for
            options of ``compile``.

    Raises:
        ValueError: the argument does not have such a value; the message names what it may have.

    Example::

        >>> parse("packed", "1"), parse("batching", "length"), parse("num_workers", "4")
        (True, 'length', 4)

    """
    written = text.strip()
    value: Any = written
    if written.lower() in _WORDS:
        value = _WORDS[written.lower()]
    elif written.lstrip("-").isdigit():
        value = int(written)
        if name in _SWITCHES and value in (0, 1):
            value = bool(value)
    elif written.startswith("{"):
        try:
            value = json.loads(written)
        except ValueError as error:
            raise make_error(
                ValueError, f"{variable(name)}={text!r}: {error}.", fix='Write JSON, such as {"dynamic": true}.'
            ) from None
    try:
        check_one(name, value)
    except (TypeError, ValueError) as error:
        allowed = str(error).partition("): ")[2] or str(error)
        raise ValueError(f"{variable(name)}={text!r}: {allowed}") from None
    return value


def of(owner: str) -> dict[str, Any]:
    """Return hasten's own arguments of ``"Trainer"`` or ``"Fabric"`` that the environment sets.

    Raises:
        ValueError: a variable has a value that its argument does not have.

    """
    texts = {name: os.environ.get(variable(name), "") for name in OWNERS[owner]}
    return {name: parse(name, text) for name, text in texts.items() if text.strip()}


def of_fabric(given: Mapping[str, object]) -> dict[str, str]:
    """Return Lightning's arguments of Fabric that the environment sets: ``LT_DEVICES=2`` for ``devices="2"``."""
    defaults = {"accelerator": "auto", "strategy": "auto", "devices": "auto", "num_nodes": "1", "precision": "None"}
    found = {name: os.environ[f"LT_{name.upper()}"] for name in defaults if f"LT_{name.upper()}" in os.environ}
    for name, text in found.items():
        if str(given[name]) not in (text, defaults[name]):
            what = f"Fabric({name}={given[name]!r}): the environment variable LT_{name.upper()}={text} replaces it."
            if started_by_command_line():
                raise make_error(ValueError, what, fix="Remove one of the two.", argument=name)
            rank_zero_warn(what, fix="Remove one of the two.")
    return found


def started_by_command_line() -> bool:
    """Return whether a command line for Fabric has started this program, and with it all processes."""
    return os.environ.get("LT_CLI_USED") == "1"


def parse_variables(kind: type, template: str = "PL_%(cls_name)s_%(cls_argument)s") -> Namespace:
    """Return Lightning's arguments that the environment sets: ``PL_TRAINER_DEVICES=2`` for ``Trainer(devices=2)``.

    ``template`` makes the name of a variable of those of the class and of a parameter.

    Example::

        >>> os.environ["PL_LINE_WIDTH"] = "3"
        >>> class Line:
        ...     def __init__(self, width=1): ...
        >>> parse_variables(Line)
        Namespace(width=3)

    """
    found = {}
    for name in inspect.signature(kind).parameters:
        text = os.environ.get(template % {"cls_name": kind.__name__.upper(), "cls_argument": name.upper()})
        if text:
            try:
                found[name] = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                found[name] = text
    return Namespace(**found)


def with_variables(init: Function) -> Function:
    """Make ``__init__`` take the arguments that are not given from the environment, and any of them by position.

    As in Lightning, the variables have the name of the class that is made, also of a subclass.
    """
    names = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def from_environment(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(names):
            raise TypeError(f"{init.__qualname__}() takes {len(names)} arguments, got {len(args)}.")
        kwargs.update(zip(names, args, strict=False))
        found = vars(parse_variables(type(self))) if any(name.startswith("PL_") for name in os.environ) else {}
        init(self, **{**{name: value for name, value in found.items() if name in names}, **kwargs})

    return from_environment  # type: ignore[return-value]


def advice(owner: str, name: str, value: object) -> str:
    """Return how to pass an argument that only hasten's class has."""
    if owner not in OWNERS:
        return f"Import hasten to use {owner}({name}={value!r})."
    text = int(value) if isinstance(value, bool) else value
    option = f"--{name.replace('_', '-')}" + ("" if value is True else f"={text}")
    return (
        f"To use it there, start the program with hasten run {option}, or set {variable(name)}={text}; or write "
        f"hasten.{owner}({name}={value!r}) after import hasten."
    )
