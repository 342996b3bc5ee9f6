"""Callbacks on two processes: what they do is the same on both."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import hasten as L
from hasten import callbacks as cb
from hasten.callbacks.spike import TrainingSpikeException
from hasten.loggers import CSVLogger
from tests.callbacks.resuming import SaveAt, assert_same, fitted, weights
from tests.callbacks.scripted import Losses, names
from tests.callbacks.test_finetuning import Model
from tests.callbacks.test_weight_averaging import Normalized
from tests.models import Classifier, dataset, loader, quiet

TWO: dict[str, Any] = {"devices": 2, "strategy": "ddp"}


def of_both(value: Any) -> list[Any]:
    """Return the value of each process."""
    found: list[Any] = [None, None]
    torch.distributed.all_gather_object(found, value)
    return found


@pytest.mark.world_size(2)
def test_values_that_differ_are_ranked_and_stop_alike(tmp_path: Path) -> None:
    class Differing(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            # Worse with each epoch on the second process, better on the first.
            sign = -1.0 if self.global_rank == 0 else 1.0
            self.log("val_loss", sign * (1 + self.current_epoch), sync_dist=False)

    best = cb.ModelCheckpoint(tmp_path / "best", "{epoch}-{val_loss:.0f}", "val_loss", save_last="link")
    steps = cb.ModelCheckpoint(tmp_path / "time", "{step}", save_top_k=-1, train_time_interval=timedelta(0))
    stopper, monitor = cb.EarlyStopping("val_loss", patience=2), cb.LearningRateMonitor()
    options = {**TWO, "max_epochs": 6, "log_every_n_steps": 1, "enable_checkpointing": True}
    logger = CSVLogger(tmp_path, name="logs", version=0)
    trainer = quiet(callbacks=[best, steps, stopper, cb.Timer("1h"), monitor], logger=logger, **options)
    trainer.fit(Differing(), loader(8, 2), loader(2))
    one, other = of_both((best.state_dict(), trainer.current_epoch, trainer.should_stop))
    assert_same(one, other)
    # The first process's values rank; either process may stop both.
    assert (trainer.current_epoch, trainer.should_stop) == (3, True)
    assert names(tmp_path / "best") == ["epoch=2-val_loss=-3.ckpt", "last.ckpt"]
    assert (tmp_path / "best" / "last.ckpt").resolve().name == "epoch=2-val_loss=-3.ckpt"
    assert (tmp_path / "time" / "step=1.ckpt").exists()
    if trainer.is_global_zero:
        assert "lr-SGD" in (tmp_path / "logs" / "version_0" / "metrics.csv").read_text().splitlines()[0]


@pytest.mark.world_size(2)
def test_gradients_of_what_is_unfrozen_are_exchanged_also_after_a_resume(tmp_path: Path) -> None:
    def make() -> Model:
        model = Model()
        del model.backbone[1]
        return model

    options = {**TWO, "data": loader(16, 2), "max_epochs": 3}
    saver = SaveAt(tmp_path / "a.ckpt", 6)
    whole = fitted(make, lambda: [cb.BackboneFinetuning(1)], saver, **options)
    resumed = fitted(make, lambda: [cb.BackboneFinetuning(1)], ckpt_path=saver.path, **options)
    first, *others = (state for run in (whole, resumed) for state in of_both(weights(run)))
    for other in others:
        assert_same(other, first)


@pytest.mark.world_size(2)
def test_all_prune_alike_and_average_alike(tmp_path: Path) -> None:
    class Draws(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            torch.manual_seed(trainer.global_rank)

    pruning = cb.ModelPruning("random_unstructured", amount=0.5, resample_parameters=True)
    pruned = fitted(Classifier, lambda: [pruning, Draws()], data=loader(16), max_epochs=2, **TWO)
    average = cb.StochasticWeightAveraging(0.1, 1)
    averaged = fitted(Normalized, lambda: [average, Draws()], data=loader(16), max_epochs=2, **TWO)
    for trainer in (pruned, averaged):
        assert_same(*of_both(weights(trainer)))
    assert int((weights(pruned)["layers.0.weight"] == 0).sum()) > 60
    # The statistics are those of both parts of the data: the mean over the batches of each.
    final, layer = weights(averaged), nn.Linear(8, 6)
    layer.load_state_dict({name: final[f"layers.0.{name}"] for name in ("weight", "bias")})
    assert torch.allclose(final["layers.1.running_mean"], layer(dataset(16).tensors[0]).mean(0), atol=1e-6)


@pytest.mark.world_size(2)
def test_every_prediction_is_written_once() -> None:
    written: dict[str, list[Any]] = {"batch": [], "epoch": []}

    class Writer(cb.BasePredictionWriter):
        def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
            written["batch"].append((prediction, indices))

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
            written["epoch"] += zip(predictions, indices[0], strict=True)

    L.seed_everything(0, verbose=False)
    model = Classifier()
    trainer = quiet(callbacks=[Writer("batch_and_epoch")], **TWO)
    trainer.predict(model, DataLoader(dataset(11), 2), return_predictions=False)
    with torch.no_grad():
        expected = model(dataset(11).tensors[0])
    for pairs in written.values():
        assert all(torch.allclose(prediction, expected[indices]) for prediction, indices in pairs)
        both = of_both([index for _, indices in pairs for index in indices])
        assert sorted(both[0] + both[1]) == list(range(11))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("who", ["both", "one"])
def test_a_failed_run_is_saved_if_both_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    class Failing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2 and (who == "both" or self.global_rank == 0):
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    callback = cb.OnExceptionCheckpoint(tmp_path / "failed")
    saver = cb.ModelCheckpoint(tmp_path / "saved", save_on_exception=True)
    monkeypatch.setattr("hasten.callbacks.checkpoint._PATIENCE_SECONDS", 60.0 if who == "both" else 1.0)
    with pytest.raises(RuntimeError):
        fitted(Failing, lambda: [saver, callback], enable_checkpointing=True, **TWO)
    saved = [Path(callback.ckpt_path).exists(), bool(list((tmp_path / "saved").glob("*.ckpt")))]
    assert saved == [who == "both"] * 2


@pytest.mark.world_size(2)
def test_a_spike_on_one_process_ends_both(tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()
    losses: list[Any] = [1.0 + rank] * 8
    losses[2], losses[5] = {"loss": 1.0 + rank}, 9.0 if rank == 1 else 1.0
    trainer = quiet(callbacks=[cb.SpikeDetection(exclude_batches_path=tmp_path)], **TWO)
    with pytest.raises(TrainingSpikeException) as caught:
        trainer.fit(Losses(losses), [torch.zeros(1)] * 8)
    assert caught.value.batch_idx == 5
    torch.distributed.barrier()
    assert json.loads((tmp_path / "skip_batches.json").read_text()) == [4, 5]
