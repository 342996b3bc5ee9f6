"""What LearningRateMonitor, DeviceStatsMonitor and ThroughputMonitor log, and that the run does not notice them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hasten as L
from hasten.accelerators import CPUAccelerator
from hasten.callbacks import (
    DeviceStatsMonitor,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    ThroughputMonitor,
    monitors,
)
from hasten.hooks import overrides
from hasten.types import RunningStage
from tests.callbacks.scripted import BATCHES, Scripted, run
from tests.fakes import RowLogger
from tests.models import Classifier, loader, quiet, same_weights
from tests.refusals import refused, warned

Make = Callable[[list[nn.Parameter]], Any]


def rows_with(logger: RowLogger, prefix: str) -> list[dict[str, Any]]:
    """Return the step and the values that begin with ``prefix``, of each row that has some."""
    found = [
        {"step": step, **{name.removeprefix(prefix): row[name] for name in row if name.startswith(prefix)}}
        for step, row in logger.rows
    ]
    return [row for row in found if len(row) > 1]


# -- learning rates


class Tuned(Scripted):
    """A module with the optimizers it is given."""

    def __init__(self, make: Make, automatic: bool = True) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(()))
        self.make, self.automatic_optimization = make, automatic

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.weight + self.extra
        for optimizer in self.optimizers():
            optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return self.make([self.weight, self.extra])


def rates(make: Make, monitor: LearningRateMonitor, automatic: bool = True, **arguments: Any) -> RowLogger:
    logger = RowLogger()
    options = {"max_epochs": 2, "log_every_n_steps": 2, "limit_val_batches": 0, **arguments}
    quiet(callbacks=[monitor], logger=logger, **options).fit(Tuned(make, automatic), BATCHES)
    return logger


def halving(interval: str, name: str | None = None) -> Make:
    def make(parameters: list[nn.Parameter]) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.9, weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": interval, "name": name}]

    return make


def test_rates_are_logged_when_their_scheduler_steps() -> None:
    by_step = rates(halving("step"), monitor := LearningRateMonitor()).of("lr-SGD")
    assert by_step == [(1, 0.5), (3, 0.125), (5, 0.5**5), (7, 0.5**7)]
    assert len(monitor.lrs["lr-SGD"]) == 4
    assert rates(halving("epoch"), LearningRateMonitor()).of("lr-SGD") == [(0, 1.0), (4, 0.5)]
    options = {"accumulate_grad_batches": 2, "log_every_n_steps": 1}
    accumulated = rates(halving("step"), LearningRateMonitor("step"), **options).of("lr-SGD")
    assert [step for step, _ in accumulated] == [0, 1, 2, 3]


def test_a_run_resumed_within_an_accumulation_has_one_row_of_its_step(tmp_path: Path) -> None:
    def save(trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            trainer.save_checkpoint(tmp_path / "a.ckpt")

    options: dict[str, Any] = {"accumulate_grad_batches": 2, "log_every_n_steps": 1, "limit_val_batches": 0}
    for path, steps in ((None, [0, 1]), (tmp_path / "a.ckpt", [1])):
        logger = RowLogger()
        callbacks = [LearningRateMonitor("step"), LambdaCallback(on_train_batch_end=save)][: 1 + (path is None)]
        quiet(callbacks=callbacks, logger=logger, **options).fit(Tuned(halving("step")), BATCHES, ckpt_path=path)
        assert [step for step, _ in logger.of("lr-SGD")] == steps


@pytest.mark.parametrize(("interval", "steps"), [("step", [1, 3, 5, 7]), ("epoch", [0, 4])])
def test_the_interval_can_be_chosen(interval: Any, steps: list[int]) -> None:
    monitor = LearningRateMonitor(interval, log_momentum=True, log_weight_decay=True)
    rows = rates(halving("step", "rate"), monitor)
    assert [step for step, _ in rows.of("rate")] == steps
    assert rows.of("rate-momentum")[0][1] == 0.9
    assert rows.of("rate-weight_decay")[0][1] == 0.01


def test_steps_that_are_not_logged_and_optimizers_without_a_rate() -> None:
    class Adaptive(torch.optim.Optimizer):
        """Takes no learning rate, as Adafactor of transformers."""

        def __init__(self, parameters: list[nn.Parameter]) -> None:
            super().__init__(parameters, {"lr": None, "weight_decay": 0.5})

        def step(self, closure: Any = None) -> Any:
            return None if closure is None else closure()

    assert rates(halving("epoch"), LearningRateMonitor(), log_every_n_steps=0).of("lr-SGD") == [(0, 1.0), (4, 0.5)]
    rows = rates(Adaptive, monitor := LearningRateMonitor("epoch", log_weight_decay=True))
    assert (rows.of("lr-Adaptive"), monitor.lrs) == ([], {"lr-Adaptive": []})
    assert rows.of("lr-Adaptive-weight_decay") == [(0, 0.5), (4, 0.5)]


def test_other_callbacks_can_use_a_rate(tmp_path: Path) -> None:
    callbacks = [LearningRateMonitor(), ModelCheckpoint(tmp_path, "{lr-SGD:.3f}")]
    trainer = run(Tuned(halving("step")), *callbacks, logger=RowLogger(), log_every_n_steps=1)
    assert trainer.callback_metrics["lr-SGD"] == 0.125
    assert [path.name for path in tmp_path.iterdir()] == ["lr-SGD=0.125.ckpt"]


def groups(*options: dict[str, Any]) -> Make:
    return lambda parameters: torch.optim.Adam(
        [{"params": [one], **option} for one, option in zip(parameters, options, strict=True)], lr=0.1
    )


def two(parameters: list[nn.Parameter]) -> Any:
    return [torch.optim.SGD([one], lr=rate) for one, rate in zip(parameters, (0.1, 0.2), strict=True)]


def test_names_of_groups_and_several_optimizers() -> None:
    rows = rates(groups({}, {"name": "bias"}), LearningRateMonitor()).rows
    assert {name for _, row in rows for name in row if "lr" in name} == {"lr-Adam/pg1", "lr-Adam/bias"}
    with refused(ValueError, says="'same'"):
        rates(groups({"name": "same"}, {"name": "same"}), LearningRateMonitor())
    found = rates(two, LearningRateMonitor(), automatic=False, log_every_n_steps=1)
    assert (found.of("lr-SGD")[0], found.of("lr-SGD-1")[0]) == ((0, 0.1), (0, 0.2))
    with warned(RuntimeWarning, says=("Adagrad", "momentum")):
        found = rates(lambda given: torch.optim.Adagrad(given, lr=0.1), LearningRateMonitor(log_momentum=True))
    assert found.of("lr-Adagrad-momentum")[0] == (0, 0)
    with refused(ValueError, fix="logger=False"):
        run(Scripted(), LearningRateMonitor(), enable_checkpointing=False)


def test_the_step_in_which_a_run_is_stopped_is_logged() -> None:
    class Stops(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.trainer.should_stop = self.trainer.should_stop or batch_idx == 2
            return super().training_step(batch, batch_idx)

    for every, steps in ((50, [2, 3]), (2, [1, 2, 3]), (0, [])):
        logger, callbacks = RowLogger(), [LearningRateMonitor("step"), DeviceStatsMonitor()]
        quiet(logger=logger, callbacks=callbacks, log_every_n_steps=every, min_steps=4).fit(Stops(), loader())
        assert [step for step, _ in logger.of("train_loss")] == steps
        assert [step for step, _ in logger.of("lr-SGD")] == [step for step in steps if step != 2]
        assert [row["step"] for row in rows_with(logger, "DeviceStatsMonitor.on_train_batch_end/cpu_percent")] == steps


def test_a_subclass_chooses_what_is_a_rate() -> None:
    class Own(LearningRateMonitor):
        def _extract_lr(self, param_group: dict[str, Any], name: str) -> dict[str, float]:
            return {name: 2 * super()._extract_lr(param_group, name)[name]}

        def _find_names_from_optimizers(self, *args: Any, **kwargs: Any) -> Any:
            names, optimizers = super()._find_names_from_optimizers(*args, **kwargs)
            return [[f"own-{name}" for name in each] for each in names], optimizers

        def _get_optimizer_stats(self, optimizer: Any, names: list[str]) -> dict[str, float]:
            (group,), (name,) = optimizer.param_groups, names
            momentum = self._extract_momentum(param_group=group, name=f"{name}-m", use_betas=False)
            return {**self._extract_lr(group, name), **momentum, **self._extract_weight_decay(group, f"{name}-w")}

    rows = rates(two, monitor := Own("epoch", log_momentum=True, log_weight_decay=True), automatic=False).rows
    first, second = "own-lr-SGD", "own-lr-SGD-1"
    others = {f"{name}-{end}": 0 for name in (first, second) for end in "mw"}
    assert rows[0] == (0, {first: 0.2, second: 0.4, **others})
    assert monitor.lrs == {first: [0.1, 0.1], second: [0.2, 0.2]}


# -- the load of the device


def load(monitor: L.Callback, **arguments: Any) -> list[dict[str, Any]]:
    logger = RowLogger()
    trainer = quiet(callbacks=[monitor], logger=logger, **{"log_every_n_steps": 4, **arguments})
    trainer.fit(Classifier(), loader(), loader(16))
    trainer.test(Classifier(), loader(16), verbose=False)
    return rows_with(logger, "DeviceStatsMonitor.")


def test_the_cpu_is_watched_where_the_run_is_on_it() -> None:
    steps: dict[str, list[int]] = {}
    values: dict[str, float] = {}
    for row in load(DeviceStatsMonitor(), num_sanity_val_steps=0):
        step = row.pop("step")
        (hook,) = {name.split("/")[0] for name in row}
        steps.setdefault(hook, []).append(step)
        values |= {name.split("/")[1]: value for name, value in row.items()}
    assert steps == {
        **{f"on_train_batch_{edge}": [3, 7] for edge in ("start", "end")},
        # On the x axis of the values that validation logs.
        **{f"on_validation_batch_{edge}": [9] for edge in ("start", "end")},
        **{f"on_test_batch_{edge}": [10] for edge in ("start", "end")},
    }
    assert values.keys() == {"cpu_percent", "cpu_vm_percent", "cpu_swap_percent"}
    assert all(0 <= value <= 100 for value in values.values())
    accumulated = load(DeviceStatsMonitor(), accumulate_grad_batches=2, log_every_n_steps=2)
    assert [row["step"] for row in accumulated if "on_train_batch_end/cpu_percent" in row] == [1, 3]


def test_what_is_measured_can_be_replaced_and_batches_of_all_loaders_count() -> None:
    class Sensor(CPUAccelerator):
        def get_device_stats(self, device: torch.device) -> dict[str, Any]:
            return {"watts": 3.0}

    class Own(DeviceStatsMonitor):
        def _get_and_log_device_stats(self, trainer: L.Trainer, key: str) -> None:
            keys.append(key)

    class Several(Classifier):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            pass

    keys: list[str] = []
    logger, callbacks = RowLogger(), [DeviceStatsMonitor(), Own()]
    trainer = quiet(logger=logger, callbacks=callbacks, accelerator=Sensor(), log_every_n_steps=2)
    trainer.validate(Several(), [loader(12), loader(12)], verbose=False)
    assert [name for _, row in logger.rows for name in row if "start" in name] == [
        "DeviceStatsMonitor.on_validation_batch_start/watts"
    ] * 3
    assert keys == ["on_validation_batch_start", "on_validation_batch_end"] * 6


@pytest.mark.gpu
def test_memory_of_a_cuda_device_and_the_load_of_the_cpu() -> None:
    for cpu_stats in (None, False, True):
        (row, *_) = load(DeviceStatsMonitor(cpu_stats), accelerator="cuda")
        assert row["on_train_batch_start/allocated_bytes.all.current"] > 0
        assert ("on_train_batch_start/cpu_percent" in row) == (cpu_stats is True)


def test_what_device_stats_need(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = quiet(callbacks=[DeviceStatsMonitor()])
    with refused(ValueError, says=("`DeviceStatsMonitor`", "`Trainer(logger=False)`")):
        trainer.fit(Classifier(), loader())
    trainer.validate(Classifier(), loader(), verbose=False)
    monkeypatch.setitem(sys.modules, "psutil", None)
    for cpu_stats in (None, True):
        with refused(ModuleNotFoundError, fix="pip install psutil"):
            load(DeviceStatsMonitor(cpu_stats))
    assert load(DeviceStatsMonitor(cpu_stats=False)) == []


# -- throughput

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
    monkeypatch.setattr(monitors, "time", clock := Clock())
    return clock


def throughput(**options: Any) -> ThroughputMonitor:
    return ThroughputMonitor(lambda batch: len(batch[0]), **{"window_size": 2, **options})


def speed(*callbacks: L.Callback, model: Any = None, validation: Any = None, **arguments: Any) -> RowLogger:
    logger = RowLogger()
    options = {"log_every_n_steps": 2, "limit_val_batches": 1.0 if validation else 0, **arguments}
    trainer = quiet(callbacks=list(callbacks), logger=logger, **options)
    trainer.fit(model or Classifier(), loader(), validation)
    return logger


def test_what_is_logged_in_training(clock: Clock) -> None:
    monitor = throughput(length_fn=lambda batch: batch[0].numel(), available_flops=10.0 * TRAINING)
    rows = rows_with(speed(monitor), "train/")
    rates = {"batches": 1.0, "samples": 4.0, "items": 32.0, "flops": float(TRAINING)}
    assert rows == [
        {
            "step": step - 1,
            "time": step,
            "batches": step,
            "samples": 4 * step,
            "lengths": 32 * step,
            **{f"device/{name}_per_sec": rate for name, rate in rates.items()},
            "device/mfu": pytest.approx(0.1),
        }
        for step in (2, 4, 6, 8, 10)
    ]

    class Own(Classifier):
        @property
        def flops_per_batch(self) -> int:
            return 10 * self.trainer.global_step

    rows = rows_with(speed(throughput(), model=Own()), "train/")
    # global_step has moved when a batch ends.
    assert [row["device/flops_per_sec"] for row in rows] == [20, 40, 60, 80, 100]
    rows = rows_with(speed(throughput(), accumulate_grad_batches=2, log_every_n_steps=1), "train/")
    assert [(row["step"], row["batches"]) for row in rows] == [(0, 2), (1, 4), (2, 6), (3, 8), (4, 10)]


def test_validation_is_not_the_time_of_training(clock: Clock) -> None:
    def wait(*_: Any) -> None:
        clock.now += 1000.0

    slow = LambdaCallback(on_validation_epoch_end=wait)
    rows = speed(throughput(), slow, validation=loader(8), log_every_n_steps=1, val_check_interval=5)
    training, validation = rows_with(rows, "train/"), rows_with(rows, "validate/")
    assert [row["time"] for row in training] == list(range(1, 11))
    assert all(row["device/batches_per_sec"] == 1.0 for row in training[1:])
    # Each validation is measured by itself, and the sanity check is not.
    assert [(row["step"], row["batches"]) for row in validation] == [(1, 1), (2, 2), (3, 1), (4, 2)]
    assert validation[1]["device/flops_per_sec"] == FORWARD


def test_evaluation_and_prediction(clock: Clock) -> None:
    logger, model = RowLogger(), Classifier()
    trainer = quiet(callbacks=[throughput()], log_every_n_steps=4, logger=logger)
    trainer.validate(model, loader(), verbose=False)
    trainer.test(model, loader(), verbose=False)
    trainer.predict(model, loader())
    for stage in ("validate", "test", "predict"):
        rows = rows_with(logger, f"{stage}/")
        assert [row["step"] for row in rows] == [4, 8]
        assert (rows[1]["samples"], rows[1]["device/samples_per_sec"]) == (32, 4.0)
        assert rows[1]["device/flops_per_sec"] == FORWARD
    trainer.test(model, loader(), verbose=False)
    again = rows_with(logger, "test/")[-1]
    assert (again["step"], again["samples"], again["time"]) == (20, 80, 10.0)


class Reads(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts reads from the device."""

    reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def test_the_run_does_not_notice_it() -> None:
    class Silent(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch)

    def trained(*callbacks: L.Callback) -> tuple[Classifier, int]:
        L.seed_everything(1, verbose=False)
        with Reads() as mode:
            quiet(callbacks=list(callbacks)).fit(model := Silent(dropout=0.5), loader(shuffle=True), loader(8))
        return model, mode.reads

    (one, reads), (other, with_monitor) = trained(), trained(throughput())
    assert same_weights(one, other)
    assert reads == with_monitor


def test_after_the_first_batch_nothing_counts() -> None:
    modes: list[int] = []
    count = LambdaCallback(on_train_batch_end=lambda *_: modes.append(torch._C._len_torch_dispatch_stack()))
    monitor = throughput()
    trainer = quiet(callbacks=[monitor, count])
    trainer.fit(Classifier(), loader(), loader(8))
    assert modes == [0] * 10
    for stage in ("train", "validation"):
        assert not overrides(monitor, L.Callback, f"on_{stage}_batch_start")
    trainer.test(Classifier(), loader(8), verbose=False)
    assert not overrides(monitor, L.Callback, "on_test_batch_start")

    class Fails(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert torch._C._len_torch_dispatch_stack() == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        quiet(callbacks=[throughput()]).fit(Fails(), loader())
    assert torch._C._len_torch_dispatch_stack() == 0


def test_times_that_the_device_measures() -> None:
    class Event:
        passed = 0.0

        def __init__(self, at: float) -> None:
            self.at = at

        def query(self) -> bool:
            return self.at <= Event.passed

        def elapsed_time(self, other: Event) -> float:
            return 1000 * (other.at - self.at)

    measured = monitors.StageThroughput(RunningStage.TRAINING, torch.device("cpu"), window_size=100)
    measured._on_cuda = True
    at = iter([10.0, 11.0, 13.0, 13.0, 20.0, 22.0])
    measured._now = lambda: Event(next(at))  # type: ignore[method-assign]
    measured.begin()
    for _ in range(3):
        measured.batch_ended(4, None, 7)
    assert measured.compute() == {}  # Not there yet, and nothing waits.
    Event.passed = 11.5
    assert measured.compute() == {"time": 1.0, "batches": 1, "samples": 4}
    Event.passed = 30.0
    measured.begin()
    measured.batch_ended(4, None, 7)
    # Two batches at the same time are one entry; the time between two intervals is left out.
    assert measured.compute() == {"time": 5.0, "batches": 4, "samples": 16}
    assert [last["time"] for last, _ in measured._updates] == [1.0, 3.0, 5.0]
