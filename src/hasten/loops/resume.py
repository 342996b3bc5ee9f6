"""From which checkpoint a call starts."""

from __future__ import annotations

import os
from typing import Any

from hasten._lib.rank_zero import rank_zero_warn


def resolve_path(trainer: Any, ckpt_path: Any) -> str | None:
    """Return the file that ``ckpt_path`` means; None to start from the beginning.

    Args:
        trainer: whose checkpoint callbacks know "best" and "last".
        ckpt_path: a path, "best", "last" or None.

    Raises:
        ValueError: "best" is asked for and unknown.
        FileNotFoundError: there is no such file.

    """
    if ckpt_path is None:
        return None
    text: str = os.fspath(ckpt_path)
    if text == "last":
        return _find_last(trainer)
    if text == "best":
        callback = trainer.checkpoint_callback
        best = getattr(callback, "best_model_path", "")
        if not best:
            raise ValueError(
                'ckpt_path="best": '
                + (
                    f"the {type(callback).__name__} is not configured to save the best model, or has not saved one "
                    "yet. Give it a monitor and save_top_k of at least 1, and fit first."
                    if callback is not None
                    else "`ModelCheckpoint` is not configured. Add callbacks=[ModelCheckpoint(monitor=...)] to the "
                    "Trainer, and fit first."
                )
            )
        return str(best)
    if "://" not in text and not os.path.exists(text):
        from hasten._lib.names import did_you_mean

        folder = os.path.dirname(text) or "."
        near = os.listdir(folder) if os.path.isdir(folder) else []
        raise FileNotFoundError(
            f"ckpt_path={text!r}: there is no such file.{did_you_mean(os.path.basename(text), near)}"
        )
    return text


def _find_last(trainer: Any) -> str | None:
    found = [
        path
        for callback in trainer.checkpoint_callbacks
        if hasattr(callback, "find_last") and (path := callback.find_last(trainer)) is not None
    ]
    if not found:
        rank_zero_warn(
            'ckpt_path="last": there is none yet. No checkpoint will be loaded: the run starts from the beginning.'
        )
        return None
    local = [path for path in found if os.path.exists(path)]
    return str(max(local, key=os.path.getmtime) if local else found[0])
