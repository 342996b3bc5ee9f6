"""Base classes of loggers: of all, of those that start a run, and of those that upload checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from torch import Tensor

from hasten._lib import check
from hasten._lib.errors import absent
from hasten._lib.rank_zero import rank_zero_only

if TYPE_CHECKING:
    from torch.nn import Module

    from hasten.callbacks.checkpoint import Checkpoint

T = TypeVar("T")


class Logger(ABC):
    """Base class of all loggers: override ``name``, ``version``, ``log_metrics`` and ``log_hyperparams``.

    Example::

        >>> class PrintLogger(Logger):
        ...     name = "print"
        ...     version = 0
        ...     def log_metrics(self, metrics, step=None):
        ...         print(step, metrics)
        ...     def log_hyperparams(self, params, *args, **kwargs):
        ...         print(params)
        >>> PrintLogger().log_metrics({"loss": 0.5}, step=3)
        3 {'loss': 0.5}

    """

    # Whether this logger is started before the others of a run.
    starts_first: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str | None:
        """Name of the experiment: runs of one name belong together."""

    @property
    @abstractmethod
    def version(self) -> int | str | None:
        """Which run of the experiment this is."""

    @property
    def save_dir(self) -> str | None:
        """Folder under which everything is written; None for a logger that writes no files."""
        return None

    @property
    def root_dir(self) -> str | None:
        """Folder of the experiment, which holds one folder a version; None without files."""
        return None

    @property
    def log_dir(self) -> str | None:
        """Folder of this run; None without files."""
        return None

    @property
    def group_separator(self) -> str:
        """The separator of groups in names of values."""
        return "/"

    @abstractmethod
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Record values.

        Args:
            metrics: numbers by name; passed by name, as ``step``.
            step: the x axis: the index of the optimizer step; for batches of an evaluation, of the batch.

        """

    @abstractmethod
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Record hyper-parameters.

        Args:
            params: names and values.
            args: further arguments of a logger, such as metrics to show with the hyper-parameters.
            kwargs: the same by name.

        """

    def log_graph(self, model: Module, input_array: Tensor | None = None) -> None:  # noqa: B027 - optional
        """Record the graph of ``model``, where the logger can."""

    def save(self) -> None:  # noqa: B027 - optional
        """Write buffered values."""

    def finalize(self, status: str) -> None:
        """Close; called when a run ends, with "success", "failed" or "aborted"."""
        self.save()

    def check_beside(self, others: Sequence[object]) -> None:  # noqa: B027 - optional
        """Raise if this logger cannot write beside ``others``; called when a run begins, with the loggers before it."""

    def after_save_checkpoint(self, checkpoint_callback: Checkpoint) -> None:  # noqa: B027 - optional
        """Called after a checkpoint was written, with the callback that wrote it."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for the checkpoint, such as how far this logger has written."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - optional
        """Restore the state; what was logged after the checkpoint will be logged again."""

    def identity(self) -> dict[str, Any]:
        """Return plain data that identifies this run, for the same logger in other processes."""
        return {}

    def take_identity(self, identity: dict[str, Any]) -> None:  # noqa: B027 - optional
        """Become the run that ``identity`` describes."""


class DummyExperiment:
    """Accepts every call and attribute and does nothing: the experiment on all processes but the first.

    Example::

        >>> experiment = DummyExperiment()
        >>> experiment.config["lr"] = 0.1
        >>> for row in experiment.log({"loss": 0.5}).rows:
        ...     print(row)

    """

    def nop(self, *_: object, **__: object) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> DummyExperiment:
        if name.startswith("__"):  # copy and pickle look for these
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> DummyExperiment:
        return self

    __getitem__ = __enter__ = __call__
    __setitem__ = __setattr__ = __exit__ = nop

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True


class DummyLogger(Logger):
    """Accepts every call of a logger and does nothing."""

    name = version = ""

    def __init__(self) -> None:
        self.experiment = DummyExperiment()

    def log_metrics(self, *args: object, **kwargs: object) -> None:
        """Do nothing."""

    log_hyperparams = log_metrics

    def __getitem__(self, _: object) -> DummyLogger:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def rank_zero_experiment(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap ``function`` to return a DummyExperiment on all processes but the first."""

    @functools.wraps(function)
    def experiment(self: Any) -> Any:
        return function(self) if rank_zero_only.rank == 0 else DummyExperiment()

    return experiment


class StartedLogger(Logger, Generic[T]):
    """Base of loggers that write through an object of type ``T``, started when it is first needed."""

    _experiment: T | None = None

    @property
    def experiment(self) -> T:
        """The object that writes this run, started when it is first read; a ``DummyExperiment`` on other processes.

        Raises:
            OSError: the folder of a local store cannot be written to.
            RuntimeError: the service cannot be reached or refuses the run.

        """
        if rank_zero_only.rank != 0:
            return DummyExperiment()  # type: ignore[return-value]
        if self._experiment is None:
            self._experiment = self._start()
        return self._experiment

    @abstractmethod
    def _start(self) -> T:
        """Return the object, with the run open."""

    def __getstate__(self) -> dict[str, Any]:
        # Open files, connections, threads and rows that are not written yet stay with this process.
        return {**self.__dict__, "_experiment": None}


# Attributes of a ModelCheckpoint that explain a file to whoever finds it later.
_DESCRIBING = ("monitor", "mode", "save_last", "save_top_k", "save_weights_only", "_every_n_train_steps")


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint to upload: a file, or the folder of a sharded one."""

    path: str
    aliases: list[str]  # "latest", and "best" for the best one
    metadata: dict[str, Any]  # its score, its name, and the options of the callback that wrote it

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return os.path.isdir(self.path)


class UploadingLogger(StartedLogger[Any]):
    """Base of the loggers that upload checkpoints, each once, as ``log_model`` says; see ``WandbLogger``."""

    def __init__(self, log_model: Literal["all"] | bool) -> None:
        super().__init__()
        self._log_model = check.one_of(type(self).__name__, "log_model", log_model, (True, False, "all"))
        self._logged_model_time: dict[str, float] = {}
        self._waiting: list[Checkpoint] = []

    def after_save_checkpoint(self, checkpoint_callback: Checkpoint) -> None:
        """Upload the checkpoint if ``log_model`` says so."""
        keeps_all = getattr(checkpoint_callback, "save_top_k", None) == -1
        if self._log_model == "all" or (self._log_model and keeps_all):
            self._scan_and_log_checkpoints(checkpoint_callback)
        elif self._log_model and not any(checkpoint_callback is other for other in self._waiting):
            self._waiting.append(checkpoint_callback)

    def _log_remaining_checkpoints(self) -> None:
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            self._scan_and_log_checkpoints(callback)

    def _scan_and_log_checkpoints(self, checkpoint_callback: Checkpoint) -> None:
        """Upload what is new; subclasses of programs for Lightning override it."""
        best = str(getattr(checkpoint_callback, "best_model_path", ""))
        scores: dict[str, Any] = {
            str(getattr(checkpoint_callback, "last_model_path", "")): getattr(
                checkpoint_callback, "current_score", None
            ),
            best: getattr(checkpoint_callback, "best_model_score", None),
        }
        scores |= {str(path): score for path, score in getattr(checkpoint_callback, "best_k_models", {}).items()}
        found = [(os.path.getmtime(path), path) for path in scores if path and os.path.exists(path)]
        options = {
            name: getattr(checkpoint_callback, name) for name in _DESCRIBING if hasattr(checkpoint_callback, name)
        }
        for written_at, path in sorted(found):
            # A file may be written again under its name, as last.ckpt is.
            if written_at <= self._logged_model_time.get(path, -1.0):
                continue
            score = scores[path]
            metadata = {
                "score": score.item() if hasattr(score, "item") else score,
                "original_filename": os.path.basename(path),
                checkpoint_callback.__class__.__name__: options,  # it may be a weak proxy
            }
            aliases = ["latest", "best"] if path == best else ["latest"]
            self._log_checkpoint(SavedCheckpoint(path, aliases, metadata))
            self._logged_model_time[path] = written_at

    @abstractmethod
    def _log_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        """Upload a checkpoint."""

    def __getstate__(self) -> dict[str, Any]:
        # The callbacks of a run stay in this process.
        return {**super().__getstate__(), "_waiting": []}


def joined_versions(loggers: list[Any], separator: str = "_") -> int | str | None:
    """Return the version of one logger, or those of several as a text, each once."""
    if len(loggers) == 1:
        version: int | str | None = loggers[0].version
        return version
    return separator.join(dict.fromkeys(str(logger.version) for logger in loggers))


def check_metrics(owner: str, metrics: Mapping[str, Any]) -> None:
    """Refuse values without names, such as a name and a number in place of a dict."""
    if not hasattr(metrics, "items"):
        raise check.wrong_type(owner, "metrics", metrics, "a dict of names and numbers, such as {'loss': 0.5}")


def with_prefix(metrics: Mapping[str, Any], prefix: str | None, separator: str) -> Mapping[str, Any]:
    """Return ``metrics`` with ``prefix`` before every name; they must be a dict."""
    check_metrics("log_metrics", metrics)
    return {f"{prefix}{separator}{name}": value for name, value in metrics.items()} if prefix else metrics


def as_dict(params: object) -> dict[str, Any]:
    """Return hyper-parameters as a dict, whatever holds them."""
    if params is None:
        return {}
    if isinstance(params, Namespace):
        return vars(params)
    if dataclasses.is_dataclass(params) and not isinstance(params, type):
        return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    try:
        return dict(params)  # type: ignore[call-overload, no-any-return]
    except (TypeError, ValueError):
        allowed = "a dict, a Namespace or a dataclass"
        raise check.wrong_type("log_hyperparams", "params", params, allowed, error=TypeError) from None


_PLAIN = (bool, int, float, str)


def plain(value: object) -> Any:
    """Return a hyper-parameter as what YAML can hold: numbers, strings, lists and dicts of them.

    Example::

        >>> from pathlib import Path
        >>> plain({"path": Path("data"), "layers": (1, 2), "activation": len})
        {'path': 'data', 'layers': [1, 2], 'activation': 'len'}

    """
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {key if type(key) in _PLAIN else str(key): plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, Namespace) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return plain(as_dict(value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Enum):
        return value.name
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    if hasattr(value, "tolist") and hasattr(value, "shape"):
        few = math.prod(value.shape) <= 64
        return value.tolist() if few else f"{type(value).__name__} of shape {tuple(value.shape)}"
    if callable(value) and hasattr(value, "__name__"):
        return value.__name__
    return str(value)


def as_text(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters as numbers and texts, which loggers can write."""
    return {key: value if isinstance(value, _PLAIN) else str(plain(value)) for key, value in params.items()}


def flat(params: Mapping[str, Any], separator: str = "/") -> dict[str, Any]:
    """Return nested dicts as one dict with joined names.

    Example::

        >>> flat({"optimizer": {"lr": 0.1}, "layers": [{"width": 8}]})
        {'optimizer/lr': 0.1, 'layers/0/width': 8}

    """
    result: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            below = flat({str(k): v for k, v in value.items()}, separator)
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            below = flat({str(i): item for i, item in enumerate(value)}, separator)
        else:
            result[str(key)] = value
            continue
        result |= {f"{key}{separator}{name}": inner for name, inner in below.items()}
    return result


_INSTEAD = (
    "There are CSVLogger, CometLogger, MLFlowLogger, TensorBoardLogger, WandbLogger; or subclass hasten.loggers.Logger."
)
LitLogger = absent("LitLogger", Logger, home="hasten.loggers", instead=f"It belongs to a hosted product. {_INSTEAD}")
NeptuneLogger = absent("NeptuneLogger", Logger, home="hasten.loggers", instead=_INSTEAD)
