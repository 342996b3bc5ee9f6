"""Training: epochs, batches, one step. Read this file first; everything else serves it."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from hasten._lib.errors import MisconfigurationException
from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_info, rank_zero_warn, warn_once
from hasten._lib.tree import parameters_of
from hasten.elsewhere import alias
from hasten.hooks import STEPS, nothing, overrides
from hasten.loops import bad_loss, micro_batches, schedule
from hasten.loops.evaluate import evaluate, sanity_check
from hasten.loops.prepare import compiled_step, follow_arguments, recorded_steps
from hasten.loops.processes import (
    NO_BATCH,
    Batches,
    agree_after_batch,
    agree_on_end,
    agree_on_weight,
    check_join,
    check_steps,
    checked_in_group,
    exchange_without_loss,
    nothing_to_train,
    skip_epoch,
    touch,
)
from hasten.loops.progress import RunningStage
from hasten.loops.resume import batch_start
from hasten.loops.run import Run, Stopped
from hasten.loops.run_data import DataloaderIterator, FetchedHooks, make_transfer
from hasten.loops.user_code import (
    annotate,
    check_evaluation,
    check_some_loss,
    counts_for_nothing,
    loss_is_missing,
    loss_of,
    step_of,
    takes_iterator,
    weighed,
    with_batch_idx_if_taken,
)
from hasten.module import LightningModule
from hasten.optim import check_accumulation, needs_closure, no_accumulation
from hasten.optim.backward import InBackward
from hasten.optim.fast_step import clears_gradients, is_watched, unchanged
from hasten.seed import collect_rng_state

# (batch, batch_idx) -> the outputs for on_train_batch_end; ``run.window`` is the place of the batch in its accumulation
Step = Callable[[Any, int], Any]


def fit(run: Run) -> None:
    """Train until a limit is reached or ``should_stop`` is set.

    In short::

        sanity check
        on_train_start
        until finished:
            on_train_epoch_start
            for batch in train_dataloader:
                on_train_batch_start
                training_step, backward, and when the accumulation is complete clip and step
                step-wise schedulers; counters move
                on_train_batch_end, values due go to the loggers, checkpoints
                validation if due, schedulers on a monitored value
            on_train_epoch_end, checkpoints
        on_train_end
    """
    first_check = run.load_data is not nothing
    if first_check:
        _check_and_load(run)
    check_join(run)
    if nothing_to_train(run):
        rank_zero_info("`Trainer.fit` stopped: No training batches.")
        return
    if run.finished():
        _say_why_finished(run)
        return
    if run.arguments.max_epochs_assumed:
        rank_zero_warn(
            "`max_epochs` was not set: training ends after 1000 epochs. "
            "Pass max_epochs=..., or max_epochs=-1 for no limit.",
            PossibleUserWarning,
        )
    if not first_check:
        run.first_epoch.before_start(run)
        sanity_check(run)
    run.enter(RunningStage.TRAINING)
    if not run.progress.mid_epoch:
        # Before on_train_start, so that the values it logs belong to the first epoch.
        run.logged.start_epoch("train")
    run.logged.loss_report = bad_loss.LossReport(guarded=run.arguments.on_bad_loss != "warn")
    run.guard = bad_loss.guard(run)
    if run.progress.epochs_done == 0 and not run.progress.mid_epoch:
        run.train.begin()
    run.pace.begin(run, functools.partial(_train_step, run), says=bool(run.arguments.enable_progress_bar))
    run.hooks.on_train_start()
    run.agree_now()
    with torch.enable_grad():
        while not run.finished():
            train_epoch(run)
    check_steps(run)
    _say_why_finished(run)
    run.averages.keep_averaged()
    run.hooks.on_train_end()


def _check_and_load(run: Run) -> None:
    """Run the sanity check, then load the training data, and that of validation if the first epoch validates."""
    run.first_epoch.before_start(run)
    sanity_check(run)
    run.enter(RunningStage.TRAINING)
    run.load_data()
    if not run.validation.loaded and run.validation_schedule.due_in(run.progress.epochs_done) and not run.finished():
        run.enter(RunningStage.VALIDATING)
        check_evaluation(run)
        run.enter(RunningStage.TRAINING)


def train(run: Run) -> None:
    """Train until a limit is reached, without messages and without validating in between."""
    validation, run.validation = run.validation, copy.copy(run.validation)
    run.validation.next_limit = 0
    run.validation.take_limit()
    run.enter(RunningStage.TRAINING)
    run.logged.start_epoch("train")
    run.hooks.on_train_start()
    with torch.enable_grad():
        while not run.finished():
            train_epoch(run)
    run.hooks.on_train_end()
    run.validation = validation


def train_epoch(run: Run) -> None:
    """Train one epoch, or the rest of one that a resumed run is in the middle of."""
    progress, hooks, logged, train = run.progress, run.hooks, run.logged, run.train
    several_processes = run.runtime.world_size > 1
    progress.in_epoch = True
    read_by: Callable[[Batches], Batches] | None = None
    if progress.mid_epoch:
        read_by = agree_on_end(run) if several_processes else None
        # Worker processes start before the random numbers of training are restored.
        if progress.last_batch:
            train.stream.finish()
            batches: Iterator[tuple[Any, bool]] = iter(())
        else:
            train.stream.open()
            batches = train.start_epoch()
        run.restore_random()
    else:
        run.restore_random()
        progress.next_epoch()
        train.is_read = False
        train.take_limit()
        train.reload_if_due(progress.epoch)
        train.stream.finish()
        train.set_epoch(progress.epoch)
        hooks.on_train_epoch_start()
        read_by = agree_on_end(run) if several_processes else None
        run.runtime.strategy.begin_epoch()
        batches = train.start_epoch()
    if run.runtime.strategy.shares_batches:
        batches = checked_in_group(run, batches)
    if read_by is not None and not progress.last_batch:
        batches = read_by(batches)

    if run.runtime.syncs_gradients and run.wrapped is run.module:
        # At the start no parameter required gradients, so there was nothing to wrap; a callback may have unfrozen some.
        run.wrapped = run.runtime.wrap(run.module)
    run.first_epoch.at_start(run)
    fetches = takes_iterator(run.module.training_step)
    if fetches and run.as_lightning:
        warn_once(
            f"dataloader_iter {type(run.module)}",
            f"{type(run.module).__name__}.training_step takes `dataloader_iter` and fetches its batches itself: hooks "
            "get the right batch_idx only if each step fetches one batch.",
            PossibleUserWarning,
        )
    loop = train_fetched if fetches else train_batches
    try:
        run.watch("run_training_epoch", loop)(run, batches)
    finally:
        run.pace.end_epoch()
    check_some_loss(run)
    run.first_epoch.at_end(run)

    _, values = logged.close_epoch("train")
    hooks.on_train_epoch_end()
    values |= logged.close_epoch("train")[1]
    if progress.last_batch:
        schedule.step_on_monitored(run, "epoch")
    logged.log_epoch(values, progress.logged_step - 1, progress.epoch)
    logged.publish_loss(run.last_loss, progress.logged_step - 1, progress.epoch)
    if run.guard is not None:
        run.guard.end_epoch()
    logged.start_epoch("train")
    progress.epoch_ended = progress.last_batch
    hooks.on_train_epoch_end_last()
    run.leave_if_stopped()
    progress.in_epoch = False


def train_fetched(run: Run, batches: Iterable[tuple[Any, bool]]) -> None:
    """Train on the batches that ``training_step`` fetches from its argument ``dataloader_iter``."""
    numbered = ((batch, is_last, index, 0) for index, (batch, is_last) in enumerate(batches, run.progress.batch))
    fetched = DataloaderIterator(run, numbered)
    try:
        train_batches(run, fetched.steps(), FetchedHooks(run, fetched))
    except StopIteration:
        if not fetched.done:
            raise
        _loader_ended_early(run)


def train_batches(run: Run, batches: Iterable[tuple[Any, bool]], hooks: Any = None) -> None:
    """Train on each batch: the loop itself."""
    progress, logged, stop, window = run.progress, run.logged, run.stop, run.window
    hooks = run.hooks if hooks is None else hooks
    several_processes = run.runtime.world_size > 1
    plan, guard, module = _make_plan(run), run.guard, run.module
    step_of_class = module.__class__.training_step
    # An engine's open accumulation is not in checkpoints: it is completed before the run stops.
    strategy, completes, asked = run.runtime.strategy, run.runtime.strategy.owns_step, None

    if not progress.post_batch_done:
        after_batch(run)
        plan.next_validation = run.validation_schedule.next_batch(run)

    if progress.last_batch or _enough(run):
        return

    batches = run.stalls.watched(run, batches)
    run.batch_start = batch_start(run)
    if run.batch_start is not None:
        batches = run.batch_start.saved(batches)
    take, clock, pace = iter(batches).__next__, time.perf_counter, run.pace
    while True:
        began = clock()
        try:
            batch, is_last = take()
        except StopIteration:
            break
        came = clock()
        pace.waited += came - began
        batch_idx = progress.batch
        run.is_last_batch = is_last
        has_batch = batch is not NO_BATCH
        is_none = batch is None and run.as_lightning
        if not has_batch:
            batch = None
        elif plan.transfer is not None:
            batch = plan.transfer(batch)
        logged.batch, logged.batch_size = batch, 0
        if pace.count is not None:
            pace.count(batch)
        start = hooks.on_train_batch_start if has_batch and not is_none else hooks.on_train_batch_start_without
        if start(batch, batch_idx) == -1:
            if several_processes:
                skip_epoch(run)
            _skip_rest_of_epoch(run)
            return
        if run.changed:
            plan = _make_plan(run)

        window.is_start = progress.accumulation_index == 0
        if window.is_start and batch_idx > plan.tail_start:
            plan = _make_plan(run)  # The loader gives more batches than its length: plan their accumulations.
        window.is_end = is_end = is_last or progress.accumulation_index + 1 >= plan.accumulation_size
        window.size = plan.accumulation_size if batch_idx < plan.tail_start else plan.tail_size
        outputs = plan.train_step(batch, batch_idx) if not is_none else _skip_none()

        # The counters move before on_train_batch_end: a checkpoint taken there is complete.
        progress.batch = batch_idx + 1
        progress.total_batches += 1
        progress.last_batch = is_last
        progress.post_batch_done = False
        if is_end:
            progress.accumulation_index = 0
            progress.logged_step += 1
        else:
            progress.accumulation_index += 1
        if run.schedulers:
            plan.step_schedulers(run, stepped=is_end)

        (hooks.on_train_batch_end if has_batch else hooks.on_train_batch_end_without)(outputs, batch, batch_idx)
        if is_end and progress.logged_step % plan.log_every_n_steps == 0:
            began = clock()
            logged.publish_step(progress.logged_step - 1, progress.epoch, to_loggers=True, loss=run.last_loss)
            pace.published += clock() - began
        hooks.on_train_batch_end_last(outputs, batch, batch_idx)
        if guard is not None:
            guard.after_batch()

        if is_last and run.goes_on():
            run.train.begin_next(progress.epoch + 1)
        agreed = agree_after_batch(run) if several_processes else None
        if is_last or progress.total_batches >= plan.next_validation or plan.per_batch or run.should_stop:
            after_batch(run)
            plan.next_validation = run.validation_schedule.next_batch(run)
            if several_processes:
                agree_after_batch(run, validated=True)
        progress.post_batch_done = True
        if run.changed or module.__class__.training_step is not step_of_class:
            plan, step_of_class = _make_plan(run), module.__class__.training_step

        if came >= pace.due:
            pace.after_batch(plan, completes=is_end, is_last=is_last)
        asked = (asked or agreed) if several_processes else stop.signal
        if completes and strategy.holds_gradients and not is_last:
            continue
        if asked is not None:
            raise Stopped(asked)
        if progress.global_step >= plan.max_steps or (run.should_stop and run.stops_early()):
            return

    if not progress.last_batch:
        _loader_ended_early(run)


def _skip_none() -> Any:
    warn_once("no batch", "The train_dataloader yielded None: such a batch is skipped.")
    return None


def after_batch(run: Run) -> None:
    """Do what follows a batch: validation if it is due, then schedulers on a monitored value."""
    progress = run.progress
    run.pace.count_last()

    def finish() -> None:
        if progress.accumulation_index == 0:
            schedule.step_on_monitored(run, "step")
        progress.post_batch_done = True
        run.random_before_validation = run.metrics_before_validation = None

    if not run.validation_schedule.due(run):
        finish()
        return
    # Gradients that later batches may add to are cleared only by a hook that the user overrides.
    may_release = not run.gradients_may_count() or overrides(
        run.module, LightningModule, "on_validation_model_zero_grad"
    )
    if progress.accumulation_index == 0 and may_release:
        run.module.on_validation_model_zero_grad()
    # A run that is interrupted within this validation repeats it when resumed: with the same random numbers, and with
    # the metrics as they are before it.
    run.random_before_validation = collect_rng_state()
    run.metrics_before_validation = run.metrics.state_dict(copied=True)
    # Checkpoints and early stopping act in the last hook, after the schedulers have stepped.
    aside = run.pace.step_aside()
    run.watch("run_evaluation", evaluate)(run, run.validation, before_last_hooks=finish)
    run.pace.end_validation(aside)
    run.enter(RunningStage.TRAINING)
    run.validation_schedule.mark_done()


# -- what the loop needs for each batch: computed once, and again when the run changes


@dataclass(slots=True)
class _EpochPlan:
    """What the loop needs for each batch."""

    train_step: Step
    # Brings a batch to the device; None where it stays as it is.
    transfer: Callable[[Any], Any] | None
    step_schedulers: Callable[..., None]
    # Batches of an accumulation; batches of the epoch's last accumulation, and the index of its first batch.
    accumulation_size: int
    tail_size: int
    tail_start: float
    # Infinite without an interval, or without a limit.
    log_every_n_steps: float
    max_steps: float
    # Whether validation or a scheduler may be due after any batch.
    per_batch: bool
    # Batches of the run after which validation may be due.
    next_validation: float


def _make_plan(run: Run) -> _EpochPlan:
    run.changed = False
    run.pace.drop_sample()
    # A zero_grad of the user may keep gradients, or set them to zeros, and the optimizer steps with zeros too.
    run.keeps_gradients = not run.runtime.strategy.owns_step and (
        not run.module.automatic_optimization
        or overrides(run.module, LightningModule, "optimizer_zero_grad")
        or not all(map(clears_gradients, run.optimizers))
    )
    accumulation_size, tail_size, tail_start = schedule.plan_windows(run)
    return _EpochPlan(
        train_step=_train_step(run),
        transfer=None if takes_iterator(run.module.training_step) else make_transfer(run, run.train),
        step_schedulers=run.watch("lr_scheduler_step", schedule.step),
        accumulation_size=accumulation_size,
        tail_size=tail_size,
        tail_start=tail_start,
        # 0 means never: ``step % inf`` is never 0.
        log_every_n_steps=run.arguments.log_every_n_steps or math.inf,
        max_steps=run.max_steps,
        per_batch=schedule.any_monitored(run, "step") or run.validation_schedule.per_batch,
        next_validation=run.validation_schedule.next_batch(run),
    )


def _train_step(run: Run) -> Step:
    return run.watch("run_training_batch", _joining(run, make_step(run)))


def make_step(run: Run) -> Step:
    """Return the function that trains on one batch."""
    step, steps = _step_of_kind(run), run.runtime.steps
    if steps is None:
        return step
    end_step = steps.end_step

    def step_and_end(batch: Any, batch_idx: int) -> Any:
        outputs = step(batch, batch_idx)
        end_step("train", batch, run.is_last_batch)
        return outputs

    return step_and_end


def _step_of_kind(run: Run) -> Step:
    """Return the step: automatic, with a closure, or manual."""
    if not run.module.automatic_optimization:
        return _manual_step(run)
    if not run.optimizers:
        return _step_without_optimizer(run)
    optimizer = run.optimizers[0]
    if isinstance(optimizer, InBackward):
        follow_arguments(run, optimizer)  # A callback may have changed the arguments.
    batches = run.accumulate_grad_batches
    check_accumulation(optimizer, batches, f"Trainer(accumulate_grad_batches={batches})")
    return _closure_step(run) if _needs_closure(run) else _automatic_step(run)


def _joining(run: Run, train_step: Step) -> Step:
    """With ``uneven="join"``, return a step that a process can make without a batch, while others have some.

    Such a process adds nothing to the gradients, and steps with those of the others, so that weights, optimizers,
    schedulers and counters stay the same on all.
    """
    if run.arguments.uneven != "join" or run.runtime.world_size == 1 or not run.optimizers:
        return train_step
    window, progress, shared, strategy = run.window, run.progress, run.logged.shared, run.runtime.strategy
    zero_grad = _zero_grad(run, run.optimizers[0])
    finish_gradients, step = _finish_and_step(run)

    def join() -> None:
        run.last_loss = None
        if window.is_start:
            zero_grad()
            run.window_weight, run.window_is_unweighed = None, False
        strategy.step_without_batch(run.wrapped, touch, exchanges=window.is_end)
        if window.is_end:
            finish_gradients()
            step(None)
            progress.global_step += 1

    def step_or_join(batch: Any, batch_idx: int) -> Any:
        outputs = None
        if shared.has_no_batch:
            join()
        else:
            outputs = train_step(batch, batch_idx)
        if window.is_end and shared.first_with_batch > 0:
            # DDP broadcasts those of the first process, which has not seen this batch.
            strategy.share_buffers(run.wrapped, shared.first_with_batch)
        return outputs

    return step_or_join


def _needs_closure(run: Run) -> bool:
    """Return whether the user's code steps: in ``optimizer_step``, in the optimizer, or on its wrapper."""
    return (
        overrides(run.module, LightningModule, "optimizer_step")
        or run.runtime.steps_by_program
        or needs_closure(run.optimizers[0])
        or "step" in vars(run.wrapped_optimizers[0])
        # What watches a step of Lightning finds the gradients before and after it.
        or (run.as_lightning and is_watched(run.optimizers[0]))
    )


def _automatic_step(run: Run) -> Step:
    """Forward and backward on each batch; clip and step when the accumulation is complete."""
    progress, window = run.progress, run.window
    forward_backward = _forward_backward(run)
    finish_gradients, step = _finish_and_step(run)

    def train_step(batch: Any, batch_idx: int) -> Any:
        outputs = forward_backward(batch, batch_idx)
        if window.is_end:
            finish_gradients()
            step(None)
            progress.global_step += 1
        return outputs

    return train_step


def _closure_step(run: Run) -> Step:
    """Hand forward and backward to ``optimizer_step`` as a closure, for optimizers that call it themselves."""
    progress, window, optimizer = run.progress, run.window, run.optimizers[0]
    forward_backward, finish_gradients = _forward_backward(run), _finish_in_closure(run)
    in_step = _finishes_in_step(run)

    def train_step(batch: Any, batch_idx: int) -> Any:
        if not window.is_end:
            return forward_backward(batch, batch_idx)
        outputs: Any = None
        computed = False

        def compute() -> Tensor | None:
            nonlocal outputs, computed
            if computed and not window.is_start:
                batches = run.accumulate_grad_batches
                raise no_accumulation(optimizer, f"Trainer(accumulate_grad_batches={batches})")
            with torch.enable_grad():  # Some optimizers turn gradients off around all of their step.
                outputs = forward_backward(batch, batch_idx, keep_outputs=True)
            if not in_step:
                finish_gradients()
            computed = True
            return outputs["loss"] if outputs else None

        _step_with_closure(run, batch_idx, compute)
        if in_step and not computed:
            raise MisconfigurationException(
                f"The closure hasn't been executed: {_who_steps(run)} did not call it, so nothing was trained on batch "
                f"{batch_idx}. Pass it on: optimizer.step(closure=optimizer_closure)."
            )
        # Each call of optimizer_step counts as one step, for limits and schedules.
        progress.global_step += 1
        return outputs

    return train_step


def _finishes_in_step(run: Run) -> bool:
    """Return whether gradients are unscaled and clipped in the step of the wrapped optimizer, as in Lightning.

    Otherwise that is part of the closure, so that a user's ``optimizer_step`` finds them clipped.
    """
    return run.guard is None and run.as_lightning


def _who_steps(run: Run) -> str:
    if overrides(run.module, LightningModule, "optimizer_step"):
        return f"{type(run.module).__name__}.optimizer_step()"
    return f"{type(run.optimizers[0]).__name__}.step()"


def _finish_in_closure(run: Run) -> Callable[[], None]:
    finish_gradients = _finish_gradients(run)
    return finish_gradients if run.guard is None else run.guard.in_closure(run.optimizers[0], finish_gradients)


def _step_with_closure(run: Run, batch_idx: int, compute: Callable[[], Tensor | None]) -> None:
    """Call ``optimizer_step`` with a closure that computes loss and gradients; it does not count as a step.

    A user's ``optimizer_step`` decides when gradients are computed. An optimizer finds them there, as after the
    backward of a plain loop, and its first call of the closure returns the loss without computing again. In programs
    written for Lightning the optimizer decides, too.
    """
    module, optimizer, progress = run.module, run.optimizers[0], run.progress
    computes_first = not (overrides(module, LightningModule, "optimizer_step") or run.as_lightning)
    still_valid: Callable[[], bool] | None = None
    loss: Tensor | None = None

    def closure() -> Tensor | None:
        nonlocal still_valid, loss
        if still_valid is None or not still_valid():
            loss = compute()
        still_valid = None
        return loss

    def step() -> None:
        nonlocal still_valid
        if computes_first:
            closure()
            # For optimizers that step copies of the parameters: see precision/small_updates.py.
            still_valid = closure.has_gradients = unchanged(optimizer)  # type: ignore[attr-defined]
        module.optimizer_step(progress.epoch, batch_idx, run.wrapped_optimizers[0], closure)

    done = progress.global_step
    if run.guard is None:
        run.finish_in_step = _finish_gradients(run) if _finishes_in_step(run) else None
        try:
            step()
        finally:
            run.finish_in_step = None
    else:
        run.guard.one_step(optimizer, step)
    progress.global_step = done


def _manual_step(run: Run) -> Step:
    """The user's training_step does all of it."""
    hooks, logged, context = run.hooks, run.logged, run.logged.context_of(STEPS["training_step"])
    training_step = _training_step(run)
    graphs, as_lightning = recorded_steps(run), run.as_lightning

    def train_step(batch: Any, batch_idx: int) -> Any:
        logged.context = context
        try:
            if graphs is not None:
                graphs.begin()
            output = training_step(batch, batch_idx)
        except Exception as error:
            annotate(error, "training_step", run.module, batch, batch_idx)
            raise
        if as_lightning and not isinstance(output, (Tensor, Mapping, NoneType)):
            raise MisconfigurationException(
                f"{type(run.module).__name__}.training_step returned a {type(output).__name__}. With manual "
                "optimization return the loss (a tensor), a dict, or nothing."
            )
        if output is None or hooks.on_train_batch_end is hooks.on_train_batch_end_last is nothing:
            return {}
        if isinstance(output, Tensor):
            return {"loss": output.detach()}
        return output

    return train_step


def _step_without_optimizer(run: Run) -> Step:
    """Forward and backward alone: configure_optimizers returned None."""
    forward_backward, progress, window, guard = _forward_backward(run), run.progress, run.window, run.guard

    def train_step(batch: Any, batch_idx: int) -> Any:
        outputs = forward_backward(batch, batch_idx)
        if window.is_end and guard is not None:
            guard.judge_losses()
        progress.global_step += window.is_end
        return outputs

    return train_step


# -- forward and backward of one batch


def _forward_backward(run: Run) -> micro_batches.ForwardBackward:
    """Return forward and backward of one batch: whole or in parts, exchanging gradients when they are complete."""
    forward_backward = _forward_backward_once(run)
    if micro_batches.enabled(run):
        forward_backward = micro_batches.in_parts(run, forward_backward)
    elif run.runtime.syncs_gradients:
        forward_backward = _synced(run, forward_backward)
    return forward_backward if run.guard is None else run.guard.watching(forward_backward)


def _forward_backward_once(run: Run) -> micro_batches.ForwardBackward:
    """Return forward, zero_grad and backward of one batch, with everything looked up beforehand."""
    runtime, module, hooks, window = run.runtime, run.module, run.hooks, run.window
    logged, context = run.logged, run.logged.context_of(STEPS["training_step"])
    in_parts = micro_batches.enabled(run)
    training_step = _training_step(run)
    optimizer = run.optimizers[0] if run.optimizers else None
    zero_grad = _zero_grad(run, optimizer)
    backward = _backward(run)
    weighs = run.accumulate_grad_batches > 1 or runtime.world_size > 1 or in_parts
    # A run resumed within an accumulation completes it first.
    weighs = weighs or run.progress.accumulation_index > 0
    # With several processes the last backward of an accumulation must not be skipped: the others wait for it.
    alone = runtime.world_size == 1
    gathers = runtime.strategy.owns_step or (runtime.strategy.shards_parameters and not alone)
    graphs = recorded_steps(run)
    take_loss = None if run.guard is None else run.guard.take
    no_outputs: dict[str, Any] | None = {} if run.as_lightning else None

    def forward_backward(batch: Any, batch_idx: int, keep_outputs: bool = False) -> Any:
        logged.context = context
        try:
            if window.is_start and graphs is not None:
                # Before forward, because the replay of a graph overwrites the gradients.
                hooks.on_before_zero_grad(optimizer)
                zero_grad()
                graphs.begin()
            output = training_step(batch, batch_idx)
            loss = output if type(output) is Tensor else loss_of(output, run)
            run.last_loss = loss
            if window.is_start and graphs is None:
                hooks.on_before_zero_grad(optimizer)
                zero_grad()
            if loss is None:
                if gathers:
                    raise loss_is_missing(run)
                if window.is_start:
                    run.window_is_unweighed = False
                return no_outputs
            if weighs:
                loss = weighed(run, output, loss)
            if alone and type(output) is not Tensor and counts_for_nothing(output):
                # The mean over no samples contributes nothing, and its gradient may be nan.
                run.last_loss = None
                return {**output, "loss": torch.zeros_like(loss)}
            if take_loss is not None:
                take_loss(run.last_loss)
            hooks.on_before_backward(loss)
            backward(loss)
            if graphs is not None and (in_parts or not (window.is_start and window.is_end)):
                # The next replay of the graph overwrites them; later batches are added to the copies.
                graphs.keep_gradients()
        except Exception as error:
            annotate(error, "training_step", module, batch, batch_idx)
            bad_loss.name_layer(error, run, batch, batch_idx)
            raise
        if not in_parts:
            hooks.on_after_backward()
        # Looked up after the step, because training_step may append a callback.
        if not keep_outputs and hooks.on_train_batch_end is hooks.on_train_batch_end_last is nothing:
            return None
        detached = loss.detach()
        return {**output, "loss": detached} if isinstance(output, dict) else {"loss": detached}

    return forward_backward


def _synced(run: Run, forward_backward: micro_batches.ForwardBackward) -> micro_batches.ForwardBackward:
    """Exchange gradients in the last backward of an accumulation alone."""
    window, runtime = run.window, run.runtime

    def forward_backward_synced(batch: Any, batch_idx: int, keep_outputs: bool = False) -> Any:
        if not window.is_end:
            with runtime.no_sync(run.wrapped):
                return forward_backward(batch, batch_idx, keep_outputs)
        skipped = run.skipped_batches
        outputs = forward_backward(batch, batch_idx, keep_outputs)
        if run.skipped_batches != skipped:
            exchange_without_loss(run)
        return outputs

    return forward_backward_synced


def _training_step(run: Run) -> Callable[..., Any]:
    step = compiled_step(run, "training_step", with_batch_idx_if_taken(step_of(run, "training_step")))
    wrapped = run.module if micro_batches.computes_alone(run) else run.wrapped
    return run.runtime.bind(step, module=run.module, wrapped=wrapped, training=True)


def _zero_grad(run: Run, optimizer: Any) -> Callable[[], None]:
    module, progress = run.module, run.progress
    if optimizer is None:
        return module.zero_grad
    if overrides(module, LightningModule, "optimizer_zero_grad"):
        strategy = run.runtime.strategy

        def zero_grad() -> None:
            module.optimizer_zero_grad(progress.epoch, progress.batch, optimizer)
            strategy.drop_held_gradients(optimizer)

        return zero_grad
    return run.runtime.make_zero_grad(optimizer)


def _backward(run: Run) -> Callable[[Tensor], None]:
    module, scaler = run.module, run.runtime.scaler
    if not overrides(module, LightningModule, "backward"):
        return run.runtime.backward
    if scaler is None:
        return run.runtime.with_backward(module.backward)
    return run.runtime.with_backward(lambda loss: module.backward(scaler.scale(loss)))


# -- from the last backward of an accumulation to the step


def _finish_and_step(run: Run) -> tuple[Callable[[], None], Callable[..., Any]]:
    """Return what follows the last backward of an accumulation: finish the gradients, then step."""
    finish, step = _finish_gradients(run), run.runtime.make_step(run.optimizers[0])
    return (finish, step) if run.guard is None else run.guard.around(run.optimizers[0], finish, step)


def _finish_gradients(run: Run) -> Callable[[], None]:
    """Return what happens between the last backward of an accumulation and the optimizer's step."""
    runtime, module, hooks, progress = run.runtime, run.module, run.hooks, run.progress
    optimizer, arguments, window = run.optimizers[0], run.arguments, run.window
    unscale, max_value = runtime.unscale, arguments.gradient_clip_val or 0.0
    custom = any(overrides(module, LightningModule, name) for name in ("configure_gradient_clipping", "clip_gradients"))
    custom = custom or (runtime.clips_by_program and max_value > 0)
    clips = max_value > 0 and not custom and not isinstance(optimizer, InBackward) and not runtime.strategy.owns_step
    clip = runtime.clip_value if arguments.gradient_clip_algorithm == "value" else runtime.clip_norm
    joins = arguments.uneven == "join" and runtime.world_size > 1
    rescales = not alias.active()

    def finish_gradients() -> None:
        if unscale is not None:
            unscale(optimizer)
        if joins:
            agree_on_weight(run)
        if run.window_weight is not None:
            weight = run.window_weight
            if runtime.world_size > 1:
                weight = runtime.data_parallel_reduce(torch.as_tensor(weight, device=runtime.device))
            schedule.divide_gradients(run, optimizer, weight)
            run.window_weight = None
        elif rescales and progress.accumulation_index + 1 != window.size:
            # The losses were divided by another number of batches than the accumulation has: the data ended early, or
            # the checkpoint was saved in an accumulation of another size.
            schedule.scale_gradients(run, optimizer, window.size / (progress.accumulation_index + 1))
        hooks.on_before_optimizer_step(optimizer)
        if clips:
            clip(parameters_of(optimizer), max_value)
        elif custom:
            module.configure_gradient_clipping(
                optimizer,
                gradient_clip_val=arguments.gradient_clip_val,
                gradient_clip_algorithm=arguments.gradient_clip_algorithm,
            )

    return finish_gradients


# -- the edges of an epoch


def _skip_rest_of_epoch(run: Run) -> None:
    """End the epoch because on_train_batch_start returned -1. An open accumulation is dropped."""
    run.progress.last_batch = True
    run.window_weight = None
    if run.schedulers:
        schedule.step(run, stepped=False)


def _loader_ended_early(run: Run) -> None:
    """Complete an epoch whose loader ended before its length said."""
    progress = run.progress
    progress.last_batch = run.is_last_batch = True
    completes = progress.accumulation_index > 0 and run.module.automatic_optimization
    if completes and run.optimizers:
        _step_late(run)
    if completes:
        progress.accumulation_index = 0
        progress.global_step += 1
        progress.logged_step += 1
    if run.schedulers:
        schedule.step(run, stepped=completes)
    after_batch(run)


def _step_late(run: Run) -> None:
    """Step on the gradients of the last batches, which were computed as if more would follow."""
    progress, optimizer = run.progress, run.optimizers[0]
    if run.runtime.syncs_gradients:
        micro_batches.sync_gradients(run)()
    run.window.size = run.divisor_of(progress.batch - 1)
    progress.accumulation_index -= 1
    if not _needs_closure(run):
        finish_gradients, step = _finish_and_step(run)
        finish_gradients()
        step(None)
        return
    finish_gradients = _finish_in_closure(run)
    finished = False

    def compute() -> None:
        nonlocal finished
        if finished:
            raise RuntimeError(
                f"{type(optimizer).__name__}: its step computes the loss again, and the epoch ended before the length "
                f"of the train dataloader ({type(run.train.loaders[0]).__name__}) said. Correct its __len__."
            )
        finish_gradients()
        finished = True

    _step_with_closure(run, progress.batch - 1, compute)


def _enough(run: Run) -> bool:
    return run.progress.global_step >= run.max_steps or (run.should_stop and run.may_stop_early())


def _say_why_finished(run: Run) -> None:
    progress, arguments = run.progress, run.arguments
    if progress.global_step >= run.max_steps:
        rank_zero_info(f"`Trainer.fit` stopped: `max_steps={arguments.max_steps}` reached.")
    elif progress.epochs_done >= run.max_epochs:
        rank_zero_info(f"`Trainer.fit` stopped: `max_epochs={arguments.max_epochs}` reached.")
