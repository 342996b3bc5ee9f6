"""The contents of a checkpoint: checked before any is restored, converted from Lightning's, and restored.

``loops/resume.py`` collects and restores a whole checkpoint.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hasten._lib.errors import ErrorWithFix, make_error
from hasten._lib.names import did_you_mean, nearest
from hasten._lib.torch_private import with_versions
from hasten._lib.tree import as_bytes, move_to, parameters_of
from hasten.checkpoint.stored import StoredTensor, StoredTensors, whole


class Phase(Enum):
    """A group of entries that are restored together; the phases follow each other in this order."""

    # Weights, and the states of datamodule and callbacks; restored before optimizers are made.
    MODEL = "model"
    # The counters; restored before the data is loaded, which may depend on the epoch.
    POSITION = "position"
    # Optimizers, schedulers, gradients, and the state of each process; restored once the data is loaded.
    TRAINING = "training"
    # Random generators; restored when the first batch is due.
    RANDOM = "random"


# -- entries: Lightning's are converted, and all are checked before any is restored

_DAMAGED = "The file is damaged, or was changed by another program. Nothing was restored; use an earlier checkpoint."

_ABSENT = object()


class _Wrong(Exception):
    """Raised for a wrong entry; says what is wrong with it."""

    def __init__(self, place: str, value: object, wanted: str) -> None:
        is_what = "missing" if value is _ABSENT else f"{_describe(value)}, and must be {wanted}"
        super().__init__(f"the entry {place!r} is {is_what}")


def _describe(value: object) -> str:
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)[:60]
    return f"a {type(value).__name__}"


def _check_entry(value: Any, pattern: Any, place: str) -> None:
    """Raise ``_Wrong`` unless an entry, and what is in it, fits its pattern.

    A pattern is ``int`` for a count, ``bool``, or ``object`` for anything; ``[pattern]`` for a list, with ``...`` for
    one that is not empty; ``{name: pattern}`` for a dict, where "name?" may be absent, ``str`` stands for all names and
    ``...`` for all keys; or ``(pattern, None)`` where None is allowed.
    """
    if isinstance(pattern, tuple):
        if value is None:
            return
        pattern = pattern[0]
    if isinstance(pattern, dict):
        _check_dict(value, pattern, place)
    elif isinstance(pattern, list):
        _check_list(value, pattern, place)
    elif pattern is int and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise _Wrong(place, value, "a whole number of at least 0")
    elif pattern is bool and not isinstance(value, bool):
        raise _Wrong(place, value, "True or False")
    elif value is _ABSENT:
        raise _Wrong(place, value, "")


def _check_dict(value: Any, pattern: dict[Any, Any], place: str) -> None:
    if isinstance(value, StoredTensors):
        # Reading its values here would load tensors.
        value = dict.fromkeys(value)
    if not isinstance(value, Mapping):
        raise _Wrong(place, value, "a dict")
    for name, inside in pattern.items():
        if isinstance(name, str):
            key = name.removesuffix("?")
            if key in value or key == name:
                _check_entry(value.get(key, _ABSENT), inside, f"{place}.{key}" if place else key)
            continue
        for key, item in value.items():
            if name is str and not isinstance(key, str):
                raise _Wrong(f"{place}[{key!r}]", key, "named by a str")
            _check_entry(item, inside, f"{place}[{key!r}]")


def _check_list(value: Any, pattern: list[Any], place: str) -> None:
    may_be_empty = ... not in pattern
    if not isinstance(value, (list, tuple)) or not (value or may_be_empty):
        raise _Wrong(place, value, "a list" if may_be_empty else "a list that is not empty")
    for index, item in enumerate(value):
        _check_entry(item, pattern[0], f"{place}[{index}]")


_DICT_OR_NONE: Any = {}, None
# All entries that ``RunState.collect`` writes, but for that of a datamodule; docs/checkpoints.md says what they are.
_ANY: dict[Any, Any] = {
    "hasten_version?": object,
    "pytorch-lightning_version?": object,
    "state_dict": {str: object},
    "hparams_name?": object,
    "datamodule_hparams_name?": object,
    "hparams_type?": object,
    "datamodule_hparams_type?": object,
    "hyper_parameters?": _DICT_OR_NONE,
    "datamodule_hyper_parameters?": _DICT_OR_NONE,
    "callbacks?": ({...: _DICT_OR_NONE}, None),
}
_FIT: dict[Any, Any] = {
    **dict.fromkeys(("epoch", "batch", "total_batches", "global_step", "updates", "window"), int),
    **dict.fromkeys(("followed", "epoch_ended", "last_batch"), bool),
    "begun?": bool,
}
_BATCHES = {"processed": int, "completed": int}
_LOOPS: dict[Any, Any] = {
    "fit?": _FIT,
    "fit_loop?": ({"epoch_loop.batch_progress?": {"current": _BATCHES, "total": _BATCHES}}, None),
    ...: _DICT_OR_NONE,
}
_RANK: dict[Any, Any] = {
    "random": {},
    "values": {"train": [{}], "callback": {}, "logged": {}, "bar": {}},
    "data": _DICT_OR_NONE,
    "evaluations": {...: [{}]},
    "window_weight": object,
    "metrics?": {},  # Files of hasten 0.1 have none.
    "share?": object,
    "window_divisor?": object,
    "toggled?": _DICT_OR_NONE,
    "changes?": _DICT_OR_NONE,
    "guard?": object,
    "batch_size?": object,
    "fits?": object,
    "loggers?": ([{}], None),
    "logger_classes?": ([str], None),
}
_TRAINING: dict[Any, Any] = {
    "epoch?": int,
    "global_step?": int,
    "loops?": (_LOOPS, None),
    "optimizer_states": [{"state?": {}, "param_groups?": [{"params": object}]}],
    "lr_schedulers": [{}],
    "MixedPrecision?": _DICT_OR_NONE,
    "hasten?": (
        {
            "gradients": ({"ranks": [{"optimizers": {}, "others": {}}, ...]}, None),
            "ranks": [_RANK, ...],
            "training_weights?": object,
            "levers?": object,
            "optimizer_arguments?": str,
            "gradient_buckets?": ([[int]], None),
            "history?": object,
        },
        None,
    ),
}


class WeightsOnly(ErrorWithFix, ValueError, KeyError):
    """Training cannot resume from a checkpoint, because it has no states of optimizers."""

    __str__ = Exception.__str__  # A KeyError would show its message in quotation marks.


def check_entries(checkpoint: object, source: str, *, training: bool) -> None:
    """Raise if an entry of a checkpoint is missing or has a wrong type.

    Example::

        >>> check_entries({"state_dict": {}, "epoch": 3}, "a.ckpt", training=False)

    Source: `Lightning, Contents of a checkpoint
    <https://lightning.ai/docs/pytorch/stable/common/checkpointing_basic.html>`_.

    """
    bare = "Load bare weights with model.load_state_dict(torch.load(path))."
    if not isinstance(checkpoint, Mapping):
        what = f"{source} holds {_describe(checkpoint)} instead of a dict: it is not a checkpoint of a Trainer."
        if isinstance(checkpoint, nn.Module):
            bare = "That is the module itself, with its weights: model = torch.load(path, weights_only=False)."
        raise make_error(ValueError, what, fix=bare)
    if "state_dict" not in checkpoint:
        keys = sorted(map(str, checkpoint))[:8]
        # A loop by hand often saves them beside the optimizer's state.
        inside = [name for name, value in checkpoint.items() if _is_weights(value)]
        if inside:
            bare = f"Load bare weights with model.load_state_dict(torch.load(path)[{inside[0]!r}])."
        raise make_error(
            ValueError, f"{source} holds no 'state_dict' (it has {keys}): a Trainer did not write it.", fix=bare
        )
    if training and "optimizer_states" not in checkpoint:
        raise WeightsOnly(
            f"{source} holds weights only, so training cannot continue from it.",
            fix="Load it with Model.load_from_checkpoint(path), or save with save_weights_only=False.",
        )
    try:
        # What ``dump_checkpoint`` of Lightning's names returns, and programs write to files, is as hooks see it.
        _check_entry(from_hooks(dict(checkpoint)), _ANY | _TRAINING if training else _ANY, "")
    except _Wrong as wrong:
        raise make_error(ValueError, f"{source}: {wrong}.", fix=_DAMAGED) from None


def from_lightning(checkpoint: dict[str, Any], source: str = "the checkpoint") -> dict[str, Any]:
    """Return a checkpoint of Lightning 2.x with hasten's loop counters, or hasten's own checkpoint unchanged.

    Weights, optimizers, schedulers, callbacks and hyper-parameters have the same keys in both. Lightning does not
    keep random states, the position in the data, or the gradients of an unfinished accumulation.

    The checkpoint does not change: one of Lightning gives a new dict. ``source`` is the file, for messages.

    Example::

        >>> ours = from_lightning({"pytorch-lightning_version": "2.6.6", "epoch": 1, "global_step": 20,
        ...     "state_dict": {}})
        >>> ours["loops"]["fit"]["epoch"], ours["loops"]["fit"]["epoch_ended"]
        (1, True)

    Source: `Lightning, Contents of a checkpoint
    <https://lightning.ai/docs/pytorch/stable/common/checkpointing_basic.html>`_.

    """
    checkpoint = from_hooks(checkpoint)
    if "pytorch-lightning_version" not in checkpoint or "hasten_version" in checkpoint:
        return checkpoint
    loops = checkpoint.get("loops") or {}
    try:
        counters = _counters(checkpoint, loops.get("fit_loop") or {})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"{source}: the counters of the entry 'loops.fit_loop' make no sense ({type(error).__name__}: {error})."
        raise make_error(ValueError, what, fix=_DAMAGED) from error
    return {**checkpoint, "loops": {**loops, "fit": counters}}


def for_hooks(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint as the hooks that save and load checkpoints see it.

    Programs written for Lightning may expect exactly its keys: for them hasten's own entries are in ``"loops"``.
    """
    own = {key: checkpoint[key] for key in _OWN if key in checkpoint}
    others = {key: value for key, value in checkpoint.items() if key not in _OWN}
    return {**others, "loops": {**(checkpoint.get("loops") or {}), **own}} if own else others


def from_hooks(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint in the form in which files hold it, after hooks have seen and maybe changed it."""
    loops = checkpoint.get("loops")
    if not isinstance(loops, Mapping) or not any(key in loops for key in _OWN):
        return checkpoint
    own = {key: loops[key] for key in _OWN if key in loops}
    return {**checkpoint, **own, "loops": {key: value for key, value in loops.items() if key not in _OWN}}


# Entries that Lightning's checkpoints do not have.
_OWN = ("hasten_version", "hasten")


def _counters(checkpoint: Mapping[str, Any], loop: Mapping[str, Any]) -> dict[str, Any]:
    epoch, global_step = int(checkpoint.get("epoch", 0)), int(checkpoint.get("global_step", 0))
    # Without the loop's own counters (because another tool wrote the file or removed them) the epoch counts as
    # complete.
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
    if epoch > 0 and epochs.get("ready", epoch + 1) <= epoch:
        # Saved after fit: the next epoch has not begun, and the counts of batches belong to the last one.
        epoch, ended = epoch - 1, True
    return counters | {
        "epoch": epoch,
        "batch": now["processed"],
        "total_batches": batches["total"]["processed"],
        "updates": global_step if stepped_automatically else stepped + follows,
        "followed": not follows,
        "epoch_ended": ended,
        "last_batch": ended or bool(batches.get("is_last_batch", False)),
    }


# -- the states of processes


def share_of(state: Mapping[str, Any], rank: int, ranks: Sequence[Any]) -> tuple[int, int]:
    """Return which share of the data process ``rank`` of the saved run read: its index, and the number of shares."""
    share, shares = state.get("share", (rank, len(ranks)))
    return share, shares


def state_of(ranks: Sequence[Any], rank: int, share: tuple[int, int]) -> Any:
    """Return the state of a process of the saved run that read the same share of the data; None if none did.

    The state of this process, by its rank, is the first choice. A share is its index, and the number of shares.

    Example::

        >>> ranks = [{"share": (0, 2)}, {"share": (1, 2)}]
        >>> state_of(ranks, 1, (1, 2)), state_of(ranks, 0, (0, 1))
        ({'share': (1, 2)}, None)

    """
    found = {index: state for index, state in enumerate(ranks) if share_of(state, index, ranks) == share}
    return found.get(rank) or next(iter(found.values()), None)


# -- weights and optimizers


def _is_weights(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(each, Tensor) for each in value.values())


def load_weights(module: nn.Module, state: Mapping[str, Any], *, strict: bool | None, source: str) -> Any:
    """Load ``state`` into ``module``, and return what its ``load_state_dict`` returns: the names that did not fit.

    Sharded tensors of a checkpoint folder are read whole. ``strict`` asks for exactly the same names; None means True,
    as the ``strict_loading`` of a module. ``source`` is where the state comes from, for messages.
    """
    present = module.state_dict()
    if isinstance(state, StoredTensors) or any(isinstance(each, StoredTensor) for each in state.values()):
        state = whole(state)
    # Hooks of sub-modules may rename or drop keys (compiled or parametrised ones do), so torch decides.
    try:
        return module.load_state_dict(with_versions(state, state), strict=strict is None or bool(strict))
    except RuntimeError as error:
        raise RuntimeError(describe_misfit(type(module).__name__, state, present, source)) from error


def describe_misfit(owner: str, state: Mapping[str, Any], present: Mapping[str, Any], source: str) -> str:
    """Return the message for weights of a file that do not fit a module; ``owner`` is its class."""
    mis_shaped = [
        f"{key}: {tuple(value.shape)} in the file, {tuple(present[key].shape)} in the model"
        for key, value in state.items()
        if isinstance(value, Tensor)
        and isinstance(present.get(key), Tensor)
        and not hasattr(present[key], "materialize")
        and value.shape != present[key].shape
    ]
    missing, unexpected = _without_partner(state, present)
    lines = [f"The weights in {source} do not fit {owner}."]
    for title, keys in (("missing", missing), ("unexpected", unexpected), ("mis-shaped", mis_shaped)):
        if keys:
            more = f" and {len(keys) - 6} more" if len(keys) > 6 else ""
            lines.append(f"  {title} ({len(keys)}): {', '.join(keys[:6])}{more}")
    if mis_shaped:
        lines.append("Make the model with the hyper-parameters the file was trained with.")
    elif missing or unexpected:
        lines.append(instead_of(state, present))
    return "\n".join(lines)


def _without_partner(state: Mapping[str, Any], present: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names that a file lacks, and those that a module lacks."""
    return [key for key in present if key not in state], [key for key in state if key not in present]


def instead_of(state: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    """Return what to write where the names of the weights of a file are not those of a module."""
    missing, unexpected = _without_partner(state, present)
    if prefix := _prefix(unexpected, missing):
        return f"Load {{name.removeprefix({prefix!r}): value for name, value in state_dict.items()}}."
    if prefix := _prefix(missing, unexpected):
        return f"Load them into model.{prefix[:-1]}: its names lack {prefix!r}."
    if compiled := _compiled(missing, unexpected):
        return compiled
    if renamed := _renamed(missing, unexpected, state, present):
        return f"{renamed[0]!r} looks like {renamed[1]!r}: was a layer renamed?"
    if not set(state) & set(present):
        return "They have no name in common: use the class that the file was trained with."
    return (
        "Pass strict=False to load what fits. Trainer.fit(ckpt_path=...) needs all of it: call "
        "load_from_checkpoint(path, strict=False), and fit without ckpt_path."
    )


def _compiled(missing: list[str], unexpected: list[str]) -> str:
    """Return what to write if the names differ by what ``torch.compile(layer)`` adds to them; "" if not."""
    added = "_orig_mod."
    if {name.replace(added, "") for name in missing} != {name.replace(added, "") for name in unexpected}:
        return ""
    if any(added in name for name in missing):
        return f"torch.compile(layer) has added {added!r} to names of the model: call layer.compile() instead."
    return (
        f"torch.compile(layer) had added {added!r}: load {{name.replace({added!r}, ''): value for name, value in "
        "state_dict.items()}, or call layer.compile() where the file is made."
    )


def _prefix(longer: list[str], shorter: list[str]) -> str:
    """Return what comes before each of the shorter names in the longer ones, such as "module."; "" if nothing does."""
    found = (longer[0].removesuffix(name) for name in shorter if longer and longer[0].endswith(f".{name}"))
    return next((each for each in found if {each + name for name in shorter} == set(longer)), "")


def _renamed(
    missing: list[str], unexpected: list[str], state: Mapping[str, Any], present: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Return a name of the file and one of the model that are alike, with tensors of one shape; None if none are."""
    for name in unexpected:
        shape = getattr(state[name], "shape", None)
        near = nearest(name, [each for each in missing if getattr(present[each], "shape", None) == shape])
        if near is not None:
            return name, near
    return None


WEIGHTS_ALONE = (
    "or load the weights alone: Model.load_from_checkpoint(path), and fit without ckpt_path; with Fabric, "
    "fabric.load(path, {'model': model})."
)


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Restore an optimizer; tensors of a checkpoint folder are read whole."""
    entries = (each for each in state.get("state", {}).values() if isinstance(each, Mapping))
    if any(isinstance(value, StoredTensor) for each in entries for value in each.values()):
        state = whole(state)
    # Compare now, because loading adds groups.
    defaults = list(getattr(optimizer, "defaults", {}))
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        what = f"The state of {type(optimizer).__name__} in the checkpoint does not fit: {error}."
        raise make_error(ValueError, what, fix=f"Resume with the same parameter groups, {WEIGHTS_ALONE}") from error
    except KeyError as error:
        # Some optimizers of torch look for their own values in the state of another kind.
        raise _other_kind(optimizer, error.args[0]) from error
    missing = [key for group in optimizer.param_groups for key in defaults if key not in group]
    if missing:
        raise _other_kind(optimizer, missing[0])
    _restore_scalar_types(optimizer, state)


def _restore_scalar_types(optimizer: object, state: Mapping[str, Any]) -> None:
    """Give the state's scalars the types they were saved with: torch converts them to those of the parameters."""
    if not isinstance(optimizer, Optimizer):
        return
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    for number, parameter in zip(numbers, parameters_of(optimizer), strict=False):
        saved, loaded = state["state"].get(number), optimizer.state.get(parameter)
        if not isinstance(saved, Mapping) or not isinstance(loaded, dict) or not parameter.ndim:
            continue
        for name, value in saved.items():
            present = loaded.get(name)
            if _is_scalar(value) and _is_scalar(present) and present.dtype != value.dtype:
                loaded[name] = value.to(present.device, copy=True)


def _is_scalar(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.ndim == 0


def _other_kind(optimizer: Any, key: str) -> ValueError:
    what = f"The optimizer state in the checkpoint is not that of {type(optimizer).__name__}: it has no {key!r}."
    fix = f"Resume with the kind of optimizer the run was started with, {WEIGHTS_ALONE}"
    return make_error(ValueError, what, fix=fix)


# -- schedulers


def scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """Return a scheduler's state as plain data: without functions, which would be code in the file."""
    return {key: _as_data(value) for key, value in scheduler.state_dict().items() if not callable(value)}


def _as_data(value: Any) -> Any:
    if isinstance(value, dict) and not isinstance(value, Counter):
        return {key: _as_data(inner) for key, inner in value.items() if not callable(inner)}
    if isinstance(value, (list, tuple)):
        kept = [_as_data(inner) for inner in value if not callable(inner)]
        return kept if isinstance(value, list) else tuple(kept)
    if hasattr(value, "item") and not isinstance(value, Tensor) and getattr(value, "shape", None) == ():
        return value.item()
    return value


def load_scheduler(scheduler: LRScheduler, state: dict[str, Any]) -> None:
    """Restore a scheduler from ``scheduler_state``; functions it was made with are not replaced."""
    present = scheduler.state_dict()
    if "last_epoch" in present and "last_epoch" not in state:
        raise make_error(
            ValueError,
            f"The state of {type(scheduler).__name__} in the checkpoint has no 'last_epoch': it is damaged, or that "
            "of another kind of scheduler.",
            fix="Resume with the configure_optimizers() the run was started with.",
        )
    # Code that was left out (lambdas, the function of an annealing) comes from this run.
    scheduler.load_state_dict({**{key: value for key, value in present.items() if key not in state}, **state})


# -- gradients that wait for the rest of their accumulation: {"optimizers": {index: ...}, "others": {name: ...}}

Gradients = dict[str, dict[Any, Any]]


def collect_gradients(
    module: nn.Module,
    optimizers: Iterable[Any],
    gather: Callable[[Any], list[Any]],
    *,
    world_size: int,
    whole: Callable[[Any], Any] | None = None,
) -> dict[str, list[Gradients]] | None:
    """Return the gradients of all processes, once if they are the same on each; None if there are none.

    ``gather`` returns the objects of all processes. ``whole`` converts a gradient of which each process has a part to
    the form in a checkpoint; None if processes have whole gradients.
    """
    if whole is not None:
        shared = {
            kind: {key: whole(p.grad.detach()) for key, p in parameters.items() if p.grad is not None}
            for kind, parameters in _parameters(module, optimizers).items()
        }
        return {"ranks": [shared]} if any(shared.values()) else None
    # Zeros, as zero_grad(set_to_none=False) leaves them, need no room in the file.
    gradients: Gradients = {
        kind: {
            key: p.grad.detach() if p.grad.is_sparse or p.grad.any() else 0
            for key, p in parameters.items()
            if p.grad is not None
        }
        for kind, parameters in _parameters(module, optimizers).items()
    }
    if world_size == 1 or len(set(gather(_digest(gradients)))) == 1:
        return {"ranks": [gradients]} if any(gradients.values()) else None
    # Between two exchanges each process has only the gradients from its batches.
    return {"ranks": gather(move_to(gradients, "cpu"))}


def restore_gradients(
    module: nn.Module,
    optimizers: Iterable[Any],
    stored: dict[str, list[Gradients]],
    *,
    rank: int,
    world_size: int,
    divided: Callable[[Any, Tensor], Any] | None = None,
) -> None:
    """Give parameters the gradients that ``collect_gradients`` returned.

    ``divided`` returns a stored gradient divided like its parameter; None if each process has whole parameters.
    """
    ranks = stored["ranks"]
    # On another number of processes each one gets the mean, which an exchange would have given.
    own = len(ranks) == 1 or (len(ranks) == world_size and divided is None)
    gradients = ranks[rank % len(ranks)] if own else _mean_of(ranks)
    for kind, parameters in _parameters(module, optimizers).items():
        for key, parameter in parameters.items():
            gradient = gradients[kind].get(key)
            if divided is not None:
                gradient = divided(gradient, parameter)
            if isinstance(gradient, Tensor):
                parameter.grad = gradient.to(parameter.device).clone()
            else:
                parameter.grad = None if gradient is None else torch.zeros_like(parameter)


def _parameters(module: nn.Module, optimizers: Iterable[Any]) -> dict[str, dict[Any, Tensor]]:
    """Return the optimizers' parameters by number, and others whose gradients the user's code may read by name."""
    trained = parameters_of(*optimizers)
    others: dict[Any, Tensor] = {}
    if not getattr(module, "automatic_optimization", True):
        known = set(map(id, trained))
        others = {name: p for name, p in module.named_parameters() if id(p) not in known}
    return {"optimizers": dict(enumerate(trained)), "others": others}


def _mean_of(ranks: list[Gradients]) -> Gradients:
    mean: Gradients = {}
    for kind in ("optimizers", "others"):
        keys = {key: None for each in ranks for key in each[kind]}
        mean[kind] = {key: sum(each[kind].get(key, 0) for each in ranks) / len(ranks) for key in keys}
    return mean


def _digest(gradients: Gradients) -> str:
    """Return a digest that is equal for processes with the same gradients."""
    digest = hashlib.sha256()
    for kind, by_key in gradients.items():
        for key, gradient in by_key.items():
            digest.update(f"{kind} {key}".encode())
            if isinstance(gradient, Tensor):
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                digest.update(as_bytes(dense.cpu()).numpy().data)
    return digest.hexdigest()


# -- names and objects that a program saves and loads by itself


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def states_of(
    state: Mapping[str, object],
    filter: Mapping[str, Callable[[str, Any], bool]] | None,
    of_module: Callable[[nn.Module], Any],
    of_optimizer: Callable[[Optimizer], Any],
) -> dict[str, Any]:
    """Return the contents of a checkpoint: the state of each object that has one, other values unchanged."""
    contents = {}
    for name, value in state.items():
        saved: Any = value
        if isinstance(value, nn.Module):
            saved = of_module(value)
        elif isinstance(value, Optimizer):
            saved = of_optimizer(value)
        elif _is_stateful(value):
            saved = saved.state_dict()
        keep = (filter or {}).get(name)
        if keep is not None and isinstance(saved, Mapping):
            saved = {key: entry for key, entry in saved.items() if keep(key, entry)}
        contents[name] = saved
    return contents


def restore_objects(
    state: dict[str, Any],
    contents: Mapping[str, Any],
    load_into: Callable[..., object],
    *,
    strict: bool,
    path: str | os.PathLike[str],
) -> dict[str, Any]:
    """Give objects of ``state`` what a checkpoint has under their names, by ``load_into``; return the rest."""
    missing = [name for name in state if name not in contents]
    if missing and strict:
        raise make_error(
            KeyError,
            f"The requested state contains a key {missing[0]!r} that does not exist in the loaded checkpoint "
            f"{os.fspath(path)}.",
            fix=(
                f"{did_you_mean(missing[0], contents)} It has: {', '.join(map(repr, contents))}. Leave the name "
                "out of state, or pass strict=False."
            ),
        )
    rest = dict(contents)
    for name in [name for name in state if name in contents]:
        saved, target = rest.pop(name), state[name]
        if isinstance(target, nn.Module) or _is_stateful(target):
            load_into(target, saved, strict=strict, path=path)
        else:
            state[name] = saved
    return rest
