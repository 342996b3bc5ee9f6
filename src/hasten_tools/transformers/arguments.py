"""``TrainingArguments`` and other arguments of a ``TransformersTrainer``: which are read, and what is refused."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from hasten._lib.errors import make_error
from hasten._lib.names import nearest
from hasten.extend.origin import comes_from
from hasten.loggers import CometLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

if TYPE_CHECKING:
    from transformers import TrainingArguments

Samples = Dataset[Any] | Sequence[Mapping[str, Any]]
# What a collator makes: a dict, or what a program takes apart itself.
Batch = dict[str, Any] | tuple[Any, ...] | list[Any]
DataSets = Samples | dict[str, Samples] | None

# The fields of TrainingArguments that are read, by what they are about, as on the page docs/start/transformers.md.
# Any other is refused if it has been changed.
_READ_BY_TOPIC = {
    "length, devices and precision": """
        activation_checkpointing activation_checkpointing_kwargs bf16 ddp_find_unused_parameters fp16
        gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs max_steps num_train_epochs
        seed tf32 torch_compile torch_compile_backend torch_compile_mode use_cache use_cpu
    """,
    "optimizer and learning rate": """
        adam_beta1 adam_beta2 adam_epsilon label_smoothing_factor learning_rate lr_scheduler_kwargs lr_scheduler_type
        max_grad_norm neftune_noise_alpha optim optim_args warmup_steps weight_decay
    """,
    "data": """
        data_seed dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
        dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor label_names
        length_column_name per_device_eval_batch_size per_device_train_batch_size remove_unused_columns
        train_sampling_strategy
    """,
    "evaluation": """
        eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy
        include_for_metrics prediction_loss_only
    """,
    "generation, of Seq2SeqTrainingArguments": """
        generation_config generation_max_length generation_num_beams predict_with_generate
    """,
    "checkpoints": """
        greater_is_better load_best_model_at_end metric_for_best_model output_dir save_only_model save_steps
        save_strategy save_total_limit
    """,
    "logs": """
        disable_tqdm log_level log_level_replica log_on_each_node logging_first_step logging_nan_inf_filter
        logging_steps logging_strategy project report_to run_name trackio_bucket_id trackio_space_id
        trackio_static_space_id
    """,
    "the Hub": """
        hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token push_to_hub
    """,
    # transformers.Trainer does not read these either: scripts do, and TrainingArguments the last two.
    "scripts": """
        do_eval do_predict do_train local_rank resume_from_checkpoint ddp_backend ddp_timeout
    """,
    # It copies the last three to the fields that took their place.
    "transformers 4": """
        group_by_length logging_dir overwrite_output_dir warmup_ratio
        adafactor evaluation_strategy no_cuda
    """,
}
_READ = frozenset(name for names in _READ_BY_TOPIC.values() for name in names.split())
# What to do instead of setting a field that is not read.
_INSTEAD = {
    "auto_find_batch_size": "give TransformersTrainer(..., batch_size='auto')",
    "deepspeed": "give TransformersTrainer(..., strategy=hasten.strategies.DeepSpeedStrategy(config=...))",
    "fsdp": "give TransformersTrainer(..., strategy='fsdp')",
    "enable_jit_checkpoint": "hasten saves a run that is told to stop without it",
    "full_determinism": "give TransformersTrainer(..., deterministic=True)",
}
# What to do instead of an attribute or an argument that transformers.Trainer had once.
OTHER_NAMES = {
    "fit": "Write trainer.train().",
    "tokenizer": "Write processing_class.",
}
# Methods of a TransformersTrainer that programs call, and it does not.
_NEVER_CALLED = frozenset(
    {
        "_get_learning_rate",
        "_get_num_items_in_batch",
        "_move_model_to_device",
        "_prepare_context_parallel_inputs",
        "_wrap_model",
        "create_accelerator_and_postprocess",
    }
)
# What to override in place of a method that is never called; a step of one's own for the others.
_INSTEAD_OF_OVERRIDES = {
    "_maybe_log_save_evaluate": "Override log(), evaluate() or _save_checkpoint(), or write a callback.",
    "_save_optimizer_and_scheduler": "Override _save_checkpoint().",
    "_wrap_model": "Change the model before you give it to the trainer, or give strategy=...",
    "create_accelerator_and_postprocess": "Give strategy=..., precision=... or devices=... to the trainer.",
}
# The loggers of hasten, by their names in ``report_to``; others are callbacks of transformers.
LOGGERS: dict[str, Callable[[TrainingArguments], Any]] = {
    "comet_ml": lambda args: CometLogger(name=args.run_name),
    "mlflow": lambda args: MLFlowLogger(run_name=args.run_name),
    # Only transformers 4 has a folder for it.
    "tensorboard": lambda args: TensorBoardLogger(vars(args).get("logging_dir", args.output_dir), name="logs"),
    "wandb": lambda args: WandbLogger(name=args.run_name),
}


def precision_of(args: TrainingArguments) -> str | None:
    """Return the precision under the name that it has in hasten; None for the default."""
    # accelerate launch may say it, too.
    mixed = vars(args).get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    mixed = "bf16" if args.bf16 else "fp16" if args.fp16 else mixed
    return {"no": None, "bf16": "bf16-mixed", "fp16": "16-mixed"}.get(mixed, mixed)


def check_overrides(kind: type[Any], base: type[Any]) -> None:
    """Refuse a transformers that is too old, and methods of its Trainer that a subclass overrides in vain."""
    import transformers

    if not hasattr(transformers.TrainerState, "best_global_step"):
        what = f"TransformersTrainer needs transformers 4.50 or a newer one, not {transformers.__version__}."
        raise make_error(ImportError, what, fix="Run: pip install 'transformers>=4.50'")
    for each in kind.__mro__[: kind.__mro__.index(base)]:
        for name in vars(each):
            if hasattr(transformers.Trainer, name) and (name in _NEVER_CALLED or not hasattr(base, name)):
                what = f"{each.__name__}.{name}() would never be called: hasten has its own loop."
                fix = _INSTEAD_OF_OVERRIDES.get(name, "Write a LightningModule with a step of your own.")
                raise make_error(TypeError, what, fix=fix)


def check_given(
    model: nn.Module | None,
    model_init: Callable[[], nn.Module] | None,
    eval_dataset: DataSets,
    args: TrainingArguments,
) -> None:
    """Refuse two models, none, and an evaluation without data."""
    if (model is None) is (model_init is None):
        what = f"TransformersTrainer: there is {'no model' if model is None else 'a model and model_init, too'}."
        raise make_error(TypeError, what, fix="Give model=..., or model_init=...", argument="model")
    if eval_dataset is None and args.eval_strategy != "no":
        raise missing(f"eval_strategy={args.eval_strategy.value!r}", "eval_dataset")


def check_collator(data_collator: Callable[[list[Any]], Any] | None) -> None:
    """Refuse the class of a collator."""
    if isinstance(data_collator, type):
        what = f"TransformersTrainer(data_collator={data_collator.__name__}): that is a class."
        raise make_error(TypeError, what, fix=f"Write {data_collator.__name__}(tokenizer).", argument="data_collator")


def check_optimizers(
    optimizers: Optimizer | Sequence[Any],
    model_init: Callable[[], nn.Module] | None,
    optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None,
) -> None:
    """Refuse optimizers that are no pair, and those that another argument would leave unused."""
    if not isinstance(optimizers, tuple | list) or len(optimizers) != 2:
        what = f"TransformersTrainer(optimizers={type(optimizers).__name__}): it must be a pair."
        raise make_error(TypeError, what, fix="Write optimizers=(optimizer, scheduler), or (optimizer, None).")
    given = any(each is not None for each in optimizers)
    if given and model_init is not None:
        what = (
            "TransformersTrainer(optimizers=...): train() makes another model with model_init, which they do not train."
        )
        raise make_error(
            ValueError, what, fix="Give optimizer_cls_and_kwargs=(class, arguments).", argument="optimizers"
        )
    if optimizers[0] is not None and optimizer_cls_and_kwargs is not None:
        what = "TransformersTrainer: there are optimizers, and optimizer_cls_and_kwargs, too."
        raise make_error(ValueError, what, fix="Give one of them.", argument="optimizers")


def check_samples(samples: DataSets | DataLoader[Any], name: str) -> None:
    """Refuse what is not one data set: a dict of several, a loader, and one without samples."""
    if isinstance(samples, dict):
        what = f"TransformersTrainer: {name} is a dict of {', '.join(map(str, samples))}."
        raise make_error(TypeError, what, fix=f"Give one data set of it: {name}=data[...].", argument=name)
    if isinstance(samples, DataLoader):
        fix = (
            f"Give its data set, {name}=loader.dataset, or return the loader in get_{name.split('_')[0]}_dataloader()."
        )
        raise make_error(
            TypeError, f"TransformersTrainer: {name} is a {type(samples).__name__}.", fix=fix, argument=name
        )
    if name == "train_dataset" and isinstance(samples, Sized) and len(samples) == 0:
        what = "TransformersTrainer: train_dataset is empty."
        raise make_error(ValueError, what, fix="Look at how it was read, and at its filters.", argument=name)


def check_loss(loss: Tensor | tuple[Any, ...] | float | None, owner: str) -> None:
    """Refuse what ``compute_loss`` of a program, or its ``compute_loss_func``, returned in place of a loss."""
    what, fix = f"{owner}.compute_loss() returned ", "Return the loss, a tensor with one value."
    if isinstance(loss, tuple):
        fix = "Return (loss, outputs) if return_outputs is True, and the loss alone if not."
    if not isinstance(loss, Tensor):
        raise make_error(TypeError, f"{what}{'None' if loss is None else f'a {type(loss).__name__}'}.", fix=fix)
    if loss.numel() != 1:
        raise make_error(
            ValueError, f"{what}a tensor of shape {tuple(loss.shape)}.", fix="Return its mean, loss.mean()."
        )


def check_model(model: nn.Module | str | None, args: TrainingArguments) -> None:
    """Refuse the name of a model, and one whose labels cannot be smoothed."""
    if not isinstance(model, nn.Module):
        given: Any = model
        what, fix = f"TransformersTrainer(model={given!r}): it must be a model, not a {type(given).__name__}.", ""
        if isinstance(given, str):
            fix = f"Write AutoModelForSequenceClassification.from_pretrained({given!r}), or another class of that kind."
        elif isinstance(given, type):
            what = f"TransformersTrainer(model={given.__name__}): it must be a model, not the class."
            fix = f"Write {given.__name__}(config), or {given.__name__}.from_pretrained(...)."
        raise make_error(TypeError, what, fix=fix, argument="model")
    several = getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification"
    if several and args.label_smoothing_factor:
        raise refused(args, "label_smoothing_factor", "Leave it out: a text has several labels.")


def check_names(unknown: set[str], known: Iterable[str], args: TrainingArguments) -> None:
    """Refuse arguments that no Trainer of hasten has, if it is known what to write."""
    for name in sorted(unknown):
        near = nearest(name, known)
        fix = OTHER_NAMES.get(name) or (f"Write TrainingArguments({name}=...)." if hasattr(args, name) else "")
        if fix or near is not None:
            what = f"TransformersTrainer.__init__() got an unexpected keyword argument {name!r}."
            raise make_error(TypeError, what, fix=fix or f"Did you mean {near!r}?", argument=name)


def missing(what: str, name: str) -> ValueError:
    """Return the error for data that is not there."""
    return make_error(ValueError, f"TransformersTrainer: {what} needs data.", fix=f"Give {name}=...", argument=name)


def refused(args: TrainingArguments, name: str, fix: str) -> ValueError:
    """Return the error for a field whose value is not read."""
    value = getattr(args, name)
    written = f"TrainingArguments({name}={getattr(value, 'value', value)!r})"
    return make_error(ValueError, f"{written}: TransformersTrainer does not have this.", fix=fix, argument=name)


def _kind_of(args: TrainingArguments) -> type[TrainingArguments]:
    """Return the class of transformers that the class of the arguments is, or that a program has added fields to."""
    return next(kind for kind in type(args).__mro__ if comes_from(kind, "transformers"))


def values_of(args: TrainingArguments) -> dict[str, Any]:
    """Return all fields with their values, but for those that a program has added: it reads them itself."""
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(_kind_of(args))}


def check_fields(args: TrainingArguments) -> None:
    """Refuse the first field whose value would be ignored."""
    # To find the default of report_to, older versions warn of WANDB_DISABLED.
    plain = _kind_of(args)(output_dir=args.output_dir, use_cpu=args.use_cpu, report_to="none")
    for name, value in values_of(args).items():
        if name not in _READ and value != getattr(plain, name):
            instead = f", and {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise refused(args, name, f"Leave it out{instead}.")
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true":
            what = f"accelerate was told to use {name}, and TransformersTrainer does not read this."
            raise make_error(ValueError, what, fix=_INSTEAD.get(name.lower(), "Leave it out."))
    if vars(args).get("train_sampling_strategy") == "batch_rebalance":
        raise refused(args, "train_sampling_strategy", "Use another.")
