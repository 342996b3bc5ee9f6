"""Enumerations of strings, and the names of accelerators and strategies."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from hasten import strategies
from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import LightningEnum
from hasten.extend.entry_points import found, load
from hasten.extend.origin import ROOTS
from hasten.machine.devices import ACCELERATORS, added_accelerators
from hasten.resolve import REGISTERED_ACCELERATORS, REGISTERED_STRATEGIES, STRATEGIES


class GradClipAlgorithmType(LightningEnum):
    """What ``gradient_clip_algorithm`` takes."""

    VALUE = "value"
    NORM = "norm"

    @staticmethod
    def supported_type(value: str) -> bool:
        """Return whether ``value`` is one of them."""
        return value in list(GradClipAlgorithmType)

    @staticmethod
    def supported_types() -> list[str]:
        """Return all of them."""
        return [member.value for member in GradClipAlgorithmType]


class Registry(dict[str, dict[str, Any]]):
    """The names that an argument accepts; a program can add names of its own.

    Args:
        names: those that there are, with the class and the arguments that make the object; none by default.
        made: where ``resolve`` finds what makes the object of a name that was added; by default a place of its own.

    Example::

        >>> "ddp" in StrategyRegistry, AcceleratorRegistry["cpu"]["description"]
        (True, 'CPUAccelerator')
        >>> StrategyRegistry.get("ddp_spawn").name
        'ddp_spawn'

    """

    _kind: ClassVar[str]

    def __init__(
        self,
        names: Mapping[str, tuple[Any, dict[str, Any]]] | None = None,
        made: dict[str, Callable[[], Any]] | None = None,
    ) -> None:
        super().__init__()
        self._made = {} if made is None else made
        for name, (make, arguments) in (names or {}).items():
            self._add(name, make, make.__name__, arguments)

    def _add(self, name: str, make: Callable[..., Any], description: str, init_params: dict[str, Any]) -> None:
        named = {self._kind: make, f"{self._kind}_name": name}
        self[name] = {**named, "description": description, "init_params": init_params}

    def available_strategies(self) -> list[str]:
        """Return all names."""
        return list(self)

    def available_accelerators(self) -> set[str]:
        """Return all names."""
        return set(self)

    def __str__(self) -> str:
        return f"Registered {self._kind.title().replace('gy', 'gie')}s: {', '.join(self)}"

    def register(
        self,
        name: str,
        strategy: Callable[..., Any] | None = None,
        description: str = "",
        override: bool = False,
        **init_params: Any,
    ) -> object:
        """Give a class a name, which ``Trainer`` and ``Fabric`` then accept.

        Args:
            name: the name; upper and lower case are the same.
            strategy: the class; without it, a decorator for the class is returned.
            description: what it is.
            override: replace the class of a name that was registered before.
            init_params: for the class.

        Raises:
            TypeError: the name is not a string.
            MisconfigurationException: the name exists.

        """
        if not isinstance(name, str):
            raise TypeError(f"`name` must be a str, found {name!r}, of {type(name).__name__}.")
        if (strategy := init_params.pop(self._kind, strategy)) is None:
            return lambda kind: self.register(name, kind, description, override, **init_params)
        if name in self and not override:
            raise MisconfigurationException(
                f"{name!r} is already present in the registry. Choose another name, or pass override=True."
            )
        self._add(name, strategy, description, init_params)
        self._made[name.lower()] = functools.partial(strategy, **init_params)
        return strategy

    def get(self, name: str, default: object = None) -> object:  # type: ignore[override]  # as Lightning's
        """Return an object of the class that ``name`` stands for; ``default`` if there is one and the name is unknown.

        Raises:
            KeyError: the name is unknown.

        """
        if name in self:
            return self[name][self._kind](**self[name]["init_params"])
        if default is not None:
            return default
        raise KeyError(f"{name!r} not found in registry. Available names: {', '.join(self)}.")

    def remove(self, name: str) -> None:
        """Take a registered name back."""
        self.pop(name)
        self._made.pop(name.lower(), None)


class StrategyNames(Registry):
    """The names of strategies."""

    _kind = "strategy"


class AcceleratorNames(Registry):
    """The names of accelerators."""

    _kind = "accelerator"


def _loaded(name: str) -> Any:
    return load("hasten.strategies", name, purpose=f"strategy={name!r}")


def of_package(name: str) -> Any:
    """Return the strategy that another package has added under a name."""
    made = _loaded(name)
    return made() if callable(made) else made


def strategies_by_name(
    facades: Iterable[Any] = (), without: str = "", **named: tuple[Any, dict[str, Any]]
) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return the class and the arguments of each name of a strategy, and those of ``named``.

    ``facades`` take the place of the classes behind them; names that match the pattern ``without`` are left out.
    """
    added = found("hasten.strategies")
    for name in dict.fromkeys((*STRATEGIES, *added)):
        if re.fullmatch(without, name):
            continue
        make: Any = of_package
        arguments: dict[str, Any] = {"name": name}
        if name in STRATEGIES:
            make, arguments = getattr(strategies, STRATEGIES[name][0]), STRATEGIES[name][1]
        elif added[name].value.partition(".")[0] in ROOTS:
            make, arguments = _loaded(name), {}
        if isinstance(make, functools.partial):
            make, arguments = make.func, make.keywords
        if name.startswith("ddp"):
            arguments = {"start_method": "popen", **arguments}
        named[name] = next((facade for facade in facades if facade.behind is make), make), arguments
    return named


AcceleratorRegistry = AcceleratorNames(
    {kind.name(): (kind, {}) for kind in (*ACCELERATORS.values(), *added_accelerators().values())},
    REGISTERED_ACCELERATORS,
)
StrategyRegistry = StrategyNames(strategies_by_name(), REGISTERED_STRATEGIES)


__all__ = ["GradClipAlgorithmType", "LightningEnum"]
