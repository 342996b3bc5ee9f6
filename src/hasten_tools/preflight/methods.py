"""Check the methods of module, datamodule and callbacks: missing, misspelt, or with wrong arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hasten import Callback, LightningModule
from hasten.arguments import require_callback
from hasten.callbacks.checkpoint import Checkpoint
from hasten.callbacks.model_summary import ModelSummary
from hasten.callbacks.prediction_writer import BasePredictionWriter
from hasten.callbacks.progress import ProgressBar
from hasten.callbacks.timer import Timer
from hasten.extend.origin import is_builtin
from hasten.hooks import overrides
from hasten.loops.run_data import HOOK_OF, STEP_OF
from hasten.loops.user_code import check_call
from hasten.module.datamodule import DataHooks, LightningDataModule
from hasten.module.signatures import check_signatures
from hasten_tools.preflight.report import Rows
from hasten_tools.preflight.said import is_of_library, row_of_error

if TYPE_CHECKING:
    from hasten.arguments import Arguments
    from hasten.trainer import Trainer


def check_methods(
    trainer: Trainer,
    arguments: Arguments,
    module: object,
    datamodule: LightningDataModule | None,
    given: Iterable[Any],
    rows: Rows,
) -> bool:
    """Check names and arguments of all hooks and steps; return whether fit would begin."""
    before = len(rows.rows)
    begins = attempted(rows, "call", lambda: check_call(arguments, "fit", module, datamodule, *given))
    if not isinstance(module, LightningModule):
        return False
    # Each owner by itself: an error of one does not hide the errors of the others.
    begins &= attempted(rows, "hooks", lambda: check_signatures(module, None, []))
    if isinstance(datamodule, LightningDataModule):
        begins &= attempted(rows, "hooks", lambda: check_signatures(LightningModule(), datamodule, []))
    for callback in trainer.callbacks:
        begins &= attempted(rows, "hooks", lambda: _check_callback(callback))  # noqa: B023
    if len(rows.rows) == before:
        rows.ok("hooks", f"names and arguments of {_count(module, datamodule, trainer.callbacks)}")
    return begins


def _check_callback(callback: Callback) -> None:
    check_signatures(LightningModule(), None, [require_callback("Trainer.callbacks", callback)])


def attempted(rows: Rows, name: str, check: Callable[[], object]) -> bool:
    """Return whether ``check`` raises nothing; an error becomes a row."""
    try:
        check()
    except Exception as error:
        rows.take(row_of_error(error, name))
        return False
    return True


def _count(module: object, datamodule: object, callbacks: Iterable[object]) -> str:
    parts = [type(module).__name__]
    if datamodule is not None:
        parts.append(type(datamodule).__name__)
    own = len([callback for callback in callbacks if not is_ours(callback)])
    if own:
        parts.append(f"{own} callback{'s' if own > 1 else ''}")
    return ", ".join(parts)


def is_ours(thing: object) -> bool:
    """Return whether a class comes with hasten."""
    return is_builtin(type(thing))


def may_be_called(callback: Callback) -> bool:
    """Return whether a check calls a callback: one that the program defines, and that does not write files by trade."""
    if isinstance(callback, (Checkpoint, ModelSummary, BasePredictionWriter, ProgressBar, Timer)) or is_ours(callback):
        return False
    try:
        file = inspect.getfile(type(callback))
    except (TypeError, OSError):  # Defined in a notebook or a prompt.
        return True
    return not is_of_library(file)


def stages_with_data(
    module: LightningModule, datamodule: LightningDataModule | None, rows: Rows, stages: Iterable[str]
) -> list[str]:
    """Return the stages that a datamodule or the module has data and a step for; say which are left out."""
    found = []
    for stage in stages:
        owners = [owner for owner in (datamodule, module) if owner is not None]
        has_data = any(overrides(owner, DataHooks, HOOK_OF[stage]) for owner in owners)
        step = STEP_OF[stage]
        has_step = overrides(module, LightningModule, step)
        if has_data and (has_step or stage == "predict"):
            found.append(stage)
        elif has_step:
            rows.skipped(step, f"there is no {HOOK_OF[stage]}() in a datamodule or in {type(module).__name__}")
        elif has_data:
            what = f"There is a {HOOK_OF[stage]}() but {type(module).__name__} has no {step}()."
            rows.warning(step, what, f"def {step}(self, batch, batch_idx): ...")
    return found
