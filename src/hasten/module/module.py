"""LightningModule: what a user overrides, and ``self.log``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten._lib.errors import MisconfigurationException
from hasten._lib.patched import replaced
from hasten._lib.rank_zero import rank_zero_warn
from hasten.module.datamodule import DataHooks
from hasten.module.export import ModelExport
from hasten.module.hook_defaults import ModelHooks
from hasten.module.hparams import HyperparametersMixin, OnClassOnly, construct

if TYPE_CHECKING:
    from hasten.logged_values import LoggedValues
    from hasten.trainer import Trainer


class LightningModule(DataHooks, ModelHooks, ModelExport, HyperparametersMixin, nn.Module):
    """A ``torch.nn.Module`` that knows its training, validation, test and prediction step.

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

    # Annotated for type checkers only: TorchScript would take annotations for types of its own.
    if TYPE_CHECKING:
        _trainer: Trainer | None
        _fabric: Any
        _logged: LoggedValues | None
        _strict_loading: bool | None
        _example_input_array: Any

    # Class attributes, so that a subclass which sets them before super().__init__() finds them too.
    _trainer = None
    _fabric = None
    _logged = None
    _automatic_optimization = True
    _strict_loading = None
    _example_input_array = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        nn.Module.__setattr__(self, name, value)
        if name in _HOOKS:
            replaced(self)

    def __delattr__(self, name: str) -> None:
        nn.Module.__delattr__(self, name)
        if name in _HOOKS:
            replaced(self)

    # -- the steps

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Same as ``torch.nn.Module.forward``."""
        return super().forward(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of one batch: a tensor, or a dict with the key ``"loss"``.

        Args:
            args: ``(batch)`` or ``(batch, batch_idx)``.
            kwargs: not used.

        A dict may also hold ``"loss_weight"``: how many samples or tokens the loss is the mean of. Then
        gradients accumulated over several batches (and processes) are those of the mean over all of them. A
        batch of weight 0 adds nothing.
        Return None to skip a batch.
        """
        raise NotImplementedError(f"{type(self).__name__} has no training_step().")

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Look at one validation batch: ``(batch, batch_idx)``, with several loaders also ``dataloader_idx``."""
        raise NotImplementedError(f"{type(self).__name__} has no validation_step().")

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Look at one test batch: ``(batch, batch_idx)``, with several loaders also ``dataloader_idx``."""
        raise NotImplementedError(f"{type(self).__name__} has no test_step().")

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the prediction for one batch; calls ``forward`` by default."""
        return self(args[0] if args else next(iter(kwargs.values())))

    def configure_optimizers(self) -> Any:
        """Return the optimizer, or optimizer and learning-rate schedulers.

        One of: an optimizer; a list of optimizers; two lists (optimizers, schedulers); a dict with
        ``"optimizer"`` and optionally ``"lr_scheduler"`` (a scheduler, or a dict with ``scheduler``,
        ``interval`` "epoch" or "step", ``frequency``, ``monitor``, ``strict``, ``name``); None.
        """
        raise NotImplementedError(f"{type(self).__name__} has no configure_optimizers().")

    def configure_callbacks(self) -> Any:
        """Return callbacks this module brings along; they replace the Trainer's of the same type."""
        return []

    def configure_model(self) -> None:
        """Create layers here to have them made directly on the device and in the precision of the run."""

    def configure_sharded_model(self) -> None:
        """Older name of ``configure_model``."""

    # -- logging

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a value; it stays on its device until the logging interval, and nothing waits for it.

        Args:
            name: the key.
            value: a number, a tensor of one element, or a ``torchmetrics.Metric``.
            prog_bar: show it in the progress bar.
            logger: hand it to the loggers; True by default.
            on_step: publish the value of a step; default by hook (True in training steps).
            on_epoch: publish the epoch's value; default by hook (True in evaluation and epoch hooks).
            reduce_fx: how the epoch's values become one: "mean" (weighted by batch size), "sum", "min", "max".
            enable_graph: keep the autograd graph of the value.
            sync_dist: reduce over all processes.
            sync_dist_group: not used with ``sync_dist=False``; reductions are over all processes.
            add_dataloader_idx: append the loader's index to the name when there are several.
            batch_size: samples in this batch; read from the batch by default.
            metric_attribute: not needed: metrics are found by identity.
            rank_zero_only: take the value of the first process alone.

        Raises:
            ValueError: values cannot be logged in this hook, or the value has more than one element.

        """
        logged = self._logged
        if logged is None:
            if self._fabric is not None:
                self._fabric.log(name, value)
            else:
                _warn_not_logging(type(self), name)
            return
        logged.record(
            name,
            value,
            # The fields of LogOptions, as a plain tuple: its constructor would cost as much as the rest of this call.
            (
                prog_bar,
                logger,
                on_step,
                on_epoch,
                reduce_fx,
                enable_graph,
                sync_dist,
                sync_dist_group,
                add_dataloader_idx,
                metric_attribute,
                rank_zero_only,
            ),
            batch_size,
        )

    def log_dict(
        self,
        dictionary: Mapping[str, Any],
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log several values (or a ``MetricCollection``) with the same options; see ``log``."""
        if hasattr(dictionary, "keep_same_keys") or type(dictionary).__name__ == "MetricCollection":
            items = dictionary.items(keep_base=False, copy_state=False)  # type: ignore[call-arg]
        else:
            items = dictionary.items()
        for name, value in items:
            self.log(
                name,
                value,
                prog_bar,
                logger,
                on_step,
                on_epoch,
                reduce_fx,
                enable_graph,
                sync_dist,
                sync_dist_group,
                add_dataloader_idx,
                batch_size,
                None,
                rank_zero_only,
            )

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once, on the first process, beside the progress bar."""
        if self._trainer is None:
            print(*args, **kwargs)
        else:
            self._trainer.print(*args, **kwargs)

    # -- what the run looks like from here

    @property
    def trainer(self) -> Trainer:
        """The Trainer of the run.

        Raises:
            RuntimeError: the module is not attached to a Trainer.

        """
        if self._trainer is None and not self._is_exported:
            raise RuntimeError(
                f"{type(self).__name__} is not attached to a Trainer. "
                "self.trainer exists during fit, validate, test and predict."
            )
        return cast("Trainer", self._trainer)

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        # Past nn.Module.__setattr__ and its checks: the Trainer is no part of the model.
        self.__dict__["_trainer"] = trainer
        for child in self.children():
            if isinstance(child, LightningModule):
                child.trainer = trainer

    @property
    def fabric(self) -> Any:
        """The Fabric this module was set up with, or None."""
        return self._fabric

    @fabric.setter
    def fabric(self, fabric: Any) -> None:
        self.__dict__["_fabric"] = fabric

    @property
    def automatic_optimization(self) -> bool:
        """Whether the Trainer runs backward and the optimizer; False for manual optimisation."""
        return self._automatic_optimization

    @automatic_optimization.setter
    def automatic_optimization(self, automatic: bool) -> None:
        self.__dict__["_automatic_optimization"] = automatic
        replaced(self)

    @property
    def strict_loading(self) -> bool:
        """Whether loading a checkpoint asks for exactly the same keys; True by default."""
        return self._strict_loading is None or self._strict_loading

    @strict_loading.setter
    def strict_loading(self, strict: bool) -> None:
        self.__dict__["_strict_loading"] = strict

    @property
    def example_input_array(self) -> Any:
        """An input for ``forward``: summaries show sizes with it, loggers draw the graph."""
        return self._example_input_array

    @example_input_array.setter
    def example_input_array(self, example: Any) -> None:
        self.__dict__["_example_input_array"] = example

    @property
    def device(self) -> torch.device:
        """The device of the parameters (of the first one; the CPU if there are none)."""
        for tensor in (*self.parameters(), *self.buffers()):
            return tensor.device
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point parameter (torch's default if there are none)."""
        for tensor in (*self.parameters(), *self.buffers()):
            if tensor.is_floating_point():
                return tensor.dtype
        return torch.get_default_dtype()

    @property
    def on_gpu(self) -> bool:
        """Whether the parameters are on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def device_mesh(self) -> Any:
        """The device mesh of a strategy that splits the model; None for others."""
        return None if self._trainer is None else getattr(self._trainer.strategy, "device_mesh", None)

    @property
    def current_epoch(self) -> int:
        """Index of the epoch, from 0."""
        return 0 if self._trainer is None else self._trainer.current_epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps done so far in the whole run."""
        return 0 if self._trainer is None else self._trainer.global_step

    @property
    def global_rank(self) -> int:
        """Index of this process among all processes."""
        return 0 if self._trainer is None else self._trainer.global_rank

    @property
    def local_rank(self) -> int:
        """Index of this process on its node."""
        return 0 if self._trainer is None else self._trainer.local_rank

    @property
    def logger(self) -> Any:
        """The Trainer's first logger, or None."""
        if self._fabric is not None:
            return self._fabric.logger
        return None if self._trainer is None else self._trainer.logger

    @property
    def loggers(self) -> list[Any]:
        """The Trainer's loggers."""
        if self._fabric is not None:
            return list(self._fabric.loggers)
        return [] if self._trainer is None else list(self._trainer.loggers)

    # -- optimisation

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list of them, for use in manual optimisation.

        Args:
            use_pl_optimizer: return wrappers whose ``step`` counts in ``global_step`` and handles precision.

        """
        if self._fabric is not None:
            found = list(self._fabric._optimizers)
        else:
            found = self.trainer.wrapped_optimizers if use_pl_optimizer else self.trainer.optimizers
        return found[0] if len(found) == 1 else found

    def lr_schedulers(self) -> Any:
        """Return the learning-rate scheduler, a list of them, or None."""
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        if not found:
            return None
        return found[0] if len(found) == 1 else found

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward in manual optimisation, with the precision and strategy of the run."""
        if self._fabric is not None:
            self._fabric.backward(loss, *args, **kwargs)
            return
        if self.automatic_optimization:
            raise MisconfigurationException(
                "manual_backward() is for manual optimisation. "
                "Set self.automatic_optimization = False in __init__, or return the loss from training_step."
            )
        self.trainer.manual_backward(loss, *args, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run ``loss.backward``. Override it to do something else."""
        if self._fabric is not None:
            self._fabric.backward(loss, *args, **kwargs)
        else:
            loss.backward(*args, **kwargs)

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip the gradients of ``optimizer``'s parameters.

        Args:
            optimizer: whose parameters.
            gradient_clip_val: the largest norm or absolute value; the Trainer's by default.
            gradient_clip_algorithm: "norm" or "value"; the Trainer's by default.

        """
        self.trainer.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip gradients before a step. Override it to clip in another way."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Any,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        """Step the optimizer. An override must pass ``optimizer_closure`` on: it runs step and backward."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear the gradients."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a learning-rate scheduler; ``metric`` is the monitored value, or None."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def toggle_optimizer(self, optimizer: Any) -> None:
        """Let only the parameters of ``optimizer`` require gradients, until ``untoggle_optimizer``."""
        self.untoggle_optimizer(optimizer)
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        state = {
            p: p.requires_grad
            for other in self.trainer.optimizers
            for group in other.param_groups
            for p in group["params"]
        }
        for parameter, required in state.items():
            parameter.requires_grad = required and id(parameter) in own
        self.__dict__["_before_toggle"] = state

    def untoggle_optimizer(self, optimizer: Any) -> None:
        """Undo ``toggle_optimizer``."""
        for parameter, required in self.__dict__.pop("_before_toggle", {}).items():
            parameter.requires_grad = required

    @contextmanager
    def toggled_optimizer(self, optimizer: Any) -> Iterator[None]:
        """Run a block with ``toggle_optimizer`` in force."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def freeze(self) -> None:
        """Stop training: no parameter requires a gradient, and the module is in eval mode."""
        self.requires_grad_(False)
        self.eval()

    def unfreeze(self) -> None:
        """Train all parameters, in train mode."""
        self.requires_grad_(True)
        self.train()

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gather tensors of all processes: ``(world_size, *shape)``.

        Args:
            data: a tensor or a nested collection of tensors.
            group: the process group; all processes by default.
            sync_grads: let gradients flow back.

        """
        if self._fabric is not None:
            return self._fabric.all_gather(data, group=group, sync_grads=sync_grads)
        return self.trainer.all_gather(data, group=group, sync_grads=sync_grads)

    # -- loading

    @OnClassOnly
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | IO[bytes] | Any,
        map_location: Any = None,
        hparams_file: Any = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Make the module again from the hyper-parameters and weights in a checkpoint.

        Args:
            checkpoint_path: path, URL or open binary file.
            map_location: where tensors go; the CPU by default.
            hparams_file: a YAML file with hyper-parameters, for files that hold none.
            strict: ask for exactly the same keys; ``strict_loading`` of the module by default.
            weights_only: False also reads files that hold Python objects: only for files you trust.
            kwargs: arguments of ``__init__`` that replace those stored or were never stored.

        Raises:
            TypeError: ``__init__`` needs arguments that are neither stored nor given.
            RuntimeError: the weights do not fit; names missing, unexpected and mis-shaped keys.

        """
        return construct(cls, checkpoint_path, map_location, hparams_file, weights_only, kwargs, strict)

    def __getstate__(self) -> dict[str, Any]:
        # A copy or pickle of the module is the model alone, not the run it takes part in.
        state = dict(self.__dict__)
        for name in ("_trainer", "_logged", "_fabric"):
            state.pop(name, None)
        return state


_HOOKS = frozenset(
    name
    for base in (DataHooks, ModelHooks, LightningModule)
    for name in vars(base)
    if name.startswith(
        ("on_", "configure_", "optimizer_", "lr_scheduler_step", "transfer_", "setup", "teardown")
    )
    or name.endswith(("_step", "_dataloader"))
    or name in ("backward", "clip_gradients", "prepare_data")
) | {"__class__"}

_warned: weakref.WeakSet[type] = weakref.WeakSet()


def _warn_not_logging(owner: type, name: str) -> None:
    if owner not in _warned:
        _warned.add(owner)
        rank_zero_warn(
            f"self.log({name!r}, ...) in {owner.__name__} did nothing: the module is not attached to a Trainer. "
            "Call it from a step that the Trainer runs."
        )
