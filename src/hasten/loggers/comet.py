"""CometLogger: values at Comet, or in its offline archives."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from hasten._lib import check
from hasten._lib.errors import make_error
from hasten._lib.optional import need
from hasten._lib.rank_zero import rank_zero_only, rank_zero_warn
from hasten.elsewhere import conventions
from hasten.loggers.base import SavedCheckpoint, UploadingLogger, as_dict, plain
from hasten.loggers.folders import make_writable

if TYPE_CHECKING:
    from torch.nn import Module

# Names that older versions of Comet used -> names of today; "offline" is the opposite of "online".
_OLDER_NAMES = {
    "experiment_name": "name",
    "project_name": "project",
    "offline": "online",
    "save_dir": "offline_directory",
}


FRAMEWORK_NAME = "pytorch-lightning"


def _framework() -> str:
    return FRAMEWORK_NAME if conventions.current().framework_is_lightning else "hasten"


class CometLogger(UploadingLogger):
    """Log to Comet. Needs the package ``comet_ml``; threads of Comet send the values.

    The experiment is started at once, and stays open after ``fit``, so that ``test`` logs to it too; end it with
    ``logger.experiment.end()`` where several follow each other in one program.

    Args:
        api_key: key of your account; ``$COMET_API_KEY`` or Comet's configuration file by default.
        workspace: name of the workspace; by default the account's.
        project: name of the project.
        experiment_key: key of the experiment, 32 to 50 letters and digits; an existing one is continued.
        mode: "get_or_create" (default), "get" (it must exist) or "create" (it must not).
        online: False writes an archive, which ``comet upload`` sends later; True by default.
        prefix: put before every name, with "_" between.
        log_model: checkpoints as models of the experiment: "all" when each is written; True those left when the
            fit has ended, or each if the callback keeps all; False none.
        **kwargs: passed to ``comet_ml.ExperimentConfig``, such as ``name``, ``tags``, ``offline_directory``.

    Raises:
        ModuleNotFoundError: ``comet_ml`` is not installed.
        ValueError: ``mode`` or ``log_model`` is not one of the above.
        TypeError: Comet has no such option.
        OSError: ``offline_directory`` cannot be written to.
        RuntimeError: Comet did not start the experiment, for instance without a key.

    Example::

        >>> import tempfile
        >>> logger = CometLogger(
        ...     project="digits", online=False, offline_directory=tempfile.mkdtemp(), disabled=True
        ... )
        >>> logger.log_metrics({"loss": 0.25}, step=0)

    Source: https://www.comet.com/docs/v2/api-and-sdk/python-sdk/reference/start/

    """

    def __init__(
        self,
        *,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: Literal["get_or_create", "get", "create"] | None = None,
        online: bool | None = None,
        prefix: str | None = None,
        log_model: Literal["all"] | bool = False,
        **kwargs: object,
    ) -> None:
        check.declared(CometLogger.__init__, locals())
        # Comet records torch and other libraries unless this is set before it is imported.
        os.environ.setdefault("COMET_DISABLE_AUTO_LOGGING", "1")
        comet = need("comet_ml", purpose="CometLogger")
        check.one_of("CometLogger", "mode", mode, ("get_or_create", "get", "create"), allow_none=True)
        given: dict[str, Any] = {**kwargs, "project": project, "online": online}
        for old, new in _OLDER_NAMES.items():
            if old in given:
                what = f"CometLogger: The parameter `{old}` is deprecated."
                rank_zero_warn(what, DeprecationWarning, fix=f"Write {new}=.")
                value = given.pop(old)
                if given.get(new) is None:
                    given[new] = not value if old == "offline" else value
        project, online = given.pop("project"), given.pop("online")
        super().__init__(log_model)
        self._prefix, self._project, self._experiment_key = prefix, project, experiment_key
        self._start_with = {"api_key": api_key, "workspace": workspace, "mode": mode, "online": online}
        self._kwargs = given
        self._comet_config = comet.ExperimentConfig(**given)
        folder = self._comet_config.offline_directory
        self._save_dir = None if folder is None else str(folder)
        self.experiment  # noqa: B018 - a key that is missing is an error here, not after the data is loaded

    def _start(self) -> Any:
        comet = need("comet_ml", purpose="CometLogger")
        if self._start_with["online"] is False and self._save_dir is not None:
            make_writable("CometLogger", f"offline_directory={self._save_dir!r}", self._save_dir)
        try:
            experiment = comet.start(
                project=self._project,
                experiment_key=self._experiment_key,
                experiment_config=self._comet_config,
                **self._start_with,
            )
        except TypeError:
            raise
        except Exception as error:  # Comet has many, some of them ValueError
            what = f"CometLogger: Comet did not start an experiment: {error}."
            fix = "Log in with `comet login` or pass api_key=, or write an archive with CometLogger(online=False)."
            raise make_error(RuntimeError, what, fix=fix) from error
        if experiment is None:
            raise comet.exceptions.ExperimentNotFound(f"CometLogger: Comet has no experiment {self._experiment_key}.")
        self._experiment_key = experiment.get_key()
        self._project = experiment.project_name
        experiment.log_other("Created from", _framework())
        return experiment

    @property
    def name(self) -> str | None:
        """Name of the project."""
        return self._project

    @property
    def version(self) -> str | None:
        """Key of the experiment; None on other processes than the first, unless it was given."""
        return self._experiment_key

    @property
    def save_dir(self) -> str | None:
        """Folder of offline archives, if one was set."""
        return self._save_dir

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log values.

        Args:
            metrics: numbers by name; "epoch" is logged as the epoch of the others.
            step: index of the optimizer step.

        """
        row = {name: v.detach().cpu() if isinstance(v, Tensor) else v for name, v in metrics.items()}
        epoch = int(row.pop("epoch")) if "epoch" in row else None
        # Comet's functions for frameworks, which also record which one it was.
        self.experiment.__internal_api__log_metrics__(
            row, prefix=self._prefix, step=step, epoch=epoch, framework=_framework()
        )

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Log hyper-parameters, nested ones too."""
        self.experiment.__internal_api__log_parameters__(
            parameters=plain(as_dict(params)), framework=_framework(), flatten_nested=True, source="manual"
        )

    @rank_zero_only
    def log_graph(self, model: Module, input_array: object = None) -> None:
        """Log the modules that ``model`` is made of."""
        self.experiment.__internal_api__set_model_graph__(graph=model, framework=_framework())

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Send buffered values and the remaining checkpoints. The experiment stays open."""
        if self._experiment is not None:
            if status == "success":
                self._log_remaining_checkpoints()
            self._experiment.flush()

    def _log_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        metadata = {**checkpoint.metadata, "aliases": checkpoint.aliases}
        name = os.path.splitext(os.path.basename(checkpoint.path))[0]
        self.experiment.log_model(name, checkpoint.path, metadata=plain(metadata), overwrite=True)
