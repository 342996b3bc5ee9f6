"""Where the time of a step goes: now and then one step runs with timed functions, and all others run without.

The timed functions are made once, like the functions of an ordinary step, from functions of the Runtime that notify a
clock when they begin and end. Nothing of the module's is replaced. On a CPU the clock is the host's. On a CUDA device
it is a row of events, which the device passes in its own time: nothing waits for them, and they are read when the next
step is timed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hasten._lib.observers import set_until
from hasten.hooks import nothing

if TYPE_CHECKING:
    from hasten.loops.run import Run

Call = Callable[..., Any]

# The parts of a step, in the order in which they are shown.
PARTS = (
    "data", "transfer", "forward", "backward", "optimizer", "callbacks", "logging", "checkpoints", "other",
)  # fmt: skip
# Time that does not belong to a step: a validation or a checkpoint.
ASIDE = "aside"

_HOOKS = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end", "on_train_batch_end_last",
)  # fmt: skip


class StepFunctions(Protocol):
    """The functions of a step that are replaced by timed ones."""

    @property
    def train_step(self) -> Call: ...
    @property
    def transfer(self) -> Call | None: ...
    @property
    def step_schedulers(self) -> Call: ...


class HostClock:
    """Adds up the seconds of each part by the host's clock; a part within another interrupts it."""

    def begin(self) -> None:
        """Start with the part "other"."""
        self._seconds: dict[str, float] = {}
        self._parts = ["other"]
        self._last = perf_counter()

    def enter(self, part: str) -> None:
        """Begin a part."""
        self._add()
        self._parts.append(part)

    def leave(self) -> None:
        """Go back to the part that was interrupted."""
        self._add()
        self._parts.pop()

    def end(self) -> None:
        """Stop."""
        self._add()

    def ready(self) -> bool:
        """Return whether ``seconds`` would return at once."""
        return True

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part."""
        return self._seconds

    def _add(self) -> None:
        now, part = perf_counter(), self._parts[-1]
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._last
        self._last = now


class DeviceClock:
    """The same on a CUDA device: a part takes from when the device comes to its beginning until its end.

    What the host does while the device is busy costs no time; what the device waits for does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Any] = []
        # Each event, and the part that it ends.
        self._marks: list[tuple[Any, str]] = []
        self._parts = ["other"]

    def begin(self) -> None:
        """Start with the part "other"; what was not read is lost."""
        self._free += [event for event, _ in self._marks]
        self._marks, self._parts = [], ["other"]
        self._mark()

    def enter(self, part: str) -> None:
        """Begin a part."""
        self._mark()
        self._parts.append(part)

    def leave(self) -> None:
        """Go back to the part that was interrupted."""
        self._mark()
        self._parts.pop()

    def end(self) -> None:
        """Stop."""
        self._mark()

    def ready(self) -> bool:
        """Return whether the device has come to the end."""
        return bool(self._marks) and bool(self._marks[-1][0].query())

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part; waits for the device if not ``ready``."""
        found: dict[str, float] = {}
        for (before, _), (event, part) in zip(self._marks, self._marks[1:], strict=False):
            found[part] = found.get(part, 0.0) + before.elapsed_time(event) / 1000
        return found

    def _mark(self) -> None:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((event, self._parts[-1]))


class StepTimes:
    """Times single steps of a fit.

    ``make_step`` returns the function that trains on one batch, made of what the Runtime has at that moment.
    """

    def __init__(self, run: Run, make_step: Callable[[], Call]) -> None:
        self._run, self._make_step = run, make_step
        on_cuda = run.runtime.device.type == "cuda"
        self.clock: HostClock | DeviceClock = DeviceClock(run.runtime.device) if on_cuda else HostClock()
        self.running = False
        self._undo = ExitStack()
        self._waits = False
        # The plan whose timed functions these are.
        self._plan: StepFunctions | None = None
        self._timed: tuple[Call, Call | None, Call] | None = None

    def possible(self) -> bool:
        """Return whether steps can be timed: not where they are recorded, one graph, or made by an engine."""
        runtime, memory, compiled = self._run.runtime, self._run.memory_limits, self._run.compiled
        return (
            runtime.device.type in ("cpu", "cuda")
            and runtime.steps is None
            and not runtime.engine.owns_step
            # Its parts could be timed only outside of the graph, where they are rounded differently.
            and not (compiled is not None and compiled.settings.step)
            # Steps that may be repeated with smaller parts keep a state.
            and not (memory is not None and memory.may_fail)
        )

    def begin(self, plan: StepFunctions) -> None:
        """Time the next step, which the functions of ``plan`` make."""
        if plan is not self._plan:
            self._timed, self._plan = self._timed_functions(plan), plan
        assert self._timed is not None
        undo = self._undo = ExitStack()
        for name, timed in zip(("train_step", "transfer", "step_schedulers"), self._timed, strict=True):
            undo.callback(setattr, plan, name, getattr(plan, name))
            setattr(plan, name, timed)
        self._replace_in_step(undo)
        self.running = True
        self.clock.begin()
        self.next_batch()

    def next_batch(self) -> None:
        """Count the time until the next batch has come as waiting for data."""
        self.clock.enter("data")
        self._waits = True

    def end(self) -> None:
        """End the timing of a step: restore the functions without timers."""
        self._came()
        self.clock.end()
        self._restore()

    def drop(self) -> None:
        """Restore the functions without timers; the timing of an unfinished step is lost."""
        if self.running:
            self._restore()
        self._plan = None

    def _restore(self) -> None:
        self.running = False
        self._undo.close()

    # -- timed functions

    def _came(self) -> None:
        if self._waits:
            self._waits = False
            self.clock.leave()

    def _watched(self, part: str, function: Call) -> Call:
        enter, leave = self.clock.enter, self.clock.leave

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._waits:
                self._came()
            enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                leave()

        return call

    def _timed_functions(self, plan: StepFunctions) -> tuple[Call, Call | None, Call]:
        runtime, watched = self._run.runtime, self._watched
        engine = runtime.engine
        own = vars(engine)
        bind, make_step, make_zero_grad = runtime.bind, engine.make_step, engine.make_zero_grad
        with_backward, backward = engine.with_backward, engine.backward

        with ExitStack() as undo:
            set_until(undo, vars(runtime), "bind", lambda function, **how: watched("forward", bind(function, **how)))
            set_until(undo, own, "make_step", lambda optimizer: watched("optimizer", make_step(optimizer)))
            set_until(undo, own, "make_zero_grad", lambda optimizer: watched("optimizer", make_zero_grad(optimizer)))
            set_until(undo, own, "with_backward", lambda step: watched("backward", with_backward(step)))
            set_until(undo, own, "backward", watched("backward", backward))
            for name in ("clip_norm", "clip_value"):
                set_until(undo, own, name, watched("optimizer", getattr(engine, name)))
            if engine.unscale is not None:
                set_until(undo, own, "unscale", watched("optimizer", engine.unscale))
            step = self._make_step()
        transfer = None if plan.transfer is None else watched("transfer", plan.transfer)
        return watched("other", step), transfer, watched("optimizer", plan.step_schedulers)

    def _replace_in_step(self, undo: ExitStack) -> None:
        """Replace the functions that a step looks up while it runs."""
        run, hooks, watched = self._run, self._run.hooks, self._watched
        for name in _HOOKS:
            hook = getattr(hooks, name)
            if hook is not nothing:
                timed = watched("callbacks", hook)
                undo.callback(_set_back, hooks, name, timed, hook)
                setattr(hooks, name, timed)
        # For manual_backward, and for optimizers that a module or a closure steps.
        set_until(undo, vars(run.runtime.engine), "backward", watched("backward", run.runtime.engine.backward))
        for optimizer in run.wrapped_optimizers:
            undo.callback(optimizer.step_through(lambda step: watched("optimizer", step)))
        if not compiles():
            # A compiled function that logs would be compiled again.
            set_until(undo, vars(run.logged), "record", watched("logging", run.logged.record))


def compiles() -> bool:
    """Return whether anything was compiled in this process, which would be compiled again for other functions."""
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters.get("frames"))


def compile_seconds() -> float:
    """Return how long the compiler has worked in this process; 0 where it was not used."""
    compiler: Any = sys.modules.get("torch._dynamo.utils")
    if not getattr(compiler, "compilation_time_metrics", None):
        return 0.0
    return float(compiler.calculate_time_spent().get("total_wall_time", 0.0))


def _set_back(owner: object, name: str, timed: Call, before: Call) -> None:
    # Unless the hooks were found again within the step.
    if getattr(owner, name) is timed:
        setattr(owner, name, before)
