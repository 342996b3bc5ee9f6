"""Batches on their way to a step: transfer hooks, nested batches, several loaders, iterable datasets."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import hasten as L
from tests.models import Classifier, loader, quiet
from tests.module.test_datamodule import Any_, SizedStream, Stream
from tests.refusals import refused


class ModelMoves(Any_):
    def __init__(self, calls: list[Any]) -> None:
        super().__init__()
        self.calls = calls

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(("module before", dataloader_idx))
        return [batch[0] + 1, *batch[1:]]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.calls.append(("module move", str(device), dataloader_idx))
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append(("module after", dataloader_idx))
        return [batch[0] * 2, *batch[1:]]

    def step(self, batch: Any) -> None:
        self.calls.append(batch[0].flatten()[0].item())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.step(batch)
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.step(batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:  # type: ignore[override]
        self.step(batch)


BATCH = [torch.full((2, 8), 3.0), torch.tensor([0, 1])]
OF_MODULE = [("module before", 0), ("module move", "cpu", 0), ("module after", 0), 8.0]


@pytest.mark.filterwarnings("ignore:.*returned None")
def test_transfer_hooks_of_the_module_in_every_stage() -> None:
    calls: list[Any] = []
    model = ModelMoves(calls)
    quiet(num_sanity_val_steps=0).fit(model, [BATCH], [BATCH])
    assert calls == OF_MODULE * 2
    calls.clear()
    quiet().validate(model, [DataLoader([BATCH], batch_size=None)] * 2, verbose=False)  # type: ignore[arg-type]
    assert calls == [*OF_MODULE, ("module before", 1), ("module move", "cpu", 1), ("module after", 1), 8.0]
    calls.clear()
    quiet().predict(model, [DataLoader([BATCH], batch_size=None)] * 2)  # type: ignore[arg-type]
    assert calls[4:6] == [("module before", 1), ("module move", "cpu", 1)]


def test_transfer_hooks_of_the_datamodule_come_first() -> None:
    calls: list[Any] = []

    class DataMoves(L.LightningDataModule):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            calls.append(("data before", dataloader_idx))
            return batch

        def train_dataloader(self) -> Any:
            return [BATCH]

    quiet().fit(ModelMoves(calls), datamodule=DataMoves())
    assert calls == [("data before", 0), ("module move", "cpu", 0), ("module after", 0), 6.0]

    class After(L.LightningDataModule):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] * 0, batch[1]]

        def train_dataloader(self) -> Any:
            return [BATCH]

    seen: list[float] = []

    class Sums(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch[0].sum().item())
            return self.loss(batch)

    quiet().fit(Sums(), datamodule=After())
    assert seen == [0.0]


class Named(NamedTuple):
    a: Tensor
    b: Any


@dataclass
class Sample:
    x: Tensor
    label: int = 3


@dataclass(frozen=True)
class Frozen:
    x: Tensor


class Graph:
    """Moves itself, as graphs of other libraries do."""

    def __init__(self, x: Tensor, moved_to: Any = None) -> None:
        self.x, self.moved_to = x, moved_to

    def to(self, device: Any, **options: Any) -> Graph:
        return Graph(self.x.to(device), torch.device(device))


class InPlace(Graph):
    def to(self, device: Any, **options: Any) -> None:  # type: ignore[override]
        self.x, self.moved_to = self.x.to(device), torch.device(device)


def nested(x: Tensor) -> dict[str, Any]:
    return {
        "tensor": x,
        "named": Named(x, {"deep": [x, (x, "text")]}),
        "sample": Sample(x),
        "frozen": Frozen(x),
        "user": UserDict({"z": x}),
        "graph": Graph(x),
        "in place": InPlace(x),
        "ordered": OrderedDict(a=x),
        "default": defaultdict(list, {"a": [x]}),
        "none": None,
        "number": 3,
    }


def test_nested_batches_reach_the_step_as_they_are() -> None:
    seen: list[Any] = []

    class Keeps(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch)
            return self.layers(batch["named"].b["deep"][0]).sum()

    batch = nested(torch.ones(2, 8))
    quiet().fit(Keeps(), DataLoader([batch], batch_size=None))  # type: ignore[arg-type]
    assert [type(value) for value in seen[0].values()] == [type(value) for value in batch.values()]


def test_nested_batches_are_moved() -> None:
    meta = torch.device("meta")
    moved = L.LightningModule().transfer_batch_to_device(nested(torch.ones(2, 8)), meta, 0)
    tensors = [
        moved["tensor"],
        moved["named"].a,
        moved["named"].b["deep"][0],
        moved["named"].b["deep"][1][0],
        moved["sample"].x,
        moved["frozen"].x,
        moved["user"]["z"],
        moved["graph"].x,
        moved["in place"].x,
        moved["ordered"]["a"],
        moved["default"]["a"][0],
    ]
    assert all(tensor.device == meta for tensor in tensors)
    assert moved["graph"].moved_to == moved["in place"].moved_to == meta
    assert moved["named"].b["deep"][1][1] == "text"
    assert (moved["sample"].label, moved["none"], moved["number"]) == (3, None, 3)
    assert [type(value) for value in moved.values()] == [type(v) for v in nested(torch.ones(1)).values()]
    assert moved["default"]["missing"] == []


def test_encodings_of_a_tokenizer() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": torch.ones(2, 3), "names": ["a", "b"]})
    moved = L.LightningDataModule().transfer_batch_to_device(encoding, torch.device("meta"), 0)
    assert isinstance(moved, transformers.BatchEncoding)
    assert moved["input_ids"].device.type == "meta"
    assert moved["names"] == ["a", "b"]


# -- several loaders


class Suffixed(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((dataloader_idx, batch_idx))
        self.log("v", float(dataloader_idx), on_step=True, on_epoch=True)
        self.log("hidden", 5.0, logger=False)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(("end", dataloader_idx))

    def on_validation_epoch_end(self) -> None:
        self.log("whole", 7.0)


@pytest.mark.parametrize("form", [list, tuple, lambda loaders: {"a": loaders[0], "b": loaders[1]}])
def test_values_of_several_loaders_have_suffixes(form: Any) -> None:
    model, trainer = Suffixed(), quiet()
    results = trainer.validate(model, form([loader(4), loader(8)]), verbose=False)
    assert results == [{"v_epoch/dataloader_idx_0": 0.0, "whole": 7.0}, {"v_epoch/dataloader_idx_1": 1.0, "whole": 7.0}]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert metrics == {
        "v/dataloader_idx_0": 0.0,
        "v/dataloader_idx_1": 1.0,
        "v_epoch/dataloader_idx_0": 0.0,
        "v_epoch/dataloader_idx_1": 1.0,
        "hidden/dataloader_idx_0": 5.0,
        "hidden/dataloader_idx_1": 5.0,
        "whole": 7.0,
    }
    assert model.seen == [(0, 0), ("end", 0), (1, 0), ("end", 1), (1, 1), ("end", 1)]
    assert trainer.num_val_batches == [1, 2]


def test_one_loader_in_a_list_has_no_suffix() -> None:
    assert quiet().validate(Suffixed(), [loader(4)], verbose=False) == [{"v_epoch": 0.0, "whole": 7.0}]


def test_several_loaders_in_fit_and_their_limits() -> None:
    model, trainer = Suffixed(), quiet(limit_val_batches=1, max_epochs=2)
    trainer.fit(model, loader(4), [loader(8), loader(12)])
    assert trainer.num_val_batches == trainer.num_sanity_val_batches == [1, 1]
    assert model.seen == [(0, 0), ("end", 0), (1, 0), ("end", 1)] * 3
    assert "v_epoch/dataloader_idx_1" in trainer.callback_metrics
    trainer = quiet(limit_val_batches=0.5)
    trainer.validate(model, [loader(8), loader(16)], verbose=False)
    assert trainer.num_val_batches == [1, 2]


# -- iterable datasets


class Validated(L.Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_start(self, trainer: Any, *_: Any) -> None:
        self.steps.append(trainer.global_step)


ITERABLE: list[tuple[type[Stream], dict[str, Any], Any]] = [
    (Stream, {}, (float("inf"), [float("inf")], 10, [0, 5, 10])),
    (Stream, {"val_check_interval": 2}, (float("inf"), [float("inf")], 10, [0, 2, 4, 7, 9])),
    (Stream, {"limit_train_batches": 2}, (2, [float("inf")], 4, [0, 2, 4])),
    (Stream, {"limit_val_batches": 1}, (float("inf"), [1], 10, [0, 5, 10])),
    (
        Stream,
        {"val_check_interval": 3, "check_val_every_n_epoch": None},
        (float("inf"), [float("inf")], 10, [0, 3, 6, 9]),
    ),
    (
        Stream,
        {"limit_train_batches": 0.5},
        r"limit_train_batches\)` must be `1\.0` or an int, not 0\.5: a share needs a loader",
    ),
    (Stream, {"limit_val_batches": 0.5}, r"limit_val_batches\)`.*not 0\.5: .*Give a number of batches instead"),
    (
        Stream,
        {"val_check_interval": 0.5},
        r"must be `1\.0` or an int, not 0\.5: a share of an epoch needs.*val_check_interval=1000",
    ),
    (Stream, {"overfit_batches": 0.5}, r"Trainer\(overfit_batches\)` must be .*not 0\.5: a share"),
    (SizedStream, {}, (5, [3], 10, [0, 5, 10])),
    (SizedStream, {"limit_train_batches": 0.5}, (2, [3], 4, [0, 2, 4])),
    (SizedStream, {"val_check_interval": 0.5}, (5, [3], 10, [0, 2, 4, 7, 9])),
]


@pytest.mark.parametrize(("kind", "arguments", "expected"), ITERABLE)
def test_iterable_datasets(kind: type[Stream], arguments: dict[str, Any], expected: Any) -> None:
    seen = Validated()
    trainer = quiet(max_epochs=2, num_sanity_val_steps=1, callbacks=[seen], **arguments)
    loaders = DataLoader(kind(10), 2), DataLoader(kind(6), 2)
    if isinstance(expected, str):
        from hasten._lib.errors import MisconfigurationException

        with pytest.raises(MisconfigurationException, match=expected):
            trainer.fit(Classifier(), *loaders)
        return
    trainer.fit(Classifier(), *loaders)
    found = (trainer.num_training_batches, trainer.num_val_batches, trainer.global_step, seen.steps)
    assert found == expected


def test_the_loader_that_is_wrong_is_named_by_its_place() -> None:
    empty = DataLoader([], 2)  # type: ignore[arg-type]
    with refused(ValueError, says="dataloader[1]"):
        quiet().validate(Any_(), [loader(8), empty], verbose=False)
    with refused(ValueError, says="validate dataloader"):
        quiet().validate(Any_(), [empty], verbose=False)
    with refused(ValueError, "limit_val_batches", fix="limit_val_batches=0.25"):
        quiet(limit_val_batches=0.2).validate(Any_(), loader(16), verbose=False)
    model = Any_()
    model.allow_zero_length_dataloader_with_multiple_devices = True
    trainer = quiet(limit_val_batches=0.5)
    assert trainer.validate(model, [loader(8), empty], verbose=False) == [{"size/dataloader_idx_0": 4.0}, {}]
    assert trainer.num_val_batches == [1, 0]


def test_an_interval_longer_than_an_epoch_is_refused_where_that_is_known() -> None:
    message = r"`val_check_interval` \(4\) must .* batches \(3\)\. Use at most 3, or check_val_every_n_epoch=None"
    with pytest.raises(ValueError, match=message):
        quiet(val_check_interval=4).fit(Classifier(), loader(12), loader(4))
    for arguments, train, steps in (
        ({"val_check_interval": 3}, loader(12), [3, 6]),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None}, loader(12), [4]),
        ({"val_check_interval": 4}, DataLoader(Stream(12), 4), []),
    ):
        seen = Validated()
        trainer = quiet(max_epochs=2, num_sanity_val_steps=0, callbacks=[seen], **arguments)
        trainer.fit(Classifier(), train, loader(4))
        assert seen.steps == steps


def test_validation_by_time_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("hasten.loops.schedule.time.monotonic", lambda: now[0])

    class Slow(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            now[0] += 60.0

    seen = Validated()
    trainer = quiet(max_epochs=2, num_sanity_val_steps=0, callbacks=[seen], val_check_interval="3min")
    trainer.fit(Slow(), loader(16), loader(4))
    assert seen.steps == [3, 6]
