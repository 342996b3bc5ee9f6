"""Weight averaging: equal to one taken by hand; validation, checkpoints and resuming use the right weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import hasten as L
from hasten.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    WeightAveraging,
)
from tests.callbacks.resuming import SaveLast, assert_resumes_exactly, assert_same, fitted, weights
from tests.models import Classifier, loader, quiet


class Normalised(Classifier):
    """With batch normalisation, whose count of batches is no floating-point number, and a record of weights."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__(width=6, dropout=dropout)
        self.layers = nn.Sequential(
            nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, 2)
        )
        self.validated: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.validated.append(self.layers[0].weight.detach().clone())


class Trace(L.Callback):
    """The weights after each optimizer step, as training has them."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []
        self.epochs: list[dict[str, Tensor]] = []
        self.steps_done = 0

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step > self.steps_done:
            self.steps_done = trainer.global_step
            self.steps.append({k: v.clone() for k, v in module.state_dict().items()})

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs.append({k: v.clone() for k, v in module.state_dict().items()})


def is_count(name: str) -> bool:
    return name.endswith("num_batches_tracked")


def test_the_moving_average_equals_one_by_hand() -> None:
    trace = Trace()
    trainer = fitted(Normalised, lambda: [EMAWeightAveraging(decay=0.9)], trace, max_epochs=2)
    average = {k: v.clone() for k, v in trace.steps[0].items()}
    for step in trace.steps[1:]:
        for name, value in step.items():
            average[name] = value.clone() if is_count(name) else average[name].lerp(value, 1 - 0.9)
    assert len(trace.steps) == 12
    assert_same(weights(trainer), average)
    slow = trace.steps[0]["layers.0.weight"]
    for step in trace.steps[1:]:
        slow = 0.9 * slow + 0.1 * step["layers.0.weight"]
    assert torch.allclose(average["layers.0.weight"], slow, atol=1e-6)


def test_the_mean_is_the_default_and_buffers_can_be_copied() -> None:
    trace = Trace()
    trainer = fitted(
        Normalised, lambda: [WeightAveraging(use_buffers=False)], trace, accumulate_grad_batches=2
    )
    assert len(trace.steps) == 3  # Once a step, not once a batch.
    found = weights(trainer)
    for name in found:
        expected = sum(step[name] for step in trace.steps) / 3
        if "running" in name or is_count(name):
            expected = trace.steps[-1][name]
        assert torch.allclose(found[name], expected, atol=1e-6), name


@pytest.mark.parametrize("kind", ["avg_fn", "multi_avg_fn"])
def test_own_functions_are_used(kind: str) -> None:
    counts: list[int] = []

    def largest(averaged: Any, current: Any, num_averaged: Any) -> Any:
        counts.append(int(num_averaged))
        if kind == "avg_fn":
            return torch.maximum(averaged, current)
        for one, other in zip(averaged, current, strict=True):
            one.copy_(torch.maximum(one, other))
        return None

    trace = Trace()
    trainer = fitted(Classifier, lambda: [WeightAveraging(**{kind: largest})], trace)
    for name, value in weights(trainer).items():
        assert torch.equal(value, torch.stack([step[name] for step in trace.steps]).amax(0))
    assert sorted(set(counts)) == [1, 2, 3, 4, 5]


def test_steps_and_epochs_are_chosen() -> None:
    class Chosen(WeightAveraging):
        asked: ClassVar[list[tuple[int | None, int | None]]] = []

        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            self.asked.append((step_idx, epoch_idx))
            return epoch_idx is not None or step_idx == 2

    trace = Trace()
    trainer = fitted(Classifier, lambda: [Chosen()], trace, data=loader(8), max_epochs=3)
    assert Chosen.asked == [
        (0, None),
        (1, None),
        (None, 0),
        (2, None),
        (3, None),
        (None, 1),
        (4, None),
        (5, None),
        (None, 2),
    ]
    taken = [trace.steps[1], trace.steps[2], trace.steps[3], trace.steps[5]]
    for name, value in weights(trainer).items():
        assert torch.allclose(value, sum(each[name] for each in taken) / 4, atol=1e-6)


def test_an_epoch_that_is_cut_short_does_not_count() -> None:
    class Epochs(WeightAveraging):
        def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            return epoch_idx is not None

    trace = Trace()
    trainer = fitted(Classifier, lambda: [Epochs()], trace, max_epochs=2, max_steps=8)
    assert len(trace.epochs) == 2
    assert_same(weights(trainer), trace.epochs[0])


def test_validation_and_its_hooks_see_the_average_and_training_goes_on_with_its_own() -> None:
    seen: list[tuple[str, Tensor]] = []

    class Watched(Normalised):
        def on_validation_epoch_end(self) -> None:
            seen.append(("module", self.layers[0].weight.detach().clone()))

        def on_validation_end(self) -> None:
            seen.append(("after", self.layers[0].weight.detach().clone()))

    class Last(ModelCheckpoint):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(("checkpoint", pl_module.layers[0].weight.detach().clone()))

    trace = Trace()
    trainer = fitted(
        Watched,
        lambda: [EMAWeightAveraging(decay=0.5)],
        trace,
        Last(),
        validation=loader(8),
        enable_checkpointing=True,
    )
    name = "layers.0.weight"
    average = trace.steps[0][name]
    for step in trace.steps[1:]:
        average = average.lerp(step[name], 0.5)
    module = trainer.lightning_module
    assert isinstance(module, Watched)
    assert [torch.equal(each, average) for each in module.validated] == [True, True]
    assert [who for who, _ in seen] == ["module", "after", "checkpoint"]
    assert torch.equal(seen[0][1], average)
    assert torch.equal(seen[1][1], trace.steps[-1][name])
    assert torch.equal(seen[2][1], trace.steps[-1][name])


def test_averaging_does_not_change_training() -> None:
    plain, averaged = Trace(), Trace()
    fitted(Normalised, list, plain, max_epochs=2, validation=loader(8))
    fitted(Normalised, lambda: [EMAWeightAveraging()], averaged, max_epochs=2, validation=loader(8))
    assert_same(plain.steps, averaged.steps)


def test_nothing_is_averaged_before_the_first_update(tmp_path: Path) -> None:
    trace, saver = Trace(), SaveLast(tmp_path / "a.ckpt", 3)
    trainer = fitted(
        Normalised,
        lambda: [EMAWeightAveraging(update_starting_at_step=100)],
        trace,
        saver,
        validation=loader(8),
    )
    module = trainer.lightning_module
    assert isinstance(module, Normalised)
    assert torch.equal(module.validated[0], trace.steps[-1]["layers.0.weight"])
    assert_same(weights(trainer), trace.steps[-1])
    stored = torch.load(saver.path, weights_only=True)
    assert_same(stored["state_dict"], trace.steps[2])
    assert "current_model_state" not in stored


@pytest.mark.parametrize("what", [RuntimeError, KeyboardInterrupt])
def test_a_broken_validation_leaves_the_weights_of_training(
    tmp_path: Path, what: type[BaseException]
) -> None:
    class Breaking(Normalised):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise what("on purpose")

    trace = Trace()
    L.seed_everything(0, verbose=False)
    module = Breaking()
    trainer = quiet(
        callbacks=[EMAWeightAveraging(decay=0.5), trace, OnExceptionCheckpoint(tmp_path)],
        enable_checkpointing=True,
        num_sanity_val_steps=0,
    )
    with pytest.raises((what, SystemExit)):
        trainer.fit(module, loader(24), loader(8))
    assert_same(module.state_dict(), trace.steps[-1])
    stored = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert_same(stored["current_model_state"], trace.steps[-1])
    assert not torch.equal(stored["state_dict"]["layers.0.weight"], trace.steps[-1]["layers.0.weight"])


def test_a_checkpoint_holds_the_average_and_loads_without_the_callback(tmp_path: Path) -> None:
    trace, saver = Trace(), SaveLast(tmp_path / "a.ckpt", 5)
    trainer = fitted(lambda: Classifier(width=6), lambda: [EMAWeightAveraging(decay=0.5)], trace, saver)
    average = {k: v.clone() for k, v in trace.steps[0].items()}
    for step in trace.steps[1:5]:
        average = {k: v.lerp(step[k], 0.5) for k, v in average.items()}
    stored = torch.load(saver.path, weights_only=True)
    assert_same(stored["state_dict"], average)
    assert_same(stored["current_model_state"], trace.steps[4])
    assert int(stored["averaging_state"]["n_averaged"]) == 5
    assert_same(dict(Classifier.load_from_checkpoint(saver.path).state_dict()), average)
    # Evaluation, with the callback or without, uses the average.
    for callbacks in ([], [EMAWeightAveraging()]):
        model = Classifier(width=6)
        quiet(callbacks=callbacks).test(model, loader(8), ckpt_path=saver.path, verbose=False)
        assert_same(dict(model.state_dict()), average)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    stored = torch.load(tmp_path / "weights.ckpt", weights_only=True)
    assert "current_model_state" not in stored
    assert_same(stored["state_dict"], weights(trainer))


def test_a_checkpoint_saved_during_validation_holds_both(tmp_path: Path) -> None:
    class Saving(Normalised):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.trainer.save_checkpoint(tmp_path / "a.ckpt")

    trace = Trace()
    whole = fitted(Saving, lambda: [EMAWeightAveraging(decay=0.5)], trace, validation=loader(4))
    stored = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert_same(stored["current_model_state"], trace.steps[-1])
    assert_same(dict(stored["state_dict"]), weights(whole))


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    assert_resumes_exactly(
        tmp_path,
        Normalised,
        lambda: [EMAWeightAveraging(decay=0.7, update_every_n_steps=2, update_starting_at_epoch=1)],
        [1, 6, 7, 11],
        max_epochs=3,
        validation=loader(8),
        accumulate_grad_batches=2,
    )


def test_a_finished_run_is_extended_with_the_weights_of_training(tmp_path: Path) -> None:
    make = [lambda: [WeightAveraging()]]
    short = fitted(Normalised, make[0], max_epochs=2)
    short.save_checkpoint(tmp_path / "end.ckpt")
    resumed = fitted(Normalised, make[0], ckpt_path=tmp_path / "end.ckpt", max_epochs=4, seed=5)
    whole = fitted(Normalised, make[0], max_epochs=4)
    assert_same(weights(resumed), weights(whole))
    stored = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert_same(dict(stored["state_dict"]), weights(short))
    # Nothing left to train: the average is there all the same.
    again = fitted(Normalised, make[0], ckpt_path=tmp_path / "end.ckpt", max_epochs=2, seed=5)
    assert_same(weights(again), weights(short))


def test_updates_due_when_the_checkpoint_was_taken_are_made_up_for(tmp_path: Path) -> None:
    class Early(L.Callback):
        """Saves before the average is updated, at the end of a batch and of an epoch."""

        runs_last = True

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 12:
                trainer.save_checkpoint(tmp_path / "batch.ckpt")

        def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"epoch-{trainer.current_epoch}.ckpt")

    def make() -> list[L.Callback]:
        return [Early(), EMAWeightAveraging(decay=0.5, update_starting_at_epoch=0)]

    whole = fitted(Normalised, make, max_epochs=2)
    stored = [tmp_path / name for name in ("batch.ckpt", "epoch-0.ckpt", "epoch-1.ckpt")]
    for path in stored:
        resumed = fitted(Normalised, lambda: make()[1:], ckpt_path=path, max_epochs=2, seed=5)
        assert_same(weights(resumed), weights(whole))


def test_a_checkpoint_without_an_average_begins_one(tmp_path: Path) -> None:
    saver = SaveLast(tmp_path / "a.ckpt", 3)
    fitted(Classifier, list, saver)
    trace = Trace()
    trainer = fitted(Classifier, lambda: [WeightAveraging()], trace, ckpt_path=saver.path)
    assert len(trace.steps) == 3
    for name, value in weights(trainer).items():
        assert torch.allclose(value, sum(step[name] for step in trace.steps) / 3, atol=1e-6)


def test_a_second_fit_begins_a_new_average() -> None:
    callback, trace = EMAWeightAveraging(decay=0.5), Trace()
    trainer = fitted(Classifier, lambda: [callback], trace)
    trace.steps.clear()
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, loader(24))  # type: ignore[arg-type]
    assert len(trace.steps) == 6
    average = trace.steps[0]
    for step in trace.steps[1:]:
        average = {k: v.lerp(step[k], 0.5) for k, v in average.items()}
    assert_same(weights(trainer), average)
    assert int(callback._average_model.n_averaged) == 6  # type: ignore[union-attr]


def test_validate_after_fit_uses_the_weights_it_is_given() -> None:
    trainer = fitted(Normalised, lambda: [EMAWeightAveraging(decay=0.5)])
    other = Normalised()
    given = other.layers[0].weight.detach().clone()
    trainer.validate(other, loader(4), verbose=False)
    assert torch.equal(other.validated[0], given)


def test_buffers_made_in_the_first_batch_are_no_obstacle() -> None:
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

    trainer = fitted(Table, lambda: [WeightAveraging()], max_epochs=3, data=loader(8))
    module = trainer.lightning_module
    assert isinstance(module, Table)
    assert isinstance(module.table, Tensor)
    assert module.table.shape == (3,)


def test_another_set_of_parameters_is_refused() -> None:
    pruning = ModelPruning("l1_unstructured", amount=0.5)
    with pytest.raises(RuntimeError, match=r"WeightAveraging: Linear has the parameters .*weight_orig"):
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
    for name, value in weights(trainer).items():
        assert torch.allclose(value, sum(step[name] for step in trace.steps) / 6, atol=1e-6), name


def test_the_average_can_live_elsewhere() -> None:
    callback = WeightAveraging(device="cpu")
    fitted(Classifier, lambda: [callback])
    assert callback._device == torch.device("cpu")
    assert WeightAveraging(device=torch.device("cpu"))._device == torch.device("cpu")
    assert copy.deepcopy(callback)._latest_update_step == 6


def test_when_the_moving_average_is_updated() -> None:
    ema = EMAWeightAveraging(update_every_n_steps=5, update_starting_at_step=10, update_starting_at_epoch=2)
    assert [step for step in range(22) if ema.should_update(step_idx=step)] == [10, 15, 20]
    assert [epoch for epoch in range(4) if ema.should_update(epoch_idx=epoch)] == [2, 3]
    assert not EMAWeightAveraging().should_update(epoch_idx=5)
    assert not EMAWeightAveraging(update_every_n_steps=0).should_update(step_idx=0)
    assert EMAWeightAveraging().should_update(step_idx=0)
    assert EMAWeightAveraging(update_starting_at_epoch=0).should_update(epoch_idx=0)
    assert not ema.should_update()
    assert WeightAveraging().should_update(step_idx=0)
    assert not WeightAveraging().should_update(epoch_idx=0)
