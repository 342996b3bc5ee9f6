"""Ctrl-C and SIGTERM end a run between two steps, on all processes after the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from hasten._lib.rank_zero import rank_zero_only

AllReduce = Callable[..., Tensor]

# A terminal sends Ctrl-C to all processes of a run, and so may the one that started them: within this time
# it is the same key press.
SAME_PRESS_SECONDS = 0.5
_SECONDS_BETWEEN_CHECKS = 1.0


class SIGTERMException(SystemExit):
    """Ends a program that got SIGTERM, with the exit code 143."""


def leaving(code: int) -> SystemExit:
    """Return the exception that ends a program with the exit code of a signal."""
    return SIGTERMException(code) if code == 128 + signal.SIGTERM else SystemExit(code)


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None], also: Iterable[int] = ()) -> Iterator[dict[int, Any]]:
    """Call ``handler`` for SIGINT, SIGTERM and the signals ``also`` while the context is open; yield their handlers.

    In the main thread only. Ignored signals stay ignored, as a shell ignores Ctrl-C for its background jobs.
    """
    handled: set[int] = {signal.SIGINT, signal.SIGTERM, *also}
    previous: dict[int, Any] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in handled:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    previous[number] = signal.signal(number, handler)
        yield previous
    finally:
        for number, before in previous.items():
            # None: the handler was not installed by Python, which cannot restore it.
            signal.signal(number, signal.SIG_DFL if before is None else before)


class LeaveRun(BaseException):
    """Raised between two batches to leave a run because of a signal; ``except Exception`` does not catch it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number
        # Whether the state can be saved: of several loaders, one may have given its part of the next batch.
        self.can_save = True


class Carried(Protocol):
    """What travels with the agreements of the processes: numbers of which the largest of all processes count."""

    def values(self) -> list[float]:
        """Return the numbers of this process, as many on each."""

    def take(self, numbers: list[float]) -> None:
        """Take the largest of all processes."""


class _Nothing:
    def values(self) -> list[float]:
        return []

    def take(self, numbers: list[float]) -> None: ...


class StopRequests:
    """Record SIGINT and SIGTERM while the context is open, instead of ending the process.

    ``all_reduce`` is the runtime's if several processes must agree. Signals of ``also`` ask to stop as SIGTERM does.

    Handlers are installed in the main thread only, and removed at the end. Ignored signals stay ignored.
    A second Ctrl-C raises KeyboardInterrupt at once.

    A process that was stopped (Ctrl-Z, SIGSTOP, a job that its scheduler suspends) gets SIGCONT when it goes on, which
    is counted: its clocks have run meanwhile.

    Example::

        >>> with StopRequests() as stop:
        ...     stop.signal is None
        True

    """

    # The instance whose context is open; meanwhile hasten handles signals.
    active: ClassVar[StopRequests | None] = None
    # How often this process was stopped and went on, from the first run in its main thread on.
    continued: ClassVar[int] = 0
    _counts_stops: ClassVar[bool] = False

    def __init__(self, all_reduce: AllReduce | None = None, *, also: Iterable[int] = ()) -> None:
        self._also = tuple(also)
        self._outer: StopRequests | None = None
        self.signal: int | None = None
        # The signal that ends the run after the current batch, on all processes.
        self.agreed_signal: int | None = None
        # The signal that arrived at any process, as soon as this process's watchdog knows of it; and the number of the
        # run, the same on all processes.
        self.heard: int | None = None
        self.number = 0
        # Whether this process asks to stop (``trainer.should_stop``), and whether any does, as of the last agreement.
        self.asks = self.granted = False
        # Set at a point that all processes pass.
        self.carried: Carried = _Nothing()
        self._all_reduce = all_reduce
        self._previous: dict[int, Any] = {}
        self._first_press = 0.0
        self._next_check: int | None = None
        self._last_check = (0, 0.0)
        self._interval = 1

    def __enter__(self) -> StopRequests:
        self._handling = handling(self._note, self._also)
        self._previous = self._handling.__enter__()
        if not StopRequests._counts_stops and self._previous:
            StopRequests._count_stops()
        self._outer, StopRequests.active = StopRequests.active, self
        return self

    def __exit__(self, *error: object) -> None:
        StopRequests.active = self._outer
        self._handling.__exit__(None, None, None)

    @property
    def handled(self) -> Container[int]:
        """The signals that are recorded while the context is open."""
        return self._previous.keys()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._first_press = number, now
            if self._all_reduce is None:
                self.agreed_signal = number
            if number == signal.SIGINT and rank_zero_only.rank == 0:
                # os.write: print is not safe in a signal handler that interrupted another print.
                os.write(2, b"\nStopping after this step. Press Ctrl-C again to stop at once.\n")
        elif number == self.signal == signal.SIGINT and now - self._first_press > SAME_PRESS_SECONDS:
            raise KeyboardInterrupt
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            # A handler that was there before, such as a notebook's, is called too.
            previous(number, frame)

    @classmethod
    def _count_stops(cls) -> None:
        """Count from now on how often the process is stopped; the program's own handler is called too."""
        cls._counts_stops = True
        if not hasattr(signal, "SIGCONT"):
            return

        def note(number: int, frame: FrameType | None) -> None:
            cls.continued += 1
            if callable(before):
                before(number, frame)

        before = signal.signal(signal.SIGCONT, note)

    def due(self, step: int) -> bool:
        """Return whether ``agreed`` is to be called at ``step``: the same answer on every process."""
        if self._next_check is None:
            self._last_check = (step - 1, time.monotonic())
            self._next_check = step
        return step >= self._next_check

    def agreed(self) -> int | None:
        """Return the signal that arrived at any process; all call it at the same step."""
        if self._all_reduce is None:
            return self.signal
        assert self._next_check is not None, "due() comes first"
        step, now = self._next_check, time.monotonic()
        last_step, last_time = self._last_check
        # This is a sync point, about once a second.
        number, slowest = self._exchanged((now - last_time) / max(1, step - last_step))
        # At most twice the last interval, because the first steps may be slower than the others.
        wanted = int(_SECONDS_BETWEEN_CHECKS / max(slowest, 1e-9))
        self._interval = max(1, min(wanted, 2 * self._interval))
        self._last_check = (step, now)
        self._next_check = step + self._interval
        self.agreed_signal = self.agreed_signal or number
        return number

    def agreed_now(self) -> int | None:
        """Return the signal that arrived at any process, at a point that all reach, such as the end of an epoch."""
        return self.signal if self._all_reduce is None else self._exchanged(0.0)[0]

    def _exchanged(self, seconds_per_step: float) -> tuple[int | None, float]:
        """Return the signal of any process and the seconds per step of the slowest."""
        assert self._all_reduce is not None
        own = [float(self.signal or self.heard or 0), seconds_per_step, float(self.asks), *self.carried.values()]
        agreed = self._all_reduce(torch.tensor(own, dtype=torch.float64), op="max")
        number, slowest, granted, *numbers = agreed.tolist()
        self.carried.take(numbers)
        self.granted = bool(granted)
        return int(number) or None, slowest
