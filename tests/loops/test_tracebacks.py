"""A traceback leads from the program's call to the program's mistake, past few frames of hasten."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import hasten as L
from tests.models import Classifier, loader, quiet

PACKAGE = str(Path(inspect.getfile(L)).parent)
AT_MOST = 14


class MistakeError(Exception):
    pass


def mistake(*_: Any, **__: Any) -> Any:
    raise MistakeError


def with_method(name: str, function: Callable[..., Any] = mistake) -> Any:
    return type("Net", (Classifier,), {name: function})()


class Broken(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    __getitem__ = mistake


def fit(model: Any = None, train: Any = None, val: Any = None, **arguments: Any) -> None:
    quiet(**arguments).fit(model or Classifier(), train or loader(), val)


def callback(name: str) -> Any:
    return type("Hears", (L.Callback,), {name: mistake})()


def fabric_forward() -> None:
    module = torch.nn.Linear(2, 1)
    module.forward = mistake  # type: ignore[method-assign]
    L.Fabric(accelerator="cpu").setup(module)(torch.ones(1, 2))


# Mistakes in the program's own code.
IN_PROGRAM: dict[str, Callable[[], Any]] = {
    "training_step": lambda: fit(with_method("training_step")),
    "sanity check": lambda: fit(with_method("validation_step"), val=loader()),
    "configure_optimizers": lambda: fit(with_method("configure_optimizers")),
    "optimizer_step": lambda: fit(with_method("optimizer_step", lambda s, a, b, c, d=None: mistake())),
    "callback on_train_batch_end": lambda: fit(callbacks=[callback("on_train_batch_end")]),
    "dataset": lambda: fit(train=DataLoader(Broken(), 2)),
    "predict": lambda: quiet().predict(with_method("predict_step"), loader()),
    "fabric forward": fabric_forward,
}


def test_a_traceback_ends_in_the_program_and_passes_few_frames_of_hasten() -> None:
    for name, make in IN_PROGRAM.items():
        with pytest.raises(MistakeError) as caught:
            make()
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert frames[-1].name == "mistake", name
        assert sum(frame.filename.startswith(PACKAGE) for frame in frames) <= AT_MOST, name
