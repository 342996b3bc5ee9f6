"""Throughput: samples, items and floating-point operations a second, and their share of the device's peak."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hasten._lib import check
from hasten._lib.errors import make_error
from hasten.report.peaks import flop_counter
from hasten.report.peaks import get_available_flops as get_available_flops

if TYPE_CHECKING:
    from hasten.fabric import Fabric
    from hasten.precision.base import Precision


class _TooSmall(ValueError, AssertionError):
    """Both errors at once: programs for Lightning expect the second."""


class Throughput:
    """Rates over the latest updates: batches, samples, items and floating-point operations a second.

    The keys of ``compute`` are ``time`` (seconds), ``batches``, ``samples`` and, where given, ``lengths``: totals;
    and once the window is full ``device/batches_per_sec``, ``device/samples_per_sec``, ``device/items_per_sec``,
    ``device/flops_per_sec`` and ``device/mfu`` (model FLOP/s as a share of the peak), and the same without
    ``device/`` for all devices together if there are several.

    Args:
        available_flops: the peak of one device in floating-point operations a second.
        world_size: number of devices.
        window_size: updates that a rate is taken over, at least 2.
        separator: what stands between ``device`` and the name.

    Raises:
        ValueError: ``window_size`` or ``world_size`` is too small.

    Example::

        >>> throughput = Throughput(window_size=2)
        >>> throughput.update(time=1.0, batches=1, samples=8)
        >>> throughput.update(time=3.0, batches=2, samples=16)
        >>> throughput.compute()["device/samples_per_sec"]
        4.0

    Source of MFU: https://arxiv.org/abs/2204.02311, appendix B.

    """

    def __init__(
        self, available_flops: float | None = None, world_size: int = 1, window_size: int = 100, separator: str = "/"
    ) -> None:
        check.declared(Throughput.__init__, locals())
        self.available_flops = available_flops
        self.world_size = check.whole("Throughput", "world_size", world_size, at_least=1, error=_TooSmall)
        self.window_size = check.whole("Throughput", "window_size", window_size, at_least=2, error=_TooSmall)
        self.separator = separator
        self.reset()

    def reset(self) -> None:
        """Remove everything that was recorded."""
        # Totals, and the operations since the update before: a rate is between the first and the last of these.
        self._updates: deque[tuple[dict[str, float], float | None]] = deque(maxlen=self.window_size)

    def update(
        self, *, time: float, batches: int, samples: int, lengths: int | None = None, flops: float | None = None
    ) -> None:
        """Record the totals so far; all but ``flops`` grow with each call.

        Args:
            time: seconds since the beginning.
            batches: batches on one device.
            samples: samples on one device, at least as many.
            lengths: items (tokens, ...) on one device, at least as many as samples.
            flops: floating-point operations of one device since the last update.

        Raises:
            ValueError: a total did not grow, or is smaller than another that it includes.
            RuntimeError: ``lengths`` was not given each time.

        """
        if samples < batches:
            raise ValueError(f"Expected samples ({samples}) to be greater or equal than batches ({batches})")
        if lengths is not None and lengths < samples:
            raise ValueError(f"Expected lengths ({lengths}) to be greater or equal than samples ({samples})")
        now: dict[str, float] = {"time": time, "batches": batches, "samples": samples}
        if lengths is not None:
            now["lengths"] = lengths
        last = self._updates[-1][0] if self._updates else {}
        if last and now.keys() != last.keys():
            raise RuntimeError(
                "If lengths are passed, there needs to be the same number of samples: give lengths in each update, or "
                "in none."
            )
        for name, earlier in last.items():
            if earlier >= now[name]:
                raise make_error(
                    ValueError,
                    f"Throughput.update({name}={now[name]}): Expected the value to increase, last: {earlier}, "
                    f"current: {now[name]}",
                    argument=name,
                )
        self._updates.append((now, flops))

    def compute(self) -> dict[str, float]:
        """Return the totals, and the rates once the window is full; empty before the first update."""
        if not self._updates:
            return {}
        (first, _), (last, _) = self._updates[0], self._updates[-1]
        metrics = dict(last)
        if len(self._updates) < self.window_size:
            return metrics
        seconds = last["time"] - first["time"]
        rates = {
            f"{'items' if name == 'lengths' else name}_per_sec": (last[name] - first[name]) / seconds
            for name in last
            if name != "time"
        }
        flops = [done for _, done in self._updates if done is not None]
        if len(flops) == self.window_size:
            # The operations of the first update were done before its time.
            rates["flops_per_sec"] = sum(flops[1:]) / seconds
        for name, rate in rates.items():
            metrics[f"device{self.separator}{name}"] = rate
            if self.world_size > 1:
                metrics[name] = rate * self.world_size
        if "flops_per_sec" in rates and self.available_flops:
            metrics[f"device{self.separator}mfu"] = rates["flops_per_sec"] / self.available_flops
        return metrics


class FabricThroughput(Throughput):
    """A Throughput that logs with a Fabric, on the first process.

    Args:
        fabric: the Fabric; its device and precision determine the peak, its loggers record the values.
        **kwargs: ``window_size`` and ``separator`` of Throughput.

    Example::

        >>> import hasten as L
        >>> monitor = ThroughputMonitor(L.Fabric(accelerator="cpu"), window_size=2)
        >>> monitor.update(time=1.0, batches=1, samples=8)
        >>> monitor.compute_and_log()
        {'time': 1.0, 'batches': 1, 'samples': 8}

    """

    def __init__(self, fabric: Fabric, **kwargs: Any) -> None:
        peak = get_available_flops(fabric.device, compute_dtype(fabric.runtime.precision))
        super().__init__(available_flops=peak, world_size=fabric.world_size, **kwargs)
        self._fabric = fabric
        self.step = -1

    def update(
        self, *, time: float, batches: int, samples: int, lengths: int | None = None, flops: float | None = None
    ) -> None:
        """Record the totals so far; see ``Throughput.update``."""
        if self._fabric.is_global_zero:
            super().update(time=time, batches=batches, samples=samples, lengths=lengths, flops=flops)

    def compute(self) -> dict[str, float]:
        """Return totals and rates; empty on other processes than the first."""
        return super().compute() if self._fabric.is_global_zero else {}

    def compute_and_log(self, step: int | None = None, **kwargs: object) -> dict[str, float]:
        """Log and return the result of ``compute``.

        Args:
            step: the x axis of the loggers; the number of this call by default.
            **kwargs: for ``compute``.

        """
        if not self._fabric.is_global_zero:
            return {}
        self.step = self.step + 1 if step is None else step
        metrics = self.compute(**kwargs)
        self._fabric.log_dict(metrics=metrics, step=self.step)
        return metrics


# The name that programs import; the callback of this name is in hasten.callbacks.
ThroughputMonitor = FabricThroughput


def compute_dtype(precision: Precision) -> torch.dtype:
    """Return the type in which the matrix products of a precision are computed.

    Example::

        >>> from hasten.precision.builtin import MixedPrecision
        >>> compute_dtype(MixedPrecision("bf16-mixed", "cpu"))
        torch.bfloat16

    """
    name = str(getattr(precision, "precision", ""))
    if name.startswith("64"):
        return torch.float64
    if name == "bitsandbytes":
        dtype: torch.dtype = getattr(precision, "dtype")  # noqa: B009
        return dtype
    # Products of 8-bit floats are compared with the peak of bfloat16: only some of the layers compute them.
    if name.startswith("bf16") or name in ("fp8", "transformer-engine"):
        return torch.bfloat16
    return torch.float16 if name.startswith("16") or name.endswith("float16") else torch.float32


def measure_flops(
    model: torch.nn.Module, forward_fn: Callable[[], Any], loss_fn: Callable[[Any], Tensor] | None = None
) -> int:
    """Return the floating-point operations of a forward, and of the backward if there is a loss.

    The model may be on the "meta" device: then nothing is computed.

    Args:
        model: the model.
        forward_fn: runs the model and returns its output.
        loss_fn: makes a loss of the output, whose backward then counts too.

    Example::

        >>> with torch.device("meta"):
        ...     model, x = torch.nn.Linear(32, 2, bias=False), torch.randn(4, 32)
        >>> measure_flops(model, lambda: model(x)) == 2 * 4 * 32 * 2
        True

    """
    with flop_counter() as counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()
    return int(counter.get_total_flops())
