"""Trials without processes, on a clock of their own: a start of many seconds takes no time at all."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from hasten.speed import advisor, budget, race, turns
from hasten.speed.advice import Advice
from hasten.speed.levers import Lever
from hasten.speed.plan import Plan
from hasten.speed.safety import Safety


def nothing(trainer: Any, model: Any) -> None:
    """Stand for the change of a lever; the fake trial knows it by the lever's argument."""


def lever(name: str) -> Lever:
    return Lever(name, f"{name}()", Safety.SAME_BITS, {name: True}, change=nothing)


class FakeTrials:
    """Starts trials that answer at once and move a clock on.

    Args:
        start_seconds: that a process takes to import and to read its data.
        step_seconds: of the steps of a variant, given its levers and how many steps it has had.
        prepare_seconds: of a variant before its first step, given its levers.

    """

    def __init__(
        self,
        start_seconds: float = 0.0,
        step_seconds: Callable[[list[str], int], float] = lambda levers, step: 0.02,
        prepare_seconds: Callable[[list[str]], float] = lambda levers: 0.0,
    ) -> None:
        self.now, self.started = 1000.0, 0
        self._start, self._step, self._prepare = start_seconds, step_seconds, prepare_seconds
        self.said: list[str] = []

    def monotonic(self) -> float:
        return self.now

    def advise(self, monkeypatch: pytest.MonkeyPatch, names: list[str], **plan: Any) -> Advice:
        for module in (advisor, budget, race, turns):
            monkeypatch.setattr(module, "time", self)
        for module in (advisor, turns):
            monkeypatch.setattr(module, "usable_cores", lambda: 1)
        return advisor.measure(
            lambda scratch: self._begin,
            "fake",
            levers=[lever(name) for name in names],
            plan=Plan(**plan),
            say=self.said.append,
        )

    def _begin(self, orders: str, read_fd: int, write_fd: int, log: Any) -> _Ended:
        self.started += 1
        files = os.fdopen(os.dup(read_fd)), os.fdopen(os.dup(write_fd), "w")
        # Not joined: it ends with its pipe.
        threading.Thread(target=self._answer, args=(json.loads(orders), *files), daemon=True).start()
        return _Ended()

    def _answer(self, orders: Any, read: Any, write: Any) -> None:
        levers, done = list(orders["arguments"]), 0

        def send(**answer: Any) -> None:
            write.write(json.dumps(answer) + "\n")
            write.flush()

        def turn(steps: int, more: float = 0.0) -> None:
            nonlocal done
            each = [self._step(levers, done + step) for step in range(steps)]
            # As in a true trial: all that comes before the end of the first step is the first step's.
            each[0] += more
            done += steps
            seconds = sum(each)
            self.now += seconds
            send(
                event="turn", seconds=seconds, step_seconds=each, losses=[1.0] * steps, samples=steps, faults=0,
                memory_bytes=0, tokens=None, slots=None, steps_planned=None, parts={},
            )  # fmt: skip

        # One that is too late is cut off while it answers.
        with suppress(BrokenPipeError), read, write:
            self.now += self._start
            send(event="at_fit", given={})
            examined = False
            for line in read:
                order = json.loads(line)
                if order["do"] == "prepare":
                    turn(orders["warm_up"], self._prepare(levers))
                elif order["do"] == "turn":
                    turn(order["steps"])
                elif not examined:
                    examined = True
                    turn(1)
                else:
                    send(event="facts", device_type="cuda")


class _Ended:
    """A process that nobody has to kill."""

    pid = 0

    def poll(self) -> int:
        return 0

    def wait(self, timeout: float | None = None) -> int:
        return 0
