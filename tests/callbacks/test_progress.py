"""The progress bars of tqdm and rich in a terminal, a pipe and a file, and what programs change about them."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hasten as L
from hasten.callbacks import LambdaCallback, RichProgressBar, TQDMProgressBar, progress
from hasten.callbacks.progress import Tqdm
from hasten.callbacks.rich_progress import RichProgressBarTheme, speed_text
from hasten.hooks import overrides
from hasten.loggers import CSVLogger
from hasten_lightning.conventions import LIGHTNING
from tests.callbacks.scripted import BATCHES, Endless, Scripted, python_calls
from tests.models import Classifier, loader, quiet
from tests.programs import Forked

pty = pytest.importorskip("pty")
rich = pytest.importorskip("rich")

PROGRAM = """
import sys, time, warnings
import torch
import hasten as L

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
    def training_step(self, batch, batch_idx):
        self.log("loss", float(batch_idx), prog_bar=True)
        if batch_idx == 5:
            self.print("printed", self.current_epoch)
        if batch_idx == 200 and self.current_epoch == 1:
            warnings.warn("careful in the middle")
        return self.weight * 1.0
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", 0.25, prog_bar=True)
    test_step = validation_step
    def predict_step(self, batch, batch_idx):
        return batch
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

batches = [torch.zeros(1)] * 400
for name in sys.argv[1:]:
    begun = time.monotonic()
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
                        callbacks=[getattr(L.callbacks, name)()], log_every_n_steps=10)
    model = Model()
    trainer.fit(model, batches, batches[:20])
    print("seconds", time.monotonic() - begun, file=sys.stderr)
    trainer.validate(model, batches[:30], verbose=False)
    several = [torch.utils.data.DataLoader(torch.zeros(n, 1)) for n in (10, 7)]
    trainer.test(model, several, verbose=False)
    trainer.predict(model, batches[:5])
"""
# For each bar, regular expressions of its lines: training, validation, test and prediction; and an epoch in lines.
# The share of waiting shows on busy machines only; where it does not fit, rich cuts its column at a word.
LOOKS = {
    "TQDMProgressBar": (
        r"Epoch 2/2: 100%\|█+\| 400/400  (step 800  )?(loss=399.0  val_loss=0.250|val_loss=0.250  loss=399.0)  "
        r"\S+ samples/s  (data wait \d+%  )?took 0:\d\d$",
        ("Validation DataLoader 0: 100%", "Testing DataLoader 1: 100%", "Predicting DataLoader 0: 100%"),
        r"Epoch \d/2: +\d+%",
        "Epoch {}/2",
    ),
    "RichProgressBar": (
        r"Epoch 2/2 .* 400/400 \d:\d\d:\d\d • took 0:\d\d \S+ samples/s "
        r"(loss: 399.000 val_loss: 0.250|val_loss: 0.250 loss: 399.000)( data( wait( \d+%)?)?)?$",
        ("Validation DataLoader 0 .* 30/30 ", "Testing DataLoader 1 .* 7/7 ", "Predicting DataLoader 0 .* 5/5 "),
        r"Epoch \d/2",
        "Epoch {}/2",
    ),
}


def open_terminal(columns: int) -> tuple[int, int]:
    """Return the file descriptors of a new terminal: of the reader and of the program."""
    import fcntl
    import struct
    import termios

    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    return parent, child


def in_terminal(kind: str) -> str:
    """Run the program in its own terminal; return every byte it showed."""
    parent, child = open_terminal(130)
    process = Forked(("-c", PROGRAM, kind), child, child, stdin=child)
    os.close(child)
    shown = bytearray()
    with os.fdopen(parent, "rb", buffering=0) as terminal, contextlib.suppress(OSError):
        while part := terminal.read(65536):  # an OSError when the other end is closed
            shown += part
    assert process.wait() == 0, shown.decode()
    return shown.decode()


def screen(shown: str) -> list[str]:
    """Return the final lines on the screen: carriage returns, moves up and deleted lines are carried out."""
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


@pytest.mark.parametrize("kind", LOOKS)
def test_in_a_terminal(kind: str) -> None:
    training_line, others, refreshes, _ = LOOKS[kind]
    shown = in_terminal(kind)
    final = screen(shown)
    # One line for training, in its last state, with the values of its last step and of validation.
    (training,) = [line for line in final if line.startswith("Epoch")]
    assert re.match(training_line, training)
    assert [line for line in final if line.startswith("printed")] == ["printed 0", "printed 1"]
    # The warning has a line to itself, and the line with its code below.
    (warned,) = [line for line in final if "careful in the middle" in line]
    assert re.match(r"\S*<string>:\d+: UserWarning: careful in the middle$", warned), final
    for other in others:
        assert len([line for line in final if re.match(other, line)]) == 1
    # Messages are on separate lines, above the bar.
    stopped = final.index("`Trainer.fit` stopped: `max_epochs=2` reached.")
    assert final[stopped + 1] == training
    # Bars inside bars go away.
    assert not any(line.startswith("Sanity") for line in final)
    assert "Sanity Checking" in shown
    assert not any("loss" in line for line in final if line.startswith(("Validation", "Testing")))
    if kind == "RichProgressBar":
        # The cursor is back, and the table of layers was drawn with rich too.
        assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
        assert "Total params: 1" in final
    # At most ten a second, besides the start and end of epochs and validations and redraws after prints.
    seconds = float(re.findall(r"seconds ([0-9.]+)", shown)[0])
    assert len(re.findall(refreshes, shown)) <= 10 * seconds + 40


def test_in_a_pipe_or_file_there_are_whole_lines(tmp_path: Path) -> None:
    with open(tmp_path / "log.txt", "wb") as file:
        assert Forked(("-c", PROGRAM, *LOOKS), file.fileno(), 2).wait() == 0
    shown = (tmp_path / "log.txt").read_bytes().decode()
    assert not {"\r", "\x1b"} & set(shown)
    lines = [line for line in shown.splitlines() if re.match(r"Epoch|printed|Val|Test|Pred", line)]
    stages = ("Validation DataLoader 0: 30/30", "Testing DataLoader 0: 10/10", "Testing DataLoader 1: 7/7")
    evaluations = [*stages, "Predicting DataLoader 0: 5/5"]
    found = [re.split(r" \[|  step", line)[0].replace("100% ", "") for line in lines]
    for *_, epoch in LOOKS.values():
        training = [line for i in (0, 1) for line in (f"printed {i}", f"{epoch.format(i + 1)}: 400/400")]
        assert found[:8] == [*training, *evaluations]
        del found[:8]
    assert found == []
    assert "val_loss=0.250" in lines[1]
    assert re.search(r"  step 400  .*  \S+ samples/s  .*0:\d\d left$", lines[1])


# -- in this process; rich on a terminal that is a string


@pytest.fixture(autouse=True)
def _console_of_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what ``console_kwargs`` changes."""
    console = rich.get_console()
    monkeypatch.setattr(console, "__dict__", dict(vars(console)))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def rich_bar(terminal: io.StringIO, kind: type[RichProgressBar] = RichProgressBar, **options: Any) -> RichProgressBar:
    console = {"file": terminal, "force_terminal": True, "width": 160, "color_system": None}
    return kind(console_kwargs={**console, "legacy_windows": False}, **options)


def fit(bar: L.Callback, train: Any = BATCHES, module: Any = None, **arguments: Any) -> L.Trainer:
    trainer = quiet(callbacks=[bar], enable_progress_bar=True, num_sanity_val_steps=1, **arguments)
    trainer.fit(module or Scripted(val=[1.0]), train, [torch.zeros(2, 1)])
    return trainer


def shown_by_rich(bar: L.Callback) -> str:
    return bar._console_kwargs["file"].getvalue() if isinstance(bar, RichProgressBar) else ""


def epoch_line(terminal: io.StringIO) -> str:
    return next(line for line in screen(terminal.getvalue()) if line.startswith("Epoch"))


@pytest.mark.parametrize(
    ("epochs", "line", "rich_line"),
    [(3, "Epoch 1/3: 7it  step 7/7", r"Epoch 1/3 .* 7/-- "), (-1, "Epoch 1: 100% 7/7  step 7/7", r"Epoch 1  .* 7/7 ")],
)
def test_a_length_that_is_unknown_or_limited_by_steps(
    capsys: pytest.CaptureFixture[str], epochs: int, line: str, rich_line: str
) -> None:
    fit(TQDMProgressBar(), Endless(), max_steps=7, max_epochs=epochs)
    assert line in capsys.readouterr().out
    terminal = Terminal()
    fit(rich_bar(terminal), Endless(), max_steps=7, max_epochs=epochs)
    assert re.match(rich_line, epoch_line(terminal))


def test_a_narrow_terminal_is_not_overrun(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, child = open_terminal(50)
    with os.fdopen(parent, "rb", buffering=0) as reader, os.fdopen(child, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        fit(TQDMProgressBar())
        shown = screen(reader.read(65536).decode())
    assert 40 < max(len(line) for line in shown) <= 50


def test_long_epochs_write_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    class Late(TQDMProgressBar):
        def on_train_batch_end(self, *arguments: Any) -> None:
            if arguments[-1] == 1:
                self.train_progress_bar._next_line = 0.0  # half a minute has gone by
                self._next_refresh = 0.0
            super().on_train_batch_end(*arguments)

    fit(Late())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  step")[0] for line in lines] == ["Epoch 1/1:  50% 2/4", "Epoch 1/1: 100% 4/4"]


@pytest.mark.parametrize(
    ("rate", "clock", "drawn"),
    [(1, time.monotonic, [1, 2, 3, 4]), (3, time.monotonic, [3, 4]), (9, time.monotonic, [4]), (1, lambda: 100.0, [4])],
)
def test_it_is_drawn_as_often_as_batches_and_time_allow_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, rate: int, clock: Any, drawn: list[int]
) -> None:
    class Counting(TQDMProgressBar):
        drawn: list[int]

        def init_test_tqdm(self) -> Any:
            bar = super().init_test_tqdm()
            refresh, self.drawn = bar.refresh, []
            bar.refresh = lambda *_, **__: (self.drawn.append(bar.n), refresh())
            return bar

        def on_test_batch_end(self, *arguments: Any) -> None:
            if clock is time.monotonic:
                self._next_refresh = 0.0
            super().on_test_batch_end(*arguments)

    class Tested(Scripted):
        def test_step(self, batch: Any, batch_idx: int) -> None: ...

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=clock))
    bar = Counting(refresh_rate=rate)
    bar._next_refresh = clock() + 1000.0
    quiet(callbacks=[bar], enable_progress_bar=True).test(Tested(), BATCHES)
    assert [n for n in bar.drawn if n] == drawn


def test_values_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    class Chosen(TQDMProgressBar):
        def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
            return {**super().get_metrics(trainer, pl_module), "mine": 42}

    fit(Chosen())
    assert "mine=42" in capsys.readouterr().out

    class RichChosen(RichProgressBar):
        def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
            return {"half": 0.5, "whole": 42, "text": "yes", "other": None}

    terminal = Terminal()
    theme = RichProgressBarTheme(metrics_text_delimiter="; ", metrics_format=".1e")
    fit(rich_bar(terminal, RichChosen, theme=theme))
    assert epoch_line(terminal).endswith("half: 5.0e-01; whole: 42; text: yes; other: None")


def test_the_version_of_the_logger_is_shown_where_lightning_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(TQDMProgressBar(), logger=CSVLogger(tmp_path, version=17))
    assert "v_num" not in capsys.readouterr().out
    monkeypatch.setattr("hasten.elsewhere.conventions._current", LIGHTNING)
    fit(TQDMProgressBar(), logger=CSVLogger(tmp_path, version=17))
    assert "v_num=17" in capsys.readouterr().out

    class Same(Scripted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("v_num", 3.0, prog_bar=True)
            return super().training_step(batch, batch_idx)

    fit(TQDMProgressBar(), module=Same(), logger=CSVLogger(tmp_path))
    assert "v_num=3" in capsys.readouterr().out


def test_bars_can_be_made_differently(capsys: pytest.CaptureFixture[str]) -> None:
    class Different(TQDMProgressBar):
        def init_train_tqdm(self) -> Any:
            bar = super().init_train_tqdm()
            bar.set_description("my training")
            return bar

        def init_validation_tqdm(self) -> Any:
            return Tqdm(desc="mine", file=sys.stdout, disable=True)

        def on_train_epoch_start(self, trainer: L.Trainer, *rest: Any) -> None:
            super().on_train_epoch_start(trainer, *rest)
            assert self._train_progress_bar is self.train_progress_bar
            self.train_progress_bar.set_description(f"round {trainer.current_epoch}")

    fit(Different(), max_epochs=2)
    shown = capsys.readouterr().out
    assert "round 0: 100% 4/4" in shown
    assert "round 1: 100% 4/4" in shown


@pytest.mark.parametrize("leave", [True, False])
def test_bars_of_each_epoch_can_stay(leave: bool) -> None:
    terminal = Terminal()
    fit(rich_bar(terminal, leave=leave), max_epochs=3)
    epochs = [line.split()[1] for line in screen(terminal.getvalue()) if line.startswith("Epoch")]
    assert epochs == (["1/3", "2/3", "3/3"] if leave else ["3/3"])


def test_columns_and_colours_can_be_chosen() -> None:
    from rich.progress import TextColumn

    class Mine(RichProgressBar):
        def configure_columns(self, trainer: L.Trainer) -> list[Any]:
            return [TextColumn("at {task.completed} of {task.total}")]

    terminal = Terminal()
    fit(rich_bar(terminal, Mine))
    assert "at 4 of 4 loss: -0.300" in screen(terminal.getvalue())
    theme = RichProgressBarTheme(description="bold red", batch_progress="green", metrics="blue")
    terminal = Terminal()
    console = {"file": terminal, "force_terminal": True, "width": 120, "color_system": "standard"}
    fit(RichProgressBar(theme=theme, console_kwargs=console))
    assert "\x1b[1;31mEpoch" in terminal.getvalue()
    assert "\x1b[32m4/4\x1b[0m" in terminal.getvalue()


def test_what_is_printed_with_rich_stands_above_the_bar() -> None:
    terminal = Terminal()
    bar = rich_bar(terminal)
    says = LambdaCallback(on_train_batch_end=lambda *_: rich.print("a line of rich"))
    quiet(callbacks=[bar, says], enable_progress_bar=True).fit(Scripted(val=[1.0]), BATCHES, [torch.zeros(2, 1)])
    lines = screen(terminal.getvalue())
    assert lines.count("a line of rich") == 4
    assert lines[-1].startswith("Epoch 1/1")


def test_a_subclass_can_show_a_task_of_its_own() -> None:
    """As classes written for Lightning do, which override the hooks of the bar."""
    sanity = []

    class Own(RichProgressBar):
        def on_train_epoch_start(self, trainer: L.Trainer, *_: object) -> None:
            self.train_progress_bar_id = self._add_task(self.total_train_batches, f"My epoch {trainer.current_epoch}")
            self.refresh()

        def on_train_batch_end(self, trainer: L.Trainer, module: Any, *arguments: Any) -> None:
            self._update(self.train_progress_bar_id, arguments[-1] + 1)
            self._update_metrics(trainer, module)
            self.refresh(hard=True)

        def on_validation_batch_end(self, trainer: L.Trainer, *arguments: Any) -> None:
            super().on_validation_batch_end(trainer, *arguments)
            if trainer.sanity_checking:
                sanity.append((self.val_sanity_progress_bar_id, self.val_sanity_check_bar.total))

        def on_sanity_check_end(self, *_: object) -> None:
            self._update(self.val_sanity_progress_bar_id, 1, visible=False)
            super().on_sanity_check_end()

    terminal = Terminal()
    fit(rich_bar(terminal, Own), max_epochs=2)
    shown = re.findall(r"(My epoch \d) .* 4/4 .* loss", "\n".join(screen(terminal.getvalue())))
    assert shown == ["My epoch 0", "My epoch 1"]
    assert sanity == [(0, 1)]


def test_a_notebook_without_widgets_gets_lines(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("hasten.callbacks.rich_progress.installed", lambda name: False)
    fit(RichProgressBar(console_kwargs={"force_jupyter": True}))
    assert "Epoch 1/1: 100% 4/4  step 4" in capsys.readouterr().out


def test_the_tasks_can_be_read() -> None:
    seen: list[tuple[Any, ...]] = []
    bar = rich_bar(Terminal())

    def read(*arguments: Any) -> None:
        task = bar.train_progress_bar
        assert task.id == bar.train_progress_bar_id
        if arguments[-1] in (0, arguments[1]):  # the first batch, or the end of the epoch
            seen.append((task.completed, task.total, task.visible, task.fields["initial"]))

    def read_validation(*_: Any) -> None:
        seen.append((bar.val_progress_bar.total,))

    hooks = {"on_train_batch_start": read, "on_train_epoch_end": read}
    reads = LambdaCallback(**hooks, on_validation_epoch_end=read_validation)
    trainer = quiet(callbacks=[bar, reads], enable_progress_bar=True, max_epochs=2)
    trainer.fit(Scripted(val=[1.0, 2.0]), BATCHES, [torch.zeros(2, 1)])
    assert seen == [(1,), *[(0, 4, True, 0), (1,), (4, 4, True, 0)] * 2]
    assert not bar.progress.live.is_started  # Nothing is left open.
    assert (bar.test_progress_bar_id, bar.predict_progress_bar_id) == (None, None)
    message = r"`RichProgressBar._test_progress_bar` reference has not been set yet"
    with pytest.raises(TypeError, match=message):
        _ = bar.test_progress_bar


@pytest.mark.parametrize(
    "make", [TQDMProgressBar, lambda **options: rich_bar(Terminal(), **options)], ids=["tqdm", "rich"]
)
class TestBoth:
    """What the bars of tqdm and rich have in common."""

    @pytest.mark.parametrize("rate", [0, 5])
    def test_a_bar_that_is_off_costs_nothing_and_shows_nothing(
        self, make: Any, rate: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        bar = make(refresh_rate=rate)
        if rate:
            bar.disable()
        assert bar.is_disabled
        fit(bar)
        assert capsys.readouterr().out == ""
        assert shown_by_rich(bar) == ""
        for stage in ("train", "validation", "test", "predict"):
            assert not overrides(bar, L.Callback, f"on_{stage}_batch_end")
        bar.print("still", "printed", sep="-")
        assert capsys.readouterr().out == "still-printed\n"
        if rate:
            bar.enable()
            fit(bar)
            assert "4/4" in capsys.readouterr().out + shown_by_rich(bar)

    def test_a_step_is_one_call_no_thread_draws_and_the_bar_can_be_pickled(self, make: Any) -> None:
        names: set[str] = set()
        before = {thread.name for thread in threading.enumerate()}
        bar = make(refresh_rate=3)
        read = LambdaCallback(
            on_train_batch_end=lambda *_: names.update(thread.name for thread in threading.enumerate())
        )
        quiet(callbacks=[bar, read], enable_progress_bar=True).fit(Scripted(val=[1.0]), BATCHES, [torch.zeros(2, 1)])
        assert names == before
        fit(bar)  # in a Trainer that can be pickled too
        bar._next_refresh = time.monotonic() + 1000
        assert python_calls(bar.on_train_batch_end, None, None, None, None, 3) == ["on_train_batch_end"]
        if isinstance(bar, RichProgressBar):
            bar._console_kwargs = {}
        copy = pickle.loads(pickle.dumps(bar))
        assert copy.refresh_rate == 3
        assert vars(copy).get("progress") is vars(copy).get("_console") is None

    def test_an_error_leaves_the_terminal_in_order(self, make: Any) -> None:
        class Fails(Scripted):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                raise ZeroDivisionError

        stdout, bar = sys.stdout, make()
        with pytest.raises(ZeroDivisionError):
            fit(bar, module=Fails(), limit_val_batches=0)
        assert sys.stdout is stdout
        assert not Tqdm._instances
        if isinstance(bar, RichProgressBar):
            assert not bar.progress.live.is_started
            assert shown_by_rich(bar).endswith("\x1b[?25h")
        else:
            assert bar.train_progress_bar.disable


def test_the_environment_changes_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TQDM_MINITERS", "5")
    assert [TQDMProgressBar(refresh_rate=rate).refresh_rate for rate in (1, 8, 0)] == [5, 8, 0]
    monkeypatch.setenv("TQDM_DISABLE", "1")
    fit(TQDMProgressBar())
    assert capsys.readouterr().out == ""


def test_a_resumed_epoch_does_not_count_what_was_done_before() -> None:
    bar = rich_bar(Terminal())
    bar._trainer = quiet(callbacks=[bar], enable_progress_bar=True)
    opened = bar._open("train")
    opened.reset(total=1000)
    opened.initial = 900
    assert opened.task.completed == 900
    opened.task.start_time -= 10  # It began ten seconds ago.
    opened.n = 910
    opened.refresh()
    # Ten steps, and not 910, in ten seconds; less where this test was held up.
    assert 0 < float(speed_text(opened.task).removesuffix("it/s")) <= 1
    assert opened.initial == 900
    bar._stop_progress()


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.5, "0.500"), (7, "7"), (3.0, "3.000"), (123456.0, "1.23e+5"), ("text", "text"), ("1", "1.000")],
)
def test_numbers_keep_their_width(number: Any, text: str) -> None:
    assert Tqdm.format_num(number) == text


def test_a_program_without_output_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with pythonw on Windows, or as a service."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    trainer = quiet(enable_progress_bar=True)
    trainer.fit(Classifier(), loader())
    assert trainer.global_step > 0
