"""TQDMProgressBar: the default bar, drawn in a terminal and written as plain lines to a pipe or a file."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import Any, ClassVar

from tqdm import tqdm

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException
from hasten._lib.optional import installed
from hasten.callbacks.progress import DrawnProgressBar, draws
from hasten.loops.progress import TrainerFn
from hasten.machine.host import in_notebook

# Seconds between two lines, where a bar cannot be drawn over itself.
LINE_INTERVAL_SECONDS = 30.0
_NUMBER_WIDTH = 5


class TQDMProgressBar(DrawnProgressBar):
    """The default bar, drawn with tqdm.

    It is refreshed by time, at most ten times a second, and shows values that have arrived on the host: the device
    never waits for it. To a pipe or a file it writes whole lines: one at the end of each epoch, and one each half
    minute in between. ``TQDM_DISABLE=1`` in the environment switches it off.

    Args:
        refresh_rate: refresh after every n-th batch only; 0 for no bar.
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
            check.whole("TQDMProgressBar", name, value, at_least=0, error=MisconfigurationException)
        minimum = os.environ.get("TQDM_MINITERS", "")
        if refresh_rate and minimum.isdigit():
            refresh_rate = max(int(minimum), refresh_rate)
        self._refresh_rate = self._every = refresh_rate
        self._process_position = process_position
        self._leave = leave

    @property
    def refresh_rate(self) -> int:
        """Batches between two refreshes; 0 when off."""
        return self._refresh_rate

    @property
    def process_position(self) -> int:
        """Lines left above."""
        return self._process_position

    @property
    def is_enabled(self) -> bool:
        """Whether the bar is shown."""
        disabled = os.environ.get("TQDM_DISABLE", "").lower() not in ("", "0", "false", "no", "off")
        return self._enabled and self._refresh_rate > 0 and not disabled

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

    def _make(self, description: str, *, position: int = 0, quiet_lines: bool = False, **options: Any) -> Any:
        options |= {
            "desc": description,
            "position": 2 * self._process_position + position,
            "disable": self.is_disabled,
            "dynamic_ncols": True,
            "file": sys.stdout,
            "bar_format": self.BAR_FORMAT,
        }
        if in_notebook() and installed("ipywidgets"):
            from tqdm.notebook import tqdm as widgets

            return widgets(**options)
        return Tqdm(quiet_lines=quiet_lines, **options)

    def _open(self, name: str) -> Any:
        return getattr(self, f"init_{name}_tqdm")()

    def _messages_above(self, bar: Any) -> None:
        """Make log messages on the terminal clear the bars first, and redraw them afterwards."""
        self._redirected.close()
        if bar.disable or not draws(bar):
            return
        from tqdm.contrib.logging import logging_redirect_tqdm

        # Only loggers that write to the terminal anyway: a logger without a console stays silent.
        terminals = (sys.stdout, sys.stderr)
        loggers = [
            logger
            for logger in (logging.root, logging.getLogger("hasten"))
            if any(getattr(handler, "stream", None) in terminals for handler in logger.handlers)
        ]
        self._redirected.enter_context(logging_redirect_tqdm(loggers, tqdm_class=type(bar)))


class Tqdm(tqdm):  # type: ignore[type-arg]
    """A tqdm bar whose numbers keep their width, and which writes whole lines where there is no terminal.

    Args:
        *args: as for ``tqdm``.
        **kwargs: as for ``tqdm``; ``quiet_lines`` keeps a bar inside another from writing a line at its end.

    Example::

        >>> Tqdm.format_num(0.5)
        '0.500'

    """

    # The callback refreshes bars; tqdm's monitor thread would only cost time.
    monitor_interval: ClassVar[int] = 0

    def __init__(self, *args: Any, quiet_lines: bool = False, **kwargs: Any) -> None:
        self._draws = _is_terminal(kwargs.get("file") or sys.stderr)
        self._quiet_lines = quiet_lines
        self._next_line = time.monotonic() + LINE_INTERVAL_SECONDS
        self._shown: tuple[Any, ...] | None = None
        super().__init__(*args, **kwargs)

    @staticmethod
    def format_num(n: float | str) -> str:
        """Return a number with a fixed width where possible, so that the bar does not flicker."""
        text = n if isinstance(n, str) else tqdm.format_num(n)
        if not isinstance(n, (float, str)) or "e" in text:
            return text
        if "." not in text and len(text) < _NUMBER_WIDTH:
            try:
                float(text)
            except ValueError:
                return text
            text += "."
        return text + "0" * (_NUMBER_WIDTH - len(text))

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Draw the bar; without a terminal write a line, at most one each ``LINE_INTERVAL_SECONDS``."""
        if self._draws:
            super().display(msg, pos)
            return
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + LINE_INTERVAL_SECONDS
            self.write_line()

    def write_line(self) -> None:
        """Write the state of the bar as a line, unless the previous line was the same."""
        if self.disable or self._draws:
            return
        state = (self.n, self.total, self.desc, self.postfix)
        if state != self._shown:
            self._shown = state
            self.fp.write(self._line() + "\n")
            self.fp.flush()

    def clear(self, nolock: bool = False) -> None:
        """Remove the bar from the screen; a line stays."""
        if self._draws:
            super().clear(nolock)

    def close(self) -> None:
        """End the bar; without a terminal its last state is written as a line."""
        if not self._draws and not self.disable:
            if not self._quiet_lines and self.n:
                self.write_line()
            self.leave = False
        super().close()

    def moveto(self, n: int) -> None:
        """Move the cursor of a terminal."""
        if self._draws:
            super().moveto(n)

    def _line(self) -> str:
        state = self.format_dict
        elapsed, total, rate = state["elapsed"], self.total, state["rate"]
        done = f"{self.n}/{total}" if total else f"{self.n}"
        if not rate and elapsed > 0:
            rate = (self.n - self.initial) / elapsed
        times = self.format_interval(elapsed)
        if total and rate and self.n < total:
            times += "<" + self.format_interval((total - self.n) / rate)
        parts = [times, f"{rate:.2f}it/s" if rate else "", str(self.postfix or "")]
        description = (self.desc or "").rstrip()
        return f"{description} {done} [{', '.join(filter(None, parts))}]".strip()


# A lock between threads, instead of tqdm's lock between processes, which starts a helper process.
Tqdm.set_lock(threading.RLock())


def _is_terminal(stream: Any) -> bool:
    if in_notebook():
        return True
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # not a file, or a closed one
        return False
