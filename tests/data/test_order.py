"""An epoch goes on with any number of processes where it was interrupted: every sample comes once, in its order."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from hasten.batching.rebatch import LengthBatching, rebatch
from hasten.batching.samplers import PackedBatchSampler
from hasten.data.combined import CombinedLoader
from hasten.data.loaders import prepare
from hasten.data.memory.resident import resident
from hasten.data.resume.stream import CombinedStream, Stream
from hasten.seed import collect_rng_state, restore_rng_state, seed_everything
from tests.refusals import warned

SAMPLES = 47


class InRandomOrder(Sampler[int]):
    """Draws its order when the epoch begins."""

    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(SAMPLES), SAMPLES))

    def __len__(self) -> int:
        return SAMPLES


class Pairs(Sampler[list[int]]):
    """A batch sampler of the user's."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SAMPLES).tolist()
        return iter([order[place : place + 2] for place in range(0, SAMPLES, 2)])

    def __len__(self) -> int:
        return 24


def sentence(number: int) -> dict[str, Any]:
    return {"input_ids": [number] * (1 + number * 7 % 13), "number": number}


def numbers_of(samples: list[Any]) -> list[int]:
    return [sample["number"] if isinstance(sample, dict) else sample for sample in samples]


def made(kind: str, replicas: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    """Return the user's loader."""
    options = {"batch_size": batch_size, "collate_fn": numbers_of, **options}
    data: Any = list(range(SAMPLES))
    generator = torch.Generator().manual_seed(3)
    if kind == "shuffled by a generator":
        return DataLoader(data, shuffle=True, generator=generator, **options)
    if kind == "weighted":
        weighted = WeightedRandomSampler([1.0] * SAMPLES, SAMPLES, replacement=False)
        return DataLoader(data, sampler=weighted, **options)
    if kind == "a hidden generator":
        return DataLoader(data, sampler=RandomSampler(data, generator=generator), **options)
    if kind == "the user's sampler":
        return DataLoader(data, sampler=InRandomOrder(), **options)
    if kind == "the user's batches":
        del options["batch_size"]
        return DataLoader(data, batch_sampler=Pairs(), **options)
    sentences: Any = [sentence(number) for number in data]
    if kind in ("length", "tokens"):
        batching = LengthBatching() if kind == "length" else LengthBatching(max_tokens=8 * batch_size)
        return rebatch(DataLoader(sentences, shuffle=True, **options), batching)
    if kind == "packed":
        del options["batch_size"]
        lengths = [len(one["input_ids"]) for one in sentences]
        return DataLoader(sentences, batch_sampler=PackedBatchSampler(lengths, 16, batch_size), **options)
    if kind == "resident":
        return resident(DataLoader(data, shuffle=True, **options))
    return DataLoader(data, shuffle=kind == "shuffled", **options)


class Process:
    """One of several processes that share the data, in this one."""

    def __init__(self, rank: int, replicas: int, kind: str, batch_size: int, **options: Any) -> None:
        # Another process of the saved run has drawn other numbers, and one that resumes has drawn none.
        seed_everything(100 * replicas + rank, verbose=False)
        self.random = collect_rng_state()
        loader = prepare(made(kind, replicas, batch_size, **options), num_replicas=replicas, rank=rank, seed=5)
        self.stream = Stream(loader)
        self.batches: Any = None
        self.done = 0

    def read(self, batches: int | None = None, epoch: int | None = None) -> list[Any]:
        """Read batches of the epoch, which ``epoch`` begins."""
        restore_rng_state(self.random)
        if epoch is not None:
            self.stream.set_epoch(epoch)
            self.done = 0
        if self.batches is None or epoch is not None:
            self.batches = self.stream.batches()
        found = [batch for batch, _ in itertools.islice(self.batches, batches)]
        self.done += len(found)
        self.random = collect_rng_state()
        return found

    def state(self) -> dict[str, Any]:
        return self.stream.state_dict(self.done)

    def resume(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state, moved=True)
        self.done = self.stream.position


def world(replicas: int, *arguments: Any, **options: Any) -> list[Process]:
    return [Process(rank, replicas, *arguments, **options) for rank in range(replicas)]


def in_order(processes: list[list[Any]]) -> list[int]:
    """Return the samples of several processes in the order in which the processes share them."""
    steps = itertools.zip_longest(*processes, fillvalue=[])
    places = (itertools.zip_longest(*step) for step in steps)
    return [sample for step in places for place in step for sample in place if sample is not None]


KINDS = (
    "in sequence", "shuffled", "shuffled by a generator", "a hidden generator", "weighted", "the user's sampler",
    "resident", "the user's batches", "length", "tokens", "packed",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 3), (3, 1, 2), (2, 1, 3), (1, 3, 3)])
def test_every_sample_of_an_interrupted_epoch_comes_once(kind: str, sizes: tuple[int, ...]) -> None:
    whole = world(sizes[0], kind, 2)
    for epoch in (0, 1):
        order = in_order([each.read(epoch=epoch) for each in whole])
    processes = world(sizes[0], kind, 2)
    for each in processes:
        each.read(epoch=0)
    seen = in_order([each.read(2, epoch=1) for each in processes])
    for place, number in enumerate(sizes[1:], 2):
        state = processes[0].state()
        processes = world(number, kind, 2)
        for each in processes:
            each.resume(state)
            assert not each.stream.not_known
        seen += in_order([each.read(None if place == len(sizes) else 2) for each in processes])
    repeated = Counter(seen) - Counter(range(SAMPLES))
    assert set(seen) == set(range(SAMPLES))
    # So that all processes have as many: whole batches of the user's, and of batches by length those of each part.
    assert repeated.total() < {"the user's batches": 2 * sizes[-1], "tokens": sum(sizes)}.get(kind, sizes[-1])
    if KINDS.index(kind) < 7:
        assert seen[:SAMPLES] == order[:SAMPLES]


@pytest.mark.parametrize("kind", ["shuffled", "the user's batches", "length"])
def test_the_rest_of_an_epoch_with_workers_is_resumed_once_more(kind: str) -> None:
    """The same number of processes goes on in the rest of another, and in the epochs after it."""
    options = {"num_workers": 2, "persistent_workers": kind == "length"}
    first = world(2, kind, 2, **options)
    for each in first:
        each.read(3, epoch=0)
    (one,) = world(1, kind, 3, **options)
    one.resume(first[0].state())
    one.read(2)
    state, numbers = one.state(), one.random
    expected = [one.read(), one.read(epoch=1)]
    (again,) = world(1, kind, 3, **options)
    again.resume(state)
    again.random = numbers
    assert [again.read(), again.read(epoch=1)] == expected
    for each in (*first, one, again):
        each.stream.close()


@pytest.mark.parametrize("replicas", [1, 2])
def test_another_batch_size_goes_on_at_the_same_sample(replicas: int) -> None:
    for kind, size in itertools.product(("shuffled", "weighted", "length"), (1, 3, 5)):
        before, after = world(replicas, kind, 2), world(replicas, kind, size)
        seen = in_order([each.read(5, epoch=2) for each in before])
        for saved, each in zip(before, after, strict=True):
            each.stream.load_state_dict(saved.state())
            length = each.stream.length
            assert each.stream.position == length - -(-(SAMPLES - len(seen)) // (replicas * size))
        seen += in_order([each.read() for each in after])
        assert set(seen) == set(range(SAMPLES))
        assert len(seen) - SAMPLES < replicas


@pytest.mark.parametrize(("kind", "workers"), [("the user's sampler", 0), ("shuffled", 1)])
def test_each_process_compares_the_last_batch_that_it_had_itself(kind: str, workers: int) -> None:
    before, after = world(3, kind, 2, num_workers=workers), world(3, kind, 1, num_workers=workers)
    seen = in_order([each.read(3, epoch=1) for each in before])
    for saved, each in zip(before, after, strict=True):
        each.stream.load_state_dict(saved.state())
    seen += in_order([each.read() for each in after])
    assert set(seen) == set(range(SAMPLES))
    assert len(seen) - SAMPLES < 3
    for each in (*before, *after):
        each.stream.close()


def test_the_epoch_after_one_that_was_resumed_is_resumed_too() -> None:
    (one,), (resumed,), (last,) = world(1, "shuffled", 2), world(1, "shuffled", 2), world(1, "shuffled", 3)
    one.read(2, epoch=0)
    resumed.resume(one.state())
    resumed.random = one.random
    resumed.read()
    # As many as the epoch before had when its last batches were read.
    seen = in_order([resumed.read(22, epoch=1)])
    last.resume(resumed.state())
    assert not last.stream.not_known
    assert Counter(seen + in_order([last.read()])) == Counter(range(SAMPLES))


def test_drop_last_leaves_out_what_an_epoch_of_the_rest_leaves_out() -> None:
    before, (after,) = world(2, "in sequence", 2, drop_last=True), world(1, "in sequence", 5, drop_last=True)
    for each in before:
        each.read(4, epoch=0)
    after.resume(before[0].state())
    assert after.read() == [list(range(begin, begin + 5)) for begin in range(16, 46, 5)]
    # Nothing is left where there are fewer than a batch.
    (none,) = world(1, "in sequence", 20, drop_last=True)
    for each in before:
        each.read(4)
    none.resume(before[0].state())
    assert (none.stream.position, none.read()) == (2, [])


def test_a_batch_that_was_not_done_comes_again() -> None:
    before, (after,) = world(2, "shuffled", 2), world(1, "shuffled", 2)
    seen = in_order([each.read(5, epoch=0)[:4] for each in before])
    after.stream.load_state_dict(before[0].stream.state_dict(4), moved=True)
    assert sorted(seen + in_order([after.read()])) == list(range(SAMPLES))


def test_a_generator_of_the_user_goes_on_after_an_epoch() -> None:
    (one,), halves = world(1, "shuffled by a generator", 2), world(2, "shuffled by a generator", 1)
    one.read(epoch=0)
    for each in halves:
        each.resume(one.state())
    assert in_order([each.read(epoch=1) for each in halves])[:SAMPLES] == in_order([one.read(epoch=1)])


def test_a_distributed_sampler_of_the_user() -> None:
    def own(replicas: int, rank: int) -> Stream:
        sampler = DistributedSampler(range(SAMPLES), replicas, rank, seed=9, drop_last=replicas == 3)  # type: ignore[arg-type]
        stream = Stream(DataLoader(range(SAMPLES), 2, sampler=sampler, collate_fn=list))  # type: ignore[arg-type]
        stream.set_epoch(4)
        return stream

    before, after = [own(2, rank) for rank in range(2)], [own(3, rank) for rank in range(3)]
    seen = in_order([[batch for batch, _ in itertools.islice(each.batches(), 4)] for each in before])
    for each in after:
        each.load_state_dict(before[0].state_dict(4), moved=True)
    seen += in_order([[batch for batch, _ in each.batches()] for each in after])
    # 31 are left, of which three processes get ten each.
    assert len(seen) == len(set(seen)) == SAMPLES - 1


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle", "sequential"])
def test_joined_loaders_go_on_each_at_its_place(mode: Any) -> None:
    def joined(replicas: int, rank: int) -> CombinedStream:
        loaders = [
            prepare(DataLoader(range(begin, end), 2, shuffle=True, collate_fn=list), num_replicas=replicas, rank=rank)  # type: ignore[arg-type]
            for begin, end in ((0, 48), (100, 116))
        ]
        return CombinedStream(CombinedLoader(loaders, mode), [Stream(loader) for loader in loaders])

    def flat(parts: list[Any]) -> list[int]:
        found = [batch for part in parts for batch in part]
        return [each for batch in found for part in (batch if mode != "sequential" else [batch]) for each in part or []]

    steps = 3 if mode == "min_size" else 13 if mode == "sequential" else 6
    before = [joined(2, rank) for rank in range(2)]
    seen = [[batch for batch, _ in itertools.islice(each.batches(), steps)] for each in before]
    after = joined(1, 0)
    after.load_state_dict(before[0].state_dict(steps), moved=True)
    assert (after.length, after.position) == (joined(1, 0).length, 2 * steps)
    counts = Counter(flat([*seen, [batch for batch, _ in after.batches()]]))
    small, large = [counts[n] for n in range(100, 116)], [counts[n] for n in range(48)]
    assert small == [3 if mode == "max_size_cycle" else 1] * 16
    assert sum(large) == (16 if mode == "min_size" else 48)
    assert max(large) == 1


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Unending(InRandomOrder):
    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(SAMPLES))


class AsItGoes(InRandomOrder):
    def __iter__(self) -> Iterator[int]:
        for place in range(SAMPLES):
            yield (place + int(torch.randint(SAMPLES, ()))) % SAMPLES


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        (list(range(6)), list(range(6)), "it is a list"),
        (DataLoader(Endless()), DataLoader(Endless()), "reads the IterableDataset Endless"),
        (DataLoader(range(6)), DataLoader(range(7)), "gives 7 samples an epoch, and gave 6"),  # type: ignore[arg-type]
        (
            DataLoader(range(47), 2, sampler=Unending()),  # type: ignore[arg-type]
            DataLoader(range(47), sampler=Unending()),  # type: ignore[arg-type]
            "its sampler Unending goes on after its length of 47",
        ),
        (
            DataLoader(range(47), 2, sampler=AsItGoes()),  # type: ignore[arg-type]
            DataLoader(range(47), sampler=AsItGoes()),  # type: ignore[arg-type]
            "its sampler AsItGoes draws another order",
        ),
        (
            DataLoader(range(47), sampler=InRandomOrder()),  # type: ignore[arg-type]
            DataLoader(range(47), batch_sampler=BatchSampler(AsItGoes(), 3, False)),  # type: ignore[arg-type]
            "its sampler is AsItGoes, and was InRandomOrder",
        ),
    ],
)
def test_an_order_that_is_not_known_is_named(before: Any, after: Any, why: str) -> None:
    stream, other = Stream(before), Stream(after)
    batches = stream.batches()
    for _ in range(2):
        next(batches)
        torch.rand(3)
    state = stream.state_dict(2)
    other.load_state_dict(state, moved=True)
    assert why in other.not_known
    assert other.position == 2


def test_another_kind_of_batches_is_said_to_have_other_samples() -> None:
    before, after = Stream(made("shuffled", 1, 2)), Stream(made("length", 1, 2), name="changed_kind")
    next(before.batches())
    with warned(UserWarning, says=("changed_kind", "LengthBatchSampler")):
        after.load_state_dict(before.state_dict(1))
    assert (after.position, after.not_known) == (1, "")
