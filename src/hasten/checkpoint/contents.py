"""What a checkpoint of a run holds: ``collect`` and ``restore``, phase by phase.

The keys are those of Lightning's checkpoints, and ``"hasten"`` for what makes a resumed run exact.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hasten._lib import FIELD_FORMAT, VERSION
from hasten._lib.rank_zero import rank_zero_warn
from hasten._lib.tree import move_to


class Phase(Enum):
    """What is restored together; the phases follow each other in this order."""

    # Weights, and the states of datamodule and callbacks: before optimizers are made.
    MODEL = "model"
    # The counters: before the data is loaded, which may depend on the epoch.
    POSITION = "position"
    # Optimizers, schedulers, gradients, and what each process has of its own.
    TRAINING = "training"
    # Random generators: when the first batch is due.
    RANDOM = "random"


class HasState(Protocol):
    """Anything with ``state_dict`` and ``load_state_dict``."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Restore the state."""


class Parts(Protocol):
    """What a checkpoint is collected from and restored to; ``loops/resume.py`` has the one of a run."""

    scaler: Any
    precision_name: str
    epoch: int
    global_step: int
    rank: int
    world_size: int

    @property
    def module(self) -> nn.Module:
        """The user's module."""

    @property
    def progress(self) -> HasState:
        """The counters."""

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers."""

    @property
    def schedulers(self) -> list[Any]:
        """The schedulers and when they step."""

    def weights(self) -> dict[str, Any]:
        """Return the weights of the user's module."""

    def load_weights(self, weights: Mapping[str, Any], source: str) -> None:
        """Restore the weights of the user's module."""

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer."""

    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Restore the state of an optimizer."""

    def training_weights(self) -> list[Tensor] | None:
        """Return the weights training continues with, where ``weights`` are their averages."""

    def load_training_weights(self, weights: list[Tensor] | None) -> None:
        """Put the weights training continues with into the module."""

    def callback_states(self) -> dict[str, Any]:
        """Return the state of each callback by its key."""

    def load_callback_states(self, states: Mapping[str, Any]) -> None:
        """Restore the states of the callbacks."""

    def hyper_parameters(self) -> Iterable[tuple[str, Any]]:
        """Return keys and values that describe how module and datamodule were made."""

    def datamodule_state(self) -> tuple[str, dict[str, Any]] | None:
        """Return the datamodule's key and state."""

    def load_datamodule_state(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the datamodule's state."""

    def process_state(self) -> dict[str, Any]:
        """Return what differs between processes: data position, values logged, metrics, random states."""

    def load_metrics(self, state: dict[str, Any]) -> None:
        """Restore the metrics of ``process_state``; those of another process where there is none of this one."""

    def load_process_state(self, state: dict[str, Any]) -> None:
        """Restore the rest of ``process_state`` except the random states."""

    def load_random_state(self, state: dict[str, Any]) -> None:
        """Restore the random states of ``process_state``."""

    def gradients_may_count(self) -> bool:
        """Return whether present gradients may be part of an optimizer's next step."""

    def gather(self, data: Any) -> list[Any]:
        """Return every process's ``data``, in the order of ranks."""


def collect(parts: Parts, *, weights_only: bool) -> dict[str, Any]:
    """Return everything a run needs to continue exactly. All processes call it together.

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
        _collect_training(parts, checkpoint)
    checkpoint.update(parts.hyper_parameters())
    datamodule = parts.datamodule_state()
    if datamodule is not None:
        checkpoint[datamodule[0]] = datamodule[1]
    return checkpoint


def restore(parts: Parts, checkpoint: dict[str, Any], phase: Phase, *, source: str) -> None:
    """Restore one phase of a checkpoint.

    Args:
        parts: the run.
        checkpoint: what ``collect`` returned; its entries were checked by ``check_entries``.
        phase: what to restore.
        source: the file, for messages.

    Raises:
        ValueError: the file was written with other optimizers or schedulers.

    """
    if phase is Phase.MODEL:
        parts.load_weights(checkpoint["state_dict"], source)
        parts.load_datamodule_state(checkpoint)
        parts.load_callback_states(checkpoint.get("callbacks") or {})
    elif phase is Phase.POSITION:
        if "fit" in checkpoint.get("loops", {}):
            parts.progress.load_state_dict(checkpoint["loops"]["fit"])
    elif phase is Phase.TRAINING:
        _restore_training(parts, checkpoint, source)
    elif (state := _state_of_process(parts, checkpoint)) is not None:
        parts.load_random_state(state)


def _collect_training(parts: Parts, checkpoint: dict[str, Any]) -> None:
    checkpoint["optimizer_states"] = [parts.optimizer_state(optimizer) for optimizer in parts.optimizers]
    checkpoint["lr_schedulers"] = [scheduler_state(config.scheduler) for config in parts.schedulers]
    if parts.scaler is not None:
        checkpoint[parts.precision_name] = parts.scaler.state_dict()
    checkpoint["hasten"] = {
        "gradients": collect_gradients(parts) if parts.gradients_may_count() else None,
        "ranks": parts.gather(parts.process_state()),
    }
    training_weights = parts.training_weights()
    if training_weights is not None:
        checkpoint["hasten"]["training_weights"] = training_weights


def _restore_training(parts: Parts, checkpoint: dict[str, Any], source: str) -> None:
    _check_number("optimizers", checkpoint["optimizer_states"], parts.optimizers, source)
    _check_number("lr_schedulers", checkpoint["lr_schedulers"], parts.schedulers, source)
    for optimizer, state in zip(parts.optimizers, checkpoint["optimizer_states"], strict=True):
        parts.load_optimizer_state(optimizer, state)
    for config, state in zip(parts.schedulers, checkpoint["lr_schedulers"], strict=True):
        load_scheduler(config.scheduler, state)
    if parts.scaler is not None and parts.precision_name in checkpoint:
        parts.scaler.load_state_dict(checkpoint[parts.precision_name])
    own = checkpoint.get("hasten") or {}
    if own:
        if own["gradients"] is not None:
            restore_gradients(parts, own["gradients"])
        ranks = own["ranks"]
        # Files of earlier versions have the metrics of the first process, for all.
        metrics = own if "metric_states" in own else ranks[parts.rank if parts.rank < len(ranks) else 0]
        parts.load_metrics(metrics["metric_states" if "metric_states" in own else "metrics"])
        state = _state_of_process(parts, checkpoint)
        if state is not None:
            parts.load_process_state(state)
        else:
            rank_zero_warn(
                f"{source} was written by {len(ranks)} process(es) and is resumed on {parts.world_size}: the order of "
                "the data and random numbers start again. Weights and optimizer state are as saved."
            )
    parts.load_training_weights(own.get("training_weights"))


def _state_of_process(parts: Parts, checkpoint: dict[str, Any]) -> dict[str, Any] | None:
    """Return what the checkpoint holds for this process; None if it was written by another number of processes."""
    ranks = (checkpoint.get("hasten") or {}).get("ranks", ())
    state: dict[str, Any] | None = ranks[parts.rank] if len(ranks) == parts.world_size else None
    return state


def _check_number(what: str, stored: list[Any], present: list[Any], source: str) -> None:
    if len(stored) != len(present):
        raise ValueError(
            f"{source} holds the state of {len(stored)} {what}, and configure_optimizers() gives {len(present)}. "
            "Resume with the configure_optimizers() the run was started with, or load the weights alone: "
            "Model.load_from_checkpoint(path)."
        )


# -- schedulers


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's state as plain data: without functions, which would be code in the file."""
    return {key: _as_data(value) for key, value in scheduler.state_dict().items() if not callable(value)}


def _as_data(value: Any) -> Any:
    if isinstance(value, Counter):
        return {"__counter__": [[key, count] for key, count in value.items()]}
    if isinstance(value, dict):
        return {key: _as_data(inner) for key, inner in value.items() if not callable(inner)}
    if isinstance(value, (list, tuple)):
        kept = [_as_data(inner) for inner in value if not callable(inner)]
        return kept if isinstance(value, list) else tuple(kept)
    if hasattr(value, "item") and not isinstance(value, Tensor) and getattr(value, "shape", None) == ():
        return value.item()
    return value


def load_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """Restore a scheduler from ``scheduler_state``; functions it was made with stay as they are."""
    state = {key: _from_data(value) for key, value in state.items()}
    present = scheduler.state_dict()
    if "last_epoch" in present and "last_epoch" not in state:
        raise ValueError(
            f"The state of {type(scheduler).__name__} in the checkpoint has no 'last_epoch': it is damaged, or that of "
            "another kind of scheduler. Resume with the configure_optimizers() the run was started with."
        )
    # What was left out because it is code (lambdas, the function of an annealing) comes from this run.
    scheduler.load_state_dict({**{key: value for key, value in present.items() if key not in state}, **state})


def _from_data(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"__counter__"}:
            return Counter(dict(value["__counter__"]))
        return {key: _from_data(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_from_data(inner) for inner in value]
    return value


# -- gradients that wait for the rest of their accumulation: {"optimizers": {index: ...}, "others": {name: ...}}

Gradients = dict[str, dict[Any, Any]]


def collect_gradients(parts: Parts) -> dict[str, list[Gradients]] | None:
    """Return the gradients of all processes, once where they are the same on each; None where there are none."""
    # Zeros, as zero_grad(set_to_none=False) leaves them, need no room in the file.
    gradients: Gradients = {
        kind: {
            key: p.grad.detach() if p.grad.is_sparse or p.grad.any() else 0
            for key, p in parameters.items()
            if p.grad is not None
        }
        for kind, parameters in _parameters(parts).items()
    }
    if parts.world_size == 1 or len(set(parts.gather(_digest(gradients)))) == 1:
        return {"ranks": [gradients]} if any(gradients.values()) else None
    # Between two exchanges each process has the gradients of its own batches.
    return {"ranks": parts.gather(move_to(gradients, "cpu"))}


def restore_gradients(parts: Parts, stored: Any) -> None:
    """Give parameters the gradients that ``collect_gradients`` returned.

    Args:
        parts: the run.
        stored: that; or a list of the gradients of the optimizers' parameters, as in files of earlier versions.

    """
    if isinstance(stored, list):
        stored = {"ranks": [{"optimizers": dict(enumerate(stored)), "others": {}}]}
    ranks: list[Gradients] = stored["ranks"]
    if len(ranks) == 1:
        gradients = ranks[0]
    else:
        # On another number of processes each one has their mean, which is what they would have exchanged.
        gradients = ranks[parts.rank] if len(ranks) == parts.world_size else _mean_of(ranks)
    for kind, parameters in _parameters(parts).items():
        for key, parameter in parameters.items():
            gradient = gradients[kind].get(key)
            if isinstance(gradient, Tensor):
                parameter.grad = gradient.to(parameter.device).clone()
            else:
                parameter.grad = None if gradient is None else torch.zeros_like(parameter)


def _parameters(parts: Parts) -> dict[str, dict[Any, Tensor]]:
    """Return the optimizers' parameters by number, and others whose gradients the user's code may read by name."""
    trained = [
        p for optimizer in parts.optimizers for group in optimizer.param_groups for p in group["params"]
    ]
    others: dict[Any, Tensor] = {}
    if not getattr(parts.module, "automatic_optimization", True):
        known = set(map(id, trained))
        others = {name: p for name, p in parts.module.named_parameters() if id(p) not in known}
    return {"optimizers": dict(enumerate(trained)), "others": others}


def _mean_of(ranks: list[Gradients]) -> Gradients:
    mean: Gradients = {}
    for kind in ("optimizers", "others"):
        keys = {key: None for each in ranks for key in each[kind]}
        mean[kind] = {key: sum(each[kind].get(key, 0) for each in ranks) / len(ranks) for key in keys}
    return mean


def _digest(gradients: Gradients) -> str:
    """Return a text that two processes share if their gradients are the same."""
    digest = hashlib.sha256()
    for kind, by_key in gradients.items():
        for key, gradient in by_key.items():
            digest.update(f"{kind} {key}".encode())
            if isinstance(gradient, Tensor):
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                digest.update(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
