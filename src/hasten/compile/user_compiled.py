"""Unwrap models that the user passed through torch.compile, and compile them with the same options."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import nn

from hasten.compile.settings import CompileSettings

_ATTRIBUTE = "_hasten_compiled_by_user"
_Model = TypeVar("_Model")


def inner_model(model: _Model) -> _Model:
    """Return the model inside of ``torch.compile(model)`` and remember its options; other objects unchanged.

    Args:
        model: what the user passed.

    """
    if not isinstance(model, nn.Module):
        return model
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, nn.Module):
        inner.__dict__[_ATTRIBUTE] = _UserOptions(getattr(model, "dynamo_ctx", None))
        # The result of torch.compile has the attributes and the call of the model.
        return cast(_Model, inner)
    model.__dict__.pop(_ATTRIBUTE, None)
    return model


def users_settings(model: nn.Module) -> CompileSettings | None:
    """Return how the user compiled ``model``; None if it was not compiled."""
    options = model.__dict__.get(_ATTRIBUTE)
    if options is None or options.context is None:
        return None
    # Options of inductor; other backends have none of this name.
    config = getattr(options.context, "compiler_config", None)
    records = isinstance(config, dict) and bool(config.get("triton.cudagraphs")) and torch.cuda.is_available()
    return CompileSettings(context=options.context, context_records=records, cache=False)


class _UserOptions:
    """The options of the user's torch.compile; a copy of the model is not compiled."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def __reduce__(self) -> Any:
        return _UserOptions, (None,)

    def __deepcopy__(self, memo: dict[int, Any]) -> _UserOptions:
        return _UserOptions(None)
