"""Trainer: what its arguments do, what its properties show, and what several calls in a row leave behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hasten as L
from hasten.callbacks import ModelCheckpoint
from hasten.loggers.base import DummyLogger
from tests.fakes import RowLogger, watching
from tests.models import Classifier, Several, loader, quiet, same_weights
from tests.refusals import refused, warned

# -- the epoch and the step, seen from every side


HOOKS = (
    "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_end", "on_fit_end",
    "on_test_start",
)  # fmt: skip


def epochs() -> tuple[list[Any], L.Callback]:
    """Return a list, and a callback that adds (hook, current_epoch, global_step) to it."""
    seen: list[Any] = []

    def note(hook: str, trainer: Any) -> None:
        name = hook.removeprefix("on_").removeprefix("train_").replace("_", " ")
        seen.append((name.replace("test start", "test"), trainer.current_epoch, trainer.global_step))

    return seen, watching(note, *HOOKS)


def test_current_epoch_counts_epochs_once_they_are_over(tmp_path: Path) -> None:
    (seen, callback), model = epochs(), Classifier()
    trainer = quiet(max_epochs=2, callbacks=[callback])
    assert trainer.current_epoch == 0
    trainer.fit(model, loader(8))
    trainer.test(model, loader(8), verbose=False)
    assert seen == [
        ("fit start", 0, 0), ("start", 0, 0), ("epoch start", 0, 0), ("epoch end", 0, 2), ("epoch start", 1, 2),
        ("epoch end", 1, 4), ("end", 2, 4), ("fit end", 2, 4), ("test", 2, 4),
    ]  # fmt: skip
    assert (trainer.current_epoch, trainer.global_step, trainer.total_batch_idx) == (2, 4, 3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["epoch"] == 2
    seen, callback = epochs()
    trainer = quiet(max_epochs=3, callbacks=[callback])
    trainer.fit(Classifier(), loader(8), ckpt_path=tmp_path / "a.ckpt")
    assert seen[1:3] == [("start", 2, 4), ("epoch start", 2, 4)]
    assert trainer.current_epoch == 3


def test_current_epoch_where_a_fit_ends_or_resumes_within_one(tmp_path: Path) -> None:
    seen, callback = epochs()
    saves = ModelCheckpoint(tmp_path, "{epoch}-{step}", every_n_train_steps=3)
    trainer = quiet(max_steps=3, max_epochs=-1, callbacks=[callback, saves], enable_checkpointing=True)
    trainer.fit(Classifier(), loader(8))
    assert seen[-3:] == [("epoch end", 1, 3), ("end", 2, 3), ("fit end", 2, 3)]
    assert trainer.current_epoch == 2
    path = tmp_path / "epoch=1-step=3.ckpt"
    assert torch.load(path, weights_only=True)["epoch"] == 1
    seen, callback = epochs()
    trainer = quiet(max_epochs=3, callbacks=[callback])
    with warned(UserWarning, says="ModelCheckpoint"):
        trainer.fit(Classifier(), loader(8), ckpt_path=path)
    assert seen[1:] == [
        ("start", 1, 3), ("epoch end", 1, 4), ("epoch start", 2, 4), ("epoch end", 2, 6), ("end", 3, 6),
        ("fit end", 3, 6),
    ]  # fmt: skip


def test_rows_of_loggers_after_fit_are_of_the_next_epoch() -> None:
    logger, model = RowLogger(), Classifier()
    trainer = quiet(max_epochs=2, logger=logger, num_sanity_val_steps=0)
    trainer.fit(model, loader(8), loader(8))
    trainer.test(model, loader(8), verbose=False)
    assert [(step, row["epoch"]) for step, row in logger.rows] == [(1, 0), (3, 1), (4, 2)]
    assert "test_loss" in logger.rows[-1][1]


def test_an_exception_leaves_the_counters_where_it_happened() -> None:
    heard: list[Any] = []

    def note(hook: str, trainer: Any) -> None:
        heard.append((hook, trainer.state.status.value, trainer.current_epoch, trainer.global_step))

    hears = watching(note, "on_exception", "on_train_end", "on_fit_end", "teardown")

    class Breaks(Classifier):
        broken = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.broken and self.global_step == 3:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    model = Breaks()
    trainer = quiet(max_epochs=3, callbacks=[hears])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(model, loader(8))
    assert heard == [("on_exception", "interrupted", 1, 3), ("teardown", "interrupted", 1, 3)]
    assert (trainer.interrupted, trainer.training, trainer.state.stage) == (True, False, None)
    assert (trainer.current_epoch, trainer.global_step) == (1, 3)
    model.broken = False
    trainer.fit(model, loader(8))
    assert not trainer.interrupted
    assert trainer.current_epoch == 3


@pytest.mark.parametrize("sanity_steps", [0, 2])
def test_an_exception_in_validation_leaves_the_model_in_train_mode(sanity_steps: int) -> None:
    class Breaks(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise KeyError("x")

    model = Breaks()
    trainer = quiet(num_sanity_val_steps=sanity_steps)
    with pytest.raises(KeyError) as caught:
        trainer.fit(model, loader(8), loader(8))
    assert "Breaks.validation_step, batch 0" in "\n".join(caught.value.__notes__)
    assert model.training
    assert torch.is_grad_enabled()
    assert trainer.global_step == (0 if sanity_steps else 2)
    for call, name in ((trainer.test, "test_step"), (trainer.predict, "predict_step")):
        setattr(model, name, lambda *_: {}["y"])
        with pytest.raises(KeyError) as caught:
            call(model, loader(8))
        assert f"Breaks.{name}, batch 0" in "\n".join(caught.value.__notes__)
        assert model.training


def test_an_error_of_a_teardown_ends_the_run_once() -> None:
    heard: list[str] = []

    class Finalized(DummyLogger):
        def finalize(self, status: str) -> None:
            heard.append(status)

    def fail(hook: str, trainer: Any) -> None:
        heard.append(hook)
        raise ZeroDivisionError

    told = watching(lambda hook, _: heard.append(hook), "on_exception")
    trainer = quiet(callbacks=[watching(fail, "teardown"), told], logger=Finalized())
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Classifier(), loader(8))
    assert heard == ["teardown", "on_exception", "failed"]
    assert (trainer.interrupted, trainer.state.stage) == (True, None)


# -- states


def test_states_of_a_run() -> None:
    seen: list[Any] = []
    stages = ("training", "validating", "testing", "predicting", "sanity_checking", "evaluating")

    def note(hook: str, trainer: Any) -> None:
        state = trainer.state
        assert state.status.value == "running"
        seen.append((state.fn.value, hook == "setup" or [name for name in stages if getattr(trainer, name)]))

    hooks = ("on_train_batch_start", "on_validation_start", "on_test_start", "on_predict_start", "on_train_epoch_end")
    model, trainer = Classifier(), quiet(callbacks=[watching(note, "setup", *hooks)])
    assert trainer.state.status.value == "initializing"
    trainer.fit(model, loader(4), loader(4))
    assert trainer.state.finished
    assert trainer.state.stage is None
    trainer.validate(model, loader(4), verbose=False)
    trainer.test(model, loader(4), verbose=False)
    trainer.predict(model, loader(4))
    assert seen == [
        ("fit", True), ("fit", ["sanity_checking", "evaluating"]), ("fit", ["training"]),
        ("fit", ["validating", "evaluating"]), ("fit", ["training"]), ("validate", True),
        ("validate", ["validating", "evaluating"]), ("test", True), ("test", ["testing", "evaluating"]),
        ("predict", True), ("predict", ["predicting"]),
    ]  # fmt: skip


# -- several calls in a row


def test_after_an_evaluation_a_checkpoint_still_holds_what_the_fit_left(tmp_path: Path) -> None:
    model = Classifier()
    trainer = quiet(max_epochs=2)
    trainer.fit(model, loader(12), loader(8))
    optimizers, train = trainer.optimizers, trainer.train_dataloader
    trainer.save_checkpoint(tmp_path / "before.ckpt")
    trainer.validate(model, loader(4), verbose=False)
    trainer.test(model, loader(4), verbose=False)
    trainer.predict(model, loader(4))
    assert trainer.optimizers is optimizers
    assert trainer.train_dataloader is train
    assert trainer.num_training_batches == 3
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    resumed = [Classifier(), Classifier()]
    for one, name in zip(resumed, ("before.ckpt", "after.ckpt"), strict=True):
        going_on = quiet(max_epochs=3)
        going_on.fit(one, loader(12), loader(8), ckpt_path=tmp_path / name)
        assert going_on.global_step == 9
    assert same_weights(*resumed)
    # Another module has nothing to do with that fit.
    trainer.test(Classifier(), loader(4), verbose=False)
    assert trainer.optimizers == []


def test_fit_then_test_and_what_each_leaves() -> None:
    model, trainer = Several(), quiet()
    trainer.fit(model, loader(12), loader(8))
    assert set(trainer.callback_metrics) == {"train_loss", "val_loss"}
    results = trainer.test(model, [loader(8), loader(12)], verbose=False)
    assert set(trainer.callback_metrics) == {"test_loss/dataloader_idx_0", "test_loss/dataloader_idx_1"}
    assert [list(result) for result in results] == [["test_loss/dataloader_idx_0"], ["test_loss/dataloader_idx_1"]]
    assert results[0]["test_loss/dataloader_idx_0"] == trainer.callback_metrics["test_loss/dataloader_idx_0"]
    assert trainer.num_test_batches == [2, 3]
    assert trainer.num_val_batches == [2]
    by_hand = torch.stack([model.loss(batch).detach() for batch in loader(8)]).mean()
    assert results[0]["test_loss/dataloader_idx_0"] == pytest.approx(by_hand.item())


def test_a_stopped_fit_is_continued_by_the_next() -> None:
    class StopsOnce(L.Callback):
        done = False

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if not self.done and trainer.global_step == 3:
                self.done = trainer.should_stop = True

    trainer, model = quiet(max_epochs=2, callbacks=[StopsOnce()]), Classifier()
    trainer.fit(model, loader(40))
    trainer.validate(model, loader(4), verbose=False)
    assert (trainer.global_step, trainer.current_epoch, trainer.should_stop) == (3, 1, True)
    trainer.fit(model, loader(40))
    assert (trainer.global_step, trainer.current_epoch, trainer.should_stop) == (13, 2, False)


@pytest.mark.parametrize(
    ("hook", "steps"),
    [
        ("on_fit_start", 0), ("on_train_start", 0), ("on_train_epoch_start", 0), ("on_train_batch_start", 1),
        ("on_validation_end", 4), ("on_train_epoch_end", 4),
    ],
)  # fmt: skip
def test_should_stop_from_every_hook(hook: str, steps: int) -> None:
    stops = watching(lambda _, trainer: setattr(trainer, "should_stop", True), hook)
    for min_epochs, expected in ((None, steps), (2, 8)):
        trainer = quiet(
            max_epochs=3, min_epochs=min_epochs, limit_train_batches=4, num_sanity_val_steps=0, callbacks=[stops]
        )
        trainer.fit(Classifier(), loader(), loader(8))
        assert trainer.global_step == expected
        assert trainer.should_stop


def test_no_limit_of_epochs() -> None:
    stops = watching(
        lambda _, trainer: setattr(trainer, "should_stop", trainer.current_epoch == 3), "on_train_epoch_end"
    )
    trainer = quiet(max_epochs=-1, limit_train_batches=2, callbacks=[stops])
    trainer.fit(Classifier(), loader())
    assert (trainer.current_epoch, trainer.global_step) == (4, 8)
    assert (trainer.max_epochs, trainer.max_steps) == (-1, -1)


@pytest.mark.parametrize(
    "arguments", [{"limit_train_batches": 0}, {"max_epochs": 0}, {"max_steps": 0}, {"limit_train_batches": 0.0}]
)
def test_nothing_to_train(arguments: dict[str, Any]) -> None:
    seen, callback = epochs()
    trainer = quiet(callbacks=[callback], **arguments)
    trainer.fit(Classifier(), loader(8), loader(8))
    assert seen == [("fit start", 0, 0), ("fit end", 0, 0)]
    assert trainer.state.finished


# -- checkpoints to start from


def test_every_form_of_ckpt_path(tmp_path: Path, caplog: Any) -> None:
    saves = ModelCheckpoint(tmp_path, "{epoch}", monitor="val_loss", save_last=True)
    trainer = quiet(max_epochs=2, callbacks=[saves], enable_checkpointing=True)
    model = Classifier()
    trainer.fit(model, loader(), loader(8))
    best, last = saves.best_model_path, str(tmp_path / "last.ckpt")
    paths = {"best": best, "last": last, last: last, tmp_path / "last.ckpt": last, None: None}
    for given, path in paths.items():
        trainer.test(model, loader(8), ckpt_path=given, verbose=False)
        assert trainer.ckpt_path == path
    with warned(UserWarning, says=("ckpt_path", "epoch=1.ckpt")):
        trainer.test(dataloaders=loader(8), verbose=False)
    assert trainer.ckpt_path == best
    trainer.ckpt_path = last
    trainer.test(dataloaders=loader(8), verbose=False)
    assert trainer.ckpt_path == last
    with warned(UserWarning, says=(last, best)):
        trainer.test(model, loader(8), ckpt_path=best, verbose=False)
    trainer.test(model, loader(8), verbose=False)
    assert trainer.ckpt_path is None
    later = quiet(max_epochs=3)
    later.ckpt_path = last
    later.fit(model, loader())
    assert (later.ckpt_path, later.global_step) == (last, 30)
    (tmp_path / "other.ckpt").write_bytes(b"no checkpoint")
    with refused(Exception, says="other.ckpt"):
        trainer.test(model, loader(8), ckpt_path=tmp_path / "other.ckpt")
    with refused(FileNotFoundError, "ckpt_path"):
        trainer.fit(model, loader(8), ckpt_path=tmp_path / "lst.ckpt")
    torch.save({"weights": 1}, tmp_path / "weights.ckpt")
    with refused(ValueError, says=("weights.ckpt", "'state_dict'", "['weights']")):
        trainer.test(model, loader(8), ckpt_path=tmp_path / "weights.ckpt")


def test_a_checkpoint_that_was_never_saved_is_not_evaluated() -> None:
    saves = ModelCheckpoint(monitor="val_loss")
    trainer = quiet(callbacks=[saves], enable_checkpointing=True, fast_dev_run=True)
    model = Classifier()
    trainer.fit(model, loader(), loader(8))
    with refused(ValueError, "ckpt_path", says="fast_dev_run"):
        trainer.test(model, loader(8), ckpt_path="best")
    for evaluate in (trainer.validate, trainer.test, trainer.predict):
        with refused(FileNotFoundError, "ckpt_path", fix="leave ckpt_path out"):
            evaluate(model, loader(8), ckpt_path="last")


def test_weights_alone_are_enough_to_test_but_not_to_resume(tmp_path: Path) -> None:
    model, trainer = Classifier(), quiet()
    trainer.fit(model, loader(8))
    trainer.save_checkpoint(tmp_path / "w.ckpt", weights_only=True)
    assert "optimizer_states" not in torch.load(tmp_path / "w.ckpt", weights_only=True)
    other = Classifier()
    quiet().test(other, loader(8), ckpt_path=tmp_path / "w.ckpt", verbose=False)
    assert same_weights(model, other)
    with refused(ValueError, says="w.ckpt"):
        quiet(max_epochs=2).fit(other, loader(8), ckpt_path=tmp_path / "w.ckpt")


def test_fit_called_again_is_over_unless_there_is_more_to_do() -> None:
    model, trainer = Classifier(), quiet()
    trainer.fit(model, loader(8))
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    trainer.fit(model, loader(8))
    assert (trainer.global_step, trainer.current_epoch) == (2, 1)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
