"""Loggers of services under Lightning's names: their parameters, and the calls that a service receives."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from hasten._lib.rank_zero import rank_zero_only
from hasten.loggers import base, comet, mlflow, wandb
from hasten.loggers.base import as_dict
from hasten_lightning.facades import Facade, accepted, exactly
from hasten_lightning.internals.loggers import convert_json_serializable, flatten_dict, sanitize_callable_params

if TYPE_CHECKING:
    from hasten.loggers.base import SavedCheckpoint


class Logger(base.Logger, metaclass=Facade):
    """The Trainer's base class. Fabric's is the class behind it, so that a program can derive from both."""


class CometLogger(comet.CometLogger, metaclass=Facade):
    @exactly
    def __init__(self, given: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**accepted(CometLogger, given), **kwargs)


class MLFlowLogger(mlflow.MLFlowLogger, metaclass=Facade):
    """Each call is MLflow's own: it returns when the values have arrived, unless ``synchronous=False``."""

    def _as_texts(self, params: dict[str, Any]) -> dict[str, Any]:
        return flatten_dict(params)

    def _log_batch(self, client: Any, **rows: list[Any]) -> Any:
        options = {} if self._synchronous is None else {"synchronous": self._synchronous}
        return client.log_batch(run_id=self._run_id, **rows, **options)

    def _send(self, client: Any, metrics: list[Any]) -> None:
        self._log_batch(client, metrics=metrics)

    def _mark_running(self, client: Any) -> None:
        """Leave the status of a run that is continued."""

    def _log_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        score, name, options = checkpoint.metadata.values()
        metadata = {"Checkpoint": dict(sorted(options.items())), "original_filename": name, "score": score}
        super()._log_checkpoint(dataclasses.replace(checkpoint, metadata=metadata))


class WandbLogger(wandb.WandbLogger, metaclass=Facade):
    def _start(self) -> Any:
        # Programs with a fake W&B compare the arguments.
        self._wandb_init.setdefault("anonymous", None)
        return super()._start()

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        values = convert_json_serializable(sanitize_callable_params(as_dict(params)))
        self.experiment.config.update(values, allow_val_change=True)
