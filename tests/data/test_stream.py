"""What a stream of batches gives, and what it says when something is wrong."""

from __future__ import annotations

import gc
import multiprocessing
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset

from hasten.data.loader_parts import has_state
from hasten.data.resume.stream import Stream
from hasten.seed import collect_rng_state, isolate_rng, restore_rng_state
from tests.refusals import refused, warned


class Countdown:
    """A loader without a length, whose reading is watched."""

    def __init__(self, number: int) -> None:
        self.number, self.read = number, 0

    def __iter__(self) -> Iterator[int]:
        for value in range(self.number):
            self.read += 1
            yield value


class Failing(Dataset):
    """Raises at sample 3."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise self.error
        return index

    def __len__(self) -> int:
        return 6


class Short(IterableDataset):
    """Has fewer samples than it says."""

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class WithState:
    """A loader that keeps its place itself, as torchdata's does."""

    def __init__(self) -> None:
        self.place = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        while self.place < 5:
            self.place += 1
            yield self.place
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def numbers(samples: int = 6, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(samples)), batch_size=2, **options)


def values(batches: Iterator[tuple[Any, bool]]) -> list[list[int]]:
    return [batch[0].tolist() for batch, _ in batches]


def python_calls(function: Callable[[], Any]) -> int:
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()  # What it calls is not counted.
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


# -- batches


@pytest.mark.parametrize(("limit", "expected"), [(0, 0), (1, 1), (2, 2), (3, 3), (9, 3), (None, 3)])
def test_limit_ends_an_epoch_and_the_last_batch_is_marked(limit: int | None, expected: int) -> None:
    for loader in ([1, 2, 3], (1, 2, 3), Countdown(3), numbers(), DataLoader(Short(), batch_size=2)):
        stream = Stream(loader)
        for _ in range(2):
            ends = [is_last for _, is_last in stream.batches(limit)]
            assert ends == [False] * (expected - 1) + [True] * (expected > 0)


def test_lengths_of_loaders() -> None:
    class Wrong(BatchSampler):
        def __len__(self) -> int:
            return 2

    assert Stream([1]).length == 1
    assert Stream(Countdown(3)).length is None
    assert Stream(DataLoader(Short(), batch_size=2)).length == 5
    # The user's sampler gives three batches.
    wrong = DataLoader(range(6), batch_sampler=Wrong(SequentialSampler(range(6)), 2, False))
    assert [is_last for _, is_last in Stream(wrong).batches()] == [False, False, True]
    with warned(UserWarning, says=("2 says", "limit_train_batches=2")):
        list(Stream(Sized(4, 2), name="said once").batches())


def test_only_a_loader_of_unknown_length_is_read_one_ahead_and_not_beyond_the_limit() -> None:
    read: list[Any] = []
    next(Stream(DataLoader(range(6), batch_size=2, collate_fn=read.append)).batches())  # type: ignore[arg-type]
    assert len(read) == 1
    loader = Countdown(9)
    batches = Stream(loader).batches(limit=3)
    assert (next(batches), loader.read) == ((0, False), 2)
    assert list(batches) == [(1, False), (2, True)]
    assert loader.read == 3


class Sized(Countdown):
    """Says a length, which may be wrong; ``draws``: from torch's generator, for each batch."""

    def __init__(self, number: int, says: int, draws: bool = False) -> None:
        super().__init__(number)
        self.says, self.draws = says, draws

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[int]:
        for value in super().__iter__():
            if self.draws:
                torch.rand(1)
            yield value


@pytest.mark.parametrize("says", [1, 3, 4, 5, 9])
def test_every_batch_comes_and_the_last_is_marked_whatever_the_length(says: int) -> None:
    expected = [(0, False), (1, False), (2, False), (3, True)]
    for limit in (None, 9):
        assert list(Stream(Sized(4, says), replays=False).batches(limit)) == expected
    assert [is_last for _, is_last in Stream(Sized(4, says), replays=False).batches(2)] == [False, True]
    # One that draws random numbers is not read ahead within its length.
    loader = Sized(4, says, draws=True)
    batches = Stream(loader, replays=False).batches()
    assert (next(batches), loader.read) == ((0, False), 1 if says > 1 else 2)
    assert list(batches) == [*expected[1:3], (3, says <= 4)]


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("says", [2, 4, 5])
def test_a_loader_with_a_wrong_length_goes_on_where_it_was(says: int, draws: bool) -> None:
    def run(stream: Stream, states: list[Any]) -> list[Any]:
        seen = []
        for _ in range(2):
            for number, (batch, is_last) in enumerate(stream.batches(), start=1):
                seen.append((batch, is_last, torch.rand(1).item()))
                states.append((len(seen), torch.get_rng_state(), stream.state_dict(number)))
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        states: list[Any] = []
        seen = run(Stream(Sized(4, says, draws)), states)
        assert [batch for batch, _, _ in seen] == [0, 1, 2, 3] * 2
        for done, random_state, state in states[:4]:
            again = Stream(Sized(4, says, draws))
            again.load_state_dict(state)
            again.open()
            torch.set_rng_state(random_state)
            # The rest of the epoch, which may turn out to be over, and the next one.
            rest: list[Any] = []
            while len(rest) < len(seen) - done:
                rest += [(batch, is_last, torch.rand(1).item()) for batch, is_last in again.batches()]
            assert rest == seen[done:], done


def test_a_batch_of_a_dataloader_costs_one_python_call_more_than_the_plain_loop() -> None:
    def extra(samples: int) -> int:
        loader = DataLoader(TensorDataset(torch.arange(samples)), batch_size=1)
        stream = Stream(loader)
        list(stream.batches())
        return python_calls(lambda: list(stream.batches())) - python_calls(lambda: list(loader))

    assert extra(60) - extra(10) == 50


# -- the place


def test_state_is_that_of_the_batches_consumed() -> None:
    stream = Stream([1, 2, 3])
    batches = stream.batches()
    next(batches)
    next(batches)
    for consumed, rest in ((2, [(3, True)]), (1, [(2, False), (3, True)])):
        again = Stream([1, 2, 3])
        again.load_state_dict(stream.state_dict(consumed))
        assert again.position == consumed
        assert list(again.batches()) == rest
        assert len(list(again.batches())) == 3
    with refused(ValueError, "train_dataloader", fix="2"):
        stream.state_dict(0)


def state_after(loader: Any, consumed: int) -> dict[str, Any]:
    """Return the state of a stream that was left after so many batches."""
    stream = Stream(loader)
    batches = stream.batches()
    for _ in range(consumed):
        next(batches)
    return stream.state_dict(consumed)


def resumed(loader: Any, state: dict[str, Any], **options: Any) -> Stream:
    stream = Stream(loader, **options)
    stream.load_state_dict(state)
    return stream


def test_states_of_every_kind_are_resumed() -> None:
    loader = numbers(shuffle=True)
    assert len(list(resumed(loader, state_after(loader, 1)).batches())) == 2
    state = state_after([1, 2, 3], 1)
    assert resumed([1, 2, 3], state).state_dict(1) == state  # Loaded and not yet used.
    again = resumed(numbers(), state_after(numbers(), 1))
    again.finish()
    assert again.position == 0
    assert values(again.batches()) == [[0, 1], [2, 3], [4, 5]]
    own = resumed(WithState(), state_after(WithState(), 2))
    assert [value for value, _ in own.batches()] == [3, 4, 5]
    assert [value for value, _ in own.batches()] == [1, 2, 3, 4, 5]


def test_state_of_a_stream_opened_at_the_end_of_an_epoch_is_that_end() -> None:
    def living() -> DataLoader:
        return numbers(shuffle=True, num_workers=1, persistent_workers=True)

    stream = Stream(living())
    list(stream.batches())
    again = resumed(living(), stream.state_dict(3))
    again.open()
    third = resumed(living(), again.state_dict(0))
    seen = []
    for each in (stream, again, third):
        torch.manual_seed(3)
        seen.append(values(each.batches()))
        each.close()
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("workers", [0, 2])
def test_start_at_leaves_out_batches(workers: int) -> None:
    stream = Stream(numbers(num_workers=workers))
    stream.start_at(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert values(stream.batches()) == [[4, 5]]
        assert values(stream.batches()) == [[0, 1], [2, 3], [4, 5]]


def test_resuming_with_other_data() -> None:
    class Variable(list[int]):
        """A sampler with another number of indices than its length."""

        def __len__(self) -> int:
            return 6

    again = resumed(numbers(10), state_after(numbers(6), 1), name="changed_data")
    with warned(UserWarning, says=("changed_data", "5 batches", "had 3")):
        assert values(again.batches()) == [[2, 3], [4, 5], [6, 7], [8, 9]]
    fewer = numbers(sampler=Variable(range(2)))
    with refused(RuntimeError, says=("2 batches", "after 1")):
        next(resumed(fewer, state_after(numbers(sampler=Variable(range(6))), 2)).batches())


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 1)])
def test_resuming_with_another_number_of_workers_keeps_the_samples_and_warns(before: int, after: int) -> None:
    torch.manual_seed(5)
    expected = values(Stream(numbers(12, shuffle=True)).batches())
    torch.manual_seed(5)
    state = state_after(numbers(12, shuffle=True, num_workers=before), 3)
    again = resumed(numbers(12, shuffle=True, num_workers=after), state)
    with warned(UserWarning, says=(f"num_workers={before}", f"num_workers={after}")):
        assert values(again.batches()) == expected[3:]


def test_opening_leaves_the_random_generators_alone() -> None:
    again = resumed(numbers(shuffle=True), state_after(numbers(shuffle=True), 1))
    before = torch.get_rng_state()
    again.open()
    assert torch.equal(torch.get_rng_state(), before)


def test_set_epoch_reaches_each_part_once() -> None:
    class Told(list):
        epochs: tuple[int, ...] = ()

        def set_epoch(self, epoch: int) -> None:
            self.epochs += (epoch,)

    dataset, sampler = Told([1, 2]), Told([0, 1])
    Stream(DataLoader(dataset, sampler=sampler)).set_epoch(4)
    assert (dataset.epochs, sampler.epochs) == ((4,), (4,))


class Own(DataLoader):
    """Changes batches by the epoch, and joins one more itself."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        yield self.collate_fn([7])
        for batch in super().__iter__():
            yield batch + 10 * self.epoch


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_changes_of_a_loader_reach_its_next_epoch(options: Any) -> None:
    loader = Own([1, 2], batch_size=2, **options)
    stream = Stream(loader)
    epochs = []
    for epoch in range(3):
        stream.set_epoch(epoch)
        if epoch == 2:
            loader.collate_fn = sum  # type: ignore[assignment]
        epochs.append([batch.tolist() if torch.is_tensor(batch) else batch for batch, _ in stream.batches()])
    stream.close()
    # Workers that live on keep what they began with.
    latest = [7, [21, 22]] if stream.loader.persistent_workers else [7, 23]
    assert epochs == [[[7], [1, 2]], [[7], [11, 12]], latest]


class Dated(Dataset):
    """Has the epoch in its samples."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return self.epoch

    def __len__(self) -> int:
        return 3


def test_persistent_workers_have_the_epoch_of_a_dataset_that_is_told_it() -> None:
    def dated() -> Stream:
        return Stream(DataLoader(Dated(), num_workers=1, persistent_workers=True))

    def read(stream: Stream, epoch: int) -> list[int]:
        stream.set_epoch(epoch)
        return [batch.item() for batch, _ in stream.batches()]

    with warned(UserWarning, fix="persistent_workers=False", says="Dated"):
        stream = dated()
    assert [read(stream, epoch) for epoch in range(2)] == [[0] * 3, [1] * 3]
    stream.set_epoch(2)
    batches = stream.batches()
    next(batches)
    again = dated()
    again.load_state_dict(stream.state_dict(1))
    batches.close()
    assert [batch.item() for batch, _ in again.batches()] == [2, 2]


# -- the end of things


@pytest.mark.parametrize("persistent", [False, True])
def test_close_ends_the_workers_and_leaving_those_that_do_not_persist(persistent: bool) -> None:
    stream = Stream(numbers(num_workers=2, persistent_workers=persistent))
    batches: Any = stream.batches()
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    batches.close()
    assert len(multiprocessing.active_children()) == 2 * persistent
    stream.close()
    assert not multiprocessing.active_children()


def test_loader_of_the_user_is_not_changed() -> None:
    loader = numbers(num_workers=2)
    before = dict(vars(loader))
    list(Stream(loader).batches())
    assert {**vars(loader), "_iterator": None} == {**before, "_iterator": None}


# -- errors


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_ends_an_epoch_by_stop_iteration_is_named(workers: int) -> None:
    stream = Stream(DataLoader(Failing(StopIteration()), batch_size=2, num_workers=workers), name="my_loader")
    with warned(UserWarning, says=["my_loader", "1 of its 3 batches", "StopIteration"]):
        assert len(list(stream.batches())) == 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [ValueError("torn"), KeyError("label")], ids=lambda error: type(error).__name__)
def test_error_of_a_dataset_keeps_its_type_and_names_the_place(error: Exception, workers: int) -> None:
    stream = Stream(DataLoader(Failing(error), batch_size=2, num_workers=workers), name="my_loader")
    with pytest.raises(type(error)) as caught:
        list(stream.batches())
    note = caught.value.__notes__[0]
    assert note.startswith("in my_loader: batch 1 of the dataset ")
    assert "test_stream.Failing" in note
    if workers:
        assert note.endswith("indices [2, 3]")
        assert "DataLoader worker process 1" in str(caught.value)
    else:
        assert note.endswith("sample 3")
    assert not multiprocessing.active_children()


def test_a_dataset_with_a_shuffle_buffer_of_hugging_face_is_read_again_instead_of_restored() -> None:
    buffer = type("BufferShuffledExamplesIterable", (), {})()
    plain = SimpleNamespace(ex_iterable=None)
    base = {"state_dict": lambda self: {}, "load_state_dict": lambda self, state: None}
    kind = type("IterableDataset", (), {**base, "__module__": "datasets.iterable_dataset"})
    for examples, exact in ((plain, True), (SimpleNamespace(ex_iterables=[plain, buffer]), False), (buffer, False)):
        dataset = kind()
        dataset._ex_iterable = examples
        assert has_state(dataset) is exact


class Drawing:
    """Eight batches, each the sum of the random numbers drawn so far; some draw one."""

    def __init__(self, draws: set[int]) -> None:
        self.draws = draws

    def __iter__(self) -> Iterator[float]:
        total = 0.0
        for number in range(8):
            total += random.random() if number in self.draws else 0
            yield total

    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize("seed", range(30))
def test_an_epoch_goes_on_exactly_whichever_batches_and_steps_draw_random_numbers(seed: int) -> None:
    chosen = random.Random(seed)
    of_loader, of_training = ({number for number in range(8) if chosen.random() < 0.25} for _ in range(2))
    with isolate_rng():
        random.seed(seed)
        stream = Stream(Drawing(of_loader))
        seen, states = [], []
        for number, (batch, _) in enumerate(stream.batches()):
            seen.append(batch)
            if number in of_training:
                seen.append(random.random())
            states.append((len(seen), stream.state_dict(number + 1), collect_rng_state(cuda=False)))
        for place, state, rng in states[:-1]:
            again, resumed = Stream(Drawing(of_loader)), list(seen[:place])
            again.load_state_dict(state)
            random.seed(0)
            again.open()
            restore_rng_state(rng)
            for number, (batch, _) in enumerate(again.batches(), again.consumed):
                resumed.append(batch)
                if number in of_training:
                    resumed.append(random.random())
            assert resumed == seen
