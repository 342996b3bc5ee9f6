"""A CSV file that only grows: rows are appended, and a new column costs no rewriting of a long file.

A short file (up to ``SMALL_BYTES``) is rewritten with sorted columns when a column is new; that cost has a
bound. In a longer one the header gets room to grow: spaces in front of a number in the first row, which every
reader of CSV skips. A new column takes its name's length from that room, in place, and the rows before it
simply end earlier, which readers fill with missing values. So the cost of a row does not depend on how long
the file is, and whatever moment the process dies at, the file is one table.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hasten.loggers.folders import exists, file_system, write_whole

SMALL_BYTES = 64 * 1024
ROOM_BYTES = 1024
# A write within one page is not cut in two when the process is killed.
_PAGE_BYTES = 4096

Row = Mapping[str, Any]


class LocalTable:
    """A CSV file on a local disk.

    Args:
        path: the file; when it exists, rows are appended to it.

    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.columns: list[str] = []
        self._size = 0
        self._first_row: list[str] | None = None  # of a long file: its fields, to move the room in
        self._count: int | None = 0  # of rows; None until it is asked for, in a file of an earlier run
        self._descriptor: int | None = None
        self._closing: Any = None
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{path}.tmp")  # left by a process killed while it added a column
        if os.path.exists(path):
            self._take_over()

    def append(self, rows: Sequence[Row]) -> None:
        """Write rows at the end; what they name that is no column yet becomes one.

        Raises:
            OSError: the disk is full or the file cannot be written; it is as it was before.

        """
        new = sorted({name for row in rows for name in row} - set(self.columns))
        if new:
            self._add_columns(new)
        self._write_at_end(_encode((row.get(name) for name in self.columns) for row in rows))
        if self._count is not None:
            self._count += len(rows)
        if self._size > SMALL_BYTES and self._first_row is None:
            self._rewrite(self.columns)

    def count(self) -> int:
        """Return the number of rows in the file."""
        if self._count is None:
            self._count = sum(1 for _ in self._rows())
        return self._count

    def keep(self, rows: int) -> None:
        """Drop all but the first ``rows`` rows; the file is the old one or the new one, whole, at any moment."""
        if rows < self.count():
            self._rewrite(self.columns, rows)
            self._count = rows

    def close(self) -> None:
        """Let go of the file; a later ``append`` opens it again."""
        if self._closing is not None:
            self._closing()
        self._descriptor = self._closing = None

    def _add_columns(self, new: list[str]) -> None:
        if self._size <= SMALL_BYTES:
            self._rewrite(sorted([*self.columns, *new]))
        elif not self._grow_header(new):
            self._rewrite([*self.columns, *new])

    def _rewrite(self, columns: list[str], rows: int | None = None) -> None:
        """Write the file anew (its first ``rows`` rows), beside the old one, which it then replaces."""
        old = itertools.islice(self._rows(), rows) if self._size else iter(())
        place = {name: i for i, name in enumerate(self.columns)}
        order = [place.get(name) for name in columns]
        first: list[str] | None = None
        beside = f"{self.path}.tmp"
        try:
            with open(beside, "wb") as file:
                header = _encode([columns])
                row = next(old, None) if self._size > SMALL_BYTES else None
                if row is not None:
                    first = [_at(row, i).strip() for i in order]
                    file.write(_head(header, first, room=max(ROOM_BYTES, len(header))))
                else:
                    file.write(header)
                for row in old:
                    file.write(_encode([[_at(row, i) for i in order]]))
                size = file.tell()
            self.close()
            os.replace(beside, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(beside)
            raise
        self.columns, self._size, self._first_row = columns, size, first

    def _grow_header(self, new: list[str]) -> bool:
        """Write new names into the room after the header; False if there is not enough of it."""
        first = self._first_row
        if first is None:
            return False
        columns = [*self.columns, *new]
        if any("\n" in field for field in (*columns, *first)):
            return False  # header and first row are then not the first two lines
        with open(self.path, "r+b", buffering=0) as file:
            old = file.readline()
            old += file.readline()
            header = _encode([columns])
            room = len(old) - len(header) - len(_encode([first]))
            if room < 0:
                return False
            head = _head(header, first, room)
            changed = [i for i in range(len(old)) if head[i] != old[i]]
            start, end = changed[0], changed[-1] + 1
            if start // _PAGE_BYTES != (end - 1) // _PAGE_BYTES:
                return False
            os.pwrite(file.fileno(), head[start:end], start)
        self.columns = columns
        return True

    def _write_at_end(self, data: bytes) -> None:
        descriptor = self._descriptor
        if descriptor is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
            descriptor = self._descriptor = os.open(self.path, flags, 0o666)
            self._closing = weakref.finalize(self, os.close, descriptor)
        try:
            written = os.write(descriptor, data)
            while written < len(data):
                written += os.write(descriptor, data[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, self._size)
            raise OSError(error.errno, f"{error.strerror}; the rows before are whole", self.path) from error
        self._size += len(data)

    # -- a file of an earlier run

    def _take_over(self) -> None:
        self._size = _without_torn_end(self.path)
        if not self._size:
            os.remove(self.path)
            return
        self._count = None
        rows = self._rows(with_header=True)
        self.columns = next(rows)
        if self._size > SMALL_BYTES:
            first = next(rows, None)
            if first is not None and any(field.startswith(" ") for field in first):
                self._first_row = [field.strip() for field in first]

    def _rows(self, *, with_header: bool = False) -> Iterator[list[str]]:
        with open(self.path, newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            if not with_header:
                next(rows, None)
            yield from (row for row in rows if row)


class RemoteTable:
    """A CSV file behind a URL, where files cannot grow: written whole, seldom enough to keep a row cheap.

    Args:
        path: the URL; when it exists, rows are appended to it.

    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.columns: list[str] = []
        self._rows: list[bytes] = []
        self._size = self._written = 0
        if exists(path):
            with file_system(path).open(path, "rb") as file:
                header, _, rest = file.read().partition(b"\n")
            self.columns = next(csv.reader([header.decode()]), [])
            self._rows = [rest]
            self._size = self._written = len(rest)

    def append(self, rows: Sequence[Row]) -> None:
        """Add rows; they are written when the file has grown by a quarter, or on ``close``."""
        self.columns += sorted({name for row in rows for name in row} - set(self.columns))
        data = _encode((row.get(name) for name in self.columns) for row in rows)
        self._rows.append(data)
        self._size += len(data)
        if self._size <= SMALL_BYTES or self._size > 1.25 * self._written:
            self._write()

    def count(self) -> int:
        """Return the number of rows."""
        return sum(1 for _ in self._read())

    def keep(self, rows: int) -> None:
        """Drop all but the first ``rows`` rows."""
        if rows < self.count():
            self._rows = [_encode(itertools.islice(self._read(), rows))]
            self._size = len(self._rows[0])
            self._write()

    def close(self) -> None:
        """Write what is not written yet."""
        if self._size != self._written:
            self._write()

    def _read(self) -> Iterator[list[str]]:
        text = b"".join(self._rows).decode()
        return (row for row in csv.reader(io.StringIO(text, newline="")) if row)

    def _write(self) -> None:
        self._rows = [b"".join(self._rows)]
        write_whole(self.path, _encode([self.columns]) + self._rows[0])
        self._written = self._size


class _Lines:
    """What ``csv.writer`` writes to: a list of lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.write = self.lines.append


def _encode(rows: Iterable[Iterable[Any]]) -> bytes:
    sink = _Lines()
    csv.writer(sink, lineterminator="\n").writerows(rows)
    return "".join(sink.lines).encode()


def _head(header: bytes, first: list[str], room: int) -> bytes:
    """Return header and first row, with ``room`` spaces before the first number of the row."""
    at = next((i for i, field in enumerate(first) if _is_number(field)), None)
    if at is None:
        return header + _encode([first])
    padded = [*first[:at], " " * room + first[at], *first[at + 1 :]]
    return header + _encode([padded])


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _at(row: list[str], index: int | None) -> str:
    return row[index] if index is not None and index < len(row) else ""


def _without_torn_end(path: str) -> int:
    """Cut off an unfinished last line, left by a killed process; return the size in bytes."""
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end:
            start = max(0, end - _PAGE_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end != size:
            file.truncate(end)
    return end
