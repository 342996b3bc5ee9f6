"""Messages for unknown arguments of Trainer and Fabric: what to write instead, with the value of the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hasten._lib.names import did_you_mean


@dataclass(frozen=True)
class _UnknownArgument:
    """An unknown argument, its value, and the arguments that exist."""

    owner: str
    value: Any
    known: tuple[str, ...]
    make: Callable[..., Any]

    def line(self, **arguments: Any) -> str:
        """Return the call with these arguments."""
        return f"{self.owner}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"

    def refused(self, **arguments: Any) -> str | None:
        """Return why this machine refuses such a call; None if it does not."""
        try:
            self.make(**arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            return str(error).partition("): ")[2].partition(". ")[0].rstrip(".") or str(error)
        return None

    def write(self, **arguments: Any) -> str:
        """Return a sentence with the call to write."""
        return f"Write {self.line(**arguments)}."

    def write_or(self, wanted: dict[str, Any], otherwise: dict[str, Any]) -> str:
        """Return a sentence with the call ``wanted``, or with ``otherwise`` if this machine refuses it."""
        why = self.refused(**wanted)
        if why is None:
            return self.write(**wanted)
        return f"It is now {self.line(**wanted)}, but {why}. Write {self.line(**otherwise)} here."


_Instead = Callable[[_UnknownArgument], str]

_LEAVE = "Leave it out."


def _renamed(name: str) -> _Instead:
    return lambda argument: argument.write(**{name: argument.value})


def _gpus(argument: _UnknownArgument) -> str:
    if argument.value in (None, 0, "0", "", [], ()):
        return argument.write(accelerator="cpu")
    return argument.write_or({"accelerator": "gpu", "devices": argument.value}, {"accelerator": "auto"})


def _num_processes(argument: _UnknownArgument) -> str:
    return argument.write(accelerator="cpu", devices=argument.value or 1)


def _absent_device(what: str) -> _Instead:
    return lambda argument: f"hasten does not train on {what}. {argument.write(accelerator='auto')}"


def _auto_select_gpus(argument: _UnknownArgument) -> str:
    if not argument.value or argument.refused(accelerator="cuda", devices=1) is not None:
        return _LEAVE
    return (
        f"Write {argument.owner}(accelerator='cuda', devices=find_usable_cuda_devices(1)), with "
        "`from hasten.accelerators import find_usable_cuda_devices`."
    )


def _sixteen_bits(argument: _UnknownArgument) -> str:
    if argument.value in (False, "O0", "o0"):
        return _LEAVE
    if argument.refused(precision="16-mixed") is None:
        return argument.write(precision="16-mixed")
    return argument.write(precision="bf16-mixed")


def _distributed_backend(argument: _UnknownArgument) -> str:
    if argument.refused(strategy=argument.value) is not None:
        return argument.write(strategy="auto")
    return argument.write(strategy=argument.value)


def _checkpoint_callback(argument: _UnknownArgument) -> str:
    if isinstance(argument.value, bool):
        return argument.write(enable_checkpointing=argument.value)
    return f"Give the {type(argument.value).__name__} in the list: Trainer(callbacks=[...])."


def _early_stop_callback(argument: _UnknownArgument) -> str:
    if not argument.value:
        return _LEAVE
    if argument.value is True:
        return _callback("EarlyStopping(monitor='val_loss')")
    return f"Give the {type(argument.value).__name__} in the list: Trainer(callbacks=[...])."


def _callback(made: str) -> str:
    return f"Write Trainer(callbacks=[{made}]), with `from hasten.callbacks import {made.partition('(')[0]}`."


def _progress_bar_refresh_rate(argument: _UnknownArgument) -> str:
    if argument.value == 0:
        return argument.write(enable_progress_bar=False)
    return _callback(f"TQDMProgressBar(refresh_rate={argument.value!r})")


def _weights_summary(argument: _UnknownArgument) -> str:
    if argument.value is None:
        return argument.write(enable_model_summary=False)
    return _callback(f"ModelSummary(max_depth={-1 if argument.value == 'full' else 1})")


def _terminate_on_nan(argument: _UnknownArgument) -> str:
    if not argument.value:
        return _LEAVE
    if "on_bad_loss" in argument.known:
        return argument.write(on_bad_loss="stop")
    return argument.write(detect_anomaly=True)


def _log_gpu_memory(argument: _UnknownArgument) -> str:
    return _callback("DeviceStatsMonitor()") if argument.value else _LEAVE


def _track_grad_norm(argument: _UnknownArgument) -> str:
    if argument.value in (False, -1, "-1"):
        return _LEAVE
    return (
        f"Write self.log_dict(grad_norm(self, norm_type={argument.value!r})) in on_before_optimizer_step of the "
        "module, with `from hasten.utilities import grad_norm`."
    )


def _resume_from_checkpoint(argument: _UnknownArgument) -> str:
    return f"Write trainer.fit(model, ckpt_path={argument.value!r})."


def _weights_save_path(argument: _UnknownArgument) -> str:
    return _callback(f"ModelCheckpoint(dirpath={argument.value!r})")


def _flush_logs(argument: _UnknownArgument) -> str:
    return (
        f"Write Trainer(logger=CSVLogger('.', flush_logs_every_n_steps={argument.value!r})), with "
        "`from hasten.loggers import CSVLogger`."
    )


def _multiple_trainloader_mode(argument: _UnknownArgument) -> str:
    return (
        f"Write trainer.fit(model, CombinedLoader(loaders, mode={argument.value!r})), with "
        "`from hasten.utilities import CombinedLoader`."
    )


def _auto_lr_find(argument: _UnknownArgument) -> str:
    if not argument.value:
        return _LEAVE
    attribute = f", attr_name={argument.value!r}" if isinstance(argument.value, str) else ""
    return (
        f"Write Tuner(trainer).lr_find(model{attribute}) before fit, with `from hasten.tuner import Tuner`."
    )


def _auto_scale_batch_size(argument: _UnknownArgument) -> str:
    if not argument.value:
        return _LEAVE
    mode = argument.value if isinstance(argument.value, str) else "power"
    return (
        f"Write Tuner(trainer).scale_batch_size(model, mode={mode!r}) before fit, with "
        "`from hasten.tuner import Tuner`."
    )


def _in_module(attribute: str, where: str = "the module") -> _Instead:
    return lambda argument: f"Write self.{attribute} = {argument.value!r} in __init__ of {where}."


def _reload_every_epoch(argument: _UnknownArgument) -> str:
    return argument.write(reload_dataloaders_every_n_epochs=int(bool(argument.value)))


# Arguments that Lightning has removed, of Trainer and Fabric ...
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
    "enable_pl_optimizer": lambda argument: _LEAVE,
    "flush_logs_every_n_steps": _flush_logs,
    "gradient_clip": _renamed("gradient_clip_val"),
    "log_gpu_memory": _log_gpu_memory,
    "log_save_interval": _flush_logs,
    "max_nb_epochs": _renamed("max_epochs"),
    "min_nb_epochs": _renamed("min_epochs"),
    "move_metrics_to_cpu": lambda argument: f"{_LEAVE} self.log keeps one running value of an epoch.",
    "multiple_trainloader_mode": _multiple_trainloader_mode,
    "nb_sanity_val_steps": _renamed("num_sanity_val_steps"),
    "overfit_pct": _renamed("overfit_batches"),
    "prepare_data_per_node": _in_module("prepare_data_per_node", "the module or the datamodule"),
    "print_nan_grads": _renamed("detect_anomaly"),
    "process_position": lambda argument: _callback(f"TQDMProgressBar(process_position={argument.value!r})"),
    "progress_bar_refresh_rate": _progress_bar_refresh_rate,
    "reload_dataloaders_every_epoch": _reload_every_epoch,
    "replace_sampler_ddp": _renamed("use_distributed_sampler"),
    "resume_from_checkpoint": _resume_from_checkpoint,
    "row_log_interval": _renamed("log_every_n_steps"),
    "show_progress_bar": _renamed("enable_progress_bar"),
    "stochastic_weight_avg": lambda argument: (
        _callback("StochasticWeightAveraging(swa_lrs=0.01)") if argument.value else _LEAVE
    ),
    "terminate_on_nan": _terminate_on_nan,
    "test_percent_check": _renamed("limit_test_batches"),
    "track_grad_norm": _track_grad_norm,
    "train_percent_check": _renamed("limit_train_batches"),
    "truncated_bptt_steps": lambda argument: (
        "Split the sequence in training_step, with self.automatic_optimization = False in __init__ of the module."
    ),
    "val_percent_check": _renamed("limit_val_batches"),
    "weights_save_path": _weights_save_path,
    "weights_summary": _weights_summary,
}

_NONE_MEANS_SOMETHING = ("gpus", "num_gpus", "weights_summary")

# Names in other libraries, and arguments that only Trainer or only Fabric has.
_OTHERWISE: dict[tuple[str, str], _Instead] = {
    ("Trainer", "fused"): _renamed("fused_optimizer"),
    ("Trainer", "amp"): _sixteen_bits,
    ("Trainer", "bf16"): lambda argument: (
        argument.write(precision="bf16-mixed") if argument.value else _LEAVE
    ),
    ("Trainer", "fp16"): _sixteen_bits,
    ("Trainer", "tf32"): lambda argument: argument.write(
        matmul_precision="high" if argument.value else "highest"
    ),
    ("Trainer", "gradient_checkpointing"): lambda argument: (
        argument.write(memory="full") if argument.value else _LEAVE
    ),
    ("Trainer", "packing"): _renamed("packed"),
    ("Trainer", "group_by_length"): lambda argument: (
        argument.write(batching="length") if argument.value else _LEAVE
    ),
    ("Trainer", "torch_compile"): _renamed("compile"),
    ("Trainer", "loggers"): _renamed("logger"),
    ("Fabric", "packed"): lambda argument: "Write `with hasten.packed_blocks(model):` around the loop.",
    ("Fabric", "dropout"): lambda argument: "Write `with hasten.fast_dropout(model):` around the loop.",
    ("Fabric", "memory"): lambda argument: (
        "Write `with recomputed(model):` around the loop, with `from hasten.memory import recomputed`."
    ),
    ("Fabric", "batching"): lambda argument: (
        "Write hasten.data.rebatch(loader, hasten.data.LengthBatching()) before setup_dataloaders."
    ),
    ("Fabric", "resident"): lambda argument: "Write hasten.data.resident(loader) before setup_dataloaders.",
    ("Fabric", "num_workers"): lambda argument: (
        "Write hasten.data.auto_workers(loader) before setup_dataloaders."
    ),
    ("Fabric", "fused"): _renamed("fused_optimizer"),
    ("Fabric", "on_bad_loss"): lambda argument: (
        "Write `if torch.isfinite(loss):` before fabric.backward(loss) and optimizer.step() in the loop."
    ),
    ("Fabric", "micro_batch"): lambda argument: (
        "Compute parts of the batch in the loop, with fabric.no_backward_sync(model) for all but the last."
    ),
    ("Fabric", "max_epochs"): lambda argument: "The loop over the epochs is yours: Fabric leaves it to you.",
    ("Fabric", "gradient_clip_val"): lambda argument: (
        f"Write fabric.clip_gradients(model, optimizer, max_norm={argument.value!r}) before optimizer.step()."
    ),
    ("Fabric", "accumulate_grad_batches"): lambda argument: (
        "Write `with fabric.no_backward_sync(model, enabled=accumulating):` in the loop."
    ),
    ("Fabric", "logger"): _renamed("loggers"),
    ("Fabric", "replace_sampler_ddp"): lambda argument: (
        f"Write fabric.setup_dataloaders(loader, use_distributed_sampler={argument.value!r})."
    ),
}


def refuse_unknown(
    unknown: Mapping[str, Any], function: Callable[..., Any], owner: str, make: Callable[..., Any]
) -> None:
    """Raise for unknown arguments; the message says what to write instead.

    Args:
        unknown: the arguments, with their values.
        function: the function that was called.
        owner: "Trainer" or "Fabric".
        make: raises if this machine refuses an accelerator, devices, strategy or precision.

    Raises:
        TypeError: ``unknown`` is not empty.

    """
    known = tuple(name for name in inspect.signature(function).parameters if name not in ("self", "unknown"))
    removed = {**_REMOVED, **_REMOVED_OF_TRAINER} if owner == "Trainer" else _REMOVED
    for name, value in unknown.items():
        argument = _UnknownArgument(owner, value, known, make)
        wrong = f"{owner}.__init__() got an unexpected keyword argument {name!r}"
        if name in removed:
            # None meant what leaving the argument out means now.
            nothing = value is None and name not in _NONE_MEANS_SOMETHING
            instead = _LEAVE if nothing else removed[name](argument)
            raise TypeError(f"{wrong}, which older versions of Lightning had. {instead}")
        if (owner, name) in _OTHERWISE:
            raise TypeError(f"{wrong}. {_OTHERWISE[owner, name](argument)}")
        raise TypeError(f"{wrong}.{did_you_mean(name, known)} The arguments are: {', '.join(known)}.")
