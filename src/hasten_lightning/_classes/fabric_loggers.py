"""Loggers with the argument names of programs that use Fabric."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from hasten import loggers
from hasten.loggers.base import Logger
from hasten.runtime import ReadOnly
from hasten.types import PathLike, Tensors

__all__ = ["CSVLogger", "Logger", "TensorBoardLogger"]


class _WithRootDir:
    """What the loggers here have in common: the folder of all runs is their ``root_dir``."""

    name: str
    root_dir = ReadOnly[str]("save_dir", "Folder under which the runs are kept.")

    @classmethod
    def __subclasshook__(cls, kind: type) -> bool:
        # In Lightning, the loggers of a Trainer are subclasses of these.
        first, *others = cls.__bases__
        return True if first is _WithRootDir and others[0] in kind.__mro__ else NotImplemented

    @property
    def _versions_dir(self) -> str:
        return os.path.join(self.root_dir, self.name)


class FabricCSVLogger(_WithRootDir, loggers.CSVLogger):
    """``hasten.loggers.CSVLogger``, whose first argument is called ``root_dir`` here.

    Args:
        root_dir: folder under which the runs are kept, or a URL for fsspec.
        name: this and the other arguments as for ``hasten.loggers.CSVLogger``.
        version: see there.
        prefix: see there.
        flush_logs_every_n_steps: see there.

    Example::

        >>> import tempfile
        >>> logger = CSVLogger(root_dir=tempfile.mkdtemp(), name="digits")
        >>> logger.log_metrics({"loss": 0.25}, step=0)
        >>> logger.finalize("success")

    """

    def __init__(
        self,
        root_dir: PathLike,
        name: PathLike | None = "lightning_logs",
        version: int | str | None = None,
        prefix: str | None = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(root_dir, name, version, prefix, flush_logs_every_n_steps)


class FabricTensorBoardLogger(_WithRootDir, loggers.TensorBoardLogger):
    """``hasten.loggers.TensorBoardLogger``, whose first argument is called ``root_dir`` here.

    Args:
        root_dir: folder under which the runs are kept.
        name: this and the other arguments as for ``hasten.loggers.TensorBoardLogger``.
        version: see there.
        default_hp_metric: see there.
        prefix: see there.
        sub_dir: see there.
        **kwargs: see there.

    Example::

        >>> import tempfile
        >>> logger = TensorBoardLogger(root_dir=tempfile.mkdtemp(), name="digits")
        >>> logger.log_metrics({"loss": 0.25}, step=0)
        >>> logger.finalize("success")

    """

    def __init__(
        self,
        root_dir: PathLike,
        name: PathLike | None = "lightning_logs",
        version: int | str | None = None,
        default_hp_metric: bool | None = True,
        prefix: str | None = "",
        sub_dir: PathLike | None = None,
        **kwargs: Any,
    ) -> None:
        options: dict[str, Any] = {"default_hp_metric": default_hp_metric, "prefix": prefix, "sub_dir": sub_dir}
        super().__init__(root_dir, name, version, **options, **kwargs)

    def log_graph(self, model: nn.Module, input_array: Tensors | None = None) -> None:
        """Write the graph of ``model``; the input is its ``example_input_array`` by default."""
        self._log_graph = True
        super().log_graph(model, input_array)

    def save(self) -> None:
        """Flush the event file; ``hparams.yaml`` is the Trainer's."""
        self.experiment.flush()


# Public names. The classes have others, so that a short name on a command line means one class.
CSVLogger = FabricCSVLogger
TensorBoardLogger = FabricTensorBoardLogger
