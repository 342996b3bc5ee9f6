"""Report each part of a run to a profiler, by the names that Lightning's reports use.

The functions that a run calls are wrapped once, before it begins, and restored when it is over. Without a profiler
nothing is wrapped.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from hasten._lib.observers import set_until
from hasten.hooks import overrides
from hasten.loops.run import Run
from hasten.loops.run_data import StageData
from hasten.module import LightningModule
from hasten.module.datamodule import DataHooks
from hasten.profilers.base import Profiler, is_off
from hasten.types import RunningStage

Call = Callable[..., Any]

# The whole of a run.
LOOP = "run_loop"

_in_use: weakref.WeakSet[Profiler] = weakref.WeakSet()

_STEP_OF: dict[RunningStage | None, str] = {
    RunningStage.SANITY_CHECKING: "validation_step",
    RunningStage.VALIDATING: "validation_step",
    RunningStage.TESTING: "test_step",
    RunningStage.PREDICTING: "predict_step",
}
_NEXT_OF = {
    "train": "[_TrainingEpochLoop].train_dataloader_next",
    "validate": "[_EvaluationLoop].val_next",
    "test": "[_EvaluationLoop].test_next",
    "predict": "[_PredictionLoop].predict_next",
}
# Methods that a module may override, besides its hooks.
_OF_THE_MODULE = (
    "backward", "configure_gradient_clipping", "configure_optimizers", "lr_scheduler_step", "optimizer_step",
    "optimizer_zero_grad",
)  # fmt: skip
_OF_THE_DATA = (
    "on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device", "train_dataloader",
    "val_dataloader", "test_dataloader", "predict_dataloader",
)  # fmt: skip
_OF_LOGGING = ("publish_step", "publish_bar", "publish_evaluation_step", "close_epoch", "log_epoch")


@contextmanager
def profiled(run: Run, profiler: Profiler, log_dir: Callable[[], str | None]) -> Iterator[None]:
    """Report what ``run`` does in the block to ``profiler``, and print the report at the end, unless it is off."""
    # Some callbacks start a run within a run: its time belongs to the outer run.
    if is_off(profiler) or profiler in _in_use:
        yield
        return
    fn = run.state.fn
    assert fn is not None
    # One process writes files without a rank in their names.
    local_rank = run.runtime.local_rank if run.runtime.several_processes else None
    profiler.setup(stage=fn, local_rank=local_rank, log_dir=log_dir())
    profiler.lightning_module = weakref.proxy(run.module)
    _in_use.add(profiler)
    try:
        with ExitStack() as undo:
            _wrap(run, profiler, undo)
            yield
    finally:
        _in_use.discard(profiler)
        profiler.describe()
        profiler.lightning_module = None


def watched(profiler: Profiler, action_name: str, function: Call) -> Call:
    """Return ``function`` with each call reported to ``profiler`` as an action.

    Example::

        >>> from hasten.profilers import SimpleProfiler
        >>> profiler = SimpleProfiler()
        >>> watched(profiler, "add", sum)([1, 2])
        3
        >>> len(profiler.recorded_durations["add"])
        1

    """
    start, stop = profiler.start, profiler.stop

    @functools.wraps(function)
    def call_in_profile(*args: Any, **kwargs: Any) -> Any:
        with profiler.profile(action_name):
            return function(*args, **kwargs)

    if getattr(profiler.profile, "__func__", None) is not Profiler.profile:
        return call_in_profile  # The program's own ``profile``.

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        start(action_name)
        try:
            return function(*args, **kwargs)
        finally:
            stop(action_name)

    return call


def _wrap(run: Run, profiler: Profiler, undo: ExitStack) -> None:
    module, runtime, hooks, logged = run.module, run.runtime, run.hooks, run.logged
    strategy = f"[Strategy]{type(runtime.strategy).__name__}"
    owner = f"[LightningModule]{type(module).__name__}"
    watch = functools.partial(watched, profiler)

    def replace(target: object, name: str, function: Call) -> None:
        # A module's __setattr__ would look for listeners again.
        set_until(undo, vars(target), name, function)

    def wrap(target: Any, name: str, action: str) -> None:
        replace(target, name, watch(action, getattr(target, name)))

    def in_strategy(action: str, function: Call) -> Call:
        return watch(action if action.startswith("run_") else f"{strategy}.{action}", function)

    replace(run.observers, "watch", in_strategy)

    # -- the step
    engine = runtime.engine
    bind, make_step, make_zero_grad = runtime.bind, engine.make_step, engine.make_zero_grad

    def bound(function: Call, **options: Any) -> Call:
        step = "training_step" if options.get("training") else _STEP_OF.get(run.state.stage, "step")
        return watch(f"{strategy}.{step}", bind(function, **options))

    stepped = f"{strategy if overrides(module, LightningModule, 'optimizer_step') else owner}.optimizer_step"
    zeroed = f"{owner}.optimizer_zero_grad"
    replace(runtime, "bind", bound)
    replace(engine, "make_step", lambda optimizer: watch(stepped, make_step(optimizer)))
    replace(engine, "make_zero_grad", lambda optimizer: watch(zeroed, make_zero_grad(optimizer)))
    wrap(engine, "backward", f"{strategy}.backward")
    for name in _OF_THE_MODULE:
        if overrides(module, LightningModule, name):
            wrap(module, name, f"{owner}.{name}")
    if not overrides(module, LightningModule, "configure_gradient_clipping"):
        for name in ("clip_norm", "clip_value"):
            wrap(engine, name, f"{owner}.configure_gradient_clipping")

    # -- data
    for source in run.data.all():
        for name in ("start_epoch", "batches"):
            replace(source, name, _read(profiler, source, getattr(source, name)))
    # Module and datamodule may be the same object.
    for holder in {id(found): found for found in (module, run.data.train.datamodule)}.values():
        kind = "LightningModule" if holder is module else "LightningDataModule"
        for name in _OF_THE_DATA:
            if holder is not None and overrides(holder, DataHooks, name):
                wrap(holder, name, f"[{kind}]{type(holder).__name__}.{name}")

    # -- hooks and values
    hooks.watch = watch
    hooks.find()
    undo.callback(hooks.find)
    undo.callback(setattr, hooks, "watch", None)
    recorded = watch("[Logging]record", lambda record, *value: record(*value))
    undo.enter_context(logged.observed(recorded))
    for name in _OF_LOGGING:
        wrap(logged, name, f"[Logging]{name}")


def _read(profiler: Profiler, source: StageData, batches: Call) -> Call:
    """Return a function that gives the batches of ``source`` and reports each wait for one."""
    action = _NEXT_OF[source.stage]

    def reads(found: Iterator[Any]) -> Iterator[Any]:
        step = watched(profiler, action, found.__next__)
        try:
            last = False
            while not last:
                try:
                    item = step()
                except StopIteration:
                    return
                last = item[1]
                yield item
            # The loader ends its epoch; nothing waits for it.
            yield from found
        finally:
            close = getattr(found, "close", None)
            if close is not None:
                close()

    # This function is not a generator itself, so that loaders are opened now, as without a profiler.
    return lambda *args, **kwargs: reads(iter(batches(*args, **kwargs)))
