"""Files of hyper-parameters and weights, local or under a URL."""

from __future__ import annotations

import ast
import csv
import os
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch
import yaml

from hasten.checkpoint import files
from hasten.loggers.base import plain
from hasten.loggers.folders import file_system, write_hparams

Path = str | os.PathLike[str]


def get_filesystem(path: Path, **kwargs: Any) -> Any:
    """Return the fsspec file system of a path or URL.

    Args:
        path: a path, or a URL such as ``s3://bucket/file``.
        kwargs: for the file system.

    Example::

        >>> get_filesystem("/tmp/x").protocol[0]
        'file'

    """
    if kwargs:
        import fsspec

        return fsspec.core.url_to_fs(os.fspath(path), **kwargs)[0]
    return file_system(os.fspath(path))


def read(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Return what a file written by ``torch.save`` holds.

    Args:
        path_or_url: where it is.
        map_location: where tensors go, as for ``torch.load``.
        weights_only: False reads Python objects too, which can run code: only for files you trust.

    """
    if not isinstance(path_or_url, (str, os.PathLike)):
        return torch.load(path_or_url, map_location=map_location, weights_only=weights_only is not False)
    return files.load(path_or_url, map_location=map_location, weights_only=weights_only is not False)


def write(checkpoint: dict[str, Any], filepath: Path) -> None:
    """Write a checkpoint; the previous file stays whole until the new one is."""
    files.save(checkpoint, filepath)


def is_folder(fs: Any, path: Path, strict: bool = False) -> bool:
    """Return whether there is a folder on a file system.

    Args:
        fs: the file system.
        path: the folder.
        strict: also where folders exist only as parts of names (object stores): it must have something in it.

    """
    return bool(fs.isdir(os.fspath(path))) or (
        strict and bool(fs.exists(os.fspath(path)) and fs.ls(os.fspath(path)))
    )


def is_local(fs: Any) -> bool:
    """Return whether a file system is that of this machine."""
    protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
    return protocol in ("file", "local")


def load_hparams_from_yaml(config_yaml: Path, use_omegaconf: bool = True) -> Any:
    """Return the hyper-parameters in a YAML file, without running any code in it; {} if there is none.

    Args:
        config_yaml: the file.
        use_omegaconf: kept for programs that pass it; plain values come back either way.

    """
    system = get_filesystem(config_yaml)
    if not system.exists(os.fspath(config_yaml)):
        return {}
    with system.open(os.fspath(config_yaml), "r") as file:
        return yaml.safe_load(file) or {}


def save_hparams_to_yaml(
    config_yaml: Path, hparams: Mapping[str, Any] | Namespace, use_omegaconf: bool = True
) -> None:
    """Write hyper-parameters to a YAML file as plain values.

    Args:
        config_yaml: the file; its folder must exist.
        hparams: names and values.
        use_omegaconf: kept for programs that pass it.

    Raises:
        RuntimeError: the folder is missing.

    """
    folder = os.path.dirname(os.fspath(config_yaml)) or "."
    if not get_filesystem(config_yaml).isdir(folder):
        raise RuntimeError(
            f"save_hparams_to_yaml({os.fspath(config_yaml)!r}): the folder {folder!r} does not exist."
        )
    write_hparams(os.fspath(config_yaml), _mapping(hparams))


def load_hparams_from_tags_csv(tags_csv: Path) -> dict[str, Any]:
    """Return the hyper-parameters in a CSV file with the columns key and value; {} if there is none."""
    system = get_filesystem(tags_csv)
    if not system.exists(os.fspath(tags_csv)):
        return {}
    with system.open(os.fspath(tags_csv), "r", newline="") as file:
        return {row["key"]: convert(row["value"]) for row in csv.DictReader(file)}


def save_hparams_to_tags_csv(tags_csv: Path, hparams: Mapping[str, Any] | Namespace) -> None:
    """Write hyper-parameters to a CSV file with the columns key and value."""
    with get_filesystem(tags_csv).open(os.fspath(tags_csv), "w", newline="") as file:
        writer = csv.DictWriter(file, ["key", "value"])
        writer.writeheader()
        writer.writerows({"key": key, "value": plain(value)} for key, value in _mapping(hparams).items())


def convert(val: str) -> Any:
    """Return the Python value that a text writes, or the text.

    Example::

        >>> convert("1e-3"), convert("adam")
        (0.001, 'adam')

    """
    try:
        return ast.literal_eval(val)
    except (ValueError, SyntaxError):
        return val


def update_hparams(hparams: dict[str, Any], updates: Mapping[str, Any]) -> None:
    """Put ``updates`` into ``hparams``, dict by dict.

    Example::

        >>> hparams = {"optimizer": {"lr": 1, "name": "sgd"}}
        >>> update_hparams(hparams, {"optimizer": {"lr": 2}})
        >>> hparams
        {'optimizer': {'lr': 2, 'name': 'sgd'}}

    """
    for key, value in updates.items():
        if isinstance(value, Mapping) and isinstance(hparams.get(key), dict):
            update_hparams(hparams[key], value)
        else:
            hparams[key] = value


def _mapping(hparams: Mapping[str, Any] | Namespace) -> Mapping[str, Any]:
    return vars(hparams) if isinstance(hparams, Namespace) else hparams
