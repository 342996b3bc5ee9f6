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

from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.names import did_you_mean, refuse_unknown
from hasten.extend.origin import comes_from
from hasten_lightning import environment

Function = TypeVar("Function", bound=Callable[..., Any])


_ABSENT = object()
# (facade, name) -> what the class behind it had there before a program replaced it.
_replaced: dict[tuple[type, str], object] = {}


class Facade(ABCMeta):
    """The metaclass of facades: instances and subclasses of the class behind a facade count as the facade's, too.

    The class behind a facade is its first base outside of this package. Subclasses of facades, which programs write,
    are ordinary classes.
    """

    # The class that a facade stands for; None in subclasses of facades.
    behind: type | None

    def __init__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> None:
        super().__init__(name, bases, space)
        cls.behind = None
        if not any(isinstance(base, Facade) for base in bases):
            cls.behind = next(base for base in bases if not comes_from(base, "hasten_lightning"))
        if cls.behind is not None and cls.__doc__ is None:
            cls.__doc__ = cls.behind.__doc__

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


def exactly(init: Function) -> Function:
    """Make ``__init__`` of a facade refuse arguments that its signature does not have, and say what to write instead.

    Raises:
        TypeError: an argument is missing, unknown, or one of hasten's own.

    """
    signature = inspect.signature(init)
    facade = init.__qualname__.partition(".")[0]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        unknown = {name: value for name, value in kwargs.items() if name not in signature.parameters}
        if unknown:
            kinds = (kind for kind in type(self).__mro__ if isinstance(kind, Facade) and kind.__name__ == facade)
            behind = next(kind.behind for kind in kinds if kind.behind is not None)
            dropped = _refuse(behind, checked, unknown)
            kwargs = {name: value for name, value in kwargs.items() if name not in dropped}
        init(self, *args, **kwargs)

    show_signature(checked, signature)
    return checked  # type: ignore[return-value]


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
    if facade in environment.OWNERS:
        refuse_unknown(unknown, init, facade)
    name = next(iter(unknown))
    raise make_error(
        TypeError,
        f"{facade}.__init__() got an unexpected keyword argument {name!r}.",
        fix=f"{did_you_mean(name, [each for each in known if each != 'self'])}",
    )


def accepted(behind: type, given: Mapping[str, Any], **renamed: str) -> dict[str, Any]:
    """Return the arguments of a facade's ``__init__`` that the class behind it has.

    Those that it does not have must have their defaults.

    Args:
        behind: the class.
        given: ``locals()`` of the facade's ``__init__``.
        renamed: names that arguments have in the class, by their names in the facade.

    Raises:
        MisconfigurationException: an argument that hasten does not have is given.

    """
    takes = inspect.signature(behind).parameters
    facade = next(kind for kind in type(given["self"]).__mro__ if isinstance(kind, Facade) and kind.behind is behind)
    found = {}
    for name, each in inspect.signature(facade).parameters.items():
        there = renamed.get(name, name)
        if each.kind is each.VAR_KEYWORD:
            continue
        if there in takes and takes[there].kind is not each.VAR_KEYWORD:
            found[there] = given[name]
        elif given[name] != each.default:
            raise MisconfigurationException(
                f"{facade.__name__}({name}=...): hasten has no such argument here.", fix="Leave it out."
            )
    return found


def forward(behind: type, given: Mapping[str, Any], **renamed: str) -> None:
    """Call ``__init__`` of the class behind a facade with what ``accepted`` returns, and nothing else."""
    behind.__init__(given["self"], **accepted(behind, given, **renamed))  # type: ignore[misc]
