"""CSVLogger: values in ``metrics.csv``, hyper-parameters in ``hparams.yaml``."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import os
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.util import Finalize
from typing import Any

from torch import Tensor

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.files import file_system, remove_abandoned, replacing
from hasten._lib.names import without_unknown
from hasten._lib.rank_zero import rank_zero_only, rank_zero_warn
from hasten.elsewhere import conventions
from hasten.loggers.base import as_dict, with_prefix
from hasten.loggers.folders import FolderLogger, entries, exists, is_url, make_writable, write_hparams

# A file behind a URL is written when it has grown by a quarter; a shorter one for each append.
_SMALL_BYTES = 64 * 1024


class _Table:
    """A CSV file on a local disk. It is always one valid table, except for an unfinished last line after a kill."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.columns: list[str] = []
        self.rows = self.size_bytes = 0
        remove_abandoned(os.path.dirname(path))
        if os.path.exists(path):
            self.size_bytes = _cut_unfinished_line(path)
            table = self._read()
            try:
                self.columns = next(table, [])
                self.rows = sum(1 for _ in table)
            except (ValueError, csv.Error) as error:
                what = f"{path} is not a table that a CSVLogger has written ({error}), so no rows can be added."
                raise make_error(ValueError, what, fix="Give another version=, or move the file.") from None

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows at the end; a new name rewrites the file with a further column, in alphabetical order.

        ``OSError`` if the file cannot be written, for instance on a full disk; the rows before are kept.
        """
        if self.rows and not os.path.exists(self.path):
            rank_zero_warn(
                f"{self.path} was removed while the run was writing to it. A new table begins with this row."
            )
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            self.columns, self.rows = [], 0
        columns = sorted({*self.columns, *(name for row in rows for name in row)})
        if columns != sorted(self.columns):
            self._rewrite(columns, self.rows)
        self._write_at_end(_encode((row.get(name) for name in self.columns) for row in rows))
        self.rows += len(rows)

    def keep(self, rows: int) -> None:
        """Drop all but the first ``rows`` rows."""
        if rows < self.rows:
            self._rewrite(self.columns, rows)

    def close(self) -> None:
        """Do nothing: every row is in the file."""

    def _rewrite(self, columns: list[str], rows: int) -> None:
        before = itertools.islice(self._read(), 1, rows + 1) if self.rows else ()
        with replacing(self.path, durable=False) as file:
            file.write(_encode([columns]))
            for old in before:
                values = dict(zip(self.columns, old, strict=False))
                file.write(_encode([[values.get(name, "") for name in columns]]))
            size_bytes = file.tell()
        self.columns, self.rows, self.size_bytes = columns, min(rows, self.rows), size_bytes

    def _write_at_end(self, data: bytes) -> None:
        binary = getattr(os, "O_BINARY", 0)  # Or else Windows makes two bytes of a newline.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | binary, 0o666)
        try:
            written = 0
            while written < len(data):
                written += os.write(descriptor, data[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, self.size_bytes)
            raise OSError(error.errno, f"{error.strerror}; the rows before are whole", self.path) from error
        finally:
            os.close(descriptor)
        self.size_bytes += len(data)

    def _read(self) -> Iterator[list[str]]:
        with open(self.path, newline="", encoding="utf-8") as file:
            yield from (row for row in csv.reader(file) if row)


class _RemoteTable(_Table):
    """A CSV file behind a URL, where files cannot grow: a local copy, written whole now and then."""

    def __init__(self, url: str) -> None:
        self._url, self._system = url, file_system(url)
        folder = tempfile.mkdtemp(prefix="hasten-csv-")
        Finalize(self, shutil.rmtree, (folder, True), exitpriority=0)
        copy = os.path.join(folder, "metrics.csv")
        if exists(url):
            self._system.get_file(url, copy)
        super().__init__(copy)
        self._sent_bytes = self.size_bytes

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows; they are sent when the file has grown by a quarter, or on ``close``."""
        super().append(rows)
        if self.size_bytes <= _SMALL_BYTES or self.size_bytes > 1.25 * self._sent_bytes:
            self.close()

    def keep(self, rows: int) -> None:
        super().keep(rows)
        self.close()

    def close(self) -> None:
        """Send what was not sent yet."""
        if self.size_bytes != self._sent_bytes:
            self._system.put_file(self.path, self._url)
            self._sent_bytes = self.size_bytes


def _encode(rows: Iterable[Iterable[Any]]) -> bytes:
    text = io.StringIO(newline="")
    # Fields with a character of the line terminator are quoted: readers take an unquoted "\r" for the end of a line.
    writer = csv.writer(text, lineterminator="\r\n")
    for row in rows:
        writer.writerow(row)
        text.seek(text.truncate(text.tell() - 2))
        text.write("\n")
    return text.getvalue().encode()


def _cut_unfinished_line(path: str) -> int:
    """Cut off an unfinished last line, left by a killed process; return the size in bytes."""
    with open(path, "r+b") as file:
        size_bytes = sum(len(line) for line in file if line.endswith(b"\n"))
        file.truncate(size_bytes)
    return size_bytes


class ExperimentWriter:
    """The files of one run: what ``logger.experiment`` gives.

    Their folder is made when it does not exist. Rows are appended to a ``metrics.csv`` there.
    """

    NAME_METRICS_FILE = "metrics.csv"
    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(self, log_dir: str) -> None:
        self.log_dir = log_dir
        self.metrics: list[dict[str, Any]] = []
        self.hparams: dict[str, Any] = {}
        self.metrics_file_path = os.path.join(log_dir, self.NAME_METRICS_FILE)
        self._check_log_dir_exists()
        make_writable("CSVLogger", f"save_dir={log_dir!r}", log_dir)
        self.table = (_RemoteTable if is_url(log_dir) else _Table)(self.metrics_file_path)
        # A loop of one's own, with Fabric, calls no finalize(). This one is for the process that has made it alone.
        Finalize(self, _write_rest, (self.table, self.metrics), exitpriority=1)

    def _check_log_dir_exists(self) -> None:
        """Warn about files of an earlier run; subclasses of programs for Lightning override it."""
        log_dir = self.log_dir
        if entries(log_dir):
            starts_over = conventions.current().csv_starts_over
            deleted = "Previous log files in this directory will be deleted when the new ones are saved!"
            appended = f"New rows are appended to its {self.NAME_METRICS_FILE}."
            rank_zero_warn(
                f"Experiment logs directory {log_dir} exists and is not empty. {deleted if starts_over else appended}",
                fix="Give another version= to keep runs apart.",
            )
            if starts_over and exists(self.metrics_file_path):
                system = self._fs if is_url(log_dir) else None
                os.remove(self.metrics_file_path) if system is None else system.rm(self.metrics_file_path)

    def __getattr__(self, name: str) -> Any:
        """Say what has the methods of TensorBoard's writer."""
        what = f"{type(self).__name__!r} object has no attribute {name!r}"
        if not name.startswith("add_"):
            raise AttributeError(f"{what}.", name=name, obj=self)
        raise make_error(
            AttributeError,
            f"{what}: this is the writer of a CSVLogger.",
            fix="Use Trainer(logger=TensorBoardLogger(save_dir)), or self.log() for numbers, which all loggers take.",
            name=name,
            obj=self,
        )

    @property
    def _fs(self) -> Any:
        """The fsspec file system of the folder."""
        return file_system(self.log_dir)

    @property
    def metrics_keys(self) -> list[str]:
        """The columns of the file so far."""
        return self.table.columns

    @metrics_keys.setter
    def metrics_keys(self, columns: Sequence[str]) -> None:
        """Do nothing: programs set the columns that they read from the file, and these are known."""

    def log_metrics(self, metrics_dict: Mapping[str, Any], step: int | None = None) -> None:
        """Add a row, to be written by the next ``save``; ``step`` is the number of buffered rows by default."""
        row = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics_dict.items()}
        self.metrics.append({**row, "step": len(self.metrics) if step is None else step})

    def log_hparams(self, params: Mapping[str, Any]) -> None:
        """Add hyper-parameters and write all of them."""
        self.hparams.update(params)
        write_hparams(os.path.join(self.log_dir, self.NAME_HPARAMS_FILE), self.hparams)

    def save(self) -> None:
        """Append the buffered rows to the file."""
        if self.metrics:
            self.table.append(self.metrics)
            self.metrics.clear()


def _write_rest(table: _Table, rows: list[dict[str, Any]]) -> None:
    if rows and os.path.isdir(os.path.dirname(table.path)):
        table.append(rows)
        table.close()


class _Continued(ExperimentWriter):
    """The files of a run that this process, or the one that the logger comes from, has begun."""

    def _check_log_dir_exists(self) -> None:
        """Keep what is there."""


class CSVLogger(FolderLogger[ExperimentWriter]):
    """Write values to ``<save_dir>/<name>/version_<N>/metrics.csv``, one row each time something is logged.

    Rows are appended; a name that was not logged before rewrites the file once, with a further column.
    A killed run loses at most the rows since the last flush.

    Args:
        save_dir: folder under which the runs are kept, or a URL for fsspec.
        name: name of the experiment, a folder; None or "" for none.
        version: which run it is: N for ``version_N``, or a folder name; the next free N by default. Rows of
            a version that exists are kept, and new ones appended.
        prefix: put before every name, with "-" between.
        flush_logs_every_n_steps: write after this many steps or rows, whichever comes first.

    Raises:
        ValueError: ``name`` or ``version`` would leave ``save_dir``, or a number is out of range.

    Example::

        >>> logger = CSVLogger(tempfile.mkdtemp(), name="digits")
        >>> logger.log_metrics({"loss": 0.25}, step=0)
        >>> logger.finalize("success")
        >>> open(logger.experiment.metrics_file_path).read().split()
        ['loss,step', '0.25,0']

    """

    @without_unknown
    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | os.PathLike[str] | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str | None = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        self._flush_logs_every_n_steps = check.whole(
            "CSVLogger", "flush_logs_every_n_steps", flush_logs_every_n_steps, at_least=1
        )
        self._flushed_at_step = 0
        # The folder in which the logger that this is a copy of writes.
        self._begun: str | None = None

    def _start(self) -> ExperimentWriter:
        return (_Continued if self._begun == self.log_dir else ExperimentWriter)(self.log_dir)

    def __getstate__(self) -> dict[str, Any]:
        # The copy continues the file, which has all rows so far; also in another process.
        self._try_to_save()
        return {**super().__getstate__(), "_begun": self._folder_begun()}

    def _folder_begun(self) -> str | None:
        return self._begun if self._experiment is None else self.log_dir

    def identity(self) -> dict[str, Any]:
        """Return folder, name and version of this run, and whether its files are begun."""
        return {**super().identity(), "begun": self._folder_begun()}

    def take_identity(self, identity: dict[str, Any]) -> None:
        """Take over the run of another process' logger; rows that it has written stay."""
        super().take_identity(identity)
        self._begun = identity.get("begun")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add a row.

        Args:
            metrics: numbers by name; a new name becomes a new column.
            step: index of the optimizer step; the number of buffered rows by default.

        """
        # A writer of the program's own may not have them.
        buffered = getattr(self.experiment, "metrics", ())
        if step is None:
            step = len(buffered)
        self.experiment.log_metrics(with_prefix(metrics, self._prefix, self.LOGGER_JOIN_CHAR), step)
        every = self._flush_logs_every_n_steps
        if len(buffered) >= every or step + 1 - self._flushed_at_step >= every:
            self._flushed_at_step = step + 1
            self.save()

    @rank_zero_only
    def log_hyperparams(
        self, params: dict[str, Any] | Namespace | None = None, metrics: Mapping[str, float] | float | None = None
    ) -> None:
        """Write hyper-parameters to ``hparams.yaml``; ``metrics`` is for other loggers and ignored here."""
        self.experiment.log_hparams(as_dict(params))

    @rank_zero_only
    def save(self) -> None:
        """Append the buffered rows to the file."""
        self.experiment.save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write buffered rows and close the file."""
        if self._experiment is not None:
            self.save()
            if isinstance(self._experiment, ExperimentWriter):
                self._experiment.table.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows written, and where."""
        if not isinstance(self._experiment, ExperimentWriter):
            return {}
        self._try_to_save()
        return {"file": _place(self._experiment.metrics_file_path), "rows": self._experiment.table.rows}

    def _try_to_save(self) -> None:
        # A checkpoint is written also where this file cannot be; the next row, or the end of the run, says why.
        if self._experiment is not None:
            with contextlib.suppress(OSError):
                self._experiment.save()

    @rank_zero_only
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Drop the rows after the checkpoint if the run continues in the same file: they will be logged again."""
        if state.get("file") == _place(self.experiment.metrics_file_path):
            self.experiment.save()
            self.experiment.table.keep(state["rows"])

    def check_beside(self, others: Sequence[object]) -> None:
        """Check that no other CSVLogger writes the same files; under Lightning's names this is a warning.

        Raises:
            MisconfigurationException: one does.

        """
        folders = {_place(other.log_dir) for other in others if isinstance(other, CSVLogger)}
        if not folders or _place(self.log_dir) not in folders:
            return
        what = f"Two CSVLoggers write the same files in {self.log_dir!r}, whose metrics.csv would have rows of both."
        fix = "Give one of them another name= or version=, or leave it out."
        if not conventions.current().mistakes_are_warnings:
            raise MisconfigurationException(what, fix=fix, argument="logger")
        rank_zero_warn(what, fix=fix)


def _place(path: str) -> str:
    return path if is_url(path) else os.path.realpath(path)
