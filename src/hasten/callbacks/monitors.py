"""Monitors: callbacks that log learning rates, the load of the device, and how fast a run is."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import Tensor

from hasten._lib import check
from hasten._lib.device import is_cuda, is_host
from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import defined_by_program, without_unknown
from hasten._lib.optional import need
from hasten._lib.rank_zero import rank_zero_warn
from hasten.hooks import use_hooks
from hasten.machine.devices import get_cpu_stats
from hasten.module.callback import Callback
from hasten.report.peaks import flop_counter
from hasten.report.throughput import Throughput, compute_dtype, get_available_flops
from hasten.types import RunningStage, TrainerFn

if TYPE_CHECKING:
    from typing import Unpack

    from torch.optim import Optimizer
    from torch.utils.flop_counter import FlopCounterMode

    from hasten import LightningModule, Trainer
    from hasten.optim import LRSchedulerConfig
    from hasten.types import Batch, StepOutput


class LearningRateMonitor(Callback):
    """Log the learning rates of all optimizers.

    They are named ``lr-<Optimizer>``, or by the ``name`` of the scheduler's dict; with several parameter groups
    ``/pg1``, ``/pg2`` or the group's own ``name`` follows, with several optimizers of one class ``-1``, ``-2``.
    Learning rates are numbers on the host, so the device never waits for this.

    Args:
        logging_interval: "step" or "epoch"; None for the interval each scheduler steps at.
        log_momentum: also log the momentum (for Adam and similar optimizers the first beta) as ``<name>-momentum``; 0,
            with a warning, for an optimizer without one.
        log_weight_decay: also log the weight decay as ``<name>-weight_decay``.

    Raises:
        MisconfigurationException: ``logging_interval`` is something else, or the Trainer has no logger.

    Example::

        >>> LearningRateMonitor(logging_interval="step").lrs
        {}

    """

    @without_unknown
    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        check.declared(LearningRateMonitor.__init__, locals())
        owner, name, error = "LearningRateMonitor", "logging_interval", MisconfigurationException
        check.one_of(owner, name, logging_interval, ("step", "epoch"), allow_none=True, error=error)
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float | None] = {}
        self.last_weight_decay_values: dict[str, float | None] = {}
        self._logged_at = -1
        use_hooks(self, LearningRateMonitor, logging_interval != "epoch", "on_train_batch_start")

    def on_train_start(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        if not trainer.loggers:
            raise MisconfigurationException(
                "Cannot use `LearningRateMonitor` callback with `Trainer` that has no logger.",
                fix="Leave it out, or do not pass logger=False.",
            )
        # A run that resumes within an accumulation has the row of that step.
        self._logged_at = trainer.global_step if trainer.progress.accumulation_index else -1
        self.lrs = {}
        found = self._named_optimizers(trainer)
        names = [name for _, names, _ in found for name in names]
        self.last_momentum_values = {f"{name}-momentum": None for name in names}
        self.last_weight_decay_values = {f"{name}-weight_decay": None for name in names}
        defaults = {type(optimizer).__name__: optimizer.defaults for optimizer, _, _ in found}
        without = sorted(name for name, known in defaults.items() if not {"momentum", "betas"} & known.keys())
        if self.log_momentum and without:
            rank_zero_warn(
                "You have set log_momentum=True, but some optimizers do not have momentum. 0 is logged for that of "
                f"{', '.join(without)}.",
                RuntimeWarning,
            )

    def on_train_batch_start(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        """Log before a step whose values are logged too."""
        if self.logging_interval == "epoch":
            return
        step = _updates(trainer)
        # Batches of an accumulation share a step: one row is enough.
        if not _is_due(trainer, step + 1) or step == self._logged_at:
            return
        self._logged_at = step
        self._log(trainer, "step" if self.logging_interval is None else "any", step)

    def on_train_epoch_start(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        if self.logging_interval != "step":
            self._log(trainer, "epoch" if self.logging_interval is None else "any", _updates(trainer))

    def _log(self, trainer: Trainer, interval: str, step: int) -> None:
        stats = self._extract_stats(trainer, interval)
        if stats and trainer.is_global_zero:
            for logger in trainer.loggers:
                # By position, as Lightning passes them: tests of programs compare the call.
                logger.log_metrics(dict(stats), step=step)
            trainer.note_row(stats, step)

    def _extract_stats(self, trainer: Trainer, interval: str) -> dict[str, float]:
        """Return the learning rates of schedulers that step at ``interval``; of all for "any"."""
        stats: dict[str, float] = {}
        for optimizer, names, when in self._named_optimizers(trainer):
            # An optimizer without a scheduler has no interval: it is logged at both.
            if interval == "any" or when is None or when == interval:
                stats |= self._get_optimizer_stats(optimizer, names)
        # Other callbacks may name a learning rate, for instance in a checkpoint's file name.
        trainer.current_run.logged.callback_values.update(stats)
        return stats

    def _get_optimizer_stats(self, optimizer: Optimizer, names: list[str]) -> dict[str, float]:
        stats: dict[str, float] = {}
        for group, name in zip(optimizer.param_groups, names, strict=True):
            stats |= self._extract_lr(group, name)
            stats |= self._extract_momentum(param_group=group, name=f"{name}-momentum", use_betas="betas" in group)
            stats |= self._extract_weight_decay(group, f"{name}-weight_decay")
        return stats

    # -- subclasses of programs for Lightning override and call these

    def _extract_lr(self, param_group: dict[str, Any], name: str) -> dict[str, float]:
        if param_group["lr"] is None:
            # The optimizer computes its steps itself, as Adafactor does.
            return {}
        rate = _number(param_group["lr"])
        self.lrs[name].append(rate)
        return {name: rate}

    def _extract_momentum(self, param_group: dict[str, Any], name: str, use_betas: bool) -> dict[str, float]:
        if not self.log_momentum:
            return {}
        value = _number(param_group["betas"][0] if use_betas else param_group.get("momentum", 0))
        self.last_momentum_values[name] = value
        return {name: value}

    def _extract_weight_decay(self, param_group: dict[str, Any], name: str) -> dict[str, float]:
        if not self.log_weight_decay:
            return {}
        value = _number(param_group.get("weight_decay", 0))
        self.last_weight_decay_values[name] = value
        return {name: value}

    def _find_names_from_schedulers(
        self, lr_scheduler_configs: list[LRSchedulerConfig]
    ) -> tuple[list[list[str]], list[Optimizer], Counter[type]]:
        """Return a name for every parameter group, the optimizers, and how many of a class have such names."""
        kinds: Counter[type] = Counter()
        optimizers = [config.scheduler.optimizer for config in lr_scheduler_configs]
        names = [_names(config.scheduler.optimizer, config.name, kinds) for config in lr_scheduler_configs]
        return names, optimizers, kinds

    def _find_names_from_optimizers(
        self, optimizers: list[Any], seen_optimizers: list[Optimizer], seen_optimizer_types: Counter[type]
    ) -> tuple[list[list[str]], list[Optimizer]]:
        """Return the same for the optimizers without a scheduler."""
        seen = {id(optimizer) for optimizer in seen_optimizers}
        plain = [getattr(each, "optimizer", each) for each in optimizers]
        left = [optimizer for optimizer in plain if id(optimizer) not in seen]
        return [_names(optimizer, None, seen_optimizer_types) for optimizer in left], left

    def _named_optimizers(self, trainer: Trainer) -> list[tuple[Optimizer, list[str], str | None]]:
        """Return each optimizer with a name for every parameter group and its scheduler's interval."""
        configs = trainer.lr_scheduler_configs
        names, scheduled, kinds = self._find_names_from_schedulers(configs)
        others, left = self._find_names_from_optimizers(trainer.optimizers, scheduled, kinds)
        intervals = [config.interval for config in configs] + [None] * len(left)
        found = list(zip(scheduled + left, names + others, intervals, strict=True))
        for all_of_one in (*names, *others):
            for name in all_of_one:
                alone = name.removesuffix("/pg1")
                if alone != name and alone in self.lrs and alone not in all_of_one:
                    # A second parameter group was added: the first one is called /pg1 from now on.
                    self.lrs[name] = self.lrs.pop(alone)
                self.lrs.setdefault(name, [])
        return found


def _names(optimizer: Optimizer, name: str | None, kinds: Counter[type]) -> list[str]:
    """Return a name for each parameter group of an optimizer."""
    kind = type(optimizer)
    if name is None:
        name = f"lr-{kind.__name__}" + (f"-{kinds[kind]}" if kinds[kind] else "")
        kinds[kind] += 1
    given_labels = [group.get("name") for group in optimizer.param_groups]
    labels = [label or f"pg{i}" for i, label in enumerate(given_labels, start=1)]
    for label, count in Counter(labels).items():
        if count > 1:
            raise MisconfigurationException(
                "A single `Optimizer` cannot have multiple parameter groups with identical `name` values, and "
                f"LearningRateMonitor found several named {label!r} in {kind.__name__}.",
                fix="Give each group its own name, or none.",
            )
    if len(labels) == 1 and not given_labels[0]:
        return [name]
    return [f"{name}/{label}" for label in labels]


def _number(value: Any) -> float:
    # A learning rate may be a tensor on the device (capturable optimizers); it is read once a logging interval.
    return float(value.item()) if isinstance(value, Tensor) else value


def _is_due(trainer: Trainer, step: int) -> bool:
    """Return whether values of a step go to the loggers, of which ``step`` have begun."""
    every = trainer.log_every_n_steps
    return bool(every) and (step % every == 0 or trainer.should_stop)


def _updates(trainer: Trainer) -> int:
    """Return the number of batches after which an optimizer stepped: the x axis of loggers."""
    module = trainer.lightning_module
    if module is not None and not module.automatic_optimization:
        return trainer.total_batch_idx + 1
    return trainer.global_step


_PURPOSE = "DeviceStatsMonitor(cpu_stats=...)"


class DeviceStatsMonitor(Callback):
    """Log memory and load of the device each ``log_every_n_steps``, before and after a batch.

    The keys are ``DeviceStatsMonitor.on_train_batch_start/allocated_bytes.all.peak`` and the like. On CUDA they come
    from ``torch.cuda.memory_stats`` (bytes and counts); on the CPU ``cpu_percent``, ``cpu_vm_percent`` and
    ``cpu_swap_percent`` of the whole machine, for which psutil must be installed. Nothing waits for the device.

    Args:
        cpu_stats: log the CPU's load too. None: where the run is on the CPU; False: never.

    Raises:
        MisconfigurationException: the Trainer has no logger.
        ModuleNotFoundError: the CPU's load is requested and psutil is not installed.
        TypeError: ``cpu_stats`` is neither None nor a bool.

    Example::

        >>> monitor = DeviceStatsMonitor(cpu_stats=True)

    """

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self._cpu_stats = check.boolean("DeviceStatsMonitor", "cpu_stats", cpu_stats, allow_none=True)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check that there is something to log, and a logger."""
        if stage != "fit":
            return
        if not trainer.loggers:
            raise MisconfigurationException(
                "Cannot use `DeviceStatsMonitor` callback with `Trainer(logger=False)`:", fix="leave out one of them."
            )
        on_cpu = is_host(trainer.strategy.root_device)
        if self._cpu_stats or (self._cpu_stats is None and on_cpu):
            # The first call of cpu_percent has nothing to compare with, and returns 0.
            need("psutil", purpose=_PURPOSE).cpu_percent()

    def on_train_batch_start(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        self._get_and_log_device_stats(trainer, "on_train_batch_start")

    def on_train_batch_end(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        self._get_and_log_device_stats(trainer, "on_train_batch_end")

    def on_validation_batch_start(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        self._get_and_log_device_stats(trainer, "on_validation_batch_start")

    def on_validation_batch_end(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        self._get_and_log_device_stats(trainer, "on_validation_batch_end")

    def on_test_batch_start(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        self._get_and_log_device_stats(trainer, "on_test_batch_start")

    def on_test_batch_end(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        self._get_and_log_device_stats(trainer, "on_test_batch_end")

    def _get_and_log_device_stats(self, trainer: Trainer, key: str) -> None:
        """Log in a hook if its batch is due; subclasses of programs for Lightning override it."""
        progress, fitting = trainer.progress, trainer.state.fn is TrainerFn.FITTING
        if trainer.training:
            begun = progress.logged_step + key.endswith("start")
            if progress.accumulation_index == 0 and _is_due(trainer, begun):
                self._log(trainer, key, begun - 1)
        # All loaders together.
        elif _is_due(trainer, progress.evaluated - trainer.current_run.evaluation.began_at + 1):
            self._log(trainer, key, progress.validated_step if fitting else progress.logged_step)

    def _log(self, trainer: Trainer, hook: str, step: int) -> None:
        stats = self._stats(trainer) if trainer.is_global_zero else {}
        if stats:
            name = f"{type(self).__qualname__}.{hook}"
            for logger in trainer.loggers:
                separator = logger.group_separator
                logger.log_metrics({f"{name}{separator}{key}": stats[key] for key in stats}, step=step)
            trainer.note_row({f"{name}.{key}": value for key, value in stats.items()}, step)

    def _stats(self, trainer: Trainer) -> dict[str, float]:
        device = trainer.strategy.root_device
        if is_host(device) and self._cpu_stats is False:
            return {}
        if is_host(device) and not defined_by_program(trainer.accelerator, "get_device_stats"):
            return get_cpu_stats()
        stats: dict[str, float] = dict(trainer.accelerator.get_device_stats(device))
        return {**stats, **get_cpu_stats()} if self._cpu_stats and not is_host(device) else stats


_BATCH_START = {
    RunningStage.TRAINING: "on_train_batch_start",
    RunningStage.VALIDATING: "on_validation_batch_start",
    RunningStage.TESTING: "on_test_batch_start",
    RunningStage.PREDICTING: "on_predict_batch_start",
}


class ThroughputOptions(TypedDict, total=False):
    """The arguments of ``Throughput`` that a ``ThroughputMonitor`` takes."""

    available_flops: float | None
    window_size: int
    separator: str


class ThroughputMonitor(Callback):
    """Log how fast a run is: batches, samples and items a second, FLOP/s, and their share of the peak (MFU).

    The values go to the loggers each ``log_every_n_steps``, under ``train/device/samples_per_sec`` and the like;
    see ``hasten.report.throughput.Throughput`` for all of them. Rates are over the last ``window_size`` batches.
    Nothing waits for the device: on CUDA, times come from CUDA events, which are read after they have completed. Time
    spent in validation does not count as training.

    The operations of a batch are ``pl_module.flops_per_batch``, if there is one, read at every batch; else the
    operations of the first batch of each stage, counted while it runs.

    Args:
        batch_size_fn: returns the number of samples of a batch.
        length_fn: returns the number of items (tokens, ...) of a batch.
        **kwargs: ``window_size`` (100) and ``separator`` ("/") of Throughput, and ``available_flops``: the peak of
            the device, for devices that are not known.

    Raises:
        TypeError: ``batch_size_fn`` or ``length_fn`` cannot be called.
        ValueError: ``window_size`` is less than 2.

    Example::

        >>> monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=10)

    """

    def __init__(
        self,
        batch_size_fn: Callable[[Batch], int],
        length_fn: Callable[[Batch], int] | None = None,
        **kwargs: Unpack[ThroughputOptions],
    ) -> None:
        super().__init__()
        allowed = "a function of a batch, for instance lambda batch: batch[0].size(0)"
        check.callable_("ThroughputMonitor", "batch_size_fn", batch_size_fn, allowed=allowed)
        check.callable_("ThroughputMonitor", "length_fn", length_fn, allowed=allowed, allow_none=True)
        Throughput(**kwargs)  # raises for wrong arguments
        self.kwargs = kwargs
        self.batch_size_fn = batch_size_fn
        self.length_fn = length_fn
        self.available_flops: float | None = kwargs.get("available_flops")
        # The measurements by stage; empty on all processes but the first.
        self._throughputs: dict[RunningStage, StageThroughput] = {}
        self._counter: FlopCounterMode | None = None

    def __getstate__(self) -> dict[str, Any]:
        # CUDA events cannot be pickled.
        return {**self.__dict__, "_throughputs": {}, "_counter": None}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        device = trainer.strategy.root_device
        if "available_flops" not in self.kwargs:
            self.available_flops = get_available_flops(device, compute_dtype(trainer.precision_plugin))
        options: ThroughputOptions = {**self.kwargs, "available_flops": self.available_flops}
        stages = [RunningStage.TRAINING, RunningStage.VALIDATING]
        if stage != TrainerFn.FITTING.value:
            assert trainer.state.stage is not None
            stages = [trainer.state.stage]
        for found in stages if trainer.is_global_zero else ():
            earlier, now = self._throughputs.get(found), StageThroughput(found, device, trainer.world_size, **options)
            if earlier is not None and stage != TrainerFn.FITTING.value:
                # Totals of calls of validate, test or predict continue.
                now.batches, now._total_samples, now._total_lengths = earlier.totals()
            self._throughputs[found] = now
        counts = trainer.is_global_zero and not hasattr(pl_module, "flops_per_batch")
        use_hooks(self, ThroughputMonitor, counts, *_BATCH_START.values())

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop counting, after an exception too."""
        self._end_count()

    # -- hooks

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        measured = self._stage(trainer)
        if measured is not None:
            if trainer.state.fn is TrainerFn.FITTING or not measured.batches:
                measured.reset()
            measured.begin()

    on_validation_start = on_test_start = on_predict_start = on_train_start

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Count the operations of the first batch of a stage."""
        measured = self._stage(trainer)
        if measured is not None and measured.flops is None:
            self._counter = flop_counter()
            self._counter.__enter__()

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = on_train_batch_start

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        """Measure, and log with the step's other values."""
        measured = None if batch is None else self._batch_ended(trainer, pl_module, batch)
        progress = trainer.progress
        # With the optimizer's step: an accumulation is measured when it is complete.
        if measured is not None and progress.accumulation_index == 0 and _is_due(trainer, progress.logged_step):
            self._log(trainer, measured, progress.logged_step - 1)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: StepOutput,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Measure, and log each ``log_every_n_steps`` batches."""
        measured = self._batch_ended(trainer, pl_module, batch)
        if measured is not None and _is_due(trainer, measured.batches):
            progress, fitting = trainer.progress, trainer.state.fn is TrainerFn.FITTING
            # The validations of an epoch follow one another.
            step = progress.evaluated - progress.evaluated_before + 1 if fitting else measured.batches
            self._log(trainer, measured, step)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue to measure training, without the time of validation."""
        if trainer.state.fn is TrainerFn.FITTING and RunningStage.TRAINING in self._throughputs:
            self._throughputs[RunningStage.TRAINING].begin()

    # -- internal functions

    def _stage(self, trainer: Trainer) -> StageThroughput | None:
        """Return the measurement of the current stage; None on other processes and in the sanity check."""
        stage = trainer.state.stage
        return None if stage is None else self._throughputs.get(stage)

    def _end_count(self) -> int | None:
        if self._counter is None:
            return None
        counter, self._counter = self._counter, None
        counter.__exit__(None, None, None)
        return int(counter.get_total_flops())

    def _batch_ended(self, trainer: Trainer, pl_module: LightningModule, batch: Batch) -> StageThroughput | None:
        measured = self._stage(trainer)
        if measured is None:
            return None
        counted = self._end_count()
        if counted is not None:
            measured.flops = counted
            use_hooks(self, ThroughputMonitor, False, _BATCH_START[measured.stage])
        flops = getattr(pl_module, "flops_per_batch", None)
        with torch.no_grad():
            samples = self.batch_size_fn(batch)
            length = None if self.length_fn is None else self.length_fn(batch)
        measured.batch_ended(samples, length, measured.flops or None if flops is None else flops)
        return measured

    @staticmethod
    def _log(trainer: Trainer, measured: StageThroughput, step: int) -> None:
        prefix = f"{measured.stage.value}{measured.separator}"
        metrics = {prefix + name: value for name, value in measured.compute().items()}
        if metrics:
            if measured.stage is RunningStage.TRAINING:
                metrics["epoch"] = trainer.current_epoch
            for logger in trainer.loggers:
                logger.log_metrics(metrics=dict(metrics), step=step)
            trainer.note_row(metrics, step)


class StageThroughput(Throughput):
    """The rates of one stage, from the times at which the device ended its batches."""

    def __init__(
        self, stage: RunningStage, device: torch.device, world_size: int = 1, **options: Unpack[ThroughputOptions]
    ) -> None:
        self.stage = stage
        self._on_cuda = is_cuda(device)
        # The operations of a batch, once they are counted; ``reset`` keeps them.
        self.flops: int | None = None
        super().__init__(world_size=world_size, **options)

    def reset(self) -> None:
        """Remove all that was recorded, but not the operations of a batch."""
        super().reset()
        self.batches = self._total_samples = 0
        self._total_lengths: int | None = None
        self._seconds, self._latest = 0.0, -1.0
        self._start: Any = None
        # (start and end of the interval, totals at its end)
        self._pending: deque[tuple[Any, Any, dict[str, Any]]] = deque()

    def totals(self) -> tuple[int, int, int | None]:
        """Return the numbers of batches, samples and items so far."""
        return self.batches, self._total_samples, self._total_lengths

    def begin(self) -> None:
        """Measure from now on."""
        self._start = self._now()

    def batch_ended(self, samples: int, length: int | None, flops: float | None) -> None:
        """Count a batch that ends now."""
        now = self._now()
        self.batches += 1
        self._total_samples += samples
        if length is not None:
            self._total_lengths = (self._total_lengths or 0) + length
        totals = {**dict(zip(("batches", "samples", "lengths"), self.totals(), strict=True)), "flops": flops}
        self._pending.append((now if self._start is None else self._start, now, totals))
        self._start = now

    def compute(self) -> dict[str, float]:
        """Return totals and rates up to the last batch that the device has ended."""
        while self._pending and (not self._on_cuda or self._pending[0][1].query()):
            start, end, totals = self._pending.popleft()
            self._seconds += start.elapsed_time(end) / 1000 if self._on_cuda else end - start
            if self._seconds > self._latest:  # A clock may stand still between two small batches.
                self._latest = self._seconds
                self.update(time=self._seconds, **totals)
        return super().compute()

    def _now(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
