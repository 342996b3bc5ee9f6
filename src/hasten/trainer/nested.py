"""A call of a Trainer in a hook of another one: what the other one had is its own again afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hasten.loops.run import Run
from hasten.trainer.parts import let_log

if TYPE_CHECKING:
    from hasten import Trainer


class OuterCall:
    """The call of a Trainer in one of whose hooks another call is made.

    Without it callbacks would save and stop no more in the rest of a fit, because the Trainer's state would be that of
    a validation that has ended.
    """

    def __init__(self, trainer: Trainer, run: Run) -> None:
        self.run = run
        self._trainer = trainer
        self._of_trainer = {name: vars(trainer)[name] for name in _OF_A_CALL}
        self._of_logging = {name: vars(trainer._logged)[name] for name in _LOGGED_WITH}
        self._shown = {name: vars(trainer._logged)[name] for name in _SHOWN}
        self._model = trainer.strategy.model

    def go_on(self) -> None:
        """Give the Trainer back what it had; the values of both calls stay visible, of one name the latest."""
        trainer, logged = self._trainer, self._trainer._logged
        vars(trainer).update(self._of_trainer)
        vars(logged).update(self._of_logging)
        for name, values in self._shown.items():
            setattr(logged, name, {**values, **vars(logged)[name]})
        trainer.strategy.model = self._model
        let_log(trainer.callbacks, self.run.module)


# Attributes of a Trainer that each call sets.
_OF_A_CALL = (
    "state", "_run", "_hooks", "_module", "_datamodule", "_reads_datamodule", "_ckpt_path", "_between_batches",
    "_released", "_inside", "_outer",
)  # fmt: skip
# Of its logged values: where they are logged, and what is logged there.
_LOGGED_WITH = ("context", "batch", "batch_size", "loggers", "loss_report", "module", "loss_value")
_SHOWN = ("callback_values", "logger_values", "bar_values")
