"""Facades: hasten's classes with the parameters that Lightning's classes of the same names have.

Packages read ``inspect.signature(Trainer)`` and forward the arguments that it names, or let a command line list them,
so parameters of hasten's own would receive what was meant for a model. A facade is a subclass without them, with the
signature that ``signatures.txt`` has for it.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping
from typing import Any

from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.names import refuse_unknown
from hasten._lib.optional import need
from hasten.extend.origin import comes_from, full_name
from hasten_lightning import environment
from hasten_lightning.signatures import signature_of

_ABSENT = object()
# (facade, name) -> what the class behind it had there before a program replaced it.
_replaced: dict[tuple[type, str], object] = {}


class Facade(ABCMeta):
    """The metaclass of facades: instances and subclasses of the class behind a facade count as the facade's, too.

    The class behind a facade is its first base outside of this package. A facade with a signature and without an
    ``__init__`` passes its arguments on. A package that the class attribute ``needs`` names must be installed.
    Subclasses of facades, which programs write, are ordinary classes.
    """

    # The class that a facade stands for; None in subclasses of facades.
    behind: type | None

    def __init__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> None:
        super().__init__(name, bases, space)
        cls.behind = None
        if not any(isinstance(base, Facade) for base in bases):
            cls.behind = next(base for base in bases if not comes_from(base, "hasten_lightning"))
        if cls.behind is None:
            return
        if cls.__doc__ is None:
            cls.__doc__ = cls.behind.__doc__
        if "__init__" not in space and (signature := signature_of(full_name(cls))) is not None:

            def __init__(self: Any, given: dict[str, Any], **_: Any) -> None:  # noqa: N807
                forward(cls, self, given)

            type.__setattr__(cls, "__init__", _taking(signature, __init__, name))

    def __setattr__(cls, name: str, value: Any) -> None:
        """Set an attribute; what a program replaces on a facade is replaced for all classes of that kind."""
        behind, inherited = cls.__dict__.get("behind"), name not in cls.__dict__ or (cls, name) in _replaced
        super().__setattr__(name, value)
        if behind is not None and inherited and not name.startswith(("__", "_abc_")) and name != "behind":
            _replaced.setdefault((cls, name), behind.__dict__.get(name, _ABSENT))
            setattr(behind, name, value)

    def __delattr__(cls, name: str) -> None:
        """Delete an attribute; the class behind the facade gets back the value that setting it replaced."""
        super().__delattr__(name)
        if (cls, name) in _replaced:
            before: Any = _replaced.pop((cls, name))
            if before is _ABSENT:
                delattr(cls.behind, name)
            else:
                setattr(cls.behind, name, before)

    # Both look at the bases: where the class behind is abstract, `issubclass(kind, cls.behind)` would come back here.

    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.behind in type(instance).__mro__ or super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return cls.behind in getattr(subclass, "__mro__", ()) or super().__subclasscheck__(subclass)


def original(kind: type) -> type:
    """Return the class that a facade stands for, and any other class itself."""
    behind = kind.behind if isinstance(kind, Facade) else None
    return kind if behind is None else behind


def exactly(init: Callable[..., None]) -> Callable[..., None]:
    """Make ``__init__`` of a facade take the arguments that Lightning's class has, and refuse others.

    ``init`` gets the object, the named arguments by name, and further ones as keywords.

    Raises:
        TypeError: an argument is missing, unknown, or one of hasten's own; the message says what to write instead.

    """
    name = full_name(init).removesuffix(".__init__")
    signature = signature_of(name)
    assert signature is not None
    return _taking(signature, init, name.rpartition(".")[2])


def _taking(signature: inspect.Signature, init: Callable[..., None], facade: str) -> Callable[..., None]:
    rest = next((name for name, each in signature.parameters.items() if each.kind is each.VAR_KEYWORD), "")

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        unknown = {name: value for name, value in kwargs.items() if name not in signature.parameters}
        if unknown:
            kinds = (kind for kind in type(self).__mro__ if isinstance(kind, Facade) and kind.__name__ == facade)
            behind = next(kind.behind for kind in kinds if kind.behind is not None)
            dropped = _refuse(behind, checked, unknown)
            kwargs = {name: value for name, value in kwargs.items() if name not in dropped}
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{facade}.__init__() {error}") from None
        bound.apply_defaults()
        given = {name: value for name, value in bound.arguments.items() if name != "self"}
        if needs := getattr(self, "needs", ""):
            need(needs, purpose=facade)
        init(self, given, **given.pop(rest, {}))

    show_signature(checked, signature)
    checked.__annotations__ = {
        name: each.annotation for name, each in signature.parameters.items() if each.annotation is not each.empty
    }
    return checked


def show_signature(function: Callable[..., object], signature: inspect.Signature) -> None:
    """Have ``inspect`` and command lines see another signature of a function; ``inspect`` looks no further."""
    vars(function)["__signature__"] = signature


def annotate(init: Callable[..., None], **types: object) -> None:
    """Put types in place of their names in the signature of an ``__init__``: programs and command lines read them."""
    signature = inspect.signature(init)
    parameters = [
        each.replace(annotation=types.get(name, each.annotation)) for name, each in signature.parameters.items()
    ]
    show_signature(init, signature.replace(parameters=parameters))
    inspect.unwrap(init).__annotations__.update(types)


def _refuse(behind: Any, init: Callable[..., Any], unknown: Mapping[str, object]) -> set[str]:
    """Raise for unknown arguments; return those to leave out.

    jsonargparse takes the arguments of the class behind for ``**kwargs``, and passes their defaults.
    """
    own, known = inspect.signature(behind.__init__).parameters, inspect.signature(init).parameters
    facade = behind.__name__
    open_ended = any(each.kind is each.VAR_KEYWORD for each in known.values())
    dropped = {name for name, value in unknown.items() if open_ended and name in own and value == own[name].default}
    for name, value in unknown.items():
        if name in own and name not in dropped and own[name].kind is not inspect.Parameter.VAR_KEYWORD:
            raise make_error(
                TypeError,
                f"{facade}.__init__() got an unexpected keyword argument {name!r}. Lightning's {facade} does not have "
                "it.",
                fix=environment.advice(facade, name, value),
            )
    if open_ended:
        return dropped
    refuse_unknown(unknown, init, facade)
    return set()


def accepted(facade: Facade, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a facade that the class behind it has, by their names there.

    Those that it does not have must have their defaults.

    Raises:
        MisconfigurationException: an argument that hasten does not have is given.

    """
    takes = inspect.signature(original(facade)).parameters
    found = {}
    for name, each in inspect.signature(facade).parameters.items():
        there = name if name in takes else _OTHER_NAMES.get(name, name)
        if each.kind is each.VAR_KEYWORD:
            continue
        if there in takes and takes[there].kind is not each.VAR_KEYWORD:
            found[there] = given[name]
        elif given[name] != each.default:
            raise MisconfigurationException(
                f"{facade.__name__}({name}=...): hasten has no such argument here.", fix="Leave it out.", argument=name
            )
    return found


def forward(facade: Facade, instance: object, given: Mapping[str, Any]) -> None:
    """Call ``__init__`` of the class behind a facade with what ``accepted`` returns, and nothing else."""
    original(facade).__init__(instance, **accepted(facade, given))  # type: ignore[misc]


# What an argument is called in classes that do not have it under its own name.
_OTHER_NAMES = {"precision": "precision_plugin", "precision_plugin": "precision"}
