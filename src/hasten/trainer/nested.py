"""A call of a Trainer in a hook of another call: ``trainer.validate`` in a hook of a fit, for instance."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten._lib.errors import make_error
from hasten.loops.run import Run
from hasten.module.log_methods import log_into
from hasten.trainer.parts import close_loggers, let_log, to_host
from hasten.trainer.properties import TrainerView
from hasten.types import TrainerFn

if TYPE_CHECKING:
    from hasten import Trainer


def outer_call(trainer: Trainer, running: Trainer, fn: TrainerFn) -> OuterCall | None:
    """Return the call of ``running`` in whose hook ``trainer`` is called; None if the Trainer of a test stands in.

    Raises:
        RuntimeError: the same Trainer would fit within a fit, or evaluate within an evaluation.

    """
    if trainer is running and running._inside is fn is TrainerFn.FITTING:
        what = "Trainer.fit() is called inside of a fit of the same Trainer, in a hook."
        raise make_error(RuntimeError, what, fix="Call it after the first one, or use another Trainer.")
    if not isinstance(running, TrainerView) or running._run is None:
        return None
    outer = OuterCall(running, running._run)
    if trainer is running and fn is not TrainerFn.PREDICTING and outer.run.evaluation.stage == fn.value:
        name = fn.value
        what = f"Trainer.{name}() is called inside of a {name} loop of the same Trainer: their values would mix."
        raise make_error(RuntimeError, what, fix="Call it in a hook of training, or use another Trainer.")
    return outer


class OuterCall:
    """A call of a Trainer that is interrupted by another call in a hook: of the same Trainer, or one with its module.

    It keeps what the inner call replaces, and restores it. Otherwise the Trainer's state would be that of a finished
    validation for the rest of a fit, in which callbacks save no checkpoints. The module would log into the values of
    the other Trainer.
    """

    def __init__(self, trainer: Trainer, run: Run) -> None:
        self.trainer = trainer
        self.run = run
        self._of_trainer = {name: vars(trainer)[name] for name in _OF_A_CALL}
        self._of_logging = {name: vars(trainer._logged)[name] for name in _LOGGED_WITH}
        self._shown = {name: vars(trainer._logged)[name] for name in _SHOWN}
        self._model = trainer.strategy.model

    def release_inner(self, trainer: Trainer, run: Run, status: str) -> Exception | None:
        """Release what only the inner call of ``trainer`` used; return the first error of its loggers.

        Data, loggers and the module of the outer call stay as they are.
        """
        is_own = trainer is self.trainer
        for source in run.data.all():
            if source not in self.run.data.all():
                source.close()
        unwritten = None if is_own else close_loggers(trainer._called_loggers(), status)
        run.undo.close()
        run.window.loss = None
        if run.module is not self.run.module:
            to_host(run, failed=status != "success")
        if not is_own:
            run.runtime.teardown()
            let_log(trainer.callbacks, None)
        return unwritten

    def restore(self) -> None:
        """Give the Trainer back what it had. Logged values of both calls stay visible; of one name, the later value."""
        trainer, logged = self.trainer, self.trainer._logged
        vars(trainer).update(self._of_trainer)
        vars(logged).update(self._of_logging)
        for name, values in self._shown.items():
            setattr(logged, name, {**values, **vars(logged)[name]})
        trainer.strategy.model = self._model
        self.run.module.trainer = trainer
        log_into(self.run.module, logged)
        let_log(trainer.callbacks, self.run.module)


# Attributes of a Trainer that each call sets.
_OF_A_CALL = (
    "state",
    "_run",
    "_hooks",
    "_module",
    "_datamodule",
    "_reads_datamodule",
    "_ckpt_path",
    "_between_batches",
    "_released",
    "_inside",
    "_outer",
)
# Of its logged values: where they are logged, and what is logged there.
_LOGGED_WITH = ("context", "batch", "batch_size", "loggers", "loss_report", "module", "loss_value")
_SHOWN = ("callback_values", "logger_values", "bar_values")
