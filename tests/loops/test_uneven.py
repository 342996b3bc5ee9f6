"""Training where the processes have different numbers of batches."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hasten as L
from hasten.callbacks import ModelCheckpoint, WeightAveraging
from hasten.strategies import DDPStrategy
from tests.models import quiet

COUNTS = (5, 8)


def batches_of(rank: int, count: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [[torch.randn(4, 8, generator=generator), torch.randint(2, (4,), generator=generator)] for _ in range(count)]


class Stream(IterableDataset[Any]):
    """Whose length nobody knows."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def data(known: bool, counts: tuple[int, int] = COUNTS) -> DataLoader[Any]:
    rank = int(os.environ["LOCAL_RANK"])
    own = batches_of(rank, counts[rank])
    if not known:
        return DataLoader(Stream(own), batch_size=None)
    x, y = (torch.cat([batch[i] for batch in own]) for i in (0, 1))
    return DataLoader(TensorDataset(x, y), batch_size=4)


class Model(L.LightningModule):
    """Counts its batches; ``weighs`` its losses."""

    def __init__(self, *, weighs: bool = False, norm: bool = False, adam: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(*([nn.BatchNorm1d(8)] if norm else []), nn.Linear(8, 2))
        self.weighs, self.adam = weighs, adam
        self.count = self.ended = 0
        self.metric = torchmetrics.MeanMetric()
        self.logged: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        loss = nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("rank", 1.0 + self.global_rank, sync_dist=True, on_step=True, on_epoch=True)
        self.log("most", 1.0 + self.global_rank, sync_dist=True, on_step=True, on_epoch=False, reduce_fx="max")
        self.metric.update(float(batch_idx))
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return {"loss": loss, "loss_weight": 2.0 + self.global_rank} if self.weighs else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert batch is not None
        self.ended += 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("seen", batch[0].mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.adam:
            return torch.optim.Adam(self.parameters(), lr=0.05)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"},
        }


def train(model: Model, loader: Any, **arguments: Any) -> L.Trainer:
    """Train; check that both processes end alike."""
    settings = {"strategy": "ddp", "uneven": "join", "use_distributed_sampler": False, **arguments}
    trainer = quiet(devices=2, num_sanity_val_steps=0, **settings)
    trainer.fit(model, loader)
    assert_equal_on_all(trainer, *model.parameters(), torch.tensor(trainer.global_step))
    return trainer


def assert_equal_on_all(trainer: L.Trainer, *tensors: Tensor) -> None:
    for each in tensors:
        first, second = trainer.strategy.all_gather(each.detach())
        assert torch.equal(first, second)


def alone(*, epochs: int, accumulate: int = 1, clip: float = 0.0, weighs: bool = False, adam: bool = False) -> Model:
    """Train in one process, with the gradients of both added up and divided by two."""
    model = Model(adam=adam)
    chosen: Any = model.configure_optimizers()
    optimizer = chosen if adam else chosen["optimizer"]
    parts = [batches_of(rank, count) for rank, count in enumerate(COUNTS)]
    for _ in range(epochs):
        for start in range(0, max(COUNTS), accumulate):
            optimizer.zero_grad()
            window = range(start, min(start + accumulate, max(COUNTS)))
            weights = 0.0
            for rank, own in enumerate(parts):
                for x, y in own[start : window.stop]:
                    loss = nn.functional.cross_entropy(model.layer(x), y)
                    weight = 2.0 + rank
                    weights += weight
                    (loss * weight if weighs else loss / 2 / len(window)).backward()
            for parameter in model.layer.parameters():
                assert parameter.grad is not None
                if weighs:
                    parameter.grad /= weights
            if clip:
                nn.utils.clip_grad_norm_(model.layer.parameters(), clip)
            optimizer.step()
            if not adam:
                chosen["lr_scheduler"]["scheduler"].step()
    return model


def assert_same(model: Model, other: Model) -> None:
    torch.testing.assert_close(model.layer.state_dict(), other.layer.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("known", [True, False])
def test_join_trains_on_every_batch_as_one_process_does(known: bool, tmp_path: Path) -> None:
    for options in ({}, {"accumulate": 3}, {"clip": 0.1}, {"weighs": True, "accumulate": 3}, {"adam": True}):
        arguments: dict[str, Any] = {
            "accumulate_grad_batches": options.get("accumulate", 1),
            "gradient_clip_val": options.get("clip", 0.0),
        }
        model = Model(weighs="weighs" in options, adam="adam" in options)
        trainer = train(model, data(known), max_epochs=2, log_every_n_steps=1, **arguments)
        assert model.count == model.ended == 2 * COUNTS[trainer.global_rank]
        assert_same(model, alone(epochs=2, **options))  # type: ignore[arg-type]
        # The last step is the second process's alone; the epoch's mean is that of all samples.
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        assert metrics["rank_step"] == metrics["most"] == 2.0
        assert metrics["rank_epoch"] == pytest.approx((5 * 1 + 8 * 2) / 13)
        assert metrics["metric"] == pytest.approx((sum(range(5)) + sum(range(8))) / 13)

    # Optimizer states divided over the processes; averages of the weights; batch norm whose first process has ended.
    model = Model(adam=True)
    train(model, data(known), max_epochs=2, strategy="ddp_sharded")
    assert_same(model, alone(epochs=2, adam=True))
    average = WeightAveraging()
    train(Model(norm=True), data(known), max_epochs=1, callbacks=[average])
    model = Model(norm=True)
    assert_equal_on_all(train(model, data(known), max_epochs=1), *model.buffers())
    assert model.layer[0].num_batches_tracked == 8  # type: ignore[union-attr]
    # Validated in the middle, and saved in a step that only the second process has a batch for.
    files = ModelCheckpoint(str(tmp_path), every_n_train_steps=7, save_top_k=-1)
    whole = Model()
    train(whole, data(known), max_epochs=2, callbacks=[files], enable_checkpointing=True)
    resumed = Model()
    path = sorted(str(file) for file in tmp_path.glob("*step=7*"))[0]
    trainer = quiet(devices=2, strategy="ddp", uneven="join", use_distributed_sampler=False, max_epochs=2)
    trainer.fit(resumed, data(known), ckpt_path=path)
    assert torch.equal(resumed.layer[0].weight, whole.layer[0].weight)  # type: ignore[arg-type]
    assert resumed.count == whole.count - min(7, COUNTS[trainer.global_rank])


@pytest.mark.world_size(2)
def test_join_equals_torchs_join() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    model = Model()
    trainer = train(model, data(True), max_epochs=1)
    plain = Model()
    chosen: Any = plain.configure_optimizers()
    ddp = DistributedDataParallel(plain.layer)
    with Join([ddp]):
        for x, y in batches_of(rank, COUNTS[rank]):
            chosen["optimizer"].zero_grad()
            nn.functional.cross_entropy(ddp(x), y).backward()
            chosen["optimizer"].step()
            chosen["lr_scheduler"]["scheduler"].step()
    assert_same(model, plain)
    assert trainer.global_step == 8


@pytest.mark.world_size(2)
def test_stop_and_error_name_ranks_and_counts() -> None:
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
        model = Model()
        train(model, data(known, (4, 4)), uneven="error", max_epochs=2)
        assert model.count == 8


def test_the_argument_is_one_of_three_words() -> None:
    with pytest.raises(ValueError, match=r"Trainer\(uneven='joined'\): use one of 'stop', 'join', 'error'"):
        L.Trainer(uneven="joined")  # type: ignore[arg-type]


class ByHand(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.world_size(2)
def test_what_cannot_join_is_named() -> None:
    refused: list[tuple[Model, dict[str, Any], str]] = [
        (Model(), {"strategy": "fsdp"}, "strategy='fsdp'"),
        (ByHand(), {}, "manual optimization"),
        (Model(), {"on_bad_loss": "stop"}, "on_bad_loss='stop'"),
        (Model(), {"micro_batch": 2}, "micro_batch"),
        (Model(), {"strategy": DDPStrategy(static_graph=True)}, "static_graph=True"),
    ]
    for model, arguments, named in refused:
        with pytest.raises(ValueError, match=rf"Trainer\(uneven='join'\): .*{named}"):
            train(model, data(True), **arguments)
        assert model.count == 0
