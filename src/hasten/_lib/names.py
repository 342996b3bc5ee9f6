"""Names: the nearest to an unknown one, unknown arguments, which class defines a method, and its parameters."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, StrEnum
from types import FunctionType
from typing import Any, NoReturn, ParamSpec, Self, TypeVar

from hasten._lib.errors import make_error
from hasten._lib.rank_zero import rank_zero_warn
from hasten.extend.origin import ROOTS

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Class = TypeVar("_Class", bound=type)


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name most like ``name``, or None if none is alike.

    Example::

        >>> nearest("max_epoch", ["max_epochs", "min_epochs"])
        'max_epochs'

    """
    return _nearest(str(name), tuple(str(choice) for choice in allowed))


# Tools that look for where a class lives ask a package for the same missing names hundreds of times.
@functools.lru_cache(maxsize=256)
def _nearest(name: str, choices: tuple[str, ...]) -> str | None:
    # A name of one letter is similar to every short name.
    lowered = {choice.lower(): choice for choice in choices if len(choice) > 1 or len(name) == 1}
    # lr_min is min_lr.
    found = [each for each in lowered if sorted(each.split("_")) == sorted(name.lower().split("_"))]
    found = found or difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?``, or nothing if no allowed name is alike.

    Example::

        >>> did_you_mean("cdua", ["cpu", "cuda"])
        " Did you mean 'cuda'?"

    """
    found = nearest(name, allowed)
    return f" Did you mean {found!r}?" if found is not None else ""


def nearest_value(name: str, logged: Iterable[str]) -> str | None:
    """Return the name of the logged value most like ``name``; None if only values of other stages are alike.

    Example::

        >>> nearest_value("val_loss", ["train_loss", "val_loss/dataloader_idx_0"])
        'val_loss/dataloader_idx_0'
        >>> nearest_value("val_loss", ["train_loss"])

    """
    logged, stage = list(logged), _stage(name)
    longer = [each for each in logged if each.startswith(name)]
    return (
        min(longer) if longer else nearest(name, [each for each in logged if not stage or _stage(each) in ("", stage)])
    )


def did_you_mean_value(name: str, logged: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the name of a logged value, or nothing if ``nearest_value`` finds none."""
    found = nearest_value(name, logged)
    return f" Did you mean {found!r}?" if found is not None else ""


def _stage(name: str) -> str:
    """Return "train", "val" or "test" where the name of a value begins with it, else nothing."""
    found = re.match(r"(train|val|test)(?:ing|id|idation)?(?![a-z])", name.lower())
    return found[1] if found else ""


def did_you_mean_file(name: str, files: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the name of a file; nothing if no name is alike without its extension.

    A file of another kind must have the same name. Folders count for nothing: in long paths they would make any two
    files alike.

    Example::

        >>> did_you_mean_file("trian.py", ["train.py", "rv.py"])
        " Did you mean 'train.py'?"
        >>> did_you_mean_file("trian.py", ["rv.py"])
        ''

    """
    by_stem: dict[str, list[str]] = {}
    stem, extension = os.path.splitext(os.path.basename(name))
    for file in files:
        other, kind = os.path.splitext(os.path.basename(file))
        # In a name such as "epoch=1.25", the part after the dot is not an extension.
        if other.lower() == stem.lower() or kind == extension or not extension[1:].isalpha():
            by_stem.setdefault(other, []).append(file)
    near = nearest(stem, by_stem)
    if near is None:
        return ""
    # Of a.py and a.ckpt the one of the same kind.
    return f" Did you mean {max(by_stem[near], key=lambda file: os.path.splitext(file)[1] == extension)!r}?"


def unknown_word(shown: str, word: str, allowed: Iterable[str], otherwise: str) -> tuple[str, str]:
    """Return what is wrong with a word that is not allowed, and what to write: the nearest one, or ``otherwise``.

    ``shown`` is the argument with its value.

    Example::

        >>> unknown_word("strategy='dpp'", "dpp", ["ddp", "fsdp"], "use one of 'ddp', 'fsdp'.")
        ("strategy='dpp': 'dpp' is unknown.", "Did you mean 'ddp'?")
        >>> unknown_word("strategy='horse'", "horse", ["ddp", "fsdp"], "use one of 'ddp', 'fsdp'.")
        ("strategy='horse':", "use one of 'ddp', 'fsdp'.")

    """
    hint = did_you_mean(word, allowed)
    return (f"{shown}: {word!r} is unknown.", hint.strip()) if hint else (f"{shown}:", otherwise)


def defined_by_program(obj: object, *methods: str) -> list[str]:
    """Return which methods of hasten's object ``obj`` were replaced: in a subclass of a program, or on the object.

    Example::

        >>> from torch import nn
        >>> defined_by_program(nn.Linear(2, 2), "forward", "backward")
        ['forward']

    """
    own, kind, found = getattr(obj, "__dict__", {}), type(obj), []
    for name in methods:
        method = getattr(kind, name, None)
        # is_builtin(method), without a Python call for each method in every fit.
        package = str(getattr(method, "__module__", "")).partition(".")[0]
        if method is not None and (name in own or package not in ROOTS):
            found.append(name)
    return found


def plain_function(method: Callable[..., Any]) -> FunctionType | None:
    """Return the function of a method without wrappers; None for anything else."""
    function = getattr(method, "__func__", None)
    return function if type(function) is FunctionType and not vars(function) else None


def has_parameter(function: Callable[..., object], name: str) -> bool:
    """Return whether a function has a parameter of this name; False if its signature cannot be read.

    Example::

        >>> has_parameter(lambda batch, batch_idx: None, "batch_idx")
        True

    """
    plain = getattr(function, "__func__", function)
    code = getattr(plain, "__code__", None)
    if code is not None and not hasattr(plain, "__wrapped__"):
        # The result of inspect.signature, without its 50 calls.
        return name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


# -- unknown arguments: what to write instead

_LEAVE = "Leave it out."
# Longer values are not repeated in messages.
_WIDE = 60
_ABSENT_DEVICE = "hasten does not train on it. Write {owner}(accelerator='auto')."
_GPUS = "Write {owner}(accelerator='gpu', devices={value}); without GPUs {owner}(accelerator='cpu')."
_TPUS = "Write {owner}(accelerator='tpu', devices={value})."
_HALF = "Write {owner}(precision='bf16-mixed'), or precision='16-mixed'."
_FLUSH_LOGS = "Write Trainer(logger=hasten.loggers.CSVLogger('.', flush_logs_every_n_steps={value}))."

# By argument: its present name ("=name"), or the text of the message. Lightning has removed these from both ...
_OF_BOTH = {
    "gpus": _GPUS,
    "num_gpus": _GPUS,
    "num_processes": "Write {owner}(accelerator='cpu', devices={value}).",
    "tpu_cores": _TPUS,
    "num_tpu_cores": _TPUS,
    "ipus": _ABSENT_DEVICE,
    "hpus": _ABSENT_DEVICE,
    "amp_backend": _HALF,
    "amp_level": _HALF,
    "use_amp": _HALF,
    "using_native_amp": _HALF,
    "auto_select_gpus": "Write {owner}(accelerator='cuda', devices=hasten.accelerators.find_usable_cuda_devices(1)).",
    "distributed_backend": "=strategy",
    "nb_gpu_nodes": "=num_nodes",
    "fused": "=fused_optimizer",
    "backend": "Write {owner}(strategy=hasten.strategies.DDPStrategy(process_group_backend={value})).",
    "seed": "Write hasten.seed_everything({value}) before the model is made.",
}
_RATE = "Write torch.optim.AdamW(self.parameters(), lr={value}) in configure_optimizers of the module."
_CHECKPOINTS = "Write Trainer(callbacks=[hasten.callbacks.ModelCheckpoint(dirpath={value})])."
_RESUME = "Write trainer.fit(model, ckpt_path={value})."
_OPTIMIZER = "Return it from configure_optimizers of the module."
# ... and these from the Trainer, or other libraries have them.
_OF_TRAINER = {
    "accumulation_steps": "=accumulate_grad_batches",
    "amp": _HALF,
    "auto_lr_find": "Write hasten.tuner.Tuner(trainer).lr_find(model) before fit.",
    "auto_scale_batch_size": "Write hasten.tuner.Tuner(trainer).scale_batch_size(model) before fit.",
    "automatic_optimization": "Write self.automatic_optimization = {value} in __init__ of the module.",
    "bf16": "Write Trainer(precision='bf16-mixed').",
    "checkpoint_callback": "Write Trainer(enable_checkpointing=...), or give the callback in Trainer(callbacks=[...]).",
    "checkpoint_dir": _CHECKPOINTS,
    "ckpt_path": _RESUME,
    "clip_grad_norm": "=gradient_clip_val",
    "default_save_path": "=default_root_dir",
    "early_stop_callback": "Write Trainer(callbacks=[hasten.callbacks.EarlyStopping(monitor='val_loss')]).",
    "enable_pl_optimizer": _LEAVE,
    "epochs": "=max_epochs",
    "eval_steps": "=val_check_interval",
    "flush_logs_every_n_steps": _FLUSH_LOGS,
    "fp16": _HALF,
    "grad_clip": "=gradient_clip_val",
    "gradient_accumulation_steps": "=accumulate_grad_batches",
    "gradient_checkpointing": "Write Trainer(memory='full').",
    "gradient_clip": "=gradient_clip_val",
    "group_by_length": "Write Trainer(batching='length').",
    "learning_rate": _RATE,
    "log_gpu_memory": "Write Trainer(callbacks=[hasten.callbacks.DeviceStatsMonitor()]).",
    "log_dir": "=default_root_dir",
    "log_interval": "=log_every_n_steps",
    "log_save_interval": _FLUSH_LOGS,
    "loggers": "=logger",
    "logging_steps": "=log_every_n_steps",
    "lr": _RATE,
    "lr_scheduler": _OPTIMIZER,
    "max_grad_norm": "=gradient_clip_val",
    "max_nb_epochs": "=max_epochs",
    "min_nb_epochs": "=min_epochs",
    "model": "Write trainer.fit(model, train_dataloaders).",
    "move_metrics_to_cpu": f"{_LEAVE} self.log keeps one running value of an epoch.",
    "multiple_trainloader_mode": ("Write trainer.fit(model, hasten.utilities.CombinedLoader(loaders, mode={value}))."),
    "nb_sanity_val_steps": "=num_sanity_val_steps",
    "overfit_pct": "=overfit_batches",
    "packing": "=packed",
    "patience": "Write Trainer(callbacks=[hasten.callbacks.EarlyStopping(monitor='val_loss', patience={value})]).",
    "prepare_data_per_node": (
        "Write self.prepare_data_per_node = {value} in __init__ of the module or the datamodule."
    ),
    "n_epochs": "=max_epochs",
    "num_epochs": "=max_epochs",
    "num_train_epochs": "=max_epochs",
    "optimizer": _OPTIMIZER,
    "optimizers": _OPTIMIZER,
    "output_dir": "=default_root_dir",
    "print_nan_grads": "=detect_anomaly",
    "preload": "Write Trainer(resident=True).",
    "process_position": "Write Trainer(callbacks=[hasten.callbacks.TQDMProgressBar(process_position={value})]).",
    "progress_bar_refresh_rate": (
        "Write Trainer(callbacks=[hasten.callbacks.TQDMProgressBar(refresh_rate={value})]); for no bar "
        "Trainer(enable_progress_bar=False)."
    ),
    "reload_dataloaders_every_epoch": "Write Trainer(reload_dataloaders_every_n_epochs=1).",
    "replace_sampler_ddp": "=use_distributed_sampler",
    "resume_from_checkpoint": _RESUME,
    "row_log_interval": "=log_every_n_steps",
    "save_steps": "Write Trainer(callbacks=[hasten.callbacks.ModelCheckpoint(every_n_train_steps={value})]).",
    "scheduler": _OPTIMIZER,
    "show_progress_bar": "=enable_progress_bar",
    "steps": "=max_steps",
    "stochastic_weight_avg": "Write Trainer(callbacks=[hasten.callbacks.StochasticWeightAveraging(swa_lrs=0.01)]).",
    "terminate_on_nan": "Write Trainer(on_bad_loss='stop').",
    "test_percent_check": "=limit_test_batches",
    "tf32": "Write Trainer(matmul_precision='high').",
    "torch_compile": "=compile",
    "track_grad_norm": (
        "Write self.log_dict(hasten.utilities.grad_norm(self, norm_type={value})) in on_before_optimizer_step of the "
        "module."
    ),
    "train_percent_check": "=limit_train_batches",
    "truncated_bptt_steps": (
        "Split the sequence in training_step, with self.automatic_optimization = False in __init__ of the module."
    ),
    "val_percent_check": "=limit_val_batches",
    "warmup_steps": "Return a scheduler that warms up from configure_optimizers of the module.",
    "weight_decay": "Write torch.optim.AdamW(self.parameters(), weight_decay={value}) in configure_optimizers.",
    "weights_save_path": _CHECKPOINTS,
    "weights_summary": (
        "Write Trainer(callbacks=[hasten.callbacks.ModelSummary(max_depth=1)]); for none "
        "Trainer(enable_model_summary=False)."
    ),
}
# Arguments that only the Trainer has.
_OF_FABRIC = {
    "packed": "Write `with hasten.packed_blocks(model):` around the loop.",
    "dropout": "Write `with hasten.fast_dropout(model):` around the loop.",
    "memory": "Write `with hasten.memory.recomputed(model):` around the loop.",
    "batching": "Write hasten.data.rebatch(loader, hasten.data.LengthBatching()) before setup_dataloaders.",
    "resident": "Write hasten.data.resident(loader) before setup_dataloaders.",
    "num_workers": "Write hasten.data.auto_workers(loader) before setup_dataloaders.",
    "on_bad_loss": "Write `if torch.isfinite(loss):` before fabric.backward(loss) and optimizer.step() in the loop.",
    "uneven": "Give each process the same number of batches, or write the loop within torch's Join([model]).",
    "micro_batch": "Compute parts of the batch in the loop, with fabric.no_backward_sync(model) for all but the last.",
    "max_epochs": "The loop over the epochs is yours: Fabric leaves it to you.",
    "gradient_clip_val": "Write fabric.clip_gradients(model, optimizer, max_norm={value}) before optimizer.step().",
    "accumulate_grad_batches": "Write `with fabric.no_backward_sync(model, enabled=accumulating):` in the loop.",
    "gradient_accumulation_steps": "Write `with fabric.no_backward_sync(model, enabled=accumulating):` in the loop.",
    "logger": "=loggers",
    "optimizer": "Write model, optimizer = fabric.setup(model, optimizer).",
    "replace_sampler_ddp": "Write fabric.setup_dataloaders(loader, use_distributed_sampler={value}).",
}


# Those of others have the names that Keras or transformers give them.
_EVALUATION = {"test_dataloaders": "=dataloaders", "val_dataloaders": "=dataloaders", "dm": "=datamodule"}
_INSTEAD: dict[str, dict[str, str]] = {
    "Trainer": _OF_BOTH | _OF_TRAINER,
    "Fabric": _OF_BOTH | _OF_FABRIC,
    "Trainer.fit": {
        "callbacks": "Write Trainer(callbacks={value}).",
        "checkpoint": "=ckpt_path",
        "dm": "=datamodule",
        "epochs": "Write Trainer(max_epochs={value}).",
        "max_epochs": "Write Trainer(max_epochs={value}).",
        "resume_from_checkpoint": "=ckpt_path",
        "test_dataloaders": "Write trainer.test(model, dataloaders) after the fit.",
    },
    "Trainer.validate": _EVALUATION,
    "Trainer.test": _EVALUATION,
    "Trainer.predict": _EVALUATION,
    "Fabric.setup_dataloaders": {
        "dataloader": "Write fabric.setup_dataloaders(dataloader).",
        "dataloaders": "Write fabric.setup_dataloaders(first, second).",
        "replace_sampler": "=use_distributed_sampler",
    },
    "ModelCheckpoint": {
        "every_n_steps": "=every_n_train_steps",
        "every_n_val_epochs": "=every_n_epochs",
        "filepath": "Write ModelCheckpoint(dirpath=..., filename=...).",
        "metric": "=monitor",
        "monitor_mode": "=mode",
        "path": "=dirpath",
        "patience": "Write EarlyStopping(monitor='val_loss', patience={value}).",
        "period": "=every_n_epochs",
        "prefix": "Write ModelCheckpoint(filename=...), with the prefix.",
        "save_best": "Write ModelCheckpoint(monitor='val_loss', save_top_k=1).",
        "save_best_only": "Write ModelCheckpoint(monitor='val_loss', save_top_k=1).",
    },
    "EarlyStopping": {
        "delta": "=min_delta",
        "metric": "=monitor",
        "restore_best_weights": (
            "Write Trainer(callbacks=[EarlyStopping(monitor='val_loss'), ModelCheckpoint(monitor='val_loss')]), and "
            "trainer.test(ckpt_path='best')."
        ),
    },
    "SimpleProfiler": {"output_filename": "=filename"},
    "AdvancedProfiler": {"output_filename": "=filename"},
    "self.log": {"sync_dist_op": "=reduce_fx", "tbptt_reduce_fx": "=reduce_fx"},
    "MixedPrecision": {"attention_in_32_bits": "=fast_attention"},
}


# What programs for other libraries, and for Lightning 1, call on an object that has it under another name.
_MODULE_LOGS = "Write self.log(name, value) in the module."
_TUNER = "Write hasten.tuner.Tuner(trainer).{name}(model)."
_CLI = "Write hasten.cli.LightningCLI(MyModule), or Trainer(max_epochs=args.max_epochs, ...)."
_RESUMES = "Write trainer.fit(model, ckpt_path=path); for the weights alone, Net.load_from_checkpoint(path)."
_LOADS = "Write fabric.load(path, {'model': model, 'optimizer': optimizer})."
_SAVES = "Write fabric.save(path, {'model': model, 'optimizer': optimizer})."
_DEVICES = "Write trainer.num_devices."
_LOADED = "Write trainer.ckpt_path."
_PRECISION = "Write trainer.precision."
_RELOADS = "Write Trainer(reload_dataloaders_every_n_epochs=1)."
_METHODS_ELSEWHERE: dict[str, dict[str, str]] = {
    "Trainer": {
        "add_argparse_args": _CLI,
        "add_callback": "Write Trainer(callbacks=[...]), or trainer.callbacks.append(callback).",
        "amp_backend": _PRECISION,
        "amp_level": _PRECISION,
        "batch_idx": "Write trainer.fit_loop.batch_idx.",
        "best_model_path": "Write trainer.checkpoint_callback.best_model_path.",
        "data_parallel_device_ids": "Write trainer.device_ids.",
        "device": "Write trainer.strategy.root_device.",
        "devices": _DEVICES,
        "disable_validation": "Write not trainer.enable_validation.",
        "epoch": "Write trainer.current_epoch.",
        "eval": "Write trainer.validate(model, dataloaders).",
        "evaluate": "Write trainer.validate(model, dataloaders), or trainer.test(model, dataloaders).",
        "evaluation_loop": "Write trainer.validate_loop, or trainer.test_loop.",
        "from_argparse_args": _CLI,
        "get_model": "Write trainer.lightning_module.",
        "gpus": _DEVICES,
        "ipus": _DEVICES,
        "lightning_optimizers": "Write trainer.optimizers.",
        "load": _RESUMES,
        "load_checkpoint": _RESUMES,
        "log": _MODULE_LOGS,
        "log_metrics": _MODULE_LOGS,
        "lr_find": _TUNER.format(name="lr_find"),
        "lr_schedulers": "Write trainer.lr_scheduler_configs: each has a scheduler, an interval and a monitor.",
        "metrics": "Write trainer.callback_metrics.",
        "num_gpus": _DEVICES,
        "num_processes": _DEVICES,
        "optimizer": "Write trainer.optimizers[0].",
        "predicted_ckpt_path": _LOADED,
        "progress_bar_dict": "Write trainer.progress_bar_metrics.",
        "reset_train_dataloader": _RELOADS,
        "reset_train_val_dataloaders": _RELOADS,
        "reset_val_dataloader": _RELOADS,
        "resume": _RESUMES,
        "resume_from_checkpoint": _LOADED,
        "root_gpu": "Write trainer.strategy.root_device.",
        "running_sanity_check": "Write trainer.sanity_checking.",
        "save": "Write trainer.save_checkpoint(path).",
        "save_model": "Write trainer.save_checkpoint(path).",
        "scale_batch_size": _TUNER.format(name="scale_batch_size"),
        "step": "Write trainer.global_step.",
        "stop": "Write trainer.should_stop = True.",
        "tested_ckpt_path": _LOADED,
        "tpu_cores": _DEVICES,
        "train": "Write trainer.fit(model, train_dataloaders, val_dataloaders).",
        "train_loop": "Write trainer.fit_loop.",
        "training_type_plugin": "Write trainer.strategy.",
        "tune": _TUNER.format(name="lr_find"),
        "use_amp": _PRECISION,
        "using_native_amp": _PRECISION,
        "validated_ckpt_path": _LOADED,
        "weights_save_path": "Write trainer.checkpoint_callback.dirpath, or trainer.default_root_dir.",
    },
    "Fabric": {
        "accumulate": "Write `with fabric.no_backward_sync(model, enabled=accumulating):`.",
        "clip_grad_norm_": "Write fabric.clip_gradients(model, optimizer, max_norm=1.0).",
        "fit": "Write the loop, or use hasten.Trainer.",
        "gather": "Write fabric.all_gather(value).",
        "is_main_process": "Write fabric.is_global_zero.",
        "load_checkpoint": _LOADS,
        "load_state": _LOADS,
        "no_sync": "Write `with fabric.no_backward_sync(model):`.",
        "prepare": "Write fabric.setup(model, optimizer) and fabric.setup_dataloaders(loader).",
        "process_index": "Write fabric.global_rank.",
        "rank": "Write fabric.global_rank.",
        "reduce": "Write fabric.all_reduce(value).",
        "save_checkpoint": _SAVES,
        "save_state": _SAVES,
        "unwrap_model": "Write model.module.",
        "wait_for_everyone": "Write fabric.barrier().",
    },
}


# What __init__ of these classes sets: it has not been called where this is not there.
_SET_BY_INIT = {"Trainer": "_arguments", "Fabric": "_runtime"}


class Elsewhere:
    """An attribute that a class does not have; reading it says what to write, and subclasses may have it."""

    def __init__(self, name: str, fix: str) -> None:
        self._name, self._fix = name, fix

    def __get__(self, instance: object, owner: type) -> NoReturn:
        what = f"{owner.__name__!r} object has no attribute {self._name!r}."
        raise make_error(AttributeError, what, fix=self._fix, name=self._name, obj=instance)


def explain_absent_names(cls: _Class) -> _Class:
    """Have reads of names that a class lacks say what to write: those of other libraries, and those misspelt.

    Use it as a class decorator. Type checkers see neither kind, and still report such names.
    """
    for name, fix in _METHODS_ELSEWHERE[cls.__name__].items():
        setattr(cls, name, Elsewhere(name, fix))
    setattr(cls, "__dir__", _present_names)  # noqa: B010 - mypy rejects the plain assignment
    setattr(cls, "__getattr__", _refuse_absent)  # noqa: B010
    return cls


def _refuse_absent(instance: object, name: str) -> Any:
    """Raise the error for an attribute that an object lacks, which names the nearest one."""
    kind: Any = type(instance)
    if inspect.getattr_static(kind, name, None) is not None:
        # The class has this name, but reading it failed, as in a property: read it again for its own error.
        return object.__getattribute__(instance, name)
    what = f"{kind.__name__!r} object has no attribute {name!r}"
    base = next(each.__name__ for each in kind.__mro__ if each.__name__ in _METHODS_ELSEWHERE)
    if re.match("_[a-z]", name) and _SET_BY_INIT[base] not in vars(instance):
        fix = f"Write super().__init__() as the first line of {kind.__name__}.__init__: {base} was not made."
        raise make_error(AttributeError, f"{what}.", fix=fix, name=name)
    near = None if name.startswith("_") else _nearest_attribute(kind, name)
    if near is None:
        raise AttributeError(what, name=name, obj=instance)
    # Without the object: Python would add another suggestion.
    raise make_error(AttributeError, f"{what}.", fix=f"Did you mean {near!r}?", name=name)


@functools.lru_cache(256)
def _nearest_attribute(kind: type, name: str) -> str | None:
    # Cached: a program may call hasattr(trainer, name) in every step, and the search takes a millisecond.
    present = (each for each in dir(kind) if not isinstance(inspect.getattr_static(kind, each), Elsewhere))
    return nearest(name, [each for each in present if not each.startswith("_")])


def _present_names(instance: object) -> list[str]:
    """Return the attributes that an object has, without those that only say what to write, for completion."""
    kind = type(instance)
    return [
        name
        for name in object.__dir__(instance)
        if name in vars(instance) or not isinstance(inspect.getattr_static(kind, name, None), Elsewhere)
    ]


def without_unknown(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have a method refuse unknown arguments by ``refuse_unknown``, and its call on the class instead of an object.

    Type checkers and editors see the arguments that there are, and no ``**kwargs``.
    """
    name, owner = function.__name__, function.__qualname__.removesuffix(".__init__")
    known = frozenset(_by_name(function))

    @functools.wraps(function)
    def checked(*args: _P.args, **given: _P.kwargs) -> _R:
        if not known.issuperset(given):
            unknown = {name: value for name, value in given.items() if name not in known}
            refuse_unknown(unknown, function, owner)
        if not hasattr(args[0] if args else given.get("self"), name):
            kind = owner.partition(".")[0]
            what = f"{owner}() was called on the class, and not on a {kind}."
            raise make_error(TypeError, what, fix=f"Write {kind}(...).{name}(...).")
        try:
            return function(*args, **given)
        except BaseException as error:
            # Leaves this frame out of the traceback.
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            raise

    return checked


def _by_name(function: Callable[..., object]) -> list[str]:
    """Return the arguments of a function that can be given by name."""
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind is not each.VAR_POSITIONAL]


def instead_of_removed(name: str, owner: str = "Trainer") -> str:
    """Return what to write for an argument that the Trainer, or another owner, had in Lightning 1; "" for others.

    Example::

        >>> instead_of_removed("gpus")
        "Write Trainer(accelerator='gpu', devices=...); without GPUs Trainer(accelerator='cpu')."

    """
    return _to_write(_INSTEAD.get(owner, {}).get(name, ""), owner, "...")


def _to_write(instead: str, owner: str, value: str) -> str:
    """Return an entry of the tables above for an argument that was given this value."""
    if "." in owner:
        owner = owner[0].lower() + owner[1:]
    if instead.startswith("="):
        instead = f"Write {{owner}}({instead[1:]}={{value}})."
    return instead.format(owner=owner, value=value)


def refuse_unknown(unknown: Mapping[str, object], function: Callable[..., object], owner: str) -> None:
    """Raise for unknown arguments of a function; the message says what to write instead.

    ``owner`` is its name with its class, without ``.__init__``: "Trainer" or "Trainer.fit".
    """
    called = owner if "." in owner else f"{owner}.__init__"
    instead_of = _INSTEAD.get(owner, {})
    for name, value in unknown.items():
        wrong = f"{called}() got an unexpected keyword argument {name!r}."
        known = [each for each in _by_name(function) if each != "self" and each[0] != "_"]
        near = nearest(name, known)
        if name not in instead_of and near is not None:
            raise make_error(TypeError, wrong, fix=f"Did you mean {near!r}?", argument=name)
        # What stands there is of another kind for each name, so only a slip leads to it.
        entry = difflib.get_close_matches(name, instead_of, n=1, cutoff=0.85)
        text = repr(value)
        shown = text if len(text) < _WIDE and "<" not in text else "..."
        fix = _to_write(instead_of[entry[0]], owner, shown) if entry else f"The arguments are: {', '.join(known)}."
        raise make_error(TypeError, wrong, fix=fix, argument=name)


# -- what the name of a value says

# Parts of names of values of which less, or more, is better.
_LESS = ("loss", "error", "err", "mse", "mae", "rmse", "ppl", "perplexity", "wer", "cer", "fid", "nll", "eer")
_MORE = (
    "acc", "accuracy", "auc", "auroc", "f1", "precision", "recall", "iou", "miou", "dice", "map", "bleu", "rouge",
    "psnr", "ssim", "r2", "top1", "top5", "reward", "mcc", "kappa",
)  # fmt: skip
# Parts with which a name leaves some doubt: a negative value, a difference, a loss called after its metric, one value
# where another is fixed.
_DOUBTFUL = (
    "neg", "negative", "minus", "inverse", "inv", "gap", "diff", "difference", "delta", "std", "var", "drop", "at",
    "precision", "iou", "dice", "map", "reward", "err", "adversarial", "reduction", "decrease", "improvement", "skill",
    "explained",
)  # fmt: skip


def _words(name: str) -> list[str]:
    return re.split(r"[^a-z0-9]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower())


def right_mode(name: str) -> str | None:
    """Return "min" or "max" where the name of a value says beyond doubt which is better, else None.

    Example::

        >>> right_mode("val_acc"), right_mode("val/loss"), right_mode("x")
        ('max', 'min', None)

    """
    words = _words(name)
    # "1 - accuracy" begins with 1.
    if not set(_DOUBTFUL).isdisjoint(words) or words[0] == "1":
        return None
    less = any(word in _LESS or word.endswith("loss") for word in words)
    more = any(word in _MORE or re.fullmatch(r"acc\d+|.*acc|.*accuracy", word) for word in words)
    return None if less == more else "min" if less else "max"


def warn_of_mode(owner: str, monitor: str, mode: str) -> None:
    """Warn where the name of the value says that the other direction is better, such as min for an accuracy."""
    expected = right_mode(monitor)
    if expected in (None, mode):
        return
    rank_zero_warn(
        f"{owner}(monitor={monitor!r}, mode={mode!r}): the {'lowest' if mode == 'min' else 'highest'} value counts as "
        "the best.",
        fix=f"Write mode={expected!r}.",
    )


class LightningEnum(StrEnum):
    """Named strings, compared without regard to case; ``str`` gives the name of a member, an f-string its value.

    Example::

        >>> class Color(LightningEnum):
        ...     RED = "red"
        >>> str(Color.RED), f"{Color.RED}", Color.RED == "Red"
        ('Color.RED', 'red', True)
        >>> Color.from_str("RED")
        <Color.RED: 'red'>

    """

    __str__ = Enum.__str__

    def __format__(self, format_spec: str) -> str:
        # As Lightning's on Python 3.10: file names such as f"{stage}.csv" have the value.
        return format(self.value, format_spec)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Enum) and not isinstance(other, str):
            other = other.value
        return isinstance(other, str) and self.lower() == other.lower()

    __hash__ = str.__hash__

    @classmethod
    def from_str(cls, value: str, source: str = "key") -> Self:
        """Return the member with this name (``source="key"``), this value ("value"), or either ("any")."""
        wanted = value.replace("-", "_").lower()
        for member in cls:
            texts = {"key": [member.name], "value": [member.value]}.get(source, [member.name, member.value])
            if wanted in [text.replace("-", "_").lower() for text in texts]:
                return member
        listed = f"use one of {', '.join(repr(m.value) for m in cls)}."
        shown = f"{value!r} is not a {cls.__name__}"
        what, fix = unknown_word(shown, str(value), [str(m.value) for m in cls], listed)
        raise make_error(ValueError, what, fix=fix)

    @classmethod
    def try_from_str(cls, value: str, source: str = "key") -> Self | None:
        """Return the member that ``from_str`` finds; if there is none, warn and return None."""
        try:
            return cls.from_str(value, source)
        except ValueError as error:
            rank_zero_warn(str(error))
            return None
