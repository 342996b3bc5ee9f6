"""Parts of a Trainer: its loggers and callbacks, what is attached to it for a run, and results of its copies."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn

from hasten._lib.errors import MisconfigurationException, add_note, make_error
from hasten._lib.optional import installed
from hasten._lib.rank_zero import forget_warnings, rank_zero_info, rank_zero_warn
from hasten._lib.tree import move_to
from hasten.arguments import Arguments, require_callback
from hasten.compile.settings import inner_model as inner_model
from hasten.elsewhere import conventions
from hasten.loggers.base import Logger
from hasten.loops.resume import resolve_path
from hasten.machine import launch, watchdog
from hasten.machine.cluster import SLURMEnvironment
from hasten.machine.host import is_interactive
from hasten.machine.signals import leaving
from hasten.module import LightningModule
from hasten.module.callback import Callback
from hasten.module.changes import ModuleChanges
from hasten.module.hparams import remove_unpicklable
from hasten.module.log_methods import log_into
from hasten.module.signatures import check_signatures
from hasten.types import TrainerFn, TrainerStatus

if TYPE_CHECKING:
    from hasten import LightningDataModule, Trainer
    from hasten.loops.run import Run
    from hasten.runtime import Runtime
    from hasten.types import PathLike


def loggers(arguments: Arguments) -> list[Any]:
    """Return the loggers of ``Trainer(logger=...)``."""
    if arguments.logger is False:
        return []
    if arguments.logger is True:
        return [default_logger(arguments.default_root_dir)]
    return list(arguments.logger)


def default_logger(folder: str) -> Logger:
    """Return the logger of ``Trainer(logger=True)``."""
    of_lightning = conventions.current().prefers_tensorboard
    # A job that is queued again continues in its folder.
    version = SLURMEnvironment.job_id() if of_lightning else None
    if of_lightning and installed("tensorboard"):
        from hasten.loggers import TensorBoardLogger

        return TensorBoardLogger(folder, version=version)
    from hasten.loggers import CSVLogger

    return CSVLogger(folder, version=version)


def settle_loggers(loggers: Iterable[Any], runtime: Runtime) -> None:
    """Give the loggers of all processes the identity of the first process's loggers: one folder for the run."""
    if runtime.several_processes:
        _take_identities(loggers, runtime.broadcast(_identities(loggers)))


def _identities(loggers: Iterable[Any]) -> list[dict[str, Any]]:
    return [logger.identity() if isinstance(logger, Logger) else {} for logger in loggers]


def _take_identities(loggers: Iterable[Any], identities: list[dict[str, Any]]) -> None:
    for logger, identity in zip(loggers, identities, strict=False):
        if isinstance(logger, Logger) and identity:
            logger.take_identity(identity)


def close_loggers(loggers: Iterable[Any], status: str) -> Exception | None:
    """Close all loggers; return the first error of a run that succeeded. Where a run failed, it is a warning."""
    failure: Exception | None = None
    for logger in loggers:
        try:
            logger.finalize(status)
        except Exception as error:
            if status == "success":
                add_note(error, f"The last values of {type(logger).__name__} are not written.")
                failure = failure or error
            else:
                # What ended the run is raised.
                rank_zero_warn(f"The last values of {type(logger).__name__} are not written: {error}.")
    return failure


def callbacks(arguments: Arguments) -> list[Callback]:
    """Return the callbacks of ``Trainer(callbacks=...)`` and the default ones that its arguments enable.

    Raises:
        ValueError: a callback is given whose argument disables it, or several progress bars.

    """
    from hasten.callbacks.checkpoint import Checkpoint, ModelCheckpoint
    from hasten.callbacks.model_summary import ModelSummary, RichModelSummary
    from hasten.callbacks.progress import ProgressBar, TQDMProgressBar
    from hasten.callbacks.timer import Timer

    callbacks: list[Callback] = list(arguments.callbacks)

    def names_of(kind: type) -> list[str]:
        return [type(callback).__name__ for callback in callbacks if isinstance(callback, kind)]

    bars, checkpoints = names_of(ProgressBar), names_of(Checkpoint)
    if len(bars) > 1:
        raise MisconfigurationException(
            f"You added multiple progress bar callbacks to the Trainer, and there can be one: {bars}.",
            argument="callbacks",
        )
    for argument, given, enabled in (
        ("enable_progress_bar", bars, arguments.enable_progress_bar),
        ("enable_checkpointing", checkpoints, arguments.enable_checkpointing or arguments.fast_dev_run),
    ):
        if given and not enabled:
            what = f"Trainer was configured with `{argument}=False` but found `{given[0]}` in callbacks list."
            raise MisconfigurationException(what, fix="Leave out one of them.", argument=argument)
    if arguments.max_time is not None:
        if names_of(Timer):
            rank_zero_warn(
                f"Ignoring `Trainer(max_time={arguments.max_time!r})`, callbacks list already contains a Timer.",
                fix="Leave out one of them.",
            )
        else:
            callbacks.append(Timer(arguments.max_time))
    if arguments.enable_progress_bar and not bars:
        callbacks.append(TQDMProgressBar())
    if arguments.enable_model_summary and not names_of(ModelSummary):
        is_rich = "RichProgressBar" in {kind.__name__ for bar in callbacks for kind in type(bar).__mro__}
        callbacks.append(RichModelSummary() if is_rich else ModelSummary())
    if arguments.enable_checkpointing and not checkpoints:
        callbacks.append(ModelCheckpoint())
    return last_ones_last(callbacks)


def attach(trainer: Trainer, module: LightningModule, datamodule: LightningDataModule | None) -> None:
    """Attach module and datamodule to a Trainer, and add the callbacks of ``configure_callbacks``."""
    module.trainer = trainer
    log_into(module, trainer._logged)
    trainer._logged.module = module
    if datamodule is not None:
        datamodule.trainer = trainer
    decisions = conventions.current()
    if decisions.removes_unpicklable_hparams:
        remove_unpicklable(module)
    if decisions.warns_of_settings:
        forget_warnings()
    _add_configured(trainer, module, datamodule)
    let_log(trainer.callbacks, module)


def _add_configured(trainer: Trainer, module: LightningModule, datamodule: LightningDataModule | None) -> None:
    configured: Any = module.configure_callbacks()
    several = isinstance(configured, Iterable) and not isinstance(configured, Callback)
    added: list[Callback] = list(configured) if several else [] if configured is None else [configured]
    for callback in added:
        require_callback(f"{type(module).__name__}.configure_callbacks()", callback)
    if added:
        check_signatures(module, datamodule, added)
        kinds = tuple(type(callback) for callback in added)
        # A callback of the same class, or of a derived one, replaces a callback of the Trainer.
        others, replaced = [], set()
        for callback in trainer.callbacks:
            if type(callback) is Callback or not any(issubclass(kind, type(callback)) for kind in kinds):
                others.append(callback)
            elif not any(callback is each for each in added):
                replaced.add(type(callback).__name__)
        if replaced:
            rank_zero_info(
                "The following callbacks returned in `LightningModule.configure_callbacks` will override existing "
                f"callbacks passed to Trainer: {', '.join(sorted(replaced))}."
            )
        trainer.callbacks[:] = last_ones_last(others + added)


def time_is_limited(trainer: Trainer) -> bool:
    """Return whether a Timer limits the fit that begins; it may have been added after the Trainer was made."""
    from hasten.callbacks.timer import Timer

    timers = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]
    return trainer.state.fn is TrainerFn.FITTING and any(timer.time_remaining() is not None for timer in timers)


def let_log(callbacks: Iterable[Callback], module: LightningModule | None) -> None:
    """Give callbacks the module whose ``log`` they use during a run; None when it is over."""
    for callback in callbacks:
        if module is None:
            callback.__dict__.pop("_module", None)
        else:
            callback.__dict__["_module"] = module


def to_host(run: Run, *, failed: bool) -> None:
    """Move the module and the states of its optimizers back to the CPU, where the user's program expects them."""
    # After a failure the device may not respond; that error must not hide the first one.
    with suppress(RuntimeError) if failed else nullcontext():
        if not run.runtime.strategy.sharding.to_host(run.module):
            return
        run.wrapped = run.module
        for optimizer in run.optimizers:
            states = getattr(optimizer, "state", {})  # An optimizer that is none of torch's may have none.
            for parameter, state in list(states.items()):
                states[parameter] = move_to(state, "cpu")


def given_or_assigned(trainer: Trainer, fn: TrainerFn, ckpt_path: PathLike | None) -> PathLike | None:
    """Return the checkpoint of a call: the given one, or the one that the program has assigned to the Trainer."""
    assigned = trainer._assigned_path
    if ckpt_path is None or assigned is None:
        return assigned if ckpt_path is None else ckpt_path
    rank_zero_warn(
        f"Trainer.{fn.value}(ckpt_path={os.fspath(ckpt_path)!r}) is loaded, and not trainer.ckpt_path={assigned!r}, "
        "which was assigned before.",
        fix="Use one of them.",
    )
    trainer._assigned_path = None
    return ckpt_path


def weights_for(
    trainer: Trainer, fn: TrainerFn, model: LightningModule | None, ckpt_path: PathLike | None
) -> PathLike | None:
    """Return the checkpoint for an evaluation; by default, without a model, that is the best one of the last fit."""
    ckpt_path = given_or_assigned(trainer, fn, ckpt_path)
    best = getattr(trainer.checkpoint_callback, "best_model_path", "")
    if best and model is None and ckpt_path is None and trainer._run is not None:
        rank_zero_warn(
            f"Trainer.{fn.value}() without a model and ckpt_path: The best model of the previous `fit` call will "
            f"be used, {best}.",
            fix='Say ckpt_path="best" to be explicit, or pass the model for the weights in memory.',
        )
        ckpt_path = "best"
    if best and ckpt_path == "best":
        # The run begins with new callbacks of configure_callbacks, which have saved nothing.
        return resolve_path(trainer, ckpt_path, fits=False)
    return ckpt_path


def last_ones_last(callbacks: list[Callback]) -> list[Callback]:
    """Return the callbacks: first those that search, last those that save the states of all others in checkpoints."""
    return sorted(callbacks, key=lambda each: _saves(each) - hasattr(type(each), "SUPPORTED_MODES"))


def folder_of_logs(trainer: Trainer) -> str:
    """Return where the logs of a run are; unlike ``log_dir``, without asking the first process."""
    first: Any = next(iter(trainer.loggers), None)
    folder = getattr(first, "log_dir", None) or getattr(first, "save_dir", None)
    return os.fspath(folder or trainer.default_root_dir)


def position(run: Run) -> watchdog.Position:
    """Return how far a run has come; called in another thread during the run."""
    progress, state = run.progress, run.state
    text = state.fn.value if state.fn else ""
    if state.stage is not None and state.stage.value != text:
        text = f"{text}, {state.stage.value}"
    if state.fn is TrainerFn.FITTING and (progress.in_epoch or progress.total_batches):
        text = f"{text}, epoch {progress.epoch + 1}, batch {progress.batch}, step {progress.logged_step}"
    elif progress.evaluated:
        text = f"{text}, {progress.evaluated} batches done"
    return watchdog.Position(text, progress.total_batches + progress.evaluated)


def leave_program(signal_number: int, error: BaseException) -> NoReturn:
    """End the program with the exit code of the signal; return to a notebook or prompt."""
    if is_interactive():
        raise KeyboardInterrupt from None
    launch.leave_with_own_code()
    raise leaving(128 + signal_number) from None


def name_checkpoint(trainer: Trainer, run: Run, error: BaseException) -> None:
    """Name the checkpoint in an error of the first epoch after it, in which all that it holds is used."""
    done, path = run.progress.total_batches - run.resume.from_batch, trainer.ckpt_path
    is_first = run.resume.from_batch >= 0 and done <= trainer.num_training_batches
    if is_first and isinstance(error, Exception) and str(path) not in str(error):
        add_note(error, f"The run was resumed from {path}, whose state it uses. Batches since: {done}.")


def failed_in_copies(trainer: Trainer, error: BaseException) -> None:
    """Record, in the process that started the others, that their run has failed."""
    trainer.state.status, trainer.state.stage = TrainerStatus.INTERRUPTED, None
    for callback in trainer.callbacks:
        if not _saves(callback):
            callback.on_exception(trainer, trainer.lightning_module, error)  # type: ignore[arg-type]


def _saves(callback: Callback) -> bool:
    from hasten.callbacks.checkpoint import Checkpoint

    return isinstance(callback, Checkpoint)


# -- results of a Trainer's copies in other processes (``strategy="ddp_spawn"`` and similar)

_PATHS = ("best_model_path", "best_model_score", "best_k_models", "last_model_path", "dirpath")


def export_results(self: Trainer) -> dict[str, Any]:
    """Return the results of the run for the process that started the copies."""
    module, run, logged = self._module, self._run, self._logged
    assert module is not None
    assert run is not None
    weights = module.state_dict()
    # Buffers that are not persistent, and what a state_dict() of the program's own leaves out.
    others = {name: tensor.detach() for name, tensor in _named_tensors(module) if name not in weights}
    return {
        "weights": move_to(weights, "cpu"),
        "other_tensors": move_to(others, "cpu"),
        "changes": run.module_changes.state_dict(),
        "progress": self._progress.state_dict(),
        "callbacks": [
            (
                move_to(callback.state_dict(), "cpu"),
                {name: getattr(callback, name) for name in _PATHS if hasattr(callback, name)},
            )
            for callback in self._callbacks
        ],
        "values": logged.export_shown(),
        "loggers": _identities(self._loggers),
        "history": self.history,
        "state": self.state,
        "should_stop": self.should_stop,
    }


def import_results(self: Trainer, results: dict[str, Any]) -> None:
    """Restore what ``export_results`` returned in the first copy."""
    assert self._module is not None
    self._progress.load_state_dict(results["progress"])
    # The copies added them, and the results are in that order.
    _add_configured(self, self._module, self._datamodule)
    for callback, (state, paths) in zip(self._callbacks, results["callbacks"], strict=False):
        callback.load_state_dict(state)
        for name, value in paths.items():
            setattr(callback, name, value)
    self._logged.import_shown(results["values"])
    _take_identities(self._loggers, results["loggers"])
    self.history = results["history"]
    self.state, self._should_stop = results["state"], results["should_stop"]
    _import_weights(self, self._module, results["weights"])
    others = results["other_tensors"]
    for name, tensor in _named_tensors(self._module):
        if name in others:
            tensor.data = others[name].to(tensor)
    changes = ModuleChanges(self._module)
    changes.load_state_dict(results["changes"])
    changes.begin()


def _named_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _import_weights(trainer: Trainer, module: LightningModule, weights: dict[str, Any]) -> None:
    """Load the weights of the first copy into the module of this process, in which no hook of the run was called."""
    if weights.keys() - module.state_dict().keys():
        module.configure_model()
    try:
        module.load_state_dict(weights, strict=module.strict_loading)
    except RuntimeError as error:
        raise make_error(
            RuntimeError,
            f"strategy={trainer.strategy.name!r}: the run is complete, and its weights do not fit the "
            f"{type(module).__name__} of this process: {error}",
            fix="Create all layers in __init__() or configure_model(): setup() runs only in the started processes.",
        ) from error
