"""Fabric: devices, precision and processes for programs that keep their own training loop."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset
from torch.utils.weak import WeakTensorKeyDictionary

from hasten._lib import check, torch_private
from hasten._lib.errors import make_error, with_article
from hasten._lib.names import did_you_mean, explain_absent_names, without_unknown
from hasten._lib.observers import set_during
from hasten._lib.rank_zero import rank_zero_deprecation, rank_zero_warn, warn_once
from hasten._lib.tree import map_leaves, map_tensors
from hasten.arguments import check_speed
from hasten.checkpoint.contents import restore_objects, states_of
from hasten.compile.settings import CompileSettings, check_possible
from hasten.data.loaders import in_lightnings_order, prepare, with_seeded_workers
from hasten.elsewhere import conventions
from hasten.fabric.wrappers import (
    FabricDataLoader,
    FabricModule,
    FabricOptimizer,
    check_optimizer,
    check_parameters,
    compiled_of,
    replace_parameters,
    set_up_twice,
    unwrapped,
)
from hasten.loggers.base import Logger, check_metrics
from hasten.machine import same_program
from hasten.machine.collectives import first_one_first, name_who_ended_at_the_top, numbers_as_tensors, operation_name
from hasten.module import LightningModule
from hasten.module.log_methods import log_into
from hasten.optim.backward import InBackward, to_clip
from hasten.optim.fused import check_dense, use_fused
from hasten.precision.builtin import MixedPrecision
from hasten.precision.matmul import matmul_precision as in_matmul_precision
from hasten.precision.matmul import set_matmul_precision
from hasten.resolve import runtime as resolve_runtime
from hasten.runtime import ReadOnly, RuntimeView
from hasten.seed import seed_everything
from hasten.strategies.parallel import is_of_pipeline
from hasten.types import (
    AcceleratorLike,
    CompileLike,
    Devices,
    Group,
    MatmulPrecision,
    MetricValue,
    PathLike,
    Plugin,
    PrecisionName,
    ReduceOperation,
    Scheduler,
    StrategyLike,
    Tensors,
)

if TYPE_CHECKING:
    from hasten.compile.model import CompiledModel
    from hasten.compile.report import CompileReport
    from hasten.precision.base import Precision
    from hasten.strategies.base import Strategy

T = TypeVar("T")
Module = TypeVar("Module", bound=nn.Module)
First = TypeVar("First", bound=Optimizer)
Second = TypeVar("Second", bound=Optimizer)
Collection = TypeVar("Collection", bound="Sequence[Any] | Mapping[Any, Any]")


def _not_a_loader(given: object, position: int) -> TypeError:
    what = f"Fabric.setup_dataloaders(): argument {position} is {with_article(type(given))}."
    fix = "Only a PyTorch DataLoader can be set up; iterate over other things directly and use fabric.to_device(batch)."
    if isinstance(given, Dataset):
        fix = "Write fabric.setup_dataloaders(DataLoader(dataset, batch_size=...))."
    return make_error(TypeError, what, fix=fix)


@explain_absent_names
class Fabric(RuntimeView):
    """Run your own training loop on any device, in any precision, over any number of processes.

    Args:
        accelerator: "auto", "cpu", "cuda", "gpu", "mps", "tpu", or an Accelerator.
        strategy: "auto", "single_device", "ddp", "ddp_spawn", "ddp_notebook", ..., or a Strategy.
        devices: how many (int, -1 for all, "auto") or which (list, "0,1") on each machine.
        num_nodes: how many machines.
        precision: "32-true" (default), "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "fp8",
            "transformer-engine", or the short spellings 16, 32, 64, "16", "bf16", "fp16".
        plugins: a Precision, CheckpointIO or ClusterEnvironment, or a list of them.
        callbacks: objects whose methods ``call`` calls: one or a list.
        loggers: where ``log`` writes: one or a list.
        matmul_precision: "highest", "high" (TF32 on GPUs) or "medium", for ``torch.set_float32_matmul_precision``:
            while the function given to ``launch`` runs, else from ``launch`` or the first ``setup`` on.
        fused_optimizer: True to update all parameters of the optimizers given to ``setup`` in one kernel, False not to;
            None leaves the optimizers unchanged.
        compile: True, "regional" (repeated blocks, once) or a dict of ``torch.compile`` options: ``setup`` compiles
            the module in place, inside the wrapper of the strategy. See ``compile_report``.

    Raises:
        TypeError: an argument does not exist or has a wrong type.
        ValueError: an argument names something unavailable, or two contradict each other.

    Example::

        >>> import torch
        >>> fabric = Fabric(accelerator="cpu")
        >>> model = torch.nn.Linear(2, 1)
        >>> model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> loss = model(torch.ones(4, 2)).sum()
        >>> fabric.backward(loss)
        >>> optimizer.step()

    """

    @without_unknown
    def __init__(
        self,
        *,
        accelerator: AcceleratorLike | None = "auto",
        strategy: StrategyLike | None = "auto",
        devices: Devices | None = "auto",
        num_nodes: int | str = 1,
        precision: PrecisionName | None = None,
        plugins: Plugin | list[Plugin] | None = None,
        callbacks: object = None,
        loggers: Logger | Iterable[Logger] | None = None,
        matmul_precision: MatmulPrecision | None = None,
        fused_optimizer: bool | None = None,
        compile: CompileLike | None = None,
    ) -> None:
        self._runtime = resolve_runtime(
            accelerator=accelerator, strategy=strategy, devices=devices, num_nodes=num_nodes,
            precision=precision, plugins=plugins, owner="Fabric",
        )  # fmt: skip
        if isinstance(self._runtime.precision, MixedPrecision):
            self._runtime.precision.convert_inputs()
        self._speed = check_speed(
            "Fabric", {"matmul_precision": matmul_precision, "fused_optimizer": fused_optimizer, "compile": compile}
        )
        self._compiled: list[CompiledModel] = []
        self._callbacks: list[Any] = _listed(callbacks)
        self._loggers: list[Any] = _listed(loggers)
        wrong = next((logger for logger in self._loggers if not hasattr(logger, "log_metrics")), None)
        if wrong is not None:
            what = f"Fabric(loggers=...): {check.shown(wrong)} is not a logger: it has no method log_metrics."
            raise make_error(TypeError, what, argument="loggers")
        self._optimizers: list[FabricOptimizer] = []
        # Those that were set up, as long as the program has them.
        self._modules: list[weakref.ref[nn.Module]] = []
        # Parameters that optimizers still have, and the shards that have taken their place. Made when there are some,
        # because it cannot be sent to other processes.
        self._replaced: MutableMapping[Tensor, Tensor] = {}
        self._launched = False
        self._inside_run = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "run" in cls.__dict__:
            cls.run = _launching(cls.__dict__["run"])  # type: ignore[method-assign]

    # -- facts

    device = ReadOnly[torch.device]("_runtime.device", "The device of this process.")
    wrapped_optimizers = ReadOnly[list[FabricOptimizer]](
        "_optimizers", "The optimizers that were set up, as ``setup`` returned them."
    )
    loggers = ReadOnly[list[Any]]("_loggers", "All loggers.")
    # Programs for Lightning read these two.
    _precision = ReadOnly["Precision"]("_runtime.precision", "The number format.")
    _strategy = ReadOnly["Strategy"]("_runtime.strategy", "The strategy.")

    @property
    def compile_report(self) -> CompileReport | None:
        """What ``compile`` has done so far: graphs, seconds, breaks and recompiles; None where it is off."""
        if not self._compiled:
            return None
        reports = [model.report() for model in self._compiled]
        left = {name: reason for report in reports for name, reason in report.left.items()}
        names = tuple(name for report in reports for name in report.compiled)
        # Only the first report counts the time of all graphs; add the parts of the other models to it.
        return dataclasses.replace(reports[0], compiled=names, left=left)

    @property
    def logger(self) -> Any:
        """The first logger.

        Raises:
            IndexError: there is none.

        """
        if not self._loggers:
            raise make_error(IndexError, "fabric.logger: no logger was given.", fix="Pass Fabric(loggers=...).")
        return self._loggers[0]

    # -- start

    def launch(self, function: Callable[..., Any] | None = None, *args: object, **kwargs: object) -> Any:
        """Start the other processes, if the run has several.

        Args:
            function: called in every process with this Fabric as its first argument. Without one, the rest of the
                program runs in every process.
            args: for the function.
            kwargs: for the function.

        Returns:
            what the function returns in this process, or in the first of those started as copies.

        Raises:
            TypeError: ``function`` is not callable or takes no argument, or the strategy needs one.

        """
        goes_on_here = function is None
        if function is None:
            if self.strategy.launches_functions and not self._runtime.cluster.creates_processes_externally:
                raise TypeError(
                    f"Fabric.launch() with strategy={self.strategy.name!r} starts copies of this process, which "
                    "need a function to run: fabric.launch(train), with def train(fabric): ...."
                )
            function = Fabric._set_matmul_precision
        elif not callable(function):
            raise make_error(
                TypeError,
                f"Fabric.launch({function!r}): that is not a function.",
                fix="Write launch(train), not launch(train()).",
            )
        elif not inspect.signature(function).parameters:
            raise TypeError(
                f"Fabric.launch({getattr(function, '__name__', function)}): the function must take an argument: it "
                "gets the Fabric."
            )
        elif self._speed.matmul_precision is not None:
            function = functools.partial(_in_matmul_precision, function)
        self._launched = True
        result = self._runtime.launch(functools.partial(function, self, *args, **kwargs))
        if goes_on_here and self._runtime.several_processes:
            name_who_ended_at_the_top()
        return result

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Train. Override it in a subclass; calling it starts the other processes first."""

    def _require_launch(self, method: str) -> None:
        if not self._launched and self.strategy.name != "single_device":
            raise make_error(
                RuntimeError,
                f"Fabric.{method}() before Fabric.launch(): with strategy={self.strategy.name!r} the other processes "
                "must be started first.",
                fix="Call fabric.launch() after making the Fabric.",
            )

    # -- setup

    @overload
    def setup(self, module: Module, *, move_to_device: bool = True, _reapply_compile: bool = True) -> Module: ...
    @overload
    def setup(
        self, module: Module, one: First, /, *, move_to_device: bool = True, _reapply_compile: bool = True
    ) -> tuple[Module, First]: ...
    @overload
    def setup(
        self, module: Module, one: First, two: Second, /, *, move_to_device: bool = True, _reapply_compile: bool = True
    ) -> tuple[Module, First, Second]: ...
    @overload
    def setup(
        self, module: nn.Module, *optimizers: Optimizer, scheduler: Scheduler | None = None,
        move_to_device: bool = True, _reapply_compile: bool = True,
    ) -> tuple[Any, ...]: ...  # fmt: skip
    def setup(
        self,
        module: nn.Module,
        *optimizers: Optimizer,
        scheduler: Scheduler | None = None,
        move_to_device: bool = True,
        _reapply_compile: bool = True,
    ) -> Any:
        """Prepare a module and its optimizers for the device, strategy and precision of the run.

        Args:
            module: the model. A compiled module stays compiled, inside the wrapper of the strategy.
            optimizers: none, one or several.
            scheduler: a learning rate scheduler to return with them.
            move_to_device: move the module to the device of this process.

        Returns:
            the wrapped module; with optimizers a tuple: module, optimizers..., and the scheduler if given.

        Raises:
            TypeError: an argument is not a module or not an optimizer.
            ValueError: an argument was set up already, or an optimizer trains another module.
            RuntimeError: the processes were not launched.

        """
        self._require_launch("setup")
        for optimizer in optimizers:
            check_optimizer(optimizer, "setup")
        wrapped, own = self._wrapped_module(module, "setup", move_to_device, optimizers, scheduler)
        made = self._wrapped_optimizers(own)
        self.call("on_after_setup", fabric=self, module=wrapped)
        if not made:
            return wrapped
        return (wrapped, *made) if scheduler is None else (wrapped, *made, scheduler)

    def setup_module(
        self, module: nn.Module, move_to_device: bool = True, _reapply_compile: bool = True
    ) -> FabricModule:
        """Prepare a module; see ``setup``."""
        self._require_launch("setup_module")
        return self._wrapped_module(module, "setup_module", move_to_device)[0]

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Prepare optimizers for the strategy and precision of the run.

        Args:
            optimizers: one or several.

        Returns:
            the wrapped optimizer, or a tuple of them.

        Raises:
            TypeError: something is not an optimizer.
            ValueError: there are no arguments, one was set up already, or the module it trains was not.

        """
        self._require_launch("setup_optimizers")
        self._runtime.engine.require_own_parameters(
            "Fabric.setup_optimizers()",
            "the engine is made of a module and its optimizer together.",
            "Write model, optimizer = fabric.setup(model, optimizer).",
        )
        if not optimizers:
            raise make_error(ValueError, "Fabric.setup_optimizers() got no optimizer.", fix="Pass at least one.")
        for optimizer in optimizers:
            check_optimizer(optimizer, "setup_optimizers")
        self._check_optimizers(optimizers, "setup_optimizers")
        made = self._wrapped_optimizers(optimizers)
        return made[0] if len(made) == 1 else tuple(made)

    @overload
    def setup_dataloaders(
        self, dataloader: DataLoader[T], /, *, use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> DataLoader[T]: ...
    @overload
    def setup_dataloaders(
        self, *dataloaders: DataLoader[T], use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> list[DataLoader[T]]: ...
    @without_unknown
    def setup_dataloaders(
        self, *dataloaders: DataLoader[Any], use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """Prepare loaders: each process reads its own part of the data, and gets its batches on the device.

        Args:
            dataloaders: one or several ``torch.utils.data.DataLoader``.
            use_distributed_sampler: give each process its own part of the data, the same number of batches each; of an
                ``IterableDataset`` with about as many.
            move_to_device: move batches to the device of this process.

        Returns:
            the wrapped loader, or a list of them.

        Raises:
            TypeError: an argument is not a DataLoader.
            ValueError: there are no arguments, or one was set up already.

        """
        self._require_launch("setup_dataloaders")
        if not dataloaders:
            raise make_error(ValueError, "Fabric.setup_dataloaders() got no dataloader.", fix="Pass at least one.")
        made = []
        loader: Any
        for position, loader in enumerate(dataloaders):
            if isinstance(loader, FabricDataLoader):
                raise set_up_twice("dataloader", "setup_dataloaders")
            if not isinstance(loader, DataLoader):
                if isinstance(loader, (list, tuple)) and all(isinstance(each, DataLoader) for each in loader):
                    what = (
                        f"Fabric.setup_dataloaders(): argument {position} is {with_article(type(loader))} of loaders."
                    )
                    raise make_error(TypeError, what, fix="Give them one by one: fabric.setup_dataloaders(*loaders).")
                raise _not_a_loader(loader, position)
            share: dict[str, Any] = (use_distributed_sampler and self._runtime.distributed_sampler_kwargs) or {}
            ready = prepare(loader, stage="train", name=f"dataloader {position}", **share)
            if share and conventions.current().shuffles_over_processes:
                ready = in_lightnings_order(ready, **share, shuffle=False)
            if os.environ.get("PL_SEED_WORKERS") == "1":
                ready = with_seeded_workers(ready, self.strategy.data_parallel_rank, instead_of=loader)
            device = self.device if move_to_device else None
            made.append(FabricDataLoader(ready, device, self.strategy.sharding, self._runtime.steps))
        return made[0] if len(made) == 1 else made

    def _wrapped_module(
        self,
        module: Any,
        method: str,
        move_to_device: bool,
        optimizers: Sequence[Optimizer] = (),
        scheduler: Scheduler | None = None,
    ) -> tuple[FabricModule, Sequence[Optimizer]]:
        """Return the module as the strategy wraps it, and the optimizers of the engine made of both."""
        if not isinstance(module, nn.Module):
            hint = f" Write {module.__name__}()." if isinstance(module, type) else ""
            if is_of_pipeline(module):
                hint = " Make the pipeline of modules that are not set up, as examples/pipeline_parallel.py does."
            what = f"Fabric.{method}(): the first argument must be a torch.nn.Module, not {type(module).__name__}."
            raise make_error(TypeError, what, fix=hint)
        original, compiled = compiled_of(module)
        if isinstance(original, FabricModule):
            raise set_up_twice("module", method)
        # Programs replace methods of the strategy, and so do tests of theirs.
        if not {"pre_backward", "backward", "post_backward", "optimizer_step"}.isdisjoint(vars(self.strategy)):
            self._runtime.detect_overrides()
        self._set_matmul_precision()
        if move_to_device:
            self.strategy.sharding.check_devices(original, f"Fabric.{method}()")
        self._check_same(original, method)
        self._shard(original)
        self._runtime.place(original, move=move_to_device)
        self._modules.append(weakref.ref(original))
        self._bind_backward()
        if compiled is not None:
            self._runtime.engine.check_compile("Fabric", trains=True)
        elif self._speed.compile is not None:
            self._compile_in_place(original, self._speed.compile)
        if method == "setup":
            # After the module: a precision may have replaced layers.
            self._check_optimizers(optimizers, method, scheduler)
            self._runtime.engine.prepare(owner="Fabric", accumulation=None, clip_norm=None)
            optimizers, _ = self._runtime.engine.make(original, list(optimizers), [])
        inner, optimizers = self._by_strategy(original, optimizers, scheduler)
        wrapped = FabricModule(original, self._runtime, inner, call=compiled)
        if isinstance(original, LightningModule):
            # It logs and steps through this Fabric, and its hooks are called like a callback's.
            original.fabric = self
            log_into(original, None)
            if not any(original is callback for callback in self._callbacks):
                self._callbacks.append(original)
        return wrapped, optimizers

    def _by_strategy(
        self, module: nn.Module, optimizers: Sequence[Optimizer], scheduler: Scheduler | None
    ) -> tuple[nn.Module, Sequence[Optimizer]]:
        return self._runtime.wrap(module), optimizers

    def _shard(self, module: nn.Module) -> None:
        """Have the strategy divide a module, and remember which parameters it has replaced."""
        before = dict(module.named_parameters())
        self._runtime.shard(module)
        for name, parameter in module.named_parameters():
            if before[name] is not parameter:
                self._replaced = self._replaced or WeakTensorKeyDictionary()
                self._replaced[before[name]] = parameter

    def _check_same(self, module: nn.Module, method: str) -> None:
        # A module without parameters to train may exist on one process only.
        if self._runtime.several_processes and any(parameter.requires_grad for parameter in module.parameters()):
            same_program.require_same_module(f"Fabric.{method}()", module)

    def _set_matmul_precision(self) -> None:
        if self._speed.matmul_precision is not None:
            set_matmul_precision(self._speed.matmul_precision)

    def _compile_in_place(self, module: nn.Module, settings: CompileSettings) -> None:
        self._runtime.engine.check_compile("Fabric", trains=True)
        check_possible("Fabric", settings, self.device)
        from hasten.compile.model import Key, compiled_model, for_strategy

        settings = for_strategy("Fabric", settings, module, self.strategy)
        precision = str(self._runtime.precision.precision)
        autocast = isinstance(self.autocast(), torch.autocast)
        model = compiled_model(module, Key(settings, self.device, variant=precision, autocast=autocast))
        model.enable_until_exit(writes=self.is_global_zero)
        self._compiled.append(model)

    def _wrapped_optimizers(self, optimizers: Sequence[Optimizer]) -> list[FabricOptimizer]:
        made = [FabricOptimizer(optimizer, self._runtime, self._callbacks) for optimizer in optimizers]
        self._optimizers.extend(made)
        self._bind_backward()
        return made

    def _check_optimizers(
        self, optimizers: Sequence[Optimizer], method: str, scheduler: Scheduler | None = None
    ) -> None:
        """Check that optimizers train modules that were set up; make them fused if the arguments say so."""
        fused = self._speed.fused_optimizer
        modules = [module for each in self._modules if (module := each()) is not None]
        for optimizer in optimizers:
            replace_parameters(optimizer, self._replaced, method)
            if optimizer.state:  # Adagrad makes it at once: it follows the weights to their format and device.
                optimizer.load_state_dict(optimizer.state_dict())
            check_parameters(optimizer, modules, method, self._runtime.engine)
        for optimizer in optimizers:
            if isinstance(optimizer, InBackward):
                self._runtime.engine.check_in_backward("Fabric", optimizer.optimizer_class.__name__)
            if fused:
                check_dense(optimizer, modules, "Fabric(fused_optimizer=True)")
            if fused is not None:
                use_fused(optimizer, fused, owner=f"Fabric(fused_optimizer={fused})")
            if isinstance(optimizer, SGD) and optimizer.defaults.get("fused"):
                torch_private.begin_momentum_at_zero(optimizer)
            self._runtime.engine.check_optimizer(optimizer, "Fabric")
        if self._runtime.several_processes and optimizers:
            schedulers = [] if scheduler is None else [scheduler]
            same_program.require_same_optimizers(f"Fabric.{method}()", optimizers, schedulers)

    # -- a step

    def backward(self, tensor: Tensor, *args: object, model: nn.Module | None = None, **kwargs: object) -> None:
        """Compute gradients: in place of ``loss.backward()``.

        Args:
            tensor: the loss.
            args: for ``Tensor.backward``.
            model: the model of the loss; only strategies with an engine of their own need it.
            kwargs: for ``Tensor.backward``.

        """
        self._warn_of_missing_setup()
        self._runtime.engine.backward(tensor, *args, **kwargs)

    def _bind_backward(self) -> None:
        """Bind backward directly once nothing is missing: a call of it costs no extra function call then."""
        complete = self._modules and (self._optimizers or self._runtime.engine.scaler is None)
        if complete and type(self).backward is Fabric.backward:
            self.backward = self._runtime.engine.backward  # type: ignore[method-assign]

    def _warn_of_missing_setup(self) -> None:
        """Warn of a module that was not set up, and of gradients that no optimizer of this Fabric unscales."""
        fix = "Write model, optimizer = fabric.setup(model, optimizer) before the loop."
        if not self._modules:
            warn_once(
                "backward without setup",
                "Fabric.backward(): no module was set up, so it trains without the precision and the strategy of this "
                "Fabric.",
                fix=fix,
            )
        elif self._runtime.engine.scaler is not None and not self._optimizers:
            warn_once(
                "backward without an optimizer",
                "Fabric.backward(): it scales the gradients for precision='16-mixed', and no optimizer was set up, "
                "whose step() divides them by the scale.",
                fix=fix,
            )

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Limit the gradients of an optimizer's parameters.

        Args:
            module: the module of these parameters.
            optimizer: the optimizer of these parameters.
            clip_val: the largest size of each element.
            max_norm: the largest norm of all gradients together.
            norm_type: of the norm.
            error_if_nonfinite: raise if the norm is NaN or infinite.

        Returns:
            with ``max_norm`` the norm before clipping, else None.

        Raises:
            ValueError: both or neither of ``clip_val`` and ``max_norm`` are given.

        """
        if (clip_val is None) == (max_norm is None):
            what = f"Fabric.clip_gradients(clip_val={clip_val!r}, max_norm={max_norm!r}):"
            fix = "give one of the two: clip_val limits each element, max_norm the norm of all."
            raise make_error(ValueError, what, fix=fix, argument="clip_val")
        given: object = optimizer
        if isinstance(given, nn.Module):
            what = "Fabric.clip_gradients(): the module comes first, then its optimizer."
            raise make_error(
                TypeError, what, fix="Write fabric.clip_gradients(module, optimizer, ...).", argument="optimizer"
            )
        optimizer = unwrapped(optimizer)
        parameters = to_clip(optimizer, "Fabric.clip_gradients()")
        if self._runtime.engine.unscale is not None:
            self._runtime.engine.unscale(optimizer)
        if clip_val is not None:
            self._runtime.engine.clip_value(parameters, clip_val)
            return None
        assert max_norm is not None
        return self._runtime.engine.clip_norm(parameters, max_norm, norm_type, error_if_nonfinite)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return a context in which operations outside the module compute in the precision of the run."""
        return self._runtime.autocast()

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which backward leaves gradients on this process, for accumulation.

        Args:
            module: as ``setup`` returned it.
            enabled: False for a context that does nothing.

        Raises:
            TypeError: the module was not set up.

        """
        module = compiled_of(module)[0]
        if not isinstance(module, FabricModule):
            what = f"Fabric.no_backward_sync({type(module).__name__}):"
            raise make_error(TypeError, what, fix="pass the module that fabric.setup() returned.")
        return self._runtime.no_sync(module._forward_module) if enabled else nullcontext()

    def to_device(self, obj: T) -> T:
        """Return a tensor, a collection or a module on the device; a module is moved in place."""
        if isinstance(obj, nn.Module):
            return obj.to(self.device)
        return self._runtime.to_device(obj)

    def init_tensor(self) -> AbstractContextManager[Any]:
        """Return a context in which tensors are made on the device and in the precision of the run."""
        return self._runtime.init_tensor()

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context in which modules are made on the device and in the precision of the run.

        Args:
            empty_init: do not initialize parameters, as weights are loaded before ``setup``, which initializes
                those that were not.

        """
        self._require_launch("init_module")
        return self._runtime.init_module(empty_init)

    # -- between processes

    def print(self, *args: object, **kwargs: Any) -> None:
        """Print once on each machine; arguments as for ``print``."""
        if self.local_rank == 0:
            print(*args, **kwargs)

    def barrier(self, name: str | None = None) -> None:
        """Wait until all processes are here."""
        self._require_launch("barrier")
        self._runtime.barrier(name)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of process ``src`` on every process.

        Args:
            obj: anything that can be pickled.
            src: index of the process that sends.

        """
        self._require_launch("broadcast")
        return self._runtime.broadcast(obj, src)

    @overload
    def all_gather(self, data: Tensor | float, group: Group = None, sync_grads: bool = False) -> Tensor: ...
    @overload
    def all_gather(self, data: Collection, group: Group = None, sync_grads: bool = False) -> Collection: ...
    def all_gather(self, data: Tensors, group: Group = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all processes, stacked in a new first dimension.

        Args:
            data: tensors of shape (...), the same on every process, or numbers; alone or in a collection.
            group: the processes; all by default.
            sync_grads: let gradients flow back to the processes that the tensors came from.

        Returns:
            ``data`` with tensors of shape (world_size, ...); without a process group, of shape (...).

        """
        self._require_launch("all_gather")
        return self._runtime.all_gather(data, group=group, sync_grads=sync_grads)

    @overload
    def all_reduce(self, data: Tensor | float, group: Group = None, reduce_op: ReduceOperation = "mean") -> Tensor: ...
    @overload
    def all_reduce(self, data: Collection, group: Group = None, reduce_op: ReduceOperation = "mean") -> Collection: ...
    def all_reduce(self, data: Tensors, group: Group = None, reduce_op: ReduceOperation = "mean") -> Any:
        """Reduce tensors over all processes, element by element and in place, and return them.

        Args:
            data: tensors, the same shapes and types on every process, or numbers; alone or in a collection.
            group: the processes; all by default.
            reduce_op: "mean", "sum", "max", "min" or "product".

        Raises:
            ValueError: ``reduce_op`` is none of these.

        """
        self._require_launch("all_reduce")
        if operation_name(reduce_op) == "mean":
            # The mean of tensors of whole numbers keeps their type; that of numbers is exact.
            data = map_leaves(lambda leaf: float(leaf) if isinstance(leaf, int) else leaf, data)
        return self._runtime.all_reduce(numbers_as_tensors(data, self.device), op=reduce_op, group=group)

    @contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """Let the first process run the block before all others, for instance to download data.

        Args:
            local: the first process of each machine.

        """
        self._require_launch("rank_zero_first")
        with first_one_first(self.local_rank if local else self.global_rank):
            yield

    # -- callbacks and loggers

    def call(self, hook_name: str, *args: object, **kwargs: object) -> None:
        """Call a method of every callback that has it.

        Args:
            hook_name: the name of the method.
            args: for the method.
            kwargs: for the method: those that it takes.

        """
        is_known = False
        for callback in self._callbacks:
            method = getattr(callback, hook_name, None)
            if method is None:
                continue
            is_known = True
            if not callable(method):
                rank_zero_warn(
                    f"fabric.call({hook_name!r}): {type(callback).__name__}.{hook_name} is not a method and is skipped."
                )
                continue
            method(*args, **_taken_by(method, kwargs))
        if not is_known and (near := _near_hook(hook_name, tuple(map(type, self._callbacks)))) is not None:
            warn_once(
                f"fabric.call {hook_name}",
                f"fabric.call({hook_name!r}): no callback has a method of this name, so nothing is called.",
                fix=f"Did you mean {near!r}?",
            )

    def log(self, name: str, value: MetricValue, step: int | None = None) -> None:
        """Give one value to all loggers.

        Args:
            name: of the value.
            value: a number or a tensor with one element, which is read from the device now; or what the loggers take.
            step: the step of the value.

        """
        self.log_dict({name: value}, step=step)

    def log_dict(self, metrics: Mapping[str, MetricValue], step: int | None = None) -> None:
        """Give several values to all loggers; see ``log``. Tensors are read from the device now."""
        check_metrics("Fabric.log_dict", metrics)
        values = {name: map_tensors(functools.partial(_as_number, name), value) for name, value in metrics.items()}
        for logger in self._loggers:
            logger.log_metrics(metrics=values, step=step)

    # -- files

    def save(
        self, path: PathLike, state: dict[str, Any], filter: dict[str, Callable[[str, Any], bool]] | None = None
    ) -> None:
        """Write a checkpoint; all processes must call it.

        Args:
            path: a path or a URL: of a folder with strategies that save sharded checkpoints, else of a file.
            state: names and objects: modules, optimizers and others with ``state_dict``, or plain values.
            filter: for a name of ``state``, a function of (key, value) that says which entries to keep.

        Raises:
            TypeError, ValueError: ``filter`` names what is not there, or holds no functions.
            OSError: the file could not be written; the previous one is untouched.

        """
        _check_order("save", path, state)
        state_io, given = self.strategy.state, unwrapped(state)
        _check_state(given, filter)
        self._runtime.save(path, states_of(given, filter, state_io.state_dict, state_io.optimizer_state))

    def load(
        self,
        path: PathLike,
        state: dict[str, Any] | None = None,
        strict: bool = True,
        *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint into objects, in place.

        Args:
            path: a path or a URL.
            state: names and objects as for ``save``; plain values are replaced in this dictionary.
            strict: raise for a name that the file does not have, and for weights that do not fit.
            weights_only: False reads Python objects too, which can run code: only for files you trust.

        Returns: the entries of the file that are not in ``state``; all of them without ``state``.

        Raises:
            KeyError: the file does not have one of the names.

        """
        _check_order("load", path, state)
        check.path("Fabric.load", "path", path)
        contents = self._runtime.load(path, weights_only=weights_only)
        if state:
            check.instance("Fabric.load", "state", state, dict, f"{_STATE}, or fabric.load_raw(path, obj)")
            if not strict and contents.keys().isdisjoint(state):
                rank_zero_warn(
                    f"Fabric.load(strict=False): {os.fspath(path)} has none of {', '.join(map(repr, state))}, and "
                    f"nothing is loaded. It has: {', '.join(map(repr, contents))}.",
                    fix="Use these names in state.",
                )
            contents = restore_objects(state, contents, self._load_into, strict=strict, path=path)
        self._runtime.barrier("load")
        return contents

    def load_raw(
        self, path: PathLike, obj: nn.Module | Optimizer, strict: bool = True, *, weights_only: bool | None = None
    ) -> None:
        """Read a file that holds nothing but the state of one module or optimizer.

        Args:
            path: a path or a URL.
            obj: the module or optimizer, wrapped or not.
            strict: raise for weights that do not fit.
            weights_only: see ``load``.

        """
        if not hasattr(obj, "load_state_dict"):
            what = f"Fabric.load_raw(obj={check.shown(obj)}): use a module or an optimizer, not {type(obj).__name__}."
            fix = "Write fabric.load(path, state) for a dict of them."
            raise make_error(TypeError, what, fix=fix, argument="obj")
        self._load_into(obj, self._runtime.load(path, weights_only=weights_only), strict=strict, path=path)

    def _load_into(self, target: Any, saved: Any, *, strict: bool, path: PathLike) -> None:
        target = unwrapped(target)
        if isinstance(target, nn.Module):
            self.strategy.state.load_module(target, saved, strict=strict, source=os.fspath(path))
        elif isinstance(target, Optimizer):
            self.strategy.state.load_optimizer_state(target, saved)
        else:
            target.load_state_dict(saved)

    def sharded_model(self) -> AbstractContextManager[Any]:
        """Return ``init_module()``; an older name."""
        rank_zero_deprecation("Fabric.sharded_model() has another name now. Write fabric.init_module().")
        return self.init_module()

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
        """Seed python, numpy, torch and (unless ``workers=False``) the workers of loaders; return the seed."""
        return seed_everything(seed, workers=workers is None or bool(workers), verbose=verbose)


def _in_matmul_precision(function: Callable[..., T], fabric: Fabric, *args: object, **kwargs: object) -> T:
    assert fabric._speed.matmul_precision is not None
    with in_matmul_precision(fabric._speed.matmul_precision):
        return function(fabric, *args, **kwargs)


def _run_inside(fabric: Fabric, *args: Any, **kwargs: Any) -> Any:
    with set_during(fabric, _inside_run=True):
        return fabric.run(*args, **kwargs)


def _launching(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``run`` that starts the processes before it runs."""

    @functools.wraps(run)
    def launched(self: Fabric, *args: Any, **kwargs: Any) -> Any:
        if self._inside_run:
            return run(self, *args, **kwargs)
        return self.launch(_run_inside, *args, **kwargs)

    return launched


@functools.lru_cache(64)
def _near_hook(name: str, callbacks: tuple[type, ...]) -> str | None:
    """Return the method of a callback of which a name looks like a misspelling; None if none is so close."""
    methods = {each for kind in callbacks for each in dir(kind) if not each.startswith("_")}
    # As for methods that look like hooks: one or two letters of twenty differ.
    return next(iter(difflib.get_close_matches(name, methods, n=1, cutoff=0.9)), None)


def _taken_by(method: Callable[..., object], kwargs: dict[str, object]) -> dict[str, object]:
    """Return the keywords that a method of a callback takes: programs for Lightning leave out what they do not use."""
    try:
        parameters = inspect.signature(method).parameters if kwargs else {}
    except (TypeError, ValueError):
        return kwargs
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}


def _listed(value: Any) -> list[Any]:
    value = check.as_list(value)
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _as_number(name: str, value: Tensor) -> Any:
    if value.numel() != 1:
        what = f"fabric.log({name!r}, ...): the tensor has the shape {tuple(value.shape)}."
        raise make_error(ValueError, what, fix="Log one number, for instance its mean: value.mean().")
    return value.item()


# -- objects to the contents of a checkpoint, and back


def _check_order(method: str, path: object, state: object) -> None:
    if isinstance(state, (str, os.PathLike)) and not isinstance(path, (str, os.PathLike)):
        what = f"Fabric.{method}({check.shown(path)}, {check.shown(state)}): the path comes first, then the objects."
        fix = f"Write fabric.{method}({check.shown(state)}, {{'model': model}})."
        raise make_error(TypeError, what, fix=fix, argument="path")


def _check_state(state: object, filter: Any) -> None:
    check.instance("Fabric.save", "state", state, Mapping, _STATE)
    assert isinstance(state, Mapping)
    check.instance("Fabric.save", "filter", filter, dict, "a dict of names and functions", allow_none=True)
    for name, function in (filter or {}).items():
        if name not in state:
            what = f"Fabric.save(filter={{{name!r}: ...}}): state has no {name!r}."
            fix = f"{did_you_mean(name, state)} It has: {', '.join(map(repr, state))}."
            raise make_error(ValueError, what, fix=fix, argument="filter")
        check.callable_("Fabric.save", f"filter[{name!r}]", function, allowed="a function of (key, value)")


_STATE = "a dict of names and objects, such as {'model': model}"
