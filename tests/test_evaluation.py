"""Prediction, validation and test: what they are given, return and leave as it was."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader

import hasten as L
from hasten.callbacks import BasePredictionWriter
from tests.fakes import RowLogger
from tests.models import Classifier, dataset, loader, quiet
from tests.refusals import refused, warned
from tests.trainer.test_what_arguments_do import Modes


class Predicts(Classifier):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:  # type: ignore[override]
        return (dataloader_idx, batch_idx)


def test_predictions_by_batch_and_by_loader() -> None:
    trainer, model = quiet(), Predicts()
    model.layers[0].eval()
    assert trainer.predict(model, loader(8)) == [(0, 0), (0, 1)]
    assert [model.layers[0].training, model.layers[1].training] == [False, True]
    assert trainer.predict(model, [loader(8)]) == [(0, 0), (0, 1)]
    both = [[(0, 0)], [(1, 0), (1, 1)]]
    assert trainer.predict(model, [loader(4), loader(8)]) == both
    assert trainer.predict_loop.predictions == both
    assert trainer.predict(model, {"a": loader(4), "b": loader(8)}, return_predictions=True) == both
    assert trainer.predict(model, loader(8), return_predictions=False) is None
    assert trainer.predict_loop.predictions == []
    assert trainer.predict(dataloaders=loader(4)) == [(0, 0)]


def test_each_sample_is_predicted_although_the_loader_drops_the_last_batch() -> None:
    trainer, model = quiet(), Predicts()
    dropping = DataLoader(dataset(10), batch_size=4, drop_last=True)
    assert trainer.predict(model, dropping) == [(0, 0), (0, 1), (0, 2)]
    assert trainer.num_predict_batches == [3]
    assert len(dropping) == 2
    trainer.validate(model, dropping, verbose=False)
    assert trainer.num_val_batches == [2]


class Backwards(BatchSampler):
    """Batches in the reverse order; it needs an argument of its own."""

    def __init__(self, samples: Iterable[int], size: int, *, step: int) -> None:
        super().__init__(samples, size, drop_last=True)
        self.step = step

    def __iter__(self) -> Iterator[list[int]]:
        return iter([*super().__iter__()][:: self.step])


def test_each_sample_is_predicted_although_a_batch_sampler_drops_the_last_batch() -> None:
    trainer, batches = quiet(), Backwards(range(10), 4, step=-1)
    predictions = trainer.predict(Predicts(), DataLoader(dataset(10), batch_sampler=batches))
    assert predictions == [(0, 0), (0, 1), (0, 2)]
    assert len(batches) == 2


def test_hooks_of_prediction() -> None:
    seen: list[Any] = []

    class Looks(L.Callback):
        def on_predict_batch_start(
            self, trainer: Any, module: Any, batch: Any, idx: int, dataloader_idx: int = 0
        ) -> None:
            seen.append((idx, dataloader_idx))

        def on_predict_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, idx: int, dataloader_idx: int = 0) -> None:  # fmt: skip # noqa: E501
            seen.append((outputs, trainer.predict_loop.current_batch_indices))

        def on_predict_epoch_end(self, trainer: Any, module: Any) -> None:
            seen.append(trainer.predict_loop.predictions)

    trainer = quiet(callbacks=[Looks()], limit_predict_batches=1)
    trainer.predict(Predicts(), [loader(8), loader(8)])
    assert seen == [(0, 0), ((0, 0), [0, 1, 2, 3]), (0, 1), ((1, 0), [0, 1, 2, 3]), [[(0, 0)], [(1, 0)]]]
    seen.clear()
    assert trainer.predict(Predicts(), loader(8), return_predictions=False) is None
    assert seen == [(0, 0), ((0, 0), [0, 1, 2, 3]), []]


@pytest.mark.parametrize("call", ["predict", "validate", "test"])
def test_a_signal_ends_an_evaluation_after_the_batch_in_hand(call: str) -> None:
    class Signals(Modes):
        def validation_step(self, *arguments: Any) -> Any:
            super().validation_step(*arguments)
            assert not self.trainer.received_sigterm
            if len(self.seen) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                assert self.trainer.received_sigterm

        test_step = predict_step = validation_step

    model, trainer = Signals(), quiet()
    with pytest.raises(SystemExit) as stopped:
        getattr(trainer, call)(model, loader(16))
    assert stopped.value.code == 143
    assert len(model.seen) == 2
    assert trainer.interrupted
    assert trainer.received_sigterm
    assert model.training


def test_a_prediction_of_none_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten._lib.rank_zero._warned", {})

    class Forgets(Classifier):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            self(batch[0])

    with warned(UserWarning, says="Forgets.predict_step") as caught:
        assert quiet().predict(Forgets(), loader(8)) == [None, None]
    assert len(caught) == 1


def test_nothing_can_be_logged_in_a_prediction() -> None:
    class Logs(Classifier):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0)

    with refused(ValueError, says="predict_step"):
        quiet().predict(Logs(), loader(8))


def test_mode_hooks_of_the_module() -> None:
    called: list[str] = []

    class Own(Modes):
        def on_validation_model_eval(self) -> None:
            called.append("eval")

        def on_validation_model_train(self) -> None:
            called.append("train")

        def on_test_model_eval(self) -> None:
            called.append("test eval")
            super().on_test_model_eval()

        def on_test_model_train(self) -> None:
            called.append("test train")
            super().on_test_model_train()

        def on_predict_model_eval(self) -> None:
            called.append("predict eval")

        def on_validation_model_zero_grad(self) -> None:
            called.append("zero grad")

    model = Own()
    trainer = quiet(num_sanity_val_steps=0)
    trainer.fit(model, loader(4), loader(4))
    assert model.seen == [(False, False, True)]
    model.layers[0].eval()
    trainer.test(model, loader(4), verbose=False)
    assert model.seen[1] == (True, False, False)
    assert model.layers[0].training
    trainer.predict(model, loader(4))
    assert called == ["zero grad", "eval", "train", "test eval", "test train", "predict eval"]


def test_gradients_are_freed_before_validation() -> None:
    class Looks(Classifier):
        def on_validation_start(self) -> None:
            assert all(p.grad is None for p in self.parameters())

    quiet(max_epochs=2).fit(Looks(), loader(8), loader(8))

    class Accumulates(Classifier):
        def on_validation_start(self) -> None:
            if not self.trainer.sanity_checking and self.trainer.total_batch_idx == 0:
                assert all(p.grad is not None for p in self.parameters())

    # Within an accumulation they are still needed.
    quiet(accumulate_grad_batches=2, val_check_interval=1).fit(Accumulates(), loader(8), loader(8))


def test_results_are_printed_unless_told_not_to(caplog: Any, capsys: Any) -> None:
    model, trainer = Classifier(), quiet()
    logger = logging.getLogger("hasten")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, logger="hasten"):
            trainer.test(model, loader(8), verbose=False)
            assert "test_loss" not in capsys.readouterr().out + caplog.text
            trainer.test(model, loader(8))
            assert "test_loss" in capsys.readouterr().out + caplog.text
            trainer.validate(model, loader(8))
            assert "val_loss" in capsys.readouterr().out + caplog.text
    finally:
        logger.removeHandler(caplog.handler)


def test_steps_take_fewer_arguments_and_name_them_as_they_like() -> None:
    class Batch(Classifier):
        def validation_step(self, batch: Any) -> None:  # type: ignore[override]
            self.log("size", float(len(batch[0])))

        def predict_step(self, batch: Any) -> Any:  # type: ignore[override]
            return len(batch[0])

    class Names(Classifier):
        def validation_step(self, b: Any, n: int) -> None:  # type: ignore[override]
            self.log("n", float(n), reduce_fx="max")

        def predict_step(self, b: Any, n: int) -> Any:  # type: ignore[override]
            return n

        def test_step(self, *args: Any) -> None:
            self.log("arguments", float(len(args)))

    assert quiet().validate(Batch(), loader(8), verbose=False) == [{"size": 4.0}]
    assert quiet().predict(Batch(), loader(6)) == [4, 2]
    assert quiet().validate(Names(), loader(8), verbose=False) == [{"n": 1.0}]
    assert quiet().predict(Names(), loader(6)) == [0, 1]
    assert quiet().test(Names(), loader(8), verbose=False) == [{"arguments": 2.0}]


def test_values_of_evaluation_steps_go_to_the_loggers_by_batch() -> None:
    class Steps(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("v", float(batch_idx), on_step=True, on_epoch=True)

    logger = RowLogger()
    quiet(logger=logger).validate(Steps(), loader(12), verbose=False)
    assert logger.without_epoch() == [
        (0, {"v_step": 0.0}),
        (1, {"v_step": 1.0}),
        (2, {"v_step": 2.0}),
        (0, {"v_epoch": 1.0}),
    ]


def test_within_a_fit_the_steps_of_evaluations_go_on() -> None:
    class Steps(Classifier):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("v", float(batch_idx), on_step=True, on_epoch=False)

    logger = RowLogger()
    trainer = quiet(logger=logger, max_epochs=2, val_check_interval=0.5)
    trainer.fit(Steps(), loader(16), [loader(8), loader(4)])
    rows = [(step, name) for step, row in logger.rows for name in row if name.startswith("v/")]
    assert [step for step, name in rows if name.endswith("_0")] == list(range(8))
    assert [step for step, name in rows if name.endswith("_1")] == list(range(4))
    logger.rows.clear()
    trainer.validate(Steps(), loader(8), verbose=False)
    assert [step for step, row in logger.rows if "v" in row] == [0, 1], "a call of its own begins at 0"


@pytest.mark.parametrize("sanity_steps", [0, 1])
@pytest.mark.parametrize("hook", ["on_validation_batch_end", "on_validation_end"])
def test_a_validation_inside_of_a_validation_of_the_same_trainer_is_refused(hook: str, sanity_steps: int) -> None:
    def validate(trainer: L.Trainer, module: L.LightningModule, *rest: Any) -> None:
        trainer.validate(module, loader(8), verbose=False)

    callback = L.Callback()
    setattr(callback, hook, validate)
    with refused(RuntimeError, says="inside of a validate loop", fix="in a hook of training"):
        trainer = quiet(callbacks=callback, max_epochs=1, num_sanity_val_steps=sanity_steps)
        trainer.fit(Classifier(), loader(8), loader(8))


class Evaluates(L.Callback):
    """Calls ``validate`` and ``test`` in a hook of a fit, and logs after them."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == 1:
            trainer.validate(pl_module, loader(8), verbose=False)
            trainer.test(Classifier(), loader(8), verbose=False)
            assert trainer.lightning_module is pl_module
            assert trainer.training
            assert {"train_loss", "val_loss"} <= trainer.callback_metrics.keys()
            quiet().test(pl_module, loader(8), verbose=False)
            assert pl_module.trainer is trainer
        self.log("after", 1.0, on_step=False, on_epoch=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_fit_goes_on_after_an_evaluation_in_its_hook(tmp_path: Path, workers: int) -> None:
    saves = L.callbacks.ModelCheckpoint(tmp_path, monitor="after", mode="max")
    stops = L.callbacks.EarlyStopping("after", mode="max", patience=1)
    trainer = quiet(callbacks=[Evaluates(), saves, stops], max_epochs=3, enable_checkpointing=True)
    data = DataLoader(loader(16).dataset, batch_size=4, num_workers=workers)
    trainer.fit(Classifier(), data)
    assert (trainer.current_epoch, trainer.global_step, trainer.state.fn) == (2, 8, "fit")
    assert Path(saves.best_model_path).exists()


def test_an_evaluation_that_failed_leaves_no_value_for_the_next() -> None:
    class Fails(Classifier):
        failing = True

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if self.failing and batch_idx == 1:
                raise ZeroDivisionError
            self.log("v", 100.0 if self.failing else 1.0, batch_size=1)

    model, logger = Fails(), RowLogger()
    trainer = quiet(logger=logger)
    with pytest.raises(ZeroDivisionError):
        trainer.validate(model, loader(12), verbose=False)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(model, loader(12), loader(12))
    model.failing = False
    assert trainer.validate(model, loader(12), verbose=False) == [{"v": 1.0}]
    # Also the loggers are back, which the sanity check goes without.
    assert logger.without_epoch() == [(0, {"v": 1.0})]


@pytest.mark.parametrize("several", [False, True])
def test_a_writer_is_given_predictions_and_the_samples_they_are_of(several: bool) -> None:
    given: list[Any] = []

    class Writer(BasePredictionWriter):
        def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
            given.append((predictions, batch_indices))

    loaders = [loader(8), loader(4)] if several else loader(8)
    quiet(callbacks=[Writer("epoch")]).predict(Predicts(), loaders, return_predictions=False)
    first = [(0, 0), (0, 1)], [[0, 1, 2, 3], [4, 5, 6, 7]]
    second = [(1, 0)], [[0, 1, 2, 3]]
    assert given[0][0] == ([first[0], second[0]] if several else first[0])
    assert given[0][1] == ([first[1], second[1]] if several else [first[1]])


def test_validation_data_without_a_step_is_told() -> None:
    class NoValidation(Classifier):
        validation_step = L.LightningModule.validation_step  # type: ignore[assignment]

    trainer = quiet()
    with warned(UserWarning, says=("NoValidation", "have no `validation_step`")):
        trainer.fit(NoValidation(), loader(8), loader(8))
    assert not trainer.enable_validation
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet().fit(NoValidation(), loader(8))
    with refused(ValueError, says=("Trainer.validate", "NoValidation", "validation_step()")):
        trainer.validate(NoValidation(), loader(8))


def test_a_loader_may_be_read_by_several_calls() -> None:
    data = DataLoader(dataset(8), 4, shuffle=True, num_workers=1, persistent_workers=True)
    model, trainer = Classifier(), quiet()
    trainer.fit(model, data, data)
    assert len(trainer.predict(model, data) or ()) == 2
    assert len(list(data)) == 2
