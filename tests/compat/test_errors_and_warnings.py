"""Errors and warnings have Lightning's types under its names, so that `except` and `filterwarnings` work."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import hasten_lightning
from tests.refusals import refused, warned

QUIETLY: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def alias() -> Iterator[None]:
    hasten_lightning.install()
    yield
    hasten_lightning.uninstall()


def test_errors_of_arguments_are_lightnings() -> None:
    import lightning.pytorch as pl
    from lightning.pytorch import callbacks, strategies
    from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    def trainer(**given: Any) -> pl.Trainer:
        return pl.Trainer(**{**QUIETLY, **given})

    class NoSteps(BoringModel):
        training_step = pl.LightningModule.training_step

    model, data = BoringModel(), BoringDataModule()
    calls: list[tuple[type[Exception], Callable[[], object]]] = [
        (MisconfigurationException, lambda: trainer(fast_dev_run=-1)),
        (MisconfigurationException, lambda: trainer(limit_train_batches=1.2)),
        (MisconfigurationException, lambda: trainer(max_epochs=-2)),
        (MisconfigurationException, lambda: trainer(max_steps=-2)),
        (MisconfigurationException, lambda: trainer(gradient_clip_algorithm="most")),
        (TypeError, lambda: trainer(gradient_clip_val="x")),
        (MisconfigurationException, lambda: trainer(profiler="fast")),
        (MisconfigurationException, lambda: trainer(accelerator="cuda")),
        (ValueError, lambda: trainer(accelerator="toaster")),
        (ValueError, lambda: trainer(strategy="magic")),
        (ValueError, lambda: trainer(precision="3-bit")),
        (MisconfigurationException, lambda: trainer(plugins=["x"])),
        (MisconfigurationException, lambda: trainer(callbacks=[callbacks.ModelCheckpoint()])),
        (TypeError, lambda: trainer(gpus=1)),
        (TypeError, lambda: trainer().fit(object())),
        (MisconfigurationException, lambda: trainer().fit(model, model.train_dataloader(), datamodule=data)),
        (MisconfigurationException, lambda: trainer().fit(NoSteps())),
        (MisconfigurationException, lambda: callbacks.EarlyStopping("loss", mode="best")),
        (MisconfigurationException, lambda: callbacks.ModelCheckpoint(save_top_k=-2)),
        (MisconfigurationException, lambda: callbacks.Timer(timedelta(1), interval="hour")),
        (MisconfigurationException, lambda: callbacks.StochasticWeightAveraging(-1.0)),
        (MisconfigurationException, lambda: callbacks.ModelPruning("at_random")),
        (MisconfigurationException, lambda: strategies.DDPStrategy(model_averaging_period=3)),
        (RuntimeError, lambda: model.trainer),
        (AttributeError, lambda: trainer().save_checkpoint("x.ckpt")),
    ]
    for kind, call in calls:
        with pytest.raises(kind):
            call()


def test_what_may_be_intended_is_a_possible_user_warning() -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.utilities import disable_possible_user_warnings

    class LogsToNobody(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("value", 1.0, logger=True)
            return super().training_step(batch, batch_idx)

    with warned(UserWarning, fix="logger=True"):
        pl.Trainer(**QUIETLY).fit(LogsToNobody())
    model = BoringModel().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with refused(UserWarning, says=("2 module", "module(s)")):
            pl.Trainer(**QUIETLY).fit(model)
        disable_possible_user_warnings()
        pl.Trainer(**QUIETLY).fit(model)


def test_the_first_epoch_is_checked_where_it_is_shorter_than_the_interval_of_loggers(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel

    class AtRest(BoringModel):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    with warned(UserWarning, says=("learning rate of SGD is 0",)), warned(UserWarning, says="log_every_n_steps=50"):
        pl.Trainer(**{**QUIETLY, "logger": pl.loggers.CSVLogger(tmp_path), "limit_train_batches": 3}).fit(AtRest())
