"""CSV files that grow: rows are appended, and a new column rewrites the file."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hasten._lib.files import file_system, remove_abandoned, replacing
from hasten.loggers.folders import exists, write_whole

Row = Mapping[str, Any]

# A remote file is written when it has grown by a quarter; a shorter one for each append.
_SMALL_BYTES = 64 * 1024


class LocalTable:
    """A CSV file on a local disk. At any moment it is one table, but for an unfinished last line after a kill.

    Args:
        path: the file; when it exists, rows are appended to it.

    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.columns: list[str] = []
        self._rows = self._size_bytes = 0
        remove_abandoned(os.path.dirname(path))
        if os.path.exists(path):
            self._size_bytes = _cut_unfinished_line(path)
            table = self._read()
            self.columns = next(table, [])
            self._rows = sum(1 for _ in table)

    def append(self, rows: Sequence[Row]) -> None:
        """Write rows at the end; a name that is not a column yet becomes one, in alphabetical order.

        Raises:
            OSError: the disk is full or the file cannot be written; the rows before are kept.

        """
        columns = sorted({*self.columns, *(name for row in rows for name in row)})
        if columns != sorted(self.columns):
            self._rewrite(columns, self._rows)
        self._write_at_end(_encode((row.get(name) for name in self.columns) for row in rows))
        self._rows += len(rows)

    def count(self) -> int:
        """Return the number of rows in the file."""
        return self._rows

    def keep(self, rows: int) -> None:
        """Drop all but the first ``rows`` rows."""
        if rows < self._rows:
            self._rewrite(self.columns, rows)

    def close(self) -> None:
        """Do nothing: every row is in the file."""

    def _rewrite(self, columns: list[str], rows: int) -> None:
        index = {name: i for i, name in enumerate(self.columns)}
        with replacing(self.path, durable=False) as file:
            file.write(_encode([columns]))
            if self._rows:
                for old in itertools.islice(self._read(), 1, rows + 1):
                    values = dict(zip(index, old, strict=False))
                    file.write(_encode([[values.get(name, "") for name in columns]]))
            size_bytes = file.tell()
        self.columns, self._rows, self._size_bytes = columns, rows, size_bytes

    def _write_at_end(self, data: bytes) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            written = 0
            while written < len(data):
                written += os.write(descriptor, data[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, self._size_bytes)
            raise OSError(error.errno, f"{error.strerror}; the rows before are whole", self.path) from error
        finally:
            os.close(descriptor)
        self._size_bytes += len(data)

    def _read(self) -> Iterator[list[str]]:
        """Yield the header and the rows."""
        with open(self.path, newline="", encoding="utf-8") as file:
            yield from (row for row in csv.reader(file) if row)


class RemoteTable:
    """A CSV file behind a URL, where files cannot grow: written whole, seldom enough to keep a row cheap.

    Args:
        path: the URL; when it exists, rows are appended to it.

    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.columns: list[str] = []
        self._body = bytearray()
        if exists(path):
            with file_system(path).open(path, "rb") as file:
                header, _, body = file.read().partition(b"\n")
            self._body += body
            self.columns = next(csv.reader([header.decode()]), [])
        self._written_bytes = len(self._body)

    def append(self, rows: Sequence[Row]) -> None:
        """Add rows; they are written when the file has grown by a quarter, or on ``close``."""
        self.columns += sorted({name for row in rows for name in row} - set(self.columns))
        self._body += _encode((row.get(name) for name in self.columns) for row in rows)
        if len(self._body) <= _SMALL_BYTES or len(self._body) > 1.25 * self._written_bytes:
            self._write()

    def count(self) -> int:
        """Return the number of rows."""
        return sum(1 for _ in self._read())

    def keep(self, rows: int) -> None:
        """Drop all but the first ``rows`` rows."""
        if rows < self.count():
            self._body = bytearray(_encode(itertools.islice(self._read(), rows)))
            self._write()

    def close(self) -> None:
        """Write what is not written yet."""
        if len(self._body) != self._written_bytes:
            self._write()

    def _read(self) -> Iterator[list[str]]:
        return (row for row in csv.reader(io.StringIO(self._body.decode(), newline="")) if row)

    def _write(self) -> None:
        write_whole(self.path, _encode([self.columns]) + self._body)
        self._written_bytes = len(self._body)


def _encode(rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _cut_unfinished_line(path: str) -> int:
    """Cut off an unfinished last line, left by a killed process; return the size in bytes."""
    with open(path, "r+b") as file:
        size_bytes = sum(len(line) for line in file if line.endswith(b"\n"))
        file.truncate(size_bytes)
    return size_bytes
