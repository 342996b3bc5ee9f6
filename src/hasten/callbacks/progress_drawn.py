"""DrawnProgressBar: when a bar opens, moves and closes, whatever draws it."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hasten.callbacks.progress_base import ProgressBar
from hasten.callbacks.silent import silence, unsilence
from hasten.loops.states import TrainerFn

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer

# A bar is drawn at most this often: the eye sees no more, and a step must not pay for it.
REFRESH_SECONDS = 0.1


class DrawnProgressBar(ProgressBar):
    """A bar for each stage, refreshed by time; the base of the bars drawn with tqdm and with rich.

    Those say how a bar is made, in ``_open``. A bar has what tqdm's have: ``n``, ``total``, ``initial``,
    ``disable``, ``postfix``, ``set_description``, ``set_postfix``, ``reset``, ``refresh``, ``write``, ``close``.
    """

    # Batches between two looks at the clock, and seconds between two refreshes.
    _every = 1
    _refresh_seconds = REFRESH_SECONDS

    def __init__(self) -> None:
        super().__init__()
        self._leave = False
        self._enabled = True
        self._next_refresh = 0.0
        # In a list: setting an attribute of a callback is not free, and this is set each step.
        self._train_batches = [-1]
        self._redirected = ExitStack()
        self._train_progress_bar: Any = None
        self._val_progress_bar: Any = None
        self._test_progress_bar: Any = None
        self._predict_progress_bar: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # Bars hold open files and locks.
        state = {
            name: None if name.endswith("_progress_bar") else value for name, value in vars(self).items()
        }
        del state["_redirected"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _redirected=ExitStack())

    @property
    def is_enabled(self) -> bool:
        """Whether the bar is shown."""
        return self._enabled

    @property
    def is_disabled(self) -> bool:
        """Whether the bar is not shown."""
        return not self.is_enabled

    def disable(self) -> None:
        """Stop showing bars."""
        self._enabled = False
        self._hear_batches()

    def enable(self) -> None:
        """Show bars again."""
        self._enabled = True
        self._hear_batches()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Listen to batches if the bar is shown; else a step costs nothing."""
        super().setup(trainer, pl_module, stage)
        self._hear_batches()

    def _open(self, name: str) -> Any:
        """Return a new bar: "sanity", "train", "validation", "test" or "predict"."""
        raise NotImplementedError

    def _epoch_description(self, trainer: Trainer) -> str:
        return f"Epoch {trainer.current_epoch}"

    def _messages_above(self, bar: Any) -> None:
        """Make log messages appear above ``bar`` until ``_redirected`` is closed."""

    # -- training

    def on_sanity_check_start(self, *_: Any) -> None:
        """Open the bar of the sanity check."""
        self._val_progress_bar = self._open("sanity")

    def on_sanity_check_end(self, *_: Any) -> None:
        """Close it."""
        self._bar("val").close()
        self._val_progress_bar = None
        self.reset_dataloader_idx_tracker()

    def on_train_start(self, *_: Any) -> None:
        """Open the bar of training, and let log messages appear above it."""
        self._train_progress_bar = self._open("train")
        self._messages_above(self._bar("train"))

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        """Start the bar anew for an epoch."""
        if self._leave and self._bar("train").n:
            self._train_progress_bar = self._open("train")
        self._train_batches[0] = -1
        _start(self._bar("train"), self.total_train_batches, self._epoch_description(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Refresh the bar, if it is time to."""
        done = self._train_batches
        if done[0] < 0 and self._train_progress_bar is not None:
            # A resumed run starts in the middle: its speed is not counted from batch 0.
            self._train_progress_bar.initial = batch_idx
        n = done[0] = batch_idx + 1
        if time.monotonic() < self._next_refresh:
            return
        bar = self._train_progress_bar
        if bar is not None and self._should_update(n, bar.total):
            self._refresh(bar, n, self.get_metrics(trainer, pl_module))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the epoch's last state."""
        bar = self._bar("train")
        if not bar.disable:
            self._refresh(bar, max(self._train_batches[0], bar.n), self.get_metrics(trainer, pl_module))
            _write_line(bar)
        if self._leave:
            bar.close()

    def on_train_end(self, *_: Any) -> None:
        """Close the bar of training."""
        self._bar("train").close()
        self._redirected.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the terminal in order: close all bars."""
        for name in ("val", "train", "test", "predict"):
            bar = getattr(self, f"_{name}_progress_bar")
            if bar is not None:
                bar.close()
        self._redirected.close()

    # -- validation, test, prediction

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the bar of validation."""
        if not trainer.sanity_checking:
            self._show_train_state(trainer, pl_module)
            self._val_progress_bar = self._open("validation")

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Start the bar anew for another loader."""
        if self.has_dataloader_changed(dataloader_idx):
            checking = trainer.sanity_checking
            name = self.sanity_check_description if checking else self.validation_description
            total = self.total_val_batches_current_dataloader
            _start(self._bar("val"), total, f"{name} DataLoader {dataloader_idx}")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Refresh the bar, if it is time to."""
        self._evaluated(self._val_progress_bar, batch_idx)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar of validation, and show its values beside that of training."""
        self._bar("val").close()
        if not trainer.sanity_checking:
            self._val_progress_bar = None
        self.reset_dataloader_idx_tracker()
        if not trainer.sanity_checking:
            self._show_train_state(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the bar of the test."""
        self._test_progress_bar = self._open("test")

    def on_test_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Start the bar anew for another loader."""
        if self.has_dataloader_changed(dataloader_idx):
            total = self.total_test_batches_current_dataloader
            _start(self._bar("test"), total, f"{self.test_description} DataLoader {dataloader_idx}")

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Refresh the bar, if it is time to."""
        self._evaluated(self._test_progress_bar, batch_idx)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar of the test."""
        self._bar("test").close()
        self.reset_dataloader_idx_tracker()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the bar of prediction."""
        self._predict_progress_bar = self._open("predict")

    def on_predict_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Start the bar anew for another loader."""
        if self.has_dataloader_changed(dataloader_idx):
            total = self.total_predict_batches_current_dataloader
            _start(self._bar("predict"), total, f"{self.predict_description} DataLoader {dataloader_idx}")

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Refresh the bar, if it is time to."""
        self._evaluated(self._predict_progress_bar, batch_idx)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar of prediction."""
        self._bar("predict").close()
        self.reset_dataloader_idx_tracker()

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print above the bars that are shown."""
        bars = (
            self._train_progress_bar,
            self._val_progress_bar,
            self._test_progress_bar,
            self._predict_progress_bar,
        )
        shown = next((bar for bar in bars if bar is not None and not bar.disable and draws(bar)), None)
        if shown is None:
            print(*args, sep=sep, **{"flush": True, **kwargs})
        else:
            kwargs.pop("flush", None)
            shown.write(sep.join(map(str, args)), **kwargs)

    # -- inside

    def _bar(self, name: str) -> Any:
        bar = getattr(self, f"_{name}_progress_bar")
        if bar is None:
            raise TypeError(
                f"The `{type(self).__name__}._{name}_progress_bar` reference has not been set yet."
            )
        return bar

    def _should_update(self, current: int, total: float | None) -> bool:
        return self.is_enabled and (current % self._every == 0 or current == total)

    def _evaluated(self, bar: Any, batch_idx: int) -> None:
        n = batch_idx + 1
        if bar is None or (time.monotonic() < self._next_refresh and n != bar.total):
            return
        if self._should_update(n, bar.total):
            self._refresh(bar, n, None)

    def _refresh(self, bar: Any, n: int, metrics: dict[str, Any] | None) -> None:
        if bar.disable:
            return
        bar.n = n
        if metrics is not None:
            bar.set_postfix(metrics, refresh=False)
        bar.refresh()
        self._next_refresh = time.monotonic() + self._refresh_seconds

    def _show_train_state(self, trainer: Trainer, pl_module: LightningModule) -> None:
        bar = self._train_progress_bar
        if bar is not None and not bar.disable and trainer.state.fn == TrainerFn.FITTING:
            self._refresh(bar, max(self._train_batches[0], bar.n), self.get_metrics(trainer, pl_module))

    def _hear_batches(self) -> None:
        hooks = [
            f"on_{stage}_batch_{edge}"
            for stage in ("validation", "test", "predict")
            for edge in ("start", "end")
        ]
        change = unsilence if self.is_enabled else lambda bar, *names: silence(bar, DrawnProgressBar, *names)
        change(self, "on_train_batch_end", *hooks)


def _start(bar: Any, total: float | None, description: str) -> None:
    """Set a bar to zero of ``total``."""
    if bar.disable:
        return
    if bar.n and not getattr(bar, "_quiet_lines", True):
        _write_line(bar)  # of the loader before
    bar.set_description(description, refresh=False)
    bar.postfix = None
    bar.reset(total=convert_inf(total))
    if bar.total is not None and convert_inf(total) is None:
        bar.total = None


def convert_inf(total: float | None) -> float | None:
    """Return None for an unknown length, as tqdm writes it."""
    return None if total is None or math.isinf(total) or math.isnan(total) else total


def _write_line(bar: Any) -> None:
    write_line = getattr(bar, "write_line", None)
    if write_line is not None:
        write_line()


def draws(bar: Any) -> bool:
    """Return whether a bar is drawn over itself; else it writes lines."""
    return bool(getattr(bar, "_draws", True))
