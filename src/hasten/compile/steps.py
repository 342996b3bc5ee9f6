"""Compile each step of a module as one graph: forward, loss and logged values."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hasten._lib.rank_zero import warn_once
from hasten._lib.tree import leaves
from hasten.compile.regions import Compiled, InstalledHooks, must_stay_python, own_code
from hasten.compile.report import FROZEN, CompileCounters, remedy_of
from hasten.compile.settings import CompileSettings
from hasten.extend.origin import functions_reached, names_in, uses_argument

# A step is compiled once, and again for inputs of other shapes; beyond this it is left to Python.
_MAX_COMPILES = 3

# The calls of self.log during a compiled step: the graph returns the values, and they are logged afterwards.
_logged: list[tuple[Any, str, Any, tuple[Any, ...], dict[str, Any]]] = []


class Step(Compiled):
    """A step of a module compiled as one graph, or left in Python, with compiled parts, where that is impossible.

    ``self.log`` stays out of the graph: the values leave with the outputs and are logged when the step has returned.
    """

    # What else is in the graph, for reports.
    _and_more = ""

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        module: nn.Module,
        settings: CompileSettings,
        counters: CompileCounters,
        dims: int,
    ) -> None:
        super().__init__(f"{type(module).__name__}.{name}{self._and_more}", settings, counters, dims)
        self._function = function
        self._code_name = name
        self._loggers = [(part, _collect(part)) for part in module.modules() if callable(getattr(part, "log", None))]
        self._parts = [part for part in module.modules() if hasattr(part, "config")]
        self._hooks = InstalledHooks(module)
        self._module, self._source = module, getattr(module, name, function)
        # The torchmetrics because of which the step could not be compiled.
        self._metrics: list[str] = []
        if (reason := _python_only(self._source, module)) is not None:
            self._leave_to_python(reason)
            self._failed(reason)

    def _compile(self) -> Callable[..., Any]:
        return self._settings.compile(own_code(_calling(self._function), self._code_name), whole=True)

    def __call__(self, *args: object) -> object:
        """Run the step."""
        if self._stays_python or self._counters.paused or must_stay_python():
            return self._function(*args)
        return self._computed(args, lambda: self._function(*args))[0]

    def _computed(self, args: tuple[object, ...], python: Callable[[], Any]) -> tuple[Any, bool]:
        """Return the output of the graph and True, or that of ``python`` and False; values are logged."""
        if not self._graphs:
            if (reason := _not_only_tensors(args[0])) is not None:
                self._leave_to_python(reason)
                self._failed(reason)
                return python(), False
            settle_lazily(self._parts, args[0])
        _logged.clear()
        # A graph for each number of arguments: with several loaders, the index of the loader is passed too.
        output, graph = self._run(
            len(args), self._hooks, args[0], lambda compiled: self._collecting(compiled, args), python
        )
        if graph is None:
            return output, False
        _log_all(copy=self._settings.cuda_graphs)
        if graph.compiled > _MAX_COMPILES:
            self._leave_to_python(
                f"it was compiled {graph.compiled} times. The causes are in trainer.compile_report.recompiles"
            )
            cause = self._recompile or FROZEN
            warn_once(
                f"compile {self.name}",
                f"compile: {self.name} stays Python from here on, and its forward compiled: each call would be "
                f"compiled again. {cause}",
                fix=f"{remedy_of(cause)} All causes: trainer.compile_report.recompiles",
            )
        return output, True

    def _why(self, error: Exception) -> str:
        reason = super()._why(error)
        self._metrics = _metrics_called(self._source, self._module)
        if not self._metrics:
            return reason
        return f"it calls {', '.join(self._metrics)} of torchmetrics, whose code is no graph. {reason}"

    def _failed(self, reason: str) -> None:
        """Do not warn: the parts of the step stay compiled, and the report has the reason."""

    def _collecting(self, compiled: Callable[..., Any], args: tuple[object, ...]) -> Any:
        """Call the graph, and collect what ``self.log`` gets instead of logging it."""
        hidden = [(part, part.__dict__["log"]) for part, _ in self._loggers if "log" in part.__dict__]
        for part, log in self._loggers:
            part.__dict__["log"] = log
        try:
            return compiled(*args)
        except BaseException:
            _logged.clear()
            raise
        finally:
            for part, _ in self._loggers:
                part.__dict__.pop("log", None)
            for part, log in hidden:
                part.__dict__["log"] = log


def _calling(function: Callable[..., Any]) -> Callable[..., Any]:
    def step(*args: Any) -> Any:
        return function(*args)

    return step


# -- self.log


def _collect(module: Any) -> Callable[..., None]:
    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(value, Tensor) and not kwargs.get("enable_graph", False):
            value = value.detach()
        _logged.append((module, name, value, args, kwargs))

    return log


def _log_all(*, copy: bool) -> None:
    given = list(_logged)
    _logged.clear()
    for module, name, value, args, kwargs in given:
        if copy and isinstance(value, Tensor):
            # In memory that the next replay of the graph overwrites.
            value = value.clone()
        module.log(name, value, *args, **kwargs)


# -- decisions of a model in its first call


def settle_lazily(parts: list[nn.Module], batch: object) -> None:
    """Choose the loss of transformers' classifiers by the kind of labels, as their first call does.

    They store the choice in their configuration: made inside the first graph, it would invalidate that graph.
    """
    labels = batch.get("labels") if hasattr(batch, "get") else None
    if not isinstance(labels, Tensor):
        return
    for part in parts:
        config, count = part.config, getattr(part, "num_labels", None)
        if count is None or getattr(config, "problem_type", "") is not None:
            continue
        whole = labels.dtype in (torch.long, torch.int)
        several = "single_label_classification" if whole else "multi_label_classification"
        config.problem_type = "regression" if count == 1 else several  # type: ignore[union-attr]


# -- steps that cannot be one graph


def _python_only(step: Callable[..., Any], module: nn.Module) -> str | None:
    """Return why a step cannot be one graph; None if it may be."""
    function = inspect.unwrap(getattr(step, "__func__", step))
    code = getattr(function, "__code__", None)
    if code is None:
        return "it is not a Python function."
    taken = list(inspect.signature(function).parameters.values())
    if any(one.kind is one.VAR_POSITIONAL or one.kind is one.VAR_KEYWORD for one in taken):
        return "it takes any arguments (*args), batch_idx among them, which is another number each time."
    for index in ("batch_idx", *[one.name for one in taken[2:]]):
        if uses_argument(function, index, module):
            return (
                f"it uses {index}, another number each time, or passes it on to what may use it. Its forward is "
                "compiled."
            )
    return None


def _metrics_called(step: Callable[..., Any], module: nn.Module) -> list[str]:
    """Return the torchmetrics of a module that its step names, as "self.accuracy"."""
    from hasten.checkpoint.metrics import metrics_of  # Only where a step could not be compiled.

    used: set[str] = set()
    for function in functions_reached([step], lambda name: getattr(type(module), name, None)):
        used |= names_in(function)
    found = (re.split(r"[.\[]", name) for name, _ in metrics_of(module))
    containers = (nn.ModuleDict, nn.ModuleList, list, tuple, dict)
    own = {first for first, *more in found if not more or isinstance(getattr(module, first), containers)}
    return [f"self.{name}" for name in sorted(own & used)]


def _not_only_tensors(batch: Any) -> str | None:
    kinds = {type(leaf).__name__ for leaf in leaves(batch) if leaf is not None and not isinstance(leaf, Tensor)}
    if kinds:
        return f"its batches hold {', '.join(sorted(kinds))} besides tensors. Its forward is compiled."
    return None
