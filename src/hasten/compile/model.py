"""A compiled model: its parts, its steps, its cache and its report, kept from one run to the next."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hasten.compile.cache import Artifacts, key_of
from hasten.compile.regions import Place
from hasten.compile.report import CompileReport, Watch
from hasten.compile.settings import CompileSettings
from hasten.compile.steps import Step


class CompiledModel:
    """One model and what the compiler made of it: a second run with it compiles nothing again.

    Args:
        module: the model.
        settings: how it is compiled.
        device: where it computes.
        dims: how many leading dimensions of a batch may change from batch to batch.
        variant: what else decides what is computed, such as the precision.
        packed: its blocks compute rows of real tokens.

    """

    def __init__(
        self,
        module: nn.Module,
        settings: CompileSettings,
        device: torch.device,
        dims: int = 1,
        variant: str = "",
        packed: bool = False,
    ) -> None:
        self.asked = (settings, device, dims, variant, packed)
        self.dims = dims
        self.settings = settings
        self._watch = Watch(self.report)
        self._steps: dict[str, tuple[Any, Step]] = {}
        self._place = Place(module, settings, self._watch, dims, packed)
        # Steps are tried as a whole, unless blocks were asked for, or the user's own torch.compile has the say.
        self._takes_steps = not self._place.blocks and settings.context is None
        keeps = settings.cache and settings.backend == "inductor" and settings.context is None
        self._artifacts = Artifacts(key_of(module, settings, device, f"{dims} {variant}")) if keeps else None
        self._graphs_saved = 0

    @contextmanager
    def on(self, *, writes: bool = True) -> Iterator[CompiledModel]:
        """Have the model called compiled, until the end.

        Args:
            writes: whether this process writes the cache.

        """
        artifacts = self._artifacts
        if artifacts is not None and not self._watch.graphs_made:
            artifacts.load()
        self._watch.start()
        self._place.on()
        try:
            yield self
        finally:
            self._place.off()
            self._watch.stop()
            if writes:
                self._save()

    def on_for_good(self, *, writes: bool = True) -> None:
        """Have the model called compiled until the program ends, which writes the cache.

        Args:
            writes: whether this process writes the cache.

        """
        context = self.on(writes=writes)
        context.__enter__()
        atexit.register(context.__exit__, None, None, None)

    def step(self, name: str, function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        """Return a step of ``module`` compiled; as it is where only parts of the model are.

        Args:
            name: of the step.
            function: the step.
            module: whose step it is.

        """
        manual = name == "training_step" and getattr(module, "automatic_optimization", True) is False
        if not self._takes_steps or manual:
            return function
        # The user may have put another step in place of the one compiled.
        source = getattr(module, name)
        source = getattr(source, "__func__", source)
        known = self._steps.get(name)
        if known is None or known[0] is not source:
            step = Step(name, function, module, self.settings, self._watch, self.dims)
            known = self._steps[name] = (source, step)
        return known[1]

    def report(self) -> CompileReport:
        """Return what compiling has come to so far."""
        return self._watch.report({} if self._artifacts is None else self._artifacts.cold_seconds)

    def __reduce__(self) -> Any:
        return _nothing, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def _save(self) -> None:
        artifacts, graphs = self._artifacts, self._watch.graphs_made
        if artifacts is None or graphs == self._graphs_saved:
            return
        self._graphs_saved = graphs
        self.report()
        if self._watch.misses or not artifacts.cold_seconds:
            artifacts.save(self._watch.marks)


# In the module's own dictionary: a table beside it would keep every model that was ever compiled alive.
_PLACE = "_hasten_compiled"


def compiled_model(
    module: nn.Module,
    settings: CompileSettings,
    device: torch.device,
    *,
    dims: int = 1,
    variant: str = "",
    packed: bool = False,
) -> CompiledModel:
    """Return ``module`` compiled: the same object as last time if it is asked for in the same way.

    Args:
        module: the model.
        settings: how to compile it.
        device: where it computes.
        dims: how many leading dimensions of a batch may change from batch to batch.
        variant: what else decides what is computed, such as the precision.
        packed: its blocks compute rows of real tokens.

    """
    known = module.__dict__.get(_PLACE)
    if known is None or known.asked != (settings, device, dims, variant, packed):
        known = module.__dict__[_PLACE] = CompiledModel(module, settings, device, dims, variant, packed)
    return known


def _nothing() -> None:
    """Stand for a compiled model in a copy or a file: what was compiled belongs to one module in one process."""
