"""The loggers that write files, with the arguments they have in programs that use Fabric."""

from __future__ import annotations

import os
from typing import Any

from hasten import loggers
from hasten.loggers.base import Logger

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]


class FabricCSVLogger(loggers.CSVLogger):
    """``hasten.loggers.CSVLogger``, whose first argument is called ``root_dir`` here.

    Args:
        root_dir: folder under which the runs are kept, or a URL for fsspec.
        name: see ``hasten.loggers.CSVLogger``, as for the others.
        version: the same.
        prefix: the same.
        flush_logs_every_n_steps: the same.

    Example::

        >>> import tempfile
        >>> logger = CSVLogger(root_dir=tempfile.mkdtemp(), name="digits")
        >>> logger.log_metrics({"loss": 0.25}, step=0)
        >>> logger.finalize("success")

    """

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(root_dir, name, version, prefix, flush_logs_every_n_steps)

    @property
    def root_dir(self) -> str:
        """Folder under which the runs are kept."""
        return self.save_dir


class FabricTensorBoardLogger(loggers.TensorBoardLogger):
    """``hasten.loggers.TensorBoardLogger``, whose first argument is called ``root_dir`` here.

    Args:
        root_dir: folder under which the runs are kept.
        name: see ``hasten.loggers.TensorBoardLogger``, as for the others.
        version: the same.
        default_hp_metric: the same.
        prefix: the same.
        sub_dir: the same.
        **kwargs: the same.

    Example::

        >>> import tempfile
        >>> logger = TensorBoardLogger(root_dir=tempfile.mkdtemp(), name="digits")
        >>> logger.log_metrics({"loss": 0.25}, step=0)
        >>> logger.finalize("success")

    """

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        name: str | None = "lightning_logs",
        version: int | str | None = None,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            root_dir,
            name,
            version,
            default_hp_metric=default_hp_metric,
            prefix=prefix,
            sub_dir=sub_dir,
            **kwargs,
        )

    @property
    def root_dir(self) -> str:
        """Folder under which the runs are kept."""
        return self.save_dir

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Write the graph of ``model``; the input is its ``example_input_array`` by default."""
        self._log_graph = True
        super().log_graph(model, input_array)


# The field's names. The classes have others, so that a short name on a command line means one class.
CSVLogger = FabricCSVLogger
TensorBoardLogger = FabricTensorBoardLogger
