"""tqdm's bars as a Trainer shows them: drawn in a terminal, plain lines in a pipe or a file."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, ClassVar

from tqdm import tqdm

# A line this often, where a bar cannot be drawn over itself.
LINE_INTERVAL_SECONDS = 30.0
_NUMBER_WIDTH = 5


def in_notebook() -> bool:
    """Return whether this runs in a Jupyter kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in getattr(shell, "config", {})


class Tqdm(tqdm):  # type: ignore[type-arg]
    """A tqdm bar whose numbers keep their width, and which writes whole lines where there is no terminal.

    Args:
        *args: as for ``tqdm``.
        **kwargs: as for ``tqdm``; ``quiet_lines`` keeps a bar inside another from writing a line at its end.

    Example::

        >>> Tqdm.format_num(0.5)
        '0.500'

    """

    # Bars are refreshed by the callback; a thread that does it once more would only cost time.
    monitor_interval: ClassVar[int] = 0

    def __init__(self, *args: Any, quiet_lines: bool = False, **kwargs: Any) -> None:
        stream = kwargs.get("file") or sys.stderr
        self._draws = _is_terminal(stream)
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
        """Draw the bar; without a terminal write a line, now and then."""
        if self._draws:
            super().display(msg, pos)
            return
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + LINE_INTERVAL_SECONDS
            self.write_line()

    def write_line(self) -> None:
        """Write where the bar stands as a line of its own, unless that was the last line."""
        if self.disable or self._draws:
            return
        state = (self.n, self.total, self.desc, self.postfix)
        if state != self._shown:
            self._shown = state
            self.fp.write(self._line() + "\n")
            self.fp.flush()

    def clear(self, nolock: bool = False) -> None:
        """Take the bar off the screen; a line stays."""
        if self._draws:
            super().clear(nolock)

    def close(self) -> None:
        """End the bar; without a terminal its last state is written as a line."""
        if self._draws or self.disable:
            super().close()
            return
        if not self._quiet_lines and self.n:
            self.write_line()
        self.leave = False
        super().close()

    def moveto(self, n: int) -> None:
        """Move the cursor; nothing to move in a file."""
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
        parts = [
            times,
            *([f"{rate:.2f}it/s"] if rate else []),
            *([str(self.postfix)] if self.postfix else []),
        ]
        description = (self.desc or "").rstrip()
        return f"{description} {done} [{', '.join(parts)}]".strip()


# One thread lock, instead of tqdm's lock between processes, which starts a helper process.
Tqdm.set_lock(threading.RLock())


def _is_terminal(stream: Any) -> bool:
    if in_notebook():
        return True
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # no file, or a closed one
        return False


def notebook_class() -> type[Any]:
    """Return tqdm's bar made of widgets, for notebooks that have them."""
    from tqdm.notebook import tqdm as widgets

    return widgets


def bar_class() -> type[Any]:
    """Return the kind of bar for where this runs."""
    from hasten._lib.optional import installed

    return _Widgets if in_notebook() and installed("ipywidgets") else Tqdm


class _Widgets:
    """Makes a widget bar, without what only lines need."""

    def __new__(cls, *args: Any, quiet_lines: bool = False, **kwargs: Any) -> Any:
        return notebook_class()(*args, **kwargs)
