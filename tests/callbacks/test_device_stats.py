"""DeviceStatsMonitor: the load of the machine beside the values of a run."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hasten as L
from hasten.callbacks import DeviceStatsMonitor
from hasten.callbacks import device_stats as module
from hasten.loggers import CSVLogger
from tests.models import Classifier, loader, quiet

CPU = {"cpu_percent", "cpu_vm_percent", "cpu_swap_percent"}


def fit(tmp_path: Path, monitor: L.Callback, **arguments: Any) -> list[tuple[int, dict[str, float]]]:
    """Return (step, values of the monitor) of each row that has some."""
    options = {"log_every_n_steps": 4, "logger": CSVLogger(tmp_path, name="", version="run"), **arguments}
    trainer = quiet(callbacks=[monitor], **options)
    trainer.fit(Classifier(), loader(), loader(16))
    trainer.test(Classifier(), loader(16), verbose=False)
    found = []
    with (tmp_path / "run" / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            values = {
                name: float(text) for name, text in row.items() if name.startswith("DeviceStats") and text
            }
            if values:
                found.append((int(row["step"]), values))
    return found


def by_hook(rows: list[tuple[int, dict[str, float]]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for step, values in rows:
        for name in values:
            hook = name.removeprefix("DeviceStatsMonitor.").split("/")[0]
            if step not in found.setdefault(hook, []):
                found[hook].append(step)
    return found


def test_the_cpu_is_watched_where_the_run_is_on_it(tmp_path: Path) -> None:
    rows = fit(tmp_path, DeviceStatsMonitor(), num_sanity_val_steps=0)
    assert by_hook(rows) == {
        "on_train_batch_start": [3, 7],
        "on_train_batch_end": [3, 7],
        "on_validation_batch_start": [10],
        "on_validation_batch_end": [10],
        "on_test_batch_start": [10],
        "on_test_batch_end": [10],
    }
    names = {name.split("/")[1] for _, values in rows for name in values}
    assert names == CPU
    assert all(0 <= value <= 100 for _, values in rows for value in values.values())


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    hooks = by_hook(fit(tmp_path, DeviceStatsMonitor(), accumulate_grad_batches=2, log_every_n_steps=2))
    assert hooks["on_train_batch_start"] == [1, 3]
    assert hooks["on_train_batch_end"] == [1, 3]


def test_the_cpu_can_be_left_out(tmp_path: Path) -> None:
    assert fit(tmp_path, DeviceStatsMonitor(cpu_stats=False)) == []


def test_the_device_and_the_cpu_are_logged_together(monkeypatch: pytest.MonkeyPatch) -> None:
    class Accelerator:
        def get_device_stats(self, device: torch.device) -> dict[str, Any]:
            return {"allocated_bytes.all.peak": 7, "asked": str(device)}

    class Strategy:
        root_device = torch.device("cuda", 1)

    class Trainer:
        accelerator, strategy = Accelerator(), Strategy()

    monkeypatch.setattr(module, "get_cpu_stats", lambda: {"cpu_percent": 3.0})
    device = {"allocated_bytes.all.peak": 7, "asked": "cuda:1"}
    trainer: Any = Trainer()
    assert DeviceStatsMonitor(cpu_stats=True)._stats(trainer) == {**device, "cpu_percent": 3.0}
    for cpu_stats in (None, False):
        assert DeviceStatsMonitor(cpu_stats=cpu_stats)._stats(trainer) == device


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_of_a_cuda_device(tmp_path: Path) -> None:
    rows = fit(tmp_path, DeviceStatsMonitor(), accelerator="cuda")
    assert rows[0][1]["DeviceStatsMonitor.on_train_batch_start/allocated_bytes.all.current"] > 0


def test_a_logger_is_needed() -> None:
    trainer = quiet(callbacks=[DeviceStatsMonitor()])
    with pytest.raises(
        ValueError, match=r"Cannot use `DeviceStatsMonitor` callback with `Trainer\(logger=False\)`"
    ):
        trainer.fit(Classifier(), loader())
    trainer.validate(Classifier(), loader(), verbose=False)


@pytest.mark.parametrize(("cpu_stats", "needed"), [(None, True), (True, True), (False, False)])
def test_psutil_is_asked_for_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu_stats: bool | None, needed: bool
) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    if needed:
        with pytest.raises(ModuleNotFoundError, match="pip install psutil"):
            fit(tmp_path, DeviceStatsMonitor(cpu_stats))
    else:
        fit(tmp_path, DeviceStatsMonitor(cpu_stats))
