"""The parts of hasten that a program uses, and the parts of a Trainer and callbacks that can be ejected."""

from __future__ import annotations

from dataclasses import dataclass, field

# Arguments of Trainer(...) that the program keeps: the values that the ejected loop reads.
VALUES = (
    "max_epochs", "max_steps", "min_epochs", "limit_train_batches", "limit_val_batches", "limit_test_batches",
    "limit_predict_batches", "val_check_interval", "check_val_every_n_epoch", "accumulate_grad_batches",
    "gradient_clip_val", "log_every_n_steps", "callbacks",
)  # fmt: skip
# What it has no place for, in words of its cost.
LEFT_OUT = {
    "matmul_precision": "matmul_precision left out: call torch.set_float32_matmul_precision instead",
    "speed": 'speed="auto" left out: nothing is measured, and this program may take several times as long',
    "compile": "compile left out: call model.compile() before fit, and pay for compiling in each process anew",
    "batching": "batching left out: batches come in another order, with more padding (`hasten advise` says how much)",
    "packed": "packed left out: this program computes padding, too; `hasten advise` measures what that costs",
    "num_workers": "num_workers left out: it is that of the DataLoader",
    "resident": "resident left out: samples are read and collated one by one in each epoch",
    "fused_optimizer": "fused_optimizer left out: pass fused=... to the optimizer",
    "batch_size": "batch_size left out: it is that of the DataLoader",
    "micro_batch": "micro_batch left out: batches have to fit into memory, and batch norm sees all of each",
    "memory": "memory left out: wrap blocks in torch.utils.checkpoint to recompute activations",
    "dropout": 'dropout="fast" left out: on a CPU dropout costs more, and draws other numbers',
    "allocator": "allocator left out: memory goes back to the system between steps, which costs page faults",
    "max_time": "max_time left out: stop the program yourself",
    "profiler": "profiler left out: wrap the loop in torch.profiler.profile",
    "uneven": "uneven left out: DistributedSampler repeats samples to make the processes even",
    "benchmark": "benchmark left out: set torch.backends.cudnn.benchmark yourself",
    "detect_anomaly": "detect_anomaly left out: call torch.autograd.set_detect_anomaly(True)",
}
# What changes nothing in the ejected program.
SILENT = frozenset(
    {
        "accelerator", "callbacks", "default_root_dir", "deterministic", "devices", "enable_autolog_hparams",
        "enable_checkpointing", "enable_model_summary", "enable_progress_bar", "gradient_clip_algorithm",
        "inference_mode", "logger", "num_nodes", "num_sanity_val_steps", "precision", "strategy",
        "use_distributed_sampler",
    }
)  # fmt: skip
# The hooks of each callback that the templates have.
CLASSES: dict[str, tuple[str, ...]] = {
    "EarlyStopping": ("check",),
    "ModelCheckpoint": ("check",),
    "LearningRateMonitor": ("on_train_epoch_start", "on_train_batch_start"),
    "GradientAccumulationScheduler": ("on_train_epoch_start",),
    "BackboneFinetuning": ("setup", "on_train_epoch_start"),
    "EMAWeightAveraging": (
        "on_fit_start", "on_train_batch_end", "on_validation_epoch_start", "on_validation_epoch_end", "on_train_end",
    ),
    "StochasticWeightAveraging": ("on_fit_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_end"),
}  # fmt: skip


@dataclass
class Use:
    """What the source of the program uses; see ``program.py``, which fills it."""

    members: set[str] = field(default_factory=set)  # Of the module, such as "log".
    of_trainer: set[str] = field(default_factory=set)  # Attributes of the Trainer.
    model_hooks: set[str] = field(default_factory=set)  # That its modules define.
    missing_hooks: set[str] = field(default_factory=set)  # Those of them that not all modules define.
    data_hooks: set[str] = field(default_factory=set)
    data_methods: set[str] = field(default_factory=set)
    user_hooks: set[str] = field(default_factory=set)  # That its own callbacks define.
    user_callbacks: bool = False
    user_callback_state: bool = False
    classes: set[str] = field(default_factory=set)  # Hasten's callbacks that it makes.
    # The calls of a Trainer, with the names of their arguments.
    verbs: dict[str, set[str]] = field(default_factory=dict)
    without_data: set[str] = field(default_factory=set)
    without_model: set[str] = field(default_factory=set)
    loud: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)  # Of ``Trainer(...)`` that it gives.
    log_options: set[str] = field(default_factory=set)
    unweighed_logs: bool = False
    step_logs: bool = False
    train_epoch_logs: bool = False
    evaluation_logs: bool = False
    logs_metrics: bool = False
    logged_in_training: set[str] = field(default_factory=set)
    may_skip: bool = False
    own_train: bool = False
    output: str = "tensor"
    step_takes: dict[str, int] = field(default_factory=dict)
    seeds: bool = False
    third_party: bool = False
    as_lightning: bool = False
    monitors: set[str] = field(default_factory=set)
    keeps_loggers: bool = False  # Whether it uses its loggers beyond passing them to the Trainer.
    loggers: set[str] = field(default_factory=set)  # The classes of those that are written.
    file_names: bool = False  # Whether a ModelCheckpoint has a ``filename``.
    adds_checkpoint: bool = False  # Whether the Trainer adds a ModelCheckpoint.
    saves_hparams: bool = False  # Whether a module calls ``save_hyperparameters``.
    hparams_are_dict: bool = False
    best_k_models: bool = False  # Whether it reads ``best_k_models`` of a ModelCheckpoint.
    peeks: bool = False  # Whether a hook at the end of an evaluation reads values that were logged in it.
    # Whether it names the folder of a run that hasten makes, such as lightning_logs/version_0.
    names_runs: bool = False
