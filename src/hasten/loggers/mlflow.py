"""MLFlowLogger: values in an MLflow store, on a server or in a local database."""

from __future__ import annotations

import importlib
import os
import re
import tempfile
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import time
from typing import Any, Literal

from torch import Tensor

from hasten._lib import check
from hasten._lib.errors import make_error
from hasten._lib.optional import need
from hasten._lib.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn, warn_once
from hasten.loggers.base import SavedCheckpoint, UploadingLogger, as_dict, flat, plain, with_prefix
from hasten.loggers.folders import local, make_writable

# MLflow's limits for one call.
_PARAMS_PER_CALL = 100
_METRICS_PER_CALL = 1000
# The limit differs between stores; all accept this many.
_PARAM_CHARACTERS = 250
# Training waits when more rows than this are being sent.
_MOST_PENDING = 1000

LOCAL_FILE_URI_PREFIX = "file:"
_STATUS = {"success": "FINISHED", "finished": "FINISHED", "failed": "FAILED", "aborted": "KILLED"}


def resolve_tags() -> Callable[[dict[str, Any] | None], Any]:
    """Return MLflow's function that adds tags such as the commit; without it, tags do not change."""
    try:
        context = importlib.import_module("mlflow.tracking.context.registry")
    except ImportError:
        return lambda tags: tags
    resolve: Callable[[dict[str, Any] | None], Any] = context.resolve_tags
    return resolve


class MLFlowLogger(UploadingLogger):
    """Log to MLflow. Needs the package ``mlflow``.

    Values are sent by a thread, so that a slow server does not hold up training; they have arrived when ``fit``
    returns. The run is created before training begins.

    Args:
        experiment_name: name of the experiment; created when there is none.
        run_name: name of the run; MLflow makes one up by default.
        tracking_uri: where the store is: "http://...", "sqlite:///...", "file:...". By default
            ``$MLFLOW_TRACKING_URI``, or a database ``mlflow.db`` in ``save_dir`` (look at it with
            ``mlflow ui --backend-store-uri sqlite:///mlruns/mlflow.db``); an existing store of plain
            files in ``save_dir`` is continued.
        tags: tags of the run.
        save_dir: folder of the local store, without ``tracking_uri``; checkpoints are saved below it too.
        log_model: checkpoints as artifacts: "all" when each is written; True those left when the fit has ended, or
            each if the callback keeps all; False none.
        prefix: put before every name, with "-" between.
        artifact_location: where artifacts of a new experiment are kept; the server decides by default.
        run_id: continue this run.
        synchronous: True waits until each row is written; None and False do not.

    Raises:
        ModuleNotFoundError: ``mlflow`` is not installed.
        ValueError: ``log_model`` is not one of the above.
        OSError: when the run starts: the local store cannot be written to.
        RuntimeError: when the run starts: the store cannot be reached, or has no such run.

    Example::

        >>> import hasten as L
        >>> logger = MLFlowLogger("digits", tracking_uri="http://localhost:5000")  # asked when training starts
        >>> trainer = L.Trainer(logger=logger, accelerator="cpu")

    Source: https://mlflow.org/docs/latest/ml/tracking

    """

    LOGGER_JOIN_CHAR = "-"

    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: dict[str, Any] | None = None,
        save_dir: str | os.PathLike[str] | None = "./mlruns",
        log_model: Literal["all"] | bool | None = False,
        prefix: str | None = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        check.declared(MLFlowLogger.__init__, locals())
        need("mlflow", purpose="MLFlowLogger")
        self._experiment_name, self._run_name = experiment_name, run_name
        self._folder = local(os.fspath(save_dir)) if save_dir is not None else "./mlruns"
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._is_own_store = not uri and not _holds_plain_files(self._folder)
        database = f"sqlite:///{Path(self._folder).absolute().as_posix()}/mlflow.db"
        self._tracking_uri = uri or (database if self._is_own_store else LOCAL_FILE_URI_PREFIX + self._folder)
        self.tags = tags
        super().__init__(False if log_model is None else log_model)
        self._prefix, self._synchronous = prefix, synchronous
        self._artifact_location = artifact_location
        self._run_id = run_id
        self._experiment_id: str | None = None
        self._is_running = False
        self._may_have_params = run_id is not None
        self._sender: ThreadPoolExecutor | None = None
        self._pending: deque[Future[Any]] = deque()

    def _start(self) -> Any:
        mlflow = need("mlflow", purpose="MLFlowLogger")
        if self._is_own_store:
            make_writable("MLFlowLogger", f"save_dir={self._folder!r}", self._folder)
        try:
            mlflow.set_tracking_uri(self._tracking_uri)
            client = need("mlflow.tracking", purpose="MLFlowLogger").MlflowClient(self._tracking_uri)
            if self._run_id is None:
                self._run_id = self._new_run(client)
            else:
                self._experiment_id = client.get_run(self._run_id).info.experiment_id
                self._mark_running(client)
        except Exception as error:
            asked = "" if self._run_id is None else f", run_id={self._run_id!r}"
            what = f"MLFlowLogger(tracking_uri={self._tracking_uri!r}{asked}): MLflow cannot use this store: {error}."
            fix = 'Check the server and the run, or use a local database: tracking_uri="sqlite:///mlflow.db".'
            raise make_error(RuntimeError, what, fix=fix, argument="tracking_uri") from error
        self._is_running = True
        return client

    def _new_run(self, client: Any) -> str:
        found = client.get_experiment_by_name(self._experiment_name)
        if found is not None and found.lifecycle_stage != "deleted":
            self._experiment_id = found.experiment_id
        else:
            rank_zero_info(f"MLflow: the experiment {self._experiment_name} is new and is created.")
            location = self._artifact_location
            if location is None and self._is_own_store:
                location = (Path(self._folder).absolute() / "artifacts").as_uri()
            self._experiment_id = client.create_experiment(name=self._experiment_name, artifact_location=location)
        if self._run_name is not None:
            self.tags = {**(self.tags or {}), "mlflow.runName": self._run_name}
        run = client.create_run(experiment_id=self._experiment_id, tags=resolve_tags()(self.tags))
        return str(run.info.run_id)

    # -- programs read these two

    @property
    def _initialized(self) -> bool:
        return self._experiment is not None

    @property
    def _mlflow_client(self) -> Any:
        return self.experiment

    @property
    def run_id(self) -> str | None:
        """Id of the run, which is created if it does not exist."""
        self.experiment  # noqa: B018 - creates it
        return self._run_id

    @property
    def experiment_id(self) -> str | None:
        """Id of the experiment, which is created if it does not exist."""
        self.experiment  # noqa: B018 - creates it
        return self._experiment_id

    @property
    def name(self) -> str | None:
        """Id of the experiment."""
        return self.experiment_id

    @property
    def version(self) -> str | None:
        """Id of the run."""
        return self.run_id

    @property
    def save_dir(self) -> str | None:
        """Folder of the local store; None if the store is not a folder."""
        if self._is_own_store:
            return self._folder
        uri = self._tracking_uri
        return uri.removeprefix(LOCAL_FILE_URI_PREFIX) if uri.startswith(LOCAL_FILE_URI_PREFIX) else None

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log values.

        Args:
            metrics: numbers by name. Text is left out, and so are characters of names that MLflow does not take.
            step: index of the optimizer step; 0 by default.

        """
        metric = need("mlflow.entities", purpose="MLFlowLogger").Metric
        now_ms, row = int(time() * 1000), []
        for name, value in with_prefix(metrics, self._prefix, self.LOGGER_JOIN_CHAR).items():
            if isinstance(value, str):
                what = f"MLFlowLogger: {name}={value!r} is text, which MLflow does not take as a value; it is left out."
                warn_once(f"mlflow text {name}", what, fix="Use logger.experiment.set_tag(logger.run_id, ...).")
                continue
            number = value.item() if isinstance(value, Tensor) else value
            row.append(metric(key=_allowed(name), value=number, timestamp=now_ms, step=step or 0))
        client = self._running()
        for part in _parts(row, _METRICS_PER_CALL):
            self._send(client, part)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        """Log hyper-parameters, nested names joined with "/", values as text of at most 250 characters.

        MLflow keeps the first value of each: in a continued run, a warning names those that have changed.
        """
        param = need("mlflow.entities", purpose="MLFlowLogger").Param
        texts = {name: str(value)[:_PARAM_CHARACTERS] for name, value in self._as_texts(as_dict(params)).items()}
        if not texts:
            return
        client = self._running()
        stored = client.get_run(self._run_id).data.params if self._may_have_params else {}
        self._may_have_params = True
        kept = {name: text for name, text in texts.items() if stored.get(name, text) != text}
        if kept:
            changed = ", ".join(f"{name}={text} (was {stored[name]})" for name, text in kept.items())
            rank_zero_warn(
                f"MLFlowLogger: the run {self._run_id} has other hyper-parameters, which MLflow does not change: "
                f"{changed}.",
                fix="Leave out run_id= to start a new run.",
            )
        new = [param(key=name, value=text) for name, text in texts.items() if name not in stored]
        for part in _parts(new, _PARAMS_PER_CALL):
            self._log_batch(client, params=part)

    # Under Lightning's names these three and `_send` make the calls that its logger makes.

    def _as_texts(self, params: dict[str, Any]) -> dict[str, Any]:
        return flat(plain(params))

    def _log_batch(self, client: Any, **rows: list[Any]) -> Any:
        return client.log_batch(run_id=self._run_id, **rows)

    def _mark_running(self, client: Any) -> None:
        client.update_run(self._run_id, status="RUNNING")

    def _running(self) -> Any:
        """Return the client, with the run marked as running again if it had ended."""
        client = self.experiment
        if not self._is_running:
            self._mark_running(client)
            self._is_running = True
        return client

    def _send(self, client: Any, metrics: list[Any]) -> None:
        if self._synchronous:
            self._log_batch(client, metrics=metrics)
            return
        if self._sender is None:
            # One thread, so that rows arrive in order; Python lets it finish before the program ends.
            self._sender = ThreadPoolExecutor(1, thread_name_prefix="MLFlowLogger")
        self._pending.append(self._sender.submit(self._log_batch, client, metrics=metrics))
        self._wait_for_rows(at_most=_MOST_PENDING)

    def _wait_for_rows(self, at_most: int) -> None:
        """Wait until at most ``at_most`` rows are being sent; warn of those that were lost."""
        lost: list[BaseException] = []
        while self._pending and (len(self._pending) > at_most or self._pending[0].done()):
            error = self._pending.popleft().exception()
            if error is not None:
                lost.append(error)
        if lost:
            warn_once(
                f"mlflow lost {self._run_id}",
                f"MLFlowLogger: {len(lost)} row(s) of values could not be written to {self._tracking_uri}: {lost[0]}",
            )

    def _log_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        import yaml

        client, run_id = self.experiment, self._run_id
        folder = Path(checkpoint.path).stem
        if checkpoint.is_folder:
            client.log_artifacts(run_id, checkpoint.path, folder)
        else:
            client.log_artifact(run_id, checkpoint.path, folder)
        with tempfile.TemporaryDirectory() as beside:
            metadata = yaml.safe_dump(plain(checkpoint.metadata), sort_keys=False)
            Path(beside, "metadata.yaml").write_text(metadata, encoding="utf-8")
            Path(beside, "aliases.txt").write_text(str(checkpoint.aliases), encoding="utf-8")
            client.log_artifacts(run_id, beside, folder)

    @rank_zero_only
    def finalize(self, status: str = "success") -> None:
        """Wait until all values have arrived, log the checkpoints that are left, and mark the run as ended.

        Args:
            status: "success" marks the run as FINISHED, "failed" as FAILED, "aborted" as KILLED.

        """
        if self._experiment is None:
            return
        self._wait_for_rows(at_most=0)
        self._log_remaining_checkpoints()
        self._experiment.set_terminated(self._run_id, _STATUS.get(status, status))
        self._is_running = False

    def __getstate__(self) -> dict[str, Any]:
        self.experiment  # noqa: B018 - creates the run, which another process continues
        return {**super().__getstate__(), "_sender": None, "_pending": deque()}


def _holds_plain_files(folder: str) -> bool:
    """Return whether a folder is a store of MLflow's older kind, which describes each experiment in a file."""
    return os.path.isdir(folder) and any(Path(folder).glob("*/meta.yaml"))


def _allowed(name: str) -> str:
    kept = re.sub("[^a-zA-Z0-9_/. -]+", "", name)
    if kept != name:
        warn_once(
            f"mlflow name {name}",
            "MLFlow only allows '-', '_', '/', '.' and ' ' special characters in metric name. "
            f"Replacing {name} with {kept}.",
            RuntimeWarning,
        )
    return kept


def _parts(items: list[Any], size: int) -> Iterator[list[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
