"""Convert hyper-parameters and checkpoints to the form that loggers write."""

from __future__ import annotations

import dataclasses
import inspect
import json
from argparse import Namespace
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hasten.loops import prepare

if TYPE_CHECKING:
    from hasten.callbacks import Checkpoint
    from hasten.trainer import Trainer


def sanitize_callable_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters with texts or results in the place of classes and functions.

    A class becomes its name, a function what it returns without arguments, or its name.

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
    """Return nested dicts, namespaces and dataclasses as one dict with joined names, all after ``parent_key``.

    The number of a dict in a list always follows a "/".

    Example::

        >>> flatten_dict({"optimizer": {"lr": 0.1}}, delimiter=".", parent_key="model")
        {'model.optimizer.lr': 0.1}

    """
    found: dict[str, Any] = {}
    for key, value in params.items():
        name = f"{parent_key}{delimiter}{key}" if parent_key else str(key)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        elif isinstance(value, Namespace):
            value = vars(value)
        if isinstance(value, MutableMapping):
            found |= flatten_dict(value, delimiter, name)
        elif isinstance(value, list) and all(isinstance(each, MutableMapping) for each in value):
            for index, each in enumerate(value):
                found |= flatten_dict(each, delimiter, f"{name}/{index}")
        else:
            found[name] = value
    return found


def sanitize_params(params: dict[str, Any]) -> dict[str, Any]:
    """Turn all hyper-parameters but numbers, texts and tensors into texts, in place, and return them.

    Example::

        >>> sanitize_params({"lr": 0.1, "layers": [1, 2]})
        {'lr': 0.1, 'layers': '[1, 2]'}

    """
    for name, value in params.items():
        if getattr(value, "shape", None) == () and not isinstance(value, Tensor):  # A number of numpy.
            value = params[name] = value.item()
        if type(value) not in (bool, int, float, str, Tensor):
            params[name] = str(value)
    return params


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
    """Return the files of a checkpoint callback that are new since they were logged, by the time of their last change.

    Each is (that time, path, score, "latest", "best" or "best_k"). ``logged_model_time`` has the times by path.
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
