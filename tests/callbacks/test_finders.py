"""BatchSizeFinder and LearningRateFinder inside of runs: new ones, resumed ones, evaluations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import hasten as L
from hasten.callbacks import BatchSizeFinder, LambdaCallback, LearningRateFinder
from tests.callbacks.resuming import assert_close
from tests.models import Classifier, loader, quiet, same_weights
from tests.refusals import refused, warned

TRIED: list[int] = []


class Sized(Classifier):
    """Runs out of memory above ``fits`` samples a batch."""

    def __init__(self, fits: int = 20, batch_size: int = 2, schedule: Any = None, lr: float = 0.1) -> None:
        super().__init__(lr=lr)
        self.fits, self.batch_size, self.schedule = fits, batch_size, schedule

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        TRIED.append(len(batch[0]))
        if len(batch[0]) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        return loader(80, self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return loader(40, self.batch_size)

    test_dataloader = predict_dataloader = val_dataloader

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.schedule is None:
            return optimizer
        return [optimizer], [{"scheduler": self.schedule(optimizer), "interval": "step"}]


@pytest.fixture(autouse=True)
def _nothing_tried_yet() -> None:
    TRIED.clear()


def trained(model: L.LightningModule, *finders: L.Callback, ckpt_path: Any = None, **options: Any) -> L.Trainer:
    """Fit from the same seed each time."""
    torch.manual_seed(1)
    trainer = quiet(callbacks=list(finders), **options)
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


def twins(make: Callable[..., Sized], **options: Any) -> tuple[Any, Any]:
    """Return two modules with the same weights."""
    model, other = make(**options), make(**options)
    other.load_state_dict(model.state_dict())
    return model, other


def rate_finder(**options: Any) -> LearningRateFinder:
    return LearningRateFinder(**{"min_lr": 1e-3, "num_training_steps": 20, **options})


def rate_of(trainer: L.Trainer) -> Any:
    return trainer.optimizers[0].param_groups[0]["lr"]


def test_what_is_skipped_and_what_is_refused_before_training() -> None:
    class Two(Sized):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), 0.1) for _ in range(2)]

    with refused(ValueError, fix="train_dataloader()"):
        quiet(callbacks=BatchSizeFinder()).fit(Sized(), loader(40))
    with refused(ValueError, says="lr_find"):
        quiet(callbacks=LearningRateFinder()).fit(Two())
    assert not TRIED
    size, rate = BatchSizeFinder(mode="Power", init_val=8), LearningRateFinder(mode="Linear")
    with (
        warned(UserWarning, says="BatchSizeFinder"),
        warned(UserWarning, says="LearningRateFinder"),
    ):
        trained(Sized(), size, rate, fast_dev_run=True)
    assert TRIED == [2]
    assert (size.optimal_batch_size, rate.optimal_lr) == (8, None)


# -- sizes


@pytest.mark.parametrize("call", ["validate", "test", "predict"])
def test_sizes_of_an_evaluation(call: str) -> None:
    seen = []

    class Evaluated(Sized):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            if len(batch[0]) > 10:
                raise MemoryError
            seen.append(len(batch[0]))

        validation_step = test_step = predict_step

    model = Evaluated()
    finder = BatchSizeFinder(mode="binsearch", margin=0.0)
    trainer = quiet(callbacks=finder, limit_val_batches=3, limit_test_batches=3, limit_predict_batches=3)
    getattr(trainer, call)(model)
    assert finder.optimal_batch_size == model.batch_size == 10
    assert seen[-3:] == [10, 10, 10]
    del seen[:]
    # Within fit a validation keeps its size.
    trained(model, BatchSizeFinder(init_val=4, max_val=4), num_sanity_val_steps=1)
    assert seen[-10:] == [4] * 10


class Milestones(BatchSizeFinder):
    """Searches in the second epoch."""

    def on_fit_start(self, *args: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.fits = 40
            self.scale_batch_size(trainer, pl_module)


def test_size_at_a_milestone() -> None:
    epochs: list[int] = []

    class Sampled(Sized):
        def train_dataloader(self) -> Any:
            made = super().train_dataloader()
            made.sampler.set_epoch = epochs.append
            return made

    finder = Milestones(steps_per_trial=1)
    assert trained(Sampled(), finder, max_epochs=3).global_step == 40 + 3 + 3
    assert finder.optimal_batch_size == 32
    # The loaders of the new size have the current epoch.
    assert epochs[-2:] == [1, 2]


# -- resumed runs


def test_a_resumed_run_keeps_size_and_rate_and_does_not_search(tmp_path: Path) -> None:
    def fit(model: Sized, epochs: int, **options: Any) -> L.Trainer:
        return trained(model, BatchSizeFinder(steps_per_trial=1), rate_finder(), max_epochs=epochs, **options)

    torch.manual_seed(0)
    model, first = twins(Sized, schedule=lambda optimizer: lr_scheduler.StepLR(optimizer, 3))
    fit(model, 4)
    fit(first, 2).save_checkpoint(tmp_path / "two.ckpt")
    again = Sized(schedule=first.schedule)
    del TRIED[:]
    trainer = fit(again, 4, ckpt_path=tmp_path / "two.ckpt")
    assert same_weights(model, again)
    assert TRIED == [16] * 10
    assert again.batch_size == trainer.callbacks[0].optimal_batch_size == 16  # type: ignore[attr-defined]
    assert again.hparams.lr == model.hparams.lr != 0.1
    # A fit that does not resume searches again.
    del TRIED[:]
    trainer.fit_loop.max_epochs = 5
    trainer.fit(again)
    assert TRIED[:3] == [2, 4, 8]


def test_rate_found_for_a_checkpoint_of_a_run_without_finder(tmp_path: Path) -> None:
    trained(Sized(batch_size=8)).save_checkpoint(tmp_path / "one.ckpt")
    rates: list[float] = []
    notes = LambdaCallback(on_train_batch_start=lambda trainer, *_: rates.append(rate_of(trainer)))
    finder, resumed = rate_finder(), Sized(batch_size=8)
    trained(resumed, finder, notes, max_epochs=2, ckpt_path=tmp_path / "one.ckpt")
    assert finder.optimal_lr is not None
    assert rates == [finder.optimal_lr.suggestion()] * 10
    assert resumed.hparams.lr == rates[0] != 0.1
    # It measured from the weights of the checkpoint.
    assert finder.optimal_lr.results["loss"][0] < 0.5 < Sized().loss(next(iter(loader(80, 80)))).item()


# -- rates and schedulers


def several(optimizer: Any) -> Any:
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.CosineAnnealingLR(optimizer, 20)], [3])


@pytest.mark.parametrize(
    "schedule",
    [
        None,
        lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5)),
        several,
    ],
    ids=["none", "step", "warmup", "several"],
)
def test_a_run_with_the_rate_found_is_one_made_with_it(schedule: Any) -> None:
    torch.manual_seed(0)
    model, plain = twins(Sized, batch_size=8, schedule=schedule)
    trained(model, rate_finder())
    assert model.hparams.lr not in (0.1, None)
    plain.hparams.lr = model.hparams.lr
    trained(plain)
    assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    assert schedule is not None or same_weights(model, plain)


def test_rate_found_later_is_the_rate_of_now_and_the_schedule_goes_on_from_there() -> None:
    rates = []

    class Later(LearningRateFinder):
        def on_fit_start(self, *args: Any) -> None:
            pass

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                self.lr_find(trainer, pl_module)
                assert pl_module.lr_schedulers().get_last_lr() == [pl_module.hparams.lr]

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            rates.append(rate_of(trainer))

    model = Sized(batch_size=16, schedule=lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step))
    trained(model, Later(min_lr=1e-3, num_training_steps=20), max_epochs=2)
    assert rates[:5] == pytest.approx([0.1 * 0.5**step for step in range(5)])
    assert rates[5:] == pytest.approx([model.hparams.lr * 0.5**step for step in range(5)])


def test_the_rate_can_be_kept_and_may_be_a_tensor() -> None:
    class OnDevice(Sized):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=torch.tensor(0.1), foreach=False)

    model, finder = Sized(batch_size=8), rate_finder(num_training_steps=15, update_attr=False)
    assert rate_of(trained(model, finder)) == model.hparams.lr == 0.1
    assert finder.optimal_lr is not None
    assert len(finder.optimal_lr.results["lr"]) == 15
    assert finder.state_dict() == {}
    rate = rate_of(trained(model := OnDevice(batch_size=8), rate_finder()))
    assert isinstance(rate, torch.Tensor)
    assert rate.item() == pytest.approx(model.hparams.lr)


def test_schedulers_stepped_by_hand_are_put_back() -> None:
    class Manual(Sized):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.automatic_optimization = False
            self.rates: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, schedule = self.optimizers(), self.lr_schedulers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            schedule.step()
            self.rates.append(schedule.get_last_lr()[0])

    model, plain = twins(Manual, batch_size=16, schedule=lambda o: lr_scheduler.StepLR(o, 2, 0.5))
    assert trained(model, Milestones(max_val=16, init_val=16), max_epochs=2).global_step == 10
    trained(plain, max_epochs=2)
    assert model.rates == plain.rates == pytest.approx([0.1 * 0.5 ** ((step + 1) // 2) for step in range(10)])
    assert same_weights(model, plain)
