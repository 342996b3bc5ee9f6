"""Arguments that do not exist, and the line to write instead, with the value that was given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hasten._lib.names import did_you_mean


@dataclass(frozen=True)
class _Asked:
    """An argument that does not exist: what was given, and what can be given here instead."""

    owner: str
    value: Any
    known: tuple[str, ...]
    make: Callable[..., Any]

    def line(self, **arguments: Any) -> str:
        """Return the call with these arguments."""
        return f"{self.owner}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"

    def refused(self, **arguments: Any) -> str | None:
        """Return why such a call would be refused on this machine; None where it is not."""
        try:
            self.make(**arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            return str(error).partition("): ")[2].partition(". ")[0].rstrip(".") or str(error)
        return None

    def write(self, **arguments: Any) -> str:
        """Return the sentence that says what to write."""
        return f"Write {self.line(**arguments)}."

    def write_or(self, wanted: dict[str, Any], otherwise: dict[str, Any]) -> str:
        """Return the sentence for ``wanted``, and for ``otherwise`` where this machine refuses that."""
        why = self.refused(**wanted)
        if why is None:
            return self.write(**wanted)
        return f"It is now {self.line(**wanted)}, but {why}. Write {self.line(**otherwise)} here."


_Instead = Callable[[_Asked], str]

_LEAVE = "Leave it out."


def _renamed(name: str) -> _Instead:
    return lambda asked: asked.write(**{name: asked.value})


def _gpus(asked: _Asked) -> str:
    if asked.value in (None, 0, "0", "", [], ()):
        return asked.write(accelerator="cpu")
    return asked.write_or({"accelerator": "gpu", "devices": asked.value}, {"accelerator": "auto"})


def _num_processes(asked: _Asked) -> str:
    return asked.write(accelerator="cpu", devices=asked.value or 1)


def _absent_device(what: str) -> _Instead:
    return lambda asked: f"hasten does not train on {what}. {asked.write(accelerator='auto')}"


def _auto_select_gpus(asked: _Asked) -> str:
    if not asked.value or asked.refused(accelerator="cuda", devices=1) is not None:
        return _LEAVE
    return (
        f"Write {asked.owner}(accelerator='cuda', devices=find_usable_cuda_devices(1)), with "
        "`from hasten.accelerators import find_usable_cuda_devices`."
    )


def _sixteen_bits(asked: _Asked) -> str:
    if asked.value in (False, "O0", "o0"):
        return _LEAVE
    if asked.refused(precision="16-mixed") is None:
        return asked.write(precision="16-mixed")
    return asked.write(precision="bf16-mixed")


def _distributed_backend(asked: _Asked) -> str:
    if asked.refused(strategy=asked.value) is not None:
        return asked.write(strategy="auto")
    return asked.write(strategy=asked.value)


def _checkpoint_callback(asked: _Asked) -> str:
    if isinstance(asked.value, bool):
        return asked.write(enable_checkpointing=asked.value)
    return f"Give the {type(asked.value).__name__} in the list: Trainer(callbacks=[...])."


def _early_stop_callback(asked: _Asked) -> str:
    if not asked.value:
        return _LEAVE
    if asked.value is True:
        return _callback("EarlyStopping(monitor='val_loss')")
    return f"Give the {type(asked.value).__name__} in the list: Trainer(callbacks=[...])."


def _callback(made: str) -> str:
    return f"Write Trainer(callbacks=[{made}]), with `from hasten.callbacks import {made.partition('(')[0]}`."


def _progress_bar_refresh_rate(asked: _Asked) -> str:
    if asked.value == 0:
        return asked.write(enable_progress_bar=False)
    return _callback(f"TQDMProgressBar(refresh_rate={asked.value!r})")


def _weights_summary(asked: _Asked) -> str:
    if asked.value is None:
        return asked.write(enable_model_summary=False)
    return _callback(f"ModelSummary(max_depth={-1 if asked.value == 'full' else 1})")


def _terminate_on_nan(asked: _Asked) -> str:
    if not asked.value:
        return _LEAVE
    if "on_bad_loss" in asked.known:
        return asked.write(on_bad_loss="stop")
    return asked.write(detect_anomaly=True)


def _log_gpu_memory(asked: _Asked) -> str:
    return _callback("DeviceStatsMonitor()") if asked.value else _LEAVE


def _track_grad_norm(asked: _Asked) -> str:
    if asked.value in (False, -1, "-1"):
        return _LEAVE
    return (
        f"Write self.log_dict(grad_norm(self, norm_type={asked.value!r})) in on_before_optimizer_step of the module, "
        "with `from hasten.utilities import grad_norm`."
    )


def _resume_from_checkpoint(asked: _Asked) -> str:
    return f"Write trainer.fit(model, ckpt_path={asked.value!r})."


def _weights_save_path(asked: _Asked) -> str:
    return _callback(f"ModelCheckpoint(dirpath={asked.value!r})")


def _flush_logs(asked: _Asked) -> str:
    return (
        f"Write Trainer(logger=CSVLogger('.', flush_logs_every_n_steps={asked.value!r})), with "
        "`from hasten.loggers import CSVLogger`."
    )


def _multiple_trainloader_mode(asked: _Asked) -> str:
    return (
        f"Write trainer.fit(model, CombinedLoader(loaders, mode={asked.value!r})), with "
        "`from hasten.utilities import CombinedLoader`."
    )


def _auto_lr_find(asked: _Asked) -> str:
    if not asked.value:
        return _LEAVE
    attribute = f", attr_name={asked.value!r}" if isinstance(asked.value, str) else ""
    return (
        f"Write Tuner(trainer).lr_find(model{attribute}) before fit, with `from hasten.tuner import Tuner`."
    )


def _auto_scale_batch_size(asked: _Asked) -> str:
    if not asked.value:
        return _LEAVE
    mode = asked.value if isinstance(asked.value, str) else "power"
    return (
        f"Write Tuner(trainer).scale_batch_size(model, mode={mode!r}) before fit, with "
        "`from hasten.tuner import Tuner`."
    )


def _in_module(attribute: str, where: str = "the module") -> _Instead:
    return lambda asked: f"Write self.{attribute} = {asked.value!r} in __init__ of {where}."


def _reload_every_epoch(asked: _Asked) -> str:
    return asked.write(reload_dataloaders_every_n_epochs=int(bool(asked.value)))


# Arguments of older versions of the field, of Trainer and Fabric ...
_REMOVED: dict[str, _Instead] = {
    "gpus": _gpus,
    "num_gpus": _gpus,
    "num_processes": _num_processes,
    "tpu_cores": _absent_device("TPUs"),
    "num_tpu_cores": _absent_device("TPUs"),
    "ipus": _absent_device("IPUs"),
    "hpus": _absent_device("HPUs"),
    "amp_backend": _sixteen_bits,
    "amp_level": _sixteen_bits,
    "use_amp": _sixteen_bits,
    "auto_select_gpus": _auto_select_gpus,
    "distributed_backend": _distributed_backend,
    "nb_gpu_nodes": _renamed("num_nodes"),
}
# ... and of the Trainer alone.
_REMOVED_OF_TRAINER: dict[str, _Instead] = {
    "auto_lr_find": _auto_lr_find,
    "auto_scale_batch_size": _auto_scale_batch_size,
    "automatic_optimization": _in_module("automatic_optimization"),
    "checkpoint_callback": _checkpoint_callback,
    "default_save_path": _renamed("default_root_dir"),
    "early_stop_callback": _early_stop_callback,
    "enable_pl_optimizer": lambda asked: _LEAVE,
    "flush_logs_every_n_steps": _flush_logs,
    "gradient_clip": _renamed("gradient_clip_val"),
    "log_gpu_memory": _log_gpu_memory,
    "log_save_interval": _flush_logs,
    "max_nb_epochs": _renamed("max_epochs"),
    "min_nb_epochs": _renamed("min_epochs"),
    "move_metrics_to_cpu": lambda asked: f"{_LEAVE} self.log keeps one running value of an epoch.",
    "multiple_trainloader_mode": _multiple_trainloader_mode,
    "nb_sanity_val_steps": _renamed("num_sanity_val_steps"),
    "overfit_pct": _renamed("overfit_batches"),
    "prepare_data_per_node": _in_module("prepare_data_per_node", "the module or the datamodule"),
    "print_nan_grads": _renamed("detect_anomaly"),
    "process_position": lambda asked: _callback(f"TQDMProgressBar(process_position={asked.value!r})"),
    "progress_bar_refresh_rate": _progress_bar_refresh_rate,
    "reload_dataloaders_every_epoch": _reload_every_epoch,
    "replace_sampler_ddp": _renamed("use_distributed_sampler"),
    "resume_from_checkpoint": _resume_from_checkpoint,
    "row_log_interval": _renamed("log_every_n_steps"),
    "show_progress_bar": _renamed("enable_progress_bar"),
    "stochastic_weight_avg": lambda asked: (
        _callback("StochasticWeightAveraging(swa_lrs=0.01)") if asked.value else _LEAVE
    ),
    "terminate_on_nan": _terminate_on_nan,
    "test_percent_check": _renamed("limit_test_batches"),
    "track_grad_norm": _track_grad_norm,
    "train_percent_check": _renamed("limit_train_batches"),
    "truncated_bptt_steps": lambda asked: (
        "Split the sequence in training_step, with self.automatic_optimization = False in __init__ of the module."
    ),
    "val_percent_check": _renamed("limit_val_batches"),
    "weights_save_path": _weights_save_path,
    "weights_summary": _weights_summary,
}

_NONE_MEANS_SOMETHING = ("gpus", "num_gpus", "weights_summary")

# What other libraries call an argument, or what only one of Trainer and Fabric has.
_OTHERWISE: dict[tuple[str, str], _Instead] = {
    ("Trainer", "fused"): _renamed("fused_optimizer"),
    ("Trainer", "amp"): _sixteen_bits,
    ("Trainer", "bf16"): lambda asked: asked.write(precision="bf16-mixed") if asked.value else _LEAVE,
    ("Trainer", "fp16"): _sixteen_bits,
    ("Trainer", "tf32"): lambda asked: asked.write(matmul_precision="high" if asked.value else "highest"),
    ("Trainer", "gradient_checkpointing"): lambda asked: (
        asked.write(memory="full") if asked.value else _LEAVE
    ),
    ("Trainer", "packing"): _renamed("packed"),
    ("Trainer", "group_by_length"): lambda asked: asked.write(batching="length") if asked.value else _LEAVE,
    ("Trainer", "torch_compile"): _renamed("compile"),
    ("Trainer", "loggers"): _renamed("logger"),
    ("Fabric", "packed"): lambda asked: "Write `with hasten.packed_blocks(model):` around the loop.",
    ("Fabric", "dropout"): lambda asked: "Write `with hasten.fast_dropout(model):` around the loop.",
    ("Fabric", "memory"): lambda asked: (
        "Write `with recomputed(model):` around the loop, with `from hasten.memory import recomputed`."
    ),
    ("Fabric", "batching"): lambda asked: (
        "Write hasten.data.rebatch(loader, hasten.data.LengthBatching()) before setup_dataloaders."
    ),
    ("Fabric", "resident"): lambda asked: "Write hasten.data.resident(loader) before setup_dataloaders.",
    ("Fabric", "num_workers"): lambda asked: (
        "Write hasten.data.auto_workers(loader) before setup_dataloaders."
    ),
    ("Fabric", "fused"): _renamed("fused_optimizer"),
    ("Fabric", "on_bad_loss"): lambda asked: (
        "Write `if torch.isfinite(loss):` before fabric.backward(loss) and optimizer.step() in the loop."
    ),
    ("Fabric", "micro_batch"): lambda asked: (
        "Compute parts of the batch in the loop, with fabric.no_backward_sync(model) for all but the last."
    ),
    ("Fabric", "max_epochs"): lambda asked: "The loop over the epochs is yours: Fabric leaves it to you.",
    ("Fabric", "gradient_clip_val"): lambda asked: (
        f"Write fabric.clip_gradients(model, optimizer, max_norm={asked.value!r}) before optimizer.step()."
    ),
    ("Fabric", "accumulate_grad_batches"): lambda asked: (
        "Write `with fabric.no_backward_sync(model, enabled=accumulating):` in the loop."
    ),
    ("Fabric", "logger"): _renamed("loggers"),
    ("Fabric", "replace_sampler_ddp"): lambda asked: (
        f"Write fabric.setup_dataloaders(loader, use_distributed_sampler={asked.value!r})."
    ),
}


def refuse_unknown(
    unknown: Mapping[str, Any], function: Callable[..., Any], owner: str, make: Callable[..., Any]
) -> None:
    """Raise for arguments that do not exist, with what to write instead.

    Args:
        unknown: the arguments, with their values.
        function: the one that was called with them.
        owner: "Trainer" or "Fabric".
        make: raises where this machine refuses an accelerator, devices, strategy or precision.

    Raises:
        TypeError: there is at least one.

    """
    known = tuple(name for name in inspect.signature(function).parameters if name not in ("self", "unknown"))
    removed = {**_REMOVED, **_REMOVED_OF_TRAINER} if owner == "Trainer" else _REMOVED
    for name, value in unknown.items():
        asked = _Asked(owner, value, known, make)
        wrong = f"{owner}.__init__() got an unexpected keyword argument {name!r}"
        if name in removed:
            # What None meant is what an argument that is not given means now.
            nothing = value is None and name not in _NONE_MEANS_SOMETHING
            instead = _LEAVE if nothing else removed[name](asked)
            raise TypeError(f"{wrong}, which older versions of Lightning had. {instead}")
        if (owner, name) in _OTHERWISE:
            raise TypeError(f"{wrong}. {_OTHERWISE[owner, name](asked)}")
        raise TypeError(f"{wrong}.{did_you_mean(name, known)} The arguments are: {', '.join(known)}.")
