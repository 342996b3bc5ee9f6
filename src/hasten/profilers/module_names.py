"""The forward of each module as a range of a trace."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.autograd.profiler import record_function


class RegisterRecordFunction:
    """A context in which the forward of each module inside ``model`` is a range of the trace, with its name.

    Args:
        model: the module whose children are named.

    Example::

        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> with torch.profiler.profile() as profiler, RegisterRecordFunction(model):
        ...     output = model(torch.ones(1, 2))
        >>> [event.key for event in profiler.key_averages() if "[module]" in event.key]
        ['[pl][module]torch.nn.modules.linear.Linear: 0']

    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            if name:
                self._name(module, f"[pl][module]{type(module).__module__}.{type(module).__name__}: {name}")

    def _name(self, module: nn.Module, label: str) -> None:
        # A module may call itself: the ranges that are open are kept apart.
        entered: list[record_function] = []

        def begin(*_: Any) -> None:
            record = record_function(label)
            record.__enter__()
            entered.append(record)

        def end(*_: Any) -> None:
            if entered:
                entered.pop().__exit__(None, None, None)

        self._handles.append(module.register_forward_pre_hook(begin))
        self._handles.append(module.register_forward_hook(end, always_call=True))

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
