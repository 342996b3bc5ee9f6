"""Loggers that upload checkpoints to a service: which checkpoints are new, and what describes them."""

from __future__ import annotations

import os
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hasten._lib import check
from hasten.loggers.base import StartedLogger

if TYPE_CHECKING:
    from hasten.callbacks.checkpoint import Checkpoint

# Attributes of a ModelCheckpoint that explain a file to whoever finds it later.
_DESCRIBING = ("monitor", "mode", "save_last", "save_top_k", "save_weights_only", "_every_n_train_steps")


@dataclass(frozen=True)
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
        self._log_model = check.one_of(type(self).__name__, "log_model", log_model, (True, False, "all"))
        self._written_at: dict[str, float] = {}
        self._waiting: list[Checkpoint] = []

    def after_save_checkpoint(self, checkpoint_callback: Checkpoint) -> None:
        """Upload the checkpoint if ``log_model`` says so."""
        keeps_all = getattr(checkpoint_callback, "save_top_k", None) == -1
        if self._log_model == "all" or (self._log_model and keeps_all):
            self._log_new_checkpoints(checkpoint_callback)
        elif self._log_model and not any(checkpoint_callback is other for other in self._waiting):
            self._waiting.append(checkpoint_callback)

    def _log_remaining_checkpoints(self) -> None:
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            self._log_new_checkpoints(callback)

    def _log_new_checkpoints(self, callback: Checkpoint) -> None:
        best = str(getattr(callback, "best_model_path", ""))
        scores: dict[str, Any] = {
            str(getattr(callback, "last_model_path", "")): getattr(callback, "current_score", None),
            best: getattr(callback, "best_model_score", None),
        }
        scores |= {str(path): score for path, score in getattr(callback, "best_k_models", {}).items()}
        found = [(os.path.getmtime(path), path) for path in scores if path and os.path.exists(path)]
        options = {name: getattr(callback, name) for name in _DESCRIBING if hasattr(callback, name)}
        for written_at, path in sorted(found):
            # A file may be written again under its name, as last.ckpt is.
            if written_at <= self._written_at.get(path, -1.0):
                continue
            score = scores[path]
            metadata = {
                "score": score.item() if hasattr(score, "item") else score,
                "original_filename": os.path.basename(path),
                "ModelCheckpoint": options,
            }
            aliases = ["latest", "best"] if path == best else ["latest"]
            self._log_checkpoint(SavedCheckpoint(path, aliases, metadata))
            self._written_at[path] = written_at

    @abstractmethod
    def _log_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        """Upload a checkpoint."""

    def __getstate__(self) -> dict[str, Any]:
        # The callbacks of a run stay in this process.
        return {**super().__getstate__(), "_waiting": []}
