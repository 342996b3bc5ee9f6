"""The names that ``strategy=`` and ``accelerator=`` take, as programs of the field ask for them."""

from __future__ import annotations

from typing import Any, NoReturn

from hasten._lib.errors import MisconfigurationException
from hasten.machine.devices import ACCELERATORS
from hasten.resolve import STRATEGIES


class Registry:
    """Names that can be asked for; own classes are passed as objects and need no name.

    Args:
        argument: the argument that takes these names.
        names: the names.

    Example::

        >>> "ddp" in StrategyRegistry
        True
        >>> AcceleratorRegistry.available_accelerators()[0]
        'cpu'

    """

    def __init__(self, argument: str, names: list[str]) -> None:
        self._argument, self._names = argument, names

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Any:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def keys(self) -> list[str]:
        """Return all names."""
        return list(self._names)

    available_strategies = available_accelerators = keys

    def register(self, name: str, *_: Any, **__: Any) -> NoReturn:
        """Refuse: a class of one's own is passed as an object."""
        raise MisconfigurationException(
            f"{name!r} cannot be registered as a name: pass the object, {self._argument}=..., instead."
        )


AcceleratorRegistry = Registry("accelerator", sorted(ACCELERATORS))
StrategyRegistry = Registry("strategy", ["single_device", *STRATEGIES])
