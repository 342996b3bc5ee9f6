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


def shown(number: int, index: int) -> str:
    return f"{number} of {index}"


class Base:
    def step(self, batch: Any, index: int) -> Any:
        return batch

    def shared(self, batch: Any, number: int, *, name: str = "train") -> Any:
        return [batch, name]

    def counted(self, batch: Any, number: int) -> Any:
        return batch if number else None

    def any_number(self, batch: Any, *numbers: int) -> Any:
        return batch

    def again(self, batch: Any, index: int) -> Any:
        return self.again(batch, index) if batch else None


class Derived(Base):
    def step(self, batch: Any, index: int) -> Any:
        return super().step(batch, index)

    def by_class(self, batch: Any, index: int) -> Any:
        return Base.step(self, batch, index)

    def by_name(self, batch: Any, index: int) -> Any:
        return self.shared(batch, name="val", number=index), self.again(batch, index)

    def deeper(self, batch: Any, index: int) -> Any:
        return self.by_name(batch, index)

    def twice(self, batch: Any, index: int) -> Any:
        return self.by_name(batch, index), index + 1

    def used_there(self, batch: Any, index: int) -> Any:
        return self.counted(batch, index)

    def by_function(self, batch: Any, index: int) -> Any:
        return shown(1, index)

    def by_print(self, batch: Any, index: int) -> Any:
        return print(index)

    def by_any(self, batch: Any, index: int) -> Any:
        return self.any_number(batch, index)

    def unpacked(self, batch: Any, index: int) -> Any:
        return self.step(*batch, index)

    def kept(self, batch: Any, index: int) -> Any:
        self.index = index


@pytest.mark.parametrize(
    ("name", "uses"),
    [(name, False) for name in ("step", "by_class", "by_name", "deeper", "again")]
    + [(name, True) for name in ("twice", "used_there", "by_function", "by_print", "by_any", "unpacked", "kept")],
)
def test_an_argument_that_is_only_passed_on_is_not_used(name: str, uses: bool) -> None:
    owner = Derived()
    assert origin.uses_argument(getattr(owner, name), "index", owner) is uses
    assert not origin.uses_argument(getattr(owner, name), "no_such_argument", owner)


def test_code_without_a_source_uses_what_it_reads() -> None:
    space: dict[str, Any] = {}
    exec("def step(batch, index):\n    return other(batch, index)\ndef other(batch, index):\n    return batch\n", space)
    assert origin.uses_argument(space["step"], "index")
    assert not origin.uses_argument(space["other"], "index")
