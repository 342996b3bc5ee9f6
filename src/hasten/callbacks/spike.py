"""SpikeDetection: end the training when the loss jumps, and list the batches to leave out."""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.tree import Arrival, send_to_host
from hasten.module.callback import Callback

if TYPE_CHECKING:
    from hasten import Fabric, LightningModule, Trainer
    from hasten.types import Batch, StepOutput

FILE_NAME = "skip_batches.json"


class TrainingSpikeException(RuntimeError):
    """The loss jumped; ``batch_idx`` is the batch in which it did."""

    def __init__(self, batch_idx: int, *args: object, **kwargs: object) -> None:
        message = f"The loss jumped in batch {batch_idx} of the epoch."
        super().__init__(*(args or (message,)), **kwargs)
        self.batch_idx = batch_idx


class SpikeDetection(Callback):
    """End the training with a ``TrainingSpikeException`` when the loss jumps or is no longer finite.

    A loss is a spike if it is worse than the previous one, and further from the mean of the last ``window`` losses than
    both ``atol`` and ``rtol`` allow. The batch and the one before it, which may have spoiled the weights, are written
    to a JSON file, a list of batch indices in the epoch, for your sampler to leave out in the next attempt. On several
    processes a spike on one ends all of them, at the same batch.

    On a GPU the losses are read ``lag`` batches later, so that the device need not wait, and the exception is raised
    that much later. Losses are compared before the division by the number of accumulated batches; a batch whose
    ``training_step`` returned None is left out.

    Args:
        mode: ``"min"`` if lower is better, ``"max"`` if higher is.
        window: number of losses in the mean.
        warmup: number of batches, at the beginning of the run, that are not checked.
        atol: smallest difference from the mean that is a spike; None for any.
        rtol: the same as a multiple of the mean; None for any.
        exclude_batches_path: the JSON file, or a folder for ``skip_batches.json``; by default
            ``trainer.default_root_dir``.
        finite_only: treat NaN and infinite losses as spikes. Otherwise NaN is ignored.

    Raises:
        MisconfigurationException: an argument is out of range.

    Example::

        >>> detection = SpikeDetection(window=5, rtol=3.0, exclude_batches_path="runs")
        >>> detection.bad_batches
        []

    """

    lag: ClassVar[int] = 8

    def __init__(
        self,
        mode: Literal["min", "max"] = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: str | os.PathLike[str] | None = None,
        finite_only: bool = True,
    ) -> None:
        check.declared(SpikeDetection.__init__, locals())
        super().__init__()
        error = MisconfigurationException
        self.mode = check.one_of("SpikeDetection", "mode", mode, ("min", "max"), error=error)
        self.window = check.whole("SpikeDetection", "window", window, at_least=1, error=error)
        self.warmup = check.whole("SpikeDetection", "warmup", warmup, at_least=0, error=error)
        limits: dict[str, Any] = {"at_least": 0, "below": math.inf, "allow_none": True}
        for name, tolerance in (("atol", atol), ("rtol", rtol)):
            check.number("SpikeDetection", name, tolerance, **limits, error=error)
        self.atol = atol
        self.rtol = rtol
        self.exclude_batches_path = exclude_batches_path
        self.finite_only = finite_only
        self.bad_batches: list[int] = []
        self._seen = 0
        # For each process the previous loss and the losses of the window.
        self._last: list[float] = []
        self._recent: list[deque[float]] = []
        self._pending: deque[tuple[int, Arrival]] = deque()

    # -- during a run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._seen, self._last, self._recent = 0, [], []
            self._pending.clear()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        """Start reading the loss, and check those that have arrived."""
        if outputs is None or (isinstance(outputs, Mapping) and not outputs):
            loss, has_loss = torch.zeros((), device=trainer.strategy.root_device), 0.0
        else:
            loss, has_loss = _undivided(_loss_of(outputs), outputs, trainer, batch_idx), 1.0
        # Checked a fixed number of batches later, not when it has arrived: all processes must end at the same batch.
        # A Mock has no other processes.
        several, keep = trainer.runtime.several_processes is True, self.lag if loss.is_cuda else 0
        self._follow(trainer, several, loss, has_loss, batch_idx, keep=keep)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check(trainer, keep=0)

    def state_dict(self) -> dict[str, Any]:
        return {
            "seen": self._seen,
            "last": list(self._last),
            "recent": [list(losses) for losses in self._recent],
            "waiting": [[batch_idx, arrival.values()] for batch_idx, arrival in self._pending],
            "bad_batches": list(self.bad_batches),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seen = state_dict.get("seen", 0)
        self._last = list(state_dict.get("last", []))
        self._recent = [deque(losses, self.window) for losses in state_dict.get("recent", [])]
        self._pending = deque((batch_idx, send_to_host(values)) for batch_idx, values in state_dict.get("waiting", []))
        self.bad_batches = list(state_dict.get("bad_batches", []))

    # -- internal functions

    def _follow(
        self, owner: Trainer | Fabric, several: bool, loss: Tensor, has_loss: float, batch_idx: int, *, keep: int
    ) -> None:
        """Start reading the loss of a batch, and check those that were read ``keep`` batches before."""
        values: list[Any] = [loss, has_loss]
        if several:
            pair = torch.stack([loss.float(), torch.full_like(loss, has_loss, dtype=torch.float32)])
            values = list(owner.strategy.all_gather(pair).flatten())
        self._pending.append((batch_idx, send_to_host(values)))
        self._check(owner, keep=keep)

    def _check(self, trainer: Trainer | Fabric, *, keep: int) -> None:
        while len(self._pending) > keep:
            batch_idx, arrival = self._pending.popleft()
            values = arrival.values()
            losses = [loss if has_loss else None for loss, has_loss in zip(values[::2], values[1::2], strict=True)]
            if len(self._last) != len(losses):
                # The first batch, or a run resumed on another number of processes.
                self._last = [math.nan] * len(losses)
                self._recent = [deque(maxlen=self.window) for _ in losses]
            self._seen += 1
            if self._seen > self.warmup and any(map(self._is_spike, losses, self._last, self._recent)):
                self._handle_spike(trainer, batch_idx)
            known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
            if len(known) == len(losses):
                self._last = known
                for recent, loss in zip(self._recent, known, strict=True):
                    recent.append(loss)

    def _is_spike(self, loss: float | None, last: float, recent: deque[float]) -> bool:
        if loss is None:
            return False
        if not math.isfinite(loss):
            return self.finite_only or (math.isinf(loss) and (loss > 0) == (self.mode == "min"))
        if not recent:
            return False
        change = loss - last
        if change <= 0 if self.mode == "min" else change >= 0:
            return False
        mean = sum(recent) / len(recent)
        distance = abs(loss - mean)
        return (self.atol is None or distance >= self.atol) and (self.rtol is None or distance >= abs(self.rtol * mean))

    def _handle_spike(self, trainer: Trainer | Fabric, batch_idx: int) -> None:
        new = [index for index in (batch_idx - 1, batch_idx) if index >= 0 and index not in self.bad_batches]
        self.bad_batches += new
        folder: str = getattr(trainer, "default_root_dir", "")
        path = Path(self.exclude_batches_path or folder)
        if path.suffix != ".json":
            path = path / FILE_NAME
        if trainer.is_global_zero:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.bad_batches, indent=4), encoding="utf-8")
        epoch = getattr(trainer, "current_epoch", 0)
        number = epoch + 1 if isinstance(epoch, int) else epoch  # A Mock has another.
        raise TrainingSpikeException(
            batch_idx,
            f"The loss jumped in batch {batch_idx} of epoch {number}. Resume from an earlier "
            f"checkpoint without the batches {self.bad_batches}, which are listed in {path}.",
        )


def _loss_of(outputs: StepOutput) -> Tensor:
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor):
        what = f"SpikeDetection: training_step returned {type(outputs).__name__} without a loss."
        raise make_error(TypeError, what, fix='Return the loss, or a dict with the key "loss".')
    return loss.detach().mean(dtype=None if loss.is_floating_point() else torch.float32)


def _undivided(loss: Tensor, outputs: StepOutput, trainer: Trainer, batch_idx: int) -> Tensor:
    """Return the loss as ``training_step`` returned it, not divided by the number of accumulated batches."""
    module = trainer.lightning_module
    if module is None or module.automatic_optimization is not True:
        return loss
    size, length = trainer.accumulate_grad_batches, trainer.num_training_batches
    if size == 1 and not trainer.runtime.several_processes:
        return loss
    if isinstance(outputs, Mapping) and outputs.get("loss_weight") is not None:
        # A batch of weight 0 does not count, and its loss is 0.
        weight = outputs["loss_weight"]
        if isinstance(weight, Tensor):
            return torch.where(weight == 0, loss, loss / weight)
        mean: Tensor = loss / weight if weight else loss
        return mean
    if size > 1 and math.isfinite(length) and batch_idx >= length - length % size:
        size = int(length % size)
    return loss * size if size > 1 else loss
