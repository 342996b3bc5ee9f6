"""Training: epochs, batches, steps. Read this file first."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hasten._lib.errors import MisconfigurationException, make_error, with_article
from hasten._lib.rank_zero import PossibleUserWarning, rank_zero_info, rank_zero_warn, warn_once
from hasten._lib.tree import call_own_train, parameters_of
from hasten.compile.cuda_graphs import CudaGraphSteps, recorded_steps
from hasten.hooks import STEPS, nothing, overrides
from hasten.loops import bad_loss, micro_batches, schedule
from hasten.loops.evaluate import sanity_check, validate_if_due
from hasten.loops.processes import (
    Batches,
    agree_after_batch,
    agree_on_end,
    check_steps,
    exchange_without_loss,
    nothing_to_train,
    skip_epoch,
)
from hasten.loops.run import Run, Window
from hasten.loops.run_data import DataloaderIterator, FetchedHooks, make_transfer
from hasten.loops.saved_state import batch_start
from hasten.loops.schedule import Stopped
from hasten.loops.user_code import (
    annotate,
    check_evaluation,
    check_some_loss,
    compiled_step,
    computed_again,
    counts_for_nothing,
    follow_arguments,
    loss_is_missing,
    loss_of,
    step_of,
    takes_iterator,
    weighed,
    whole_step,
    with_batch_idx_if_taken,
)
from hasten.module import LightningModule
from hasten.optim import needs_closure
from hasten.optim.backward import InBackward
from hasten.optim.fast_step import is_watched, unchanged
from hasten.types import RunningStage

if TYPE_CHECKING:
    from hasten.hooks import Hooks

# (batch, batch_idx) -> the outputs for on_train_batch_end; ``run.window`` says where the batch is in its accumulation
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
    first_check = run.data.load is not nothing
    if first_check:
        _check_and_load(run)
    if nothing_to_train(run):
        rank_zero_info("`Trainer.fit` stopped: No training batches.")
        return
    if run.limits.finished():
        _say_why_finished(run)
        if run.progress.total_batches and run.resume.from_batch < 0:
            schedule.warn_of_second_fit(run)
        return
    if run.arguments.max_epochs_assumed:
        what = "`max_epochs` was not set. Setting it to 1000 epochs."
        fix = "To train without an epoch limit, set `max_epochs=-1`."
        rank_zero_warn(what, PossibleUserWarning, fix=fix)
    if not first_check:
        run.observers.first_epoch.before_start(run)
        sanity_check(run)
    run.state.stage = RunningStage.TRAINING
    if not run.progress.mid_epoch:
        # Before on_train_start, so that the values it logs belong to the first epoch.
        run.logged.start_epoch("train")
    run.logged.loss_report = bad_loss.LossReport(guarded=run.arguments.on_bad_loss != "warn")
    run.observers.guard = bad_loss.guard(run)
    if run.progress.epochs_done == 0 and not run.progress.mid_epoch:
        run.data.train.begin()
    elif run.resume.from_batch < 0:
        run.data.train.begin_in_vain()
    run.observers.pace.begin(run, functools.partial(_train_step, run), says=bool(run.arguments.enable_progress_bar))
    run.data.validation_schedule.mark_done()
    run.hooks.on_train_start()
    run.module_changes.begin()
    run.limits.agree_now()
    with torch.enable_grad():
        while not run.limits.finished():
            train_epoch(run)
    check_steps(run)
    _say_why_finished(run)
    run.averages.keep_averaged()
    # Hooks find the files of all saves before.
    run.runtime.finish_saves()
    run.hooks.on_train_end()


def _check_and_load(run: Run) -> None:
    """Run the sanity check, then load the training data, and the validation data if the first epoch validates."""
    run.observers.first_epoch.before_start(run)
    sanity_check(run)
    run.state.stage = RunningStage.TRAINING
    run.data.load()
    validation, is_due = run.data.validation, run.data.validation_schedule.due_in(run.progress.epochs_done)
    if not validation.loaded and is_due and not run.limits.finished():
        run.state.stage = RunningStage.VALIDATING
        check_evaluation(run)
        run.state.stage = RunningStage.TRAINING


def train(run: Run) -> None:
    """Train until a limit is reached, without messages and without validating in between."""
    validation, run.data.validation = run.data.validation, copy.copy(run.data.validation)
    run.data.validation.next_limit = 0
    run.data.validation.take_limit()
    run.state.stage = RunningStage.TRAINING
    call_own_train(run.module)
    run.logged.start_epoch("train")
    run.hooks.on_train_start()
    with torch.enable_grad():
        while not run.limits.finished():
            train_epoch(run)
    run.hooks.on_train_end()
    run.data.validation = validation


def train_epoch(run: Run) -> None:
    """Train one epoch, or the rest of one that a resumed run is in the middle of."""
    progress, hooks, logged, train = run.progress, run.hooks, run.logged, run.data.train
    several_processes = run.runtime.several_processes
    progress.in_epoch = True
    read_by: Callable[[Batches], Batches] | None = None
    if progress.mid_epoch:
        read_by = agree_on_end(run) if several_processes else None
        # Worker processes start before the random numbers of training are restored.
        if progress.last_batch:
            train.finish()
            batches: Iterator[tuple[Any, bool]] = iter(())
        else:
            batches = train.start_epoch(resumes=True)
        run.resume.restore_random()
    else:
        run.resume.restore_random()
        progress.next_epoch()
        train.take_limit()
        train.reload_if_due(progress.epoch)
        train.finish()
        train.set_epoch(progress.epoch)
        hooks.on_train_epoch_start()
        read_by = agree_on_end(run) if several_processes else None
        run.runtime.strategy.sharding.begin_epoch()
        batches = train.start_epoch()
    batches = run.runtime.strategy.sharding.checked(batches, itemgetter(0))
    if read_by is not None and not progress.last_batch:
        batches = read_by(batches)

    if several_processes:
        run.wrapped = run.runtime.engine.wrap_late(run.module, run.wrapped, run.runtime.wrap)
    run.observers.begin_batches(run)
    loop = train_fetched if takes_iterator(run.module.training_step) else train_batches
    try:
        run.observers.watch("run_training_epoch", loop)(run, batches)
    finally:
        run.observers.pace.end_epoch()
    run.resume.batch_start = None
    check_some_loss(run)
    run.observers.end_batches(run)

    logged.close_epoch("train")
    logged.show_loss(run.window.loss)
    hooks.on_train_epoch_end()
    logged.close_epoch("train")
    if run.observers.epoch_ended is not None:
        run.observers.epoch_ended()
    if progress.last_batch:
        schedule.step_on_monitored(run, "epoch")
    logged.log_epoch(logged.epoch_values, progress.logged_step - 1, progress.epoch)
    logged.publish_loss(run.window.loss, progress.logged_step - 1, progress.epoch)
    if run.observers.guard is not None:
        run.observers.guard.end_epoch()
    logged.start_epoch("train")
    progress.epoch_ended = progress.last_batch
    hooks.on_train_epoch_end_last()
    run.limits.leave_if_stopped()
    progress.in_epoch = False


def train_fetched(run: Run, batches: Iterable[tuple[Any, bool]]) -> None:
    """Train on the batches that ``training_step`` fetches from its argument ``dataloader_iter``."""
    numbered = ((batch, is_last, index, 0) for index, (batch, is_last) in enumerate(batches, run.progress.batch))
    fetched = DataloaderIterator(run, numbered)
    fetched.fetched = run.progress.batch
    try:
        train_batches(run, fetched.steps(), FetchedHooks(run, fetched))
    except StopIteration:
        if not fetched.done:
            raise
        _loader_ended_early(run)


def train_batches(run: Run, batches: Iterable[tuple[Any, bool]], hooks: Hooks | FetchedHooks | None = None) -> None:
    """Train on each batch: the loop itself.

    In short::

        for each batch:
            batch to the device
            on_train_batch_start: -1 ends the epoch
            training_step, backward, and when the accumulation is complete clip and step
            counters move, step-wise schedulers
            on_train_batch_end, values due go to the loggers, checkpoints
            observers
            validation if due, schedulers on a monitored value; leave where a limit is reached or a signal arrived
    """
    progress, logged, window, limits, module = run.progress, run.logged, run.window, run.limits, run.module
    hooks = run.hooks if hooks is None else hooks
    epoch = EpochSettings(run)

    if not progress.post_batch_done:
        validate_if_due(run)
        epoch.find_next_validation()
    if progress.last_batch or _enough(run):
        return

    batches = run.observers.stalls.watched(run, batches)
    run.resume.batch_start = batch_start(run)
    if run.resume.batch_start is not None:
        batches = run.resume.batch_start.saved(batches)
    pace = run.observers.pace
    batches, publish = pace.watched(epoch, batches), pace.timed_publishing(logged.publish_step)
    before_step, after_step = pace.counts, _after_each_batch(epoch)
    for batch, is_last in batches:
        batch_idx, window.is_last_batch = progress.batch, is_last
        if epoch.transfer is not None:
            batch = epoch.transfer(batch)
        logged.batch, logged.batch_size = batch, 0
        for observe in before_step:
            observe(batch)
        if batch is not None and hooks.on_train_batch_start(batch, batch_idx) == -1:
            _skip_rest_of_epoch(epoch)
            return
        epoch.begin_batch(batch_idx, is_last)
        outputs = _skip_none(epoch, batch_idx) if batch is None else epoch.train_step(batch, batch_idx)

        # The counters move before on_train_batch_end: a checkpoint taken there is complete.
        epoch.count_batch(is_last)
        if run.schedulers:
            epoch.step_schedulers(run, stepped=window.is_end)

        # A checkpoint saved in the hook records that the row has not been written yet.
        logged.row_is_due = window.is_end and progress.logged_step % epoch.log_every_n_steps == 0
        hooks.on_train_batch_end(outputs, batch, batch_idx)
        if logged.row_is_due:
            publish(progress.logged_step - 1, progress.epoch, to_loggers=True, loss=window.loss)
        hooks.on_train_batch_end_last(outputs, batch, batch_idx)
        for observer in after_step:
            observer()

        if (
            progress.total_batches >= epoch.next_validation
            or progress.global_step >= epoch.max_steps
            or is_last
            or limits.should_stop
            or limits.stop.agreed_signal is not None
            or run.changed
            or type(module).training_step is not epoch.step_of_class
        ) and _end_batch(run, epoch):
            return
        progress.post_batch_done = True

    if not progress.last_batch:
        _loader_ended_early(run)


def _after_each_batch(epoch: EpochSettings) -> list[Callable[[], object]]:
    """Return what is called after each batch: nothing in a plain run of one process."""
    run = epoch.run
    observers: list[Callable[[], object]] = [] if run.observers.guard is None else [run.observers.guard.after_batch]
    if epoch.several_processes:
        observers.append(functools.partial(agree_after_batch, run))
    return observers


def _end_batch(run: Run, epoch: EpochSettings) -> bool:
    """Do what may be due after a batch; return whether training is over."""
    progress, limits = run.progress, run.limits
    if limits.should_stop:
        # Here, all processes have agreed to stop.
        _log_between(run)
    if progress.last_batch and limits.has_next_epoch():
        run.data.train.begin_next(progress.epoch + 1)
    if progress.last_batch or progress.total_batches >= epoch.next_validation or limits.should_stop:
        validate_if_due(run)
        epoch.find_next_validation()
        if epoch.several_processes:
            agree_after_batch(run, validated=True)
    progress.post_batch_done = True
    if run.changed or type(run.module).training_step is not epoch.step_of_class:
        epoch.decide()
    # An engine's open accumulation is not in checkpoints: it is completed before the run stops.
    if run.runtime.engine.holds_gradients and not progress.last_batch:
        return False
    if limits.stop.agreed_signal is not None:
        raise Stopped(limits.stop.agreed_signal)
    return progress.global_step >= epoch.max_steps or (limits.should_stop and limits.stops_early())


def _log_between(run: Run) -> None:
    """Log the values of a step between two of the logging interval."""
    progress, every = run.progress, run.arguments.log_every_n_steps
    if every and run.window.is_end and progress.logged_step % every:
        run.logged.publish_step(progress.logged_step - 1, progress.epoch, to_loggers=True, loss=run.window.loss)


def _skip_none(epoch: EpochSettings, batch_idx: int) -> Any:
    """Skip a batch that is None; within an accumulation, or with other processes, like one without a loss."""
    warn_once("no batch", "The train_dataloader yielded None: such a batch is skipped.")
    run, window = epoch.run, epoch.run.window
    is_alone = window.is_start and window.is_end and not epoch.several_processes
    if run.module.automatic_optimization and not is_alone:
        epoch.train_step(None, batch_idx)
    else:
        window.skipped_batches += 1
    return None


# -- what the loop needs for each batch: decided once, and again when the run changes


class EpochSettings:
    """The functions and settings that the loop over batches needs."""

    __slots__ = (
        "accumulation_size", "log_every_n_steps", "max_steps", "next_validation", "run", "several_processes",
        "step_of_class", "step_schedulers", "tail_size", "tail_start", "train_step", "transfer",
    )  # fmt: skip

    def __init__(self, run: Run) -> None:
        self.run = run
        self.several_processes = run.runtime.several_processes
        self.decide()

    def decide(self) -> None:
        """Choose the functions of a step and read the limits, for the present state of the run."""
        run = self.run
        run.changed = False
        run.runtime.follow_saves(functools.partial(setattr, run, "changed", True))
        run.observers.pace.drop_sample()
        # A zero_grad of the user may keep gradients, or set them to zeros, and the optimizer steps with zeros too.
        cleared_by_user = not run.module.automatic_optimization or overrides(
            run.module, LightningModule, "optimizer_zero_grad"
        )
        run.window.keeps_gradients = run.runtime.engine.may_keep_gradients(
            run.optimizers, cleared_by_user=cleared_by_user
        )
        # Batches of an accumulation; batches of the epoch's last accumulation, and the index of its first batch.
        self.accumulation_size, self.tail_size, self.tail_start = schedule.plan_windows(run)
        self.train_step = _train_step(run)
        # Moves a batch to the device; None if batches need not be moved.
        self.transfer = None if takes_iterator(run.module.training_step) else make_transfer(run, run.data.train)
        self.step_schedulers = run.observers.watch("lr_scheduler_step", schedule.step)
        # 0 means never: ``step % inf`` is never 0.
        self.log_every_n_steps = run.arguments.log_every_n_steps or math.inf
        self.max_steps = run.limits.max_steps
        # A program may assign another one to the class.
        self.step_of_class = type(run.module).training_step
        self.find_next_validation()

    def find_next_validation(self) -> None:
        """Find the number of batches after which validation or a scheduler with a monitored value may be due."""
        run = self.run
        monitored = any(config.reduce_on_plateau and config.interval == "step" for config in run.schedulers)
        always = monitored or run.data.validation_schedule.per_batch
        self.next_validation = 0 if always else run.data.validation_schedule.next_batch(run)

    def begin_batch(self, batch_idx: int, is_last: bool) -> None:
        """Set the position of the batch in its accumulation; first decide again if something has changed."""
        run, window, index = self.run, self.run.window, self.run.progress.accumulation_index
        window.is_start = index == 0
        # The loader gives more batches than its length, after the last accumulation: plan accumulations for them, too.
        if run.changed or (window.is_start and batch_idx > self.tail_start):
            self.decide()
        window.is_end = is_last or index + 1 >= self.accumulation_size
        window.size = self.accumulation_size if batch_idx < self.tail_start else self.tail_size

    def count_batch(self, is_last: bool) -> None:
        """Count a batch that is done."""
        progress = self.run.progress
        progress.batch += 1
        progress.total_batches += 1
        progress.last_batch, progress.post_batch_done = is_last, False
        if self.run.window.is_end:
            progress.accumulation_index = 0
            progress.logged_step += 1
        else:
            progress.accumulation_index += 1


def _train_step(run: Run) -> Step:
    return run.observers.watch("run_training_batch", make_step(run))


def make_step(run: Run) -> Step:
    """Return the function that trains on one batch."""
    step, steps = _step_of_kind(run), run.runtime.steps
    if steps is None:
        return step
    end_step = steps.end_step

    def step_and_end(batch: Any, batch_idx: int) -> Any:
        outputs = step(batch, batch_idx)
        end_step("train", batch, run.window.is_last_batch)
        return outputs

    return step_and_end


def _step_of_kind(run: Run) -> Step:
    """Return the function of a step: automatic, with a closure, or manual."""
    if not run.module.automatic_optimization:
        return _manual_step(run)
    if not run.optimizers:
        return _step_without_optimizer(run)
    follow_arguments(run)  # A callback may have changed them.
    if _needs_closure(run):
        return _closure_step(run)
    step = _automatic_step(run)
    whole = whole_step(run, step)
    return step if whole is None else _whole_step(run, whole)


def _needs_closure(run: Run) -> bool:
    """Return whether the user's code takes part in a step: in ``optimizer_step``, the optimizer, or its wrapper."""
    return (
        overrides(run.module, LightningModule, "optimizer_step")
        or run.runtime.engine.steps_by_program
        or needs_closure(run.optimizers[0])
        or "step" in vars(run.wrapped_optimizers[0])
        # Code that hooks optimizer.step expects Lightning's order: gradients are computed inside the step.
        or (run.conventions.optimizer_computes_gradients and is_watched(run.optimizers[0]))
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


def _whole_step(run: Run, whole: Callable[[Any, int], tuple[Any, bool]]) -> Step:
    """Forward, backward, clipping and the optimizer's step as one graph, which returns what ``training_step`` does."""
    progress, window, hooks, graphs = run.progress, run.window, run.hooks, recorded_steps(run.compiled, run.module)
    logged, context = run.logged, run.logged.context_of(STEPS["training_step"])

    def train_step(batch: Any, batch_idx: int) -> Any:
        logged.context = context
        try:
            if graphs is not None:
                graphs.begin()
            output, in_graph = whole(batch, batch_idx)
        except Exception as error:
            annotate(error, "training_step", run.module, batch, batch_idx)
            raise
        if not in_graph:
            return output
        loss = window.loss = output if type(output) is Tensor else output["loss"]
        progress.global_step += 1
        if hooks.on_train_batch_end is hooks.on_train_batch_end_last is nothing:
            return None
        return _outputs(output, loss)

    return train_step


def _closure_step(run: Run) -> Step:
    """Pass forward and backward to ``optimizer_step`` as a closure, for optimizers that call it themselves."""
    progress, window = run.progress, run.window
    forward_backward, finish_gradients = _forward_backward(run), _finish_in_closure(run)
    in_step = _finishes_in_step(run)

    def train_step(batch: Any, batch_idx: int) -> Any:
        if not window.is_end:
            return forward_backward(batch, batch_idx)
        outputs: Any = None
        called, skipped = False, window.skipped_batches

        def compute() -> Tensor | None:
            nonlocal outputs, called
            if called and not window.is_start:
                raise computed_again(run)
            called = True
            with torch.enable_grad():  # Some optimizers turn gradients off around all of their step.
                outputs = forward_backward(batch, batch_idx, keep_outputs=True)
            if not in_step:
                finish_gradients()
            return outputs["loss"] if outputs else None

        _step_with_closure(run, batch_idx, compute)
        # The closure may have been called several times.
        window.skipped_batches = min(window.skipped_batches, skipped + 1)
        if not called:
            raise MisconfigurationException(
                f"The closure hasn't been executed: {_who_steps(run)} did not call it, so nothing was trained on "
                f"batch {batch_idx}.",
                fix="Pass it on: optimizer.step(closure=optimizer_closure).",
            )
        # Each call of optimizer_step counts as one step, for limits and schedules.
        progress.global_step += 1
        return outputs

    return train_step


def _finishes_in_step(run: Run) -> bool:
    """Return whether gradients are unscaled and clipped in the step of the wrapped optimizer, as in Lightning.

    Otherwise that is part of the closure, so that a user's ``optimizer_step`` finds them clipped.
    """
    return run.observers.guard is None and run.conventions.optimizer_computes_gradients


def _who_steps(run: Run) -> str:
    if overrides(run.module, LightningModule, "optimizer_step"):
        return f"{type(run.module).__name__}.optimizer_step()"
    return f"{type(run.optimizers[0]).__name__}.step()"


def _finish_in_closure(run: Run) -> Callable[[], None]:
    finish_gradients, guard = _finish_gradients(run), run.observers.guard
    return finish_gradients if guard is None else guard.in_closure(run.optimizers[0], finish_gradients)


def _step_with_closure(run: Run, batch_idx: int, compute: Callable[[], Tensor | None]) -> None:
    """Call ``optimizer_step`` with a closure that computes loss and gradients; it does not count as a step.

    A user's ``optimizer_step`` decides when gradients are computed. Before an optimizer steps, gradients are computed,
    as in a plain loop, and its first call of the closure returns the loss without computing it again. In programs
    written for Lightning the optimizer decides, too.
    """
    module, optimizer, progress = run.module, run.optimizers[0], run.progress
    computes_first = not (
        overrides(module, LightningModule, "optimizer_step") or run.conventions.optimizer_computes_gradients
    )
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
        # A user's optimizer_step may log before it calls the closure.
        run.logged.context = run.logged.context_of(STEPS["training_step"])
        module.optimizer_step(progress.epoch, batch_idx, run.wrapped_optimizers[0], closure)

    done = progress.global_step
    if run.observers.guard is None:
        run.window.finish_in_step = _finish_gradients(run) if _finishes_in_step(run) else None
        try:
            step()
        finally:
            run.window.finish_in_step = None
    else:
        run.observers.guard.one_step(optimizer, step)
    progress.global_step = done


def _manual_step(run: Run) -> Step:
    """The user's training_step computes gradients and steps."""
    hooks, logged, context = run.hooks, run.logged, run.logged.context_of(STEPS["training_step"])
    training_step = _training_step(run)
    graphs = recorded_steps(run.compiled, run.module)

    def train_step(batch: Any, batch_idx: int) -> Any:
        logged.context = context
        try:
            if graphs is not None:
                graphs.begin()
            output = training_step(batch, batch_idx)
        except Exception as error:
            annotate(error, "training_step", run.module, batch, batch_idx)
            raise
        for optimizer in run.wrapped_optimizers:
            optimizer.around_step.clear()
        if not isinstance(output, (Tensor, Mapping, NoneType)):
            raise MisconfigurationException(
                f"{type(run.module).__name__}.training_step returned {with_article(type(output))}.",
                fix="With manual optimization return the loss (a tensor), a dict, or nothing.",
            )
        if output is None or hooks.on_train_batch_end is hooks.on_train_batch_end_last is nothing:
            return {}
        if isinstance(output, Tensor):
            return {"loss": output.detach()}
        loss = output.get("loss")
        return {**output, "loss": loss.detach()} if isinstance(loss, Tensor) else output

    return train_step


def _step_without_optimizer(run: Run) -> Step:
    """Only forward and backward: configure_optimizers returned None."""
    forward_backward, progress, window, guard = _forward_backward(run), run.progress, run.window, run.observers.guard

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
    elif run.runtime.several_processes:
        forward_backward = _synced(run, forward_backward)
    return forward_backward if run.observers.guard is None else run.observers.guard.watching(forward_backward)


def _forward_backward_once(run: Run) -> micro_batches.ForwardBackward:
    """Return forward, zero_grad and backward of one batch, with everything looked up beforehand."""
    runtime, module, hooks, window = run.runtime, run.module, run.hooks, run.window
    logged, context = run.logged, run.logged.context_of(STEPS["training_step"])
    in_parts = micro_batches.enabled(run)
    training_step, backward = _training_step(run), _backward(run)
    if run.runtime.several_processes and not in_parts:
        backward = run.runtime.engine.with_exchange(backward, run.wrapped)
    optimizer = run.optimizers[0] if run.optimizers else None
    zero_grad = _zero_grad(run, optimizer)
    weighs = run.window.accumulate_grad_batches > 1 or runtime.several_processes or in_parts
    # A run resumed within an accumulation completes it first.
    weighs = weighs or run.progress.accumulation_index > 0
    # With several processes the last backward of an accumulation must not be skipped: the others wait for it.
    alone = not runtime.several_processes
    take_loss = None if run.observers.guard is None else run.observers.guard.take

    graphs = recorded_steps(run.compiled, run.module)
    clears_late = graphs is None
    if graphs is not None:

        def clear_gradients() -> None:
            hooks.on_before_zero_grad(optimizer)
            zero_grad()

        training_step = _replayed(training_step, clear_gradients, graphs, window)
        backward = _with_kept_gradients(backward, graphs, window, in_parts=in_parts)

    def forward_backward(batch: Any, batch_idx: int, keep_outputs: bool = False) -> Any:
        logged.context = context
        try:
            output = training_step(batch, batch_idx)
            loss = output if type(output) is Tensor else loss_of(output, run)
            window.loss = loss
            if window.is_start and clears_late:
                hooks.on_before_zero_grad(optimizer)
                zero_grad()
            if loss is None:
                return _no_loss(run)
            if weighs:
                loss = weighed(run, output, loss)
            if alone and type(output) is not Tensor and counts_for_nothing(output):
                # The mean over no samples contributes nothing, and its gradient may be nan.
                window.loss = None
                return {**output, "loss": torch.zeros_like(loss)}
            if take_loss is not None:
                take_loss(window.loss)
            hooks.on_before_backward(loss)
            backward(loss)
        except Exception as error:
            annotate(error, "training_step", module, batch, batch_idx)
            bad_loss.name_layer(error, run, batch, batch_idx)
            raise
        if not in_parts:
            hooks.on_after_backward()
        # Looked up after the step, because training_step may append a callback.
        if not keep_outputs and hooks.on_train_batch_end is hooks.on_train_batch_end_last is nothing:
            return None
        return _outputs(output, loss)

    return forward_backward


def _no_loss(run: Run) -> dict[str, Any]:
    """Skip a batch for which ``training_step`` returned None, unless its backward needs all processes."""
    if run.runtime.engine.needs_loss:
        raise loss_is_missing(run)
    if run.window.is_start:
        run.window.is_unweighed = False
    return {}


def _outputs(output: Any, loss: Tensor) -> dict[str, Any]:
    """Return what ``on_train_batch_end`` is given: the loss without its graph."""
    detached = loss.detach()
    return {**output, "loss": detached} if isinstance(output, dict) else {"loss": detached}


def _replayed(
    training_step: Callable[..., Any], clear_gradients: Callable[[], None], graphs: CudaGraphSteps, window: Window
) -> Callable[..., Any]:
    """Return a step that clears the gradients before forward: the replay of its graph overwrites them."""

    def replayed_step(batch: Any, batch_idx: int) -> Any:
        if window.is_start:
            clear_gradients()
            graphs.begin()
        return training_step(batch, batch_idx)

    return replayed_step


def _with_kept_gradients(
    backward: Callable[[Tensor], None], graphs: CudaGraphSteps, window: Window, *, in_parts: bool
) -> Callable[[Tensor], None]:
    """Return a backward that copies the gradients which later batches are added to."""

    def backward_and_keep(loss: Tensor) -> None:
        backward(loss)
        if in_parts or not (window.is_start and window.is_end):
            # The next replay of the graph overwrites them.
            graphs.keep_gradients()

    return backward_and_keep


def _synced(run: Run, forward_backward: micro_batches.ForwardBackward) -> micro_batches.ForwardBackward:
    """Exchange gradients in the last backward of an accumulation alone."""
    window, runtime = run.window, run.runtime

    def forward_backward_synced(batch: Any, batch_idx: int, keep_outputs: bool = False) -> Any:
        if not window.is_end:
            with runtime.no_sync(run.wrapped):
                return forward_backward(batch, batch_idx, keep_outputs)
        skipped = run.window.skipped_batches
        outputs = forward_backward(batch, batch_idx, keep_outputs)
        if run.window.skipped_batches != skipped or runtime.engine.missed_exchange:
            exchange_without_loss(run)
        return outputs

    return forward_backward_synced


def _training_step(run: Run) -> Callable[..., Any]:
    step = compiled_step(run, "training_step", with_batch_idx_if_taken(step_of(run, "training_step")))
    if run.runtime.several_processes or run.window.accumulate_grad_batches > 1 or run.progress.accumulation_index:
        step = _without_none(step)
    wrapped = run.module if micro_batches.exchanges_afterwards(run) else run.wrapped
    return run.runtime.bind(step, module=run.module, wrapped=wrapped, training=True)


def _without_none(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step without a loss for a batch that is None."""
    return lambda batch, batch_idx: None if batch is None else step(batch, batch_idx)


def _zero_grad(run: Run, optimizer: Any) -> Callable[[], None]:
    module, progress = run.module, run.progress
    if optimizer is None:
        return module.zero_grad
    if overrides(module, LightningModule, "optimizer_zero_grad"):
        engine = run.runtime.engine

        def zero_grad() -> None:
            module.optimizer_zero_grad(progress.epoch, progress.batch, optimizer)
            engine.drop_held_gradients(optimizer)

        return zero_grad
    return run.runtime.engine.make_zero_grad(optimizer)


def _backward(run: Run) -> Callable[[Tensor], None]:
    module, scaler = run.module, run.runtime.scaler
    if not overrides(module, LightningModule, "backward"):
        return run.runtime.engine.backward
    if scaler is None:
        return run.runtime.engine.with_backward(module.backward)
    return run.runtime.engine.with_backward(lambda loss: module.backward(scaler.scale(loss)))


# -- from the last backward of an accumulation to the step


def _finish_and_step(run: Run) -> tuple[Callable[[], None], Callable[..., Any]]:
    """Return what follows the last backward of an accumulation: finish the gradients, then step."""
    finish, guard = _finish_gradients(run), run.observers.guard
    step = run.runtime.engine.make_step(run.optimizers[0])
    return (finish, step) if guard is None else guard.around(run.optimizers[0], finish, step)


def _finish_gradients(run: Run) -> Callable[[], None]:
    """Return what happens between the last backward of an accumulation and the optimizer's step."""
    runtime, engine, module, hooks, progress = run.runtime, run.runtime.engine, run.module, run.hooks, run.progress
    optimizer, arguments, window = run.optimizers[0], run.arguments, run.window
    unscale, max_value = engine.unscale, arguments.gradient_clip_val or 0.0
    custom = any(overrides(module, LightningModule, name) for name in ("configure_gradient_clipping", "clip_gradients"))
    custom = custom or (engine.clips_by_program and max_value > 0)
    clip = engine.make_clip(arguments.gradient_clip_algorithm or "norm")
    algorithm = module.trainer.gradient_clip_algorithm if custom else None  # In the type that the Trainer shows.
    clips = max_value > 0 and not custom and not isinstance(optimizer, InBackward)
    rescales = not run.conventions.tail_divides_by_full_size

    def finish_gradients() -> None:
        if unscale is not None:
            unscale(optimizer)
        if window.weight is not None:
            weight = window.weight
            if runtime.several_processes:
                weight = runtime.data_parallel_reduce(1.0 * torch.as_tensor(weight, device=runtime.device))
            schedule.divide_gradients(run, optimizer, weight)
            window.weight = None
        elif rescales and progress.accumulation_index + 1 != window.size:
            # The losses were divided by another number of batches than the accumulation has: the data ended early, or
            # the checkpoint was saved in an accumulation of another size.
            engine.scale_gradients(optimizer, window.size / (progress.accumulation_index + 1))
        hooks.on_before_optimizer_step(optimizer)
        if clips and clip is not None:
            window.gradient_norm = clip(parameters_of(optimizer), max_value)
        elif custom:
            module.configure_gradient_clipping(
                optimizer, gradient_clip_val=arguments.gradient_clip_val, gradient_clip_algorithm=algorithm
            )

    return finish_gradients


# -- the edges of an epoch


def _skip_rest_of_epoch(epoch: EpochSettings) -> None:
    """End the epoch because on_train_batch_start returned -1. An open accumulation is dropped."""
    run, progress = epoch.run, epoch.run.progress
    if epoch.several_processes:
        skip_epoch(run)
    progress.last_batch = run.window.is_last_batch = progress.is_cut = True
    progress.cut_epochs += 1
    run.window.weight = None
    if run.schedulers:
        schedule.step(run, stepped=False)


def _loader_ended_early(run: Run) -> None:
    """Complete an epoch whose loader ended before its length said."""
    progress = run.progress
    if not (progress.batch or run.conventions.mistakes_are_warnings):
        # A fit that counts steps would never end. On several processes, others may have batches.
        endless = run.limits.max_epochs == math.inf and not run.runtime.several_processes
        name = f"Trainer.fit(), epoch {progress.epoch + 1}: train_dataloader"
        run.data.train.refuse_empty(name, is_last=endless)
    # Validation after the last batch, if it was due there, is done.
    was_due = progress.batch > 0 and run.data.validation_schedule.due(run)
    progress.last_batch = run.window.is_last_batch = True
    completes = progress.accumulation_index > 0 and run.module.automatic_optimization
    if completes:
        _complete_accumulation(run)
    if run.schedulers:
        schedule.step(run, stepped=completes)
    if completes and run.observers.guard is not None:
        run.observers.guard.after_batch()
    if completes or not was_due:
        validate_if_due(run)


def _complete_accumulation(run: Run) -> None:
    """Step on the gradients of an open accumulation, if anything steps, and count it."""
    progress = run.progress
    if run.optimizers:
        _step_late(run)
    progress.accumulation_index, progress.post_batch_done = 0, False
    progress.global_step += 1
    progress.logged_step += 1


def _step_late(run: Run) -> None:
    """Step on the gradients of the last batches, which were computed as if more would follow."""
    progress, optimizer = run.progress, run.optimizers[0]
    micro_batches.sync_gradients(run)()
    run.window.size = run.window.divisor_of(progress.batch - 1)
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
            raise make_error(
                RuntimeError,
                f"{type(optimizer).__name__}: its step computes the loss again, and the epoch ended before the length "
                f"of the train dataloader ({type(run.data.train.loaders[0]).__name__}) said.",
                fix="Correct its __len__.",
            )
        finish_gradients()
        finished = True

    _step_with_closure(run, progress.batch - 1, compute)


def _enough(run: Run) -> bool:
    return run.progress.global_step >= run.limits.max_steps or (run.limits.should_stop and run.limits.may_stop_early())


def _say_why_finished(run: Run) -> None:
    progress, arguments = run.progress, run.arguments
    if progress.global_step >= run.limits.max_steps:
        rank_zero_info(f"`Trainer.fit` stopped: `max_steps={arguments.max_steps}` reached.")
    elif progress.epochs_done >= run.limits.max_epochs:
        rank_zero_info(f"`Trainer.fit` stopped: `max_epochs={arguments.max_epochs}` reached.")
