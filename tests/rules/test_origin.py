"""What is part of hasten is known in one place, whichever of its packages it lives in."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten
from hasten.extend import origin

SOURCE = Path(__file__).resolve().parents[2] / "src"


def test_every_package_of_the_wheel_is_a_root() -> None:
    assert {path.parent.name for path in SOURCE.glob("*/__init__.py")} <= origin.ROOTS
    assert Path(origin.SOURCE) == SOURCE


def test_classes_and_functions_of_hasten_are_builtin_in_each_root() -> None:
    assert origin.is_builtin(hasten.Trainer)
    assert origin.is_builtin(hasten.Trainer.fit)
    for root in origin.ROOTS:
        assert origin.is_builtin(type("Part", (), {"__module__": f"{root}.part"}))
        assert origin.is_builtin_file(str(SOURCE / root / "part.py"))


@pytest.mark.parametrize("module", ["train", "hastened.part", "hasten_tools_of_mine.part", "torch.optim"])
def test_a_subclass_elsewhere_is_not(module: str) -> None:
    assert not origin.is_builtin(type("Mine", (hasten.Trainer,), {"__module__": module}))
    assert not origin.is_builtin_file(str(SOURCE / f"{module.partition('.')[0]}" / "part.py"))


def test_a_package_is_not_taken_for_another_that_begins_alike() -> None:
    assert origin.comes_from(torch.optim.SGD, "torch")
    assert origin.comes_from(torch.optim.SGD, "torch.optim.sgd")
    assert not origin.comes_from(torch.optim.SGD, "torch.opt", "tor")
    assert not origin.comes_from(None, "torch")


def outer() -> Any:
    return [inner(each) for each in range(2)]


@functools.wraps(outer)
def inner(number: int) -> int:
    return last(number)


def last(number: int) -> int:
    return number


class Owner:
    def begin(self) -> Any:
        return self.step()

    def step(self) -> Any:
        return torch.save(last(2), "x")


def test_what_code_calls_by_name_is_followed() -> None:
    del inner.__wrapped__  # type: ignore[attr-defined]
    reached = list(origin.functions_reached([outer]))
    assert reached == [outer, inner, last]
    assert list(origin.functions_reached([outer], depth=1)) == [outer, inner]
    of_owner = list(origin.functions_reached([Owner().begin, 3, torch.save], lambda name: getattr(Owner, name, None)))
    assert of_owner == [Owner.begin, Owner.step, last]
    assert "save" in origin.names_in(Owner.step)
    assert origin.names_in(len) == set()
    assert origin.arguments_read(Owner.step) == set()
    assert origin.arguments_read(inner) == {"number"}
