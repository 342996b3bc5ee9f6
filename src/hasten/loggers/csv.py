"""CSVLogger: values in ``metrics.csv``, hyper-parameters in ``hparams.yaml``."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hasten._lib.rank_zero import rank_zero_only, rank_zero_warn
from hasten.loggers.base import Logger, as_dict, rank_zero_experiment, with_prefix, write_hparams
from hasten.loggers.csv_table import LocalTable, RemoteTable
from hasten.loggers.folders import entries, is_url, local, make_writable, next_version, version_folder


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
        """Add a row, to be written by the next ``save``; ``step`` is the number of rows held back by default."""
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
        """Append the rows held back to the file."""
        if self.metrics:
            self._table.append(self.metrics)
            self.metrics = []

    def rows(self) -> int:
        """Return the number of rows in the file, after writing what is held back."""
        self.save()
        return self._table.count()

    def keep(self, rows: int) -> None:
        """Drop all but the first ``rows`` rows."""
        self.save()
        self._table.keep(rows)

    def close(self) -> None:
        """Write what is held back and let go of the file."""
        self.save()
        self._table.close()


class CSVLogger(Logger):
    """Write values to ``<save_dir>/<name>/version_<N>/metrics.csv``, one row each time something is logged.

    The file is only appended to, and writing a row takes as long at the end of a run as at its beginning.
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

    LOGGER_JOIN_CHAR = "-"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        if not isinstance(flush_logs_every_n_steps, int) or flush_logs_every_n_steps < 1:
            raise ValueError(
                f"CSVLogger(flush_logs_every_n_steps={flush_logs_every_n_steps!r}): use a whole number of at "
                "least 1."
            )
        self._save_dir = folder_argument("CSVLogger", save_dir)
        self._name = name_argument("CSVLogger", name)
        self._version = version_argument("CSVLogger", version)
        self._prefix = prefix
        self._flush_logs_every_n_steps = flush_logs_every_n_steps
        self._rows_since_flush = 0
        self._flushed_at_step = 0
        self._experiment: ExperimentWriter | None = None

    @property
    def name(self) -> str:
        """Name of the experiment."""
        return self._name

    @property
    def version(self) -> int | str:
        """Which run of the experiment this is; the next free number is taken when it is first asked for."""
        if self._version is None:
            self._version = next_version(self._runs)
        return self._version

    @property
    def save_dir(self) -> str:
        """Folder under which the runs are kept."""
        return self._save_dir

    @property
    def root_dir(self) -> str:
        """Folder of the experiment: ``save_dir/name``."""
        return self._runs

    @property
    def _runs(self) -> str:
        return os.path.join(self.save_dir, self.name)

    @property
    def log_dir(self) -> str:
        """Folder of this run: ``save_dir/name/version_N``."""
        return os.path.join(self._runs, version_folder(self.version))

    @property
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        """The writer of this run's files; made when it is first asked for."""
        if self._experiment is None:
            self._experiment = ExperimentWriter(self.log_dir)
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add a row.

        Args:
            metrics: numbers by name; a name not logged before becomes a new column.
            step: index of the optimizer step; the number of rows held back by default.

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
    def log_hyperparams(self, params: dict[str, Any] | Namespace | None = None, metrics: Any = None) -> None:
        """Write hyper-parameters to ``hparams.yaml``; ``metrics`` belong to loggers that show them beside."""
        self.experiment.log_hparams(as_dict(params))

    @rank_zero_only
    def save(self) -> None:
        """Append the rows held back to the file."""
        self.experiment.save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what is held back and let go of the file."""
        if self._experiment is not None:
            self._experiment.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows written, and where."""
        if self._experiment is None:
            return {}
        return {"file": _place(self._experiment.metrics_file_path), "rows": self._experiment.rows()}

    @rank_zero_only
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Drop the rows after the checkpoint when the run goes on in the same file: they come again."""
        if state and state["file"] == _place(self.experiment.metrics_file_path):
            self.experiment.keep(state["rows"])

    def identity(self) -> dict[str, Any]:
        """Return the folder, the name and the version of this run."""
        return {"save_dir": self.save_dir, "name": self.name, "version": self.version}

    def take_identity(self, identity: dict[str, Any]) -> None:
        """Have the folder, the name and the version of another process' logger."""
        self._save_dir, self._name = identity["save_dir"], identity["name"]
        self._version = identity["version"]

    def __getstate__(self) -> dict[str, Any]:
        # Another process must not write the rows held back here once more.
        return {**self.__dict__, "_experiment": None}


def _place(path: str) -> str:
    return path if is_url(path) else os.path.realpath(path)


def folder_argument(owner: str, save_dir: Any) -> str:
    """Check ``save_dir`` and return it as a string, with "~" replaced."""
    if not isinstance(save_dir, (str, os.PathLike)):
        raise TypeError(f"{owner}(save_dir={save_dir!r}): use a path, for instance save_dir='logs'.")
    path = os.fspath(save_dir)
    return path if is_url(path) else os.path.expanduser(local(path))


def name_argument(owner: str, name: Any) -> str:
    """Check ``name``: a folder below ``save_dir``."""
    if name is None:
        return ""
    if not isinstance(name, str):
        raise TypeError(f"{owner}(name={name!r}): use a string, or None.")
    _stays_inside(owner, "name", name)
    return name


def version_argument(owner: str, version: Any) -> int | str | None:
    """Check ``version``: a number, or a folder below the experiment's."""
    if version is None:
        return None
    if isinstance(version, str):
        _stays_inside(owner, "version", version)
        return version
    if isinstance(version, bool) or not isinstance(version, int):
        raise TypeError(
            f"{owner}(version={version!r}): use a whole number, a string, or None for the next free number."
        )
    if version < 0:
        raise ValueError(f"{owner}(version={version}): use a number of at least 0.")
    return version


def _stays_inside(owner: str, argument: str, text: str) -> None:
    parts = text.replace("\\", "/").split("/")
    if os.path.isabs(text) or ".." in parts or "\0" in text:
        raise ValueError(
            f"{owner}({argument}={text!r}): this would leave save_dir. Use a plain folder name, and save_dir= "
            "for where it is."
        )
