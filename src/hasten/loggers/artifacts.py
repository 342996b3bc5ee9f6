"""Checkpoints that a logger hands to its service: which are new, and what to say of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

# Of a ModelCheckpoint: what someone who finds the file later wants to know.
_DESCRIBING = ("monitor", "mode", "save_last", "save_top_k", "save_weights_only", "_every_n_train_steps")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint to hand over.

    Args:
        path: the file, or the folder of a sharded one.
        aliases: "latest", and "best" for the best one.
        metadata: its score, its name, and the options of the callback that wrote it.

    """

    path: str
    aliases: list[str]
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return os.path.isdir(self.path)


class Shelf:
    """Remembers which checkpoints were handed over already.

    Args:
        owner: the logger, for messages.
        log_model: "all" hands over each checkpoint when it was written; True those that are left when the run
            ends, or each one if the callback keeps all of them; False none.

    Raises:
        ValueError: ``log_model`` is something else.

    """

    def __init__(self, owner: str, log_model: Any) -> None:
        if not (isinstance(log_model, bool) or log_model == "all"):
            raise ValueError(f'{owner}(log_model={log_model!r}): use True, False or "all".')
        self.log_model = log_model
        self._written_at: dict[str, float] = {}
        self._later: list[Any] = []

    def after_save(self, callback: Any) -> Iterator[SavedCheckpoint]:
        """Yield the checkpoints to hand over now, after ``callback`` has written one."""
        if self.log_model == "all" or (self.log_model and getattr(callback, "save_top_k", None) == -1):
            yield from self._new(callback)
        elif self.log_model and not any(callback is other for other in self._later):
            self._later.append(callback)

    def at_end(self) -> Iterator[SavedCheckpoint]:
        """Yield the checkpoints to hand over when a run has ended."""
        later, self._later = self._later, []
        for callback in later:
            yield from self._new(callback)

    def _new(self, callback: Any) -> Iterator[SavedCheckpoint]:
        best = str(getattr(callback, "best_model_path", ""))
        scores: dict[str, Any] = {
            str(getattr(callback, "last_model_path", "")): getattr(callback, "current_score", None),
            best: getattr(callback, "best_model_score", None),
        }
        scores |= {str(path): score for path, score in getattr(callback, "best_k_models", {}).items()}
        found = [(os.path.getmtime(path), path) for path in scores if path and os.path.exists(path)]
        for written_at, path in sorted(found):
            # A file may be written again under its name, as last.ckpt is.
            if written_at <= self._written_at.get(path, -1.0):
                continue
            aliases = ["latest", "best"] if path == best else ["latest"]
            yield SavedCheckpoint(path, aliases, _describe(callback, path, scores[path]))
            self._written_at[path] = written_at

    def __getstate__(self) -> dict[str, Any]:
        # Callbacks of a run in this process do not travel to another.
        return {**self.__dict__, "_later": []}


def _describe(callback: Any, path: str, score: Any) -> dict[str, Any]:
    options = {name: getattr(callback, name) for name in _DESCRIBING if hasattr(callback, name)}
    return {
        "score": score.item() if hasattr(score, "item") else score,
        "original_filename": os.path.basename(path),
        "ModelCheckpoint": options,
    }
