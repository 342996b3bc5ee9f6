"""Errors and warnings have Lightning's types under its names, so that `except` and `filterwarnings` work."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import hasten_lightning
from tests.refusals import refused, warned

QUIETLY: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def alias() -> Iterator[None]:
    hasten_lightning.install()
    yield
    hasten_lightning.uninstall()


def test_errors_of_arguments_are_lightnings() -> None:
    import lightning.pytorch as pl
    from lightning.pytorch import callbacks, strategies
    from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    def trainer(**given: Any) -> pl.Trainer:
        return pl.Trainer(**{**QUIETLY, **given})

    class NoSteps(BoringModel):
        training_step = pl.LightningModule.training_step

    model, data = BoringModel(), BoringDataModule()
    calls: list[tuple[type[Exception], Callable[[], object]]] = [
        (MisconfigurationException, lambda: trainer(fast_dev_run=-1)),
        (MisconfigurationException, lambda: trainer(limit_train_batches=1.2)),
        (MisconfigurationException, lambda: trainer(max_epochs=-2)),
        (MisconfigurationException, lambda: trainer(max_steps=-2)),
        (MisconfigurationException, lambda: trainer(gradient_clip_algorithm="most")),
        (TypeError, lambda: trainer(gradient_clip_val="x")),
        (MisconfigurationException, lambda: trainer(profiler="fast")),
        (MisconfigurationException, lambda: trainer(accelerator="cuda")),
        (ValueError, lambda: trainer(accelerator="toaster")),
        (ValueError, lambda: trainer(strategy="magic")),
        (ValueError, lambda: trainer(precision="3-bit")),
        (MisconfigurationException, lambda: trainer(plugins=["x"])),
        (MisconfigurationException, lambda: trainer(callbacks=[callbacks.ModelCheckpoint()])),
        (TypeError, lambda: trainer(gpus=1)),
        (TypeError, lambda: trainer().fit(object())),
        (MisconfigurationException, lambda: trainer().fit(model, model.train_dataloader(), datamodule=data)),
        (MisconfigurationException, lambda: trainer().fit(NoSteps())),
        (MisconfigurationException, lambda: callbacks.EarlyStopping("loss", mode="best")),
        (MisconfigurationException, lambda: callbacks.ModelCheckpoint(save_top_k=-2)),
        (MisconfigurationException, lambda: callbacks.Timer(timedelta(1), interval="hour")),
        (MisconfigurationException, lambda: callbacks.StochasticWeightAveraging(-1.0)),
        (MisconfigurationException, lambda: callbacks.ModelPruning("at_random")),
        (MisconfigurationException, lambda: strategies.DDPStrategy(model_averaging_period=3)),
        (RuntimeError, lambda: model.trainer),
        (AttributeError, lambda: trainer().save_checkpoint("x.ckpt")),
    ]
    for kind, call in calls:
        with pytest.raises(kind):
            call()


def test_what_may_be_intended_is_a_possible_user_warning() -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.utilities import disable_possible_user_warnings

    class LogsToNobody(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("value", 1.0, logger=True)
            return super().training_step(batch, batch_idx)

    with warned(UserWarning, fix="logger=True"):
        pl.Trainer(**QUIETLY).fit(LogsToNobody())
    model = BoringModel().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with refused(UserWarning, says=("2 module", "module(s)")):
            pl.Trainer(**QUIETLY).fit(model)
        disable_possible_user_warnings()
        pl.Trainer(**QUIETLY).fit(model)


def test_the_first_epoch_is_checked_where_it_is_shorter_than_the_interval_of_loggers(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel

    class AtRest(BoringModel):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    with warned(UserWarning, says=("learning rate of SGD is 0",)), warned(UserWarning, says="log_every_n_steps=50"):
        pl.Trainer(**{**QUIETLY, "logger": pl.loggers.CSVLogger(tmp_path), "limit_train_batches": 3}).fit(AtRest())


def test_errors_say_what_programs_for_lightning_compare() -> None:
    import lightning.pytorch as pl
    from lightning.pytorch import callbacks
    from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, ManualOptimBoringModel
    from lightning.pytorch.tuner import Tuner

    def trainer(*given: Any, **arguments: Any) -> pl.Trainer:
        return pl.Trainer(**{**QUIETLY, "limit_val_batches": 1, "callbacks": list(given), **arguments})

    class NoSteps(BoringModel):
        training_step = pl.LightningModule.training_step

    class NoForward(pl.LightningModule):
        pass

    class Logs(BoringModel):
        def on_fit_start(self) -> None:
            self.log("loss", 1.0)

    class Outputs(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"value": 1}

    class Index(BoringModel):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            pass

    class Reduces(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("loss", 1.0, reduce_fx="median")

    class Stateful(callbacks.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

    old = BoringModel()
    old.training_epoch_end = print
    loader = BoringModel().train_dataloader()
    said: list[tuple[str, Callable[[], object]]] = [
        ("No `training_step()` method defined", lambda: trainer().fit(NoSteps())),
        (
            "No `test_step()` method defined to run `Trainer.test`",
            lambda: trainer().test(NoForward(), loader),
        ),
        ("`Trainer.predict` requires `forward` method to run", lambda: trainer().predict(NoForward(), loader)),
        ("Support for `training_epoch_end` has been removed in v2.0.0", lambda: trainer().fit(old)),
        ("You cannot pass", lambda: trainer().fit(BoringModel(), loader, datamodule=BoringDataModule())),
        (
            "You cannot pass both `trainer.test(dataloaders=..., datamodule=...)`",
            lambda: trainer().test(BoringModel(), loader, datamodule=BoringDataModule()),
        ),
        ("when it hasn't been passed in a previous run", lambda: trainer().validate()),
        (
            "Automatic gradient clipping is not supported for manual optimization",
            lambda: trainer(gradient_clip_val=1.0).fit(ManualOptimBoringModel()),
        ),
        ("You can't `self.log()` inside `on_fit_start`", lambda: trainer().fit(Logs())),
        ("Only `self.log(..., reduce_fx={min,max,mean,sum})` are supported", lambda: trainer().fit(Reduces())),
        ("Found more than one stateful callback of type `Stateful`", lambda: trainer(Stateful(), Stateful())),
        ("The `Trainer._evaluation_loop` property isn't defined", lambda: trainer()._evaluation_loop),
        ("the 'loss' key needs to be present", lambda: trainer().fit(Outputs())),
        (
            "You provided only a single `val_dataloader`, but have included `dataloader_idx`",
            lambda: trainer().validate(Index()),
        ),
        (
            "You provided multiple `val_dataloader`, but no `dataloader_idx` argument",
            lambda: trainer().validate(BoringModel(), [loader, loader]),
        ),
        (
            "`val_check_interval` (9) must be less than or equal to the number of the training batches (1)",
            lambda: trainer(val_check_interval=9).fit(BoringModel()),
        ),
        (
            "You requested to check 0.001 of the `train_dataloader` but 0.001 * 64 < 1",
            lambda: trainer(limit_train_batches=0.001).fit(BoringModel()),
        ),
        (
            "Trainer was configured with `enable_checkpointing=False` but found `ModelCheckpoint`",
            lambda: trainer(callbacks.ModelCheckpoint()),
        ),
        (
            "Early stopping conditioned on metric `loss` which is not available",
            lambda: trainer(callbacks.EarlyStopping("loss")).fit(BoringModel()),
        ),
        (
            "`ModelCheckpoint(monitor='loss')` could not find the monitored key in the returned metrics",
            lambda: trainer(callbacks.ModelCheckpoint(monitor="loss"), enable_checkpointing=True).fit(BoringModel()),
        ),
        (
            "Cannot use `LearningRateMonitor` callback with `Trainer` that has no logger",
            lambda: trainer(callbacks.LearningRateMonitor()).fit(BoringModel()),
        ),
        (
            "You have set `accumulate_grad_batches` and are using the `GradientAccumulationScheduler`",
            lambda: trainer(callbacks.GradientAccumulationScheduler({0: 2}), accumulate_grad_batches=2).fit(
                BoringModel()
            ),
        ),
        (
            "method='fit' is the only valid configuration to run lr finder",
            lambda: Tuner(trainer()).lr_find(BoringModel(), method="test"),
        ),
        (
            "Field size not found in `model`, `datamodule`, nor their `hparams` attributes",
            lambda: Tuner(trainer()).scale_batch_size(BoringModel(), batch_arg_name="size"),
        ),
    ]
    for words, call in said:
        with pytest.raises((ValueError, TypeError, RuntimeError, NotImplementedError)) as caught:
            call()
        assert words in str(caught.value)


def test_callbacks_of_the_module_that_take_the_place_of_others_are_named(caplog: pytest.LogCaptureFixture) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Timer
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Configures(BoringModel):
        def configure_callbacks(self) -> Timer:
            return Timer()

    trainer = pl.Trainer(**QUIETLY, callbacks=[Timer()])
    trainer.fit(Configures())
    assert "will override existing callbacks passed to Trainer: Timer" in caplog.text
    assert trainer._detect_anomaly is False


def test_the_loop_of_a_fit_says_whether_the_optimizer_steps_after_a_batch() -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.demos.boring_classes import BoringModel

    accumulates = []

    class Asks(BoringModel):
        def on_train_batch_end(self, *_: object) -> None:
            accumulates.append(self.trainer.fit_loop._should_accumulate())

    pl.Trainer(**{**QUIETLY, "limit_train_batches": 5}, accumulate_grad_batches=2).fit(Asks())
    assert accumulates == [True, False, True, False, False]


def test_averaging_that_a_checkpoint_does_not_have_is_a_warning(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import WeightAveraging
    from lightning.pytorch.demos.boring_classes import BoringModel

    first = pl.Trainer(**QUIETLY)
    first.fit(BoringModel())
    first.save_checkpoint(tmp_path / "first.ckpt")
    second = pl.Trainer(**{**QUIETLY, "max_epochs": 2}, callbacks=[WeightAveraging()])
    with warned(UserWarning, says="The checkpoint was not created with WeightAveraging"):
        second.fit(BoringModel(), ckpt_path=tmp_path / "first.ckpt")


def test_errors_of_helpers_have_the_words_that_tests_of_programs_compare(tmp_path: Path) -> None:
    import torch
    from lightning.fabric.utilities import device_parser, init
    from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
    from lightning.fabric.utilities.data import has_len
    from lightning.fabric.utilities.device_dtype_mixin import _DeviceDtypeModuleMixin
    from lightning.pytorch.demos.boring_classes import BoringModel
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.utilities import grad_norm
    from lightning.pytorch.utilities.data import extract_batch_size
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.parsing import lightning_getattr

    bare = torch.nn.Module()
    bare.weight = torch.nn.Parameter(torch.empty(1, device="meta"))
    calls: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, "does not contain a single element", lambda: convert_tensors_to_scalars(torch.ones(2))),
        (MisconfigurationException, "provide the batch_size as `self.log(...", lambda: extract_batch_size("abc")),
        (RuntimeError, "Cannot set the dtype", lambda: setattr(_DeviceDtypeModuleMixin(), "dtype", torch.half)),
        (TypeError, "Expected `torch.nn.Module`", lambda: init._has_meta_device_parameters_or_buffers([])),
        (TypeError, "`Module.reset_parameters` method", lambda: init._materialize_meta_tensors(bare, "cpu")),
        (AttributeError, "neither stored in the model namespace", lambda: lightning_getattr(BoringModel(), "depth")),
        (
            ValueError,
            "The parent should define the method",
            lambda: is_overridden("training_step", BoringModel(), torch.nn.Module),
        ),
    ]
    for kind, words, call in calls:
        with refused(kind, says=words):
            call()
    with refused(MisconfigurationException, "gpus", says="requested but none are available"):
        device_parser._parse_gpu_ids(-1)
    with warned(UserWarning, says="`list` returned 0 length"):
        has_len([])
    with refused(ValueError, "norm_type", says="a positive number or 'inf' (infinity norm). Got 0"):
        grad_norm(bare, 0)
    with warned(UserWarning, says="from an ambiguous collection. The batch size we found is 2."):
        extract_batch_size([torch.ones(2), torch.ones(3)])
    (tmp_path / "lightning_logs" / "version_0" / "of_an_earlier_run").mkdir(parents=True)
    with warned(UserWarning, says="Previous log files in this directory will be deleted when the new ones are saved!"):
        assert CSVLogger(tmp_path, version=0).experiment
