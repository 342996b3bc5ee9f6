"""Facts about a program, found by preparing its first fit without training."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hasten import LightningDataModule, LightningModule
from hasten._lib.errors import make_error
from hasten.data.combined import CombinedLoader, is_collection
from hasten.extend.origin import comes_from
from hasten.optim.fast_step import needs_closure
from hasten_tools.eject.source import EjectError

if TYPE_CHECKING:
    from hasten import LightningModule, Trainer
    from hasten.loops.run import Run
    from hasten.types import Dataloaders

# The arguments under which a fit is prepared on any machine, and nothing is written or shown.
QUIETLY: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "sync_batchnorm": False,
    "logger": False, "callbacks": [], "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "packed": False, "resident": False,
    **dict.fromkeys(
        ("precision", "plugins", "profiler", "max_time", "speed", "compile", "batching", "num_workers",
         "matmul_precision", "fused_optimizer", "batch_size", "micro_batch", "memory", "dropout", "allocator"),
    ),
}  # fmt: skip


@dataclass
class Facts:
    """The facts about a program's first fit."""

    arguments: dict[str, Any]  # The arguments that the program passes to its Trainer, with their values.
    trained: type  # The module's class.
    automatic: bool = True  # Whether the loop steps the optimizer.
    closure: bool = False  # Whether the optimizer's step computes the loss itself.
    # Lines that call ``configure_optimizers`` and take its value apart.
    configure: list[str] = field(default_factory=list)
    optimizers: list[str] = field(default_factory=list)  # The names of the optimizers in these lines.
    # Whether ``configure_optimizers`` returns an optimizer, or several and nothing else.
    returns_optimizers: bool = False
    # Name, interval, frequency, and monitored value or None of each scheduler.
    schedulers: list[tuple[str, str, int, str | None]] = field(default_factory=list)
    scheduler_kinds: list[str] = field(default_factory=list)  # Their classes.
    # What LearningRateMonitor calls the learning rate of each optimizer, and the interval of its scheduler, None
    # without one.
    rate_names: list[tuple[str, str | None]] = field(default_factory=list)
    all_parameters: bool = True  # Whether the optimizer has exactly the parameters of the module, in their order.
    length: float | None = None  # Batches of the training loader, or None.
    validates: bool = False  # Whether there is validation data and a step for it.
    data_from: str = "call"  # "call", "datamodule" or "model".
    generator: bool = False  # Whether the training loader has its own random generator.
    datamodule: type | None = None  # The class of the datamodule.
    grad_enabled: bool = True  # Whether gradients are on where ``fit`` is called.
    processes: int = 1  # How many train together.
    logger: str = ""  # The class of the first logger, "" without one.
    root: str = "."  # The folder for files without another one.
    made_at: int = 0  # The line of the program that makes the Trainer; 0 if it is not known.
    verbs_before: list[str] = field(default_factory=list)  # "validate", "test" and "predict" if they are called before.
    defaults: dict[str, Any] = field(default_factory=dict)  # Of the arguments of the Trainer.


def given_arguments(trainer: Trainer) -> dict[str, Any]:
    """Return the arguments of a Trainer that differ from the defaults."""
    defaults = _argument_defaults(trainer)
    given = trainer.given_arguments
    return {name: value for name, value in given.items() if not _same(value, defaults.get(name))}


def _argument_defaults(trainer: Trainer) -> dict[str, Any]:
    kind: Any = next(kind for kind in type(trainer).__mro__ if comes_from(kind, "hasten.trainer"))
    return {name: one.default for name, one in inspect.signature(kind.__init__).parameters.items()}


def _same(value: object, default: object) -> bool:
    return type(value) is type(default) and value == default


def gather(
    trainer: Trainer,
    model: LightningModule,
    train_dataloaders: Dataloaders = None,
    val_dataloaders: Dataloaders = None,
    datamodule: LightningDataModule | None = None,
    **_: object,
) -> Facts:
    """Prepare a fit as ``Trainer.fit`` does, and return what it has; nothing is trained, and all is as before."""
    if isinstance(train_dataloaders, LightningDataModule):
        datamodule, train_dataloaders = train_dataloaders, None
    if not isinstance(model, LightningModule):
        raise EjectError(f"the model is a {type(model).__name__}, not a LightningModule.")
    facts = Facts(given_arguments(trainer), type(model), grad_enabled=torch.is_grad_enabled())
    facts.processes, facts.defaults = trainer.world_size, _argument_defaults(trainer)
    facts.logger = type(trainer.logger).__name__ if trainer.logger is not None else ""
    facts.root = str(facts.arguments.get("default_root_dir") or ".")
    for what, given in (("training", train_dataloaders), ("validation", val_dataloaders)):
        several = isinstance(given, (CombinedLoader, Mapping)) or is_collection(given)
        if several and not (what == "validation" and isinstance(given, (list, tuple)) and len(given) < 2):
            raise make_error(
                EjectError,
                f"there are several {what} loaders, and the ejected loop reads one.",
                fix="Join them in a Dataset.",
            )

    def look(run: Run) -> None:
        _look_at_optimizers(facts, run)
        _look_at_data(facts, run, train_dataloaders, datamodule)

    probe = trainer.with_arguments(**QUIETLY)
    data = {"train": train_dataloaders, "validate": val_dataloaders}
    probe.prepared_run("fit", model, data, datamodule, look)
    return facts


def _look_at_optimizers(facts: Facts, run: Run) -> None:
    module = run.module
    facts.automatic = module.automatic_optimization
    configured = module.configure_optimizers()
    facts.configure, facts.optimizers, names = _taken_apart(configured, type(module).__name__)
    returned = configured if isinstance(configured, (list, tuple)) else [configured]
    facts.returns_optimizers = all(isinstance(one, torch.optim.Optimizer) for one in returned)
    for name, config in zip(names, run.schedulers, strict=True):
        monitor = config.monitor if config.reduce_on_plateau else None
        facts.schedulers.append((name, config.interval, config.frequency, monitor))
    facts.scheduler_kinds = [type(config.scheduler).__name__ for config in run.schedulers]
    facts.rate_names = _rate_names(run)
    if not run.optimizers:
        raise EjectError(f"{type(module).__name__}.configure_optimizers() returned None: nothing is trained.")
    facts.closure = facts.automatic and needs_closure(run.optimizers[0])
    held = [p for group in run.optimizers[0].param_groups for p in group["params"]]
    own = list(module.parameters())
    facts.all_parameters = len(held) == len(own) and all(a is b for a, b in zip(held, own, strict=True))


def _rate_names(run: Run) -> list[tuple[str, str | None]]:
    """Return what LearningRateMonitor calls the learning rates, and when schedulers change them."""
    intervals = {id(one.scheduler.optimizer): one.interval for one in run.schedulers}
    given = {id(one.scheduler.optimizer): one.name for one in run.schedulers if one.name is not None}
    unnamed = [f"lr-{type(one).__name__}" for one in run.optimizers if id(one) not in given]
    names: list[tuple[str, str | None]] = []
    for one in run.optimizers:
        kind = f"lr-{type(one).__name__}"
        before = sum(id(other) not in given and f"lr-{type(other).__name__}" == kind
                     for other in run.optimizers[: len(names)])  # fmt: skip
        numbered = f"{kind}-{before}" if before and unnamed.count(kind) > 1 else kind
        names.append((given.get(id(one)) or numbered, intervals.get(id(one))))
    return names


def _look_at_data(facts: Facts, run: Run, given: object, datamodule: object) -> None:
    facts.validates = not run.data.validation.is_off()
    if facts.validates and len(run.data.validation.load()) > 1:
        what = "there are several validation loaders, and the ejected loop reads one."
        raise make_error(EjectError, what, fix="Join them in a Dataset.")
    if given is None:
        facts.data_from = "model" if datamodule is None else "datamodule"
        facts.datamodule = None if datamodule is None else type(datamodule)
    loader = run.data.train.loaders[0]
    try:
        facts.length = None if isinstance(getattr(loader, "dataset", None), IterableDataset) else len(loader)
    except TypeError:
        facts.length = None
    if isinstance(loader, DataLoader):
        facts.generator = loader.generator is not None


def _taken_apart(configured: Any, owner: str) -> tuple[list[str], list[str], list[str]]:
    """Return lines that take what ``configure_optimizers`` returns apart, and the names in it."""
    call = "model.configure_optimizers()"
    if isinstance(configured, Mapping):
        lines = [f"configured = {call}", 'optimizer = configured["optimizer"]']
        if (inner := configured.get("lr_scheduler")) is None:
            return lines, ["optimizer"], []
        what = 'configured["lr_scheduler"]' + ('["scheduler"]' if isinstance(inner, Mapping) else "")
        return [*lines, f"scheduler = {what}"], ["optimizer"], ["scheduler"]
    if not isinstance(configured, (list, tuple)):
        return [f"optimizer = {call}"], ["optimizer"], []
    items = list(configured)
    if len(items) == 2 and all(isinstance(one, (list, tuple)) for one in items):
        optimizers, schedulers = _names("optimizer", items[0]), _names("scheduler", items[1])
        lines = [f"{_unpacked(optimizers)}, {_unpacked(schedulers)} = {call}"]
        for name, one in zip(schedulers, items[1], strict=True):
            lines += [f'{name} = {name}["scheduler"]'] if isinstance(one, Mapping) else []
        return lines, optimizers, schedulers
    if items and not any(isinstance(one, (Mapping, list, tuple)) for one in items):
        names = _names("optimizer", items)
        return [f"{_unpacked(names, bare=len(names) > 1)} = {call}"], names, []
    if len(items) == 1 and isinstance(items[0], Mapping):
        lines, optimizers, schedulers = _taken_apart(items[0], owner)
        return [f"(configured,) = {call}", *lines[1:]], optimizers, schedulers
    if items and all(isinstance(one, Mapping) for one in items):
        return _dicts_taken_apart(items, call)
    raise make_error(
        EjectError, f"{owner}.configure_optimizers() returns a form that eject does not know.", fix="Return a dict."
    )


def _dicts_taken_apart(items: list[Any], call: str) -> tuple[list[str], list[str], list[str]]:
    optimizers, schedulers = _names("optimizer", items), []
    lines = [f"configured = {call}"]
    for index, (name, one) in enumerate(zip(optimizers, items, strict=True)):
        lines.append(f'{name} = configured[{index}]["optimizer"]')
        if (inner := one.get("lr_scheduler")) is not None:
            schedulers.append(f"scheduler_{index}")
            what = f'configured[{index}]["lr_scheduler"]' + ('["scheduler"]' if isinstance(inner, Mapping) else "")
            lines.append(f"scheduler_{index} = {what}")
    return lines, optimizers, schedulers


def _names(what: str, items: Any) -> list[str]:
    return [what] if len(items) == 1 else [f"{what}_{index}" for index in range(len(items))]


def _unpacked(names: list[str], *, bare: bool = False) -> str:
    text = ", ".join(names)
    if bare:
        return text
    return f"({text},)" if len(names) == 1 else f"({text})"
