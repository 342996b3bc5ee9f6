"""Where a value to be tuned is kept: in the module, its hyper-parameters, the datamodule or its hyper-parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import did_you_mean


def holders(module: Any, datamodule: Any, name: str) -> list[Any]:
    """Return everything that has an attribute or hyper-parameter ``name``."""
    candidates: list[Any] = []
    for owner in (module, datamodule):
        if owner is not None:
            candidates += [owner, getattr(owner, "hparams", {})]
    return [one for one in candidates if (name in one if isinstance(one, dict) else hasattr(one, name))]


def get(module: Any, datamodule: Any, name: str) -> Any:
    """Return the value of ``name``.

    Raises:
        MisconfigurationException: nothing has it.

    """
    found = holders(module, datamodule, name)
    if not found:
        known = [
            key for owner in (module, datamodule) if owner is not None for key in vars(owner) if key[0] != "_"
        ]
        known += [key for owner in (module, datamodule) for key in getattr(owner, "hparams", {})]
        raise MisconfigurationException(
            f"Field {name!r} not found: it is neither an attribute of {type(module).__name__} nor in its hparams, "
            f"nor in the datamodule.{did_you_mean(name, known)} "
            f"Set self.{name} in __init__ and use it, or name another."
        )
    return _value(found[0], name)


def put(module: Any, datamodule: Any, name: str, value: Any) -> None:
    """Set ``name`` wherever it is kept."""
    for holder in holders(module, datamodule, name):
        _set(holder, name, value)


def remember(module: Any, datamodule: Any, name: str) -> Callable[[], None]:
    """Return what gives each holder of ``name`` its present value back."""
    before = [(holder, _value(holder, name)) for holder in holders(module, datamodule, name)]

    def undo() -> None:
        for holder, value in before:
            _set(holder, name, value)

    return undo


def first_of(module: Any, datamodule: Any, names: tuple[str, ...]) -> str | None:
    """Return the first of ``names`` that is kept somewhere."""
    return next((name for name in names if holders(module, datamodule, name)), None)


def _value(holder: Any, name: str) -> Any:
    return holder[name] if isinstance(holder, dict) else getattr(holder, name)


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, dict):
        holder[name] = value
        return
    try:
        setattr(holder, name, value)
    except AttributeError as error:
        raise MisconfigurationException(
            f"{type(holder).__name__}.{name} cannot be set ({error}). Make it an attribute, or give it "
            "a setter."
        ) from error
