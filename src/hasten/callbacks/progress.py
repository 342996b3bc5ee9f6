"""Progress bars: where the run stands, refreshed by time."""

from __future__ import annotations

import os
import sys
from typing import Any

from hasten._lib.errors import MisconfigurationException
from hasten.callbacks.progress_base import ProgressBar as ProgressBar
from hasten.callbacks.progress_base import get_standard_metrics as get_standard_metrics
from hasten.callbacks.progress_drawn import REFRESH_SECONDS as REFRESH_SECONDS
from hasten.callbacks.progress_drawn import DrawnProgressBar, draws
from hasten.callbacks.progress_drawn import convert_inf as convert_inf
from hasten.loops.states import TrainerFn


class TQDMProgressBar(DrawnProgressBar):
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
        self._every = self._refresh_rate
        self._process_position = process_position
        self._leave = leave

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

    # -- inside

    def _open(self, name: str) -> Any:
        make = {
            "sanity": self.init_sanity_tqdm,
            "train": self.init_train_tqdm,
            "validation": self.init_validation_tqdm,
            "test": self.init_test_tqdm,
            "predict": self.init_predict_tqdm,
        }
        return make[name]()

    def _messages_above(self, bar: Any) -> None:
        """Make log messages on the terminal clear the bars first, and draw them again after."""
        self._redirected.close()
        if not bar.disable and draws(bar):
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


def _switched_off() -> bool:
    return os.environ.get("TQDM_DISABLE", "").lower() not in ("", "0", "false", "no", "off")


def _resolve_refresh_rate(refresh_rate: int) -> int:
    least = os.environ.get("TQDM_MINITERS", "")
    return max(int(least), refresh_rate) if refresh_rate and least.isdigit() else refresh_rate
