"""A step that is begun again finds batch and module as the first attempt did."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hasten as L
from tests.loops.test_micro_batches import assert_same, fresh
from tests.models import Attempts, Classifier, dataset, quiet, same_weights
from tests.refusals import refused


@dataclasses.dataclass(slots=True)
class Slots:
    x: Tensor
    y: Tensor | None


class Graph:
    """A batch of another class, as libraries for graphs have them."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.store = {"x": x, "y": y}

    def to(self, device: Any) -> Graph:
        return self


Pair = collections.namedtuple("Pair", "x rest")


class Step(Classifier):
    """Memory runs out in the attempts numbered in ``fails``, after the step's own code ran."""

    attempts = Attempts()
    numbers = Attempts()

    def __init__(self, take: Callable[[Any], tuple[Tensor, Tensor]], fails: tuple[int, ...]) -> None:
        super().__init__()
        self.take = [take]
        self.fails = fails

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(self.take[0](batch))
        self.attempts.append(len(self.attempts))
        if self.attempts[-1] in self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss


def pairs(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = zip(*samples, strict=True)
    return torch.stack(x), torch.stack(y)


def batches(make: Callable[[Tensor, Tensor], Any]) -> DataLoader[Any]:
    return DataLoader(dataset(40), 8, collate_fn=lambda samples: make(*pairs(samples)))


def both(take: Callable[..., Any], data: Any, fails: tuple[int, ...], kind: Any = None, **arguments: Any) -> list[Any]:
    """Train twice: without a speed-up, and with one and attempts that fail; ``data`` is called each time."""
    models = []
    common = {name: arguments.pop(name) for name in ("devices", "strategy", "max_epochs") if name in arguments}
    for lever, failing in (({}, ()), (arguments or {"micro_batch": "auto"}, fails)):
        L.seed_everything(0, verbose=False)
        models.append((kind or Step)(take, failing))
        quiet(**common, **lever).fit(models[-1], data())
    return models


def divided(batch: Any) -> tuple[Tensor, Tensor]:
    return batch[0].div_(2), batch[1]


def past_the_version(batch: Any) -> tuple[Tensor, Tensor]:
    batch[0].data.div_(2)
    batch[1].numpy()[:] ^= 1
    return batch


def reshaped(batch: Any) -> tuple[Tensor, Tensor]:
    x, y = batch
    x.unsqueeze_(1)
    return x.mul_(2)[:, 0], y


def popped(batch: Any) -> tuple[Tensor, Tensor]:
    y = batch.pop("y")
    batch["x"] = batch["x"] / 2
    batch["seen"] = True
    return batch["x"], y


def assigned(batch: Any) -> tuple[Tensor, Tensor]:
    batch[0] = batch[0] / 2
    return batch[0], batch.pop(1)


def of_a_record(batch: Any) -> tuple[Tensor, Tensor]:
    y, batch.y = batch.y, None
    batch.x = batch.x / 2
    return batch.x, y


def of_a_pair(batch: Any) -> tuple[Tensor, Tensor]:
    return batch.x.mul_(0.5), batch.rest.pop()


def of_a_graph(batch: Any) -> tuple[Tensor, Tensor]:
    batch.scaled = batch.store.pop("x").mul_(0.5)
    return batch.scaled, batch.store["y"]


def into_the_graph(batch: Any) -> tuple[Tensor, Tensor]:
    x, y = batch
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(x.square().sum(), x)
    return x + gradient.detach(), y


def tokenized(x: Tensor, y: Tensor) -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"x": x, "y": y})


CHANGES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "in-place": (lambda x, y: [x, y], divided),
    "shape": (lambda x, y: [x, y], reshaped),
    "list": (lambda x, y: [x, y], assigned),
    "dict": (lambda x, y: {"x": x, "y": y}, popped),
    "user-dict": (lambda x, y: collections.UserDict(x=x, y=y), popped),
    "slots": (Slots, of_a_record),
    "pair": (lambda x, y: Pair(x, [y]), of_a_pair),
    "graph": (lambda x, y: [x, y], into_the_graph),
    "past-its-version": (lambda x, y: [x, y], past_the_version),
    "tokenizer": (tokenized, popped),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_batch_that_the_step_changes(kind: str) -> None:
    make, take = CHANGES[kind]
    if kind == "tokenizer":
        pytest.importorskip("transformers")
    models = both(take, lambda: batches(make), (0, 4, 5))
    assert len(models[1].attempts) > len(models[0].attempts)
    assert_same(*models)


def test_a_field_changed_for_the_first_time_is_named() -> None:
    def now_and_then(batch: Any) -> tuple[Tensor, Tensor]:
        if len(model.attempts) == 3:
            batch["x"].mul_(2)
        return batch["x"], batch["y"]

    model = Step(now_and_then, (3,))
    with refused(RuntimeError, says="batch['x']"):
        quiet(micro_batch="auto").fit(model, batches(lambda x, y: {"x": x, "y": y}))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Sequential(nn.Linear(8, 8)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * (1 + 0.1 * self.calls)


@pytest.mark.parametrize("batch_class", [Graph, lambda x, y: {"x": x, "y": y}], ids=["own", "dict"])
def test_recomputing_finds_the_batch_as_it_came_whatever_it_is(batch_class: Any) -> None:
    class Deep(Step):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    take = of_a_graph if batch_class is Graph else popped
    assert same_weights(*both(take, lambda: batches(batch_class), (0, 3), Deep, memory="auto"))


def out_of_memory(attempts: list[Any], fails: tuple[int, ...]) -> None:
    attempts.append(None)
    if len(attempts) - 1 in fails:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_attributes_and_generators_of_the_module() -> None:
    class Keeps(Classifier):
        attempts = Attempts()

        def __init__(self, fails: tuple[int, ...]) -> None:
            super().__init__()
            self.fails = fails
            self.steps = 0
            self.last: Tensor | None = None
            self.generator = torch.Generator().manual_seed(3)
            self.python = random.Random(3)
            self.register_buffer("shift", None)
            self.register_buffer("mean", torch.zeros(8))
            self.numbers = torchmetrics.CatMetric()
            self.block = Block()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            self.steps += 1
            self.numbers.update(x.mean())
            self.mean.mul_(0.9).add_(x.detach().mean(0))
            self.shift = self.mean * 2 if self.shift is None else self.shift + self.mean
            noise = torch.rand(1, generator=self.generator) + self.python.random()
            weight = self.steps + (0 if self.last is None else self.last) + self.numbers.compute().sum()
            self.last = x.mean()
            loss = self.loss((self.block(x) + self.mean + self.shift, y))
            out_of_memory(self.attempts, self.fails)
            return loss * (weight * 0.01 + noise)

    data = DataLoader(dataset(40), 8)
    plain = fresh(Keeps, fails=())
    quiet().fit(plain, data)
    # Recomputing leaves the samples together: every number must be that of the run without a failure.
    for fails in ((3,), (0, 4)):
        found = fresh(Keeps, fails=fails)
        found.stack = nn.ModuleList([nn.Sequential(nn.Linear(1, 1)), nn.Sequential(nn.Linear(1, 1))])
        quiet(memory="auto").fit(found, data)
        for name, value in plain.state_dict().items():
            assert torch.equal(value, found.state_dict()[name]), (name, fails)
        assert (found.steps, found.numbers.compute().numel()) == (5, 5)
        assert len(found.attempts) == 5 + len(fails)


class Tracker:
    def __init__(self) -> None:
        self.total = 0.0


class Mutates(Classifier):
    """Changes what its attributes hold."""

    attempts = Attempts()

    def __init__(self, change: Callable[[Mutates, Tensor], Any], fails: tuple[int, ...]) -> None:
        super().__init__()
        self.change = [change]
        self.fails = fails
        self.bank: list[Any] = []
        self.many = [0] * 2000
        self.recent: collections.deque[Tensor] = collections.deque(maxlen=2)
        self.seen: set[int] = set()
        self.by_name: collections.Counter[str] = collections.Counter()
        self.tracker = Tracker()
        self.mean = torch.zeros(8)
        self.teacher = nn.Linear(8, 2).requires_grad_(False)
        self.inner = Inner()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.change[0](self, batch[0])
        out_of_memory(self.attempts, self.fails)
        return loss


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []


MUTATIONS: dict[str, tuple[Callable[[Any, Tensor], Any], str, str]] = {
    "list": (lambda self, x: self.bank.append(x.mean()), "Mutates.bank", "Change it in on_train_batch_end"),
    "long list": (lambda self, x: self.many.append(1), "Mutates.many", "on_train_batch_end"),
    "deque": (lambda self, x: self.recent.append(x.mean()), "Mutates.recent", "on_train_batch_end"),
    "set": (lambda self, x: self.seen.add(len(self.seen)), "Mutates.seen", "on_train_batch_end"),
    "counter": (lambda self, x: self.by_name.update(["steps"]), "Mutates.by_name", "on_train_batch_end"),
    "object": (lambda self, x: setattr(self.tracker, "total", x.mean()), "Mutates.tracker", "on_train_batch_end"),
    "a part of the module": (lambda self, x: self.inner.calls.append(1), "Mutates.inner.calls", "on_train_batch_end"),
    "tensor": (lambda self, x: self.mean.mul_(0.9).add_(x.mean(0)), "Mutates.mean", "use register_buffer"),
    "parameter": (lambda self, x: self.teacher.weight.mul_(0.9), "Mutates.teacher.weight", "changed in place"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_a_step_changes_inside_of_an_attribute_is_refused_by_its_name(name: str) -> None:
    change, where, instead = MUTATIONS[name]
    data = DataLoader(dataset(40), 8)
    # Only an attempt that fails is refused.
    whole = Mutates(change, ())
    quiet(micro_batch="auto").fit(whole, data)
    assert len(whole.attempts) == 5
    for fails in ((0,), (3,)):
        model = Mutates(change, fails)
        with refused(RuntimeError, says=where) as error:
            quiet(micro_batch="auto").fit(model, data)
        assert instead in str(error.value)
        assert "give micro_batch a number that fits" in str(error.value)


class OnOneRank(Step):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        # One process alone runs out of memory; the other one begins its step again, too.
        if self.global_rank == 0:
            self.fails = ()
        return super().training_step(batch, batch_idx)


@pytest.mark.world_size(2)
def test_both_processes_find_their_batches_as_they_came() -> None:
    torch.set_num_threads(1)
    data = lambda: batches(lambda x, y: {"x": x, "y": y})  # noqa: E731
    assert_same(*both(popped, data, (0, 3), OnOneRank, devices=2, strategy="ddp"))


def test_batches_of_the_user_are_changed_once_an_epoch() -> None:
    """A list of batches is read again in the second epoch, as the step left it."""

    def data() -> Any:
        return [list(dataset(16)[start : start + 8]) for start in (0, 8)]

    assert_same(*both(divided, data, (0, 3), max_epochs=2))
