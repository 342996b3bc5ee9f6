"""Living workers fetch the next epoch's first batches while this one's validation runs, with the same results."""

from __future__ import annotations

import io
import sys
import time
from multiprocessing import Value
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, WeightedRandomSampler

from hasten.data.loader_parts import ShardSampler
from hasten.data.resume.stream import Stream, begins_early
from tests.models import Classifier, quiet

SAMPLES, BATCH_SIZE = 16, 4
fetched = Value("i", 0)


class Noisy(Dataset[Any]):
    """Samples with noise from the worker's random state; counts how many were fetched, in all processes."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        with fetched.get_lock():
            fetched.value += 1
        return index + torch.rand(8), torch.tensor(index % 2)


def living(**options: Any) -> DataLoader[Any]:
    """Return a loader whose workers live on, as copies of this process, which reads what they count."""
    defaults: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": 1, "persistent_workers": True}
    if sys.platform == "linux" and options.get("num_workers", 1):
        defaults["multiprocessing_context"] = "fork"
    return DataLoader(Noisy(), **{**defaults, **options})


def shuffled() -> DataLoader[Any]:
    """Return one whose order comes from a generator of its own."""
    return living(shuffle=True, generator=torch.Generator().manual_seed(3))


def comes_to_more_than(count: int) -> bool:
    """Wait until more samples were fetched."""
    end = time.monotonic() + 20
    while fetched.value <= count and time.monotonic() < end:
        time.sleep(0.01)
    return fetched.value > count


class Watching(Classifier):
    """Draws random numbers in validation, and notes there whether samples of the next epoch come."""

    def on_validation_epoch_start(self) -> None:
        torch.rand(1)
        if self.trainer.sanity_checking:
            return
        early = self.trainer.max_epochs > self.current_epoch + 1
        self.came = [*getattr(self, "came", []), early and comes_to_more_than(SAMPLES * (self.current_epoch + 1))]


def test_samples_of_the_next_epoch_come_during_validation() -> None:
    fetched.value = 0
    module = Watching()
    validation = DataLoader([(torch.ones(8), torch.tensor(1))] * 2)
    quiet(max_epochs=3, num_sanity_val_steps=0).fit(module, shuffled(), validation)
    assert module.came == [True, True, False]
    assert fetched.value == 3 * SAMPLES  # None was fetched for an epoch that does not come.


def run_of(stream: Stream, epochs: range, early: bool) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return the batches of some epochs, and the states after each batch and between epochs."""
    seen, states = [], []
    for epoch in epochs:
        stream.set_epoch(epoch)
        for number, (batch, is_last) in enumerate(stream.batches(), 1):
            seen.append(batch[0])
            if early and is_last:
                stream.begin_next(epoch + 1)
                torch.rand(2)  # What validation draws.
            elif is_last:
                torch.rand(2)
            states.append(stream.state_dict(number))
        states.append(stream.state_dict(0))
    return seen, states


def bytes_of(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def test_which_loaders_begin_early() -> None:
    generator = torch.Generator()
    yes = [
        living(),
        shuffled(),
        living(sampler=ShardSampler(range(4), 2, 0, repeat=True)),
        living(sampler=DistributedSampler(Noisy(), 2, 0)),
    ]
    no = [
        living(shuffle=True),  # Draws from torch's generator, as validation may.
        living(persistent_workers=False),
        living(num_workers=0, persistent_workers=False),
        living(sampler=WeightedRandomSampler([1.0] * 4, 4, generator=generator)),  # Weights may still change.
    ]
    assert [begins_early(loader) for loader in yes] == [True, True, False, True]
    assert [begins_early(loader) for loader in no] == [False] * 4


def test_batches_states_and_what_is_resumed_are_those_without() -> None:
    runs = []
    for early in (False, True):
        torch.manual_seed(0)
        stream = Stream(shuffled())
        seen, states = run_of(stream, range(3), early)
        stream.close()
        runs.append((seen, [bytes_of(state) for state in states]))
    seen, states = runs[1]
    assert all(map(torch.equal, runs[0][0], seen))
    assert runs[0][1] == states
    # States: four batches and one between epochs, for each epoch.
    for place, batches_done in ((3, 4), (4, 4), (6, 6)):
        resumed = Stream(shuffled())
        resumed.load_state_dict(torch.load(io.BytesIO(states[place]), weights_only=True))
        rest: list[Any] = []
        while len(rest) < len(seen) - batches_done:
            rest += [batch[0] for batch, _ in resumed.batches()]
        resumed.close()
        assert all(map(torch.equal, seen[batches_done:], rest))


def test_an_epoch_that_does_not_come_leaves_generator_and_sampler_to_the_user() -> None:
    def started_early(loader: DataLoader[Any]) -> Stream:
        stream = Stream(loader)
        for _, is_last in stream.batches():
            if is_last:
                states.append(loader.generator and loader.generator.get_state())
                stream.begin_next(1)
        return stream

    states: list[Any] = []
    loader = shuffled()
    stream = started_early(loader)
    assert not torch.equal(states[0], loader.generator.get_state())
    stream.close()
    assert torch.equal(states[0], loader.generator.get_state())
    sampler: Any = DistributedSampler(Noisy(), 1, 0)
    stream = started_early(living(sampler=sampler))
    sampler.set_epoch(7)
    order = list(sampler)
    assert [int(x[0]) for batch, _ in stream.batches() for x in batch[0]] == order
    stream.close()
