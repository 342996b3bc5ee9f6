"""The devices, strategy and precision of a run, under the names that Lightning's Trainer keeps them by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from hasten import resolve
from hasten.machine.devices import Accelerator, CUDAAccelerator, MPSAccelerator
from hasten.precision.base import Precision
from hasten.runtime import ReadOnly
from hasten.seed import set_deterministic
from hasten.strategies.base import Strategy
from hasten.strategies.parallel import ParallelStrategy
from hasten_lightning._classes import fabric_strategies, strategies
from hasten_lightning._classes.strategies import as_facade
from hasten_lightning.facades import Facade
from hasten_lightning.internals.devices import select_auto_accelerator
from hasten_lightning.utilities.exceptions import MisconfigurationException

if TYPE_CHECKING:
    from hasten.checkpoint.files import CheckpointIO
    from hasten.machine.cluster import ClusterEnvironment
    from hasten.runtime import Runtime
    from hasten.strategies.parallel import LayerSync
    from hasten.trainer.trainer import Trainer
    from hasten.types import AcceleratorLike, Devices, Plugin, PrecisionName, StrategyLike


class AcceleratorConnector:
    """The devices, strategy and precision of a Trainer with these arguments; nothing is started.

    Packages use it to resolve devices.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: an argument names something unavailable, or two contradict each other.

    Example::

        >>> connector = AcceleratorConnector(accelerator="cpu", devices=2)
        >>> connector._accelerator_flag, connector._devices_flag, connector._parallel_devices
        ('cpu', 2, [device(type='cpu'), device(type='cpu')])

    """

    _facades: tuple[Facade, ...] = strategies.FACADES

    def __init__(
        self,
        devices: Devices = "auto",
        num_nodes: int = 1,
        accelerator: AcceleratorLike = "auto",
        strategy: StrategyLike = "auto",
        plugins: Plugin | Sequence[Plugin] | None = None,
        precision: PrecisionName | None = None,
        sync_batchnorm: bool = False,
        benchmark: bool | None = None,
        use_distributed_sampler: bool = True,
        deterministic: bool | Literal["warn"] | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        set_deterministic(deterministic, benchmark=benchmark)
        names = ("devices", "num_nodes", "accelerator", "strategy", "plugins", "precision", "sync_batchnorm")
        self._show(resolve.runtime(**{name: given[name] for name in names}), given)
        as_facade(self.strategy, self._facades)

    @classmethod
    def of(cls, trainer: Trainer) -> AcceleratorConnector:
        """Return the connector of a Trainer: a view of its parts."""
        connector = cls.__new__(cls)
        connector._show(trainer._runtime, trainer._given)
        return connector

    def _show(self, runtime: Runtime, given: dict[str, Any]) -> None:
        self._runtime, self._given = runtime, given
        self.use_distributed_sampler: bool = given["use_distributed_sampler"]

    # -- the parts

    accelerator = ReadOnly["Accelerator"]("_runtime.accelerator", "The kind of device.")
    strategy = ReadOnly["Strategy"]("_runtime.strategy", "How the model lives on the devices.")
    precision_plugin = ReadOnly["Precision"]("_runtime.precision", "The floating-point format.")
    cluster_environment = ReadOnly["ClusterEnvironment"]("_runtime.cluster", "What started the processes.")
    checkpoint_io = ReadOnly["CheckpointIO"]("_runtime.checkpoint_io", "Writes and reads checkpoints.")

    @property
    def is_distributed(self) -> bool:
        """Whether the strategy trains with several processes, also where there is only one."""
        return isinstance(self.strategy, ParallelStrategy) or bool(getattr(self.strategy, "is_distributed", False))

    # -- the arguments, as hasten has resolved them

    @property
    def _accelerator_flag(self) -> Accelerator | str:
        given = self._given["accelerator"]
        return given if isinstance(given, Accelerator) else self.accelerator.name()

    @property
    def _devices_flag(self) -> int | list[int]:
        # Where all devices of a machine are taken, their number is what was understood.
        devices: Any = self._given["devices"]
        return self.accelerator.parse_devices(len(self._parallel_devices) if devices in (None, "auto") else devices)

    _parallel_devices = ReadOnly["list[torch.device]"]("strategy.parallel_devices", "The devices of this machine.")
    _num_nodes_flag = ReadOnly[int]("_runtime.num_nodes", "The number of machines.")
    _precision_flag = ReadOnly[str]("precision_plugin.precision", "The name of the floating-point format.")

    @property
    def _strategy_flag(self) -> Strategy | str:
        given = self._given["strategy"]
        return self.strategy if given in (None, "auto") else given

    @property
    def _precision_plugin_flag(self) -> Precision | None:
        given = self._given["plugins"]
        plugins = given if isinstance(given, Sequence) else [given]
        return next((plugin for plugin in plugins if isinstance(plugin, Precision)), None)

    @property
    def _layer_sync(self) -> LayerSync | None:
        return getattr(self.strategy, "layer_sync", None)

    @staticmethod
    def _choose_auto_accelerator() -> str:
        return select_auto_accelerator()

    @staticmethod
    def _choose_gpu_accelerator_backend() -> str:
        for kind in (MPSAccelerator, CUDAAccelerator):
            if kind.is_available():
                return kind.name()
        raise MisconfigurationException("This machine has no GPU that torch can use.")

    def _check_and_init_precision(self) -> Precision:
        # nequip replaces it when it is imported, for devices that this machine need not have.
        return self.precision_plugin


class FabricConnector(AcceleratorConnector):
    """The devices, strategy and precision of a Fabric with these arguments; nothing is started."""

    _facades = fabric_strategies.FACADES

    def __init__(
        self,
        accelerator: AcceleratorLike = "auto",
        strategy: StrategyLike = "auto",
        devices: Devices = "auto",
        num_nodes: int = 1,
        precision: PrecisionName | None = None,
        plugins: Plugin | Sequence[Plugin] | None = None,
    ) -> None:
        super().__init__(devices, num_nodes, accelerator, strategy, plugins, precision)

    precision = AcceleratorConnector.precision_plugin
