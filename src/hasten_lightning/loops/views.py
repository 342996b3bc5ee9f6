"""``trainer.fit_loop`` and the other loops: counters and limits of a run under the names that programs use.

The Trainer finds ``FitLoop`` and the functions at the end by entry points.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hasten._lib import torch_private
from hasten._lib.errors import make_error
from hasten.data.combined import CombinedLoader
from hasten.data.loader_parts import has_state
from hasten.elsewhere import conventions
from hasten.loops.evaluate import evaluate_within
from hasten.report.summary import print_results
from hasten.runtime import ReadOnly
from hasten.trainer.settings import Setting
from hasten.types import RunningStage, TrainerFn, TrainerStatus
from hasten_lightning.loops.counts import (
    BatchCounts,
    Counters,
    LoopCounts,
    OptimizationCounts,
    OptimizerCounts,
    Processed,
    ReadyCompleted,
    SchedulerCounts,
    Started,
)
from hasten_lightning.loops.fetchers import data_fetcher

if TYPE_CHECKING:
    from hasten.arguments import Arguments
    from hasten.loops.run_data import StageData
    from hasten.optim import LRSchedulerConfig
    from hasten.trainer.properties import TrainerView
    from hasten.types import Dataloaders
    from hasten_lightning.internals.results import LoggerConnector

_MAX_EPOCHS = "Epochs to train; -1 for no limit."
_MIN_EPOCHS = "Epochs to train before a callback may stop the run."
_MAX_STEPS = "Optimizer steps to train; -1 for no limit."
_MIN_STEPS = "Optimizer steps to train before a callback may stop the run."


class Loop:
    """A loop of a Trainer, with counters and loops inside it that are saved and restored together.

    Subclasses may keep counters (of ``hasten_lightning.loops.counts``) and other loops in attributes.
    """

    _restarting: bool | None = None

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer

    trainer = ReadOnly["TrainerView"]("_trainer", "The Trainer that the loop belongs to.")
    is_resuming = ReadOnly[bool]("restarting", "Whether the loop continues from a checkpoint.")

    @property
    def restarting(self) -> bool:
        """Whether the loop continues from a checkpoint, and its first batch is still to come."""
        return bool(self._restarting)

    @restarting.setter
    def restarting(self, restarting: bool) -> None:
        self._restarting = restarting
        for part in self._parts().values():
            if isinstance(part, Loop):
                part.restarting = restarting

    def on_iteration_done(self) -> None:
        """Note that a batch is done: from here on the loop does not continue from a checkpoint."""
        self._restarting = False

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Return what the loop adds to a checkpoint itself; nothing by default."""
        return {}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Take what ``on_save_checkpoint`` returned."""

    def state_dict(self, destination: dict[str, Any] | None = None, prefix: str = "") -> dict[str, Any]:
        """Return the state of the loop and of those inside it, under ``prefix`` and the names of their attributes."""
        state = {} if destination is None else destination
        state[f"{prefix}state_dict"] = self.on_save_checkpoint()
        for name, part in self._parts().items():
            if isinstance(part, Loop):
                part.state_dict(state, f"{prefix}{name}.")
            else:
                state[prefix + name] = part.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Restore what ``state_dict`` returned; what is missing stays as it is."""
        for name, part in self._parts().items():
            if isinstance(part, Loop):
                part.load_state_dict(state_dict, f"{prefix}{name}.")
            elif prefix + name in state_dict:
                part.load_state_dict(state_dict[prefix + name])
        if f"{prefix}state_dict" in state_dict:
            self.on_load_checkpoint(state_dict[f"{prefix}state_dict"])
        self._restarting = True

    def _parts(self) -> dict[str, Any]:
        """Return the counters and loops inside this one, by name."""
        return {name: part for name, part in vars(self).items() if isinstance(part, (Loop, Counters))}


class LoopView(Loop):
    """A view of one loop of a Trainer: what it shows is read from the run, and its counters can be assigned."""

    # The attributes with counters and loops.
    _names: tuple[str, ...] = ()
    # What a subclass that replaces a loop may add, and a program assign: the run calls it.
    _called: frozenset[str] = frozenset()

    _arguments = ReadOnly["Arguments"]("_trainer._arguments", "The arguments of the Trainer.")
    _hook = ReadOnly[str]("_trainer._logged.context.row.name", "The hook or step that runs now; empty outside of them.")

    def _change(self, name: str, value: Any) -> None:
        self._trainer._change(name, value)

    def replaces(self, loop: LoopView | LoggerConnector) -> bool:
        """Return whether this may stand in the place of a loop: runs call all that its class adds to that one's."""
        classes = type(self).__mro__
        if not isinstance(loop, LoopView) or type(loop) not in classes or loop._trainer is not self._trainer:
            return False
        added = (vars(each) for each in classes[: classes.index(type(loop))])
        return {name for names in added for name in names if not name.startswith("__")} <= self._called

    def _parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def __setattr__(self, name: str, value: Any) -> None:
        ours = hasattr(type(self), name)
        is_ignored = callable(getattr(type(self), name, None)) and name not in self._called
        own = conventions.current().mistakes_are_warnings and not ours  # Packages keep attributes of their own here.
        is_settable = name.startswith("_") or isinstance(getattr(type(self), name, None), property | Setting)
        if own or (is_settable and not is_ignored):
            object.__setattr__(self, name, value)
            return
        known = "has" if ours else "has no"
        raise AttributeError(
            f"{type(self).__name__}.{name} cannot be assigned: the loop is a view of the run, and {known} this "
            "attribute. To change what happens in a run, override hooks of the module or write a callback."
        )


class SourceLoop(LoopView):
    """A view of a loop over the batches of one stage."""

    def __init__(self, trainer: TrainerView, source: str) -> None:
        super().__init__(trainer)
        self._name = source

    @property
    def skip(self) -> bool:
        """Whether there is nothing to do."""
        source = self._trainer._source(self._name)
        return source is None or source.is_off()

    def setup_data(self) -> None:
        """Load the data now."""
        if (source := self._trainer._source(self._name)) is not None:
            source.load()

    @property
    def _data_source(self) -> DataSource:
        return DataSource(self._trainer._source(self._name))


class AutomaticOptimization(LoopView):
    """``trainer.fit_loop.epoch_loop.automatic_optimization``."""

    _names = ("optim_progress",)

    @property
    def optim_progress(self) -> OptimizationCounts:
        """The optimizer's steps, in the run and in this epoch."""
        steps = _steps(self._trainer, self._hook, automatic=True)
        run, hook = self._trainer._run, self._hook
        # Gradients are cleared once in each accumulation, before its first backward.
        in_first = hook in _IN_STEP and run is not None and run.window.is_start
        begun = self._trainer.progress.accumulation_index > 0 or in_first
        done = begun and not (in_first and hook in ("training_step", "on_before_zero_grad"))
        ready = done or (in_first and hook == "on_before_zero_grad")

        def cleared(steps: int) -> Started:
            return Started(ready=steps + ready, completed=steps + done, started=steps + done)

        zero_grad = LoopCounts(cleared(steps.total.completed), cleared(steps.current.completed))
        return OptimizationCounts(OptimizerCounts(steps, zero_grad))


class ManualOptimization(LoopView):
    """``trainer.fit_loop.epoch_loop.manual_optimization``."""

    _names = ("optim_step_progress",)

    @property
    def optim_step_progress(self) -> LoopCounts:
        """The steps of all optimizers, in the run and in this epoch."""
        return _steps(self._trainer, self._hook, automatic=False)


class TrainingEpochLoop(LoopView):
    """``trainer.fit_loop.epoch_loop``."""

    _names = ("batch_progress", "scheduler_progress", "automatic_optimization", "manual_optimization", "val_loop")
    _called = frozenset({"_should_check_val_fx"})
    max_steps = Setting[int](_MAX_STEPS)
    min_steps = Setting[int | None](_MIN_STEPS)

    def __init__(self, trainer: TrainerView) -> None:
        super().__init__(trainer)
        self._val_loop = EvaluationLoop(trainer, TrainerFn.FITTING, RunningStage.VALIDATING, verbose=False)
        self._automatic, self._manual = AutomaticOptimization(trainer), ManualOptimization(trainer)

    val_loop = ReadOnly["EvaluationLoop"]("_val_loop", "The validation within fit.")
    automatic_optimization = ReadOnly[AutomaticOptimization]("_automatic", "The steps that the Trainer makes.")
    manual_optimization = ReadOnly[ManualOptimization]("_manual", "The steps that ``training_step`` makes.")
    global_step = ReadOnly[int]("_trainer.global_step", "Optimizer steps done in the run.")
    batch_idx = ReadOnly[int](
        "batch_progress.current.ready - 1",
        "Index of the batch in this epoch, the last one after it; -1 before the first.",
    )
    total_batch_idx = ReadOnly[int]("batch_progress.total.ready - 1", "The same, counted over the run.")

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_should_check_val_fx":
            self._trainer._decide_validation(lambda: bool(value(data_fetcher(self._trainer))))

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name == "_should_check_val_fx":
            self._trainer._decide_validation(None)

    @property
    def _batches_that_stepped(self) -> int:
        # The x axis of loggers: packages pass it to ``logger.log_metrics``, and some assign it.
        trainer, progress = self._trainer, self._trainer.progress
        in_validation = trainer.validating and trainer.state.fn is TrainerFn.FITTING
        after = progress.accumulation_index == 0 and (in_validation or self._hook == "on_train_batch_end")
        return progress.logged_step - after

    @_batches_that_stepped.setter
    def _batches_that_stepped(self, steps: int) -> None:
        self._trainer.progress.logged_step = steps

    @property
    def batch_progress(self) -> BatchCounts:
        """The batches of the run and of this epoch."""
        trainer, hook = self._trainer, self._hook
        progress = trainer.progress
        # The counters of a run move between the step and on_train_batch_end.
        ahead = trainer.training and hook in _IN_BATCH and progress.post_batch_done
        begun, after = ahead and hook != "on_train_batch_start", trainer.training and hook == "on_train_batch_end"

        def count(done: int, cut: int) -> Processed:
            # The batch at which on_train_batch_start ends an epoch is never complete.
            return Processed(
                ready=done + ahead + cut, completed=done - after, started=done + begun, processed=done + cut
            )

        return BatchCounts(
            count(progress.total_batches, progress.cut_epochs).tell(
                lambda _, value: setattr(progress, "total_batches", value)
            ),
            count(progress.batch, progress.is_cut).tell(lambda _, value: setattr(progress, "batch", value)),
            trainer.is_last_batch,
        )

    @property
    def scheduler_progress(self) -> SchedulerCounts:
        """The steps of learning-rate schedulers, in the run and in this epoch."""
        module = self._trainer._module
        # In manual optimization, the module makes them.
        configs = [] if module is None or not module.automatic_optimization else self._trainer.lr_scheduler_configs
        total = sum(torch_private.steps_of_scheduler(config.scheduler) for config in configs)
        current = sum(map(self._current_steps, configs))
        return SchedulerCounts(ReadyCompleted(total, total), ReadyCompleted(current, current))

    @property
    def done(self) -> bool:
        """Whether the batches of this epoch are done, or the run is to stop."""
        run = self._trainer._run
        return run is not None and (run.progress.last_batch or run.limits.finished())

    def _should_accumulate(self) -> bool:
        """Return whether the optimizer does not step after the current batch."""
        run = self._trainer._run
        return run is not None and not run.window.is_end

    def _accumulated_batches_reached(self) -> bool:
        """Return whether the number of batches begun in this epoch is a multiple of ``accumulate_grad_batches``."""
        return self.batch_progress.current.ready % self._trainer.accumulate_grad_batches == 0

    def _num_ready_batches_reached(self) -> bool:
        """Return whether the current batch is the last of its epoch."""
        batches = self.batch_progress
        return batches.is_last_batch or batches.current.ready == self._trainer.num_training_batches

    def _should_check_val_epoch(self) -> bool:
        """Return whether validation may be due in this epoch."""
        run = self._trainer._run
        due = run is not None and run.data.validation_schedule.due_in(run.progress.epoch)
        return due and self._trainer.enable_validation

    def _should_check_val_fx(self, data_fetcher: object = None) -> bool:
        """Return whether validation is due after the batch just done, by the arguments; programs assign other rules."""
        run = self._trainer._run
        return run is not None and run.data.validation_schedule.due_by_interval(run)

    def _current_steps(self, config: LRSchedulerConfig) -> int:
        progress = self._trainer.progress
        if config.interval == "step":
            return _steps_of_epoch(self._trainer) // config.frequency
        return int(progress.last_batch and (progress.epoch + 1) % config.frequency == 0)

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Return the x axis of loggers."""
        return {"_batches_that_stepped": self._batches_that_stepped}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        """Restore the x axis of loggers."""
        self._batches_that_stepped = state_dict.get("_batches_that_stepped", 0)


class FitLoop(SourceLoop):
    """``trainer.fit_loop``: limits and counters, which can be assigned.

    Example::

        >>> import hasten as L
        >>> trainer = L.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False)
        >>> trainer.fit_loop.max_epochs += 3  # a later fit continues
        >>> trainer.max_epochs
        5
        >>> trainer.fit_loop.epoch_progress.current.completed = 2
        >>> trainer.current_epoch
        2

    """

    _names = ("epoch_loop", "epoch_progress")
    max_epochs = Setting[int](_MAX_EPOCHS)
    min_epochs = Setting[int | None](_MIN_EPOCHS)
    max_steps = Setting[int](_MAX_STEPS, settable=False)
    min_steps = Setting[int | None](_MIN_STEPS, settable=False)

    def __init__(self, trainer: TrainerView) -> None:
        super().__init__(trainer, "train")
        self._epoch_loop = TrainingEpochLoop(trainer)
        # When a program last assigned a counter of epochs, and all of them then.
        self._counts: tuple[tuple[int, bool, int], Processed] | None = None

    epoch_loop = ReadOnly[TrainingEpochLoop]("_epoch_loop", "The batches of an epoch.")
    max_batches = ReadOnly[float]("_trainer.num_training_batches", "Batches of an epoch.")
    batch_idx = ReadOnly[int]("epoch_loop.batch_idx", "See the loop of the epoch.")
    total_batch_idx = ReadOnly[int]("epoch_loop.total_batch_idx", "See the loop of the epoch.")

    @property
    def epoch_progress(self) -> LoopCounts:
        """The epochs that have begun and that are complete."""
        trainer, progress = self._trainer, self._trainer.progress

        def now() -> tuple[int, bool, int]:
            return progress.epoch, progress.in_epoch, progress.total_batches

        # An epoch in which max_steps is reached counts as complete.
        completed = progress.current_epoch
        begun = progress.epoch + 1 if progress.in_epoch or progress.mid_epoch else completed
        processed = begun if progress.in_epoch and self._hook == "on_train_epoch_end" else completed

        def assign(name: str, value: int) -> None:
            if name not in ("completed", "processed"):
                return
            progress.epoch = value
            if not progress.in_epoch:
                progress.batch, progress.epoch_ended, progress.last_batch, progress.begun = 0, False, False, False
            self._counts = now(), replace(count)

        count = Processed(ready=begun, completed=completed, started=begun, processed=processed)
        if self._counts is not None and self._counts[0] == now():
            # In ``processed -= 1; completed -= 1`` the second counter must read what it was before the first statement.
            count = replace(self._counts[1])
        if trainer.training and self._hook == "on_train_epoch_start":
            count.started -= 1
        return LoopCounts(replace(count), count.tell(assign))

    def _should_accumulate(self) -> bool:
        """Return whether the optimizer does not step after the current batch."""
        return self.epoch_loop._should_accumulate()

    @property
    def done(self) -> bool:
        """Whether training is over: a limit is reached, or a request to stop takes effect."""
        run = self._trainer._run
        return run is not None and run.limits.finished()

    @property
    def skip(self) -> bool:
        """Whether there is nothing to train."""
        has_run = self._trainer._run is not None
        return self.done or self._trainer.limit_train_batches == 0 or (has_run and super().skip)

    @property
    def restarting(self) -> bool:
        """Whether this fit continues from a checkpoint within an epoch, and that epoch has not ended."""
        if self._restarting is not None:
            return self._restarting
        trainer = self._trainer
        run, progress = trainer._run, trainer.progress
        running = trainer.state.status is TrainerStatus.RUNNING and trainer.state.fn is TrainerFn.FITTING
        began = progress.total_batches - progress.batch
        return running and run is not None and not progress.epoch_ended and began < run.resume.from_batch

    @restarting.setter
    def restarting(self, restarting: bool) -> None:
        self._restarting = restarting
        self._epoch_loop.restarting = restarting

    @property
    def _combined_loader(self) -> CombinedLoader | None:
        source = self._trainer._source("train")
        if source is None or not source.loaded:
            return None
        loader = source.stream.loader
        return loader if isinstance(loader, CombinedLoader) else CombinedLoader(loader, "max_size_cycle")

    @_combined_loader.setter
    def _combined_loader(self, loader: None) -> None:
        """Ask for the loaders again; programs assign None before ``setup_data``."""
        progress = self._trainer.progress
        if loader is not None or (progress.mid_epoch and not progress.last_batch):
            what = f"Trainer.fit_loop._combined_loader = {type(loader).__name__}: only None, and between two epochs."
            raise make_error(AttributeError, what, fix="Give loaders to fit(), or assign None in on_train_epoch_end.")
        if (source := self._trainer._source("train")) is not None:
            source.reload()

    @property
    def _can_stop_early(self) -> bool:
        run = self._trainer._run
        return run is None or run.limits.may_stop_early()

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Return the states of loaders that can save their own."""
        source = self._trainer._source("train")
        if source is None or not source.loaded:
            return {}
        states = [loader.state_dict() for loader in source.streams() if has_state(loader)]
        return {"combined_loader": states} if states else {}


def _steps(trainer: TrainerView, hook: str, *, automatic: bool) -> LoopCounts:
    """Return the steps of the optimizers, in the run and in this epoch; none if the module optimizes otherwise."""
    module = trainer._module
    is_automatic = module is None or module.automatic_optimization
    counts = (trainer.progress.global_step, _steps_of_epoch(trainer)) if automatic == is_automatic else (0, 0)
    run = trainer._run
    if is_automatic:
        begun = hook in _IN_STEP and run is not None and run.window.is_end
    else:
        begun = hook == "on_before_optimizer_step"
    ahead = automatic == is_automatic and begun and trainer.training
    total, current = (ReadyCompleted(count + ahead, count) for count in counts)

    def assign(name: str, value: int) -> None:
        # Of automatic and manual optimization one always has no steps, and does not set those of the other to 0.
        if name == "completed" and value:
            trainer.progress.global_step = value

    # Those of an epoch follow from others.
    return LoopCounts(total.tell(assign), current)


def _steps_of_epoch(trainer: TrainerView) -> int:
    """Return the optimizer steps of this epoch, as far as they follow from its batches."""
    progress, run = trainer.progress, trainer._run
    if progress.steps_before >= 0 and (progress.in_epoch or progress.batch):
        return progress.global_step - progress.steps_before
    size = 1 if run is None else run.window.accumulate_grad_batches
    steps = math.ceil(progress.batch / size) if progress.last_batch else progress.batch // size
    return min(steps, progress.global_step)


# The hooks and steps between fetching a batch and moving the counters.
_IN_STEP = frozenset({
    "training_step", "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
})  # fmt: skip
_IN_BATCH = _IN_STEP | {"on_train_batch_start"}


class EvaluationLoop(SourceLoop):
    """``trainer.validate_loop``, ``trainer.test_loop`` and ``trainer.fit_loop.epoch_loop.val_loop``."""

    _names = ("batch_progress",)

    _called = frozenset({"_print_results"})

    def __init__(
        self,
        trainer: TrainerView,
        trainer_fn: TrainerFn,
        stage: RunningStage,
        verbose: bool = True,
        inference_mode: bool | None = None,
    ) -> None:
        super().__init__(trainer, {RunningStage.VALIDATING: "validation"}.get(stage, stage.value))
        self._in_fit = trainer_fn is TrainerFn.FITTING
        own = trainer._arguments.inference_mode
        if inference_mode not in (None, own):
            what = f"{type(self).__name__}(inference_mode={inference_mode}): the Trainer has inference_mode={own}."
            raise make_error(ValueError, what, fix=f"Write Trainer(inference_mode={inference_mode}).")

    @property
    def _stage(self) -> str:
        return {"validation": "validate"}.get(self._name, self._name)

    @property
    def _is_mine(self) -> bool:
        """Whether the run is a call that this loop is of: ``fit``, or an evaluation."""
        run = self._trainer._run
        return run is not None and (run.state.fn is TrainerFn.FITTING) == self._in_fit

    @property
    def _has_run(self) -> bool:
        """Whether the call has evaluated, or does now; the sanity check does not count."""
        run = self._trainer._run
        if run is None or not self._is_mine or self._trainer.sanity_checking:
            return False
        return self._stage in run.evaluation.batches or run.evaluation.stage == self._stage

    @property
    def batch_progress(self) -> LoopCounts:
        """The batches of this evaluation, or of the last one."""
        run, stage, mine = self._trainer._run, self._stage, self._is_mine
        done, hook = 0, ""
        if mine and run is not None:
            running = run.evaluation.stage == stage
            done = run.progress.evaluated - run.evaluation.began_at if running else run.evaluation.batches.get(stage, 0)
            hook = self._hook if running else ""
        ahead = hook.endswith(("_batch_start", "_step"))
        begun, after = hook.endswith("_step"), hook.endswith("_batch_end")

        def count(done: int) -> Processed:
            return Processed(
                ready=done + ahead + after, completed=done, started=done + begun + after, processed=done + after
            )

        progress = self._trainer.progress
        # Within fit, the total is that of all validations of an epoch.
        total = progress.evaluated - progress.evaluated_before if mine and self._in_fit else done
        is_last = bool(mine and done + 1 >= sum(self.max_batches) and (done or ahead or after))
        return BatchCounts(count(total), count(done), is_last)

    def run(self) -> list[dict[str, Tensor]]:
        """Evaluate within the call that runs, for instance before training begins; return what was logged by loader."""
        run, source = self._trainer.current_run, self._trainer._source(self._name)
        results = [] if source is None or source.is_off() else evaluate_within(run, source)
        # The calls of the Trainer return numbers, a loop what programs read with ``item()``.
        return [{name: torch.tensor(value) for name, value in result.items()} for result in results]

    @property
    def max_batches(self) -> list[float]:
        """Batches of each loader, in the sanity check those of it."""
        trainer = self._trainer
        return trainer.num_sanity_val_batches if trainer.sanity_checking else trainer._limits(self._name)

    @property
    def num_dataloaders(self) -> int:
        """Number of loaders."""
        return len(self.max_batches)

    @property
    def inference_mode(self) -> bool:
        """Whether the evaluation runs in inference mode, which one within fit does not; one setting for all others."""
        return self._trainer._arguments.inference_mode and not self._in_fit

    @inference_mode.setter
    def inference_mode(self, inference_mode: bool) -> None:
        if not self._in_fit:
            self._change("inference_mode", inference_mode)

    @property
    def verbose(self) -> bool:
        """Whether the values are printed when the evaluation has ended."""
        run = self._trainer._run
        return not self._in_fit and (run is None or run.evaluation.prints)

    @verbose.setter
    def verbose(self, verbose: bool) -> None:
        self._trainer.current_run.evaluation.prints = verbose

    @staticmethod
    def _print_results(results: list[dict[str, Any]], stage: str) -> None:
        print_results([{name: float(value) for name, value in result.items()} for result in results], stage)

    @property
    def _combined_loader(self) -> CombinedLoader | None:
        source = self._trainer._source(self._name)
        return None if source is None or not source.loaded else CombinedLoader(source.loaders, "sequential")

    @_combined_loader.setter
    def _combined_loader(self, loader: CombinedLoader | None) -> None:
        """Ask for the loaders again before the next evaluation."""
        if loader is not None:
            what = f"{type(self).__name__}._combined_loader = {type(loader).__name__}: only None."
            raise make_error(AttributeError, what, fix="Give loaders to the call, or return them from a hook.")
        if (source := self._trainer._source(self._name)) is not None:
            source.reload()


class DataSource:
    """Where the batches of a loop come from."""

    def __init__(self, source: StageData | None) -> None:
        self._source = source

    @property
    def instance(self) -> Dataloaders:
        """The loaders that were given, or the object that has them; what is assigned is read the next time."""
        return None if self._source is None else self._source.given_or_owner()

    @instance.setter
    def instance(self, loaders: Dataloaders) -> None:
        if self._source is not None:
            self._source.given = loaders

    def is_defined(self) -> bool:
        """Return whether loaders were given, or the module or datamodule has some."""
        return self._source is not None and self._source.has_data()

    def dataloader(self) -> Any:
        """Return the loader, or the list of several."""
        loaders = [] if self._source is None else self._source.loaders
        return loaders[0] if len(loaders) == 1 else loaders


class PredictionLoop(EvaluationLoop):
    """``trainer.predict_loop``."""

    def __init__(self, trainer: TrainerView, inference_mode: bool | None = None) -> None:
        super().__init__(trainer, TrainerFn.PREDICTING, RunningStage.PREDICTING, inference_mode=inference_mode)

    @property
    def batch_progress(self) -> LoopCounts:
        """The batches of this prediction, or of the last one."""
        counts = super().batch_progress
        return LoopCounts(counts.total, counts.current)

    @property
    def return_predictions(self) -> bool:
        """Whether the call returns predictions."""
        run = self._trainer._run
        return run is not None and run.evaluation.returns_predictions

    @property
    def predictions(self) -> list[Any]:
        """The predictions by batch; with several loaders by loader and batch."""
        run = self._trainer._run
        return [] if run is None else run.evaluation.kept_predictions or []

    @property
    def _predictions(self) -> list[list[Any]]:
        kept = self.predictions
        return kept if self.num_dataloaders > 1 else [kept]

    @_predictions.setter
    def _predictions(self, predictions: list[list[Any]]) -> None:
        # Programs assign it during the run to free memory. The run keeps its lists, so their contents are replaced.
        for kept, by_batch in zip(self._predictions, predictions, strict=False):
            kept[:] = by_batch

    @property
    def epoch_batch_indices(self) -> list[list[list[int]]]:
        """Dataset indices of the samples of each batch, by loader and batch."""
        run = self._trainer._run
        return [] if run is None else run.evaluation.epoch_batch_indices

    @property
    def current_batch_indices(self) -> list[int]:
        """Dataset indices of the samples of the current batch."""
        run = self._trainer._run
        return [] if run is None else run.evaluation.batch_indices


def validate_loop(trainer: TrainerView) -> EvaluationLoop:
    """Return ``trainer.validate_loop``."""
    return EvaluationLoop(trainer, TrainerFn.VALIDATING, RunningStage.VALIDATING)


def test_loop(trainer: TrainerView) -> EvaluationLoop:
    """Return ``trainer.test_loop``."""
    return EvaluationLoop(trainer, TrainerFn.TESTING, RunningStage.TESTING)


def predict_loop(trainer: TrainerView) -> PredictionLoop:
    """Return ``trainer.predict_loop``."""
    return PredictionLoop(trainer)


def evaluation_loop(trainer: TrainerView) -> EvaluationLoop:
    """Return the loop of the evaluation that the call makes: in ``fit`` that of validation."""
    fn = trainer.state.fn
    if fn is TrainerFn.FITTING:
        return trainer.fit_loop.epoch_loop.val_loop
    if fn is TrainerFn.VALIDATING:
        return trainer.validate_loop
    if fn is TrainerFn.TESTING:
        return trainer.test_loop
    what = "The `Trainer._evaluation_loop` property isn't defined: no call evaluates."
    raise make_error(RuntimeError, what, fix="Ask within or after fit, validate or test.")
