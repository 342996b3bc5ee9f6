"""``TransformersTrainer``: the methods of ``transformers.Trainer``, with ``hasten.Trainer``."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from hasten import Trainer, seed_everything
from hasten._lib import check
from hasten._lib.errors import make_error, with_article
from hasten._lib.optional import need
from hasten._lib.tree import move_to, sharded_parameter
from hasten.callbacks import Callback, Checkpoint, ModelCheckpoint
from hasten.checkpoint import files
from hasten.data.loader_parts import with_attributes
from hasten.loggers import CSVLogger
from hasten.loops.evaluate import evaluate_within
from hasten.machine.collectives import world_size
from hasten_tools.transformers import checkpoints
from hasten_tools.transformers.arguments import (
    LOGGERS,
    OTHER_NAMES,
    Batch,
    DataSets,
    Samples,
    check_collator,
    check_fields,
    check_given,
    check_model,
    check_names,
    check_optimizers,
    check_overrides,
    check_samples,
    missing,
    precision_of,
    values_of,
)
from hasten_tools.transformers.events import Events
from hasten_tools.transformers.module import ModuleOfStep, TransformersModule

if TYPE_CHECKING:
    from transformers import TrainerCallback, TrainingArguments
    from transformers.trainer_utils import EvalLoopOutput, PredictionOutput, TrainOutput

# The fields of TrainingArguments that arguments of a DataLoader have: dataloader_num_workers, for instance.
_OF_LOADERS = (
    "drop_last",
    "in_order",
    "multiprocessing_context",
    "num_workers",
    "persistent_workers",
    "prefetch_factor",
)


def _method(trainer: object, kind: str, name: str) -> Any:
    """Return a method of a Trainer of transformers, bound to ``trainer``; its import, which takes seconds, is late."""
    return inspect.getattr_static(getattr(importlib.import_module("transformers"), kind), name).__get__(trainer)


def _borrowed(name: str) -> Any:
    """Return a method of the Trainers of transformers that reads only what a ``TransformersTrainer`` has, too."""

    def call(self: TransformersTrainer, *args: Any, **given: Any) -> Any:
        return _method(self, "Seq2SeqTrainer", name)(*args, **given)

    return call


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

    # What programs ask of any Trainer of transformers.
    deepspeed = None
    is_fsdp_enabled = is_fsdp_xla_enabled = is_model_parallel = False
    place_model_on_device = True

    # The code of transformers does these:
    # data,
    _get_collator_with_removed_columns = _borrowed("_get_collator_with_removed_columns")
    _remove_unused_columns = _borrowed("_remove_unused_columns")
    _set_signature_columns_if_needed = _borrowed("_set_signature_columns_if_needed")
    # the optimizer and its schedule,
    create_optimizer = _borrowed("create_optimizer")
    create_optimizer_and_scheduler = _borrowed("create_optimizer_and_scheduler")
    create_scheduler = _borrowed("create_scheduler")
    get_decay_parameter_names = _borrowed("get_decay_parameter_names")
    get_learning_rates = _borrowed("get_learning_rates")
    _get_learning_rate = _borrowed("_get_learning_rate")
    # the model,
    call_model_init = _borrowed("call_model_init")
    floating_point_ops = _borrowed("floating_point_ops")
    get_num_trainable_parameters = _borrowed("get_num_trainable_parameters")
    load_generation_config = _borrowed("load_generation_config")
    _move_model_to_device = _borrowed("_move_model_to_device")
    _pad_tensors_to_max_len = _borrowed("_pad_tensors_to_max_len")
    # callbacks,
    pop_callback = _borrowed("pop_callback")
    remove_callback = _borrowed("remove_callback")
    # results,
    log_metrics = _borrowed("log_metrics")
    metrics_format = _borrowed("metrics_format")
    num_examples = _borrowed("num_examples")
    save_metrics = _borrowed("save_metrics")
    save_state = _borrowed("save_state")
    _determine_best_metric = _borrowed("_determine_best_metric")
    # processes,
    is_local_process_zero = _borrowed("is_local_process_zero")
    is_world_process_zero = _borrowed("is_world_process_zero")
    # the Hub,
    create_model_card = _borrowed("create_model_card")
    init_hf_repo = _borrowed("init_hf_repo")
    push_to_hub = _borrowed("push_to_hub")
    _finish_current_push = _borrowed("_finish_current_push")
    _push_from_checkpoint = _borrowed("_push_from_checkpoint")
    # the search of hyperparameters.
    _get_output_dir = _borrowed("_get_output_dir")
    _hp_search_setup = _borrowed("_hp_search_setup")
    _report_to_hp_search = _borrowed("_report_to_hp_search")

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

        check_overrides(type(self), TransformersTrainer)
        owner = "TransformersTrainer"
        check.instance(owner, "args", args, TrainingArguments, "TrainingArguments(...)", allow_none=True)
        check.instance(owner, "callbacks", callbacks, (list, tuple), "a list of callbacks", allow_none=True)
        args = TrainingArguments("tmp_trainer") if args is None else args
        check_fields(args)
        check_given(model, model_init, eval_dataset, args)
        check_collator(data_collator)
        check_optimizers(optimizers, model_init, optimizer_cls_and_kwargs)
        seed_everything(args.seed, verbose=False)
        set_verbosity(args.get_process_log_level())
        self.model_init = model_init
        model = model if model_init is None else self.call_model_init()
        check_model(model, args)
        if (generation := vars(args).get("generation_config")) is not None:
            cast(Any, model).generation_config = self.load_generation_config(generation)
        processing_class = processing_class or arguments.pop("tokenizer", None)  # its name in transformers 4
        known = inspect.signature(TransformersTrainer).parameters
        check_names(arguments.keys() - inspect.signature(Trainer).parameters.keys(), known, args)
        self.model: nn.Module = cast(nn.Module, model)
        self.model_wrapped = self.model
        self.args, self.processing_class = args, processing_class
        self._train_batch_size = args.train_batch_size
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        pads = DataCollatorWithPadding(processing_class) if hasattr(processing_class, "pad") else None
        self.data_collator = data_collator or pads or default_data_collator
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self.optimizer_cls_and_kwargs, self._created_lr_scheduler = optimizer_cls_and_kwargs, False
        self.label_smoother = LabelSmoother(args.label_smoothing_factor) if args.label_smoothing_factor else None
        self.state, self.control, self.hub_model_id = TrainerState(), TrainerControl(), None
        self._signature_columns: list[str] | None = None
        self._memory_tracker = TrainerMemoryTracker(skip_memory_metrics=True)
        self.callback_handler = CallbackHandler([DefaultFlowCallback()], self.model, processing_class, *optimizers)
        self.events = Events(self)
        others = self._add_callbacks(callbacks or ())
        joined = dist.is_initialized()
        self._limit = arguments.pop("limit_val_batches", None)
        self._given = lambda: {"devices": "auto" if joined else 1, **self._arguments(others), **arguments}
        self._steps_itself = type(self).training_step is not TransformersTrainer.training_step
        self._make_module = ModuleOfStep if self._steps_itself else TransformersModule
        if self._steps_itself:
            self.current_gradient_accumulation_steps = 1
        self.is_in_train = False
        self.module = self._make_module(self)
        self.trainer = self._make_trainer()
        self._check_devices(arguments.get("devices"))
        self._place_model()
        if args.push_to_hub:
            self.init_hf_repo()
        if args.should_save:
            os.makedirs(args.output_dir, exist_ok=True)
        self.events.call("on_init_end")

    def _place_model(self) -> None:
        """Move the model to its device, where programs expect it before and after a run; not one that is divided."""
        self.trainer.strategy.sharding.place(self.module)

    def _check_devices(self, devices: object) -> None:
        if self.trainer.num_devices > 1 and not dist.is_initialized():
            what = f"TransformersTrainer(devices={devices!r}) starts processes after TrainingArguments."
            fix = f"Leave it out, and write hasten launch --procs {self.trainer.num_devices} train.py."
            raise make_error(ValueError, what, fix=fix, argument="devices")

    def _add_callbacks(self, given: Sequence[Any]) -> list[Callback]:
        """Add the callbacks of transformers, and return those of hasten."""
        from transformers.integrations import get_reporting_integration_callbacks
        from transformers.trainer_callback import PrinterCallback

        more = get_reporting_integration_callbacks([name for name in self.args.report_to if name not in LOGGERS])
        for each in (*more, *given, *([PrinterCallback] if self.args.disable_tqdm else [])):
            if not isinstance(each, Callback):
                self.add_callback(each)
        return [each for each in given if isinstance(each, Callback)]

    # What the search of hyperparameters of transformers reads.
    hp_search_backend = hp_name = _trial = None
    is_deepspeed_enabled = is_fsdp_xla_v2_enabled = False

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], Any] | None = None,
        compute_objective: Callable[[dict[str, float]], float] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: str | None = None,
        hp_name: Callable[[Any], str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Search hyperparameters by the code of transformers, with optuna or wandb; the arguments are those there."""
        from transformers.hyperparameter_search import default_hp_search_backend

        backend = backend or default_hp_search_backend()
        if backend == "ray":
            what = "TransformersTrainer.hyperparameter_search(backend='ray'): ray copies a trainer to other processes, "
            what += "and a TransformersTrainer cannot be copied."
            raise make_error(ValueError, what, fix="Write backend='optuna', or 'wandb'.", argument="backend")
        search = _method(self, "Trainer", "hyperparameter_search")
        return search(hp_space, compute_objective, n_trials, direction, backend, hp_name, **kwargs)

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
            self.model, self.optimizer, self.lr_scheduler = self.call_model_init(trial), None, None
            self.module = self._make_module(self)
        self.model_wrapped = self.model
        self._hp_search_setup(trial)
        self._train_batch_size = args.train_batch_size
        if self.trainer.global_step or values_of(args) != self._made_for:
            # Programs change arguments before they train.
            check_fields(args)
            self.trainer = self._make_trainer()
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self._check_step()
        self.state, trainer, began = TrainerState(), self.trainer, time.time()
        start = self._checkpoint_of(resume_from_checkpoint)
        self._prepare_model()
        self.model.train()
        loader = self.get_train_dataloader()
        self._evaluated_at = -1
        events.forget()
        events.ignored, self.is_in_train = ignore_keys_for_eval, True
        noise: Any = nullcontext()
        if args.neftune_noise_alpha is not None:
            add = functools.partial(_add_noise, args.neftune_noise_alpha)
            noise = cast(Any, self.model).get_input_embeddings().register_forward_hook(add)
        with noise:
            # Evaluations have loaders of their own.
            trainer.fit(self.module, loader, [[None]], ckpt_path=start)
        self._place_model()
        steps, state = self.state.global_step - events.first_step, self.state
        self.model.train(self._evaluated_at != state.global_step)
        samples: float = steps * args.train_batch_size * args.gradient_accumulation_steps * trainer.world_size
        if events.epoch_steps is not None and args.max_steps <= 0:
            samples = self.num_examples(loader) * steps / events.epoch_steps
        metrics = speed_metrics("train", began, num_samples=samples, num_steps=steps)
        metrics["total_flos"] = state.total_flos
        metrics["train_loss"] = loss = (events.logged + float(events.total)) / max(steps, 1)
        self.log(metrics)
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            saved = files.load(os.path.join(state.best_model_checkpoint, checkpoints.STATE_FILE))
            self.module.put_back(saved, state.best_model_checkpoint)
            self.module.load_state_dict(saved["state_dict"])
        if args.save_total_limit == 1 and state.best_model_checkpoint is not None:
            self._remove_old({state.best_model_checkpoint}, limit=1)
        events.call("on_train_end")
        self._finish_current_push()
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
        evaluate = _method(self, "Trainer", "evaluate")
        return cast("dict[str, Any]", evaluate(eval_dataset, ignore_keys, metric_key_prefix))

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
        predict = _method(self, "Trainer", "predict")
        return cast("PredictionOutput", predict(test_dataset, ignore_keys, metric_key_prefix))

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
        self.callback_handler.eval_dataloader = dataloader
        module.prefix, module.ignored = metric_key_prefix, ignore_keys
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
            self._place_model()
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
        if not vars(self.args).get("predict_with_generate") or prediction_loss_only:
            kind, generation = "Trainer", {}
        else:
            kind = "Seq2SeqTrainer"
        step = _method(self, kind, "prediction_step")
        return cast("tuple[Any, Any, Any]", step(model, inputs, prediction_loss_only, ignore_keys, **generation))

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

    def _prepare_inputs(self, inputs: Batch) -> Any:
        """Return a copy of a batch, on the device: a program may take entries out. A subclass can override this."""
        if len(inputs) == 0:
            self._set_signature_columns_if_needed()
            known = ", ".join(self._signature_columns or ())
            what = f"A batch is empty: {type(self.model).__name__}.forward() takes none of the columns of the data."
            fix = f"Rename them ({known}), or write TrainingArguments(remove_unused_columns=False)."
            raise make_error(ValueError, what, fix=fix, argument="remove_unused_columns")
        return self._prepare_input(inputs)

    def _prepare_input(self, data: Any) -> Any:
        if isinstance(data, Mapping):
            return cast(Any, type(data))({name: self._prepare_input(value) for name, value in data.items()})
        if type(data) in (list, tuple):
            return type(data)([self._prepare_input(each) for each in data])
        return move_to(data, self.trainer.strategy.root_device)

    def _wrap_model(self, model: nn.Module, *_: object, **__: object) -> nn.Module:
        return model

    # What prediction_step of transformers calls.
    compute_loss_context_manager = staticmethod(nullcontext)

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return nullcontext, inputs

    def _get_num_items_in_batch(self, batches: list[Any], device: object = None) -> Tensor | None:
        return self.module._targets(batches[0])

    @functools.cached_property
    def accelerator(self) -> Any:
        """The ``Accelerator`` that methods of subclasses ask for the model and the processes."""
        made = importlib.import_module("accelerate").Accelerator()
        made.backward = lambda loss, **_: self.trainer.manual_backward(loss)
        made.prepare_data_loader = lambda loader, *_, **__: self._in_seeded_order(loader)
        return made

    def _in_seeded_order(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader of a subclass in the order of accelerate; a run divides and moves its batches itself."""
        if dist.is_initialized() or not isinstance(loader.sampler, RandomSampler):
            return loader
        sampler, batch_sampler = self._seeded(loader.sampler), cast(Any, copy.copy(loader.batch_sampler))
        if batch_sampler is not None:
            batch_sampler.sampler = sampler
        return with_attributes(loader, sampler=sampler, batch_sampler=batch_sampler)

    def _seeded(self, sampler: RandomSampler) -> Sampler[int]:
        """Return the sampler of accelerate, which draws the order of an epoch from a seed."""
        kind: Any = importlib.import_module("accelerate.data_loader").SeedableRandomSampler
        given = {"replacement": sampler.replacement, "num_samples": sampler._num_samples}
        return cast("Sampler[int]", kind(sampler.data_source, data_seed=self.args.data_seed, **given))

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
        batch: Any = inputs
        if not isinstance(batch, Mapping):
            what = f"The data_collator returned {with_article(type(batch))}, and a model takes its batch by name."
            fix = "Return a dict, such as {'input_ids': ..., 'labels': ...}."
            raise make_error(TypeError, what, fix=fix, argument="data_collator")
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
            raise missing("train()", "train_dataset")
        return self._loader(self.train_dataset, training=True)

    def get_eval_dataloader(self, eval_dataset: Samples | str | None = None) -> DataLoader[Any]:
        """Return a loader of ``eval_dataset``, of one in it by its name, or of another data set."""
        if eval_dataset is None and self.eval_dataset is None:
            raise missing("evaluate()", "eval_dataset")
        sets = self.eval_dataset if isinstance(self.eval_dataset, dict) else {}
        if isinstance(eval_dataset, str) and eval_dataset not in sets:
            what = f"TransformersTrainer.evaluate({eval_dataset!r}): eval_dataset is "
            what += f"a dict of {', '.join(sets)}." if sets else "not a dict of data sets."
            raise make_error(ValueError, what, fix="Give one of its names, or a data set.", argument="eval_dataset")
        given = sets[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        return self._loader(self.eval_dataset if given is None else given)

    get_test_dataloader = get_eval_dataloader

    def _get_train_sampler(self, train_dataset: Samples | None = None) -> Sampler[int] | None:
        """Return the order of transformers for the training data; a subclass can override this, and the next."""
        given = [] if train_dataset is None or train_dataset is self.train_dataset else [train_dataset]
        return cast("Sampler[int] | None", _method(self, "Trainer", "_get_train_sampler")(*given))

    def _get_eval_sampler(self, eval_dataset: Samples) -> Sampler[int] | None:
        """Return None: data is evaluated in its order."""
        return None

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[type[Optimizer], dict[str, Any]]:
        """Return the class of the optimizer that ``args`` name, and its arguments, by the code of transformers."""
        found = importlib.import_module("transformers").Trainer.get_optimizer_cls_and_kwargs(args, model)
        return cast("tuple[type[Optimizer], dict[str, Any]]", found)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder that ``from_pretrained`` reads; by default the ``output_dir`` of the arguments."""
        if sharded_parameter(self.model) is not None:
            what = "TransformersTrainer.save_model(): each process has a part of the weights."
            fix = "Call hasten.module.pretrained.save_pretrained(trainer.model, folder) on all of them."
            raise make_error(RuntimeError, what, fix=fix)
        if self.trainer.is_global_zero:
            self._save(output_dir)
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

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
        what, fix = f"{type(self).__name__!r} object has no attribute {name!r}.", OTHER_NAMES.get(name, "")
        if not fix and hasattr(getattr(sys.modules.get("transformers"), "Trainer", None), name):
            fix = "Only transformers.Trainer has it: use that, or write a LightningModule with a step of your own."
        raise make_error(AttributeError, what, fix=fix)

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
        name = os.path.join(self._get_output_dir(trial), "checkpoint-{}").format
        folder = name(state.global_step)
        is_sharded = sharded_parameter(self.model) is not None
        if not is_sharded:
            if trainer.is_global_zero:
                # Of an earlier run: it would be a checkpoint with weights of this one.
                files.remove(os.path.join(folder, checkpoints.STATE_FILE))
            self.save_model(folder, _internal_call=True)
        # The folder of this step may still be missing: the first process makes it.
        if (best := name(state.best_global_step)) == folder or os.path.exists(best):
            state.best_model_checkpoint = best
        with nullcontext() if is_sharded else self.module.weights_elsewhere(folder):
            trainer.save_checkpoint(os.path.join(folder, checkpoints.STATE_FILE), weights_only=args.save_only_model)
        if trainer.is_global_zero:
            state.save_to_json(os.path.join(folder, "trainer_state.json"))
            if args.push_to_hub:
                self._push_from_checkpoint(folder)
            if (args.save_total_limit or 0) > 0:
                self._remove_old({folder, state.best_model_checkpoint or folder}, limit=args.save_total_limit)

    def _remove_old(self, kept: set[str], *, limit: int) -> None:
        """Remove the oldest folders of checkpoints that need not be kept, until there are as many as the limit."""
        others = [path for path in checkpoints.folders(self._get_output_dir(self._trial)) if path not in kept]
        room = max(limit - len(kept), 0)
        for path in others[: max(len(others) - room, 0)] if self.trainer.is_global_zero else ():
            checkpoints.remove(path)

    def _checkpoint_of(self, given: str | bool | None) -> str | None:
        """Return the file with the state of the run to resume; that of a run that was stopped may be the newest."""
        kinds, allowed = (str, os.PathLike, bool), "a folder, a .ckpt file or True"
        check.instance("train", "resume_from_checkpoint", given, kinds, allowed, allow_none=True, error=TypeError)
        if not given or str(given).endswith(".ckpt"):
            return cast("str | None", given or None)
        folder = Path(self.args.output_dir if given is True else given)
        start = checkpoints.newest(folder, self.trainer)
        if start is None:
            none = f"{folder} has no checkpoint of hasten, a .ckpt file."
            what = f"train(resume_from_checkpoint={given!r}): {none if folder.is_dir() else files.not_found(folder)}"
            fix = "Leave it out. Of a checkpoint of transformers, from_pretrained reads the model."
            raise make_error(ValueError, what, fix=fix, argument="resume_from_checkpoint")
        if not files.may_resume(start):
            what = f"train(resume_from_checkpoint={given!r}): {start} has the weights alone, no state of a run."
            fix = "Leave it out, and train the model of from_pretrained; write save_only_model=False for other runs."
            raise make_error(ValueError, what, fix=fix, argument="resume_from_checkpoint")
        return start

    def _max_steps(self) -> Any:
        """Return the number of steps of the fit that runs, infinite if it is not known."""
        args, planned, trainer = self.args, self.trainer.estimated_stepping_batches, self.trainer
        # Other epochs than those of args may have been given.
        if args.max_steps > 0 or math.ceil(args.num_train_epochs) != trainer.max_epochs or math.isinf(planned):
            return planned
        each = math.ceil(trainer.num_training_batches / args.gradient_accumulation_steps)
        return min(planned, math.ceil(args.num_train_epochs * each))

    def _sampler_of(self, dataset: Any, *, training: bool) -> Sampler[int] | None:
        """Return the order of transformers.Trainer, or of a subclass; None for that of the data."""
        if isinstance(dataset, IterableDataset):
            return None
        if not training:
            return self._get_eval_sampler(dataset)
        # Older versions of transformers, and programs for them, give it no data.
        given = [dataset] if inspect.signature(self._get_train_sampler).parameters else []
        return self._get_train_sampler(*given)

    def waits_for_metric(self) -> bool:
        """Return whether the scheduler steps after each evaluation."""
        is_greedy = type(self.lr_scheduler).__name__ == "GreedyLR"
        return is_greedy or isinstance(self.lr_scheduler, ReduceLROnPlateau)

    def _make_trainer(self) -> Trainer:
        self._made_for = values_of(self.args)
        return Trainer(**self._given())

    def _arguments(self, callbacks: list[Callback]) -> dict[str, Any]:
        """Return the arguments of ``hasten.Trainer``."""
        args, stopped = self.args, []
        if args.save_strategy != "no":
            # It saves runs that are stopped from outside; events has the others saved.
            stopped = [ModelCheckpoint(args.output_dir, save_top_k=0, every_n_epochs=0)]
            stopped[0].HOW_TO_RESUME = "call train(resume_from_checkpoint=True)"
        savers = [each for each in (*callbacks, *stopped) if isinstance(each, Checkpoint)]
        loggers = [LOGGERS[name](args) for name in args.report_to if name in LOGGERS]
        given: dict[str, Any] = {
            "max_epochs": -1 if args.max_steps > 0 else math.ceil(args.num_train_epochs),
            "max_steps": args.max_steps if args.max_steps > 0 else -1,
            "accumulate_grad_batches": args.gradient_accumulation_steps,
            # An infinite limit clips nothing; it has the norm computed, which is logged.
            "gradient_clip_val": None if self._steps_itself else args.max_grad_norm or math.inf,
            "precision": precision_of(args),
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
        args, collate, use = self.args, self.data_collator, "training" if training else "evaluation"
        check_samples(dataset, "train_dataset" if training else "eval_dataset")
        if isinstance(dataset, getattr(sys.modules.get("datasets"), "Dataset", ())):
            dataset = self._remove_unused_columns(dataset, description=use)
        else:
            collate = self._get_collator_with_removed_columns(collate, description=use)
        sampler, shuffles = self._sampler_of(dataset, training=training), False
        if dist.is_initialized() and isinstance(sampler, RandomSampler | SequentialSampler | None):
            sampler, shuffles = None, isinstance(sampler, RandomSampler)
        elif isinstance(sampler, RandomSampler):
            sampler = self._seeded(sampler)
        return DataLoader(
            dataset,
            batch_size=args.per_device_train_batch_size if training else args.per_device_eval_batch_size,
            sampler=sampler,
            shuffle=shuffles,
            collate_fn=collate,
            pin_memory=args.dataloader_pin_memory and torch.accelerator.is_available(),
            **{
                name: getattr(args, f"dataloader_{name}") for name in _OF_LOADERS if hasattr(args, f"dataloader_{name}")
            },
        )


def _add_noise(alpha: float, embeddings: nn.Module, _: object, output: Tensor) -> Tensor | None:
    """Add the noise of NEFTune (https://huggingface.co/papers/2310.05914) to embeddings that train."""
    size = float(alpha / torch.tensor(output.size(1) * output.size(2)).sqrt())
    return output + torch.zeros_like(output).uniform_(-size, size) if embeddings.training else None
