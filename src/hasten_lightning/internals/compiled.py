"""Modules that went through ``torch.compile``, and what Fabric's setup returned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from hasten.fabric.wrappers import FabricDataLoader, FabricModule, FabricOptimizer, unwrapped
from hasten.module import LightningModule
from hasten_lightning.utilities.data import apply_to_collection

if TYPE_CHECKING:
    from hasten.types import Batch

T = TypeVar("T")

_METHODS = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def from_compiled(model: OptimizedModule) -> LightningModule:
    """Return the LightningModule inside of ``torch.compile(module)``, which gets compiled steps.

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
    """Undo ``torch.compile`` or ``from_compiled``, in place, and return the original module.

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

    Raises:
        TypeError: it is another object.

    """
    if isinstance(model, OptimizedModule):
        return from_compiled(model)
    if isinstance(model, LightningModule):
        return model
    kind = type(model).__qualname__
    raise TypeError(f"`model` must be a `LightningModule` or `torch._dynamo.OptimizedModule`, got `{kind}`")


def unwrap_compiled(obj: T) -> tuple[Any, dict[str, Any] | None]:
    """Return (the object inside of ``torch.compile``, the arguments it was compiled with); (``obj``, None) for others.

    The arguments are those of torch, unless the program has kept others in ``_compile_kwargs``.
    """
    if not isinstance(obj, OptimizedModule):
        return obj, None
    return obj._orig_mod, getattr(obj, "_compile_kwargs", {})


def to_compiled(module: nn.Module, compile_kwargs: dict[str, Any]) -> OptimizedModule:
    """Return ``torch.compile(module, **compile_kwargs)``."""
    return cast("OptimizedModule", torch.compile(module, **compile_kwargs))


def unwrap_objects(collection: Batch) -> Batch:
    """Return a collection with the user's objects in place of those that Fabric's setup returned."""
    kinds = (FabricModule, FabricOptimizer, FabricDataLoader, OptimizedModule)
    return apply_to_collection(collection, kinds, unwrapped)


__all__ = [
    "from_compiled", "maybe_unwrap_optimized", "to_compiled", "to_uncompiled", "unwrap_compiled", "unwrap_objects",
]  # fmt: skip
