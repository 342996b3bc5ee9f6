"""The ladder: rows take turns with the row they build on, stay where they pay, and are honest about what was timed."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.refusals import refused

from hasten_tools.demo import cumulative
from hasten_tools.demo.cumulative import Measurement, Result
from hasten_tools.demo.images import Digits, Vit
from hasten_tools.demo.task import LadderRow, RowVariant, Task, first_rows
from hasten_tools.speed.safety import Safety
from hasten_tools.speed.trial_processes import TrialError

from .conftest import FakeStarter, Seconds, imdb, make_folder, silent


def starter_of(*rows: float | Seconds | TrialError) -> FakeStarter:
    """Start each row with its seconds; ``max_length`` says which row a variant is."""
    return FakeStarter(lambda variant: rows[variant.max_length or 0])


def row(number: int, *, safety: Safety = Safety.SAME_BITS, alone: bool = False, **arguments: Any) -> LadderRow:
    return LadderRow(f"row {number}", f"--{number}", arguments, {"max_length": number}, safety, alone)


def measured(
    starter: FakeStarter | tuple[Any, ...],
    *rows: LadderRow,
    seeds: int = 1,
    row_seconds: float = 0.2,
    full: bool = False,
    say: Callable[[str], Any] = silent,
) -> list[Result]:
    """Measure 20 steps of digits: 2 epochs of 10. The rows after the first two are numbered by default."""
    if isinstance(starter, tuple):
        rows = rows or tuple(map(row, range(1, len(starter))))
        starter = starter_of(*starter)
    task: Any = Digits(epochs=2, batch_size=126)
    fake: Any = starter
    found = Measurement(task=task, starter=fake, row_seconds=row_seconds, rounds=2, full=full, say=say)
    for each in (first_rows(2)[0], *rows):
        found.add(each)
    found.finish(seeds)
    return found.results


def test_each_row_builds_on_those_above_that_pay() -> None:
    lines: list[str] = []
    starter = starter_of(0.4, 0.4, 0.8, 0.1, 0.1)
    rows = (row(1), row(2, fused_optimizer=True), row(3, packed=True), row(4, resident=True))
    _, same, loses, wins, nothing = measured(starter, *rows, say=lines.append)
    assert [same.kept, loses.kept, wins.kept, nothing.kept] == [True, False, True, False]
    assert loses.variant.trainer == {"fused_optimizer": True}
    assert wins.variant.trainer == {"packed": True}
    assert wins.base is same
    assert any(line.startswith("row 2") and "left out of the rows below" in line for line in lines)
    # Each in a process of its own; that of the row that is trained in full ends, too.
    assert len(starter.started) == 5
    assert starter.started[3][2].closed


def test_a_busy_minute_does_not_drop_a_row_that_pays() -> None:
    """Both rows are slow in it: what counts is how they compare turn by turn."""

    def busy(seconds: float) -> Seconds:
        return lambda turn: seconds * (10 if turn <= 3 else 1)

    _, same, packed = measured((0.4, busy(0.4), busy(0.1)))
    assert packed.kept
    assert same.seconds / packed.seconds == pytest.approx(4.0, rel=0.01)


def test_slow_rows_are_sampled_and_the_fastest_is_trained_in_full() -> None:
    slowest, slow, fast = measured((4.0, 1.0, 0.5), row_seconds=1.5)
    assert slowest.basis == "3 of 20 steps"
    assert slowest.seconds == pytest.approx(80.0, rel=1e-3)
    assert slow.seconds == pytest.approx(20.0, rel=1e-3)
    assert slowest.accuracy is slow.accuracy is None
    # Compared by its sample, as the others are; trained in full for its accuracy.
    assert not fast.in_full
    assert fast.full_seconds == pytest.approx(10.0, rel=1e-3)
    assert (fast.accuracy, fast.validation_accuracy) == (0.9, 0.8)
    assert slow.pad_share == 0.5


@pytest.mark.parametrize(
    ("seconds", "options"), [((0.04, 0.04, 0.01), {"row_seconds": 1.0}), ((4, 2, 1), {"full": True})]
)
def test_quick_rows_and_with_full_all_rows_are_trained_in_full(seconds: Any, options: Any) -> None:
    for result in measured(seconds, **options):
        assert result.in_full
        assert result.accuracy == 0.9
        assert result.basis == "trained in full: 20 steps"


def test_what_a_row_refuses_is_in_its_result() -> None:
    refusal = TrialError("packed=True: not for this model.\nMore.", refused=True)
    _, _, refused, last = measured((0.4, 0.4, refusal, 0.1))
    assert refused.refused == "packed=True: not for this model."
    assert not refused.kept
    assert last.kept
    assert refused.seconds == math.inf


@pytest.mark.parametrize("rows", [(TrialError("broken", refused=True),), (0.4, 0.4, TrialError("broken"))])
def test_a_row_that_breaks_ends_the_demo(rows: tuple[Any, ...]) -> None:
    with pytest.raises(TrialError, match="broken"):
        measured(rows)


def test_several_seeds_train_the_first_row_and_the_fastest_of_the_same_maths() -> None:
    starter = starter_of(0.4, 0.2, 0.05)
    results = measured(starter, row(1), row(2, safety=Safety.OTHER_MATHS), seeds=3)
    assert [len(result.accuracies) for result in results] == [3, 3, 1]
    assert {seed for _, seed, _ in starter.started} == {0, 1, 2}


def test_a_row_that_stands_alone_is_compared_with_the_first() -> None:
    rows = (row(1), row(2, packed=True), row(3, alone=True, speed="auto"))
    first, _, fast, choice = measured((0.4, 0.4, 0.1, 0.05), *rows)
    assert fast.kept
    assert choice.base is first
    assert choice.variant.trainer == {"speed": "auto"}


@pytest.mark.parametrize(("name", "value"), [("row_seconds", 0), ("rounds", 0), ("seeds", 0)])
def test_senseless_limits_are_refused(name: str, value: int) -> None:
    with refused(ValueError, name, says=f"{name}={value}"):
        cumulative.measure(Digits(), **{"row_seconds": 1.0, name: value})


def test_a_task_is_shortened_to_what_the_plain_loop_trains_in_its_time() -> None:
    found: list[int] = []
    task: Any = SimpleNamespace(
        full_seconds=0.5,
        batch_size=8,
        device=torch.device("cpu"),
        lengths=lambda variant: [1] * 1000,
        users_loader=lambda variant: [{"labels": torch.zeros(8)}],
        model=lambda variant: torch.nn.Linear(1, 1),
        loss=lambda model, batch: model(batch["labels"].view(-1, 1)).sum(),
        shorten=found.append,
    )
    cumulative.shorten(task)
    # Steps of microseconds: all of them fit.
    assert found == [1000]
    task.full_seconds = 1e-9
    cumulative.shorten(task)
    assert found[1] == 8 * cumulative.FEWEST_STEPS


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    """Digits, imdb and vit, on a CPU and on a GPU."""
    folder = make_folder(tmp_path_factory.mktemp("tasks") / "aclImdb")
    small: dict[str, Any] = {"random_images": True, "limit": 60, "side": 32, "width": 64, "depth": 1, "say": silent}
    found: list[Task] = []
    for device in map(torch.device, ("cpu", "cuda")):
        found += [Digits(device=device), imdb(folder, device=device), Vit(**small, device=device)]
    return found


def test_each_row_changes_one_thing_and_prints_it(tasks: list[Task]) -> None:
    for task in tasks:
        first, same, *rows = [each for each in task.rows if not each.by_hand]
        assert not first.arguments
        assert not same.arguments
        for each in rows:
            assert len(each.arguments) + len(each.changes) == 1
            for name, value in each.arguments.items():
                assert each.line in (f"L.Trainer({name}={value!r})", f'L.Trainer({name}="{value}")')
            assert each.same_maths == (not each.changes)


def test_on_a_gpu_packed_rows_come_last_and_are_not_recorded(tasks: list[Task]) -> None:
    imdb = tasks[4]
    names = [each.name for each in imdb.rows if each.same_maths and not each.alone]
    assert names[-6:] == [
        "batches by length", "bf16", "compiled", "CUDA graphs", "packed", "last block for one token",
    ]  # fmt: skip
    variant, compiled = RowVariant(), []
    for each in [each for each in imdb.rows if not each.by_hand][:10]:
        variant = each.on(variant)
        compiled.append(variant.argument("compile"))
    assert compiled[-4:] == [True, {"mode": "reduce-overhead"}, True, True]
