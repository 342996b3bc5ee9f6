"""The state of a run as a checkpoint holds it, and the checkpoint from which a call starts."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor

from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import did_you_mean, nearest
from hasten._lib.rank_zero import rank_zero_warn, warn_once
from hasten._lib.tree import move_to
from hasten.arguments import Arguments
from hasten.checkpoint import contents
from hasten.checkpoint.allowed_types import objects_allowed
from hasten.checkpoint.contents import Phase
from hasten.checkpoint.metrics import load_metric_states, metric_states
from hasten.hooks import HOOKS, STEPS
from hasten.loggers.base import Logger
from hasten.loops.progress import Progress, TrainerFn
from hasten.loops.run import Run
from hasten.loops.saved_state import StepState
from hasten.module import LightningModule
from hasten.module.callback import Callback
from hasten.module.datamodule import LightningDataModule
from hasten.module.hparams import pickled, storable_hparams
from hasten.seed import collect_rng_state, restore_rng_state


class RunState:
    """The parts of a run that a checkpoint holds; ``checkpoint/contents.py`` says which, and in which phase.

    Args:
        run: the run.
        callbacks: the Trainer's.
        datamodule: the one of the run, or None.

    """

    precision_name = "MixedPrecision"

    def __init__(
        self, run: Run, callbacks: Iterable[Callback], datamodule: LightningDataModule | None
    ) -> None:
        self._run, self._runtime = run, run.runtime
        self._callbacks = callbacks
        self._datamodule = datamodule
        self.module: LightningModule = run.module
        self.scaler = run.runtime.scaler
        self.progress: Progress = run.progress
        self.epoch, self.global_step = run.progress.current_epoch, run.progress.global_step
        self.rank, self.world_size = run.runtime.global_rank, run.runtime.world_size

    def collect(self, *, weights_only: bool) -> dict[str, Any]:
        """Return a checkpoint; inside a batch, of the moment when the batch began.

        Raises:
            RuntimeError: a batch has begun, and a resumed run could not continue exactly.

        """
        with as_saved(self._run, weights_only=weights_only), self._run.averages.applied():
            return contents.collect(self, weights_only=weights_only)

    def restore(self, checkpoint: dict[str, Any], phase: Phase, source: str) -> None:
        """Restore one phase of a checkpoint."""
        contents.restore(self, checkpoint, phase, source=source)

    # -- weights and optimizers

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers; a run has them once ``configure_optimizers`` was called."""
        return self._run.optimizers

    @property
    def schedulers(self) -> list[Any]:
        """The schedulers and when they step."""
        return self._run.schedulers

    def weights(self) -> dict[str, Any]:
        """Return the weights of the user's module, or their averages where optimizers train with others."""
        state = self._runtime.state_dict(self.module)
        if not self._run.averages:
            return state
        # The module's own tensors hold the weights of training again in a moment.
        return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}

    def load_weights(self, weights: Mapping[str, Any], source: str) -> None:
        """Restore the weights of the user's module."""
        self._runtime.load_state_dict(self.module, weights, strict=self.module.strict_loading, source=source)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of an optimizer."""
        return self._runtime.optimizer_state(self.module, optimizer)

    def load_optimizer_state(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Restore the state of an optimizer."""
        self._runtime.load_optimizer_state(self.module, optimizer, state)

    def training_weights(self) -> list[Tensor] | None:
        """Return the weights training continues with, where ``weights`` are their averages."""
        return self._run.averages.training_weights()

    def load_training_weights(self, weights: list[Tensor] | None) -> None:
        """Put the weights training continues with into the module: these, or what the averages imply."""
        self._run.averages.resume_with(weights)

    def gradients_may_count(self) -> bool:
        """Return whether present gradients may be part of an optimizer's next step."""
        return self._run.gradients_may_count()

    # -- callbacks, hyper-parameters, datamodule

    def callback_states(self) -> dict[str, Any]:
        """Return the state of each callback that has one."""
        states = {callback.state_key: callback.state_dict() for callback in self._callbacks}
        return {key: state for key, state in states.items() if state}

    def load_callback_states(self, states: Mapping[str, Any]) -> None:
        """Restore the states of the callbacks; one with other arguments than in the checkpoint starts again."""
        unused = set(states)
        for callback in self._callbacks:
            key = callback.state_key if callback.state_key in states else type(callback).__qualname__
            if states.get(key) is not None:
                callback.load_state_dict(dict(states[key]))
                unused.discard(key)
        present = {type(callback).__qualname__ for callback in self._callbacks}
        missing = sorted(key for key in unused if key.partition("{")[0] not in present)
        if missing and self._run.state.fn == TrainerFn.FITTING:
            rank_zero_warn(
                f"The checkpoint holds the state of {', '.join(missing)}, which this Trainer does not have. "
                "Add them to Trainer(callbacks=[...]) to go on as before."
            )

    def hyper_parameters(self) -> Iterable[tuple[str, Any]]:
        """Return the hyper-parameters of module and datamodule as plain data."""
        for owner in (self.module, self._datamodule):
            if owner is None or not owner.hparams:
                continue
            kept, dropped = storable_hparams(owner.hparams)
            if dropped and objects_allowed():
                yield f"{owner.CHECKPOINT_HYPER_PARAMS_KEY}_pickled", pickled(owner.hparams, dropped)
            elif dropped:
                name = type(owner).__name__
                warn_once(
                    f"hparams dropped {name} {dropped}",
                    f"The hyper-parameters {dropped} of {name} are Python objects, which a checkpoint does not hold "
                    "(reading them would run code). Pass them to load_from_checkpoint(path, ...), or leave them out "
                    f"with save_hyperparameters(ignore={dropped}).",
                )
            yield owner.CHECKPOINT_HYPER_PARAMS_NAME, owner.__dict__.get("_hparams_name", "kwargs")
            yield owner.CHECKPOINT_HYPER_PARAMS_KEY, kept

    def datamodule_state(self) -> tuple[str, dict[str, Any]] | None:
        """Return the datamodule's state, if it has one."""
        state = {} if self._datamodule is None else self._datamodule.state_dict()
        return (type(self._datamodule).__qualname__, state) if state else None

    def load_datamodule_state(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the datamodule's state."""
        if self._datamodule is not None and type(self._datamodule).__qualname__ in checkpoint:
            self._datamodule.load_state_dict(checkpoint[type(self._datamodule).__qualname__])

    # -- what each process has of its own

    def process_state(self) -> dict[str, Any]:
        """Return what differs between processes: data position, values logged, metrics, random states."""
        run, progress = self._run, self.progress
        names = {id(child): name for name, child in run.module.named_modules()}
        # Values still on their way belong to the steps before this checkpoint.
        run.logged.deliver(wait=True)
        if run.guard is not None:
            run.guard.keep_state()
        data = None
        if run.train.loaded:
            data = run.train.state_dict(progress.batch, again=progress.begun and is_inside(run))
        return {
            "random": run.random_before_validation or collect_rng_state(),
            "data": data,
            "values": run.logged.state_dict(lambda metric: names.get(id(metric))),
            "window_weight": run.window_weight,
            "window_divisor": run.accumulation_divisor(),
            "toggled": _toggled(run.module),
            "metrics": self._metrics(),
            "guard": None if run.guard is None else run.guard.state_dict(),
            "batch_size": run.arguments.speed.batch_size,
            "fits": None if run.memory_plan is None else run.memory_plan.state_dict(),
            "loggers": [
                logger.state_dict() if isinstance(logger, Logger) else {} for logger in run.logged.loggers
            ],
            "evaluations": {
                source.stage: source.evaluations() for source in (run.validation,) if source.loaded
            },
        }

    def _metrics(self) -> dict[str, Any]:
        run = self._run
        states = run.metrics_before_validation
        if states is None:
            # An evaluation starts again when resumed: what its metrics accumulated would count twice.
            states = metric_states(run.module, leave_out=run.logged.evaluation_metrics())
        moved: dict[str, Any] = move_to(states, "cpu") if self.world_size > 1 else states
        return moved

    def load_metrics(self, state: dict[str, Any]) -> None:
        """Restore what torchmetrics have accumulated."""
        load_metric_states(self.module, state)

    def load_process_state(self, state: dict[str, Any]) -> None:
        """Restore this process's data position and values."""
        run = self._run
        if state["data"] is not None:
            run.train.load_state_dict(state["data"])
        rows = {row.name: row for row in HOOKS} | STEPS
        run.logged.load_state_dict(state["values"], rows, run.module.get_submodule)
        run.window_weight, run.resumed_divisor = state["window_weight"], state.get("window_divisor")
        run.resumed_guard = state.get("guard")
        _toggle_again(run.module, state.get("toggled") or {})
        if run.memory_plan is not None and state.get("fits") is not None:
            run.memory_plan.load_state_dict(state["fits"])
        for logger, kept in zip(run.logged.loggers, state.get("loggers", ()), strict=False):
            if isinstance(logger, Logger):
                logger.load_state_dict(kept)
        if not run.validation.is_off():
            for positions in state["evaluations"].values():
                run.validation.load_evaluations(positions)

    def load_random_state(self, state: dict[str, Any]) -> None:
        """Restore this process's random generators."""
        restore_rng_state(state["random"])

    def gather(self, data: Any) -> list[Any]:
        """Return every process's ``data``."""
        return self._runtime.gather_objects(data)


def _toggled(module: LightningModule) -> dict[str, tuple[bool, bool]]:
    """Return by name whether parameters require gradients now and before ``toggle_optimizer``, while it is active."""
    before = module.__dict__.get("_before_toggle", {})
    return {name: (p.requires_grad, before[p]) for name, p in module.named_parameters() if p in before}


def _toggle_again(module: LightningModule, states: Mapping[str, tuple[bool, bool]]) -> None:
    if not states:
        return
    module.__dict__["_before_toggle"] = before = {}
    for name, parameter in module.named_parameters():
        if name in states:
            parameter.requires_grad, before[parameter] = states[name]


# -- from which checkpoint a call starts


def resolve_path(trainer: Any, ckpt_path: Any) -> str | None:
    """Return the file that ``ckpt_path`` means; None to start from the beginning.

    Args:
        trainer: whose checkpoint callbacks know "best" and "last".
        ckpt_path: a path, "best", "last" or None.

    Raises:
        ValueError: "best" is asked for and unknown.
        FileNotFoundError: there is no such file.

    """
    if ckpt_path is None:
        return None
    text: str = os.fspath(ckpt_path)
    if text == "last":
        return _find_last(trainer)
    if text == "best":
        callback = trainer.checkpoint_callback
        best = getattr(callback, "best_model_path", "")
        if not best:
            raise ValueError(
                'ckpt_path="best": '
                + (
                    f"the {type(callback).__name__} is not configured to save the best model, or has not saved one "
                    "yet. Give it a monitor and save_top_k of at least 1, and fit first."
                    if callback is not None
                    else "`ModelCheckpoint` is not configured. Add callbacks=[ModelCheckpoint(monitor=...)] to the "
                    "Trainer, and fit first."
                )
            )
        return str(best)
    if "://" not in text and not os.path.exists(text):
        raise FileNotFoundError(f"ckpt_path={text!r}: {_not_found(text)}")
    return text


def _not_found(path: str) -> str:
    folder, name = os.path.split(path)
    if not folder and path.lower() in ("hpc", "registry"):
        return 'hasten writes no such checkpoint. Use "last" for the newest one, or give the path of a file.'
    if folder and not os.path.isdir(folder):
        parent = os.path.dirname(folder) or "."
        near = os.listdir(parent) if os.path.isdir(parent) else []
        return f"there is no folder {folder!r}.{did_you_mean(os.path.basename(folder), near)}"
    words = [] if folder else ["last", "best"]
    found = nearest(name, words) or nearest(name, os.listdir(folder or "."))
    known = "" if folder else ' Besides paths, "last" and "best" are known.'
    suggestion = "" if found is None else f" Did you mean {found!r}?"
    return f"there is no such file.{suggestion or known}"


def check_left_to_train(checkpoint: Mapping[str, Any], path: str, arguments: Arguments) -> None:
    """Warn if a checkpoint leaves nothing to train.

    Args:
        checkpoint: what the file holds, with hasten's counters.
        path: the file.
        arguments: the Trainer's.

    Raises:
        MisconfigurationException: it has trained for more epochs than the Trainer is to train for.

    """
    counters = (checkpoint.get("loops") or {}).get("fit")
    if counters is None:
        return
    flags = (counters["batch"], counters["epoch_ended"], counters["last_batch"], counters.get("begun"))
    begun = counters["epoch"] + any(flags)
    complete = counters["epoch"] + counters["epoch_ended"]
    step = counters["global_step"]
    epochs, steps = arguments.max_epochs, arguments.max_steps
    if epochs is not None and 0 <= epochs < begun:
        where = f"in its epoch {begun}" if begun > complete else f"at the end of its epoch {complete}"
        raise MisconfigurationException(
            f"ckpt_path={path!r}: the checkpoint was saved {where}, and Trainer(max_epochs={epochs}) ends before that. "
            f"To train on, write max_epochs={begun + (begun == complete)} or more, counted from the first epoch of the "
            "run."
        )
    done = None
    if epochs is not None and 0 <= epochs == complete:
        done = f"all of max_epochs={epochs}", f"max_epochs={epochs + 1}"
    elif steps is not None and 0 <= steps <= step:
        done = f"{step} steps, and max_steps={steps}", f"max_steps={step + 1}"
    if done is not None:
        rank_zero_warn(
            f"ckpt_path={path!r}: nothing is left to train: the checkpoint has trained {done[0]}. To train on, write "
            f"{done[1]} or more, counted from the beginning of the run."
        )


def _find_last(trainer: Any) -> str | None:
    found = [
        path
        for callback in trainer.checkpoint_callbacks
        if hasattr(callback, "find_last") and (path := callback.find_last(trainer)) is not None
    ]
    if not found:
        rank_zero_warn(
            'ckpt_path="last": there is none yet. No checkpoint will be loaded: the run starts from the beginning.'
        )
        return None
    local = [path for path in found if os.path.exists(path)]
    return str(max(local, key=os.path.getmtime) if local else found[0])


# -- a checkpoint saved inside a batch holds the state in which the batch began

# What is called between fetching a batch and moving the counters.
_CALLED_INSIDE = (
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "on_train_batch_start",
    "training_step", "on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward",
    "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step",
)  # fmt: skip
# Here no batch has begun, or the run is over.
_OUTSIDE = frozenset({"on_train_start", "on_train_epoch_start", "on_exception", "teardown"})


class BatchStart:
    """The state in which the current batch began, for runs whose hooks save checkpoints inside a batch.

    A resumed run computes that batch again from its beginning: the same weights, gradients and random numbers.

    Args:
        run: the run.

    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._state = StepState(run)
        self._metrics: dict[str, Any] = {}
        self._versions: list[int] = []

    def saved(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches, with the state of the run saved before each."""
        run = self._run
        for item in batches:
            # The gradients of a step that is done are cleared before they are needed.
            self._state.save(gradients=run.gradients_may_count())
            leave_out = run.logged.evaluation_metrics()
            self._metrics = metric_states(run.module, leave_out=leave_out, copied=True)
            self._versions = self._weight_versions()
            # A step may change its batch, and the resumed run needs it whole.
            run.train.replace_held(copy.deepcopy)
            yield item

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Have the run look as it did then; no tensor is written to, which a backward may still need."""
        run = self._run
        if self._versions != self._weight_versions() or run.averages:
            raise _refusal(run, "its weights have changed since the batch began")
        if run.guard is not None:
            bad_loss = run.arguments.on_bad_loss
            raise _refusal(run, f"what on_bad_loss={bad_loss!r} has found in it so far would count twice")
        with self._state.shown():
            run.metrics_before_validation, run.progress.begun = self._metrics, True
            try:
                yield
            finally:
                run.metrics_before_validation, run.progress.begun = None, False

    def _weight_versions(self) -> list[int]:
        trained = [p for o in self._run.optimizers for group in o.param_groups for p in group["params"]]
        return [parameter._version for parameter in (*trained, *self._run.module.parameters())]


def batch_start(run: Run) -> BatchStart | None:
    """Return what keeps the start of each batch, if some hook of the run saves a checkpoint inside one.

    Keeping it takes time in each step, so nobody else pays: the code of the hooks that are called inside a batch, and
    of the methods and functions that they call, is searched for ``save_checkpoint``.
    """
    owners = run.hooks.owners()
    return BatchStart(run) if any(_saves(owner, _CALLED_INSIDE, set()) for owner in owners) else None


def as_saved(run: Run, *, weights_only: bool) -> Any:
    """Return the context in which a checkpoint of the run is collected.

    Raises:
        RuntimeError: the batch in hand has begun, and the run could not go on exactly from there.

    """
    if weights_only or not is_inside(run):
        return nullcontext() if weights_only else _failed_in_first_batch(run)
    if run.batch_start is None:
        raise _refusal(run, "the random numbers and gradients it began with are gone")
    return run.batch_start.shown()


@contextmanager
def _failed_in_first_batch(run: Run) -> Iterator[None]:
    """Mark an epoch as begun where an exception ended it in its first batch: it is not to begin once more."""
    progress = run.progress
    failed = run.logged.context.row.name == "on_exception" and run.training and not run.is_last_batch
    before, progress.begun = (
        progress.begun,
        progress.begun or (failed and run.train.is_in_hand(progress.batch)),
    )
    try:
        yield
    finally:
        progress.begun = before


def is_inside(run: Run) -> bool:
    """Return whether a batch of training has begun and its counters have not moved yet."""
    progress = run.progress
    return (
        run.training
        and not progress.last_batch
        and run.logged.context.row.name not in _OUTSIDE
        and run.train.is_in_hand(progress.batch)
    )


def _refusal(run: Run, why: str) -> RuntimeError:
    return RuntimeError(
        f"Trainer.save_checkpoint() inside a batch (in {run.logged.context.row.name}, batch {run.progress.batch}): a "
        f"resumed run would have to begin the batch again, and {why}. Save in on_train_batch_end, or save the weights "
        "alone: save_checkpoint(path, weights_only=True)."
    )


# -- what the code of a hook calls


def _saves(owner: object, names: Iterable[str], seen: set[str], known: dict[str, Any] | None = None) -> bool:
    """Search the methods of ``owner``, and the functions ``known`` where they are called, by their names."""
    for name in names:
        if name in seen:
            continue
        seen.add(name)
        for found in (vars(owner).get(name, getattr(type(owner), name, None)), (known or {}).get(name)):
            function = _function_of(found)
            if function is not None:
                called = set(_names_in(function.__code__))
                if "save_checkpoint" in called or _saves(owner, called, seen, function.__globals__):
                    return True
    return False


def _function_of(found: Any) -> FunctionType | None:
    """Return the user's function in what was found under a name; None for anything else."""
    while not isinstance(found, FunctionType) or hasattr(found, "__wrapped__"):
        if isinstance(found, functools.partial):
            found = found.func
        elif hasattr(found, "__wrapped__"):
            found = found.__wrapped__
        elif hasattr(found, "__func__"):
            found = found.__func__
        else:
            return None
    return None if str(found.__module__).startswith(("hasten.", "torch.")) else found


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
