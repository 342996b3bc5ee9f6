"""``TransformersTrainer``: programs for ``transformers.Trainer``, with their ``TrainingArguments``, on hasten."""

from __future__ import annotations

import dataclasses
import functools
import glob
import importlib
import inspect
import math
import operator
import os
import shutil
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from hasten import LightningModule, Trainer, seed_everything
from hasten._lib import check
from hasten._lib.errors import make_error
from hasten._lib.names import nearest
from hasten._lib.optional import need
from hasten.callbacks import Callback, Checkpoint, ModelCheckpoint
from hasten.checkpoint import files
from hasten.loggers import CometLogger, CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from hasten.loops.evaluate import evaluate_within
from hasten.machine.collectives import world_size

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainingArguments
    from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

Samples = Dataset[Any] | Sequence[Mapping[str, Any]]
DataSets = Samples | dict[str, Samples] | None

__all__ = ["TransformersTrainer"]

# The fields of TrainingArguments that are read. Any other is refused if it has been changed.
_READ = [
    "output_dir", "per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "max_steps",
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim", "optim_args",
    "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "gradient_accumulation_steps", "max_grad_norm", "bf16",
    "fp16", "tf32", "use_cpu", "seed", "activation_checkpointing", "activation_checkpointing_kwargs",
    "gradient_checkpointing", "gradient_checkpointing_kwargs", "torch_compile", "torch_compile_backend",
    "torch_compile_mode", "logging_strategy", "logging_steps", "disable_tqdm", "report_to", "run_name", "eval_strategy",
    "eval_steps", "save_strategy", "save_steps", "save_total_limit", "save_only_model", "load_best_model_at_end",
    "metric_for_best_model", "greater_is_better", "dataloader_drop_last", "dataloader_num_workers",
    "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor", "remove_unused_columns",
    "label_names", "train_sampling_strategy", "data_seed", "label_smoothing_factor", "eval_accumulation_steps",
    "eval_delay", "eval_on_start", "logging_first_step", "logging_nan_inf_filter", "neftune_noise_alpha", "use_cache",
    "prediction_loss_only", "include_for_metrics", "eval_do_concat_batches", "predict_with_generate",
    "generation_max_length", "generation_num_beams", "generation_config", "push_to_hub", "hub_model_id", "hub_strategy",
    "hub_token", "hub_private_repo", "hub_always_push", "hub_revision", "log_level", "log_level_replica",
    "log_on_each_node", "dataloader_in_order", "dataloader_multiprocessing_context", "project", "trackio_space_id",
    "trackio_bucket_id", "trackio_static_space_id", "ddp_find_unused_parameters",
    # transformers.Trainer does not read these either: scripts do, and TrainingArguments the last two.
    "do_train", "do_eval", "do_predict", "resume_from_checkpoint", "local_rank", "overwrite_output_dir", "ddp_backend",
    "ddp_timeout",
    # transformers 4 has these, too. It copies the last three to the fields that took their place.
    "group_by_length", "length_column_name", "logging_dir", "adafactor", "evaluation_strategy", "no_cuda",
]  # fmt: skip
_INSTEAD = {
    "auto_find_batch_size": "give TransformersTrainer(..., batch_size='auto')",
    "deepspeed": "give TransformersTrainer(..., strategy=hasten.strategies.DeepSpeedStrategy(config=...))",
    "fsdp": "give TransformersTrainer(..., strategy='fsdp')",
    "enable_jit_checkpoint": "hasten saves a run that is told to stop without it",
    "full_determinism": "give TransformersTrainer(..., deterministic=True)",
}
# What programs call, and what they pass, with transformers.Trainer.
_OTHERS = {
    "tokenizer": "Write processing_class.",
}
# Methods of the Trainers of transformers that read only what TransformersTrainer has, too.
_BORROWED = (
    "_determine_best_metric", "_finish_current_push", "_get_output_dir", "_get_train_sampler", "_hp_search_setup",
    "_pad_tensors_to_max_len", "_push_from_checkpoint", "_report_to_hp_search", "call_model_init", "create_model_card",
    "create_optimizer", "create_optimizer_and_scheduler", "create_scheduler", "floating_point_ops",
    "get_decay_parameter_names", "get_learning_rates", "get_num_trainable_parameters", "get_optimizer_cls_and_kwargs",
    "hyperparameter_search", "init_hf_repo", "is_local_process_zero", "is_world_process_zero", "load_generation_config",
    "log_metrics", "metrics_format", "num_examples", "pop_callback", "push_to_hub", "remove_callback", "save_metrics",
    "save_state",
)  # fmt: skip
_OF_LOADERS = (
    "drop_last", "in_order", "multiprocessing_context", "num_workers", "persistent_workers", "prefetch_factor"
)  # fmt: skip
# What a folder of a checkpoint has beside the files of save_model.
_STATE = "hasten.ckpt"
_LOGGERS: dict[str, Callable[[TrainingArguments], Any]] = {
    "comet_ml": lambda args: CometLogger(name=args.run_name),
    "mlflow": lambda args: MLFlowLogger(run_name=args.run_name),
    # Only transformers 4 has a folder for it.
    "tensorboard": lambda args: TensorBoardLogger(vars(args).get("logging_dir", args.output_dir), name="logs"),
    "wandb": lambda args: WandbLogger(name=args.run_name),
}


class TransformersTrainer:
    """Train as ``transformers.Trainer`` does, with the ``TrainingArguments`` of a program, by ``hasten.Trainer``.

    Its checkpoints are folders such as ``checkpoint-500``, which ``from_pretrained`` reads; ``hasten.ckpt`` in them has
    the state of the run. ``trainer`` is the ``hasten.Trainer``. A program trains on one device; ``hasten launch``
    starts a process for each. See docs/start/transformers.md.

    Args:
        model: a model that returns a loss when it is given labels.
        args: the arguments.
        data_collator: makes a batch of samples; by default it pads with ``processing_class``, or stacks.
        train_dataset: the training data: samples are dicts.
        eval_dataset: the data of ``evaluate``, or a dict of such: their values have names such as eval_french_loss.
        processing_class: the tokenizer, or another processor; ``save_model`` saves it, too.
        model_init: makes the model, instead of ``model``; ``train`` calls it again.
        compute_loss_func: computes the loss of the outputs, the labels and ``num_items_in_batch``.
        compute_metrics: makes a dict of values of an ``EvalPrediction``.
        callbacks: callbacks of transformers, such as ``EarlyStoppingCallback``, and callbacks of hasten.
        optimizers: an optimizer and a scheduler that steps with it, instead of those of ``args``.
        optimizer_cls_and_kwargs: the class of the optimizer and its arguments, instead of those of ``args``.
        preprocess_logits_for_metrics: makes what ``compute_metrics`` gets of the logits and labels of a batch.
        **arguments: arguments of ``hasten.Trainer``, such as ``packed=True``; they come before ``args``.

    Raises:
        ValueError: a field of ``args`` has a value that hasten does not read; the message names it.
        ModuleNotFoundError: transformers is not installed.
        ImportError: transformers is older than 4.50.

    Example::

        >>> import tempfile, torch
        >>> from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
        >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
        >>> model = BertForSequenceClassification(BertConfig(vocab_size=20, **sizes))
        >>> data = [{"input_ids": torch.randint(5, 20, (6,)), "labels": n % 2} for n in range(16)]
        >>> quiet = dict(use_cpu=True, disable_tqdm=True, report_to="none")
        >>> args = TrainingArguments(tempfile.mkdtemp(), num_train_epochs=1, **quiet)
        >>> trainer = TransformersTrainer(model, args, train_dataset=data, enable_model_summary=False)
        >>> trainer.train().global_step  # doctest: +ELLIPSIS
        {'train_runtime': ...}
        2

    """

    label_names: list[str]
    can_return_loss: bool
    # Whether the model takes ``num_items_in_batch``; False, also if a program says so, for losses that count alike.
    model_accepts_loss_kwargs: bool
    loss_is_scaled_for_ga: bool | None = None

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Samples | None = None,
        eval_dataset: DataSets = None,
        processing_class: object = None,
        model_init: Callable[[], nn.Module] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[[Any], dict[str, Any]] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        **arguments: Any,
    ) -> None:
        need("transformers", purpose="TransformersTrainer")
        from transformers import TrainerControl, TrainerState, TrainingArguments
        from transformers.data.data_collator import DataCollatorWithPadding, default_data_collator
        from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback
        from transformers.trainer_pt_utils import LabelSmoother
        from transformers.trainer_utils import TrainerMemoryTracker
        from transformers.utils.logging import set_verbosity

        _check_overrides(type(self))
        owner = "TransformersTrainer"
        check.instance(owner, "args", args, TrainingArguments, "TrainingArguments(...)", allow_none=True)
        check.instance(owner, "callbacks", callbacks, (list, tuple), "a list of callbacks", allow_none=True)
        args = TrainingArguments("tmp_trainer") if args is None else args
        _check(args)
        _check_given(model, model_init, eval_dataset, args)
        seed_everything(args.seed, verbose=False)
        set_verbosity(args.get_process_log_level())
        self.model_init = model_init
        model = model if model_init is None else self.call_model_init()
        _check_model(model, args)
        if (generation := vars(args).get("generation_config")) is not None:
            cast(Any, model).generation_config = cast(Any, self).load_generation_config(generation)
        processing_class = processing_class or arguments.pop("tokenizer", None)  # its name in transformers 4
        _check_names(arguments.keys() - inspect.signature(Trainer).parameters.keys(), args)
        self.model: nn.Module = cast(nn.Module, model)
        self.args, self.processing_class = args, processing_class
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        pads = DataCollatorWithPadding(processing_class) if hasattr(processing_class, "pad") else None
        self.data_collator = data_collator or pads or default_data_collator
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs, self._created_lr_scheduler = optimizer_cls_and_kwargs, False
        self.label_smoother = LabelSmoother(args.label_smoothing_factor) if args.label_smoothing_factor else None
        self.state, self.control, self.hub_model_id = TrainerState(), TrainerControl(), None
        self._memory_tracker = TrainerMemoryTracker(skip_memory_metrics=True)
        self.callback_handler = CallbackHandler([DefaultFlowCallback()], self.model, processing_class, *optimizers)
        self.events: _Events = _Events(self)
        others = self._add_callbacks(callbacks or ())
        joined = dist.is_initialized()
        self._limit = arguments.pop("limit_val_batches", None)
        self._given = lambda: {"devices": "auto" if joined else 1, **self._arguments(others), **arguments}
        self._steps_itself = type(self).training_step is not TransformersTrainer.training_step
        self._make_module, self.is_in_train = _StepOfProgram if self._steps_itself else _Module, False
        self.module = self._make_module(self)
        self.trainer = self._make_trainer()
        self._check_devices(arguments.get("devices"))
        if args.push_to_hub:
            cast(Any, self).init_hf_repo()
        self.events.call("on_init_end")

    def _check_devices(self, devices: object) -> None:
        if self.trainer.num_devices > 1 and not dist.is_initialized():
            what = f"TransformersTrainer(devices={devices!r}) starts processes after TrainingArguments."
            fix = f"Leave it out, and write hasten launch --procs {self.trainer.num_devices} train.py."
            raise make_error(ValueError, what, fix=fix, argument="devices")

    def _add_callbacks(self, given: Sequence[Any]) -> list[Callback]:
        """Add the callbacks of transformers, and return those of hasten."""
        from transformers.integrations import get_reporting_integration_callbacks
        from transformers.trainer_callback import PrinterCallback

        more = get_reporting_integration_callbacks([name for name in self.args.report_to if name not in _LOGGERS])
        for each in (*more, *given, *([PrinterCallback] if self.args.disable_tqdm else [])):
            if not isinstance(each, Callback):
                self.add_callback(each)
        return [each for each in given if isinstance(each, Callback)]

    # What the search of hyperparameters of transformers reads.
    hp_search_backend = hp_name = _trial = None
    is_deepspeed_enabled = is_fsdp_xla_v2_enabled = False

    def create_accelerator_and_postprocess(self) -> None:
        """Do nothing: ``train`` makes a ``hasten.Trainer`` for the arguments of each trial."""

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: dict[str, Any] | None = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train, and return the number of steps, the mean of their losses, and times.

        Args:
            resume_from_checkpoint: a checkpoint of hasten to continue from; True for the newest in ``output_dir``.
            trial: what ``hyperparameter_search`` gives.
            ignore_keys_for_eval: the outputs that ``compute_metrics`` does not get.

        """
        from transformers import TrainerState
        from transformers.trainer_utils import TrainOutput, speed_metrics

        args, events = self.args, self.events
        if self.model_init is not None:
            seed_everything(args.seed, verbose=False)
            self.model, self.optimizer, self.lr_scheduler = cast(Any, self).call_model_init(trial), None, None
            self.module = self._make_module(self)
        self.model_wrapped = self.model
        cast(Any, self)._hp_search_setup(trial)
        if self.trainer.global_step or _values(args) != self._made_for:
            # Programs change arguments before they train.
            _check(args)
            self.trainer = self._make_trainer()
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self._check_step()
        self.state, trainer, began = TrainerState(), self.trainer, time.time()
        start = self._checkpoint_of(resume_from_checkpoint)
        self._prepare_model()
        self.model.train()
        self._evaluated_at = -1
        events.ignored, self.is_in_train = ignore_keys_for_eval, True
        noise: Any = nullcontext()
        if args.neftune_noise_alpha is not None:
            add = functools.partial(_add_noise, args.neftune_noise_alpha)
            noise = cast(Any, self.model).get_input_embeddings().register_forward_hook(add)
        with noise:
            # Evaluations have loaders of their own.
            trainer.fit(self.module, self.get_train_dataloader(), [[None]], ckpt_path=start)
        steps, state = self.state.global_step - events.first_step, self.state
        self.model.train(self._evaluated_at != state.global_step)
        size = args.train_batch_size * args.gradient_accumulation_steps * trainer.world_size
        metrics = speed_metrics("train", began, num_samples=steps * size, num_steps=steps)
        metrics["total_flos"] = state.total_flos
        metrics["train_loss"] = loss = (events.logged + float(events.total)) / max(steps, 1)
        self.log(metrics)
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            saved = files.load(os.path.join(state.best_model_checkpoint, _STATE))
            self.module.loads_from = state.best_model_checkpoint
            self.module.on_load_checkpoint(saved)
            self.module.load_state_dict(saved["state_dict"])
        if args.save_total_limit == 1 and state.best_model_checkpoint is not None:
            self._remove_old([state.best_model_checkpoint])
        events.call("on_train_end")
        cast(Any, self)._finish_current_push()
        self.is_in_train = False
        return TrainOutput(state.global_step, loss, metrics)

    def _prepare_model(self) -> None:
        args = self.args
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        align = getattr(importlib.import_module("transformers.trainer_utils"), "align_special_tokens", None)
        if align is not None and hasattr(self.model, "config") and hasattr(tokenizer, "pad_token_id"):
            align(self.model, self.processing_class)
        if args.gradient_checkpointing:
            kind = "activation" if hasattr(self.model, "activation_checkpointing_enable") else "gradient"
            options = dict(getattr(args, f"{kind}_checkpointing_kwargs") or {})
            more = {name: options.pop(name) for name in ("every_n_layers", "offload") if name in options}
            enable = getattr(self.model, f"{kind}_checkpointing_enable")
            enable(**{f"{kind}_checkpointing_kwargs": options or None}, **more)

    def evaluate(
        self,
        eval_dataset: DataSets | str = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **generation: Any,
    ) -> dict[str, Any]:
        """Return ``eval_loss`` and the metrics of a data set, by default of ``eval_dataset``.

        Further arguments, such as ``max_length=20``, are those of ``generate``, for ``predict_with_generate=True``.
        """
        self._take_generation(generation)
        return cast("dict[str, Any]", self._call("evaluate", eval_dataset, ignore_keys, metric_key_prefix))

    def predict(
        self,
        test_dataset: Samples,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **generation: Any,
    ) -> PredictionOutput:
        """Return the predictions of a data set as arrays, its labels, and its metrics under names such as test_loss."""
        if world_size() > 1:
            what = "TransformersTrainer.predict(): each process has a part of the data."
            raise make_error(RuntimeError, what, fix="Start another program in one process for it.")
        self._take_generation(generation)
        return cast("PredictionOutput", self._call("predict", test_dataset, ignore_keys, metric_key_prefix))

    def _call(self, name: str, *given: Any) -> Any:
        """Call a method of ``transformers.Trainer`` that this class has, too."""
        return vars(importlib.import_module("transformers").Trainer)[name](self, *given)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Return the predictions, the labels, the metrics and the number of samples of a loader.

        A subclass can override this, and ``prediction_step``, which it calls with each batch.
        """
        module, trainer = self.module, self.trainer
        module.prefix, module.ignored, self.callback_handler.eval_dataloader = (
            metric_key_prefix,
            ignore_keys,
            dataloader,
        )
        module.loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        if self.events.fits:
            source = trainer.current_run.data.validation
            source.reload()
            source.given = dataloader
            self.events.limit_validation(self._limit)
            try:
                evaluate_within(trainer.current_run, source)
            finally:
                if self.args.eval_strategy != "steps" or trainer.should_stop:
                    self.events.limit_validation(0)
        else:
            trainer.test(module, dataloader, verbose=False)
            self.model.eval()
        self._evaluated_at = self.state.global_step
        return module.result(dataloader)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **generation: Any,
    ) -> tuple[Any, Any, Any]:
        """Return the loss, the logits or what is generated, and the labels of a batch; a subclass can override it."""
        given = model, inputs, prediction_loss_only, ignore_keys
        if not vars(self.args).get("predict_with_generate") or prediction_loss_only:
            return cast("tuple[Any, Any, Any]", self._call("prediction_step", *given))
        from transformers import Seq2SeqTrainer

        return cast("tuple[Any, Any, Any]", cast(Any, Seq2SeqTrainer).prediction_step(self, *given, **generation))

    def _take_generation(self, given: dict[str, Any]) -> None:
        """Keep the arguments of ``generate`` where ``prediction_step`` looks for them."""
        args = vars(self.args)
        if given and not args.get("predict_with_generate"):
            what = f"TransformersTrainer.evaluate() and predict() got an unexpected argument {next(iter(given))!r}."
            raise make_error(TypeError, what, fix="It needs Seq2SeqTrainingArguments(predict_with_generate=True).")
        given = {name: value for name, value in given.items() if value is not None}
        if not given.keys() & {"max_length", "max_new_tokens"} and args.get("generation_max_length") is not None:
            given["max_length"] = args["generation_max_length"]
        if args.get("generation_num_beams") is not None:
            given.setdefault("num_beams", args["generation_num_beams"])
        self._gen_kwargs = given

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return a batch that is on its device already; a subclass can override this."""
        return inputs

    # What prediction_step of transformers calls.
    compute_loss_context_manager = staticmethod(nullcontext)

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return nullcontext, inputs

    def _get_num_items_in_batch(self, batches: list[Any], device: object = None) -> Tensor | None:
        return self.module._targets(batches[0])

    @functools.cached_property
    def accelerator(self) -> Any:
        """The ``Accelerator`` that methods of subclasses ask for the model and the processes; it prepares nothing."""
        made = importlib.import_module("accelerate").Accelerator()
        made.backward = lambda loss, **_: self.trainer.manual_backward(loss)
        return made

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        """Compute the gradients of a batch, and return its loss.

        Only a subclass that overrides this calls it. Its gradients are clipped, and the optimizer steps, as without it.
        """
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss: Tensor = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        self.accelerator.backward(loss)
        return loss.detach()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """Return the loss of a batch, a mean; a subclass can override it.

        The losses of the batches of a step are averaged by ``num_items_in_batch``, the targets of each.
        """
        labels = None
        if self.compute_loss_func is not None or self.label_smoother is not None:
            labels, inputs = inputs.get("labels"), {name: inputs[name] for name in inputs if name != "labels"}
        counts = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        outputs = model(**inputs, **({"num_items_in_batch": num_items_in_batch} if counts else {}))
        if self.compute_loss_func is not None:
            loss = self.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        elif self.label_smoother is not None and labels is not None:
            loss = self.label_smoother(outputs, labels, shift_labels=self.module.is_causal)
        elif not isinstance(outputs, Mapping) or "loss" in outputs:
            loss = outputs["loss" if isinstance(outputs, Mapping) else 0]
        else:
            what = f"{type(model).__name__} returned no loss, but {', '.join(outputs)}, for {', '.join(inputs)}."
            names = " and ".join(self.label_names) or "labels"
            fix = f"Samples need {names}, and the model a head that makes a loss of them."
            raise make_error(ValueError, what, fix=fix, argument="train_dataset")
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, Any], start_time: float | None = None) -> None:
        """Add values to ``state.log_history``, and write those to the loggers that a step has not logged."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        known = {*self.trainer.callback_metrics, "epoch"}
        new = {name: value for name, value in logs.items() if name not in known and isinstance(value, int | float)}
        for logger in self.trainer.loggers if new and self.trainer.is_global_zero else ():
            logger.log_metrics(new, self.state.global_step)
        self.events.call("on_log", logs=logs)
        if self.is_in_train and not self.args.disable_tqdm:
            shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in logs.items()}
            self.trainer.print({name: shown[name] for name in shown if name != "total_flos"})

    def add_callback(self, callback: TrainerCallback | type[TrainerCallback]) -> None:
        """Add a callback of transformers, or its class."""
        from transformers import TrainerCallback

        kind = callback if isinstance(callback, type) else type(callback)
        if not issubclass(kind, TrainerCallback):
            what = f"TransformersTrainer.add_callback(): {kind.__name__} is not a callback of transformers."
            fix = f"Write TransformersTrainer(..., callbacks=[{kind.__name__}(...)])."
            raise make_error(TypeError, what, fix=fix if issubclass(kind, Callback) else "", argument="callbacks")
        self.callback_handler.add_callback(callback)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the training data; a subclass can override this, and the next."""
        if self.train_dataset is None:
            raise _missing("train()", "train_dataset")
        return self._loader(self.train_dataset, training=True)

    def get_eval_dataloader(self, eval_dataset: Samples | str | None = None) -> DataLoader[Any]:
        """Return a loader of ``eval_dataset``, of one in it by its name, or of another data set."""
        if eval_dataset is None and self.eval_dataset is None:
            raise _missing("evaluate()", "eval_dataset")
        given = cast(Any, self.eval_dataset)[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        return self._loader(self.eval_dataset if given is None else given)

    get_test_dataloader = get_eval_dataloader

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder that ``from_pretrained`` reads; by default the ``output_dir`` of the arguments."""
        if _is_sharded(self.model):
            what = "TransformersTrainer.save_model(): each process has a part of the weights."
            fix = "Call hasten.module.pretrained.save_pretrained(trainer.model, folder) on all of them."
            raise make_error(RuntimeError, what, fix=fix)
        if self.trainer.is_global_zero:
            self._save(output_dir)
            if self.args.push_to_hub and not _internal_call:
                cast(Any, self).push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = output_dir or self.args.output_dir
        os.makedirs(folder, exist_ok=True)
        for part in (self.model, self.processing_class or getattr(self.data_collator, "tokenizer", None)):
            if hasattr(part, "save_pretrained"):
                given = {} if state_dict is None or part is not self.model else {"state_dict": state_dict}
                cast(Any, part).save_pretrained(folder, **given)
            elif isinstance(part, nn.Module):
                from safetensors.torch import save_model

                save_model(part, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
        torch.save(self.args, os.path.join(folder, "training_args.bin"))

    def __getattr__(self, name: str) -> Any:
        what = f"{type(self).__name__!r} object has no attribute {name!r}."
        raise make_error(AttributeError, what, fix=_OTHERS.get(name, ""))

    def _check_step(self) -> None:
        """Refuse what a step of the program would ignore."""
        args, what = self.args, f"{type(self).__name__}.training_step() computes the gradients itself"
        if self._steps_itself and args.gradient_accumulation_steps > 1:
            fix = "Leave it out, or override compute_loss instead."
            what = f"TrainingArguments(gradient_accumulation_steps={args.gradient_accumulation_steps}): {what}."
            raise make_error(ValueError, what, fix=fix, argument="gradient_accumulation_steps")
        if self._steps_itself and world_size() > 1:
            raise make_error(RuntimeError, f"{what}, in one process.", fix="Override compute_loss instead.")

    def _save_checkpoint(self, model: nn.Module, trial: object = None) -> None:
        """Write a folder that ``from_pretrained`` reads, and that a run can be resumed from; remove older ones."""
        args, state, trainer = self.args, self.state, self.trainer
        name = os.path.join(cast(Any, self)._get_output_dir(trial), "checkpoint-{}").format
        folder = name(state.global_step)
        if not _is_sharded(self.model):
            if trainer.is_global_zero:
                # Of an earlier run: it would be a checkpoint with weights of this one.
                Path(folder, _STATE).unlink(missing_ok=True)
            self.save_model(folder, _internal_call=True)
        # The folder of this step may still be missing: the first process makes it.
        if (best := name(state.best_global_step)) == folder or os.path.exists(best):
            state.best_model_checkpoint = best
        self.module.saves_in = folder
        trainer.save_checkpoint(os.path.join(folder, _STATE), weights_only=args.save_only_model)
        self.module.saves_in = ""
        if trainer.is_global_zero:
            state.save_to_json(os.path.join(folder, "trainer_state.json"))
            if args.push_to_hub:
                cast(Any, self)._push_from_checkpoint(folder)
            if (args.save_total_limit or 0) > 0:
                kept = {folder, state.best_model_checkpoint or folder}
                others = [path for path in self._folders() if path not in kept]
                self._remove_old([*others[len(others) + len(kept) - max(args.save_total_limit, len(kept)) :], *kept])

    def _folders(self) -> list[str]:
        """Return the folders of checkpoints, the oldest first."""
        folder = glob.escape(cast(Any, self)._get_output_dir(self._trial))
        found = glob.glob(os.path.join(folder, "checkpoint-*", _STATE))
        return [os.path.dirname(path) for path in sorted(found, key=os.path.getmtime)]

    def _remove_old(self, kept: list[str]) -> None:
        for path in self._folders() if self.trainer.is_global_zero else ():
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _checkpoint_of(self, given: str | bool | None) -> str | None:
        """Return the file with the state of the run to resume; that of a run that was stopped may be the newest."""
        if not given or str(given).endswith(".ckpt"):
            self.module.loads_from = os.path.dirname(str(given))
            return cast("str | None", given or None)
        folder = Path(self.args.output_dir if given is True else given)
        found = [*folder.glob("*.ckpt"), *folder.glob(f"checkpoint-*/{_STATE}")]
        if not found:
            none = f"{folder} has no checkpoint of hasten, a .ckpt file."
            what = f"train(resume_from_checkpoint={given!r}): {none if folder.is_dir() else files.not_found(folder)}"
            fix = "Leave it out. Of a checkpoint of transformers, from_pretrained reads the model."
            raise make_error(ValueError, what, fix=fix, argument="resume_from_checkpoint")
        start = max(found, key=os.path.getmtime)
        self.module.loads_from = str(start.parent)
        return str(start)

    def _max_steps(self) -> Any:
        """Return the number of steps of the fit that runs, infinite if it is not known."""
        args, planned, trainer = self.args, self.trainer.estimated_stepping_batches, self.trainer
        # Other epochs than those of args may have been given.
        if args.max_steps > 0 or math.ceil(args.num_train_epochs) != trainer.max_epochs or math.isinf(planned):
            return planned
        each = math.ceil(trainer.num_training_batches / args.gradient_accumulation_steps)
        return min(planned, math.ceil(args.num_train_epochs * each))

    def waits_for_metric(self) -> bool:
        """Return whether the scheduler steps after each evaluation."""
        is_greedy = type(self.lr_scheduler).__name__ == "GreedyLR"
        return is_greedy or isinstance(self.lr_scheduler, ReduceLROnPlateau)

    def _make_trainer(self) -> Trainer:
        self._made_for = _values(self.args)
        return Trainer(**self._given())

    def _arguments(self, callbacks: list[Callback]) -> dict[str, Any]:
        """Return the arguments of ``hasten.Trainer``."""
        args, stopped = self.args, []
        if args.save_strategy != "no":
            # It saves runs that are stopped from outside; events has the others saved.
            stopped = [ModelCheckpoint(args.output_dir, save_top_k=0, every_n_epochs=0)]
            stopped[0].HOW_TO_RESUME = "call train(resume_from_checkpoint=True)"
        savers = [each for each in (*callbacks, *stopped) if isinstance(each, Checkpoint)]
        loggers = [_LOGGERS[name](args) for name in args.report_to if name in _LOGGERS]
        given: dict[str, Any] = {
            "max_epochs": -1 if args.max_steps > 0 else math.ceil(args.num_train_epochs),
            "max_steps": args.max_steps if args.max_steps > 0 else -1,
            "accumulate_grad_batches": args.gradient_accumulation_steps,
            # An infinite limit clips nothing; it has the norm computed, which is logged.
            "gradient_clip_val": None if self._steps_itself else args.max_grad_norm or math.inf,
            "precision": _precision(args),
            "matmul_precision": {True: "high", False: "highest", None: None}[args.tf32],
            "accelerator": "cpu" if args.use_cpu else "auto",
            "log_every_n_steps": math.ceil(args.logging_steps) if args.logging_strategy == "steps" else 0,
            "logger": [CSVLogger(args.output_dir, name="logs"), *loggers],
            "enable_progress_bar": not args.disable_tqdm,
            "enable_checkpointing": bool(savers),
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
        }
        if args.torch_compile:
            options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
            given["compile"] = {name: value for name, value in options.items() if value is not None}
        if args.ddp_find_unused_parameters and dist.is_initialized():
            given["strategy"] = "ddp_find_unused_parameters_true"
        if args.eval_strategy == "steps":
            # The Trainer never finds an evaluation due. Its callbacks see that values are not new after each epoch.
            given |= {"limit_val_batches": self._limit, "val_check_interval": f"{10**12}st"}
        return {**given, "callbacks": [*callbacks, self.events, *stopped]}

    def _loader(self, dataset: Any, *, training: bool = False) -> DataLoader[Any]:
        from transformers.trainer_utils import RemoveColumnsCollator

        args, collate = self.args, self.data_collator
        # The order of transformers.Trainer.
        ordered = not training or isinstance(dataset, IterableDataset)
        sampler, shuffles = None if ordered else self._get_train_sampler(), False
        if dist.is_initialized() and isinstance(sampler, RandomSampler | SequentialSampler | None):
            sampler, shuffles = None, isinstance(sampler, RandomSampler)
        elif isinstance(sampler, RandomSampler):
            samplers = importlib.import_module("accelerate.data_loader")
            sampler = samplers.SeedableRandomSampler(dataset, data_seed=args.data_seed)
        return DataLoader(
            dataset,
            batch_size=args.per_device_train_batch_size if training else args.per_device_eval_batch_size,
            sampler=sampler,
            shuffle=shuffles,
            collate_fn=RemoveColumnsCollator(collate, self.module.columns) if args.remove_unused_columns else collate,
            pin_memory=args.dataloader_pin_memory and torch.accelerator.is_available(),
            **{
                name: getattr(args, f"dataloader_{name}") for name in _OF_LOADERS if hasattr(args, f"dataloader_{name}")
            },
        )


def _borrowed(name: str) -> Any:
    # A module of Python is imported once; transformers takes seconds.
    trainer = functools.partial(importlib.import_module, "transformers")
    return lambda self, *args, **given: inspect.getattr_static(trainer().Seq2SeqTrainer, name).__get__(self)(
        *args, **given
    )


for _name in _BORROWED:
    setattr(TransformersTrainer, _name, _borrowed(_name))


class _Events(Callback):
    """Keep the state of transformers, call its callbacks, and do what they ask for."""

    def __init__(self, owner: TransformersTrainer) -> None:
        self.owner, self.fits, self.ignored = owner, False, cast("list[str] | None", None)
        self.scheduler_state = cast("dict[str, Any] | None", None)

    def call(self, event: str, **given: Any) -> None:
        owner = self.owner
        owner.control = getattr(owner.callback_handler, event)(owner.args, owner.state, owner.control, **given)
        self.stop_if_asked()

    def stop_if_asked(self) -> None:
        owner = self.owner
        if self.fits and owner.control.should_training_stop and owner.state.global_step < self.planned:
            owner.trainer.should_stop = True
            self.limit_validation(0)

    def limit_validation(self, batches: int | float | None) -> None:
        """Limit the batches of validations; 0 for none, also when the run stops."""
        source = self.owner.trainer.current_run.data.validation
        source.next_limit = batches
        source.take_limit()

    def state_dict(self) -> dict[str, Any]:
        owner = self.owner
        scheduler = owner.lr_scheduler.state_dict() if owner.waits_for_metric() else None
        return {"state": dataclasses.asdict(owner.state), "scheduler": scheduler}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.owner.state = type(self.owner.state)(**state_dict["state"])
        self.scheduler_state = state_dict.get("scheduler")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        from transformers import TrainerCallback

        owner, args, state, handler = self.owner, self.owner.args, self.owner.state, self.owner.callback_handler
        self.fits, self.planned, state.global_step = True, trainer.estimated_stepping_batches, trainer.global_step
        state.max_steps, state.epoch = owner._max_steps(), state.epoch or 0
        state.compute_steps(args, state.max_steps)
        if args.logging_strategy == "steps" and args.logging_steps < 1:
            trainer.log_every_n_steps = state.logging_steps
        each = trainer.num_training_batches
        self.batches = each if math.isfinite(each) else state.max_steps * args.gradient_accumulation_steps
        steps = math.ceil(self.batches / args.gradient_accumulation_steps)
        state.num_train_epochs = math.ceil(state.max_steps / steps) if math.isfinite(each) else sys.maxsize
        state.train_batch_size, trial = args.train_batch_size, cast(Any, owner)._trial
        if trial is not None:
            from transformers.integrations import hp_params

            state.is_hyper_param_search, state.trial_params = True, hp_params(trial)
            state.trial_name = owner.hp_name(trial) if owner.hp_name is not None else None
        state.is_world_process_zero, state.is_local_process_zero = trainer.is_global_zero, trainer.local_rank == 0
        handler.model, handler.optimizer, handler.lr_scheduler = owner.model, owner.optimizer, owner.lr_scheduler
        handler.train_dataloader = trainer.train_dataloader
        self.first_step = self.last_logged = state.global_step
        self.logged, self.total, self.in_epoch = 0.0, torch.zeros(()), False
        input_name = getattr(owner.model, "main_input_name", "input_ids")
        self.flos = owner.floating_point_ops({input_name: torch.zeros(1)}) * trainer.world_size
        self.hooks = [
            getattr(owner.optimizer, f"register_step_{when}_hook")(functools.partial(self._in_step, event))
            for when, event in (("pre", "on_pre_optimizer_step"), ("post", "on_optimizer_step"))
            if any(getattr(type(each), event) is not getattr(TrainerCallback, event) for each in handler.callbacks)
        ]
        if self.scheduler_state is not None:
            owner.lr_scheduler.load_state_dict(self.scheduler_state)
            self.scheduler_state = None
        self.call("on_train_begin")
        if args.eval_on_start:
            owner.evaluate(ignore_keys=self.ignored)
            self.stop_if_asked()
        progress = trainer.current_run.progress
        if progress.mid_epoch and not progress.last_batch:
            self.on_train_epoch_start(trainer, pl_module)

    def _in_step(self, event: str, *_: object) -> None:
        self.call(event)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.in_epoch = True
        self.call("on_epoch_begin")

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # The rate of this step: the schedule moves before the end of the batch.
        self.rate = float(self.owner.optimizer.param_groups[0]["lr"]) if self.owner.optimizer else 0.0
        if batch_idx % self.owner.args.gradient_accumulation_steps == 0 and not self.owner.control.should_epoch_stop:
            self.call("on_step_begin")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        state = self.owner.state
        if trainer.global_step == state.global_step:
            self.call("on_substep_end")
            return
        losses, pl_module.losses = pl_module.losses, []
        self.total = self.total + sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
        state.global_step, state.epoch = trainer.global_step, trainer.current_epoch + (batch_idx + 1) / self.batches
        state.total_flos, pl_module.inputs = state.total_flos + self.flos * pl_module.inputs, 0
        self.call("on_step_end")
        self._log_evaluate_save()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A run that is resumed at the end of an epoch has done this before.
        if self.in_epoch:
            self.in_epoch = False
            self.call("on_epoch_end")
            self._log_evaluate_save()

    def _log_evaluate_save(self) -> None:
        """Do what the callbacks ask for, in the order of transformers."""
        owner, state, args = self.owner, self.owner.state, self.owner.args
        if owner.control.should_log and state.global_step > self.last_logged:
            of_all = owner.trainer.strategy.gather_objects(float(self.total))
            loss, steps = sum(of_all) / len(of_all), state.global_step - self.last_logged
            self.last_logged, self.logged, self.total = state.global_step, self.logged + loss, torch.zeros(())
            norm = owner.trainer.current_run.window.gradient_norm
            norms = {} if norm is None else {"grad_norm": float(norm)}
            owner.log({"loss": loss / steps, **norms, "learning_rate": self.rate})
        if owner.control.should_evaluate:
            values = owner.evaluate(ignore_keys=self.ignored)
            self.stop_if_asked()
            cast(Any, owner)._report_to_hp_search(owner._trial, state.global_step, values)
            is_best = owner._determine_best_metric(values, None)
            if owner.waits_for_metric():
                owner.lr_scheduler.step(values[f"eval_{args.metric_for_best_model.removeprefix('eval_')}"])
            if args.save_strategy == "best":
                owner.control.should_save = is_best
        if owner.control.should_save:
            owner._save_checkpoint(owner.model, owner._trial)
            self.call("on_save")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.fits:
            self.fits = False
            for hook in self.hooks:
                hook.remove()


class _Module(LightningModule):
    """The steps of a model of Hugging Face."""

    def __init__(self, owner: TransformersTrainer) -> None:
        from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        from transformers.utils import can_return_loss, find_labels

        super().__init__()
        # A reference that a copy of the module shares.
        self.owner, self.model, self.args = weakref.ref(owner), owner.model, owner.args
        if (config := getattr(self.model, "config", None)) is not None and hasattr(self.args, "use_cache"):
            config.use_cache = self.args.use_cache
        inner = getattr(self.model, "get_base_model", lambda: self.model)()
        parameters = inspect.signature(inner.forward).parameters
        names = self.args.label_names
        owner.label_names, owner.can_return_loss = names or find_labels(type(inner)), can_return_loss(type(inner))
        self.columns = [*parameters, "label", "label_ids", *owner.label_names]
        takes_more = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
        owner.model_accepts_loss_kwargs = getattr(inner, "accepts_loss_kwargs", takes_more)
        self.is_causal = type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        # As in transformers, whose list of losses lacks some models, such as GPT2LMHeadModel.
        shifts = LOSS_MAPPING.get(getattr(inner, "loss_type", None)) is ForCausalLMLoss
        decodes = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
        self.shifts_labels = shifts and not decodes
        self.prefix, self.loss_only, self.ignored = "eval", False, cast("list[str] | None", None)
        # Of the batches of a step: the losses, and the number of inputs.
        self.losses: list[tuple[Tensor, Any]] = []
        self.inputs = 0
        # The folders of the checkpoint that is written, and of the one that is read.
        self.saves_in = self.loads_from = ""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave out the weights that the files of ``save_model`` have, and those that an adapter does not change."""
        if not self.saves_in or not self.trainer.is_global_zero:
            return
        weights, named = checkpoint["state_dict"], {}
        for path in Path(self.saves_in).glob("*.safetensors"):
            with _opened(path) as saved, path.open("rb") as file:
                os.fsync(file.fileno())
                for name in sorted(saved.keys()):
                    mine, there = weights.get(f"model.{name}"), saved.get_tensor(name)
                    if isinstance(mine, Tensor) and mine.dtype == there.dtype and torch.equal(mine.cpu(), there):
                        named[mine.data_ptr(), mine.shape] = path.name, name
        all_of = self.model.named_parameters(remove_duplicate=False) if hasattr(self.model, "peft_config") else ()
        frozen = {f"model.{name}" for name, each in all_of if not each.requires_grad}
        found = {key: named.get((value.data_ptr(), value.shape)) for key, value in weights.items() if key not in frozen}
        checkpoint["elsewhere"] = dict.fromkeys(frozen) | {key: place for key, place in found.items() if place}
        for key in checkpoint["elsewhere"]:
            weights.pop(key, None)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights, places = checkpoint["state_dict"], checkpoint.get("elsewhere", {})
        mine = self.state_dict() if None in places.values() else {}
        opened = {file: _opened(Path(self.loads_from, file)) for file, _ in filter(None, places.values())}
        for key, place in places.items():
            weights[key] = mine[key] if place is None else opened[place[0]].get_tensor(place[1])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if cast(Any, self.owner()).control.should_epoch_stop else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        count, owner = self._targets(batch), cast(Any, self.owner())
        with owner.compute_loss_context_manager():
            loss = owner.compute_loss(self.model, owner._prepare_inputs(batch), num_items_in_batch=count)
        is_alone = self.args.gradient_accumulation_steps == 1 and not dist.is_initialized()
        is_alone = is_alone or owner.loss_is_scaled_for_ga is False
        self._note(batch, loss, 1 if count is None or is_alone else count)
        return loss if is_alone or count is None else {"loss": loss, "loss_weight": count}

    def _note(self, batch: Any, loss: Tensor, count: Any) -> None:
        inputs, strategy = batch.get(getattr(self.model, "main_input_name", "input_ids")), self.args.logging_strategy
        self.inputs += 0 if inputs is None else inputs.numel()
        self.losses.append((loss.detach(), count))
        if strategy != "no":
            self.log("loss", loss, on_step=strategy == "steps", on_epoch=strategy == "epoch")

    def _targets(self, batch: Any) -> Tensor | None:
        owner, labels = cast(Any, self.owner()), batch.get("labels")
        # Whether the loss is a mean over targets, so that batches of one step count by their targets.
        counts = owner.model_accepts_loss_kwargs or owner.compute_loss_func is not None
        if not counts or not isinstance(labels, Tensor):
            return None
        return (labels[..., 1:] if self.shifts_labels else labels).ne(-100).sum()

    def on_validation_epoch_start(self) -> None:
        from transformers.trainer_pt_utils import EvalLoopContainer

        # Predictions, labels, inputs and losses.
        self.kept = [EvalLoopContainer(self.args.eval_do_concat_batches) for _ in range(4)]
        self.values: dict[str, Any] = {}
        self.samples = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        from transformers.trainer_pt_utils import find_batch_size

        owner, args, size = cast(Any, self.owner()), self.args, find_batch_size(batch) or 1
        self.samples += size
        inputs = batch.get(getattr(self.model, "main_input_name", "input_ids"))
        loss, logits, labels = owner.prediction_step(self.model, batch, self.loss_only, ignore_keys=self.ignored)
        if "predict_with_generate" in vars(args):
            size = args.eval_batch_size  # Seq2SeqTrainer counts each batch as a full one.
        if loss is not None:
            self.log(f"{self.prefix}_loss", loss, sync_dist=True, batch_size=size)
        if logits is not None and owner.preprocess_logits_for_metrics is not None:
            logits = owner.preprocess_logits_for_metrics(logits, labels)
        losses = None if loss is None or "loss" not in args.include_for_metrics else loss.repeat(size)
        inputs = inputs if "inputs" in args.include_for_metrics else None
        for container, value in zip(self.kept, (logits, labels, inputs, losses), strict=True):
            if value is not None:
                container.add(value)
            if args.eval_accumulation_steps and (batch_idx + 1) % args.eval_accumulation_steps == 0:
                container.to_cpu_and_numpy()
        owner.events.call("on_prediction_step")

    def on_validation_epoch_end(self) -> None:
        from transformers import EvalPrediction
        from transformers.trainer_pt_utils import nested_concat
        from transformers.trainer_utils import denumpify_detensorize

        join: Any = nested_concat if self.args.eval_do_concat_batches else operator.add
        compute_metrics, prefix = cast(Any, self.owner()).compute_metrics, self.prefix
        of_all = self.trainer.strategy.gather_objects([each.get_arrays() for each in self.kept])
        parts = [[each for each in part if each is not None] for part in zip(*of_all, strict=True)]
        self.found: list[Any] = [functools.reduce(join, part) if part else None for part in parts]
        predictions, labels, inputs, losses = self.found
        if compute_metrics is None or predictions is None or labels is None:
            return
        values = compute_metrics(EvalPrediction(predictions, labels, inputs=inputs, losses=losses))
        for name, value in denumpify_detensorize(values).items():
            whole = name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"
            self.values[whole] = value
            if isinstance(value, int | float):
                self.log(whole, float(value), sync_dist=True)

    def result(self, loader: Any) -> EvalLoopOutput:
        """Return what the evaluation of a loader has found."""
        from transformers.trainer_utils import EvalLoopOutput

        loss, data = (
            self.trainer.callback_metrics.get(f"{self.prefix}_loss"),
            cast(Any, getattr(loader, "dataset", None)),
        )
        values = {**({} if loss is None else {f"{self.prefix}_loss": float(loss)}), **self.values}
        count = len(data) if hasattr(data, "__len__") else self.samples
        return EvalLoopOutput(*self.found[:2], values, count)

    # ``evaluate`` does what a validation does, also where a fit has none.
    on_test_epoch_start, on_test_epoch_end = on_validation_epoch_start, on_validation_epoch_end
    test_step = validation_step

    def configure_optimizers(self) -> Any:
        owner = cast(Any, self.owner())
        if math.isinf(steps := owner._max_steps()):
            what = f"TrainingArguments(max_steps={self.args.max_steps}): the training data has no length."
            raise make_error(ValueError, what, fix="Write the number of steps.", argument="max_steps")
        if owner.optimizer is None and owner.optimizer_cls_and_kwargs is None:
            kind, options = owner.get_optimizer_cls_and_kwargs(self.args, self.model)
            if not issubclass(kind, Optimizer) or {"params", "model", "optimizer_dict"} & options.keys():
                raise _refused("optim", self.args.optim, "Give optimizers=(optimizer, scheduler).")
        owner.create_optimizer_and_scheduler(steps)
        schedules = [] if owner.waits_for_metric() else [{"scheduler": owner.lr_scheduler, "interval": "step"}]
        return [owner.optimizer], schedules


class _StepOfProgram(_Module):
    """The step of a subclass that overrides ``training_step``: it computes gradients, and this does the rest."""

    def __init__(self, owner: TransformersTrainer) -> None:
        super().__init__(owner)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        owner, given, run = cast(Any, self.owner()), dict(batch), self.trainer.current_run
        self._note(given, owner.training_step(self.model, batch, self._targets(batch)), 1)
        engine = run.runtime.engine
        if engine.unscale is not None:
            engine.unscale(owner.optimizer)
        run.window.gradient_norm = engine.clip_norm(self.parameters(), self.args.max_grad_norm or math.inf)
        cast(Any, self.optimizers()).step()
        if not owner.waits_for_metric():
            owner.lr_scheduler.step()
        self.model.zero_grad()


def _add_noise(alpha: float, embeddings: nn.Module, _: object, output: Tensor) -> Tensor | None:
    """Add the noise of NEFTune (https://huggingface.co/papers/2310.05914) to embeddings that train."""
    size = float(alpha / torch.tensor(output.size(1) * output.size(2)).sqrt())
    return output + torch.zeros_like(output).uniform_(-size, size) if embeddings.training else None


def _precision(args: TrainingArguments) -> str | None:
    # accelerate launch may say it, too.
    mixed = vars(args).get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    mixed = "bf16" if args.bf16 else "fp16" if args.fp16 else mixed
    return {"no": None, "bf16": "bf16-mixed", "fp16": "16-mixed"}.get(mixed, mixed)


def _opened(path: Path) -> Any:
    return importlib.import_module("safetensors").safe_open(path, "pt")


def _is_sharded(model: nn.Module) -> bool:
    return any(hasattr(parameter, "placements") for parameter in model.parameters())


def _check_overrides(kind: type[TransformersTrainer]) -> None:
    """Refuse a transformers that is too old, and methods of its Trainer that a subclass overrides in vain."""
    import transformers

    if not hasattr(transformers.TrainerState, "best_global_step"):
        what = f"TransformersTrainer needs transformers 4.50 or a newer one, not {transformers.__version__}."
        raise make_error(ImportError, what, fix="Run: pip install 'transformers>=4.50'")
    for each in kind.__mro__[: kind.__mro__.index(TransformersTrainer)]:
        for name in vars(each):
            if hasattr(transformers.Trainer, name) and not hasattr(TransformersTrainer, name):
                what = f"{each.__name__}.{name}() would never be called: hasten has its own loop."
                raise make_error(TypeError, what, fix="Write a LightningModule with a step of your own.")


def _check_given(model: Any, model_init: object, eval_dataset: object, args: TrainingArguments) -> None:
    """Refuse two models, none, and an evaluation without data."""
    if (model is None) is (model_init is None):
        what = f"TransformersTrainer: there is {'no model' if model is None else 'a model and model_init, too'}."
        raise make_error(TypeError, what, fix="Give model=..., or model_init=...", argument="model")
    if eval_dataset is None and args.eval_strategy != "no":
        raise _missing(f"eval_strategy={args.eval_strategy.value!r}", "eval_dataset")


def _check_model(model: object, args: TrainingArguments) -> None:
    """Refuse the name of a model, and one whose labels cannot be smoothed."""
    if not isinstance(model, nn.Module):
        what = f"TransformersTrainer(model={model!r}): it must be a model, not a {type(model).__name__}."
        fix = f"Write AutoModelForSequenceClassification.from_pretrained({model!r}), or another class of that kind."
        raise make_error(TypeError, what, fix=fix if isinstance(model, str) else "", argument="model")
    several = getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification"
    if several and args.label_smoothing_factor:
        raise _refused(
            "label_smoothing_factor", args.label_smoothing_factor, "Leave it out: a text has several labels."
        )


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


def _values(args: TrainingArguments) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}


def _check(args: TrainingArguments) -> None:
    """Refuse the first field whose value would be ignored."""
    plain = type(args)(output_dir=args.output_dir, use_cpu=args.use_cpu)
    for name, value in _values(args).items():
        if name not in _READ and value != getattr(plain, name):
            instead = f", and {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise _refused(name, value, f"Leave it out{instead}.")
    for name in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true":
            what = f"accelerate was told to use {name}, and TransformersTrainer does not read this."
            raise make_error(ValueError, what, fix=_INSTEAD.get(name.lower(), "Leave it out."))
    if (strategy := vars(args).get("train_sampling_strategy")) == "batch_rebalance":
        raise _refused("train_sampling_strategy", strategy, "Use another.")
