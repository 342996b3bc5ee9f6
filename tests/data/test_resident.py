"""``Trainer(resident=True)`` and ``ResidentLoader``: the same batches from memory, or a refusal that says why."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from hasten.callbacks import ModelCheckpoint
from hasten.data import LengthBatching, ResidentLoader, pad_collate, preload, rebatch, resident
from hasten.data.loaders import prepare
from hasten.data.memory.read import same
from tests.batching.sequences import Padded, Sequences
from tests.models import Classifier, Numbered, dataset, loader, quiet, same_weights
from tests.refusals import refused

Pair = namedtuple("Pair", "x y")


class Mapped(Dataset[Any]):
    """Samples made by a function of their number; counts how often it is asked."""

    def __init__(self, make: Callable[[int], Any], samples: int = 23) -> None:
        self.make, self.samples, self.read = make, samples, 0
        self.classes = ["no", "yes"]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return self.make(index)


class Batched(Mapped):
    """Gives whole batches of samples, and is slow to be asked for single ones."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.batches = getattr(self, "batches", 0) + 1
        return [self.make(index) for index in indices]


def nested(index: int) -> Any:
    return {
        "image": torch.full((2, 3), index % 256, dtype=torch.uint8),
        "size": (index, float(index), index % 2 == 0),
        "array": np.arange(3, dtype=np.float32) + index,
        "scalar": np.int16(index),
        "name": f"sample {index}",
        "pair": Pair(torch.tensor(index), [index]),
    }


def ragged(index: int) -> Tensor:
    return torch.arange(index % 4 + 1)


def joined_by_hand(samples: list[Any]) -> Any:
    return torch.stack([sample[0] for sample in samples]).sum(0), len(samples)


def epochs(given: Any, count: int = 2, seed: int = 3) -> list[Any]:
    torch.manual_seed(seed)
    return [list(given) for _ in range(count)]


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(dataset(), 6),
    "shuffled": lambda: DataLoader(dataset(), 6, shuffle=True),
    "short last dropped": lambda: DataLoader(dataset(), 6, shuffle=True, drop_last=True),
    "generator": lambda: DataLoader(dataset(), 6, shuffle=True, generator=torch.Generator().manual_seed(1)),
    "sampler's generator": lambda: DataLoader(
        dataset(), 6, sampler=RandomSampler(range(40), generator=torch.Generator().manual_seed(1))
    ),
    "weighted": lambda: DataLoader(dataset(), 6, sampler=WeightedRandomSampler([1.0] * 20 + [3.0] * 20, 30)),
    "batch sampler": lambda: DataLoader(dataset(), batch_sampler=BatchSampler(RandomSampler(range(40)), 7, False)),
    "part": lambda: DataLoader(Subset(dataset(), [5, 3, 8, 30, 2]), 2, shuffle=True),
    "list of tuples": lambda: DataLoader([(torch.full((2,), i), i) for i in range(9)], 4),
    "list of tensors": lambda: DataLoader([torch.full((2,), float(i)) for i in range(9)], 4),
    "nested": lambda: DataLoader(Mapped(nested), 5, shuffle=True),
    "half precision": lambda: DataLoader(TensorDataset(torch.arange(9).bfloat16()), 4),
    "numbers and text alone": lambda: DataLoader([(i, f"{i}") for i in range(5)], 2),
    "ragged": lambda: DataLoader(Mapped(ragged), 5, shuffle=True, collate_fn=pad_collate),
    "collate_fn": lambda: DataLoader(dataset(), 6, shuffle=True, collate_fn=joined_by_hand),
    "whole batches": lambda: DataLoader(Batched(nested), 5, shuffle=True),
    "preloaded": lambda: DataLoader(preload(dataset()), 6, shuffle=True),
    "one element with a stride": lambda: DataLoader([torch.arange(i, i + 6.0)[::3][:1] for i in range(9)], 4),
    "ragged with a stride": lambda: DataLoader([torch.arange(9)[::3][: i % 3 + 1] for i in range(9)], 1),
    "other types later on": lambda: DataLoader([torch.tensor(0)] + [torch.tensor(1.5)] * 4, 1),
}


@pytest.mark.parametrize("name", LOADERS)
def test_batches_are_those_of_the_loader_it_replaces(name: str) -> None:
    expected, found = epochs(LOADERS[name]()), epochs(resident(LOADERS[name]()))
    assert same(expected, found)
    # Not by chance: in another order nothing is equal.
    assert not same(expected, [list(reversed(epoch)) for epoch in found])


def test_what_a_step_does_to_a_batch_stays_out_of_the_data() -> None:
    for make in (LOADERS["in order"], LOADERS["ragged"], lambda: DataLoader(Mapped(ragged), 1)):
        mine = resident(make())
        for batch in mine:
            (batch[0] if isinstance(batch, list) else batch).zero_()
        assert any(bool((batch[0] if isinstance(batch, list) else batch).any()) for batch in mine)


def test_a_sample_is_read_twice_at_most_and_the_random_state_stays() -> None:
    data, whole = Mapped(nested), Batched(nested)
    before = torch.get_rng_state()
    mine = resident(DataLoader(data, 5, shuffle=True))
    resident(DataLoader(whole, 5))
    assert torch.equal(torch.get_rng_state(), before)
    read = data.read
    assert read <= 2 * len(data) + 8  # Twice, to see whether they are random.
    assert whole.batches == 2
    epochs(mine, 3)
    assert data.read == read + 3 * 2  # The first and the last again in each epoch: have they changed?
    assert same(epochs(LOADERS["shuffled"]()), epochs(ResidentLoader(dataset(), 6, shuffle=True)))
    # For the user, it is the dataset still.
    assert mine.dataset.classes == ["no", "yes"]
    assert len(mine.dataset) == 23
    assert same([mine.dataset[4], mine.dataset[-1]], [nested(4), nested(22)])


def test_collate_functions_may_change_their_samples() -> None:
    def zeroing(samples: list[Any]) -> Any:
        first = samples[0].clone()
        samples[0].zero_()
        return first

    mine = resident(DataLoader(Mapped(lambda index: torch.tensor([1.0, index])), 4, collate_fn=zeroing))
    assert same(epochs(mine, 1), epochs(mine, 1))


def test_numbers_that_no_tensor_holds_reach_the_collate_function() -> None:
    assert list(ResidentLoader([2**63, 1], batch_size=2, collate_fn=list)) == [[2**63, 1]]


def test_workers_read_the_data_and_are_gone_afterwards() -> None:
    given = DataLoader(Mapped(nested, 300), 50, shuffle=True, num_workers=2)
    mine = resident(given)
    assert (mine.num_workers, given.num_workers) == (0, 2)
    assert same(epochs(DataLoader(Mapped(nested, 300), 50, shuffle=True)), epochs(mine))
    with refused(ValueError, "resident"):
        resident(DataLoader(Mapped(now_and_then), 2, num_workers=1))


# -- in a run


def fitted(given: Any = None, **arguments: Any) -> Classifier:
    torch.manual_seed(0)
    module = Classifier(dropout=0.3)
    quiet(**{"max_epochs": 2, **arguments}).fit(module, given or loader(shuffle=True), loader())
    return module


def test_every_stage_reads_from_memory_with_the_same_result(caplog: pytest.LogCaptureFixture) -> None:
    assert same_weights(fitted(), fitted(resident=True))
    assert same_weights(fitted(), fitted(resident="auto"))
    given = DataLoader(Mapped(lambda i: (torch.rand(8), i % 2)), 4)
    assert resident(given, stage="validate") is given
    assert "the validate dataloader is read as before" in caplog.text
    trainer, module = quiet(resident="auto", max_steps=1), Classifier()
    trainer.fit(module, given)
    assert trainer.train_dataloader is given
    trainer = quiet(resident=True)
    trainer.fit(module, loader(), loader())
    assert isinstance(trainer.train_dataloader, ResidentLoader)
    assert isinstance(trainer.val_dataloaders, ResidentLoader)
    expected = quiet().predict(module, loader())
    assert same(trainer.predict(module, loader()), expected)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"shuffle": True, "generator": "own"}])
def test_a_run_stopped_in_mid_epoch_goes_on_as_if_it_had_not(tmp_path: Path, options: dict[str, Any]) -> None:
    def given() -> Any:
        own = {"generator": torch.Generator().manual_seed(5)} if "generator" in options else {}
        return loader(**{**options, **own})

    whole = fitted(given(), resident=True)
    saved = ModelCheckpoint(tmp_path, every_n_train_steps=13)
    stopped = fitted(given(), resident=True, max_steps=13, callbacks=[saved], enable_checkpointing=True)
    assert not same_weights(whole, stopped)
    # Without the switch, too: checkpoints are the same.
    for resident_again in (True, False):
        torch.manual_seed(99)
        module = Classifier(dropout=0.3)
        trainer = quiet(resident=resident_again, max_epochs=2)
        trainer.fit(module, given(), loader(), ckpt_path=saved.best_model_path)
        assert same_weights(whole, module)


@pytest.mark.parametrize("data", [Padded, Sequences, "tensors"])
def test_it_goes_together_with_batching_by_length(data: Any) -> None:
    def given() -> Any:
        if data == "tensors":
            rows = [Padded()[index] for index in range(40)]
            tensors = [torch.stack([row[key] for row in rows]) for key in ("input_ids", "attention_mask")]
            return DataLoader(TensorDataset(*tensors), 4, shuffle=True)
        return DataLoader(data(), 4, shuffle=True, collate_fn=None if data is Padded else pad_collate)

    plain = epochs(rebatch(given(), LengthBatching()))
    assert same(plain, epochs(rebatch(resident(given()), LengthBatching())))


# -- what cannot be held


def now_and_then(index: int) -> Any:
    return index if index != 5 else random.random()


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.rand(3))


class WithEpochs(Mapped):
    def set_epoch(self, epoch: int) -> None:
        """Do nothing."""


def iterating(**methods: Any) -> Any:
    return type("Iterating", (DataLoader,), methods)(dataset(), 2)


def mapped(make: Callable[[int], Any], samples: int = 23) -> DataLoader[Any]:
    return DataLoader(Mapped(make, samples), 2)


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: DataLoader(Endless(), 2), TypeError, "resident"),
    (lambda: [torch.ones(1)], TypeError, "resident"),
    (lambda: iterating(__iter__=iter), TypeError, "resident"),
    (lambda: iterating(_get_iterator=iter), TypeError, "resident"),
    (lambda: DataLoader(dataset(), batch_size=None), TypeError, "resident"),
    (lambda: mapped(lambda i: torch.rand(2)), ValueError, "resident"),
    (lambda: mapped(now_and_then), ValueError, "resident"),
    (lambda: DataLoader(WithEpochs(nested), 2), ValueError, "resident"),
    (lambda: mapped(lambda i: torch.zeros(1000), 10**11), ValueError, "resident"),
]


@pytest.mark.parametrize(("make", "error", "argument"), REFUSED)
def test_what_cannot_be_held_is_refused_before_training(
    make: Callable[[], Any], error: type[Exception], argument: str
) -> None:
    trainer = quiet(resident=True)
    with refused(error, argument):
        trainer.fit(Classifier(), make())
    assert trainer.global_step == 0


class Torn(Dataset[Any]):
    """One sample cannot be read."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        if index == 4:
            raise ValueError("torn")
        return {"input_ids": torch.ones(2 + index % 2, dtype=torch.long)}


@pytest.mark.parametrize("arguments", [{"resident": True}, {"batching": "length"}], ids=str)
def test_an_error_of_the_dataset_names_the_sample(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as caught:
        quiet(**arguments).fit(Classifier(), DataLoader(Torn(), 2))
    (note,) = [note for note in caught.value.__notes__ if "sample" in note]
    assert note.startswith("in sample 4 of the dataset ")
    assert note.endswith("test_resident.Torn")


@pytest.mark.gpu
def test_the_data_lives_on_the_device() -> None:
    mine = resident(LOADERS["shuffled"](), device="cuda")
    found = epochs(mine)
    assert all(batch[0].is_cuda for epoch in found for batch in epoch)
    on_host = [[[part.cpu() for part in batch] for batch in epoch] for epoch in found]
    assert same(epochs(LOADERS["shuffled"]()), on_host)
    with pytest.raises(ValueError, match="one by one"):
        resident(LOADERS["ragged"](), device="cuda")


# -- several processes: each reads its part, as it does from the loader itself

NUMBERED = 21


INDEX_LISTS = ([3, 1], [0, 2, 4], list(range(5, NUMBERED)))
SHARED = {
    "in order": lambda: DataLoader(Numbered(NUMBERED), 4),
    "shuffled": lambda: DataLoader(Numbered(NUMBERED), 4, shuffle=True),
    "dropped": lambda: DataLoader(Numbered(NUMBERED), 4, shuffle=True, drop_last=True),
    "index lists": lambda: DataLoader(Numbered(NUMBERED), batch_sampler=INDEX_LISTS),
}


def indices(loader: Any) -> list[list[int]]:
    """Return the samples of each batch."""
    return [batch[2].tolist() for batch in loader]


@pytest.mark.parametrize("stage", ["train", "validate"])
@pytest.mark.parametrize("name", SHARED)
def test_each_process_reads_what_it_reads_without(name: str, stage: str) -> None:
    parts = []
    for rank in range(2):
        found = []
        for make in (lambda loader: loader, resident):
            torch.manual_seed(rank)
            ready = prepare(make(SHARED[name]()), stage=stage, num_replicas=2, rank=rank, seed=7)
            ready.sampler.set_epoch(1) if hasattr(ready.sampler, "set_epoch") else None
            found.append(indices(ready))
        assert found[0] == found[1]
        parts += [index for batch in found[1] for index in batch]
    if stage == "validate" and name != "dropped":
        assert sorted(parts) == list(range(NUMBERED))
