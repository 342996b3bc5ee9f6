"""trainer.history: everything that a fit has logged, also when it was resumed; and the record beside the logs."""

from __future__ import annotations

import io
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.callbacks import LearningRateMonitor, ModelCheckpoint
from hasten.loggers import CSVLogger
from hasten.record.file import Record
from hasten.record.history import History
from tests.models import quiet
from tests.refusals import refused, warned

STEPS = 8


class Logs(L.LightningModule):
    """Logs on steps and epochs, for the loggers and not."""

    def __init__(self, stop_at: int = -1) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.stop_at = stop_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.stop_at:
            raise RuntimeError("a mistake\nwith details")
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss, on_epoch=True)
        self.log("twice", 2 * loss.detach(), logger=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).pow(2).mean())
        self.log("val_one", 1.0, logger=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    x = torch.arange(4.0 * 2 * STEPS).reshape(-1, 4) / 64
    return DataLoader(TensorDataset(x), batch_size=2)


def fitted(module: L.LightningModule | None = None, ckpt_path: str | None = None, **options: Any) -> L.Trainer:
    torch.manual_seed(0)
    trainer = quiet(**{"max_epochs": 2, "log_every_n_steps": 2, **options})
    trainer.fit(module or Logs(), loader(), loader(), ckpt_path=ckpt_path)
    return trainer


def rows_of(history: Any) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "time"} for row in history]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_everything_logged_is_there_without_a_logger() -> None:
    history = fitted().history
    assert sorted(history.keys()) == ["loss_epoch", "loss_step", "twice", "val_loss", "val_one"]
    assert history["loss_step"].steps == [1, 3, 5, 7, 9, 11, 13, 15]
    assert history["val_loss"].steps == [7, 15]
    assert history["val_loss"].epochs == [0, 1]
    assert history["val_one"] == [1.0, 1.0]
    assert history["twice"][0] == pytest.approx(2 * history["loss_step"][0])
    # One row for the end of an epoch: its last step, its means, its validation.
    assert set(history[3]) == {"step", "epoch", "time", *history.keys()}
    assert history[-1] == list(history)[-1] == history[len(history) - 1 :][0]
    assert numpy.asarray(history["val_loss"]).shape == (2,)
    assert history["epoch"].values == [0] * 4 + [1] * 4
    assert sorted(history["time"]) == history["time"].values


def test_the_values_are_those_of_the_logger_and_of_callbacks(tmp_path: Path) -> None:
    trainer = fitted(logger=CSVLogger(tmp_path), callbacks=[LearningRateMonitor()])
    frame = trainer.history.to_pandas()
    assert frame["lr-SGD"].dropna().tolist() == trainer.history["lr-SGD"].values
    assert set(trainer.history["lr-SGD"]) == {0.1}
    assert list(frame["step"]) == trainer.history["step"].values
    assert frame["val_loss"].count() == 2


@pytest.mark.parametrize("step", [5, 8], ids=["in the middle of an epoch", "between two epochs"])
def test_a_resumed_fit_has_all_of_it(tmp_path: Path, step: int) -> None:
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=step, save_top_k=-1, filename="{step}")
    whole = fitted(callbacks=[saves], enable_checkpointing=True)
    resumed = fitted(ckpt_path=str(tmp_path / f"step={step}.ckpt"))
    assert rows_of(resumed.history) == rows_of(whole.history)
    # The rows of before keep their times.
    assert resumed.history[0] == whole.history[0]


def test_another_fit_has_its_own_history_and_one_that_goes_on_keeps_it() -> None:
    trainer = fitted(max_epochs=1)
    before = len(trainer.history)
    trainer.validate(Logs(), loader(), verbose=False)
    assert len(trainer.history) == before
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Logs(), loader(), loader())
    assert trainer.history["epoch"].values == [0] * 4 + [1] * 4
    assert fitted(max_epochs=1).history["epoch"].values == [0] * 4


def test_reading_it_says_what_is_wrong_and_shows_what_is_there() -> None:
    trainer = quiet()
    assert repr(trainer.history) == "History: nothing was logged"
    assert "nothing was logged" in trainer.history._repr_html_()
    with pytest.raises(KeyError, match="Nothing was logged"):
        trainer.history["loss"]
    history = fitted().history
    with refused(KeyError, says="'val_loss'"):
        history["val_los"]
    with refused(IndexError, says="8 rows"):
        history[8]
    with refused(ValueError, "x", says="x='minutes'"):
        history.plot(x="minutes")  # type: ignore[arg-type]
    assert "8 rows, step 1 to 15" in repr(history)
    history.add(step=20, epoch=2, values={"<b>": math.nan})
    html = history._repr_html_()
    assert "&lt;b&gt;" in html
    assert "<b>" not in html
    assert "<polyline" in html


def test_its_checkpoint_is_small_and_exact() -> None:
    history = History()
    for step in range(4000):
        values = {"loss": float(numpy.float32(1 / (step + 1))), "lr": 0.25, "tokens": float(2**25 + step)}
        history.add(step=step, epoch=step // 1000, values=values | ({"val": math.nan} if step % 1000 == 999 else {}))
    file = io.BytesIO()
    torch.save(history.state_dict(), file)
    # 8 bytes for the time of a row; 4 for each value that float32 holds, or else 8.
    assert file.tell() < 4000 * (8 + 4 + 4 + 8) + 10_000
    restored = History()
    restored.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert repr(rows_of(restored)) == repr(rows_of(history))
    assert restored["val"].steps == [999, 1999, 2999, 3999]
    assert restored["epoch"] == history["epoch"]
    assert "at step" in repr(restored)
    assert "0.00025" in repr(restored)
    empty = History()
    empty.load_state_dict(History().state_dict())
    assert not empty


def test_it_is_drawn(tmp_path: Path) -> None:
    history = fitted().history
    figure = history.plot("val_loss", "loss_step", x="time", output=tmp_path / "loss.svg")
    # This is what a notebook asks for.
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert figure.axes
    assert (tmp_path / "loss.svg").read_text().startswith("<?xml")
    with refused(ValueError, says=".png"):
        history.plot(output=tmp_path / "loss.gif")


# -- the record


def test_a_fit_writes_what_it_is_and_what_it_logs(tmp_path: Path) -> None:
    class Warns(Logs):
        def on_train_epoch_start(self) -> None:
            warnings.warn("this is odd", RuntimeWarning, stacklevel=1)

    with pytest.warns(RuntimeWarning, match="this is odd"):
        trainer = fitted(Warns(), logger=CSVLogger(tmp_path), max_epochs=1)
    lines = lines_of(Path(trainer.log_dir or "") / "run.jsonl")
    start, end = lines[0], lines[-1]
    assert (start["kind"], start["step"], start["resumed_from"], start["format"]) == ("start", 0, None, 1)
    assert start["arguments"]["log_every_n_steps"] == 2
    assert "precision" not in start["arguments"]
    assert start["model"] == {"name": "Warns", "parameters": 5, "trainable": 5, "bytes": 20}
    assert start["data"] == {"train_batches": STEPS, "batch_size": 2}
    assert start["versions"]["torch"] == torch.__version__
    assert start["machine"]["devices"] == ["cpu"]
    assert (end["kind"], end["reason"], end["step"]) == ("end", "completed", STEPS)
    rows = [line for line in lines if line["kind"] == "row"]
    assert {name for row in rows for name in row["values"]} == set(trainer.history.keys())
    assert [line["message"] for line in lines if line["kind"] == "warning"] == ["this is odd"]


def test_an_attempt_that_failed_and_its_continuation_are_in_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.pread", raising=False)  # As on Windows.
    options = {"logger": CSVLogger(tmp_path, version=0), "max_epochs": 1}
    saves = ModelCheckpoint(every_n_train_steps=4, save_last=True)
    with pytest.raises(RuntimeError, match="a mistake"):
        fitted(Logs(stop_at=6), **options, callbacks=[saves], enable_checkpointing=True)
    path = tmp_path / "lightning_logs" / "version_0" / "run.jsonl"
    assert lines_of(path)[-1]["reason"] == "failed"
    assert lines_of(path)[-1]["message"] == "RuntimeError: a mistake"
    # A process that was killed leaves an unfinished line.
    with path.open("a") as file:
        file.write('{"kind": "row", "st')
    options["logger"] = CSVLogger(tmp_path, version=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted(**options, ckpt_path=saves.last_model_path)
    text = path.read_text().splitlines()
    begins = [json.loads(line) for line in text if line.startswith('{"kind": "start"')]
    assert [(line["step"], line["resumed_from"]) for line in begins] == [(0, None), (4, saves.last_model_path)]
    assert json.loads(text[-1])["reason"] == "completed"


def test_no_record_is_written_where_nothing_is_logged_or_tried_out(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    fitted(max_epochs=1, logger=False)
    fitted(fast_dev_run=1, logger=True)
    quiet(logger=CSVLogger(tmp_path)).validate(Logs(), loader(), verbose=False)
    assert list(tmp_path.rglob("run.jsonl")) == []


def test_a_record_that_cannot_be_written_ends_and_the_fit_goes_on(tmp_path: Path) -> None:
    record = Record(tmp_path / "gone" / "run.jsonl")
    with warned(UserWarning, says="gone"):
        record.add("row", step=0, epoch=0, values={})
    assert not record.writes
    record.add("row", step=1, epoch=0, values={})
    record.flush()
