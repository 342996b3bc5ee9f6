"""The module that ``hasten.Trainer`` trains: the steps of a model of transformers, and its optimizer."""

from __future__ import annotations

import functools
import inspect
import math
import operator
import os
import weakref
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hasten import LightningModule
from hasten._lib.errors import make_error
from hasten_tools.transformers import checkpoints
from hasten_tools.transformers.arguments import Batch, check_loss, refused

if TYPE_CHECKING:
    from transformers.trainer_utils import EvalLoopOutput

    from hasten_tools.transformers.trainer import TransformersTrainer


def _entry(batch: Batch, name: str) -> Any:
    """Return an entry of a batch; None if it has none, or is a tuple that a collator of the program makes."""
    return batch.get(name) if isinstance(batch, Mapping) else None


@contextmanager
def _notes_of_outputs(owner: TransformersTrainer) -> Iterator[None]:
    """Say in which method the outputs of an evaluation are missing."""
    try:
        yield
    except TypeError as error:
        if "iteration over a 0-d tensor" in str(error):
            where = f"{type(owner).__name__}.compute_loss()"
            error.add_note(f"{where} returned the loss alone. Return (loss, outputs) if return_outputs is True.")
        raise


class TransformersModule(LightningModule):
    """The steps of a model of Hugging Face."""

    def __init__(self, owner: TransformersTrainer) -> None:
        from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        from transformers.utils import can_return_loss, find_labels

        super().__init__()
        # A reference that a copy of the module shares.
        self._owner, self.model, self.args = weakref.ref(owner), owner.model, owner.args
        if (config := getattr(self.model, "config", None)) is not None and hasattr(self.args, "use_cache"):
            config.use_cache = self.args.use_cache
        inner = getattr(self.model, "get_base_model", lambda: self.model)()
        parameters = inspect.signature(inner.forward).parameters
        names = self.args.label_names
        # An empty list is the program's word that no entry of a batch is a label.
        owner.label_names = find_labels(type(inner)) if names is None else names
        owner.can_return_loss = can_return_loss(type(inner))
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
        # The folder of the checkpoint that is written, if it has the weights in other files.
        self._saves_in = ""
        self._frozen = checkpoints.frozen_weights(self.model)

    @property
    def owner(self) -> TransformersTrainer:
        """The ``TransformersTrainer``, whose methods a subclass may override."""
        owner = self._owner()
        assert owner is not None
        return owner

    @contextmanager
    def weights_elsewhere(self, folder: str) -> Iterator[None]:
        """Leave the weights that the files in ``folder`` have out of the checkpoint that the body writes there."""
        self._saves_in = folder
        try:
            yield
        finally:
            self._saves_in = ""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._saves_in and self.trainer.is_global_zero:
            frozen = self._frozen & checkpoints.frozen_weights(self.model)
            checkpoints.leave_out(checkpoint, self._saves_in, frozen, prefix="model.")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.put_back(checkpoint, os.path.dirname(self.trainer.ckpt_path or ""))

    def put_back(self, checkpoint: dict[str, Any], folder: str) -> None:
        """Put the weights into a checkpoint that are in other files of its folder."""
        frozen = checkpoints.put_back(checkpoint, folder, self)
        # What has trained in an earlier run is no weight of the frozen model.
        self._frozen &= {name.removeprefix("model.") for name in frozen}

    def on_train_batch_start(self, batch: dict[str, Any], batch_idx: int) -> int | None:
        return -1 if self.owner.control.should_epoch_stop else None

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        count, owner = self._targets(batch), self.owner
        with owner.compute_loss_context_manager():
            loss = owner.compute_loss(self.model, owner._prepare_inputs(batch), num_items_in_batch=count)
        check_loss(loss, type(owner).__name__)
        is_alone = self.args.gradient_accumulation_steps == 1 and not dist.is_initialized()
        is_alone = is_alone or owner.loss_is_scaled_for_ga is False
        self._note(batch, loss, 1 if count is None or is_alone else count)
        return loss if is_alone or count is None else {"loss": loss, "loss_weight": count}

    def _note(self, batch: Batch, loss: Tensor, count: Any) -> None:
        inputs, strategy = self._main_input(batch), self.args.logging_strategy
        self.inputs += 0 if inputs is None else inputs.numel()
        self.losses.append((loss.detach(), count))
        if strategy != "no":
            self.log("loss", loss, on_step=strategy == "steps", on_epoch=strategy == "epoch")

    def _main_input(self, batch: Batch) -> Any:
        return _entry(batch, getattr(self.model, "main_input_name", "input_ids"))

    def _targets(self, batch: Batch) -> Tensor | None:
        owner, labels = self.owner, _entry(batch, "labels")
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

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        from transformers.trainer_pt_utils import find_batch_size

        owner, args, size = self.owner, self.args, find_batch_size(batch) or 1
        self.samples += size
        inputs = self._main_input(batch)
        with _notes_of_outputs(owner):
            loss, logits, labels = owner.prediction_step(
                self.model, cast(Any, batch), self.loss_only, ignore_keys=self.ignored
            )
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
        compute_metrics, prefix = self.owner.compute_metrics, self.prefix
        of_all = self.trainer.strategy.gather_objects([each.get_arrays() for each in self.kept])
        parts = [[each for each in part if each is not None] for part in zip(*of_all, strict=True)]
        self.found: list[Any] = [functools.reduce(join, part) if part else None for part in parts]
        predictions, labels, inputs, losses = self.found
        if compute_metrics is None or predictions is None or labels is None:
            return
        values: Any = compute_metrics(EvalPrediction(predictions, labels, inputs=inputs, losses=losses))
        if not isinstance(values, Mapping):
            what = f"compute_metrics() returned {values!r}, and must return a dict of values."
            raise make_error(
                TypeError, what, fix="Return {'accuracy': accuracy}, for instance.", argument="compute_metrics"
            )
        for name, value in denumpify_detensorize(values).items():
            whole = name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"
            self.values[whole] = value
            if isinstance(value, int | float):
                self.log(whole, float(value), sync_dist=True)

    def result(self, loader: DataLoader[Any]) -> EvalLoopOutput:
        """Return what the evaluation of a loader has found."""
        from transformers.trainer_utils import EvalLoopOutput, has_length

        predictions, labels, *_ = self.found
        loss = self.trainer.callback_metrics.get(f"{self.prefix}_loss")
        losses = {} if loss is None else {f"{self.prefix}_loss": float(loss)}
        if isinstance(getattr(loader, "dataset", None), Sized):
            count = len(cast(Sized, loader.dataset))
        else:
            count = self.owner.num_examples(loader) if has_length(loader) else self.samples
        return EvalLoopOutput(predictions, labels, {**losses, **self.values}, count)

    # ``evaluate`` does what a validation does, also where a fit has none.
    on_test_epoch_start, on_test_epoch_end = on_validation_epoch_start, on_validation_epoch_end
    test_step = validation_step

    def configure_optimizers(self) -> Any:
        owner = self.owner
        if math.isinf(steps := owner._max_steps()):
            what = f"TrainingArguments(max_steps={self.args.max_steps}): the training data has no length."
            raise make_error(ValueError, what, fix="Write the number of steps.", argument="max_steps")
        if owner.optimizer is None and owner.optimizer_cls_and_kwargs is None:
            kind, options = owner.get_optimizer_cls_and_kwargs(self.args, self.model)
            if not issubclass(kind, Optimizer) or {"params", "model", "optimizer_dict"} & options.keys():
                raise refused(self.args, "optim", "Give optimizers=(optimizer, scheduler).")
        owner.create_optimizer_and_scheduler(steps)
        schedules = [] if owner.waits_for_metric() else [{"scheduler": owner.lr_scheduler, "interval": "step"}]
        return [owner.optimizer], schedules


class ModuleOfStep(TransformersModule):
    """The step of a subclass that overrides ``training_step``: it computes gradients, and this does the rest."""

    def __init__(self, owner: TransformersTrainer) -> None:
        super().__init__(owner)
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        owner, run = self.owner, self.trainer.current_run
        # The program may take entries out of its batch.
        given = dict(batch) if isinstance(batch, Mapping) else batch
        self._note(given, owner.training_step(self.model, cast(Any, batch), self._targets(batch)), 1)
        engine = run.runtime.engine
        assert owner.optimizer is not None
        if engine.unscale is not None:
            engine.unscale(owner.optimizer)
        run.window.gradient_norm = engine.clip_norm(self.parameters(), self.args.max_grad_norm or math.inf)
        cast(Any, self.optimizers()).step()
        if not owner.waits_for_metric():
            owner.lr_scheduler.step()
        self.model.zero_grad()
