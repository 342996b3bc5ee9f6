"""Check the values that callbacks and schedulers watch, the logging interval, and the folder of checkpoints."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from hasten._lib.files import is_url
from hasten._lib.names import nearest_value, right_mode
from hasten._lib.tree import leaves
from hasten.callbacks import checkpoint_files
from hasten.callbacks.checkpoint import ModelCheckpoint
from hasten.machine.host import bytes_text
from hasten.module.callback import Callback
from hasten_tools.preflight.methods import is_ours, may_be_called
from hasten_tools.preflight.report import Rows

if TYPE_CHECKING:
    from hasten.arguments import Arguments
    from hasten.loops.run import Run
    from hasten.trainer import Trainer
    from hasten_tools.preflight.plan import Length

_FIELD = re.compile(r"\{([^{}:]+)")
# Free space that a run should leave.
_SPARE_BYTES = 64 * 2**20


def check_monitors(
    callbacks: Iterable[Callback], logged: set[str], rows: Rows, *, complete: bool, validated: bool = False
) -> None:
    """Check that something logs what callbacks monitor, and that their modes fit the names.

    ``logged`` are the names that one epoch of the check has logged. Unless training and validation have run
    (``complete``), what is missing may come; what belongs to validation is missing where that has run.
    """
    every = list(callbacks)
    # They may log the value, and a check does not call them.
    others = [type(one).__name__ for one in every if not is_ours(one) and not may_be_called(one)]
    watching = [(one, name) for one in every if isinstance(name := getattr(one, "monitor", None), str)]
    before = len(rows.rows)
    for callback, name in watching:
        owner = type(callback).__name__
        if isinstance(callback, ModelCheckpoint) and name in ("epoch", "step"):
            continue  # Counted by the Trainer.
        ended = complete or (validated and name.startswith("val"))
        if name in logged:
            _check_mode(callback, name, rows)
        elif others or not ended:
            why = f"{others[0]}, which this check did not call, may log it" if others else "the epoch did not end"
            rows.skipped("monitor", f"{owner}(monitor={name!r}) was not logged in this check: {why}")
        else:
            _not_logged(owner, name, logged, rows)
    if complete and not others:
        for callback in every:
            _check_filename(callback, logged, rows)
    if watching and len(rows.rows) == before:
        rows.ok("monitor", ", ".join(f"{type(one).__name__}: {name}" for one, name in watching))


def _check_mode(callback: Callback, name: str, rows: Rows) -> None:
    """Warn if a callback looks for more of a value of which less is better, or the other way round."""
    mode, owner = getattr(callback, "mode", None), type(callback).__name__
    if mode not in ("min", "max") or right_mode(name) in (None, mode):
        return
    right = "max" if mode == "min" else "min"
    kept = "keeps the worst checkpoints" if isinstance(callback, ModelCheckpoint) else "stops while it improves"
    what = f"{owner}(monitor={name!r}, mode={mode!r}) {kept} if {'more' if right == 'max' else 'less'} of it is better."
    rows.warning("monitor", what, f'{owner}(monitor="{name}", mode="{right}")')


def _not_logged(owner: str, name: str, logged: set[str], rows: Rows) -> None:
    known = sorted(logged)
    near = nearest_value(name, known)
    said = f"Logged are {', '.join(known)}." if known else "Nothing is logged."
    line = f'{owner}(monitor="{near}")' if near else f'self.log("{name}", ...) in validation_step'
    rows.error("monitor", f"{owner}(monitor={name!r}): nothing logs {name!r}. {said}", line)


def _check_filename(callback: Callback, logged: set[str], rows: Rows) -> None:
    if not isinstance(callback, ModelCheckpoint) or not callback.filename:
        return
    known = {*logged, "epoch", "step"}
    for name in _FIELD.findall(str(callback.filename)):
        if name not in known:
            near = nearest_value(name, sorted(known))
            written = str(callback.filename)
            rows.warning(
                "monitor",
                f"ModelCheckpoint(filename={written!r}): nothing logs {name!r}; it becomes 0 in every name.",
                f'filename="{written.replace("{" + name, "{" + near)}"' if near else f'self.log("{name}", ...)',
            )


def check_intervals(trainer: Trainer, arguments: Arguments, run: Run, length: Length, rows: Rows) -> None:
    """Check when a fit logs and validates."""
    every, steps = arguments.log_every_n_steps, _logged_steps(arguments, run, length)
    if trainer.loggers and every and run.logged.logged_on_steps() and every > steps:
        what = f"Values of steps go to the loggers every {every} steps, and the fit has {int(steps)}: none gets there."
        rows.warning("logging", what, f"Trainer(log_every_n_steps={max(1, int(steps) // 10)})")
    if length.validations == 0 and not run.data.validation.is_off():
        rows.warning(
            "validation",
            f"Trainer(check_val_every_n_epoch={arguments.check_val_every_n_epoch}, "
            f"val_check_interval={arguments.val_check_interval!r}): the fit never "
            "validates.",
            "Trainer(check_val_every_n_epoch=1)",
        )
    if arguments.max_epochs_assumed:
        what = "Trainer(max_epochs=...) is not given: the fit ends after 1000 epochs."
        rows.warning("length", what, "Trainer(max_epochs=10), or max_epochs=-1 for no limit")


# -- where checkpoints go


def _logged_steps(arguments: Arguments, run: Run, length: Length) -> float:
    """Return how many steps of a fit the loggers count."""
    tried = run.progress
    if arguments.max_steps == -1 or not tried.global_step:
        return length.logged_steps
    # Several optimizers that step after one batch are several steps of ``max_steps``, and one step of the loggers.
    return min(length.logged_steps, math.ceil(arguments.max_steps * tried.logged_step / tried.global_step))


def check_places(trainer: Trainer, run: Run, length: Length, rows: Rows) -> None:
    """Check that the folders of checkpoints and loggers can be written, and are large enough."""
    checkpoints = [one for one in trainer.callbacks if isinstance(one, ModelCheckpoint)]
    for callback in checkpoints:
        if callback.every_n_epochs > length.epochs:
            rows.warning(
                "checkpoints",
                f"ModelCheckpoint(every_n_epochs={callback.every_n_epochs}): the fit is shorter ({length.epochs:.0f}), "
                "and saves nothing at the end of an epoch.",
                "ModelCheckpoint(every_n_epochs=1)",
            )
    size = checkpoint_bytes(run)
    for callback in checkpoints:
        place = callback.dirpath or checkpoint_files.default_folder(trainer)
        _check_folder("checkpoints", place, rows, size=size, kept=_kept(callback, length))
    in_default = any(callback.dirpath is None for callback in checkpoints)
    # The default folder of checkpoints is in the first logger's folder.
    for logger in trainer.loggers[in_default:]:
        folder = getattr(logger, "save_dir", None)
        if folder:
            _check_folder("logs", os.fspath(folder), rows, size=0, kept=1)


def checkpoint_bytes(run: Run) -> int:
    """Return about how large a checkpoint is: weights, buffers and states of optimizers, without the rest."""
    tensors: dict[int, Any] = {id(one): one for one in run.module.state_dict().values() if hasattr(one, "nbytes")}
    for optimizer in run.optimizers:
        for state in optimizer.state.values():
            tensors.update((id(leaf), leaf) for leaf in leaves(state) if hasattr(leaf, "nbytes"))
    return sum(int(tensor.nbytes) for tensor in tensors.values())


def _kept(callback: ModelCheckpoint, length: Length) -> float:
    """Return how many checkpoints are there at the most; one more than stay, while a new one replaces an old one."""
    top: float = callback.save_top_k
    if top == -1:
        # By steps or time, only the run shows how many.
        top = length.epochs // callback.every_n_epochs if callback.every_n_epochs else math.inf
    if callback.keep_latest_k is not None and callback.keep_for is None:
        # The best one stays, too.
        top = min(top, callback.keep_latest_k + (callback.monitor is not None))
    return top + bool(callback.save_last) + 1


def _check_folder(name: str, folder: str, rows: Rows, *, size: int, kept: float) -> None:
    if is_url(folder):
        rows.skipped(name, f"{folder} is behind a URL: whether it can be written shows with the first file")
        return
    there = os.path.abspath(folder)
    while not os.path.exists(there) and os.path.dirname(there) != there:
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        rows.error(name, f"{folder} cannot be made: {there} is a file.", 'ModelCheckpoint(dirpath="...")')
        return
    if not os.access(there, os.W_OK | os.X_OK):
        rows.error(name, f"{folder} cannot be written: no permission for {there}.", 'Trainer(default_root_dir="...")')
        return
    free = shutil.disk_usage(there).free
    if math.isinf(kept):
        rows.skipped(name, f"{folder}: how many of {bytes_text(size)} are kept depends on the length of the fit")
        return
    need = size * kept
    what = f"{kept:.0f} checkpoints of about {bytes_text(size)}" if size else "it can be written"
    if need + _SPARE_BYTES > free:
        rows.error(
            name,
            f"{folder} has {bytes_text(free)} free{f', and {what} need {bytes_text(need)}' if size else ''}.",
            "ModelCheckpoint(save_top_k=1, save_weights_only=True), or a dirpath on a larger disk",
        )
    else:
        rows.ok(name, f"{shown_path(folder)}: {what}, {bytes_text(free)} free")


def shown_path(path: str) -> str:
    """Return a path as seen from the working directory, if it is below it."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") or relative == "." else relative
