"""Prediction writers get each prediction with the samples it is of, when they asked for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

import hasten as L
from hasten.callbacks import BasePredictionWriter, LambdaCallback
from tests.models import Classifier, dataset, quiet
from tests.refusals import refused, warned


class Writer(BasePredictionWriter):
    def __init__(self, interval: str = "batch") -> None:
        super().__init__(interval)
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, *indices: int
    ) -> None:
        assert pl_module is trainer.lightning_module
        self.batches.append((prediction, batch_indices, batch, *indices))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.append((predictions, batch_indices))


def predicted(interval: str, loaders: Any, **options: Any) -> tuple[Writer, Any, L.LightningModule]:
    L.seed_everything(0, verbose=False)
    writer, model = Writer(interval), Classifier()
    result = quiet(callbacks=[writer]).predict(model, loaders, **options)
    return writer, result, model


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_batch_comes_with_its_samples(workers: int, shuffle: bool) -> None:
    data = dataset(10)
    writer, result, model = predicted(
        "batch", DataLoader(data, 4, shuffle=shuffle, num_workers=workers), return_predictions=False
    )
    assert result is None
    assert writer.epochs == []
    assert [len(indices) for _, indices, *_ in writer.batches] == [4, 4, 2]
    seen = [index for _, indices, *_ in writer.batches for index in indices]
    assert sorted(seen) == list(range(10))
    assert (seen == list(range(10))) == (not shuffle)
    for position, (prediction, indices, batch, batch_idx, dataloader_idx) in enumerate(writer.batches):
        x = data.tensors[0][indices]
        assert torch.equal(batch[0], x)
        with torch.no_grad():
            assert torch.allclose(prediction, model(x))
        assert (batch_idx, dataloader_idx) == (position, 0)


@pytest.mark.parametrize("returns", [None, False])
@pytest.mark.parametrize("interval", ["epoch", "batch_and_epoch"])
def test_at_the_end_all_of_them_come(interval: str, returns: bool | None) -> None:
    writer, result, _ = predicted(interval, DataLoader(dataset(6), 4), return_predictions=returns)
    (predictions, indices), *more = writer.epochs
    assert not more
    assert indices == [[[0, 1, 2, 3], [4, 5]]]
    assert [len(each) for each in predictions] == [4, 2]
    assert len(writer.batches) == (2 if interval == "batch_and_epoch" else 0)
    if returns is False:
        assert result is None
    else:
        assert all(torch.equal(a, b) for a, b in zip(result, predictions, strict=True))


def test_several_loaders_are_told_apart() -> None:
    writer, _, _ = predicted("batch_and_epoch", [DataLoader(dataset(3), 2), DataLoader(dataset(2), 2)])
    assert [(indices, *where) for _, indices, _, *where in writer.batches] == [
        ([0, 1], 0, 0),
        ([2], 1, 0),
        ([0, 1], 0, 1),
    ]
    ((predictions, indices),) = writer.epochs
    assert indices == [[[0, 1], [2]], [[0, 1]]]
    assert [[len(each) for each in loader] for loader in predictions] == [[2, 1], [2]]


def test_a_writer_may_have_hooks_of_its_own() -> None:
    class Own(BasePredictionWriter):
        def on_predict_batch_end(self, *_: Any) -> None:  # type: ignore[override]
            seen.append("batch")

        def on_predict_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            seen.append(len(trainer.predict_loop.predictions))

    seen: list[Any] = []
    quiet(callbacks=[Own("batch_and_epoch")]).predict(Classifier(), DataLoader(dataset(4), 2))
    assert seen == ["batch", "batch", 2]


def test_a_writer_that_wants_batches_alone_leaves_nothing_in_memory() -> None:
    kept: list[Any] = []

    def look(trainer: L.Trainer, module: L.LightningModule) -> None:
        kept.append((trainer.predict_loop.predictions, trainer.predict_loop.epoch_batch_indices))

    trainer = quiet(callbacks=[Writer("batch"), LambdaCallback(on_predict_end=look)])
    trainer.predict(Classifier(), DataLoader(dataset(4), 2), return_predictions=False)
    assert kept == [([], [[]])]
    trainer = quiet(callbacks=[Writer("epoch")])
    trainer.predict(Classifier(), DataLoader(dataset(4), 2), return_predictions=False)
    assert trainer.predict_loop.predictions == []


def test_other_samplers_and_limits() -> None:
    sampler = WeightedRandomSampler([1.0] * 5, 7, generator=torch.Generator().manual_seed(0))
    expected = list(WeightedRandomSampler([1.0] * 5, 7, generator=torch.Generator().manual_seed(0)))
    writer, _, _ = predicted("batch", DataLoader(dataset(5), 3, sampler=sampler))
    assert [index for _, indices, *_ in writer.batches for index in indices] == expected

    class Single(Classifier):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0][None])

    one = Writer()
    trainer = quiet(callbacks=[one], limit_predict_batches=2)
    trainer.predict(Single(), DataLoader(dataset(5), batch_size=None))
    assert [indices for _, indices, *_ in one.batches] == [[0], [1]]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from dataset(4)


@pytest.mark.parametrize("workers", [0, 1])
def test_where_samples_have_no_index_it_says_so(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten._lib.rank_zero._warned", {})
    with warned(UserWarning, says="Writer: "):
        writer, _, _ = predicted("batch_and_epoch", DataLoader(Stream(), 2, num_workers=workers))
    assert [indices for _, indices, *_ in writer.batches] == [[], []]
    assert writer.epochs[0][1] == [[[], []]]
    batches = list(DataLoader(dataset(4), 2))
    writer, _, _ = predicted("batch", batches)
    assert [indices for _, indices, *_ in writer.batches] == [[], []]


def test_intervals_and_missing_methods_are_refused() -> None:
    class Half(BasePredictionWriter):
        def write_on_batch_end(self, *args: Any) -> None:
            raise AssertionError("prediction began")

    data = DataLoader(dataset(4), 2)
    for interval in ("epoch", "batch_and_epoch"):
        message = rf"Half\(write_interval='{interval}'\) calls write_on_epoch_end, which it does not"
        with pytest.raises(ValueError, match=message):
            quiet(callbacks=[Half(interval)]).predict(Classifier(), data)
    with refused(ValueError, "write_interval", fix="write_on_batch_end"):
        quiet(callbacks=[BasePredictionWriter()]).predict(Classifier(), data)
    quiet(callbacks=[Half("epoch")]).validate(Classifier(), data, verbose=False)
    patched = BasePredictionWriter("epoch")
    called: list[Any] = []
    patched.write_on_epoch_end = lambda *args: called.append(args)  # type: ignore[method-assign]
    quiet(callbacks=[patched]).predict(Classifier(), data)
    assert len(called) == 1
    for name in ("write_on_batch_end", "write_on_epoch_end"):
        with refused(NotImplementedError, says=name):
            getattr(BasePredictionWriter(), name)(*[None] * (7 if "batch_end" in name else 4))
