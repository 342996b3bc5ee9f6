"""Where checkpoints are, and which of them are there."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from typing import TYPE_CHECKING

from hasten._lib.rank_zero import rank_zero_warn
from hasten.checkpoint import files
from hasten.checkpoint.io import CheckpointIO, TorchCheckpointIO
from hasten.loggers.folders import entries, exists, file_system, is_url, version_folder

if TYPE_CHECKING:
    from hasten.trainer import Trainer

FOLDER = "checkpoints"


def default_folder(trainer: Trainer) -> str:
    """Return the folder of a run's checkpoints: in the first logger's folder of the run, if there is one."""
    if not trainer.loggers:
        return os.path.join(trainer.default_root_dir, FOLDER)
    logger = trainer.loggers[0]
    root = logger.save_dir if logger.save_dir is not None else trainer.default_root_dir
    return os.path.join(root, str(logger.name), version_folder(logger.version), FOLDER)


def earlier_folders(trainer: Trainer, folder: str) -> list[str]:
    """Return the checkpoint folders of earlier runs of the same experiment, the latest first."""
    if not trainer.loggers or not isinstance(trainer.loggers[0].version, int):
        return []
    root = os.path.dirname(os.path.dirname(folder))
    numbers = [name.removeprefix("version_") for name in entries(root) if name.startswith("version_")]
    earlier = sorted((int(n) for n in numbers if n.isdigit()), reverse=True)
    paths = [os.path.join(root, f"version_{number}", FOLDER) for number in earlier]
    return [path for path in paths if path != folder]


def checkpoints_in(folder: str, extension: str) -> list[str]:
    """Return the checkpoints in a folder and those below it, each once, the newest first."""
    if is_url(folder):
        system = file_system(folder)
        scheme = folder.partition("://")[0]
        paths = [f"{scheme}://{path}" for path in system.find(folder) if str(path).endswith(extension)]
        return sorted(paths, key=lambda path: str(system.info(path).get("created", path)), reverse=True)
    found: dict[str, tuple[int, str]] = {}
    for below, _, names in os.walk(folder):
        for name in names:
            if not name.endswith(extension):
                continue
            path = os.path.join(below, name)
            with contextlib.suppress(OSError):  # a link to nothing, or removed meanwhile
                stat = os.stat(path)
                found.setdefault(os.path.realpath(path), (stat.st_mtime_ns, path))
    return [path for _, path in sorted(found.values(), reverse=True)]


def newest_whole(paths: list[str], reader: CheckpointIO) -> str | None:
    """Return the newest of ``paths`` that can be read, with a warning that names damaged ones passed over."""
    if isinstance(reader, TorchCheckpointIO) and not any(is_url(path) for path in paths):
        return files.newest_valid(paths)
    for path in paths:
        if not is_damaged(path, reader):
            return path
        rank_zero_warn(f"The checkpoint {path} is damaged and was passed over.")
    return None


def clean(folder: str) -> None:
    """Remove what killed writers left in a folder and those below it."""
    if is_url(folder):
        return
    for below, _, _ in os.walk(folder):
        files.clean(below)


def is_damaged(path: str, reader: CheckpointIO) -> bool:
    """Return whether a checkpoint cannot be read; what a plugin wrote is believed to be whole."""
    if not isinstance(reader, TorchCheckpointIO):
        return False
    try:
        files.verify(path)
    except (RuntimeError, OSError, ValueError):
        return True
    return False


def link(target: str, path: str) -> None:
    """Make ``path`` a symbolic link to ``target``; what was there before is there until the link is."""
    if os.path.abspath(target) == os.path.abspath(path):
        return
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    # A name that ``clean`` removes when this process dies before the rename.
    name = f".{os.path.basename(path)[:100]}.{os.getpid()}-{uuid.uuid4().hex[:8]}.hasten-tmp"
    beside = os.path.join(os.path.dirname(path), name)
    try:
        os.symlink(os.path.relpath(target, os.path.dirname(path)), beside)
    except OSError:
        # Windows lets few users make links.
        shutil.copy(target, beside)
    os.replace(beside, path)


def remove(path: str, writer: CheckpointIO) -> None:
    """Remove a checkpoint; one that cannot be removed is named in a warning, and training goes on."""
    try:
        if exists(path) or os.path.lexists(path):
            writer.remove_checkpoint(path)
    except OSError as error:
        rank_zero_warn(f"The checkpoint {path} is no longer wanted and could not be removed: {error}.")
