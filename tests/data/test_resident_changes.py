"""Held data that is random or that the program changes: refused, or read again in the epoch of the change."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import warnings
from collections.abc import Callable, Iterator
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, get_worker_info

import hasten as L
from hasten.data import preload, resident
from tests.models import Classifier, quiet, same_weights
from tests.refusals import refused, warned

SAMPLES = 60
LEVEL = 0.0


class Flipping(Dataset[Any]):
    """Flips a tenth of its samples; ``draw`` gives a number from 0 to 1."""

    def __init__(self, draw: Callable[[], float] | None = None) -> None:
        self.samples = torch.arange(1.0, SAMPLES + 1)
        self.draw = draw

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return -self.samples[index] if self.number() < 0.1 else self.samples[index]

    def number(self) -> float:
        return self.draw()  # type: ignore[misc]


class Holding(Flipping):
    """Holds its generator."""

    def __init__(self, generator: Any, draw: Callable[[Any], Any] = methodcaller("random")) -> None:
        super().__init__()
        self.random, self.draw_from = generator, draw

    def number(self) -> float:
        return float(self.draw_from(self.random))


def of_python(seed: int) -> Holding:
    return Holding(random.Random(seed))


class Transform:
    """Flips, with a generator that no dataset knows of."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __call__(self, sample: Tensor) -> Tensor:
        return -sample if self.random.random() < 0.1 else sample


class Transformed(Flipping):
    def __init__(self, transform: Any) -> None:
        super().__init__()
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.samples[index])


def enclosed(seed: int) -> Callable[[], float]:
    generator = random.Random(seed)
    return lambda: generator.random()


def consumed(numbers: Iterator[int]) -> Callable[[], float]:
    return lambda: float(next(numbers) % 10) / 10


RANDOM: dict[str, Callable[[int], Any]] = {
    "numpy": lambda seed: Holding([np.random.default_rng(seed)], lambda held: held[0].random()),
    "numpy's old": lambda seed: Holding(np.random.RandomState(seed), methodcaller("rand")),
    "torch.Generator": lambda seed: Holding(
        torch.Generator().manual_seed(seed), lambda generator: torch.rand((), generator=generator)
    ),
    "of the system": lambda seed: Flipping(random.SystemRandom().random),
    "enclosed": lambda seed: Flipping(enclosed(seed)),
    "consumed": lambda seed: Flipping(consumed(itertools.count(seed))),
    "method of a transform": lambda seed: Transformed(Transform(seed).__call__),
    "joined": lambda seed: ConcatDataset([TensorDataset(torch.ones(3)), Subset(of_python(seed), range(50))]),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_a_tenth_of_random_samples_is_found_whatever_draws_them(kind: str) -> None:
    for argument, read in (("preload", preload), ("resident", lambda data: resident(DataLoader(data, 4)))):
        with refused(ValueError, argument):
            read(RANDOM[kind](3))


class Labelled(Holding):
    def __getitem__(self, index: int) -> Any:
        return torch.full((8,), float(super().__getitem__(index)) / SAMPLES), index % 2


def test_what_is_read_as_before_draws_what_it_would_have_drawn() -> None:
    def fitted(**arguments: Any) -> Classifier:
        torch.manual_seed(0)
        module = Classifier()
        quiet(max_epochs=2, **arguments).fit(module, DataLoader(Labelled(random.Random(3)), 4))
        return module

    assert same_weights(fitted(), fitted(resident="auto"))


class OfWorkers(Flipping):
    """Has its generator from the ``worker_init_fn``, and only there."""

    random: Any

    def number(self) -> float:
        return float(self.random.random())


def give_generator(worker_id: int) -> None:
    info: Any = get_worker_info()
    info.dataset.random = random.Random(worker_id)


class Opened(Flipping):
    """Has its file from the ``worker_init_fn``, and only there."""

    opened: Any

    def __getitem__(self, index: int) -> Any:
        return self.opened[index]


def open_file(worker_id: int) -> None:
    info: Any = get_worker_info()
    info.dataset.opened = info.dataset.samples.clone()


def test_what_a_worker_init_fn_gives_is_seen() -> None:
    def given(data: Any, function: Any) -> Any:
        return DataLoader(data, 4, num_workers=1, worker_init_fn=function)

    with refused(ValueError, "resident"):
        resident(given(OfWorkers(), give_generator))
    assert torch.cat(list(resident(given(Opened(), open_file)))).tolist() == list(range(1, SAMPLES + 1))


class Caching(Flipping):
    """Counts, remembers what it has read and has a generator, which it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)
        self.read, self.cache, self.file = 0, {}, None  # type: ignore[var-annotated]

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        self.file = self.file or open(os.devnull)  # noqa: SIM115
        if index not in self.cache:
            self.cache[index] = self.samples[index].clone()
        return self.cache[index]

    def __del__(self) -> None:
        if self.file is not None:
            self.file.close()


def test_what_reading_itself_changes_is_no_change_of_the_data() -> None:
    data = Caching()
    parts = [Subset(data, range(40)), Subset(data, range(40, 60))]
    mine, other = (resident(DataLoader(part, 4)) for part in parts)
    for _ in range(2):
        assert torch.cat(list(mine)).tolist() == list(range(1, 41))
        # Somebody looks at it in the middle of it all.
        assert data[0] == 1
        read = data.read
        assert torch.cat(list(other)).tolist() == list(range(41, 61))
        assert data.read == read + 2  # Only the first and the last.


# -- data that somebody changes


class Curriculum(Dataset[Any]):
    level: Any = 0.0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return torch.full((8,), self.now()), torch.tensor(index % 2)

    def now(self) -> float:
        return float(self.level)


class Made(Curriculum):
    """Reads its level from something that can be changed in place."""

    def __init__(self, level: Any, read: Callable[[Any], Any] = float) -> None:
        self.level, self.read = level, read

    def now(self) -> float:
        return float(self.read(self.level))


class Global(Curriculum):
    def now(self) -> float:
        return LEVEL


class WithTrainer(Curriculum):
    """Looks at the Trainer for the epoch."""

    trainer: Any = None

    def now(self) -> float:
        return 0.0 if self.trainer is None else float(self.trainer.current_epoch)


def set_level(data: Any, level: float) -> None:
    data.level = level


def set_global(data: Any, level: float) -> None:
    global LEVEL
    LEVEL = level


def set_of_the_class(data: Any, level: float) -> None:
    type(data).level = level


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any, float], Any]]] = {
    "attribute": (Curriculum, set_level),
    "tensor in place": (lambda: Made(torch.zeros(1)), lambda data, level: data.level.fill_(level)),
    "list": (lambda: Made([0.0], itemgetter(0)), lambda data, level: data.level.__setitem__(0, level)),
    "array": (lambda: Made(np.zeros(100), np.mean), lambda data, level: data.level.fill(level)),
    "shared memory": (
        lambda: Made(multiprocessing.Value("d", 0.0), attrgetter("value")),
        lambda data, level: setattr(data.level, "value", level),
    ),
    "global": (Global, set_global),
    "class": (type("OfItsOwn", (Curriculum,), {}), set_of_the_class),
}


class Changing(L.Callback):
    """Changes the dataset at the beginning of each epoch, and notes what training sees."""

    def __init__(self, change: Callable[[Any, float], None], data: Any = None) -> None:
        self.change, self.data = change, data
        self.seen: list[float] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        data = trainer.train_dataloader.dataset if self.data is None else self.data
        self.change(data, float(trainer.current_epoch))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += batch[0][:, 0].unique().tolist()


@pytest.fixture
def _level() -> Iterator[None]:
    yield
    set_global(None, 0.0)


def seen(data: Any, callback: Changing, **arguments: Any) -> list[float]:
    quiet(resident=True, callbacks=[callback], **{"max_epochs": 3, **arguments}).fit(
        Classifier(), DataLoader(data, 12, shuffle=True)
    )
    return callback.seen


@pytest.mark.usefixtures("_level")
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("nested", [False, True])
def test_a_change_between_epochs_is_seen_from_the_next_batch_on(kind: str, nested: bool) -> None:
    make, change = CHANGES[kind]
    data = make()
    change(data, 0.0)
    with warned(UserWarning, fix="resident="):
        assert seen(Subset(data, range(12)) if nested else data, Changing(change, data)) == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:.*changes between epochs")
class Allocating(Changing):
    """Takes shared memory beside that of the dataset, in the middle of an epoch."""

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.others = [*getattr(self, "others", []), multiprocessing.Value("d", 1.0)]


def test_other_values_in_shared_memory_are_not_the_datasets() -> None:
    make, change = CHANGES["shared memory"]
    assert seen(make(), Allocating(change)) == seen(make(), Changing(change))


def test_a_change_by_way_of_the_loader_is_one_of_the_users_dataset() -> None:
    data = Curriculum()
    assert seen(data, Changing(set_level)) == [0, 1, 2]
    assert data.level == 2


@pytest.mark.filterwarnings("ignore:.*changes between epochs")
def test_a_dataset_that_looks_at_the_trainer_is_followed() -> None:
    data = WithTrainer()

    def give(_: Any, epoch: float) -> None:
        data.trainer = trainer

    callback = Changing(give, data)
    trainer = quiet(resident=True, max_epochs=3, callbacks=[callback])
    trainer.fit(Classifier(), DataLoader(data, 12))
    assert callback.seen == [0, 1, 2]


def test_a_change_in_the_middle_of_an_epoch_is_an_error() -> None:
    class InTheMiddle(Changing):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            pass

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            self.change(self.data, batch_idx)

    data = Curriculum()
    trainer = quiet(resident=True, callbacks=[InTheMiddle(set_level, data)])
    with refused(RuntimeError, says="(level)"):
        trainer.fit(Classifier(), DataLoader(data, 3))


def test_one_change_is_read_without_a_warning_and_none_not_at_all() -> None:
    data = Caching()
    mine = resident(DataLoader(data, 20))
    read = data.read
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.cat(list(mine)).sum() == 1830
        assert data.read == read + 2  # Only the first and the last.
        data.samples, data.cache = data.samples * 2, {}
        assert [torch.cat(list(mine)).sum().item() for _ in range(3)] == [3660] * 3


@pytest.mark.filterwarnings("ignore:.*changes between epochs")
def test_samples_of_other_sizes_are_held_where_they_can_be() -> None:
    class Growing(Curriculum):
        def __getitem__(self, index: int) -> Any:
            return torch.ones(int(self.level) + 1)

    data = Growing()
    mine = resident(DataLoader(data, 12))
    for level in range(3):
        data.level = level
        assert [batch.shape for batch in mine] == [(12, level + 1)]


def test_preloaded_samples_stay_and_say_so() -> None:
    data = Curriculum()
    mine = resident(DataLoader(preload(data), 12))
    data.level = 1.0
    with warned(UserWarning, fix="preload()"):
        assert [batch[0].max().item() for batch in mine] == [0.0]


def test_names_of_the_users_dataset_are_its_own() -> None:
    class Digits(Curriculum):
        def __init__(self) -> None:
            super().__init__()
            self.data = torch.zeros(12)

        def __getitem__(self, index: int) -> Any:
            return self.data[index] + self.level

    digits = Digits()
    mine = resident(DataLoader(Subset(digits, range(6)), 6))
    held: Any = mine.dataset
    assert held.dataset is digits
    for level in range(3):
        # As a callback does by trainer.train_dataloader.dataset.dataset.
        held.dataset.level = level
        held.dataset.data = torch.full((12,), 10.0 * level)
        assert [batch.tolist() for batch in mine] == [[11.0 * level] * 6]
    held = resident(DataLoader(digits, 6)).dataset
    held.data = torch.ones(12)
    assert digits.data.sum() == 12
