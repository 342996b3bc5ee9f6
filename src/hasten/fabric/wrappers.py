"""Wrappers around the user's module, optimizer and loader, which Fabric's setup returns."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from hasten._lib import torch_private
from hasten._lib.device import copies_in_background, is_host
from hasten._lib.errors import make_error, shorten, with_article
from hasten._lib.explain import explain
from hasten._lib.names import did_you_mean
from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_warn
from hasten._lib.tree import map_tensors, move_to
from hasten.data.divided import DividedDataset
from hasten.data.loader_parts import ShardSampler, samplers_of
from hasten.data.loaders import SideStream
from hasten.extend.frames import caller, lines_around
from hasten.extend.origin import comes_from
from hasten.optim.backward import InBackward
from hasten.optim.fast_step import KEPT, KeptGradient, keep_gradient

if TYPE_CHECKING:
    from hasten.runtime import Runtime
    from hasten.strategies.base import Sharding, StepEngine
    from hasten.strategies.recorded_steps import RecordedSteps

# Always run through the strategy: the steps of a LightningModule.
_STEPS = frozenset({"training_step", "validation_step", "test_step", "predict_step"})
# Attributes that the wrapper shares with the user's module.
_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class FabricModule(nn.Module):
    """The user's module, called in the precision and through the strategy of the run.

    It shares parameters, buffers, children, names and state with the user's module; attributes are set there.
    """

    # The module that the strategy returned for the user's module; the same module on a single device.
    _forward_module: nn.Module

    def __init__(
        self, original: nn.Module, runtime: Runtime, wrapped: nn.Module, call: Callable[..., Any] | None = None
    ) -> None:
        own = self.__dict__
        own.update(_original_module=original, _runtime=runtime, _forward_methods=set(_STEPS), _forward_module=wrapped)
        # The dictionaries of the user's module, not copies.
        own.update({name: getattr(original, name) for name in _SHARED})
        for name, value in nn.Module().__dict__.items():
            if name != "training":
                own.setdefault(name, value)
        own["_call"] = self._bound(call if call is not None else original)

    def _bound(self, function: Callable[..., Any]) -> Callable[..., Any]:
        runtime = self._runtime
        bound = runtime.bind(
            function, module=self._original_module, wrapped=self._forward_module, training=True, convert_outputs=True
        )
        needs_backward = runtime.scaler is not None or runtime.engine.backward_by_program
        return _only_fabric_backward(bound, runtime) if needs_backward else bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__
        hooked = own["_forward_hooks"] or own["_forward_pre_hooks"]
        try:
            if hooked or own["_backward_hooks"] or own["_backward_pre_hooks"]:
                return super().__call__(*args, **kwargs)
            return own["_call"](*args, **kwargs)
        except Exception as error:
            explain(error)
            shorten(error)
            raise

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_call"](*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        original: nn.Module = self.__dict__["_original_module"]
        return original

    def mark_forward_method(self, method: str | Callable[..., Any]) -> None:
        """Run a method of the module in the precision and through the strategy, like ``forward``.

        Args:
            method: its name, or the method.

        Raises:
            TypeError: ``method`` is neither a name nor a method.
            ValueError: it is ``forward``, which is always run that way.
            AttributeError: the module has no such method.

        """
        if not isinstance(method, (str, MethodType)):
            raise make_error(TypeError, f"mark_forward_method({method!r}):", fix="use a method or its name.")
        name = method if isinstance(method, str) else method.__name__
        if name == "forward":
            raise make_error(
                ValueError, "mark_forward_method('forward'): forward needs no mark.", fix="Call the module itself."
            )
        kind = type(self.module)
        if not inspect.ismethod(getattr(self.module, name, None)):
            methods = [known for known in dir(kind) if not known.startswith("_")]
            hint = did_you_mean(name, methods)
            raise make_error(
                AttributeError, f"mark_forward_method({name!r}): {kind.__name__} has no such method.", fix=hint
            )
        self._forward_methods.add(name)

    # -- methods of the user's module, which may override them

    @property
    def training(self) -> bool:
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.module.training = mode

    def train(self, mode: bool = True) -> FabricModule:
        self.module.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> FabricModule:
        self.module.apply(fn)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> FabricModule:
        torch_private.apply_to(self.module, *args, **kwargs)
        return self

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        for _, module in self.module.named_modules(remove_duplicate=remove_duplicate):
            yield module

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        yield from self.module.named_modules(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def extra_repr(self) -> str:
        return self.module.extra_repr()

    def _get_name(self) -> str:
        return f"Fabric[{self.module._get_name()}]"

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        if "_original_module" not in own:
            raise AttributeError(name)
        original: nn.Module = own["_original_module"]
        if name in ("device", "dtype") and not hasattr(original, name):
            first = next(original.parameters(), None)
            return getattr(torch.empty(0, device=own["_runtime"].device) if first is None else first, name)
        value = getattr(original, name)
        if not inspect.ismethod(value):
            return value
        if name in own["_forward_methods"]:
            return self._bound(value)
        if own["_forward_module"] is not original and value.__self__ is original:
            return _refusing_forward(original, value, name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training" or (name in self.__dict__ and name not in _SHARED):
            object.__setattr__(self, name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.module)})

    def __deepcopy__(self, memo: dict[int, Any]) -> FabricModule:
        # A copy, such as an average of the weights, runs in the same precision, without the strategy.
        original = copy.deepcopy(self.module, memo)
        return FabricModule(original, self._runtime, original)

    def __reduce__(self) -> Any:
        return _rebuilt, (self.module, self._runtime)


def _rebuilt(original: nn.Module, runtime: Runtime) -> FabricModule:
    return FabricModule(original, runtime, original)


def _only_fabric_backward(function: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """Return ``function`` with outputs on which ``loss.backward()`` raises: only ``fabric.backward(loss)`` is right."""

    def check(gradient: Tensor) -> None:
        if not runtime.engine.in_backward:
            what = "loss.backward() skips backward of the program's strategy or precision."
            if runtime.scaler is not None:
                what = f"loss.backward() with precision={runtime.precision.precision!r}: the loss must be scaled first."
            raise make_error(RuntimeError, what, fix="Call fabric.backward(loss).")

    def watch(tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(check)
        return tensor

    def watched(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        map_tensors(watch, output)
        return output

    return watched


def _refusing_forward(original: nn.Module, method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return ``method`` with a check that it does not compute gradients without the strategy."""

    def refuse(module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            raise make_error(
                RuntimeError,
                f"{type(original).__name__}.{name}() calls forward, and the strategy would not see it: gradients "
                "would stay on this process.",
                fix=f"Call model.mark_forward_method({name!r}) after setup().",
            )

    @functools.wraps(method)
    def watched(*args: Any, **kwargs: Any) -> Any:
        handles = [module.register_forward_pre_hook(refuse) for module in original.modules()]
        try:
            return method(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    return watched


class FabricOptimizer:
    """The user's optimizer, stepping in the precision of the run. ``isinstance`` sees the user's class."""

    def __init__(self, optimizer: Optimizer, runtime: Runtime, callbacks: Sequence[object] = ()) -> None:
        own = self.__dict__
        own.update(_optimizer=optimizer, _runtime=runtime)
        kind: Any = type(optimizer)
        self.__class__ = _class_like(kind)
        step, zero_grad = runtime.engine.make_step(optimizer), runtime.engine.make_zero_grad(optimizer)
        steps = runtime.steps
        is_first = True
        first: KeptGradient | None = None

        def step_of(self: Any, closure: Callable[[], Any] | None = None) -> Any:
            nonlocal is_first, first
            if first is not None:
                _warn_if_kept(optimizer, first)
                first = None
            if is_first and closure is None:
                runtime.engine.check_first_step(optimizer)
                first = _first_gradient(optimizer, runtime)
            is_first = False
            result = step(closure)
            if steps is not None:
                steps.end_step("train")
            for callback in callbacks:
                hook = getattr(callback, "on_after_optimizer_step", None)
                if callable(hook):
                    hook(strategy=runtime.strategy, optimizer=optimizer)
            return result

        def zero_grad_of(self: Any, set_to_none: bool = True) -> None:
            if set_to_none:
                zero_grad()
            else:
                optimizer.zero_grad(set_to_none=False)

        # Bound methods: learning-rate schedulers expect them.
        own["step"] = MethodType(step_of, self)
        own["zero_grad"] = MethodType(zero_grad_of, self)

    @property
    def optimizer(self) -> Optimizer:
        """The user's optimizer."""
        inner: Optimizer = self.__dict__["_optimizer"]
        return inner

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("step", "zero_grad", "__class__", "_opt_called") or name in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.optimizer, name, value)

    def __repr__(self) -> str:
        return f"Fabric{self.optimizer!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return FabricOptimizer, (self.optimizer, self._runtime)

    def __deepcopy__(self, memo: dict[int, Any]) -> FabricOptimizer:
        return FabricOptimizer(copy.deepcopy(self.optimizer, memo), self._runtime)


def _first_gradient(optimizer: Optimizer, runtime: Runtime) -> KeptGradient | None:
    """Return a gradient of the first step; None where gradients are in places of their own."""
    if isinstance(optimizer, InBackward) or not comes_from(type(runtime.engine), "hasten.strategies"):
        return None
    # ``grad.data.zero_()`` cannot be seen in the gradient.
    return None if any("zero_" in line for line in lines_around(caller(2))) else keep_gradient(optimizer)


def _warn_if_kept(optimizer: Optimizer, first: KeptGradient) -> None:
    if first.was_added_to():
        fix = "Call optimizer.zero_grad() before fabric.backward(loss)."
        rank_zero_warn(f"{type(optimizer).__name__}.step(): {KEPT}", PossibleUserWarning, fix=fix)


@functools.cache
def _class_like(kind: Any) -> Any:
    return type(f"Fabric{kind.__name__}", (FabricOptimizer, kind), {})


class FabricDataLoader:
    """The user's loader, with batches on the device of the run and ``set_epoch`` called on its samplers."""

    def __init__(
        self,
        loader: DataLoader[Any],
        device: torch.device | None = None,
        sharding: Sharding | None = None,
        steps: RecordedSteps | None = None,
    ) -> None:
        self._dataloader = loader
        # Set if the device records operations, which run between two batches.
        self._steps = steps
        # Which processes must read the same batches.
        self._sharding = sharding
        # The device to which batches are moved; None if they are not moved.
        self.device = device
        # The next epoch, and the one before it.
        self._epoch = self._last_epoch = 0

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        loader = self._dataloader
        samplers = {id(each): each for each in samplers_of(loader)}.values()
        for sampler in samplers:
            # A program that resumes says itself which epoch it is in.
            if isinstance(sampler, (DistributedSampler, ShardSampler)) and sampler.epoch != self._last_epoch:
                self._epoch = sampler.epoch
        for sampler in samplers:
            # Without it a distributed sampler yields the same order in every epoch.
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(self._epoch)
        if isinstance(dataset := getattr(loader, "dataset", None), DividedDataset):
            dataset.draw_for(self._epoch)
        self._last_epoch, self._epoch = self._epoch, self._epoch + 1
        if self._sharding is None:
            return self._moved(loader)
        self._sharding.begin_epoch()
        return self._sharding.checked(self._moved(loader))

    def _moved(self, loader: DataLoader[Any]) -> Iterator[Any]:
        if self._steps is not None:
            return self._steps.feed(loader, self.device)
        if self.device is None or is_host(self.device):
            return iter(loader)
        if copies_in_background(self.device):
            return map(SideStream(self.device), loader)
        return (move_to(batch, self.device) for batch in loader)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataloader":
            raise AttributeError(name)
        return getattr(self._dataloader, name)


def compiled_of(module: nn.Module) -> tuple[nn.Module, nn.Module | None]:
    """Return (the user's module, its compiled module or None)."""
    inner = torch_private.inside_compiled(module)
    return (module, None) if inner is None else (inner, module)


def is_wrapped(obj: object) -> bool:
    """Return whether Fabric's setup returned ``obj``."""
    if isinstance(obj, nn.Module):
        obj = compiled_of(obj)[0]
    return isinstance(obj, (FabricModule, FabricOptimizer, FabricDataLoader))


def unwrapped(obj: object) -> Any:
    """Return the user's object; for a dict, a dict of the user's objects."""
    if isinstance(obj, dict):
        return {key: unwrapped(value) for key, value in obj.items()}
    if isinstance(obj, nn.Module):
        inner = compiled_of(obj)[0]
        return compiled_of(inner.module)[0] if isinstance(inner, FabricModule) else inner
    if isinstance(obj, FabricOptimizer):
        return obj.optimizer
    return obj._dataloader if isinstance(obj, FabricDataLoader) else obj


# -- checks of what is given to setup


def set_up_twice(kind: str, method: str) -> ValueError:
    return make_error(ValueError, f"Fabric.{method}(): this {kind} was set up already.", fix="Pass the original, once.")


def check_optimizer(optimizer: object, method: str) -> None:
    if isinstance(optimizer, FabricOptimizer):
        raise set_up_twice("optimizer", method)
    if hasattr(optimizer, "step") and hasattr(optimizer, "param_groups"):
        return
    hint = " Pass a scheduler as scheduler=...." if hasattr(optimizer, "get_last_lr") else ""
    if isinstance(optimizer, type):
        what = f"Fabric.{method}(): {optimizer.__name__} is a class, not an optimizer."
        raise make_error(TypeError, what, fix=f"Make one: {optimizer.__name__}(module.parameters(), lr=...).")
    if hasattr(optimizer, "dataset") or hasattr(optimizer, "batch_sampler"):
        hint = " Give loaders to fabric.setup_dataloaders(loader)."
    if isinstance(optimizer, (list, tuple)):
        hint = f" Give them one by one: fabric.{method}({'module, ' * (method == 'setup')}*optimizers)."
    if isinstance(optimizer, nn.Module) and method == "setup":
        hint = " The module comes first, then its optimizers: fabric.setup(module, optimizer)."
    raise make_error(TypeError, f"Fabric.{method}(): {with_article(type(optimizer))} is not an optimizer.", fix=hint)


def replace_parameters(optimizer: Optimizer, replaced: Mapping[Tensor, Tensor], method: str) -> None:
    """Make an optimizer that was created before its module was sharded train the shards."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in replaced and optimizer.state.get(parameter):
                raise make_error(
                    ValueError,
                    f"Fabric.{method}(): {type(optimizer).__name__} holds the state of whole parameters, which are "
                    "sharded now.",
                    fix=(
                        "Set it up before its first step, or load its state after setup with fabric.load(). Make one "
                        "that begins with a state, such as Adagrad, of the module that fabric.setup_module() returns."
                    ),
                )
        group["params"] = [replaced.get(parameter, parameter) for parameter in group["params"]]


def check_parameters(optimizer: Optimizer, modules: list[nn.Module], method: str, engine: StepEngine) -> None:
    """Raise if an optimizer trains a module that was not set up.

    Raises:
        ValueError: it trains none of the module that it is set up with.
        MisconfigurationException: the gradients of its other parameters would not be averaged over the processes.
        RuntimeError: it trains parameters of the meta device, in whose place setup has put others.

    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kind = type(optimizer).__name__
    if any(parameter.is_meta for parameter in parameters):
        what = f"Fabric.{method}(): {kind} trains parameters of the meta device, which have no values."
        raise make_error(RuntimeError, what, fix=f"Make it after setup_module(): {kind}(module.parameters(), ...).")
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    # Tensors outside of modules, such as an image to optimize, need no setup.
    outside = [p for p in parameters if id(p) not in known and isinstance(p, nn.Parameter)]
    wrong = f"Fabric.{method}(): {len(outside)} of the {len(parameters)} parameters of {kind} "
    if method == "setup" and outside and known.isdisjoint(map(id, parameters)):
        what = f"{wrong}do not belong to the module given with it ({type(modules[-1]).__name__})."
        fix = f"Write {kind}(model.parameters(), ...) with that module, after any change of its layers."
        raise make_error(ValueError, what, fix=fix)
    # In setup, another module of the same optimizer may follow; setup_optimizers comes after all of them.
    if method == "setup_optimizers" and outside:
        engine.refuse_outside(
            f"{wrong}belong to no module that was set up", "Call model = fabric.setup_module(model) first."
        )
