"""Save and resume runs that a cluster interrupts and queues again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hasten._lib.errors import make_error
from hasten._lib.rank_zero import rank_zero_info, rank_zero_warn
from hasten.checkpoint.files import present
from hasten.loops.resume import find_last
from hasten.types import TrainerFn

if TYPE_CHECKING:
    from hasten.loops.run import Run
    from hasten.trainer import Trainer
    from hasten.types import PathLike

_NAME = "hpc_ckpt_"

# Calls of fit in this program, the present one included: a requeued program makes the same calls again.
_fits = 0


def count(fn: TrainerFn) -> None:
    """Note that a call begins."""
    global _fits
    _fits += fn is TrainerFn.FITTING


def own_path(trainer: Trainer) -> str | None:
    """Return where the present fit of this job is saved when the job is requeued; None if it cannot be requeued."""
    cluster = trainer._runtime.cluster
    if not cluster.stop_signals or cluster.requeued_job is None:
        return None
    # A program may fit several models in one folder.
    call = f"-fit{_fits}" if _fits > 1 else ""
    return _joined(trainer.default_root_dir, f"{_NAME}{cluster.requeued_job}{call}.ckpt")


def save(trainer: Trainer, run: Run) -> None:
    """Save a fit that is to continue in the requeued job; all processes call it, after the same batch."""
    path = own_path(trainer)
    if path is not None and run.state.fn is TrainerFn.FITTING and trainer.total_batch_idx >= 0:
        trainer.save_checkpoint(path)
        rank_zero_info(f"Saved the run as {path}.")


def requeue(trainer: Trainer) -> None:
    """Requeue the job, which may end it at once; all processes call it, when nothing is left to write."""
    cluster = trainer._runtime.cluster
    trainer.strategy.barrier("requeue")
    if trainer.is_global_zero:
        if failure := cluster.requeue():
            rank_zero_warn(
                f"The job could not be requeued ({failure}).",
                fix=(
                    "Submit it again and continue with ckpt_path='hpc', or switch this off: "
                    "plugins=SLURMEnvironment(auto_requeue=False)."
                ),
            )
        else:
            rank_zero_info(f"Requeued job {cluster.requeued_job}.")


def resumed_path(trainer: Trainer, ckpt_path: PathLike | None) -> str | None:
    """Return the checkpoint from which a fit continues because its job was requeued; None if there is none."""
    own = own_path(trainer)
    if trainer.state.fn is not TrainerFn.FITTING or own is None or not present(own):
        return None
    if ckpt_path == "last" and (last := find_last(trainer)) is not None and not _is_newer(own, last):
        return None
    instead = f", and not from ckpt_path={os.fspath(ckpt_path)!r}" if ckpt_path not in (None, "last", "hpc") else ""
    rank_zero_info(f"This job was requeued: it continues from {own}{instead}.")
    return own


def newest(trainer: Trainer) -> str:
    """Return the newest checkpoint of a requeued job in the Trainer's folder: ``ckpt_path="hpc"``.

    Raises:
        FileNotFoundError: there is none.

    """
    own, folder = own_path(trainer), trainer.default_root_dir
    if own is not None and present(own):
        return own
    found = []
    if os.path.isdir(folder):
        names = [name for name in os.listdir(folder) if name.startswith(_NAME) and name.endswith(".ckpt")]
        found = [path for name in names if present(path := os.path.join(folder, name))]
    if not found:
        what = f"ckpt_path='hpc': there is no {_NAME}*.ckpt in {folder}, which a job that is requeued leaves there."
        fix = "Leave ckpt_path out, or write ckpt_path='last'."
        raise make_error(NoCheckpoint, what, fix=fix, argument="ckpt_path")
    return max(found, key=os.path.getmtime)


class NoCheckpoint(FileNotFoundError, ValueError):
    """There is no checkpoint of a requeued job; programs catch either name."""


def _joined(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if "://" in folder else os.path.join(folder, name)


def _is_newer(path: str, other: str) -> bool:
    try:
        return os.path.getmtime(path) >= os.path.getmtime(other)
    except OSError:
        # URLs: the one that was saved when the job ended.
        return True
