"""A run that goes on from a checkpoint has the rows of the whole run, wherever a hook of the program saved it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten as L
from tests.models import Classifier, loader, quiet

SAVED_AT = 4
HOOKS = [
    "on_train_batch_start", "on_train_batch_end", "on_train_epoch_end", "on_validation_start",
    "on_validation_epoch_end",
    "on_validation_end",
]  # fmt: skip


class Logs(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("on_both", loss.detach(), on_step=True, on_epoch=True)
        self.log("drawn", torch.rand(()))
        self.log("not_for_loggers", loss.detach(), on_epoch=True, logger=False)
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("total", 1.0, reduce_fx="sum")
        self.log("hidden", 2.0, logger=False)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("drawn_in_validation", torch.rand(()))


class PowerCut(Exception):
    """Stands for whatever ends a process."""


class Saves(L.Callback):
    """Save in a hook, at a step; then end the run, if it is to be cut."""

    def __init__(self, hook: str, path: Path, *, cut: bool) -> None:
        self.path, self.cut = path, cut
        setattr(self, hook, self._save)

    def _save(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == SAVED_AT and not trainer.sanity_checking and not self.path.exists():
            trainer.save_checkpoint(self.path)
            if self.cut:
                raise PowerCut

    # Without this, nobody would look for save_checkpoint in hooks that are called inside a batch.
    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if False:
            trainer.save_checkpoint(self.path)


def fit(
    folder: Path, *callbacks: L.Callback, every: int, version: int, ckpt_path: Any = None, **more: Any
) -> L.Trainer:
    torch.manual_seed(1)
    logger = L.loggers.CSVLogger(folder, name="logs", version=version)
    trainer = quiet(
        max_epochs=2, log_every_n_steps=every, logger=logger, callbacks=list(callbacks), val_check_interval=2, **more
    )
    trainer.fit(Logs(), loader(16), loader(8), ckpt_path=ckpt_path)
    return trainer


def rows_of(trainer: L.Trainer) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "time"} for row in trainer.history]


def rows_in(folder: Path, version: int) -> list[dict[str, str]]:
    with (folder / "logs" / f"version_{version}" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "complete"])
@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("hook", HOOKS)
def test_no_row_is_missing_and_none_is_there_twice(hook: str, every: int, cut: bool, tmp_path: Path) -> None:
    whole = fit(tmp_path, every=every, version=0)
    path = tmp_path / "a.ckpt"
    saves = Saves(hook, path, cut=cut)
    if cut:
        with pytest.raises(PowerCut):
            fit(tmp_path, saves, every=every, version=1)
    else:
        fit(tmp_path, saves, every=every, version=1)
    resumed = fit(tmp_path, every=every, version=1, ckpt_path=path)
    assert rows_of(resumed) == rows_of(whole)
    assert rows_in(tmp_path, 1) == rows_in(tmp_path, 0)


def test_accumulated_steps_have_their_rows_too(tmp_path: Path) -> None:
    whole = fit(tmp_path, every=1, version=0, accumulate_grad_batches=2)
    path = tmp_path / "a.ckpt"
    with pytest.raises(PowerCut):
        fit(tmp_path, Saves("on_train_batch_end", path, cut=True), every=1, version=1, accumulate_grad_batches=2)
    resumed = fit(tmp_path, every=1, version=1, accumulate_grad_batches=2, ckpt_path=path)
    assert rows_of(resumed) == rows_of(whole)
    assert rows_in(tmp_path, 1) == rows_in(tmp_path, 0)


def test_a_value_of_64_bits_has_them_in_a_resumed_run_too(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    options: dict[str, Any] = {"max_epochs": 1, "precision": "64-true"}
    whole = quiet(callbacks=[Saves("on_train_epoch_end", path, cut=False)], **options)
    whole.fit(Classifier(), loader(4 * SAVED_AT), loader(8))
    resumed = quiet(**options)
    resumed.fit(Classifier(), loader(4 * SAVED_AT), loader(8), ckpt_path=path)
    value = resumed.callback_metrics["val_loss"]
    assert value == whole.callback_metrics["val_loss"]
    assert value.dtype == torch.float64
