"""BatchSizeFinder and LearningRateFinder inside of runs: new ones, resumed ones, evaluations."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import hasten as L
from hasten.callbacks import BatchSizeFinder, LearningRateFinder
from tests.models import Classifier, loader, quiet, same_weights

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


def test_fast_dev_run_skips() -> None:
    model = Sized()
    finders = [BatchSizeFinder(mode="Power", init_val=8), LearningRateFinder(mode="Linear")]
    with (
        pytest.warns(UserWarning, match="BatchSizeFinder: skipped"),
        pytest.warns(UserWarning, match="LearningRateFinder: skipped"),
    ):
        quiet(fast_dev_run=True, callbacks=finders).fit(model)
    assert TRIED == [2]
    assert finders[0].optimal_batch_size == 8
    assert finders[1].optimal_lr is None


def test_loader_that_is_passed_in_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match=r"passed in cannot be changed. Define train_dataloader\(\)"):
        quiet(callbacks=BatchSizeFinder()).fit(Sized(), loader(40))
    assert not TRIED


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
    trainer = quiet(callbacks=BatchSizeFinder(init_val=4, max_val=4), num_sanity_val_steps=1)
    trainer.fit(model)
    assert seen[-10:] == [4] * 10


class Milestones(BatchSizeFinder):
    def on_fit_start(self, *args: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.fits = 40
            self.scale_batch_size(trainer, pl_module)


def test_size_at_a_milestone() -> None:
    told: list[int] = []

    class Told(Sized):
        def train_dataloader(self) -> Any:
            made = super().train_dataloader()
            made.sampler.set_epoch = told.append
            return made

    model, finder = Told(), Milestones(steps_per_trial=1)
    trainer = quiet(max_epochs=3, callbacks=finder)
    trainer.fit(model)
    assert finder.optimal_batch_size == 32
    assert trainer.global_step == 40 + 3 + 3
    # The loaders of the new size know the epoch in hand.
    assert told[-2:] == [1, 2]


# -- resumed runs


def test_resumed_run_keeps_size_and_rate_and_searches_no_more(tmp_path: Path) -> None:
    def run(model: Any, epochs: int, **options: Any) -> L.Trainer:
        finders = [BatchSizeFinder(steps_per_trial=1), LearningRateFinder(min_lr=1e-3, num_training_steps=20)]
        trainer = quiet(max_epochs=epochs, callbacks=finders)
        trainer.fit(model, **options)
        return trainer

    torch.manual_seed(0)
    model = Sized(schedule=lambda optimizer: lr_scheduler.StepLR(optimizer, 3))
    resumed = copy.deepcopy(model)
    torch.manual_seed(1)
    run(model, 4)
    torch.manual_seed(1)
    first = run(resumed, 2)
    first.save_checkpoint(tmp_path / "two.ckpt")

    again = Sized(schedule=resumed.schedule)
    del TRIED[:]
    trainer = run(again, 4, ckpt_path=tmp_path / "two.ckpt")
    assert same_weights(model, again)
    assert TRIED == [16] * 10
    assert again.batch_size == trainer.callbacks[0].optimal_batch_size == 16
    assert again.hparams.lr == model.hparams.lr != 0.1
    # A fit that does not resume searches again.
    del TRIED[:]
    trainer.fit_loop.max_epochs = 5
    trainer.fit(again)
    assert TRIED[:3] == [2, 4, 8]


def test_rate_found_for_a_checkpoint_of_a_run_without_finder(tmp_path: Path) -> None:
    first = quiet(max_epochs=1)
    model = Sized(batch_size=8, lr=0.1)
    first.fit(model)
    first.save_checkpoint(tmp_path / "one.ckpt")
    finder, rates, losses = LearningRateFinder(min_lr=1e-3, num_training_steps=20), [], []

    class Notes(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])
            losses.append(module.loss(batch).item())

    resumed = Sized(batch_size=8)
    quiet(max_epochs=2, callbacks=[finder, Notes()]).fit(resumed, ckpt_path=tmp_path / "one.ckpt")
    assert finder.optimal_lr is not None
    assert rates == [finder.optimal_lr.suggestion()] * 10
    assert resumed.hparams.lr == rates[0] != 0.1
    # It measured from the weights of the checkpoint.
    assert finder.optimal_lr.results["loss"][0] < 0.5 < Sized().loss(next(iter(loader(80, 80)))).item()


def test_state_is_plain() -> None:
    finder = BatchSizeFinder()
    assert finder.state_dict() == LearningRateFinder().state_dict() == {}
    finder.load_state_dict({"batch_size": 12})
    assert finder.optimal_batch_size == 12
    assert finder.state_dict() == {"batch_size": 12}


# -- rates and schedulers


SCHEDULES: dict[str, Any] = {
    "none": None,
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "warmup": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5)),
    "several": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 20)],
        [3],
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_run_with_the_rate_found_is_the_one_made_with_it(name: str) -> None:
    torch.manual_seed(0)
    model = Sized(batch_size=8, schedule=SCHEDULES[name])
    plain = copy.deepcopy(model)
    torch.manual_seed(1)
    finder = LearningRateFinder(min_lr=1e-3, num_training_steps=20)
    quiet(callbacks=finder).fit(model)
    plain.hparams.lr = model.hparams.lr
    assert model.hparams.lr not in (0.1, None)
    torch.manual_seed(1)
    trainer = quiet()
    trainer.fit(plain)
    for key, value in model.state_dict().items():
        assert torch.allclose(value, plain.state_dict()[key], rtol=1e-5, atol=1e-7)
    if name == "none":
        assert same_weights(model, plain)


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
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    model = Sized(batch_size=16, schedule=lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step))
    quiet(max_epochs=2, callbacks=Later(min_lr=1e-3, num_training_steps=20)).fit(model)
    assert rates[:5] == pytest.approx([0.1 * 0.5**step for step in range(5)])
    assert rates[5:] == pytest.approx([model.hparams.lr * 0.5**step for step in range(5)])


def test_rate_is_left_alone_where_that_is_asked() -> None:
    model = Sized(batch_size=8)
    finder = LearningRateFinder(num_training_steps=15, update_attr=False)
    trainer = quiet(callbacks=finder)
    trainer.fit(model)
    assert finder.optimal_lr is not None
    assert len(finder.optimal_lr.results["lr"]) == 15
    assert model.hparams.lr == trainer.optimizers[0].param_groups[0]["lr"] == 0.1
    assert finder.state_dict() == {}


def test_rate_kept_as_a_tensor() -> None:
    class OnDevice(Sized):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=torch.tensor(0.1), foreach=False)

    model = OnDevice(batch_size=8)
    trainer = quiet(callbacks=LearningRateFinder(min_lr=1e-3, num_training_steps=20))
    trainer.fit(model)
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    assert isinstance(rate, torch.Tensor)
    assert rate.item() == pytest.approx(model.hparams.lr)


def test_what_has_no_single_rate_is_refused() -> None:
    class Two(Sized):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]

    with pytest.raises(ValueError, match="manual optimization"):
        quiet(callbacks=LearningRateFinder()).fit(Two())
    assert not TRIED


def test_search_at_the_end_of_a_validation() -> None:
    stages = []

    class AtValidation(L.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            finder = LearningRateFinder(num_training_steps=3, update_attr=False)
            finder.lr_find(trainer, pl_module)
            assert finder.optimal_lr is not None
            assert len(finder.optimal_lr.results["loss"]) == 3

    class Notes(Sized):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            stages.append((self.trainer.training, torch.is_grad_enabled()))
            return super().training_step(batch, batch_idx)

    model, plain = Notes(batch_size=20), Sized(batch_size=20)
    plain.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    quiet(callbacks=AtValidation(), num_sanity_val_steps=0).fit(model)
    assert stages == [(True, True)] * (4 + 3)
    torch.manual_seed(1)
    quiet(num_sanity_val_steps=0).fit(plain)
    assert same_weights(model, plain)


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

    options: dict[str, Any] = {"batch_size": 16, "schedule": lambda o: lr_scheduler.StepLR(o, 2, 0.5)}
    model, plain = Manual(**options), Manual(**options)
    plain.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    trainer = quiet(max_epochs=2, callbacks=Milestones(max_val=16, init_val=16))
    trainer.fit(model)
    assert trainer.global_step == 10
    torch.manual_seed(1)
    quiet(max_epochs=2).fit(plain)
    assert model.rates == plain.rates == pytest.approx([0.1 * 0.5 ** ((step + 1) // 2) for step in range(10)])
    assert same_weights(model, plain)
