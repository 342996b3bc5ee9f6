"""The ladder: same work in every row, honest about what was timed."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hasten.demo import ladder, plain
from hasten.demo.digits import DigitDataset, Digits
from hasten.demo.imdb import Imdb
from hasten.demo.models import find
from hasten.demo.task import Ladder, Switches


def weights_after(task: Digits, switches: Switches) -> list[Tensor]:
    run = ladder._run(task, switches, task.batches(switches), epochs=task.epochs)
    return [parameter.detach() for parameter in run.model.parameters()]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def few(images: int, *, seed: int = 0) -> Digits:
    """The digits task with the first of its training images, in four batches."""
    task = Digits(epochs=1, batch_size=images // 4, seed=seed)
    task.train_data = DigitDataset(task.train_data.images[:images], task.train_data.labels[:images])
    return task


class Slow(Digits):
    """Digits whose loss takes a stated time a sample, and whose rows say so by their order."""

    def __init__(self, *seconds: float) -> None:
        super().__init__(epochs=2, batch_size=30)
        self.train_data = DigitDataset(self.train_data.images[:120], self.train_data.labels[:120])
        rows = Ladder("loss.backward()")
        for number in range(1, len(seconds)):
            rows.add(f"switch {number}", f"--{number}", whole_batches=number % 2 == 1, fused=number > 1)
        self.rows = rows.rows
        self.seconds = dict(zip((row.switches for row in self.rows), seconds, strict=True))
        self.now = 0.0

    def model(self, switches: Switches) -> nn.Module:
        self.now = self.seconds[switches]
        return super().model(switches)

    def loss(self, model: nn.Module, batch: plain.Batch) -> Tensor:
        time.sleep(self.now * len(batch["labels"]))
        return super().loss(model, batch)


def test_all_switches_that_keep_the_maths_end_with_the_same_weights() -> None:
    task = few(160)
    reference = weights_after(task, Switches())
    assert equal(reference, weights_after(task, Switches(hasten=True)))
    assert equal(reference, weights_after(task, Switches(hasten=True, whole_batches=True)))
    fused = weights_after(task, Switches(hasten=True, fused=True))
    assert equal(fused, weights_after(task, Switches(fused=True)))
    for one, other in zip(reference, fused, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_two_runs_of_a_row_are_the_same_run() -> None:
    task = few(160)
    switches = Switches(hasten=True, whole_batches=True)
    assert equal(weights_after(task, switches), weights_after(task, switches))
    other = weights_after(few(160, seed=1), switches)
    assert not equal(weights_after(task, switches), other)


def test_hand_written_and_hasten_rows_count_the_same_accuracy() -> None:
    task = Digits(epochs=2, batch_size=32)
    results = {}
    for switches in (Switches(), Switches(hasten=True)):
        trained = ladder._run(task, switches, task.batches(switches), epochs=2)
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


def test_quick_rows_are_trained_in_full_and_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "PROBE_STEPS", 2)
    task = Slow(0.0, 0.0)
    results = ladder.climb(task, row_seconds=60, rounds=2, say=lambda line: None)
    for result in results:
        assert not result.sampled
        assert len(result.full_seconds) == 2
        assert result.accuracy is not None
        assert result.validation_accuracy is not None
        assert result.steps == 2 * 4
        assert result.basis == "trained in full: 8 steps, median of 2 runs"


def test_slow_rows_are_sampled_and_the_fastest_still_trained_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "PROBE_SECONDS", 0.0)
    # Batches of 30, 8 steps: 36 s, 3.6 s and 1.7 s at least for the whole training.
    task = Slow(0.15, 0.015, 0.007)
    said: list[str] = []
    slowest, slow, fast = ladder.climb(task, row_seconds=1.5, rounds=3, say=said.append)
    assert slowest.sampled
    assert slowest.basis == "one step of 2 samples, scaled to all 8 steps"
    assert slowest.seconds >= 8 * 30 * 0.15
    assert slow.sampled
    assert slow.basis == "3 of 8 steps"
    assert slow.accuracy is None
    assert slow.seconds >= 8 * 30 * 0.015
    # Compared by its sample, as the others are; trained in full for its accuracy.
    assert fast.sampled
    assert fast.afterwards_seconds is not None
    assert fast.afterwards_seconds >= 8 * 30 * 0.007
    assert fast.accuracy is not None
    assert slowest.afterwards_seconds is slow.afterwards_seconds is None
    assert fast.seconds < slow.seconds < slowest.seconds
    assert any("now in full" in line for line in said)


def test_asked_for_in_full_every_row_is() -> None:
    results = ladder.climb(Slow(0.001, 0.0), row_seconds=0.01, full=True, say=lambda line: None)
    assert all(len(result.full_seconds) == 1 and result.accuracy is not None for result in results)


def test_a_sample_stands_for_narrow_and_wide_batches_alike() -> None:
    class Widths(Slow):
        def width(self, switches: Switches, batch: list[int]) -> int:
            return batch[0]

    task = Widths(0.0)
    result = ladder.Result(task.rows[0], 100)
    by_width = [[number] for number in range(100)]
    left = ladder._probe(task, result, by_width, row_seconds=1e-9)
    assert len(result.step_seconds) == 1
    # The median batch is timed by the probe; a sixth from either end is left.
    assert left == [[16], [83]]


@pytest.mark.parametrize(("name", "value"), [("row_seconds", 0), ("row_seconds", -1), ("rounds", 0)])
def test_senseless_limits_are_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{name}={value}"):
        ladder.climb(Slow(0.0), **{"row_seconds": 1.0, name: value})


def test_each_row_adds_one_switch(archive, tmp_path) -> None:
    imdb = Imdb(
        archive,
        find("minilm", random_weights=True),
        max_length=16,
        cache=tmp_path / "cache",
        say=lambda line: None,
    )
    for task in (Digits(), imdb):
        assert task.rows[0].switches == Switches()
        assert task.rows[1].switches == Switches(hasten=True)
        for above, below in zip(task.rows, task.rows[1:], strict=False):
            changed = [
                name
                for name in vars(below.switches)
                if getattr(below.switches, name) != getattr(above.switches, name)
            ]
            assert len(changed) == 1
            assert (
                replace(above.switches, **{changed[0]: getattr(below.switches, changed[0])}) == below.switches
            )


def test_imdb_rows_do_the_work_their_names_say(archive, tmp_path) -> None:
    task = Imdb(
        archive,
        find("minilm", random_weights=True),
        limit=60,
        max_length=40,
        batch_size=6,
        cache=tmp_path / "cache",
        say=lambda line: None,
    )

    def widths(switches: Switches) -> list[int]:
        loader = task.train_loader(switches, task.batches(switches))
        return [batch["input_ids"].shape[1] for batch in loader]

    def tokens(switches: Switches) -> int:
        return int(
            sum(
                batch["attention_mask"].sum() for batch in task.train_loader(switches, task.batches(switches))
            )
        )

    padded, own, by_length = (
        Switches(),
        Switches(pad_each_batch=True),
        Switches(pad_each_batch=True, by_length=True),
    )
    assert set(widths(padded)) == {40}
    assert sum(widths(by_length)) < sum(widths(own)) <= sum(widths(padded))
    assert tokens(padded) == tokens(own) == tokens(by_length) == sum(task.train_data.lengths)
    samples = [sample for batch in task.batches(by_length) for sample in batch]
    assert sorted(samples) == list(range(len(task.train_data)))
    tested = sum(len(batch["labels"]) for batch in task.test_loader())
    assert tested == len(task.test_data) == 80 - 42 - 6
