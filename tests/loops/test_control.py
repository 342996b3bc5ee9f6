"""When a run validates, steps, stops and starts again."""

from __future__ import annotations

import math
from collections.abc import Iterator
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

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.batches += 1

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.validated_after.append(self.batches)

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


class Stream:
    """Three batches, whose number is not known."""

    def __iter__(self) -> Iterator[Any]:
        return iter(loader(12))


def test_batches_without_a_length_are_validated_at_the_end_of_an_epoch_also_if_epochs_do_not_count() -> None:
    counting = Counting()
    options = {"max_epochs": 2, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}
    quiet(**options, callbacks=counting).fit(Classifier(), Stream(), loader())
    assert counting.validated_after == [3, 6]


class NoTrainingData(Classifier):
    def train_dataloader(self) -> Any:
        raise AssertionError("nothing is trained")


def test_training_data_is_not_asked_for_where_nothing_is_trained() -> None:
    trainer = quiet(limit_train_batches=0)
    trainer.fit(NoTrainingData())
    assert trainer.num_training_batches == math.inf


@pytest.mark.parametrize(
    ("arguments", "batches", "epochs", "steps"),
    [
        ({"max_steps": 7, "max_epochs": -1}, 7, 1, 7),
        ({"max_steps": 13}, 13, 2, 13),
        ({"max_steps": 3, "accumulate_grad_batches": 4}, 10, 1, 3),
        ({"fast_dev_run": 3}, 3, 1, 3),
    ],
)
def test_limits(arguments: dict[str, Any], batches: int, epochs: int, steps: int) -> None:
    counting, trainer = run(**arguments)
    assert (counting.batches, counting.epochs, trainer.global_step) == (batches, epochs, steps)


class StopAfter(L.Callback):
    def __init__(self, batches: int) -> None:
        self.batches = batches

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step >= self.batches:
            trainer.should_stop = True


@pytest.mark.parametrize(("arguments", "steps"), [({}, 4), ({"min_steps": 8}, 8), ({"min_epochs": 2}, 20)])
def test_should_stop_waits_for_the_least(arguments: dict[str, Any], steps: int) -> None:
    trainer = quiet(callbacks=[StopAfter(4)], max_epochs=5, **arguments)
    trainer.fit(Classifier(), loader())
    assert trainer.global_step == steps


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


def test_predictions_are_those_of_the_model_in_the_order_of_the_loader() -> None:
    model = Classifier()
    predictions = quiet().predict(model, loader(12))
    assert predictions is not None
    assert torch.equal(torch.cat(predictions), model.eval()(loader(12).dataset.tensors[0]))
