"""An ``IterableDataset`` on several processes: who divides it, which samples each reads, and how it goes on."""

from __future__ import annotations

import itertools
import logging
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
from hasten.data import first_samples
from hasten.data.loaders import prepare
from hasten.data.resume.stream import Stream
from tests.models import quiet
from tests.refusals import refused, warned

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


class Part(IterableDataset[Any]):
    """A part that the user has chosen."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = list(numbers)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.numbers)


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
    prepared = prepare(DataLoader(Numbers(), 4), num_replicas=2, rank=0)
    with warned(UserWarning, says="2 processes") as said:
        found = [batch.tolist() for batch in itertools.chain(prepared, prepared)]
    assert len(said) == 1  # In the first epoch.
    assert "shard(num_shards, index)" in str(said[0].message)
    assert "use_distributed_sampler=False" in str(said[0].message)
    assert found[:2] == [[0, 2, 4, 6], [8, 10, 12, 14]]
    for dataset in (Sharded, TakesRank):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            list(prepare(DataLoader(dataset(), 4), num_replicas=2, rank=0))


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


def test_a_dataset_that_says_how_it_is_divided_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    split = Numbers()
    split._distributed = SimpleNamespace(rank=0, world_size=2)  # type: ignore[attr-defined]
    loader = DataLoader(torch.utils.data.ChainDataset([Numbers(), split]), 4)
    for _ in range(2):
        assert prepare(loader, num_replicas=2, rank=0, name="the chained") is loader
    # Though loaders may be made ready in every epoch.
    assert caplog.text.count("the chained: each process reads all that its ChainDataset gives, because split_") == 1


def test_a_loader_that_makes_its_batches_itself_is_left_alone() -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return itertools.islice(super().__iter__(), 0, None, 2)

    loader = Own(Numbers(), 4)
    with warned(UserWarning, says="use_distributed_sampler=False"):
        assert prepare(loader, num_replicas=2, rank=0) is loader


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_repeat_show_nothing(workers: int, recwarn: pytest.WarningsRecorder) -> None:
    for pattern in ([7], [0, 1]):
        loader = DataLoader(Part(pattern * 20), 2, num_workers=workers)
        found = torch.cat(list(prepare(loader, num_replicas=2, rank=1))).tolist()
        assert found == torch.cat(list(loader)).tolist()
    if not workers:  # Those of workers are written by the workers.
        assert "use_distributed_sampler=False if it does, else give Part a method shard" in str(recwarn[0].message)


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
    # After one sample, the dataset is further than what was kept of it.
    counts = ((2, 3), (1, 1))
    for dataset, workers in itertools.product((Shuffled, ByWorker, Stateful), (0, 2)):
        for persistent in (False, True) if workers else (False,):
            options = {"workers": workers, "persistent_workers": persistent}
            # Workers take time to start: every pair of dataset, kind of worker and count, not all three.
            only = counts[persistent == (dataset is not Stateful)]
            for batch_size, count in (only,) if workers else counts:
                made = stream(dataset, 2, 1, batch_size, **options)
                read(made)
                made.set_epoch(2)
                batches = made.batches()
                for _ in range(count):
                    next(batches)
                state = made.state_dict(count)
                rest = [batch.tolist() for batch, _ in batches]
                made.set_epoch(3)
                rest += read(made)
                made.close()
                again = stream(dataset, 2, 1, batch_size, **options)
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


def by_rank(samples: Any) -> Any:
    return samples[dist.get_rank() :: 2]


class ByRank(IterableDataset[Any]):
    """Divides itself among processes, in code that no search would find."""

    def __iter__(self) -> Iterator[Any]:
        return iter(eval("by_rank")(range(SAMPLES)))


class ByRankAndWorker(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(SAMPLES)[dist.get_rank() * workers + worker :: 2 * workers])


class InHalves(IterableDataset[Any]):
    """Two halves that begin alike: only a process that knows more can tell them from one stream."""

    def __iter__(self) -> Iterator[Any]:
        yield from [100, 100, 101] + [200 + dist.get_rank()] * 4


def bounds_of_rank(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.start, info.dataset.end = (0, 20) if dist.get_rank() == 0 else (20, SAMPLES)


class Already(Sharded):
    """Is given the part that the program has chosen."""

    def __init__(self) -> None:
        super().__init__(slice(dist.get_rank(), None, 2))


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore")
def test_no_sample_is_lost_whoever_divides() -> None:
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    everything = list(range(SAMPLES))
    kinds: Any = (Numbers, Shuffled, ByWorker, ByRankAndWorker, Sharded, TakesRank, Already)
    for dataset, workers, init in (
        *itertools.product(kinds, (0, 2), (None,)),
        (ByRank, 0, None),
        (ByRank, 1, None),
        (Stateful, 0, None),
        (Bounds, 2, give_bounds),
        (Bounds, 1, bounds_of_rank),
    ):
        how: Any = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        loader = fabric.setup_dataloaders(DataLoader(dataset(), 2, worker_init_fn=init, **how))
        for _ in range(2):
            found = [sample for batch in loader for sample in batch.tolist()]
            assert everywhere(found) == everything, (dataset, workers)


@pytest.mark.world_size(2)
def test_what_the_first_samples_show_is_said_once() -> None:
    rank = dist.get_rank()
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    log = logging.getLogger("hasten")
    for dataset, messages, logged in (
        (Numbers(), ["each of 2 processes reads all samples of Numbers and keeps its share"], ""),
        (Part(range(SAMPLES)[rank::2]), [], "because the first samples of each are different ones"),
        (Part([3] * 8), ["do not show whether it divides them itself. Pass use_distributed_sampler=False"], ""),
        (InHalves(), ["do not show whether it divides them itself"], ""),
    ):
        seen: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, seen=seen: seen.append(record.getMessage())  # type: ignore[method-assign, misc]
        log.addHandler(handler)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loader = fabric.setup_dataloaders(DataLoader(dataset, 4))
            first, second = (torch.cat(list(loader)).tolist() for _ in range(2))
        log.removeHandler(handler)
        found = [str(each.message) for each in said]
        assert first == second
        assert len(found) == (0 if rank else len(messages)), (dataset, found)
        assert all(message in text for message, text in zip(messages, found, strict=False)), found
        assert logged in "".join(seen) or rank
        if not isinstance(dataset, Numbers):
            assert first == list(dataset)


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore")
def test_a_dataset_that_divides_itself_goes_on_exactly() -> None:
    def made(kind: Any) -> Stream:
        found = Stream(prepare(DataLoader(kind(by_rank(range(SAMPLES))), 2), num_replicas=2, rank=dist.get_rank()))
        found.set_epoch(1)
        return found

    for kind, count in itertools.product((Drawn, WithPlace), (1, 3)):
        first = made(kind)
        batches = first.batches()
        for _ in range(count):
            next(batches)
        state = first.state_dict(count)
        rest = [batch.tolist() for batch, _ in batches]
        again = made(kind)
        again.load_state_dict(state)
        assert read(again) == rest
        found: list[Any] = [None, None]
        dist.all_gather_object(found, rest)
        assert found[0] != found[1]
    # One process less: what is left is not known, and as many batches are left out.
    alone = Stream(DataLoader(Drawn(range(SAMPLES)), 2))
    alone.load_state_dict(state, moved=True)
    assert "which divides its samples itself" in alone.not_known


class Drawn(IterableDataset[Any]):
    """Numbers with noise of the generator that all samples share."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers:
            yield number + 0.5 * random.random()


class WithPlace(Stateful):
    def __init__(self, numbers: Any) -> None:
        super().__init__()
        self.numbers = numbers

    def __iter__(self) -> Iterator[Any]:
        while self.place < len(self.numbers):
            self.place += 1
            yield self.numbers[self.place - 1] + 0.5 * random.random()
        self.place = 0


@pytest.mark.world_size(2)
def test_a_loader_that_one_process_does_not_read_is_an_error() -> None:
    first_samples._PATIENCE_SECONDS = 0.5  # type: ignore[misc]
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    loader = fabric.setup_dataloaders(DataLoader(Numbers(), 4), DataLoader(Numbers(), 4))[0]
    if dist.get_rank() == 0:
        with refused(RuntimeError, says=("dataloader 0", "rank 1")):
            list(loader)
    fabric.barrier()
