"""The arguments of Trainer in one table: each row has the type that a run reads and the check that makes it."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import partial
from typing import Any, cast

from hasten._lib import check
from hasten._lib.durations import Period, parse_interval
from hasten._lib.errors import MisconfigurationException, MisconfigurationRuntimeError, WrongType
from hasten._lib.explain import explain
from hasten._lib.files import require_folder
from hasten._lib.names import did_you_mean, nearest
from hasten._lib.rank_zero import rank_zero_info, rank_zero_warn
from hasten.batching.fields import MicroBatch
from hasten.batching.rebatch import LengthBatching, as_batching
from hasten.compile.settings import CompileSettings, as_compile
from hasten.elsewhere import conventions
from hasten.loggers.base import DummyLogger, Logger
from hasten.module.callback import Callback, Numbered

# Called with the owner ("Trainer" or "Fabric"), the name and the value of an argument; returns what the run reads.
Check = Callable[[str, str, Any], Any]


_STAGES = ("train", "val", "test", "predict")


# -- checks of one argument


def _as_boolean(value: Any) -> Any:
    """Return False and True for 0 and 1, as from a command line or a config file."""
    return bool(value) if type(value) is int and value in (0, 1) else value


def _as_whole(value: Any) -> Any:
    """Return 10 for 10.0, as from a config file that says 1e1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _boolean(owner: str, name: str, value: Any, *, allow_none: bool = False) -> Any:
    return check.boolean(owner, name, _as_boolean(value), allow_none=allow_none)


_optional_boolean = partial(_boolean, allow_none=True)


def _deterministic(owner: str, name: str, value: Any) -> Any:
    return check.one_of(owner, name, _as_boolean(value), (True, False, "warn"), allow_none=True)


def _number(
    *, at_least: int, default: int | None = None, unit: str = "", allow_none: bool = False, takes_float: bool = True
) -> Check:
    """Return a check for a whole number, which may be written as "2ep" or "500st" where ``unit`` is given."""

    def checked(owner: str, name: str, value: Any) -> Any:
        if value is None and default is not None:
            return default
        if unit:
            value = _count(owner, name, value, unit)
        value = _as_whole(value) if takes_float else value
        return check.whole(owner, name, value, at_least=at_least, allow_none=allow_none)

    return checked


def _accumulation(owner: str, name: str, value: Any) -> Any:
    if isinstance(value, dict):
        what = f"{owner}({name}={value!r}): it is a whole number."
        fix = f"Write callbacks=[GradientAccumulationScheduler(scheduling={value!r})] for one that changes."
        raise WrongType(what, fix=fix, argument=name)
    return _number(at_least=1)(owner, name, value)


def _count(owner: str, name: str, value: Any, unit: str) -> Any:
    """Return the number in a string such as "2ep"; return any other value unchanged."""
    if not isinstance(value, (str, dict, timedelta)):
        return value
    interval = parse_interval(value, argument=f"{owner}({name}=...)")
    if interval.unit != unit:
        example = "2ep" if unit == "epochs" else "500st"
        raise MisconfigurationException(
            f"{owner}({name}={value!r}): this counts {unit}.", fix=f"Write a number, or {example!r}.", argument=name
        )
    return getattr(interval, unit)


def _limit(owner: str, name: str, value: Any) -> int | None:
    if isinstance(value, float) and math.isinf(value) and value > 0:
        return -1
    allowed = "a whole number of at least 0, or -1 for no limit"
    return cast("int | None", check.whole(owner, name, _as_whole(value), at_least=-1, allowed=allowed, allow_none=True))


def _share(owner: str, name: str, value: Any, *, allow_none: bool = False) -> int | float | None:
    if value is None and allow_none:
        return None
    allowed = "a number of batches (int, at least 0) or a share (float, 0.0 to 1.0)"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise check.wrong_type(owner, name, value, allowed)
    value = value if 0 <= value <= 1 else _as_whole(value)
    if value < 0 or (isinstance(value, float) and not value <= 1.0):
        raise check.wrong(owner, name, value, allowed)
    return cast("int | float", value)


_optional_share = partial(_share, allow_none=True)


def _fast_dev_run(owner: str, name: str, value: Any) -> int:
    value = int(value or 0) if isinstance(value, bool) or value is None else value
    return cast("int", check.whole(owner, name, value, at_least=0, allowed="True, False or a number of batches"))


def _sanity_steps(owner: str, name: str, value: Any) -> int:
    value = -1 if isinstance(value, float) and value == math.inf else 2 if value is None else value
    return cast("int", check.whole(owner, name, value, at_least=-1))


def _clip_value(owner: str, name: str, value: Any) -> float | None:
    check.number(owner, name, value, at_least=0, allow_none=True)
    return None if value is None else float(value)


def _uneven(owner: str, name: str, value: Any) -> Any:
    if isinstance(value, str) and value == "join":
        what = f"{owner}({name}='join'): training on after a process has run out of batches is not supported."
        fix = f"Write {name}='stop', which ends the epoch when the first process runs out, or 'error'."
        raise MisconfigurationException(what, fix=fix, argument=name)
    return check.one_of(owner, name, value, ("stop", "error"))


def _words(*words: str) -> Check:
    """Return a check for None or one of a few words."""

    def checked(owner: str, name: str, value: Any) -> Any:
        listed = " or ".join(map(repr, words))
        check.instance(owner, name, value, str, listed, allow_none=True)
        return check.one_of(owner, name, value, words, allow_none=True)

    return checked


def _speed(owner: str, name: str, value: Any) -> str | None:
    if isinstance(value, str) and value == "changes the maths":
        raise MisconfigurationException(
            f"{owner}({name}={value!r}): no other model is chosen for you.",
            fix=(
                "Use 'lower precision' or a safer class; `hasten advise program.py` measures what changes the maths, "
                "and you write the line."
            ),
            argument=name,
        )
    return cast("str | None", _words(*SPEEDS)(owner, name, value))


def _or_word(kind: type, allowed: str, *words: str, at_least: int | None = None) -> Check:
    """Return a check for a ``kind`` (bool or int) or one of a few words; None is allowed with int."""

    def checked(owner: str, name: str, value: Any) -> Any:
        if isinstance(value, str) and value in words:
            return value
        if isinstance(value, str):
            raise check.wrong(owner, name, value, allowed, hint=did_you_mean(value, words))
        if kind is bool:
            return check.instance(owner, name, value, bool, allowed)
        return check.whole(owner, name, value, at_least=at_least, allowed=allowed, allow_none=True)

    return checked


def _callbacks(owner: str, name: str, value: Any) -> tuple[Callback, ...]:
    if value is None:
        return ()
    if isinstance(value, type) and issubclass(value, Callback):
        raise _is_class(owner, f"{name}={value.__name__}", value, "()")
    callbacks = (value,) if isinstance(value, Callback) else check.as_list(value)
    check.instance(owner, name, callbacks, (list, tuple), "a Callback or a list of them")
    by_key: dict[str, Callback] = {}
    for position, given in enumerate(callbacks):
        callback = require_callback(f"{owner}({name}=[...])", given)
        if any(callback is other for other in callbacks[:position]):
            kind = type(callback).__name__
            raise MisconfigurationException(
                f"{owner}({name}=[...]): the same {kind} object is given twice.", argument=name
            )
        try:
            key = callback.state_key
        except AttributeError as error:
            # Its __init__ may not call that of its base.
            explain(error)
            raise
        other = by_key.setdefault(key, callback)
        clashes = other is not callback and type(callback).state_dict is not Callback.state_dict
        if clashes and isinstance(callback, Numbered):
            while callback.state_key in by_key:
                callback.state_number += 1
            by_key[callback.state_key] = callback
        elif clashes:
            raise MisconfigurationRuntimeError(
                f"Found more than one stateful callback of type `{type(callback).__name__}` with the state key "
                f"{callback.state_key!r}, so a checkpoint could not hold both states.",
                fix="Give them different arguments, or override state_key.",
                argument=name,
            )
    return tuple(callbacks)


def require_callback(place: str, value: Callback | type[Any]) -> Callback:
    """Return a callback; raise a ``WrongType`` that names the place for anything else."""
    if isinstance(value, Callback):
        return value
    if conventions.current().mistakes_are_warnings and _has_every_hook(value):
        return cast("Callback", value)
    if isinstance(value, type) and issubclass(value, Callback):
        raise WrongType(
            f"{place}: {value.__name__} is a class.", fix=f"Write {value.__name__}().", argument="callbacks"
        )
    kind = value if isinstance(value, type) else type(value)
    what = f"the class {kind.__name__}" if kind is value else f"{check.shown(value)} is of type {kind.__name__}"
    hint = " Give an object, such as hasten.callbacks.EarlyStopping('val_loss')." if kind is str else ""
    if any(hook.startswith("on_") and hasattr(Callback, hook) for hook in dir(kind)):
        hint = f" Write class {kind.__name__}(hasten.Callback), and give an object of it."
    raise WrongType(f"{place}: {what}, not a hasten.Callback.", fix=hint, argument="callbacks")


def _has_every_hook(value: object) -> bool:
    # As a Mock has, and no class of a program without the base.
    hooks = (name for name in vars(Callback) if name.startswith("on_"))
    return not isinstance(value, type) and all(callable(getattr(value, hook, None)) for hook in hooks)


def _is_class(owner: str, written: str, kind: type, arguments: str) -> WrongType:
    return WrongType(
        f"{owner}({written}): that is a class.",
        fix=f"Write {kind.__name__}{arguments}.",
        argument=written.partition("=")[0],
    )


_LOGGERS = {
    "csv": "CSVLogger", "tensorboard": "TensorBoardLogger", "wandb": "WandbLogger", "mlflow": "MLFlowLogger",
    "comet": "CometLogger",
}  # fmt: skip


def _logger_to_write(given: object, *, several: bool) -> str:
    """Return a hint for a value that is not a logger, or that a list must not contain; "" if there is none."""
    if isinstance(given, str):
        near = nearest(given, _LOGGERS)
        if near is not None:
            return f"Write logger=hasten.loggers.{_LOGGERS[near]}(...)."
        return f"For a folder: logger=hasten.loggers.CSVLogger({given!r})."
    if several and isinstance(given, bool):
        return f"{given} stands alone: logger={given}. In a list write hasten.loggers.CSVLogger('.')."
    return ""


def _logger(owner: str, name: str, value: Any) -> bool | list[Logger]:
    if value is None or isinstance(value, bool):
        return value is not False
    value = check.as_list(value)
    several = isinstance(value, Iterable) and not isinstance(value, str) and not hasattr(value, "log_metrics")
    loggers = list(value) if several else [value]
    for logger in loggers:
        written = logger.__name__ if isinstance(logger, type) else check.shown(logger)
        if not hasattr(logger, "log_metrics"):
            raise WrongType(
                f"{owner}({name}={f'[{written}]' if several else written}): use True (a CSVLogger), False, a logger or "
                "a list of loggers.",
                fix=_logger_to_write(logger, several=several),
                argument=name,
            )
        if isinstance(logger, type):
            raise _is_class(owner, f"{name}={written}", logger, "(...)")
    return loggers


def _folder(owner: str, name: str, value: Any) -> str:
    text = os.fspath(check.path(owner, name, os.getcwd() if value is None else value))
    if "://" in text:
        return text
    folder = os.path.abspath(os.path.expanduser(text))
    require_folder(owner, name, folder)
    return folder


# -- the two tables


def _row(check: Check, **default: Any) -> Any:
    return field(metadata={"check": check}, **default)


def _checked(table: type, owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in ``given`` that have a row in ``table``, checked one by one."""
    return {name: check(owner, name, given[name]) for name, check in _checks(table).items() if name in given}


@functools.cache
def _checks(table: type) -> dict[str, Check]:
    """Return the check of each argument of ``table`` that has one."""
    return {row.name: row.metadata["check"] for row in fields(table) if "check" in row.metadata}


# The values of Trainer(speed=...) and what each may change at most: a class of ``hasten_tools.speed.safety``.
SPEEDS = {
    "exact": "same maths up to rounding",
    "auto": "other random draws",
    **{
        name: name
        for name in (
            *("same bits", "same maths up to rounding", "other random draws"),
            *("same samples in other batches", "lower precision"),
        )
    },
}
_SAMPLES = "a number of samples, at least 1, or 'auto'"
_WORKERS = "a number of worker processes, at least 0, or 'auto' to measure it"
_PACKED = "True, False or 'first_token' (for classifiers that read nothing else of the last block)"
_RESIDENT = "True, False, 'auto' (where the data fits) or 'device' (on the device)"


@dataclass(frozen=True)
class SpeedArguments:
    """The arguments that change how fast a run is, after all checks; every default is off.

    ``Trainer`` documents them. ``shared_fields`` comes from ``micro_batch=MicroBatch(shared=...)``: the fields of a
    batch that belong to all samples; None to find them in the data.
    """

    speed: str | None = _row(_speed, default=None)
    compile: CompileSettings | None = _row(lambda owner, _, value: as_compile(owner, value), default=None)
    batching: LengthBatching | None = _row(lambda owner, _, value: as_batching(owner, value), default=None)
    packed: bool | str = _row(_or_word(bool, _PACKED, "first_token"), default=False)
    num_workers: int | str | None = _row(_or_word(int, _WORKERS, "auto", at_least=0), default=None)
    resident: bool | str = _row(_or_word(bool, _RESIDENT, "auto", "device"), default=False)
    matmul_precision: str | None = _row(_words("highest", "high", "medium"), default=None)
    fused_optimizer: bool | None = _row(_optional_boolean, default=None)
    batch_size: int | str | None = _row(_or_word(int, _SAMPLES, "auto", at_least=1), default=None)
    micro_batch: int | str | None = _row(_or_word(int, _SAMPLES, "auto", at_least=1), default=None)
    shared_fields: frozenset[Any] | None = None
    memory: str | None = _row(_words("auto", "selective", "full", "offload"), default=None)
    dropout: str | None = _row(_words("fast"), default=None)
    allocator: str | None = _row(_words("keep", "tcmalloc", "jemalloc"), default=None)


SPEED_NAMES = tuple(row.name for row in fields(SpeedArguments) if "check" in row.metadata)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of a Trainer after all checks; nothing below reads strings again. ``Trainer`` documents them."""

    callbacks: tuple[Callback, ...] = _row(_callbacks)
    logger: bool | list[Logger] = _row(_logger)
    fast_dev_run: int = _row(_fast_dev_run)
    max_epochs: int = _row(_limit)
    min_epochs: int | None = _row(_number(at_least=0, allow_none=True))
    max_steps: int = _row(_limit)
    min_steps: int | None = _row(_number(at_least=0, allow_none=True))
    max_time: timedelta | None
    limit_train_batches: int | float | None = _row(_optional_share)
    limit_val_batches: int | float | None = _row(_optional_share)
    limit_test_batches: int | float | None = _row(_optional_share)
    limit_predict_batches: int | float | None = _row(_optional_share)
    overfit_batches: int | float = _row(_share)
    val_check_interval: int | float | Period
    check_val_every_n_epoch: int | None = _row(_number(at_least=1, unit="epochs", allow_none=True, takes_float=False))
    num_sanity_val_steps: int = _row(_sanity_steps)
    log_every_n_steps: int = _row(_number(at_least=0, default=50, unit="steps"))
    enable_checkpointing: bool | None = _row(_optional_boolean)
    enable_progress_bar: bool | None = _row(_optional_boolean)
    enable_model_summary: bool | None = _row(_optional_boolean)
    accumulate_grad_batches: int = _row(_accumulation)
    gradient_clip_val: float | None = _row(_clip_value)
    gradient_clip_algorithm: str | None = _row(check.clip_algorithm)
    deterministic: bool | str | None = _row(_deterministic)
    benchmark: bool | None = _row(_optional_boolean)
    inference_mode: bool = _row(_boolean)
    use_distributed_sampler: bool = _row(_boolean)
    uneven: str = _row(_uneven)
    detect_anomaly: bool = _row(_boolean)
    on_bad_loss: str = _row(partial(check.one_of, allowed=("warn", "stop", "skip", "rewind")))
    barebones: bool = _row(_boolean)
    sync_batchnorm: bool = _row(_boolean)
    reload_dataloaders_every_n_epochs: int = _row(_number(at_least=0, unit="epochs", takes_float=False))
    default_root_dir: str = _row(_folder)
    enable_autolog_hparams: bool = _row(_boolean)
    speed: SpeedArguments
    # True if nothing limits the run, which then trains for 1000 epochs.
    max_epochs_assumed: bool = False


# -- all of them together


def check_speed(owner: str, given: Mapping[str, Any]) -> SpeedArguments:
    """Check the speed arguments in ``given``, by name: type, range, combination. Those missing are off."""
    given, shared = dict(given), None
    if isinstance(part := given.get("micro_batch"), MicroBatch):
        given["micro_batch"], shared = part.samples, _shared_fields(owner, part)
    arguments = SpeedArguments(**_checked(SpeedArguments, owner, given), shared_fields=shared)
    _check_speed_together(owner, arguments)
    return arguments


def _shared_fields(owner: str, part: MicroBatch) -> frozenset[Any]:
    if part.samples is None:
        raise WrongType(f"{owner}(micro_batch=MicroBatch(None)):", fix=f"use {_SAMPLES}.", argument="micro_batch")
    if isinstance(part.shared, str) or not isinstance(part.shared, Collection):
        what = f"{owner}(micro_batch=MicroBatch(shared={part.shared!r})):"
        raise WrongType(what, fix="use a list of names or positions.", argument="micro_batch")
    return frozenset(part.shared)


def _check_speed_together(owner: str, arguments: SpeedArguments) -> None:
    """Raise if two speed arguments contradict each other."""
    batch_size, micro_batch, batching = arguments.batch_size, arguments.micro_batch, arguments.batching
    if arguments.resident == "device" and batching is not None:
        raise MisconfigurationException(
            f"{owner}(resident='device', batching=...): cutting off padding would make the host wait for the device "
            "at every batch.",
            fix="Use resident=True, which holds the data on the host.",
            argument="resident",
        )
    if arguments.memory == "offload" and arguments.compile is not None:
        what = f"{owner}(memory='offload', compile=...): a compiled block decides itself what it keeps for backward."
        fix = "Leave one of them out, or use memory='selective'."
        raise MisconfigurationException(what, fix=fix, argument="memory")
    for name, value in (("micro_batch", micro_batch), ("memory", arguments.memory)):
        if batch_size == "auto" and value is not None and value not in ("selective", "full", "offload"):
            raise MisconfigurationException(
                f"{owner}(batch_size='auto', {name}={value!r}): with {name} memory is not used up, so there is no "
                "largest size.",
                fix=f"Give batch_size a number, or leave {name} out.",
                argument="batch_size",
            )
    if batch_size is not None and batching is not None and batching.max_tokens is not None:
        raise MisconfigurationException(
            f"{owner}(batch_size={batch_size!r}, batching=...): with max_tokens={batching.max_tokens} the tokens say "
            "how large a batch is.",
            fix="Leave one of them out.",
            argument="batch_size",
        )
    if isinstance(batch_size, int) and isinstance(micro_batch, int) and micro_batch > batch_size:
        what = f"{owner}(batch_size={batch_size}, micro_batch={micro_batch}): a micro-batch is a part of a batch."
        fix = f"Use micro_batch={batch_size} or less, or batch_size={micro_batch}."
        raise MisconfigurationException(what, fix=fix, argument="batch_size")


def check_arguments(given: Mapping[str, Any]) -> Arguments:
    """Check the arguments of ``Trainer(...)``, all by name, as written or their defaults: type, range, combination."""
    given = dict(given)
    if _boolean("Trainer", "barebones", given["barebones"]):
        _switch_off(given)
    max_epochs, max_steps, max_time = _limits(
        max_epochs=given["max_epochs"], max_steps=_none_for_minus_one(given["max_steps"]), max_time=given["max_time"]
    )
    min_epochs, min_steps, _ = _limits(min_epochs=given["min_epochs"], min_steps=given["min_steps"])
    given.update(max_epochs=max_epochs, min_epochs=min_epochs, max_steps=max_steps, min_steps=min_steps)
    values = _checked(Arguments, "Trainer", given)
    values.update(max_time=max_time, val_check_interval=given["val_check_interval"])
    _explain_ones(values)
    if values["fast_dev_run"]:
        _use_few_batches(values)
    elif values["overfit_batches"]:
        values["limit_train_batches"] = values["limit_val_batches"] = values["overfit_batches"]
    for name in ("enable_checkpointing", "enable_progress_bar", "enable_model_summary"):
        values[name] = values[name] is not False
    if values["max_steps"] is None:
        values["max_steps"] = -1
    if values["max_epochs"] is None:
        values["max_epochs_assumed"] = values["max_steps"] == -1 and max_time is None
        values["max_epochs"] = 1000 if values["max_epochs_assumed"] else -1
    for unit in ("epochs", "steps"):
        least, most = values[f"min_{unit}"], values[f"max_{unit}"]
        if least is not None and 0 <= most < least:
            message = f"Trainer(min_{unit}={least}, max_{unit}={most}): the minimum is above the maximum"
            fix = f"Use max_{unit}={least} or more, or min_{unit}={most} or less."
            if not conventions.current().mistakes_are_warnings:
                raise MisconfigurationException(f"{message}.", fix=fix, argument=f"min_{unit}")
            rank_zero_warn(f"{message}, which ends the run.", fix=fix)
    values.update(_validation_schedule(values["val_check_interval"], values["check_val_every_n_epoch"]))
    return Arguments(**values, speed=check_speed("Trainer", given))


def check_one(name: str, value: object) -> Any:
    """Return the checked value of one argument that is checked by itself."""
    return _checked(SpeedArguments if name in SPEED_NAMES else Arguments, "Trainer", {name: value})[name]


def changed(arguments: Arguments, name: str, value: object) -> Arguments:
    """Return ``arguments`` with a new value for one of them, checked as in ``check_arguments``."""
    if value is None and name in ("max_epochs", "max_steps"):
        value = -1
    if name == "val_check_interval":
        return replace(arguments, **_validation_schedule(value, arguments.check_val_every_n_epoch))
    new = _checked(Arguments, "Trainer", {name: value})
    if name == "max_epochs":
        new["max_epochs_assumed"] = False
    elif name == "overfit_batches":
        new["limit_train_batches"] = new["limit_val_batches"] = new[name] or None
    elif name == "check_val_every_n_epoch":
        new = _validation_schedule(arguments.val_check_interval, new[name])
    return replace(arguments, **new)


def _explain_ones(values: Mapping[str, Any]) -> None:
    """Tell the user what 1 and 1.0 mean, where one is a number of batches and the other a share."""
    for name in ("val_check_interval", "overfit_batches", *(f"limit_{stage}_batches" for stage in _STAGES)):
        value = values[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != 1:
            continue
        if name == "val_check_interval":
            when = "after every batch" if isinstance(value, int) else "at the end of the training epoch"
            rank_zero_info(f"`Trainer({name}={value})` was configured so validation will run {when}.")
        else:
            share = "1 batch" if isinstance(value, int) else "100% of the batches"
            period = " per epoch" if name == "limit_train_batches" else ""
            rank_zero_info(f"`Trainer({name}={value})` was configured so {share}{period} will be used.")


def _switch_off(given: dict[str, Any]) -> None:
    """Apply ``barebones=True``."""
    switched_off = (
        "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "logger", "num_sanity_val_steps",
        "log_every_n_steps", "detect_anomaly", "fast_dev_run", "profiler",
    )  # fmt: skip
    wanted = [f"{name}={given[name]!r}" for name in switched_off if given[name]]
    if wanted:
        what = f"Trainer(barebones=True, {', '.join(wanted)}): barebones switches all of that off."
        raise MisconfigurationException(what, fix="Leave out one or the other.", argument="barebones")
    given.update(dict.fromkeys(switched_off[:4], False), num_sanity_val_steps=0, log_every_n_steps=0)


def _use_few_batches(values: dict[str, Any]) -> None:
    """Apply ``fast_dev_run``."""
    batches = values["fast_dev_run"]
    rank_zero_info(
        f"Running in `fast_dev_run` mode: will run the requested loop using {batches} batch(es). Logging and "
        "checkpointing is suppressed."
    )
    values.update(dict.fromkeys((name for name in values if name.startswith("limit_")), batches))
    values.update(
        max_epochs=1, max_steps=batches, min_epochs=None, min_steps=None, num_sanity_val_steps=0,
        val_check_interval=1.0, check_val_every_n_epoch=1, overfit_batches=0.0,
    )  # fmt: skip
    if values["logger"]:
        # A logger that does nothing, for code that writes to the logger.
        values["logger"] = [DummyLogger()]


def _none_for_minus_one(value: Any) -> Any:
    return None if isinstance(value, (int, float)) and value == -1 else value


def _limits(**given: Any) -> tuple[Any, Any, timedelta | None]:
    """Return (epochs, steps, time) of limits, each of which may be written in the unit of another."""
    found: dict[str, tuple[str, Any]] = {}
    for name, value in given.items():
        unit, amount = name.partition("_")[2], value
        if value is None:
            continue
        if isinstance(value, (str, dict, timedelta)):
            interval = _interval(name, value)
            unit, amount = interval.unit, getattr(interval, interval.unit)
            if unit == "time" and "max_time" not in given:
                raise MisconfigurationException(
                    f"Trainer({name}={value!r}): a time cannot be given here, write '2ep' or '500st'.", argument=name
                )
        elif unit == "time":
            allowed = "'DD:HH:MM:SS', a text such as '90min', a timedelta or a dict"
            raise check.wrong_type("Trainer", name, value, allowed)
        if unit in found:
            what = f"Trainer({found[unit][0]}={given[found[unit][0]]!r}, {name}={value!r}): both say how many {unit}."
            raise MisconfigurationException(what, fix="Leave out one of them.", argument=name)
        found[unit] = name, amount
    epochs, steps, time = (found.get(unit, (None, None))[1] for unit in ("epochs", "steps", "time"))
    return epochs, steps, time


def _interval(name: str, value: str | dict[str, Any] | timedelta) -> Period:
    interval = parse_interval(value, argument=f"Trainer({name}=...)")
    if interval.time is not None and interval.time <= timedelta(0):
        raise MisconfigurationException(f"Trainer({name}={value!r}): the time must be longer than zero.", argument=name)
    return interval


def _validation_schedule(value: Any, every_n_epochs: int | None) -> dict[str, Any]:
    """Return ``val_check_interval`` and ``check_val_every_n_epoch``, which depend on each other."""
    is_default, value = value is None, 1.0 if value is None else value
    if isinstance(value, (str, dict, timedelta)):
        interval = _interval("val_check_interval", value)
        if interval.epochs is None:
            # Steps, like time, are counted over epochs.
            value, every_n_epochs = interval, None if interval.unit == "steps" else every_n_epochs
        elif every_n_epochs not in (None, 1, interval.epochs):
            raise MisconfigurationException(
                f"Trainer(val_check_interval={value!r}, check_val_every_n_epoch={every_n_epochs}): both say after how "
                "many epochs to validate.",
                fix="Leave out one of them.",
                argument="val_check_interval",
            )
        else:
            value, every_n_epochs = 1.0, interval.epochs
    if not isinstance(value, Period):
        value = _batches_or_share(value)
        if every_n_epochs is None and isinstance(value, float) and not is_default:
            raise MisconfigurationException(
                f"Trainer(val_check_interval={value!r}, check_val_every_n_epoch=None): counting over epochs needs a "
                "number of batches (int) or a time.",
                argument="val_check_interval",
            )
    return {"val_check_interval": value, "check_val_every_n_epoch": every_n_epochs}


def _batches_or_share(value: Any) -> int | float:
    """Return a ``val_check_interval`` that is a number of batches or a share of an epoch."""
    allowed = (
        "a number of batches (int, at least 1), a share of an epoch (float, above 0.0 to 1.0), "
        "or a text such as '2ep', '500st', '90min'"
    )
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise check.wrong("Trainer", "val_check_interval", value, allowed, error=WrongType)
    interval: int | float = value if value <= 1 else _as_whole(value)
    if interval <= 0 or (isinstance(interval, float) and interval > 1.0):
        raise check.wrong("Trainer", "val_check_interval", interval, allowed)
    return interval
