"""Nested collections of tensors keep their types and their other leaves."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from hasten._lib.tree import as_bytes, map_tensors, move_to

Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True)
class Frozen:
    x: Any
    name: str = "a"


class Encoding(UserDict):  # type: ignore[type-arg]
    """As a tokenizer gives it: items, and something beside them."""

    def __init__(self, data: Any, beside: str = "") -> None:
        super().__init__(data)
        self.beside = beside

    def to(self, device: Any) -> Encoding:
        raise AssertionError("its items are moved, and it stays what it was")


class Ordered(OrderedDict):  # type: ignore[type-arg]
    pass


X = torch.ones(2)


def double(tensor: Tensor) -> Tensor:
    return tensor * 2


def holds(data: Any) -> Any:
    """Return the tensor in ``data``."""
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, data)
    (tensor,) = found
    return tensor


COLLECTIONS = [
    X,
    [X, 1],
    (X, "a"),
    {"x": X, "n": None},
    Pair(X, 2),
    OrderedDict(x=X),
    Ordered(x=X),
    Frozen(X),
    UserDict({"x": X}),
    Encoding({"x": X}, "kept"),
    MappingProxyType({"x": X}),
    [{"a": (Frozen([X]), 3.0)}],
]


@pytest.mark.parametrize("data", COLLECTIONS, ids=lambda data: type(data).__name__)
def test_types_are_kept_and_the_original_is_not_changed(data: Any) -> None:
    mapped = map_tensors(double, data)
    assert type(mapped) is type(data)
    assert mapped is not data
    assert holds(mapped).tolist() == [2.0, 2.0]
    assert holds(data) is X
    # Nothing is copied where nothing changes.
    assert map_tensors(lambda tensor: tensor, data) is data
    assert move_to(data, "cpu") is data


def test_what_a_collection_has_beside_its_items_is_kept() -> None:
    assert map_tensors(double, Encoding({"x": X}, "kept")).beside == "kept"
    counts: Any = defaultdict(list, x=X)
    assert map_tensors(double, counts).default_factory is list
    assert map_tensors(double, Frozen(X, name="b")).name == "b"


def test_all_is_moved() -> None:
    batch = {"x": [X, Frozen(X)], "encoding": Encoding({"ids": X}), "n": 3}
    moved = move_to(batch, "meta")
    assert moved["x"][0].device.type == moved["x"][1].x.device.type == moved["encoding"]["ids"].device.type == "meta"
    assert moved["n"] == 3
    assert batch["x"][0].device.type == "cpu"


def test_what_can_move_itself_does() -> None:
    class Graph:
        device = "cpu"

        def to(self, device: Any) -> Graph:
            graph = Graph()
            graph.device = str(device)
            return graph

    class InPlace(Graph):
        def to(self, device: Any) -> None:  # type: ignore[override]
            self.device = str(device)

    assert move_to([Graph()], "meta")[0].device == "meta"
    in_place = InPlace()
    assert move_to([in_place], "meta")[0] is in_place
    assert in_place.device == "meta"
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert type(move_to(packed, "cpu")) is type(packed)


ROWS = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize("tensor", [ROWS, ROWS.t(), ROWS[1, ::3][:1], ROWS[:1, :1].t(), ROWS[0, 0], ROWS[:0], ROWS[1:]])
def test_bytes_are_the_values_in_order_whatever_the_strides(tensor: Tensor) -> None:
    # ROWS[1, ::3][:1] has one element, is contiguous and has a stride of 3: torch has no view of it as bytes.
    assert as_bytes(tensor).numpy().tobytes() == tensor.numpy().tobytes()
