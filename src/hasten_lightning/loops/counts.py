"""Counters of loops as programs read them: how many batches, epochs and steps have begun and are complete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self, TypeVar

from hasten._lib.errors import make_error

C = TypeVar("C", bound="Counters")


@dataclass
class Counters:
    """Counters, or groups of them, that are saved and restored together."""

    def state_dict(self) -> dict[str, Any]:
        """Return the counters as plain data."""
        return asdict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        for one in fields(self):
            if one.name not in state_dict:
                continue
            value = getattr(self, one.name)
            if isinstance(value, Counters):
                value.load_state_dict(state_dict[one.name])
            else:
                setattr(self, one.name, state_dict[one.name])

    @classmethod
    def from_state_dict(cls, state_dict: dict[str, Any]) -> Self:
        """Return new counters with the values that ``state_dict`` returned."""
        new = cls()
        new.load_state_dict(state_dict)
        return new

    def reset(self) -> None:
        """Set all counters to 0."""
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, Counters):
                value.reset()
            else:
                setattr(self, one.name, type(value)())

    def reset_on_run(self) -> None:
        """Begin another round: counts of the current one go to 0, totals stay."""
        for value in self._groups():
            value.reset_on_run()

    def reset_on_restart(self) -> None:
        """Forget what had begun and was not complete when the counters were saved."""
        for value in self._groups():
            value.reset_on_restart()

    def _groups(self) -> list[Counters]:
        values = [getattr(self, one.name) for one in fields(self)]
        return [value for value in values if isinstance(value, Counters)]


@dataclass
class ReadyCompleted(Counters):
    """How many are about to begin or have begun, and how many are complete."""

    ready: int = 0
    completed: int = 0

    # Called with the name and value of a counter that a program assigns, where that changes a run.
    _assigned = None

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        assigned = getattr(self, "_assigned", None)
        if assigned is not None:
            assigned(name, value)

    def tell(self, assigned: Callable[[str, int], None]) -> Self:
        """Call ``assigned`` with the name and value of each counter that is assigned from now on."""
        object.__setattr__(self, "_assigned", assigned)
        return self

    def reset_on_restart(self) -> None:
        """Count as begun what is complete."""
        for one in fields(self):
            setattr(self, one.name, self.completed)

    def increment_by(self, n: int) -> None:
        """Add ``n`` to every counter."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + n)


@dataclass
class Started(ReadyCompleted):
    """Also counts those that have begun."""

    started: int = 0


@dataclass
class Processed(Started):
    """Also counts those that are done except for the hooks that follow."""

    processed: int = 0


@dataclass
class LoopCounts(Counters):
    """The counts of the whole run, and of the current round (an epoch, or a call)."""

    total: ReadyCompleted = field(default_factory=Processed)
    current: ReadyCompleted = field(default_factory=Processed)

    def __post_init__(self) -> None:
        if type(self.total) is not type(self.current):
            what = f"{type(self).__name__}(total={type(self.total).__name__}, current={type(self.current).__name__}):"
            raise make_error(ValueError, what, fix="use the same kind of counters for both.", argument="total")

    @classmethod
    def from_defaults(cls, tracker_cls: type[ReadyCompleted], **kwargs: int) -> Self:
        """Return counts of the given kind, total and current with the same values."""
        return cls(total=tracker_cls(**kwargs), current=tracker_cls(**kwargs))

    def increment_ready(self) -> None:
        """Count one more that is about to begin."""
        self._increment("ready")

    def increment_started(self) -> None:
        """Count one more that has begun."""
        self._increment("started")

    def increment_processed(self) -> None:
        """Count one more that is done except for the hooks that follow."""
        self._increment("processed")

    def increment_completed(self) -> None:
        """Count one more that is complete."""
        self._increment("completed")

    def increment_by(self, n: int) -> None:
        """Add ``n`` to every counter."""
        self.total.increment_by(n)
        self.current.increment_by(n)

    def reset_on_run(self) -> None:
        """Set the current counts to 0."""
        self.current.reset()

    def reset_on_restart(self) -> None:
        """Count as begun what is complete, in the current round."""
        self.current.reset_on_restart()

    def _increment(self, name: str) -> None:
        if not hasattr(self.total, name):
            raise TypeError(f"`{type(self.total).__name__}` doesn't have a `{name}` attribute")
        for each in (self.total, self.current):
            setattr(each, name, getattr(each, name) + 1)


@dataclass
class BatchCounts(LoopCounts):
    """Counts of batches, and whether the current one is the last."""

    is_last_batch: bool = False

    def reset_on_run(self) -> None:
        """Set the current counts to 0."""
        super().reset_on_run()
        self.is_last_batch = False

    def increment_by(self, n: int, is_last_batch: bool = False) -> None:
        """Add ``n`` to every counter."""
        super().increment_by(n)
        self.is_last_batch = is_last_batch


@dataclass
class SchedulerCounts(LoopCounts):
    """Counts of the steps of learning-rate schedulers."""

    total: ReadyCompleted = field(default_factory=ReadyCompleted)
    current: ReadyCompleted = field(default_factory=ReadyCompleted)


@dataclass
class OptimizerCounts(Counters):
    """Counts of an optimizer's steps, and of how often its gradients were cleared."""

    step: LoopCounts = field(default_factory=lambda: LoopCounts.from_defaults(ReadyCompleted))
    zero_grad: LoopCounts = field(default_factory=lambda: LoopCounts.from_defaults(Started))


@dataclass
class OptimizationCounts(Counters):
    """The counts of automatic optimization."""

    optimizer: OptimizerCounts = field(default_factory=OptimizerCounts)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps that are complete."""
        return self.optimizer.step.total.completed
