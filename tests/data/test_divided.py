"""An ``IterableDataset`` on several processes: who divides it, which samples each reads, and how it goes on."""

from __future__ import annotations

import itertools
import os
import random
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import hasten as L
from hasten.data.divided import DividedDataset
from hasten.data.loaders import prepare
from hasten.data.resume.stream import Stream
from tests.models import quiet

SAMPLES = 37


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(SAMPLES))


class Shuffled(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        order = list(range(SAMPLES))
        random.shuffle(order)
        return iter(order)


class ByWorker(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from range(first, SAMPLES, step)


class Bounds(IterableDataset[Any]):
    start, end = 0, SAMPLES

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.start, self.end))


def give_bounds(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    each = -(-SAMPLES // info.num_workers)
    dataset.start = worker * each
    dataset.end = min(dataset.start + each, SAMPLES)


def give_bounds_of_rank(worker: int) -> None:
    info: Any = get_worker_info()
    each = -(-SAMPLES // dist.get_world_size())
    info.dataset.start = dist.get_rank() * each
    info.dataset.end = min(info.dataset.start + each, SAMPLES)


def seed_by_rank(worker: int) -> None:
    random.seed(100 * dist.get_rank() + worker)


class Stateful(IterableDataset[Any]):
    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < SAMPLES:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Sharded(IterableDataset[Any]):
    """The protocol of Hugging Face."""

    def __init__(self, part: Any = slice(None)) -> None:
        self.part = part

    def shard(self, num_shards: int, index: int) -> Sharded:
        return Sharded(slice(index, None, num_shards))

    def __iter__(self) -> Iterator[Any]:
        return iter(range(SAMPLES)[self.part])


class TakesRank(IterableDataset[Any]):
    rank, world_size = 0, 1

    def set_rank(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[Any]:
        return iter(range(SAMPLES)[self.rank :: self.world_size])


class Doubled(IterableDataset[Any]):
    """Passes on what it does not have."""

    def __init__(self) -> None:
        self.inner = Sharded()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __iter__(self) -> Iterator[Any]:
        return (2 * number for number in self.inner)


class AsksForRank(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return self._own(range(SAMPLES))

    def _own(self, samples: Any) -> Iterator[Any]:
        return iter(samples[dist.get_rank() :: dist.get_world_size()])


def node_of(samples: Any) -> Any:
    return samples[int(os.environ["SLURM_PROCID"]) :: 2]


class AsksInFunctions(IterableDataset[Any]):
    """As a pipeline does whose parts are functions."""

    def __init__(self) -> None:
        self.pipeline = [sorted, lambda samples: iter(node_of(samples))]

    def __iter__(self) -> Iterator[Any]:
        samples: Any = range(SAMPLES)
        for step in self.pipeline:
            samples = step(samples)  # type: ignore[operator]
        yield from samples


class AsksTrainer(IterableDataset[Any]):
    def __init__(self) -> None:
        self.trainer = SimpleNamespace()

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.trainer.global_rank, SAMPLES, 2))


class Batches(IterableDataset[Any]):
    """Ready batches."""

    def __iter__(self) -> Iterator[Any]:
        return (torch.arange(first, min(first + 4, SAMPLES)) for first in range(0, SAMPLES, 4))


def parts(dataset: Any, replicas: int, epoch: int = 0, **options: Any) -> list[list[list[int]]]:
    """Return the batches of each rank; the ranks have drawn different random numbers before."""
    found = []
    for rank in range(replicas):
        random.seed(rank)
        loader = prepare(DataLoader(dataset(), **{"batch_size": 4, **options}), num_replicas=replicas, rank=rank)
        loader.dataset.set_epoch(epoch)
        found.append([batch.tolist() for batch in loader])
    return found


def samples(found: list[list[list[int]]]) -> list[int]:
    return sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(found)))


def test_each_process_takes_every_nth_sample_with_one_warning() -> None:
    with pytest.warns(
        UserWarning, match="each of 2 processes reads all samples of Numbers and keeps its share"
    ) as said:
        prepared = prepare(DataLoader(Numbers(), 4), num_replicas=2, rank=0)
    assert len(said) == 1
    assert "shard(num_shards, index)" in str(said[0].message)
    assert "use_distributed_sampler=False" in str(said[0].message)
    assert [batch.tolist() for batch in prepared][:2] == [[0, 2, 4, 6], [8, 10, 12, 14]]
    for dataset in (Sharded, TakesRank, AsksForRank):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prepare(DataLoader(dataset(), 4), num_replicas=2, rank=0)


@pytest.mark.filterwarnings("ignore:.*keeps its share")
def test_every_sample_is_read_once() -> None:
    everything = list(range(SAMPLES))
    for dataset in (Numbers, Shuffled, ByWorker, Stateful, Bounds, Sharded, TakesRank):
        for replicas, workers in ((3, 0), (2, 3) if dataset is ByWorker else (2, 2)):
            init = give_bounds if workers and dataset is Bounds else None
            found = parts(dataset, replicas, num_workers=workers, worker_init_fn=init)
            assert samples(found) == everything, (dataset, replicas, workers)
            counts = list(map(len, found))
            assert max(counts) - min(counts) <= (1 if dataset not in (ByWorker, Bounds) else max(1, workers))
    assert samples(parts(Doubled, 2)) == [2 * number for number in everything]
    found = parts(Batches, 2, batch_size=None)
    assert samples(found) == everything
    assert [batch[0] for batch in found[0]] == [0, 8, 16, 24, 32]


@pytest.mark.filterwarnings("ignore:.*keeps its share")
def test_a_dataset_that_shuffles_has_the_same_order_everywhere_and_another_in_each_epoch() -> None:
    first, second = (parts(Shuffled, 2, epoch) for epoch in (0, 1))
    assert samples(first) == samples(second) == list(range(SAMPLES))
    assert first != second
    before = random.getstate()
    next(iter(prepare(DataLoader(Shuffled(), 4), num_replicas=2, rank=1)))
    # The numbers that it draws are its own.
    assert random.getstate() == before


def test_a_dataset_that_divides_itself_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    for dataset, why in (
        (AsksForRank(), "its code reads get_rank"),
        (AsksInFunctions(), "its code reads SLURM_PROCID"),
        (AsksTrainer(), "its code reads global_rank"),
        (
            torch.utils.data.ChainDataset([Numbers(), AsksForRank()]),
            "ChainDataset gives, because its code reads get_rank",
        ),
    ):
        loader = DataLoader(dataset, 4)
        caplog.clear()
        for _ in range(2):
            assert prepare(loader, num_replicas=2, rank=0, name=f"the {type(dataset).__name__}") is loader
        assert caplog.text.count(why) == 1  # Though loaders may be made ready in every epoch.
    caplog.clear()
    by_init = DataLoader(Bounds(), 4, num_workers=1, worker_init_fn=give_bounds_of_rank)
    assert prepare(by_init, num_replicas=2, rank=0) is by_init
    assert "worker_init_fn reads get_rank" in caplog.text
    with pytest.warns(UserWarning, match="keeps its share"):
        prepare(DataLoader(Bounds(), 4, num_workers=1, worker_init_fn=seed_by_rank), num_replicas=2, rank=0)
    split = Numbers()
    split._distributed = SimpleNamespace(rank=0, world_size=2)  # type: ignore[attr-defined]
    loader = DataLoader(split, 4)
    assert prepare(loader, num_replicas=2, rank=0) is loader
    assert "split_dataset_by_node" in caplog.text


@pytest.mark.filterwarnings("ignore:.*keeps its share")
def test_attributes_are_those_of_the_users_dataset() -> None:
    dataset = Stateful()
    loader = prepare(DataLoader(dataset, 4), num_replicas=2, rank=0)
    loader.dataset.place = 8
    assert (dataset.place, loader.dataset.place) == (8, 8)
    assert next(iter(loader)).tolist() == [8, 10, 12, 14]


# -- going on


def stream(dataset: Any, replicas: int, rank: int, batch_size: int, workers: int = 0, **options: Any) -> Stream:
    loader = DataLoader(dataset(), batch_size, num_workers=workers, **options)
    made = Stream(prepare(loader, num_replicas=replicas, rank=rank))
    made.set_epoch(1)
    return made


def read(made: Stream, count: int | None = None) -> list[list[int]]:
    return [batch.tolist() for batch, _ in itertools.islice(made.batches(), count)]


@pytest.mark.filterwarnings("ignore:.*keeps its share")
def test_a_stream_goes_on_exactly() -> None:
    for dataset, workers in itertools.product((Shuffled, ByWorker, Stateful), (0, 2)):
        for persistent in (False, True) if workers else (False,):
            options = {"workers": workers, "persistent_workers": persistent}
            made = stream(dataset, 2, 1, 2, **options)
            read(made)
            made.set_epoch(2)
            batches = made.batches()
            for _ in range(3):
                next(batches)
            state = made.state_dict(3)
            rest = [batch.tolist() for batch, _ in batches]
            made.set_epoch(3)
            rest += read(made)
            made.close()
            again = stream(dataset, 2, 1, 2, **options)
            again.load_state_dict(state)
            found = read(again)
            again.set_epoch(3)
            assert found + read(again) == rest, (dataset, options)
            again.close()


def chained(dataset: Any, *runs: tuple[int, int, int, int | None]) -> list[int] | str:
    """Read an epoch in runs of so many processes, workers, samples and batches; return all samples, or why not."""
    seen, state = [], None
    for number, (replicas, workers, batch_size, count) in enumerate(runs):
        states = []
        for rank in range(replicas):
            made = stream(dataset, replicas, rank, batch_size, workers)
            random.seed(7 + number)
            if state is not None:
                made.load_state_dict(state, moved=True)
                if made.not_known:
                    return made.not_known
            seen.append(read(made, count))
            states.append(made.state_dict(made.consumed))
            made.close()
        state = states[0]
    return samples(seen)


@pytest.mark.filterwarnings("ignore:.*keeps its share")
def test_other_processes_read_the_rest_of_an_epoch() -> None:
    everything = list(range(SAMPLES))
    for dataset, *runs in (
        (Shuffled, (2, 0, 2, 3), (1, 0, 3, None)),
        (Shuffled, (1, 0, 2, 3), (2, 0, 2, None)),
        (Shuffled, (2, 0, 2, 2), (3, 0, 1, 2), (1, 0, 4, None)),
        (Numbers, (2, 2, 2, 3), (3, 0, 2, None)),
        (ByWorker, (2, 2, 1, 3), (3, 2, 1, 3), (2, 2, 3, None)),
        (ByWorker, (2, 2, 2, 3), (1, 2, 2, None)),
    ):
        assert chained(dataset, *runs) == everything, (dataset, runs)
    why = chained(ByWorker, (2, 2, 2, 3), (3, 0, 2, None))
    assert why == "the IterableDataset ByWorker may divide its samples among 2 workers itself"
    assert "each with its own random numbers" in str(chained(Numbers, (1, 2, 2, 3), (2, 0, 2, None)))
    assert "Stateful, which keeps its position" in str(chained(Stateful, (2, 0, 2, 3), (3, 0, 2, None)))
    for dataset, runs in (
        (ByWorker, [(2, 2, 2, 3), (3, 3, 2, None)]),
        (Numbers, [(2, 2, 2, 3), (1, 2, 2, None)]),
    ):
        with pytest.raises(RuntimeError, match="as many processes as before"):
            chained(dataset, *runs)


# -- two processes


class Part(IterableDataset[Any]):
    """A part that the user has chosen."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = list(numbers)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numbers)


class AnyOrder(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(random.Random().sample(range(1000), SAMPLES))


class Seen(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained: list[int] = []
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained += batch.tolist()
        return self.layer(batch[:, None].float() / SAMPLES).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated += batch.tolist()
        self.log("mean", batch.double().mean(), batch_size=len(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def everywhere(own: list[int]) -> list[int]:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, own)
    return sorted(found[0] + found[1])


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore")
def test_two_processes_divide_what_is_the_same_on_both() -> None:
    rank = dist.get_rank()
    module, trainer = Seen(), quiet(devices=2, strategy="ddp", num_sanity_val_steps=0)
    trainer.fit(module, DataLoader(Numbers(), 2), DataLoader(Numbers(), 4))
    assert everywhere(module.trained) == list(range(36))  # All but the last: one process has none to pair with it.
    assert everywhere(module.validated) == list(range(SAMPLES))
    assert float(trainer.callback_metrics["mean"]) == pytest.approx(18.0)

    one = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    one.launch()
    loader = one.setup_dataloaders(DataLoader(Shuffled(), 4))
    first, second = (torch.cat(list(loader)).tolist() for _ in range(2))
    assert everywhere(first) == everywhere(second) == list(range(SAMPLES))
    assert first != second
    undivided = one.setup_dataloaders(DataLoader(Numbers(), 4), use_distributed_sampler=False)
    assert torch.cat(list(undivided)).tolist() == list(range(SAMPLES))

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        chosen = one.setup_dataloaders(DataLoader(Part(range(SAMPLES)[rank::2]), 4))
        same = one.setup_dataloaders(DataLoader(Part(range(SAMPLES)), 4))
    assert not isinstance(chosen.dataset, DividedDataset)
    assert isinstance(same.dataset, DividedDataset)
    assert torch.cat(list(chosen)).tolist() == list(range(SAMPLES)[rank::2])
    if rank == 0:
        assert "(numbers differs)" in str(said[0].message)

    for how in ({}, {"num_workers": 1, "multiprocessing_context": "fork"}):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer.fit_loop.max_epochs += 1
            trainer.fit(module, DataLoader(AnyOrder(), 4, **how))
        found: list[Any] = [None, None]
        dist.all_gather_object(found, [str(each.message) for each in said])
        message = "AnyOrder begins with another sample on rank"
        assert any(message in each for each in found[0] + found[1]), how
