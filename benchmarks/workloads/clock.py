"""The clock inside a training: it lets the loop take as many steps as the parent process orders, and times them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import IO, Any, NoReturn

import torch
from torch import Tensor, nn

Quality = Callable[[nn.Module], float]


class Clock:
    """Every loop calls ``step`` after each optimizer step; between two turns it waits there.

    The first turn is one step long and begins with the process, so that imports, data and compiling are in it.

    Args:
        orders: lines of JSON: ``{"steps": 4, "evaluate": false, "profile": false}``; its end ends the process.
        reports: one line of JSON for each turn.
        device: waited for before a time is taken.
        quality: of the model, on held-out samples; its time is not counted.

    """

    def __init__(self, orders: IO[str], reports: IO[str], device: torch.device, quality: Quality) -> None:
        self._orders, self._reports = orders, reports
        self._device, self._quality = device, quality
        self._losses: list[Tensor] = []
        self._order: dict[str, Any] = {"steps": 1, "evaluate": False, "profile": False}
        self._left = 1
        self._profiler: Any = None
        self._wall = self._cpu = 0.0

    def step(self, model: nn.Module, loss: Tensor) -> None:
        """Count a step of ``model``; at the end of a turn report it, and wait for the next one."""
        self._losses.append(loss.detach())
        self._left -= 1
        if self._left == 0:
            self._report(model)
            self._wait()

    def _report(self, model: nn.Module) -> None:
        self._synchronize()
        report: dict[str, Any] = {
            "wall_seconds": time.perf_counter() - self._wall,
            "cpu_seconds": time.process_time() - self._cpu,
            "losses": torch.stack(self._losses).float().tolist(),
            "peak_bytes": peak_bytes(self._device),
        }
        if self._order["profile"]:
            self._profiler.stop()
            report["profile"] = [
                (event.key, event.self_cpu_time_total, event.count) for event in self._profiler.key_averages()
            ]
        if self._order["evaluate"]:
            report["quality"] = self._quality(model)
        print(json.dumps(report), file=self._reports, flush=True)

    def _wait(self) -> None:
        line = self._orders.readline()
        if not line:
            end()
        self._order, self._losses = json.loads(line), []
        self._left = self._order["steps"]
        if self._order["profile"]:
            self._profiler = torch.profiler.profile()
            self._profiler.start()
        self._synchronize()
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def peak_bytes(device: torch.device) -> int | None:
    """Return the most memory held so far: by tensors on a GPU, by the whole process on a CPU that runs Linux."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        with open("/proc/self/status", encoding="utf-8") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except OSError:
        return None


def end() -> NoReturn:
    """End the process from within a loop that would go on, without what libraries do at exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
