"""Messages for unknown arguments of Trainer and Fabric: what to write instead, with the value of the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hasten._lib.names import did_you_mean


@dataclass(frozen=True)
class _Unknown:
    """An unknown argument of ``owner``, its value, and a function that raises if this machine refuses a call."""

    owner: str
    value: Any
    make: Callable[..., Any]

    def write(self, **arguments: Any) -> str:
        """Return a sentence with the call to write."""
        return f"Write {self.owner}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})."

    def refused(self, **arguments: Any) -> str:
        """Return why this machine refuses such a call; "" if it does not."""
        try:
            self.make(**arguments)
        except (TypeError, ValueError, RuntimeError) as error:
            return str(error).partition("): ")[2].partition(". ")[0].rstrip(".") or str(error)
        return ""


# "=name" if the argument has that name now; or the text of the message, with {value!r}, {owner} and {kind} (the class
# of the value); or a function that returns one of them.
_Instead = str | Callable[[_Unknown], str]

_LEAVE = "Leave it out."
_IN_LIST = "Give the {kind} in the list: Trainer(callbacks=[...])."
_FLUSH_LOGS = "Write Trainer(logger=CSVLogger('.', flush_logs_every_n_steps={value!r}))."
_ABSENT_DEVICE = "hasten does not train on {}s. Write {{owner}}(accelerator='auto')."

# Added to a message that has a call of one of these.
_IMPORTS = {
    "hasten.accelerators": "find_usable_cuda_devices",
    "hasten.callbacks": (
        "DeviceStatsMonitor EarlyStopping ModelCheckpoint ModelSummary StochasticWeightAveraging TQDMProgressBar"
    ),
    "hasten.loggers": "CSVLogger",
    "hasten.memory": "recomputed",
    "hasten.tuner": "Tuner",
    "hasten.utilities": "CombinedLoader grad_norm",
}


def _gpus(it: _Unknown) -> str:
    if it.value in (None, 0, "0", "", [], ()):
        return it.write(accelerator="cpu")
    text = it.write(accelerator="gpu", devices=it.value)
    why = it.refused(accelerator="gpu", devices=it.value)
    if not why:
        return text
    return f"It is now {text[6:-1]}, but {why}. {it.write(accelerator='auto')[:-1]} here."


def _auto_select_gpus(it: _Unknown) -> str:
    if it.refused(accelerator="cuda", devices=1):
        return _LEAVE
    return "Write {owner}(accelerator='cuda', devices=find_usable_cuda_devices(1))."


def _sixteen_bits(it: _Unknown) -> str:
    if it.value in (False, "O0", "o0"):
        return _LEAVE
    return it.write(precision="bf16-mixed" if it.refused(precision="16-mixed") else "16-mixed")


def _weights_summary(it: _Unknown) -> str:
    if it.value is None:
        return "Write Trainer(enable_model_summary=False)."
    return f"Write Trainer(callbacks=[ModelSummary(max_depth={-1 if it.value == 'full' else 1})])."


def _auto_lr_find(it: _Unknown) -> str:
    attribute = ", attr_name={value!r}" if isinstance(it.value, str) else ""
    return f"Write Tuner(trainer).lr_find(model{attribute}) before fit."


def _auto_scale_batch_size(it: _Unknown) -> str:
    mode = it.value if isinstance(it.value, str) else "power"
    return f"Write Tuner(trainer).scale_batch_size(model, mode={mode!r}) before fit."


def _track_grad_norm(it: _Unknown) -> str:
    if it.value in (-1, "-1"):
        return _LEAVE
    return "Write self.log_dict(grad_norm(self, norm_type={value!r})) in on_before_optimizer_step of the module."


# Arguments that Lightning has removed, of Trainer and Fabric ...
_REMOVED: dict[str, _Instead] = {
    "gpus": _gpus,
    "num_gpus": _gpus,
    "num_processes": lambda it: it.write(accelerator="cpu", devices=it.value or 1),
    "tpu_cores": _ABSENT_DEVICE.format("TPU"),
    "num_tpu_cores": _ABSENT_DEVICE.format("TPU"),
    "ipus": _ABSENT_DEVICE.format("IPU"),
    "hpus": _ABSENT_DEVICE.format("HPU"),
    "amp_backend": _sixteen_bits,
    "amp_level": _sixteen_bits,
    "use_amp": _sixteen_bits,
    "auto_select_gpus": _auto_select_gpus,
    "distributed_backend": lambda it: it.write(strategy="auto" if it.refused(strategy=it.value) else it.value),
    "nb_gpu_nodes": "=num_nodes",
}
# ... and of the Trainer alone.
_REMOVED_OF_TRAINER: dict[str, _Instead] = {
    "auto_lr_find": _auto_lr_find,
    "auto_scale_batch_size": _auto_scale_batch_size,
    "automatic_optimization": "Write self.automatic_optimization = {value!r} in __init__ of the module.",
    "checkpoint_callback": lambda it: "=enable_checkpointing" if isinstance(it.value, bool) else _IN_LIST,
    "default_save_path": "=default_root_dir",
    "early_stop_callback": lambda it: (
        "Write Trainer(callbacks=[EarlyStopping(monitor='val_loss')])." if it.value is True else _IN_LIST
    ),
    "enable_pl_optimizer": _LEAVE,
    "flush_logs_every_n_steps": _FLUSH_LOGS,
    "gradient_clip": "=gradient_clip_val",
    "log_gpu_memory": "Write Trainer(callbacks=[DeviceStatsMonitor()]).",
    "log_save_interval": _FLUSH_LOGS,
    "max_nb_epochs": "=max_epochs",
    "min_nb_epochs": "=min_epochs",
    "move_metrics_to_cpu": f"{_LEAVE} self.log keeps one running value of an epoch.",
    "multiple_trainloader_mode": "Write trainer.fit(model, CombinedLoader(loaders, mode={value!r})).",
    "nb_sanity_val_steps": "=num_sanity_val_steps",
    "overfit_pct": "=overfit_batches",
    "prepare_data_per_node": (
        "Write self.prepare_data_per_node = {value!r} in __init__ of the module or the datamodule."
    ),
    "print_nan_grads": "=detect_anomaly",
    "process_position": "Write Trainer(callbacks=[TQDMProgressBar(process_position={value!r})]).",
    "progress_bar_refresh_rate": lambda it: (
        "Write Trainer(enable_progress_bar=False)."
        if it.value == 0
        else "Write Trainer(callbacks=[TQDMProgressBar(refresh_rate={value!r})])."
    ),
    "reload_dataloaders_every_epoch": lambda it: it.write(reload_dataloaders_every_n_epochs=int(bool(it.value))),
    "replace_sampler_ddp": "=use_distributed_sampler",
    "resume_from_checkpoint": "Write trainer.fit(model, ckpt_path={value!r}).",
    "row_log_interval": "=log_every_n_steps",
    "show_progress_bar": "=enable_progress_bar",
    "stochastic_weight_avg": "Write Trainer(callbacks=[StochasticWeightAveraging(swa_lrs=0.01)]).",
    "terminate_on_nan": "Write Trainer(on_bad_loss='stop').",
    "test_percent_check": "=limit_test_batches",
    "track_grad_norm": _track_grad_norm,
    "train_percent_check": "=limit_train_batches",
    "truncated_bptt_steps": (
        "Split the sequence in training_step, with self.automatic_optimization = False in __init__ of the module."
    ),
    "val_percent_check": "=limit_val_batches",
    "weights_save_path": "Write Trainer(callbacks=[ModelCheckpoint(dirpath={value!r})]).",
    "weights_summary": _weights_summary,
}

# None meant what leaving the argument out means now, except for these.
_NONE_MEANS_SOMETHING = ("gpus", "num_gpus", "weights_summary")
# False (or 0) means that, too, for these.
_FALSE_MEANS_NOTHING = (
    "auto_lr_find", "auto_scale_batch_size", "auto_select_gpus", "bf16", "early_stop_callback",
    "gradient_checkpointing", "group_by_length", "log_gpu_memory", "stochastic_weight_avg", "terminate_on_nan",
)  # fmt: skip

# Names in other libraries, and arguments that only Trainer or only Fabric has.
_OTHERWISE: dict[str, dict[str, _Instead]] = {
    "Trainer": {
        "fused": "=fused_optimizer",
        "amp": _sixteen_bits,
        "bf16": "Write Trainer(precision='bf16-mixed').",
        "fp16": _sixteen_bits,
        "tf32": lambda it: it.write(matmul_precision="high" if it.value else "highest"),
        "gradient_checkpointing": "Write Trainer(memory='full').",
        "packing": "=packed",
        "group_by_length": "Write Trainer(batching='length').",
        "torch_compile": "=compile",
        "loggers": "=logger",
    },
    "Fabric": {
        "packed": "Write `with hasten.packed_blocks(model):` around the loop.",
        "dropout": "Write `with hasten.fast_dropout(model):` around the loop.",
        "memory": "Write `with recomputed(model):` around the loop.",
        "batching": "Write hasten.data.rebatch(loader, hasten.data.LengthBatching()) before setup_dataloaders.",
        "resident": "Write hasten.data.resident(loader) before setup_dataloaders.",
        "num_workers": "Write hasten.data.auto_workers(loader) before setup_dataloaders.",
        "fused": "=fused_optimizer",
        "on_bad_loss": (
            "Write `if torch.isfinite(loss):` before fabric.backward(loss) and optimizer.step() in the loop."
        ),
        "micro_batch": (
            "Compute parts of the batch in the loop, with fabric.no_backward_sync(model) for all but the last."
        ),
        "max_epochs": "The loop over the epochs is yours: Fabric leaves it to you.",
        "gradient_clip_val": (
            "Write fabric.clip_gradients(model, optimizer, max_norm={value!r}) before optimizer.step()."
        ),
        "accumulate_grad_batches": ("Write `with fabric.no_backward_sync(model, enabled=accumulating):` in the loop."),
        "logger": "=loggers",
        "replace_sampler_ddp": "Write fabric.setup_dataloaders(loader, use_distributed_sampler={value!r}).",
    },
}


def refuse_unknown(
    unknown: Mapping[str, object], function: Callable[..., object], owner: str, make: Callable[..., object]
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
    removed = _REMOVED | (_REMOVED_OF_TRAINER if owner == "Trainer" else {})
    for name, value in unknown.items():
        wrong = f"{owner}.__init__() got an unexpected keyword argument {name!r}"
        it = _Unknown(owner, value, make)
        if name in removed:
            unset = value is None and name not in _NONE_MEANS_SOMETHING
            instead = _LEAVE if unset else _advice(name, removed[name], it)
            raise TypeError(f"{wrong}, which older versions of Lightning had. {instead}")
        if name in _OTHERWISE[owner]:
            raise TypeError(f"{wrong}. {_advice(name, _OTHERWISE[owner][name], it)}")
        known = [each for each in inspect.signature(function).parameters if each not in ("self", "unknown")]
        raise TypeError(f"{wrong}.{did_you_mean(name, known)} The arguments are: {', '.join(known)}.")


def _advice(name: str, instead: _Instead, it: _Unknown) -> str:
    if name in _FALSE_MEANS_NOTHING and not it.value:
        return _LEAVE
    text = instead(it) if callable(instead) else instead
    if text.startswith("="):
        return it.write(**{text[1:]: it.value})
    for home, names in _IMPORTS.items():
        for called in names.split():
            if f"{called}(" in text:
                text = f"{text[:-1]}, with `from {home} import {called}`."
    for mark, own in (("{value!r}", repr(it.value)), ("{owner}", it.owner), ("{kind}", type(it.value).__name__)):
        text = text.replace(mark, own)
    return text
