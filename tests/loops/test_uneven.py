"""Training where the processes have different numbers of batches."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hasten as L
from hasten.callbacks import ModelCheckpoint
from tests.models import quiet
from tests.refusals import refused

COUNTS = (5, 8)


def batches_of(rank: int, count: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [[torch.randn(4, 8, generator=generator), torch.randint(2, (4,), generator=generator)] for _ in range(count)]


class Stream(IterableDataset[Any]):
    """Whose length nobody knows."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(self.samples)


def data(known: bool, counts: tuple[int, int] = COUNTS) -> DataLoader[Any]:
    rank = int(os.environ["LOCAL_RANK"])
    own = batches_of(rank, counts[rank])
    x, y = (torch.cat([batch[i] for batch in own]) for i in (0, 1))
    return DataLoader(TensorDataset(x, y) if known else Stream(list(zip(x, y, strict=True))), batch_size=4)


class Model(L.LightningModule):
    """Counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 2)
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        self.log("rank", 1.0 + self.global_rank, sync_dist=True, on_step=True, on_epoch=True)
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"},
        }


def train(model: Model, loader: Any, ckpt_path: str | None = None, **arguments: Any) -> L.Trainer:
    """Train; check that both processes end alike."""
    settings = {"strategy": "ddp", "use_distributed_sampler": False, **arguments}
    trainer = quiet(devices=2, num_sanity_val_steps=0, **settings)
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    assert_equal_on_all(trainer, *model.parameters(), torch.tensor(trainer.global_step))
    return trainer


def assert_equal_on_all(trainer: L.Trainer, *tensors: Tensor) -> None:
    for each in tensors:
        first, second = trainer.strategy.all_gather(each.detach())
        assert torch.equal(first, second)


@pytest.mark.world_size(2)
def test_stop_and_error_name_ranks_and_counts(tmp_path: Path) -> None:
    for known in (True, False):
        at_least = "" if known else "at least "
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = Model()
            train(model, data(known), max_epochs=2, uneven="stop")
        assert model.count == 10
        text = f"rank 0 has 5 batches, rank 1 has {at_least}{8 if known else 6}"
        if known and os.environ["LOCAL_RANK"] == "0":
            assert len([one for one in caught if text in str(one.message)]) == 1
        model = Model()
        with pytest.raises((ValueError, RuntimeError), match=re.escape(text)):
            train(model, data(known), uneven="error")
        assert model.count == (0 if known else 4)
        # A run that resumes where an epoch has ended does not read the rest of it that a process has left.
        saves, model = ModelCheckpoint(tmp_path / str(known)), Model()
        divides: Any = {"use_distributed_sampler": not known}
        train(Model(), data(known), callbacks=saves, enable_checkpointing=True, **divides)
        train(model, data(known), saves.best_model_path, max_epochs=2, **divides)
        assert model.count == 10  # The checkpoint has the count of the first epoch.
        model = Model()
        train(model, data(known, (4, 4)), uneven="error", max_epochs=2)
        assert model.count == 8


@pytest.mark.parametrize(
    ("value", "argument"),
    [
        ("stp", "uneven"),
        (
            "join",
            "uneven",
        ),
    ],
)
def test_the_argument_is_one_of_two_words(value: Any, argument: str) -> None:
    with refused(ValueError, argument):
        L.Trainer(uneven=value)
