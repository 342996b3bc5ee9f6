"""Ctrl-C and SIGTERM are noted and told, and the handlers are put back."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from typing import Any

import pytest
import torch
from tests.programs import fork_python

from hasten.machine import signals
from hasten.machine.signals import StopRequests


def test_a_signal_is_noted_and_the_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for number in (signal.SIGINT, signal.SIGTERM):
        with StopRequests() as stop:
            assert stop.signal is None
            assert stop.agreed() is None
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # One key press may arrive twice.
            assert stop.signal == number
            assert stop.agreed() == number
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_the_first_ctrl_c_says_what_a_second_does_and_the_second_does_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "SAME_PRESS_SECONDS", 0.0)
    with StopRequests() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == signal.SIGINT
        assert "Press Ctrl-C again" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_handler_of_the_users_is_called_too() -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with StopRequests() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.signal == signal.SIGTERM
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, previous)


IGNORES = """
import os, signal
# As shells start jobs in the background.
signal.signal(signal.SIGINT, signal.SIG_IGN)
from tests.models import Classifier, loader, quiet

class Pressed(Classifier):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            os.kill(os.getpid(), signal.SIGINT)
        if batch_idx == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        print(batch_idx, flush=True)
        return super().training_step(batch, batch_idx)

quiet().fit(Pressed(), loader())
"""


def test_a_background_job_ignores_ctrl_c_and_heeds_sigterm() -> None:
    done = fork_python("-c", IGNORES)
    assert done.stdout.split() == ["0", "1", "2", "3", "4", "5"], done.stderr
    assert done.returncode == 143


def test_another_thread_installs_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    found: list[Any] = []

    def work() -> None:
        with StopRequests() as stop:
            found.extend([stop.signal, signal.getsignal(signal.SIGINT)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None, before]


def test_checks_come_about_once_a_second_and_are_decided_by_the_slowest_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    asked: list[int] = []

    def all_reduce(tensor: torch.Tensor, op: str) -> torch.Tensor:
        assert op == "max"
        return tensor

    stop = StopRequests(all_reduce)
    for step in range(5000, 15000):
        now[0] += 0.01
        if stop.due(step):
            assert stop.agreed() is None
            asked.append(step)
    gaps = [after - before for before, after in itertools.pairwise(asked)]
    assert asked[0] == 5000
    assert set(gaps[10:]) <= {99, 100}
    assert all(after <= 2 * before for before, after in itertools.pairwise(gaps))
