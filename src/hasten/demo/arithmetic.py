"""How much arithmetic a task is without its padding, and what share of the machine's peak a row reaches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hasten.demo.task import Switches, Task
from hasten.report.peaks import flop_counter, measured_peaks


@dataclass(frozen=True)
class Arithmetic:
    """What the model FLOPs utilisation of a row is computed from.

    Args:
        useful_flops: floating point operations of the whole training, forward and backward, of real tokens only.
        peaks: operations a second that a large matrix product reaches on this device, by the type of its numbers:
            float32, bfloat16 and, on a GPU, tf32.

    Source: Chowdhery et al., PaLM, appendix B, https://arxiv.org/abs/2204.02311

    """

    useful_flops: float
    peaks: dict[str, float]

    def mfu(self, switches: Switches, seconds: float) -> float | None:
        """Return the share of the peak, 0 to 1; None where the peak is not known.

        Args:
            switches: they say in which type of numbers the products are.
            seconds: of the whole training.

        Example::

            >>> Arithmetic(1e12, {"float32": 1e11}).mfu(Switches(), seconds=20.0)
            0.5

        """
        if switches.precision.startswith("bf16"):
            peak = self.peaks.get("bfloat16")
        elif switches.tf32:
            peak = self.peaks.get("tf32")
        else:
            peak = self.peaks.get("float32")
        return None if peak is None else self.useful_flops / seconds / peak


def measure(task: Task) -> Arithmetic:
    """Count the operations of a task, and measure the peak of its device; takes a second or two.

    Args:
        task: which.

    """
    peaks = {name: peak for name, peak in measured_peaks(task.device).items() if peak is not None}
    return Arithmetic(task.epochs * _useful_flops(task), peaks)


def _useful_flops(task: Task) -> float:
    """Operations of one epoch. A transformer needs ``a * tokens + b * tokens ** 2`` for a sample: two samples tell."""
    plain = Switches()
    samples = range(len(task.users_loader(plain).dataset))  # type: ignore[arg-type]
    lengths = [task.length(plain, sample) for sample in samples]
    short, long = (lengths.index(edge) for edge in (min(lengths), max(lengths)))
    flops = {sample: _counted(task, sample) for sample in (short, long)}
    if lengths[short] == lengths[long]:
        return float(flops[short]) * len(lengths)
    per_token = {sample: flops[sample] / lengths[sample] for sample in flops}
    b = (per_token[long] - per_token[short]) / (lengths[long] - lengths[short])
    a = per_token[short] - b * lengths[short]
    return sum(a * length + b * length**2 for length in lengths)


def _counted(task: Task, sample: int) -> int:
    model = task.model(Switches()).train()
    counter = flop_counter()
    with torch.random.fork_rng(devices=[]), counter:
        task.loss(model, task.alone(sample)).backward()
    return int(counter.get_total_flops())
