"""Guards for arguments: one line each, and one wording for all.

Each guard takes the owner, the name and the value of an argument and returns the value. A wrong value raises
``MisconfigurationException``, which is a ``ValueError``; a wrong type ``WrongType``, which is a ``TypeError`` as well.
``error=`` raises that instead of both. The exception names the argument (``argument``) and what to write (``fix``).
A bool is not a number here.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from numbers import Real
from typing import Any, TypeVar

from hasten._lib.errors import MisconfigurationException, WrongType, make_error
from hasten._lib.names import did_you_mean
from hasten.extend.origin import module_of

_T = TypeVar("_T")
_Error = type[Exception] | None
# Characters of a value in a message.
_WIDE = 200


def whole(
    owner: str,
    name: str,
    value: _T,
    *,
    at_least: int | None = None,
    at_most: int | None = None,
    unit: str = "",
    allow_none: bool = False,
    allowed: str = "",
    error: _Error = None,
) -> _T:
    """Return ``value`` as an ``int``; numpy's integers count as whole numbers.

    The message names the owner and the argument, and counts in ``unit``: ``"steps"``. ``allowed`` describes what is
    allowed, in place of the text made from the other arguments; ``error`` is raised in place of those above.

    Example::

        >>> whole("Trainer", "max_epochs", -3, at_least=0)
        Traceback (most recent call last):
            ...
        hasten._lib.errors.MisconfigurationException: Trainer(max_epochs=-3): use a whole number of at least 0.

    """
    if value is None and allow_none:
        return value
    allowed = allowed or _described("a whole number", unit, allow_none, at_least=at_least, at_most=at_most)
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise wrong_type(owner, name, value, allowed, error=error) from None
    if (at_least is not None and number < at_least) or (at_most is not None and number > at_most):
        raise wrong(owner, name, value, allowed, error=error)
    return number  # type: ignore[return-value]


def number(
    owner: str,
    name: str,
    value: _T,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    unit: str = "",
    allow_none: bool = False,
    allowed: str = "",
    error: _Error = None,
) -> _T:
    """Return ``value`` if it is a real number within the bounds; NaN never is. See ``whole`` for the arguments.

    Example::

        >>> number("advise", "timeout_seconds", 0, above=0, unit="seconds")
        Traceback (most recent call last):
            ...
        hasten._lib.errors.MisconfigurationException: advise(timeout_seconds=0): use a number of seconds above 0.

    """
    if value is None and allow_none:
        return value
    allowed = allowed or _described(
        "a number", unit, allow_none, at_least=at_least, at_most=at_most, above=above, below=below
    )
    if isinstance(value, bool) or not isinstance(value, Real):
        raise wrong_type(owner, name, value, allowed, error=error)
    given = _as_float(value)
    fits = (
        not math.isnan(given)
        and (at_least is None or given >= at_least)
        and (at_most is None or given <= at_most)
        and (above is None or given > above)
        and (below is None or given < below)
    )
    if not fits:
        raise wrong(owner, name, value, allowed, error=error)
    return value


def boolean(owner: str, name: str, value: _T, *, allow_none: bool = False) -> _T:
    """Return ``value`` if it is True or False. See ``whole`` for the arguments."""
    if isinstance(value, bool) or (value is None and allow_none):
        return value
    allowed = "True, False or None" if allow_none else "True or False"
    raise WrongType(f"{owner}({name}={shown(value)}):", fix=f"use {allowed}.", argument=name)


def one_of(
    owner: str, name: str, value: _T, allowed: Iterable[object], *, allow_none: bool = False, error: _Error = None
) -> _T:
    """Return ``value`` if it is one of ``allowed``; the message names the nearest. See ``whole`` for the arguments.

    Example::

        >>> one_of("Trainer", "dropout", "fst", ("fast",))
        Traceback (most recent call last):
            ...
        hasten._lib.errors.MisconfigurationException: Trainer(dropout='fst'): 'fst' is unknown. Did you mean 'fast'?

    """
    choices = tuple(allowed)
    # 1 == True: a number is not taken for a bool.
    if value is None and allow_none:
        return value
    is_text = isinstance(value, str)
    for choice in choices:
        equal = value == choice if is_text else _equal(value, choice)
        if equal and isinstance(value, bool) == isinstance(choice, bool):
            return value
    texts = [choice for choice in choices if isinstance(choice, str)]
    hint = did_you_mean(value, texts) if isinstance(value, str) else ""
    listed = ", ".join(map(repr, choices)) + (", or None" if allow_none else "")
    raise wrong(owner, name, value, f"one of {listed}", hint=hint, error=error)


def clip_algorithm(owner: str, name: str, value: Any) -> str | None:
    """Return how gradients are clipped, given as a text in any case or a member of an enumeration."""
    text = None if value is None else str(getattr(value, "value", value)).lower()
    return one_of(owner, name, text, ("norm", "value"), allow_none=True)


def instance(
    owner: str,
    name: str,
    value: _T,
    kinds: type | tuple[type, ...],
    allowed: str,
    *,
    allow_none: bool = False,
    error: _Error = None,
) -> _T:
    """Return ``value`` if it is an instance of one of ``kinds``, which ``allowed`` describes. See ``whole``."""
    if isinstance(value, kinds) or (value is None and allow_none):
        return value
    raise wrong_type(owner, name, value, allowed + (", or None" if allow_none else ""), error=error)


def path(owner: str, name: str, value: _T, *, allow_none: bool = False, error: _Error = None) -> _T:
    """Return ``value`` if it is a string or an ``os.PathLike``. See ``whole`` for the arguments."""
    given: Any = value
    if type(given) is str and given.isascii() and "\0" not in given:
        return value
    instance(owner, name, value, (str, os.PathLike), "a path", allow_none=allow_none, error=error)
    text = "" if given is None else os.fspath(given)
    try:
        is_path = "\0" not in text and text.encode(errors="surrogateescape") is not None
    except UnicodeEncodeError:
        is_path = False
    if not is_path:
        raise wrong(owner, name, value, "a path of characters that file systems take", error=error)
    return value


def callable_(
    owner: str, name: str, value: _T, *, allowed: str = "a function", allow_none: bool = False, error: _Error = None
) -> _T:
    """Return ``value`` if it can be called. See ``whole`` for the arguments."""
    return instance(owner, name, value, Callable, allowed, allow_none=allow_none, error=error)  # type: ignore[arg-type]


def wrong(owner: str, name: str, value: object, allowed: str, *, hint: str = "", error: _Error = None) -> Exception:
    """Return the exception for a wrong value: what was given, and the nearest value, or else what is allowed.

    Example::

        >>> wrong("Trainer", "max_time", "soon", "a time such as '90min'")
        MisconfigurationException("Trainer(max_time='soon'): use a time such as '90min'.")

    """
    what, fix = f"{owner}({name}={shown(value)}):", f"use {allowed}."
    if hint:
        what, fix = f"{what} {value!r} is unknown.", hint
    return make_error(error or MisconfigurationException, what, fix=fix, argument=name)


def wrong_type(owner: str, name: str, value: object, allowed: str, *, error: _Error = None) -> Exception:
    """Return the exception for a value of a wrong type. See ``wrong``."""
    given = "" if value is None else f", not {type(value).__name__}"
    what = f"{owner}({name}={shown(value)}):"
    return make_error(error or WrongType, what, fix=f"use {allowed}{given}.", argument=name)


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number with hundreds of digits
        return math.nan


def _equal(value: object, other: object) -> bool:
    try:
        return bool(value == other)
    except (RuntimeError, ValueError):  # tensors and arrays of several numbers
        return False


def shown(value: object) -> str:
    """Return the text of a value for a message: one line, and not a long one."""
    try:
        text = repr(value)
    except ValueError:  # a number with thousands of digits
        text = f"<{type(value).__name__}>"
    first, *more = text.split("\n")
    end = ")" if more and first.endswith("(") and len(first) <= _WIDE else ""
    return f"{first[:_WIDE]}...{end}" if more or len(first) > _WIDE else text


def _described(what: str, unit: str, allow_none: bool, **bounds: float | None) -> str:
    """Return what is allowed; ``bounds`` are called as the arguments of ``number``."""
    given = {name: bound for name, bound in bounds.items() if bound is not None and not math.isinf(bound)}
    if unit:
        what += f" of {unit}"
    if {"at_least", "at_most"} <= given.keys():
        what += f" from {given['at_least']} to {given['at_most']}"
    else:
        of = "," if unit else " of"
        texts = {"at_least": f"{of} at least", "at_most": f"{of} at most", "above": " above", "below": " below"}
        what += " and".join(f"{texts[name]} {bound}" for name, bound in given.items())
    return what + (", or None" if allow_none else "")


def declared(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Check arguments by their annotations, as far as these are booleans, texts, functions, collections and classes.

    Those with another annotation, and numbers, are left out. 0 and 1 are taken for False and True, as from a config
    file.

    ``function`` has annotations that are texts (``from __future__ import annotations``); ``given`` are its arguments by
    name, such as ``locals()``.

    Example::

        >>> def train(strict: bool, name: str | None = None) -> None:
        ...     declared(train, locals())
        >>> train(strict="no")
        Traceback (most recent call last):
            ...
        hasten._lib.errors.WrongType: train(strict='no'): use True or False, not str.

    """
    for name, annotation, kinds, default in _annotated(function):
        value = given[name] if name in given else default  # noqa: SIM401 (``get`` is a call more for each argument)
        if value is default or (value is None and annotation.endswith("| None")):
            continue
        owner = type(given["self"]).__name__ if "self" in given else function.__name__
        # Most are of the class itself: a call less.
        if type(value) not in kinds and not _is_one_of(kinds, value):
            allowed = " or ".join(dict.fromkeys(_TEXTS.get(kind, f"a {kind.__name__}") for kind in kinds))
            raise wrong_type(owner, name, value, allowed + ", or None" * annotation.endswith("| None"))
        if os.PathLike in kinds:
            path(owner, name, value)


def _is_one_of(kinds: tuple[type, ...], value: object) -> bool:
    if bool in kinds and type(value) is int and value in (0, 1):
        return True
    # A text is a sequence, and not what is meant by one.
    is_text = isinstance(value, (str, bytes)) and str not in kinds
    return (isinstance(value, kinds) and not is_text) or is_mock(value)


def is_mock(value: object) -> bool:
    """Return whether a value is of ``unittest.mock``: tests of programs pass them for anything."""
    return module_of(type(value)) == "unittest.mock"


@functools.cache
def _annotated(function: Any) -> list[tuple[str, str, tuple[type, ...], object]]:
    """Return name, annotation, its classes and default of the arguments of a function that ``declared`` checks."""
    found = []
    function = inspect.unwrap(function)
    for name, one in inspect.signature(function).parameters.items():
        # Under Lightning's names annotations are classes, and programs are taken as they are.
        is_one = isinstance(one.annotation, str) and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        if is_one and (kinds := _kinds(function, one.annotation)):
            found.append((name, one.annotation, kinds, one.default))
    return found


def _kinds(function: Any, annotation: str) -> tuple[type, ...]:
    """Return the classes that an annotation names, without None; () if it names anything else."""
    kinds: list[type] = []
    for part in re.split(r" \| (?![^\[]*\])", annotation.removesuffix(" | None")):
        first, *rest = part.partition("[")[0].split(".")
        found: Any = {**function.__globals__, **_PLAIN}.get(first)
        for word in rest:
            found = getattr(found, word, None)
        is_class = isinstance(found, type) and found not in (int, float, object, Any) and not issubclass(found, Enum)
        # Many programs have datasets that derive from nothing; times are read elsewhere.
        if not is_class or getattr(found, "_is_protocol", False) or found.__name__ in ("Dataset", "timedelta"):
            return ()
        kinds.append(found)
    return tuple(kinds)


# What annotations may name, and what messages call it.
_PLAIN: dict[str, Any] = {
    **{kind.__name__: kind for kind in (bool, str, int, float, object)}, "dict": Mapping, "list": Sequence,
}  # fmt: skip
_TEXTS: dict[Any, str] = {
    bool: "True or False", str: "a string", os.PathLike: "a path", Callable: "a function",
    Mapping: "a dict", Sequence: "a list", Iterable: "a list", Collection: "a list",
}  # fmt: skip


def as_list(value: object) -> Any:
    """Return another sequence, such as a list of OmegaConf or a deque, as a list; return other values unchanged."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, list, tuple)):
        return list(value)
    return value
