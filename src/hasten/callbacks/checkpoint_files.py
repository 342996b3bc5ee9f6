"""Which files a ModelCheckpoint has: their names, which is the last, which may go."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from hasten.callbacks.checkpoint import Checkpoint
from hasten.callbacks.checkpoint_folders import (
    checkpoints_in,
    default_folder,
    earlier_folders,
    is_damaged,
    link,
    newest_whole,
    remove,
)
from hasten.callbacks.checkpoint_names import format_name
from hasten.loggers.folders import exists, is_url, write_whole

if TYPE_CHECKING:
    from hasten.trainer import Trainer


class CheckpointFiles(Checkpoint):
    """The half of a ModelCheckpoint that knows files; abstract."""

    CHECKPOINT_JOIN_CHAR: str = "-"
    CHECKPOINT_EQUALS_CHAR: str = "="
    CHECKPOINT_NAME_LAST: str = "last"
    FILE_EXTENSION: str = ".ckpt"
    STARTING_VERSION: ClassVar[int] = 1

    dirpath: str | None
    filename: str | None
    auto_insert_metric_name: bool
    best_k_models: dict[str, Tensor]
    best_model_path: str
    last_model_path: str
    _default_folder: bool
    _enable_version_counter: bool
    # Files to remove as soon as what replaces them is whole; stored, so that a resumed run removes them.
    _unwanted: list[str]
    _found_as_last: str | None

    # -- names

    def _format_checkpoint_name(
        self,
        filename: str | None,
        metrics: dict[str, Any],
        prefix: str | None = None,
        auto_insert_metric_name: bool = True,
    ) -> str:
        template = filename or "{epoch}" + self.CHECKPOINT_JOIN_CHAR + "{step}"
        name = format_name(
            template, metrics, equals=self.CHECKPOINT_EQUALS_CHAR, insert_names=auto_insert_metric_name
        )
        return name if prefix is None else self.CHECKPOINT_JOIN_CHAR.join([prefix, name])

    def format_checkpoint_name(
        self,
        metrics: dict[str, Any],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """Return the path of a checkpoint.

        Args:
            metrics: values for the fields of the template.
            filename: another template than ``self.filename``.
            ver: version put at the end, as in ``-v1``.
            prefix: text put at the beginning.

        Example::

            >>> from hasten.callbacks import ModelCheckpoint
            >>> ModelCheckpoint(filename="{epoch:03d}").format_checkpoint_name({"epoch": 5}, ver=1)
            'epoch=005-v1.ckpt'

        """
        name = self._format_checkpoint_name(
            filename or self.filename, metrics, prefix, self.auto_insert_metric_name
        )
        if ver is not None:
            name = self.CHECKPOINT_JOIN_CHAR.join([name, f"v{ver}"])
        name += self.FILE_EXTENSION
        return os.path.join(self.dirpath, name) if self.dirpath else name

    def _get_metric_interpolated_filepath_name(
        self, monitor_candidates: dict[str, Tensor], trainer: Trainer, del_filepath: str | None = None
    ) -> str:
        return self._free_name(trainer, monitor_candidates, None, del_filepath or "")

    def _free_name(
        self, trainer: Trainer, candidates: dict[str, Tensor], template: str | None, mine: str
    ) -> str:
        """Return the first name, counting versions, that is free, ``mine``, or that of a damaged file."""
        path = self.format_checkpoint_name(candidates, template)
        version = self.STARTING_VERSION
        while self._enable_version_counter and path != mine and self.file_exists(path, trainer):
            if trainer.strategy.broadcast(
                trainer.is_global_zero and is_damaged(path, trainer._runtime.checkpoint_io)
            ):
                break
            path = self.format_checkpoint_name(candidates, template, ver=version)
            version += 1
        return path

    def file_exists(self, filepath: str | os.PathLike[str], trainer: Trainer) -> bool:
        """Return whether there is a file, as the first process sees it."""
        there = trainer.is_global_zero and exists(os.fspath(filepath))
        return bool(trainer.strategy.broadcast(there))

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Write the kept files with their scores as YAML.

        Args:
            filepath: where to; ``best_k_models.yaml`` in ``dirpath`` by default.

        """
        import yaml

        path = (
            os.path.join(self.dirpath or "", "best_k_models.yaml")
            if filepath is None
            else os.fspath(filepath)
        )
        scores = {name: float(score) for name, score in self.best_k_models.items()}
        write_whole(path, yaml.safe_dump(scores, sort_keys=False).encode())

    def find_last(self, trainer: Trainer) -> str | None:
        """Return the newest whole checkpoint to go on from, or None.

        It is looked for in ``dirpath``; when that is the default, also in the folders of earlier runs, the
        latest first. Damaged files are left out, with a warning that names them.
        """
        found: str | None = None
        if trainer.is_global_zero:
            folder = self.dirpath or default_folder(trainer)
            folders = [folder, *(earlier_folders(trainer, folder) if self._default_folder else ())]
            for one in folders:
                found = newest_whole(checkpoints_in(one, self.FILE_EXTENSION), trainer._runtime.checkpoint_io)
                if found is not None:
                    break
        self._found_as_last = trainer.strategy.broadcast(None if found is None else str(found))
        return self._found_as_last

    # -- what is no longer wanted

    def _replace(self, trainer: Trainer, previous: str, path: str) -> None:
        """Note that ``previous`` may go once ``path`` is whole."""
        if previous and self._should_remove_checkpoint(trainer, previous, path):
            self._unwanted = [*self._unwanted, previous]

    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:
        """Return whether a replaced file may go: it is ours, and not what the user named to start from."""
        if previous == current:
            return False
        if is_url(previous):
            return True
        path = os.path.abspath(previous)
        start = trainer.ckpt_path
        if start is not None and os.path.abspath(start) == path and start != self._found_as_last:
            return False
        folder = os.path.abspath(self.dirpath or "")
        return os.path.commonpath([folder, path]) == folder

    def _remove_unwanted(self, trainer: Trainer, keep: str | None = None) -> None:
        wanted = {*self.best_k_models, self.best_model_path, self.last_model_path}
        removable = [path for path in self._unwanted if path not in wanted and path != keep]
        self._unwanted = [path for path in self._unwanted if path == keep]
        for path in removable:
            self._remove_checkpoint(trainer, path)

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if trainer.is_global_zero:
            remove(filepath, trainer._runtime.checkpoint_io)

    @staticmethod
    def _link_checkpoint(trainer: Trainer, filepath: str, linkpath: str) -> None:
        if trainer.is_global_zero:
            link(filepath, linkpath)
        trainer.strategy.barrier()
