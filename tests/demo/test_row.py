"""Every row of a ladder trains the same model, whatever makes it fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hasten.demo.digits import DigitDataset, Digits
from hasten.demo.imdb import Imdb
from hasten.demo.task import RowVariant
from hasten.demo.text_models import find

from .conftest import train, weights_of


def few(images: int, *, seed: int = 0) -> Digits:
    """The digits task with the first of its training images, in four batches."""
    task = Digits(epochs=1, batch_size=images // 4, seed=seed)
    task.train_data = DigitDataset(task.train_data.images[:images], task.train_data.labels[:images])
    return task


def in_hasten(**arguments: Any) -> RowVariant:
    return RowVariant(trainer=arguments)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_all_rows_that_keep_the_maths_end_with_the_same_weights() -> None:
    task = few(160)
    reference = weights_of(task, RowVariant())
    for arguments in ({}, {"resident": True}, {"allocator": "keep"}):
        assert equal(reference, weights_of(task, in_hasten(**arguments)))
    fused = weights_of(task, in_hasten(fused_optimizer=True))
    assert not equal(reference, fused)
    for name, value in reference.items():
        torch.testing.assert_close(value, fused[name], rtol=1e-3, atol=1e-4)


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


def test_bf16_computes_in_bf16() -> None:
    task = few(40)
    exact, mixed = weights_of(task, in_hasten()), weights_of(task, in_hasten(precision="bf16-mixed"))
    assert not equal(exact, mixed)
    assert all(value.dtype is torch.float32 for value in mixed.values())


def test_the_weights_are_those_after_the_whole_training(archive: Path, tmp_path: Path) -> None:
    task = imdb(archive, tmp_path, epochs=2)
    session = train(task, RowVariant())
    assert len(session.turns) == task.steps(RowVariant()) == 2 * -(-len(task.train_data) // 4)
    assert session.handlers["accuracy"]().keys() == {"validation", "test"}


def imdb(archive: Path, tmp_path: Path, **options: Any) -> Imdb:
    return Imdb(
        archive,
        find("minilm", random_weights=True),
        **{"limit": 12, "max_length": 16, "batch_size": 4, "cache": tmp_path, **options},
        say=lambda line: None,
    )


@pytest.mark.parametrize(
    "variant",
    [RowVariant(), in_hasten(batching="length"), in_hasten(packed=True), RowVariant(max_length=8)],
    ids=["padded", "by length", "packed", "shorter"],
)
def test_steps_count_as_their_share_of_the_whole_training(
    archive: Path, tmp_path: Path, variant: RowVariant
) -> None:
    """Rows are compared by what is left to train, whatever they make of a batch."""
    task = imdb(archive, tmp_path)
    counted = sum(int(turn["tokens"]) for turn in train(task, variant).turns)
    assert counted == pytest.approx(sum(task.lengths(RowVariant())), rel=0.05)


def test_padding_is_counted_where_it_is_computed(archive: Path, tmp_path: Path) -> None:
    task = imdb(archive, tmp_path, max_length=64)
    padded, packed = (train(task, variant).turns for variant in (RowVariant(), in_hasten(packed=True)))
    assert sum(turn["slots"] for turn in padded) == 64 * len(task.train_data)
    assert all(turn["slots"] is None for turn in packed)
