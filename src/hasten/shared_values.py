"""Values of ``self.log`` over several processes: which process has which, and one reduction for all of them.

Reductions pair values by their position, so the processes reduce in the order of the sorted names, and agree on the
names whenever the names of one process change. As long as they stay the same, nothing is exchanged for that.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from hasten._lib.device import widest_float
from hasten._lib.errors import make_error
from hasten._lib.tree import send_to_host
from hasten.logged_value import SETTINGS, LoggedValue, is_metric, mean
from hasten.machine import agreement

if TYPE_CHECKING:
    from hasten.hooks import Hook
    from hasten.runtime import Runtime

# Counts the runs of several processes; the same run has the same number on each.
_numbers = itertools.count()
_OPERATIONS = ("mean", "sum", "max", "min")
_OPERATION_NAMES = tuple(f" ({op})" for op in _OPERATIONS)
# By metric and state: the type of the samples, and the shape of one sample.
_States = dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]]
# The neutral element of each reduction.
_NEUTRAL = {"mean": 0.0, "sum": 0.0, "max": -math.inf, "min": math.inf}


class LoggedStep(NamedTuple):
    """The values that an evaluation step logged for the loggers' rows of steps."""

    loader_idx: int | None
    step: int
    values: list[tuple[LoggedValue, Any]]


class _StepName(NamedTuple):
    """The name of a value that an evaluation step logs; the same on all processes."""

    loader: int
    hook: str
    name: str
    op: str
    logger: bool
    prog_bar: bool


class StepRow(NamedTuple):
    """The values of one step of an evaluation, on the host."""

    step: int
    values: list[tuple[_StepName, float]]


class Absent(NamedTuple):
    """A value as another process describes it, for a process without batches, which cannot log it itself."""

    row: Hook
    name: str
    # The index of the loader whose steps log it, -1 for other hooks; None if there is only one loader.
    loader: int
    loader_idx: int | None
    # Its description in messages; None if it is not reduced.
    key: str | None
    settings: dict[str, Any]
    is_metric: bool
    # Where the module has the metric; None if it does not.
    metric: str | None
    # The value, if it is not reduced.
    value: float | None

    @property
    def neutral(self) -> tuple[float, float]:
        """Total and weight that add nothing to the totals of the other processes; the value if it is not reduced."""
        if self.value is not None:
            return self.value, 1
        reduce = self.settings["reduce"]
        return _NEUTRAL[reduce], 0 if reduce == "mean" else 1


class SharedValues:
    """The values that processes reduce together."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.several = runtime.several_processes
        # The values that each moment reduced last.
        self._reduced: dict[str, list[str]] = {}
        # The states of metrics from the latest evaluation in which some processes had no batches.
        self._states: _States = {}
        self._number: int | None = None
        # The number of the latest moment, its name, and whether this process waits there for the others.
        self._at = (0, "", False)

    def reduces(self, logged: LoggedValue) -> bool:
        """Return whether a value is reduced here; metrics do so themselves."""
        return self.several and bool(logged.sync) and logged.metric is None

    # -- reductions

    def of_step(self, values: list[Any], logged: Sequence[LoggedValue], moment: str) -> list[Any]:
        """Return ``values``, in which shared values of ``logged`` are reduced, by one collective for each operation."""
        for op, chosen in self._agreed(logged, moment):
            for i, value in zip(chosen, self._reduce((values[i] for i in chosen), op), strict=True):
                values[i] = value
        return values

    def of_epoch(self, logged: Sequence[LoggedValue], moment: str) -> list[float]:
        """Return the values of an epoch, on the host."""
        shared = self._agreed(logged, moment) if self.several else []
        with torch.inference_mode(False), torch.no_grad():
            parts: list[Any] = [None] * len(logged)
            # Metrics exchange their states one after the other, in the same order on all processes.
            for i in sorted(range(len(logged)), key=lambda i: _place(logged[i])):
                parts[i] = logged[i].epoch_value()
            numerators = [
                mean(total, weight) if reduce == "mean" and not self.reduces(each) else total
                for each, (total, weight, reduce) in zip(logged, parts, strict=True)
            ]
            for op, chosen in shared:
                values = [numerators[i] for i in chosen]
                if op == "mean":
                    sums = self._reduce([*values, *(parts[i][1] for i in chosen)], "sum")
                    reduced = [total / weight for total, weight in zip(sums, sums[len(chosen) :], strict=False)]
                else:
                    reduced = self._reduce(values, op)
                for i, value in zip(chosen, reduced, strict=True):
                    numerators[i] = value
            return send_to_host(numerators).values()

    def _reduce(self, values: Iterable[Any], op: str) -> list[Tensor]:
        """Return values reduced over the processes, by one collective."""
        return list(self._runtime.data_parallel_reduce(self._stacked(values), op=op).unbind())

    def _stacked(self, values: Iterable[Any]) -> Tensor:
        device = self._runtime.device
        dtype = widest_float(device)
        return torch.stack([torch.as_tensor(value, device=device).to(dtype) for value in values])

    # -- agreement on the names

    def _agreed(self, logged: Sequence[LoggedValue], moment: str) -> list[tuple[str, list[int]]]:
        """Return (operation, indices of the values of this process it reduces), in the same order on all processes.

        These reach each moment equally often; a RuntimeError says that others reduce other values there.
        """
        if not self.several:
            return []
        if self._number is None:
            self._number = next(_numbers)
            agreement.answer(f"log/{self._number}", self._has_passed)
        shared = [i for i, each in enumerate(logged) if self.reduces(each)]
        shared.sort(key=lambda i: _place(logged[i]))
        named = [_key(logged[i]) for i in shared]
        if "epoch" in moment:
            # At a step, a metric's value covers this process alone.
            named += sorted(_key(each) for each in logged if _exchanges(each))
        changed = named != self._reduced.get(moment, [])
        self._at = (self._at[0] + 1, moment, changed)
        if changed:
            self._agree(named, moment)
            self._reduced[moment] = named
        by_operation = {op: [i for i in shared if logged[i].reduce == op] for op in _OPERATIONS}
        return [(op, chosen) for op, chosen in by_operation.items() if chosen]

    def _agree(self, names: list[str], moment: str) -> None:
        """Check that all processes reduce the same values, whenever these differ from the last time."""
        before = self._reduced.get(moment, [])
        number = self._at[0]
        by_rank = agreement.exchange(
            f"log/{self._number}/{number}/{moment}",
            names,
            what=f"self.log({', '.join(names)}, sync_dist=True)",
            patience_seconds=agreement.PATIENCE_WITH_WORK_SECONDS,
            ask=(f"log/{self._number}", [number, moment]),
        )
        for rank, found in enumerate(by_rank):
            if found is None and (word := agreement.last_word(rank)):
                # ``naming_who_ended`` makes it the error of a lost connection.
                raise ConnectionError(f"the process of rank {rank} left the run with {word}")
        # A process that continued without an answer reduces the same values as the last time, like this one.
        _check_same([set(before if found is None else found) for found in by_rank])

    def _has_passed(self, where: Any) -> bool | None:
        number, moment = where
        here, name, waits = self._at
        if here < number:
            return False
        return None if here == number and name == moment and waits else True

    # -- evaluations, in which some processes may have fewer batches than others, or none

    def of_evaluation(
        self,
        own: Sequence[tuple[int | None, LoggedValue]],
        rows: Sequence[LoggedStep],
        module: nn.Module,
        batches: list[int],
    ) -> tuple[list[Absent], list[StepRow]]:
        """Agree on the values of an evaluation and reduce its steps' values; all processes call it at the end.

        Metrics of ``module`` without a batch are made ready to exchange their states. ``batches`` says how many this
        process had, by loader. A value that some processes log alone is a RuntimeError.

        Returns:
            the values that other processes logged for loaders of which this process had no batch; the rows of all
            steps.

        """
        no_batch = [loader for loader, count in enumerate(batches) if not count]
        steps = sorted({_step_name(row, logged) for row in rows for logged, _ in row.values if self.reduces(logged)})
        names = [_key(each) for _, each in own if self.reduces(each) or _exchanges(each)]
        digest = float(int(hashlib.sha256(repr((sorted(names), steps)).encode()).hexdigest()[:12], 16))
        longest = max((row.step + 1 for row in rows), default=0)
        states = _states_of(module)
        for gathered in {id(each.gathered): each.gathered for _, each in own if each.gathered is not None}.values():
            with gathered.shown():
                for name, found in _states_of(module).items():
                    states.setdefault(name, {}).update(found)
        mine = torch.tensor([digest, -digest, bool(no_batch), longest], dtype=torch.float64)
        # The only exchange in an evaluation in which all processes have batches and log the same values.
        most, minus_least, somebody_has_none, length = self._runtime.all_reduce(mine, op="max").tolist()
        absent: list[Absent] = []
        if most != -minus_least or somebody_has_none:
            everybody = self._runtime.strategy.gather_objects((self._described(own, module), steps, no_batch, states))
            _check_same_names(everybody)
            mine_already = {(each.row.name, each.name, each.loader) for each in everybody[self._runtime.global_rank][0]}
            for described, their_steps, _, their_states in everybody:
                for each in described:
                    place = (each.row.name, each.name, each.loader)
                    if each.loader in no_batch and place not in mine_already:
                        mine_already.add(place)
                        absent.append(each)
                steps = sorted({*steps, *their_steps})
                _make_ready(_metrics(module), their_states)
                for name, found in their_states.items():
                    states.setdefault(name, {}).update(found)
        self._states = states
        return absent, self._of_rows(rows, steps, int(length))

    def without_batches(self, metric: Any, name: str) -> Any:
        """Return a copy of a metric in the state without batches, ready to exchange its states with other processes."""
        empty = metric.clone()
        empty.reset()
        _make_ready(((f"{name}.{inner}".rstrip("."), part) for inner, part in _metrics(empty)), self._states)
        return empty

    def _described(self, own: Sequence[tuple[int | None, LoggedValue]], module: nn.Module) -> list[Absent]:
        found = []
        for loader_idx, logged in own:
            metric = value = None
            shared = self.reduces(logged) or _exchanges(logged)
            if logged.metric is not None:
                metric = next((name for name, part in _metrics(module) if part is logged.metric), None)
                if metric is None and not shared:
                    continue
            elif logged.zero_only:
                continue
            elif not shared:
                # A process without batches takes the value of another process; here no process has one.
                value = float(logged.total / logged.weight if logged.reduce == "mean" else logged.total)
            of_step = logged.row.log is not None and logged.row.log.step_allowed
            found.append(
                Absent(
                    logged.row,
                    logged.name,
                    (loader_idx or 0) if of_step else -1,
                    loader_idx,
                    _key(logged) if shared else None,
                    {name: getattr(logged, name) for name in ("loader_suffix", *SETTINGS)},
                    logged.metric is not None,
                    metric,
                    value,
                )
            )
        return found

    def _of_rows(self, rows: Sequence[LoggedStep], steps: list[_StepName], length: int) -> list[StepRow]:
        """Return the values of steps, reduced over the processes that had a batch in the step."""
        by_place: dict[tuple[int, int], dict[str, tuple[_StepName, Any]]] = {}
        index = {name: i for i, name in enumerate(steps)}
        given: list[list[Any]] = [[_NEUTRAL[name.op]] * length for name in steps]
        there = [[0.0] * length for _ in steps]
        for row in rows:
            for logged, value in row.values:
                name = _step_name(row, logged)
                if self.reduces(logged):
                    given[index[name]][row.step], there[index[name]][row.step] = value, 1.0
                else:
                    by_place.setdefault((name.loader, row.step), {})[name.name] = name, value
        if steps and length:
            for name, line in zip(steps, self._reduced_lines(steps, given, there), strict=True):
                for step, value in line.items():
                    by_place.setdefault((name.loader, step), {})[name.name] = name, value
        places = sorted(by_place)
        flat = [value for place in places for _, value in by_place[place].values()]
        on_host = iter(send_to_host(flat).values())
        return [
            StepRow(step, [(name, next(on_host)) for name, _ in by_place[loader, step].values()])
            for loader, step in places
        ]

    def _reduced_lines(
        self, steps: list[_StepName], given: list[list[Any]], there: list[list[float]]
    ) -> list[dict[int, float]]:
        """Return the values of each name by step, reduced over the processes that have one (``there`` is 1)."""
        summed = [i for i, name in enumerate(steps) if name.op in ("mean", "sum")]
        presence = torch.tensor(there, dtype=torch.float64, device=self._runtime.device)
        lines = [*(self._stacked(given[i]) for i in summed), *presence]
        sums = self._runtime.data_parallel_reduce(torch.stack(lines), op="sum")
        present = sums[len(summed) :]
        reduced = dict(zip(summed, sums, strict=False))
        for op in ("max", "min"):
            chosen = [i for i, name in enumerate(steps) if name.op == op]
            if chosen:
                lines = [self._stacked(given[i]) for i in chosen]
                extremes = self._runtime.data_parallel_reduce(torch.stack(lines), op=op)
                reduced |= dict(zip(chosen, extremes, strict=True))
        counts = present.tolist()
        found = []
        for i, name in enumerate(steps):
            line = reduced[i] / present[i] if name.op == "mean" else reduced[i]
            found.append({step: value for step, value in enumerate(line.tolist()) if counts[i][step]})
        return found


def _place(logged: LoggedValue) -> str:
    return f"{logged.base_name!r} in {logged.row.name}"


def _key(logged: LoggedValue) -> str:
    return f"{_place(logged)} ({logged.reduce if logged.metric is None else type(logged.metric).__name__})"


def _exchanges(logged: LoggedValue) -> bool:
    """Return whether the value of an epoch comes from a metric that exchanges its states itself."""
    return logged.metric is not None and bool(getattr(logged.metric, "sync_on_compute", True))


def _step_name(row: LoggedStep, logged: LoggedValue) -> _StepName:
    return _StepName(
        row.loader_idx or 0, logged.row.name, logged.step_name, logged.reduce, logged.logger, logged.prog_bar
    )


def _check_same(by_rank: Sequence[Collection[str]]) -> None:
    """Raise unless all processes have the same names."""
    for name in sorted(set().union(*by_rank)):
        present = [rank for rank, found in enumerate(by_rank) if name in found]
        absent = [rank for rank, found in enumerate(by_rank) if name not in found]
        if absent:
            logged = f"logged on {agreement.format_ranks(present)} and not on {agreement.format_ranks(absent)}. "
            logged += "Log it on all processes"
            if name.endswith(_OPERATION_NAMES):
                raise RuntimeError(f"self.log({name}, sync_dist=True): {logged}, or leave sync_dist out.")
            raise RuntimeError(f"self.log({name}): {logged}, or make the metric with sync_on_compute=False.")


def _check_same_names(everybody: Sequence[tuple[list[Absent], list[_StepName], list[int], Any]]) -> None:
    """Raise unless all processes have the same names, except names of loaders from which a process had no batch."""
    loader_of: dict[str, int] = {}
    by_rank: list[set[str]] = []
    for described, steps, _, _ in everybody:
        found = {each.key: each.loader for each in described if each.key is not None}
        found |= {f"{step.name!r} in {step.hook} ({step.op})": step.loader for step in steps}
        loader_of |= found
        by_rank.append(set(found))
    for found_here, (_, _, no_batch, _) in zip(by_rank, everybody, strict=True):
        found_here |= {name for name, loader in loader_of.items() if loader in no_batch}
    _check_same(by_rank)
    without = {loader for _, _, no_batch, _ in everybody for loader in no_batch}
    for described, _, _, _ in everybody:
        for each in described:
            if each.is_metric and each.metric is None and each.loader in without:
                raise make_error(
                    RuntimeError,
                    f"self.log({each.key}): some processes have no batches, and do not find the metric to exchange "
                    "its states.",
                    fix="Make it an attribute of the module, which is not in a list or dict.",
                )


def _metrics(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, part in module.named_modules():
        if is_metric(part):
            yield name, part


def _samples_of(metric: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield the states in which a metric keeps samples, to be joined with the samples of other processes."""
    for state, joined in metric._reductions.items():
        values = getattr(metric, state)
        if isinstance(values, list) and getattr(joined, "__name__", None) == "dim_zero_cat":
            yield state, values


def _states_of(module: nn.Module) -> _States:
    """Return type and shape of a sample in the states of the module's metrics that keep samples.

    Samples that are single numbers get a dimension: torchmetrics gathers only tensors with equal numbers of dimensions,
    and adds one to several numbers itself.
    """
    found: _States = {}
    for name, metric in _metrics(module):
        for state, values in _samples_of(metric):
            if values and isinstance(values[0], Tensor):
                values[:] = [value.reshape(1) if value.dim() == 0 else value for value in values]
                found.setdefault(name, {})[state] = values[0].dtype, tuple(values[0].shape[1:])
    return found


def _make_ready(metrics: Iterable[tuple[str, Any]], states: _States) -> None:
    """Give metrics without batches states that can be gathered together with the states of other processes."""
    for name, metric in metrics:
        for state, values in _samples_of(metric):
            if not values and (known := states.get(name, {}).get(state)) is not None:
                dtype, shape = known
                values.append(torch.empty((0, *shape), dtype=dtype, device=metric.device))
