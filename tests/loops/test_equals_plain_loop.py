"""The Trainer gives the weights that the hand-written loop gives, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hasten as L
from tests.models import Classifier, loader, quiet, same_weights


def train_by_hand(
    model: Classifier,
    batches: Any,
    *,
    epochs: int = 2,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    by_step: bool = False,
) -> Classifier:
    optimizer = (optimizer or sgd)(model.parameters())
    scheduler = scheduler(optimizer) if scheduler else None
    length = len(batches)
    for _ in range(epochs):
        for i, batch in enumerate(batches):
            tail = length % accumulate
            divisor = tail if tail and i >= length - tail else accumulate
            if i % accumulate == 0:
                optimizer.zero_grad()
            loss = model.loss(batch)
            (loss / divisor if divisor > 1 else loss).backward()
            if (i + 1) % accumulate == 0 or i + 1 == length:
                if clip_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
                if clip_value is not None:
                    nn.utils.clip_grad_value_(model.parameters(), clip_value)
                optimizer.step()
                if scheduler is not None and by_step:
                    scheduler.step()
        if scheduler is not None and not by_step:
            scheduler.step()
    return model


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Configured(Classifier):
    def __init__(self, optimizer: Any = sgd, scheduler: Any = None, by_step: bool = False) -> None:
        super().__init__()
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.interval = "step" if by_step else "epoch"

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        scheduler = self.make_scheduler(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


def compare(model: Classifier, batches: Any, trainer: L.Trainer, **by_hand: Any) -> None:
    twin = copy.deepcopy(model)
    torch.manual_seed(7)
    trainer.fit(model, batches)
    torch.manual_seed(7)
    train_by_hand(twin, batches, **by_hand)
    assert same_weights(model, twin)


@pytest.mark.parametrize("shuffle", [False, True])
def test_plain(shuffle: bool) -> None:
    compare(Classifier(dropout=0.3), loader(shuffle=shuffle), quiet(max_epochs=2))


VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize(
    ("samples", "accumulate", "clipping", "by_hand"),
    [
        (40, 2, {}, {}),
        (40, 3, {}, {}),
        (42, 4, {}, {}),
        (8, 5, {}, {}),
        (40, 1, {"gradient_clip_val": 0.05}, {"clip_norm": 0.05}),
        (40, 2, VALUE, {"clip_value": 0.01}),
    ],
)
def test_accumulation_with_and_without_a_tail_and_clipping(
    samples: int, accumulate: int, clipping: dict[str, Any], by_hand: dict[str, Any]
) -> None:
    trainer = quiet(max_epochs=2, accumulate_grad_batches=accumulate, **clipping)
    compare(Classifier(), loader(samples, drop_last=True), trainer, accumulate=accumulate, **by_hand)


STEP_LR = lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5)  # noqa: E731


@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": STEP_LR},
        {"scheduler": STEP_LR, "by_step": True},
        {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2)},
        {"optimizer": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True)},
        {"optimizer": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5)},
        {"optimizer": lambda p: torch.optim.Adagrad(p, lr=1e-2, foreach=True)},
    ],
    ids=["by-epoch", "by-step", "adamw", "adam-fused", "rmsprop", "adagrad-foreach"],
)
def test_schedulers_and_optimizers(options: dict[str, Any]) -> None:
    compare(Configured(**options), loader(), quiet(max_epochs=3), epochs=3, **options)


def test_a_batch_without_a_loss_has_nothing_to_clip() -> None:
    class SkipsTheFirst(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

    model = SkipsTheFirst()
    twin = copy.deepcopy(model)
    quiet(**VALUE).fit(model, loader())
    train_by_hand(twin, list(loader())[1:], epochs=1, clip_value=0.01)
    assert same_weights(model, twin)


def test_batches_that_are_none_count_in_an_accumulation_and_contribute_nothing() -> None:
    model = Classifier()
    twin = copy.deepcopy(model)
    optimizer: Any = twin.configure_optimizers()
    batches: list[Any] = list(loader(24))
    batches[0] = batches[3] = None
    trainer = quiet(accumulate_grad_batches=2)
    trainer.fit(model, batches)
    for index, batch in enumerate(batches):
        if index % 2 == 0:
            optimizer.zero_grad()
        if batch is not None:
            (twin.loss(batch) / 2).backward()
        if index % 2:
            optimizer.step()
    assert same_weights(model, twin)
    assert trainer.global_step == 3


def test_lbfgs_runs_its_closure() -> None:
    model = Configured(lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4))
    twin = copy.deepcopy(model)
    quiet(max_epochs=2).fit(model, loader())
    optimizer = torch.optim.LBFGS(twin.parameters(), lr=0.1, max_iter=4)
    for _ in range(2):
        for batch in loader():

            def closure(batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = twin.loss(batch)
                loss.backward()
                return loss

            optimizer.step(closure)
    assert same_weights(model, twin)


def test_validation_does_not_change_training() -> None:
    model = Classifier(dropout=0.3)
    twin = copy.deepcopy(model)
    torch.manual_seed(7)
    quiet(max_epochs=2, val_check_interval=0.5).fit(model, loader(shuffle=True), loader())
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    batches, validation = loader(shuffle=True), loader()
    for _ in range(2):
        for i, batch in enumerate(batches):
            optimizer.zero_grad()
            twin.loss(batch).backward()
            optimizer.step()
            if (i + 1) % 5 == 0:
                for _ in validation:
                    pass
    assert same_weights(model, twin)


class FrozenStatistics(nn.Module):
    """Keeps its normalization in eval mode, and counts how often it is switched."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.switched: list[bool] = []

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()
        self.switched.append(mode)
        return self

    def forward(self, x: Any) -> Any:
        return self.scale(self.norm(x))


class HasFrozenStatistics(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.kept = FrozenStatistics(), nn.Dropout(0.5).eval()

    def forward(self, x: Any) -> Any:
        return self.layers(self.kept(self.body(x)))


class FreezesInTheModule(HasFrozenStatistics):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.body[0].eval()
        return self


@pytest.mark.parametrize("make", [HasFrozenStatistics, FreezesInTheModule])
@pytest.mark.parametrize("validates", [False, True])
def test_the_train_method_of_a_module_is_called_as_by_hand(make: Any, validates: bool) -> None:
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    torch.manual_seed(7)
    quiet(max_epochs=2).fit(model, loader(), loader() if validates else None)
    torch.manual_seed(7)
    twin.train()
    twin.kept.eval()  # Switched off by the program, and left so.
    train_by_hand(twin, loader())
    assert same_weights(model, twin)
    assert model.state_dict().keys() == twin.state_dict().keys()
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in model.state_dict().items())
    assert model.training
    assert not model.kept.training


def test_the_train_method_is_called_when_training_begins_and_around_each_validation() -> None:
    model = HasFrozenStatistics()
    quiet(max_epochs=2, num_sanity_val_steps=0).fit(model, loader(), loader())
    assert model.body.switched == [True, False, True, False, True]


def test_losses_weighted_by_tokens_equal_the_full_batch() -> None:
    class Weighted(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": self.loss(batch), "loss_weight": len(batch[0])}

    full = next(iter(loader(12, 12)))
    parts = [tuple(t[:3] for t in full), tuple(t[3:4] for t in full), tuple(t[4:] for t in full)]
    model = Weighted()
    twin = copy.deepcopy(model)
    quiet(max_epochs=3, accumulate_grad_batches=3).fit(model, parts)
    train_by_hand(twin, [full], epochs=3)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


class Masked(Classifier):
    """The mean over the samples that count: NaN where none does, with a gradient that is NaN, too."""

    def __init__(self, kind: Any = torch.tensor) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, counts = batch
        losses = torch.nn.functional.cross_entropy(self(x), y, reduction="none") * counts
        return {"loss": losses.sum() / counts.sum(), "loss_weight": self.kind(float(counts.sum()))}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def masked(*counts: int) -> list[Any]:
    """Return batches of four samples, of which so many count."""
    return [
        (x, y, (torch.arange(4) < count).float()) for (x, y), count in zip(loader(4 * len(counts)), counts, strict=True)
    ]


@pytest.mark.parametrize("kind", [torch.tensor, float])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_without_weight_count_for_nothing(accumulate: int, kind: Any) -> None:
    model, twin, batches = Masked(kind), Masked(), masked(2, 4, 0, 0, 0, 3, 1, 0)
    trainer = quiet(accumulate_grad_batches=accumulate)
    trainer.fit(model, batches)
    optimizer = twin.configure_optimizers()
    for start in range(0, 8, accumulate):
        x, y, counts = (torch.cat(parts) for parts in zip(*batches[start : start + accumulate], strict=True))
        if counts.sum():
            losses = torch.nn.functional.cross_entropy(twin(x), y, reduction="none") * counts
            optimizer.zero_grad()
            (losses.sum() / counts.sum()).backward()
            optimizer.step()
    assert trainer.global_step == 8 // accumulate
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class MaskedByRank(Masked):
    """As functions of torch do, it gives the sum of nothing where nothing counts."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, counts = (part[self.global_rank :: 2] for part in batch)
        losses = torch.nn.functional.cross_entropy(self(x), y, reduction="none") * counts
        return {"loss": losses.sum() / counts.sum().clamp(min=1), "loss_weight": counts.sum()}


def test_a_window_without_weight_on_all_processes_changes_nothing() -> None:
    model, twin = MaskedByRank(), Masked()
    # One process alone counts in the first batch, none in the two that follow.
    batches = masked(1, 4, 0, 0, 3, 4)
    trainer = quiet(accumulate_grad_batches=2, devices=2, strategy="ddp_fork", use_distributed_sampler=False)
    trainer.fit(model, batches)
    quiet(accumulate_grad_batches=2).fit(twin, batches)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_tail_of_a_loader_without_length_is_normalised_by_what_was_accumulated() -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(list(loader(20)))

    batches = list(loader(20))
    model = Classifier()
    twin = copy.deepcopy(model)
    stream = torch.utils.data.DataLoader(Endless(), batch_size=None)
    quiet(max_epochs=2, accumulate_grad_batches=3).fit(model, stream)
    train_by_hand(twin, batches, accumulate=3)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)
