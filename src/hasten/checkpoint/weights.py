"""Load weights into a module, and say what does not fit."""

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
    own = module.state_dict()
    mis_shaped = [
        f"{key}: {tuple(value.shape)} in the file, {tuple(own[key].shape)} in the model"
        for key, value in state.items()
        if isinstance(value, Tensor)
        and isinstance(own.get(key), Tensor)
        and value.shape != own[key].shape
        and not hasattr(own[key], "materialize")
    ]
    missing = [key for key in own if key not in state]
    unexpected = [key for key in state if key not in own]
    # Hooks of sub-modules may rename or drop keys (compiled or parametrised ones do), so torch has the say.
    try:
        module.load_state_dict(dict(state), strict=strict)
    except RuntimeError as error:
        raise RuntimeError(_message(module, source, missing, unexpected, mis_shaped, list(own))) from error


def _message(
    module: nn.Module,
    source: str,
    missing: list[str],
    unexpected: list[str],
    mis_shaped: list[str],
    own: list[str],
) -> str:
    lines = [f"The weights in {source} do not fit {type(module).__name__}."]
    for title, keys in (("missing", missing), ("unexpected", unexpected), ("mis-shaped", mis_shaped)):
        if keys:
            more = f" and {len(keys) - 6} more" if len(keys) > 6 else ""
            lines.append(f"  {title} ({len(keys)}): {', '.join(keys[:6])}{more}")
    if mis_shaped:
        lines.append("Make the model with the hyper-parameters the file was trained with.")
    elif missing and unexpected and nearest(unexpected[0], own):
        lines.append(f"{unexpected[0]!r} looks like {nearest(unexpected[0], own)!r}: was a layer renamed?")
    elif missing or unexpected:
        lines.append("Pass strict=False (or set strict_loading = False) to load what fits.")
    return "\n".join(lines)
