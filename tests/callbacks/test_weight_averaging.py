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

FIRST = "layers.0.weight"


class Normalised(Classifier):
    """With batch normalisation, whose count of batches is a whole number, and a record of the weights validated."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__(width=6, dropout=dropout)
        self.layers = nn.Sequential(
            nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, 2)
        )
        self.validated: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.validated.append(self.layers[0].weight.detach().clone())


def ema(**options: Any) -> Any:
    return lambda: [EMAWeightAveraging(**{"decay": 0.5, **options})]


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
    trainer = fitted(Normalised, ema(decay=0.9), trace, **options)
    assert len(trace.steps) == 12
    assert_same(weights(trainer), moving_average(trace.steps, 0.9))
    slow = trace.steps[0][FIRST]
    for step in trace.steps[1:]:
        slow = 0.9 * slow + 0.1 * step[FIRST]
    assert torch.allclose(weights(trainer)[FIRST], slow, atol=1e-6)
    fitted(Normalised, list, plain, **options)
    assert_same(plain.steps, trace.steps)


def test_the_mean_is_the_default_and_buffers_can_be_copied() -> None:
    trace = Trace()
    options = {"accumulate_grad_batches": 2}
    trainer = fitted(Normalised, lambda: [WeightAveraging(use_buffers=False)], trace, **options)
    assert len(trace.steps) == 3  # Once a step, not once a batch.
    buffers = {name: trace.steps[-1][name] for name, _ in Normalised().named_buffers()}
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
    assert_close(weights(trainer), mean_of(trace.steps))


def test_the_average_can_live_elsewhere() -> None:
    callback = WeightAveraging(device="cpu")
    fitted(Classifier, lambda: [callback])
    assert callback._device == WeightAveraging(device=torch.device("cpu"))._device == torch.device("cpu")
    assert copy.deepcopy(callback)._latest_update_step == 6


def test_when_the_moving_average_is_updated() -> None:
    average = EMAWeightAveraging(
        update_every_n_steps=5, update_starting_at_step=10, update_starting_at_epoch=2
    )
    assert [step for step in range(22) if average.should_update(step_idx=step)] == [10, 15, 20]
    assert [epoch for epoch in range(4) if average.should_update(epoch_idx=epoch)] == [2, 3]
    assert not average.should_update()
    assert not EMAWeightAveraging(update_every_n_steps=0).should_update(step_idx=0)
    assert EMAWeightAveraging(update_starting_at_epoch=0).should_update(epoch_idx=0)
    for default in (EMAWeightAveraging(), WeightAveraging()):
        assert default.should_update(step_idx=0)
        assert not default.should_update(epoch_idx=5)


# -- validation


def test_validation_and_its_hooks_see_the_average() -> None:
    seen: list[Tensor] = []

    class Watched(Normalised):
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
def test_a_broken_validation_leaves_the_weights_of_training(
    tmp_path: Path, what: type[BaseException]
) -> None:
    class Breaking(Normalised):
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


def test_nothing_is_averaged_before_the_first_update(tmp_path: Path) -> None:
    trace, saver = Trace(), SaveLast(tmp_path / "a.ckpt", 3)
    trainer = fitted(Normalised, ema(update_starting_at_step=100), trace, saver, validation=loader(8))
    module: Any = trainer.lightning_module
    assert torch.equal(module.validated[0], trace.steps[-1][FIRST])
    assert_same(weights(trainer), trace.steps[-1])
    checkpoint = stored(saver.path)
    assert_same(dict(checkpoint["state_dict"]), trace.steps[2])
    assert "current_model_state" not in checkpoint


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


def test_a_checkpoint_saved_during_validation_holds_both(tmp_path: Path) -> None:
    class Saving(Normalised):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.trainer.save_checkpoint(tmp_path / "a.ckpt")

    trace = Trace()
    whole = fitted(Saving, ema(), trace, validation=loader(4))
    assert_same(dict(stored(tmp_path / "a.ckpt")["current_model_state"]), trace.steps[-1])
    assert_same(dict(stored(tmp_path / "a.ckpt")["state_dict"]), weights(whole))


# -- resuming


def test_a_resumed_run_goes_on_exactly(tmp_path: Path) -> None:
    make = ema(decay=0.7, update_every_n_steps=2, update_starting_at_epoch=1)
    options: dict[str, Any] = {"max_epochs": 3, "validation": loader(8), "accumulate_grad_batches": 2}
    assert_resumes_exactly(tmp_path, Normalised, make, [1, 6, 7, 11], **options)


def test_a_finished_run_is_extended_with_the_weights_of_training(tmp_path: Path) -> None:
    def fit(epochs: int, **options: Any) -> L.Trainer:
        return fitted(Normalised, lambda: [WeightAveraging()], max_epochs=epochs, **options)

    short, path = fit(2), tmp_path / "end.ckpt"
    short.save_checkpoint(path)
    assert_same(weights(fit(4, ckpt_path=path, seed=5)), weights(fit(4)))
    assert_same(dict(stored(path)["state_dict"]), weights(short))
    # Nothing left to train: the average is there all the same.
    assert_same(weights(fit(2, ckpt_path=path, seed=5)), weights(short))


def test_updates_due_when_the_checkpoint_was_saved_are_done_later(tmp_path: Path) -> None:
    class Early(L.Callback):
        """Saves before the average is updated, at the end of a batch and of an epoch."""

        runs_last = True

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 12:
                trainer.save_checkpoint(tmp_path / "batch.ckpt")

        def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"epoch-{trainer.current_epoch}.ckpt")

    make = ema(update_starting_at_epoch=0)
    whole = fitted(Normalised, lambda: [Early(), *make()], max_epochs=2)
    for name in ("batch", "epoch-0", "epoch-1"):
        path = tmp_path / f"{name}.ckpt"
        assert_same(weights(fitted(Normalised, make, ckpt_path=path, max_epochs=2, seed=5)), weights(whole))


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
