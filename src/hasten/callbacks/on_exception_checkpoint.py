"""OnExceptionCheckpoint: save the run when an exception ends it."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

import torch

from hasten._lib import check
from hasten._lib.rank_zero import rank_zero_info, rank_zero_warn
from hasten.callbacks.checkpoint import Checkpoint
from hasten.checkpoint.files import remove
from hasten.loops.progress import TrainerFn

if TYPE_CHECKING:
    from hasten.trainer import Trainer


class OnExceptionCheckpoint(Checkpoint):
    """Save the run when an exception, Ctrl-C or SIGTERM ends a fit; remove the file when a later fit succeeds.

    Only the successful end of a ``fit`` removes it; ``validate``, ``test`` and ``predict`` leave it alone.
    On several processes it is saved if the exception was raised on all of them; one alone cannot save the run.
    A run resumed from it repeats the batch in which the exception was raised. If the run cannot be saved, the
    original exception is still raised.

    Args:
        dirpath: folder of the file; created if it does not exist.
        filename: name of the file, without ``.ckpt``.

    Raises:
        TypeError: ``dirpath`` is not a path.
        ValueError: ``filename`` is empty.

    Example::

        >>> OnExceptionCheckpoint("runs").ckpt_path.replace(os.sep, "/")
        'runs/on_exception.ckpt'

    """

    FILE_EXTENSION: ClassVar[str] = ".ckpt"
    patience_seconds: ClassVar[float] = 15.0

    def __init__(self, dirpath: str | os.PathLike[str], filename: str = "on_exception") -> None:
        check.path("OnExceptionCheckpoint", "dirpath", dirpath)
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

    def setup(self, trainer: Trainer, *_: object, **__: object) -> None:
        """Forget the failure of an earlier call."""
        self._failed = False

    def on_exception(self, trainer: Trainer, *_: object, **__: object) -> None:
        """Save the run, if it is a fit whose training was set up."""
        self._failed = True
        if trainer.state.fn != TrainerFn.FITTING or trainer.fast_dev_run or trainer.sanity_checking:
            return
        if not trainer.optimizers:
            return  # not set up yet: there is nothing to resume
        if trainer.world_size > 1 and not self._all_failed(trainer):
            rank_zero_warn(
                "OnExceptionCheckpoint: the exception was raised on some processes only, and a checkpoint needs all, "
                "so nothing was saved. ModelCheckpoint(every_n_train_steps=...) saves one in any case."
            )
            return
        try:
            trainer.save_checkpoint(self.ckpt_path)
        except Exception as error:
            rank_zero_warn(f"OnExceptionCheckpoint could not write {self.ckpt_path}: {error}")
        else:
            rank_zero_info(f'Saved the run. Resume it with fit(..., ckpt_path="{self.ckpt_path}").')

    def _all_failed(self, trainer: Trainer) -> bool:
        """Return whether every process failed; those still training would block a checkpoint."""
        store = torch.distributed.distributed_c10d._get_default_store()
        self._failures += 1
        keys = [f"hasten/failure-{self._failures}-{rank}" for rank in range(trainer.world_size)]
        store.set(keys[trainer.global_rank], "failed")
        try:
            store.wait(keys, timedelta(seconds=self.patience_seconds))
        except Exception:  # each store raises another type when the time is up
            return False
        return True

    def teardown(self, trainer: Trainer, *_: object, **__: object) -> None:
        """Remove the file of an earlier failure once a fit has succeeded."""
        if self._failed or trainer.state.fn != TrainerFn.FITTING or trainer.fast_dev_run:
            return
        trainer.strategy.barrier("on_exception_checkpoint")
        if trainer.is_global_zero:
            remove(self.ckpt_path)
