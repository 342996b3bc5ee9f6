"""Trainer's arguments: all defaults, checks and their texts in one place."""

from __future__ import annotations

import inspect
import math
import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from hasten._lib.durations import Interval, parse_interval
from hasten._lib.names import did_you_mean
from hasten._lib.rank_zero import rank_zero_info
from hasten.arguments_speed import SpeedArguments
from hasten.loggers.base import DummyLogger
from hasten.module.callback import Callback


@dataclass(frozen=True)
class Arguments:
    """The arguments of a Trainer after all checks; nothing below reads strings again."""

    callbacks: tuple[Callback, ...]
    logger: Any
    fast_dev_run: int
    max_epochs: int | None
    max_epochs_assumed: bool
    min_epochs: int | None
    max_steps: int
    min_steps: int | None
    max_time: timedelta | None
    limit_train_batches: int | float | None
    limit_val_batches: int | float | None
    limit_test_batches: int | float | None
    limit_predict_batches: int | float | None
    overfit_batches: int | float
    val_check_interval: int | float | Interval
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int
    log_every_n_steps: int
    enable_checkpointing: bool
    enable_progress_bar: bool
    enable_model_summary: bool
    accumulate_grad_batches: int
    gradient_clip_val: float | None
    gradient_clip_algorithm: str | None
    deterministic: bool | str | None
    benchmark: bool | None
    inference_mode: bool
    use_distributed_sampler: bool
    detect_anomaly: bool
    on_bad_loss: str
    barebones: bool
    sync_batchnorm: bool
    reload_dataloaders_every_n_epochs: int
    default_root_dir: str
    enable_autolog_hparams: bool
    speed: SpeedArguments


def check(
    *,
    callbacks: Any,
    logger: Any,
    fast_dev_run: Any,
    max_epochs: Any,
    min_epochs: Any,
    max_steps: Any,
    min_steps: Any,
    max_time: Any,
    limit_train_batches: Any,
    limit_val_batches: Any,
    limit_test_batches: Any,
    limit_predict_batches: Any,
    overfit_batches: Any,
    val_check_interval: Any,
    check_val_every_n_epoch: Any,
    num_sanity_val_steps: Any,
    log_every_n_steps: Any,
    enable_checkpointing: Any,
    enable_progress_bar: Any,
    enable_model_summary: Any,
    accumulate_grad_batches: Any,
    gradient_clip_val: Any,
    gradient_clip_algorithm: Any,
    deterministic: Any,
    benchmark: Any,
    inference_mode: Any,
    use_distributed_sampler: Any,
    detect_anomaly: Any,
    on_bad_loss: Any,
    barebones: Any,
    sync_batchnorm: Any,
    reload_dataloaders_every_n_epochs: Any,
    default_root_dir: Any,
    enable_autolog_hparams: Any,
    speed_arguments: SpeedArguments,
) -> Arguments:
    """Check every argument: type, range, combination.

    Raises:
        TypeError: an argument has a type it cannot have.
        ValueError: an argument is out of range, or two of them contradict each other.

    """
    for name, value in {
        "inference_mode": inference_mode,
        "use_distributed_sampler": use_distributed_sampler,
        "detect_anomaly": detect_anomaly,
        "barebones": barebones,
        "sync_batchnorm": sync_batchnorm,
        "enable_autolog_hparams": enable_autolog_hparams,
    }.items():
        _boolean(name, value)
    for name, value in {
        "enable_checkpointing": enable_checkpointing,
        "enable_progress_bar": enable_progress_bar,
        "enable_model_summary": enable_model_summary,
        "benchmark": benchmark,
    }.items():
        if value is not None:
            _boolean(name, value)

    barebones = bool(barebones)
    if barebones:
        refused = {
            "enable_checkpointing": enable_checkpointing,
            "enable_progress_bar": enable_progress_bar,
            "enable_model_summary": enable_model_summary,
            "logger": logger,
            "num_sanity_val_steps": num_sanity_val_steps,
            "log_every_n_steps": log_every_n_steps,
            "detect_anomaly": detect_anomaly,
            "fast_dev_run": fast_dev_run,
        }
        asked = [f"{name}={value!r}" for name, value in refused.items() if value]
        if asked:
            raise ValueError(
                f"Trainer(barebones=True, {', '.join(asked)}): barebones switches all of that off. "
                "Leave out one or the other."
            )
        enable_checkpointing = enable_progress_bar = enable_model_summary = False
        logger, num_sanity_val_steps, log_every_n_steps = False, 0, 0

    if isinstance(fast_dev_run, bool):
        fast_dev_run = int(fast_dev_run)
    fast_dev_run = _integer("fast_dev_run", fast_dev_run, least=0, hint="True, False or a number of batches")

    limits = {
        "limit_train_batches": limit_train_batches,
        "limit_val_batches": limit_val_batches,
        "limit_test_batches": limit_test_batches,
        "limit_predict_batches": limit_predict_batches,
    }
    limits = {name: None if value is None else _share(name, value) for name, value in limits.items()}
    overfit_batches = _share("overfit_batches", overfit_batches)

    max_epochs, max_steps, max_time = _in_own_units(
        max_epochs=max_epochs, max_steps=None if max_steps in (None, -1) else max_steps, max_time=max_time
    )
    min_epochs, min_steps, _ = _in_own_units(min_epochs=min_epochs, min_steps=min_steps)
    max_epochs = _limit("max_epochs", max_epochs)
    max_steps = -1 if max_steps is None else _limit("max_steps", max_steps)
    min_epochs = None if min_epochs is None else _integer("min_epochs", min_epochs, least=0)
    min_steps = None if min_steps is None else _integer("min_steps", min_steps, least=0)
    num_sanity_val_steps = 2 if num_sanity_val_steps is None else num_sanity_val_steps
    num_sanity_val_steps = _integer("num_sanity_val_steps", num_sanity_val_steps, least=-1)
    if logger is None:
        logger = True
    if fast_dev_run:
        rank_zero_info(f"fast_dev_run: {fast_dev_run} batch(es) of each stage, no logger, no checkpoint.")
        limits = dict.fromkeys(limits, fast_dev_run)
        max_epochs, max_steps, num_sanity_val_steps = 1, fast_dev_run, 0
        min_epochs = min_steps = None
        val_check_interval, check_val_every_n_epoch = 1.0, 1
        if _logger(logger):
            # Code that writes to its logger runs through as well.
            logger = DummyLogger()
        overfit_batches = 0.0
    elif overfit_batches:
        limits["limit_train_batches"] = limits["limit_val_batches"] = overfit_batches

    max_epochs_assumed = False
    if max_epochs is None:
        if max_steps == -1 and max_time is None:
            max_epochs, max_epochs_assumed = 1000, True
        else:
            max_epochs = -1
    if min_epochs is not None and 0 <= max_epochs < min_epochs:
        raise ValueError(
            f"Trainer(min_epochs={min_epochs}, max_epochs={max_epochs}): the least is above the most."
        )
    if min_steps is not None and 0 <= max_steps < min_steps:
        raise ValueError(
            f"Trainer(min_steps={min_steps}, max_steps={max_steps}): the least is above the most."
        )

    check_val_every_n_epoch = _count("check_val_every_n_epoch", check_val_every_n_epoch, "epochs")
    if check_val_every_n_epoch is not None:
        check_val_every_n_epoch = _integer("check_val_every_n_epoch", check_val_every_n_epoch, least=1)
    val_check_interval, check_val_every_n_epoch = _validation_interval(
        val_check_interval, check_val_every_n_epoch
    )
    log_every_n_steps = _count("log_every_n_steps", log_every_n_steps, "steps")
    if log_every_n_steps is None:
        log_every_n_steps = 50
    log_every_n_steps = _integer("log_every_n_steps", log_every_n_steps, least=0)

    if isinstance(accumulate_grad_batches, dict):
        raise TypeError(
            f"Trainer(accumulate_grad_batches={accumulate_grad_batches!r}): give one number. For one that changes with "
            f"the epoch write Trainer(callbacks=[GradientAccumulationScheduler({accumulate_grad_batches!r})])."
        )
    accumulate_grad_batches = _integer("accumulate_grad_batches", accumulate_grad_batches, least=1)

    gradient_clip_val = _clip_value(gradient_clip_val)
    gradient_clip_algorithm = _one_of("gradient_clip_algorithm", gradient_clip_algorithm, ("norm", "value"))
    if deterministic not in (None, True, False, "warn"):
        raise ValueError(
            f"Trainer(deterministic={deterministic!r}): use True, False or 'warn'."
            + did_you_mean(str(deterministic), ["warn"])
        )
    reload_every = _count("reload_dataloaders_every_n_epochs", reload_dataloaders_every_n_epochs, "epochs")
    reload_every = _integer("reload_dataloaders_every_n_epochs", reload_every, least=0)

    return Arguments(
        callbacks=_callbacks(callbacks),
        logger=_logger(logger),
        fast_dev_run=fast_dev_run,
        max_epochs=max_epochs,
        max_epochs_assumed=max_epochs_assumed,
        min_epochs=min_epochs,
        max_steps=max_steps,
        min_steps=min_steps,
        max_time=max_time,
        overfit_batches=overfit_batches,
        val_check_interval=val_check_interval,
        check_val_every_n_epoch=check_val_every_n_epoch,
        num_sanity_val_steps=num_sanity_val_steps,
        log_every_n_steps=log_every_n_steps,
        enable_checkpointing=not fast_dev_run and enable_checkpointing is not False,
        enable_progress_bar=enable_progress_bar is not False,
        enable_model_summary=enable_model_summary is not False,
        accumulate_grad_batches=accumulate_grad_batches,
        gradient_clip_val=gradient_clip_val,
        gradient_clip_algorithm=gradient_clip_algorithm,
        deterministic=deterministic,
        benchmark=benchmark,
        inference_mode=inference_mode,
        use_distributed_sampler=use_distributed_sampler,
        detect_anomaly=detect_anomaly,
        on_bad_loss=_on_bad_loss(on_bad_loss),
        barebones=barebones,
        sync_batchnorm=sync_batchnorm,
        reload_dataloaders_every_n_epochs=reload_every,
        default_root_dir=_root_dir(default_root_dir),
        enable_autolog_hparams=enable_autolog_hparams,
        speed=speed_arguments,
        **limits,
    )


def changed(arguments: Arguments, name: str, value: Any) -> Arguments:
    """Return ``arguments`` with another value for one of them, checked as in ``check``.

    Raises:
        TypeError: the value has a type it cannot have.
        ValueError: it is out of range.

    """
    new: dict[str, Any] = {}
    if name.startswith("limit_"):
        new[name] = None if value is None else _share(name, value)
    elif name == "overfit_batches":
        new[name] = new["limit_train_batches"] = new["limit_val_batches"] = _share(name, value)
        if not value:
            new["limit_train_batches"] = new["limit_val_batches"] = None
    elif name in ("max_epochs", "max_steps"):
        new[name] = -1 if value is None else _limit(name, value)
    elif name in ("min_epochs", "min_steps"):
        new[name] = None if value is None else _integer(name, value, least=0)
    elif name in ("val_check_interval", "check_val_every_n_epoch"):
        interval, epochs = arguments.val_check_interval, arguments.check_val_every_n_epoch
        if name == "val_check_interval":
            interval = value
        else:
            epochs = _count(name, value, "epochs")
            epochs = None if epochs is None else _integer(name, epochs, least=1)
        if not isinstance(interval, Interval):
            interval, epochs = _validation_interval(interval, epochs)
        new = {"val_check_interval": interval, "check_val_every_n_epoch": epochs}
    elif name == "gradient_clip_val":
        new[name] = _clip_value(value)
    elif name == "gradient_clip_algorithm":
        new[name] = _one_of(name, value, ("norm", "value"))
    else:
        least = {"num_sanity_val_steps": -1, "accumulate_grad_batches": 1}.get(name, 0)
        unit = "steps" if name == "log_every_n_steps" else "epochs"
        number = (
            int(value) if isinstance(value, bool) and name == "fast_dev_run" else _count(name, value, unit)
        )
        if name == "num_sanity_val_steps" and value == math.inf:
            number = -1
        new[name] = _integer(name, number, least=least)
    return replace(arguments, **new)


NAMES = tuple(inspect.signature(check).parameters)


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"Trainer({name}={value!r}): use True or False.")


def _integer(name: str, value: Any, *, least: int, hint: str | None = None) -> int:
    allowed = hint or f"a whole number of at least {least}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        if isinstance(value, float) and value.is_integer():
            raise TypeError(f"Trainer({name}={value!r}): use {allowed}, for instance {name}={int(value)}.")
        raise TypeError(f"Trainer({name}={value!r}): use {allowed}, not {type(value).__name__}.")
    number = int(value.__index__())
    if number < least:
        raise ValueError(f"Trainer({name}={number}): use {allowed}.")
    return number


def _limit(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, float) and math.isinf(value) and value > 0:
        return -1
    return _integer(name, value, least=-1, hint="a whole number of at least 0, or -1 for no limit")


def _share(name: str, value: Any) -> int | float:
    allowed = "a number of batches (int, at least 0) or a share (float, 0.0 to 1.0)"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"Trainer({name}={value!r}): use {allowed}, not {type(value).__name__}.")
    if value < 0 or (isinstance(value, float) and not value <= 1.0):
        whole = f" Did you mean {name}={int(value)}?" if isinstance(value, float) and value > 1 else ""
        raise ValueError(f"Trainer({name}={value!r}): use {allowed}.{whole}")
    return value


def _in_own_units(**given: Any) -> tuple[Any, Any, timedelta | None]:
    """Return (epochs, steps, time) of limits, each of which may be written in the unit of another."""
    found: dict[str, tuple[str, Any]] = {}
    for name, value in given.items():
        unit = "epochs" if "epochs" in name else "steps" if "steps" in name else "time"
        if value is None:
            continue
        if isinstance(value, str) and value.strip().isdigit() and unit != "time":
            raise TypeError(
                f"Trainer({name}={value!r}): use a whole number, for instance {name}={int(value)}."
            )
        if isinstance(value, (str, dict, timedelta)):
            interval = parse_interval(value, argument=f"Trainer({name}=...)")
            if interval.time is not None and interval.time <= timedelta(0):
                raise ValueError(f"Trainer({name}={value!r}): the time must be longer than zero.")
            unit, amount = interval.unit, getattr(interval, interval.unit)
            if unit == "time" and "max_time" not in given:
                raise ValueError(
                    f"Trainer({name}={value!r}): a time cannot be given here, write '2ep' or '500st'."
                )
        elif unit == "time":
            raise TypeError(
                f"Trainer({name}={value!r}): use 'DD:HH:MM:SS', a text such as '90min', a timedelta or a dict, "
                f"not {type(value).__name__}."
            )
        else:
            amount = value
        if unit in found:
            raise ValueError(
                f"Trainer({found[unit][0]}={given[found[unit][0]]!r}, {name}={value!r}): both say how many {unit}. "
                "Leave out one of them."
            )
        found[unit] = name, amount
    return tuple(found.get(unit, (None, None))[1] for unit in ("epochs", "steps", "time"))  # type: ignore[return-value]


_TAKES = {
    "epochs": "check_val_every_n_epoch, val_check_interval, max_epochs",
    "steps": "val_check_interval, log_every_n_steps, max_steps",
    "time": "val_check_interval, max_time",
}


def _count(name: str, value: Any, unit: str) -> Any:
    """Return the number in a text such as "2ep"; anything else as it is."""
    if not isinstance(value, (str, dict, timedelta)):
        return value
    interval = parse_interval(value, argument=f"Trainer({name}=...)")
    if interval.unit != unit:
        raise ValueError(
            f"Trainer({name}={value!r}): this counts {unit}, for instance {'2ep' if unit == 'epochs' else '500st'!r}. "
            f"An interval in {interval.unit} can be given to {_TAKES[interval.unit]}."
        )
    return getattr(interval, unit)


def _validation_interval(value: Any, every_n_epochs: int | None) -> tuple[int | float | Interval, int | None]:
    """Return ``val_check_interval`` and ``check_val_every_n_epoch``."""
    if value is None:
        value = 1.0
    if isinstance(value, (str, dict, timedelta)):
        interval = parse_interval(value, argument="Trainer(val_check_interval=...)")
        if interval.time is not None and interval.time <= timedelta(0):
            raise ValueError(f"Trainer(val_check_interval={value!r}): the time must be longer than zero.")
        if interval.epochs is None:
            # Steps are counted over epochs, as time is.
            return interval, None if interval.unit == "steps" else every_n_epochs
        if every_n_epochs not in (None, 1, interval.epochs):
            raise ValueError(
                f"Trainer(val_check_interval={value!r}, check_val_every_n_epoch={every_n_epochs}): both say after "
                "how many epochs to validate. Leave out one of them."
            )
        return 1.0, interval.epochs
    allowed = (
        "a number of batches (int, at least 1), a share of an epoch (float, above 0.0 to 1.0), "
        "or a text such as '2ep', '500st', '90min'"
    )
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"Trainer(val_check_interval={value!r}): use {allowed}.")
    if value <= 0 or (isinstance(value, float) and value > 1.0):
        whole = f" Did you mean {int(value)}?" if isinstance(value, float) and value > 1 else ""
        raise ValueError(f"Trainer(val_check_interval={value!r}): use {allowed}.{whole}")
    if every_n_epochs is None and isinstance(value, float):
        raise ValueError(
            f"Trainer(val_check_interval={value!r}, check_val_every_n_epoch=None): counting over epochs needs "
            "a number of batches (int) or a time."
        )
    return value, every_n_epochs


def _clip_value(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"Trainer(gradient_clip_val={value!r}): use a number, not {type(value).__name__}.")
    if not value >= 0:
        raise ValueError(
            f"Trainer(gradient_clip_val={value!r}): use a number of at least 0; 0 or None is off."
        )
    return float(value)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str | None:
    if value is None:
        return None
    text = str(getattr(value, "value", value))
    if text.lower() not in allowed:
        raise ValueError(
            f"Trainer({name}={value!r}): use one of {', '.join(map(repr, allowed))}."
            + did_you_mean(text.lower(), list(allowed))
        )
    return text.lower()


def _on_bad_loss(value: Any) -> str:
    allowed = ("warn", "stop", "skip", "rewind")
    if value not in allowed:
        hint = did_you_mean(value, allowed) if isinstance(value, str) else ""
        raise ValueError(f"Trainer(on_bad_loss={value!r}): use one of {', '.join(map(repr, allowed))}.{hint}")
    return str(value)


def _callbacks(callbacks: Any) -> tuple[Callback, ...]:
    if callbacks is None:
        return ()
    if isinstance(callbacks, Callback):
        return (callbacks,)
    if not isinstance(callbacks, (list, tuple)):
        raise TypeError(f"Trainer(callbacks={callbacks!r}): use a Callback or a list of them.")
    for callback in callbacks:
        if isinstance(callback, type) and issubclass(callback, Callback):
            raise TypeError(
                f"Trainer(callbacks=[{callback.__name__}]): that is a class. Write {callback.__name__}()."
            )
        if not isinstance(callback, Callback):
            raise TypeError(
                f"Trainer(callbacks=[...]): {callback!r} is a {type(callback).__name__}, not a hasten.Callback."
            )
    seen: set[int] = set()
    for callback in callbacks:
        if id(callback) in seen:
            raise ValueError(
                f"Trainer(callbacks=[...]): the same {type(callback).__name__} object is given twice."
            )
        seen.add(id(callback))
    keys: dict[str, Callback] = {}
    for callback in callbacks:
        other = keys.setdefault(callback.state_key, callback)
        stateful = overridden_state(callback)
        if other is not callback and stateful:
            raise ValueError(
                f"Trainer(callbacks=[...]): two callbacks have the state key {callback.state_key!r}, so their "
                "state could not be told apart in a checkpoint. Give them different arguments, or override "
                "state_key."
            )
    return tuple(callbacks)


def overridden_state(callback: Callback) -> bool:
    """Return whether a callback has state of its own for checkpoints."""
    return type(callback).state_dict is not Callback.state_dict


def _logger(logger: Any) -> Any:
    if isinstance(logger, bool):
        return logger
    loggers = list(logger) if isinstance(logger, (list, tuple)) else [logger]
    for entry in loggers:
        if not hasattr(entry, "log_metrics"):
            name = entry.__name__ if isinstance(entry, type) else repr(entry)
            raise TypeError(
                f"Trainer(logger={name}): use True (a CSVLogger), False, a logger or a list of loggers."
            )
        if isinstance(entry, type):
            raise TypeError(
                f"Trainer(logger={entry.__name__}): that is a class. Write {entry.__name__}(...)."
            )
    return loggers


def _root_dir(path: Any) -> str:
    if path is None:
        return os.getcwd()
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"Trainer(default_root_dir={path!r}): use a path.")
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))
