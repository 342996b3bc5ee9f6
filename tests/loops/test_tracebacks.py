"""A traceback leads from the program's call to the program's mistake, past few frames of hasten."""

from __future__ import annotations

import inspect
import statistics
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import hasten as L
from hasten.callbacks import EarlyStopping
from tests.models import Classifier, loader, quiet

PACKAGE = str(Path(inspect.getfile(L)).parent)
AT_MOST = 6
CALLS_OF_TORCH = ("_wrapped_call_impl", "_call_impl")


class MistakeError(Exception):
    pass


def mistake(*_: Any, **__: Any) -> Any:
    seen_by_the_debugger = 42
    raise MistakeError(seen_by_the_debugger)


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


# Mistakes in the program's own code ...
IN_PROGRAM: dict[str, Callable[[], Any]] = {
    "training_step": lambda: fit(with_method("training_step")),
    "sanity check": lambda: fit(with_method("validation_step"), val=loader()),
    "configure_optimizers": lambda: fit(with_method("configure_optimizers")),
    "optimizer_step": lambda: fit(with_method("optimizer_step", lambda s, a, b, c, d=None: mistake())),
    "callback on_train_batch_end": lambda: fit(callbacks=[callback("on_train_batch_end")]),
    "callback on_fit_end": lambda: fit(callbacks=[callback("on_fit_end")]),
    "dataset": lambda: fit(train=DataLoader(Broken(), 2)),
    "train_dataloader": lambda: quiet().fit(with_method("train_dataloader")),
    "predict": lambda: quiet().predict(with_method("predict_step"), loader()),
    "fabric forward": fabric_forward,
}

# ... and those that hasten finds.
FOUND: dict[str, Callable[[], Any]] = {
    "no data": lambda: quiet().fit(Classifier()),
    "a float for a loss": lambda: fit(with_method("training_step", lambda s, b, i: s.loss(b).item())),
    "no optimizer": lambda: fit(with_method("configure_optimizers", lambda s: "adam")),
    "a value nobody logs": lambda: fit(callbacks=[EarlyStopping("val_los")], val=loader()),
    "unknown argument": lambda: quiet(max_epoch=1),
    "checkpoint": lambda: quiet().fit(Classifier(), loader(), ckpt_path="nowhere.ckpt"),
    "two optimizers": lambda: fit(
        with_method("configure_optimizers", lambda s: [torch.optim.SGD(s.parameters(), 0.1) for _ in range(2)])
    ),
}

ALL = {**IN_PROGRAM, **FOUND}


def error_of(make: Callable[[], Any]) -> BaseException:
    try:
        make()
    except BaseException as error:
        return error
    raise AssertionError("no error")


def frames_of(error: BaseException) -> list[tuple[str, str, int | None]]:
    return [(f.filename, f.name, f.lineno) for f in traceback.extract_tb(error.__traceback__)]


def ours(frames: list[tuple[str, str, int | None]]) -> int:
    return sum(file.startswith(PACKAGE) for file, _, _ in frames)


def test_all_frames_of_the_program_and_few_of_hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for name, make in ALL.items():
        monkeypatch.delenv("HASTEN_FULL_TRACEBACK", raising=False)
        short = frames_of(error_of(make))
        counts.append(ours(short))
        assert 1 <= counts[-1] <= AT_MOST, name
        monkeypatch.setenv("HASTEN_FULL_TRACEBACK", "1")
        full = frames_of(error_of(make))
        of_the_program = [
            [f for f in frames if not f[0].startswith(PACKAGE) and f[1] not in CALLS_OF_TORCH]
            for frames in (short, full)
        ]
        assert of_the_program[0] == of_the_program[1], name
        assert set(short) <= set(full), name
        assert short[-1] == full[-1], f"{name}: the line of the mistake"
    assert statistics.median(counts) <= 4


def test_the_calls_of_torch_between_layers_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_wide(self: Any, batch: Any, batch_idx: int) -> Any:
        return self(torch.ones(4, 9)).sum()

    def names() -> set[str]:
        error = error_of(lambda: fit(with_method("training_step", too_wide)))
        return {name for _, name, _ in frames_of(error)}

    monkeypatch.delenv("HASTEN_FULL_TRACEBACK", raising=False)
    assert {"too_wide", "forward"} <= names()
    assert names().isdisjoint(CALLS_OF_TORCH)
    monkeypatch.setenv("HASTEN_FULL_TRACEBACK", "1")
    assert set(CALLS_OF_TORCH) <= names()


def test_the_traceback_can_be_inspected_after_the_fact() -> None:
    error = error_of(IN_PROGRAM["training_step"])
    assert isinstance(error, MistakeError)
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    assert frame.f_locals["seen_by_the_debugger"] == 42
    assert line == mistake.__code__.co_firstlineno + 2
    # The frames that are not shown are still below this one.
    names = []
    while frame.f_back is not None:
        frame = frame.f_back
        names.append(frame.f_code.co_name)
    assert "train_batches" in names


def test_errors_that_led_to_an_error_are_short_as_well() -> None:
    class Translates(L.Callback):
        def on_exception(self, trainer: L.Trainer, module: L.LightningModule, error: BaseException) -> None:
            raise MistakeError("while leaving") from error

    error = error_of(lambda: fit(with_method("training_step"), callbacks=[Translates()]))
    assert isinstance(error.__cause__, MistakeError)
    assert ours(frames_of(error.__cause__)) <= AT_MOST
    assert frames_of(error.__cause__)[-1][1] == "mistake"
