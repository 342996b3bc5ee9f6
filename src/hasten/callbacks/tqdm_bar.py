"""Tqdm: a tqdm bar of constant width, which writes whole lines to a file or pipe."""

from __future__ import annotations

import io
import sys
import threading
import time
from typing import Any, ClassVar

from tqdm import tqdm

from hasten.machine.host import in_notebook

# Seconds between two lines, if a bar cannot be redrawn in place.
LINE_INTERVAL_SECONDS = 30.0
_NUMBER_WIDTH = 5


class Tqdm(tqdm):  # type: ignore[type-arg]
    """A tqdm bar whose numbers keep their width, and which writes whole lines to files and pipes.

    Args:
        *args: as for ``tqdm``.
        **kwargs: as for ``tqdm``; in files and pipes, ``leave=False`` writes no line at the end.

    Example::

        >>> Tqdm.format_num(0.5)
        '0.500'

    """

    # The callback refreshes bars; tqdm's monitor thread would only cost time.
    monitor_interval: ClassVar[int] = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._draws = is_terminal(kwargs.get("file") or sys.stderr)
        self._output = NotebookText() if in_notebook() else None
        if self._output is not None or not (kwargs.get("file") or sys.stderr):
            # tqdm itself would write each drawing into the notebook's file. pythonw has no output.
            kwargs["file"] = io.StringIO()
        self._next_line = time.monotonic() + LINE_INTERVAL_SECONDS
        self._shown: tuple[Any, ...] | None = None
        # Of training, which a line shows besides the postfix.
        self.loss: float | None = None
        super().__init__(*args, **kwargs)  # type: ignore[call-overload]

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
        if self._output is not None:
            self._output.show(str(self) if msg is None else msg)
            return
        if self._draws:
            super().display(msg, pos)
            return
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = self.next_line_after(now)
            self.write_line()

    def next_line_after(self, now: float) -> float:
        """Return when the next line is due, in seconds of ``time.monotonic``."""
        return now + LINE_INTERVAL_SECONDS

    def as_line(self) -> str:
        """Return the bar as a line."""
        # With zero columns, tqdm draws no bar and does not cut the line.
        looks = {"ncols": 0, "bar_format": None, "prefix": (self.desc or "").removesuffix(": ")}
        return self.format_meter(**{**self.format_dict, **looks})

    def write_line(self) -> None:
        """Write the state of the bar as a line, unless the previous line was the same."""
        if self.disable or self._draws:
            return
        state = (self.n, self.total, self.desc, self.postfix, self.loss)
        if state != self._shown:
            self._shown = state
            self.fp.write(self.as_line() + "\n")
            self.fp.flush()

    def clear(self, nolock: bool = False) -> None:
        """Remove the bar from the screen; a line stays."""
        if self._draws:
            super().clear(nolock)

    def close(self) -> None:
        """End the bar; without a terminal its last state is written as a line."""
        if not self._draws and not self.disable:
            if self.leave and self.n:
                self.write_line()
            leave, self.leave = self.leave, False
            super().close()
            self.leave = leave
            return
        super().close()

    def moveto(self, n: int) -> None:
        """Move the cursor of a terminal."""
        if self._draws:
            super().moveto(n)


class NotebookText:
    """A text in the output of a notebook's cell that is replaced in place: the file keeps its last state only."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Show a text in place of the one before."""
        content = {"text/plain": text}
        if self._handle is not None:
            self._handle.update(content, raw=True)
        elif text:
            # A notebook has imported it.
            display: Any = sys.modules["IPython.display"]
            self._handle = display.display(content, raw=True, display_id=True)


# A lock between threads, instead of tqdm's lock between processes, which starts a helper process.
Tqdm.set_lock(threading.RLock())


def is_terminal(stream: object) -> bool:
    """Return whether bars can be redrawn in place there."""
    if in_notebook():
        return True
    try:
        return bool(stream.isatty())  # type: ignore[attr-defined]
    except (AttributeError, ValueError):  # not a file, or a closed one
        return False
