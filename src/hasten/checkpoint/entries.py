"""The entries of a checkpoint: those of Lightning are converted, and all are checked before any is restored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# The counters of ``loops.fit`` in files of hasten.
_COUNTERS = ("epoch", "batch", "total_batches", "global_step", "updates", "window")
_FLAGS = ("followed", "epoch_ended", "last_batch")


def check_entries(checkpoint: Any, source: str, *, training: bool) -> None:
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
    entries = _Entries(source)
    if not isinstance(checkpoint, Mapping):
        raise ValueError(
            f"{source} holds {_describe(checkpoint)} instead of a dict: it is not a checkpoint of a Trainer. Load bare "
            "weights with model.load_state_dict(torch.load(path))."
        )
    if "state_dict" not in checkpoint:
        raise ValueError(
            f"{source} holds no 'state_dict' (it has {sorted(map(str, checkpoint))[:8]}): a Trainer did not "
            "write it. Load bare weights with model.load_state_dict(torch.load(path))."
        )
    for name in entries.mapping(checkpoint, "state_dict"):
        if not isinstance(name, str):
            raise entries.wrong(f"state_dict[{name!r}]", name, "named by a str")
    for key in ("hyper_parameters", "datamodule_hyper_parameters"):
        entries.mapping(checkpoint, key, none=True)
    if "callbacks" in checkpoint:
        for key, state in entries.mapping(checkpoint, "callbacks", none=True).items():
            if state is not None and not isinstance(state, Mapping):
                raise entries.wrong(f"callbacks[{key!r}]", state, "a dict")
    if not training:
        return
    if "optimizer_states" not in checkpoint:
        raise ValueError(
            f"{source} holds weights only, so training cannot go on from it. "
            "Load it with Model.load_from_checkpoint(path), or save with save_weights_only=False."
        )
    for name in ("epoch", "global_step"):
        if name in checkpoint:
            entries.count(checkpoint, name)
    _check_loops(entries, checkpoint)
    for place, state in entries.mappings(checkpoint, "optimizer_states"):
        if "state" in state:
            entries.mapping(state, "state", place)
        if "param_groups" in state:
            for inner, group in entries.mappings(state, "param_groups", place):
                if "params" not in group:
                    raise ValueError(f"{source}: the entry {inner!r} has no 'params'. {_DAMAGED}")
    if "lr_schedulers" not in checkpoint:
        raise ValueError(f"{source}: the entry 'lr_schedulers' is missing. {_DAMAGED}")
    list(entries.mappings(checkpoint, "lr_schedulers"))
    if "MixedPrecision" in checkpoint:
        entries.mapping(checkpoint, "MixedPrecision", none=True)
    if checkpoint.get("hasten") is not None:
        _check_own(entries, entries.mapping(checkpoint, "hasten"))


def _check_loops(entries: _Entries, checkpoint: Mapping[str, Any]) -> None:
    if "loops" not in checkpoint:
        return
    loops = entries.mapping(checkpoint, "loops", none=True)
    for key in loops:
        place = f"loops.{key}"
        loop = entries.mapping(loops, key, "loops", none=True)
        if key == "fit":
            for name in _COUNTERS:
                entries.count(loop, name, place)
            for name in _FLAGS:
                if not isinstance(loop.get(name), bool):
                    raise entries.wrong(f"{place}.{name}", loop.get(name), "True or False")
        elif key == "fit_loop" and "epoch_loop.batch_progress" in loop:
            progress = entries.mapping(loop, "epoch_loop.batch_progress", place)
            for name in ("current", "total"):
                inner = f"{place}.epoch_loop.batch_progress"
                counts = entries.mapping(progress, name, inner)
                for each in ("processed", "completed"):
                    entries.count(counts, each, f"{inner}.{name}")


def _check_own(entries: _Entries, own: Mapping[str, Any]) -> None:
    gradients = own.get("gradients")
    if isinstance(gradients, Mapping):
        for place, each in entries.mappings(gradients, "ranks", "hasten.gradients", empty=False):
            for key in ("optimizers", "others"):
                entries.mapping(each, key, place)
    elif gradients is not None and not isinstance(gradients, list):
        raise entries.wrong("hasten.gradients", gradients, "a dict")
    if "metric_states" in own:
        entries.mapping(own, "metric_states", "hasten")
    for place, rank in entries.mappings(own, "ranks", "hasten", empty=False):
        entries.mapping(rank, "random", place)
        values = entries.mapping(rank, "values", place)
        list(entries.mappings(values, "train", f"{place}.values"))
        for key in ("callback", "logged", "bar"):
            entries.mapping(values, key, f"{place}.values")
        entries.mapping(rank, "data", place, none=True)
        evaluations = entries.mapping(rank, "evaluations", place)
        for key in evaluations:
            list(entries.mappings(evaluations, key, f"{place}.evaluations"))
        if "metric_states" not in own:
            entries.mapping(rank, "metrics", place)
        if "window_weight" not in rank:
            raise ValueError(f"{entries.source}: the entry '{place}.window_weight' is missing. {_DAMAGED}")


_DAMAGED = (
    "The file is damaged, or was changed by another program. Nothing was restored; use an earlier checkpoint."
)


class _Entries:
    """Reads the entries of nested dicts, and names the place of one that makes no sense."""

    def __init__(self, source: str) -> None:
        self.source = source

    def mapping(
        self, owner: Mapping[str, Any], name: str, place: str = "", *, none: bool = False
    ) -> Mapping[Any, Any]:
        value = owner.get(name)
        if none and value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.wrong(_at(place, name), value, "a dict")
        return value

    def mappings(
        self, owner: Mapping[str, Any], name: str, place: str = "", *, empty: bool = True
    ) -> Iterable[tuple[str, Mapping[str, Any]]]:
        values = owner.get(name)
        if not isinstance(values, (list, tuple)) or (not values and not empty):
            raise self.wrong(_at(place, name), values, "a list" if empty else "a list that is not empty")
        for index, value in enumerate(values):
            if not isinstance(value, Mapping):
                raise self.wrong(f"{_at(place, name)}[{index}]", value, "a dict")
            yield f"{_at(place, name)}[{index}]", value

    def count(self, owner: Mapping[str, Any], name: str, place: str = "") -> None:
        value = owner.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.wrong(_at(place, name), value, "a whole number of at least 0")

    def wrong(self, place: str, value: Any, wanted: str) -> ValueError:
        return ValueError(
            f"{self.source}: the entry {place!r} is {_describe(value)}, and must be {wanted}. {_DAMAGED}"
        )


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _describe(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)[:60]
    return f"a {type(value).__name__}"


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
    automatic = _nested(
        loop, "epoch_loop.automatic_optimization.optim_progress", "optimizer", "step", "total"
    )
    stepped_automatically = automatic.get("completed", 0) > 0 and not several
    # Seen from on_train_batch_end, the batch is processed and not completed, and the last step not counted here.
    follows = now["processed"] > now["completed"]
    stepped = loop.get("epoch_loop.state_dict", {}).get("_batches_that_stepped", global_step)
    epochs = _nested(loop, "epoch_progress", "current")
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


def _nested(mapping: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    for key in keys:
        mapping = mapping.get(key) or {}
    return mapping
