"""Stochastic weight averaging: equal to PyTorch's own recipe, and the same after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

import hasten as L
from hasten.callbacks import LambdaCallback, LearningRateMonitor, StochasticWeightAveraging
from tests.callbacks.resuming import (
    SaveAt,
    SaveLast,
    Trace,
    assert_close,
    assert_resumes_exactly,
    assert_same,
    fitted,
    weights,
)
from tests.fakes import RowLogger
from tests.models import Classifier, loader, quiet


class Normalised(Classifier):
    """With batch normalisation."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(width=6)
        self.layers = nn.Sequential(
            nn.Linear(8, 6), nn.BatchNorm1d(6, momentum=0.3), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, 2)
        )


class Decaying(Normalised):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [ExponentialLR(optimizer, 0.9)]


def swa(*arguments: Any, **options: Any) -> Any:
    return lambda: [StochasticWeightAveraging(*arguments, **options)]


def by_hand(
    make: Any, *, epochs: int, start: int, anneal: int, strategy: Any = "cos"
) -> tuple[Any, list[float]]:
    """Train as PyTorch's page on SWA does; return the average and the learning rates."""
    L.seed_everything(0, verbose=False)
    model, data = make(), loader(24)
    configured = model.configure_optimizers()
    optimizer, schedule = configured, None
    if isinstance(configured, tuple):
        optimizer, schedule = configured[0][0], configured[1][0]
    average, rates = AveragedModel(model), []
    for epoch in range(epochs):
        if epoch == start:
            schedule = SWALR(optimizer, 0.3, anneal_epochs=anneal, anneal_strategy=strategy)
        for x, y in data:
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if epoch >= start:
            average.update_parameters(model)
        if schedule is not None:
            schedule.step()
    update_bn(data, average)
    return average.module.state_dict(), rates


class Rates(L.Callback):
    """The learning rates of each batch."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.seen.append([group["lr"] for group in trainer.optimizers[0].param_groups])


@pytest.mark.parametrize("make", [Classifier, Normalised, Decaying])
@pytest.mark.parametrize(
    ("start", "index", "anneal", "strategy"), [(0.5, 2, 3, "cos"), (2, 1, 0, "cos"), (4, 3, 2, "linear")]
)
def test_it_equals_the_recipe_of_pytorch(
    make: Any, start: Any, index: int, anneal: int, strategy: str
) -> None:
    # 0.5 of 6 epochs is the third one.
    rates = Rates()
    trainer = fitted(make, swa(0.3, start, anneal, strategy), rates, data=loader(24), max_epochs=6)
    expected, expected_rates = by_hand(make, epochs=6, start=index, anneal=anneal, strategy=strategy)
    assert rates.seen == [[rate] for rate in expected_rates]
    assert len(set(expected_rates)) > 1
    assert_close(weights(trainer), dict(expected))
    assert (trainer.global_step, trainer.current_epoch) == (36, 6)
    for module in trainer.lightning_module.modules():  # type: ignore[union-attr]
        assert not isinstance(module, nn.BatchNorm1d) or module.momentum == 0.3


# -- resuming


@pytest.mark.parametrize("make", [Decaying, lambda: Normalised(dropout=0.3)])
def test_a_resumed_run_ends_with_the_same_average(tmp_path: Path, make: Any) -> None:
    make_swa = swa(0.3, 2, annealing_epochs=2)
    whole = assert_resumes_exactly(tmp_path, make, make_swa, [4, 6, 7, 15, 24], max_epochs=4)
    assert whole.callbacks[0].state_dict()["n_averaged"] == 3


def test_a_run_resumed_when_all_epochs_are_done_gets_its_average(tmp_path: Path) -> None:
    def save(trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(tmp_path / f"{trainer._progress.epoch}.ckpt")

    ends = LambdaCallback(on_train_epoch_end=save)
    ends.runs_last = True  # type: ignore[misc]
    # Saved once before the average takes the epoch in, once after.
    whole = fitted(Normalised, lambda: [ends, *swa(0.3, 2)()], max_epochs=3)
    for epoch in (1, 2):
        path = tmp_path / f"{epoch}.ckpt"
        resumed = fitted(Normalised, swa(0.3, 2), ckpt_path=path, max_epochs=3, seed=7)
        assert_same(weights(resumed), weights(whole))


def test_a_finished_run_is_extended_with_the_weights_of_training(tmp_path: Path) -> None:
    def fit(epochs: int, **options: Any) -> L.Trainer:
        data = loader(24, shuffle=True, generator=torch.Generator().manual_seed(3))
        return fitted(Normalised, swa(0.3, 2), data=data, max_epochs=epochs, **options)

    short = fit(3)
    short.save_checkpoint(tmp_path / "end.ckpt")
    assert_same(dict(torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"]), weights(short))
    assert_same(weights(fit(5, ckpt_path=tmp_path / "end.ckpt", seed=7)), weights(fit(5)))
    short.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "current_model_state" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)


def test_a_checkpoint_in_mid_run_has_the_weights_of_training(tmp_path: Path) -> None:
    savers, trace = [SaveAt(tmp_path / "a.ckpt", 8), SaveLast(tmp_path / "b.ckpt", 8)], Trace()
    fitted(Normalised, swa(0.3, 1), trace, *savers, max_epochs=2)
    for saver in savers:
        assert_same(dict(torch.load(saver.path, weights_only=True)["state_dict"]), trace.steps[7])


# -- which epochs, and what the run notices


def test_a_run_stopped_early_gets_the_average_of_its_epochs() -> None:
    def stop(trainer: Any, module: Any) -> None:
        trainer.should_stop = trainer.current_epoch == 3

    trace, stops = Trace(), LambdaCallback(on_train_epoch_end=stop)
    trainer = fitted(Classifier, swa(0.3, 3), trace, stops, data=loader(8), max_epochs=10)
    third, fourth = trace.epochs[2:]
    assert_close(weights(trainer), {name: (third[name] + fourth[name]) / 2 for name in third})


def test_an_epoch_that_is_cut_short_is_not_averaged() -> None:
    options: dict[str, Any] = {"data": loader(24), "max_epochs": 6}
    trainer = fitted(Normalised, swa(0.3, 2), max_steps=15, **options)
    assert trainer.callbacks[0].state_dict()["n_averaged"] == 1
    assert_close(weights(trainer), dict(by_hand(Normalised, epochs=2, start=1, anneal=10)[0]))
    never = fitted(Normalised, swa(0.3, 5), max_steps=8, **options)
    assert_same(weights(never), weights(fitted(Normalised, list, max_steps=8, **options)))


def test_nothing_but_the_weights_shows_that_it_ran_once_more() -> None:
    def trained(make_callbacks: Any) -> tuple[list[int], list[int], torch.Tensor, dict[str, Any]]:
        steps: list[int] = []
        ends: list[int] = []

        class Counting(Normalised):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                steps.append(batch_idx)
                self.log("batch_idx", float(batch_idx), on_step=True, on_epoch=True)
                return super().training_step(batch, batch_idx)

        count = LambdaCallback(on_train_batch_end=lambda *rest: ends.append(rest[-1]))
        trainer = fitted(Counting, make_callbacks, count, max_epochs=2, limit_train_batches=4)
        logged = {name: value for name, value in trainer.callback_metrics.items() if "batch_idx" in name}
        return steps, ends, torch.rand(3), logged

    plain, averaged = trained(list), trained(swa(0.3, 2))
    assert plain[0] == [0, 1, 2, 3] * 2
    assert averaged[0] == [0, 1, 2, 3] * 3
    assert_same(plain[1:], averaged[1:])


def test_batch_normalisation_that_does_not_train_keeps_its_statistics() -> None:
    class Frozen(Normalised):
        def on_train_epoch_start(self) -> None:
            self.layers[1].eval()

    found = weights(fitted(Frozen, swa(0.3, 1)))
    assert torch.equal(found["layers.1.running_mean"], torch.zeros(6))
    assert found["layers.1.num_batches_tracked"] == 0


def test_without_an_end_as_many_batches_as_the_epoch_had() -> None:
    steps: list[int] = []

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            torch.manual_seed(0)
            while True:
                yield torch.randn(8), torch.randint(0, 2, ())

    class Steps(Normalised):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            steps.append(batch_idx)
            return super().training_step(batch, batch_idx)

    data = torch.utils.data.DataLoader(Endless(), batch_size=4)
    fitted(Steps, swa(0.3, 1), data=data, limit_train_batches=3)
    assert steps == [0, 1, 2] * 2


def test_own_averages_and_several_groups() -> None:
    class Groups(Classifier):
        def configure_optimizers(self) -> Any:
            groups = [{"params": self.layers[i].parameters()} for i in (0, 3)]
            return torch.optim.SGD(groups, lr=0.1)

    def latest(average: Any, current: Any, count: Any) -> Any:
        assert count >= 1
        return current

    rates, trace = Rates(), Trace()
    make = swa([0.5, 0.25], 1, annealing_epochs=0, avg_fn=latest, device=None)
    trainer = fitted(Groups, make, rates, trace, max_epochs=3)
    assert rates.seen[-1] == [0.5, 0.25]
    assert_same(weights(trainer), trace.steps[-1])


def test_the_learning_rate_monitor_goes_on() -> None:
    logger = RowLogger()
    make = swa(0.3, 2, annealing_epochs=1)
    trainer = fitted(Decaying, lambda: [LearningRateMonitor(), *make()], max_epochs=4, logger=logger)
    (config,) = trainer.lr_scheduler_configs
    assert (config.interval, type(config.scheduler)) == ("epoch", SWALR)
    assert [rate for _, rate in logger.of("lr-SGD")] == [0.1, 0.09, 0.3, 0.3]


# -- arguments


@pytest.mark.parametrize(
    ("start", "epochs", "expected"), [(1, 10, 0), (5, 10, 4), (0.8, 10, 7), (0.0, 10, 0)]
)
def test_when_it_starts_and_ends(start: Any, epochs: int, expected: int) -> None:
    callback = StochasticWeightAveraging(0.1, start)
    callback._max_epochs = epochs
    assert (callback.swa_start, callback.swa_end) == (expected, epochs - 1)
    callback._max_epochs = -1
    assert callback.swa_end == float("inf")
    assert StochasticWeightAveraging.pl_module_contains_batch_norm(Normalised())
    assert not StochasticWeightAveraging.pl_module_contains_batch_norm(Classifier())


class Untrained(Normalised):
    optimizers_made, schedulers_made = 1, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError("training began")

    def configure_optimizers(self) -> Any:
        made = [super(Untrained, self).configure_optimizers() for _ in range(self.optimizers_made)]
        return made, [StepLR(made[0], 1) for _ in range(self.schedulers_made)]


@pytest.mark.parametrize(
    ("module", "arguments", "trainer", "message"),
    [
        ({"optimizers_made": 2, "automatic": False}, (0.1,), {}, "gives 2 optimizers; it works with one"),
        ({"schedulers_made": 2}, (0.1,), {}, "gives 2 schedulers"),
        ({}, (0.1,), {"max_epochs": -1, "max_steps": 5}, r"a share needs Trainer\(max_epochs=...\)"),
        ({}, (0.1, 4), {"max_epochs": 3}, r"swa_epoch_start=4\): training ends after max_epochs=3"),
        ({}, ([0.1, 0.2],), {}, "2 learning rates, and the optimizer has 1 parameter groups"),
        ({"automatic": False}, (0.1,), {}, "batch normalisation needs training_step to run once more"),
    ],
)
def test_runs_it_cannot_average_are_refused_before_training(
    module: dict[str, Any], arguments: Any, trainer: dict[str, Any], message: str
) -> None:
    options = dict(module)
    model = Untrained()
    model.automatic_optimization = options.pop("automatic", True)
    vars(model).update(options)
    with pytest.raises(ValueError, match=message):
        quiet(callbacks=swa(*arguments)(), **trainer).fit(model, loader(8))
    quiet(callbacks=swa(0.1, 4)(), fast_dev_run=True).fit(Normalised(), loader(8))
