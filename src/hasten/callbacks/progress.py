"""Progress bars: where the run stands, refreshed by time."""

from __future__ import annotations

import math
import os
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hasten._lib.errors import MisconfigurationException
from hasten.callbacks.progress_base import ProgressBar as ProgressBar
from hasten.callbacks.progress_base import get_standard_metrics as get_standard_metrics
from hasten.callbacks.silent import silence, unsilence
from hasten.loops.states import TrainerFn

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer

# A bar is drawn at most this often: the eye sees no more, and a step must not pay for it.
REFRESH_SECONDS = 0.1


class TQDMProgressBar(ProgressBar):
    """The default bar, drawn with tqdm.

    It is refreshed by time, at most ten times a second, and shows values that have arrived on the host: it
    never makes the device wait. In a pipe or a file it writes whole lines: one at the end of each epoch, and
    one each half minute in between. ``TQDM_DISABLE=1`` in the environment switches it off.

    Args:
        refresh_rate: look at every so many batches only; 0 for no bar.
        process_position: leave this many lines above for bars of your own.
        leave: keep the bar of each epoch in the terminal.

    Raises:
        MisconfigurationException: a number is out of range.

    Example::

        >>> TQDMProgressBar(refresh_rate=0).is_enabled
        False

    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__()
        for name, value in (("refresh_rate", refresh_rate), ("process_position", process_position)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise MisconfigurationException(
                    f"TQDMProgressBar({name}={value!r}): use a whole number, at least 0."
                )
        self._refresh_rate = _resolve_refresh_rate(refresh_rate)
        self._process_position = process_position
        self._leave = leave
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
    def train_progress_bar(self) -> Any:
        """The bar of training."""
        return self._bar("train")

    @train_progress_bar.setter
    def train_progress_bar(self, bar: Any) -> None:
        self._train_progress_bar = bar

    @property
    def val_progress_bar(self) -> Any:
        """The bar of validation."""
        return self._bar("val")

    @val_progress_bar.setter
    def val_progress_bar(self, bar: Any) -> None:
        self._val_progress_bar = bar

    @property
    def test_progress_bar(self) -> Any:
        """The bar of the test."""
        return self._bar("test")

    @test_progress_bar.setter
    def test_progress_bar(self, bar: Any) -> None:
        self._test_progress_bar = bar

    @property
    def predict_progress_bar(self) -> Any:
        """The bar of prediction."""
        return self._bar("predict")

    @predict_progress_bar.setter
    def predict_progress_bar(self, bar: Any) -> None:
        self._predict_progress_bar = bar

    @property
    def refresh_rate(self) -> int:
        """Batches between two looks; 0 when off."""
        return self._refresh_rate

    @property
    def process_position(self) -> int:
        """Lines left above."""
        return self._process_position

    @property
    def is_enabled(self) -> bool:
        """Whether the bar is shown."""
        return self._enabled and self._refresh_rate > 0 and not _switched_off()

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

    # -- the bars; override to change how they look

    def init_sanity_tqdm(self) -> Any:
        """Return the bar of the sanity check."""
        return self._make(self.sanity_check_description, leave=False, quiet_lines=True)

    def init_train_tqdm(self) -> Any:
        """Return the bar of training."""
        return self._make(self.train_description, leave=True, smoothing=0)

    def init_predict_tqdm(self) -> Any:
        """Return the bar of prediction."""
        return self._make(self.predict_description, leave=True, smoothing=0)

    def init_validation_tqdm(self) -> Any:
        """Return the bar of validation: below that of training, or alone."""
        inside = self.trainer.state.fn != TrainerFn.VALIDATING
        return self._make(
            self.validation_description, leave=not inside, position=int(inside), quiet_lines=inside
        )

    def init_test_tqdm(self) -> Any:
        """Return the bar of the test."""
        return self._make(self.test_description, leave=True)

    def _make(self, description: str, *, position: int = 0, **options: Any) -> Any:
        from hasten.callbacks.bars import bar_class

        return bar_class()(
            desc=description,
            position=2 * self._process_position + position,
            disable=self.is_disabled,
            dynamic_ncols=True,
            file=sys.stdout,
            bar_format=self.BAR_FORMAT,
            **options,
        )

    # -- training

    def on_sanity_check_start(self, *_: Any) -> None:
        """Open the bar of the sanity check."""
        self.val_progress_bar = self.init_sanity_tqdm()

    def on_sanity_check_end(self, *_: Any) -> None:
        """Close it."""
        self.val_progress_bar.close()
        self._val_progress_bar = None
        self.reset_dataloader_idx_tracker()

    def on_train_start(self, *_: Any) -> None:
        """Open the bar of training, and let log messages appear above it."""
        self.train_progress_bar = self.init_train_tqdm()
        self._messages_above(self.train_progress_bar)

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        """Start the bar anew for an epoch."""
        if self._leave and self.train_progress_bar.n:
            self.train_progress_bar = self.init_train_tqdm()
        self._train_batches[0] = -1
        _start(self.train_progress_bar, self.total_train_batches, f"Epoch {trainer.current_epoch}")

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
        bar = self.train_progress_bar
        if not bar.disable:
            self._refresh(bar, max(self._train_batches[0], bar.n), self.get_metrics(trainer, pl_module))
            _write_line(bar)
        if self._leave:
            bar.close()

    def on_train_end(self, *_: Any) -> None:
        """Close the bar of training."""
        self.train_progress_bar.close()
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
            self.val_progress_bar = self.init_validation_tqdm()

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
            _start(self.val_progress_bar, total, f"{name} DataLoader {dataloader_idx}")

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
        self.val_progress_bar.close()
        if not trainer.sanity_checking:
            self._val_progress_bar = None
        self.reset_dataloader_idx_tracker()
        if not trainer.sanity_checking:
            self._show_train_state(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the bar of the test."""
        self.test_progress_bar = self.init_test_tqdm()

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
            _start(self.test_progress_bar, total, f"{self.test_description} DataLoader {dataloader_idx}")

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
        self.test_progress_bar.close()
        self.reset_dataloader_idx_tracker()

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the bar of prediction."""
        self.predict_progress_bar = self.init_predict_tqdm()

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
            _start(
                self.predict_progress_bar, total, f"{self.predict_description} DataLoader {dataloader_idx}"
            )

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
        self.predict_progress_bar.close()
        self.reset_dataloader_idx_tracker()

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print above the bars that are shown."""
        bars = (
            self._train_progress_bar,
            self._val_progress_bar,
            self._test_progress_bar,
            self._predict_progress_bar,
        )
        shown = next((bar for bar in bars if bar is not None and not bar.disable and _draws(bar)), None)
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
        return self.is_enabled and (current % self._refresh_rate == 0 or current == total)

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
        self._next_refresh = time.monotonic() + REFRESH_SECONDS

    def _messages_above(self, bar: Any) -> None:
        """Make log messages on the terminal clear the bars first, and draw them again after."""
        self._redirected.close()
        if not bar.disable and _draws(bar):
            import logging

            from tqdm.contrib.logging import logging_redirect_tqdm

            # Only where messages are shown anyway: a logger without a console stays silent.
            loggers = [
                logger
                for logger in (logging.root, logging.getLogger("hasten"))
                if any(
                    getattr(handler, "stream", None) in (sys.stdout, sys.stderr)
                    for handler in logger.handlers
                )
            ]
            self._redirected.enter_context(logging_redirect_tqdm(loggers, tqdm_class=type(bar)))

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
        change = unsilence if self.is_enabled else lambda bar, *names: silence(bar, TQDMProgressBar, *names)
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


def _draws(bar: Any) -> bool:
    return bool(getattr(bar, "_draws", True))


def _switched_off() -> bool:
    return os.environ.get("TQDM_DISABLE", "").lower() not in ("", "0", "false", "no", "off")


def _resolve_refresh_rate(refresh_rate: int) -> int:
    least = os.environ.get("TQDM_MINITERS", "")
    return max(int(least), refresh_rate) if refresh_rate and least.isdigit() else refresh_rate
