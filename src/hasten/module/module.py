"""LightningModule: what a user overrides, and ``self.log``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, Literal, Self, cast, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten._lib import check
from hasten._lib.device import is_cuda
from hasten._lib.errors import MisconfigurationException, add_note, make_error
from hasten._lib.observers import replaced
from hasten._lib.rank_zero import rank_zero_warn
from hasten._lib.tree import is_read_by_jit
from hasten.elsewhere import conventions
from hasten.logged_value import LogOptions
from hasten.module.datamodule import DataHooks
from hasten.module.export import ModelExport
from hasten.module.hook_defaults import CheckpointHooks, ModelHooks
from hasten.module.hparams import HyperparametersMixin, OnClassOnly, construct
from hasten.module.log_methods import LogMethods
from hasten.runtime import ReadOnly
from hasten.types import TrainerStatus

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from hasten import Callback, Fabric, Trainer
    from hasten.loggers.base import Logger
    from hasten.optim import HastenOptimizer
    from hasten.types import (
        Group,
        MapLocation,
        MetricValue,
        OptimizerLRScheduler,
        PathLike,
        Scheduler,
        StepOutput,
        Tensors,
    )


def _of_trainer(name: str, doc: str) -> ReadOnly[int]:
    def number(module: LightningModule) -> int:
        return 0 if module._trainer is None else getattr(module._trainer, name)

    return ReadOnly(number, doc)


class _FabricAsTrainer:
    """Takes the place of the Trainer for a module that Fabric runs; has Fabric's attributes."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self.__dict__["_fabric"], name)
        except (AttributeError, KeyError):
            raise make_error(
                AttributeError,
                f"Your LightningModule code tried to access `self.trainer.{name}` but this attribute is not available "
                "when using Fabric with a LightningModule.",
                fix="Ask self.fabric, or hasattr(self.trainer, ...) first.",
            ) from None


class LightningModule(LogMethods, DataHooks, ModelHooks, ModelExport, HyperparametersMixin, nn.Module):
    """A ``torch.nn.Module`` with its training, validation, test and prediction steps.

    Override ``training_step`` and ``configure_optimizers`` to train, the other steps for the other calls of
    ``Trainer``, and any hook. A batch is what the loader yields, on the device of the run.

    Example::

        >>> import hasten as L, torch
        >>> class Regression(L.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(4, 1)
        ...     def training_step(self, batch, batch_idx):
        ...         x, y = batch
        ...         loss = torch.nn.functional.mse_loss(self.layer(x), y)
        ...         self.log("train_loss", loss)
        ...         return loss
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)

    """

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "hparams_type"

    # Annotated for type checkers only: TorchScript reads annotations of classes.
    if TYPE_CHECKING:
        _trainer: Trainer | None
        _example_input_array: Any
        _compiler_ctx: dict[str, Any] | None
        _moved_to: tuple[torch.device, torch.dtype] | None

    # Class attributes: a subclass may set them before super().__init__().
    _trainer = None
    _automatic_optimization = True
    # Whether the keys of a checkpoint must match the module's exactly.
    strict_loading = True
    _example_input_array = None
    _moved_to = None
    # Set by `from_compiled` of hasten_lightning.
    _compiler_ctx = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)

    # -- the steps

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Same as ``torch.nn.Module.forward``."""
        return super().forward(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> StepOutput:
        """Compute the loss of one batch.

        Args:
            args: ``(batch)`` or ``(batch, batch_idx)``; ``batch_idx`` counts from 0 in each epoch.
            kwargs: not used.

        Returns:
            the loss, a tensor with one element that requires a gradient; or a dict with the loss under ``"loss"``; or
            None to skip the batch. A dict may also hold ``"loss_weight"``: how many samples or tokens the loss is the
            mean of. Then the gradient accumulated over several batches (and processes) is the gradient of the mean over
            all of them, and a batch of weight 0 adds nothing.

        """
        _has_no(self, "training_step")
        return None

    def validation_step(self, *args: Any, **kwargs: Any) -> StepOutput:
        """Evaluate one validation batch.

        Args:
            args: ``(batch, batch_idx)``; with several loaders ``(batch, batch_idx, dataloader_idx)``.
            kwargs: not used.

        Returns:
            anything, for ``on_validation_batch_end``.

        """
        _has_no(self, "validation_step")
        return None

    def test_step(self, *args: Any, **kwargs: Any) -> StepOutput:
        """Evaluate one test batch; see ``validation_step``."""
        _has_no(self, "test_step")
        return None

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the prediction for one batch; calls ``forward`` by default."""
        return self(args[0] if args else next(iter(kwargs.values())))

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizers, and the learning-rate schedulers if there are any.

        Returns:
            one of

            - an optimizer, or a list of optimizers (with several, optimize manually);
            - two lists: optimizers, and learning-rate schedulers or dicts as below;
            - a dict with ``"optimizer"`` and optionally ``"lr_scheduler"``: a scheduler, or a dict with
              ``scheduler``, ``interval`` ("epoch", the default, or "step"), ``frequency`` (1), ``monitor`` (the
              name of a logged value, for ``ReduceLROnPlateau``), ``strict`` (True: an error if that value is missing)
              and ``name`` (for ``LearningRateMonitor``); or a list of such dicts;
            - None to train without an optimizer.

        Example::

            >>> import hasten as L, torch
            >>> class Model(L.LightningModule):
            ...     def configure_optimizers(self):
            ...         optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            ...         steps = int(self.trainer.estimated_stepping_batches)
            ...         scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps)
            ...         return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        """
        _has_no(self, "configure_optimizers")
        return None

    def configure_callbacks(self) -> Sequence[Callback] | Callback:
        """Return callbacks of this module; they replace callbacks of the same type in the Trainer."""
        return []

    def configure_model(self) -> None:
        """Create layers here to have them made directly on the device and in the precision of the run."""

    def configure_sharded_model(self) -> None:
        """Older name of ``configure_model``."""

    def _log_elsewhere(self, name: str, value: MetricValue, options: tuple[Any, ...], batch_size: int | None) -> None:
        if self._fabric is not None:
            self._log_into_fabric({name: value}, LogOptions(*options).logger)
            return
        what, fix = f"self.log({name!r}, ...) in {type(self).__name__}", "Call it from a step that the Trainer runs."
        if self._trainer is not None and not self._trainer.barebones:
            raise MisconfigurationException(f"{what}: its Trainer is not running.", fix=fix)
        if type(self) not in _warned or conventions.current().warns_of_settings:
            _warned.add(type(self))
            rank_zero_warn(f"{what} did nothing: the module is not attached to a Trainer.", fix=fix)

    def print(self, *args: object, **kwargs: Any) -> None:
        """Print on the first process only, above the progress bar."""
        if self._trainer is None:
            print(*args, **kwargs)
        else:
            self._trainer.print(*args, **kwargs)

    # Programs for Lightning call these two, to move a batch of their own.

    def _on_before_batch_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        return self._batch_hook("on_before_batch_transfer")(batch, dataloader_idx)

    def _apply_batch_transfer_handler(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        batch = self._batch_hook("transfer_batch_to_device")(batch, device or self.device, dataloader_idx)
        return self._batch_hook("on_after_batch_transfer")(batch, dataloader_idx)

    def _batch_hook(self, name: str) -> Callable[..., Any]:
        """Return a hook for batches: the datamodule's if it has its own, else the module's."""
        data = None if self._trainer is None else self._trainer.datamodule
        in_data = data is not None and getattr(type(data), name) is not getattr(DataHooks, name)
        hook: Callable[..., Any] = getattr(data if in_data else self, name)
        return hook

    # -- what the run looks like from here

    @property
    def trainer(self) -> Trainer:
        """The Trainer of the run; with Fabric an object with its attributes.

        Raises:
            RuntimeError: the module is not attached to a Trainer.

        """
        if self._fabric is not None:
            return cast("Trainer", _FabricAsTrainer(self._fabric))
        if self._trainer is None and not is_read_by_jit():
            raise make_error(
                RuntimeError,
                f"{type(self).__name__} is not attached to a `Trainer`. self.trainer exists during fit, validate, test "
                "and predict:",
                fix="use it in setup(self, stage) or a later hook, not in __init__.",
            )
        return cast("Trainer", self._trainer)

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        if trainer is not None:
            self.__dict__["_fabric"] = None
        elif self._run_values and self._trainer and self._trainer.state.status is not TrainerStatus.RUNNING:
            # In a run, programs take the Trainer away to copy a module, and give it back.
            self.__dict__["_run_values"] = None
        # Not through nn.Module.__setattr__: the Trainer is not a part of the model.
        self.__dict__["_trainer"] = trainer
        for child in self.children():
            if isinstance(child, LightningModule):
                child.trainer = trainer

    @property
    def fabric(self) -> Fabric | None:
        """The Fabric this module was set up with, or None."""
        return self._fabric

    @fabric.setter
    def fabric(self, fabric: Fabric | None) -> None:
        self.__dict__["_fabric"] = fabric
        for child in self.children():
            if isinstance(child, LightningModule):
                child.fabric = fabric

    @property
    def automatic_optimization(self) -> bool:
        """Whether the Trainer runs backward and the optimizer; False for manual optimization."""
        return self._automatic_optimization

    @automatic_optimization.setter
    def automatic_optimization(self, automatic: bool) -> None:
        self.__dict__["_automatic_optimization"] = automatic
        replaced(self, "automatic_optimization")

    @property
    def example_input_array(self) -> Any:
        """An input for ``forward``: summaries show sizes with it, loggers draw the graph."""
        return self._example_input_array

    @example_input_array.setter
    def example_input_array(self, example: object) -> None:
        self.__dict__["_example_input_array"] = example

    @property
    def device(self) -> torch.device:
        """The device of the parameters (of the first one; if there are none, where the module was moved)."""
        for tensor in (*self.parameters(), *self.buffers()):
            return tensor.device
        return torch.device("cpu") if self._moved_to is None else self._moved_to[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point parameter (if there are none, what the module was converted to)."""
        for tensor in (*self.parameters(), *self.buffers()):
            if tensor.is_floating_point():
                return tensor.dtype
        return torch.get_default_dtype() if self._moved_to is None else self._moved_to[1]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights as torch does; what does not fit is answered by what to write instead."""
        kind = type(self).__name__
        if isinstance(state_dict, Mapping) and isinstance(state_dict.get("state_dict"), Mapping):
            raise make_error(
                RuntimeError,
                f"{kind}.load_state_dict(): this is a checkpoint, and the weights are an entry of it.",
                fix=f"Write load_state_dict(checkpoint['state_dict']), or model = {kind}.load_from_checkpoint(path).",
                argument="state_dict",
            )
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            if "Missing key" in str(error) or "Unexpected key" in str(error):
                # Only where it is asked for: it imports what reads checkpoints.
                from hasten.checkpoint.contents import instead_of

                add_note(error, "", fix=instead_of(state_dict, self.state_dict()))
            raise

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if not any(tensor.is_floating_point() for tensor in chain(self.parameters(), self.buffers())):
            # No tensor will show where the module is.
            probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
            self.__dict__["_moved_to"] = (probe.device, probe.dtype)
        return cast("Self", super()._apply(fn, recurse))

    @property
    def on_gpu(self) -> bool:
        """Whether the parameters are on a CUDA device."""
        return is_cuda(self.device)

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The device mesh of a strategy that splits the model; None for others."""
        return None if self._trainer is None else getattr(self._trainer.strategy, "device_mesh", None)

    current_epoch = _of_trainer("current_epoch", "Index of the epoch, from 0.")
    global_step = _of_trainer("global_step", "Optimizer steps done so far in the whole run.")
    global_rank = _of_trainer("global_rank", "Index of this process among all processes.")
    local_rank = _of_trainer("local_rank", "Index of this process on its node.")

    @property
    def logger(self) -> Logger | None:
        """The Trainer's first logger, or None."""
        if self._fabric is not None:
            return next(iter(self._fabric.loggers), None)
        return None if self._trainer is None else self._trainer.logger

    @property
    def loggers(self) -> list[Logger]:
        """The Trainer's loggers."""
        if self._fabric is not None:
            return list(self._fabric.loggers)
        return [] if self._trainer is None else list(self._trainer.loggers)

    # -- optimisation

    @overload
    def optimizers(self, use_pl_optimizer: Literal[True] = True) -> HastenOptimizer | list[HastenOptimizer]: ...
    @overload
    def optimizers(self, use_pl_optimizer: Literal[False]) -> Optimizer | list[Optimizer]: ...
    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list of several, for manual optimization.

        Args:
            use_pl_optimizer: return wrappers whose ``step`` counts in ``global_step`` and handles precision.

        """
        if self._fabric is not None:
            found = self._own_optimizers(self._fabric.wrapped_optimizers)
        else:
            found = self.trainer.wrapped_optimizers if use_pl_optimizer else self.trainer.optimizers
        return found[0] if len(found) == 1 else found

    def _own_optimizers(self, optimizers: Sequence[Any]) -> list[Any]:
        """Return the optimizers of this module, of those of all modules that Fabric has set up."""
        if len(optimizers) == 1:
            return list(optimizers)
        own = {id(parameter) for parameter in self.parameters()}
        return [one for one in optimizers if any(id(p) in own for group in one.param_groups for p in group["params"])]

    def lr_schedulers(self) -> Any:
        """Return the learning-rate scheduler, a list of them, or None."""
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        if not found:
            return None
        return found[0] if len(found) == 1 else found

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward in manual optimization, in the precision and strategy of the run.

        Args:
            loss: a tensor with one element.
            args: for ``Tensor.backward``.
            kwargs: for ``Tensor.backward``.

        Raises:
            MisconfigurationException: optimization is automatic.

        """
        if self._fabric is not None:
            self._fabric.backward(loss, *args, **kwargs)
            return
        if self.automatic_optimization:
            raise MisconfigurationException(
                "manual_backward() is for manual optimization.",
                fix="Set self.automatic_optimization = False in __init__, or return the loss from training_step.",
            )
        self.trainer.manual_backward(loss, *args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run ``loss.backward``. Override it to do something else."""
        if self._fabric is not None:
            self._fabric.backward(loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)

    def clip_gradients(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of ``optimizer``'s parameters.

        Args:
            optimizer: whose parameters.
            gradient_clip_val: the largest norm or absolute value; the Trainer's by default.
            gradient_clip_algorithm: "norm" or "value"; the Trainer's by default.

        """
        if self._fabric is None:
            self.trainer.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        algorithm = check.clip_algorithm("clip_gradients", "gradient_clip_algorithm", gradient_clip_algorithm)
        limit: dict[str, Any] = {"clip_val" if algorithm == "value" else "max_norm": gradient_clip_val}
        self._fabric.clip_gradients(self, optimizer, **limit)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip gradients before a step. Override it to clip in another way."""
        self.clip_gradients(
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
        )

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Step the optimizer.

        Args:
            epoch: index of the epoch, from 0.
            batch_idx: index of the batch in the epoch, from 0.
            optimizer: what to step.
            optimizer_closure: runs ``training_step`` and backward; an override must pass it to ``optimizer.step``.

        """
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear the gradients."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Scheduler, metric: float | Tensor | None) -> None:
        """Step a learning-rate scheduler; ``metric`` is the monitored value, or None."""
        step: Callable[..., object] = scheduler.step
        if metric is None:
            step()
        else:
            step(metric)

    def toggle_optimizer(self, optimizer: Optimizer) -> None:
        """Let only the parameters of ``optimizer`` require gradients until ``untoggle_optimizer`` is called."""
        if not hasattr(optimizer, "param_groups"):
            allowed = "an optimizer that self.optimizers() returns"
            raise check.wrong_type("toggle_optimizer", "optimizer", optimizer, allowed, error=TypeError)
        self.untoggle_optimizer(optimizer)
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        state = {
            p: p.requires_grad
            for other in self.trainer.optimizers
            for group in other.param_groups
            for p in group["params"]
            if id(p) not in own
        }
        for parameter in state:
            parameter.requires_grad = False
        self.__dict__["_before_toggle"] = state

    def untoggle_optimizer(self, optimizer: Optimizer) -> None:
        """Undo ``toggle_optimizer``."""
        for parameter, required in self.__dict__.pop("_before_toggle", {}).items():
            parameter.requires_grad = required

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer) -> Iterator[None]:
        """Return a context in which only the parameters of ``optimizer`` require gradients."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def freeze(self) -> Self:
        """Turn off gradients of all parameters, switch to eval mode, and return the module."""
        return self.requires_grad_(False).eval()

    def unfreeze(self) -> Self:
        """Turn on gradients of all parameters, switch to train mode, and return the module."""
        return self.requires_grad_(True).train()

    def all_gather(self, data: Tensors, group: Group = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all processes, stacked in a new first dimension.

        Args:
            data: tensors of shape (...), the same on every process, or numbers; alone or in a collection.
            group: the processes; all by default.
            sync_grads: let gradients flow back to the processes that the tensors came from.

        Returns:
            ``data`` with tensors of shape (world_size, ...); without a process group, of shape (...).

        """
        owner = self.trainer if self._fabric is None else self._fabric
        return owner.all_gather(data, group=group, sync_grads=sync_grads)

    # -- loading

    @OnClassOnly
    def load_from_checkpoint(
        cls,
        checkpoint_path: PathLike | IO[bytes],
        map_location: MapLocation = None,
        hparams_file: PathLike | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: object,
    ) -> Self:
        """Build the module from the hyper-parameters and weights in a checkpoint.

        Args:
            checkpoint_path: path, URL or open binary file.
            map_location: where tensors go; the CPU by default.
            hparams_file: a YAML or CSV file with hyper-parameters, for checkpoints without them.
            strict: require exactly the same keys; ``strict_loading`` of the module by default.
            weights_only: False also reads files that hold Python objects: only for files you trust.
            kwargs: arguments of ``__init__``; they take precedence over those stored.

        Raises:
            TypeError: ``__init__`` needs arguments that are neither stored nor given.
            RuntimeError: the weights do not fit; the message names missing, unexpected and mis-shaped keys.

        """
        return construct(cls, checkpoint_path, map_location, hparams_file, weights_only, kwargs, strict)

    def __getstate__(self) -> dict[str, Any]:
        # A copy or pickle of the module is the model without its run.
        state = dict(self.__dict__)
        for name in ("_trainer", "_run_values", "_fabric"):
            state.pop(name, None)
        return state


LightningModule.__hook_names__ = frozenset(
    name
    for base in (DataHooks, CheckpointHooks, ModelHooks, LightningModule)
    for name in vars(base)
    if name.startswith(("on_", "configure_", "optimizer_", "lr_scheduler_step", "transfer_", "setup", "teardown"))
    or name.endswith(("_step", "_dataloader"))
    or name in ("backward", "clip_gradients", "prepare_data")
) | {"__class__"}


def _has_no(module: LightningModule, method: str) -> None:
    """Refuse the call of a method that only subclasses have; Lightning, whose programs call ``super()``, warns."""
    message = f"{type(module).__name__} has no {method}()."
    if not conventions.current().mistakes_are_warnings:
        raise NotImplementedError(message)
    rank_zero_warn(f"`{method}` must be implemented to be used with the Trainer: {message}")


def trainer_of(module: object) -> Trainer | None:
    """Return the Trainer that a module takes part in a run of, or None."""
    return module._trainer if isinstance(module, LightningModule) else None


_warned: weakref.WeakSet[type] = weakref.WeakSet()


@dataclass
class ToggledParameters:
    """What ``toggle_optimizer`` changed about the parameters of a module, as a part of a checkpoint."""

    module: LightningModule

    def state_dict(self) -> dict[str, tuple[bool, bool]]:
        """Return by name whether parameters require gradients now and before ``toggle_optimizer``, while it is on."""
        before = self.module.__dict__.get("_before_toggle", {})
        return {name: (p.requires_grad, before[p]) for name, p in self.module.named_parameters() if p in before}

    def load_state_dict(self, states: Mapping[str, tuple[bool, bool]]) -> None:
        """Restore what ``state_dict`` returned."""
        parameters = dict(self.module.named_parameters())
        known = {parameters[name]: state for name, state in states.items() if name in parameters}
        for parameter, (required, _) in known.items():
            parameter.requires_grad = required
        if states:
            self.module.__dict__["_before_toggle"] = {p: before for p, (_, before) in known.items()}
