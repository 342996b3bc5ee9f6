"""Record: what a fit writes about itself to ``run.jsonl``, one JSON object per line."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from typing import Any

from hasten._lib.rank_zero import rank_zero_warn

FILE_NAME = "run.jsonl"
FORMAT = 1
# Lines are written about this often: a reader can follow a run, and training does not wait for the disk.
FLUSH_SECONDS = 2.0
_JSON = json.JSONEncoder(allow_nan=False, default=str)


class NoRecord:
    """A record that is written nowhere.

    Example::

        >>> NoRecord().add("row", step=0, epoch=0, values={"loss": 0.5})

    """

    writes = False

    def add(self, kind: str, **fields: object) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""


class Record(NoRecord):
    """The lines of a fit, appended to a file.

    A process that is killed loses the lines of the last two seconds. If the file cannot be written (the disk is full,
    the folder was removed), a warning says so once, and the fit continues without its record.

    It is made when the first lines are written. While ``ready`` returns False lines wait, until ``flush`` is called.

    Example::

        >>> import tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "run.jsonl")
        >>> record = Record(path)
        >>> record.add("row", step=9, epoch=0, values={"loss": math.nan})
        >>> record.flush()
        >>> json.loads(open(path).read())["values"]
        {'loss': 'nan'}

    """

    writes = True

    def __init__(self, path: str | os.PathLike[str], *, ready: Callable[[], bool] | None = None) -> None:
        self.path = os.fspath(path)
        self._ready = ready
        self._lines: list[dict[str, Any] | Callable[[], dict[str, Any]]] = []
        self._next = 0.0

    def add(self, kind: str, **fields: object) -> None:
        """Add a line about "start", "row", "speed", ... with plain data; it is written with the next ones."""
        self.add_line({"kind": kind, "time": time.time(), **fields})
        if time.monotonic() >= self._next and (self._ready is None or self._ready()):
            self.flush()

    def add_line(self, line: dict[str, Any] | Callable[[], dict[str, Any]]) -> None:
        """Add a whole line, or a function that makes it when it is written."""
        if self.writes:
            self._lines.append(line)

    def flush(self) -> None:
        """Write the lines that are waiting."""
        # Not by the clock of the day, which may be set back.
        self._next = time.monotonic() + FLUSH_SECONDS
        if not self._lines or not self.writes:
            return
        lines, self._lines = self._lines, []
        text = "".join(_encode(line() if callable(line) else line) for line in lines)
        try:
            self._write(text.encode())
        except OSError as error:
            self.writes = False
            rank_zero_warn(
                f"The record of this run cannot be written to {self.path}: {error.strerror}. Training continues "
                "without it; `hasten report` will show the run up to here."
            )

    def _write(self, data: bytes) -> None:
        # Not created again where somebody has removed the folder of the run.
        binary = getattr(os, "O_BINARY", 0)  # Windows would write other line ends.
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | binary, 0o666)
        try:
            if os.fstat(descriptor).st_size:
                os.lseek(descriptor, -1, os.SEEK_END)
                if os.read(descriptor, 1) != b"\n":
                    # The line that an earlier attempt was writing when it was killed.
                    data = b"\n" + data
            while data:
                data = data[os.write(descriptor, data) :]
        finally:
            os.close(descriptor)


def _encode(line: dict[str, Any]) -> str:
    try:
        return _JSON.encode(line) + "\n"
    except ValueError:
        return _JSON.encode(_finite(line)) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value
