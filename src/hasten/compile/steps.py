"""The steps of a module, each compiled as a whole where it is one graph: forward, loss and what is logged."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch.utils.hooks import RemovableHandle

from hasten._lib.rank_zero import warn_once
from hasten.compile.cuda_graphs import kept_outputs
from hasten.compile.regions import (
    SETS_OF_HOOKS,
    Hooks,
    batch_size,
    mark_dynamic,
    must_stay_python,
    own_code,
    tell_recompiles,
)
from hasten.compile.report import Watch, brief
from hasten.compile.settings import CompileSettings

# How often a step may be compiled before it is left to Python: once, and for inputs of other shapes.
_GRAPHS_ALLOWED = 3

# What self.log was given while a compiled step ran: the graph hands it out, and it is logged afterwards.
_logged: list[tuple[Any, str, Any, tuple[Any, ...], dict[str, Any]]] = []


@dataclass
class _Traced:
    call: Callable[..., Any]
    # Of the batch it was made for.
    size: int | None
    graphs: int = 0


class Step:
    """A step of a module as one graph; as Python, with compiled parts, where it cannot be one.

    ``self.log`` is kept out of the graph: it leaves with the values, and they are logged when the step has returned.

    Args:
        name: of the step.
        function: the step: ``(batch, batch_idx)``, perhaps more.
        module: whose step it is.
        settings: how it is compiled.
        watch: told what happens.
        dims: how many leading dimensions of a batch may change from batch to batch.

    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        module: nn.Module,
        settings: CompileSettings,
        watch: Watch,
        dims: int,
    ) -> None:
        self.name = name
        self._function = function
        self._settings = settings
        self._watch = watch
        self._dims = settings.dynamic_dims(dims)
        self._loggers = _loggers_of(module)
        self._parts = [part for part in module.modules() if hasattr(part, "config")]
        # One for each number of arguments (the loader's index comes where there are several loaders) and the hooks.
        self._traced: dict[tuple[int, tuple[int, ...]], _Traced] = {}
        self._hooks = Hooks(module)
        self._sets_of_hooks: set[tuple[int, ...]] = set()
        self._label = f"{type(module).__name__}.{name}"
        reason = _python_only(getattr(module, name, function))
        self._left = reason is not None
        if reason is not None:
            watch.leave(self._label, reason)

    def __call__(self, *args: Any) -> Any:
        """Take the step."""
        if self._left or must_stay_python():
            return self._function(*args)
        settings, watch, size, hooks = self._settings, self._watch, batch_size(args[0]), self._hooks
        if hooks.added != RemovableHandle.next_id or hooks.there:
            hooks.look()
        key = (len(args), hooks.there)
        traced = self._traced.get(key)
        if traced is None:
            self._sets_of_hooks.add(hooks.there)
            if hooks.there and len(self._sets_of_hooks) > SETS_OF_HOOKS:
                with watch.pause():
                    return self._function(*args)
            reason = _not_only_tensors(args[0])
            if reason is not None:
                self._leave(reason)
                return self._function(*args)
            settle_lazily(self._parts, args[0])
            code = own_code(_calling(self._function), self.name)
            traced = self._traced[key] = _Traced(settings.compile(code, whole=True), size)
        elif size != traced.size and (size == 1 or settings.one_size):
            # See Region: the odd batch at the end is not worth another graph.
            with watch.pause():
                return self._function(*args)
        if self._dims:
            mark_dynamic(args[0], self._dims)
        before = watch.graphs()
        failure: Exception | None = None
        _logged.clear()
        with _collecting(self._loggers):
            try:
                output = traced.call(*args)
            except torch.OutOfMemoryError:
                raise
            except TorchDynamoException as error:
                failure = error
            except Exception as error:
                if watch.graphs() != before or traced.graphs:
                    raise
                failure = error
        if failure is not None:
            _logged.clear()
            self._leave(brief(str(failure)))
            # Outside of the handler: an error of the step's own comes up here in its own words, at its own place.
            return self._function(*args)
        if settings.cuda_graphs:
            output = kept_outputs(output, all_of_them=not torch.is_grad_enabled())
        _log_all(copy=settings.cuda_graphs)
        if watch.graphs() != before:
            self._made(traced)
        elif watch.unsaid:
            watch.say()
        return output

    def _made(self, traced: _Traced) -> None:
        traced.graphs += 1
        self._watch.made(self._label)
        tell_recompiles(self._watch)
        if traced.graphs > _GRAPHS_ALLOWED:
            self._leave(
                f"it was compiled {traced.graphs} times. The causes are in trainer.compile_report.recompiles"
            )
            warn_once(
                f"compile {self._label}",
                f"compile: {self._label} stays Python from here on: each call would be compiled again. See the causes "
                "in trainer.compile_report.recompiles; its forward stays compiled.",
            )

    def _leave(self, reason: str) -> None:
        self._left = True
        self._traced.clear()
        self._watch.leave(self._label, reason)


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


def _loggers_of(module: nn.Module) -> list[tuple[Any, Callable[..., None]]]:
    return [(part, _collect(part)) for part in module.modules() if callable(getattr(part, "log", None))]


@contextmanager
def _collecting(loggers: list[tuple[Any, Callable[..., None]]]) -> Iterator[None]:
    hidden = [(part, part.__dict__["log"]) for part, _ in loggers if "log" in part.__dict__]
    for part, log in loggers:
        part.__dict__["log"] = log
    try:
        yield
    finally:
        for part, _ in loggers:
            part.__dict__.pop("log", None)
        for part, log in hidden:
            part.__dict__["log"] = log


def _log_all(*, copy: bool) -> None:
    given = list(_logged)
    _logged.clear()
    for module, name, value, args, kwargs in given:
        if copy and isinstance(value, Tensor):
            # In memory that the next replay of the graph overwrites.
            value = value.clone()
        module.log(name, value, *args, **kwargs)


# -- what a model settles on its first call


def settle_lazily(parts: list[nn.Module], batch: Any) -> None:
    """Choose the loss of transformers' classifiers beforehand, as their first call does, by the kind of labels.

    The choice is kept in their configuration: made within the first graph, the second call would need another.
    """
    labels = batch.get("labels") if hasattr(batch, "get") else None
    if not isinstance(labels, Tensor):
        return
    for part in parts:
        config, count = part.config, getattr(part, "num_labels", None)
        if count is None or getattr(config, "problem_type", "") is not None:
            continue
        if count == 1:
            kind = "regression"
        else:
            whole = labels.dtype in (torch.long, torch.int)
            kind = "single_label_classification" if whole else "multi_label_classification"
        config.problem_type = kind  # type: ignore[union-attr]


# -- what cannot be one graph, known without trying


def _python_only(step: Callable[..., Any]) -> str | None:
    """Return why a step is not worth a try as a graph; None if it is."""
    function = inspect.unwrap(getattr(step, "__func__", step))
    code = getattr(function, "__code__", None)
    if code is None:
        return "it is no Python function."
    taken = list(inspect.signature(function).parameters.values())
    if any(one.kind is one.VAR_POSITIONAL or one.kind is one.VAR_KEYWORD for one in taken):
        return "it takes any arguments (*args), batch_idx among them, which is another number each time."
    used = {name for instruction in dis.get_instructions(code) for name in _loaded(instruction)}
    for index in ("batch_idx", *[one.name for one in taken[2:]]):
        if index in used and index in {one.name for one in taken}:
            return f"it uses {index}, which is another number each time. Its forward is compiled."
    return None


def _loaded(instruction: dis.Instruction) -> tuple[str, ...]:
    if not instruction.opname.startswith("LOAD"):
        return ()
    value = instruction.argval
    return value if isinstance(value, tuple) else (str(value),)


def _not_only_tensors(batch: Any) -> str | None:
    kinds = {
        type(leaf).__name__ for leaf in _leaves(batch) if leaf is not None and not isinstance(leaf, Tensor)
    }
    if kinds:
        return f"its batches hold {', '.join(sorted(kinds))} beside tensors. Its forward is compiled."
    return None


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, dict) or hasattr(data, "items"):
        for value in data.values():
            yield from _leaves(value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from _leaves(value)
    else:
        yield data
