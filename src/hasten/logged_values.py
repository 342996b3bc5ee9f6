"""Values given to ``self.log``: accumulated on the device, reduced, and published once they are on the host.

No step that is only recorded waits for the device. ``record`` keeps a copy of a value on its device (detached, unless
``enable_graph=True``) and, with ``on_epoch=True``, adds it to the epoch's total there; ``publish_step`` and
``close_epoch`` stack the values that are due, reduce them over the processes with one collective per operation, and
move them to the host in one copy. At the end of a training epoch that is two: the last step's values, and the epoch's.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsFloat

import torch
from torch import Tensor, nn

from hasten._lib.errors import MisconfigurationException, WrongType, make_error
from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_warn
from hasten._lib.tree import Arrival, send_to_host, weighed
from hasten.checkpoint.metrics import Gathered
from hasten.elsewhere import conventions
from hasten.logged_value import (
    LoggedValue,
    LoggingContext,
    LogOptions,
    batch_size_of,
    describe,
    is_metric,
    mean,
    reduction,
)
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
Observer = Callable[[Callable[..., Any], str, Any, tuple[Any, ...], Any], LoggedValue | None]


# Where a value is shown: ``callback_metrics``, also the bar, and ``logged_metrics``.
_PLACES = ("callback", "logged")


class _Pending(NamedTuple):
    """Values on their way to the host."""

    arrival: Arrival
    entries: list[tuple[LoggedValue, str]]
    step: int
    epoch: int | None


class LoggedValues:
    """All values logged in a run, by stage and hook."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.shared = SharedValues(runtime)
        # For a device that records operations: moves the start of a total to it.
        self.upload = None if runtime.steps is None else runtime.steps.upload
        # (step, epoch, values): called with every row of a fit that goes to the loggers, and values that they do not
        # get.
        self.on_row: Callable[[int, int, Mapping[str, float]], object] | None = None
        # Values of the training epoch that is ending: first for the loggers, then the others.
        self.epoch_values: dict[str, float] = {}
        self._not_for_loggers: dict[str, float] = {}
        # Values of evaluation steps, if several processes reduce them at the end.
        self._rows: list[LoggedStep] = []
        self._loader_idx: int | None = None
        self._several_loaders = False
        # Ids of the metrics that had gathered batches of other dataloaders when the present one began.
        self._begun_before: set[int] = set()
        self.on_first_process = runtime.global_rank == 0
        decisions = conventions.current()
        # Lightning keeps numbers in single precision: then names and tables have the same digits.
        in_64_bits = runtime.precision.precision == "64-true" or torch.get_default_dtype() == torch.float64
        self.single_precision = decisions.averages_in_single_precision and not in_64_bits
        # It also rounds a product before it is added.
        self.add_product = _add_rounded if self.single_precision else Tensor.add_
        # Names whose values were logged in 64 bits, and which types have these: Python's floats in such a run. A dict
        # keeps the order of the names, which are part of checkpoints.
        self._double: dict[str, bool] = {}
        self._of_64_bits = {torch.float64, *((float,) if in_64_bits else ())}
        self.loggers: Sequence[Logger] = ()
        self.batch: Any = None
        self.batch_size: int = 0
        # Whether the loggers' row of the last step has not been written yet.
        self.row_is_due = False
        self.logs_evaluation_steps = False
        # By dataloader: steps of earlier evaluations, after which this one continues on the loggers' x axis.
        self.steps_before: dict[int, int] = {}
        # The module that runs; metrics are found among its parts.
        self.module: nn.Module | None = None
        self.context: LoggingContext = _OUTSIDE
        self.callback_values: dict[str, float] = {}
        self.logger_values: dict[str, float] = {}
        self.bar_values: dict[str, float] = {}
        # By place ("callback" or "logged") and name: the value of a training step after which an evaluation has
        # published another under this name, which stays until the next value of a step.
        self._outdated: dict[tuple[str, str], Any] = {}
        # Checks losses for nan and infinity; None outside of training.
        self.loss_report: LossReport | None = None
        self._observer: Callable[..., LoggedValue | None] | None = None
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
            previous = self.context
            self.context = context
            result = None
            try:
                for listener in listeners:
                    result = listener(*arguments)
                return result
            finally:
                self.context = previous

        return call

    def all_values(self) -> list[LoggedValue]:
        """Return everything logged, a LoggedValue for each name and hook."""
        return [logged for context in self._contexts.values() for logged in context.values.values()]

    # -- recording values

    def record(
        self, name: str, value: MetricValue, options: tuple[Any, ...], batch_size: int | float | Tensor | None
    ) -> LoggedValue | None:
        """Record a number, a tensor of one element or a metric given to ``self.log``; None if values are ignored.

        ``options`` are the fields of a ``LogOptions``; the first call for a name in a hook decides them. ``batch_size``
        is the weight in the epoch's mean, None for the size of the batch.
        """
        if self._observer is not None:
            return self._observer(name, value, options, batch_size)
        context = self.context
        logged = context.values.get(name)
        if logged is None or logged.options != options:
            if batch_size is not None or (isinstance(value, Tensor) and value.is_complex()):
                _check_given(name, value, batch_size)
            logged = self._resolve_options(context, name, value, LogOptions(*options))
        logged.add(value, batch_size)
        return logged

    def switch_off(self) -> None:
        """Ignore all values, with a warning for the first."""
        self._observer = _Ignore()

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Call ``observer(record, name, value, options, batch_size)`` instead of ``record``; contexts nest.

        It calls ``record`` with the other arguments, and returns what that returns.
        """
        outer = self._observer

        def observe(*call: Any) -> LoggedValue | None:
            self._observer = outer
            try:
                return observer(self.record, *call)
            finally:
                self._observer = observe

        self._observer = observe
        try:
            yield
        finally:
            self._observer = outer

    def weighed(self, weight: Tensor) -> AbstractContextManager[None]:
        """Return a context in which means over the processes count this process by a weight, whose mean is 1.

        The weight has one element; where it is 0, the value does not count, whatever it is.
        """

        def observer(record: Callable[..., Any], name: str, value: Any, options: Any, batch_size: Any) -> Any:
            given = LogOptions(*options)
            is_number = isinstance(value, (Tensor, float, int))
            if given.sync_dist and is_number and reduction(given.reduce_fx, name) == "mean":
                value = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.double)
                value = weighed(value, weight)
            return record(name, value, options, batch_size)

        return self.observed(observer)

    def _resolve_options(self, context: LoggingContext, name: str, value: Any, options: LogOptions) -> LoggedValue:
        """Return the ``LoggedValue`` for a name of this hook, with the settings that the options mean."""
        row, several_processes = context.row, self._runtime.several_processes
        where = f"self.log({name!r}, ...) in {row.name}"
        _check_place(row, name, where, options)
        meant = self._meaning(row, options, where)
        logged = context.values.get(name)
        if logged is None:
            if not any(context.by_loader.values()):
                # In the order of the first values: of one name that two hooks log, the later value counts.
                self._contexts[row.name] = self._contexts.pop(row.name, context)
            logged = context.values[name] = LoggedValue(name, self, row)
        elif logged.options is not None:
            before = self._meaning(row, logged.options, where)
            if before != meant:
                raise MisconfigurationException(
                    f"{where}: this name was logged here before with other arguments ({before.differences(meant)}).",
                    fix="Use the same arguments each time, or another name.",
                )
            logged.options = options
            return logged
        logged.on_step, logged.on_epoch = bool(meant.on_step), bool(meant.on_epoch)
        logged.prog_bar, logged.logger, logged.reduce = meant.prog_bar, bool(meant.logger), str(meant.reduce_fx)
        logged.enable_graph, logged.zero_only = meant.enable_graph, meant.rank_zero_only
        # Also in one process: a run of several may continue from its checkpoint.
        logged.sync = bool(options.sync_dist) and not logged.zero_only
        if options.logger and not self.loggers:
            what = f"{where}, logger=True: the Trainer has no logger configured."
            self._warn("no logger", what, "Leave logger=True out.")
        if context.loader_idx is not None:
            if options.add_dataloader_idx:
                logged.loader_suffix = f"/dataloader_idx_{context.loader_idx}"
            else:
                _check_loaders_apart(context, name, value, where)
        if is_metric(value):
            self._check_is_part(value, where)
            logged.metric = value
            self._warn_of_two_stages(logged, where)
            if logged.loader_suffix and any(id(part) in self._begun_before for part in value.modules()):
                self._say_what_it_includes(logged, where)
        elif several_processes and logged.on_epoch and not options.sync_dist and not options.rank_zero_only:
            what = f"{where}: the mean over the epoch is taken on each process separately."
            self._warn(name, what, "Pass sync_dist=True to take it over all processes.", PossibleUserWarning)
        if logged.on_step and row.stage != "train":
            self.logs_evaluation_steps = True
        logged.options = options
        return logged

    def _meaning(self, row: Hook, options: LogOptions, where: str) -> LogOptions:
        """Return the options with their defaults filled in, equal for calls that mean the same."""
        on_step, on_epoch = _when(row, options, where)
        zero_only = bool(options.rank_zero_only)
        return options._replace(
            prog_bar=bool(options.prog_bar),
            logger=options.logger is None or bool(options.logger),
            on_step=on_step,
            on_epoch=on_epoch,
            reduce_fx=reduction(options.reduce_fx, where),
            enable_graph=bool(options.enable_graph),
            sync_dist=bool(options.sync_dist) and not zero_only and self._runtime.several_processes,
            add_dataloader_idx=bool(options.add_dataloader_idx),
            rank_zero_only=zero_only,
        )

    def _check_is_part(self, metric: Any, where: str) -> None:
        # hasten finds metrics by identity. Lightning refuses a metric that is not part of the module.
        is_part = self.module is None or any(metric is part for part in self.module.modules())
        if not is_part and conventions.current().metrics_are_attributes:
            raise MisconfigurationException(
                f"{where}: this {type(metric).__name__} is not part of {type(self.module).__name__}, so it would be "
                "neither reset nor saved.",
                fix=(
                    "You can fix this by setting an attribute for the metric in your module: self.metric = ... in "
                    "__init__()."
                ),
            )

    def _warn_of_two_stages(self, logged: LoggedValue, where: str) -> None:
        stages = {"train", "validate"}
        if logged.row.stage not in stages:
            return
        for other in self.of_stage((stages - {logged.row.stage}).pop()):
            if other.metric is logged.metric:
                self._warn(
                    f"metric of two stages {id(logged.metric)}",
                    f"{where}: this {type(logged.metric).__name__} is logged in {other.row.name} too, with one state "
                    "for both: validation resets what training has gathered.",
                    "Make one metric for each.",
                )

    def _say_what_it_includes(self, logged: LoggedValue, where: str) -> None:
        """Say that a metric has gathered batches of other dataloaders, for which it is not logged."""
        kind, fix = type(logged.metric).__name__, "Make one metric for each dataloader."
        earlier = self.of_stage(str(logged.row.stage))
        if any(one.metric is logged.metric and one.gathered is not None for one in earlier):
            # Lightning's value has the batches of all dataloaders up to this one, and would be of some of them here.
            raise MisconfigurationException(
                f"{where}: this {kind} is logged for some dataloaders, and has gathered batches of one before "
                f"{self._loader_idx} for which it is not logged.",
                fix=fix,
            )
        self._warn(
            f"begun before {id(logged.metric)}",
            f"{where}: this {kind} has gathered batches of dataloaders before {self._loader_idx}, for which it is not "
            "logged: its value includes them.",
            fix,
        )

    def find_batch_size(self, name: str) -> int:
        """Return the number of samples in the current batch; read once a batch, and only when needed."""
        if self.context.row.log is None or not self.context.row.log.step_allowed:
            return 1
        size, certain = batch_size_of(self.batch)
        if not certain:
            self._warn(
                "batch_size",
                f"self.log({name!r}, ...): an epoch mean is weighted by the batch size, and this batch "
                f"({describe(self.batch)}) does not show it; {size} was taken.",
                f"Write self.log({name!r}, ..., batch_size=...) to set it.",
            )
        self.batch_size = size
        return size

    # -- publishing

    def publish_step(self, step: int, epoch: int, *, to_loggers: bool, loss: Tensor | None = None) -> None:
        """Start sending the latest training values to the host; ``step`` is the x axis of the loggers.

        The loss of the step is checked once it has arrived. Without ``to_loggers``, only the progress bar gets values.
        """
        entries = [
            (logged, logged.step_name)
            for logged in self.of_stage("train")
            if logged.on_step and (to_loggers or logged.prog_bar)
            # Each process refreshes its bar by its own clock, so nothing may be exchanged here.
            and (to_loggers or not self.shared.reduces(logged))
            and logged.value is not None
            and logged.step_value() is not None
        ]  # fmt: skip
        moment = "step" if to_loggers else None
        self.row_is_due = self.row_is_due and not to_loggers
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

    def publish_evaluation_step(self, stage: str, batch_idx: int) -> None:
        """Send values logged with ``on_step=True`` in an evaluation step."""
        entries = [
            (logged, logged.step_name)
            for logged in self.of_stage(stage, current_loader=True)
            if logged.on_step and logged.step_value() is not None
        ]
        if self._rows or any(self.shared.reduces(logged) for logged, _ in entries):
            # Processes may have different numbers of batches: all steps are reduced at the end.
            self._rows.append(
                LoggedStep(self._loader_idx, batch_idx, [(logged, logged.step_value()) for logged, _ in entries])
            )
        elif entries:
            self._send(entries, self.steps_before.get(self._loader_idx or 0, 0) + batch_idx, None)
        if len(self._pending) > 64:
            self.deliver()

    def complete_evaluation(self, stage: str, module: nn.Module, batches: list[int]) -> None:
        """Agree with the other processes on what was logged, also where this one had no batches; all call it."""
        epoch_values = self._of_epoch(stage)
        absent, rows = self.shared.of_evaluation(epoch_values, self._rows, module, batches)
        self._rows = []
        metrics = [None if each.metric is None else module.get_submodule(each.metric) for each in absent]
        uses = Counter(id(metric) for metric in [*metrics, *(logged.metric for _, logged in epoch_values)])
        for each, metric in zip(absent, metrics, strict=True):
            of_loader = self.context_of(each.row).by_loader.setdefault(each.loader_idx, {})
            logged = of_loader.setdefault(each.name, LoggedValue(each.name, self, each.row))
            logged.take_from_others(each.settings, each.neutral, metric)
            if each.metric is not None and uses[id(metric)] > 1:
                # The metric object itself belongs to another dataloader.
                logged.stand_in = self.shared.without_batches(metric, each.metric)
        self.deliver(wait=True)
        for batch_idx, values in rows:
            step = self.steps_before.get(values[0][0].loader, 0) + batch_idx
            for name, value in values:
                if self.loss_report is not None and not math.isfinite(value) and "loss" in name.name.lower():
                    self.loss_report.logged(name.hook, stage, name.name, value)
                if name.prog_bar:
                    self.bar_values[name.name] = value
            self._write_row({name.name: value for name, value in values if name.logger}, {}, step, None)

    def logged_on_steps(self) -> list[LoggedValue]:
        """Return the training values meant for the loggers' rows of steps."""
        return [logged for logged in self.of_stage("train") if logged.on_step and logged.logger]

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
            value = logged.published(value)
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
            # The loss comes first: a logged value is often the same tensor.
            entries, values = [(self._loss, "loss"), *entries], [loss.detach(), *values]
            self._loss_sent_at = step if step >= 0 else self._loss_sent_at
        if moment is not None:
            values = self.shared.of_step(values, [logged for logged, _ in entries], moment)
        self._pending.append(_Pending(send_to_host(values), entries, step, epoch))

    def deliver(self, *, wait: bool = False) -> None:
        """Pass values that have arrived on the host to loggers and bar, in order."""
        while self._pending and (wait or self._pending[0].arrival.ready()):
            arrival, entries, step, epoch = self._pending.pop(0)
            row: dict[str, float] = {}
            others: dict[str, float] = {}
            for (logged, name), value in zip(entries, arrival.values(), strict=True):
                self._check_loss(logged, name, value, step, epoch)
                if logged.prog_bar and self._is_shown("callback", name, logged.step_value()):
                    self.bar_values[name] = value
                if step >= 0 and logged is not self._loss:
                    (row if logged.logger else others)[name] = value
                if epoch is not None and self.shared.reduces(logged):
                    self.callback_values[logged.base_name] = self.callback_values[name] = logged.published(value)
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
        """Pass ``values`` to the loggers, and together with ``others`` to the history."""
        if self.on_row is not None and epoch is not None and (values or others):
            self.on_row(step, epoch, {**values, **others})
        if not values:
            return
        self.logger_values.update(values)
        row = dict(values)
        if epoch is not None and "step" not in row:  # If "step" is logged, it is the only x axis.
            row.setdefault("epoch", epoch)
        step = int(row.pop("step", step))
        for logger in self.loggers:
            logger.log_metrics(metrics=dict(row), step=step)
            logger.save()

    # -- the end of an epoch

    def close_epoch(self, stage: str) -> tuple[list[dict[str, float]], dict[str, float]]:
        """Return what the epoch has accumulated, by dataloader and for the loggers; waits for the device."""
        self.deliver(wait=True)
        self.batch_size = 0
        entries = [(loader_idx or 0, logged) for loader_idx, logged in self._of_epoch(stage)]
        # The hooks between the first and the second closing log no steps.
        latest = {} if stage in self._closed else self._latest_step_values(stage)
        self._closed[stage] = self._closed.get(stage, 0) + 1
        values = self.shared.of_epoch([logged for _, logged in entries], f"{stage} epoch {self._closed[stage]}")
        row: dict[str, float] = {}
        self.callback_values.update(latest)
        by_loader: list[dict[str, float]] = [{} for _ in range(max((index for index, _ in entries), default=0) + 1)]
        shown: set[str] = set()
        for (loader_idx, logged), value in zip(entries, values, strict=True):
            name, base, value = logged.epoch_name, logged.base_name, logged.published(value)
            self._check_loss(logged, name, value, -1, None)
            self.callback_values[base] = self.callback_values[name] = value
            shown |= {base, name}
            if getattr(logged.value, "dtype", type(logged.value)) in self._of_64_bits:
                self._double |= {base: True, name: True}
            if logged.prog_bar:
                self.bar_values[name] = value
            if logged.logger:
                by_loader[loader_idx][name] = row[name] = self.logger_values[name] = value
            else:
                self._not_for_loggers[name] = value
            logged.weight = None  # Marked as computed: the epoch's last hooks may log more values and close it again.
        if stage == "train":
            self.epoch_values |= row
        else:
            self._outdate(stage, shown, set(row))
        if self._several_loaders:
            # The epoch's last hooks may compute the value over all dataloaders.
            _give_back(self.of_stage(stage))
        return by_loader, row

    def _outdate(self, stage: str, callback: set[str], loggers: set[str]) -> None:
        """Show what ``stage`` has just published under these names, not the values of training steps before it."""
        if self.logs_evaluation_steps:
            loggers |= {each.step_name for each in self.of_stage(stage) if each.on_step and each.logger}
        for logged in self.of_stage("train") if callback or loggers else ():
            if not logged.on_step or logged.value is None:
                continue
            for name in (logged.base_name, logged.step_name):
                for place, names in zip(_PLACES, (callback, loggers), strict=True):
                    if name in names:
                        self._make_unique(logged)
                        self._outdated[place, name] = logged.step_value()

    def _make_unique(self, logged: LoggedValue) -> None:
        """Make a number a new object, to be told apart from an equal one of the next step."""
        if isinstance(logged.value, (int, float)) and all(each is not logged.value for each in self._outdated.values()):
            logged.value = logged.value * 1.0

    def _is_shown(self, place: str, name: str, value: object) -> bool:
        """Return whether the value of a training step is the latest of its name."""
        return self._outdated.get((place, name), self) is not value

    def show_loss(self, loss: Tensor | None) -> None:
        """Have the bar show the loss of the training epoch's last step, if ``close_epoch`` has waited for values."""
        if loss is None or self.loss_report is None:
            return
        if loss.is_cpu or any(logged.is_on_device for logged in self.of_stage("train")):
            (self.loss_value,) = send_to_host([loss.detach()]).values()

    def _of_epoch(self, stage: str) -> list[tuple[int | None, LoggedValue]]:
        """Return loader index and value of metrics that the epoch has gathered and not computed yet."""
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
        if values is self.epoch_values:  # Not if a hook at the end of the epoch has run an evaluation.
            self.epoch_values = {}
        self._write_row(values, others, step, epoch)

    def _latest_step_values(self, stage: str) -> dict[str, float]:
        """Read the last step's values: callbacks may need them after the epoch is reset."""
        if stage != "train":
            return {}
        step_values = [v for v in self.of_stage(stage) if v.on_step and v.step_value() is not None]
        latest = self.shared.of_step([logged.step_value() for logged in step_values], step_values, f"{stage} latest")
        values, row, bar, current = dict[str, float](), dict[str, float](), dict[str, float](), dict[str, Any]()
        for logged, value in zip(step_values, send_to_host(latest).values(), strict=True):
            name, base = logged.step_name, logged.base_name
            current[name] = current[base] = logged.step_value()
            values[name] = value
            if logged.prog_bar:
                bar[name] = value
            if logged.logger:
                row[name] = value
            if getattr(logged.value, "dtype", type(logged.value)) in self._of_64_bits:
                self._double |= {base: True, name: True}
            if not logged.on_epoch:
                values[base] = value
        self.bar_values |= self._shown("callback", bar, current)
        self.logger_values |= self._shown("logged", row, current)
        return self._shown("callback", values, current)

    def _shown(self, place: str, values: dict[str, float], current: Mapping[str, Any]) -> dict[str, float]:
        """Return the values of training steps that are the latest of their names; ``current`` has them as logged."""
        if not self._outdated:
            return values
        return {name: value for name, value in values.items() if self._is_shown(place, name, current[name])}

    # -- epochs

    def start_epoch(self, stage: str, *, resets_values: bool = True) -> None:
        """Forget what the last epoch of "train", "validate" or "test" accumulated.

        Without ``resets_values``, the end of that epoch has reset the values: metrics may have been updated since.
        """
        self.batch_size = 0
        self._closed.pop(stage, None)
        self._rows = []
        if stage == "train":
            self._outdated = {}
        self._bar_sent = time.monotonic()
        for logged in self.of_stage(stage) if resets_values else ():
            logged.reset()

    def enter_loader(self, stage: str, loader_idx: int | None) -> None:
        """Record the next values for this one of several dataloaders; None if there is only one."""
        if loader_idx is not None and self._loader_idx not in (None, loader_idx):
            self._several_loaders = True
            self._start_metrics_again(stage)
            parts = () if self.module is None else self.module.modules()
            self._begun_before = {
                id(part) for part in parts if is_metric(part) and part._defaults and part._update_count
            }
        elif loader_idx is None and self._several_loaders:
            _give_back(self.of_stage(stage), unshared=True)
        self._loader_idx = loader_idx
        for context in self._contexts_of(stage):
            if context.row.log is not None and context.row.log.step_allowed:
                context.enter_loader(loader_idx)

    def _start_metrics_again(self, stage: str) -> None:
        """Save the states of the metrics of the dataloader that has ended: the next one may log the same objects.

        Values logged under one name for all dataloaders continue.
        """
        metric_values = [
            logged
            for context in self._contexts_of(stage)
            for logged in context.by_loader.get(self._loader_idx, {}).values()
            if logged.metric is not None and logged.on_epoch and logged.loader_suffix and logged.value is not None
        ]
        # The metrics of a collection may share states: all are read before the first is reset.
        gathered = {id(logged.metric): Gathered(logged.metric) for logged in metric_values}
        for logged in metric_values:
            logged.gathered = gathered[id(logged.metric)]
            logged.metric.reset()

    def leave(self) -> None:
        """Leave the run: a value logged from now on is an error."""
        self.context = _OUTSIDE
        self.batch = None

    def forget_callback_values(self) -> None:
        """Drop everything shown to callbacks, bar and loggers, after the sanity check and before a new call."""
        self.callback_values, self.logger_values, self.bar_values = {}, {}, {}
        self._outdated = {}
        self.loss_value = None

    def export_shown(self) -> dict[str, Any]:
        """Return what callbacks, loggers and bar are shown, for the process that has started the copies of a run."""
        return {
            "callback": self.callback_values,
            "logged": self.logger_values,
            "bar": self.bar_values,
            "of_64_bits": [*self._double],
        }

    def import_shown(self, shown: dict[str, Any]) -> None:
        """Restore what ``export_shown`` returned."""
        self.callback_values, self.logger_values, self.bar_values = shown["callback"], shown["logged"], shown["bar"]
        self._double = dict.fromkeys(shown["of_64_bits"], True)

    def callback_metrics(self) -> dict[str, Tensor]:
        """Return the latest value of every name as tensors; reading one of them may wait for the device."""
        metrics = {name: _as_metric(value, double=name in self._double) for name, value in self.callback_values.items()}
        for logged, value in self._current_step_values():
            if not (self.shared.reduces(logged) and logged.base_name in metrics):
                for name in (logged.base_name, logged.step_name):
                    if not self._outdated or self._is_shown("callback", name, logged.step_value()):
                        metrics[name] = value
        for logged, value in self._values_of_hooks():
            metrics[logged.base_name] = metrics[logged.epoch_name] = value
        return ShownValues(metrics, self.callback_values)

    def logged_metrics(self) -> dict[str, Tensor]:
        """Return the latest value of everything meant for the loggers; reading one may wait for the device."""
        metrics = {name: _as_metric(value, double=name in self._double) for name, value in self.logger_values.items()}
        metrics |= {
            logged.step_name: value
            for logged, value in self._current_step_values()
            if logged.logger and (not self._outdated or self._is_shown("logged", logged.step_name, logged.step_value()))
        }
        of_evaluation = self._current_step_values("validate", "test") if self.logs_evaluation_steps else ()
        metrics |= {logged.step_name: value for logged, value in of_evaluation if logged.logger}
        metrics |= {logged.epoch_name: value for logged, value in self._values_of_hooks() if logged.logger}
        return ShownValues(metrics, self.logger_values)

    def bar_metrics(self) -> dict[str, float]:
        """Return the values for the progress bar that have arrived on the host."""
        return ShownValues(self.bar_values, self.bar_values)

    def _current_step_values(self, *stages: str) -> Iterator[tuple[LoggedValue, Tensor]]:
        """Yield the values of steps in the epochs that are not closed yet, of training or these stages."""
        for stage in stages or ("train",):
            for logged in self.of_stage(stage, current_loader=True):
                value = logged.step_value() if logged.on_step and logged.weight is not None else None
                if value is not None:
                    yield logged, _as_metric(value)

    def _values_of_hooks(self) -> Iterator[tuple[LoggedValue, Tensor]]:
        """Yield what hooks beside the steps have logged on this process in the epochs that are not closed yet."""
        for context in self._contexts.values():
            if context.row.log is None or context.row.log.step_allowed:
                continue
            for logged in context.values.values():
                if logged.metric is None and logged.weight is not None and logged.has_epoch_value:
                    total, weight, reduce = logged.epoch_value()
                    yield logged, _as_metric(mean(total, weight) if reduce == "mean" else total)

    def evaluation_metrics(self) -> set[int]:
        """Return the ids of the torchmetrics that belong to validation or test alone."""
        training: set[int] = set()
        evaluation: set[int] = set()
        for context in self._contexts.values():
            ids = training if context.row.stage == "train" else evaluation
            for values in context.by_loader.values():
                for logged in values.values():
                    if logged.metric is not None:
                        ids.add(id(logged.metric))
        return evaluation - training

    def of_stage(self, stage: str, *, current_loader: bool = False) -> list[LoggedValue]:
        """Return the values logged in the hooks of a stage."""
        values: list[LoggedValue] = []
        for context in self._contexts.values():
            if context.row.stage == stage:
                for by_name in (context.values,) if current_loader else context.by_loader.values():
                    values += by_name.values()
        return values

    def _contexts_of(self, stage: str) -> Iterable[LoggingContext]:
        return [context for context in self._contexts.values() if context.row.stage == stage]

    def _warn(self, key: str, what: str, fix: str, category: type[Warning] = UserWarning) -> None:
        if key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(what, category, fix=fix)

    # -- state

    def state_dict(self, attribute_of: Callable[[Any], str | None]) -> dict[str, Any]:
        """Return what an interrupted training epoch has accumulated, as plain data and tensors."""
        # Values still on their way belong to the steps before this checkpoint.
        self.deliver(wait=True)
        entries = []
        for context in self._contexts_of("train"):
            # The resumed run calls this hook again.
            for logged in () if context.row.name == "on_train_epoch_end" else context.values.values():
                attribute = None if logged.metric is None else attribute_of(logged.metric)
                if logged.value is not None and (logged.metric is None or attribute is not None):
                    entries.append({"hook": context.row.name, "metric": attribute, **logged.state_dict()})
        ending: dict[str, Any] = {
            "row_is_due": self.row_is_due,
            "epoch": dict(self.epoch_values),
            "epoch_not_for_loggers": dict(self._not_for_loggers),
            "outdated": sorted(self._outdated),
            "of_64_bits": [*self._double],
        }
        return {
            "train": entries,
            "callback": dict(self.callback_values),
            "logged": dict(self.logger_values),
            "bar": dict(self.bar_values),
            **{name: value for name, value in ending.items() if value},
        }

    def load_state_dict(
        self,
        state: dict[str, Any],
        rows: Mapping[str, Hook],
        metric_at: Callable[[str], Any],
        *,
        epoch_goes_on: bool = False,
    ) -> None:
        """Restore what ``state_dict`` returned.

        ``epoch_goes_on`` says that batches of the epoch are left, although it may have ended: a limit cut it short.
        """
        self.callback_values = dict(state["callback"])
        self.logger_values = dict(state["logged"])
        self.bar_values = dict(state["bar"])
        self._double = dict.fromkeys(state.get("of_64_bits", ()), True)
        self.row_is_due = bool(state.get("row_is_due"))
        self.epoch_values = dict(state.get("epoch", {}))
        self._not_for_loggers = dict(state.get("epoch_not_for_loggers", {}))
        for entry in state["train"]:
            row = rows[entry["hook"]]
            logged = self.context_of(row).values[entry["name"]] = LoggedValue(entry["name"], self, row)
            metric = None if entry["metric"] is None else metric_at(entry["metric"])
            logged.load_state_dict(entry, metric, self._runtime.device)
            if epoch_goes_on and logged.weight is None:
                # Computed and published when the epoch ended: the rest of the epoch starts from zero.
                logged.reset()
        callback, loggers = ({name for place, name in state.get("outdated", ()) if place == each} for each in _PLACES)
        self._outdate("", callback, loggers)


def _give_back(values: Iterable[LoggedValue], *, unshared: bool = False) -> None:
    """Restore the states that metrics gathered in dataloaders that have ended; ``unshared``: in one loader alone."""
    by_metric: dict[int, list[LoggedValue]] = {}
    for logged in values:
        if logged.gathered is not None:
            by_metric.setdefault(id(logged.metric), []).append(logged)
    for of_metric in by_metric.values():
        first, *others = {id(logged.gathered): logged.gathered for logged in of_metric}.values()
        assert first is not None
        if not unshared or (not others and first.is_all()):
            first.give_back([other for other in others if other is not None])
            for logged in of_metric:
                logged.gathered = None


class ShownValues(dict[str, Any]):
    """Values by name as programs read them; what a program sets or removes here is so for callbacks and later reads."""

    def __init__(self, values: Mapping[str, Any], kept: dict[str, Any]) -> None:
        super().__init__(values)
        self._kept = kept

    def __setitem__(self, name: str, value: object) -> None:
        super().__setitem__(name, value)
        self._kept[name] = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._kept.pop(name, None)

    def update(self, *values: Any, **named: object) -> None:
        for name, value in dict(*values, **named).items():
            self[name] = value

    def setdefault(self, name: str, default: float | Tensor | None = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def pop(self, name: str, *default: object) -> Any:
        self._kept.pop(name, None)
        return super().pop(name, *default)

    def clear(self) -> None:
        super().clear()
        self._kept.clear()

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def _as_metric(value: Any, *, double: bool = False) -> Tensor:
    """Return a value as a tensor; in double precision if asked, or if it is a count that single cannot hold."""
    if not isinstance(value, (int, float)):
        # A program may have put anything among the values.
        is_count = isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())
        given: Tensor = value.float() if is_count else value.detach() if isinstance(value, Tensor) else value
        return given
    double = double or (abs(value) > 2**24 and float(value).is_integer())
    return torch.tensor(float(value), dtype=torch.float64 if double else None)


def _add_rounded(total: Tensor, value: Tensor, *, alpha: int) -> Tensor:
    return total.add_(value * alpha)


def _check_given(name: str, value: object, batch_size: object) -> None:
    if isinstance(value, Tensor) and value.is_complex() and not conventions.current().mistakes_are_warnings:
        what = f"self.log({name!r}, value): a complex value."
        raise make_error(ValueError, what, fix="Log value.real, value.imag or value.abs().", argument="value")
    if batch_size is not None and not _is_size(batch_size):
        shown = f"a tensor of shape {tuple(batch_size.shape)}" if isinstance(batch_size, Tensor) else repr(batch_size)
        what = f"self.log({name!r}, batch_size=...): {shown}."
        raise make_error(ValueError, what, fix="Give the number of samples: batch_size=len(x).", argument="batch_size")


def _is_size(value: object) -> bool:
    """Return whether a value may be a number of samples; that of a tensor is not read, it may be on a device."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    with suppress(TypeError, ValueError):  # An array of several numbers.
        return isinstance(value, SupportsFloat) and not float(value) < 0
    return False


def _check_place(row: Hook, name: object, where: str, options: LogOptions) -> None:
    """Raise unless a value can be logged under this name in this hook."""
    if row.log is None:
        raise MisconfigurationException(
            f"{where}: You can't `self.log()` inside {row.name if isinstance(row, _Nowhere) else f'`{row.name}`'}.",
            fix="Log them in a training, validation or test step, or in a hook such as on_train_epoch_end.",
        )
    if not isinstance(name, str):
        raise WrongType(f"{where}: the name must be a str, got {type(name).__name__}.")
    if options.add_dataloader_idx and "/dataloader_idx_" in name:
        raise MisconfigurationException(
            f"{where}: the name should not contain information about `dataloader_idx`, which the Trainer adds itself.",
            fix="Choose another name, or pass add_dataloader_idx=False.",
        )


def _when(row: Hook, options: LogOptions, where: str) -> tuple[bool, bool]:
    """Return whether the values of steps are published, and whether the value of the epoch is."""
    assert row.log is not None
    on_step = row.log.on_step if options.on_step is None else bool(options.on_step)
    on_epoch = row.log.on_epoch if options.on_epoch is None else bool(options.on_epoch)
    if on_step and not row.log.step_allowed:
        raise MisconfigurationException(
            f"{where}: on_step=True is not possible outside of steps.", fix="Use on_epoch=True (the default)."
        )
    if not on_step and not on_epoch:
        raise MisconfigurationException(
            f"{where}: `self.log(on_step=False, on_epoch=False)` is not useful, the value goes nowhere.",
            fix="Set one of them.",
        )
    return on_step, on_epoch


def _check_loaders_apart(context: LoggingContext, name: str, value: Any, where: str) -> None:
    """Raise if another dataloader's values have this name, unless both are accumulated in one metric."""
    for loader_idx, values in context.by_loader.items():
        other = values.get(name)
        if loader_idx in (None, context.loader_idx) or other is None or other.value is None:
            continue
        if not other.loader_suffix and not (is_metric(value) and other.metric is value):
            raise MisconfigurationException(
                f"{where}: with add_dataloader_idx=False the dataloaders {loader_idx} and {context.loader_idx} both "
                f"log {name!r}.",
                fix=f"Leave add_dataloader_idx out, or log f'{name}_{{dataloader_idx}}'.",
            )


class _Nowhere:
    name = "a place outside the Trainer's hooks"
    stage = None
    log = None


_OUTSIDE = LoggingContext(_Nowhere())  # type: ignore[arg-type]


class _Ignore:
    """Ignores values, and warns about the first; an object, so that a Trainer can be pickled."""

    def __init__(self) -> None:
        self._has_warned = False

    def __call__(self, *_: object) -> None:
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                "self.log() does nothing with Trainer(barebones=True), which switches logging off.",
                fix="Leave barebones out to log.",
            )
