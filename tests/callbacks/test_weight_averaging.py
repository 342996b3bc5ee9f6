"""Weight averaging: equal to one taken by hand; validation, checkpoints and resuming use the right weights."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

import hasten as L
from hasten.callbacks import (
    EMAWeightAveraging,
    LambdaCallback,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from tests.callbacks.resuming import (
    SaveLast,
    Trace,
    assert_close,
    assert_resumes_exactly,
    assert_same,
    fitted,
    weights,
)
from tests.models import Classifier, loader, quiet
from tests.refusals import refused

FIRST = "layers.0.weight"


class Normalized(Classifier):
    """With batch normalization, whose count of batches is a whole number, and a record of the weights validated."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(width=6)
        self.layers = nn.Sequential(
            nn.Linear(8, 6), nn.BatchNorm1d(6, momentum=0.3), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, 2)
        )
        self.validated: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.validated.append(self.layers[0].weight.detach().clone())


class Decaying(Normalized):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [ExponentialLR(optimizer, 0.9)]


def ema(**options: Any) -> Any:
    return lambda: [EMAWeightAveraging(**{"decay": 0.5, **options})]


def swa(*arguments: Any, **options: Any) -> Any:
    return lambda: [StochasticWeightAveraging(*arguments, **options)]


def mean_of(steps: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum((step[name] for step in steps), torch.zeros(())) / len(steps) for name in steps[0]}


def moving_average(steps: list[dict[str, Tensor]], decay: float = 0.5) -> dict[str, Tensor]:
    """Return the moving average; counts are copied."""
    average = steps[0]
    for step in steps[1:]:
        average = {
            name: value.lerp(step[name], 1 - decay) if value.is_floating_point() else step[name]
            for name, value in average.items()
        }
    return average


def stored(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


# -- what is averaged


def test_the_moving_average_equals_one_by_hand_and_training_is_the_same() -> None:
    trace, plain = Trace(), Trace()
    options: dict[str, Any] = {"max_epochs": 2, "validation": loader(8)}
    trainer = fitted(Normalized, ema(decay=0.9), trace, **options)
    assert len(trace.steps) == 12
    assert_same(weights(trainer), moving_average(trace.steps, 0.9))
    slow = trace.steps[0][FIRST]
    for step in trace.steps[1:]:
        slow = 0.9 * slow + 0.1 * step[FIRST]
    assert torch.allclose(weights(trainer)[FIRST], slow, atol=1e-6)
    fitted(Normalized, list, plain, **options)
    assert_same(plain.steps, trace.steps)


def test_the_mean_is_the_default_and_buffers_can_be_copied() -> None:
    trace = Trace()
    options = {"accumulate_grad_batches": 2}
    trainer = fitted(Normalized, lambda: [WeightAveraging(use_buffers=False)], trace, **options)
    assert len(trace.steps) == 3  # Once a step, not once a batch.
    buffers = {name: trace.steps[-1][name] for name, _ in Normalized().named_buffers()}
    assert_close(weights(trainer), {**mean_of(trace.steps), **buffers})


@pytest.mark.parametrize("kind", ["avg_fn", "multi_avg_fn"])
def test_own_functions_are_used(kind: str) -> None:
    counts: set[int] = set()

    def largest(averaged: Any, current: Any, num_averaged: Any) -> Any:
        counts.add(int(num_averaged))
        if kind == "avg_fn":
            return torch.maximum(averaged, current)
        for one, other in zip(averaged, current, strict=True):
            one.copy_(torch.maximum(one, other))
        return None

    trace = Trace()
    trainer = fitted(Classifier, lambda: [WeightAveraging(**{kind: largest})], trace)
    for name, value in weights(trainer).items():
        assert torch.equal(value, torch.stack([step[name] for step in trace.steps]).amax(0))
    assert counts == {1, 2, 3, 4, 5}


class Chosen(WeightAveraging):
    """Updates after the third step and after each epoch."""

    asked: ClassVar[list[tuple[int | None, int | None]]] = []

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        self.asked.append((step_idx, epoch_idx))
        return epoch_idx is not None or step_idx == 2


def test_steps_and_complete_epochs_are_chosen() -> None:
    trace = Trace()
    Chosen.asked.clear()
    trainer = fitted(Classifier, lambda: [Chosen()], trace, data=loader(8), max_epochs=3)
    steps, epochs = [(step, None) for step in range(6)], [(None, epoch) for epoch in range(3)]
    assert Chosen.asked == [*steps[:2], epochs[0], *steps[2:4], epochs[1], *steps[4:], epochs[2]]
    assert_close(weights(trainer), mean_of([trace.steps[i] for i in (1, 2, 3, 5)]))
    trace = Trace()
    trainer = fitted(Classifier, lambda: [Chosen()], trace, data=loader(8), max_epochs=2, max_steps=2)
    assert_same(weights(trainer), trace.epochs[0])
    trainer = fitted(Classifier, lambda: [Chosen()], data=loader(8), max_epochs=2, max_steps=1)
    assert int(trainer.callbacks[0]._average_model.n_averaged) == 0  # type: ignore[attr-defined]


def test_buffers_made_in_the_first_batch_are_averaged_too() -> None:
    class Table(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", None, persistent=False)
            self.register_buffer("grows", torch.zeros(1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.table = torch.full((3,), float(batch_idx))
            if batch_idx == 0:
                self.grows = torch.zeros(2 + self.current_epoch)
            return self.loss(batch)

    module = fitted(Table, lambda: [WeightAveraging()], max_epochs=3, data=loader(8)).lightning_module
    assert module.table.shape == (3,)  # type: ignore[union-attr]


def test_another_set_of_parameters_is_refused() -> None:
    pruning = ModelPruning("l1_unstructured", amount=0.5)
    with refused(RuntimeError, says=("WeightAveraging", "weight_orig")):
        fitted(Classifier, lambda: [WeightAveraging(), pruning], max_epochs=2)


def test_tied_parameters_are_averaged_once() -> None:
    class Tied(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
            self.other.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.other(self.one(x)))

    trace = Trace()
    trainer = fitted(Tied, lambda: [WeightAveraging()], trace, validation=loader(4))
    assert_close(weights(trainer), mean_of(trace.steps))


def test_when_the_moving_average_is_updated() -> None:
    # Also after it was sent to another process, as ddp_spawn does.
    average = pickle.loads(pickle.dumps(EMAWeightAveraging(decay=0.5)))
    averaged = [torch.zeros(2)]
    average._multi_avg_fn(averaged, [torch.ones(2)], torch.tensor(1))
    assert averaged[0].tolist() == [0.5, 0.5]
    average = EMAWeightAveraging(update_every_n_steps=5, update_starting_at_step=10, update_starting_at_epoch=2)
    assert [step for step in range(22) if average.should_update(step_idx=step)] == [10, 15, 20]
    assert [epoch for epoch in range(4) if average.should_update(epoch_idx=epoch)] == [2, 3]
    assert not EMAWeightAveraging(update_every_n_steps=0).should_update(step_idx=0)
    assert not EMAWeightAveraging().should_update(epoch_idx=5)


# -- validation


def test_validation_and_its_hooks_see_the_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[Tensor] = []

    class Watched(Normalized):
        def on_validation_epoch_end(self) -> None:
            seen.append(self.layers[0].weight.detach().clone())

        on_validation_end = on_validation_epoch_end

    class Last(ModelCheckpoint):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(pl_module.layers[0].weight.detach().clone())

    trace, options = Trace(), {"validation": loader(8), "enable_checkpointing": True}
    trainer = fitted(Watched, ema(), trace, Last(), **options)
    average, trained = moving_average(trace.steps)[FIRST], trace.steps[-1][FIRST]
    module: Any = trainer.lightning_module
    assert_same([*module.validated, *seen], [average, average, average, trained, trained])
    other = Watched()
    given = other.layers[0].weight.detach().clone()
    trainer.validate(other, loader(4), verbose=False)
    assert torch.equal(other.validated[0], given)


@pytest.mark.parametrize("what", [RuntimeError, KeyboardInterrupt])
def test_a_broken_validation_leaves_the_weights_of_training(tmp_path: Path, what: type[BaseException]) -> None:
    class Breaking(Normalized):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise what("on purpose")

    trace, module = Trace(), Breaking()
    callbacks = [*ema()(), trace, OnExceptionCheckpoint(tmp_path)]
    trainer = quiet(callbacks=callbacks, enable_checkpointing=True, num_sanity_val_steps=0)
    with pytest.raises((what, SystemExit)):
        trainer.fit(module, loader(24), loader(8))
    assert_same(dict(module.state_dict()), trace.steps[-1])
    checkpoint = stored(tmp_path / "on_exception.ckpt")
    assert_same(dict(checkpoint["current_model_state"]), trace.steps[-1])
    assert not torch.equal(checkpoint["state_dict"][FIRST], trace.steps[-1][FIRST])


# -- checkpoints


def test_a_checkpoint_holds_the_average_and_loads_without_the_callback(tmp_path: Path) -> None:
    trace, saver = Trace(), SaveLast(tmp_path / "a.ckpt", 5)
    trainer = fitted(lambda: Classifier(width=6), ema(), trace, saver)
    average, checkpoint = moving_average(trace.steps[:5]), stored(saver.path)
    assert_same(dict(checkpoint["state_dict"]), average)
    assert_same(dict(checkpoint["current_model_state"]), trace.steps[4])
    assert int(checkpoint["averaging_state"]["n_averaged"]) == 5
    assert_same(dict(Classifier.load_from_checkpoint(saver.path).state_dict()), average)
    # Evaluation, with the callback or without, uses the average.
    for callbacks in ([], ema()()):
        model = Classifier(width=6)
        quiet(callbacks=callbacks).test(model, loader(8), ckpt_path=saver.path, verbose=False)
        assert_same(dict(model.state_dict()), average)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    checkpoint = stored(tmp_path / "weights.ckpt")
    assert "current_model_state" not in checkpoint
    assert_same(dict(checkpoint["state_dict"]), weights(trainer))


def test_a_checkpoint_saved_during_validation_holds_both_once_there_is_an_average(tmp_path: Path) -> None:
    class Saving(Normalized):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.trainer.save_checkpoint(tmp_path / "a.ckpt")

    trace = Trace()
    whole = fitted(Saving, ema(), trace, validation=loader(4))
    assert_same(dict(stored(tmp_path / "a.ckpt")["current_model_state"]), trace.steps[-1])
    assert_same(dict(stored(tmp_path / "a.ckpt")["state_dict"]), weights(whole))
    trainer = fitted(Saving, ema(update_starting_at_step=100), trace, validation=loader(4))
    checkpoint = stored(tmp_path / "a.ckpt")
    assert "current_model_state" not in checkpoint
    for found in (weights(trainer), dict(checkpoint["state_dict"])):
        assert_same(found, trace.steps[-1])


# -- resuming


@pytest.mark.parametrize(
    ("model", "make", "batches", "options"),
    [
        (
            lambda: Normalized(0.2),
            ema(decay=0.7, update_every_n_steps=2, update_starting_at_epoch=1),
            [1, 6, 7, 11],
            {"max_epochs": 3, "validation": loader(8), "accumulate_grad_batches": 2},
        ),
        (lambda: Normalized(0.3), swa(0.3, 2, annealing_epochs=2), [4, 6, 7, 15, 24], {"max_epochs": 4}),
        (lambda: Decaying(), swa(0.3, 2, annealing_epochs=2), [4, 6, 7, 15, 24], {"max_epochs": 4}),
    ],
)
def test_a_resumed_run_goes_on_exactly(
    tmp_path: Path, model: Any, make: Any, batches: list[int], options: dict[str, Any]
) -> None:
    assert_resumes_exactly(tmp_path, model, make, batches, **options)


@pytest.mark.parametrize("make", [lambda: [WeightAveraging()], swa(0.3, 2)], ids=["mean", "swa"])
def test_a_finished_run_is_extended_with_the_weights_of_training(tmp_path: Path, make: Any) -> None:
    def fit(epochs: int, **options: Any) -> L.Trainer:
        data = loader(24, shuffle=True, generator=torch.Generator().manual_seed(3))
        return fitted(Normalized, make, data=data, max_epochs=epochs, **options)

    short, path = fit(3), tmp_path / "end.ckpt"
    short.save_checkpoint(path)
    assert_same(dict(stored(path)["state_dict"]), weights(short))
    assert_same(weights(fit(5, ckpt_path=path, seed=7)), weights(fit(5)))
    # Nothing left to train: the average is there all the same.
    assert_same(weights(fit(3, ckpt_path=path, seed=5)), weights(short))
    short.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert "current_model_state" not in stored(tmp_path / "weights.ckpt")


@pytest.mark.parametrize("make", [ema(update_starting_at_epoch=0), swa(0.3, 2)], ids=["ema", "swa"])
def test_updates_due_when_the_checkpoint_was_saved_are_done_later(tmp_path: Path, make: Any) -> None:
    class Early(L.Callback):
        """Saves before the average is updated, at the end of a batch and of an epoch."""

        runs_last = True

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 12:
                trainer.save_checkpoint(tmp_path / "batch.ckpt")

        def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"epoch-{trainer.current_epoch}.ckpt")

    whole = fitted(Normalized, lambda: [Early(), *make()], max_epochs=3)
    for path in tmp_path.iterdir():
        assert_same(weights(fitted(Normalized, make, ckpt_path=path, max_epochs=3, seed=5)), weights(whole))
    assert len(list(tmp_path.iterdir())) == 4


def test_a_new_average_starts_without_one_in_the_checkpoint_and_in_a_second_fit(tmp_path: Path) -> None:
    saver, trace = SaveLast(tmp_path / "a.ckpt", 3), Trace()
    fitted(Classifier, list, saver)
    trainer = fitted(Classifier, lambda: [WeightAveraging()], trace, ckpt_path=saver.path)
    assert len(trace.steps) == 3
    assert_close(weights(trainer), mean_of(trace.steps))
    trace.steps.clear()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, loader(24))  # type: ignore[arg-type]
    assert len(trace.steps) == 6
    assert_close(weights(trainer), mean_of(trace.steps))


# -- stochastic weight averaging: the recipe of PyTorch


def by_hand(make: Any, *, epochs: int, start: int, anneal: int, strategy: Any = "cos") -> tuple[Any, list[float]]:
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


@pytest.mark.parametrize(
    ("make", "start", "index", "anneal", "strategy"),
    [(Classifier, 0.5, 2, 3, "cos"), (Normalized, 2, 1, 0, "cos"), (Decaying, 4, 3, 2, "linear")],
)
def test_it_equals_the_recipe_of_pytorch(make: Any, start: Any, index: int, anneal: int, strategy: str) -> None:
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


def test_a_run_stopped_early_gets_the_average_of_its_epochs(tmp_path: Path) -> None:
    def stop(trainer: Any, module: Any) -> None:
        trainer.should_stop = trainer.current_epoch == 3

    trace, stops, saver = Trace(), LambdaCallback(on_train_epoch_end=stop), SaveLast(tmp_path / "a.ckpt", 7)
    trainer = fitted(Classifier, swa(0.3, 3), trace, stops, saver, data=loader(8), max_epochs=10)
    assert_close(weights(trainer), mean_of(trace.epochs[2:]))
    # A checkpoint of the run has the weights of training.
    assert_same(dict(stored(saver.path)["state_dict"]), trace.steps[6])


def test_an_epoch_that_is_cut_short_is_not_averaged() -> None:
    options: dict[str, Any] = {"data": loader(24), "max_epochs": 6}
    trainer = fitted(Normalized, swa(0.3, 2), max_steps=15, **options)
    assert trainer.callbacks[0].state_dict()["n_averaged"] == 1
    assert_close(weights(trainer), dict(by_hand(Normalized, epochs=2, start=1, anneal=10)[0]))
    never = fitted(Normalized, swa(0.3, 5), max_steps=8, **options)
    assert_same(weights(never), weights(fitted(Normalized, list, max_steps=8, **options)))


def test_the_epoch_in_which_the_last_step_was_reached_is_averaged_when_a_run_resumes_at_its_end(tmp_path: Path) -> None:
    def save(trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.save_checkpoint(tmp_path / "a.ckpt")

    averages, saving = ema(decay=0.5, update_starting_at_epoch=0), LambdaCallback(on_train_epoch_end=save)
    options: dict[str, Any] = {"max_epochs": 5, "max_steps": 12}
    whole = fitted(Classifier, averages, saving, **options)
    resumed = fitted(Classifier, averages, ckpt_path=tmp_path / "a.ckpt", seed=9, **options)
    assert_same(weights(resumed), weights(whole))
    assert (resumed.current_epoch, resumed.global_step) == (whole.current_epoch, whole.global_step) == (2, 12)


class Endless(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        torch.manual_seed(0)
        while True:
            yield torch.randn(8), torch.randint(0, 2, ())


@pytest.mark.parametrize("data", [loader(24), torch.utils.data.DataLoader(Endless(), 4)], ids=["finite", "endless"])
def test_nothing_but_the_weights_shows_that_it_ran_once_more(data: Any) -> None:
    def trained(make_callbacks: Any) -> tuple[list[int], list[int], torch.Tensor, dict[str, Any]]:
        steps: list[int] = []
        ends: list[int] = []

        class Counting(Normalized):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                steps.append(batch_idx)
                self.log("batch_idx", float(batch_idx), on_step=True, on_epoch=True)
                return super().training_step(batch, batch_idx)

        count = LambdaCallback(on_train_batch_end=lambda *rest: ends.append(rest[-1]))
        trainer = fitted(Counting, make_callbacks, count, data=data, max_epochs=2, limit_train_batches=4)
        logged = {name: value for name, value in trainer.callback_metrics.items() if "batch_idx" in name}
        return steps, ends, torch.rand(3), logged

    plain, averaged = trained(list), trained(swa(0.3, 2))
    assert plain[0] == [0, 1, 2, 3] * 2
    assert averaged[0] == [0, 1, 2, 3] * 3
    assert_same(plain[1:], averaged[1:])


def test_batch_normalization_that_does_not_train_keeps_its_statistics() -> None:
    class Frozen(Normalized):
        def on_train_epoch_start(self) -> None:
            self.layers[1].eval()

    found = weights(fitted(Frozen, swa(0.3, 1)))
    assert torch.equal(found["layers.1.running_mean"], torch.zeros(6))
    assert found["layers.1.num_batches_tracked"] == 0


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


@pytest.mark.parametrize(("start", "epochs", "expected"), [(1, 10, 0), (5, 10, 4), (0.8, 10, 7), (0.0, 10, 0)])
def test_when_it_starts_and_ends(start: Any, epochs: int, expected: int) -> None:
    callback = StochasticWeightAveraging(0.1, start)
    callback._max_epochs = epochs
    assert (callback.swa_start, callback.swa_end) == (expected, epochs - 1)
    callback._max_epochs = -1
    assert callback.swa_end == float("inf")
    assert StochasticWeightAveraging.pl_module_contains_batch_norm(Normalized())
    assert not StochasticWeightAveraging.pl_module_contains_batch_norm(Classifier())


class Untrained(Normalized):
    optimizers_made, schedulers_made = 1, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError("training began")

    def configure_optimizers(self) -> Any:
        made = [super(Untrained, self).configure_optimizers() for _ in range(self.optimizers_made)]
        return made, [StepLR(made[0], 1) for _ in range(self.schedulers_made)]


@pytest.mark.parametrize(
    ("module", "arguments", "trainer", "fact"),
    [
        ({"optimizers_made": 2, "automatic": False}, (0.1,), {}, "2"),
        ({"schedulers_made": 2}, (0.1,), {}, "2"),
        ({}, (0.1,), {"max_epochs": -1, "max_steps": 5}, "`max_epochs=-1`"),
        ({}, (0.1, 4), {"max_epochs": 3}, "swa_epoch_start=4"),
        ({}, ([0.1, 0.2],), {}, "1"),
        ({"automatic": False}, (0.1,), {}, "training_step"),
    ],
)
def test_runs_it_cannot_average_are_refused_before_training(
    module: dict[str, Any], arguments: Any, trainer: dict[str, Any], fact: str
) -> None:
    options = dict(module)
    model = Untrained()
    model.automatic_optimization = options.pop("automatic", True)
    vars(model).update(options)
    with refused(ValueError, says=fact):
        quiet(callbacks=swa(*arguments)(), **trainer).fit(model, loader(8))
    quiet(callbacks=swa(0.1, 4)(), fast_dev_run=True).fit(Normalized(), loader(8))
