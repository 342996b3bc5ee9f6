"""Collect the state of a run for a checkpoint, restore it, and find the checkpoint from which a call starts."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from hasten._lib import FIELD_FORMAT, VERSION
from hasten._lib.errors import MisconfigurationException, add_note, make_error
from hasten._lib.files import modified
from hasten._lib.names import defined_by_program
from hasten._lib.observers import set_during
from hasten._lib.rank_zero import rank_zero_warn
from hasten._lib.tree import map_tensors, move_to, parameters_of
from hasten.arguments import Arguments
from hasten.checkpoint import contents, processes
from hasten.checkpoint.contents import Phase
from hasten.checkpoint.files import not_found, present
from hasten.elsewhere import conventions
from hasten.hooks import HOOKS, STEPS
from hasten.loggers.base import Logger
from hasten.loops.run import Earlier, Run, has_batch_in_hand, is_inside_batch
from hasten.loops.saved_state import refuse_inside
from hasten.machine.stacks import passes_program
from hasten.module.callback import Callback
from hasten.module.datamodule import LightningDataModule
from hasten.module.hparams import StoredHyperParameters
from hasten.module.module import ToggledParameters
from hasten.record.history import History
from hasten.seed import RandomGenerators, collect_rng_state
from hasten.types import TrainerFn

if TYPE_CHECKING:
    from hasten.checkpoint.files import CheckpointIO
    from hasten.runtime import Runtime
    from hasten.trainer import Trainer

_SCALER_KEY = "MixedPrecision"


class RunState:
    """The contents of a run's checkpoint: ``collect`` returns them, and ``restore`` restores them phase by phase.

    The keys are the keys of Lightning's checkpoints, and ``"hasten"`` for what makes a resumed run exact.
    """

    def __init__(self, run: Run, callbacks: Iterable[Callback], datamodule: LightningDataModule | None) -> None:
        self._run, self._callbacks, self._datamodule = run, callbacks, datamodule

    def collect(self, *, weights_only: bool) -> dict[str, Any]:
        """Return everything a run needs to continue exactly; all processes call it together.

        Inside a batch this is the state in which the batch began; if that is not known, a RuntimeError is raised.
        """
        run = self._run
        averaged = run.averages.applied() if run.averages.optimizers else nullcontext()
        with _as_saved(run, weights_only=weights_only), averaged:
            own = run.runtime.own_methods.get("lightning_module_state_dict")
            weights = run.runtime.strategy.state.state_dict(run.module) if own is None else own()
            if not isinstance(weights, dict):
                _check_is_dict(run, run.module, weights)
            if run.averages.optimizers:
                # The module's own tensors will hold the training weights again in a moment.
                weights = map_tensors(Tensor.clone, weights)
            checkpoint: dict[str, Any] = {
                "epoch": run.progress.current_epoch,
                "global_step": run.progress.global_step,
                "pytorch-lightning_version": FIELD_FORMAT,
                "hasten_version": VERSION,
                "state_dict": weights,
                "loops": {"fit": run.progress.state_dict()},
            }
            if not weights_only:
                states: dict[str, Any] = {one.state_key: one.state_dict() or {} for one in self._callbacks}
                for callback, state in zip(self._callbacks, states.values(), strict=False):
                    if not isinstance(state, dict):
                        _check_is_dict(run, callback, state)
                states = run.runtime.strategy.sharding.states_to_checkpoint(states)
                checkpoint["callbacks"] = {key: state for key, state in states.items() if state}
                checkpoint |= self._collect_training()
            checkpoint |= StoredHyperParameters((run.module, self._datamodule)).state_dict()
            if self._datamodule is not None and (state := self._datamodule.state_dict()):
                checkpoint[type(self._datamodule).__qualname__] = state
            return checkpoint

    def restore(self, checkpoint: dict[str, Any], phase: Phase, source: str) -> None:
        """Restore one phase of a checkpoint whose entries ``check_entries`` has checked; ``source`` names its file."""
        with _named(source):
            self._restore(checkpoint, phase, source)

    def _restore(self, checkpoint: dict[str, Any], phase: Phase, source: str) -> None:
        module, progress = self._run.module, self._run.progress
        if phase is Phase.MODEL:
            strategy = self._run.runtime.strategy
            strategy.state.gradient_buckets = (checkpoint.get("hasten") or {}).get("gradient_buckets")
            if defined_by_program(strategy, "load_model_state_dict"):
                strategy.load_model_state_dict(checkpoint, strict=module.strict_loading)
            else:
                strategy.state.load_state_dict(
                    module, checkpoint["state_dict"], strict=module.strict_loading, source=source
                )
            name = type(self._datamodule).__qualname__
            if self._datamodule is not None and name in checkpoint:
                self._datamodule.load_state_dict(checkpoint[name])
            self._restore_callbacks(checkpoint.get("callbacks") or {})
        elif phase is Phase.POSITION:
            if "fit" in checkpoint.get("loops", {}):
                progress.load_state_dict(checkpoint["loops"]["fit"])
        elif phase is Phase.TRAINING:
            self._restore_training(checkpoint, source)
        elif ranks := (checkpoint.get("hasten") or {}).get("ranks"):
            state = contents.state_of(ranks, self._run.runtime.global_rank, self._share())
            if state is None:
                shares = processes.by_share(ranks)
                state = shares[self._share()[0] % len(shares)]
            RandomGenerators().load_state_dict(state["random"])

    # -- optimizers, schedulers, gradients

    def _collect_training(self) -> dict[str, Any]:
        run, runtime = self._run, self._run.runtime
        state_of = runtime.own_methods.get("optimizer_state", runtime.strategy.state.optimizer_state)
        checkpoint: dict[str, Any] = {
            "optimizer_states": [state_of(one) for one in run.optimizers],
            "lr_schedulers": [contents.scheduler_state(config.scheduler) for config in run.schedulers],
        }
        if runtime.scaler is not None:
            runtime.engine.update_scale()
            checkpoint[_SCALER_KEY] = runtime.scaler.state_dict()
        if (own := runtime.own_methods.get("state_dict")) is not None:
            checkpoint[type(runtime.precision).__qualname__] = own()
        gradients = None
        if run.window.gradients_may_count():
            if not _begins_batch_again(run):
                # Inside a batch, the parameters show the gradients with which it began.
                runtime.engine.sync_gradients(run.module)
            gradients = runtime.strategy.state.collect_gradients(run.module, run.optimizers)
        entries: dict[str, Any] = {
            "gradients": gradients,
            # One text, because each number of a checkpoint costs a call when it is written.
            "optimizer_arguments": json.dumps([_made_with(one) for one in run.optimizers]),
            "ranks": runtime.strategy.gather_objects(self._collect_process()),
        }
        if (buckets := runtime.strategy.state.gradient_buckets) is not None:
            entries["gradient_buckets"] = buckets
        # Where the weights are averages, those that training continues with.
        if run.averages.training_weights is not None:
            entries["training_weights"] = [
                runtime.strategy.sharding.to_checkpoint(weight) for weight in run.averages.training_weights
            ]
        if run.observers.levers is not None:
            # A run that continues from here uses the same speed-ups, whatever is measured or cached by then.
            entries["levers"] = list(run.observers.levers)
        entries["history"] = run.observers.history.state_dict(run.resume.earlier.rows)
        return {**checkpoint, "hasten": entries}

    def _restore_training(self, checkpoint: dict[str, Any], source: str) -> None:
        run, runtime = self._run, self._run.runtime
        rank = runtime.global_rank
        if not run.conventions.mistakes_are_warnings:
            _check_number("optimizers", checkpoint["optimizer_states"], run.optimizers, source)
            _check_number("lr_schedulers", checkpoint["lr_schedulers"], run.schedulers, source)
        if runtime.strategy.lightning_restore_optimizer:
            if defined_by_program(runtime.strategy, "load_optimizer_state_dict"):
                runtime.strategy.load_optimizer_state_dict(checkpoint)
            else:
                for optimizer, state in zip(run.optimizers, checkpoint["optimizer_states"], strict=False):
                    runtime.strategy.state.load_optimizer_state(optimizer, state)
        for config, state in zip(run.schedulers, checkpoint["lr_schedulers"], strict=False):
            contents.load_scheduler(config.scheduler, state)
        _restore_precision(runtime, checkpoint)
        entries = checkpoint.get("hasten") or {}
        # Not the state of an earlier fit that this one does not continue.
        run.observers.history = History()
        if entries.get("history") is not None:
            run.observers.history.load_state_dict(entries["history"])
        if entries:
            if not run.conventions.warns_of_settings:
                _warn_of_arguments(run.optimizers, json.loads(entries.get("optimizer_arguments", "[]")), source)
            if entries["gradients"] is not None:
                runtime.strategy.state.restore_gradients(run.module, run.optimizers, entries["gradients"])
            state = contents.state_of(entries["ranks"], rank, self._share())
            if state is not None:
                self._restore_process(state)
            else:
                self._restore_moved(entries["ranks"], source)
        weights = entries.get("training_weights")
        if weights is not None:
            targets = parameters_of(*run.averages.optimizers)
            as_sharded = runtime.strategy.sharding.from_checkpoint
            weights = [as_sharded(each, target) for each, target in zip(weights, targets, strict=True)]
        run.averages.resume_with(weights)

    # -- what differs between processes: data position, values logged, metrics, random states

    def _collect_process(self) -> dict[str, Any]:
        run, progress = self._run, self._run.progress
        names = {id(child): name for name, child in run.module.named_modules()}
        # First: it passes the values on their way to the loggers, whose code may draw random numbers.
        values = run.logged.state_dict(lambda metric: names.get(id(metric)))
        if run.observers.guard is not None:
            run.observers.guard.keep_state()
        earlier = run.resume.earlier
        metrics = earlier.metrics
        if metrics is None:
            # An evaluation starts again when resumed: what its metrics accumulated would count twice.
            metrics = run.metrics.state_dict()
        # Nothing is left of an epoch whose last batch is done, although it may have been left with a batch in hand.
        consumed = None if progress.last_batch else progress.batch
        data = run.data.train.state_dict(consumed, again=_begins_batch_again(run))
        evaluations = run.data.validation.state_dict()
        changes = earlier.changes
        if changes is None:
            changes = run.module_changes.state_dict(evaluating=bool(run.evaluation.stage))
        return {
            **({"changes": changes} if changes else {}),
            "share": self._share(),
            "random": earlier.random or RandomGenerators().state_dict(),
            "data": data[0] if data else None,
            "values": values,
            "window_weight": run.window.weight,
            "window_divisor": run.window.accumulation_divisor(),
            "toggled": ToggledParameters(run.module).state_dict(),
            "metrics": move_to(metrics, "cpu") if run.runtime.several_processes else metrics,
            "guard": None if run.observers.guard is None else run.observers.guard.state_dict(),
            "batch_size": run.arguments.speed.batch_size,
            "fits": None if run.memory_limits is None else run.memory_limits.state_dict(),
            "loggers": _states_of_loggers(run) if earlier.loggers is None else earlier.loggers,
            "logger_classes": _classes_of_loggers(run),
            "evaluations": {run.data.validation.stage: evaluations} if evaluations else {},
        }

    def _restore_process(self, state: dict[str, Any], *, moved: bool = False) -> None:
        run, progress = self._run, self._run.progress
        run.metrics.load_state_dict(state.get("metrics", {}))
        if state["data"] is not None:
            (batch,) = run.data.train.load_state_dict([state["data"]], moved=moved)
            if progress.mid_epoch and not progress.last_batch:
                # Of larger batches, or with more processes, fewer are done; maybe none.
                progress.batch, progress.begun = batch, progress.begun or not batch
        rows = {row.name: row for row in HOOKS} | STEPS
        goes_on = progress.mid_epoch and not progress.last_batch
        run.logged.load_state_dict(state["values"], rows, run.module.get_submodule, epoch_goes_on=goes_on)
        run.window.weight, run.window.resumed_divisor = state["window_weight"], state.get("window_divisor")
        run.resume.guard = state.get("guard")
        ToggledParameters(run.module).load_state_dict(state.get("toggled") or {})
        run.module_changes.load_state_dict(state.get("changes") or {})
        if run.memory_limits is not None and state.get("fits") is not None:
            run.memory_limits.load_state_dict(state["fits"])
        _restore_loggers(run, state)
        if run.logged.row_is_due:
            run.logged.publish_step(progress.logged_step - 1, progress.epoch, to_loggers=True)
        if not run.data.validation.is_off():
            for positions in state["evaluations"].values():
                run.data.validation.load_state_dict(positions)

    def _restore_moved(self, ranks: list[dict[str, Any]], source: str) -> None:
        """Restore this process's part of the states of another number of processes, and say what is not exact."""
        run, share = self._run, self._share()
        shares, lost = processes.by_share(ranks), set[str]()

        def join_metrics(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            metrics, not_joined = run.metrics.joined(states)
            lost.update(not_joined)
            return metrics

        self._restore_process(processes.joined(shares, share, join_metrics), moved=True)
        if run.window.weight is not None:
            # Gradients of weighed losses add up. Each process has the mean, and all together are to have the sum.
            for parameter in parameters_of(*run.optimizers):
                if parameter.grad is not None:
                    parameter.grad.mul_(len(shares) / share[1])
        inexact = []
        if not_known := run.data.train.stream.not_known:
            inexact.append(
                f"the {run.data.train.stream.name} continues in a new order, after as many batches as each process had "
                f"done: the samples they had are not known, because {not_known}"
            )
        if lost:
            inexact.append(f"the metrics {sorted(lost)} start again, because only they can join what they gathered")
        if inexact:
            rank_zero_warn(
                f"{source} was written by {len(shares)} process(es) that share the data and is resumed on {share[1]}: "
                f"{'; '.join(inexact)}."
            )

    def _share(self) -> tuple[int, int]:
        """Return which part of the data this process reads, and of how many."""
        strategy = self._run.runtime.strategy
        return strategy.data_parallel_rank, strategy.data_parallel_size

    # -- callbacks

    def _restore_callbacks(self, states: Mapping[str, Any]) -> None:
        """Restore the states of the callbacks; one with other arguments than in the checkpoint starts again."""
        unused = set(states)
        for callback in self._callbacks:
            key = callback.state_key if callback.state_key in states else type(callback).__qualname__
            if states.get(key) is not None:
                callback.load_state_dict(dict(states[key]))
                unused.discard(key)
        present = {type(callback).__qualname__ for callback in self._callbacks}
        missing = sorted(key for key in unused if key.partition("{")[0] not in present)
        if missing and self._run.state.fn is TrainerFn.FITTING:
            rank_zero_warn(
                f"The checkpoint holds the state of {', '.join(missing)}, which this Trainer does not have.",
                fix="Add them to Trainer(callbacks=[...]) to continue as before.",
            )


def _check_is_dict(run: Run, owner: object, state: object) -> None:
    """Refuse a state from which no run could resume."""
    if not (isinstance(state, Mapping) or run.conventions.mistakes_are_warnings):
        what = f"{type(owner).__name__}.state_dict() returned {reprlib.repr(state)}, which no run can resume from."
        raise make_error(TypeError, what, fix="Return a dict: that of super().state_dict(), or names and values.")


@contextmanager
def _named(source: str) -> Iterator[None]:
    """Name the file in errors about what is in it; those of the program's own code keep their type."""
    why = "it is damaged, or was saved by another program"
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        if passes_program(error):
            add_note(error, f"{source} was being restored.")
            raise
        what = f"{source} cannot be restored ({type(error).__name__}: {error}): {why}."
        raise make_error(ValueError, what, fix="Use an earlier checkpoint.") from error
    except (ValueError, RuntimeError) as error:
        if source not in str(error):
            # An error that says what to do knows better.
            known = getattr(error, "fix", "")
            add_note(error, f"{source} was being restored." if known else f"{source} was being restored: {why}.")
        raise


def _as_saved(run: Run, *, weights_only: bool) -> AbstractContextManager[None]:
    """Return the context in which a checkpoint is collected; refuse where a batch has begun and is lost."""
    if weights_only:
        return nullcontext()
    if run.logged.context.row.name == "on_exception":
        return _after_exception(run)
    if not is_inside_batch(run):
        return nullcontext()
    if run.resume.batch_start is None:
        raise refuse_inside(run, "the random numbers and gradients it began with are gone")
    return run.resume.batch_start.shown()


def _begins_batch_again(run: Run) -> bool:
    """Return whether a run resumed from the state that is shown begins with the batch in hand."""
    return run.progress.begun and not run.progress.last_batch and has_batch_in_hand(run)


def _after_exception(run: Run) -> AbstractContextManager[None]:
    """Return what shows the state in which a batch that failed began; where that is lost, say what is not exact."""
    progress, start = run.progress, run.resume.batch_start
    # Before the first hook of a batch, the batch in hand may be the only one of the epoch before.
    if not has_batch_in_hand(run) or (start is None and run.window.is_last_batch):
        return nullcontext()
    why = "the random numbers and gradients it began with are gone" if start is None else start.why_lost()
    if start is not None and not why:
        return start.shown()
    rank_zero_warn(
        f"A checkpoint is saved after an exception in batch {progress.batch} of epoch {progress.epoch + 1}; a run "
        f"resumed from it repeats that batch, but {why}, so what the batch had already done is applied twice."
    )
    # The epoch does not begin again, if it ended in its first batch.
    return set_during(progress, begun=True)


def _check_number(what: str, stored: list[Any], present: list[Any], source: str) -> None:
    if not present:
        # Of a module without optimizers, Lightning writes one empty state.
        stored = [state for state in stored if state]
    if len(stored) != len(present):
        raise make_error(
            ValueError,
            f"{source} holds the state of {len(stored)} {what}, and configure_optimizers() gives {len(present)}.",
            fix=f"Resume with the configure_optimizers() the run was started with, {contents.WEIGHTS_ALONE}",
        )


# How a step is computed, which differs between machines.
_COMPUTING = ("capturable", "differentiable", "foreach", "fused")


def _made_with(optimizer: Optimizer) -> dict[str, Any]:
    """Return the numbers and words an optimizer was made with, whatever schedules have changed since."""
    made = getattr(optimizer, "defaults", {}).items()
    return {key: value for key, value in made if isinstance(value, (bool, int, float, str)) and key not in _COMPUTING}


def _warn_of_arguments(optimizers: Iterable[Optimizer], saved: Iterable[Mapping[str, Any]], source: str) -> None:
    """Say which arguments of configure_optimizers are others than those the checkpoint continues with."""
    for optimizer, before in zip(optimizers, saved, strict=False):
        now = _made_with(optimizer)
        if changed := [key for key in now if before.get(key, now[key]) != now[key]]:
            kept, given = (", ".join(f"{key}={each[key]!r}" for key in changed) for each in (before, now))
            rank_zero_warn(
                f"{type(optimizer).__name__}: configure_optimizers gives {given}, and the run in {source} goes on with "
                f"its own {kept}.",
                fix="To use the new ones, set them in optimizer.param_groups in on_train_start, or load the weights "
                "alone.",
            )


# -- from which checkpoint a call starts


def _has_own_places(io: CheckpointIO) -> bool:
    """Return whether a program reads checkpoints itself: then only it knows what is where."""
    return bool(defined_by_program(io.wrapped or io, "load_checkpoint"))


def resolve_path(trainer: Trainer, ckpt_path: str | os.PathLike[str] | None, *, fits: bool = True) -> str | None:
    """Return the file that ``ckpt_path`` means: a path, or the "best" or "last" one of the trainer's callbacks.

    For a fit, None means "last" if an earlier fit failed and ``OnExceptionCheckpoint`` saved it.
    """
    if ckpt_path is None:
        if not fits or not _failed_before(trainer):
            return None
        ckpt_path = "last"
    text = _text_of(ckpt_path)
    if text == "last":
        last = find_last(trainer)
        if last is None:
            if not (fits or conventions.current().mistakes_are_warnings):
                # A fit is often started with "last" from the first time on; scores of no checkpoint mislead.
                raise make_error(
                    FileNotFoundError,
                    'ckpt_path="last": the callbacks of this Trainer have saved none.',
                    fix="Pass the path of a checkpoint, or leave ckpt_path out to use the weights of the model.",
                    argument="ckpt_path",
                )
            rank_zero_warn(
                'ckpt_path="last": there is none yet. No checkpoint will be loaded: the run starts from the beginning.'
            )
        return last
    if text == "best":
        callback = trainer.checkpoint_callback
        best = getattr(callback, "best_model_path", "")
        if not best:
            why, fix = _why_no_best(trainer)
            raise make_error(ValueError, f'ckpt_path="best": {why}.', fix=fix, argument="ckpt_path")
        _warn_of_several(trainer, str(best))
        if getattr(callback, "monitor", "") is None:
            rank_zero_warn(
                f'ckpt_path="best": the {type(callback).__name__} has no monitor, so the newest counts as the best, '
                f"{best}.",
                fix='Write ModelCheckpoint(monitor="val_loss"), or ckpt_path="last" with save_last=True.',
            )
        return str(best)
    if "://" not in text and not present(text) and not _has_own_places(trainer.strategy.checkpoint_io):
        raise make_error(
            FileNotFoundError, f"ckpt_path={text!r}: {not_found(Path(text), 'last', 'best')}", argument="ckpt_path"
        )
    return text


def _why_no_best(trainer: Trainer) -> tuple[str, str]:
    """Return the reason why no best checkpoint exists, and the fix."""
    callback = trainer.checkpoint_callback
    if trainer.fast_dev_run:
        return "fast_dev_run saves no checkpoints", "Pass a path, or leave fast_dev_run out."
    if callback is None:
        why = "`ModelCheckpoint` is not configured: enable_checkpointing is False"
        return why, "Leave it out, write Trainer(callbacks=[ModelCheckpoint(monitor=...)]), and fit first."
    kind = type(callback).__name__
    if getattr(callback, "save_top_k", 1) == 0:
        return f"{kind}(save_top_k=0) is not configured to save the best model", "Use save_top_k=1, and fit first."
    if not hasattr(callback, "best_model_path"):
        return f"the {kind} keeps no best model", "Write Trainer(callbacks=[ModelCheckpoint(monitor=...)])."
    why = f"the {kind} of this Trainer has not saved a checkpoint yet"
    return why, "Call fit of this Trainer first, or pass the path of a checkpoint."


def _text_of(given: Any) -> str:
    if not isinstance(given, (str, os.PathLike)):
        what = f"ckpt_path={reprlib.repr(given)}: use a path, 'best', 'last' or None, not {type(given).__name__}."
        raise make_error(TypeError, what, argument="ckpt_path")
    if not (text := os.fspath(given)):
        what = 'ckpt_path="": a ModelCheckpoint\'s best_model_path is empty until it has saved a checkpoint.'
        raise make_error(ValueError, what, fix="Pass a path, or None.", argument="ckpt_path")
    return text


def _warn_of_several(trainer: Trainer, best: str) -> None:
    """Say which checkpoint counts as the best where several callbacks have one."""
    if (count := len(trainer.checkpoint_callbacks)) > 1:
        rank_zero_warn(
            f'ckpt_path="best": there are multiple `ModelCheckpoint` callbacks ({count}), and the first has {best}.',
            fix="For that of another, pass ckpt_path=callback.best_model_path.",
        )


def check_left_to_train(checkpoint: Mapping[str, Any], path: str, arguments: Arguments) -> None:
    """Warn if a checkpoint leaves nothing to train; refuse one that has trained for more epochs than asked for."""
    counters = (checkpoint.get("loops") or {}).get("fit")
    if counters is None:
        return
    complete = counters["epoch"] + counters["epoch_ended"]
    is_begun = counters["batch"] or counters["last_batch"] or counters.get("begun")
    begun = counters["epoch"] + bool(is_begun or counters["epoch_ended"])
    epochs, steps, done = arguments.max_epochs, arguments.max_steps, counters["global_step"]
    counted = "or more, counted from the beginning of the run."
    if epochs is not None and 0 <= epochs < begun:
        raise MisconfigurationException(
            f"ckpt_path={path!r}: the checkpoint was saved in or after epoch {begun}, and "
            f"Trainer(max_epochs={epochs}) ends before that.",
            fix=f"To train on, write max_epochs={max(begun, complete + 1)} {counted}",
            argument="ckpt_path",
        )
    if epochs is not None and 0 <= epochs == complete:
        trained, write = f"all of max_epochs={epochs}", f"max_epochs={epochs + 1}"
    elif steps is not None and 0 <= steps <= done:
        trained, write = f"{done} steps, and max_steps={steps}", f"max_steps={done + 1}"
    else:
        return
    rank_zero_warn(
        f"ckpt_path={path!r}: nothing is left to train: the checkpoint has trained {trained}.",
        fix=f"To train on, write {write} {counted}",
    )


def _failed_before(trainer: Trainer) -> bool:
    """Return whether a fit that failed has left a file with which the next one begins, and say so."""
    callbacks = [callback for callback in trainer.checkpoint_callbacks if getattr(callback, "resumes_fit", False)]
    paths = [] if trainer.fast_dev_run else [callback.find_last(trainer) for callback in callbacks]
    if not any(paths):
        return False
    rank_zero_warn(
        f"Trainer.fit() without ckpt_path: an earlier fit failed and left {next(filter(None, paths))}. The run "
        "continues from the newest checkpoint.",
        fix="Say ckpt_path='last' to be explicit, or remove the file to start from the beginning.",
    )
    return True


def find_last(trainer: Trainer) -> str | None:
    """Return the newest "last" checkpoint of the trainer's callbacks; None if there is none."""
    paths = [
        path
        for callback in trainer.checkpoint_callbacks
        if hasattr(callback, "find_last") and (path := callback.find_last(trainer)) is not None
    ]
    return str(max(paths, key=modified)) if paths else None


# -- a checkpoint saved inside a validation holds what makes a resumed run repeat the validation


def before_validation(run: Run) -> Earlier:
    """Return the state with which a run begins a validation again."""
    run.logged.deliver(wait=True)
    return Earlier(
        random=collect_rng_state(),
        metrics=run.metrics.state_dict(copied=True),
        loggers=_states_of_loggers(run),
        rows=run.observers.history.mark(),
        changes=run.module_changes.state_dict(),
    )


def _restore_precision(runtime: Runtime, checkpoint: Mapping[str, Any]) -> None:
    if runtime.scaler is not None and _SCALER_KEY in checkpoint:
        runtime.scaler.load_state_dict(checkpoint[_SCALER_KEY])
    stored = checkpoint.get(type(runtime.precision).__qualname__)
    if stored is not None and defined_by_program(runtime.precision, "load_state_dict"):
        runtime.precision.load_state_dict(stored)


def _states_of_loggers(run: Run) -> list[dict[str, Any]]:
    return [logger.state_dict() if _restores(logger) else {} for logger in run.logged.loggers]


def _restores(logger: object) -> bool:
    # A ``state_dict`` alone is a method of the program's own, for something else.
    return isinstance(logger, Logger) and logger.__class__.load_state_dict is not Logger.load_state_dict


def _classes_of_loggers(run: Run) -> list[str]:
    return [type(logger).__qualname__ for logger in run.logged.loggers]


def _restore_loggers(run: Run, state: Mapping[str, Any]) -> None:
    """Restore each logger from the state of one of its class: they may be others than before, in another order."""
    # Earlier files do not name the classes: there, the order tells.
    classes = state.get("logger_classes") or _classes_of_loggers(run)
    left: dict[str, list[dict[str, Any]]] = {}
    for name, kept in zip(classes, state.get("loggers") or (), strict=False):
        left.setdefault(name, []).append(kept)
    for logger in run.logged.loggers:
        if (states := left.get(type(logger).__qualname__)) and _restores(logger):
            logger.load_state_dict(states.pop(0))
