"""The entries of a checkpoint: those of Lightning are converted, and all are checked before any is restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_DAMAGED = (
    "The file is damaged, or was changed by another program. Nothing was restored; use an earlier checkpoint."
)

# What an entry must be: called with its value and its place in the checkpoint; raises _Wrong.
_Check = Callable[[Any, str], None]
_ABSENT = object()


class _Wrong(Exception):
    """What is wrong with an entry."""

    def __init__(self, place: str, value: object, wanted: str) -> None:
        is_what = "missing" if value is _ABSENT else f"{_describe(value)}, and must be {wanted}"
        super().__init__(f"the entry {place!r} is {is_what}")


def _describe(value: object) -> str:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)[:60]
    return f"a {type(value).__name__}"


def _count(value: Any, place: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _Wrong(place, value, "a whole number of at least 0")


def _flag(value: Any, place: str) -> None:
    if not isinstance(value, bool):
        raise _Wrong(place, value, "True or False")


def _anything(value: Any, place: str) -> None:
    if value is _ABSENT:
        raise _Wrong(place, value, "")


def _dict(
    entries: Mapping[str, _Check] | None = None, *, every: _Check | None = None, none: bool = False
) -> _Check:
    """Return a check for a dict.

    Args:
        entries: what its entries must be; one whose name ends with "?" may be absent.
        every: what each of its entries must be.
        none: allow None.

    """

    def check(value: Any, place: str) -> None:
        if value is None and none:
            return
        if not isinstance(value, Mapping):
            raise _Wrong(place, value, "a dict")
        for name, of_entry in (entries or {}).items():
            key = name.removesuffix("?")
            if key in value or key == name:
                of_entry(value.get(key, _ABSENT), f"{place}.{key}" if place else key)
        if every is not None:
            for key, item in value.items():
                every(item, f"{place}[{key!r}]")

    return check


def _list(each: _Check, *, empty: bool = True) -> _Check:
    """Return a check for a list; ``empty`` allows one without items."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, (list, tuple)) or not (value or empty):
            raise _Wrong(place, value, "a list" if empty else "a list that is not empty")
        for index, item in enumerate(value):
            each(item, f"{place}[{index}]")

    return check


def _weights(value: Any, place: str) -> None:
    _dict()(value, place)
    for name in value:
        if not isinstance(name, str):
            raise _Wrong(f"{place}[{name!r}]", name, "named by a str")


def _gradients(value: Any, place: str) -> None:
    if value is not None and not isinstance(value, list):  # Files of earlier versions have a list.
        _dict({"ranks": _list(_dict({"optimizers": _dict(), "others": _dict()}), empty=False)})(value, place)


def _own(value: Any, place: str) -> None:
    # Files of earlier versions have the metrics of the first process, for all.
    for_all = isinstance(value, Mapping) and "metric_states" in value
    rank = _RANK if for_all else {**_RANK, "metrics": _dict()}
    _dict({"gradients?": _gradients, "metric_states?": _dict(), "ranks": _list(_dict(rank), empty=False)})(
        value, place
    )


_ANY = {
    "state_dict": _weights,
    "hyper_parameters?": _dict(none=True),
    "datamodule_hyper_parameters?": _dict(none=True),
    "callbacks?": _dict(every=_dict(none=True), none=True),
}
_FIT = dict.fromkeys(("epoch", "batch", "total_batches", "global_step", "updates", "window"), _count)
_FLAGS = dict.fromkeys(("followed", "epoch_ended", "last_batch"), _flag)
_BATCHES = _dict({"processed": _count, "completed": _count})
_LOOPS = {
    "fit?": _dict({**_FIT, **_FLAGS}),
    "fit_loop?": _dict(
        {"epoch_loop.batch_progress?": _dict({"current": _BATCHES, "total": _BATCHES})}, none=True
    ),
}
_RANK = {
    "random": _dict(),
    "values": _dict({"train": _list(_dict()), "callback": _dict(), "logged": _dict(), "bar": _dict()}),
    "data": _dict(none=True),
    "evaluations": _dict(every=_list(_dict())),
    "window_weight": _anything,
}
_TRAINING = {
    "epoch?": _count,
    "global_step?": _count,
    "loops?": _dict(_LOOPS, every=_dict(none=True), none=True),
    "optimizer_states": _list(
        _dict({"state?": _dict(), "param_groups?": _list(_dict({"params": _anything}))})
    ),
    "lr_schedulers": _list(_dict()),
    "MixedPrecision?": _dict(none=True),
    "hasten?": lambda value, place: None if value is None else _own(value, place),
}


def check_entries(checkpoint: object, source: str, *, training: bool) -> None:
    """Raise if an entry of a checkpoint is missing or has a wrong type.

    Args:
        checkpoint: the content of a file of hasten or Lightning.
        source: the file, for messages.
        training: whether training continues from it; otherwise only weights and callbacks are checked.

    Raises:
        ValueError: an entry is missing or wrong; the message names the file and the entry.

    Example::

        >>> check_entries({"state_dict": {}, "epoch": 3}, "a.ckpt", training=False)

    Source: `Lightning, Contents of a checkpoint
    <https://lightning.ai/docs/pytorch/stable/common/checkpointing_basic.html>`_.

    """
    bare = "Load bare weights with model.load_state_dict(torch.load(path))."
    if not isinstance(checkpoint, Mapping):
        raise ValueError(
            f"{source} holds {_describe(checkpoint)} instead of a dict: it is not a checkpoint of a Trainer. {bare}"
        )
    if "state_dict" not in checkpoint:
        keys = sorted(map(str, checkpoint))[:8]
        raise ValueError(
            f"{source} holds no 'state_dict' (it has {keys}): a Trainer did not write it. {bare}"
        )
    if training and "optimizer_states" not in checkpoint:
        raise ValueError(
            f"{source} holds weights only, so training cannot go on from it. "
            "Load it with Model.load_from_checkpoint(path), or save with save_weights_only=False."
        )
    try:
        _dict({**_ANY, **_TRAINING} if training else _ANY)(checkpoint, "")
    except _Wrong as wrong:
        raise ValueError(f"{source}: {wrong}. {_DAMAGED}") from None


def from_lightning(checkpoint: dict[str, Any], source: str = "the checkpoint") -> dict[str, Any]:
    """Return a checkpoint of Lightning 2.x with hasten's loop counters, or hasten's own checkpoint unchanged.

    Weights, optimizers, schedulers, callbacks and hyper-parameters have the same keys in both. Lightning does not
    keep random states, the place in the data, or the gradients of an unfinished accumulation.

    Args:
        checkpoint: the content of a file. It is not changed.
        source: the file, for messages.

    Returns:
        A new dict for a checkpoint of Lightning, else the same one.

    Raises:
        ValueError: the counters of Lightning's loops are inconsistent.

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
    loops = checkpoint.get("loops") or {}
    try:
        counters = _counters(checkpoint, loops.get("fit_loop") or {})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{source}: the counters of the entry 'loops.fit_loop' make no sense ({type(error).__name__}: {error}). "
            f"{_DAMAGED}"
        ) from error
    return {**checkpoint, "loops": {**loops, "fit": counters}}


def _counters(checkpoint: Mapping[str, Any], loop: Mapping[str, Any]) -> dict[str, Any]:
    epoch, global_step = int(checkpoint.get("epoch", 0)), int(checkpoint.get("global_step", 0))
    # Without the loop's own counters (another tool wrote it, or took them out) the epoch counts as complete.
    counters = {
        "epoch": epoch, "batch": 0, "total_batches": 0, "global_step": global_step, "updates": global_step,
        "window": 0, "followed": True, "epoch_ended": True, "last_batch": True, "begun": False,
    }  # fmt: skip
    batches = loop.get("epoch_loop.batch_progress")
    if batches is None:
        return counters
    now = batches["current"]
    progress = loop.get("epoch_loop.automatic_optimization.optim_progress") or {}
    steps = progress.get("optimizer", {}).get("step", {}).get("total", {})
    several = len(checkpoint.get("optimizer_states") or ()) > 1
    stepped_automatically = steps.get("completed", 0) > 0 and not several
    # Seen from on_train_batch_end, the batch is processed and not completed, and the last step not counted here.
    follows = now["processed"] > now["completed"]
    stepped = loop.get("epoch_loop.state_dict", {}).get("_batches_that_stepped", global_step)
    epochs = (loop.get("epoch_progress") or {}).get("current") or {}
    ended = epochs.get("processed", 0) > epoch
    return counters | {
        "batch": now["processed"],
        "total_batches": batches["total"]["processed"],
        "updates": global_step if stepped_automatically else stepped + follows,
        "followed": not follows,
        "epoch_ended": ended,
        "last_batch": ended or bool(batches.get("is_last_batch", False)),
    }
