"""Values given to ``self.log``: accumulated on the device, reduced, and published when they have arrived.

Nothing here reads from the device between two logging intervals. ``record`` keeps a detached copy of a
value where it lives and adds it to the epoch's total there; ``publish_step`` and ``close_epoch`` stack
what is due, reduce it over the processes with one collective an operation, and move it to the host in one
copy.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hasten._lib.batch_size import batch_size_of
from hasten._lib.errors import MisconfigurationException
from hasten._lib.host import Arrival, send_to_host
from hasten.logged_value import Context, Meter, Options, describe, differences, is_metric, reduction
from hasten.machine import agreement

if TYPE_CHECKING:
    from hasten.hooks import Hook

(PROG_BAR, LOGGER, ON_STEP, ON_EPOCH, REDUCE, GRAPH, SYNC, GROUP, ADD_LOADER, ATTRIBUTE, ZERO_ONLY) = range(
    11
)

# The bar gets a fresh value this often even when the logging interval is far away (long steps).
BAR_INTERVAL_SECONDS = 5.0


# Of the meters that agree with those of other processes, in the order in which they begin to.
_numbers = itertools.count()


class Collectives(Protocol):
    """What the meters need of the runtime to agree over processes."""

    @property
    def global_rank(self) -> int:
        """Which process this is."""

    @property
    def world_size(self) -> int:
        """How many there are."""

    @property
    def device(self) -> torch.device:
        """The device of this process."""

    def all_reduce(self, data: Any, op: str = "mean") -> Any:
        """Reduce tensors over all processes."""


class MetricSink(Protocol):
    """What the meters need of a logger."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write one row."""

    def log_hyperparams(self, params: Any) -> None:
        """Write hyper-parameters."""

    def log_graph(self, model: Any) -> None:
        """Write the model's graph."""

    def save(self) -> None:
        """Flush if it is time to."""


class BadLosses(Protocol):
    """Hears of losses that have arrived on the host."""

    def loss(self, value: float, step: int, epoch: int | None) -> None:
        """Take the loss of a training step."""

    def logged(self, hook: str, stage: str, name: str, value: float) -> None:
        """Take a logged value that is called a loss and is not finite."""


class Meters:
    """All values logged in a run, by stage and hook."""

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self.on_first_process = collectives.global_rank == 0
        self.loggers: Sequence[MetricSink] = ()
        self.batch: Any = None
        self.batch_size: int = 0
        self.logs_evaluation_steps = False
        self.context: Context = _OUTSIDE
        self.callback_values: dict[str, float] = {}
        self.logged_values: dict[str, float] = {}
        self.bar_values: dict[str, float] = {}
        self._contexts: dict[str, Context] = {}
        self._on_the_way: list[tuple[Arrival, list[tuple[Meter, str]], int, int | None]] = []
        self._bar_sent = time.monotonic()
        self._warned: set[str] = set()
        # What was reduced over the processes last, and how often that was done, by the moment it is done at.
        self._reduced: dict[str, list[str]] = {}
        self._times: dict[str, int] = {}
        self._closed: dict[str, int] = {}
        self._number: int | None = None
        # Who hears of losses; None outside of training.
        self.report: BadLosses | None = None
        self._loss = Meter("loss", self)
        self._looked_at: int | None = None

    # -- where a value is logged

    def context_of(self, row: Hook) -> Context:
        """Return the context of a hook; the same object each time."""
        context = self._contexts.get(row.name)
        if context is None:
            context = self._contexts[row.name] = Context(row)
        return context

    def inside(self, row: Hook, listeners: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        """Return a function that calls ``listeners`` in order, with ``self.log`` meaning this hook."""
        context = self.context_of(row)

        if len(listeners) == 1:
            (only,) = listeners

            def call_one(*arguments: Any) -> Any:
                before = self.context
                self.context = context
                try:
                    return only(*arguments)
                finally:
                    self.context = before

            return call_one

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

    def record(self, name: str, value: Any, options: Options, batch_size: Any) -> None:
        """Take one value given to ``self.log``; the first call of a name in a hook settles its meaning."""
        context = self.context
        meter = context.meters.get(name)
        if meter is None or meter.options != options:
            meter = self._settle(context, name, value, options)
        meter.add(value, batch_size)

    def _settle(self, context: Context, name: str, value: Any, options: Options) -> Meter:
        row = context.row
        where = f"self.log({name!r}, ...) in {row.name}"
        if row.log is None:
            raise MisconfigurationException(
                f"{where}: values cannot be logged here. Log them in a step, or in an epoch hook such as "
                "on_train_epoch_end."
            )
        if not isinstance(name, str):
            raise TypeError(f"{where}: the name must be a str, got {type(name).__name__}.")
        if "/dataloader_idx_" in name:
            raise MisconfigurationException(
                f"{where}: names containing '/dataloader_idx_' are given by the Trainer itself. "
                "Choose another name, or use add_dataloader_idx."
            )
        meter = context.meters.get(name)
        if meter is None:
            meter = context.meters[name] = Meter(name, self)
        elif meter.options is not None:
            raise MisconfigurationException(
                f"{where}: this name was logged here before with other arguments "
                f"({differences(meter.options, options)}). Use the same arguments each time, or another name."
            )
        on_step = row.log.on_step if options[ON_STEP] is None else options[ON_STEP]
        on_epoch = row.log.on_epoch if options[ON_EPOCH] is None else options[ON_EPOCH]
        if on_step and not row.log.step_allowed:
            raise MisconfigurationException(
                f"{where}: on_step=True is not possible here, there is no step. Use on_epoch=True (the default)."
            )
        if not on_step and not on_epoch:
            raise MisconfigurationException(
                f"{where}: with on_step=False and on_epoch=False logging is not useful, the value goes nowhere. "
                "Set one of them."
            )
        meter.on_step, meter.on_epoch = bool(on_step), bool(on_epoch)
        meter.prog_bar = bool(options[PROG_BAR])
        meter.logger = options[LOGGER] is None or bool(options[LOGGER])
        meter.reduce = reduction(options[REDUCE], where)
        meter.enable_graph = bool(options[GRAPH])
        meter.zero_only = bool(options[ZERO_ONLY])
        # A value of the first process alone has nothing to be reduced with.
        meter.sync = bool(options[SYNC]) and not meter.zero_only and self.collectives.world_size > 1
        if context.loader_idx is not None and options[ADD_LOADER]:
            meter.loader_suffix = f"/dataloader_idx_{context.loader_idx}"
        elif context.loader_idx is not None:
            _check_loaders_apart(context, name, value, where)
        if is_metric(value):
            meter.metric = value
        elif self.collectives.world_size > 1 and on_epoch and not options[SYNC] and not options[ZERO_ONLY]:
            self._warn(
                name,
                f"{where}: the mean over the epoch is taken on each process alone. "
                "Pass sync_dist=True to take it over all processes.",
            )
        if on_step and row.stage != "train":
            self.logs_evaluation_steps = True
        meter.options = options
        return meter

    def find_batch_size(self, name: str) -> int:
        """Return how many samples the batch in hand has; read once a batch, and only when needed."""
        if self.context.row.log is None or not self.context.row.log.step_allowed:
            return 1
        size, certain = batch_size_of(self.batch)
        if not certain:
            self._warn(
                "batch_size",
                f"self.log({name!r}, ...): an epoch mean is weighted by the batch size, and this batch does not "
                f"tell it ({describe(self.batch)}); {size} was taken. "
                f"Write self.log({name!r}, ..., batch_size=...) to say it.",
            )
        self.batch_size = size
        return size

    # -- publishing

    def publish_step(self, step: int, epoch: int, *, to_loggers: bool, loss: Tensor | None = None) -> None:
        """Send the latest training values on their way to the host.

        Args:
            step: the loggers' x axis.
            epoch: the epoch in hand.
            to_loggers: for the loggers as well, not for the progress bar alone.
            loss: the loss of the step, to be looked at when it has arrived.

        """
        entries = [
            (meter, meter.step_name)
            for meter in self._stage("train")
            if meter.on_step and (meter.prog_bar or (meter.logger and to_loggers)) and meter.value is not None
        ]
        entries = [entry for entry in entries if entry[0].step_value() is not None]
        if not to_loggers:
            # Each process refreshes its bar by its own clock: nothing may be exchanged for that.
            entries = [entry for entry in entries if not self._is_shared(entry[0])]
        moment = "step" if to_loggers else None
        if entries or (loss is not None and self.report is not None):
            self._send(entries, step if to_loggers else -1, epoch, loss, moment=moment)
        elif moment is not None:
            self._synchronised([], [], moment)
        self.deliver()

    def logged_on_steps(self) -> list[str]:
        """Return the names of the training values meant for the loggers' rows of steps."""
        return [meter.plain_name for meter in self._stage("train") if meter.on_step and meter.logger]

    def look_at_loss(self, loss: Tensor | None, step: int, epoch: int) -> None:
        """Send the loss of a step on its way to the host, unless it was published with the values of that step."""
        if loss is not None and self.report is not None and step != self._looked_at:
            self._send([], step, epoch, loss)

    def sync_step_values(self) -> None:
        """Reduce the latest values logged with ``sync_dist=True`` for who reads them now; all processes call it."""
        meters = [meter for meter in self._stage("train") if meter.on_step and self._is_shared(meter)]
        meters = [meter for meter in meters if meter.weight is not None and meter.step_value() is not None]
        values = self._synchronised([meter.step_value() for meter in meters], meters, "asked")
        for meter, value in zip(meters, send_to_host(values).values(), strict=True):
            self.callback_values[meter.plain_name] = self.callback_values[meter.step_name] = value

    def _is_shared(self, meter: Meter) -> bool:
        """Return whether a value is the reduction of those of several processes."""
        return bool(meter.sync) and self.collectives.world_size > 1 and meter.metric is None

    def publish_bar(self, epoch: int) -> None:
        """Refresh the bar's values when steps are so long that the logging interval is far away."""
        now = time.monotonic()
        if now - self._bar_sent > BAR_INTERVAL_SECONDS:
            self._bar_sent = now
            self.publish_step(0, epoch, to_loggers=False)

    def publish_evaluation_step(self, stage: str, step: int) -> None:
        """Send values logged with ``on_step=True`` in an evaluation step; their x axis is the batch's index."""
        entries = [
            (meter, meter.step_name)
            for meter in self._stage(stage, current_loader=True)
            if meter.on_step and meter.step_value() is not None
        ]
        if entries:
            self._send(entries, step, None, moment=f"{stage} step")
        if len(self._on_the_way) > 64:
            self.deliver()

    def _send(
        self,
        entries: list[tuple[Meter, str]],
        step: int,
        epoch: int | None,
        loss: Tensor | None = None,
        *,
        moment: str | None = None,
    ) -> None:
        self._bar_sent = time.monotonic()
        values = [meter.step_value() for meter, _ in entries]
        if loss is not None:
            # First: what is logged is often the same.
            entries, values = [(self._loss, "loss"), *entries], [loss.detach(), *values]
            self._looked_at = step
        values = self._synchronised(values, [meter for meter, _ in entries], moment)
        self._on_the_way.append((send_to_host(values), entries, step, epoch))

    def deliver(self, *, wait: bool = False) -> None:
        """Hand to loggers and bar what has arrived on the host, in order."""
        while self._on_the_way and (wait or self._on_the_way[0][0].ready()):
            arrival, entries, step, epoch = self._on_the_way.pop(0)
            log: dict[str, float] = {}
            for (meter, name), value in zip(entries, arrival.values(), strict=True):
                if self.report is not None:
                    self._look(self.report, meter, name, value, step, epoch)
                if meter.prog_bar:
                    self.bar_values[name] = value
                if meter.logger and step >= 0:
                    log[name] = value
                if epoch is not None and self._is_shared(meter):
                    self.callback_values[meter.plain_name] = self.callback_values[name] = value
            if log:
                self._log(log, step, epoch)

    def _look(
        self, report: BadLosses, meter: Meter, name: str, value: float, step: int, epoch: int | None
    ) -> None:
        if meter is self._loss:
            report.loss(value, step, epoch)
        elif not math.isfinite(value) and "loss" in name.lower():
            rows = (c.row for c in self._contexts.values() if any(m is meter for m in c.all_meters()))
            row = next(rows, None)
            if row is not None:
                report.logged(row.name, str(row.stage), name, value)

    def _log(self, values: dict[str, float], step: int, epoch: int | None) -> None:
        self.logged_values.update(values)
        row = dict(values)
        if epoch is not None and "step" not in row:  # whoever logs the x axis means it to be the only one
            row.setdefault("epoch", epoch)
        step = int(row.pop("step", step))
        for logger in self.loggers:
            logger.log_metrics(metrics=dict(row), step=step)
            logger.save()

    def close_epoch(self, stage: str) -> tuple[list[dict[str, float]], dict[str, float]]:
        """Compute what the epoch gathered so far; waits for the device.

        Returns the values by dataloader (for ``validate`` and ``test``), and the values for the loggers.
        """
        self.deliver(wait=True)
        meters: list[tuple[int, Meter]] = []
        for context in self._contexts.values():
            if context.row.stage == stage:
                for loader_idx, by_name in context.by_loader.items():
                    found = (
                        meter for meter in by_name.values() if meter.on_epoch and meter.weight is not None
                    )
                    meters += [(loader_idx or 0, meter) for meter in found if meter.has_epoch_value]
        latest = self._latest_step_values(stage)
        self._closed[stage] = self._closed.get(stage, 0) + 1
        values = self._epoch_values([meter for _, meter in meters], f"{stage} epoch {self._closed[stage]}")
        log: dict[str, float] = {}
        self.callback_values.update(latest)
        loaders = max((index for index, _ in meters), default=0) + 1
        by_loader: list[dict[str, float]] = [{} for _ in range(loaders)]
        for (loader_idx, meter), value in zip(meters, values, strict=True):
            if self.report is not None:
                self._look(self.report, meter, meter.epoch_name, value, -1, None)
            for name in {meter.plain_name, meter.epoch_name}:
                self.callback_values[name] = value
            if meter.prog_bar:
                self.bar_values[meter.epoch_name] = value
            if meter.logger:
                by_loader[loader_idx][meter.epoch_name] = log[meter.epoch_name] = value
            meter.weight = None  # computed: not again when the epoch's last hooks log more
        return by_loader, log

    def _latest_step_values(self, stage: str) -> dict[str, float]:
        """Read the last step's values: callbacks may ask for them after the epoch is reset."""
        if stage != "train":
            return {}
        found = [meter for meter in self._stage(stage) if meter.on_step and meter.step_value() is not None]
        latest = self._synchronised([meter.step_value() for meter in found], found, f"{stage} latest")
        values = send_to_host(latest).values()
        for meter, value in zip(found, values, strict=True):
            if meter.prog_bar:
                self.bar_values[meter.step_name] = value
            if meter.logger:
                self.logged_values[meter.step_name] = value
        return {
            name: value
            for meter, value in zip(found, values, strict=True)
            for name in ((meter.step_name,) if meter.on_epoch else (meter.step_name, meter.plain_name))
        }

    def log_epoch(self, values: dict[str, float], step: int, epoch: int) -> None:
        """Write the values of an epoch as one row."""
        if values:
            self._log(values, step, epoch)

    def _epoch_values(self, meters: list[Meter], moment: str) -> list[float]:
        with torch.inference_mode(False), torch.no_grad():
            parts = [meter.epoch_value() for meter in meters]
            numerators: list[Any] = []
            for meter, (total, weight, reduce) in zip(meters, parts, strict=True):
                if reduce == "mean" and not meter.sync:
                    total = total / weight
                numerators.append(total)
            for op, chosen in self._shared(meters, moment):
                stacked = [self._as_tensor(numerators[i]) for i in chosen]
                if op == "mean":
                    stacked += [self._as_tensor(parts[i][1]) for i in chosen]
                reduced = self.collectives.all_reduce(
                    torch.stack(stacked), op="sum" if op == "mean" else op
                ).unbind()
                for k, i in enumerate(chosen):
                    numerators[i] = reduced[k] / reduced[k + len(chosen)] if op == "mean" else reduced[k]
            return send_to_host(numerators).values()

    def _synchronised(self, values: list[Any], meters: list[Meter], moment: str | None) -> list[Any]:
        for op, chosen in [] if moment is None else self._shared(meters, moment):
            stacked = torch.stack([self._as_tensor(values[i]) for i in chosen])
            for i, value in zip(chosen, self.collectives.all_reduce(stacked, op=op).unbind(), strict=True):
                values[i] = value
        return values

    def _shared(self, meters: list[Meter], moment: str) -> list[tuple[str, list[int]]]:
        """Return (operation, indices of the meters it reduces over the processes), in an order that is that of all.

        Args:
            meters: those with a value.
            moment: when they are reduced; all processes come to the same moments equally often.

        Raises:
            RuntimeError: other processes reduce other values then.

        """
        if self.collectives.world_size == 1:
            return []
        places = {
            id(meter): f"{meter.plain_name!r} in {context.row.name}"
            for context in self._contexts.values()
            for meter in context.all_meters()
        }
        shared = [i for i, meter in enumerate(meters) if self._is_shared(meter)]
        shared.sort(key=lambda i: places[id(meters[i])])
        named = [f"{places[id(meters[i])]} ({meters[i].reduce})" for i in shared]
        self._times[moment] = self._times.get(moment, 0) + 1
        if named != self._reduced.get(moment, []):
            self._agree(named, moment)
            self._reduced[moment] = named
        by_operation = {
            op: [i for i in shared if meters[i].reduce == op] for op in ("mean", "sum", "max", "min")
        }
        return [(op, chosen) for op, chosen in by_operation.items() if chosen]

    def _agree(self, mine: list[str], moment: str) -> None:
        """Check that all processes reduce the same values, where they are others than the last time."""
        if self._number is None:
            self._number = next(_numbers)
        before = self._reduced.get(moment, [])
        place = f"log/{self._number}/{moment}/{self._times[moment]}"
        trains = moment.startswith(("step", "train"))
        said = agreement.exchange(
            place,
            mine,
            what=f"self.log({', '.join(mine)}, sync_dist=True)",
            patience_seconds=None if trains else agreement.PATIENCE_AFTER_EVALUATION_SECONDS,
        )
        # A process that does not come reduces what it reduced the last time, as this one did.
        theirs = [set(before if names is None else names) for names in said]
        for name in sorted(set().union(*theirs)):
            have = [rank for rank, names in enumerate(theirs) if name in names]
            if len(have) < len(theirs):
                lack = [rank for rank in range(len(theirs)) if rank not in have]
                raise RuntimeError(
                    f"self.log({name}, sync_dist=True): logged on {agreement.ranks(have)} and not on "
                    f"{agreement.ranks(lack)}. Log it on all processes, or leave sync_dist out."
                )

    def _as_tensor(self, value: Any) -> Tensor:
        device = self.collectives.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        return torch.as_tensor(value, device=device).to(dtype)

    # -- epochs

    def start_epoch(self, stage: str) -> None:
        """Forget what the stage's last epoch gathered."""
        self._closed.pop(stage, None)
        self._bar_sent = time.monotonic()
        for meter in self._stage(stage):
            meter.reset()

    def enter_loader(self, stage: str, loader_idx: int | None) -> None:
        """Say which of several dataloaders the next values come from; None when there is one."""
        for context in self._contexts.values():
            if context.row.stage == stage and context.row.log is not None and context.row.log.step_allowed:
                context.enter_loader(loader_idx)

    def leave(self) -> None:
        """Leave the run: a value logged from now on is logged nowhere."""
        self.context = _OUTSIDE
        self.batch = None

    def forget_callback_values(self) -> None:
        """Drop everything shown to callbacks, bar and loggers, after the sanity check and before a new call."""
        self.callback_values, self.logged_values, self.bar_values = {}, {}, {}

    def callback_metrics(self) -> dict[str, Tensor]:
        """Return the latest value of every name as tensors; reading one of them may wait for the device."""
        metrics = {name: _metric(value) for name, value in self.callback_values.items()}
        for meter in self._stage("train"):
            value = meter.step_value() if meter.on_step and meter.weight is not None else None
            if value is not None and not (self._is_shared(meter) and meter.plain_name in metrics):
                tensor = value if isinstance(value, Tensor) else _metric(value)
                metrics[meter.plain_name] = metrics[meter.step_name] = tensor
        return metrics

    def logged_metrics(self) -> dict[str, Tensor]:
        """Return the latest value of everything meant for the loggers; reading one may wait for the device."""
        metrics = {name: _metric(value) for name, value in self.logged_values.items()}
        for meter in self._stage("train"):
            value = (
                meter.step_value() if meter.logger and meter.on_step and meter.weight is not None else None
            )
            if value is not None:
                tensor = value if isinstance(value, Tensor) else _metric(value)
                metrics[meter.step_name] = tensor
        return metrics

    def evaluation_metrics(self) -> set[int]:
        """Return the ids of the torchmetrics that belong to validation or test alone."""
        training: set[int] = set()
        evaluation: set[int] = set()
        for context in self._contexts.values():
            metrics = {id(meter.metric) for meter in context.all_meters() if meter.metric is not None}
            (training if context.row.stage == "train" else evaluation).update(metrics)
        return evaluation - training

    def names_logged(self) -> list[str]:
        """Return every name under which something was logged so far."""
        return sorted(self.callback_metrics())

    def _stage(self, stage: str, *, current_loader: bool = False) -> Iterable[Meter]:
        for context in self._contexts.values():
            if context.row.stage == stage:
                yield from list(context.meters.values() if current_loader else context.all_meters())

    def _warn(self, key: str, message: str) -> None:
        from hasten._lib.rank_zero import rank_zero_warn

        if key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(message)

    # -- state

    def state_dict(self, attribute_of: Callable[[Any], str | None]) -> dict[str, Any]:
        """Return what an interrupted training epoch has gathered, as plain data and tensors."""
        kept = []
        for context in self._contexts.values():
            if context.row.stage != "train":
                continue
            for meter in context.meters.values():
                attribute = None if meter.metric is None else attribute_of(meter.metric)
                if meter.value is not None and (meter.metric is None or attribute is not None):
                    kept.append({"hook": context.row.name, "metric": attribute, **meter.state_dict()})
        return {
            "train": kept,
            "callback": dict(self.callback_values),
            "logged": dict(self.logged_values),
            "bar": dict(self.bar_values),
        }

    def load_state_dict(
        self, state: dict[str, Any], rows: Mapping[str, Hook], metric_at: Callable[[str], Any]
    ) -> None:
        """Take back what ``state_dict`` returned."""
        self.callback_values = dict(state["callback"])
        self.logged_values = dict(state["logged"])
        self.bar_values = dict(state["bar"])
        device = self.collectives.device
        for kept in state["train"]:
            context = self.context_of(rows[kept["hook"]])
            meter = context.meters[kept["name"]] = Meter(kept["name"], self)
            metric = None if kept["metric"] is None else metric_at(kept["metric"])
            meter.load_state_dict(kept, metric, device)


def _metric(value: float) -> Tensor:
    """Return a value as a tensor; in double precision where it is a count that single precision cannot hold."""
    count = abs(value) > 2**24 and float(value).is_integer()
    return torch.tensor(float(value), dtype=torch.float64 if count else None)


def _check_loaders_apart(context: Context, name: str, value: Any, where: str) -> None:
    """Raise if another dataloader's values have this name, unless both are gathered in one metric."""
    for loader_idx, meters in context.by_loader.items():
        other = meters.get(name)
        if loader_idx in (None, context.loader_idx) or other is None or other.value is None:
            continue
        if not other.loader_suffix and not (is_metric(value) and other.metric is value):
            raise MisconfigurationException(
                f"{where}: with add_dataloader_idx=False the dataloaders {loader_idx} and {context.loader_idx} both "
                f"log {name!r}, and one value would replace the other. Leave add_dataloader_idx out, or give each "
                f"dataloader a name of its own, for instance f'{name}_{{dataloader_idx}}'."
            )


class _Nowhere:
    name = "a place outside the Trainer's hooks"
    stage = None
    log = None


_OUTSIDE = Context(_Nowhere())  # type: ignore[arg-type]
