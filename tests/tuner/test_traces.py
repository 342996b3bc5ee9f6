"""What a trial touches and puts back: everything a training step can reach."""

from __future__ import annotations

import copy
import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

import hasten as L
from hasten.callbacks import BatchSizeFinder, EarlyStopping, LearningRateFinder, ModelCheckpoint
from hasten.loggers import CSVLogger
from hasten.loops.saved_state import SavedObjects
from hasten.tuner import Tuner
from tests.models import Classifier, dataset, loader, quiet, same_weights
from tests.refusals import refused


class Tracker:
    """An object of the user's, with an object inside and everything that may change in place."""

    def __init__(self, inner: Any = None) -> None:
        self.count, self.inner = 0, inner
        self.recent: deque[int] = deque([1, 2, 3], maxlen=3)
        self.names, self.kinds, self.pair = {"a": [1]}, {1, 2}, ([1], {"x": 1})
        self.values, self.array = torch.ones(2), np.arange(3.0)
        self.chance = torch.Generator().manual_seed(3)
        self.dice, self.old_rng = random.Random(4), np.random.RandomState(6)

    def step(self) -> None:
        self.count += 1
        self.recent.append(self.count)
        self.names["a"].append(self.count)
        self.names[f"b{self.count}"] = []
        self.kinds.add(self.count)
        self.pair[0].clear()
        self.pair[1]["x"] = self.count
        self.values += torch.rand(2, generator=self.chance)
        self.array += self.dice.random() + self.old_rng.rand()
        setattr(self, f"at_{self.count}", True)
        if self.inner is not None:
            self.inner.step()

    def contents(self) -> list[Any]:
        """Return everything that ``step`` changes, for a comparison."""
        lists = [self.values.tolist(), self.array.tolist(), self.recent.maxlen, self.dice.random()]
        plain = {key: repr(value) for key, value in vars(self).items() if type(value) in (int, bool, dict, set, tuple)}
        return [lists, plain, list(self.recent), self.inner.contents() if self.inner is not None else None]


def test_a_gradient_scaler_in_the_middle_of_a_step() -> None:
    scaler, parameter = (torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1), nn.Parameter(torch.ones(2)))
    optimizer = torch.optim.SGD([parameter], 0.1)

    def step(*, completes: bool) -> None:
        scaler.scale(parameter.sum()).backward()
        scaler.unscale_(optimizer)
        if completes:
            scaler.update()

    step(completes=True)
    before = scaler.state_dict()
    saved = SavedObjects()
    saved.save(scaler)
    step(completes=True)
    step(completes=False)
    assert scaler.state_dict() != before
    saved.restore()
    assert scaler.state_dict() == before
    # A second one would be refused, were the step still the one that was left.
    step(completes=True)


def test_lazy_layers_are_refused() -> None:
    class Lazy(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.LazyLinear(2)

    with refused(ValueError, fix="model(batch)"):
        Tuner(quiet()).scale_batch_size(Lazy())


# -- a fit with and without a tuner


class Counting(Sampler[int]):
    """A sampler whose order depends on how often it was read and on the epoch that was set."""

    def __init__(self, samples: int) -> None:
        self.samples, self.reads, self.epoch = samples, 0, 0

    def __len__(self) -> int:
        return self.samples

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        self.reads += 1
        order = torch.Generator().manual_seed(100 * self.epoch + self.reads)
        return iter(torch.randperm(self.samples, generator=order).tolist())


class Everything(Classifier):
    """Adam, batch norm, dropout, a schedule, lists, generators, and a logger used by hand."""

    def __init__(self, batch_size: int = 10) -> None:
        super().__init__(dropout=0.3, lr=0.01)
        self.batch_size = batch_size
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.losses: list[Tensor] = []
        self.running = torch.zeros(())
        self.rng = np.random.default_rng(1)
        self.tracker = Tracker(Tracker())
        self.register_buffer("spread", torch.ones(1).expand(4))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.epochs: list[int] = []
        self.sampler = Counting(60)

    def on_train_epoch_start(self) -> None:
        self.epochs.append(self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = self.loss((x + self.rng.normal() * 0.1 + random.random() * 0.1, y))
        self.log("train_loss", loss, prog_bar=True)
        self.logger.experiment.log_metrics({"by_hand": float(batch_idx)}, self.global_step)
        self.losses.append(loss.detach())
        self.running += loss.detach()
        self.tracker.step()
        assert self.lr_schedulers().get_last_lr()
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(dataset(60), self.batch_size, sampler=self.sampler)

    def val_dataloader(self) -> Any:
        return DataLoader(dataset(30), self.batch_size)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.05, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class SearchesAtOne(L.Callback):
    """Searches for both at the start of epoch 1, and changes nothing."""

    def __init__(self) -> None:
        self.rate = LearningRateFinder(min_lr=1e-4, num_training_steps=15, update_attr=False)
        self.size = BatchSizeFinder(max_val=10, init_val=10, steps_per_trial=2)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            self.rate.lr_find(trainer, pl_module)
            self.size.scale_batch_size(trainer, pl_module)
            self.rate.lr_find(trainer, pl_module)


def _fitted(folder: Path, *, before: bool = False, inside: bool = False) -> tuple[Everything, L.Trainer]:
    L.seed_everything(3, verbose=False)
    model = Everything()
    callbacks: list[Any] = [ModelCheckpoint(monitor="val_loss", save_last=True), EarlyStopping("val_loss", patience=9)]
    trainer = quiet(
        max_epochs=3,
        callbacks=callbacks + ([SearchesAtOne()] if inside else []),
        logger=CSVLogger(folder),
        enable_checkpointing=True,
        log_every_n_steps=2,
        default_root_dir=folder,
        gradient_clip_val=1.0,
    )
    if before:
        Tuner(trainer).lr_find(model, num_training=15, update_attr=False)
        assert Tuner(trainer).scale_batch_size(model, max_val=10) == 10
        assert not list(folder.rglob("*"))
    trainer.fit(model)
    return model, trainer


@pytest.mark.parametrize("when", ["before", "inside"])
def test_fit_is_bit_for_bit_the_one_without_a_tuner(when: str, tmp_path: Path) -> None:
    (plain, one), (tuned, other) = _fitted(tmp_path / "a"), _fitted(tmp_path / "b", **{when: True})
    assert same_weights(plain, tuned)
    assert torch.equal(torch.stack(plain.losses), torch.stack(tuned.losses))
    assert torch.equal(plain.running, tuned.running)
    assert plain.epochs == tuned.epochs == [0, 1, 2]
    assert plain.tracker.count == 18
    assert plain.tracker.contents() == tuned.tracker.contents()
    assert vars(plain.sampler) == vars(tuned.sampler)
    assert one.optimizers[0].state_dict()["state"].keys() == other.optimizers[0].state_dict()["state"].keys()
    for mine, theirs in zip(one.optimizers[0].state.values(), other.optimizers[0].state.values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert one.optimizers[0].param_groups[0]["lr"] == other.optimizers[0].param_groups[0]["lr"]
    assert one.callback_metrics == other.callback_metrics
    assert one.global_step == other.global_step == 18
    # Neither a row nor a file more.
    files = [sorted(str(path.relative_to(tmp_path / run)) for path in (tmp_path / run).rglob("*")) for run in "ab"]
    assert files[0] == files[1]
    rows = [next((tmp_path / run).rglob("metrics.csv")).read_text() for run in "ab"]
    assert rows[0] == rows[1]


def test_nothing_is_left_when_a_trial_raises(tmp_path: Path) -> None:
    class Fails(Everything):
        fails = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            if self.fails and len(self.losses) > 2:
                raise KeyError("broken")
            return output

    model = Fails()
    trainer = quiet(max_epochs=1, logger=CSVLogger(tmp_path), default_root_dir=tmp_path)
    weights, state, books = copy.deepcopy(model.state_dict()), torch.get_rng_state(), dict(vars(trainer))
    for search in (Tuner(trainer).lr_find, Tuner(trainer).scale_batch_size):
        with pytest.raises(KeyError, match="broken"):
            search(model)
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert vars(trainer) == books
    assert (model.losses, model.batch_size, model.hparams.lr, model.tracker.count) == ([], 10, 0.01, 0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not list(tmp_path.rglob("*"))
    assert "_trainer" not in vars(model)
    model.fails = False
    trainer.fit(model)
    assert len(model.losses) == 6


def test_model_made_in_configure_model_is_made_by_fit() -> None:
    class Made(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.layers = None

        def configure_model(self) -> None:
            if self.layers is None:
                self.layers = nn.Linear(8, 2)

    fitted = []
    for tunes in (True, False):
        torch.manual_seed(2)
        model = Made()
        if tunes:
            Tuner(quiet()).lr_find(model, loader(), num_training=15, update_attr=False)
            assert model.layers is None
        quiet().fit(model, loader())
        fitted.append(model)
    assert same_weights(*fitted)


class Stream(IterableDataset[Any]):
    """Remembers how far it was read."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Any:
        data = dataset(200)
        while self.at < 40:
            self.at += 1
            yield data[self.at - 1]
        self.at = 0


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_passed_in_are_where_they_were(workers: int) -> None:
    generator = torch.Generator().manual_seed(1)
    shuffled = loader(40, shuffle=True, generator=generator, num_workers=workers, persistent_workers=workers > 0)
    stream = Stream()
    held, before = DataLoader(stream, 4), generator.get_state()
    Tuner(quiet()).lr_find(Classifier(), shuffled, num_training=13)
    Tuner(quiet()).lr_find(Classifier(), held, num_training=13)
    assert torch.equal(generator.get_state(), before)
    assert stream.at == 0
    assert shuffled._iterator is None


def test_data_of_a_datamodule_is_not_copied_and_its_state_kept() -> None:
    class Data(L.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.size, self.calls, self.generator = 4, [], torch.Generator().manual_seed(1)

        def setup(self, stage: str) -> None:
            self.calls.append(stage)
            self.data = dataset(40)

        def train_dataloader(self) -> Any:
            return DataLoader(self.data, self.size, shuffle=True, generator=self.generator)

    data, trainer = Data(), quiet()
    state = data.generator.get_state()
    assert Tuner(trainer).scale_batch_size(Classifier(), data, batch_arg_name="size", max_val=16) == 16
    assert (data.size, data.calls) == (16, [])
    assert not hasattr(data, "data")
    assert torch.equal(data.generator.get_state(), state)
    assert trainer.datamodule is data
