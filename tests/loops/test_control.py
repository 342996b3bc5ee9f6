"""When a run validates, steps, stops and starts again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hasten as L
from tests.models import Classifier, loader, quiet


class Counting(L.Callback):
    """Counts what happens."""

    def __init__(self) -> None:
        self.validated_after: list[int] = []
        self.epochs = 0
        self.batches = 0
        self.validation_batches = 0

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.batches += 1

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.validated_after.append(self.batches)

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self.validation_batches += 1

    def on_train_epoch_end(self, *_: Any) -> None:
        self.epochs += 1


def run(**arguments: Any) -> tuple[Counting, L.Trainer]:
    counting = Counting()
    trainer = quiet(callbacks=[counting], **{"num_sanity_val_steps": 0, "max_epochs": 2, **arguments})
    trainer.fit(Classifier(), loader(), loader(12))
    return counting, trainer


@pytest.mark.parametrize(
    ("arguments", "after"),
    [
        ({}, [10, 20]),
        ({"val_check_interval": 5}, [5, 10, 15, 20]),
        ({"val_check_interval": 0.25}, [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]),
        ({"val_check_interval": 3}, [3, 6, 9, 13, 16, 19]),
        ({"val_check_interval": 7, "check_val_every_n_epoch": None}, [7, 14]),
        ({"check_val_every_n_epoch": 2}, [20]),
        ({"limit_val_batches": 0}, []),
        ({"limit_train_batches": 4}, [4, 8]),
        ({"limit_train_batches": 0.5}, [5, 10]),
    ],
)
def test_validation_times(arguments: dict[str, Any], after: list[int]) -> None:
    assert run(**arguments)[0].validated_after == after


def test_validation_by_time() -> None:
    assert len(run(val_check_interval={"microseconds": 1})[0].validated_after) == 20


@pytest.mark.parametrize(
    ("arguments", "batches", "epochs", "steps"),
    [
        ({"max_epochs": 3}, 30, 3, 30),
        ({"max_epochs": 0}, 0, 0, 0),
        ({"max_steps": 7, "max_epochs": -1}, 7, 1, 7),
        ({"max_steps": 13}, 13, 2, 13),
        ({"max_steps": 3, "accumulate_grad_batches": 4}, 10, 1, 3),
        ({"fast_dev_run": True}, 1, 1, 1),
        ({"fast_dev_run": 3}, 3, 1, 3),
        ({"overfit_batches": 2}, 4, 2, 4),
        ({"limit_train_batches": 0}, 0, 0, 0),
        ({"max_steps": 0}, 0, 0, 0),
    ],
)
def test_limits(arguments: dict[str, Any], batches: int, epochs: int, steps: int) -> None:
    counting, trainer = run(**arguments)
    assert (counting.batches, counting.epochs, trainer.global_step) == (batches, epochs, steps)


class StopAfter(L.Callback):
    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step >= self.batches:
            trainer.should_stop = True


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [({}, 4), ({"min_steps": 8}, 8), ({"min_epochs": 2}, 20)],
)
def test_should_stop_waits_for_the_least(arguments: dict[str, Any], steps: int) -> None:
    trainer = quiet(callbacks=[StopAfter(4)], max_epochs=5, **arguments)
    trainer.fit(Classifier(), loader())
    assert trainer.global_step == steps


def test_max_time_ends_the_run() -> None:
    trainer = quiet(max_epochs=-1, max_time={"milliseconds": 200})
    trainer.fit(Classifier(), loader())
    assert trainer.global_step > 0


def test_current_epoch_counts_completed_epochs_after_fit() -> None:
    _, trainer = run(max_epochs=3)
    assert trainer.current_epoch == 3


def test_fit_twice_goes_on_with_the_counters() -> None:
    trainer = quiet(max_epochs=2)
    model = Classifier()
    trainer.fit(model, loader())
    trainer.fit(model, loader())
    assert trainer.global_step == 20


def test_minus_one_from_on_train_batch_start_skips_the_rest_of_the_epoch() -> None:
    class Skips(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

    trainer = quiet(max_epochs=2)
    trainer.fit(Skips(), loader())
    assert trainer.global_step == 6


def test_a_loader_that_gives_fewer_batches_than_its_length_ends_the_epoch_well() -> None:
    class Lies(list):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 10

    batches = Lies(list(loader(20)))
    counting = Counting()
    trainer = quiet(max_epochs=2, accumulate_grad_batches=2, callbacks=[counting], num_sanity_val_steps=0)
    trainer.fit(Classifier(), batches, loader(4))
    assert counting.batches == 10
    assert counting.epochs == 2
    assert trainer.global_step == 6
    assert counting.validated_after == [5, 10]


def test_modes_survive_validation() -> None:
    class Frozen(Classifier):
        def on_train_start(self) -> None:
            self.layers[0].eval()

        def on_validation_epoch_start(self) -> None:
            assert not any(m.training for m in self.modules())

        def on_train_epoch_end(self) -> None:
            assert not self.layers[0].training
            assert self.layers[1].training

    quiet(max_epochs=2).fit(Frozen(), loader(), loader())


def test_estimated_stepping_batches() -> None:
    seen: list[float] = []

    class Asks(Classifier):
        def configure_optimizers(self) -> Any:
            seen.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    quiet(max_epochs=3, accumulate_grad_batches=4).fit(Asks(), loader())
    quiet(max_epochs=3, max_steps=5).fit(Asks(), loader())
    assert seen == [9, 5]


def test_plateau_scheduler_steps_on_the_monitored_validation_value() -> None:
    class Plateau(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", 1.0)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    trainer = quiet(max_epochs=3)
    trainer.fit(Plateau(), loader(), loader())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize(("accumulate", "falls"), [(1, 3), (2, 1)])
def test_plateau_scheduler_steps_on_the_monitored_value_of_optimizer_steps(
    accumulate: int, falls: int
) -> None:
    class Plateau(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("same", 1.0)
            return self.loss(batch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            config = {"scheduler": scheduler, "monitor": "same", "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": config}

    trainer = quiet(accumulate_grad_batches=accumulate)
    trainer.fit(Plateau(), loader(16))
    # The first step sets the best value; each of the others is one without improvement.
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5**falls


def test_manual_optimisation_counts_steps() -> None:
    class Manual(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    trainer = quiet(max_epochs=2)
    model = Manual()
    before = model.layers[0].weight.clone()
    trainer.fit(model, loader())
    assert trainer.global_step == 20
    assert not torch.equal(before, model.layers[0].weight)


def test_callbacks_appended_and_hooks_patched_during_a_run_are_heard() -> None:
    heard: list[str] = []

    class Late(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            heard.append("callback")

    class Appends(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 7:
                trainer.callbacks.append(Late())
                pl_module.on_train_batch_end = lambda *_: heard.append("module")

    quiet(callbacks=[Appends()]).fit(Classifier(), loader())
    assert heard.count("callback") == 3
    assert heard.count("module") == 3


def test_predictions_keep_order_and_loader_structure() -> None:
    model = Classifier()
    one = quiet().predict(model, loader(12))
    assert one is not None
    assert torch.equal(torch.cat(one), model.eval()(loader(12).dataset.tensors[0]))
    both = quiet().predict(model, [loader(12), loader(8)])
    assert both is not None
    assert [len(part) for part in both] == [3, 2]


def test_exceptions_in_a_step_keep_their_type_and_tell_the_place() -> None:
    class Breaks(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, _, _ = batch
            return x

    with pytest.raises(ValueError, match="unpack") as caught:
        quiet().fit(Breaks(), loader())
    notes = "\n".join(caught.value.__notes__)
    assert "Breaks.training_step, batch 0" in notes
    assert "(4, 8) float32" in notes
