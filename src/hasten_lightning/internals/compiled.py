"""Modules that went through ``torch.compile`` as a LightningModule."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from torch._dynamo import OptimizedModule

from hasten.module import LightningModule

_METHODS = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def from_compiled(model: OptimizedModule) -> LightningModule:
    """Return the module inside of ``torch.compile(module)``, with compiled steps.

    Args:
        model: what ``torch.compile`` returned for a LightningModule, which is changed in place.

    Raises:
        ValueError: it is another object.

    """
    if not isinstance(model, OptimizedModule):
        raise ValueError(f"`model` is required to be a `OptimizedModule`. Found a `{type(model).__name__}` instead.")
    inner = cast("Any", model._orig_mod)
    if not isinstance(inner, LightningModule):
        raise ValueError(
            f"`model` is expected to be a compiled LightningModule. Found a `{type(inner).__name__}` instead"
        )
    context: Any = model.dynamo_ctx
    before = {f"original_{name}": getattr(inner, name) for name in _METHODS}
    inner._compiler_ctx = {"compiler": "dynamo", "dynamo_ctx": context, **before}
    for name in _METHODS:
        setattr(inner, name, context(getattr(inner, name)))
    return inner


def to_uncompiled(model: nn.Module) -> LightningModule:
    """Undo ``torch.compile`` and return the original module.

    Args:
        model: the result of ``torch.compile`` or of ``from_compiled``; it is changed in place.

    Raises:
        ValueError: it is not compiled.
        TypeError: what is compiled is not a LightningModule.

    """
    inner = cast("Any", model._orig_mod if isinstance(model, OptimizedModule) else model)
    if not isinstance(inner, LightningModule):
        if isinstance(model, OptimizedModule):
            raise TypeError(f"the compiled model should be a LightningModule, not {type(inner).__name__}")
        raise ValueError("`model` must either be an instance of OptimizedModule or LightningModule")
    context = getattr(inner, "_compiler_ctx", None)
    if context is None:
        if not isinstance(model, OptimizedModule):
            raise ValueError(
                "`model` is required to be a compiled LightningModule. Found a non-compiled LightningModule instead."
            )
        return inner
    for name in _METHODS:
        setattr(inner, name, context[f"original_{name}"])
    inner._compiler_ctx = None
    return inner


def maybe_unwrap_optimized(model: object) -> LightningModule:
    """Return a LightningModule unchanged; return a compiled one with compiled steps.

    Args:
        model: the module, or what ``torch.compile`` returned for it.

    Raises:
        TypeError: it is another object.

    """
    if isinstance(model, OptimizedModule):
        return from_compiled(model)
    if isinstance(model, LightningModule):
        return model
    kind = type(model).__qualname__
    raise TypeError(f"`model` must be a `LightningModule` or `torch._dynamo.OptimizedModule`, got `{kind}`")


__all__ = ["from_compiled", "maybe_unwrap_optimized", "to_uncompiled"]
