"""The tuner finds a size and a rate by trying, and leaves everything else as it was."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import hasten as L
from hasten.callbacks import BatchSizeFinder, ModelCheckpoint
from hasten.tuner import Tuner
from tests.models import Classifier, dataset, loader, quiet, same_weights


class Sized(Classifier):
    """Runs out of memory above ``fits`` samples a batch."""

    def __init__(self, fits: int = 10**9, batch_size: int = 2, samples: int = 200, **options: Any) -> None:
        super().__init__(**options)
        self.batch_size, self.fits, self.samples = batch_size, fits, samples
        self.generator = torch.Generator().manual_seed(5)
        self.tried: list[int] = []
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(batch_idx)
        TRIED.append(len(batch[0]))
        if len(batch[0]) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        VALIDATED.append(len(batch[0]))
        return super().validation_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        return DataLoader(dataset(self.samples), self.batch_size, shuffle=True, generator=self.generator)

    def val_dataloader(self) -> Any:
        return DataLoader(dataset(self.samples), self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


TRIED: list[int] = []
VALIDATED: list[int] = []


@pytest.fixture(autouse=True)
def _nothing_tried_yet() -> None:
    TRIED.clear()
    VALIDATED.clear()


@pytest.mark.parametrize(
    ("options", "fits", "size"),
    [
        ({}, 50, 32),
        ({"mode": "power", "init_val": 5}, 50, 40),
        ({"mode": "binsearch"}, 50, 47),
        ({"mode": "binsearch", "margin": 0.0}, 50, 50),
        ({"mode": "binsearch", "margin": 0.0}, 51, 51),
        ({"mode": "binsearch", "margin": 0.5}, 50, 25),
        ({"max_trials": 3}, 50, 8),
        ({"max_val": 20}, 50, 20),
        ({"init_val": 64}, 50, 32),
        ({"init_val": 64}, 10, 8),
        # No larger than the data.
        ({}, 10**9, 200),
        ({"mode": "binsearch", "margin": 0.0, "init_val": 3}, 7, 7),
        ({}, 1, 1),
    ],
)
def test_size_found_is_the_largest_that_trained(options: Any, fits: int, size: int) -> None:
    model = Sized(fits)
    assert Tuner(quiet()).scale_batch_size(model, **options) == size
    assert model.batch_size == size
    assert size in TRIED
    assert set(VALIDATED) <= set(TRIED) | {200 % size for size in TRIED}
    assert max(VALIDATED) <= fits


def test_steps_of_each_trial() -> None:
    Tuner(quiet()).scale_batch_size(Sized(4), steps_per_trial=5)
    assert TRIED == [2] * 5 + [4] * 5 + [8]


def test_a_trial_validates_only_where_fit_does() -> None:
    Tuner(quiet(limit_val_batches=0)).scale_batch_size(Sized(4))
    assert TRIED
    assert not VALIDATED


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_other_methods(method: str) -> None:
    class Evaluated(Sized):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) > 20:
                raise RuntimeError(
                    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1"
                )
            return super().validation_step(batch, batch_idx)

        def test_step(self, batch: Any, batch_idx: int) -> Any:
            return self.validation_step(batch, batch_idx)

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) > 20:
                raise MemoryError
            return 1

    model = Evaluated()
    assert Tuner(quiet()).scale_batch_size(model, method=method) == 16
    assert not TRIED


def test_nothing_fits() -> None:
    model = Sized(0, batch_size=8)
    with pytest.raises(
        RuntimeError, match="no batch size fits into memory; tried from 2 down to 1"
    ) as caught:
        Tuner(quiet()).scale_batch_size(model)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert model.batch_size == 8


def test_other_errors_are_no_lack_of_memory() -> None:
    class Broken(Sized):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("shapes do not fit")

    model = Broken(batch_size=6)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        Tuner(quiet()).scale_batch_size(model)
    assert model.batch_size == 6


# -- no trace


def fingerprint(model: Any, trainer: Any, folder: Path) -> Any:
    random_states = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    return copy.deepcopy(
        (
            {key: value.tolist() for key, value in model.state_dict().items()},
            [None if p.grad is None else p.grad.tolist() for p in model.parameters()],
            [child.training for child in model.modules()],
            (model.seen, model.tried, dict(model.hparams), model.generator.get_state().tolist()),
            random_states,
            (
                trainer.global_step,
                trainer.current_epoch,
                trainer.state.fn,
                trainer.state.status,
                trainer.ckpt_path,
            ),
            (trainer.callback_metrics, [type(callback).__name__ for callback in trainer.callbacks]),
            (trainer.max_steps, trainer.max_epochs, trainer.limit_val_batches, trainer.should_stop),
            sorted(str(path.relative_to(folder)) for path in folder.rglob("*")),
        )
    )


@pytest.mark.parametrize("fitted_before", [False, True])
@pytest.mark.parametrize("what", ["size", "rate", "error"])
def test_no_trace_is_left(what: str, fitted_before: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Sized(20, dropout=0.5)
    trainer = quiet(
        logger=True,
        enable_checkpointing=True,
        callbacks=ModelCheckpoint(monitor="train_loss"),
        default_root_dir=tmp_path,
        limit_train_batches=3,
    )
    if fitted_before:
        trainer.fit(model)
    before = fingerprint(model, trainer, tmp_path)
    if what == "size":
        Tuner(trainer).scale_batch_size(model)
        model.batch_size = model.hparams.batch_size = 2
    elif what == "rate":
        Tuner(trainer).lr_find(model, num_training=12)
        model.hparams.lr = before[3][2]["lr"]
    else:
        model.fits = 0
        with pytest.raises(RuntimeError):
            Tuner(trainer).scale_batch_size(model)
        model.fits = 20
    assert fingerprint(model, trainer, tmp_path) == before
    assert ("_trainer" in vars(model)) == fitted_before


def test_fit_afterwards_is_the_one_without_a_tuner() -> None:
    fitted = []
    for tunes in (True, False):
        torch.manual_seed(0)
        model = Sized(20, batch_size=4, dropout=0.3)
        trainer = quiet(max_epochs=2)
        if tunes:
            Tuner(trainer).lr_find(model, num_training=20, update_attr=False)
            Tuner(trainer).scale_batch_size(model)
            model.batch_size = 4
        trainer.fit(model)
        fitted.append(model)
    assert same_weights(*fitted)
    assert fitted[0].seen == fitted[1].seen


# -- where the size is kept


def test_size_in_hparams_or_datamodule() -> None:
    class Data(L.LightningDataModule):
        def __init__(self, batch_size: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return loader(60, self.hparams.batch_size)

    data = Data()
    assert Tuner(quiet()).scale_batch_size(Classifier(), datamodule=data) == 60
    assert data.hparams.batch_size == 60

    class OtherName(Sized):
        def __init__(self) -> None:
            super().__init__()
            self.size = 4

        def train_dataloader(self) -> Any:
            return loader(60, self.size)

    model = OtherName()
    assert Tuner(quiet(limit_val_batches=0)).scale_batch_size(model, batch_arg_name="size") == 60
    assert model.size == 60


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda t, m: t.scale_batch_size(m, mode="pow"),
            r"mode='pow'.*use one of .power., .binsearch..*'power'",
        ),
        (
            lambda t, m: t.scale_batch_size(m, margin=1.0),
            r"margin=1\.0\): use a number of at least 0 and below 1",
        ),
        (lambda t, m: t.scale_batch_size(m, init_val=0), r"init_val=0\): use a whole number of at least 1"),
        (
            lambda t, m: t.scale_batch_size(m, batch_arg_name="batch_sise"),
            r"'batch_sise' not found.*'batch_size'",
        ),
        (
            lambda t, m: t.scale_batch_size(m, train_dataloaders=loader()),
            r"passed in cannot be changed.*self.batch_size",
        ),
        (lambda t, m: t.scale_batch_size(m, method="fitt"), r"method='fitt'.*Did you mean 'fit'"),
        (lambda t, m: t.scale_batch_size(m, dataloaders=loader()), "for fit, pass train_dataloaders"),
        (
            lambda t, m: t.scale_batch_size(m, method="test", train_dataloaders=loader()),
            r"pass dataloaders=\.\.\.",
        ),
        (lambda t, m: t.lr_find(m, mode="exp"), "use one of .exponential., .linear."),
        (lambda t, m: t.lr_find(m, min_lr=0), "0 < min_lr < max_lr"),
        (lambda t, m: t.lr_find(m, num_training=1), "at least 2"),
        (lambda t, m: t.lr_find(m, early_stop_threshold=0.5), "a number above 1"),
        (lambda t, m: t.lr_find(m, method="test"), "only 'fit' has a learning rate"),
        (lambda t, m: t.lr_find(m, method="eval"), "only 'fit' has a learning rate"),
        (lambda t, m: t.lr_find(m, attr_name="rate"), "'rate' not found"),
    ],
)
def test_wrong_use_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(Tuner(quiet()), Sized())
    assert not TRIED


def test_loader_that_does_not_follow_the_attribute_is_told() -> None:
    class Fixed(Sized):
        def train_dataloader(self) -> Any:
            return loader(60, 4)

    with pytest.raises(ValueError, match=r"batch_size is 2, and the loader's batch_size is 4"):
        Tuner(quiet()).scale_batch_size(Fixed())


def test_fast_dev_run_skips() -> None:
    trainer = quiet(fast_dev_run=True)
    with pytest.warns(UserWarning, match="scale_batch_size.*skipped"):
        assert Tuner(trainer).scale_batch_size(Sized()) is None
    with pytest.warns(UserWarning, match="lr_find.*skipped"):
        assert Tuner(trainer).lr_find(Sized()) is None


# -- learning rates


def by_hand(model: Classifier, batches: list[Any], found: Any) -> list[float]:
    average, losses = 0.0, []
    optimizer = model.configure_optimizers()
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = found.lr_at(step)
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        average = 0.98 * average + 0.02 * float(loss)
        losses.append(average / (1 - 0.98 ** (step + 1)))
    return losses


@pytest.mark.parametrize("mode", ["exponential", "linear"])
def test_losses_are_those_of_the_sweep_by_hand(mode: str) -> None:
    model = Classifier()
    plain = copy.deepcopy(model)
    trainer = quiet()
    found = Tuner(trainer).lr_find(model, loader(40), min_lr=1e-4, max_lr=0.5, num_training=20, mode=mode)
    assert found is not None
    assert found.results["loss"] == pytest.approx(
        by_hand(plain, [*loader(40), *loader(40)], found), abs=1e-12
    )
    assert len(found.results["lr"]) == 20
    assert found.results["lr"][0] == 1e-4
    assert found.results["lr"][-1] == pytest.approx(0.5)
    steps = np.diff(np.log(found.results["lr"]) if mode == "exponential" else found.results["lr"])
    assert steps[1:] == pytest.approx(steps[-1])
    assert model.hparams.lr == found.suggestion()


class Bowl(Classifier):
    """A parabola: every rate above 1 makes it worse."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.tensor(3.0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.place**2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.place], lr=self.hparams.lr)


def test_sweep_ends_where_the_loss_explodes() -> None:
    found = Tuner(quiet()).lr_find(Bowl(), loader(40), min_lr=0.01, max_lr=10)
    assert found is not None
    assert 50 < len(found.results["lr"]) < 100
    assert found.results["loss"][-1] > 4 * min(found.results["loss"]) > found.results["loss"][-2]
    assert 0.01 < found.suggestion() < 1.0
    whole = Tuner(quiet()).lr_find(Bowl(), loader(40), min_lr=0.01, max_lr=10, early_stop_threshold=None)
    assert whole is not None
    assert len(whole.results["lr"]) == 100


def test_what_has_no_single_rate_is_refused() -> None:
    class Manual(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(ValueError, match="manual optimization sets the learning rate itself"):
        Tuner(quiet()).lr_find(Manual(), loader())

    class Untrained(Classifier):
        def configure_optimizers(self) -> None:
            return None

    with pytest.raises(ValueError, match="returned 0 optimizers, and one is needed"):
        Tuner(quiet()).lr_find(Untrained(), loader())

    class Nameless(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(ValueError, match=r"has neither self\.lr nor self\.learning_rate"):
        Tuner(quiet()).lr_find(Nameless(), loader())
    assert Tuner(quiet()).lr_find(Nameless(), loader(), num_training=15, update_attr=False) is not None


def test_it_works_from_a_checkpoint(tmp_path: Path) -> None:
    model = Sized(batch_size=20)
    trainer = quiet(max_epochs=2)
    trainer.fit(model)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    finder = BatchSizeFinder(max_val=40)
    resumed = Sized(batch_size=20)
    weights = []

    class Notes(L.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            weights.append(copy.deepcopy(module.state_dict()))

    trainer = quiet(max_epochs=3, callbacks=[finder, Notes()])
    trainer.fit(resumed, ckpt_path=tmp_path / "two.ckpt")
    assert finder.optimal_batch_size == 40
    assert trainer.current_epoch == 3
    assert trainer.global_step == 20 + 5
    assert all(torch.equal(weights[0][key], value) for key, value in model.state_dict().items())
