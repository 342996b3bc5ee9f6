"""Checkpoints written by Lightning, in our layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def from_lightning(checkpoint: dict[str, Any], source: str = "the checkpoint") -> dict[str, Any]:
    """Return a checkpoint of Lightning's 2.x with the counters of our loop; one of ours comes back as it is.

    Weights, optimizers, schedulers, callbacks and hyper-parameters have the same keys in both. Lightning does not
    keep random states, the place in the data, or the gradients of an unfinished accumulation.

    Args:
        checkpoint: what a file held. It is not changed.
        source: the file, for messages.

    Returns:
        A new dict where something is different, else the same one.

    Raises:
        ValueError: the counters of Lightning's loops make no sense.

    Example::

        >>> ours = from_lightning({"pytorch-lightning_version": "2.6.6", "epoch": 1, "global_step": 20,
        ...     "state_dict": {}})
        >>> ours["loops"]["fit"]["epoch"], ours["loops"]["fit"]["epoch_ended"]
        (1, True)

    Source: `Lightning, Contents of a checkpoint
    <https://lightning.ai/docs/pytorch/stable/common/checkpointing_basic.html>`_.

    """
    if "pytorch-lightning_version" not in checkpoint or "hasten_version" in checkpoint:
        return checkpoint
    try:
        loops = checkpoint.get("loops") or {}
        several = len(checkpoint.get("optimizer_states") or ()) > 1
        counters = _counters(checkpoint, loops.get("fit_loop") or {}, several=several)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{source}: the counters of the entry 'loops.fit_loop' make no sense ({type(error).__name__}: {error}). "
            "The file is damaged, or was changed by another program. Nothing was restored; use an earlier checkpoint."
        ) from error
    return {**checkpoint, "loops": {**loops, "fit": counters}}


def _counters(checkpoint: Mapping[str, Any], loop: Mapping[str, Any], *, several: bool) -> dict[str, Any]:
    epoch, global_step = int(checkpoint.get("epoch", 0)), int(checkpoint.get("global_step", 0))
    batches = loop.get("epoch_loop.batch_progress")
    if batches is None:
        # Without the loop's own counters (another tool wrote it, or took them out) the epoch counts as complete.
        return _progress(epoch=epoch, global_step=global_step, updates=global_step, ended=True)
    now, total = batches["current"], batches["total"]
    automatic = _at(loop, "epoch_loop.automatic_optimization.optim_progress", "optimizer", "step", "total")
    stepped_automatically = automatic.get("completed", 0) > 0 and not several
    # Seen from on_train_batch_end, the batch is processed and not completed, and the last step not counted here.
    follows = now["processed"] > now["completed"]
    stepped = loop.get("epoch_loop.state_dict", {}).get("_batches_that_stepped", global_step)
    epochs = _at(loop, "epoch_progress", "current")
    return _progress(
        epoch=epoch,
        batch=now["processed"],
        total_batches=total["processed"],
        global_step=global_step,
        updates=global_step if stepped_automatically else stepped + follows,
        followed=not follows,
        ended=epochs.get("processed", 0) > epoch,
        last=bool(batches.get("is_last_batch", False)),
    )


def _progress(
    *,
    epoch: int,
    global_step: int,
    updates: int,
    ended: bool,
    batch: int = 0,
    total_batches: int = 0,
    followed: bool = True,
    last: bool = False,
) -> dict[str, Any]:
    return {
        "epoch": epoch,
        "batch": batch,
        "total_batches": total_batches,
        "global_step": global_step,
        "updates": updates,
        "window": 0,
        "followed": followed,
        "epoch_ended": ended,
        "last_batch": last or ended,
        "begun": False,
    }


def _at(mapping: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    for key in keys:
        mapping = mapping.get(key) or {}
    return mapping
