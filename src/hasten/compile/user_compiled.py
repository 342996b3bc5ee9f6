"""Models that the user compiled: taken as the model inside, compiled in the user's way."""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from torch import nn

from hasten.compile.settings import CompileSettings

_PLACE = "_hasten_compiled_by_user"
_Model = TypeVar("_Model")


def inner_model(model: _Model) -> _Model:
    """Return the model inside of ``torch.compile(model)``, which is compiled in that way; others as they are.

    Args:
        model: what the user gave.

    """
    inner = getattr(model, "_orig_mod", None) if isinstance(model, nn.Module) else None
    if isinstance(inner, nn.Module):
        inner.__dict__[_PLACE] = _Way(getattr(model, "dynamo_ctx", None))
        # What torch.compile makes of a model stands for it: same attributes, same call.
        return cast(_Model, inner)
    if isinstance(model, nn.Module):
        model.__dict__.pop(_PLACE, None)
    return model


def users_settings(model: nn.Module) -> CompileSettings | None:
    """Return how the user compiled ``model`` before it was given; None if it came as it is."""
    way = model.__dict__.get(_PLACE)
    if way is None or way.context is None:
        return None
    return CompileSettings(context=way.context, context_records=_records(way.context), cache=False)


def _records(context: Any) -> bool:
    # Of inductor alone; other backends have no such options.
    options = getattr(context, "compiler_config", None)
    return isinstance(options, dict) and bool(options.get("triton.cudagraphs")) and torch.cuda.is_available()


class _Way:
    """How a model was compiled; a copy of the model is not compiled."""

    def __init__(self, context: Any) -> None:
        self.context = context

    def __reduce__(self) -> Any:
        return _Way, (None,)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Way:
        return _Way(None)
