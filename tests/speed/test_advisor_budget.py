"""What the advisor makes of a budget, of too few steps and of a machine that differs from itself."""

from __future__ import annotations

import itertools

import pytest

from hasten.speed.verdict import Speed, compare, noise_of, too_few, verdict_on_speed
from tests.speed.fake_trials import FakeTrials

FOUR = ["one", "two", "three", "four"]


def twice_as_fast(levers: list[str], step: int) -> float:
    return 0.01 if levers else 0.02


def verdicts(found: object) -> list[str]:
    return [row.verdict for row in found.rows]  # type: ignore[attr-defined]


@pytest.mark.parametrize("budget", [40.0, 60.0, 90.0, 300.0])
def test_a_budget_is_kept_however_slowly_programs_start(
    budget: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = FakeTrials(start_seconds=4.0, step_seconds=twice_as_fast, prepare_seconds=lambda levers: 2.0)
    found = trials.advise(monkeypatch, FOUR, budget_seconds=budget)
    assert trials.now - 1000.0 <= budget
    assert "wins" in verdicts(found)
    assert set(verdicts(found)) <= {"wins", "no time"}
    # Turns never shrink to what says nothing.
    assert found.rounds >= 2
    assert found.rounds * found.steps >= 6
    assert (budget >= 90.0) == ("no time" not in verdicts(found))


def test_levers_that_do_not_fit_say_what_would_be_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = FakeTrials(start_seconds=6.0, step_seconds=twice_as_fast)
    found = trials.advise(monkeypatch, FOUR, budget_seconds=40.0)
    left_out = [row for row in found.rows if row.verdict == "no time"]
    (announced,) = (line for line in trials.said if "has room for" in line)
    enough = int(announced.split("take about ")[1].split()[0])
    assert left_out
    assert all(f"about {enough} s are enough" in row.reason for row in left_out)
    again = FakeTrials(start_seconds=6.0, step_seconds=twice_as_fast)
    assert "no time" not in verdicts(again.advise(monkeypatch, FOUR, budget_seconds=float(enough)))


def test_what_takes_longer_than_the_budget_at_least_is_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = FakeTrials(start_seconds=20.0, step_seconds=twice_as_fast)
    found = trials.advise(monkeypatch, FOUR, budget_seconds=50.0)
    place, announced = next((i, line) for i, line in enumerate(trials.said) if "takes at least about" in line)
    assert "longer than the budget of 50 s" in announced
    assert place < next(i for i, line in enumerate(trials.said) if line.startswith("measuring"))
    assert float(announced.split("about ")[1].split()[0]) == pytest.approx(trials.now - 1000.0, rel=0.1)
    # It is not twice the budget: one is measured all the same, with turns that give a verdict.
    assert sorted(verdicts(found)) == ["no time", "no time", "no time", "wins"]
    assert trials.started == 4


def test_what_takes_many_times_the_budget_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = FakeTrials(start_seconds=20.0, step_seconds=twice_as_fast)
    found = trials.advise(monkeypatch, FOUR, budget_seconds=30.0)
    assert set(verdicts(found)) == {"no time"}
    assert (trials.started, found.lines) == (1, [])
    assert any("room for no lever; all of them take about" in line for line in trials.said)
    assert "takes at least about 8" in trials.said[-1]
    assert "about " in found.rows[0].reason
    assert found.table()


def test_levers_that_would_get_ready_after_the_budget_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = FakeTrials(2.0, twice_as_fast, lambda levers: 1000.0 if "two" in levers else 0.0)
    found = trials.advise(monkeypatch, FOUR, budget_seconds=100.0)
    assert [found.row(name).verdict for name in ("one", "three", "four")] == ["wins", "no time", "no time"]
    assert found.row("four").reason == "the budget was spent before it was ready"
    # No other race begins after it.
    assert trials.started == 1 + 7
    assert (found.line, found.combinations) == ("one()", [])


def test_progress_is_told_by_lever_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = FakeTrials(start_seconds=1.0, step_seconds=twice_as_fast)
    trials.advise(monkeypatch, FOUR, combine=False)
    assert [line.split(" (")[0] for line in trials.said if "lever " in line] == [
        f"preparing lever {number} of 4, {name}" for number, name in enumerate(FOUR, 1)
    ]
    assert [line.split(",")[0] for line in trials.said if line.startswith("turn")] == [
        f"turn {number} of 3" for number in (1, 2, 3)
    ]
    assert all(" s left)" in line for line in trials.said if line.startswith(("turn", "preparing")))
    trials.advise(monkeypatch, FOUR, budget_seconds=500.0)
    left = [float(line.split("(")[1].split()[0]) for line in trials.said if "of the budget left" in line]
    assert left == sorted(left, reverse=True)


def test_nothing_wins_on_a_machine_that_differs_from_itself_by_as_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each variant has slow and fast turns, the unchanged program too: 1.68 times as fast is one draw of them.
    busy = itertools.cycle([0.02, 0.034, 0.02, 0.02, 0.031, 0.02, 0.034])
    trials = FakeTrials(step_seconds=lambda levers, step: next(busy))
    found = trials.advise(monkeypatch, FOUR, rounds=3, steps=2)
    assert found.noise > 0.1
    assert "wins" not in verdicts(found)
    assert found.lines == []


def test_one_step_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = FakeTrials(step_seconds=twice_as_fast)
    found = trials.advise(monkeypatch, FOUR, rounds=2, steps=1, combine=False)
    assert set(verdicts(found)) == {"unclear"}
    assert "measured in 2 turns of 2 steps in all" in found.table()
    assert found.table().splitlines()[-2].startswith("Nothing is known to pay")


def test_two_turns_count_by_their_worst() -> None:
    lever = compare([1.0, 1.0], [0.5, 0.7])
    assert lever.least == pytest.approx(1 / 0.7)
    assert verdict_on_speed(lever, noise=0.0) == "wins"
    again = compare([1.0, 1.0], [1.0, 0.68])
    assert noise_of(again) == pytest.approx(1 / 0.68 - 1)
    assert verdict_on_speed(lever, noise_of(again)) == "unclear"
    # Of many turns one may be an accident.
    assert noise_of(compare([1.0] * 9, [1.0] * 8 + [0.5])) == 0.0
    assert verdict_on_speed(Speed(1.05, 1.0, 1.1), noise=0.2) == "no gain"


def test_long_steps_need_not_be_many() -> None:
    assert too_few(2, 2, 10.0) == ""
    assert (
        too_few(1, 50, 10.0) == "measured in 1 turn of 50 steps in all; a verdict takes 2 turns and 6 steps"
    )
