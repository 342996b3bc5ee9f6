"""CSVLogger: values in ``metrics.csv``, hyper-parameters in ``hparams.yaml``."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hasten._lib import check
from hasten._lib.rank_zero import rank_zero_only, rank_zero_warn
from hasten.loggers.base import as_dict, rank_zero_experiment, with_prefix
from hasten.loggers.csv_table import LocalTable, RemoteTable
from hasten.loggers.folders import FolderLogger, entries, is_url, make_writable, write_hparams


class ExperimentWriter:
    """The files of one run: what ``logger.experiment`` gives.

    Args:
        log_dir: folder of the run; made when it does not exist. Rows are appended to a ``metrics.csv`` there.

    """

    NAME_METRICS_FILE = "metrics.csv"
    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(self, log_dir: str) -> None:
        self.log_dir = log_dir
        self.metrics: list[dict[str, Any]] = []
        self.hparams: dict[str, Any] = {}
        self.metrics_file_path = os.path.join(log_dir, self.NAME_METRICS_FILE)
        if entries(log_dir):
            rank_zero_warn(
                f"Experiment logs directory {log_dir} exists and is not empty. New rows are appended to its "
                f"{self.NAME_METRICS_FILE}; give another version= to keep runs apart."
            )
        make_writable("CSVLogger", f"save_dir={log_dir!r}", log_dir)
        table = RemoteTable if is_url(log_dir) else LocalTable
        self._table = table(self.metrics_file_path)

    @property
    def metrics_keys(self) -> list[str]:
        """The columns of the file so far."""
        return self._table.columns

    def log_metrics(self, metrics_dict: Mapping[str, Any], step: int | None = None) -> None:
        """Add a row, to be written by the next ``save``; ``step`` is the number of buffered rows by default."""
        row = {
            name: value.item() if isinstance(value, Tensor) else value for name, value in metrics_dict.items()
        }
        row["step"] = len(self.metrics) if step is None else step
        self.metrics.append(row)

    def log_hparams(self, params: Mapping[str, Any]) -> None:
        """Add hyper-parameters and write all of them."""
        self.hparams.update(params)
        write_hparams(os.path.join(self.log_dir, self.NAME_HPARAMS_FILE), self.hparams)

    def save(self) -> None:
        """Append the buffered rows to the file."""
        if self.metrics:
            self._table.append(self.metrics)
            self.metrics = []

    def rows(self) -> int:
        """Write buffered rows and return the number of rows in the file."""
        self.save()
        return self._table.count()

    def keep(self, rows: int) -> None:
        """Drop all but the first ``rows`` rows."""
        self.save()
        self._table.keep(rows)

    def close(self) -> None:
        """Write buffered rows and close the file."""
        self.save()
        self._table.close()


class CSVLogger(FolderLogger):
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

        >>> import tempfile
        >>> logger = CSVLogger(tempfile.mkdtemp(), name="digits")
        >>> logger.log_metrics({"loss": 0.25}, step=0)
        >>> logger.finalize("success")
        >>> open(logger.experiment.metrics_file_path).read().split()
        ['loss,step', '0.25,0']

    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        self._flush_logs_every_n_steps = check.whole(
            "CSVLogger", "flush_logs_every_n_steps", flush_logs_every_n_steps, at_least=1
        )
        self._rows_since_flush = 0
        self._flushed_at_step = 0

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """The writer of this run's files; made when it is first read."""
        if self._experiment is None:
            self._experiment = ExperimentWriter(self.log_dir)
        writer: ExperimentWriter = self._experiment
        return writer

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add a row.

        Args:
            metrics: numbers by name; a name not logged before becomes a new column.
            step: index of the optimizer step; the number of buffered rows by default.

        """
        experiment = self.experiment
        if step is None:
            step = len(experiment.metrics)
        experiment.log_metrics(with_prefix(metrics, self._prefix, self.LOGGER_JOIN_CHAR), step)
        self._rows_since_flush += 1
        every = self._flush_logs_every_n_steps
        if self._rows_since_flush >= every or step + 1 - self._flushed_at_step >= every:
            self._flushed_at_step = step + 1
            self._rows_since_flush = 0
            self.save()

    @rank_zero_only
    def log_hyperparams(
        self,
        params: dict[str, Any] | Namespace | None = None,
        metrics: Mapping[str, float] | float | None = None,
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
            self._experiment.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows written, and where."""
        if self._experiment is None:
            return {}
        return {"file": _place(self._experiment.metrics_file_path), "rows": self._experiment.rows()}

    @rank_zero_only
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Drop the rows after the checkpoint if the run continues in the same file: they will be logged again."""
        if state and state["file"] == _place(self.experiment.metrics_file_path):
            self.experiment.keep(state["rows"])


def _place(path: str) -> str:
    return path if is_url(path) else os.path.realpath(path)
