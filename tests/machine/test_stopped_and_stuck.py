"""A process that was stopped and goes on, clocks that jump, and worker processes that send nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from tests.callbacks.scripted import Scripted
from tests.models import Classifier, quiet, same_weights
from torch.utils.data import DataLoader, Dataset

import hasten as L
from hasten.callbacks import ModelCheckpoint
from hasten.data.resume import sources
from hasten.loggers import CSVLogger
from hasten.record import file, pace
from hasten_tools.report.read import read_run

STEPS, JUMPS_AT = 20, 5
ALL = ("monotonic", "perf_counter", "time")


class Jump(L.Callback):
    """Moves clocks after a step, and tells the process that it goes on, as the system does after a stop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *clocks: str, seconds: float, continues: bool) -> None:
        self.seconds, self.continues, self.offset = seconds, continues, 0.0
        for name in clocks:
            monkeypatch.setattr(time, name, moved := self._moved(getattr(time, name)))
            if name == "perf_counter":
                monkeypatch.setattr("hasten.record.pace.perf_counter", moved)

    def _moved(self, clock: Any) -> Any:
        return lambda: clock() + self.offset

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == JUMPS_AT:
            self.offset = self.seconds
            if self.continues:
                os.kill(os.getpid(), signal.SIGCONT)


def fit(folder: Path, *callbacks: L.Callback) -> L.Trainer:
    trainer = quiet(
        callbacks=list(callbacks), logger=CSVLogger(folder, "", 0), max_time="00:00:10:00", log_every_n_steps=1
    )
    trainer.fit(Scripted(step=True), [torch.zeros(2, 1)] * STEPS)
    return trainer


@pytest.fixture
def closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the record written after each batch."""
    monkeypatch.setattr(pace, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(pace, "_SECONDS", 0.0)
    monkeypatch.setattr(file, "FLUSH_SECONDS", 0.0)


@pytest.mark.usefixtures("closely")
def test_time_in_which_the_process_was_stopped_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = fit(tmp_path, Jump(monkeypatch, *ALL, seconds=3600.0, continues=True))
    assert trainer.global_step == STEPS
    run = read_run(tmp_path / "version_0")
    assert sum(line["steps"] for line in run.speed) >= STEPS - 4
    assert sum(line["seconds"] for line in run.speed) < 600
    assert max(line["seconds"] for line in run.step_times) < 600
    share = run.spent.goodput()
    assert share is not None
    assert share < 0.5


def test_an_hour_without_a_stop_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fit(tmp_path, Jump(monkeypatch, *ALL, seconds=3600.0, continues=False)).global_step == JUMPS_AT + 1


@pytest.mark.usefixtures("closely")
@pytest.mark.parametrize("seconds", [-3600.0, 3600.0], ids=["set back", "asleep"])
def test_the_clock_of_the_day_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    trainer = fit(tmp_path, Jump(monkeypatch, "time", seconds=seconds, continues=False))
    assert trainer.global_step == STEPS
    assert 0 < sum(line["seconds"] for line in read_run(tmp_path / "version_0").speed) < 600


def test_the_clock_of_the_day_holds_no_line_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "FLUSH_SECONDS", 0.0)
    record = file.Record(tmp_path / "run.jsonl")
    record.add("row", step=0)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    record.add("row", step=1)
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 2


# -- worker processes


class Late(Dataset[Any]):
    """Samples, of which one is late."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if index == 24:
            time.sleep(self.seconds)
        return torch.full((8,), index / 40), index % 2


class Said:
    """Takes what is said about workers, and calls a function when it is about a batch."""

    def __init__(self) -> None:
        self.about: list[str] = []
        self.then: Callable[[], object] = int

    def __call__(self, text: str) -> None:
        # Workers may take long to start, too.
        if "batch 6" in text:
            self.about.append(text)
            self.then()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    """Have waits for workers noticed soon."""
    waits: Any = torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(waits, "__defaults__", (0.05,))
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    monkeypatch.setattr(sources, "_SAY_SECONDS", 0.1)
    monkeypatch.setattr(sources, "_GRACE_SECONDS", 0.3)
    made = Said()
    monkeypatch.setattr(sources.log, "warning", made)
    return made


def loader(seconds: float) -> DataLoader[Any]:
    return DataLoader(Late(seconds), batch_size=4, num_workers=1, prefetch_factor=1)


def train(folder: Path, data: Any, *, resume: str | None = None) -> L.Trainer:
    torch.manual_seed(0)
    saves = ModelCheckpoint(folder, save_top_k=0, save_last=True)
    trainer = quiet(callbacks=saves, enable_checkpointing=True)
    trainer.fit(Classifier() if isinstance(data, DataLoader) else OfTwo(), data, ckpt_path=resume)
    return trainer


class OfTwo(Classifier):
    """A module whose batches come from two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch[0]) + self.loss(batch[1])


def test_workers_that_send_nothing_are_named_and_can_be_left(tmp_path: Path, said: Said) -> None:
    whole = train(tmp_path / "whole", loader(0.0))
    late = train(tmp_path / "late", loader(1.5))
    assert len(said.about) == 1
    assert same_weights(whole.lightning_module, late.lightning_module)
    said.then = lambda: os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        train(tmp_path / "stuck", loader(600.0))
    assert ended.value.code == 128 + signal.SIGTERM
    resumed = train(tmp_path / "stuck", loader(0.0), resume=str(tmp_path / "stuck" / "last.ckpt"))
    assert resumed.global_step == 10
    assert same_weights(whole.lightning_module, resumed.lightning_module)
    # The first loader has given its part of the next batch by then: there is no state to resume from exactly.
    with pytest.raises(SystemExit):
        train(tmp_path / "two", [loader(0.0), loader(600.0)])
    assert not (tmp_path / "two" / "last.ckpt").exists()


class Ending(Late):
    """Gives no memory away while the batch before waits to be read, as a process that is about to end."""

    def __getitem__(self, index: int) -> Any:
        if index == 8:
            time.sleep(0.1)
            resource_sharer.stop()
        return super().__getitem__(index)


class Slow(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.3 if batch_idx == 0 else 0)
        return super().training_step(batch, batch_idx)


def test_a_batch_of_a_worker_that_has_ended_is_explained() -> None:
    with pytest.raises(FileNotFoundError) as raised:
        quiet(limit_val_batches=0).fit(Slow(), DataLoader(Ending(), batch_size=4, num_workers=1))
    assert "A worker process of the DataLoader has ended before its batch was read" in raised.value.__notes__[-1]
