"""ThroughputMonitor: what it logs, and that it neither waits nor changes the run."""

from __future__ import annotations

import csv
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hasten as L
from hasten.callbacks import ThroughputMonitor
from hasten.callbacks import throughput as module
from hasten.hooks import overrides
from hasten.loggers import CSVLogger
from tests.models import Classifier, loader, quiet, same_weights

# Of one batch of 4 of the classifier: both layers forward, gradients of both weights and of the second input.
FORWARD = 2 * 4 * (8 * 16 + 16 * 2)
TRAINING = 2 * FORWARD + 2 * 4 * 16 * 2


class Clock:
    """Each look at it is a second later."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def monitor(**options: Any) -> ThroughputMonitor:
    return ThroughputMonitor(lambda batch: len(batch[0]), **{"window_size": 2, **options})


def logged(folder: Path, prefix: str = "train/") -> list[dict[str, float]]:
    """Return the values with ``prefix`` of each row that has some, and the row's step."""
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = []
    for row in rows:
        values = {
            name.removeprefix(prefix): float(text)
            for name, text in row.items()
            if name.startswith(prefix) and text
        }
        if values:
            found.append({"step": float(row["step"]), **values})
    return found


def fit(
    tmp_path: Path, callback: L.Callback, model: L.LightningModule | None = None, **arguments: Any
) -> L.Trainer:
    options = {"log_every_n_steps": 2, "logger": CSVLogger(tmp_path, name="", version="run"), **arguments}
    trainer = quiet(callbacks=[callback], **options)
    trainer.fit(model or Classifier(), loader(), loader(8) if options.get("limit_val_batches") != 0 else None)
    return trainer


def test_what_is_logged_in_training(tmp_path: Path, clock: Clock) -> None:
    fit(
        tmp_path,
        monitor(length_fn=lambda batch: batch[0].numel()),
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    rows = logged(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 3, 5, 7, 9]
    second = {
        "step": 1.0,
        "time": 2.0,
        "batches": 2.0,
        "samples": 8.0,
        "lengths": 64.0,
        "device/batches_per_sec": 1.0,
        "device/samples_per_sec": 4.0,
        "device/items_per_sec": 32.0,
        "device/flops_per_sec": float(TRAINING),
    }
    assert rows[0] == second
    assert rows[-1] == {
        **second,
        "step": 9.0,
        "time": 10.0,
        "batches": 10.0,
        "samples": 40.0,
        "lengths": 320.0,
    }


def test_the_share_of_a_peak_that_is_given(tmp_path: Path, clock: Clock) -> None:
    fit(tmp_path, monitor(available_flops=10.0 * TRAINING), limit_val_batches=0)
    assert logged(tmp_path / "run")[-1]["device/mfu"] == pytest.approx(0.1)


def test_the_peak_is_that_of_the_device_and_the_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(module, "get_available_flops", lambda *arguments: asked.append(arguments))
    fit(tmp_path, monitor(), precision="bf16-mixed")
    assert asked == [(torch.device("cpu"), torch.bfloat16)]


def test_validation_is_not_the_time_of_training(tmp_path: Path, clock: Clock) -> None:
    class Slow(L.Callback):
        def on_validation_epoch_end(self, *_: Any) -> None:
            clock.now += 1000.0

    trainer = quiet(
        callbacks=[monitor(), Slow()],
        log_every_n_steps=1,
        logger=CSVLogger(tmp_path, name="", version="run"),
        val_check_interval=5,
    )
    trainer.fit(Classifier(), loader(), loader(8))
    rows = logged(tmp_path / "run")
    assert [row["time"] for row in rows] == [float(n) for n in range(1, 11)]
    assert all(row["device/batches_per_sec"] == 1.0 for row in rows[1:])
    # Each validation is measured by itself, and the sanity check is not.
    validation = logged(tmp_path / "run", "validate/")
    assert [row["batches"] for row in validation] == [1, 2, 1, 2]
    assert validation[1]["device/flops_per_sec"] == FORWARD


def test_own_operations_are_asked_at_each_batch(tmp_path: Path, clock: Clock) -> None:
    class Own(Classifier):
        asked = 0

        @property
        def flops_per_batch(self) -> int:
            self.asked += 1
            return 10 * self.trainer.global_step

    fit(tmp_path, monitor(), Own(), limit_val_batches=0)
    # global_step has moved when a batch ends.
    assert [row["device/flops_per_sec"] for row in logged(tmp_path / "run")] == [20, 40, 60, 80, 100]


def test_an_accumulation_is_logged_when_it_is_complete(tmp_path: Path, clock: Clock) -> None:
    fit(tmp_path, monitor(), accumulate_grad_batches=2, log_every_n_steps=1, limit_val_batches=0)
    rows = logged(tmp_path / "run")
    assert [row["batches"] for row in rows] == [2, 4, 6, 8, 10]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]


def test_evaluation_and_prediction(tmp_path: Path, clock: Clock) -> None:
    trainer = quiet(
        callbacks=[monitor()], log_every_n_steps=4, logger=CSVLogger(tmp_path, name="", version="run")
    )
    model = Classifier()
    trainer.validate(model, loader(), verbose=False)
    trainer.test(model, loader(), verbose=False)
    trainer.predict(model, loader())
    for stage in ("validate", "test", "predict"):
        rows = logged(tmp_path / "run", f"{stage}/")
        assert [row["step"] for row in rows] == [4, 8]
        assert rows[1]["samples"] == 32
        assert rows[1]["device/samples_per_sec"] == 4.0
        assert rows[1]["device/flops_per_sec"] == FORWARD


def test_counting_changes_nothing(tmp_path: Path) -> None:
    torch.manual_seed(1)
    one, other = Classifier(dropout=0.5), Classifier(dropout=0.5)
    other.load_state_dict(one.state_dict())
    for model, callbacks in ((one, []), (other, [monitor()])):
        torch.manual_seed(2)
        quiet(callbacks=callbacks).fit(model, loader(shuffle=True), loader(8))
    assert same_weights(one, other)


def test_after_the_first_batch_nothing_counts(tmp_path: Path) -> None:
    callback = monitor()
    modes: list[int] = []

    class Watches(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            modes.append(torch._C._len_torch_dispatch_stack())

    trainer = quiet(callbacks=[callback, Watches()])
    trainer.fit(Classifier(), loader(), loader(8))
    assert modes == [0] * 10
    for stage in ("train", "validation"):
        assert not overrides(callback, L.Callback, f"on_{stage}_batch_start")
    trainer.test(Classifier(), loader(8), verbose=False)
    assert not overrides(callback, L.Callback, "on_test_batch_start")


def test_an_error_in_the_first_batch_ends_the_counting() -> None:
    class Fails(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert torch._C._len_torch_dispatch_stack() == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        quiet(callbacks=[monitor()]).fit(Fails(), loader())
    assert torch._C._len_torch_dispatch_stack() == 0


def test_a_step_reads_nothing_from_the_device(tmp_path: Path) -> None:
    class Reads(torch.utils._python_dispatch.TorchDispatchMode):
        reads = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.reads += "_local_scalar_dense" in str(func)
            return func(*args, **(kwargs or {}))

    class Silent(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch)

    def reads(callbacks: list[L.Callback]) -> int:
        with Reads() as mode:
            quiet(callbacks=callbacks).fit(Silent(), loader())
        return mode.reads

    assert reads([monitor()]) == reads([])


def test_times_that_the_device_says() -> None:
    class Event:
        passed = 0.0

        def __init__(self, at: float) -> None:
            self.at = at

        def query(self) -> bool:
            return self.at <= Event.passed

        def elapsed_time(self, other: Event) -> float:
            return 1000 * (other.at - self.at)

    measure = module._StageTotals(torch.device("cpu"))
    measure._events = True
    at = iter([10.0, 11.0, 13.0, 13.0, 20.0, 22.0])
    measure._now = lambda: Event(next(at))  # type: ignore[method-assign]
    measure.begin()
    for _ in range(3):
        measure.batch_ended(4, None, 7)
    assert measure.arrived() == []  # Not there yet, and nobody waits.
    Event.passed = 11.5
    assert [totals["time"] for totals in measure.arrived()] == [1.0]
    Event.passed = 30.0
    measure.begin()
    measure.batch_ended(4, 8, 7)
    # Two batches at the same time are one entry; the time between two intervals is left out.
    found = measure.arrived()
    assert [totals["time"] for totals in found] == [3.0, 5.0]
    assert found[-1] == {"time": 5.0, "batches": 4, "samples": 16, "lengths": 8, "flops": 7}


def test_it_travels_to_another_process(tmp_path: Path) -> None:
    callback = ThroughputMonitor(len, window_size=7)
    quiet(callbacks=[callback]).fit(Classifier(), loader())
    assert pickle.loads(pickle.dumps(callback)).kwargs == {"window_size": 7}
