"""Fabric: the front door for those who keep their own loop."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hasten._lib.argument_names import refuse_unknown
from hasten.arguments import check_speed
from hasten.data.loaders import prepare
from hasten.fabric import state as states
from hasten.fabric.checks import check_devices, check_in_backward, check_optimizer, check_parameters
from hasten.fabric.compiled import compile_for_good
from hasten.fabric.view import FabricView
from hasten.fabric.wrappers import FabricDataLoader, FabricModule, FabricOptimizer, compiled_of, unwrapped
from hasten.machine.spawn import StartCopies
from hasten.optim.backward import InBackward, to_clip
from hasten.optim.fused import use_fused
from hasten.precision.matmul import matmul_precision as within_matmul_precision
from hasten.precision.matmul import set_matmul_precision
from hasten.resolve import runtime as resolve_runtime
from hasten.runtime import Runtime
from hasten.seed import seed_everything

if TYPE_CHECKING:
    from hasten.compile.model import CompiledModel

Path = str | os.PathLike[str]


class Fabric(FabricView):
    """Run your own training loop on any device, in any precision, over any number of processes.

    Args:
        accelerator: "auto", "cpu", "cuda", "gpu", "mps", or an Accelerator.
        strategy: "auto", "single_device", "ddp", "ddp_spawn", "ddp_notebook", ..., or a Strategy.
        devices: how many (int, -1 for all, "auto") or which (list, "0,1") on each machine.
        num_nodes: how many machines.
        precision: "32-true" (default), "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", or the short
            spellings 16, 32, 64, "16", "bf16", "fp16".
        plugins: a Precision, CheckpointIO or ClusterEnvironment, or a list of them.
        callbacks: objects whose methods ``call`` calls: one or a list.
        loggers: where ``log`` writes: one or a list.
        matmul_precision: "highest", "high" (TF32 on GPUs) or "medium", for ``torch.set_float32_matmul_precision``:
            while the function given to ``launch`` runs, else from ``launch`` or the first ``setup`` on.
        fused_optimizer: True has the optimizers given to ``setup`` update all parameters in one kernel, False has
            them not; None leaves them as they are.
        compile: True, "regional" (repeated blocks, once) or a dict of ``torch.compile`` options: ``setup`` compiles
            the module in place, inside of what the strategy wraps around it. ``fabric.compile_report`` says what
            came of it.

    Raises:
        TypeError: an argument does not exist or has a type it cannot have.
        ValueError: an argument names what is not there, or two contradict each other.

    Example::

        >>> import torch
        >>> fabric = Fabric(accelerator="cpu")
        >>> model = torch.nn.Linear(2, 1)
        >>> model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> loss = model(torch.ones(4, 2)).sum()
        >>> fabric.backward(loss)
        >>> optimizer.step()

    """

    def __init__(
        self,
        *,
        accelerator: Any = "auto",
        strategy: Any = "auto",
        devices: Any = "auto",
        num_nodes: int = 1,
        precision: Any = None,
        plugins: Any = None,
        callbacks: Any = None,
        loggers: Any = None,
        matmul_precision: str | None = None,
        fused_optimizer: bool | None = None,
        compile: bool | str | dict[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown(unknown, Fabric.__init__, "Fabric", make=resolve_runtime)
        self._runtime: Runtime = resolve_runtime(
            accelerator=accelerator,
            strategy=strategy,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
            plugins=plugins,
            owner="Fabric",
        )
        options = {
            "matmul_precision": matmul_precision,
            "fused_optimizer": fused_optimizer,
            "compile": compile,
        }
        speed = check_speed("Fabric", options)
        self._matmul_precision, self._compile = speed.matmul_precision, speed.compile
        self._fused = speed.fused_optimizer
        self._compiled: list[CompiledModel] = []
        self._callbacks: list[Any] = _listed(callbacks)
        self._loggers: list[Any] = _listed(loggers)
        for logger in self._loggers:
            if not hasattr(logger, "log_metrics"):
                raise TypeError(
                    f"Fabric(loggers=...): {logger!r} is not a logger: it has no method log_metrics."
                )
        self._optimizers: list[FabricOptimizer] = []
        self._modules: list[nn.Module] = []
        self._launched = False
        self._inside_run = False
        if type(self).backward is Fabric.backward:
            # The verb itself, with no call of ours around it.
            self.backward = self._runtime.backward  # type: ignore[method-assign]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "run" in cls.__dict__:
            cls.run = _launching(cls.__dict__["run"])  # type: ignore[method-assign]

    # -- start

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Start the other processes, if the run has several.

        Args:
            function: called in every process with this Fabric as its first argument. Without one, the rest of the
                program runs in every process.
            args: for the function.
            kwargs: for the function.

        Returns:
            what the function returns in this process, or in the first of those started as copies.

        Raises:
            TypeError: it is no function, it takes no argument, or the strategy needs one and there is none.

        """
        if function is None:
            if isinstance(getattr(self.strategy, "_launcher", None), StartCopies) and not self._joined():
                raise TypeError(
                    f"Fabric.launch() with strategy={self.strategy.name!r} starts copies of this process, which "
                    "need a function to run: fabric.launch(train), with def train(fabric): ...."
                )
            function = _set_matmul_precision
        elif not callable(function):
            raise TypeError(
                f"Fabric.launch({function!r}): that is not a function. Write launch(train), not launch(train())."
            )
        elif not inspect.signature(function).parameters:
            raise TypeError(
                f"Fabric.launch({getattr(function, '__name__', function)}): the function must take an argument: it "
                "gets the Fabric."
            )
        elif self._matmul_precision is not None:
            function = functools.partial(_with_matmul_precision, function)
        self._launched = True
        return self._runtime.launch(functools.partial(function, self, *args, **kwargs))

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Do all the work; override it in a subclass, and calling it starts the processes first."""

    def _joined(self) -> bool:
        return self._runtime.cluster.creates_processes_externally

    # -- setup

    def setup(
        self,
        module: nn.Module,
        *optimizers: Optimizer,
        scheduler: Any = None,
        move_to_device: bool = True,
        _reapply_compile: bool = True,
    ) -> Any:
        """Make a module and its optimizers ready.

        Args:
            module: the model. A compiled one stays compiled, inside of what the strategy wraps around it.
            optimizers: none, one or several.
            scheduler: a learning rate scheduler to hand back with them.
            move_to_device: move the module to the device of this process.

        Returns:
            the wrapped module; with optimizers a tuple: module, optimizers..., and the scheduler if given.

        Raises:
            TypeError: something is no module, or no optimizer.
            ValueError: it was set up already, or an optimizer trains another module.
            RuntimeError: the processes were not launched.

        """
        self._require_launch("setup")
        for optimizer in optimizers:
            check_optimizer(optimizer, "setup")
        wrapped = self._wrapped_module(module, "setup", move_to_device)
        for optimizer in optimizers:
            # Now: a precision that replaces layers has done so.
            self._check_parameters(optimizer, "setup")
        made = [self._wrapped_optimizer(optimizer) for optimizer in optimizers]
        self._optimizers.extend(made)
        self.call("on_after_setup", fabric=self, module=wrapped)
        if not made:
            return wrapped
        return (wrapped, *made) if scheduler is None else (wrapped, *made, scheduler)

    def setup_module(
        self, module: nn.Module, move_to_device: bool = True, _reapply_compile: bool = True
    ) -> FabricModule:
        """Make a module ready; see ``setup``."""
        self._require_launch("setup_module")
        return self._wrapped_module(module, "setup_module", move_to_device)

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Make optimizers ready.

        Args:
            optimizers: one or several.

        Returns:
            the wrapped optimizer, or a tuple of them.

        Raises:
            TypeError: something is not an optimizer.
            ValueError: there is none, it was set up already, or the module it trains was not.

        """
        self._require_launch("setup_optimizers")
        if not optimizers:
            raise ValueError("Fabric.setup_optimizers(): there is no optimizer. Pass at least one.")
        for optimizer in optimizers:
            check_optimizer(optimizer, "setup_optimizers")
            self._check_parameters(optimizer, "setup_optimizers")
        made = [self._wrapped_optimizer(optimizer) for optimizer in optimizers]
        self._optimizers.extend(made)
        return made[0] if len(made) == 1 else tuple(made)

    def setup_dataloaders(
        self, *dataloaders: Any, use_distributed_sampler: bool = True, move_to_device: bool = True
    ) -> Any:
        """Make loaders ready: each process reads its own part, and batches come on the device.

        Args:
            dataloaders: one or several ``torch.utils.data.DataLoader``.
            use_distributed_sampler: give each process its own part of the data, the same number of batches each.
            move_to_device: move batches to the device of this process.

        Returns:
            the wrapped loader, or a list of them.

        Raises:
            TypeError: something is no DataLoader.
            ValueError: there is none, or it was set up already.

        """
        self._require_launch("setup_dataloaders")
        if not dataloaders:
            raise ValueError("Fabric.setup_dataloaders(): there is no dataloader. Pass at least one.")
        made = []
        for position, loader in enumerate(dataloaders):
            if isinstance(loader, FabricDataLoader):
                raise ValueError(
                    "Fabric.setup_dataloaders(): this dataloader was set up already. Pass the original, once."
                )
            if not isinstance(loader, DataLoader):
                raise TypeError(
                    f"Fabric.setup_dataloaders(): argument {position} is a {type(loader).__name__}. Only a PyTorch "
                    "DataLoader can be set up; iterate over other things directly and use fabric.to_device(batch)."
                )
            share: dict[str, Any] = self._runtime.distributed_sampler_kwargs or {}
            ready = prepare(
                loader,
                stage="train",
                name=f"dataloader {position}",
                **(share if use_distributed_sampler else {}),
            )
            made.append(FabricDataLoader(ready, self.device if move_to_device else None))
        return made[0] if len(made) == 1 else made

    def _wrapped_module(self, module: Any, method: str, move_to_device: bool) -> FabricModule:
        if not isinstance(module, nn.Module):
            hint = f" Write {module.__name__}()." if isinstance(module, type) else ""
            raise TypeError(
                f"Fabric.{method}(): the first argument must be a torch.nn.Module, not {type(module).__name__}.{hint}"
            )
        original, compiled = compiled_of(module)
        if isinstance(original, FabricModule):
            raise ValueError(f"Fabric.{method}(): this module was set up already. Pass the original, once.")
        _set_matmul_precision(self)
        check_devices(original, method, move_to_device)
        self._runtime.place(original, move=move_to_device)
        if self._compile is not None and compiled is None:
            self._compiled.append(compile_for_good(original, self._compile, self._runtime))
        wrapped = FabricModule(original, self._runtime, self._runtime.wrap(original), call=compiled)
        self._modules.append(original)
        if hasattr(original, "_fabric"):
            # A LightningModule logs and steps through this Fabric, and its hooks are called like a callback's.
            original.fabric = self  # type: ignore[assignment] # a property of LightningModule
            if not any(original is callback for callback in self._callbacks):
                self._callbacks.append(original)
        return wrapped

    def _check_parameters(self, optimizer: Optimizer, method: str) -> None:
        # In setup another module of the same optimizer may follow; setup_optimizers comes after all of them.
        needs_all = self._runtime.syncs_gradients and method == "setup_optimizers"
        check_parameters(optimizer, self._modules, method, needs_all=needs_all)

    def _wrapped_optimizer(self, optimizer: Optimizer) -> FabricOptimizer:
        if isinstance(optimizer, InBackward):
            check_in_backward(optimizer, self._runtime)
        if self._fused is not None:
            use_fused(optimizer, self._fused, owner=f"Fabric(fused_optimizer={self._fused})")
        return FabricOptimizer(optimizer, self._runtime, self._callbacks)

    # -- a step

    def backward(self, tensor: Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
        """Compute gradients: in place of ``loss.backward()``.

        Args:
            tensor: the loss.
            args: for ``Tensor.backward``.
            model: whose loss it is; only strategies with an engine of their own ask for it.
            kwargs: for ``Tensor.backward``.

        """
        self._runtime.backward(tensor, *args, **kwargs)

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Any,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Limit the gradients of an optimizer's parameters.

        Args:
            module: whose parameters they are.
            optimizer: whose gradients to clip.
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
            raise ValueError(
                f"Fabric.clip_gradients(clip_val={clip_val!r}, max_norm={max_norm!r}): give one of the two: clip_val "
                "limits each element, max_norm the norm of all."
            )
        optimizer = unwrapped(optimizer)
        parameters = to_clip(optimizer, "Fabric.clip_gradients()")
        if self._runtime.unscale is not None:
            self._runtime.unscale(optimizer)
        if clip_val is not None:
            self._runtime.clip_value(parameters, clip_val)
            return None
        assert max_norm is not None
        return self._runtime.clip_norm(
            parameters, max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
        )

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
            raise TypeError(
                f"Fabric.no_backward_sync({type(module).__name__}): pass the module that fabric.setup() returned."
            )
        if not enabled or module._wrapped is module.module:
            return nullcontext()
        return self._runtime.no_sync(module._wrapped)

    def to_device(self, obj: Any) -> Any:
        """Return a tensor, a collection or a module on the device; a module is moved in place."""
        return obj.to(self.device) if isinstance(obj, nn.Module) else self._runtime.to_device(obj)

    def init_tensor(self) -> AbstractContextManager[Any]:
        """Return a context in which tensors are made on the device and in the precision of the run."""
        return self._runtime.init_tensor()

    def init_module(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """Return a context in which modules are made on the device and in the precision of the run.

        Args:
            empty_init: leave parameters as they come from memory, for weights that are loaded afterwards.

        """
        self._require_launch("init_module")
        return self._runtime.init_module(empty_init)

    # -- files

    def save(
        self, path: Path, state: dict[str, Any], filter: dict[str, Callable[[str, Any], bool]] | None = None
    ) -> None:
        """Write a checkpoint; all processes must call it.

        Args:
            path: a path or a URL.
            state: names and objects: modules, optimizers and others with ``state_dict``, or plain values.
            filter: for a name of ``state``, a function of (key, value) that says which entries to keep.

        Raises:
            TypeError, ValueError: ``filter`` names what is not there, or holds no functions.
            OSError: the file could not be written; the previous one is untouched.

        """
        self._runtime.save(path, states.collect(unwrapped(state), filter))

    def load(
        self,
        path: Path,
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

        Returns:
            what the file has beyond ``state``; all of it without ``state``.

        Raises:
            KeyError: the file does not have one of the names.

        """
        contents = self._runtime.load(path, weights_only=weights_only)
        rest = contents if not state else states.restore(state, contents, strict=strict, path=path)
        self._runtime.barrier("load")
        return rest

    def load_raw(
        self, path: Path, obj: nn.Module | Optimizer, strict: bool = True, *, weights_only: bool | None = None
    ) -> None:
        """Read a file that holds nothing but the state of one module or optimizer.

        Args:
            path: a path or a URL.
            obj: the module or optimizer, wrapped or not.
            strict: raise for weights that do not fit.
            weights_only: see ``load``.

        """
        contents = self._runtime.load(path, weights_only=weights_only)
        target = unwrapped(obj)
        if isinstance(target, nn.Module):
            target.load_state_dict(contents, strict=strict)
        else:
            target.load_state_dict(contents)

    def sharded_model(self) -> AbstractContextManager[Any]:
        """Return a context for making a model in shards; the field's older name for ``init_module``."""
        return self.init_module()

    @staticmethod
    def seed_everything(seed: int | None = None, workers: bool | None = None, verbose: bool = True) -> int:
        """Seed python, numpy, torch and (unless ``workers=False``) the workers of loaders; return the seed."""
        return seed_everything(seed, workers=workers is not False, verbose=verbose)


def _set_matmul_precision(fabric: Fabric) -> None:
    """Multiply matrices as asked for the rest of the program, which this stands for in ``launch``."""
    if fabric._matmul_precision is not None:
        set_matmul_precision(fabric._matmul_precision)


def _with_matmul_precision(function: Callable[..., Any], fabric: Fabric, *args: Any, **kwargs: Any) -> Any:
    assert fabric._matmul_precision is not None
    with within_matmul_precision(fabric._matmul_precision):
        return function(fabric, *args, **kwargs)


def _run_inside(fabric: Fabric, *args: Any, **kwargs: Any) -> Any:
    fabric._inside_run = True
    try:
        return fabric.run(*args, **kwargs)
    finally:
        fabric._inside_run = False


def _launching(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``run`` that starts the processes before it runs."""

    @functools.wraps(run)
    def launched(self: Fabric, *args: Any, **kwargs: Any) -> Any:
        if self._inside_run:
            return run(self, *args, **kwargs)
        return self.launch(_run_inside, *args, **kwargs)

    return launched


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
