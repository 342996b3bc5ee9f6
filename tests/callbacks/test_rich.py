"""RichProgressBar and RichModelSummary in a terminal, a pipe and a file."""

from __future__ import annotations

import io
import pickle
import re
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from torch import nn

import hasten as L
from hasten.callbacks import ModelSummary, RichModelSummary, RichProgressBar, TQDMProgressBar
from hasten.callbacks.rich_progress import RichProgressBarTheme
from hasten.hooks import overrides
from tests.callbacks.scripted import BATCHES, Scripted
from tests.callbacks.test_progress import PROGRAM, environment, in_terminal
from tests.models import quiet

rich = pytest.importorskip("rich")

from hasten.callbacks.rich_progress import speed_text  # noqa: E402 - needs rich

RICH = PROGRAM.replace("enable_model_summary=False,", "callbacks=[L.callbacks.RichProgressBar(OPTIONS)],")


def screen(shown: str) -> list[str]:
    """Return what stands on the screen in the end, as a terminal would show it."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", shown):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token.endswith("A") and token.startswith("\x1b"):
            row = max(0, row - int(token[2:-1] or 1))
        elif token == "\x1b[2K":
            lines[row] = ""
        elif not token.startswith("\x1b"):
            line = lines[row].ljust(column)
            lines[row] = line[:column] + token + line[column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines if line.strip()]


def test_in_a_terminal() -> None:
    shown = in_terminal(RICH.replace("OPTIONS", ""), columns=130)
    final = screen(shown)
    # One line for training, in its last state, with the values of its last step and of validation.
    (training,) = [line for line in final if line.startswith("Epoch")]
    assert training.startswith("Epoch 1/1 ")
    assert " 400/400 " in training
    assert training.endswith("loss: 399.000 val_loss: 0.250")
    assert re.search(r"\d:\d\d:\d\d • 0:00:00 \d+\.\d\dit/s", training)
    assert [line for line in final if line.startswith("printed")] == ["printed 0", "printed 1"]
    # Messages have a line of their own, above the bar.
    stopped = final.index("`Trainer.fit` stopped: `max_epochs=2` reached.")
    assert final[stopped + 1] == training
    # Bars alone stay, bars inside bars go away.
    for text in (
        "Validation DataLoader 0 .* 30/30 ",
        "Testing DataLoader 1 .* 7/7 ",
        "Predicting DataLoader 0 .* 5/5 ",
    ):
        assert len([line for line in final if re.match(text, line)]) == 1
    assert not any(line.startswith("Sanity") for line in final)
    assert "Sanity Checking" in shown
    assert not any("loss" in line for line in final if line.startswith(("Validation", "Testing")))
    # The cursor is back, and the table of layers was drawn with rich too.
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert "Total params: 1" in final
    # At most ten a second, besides the start and end of epochs and validations and redraws after prints.
    seconds = float(re.findall(r"seconds ([0-9.]+)", shown)[0])
    assert len(re.findall(r"Epoch \d/1", shown)) <= 10 * seconds + 40


def test_in_a_pipe_there_are_whole_lines() -> None:
    program = RICH.replace("OPTIONS", "")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment(), check=True
    )
    assert "\r" not in done.stdout
    assert "\x1b" not in done.stdout
    lines = [line for line in done.stdout.splitlines() if re.match(r"Epoch|printed|Val|Test|Pred", line)]
    assert [line.split(" [")[0] for line in lines] == [
        "printed 0",
        "Epoch 0/1: 400/400",
        "printed 1",
        "Epoch 1/1: 400/400",
        "Validation DataLoader 0: 30/30",
        "Testing DataLoader 0: 10/10",
        "Testing DataLoader 1: 7/7",
        "Predicting DataLoader 0: 5/5",
    ]
    assert "val_loss=0.250" in lines[1]


# -- in this process, on a terminal that is a string


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def bar_on(
    terminal: io.StringIO, kind: type[RichProgressBar] = RichProgressBar, **options: Any
) -> RichProgressBar:
    console = {
        "file": terminal,
        "force_terminal": True,
        "width": 160,
        "color_system": None,
        "legacy_windows": False,
    }
    return kind(console_kwargs=console, **options)


def fit(bar: L.Callback, train: Any = BATCHES, **arguments: Any) -> L.Trainer:
    trainer = quiet(callbacks=[bar], enable_progress_bar=True, num_sanity_val_steps=1, **arguments)
    trainer.fit(Scripted(val=[1.0]), train, [torch.zeros(2, 1)])
    return trainer


def final_line(bar_text: str) -> str:
    return next(line for line in screen(bar_text) if line.startswith("Epoch"))


@pytest.mark.parametrize("leave", [True, False])
def test_bars_of_each_epoch_can_stay(leave: bool) -> None:
    terminal = Terminal()
    fit(bar_on(terminal, leave=leave), max_epochs=3)
    epochs = [line.split()[1] for line in screen(terminal.getvalue()) if line.startswith("Epoch")]
    assert epochs == (["0/2", "1/2", "2/2"] if leave else ["2/2"])


class Endless:
    def __iter__(self) -> Any:
        while True:
            yield torch.zeros(2, 1)


def test_unknown_length() -> None:
    terminal = Terminal()
    fit(bar_on(terminal), Endless(), max_steps=7, max_epochs=-1, limit_train_batches=1.0)
    assert " 7/7 " in final_line(terminal.getvalue())
    assert final_line(terminal.getvalue()).startswith("Epoch 0  ")
    terminal = Terminal()
    fit(bar_on(terminal), Endless(), max_steps=7, max_epochs=3)
    assert final_line(terminal.getvalue()).startswith("Epoch 0/2 ")
    assert " 7/-- " in final_line(terminal.getvalue())
    assert "• -:--:--" in final_line(terminal.getvalue())


def test_values_can_be_chosen_and_written_differently() -> None:
    class Mine(RichProgressBar):
        def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
            return {"half": 0.5, "whole": 42, "text": "yes", "other": None}

    terminal = Terminal()
    fit(bar_on(terminal, Mine, theme=RichProgressBarTheme(metrics_text_delimiter="; ", metrics_format=".1e")))
    assert final_line(terminal.getvalue()).endswith("half: 5.0e-01; whole: 42; text: yes; other: None")


def test_a_notebook_without_widgets_gets_lines(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from hasten.callbacks import rich_progress

    monkeypatch.setattr(rich_progress, "installed", lambda name: False)
    fit(RichProgressBar(console_kwargs={"force_jupyter": True}))
    assert "Epoch 0/0: 4/4 [" in capsys.readouterr().out


def test_columns_can_be_chosen() -> None:
    from rich.progress import TextColumn

    class Mine(RichProgressBar):
        def configure_columns(self, trainer: L.Trainer) -> list[Any]:
            return [TextColumn("at {task.completed} of {task.total}")]

    terminal = Terminal()
    fit(bar_on(terminal, Mine))
    assert "at 4 of 4" in screen(terminal.getvalue())


def test_the_theme_colours_the_bar() -> None:
    terminal = Terminal()
    theme = RichProgressBarTheme(description="bold red", batch_progress="green", metrics="blue")
    bar = RichProgressBar(
        theme=theme,
        console_kwargs={"file": terminal, "force_terminal": True, "width": 120, "color_system": "standard"},
    )
    fit(bar)
    assert "\x1b[1;31mEpoch" in terminal.getvalue()
    assert "\x1b[32m4/4\x1b[0m" in terminal.getvalue()


def test_defaults_are_the_fields() -> None:
    theme = RichProgressBarTheme()
    assert (theme.progress_bar, theme.time, theme.metrics_format) == ("#6206E0", "dim", ".3f")
    bar = RichProgressBar()
    assert (bar.refresh_rate, bar.theme) == (100, theme)
    assert bar.is_enabled
    assert not isinstance(bar, TQDMProgressBar)


def test_the_tasks_can_be_read() -> None:
    seen: dict[str, tuple[float, float]] = {}

    class Looks(L.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            task = trainer.progress_bar_callback.train_progress_bar
            if batch_idx == 0:
                assert (task.completed, task.visible) == (0, True)  # Each epoch begins anew.
                assert task.fields["initial"] == 0

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            task = trainer.progress_bar_callback.train_progress_bar
            seen["train"] = (task.completed, task.total)
            assert task.id == trainer.progress_bar_callback.train_progress_bar_id

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen["val"] = (0, trainer.progress_bar_callback.val_progress_bar.total)

    terminal = Terminal()
    trainer = quiet(callbacks=[bar_on(terminal), Looks()], enable_progress_bar=True, max_epochs=2)
    trainer.fit(Scripted(val=[1.0, 2.0]), BATCHES, [torch.zeros(2, 1)])
    assert seen == {"train": (4, 4), "val": (0, 1)}
    bar: Any = trainer.progress_bar_callback
    assert bar.progress is None  # Nothing is left open.
    assert (bar.test_progress_bar_id, bar.predict_progress_bar_id) == (None, None)
    with pytest.raises(
        TypeError, match=r"`RichProgressBar._test_progress_bar` reference has not been set yet"
    ):
        _ = bar.test_progress_bar


@pytest.mark.parametrize("rate", [0, 5])
def test_a_bar_that_is_off_costs_nothing_and_shows_nothing(
    rate: int, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    bar = bar_on(terminal, refresh_rate=rate)
    if rate:
        bar.disable()
    assert bar.is_disabled
    fit(bar)
    assert terminal.getvalue() == ""
    assert capsys.readouterr().out == ""
    for stage in ("train", "validation", "test", "predict"):
        assert not overrides(bar, L.Callback, f"on_{stage}_batch_end")
    bar.print("still", "printed", sep="-")
    assert capsys.readouterr().out == "still-printed\n"
    if rate:
        bar.enable()
        fit(bar)
        assert " 4/4 " in terminal.getvalue()


def test_when_nothing_is_due_a_step_is_one_call() -> None:
    bar = bar_on(Terminal())
    fit(bar)
    bar._next_refresh = time.monotonic() + 1000
    calls: list[str] = []

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    hook = bar.on_train_batch_end
    sys.setprofile(count)
    try:
        hook(None, None, None, None, 3)  # type: ignore[arg-type]
    finally:
        sys.setprofile(None)
    assert calls == ["on_train_batch_end"]


@pytest.mark.parametrize(("rate", "seconds"), [(100, 0.1), (10, 0.1), (4, 0.25)])
def test_refreshes_a_second(rate: int, seconds: float) -> None:
    assert RichProgressBar(refresh_rate=rate)._refresh_seconds == seconds


def test_no_thread_draws() -> None:
    import threading

    names: set[str] = set()

    class Looks(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            assert trainer.progress_bar_callback.progress is not None
            names.update(thread.name for thread in threading.enumerate())

    before = {thread.name for thread in threading.enumerate()}
    quiet(callbacks=[bar_on(Terminal()), Looks()], enable_progress_bar=True).fit(Scripted(), BATCHES)
    assert names == before


def test_an_error_leaves_the_terminal_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    class Fails(Scripted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert sys.stdout is not stdout  # rich puts what is printed above the bar.
            raise ZeroDivisionError

    stdout, terminal = sys.stdout, Terminal()
    bar = bar_on(terminal)
    with pytest.raises(ZeroDivisionError):
        quiet(callbacks=[bar], enable_progress_bar=True).fit(Fails(), BATCHES)
    assert bar.progress is None
    assert sys.stdout is stdout
    assert terminal.getvalue().endswith("\x1b[?25h")


def test_it_travels_to_another_process() -> None:
    bar = bar_on(Terminal())
    fit(bar)
    bar._console_kwargs = {}
    copy = pickle.loads(pickle.dumps(bar))
    assert (copy.refresh_rate, copy.progress, copy._console) == (100, None, None)


def test_a_resumed_epoch_does_not_count_what_was_done_before() -> None:
    bar = bar_on(Terminal())
    trainer = quiet(callbacks=[bar], enable_progress_bar=True)
    bar._trainer = trainer
    opened = bar._open("train")
    opened.reset(total=1000)
    opened.initial = 900
    assert opened.task.completed == 900
    opened.n = 910
    opened.refresh()
    text = speed_text(opened.task)
    elapsed = opened.task.elapsed
    assert float(text.removesuffix("it/s")) <= 10 / elapsed * 1.01 + 1e6 * (elapsed < 1e-4)
    assert opened.initial == 900
    bar._stop()


@pytest.mark.parametrize("kind", [RichProgressBar, RichModelSummary])
def test_without_rich(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(
        ModuleNotFoundError, match=rf"{kind.__name__}\(\) needs the package rich.*pip install rich"
    ):
        kind()


# -- the table of layers


class Net(L.LightningModule):
    def __init__(self, example: bool = True) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 2).requires_grad_(False)
        if example:
            self.example_input_array = torch.zeros(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.body.parameters(), lr=0.1)


def table(capsys: pytest.CaptureFixture[str], model: L.LightningModule, **options: Any) -> list[list[str]]:
    """Return the cells of each row of the table, and the lines below it."""
    quiet(callbacks=[RichModelSummary(**options)], enable_model_summary=True).fit(model, [torch.zeros(3, 4)])
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in re.split(r"[│┃]", line.strip("│┃ "))] for line in lines if line.strip()]


def test_the_table_of_layers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rich, "_console", None)
    monkeypatch.setenv("COLUMNS", "120")
    rows = table(capsys, Net())
    assert ["Name", "Type", "Params", "Mode", "FLOPs", "In sizes", "Out sizes"] in rows
    assert ["0", "body", "Linear", "40", "train", "192", "[3, 4]", "[3, 8]"] in rows
    assert ["1", "head", "Linear", "18", "train", "96", "[3, 8]", "[3, 2]"] in rows
    for line in (
        "Trainable params: 40",
        "Non-trainable params: 18",
        "Total params: 58",
        "Total estimated model params size (MB): 0.000",
        "Modules in train mode: 2",
        "Modules in eval mode: 0",
        "Total FLOPs (forward of the example): 288",
    ):
        assert [line] in rows
    monkeypatch.setattr(rich, "_console", None)
    assert ["0", "body", "Linear", "40", "train"] in table(capsys, Net(example=False), header_style="red")
    monkeypatch.setattr(rich, "_console", None)
    assert table(capsys, Net(), max_depth=0) == []


def test_the_table_goes_with_the_bar() -> None:
    def kinds(**arguments: Any) -> list[type]:
        trainer = quiet(**{"enable_model_summary": True, **arguments})
        return [type(callback) for callback in trainer.callbacks if isinstance(callback, ModelSummary)]

    assert kinds(callbacks=[RichProgressBar()], enable_progress_bar=True) == [RichModelSummary]
    assert kinds(callbacks=[TQDMProgressBar()], enable_progress_bar=True) == [ModelSummary]
    assert kinds(callbacks=[RichProgressBar(), ModelSummary()], enable_progress_bar=True) == [ModelSummary]
    assert kinds(callbacks=[RichProgressBar()], enable_progress_bar=True, enable_model_summary=False) == []
