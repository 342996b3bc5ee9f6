"""Loaders that give fewer or more batches than their length says train like the plain loop that reads them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, get_worker_info

import hasten as L
from tests.models import Classifier, Numbered, dataset, loader, quiet, same_weights
from tests.refusals import refused, warned

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*more batches than its length", "ignore:.*ends after", "ignore:Length of IterableDataset"
)


class Batches:
    """Batches of a class with a length of its own; ``draws``: augments them with torch's generator."""

    def __init__(self, number: int, says: int, draws: bool = False, first: int = 0) -> None:
        self.number, self.says, self.draws, self.first = number, says, draws, first

    def __len__(self) -> int:
        return self.says

    def __iter__(self) -> Iterator[list[Tensor]]:
        for index in range(self.number):
            x, y = dataset(4, seed=self.first + index).tensors
            yield [x + torch.rand_like(x) if self.draws else x, y]


class Sharded(IterableDataset):  # type: ignore[type-arg]
    """Shares itself among workers, as torch's documentation does; its length is right."""

    def __init__(self, samples: int) -> None:
        self.data = Numbered(samples)

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (self.data[index] for index in range(first, len(self.data), step))


class SaysTwo(BatchSampler):
    def __len__(self) -> int:
        return 2


class Watched(Classifier):
    """Notes what the Trainer says of each batch, and which samples came."""

    def __init__(self, dropout: float = 0.5) -> None:
        torch.manual_seed(0)
        super().__init__(dropout=dropout)
        self.last: list[bool] = []
        self.seen: dict[str, Counter[int]] = {"train": Counter(), "val": Counter(), "predict": Counter()}

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch[:2])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.last.append(self.trainer.is_last_batch)
        self.seen["train"].update(batch[2].tolist() if len(batch) > 2 else [])
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["val"].update(batch[2].tolist() if len(batch) > 2 else [])

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["predict"].update(batch[2].tolist())


class OwnStep(Watched):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.stepped = getattr(self, "stepped", 0) + 1
        optimizer.step(closure=optimizer_closure)


def plain_loop(loader: Any, accumulate: int, epochs: int = 2, gamma: float = 0.5) -> Classifier:
    """Train as one would who counts the batches of an epoch first."""
    model = Watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    torch.manual_seed(1)
    for _ in range(epochs):
        state = torch.get_rng_state()
        count = sum(1 for _ in loader)
        torch.set_rng_state(state)
        for index, batch in enumerate(loader):
            window = min(accumulate, count - index // accumulate * accumulate)
            if index % accumulate == 0:
                optimizer.zero_grad()
            (model.loss(batch) / window).backward()
            if (index + 1) % accumulate == 0 or index + 1 == count:
                optimizer.step()
        scheduler.step()
    return model


def scheduled(kind: type[Watched]) -> type[Watched]:
    class Scheduled(kind):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    return Scheduled


def loader_of(kind: str) -> Any:
    if kind == "iterable with workers that drops":
        return DataLoader(Sharded(28), batch_size=4, num_workers=2, drop_last=True)
    if kind == "iterable with workers":
        return DataLoader(Sharded(26), batch_size=4, num_workers=2)
    if kind == "batch sampler":
        data = dataset(24)
        return DataLoader(data, batch_sampler=SaysTwo(SequentialSampler(data), 4, False))
    number, says, draws = {
        "fewer": (6, 7, False),
        "more": (6, 4, False),
        "fewer, draws": (6, 7, True),
        "more, draws": (6, 6, True),
    }[kind]
    return Batches(number, says, draws)


KINDS = ["fewer", "more", "fewer, draws", "more, draws", "batch sampler"]


@pytest.mark.parametrize(
    ("kind", "accumulate", "model_type"),
    [
        *[(kind, accumulate, Watched) for kind in KINDS for accumulate in (1, 4)],
        *[(kind, 4, OwnStep) for kind in KINDS],
        ("iterable with workers", 4, Watched),
        ("iterable with workers that drops", 4, Watched),
    ],
)
def test_weights_are_those_of_the_plain_loop(kind: str, accumulate: int, model_type: type[Watched]) -> None:
    expected = plain_loop(loader_of(kind), accumulate)
    model = scheduled(model_type)()
    validated: list[int] = []
    model.on_validation_end = lambda: validated.append(model.trainer.fit_loop.batch_idx)  # type: ignore[method-assign]
    torch.manual_seed(1)
    trainer = quiet(max_epochs=2, accumulate_grad_batches=accumulate, num_sanity_val_steps=0)
    trainer.fit(model, loader_of(kind), [list(b) for b in Batches(2, 2)])
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    per_epoch = sum(1 for _ in loader_of(kind))
    assert len(model.last) == 2 * per_epoch
    assert validated == [per_epoch - 1] * 2
    assert trainer.global_step == 2 * -(-per_epoch // accumulate)
    if model_type is OwnStep:
        assert model.stepped == trainer.global_step
    if not kind.startswith("fewer"):
        assert model.last == ([False] * (per_epoch - 1) + [True]) * 2


def test_manual_optimization_is_told_the_last_batch_of_a_loader_that_ends_early() -> None:
    class Manual(Watched):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            self.last.append(self.trainer.is_last_batch)
            self.manual_backward(self.loss(batch))

    model = Manual()
    quiet(max_epochs=2).fit(model, Batches(6, 7))
    assert model.last == ([False] * 5 + [True]) * 2


def test_the_last_window_of_a_loader_that_ends_early_is_clipped_and_its_hooks_are_called() -> None:
    called: list[str] = []

    class Hooks(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            called.append("step")

    model = Watched()
    quiet(accumulate_grad_batches=4, gradient_clip_val=1e-9, callbacks=[Hooks()]).fit(model, Batches(6, 7, draws=True))
    assert called == ["step", "step"]
    moved = max((a - b).abs().max() for a, b in zip(model.parameters(), Watched().parameters(), strict=True))
    assert moved < 1e-8


def test_an_optimizer_that_computes_its_loss_again_says_why_it_cannot() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure()
            closure()
            return super().step()

    class Model(Watched):
        def configure_optimizers(self) -> Any:
            return Twice(self.parameters(), lr=0.1)

    with refused(RuntimeError, fix="__len__"):
        quiet(accumulate_grad_batches=4).fit(Model(), Batches(2, 3, draws=True))


def test_evaluation_and_prediction_read_every_sample() -> None:
    model = Watched()
    loader = DataLoader(Sharded(26), batch_size=4, num_workers=2)
    trainer = quiet(num_sanity_val_steps=0)
    trainer.validate(model, loader, verbose=False)
    trainer.predict(model, loader, return_predictions=False)
    for stage in ("val", "predict"):
        assert model.seen[stage] == Counter(range(26))


@pytest.mark.parametrize(("limit", "expected"), [(5, 5), (9, 6), (0.5, 2), (None, 6)])
def test_limits_count_batches_that_come_and_shares_those_that_were_said(limit: Any, expected: int) -> None:
    model = Watched()
    quiet(limit_train_batches=limit).fit(model, Batches(6, 4))
    assert model.last == [False] * (expected - 1) + [True]


def test_validation_that_was_due_after_the_last_batch_does_not_run_again_at_the_early_end() -> None:
    at: list[int] = []
    steps: list[float] = []

    class Validated(Classifier):
        def on_validation_start(self) -> None:
            at.append(self.trainer.total_batch_idx)

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            steps.append(metric)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            monitored = {"scheduler": plateau, "interval": "step", "monitor": "train_loss"}
            return {"optimizer": optimizer, "lr_scheduler": monitored}

    quiet(val_check_interval=0.25, num_sanity_val_steps=0).fit(Validated(), Batches(4, 8), loader(4))
    assert at == [1, 3]
    assert len(steps) == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [1, 2])
def test_a_resumed_run_has_the_weights_of_the_uninterrupted_one(kind: str, steps: int, tmp_path: Path) -> None:
    def run(model: Watched, **arguments: Any) -> L.Trainer:
        torch.manual_seed(1)
        trainer = quiet(accumulate_grad_batches=4, **arguments)
        trainer.fit(model, loader_of(kind), ckpt_path=arguments and saved if saved.exists() else None)
        return trainer

    saved = tmp_path / "some.ckpt"
    whole, part, rest = Watched(), Watched(), Watched()
    run(whole, max_epochs=2)
    run(part, max_epochs=2, max_steps=steps).save_checkpoint(saved)
    run(rest, max_epochs=2)
    assert same_weights(whole, rest)


def test_windows_beyond_the_said_length_are_divided_alike_before_and_after_resuming(tmp_path: Path) -> None:
    class Saves(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / f"{trainer.total_batch_idx}.ckpt")

    def run(callbacks: list[Any], path: Path | None = None) -> Watched:
        model = Watched(dropout=0.0)
        trainer = quiet(accumulate_grad_batches=3, callbacks=callbacks)
        trainer.fit(model, Batches(9, 5), ckpt_path=path)
        return model

    whole = run([Saves()])
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == 9
    for path in paths:
        assert same_weights(whole, run([], path)), path.name


# -- several processes


class ByRank(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 2)
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def together(loader: Any, **arguments: Any) -> ByRank:
    """Train on two processes, and check that they end with the same weights."""
    model = ByRank()
    trainer = quiet(devices=2, strategy="ddp", max_epochs=2, **arguments)
    trainer.fit(model, loader)
    weights = trainer.strategy.all_gather(model.layer.weight.detach())
    assert torch.equal(weights[0], weights[1])
    return model


def joint_plain_loop(numbers: tuple[int, int], accumulate: int) -> ByRank:
    """Train on the batches of both ranks at once, as long as both have some."""
    model = ByRank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = min(numbers)
    for _ in range(2):
        for index, batches in enumerate(zip(Batches(count, 0), Batches(count, 0, first=100), strict=True)):
            window = min(accumulate, count - index // accumulate * accumulate)
            if index % accumulate == 0:
                optimizer.zero_grad()
            for batch in batches:
                (model.training_step(batch, index) / window / 2).backward()
            if (index + 1) % accumulate == 0 or index + 1 == count:
                optimizer.step()
    return model


class Touching(Batches):
    """Draws and leaves the batches as they are."""

    def __iter__(self) -> Iterator[list[Tensor]]:
        for batch in super().__iter__():
            torch.rand(1)
            yield batch


@pytest.mark.world_size(2)
@pytest.mark.filterwarnings("ignore")
def test_processes_whose_loaders_end_elsewhere_than_said_have_the_weights_of_the_joint_loop() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    for kind, numbers, says in (
        (Batches, (6, 6), (7, 7)),
        (Touching, (6, 5), (6, 6)),
        (Batches, (3, 9), (6, 6)),
    ):
        model = together(kind(numbers[rank], says[rank], first=100 * rank), accumulate_grad_batches=4)
        expected = joint_plain_loop(numbers, 4)
        torch.testing.assert_close(model.layer.weight, expected.layer.weight, rtol=1e-5, atol=1e-6)
        assert model.count == 2 * min(numbers)


@pytest.mark.world_size(2)
def test_processes_with_different_numbers_of_batches_end_together_and_the_rank_is_named() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    batches = list(Batches(6 - 2 * rank, 0, first=100 * rank))
    if rank == 0:
        with warned(UserWarning, says=("rank 0 has 6", "rank 1 has 4")):
            model = together(batches, accumulate_grad_batches=3)
    else:
        model = together(batches, accumulate_grad_batches=3)
    assert model.count == 8
    expected = joint_plain_loop((6, 4), 3)
    torch.testing.assert_close(model.layer.weight, expected.layer.weight, rtol=1e-5, atol=1e-6)


class TooLong(Numbered):
    def __len__(self) -> int:
        return 400


class StreamTooLong(Sharded):
    def __len__(self) -> int:
        return 400


def test_a_length_beyond_the_data_is_named() -> None:
    with warned(UserWarning, says=("ends after 10 batches", "100"), fix="__len__"):
        quiet().fit(Watched(), DataLoader(StreamTooLong(40), batch_size=4))
    with pytest.raises(IndexError) as caught:
        quiet().fit(Watched(), DataLoader(TooLong(), batch_size=4))
    assert "sample 40 of the 400 that its __len__() says" in "\n".join(caught.value.__notes__)
