"""Values given to ``self.log``: accumulated on the device, reduced, and published once they are on the host.

Nothing here reads from the device between two logging intervals. ``record`` keeps a detached copy of a value on its
device and adds it to the epoch's total there; ``publish_step`` and ``close_epoch`` stack what is due, reduce it over
the processes with one collective an operation, and move it to the host in one copy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hasten._lib.errors import MisconfigurationException, WrongType
from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_warn
from hasten._lib.tree import Arrival, send_to_host
from hasten.elsewhere import alias
from hasten.logged_value import LoggedValue, LoggingContext, LogOptions, batch_size_of, describe, is_metric, reduction
from hasten.shared_values import LoggedStep, SharedValues

if TYPE_CHECKING:
    from hasten.hooks import Hook
    from hasten.loggers.base import Logger
    from hasten.loops.bad_loss import LossReport
    from hasten.runtime import Runtime
    from hasten.types import MetricValue

# The bar gets a fresh value this often even when the logging interval is far away (long steps).
BAR_INTERVAL_SECONDS = 5.0
# The first loss is shown this early.
FIRST_BAR_SECONDS = 1.0

# (record, name, value, options, batch_size): calls record(name, value, options, batch_size)
Observer = Callable[[Callable[..., Any], str, Any, tuple[Any, ...], Any], None]


class _Pending(NamedTuple):
    """Values on their way to the host."""

    arrival: Arrival
    entries: list[tuple[LoggedValue, str]]
    step: int
    epoch: int | None


class LoggedValues:
    """All values logged in a run, by stage and hook.

    Args:
        runtime: reduces values over the processes.

    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.shared = SharedValues(runtime)
        # (step, epoch, values): called with every row of a fit that goes to the loggers, and what they do not get.
        self.on_row: Callable[[int, int, Mapping[str, float]], object] | None = None
        # Values of an epoch that are not for the loggers, by stage.
        self._not_for_loggers: dict[str, float] = {}
        # What evaluation steps logged, where several processes reduce it at the end.
        self._rows: list[LoggedStep] = []
        self._loader_idx: int | None = None
        self.on_first_process = runtime.global_rank == 0
        # Lightning keeps numbers as tensors of single precision: the same digits, then, in names and tables.
        self.single_precision = alias.active()
        self.loggers: Sequence[Logger] = ()
        self.batch: Any = None
        self.batch_size: int = 0
        self.logs_evaluation_steps = False
        # The one that runs; its metrics are among its parts.
        self.module: nn.Module | None = None
        self.context: LoggingContext = _OUTSIDE
        self.callback_values: dict[str, float] = {}
        self.logger_values: dict[str, float] = {}
        self.bar_values: dict[str, float] = {}
        # Checks losses for nan and infinity; None outside of training.
        self.loss_report: LossReport | None = None
        self._observer: Callable[..., None] | None = None
        self._contexts: dict[str, LoggingContext] = {}
        self._pending: list[_Pending] = []
        self._bar_sent = time.monotonic()
        self._warned: set[str] = set()
        self._closed: dict[str, int] = {}
        self._loss = LoggedValue("loss", self, _OUTSIDE.row)
        self._loss_sent_at: int | None = None
        # The latest loss of training that has arrived on the host.
        self.loss_value: float | None = None

    # -- where a value is logged

    def context_of(self, row: Hook) -> LoggingContext:
        """Return the context of a hook; the same object each time."""
        context = self._contexts.get(row.name)
        if context is None:
            context = self._contexts[row.name] = LoggingContext(row)
        return context

    def inside(self, row: Hook, listeners: Sequence[Callable[..., object]]) -> Callable[..., Any]:
        """Return a function that calls ``listeners`` in order, with ``self.log`` meaning this hook."""
        context = self.context_of(row)

        def call(*arguments: Any) -> Any:
            before = self.context
            self.context = context
            result = None
            try:
                for listener in listeners:
                    result = listener(*arguments)
                return result
            finally:
                self.context = before

        return call

    # -- taking values

    def record(
        self, name: str, value: MetricValue, options: tuple[Any, ...], batch_size: int | float | Tensor | None
    ) -> LoggedValue | None:
        """Take one value given to ``self.log``.

        Args:
            name: the name.
            value: a number, a tensor of one element or a metric.
            options: the fields of a ``LogOptions``; the first call for a name in a hook decides them.
            batch_size: the weight in the epoch's mean; None for that of the batch.

        Returns:
            the ``LoggedValue``; None while an observer is there.

        """
        if self._observer is not None:
            self._observer(name, value, options, batch_size)
            return None
        context = self.context
        logged = context.values.get(name)
        if logged is None or logged.options != options:
            logged = self._resolve_options(context, name, value, LogOptions(*options))
        logged.add(value, batch_size)
        return logged

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Call ``observer(record, name, value, options, batch_size)`` instead of ``record``; contexts nest.

        Args:
            observer: calls ``record`` with the other arguments, which returns the ``LoggedValue``.

        """
        outer = self._observer

        def observe(*call: Any) -> None:
            self._observer = outer
            try:
                observer(self.record, *call)
            finally:
                self._observer = observe

        self._observer = observe
        try:
            yield
        finally:
            self._observer = outer

    def _resolve_options(self, context: LoggingContext, name: str, value: Any, options: LogOptions) -> LoggedValue:
        row, several_processes = context.row, self._runtime.world_size > 1
        where = f"self.log({name!r}, ...) in {row.name}"
        if row.log is None:
            raise MisconfigurationException(
                f"{where}: values cannot be logged here. Log them in a step, or in an epoch hook such as "
                "on_train_epoch_end."
            )
        if not isinstance(name, str):
            raise WrongType(f"{where}: the name must be a str, got {type(name).__name__}.")
        if "/dataloader_idx_" in name:
            raise MisconfigurationException(
                f"{where}: the Trainer adds '/dataloader_idx_' to names itself. Choose another name, or use "
                "add_dataloader_idx."
            )
        logged = context.values.get(name)
        if logged is None:
            logged = context.values[name] = LoggedValue(name, self, row)
        elif logged.options is not None:
            raise MisconfigurationException(
                f"{where}: this name was logged here before with other arguments "
                f"({logged.options.differences(options)}). Use the same arguments each time, or another name."
            )
        on_step = row.log.on_step if options.on_step is None else bool(options.on_step)
        on_epoch = row.log.on_epoch if options.on_epoch is None else bool(options.on_epoch)
        if on_step and not row.log.step_allowed:
            raise MisconfigurationException(
                f"{where}: on_step=True is not possible outside of steps. Use on_epoch=True (the default)."
            )
        if not on_step and not on_epoch:
            raise MisconfigurationException(
                f"{where}: with on_step=False and on_epoch=False logging is not useful, the value goes nowhere. "
                "Set one of them."
            )
        logged.on_step, logged.on_epoch = on_step, on_epoch
        logged.prog_bar = bool(options.prog_bar)
        logged.logger = options.logger is None or bool(options.logger)
        if options.logger and not self.loggers and alias.active():
            self._warn(
                "no logger", f"{where}, logger=True: the Trainer has no logger configured. Leave logger=True out."
            )
        logged.reduce = reduction(options.reduce_fx, where)
        logged.enable_graph = bool(options.enable_graph)
        logged.zero_only = bool(options.rank_zero_only)
        logged.sync = bool(options.sync_dist) and not logged.zero_only and several_processes
        if context.loader_idx is not None:
            if options.add_dataloader_idx:
                logged.loader_suffix = f"/dataloader_idx_{context.loader_idx}"
            else:
                _check_loaders_apart(context, name, value, where)
        if is_metric(value):
            # hasten finds metrics by identity. With one that is no part of the module, Lightning refuses.
            if self.module is not None and alias.active() and not any(value is part for part in self.module.modules()):
                raise MisconfigurationException(
                    f"{where}: this {type(value).__name__} is not part of {type(self.module).__name__}, so it would be "
                    "neither reset nor saved. You can fix this by setting an attribute for the metric in your module: "
                    "self.metric = ... in __init__()."
                )
            logged.metric = value
        elif several_processes and on_epoch and not options.sync_dist and not options.rank_zero_only:
            self._warn(
                name,
                f"{where}: the mean over the epoch is taken on each process alone. "
                "Pass sync_dist=True to take it over all processes.",
                PossibleUserWarning,
            )
        if on_step and row.stage != "train":
            self.logs_evaluation_steps = True
        logged.options = options
        return logged

    def find_batch_size(self, name: str) -> int:
        """Return the number of samples in the current batch; read once a batch, and only when needed."""
        if self.context.row.log is None or not self.context.row.log.step_allowed:
            return 1
        size, certain = batch_size_of(self.batch)
        if not certain:
            self._warn(
                "batch_size",
                f"self.log({name!r}, ...): an epoch mean is weighted by the batch size, and this batch "
                f"({describe(self.batch)}) does not show it; {size} was taken. "
                f"Write self.log({name!r}, ..., batch_size=...) to set it.",
            )
        self.batch_size = size
        return size

    # -- publishing

    def publish_step(self, step: int, epoch: int, *, to_loggers: bool, loss: Tensor | None = None) -> None:
        """Start sending the latest training values to the host.

        Args:
            step: the loggers' x axis.
            epoch: the current epoch.
            to_loggers: send them to the loggers too, not only to the progress bar.
            loss: the loss of the step, to be checked once it has arrived.

        """
        entries = [
            (logged, logged.step_name)
            for logged in self.of_stage("train")
            if logged.on_step and (to_loggers or logged.prog_bar)
            # Each process refreshes its bar by its own clock: nothing may be exchanged for that.
            and (to_loggers or not self.shared.reduces(logged))
            and logged.value is not None
            and logged.step_value() is not None
        ]  # fmt: skip
        moment = "step" if to_loggers else None
        if entries or (loss is not None and self.loss_report is not None):
            self._send(entries, step if to_loggers else -1, epoch, loss, moment=moment)
        elif moment is not None:
            self.shared.of_step([], [], moment)
        self.deliver()

    def publish_loss(self, loss: Tensor | None, step: int, epoch: int) -> None:
        """Send the loss of a step to the host to be checked, unless ``publish_step`` has sent it."""
        if loss is not None and self.loss_report is not None and step != self._loss_sent_at:
            self._send([], step, epoch, loss)

    def publish_bar(self, epoch: int, *, now: bool = False, loss: Tensor | None = None) -> None:
        """Refresh the bar's values, ``now`` or if steps are so long that the logging interval is far away."""
        seconds = time.monotonic()
        every = FIRST_BAR_SECONDS if self.loss_value is None and loss is not None else BAR_INTERVAL_SECONDS
        if now or seconds - self._bar_sent > every:
            self._bar_sent = seconds
            self.publish_step(0, epoch, to_loggers=False, loss=loss)

    def publish_evaluation_step(self, stage: str, step: int) -> None:
        """Send values logged with ``on_step=True`` in an evaluation step; their x axis is the batch's index."""
        entries = [
            (logged, logged.step_name)
            for logged in self.of_stage(stage, current_loader=True)
            if logged.on_step and logged.step_value() is not None
        ]
        if self._rows or any(self.shared.reduces(logged) for logged, _ in entries):
            # Processes may have different numbers of batches: all steps are reduced at the end.
            self._rows.append(
                LoggedStep(self._loader_idx, step, [(logged, logged.step_value()) for logged, _ in entries])
            )
        elif entries:
            self._send(entries, step, None)
        if len(self._pending) > 64:
            self.deliver()

    def complete_evaluation(self, stage: str, module: nn.Module, batches: list[int]) -> None:
        """Agree with the other processes on what was logged, also where this one had no batches; all call it.

        Args:
            stage: "validate" or "test".
            module: has the metrics.
            batches: how many batches this process had, by loader.

        """
        absent, rows = self.shared.of_evaluation(self._of_epoch(stage), self._rows, module, batches)
        self._rows = []
        for each in absent:
            logged = self.context_of(each.row).by_loader.setdefault(each.loader_idx, {})
            metric = None if each.metric is None else module.get_submodule(each.metric)
            logged.setdefault(each.name, LoggedValue(each.name, self, each.row)).take_from_others(
                each.settings, each.neutral, metric
            )
        self.deliver(wait=True)
        for step, values in rows:
            for name, value in values:
                if self.loss_report is not None and not math.isfinite(value) and "loss" in name.name.lower():
                    self.loss_report.logged(name.hook, stage, name.name, value)
                if name.prog_bar:
                    self.bar_values[name.name] = value
            self._write_row({name.name: value for name, value in values if name.logger}, {}, step, None)

    def logged_on_steps(self) -> list[str]:
        """Return the names of the training values meant for the loggers' rows of steps."""
        return [logged.base_name for logged in self.of_stage("train") if logged.on_step and logged.logger]

    def sync_step_values(self) -> None:
        """Reduce the latest values logged with ``sync_dist=True`` over the processes; all of them call it."""
        shared = [
            logged
            for logged in self.of_stage("train")
            if logged.on_step and self.shared.reduces(logged)
            and logged.weight is not None and logged.step_value() is not None
        ]  # fmt: skip
        values = self.shared.of_step([logged.step_value() for logged in shared], shared, "asked")
        for logged, value in zip(shared, send_to_host(values).values(), strict=True):
            self.callback_values[logged.base_name] = self.callback_values[logged.step_name] = value

    def _send(
        self,
        entries: list[tuple[LoggedValue, str]],
        step: int,
        epoch: int | None,
        loss: Tensor | None = None,
        *,
        moment: str | None = None,
    ) -> None:
        self._bar_sent = time.monotonic()
        values = [logged.step_value() for logged, _ in entries]
        if loss is not None:
            # First: what is logged is often the same.
            entries, values = [(self._loss, "loss"), *entries], [loss.detach(), *values]
            self._loss_sent_at = step if step >= 0 else self._loss_sent_at
        if moment is not None:
            values = self.shared.of_step(values, [logged for logged, _ in entries], moment)
        self._pending.append(_Pending(send_to_host(values), entries, step, epoch))

    def deliver(self, *, wait: bool = False) -> None:
        """Hand what has arrived on the host to loggers and bar, in order."""
        while self._pending and (wait or self._pending[0].arrival.ready()):
            arrival, entries, step, epoch = self._pending.pop(0)
            row: dict[str, float] = {}
            others: dict[str, float] = {}
            for (logged, name), value in zip(entries, arrival.values(), strict=True):
                self._check_loss(logged, name, value, step, epoch)
                if logged.prog_bar:
                    self.bar_values[name] = value
                if step >= 0 and logged is not self._loss:
                    (row if logged.logger else others)[name] = value
                if epoch is not None and self.shared.reduces(logged):
                    self.callback_values[logged.base_name] = self.callback_values[name] = value
            self._write_row(row, others, step, epoch)

    def _check_loss(self, logged: LoggedValue, name: str, value: float, step: int, epoch: int | None) -> None:
        if self.loss_report is None:
            return
        if logged is self._loss:
            self.loss_value = value
            if step >= 0:
                self.loss_report.loss(value, step, epoch)
        elif not math.isfinite(value) and "loss" in name.lower():
            self.loss_report.logged(logged.row.name, str(logged.row.stage), name, value)

    def _write_row(self, values: dict[str, float], others: Mapping[str, float], step: int, epoch: int | None) -> None:
        """Hand ``values`` to the loggers, and with ``others`` to the history."""
        if self.on_row is not None and epoch is not None and (values or others):
            self.on_row(step, epoch, {**values, **others})
        if not values:
            return
        self.logger_values.update(values)
        row = dict(values)
        if epoch is not None and "step" not in row:  # A logged "step" is the only x axis.
            row.setdefault("epoch", epoch)
        step = int(row.pop("step", step))
        for logger in self.loggers:
            logger.log_metrics(metrics=dict(row), step=step)
            logger.save()

    # -- the end of an epoch

    def close_epoch(self, stage: str) -> tuple[list[dict[str, float]], dict[str, float]]:
        """Compute what the epoch accumulated so far; waits for the device.

        Returns:
            the values by dataloader (for ``validate`` and ``test``), and the values for the loggers.

        """
        self.deliver(wait=True)
        entries = [(loader_idx or 0, logged) for loader_idx, logged in self._of_epoch(stage)]
        # The hooks between the first and the second closing log no steps.
        latest = {} if stage in self._closed else self._latest_step_values(stage)
        self._closed[stage] = self._closed.get(stage, 0) + 1
        values = self.shared.of_epoch([logged for _, logged in entries], f"{stage} epoch {self._closed[stage]}")
        row: dict[str, float] = {}
        self.callback_values.update(latest)
        by_loader: list[dict[str, float]] = [{} for _ in range(max((index for index, _ in entries), default=0) + 1)]
        for (loader_idx, logged), value in zip(entries, values, strict=True):
            name, value = logged.epoch_name, logged.published(value)
            self._check_loss(logged, name, value, -1, None)
            self.callback_values[logged.base_name] = self.callback_values[name] = value
            if logged.prog_bar:
                self.bar_values[name] = value
            if logged.logger:
                by_loader[loader_idx][name] = row[name] = self.logger_values[name] = value
            else:
                self._not_for_loggers[name] = value
            logged.weight = None  # Computed: the epoch's last hooks may log more and close it again.
        return by_loader, row

    def _of_epoch(self, stage: str) -> list[tuple[int | None, LoggedValue]]:
        """Return the loader index and the value of what the epoch has gathered and not computed yet."""
        return [
            (loader_idx, logged)
            for context in self._contexts_of(stage)
            for loader_idx, values in context.by_loader.items()
            for logged in values.values()
            if logged.on_epoch and logged.weight is not None and logged.has_epoch_value
        ]

    def log_epoch(self, values: dict[str, float], step: int, epoch: int) -> None:
        """Write the values of an epoch as one row."""
        others, self._not_for_loggers = self._not_for_loggers, {}
        self._write_row(values, others, step, epoch)

    def _latest_step_values(self, stage: str) -> dict[str, float]:
        """Read the last step's values: callbacks may need them after the epoch is reset."""
        if stage != "train":
            return {}
        found = [v for v in self.of_stage(stage) if v.on_step and v.step_value() is not None]
        latest = self.shared.of_step([logged.step_value() for logged in found], found, f"{stage} latest")
        values: dict[str, float] = {}
        for logged, value in zip(found, send_to_host(latest).values(), strict=True):
            if logged.prog_bar:
                self.bar_values[logged.step_name] = value
            if logged.logger:
                self.logger_values[logged.step_name] = value
            values[logged.step_name] = value
            if not logged.on_epoch:
                values[logged.base_name] = value
        return values

    # -- epochs

    def start_epoch(self, stage: str) -> None:
        """Forget what the stage's last epoch accumulated."""
        self._closed.pop(stage, None)
        self._rows = []
        self._bar_sent = time.monotonic()
        for logged in self.of_stage(stage):
            logged.reset()

    def enter_loader(self, stage: str, loader_idx: int | None) -> None:
        """Take the next values as those of one of several dataloaders; None when there is one."""
        self._loader_idx = loader_idx
        for context in self._contexts_of(stage):
            if context.row.log is not None and context.row.log.step_allowed:
                context.enter_loader(loader_idx)

    def leave(self) -> None:
        """Leave the run: a value logged from now on is an error."""
        self.context = _OUTSIDE
        self.batch = None

    def forget_callback_values(self) -> None:
        """Drop everything shown to callbacks, bar and loggers, after the sanity check and before a new call."""
        self.callback_values, self.logger_values, self.bar_values = {}, {}, {}
        self.loss_value = None

    def callback_metrics(self) -> dict[str, Tensor]:
        """Return the latest value of every name as tensors; reading one of them may wait for the device."""
        metrics = {name: _as_metric(value) for name, value in self.callback_values.items()}
        for logged, value in self._current_step_values():
            if not (self.shared.reduces(logged) and logged.base_name in metrics):
                metrics[logged.base_name] = metrics[logged.step_name] = value
        return metrics

    def logged_metrics(self) -> dict[str, Tensor]:
        """Return the latest value of everything meant for the loggers; reading one may wait for the device."""
        metrics = {name: _as_metric(value) for name, value in self.logger_values.items()}
        metrics |= {logged.step_name: v for logged, v in self._current_step_values() if logged.logger}
        return metrics

    def _current_step_values(self) -> Iterator[tuple[LoggedValue, Tensor]]:
        """Yield the training values of the epoch that is not closed yet."""
        for logged in self.of_stage("train"):
            value = logged.step_value() if logged.on_step and logged.weight is not None else None
            if value is not None:
                yield logged, value if isinstance(value, Tensor) else _as_metric(value)

    def evaluation_metrics(self) -> set[int]:
        """Return the ids of the torchmetrics that belong to validation or test alone."""
        training: set[int] = set()
        evaluation: set[int] = set()
        for context in self._contexts.values():
            metrics = {id(logged.metric) for logged in context.all_values() if logged.metric is not None}
            (training if context.row.stage == "train" else evaluation).update(metrics)
        return evaluation - training

    def of_stage(self, stage: str, *, current_loader: bool = False) -> Iterator[LoggedValue]:
        """Yield the values logged in the hooks of a stage."""
        for context in self._contexts_of(stage):
            yield from list(context.values.values() if current_loader else context.all_values())

    def _contexts_of(self, stage: str) -> Iterable[LoggingContext]:
        return [context for context in self._contexts.values() if context.row.stage == stage]

    def _warn(self, key: str, message: str, category: type[Warning] = UserWarning) -> None:
        if key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(message, category)

    # -- state

    def state_dict(self, attribute_of: Callable[[Any], str | None]) -> dict[str, Any]:
        """Return what an interrupted training epoch has accumulated, as plain data and tensors."""
        # Values still on their way belong to the steps before this checkpoint.
        self.deliver(wait=True)
        kept = []
        for context in self._contexts_of("train"):
            for logged in context.values.values():
                attribute = None if logged.metric is None else attribute_of(logged.metric)
                if logged.value is not None and (logged.metric is None or attribute is not None):
                    kept.append({"hook": context.row.name, "metric": attribute, **logged.state_dict()})
        return {
            "train": kept,
            "callback": dict(self.callback_values),
            "logged": dict(self.logger_values),
            "bar": dict(self.bar_values),
        }

    def load_state_dict(self, state: dict[str, Any], rows: Mapping[str, Hook], metric_at: Callable[[str], Any]) -> None:
        """Restore what ``state_dict`` returned."""
        self.callback_values = dict(state["callback"])
        self.logger_values = dict(state["logged"])
        self.bar_values = dict(state["bar"])
        for kept in state["train"]:
            row = rows[kept["hook"]]
            logged = self.context_of(row).values[kept["name"]] = LoggedValue(kept["name"], self, row)
            metric = None if kept["metric"] is None else metric_at(kept["metric"])
            logged.load_state_dict(kept, metric, self._runtime.device)


def _as_metric(value: float) -> Tensor:
    """Return a value as a tensor; in double precision if it is a count that single precision cannot hold."""
    count = abs(value) > 2**24 and float(value).is_integer()
    return torch.tensor(float(value), dtype=torch.float64 if count else None)


def _check_loaders_apart(context: LoggingContext, name: str, value: Any, where: str) -> None:
    """Raise if another dataloader's values have this name, unless both are accumulated in one metric."""
    for loader_idx, values in context.by_loader.items():
        other = values.get(name)
        if loader_idx in (None, context.loader_idx) or other is None or other.value is None:
            continue
        if not other.loader_suffix and not (is_metric(value) and other.metric is value):
            raise MisconfigurationException(
                f"{where}: with add_dataloader_idx=False the dataloaders {loader_idx} and {context.loader_idx} both "
                f"log {name!r}. Leave add_dataloader_idx out, or log f'{name}_{{dataloader_idx}}'."
            )


class _Nowhere:
    name = "a place outside the Trainer's hooks"
    stage = None
    log = None


_OUTSIDE = LoggingContext(_Nowhere())  # type: ignore[arg-type]
