"""``TransformersTrainer``: programs for ``transformers.Trainer``, with their ``TrainingArguments``, on hasten."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hasten import LightningModule, Trainer, seed_everything
from hasten._lib.errors import make_error
from hasten._lib.names import nearest
from hasten._lib.optional import need
from hasten.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from hasten.checkpoint import files
from hasten.loggers import CometLogger, CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from hasten.machine.collectives import world_size

if TYPE_CHECKING:
    from transformers import TrainingArguments
    from transformers.trainer_utils import PredictionOutput, TrainOutput

Samples = Dataset[Any] | Sequence[Mapping[str, Any]]

__all__ = ["TransformersTrainer"]

# The fields of TrainingArguments that are read. Any other is refused if it has been changed.
_READ = [
    "output_dir", "per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "max_steps",
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim",
    "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "gradient_accumulation_steps",
    "max_grad_norm", "bf16", "fp16", "tf32", "use_cpu", "seed", "activation_checkpointing",
    "gradient_checkpointing", "torch_compile", "torch_compile_backend", "torch_compile_mode", "logging_strategy",
    "logging_steps", "disable_tqdm", "report_to", "run_name", "eval_strategy", "eval_steps", "save_strategy",
    "save_steps", "save_total_limit", "save_only_model", "load_best_model_at_end", "metric_for_best_model",
    "greater_is_better", "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory",
    "dataloader_persistent_workers", "dataloader_prefetch_factor", "remove_unused_columns", "label_names",
    "train_sampling_strategy",
    # transformers.Trainer does not read these either: scripts do.
    "do_train", "do_eval", "do_predict", "resume_from_checkpoint", "local_rank",
]  # fmt: skip
_INSTEAD = {
    "auto_find_batch_size": "batch_size='auto'",
    "deepspeed": "strategy=hasten.strategies.DeepSpeedStrategy(config=...)",
    "fsdp": "strategy='fsdp'",
    "full_determinism": "deterministic=True",
}
# What programs call, and what they pass, with transformers.Trainer.
_OTHERS = {
    "add_callback": "Give TransformersTrainer(..., callbacks=[...]) the callback.",
    "log_metrics": "Print the values: the loggers have them already.",
    "push_to_hub": "Write trainer.model.push_to_hub(name).",
    "save_metrics": "Leave it out: output_dir/logs has the values.",
    "save_state": "Leave it out: the checkpoints have the state.",
    "state": "Read trainer.trainer.history and trainer.trainer.global_step.",
    "tokenizer": "Write processing_class.",
}
_OF_LOADERS = ("drop_last", "num_workers", "persistent_workers", "prefetch_factor")
_WHOLE = ("num_train_epochs", "logging_steps", "eval_steps", "save_steps")
_VALUES = {"lr_scheduler_type": ("reduce_lr_on_plateau", "greedy"), "train_sampling_strategy": ("batch_rebalance",)}
_LOGGERS: dict[str, Callable[[TrainingArguments], Any]] = {
    "comet_ml": lambda args: CometLogger(name=args.run_name),
    "mlflow": lambda args: MLFlowLogger(run_name=args.run_name),
    "tensorboard": lambda args: TensorBoardLogger(args.output_dir, name="logs"),
    "wandb": lambda args: WandbLogger(name=args.run_name),
}


class TransformersTrainer:
    """Train as ``transformers.Trainer`` does, with the ``TrainingArguments`` of a program, by ``hasten.Trainer``.

    Its checkpoints are hasten's, ``checkpoint-500.ckpt`` in ``output_dir``. ``trainer`` is the ``hasten.Trainer``. A
    program trains on one device; ``hasten launch`` starts a process for each. See docs/start/transformers.md.

    Args:
        model: a model that returns a loss when it is given labels.
        args: the arguments.
        data_collator: makes a batch of samples; by default it pads with ``processing_class``, or stacks.
        train_dataset: the training data: samples are dicts.
        eval_dataset: the data of ``evaluate``.
        processing_class: the tokenizer, or another processor; ``save_model`` saves it, too.
        compute_metrics: makes a dict of values of an ``EvalPrediction``.
        callbacks: callbacks of hasten.
        optimizers: an optimizer and a scheduler that steps with it, instead of those of ``args``.
        **arguments: arguments of ``hasten.Trainer``, such as ``packed=True``; they come before ``args``.

    Raises:
        ValueError: a field of ``args`` has a value that hasten does not read; the message names it.
        ModuleNotFoundError: transformers is not installed.

    Example::

        >>> import tempfile, torch
        >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
        >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> model = BertForSequenceClassification(BertConfig(vocab_size=20, **sizes))
        >>> data = [{"input_ids": torch.randint(5, 20, (6,)), "labels": n % 2} for n in range(16)]
        >>> quiet = dict(use_cpu=True, disable_tqdm=True, report_to="none")
        >>> args = TrainingArguments(tempfile.mkdtemp(), num_train_epochs=1, **quiet)
        >>> TransformersTrainer(model, args, train_dataset=data, enable_model_summary=False).train().global_step
        2

    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Samples | None = None,
        eval_dataset: Samples | None = None,
        processing_class: object = None,
        *,
        compute_metrics: Callable[[Any], dict[str, float]] | None = None,
        callbacks: list[Callback] | None = None,
        optimizers: tuple[Optimizer | None, Any] = (None, None),
        **arguments: Any,
    ) -> None:
        need("transformers", purpose="TransformersTrainer")
        from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator

        _check(args)
        _check_overrides(type(self))
        _check_parts(model, callbacks or [])
        _check_names(arguments.keys() - inspect.signature(Trainer).parameters.keys(), args)
        if eval_dataset is None and args.eval_strategy != "no":
            raise _missing(f"eval_strategy={args.eval_strategy.value!r}", "eval_dataset")
        seed_everything(args.seed, verbose=False)
        self.model, self.args, self.processing_class = model, args, processing_class
        self.train_dataset, self.eval_dataset, self.optimizers = train_dataset, eval_dataset, optimizers
        pads = DataCollatorWithPadding(processing_class) if hasattr(processing_class, "pad") else None
        self.data_collator = data_collator or pads or default_data_collator
        self.module = _Module(self, compute_metrics)
        self.best: ModelCheckpoint | None = None
        joined = dist.is_initialized()
        given = {"devices": "auto" if joined else 1, **self._arguments(callbacks or []), **arguments}
        self.trainer = Trainer(**given)
        if self.trainer.num_devices > 1 and not joined:
            what = f"TransformersTrainer(devices={given['devices']!r}): the processes start after TrainingArguments."
            fix = f"Leave it out, and write hasten launch --procs {self.trainer.num_devices} train.py."
            raise make_error(ValueError, what, fix=fix, argument="devices")

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train, and return the number of steps and the mean loss of all batches.

        Args:
            resume_from_checkpoint: a checkpoint of hasten to continue from; True for the newest in ``output_dir``, or
                the beginning if there is none.

        """
        from transformers.trainer_utils import TrainOutput

        args, trainer = self.args, self.trainer
        if self.train_dataset is None:
            raise _missing("train()", "train_dataset")
        start = "last" if resume_from_checkpoint is True else resume_from_checkpoint or None
        self.model.train()
        self.module.loss_sum, self.module.batches = torch.zeros(()), 0
        loader = self._loader(self.train_dataset, training=True)
        trainer.fit(self.module, loader, self._loader(self.eval_dataset), ckpt_path=start)
        if args.save_strategy == "steps" and trainer.global_step % args.save_steps:
            trainer.save_checkpoint(os.path.join(args.output_dir, f"checkpoint-{trainer.global_step}.ckpt"))
        if self.best is not None and self.best.best_model_path and args.load_best_model_at_end:
            self.module.load_state_dict(files.load(self.best.best_model_path)["state_dict"])
        return TrainOutput(trainer.global_step, float(self.module.loss_sum) / max(1, self.module.batches), {})

    def evaluate(self, eval_dataset: Samples | None = None) -> dict[str, float]:
        """Return ``eval_loss`` and the metrics of a data set, by default of ``eval_dataset``."""
        loader = self._loader(self.eval_dataset if eval_dataset is None else eval_dataset)
        if loader is None:
            raise _missing("evaluate()", "eval_dataset")
        return self.trainer.test(self.module, loader, verbose=False)[0]

    def predict(self, test_dataset: Samples) -> PredictionOutput:
        """Return the predictions of a data set as arrays, its labels, and its metrics under names such as test_loss."""
        from transformers.trainer_utils import PredictionOutput

        if world_size() > 1:
            what = "TransformersTrainer.predict(): each process has a part of the data."
            raise make_error(RuntimeError, what, fix="Start another program in one process for it.")
        metrics, found = self.module.compute_metrics, []

        def keep(prediction: Any) -> dict[str, float]:
            found.append((prediction.predictions, prediction.label_ids))
            return {} if metrics is None or prediction.label_ids is None else metrics(prediction)

        self.module.compute_metrics = keep
        try:
            values = self.evaluate(test_dataset)
        finally:
            self.module.compute_metrics = metrics
        return PredictionOutput(*found[0], {f"test_{name.removeprefix('eval_')}": values[name] for name in values})

    def save_model(self, output_dir: str | None = None) -> None:
        """Write a folder that ``from_pretrained`` reads; by default the ``output_dir`` of the arguments."""
        if any(hasattr(parameter, "placements") for parameter in self.model.parameters()):
            raise make_error(
                RuntimeError,
                "TransformersTrainer.save_model(): each process has a part of the weights.",
                fix="Call hasten.module.pretrained.save_pretrained(trainer.model, folder) on all of them.",
            )
        for part in (self.model, self.processing_class):
            if part is not None and self.trainer.is_global_zero:
                cast(Any, part).save_pretrained(output_dir or self.args.output_dir)

    def __getattr__(self, name: str) -> Any:
        what = f"{type(self).__name__!r} object has no attribute {name!r}."
        raise make_error(AttributeError, what, fix=_OTHERS.get(name, ""))

    def _arguments(self, callbacks: list[Callback]) -> dict[str, Any]:
        """Return the arguments of ``hasten.Trainer``."""
        args = self.args
        given: dict[str, Any] = {
            "max_epochs": -1 if args.max_steps > 0 else int(args.num_train_epochs),
            "max_steps": args.max_steps if args.max_steps > 0 else -1,
            "accumulate_grad_batches": args.gradient_accumulation_steps,
            "gradient_clip_val": args.max_grad_norm or None,
            "precision": "bf16-mixed" if args.bf16 else "16-mixed" if args.fp16 else None,
            "matmul_precision": {True: "high", False: "highest", None: None}[args.tf32],
            "accelerator": "cpu" if args.use_cpu else "auto",
            "memory": "full" if args.gradient_checkpointing else None,
            "batching": "length" if vars(args).get("train_sampling_strategy") == "group_by_length" else None,
            "log_every_n_steps": int(args.logging_steps) if args.logging_strategy == "steps" else 0,
            "logger": [CSVLogger(args.output_dir, name="logs"), *(_LOGGERS[name](args) for name in args.report_to)],
            "enable_progress_bar": not args.disable_tqdm,
            "enable_checkpointing": args.save_strategy != "no",
            "limit_val_batches": 0 if args.eval_strategy == "no" else None,
            "num_sanity_val_steps": 0,
        }
        if args.torch_compile:
            options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
            given["compile"] = {name: value for name, value in options.items() if value is not None}
        if args.eval_strategy == "steps":
            given["val_check_interval"] = f"{args.eval_steps}st"
        # "no" logs no loss, and no learning rate.
        every: dict[str, list[Literal["step", "epoch"]]] = {"no": [], "epoch": ["epoch"]}
        rates = map(LearningRateMonitor, every.get(args.logging_strategy, ["step"]))
        return {**given, "callbacks": [*callbacks, *rates, *self._checkpoints()]}

    def _checkpoints(self) -> list[ModelCheckpoint]:
        """Return callbacks that save the newest states, and the best."""
        args = self.args
        saves, often = [], {"steps": {"every_n_train_steps": args.save_steps}}.get(args.save_strategy, {})
        common: dict[str, Any] = {"dirpath": args.output_dir, "save_weights_only": args.save_only_model}
        common["auto_insert_metric_name"] = False
        if args.save_strategy in ("steps", "epoch"):
            keep = {"save_top_k": -1, "keep_latest_k": args.save_total_limit}
            saves.append(ModelCheckpoint(filename="checkpoint-{step}", **keep, **often, **common))
        if args.load_best_model_at_end or args.save_strategy == "best":
            name = f"eval_{cast(str, args.metric_for_best_model).removeprefix('eval_')}"
            mode: Any = "max" if args.greater_is_better else "min"
            often = {"every_n_train_steps": args.eval_steps} if args.eval_strategy == "steps" else {}
            self.best = ModelCheckpoint(filename="best-{step}", monitor=name, mode=mode, **often, **common)
            saves.append(self.best)
        return saves

    def _loader(self, dataset: Any, *, training: bool = False) -> DataLoader[Any] | None:
        from transformers.trainer_utils import RemoveColumnsCollator

        args, collate = self.args, self.data_collator
        if dataset is None:
            return None
        shuffles = training and vars(args).get("train_sampling_strategy") != "sequential"
        return DataLoader(
            dataset,
            batch_size=args.per_device_train_batch_size if training else args.per_device_eval_batch_size,
            shuffle=None if isinstance(dataset, IterableDataset) else shuffles,
            collate_fn=RemoveColumnsCollator(collate, self.module.columns) if args.remove_unused_columns else collate,
            pin_memory=args.dataloader_pin_memory and torch.accelerator.is_available(),
            **{name: getattr(args, f"dataloader_{name}") for name in _OF_LOADERS},
        )


class _Module(LightningModule):
    """The steps of a model of Hugging Face."""

    def __init__(self, owner: TransformersTrainer, compute_metrics: Callable[[Any], dict[str, float]] | None) -> None:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        from transformers.utils import find_labels

        super().__init__()
        self.model, self.args, self.optimizers_given = owner.model, owner.args, owner.optimizers
        self.compute_metrics, self.loss_sum, self.batches = compute_metrics, torch.zeros(()), 0
        inner = getattr(self.model, "get_base_model", lambda: self.model)()
        parameters = inspect.signature(inner.forward).parameters
        self.label_names: list[str] = self.args.label_names or find_labels(type(inner))
        self.columns = [*parameters, "label", "label_ids", *self.label_names]
        takes_more = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
        # Whether the loss is a mean over targets, so that batches of one step count by their targets.
        self.counts_targets = getattr(inner, "accepts_loss_kwargs", takes_more)
        self.shifts_labels = type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs, strategy = self.model(**batch), self.args.logging_strategy
        if "loss" not in outputs:
            what = f"{type(self.model).__name__} returned no loss, but {', '.join(outputs)}, for {', '.join(batch)}."
            fix = f"Samples need {' and '.join(self.label_names)}, and the model a loss that it computes from them."
            raise make_error(ValueError, what, fix=fix, argument="train_dataset")
        loss = outputs["loss"]
        self.loss_sum, self.batches = self.loss_sum.to(loss.device) + loss.detach(), self.batches + 1
        if strategy != "no":
            self.log("loss", loss, on_step=strategy == "steps", on_epoch=strategy == "epoch")
        labels = batch.get("labels")
        is_alone = self.args.gradient_accumulation_steps == 1 and not dist.is_initialized()
        if is_alone or not self.counts_targets or not isinstance(labels, Tensor):
            return loss
        targets = labels[..., 1:] if self.shifts_labels else labels
        return {"loss": loss, "loss_weight": targets.ne(-100).sum()}

    def on_validation_epoch_start(self) -> None:
        from transformers.trainer_pt_utils import EvalLoopContainer

        self.kept = EvalLoopContainer(), EvalLoopContainer()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self.model(**batch)
        if "loss" in outputs:
            self.log("eval_loss", outputs["loss"], sync_dist=True)
        if self.compute_metrics is not None:
            ignored = {"loss", *getattr(self.model.config, "keys_to_ignore_at_inference", ["past_key_values"])}
            logits = tuple(value for name, value in outputs.items() if name not in ignored)
            labels = tuple(batch[name] for name in self.label_names if name in batch)
            for container, values in zip(self.kept, (logits, labels), strict=True):
                container.add(values[0] if len(values) == 1 else values or None)

    def on_validation_epoch_end(self) -> None:
        from transformers import EvalPrediction
        from transformers.trainer_pt_utils import nested_concat

        if self.compute_metrics is None:
            return
        of_all = self.trainer.strategy.gather_objects([container.get_arrays() for container in self.kept])
        parts = zip(*(each for each in of_all if each[0] is not None), strict=True)
        predictions, labels = (functools.reduce(nested_concat, part) for part in parts)
        for name, value in self.compute_metrics(EvalPrediction(predictions=predictions, label_ids=labels)).items():
            self.log(f"eval_{name.removeprefix('eval_')}", float(value), sync_dist=True)

    # ``evaluate`` does what a validation does, also where a fit has none.
    on_test_epoch_start, on_test_epoch_end = on_validation_epoch_start, on_validation_epoch_end
    test_step = validation_step

    def configure_optimizers(self) -> Any:
        import transformers

        args, (optimizer, scheduler) = self.args, self.optimizers_given
        if optimizer is None:
            kind, options = transformers.Trainer.get_optimizer_cls_and_kwargs(args, self.model)
            if not issubclass(kind, Optimizer) or {"params", "model", "optimizer_dict"} & options.keys():
                raise _refused("optim", args.optim, "Give optimizers=(optimizer, scheduler).")
            # The method does not read its Trainer.
            decays = transformers.Trainer.get_decay_parameter_names(cast(Any, None), self.model)
            groups: list[dict[str, Any]] = [{"params": [], "weight_decay": each} for each in (args.weight_decay, 0.0)]
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    groups[name not in decays]["params"].append(parameter)
            optimizer = kind(groups, **options)
        if scheduler is None:
            steps = self.trainer.estimated_stepping_batches
            if math.isinf(steps):
                raise _refused("max_steps", args.max_steps, "Set it: the data has no length.")
            warmup, options = args.get_warmup_steps(int(steps)), args.lr_scheduler_kwargs
            scheduler = transformers.get_scheduler(args.lr_scheduler_type, optimizer, warmup, int(steps), options)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def _check_overrides(kind: type[TransformersTrainer]) -> None:
    """Refuse methods of transformers.Trainer that a subclass overrides, and that nothing would call."""
    import transformers

    for each in kind.__mro__[: kind.__mro__.index(TransformersTrainer)]:
        for name in vars(each):
            if hasattr(transformers.Trainer, name) and not hasattr(TransformersTrainer, name):
                what = f"{each.__name__}.{name}() would never be called: hasten has its own loop."
                raise make_error(TypeError, what, fix="Write a LightningModule with a step of your own.")


def _check_parts(model: object, callbacks: list[Callback]) -> None:
    """Refuse the name of a model, and callbacks of transformers."""
    from transformers import TrainerCallback

    if not isinstance(model, nn.Module):
        what = f"TransformersTrainer(model={model!r}): it must be a model, not a {type(model).__name__}."
        fix = f"Write AutoModelForSequenceClassification.from_pretrained({model!r}), or another class of that kind."
        raise make_error(TypeError, what, fix=fix if isinstance(model, str) else "", argument="model")
    if any(isinstance(each, TrainerCallback) for each in callbacks):
        what = "TransformersTrainer(callbacks=[...]): there is a callback of transformers."
        fix = "Give callbacks of hasten, such as hasten.callbacks.EarlyStopping(monitor='eval_loss')."
        raise make_error(TypeError, what, fix=fix, argument="callbacks")


def _check_names(unknown: set[str], args: TrainingArguments) -> None:
    """Refuse arguments that no Trainer of hasten has, if it is known what to write."""
    for name in sorted(unknown):
        near = nearest(name, inspect.signature(TransformersTrainer).parameters)
        fix = _OTHERS.get(name) or (f"Write TrainingArguments({name}=...)." if hasattr(args, name) else "")
        if fix or near is not None:
            what = f"TransformersTrainer.__init__() got an unexpected keyword argument {name!r}."
            raise make_error(TypeError, what, fix=fix or f"Did you mean {near!r}?", argument=name)


def _missing(what: str, name: str) -> ValueError:
    return make_error(ValueError, f"TransformersTrainer: {what} needs data.", fix=f"Give {name}=...", argument=name)


def _refused(name: str, value: object, fix: str) -> ValueError:
    written = f"TrainingArguments({name}={getattr(value, 'value', value)!r})"
    return make_error(ValueError, f"{written}: TransformersTrainer does not have this.", fix=fix, argument=name)


def _check(args: TrainingArguments) -> None:
    """Refuse the first field whose value would be ignored."""
    plain = type(args)(output_dir=args.output_dir, use_cpu=args.use_cpu)
    for name in (field.name for field in dataclasses.fields(args)):
        value = getattr(args, name)
        if name not in _READ and value != getattr(plain, name):
            instead = f", and give TransformersTrainer(..., {_INSTEAD[name]})" if name in _INSTEAD else ""
            raise _refused(name, value, f"Leave it out{instead}.")
        if name in _WHOLE and value is not None and value != int(value):
            raise _refused(name, value, "Write a whole number, or max_steps=.")
        if value in _VALUES.get(name, ()):
            raise _refused(name, value, "Use another, or give optimizers=(optimizer, scheduler).")
    if unknown := [name for name in args.report_to if name not in _LOGGERS]:
        raise _refused("report_to", unknown[0], f"Use 'none', {', '.join(map(repr, _LOGGERS))}.")
