"""Convert hyper-parameters and checkpoints to the form that loggers write."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hasten.loggers.base import flat
from hasten.loops import prepare

if TYPE_CHECKING:
    from hasten.callbacks import Checkpoint
    from hasten.trainer import Trainer


def sanitize_callable_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters with texts or results in the place of classes and functions.

    Args:
        params: a class becomes its name, a function what it returns without arguments, or its name.

    Example::

        >>> sanitize_callable_params({"lr": 0.1, "kind": dict, "loss": len, "now": lambda: 3})
        {'lr': 0.1, 'kind': 'dict', 'loss': 'len', 'now': 3}

    """
    return {key: _plain(value) for key, value in params.items()}


def _plain(value: Any) -> Any:
    if inspect.isclass(value):
        return value.__name__
    if not callable(value):
        return value
    try:
        result = value()
    except Exception:
        return getattr(value, "__name__", None)
    return value.__name__ if callable(result) else result


def flatten_dict(params: Mapping[Any, Any], delimiter: str = "/", parent_key: str = "") -> dict[str, Any]:
    """Return nested dicts as one dict with joined names.

    Args:
        params: the nested dicts.
        delimiter: between the names.
        parent_key: before all names.

    Example::

        >>> flatten_dict({"optimizer": {"lr": 0.1}}, delimiter=".", parent_key="model")
        {'model.optimizer.lr': 0.1}

    """
    return flat({parent_key: params}, delimiter) if parent_key else flat(params, delimiter)


def is_json_serializable(value: str | float | list[Any] | dict[str, Any] | None) -> bool:
    """Return whether a value can be written as JSON; a list or dict counts without a look inside."""
    if isinstance(value, (list, dict)):
        return True
    try:
        json.dumps(value)
    except (TypeError, OverflowError):
        return False
    return True


def convert_json_serializable(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters with texts in the place of what cannot be written as JSON."""
    return {key: value if is_json_serializable(value) else str(value) for key, value in params.items()}


def log_hyperparams(trainer: Trainer) -> None:
    """Give the hyper-parameters of module and datamodule, and the graph, to all loggers."""
    prepare.log_hyperparams(trainer.current_run, trainer.datamodule)


def prefix_metric_keys(metrics_dict: Mapping[str, float], prefix: str, separator: str) -> dict[str, float]:
    """Return values with a prefix before their names."""
    return {prefix + separator + name: value for name, value in metrics_dict.items()}


def scan_checkpoints(checkpoint_callback: Checkpoint, logged_model_time: Mapping[str, float]) -> list[tuple[Any, ...]]:
    """Return the files of a checkpoint callback that are new since they were logged.

    Args:
        checkpoint_callback: a ``Checkpoint``, usually ``ModelCheckpoint``.
        logged_model_time: path -> the time of its last change when it was logged.

    Returns:
        (time of the last change, path, score, "latest", "best" or "best_k") of each, by time.

    """
    found: dict[str, tuple[Any, str]] = {}
    for path, score, tag in (
        ("last_model_path", "current_score", "latest"),
        ("best_model_path", "best_model_score", "best"),
    ):
        if hasattr(checkpoint_callback, path) and hasattr(checkpoint_callback, score):
            found[getattr(checkpoint_callback, path)] = (getattr(checkpoint_callback, score), tag)
    found |= {path: (score, "best_k") for path, score in getattr(checkpoint_callback, "best_k_models", {}).items()}
    files = [(Path(path).stat().st_mtime, path, *what) for path, what in found.items() if Path(path).is_file()]
    new = [file for file in files if file[1] not in logged_model_time or logged_model_time[file[1]] < file[0]]
    return sorted(new, key=lambda file: file[:2])
