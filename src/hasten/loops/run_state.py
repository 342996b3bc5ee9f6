"""The run as a checkpoint sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hasten._lib.rank_zero import rank_zero_warn
from hasten.checkpoint import contents
from hasten.checkpoint.allowed_types import objects_allowed
from hasten.checkpoint.metrics import metric_states, on_device
from hasten.hooks import HOOKS, STEPS
from hasten.loggers.base import Logger
from hasten.loops.inside_batch import is_inside
from hasten.loops.run import Run
from hasten.loops.states import TrainerFn
from hasten.module import LightningModule
from hasten.module.callback import Callback
from hasten.module.datamodule import LightningDataModule
from hasten.module.hparams import pickled, plain_hparams


class Snapshot:
    """The parts of a run that a checkpoint holds; see ``checkpoint.contents``."""

    def __init__(
        self, run: Run, callbacks: Iterable[Callback], datamodule: LightningDataModule | None
    ) -> None:
        self._run = run
        self._callbacks = callbacks
        self._datamodule = datamodule
        self.module = run.module
        self.optimizers = run.optimizers
        self.schedulers = run.schedulers
        self.scaler = run.runtime.scaler
        self.precision_name = "MixedPrecision"
        self.epoch = run.progress.current_epoch
        self.global_step = run.progress.global_step
        self.progress = run.progress

    def weights(self) -> dict[str, Any]:
        """Return the weights of the user's module, whatever wraps it."""
        return self._run.runtime.state_dict(self.module)

    def callback_states(self) -> dict[str, Any]:
        """Return the state of each callback that has one."""
        states = {callback.state_key: callback.state_dict() for callback in self._callbacks}
        return {key: state for key, state in states.items() if state}

    def load_callback_states(self, states: Mapping[str, Any]) -> None:
        """Give each callback its state back; one with other arguments than then starts anew."""
        left = set(states)
        for callback in self._callbacks:
            key = callback.state_key if callback.state_key in states else type(callback).__qualname__
            if states.get(key) is not None:
                callback.load_state_dict(dict(states[key]))
                left.discard(key)
        kinds = {type(callback).__qualname__ for callback in self._callbacks}
        # One whose arguments changed is there, and starts anew.
        missing = sorted(key for key in left if key.partition("{")[0] not in kinds)
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
            kept, dropped = plain_hparams(owner.hparams)
            if dropped and objects_allowed():
                yield f"{owner.CHECKPOINT_HYPER_PARAMS_KEY}_pickled", pickled(owner.hparams, dropped)
            elif dropped:
                _say_dropped(type(owner).__name__, dropped)
            yield owner.CHECKPOINT_HYPER_PARAMS_NAME, owner.__dict__.get("_hparams_name", "kwargs")
            yield owner.CHECKPOINT_HYPER_PARAMS_KEY, kept

    def datamodule_state(self) -> tuple[str, dict[str, Any]] | None:
        """Return the datamodule's state, if it has one."""
        if self._datamodule is None:
            return None
        state = self._datamodule.state_dict()
        return (type(self._datamodule).__qualname__, state) if state else None

    def load_datamodule_state(self, checkpoint: Mapping[str, Any]) -> None:
        """Give the datamodule its state back."""
        if self._datamodule is not None and type(self._datamodule).__qualname__ in checkpoint:
            self._datamodule.load_state_dict(checkpoint[type(self._datamodule).__qualname__])

    def own_state(self) -> dict[str, Any]:
        """Return what each process has for itself."""
        run = self._run
        names = {id(child): name for name, child in run.module.named_modules()}
        # Values still on their way belong to the steps before this checkpoint.
        run.logged.deliver(wait=True)
        if run.guard is not None:
            run.guard.keep_state()
        return {
            "random": run.random_before_validation or contents.random_state(),
            "data": self._place() if run.train.loaded else None,
            "values": run.logged.state_dict(lambda metric: names.get(id(metric))),
            "window_weight": run.window_weight,
            "window_divisor": run.window_divisor(),
            "toggled": _toggled(run.module),
            "metrics": self._metrics(),
            "guard": None if run.guard is None else run.guard.state_dict(),
            "batch_size": run.arguments.speed.batch_size,
            "fits": None if run.fits is None else run.fits.state_dict(),
            "loggers": [
                logger.state_dict() if isinstance(logger, Logger) else {} for logger in run.logged.loggers
            ],
            "evaluations": {
                source.stage: source.evaluations() for source in (run.validation,) if source.loaded
            },
        }

    def _place(self) -> dict[str, Any]:
        progress = self._run.progress
        return self._run.train.state_dict(progress.batch, again=progress.begun and is_inside(self._run))

    def _metrics(self) -> dict[str, Any]:
        run = self._run
        states = run.metrics_before_validation
        if states is None:
            # An evaluation starts again when resumed: what its metrics gathered would count twice.
            states = metric_states(run.module, leave_out=run.logged.evaluation_metrics())
        return on_device(torch.device("cpu"), states) if run.runtime.world_size > 1 else states

    def restore_own_state(self, mine: dict[str, Any]) -> Callable[[], None]:
        """Restore this process's data position and values; return what restores its random generators."""
        run = self._run
        if mine["data"] is not None:
            run.train.load_state_dict(mine["data"])
        rows = {row.name: row for row in HOOKS} | STEPS
        run.logged.load_state_dict(mine["values"], rows, run.module.get_submodule)
        run.window_weight, run.resumed_divisor = mine["window_weight"], mine.get("window_divisor")
        run.resumed_guard = mine.get("guard")
        _toggle_again(run.module, mine.get("toggled") or {})
        if run.fits is not None and mine.get("fits") is not None:
            run.fits.load_state_dict(mine["fits"])
        for logger, state in zip(run.logged.loggers, mine.get("loggers", ()), strict=False):
            if isinstance(logger, Logger):
                logger.load_state_dict(state)
        if not run.validation.is_off():
            for state in mine["evaluations"].values():
                run.validation.load_evaluations(state)
        return contents.restore_random_state(mine["random"])

    def may_have_gradients(self) -> bool:
        """Return whether gradients that are there now may be part of an optimizer's next step."""
        # With manual optimization nobody knows whether the user's next step begins with zero_grad.
        return self._run.gradients_may_count()

    def gather(self, mine: Any) -> list[Any]:
        """Return every process's ``mine``."""
        return self._run.runtime.gather_objects(mine)


def _toggled(module: LightningModule) -> dict[str, tuple[bool, bool]]:
    """Return by name whether parameters require gradients now and before ``toggle_optimizer``, if it is in force."""
    before = module.__dict__.get("_before_toggle", {})
    return {name: (p.requires_grad, before[p]) for name, p in module.named_parameters() if p in before}


def _toggle_again(module: LightningModule, states: Mapping[str, tuple[bool, bool]]) -> None:
    if not states:
        return
    before = {p: states[name][1] for name, p in module.named_parameters() if name in states}
    for name, parameter in module.named_parameters():
        if name in states:
            parameter.requires_grad = states[name][0]
    module.__dict__["_before_toggle"] = before


_said: set[str] = set()


def _say_dropped(owner: str, names: list[str]) -> None:
    key = owner + ",".join(names)
    if key not in _said:
        _said.add(key)
        rank_zero_warn(
            f"The hyper-parameters {names} of {owner} are Python objects, which a checkpoint does not hold (reading "
            "them would run code). Pass them to load_from_checkpoint(path, ...), or leave them out with "
            f"save_hyperparameters(ignore={names})."
        )
