"""Objects of Lightning's profilers that hasten's own do not need."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerAction

from hasten_lightning.utilities.rank_zero import WarningCache

KINETO_AVAILABLE: bool = torch.profiler.kineto_available()

# Programs clear it, to be warned again. hasten's profiler warns in each run.
warning_cache = WarningCache()

_STAGES = ("training", "validation", "test", "predict")


class ScheduleWrapper:
    """One cycle of a schedule for each kind of step, in place of one for all of them together.

    Call ``pre_step`` with the name of an action that has ended, then the object itself: it counts the step and returns
    what the profiler does next. When a kind of step has been saved once, it is not recorded again.

    The schedule is a function of the step that returns a ``ProfilerAction``, such as ``torch.profiler.schedule``.

    Example::

        >>> wrapper = ScheduleWrapper(torch.profiler.schedule(wait=1, warmup=1, active=1))
        >>> wrapper.setup("on_fit_start")
        >>> wrapper.pre_step("[Strategy]SingleDeviceStrategy.training_step")
        >>> [wrapper(0).name for _ in range(3)]
        ['WARMUP', 'RECORD_AND_SAVE', 'NONE']

    """

    def __init__(self, schedule: Callable[[int], ProfilerAction]) -> None:
        self._schedule = schedule
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self._steps = dict.fromkeys(_STAGES, 0)
        self._finished: set[str] = set()
        self._current_action: str | None = None
        self._start_action_name: str | None = None
        self._last: ProfilerAction | None = None

    def setup(self, start_action_name: str) -> None:
        """Set the first action of the run, by which a sanity check is known."""
        self._start_action_name = start_action_name

    def pre_step(self, current_action: str) -> None:
        """Set the action that has ended."""
        self._current_action = current_action

    @property
    def _stage(self) -> str | None:
        action = self._current_action
        return None if action is None else next((s for s in _STAGES if action.endswith(f"{s}_step")), None)

    @property
    def is_training(self) -> bool:
        """Whether the current action is a training step."""
        return self._stage == "training"

    @property
    def is_validating(self) -> bool:
        """Whether the current action is a validation step."""
        return self._stage == "validation"

    @property
    def is_testing(self) -> bool:
        """Whether the current action is a test step."""
        return self._stage == "test"

    @property
    def is_predicting(self) -> bool:
        """Whether the current action is a prediction step."""
        return self._stage == "predict"

    @property
    def num_step(self) -> int:
        """Steps of the current kind so far."""
        return self._steps.get(self._stage or "", 0)

    @property
    def has_finished(self) -> bool:
        """Whether the current kind of step has been saved."""
        return self._stage in self._finished

    def __call__(self, num_step: int) -> ProfilerAction:
        """Count a step of the current kind, and return what to do in the next one; ``num_step`` is not used."""
        stage = self._stage
        if self._current_action is None or self.has_finished:
            return ProfilerAction.NONE
        in_fit = (self._start_action_name or "").endswith("on_fit_start")
        # The validation steps before the first training step belong to the sanity check.
        if stage is not None and not (self.is_validating and in_fit and self._steps["training"] == 0):
            self._steps[stage] += 1
        action = self._schedule(self.num_step)
        if self._last is ProfilerAction.RECORD and action is ProfilerAction.WARMUP:
            # torch does not allow this change, which another kind of step can bring.
            action = ProfilerAction.RECORD
        if action is ProfilerAction.RECORD_AND_SAVE and stage is not None:
            self._finished.add(stage)
        self._last = action
        return action
