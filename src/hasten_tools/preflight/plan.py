"""The length of the fit: batches, steps, epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.loops.run import Run


@dataclass(frozen=True)
class Length:
    """The length of a fit in one process; infinite where it is not known."""

    batches: float  # Training batches of an epoch.
    steps: float  # Optimizer steps of an epoch.
    epochs: float  # Epochs of the fit.
    total_steps: float  # Optimizer steps of the fit.
    # Batches of all epochs after which an optimizer steps, on each of the processes: the steps that
    # ``log_every_n_steps`` counts. A limit of ``max_steps`` comes on top.
    logged_steps: float
    validations: float  # How often the fit validates.
    processes: int = 1  # How many share the batches in the fit itself.

    @classmethod
    def of(cls, run: Run, processes: int = 1) -> Length:
        """Return the length of the fit that a run is the beginning of."""
        batches = float(run.data.train.limit)
        steps = math.ceil(batches / run.window.accumulate_grad_batches) if math.isfinite(batches) else math.inf
        epochs = float(run.limits.max_epochs)
        logged = epochs * _logged_steps(run, batches, processes)
        total = min(steps * epochs if math.isfinite(steps) else math.inf, float(run.limits.max_steps))
        if math.isfinite(total) and math.isfinite(steps) and steps:
            epochs = min(epochs, math.ceil(total / steps))
        validates = not run.data.validation.is_off()
        schedule = run.data.validation_schedule
        validations = 0.0
        if validates and math.isfinite(epochs) and math.isfinite(batches) and not schedule.per_batch:
            between = schedule.batches_between(batches)
            every = run.arguments.check_val_every_n_epoch
            if every is None:
                validations = batches * epochs // between if math.isfinite(between) else 0.0
            else:
                in_epoch = max(1, batches // between) if math.isfinite(between) else 1
                validations = in_epoch * (epochs // every)
        elif validates:
            validations = math.inf
        return cls(batches, float(steps), epochs, total, logged, validations, processes)


def _logged_steps(run: Run, batches: float, processes: int) -> float:
    """Return how many steps of an epoch the loggers count."""
    # A number of batches is one of each process; all that the loader has are shared.
    if type(run.arguments.limit_train_batches) is not int:
        batches /= processes
    if math.isinf(batches):
        return math.inf
    return math.ceil(math.ceil(batches) / run.window.accumulate_grad_batches)
