"""OnExceptionCheckpoint: a run that failed goes on where it was."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

import hasten as L
from hasten.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from tests.callbacks.resuming import assert_same, fitted, weights
from tests.models import Classifier, loader, quiet
from tests.refusals import warned


class Failing(Classifier):
    """Fails in one place, at a batch of the whole run."""

    place = "training_step"
    at = 8
    error: BaseException = RuntimeError("on purpose")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.fail("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fail("validation_step")
        super().validation_step(batch, batch_idx)

    def fail(self, place: str) -> None:
        if place == self.place and self.trainer.total_batch_idx + 1 == self.at:
            raise self.error

    def on_train_batch_start(self, *_: Any) -> None:
        self.fail("on_train_batch_start")

    def on_train_batch_end(self, *_: Any) -> None:
        self.fail("on_train_batch_end")

    def on_train_epoch_end(self) -> None:
        self.fail("on_train_epoch_end")


def failing(at: int, **more: Any) -> Failing:
    model: Failing = type("Failing", (Failing,), {"at": at, **more})()
    return model


@pytest.mark.parametrize(
    ("place", "at", "error"),
    [
        ("training_step", 0, RuntimeError),
        ("training_step", 8, KeyboardInterrupt),
        ("on_train_batch_start", 7, RuntimeError),
        ("on_train_batch_end", 8, RuntimeError),
        ("on_train_epoch_end", 6, RuntimeError),
        ("validation_step", 12, RuntimeError),
    ],
)
def test_a_failed_or_interrupted_run_resumes_exactly(
    tmp_path: Path, place: str, at: int, error: type[BaseException]
) -> None:
    options: dict[str, Any] = {"max_epochs": 3, "validation": loader(4), "enable_checkpointing": True}
    callback = OnExceptionCheckpoint(tmp_path, "failed")
    with pytest.raises((RuntimeError, KeyboardInterrupt, SystemExit)):
        fitted(lambda: failing(at, place=place, error=error("on purpose")), lambda: [callback], **options)
    assert Path(callback.ckpt_path) == tmp_path / "failed.ckpt"
    assert Path(callback.ckpt_path).exists()
    resumed = fitted(Classifier, lambda: [callback], ckpt_path=tmp_path / "failed.ckpt", seed=9, **options)
    whole = fitted(Classifier, list, max_epochs=3, validation=loader(4))
    assert_same(weights(resumed), weights(whole))
    assert resumed.global_step == whole.global_step
    # It served its purpose.
    assert not Path(callback.ckpt_path).exists()


@pytest.mark.parametrize(
    ("removed", "given", "start"),
    [
        (None, "last", "on_exception"),
        ("on_exception.ckpt", "last", "epoch=0-step=6"),
        ("epoch=0-step=6.ckpt", "last", "on_exception"),
        (None, None, "on_exception"),
        ("on_exception.ckpt", None, ""),
    ],
)
def test_a_fit_continues_from_the_newest_checkpoint_of_all_callbacks(
    tmp_path: Path, removed: str | None, given: str | None, start: str
) -> None:
    def callbacks() -> list[L.Callback]:
        return [OnExceptionCheckpoint(tmp_path), ModelCheckpoint(tmp_path / "saved")]

    with pytest.raises(RuntimeError, match="on purpose"):
        fitted(lambda: failing(7), callbacks, max_epochs=2, enable_checkpointing=True)
    for path in tmp_path.rglob("*.ckpt"):
        os.utime(path, (20, 20) if path.stem == "on_exception" else (10, 10))
        if path.name == removed:
            path.unlink()
    says_so = warned(UserWarning, fix="ckpt_path='last'", says="on_exception.ckpt")
    with says_so if start and given is None else nullcontext():
        resumed = fitted(Classifier, callbacks, max_epochs=2, enable_checkpointing=True, ckpt_path=given)
    assert Path(resumed.ckpt_path or "").stem == start
    assert resumed.global_step == 12


def test_only_a_fit_that_succeeds_removes_it(tmp_path: Path) -> None:
    callback = OnExceptionCheckpoint(tmp_path)
    path = tmp_path / "on_exception.ckpt"

    def trainer(**options: Any) -> L.Trainer:
        return quiet(callbacks=[callback], enable_checkpointing=True, **options)

    with pytest.raises(RuntimeError):
        trainer().fit(failing(1), loader(8))
    assert path.exists()
    trainer().test(Classifier(), loader(8), ckpt_path=path, verbose=False)
    trainer().predict(Classifier(), loader(8))
    quiet(callbacks=[callback], fast_dev_run=True).fit(Classifier(), loader(8))
    assert path.exists()
    before = path.read_bytes()
    with pytest.raises(RuntimeError):
        trainer().fit(failing(2, place="on_train_epoch_end"), loader(8))
    assert path.read_bytes() != before
    trainer().fit(Classifier(), loader(8))
    assert not path.exists()
    trainer().fit(Classifier(), loader(8))  # Nothing to remove is no problem.


def test_where_no_run_has_begun_nothing_is_saved(tmp_path: Path) -> None:
    class Broken(Classifier):
        def setup(self, stage: str) -> None:
            raise RuntimeError("in setup")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError("in validation")

    callback = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(RuntimeError, match="in setup"):
        quiet(callbacks=[callback], enable_checkpointing=True).fit(Broken(), loader(8))
    Broken.setup = Classifier.setup  # type: ignore[method-assign]
    trainer = quiet(callbacks=[callback], enable_checkpointing=True)
    with pytest.raises(RuntimeError, match="in validation"):
        trainer.validate(Broken(), loader(8))
    with pytest.raises(RuntimeError, match="in validation"):
        trainer.fit(Broken(), loader(8), loader(8))  # In the sanity check.
    with pytest.raises(RuntimeError, match="on purpose"):
        quiet(callbacks=[callback], fast_dev_run=True).fit(failing(0), loader(8))
    assert list(tmp_path.iterdir()) == []


def test_the_exception_is_seen_even_if_the_run_cannot_be_saved(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    callback = OnExceptionCheckpoint(tmp_path / "file")
    trainer = quiet(callbacks=[callback], enable_checkpointing=True)
    with (
        warned(UserWarning, says="OnExceptionCheckpoint"),
        pytest.raises(RuntimeError, match="on purpose"),
    ):
        trainer.fit(failing(0), loader(8))


class Sample(NamedTuple):
    """A batch of a class of the program, which a checkpoint does not hold."""

    x: Tensor
    y: Tensor


def as_sample(samples: list[Any]) -> Sample:
    return Sample(torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]))


class Fragile(Failing):
    """Changes its batch, draws, logs and updates a metric and running statistics before it fails."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 2))
        self.mean = torchmetrics.MeanMetric()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(torch.rand(()))
        loss = self.loss(batch)
        self.mean.update(loss.detach())
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_after_backward(self) -> None:
        self.fail("on_after_backward")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.fail("on_before_zero_grad")

    def on_train_epoch_end(self) -> None:
        self.seen = [float(self.mean.compute()), float(self.trainer.callback_metrics["loss"])]


@pytest.mark.parametrize(
    ("place", "at", "accumulate", "stored"),
    [
        ("on_after_backward", 9, 3, True),
        ("on_after_backward", 9, 3, False),
        ("on_before_zero_grad", 6, 1, True),
        ("on_after_backward", 0, 2, False),
    ],
)
def test_a_batch_that_failed_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, at: int, accumulate: int, stored: bool
) -> None:
    """Also with an open accumulation, a batch that was changed in place, and batches of a class of the program."""
    monkeypatch.chdir(tmp_path)

    def make(at: int = -1) -> Fragile:
        model: Fragile = type("Fragile", (Fragile,), {"at": at, "place": place})()
        return model

    def data() -> Any:
        return loader(24, shuffle=True, collate_fn=None if stored else as_sample)

    every: Any = ModelCheckpoint(tmp_path, every_n_epochs=9, save_on_exception=True)
    saves = every if accumulate == 3 else OnExceptionCheckpoint(tmp_path)
    options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": accumulate, "enable_checkpointing": True}
    with pytest.raises(RuntimeError):
        fitted(lambda: make(at), lambda: [saves], data=data(), **options)
    (path,) = tmp_path.iterdir()
    resumed = fitted(make, list, ckpt_path=path, data=data(), seed=9, **options)
    whole = fitted(make, list, data=data(), **options)
    assert_same(weights(resumed), weights(whole))
    assert resumed.lightning_module.seen == whole.lightning_module.seen


def test_an_error_within_an_accumulation_says_what_counts_twice(tmp_path: Path) -> None:
    model: Fragile = type("Fragile", (Fragile,), {"at": 1, "place": "on_after_backward"})()
    trainer = quiet(callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True, accumulate_grad_batches=2)
    with warned(UserWarning, says=("batch 1 of epoch 1", "gradients with which")), pytest.raises(RuntimeError):
        trainer.fit(model, loader(24))
    assert len(list(tmp_path.iterdir())) == 1


def test_an_error_after_the_step_says_that_it_is_repeated(tmp_path: Path) -> None:
    class Steps(Failing):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.fail("training_step")

    model = Steps()
    model.at = 2
    with warned(UserWarning, says=("batch 2 of epoch 1", "weights")), pytest.raises(RuntimeError):
        quiet(callbacks=[OnExceptionCheckpoint(tmp_path)], enable_checkpointing=True).fit(model, loader(24))
    assert len(list(tmp_path.iterdir())) == 1


def test_an_epoch_that_a_hook_ends_does_not_store_its_batch(tmp_path: Path) -> None:
    class Ends(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    def data() -> Any:
        return loader(24, shuffle=True, collate_fn=as_sample)

    def saves() -> list[Any]:
        return [ModelCheckpoint(tmp_path, save_top_k=-1)]

    whole = fitted(Ends, saves, data=data(), max_epochs=2, enable_checkpointing=True)
    resumed = fitted(Ends, list, data=data(), max_epochs=2, ckpt_path=tmp_path / "epoch=0-step=2.ckpt", seed=9)
    assert_same(weights(resumed), weights(whole))
