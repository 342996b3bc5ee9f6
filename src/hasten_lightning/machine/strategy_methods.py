"""Methods of Lightning's strategies that programs call or override, implemented with methods of hasten's strategies.

The loops call what a program has overridden (``runtime.py``); these are the methods as Lightning names them, for
programs that drive a strategy themselves or extend it with ``super()``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from hasten._lib.errors import make_error
from hasten._lib.names import defined_by_program
from hasten._lib.rank_zero import rank_zero_warn
from hasten._lib.tree import is_sharded
from hasten.checkpoint.contents import restore_objects, states_of
from hasten.extend.origin import names_in
from hasten.optim import parse
from hasten.precision.base import Precision
from hasten.precision.fsdp import FSDPPrecision
from hasten.runtime import entered_together, init_module
from hasten.strategies.base import Strategy

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import CPUOffload, ShardingStrategy

    from hasten.machine.cluster import ClusterEnvironment
    from hasten.machine.devices import Accelerator
    from hasten.types import PathLike, StorageOptions

T = TypeVar("T")
State = Mapping[str, object]
Filter = Mapping[str, Callable[[str, Any], bool]]


# Methods of Lightning's strategies that nothing calls here.
_NEVER_CALLED = (
    "_get_process_group_backend", "_register_ddp_hooks", "_setup_model", "configure_ddp", "determine_ddp_device_ids",
    "post_training_step", "set_world_ranks", "setup_distributed", "setup_precision_plugin",
)  # fmt: skip


def _alias_of(name: str) -> Any:
    """Return a property that reads and sets another attribute."""
    return property(lambda self: getattr(self, name), lambda self, value: setattr(self, name, value))


class Methods(Strategy):
    """Methods that the strategies of Trainer and Fabric share."""

    # Objects keep the layout of hasten's classes.
    __slots__ = ()

    @classmethod
    def register_strategies(cls, strategy_registry: object) -> None:
        """Do nothing: hasten's strategies have their names already. Subclasses register their own."""

    def attach(
        self, *, accelerator: Accelerator, devices: list[torch.device], cluster: ClusterEnvironment, num_nodes: int
    ) -> None:
        super().attach(accelerator=accelerator, devices=devices, cluster=cluster, num_nodes=num_nodes)
        launches = len(devices) > 1 and not cluster.creates_processes_externally
        for name in defined_by_program(self, *_NEVER_CALLED, *(("_configure_launcher",) if launches else ())):
            # Its own setup() may call it.
            kinds = type(self).__mro__
            if any(name in names_in(each) for kind in kinds for key, each in vars(kind).items() if key != name):
                continue
            rank_zero_warn(
                f"{type(self).__name__}.{name}() is not called: hasten starts and joins processes and wraps the module "
                "by itself.",
                fix="Override setup(), model_to_device() or a step. If another program is to run, start it with "
                "torchrun.",
            )

    # Lightning's names for what hasten's strategies have under other names.
    _launcher: Any = None
    _accelerator, _num_nodes, _model = _alias_of("accelerator"), _alias_of("num_nodes"), _alias_of("model")
    _layer_sync, _process_group_backend = _alias_of("layer_sync"), _alias_of("_backend")
    _parallel_devices, _precision = _alias_of("parallel_devices"), _alias_of("precision_plugin")

    @property
    def launcher(self) -> object:
        """What starts the processes; None where one process needs nothing."""
        return self._launcher

    def _get_process_group_backend(self) -> object:
        return getattr(self, "process_group_backend", None)

    def setup_distributed(self) -> None:
        """Join the other processes, as ``setup_environment`` does, which a program may override."""
        super().setup_environment()

    def determine_ddp_device_ids(self) -> list[int | None] | None:
        """Return the index of the device of this process; None for the CPU."""
        return None if self.root_device.index is None else [self.root_device.index]

    @property
    def _start_method(self) -> str:
        return getattr(self.launcher, "start_method", "popen")

    @property
    def strategy_name(self) -> str:
        """The name of the strategy, as for ``Trainer(strategy=...)``."""
        return self.name

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Whether an engine of the strategy accumulates gradients."""
        return self.engine.owns_step

    def teardown(self) -> None:
        """Release what the strategy holds; a strategy that a program drives itself releases its parts, too."""
        super().teardown()
        if self._runtime is None:
            self.precision_plugin.teardown()
            if self.accelerator is not None:
                self.accelerator.teardown()

    def _configure_launcher(self) -> None:
        """Do nothing: for ``super()`` in programs that override it."""

    def process_dataloader(self, dataloader: T) -> T:
        """Return the loader as the strategy reads it."""
        return dataloader

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context in which modules are made on the device and in the precision of the run.

        With ``empty_init``, parameters are not initialized, because weights are loaded afterwards.

        """
        if self._runtime is not None:
            return self._runtime.init_module(empty_init)
        return init_module(self, self.precision_plugin, self.root_device, empty_init)


class FabricMethods(Methods):
    """Methods of Fabric's strategies."""

    __slots__ = ()

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which tensors are made on the device and in the precision of the run."""
        if self._runtime is not None:
            return self._runtime.init_tensor()
        return entered_together(self.root_device, self.precision_plugin.tensor_init_context())

    @property
    def precision(self) -> Precision:
        """The number format."""
        return self.precision_plugin

    @precision.setter
    def precision(self, precision: Precision) -> None:
        self.precision_plugin = precision

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Return the module to call in training."""
        return self.wrap(module)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Prepare an optimizer and return it."""
        self.prepare_optimizer(optimizer)
        return optimizer

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: object = None
    ) -> tuple[nn.Module, list[Optimizer], object]:
        """Return a module, its optimizers and their scheduler as the strategy trains them."""
        wrapped = self.setup_module(module)
        return wrapped, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module to the device of this process, in place."""
        module.to(self.root_device)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Scale the gradients of an optimizer so that their norm is at most ``max_norm``; return the norm before."""
        self.precision_plugin.unscale_gradients(optimizer)
        parameters = list(self.precision_plugin.main_params(optimizer))
        return self.engine.clip_norm(parameters, max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Limit each element of the gradients of an optimizer to ``clip_val`` in size."""
        self.precision_plugin.unscale_gradients(optimizer)
        self.precision_plugin.clip_grad_by_value(optimizer, clip_val)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return the weights of a module."""
        return self.state.state_dict(module)

    def load_module_state_dict(self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Restore the weights of a module."""
        if getattr(type(module), "load_state_dict", None) is nn.Module.load_state_dict:
            self.state.load_state_dict(module, state_dict, strict=strict, source="the checkpoint")
        else:
            module.load_state_dict(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer."""
        return self.state.optimizer_state(optimizer)

    def save_checkpoint(  # type: ignore[override]  # as Lightning's
        self, path: PathLike, state: State, storage_options: StorageOptions = None, filter: Filter | None = None
    ) -> None:
        """Write a checkpoint; all processes call it.

        ``state`` has names and modules, optimizers, other objects with ``state_dict``, or plain values; ``filter`` says
        for a name which of its entries are kept.

        """
        contents = states_of(state, filter, self.get_module_state_dict, self.get_optimizer_state)
        if self._runtime is not None:
            self.state.write(path, contents, storage_options)
        elif self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint=contents, path=path, storage_options=storage_options)

    def load_checkpoint(  # type: ignore[override]  # as Lightning's
        self,
        path: PathLike,
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint into objects, in place; return the remaining entries.

        ``state`` has names and objects as for ``save_checkpoint``, or is the module or optimizer whose state is the
        file. ``weights_only=False`` also reads Python objects, which can run code: only for files you trust.

        Raises:
            KeyError: the checkpoint does not have a name.

        """
        if self._runtime is not None:
            contents: dict[str, Any] = self.state.read(path, weights_only=weights_only)
        else:
            contents = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        if not state:
            return contents
        if isinstance(state, (nn.Module, Optimizer)):
            self._load_into(state, contents, strict=strict)
            return {}
        return restore_objects(state, contents, self._load_into, strict=strict, path=path)

    def _load_into(self, target: Any, saved: Any, *, strict: bool, path: PathLike | None = None) -> None:
        if isinstance(target, nn.Module):
            self.load_module_state_dict(target, saved, strict=strict)
        elif isinstance(target, Optimizer):
            self.state.load_optimizer_state(target, saved)
        else:
            target.load_state_dict(saved)


class TrainerMethods(Methods):
    """Methods of the Trainer's strategies."""

    __slots__ = ()

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context in which tensors and modules are made; see ``module_init_context``."""
        return self.module_init_context(empty_init)

    _lightning_module = property(
        lambda self: self.lightning_module, lambda self, module: setattr(self, "connected_module", module)
    )
    # Of a strategy that a program drives itself, without a Trainer.
    _made: tuple[list[Any], list[Any]] = ([], [])

    @property
    def optimizers(self) -> list[Any]:
        return self._made[0] if self._trainer is None else super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Any]) -> None:
        if self._trainer is None:
            self._made = (optimizers, self._made[1])
        else:
            self._trainer.optimizers = optimizers

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        return self._made[1] if self._trainer is None else super().lr_scheduler_configs

    @lr_scheduler_configs.setter
    def lr_scheduler_configs(self, configs: list[Any]) -> None:
        if self._trainer is None:
            self._made = (self._made[0], configs)
        else:
            self._trainer.lr_scheduler_configs[:] = configs

    def connect(self, model: nn.Module | None) -> None:
        super().connect(model)
        self.model = self.model if model is None else model

    def block_backward_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which backward does not exchange gradients with other processes."""
        return nullcontext() if self.model is None else self.engine.no_sync(self.model)

    def model_to_device(self) -> None:
        """Move the module to the device of this process."""
        assert self.lightning_module is not None, "call connect(model) first"
        self.lightning_module.to(self.root_device)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return model

    def setup_optimizers(self, trainer: object) -> None:
        """Make optimizers and schedulers as the module's ``configure_optimizers`` says."""
        module = self.lightning_module
        assert module is not None, "call connect(model) first"
        parsed = parse(module.configure_optimizers(), f"{type(module).__name__}.configure_optimizers()")
        self.optimizers, self.lr_scheduler_configs = list(parsed[0]), list(parsed[1])

    def model_sharded_context(self) -> AbstractContextManager[Any]:
        """Return a context for making layers; it wraps none, because parts are chosen afterwards."""
        return nullcontext()

    def on_train_start(self) -> None:
        """Do nothing: for ``super()`` in programs that override it."""

    on_train_end = on_validation_start = on_validation_end = on_test_start = on_test_end = on_train_start
    on_predict_start = on_predict_end = on_train_start
    post_training_step = setup_precision_plugin = set_world_ranks = on_train_start
    # For a program's ``setup``: the module is wrapped when it is called.
    configure_ddp = _register_ddp_hooks = on_train_start

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Do nothing: for ``super()`` in programs that override it."""


def require_fsdp_precision(precision: object) -> None:
    """Raise TypeError for a precision plugin with which Lightning's ``FSDPStrategy`` does not train."""
    if precision is not None and not isinstance(precision, FSDPPrecision):
        name = type(precision).__name__
        what = f"FSDPStrategy(precision={name}()): it trains with FSDPPrecision only."
        raise make_error(TypeError, what, fix="Write precision='...'.", argument="precision")


class FullyShardedMethods(Strategy):
    """Attributes of ``FSDPStrategy`` in the types that Lightning's has."""

    __slots__ = ()

    _given_mixed_precision: Any = None
    _given_cpu_offload: Any = None
    mixed_precision = _alias_of("_given_mixed_precision")

    @property
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision: Precision) -> None:
        require_fsdp_precision(precision)
        self.set_precision(precision)

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """How parameters are divided."""
        from torch.distributed.fsdp import ShardingStrategy

        return ShardingStrategy[self.shard_mode]  # type: ignore[attr-defined]

    @property
    def cpu_offload(self) -> CPUOffload:
        """Whether parameters are kept on the host."""
        from torch.distributed.fsdp import CPUOffload

        given = self._given_cpu_offload
        return CPUOffload(offload_params=self.offloads) if given is None or isinstance(given, bool) else given  # type: ignore[attr-defined]

    @property
    def mixed_precision_config(self) -> object:
        """The number formats of ``mixed_precision=`` or of the run's precision; None for the module's own."""
        if self._given_mixed_precision is not None:
            return self._given_mixed_precision
        precision: Any = self.precision_plugin
        return getattr(precision, "mixed_precision_config", None)

    def take_arguments(
        self, precision: object, mixed_precision: object, cpu_offload: object, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Store the arguments; return the further ones, without arguments that make no difference here."""
        require_fsdp_precision(precision)
        self._given_mixed_precision, self._given_cpu_offload = mixed_precision, cpu_offload
        self.kwargs: dict[str, Any] = {"use_orig_params": True, **options}
        if options.get("use_orig_params") is False:
            rank_zero_warn("FSDPStrategy(use_orig_params=False): parameters stay what they were.", fix="Leave it out.")
            options = {name: value for name, value in options.items() if name != "use_orig_params"}
        return options


def _refuse_storage_options(owner: object, storage_options: object) -> None:
    if storage_options is not None:
        what = (
            f"{type(owner).__name__}.save_checkpoint(storage_options=...): all processes write the file together, "
            "without such options."
        )
        raise make_error(TypeError, what, fix="Leave it out.", argument="storage_options")


class FabricFolderMethods(FabricMethods):
    """Methods of Fabric's strategies whose checkpoints all processes write."""

    __slots__ = ()

    def save_checkpoint(  # type: ignore[override]  # as Lightning's
        self, path: PathLike, state: State, storage_options: StorageOptions = None, filter: Filter | None = None
    ) -> None:
        """Write a checkpoint with one sharded module; see ``FabricMethods.save_checkpoint``.

        Raises:
            TypeError: there are ``storage_options``.
            ValueError: no module of ``state`` is sharded, or several are.

        """
        _refuse_storage_options(self, storage_options)
        self._require_one_sharded(state)
        super().save_checkpoint(path, state, None, filter)

    def load_checkpoint(  # type: ignore[override]  # as Lightning's
        self,
        path: PathLike,
        state: nn.Module | Optimizer | dict[str, Any] | None = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint into objects, in place; see ``FabricMethods.load_checkpoint``.

        Raises:
            NotImplementedError: ``state`` is an optimizer.
            ValueError: ``state`` has not one sharded module, or ``path`` is not a checkpoint for it.

        """
        call = f"{type(self).__name__}.load_checkpoint"
        if not state or isinstance(state, Optimizer):
            kind, given = (NotImplementedError, "optimizer") if state else (ValueError, state)
            fix = "give the objects to load into, for instance {'model': model, 'optimizer': optimizer}."
            raise make_error(kind, f"{call}(state={given}):", fix=fix, argument="state")
        if isinstance(state, nn.Module):
            if not Path(path).is_file():
                raise ValueError(f"{call}({os.fspath(path)!r}): for a module, give one file.")
        else:
            self._require_one_sharded(state)
            _require_checkpoint(path)
        return super().load_checkpoint(path, state, strict, weights_only)

    def _require_one_sharded(self, state: State) -> None:
        fully = isinstance(self, FullyShardedMethods)
        if not fully and self._runtime is not None:
            return  # One process may have whole parameters.
        found = [name for name, value in state.items() if isinstance(value, nn.Module) and _is_sharded(value)]
        if len(found) != 1:
            kind = "FSDP" if fully else "distributed"
            what = f"Found multiple {kind} models in" if found else f"Could not find a {kind} model in"
            raise make_error(
                ValueError, f"{what} the state of a checkpoint: {found}.", fix="Give one module that setup returned."
            )


class FabricShardedMethods(FullyShardedMethods, FabricFolderMethods):
    """Methods of ``FSDPStrategy`` for Fabric."""

    __slots__ = ()

    def clip_gradients_norm(self, module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Scale the gradients of an optimizer so that their norm is at most ``max_norm``; return the norm before.

        Raises:
            TypeError: the module was not set up.

        """
        if not _is_sharded(module):
            what = f"FSDPStrategy.clip_gradients_norm({type(module).__name__}): its parameters are not sharded."
            raise make_error(TypeError, what, fix="Pass the module that setup returned.")
        return super().clip_gradients_norm(module, *args, **kwargs)


def _is_sharded(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    parts = (FSDPModule, FullyShardedDataParallel)
    return any(isinstance(part, parts) for part in module.modules()) or any(map(is_sharded, module.parameters()))


def _require_checkpoint(path: PathLike) -> None:
    place = Path(path)
    if place.is_dir() and not (place / ".metadata").is_file() and not (place / "meta.pt").is_file():
        raise ValueError(f"{os.fspath(path)!r} is a folder that is not a checkpoint: it has no metadata.")


class TrainerFolderMethods(TrainerMethods):
    """Methods of strategies for the Trainer whose checkpoints all processes write."""

    __slots__ = ()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: PathLike, storage_options: StorageOptions = None
    ) -> None:
        """Write a checkpoint; see ``Strategy.save_checkpoint``.

        Raises:
            TypeError: there are ``storage_options``.

        """
        _refuse_storage_options(self, storage_options)
        super().save_checkpoint(checkpoint, filepath)

    def load_checkpoint(self, checkpoint_path: PathLike, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the contents of a checkpoint; see ``Strategy.load_checkpoint``.

        Raises:
            ValueError: the path is a folder that is not a checkpoint.

        """
        _require_checkpoint(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)


class TrainerShardedMethods(FullyShardedMethods, TrainerFolderMethods):
    """Methods of ``FSDPStrategy`` for the Trainer."""

    __slots__ = ()
