"""Every row of a ladder trains the same model, whatever makes it fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hasten_tools.demo.images import Digits
from hasten_tools.demo.task import RowVariant, rows_by_hand

from .conftest import imdb, train, weights_of


def few(images: int, *, seed: int = 0) -> Digits:
    """The digits task with the first of its training images, in four batches."""
    task = Digits(epochs=1, batch_size=images // 4, seed=seed)
    task.train_data = task.train_data.part(torch.arange(images))
    return task


def in_hasten(**arguments: Any) -> RowVariant:
    return RowVariant(trainer=arguments)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_rows_that_keep_the_maths_end_with_the_same_weights_and_bf16_computes_in_bf16() -> None:
    task = few(160)
    reference = weights_of(task, RowVariant())
    for arguments in ({}, {"resident": True}, {"allocator": "keep"}):
        assert equal(reference, weights_of(task, in_hasten(**arguments)))
    fused = weights_of(task, in_hasten(fused_optimizer=True))
    assert not equal(reference, fused)
    for name, value in reference.items():
        torch.testing.assert_close(value, fused[name], rtol=1e-3, atol=1e-4)
    mixed = weights_of(task, in_hasten(precision="bf16-mixed"))
    assert not equal(reference, mixed)
    assert all(value.dtype is torch.float32 for value in mixed.values())


def test_two_runs_of_a_row_are_the_same_run() -> None:
    variant = in_hasten(packed=True, dropout="fast")
    one = weights_of(few(160), variant)
    assert equal(one, weights_of(few(160), variant))
    assert not equal(one, weights_of(few(160, seed=1), variant))


def test_hand_written_and_hasten_rows_have_the_same_accuracy() -> None:
    task = Digits(epochs=2, batch_size=32)
    plain, same = (train(task, variant).handlers["accuracy"]() for variant in (RowVariant(), in_hasten()))
    assert plain == same
    assert plain["test"] > 0.5


def test_loops_by_hand_train_the_same_model(archive: Path) -> None:
    """Padding, the fused optimizer and bfloat16 change rounding, not what is learned."""
    task = imdb(archive, limit=12, batch_size=4, epochs=2, max_length=32)
    variants = [RowVariant(), *(row.on(RowVariant()) for row in rows_by_hand(bf16=True))]
    losses = [[turn["loss"] for turn in train(task, variant).turns] for variant in variants]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=3e-2)
    assert losses[2] != losses[1]


def test_the_weights_are_those_after_the_whole_training(archive: Path) -> None:
    task = imdb(archive, limit=12, batch_size=4, epochs=2)
    session = train(task, RowVariant())
    assert len(session.turns) == task.steps(RowVariant()) == 2 * -(-len(task.train_data) // 4)
    assert session.handlers["accuracy"]().keys() == {"validation", "test"}


@pytest.mark.parametrize(
    ("variant", "padded"),
    [
        (RowVariant(), True),
        (in_hasten(batching="length"), False),
        (in_hasten(packed=True), None),
        (in_hasten(packed="first_token"), None),
        (RowVariant(max_length=8), False),
        (RowVariant(to_longest=True), False),
    ],
    ids=["padded", "by length", "packed", "first token", "shorter", "to the longest"],
)
def test_steps_count_as_their_share_of_the_whole_training(
    archive: Path, variant: RowVariant, padded: bool | None
) -> None:
    """Rows are compared by what is left to train, whatever they make of a batch."""
    task = imdb(archive, limit=12, batch_size=4, max_length=32)
    turns = train(task, variant).turns
    whole = sum(task.lengths(RowVariant()))
    assert sum(int(turn["tokens"]) for turn in turns) == pytest.approx(whole, rel=0.05)
    assert all((turn["slots"] is None) == (padded is None) for turn in turns)
    if padded:
        assert sum(turn["slots"] for turn in turns) == 32 * len(task.train_data)
