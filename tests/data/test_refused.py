"""What loaders, held data and workers cannot be: refused by name, with the reason and what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hasten as L
from hasten.data import CombinedLoader, auto_workers, preload
from hasten.data.loaders import prepare


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.rand(3))


class Drawing(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        return torch.rand(2)


DATA = TensorDataset(torch.zeros(4))
DROPPED: Any = DataLoader([1, 2], batch_size=4, drop_last=True)  # type: ignore[arg-type]
LOOP, EMPTY = "^the train dataloader ", "^the train dataloader has no batches: "
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: prepare(3), TypeError, LOOP + r"is 3, of type int, and cannot be iterated over. Give a DataLoader"),
    (lambda: prepare("data"), TypeError, LOOP + r"is 'data', of type str, and cannot be iterated over"),
    (lambda: prepare(DataLoader), TypeError, LOOP + r"is DataLoader itself, and cannot .* Make one: DataLoader\("),
    (lambda: prepare(lambda: None), TypeError, LOOP + r"is <lambda> itself, and cannot .* Call it"),
    (lambda: prepare(DATA), TypeError, r"TensorDataset.*DataLoader\(dataset, batch_size="),
    (lambda: prepare([]), ValueError, EMPTY + "an empty list"),
    (lambda: prepare(DataLoader([])), ValueError, EMPTY + "0 samples of list"),  # type: ignore[arg-type]
    (lambda: prepare(DROPPED), ValueError, EMPTY + "2 samples of list, batch_size=4, drop_last=True"),
    (lambda: CombinedLoader([range(2)], "max_sise"), ValueError, "mode='max_sise'.*Did you mean 'max_size'"),  # type: ignore[arg-type]
    (lambda: CombinedLoader({"a": 3}), TypeError, "int objects cannot be iterated over"),
    (lambda: preload(Endless()), TypeError, "preload: the dataset Endless reads Endless, an IterableDataset"),
    (lambda: preload(Drawing([1, 2])), ValueError, "made with random numbers"),
    (lambda: preload([]), ValueError, "preload: the dataset list is empty"),
    (lambda: preload(3), TypeError, "preload: the dataset int"),
    (lambda: auto_workers(DataLoader(DATA), seconds=0), ValueError, "seconds=0"),
    (lambda: auto_workers(DataLoader(DATA), seconds="4"), ValueError, "seconds='4'"),  # type: ignore[arg-type]
    (lambda: auto_workers(DataLoader(DATA), seconds=True), ValueError, "seconds=True"),
    (lambda: L.Trainer(num_workers="atuo"), ValueError, "num_workers"),
    (lambda: L.Trainer(num_workers=-1), ValueError, "num_workers"),
    (lambda: L.Trainer(num_workers=1.5), TypeError, "num_workers"),
    (lambda: L.Trainer(resident="autos"), ValueError, r"\(resident='autos'\): .*Did you mean 'auto'\?"),
    (lambda: L.Trainer(resident=1), TypeError, r"Trainer\(resident=1\): use True, False"),
    (lambda: L.Trainer(resident="device", batching="length"), ValueError, "Use resident=True"),
]


@pytest.mark.parametrize(("make", "error", "says"), REFUSED)
def test_it_is_refused_by_name(make: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()
