"""The search for the best line: which speed-ups it races with what, how long, and what it writes."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterable

import pytest

from hasten_tools.speed.advice import Advice
from hasten_tools.speed.advisor import AdviceError, TooShortError
from hasten_tools.speed.levers import LEVERS, choose
from hasten_tools.speed.safety import Safety
from tests.refusals import refused
from tests.speed.fake_trials import FakeProgram, Levers, lever, refusing

GAINS = {"double": 2.0, "triple": 3.0, "slow": 0.7, "none": 1.0, "tenth": 1.1, "half": 1.5}


def by_gains(levers: Levers, step: int) -> float:
    seconds = 1.0
    for name in levers:
        seconds /= GAINS.get(name, 1.0)
    return seconds


def verdicts(found: object) -> dict[str, str]:
    return {row.name: row.verdict for row in found.rows}  # type: ignore[attr-defined]


def test_each_lever_is_raced_with_the_fastest_line_so_far() -> None:
    program = FakeProgram(by_gains)
    found = program.advise([lever(name) for name in ("triple", "slow", "double", "none", "tenth")])
    wins = {"triple": "wins", "double": "wins", "tenth": "wins"}
    assert verdicts(found) == {**wins, "slow": "slower", "none": "no gain"}
    row = found.row("tenth")
    assert (row.base, row.levers) == ("triple + double", ["triple", "double", "tenth"])
    assert row.gain == pytest.approx(1.1)
    assert row.speed == pytest.approx(6.6)
    assert found.line == "triple(); double(); tenth()"
    assert found.lines[-1].speed == pytest.approx(6.6)
    # Inspected, raced with the first speed-up, and confirmed.
    assert program.opened.count(frozenset()) == 3
    assert found.unchanged_seconds < found.seconds / 2


def test_a_lever_that_needs_others_wins_the_second_time() -> None:
    def seconds(levers: Levers, step: int) -> float:
        return 0.4 if levers >= {"late", "double"} else by_gains(levers, step)

    program = FakeProgram(seconds)
    found = program.advise([lever("late"), lever("double")])
    assert verdicts(found) == {"late": "wins", "double": "wins"}
    assert found.winners == ["late", "double"]


def test_a_lever_that_another_makes_useless_is_removed() -> None:
    def seconds(levers: Levers, step: int) -> float:
        return 0.25 if "whole" in levers else 0.5 if "part" in levers else 1.0

    found = FakeProgram(seconds).advise([lever("part"), lever("whole")])
    assert found.line == "whole()"
    (row,) = [row for row in found.combinations if row.name == "without part"]
    assert row.verdict == "no gain"


def test_a_lever_takes_the_place_of_one_that_it_conflicts_with() -> None:
    found = FakeProgram(by_gains).advise([lever("double"), lever("triple", conflicts=("double",))])
    assert found.line == "triple()"
    assert found.row("triple").levers == ["triple"]
    assert found.row("triple").gain == pytest.approx(1.5)


def test_lines_are_written_safest_first() -> None:
    given = [
        lever("triple", Safety.OTHER_BATCHES),
        lever("half", Safety.LOWER_PRECISION),
        lever("tenth", Safety.ROUNDING),
        lever("double", Safety.OTHER_MATHS),
    ]
    found = FakeProgram(by_gains).advise(given)
    assert [(line.line, str(line.safety), round(line.speed, 2)) for line in found.lines] == [
        ("tenth()", "same maths up to rounding", 1.1),
        ("triple(); tenth()", "same samples in other batches", 3.3),
        ("triple(); half(); tenth()", "lower precision", 4.95),
        ("triple(); half(); tenth(); double()", "changes the maths", 9.9),
    ]
    assert (found.line, found.winners) == ("tenth()", ["tenth"])
    assert "changes the maths: needs consent" in found.table()
    rows = [frozenset(row.levers) for row in [*found.rows, *found.combinations] if row.speed is not None]
    assert len(rows) == len(set(rows))


def test_levers_that_stay_unclear_are_tried_together() -> None:
    noise = random.Random(0)

    def seconds(levers: Levers, step: int) -> float:
        gain = 4.0 ** ("triple" in levers) * 1.08 ** len(levers & {"one", "two", "three"})
        return 10.0 / gain * math.exp(noise.gauss(0, 0.04))

    levers = [lever(name) for name in ("triple", "one", "two", "three")]
    found = FakeProgram(seconds).advise(levers, budget_seconds=200.0)
    assert found.winners == ["triple", "one", "two", "three"]
    assert found.line == "triple(); one(); two(); three()"


def test_without_consent_only_automatic_levers_are_measured() -> None:
    given = [lever("triple", Safety.LOWER_PRECISION), lever("double", Safety.ROUNDING)]
    found = FakeProgram(by_gains).advise(given, most=Safety.OTHER_DRAWS)
    assert verdicts(found) == {"triple": "not tried", "double": "wins"}
    assert found.line == "double()"


def test_alone_every_lever_is_compared_with_the_unchanged_program() -> None:
    found = FakeProgram(by_gains).advise([lever("double"), lever("triple")], combine=False)
    assert [(row.base, round(row.speed or 0, 2)) for row in found.rows] == [("", 2.0), ("", 3.0)]
    assert (found.line, found.combinations) == ("triple()", [])


# -- what is rejected


def test_other_losses_are_wrong_however_fast() -> None:
    program = FakeProgram(
        by_gains, losses=lambda levers, step: float("nan") if "triple" in levers else 1.0 + ("double" in levers) / 2
    )
    found = program.advise([lever("double"), lever("triple"), lever("tenth")])
    assert verdicts(found) == {"double": "wrong", "triple": "wrong", "tenth": "wins"}
    assert "the loss is nan at step 1" in found.row("triple").reason
    assert found.line == "tenth()"


def test_other_batches_may_differ_by_as_much_as_another_seed() -> None:
    # Losses of other batches differ by 5 %: more than rounding, and the levers' own seed is not asked for in vain.
    program = FakeProgram(by_gains, losses=lambda levers, step: 1.0 + 0.05 * ("double" in levers))
    found = program.advise([lever("double", Safety.OTHER_BATCHES)])
    assert verdicts(found) == {"double": "wrong"}
    # Inspected, raced, and run with another seed.
    assert program.opened.count(frozenset()) == 3


def test_a_lever_that_leaks_between_samples_is_wrong_and_one_that_cannot_be_told_is_refused() -> None:
    leaking = FakeProgram(by_gains, apart=lambda levers: "they do" if levers else None)
    assert verdicts(leaking.advise([lever("double", Safety.OTHER_DRAWS)])) == {"double": "wrong"}
    together = FakeProgram(by_gains, apart=lambda levers: "they do")
    found = together.advise([lever("double", Safety.OTHER_DRAWS), lever("triple", Safety.OTHER_BATCHES)])
    assert verdicts(found) == {"double": "wins", "triple": "refused"}


def test_failures_have_their_verdicts() -> None:
    for was_refused, verdict in ((True, "refused"), (False, "failed")):
        program = FakeProgram(by_gains, fails=refusing("double", refused=was_refused))
        found = program.advise([lever("double"), lever("triple")])
        assert verdicts(found) == {"double": verdict, "triple": "wins"}
        assert found.row("double").reason == "not with this model"


def test_a_program_that_cannot_be_measured_is_an_error() -> None:
    def fails(levers: Levers) -> None:
        refusing("x", text="KeyError: 'no such column'")(levers | {"x"})

    with refused(AdviceError, says="KeyError"):
        FakeProgram(by_gains, fails=fails).advise([lever("double")])


def test_a_long_start_must_be_won_back() -> None:
    program = FakeProgram(by_gains, prepare_seconds=lambda levers: 60.0 * ("double" in levers), steps_planned=50)
    found = program.advise([lever("double")])
    assert verdicts(found) == {"double": "pays back too late"}
    assert found.row("double").break_even_steps == pytest.approx(120)
    assert "this training has 50" in found.row("double").reason
    assert found.lines == []


# -- time


@pytest.mark.parametrize("budget", [40.0, 60.0, 90.0, 300.0])
def test_a_budget_is_kept_however_slowly_programs_start(budget: float) -> None:
    program = FakeProgram(by_gains, start_seconds=4.0)
    found = program.advise([lever(name) for name in ("triple", "double", "tenth", "none")], budget_seconds=budget)
    # Programs start one after another here, and a comparison that has begun has two turns.
    assert program.now <= budget + 16.0
    assert verdicts(found)["triple"] == "wins"
    assert set(verdicts(found).values()) <= {"wins", "no time", "no gain", "unclear"}
    assert (budget >= 90.0) == ("no time" not in verdicts(found).values())
    assert found.lines


def test_where_the_first_step_takes_all_the_time_the_answer_is_a_larger_budget() -> None:
    program = FakeProgram(by_gains, start_seconds=20.0)
    with refused(AdviceError, says=("10 s", "60 or")):
        program.advise([lever("double")], budget_seconds=10.0)
    assert program.opened == [frozenset()]


def test_after_one_step_the_answer_names_what_was_not_measured() -> None:
    facts = {"parts": {"data wait": 8.1, "forward": 0.9}}
    program = FakeProgram(lambda levers, step: 9.0, start_seconds=3.0, facts=facts)
    found = program.advise([lever("double"), lever("triple")], budget_seconds=20.0)
    assert program.now <= 20.0
    assert verdicts(found) == {"double": "no time", "triple": "no time"}
    assert found.unchanged.step_seconds == 9.0
    assert not found.is_worth_keeping
    summary = found.summary()
    assert "nothing is known to be faster yet" in summary
    assert "Training waits for its data for 90% of a step" in summary
    assert re.search(r"not measured: double, triple; raise --budget to \d+", summary)
    # That budget is enough.
    needed = found.needed_seconds
    assert needed is not None
    again = FakeProgram(lambda levers, step: 9.0 * by_gains(levers, step), start_seconds=3.0)
    assert verdicts(again.advise([lever("double"), lever("triple")], budget_seconds=needed)) == {
        "double": "wins", "triple": "wins"
    }  # fmt: skip
    assert again.now <= needed


@pytest.mark.parametrize("budget", [20.0, 45.0, 90.0, 200.0])
@pytest.mark.parametrize("step_seconds", [0.001, 0.3, 2.0, 9.0])
def test_no_budget_is_exceeded_by_more_than_a_step(budget: float, step_seconds: float) -> None:
    program = FakeProgram(lambda levers, step: step_seconds * by_gains(levers, step), start_seconds=2.0)
    found = program.advise([lever(name) for name in ("triple", "slow", "double", "none")], budget_seconds=budget)
    assert program.now <= budget + step_seconds
    # Each speed-up has its verdict, once.
    assert len(found.rows) == 4


def test_data_comes_first_where_a_program_waits_for_it() -> None:
    waits = {"device_type": "cpu", "map_style": True, "useful_tokens": 0.2, "parts": {"forward": 1.0, "data wait": 0.4}}
    for facts, first in ((waits, "resident data"), ({**waits, "parts": {"forward": 1.0}}, "packed tokens")):
        program = FakeProgram(by_gains, facts=facts)
        program.advise(choose(["packed tokens", "resident data"]), budget_seconds=60.0)
        assert next(levers for levers in program.opened if levers) == {first}


def test_ctrl_c_gives_what_was_measured_so_far() -> None:
    def interrupted(levers: Levers) -> None:
        if "double" in levers:
            raise KeyboardInterrupt

    program = FakeProgram(by_gains, fails=interrupted)
    found = program.advise([lever("triple"), lever("double"), lever("tenth")])
    assert verdicts(found) == {"triple": "wins", "double": "no time", "tenth": "no time"}
    assert (found.interrupted, found.line) == (True, "triple()")
    assert found.summary().startswith("fake: 3.0x")
    with pytest.raises(KeyboardInterrupt):
        FakeProgram(by_gains, fails=lambda levers: interrupted(levers | {"double"})).advise([lever("triple")])


def shown_factors(found: Advice) -> list[str]:
    """Return the factors in all texts; those of lower ends with "at least"."""
    return re.findall(r"(?:at least |at most )?\b[\d.,]+x\b", f"{found.summary()}\n{found.table()}\n{found!r}")


def test_on_a_noisy_machine_only_a_lower_end_that_all_turns_support_is_named_and_nothing_is_kept() -> None:
    load = itertools.cycle([0.72, 1.4])

    def seconds(levers: Levers, step: int) -> float:
        return 0.5 if "fast" in levers else 20.0 * next(load)

    found = FakeProgram(seconds).advise([lever("fast")], steps=1)
    assert found.noise > 0.3
    assert not found.is_worth_keeping
    assert found.line == "fast()"
    assert found.summary().startswith("fake: at least 28x as fast with")
    assert set(shown_factors(found)) == {"at least 28x"}
    assert "This machine is busy" in found.summary()


@pytest.mark.parametrize("name", ["fast", "one thread"])
def test_a_burst_of_load_gives_no_factor_and_nothing_to_write(name: str) -> None:
    """Two turns of the program fell into a burst of load, those beside them did not: once "at least 10x" came of it."""
    turns = itertools.count()

    def seconds(levers: Levers, step: int) -> float:
        if levers:
            return 0.8
        # The first ones inspect the program, and warm it up.
        return 15.0 if next(turns) % 7 in (4, 5, 6) else 1.0

    measured = lever("fast") if name == "fast" else next(one for one in LEVERS if one.name == name)
    facts = {"threads": 2, "cores": 4, "device_type": "cpu"}
    found = FakeProgram(seconds, facts=facts).advise([measured], steps=1, budget_seconds=120.0)
    assert found.noise > 0.3
    assert (found.lines, found.winners, found.arguments, found.line) == ([], [], {}, "")
    assert found.summary().startswith("fake: this machine is too busy to measure: run again when it is idle.")
    assert shown_factors(found) == []
    assert not found.is_worth_keeping


def test_a_machine_is_busy_where_steps_wait_for_a_core_even_if_turns_are_alike() -> None:
    program = FakeProgram(by_gains, waited_share=0.6)
    found = program.advise([lever("double"), lever("tenth")])
    assert found.noise < 0.01
    assert found.winners == ["double", "tenth"]  # Enough pairs of turns agree.
    assert not found.is_worth_keeping
    assert "This machine is busy: other programs had the cores for 60% of the time" in found.summary()
    # Two turns are not enough.
    few = FakeProgram(by_gains, waited_share=0.6).advise([lever("double")], steps=1, budget_seconds=10.0)
    assert (few.winners, few.lines, few.is_worth_keeping) == ([], [], False)
    assert "too busy to measure" in few.summary()


def test_threads_are_not_counted_while_other_programs_take_the_cores() -> None:
    load = itertools.cycle([0.72, 1.4])

    def seconds(levers: Levers, step: int) -> float:
        # All pairs agree, but the other programs may be what the second thread waits for.
        return 0.5 if levers else 20.0 * next(load)

    one_thread = next(one for one in LEVERS if one.name == "one thread")
    found = FakeProgram(seconds, facts={"threads": 2, "cores": 4, "device_type": "cpu"}).advise([one_thread], steps=1)
    assert found.summary().startswith("fake: this machine is too busy to measure: run again when it is idle.")
    assert shown_factors(found) == []


def test_a_lever_that_gets_ready_too_late_is_cut_off() -> None:
    program = FakeProgram(by_gains, prepare_seconds=lambda levers: 1000.0 * ("double" in levers))
    found = program.advise([lever("triple"), lever("double")], budget_seconds=100.0)
    assert verdicts(found) == {"triple": "wins", "double": "no time"}
    assert found.row("double").reason == "time ran out before it was ready"
    assert program.now <= 100.0


def test_a_training_that_is_too_short_is_not_measured() -> None:
    program = FakeProgram(by_gains, steps_planned=50)
    with refused(TooShortError, says=("50 s", "10% of")):
        program.advise([lever("double")], share_of_training=0.1)
    found = FakeProgram(by_gains, steps_planned=1000).advise([lever("double")], share_of_training=0.1)
    assert verdicts(found) == {"double": "wins"}


def test_slow_steps_leave_time_for_every_lever() -> None:
    gains = {
        "packed first token": 4.8,
        "packed tokens": 4.2,
        "bf16 autocast": 1.6,
        "bf16 products": 1.3,
        "kept memory": 1.1,
        "fast dropout masks": 1.06,
        "no attention dropout": 1.25,
        "one thread": 0.6,
        "compile": 0.9,
    }
    noise = random.Random(0)

    def true_seconds(levers: Iterable[str]) -> float:
        # The optimizer takes as long on any line: fusing it shows on the fastest ones only.
        return 7.0 / math.prod(gains.get(name, 1.0) for name in levers) + 0.1 * ("fused optimizer" not in levers)

    def seconds(levers: Levers, step: int) -> float:
        return true_seconds(levers) * math.exp(noise.gauss(0, 0.02)) * (1 + (noise.random() < 0.05))

    program = FakeProgram(
        seconds,
        start_seconds=0.7,
        prepare_seconds=lambda levers: 20.0 * ("compile by blocks" in levers) + 40.0 * ("compile" in levers),
        facts={
            "device_type": "cpu",
            "step_draws": True,
            "useful_tokens": 0.27,
            "map_style": True,
            "threads": 2,
            "dropout": True,
            "attention_dropout": ["BertSelfAttention"],
            "reads_first_token": True,
            "peak_flops": {"float32": 1e11, "bfloat16": 2.4e11},
            "repeated_blocks": 6,
        },
        steps_planned=2000,
    )
    levers = [lever for lever in choose(None) if lever.preload is None]
    found = program.advise(levers, budget_seconds=420.0)
    assert program.now < 440.0
    assert found.unchanged_seconds < found.seconds / 3
    every = list(verdicts(found).values())
    assert every.count("unclear") <= 1
    assert not {"no time", "failed", "wrong"} & set(every)
    assert found.lines[-1].speed > 0.85 * 4.8 * 1.6 * 1.3 * 1.1 * 1.06 * 1.25
    assert all(line.speed < 1.15 * 7.1 / true_seconds(line.levers) for line in found.lines)
