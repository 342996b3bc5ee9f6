"""Make modules without initial values, and initialize later whatever has not been loaded."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from hasten._lib import torch_private

# What was left out for a parameter: calls with their numbers in the order of all calls.
left_out: Any = WeakTensorKeyDictionary()
_numbers = itertools.count()


class NoInit(TorchFunctionMode):
    """Leave out the functions of ``torch.nn.init`` for parameters, and mark the parameters as empty.

    They hold NaN, so that it is seen later which values were loaded or set by other means.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) != "torch.nn.init":
            return func(*args, **kwargs)
        rest = {name: value for name, value in kwargs.items() if name != "tensor"}
        tensor, others = (kwargs["tensor"], args) if "tensor" in kwargs else (args[0], args[1:])
        # Others, such as parts of a parameter, are not found in the module afterwards.
        if not isinstance(tensor, nn.Parameter) or not (tensor.is_floating_point() or tensor.is_complex()):
            return func(*args, **kwargs)
        with torch.no_grad():
            tensor.fill_(math.nan)
        left_out.setdefault(tensor, []).append((next(_numbers), functools.partial(_call, func, others, rest)))
        return tensor


def _call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor) -> None:
    function(tensor, *args, **kwargs)


@torch.no_grad()
def fill_empty(module: nn.Module, stored: Container[str] = ()) -> None:
    """Give the parameters that ``NoInit`` has left empty the initial values that were left out.

    Values that were loaded or set since stay. A checkpoint is going to bring those whose names are ``stored``.
    """
    todo: list[tuple[int, Any, nn.Parameter]] = []
    written: list[tuple[nn.Parameter, Tensor, Tensor]] = []
    for name, parameter in module.named_parameters():
        calls = left_out.pop(parameter, [])
        if not calls or name in stored or parameter.is_meta or torch_private.is_fake(parameter):
            continue
        empty = torch.isnan(parameter)
        if not empty.any():
            continue
        todo += [(number, call, parameter) for number, call in calls]
        if not empty.all():
            written.append((parameter, empty, parameter.clone()))
    # In the order in which the constructors would have drawn the values.
    for _, call, parameter in sorted(todo, key=operator.itemgetter(0)):
        call(parameter)
    for parameter, empty, values in written:
        parameter.copy_(torch.where(empty, parameter, values))
