"""Which value a name has, for callbacks, schedulers and loggers, where several places log it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

import hasten as L
from hasten.callbacks import ModelCheckpoint
from tests.fakes import RowLogger
from tests.models import Classifier, loader, quiet


class Shared(L.LightningModule):
    """Logs the same names in training and validation: 1, 2, 3, 4 in training, 10 and 20 in validation."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer, self.options = nn.Linear(8, 1), options

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("loss", float(batch_idx + 1), **self.options)
        return self.layer(batch[0]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", 10.0 * (batch_idx + 1), **self.options)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "loss"}


class Reads(L.Callback):
    """Keeps what ``loss`` is after each validation, and after each batch."""

    def __init__(self) -> None:
        self.validated: list[float] = []
        self.trained: list[float] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.validated.append(trainer.callback_metrics["loss"].item())

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.trained.append(trainer.callback_metrics["loss"].item())


def test_after_a_validation_a_name_has_its_value_until_the_next_step_of_training(tmp_path: Any) -> None:
    reads, best = Reads(), ModelCheckpoint(tmp_path, monitor="loss", filename="{loss}")
    trainer = quiet(
        max_epochs=2, val_check_interval=2, callbacks=[reads, best], enable_checkpointing=True, logger=RowLogger(),
        num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(Shared(prog_bar=True), loader(16), loader(8))
    assert reads.validated == [15.0] * 4
    assert reads.trained == [1.0, 2.0, 3.0, 4.0] * 2
    assert trainer.callback_metrics["loss"] == trainer.logged_metrics["loss"] == 15.0
    assert trainer.progress_bar_metrics["loss"] == 15.0
    assert best.best_model_path.endswith("loss=15.0.ckpt")
    # The schedule has seen 15.0 twice, which is no improvement.
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)


def test_an_equal_value_of_the_next_step_is_a_new_one() -> None:
    class Same(Shared):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("loss", 1.0)
            return self.layer(batch[0]).mean()

    reads = Reads()
    quiet(max_epochs=1, val_check_interval=2, callbacks=[reads], num_sanity_val_steps=0).fit(
        Same(), loader(16), loader(8)
    )
    assert reads.validated == [15.0, 15.0]
    assert reads.trained == [1.0] * 4


def test_the_value_of_the_epoch_comes_after_that_of_validation() -> None:
    trainer = quiet(max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(Shared(on_step=True, on_epoch=True), loader(16), loader(8))
    assert trainer.callback_metrics["loss"] == trainer.callback_metrics["loss_epoch"] == 2.5


def test_values_of_hooks_before_the_steps_are_there_during_the_epoch() -> None:
    class Hooks(Classifier):
        seen: Any = None

        def on_train_epoch_start(self) -> None:
            self.log("rate", 3.0)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen = dict(self.trainer.callback_metrics)
            return super().training_step(batch, batch_idx)

    model = Hooks()
    quiet(max_epochs=1).fit(model, loader(8))
    assert model.seen["rate"] == 3.0


def test_of_two_hooks_that_log_one_name_the_later_counts() -> None:
    class Twice(Shared):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log("loss", 100.0)

    logger = RowLogger()
    trainer = quiet(max_epochs=1, logger=logger, log_every_n_steps=1, limit_val_batches=0)
    model = Twice()
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), 0.1)  # type: ignore[method-assign]
    trainer.fit(model, loader(16))
    assert [row["loss"] for _, row in logger.rows if "loss" in row] == [100.0] * 4


def test_a_metric_keeps_what_it_gathers_between_validations() -> None:
    class Between(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.count = torchmetrics.SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.count.update(1.0)
            return super().training_step(batch, batch_idx)

        def on_validation_epoch_end(self) -> None:
            self.log("batches", self.count)

    trainer = quiet(max_epochs=3, num_sanity_val_steps=0)
    trainer.fit(Between(), loader(16), loader(8))
    assert trainer.callback_metrics["batches"] == 4.0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_fit_after_one_that_ended_within_an_epoch_begins_that_epoch_again(error: type[BaseException]) -> None:
    class Fails(Classifier):
        fails, batches = True, 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.batches += 1
            if self.fails and self.batches == 6:
                raise error("stop")
            return super().training_step(batch, batch_idx)

    model, trainer = Fails(), quiet(max_epochs=2)
    with pytest.raises((error, SystemExit)):
        trainer.fit(model, loader(16))
    model.fails = False
    trainer.fit(model, loader(16))
    # One epoch, a batch of the second and the one that failed, and the second epoch whole.
    assert model.batches == 4 + 2 + 4
    assert trainer.current_epoch == 2
