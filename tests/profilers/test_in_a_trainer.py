"""Profilers in a run: the actions have the field's names, and without a profiler nothing is added."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hasten as L
from hasten.callbacks import ModelCheckpoint
from hasten.loggers import CSVLogger
from hasten.profilers import AdvancedProfiler, PassThroughProfiler, SimpleProfiler, XLAProfiler
from hasten.profilers.simple import LOOP, PARTS
from tests.models import Classifier, Manual, loader, quiet, same_weights
from tests.profilers.test_profilers import rows
from tests.refusals import refused


class Watched(Classifier):
    """Has an action of its own and some hooks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.trainer.profiler.profile("my action"):
            return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        pass


class Counts(L.Callback):
    @property
    def state_key(self) -> str:
        return self._generate_state_key(a=1)

    def on_train_batch_start(self, *_: Any) -> None:
        pass


class Late(Counts):
    pass


def durations(trainer: L.Trainer) -> dict[str, int]:
    assert isinstance(trainer.profiler, SimpleProfiler)
    return {action: len(found) for action, found in trainer.profiler.recorded_durations.items()}


def test_the_actions_of_a_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(
        profiler="simple",
        max_epochs=2,
        callbacks=[Counts(), ModelCheckpoint(tmp_path)],
        enable_checkpointing=True,
        logger=CSVLogger(tmp_path),
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        num_sanity_val_steps=1,
    )
    trainer.fit(Watched(), loader(), loader(8))
    counts = durations(trainer)
    # 10 batches an epoch, 2 of validation, 1 before training.
    expected = {
        "run_loop": 1,
        "run_training_epoch": 2,
        "run_training_batch": 20,
        "run_evaluation": 3,
        "[_TrainingEpochLoop].train_dataloader_next": 20,
        "[_EvaluationLoop].val_next": 5,
        "[Strategy]SingleDeviceStrategy.training_step": 20,
        "[Strategy]SingleDeviceStrategy.validation_step": 5,
        "[Strategy]SingleDeviceStrategy.backward": 20,
        "[LightningModule]Watched.optimizer_step": 20,
        "[LightningModule]Watched.optimizer_zero_grad": 20,
        "[LightningModule]Watched.configure_gradient_clipping": 20,
        "[LightningModule]Watched.configure_optimizers": 1,
        "[LightningModule]Watched.on_train_batch_end": 20,
        "[Callback]Counts{'a': 1}.on_train_batch_start": 20,
        "[Logging]publish_step": 4,
        "[Logging]record": 25,
        "save_checkpoint": 2,
        "my action": 20,
    }
    assert expected.items() <= counts.items()
    saver = [name for name in counts if name.startswith("[Callback]ModelCheckpoint{'monitor': None")]
    assert any(name.endswith(".on_train_epoch_end") for name in saver)
    report = caplog.text
    assert "FIT Profiler Report" in report
    table = rows(report)
    assert "Where the time of 20 training batches went" in report
    shown = {part for part in PARTS if part in table}
    assert {*PARTS} - shown <= {"transfer", "validation", "start and end"}
    (whole,) = trainer.profiler.recorded_durations[LOOP]  # type: ignore[attr-defined]
    assert sum(float(table[part][0]) for part in shown) == pytest.approx(whole, rel=1e-3)
    assert float(table["total"][0]) == pytest.approx(whole, rel=1e-3)


def test_the_actions_of_evaluation_and_prediction() -> None:
    class Several(Classifier):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
            super().test_step(batch, batch_idx)

    trainer = quiet(profiler="simple")
    model = Several()
    trainer.validate(model, loader(8), verbose=False)
    trainer.test(model, [loader(8), loader(12)], verbose=False)
    trainer.predict(model, loader(16))
    counts = durations(trainer)
    expected = {
        "[_EvaluationLoop].val_next": 2,
        "[_EvaluationLoop].test_next": 5,
        "[_PredictionLoop].predict_next": 4,
        "[Strategy]SingleDeviceStrategy.validation_step": 2,
        "[Strategy]SingleDeviceStrategy.test_step": 5,
        "[Strategy]SingleDeviceStrategy.predict_step": 4,
        "run_loop": 3,
    }
    assert expected.items() <= counts.items()
    assert "run_training_batch" not in counts


class Mine(Classifier):
    """Overrides what moves a batch and what updates the weights."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def setup(self, stage: str) -> None:
        pass


@pytest.mark.parametrize(
    ("model", "actions"),
    [
        (
            Mine(),
            {
                "[Strategy]SingleDeviceStrategy.batch_to_device": 10,
                "[LightningModule]Mine.on_after_batch_transfer": 10,
                "[LightningDataModule]Data.on_before_batch_transfer": 10,
                "[LightningDataModule]Data.train_dataloader": 1,
                "[LightningDataModule]Data.setup": 1,
                "[LightningModule]Mine.backward": 10,
                "[LightningModule]Mine.optimizer_step": 10,
                "[LightningModule]Mine.optimizer_zero_grad": 10,
                "[Strategy]SingleDeviceStrategy.optimizer_step": 10,
                "[Strategy]SingleDeviceStrategy.lr_scheduler_step": 10,
            },
        ),
        (Manual(), {"[Strategy]SingleDeviceStrategy.backward": 10, "[LightningModule]Manual.optimizer_step": 10}),
    ],
    ids=["automatic", "manual"],
)
def test_the_actions_of_what_a_program_overrides(model: Any, actions: dict[str, int]) -> None:
    trainer = quiet(profiler="simple")
    before = set(vars(model))
    trainer.fit(model, datamodule=Data())
    assert actions.items() <= durations(trainer).items()
    # Everything is put back.
    assert not {"backward", "optimizer_step", "optimizer_zero_grad"} & (set(vars(model)) - before)
    for owner in (trainer._runtime, trainer._logged, model, trainer._run, trainer._run.data.train):
        assert [name for name, value in vars(owner).items() if hasattr(value, "__wrapped__")] == []


@pytest.mark.parametrize("options", [{}, {"micro_batch": 2}])
def test_a_profiled_run_computes_the_same(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    one = Classifier(dropout=0.5)
    other = Classifier(dropout=0.5)
    other.load_state_dict(one.state_dict())
    metrics: list[dict[str, Any]] = []
    for model, profiler in ((one, None), (other, "simple")):
        torch.manual_seed(2)
        trainer = quiet(profiler=profiler, max_epochs=2, **options)
        trainer.fit(model, loader(shuffle=True), loader(8))
        metrics.append(trainer.callback_metrics)
    assert same_weights(one, other)
    assert metrics[0] == metrics[1]
    assert "train_loss" in metrics[0]


def test_an_error_ends_the_report(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 3:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    trainer = quiet(profiler="simple")
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Fails(), loader())
    assert durations(trainer)["run_training_batch"] == 4
    assert "Where the time of 4 training batches went" in caplog.text
    assert trainer.profiler.current_actions == {}  # type: ignore[attr-defined]


def test_a_callback_added_in_a_run_is_seen_too() -> None:
    class Adds(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            trainer.callbacks.append(Late())

    trainer = quiet(profiler="simple", callbacks=[Adds()])
    trainer.fit(Classifier(), loader())
    assert durations(trainer)["[Callback]Late{'a': 1}.on_train_batch_start"] == 10


def test_a_run_within_a_run_is_part_of_it(caplog: pytest.LogCaptureFixture) -> None:
    profiler = SimpleProfiler()

    class Nested(L.Callback):
        def on_train_epoch_end(self, *_: Any) -> None:
            quiet(profiler=profiler).fit(Classifier(), loader())

    trainer = quiet(profiler=profiler, callbacks=[Nested()])
    trainer.fit(Classifier(), loader())
    counts = durations(trainer)
    assert counts["run_training_batch"] == 10
    assert counts["run_loop"] == 1
    assert caplog.text.count("Profiler Report") == 1
    trainer.fit(Classifier(), loader())  # And the next one is seen again.
    assert durations(trainer)["run_loop"] == 2


def test_a_profiler_of_ones_own(tmp_path: Path) -> None:
    events: list[str] = []

    class Mine(PassThroughProfiler):
        def start(self, action_name: str) -> None:
            events.append("+" + action_name)

        def stop(self, action_name: str) -> None:
            events.append("-" + action_name)

        def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
            super().setup(stage, local_rank, log_dir)
            events.append(f"setup {stage.value} {local_rank} {os.path.basename(str(log_dir))}")  # type: ignore[attr-defined]

        def summary(self) -> str:
            events.append("summary")
            return ""

        def teardown(self, stage: str | None) -> None:
            super().teardown(stage)
            events.append(f"teardown {stage}")

    mine = Mine()
    trainer = quiet(profiler=mine, logger=CSVLogger(tmp_path, version="run"), limit_train_batches=1)
    assert trainer.profiler is mine
    trainer.fit(Classifier(), loader())
    assert events[0] == "setup fit None run"
    assert events[-2:] == ["summary", "teardown fit"]
    assert events.count("teardown fit") == 1
    # Actions nest: each ends before those around it.
    open_actions: list[str] = []
    for event in events:
        if event.startswith("+"):
            open_actions.append(event[1:])
        elif event.startswith("-"):
            assert open_actions.pop() == event[1:]
    assert open_actions == []
    step = events.index("+[Strategy]SingleDeviceStrategy.training_step")
    assert events.index("+run_training_batch") < step < events.index("-run_training_batch")
    assert events.index("+run_training_epoch") < events.index("+run_training_batch")


@pytest.mark.parametrize("base", [PassThroughProfiler, SimpleProfiler])
def test_what_a_profiler_overrides_is_called(base: Any) -> None:
    class Own(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self._lightning_module = None
            self.calls: list[str] = []

        @contextmanager
        def profile(self, action_name: str) -> Iterator[str]:
            self.calls.append(action_name)
            with super().profile(action_name):
                yield action_name

        def describe(self) -> None:
            self.calls.append("described")

    own = Own()
    quiet(profiler=own, limit_train_batches=1).fit(Classifier(), loader())
    assert own.calls.count("run_training_batch") == 1
    assert own.calls[-1] == "described"


def test_without_a_profiler_there_is_one_that_does_nothing() -> None:
    trainer = quiet(limit_train_batches=1)
    assert type(trainer.profiler) is PassThroughProfiler
    trainer.fit(Watched(), loader())
    assert trainer._run is not None
    assert trainer._run.observers.watch("run_training_batch", len) is len


def test_the_advanced_profiler(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    trainer = quiet(profiler=AdvancedProfiler(dirpath=tmp_path, filename="calls"), limit_train_batches=2)
    trainer.fit(Classifier(), loader())
    text = (tmp_path / "fit-calls.txt").read_text()
    _, part = text.split("Profile stats for: [Strategy]SingleDeviceStrategy.training_step\n")
    assert "(training_step)" in part.partition("Profile stats")[0]
    assert "Profile" not in caplog.text


def test_which_profiler_is_used() -> None:
    mine = SimpleProfiler()
    assert quiet(profiler=mine).profiler is mine
    assert type(quiet(profiler="Advanced").profiler) is AdvancedProfiler
    assert type(quiet(profiler=False).profiler) is PassThroughProfiler
    for given, error, message in (
        ("simpel", ValueError, r"Trainer\(profiler='simpel'\): .* it can only be one of .* Did you mean 'simple'"),
        (SimpleProfiler, TypeError, r"use SimpleProfiler\(\)"),
        (3, TypeError, r"Trainer\(profiler=3\).*not int"),
        ("xla", ImportError, r"XLAProfiler.*torch_xla"),
    ):
        with pytest.raises(error, match=message):
            quiet(profiler=given)
    with refused(ImportError, "accelerator", fix="[tpu]'"):
        XLAProfiler()
    with refused(ValueError, "barebones"):
        L.Trainer(barebones=True, accelerator="cpu", profiler="simple")


class Adds(L.Callback):
    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        trainer.callbacks.append(Added())


class Added(L.Callback):
    def setup(self, *_: Any, **__: Any) -> None:
        pass

    on_train_start = setup


def test_a_callback_that_another_one_adds_is_profiled() -> None:
    trainer = quiet(profiler="simple", callbacks=Adds())
    trainer.fit(Classifier(), loader(4))
    expected = {"[Callback]Adds.setup": 1, "[Callback]Added.setup": 1, "[Callback]Added.on_train_start": 1}
    assert expected.items() <= durations(trainer).items()
