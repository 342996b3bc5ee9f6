"""Fabric under Lightning's names: Lightning's parameters, and its internals that programs read."""

from __future__ import annotations

from collections.abc import Iterable

from hasten.compat import environment
from hasten.compat._classes.fabric_strategies import dress
from hasten.compat.facades import Facade, exactly
from hasten.fabric import fabric
from hasten.loggers.base import Logger
from hasten.strategies.base import Strategy
from hasten.types import AcceleratorLike, Devices, Plugin, PrecisionName, StrategyLike


class Fabric(fabric.Fabric, metaclass=Facade):
    """Run your own training loop: ``hasten.Fabric``, with the parameters of Lightning's Fabric.

    Environment variables set the arguments that only hasten has (``HASTEN_COMPILE=1``;
    ``hasten run --compile program.py`` is the same).

    Raises:
        TypeError: an argument does not exist or has a wrong type.
        ValueError: an argument names something unavailable, or two contradict each other.

    Example::

        >>> isinstance(fabric.Fabric(accelerator="cpu"), Fabric)
        True

    """

    @exactly
    def __init__(
        self,
        *,
        accelerator: AcceleratorLike = "auto",
        strategy: StrategyLike = "auto",
        devices: Devices = "auto",
        num_nodes: int = 1,
        precision: PrecisionName | None = None,
        plugins: Plugin | list[Plugin] | None = None,
        callbacks: object = None,
        loggers: Logger | Iterable[Logger] | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__(**given, **environment.of("Fabric"))
        if not isinstance(strategy, Strategy):
            dress(self._runtime.strategy)
