"""Observe a checked run: batches, outputs, layers, gradients, losses and times."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hasten._lib.device import synchronize
from hasten._lib.errors import make_error
from hasten._lib.explain import describe_batch
from hasten._lib.torch_private import is_transformed
from hasten._lib.tree import children, leaves
from hasten.logged_value import batch_size_of, is_metric
from hasten.module.callback import Callback
from hasten_tools.preflight.waits import Waits

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from hasten import LightningModule, Trainer
    from hasten.types import Batch, StepOutput
    from hasten_tools.preflight.report import Status

# Training batches of a check: in the first everything is looked at, in the second what backward keeps, and the third
# is timed.
TRAIN_BATCHES = 3


class Observations:
    """The observations of a checked run so far.

    Attributes:
        batches: by stage, one text for each loader.
        outputs: by stage, what its step returned.
        sizes: by stage, the samples of the first batch.
        bad_input: by stage, where the first batch has a number that is not finite.
        bad_layer: the first layer whose output was not finite: name, class, whether its input was finite.
        loss: the first loss.
        with_gradient: ids of the parameters that got a gradient.
        bad_gradients: names of the parameters whose gradient was not finite.
        all_zero: whether all gradients of the first batch were 0.
        first_batch: the first training batch and its index.
        bad_function: a sentence that names the function whose gradient is not finite.
        seconds: of each training batch.
        kept_bytes: memory that a forward keeps for its backward, without parameters; None if it was not measured.
        calls: layer, arguments and keywords of its first call in a step, by its name.
        losses: sentences about calls of loss functions: (status, what was seen, what to write).
        targets: the labels of the first cross entropy, the number of classes, and the label that is ignored.
        evaluated: the stages whose steps have run.
        trained: training batches done.
        waits: by place in the program, how many batches and which calls let a device wait there.

    """

    def __init__(self) -> None:
        self.batches: dict[str, list[str]] = {}
        self.outputs: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.bad_input: dict[str, str] = {}
        self.bad_layer: tuple[str, str, bool] | None = None
        self.loss: Tensor | None = None
        self.with_gradient: set[int] = set()
        self.bad_gradients: list[str] = []
        self.all_zero = True
        self.first_batch: tuple[Any, int] | None = None
        self.seconds: list[float] = []
        self.kept_bytes: int | None = None
        self.calls: dict[str, tuple[nn.Module, Any, Any]] = {}
        self.losses: list[tuple[Status, str, str]] = []
        self.targets: tuple[Tensor, int, int] | None = None
        self.evaluated: set[str] = set()
        self.trained = 0
        self.bad_function = ""
        self.waits: dict[str, tuple[int, dict[str, None], str]] = {}


class NotFinite(BaseException):
    """Ends the training of a check before weights become nan; a user's ``except Exception`` does not catch it."""


class StepWatch(Callback):
    """Watches the batches of a checked run, and records its observations in ``seen``.

    ``name_function`` gets the batch and its index, and returns a sentence that names the function whose gradient is not
    finite.
    """

    def __init__(
        self, seen: Observations, name_function: Callable[[Any, int], str] = lambda batch, batch_idx: ""
    ) -> None:
        self._seen = seen
        self.name_function = name_function
        self.has_scaler = False
        self._block = ExitStack()
        self._hooks = ExitStack()
        self._begun = 0.0

    def watch_gradients(self, module: nn.Module) -> None:
        """Note which parameters get gradients, until ``close``."""
        seen = self._seen
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad or not parameter.is_leaf:
                continue

            def note(parameter: Tensor, name: str = name) -> None:
                seen.with_gradient.add(id(parameter))
                gradient = parameter.grad
                if gradient is None or gradient.is_sparse or seen.trained:
                    return
                if not bool(torch.isfinite(gradient).all()):
                    seen.bad_gradients.append(name)
                seen.all_zero = seen.all_zero and not bool(gradient.any())

            handle = parameter.register_post_accumulate_grad_hook(note)
            self._hooks.callback(handle.remove)

    def close(self) -> None:
        """Remove everything from the module."""
        self._block.close()
        self._hooks.close()

    # -- training

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        """Look at the batch, and watch its step."""
        self._block.close()
        seen = self._seen
        if batch_idx == 0:
            self._look_at("train", batch, 0)
            seen.first_batch = batch, batch_idx
            self._watch_step(pl_module)
        elif batch_idx == 1:
            kept = _SavedForBackward(pl_module)
            hooks = torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor)
            self._block.enter_context(hooks)
            self._block.callback(lambda: setattr(seen, "kept_bytes", kept.bytes))
        if batch_idx < 2:
            self._block.enter_context(Waits(seen.waits))
        self._begun = time.perf_counter()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Keep the first loss; end here if it is not finite."""
        if self._seen.loss is None:
            self._seen.loss = loss.detach().clone()
            if not bool(torch.isfinite(loss).all()):
                raise NotFinite

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """End here if a gradient is not finite."""
        seen = self._seen
        # A scaler leaves such steps out, and most runs in 16 bits begin with some.
        if seen.bad_gradients and not self.has_scaler:
            if pl_module.automatic_optimization and seen.first_batch is not None:
                self._block.close()
                seen.bad_function = self.name_function(*seen.first_batch)
            raise NotFinite

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        """Note the outputs and the time."""
        synchronize(trainer.strategy.root_device)
        seen = self._seen
        seen.seconds.append(time.perf_counter() - self._begun)
        self._block.close()
        seen.trained += 1
        if "train" not in seen.outputs:
            seen.outputs["train"] = _described(outputs)
            if seen.loss is None and isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), Tensor):
                seen.loss = outputs["loss"].detach()
        if batch_idx + 1 >= TRAIN_BATCHES:
            # Modules that step by hand, or whose data continues after its limit.
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the run after an epoch."""
        trainer.should_stop = True

    # -- evaluation

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Look at the batch, and watch its step."""
        self._block.close()
        if batch_idx == 0:
            self._look_at(_stage_of(trainer), batch, dataloader_idx)
            self._watch_step(pl_module)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: StepOutput,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Note the outputs."""
        self._block.close()
        stage = _stage_of(trainer)
        self._seen.evaluated.add(stage)
        self._seen.outputs.setdefault(stage, _described(outputs))

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    # -- internal functions

    def _look_at(self, stage: str, batch: Any, loader: int) -> None:
        seen = self._seen
        found = seen.batches.setdefault(stage, [])
        if len(found) <= loader:
            where = next((f" on {leaf.device}" for leaf in leaves(batch) if isinstance(leaf, Tensor)), "")
            found.append(describe_batch(batch) + where)
        size, is_certain = batch_size_of(batch)
        if is_certain:
            seen.sizes.setdefault(stage, size)
        path = first_bad_place(batch, "batch")
        if path is not None:
            seen.bad_input.setdefault(stage, path)

    def _watch_step(self, module: nn.Module) -> None:
        seen = self._seen
        self._block.enter_context(_Losses(seen))
        for name, layer in module.named_modules():
            if is_metric(layer):
                continue
            before = layer.register_forward_pre_hook(_remembering(seen, name), with_kwargs=True)
            self._block.callback(before.remove)
            if name:
                after = layer.register_forward_hook(_finding(seen, name))
                self._block.callback(after.remove)


def _stage_of(trainer: Trainer) -> str:
    stage = trainer.state.stage
    return "validate" if stage is None or trainer.sanity_checking else stage.value


def _remembering(seen: Observations, name: str) -> Callable[..., None]:
    def note(layer: nn.Module, args: Any, kwargs: Any) -> None:
        # The call in eval mode, where there is one, is the one to repeat.
        if name not in seen.calls or (not layer.training and seen.calls[name][0].training):
            seen.calls[name] = layer, args, kwargs

    return note


def _finding(seen: Observations, name: str) -> Callable[..., None]:
    def look(layer: nn.Module, args: Any, output: Any) -> None:
        # Calls that end first are looked at first: a part before the whole.
        # In torch.vmap nothing can be read.
        if seen.bad_layer is None and not is_transformed() and first_bad_place(output, "") is not None:
            is_fine = first_bad_place(args, "") is None
            seen.bad_layer = name, type(layer).__name__, is_fine

    return look


def first_bad_place(thing: object, path: str) -> str | None:
    """Return where data has a number that is not finite, as Python would reach it; None if it has none.

    Example::

        >>> first_bad_place({"x": torch.tensor([1.0, float("nan")])}, "batch")
        "batch['x']"

    """
    if isinstance(thing, Tensor):
        floats = thing.is_floating_point() or thing.is_complex()
        bad = floats and thing.numel() and thing.layout == torch.strided and not bool(torch.isfinite(thing).all())
        return path if bad else None
    found = (first_bad_place(value, f"{path}{step}") for step, value in children(thing))
    return next((place for place in found if place is not None), None)


def _described(outputs: object) -> str:
    if isinstance(outputs, Mapping) and set(outputs) == {"loss"}:
        return f"loss {describe_batch(outputs['loss'])}"
    return "nothing" if outputs is None or outputs == {} else describe_batch(outputs)


class _SavedForBackward:
    """Adds up the memory that autograd keeps; parameters do not count, and views of the same memory count once."""

    def __init__(self, module: nn.Module) -> None:
        self.bytes = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in module.parameters() if _has_memory(tensor)}

    def pack(self, tensor: Tensor) -> Tensor:
        if _has_memory(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._known:
                self._known.add(storage.data_ptr())
                self.bytes += storage.nbytes()
        return tensor


def _has_memory(tensor: Tensor) -> bool:
    # Other classes, such as DTensor, have no memory themselves.
    return tensor.layout == torch.strided and not tensor.is_meta and type(tensor) in (Tensor, nn.Parameter)


# -- calls of loss functions


class LabelsOutside(ValueError):
    """Raised before a kernel reads beyond its memory, after which a GPU cannot be used any more."""


_F = nn.functional
_CROSS_ENTROPY = {_F.cross_entropy, _F.nll_loss}


class _Losses(TorchFunctionMode):
    """Checks the arguments of loss functions and embeddings before they are called."""

    def __init__(self, seen: Observations) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_transformed():
            return function(*args, **kwargs)
        if function in _CROSS_ENTROPY:
            ignored = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
            _look_at_labels(self._seen, function.__name__, *_two(args, kwargs, "target"), ignored)
        elif function is _F.embedding:
            _look_at_indices(*_two(args, kwargs, "weight"))
        elif function is _F.binary_cross_entropy_with_logits:
            values, _ = _two(args, kwargs, "target")
            if _made_by(values, "Sigmoid"):
                self._seen.losses.append(
                    ("warning", "binary_cross_entropy_with_logits gets the result of a sigmoid, and applies one "
                     "itself.", "Leave out the sigmoid before the loss.")
                )  # fmt: skip
        return function(*args, **kwargs)


def _two(args: Any, kwargs: Mapping[str, Any], second: str) -> tuple[Any, Any]:
    given = [*args, *([kwargs["input"]] if "input" in kwargs else []), *([kwargs[second]] if second in kwargs else [])]
    return (given[0], given[1]) if len(given) > 1 else (None, None)


def _look_at_labels(seen: Observations, name: str, values: Any, labels: Any, ignored: int) -> None:
    if not isinstance(values, Tensor) or not isinstance(labels, Tensor) or values.dim() == 0:
        return
    classes = int(values.shape[1] if values.dim() > 1 else values.shape[0])
    _look_at_scores(seen, name, values)
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool or not labels.numel():
        return
    used = labels[labels != ignored]
    if not used.numel():
        seen.losses.append(
            ("warning", f"{name} gets no label but ignore_index={ignored}: its mean over nothing is nan.",
             "Look at how the labels are made.")
        )  # fmt: skip
        return
    _check_range(name, int(used.min()), int(used.max()), classes)
    if seen.targets is None:
        seen.targets = labels, classes, ignored


def _look_at_scores(seen: Observations, name: str, values: Tensor) -> None:
    """Record scores that a loss function does not accept."""
    if name == "cross_entropy" and _made_by(values, "Softmax"):
        seen.losses.append(
            ("warning", "cross_entropy gets the result of a softmax, and applies one itself.",
             "Leave out the softmax before the loss, or use nll_loss on log_softmax.")
        )  # fmt: skip
    if name == "nll_loss" and values.is_floating_point() and values.numel() and bool((values > 1e-6).any()):
        seen.losses.append(
            ("warning", "nll_loss gets positive numbers, and needs the logarithms of probabilities.",
             "Use nn.functional.cross_entropy on the logits, or nll_loss on log_softmax(logits, dim=1).")
        )  # fmt: skip
    elif name == "nll_loss" and _adds_up_over(0, values) and not _adds_up_over(1, values):
        seen.losses.append(
            ("warning", "nll_loss gets probabilities that add up to 1 over the batch, not over the classes.",
             "log_softmax(logits, dim=1)")
        )  # fmt: skip


def _adds_up_over(dim: int, values: Tensor) -> bool:
    """Return whether probabilities, given as logarithms in rows for samples, add up to 1 along a dimension."""
    return values.dim() == 2 and bool((values.detach().float().logsumexp(dim).abs() < 1e-3).all())


def _check_range(name: str, low: int, high: int, classes: int) -> None:
    """Raise unless the smallest and the largest label are classes."""
    if low >= 0 and high < classes:
        return
    wrong = low if low < 0 else high
    instead = f"Give the last layer at least {high + 1} outputs"
    if low == 1 and high == classes:
        instead = "Subtract 1 from the labels: they count from 1, and classes count from 0"
    raise make_error(
        LabelsOutside,
        f"{name} gets the label {wrong}, and the last layer has {classes} outputs: labels have to be 0 to "
        f"{classes - 1}.",
        fix=f"{'Use ignore_index=-1 in the loss' if low == -1 else instead}.",
    )


def _look_at_indices(indices: Any, weight: Any) -> None:
    if not isinstance(indices, Tensor) or not isinstance(weight, Tensor) or not indices.numel():
        return
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= weight.shape[0]:
        raise make_error(
            LabelsOutside,
            f"an embedding of {weight.shape[0]} rows gets the index {low if low < 0 else high}.",
            fix=(
                f"Make it with nn.Embedding({max(high + 1, weight.shape[0])}, {weight.shape[1]}), or look at how the "
                "indices are made."
            ),
        )


# Functions that change the shape of a result, not its numbers.
_RESHAPES = {
    "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Select", "Slice", "Alias", "ToCopy", "Transpose",
    "Permute", "T",
}  # fmt: skip


def _made_by(values: Any, function: str) -> bool:
    """Return whether a tensor is the result of a function, such as "Sigmoid", as autograd has it."""
    node = getattr(values, "grad_fn", None)
    for _ in range(4):
        if node is None:
            return False
        name = type(node).__name__.partition("Backward")[0]
        if name == function:
            return True
        if name not in _RESHAPES or not node.next_functions:
            return False
        node = node.next_functions[0][0]
    return False
