"""The records of a fit: its history, and ``run.jsonl`` in the folder of the first logger's run."""

from __future__ import annotations

import functools
import inspect
import os
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

from hasten._lib.files import is_url, local
from hasten.callbacks.checkpoint_files import default_folder
from hasten.hooks import nothing
from hasten.loggers.base import DummyLogger
from hasten.record import about
from hasten.record.about import verdicts
from hasten.record.file import FILE_NAME, FORMAT, NoRecord, Record
from hasten.types import TrainerFn

if TYPE_CHECKING:
    from hasten.loops.run import Run
    from hasten.trainer.trainer import Trainer

# Longer strings in arguments and hyper-parameters are cut.
_LONGEST = 300


@contextmanager
def recorded(trainer: Trainer, run: Run) -> Iterator[Callable[[], None]]:
    """Keep the history of a fit and write its record; other runs and trials have neither.

    Yields: a function to call when the fit is prepared; it writes what is known by then as the first line of the
        record.

    """
    logged = run.logged
    if run.state.fn is not TrainerFn.FITTING:
        yield nothing
        return
    if run.progress.total_batches:
        # A fit that continues where the last one ended keeps its history.
        run.observers.history = trainer.history
    else:
        trainer.history = run.observers.history

    def on_row(step: int, epoch: int, values: Mapping[str, float]) -> None:
        run.observers.history.add(step=step, epoch=epoch, values=values)
        run.observers.record.add("row", step=step, epoch=epoch, values=values)

    def take_history() -> None:
        # A fit that resumes has the checkpoint's history by now.
        trainer.history = run.observers.history

    logged.on_row = on_row
    records = run.observers.pace.is_recorded = _records(trainer) and not run.arguments.fast_dev_run
    if not records or not trainer.is_global_zero:
        try:
            yield take_history
        finally:
            logged.on_row = None
        return
    began = time.time()
    git = about.GitState(os.path.dirname(about.program() or "") or os.getcwd())

    def begin() -> None:
        take_history()
        path = _path(trainer)
        if path is None:
            return
        record = run.observers.record = Record(path, ready=git.ready)
        line = {"kind": "start", "time": began, "format": FORMAT, **_facts(trainer, run)}
        record.add_line(lambda: {**line, "git": git.read()})
        if verdicts and (advice := verdicts.get(trainer)) is not None:
            rows = [
                {"name": row.name, "factor": row.speed, "low": row.low, "high": row.high, "verdict": row.verdict}
                for row in advice.rows
            ]
            record.add_line({"kind": "advice", "time": began, "line": advice.line, "rows": rows})

    reason, message = "failed", None
    try:
        with _noting_warnings(run):
            yield begin
        reason = "stopped early" if run.limits.should_stop else "completed"
    except (KeyboardInterrupt, SystemExit):
        reason = "interrupted"
        raise
    except BaseException as error:
        first = str(error).partition("\n")[0]
        message = f"{type(error).__name__}: {first}" if first else type(error).__name__
        raise
    finally:
        progress = run.progress
        run.observers.record.add(
            "end", step=progress.logged_step, epoch=progress.current_epoch, reason=reason, message=message
        )
        run.observers.record.flush()
        git.read()
        logged.on_row = None
        run.observers.record = NoRecord()


def _records(trainer: Trainer) -> bool:
    return bool(trainer.loggers) and not isinstance(trainer.loggers[0], DummyLogger)


def _path(trainer: Trainer) -> str | None:
    """Return where the record is written; None if files cannot grow there, and for loggers without a folder."""
    given = getattr(trainer.loggers[0], "save_dir", None)
    if given is None:
        given = getattr(trainer.loggers[0], "log_dir", None)
    if not isinstance(given, str | os.PathLike):  # None, or an attribute of a Mock.
        return None
    folder = os.path.dirname(default_folder(trainer))
    if is_url(folder):
        return None
    folder = local(folder)
    if not os.path.isdir(folder):
        with suppress(OSError):  # The record says so when it is written.
            os.makedirs(folder, exist_ok=True)
    return os.path.join(folder, FILE_NAME)


def _facts(trainer: Trainer, run: Run) -> dict[str, Any]:
    module, runtime, progress = run.module, run.runtime, run.progress
    sizes = [(one.numel(), one.element_size(), one.requires_grad) for one in module.parameters()]
    batches = run.data.train.limit if run.data.train.loaded else None
    loaders = run.data.train.loaders if run.data.train.loaded else []
    return {
        "step": progress.logged_step,
        "epoch": progress.current_epoch,
        "resumed_from": trainer.ckpt_path if run.resume.from_batch >= 0 else None,
        "process_began": about.process_began(),
        "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
        "command": about.command(),
        "program": about.program(),
        "cwd": os.getcwd(),
        "arguments": _arguments(trainer),
        "model": {
            "name": type(module).__name__,
            "parameters": sum([number for number, _, _ in sizes]),
            "trainable": sum([number for number, _, trains in sizes if trains]),
            "bytes": sum([number * size for number, size, _ in sizes]),
        },
        "data": {
            "train_batches": int(batches) if batches is not None and batches != float("inf") else None,
            "batch_size": getattr(loaders[0], "batch_size", None) if len(loaders) == 1 else None,
        },
        "versions": about.versions(),
        "machine": {
            **about.host(),
            "devices": about.device_names([runtime.device]) * max(1, runtime.world_size),
            "accelerator": runtime.device.type,
            "strategy": runtime.strategy.name,
            "precision": str(getattr(runtime.precision, "precision", "")),
            "world_size": runtime.world_size,
        },
        "hparams": _hparams(module),
    }


def _arguments(trainer: Trainer) -> dict[str, Any]:
    """Return the arguments of the Trainer that are not the defaults."""
    defaults = _default_arguments(cast(Hashable, type(trainer)))
    return {
        name: _shown(value)
        for name, value in trainer.given_arguments.items()
        if name not in defaults or not (value is defaults[name] or _equal(value, defaults[name]))
    }


@functools.cache
def _default_arguments(kind: Hashable) -> dict[str, Any]:
    parameters: dict[str, inspect.Parameter] = {}
    for one in reversed(cast(type, kind).__mro__):
        parameters |= inspect.signature(one).parameters if "__init__" in vars(one) and one is not object else {}
    return {name: parameter.default for name, parameter in parameters.items()}


def _equal(value: object, default: object) -> bool:
    # Comparing an array or a tensor does not give a bool.
    return isinstance(value, bool | int | float | str) and type(value) is type(default) and value == default


def _hparams(module: Any) -> dict[str, Any] | None:
    values = dict(getattr(module, "hparams", None) or {})
    return {str(name): _shown(value) for name, value in values.items()} or None


def _shown(value: Any) -> Any:
    """Return ``value`` as JSON, or else as a string; objects without their own ``__repr__`` by their class."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value[:_LONGEST]
    if isinstance(value, list | tuple):
        return [_shown(each) for each in value[:100]]
    if isinstance(value, dict):
        return {str(name): _shown(each) for name, each in value.items()}
    text = repr(value)
    return type(value).__name__ if " object at 0x" in text else text[:_LONGEST]


@contextmanager
def _noting_warnings(run: Run) -> Iterator[None]:
    """Add each warning that is shown to the record; it is shown as before."""
    show = warnings.showwarning

    @functools.wraps(show)
    def noting(message: Any, category: type[Warning], *place: Any, **options: Any) -> None:
        run.observers.record.add("warning", message=str(message), category=category.__name__)
        show(message, category, *place, **options)

    warnings.showwarning = noting
    try:
        yield
    finally:
        if warnings.showwarning is noting:
            warnings.showwarning = show
