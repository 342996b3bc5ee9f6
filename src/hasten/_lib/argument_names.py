"""Names of arguments that do not exist, and what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from hasten._lib.names import did_you_mean

# Arguments of older versions of the field, and what took their place.
_REMOVED = {
    "gpus": "accelerator='gpu', devices=...",
    "num_processes": "accelerator='cpu', devices=...",
    "tpu_cores": "accelerator='tpu', devices=...",
    "checkpoint_callback": "enable_checkpointing=...",
    "progress_bar_refresh_rate": "callbacks=[TQDMProgressBar(refresh_rate=...)], or enable_progress_bar=False",
    "weights_summary": "enable_model_summary=..., or callbacks=[ModelSummary(max_depth=...)]",
    "resume_from_checkpoint": "Trainer.fit(ckpt_path=...)",
    "auto_lr_find": "hasten.tuner.Tuner(trainer).lr_find(model)",
    "auto_scale_batch_size": "hasten.tuner.Tuner(trainer).scale_batch_size(model)",
    "terminate_on_nan": "detect_anomaly=True",
    "track_grad_norm": "self.log in on_before_optimizer_step",
}

# What other libraries call an argument, or what only one of Trainer and Fabric has, and what to write there.
_OTHERWISE = {
    ("Trainer", "fused"): "fused_optimizer=True",
    ("Trainer", "amp"): "precision='bf16-mixed'",
    ("Trainer", "bf16"): "precision='bf16-mixed'",
    ("Trainer", "fp16"): "precision='16-mixed'",
    ("Trainer", "tf32"): "matmul_precision='high'",
    ("Trainer", "gradient_checkpointing"): "memory='full'",
    ("Trainer", "packing"): "packed=True",
    ("Trainer", "group_by_length"): "batching='length'",
    ("Trainer", "torch_compile"): "compile=True",
    ("Fabric", "packed"): "`with hasten.packed_blocks(model):` around the loop",
    ("Fabric", "dropout"): "`with hasten.dropout.fast_dropout(model):` around the loop",
    ("Fabric", "memory"): "`with hasten.memory.recomputed(model):` around the loop",
    ("Fabric", "batching"): "hasten.data.rebatch(loader, LengthBatching()) before setup_dataloaders",
    ("Fabric", "resident"): "hasten.data.resident(loader) before setup_dataloaders",
    ("Fabric", "num_workers"): "hasten.data.auto_workers(loader) before setup_dataloaders",
    ("Fabric", "fused"): "fused_optimizer=True",
    ("Fabric", "micro_batch"): "a loop over parts of the batch, with fabric.no_backward_sync",
    ("Fabric", "max_epochs"): "a loop of your own over the epochs: Fabric leaves the loop to you",
    ("Fabric", "gradient_clip_val"): "fabric.clip_gradients(model, optimizer, max_norm=...)",
    ("Fabric", "accumulate_grad_batches"): "fabric.no_backward_sync(model, enabled=...) in the loop",
    ("Fabric", "logger"): "loggers=...",
}


def refuse_unknown(unknown: Iterable[str], function: Callable[..., Any], owner: str) -> None:
    """Raise for arguments that do not exist, with the nearest that does.

    Raises:
        TypeError: there is at least one.

    """
    known = [name for name in inspect.signature(function).parameters if name not in ("self", "unknown")]
    for name in unknown:
        if name in _REMOVED:
            raise TypeError(
                f"{owner}.__init__() got an unexpected keyword argument {name!r}: there is no such argument any "
                f"more. Use {_REMOVED[name]}."
            )
        if (owner, name) in _OTHERWISE:
            raise TypeError(
                f"{owner}.__init__() got an unexpected keyword argument {name!r}. Use {_OTHERWISE[owner, name]}."
            )
        raise TypeError(
            f"{owner}.__init__() got an unexpected keyword argument {name!r}.{did_you_mean(name, known)} "
            f"The arguments are: {', '.join(known)}."
        )
