"""What a checkpoint holds: ``collect`` and ``restore``, the same keys in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from hasten._lib.rank_zero import rank_zero_warn
from hasten._lib.version import FIELD_FORMAT, VERSION
from hasten.checkpoint.metrics import load_metric_states, on_device
from hasten.checkpoint.weights import load_weights
from hasten.seed import collect_rng_state, restore_rng_state

if TYPE_CHECKING:
    from torch.optim import Optimizer


class HasState(Protocol):
    """Anything with ``state_dict`` and ``load_state_dict``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Take the state back."""


class Parts(Protocol):
    """What a checkpoint is taken of. The Trainer's run fills it in; nothing here knows a Trainer."""

    optimizers: list[Any]
    schedulers: list[Any]
    scaler: Any
    precision_name: str
    epoch: int
    global_step: int

    @property
    def module(self) -> nn.Module:
        """The user's module."""

    @property
    def progress(self) -> HasState:
        """The counters."""

    def weights(self) -> dict[str, Any]:
        """Return the weights of the user's module."""

    def callback_states(self) -> dict[str, Any]:
        """Return the state of each callback by its key."""

    def load_callback_states(self, states: Mapping[str, Any]) -> None:
        """Give each callback its state back."""

    def hyper_parameters(self) -> Iterable[tuple[str, Any]]:
        """Return keys and values describing how module and datamodule were made."""

    def datamodule_state(self) -> tuple[str, dict[str, Any]] | None:
        """Return the datamodule's key and state."""

    def load_datamodule_state(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the datamodule its state back."""

    def own_state(self) -> dict[str, Any]:
        """Return what differs between processes: data position, values logged, metrics, random states."""

    def may_have_gradients(self) -> bool:
        """Return whether gradients that are there now may be part of an optimizer's next step."""

    def gather(self, mine: Any) -> list[Any]:
        """Return every process's ``mine``, in the order of ranks."""


def collect(parts: Parts, *, weights_only: bool) -> dict[str, Any]:
    """Return everything a run needs to go on exactly where it is.

    Args:
        parts: the run.
        weights_only: leave out what only training needs.

    """
    checkpoint: dict[str, Any] = {
        "epoch": parts.epoch,
        "global_step": parts.global_step,
        "pytorch-lightning_version": FIELD_FORMAT,
        "hasten_version": VERSION,
        "state_dict": parts.weights(),
        "loops": {"fit": parts.progress.state_dict()},
    }
    if not weights_only:
        checkpoint["callbacks"] = parts.callback_states()
        checkpoint["optimizer_states"] = [optimizer.state_dict() for optimizer in parts.optimizers]
        checkpoint["lr_schedulers"] = [scheduler_state(config.scheduler) for config in parts.schedulers]
        if parts.scaler is not None:
            checkpoint[parts.precision_name] = parts.scaler.state_dict()
        checkpoint["hasten"] = {
            "gradients": collect_gradients(parts) if parts.may_have_gradients() else None,
            "ranks": parts.gather(parts.own_state()),
        }
    for key, value in parts.hyper_parameters():
        checkpoint[key] = value
    datamodule = parts.datamodule_state()
    if datamodule is not None:
        checkpoint[datamodule[0]] = datamodule[1]
    return checkpoint


def restore_model(parts: Parts, checkpoint: dict[str, Any], *, strict: bool, source: str) -> None:
    """Restore the weights and the datamodule: what fit, validate, test and predict all need."""
    load_weights(parts.module, checkpoint["state_dict"], strict=strict, source=source)
    parts.load_datamodule_state(checkpoint)


def restore_training(
    parts: Parts, checkpoint: dict[str, Any], *, rank: int, source: str
) -> dict[str, Any] | None:
    """Restore what only training needs; return this process's own state, or None if the file has none.

    Raises:
        ValueError: the file holds weights only, or was written with other optimizers or schedulers.

    """
    if "optimizer_states" not in checkpoint:
        raise ValueError(
            f"{source} holds weights only, so training cannot go on from it. "
            "Load it with Model.load_from_checkpoint(path), or save with save_weights_only=False."
        )
    _same_number("optimizers", checkpoint["optimizer_states"], parts.optimizers, source)
    _same_number("lr_schedulers", checkpoint["lr_schedulers"], parts.schedulers, source)
    loops = checkpoint.get("loops", {})
    if "fit" in loops:
        parts.progress.load_state_dict(loops["fit"])
    for optimizer, state in zip(parts.optimizers, checkpoint["optimizer_states"], strict=True):
        load_optimizer(optimizer, state)
    for config, state in zip(parts.schedulers, checkpoint["lr_schedulers"], strict=True):
        load_scheduler(config.scheduler, state)
    if parts.scaler is not None and parts.precision_name in checkpoint:
        parts.scaler.load_state_dict(checkpoint[parts.precision_name])
    own = checkpoint.get("hasten")
    if own is None:
        return None
    if own["gradients"] is not None:
        restore_gradients(parts, own["gradients"], rank=rank)
    ranks = own["ranks"]
    # Files of earlier versions have those of the first process, for all.
    metrics = (
        own["metric_states"] if "metric_states" in own else ranks[rank if rank < len(ranks) else 0]["metrics"]
    )
    load_metric_states(parts.module, metrics)
    if rank >= len(ranks) or len(ranks) != len(parts.gather(None)):
        rank_zero_warn(
            f"{source} was written by {len(ranks)} process(es) and is resumed on another number: the order of the "
            "data and random numbers go on anew. Weights and optimizer state are as saved."
        )
        return None
    mine: dict[str, Any] = ranks[rank]
    return mine


def _same_number(what: str, stored: list[Any], present: list[Any], source: str) -> None:
    if len(stored) != len(present):
        raise ValueError(
            f"{source} holds the state of {len(stored)} {what}, and configure_optimizers() gives {len(present)}. "
            "Resume with the configure_optimizers() the run was started with, or load the weights alone: "
            "Model.load_from_checkpoint(path)."
        )


# -- optimizers and schedulers


def load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Restore an optimizer.

    Raises:
        ValueError: the parameter groups do not fit.

    """
    # Beforehand: loading adds to them.
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
    ) as error:  # an optimizer of torch that looks for its own values in the state of another kind
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


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's state as plain data: without functions, which would be code in the file."""
    return _nested_state(scheduler.state_dict())


def _nested_state(state: dict[str, Any]) -> dict[str, Any]:
    return {key: _data(value) for key, value in state.items() if not callable(value)}


def _data(value: Any) -> Any:
    from collections import Counter

    if isinstance(value, Counter):
        return {"__counter__": [[key, count] for key, count in value.items()]}
    if isinstance(value, dict):
        return {key: _data(inner) for key, inner in value.items() if not callable(inner)}
    if isinstance(value, (list, tuple)):
        kept = [_data(inner) for inner in value if not callable(inner)]
        return kept if isinstance(value, list) else tuple(kept)
    if hasattr(value, "item") and not isinstance(value, Tensor) and getattr(value, "shape", None) == ():
        return value.item()
    return value


def load_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Restore a scheduler from ``scheduler_state``; functions it was made with stay as they are."""
    from collections import Counter

    def back(value: Any) -> Any:
        if isinstance(value, dict):
            if set(value) == {"__counter__"}:
                return Counter(dict(value["__counter__"]))
            return {key: back(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [back(inner) for inner in value]
        return value

    state = {key: back(value) for key, value in state.items()}
    own = scheduler.state_dict()
    if "last_epoch" in own and "last_epoch" not in state:
        raise ValueError(
            f"The state of {type(scheduler).__name__} in the checkpoint has no 'last_epoch': it is damaged, or that of "
            "another kind of scheduler. Resume with the configure_optimizers() the run was started with."
        )
    # What was left out because it is code (lambdas, the function of an annealing) is this run's own.
    for key, value in own.items():
        if key not in state:
            state[key] = value
    scheduler.load_state_dict(state)


# -- gradients that wait for the rest of their accumulation


def collect_gradients(parts: Parts) -> dict[str, Any] | None:
    """Return the gradients of all processes, once where they are the same on each; None where there are none.

    Args:
        parts: the run. All processes call this together.

    """
    mine = _gradients(parts)
    several = len(parts.gather(None)) > 1
    if not several or len(set(parts.gather(_digest(mine)))) == 1:
        return {"ranks": [mine]} if any(mine.values()) else None
    # Between two exchanges each process has the gradients of its own batches.
    on_host = {
        key: {name: on_device(torch.device("cpu"), g) for name, g in of.items()} for key, of in mine.items()
    }
    return {"ranks": parts.gather(on_host)}


def restore_gradients(parts: Parts, stored: Any, *, rank: int) -> None:
    """Give parameters the gradients that ``collect_gradients`` returned.

    Args:
        parts: the run.
        stored: that; or a list of the gradients of the optimizers' parameters, as in files of earlier versions.
        rank: which process this is.

    """
    if isinstance(stored, list):
        stored = {"ranks": [{"optimizers": dict(enumerate(stored)), "others": {}}]}
    ranks = stored["ranks"]
    several = len(parts.gather(None))
    if len(ranks) == 1:
        mine = ranks[0]
    else:
        # On another number of processes each one has their mean, which is what they would have exchanged.
        mine = ranks[rank] if len(ranks) == several else _mean_of(ranks)
    in_optimizers, others = _parameters(parts.optimizers), _other_parameters(parts)
    for stored_key, present in (("optimizers", dict(enumerate(in_optimizers))), ("others", others)):
        for key, parameter in present.items():
            gradient = mine[stored_key].get(key)
            if isinstance(gradient, Tensor):
                parameter.grad = gradient.to(parameter.device).clone()
            else:
                parameter.grad = None if gradient is None else torch.zeros_like(parameter)


def _gradients(parts: Parts) -> dict[str, dict[Any, Any]]:
    """Return the gradients that are there: of the optimizers' parameters by number, of others by name."""
    found: dict[str, dict[Any, Any]] = {"optimizers": {}, "others": {}}
    present = dict(enumerate(_parameters(parts.optimizers)))
    for key, parameters in (("optimizers", present), ("others", _other_parameters(parts))):
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                # Zeros, as zero_grad(set_to_none=False) leaves them, need no room in the file.
                found[key][name] = parameter.grad.detach() if _some(parameter.grad) else 0
    return found


def _some(gradient: Tensor) -> bool:
    return gradient.is_sparse or bool(gradient.any())


def _mean_of(ranks: list[dict[str, dict[Any, Any]]]) -> dict[str, dict[Any, Any]]:
    mean: dict[str, dict[Any, Any]] = {}
    for key in ("optimizers", "others"):
        names = {name: None for each in ranks for name in each[key]}
        mean[key] = {name: sum(each[key].get(name, 0) for each in ranks) / len(ranks) for name in names}
    return mean


def _digest(gradients: dict[str, dict[Any, Any]]) -> str:
    """Return a number that two processes share if their gradients are the same."""
    import hashlib

    digest = hashlib.sha256()
    for key, of in gradients.items():
        for name, gradient in of.items():
            digest.update(f"{key} {name}".encode())
            if isinstance(gradient, Tensor):
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                digest.update(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _parameters(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _other_parameters(parts: Parts) -> dict[str, Tensor]:
    """Return the parameters that no optimizer has, by name, where the user may do something with their gradients."""
    if getattr(parts.module, "automatic_optimization", True):
        return {}
    known = {id(parameter) for parameter in _parameters(parts.optimizers)}
    return {name: p for name, p in parts.module.named_parameters() if id(p) not in known}


# -- random states


def random_state() -> dict[str, Any]:
    """Return the state of every random generator of this process."""
    return collect_rng_state()


def restore_random_state(state: dict[str, Any]) -> Callable[[], None]:
    """Return a function that puts the random generators back."""
    return lambda: restore_rng_state(state)
