"""When learning-rate schedulers step."""

from __future__ import annotations

from typing import Any

from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import did_you_mean
from hasten._lib.rank_zero import rank_zero_warn
from hasten.loops.run import Run
from hasten.optim import LRSchedulerConfig


def step(run: Run, *, stepped: bool) -> None:
    """Step the schedulers whose interval a batch completes; ``stepped``: an optimizer stepped after it."""
    if not run.module.automatic_optimization:
        return
    progress = run.progress
    for config in run.schedulers:
        if config.reduce_on_plateau:
            continue
        if config.interval == "step":
            if stepped and progress.batch % config.frequency == 0:
                _step_one(run, config, None)
        elif progress.last_batch and (progress.epoch + 1) % config.frequency == 0:
            _step_one(run, config, None)


def any_monitored(run: Run, interval: str) -> bool:
    """Return whether a scheduler steps on a monitored value at this interval."""
    return any(config.reduce_on_plateau and config.interval == interval for config in run.schedulers)


def step_on_monitored(run: Run, interval: str) -> None:
    """Step the schedulers that watch a value, once the value has been logged."""
    if not run.module.automatic_optimization:
        return
    progress = run.progress
    done = progress.batch if interval == "step" else progress.epoch + 1
    for config in run.schedulers:
        if config.reduce_on_plateau and config.interval == interval and done % config.frequency == 0:
            value = _monitored(run, config)
            if value is not None:
                _step_one(run, config, value)


def _step_one(run: Run, config: LRSchedulerConfig, value: Any) -> None:
    try:
        run.module.lr_scheduler_step(config.scheduler, value)
    except ValueError as error:
        if "total steps" in str(error):
            error.add_note(
                f"The {type(config.scheduler).__name__} was made for fewer steps than this run takes: {run.max_epochs} "
                f"epochs of {run.train.limit} batches. Make it with total_steps=self.trainer."
                "estimated_stepping_batches. A resumed run keeps the plan of its checkpoint: to train longer than that "
                "plan, load the weights alone and begin a new one."
            )
        raise


def _monitored(run: Run, config: LRSchedulerConfig) -> Any:
    name = str(config.monitor)
    metrics = run.logged.callback_metrics()
    if name in metrics:
        return metrics[name]
    message = (
        f"The scheduler {type(config.scheduler).__name__} steps on monitor={name!r}, which was never logged. "
        f"Logged so far: {sorted(metrics)}.{did_you_mean(name, list(metrics))} "
        f"Log it with self.log({name!r}, ...), or set the lr_scheduler's interval and frequency so that it steps "
        "after the validation that logs it."
    )
    if config.strict:
        raise MisconfigurationException(message)
    rank_zero_warn(message)
    return None
