"""Files of hyper-parameters and weights, local or under a URL."""

from __future__ import annotations

import csv
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from hasten._lib.rank_zero import rank_zero_warn
from hasten.checkpoint import files
from hasten.checkpoint.stored import StoredCheckpoint
from hasten.loggers.base import as_dict, plain
from hasten.loggers.folders import file_system, write_hparams
from hasten.module.hparams import convert as convert
from hasten.module.hparams import yaml_with_tuples

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from hasten.types import MapLocation, PathLike


def get_filesystem(path: PathLike, **kwargs: object) -> AbstractFileSystem:
    """Return the fsspec file system of a path, or of a URL such as ``s3://bucket/file``; it gets ``kwargs``."""
    return file_system(os.fspath(path), kwargs)


def read(path_or_url: PathLike | IO[bytes], map_location: MapLocation = None, weights_only: bool | None = None) -> Any:
    """Return what a file written by ``torch.save`` holds, or a checkpoint folder, by its path or URL, or the open file.

    ``weights_only=False`` reads Python objects too, which can run code: only for files you trust.
    """
    load: Callable[..., Any] = files.load if isinstance(path_or_url, (str, os.PathLike)) else files.load_open
    read = load(path_or_url, map_location=map_location, weights_only=weights_only)
    return read.whole() if isinstance(read, StoredCheckpoint) else read


def write(checkpoint: dict[str, Any], filepath: PathLike) -> None:
    """Write a checkpoint; the previous file stays whole until the new one is."""
    files.save(checkpoint, filepath)


def is_folder(fs: AbstractFileSystem, path: PathLike, strict: bool = False) -> bool:
    """Return whether there is a folder on a file system; ``strict`` also finds the beginning of names in a store."""
    where = os.fspath(path)
    return bool(fs.isdir(where) or (strict and fs.exists(where) and fs.ls(where)))


def is_local(path: PathLike) -> bool:
    """Return whether a path or URL is one of the local file system."""
    head, is_url, _ = os.fspath(path).partition("://")
    return not is_url or head == "file"


def load_hparams_from_yaml(config_yaml: PathLike, use_omegaconf: bool = True) -> dict[str, Any]:
    """Return the hyper-parameters in a YAML file, without running any code in it; {} without the file.

    Plain values come back whatever ``use_omegaconf`` is.
    """
    if not _is_there(config_yaml):
        return {}
    with _named(config_yaml), get_filesystem(config_yaml).open(os.fspath(config_yaml), "r", encoding="utf-8") as file:
        found: dict[str, Any] = yaml_with_tuples(file) or {}
    return found


def save_hparams_to_yaml(
    config_yaml: PathLike, hparams: Mapping[str, Any] | Namespace, use_omegaconf: bool = True
) -> None:
    """Write hyper-parameters as plain values to a YAML file; raise ``RuntimeError`` if its folder is missing."""
    path = os.fspath(config_yaml)
    _check_folder(path, "save_hparams_to_yaml")
    write_hparams(path, as_dict(hparams))


def _check_folder(path: str, owner: str) -> None:
    folder = os.path.dirname(path) or "."
    if not get_filesystem(path).isdir(folder):
        raise RuntimeError(f"{owner}({path!r}): Missing folder: {folder}.")


def load_hparams_from_tags_csv(tags_csv: PathLike) -> dict[str, Any]:
    """Return the hyper-parameters in a CSV file with the columns key and value; {} without the file."""
    if not _is_there(tags_csv):
        return {}
    with (
        _named(tags_csv),
        get_filesystem(tags_csv).open(os.fspath(tags_csv), "r", newline="", encoding="utf-8") as file,
    ):
        return {row["key"]: convert(row["value"]) for row in csv.DictReader(file)}


def _is_there(path: PathLike) -> bool:
    found: bool = get_filesystem(path).exists(os.fspath(path))
    if not found:
        rank_zero_warn(f"Missing Tags: {path}.", RuntimeWarning)
    return found


@contextmanager
def _named(path: PathLike) -> Iterator[None]:
    """Name the file in an error about what is in it."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # yaml has many, and raises others for a date that makes no sense
        raise ValueError(f"{os.fspath(path)}: no hyper-parameters can be read ({files.first_line(error)}).") from error


def save_hparams_to_tags_csv(tags_csv: PathLike, hparams: Mapping[str, Any] | Namespace) -> None:
    """Write hyper-parameters to a CSV file with the columns key and value; its folder must be there."""
    path = os.fspath(tags_csv)
    _check_folder(path, "save_hparams_to_tags_csv")
    with get_filesystem(path).open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["key", "value"])
        writer.writeheader()
        writer.writerows({"key": key, "value": plain(value)} for key, value in as_dict(hparams).items())


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
