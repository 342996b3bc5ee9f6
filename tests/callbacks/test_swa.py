"""Stochastic weight averaging: equal to PyTorch's own recipe, and the same after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

import hasten as L
from hasten.callbacks import LearningRateMonitor, StochasticWeightAveraging
from hasten.loggers import CSVLogger
from tests.callbacks.resuming import SaveAt, SaveLast, assert_resumes_exactly, assert_same, fitted, weights
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
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def by_hand(
    model: Classifier, data: Any, *, epochs: int, start: int, anneal: int, strategy: str = "cos"
) -> tuple[AveragedModel, list[float]]:
    """Train as PyTorch's page on SWA does."""
    configured = model.configure_optimizers()
    optimizer, scheduler = configured, None
    if isinstance(configured, tuple):
        optimizer, scheduler = configured[0][0], configured[1][0]
    average = AveragedModel(model)
    swa_scheduler, rates = None, []
    for epoch in range(epochs):
        if epoch == start:
            swa_scheduler = SWALR(optimizer, 0.3, anneal_epochs=anneal, anneal_strategy=strategy)  # type: ignore[arg-type]
        for x, y in data:
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if swa_scheduler is not None:
            average.update_parameters(model)
            swa_scheduler.step()
        elif scheduler is not None:
            scheduler.step()
    update_bn(data, average)
    return average, rates


class Rates(L.Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("make", [Classifier, Normalised, Decaying])
@pytest.mark.parametrize(
    ("start", "index", "anneal", "strategy"), [(0.5, 2, 3, "cos"), (2, 1, 0, "cos"), (4, 3, 2, "linear")]
)
def test_it_equals_the_recipe_of_pytorch(
    make: Any, start: Any, index: int, anneal: int, strategy: str
) -> None:
    data, rates = loader(24), Rates()
    # 0.5 of 6 epochs is the third one.
    trainer = fitted(
        make,
        lambda: [StochasticWeightAveraging(0.3, start, anneal, strategy)],
        rates,
        data=data,
        max_epochs=6,
    )
    L.seed_everything(0, verbose=False)
    average, expected_rates = by_hand(make(), data, epochs=6, start=index, anneal=anneal, strategy=strategy)
    assert rates.rates == expected_rates
    assert len(set(rates.rates)) > 1
    expected = average.module.state_dict()
    for name, value in weights(trainer).items():
        assert torch.allclose(value, expected[name], atol=1e-6), name
    assert trainer.global_step == 36
    assert trainer.current_epoch == 6
    for module in trainer.lightning_module.modules():  # type: ignore[union-attr]
        assert not isinstance(module, nn.BatchNorm1d) or module.momentum == 0.3


@pytest.mark.parametrize("make", [Decaying, lambda: Normalised(dropout=0.3)])
def test_a_resumed_run_ends_with_the_same_average(tmp_path: Path, make: Any) -> None:
    whole = assert_resumes_exactly(
        tmp_path,
        make,
        lambda: [StochasticWeightAveraging(0.3, 2, annealing_epochs=2)],
        [4, 6, 7, 12, 15, 24],
        max_epochs=4,
    )
    assert whole.callbacks[0].state_dict()["n_averaged"] == 3


def test_a_run_resumed_when_all_epochs_are_done_gets_its_average(tmp_path: Path) -> None:
    class Ends(L.Callback):
        runs_last = True

        def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer._progress.epoch}.ckpt")

    def make() -> list[L.Callback]:
        # Once before the average takes the epoch in, once after.
        return [Ends(), StochasticWeightAveraging(0.3, 2)]

    whole = fitted(Normalised, make, max_epochs=3)
    for epoch in (1, 2):
        resumed = fitted(
            Normalised, lambda: make()[1:], ckpt_path=tmp_path / f"{epoch}.ckpt", max_epochs=3, seed=7
        )
        assert_same(weights(resumed), weights(whole))


def test_a_finished_run_is_extended_with_the_weights_of_training(tmp_path: Path) -> None:
    def make() -> list[L.Callback]:
        return [StochasticWeightAveraging(0.3, 2)]

    def shuffled() -> Any:
        return loader(24, shuffle=True, generator=torch.Generator().manual_seed(3))

    short = fitted(Normalised, make, data=shuffled(), max_epochs=3)
    short.save_checkpoint(tmp_path / "end.ckpt")
    assert_same(dict(torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"]), weights(short))
    resumed = fitted(Normalised, make, data=shuffled(), ckpt_path=tmp_path / "end.ckpt", max_epochs=5, seed=7)
    assert_same(weights(resumed), weights(fitted(Normalised, make, data=shuffled(), max_epochs=5)))
    short.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "current_model_state" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)


def test_a_run_stopped_early_gets_the_average_of_its_epochs() -> None:
    class Stop(L.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            self.kept.append({k: v.clone() for k, v in module.state_dict().items()})
            trainer.should_stop = trainer.current_epoch == 3

        kept: ClassVar[list[Any]] = []

    trainer = fitted(
        Classifier, lambda: [StochasticWeightAveraging(0.3, 3)], Stop(), data=loader(8), max_epochs=10
    )
    for name, value in weights(trainer).items():
        assert torch.allclose(value, (Stop.kept[2][name] + Stop.kept[3][name]) / 2, atol=1e-6)


def test_an_epoch_that_is_cut_short_is_not_averaged(tmp_path: Path) -> None:
    trainer = fitted(
        Normalised, lambda: [StochasticWeightAveraging(0.3, 2)], data=loader(24), max_epochs=6, max_steps=15
    )
    assert trainer.callbacks[0].state_dict()["n_averaged"] == 1
    L.seed_everything(0, verbose=False)
    average, _ = by_hand(Normalised(), loader(24), epochs=2, start=1, anneal=10)
    expected = average.module.state_dict()
    for name, value in weights(trainer).items():
        assert torch.allclose(value, expected[name], atol=1e-6), name
    never = fitted(
        Normalised, lambda: [StochasticWeightAveraging(0.3, 5)], data=loader(24), max_epochs=6, max_steps=8
    )
    plain = fitted(Normalised, list, data=loader(24), max_epochs=6, max_steps=8)
    assert_same(weights(never), weights(plain))


def test_nothing_but_the_weights_tells_that_it_ran_once_more(tmp_path: Path) -> None:
    counts: dict[str, list[int]] = {"swa": [], "plain": []}

    class Counting(Normalised):
        name = "plain"

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            counts[self.name].append(batch_idx)
            self.log("batch_idx", float(batch_idx), on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    class Swa(Counting):
        name = "swa"

    class Hears(L.Callback):
        def __init__(self) -> None:
            self.batches = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.batches += 1

    hears, draws, metrics = [], [], []
    for make, callbacks in ((Counting, list), (Swa, lambda: [StochasticWeightAveraging(0.3, 2)])):
        hear = Hears()
        trainer = fitted(make, callbacks, hear, max_epochs=2, limit_train_batches=4)  # type: ignore[arg-type]
        hears.append(hear.batches)
        draws.append(torch.rand(3))
        metrics.append({k: v for k, v in trainer.callback_metrics.items() if k.startswith("batch_idx")})
        model = trainer.lightning_module
        assert model is not None
        assert all(p.grad is None or p.requires_grad for p in model.parameters())
    assert hears == [8, 8]
    assert torch.equal(draws[0], draws[1])
    assert_same(metrics[0], metrics[1])
    assert counts["plain"] == [0, 1, 2, 3] * 2
    assert counts["swa"] == [0, 1, 2, 3] * 3


def test_batch_normalisation_that_does_not_train_keeps_its_statistics() -> None:
    class Frozen(Normalised):
        def on_train_epoch_start(self) -> None:
            self.layers[1].eval()

    trainer = fitted(Frozen, lambda: [StochasticWeightAveraging(0.3, 1)])
    assert torch.equal(trainer.lightning_module.layers[1].running_mean, torch.zeros(6))  # type: ignore[union-attr,operator]
    assert int(trainer.lightning_module.layers[1].num_batches_tracked) == 0  # type: ignore[union-attr,arg-type,operator]


def test_without_an_end_as_many_batches_as_the_epoch_had() -> None:
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            torch.manual_seed(0)
            while True:
                yield torch.randn(8), torch.randint(0, 2, ())

    class Steps(Normalised):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            Steps.count += 1
            return super().training_step(batch, batch_idx)

        count = 0

    data = torch.utils.data.DataLoader(Endless(), batch_size=4)
    fitted(Steps, lambda: [StochasticWeightAveraging(0.3, 1)], data=data, limit_train_batches=3)
    assert Steps.count == 6


def test_own_averages_and_several_groups() -> None:
    class Groups(Classifier):
        def configure_optimizers(self) -> Any:
            first, last = self.layers[0], self.layers[3]
            return torch.optim.SGD([{"params": first.parameters()}, {"params": last.parameters()}], lr=0.1)

    def latest(average: Any, current: Any, count: Any) -> Any:
        assert count >= 1
        return current

    seen: list[list[float]] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    trace: list[Any] = []

    class Last(L.Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            trace.append({k: v.clone() for k, v in module.state_dict().items()})

    callback = StochasticWeightAveraging([0.5, 0.25], 1, annealing_epochs=0, avg_fn=latest, device=None)
    trainer = fitted(Groups, lambda: [Last(), callback], Watch(), max_epochs=3)
    assert seen[-1] == [0.5, 0.25]
    assert_same(weights(trainer), trace[0])


def test_the_learning_rate_monitor_goes_on(tmp_path: Path) -> None:
    monitor = LearningRateMonitor()
    trainer = fitted(
        Decaying,
        lambda: [monitor, StochasticWeightAveraging(0.3, 2, annealing_epochs=1)],
        max_epochs=4,
        logger=CSVLogger(tmp_path),
    )
    assert monitor.lrs is not None
    assert trainer.lr_scheduler_configs[0].interval == "epoch"
    assert type(trainer.lr_scheduler_configs[0].scheduler) is SWALR
    lines = (Path(trainer.log_dir or "") / "metrics.csv").read_text().splitlines()
    at = lines[0].split(",").index("lr-SGD")
    rates = [float(line.split(",")[at]) for line in lines[1:] if line.split(",")[at]]
    assert rates == pytest.approx([0.1, 0.09, 0.3, 0.3])


def test_when_it_starts_and_ends() -> None:
    assert StochasticWeightAveraging(0.1, 1).swa_start == 0
    assert StochasticWeightAveraging(0.1, 5).swa_start == 4
    callback = StochasticWeightAveraging(0.1, 0.8)
    callback._max_epochs = 10
    assert (callback.swa_start, callback.swa_end) == (7, 9)
    callback._max_epochs = -1
    assert callback.swa_end == float("inf")
    callback = StochasticWeightAveraging(0.1, 0.0)
    callback._max_epochs = 10
    assert callback.swa_start == 0
    assert StochasticWeightAveraging.pl_module_contains_batch_norm(Normalised())
    assert not StochasticWeightAveraging.pl_module_contains_batch_norm(Classifier())


def test_runs_it_cannot_average_are_refused_before_training() -> None:
    class Untrained(Normalised):
        several = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("training began")

    class Two(Untrained):
        def configure_optimizers(self) -> Any:
            self.automatic_optimization = False
            return [super(Two, self).configure_optimizers() for _ in range(2)]

    class Schedules(Untrained):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2)]

    def refused(module: Any, message: str, *arguments: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            quiet(callbacks=[StochasticWeightAveraging(*arguments)], **options).fit(module, loader(8))

    two = Two()
    two.automatic_optimization = False
    manual = Untrained()
    manual.automatic_optimization = False
    refused(two, "gives 2 optimizers; it works with one", 0.1)
    refused(Schedules(), "gives 2 schedulers", 0.1)
    refused(Untrained(), r"a share needs Trainer\(max_epochs=...\)", 0.1, max_epochs=-1, max_steps=5)
    refused(Untrained(), r"swa_epoch_start=4\): training ends after max_epochs=3", 0.1, 4, max_epochs=3)
    refused(Untrained(), "2 learning rates, and the optimizer has 1 parameter groups", [0.1, 0.2])
    refused(manual, "batch normalisation needs training_step to run once more", 0.1)
    quiet(callbacks=[StochasticWeightAveraging(0.1, 4)], fast_dev_run=True).fit(Normalised(), loader(8))


def test_a_checkpoint_in_mid_run_has_the_weights_of_training(tmp_path: Path) -> None:
    savers = [SaveAt(tmp_path / "a.ckpt", 8), SaveLast(tmp_path / "b.ckpt", 8)]
    trace: list[Any] = []

    class Trace(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            trace.append({k: v.clone() for k, v in module.state_dict().items()})

    fitted(Normalised, lambda: [StochasticWeightAveraging(0.3, 1)], Trace(), *savers, max_epochs=2)
    for saver in savers:
        assert_same(dict(torch.load(saver.path, weights_only=True)["state_dict"]), trace[7])
