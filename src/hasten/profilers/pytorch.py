"""PyTorchProfiler: operators and kernels of a few batches, as a table and a trace for a browser."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerAction, ProfilerActivity, tensorboard_trace_handler

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException, make_error
from hasten._lib.names import did_you_mean
from hasten._lib.rank_zero import rank_zero_warn, warn_once
from hasten.elsewhere import conventions
from hasten.extend.origin import module_of
from hasten.profilers.base import Profiler

Schedule = Callable[[int], ProfilerAction]

# The default: leave out the first batch, warm up on one, record three. Few enough not to slow a run down.
# A stage with fewer batches than that is recorded in whole.
_default = torch.profiler.schedule(wait=1, warmup=1, active=3)
_NEEDED = 5
_NUMBER_OF = {
    "train": "num_training_batches", "val": "num_val_batches", "test": "num_test_batches",
    "predict": "num_predict_batches",
}  # fmt: skip
_BATCH = "run_training_batch"
_STAGES = {"training_step": "train", "validation_step": "val", "test_step": "test", "predict_step": "predict"}
# Arguments of Lightning's profiler that torch's does not have.
_ADDED = frozenset({"enabled", "export_to_flame_graph", "metric", "use_cpu", "use_cuda"})


class PyTorchProfiler(Profiler):
    """Record operators and kernels with ``torch.profiler``: a table, and a trace for ``chrome://tracing``.

    Each stage (training, validation, ...) is recorded once, for the batches its schedule says. Every action is a
    range of the trace, and so is each module's forward. The table comes with the report; the trace is written
    to ``dirpath`` as ``*.pt.trace.json``, to open in Perfetto, ``chrome://tracing`` or TensorBoard.

    Args:
        dirpath: folder of the trace and the report; the folder of the logs by default.
        filename: write the report to a file of this name instead of logging it; ``.txt`` is appended.
        group_by_input_shapes: a row for each combination of input shapes; needs ``record_shapes=True``.
        emit_nvtx: emit NVTX ranges for NVIDIA's own profiler instead; needs CUDA.
        export_to_chrome: write the trace.
        row_limit: rows of the table; -1 for all.
        sort_by_key: the column the table is sorted by, for instance "self_cpu_time_total".
        record_module_names: make the forward of each module a range of the trace.
        table_kwargs: more arguments of the table (``max_name_column_width``, ``top_level_events_only``, ...).
        **profiler_kwargs: for ``torch.profiler.profile``: ``schedule``, ``activities``, ``record_shapes``,
            ``profile_memory``, ``with_stack``, ``with_flops``, ``on_trace_ready``, ... By default a schedule that
            leaves out one batch, warms up on one and records three; of a stage with fewer batches all are
            recorded, with a warning. With ``schedule=None``, with ``Trainer(fast_dev_run=...)``, and outside a
            Trainer all batches are recorded.

    Raises:
        MisconfigurationException: ``sort_by_key`` is not a column, ``schedule`` is not a schedule, or CUDA is missing.
        KeyError: ``table_kwargs`` has something the table does not take.
        TypeError: ``profiler_kwargs`` has something torch's profiler does not take.

    Example::

        >>> profiler = PyTorchProfiler(export_to_chrome=False, sort_by_key="cpu_time_total")
        >>> with profiler.profile("multiply"):
        ...     product = torch.ones(2, 2) @ torch.ones(2, 2)
        >>> "aten::mm" in profiler.summary()
        True

    Source: https://docs.pytorch.org/docs/stable/profiler.html

    """

    STEP_FUNCTIONS: ClassVar[set[str]] = set(_STAGES)
    AVAILABLE_SORT_KEYS: ClassVar[set[str]] = {"count"} | {
        key.format(device)
        for device in ("cpu", "cuda", "device")
        for key in ("{}_time", "{}_time_total", "self_{}_time_total", "{}_memory_usage", "self_{}_memory_usage")
    }

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        emit_nvtx: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        record_module_names: bool = True,
        table_kwargs: dict[str, Any] | None = None,
        **profiler_kwargs: Any,
    ) -> None:
        check.declared(PyTorchProfiler.__init__, locals())
        super().__init__(dirpath=dirpath, filename=filename)
        _check_table(table_kwargs or {})
        _check_arguments(profiler_kwargs)
        # jsonargparse finds the arguments of the command line in these calls of get and pop.
        self._enabled = profiler_kwargs.pop("enabled", True)
        self._flame_graph = profiler_kwargs.pop("export_to_flame_graph", False)
        self._metric = profiler_kwargs.pop("metric", "self_cpu_time_total")
        cpu, cuda = profiler_kwargs.pop("use_cpu", True), profiler_kwargs.pop("use_cuda", None)
        cuda = torch.cuda.is_available() if cuda is None else cuda
        wanted = [ProfilerActivity.CPU] * bool(cpu) + [ProfilerActivity.CUDA] * bool(cuda)
        activities = list(profiler_kwargs.pop("activities", None) or wanted)
        self._by_default = "schedule" not in profiler_kwargs
        self._schedule: Schedule | None = profiler_kwargs.pop("schedule", None)
        _check_schedule(self._schedule)
        self._on_trace_ready = profiler_kwargs.pop("on_trace_ready", None)
        with_stack = profiler_kwargs.pop("with_stack", False) or self._flame_graph
        self._profiler_kwargs = {**profiler_kwargs, "activities": activities, "with_stack": with_stack}
        self._group_by_input_shapes = group_by_input_shapes and profiler_kwargs.get("record_shapes", False)
        if emit_nvtx and not torch.cuda.is_available():
            raise MisconfigurationException(
                "PyTorchProfiler(emit_nvtx=True): NVTX ranges need a CUDA device.",
                fix="Leave it out.",
                argument="emit_nvtx",
            )
        self._emit_nvtx = emit_nvtx
        self._export_to_chrome = export_to_chrome
        self._row_limit = check.whole("PyTorchProfiler", "row_limit", row_limit)
        on_device = ProfilerActivity.CUDA in activities
        self._sort_by_key = sort_by_key or f"{'cuda' if on_device else 'cpu'}_time_total"
        keys = sorted(self.AVAILABLE_SORT_KEYS)
        check.one_of("PyTorchProfiler", "sort_by_key", self._sort_by_key, keys, error=MisconfigurationException)
        self._record_module_names = record_module_names
        self._table_kwargs = dict(table_kwargs or {})
        self._reset()

    def _reset(self) -> None:
        self.profiler: Any = None
        self.function_events: Any = None
        # The profiler, and the names of modules; then the ranges of open actions.
        self._contexts = ExitStack()
        self._names_modules = self._record_module_names
        self._recording: dict[str, record_function] = {}
        # One cycle of a schedule at a time: the stage it belongs to, batches of each, those that are done.
        self._recorded_stage: str | None = None
        self._batches: dict[str, int] = {}
        self._done: set[str] = set()
        # Schedules of stages that are too short for the default.
        self._short: dict[str, Schedule] = {}
        self._records_all = self._has_recorded = False
        self._next = ProfilerAction.NONE
        self._step_name = "profile"
        self._tables: dict[str, str] = {}

    def start(self, action_name: str) -> None:
        """Begin an action: a range of the trace."""
        if not self._enabled:
            return
        if self.profiler is None:
            self._begin()
        if self._names_modules and self.lightning_module is not None:
            self._contexts.enter_context(RegisterRecordFunction(self.lightning_module))
            self._names_modules = False
        stage = _stage_of(action_name)
        if stage is not None and self._recorded_stage in (None, stage):
            self._step_name = action_name
        first = "train" if action_name == _BATCH else stage
        if first is not None and self._by_default and first not in self._batches and not self._emit_nvtx:
            self._record_short(first)
        if action_name not in self._recording:
            # The prefix is known to viewers of traces, which group such ranges.
            record = record_function("[pl][profile]" + action_name)
            record.__enter__()
            self._recording[action_name] = record

    def stop(self, action_name: str) -> None:
        """End an action; where it was a batch, the schedule moves on."""
        record = self._recording.pop(action_name, None)
        if record is not None:
            record.__exit__(None, None, None)
        # Within a Trainer a training batch ends with the optimizer's step; elsewhere with the step function.
        if _BATCH in self._recording:
            return
        stage = "train" if action_name == _BATCH else _stage_of(action_name)
        if stage is not None and self.profiler is not None and not self._emit_nvtx:
            self._batch_ended(stage)

    def summary(self) -> str:
        """Return the tables of the operators that took longest, one for each stage recorded."""
        has_begun = self.profiler is not None and not self._emit_nvtx
        self._end()
        if has_begun and not self._tables:
            rank_zero_warn(
                "PyTorchProfiler: the run ended before its schedule recorded a batch.",
                fix="Pass schedule=None to record all.",
            )
        return self._stats_to_str(self._tables) if self._tables else ""

    def teardown(self, stage: str | None) -> None:
        """End the recording; its tables and ``function_events`` stay until the next one begins."""
        self._end()
        super().teardown(stage=stage)

    def __getstate__(self) -> dict[str, Any]:
        # Made again on the other side; a run cannot be sent while it is recorded.
        return {**super().__getstate__(), "profiler": None, "function_events": None, "_contexts": ExitStack()}

    # -- the recording

    def _begin(self) -> None:
        self._reset()
        if self._emit_nvtx:
            self._contexts.enter_context(torch.cuda.profiler.profile())
            self.profiler = self._contexts.enter_context(torch.autograd.profiler.emit_nvtx())
            return
        trainer = self._trainer()
        has_default = self._by_default and trainer is not None and not trainer.fast_dev_run
        self._records_all = self._schedule is None and not has_default
        if not self._records_all:
            self._next = self._schedule_of("")(0)
        self.profiler = torch.profiler.profile(
            **self._profiler_kwargs,
            schedule=None if self._records_all else lambda _: self._next,
            on_trace_ready=self._trace_ready,
        )
        self._contexts.enter_context(self.profiler)
        self.profiler.add_metadata("Framework", "hasten")

    def _batch_ended(self, stage: str) -> None:
        if self._records_all or stage in self._done or self._recorded_stage not in (None, stage):
            return
        trainer = self._trainer()
        # Training comes first: a cycle begun in the sanity check would leave it out.
        if trainer is not None and trainer.sanity_checking:
            return
        schedule = self._schedule_of(stage)
        self._batches[stage] = self._batches.get(stage, 0) + 1
        self._has_recorded = self._next in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
        if self._next == ProfilerAction.RECORD_AND_SAVE:
            self._done.add(stage)
        self._next = ProfilerAction.NONE if stage in self._done else schedule(self._batches[stage])
        self._recorded_stage = None if self._next == ProfilerAction.NONE else stage
        self.profiler.step()

    def _schedule_of(self, stage: str) -> Schedule:
        return self._schedule or self._short.get(stage, _default)

    def _record_short(self, stage: str) -> None:
        """Record all batches of ``stage``, if the run has fewer than the default schedule needs."""
        trainer = self._trainer()
        if self._records_all or trainer is None or trainer.sanity_checking or self._recorded_stage not in (None, stage):
            return
        self._batches[stage] = 0
        batches = _batches_in_run(trainer, stage)
        if batches >= _NEEDED:
            return
        rank_zero_warn(
            f"PyTorchProfiler: {batches} batches ({stage}) are not enough steps for the default schedule, which needs "
            f"{_NEEDED}: all of them are recorded."
        )
        actions = [ProfilerAction.RECORD] * (int(batches) - 1) + [ProfilerAction.RECORD_AND_SAVE]
        self._short[stage] = lambda step: actions[step] if step < batches else ProfilerAction.NONE
        self._next = self._short[stage](0)
        self._recorded_stage = stage
        self.profiler.step()

    def _trainer(self) -> Any:
        return getattr(self.lightning_module, "_trainer", None) or getattr(self.lightning_module, "trainer", None)

    def _trace_ready(self, profiler: Any) -> None:
        if not (self._records_all or self._has_recorded):
            return
        name = self._step_name
        self.function_events = profiler.events()
        data = profiler.key_averages(group_by_input_shape=self._group_by_input_shapes)
        self._tables[name] = data.table(sort_by=self._sort_by_key, row_limit=self._row_limit, **self._table_kwargs)
        if self._on_trace_ready is not None:
            self._on_trace_ready(profiler)
            return
        if not (self._export_to_chrome or self._flame_graph):
            return
        if self.dirpath is None:
            what = "PyTorchProfiler: the trace is not written, since no folder is given."
            fix = "Pass dirpath=..., or export_to_chrome=False for the table alone."
            warn_once("PyTorchProfiler dirpath", what, fix=fix)
            return
        folder = Path(os.fspath(self.dirpath))
        folder.mkdir(parents=True, exist_ok=True)
        if self._export_to_chrome:
            tensorboard_trace_handler(str(folder), self._prepare_filename(name, extension=""))(profiler)
        if self._flame_graph:
            profiler.export_stacks(str(folder / self._prepare_filename(name, ".stack")), metric=self._metric)

    def _end(self) -> None:
        for name in reversed(list(self._recording)):
            self._recording.pop(name).__exit__(None, None, None)
        self.profiler = None
        # Functions that cannot be sent to another process.
        self._short.clear()
        self._contexts.close()
        self._names_modules = self._record_module_names


class RegisterRecordFunction:
    """Context in which the forward of each module inside ``model`` is a named range of the trace.

    Example::

        >>> import torch
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> with torch.profiler.profile() as profiler, RegisterRecordFunction(model):
        ...     output = model(torch.ones(1, 2))
        >>> [event.key for event in profiler.key_averages() if "[module]" in event.key]
        ['[pl][module]torch.nn.modules.linear.Linear: 0']

    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            if name:
                self._name(module, f"[pl][module]{module_of(type(module))}.{type(module).__name__}: {name}")

    def _name(self, module: nn.Module, label: str) -> None:
        # A list, as a module may call itself.
        entered: list[record_function] = []

        def begin(*_: object) -> None:
            entered.append(record_function(label))
            entered[-1].__enter__()

        def end(*_: object) -> None:
            if entered:
                entered.pop().__exit__(None, None, None)

        self._handles.append(module.register_forward_pre_hook(begin))
        self._handles.append(module.register_forward_hook(end, always_call=True))

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _stage_of(action_name: str) -> str | None:
    """Return the stage of which an action is the step."""
    return _STAGES.get(action_name.rpartition(".")[2])


def _batches_in_run(trainer: Any, stage: str) -> float:
    """Return how many batches of ``stage`` a run has; of a fit, in all epochs."""
    found = getattr(trainer, _NUMBER_OF[stage])
    number = sum(found) if isinstance(found, list) else found
    if stage == "train" or trainer.state.fn == "fit":
        epochs = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
        # Without batches or epochs there is nothing to multiply by infinity.
        number = number * epochs if number and epochs else 0
    if stage == "train" and trainer.max_steps != -1:
        number = min(number, trainer.max_steps * trainer.accumulate_grad_batches)
    return float(number) if math.isinf(number) else int(number)


def _check_table(kwargs: Iterable[str]) -> None:
    """Raise for an argument that the table does not take; torch would, but only when the run has ended."""
    known = set(inspect.signature(EventList.table).parameters) - {"self", "sort_by", "row_limit"}
    for name in kwargs:
        if name not in known:
            own = {"sort_by": "sort_by_key", "row_limit": "row_limit"}.get(name)
            advice = f"Pass {own}=... instead." if own else f"Use some of {sorted(known)}.{did_you_mean(name, known)}"
            raise make_error(KeyError, f"Found invalid table_kwargs key: {name}.", fix=advice, argument="table_kwargs")


def _check_arguments(kwargs: Iterable[str]) -> None:
    """Raise for an argument that torch's profiler does not take; under Lightning's names, which ignore it, warn."""
    known = {*inspect.signature(torch.profiler.profile.__init__).parameters, *_ADDED} - {"self"}
    for name in kwargs:
        if name not in known:
            what = (
                f"PyTorchProfiler({name}=...): neither PyTorchProfiler nor torch.profiler.profile takes this argument."
            )
            hint = did_you_mean(name, known)
            if not conventions.current().mistakes_are_warnings:
                raise make_error(TypeError, what, fix=hint, argument=name)
            rank_zero_warn(what, fix=f"{hint} It is ignored.")


def _check_schedule(schedule: Schedule | None) -> None:
    if schedule is None or (callable(schedule) and isinstance(schedule(0), ProfilerAction)):
        return
    should = "return a `torch.profiler.ProfilerAction`" if callable(schedule) else "be a callable"
    raise MisconfigurationException(
        f"PyTorchProfiler(schedule={schedule!r}): Schedule should {should}.",
        fix="Use a function of the step, such as torch.profiler.schedule(wait=1, warmup=1, active=3).",
        argument="schedule",
    )
