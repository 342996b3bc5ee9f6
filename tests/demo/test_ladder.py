"""The ladder: same work in every row, honest about what was timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hasten.demo import ladder, plain
from hasten.demo.digits import DigitDataset, Digits
from hasten.demo.imdb import Imdb
from hasten.demo.models import find
from hasten.demo.task import Ladder, Row, Switches, Task
from hasten.demo.vit import Vit
from hasten.speed.safety import Safety


def weights_after(task: Digits, switches: Switches) -> list[Tensor]:
    run = ladder._run(task, switches)
    return [parameter.detach() for parameter in run.model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def few(images: int, *, seed: int = 0) -> Digits:
    """The digits task with the first of its training images, in four batches."""
    task = Digits(epochs=1, batch_size=images // 4, seed=seed)
    task.train_data = DigitDataset(task.train_data.images[:images], task.train_data.labels[:images])
    return task


class Slow(Digits):
    """Digits whose loss takes a stated time a sample, by a clock of its own; rows differ in ``max_length``."""

    clock = 0.0

    def __init__(self, *seconds: float) -> None:
        super().__init__(epochs=2, batch_size=30)
        self.train_data = DigitDataset(self.train_data.images[:120], self.train_data.labels[:120])
        rows = Ladder("loss.backward()")
        for number in range(1, len(seconds)):
            # Samples are as long as they were: max_length only says which time they take.
            changes = {"hasten": True, "max_length": number}
            rows.rows.append(Row(f"switch {number}", f"--{number}", changes, Safety.SAME_BITS))
        self.rows = rows.rows
        self.seconds = seconds
        self.now = 0.0

    def model(self, switches: Switches) -> nn.Module:
        self.now = self.seconds[switches.max_length or 0]
        return super().model(switches)

    def loss(self, model: nn.Module, batch: plain.Batch) -> Tensor:
        Slow.clock += self.now * len(batch["labels"])
        return super().loss(model, batch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes by the losses of ``Slow`` alone, and each of its steps is long."""
    monkeypatch.setattr(ladder, "_now", lambda device: Slow.clock)
    monkeypatch.setattr(ladder, "PROBE_SECONDS", 0.0)
    monkeypatch.setattr(ladder, "PROBE_STEPS", 2)


def test_all_switches_that_keep_the_maths_end_with_the_same_weights() -> None:
    task = few(160)
    reference = weights_after(task, Switches())
    assert equal(reference, weights_after(task, Switches(hasten=True)))
    assert equal(reference, weights_after(task, Switches(hasten=True, resident=True)))
    assert equal(reference, weights_after(task, Switches(hasten=True, keep=True)))
    fused = weights_after(task, Switches(hasten=True, fused=True))
    assert not equal(reference, fused)
    for one, other in zip(reference, fused, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_two_runs_of_a_row_are_the_same_run() -> None:
    task = few(160)
    switches = Switches(hasten=True, packed=True, fast_dropout=True)
    assert equal(weights_after(task, switches), weights_after(task, switches))
    other = weights_after(few(160, seed=1), switches)
    assert not equal(weights_after(task, switches), other)


def test_hand_written_and_hasten_rows_count_the_same_accuracy() -> None:
    task = Digits(epochs=2, batch_size=32)
    results = {}
    for switches in (Switches(), Switches(hasten=True)):
        trained = ladder._run(task, switches)
        results[switches] = trained.accuracy(task.test_loader())
    one, other = results.values()
    assert one == pytest.approx(other, abs=1e-6)
    assert one > 0.5


def test_bf16_computes_in_bf16() -> None:
    task = few(40)
    exact = weights_after(task, Switches(hasten=True))
    mixed = weights_after(task, Switches(hasten=True, precision="bf16-mixed"))
    assert not equal(exact, mixed)
    assert all(parameter.dtype is torch.float32 for parameter in mixed)


@pytest.mark.usefixtures("clock")
def test_quick_rows_are_trained_in_full_and_tested() -> None:
    task = Slow(0.001, 0.001)
    results = ladder.climb(task, row_seconds=60, rounds=2, say=lambda line: None)
    for result in results:
        assert not result.sampled
        assert len(result.full_seconds) == 2
        assert result.accuracy is not None
        assert result.validation_accuracy is not None
        assert result.steps == 2 * 4
        assert result.basis == "trained in full: 8 steps, median of 2 runs"


@pytest.mark.usefixtures("clock")
def test_slow_rows_are_sampled_and_the_fastest_still_trained_in_full() -> None:
    # Batches of 30, 8 steps: 36 s, 3.6 s and 1.7 s at least for the whole training.
    task = Slow(0.15, 0.015, 0.007)
    said: list[str] = []
    slowest, slow, fast = ladder.climb(task, row_seconds=1.5, rounds=3, say=said.append)
    assert slowest.sampled
    assert slowest.basis == "one step of 2 samples, scaled to all 8 steps"
    assert slowest.seconds == pytest.approx(8 * 30 * 0.15)
    assert slow.sampled
    assert slow.basis == "3 of 8 steps"
    assert slow.accuracy is None
    assert slow.seconds == pytest.approx(8 * 30 * 0.015)
    # Compared by its sample, as the others are; trained in full for its accuracy.
    assert fast.sampled
    assert fast.afterwards_seconds is not None
    assert fast.afterwards_seconds == pytest.approx(8 * 30 * 0.007)
    assert fast.accuracy is not None
    assert slowest.afterwards_seconds is slow.afterwards_seconds is None
    assert fast.seconds < slow.seconds < slowest.seconds
    assert any(line.startswith(f"{fast.row.name}: in full") for line in said)


@pytest.mark.usefixtures("clock")
def test_asked_for_in_full_every_row_is() -> None:
    results = ladder.climb(Slow(0.001, 0.0005), row_seconds=0.01, full=True, say=lambda line: None)
    assert all(len(result.full_seconds) == 1 and result.accuracy is not None for result in results)


@pytest.mark.usefixtures("clock")
def test_a_sample_stands_for_narrow_and_wide_batches_alike() -> None:
    class Widths(Slow):
        def length(self, switches: Switches, sample: int) -> int:
            return sample

    task = Widths(0.001)
    result = ladder.Result(task.rows[0], Switches(), 100)
    by_width = [[number] for number in range(100)]
    left = ladder._probe(task, result, by_width, row_seconds=1e-9)
    assert len(result.step_seconds) == 1
    # The median batch is timed by the probe; a sixth from either end is left.
    assert left == [[16], [83]]


@pytest.mark.parametrize(
    ("name", "value"), [("row_seconds", 0), ("row_seconds", -1), ("rounds", 0), ("seeds", 0)]
)
def test_senseless_limits_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{name}={value}"):
        ladder.climb(Slow(0.0), **{"row_seconds": 1.0, name: value})


@pytest.mark.usefixtures("clock")
def test_a_row_that_loses_is_shown_and_left_out_below() -> None:
    task = Slow(0.004, 0.004, 0.02, 0.001)
    task.rows[2].changes["fused"] = True
    said: list[str] = []
    _, same, loses, wins = ladder.climb(task, row_seconds=1.0, rounds=1, say=said.append)
    assert [same.kept, loses.kept, wins.kept] == [True, False, True]
    assert loses.switches.fused
    assert not wins.switches.fused
    assert any(line.startswith("switch 2") and "left out of the rows below" in line for line in said)


@pytest.mark.usefixtures("clock")
def test_where_it_is_not_clear_at_once_the_switch_and_its_absence_take_turns() -> None:
    task = Slow(0.004, 0.004, 0.005, 0.0042)
    results = ladder.climb(task, row_seconds=1.0, rounds=1, say=lambda line: None)
    assert [result.kept for result in results] == [True, True, False, True]


@pytest.mark.usefixtures("clock")
def test_what_changes_the_maths_is_not_the_row_whose_accuracy_is_compared() -> None:
    task = Slow(0.004, 0.002, 0.0005)
    task.rows[2] = Row(task.rows[2].name, task.rows[2].line, task.rows[2].changes, Safety.OTHER_MATHS)
    first, same, other = ladder.climb(task, row_seconds=0.05, rounds=1, seeds=2, say=lambda line: None)
    assert len(first.accuracies) == len(same.accuracies) == 2
    assert first.accuracy == pytest.approx(sum(first.accuracies) / 2)
    # The fastest is trained in full in any case.
    assert len(other.accuracies) >= 1


def test_starting_and_compiling_are_in_the_whole_time_only() -> None:
    row = Digits().rows[0]
    result = ladder.Result(row, Switches(), 100, step_seconds=[0.1, 0.1], start_seconds=[30.0, 2.0])
    assert result.seconds == pytest.approx(10.0)
    assert result.all_in == pytest.approx(40.0)


def imdb(archive, tmp_path, **options) -> Imdb:
    return Imdb(
        archive,
        find("minilm", random_weights=True),
        cache=tmp_path / "cache",
        say=lambda line: None,
        **options,
    )


def tasks(archive, tmp_path) -> Iterator[Task]:
    for device in map(torch.device, ("cpu", "cuda")):
        yield Digits(device=device)
        yield imdb(archive, tmp_path, max_length=16, device=device)
    yield Vit(random_images=True, limit=60, side=32, width=64, depth=1, say=lambda line: None, device=device)


def test_each_row_adds_one_switch(archive, tmp_path) -> None:
    for task in tasks(archive, tmp_path):
        assert dict(task.rows[0].changes) == {}
        assert dict(task.rows[1].changes) == {"hasten": True}
        assert all(len(row.changes) == 1 for row in task.rows[1:])
        same = [row.same_maths for row in task.rows]
        assert same == sorted(same, reverse=True)


def test_each_switch_is_the_argument_its_row_prints(archive, tmp_path) -> None:
    """The line of a row is what it does: the argument is in it, with its value."""
    for task in tasks(archive, tmp_path):
        for row in task.rows[2:]:
            arguments = row.on(Switches(hasten=True)).arguments()
            if row.same_maths:
                ((name, value),) = arguments.items()
                assert row.line in (f"L.Trainer({name}={value!r})", f'L.Trainer({name}="{value}")')
            else:
                assert not arguments


def test_the_class_of_a_row_is_that_of_its_lever(archive, tmp_path) -> None:
    found = {row.name: row.safety for task in tasks(archive, tmp_path) for row in task.rows}
    assert found["the same in hasten"] == found["pages kept"] == found["data in memory"] == Safety.SAME_BITS
    assert found["fused AdamW"] == Safety.ROUNDING
    assert found["packed"] == found["cheap dropout masks"] == found["compiled"] == Safety.OTHER_DRAWS
    assert found["batches by length"] == Safety.OTHER_BATCHES
    assert found["bf16"] == found["TF32"] == Safety.LOWER_PRECISION
    assert found["no attention dropout"] == found["lower half frozen"] == Safety.OTHER_MATHS


def test_on_a_gpu_packed_rows_come_last_and_are_not_recorded(archive, tmp_path) -> None:
    rows = imdb(archive, tmp_path, max_length=16, device=torch.device("cuda")).rows
    same = [row.name for row in rows if row.same_maths]
    assert same[-6:] == [
        "batches by length", "bf16", "compiled", "CUDA graphs", "packed", "last block for one token",
    ]  # fmt: skip
    switches, compiled = Switches(), {}
    for row in rows:
        switches = row.on(switches)
        compiled[row.name] = switches.arguments().get("compile")
    assert [compiled[name] for name in same[-4:]] == [True, {"mode": "reduce-overhead"}, True, True]


def test_all_that_is_recorded_is_recorded_before_the_clock_starts(archive, tmp_path) -> None:
    task = imdb(archive, tmp_path, limit=60, max_length=40, batch_size=4)
    plain = Switches(hasten=True, by_length=True)
    compiled, graphs = replace(plain, compiled=True), replace(plain, compiled=True, graphs=True)
    batches = task.batches(graphs)
    widths = set(task.padded_widths(graphs, batches))
    assert len(widths) > 1
    assert ladder._warm_up(task, plain, batches) == []
    assert ladder._warm_up(task, compiled, batches) == batches[:1]
    # The odd batch first, whose size would else be the one that is recorded.
    warm_up = ladder._warm_up(task, graphs, sorted(batches, key=len))
    assert len(warm_up) == 3 * len(widths)
    assert set(task.padded_widths(graphs, warm_up)) == widths
    assert len(warm_up[0]) == 4


def test_short_steps_are_probed_for_a_second_on_a_gpu() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [ladder._probe_steps(gpu, about) for about in (0.002, 0.1, 2.0)] == [500, 20, 1]
    assert [ladder._probe_steps(cpu, about) for about in (0.002, 2.0)] == [20, 1]


@pytest.mark.usefixtures("clock")
def test_results_are_kept_after_the_probes_and_each_round() -> None:
    kept: list[list[int]] = []
    ladder.climb(
        Slow(0.001, 0.001),
        row_seconds=60,
        rounds=2,
        say=lambda line: None,
        keep=lambda results: kept.append([len(result.full_seconds) for result in results]),
    )
    assert kept == [[0, 0], [1, 1], [2, 2]]


def test_imdb_rows_do_the_work_their_names_say(archive, tmp_path) -> None:
    task = imdb(archive, tmp_path, limit=60, max_length=40, batch_size=6)

    def batches(switches: Switches) -> list[plain.Batch]:
        return list(task.loader(switches, task.batches(switches)))

    def widths(switches: Switches) -> list[int]:
        return [batch["input_ids"].shape[1] for batch in batches(switches)]

    def tokens(switches: Switches) -> int:
        return int(sum(batch["attention_mask"].sum() for batch in batches(switches)))

    padded, by_length, shorter = Switches(), Switches(by_length=True), Switches(by_length=True, max_length=20)
    assert set(widths(padded)) == {40}
    assert sum(widths(by_length)) < sum(widths(padded))
    assert max(widths(shorter)) == 20
    assert tokens(padded) == tokens(by_length) == sum(task.train_data.lengths)
    assert tokens(shorter) == sum(min(length, 20) for length in task.train_data.lengths)
    for switches in (padded, by_length):
        samples = [sample for batch in task.batches(switches) for sample in batch]
        assert sorted(samples) == list(range(len(task.train_data)))
        computed = sum(batch["input_ids"].numel() for batch in batches(switches))
        assert task.pad_share(switches) == pytest.approx(1 - tokens(switches) / computed)
    assert task.pad_share(Switches(packed=True)) == task.pad_share(Switches(first_token=True)) == 0.0
    tested = sum(len(batch["labels"]) for batch in task.test_loader())
    assert tested == len(task.test_data) == 80 - 42 - 6


def test_another_seed_draws_other_weights_and_another_order(archive, tmp_path) -> None:
    for task in (Digits(), imdb(archive, tmp_path, max_length=16)):
        other = task.with_seed(task.seed + 1)
        assert task.batches(Switches()) != other.batches(Switches())
        assert not equal(
            list(task.model(Switches()).parameters()), list(other.model(Switches()).parameters())
        )
        assert equal(list(task.model(Switches()).parameters()), list(task.model(Switches()).parameters()))
