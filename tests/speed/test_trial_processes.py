"""Trials in processes of their own, and how long a comparison of two goes on."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten_tools.speed import trial_processes
from hasten_tools.speed.trial import Session
from hasten_tools.speed.trial_processes import TrialError, TrialStarter, Turn, interval, race
from tests.refusals import refused


class FakeTrial:
    """Steps take what a function of their number says, on a clock that it moves."""

    def __init__(self, seconds: Callable[[int], float], clock: list[float] | None = None) -> None:
        self.seconds, self.clock, self.steps = seconds, clock or [0.0], 0

    def turn(self, steps: int, until: float = math.inf) -> Turn:
        each = [self.seconds(self.steps + step) for step in range(steps)]
        self.steps += steps
        self.clock[0] += sum(each)
        return Turn(sum(each), each)

    def ask(self, name: str, **options: Any) -> Any:
        raise AssertionError(name)

    def close(self) -> None:
        pass


def steady(seconds: float) -> FakeTrial:
    return FakeTrial(lambda step: seconds)


def noisy(seconds: float, noise: float, seed: int) -> FakeTrial:
    draws = random.Random(seed)
    # One step in ten takes twice as long: somebody else has the machine.
    return FakeTrial(lambda step: seconds * math.exp(draws.gauss(0, noise)) * (1 + (draws.random() < 0.1)))


def test_four_times_as_fast_takes_two_turns_and_three_percent_many() -> None:
    fast, slow, same, little = race(
        steady(1.0), [noisy(0.25, 0.03, 1), steady(2.0), steady(1.0), noisy(0.94, 0.03, 3)], steps=1
    )
    assert (fast.verdict, len(fast.turns)) == ("faster", 2)
    assert (slow.verdict, len(slow.turns)) == ("slower", 2)
    assert (same.verdict, same.speed) == ("no gain", 1.0)
    assert little.verdict == "faster"
    assert 6 < len(little.turns) <= 96


def test_what_is_many_times_as_slow_has_one_turn() -> None:
    (found,) = race(steady(1.0), [steady(5.0)], steps=1)
    assert (found.verdict, len(found.turns)) == ("slower", 1)


@pytest.mark.parametrize("gain", [1.0, 1.2])
def test_verdicts_are_seldom_wrong_however_often_one_looks(gain: float) -> None:
    wrong = 0
    for seed in range(100):
        (found,) = race(noisy(1.0, 0.05, seed), [noisy(1.0 / gain, 0.05, 1000 + seed)], steps=1)
        wrong += found.verdict == "slower" or (found.verdict == "faster") != (gain > 1)
    assert wrong <= 10


def test_a_comparison_ends_when_the_time_is_over() -> None:
    clock = [0.0]
    base, other = FakeTrial(lambda step: 1.0, clock), FakeTrial(lambda step: 0.5 + step % 2, clock)
    (found,) = race(base, [other], steps=1, until=5.0, clock=lambda: clock[0])
    assert (found.verdict, len(found.turns)) == ("unclear", 3)


def test_work_is_counted_in_tokens_where_batches_have_a_mask() -> None:
    first, second = Turn(1.0, [1.0], tokens=10, samples=1), Turn(1.0, [1.0], tokens=20, samples=1)
    assert trial_processes.costs([first], [second]) == ([0.1], [0.05])
    assert trial_processes.costs([first], [Turn(1.0, [1.0], samples=2)]) == ([1.0], [0.5])
    assert trial_processes.costs([first], [Turn(1.0, [0.5, 0.5])]) == ([1.0], [0.5])


def test_an_outlier_is_trimmed() -> None:
    found = interval([0.1] * 11 + [3.0])
    assert (found.middle, found.high < 0.15) == (pytest.approx(0.1), True)


# -- processes


def train(session: Session, what: str) -> None:
    """Be a trial."""
    if what == "refuses":
        raise ValueError("not with this model")
    if what == "ends":
        return
    session.handlers["pid"] = lambda more=0: os.getpid() + more
    session.ready(what=what)
    while True:
        if what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hangs":
            time.sleep(60)
        session.after_step(torch.tensor(1.5), samples=2, tokens=torch.tensor(3), slots=4)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return "State:\tZ" in Path(f"/proc/{pid}/status").read_text() if os.path.isdir("/proc") else False


def test_trials_are_stepped_asked_and_gone_afterwards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    place = f"{__name__}:train"
    with TrialStarter() as started:
        names = ("trains", "refuses", "ends", "dies", "hangs")
        trials = {name: started.start(place, name) for name in names}
        trials["fresh"] = started.start(place, "trains", allocator="jemalloc")
        for trial in (trials["trains"], trials["fresh"]):
            assert trial.ready() == {"what": "trains"}
            turn = trial.turn(3)
            assert (turn.steps, turn.losses, turn.samples, turn.tokens, turn.slots) == (3, [1.5] * 3, 6, 9, 12)
            assert turn.memory_bytes > 0
            assert trial.history == [turn]
        pids = [trials[name].ask("pid", more=1) - 1 for name in ("trains", "fresh", "hangs")]
        with pytest.raises(TrialError, match="not with this model") as caught:
            trials["refuses"].turn(1)
        assert caught.value.refused
        with refused(TrialError, says="Trainer.fit"):
            trials["ends"].turn(1)
        with refused(TrialError, says="SIGKILL"):
            trials["dies"].turn(1)
        with pytest.raises(trial_processes.LateError):
            trials["hangs"].turn(1, time.monotonic() + 0.1)
        with refused(TrialError, says="KeyError"):
            trials["trains"].ask("nothing")
    assert all(map(gone, pids))
    assert list(tmp_path.iterdir()) == []


def test_a_trial_writes_to_no_cache_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_processes, "file_of", lambda name: f"/lib/{name}.so")
    monkeypatch.setenv("LD_PRELOAD", "/lib/other.so")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    found = trial_processes.trial_environment(Path("/scratch"), "jemalloc")
    assert {found[name] for name in ("TORCHINDUCTOR_CACHE_DIR", "HASTEN_CACHE", "TMPDIR")} == {
        "/scratch/inductor",
        "/scratch/cache",
        "/scratch",
    }
    assert found["LD_PRELOAD"] == "/lib/jemalloc.so /lib/other.so"


def test_two_turns_decide_however_busy_the_machine_is_where_the_sides_are_far_apart() -> None:
    found = trial_processes.Comparison()
    for slow, fast in ((8.0, 2.4), (14.0, 1.3)):
        found.add(Turn(slow, [slow]), Turn(fast, [fast]))
    assert found.verdict == "faster"
    assert (found.low, found.high) == pytest.approx((8.0 / 2.4, 14.0 / 1.3))
