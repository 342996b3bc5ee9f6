"""Where the time of a run goes: each part of it reported to a profiler, by the names the field knows.

Wired once, before a run begins, and only if there is a profiler: the functions a run calls are replaced by
ones that say so, and put back when it is over. Without a profiler none of this is ever called.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from hasten.hooks import overrides
from hasten.loops.progress import RunningStage
from hasten.loops.run import Run
from hasten.loops.run_data import StageData
from hasten.module import LightningModule
from hasten.module.datamodule import DataHooks
from hasten.profilers.base import Profiler, is_off

Call = Callable[..., Any]

# The whole of a run: its time is what the parts of a step sum to.
LOOP = "run_loop"

_in_use: weakref.WeakSet[Profiler] = weakref.WeakSet()

_STEP_OF = {
    RunningStage.TRAINING: "training_step",
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
# Methods of a module that are no hooks of the table and that its owner may override.
_OF_THE_MODULE = (
    "backward",
    "configure_gradient_clipping",
    "configure_optimizers",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
)
_OF_THE_DATA = (
    "on_before_batch_transfer",
    "on_after_batch_transfer",
    "transfer_batch_to_device",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
)
_OF_LOGGING = ("publish_step", "publish_bar", "publish_evaluation_step", "close_epoch", "log_epoch")


@contextmanager
def profiled(run: Run, profiler: Profiler, log_dir: Callable[[], str | None]) -> Iterator[None]:
    """Report what happens inside to ``profiler``, and its report at the end; nothing where it is off.

    Args:
        run: the run, before anything of it was called.
        profiler: whom to tell.
        log_dir: gives the folder of the logs.

    """
    # A run within a run, as some callbacks do: its time belongs to what it is part of.
    if is_off(profiler) or profiler in _in_use:
        yield
        return
    fn = run.state.fn
    assert fn is not None
    profiler.setup(stage=fn.value, local_rank=run.runtime.local_rank, log_dir=log_dir())
    profiler._lightning_module = weakref.proxy(run.module)
    _in_use.add(profiler)
    try:
        with ExitStack() as undo:
            _wire(run, profiler, undo)
            yield
    finally:
        _in_use.discard(profiler)
        profiler.describe()
        profiler.teardown(stage=fn.value)
        profiler._lightning_module = None


def watched(profiler: Profiler, action_name: str, function: Call) -> Call:
    """Return ``function`` such that each call is an action of ``profiler``.

    Args:
        profiler: whom to tell.
        action_name: the name of the action.
        function: what to call.

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
    def call(*args: Any, **kwargs: Any) -> Any:
        start(action_name)
        try:
            return function(*args, **kwargs)
        finally:
            stop(action_name)

    return call


def _wire(run: Run, profiler: Profiler, undo: ExitStack) -> None:
    module, runtime, hooks, logged = run.module, run.runtime, run.hooks, run.logged
    strategy, owner = (
        f"[Strategy]{type(runtime.strategy).__name__}",
        f"[LightningModule]{type(module).__name__}",
    )
    watch = functools.partial(watched, profiler)

    def replace(target: Any, name: str, function: Call) -> None:
        # In the instance's own dictionary: a module's __setattr__ would look for listeners again.
        before = target.__dict__.get(name, target)
        target.__dict__[name] = function
        if before is target:
            undo.callback(target.__dict__.pop, name, None)
        else:
            undo.callback(target.__dict__.__setitem__, name, before)

    def in_strategy(action: str, function: Call) -> Call:
        return watch(action if action.startswith("run_") else f"{strategy}.{action}", function)

    replace(run, "watch", in_strategy)

    # -- the step
    bind, make_step, make_zero_grad = runtime.bind, runtime.make_step, runtime.make_zero_grad

    def bound(function: Call, **options: Any) -> Call:
        step = "training_step" if options.get("training") else _STEP_OF.get(run.state.stage, "step")  # type: ignore[arg-type]
        return watch(f"{strategy}.{step}", bind(function, **options))

    overridden = overrides(module, LightningModule, "optimizer_step")
    stepped = f"{strategy if overridden else owner}.optimizer_step"
    zeroed = f"{owner}.optimizer_zero_grad"
    clipped = f"{owner}.configure_gradient_clipping"
    replace(runtime, "bind", bound)
    replace(runtime, "make_step", lambda optimizer: watch(stepped, make_step(optimizer)))
    replace(runtime, "make_zero_grad", lambda optimizer: watch(zeroed, make_zero_grad(optimizer)))
    replace(runtime, "backward", watch(f"{strategy}.backward", runtime.backward))
    for name in _OF_THE_MODULE:
        if overrides(module, LightningModule, name):
            replace(module, name, watch(f"{owner}.{name}", getattr(module, name)))
    if not overrides(module, LightningModule, "configure_gradient_clipping"):
        for name in ("clip_norm", "clip_value"):
            replace(runtime, name, watch(clipped, getattr(runtime, name)))

    # -- data
    for source in (run.train, run.validation, run.test, run.predict):
        for name in ("start_epoch", "resume_epoch", "batches"):
            replace(source, name, _read(profiler, source, getattr(source, name)))
    for holder in {
        id(found): found for found in (module, run.train.datamodule) if found is not None
    }.values():
        kind = "LightningModule" if holder is module else "LightningDataModule"
        for name in _OF_THE_DATA:
            if overrides(holder, DataHooks, name):
                label = f"[{kind}]{type(holder).__name__}.{name}"
                replace(holder, name, watch(label, getattr(holder, name)))

    # -- hooks and values
    hooks.watch = watch
    hooks.find()
    undo.callback(hooks.find)
    undo.callback(setattr, hooks, "watch", None)
    recorded = watch("[Logging]record", lambda record, *value: record(*value))
    undo.enter_context(logged.observed(recorded))
    for name in _OF_LOGGING:
        replace(logged, name, watch(f"[Logging]{name}", getattr(logged, name)))


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
            # Nothing is waited for any more: the loader ends its epoch.
            yield from found
        finally:
            # As it would be where the loop leaves it.
            close = getattr(found, "close", None)
            if close is not None:
                close()

    # Not a generator itself: what opens a loader does so now, as without a profiler.
    return lambda *args, **kwargs: reads(iter(batches(*args, **kwargs)))
