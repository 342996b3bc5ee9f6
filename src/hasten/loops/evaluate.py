"""Validation, test and prediction: every batch of every loader once, without gradients."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hasten._lib.device import is_host
from hasten._lib.rank_zero import rank_zero_warn, warn_once
from hasten._lib.tree import move_to, remember_modes
from hasten.compile.cuda_graphs import recorded_steps
from hasten.data import advice
from hasten.hooks import STEPS, nothing, overrides, redefines
from hasten.loops.processes import in_step, leave_evaluation
from hasten.loops.resume import before_validation
from hasten.loops.run import Earlier, Run
from hasten.loops.run_data import LIMIT_OF, STEP_OF, DataloaderIterator, StageData, make_transfer
from hasten.loops.schedule import Stopped, step_on_monitored
from hasten.loops.user_code import annotate, compiled_step, step_of, takes, takes_iterator
from hasten.module import LightningModule
from hasten.module.signatures import check_takes_loader
from hasten.seed import isolate_rng
from hasten.types import RunningStage, TrainerFn


def sanity_check(run: Run) -> None:
    """Run a few validation batches before training, so that an error there shows in the first minute."""
    steps = run.arguments.num_sanity_val_steps
    # Lightning asks for the loaders within the check; hasten has them already.
    if steps == 0 or run.resume.skip_sanity or run.data.validation.is_off(loads=False):
        return
    run.state.stage = RunningStage.SANITY_CHECKING
    # A resumed run makes no check: what the hooks of this one change is part of checkpoints.
    run.module_changes.before_sanity_check()
    # Training must not depend on whether the check ran: neither its random numbers nor the values that it logs count.
    with isolate_rng():
        run.hooks.on_sanity_check_start()
        on_row, run.logged.on_row = run.logged.on_row, None
        with run.data.validation.limited_to(steps):
            if not run.data.validation.is_off():
                check_takes_loader(run.module, run.hooks, "validation", len(run.data.validation.load()))
                run.observers.watch("run_evaluation", evaluate)(run, run.data.validation)
        _warn_of_monitors(run)
        run.logged.on_row = on_row
        run.hooks.on_sanity_check_end()
    run.evaluation.batches.clear()
    run.progress.evaluated_before = run.progress.evaluated
    run.module_changes.after_sanity_check()
    run.logged.forget_callback_values()


def _warn_of_monitors(run: Run) -> None:
    """Warn of a monitored value whose name is nearly one of those that validation logs: the first epoch would fail."""
    logged = [name for name in run.logged.callback_metrics() if name.startswith("val")]
    for callback in run.hooks.owners():
        name = getattr(callback, "monitor", None)
        if not isinstance(name, str) or not name.startswith("val") or name in logged:
            continue
        if near := difflib.get_close_matches(name, logged, n=1, cutoff=0.7):
            owner = type(callback).__name__
            rank_zero_warn(
                f"{owner}(monitor={name!r}): the validation before training logs {', '.join(sorted(logged))}, and no "
                f"{name!r}.",
                fix=f"Did you mean {owner}(monitor={near[0]!r})?",
            )


def evaluate(
    run: Run, source: StageData, before_last_hooks: Callable[[], None] | None = None
) -> list[dict[str, float]]:
    """Evaluate on every loader of ``source``; return the values logged, a dict for each loader.

    In short::

        eval mode, no gradients
        on_validation_start, on_validation_epoch_start
        for each loader, for each batch:
            on_validation_batch_start, validation_step, on_validation_batch_end
        on_validation_epoch_end, values go to the loggers
        on_validation_end, checkpoints
        the modes from before
    """
    hooks, logged, progress, stage = run.hooks, run.logged, run.progress, source.stage
    testing, sanity = stage == "test", run.state.stage is RunningStage.SANITY_CHECKING
    fitting, several_processes = run.state.fn is TrainerFn.FITTING, run.runtime.several_processes
    _enter_stage(run, source)
    count = len(source.load())
    source.begin()
    loggers = logged.loggers
    if run.conventions.samplers_learn_epoch:
        source.tell_samplers(progress.current_epoch)
    if sanity:
        logged.loggers = ()
    logged.start_epoch(stage, resets_values=False)
    # Within a fit, the x axis of steps continues from one validation to the next.
    logged.steps_before = run.evaluation.steps_before if fitting and not sanity else {}
    run.evaluation.stage, run.evaluation.began_at = stage, progress.evaluated
    try:
        with run.averages.applied(), _in_eval_mode(run, stage), without_gradients(run):
            if fitting and several_processes:
                # Each process has updated its own running statistics; a checkpoint saves the first process's.
                run.runtime.engine.share_buffers(run.wrapped)
            (hooks.on_test_start if testing else hooks.on_validation_start)()
            (hooks.on_test_epoch_start if testing else hooks.on_validation_epoch_start)()
            batches = _evaluate_loaders(run, source)
            leave_evaluation(run)
            if several_processes:
                logged.complete_evaluation(stage, run.module, batches)
            for index, number in enumerate(batches):
                logged.steps_before[index] = logged.steps_before.get(index, 0) + number
            by_loader = _end_epoch(run, stage)
            (hooks.on_test_end if testing else hooks.on_validation_end)()
            if before_last_hooks is not None:
                before_last_hooks()
            if not testing:
                hooks.on_validation_end_last()
    finally:
        run.evaluation.stage, run.evaluation.batches[stage] = "", progress.evaluated - run.evaluation.began_at
        # Also on the way out of an interrupted evaluation, which starts again when the run is resumed.
        logged.start_epoch(stage)
        logged.loggers = loggers
    return by_loader[:count] + [{} for _ in range(count - len(by_loader))]


def _enter_stage(run: Run, source: StageData) -> None:
    """Enter the stage of ``source``, and mark its loaders to be made again when that is due."""
    if run.state.stage is not RunningStage.SANITY_CHECKING:
        run.state.stage = RunningStage.TESTING if source.stage == "test" else RunningStage.VALIDATING
        if run.state.fn is TrainerFn.FITTING:
            source.reload_if_due(run.progress.epoch)
    elif run.arguments.check_val_every_n_epoch not in (None, 1):
        # The first validation is in a later epoch, for which a program may return other loaders.
        source.reload_next()


def _evaluate_loaders(run: Run, source: StageData) -> list[int]:
    """Evaluate on every batch of every loader; return how many batches of each this process had."""
    logged, stage, count = run.logged, source.stage, len(source.load())
    batches: list[int] = []
    if takes_iterator(getattr(run.module, STEP_OF[stage])):
        batches = _evaluate_fetched(run, source, lambda output, loader_idx: None)
    else:
        for loader_idx in range(count):
            logged.enter_loader(stage, loader_idx if count > 1 else None)
            batches.append(_evaluate_loader(run, source, loader_idx, several=count > 1))
    logged.enter_loader(stage, None)
    return batches


def _end_epoch(run: Run, stage: str) -> list[dict[str, float]]:
    """Call the hooks at the end of the epoch, and send what was logged to the loggers; return it by loader."""
    hooks, logged, progress, testing = run.hooks, run.logged, run.progress, stage == "test"
    by_loader, values = logged.close_epoch(stage)
    (hooks.on_test_epoch_end if testing else hooks.on_validation_epoch_end)()
    if not testing:
        hooks.on_validation_epoch_end_last()
    late_by_loader, late = logged.close_epoch(stage)
    values |= late
    for result in by_loader:
        result.update(late_by_loader[0])
    step = progress.validated_step if run.state.fn is TrainerFn.FITTING else progress.logged_step
    logged.log_epoch(values, step, progress.current_epoch)
    return by_loader


def evaluate_and_print(
    run: Run, *, testing: bool, verbose: bool, show: Callable[[list[dict[str, float]], str], None]
) -> list[dict[str, float]]:
    """Evaluate, and ``show`` the values logged if ``verbose``; what ``validate`` and ``test`` do."""
    run.evaluation.prints = verbose
    source = run.data.test if testing else run.data.validation
    if source.is_off():
        if source.is_switched_off:
            limit = LIMIT_OF[source.stage]
            rank_zero_warn(
                f"Trainer.{source.stage}() evaluates nothing, as {limit}=0.",
                fix=f"Set trainer.{limit} = 1.0 before it.",
            )
        return []
    check_takes_loader(run.module, run.hooks, "test" if testing else "validation", len(source.load()))
    results = evaluate(run, source)
    run.limits.leave_if_stopped()
    if run.evaluation.prints and run.runtime.is_global_zero:
        show(results, source.stage)
    return results


def evaluate_within(run: Run, source: StageData) -> list[dict[str, float]]:
    """Evaluate within the call that runs, for instance in a hook; return what was logged by loader."""
    stage, context = run.state.stage, run.logged.context
    try:
        return evaluate(run, source)
    finally:
        run.state.stage, run.logged.context = stage, context


def _evaluate_loader(run: Run, source: StageData, loader_idx: int, *, several: bool) -> int:
    """Evaluate on every batch of a loader; return how many this process had."""
    hooks, logged, progress, stage, stop = run.hooks, run.logged, run.progress, source.stage, run.limits.stop
    testing = stage == "test"
    name = STEP_OF[stage]
    step, context = _step(run, name, loader_idx if several else None), logged.context_of(STEPS[name])
    transfer = make_transfer(run, source, loader_idx)
    suffix = (loader_idx,) if several else ()
    if several:
        context.enter_loader(loader_idx)
    steps = run.runtime.steps
    batch_idx = -1
    for batch_idx, (batch, is_last) in enumerate(in_step(run, source.batches(loader_idx))):
        if transfer is not None:
            batch = transfer(batch)
        logged.batch, logged.batch_size = batch, 0
        start = hooks.on_test_batch_start if testing else hooks.on_validation_batch_start
        if start is not nothing:
            start(batch, batch_idx, *suffix)
        logged.context = context
        try:
            output = step(batch, batch_idx)
        except Exception as error:
            annotate(error, name, run.module, batch, batch_idx)
            raise
        # Looked up after the step, which may append a callback.
        end = hooks.on_test_batch_end if testing else hooks.on_validation_batch_end
        if end is not nothing:
            end(output, batch, batch_idx, *suffix)
        if steps is not None:
            steps.end_step(stage, batch, is_last)
        if logged.logs_evaluation_steps:
            logged.publish_evaluation_step(stage, batch_idx)
        progress.evaluated += 1
        if stop.signal is not None:
            _leave_if_stopped(run)
    return batch_idx + 1


def _evaluate_fetched(run: Run, source: StageData, keep: Callable[[Any, int], None]) -> list[int]:
    """Evaluate with a step that fetches its batches from ``dataloader_iter``; return how many each loader had."""
    hooks, logged, stage, count = run.hooks, run.logged, source.stage, len(source.load())
    several, loader_indices = count > 1, [index for index in range(count) if source.limits[index] > 0]
    batches, name = [0] * count, STEP_OF[stage]

    def fetch() -> Iterator[tuple[Any, bool, int, int]]:
        for loader_idx in loader_indices:
            if stage != "predict":
                logged.enter_loader(stage, loader_idx if several else None)
            if several:
                logged.context_of(STEPS[name]).enter_loader(loader_idx)
            for index, (batch, is_last) in enumerate(in_step(run, source.batches(loader_idx))):
                batches[loader_idx] += 1
                yield batch, is_last and loader_idx == loader_indices[-1], index, loader_idx

    fetched = DataloaderIterator(run, fetch(), is_empty=not loader_indices)
    step = _watched_step(run, name, None)
    start, end = (f"on_{name.removesuffix('_step')}_batch_{when}" for when in ("start", "end"))
    for _ in fetched.steps():
        suffix = (fetched.dataloader_idx,) if several else ()
        getattr(hooks, start)(fetched.batch, fetched.batch_idx, *suffix)
        try:
            output = step(fetched, fetched.batch_idx)
        except StopIteration:
            if not fetched.done:
                raise
            break
        suffix = (fetched.dataloader_idx,) if several else ()
        getattr(hooks, end)(output, fetched.batch, fetched.batch_idx, *suffix)
        keep(output, fetched.dataloader_idx)
        if logged.logs_evaluation_steps and stage != "predict":
            logged.publish_evaluation_step(stage, fetched.batch_idx)
        run.progress.evaluated += 1
        _leave_if_stopped(run)
    return batches


def _step(run: Run, name: str, loader_idx: int | None) -> Callable[[Any, int], Any]:
    """Return a step of the user's for batch and index; it is given ``loader_idx`` too, unless that is None."""
    user_step = step_of(run, name)
    step = run.runtime.bind(compiled_step(run, name, user_step), module=run.module)
    graphs = recorded_steps(run.compiled, run.module)
    arguments = 3 if loader_idx is not None else 2 if takes(user_step, "batch_idx", at=2) else 1
    if arguments == 2 and graphs is None:
        return step

    def compute(batch: Any, batch_idx: int) -> Any:
        if graphs is not None:
            graphs.begin()
        return step(*(batch, batch_idx, loader_idx)[:arguments])

    return compute


def _watched_step(run: Run, name: str, loader_idx: int | None) -> Callable[[Any, int], Any]:
    """Return what ``_step`` returns, with ``self.log`` meaning the step, and notes at its errors."""
    step, logged, context = _step(run, name, loader_idx), run.logged, run.logged.context_of(STEPS[name])

    def compute(batch: Any, batch_idx: int) -> Any:
        logged.context = context
        try:
            return step(batch, batch_idx)
        except Exception as error:
            annotate(error, name, run.module, batch, batch_idx)
            raise

    return compute


def _leave_if_stopped(run: Run) -> None:
    # Several processes leave together, when none of them reads batches any more.
    if run.limits.stop.signal is not None and not run.runtime.several_processes:
        raise Stopped(run.limits.stop.signal)


def validate_if_due(run: Run) -> None:
    """Do what follows a batch of training: validation if it is due, then schedulers on a monitored value."""
    progress = run.progress
    run.observers.pace.count_last()

    def finish() -> None:
        if progress.accumulation_index == 0 and not progress.post_batch_done:
            step_on_monitored(run, "step")
        progress.post_batch_done = True
        run.resume.earlier = Earlier()

    if not run.data.validation_schedule.due(run):
        finish()
        return
    # Gradients that later batches may add to are cleared only by a hook that the user overrides.
    may_release = (
        not run.window.gradients_may_count()
        or run.conventions.clears_gradients
        or overrides(run.module, LightningModule, "on_validation_model_zero_grad")
    )
    if run.observers.first_epoch.compares_parts:
        # It reads gradients, which are cleared below.
        run.observers.first_epoch.find_added(run)
    if progress.accumulation_index == 0 and may_release:
        run.logged.leave()  # No value belongs to this hook.
        run.module.on_validation_model_zero_grad()
    # A run that is interrupted within this validation repeats it when resumed.
    run.resume.earlier = before_validation(run)
    # Checkpoints and early stopping act in the last hook, after the schedulers have stepped.
    aside = run.observers.pace.pause()
    run.observers.watch("run_evaluation", evaluate)(run, run.data.validation, before_last_hooks=finish)
    run.observers.pace.end_validation(aside)
    run.state.stage = RunningStage.TRAINING
    run.data.validation_schedule.mark_done()


def without_gradients(run: Run) -> torch.inference_mode | torch.no_grad:
    """Return inference mode where it can be used, else ``torch.no_grad``."""
    # Within fit neither: what validation keeps (a cached mask, a buffer) may be used in training next.
    fitting = run.state.fn is TrainerFn.FITTING
    # Nor with a compiled step: validation within fit and outside of it would be compiled separately.
    plain = fitting or run.compiled is not None or not run.arguments.inference_mode
    return torch.no_grad() if plain else run.runtime.strategy.sharding.without_gradients()


def _remember_modes(run: Run) -> Callable[[], None]:
    """Return a function that gives each part its mode again; the wrapper of DDP shows eval mode until then."""
    restore, wrapped = remember_modes(run.module), run.wrapped
    if not isinstance(wrapped, DistributedDataParallel):
        return restore
    was_training, wrapped.training = wrapped.training, False

    def restore_all() -> None:
        restore()
        wrapped.training = was_training

    return restore_all


@contextmanager
def _in_eval_mode(run: Run, stage: str) -> Iterator[None]:
    """Switch to eval mode; afterwards each sub-module has its former mode, or what the user's hook sets."""
    module = run.module
    run.runtime.strategy.sharding.reshard()
    restore = _remember_modes(run)
    hooks, testing = run.hooks, stage == "test"
    own, default = hooks.on_validation_model_eval, module.on_validation_model_eval
    if testing:
        own, default = hooks.on_test_model_eval, module.on_test_model_eval
    (default if own is nothing else own)()
    try:
        yield
    finally:
        run.runtime.strategy.sharding.reshard()
        name = "on_test_model_train" if testing else "on_validation_model_train"
        if not redefines(module, LightningModule, name):
            restore()
        else:
            (hooks.on_test_model_train if testing else hooks.on_validation_model_train)()


def _warn_of_shuffled(run: Run) -> None:
    # Under Lightning's names, ``advice.warn_about`` has looked at all loaders.
    for loader in () if run.conventions.warns_of_settings else run.data.predict.loaders:
        advice.warn_of_another_order(loader)


def predict(run: Run, *, return_predictions: bool) -> list[Any] | None:
    """Predict on every batch; return the outputs by batch (a list of lists with several loaders).

    In short::

        eval mode, no gradients
        on_predict_start, on_predict_epoch_start
        for each loader, for each batch:
            on_predict_batch_start, predict_step, on_predict_batch_end
        on_predict_epoch_end, on_predict_end
    """
    run.state.stage = RunningStage.PREDICTING
    run.evaluation.returns_predictions = return_predictions
    if run.data.predict.is_off():
        return None
    hooks, module, count = run.hooks, run.module, len(run.data.predict.load())
    several = count > 1
    check_takes_loader(run.module, run.hooks, "predict", count)
    run.runtime.strategy.sharding.reshard()
    if run.conventions.samplers_learn_epoch:
        run.data.predict.tell_samplers(run.progress.current_epoch)
    restore = _remember_modes(run)
    module.on_predict_model_eval()
    outputs: list[list[Any]] = [[] for _ in range(count)]
    # Callbacks read it during the run, and empty it after each batch.
    run.evaluation.kept_predictions = outputs if several else (outputs[0] if outputs else [])
    run.evaluation.epoch_batch_indices = []
    run.evaluation.stage, run.evaluation.began_at = "predict", run.progress.evaluated
    try:
        with without_gradients(run):
            hooks.on_predict_start()
            hooks.on_predict_epoch_start()
            keeps = return_predictions or run.evaluation.keeps_predictions
            if return_predictions and not run.evaluation.keeps_predictions:
                _warn_of_shuffled(run)
            fetches = takes_iterator(module.predict_step)
            for loader_idx in range(count):
                run.evaluation.epoch_batch_indices.append([])
                if not fetches:
                    _predict_loader(run, loader_idx, several, outputs[loader_idx] if keeps else None)
            if fetches:
                _evaluate_fetched(
                    run, run.data.predict, lambda output, index: outputs[index].append(output) if keeps else None
                )
            leave_evaluation(run)
            hooks.on_predict_epoch_end()
            hooks.on_predict_end()
    finally:
        run.evaluation.stage, run.evaluation.batches["predict"] = "", run.progress.evaluated - run.evaluation.began_at
        run.runtime.strategy.sharding.reshard()
        restore()
    run.limits.leave_if_stopped()
    if not return_predictions:
        run.evaluation.kept_predictions = None
        return None
    return outputs if len(outputs) != 1 else outputs[0]


def _predict_loader(run: Run, loader_idx: int, several: bool, outputs: list[Any] | None) -> None:
    hooks = run.hooks
    step = _watched_step(run, "predict_step", loader_idx if several else None)
    transfer = make_transfer(run, run.data.predict, loader_idx)
    suffix = (loader_idx,) if several else ()
    # The predictions for a whole data set rarely fit on a device.
    on_host = is_host(run.runtime.device)
    # In these two hooks callbacks that write predictions read which samples are in a batch.
    keeps_indices = hooks.on_predict_batch_end is not nothing or hooks.on_predict_epoch_end is not nothing
    stream: Any = run.data.predict.load()[loader_idx]
    if keeps_indices:
        stream.keep_indices()
    steps = run.runtime.steps
    for batch_idx, (batch, is_last) in enumerate(in_step(run, run.data.predict.batches(loader_idx))):
        if keeps_indices:
            run.evaluation.batch_indices = stream.batch_indices(batch_idx)
            if run.evaluation.keeps_predictions:
                run.evaluation.epoch_batch_indices[-1].append(run.evaluation.batch_indices)
        if transfer is not None:
            batch = transfer(batch)
        hooks.on_predict_batch_start(batch, batch_idx, *suffix)
        output = step(batch, batch_idx)
        if output is None:
            warn_once(
                "predict_step", f"predict returned None: {type(run.module).__name__}.predict_step has no return value."
            )
        hooks.on_predict_batch_end(output, batch, batch_idx, *suffix)
        if steps is not None:
            steps.end_step("predict", batch, is_last)
        if outputs is not None:
            outputs.append(output if on_host else move_to(output, "cpu"))
        run.progress.evaluated += 1
        _leave_if_stopped(run)
