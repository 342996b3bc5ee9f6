"""The line that shows a fit: what is in it, what is left out first, and the same line in pipes and notebooks."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import hasten as L
from hasten.callbacks import TQDMProgressBar, progress_line
from hasten.callbacks.progress_line import ProgressLine, Shown, line_text
from hasten.record.pace import Pace, Speed
from hasten_lightning.conventions import LIGHTNING
from tests.callbacks.scripted import BATCHES, Scripted
from tests.models import Manual, loader, quiet

ABOUT = Shown("step 2412", 0.48211, "13.2k samples/s", "data wait 12%", "GPU 3.1 GB", "4:12 left")
VALUES = {"train_acc": "0.871", "val_loss": "0.412"}
ALL = (
    "Epoch 2/9:  41%  412/1000  step 2412  loss=0.482  train_acc=0.871  val_loss=0.412  13.2k samples/s  "
    "data wait 12%  GPU 3.1 GB  4:12 left"
)


def test_what_matters_least_is_left_out_first_and_no_line_is_too_long() -> None:
    assert line_text("Epoch 2/9", 412, 1000, VALUES, ABOUT) == ALL
    lines = [line_text("Epoch 2/9", 412, 1000, VALUES, ABOUT, columns=columns) for columns in range(20, 200)]
    assert all(len(line) < columns for columns, line in enumerate(lines, 20))
    texts = [part.split("=")[0] for part in ALL.split("  ")[3:]]
    order = sorted(texts, key=lambda text: next(index for index, line in enumerate(lines) if text in line))
    assert order == [
        "4:12 left", "loss", "train_acc", "data wait 12%", "val_loss", "13.2k samples/s", "step 2412", "GPU 3.1 GB",
    ]  # fmt: skip
    assert lines[80 - 20].endswith("|  412/1000  loss=0.482  train_acc=0.871  4:12 left")
    assert lines[0] == "Epoch 2/9:  41%  41"
    # Where the number of batches is not known.
    assert (
        line_text("Epoch 2", 412, None, {}, ABOUT, columns=60) == "Epoch 2: 412it  loss=0.482  data wait 12%  4:12 left"
    )
    assert disp_width(line_text("Epoch 0", 1, 2, {"损失": "0.1"}, Shown(left="0:01 left"), columns=48)) < 48


def disp_width(text: str) -> int:
    return sum(2 if ord(letter) > 0x2E80 and ord(letter) < 0xFFFF and letter not in "█" else 1 for letter in text)


class Fitted(Scripted):
    """Is as fast as it is said to be."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("train/acc", 0.5, prog_bar=True)
        return super().training_step(batch, batch_idx)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "speed", lambda self: Speed(5.0, 13_249.0, 412_000.0, 0.123))
    monkeypatch.setattr(Pace, "seconds_left", lambda self: 3725.0)
    monkeypatch.setattr(Pace, "memory_bytes", lambda self: 3_100_000_000)


class EachBatch(TQDMProgressBar):
    """Draws each batch of training and validation."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        self._next_refresh = 0.0
        super().on_train_batch_end(*arguments)

    def on_validation_batch_end(self, *arguments: Any, **options: Any) -> None:
        self._next_refresh = 0.0
        super().on_validation_batch_end(*arguments, **options)


def fit(bar: L.Callback, ckpt_path: Path | None = None, **arguments: Any) -> None:
    arguments = {"log_every_n_steps": 2, "num_sanity_val_steps": 0, **arguments}
    trainer = quiet(callbacks=[bar], enable_progress_bar=True, **arguments)
    trainer.fit(Fitted(val=[1.0] * 4), BATCHES, [torch.zeros(2, 1)] * 3, ckpt_path=ckpt_path)


@pytest.mark.usefixtures("known")
def test_in_a_pipe_there_is_a_line_for_each_validation_and_each_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    fit(TQDMProgressBar(), val_check_interval=2, max_epochs=2)
    rest = "412k tokens/s  data wait 12%  GPU 3.1 GB  1:02:05 left"
    starts = [
        f"Epoch {epoch + 1}/2: {share} {n}/4  step {4 * epoch + n}  "
        for epoch in (0, 1)
        for share, n in ((" 50%", 2), ("100%", 4))
    ]
    lines = capsys.readouterr().out.splitlines()
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts
    assert all(line.endswith(rest) for line in lines)
    # The loss is there without being logged; values that are logged too.
    assert all("  loss=-0." in line and "  train/acc=0.500  " in line for line in lines)


def test_lines_in_a_pipe_come_soon_and_then_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time)
    now = 1000.0
    monkeypatch.setattr(progress_line, "time", clock)
    line = ProgressLine(file=SimpleNamespace(write=lambda text: None, flush=lambda: None, encoding="utf-8"))
    assert line._next_line == 1005.0
    assert [line.next_line_after(1000.0 + seconds) - 1000.0 - seconds for seconds in (5, 600, 6000, 90_000)] == [
        30.0, 30.0, 300.0, 600.0,
    ]  # fmt: skip
    line.close()


def test_a_line_with_another_loss_is_another_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine(total=4, desc="Epoch 1/1", file=sys.stdout)
    line.n = 4
    # The first comes when five seconds are over, in the validation at the end of an epoch, and the last with its end.
    for loss in (0.5, 0.5, 0.25):
        line.loss = loss
        line.line_state.look = lambda loss=loss: Shown(loss=loss)  # type: ignore[misc]
        line.write_line()
    line.close()
    assert [text.split("loss=")[1] for text in capsys.readouterr().out.splitlines()] == ["0.500", "0.250"]


def test_the_rest_of_an_epoch_has_the_bar_of_an_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = quiet(max_steps=2, limit_val_batches=0)
    trainer.fit(Fitted(), BATCHES)
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    fit(TQDMProgressBar(), max_epochs=1, ckpt_path=tmp_path / "middle.ckpt", limit_val_batches=0)
    assert capsys.readouterr().out.startswith("Epoch 1/1: 100% 4/4  step 4  ")


@pytest.mark.usefixtures("known")
def test_a_notebook_has_one_widget_or_one_text_for_training_and_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipywidgets")
    pytest.importorskip("IPython")
    monkeypatch.setattr("hasten.callbacks.progress.in_notebook", lambda: True)
    shown: list[str] = []

    class Reads(EachBatch):
        def _refresh(self, bar: Any, n: int, *metrics: Any) -> None:
            super()._refresh(bar, n, *metrics)
            left, drawn, right = self._bars["train"].container.children
            shown.append(f"{left.value} {drawn.value:.0f}/{drawn.max:.0f} {right.value}".replace("\u2007", " "))

    fit(Reads())
    assert shown[0].startswith("Epoch 1/1:  25% 1/4 1/4  step 1  ")
    assert any(line.startswith("Epoch 1/1 validation:  67% 2/3 2/3  step 4  ") for line in shown)
    assert shown[-1].endswith("took 0:00")


def test_a_notebook_without_widgets_keeps_one_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: list[str] = []

    class Handle:
        def __init__(self, content: dict[str, str], raw: bool, display_id: bool) -> None:
            self.place = len(kept)
            kept.append(content["text/plain"])

        def update(self, content: dict[str, str], raw: bool) -> None:
            kept[self.place] = content["text/plain"]

    for module in ("progress", "tqdm_bar"):
        monkeypatch.setattr(f"hasten.callbacks.{module}.in_notebook", lambda: True)
    monkeypatch.setattr("hasten.callbacks.progress.installed", lambda name: False)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=Handle))
    fit(EachBatch())
    assert [line for line in kept if line.strip()] == [kept[-1]]
    assert kept[-1].startswith("Epoch 1/1: 100%")
    assert "\r" not in capsys.readouterr().out


@pytest.mark.parametrize("logs", [False, True])
def test_the_line_of_an_epochs_end_has_the_loss_of_its_last_step(
    logs: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    class Counts(Fitted):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            if logs:
                self.log("mean", torch.tensor(1.0), on_step=False, on_epoch=True)
            return 0 * super(Fitted, self).training_step(batch, batch_idx) + float(self.global_step)

    # No interval ends within the fit.
    trainer = quiet(enable_progress_bar=True, max_epochs=3, log_every_n_steps=50, limit_val_batches=0)
    trainer.fit(Counts(), BATCHES)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("loss=")[1].split()[0] for line in lines] == ["3.000", "7.000", "11.00"]


class TwoOptimizers(Manual):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self, self)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
        self.log("seen", float(batch_idx))


@pytest.mark.parametrize(
    ("given", "text"), [({}, "  step 10  "), ({"max_steps": 20}, "  step 10  optimizer steps 20/20  ")]
)
def test_a_step_of_two_optimizers_is_that_of_the_loggers(
    given: dict[str, Any], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = quiet(enable_progress_bar=True, log_every_n_steps=1, **given)
    trainer.fit(TwoOptimizers(), loader())
    assert trainer.history["seen"].steps[-1] == 9
    assert text in capsys.readouterr().out.splitlines()[-1]


def test_the_bar_of_validation_can_be_used_as_one_of_tqdm(capsys: pytest.CaptureFixture[str]) -> None:
    class Mine(TQDMProgressBar):
        def init_validation_tqdm(self) -> Any:
            bar = super().init_validation_tqdm()
            bar.set_description("DataLoader 2")
            assert (bar.label, bar.disable) == ("validation 2", False)
            bar.set_postfix({"a": 1}, b=2)
            bar.update(2)
            assert bar.n == 2
            bar.write("above")
            bar.clear()
            bar.reset(total=4)
            assert bar.n == 0
            return bar

    fit(Mine())
    assert capsys.readouterr().out.splitlines()[0] == "above"


def test_the_loss_is_not_shown_twice() -> None:
    names = ["loss", "train_loss", "train/loss", "training_loss_step", "Loss", "val_loss", "loss_of_words", "lossless"]
    assert [bool(progress_line._LOSS.fullmatch(name)) for name in names] == [True] * 5 + [False] * 3


def test_under_lightnings_names_the_bars_are_as_they_were(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hasten.elsewhere.conventions._current", LIGHTNING)
    fit(TQDMProgressBar())
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Epoch")]
    assert line.startswith("Epoch 0: 100% 4/4 [00:00<00:00, ")
    assert line.endswith("train/acc=0.500]")


def test_a_format_of_a_subclass_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    class Mine(TQDMProgressBar):
        BAR_FORMAT = "{n_fmt} of {total_fmt} with {bar}"

        def init_train_tqdm(self) -> Any:
            bar = super().init_train_tqdm()
            assert type(bar) is not ProgressLine
            assert bar.bar_format == self.BAR_FORMAT
            return bar

    fit(Mine())
    assert "Epoch 1/1: 100% 4/4 [" in capsys.readouterr().out
    assert sys.stdout is not None
