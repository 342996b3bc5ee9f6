"""Hyper-parameters: pickling, arguments of ``__init__``, attributes of modules and datamodules."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable
from typing import Any

from hasten.extend import frames
from hasten.module.hparams import AttributeDict, HyperparametersMixin, clean_namespace, is_picklable
from hasten.module.module import trainer_of


def get_init_args(frame: types.FrameType) -> dict[str, Any]:
    """Return the arguments with which the ``__init__`` of a frame was called."""
    return owner_and_arguments(frame)[1]


def owner_and_arguments(frame: types.FrameType) -> tuple[Any, dict[str, Any]]:
    """Return the object of a frame of ``__init__`` and the arguments; None and no arguments for another function."""
    owner = frames.made_in(frame)
    return owner, {} if owner is None else frames.arguments_of(frame)


def parse_class_init_keys(cls: type) -> tuple[str, str | None, str | None]:
    """Return the names of the object, ``*args`` and ``**kwargs`` in the ``__init__`` of a class.

    Example::

        >>> class Net:
        ...     def __init__(self, width, *layers, **options): ...
        >>> parse_class_init_keys(Net)
        ('self', 'layers', 'options')

    """
    spec = inspect.getfullargspec(cls.__init__)  # type: ignore[misc]
    return spec.args[0], spec.varargs, spec.varkw


def collect_init_args(
    frame: types.FrameType, path_args: list[dict[str, Any]], inside: bool = False, classes: tuple[type, ...] = ()
) -> list[dict[str, Any]]:
    """Return ``path_args`` and the arguments of the ``__init__`` of a frame and of the subclasses that called it.

    Args:
        frame: of the innermost ``__init__``, whose arguments come first.
        path_args: what was collected already.
        inside: ignored.
        classes: only objects of these classes; all by default.

    """
    found = list(path_args)
    for current in frames.outwards(frame):
        owner, arguments = owner_and_arguments(current)
        if owner is not None and isinstance(owner, classes or object):
            found.append(arguments)
        elif found:
            break
    return found


def save_hyperparameters(
    obj: HyperparametersMixin,
    *args: object,
    ignore: str | Iterable[str] | None = None,
    frame: types.FrameType | None = None,
    given_hparams: object = None,
) -> None:
    """Do what ``obj.save_hyperparameters`` does.

    Args:
        obj: a module or datamodule.
        *args: what to save; by default all arguments of ``__init__``.
        ignore: names to leave out.
        frame: the frame of the ``__init__``; by default the caller's.
        given_hparams: ignored.

    """
    obj.save_hyperparameters(*args, ignore=ignore, frame=frame or frames.caller())


def lightning_hasattr(model: object, attribute: str) -> bool:
    """Return whether a module, its hyper-parameters or its datamodule have an attribute."""
    return bool(_holders(model, attribute))


def lightning_getattr(model: object, attribute: str) -> Any:
    """Return an attribute of the last of module, hyper-parameters and datamodule that has it, or raise."""
    holder = _holders(model, attribute, needed=True)[-1]
    return holder[attribute] if isinstance(holder, dict) else getattr(holder, attribute)


def lightning_setattr(model: object, attribute: str, value: object) -> None:
    """Set an attribute wherever it is: in the module, its hyper-parameters, its datamodule; raise if nowhere."""
    for holder in _holders(model, attribute, needed=True):
        if isinstance(holder, dict):
            holder[attribute] = value
        else:
            setattr(holder, attribute, value)


def _holders(model: Any, attribute: str, *, needed: bool = False) -> list[Any]:
    found: list[Any] = []
    for owner in (model, getattr(trainer_of(model), "datamodule", None)):
        if hasattr(owner, attribute):
            found.append(owner)
        hparams = getattr(owner, "hparams", None)
        if hparams is not None and attribute in (hparams if hasattr(hparams, "__contains__") else vars(hparams)):
            found.append(hparams)
    if needed and not found:
        raise AttributeError(
            f"{type(model).__name__}: {attribute!r} is neither stored in the model namespace nor the `hparams` "
            "namespace/dict, nor the datamodule."
        )
    return found


__all__ = [
    "AttributeDict", "clean_namespace", "collect_init_args", "get_init_args", "is_picklable",
    "lightning_getattr", "lightning_hasattr", "lightning_setattr", "parse_class_init_keys", "save_hyperparameters",
]  # fmt: skip
