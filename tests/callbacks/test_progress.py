"""The progress bar in a terminal, a pipe and a file, and what programs change about it."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hasten as L
from hasten.callbacks import ProgressBar, TQDMProgressBar
from hasten.callbacks.tqdm_progress import Tqdm
from hasten.hooks import overrides
from tests.callbacks.scripted import BATCHES, Scripted
from tests.models import quiet

pty = pytest.importorskip("pty")
ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys, time
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
        return self.weight * 1.0
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", 0.25, prog_bar=True)
    test_step = validation_step
    def predict_step(self, batch, batch_idx):
        return batch
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

begun = time.monotonic()
batches = [torch.zeros(1)] * 400
trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False,
                    enable_model_summary=False, log_every_n_steps=10)
model = Model()
trainer.fit(model, batches, batches[:20])
print("seconds", time.monotonic() - begun, file=sys.stderr)
trainer.validate(model, batches[:30], verbose=False)
several = [torch.utils.data.DataLoader(torch.zeros(n, 1)) for n in (10, 7)]
trainer.test(model, several, verbose=False)
trainer.predict(model, batches[:5])
"""


def environment(**more: str) -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    # A size in the environment would win over that of the terminal.
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return {**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **more}


def in_terminal(program: str, columns: int = 100, **more: str) -> str:
    """Run a program in a terminal of its own; return every byte it showed."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=theirs, stderr=theirs, stdin=theirs, env=environment(**more)
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait() == 0, shown.decode()
    return shown.decode()


def screen(shown: str) -> list[str]:
    """Return what stands on the screen in the end: carriage returns and moves up are carried out."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", shown):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token == "\x1b[A":
            row = max(0, row - 1)
        elif token.startswith("\x1b"):
            continue
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + token + line[column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines if line.strip()]


def test_in_a_terminal() -> None:
    shown = in_terminal(PROGRAM)
    final = screen(shown)
    text = "\n".join(final)
    # One line for training, in its last state, with the values of its last step and of validation.
    (training,) = [line for line in final if line.startswith("Epoch")]
    assert training.startswith("Epoch 1: 100%")
    assert "400/400" in training
    assert "val_loss=0.250" in training
    assert "loss=399" in training
    assert [line for line in final if line.startswith("printed")] == ["printed 0", "printed 1"]
    assert "Validation DataLoader 0: 100%" in text
    assert "Testing DataLoader 1: 100%" in text
    assert "Predicting DataLoader 0: 100%" in text
    # Messages have a line of their own, above the bar.
    stopped = final.index("`Trainer.fit` stopped: `max_epochs=2` reached.")
    assert final[stopped + 1] == training
    # Bars inside bars go away.
    assert not any(line.startswith("Sanity") for line in final)
    assert "Sanity Checking" in shown
    assert max(len(line) for line in final) <= 100
    # At most ten a second, besides the start and end of epochs and validations and redraws after prints.
    seconds = float(re.findall(r"seconds ([0-9.]+)", shown)[0])
    assert len(re.findall(r"Epoch \d: +\d+%", shown)) <= 10 * seconds + 20


def test_a_narrow_terminal_is_not_overrun() -> None:
    assert max(len(line) for line in screen(in_terminal(PROGRAM, columns=50))) <= 50


def test_in_a_pipe_or_file_there_are_whole_lines(tmp_path: Path) -> None:
    with open(tmp_path / "log.txt", "wb") as file:
        subprocess.run([sys.executable, "-c", PROGRAM], stdout=file, env=environment(), check=True)
    shown = (tmp_path / "log.txt").read_bytes().decode()
    assert "\r" not in shown
    assert "\x1b" not in shown
    lines = shown.splitlines()
    assert [line.split(" [")[0] for line in lines] == [
        "printed 0",
        "Epoch 0: 400/400",
        "printed 1",
        "Epoch 1: 400/400",
        "Validation DataLoader 0: 30/30",
        "Testing DataLoader 0: 10/10",
        "Testing DataLoader 1: 7/7",
        "Predicting DataLoader 0: 5/5",
    ]
    assert "val_loss=0.250" in lines[1]
    assert re.search(r"\[\d\d:\d\d, [0-9.]+it/s, ", lines[1])


def test_long_epochs_write_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    class Late(TQDMProgressBar):
        def on_train_batch_end(self, *arguments: Any) -> None:
            if arguments[-1] == 1:
                self.train_progress_bar._next_line = 0.0  # half a minute has gone by
                self._next_refresh = 0.0
            super().on_train_batch_end(*arguments)

    fit(Late())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" [")[0] for line in lines] == ["Epoch 0: 2/4", "Epoch 0: 4/4"]


# -- in this process


def fit(bar: L.Callback, train: Any = BATCHES, **arguments: Any) -> L.Trainer:
    trainer = quiet(callbacks=[bar], enable_progress_bar=True, num_sanity_val_steps=1, **arguments)
    trainer.fit(Scripted(val=[1.0]), train, [torch.zeros(2, 1)])
    return trainer


class Endless:
    def __iter__(self) -> Any:
        while True:
            yield torch.zeros(2, 1)


def test_unknown_length(capsys: pytest.CaptureFixture[str]) -> None:
    fit(TQDMProgressBar(), Endless(), max_steps=7, max_epochs=3)
    assert "Epoch 0: 7 [" in capsys.readouterr().out


def test_a_limit_of_steps_is_the_length(capsys: pytest.CaptureFixture[str]) -> None:
    fit(TQDMProgressBar(), Endless(), max_steps=7, max_epochs=-1)
    assert "Epoch 0: 7/7 [" in capsys.readouterr().out


@pytest.mark.parametrize(("rate", "drawn"), [(1, [1, 2, 3, 4]), (3, [3, 4]), (4, [4]), (9, [4])])
def test_refresh_rate_counts_batches_and_the_last_is_always_shown(rate: int, drawn: list[int]) -> None:
    seen: list[int] = []

    class Mine(TQDMProgressBar):
        def init_test_tqdm(self) -> Any:
            bar = super().init_test_tqdm()
            refresh = bar.refresh
            bar.refresh = lambda *_, **__: (seen.append(bar.n), refresh())
            return bar

        def on_test_batch_end(self, *arguments: Any) -> None:
            self._next_refresh = 0.0  # It is always time to.
            super().on_test_batch_end(*arguments)

    class Tested(Scripted):
        def test_step(self, batch: Any, batch_idx: int) -> None: ...

    quiet(callbacks=[Mine(refresh_rate=rate)], enable_progress_bar=True).test(Tested(), BATCHES)
    assert [n for n in seen if n] == drawn


def test_while_the_clock_stands_still_nothing_is_drawn_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    from hasten.callbacks import progress

    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 100.0))
    drawn: list[int] = []

    class Mine(TQDMProgressBar):
        def init_train_tqdm(self) -> Any:
            bar = super().init_train_tqdm()
            refresh = bar.refresh
            bar.refresh = lambda *_, **__: (drawn.append(bar.n), refresh())
            return bar

    fit(Mine())
    assert not {2, 3} & set(drawn)
    assert 4 in drawn


def test_a_line_before_any_time_has_passed(capsys: pytest.CaptureFixture[str]) -> None:
    # A coarse clock may not have moved since the bar began.
    bar = Tqdm(desc="Epoch 0", total=4, file=sys.stdout)
    bar._time = lambda: bar.start_t
    bar.n = 2
    bar.write_line()
    bar.close()
    assert "Epoch 0 2/4 [00:00]" in capsys.readouterr().out


def test_values_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    class Mine(TQDMProgressBar):
        def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
            items = super().get_metrics(trainer, pl_module)
            items.pop("v_num", None)
            return {**items, "mine": 42}

    fit(Mine())
    assert "mine=42" in capsys.readouterr().out


def test_the_version_of_the_logger_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from hasten.loggers import CSVLogger

    fit(TQDMProgressBar(), logger=CSVLogger(tmp_path, version=17))
    assert "v_num=17" in capsys.readouterr().out


def test_bars_can_be_made_differently(capsys: pytest.CaptureFixture[str]) -> None:
    class Mine(TQDMProgressBar):
        def init_train_tqdm(self) -> Any:
            bar = super().init_train_tqdm()
            bar.set_description("my training")
            return bar

        def init_validation_tqdm(self) -> Any:
            return Tqdm(desc="mine", file=sys.stdout, disable=True)

        def on_train_epoch_start(self, trainer: L.Trainer, *rest: Any) -> None:
            super().on_train_epoch_start(trainer, *rest)
            self.train_progress_bar.set_description(f"round {trainer.current_epoch}")

    fit(Mine(), max_epochs=2)
    shown = capsys.readouterr().out
    assert "round 0: 4/4" in shown
    assert "round 1: 4/4" in shown


def test_a_bar_of_ones_own() -> None:
    shares: list[float] = []

    class Mine(ProgressBar):
        enabled = True

        def disable(self) -> None:
            self.enabled = False

        def enable(self) -> None:
            self.enabled = True

        def on_train_batch_end(self, *arguments: Any) -> None:
            shares.append((arguments[-1] + 1) / self.total_train_batches)

    bar = Mine()
    trainer = fit(bar)
    assert shares == [0.25, 0.5, 0.75, 1.0]
    assert trainer.progress_bar_callback is bar
    assert bar.total_val_batches == 1


@pytest.mark.parametrize("bar", [TQDMProgressBar(refresh_rate=0), TQDMProgressBar()])
def test_a_bar_that_is_off_costs_nothing_and_shows_nothing(
    bar: TQDMProgressBar, capsys: pytest.CaptureFixture[str]
) -> None:
    bar.disable()
    fit(bar)
    assert capsys.readouterr().out == ""
    for stage in ("train", "validation", "test", "predict"):
        assert not overrides(bar, L.Callback, f"on_{stage}_batch_end")
    bar.print("still", "printed", sep="-")
    assert capsys.readouterr().out == "still-printed\n"


def test_the_environment_switches_it_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "1")
    fit(TQDMProgressBar())
    assert capsys.readouterr().out == ""


def test_it_can_be_enabled_again(capsys: pytest.CaptureFixture[str]) -> None:
    bar = TQDMProgressBar()
    bar.disable()
    assert bar.is_disabled
    bar.enable()
    fit(bar)
    assert "4/4" in capsys.readouterr().out


def test_when_nothing_is_due_a_step_is_one_call() -> None:
    bar = TQDMProgressBar()
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


def test_a_name_the_bar_shows_itself_is_spoken_of(tmp_path: Path) -> None:
    from hasten.loggers import CSVLogger

    class Same(Scripted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("v_num", 3.0, prog_bar=True)
            return super().training_step(batch, batch_idx)

    trainer = quiet(callbacks=[TQDMProgressBar()], enable_progress_bar=True, logger=CSVLogger(tmp_path))
    with pytest.warns(UserWarning, match="shows 'v_num' by itself"):
        trainer.fit(Same(), BATCHES)


def test_least_batches_between_looks_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_MINITERS", "5")
    assert TQDMProgressBar().refresh_rate == 5
    assert TQDMProgressBar(refresh_rate=8).refresh_rate == 8
    assert TQDMProgressBar(refresh_rate=0).refresh_rate == 0


def test_it_travels_to_another_process() -> None:
    bar = TQDMProgressBar(refresh_rate=3)
    fit(bar)
    assert pickle.loads(pickle.dumps(bar)).refresh_rate == 3


def test_an_error_leaves_no_bar_open(capsys: pytest.CaptureFixture[str]) -> None:
    class Fails(Scripted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError

    bar = TQDMProgressBar()
    trainer = quiet(callbacks=[bar], enable_progress_bar=True)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Fails(), BATCHES)
    assert bar.train_progress_bar.disable
    assert not Tqdm._instances


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.5, "0.500"), (7, "7"), (3.0, "3.000"), (123456.0, "1.23e+5"), ("text", "text"), ("1", "1.000")],
)
def test_numbers_keep_their_width(number: Any, text: str) -> None:
    assert Tqdm.format_num(number) == text
