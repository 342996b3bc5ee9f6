"""BasePredictionWriter: pass predictions, with the indices of their samples, to code that stores them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import LightningEnum
from hasten._lib.rank_zero import warn_once
from hasten.hooks import overrides
from hasten.module.callback import Callback

if TYPE_CHECKING:
    from hasten import LightningModule, Trainer
    from hasten.types import Batch, StepOutput


class WriteInterval(LightningEnum):
    """When predictions are written."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """Whether after each batch."""
        return self is not WriteInterval.EPOCH

    @property
    def on_epoch(self) -> bool:
        """Whether when all batches are done."""
        return self is not WriteInterval.BATCH


class _NothingWrites(MisconfigurationException, NotImplementedError):
    """Both errors at once: the first batch would raise the second."""


class BasePredictionWriter(Callback):
    """Base of callbacks that store predictions; override ``write_on_batch_end`` or ``write_on_epoch_end``.

    On several processes each one gets its own part of the predictions, with the indices of the samples in the
    dataset, so that the parts can be combined: over all processes every sample comes exactly once.
    With ``"batch"`` and ``trainer.predict(..., return_predictions=False)`` nothing is kept in memory.

    Args:
        write_interval: ``"batch"`` (after each batch), ``"epoch"`` (when all are done) or ``"batch_and_epoch"``.

    Raises:
        MisconfigurationException: the interval is none of these; when prediction begins, if the method it calls is not
            overridden.

    Example::

        >>> import torch, hasten as L
        >>> class Printer(BasePredictionWriter):
        ...     def write_on_batch_end(
        ...         self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx
        ...     ):
        ...         print(batch_indices, prediction.tolist())
        >>> class Doubles(L.LightningModule):
        ...     def predict_step(self, batch, batch_idx):
        ...         return 2 * batch
        >>> data = torch.utils.data.DataLoader([1.0, 2.0, 3.0], batch_size=2)
        >>> trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[Printer()])
        >>> trainer.predict(Doubles(), data, return_predictions=False)
        [0, 1] [2.0, 4.0]
        [2] [6.0]

    """

    def __init__(self, write_interval: str = "batch") -> None:
        allowed = [interval.value for interval in WriteInterval]
        owner, error = type(self).__name__, MisconfigurationException
        check.one_of(owner, "write_interval", write_interval, allowed, error=error)
        self.interval = WriteInterval(write_interval)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse an interval for which nothing is overridden, before hours of prediction are lost."""
        if stage != "predict":
            return
        for due, name, hook in (
            (self.interval.on_batch, "write_on_batch_end", "on_predict_batch_end"),
            (self.interval.on_epoch, "write_on_epoch_end", "on_predict_epoch_end"),
        ):
            if due and not any(overrides(self, BasePredictionWriter, each) for each in (name, hook)):
                raise _NothingWrites(
                    f"{type(self).__name__}(write_interval={self.interval.value!r}) calls {name}, which it does not "
                    "define.",
                    fix=f"Define {name}, or use another write_interval.",
                    argument="write_interval",
                )

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        prediction: StepOutput,
        batch_indices: Sequence[int] | None,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Store the prediction of one batch.

        Args:
            trainer: the Trainer.
            pl_module: the module.
            prediction: what ``predict_step`` returned.
            batch_indices: the indices of the batch's samples in the dataset; empty where they are not known
                (an ``IterableDataset``, or no ``DataLoader``).
            batch: the batch.
            batch_idx: its index, from 0, in this process.
            dataloader_idx: the index of its loader.

        """
        raise NotImplementedError(f"{type(self).__name__} does not define write_on_batch_end.")

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Store all predictions of this process.

        Args:
            trainer: the Trainer.
            pl_module: the module.
            predictions: what ``predict_step`` returned, by batch; by loader and batch where there are several.
            batch_indices: the indices of each batch's samples, always by loader and batch.

        """
        raise NotImplementedError(f"{type(self).__name__} does not define write_on_epoch_end.")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.interval.on_epoch:
            trainer.current_run.evaluation.keeps_predictions = True

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: StepOutput,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        indices = trainer.current_run.evaluation.batch_indices
        if not indices:
            warn_once(
                f"batch-indices-{dataloader_idx}",
                f"{type(self).__name__}: the indices of the predict dataloader's samples are unknown, so "
                "batch_indices are empty.",
                fix="Use a DataLoader with a dataset that has a length, or put the index into the batch.",
            )
        if self.interval.on_batch:
            self.write_on_batch_end(trainer, pl_module, outputs, indices, batch, batch_idx, dataloader_idx)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.interval.on_epoch:
            done = trainer.current_run.evaluation
            self.write_on_epoch_end(trainer, pl_module, done.kept_predictions or [], done.epoch_batch_indices)
