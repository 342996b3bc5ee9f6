"""``Trainer(batching=...)``: the user's loader in batches of like length, with the same results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from hasten.batching.sample_lengths import sample_lengths
from hasten.callbacks import ModelCheckpoint
from hasten.data import (
    LengthBatching,
    LengthBatchSampler,
    PackCollator,
    PackedBatchSampler,
    PadCollator,
    pad_collate,
    rebatch,
)
from tests.batching.sequences import LONGEST, Padded, Reader, Sequences, lengths_of
from tests.models import quiet, same_weights
from tests.refusals import refused


def loader(data: Any = None, batch_size: int = 4, **options: Any) -> Any:
    options = {"shuffle": True, "collate_fn": pad_collate, **options}
    return DataLoader(Sequences() if data is None else data, batch_size, **options)


def trained(batching: Any, given: Any = None, **arguments: Any) -> Reader:
    torch.manual_seed(0)
    module = Reader()
    quiet(batching=batching, **{"max_epochs": 2, **arguments}).fit(module, loader() if given is None else given)
    return module


def tokens(module: Reader) -> int:
    return sum(rows * width for rows, width in module.shapes)


@pytest.mark.parametrize("batching", ["length", "tokens:100", LengthBatching(max_tokens=80)])
def test_every_sample_comes_once_an_epoch_with_the_loss_it_has_in_padded_batches(batching: Any) -> None:
    plain = trained(None, loader(Padded(), collate_fn=None))
    mine = trained(batching)
    assert [sorted(epoch) for epoch in mine.epochs] == [list(range(40))] * 2
    assert mine.epochs[0] != mine.epochs[1]
    assert mine.losses == pytest.approx(plain.losses, abs=1e-5)
    assert tokens(mine) < 0.75 * tokens(plain)
    assert len(set(mine.shapes)) < 8


def test_samples_need_no_padding_of_the_users() -> None:
    plain = trained(None, loader(Padded(), collate_fn=None))
    mine = trained("length", loader(Padded(), collate_fn=None))
    assert set(plain.shapes) == {(4, LONGEST)}
    assert {width for _, width in mine.shapes} == {8, 16, 24}
    assert mine.losses == pytest.approx(plain.losses, abs=1e-5)
    module = trained("length", loader(collate_fn=None))  # Of different sizes.
    assert sorted(module.epochs[0]) == list(range(40))


def of_lengths(*lengths: int, **fields: Callable[[int], Any]) -> list[dict[str, Any]]:
    """Samples of so many tokens, with further fields made of their number."""
    return [
        {"input_ids": torch.arange(1, length + 1), **{name: make(length) for name, make in fields.items()}}
        for length in lengths
    ]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate_fn", [None, pad_collate, PadCollator()])
def test_a_field_of_a_fixed_size_is_never_padded_though_texts_may_be_as_long(collate_fn: Any, workers: int) -> None:
    data: Any = of_lengths(
        6, 6, 6, 6, 20, 21, 12, 13, features=lambda n: torch.ones(6), labels=lambda n: torch.eye(6)[n % 6]
    )
    given = DataLoader(data, 4, collate_fn=collate_fn, num_workers=workers)
    batches = list(rebatch(given, LengthBatching()))
    assert sorted(batch["input_ids"].shape[1] for batch in batches)[-1] >= 21
    for batch in batches:
        assert batch["features"].tolist() == [[1.0] * 6] * 4
        assert batch["labels"].shape == (4, 6)


def masks_of(*lengths: int, width: int = 16) -> torch.Tensor:
    return (torch.arange(width) < torch.tensor(lengths)[:, None]).long()


@pytest.mark.parametrize("kind", [TensorDataset, lambda *fields: list(zip(*fields, strict=True))])
def test_fields_as_wide_as_the_mask_are_cut_but_for_what_may_be_features(kind: Any) -> None:
    mask = masks_of(3, 4, 5, 6, 12, 16, 9, 10)
    ids = torch.randint(1, 9, (8, 16)) * mask
    no_class = torch.where(masks_of(2, 3, 1, 5, 7, 12, 8, 9) != 0, 0, -100)  # Special tokens have no label.
    vectors = torch.rand(8, 16, 16) * mask[..., None] + mask[..., None]
    counts = torch.zeros(8, 16)
    counts[:, :3] = 1
    given = DataLoader(kind(ids, mask, no_class, vectors, counts, torch.arange(8)), 2)
    for over_tokens, shapes in (
        (None, [(8,), (8,), (8,), (8, 16), (16,), ()]),
        ((0, 4), [(8,), (8,), (16,), (16, 16), (8,), ()]),
    ):
        batches = list(rebatch(given, LengthBatching(over_tokens=over_tokens)))
        assert shapes in [[tuple(field.shape[1:]) for field in batch] for batch in batches]
        assert sum(batch[4].sum() for batch in batches) == counts.sum()


def test_what_a_collate_function_puts_where_the_mask_was_is_no_mask() -> None:
    mask = masks_of(3, 4, 5, 6)
    counts = torch.zeros(4, 16, dtype=torch.long)
    counts[:, 1] = 1

    def reordered(samples: list[Any]) -> Any:
        ids, mask, counts = (torch.stack(field) for field in zip(*samples, strict=True))
        return ids, counts, mask

    given = DataLoader(TensorDataset(mask * 7, mask, counts), 2, collate_fn=reordered)
    for batch in rebatch(given, LengthBatching()):
        assert [field.shape for field in batch] == [(2, 16)] * 3


def test_a_collate_function_that_takes_no_other_batches_is_left_alone() -> None:
    def pairs(samples: list[Any]) -> Any:
        if samples[0]["index"] != 0:
            raise RuntimeError("begins with the first sample")
        return {key: torch.stack([each[key] for each in samples]) for key in ("input_ids", "attention_mask")}

    given = rebatch(DataLoader(Padded(4), 4, collate_fn=pairs), LengthBatching(reorder=()), stage="validate")
    assert [batch["input_ids"].shape for batch in given] == [(4, LONGEST)]


def test_samples_that_are_padded_already_keep_fields_of_one_width() -> None:
    data: Any = [
        {"input_ids": ids, "attention_mask": mask, "labels": ids, "tags": ids}
        for ids, mask in zip(masks_of(3, 9, 13, 5, width=13), masks_of(3, 9, 13, 5, width=13), strict=True)
    ]
    for collator in (PadCollator(), PadCollator(multiple_of=8)):
        for batch in rebatch(DataLoader(data, 1, collate_fn=collator), LengthBatching()):
            assert len({field.shape for field in batch.values()}) == 1


@pytest.mark.parametrize("stage", ["train", "validate"])
def test_labels_of_tokens_are_not_padded_with_a_class(stage: str) -> None:
    data: Any = of_lengths(3, 5, 2, 9, tags=torch.arange)
    with refused(ValueError, "batching", fix="'tags'"):
        rebatch(DataLoader(data, 2), LengthBatching(), stage=stage)
    given = DataLoader(data, 2, collate_fn=PadCollator(padding={"tags": -100}))
    for batch in rebatch(given, LengthBatching()):
        assert torch.equal(batch["tags"] == -100, batch["attention_mask"] == 0)
    pairs: Any = [(sample["input_ids"], sample["tags"]) for sample in data]
    with refused(ValueError, "batching", fix="PadCollator(padding={1"):
        rebatch(DataLoader(pairs, 2), LengthBatching())


def test_the_loaders_own_sampler_workers_and_tail_stay() -> None:
    weights = [1.0] * 10 + [0.0] * 30
    weighted = trained("length", loader(shuffle=False, sampler=WeightedRandomSampler(weights, 24)))
    assert set(weighted.epochs[0]) <= set(range(10))
    assert len(weighted.epochs[0]) == 24
    for sampler in (RandomSampler(range(24)), SequentialSampler(range(24))):
        batches: Any = rebatch(loader(shuffle=False, sampler=sampler), LengthBatching()).batch_sampler
        assert sorted(index for batch in batches for index in batch) == list(range(24))
    dropped = trained("length", loader(batch_size=6, drop_last=True))
    assert len(dropped.epochs[0]) == 36
    workers = trained("length", loader(num_workers=1), max_epochs=1)
    assert workers.epochs[0] == trained("length").epochs[0]
    overfit = trained("length", overfit_batches=3)
    assert overfit.epochs[0] == overfit.epochs[1]
    assert len(overfit.epochs[0]) == 12
    orders = [trained("length", loader(generator=torch.Generator().manual_seed(seed))).epochs for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    own = DataLoader(Sequences(), batch_sampler=LengthBatchSampler(lengths_of(40), 5), collate_fn=pad_collate)
    assert rebatch(own, LengthBatching()) is own


def test_only_training_and_validation_change_their_order() -> None:
    module = Reader()
    data = loader(shuffle=False)
    trainer = quiet(batching="length", num_sanity_val_steps=0)
    trainer.fit(module, loader(), data)
    assert sorted(module.validated) == list(range(40))
    lengths = [lengths_of(40)[index] for index in module.validated]
    assert lengths == sorted(lengths, reverse=True)
    plain = quiet(num_sanity_val_steps=0).validate(module, data, verbose=False)
    assert trainer.callback_metrics["val_loss"] == pytest.approx(plain[0]["val_loss"], abs=1e-6)
    trainer.test(module, data, verbose=False)
    assert module.predicted == list(range(40))
    module.predicted.clear()
    predictions = trainer.predict(module, loader(Padded(), shuffle=False))
    assert module.predicted == list(range(40))
    expected = quiet().predict(module, loader(Padded(), shuffle=False))
    assert torch.allclose(torch.cat(predictions), torch.cat(expected), atol=1e-5)  # type: ignore[arg-type]
    # What cannot be sorted stays.
    module, batches = Reader(), [pad_collate([Sequences()[index]]) for index in range(5)]
    quiet(batching="length", num_sanity_val_steps=0).fit(module, loader(), batches)
    assert module.validated == list(range(5))


def packed_loader(samples: int) -> Any:
    return DataLoader(
        Sequences(samples),
        batch_sampler=PackedBatchSampler(lengths_of(samples), 32, 2),
        collate_fn=PackCollator(32, rows=2, next_token=False, mask=None),
    )


@pytest.mark.parametrize(("batching", "workers"), [("length", 2), ("tokens:100", 0), (None, 0)])
def test_a_run_resumed_in_the_middle_of_an_epoch_is_bit_for_bit_the_same(
    batching: str | None, workers: int, tmp_path: Path
) -> None:
    def fit(path: str | None = None) -> Reader:
        torch.manual_seed(3 if path is None else 77)
        module = Reader(lr=0.1)
        saves = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
        quiet(batching=batching, max_epochs=2, callbacks=saves, enable_checkpointing=True).fit(
            module, loader(num_workers=workers) if batching else packed_loader(40), ckpt_path=path
        )
        return module

    whole = fit()
    resumed = fit(str(tmp_path / "epoch=0-step=4.ckpt"))
    seen = [index for epoch in whole.epochs for index in epoch]
    again = [index for epoch in resumed.epochs for index in epoch]
    assert 20 < len(again) < len(seen)
    assert seen[-len(again) :] == again
    assert same_weights(whole, resumed)


@pytest.mark.world_size(2)
def test_two_processes_share_the_samples_and_step_together() -> None:
    # 41 samples: one more than fill the batches of both.
    plain = Reader()
    alone = {
        index: plain.model.sample_losses(pad_collate([sample])).item()
        for index, sample in enumerate(map(Padded(41).__getitem__, range(41)))
    }
    for batching in ("length", "tokens:100", None):
        module = Reader()
        data = loader(Sequences(41)) if batching else packed_loader(41)
        evaluated = loader(Sequences(41), shuffle=False)
        quiet(devices=2, strategy="ddp", batching=batching, max_epochs=2, num_sanity_val_steps=0).fit(
            module, data, evaluated
        )
        rows: list[Any] = [None, None]
        torch.distributed.all_gather_object(rows, (module.epochs, module.shapes, module.validated, module.losses))
        for epoch in (0, 1):
            assert sorted(rows[0][0][epoch] + rows[1][0][epoch]) == list(range(41))
        assert module.epochs[0] != module.epochs[1]
        assert rows[0][3] | rows[1][3] == pytest.approx(alone, abs=1e-5)
        assert len(rows[0][1]) == len(rows[1][1])
        apart = [abs(one[1] - other[1]) for one, other in zip(rows[0][1], rows[1][1], strict=True)]
        assert sum(apart) / len(apart) <= 4
        assert sorted(rows[0][2] + rows[1][2]) == sorted([*range(41)] * 2)


# -- where lengths come from


def test_lengths_are_found_where_they_are_cheapest() -> None:
    data = Sequences()
    expected = torch.tensor(lengths_of(40))
    assert torch.equal(sample_lengths(data).lengths, expected)
    assert data.reads == 40
    assert torch.equal(sample_lengths(data).lengths, expected)
    assert data.reads == 40  # known by now
    assert torch.equal(sample_lengths(Subset(data, [3, 1])).lengths, expected[[3, 1]])
    both = sample_lengths(ConcatDataset([data, Padded()]))
    assert torch.equal(both.lengths, torch.cat([expected, expected]))

    told = Sequences()
    told.lengths = lengths_of(40)  # type: ignore[attr-defined]
    assert torch.equal(sample_lengths(told).lengths, expected)
    assert told.reads == 0
    told.lengths = [10, 30]  # of another thing than the samples
    assert torch.equal(sample_lengths(told, "input_ids").lengths, expected)


def test_making_batches_ready_draws_no_random_numbers() -> None:
    class Noisy(Padded):
        generator = torch.Generator()

        def __getitem__(self, index: int) -> Any:
            torch.rand(3, generator=self.generator)
            torch.rand(3)
            return super().__getitem__(index)

    before = torch.get_rng_state(), Noisy.generator.get_state()
    rebatch(DataLoader(Noisy(), 2, collate_fn=PadCollator()), LengthBatching())
    assert all(map(torch.equal, before, (torch.get_rng_state(), Noisy.generator.get_state())))


def test_texts_are_sorted_by_their_characters() -> None:
    texts = [("word " * length, 0) for length in lengths_of(20)]
    found = sample_lengths(texts)
    assert found.lengths.tolist() == [5 * length for length in lengths_of(20)]
    assert not found.in_tokens
    with refused(ValueError, "batching"):
        rebatch(DataLoader(texts, 4), LengthBatching(max_tokens=100))  # type: ignore[arg-type]


def test_a_field_is_named_where_none_is_found() -> None:
    data = [{"n": length, "sound": "x"} for length in (3, 9, 5, 7)]
    with_key = rebatch(DataLoader(data, 2, collate_fn=list), LengthBatching(key="n"))  # type: ignore[arg-type]
    assert [[sample["n"] for sample in batch] for batch in with_key] == [[9, 7], [5, 3]]
    with refused(ValueError, "batching", fix="LengthBatching(key=...)"):
        rebatch(DataLoader(data, 2, collate_fn=list), LengthBatching(key="m"))  # type: ignore[arg-type]


def test_columns_of_a_hugging_face_dataset_are_read_at_once() -> None:
    datasets = pytest.importorskip("datasets")
    rows = [[1] * length for length in lengths_of(20)]
    found = sample_lengths(datasets.Dataset.from_dict({"input_ids": rows}))
    assert found.lengths.tolist() == lengths_of(20)
    masks = [[1] * length + [0] * (LONGEST - length) for length in lengths_of(20)]
    padded = datasets.Dataset.from_dict({"input_ids": masks, "attention_mask": masks})
    assert sample_lengths(padded).lengths.tolist() == lengths_of(20)


# -- what cannot be


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([Sequences()[0]])


OWN = type("Own", (BatchSampler,), {})
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: [1, 2], TypeError, "is a list"),
    (lambda: loader(Stream(), shuffle=False), TypeError, "IterableDataset.*__getitem__ and __len__"),
    (lambda: DataLoader(Sequences(), batch_size=None), TypeError, "batch_size=None"),
    (lambda: DataLoader(Sequences(), batch_sampler=[[0, 1]]), TypeError, "its own batch_sampler, a list"),
    (lambda: DataLoader(Sequences(), batch_sampler=OWN([0], 2, False)), TypeError, "batch_sampler, a Own"),
    (lambda: DataLoader(TensorDataset(torch.rand(9, 5)), 2), ValueError, "has the length 5.*nothing to gain"),
    (lambda: DataLoader([1.5, 2.5], 2), ValueError, "sample 0 has no length: it is a single float.*`lengths`"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("given", "error", "says"), REFUSED)
def test_what_cannot_be_batched_by_length_is_refused_before_training(
    given: Callable[[], Any], error: type[Exception], says: str
) -> None:
    module = Reader()
    with pytest.raises(error, match=f"(?s)the train dataloader.*{says}"):
        quiet(batching="length").fit(module, given())
    assert module.epochs == []


def test_a_budget_of_tokens_needs_room_for_every_sample_and_takes_each_once() -> None:
    with refused(ValueError, "batching", fix="'tokens:24'"):
        trained("tokens:10")
    with refused(ValueError, "batching"):
        trained("tokens:90", loader(shuffle=False, sampler=WeightedRandomSampler([1.0] * 40, 8)))
