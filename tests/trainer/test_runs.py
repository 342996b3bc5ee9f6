"""Trainer: what its arguments do, what its properties show, and what several calls in a row leave behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hasten as L
from hasten.callbacks import ModelCheckpoint
from tests.fakes import RowLogger
from tests.models import Classifier, Several, loader, quiet, same_weights

# -- the epoch and the step, seen from every side


class Epochs(L.Callback):
    """Writes down (hook, current_epoch, global_step)."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, hook: str, trainer: Any) -> None:
        self.seen.append((hook, trainer.current_epoch, trainer.global_step))

    def on_fit_start(self, trainer: Any, *_: Any) -> None:
        self.note("fit start", trainer)

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.note("start", trainer)

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        self.note("epoch start", trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.note("epoch end", trainer)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self.note("end", trainer)

    def on_fit_end(self, trainer: Any, *_: Any) -> None:
        self.note("fit end", trainer)

    def on_test_start(self, trainer: Any, *_: Any) -> None:
        self.note("test", trainer)


def test_current_epoch_counts_epochs_once_they_are_over(tmp_path: Path) -> None:
    epochs, model = Epochs(), Classifier()
    trainer = quiet(max_epochs=2, callbacks=[epochs])
    assert trainer.current_epoch == 0
    trainer.fit(model, loader(8))
    trainer.test(model, loader(8), verbose=False)
    assert epochs.seen == [
        ("fit start", 0, 0),
        ("start", 0, 0),
        ("epoch start", 0, 0),
        ("epoch end", 0, 2),
        ("epoch start", 1, 2),
        ("epoch end", 1, 4),
        ("end", 2, 4),
        ("fit end", 2, 4),
        ("test", 2, 4),
    ]
    assert (trainer.current_epoch, trainer.global_step, trainer.total_batch_idx) == (2, 4, 3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["epoch"] == 2
    epochs = Epochs()
    trainer = quiet(max_epochs=3, callbacks=[epochs])
    trainer.fit(Classifier(), loader(8), ckpt_path=tmp_path / "a.ckpt")
    assert epochs.seen[1:3] == [("start", 2, 4), ("epoch start", 2, 4)]
    assert trainer.current_epoch == 3


def test_current_epoch_where_a_fit_ends_or_goes_on_within_one(tmp_path: Path) -> None:
    epochs = Epochs()
    trainer = quiet(
        max_steps=3,
        max_epochs=-1,
        callbacks=[epochs, ModelCheckpoint(tmp_path, "{epoch}-{step}", every_n_train_steps=3)],
        enable_checkpointing=True,
    )
    trainer.fit(Classifier(), loader(8))
    assert epochs.seen[-3:] == [("epoch end", 1, 3), ("end", 2, 3), ("fit end", 2, 3)]
    assert trainer.current_epoch == 2
    path = tmp_path / "epoch=1-step=3.ckpt"
    assert torch.load(path, weights_only=True)["epoch"] == 1
    epochs = Epochs()
    trainer = quiet(max_epochs=3, callbacks=[epochs])
    with pytest.warns(UserWarning, match="holds the state of ModelCheckpoint"):
        trainer.fit(Classifier(), loader(8), ckpt_path=path)
    assert epochs.seen[1:] == [
        ("start", 1, 3),
        ("epoch end", 1, 4),
        ("epoch start", 2, 4),
        ("epoch end", 2, 6),
        ("end", 3, 6),
        ("fit end", 3, 6),
    ]


def test_rows_of_loggers_after_fit_are_of_the_next_epoch() -> None:
    logger, model = RowLogger(), Classifier()
    trainer = quiet(max_epochs=2, logger=logger, num_sanity_val_steps=0)
    trainer.fit(model, loader(8), loader(8))
    trainer.test(model, loader(8), verbose=False)
    assert [(step, row["epoch"]) for step, row in logger.rows] == [(1, 0), (3, 1), (4, 2)]
    assert "test_loss" in logger.rows[-1][1]


def test_an_exception_leaves_the_counters_where_it_happened() -> None:
    heard: list[Any] = []

    class Hears(L.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            heard.append(
                (type(exception), trainer.state.status.value, trainer.current_epoch, trainer.global_step)
            )

        def on_train_end(self, *_: Any) -> None:
            heard.append("train end")

        def on_fit_end(self, *_: Any) -> None:
            heard.append("fit end")

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            heard.append(f"teardown {stage}")

    class Breaks(Classifier):
        broken = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.broken and self.global_step == 3:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    model = Breaks()
    trainer = quiet(max_epochs=3, callbacks=[Hears()])
    with pytest.raises(ZeroDivisionError):
        trainer.fit(model, loader(8))
    assert heard == [(ZeroDivisionError, "interrupted", 1, 3), "teardown fit"]
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


# -- states


class States(L.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, trainer: Any) -> None:
        state = trainer.state
        on = [
            name
            for name in ("training", "validating", "testing", "predicting", "sanity_checking", "evaluating")
            if getattr(trainer, name)
        ]
        self.seen.append((state.fn.value, state.status.value, on))

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.seen.append(f"setup {stage}")

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.note(trainer)

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        self.note(trainer)

    def on_test_start(self, trainer: Any, *_: Any) -> None:
        self.note(trainer)

    def on_predict_start(self, trainer: Any, *_: Any) -> None:
        self.note(trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self.note(trainer)


def test_states_of_a_run() -> None:
    states, model = States(), Classifier()
    trainer = quiet(callbacks=[states])
    assert trainer.state.status.value == "initializing"
    trainer.fit(model, loader(4), loader(4))
    assert trainer.state.finished
    assert trainer.state.stage is None
    trainer.validate(model, loader(4), verbose=False)
    trainer.test(model, loader(4), verbose=False)
    trainer.predict(model, loader(4))
    assert states.seen == [
        "setup fit",
        ("fit", "running", ["sanity_checking", "evaluating"]),
        ("fit", "running", ["training"]),
        ("fit", "running", ["validating", "evaluating"]),
        ("fit", "running", ["training"]),
        "setup validate",
        ("validate", "running", ["validating", "evaluating"]),
        "setup test",
        ("test", "running", ["testing", "evaluating"]),
        "setup predict",
        ("predict", "running", ["predicting"]),
    ]


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
    assert [list(result) for result in results] == [
        ["test_loss/dataloader_idx_0"],
        ["test_loss/dataloader_idx_1"],
    ]
    assert results[0]["test_loss/dataloader_idx_0"] == trainer.callback_metrics["test_loss/dataloader_idx_0"]
    assert trainer.num_test_batches == [2, 3]
    assert trainer.num_val_batches == [2]
    by_hand = torch.stack([model.loss(batch).detach() for batch in loader(8)]).mean()
    assert results[0]["test_loss/dataloader_idx_0"] == pytest.approx(by_hand.item())


def test_fit_called_again_is_over_unless_there_is_more_to_do() -> None:
    model, trainer = Classifier(), quiet()
    trainer.fit(model, loader(8))
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    trainer.fit(model, loader(8))
    assert (trainer.global_step, trainer.current_epoch) == (2, 1)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


def test_a_stopped_fit_is_continued_by_the_next() -> None:
    class StopsOnce(L.Callback):
        done = False

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if not self.done and trainer.global_step == 3:
                self.done = trainer.should_stop = True

    trainer, model = quiet(max_epochs=2, callbacks=[StopsOnce()]), Classifier()
    trainer.fit(model, loader(40))
    assert (trainer.global_step, trainer.current_epoch, trainer.should_stop) == (3, 1, True)
    trainer.fit(model, loader(40))
    assert (trainer.global_step, trainer.current_epoch, trainer.should_stop) == (13, 2, False)


@pytest.mark.parametrize(
    ("hook", "steps", "at_least_two_epochs"),
    [
        ("on_fit_start", 0, 8),
        ("on_train_start", 0, 8),
        ("on_train_epoch_start", 0, 8),
        ("on_train_batch_start", 1, 8),
        ("on_validation_end", 4, 8),
        ("on_train_epoch_end", 4, 8),
    ],
)
def test_should_stop_from_every_hook(hook: str, steps: int, at_least_two_epochs: int) -> None:
    stops = type(
        "Stops", (L.Callback,), {hook: lambda self, trainer, *_: setattr(trainer, "should_stop", True)}
    )
    for options, expected in (({}, steps), ({"min_epochs": 2}, at_least_two_epochs)):
        trainer = quiet(
            max_epochs=3, limit_train_batches=4, num_sanity_val_steps=0, callbacks=[stops()], **options
        )
        trainer.fit(Classifier(), loader(), loader(8))
        assert trainer.global_step == expected
        assert trainer.should_stop


def test_no_limit_of_epochs() -> None:
    class Stops(L.Callback):
        def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
            trainer.should_stop = trainer.current_epoch == 3

    trainer = quiet(max_epochs=-1, limit_train_batches=2, callbacks=[Stops()])
    trainer.fit(Classifier(), loader())
    assert (trainer.current_epoch, trainer.global_step) == (4, 8)
    assert (trainer.max_epochs, trainer.max_steps) == (-1, -1)


@pytest.mark.parametrize(
    "arguments",
    [{"limit_train_batches": 0}, {"max_epochs": 0}, {"max_steps": 0}, {"limit_train_batches": 0.0}],
)
def test_nothing_to_train(arguments: dict[str, Any]) -> None:
    epochs = Epochs()
    trainer = quiet(callbacks=[epochs], **arguments)
    trainer.fit(Classifier(), loader(8), loader(8))
    assert epochs.seen == [("fit start", 0, 0), ("fit end", 0, 0)]
    assert trainer.state.finished


# -- checkpoints to start from


def test_every_form_of_ckpt_path(tmp_path: Path, caplog: Any) -> None:
    saves = ModelCheckpoint(tmp_path, "{epoch}", monitor="val_loss", save_last=True)
    trainer = quiet(max_epochs=2, callbacks=[saves], enable_checkpointing=True)
    model = Classifier()
    trainer.fit(model, loader(), loader(8))
    best, last = saves.best_model_path, str(tmp_path / "last.ckpt")
    for given, path in (
        ("best", best),
        ("last", last),
        (last, last),
        (tmp_path / "last.ckpt", last),
        (None, None),
    ):
        trainer.test(model, loader(8), ckpt_path=given, verbose=False)
        assert trainer.ckpt_path == path
    with pytest.warns(UserWarning, match=r"without a model and ckpt_path.*epoch=1\.ckpt"):
        trainer.test(dataloaders=loader(8), verbose=False)
    assert trainer.ckpt_path == best
    (tmp_path / "other.ckpt").write_bytes(b"no checkpoint")
    with pytest.raises(Exception, match=r"other\.ckpt"):
        trainer.test(model, loader(8), ckpt_path=tmp_path / "other.ckpt")
    with pytest.raises(FileNotFoundError, match=r"lst\.ckpt.*Did you mean 'last\.ckpt'"):
        trainer.fit(model, loader(8), ckpt_path=tmp_path / "lst.ckpt")
    torch.save({"weights": 1}, tmp_path / "weights.ckpt")
    with pytest.raises(ValueError, match=r"weights\.ckpt holds no 'state_dict' \(it has \['weights'\]\)"):
        trainer.test(model, loader(8), ckpt_path=tmp_path / "weights.ckpt")


def test_weights_alone_are_enough_to_test_but_not_to_go_on(tmp_path: Path) -> None:
    model, trainer = Classifier(), quiet()
    trainer.fit(model, loader(8))
    trainer.save_checkpoint(tmp_path / "w.ckpt", weights_only=True)
    assert "optimizer_states" not in torch.load(tmp_path / "w.ckpt", weights_only=True)
    other = Classifier()
    quiet().test(other, loader(8), ckpt_path=tmp_path / "w.ckpt", verbose=False)
    assert same_weights(model, other)
    with pytest.raises(ValueError, match=r"w\.ckpt holds weights only, so training cannot go on from it"):
        quiet(max_epochs=2).fit(other, loader(8), ckpt_path=tmp_path / "w.ckpt")
