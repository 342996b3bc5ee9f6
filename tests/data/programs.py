"""Loaders of many kinds, and runs over them: uninterrupted, stopped, resumed. As a program, it does the last two."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

from hasten.data.resume.stream import Stream
from hasten.seed import collect_rng_state, restore_rng_state, seed_everything

SAMPLES = 11


def augmented(index: int) -> torch.Tensor:
    """Return a sample id with random numbers from every generator and the worker that drew them."""
    info = get_worker_info()
    worker = -1 if info is None else info.id
    draws = [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]
    return torch.tensor([index, worker, *draws], dtype=torch.float64)


class Mapped(Dataset):
    def __getitem__(self, index: int) -> torch.Tensor:
        return augmented(index)

    def __len__(self) -> int:
        return SAMPLES


class Sharing(Mapped):
    """Draws from the generator that the loader was given."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.cat([augmented(index), torch.rand(1, generator=self.generator, dtype=torch.float64)])


def shard(info: Any) -> range:
    """Return a worker's samples: very different numbers of them."""
    return range(3, SAMPLES) if info.id == 0 else range(3) if info.id == 1 else range(0)


class Streamed(IterableDataset):
    """Uneven shards, each worker its own."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        mine = range(SAMPLES) if info is None else shard(info)
        for index in mine:
            yield augmented(index)


class Sized(Streamed):
    def __len__(self) -> int:
        return SAMPLES


class Stateful(IterableDataset):
    """Keeps its place, and a random choice that depends on all before."""

    def __init__(self) -> None:
        self.place, self.total = 0, 0.0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        mine = list(range(SAMPLES) if info is None else shard(info))
        while self.place < len(mine):
            self.place += 1
            self.total += random.random()
            yield torch.cat([augmented(mine[self.place - 1]), torch.tensor([self.total], dtype=torch.float64)])
        self.place, self.total = 0, 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.total = state["place"], state["total"]


class Order(Sampler):
    def __len__(self) -> int:
        return SAMPLES


class Eager(Order):
    """Draws its order from python's generator when asked for an iterator."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        return iter(order)


class ByEpoch(Order):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class Resumable(Order):
    """Keeps its place; its order cannot be drawn again."""

    def __init__(self) -> None:
        self.order, self.place = [], 0

    def __iter__(self) -> Iterator[int]:
        if not self.place:
            self.order = torch.randperm(SAMPLES).tolist()
        while self.place < SAMPLES:
            self.place += 1
            yield self.order[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.place = list(state["order"]), state["place"]


class Uneven(Sampler):
    """Batches of several sizes in a random order."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]
        for place in torch.randperm(len(batches)).tolist():
            yield batches[place]

    def __len__(self) -> int:
        return 5


class Doubling(DataLoader):
    """Changes batches on their way out and reads one ahead."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        held = None
        for batch in super().__iter__():
            if held is not None:
                yield 2 * held
            held = batch
        yield 2 * held


class WithInit(DataLoader):
    def __init__(self, folder: str, **options: Any) -> None:
        self.folder = folder
        super().__init__(Mapped(), **options)


class Batches:
    """No loader of torch's, without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in torch.randperm(SAMPLES).tolist():
            yield augmented(index)


def seed_numpy_differently(worker: int) -> None:
    np.random.seed(1000 + worker)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def weighted(**options: Any) -> Sampler:
    return WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), SAMPLES, **options)


def of(data: Callable[[], Any] = Mapped, kind: Any = DataLoader, **given: Any) -> Callable[..., Any]:
    """Return a function that makes a loader; functions among ``given`` are called to make its samplers."""

    def make(**options: Any) -> Any:
        made = {name: value() if "gen" in name or "sampler" in name else value for name, value in given.items()}
        size = {} if "batch_sampler" in made else {"batch_size": 2}
        return kind(data(), **{**size, **made, **options})

    return make


def shared_generator(**options: Any) -> DataLoader:
    shared = generator()
    return DataLoader(Sharing(shared), batch_size=2, shuffle=True, generator=shared, **options)


FIXED = [torch.full((2,), float(value)) for value in range(5)]
LOADERS: dict[str, Callable[..., Any]] = {
    "in order": of(),
    "shuffled": of(shuffle=True),
    "shuffled, tail dropped": of(shuffle=True, drop_last=True),
    "own generator": of(shuffle=True, generator=generator),
    "generator shared with the dataset": shared_generator,
    "with replacement": of(
        batch_size=3,
        sampler=lambda: RandomSampler(range(SAMPLES), replacement=True, num_samples=40, generator=generator()),
    ),
    "weighted": of(sampler=weighted),
    "weighted, own generator": of(sampler=lambda: weighted(generator=generator())),
    "eager sampler": of(sampler=Eager),
    "sampler by epoch": of(sampler=ByEpoch),
    "sampler with state": of(sampler=Resumable),
    "batch sampler": of(batch_sampler=Uneven),
    "torch's batch sampler": of(batch_sampler=lambda: BatchSampler(RandomSampler(range(SAMPLES)), 4, False)),
    "not batched": of(batch_size=None, shuffle=True),
    "iterable": of(Streamed),
    "iterable, not batched": of(Streamed, batch_size=None),
    "iterable with a length": of(Sized),
    "iterable with state": of(Stateful),
    "subclass with its own iteration": of(kind=Doubling, shuffle=True),
    "subclass with its own arguments": of(lambda: "here", WithInit, shuffle=True),
    "own worker_init_fn": of(shuffle=True, worker_init_fn=seed_numpy_differently),
    "list": lambda **options: FIXED,
    "own class": lambda **options: Batches(),
}
WORKERS = {
    "0 workers": {},
    "2 workers": {"num_workers": 2},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True},
    "3 workers, 1 ahead": {"num_workers": 3, "prefetch_factor": 1},
}


def make(name: str, workers: str) -> Any:
    return LOADERS[name](**WORKERS[workers])


def epochs_of(loader: Any) -> int:
    """Return how many epochs a run takes: workers that live on show their state in the third."""
    return 3 if getattr(loader, "persistent_workers", False) else 2


def train(batch: Any) -> list[float]:
    """Return what one step sees: the batch, and numbers drawn in training, such as dropout draws."""
    return [*batch.flatten().tolist(), random.random(), torch.rand(2).sum().item(), np.random.rand()]


def plain_run(loader: Any, limit: int | None = None) -> list[list[float]]:
    """Return what the steps of a hand-written loop see."""
    seed_everything(3, verbose=False)
    seen = []
    for epoch in range(epochs_of(loader)):
        if isinstance(getattr(loader, "sampler", None), ByEpoch):
            loader.sampler.set_epoch(epoch)
        seen += [train(batch) for batch in itertools.islice(loader, limit)]
    return seen


def stream_run(loader: Any, limit: int | None = None) -> tuple[list[list[float]], list[dict[str, Any]]]:
    """Return what the steps see, and the states before and after each of them."""
    seed_everything(3, verbose=False)
    stream, seen, states = Stream(loader), [], []

    def take_state(epoch: int, consumed: int, *, ended: bool, again: bool) -> None:
        state = {"stream": stream.state_dict(consumed), "rng": collect_rng_state()}
        states.append({"seen": len(seen), "epoch": epoch, "ended": ended, "again": again, **state})

    for epoch in range(epochs_of(loader)):
        stream.set_epoch(epoch)
        for consumed, (batch, is_last) in enumerate(stream.batches(limit)):
            take_state(epoch, consumed, ended=False, again=True)
            seen.append(train(batch))
            take_state(epoch, consumed + 1, ended=is_last, again=False)
    stream.close()
    return seen, states


def resumed_run(loader: Any, limit: int | None, state: dict[str, Any]) -> list[list[float]]:
    """Return what the steps see after going on from a state."""
    seed_everything(99, verbose=False)
    stream, seen = Stream(loader), []
    stream.load_state_dict(state["stream"])
    stream.open()
    restore_rng_state(state["rng"])
    for epoch in range(state["epoch"] + state["ended"], epochs_of(loader)):
        if epoch > state["epoch"]:
            stream.set_epoch(epoch)
        seen += [train(batch) for batch, _ in stream.batches(limit)]
    stream.close()
    return seen


def differing(
    name: str, workers: str, limit: int | None, expected: list[list[float]], states: list[dict[str, Any]]
) -> list[str]:
    """Resume each of ``states``; return those after which something was not as expected."""
    return [
        f"{name}, {workers}, limit={limit}, after {state['seen']} steps{', one again' * state['again']}"
        for state in states
        if resumed_run(make(name, workers), limit, state) != expected[state["seen"] :]
    ]


def some(states: list[dict[str, Any]], *, persistent: bool) -> list[dict[str, Any]]:
    """Return states of different kinds: in the middle of an epoch, before a step, at the end of an epoch."""
    after = [state for state in states if not state["again"]]
    first_end = next(place for place, state in enumerate(after) if state["ended"])
    # At the end, workers that do not persist are gone: nothing of them is in the state.
    return [after[first_end + 3], states[2], *([after[first_end]] if persistent else [])]


def record(name: str, workers: str, limit: int | None) -> list[Any]:
    """Return a case for ``differing``, with some of the states of a run; print if it does not equal the plain loop."""
    seen, states = stream_run(make(name, workers), limit)
    if seen != (plain := plain_run(make(name, workers), limit)):
        print(f"{name}, {workers}: {seen} instead of {plain}")
    return [name, workers, limit, seen, some(states, persistent="persistent" in workers)]


if __name__ == "__main__":
    if sys.argv[2:]:
        torch.save([record(*case) for case in json.loads(sys.argv[2])], sys.argv[1])
        sys.exit()
    for case in torch.load(sys.argv[1], weights_only=True):
        for line in differing(*case):
            print(line)
