"""TensorBoardLogger: values as TensorBoard's event files."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hasten._lib import check
from hasten._lib.errors import make_error
from hasten._lib.optional import need
from hasten._lib.rank_zero import rank_zero_only, rank_zero_warn
from hasten._lib.tree import move_to, readable_by_jit
from hasten.loggers.base import as_dict, as_text, flat, plain, with_prefix
from hasten.loggers.folders import FolderLogger, exists, make_writable, write_hparams

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.utils.tensorboard import SummaryWriter

    from hasten.types import Tensors


# The methods of a LightningModule that make a batch what its steps get: a hook may change its type, or scale it.
_AS_BATCH = ("_on_before_batch_transfer", "_apply_batch_transfer_handler")


class _NoNumber(ValueError, RuntimeError):
    """Both errors at once: torch raises the second for a tensor with several elements."""


class TensorBoardLogger(FolderLogger["SummaryWriter"]):
    """Write values for TensorBoard under ``<save_dir>/<name>/version_<N>``.

    View them with ``tensorboard --logdir <save_dir>``. Needs the package ``tensorboard``.

    Args:
        save_dir: folder under which the runs are kept.
        name: name of the experiment, a folder; None or "" for none.
        version: which run it is: N for ``version_N``, or a folder name; the next free N by default.
        log_graph: write the module's graph; it needs ``example_input_array``.
        default_hp_metric: write ``hp_metric`` = -1 with hyper-parameters that come without values, because TensorBoard
            shows them only together with some value.
        prefix: put before every name, with "-" between.
        sub_dir: folder below the version, for the event files.
        **kwargs: passed to ``torch.utils.tensorboard.SummaryWriter``, such as ``flush_secs``.

    Raises:
        ModuleNotFoundError: ``tensorboard`` is not installed.
        ValueError: ``name`` or ``version`` would leave ``save_dir``.

    Example::

        >>> import tempfile
        >>> logger = TensorBoardLogger(tempfile.mkdtemp(), name="digits")
        >>> logger.log_metrics({"loss": 0.25}, step=0)
        >>> logger.finalize("success")

    """

    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | os.PathLike[str] | None = "lightning_logs",
        version: int | str | None = None,
        log_graph: bool | None = False,
        default_hp_metric: bool | None = True,
        prefix: str | None = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: object,
    ) -> None:
        check.declared(TensorBoardLogger.__init__, locals())
        need("tensorboard", purpose="TensorBoardLogger")
        super().__init__(save_dir, name, version, prefix)
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._sub_dir = None if sub_dir is None else os.fspath(sub_dir)
        self._kwargs = kwargs
        self._next_step = 0  # after the last one logged
        self._purge: dict[str, int] = {}
        self.hparams: dict[str, Any] = {}

    @property
    def sub_dir(self) -> str | None:
        """Folder below the version, for the event files."""
        return self._sub_dir

    @property
    def log_dir(self) -> str:
        """Folder of this run's event files: ``save_dir/name/version_N``, and ``sub_dir`` below."""
        folder = super().log_dir if self._sub_dir is None else os.path.join(super().log_dir, self._sub_dir)
        return os.path.expanduser(os.path.expandvars(folder))

    def _start(self) -> SummaryWriter:
        make_writable("TensorBoardLogger", f"save_dir={self._save_dir!r}", self.log_dir)
        summaries = need("torch.utils.tensorboard", purpose="TensorBoardLogger")
        writer: SummaryWriter = summaries.SummaryWriter(log_dir=self.log_dir, **{**self._purge, **self._kwargs})
        return writer

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Write values.

        Args:
            metrics: numbers by name; a dict of numbers becomes one chart with several curves.
            step: index of the optimizer step.

        Raises:
            ValueError: a value is not a number.

        """
        experiment = self.experiment
        self._next_step = max(self._next_step, (step or 0) + 1)
        for name, value in with_prefix(metrics, self._prefix, self.LOGGER_JOIN_CHAR).items():
            if isinstance(value, Mapping):
                experiment.add_scalars(name, dict(value), step)
                continue
            try:
                experiment.add_scalar(name, value.item() if isinstance(value, Tensor) else value, step)
            except OSError:
                # The thread that writes the file has failed.
                raise
            except Exception as error:
                raise make_error(
                    _NoNumber,
                    f"TensorBoardLogger: {name!r}: you tried to log {value} which is currently not supported.",
                    fix=(
                        "Try a dict or a scalar/tensor: numbers, tensors of one element. Anything else goes through "
                        "logger.experiment."
                    ),
                ) from error

    @rank_zero_only
    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, metrics: dict[str, Any] | float | None = None, step: int | None = None
    ) -> None:
        """Write hyper-parameters.

        Args:
            params: dict or Namespace.
            metrics: values to show with them, by name, or one number for ``hp_metric``.
            step: index of the optimizer step for these values.

        """
        values = as_dict(params)
        self.hparams.update(values)
        if metrics is None:
            metrics = {"hp_metric": -1} if self._default_hp_metric else {}
        elif not isinstance(metrics, dict):
            metrics = {"hp_metric": metrics}
        if not metrics:
            return
        self.log_metrics(metrics, step)
        summaries = need("torch.utils.tensorboard.summary", purpose="TensorBoardLogger")
        writer = self.experiment._get_file_writer()
        for part in summaries.hparams(self._sanitize_params(flat(plain(values))), metrics):
            writer.add_summary(part, step)

    @staticmethod
    def _sanitize_params(params: dict[str, Any]) -> dict[str, Any]:
        """Return what is written of hyper-parameters; subclasses of programs for Lightning override it."""
        return as_text(params)

    @rank_zero_only
    def log_graph(self, model: Module, input_array: Tensors | None = None) -> None:
        """Write the graph of ``model`` if ``log_graph=True``; the input is its ``example_input_array``."""
        if not self._log_graph:
            return
        example = getattr(model, "example_input_array", None) if input_array is None else input_array
        if isinstance(example, (Tensor, tuple)):
            for name in _AS_BATCH:
                hook = getattr(model, name, None)
                example = hook(example) if callable(hook) else example
            device = getattr(model, "device", None)
            with readable_by_jit():
                self.experiment.add_graph(model, example if device is None else move_to(example, device))
            return
        if example is None:
            found = "The `model.example_input_array` attribute is not set or `input_array` was not given"
        else:
            found = (
                f"The `input_array` or `model.example_input_array` has type {type(example)} which can't be traced by "
                "TensorBoard"
            )
        rank_zero_warn(
            f"Could not log computational graph to TensorBoard: {found}. The model is {type(model).__name__}.",
            fix=(
                "Set self.example_input_array in its __init__. Make the input array a tuple representing the "
                "positional arguments to the model's `forward()` implementation, or a tensor."
            ),
        )

    @rank_zero_only
    def save(self) -> None:
        """Flush the event file, and write ``hparams.yaml`` once."""
        self.experiment.flush()
        path = os.path.join(self.log_dir, self.NAME_HPARAMS_FILE)
        if exists(self.log_dir) and not exists(path):
            write_hparams(path, self.hparams)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Flush and close; logging afterwards opens a further event file."""
        if self._experiment is not None:
            self.save()
            self._experiment.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the step after the last one logged, and where."""
        if self._experiment is None:
            return {}
        return {"folder": os.path.realpath(self.log_dir), "next_step": self._next_step}

    @rank_zero_only
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hide the steps after the checkpoint in TensorBoard if the run continues in the same folder."""
        if state.get("folder") == os.path.realpath(self.log_dir):
            if self._experiment is not None:
                self._experiment.close()
                self._experiment = None
            self._next_step = state["next_step"]
            # The writer says so in the first event of its file, so a new one is made.
            self._purge = {"purge_step": self._next_step}
