"""A compiled model: its parts, steps, cache and report, kept from one run to the next."""

from __future__ import annotations

import atexit
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from hasten._lib.device import is_host
from hasten._lib.errors import make_error
from hasten.compile.cache import ColdSeconds, keep_torchs_cache
from hasten.compile.regions import CompiledParts, alike_blocks
from hasten.compile.report import CompileCounters, CompileReport
from hasten.compile.settings import CompileSettings
from hasten.compile.steps import Step
from hasten.compile.whole_step import Clipping, WholeStep

if TYPE_CHECKING:
    from hasten.strategies.base import Strategy


class Key(NamedTuple):
    """What decides which graphs a model has."""

    settings: CompileSettings
    device: torch.device
    dims: int = 1  # How many leading dimensions of a batch may change from batch to batch.
    variant: str = ""  # Whatever else decides what is computed, such as the precision.
    packed: bool = False  # Its blocks compute rows of real tokens.
    autocast: bool = False  # Its calls are within ``torch.autocast``.
    steps_by: Strategy | None = None  # If the program overrides its ``training_step`` or another step.


class CompiledModel:
    """One model and its graphs: a second run with the same model compiles nothing again."""

    def __init__(self, module: nn.Module, key: Key) -> None:
        self.key, self.dims, device = key, key.dims, key.device
        self.settings = settings = dataclasses.replace(key.settings, on_host=is_host(device))
        self._counters = CompileCounters(self.report)
        self._steps: dict[str, tuple[Any, Step]] = {}
        self._whole_step: tuple[Any, WholeStep] | None = None
        self._parts = CompiledParts(module, settings, self._counters, key.dims, key.packed)
        # Steps are compiled whole unless the user asked for blocks or compiled the model with torch.compile.
        self._compiles_steps = not self._parts.blocks and settings.context is None
        cached = settings.cache and settings.backend == "inductor" and settings.context is None
        self._cold = ColdSeconds(module, settings, device, f"{key.dims} {key.variant}") if cached else None
        self._graphs_saved = 0
        self._until_exit: AbstractContextManager[CompiledModel] | None = None
        # On other devices torch asks for autocast itself.
        self._changed = _without_fast_path if key.autocast and is_host(device) else nullcontext

    @contextmanager
    def enabled(self, *, writes: bool = True) -> Iterator[CompiledModel]:
        """Call the model compiled inside of the block; a process that ``writes`` saves how long compiling took."""
        if self._cold is not None and not self._counters.graphs_made:
            keep_torchs_cache()
            self._cold.load()
        self._counters.start()
        self._parts.enable()
        try:
            with self._changed():
                yield self
        finally:
            self._parts.disable()
            self._counters.stop()
            if writes:
                self._save()

    def enable_until_exit(self, *, writes: bool = True) -> None:
        """Call the model compiled until the program ends."""
        if self._until_exit is None:
            self._until_exit = self.enabled(writes=writes)
            self._until_exit.__enter__()
            _UNTIL_EXIT.add(self)

    def step(self, name: str, function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        """Return a step of ``module`` compiled; unchanged where only parts of the model are compiled."""
        manual = name == "training_step" and getattr(module, "automatic_optimization", True) is False
        if not self._compiles_steps or manual:
            return function
        # The user may have replaced the step since it was compiled.
        source = getattr(module, name)
        source = getattr(source, "__func__", source)
        known = self._steps.get(name)
        if known is None or known[0] is not source:
            step = Step(name, function, module, self.settings, self._counters, self.dims)
            known = self._steps[name] = (source, step)
        return known[1]

    def whole_step(
        self, function: Callable[..., Any], module: nn.Module, kind: type[Optimizer], clipping: Clipping
    ) -> WholeStep:
        """Return ``training_step``, backward, clipping and the optimizer's step as one."""
        key = getattr(module.training_step, "__func__", module.training_step), kind, clipping
        known = self._whole_step
        if known is None or known[0] != key:
            step = WholeStep(function, module, kind, clipping, self.settings, self._counters, self.dims)
            known = self._whole_step = (key, step)
        return known[1]

    def report(self) -> CompileReport:
        """Return the results of compiling so far."""
        return self._counters.report({} if self._cold is None else self._cold.by_graphs)

    def __reduce__(self) -> Any:
        return _nothing, ()

    def _save(self) -> None:
        cold, graphs = self._cold, self._counters.graphs_made
        if cold is None or graphs == self._graphs_saved:
            return
        self._graphs_saved = graphs
        self.report()
        if self._counters.misses or not cold.by_graphs:
            cold.save(self._counters.seconds_by_graphs)


# A reference that keeps a model alive would keep all models of a search.
_UNTIL_EXIT: WeakSet[CompiledModel] = WeakSet()


@atexit.register
def _leave_at_exit() -> None:
    with ExitStack() as stack:
        for model in list(_UNTIL_EXIT):
            if model._until_exit is not None:
                stack.push(model._until_exit)


# In the module's own dictionary: a global table would keep every compiled model alive.
_ATTRIBUTE = "_hasten_compiled"


def compiled_model(module: nn.Module, key: Key) -> CompiledModel:
    """Return ``module`` compiled: the same object as last time if the key is the same."""
    known = module.__dict__.get(_ATTRIBUTE)
    if known is None or known.key != key:
        known = module.__dict__[_ATTRIBUTE] = CompiledModel(module, key)
    return known


def for_strategy(owner: str, settings: CompileSettings, module: nn.Module, strategy: Strategy) -> CompileSettings:
    """Return the settings for a module under a strategy: where parameters are sharded, repeated blocks are compiled."""

    def by_block() -> CompileSettings:
        if not any(True for _ in alike_blocks(module)):
            what = (
                f"{owner}(compile=..., strategy={strategy.name!r}): with sharded parameters repeated blocks are "
                f"compiled, and {type(module).__name__} has none in an nn.ModuleList or nn.Sequential."
            )
            raise make_error(ValueError, what, fix="Leave compile out.", argument="compile")
        return dataclasses.replace(settings, regional=True)

    return strategy.sharding.compile_units(settings, by_block)


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """Have torch's transformer layers evaluate by the operations of training.

    Their one operation for evaluations takes weights and inputs of one type. Autocast gives them two, which the layers
    ask for on GPUs alone; without a graph the parts of that operation are cast.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _nothing() -> None:
    """Replace a compiled model in copies and pickles: graphs belong to one module in one process."""
