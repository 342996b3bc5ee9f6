"""Facades: hasten's classes with the parameters that Lightning's classes of the same names have.

Packages read ``inspect.signature(Trainer)`` and forward the arguments that it names, or let a command line list them,
so parameters of hasten's own would receive what was meant for a model. A facade is a subclass without them.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from hasten._lib.argument_names import refuse_unknown
from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import did_you_mean
from hasten.compat import environment

Function = TypeVar("Function", bound=Callable[..., Any])


class Facade(ABCMeta):
    """The class of facades: what is an instance or a subclass of the class behind one is one of the facade, too.

    The class behind a facade is its first base. Subclasses of facades, which programs write, are ordinary classes.
    """

    # The class that a facade stands for; None in subclasses of facades.
    behind: type | None

    def __init__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> None:
        super().__init__(name, bases, space)
        cls.behind = None if any(isinstance(base, Facade) for base in bases) else bases[0]
        if cls.behind is not None and cls.__doc__ is None:
            cls.__doc__ = cls.behind.__doc__

    # Both look at the bases: where the class behind is abstract, `issubclass(kind, cls.behind)` would come back here.

    def __instancecheck__(cls, instance: Any) -> bool:
        return cls.behind in type(instance).__mro__ or super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return cls.behind in getattr(subclass, "__mro__", ()) or super().__subclasscheck__(subclass)


def original(kind: type) -> type:
    """Return the class that a facade stands for, and any other class itself."""
    behind = kind.behind if isinstance(kind, Facade) else None
    return kind if behind is None else behind


def exactly(init: Function) -> Function:
    """Make ``__init__`` of a facade refuse arguments that its signature does not have, and say what to write instead.

    Raises:
        TypeError: an argument is missing, unknown, or one of hasten's own.

    """
    signature = inspect.signature(init)
    facade = init.__qualname__.partition(".")[0]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if facade == "Trainer":
            kwargs = {**environment.defaults(type(self), signature.parameters), **kwargs}
        unknown = {name: value for name, value in kwargs.items() if name not in signature.parameters}
        if unknown:
            kind = next(kind for kind in type(self).__mro__ if vars(kind).get("__init__") is checked)
            _refuse(original(kind), checked, unknown)
        init(self, *args, **kwargs)

    checked.__signature__ = signature  # type: ignore[attr-defined]  # `inspect.getfullargspec` looks no further.
    return checked  # type: ignore[return-value]


def _refuse(behind: Any, init: Callable[..., Any], unknown: Mapping[str, object]) -> None:
    own, known = inspect.signature(behind.__init__).parameters, inspect.signature(init).parameters
    facade = behind.__name__
    for name, value in unknown.items():
        if name in own and own[name].kind is not inspect.Parameter.VAR_KEYWORD:
            raise TypeError(
                f"{facade}.__init__() got an unexpected keyword argument {name!r}. Lightning's {facade} does not have "
                f"it. {environment.advice(facade, name, value)}"
            )
    if any(each.kind is each.VAR_KEYWORD for each in known.values()):
        return
    if facade in environment.OWNERS:
        refuse_unknown(unknown, init, facade)
    name = next(iter(unknown))
    raise TypeError(
        f"{facade}.__init__() got an unexpected keyword argument {name!r}."
        f"{did_you_mean(name, [each for each in known if each != 'self'])}"
    )


def forward(behind: type, given: Mapping[str, Any], **renamed: str) -> None:
    """Call ``__init__`` of the class behind a facade with the arguments of the facade's ``__init__``.

    Arguments that the class does not have are left out if they have their defaults.

    Args:
        behind: the class.
        given: ``locals()`` of the facade's ``__init__``.
        renamed: names that arguments have in the class, by their names in the facade.

    Raises:
        MisconfigurationException: an argument that hasten does not have is given.

    """
    given = dict(given)
    instance, rest = given.pop("self"), given.pop("kwargs", {})
    given.pop("__class__", None)
    init: Any = behind.__init__  # type: ignore[misc]
    takes = inspect.signature(init).parameters
    facade = next(kind for kind in type(instance).__mro__ if isinstance(kind, Facade) and kind.behind is behind)
    defaults = inspect.signature(facade).parameters
    passed = {}
    for name, value in given.items():
        there = renamed.get(name, name)
        if there in takes and takes[there].kind is not inspect.Parameter.VAR_KEYWORD:
            passed[there] = value
        elif value != defaults[name].default:
            raise MisconfigurationException(
                f"{facade.__name__}({name}=...): hasten has no such argument here. Leave it out."
            )
    init(instance, **passed, **rest)
