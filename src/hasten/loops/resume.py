"""From which checkpoint a call starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import did_you_mean, nearest
from hasten._lib.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from hasten.arguments import Arguments


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
        raise FileNotFoundError(f"ckpt_path={text!r}: {_not_found(text)}")
    return text


def _not_found(path: str) -> str:
    folder, name = os.path.split(path)
    if not folder and path.lower() in ("hpc", "registry"):
        return 'hasten writes no such checkpoint. Use "last" for the newest one, or give the path of a file.'
    if folder and not os.path.isdir(folder):
        parent = os.path.dirname(folder) or "."
        near = os.listdir(parent) if os.path.isdir(parent) else []
        return f"there is no folder {folder!r}.{did_you_mean(os.path.basename(folder), near)}"
    words = [] if folder else ["last", "best"]
    found = nearest(name, words) or nearest(name, os.listdir(folder or "."))
    known = "" if folder else ' Besides paths, "last" and "best" are known.'
    suggestion = "" if found is None else f" Did you mean {found!r}?"
    return f"there is no such file.{suggestion or known}"


def check_left_to_train(checkpoint: Mapping[str, Any], path: str, arguments: Arguments) -> None:
    """Warn if a checkpoint leaves nothing to train.

    Args:
        checkpoint: what the file holds, with hasten's counters.
        path: the file.
        arguments: the Trainer's.

    Raises:
        MisconfigurationException: it has trained for more epochs than the Trainer is to train for.

    """
    counters = (checkpoint.get("loops") or {}).get("fit")
    if counters is None:
        return
    flags = (counters["batch"], counters["epoch_ended"], counters["last_batch"], counters.get("begun"))
    begun = counters["epoch"] + any(flags)
    complete = counters["epoch"] + counters["epoch_ended"]
    step = counters["global_step"]
    epochs, steps = arguments.max_epochs, arguments.max_steps
    if epochs is not None and 0 <= epochs < begun:
        where = f"in its epoch {begun}" if begun > complete else f"at the end of its epoch {complete}"
        raise MisconfigurationException(
            f"ckpt_path={path!r}: the checkpoint was saved {where}, and Trainer(max_epochs={epochs}) ends before that. "
            f"To train on, write max_epochs={begun + (begun == complete)} or more, counted from the first epoch of the "
            "run."
        )
    done = None
    if epochs is not None and 0 <= epochs == complete:
        done = f"all of max_epochs={epochs}", f"max_epochs={epochs + 1}"
    elif steps is not None and 0 <= steps <= step:
        done = f"{step} steps, and max_steps={steps}", f"max_steps={step + 1}"
    if done is not None:
        rank_zero_warn(
            f"ckpt_path={path!r}: nothing is left to train: the checkpoint has trained {done[0]}. To train on, write "
            f"{done[1]} or more, counted from the beginning of the run."
        )


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
