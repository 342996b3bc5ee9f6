"""Load weights into a module and states into optimizers, with messages that name what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hasten._lib.names import nearest


def load_weights(module: nn.Module, state: Mapping[str, Any], *, strict: bool, source: str) -> None:
    """Load ``state`` into ``module``.

    Args:
        module: where the weights go.
        state: names to tensors.
        strict: ask for exactly the same names.
        source: where ``state`` comes from, for messages.

    Raises:
        RuntimeError: names or shapes do not fit; the message lists missing, unexpected and mis-shaped keys.

    """
    present = module.state_dict()
    # Hooks of sub-modules may rename or drop keys (compiled or parametrised ones do), so torch decides.
    try:
        module.load_state_dict(dict(state), strict=strict)
    except RuntimeError as error:
        raise RuntimeError(_message(type(module).__name__, state, present, source)) from error


def _message(owner: str, state: Mapping[str, Any], present: Mapping[str, Any], source: str) -> str:
    mis_shaped = [
        f"{key}: {tuple(value.shape)} in the file, {tuple(present[key].shape)} in the model"
        for key, value in state.items()
        if isinstance(value, Tensor)
        and isinstance(present.get(key), Tensor)
        and not hasattr(present[key], "materialize")
        and value.shape != present[key].shape
    ]
    missing = [key for key in present if key not in state]
    unexpected = [key for key in state if key not in present]
    lines = [f"The weights in {source} do not fit {owner}."]
    for title, keys in (("missing", missing), ("unexpected", unexpected), ("mis-shaped", mis_shaped)):
        if keys:
            more = f" and {len(keys) - 6} more" if len(keys) > 6 else ""
            lines.append(f"  {title} ({len(keys)}): {', '.join(keys[:6])}{more}")
    if mis_shaped:
        lines.append("Make the model with the hyper-parameters the file was trained with.")
    elif missing and unexpected and (near := nearest(unexpected[0], list(present))):
        lines.append(f"{unexpected[0]!r} looks like {near!r}: was a layer renamed?")
    elif missing or unexpected:
        lines.append("Pass strict=False (or set strict_loading = False) to load what fits.")
    return "\n".join(lines)


def load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Restore an optimizer.

    Raises:
        ValueError: the parameter groups do not fit.

    """
    # Now: loading adds to them.
    defaults = list(getattr(optimizer, "defaults", {}))
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        raise ValueError(
            f"The state of {type(optimizer).__name__} in the checkpoint does not fit: {error}. "
            "Resume with the same parameter groups."
        ) from error
    except (
        KeyError
    ) as error:  # Some optimizers of torch look for their own values in the state of another kind.
        raise _other_kind(optimizer, error.args[0]) from error
    missing = [key for group in optimizer.param_groups for key in defaults if key not in group]
    if missing:
        raise _other_kind(optimizer, missing[0])


def _other_kind(optimizer: Any, key: str) -> ValueError:
    return ValueError(
        f"The optimizer state in the checkpoint is not that of {type(optimizer).__name__}: it has no {key!r}. "
        "Resume with the kind of optimizer the run was started with, or load the weights alone: "
        "Model.load_from_checkpoint(path)."
    )
