"""What programs read of trainer.fit_loop and its like, and the data hooks that change who prepares what."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import hasten as L
from hasten_lightning.loops.counts import BatchCounts, OptimizationCounts, ReadyCompleted, SchedulerCounts
from hasten_lightning.loops.views import Loop
from tests.fakes import watching
from tests.models import Classifier, Several, loader, quiet, same_weights
from tests.refusals import refused


def test_counters_of_the_fit_loop() -> None:
    seen: list[Any] = []

    def note(_: str, trainer: Any) -> None:
        loop = trainer.fit_loop
        inner = loop.epoch_loop
        seen.append(
            (
                (loop.batch_idx, loop.total_batch_idx, inner.global_step, inner._batches_that_stepped),
                (inner.batch_progress.current.completed, inner.batch_progress.total.ready),
                (loop.epoch_progress.current.ready, loop.epoch_progress.total.completed),
            )
        )

    trainer = quiet(max_epochs=2, accumulate_grad_batches=2, callbacks=watching(note, "on_train_batch_end"))
    assert trainer.fit_loop.epoch_progress.current.ready == 0
    assert not trainer.fit_loop.done
    trainer.fit(Classifier(), loader(12))
    assert seen == [
        ((0, 0, 0, 0), (0, 1), (1, 0)), ((1, 1, 1, 0), (1, 2), (1, 0)), ((2, 2, 2, 1), (2, 3), (1, 0)),
        ((0, 3, 2, 2), (0, 4), (2, 1)), ((1, 4, 3, 2), (1, 5), (2, 1)), ((2, 5, 4, 3), (2, 6), (2, 1)),
    ]  # fmt: skip
    loop = trainer.fit_loop
    assert loop.done
    assert not loop.restarting
    assert not loop.epoch_loop.restarting
    assert loop.max_batches == 3
    assert loop.epoch_progress.current.processed == loop.epoch_progress.current.started == 2
    assert (loop.max_steps, loop.min_steps) == (-1, None)


def test_counters_of_steps_within_a_batch() -> None:
    seen: list[Any] = []

    def note(hook: str, trainer: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        counts = loop.automatic_optimization.optim_progress.optimizer
        step, cleared = counts.step.current, counts.zero_grad.total
        reached = (loop._accumulated_batches_reached(), loop._num_ready_batches_reached())
        seen.append((hook[3:], (step.ready, step.completed), (cleared.ready, cleared.completed), reached))

    hooks = ("on_before_zero_grad", "on_before_backward", "on_before_optimizer_step", "on_train_batch_end")
    quiet(max_epochs=1, accumulate_grad_batches=2, callbacks=watching(note, *hooks)).fit(Classifier(), loader(12))
    assert seen == [
        ("before_zero_grad", (0, 0), (1, 0), (False, False)),
        ("before_backward", (0, 0), (1, 1), (False, False)),
        ("train_batch_end", (0, 0), (1, 1), (False, False)),
        ("before_backward", (1, 0), (1, 1), (True, False)),
        ("before_optimizer_step", (1, 0), (1, 1), (True, False)),
        ("train_batch_end", (1, 1), (1, 1), (True, False)),
        ("before_zero_grad", (2, 1), (2, 1), (False, True)),
        ("before_backward", (2, 1), (2, 2), (False, True)),
        ("before_optimizer_step", (2, 1), (2, 2), (False, True)),
        ("train_batch_end", (2, 2), (2, 2), (False, True)),
    ]


def test_counters_of_manual_steps_and_of_an_epoch_that_max_steps_ends() -> None:
    seen: list[Any] = []

    class TwoSteps(Classifier):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for _ in range(2):
                self.manual_backward(self(batch[0]).sum())
                optimizer.step()  # type: ignore[union-attr]

    def note(_: str, trainer: Any) -> None:
        steps = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        epochs = trainer.fit_loop.epoch_progress.current
        seen.append((steps.current.ready, steps.current.completed, steps.total.ready, epochs.completed))

    hooks = ("on_before_optimizer_step", "on_train_batch_end", "on_train_end")
    quiet(max_epochs=-1, max_steps=6, callbacks=watching(note, *hooks)).fit(TwoSteps(), loader(8))
    first = [(1, 0, 1, 0), (2, 1, 2, 0), (2, 2, 2, 0), (3, 2, 3, 0), (4, 3, 4, 0), (4, 4, 4, 0)]
    assert seen == [*first, (1, 0, 5, 1), (2, 1, 6, 1), (2, 2, 6, 1), (2, 2, 6, 2)]


class EndsEpochs(Classifier):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


def test_the_batch_at_which_a_hook_ends_the_epoch_has_been_reached() -> None:
    trainer = quiet(max_epochs=2)
    trainer.fit(EndsEpochs(), loader(16))
    loop = trainer.fit_loop
    assert (loop.batch_idx, loop.total_batch_idx, trainer.global_step) == (2, 5, 4)
    batches = loop.epoch_loop.batch_progress.current
    assert (batches.ready, batches.completed) == (3, 2)


@pytest.mark.parametrize("within", [True, False])
def test_a_loop_restarts_until_the_epoch_of_its_checkpoint_has_ended(within: bool, tmp_path: Path) -> None:
    seen: list[Any] = []
    hooks = watching(
        lambda _, trainer: seen.append(trainer.fit_loop.restarting), "on_train_start", "on_train_epoch_start"
    )
    # After a validation, the end of the epoch is still to come.
    saving = L.callbacks.ModelCheckpoint(dirpath=tmp_path, save_on_train_epoch_end=not within)
    quiet(callbacks=[saving], enable_checkpointing=True).fit(Classifier(), loader(8), loader(8))
    quiet(max_epochs=2, callbacks=[hooks]).fit(Classifier(), loader(8), loader(8), ckpt_path=saving.best_model_path)
    assert seen == [within, False]


def test_the_total_of_validation_batches_is_that_of_an_epoch() -> None:
    seen: list[Any] = []

    def note(hook: str, trainer: Any) -> None:
        loop = trainer.fit_loop.epoch_loop.val_loop
        seen.append((loop.max_batches, loop.batch_progress.total.completed, loop.batch_progress.current.completed))

    hooks = watching(note, "on_sanity_check_end", "on_train_start", "on_validation_end", "on_train_epoch_end")
    options = {"num_sanity_val_steps": 1, "max_epochs": 2, "val_check_interval": 1, "callbacks": hooks}
    trainer = quiet(**options)
    assert not trainer.fit_loop.skip
    trainer.fit(Several(), loader(8), [loader(8)])
    epoch = [([2], 2, 2), ([2], 4, 2), ([2], 4, 2)]
    assert seen == [([1], 1, 1), ([1], 1, 1), ([2], 0, 0), *epoch, *epoch]


def test_limits_raised_between_two_fits_continue_the_run() -> None:
    torch.manual_seed(0)
    model = Classifier()
    twice = Classifier()
    twice.load_state_dict(model.state_dict())
    quiet(max_epochs=3).fit(model, loader())
    trainer = quiet(max_epochs=1)
    optimizer = torch.optim.SGD(twice.parameters(), lr=0.1, momentum=0.9)
    twice.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    trainer.fit(twice, loader())
    trainer.fit_loop.max_epochs += 2
    assert trainer.max_epochs == 3
    trainer.fit(twice, loader())
    assert (trainer.current_epoch, trainer.global_step) == (3, 30)
    assert same_weights(model, twice)
    trainer.fit_loop.max_epochs = None
    assert trainer.max_epochs == -1
    trainer.fit_loop.epoch_loop.max_steps = 34
    trainer.fit(twice, loader())
    assert trainer.global_step == trainer.max_steps == trainer.fit_loop.max_steps == 34
    with refused(ValueError, "max_epochs"):
        trainer.fit_loop.max_epochs = -2
    with refused(TypeError, "min_epochs"):
        trainer.fit_loop.min_epochs = 1.5


def stops() -> L.Callback:
    return watching(lambda _, trainer: setattr(trainer, "should_stop", True), "on_train_batch_end")


def test_least_epochs_and_steps_can_be_set() -> None:
    trainer = quiet(max_epochs=5, callbacks=stops())
    trainer.fit_loop.min_epochs = 2
    trainer.fit(Classifier(), loader())
    assert trainer.current_epoch == 2
    assert trainer.fit_loop.min_epochs == trainer.min_epochs == 2
    trainer = quiet(max_epochs=5, callbacks=stops())
    trainer.fit_loop.epoch_loop.min_steps = 13
    trainer.fit(Classifier(), loader())
    assert trainer.global_step == trainer.fit_loop.epoch_loop.min_steps == 13


def test_evaluation_and_prediction_loops() -> None:
    trainer = quiet()
    assert trainer.validate_loop.skip
    trainer.validate(Several(), [loader(8), loader(12)], verbose=False)
    assert trainer.validate_loop.max_batches == trainer.fit_loop.epoch_loop.val_loop.max_batches == [2, 3]
    assert trainer.validate_loop.num_dataloaders == 2
    assert not trainer.validate_loop.skip
    assert trainer.test_loop.num_dataloaders == 0
    outputs = trainer.predict(Classifier(), loader(8))
    assert trainer.predict_loop.predictions is outputs
    assert trainer.predict_loop.max_batches == [2]


def test_other_properties() -> None:
    trainer = quiet(reload_dataloaders_every_n_epochs=2, enable_autolog_hparams=False, val_check_interval=0.5)
    assert trainer.reload_dataloaders_every_n_epochs == 2
    assert trainer.enable_autolog_hparams is False
    assert trainer.val_check_batch == math.inf
    trainer.fit(Classifier(), loader(40), loader(8))
    assert trainer.val_check_batch == 5


class Prepared(L.LightningDataModule):
    def __init__(self, per_node: bool) -> None:
        super().__init__()
        self.prepare_data_per_node = per_node
        self.prepared = 0

    def prepare_data(self) -> None:
        self.prepared += 1

    def train_dataloader(self) -> Any:
        return loader(8)


@pytest.mark.parametrize(("per_node", "rank", "times"), [(True, 0, 1), (True, 2, 1), (False, 0, 1), (False, 2, 0)])
def test_data_is_prepared_once_a_machine_or_once(
    per_node: bool, rank: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hasten.runtime import Runtime

    # The first process of the second machine: it cannot be had here.
    monkeypatch.setattr(Runtime, "global_rank", property(lambda self: rank))
    data = Prepared(per_node)
    quiet().fit(Classifier(), datamodule=data)
    assert data.prepared == times


def test_empty_loader_that_is_allowed() -> None:
    model = Classifier()
    empty = DataLoader([], batch_size=2)  # type: ignore[arg-type]
    with refused(ValueError, says="validate dataloader"):
        quiet().fit(model, loader(8), empty)
    model.allow_zero_length_dataloader_with_multiple_devices = True
    trainer = quiet()
    trainer.fit(model, loader(8), empty)
    assert trainer.global_step == 2
    quiet().fit(model, empty)


def test_counters_are_saved_restored_and_assigned() -> None:
    trainer = quiet(max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(Classifier(), loader(12), loader(8))
    loop = trainer.fit_loop
    assert loop is trainer.fit_loop
    state = loop.state_dict()
    assert state["epoch_loop.batch_progress"] == {
        "total": dict.fromkeys(("ready", "started", "processed", "completed"), 6),
        "current": dict.fromkeys(("ready", "started", "processed", "completed"), 3),
        "is_last_batch": True,
    }
    assert state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"] == {
        "total": {"ready": 6, "completed": 6},
        "current": {"ready": 3, "completed": 3},
    }
    assert state["epoch_loop.val_loop.batch_progress"]["current"]["completed"] == 2
    assert state["epoch_loop.state_dict"] == {"_batches_that_stepped": 6}

    other = quiet(max_epochs=3)
    other.fit_loop.load_state_dict(state)
    assert other.fit_loop.restarting
    assert (other.current_epoch, other.global_step) == (2, 6)
    other.fit(Classifier(), loader(12))
    assert (other.current_epoch, other.global_step) == (3, 9)

    # As callbacks do that save once more in on_train_end: they lower each counter by one.
    for name in ("processed", "completed"):
        epochs = other.fit_loop.epoch_progress.current
        setattr(epochs, name, getattr(epochs, name) - 1)
    epochs = other.fit_loop.epoch_progress.current
    assert (other.current_epoch, epochs.ready, epochs.processed, epochs.completed) == (2, 3, 2, 2)

    other.fit_loop.epoch_progress.current.completed = 1
    other.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed += 1
    assert (other.current_epoch, other.global_step) == (1, 10)
    with refused(AttributeError, says="fit_loop"):
        other.fit_loop = loop  # type: ignore[assignment]
    with refused(AttributeError, says="FitLoop"):
        other.fit_loop.run = print  # type: ignore[attr-defined]


def test_a_loop_of_a_program_saves_its_parts() -> None:
    class Own(Loop):
        def __init__(self, trainer: Any, inner: Loop | None = None) -> None:
            super().__init__(trainer)
            self.done, self.inner = BatchCounts(), inner

        def on_save_checkpoint(self) -> dict[str, Any]:
            return {"extra": 1}

    own = Own(quiet(), Own(quiet()))
    own.inner.done.increment_ready()  # type: ignore[union-attr]
    state = own.state_dict()
    assert list(state) == ["state_dict", "done", "inner.state_dict", "inner.done"]
    assert state["inner.done"]["current"]["ready"] == 1
    new = Own(quiet(), Own(quiet()))
    new.load_state_dict(state)
    assert new.restarting
    assert new.inner is not None
    assert new.inner.restarting
    assert new.state_dict() == state
    new.inner.done.reset_on_restart()
    assert new.inner.done.current.ready == 0
    assert OptimizationCounts().optimizer_steps == 0
    with refused(TypeError, says="`started`"):
        SchedulerCounts().increment_started()
    with refused(ValueError, "total"):
        BatchCounts(total=ReadyCompleted())


def test_a_batch_that_is_moved_has_not_begun() -> None:
    seen: list[tuple[str, int, int]] = []

    class Moves(Classifier):
        def note(self, name: str) -> None:
            seen.append((name, self.trainer.fit_loop.batch_idx, self.trainer.fit_loop.total_batch_idx))

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            self.note("move")
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_train_batch_start(self, *_: Any) -> None:
            self.note("start")

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            self.note("schedule")
            super().lr_scheduler_step(scheduler, metric)

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    quiet(max_epochs=2).fit(Moves(), loader(8))
    assert seen == [
        ("move", -1, -1), ("start", 0, 0), ("move", 0, 0), ("start", 1, 1), ("schedule", 1, 1),
        ("move", -1, 1), ("start", 0, 2), ("move", 0, 2), ("start", 1, 3), ("schedule", 1, 3),
    ]  # fmt: skip


def test_the_training_data_is_loaded_again_between_two_epochs() -> None:
    class Grows(Classifier):
        loads = 0

        def train_dataloader(self) -> Any:
            self.loads += 1
            return loader(4 * self.loads)

    def again(_: str, trainer: Any) -> None:
        trainer.fit_loop._combined_loader = None
        trainer.fit_loop.setup_data()

    trainer = quiet(max_epochs=3, callbacks=watching(again, "on_train_epoch_end"))
    trainer.fit(Grows())
    assert trainer.global_step == 1 + 2 + 3
    early = quiet(callbacks=watching(again, "on_train_batch_end"))
    with refused(AttributeError, fix="on_train_epoch_end"):
        early.fit(Classifier(), loader(8))
