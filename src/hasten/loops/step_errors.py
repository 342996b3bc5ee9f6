"""Errors of a step, told with the place, the cause and the fix."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import did_you_mean
from hasten._lib.out_of_memory import is_out_of_memory
from hasten._lib.rank_zero import rank_zero_warn

if TYPE_CHECKING:
    from hasten.loops.run import Run

MEMORY_NOTE = (
    "Memory ran out. Trainer(micro_batch='auto') computes fewer samples at once and leaves the batch as it is; "
    "memory='auto' keeps fewer activations."
)
_WRONG_KEYWORD = re.compile(r"(\w+)\(\) got an unexpected keyword argument '(\w+)'")


def loss_of(output: Any, run: Run) -> Tensor | None:
    """Return the loss in what ``training_step`` returned; None skips the batch.

    Raises:
        MisconfigurationException: there is none in it.

    """
    owner = type(run.module).__name__
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        if "loss" not in output:
            raise MisconfigurationException(
                f"{owner}.training_step returned a dict without the key 'loss' (it has {list(output)}). "
                "Return {'loss': loss, ...}, or the loss itself."
            )
        loss = output["loss"]
        if isinstance(loss, Tensor):
            return loss
        if loss is not None:
            raise MisconfigurationException(
                f"{owner}.training_step returned {{'loss': {_describe(loss)}}}; the loss must be a tensor "
                "computed from the parameters. Do not convert it with .item() or float()."
            )
    elif output is not None:
        raise MisconfigurationException(
            f"{owner}.training_step returned {_describe(output)}; return the loss (a tensor), "
            "a dict with the key 'loss', or None to skip the batch."
            + (" Do not convert it with .item() or float()." if isinstance(output, float) else "")
        )
    if run.skipped_batches == 0:
        rank_zero_warn(
            f"{owner}.training_step returned None: the batch is skipped. If that is not on purpose, "
            "end training_step with `return loss`."
        )
    run.skipped_batches += 1
    return None


def check_weight(weight: Any, run: Run) -> None:
    """Check what ``training_step`` returned as ``loss_weight``; one on a device is not waited for.

    Raises:
        MisconfigurationException: it is not a number, or negative, or not finite.

    """
    if isinstance(weight, Tensor):
        if weight.numel() == 1 and (not weight.is_cpu or 0 <= weight < math.inf):
            return
    elif isinstance(weight, (int, float)):
        if 0 <= weight < math.inf:
            return
    elif hasattr(weight, "__float__") and 0 <= float(weight) < math.inf:
        return
    said = (
        f"a tensor of shape {tuple(weight.shape)}"
        if isinstance(weight, Tensor) and weight.dim()
        else repr(weight)
    )
    raise MisconfigurationException(
        f"{type(run.module).__name__}.training_step returned {{'loss_weight': {said}}}. Use how many samples or tokens "
        "the loss is the mean of: a number of at least 0, or a tensor of one element."
    )


def weights_are_missing(run: Run) -> MisconfigurationException:
    """Return the error for an accumulation of which some batches have a ``loss_weight`` and some have none."""
    return MisconfigurationException(
        f"{type(run.module).__name__}.training_step returned 'loss_weight' for some batches of an accumulation and not "
        "for others, so there is no mean over them. Return it for every batch, or for none."
    )


def check_some_loss(run: Run) -> None:
    """Raise if a whole epoch passed in which every batch was skipped.

    Raises:
        MisconfigurationException: training_step never returned a loss.

    """
    if run.optimizers and run.skipped_batches and run.skipped_batches >= run.progress.total_batches:
        raise MisconfigurationException(
            f"{type(run.module).__name__}.training_step returned None for each of the {run.skipped_batches} "
            "batches so far, so nothing was trained. End training_step with `return loss`."
        )


def with_batch_idx_if_taken(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``step`` callable as ``step(batch, batch_idx)``, also if it takes the batch alone."""
    return step if takes(step, "batch_idx", at=2) else lambda batch, batch_idx: step(batch)


def takes(step: Callable[..., Any], name: str, *, at: int) -> bool:
    """Return whether ``step`` takes an argument ``name``, or at least ``at`` positional ones."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return True
    kinds = inspect.Parameter
    positional = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    return (
        any(p.name == name for p in parameters)
        or any(p.kind is kinds.VAR_POSITIONAL for p in parameters)
        or len(positional) >= at
    )


def add_place(error: BaseException, step: str, module: nn.Module, batch: Any, batch_idx: int) -> None:
    """Add to an error of the user's step where it happened, on what, and what usually mends it."""
    if getattr(error, "_hasten_place", False):
        return
    notes = [f"in {type(module).__name__}.{step}, batch {batch_idx}: {describe_batch(batch)}"]
    text = str(error)
    if "does not require grad" in text:
        notes.append(
            "The loss does not depend on any parameter that requires a gradient. Usual causes: .detach(), "
            ".item(), torch.no_grad(), torch.tensor(loss), or every parameter is frozen."
        )
    elif "implicitly created only for scalar" in text:
        notes.append("The loss has more than one element. Return its mean: `return loss.mean()`.")
    elif "a second time" in text:
        notes.append(
            "The loss reaches back into an earlier batch. Detach what you carry over: `self.state = state.detach()`."
        )
    elif is_out_of_memory(error):
        notes.append(MEMORY_NOTE)
    elif "activation checkpoint has been mutated" in text:
        notes.append(
            "memory='selective' keeps the results of products and attention, and a block changes one in place. Use "
            "memory='full', or write x = x + y instead of x += y there."
        )
    elif isinstance(error, (ValueError, TypeError)) and ("unpack" in text):
        notes.append("The step unpacks the batch into another number of parts than the dataset gives.")
    elif isinstance(error, TypeError) and f"{step}()" in text and "positional argument" in text:
        notes.append(
            f"{step} is called with (batch, batch_idx), and with dataloader_idx as well where there are several "
            f"loaders: def {step}(self, batch, batch_idx, dataloader_idx=0). Several optimizers need manual "
            "optimisation, not an optimizer_idx."
        )
    elif isinstance(error, TypeError) and (wrong := _WRONG_KEYWORD.search(text)):
        function = getattr(module, wrong.group(1), None)
        known = list(inspect.signature(function).parameters) if callable(function) else []
        if known:
            near = did_you_mean(wrong.group(2), known)
            notes.append(f"self.{wrong.group(1)} takes: {', '.join(known)}.{near}")
    elif isinstance(error, NotImplementedError) and "forward" in text:
        notes.append("Define forward(), or call the layers by name in the step.")
    for note in notes:
        error.add_note(note)
    try:
        error._hasten_place = True  # type: ignore[attr-defined]
    except AttributeError:
        pass


def describe_batch(batch: Any, depth: int = 0) -> str:
    """Describe the structure of a batch in one line: types, shapes, dtypes."""
    if isinstance(batch, Tensor):
        return f"Tensor {tuple(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, Mapping) and depth < 2:
        inside = ", ".join(f"{key!r}: {describe_batch(batch[key], depth + 1)}" for key in list(batch)[:6])
        return f"{type(batch).__name__} of {len(batch)} {{{inside}}}"
    if isinstance(batch, (list, tuple)) and depth < 2:
        inside = ", ".join(describe_batch(part, depth + 1) for part in batch[:4])
        more = ", ..." if len(batch) > 4 else ""
        return f"{type(batch).__name__} of {len(batch)} ({inside}{more})"
    return type(batch).__name__


def _describe(thing: Any) -> str:
    return f"the {type(thing).__name__} {thing!r}"[:80] if thing is not None else "None"
