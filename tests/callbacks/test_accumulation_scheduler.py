"""GradientAccumulationScheduler: each epoch accumulates as scheduled, as a loop written by hand does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hasten as L
from hasten.callbacks import GradientAccumulationScheduler, LambdaCallback
from tests.callbacks.resuming import assert_resumes_exactly, fitted, weights
from tests.models import Classifier, loader, quiet
from tests.refusals import refused


def test_it_equals_the_loop_written_by_hand() -> None:
    schedule, data = {1: 4, 3: 2}, loader(28)  # 7 batches: the last accumulation is a shorter one.
    trainer = fitted(
        Classifier, lambda: [GradientAccumulationScheduler(schedule)], data=data, max_epochs=4, max_steps=-1
    )

    L.seed_everything(0, verbose=False)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = 0
    for size in (1, 4, 4, 2):
        batches = list(data)
        for start in range(0, len(batches), size):
            window = batches[start : start + size]
            optimizer.zero_grad()
            for x, y in window:
                (nn.functional.cross_entropy(model.layers(x), y) / len(window)).backward()
            optimizer.step()
            steps += 1
    expected = model.state_dict()
    assert all(torch.allclose(value, expected[name], atol=1e-7) for name, value in weights(trainer).items())
    assert trainer.global_step == steps == 7 + 2 + 2 + 4


def test_a_resumed_run_accumulates_alike_also_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    def make() -> list[L.Callback]:
        return [GradientAccumulationScheduler({1: 4, 2: 2})]

    assert_resumes_exactly(tmp_path, Classifier, make, [6, 7, 8, 11, 13, 16], max_epochs=3)


def test_the_trainer_is_left_as_it_was_and_can_fit_again() -> None:
    seen: list[int] = []

    watch = LambdaCallback(on_train_batch_end=lambda trainer, *_: seen.append(trainer.accumulate_grad_batches))
    schedule = GradientAccumulationScheduler({0: 3, 1: 2})
    trainer = fitted(Classifier, lambda: [schedule], watch, data=loader(4))
    assert trainer.accumulate_grad_batches == 1
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, loader(4))  # type: ignore[arg-type]
    assert seen == [3, 2]

    class Failing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("on purpose")

    trainer = quiet(callbacks=[GradientAccumulationScheduler({0: 3})])
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(Failing(), loader(4))
    assert trainer.accumulate_grad_batches == 1


def test_the_number_of_steps_is_foreseen() -> None:
    class Asking(Classifier):
        foreseen = 0.0

        def configure_optimizers(self) -> Any:
            Asking.foreseen = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    def steps(schedule: dict[int, int], **options: Any) -> int:
        callbacks = [GradientAccumulationScheduler(schedule)]
        return fitted(Asking, lambda: callbacks, data=loader(28), max_epochs=3, **options).global_step

    assert steps({1: 4, 2: 3}) == Asking.foreseen == 7 + 2 + 3
    assert steps({1: 4}, max_steps=8) == Asking.foreseen == 8


def test_contradictions_are_refused_before_training() -> None:
    class Untrained(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("training began")

    callback = GradientAccumulationScheduler(given := {4: 2})
    assert (callback.epochs, given) == ([0, 4], {4: 2})  # what the program holds is not changed
    assert callback.going_to_accumulate_grad_batches()
    assert not GradientAccumulationScheduler({0: 1, 2: 1}).going_to_accumulate_grad_batches()
    trainer = quiet(callbacks=[callback], accumulate_grad_batches=4)
    with refused(ValueError, "accumulate_grad_batches"):
        trainer.fit(Untrained(), loader(4))
    assert trainer.accumulate_grad_batches == 4
    manual = Untrained()
    manual.automatic_optimization = False
    with refused(RuntimeError, says="Untrained"):
        quiet(callbacks=[callback]).fit(manual, loader(4))


def test_it_may_be_asked_with_a_trainer_that_has_not_begun() -> None:
    trainer = L.Trainer(logger=False, enable_checkpointing=False)
    GradientAccumulationScheduler({0: 1, 5: 2}).on_train_start(trainer, Classifier())
    assert trainer.accumulate_grad_batches == 1
