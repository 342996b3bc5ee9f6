"""How a loop is timed: the same way for all of them, from inside, without its start-up."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import platform
import pty
import statistics
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]

FEATURES, HIDDEN, CLASSES, BATCH_SIZE = 32, 32, 2, 4
WARM_UP_STEPS = 50


class Batches:
    """Batches made beforehand, handed out one by one; the first and the last hand-out are stamped.

    The clock starts when batch ``WARM_UP_STEPS`` is handed out and stops when the last one is, so exactly
    ``steps`` whole steps lie between, whichever loop asks, and start-up and tear-down lie outside.
    """

    def __init__(self, steps: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._made = [
            (
                torch.randn(BATCH_SIZE, FEATURES, generator=generator),
                torch.randint(CLASSES, (BATCH_SIZE,), generator=generator),
            )
            for _ in range(64)
        ]
        self.steps = steps
        self.wall_seconds = self.cpu_seconds = 0.0

    def __len__(self) -> int:
        return WARM_UP_STEPS + self.steps + 1

    def __iter__(self) -> Iterator[Batch]:
        made, count = self._made, len(self._made)
        for i in range(WARM_UP_STEPS):
            yield made[i % count]
        cpu, wall = time.process_time(), time.perf_counter()
        for i in range(self.steps):
            yield made[i % count]
        self.wall_seconds = time.perf_counter() - wall
        self.cpu_seconds = time.process_time() - cpu
        yield made[0]


# A loop trains (or evaluates) a new network on the batches and returns it.
Loop = Callable[[Batches], nn.Module]


def make_network() -> nn.Sequential:
    """Return the network that every loop trains, with the same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


@dataclass
class Timing:
    """Seconds of the timed steps of one run."""

    wall_seconds: float
    cpu_seconds: float


def time_one(loop: Loop, steps: int) -> tuple[Timing, list[Tensor]]:
    """Run a loop once; return its timing and the weights it ended with."""
    batches = Batches(steps)
    gc.collect()
    gc.freeze()  # For every loop alike: no collection walks over what existed before the run.
    try:
        network = loop(batches)
    finally:
        gc.unfreeze()
    if not batches.wall_seconds:
        raise RuntimeError(f"{loop} did not take all {len(batches)} batches.")
    weights = [parameter.detach().clone() for parameter in network.parameters()]
    return Timing(batches.wall_seconds, batches.cpu_seconds), weights


@dataclass
class Comparison:
    """What the rounds of one case gave, for the reference and each of the others."""

    steps: int
    reference: list[Timing] = field(default_factory=list)
    others: dict[str, list[Timing]] = field(default_factory=dict)
    same_weights: dict[str, bool] = field(default_factory=dict)

    def microseconds(self, name: str | None = None) -> float:
        """Return the median wall time of a step; of the reference without a name."""
        timings = self.reference if name is None else self.others[name]
        return statistics.median(t.wall_seconds for t in timings) / self.steps * 1e6

    def ratios(self, name: str, clock: str) -> list[float]:
        """Return the ratio to the reference, round by round."""
        attribute = f"{clock}_seconds"
        return [
            getattr(mine, attribute) / getattr(reference, attribute)
            for mine, reference in zip(self.others[name], self.reference, strict=True)
        ]


def compare(reference: Loop, others: Mapping[str, Loop], *, steps: int, rounds: int) -> Comparison:
    """Time the reference and the others in turn, ``rounds`` times, in an order that changes each round."""
    result = Comparison(steps, others={name: [] for name in others})
    for name, loop in others.items():  # One untimed run each: imports, allocator, caches. And the weights.
        _, expected = time_one(reference, WARM_UP_STEPS)
        _, weights = time_one(loop, WARM_UP_STEPS)
        result.same_weights[name] = all(torch.equal(a, b) for a, b in zip(expected, weights, strict=True))
    for i in range(rounds):
        turns: list[tuple[list[Timing], Loop]] = [(result.reference, reference)]
        turns += [(result.others[name], loop) for name, loop in others.items()]
        for timings, loop in turns if i % 2 == 0 else reversed(turns):
            timings.append(time_one(loop, steps)[0])
    return result


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """Give what runs inside a real terminal (80 columns) on stdout and stderr, so that bars draw."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    reader = subprocess.Popen(["cat"], stdin=master, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(master)
    screen = os.fdopen(slave, "w", buffering=1)
    try:
        with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
            yield
    finally:
        screen.close()  # The reader sees the end of the terminal.
        reader.wait(timeout=10)


def hardware() -> dict[str, str | int]:
    """Describe the machine and the interpreter."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo", encoding="utf-8") as lines:
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": cpu,
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": sys.version.split()[0],
    }
