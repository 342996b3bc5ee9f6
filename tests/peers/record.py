"""Write down what a run does, as JSON: hooks in order, values logged, checkpoints, final weights.

A program imports this module and marks its classes with ``@record.hooks``. Nothing is recorded unless
``PEER_RECORD`` names the file to write; ``PEER_RECORD_HOOKS=0`` leaves the classes as they are written,
so that the run takes the paths a program without overrides takes.
"""

from __future__ import annotations

import atexit
import hashlib
import inspect
import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

_OUTPUT = os.environ.get("PEER_RECORD")
_HOOKS = bool(_OUTPUT) and os.environ.get("PEER_RECORD_HOOKS", "1") == "1"
_SEEN: dict[str, Any] = {"events": [], "logged": [], "hparams": [], "finalized": [], "notes": {}, "parts": []}

_FRAME = ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")
_OF_ALL = {"setup", "teardown", "on_save_checkpoint", "on_load_checkpoint"} | {
    f"on_{stage}_{moment}" for stage in ("train", "validation", "test", "predict") for moment in _FRAME
}
_OF_FIT = {
    "on_fit_start", "on_fit_end", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step",
}  # fmt: skip
_OF_DATA = {
    "prepare_data", "train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader",
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
}  # fmt: skip
_OF_MODULE_ALONE = {
    "configure_model", "configure_optimizers", "configure_callbacks", "configure_gradient_clipping",
    "clip_gradients", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "backward",
    "on_validation_model_zero_grad", "on_validation_model_eval", "on_validation_model_train", "on_test_model_eval",
    "on_test_model_train", "on_predict_model_eval", "training_step", "validation_step", "test_step", "predict_step",
}  # fmt: skip
_OF_CALLBACK_ALONE = {"on_sanity_check_start", "on_sanity_check_end", "on_exception"}
# Whoever defines these says something by it: a class is only given those it has itself.
_ONLY_IF_WRITTEN = _OF_DATA | {f"{stage}_step" for stage in ("training", "validation", "test", "predict")}
_ONLY_IF_WRITTEN |= {"configure_optimizers"}


def hooks(cls: type) -> type:
    """Return the class with every hook noting that it is called, by whom and when."""
    if not _HOOKS:
        return cls
    if issubclass(cls, L.LightningModule):
        owner, base, names = "module", L.LightningModule, _OF_ALL | _OF_FIT | _OF_DATA | _OF_MODULE_ALONE
    elif issubclass(cls, L.LightningDataModule):
        owner, base = "data", L.LightningDataModule
        names = _OF_DATA | {"setup", "teardown", "on_exception", "state_dict", "load_state_dict"}
    else:
        owner, base = cls.__name__, L.Callback
        names = _OF_ALL | _OF_FIT | _OF_CALLBACK_ALONE | {"state_dict", "load_state_dict"}
    for name in sorted(names):
        written = getattr(cls, name, None) is not getattr(base, name, None)
        if hasattr(cls, name) and (written or base is not L.LightningModule or name not in _ONLY_IF_WRITTEN):
            setattr(cls, name, _noting(owner, name, getattr(cls, name)))
    return cls


def _noting(owner: str, name: str, original: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        trainer = args[0] if isinstance(self, L.Callback) and args else getattr(self, "_trainer", None)
        if isinstance(self, L.LightningDataModule):
            trainer = self.trainer
        values = [*args, *(kwargs[key] for key in sorted(kwargs))]
        shown = [value for value in values if type(value) is int]
        if name in ("setup", "teardown"):
            shown = [str(getattr(value, "value", value)) for value in values if isinstance(value, str)]
        where = [trainer.current_epoch, trainer.global_step] if isinstance(trainer, L.Trainer) else None
        _SEEN["events"].append([f"{owner}.{name}", shown, where])
        return original(self, *args, **kwargs)

    # Not functools.wraps: what a trainer takes the function for must be this one, not the one inside.
    method.__name__, method.__doc__ = name, original.__doc__
    method.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return method


class RecordLogger(Logger):
    """Keeps everything it is handed, in order."""

    @property
    def name(self) -> str:
        """One name for all runs."""
        return "record"

    @property
    def version(self) -> int:
        """One version for all runs."""
        return 0

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Keep the step and the values."""
        _SEEN["logged"].append([step, {key: float(value) for key, value in sorted(metrics.items())}])

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Keep the names and the values, as text."""
        items = vars(params) if hasattr(params, "__dict__") else params
        _SEEN["hparams"].append({key: str(value) for key, value in sorted(items.items()) if key[0] != "_"})

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Keep how the run ended."""
        _SEEN["finalized"].append(status)


def note(name: str, value: Any) -> None:
    """Keep a value under a name."""
    _SEEN["notes"][name] = value


def trainer(name: str, trainer: Any, model: Any) -> None:
    """Keep what a user reads from a trainer and its module after a run, and how much was logged by then."""
    _SEEN["parts"].append(len(_SEEN["logged"]))
    note(
        name,
        {
            "callback_metrics": _numbers(trainer.callback_metrics),
            "logged_metrics": _numbers(trainer.logged_metrics),
            "progress_bar_metrics": sorted(trainer.progress_bar_metrics),
            "global_step": trainer.global_step,
            "current_epoch": trainer.current_epoch,
            "should_stop": trainer.should_stop,
            "state": str(getattr(trainer.state.status, "value", trainer.state.status)),
            "weights": {key: _digest(value) for key, value in model.state_dict().items()},
        },
    )


def checkpoints(name: str, folder: str | Path) -> None:
    """Keep the names of all checkpoints below a folder, and what they say of themselves."""
    found = {}
    for path in sorted(Path(folder).rglob("*.ckpt")):
        contents = torch.load(path, map_location="cpu", weights_only=False)
        found[str(path.relative_to(folder))] = {
            "epoch": contents["epoch"],
            "global_step": contents["global_step"],
            "has": sorted(key for key in contents if key in _CHECKPOINT_KEYS),
            "weights": {key: _digest(value) for key, value in contents["state_dict"].items()},
        }
    note(name, found)


_CHECKPOINT_KEYS = {
    "state_dict", "optimizer_states", "lr_schedulers", "hyper_parameters", "datamodule_hyper_parameters",
    "callbacks", "loops",
}  # fmt: skip


def _numbers(metrics: Any) -> dict[str, float]:
    return {key: float(value) for key, value in sorted(metrics.items())}


def _digest(tensor: torch.Tensor) -> list[Any]:
    """A tensor as (hash of its bytes, sum, norm): equal bit for bit, or how far apart."""
    tensor = tensor.detach().cpu().contiguous()
    wide = tensor.double()
    return [hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:12], float(wide.sum()), float(wide.norm())]


def _write() -> None:
    assert _OUTPUT is not None
    Path(_OUTPUT).write_text(json.dumps(_SEEN, indent=1))


if _OUTPUT:
    atexit.register(_write)
