"""What somebody changes in the middle of an epoch counts from the batch at hand or the next one on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

import hasten as L
from hasten.callbacks import LambdaCallback
from hasten.optim import LRSchedulerConfig
from tests.fakes import RowLogger
from tests.models import Classifier, loader, quiet, same_weights
from tests.refusals import refused


class At(L.Callback):
    """Calls ``change(trainer, module)`` when batch 5 begins; keeps the weights it found."""

    def __init__(self, change: Callable[[Any, Any], Any]) -> None:
        self.change = change
        self.found: Any = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5 and self.found is None:
            self.change(trainer, pl_module)
            self.found = copy.deepcopy(pl_module)


class Steps(Classifier):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


def still(module: Any) -> SGD:
    return SGD(module.parameters(), lr=0.0)


def fit(change: Callable[[Any, Any], Any], **arguments: Any) -> tuple[Any, At, L.Trainer]:
    model, at = Steps(), At(change)
    trainer = quiet(callbacks=at, **arguments)
    trainer.fit(model, loader())
    return model, at, trainer


@pytest.mark.parametrize(
    "change",
    [
        lambda trainer, module: setattr(trainer, "optimizers", [still(module)]),
        lambda trainer, module: setattr(trainer.strategy, "optimizers", [still(module)]),
        lambda trainer, module: trainer.optimizers.__setitem__(0, still(module)),
        lambda trainer, module: setattr(trainer, "gradient_clip_val", 1e-12),
        lambda trainer, module: setattr(module, "training_step", lambda *_: None),
        lambda trainer, module: setattr(module, "optimizer_step", lambda *given: given[-1]()),
        lambda trainer, module: setattr(module, "backward", lambda *_: None),
        lambda trainer, module: setattr(
            module, "configure_gradient_clipping", lambda optimizer, **_: optimizer.zero_grad()
        ),
        lambda trainer, module: setattr(module, "clip_gradients", lambda optimizer, *_, **__: optimizer.zero_grad()),
        lambda trainer, module: setattr(module, "on_before_optimizer_step", lambda o: o.zero_grad()),
        lambda trainer, module: setattr(trainer.optimizers[0], "param_groups", []),
        lambda trainer, module: setattr(trainer.optimizers[0], "step", lambda closure=None: None),
        lambda trainer, module: setattr(module, "automatic_optimization", False),
        lambda trainer, module: setattr(module.optimizers(), "step", lambda closure=None: None),
    ],
)
@pytest.mark.filterwarnings("ignore:.*returned None")
def test_a_change_that_ends_learning_counts_at_once(change: Any) -> None:
    model, at, _ = fit(change)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, at.found.state_dict()[name], rtol=0, atol=1e-9)


def test_the_gradients_are_clipped_by_value_once_that_is_asked_for() -> None:
    sizes: list[float] = []

    def change(trainer: Any, module: Any) -> None:
        trainer.gradient_clip_algorithm = "value"
        optimizer = trainer.optimizers[0]
        optimizer.register_step_pre_hook(
            lambda *_: sizes.append(max(float(p.grad.abs().max()) for p in module.parameters()))
        )

    fit(change, gradient_clip_val=1e-4)
    assert sizes == pytest.approx([1e-4] * 5)


def by_hand(windows: list[list[int]]) -> Steps:
    model = Steps()
    optimizer, batches = model.configure_optimizers(), list(loader())
    for window in windows:
        for index in window:
            (model.loss(batches[index]) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize(
    ("before", "after", "windows"),
    [
        (1, 2, [[0], [1], [2], [3], [4], [5, 6], [7, 8], [9]]),
        (5, 2, [[0, 1, 2, 3, 4], [5, 6], [7, 8], [9]]),
        (3, 2, [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]),
        (4, 3, [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        (4, 1, [[0, 1, 2, 3], [4, 5], [6], [7], [8], [9]]),
        (2, 10, [[0, 1], [2, 3], [4, 5, 6, 7, 8, 9]]),
    ],
)
def test_another_number_of_accumulated_batches_counts_from_the_open_window_on(
    before: int, after: int, windows: list[list[int]]
) -> None:
    model, _, trainer = fit(
        lambda trainer, _: setattr(trainer, "accumulate_grad_batches", after), accumulate_grad_batches=before
    )
    expected = by_hand(windows)
    assert trainer.global_step == len(windows)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class Notes(L.Callback):
    """Notes what the batches gave, and after which of them validation ran."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.validated_after: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.validated_after.append(trainer.fit_loop.total_batch_idx + 1)


@pytest.mark.parametrize("automatic", [True, False])
def test_a_callback_appended_in_a_step_gets_the_outputs_of_that_batch(automatic: bool) -> None:
    notes = Notes()

    class Appends(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 5:
                self.trainer.callbacks.append(notes)
            return super().training_step(batch, batch_idx)

    model = Appends()
    model.automatic_optimization = automatic
    quiet().fit(model, loader())
    assert len(notes.outputs) == 5
    assert all(isinstance(outputs["loss"], Tensor) for outputs in notes.outputs)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
@pytest.mark.parametrize("way", ["patched", "another"])
def test_a_training_step_of_the_class_counts_from_the_next_batch(way: str, hook: str) -> None:
    taken: list[str] = []

    class First(Steps):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            taken.append("first")
            return super().training_step(batch, batch_idx)

    class Second(First):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            taken.append("second")
            return self.loss(batch)

    def change(trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 5:
            if way == "patched":
                First.training_step = Second.training_step  # type: ignore[method-assign]
            else:
                module.__class__ = Second

    quiet(callbacks=LambdaCallback(**{hook: change})).fit(First(), loader())
    at_once = way == "another" or hook == "on_train_batch_end"
    assert taken == ["first"] * (6 - at_once) + ["second"] * (4 + at_once)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
@pytest.mark.parametrize(
    ("name", "value", "trained", "validated"),
    [
        ("limit_train_batches", 4, [10, 4], 3),
        ("limit_train_batches", 0.5, [10, 5], 3),
        ("limit_train_batches", 1, [10, 1], 3),
        ("limit_val_batches", 1, [10, 10], 1),
        ("limit_val_batches", 0, [10, 10], 0),
    ],
)
def test_another_limit_counts_from_the_next_epoch(
    hook: str, name: str, value: Any, trained: list[int], validated: int
) -> None:
    def change(trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 0:
            setattr(trainer, name, value)

    class Counts(Steps):
        def __init__(self) -> None:
            super().__init__()
            self.counts, self.lasts, self.validated = [0, 0], 0, [0, 0]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.counts[self.current_epoch] += 1
            self.lasts += self.trainer.is_last_batch
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.validated[self.current_epoch] += 1

    model = Counts()
    quiet(callbacks=LambdaCallback(**{hook: change}), max_epochs=2, num_sanity_val_steps=0).fit(
        model, loader(), loader(12)
    )
    assert model.counts == trained
    assert model.lasts == 2
    assert model.validated[1] == validated


def test_a_removed_callback_a_patched_hook_and_another_interval_count_from_that_batch() -> None:
    notes, logger = Notes(), RowLogger()
    moved: list[int] = []

    def change(trainer: Any, module: Any) -> None:
        def transfer(batch: Any, device: Any, dataloader_idx: int) -> Any:
            moved.append(trainer.global_step)
            return batch

        module.transfer_batch_to_device = transfer
        trainer.callbacks.remove(notes)
        trainer.log_every_n_steps = 2

    quiet(callbacks=[notes, At(change)], logger=logger, log_every_n_steps=5).fit(Steps(), loader())
    assert len(notes.outputs) == 5
    assert moved == [6, 7, 8, 9]
    assert [step for step, _ in logger.rows] == [4, 5, 7, 9]


def test_a_hook_patched_on_a_class_counts_once_another_is_assigned_on_an_instance() -> None:
    seen: list[str] = []

    class Patched(Steps):
        pass

    class Watches(L.Callback):
        pass

    def change(trainer: Any, module: Any) -> None:
        setattr(Patched, "on_train_batch_start", lambda *_: seen.append("module"))  # noqa: B010
        setattr(Watches, "on_before_zero_grad", lambda *_: seen.append("callback"))  # noqa: B010
        module.on_after_backward = lambda: seen.append("instance")

    quiet(callbacks=[Watches(), At(change)]).fit(Patched(), loader())
    # The first of them is called before the change in batch 5, the others after it.
    assert {name: seen.count(name) for name in seen} == {"module": 4, "callback": 5, "instance": 5}


@pytest.mark.parametrize(
    ("name", "value", "after"),
    [("val_check_interval", 3, [6, 9]), ("val_check_interval", 0.25, [6, 8, 10]), ("check_val_every_n_epoch", 2, [])],
)
def test_validation_follows_another_interval(name: str, value: Any, after: list[int]) -> None:
    notes = Notes()
    change = At(lambda trainer, _: setattr(trainer, name, value))
    quiet(callbacks=[change, notes], num_sanity_val_steps=0).fit(Steps(), loader(), loader(4))
    assert notes.validated_after == after


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_other_limits_end_the_run_at_that_step(hook: str) -> None:
    def change(trainer: Any, module: Any, *_: Any) -> None:
        trainer.fit_loop.epoch_loop.max_steps = 7

    model = Steps()
    trainer = quiet(callbacks=LambdaCallback(**{hook: change}), max_epochs=3)
    trainer.fit(model, loader())
    assert trainer.global_step == 7
    assert same_weights(model, by_hand([[index] for index in range(7)]))


def test_a_scheduler_added_in_the_middle_steps_with_every_batch() -> None:
    rates: list[float] = []

    def note(trainer: Any, *_: Any) -> None:
        rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def change(trainer: Any, module: Any) -> None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizers[0], 0.5)
        trainer.lr_scheduler_configs.append(LRSchedulerConfig(scheduler, interval="step"))

    quiet(callbacks=[At(change), LambdaCallback(on_train_batch_end=note)]).fit(Steps(), loader())
    assert rates == pytest.approx([0.1] * 5 + [0.1 * 0.5**n for n in range(1, 6)])


def test_a_group_added_in_the_middle_is_trained_and_cleared() -> None:
    class Extends(Steps):
        def __init__(self) -> None:
            super().__init__()
            self.shift = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) + (self.shift - 1) ** 2

        def configure_optimizers(self) -> Any:
            return SGD(self.layers.parameters(), lr=0.1)

    def change(trainer: Any, module: Any) -> None:
        trainer.optimizers[0].add_param_group({"params": [module.shift], "lr": 0.25})
        module.shift.grad = None

    model = Extends()
    quiet(callbacks=At(change)).fit(model, loader())
    # Halfway to 1 with each of five steps.
    assert model.shift.item() == pytest.approx(1 - 0.5**5)


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda module: [still(module), still(module)], "2"),
        (lambda module: [torch.optim.SGD], "SGD"),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(make: Any, fact: str) -> None:
    with refused(ValueError, says=fact):
        fit(lambda trainer, module: setattr(trainer, "optimizers", make(module)))
    with refused(AttributeError, says="optimizers = ..."):
        quiet().strategy.optimizers = []


@pytest.mark.parametrize("accumulate", [1, 2])
def test_schedulers_of_an_epoch_step_where_its_rest_was_skipped(accumulate: int) -> None:
    class Skips(Steps):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return [optimizer], [self.schedule]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    model, batches = Skips(), list(loader())
    trainer = quiet(max_epochs=3, accumulate_grad_batches=accumulate)
    trainer.fit(model, loader())
    expected = Steps()
    for epoch in range(3):
        optimizer = SGD(expected.parameters(), lr=0.1 * 0.5**epoch)
        for window in [[0], [1], [2]] if accumulate == 1 else [[0, 1]]:
            optimizer.zero_grad()
            for index in window:
                (expected.loss(batches[index]) / len(window)).backward()
            optimizer.step()
    assert model.schedule.last_epoch == 3
    assert same_weights(model, expected)
