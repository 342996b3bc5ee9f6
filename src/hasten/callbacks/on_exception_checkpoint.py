"""OnExceptionCheckpoint: the run as it was when an exception ended it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from hasten._lib.rank_zero import rank_zero_info, rank_zero_warn
from hasten.callbacks.checkpoint import Checkpoint
from hasten.checkpoint.files import remove
from hasten.loops.states import TrainerFn

if TYPE_CHECKING:
    from hasten.trainer import Trainer


class OnExceptionCheckpoint(Checkpoint):
    """Save the run when an exception, Ctrl-C or SIGTERM ends a fit; remove the file when a later fit succeeds.

    Only the successful end of a ``fit`` removes it; ``validate``, ``test`` and ``predict`` leave it alone.
    On several processes it is saved when the exception arose on all of them; one alone cannot save the run.
    A run resumed from it begins again with the batch in which the exception arose. If the run cannot be saved, the
    exception that ended it is still the one you see.

    Args:
        dirpath: folder of the file; made if it does not exist.
        filename: name of the file, without ``.ckpt``.

    Raises:
        TypeError: ``dirpath`` is no path.
        ValueError: ``filename`` is empty.

    Example::

        >>> OnExceptionCheckpoint("runs").ckpt_path.replace(os.sep, "/")
        'runs/on_exception.ckpt'

    """

    FILE_EXTENSION: ClassVar[str] = ".ckpt"
    patience_seconds: ClassVar[float] = 15.0

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        if not isinstance(dirpath, (str, os.PathLike)):
            raise TypeError(f"OnExceptionCheckpoint(dirpath={dirpath!r}): give the path of a folder.")
        if not isinstance(filename, str) or not filename:
            raise ValueError(
                f"OnExceptionCheckpoint(filename={filename!r}): give a name without {self.FILE_EXTENSION}, "
                "for instance 'on_exception'."
            )
        self.dirpath = dirpath
        self.filename = filename
        self._failed = False
        self._failures = 0

    @property
    def ckpt_path(self) -> str:
        """The file."""
        return os.path.join(self.dirpath, self.filename + self.FILE_EXTENSION)

    def setup(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Begin a call in which nothing has failed yet."""
        self._failed = False

    def on_exception(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Save the run, if it is a fit that has begun."""
        self._failed = True
        if trainer.state.fn != TrainerFn.FITTING or trainer.fast_dev_run or trainer.sanity_checking:
            return
        if not trainer.optimizers:
            # Not yet set up, or nothing to go on with: there is nothing a run could be resumed from.
            return
        if trainer.world_size > 1 and not self._all_failed(trainer):
            rank_zero_warn(
                "OnExceptionCheckpoint: the exception arose on some processes only, and a checkpoint needs all, "
                "so nothing was saved. ModelCheckpoint(every_n_train_steps=...) leaves one behind in any case."
            )
            return
        try:
            trainer.save_checkpoint(self.ckpt_path)
        except Exception as error:
            rank_zero_warn(f"OnExceptionCheckpoint could not write {self.ckpt_path}: {error}")
        else:
            rank_zero_info(
                f'Saved the run as {self.ckpt_path}. Go on with fit(..., ckpt_path="{self.ckpt_path}").'
            )

    def _all_failed(self, trainer: Trainer) -> bool:
        """Return whether every process came here; those still training would be waited for in vain."""
        store = torch.distributed.distributed_c10d._get_default_store()
        self._failures += 1
        keys = [f"hasten/failure-{self._failures}-{rank}" for rank in range(trainer.world_size)]
        store.set(keys[trainer.global_rank], "here")
        try:
            store.wait(keys, timedelta(seconds=self.patience_seconds))
        except Exception:  # What a store raises when the time is up differs from store to store.
            return False
        return True

    def teardown(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Remove the file of an earlier failure once a fit has succeeded."""
        if self._failed or trainer.state.fn != TrainerFn.FITTING or trainer.fast_dev_run:
            return
        trainer.strategy.barrier("on_exception_checkpoint")
        if trainer.is_global_zero:
            remove(self.ckpt_path)
