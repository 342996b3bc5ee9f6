"""What is chosen in the training's own process, and what that costs: planted programs on a clock that they move."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hasten as L
from hasten_tools.speed import advice as words
from hasten_tools.speed.checks import without_draws
from hasten_tools.speed.first_choice import SHARE, Choice, FirstChoice, Sight
from hasten_tools.speed.levers import LEVERS, Lever
from hasten_tools.speed.safety import Safety
from hasten_tools.speed.trial_processes import TrialError, Turn

Names = frozenset[str]
PLAIN: Names = frozenset()
FACTS: dict[str, Any] = {
    "device_type": "cpu",
    "threads": 1,
    "cores": 1,
    "useful_tokens": None,
    "width": None,
    "shapes_vary": False,
    "step_draws": False,
    "samples_draw": False,
    "held_tensors": False,
    "map_style": True,
    "dropout": False,
    "attention_dropout": [],
    "not_packed": None,
    "reads_first_token": False,
    "batch_norm": False,
}
PADDED = {"useful_tokens": 0.3, "width": 128}


@dataclasses.dataclass
class Planted:
    """A program whose steps take what a function of the speed-ups says; it moves the clock."""

    step_seconds: Callable[[Names], float] = lambda names: 0.1
    _: dataclasses.KW_ONLY
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    batches: float = 10_000.0
    epochs: float = 10.0
    setup_seconds: float = 0.02
    waiting: float = 0.0
    faults: int = 0
    numbers: Callable[[Names], list[float]] = lambda names: [1.0, 2.0]
    fails: Callable[[Names], None] = lambda names: None
    now: float = 0.0
    tried: list[tuple[Names, int]] = dataclasses.field(default_factory=list)

    def look(
        self,
        levers: tuple[Lever, ...],
        steps: Callable[[float], int],
        *,
        checks: bool = True,
        asks_apart: bool = False,
    ) -> Sight:
        names = frozenset(lever.name for lever in levers)
        # As long as a turn may last.
        began, count = self.now, min(steps(self.batches), max(1, round(0.2 / self.step_seconds(PLAIN))))
        count *= bool(steps(self.batches))
        self.tried.append((names, count))
        self.fails(names)
        seconds = self.step_seconds(names)
        self.now += self.setup_seconds + checks * 0.3 * seconds + (1 + count) * seconds * bool(count)
        turn = Turn(count * seconds, [seconds] * count, samples=count, faults=self.faults * count) if count else None
        facts = {**FACTS, **self.facts}
        return Sight(
            facts,
            self.batches,
            self.epochs,
            self.now - began,
            self.numbers(names) if checks else [],
            0.3 * seconds,
            int(0.3 * self.faults),
            {"data": self.waiting},
            turn,
        )

    def line(self, levers: tuple[Lever, ...]) -> Any:
        return PlantedLine(self, levers)

    def choose(self, most: Safety = Safety.OTHER_DRAWS, **options: Any) -> Choice | None:
        levers, given = options.pop("levers", LEVERS), options.pop("given", {})
        options = {"title": "planted", "given": given, "levers": levers, "clock": lambda: self.now, **options}
        return FirstChoice(self, most, **options).choose()

    def chosen(self, most: Safety = Safety.OTHER_DRAWS, **options: Any) -> set[str]:
        found = self.choose(most, **options)
        return set() if found is None else {name for line in found.advice.lines for name in line.levers}


@dataclasses.dataclass
class PlantedLine:
    program: Planted
    levers: tuple[Lever, ...]

    def turn(self, steps: int, until: float = math.inf) -> Turn:
        found = self.program.look(self.levers, lambda batches: steps, checks=False).turn
        assert found is not None
        return found


def by_factor(**factors: float) -> Callable[[Names], float]:
    """Return the seconds of a step of 0.1, by what speed-ups (with _ for a space) make of it."""

    def seconds(names: Names) -> float:
        return 0.1 / math.prod(factor for name, factor in factors.items() if name.replace("_", " ") in names)

    return seconds


@pytest.mark.parametrize("batches", [8, 30, 70, 150, 400, 3000, 100_000])
@pytest.mark.parametrize("step", [0.001, 0.1, 2.0])
@pytest.mark.parametrize("facts", [{}, {"dropout": True, "step_draws": True, "threads": 4, "cores": 4}])
def test_where_nothing_pays_it_costs_at_most_three_percent(batches: int, step: float, facts: dict[str, Any]) -> None:
    program = Planted(lambda names: step, batches=batches, facts=facts, setup_seconds=0.1 * step)
    program.choose()
    # A look without steps is what a choice needs at least.
    looks = sum(not count for _, count in program.tried)
    assert program.now <= SHARE * batches * step + looks * 0.4 * step + 1e-9


def test_padding_is_left_out_without_a_turn_in_a_short_training() -> None:
    program = Planted(by_factor(packed_tokens=2.5), facts=PADDED, batches=24)
    assert program.chosen() == {"packed tokens", "fused optimizer"}
    assert [count for _, count in program.tried] == [0, 0]


def test_a_longer_training_has_one_turn_of_what_is_certain() -> None:
    program = Planted(by_factor(packed_tokens=2.5), facts=PADDED)
    found = program.choose()
    assert found is not None
    (line,) = found.advice.lines
    assert (line.levers, line.safety) == (["packed tokens", "fused optimizer"], Safety.ROUNDING)
    assert [count for _, count in program.tried] == [2, 0, 2]
    # One turn is no race: no factor is claimed.
    assert found.advice.factor(line) == ""


@pytest.mark.parametrize(
    ("most", "draws", "expected"),
    [
        (Safety.ROUNDING, False, {"packed tokens", "fused optimizer"}),
        (Safety.ROUNDING, True, {"fused optimizer"}),
        (Safety.OTHER_DRAWS, True, {"packed tokens", "fused optimizer"}),
        (Safety.SAME_BITS, False, set()),
    ],
)
def test_the_class_says_what_may_be_taken(most: Safety, draws: bool, expected: set[str]) -> None:
    program = Planted(facts={**PADDED, "step_draws": draws})
    assert program.chosen(most) == expected


def test_what_needs_consent_is_named() -> None:
    found = Planted(facts={**PADDED, "not_packed": "no transformer"}).choose()
    assert found is not None
    assert found.advice.row("batches by length").verdict == words.NOT_TRIED
    consent = Planted(facts={**PADDED, "not_packed": "no transformer"})
    assert consent.chosen(Safety.OTHER_BATCHES) == {"batches by length", "fused optimizer"}


def test_a_line_that_computes_something_else_is_wrong() -> None:
    program = Planted(facts=PADDED, numbers=lambda names: [1.5, 2.0] if "packed tokens" in names else [1.0, 2.0])
    found = program.choose()
    assert found is not None
    assert found.advice.row("packed tokens").verdict == words.WRONG
    assert found.advice.winners == ["fused optimizer"]


def test_without_numbers_to_compare_nothing_is_packed() -> None:
    assert Planted(facts=PADDED, numbers=lambda names: []).chosen() == {"fused optimizer"}


def test_the_lever_that_an_error_is_about_is_left_out() -> None:
    def fails(names: Names) -> None:
        if "fused optimizer" in names:
            raise TrialError("Trainer(fused_optimizer=True): torch has no fused LBFGS.", refused=True)

    program = Planted(facts=PADDED, fails=fails)
    assert program.chosen() == {"packed tokens"}


def test_a_line_that_turns_out_slower_is_left() -> None:
    program = Planted(by_factor(fused_optimizer=0.7))
    found = program.choose()
    assert found is not None
    assert (found.advice.lines, found.advice.row("fused optimizer").verdict) == ([], "slower")


@pytest.mark.parametrize(
    ("facts", "options", "expected"),
    [
        ({"held_tensors": True}, {}, True),
        ({"held_tensors": True, "samples_draw": True}, {}, False),
        ({}, {"waiting": 0.3}, True),
        ({}, {"waiting": 0.3, "epochs": 1.0}, False),
        ({}, {}, False),
    ],
)
def test_data_is_held_where_that_saves_reading(facts: Any, options: Any, expected: bool) -> None:
    assert ("resident data" in Planted(facts=facts, **options).chosen()) is expected


def test_memory_is_kept_where_a_step_asks_for_much_of_it() -> None:
    assert "kept memory" in Planted(faults=40_000).chosen()
    assert "kept memory" not in Planted(faults=400).chosen()


def test_less_certain_levers_stay_only_if_they_are_faster() -> None:
    facts = {"dropout": True, "step_draws": True}
    assert "fast dropout masks" in Planted(by_factor(fast_dropout_masks=1.3), facts=facts).chosen()
    assert "fast dropout masks" not in Planted(by_factor(fast_dropout_masks=1.01), facts=facts).chosen()


def test_a_resumed_training_may_spend_a_share_of_what_is_left() -> None:
    program = Planted(facts=PADDED, batches=1000)
    program.choose(done=900)
    assert program.now <= SHARE * 100 * 0.1 + 2 * 0.4 * 0.1
    assert Planted(facts=PADDED, batches=1000).choose(done=995) is None


class Padded(L.LightningModule):
    """A transformer with dropout in its attention, as most have it."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(16, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outside = batch["attention_mask"] == 0
        hidden = self.encoder(batch["x"], src_key_padding_mask=outside)
        return nn.functional.cross_entropy(self.head(hidden[:, 0]), batch["labels"])


def test_packed_blocks_are_compared_without_the_dropout_of_their_attention() -> None:
    torch.manual_seed(0)
    module = Padded().train()
    lengths = torch.tensor([3, 9, 5, 2])
    mask = (torch.arange(9) < lengths[:, None]).long()
    batch = {"x": torch.randn(4, 9, 16), "attention_mask": mask, "labels": torch.tensor([0, 1, 1, 0])}
    plain = without_draws(module, batch)
    with L.packed_blocks(module):
        packed = without_draws(module, batch)
    assert len(plain) == len(packed) > 1
    torch.testing.assert_close(torch.tensor(packed), torch.tensor(plain), rtol=1e-4, atol=1e-5)
