"""XLAProfiler: traces of a TPU's work, for TensorBoard."""

from __future__ import annotations

from typing import Any

from hasten._lib import check
from hasten.profilers.base import Profiler
from hasten_xla.devices import require_torch_xla

_BATCH = "run_training_batch"


class XLAProfiler(Profiler):
    """Name the actions of a run in the traces of torch_xla's profiler, and offer the traces on a port.

    During the run, TensorBoard's profile page (Capture profile, ``localhost:9012``) or
    ``torch_xla.debug.profiler.trace("localhost:9012", folder)`` records a few seconds of it.

    Args:
        port: where the first process of a machine listens.

    Raises:
        ModuleNotFoundError: torch_xla is not installed.

    Source: `PyTorch/XLA, Profiling <https://docs.pytorch.org/xla/release/r2.9/learn/troubleshoot.html>`_.

    """

    def __init__(self, port: int = 9012) -> None:
        super().__init__()
        self.port = check.whole("XLAProfiler", "port", port, at_least=1, allowed="a free port, from 1 to 65535")
        require_torch_xla("XLAProfiler")
        self._open: list[tuple[str, Any]] = []
        self._server: Any = None
        self._batches = 0

    def start(self, action_name: str) -> None:
        """Begin a range of the trace; the first call starts to listen."""
        import torch_xla
        from torch_xla.debug import profiler

        if self._server is None:
            # True where another process of this machine listens.
            self._server = profiler.start_server(self.port) or True
        # A step of TensorBoard's page is a range with a number.
        numbered = {"step_num": self._batches, "_r": 1} if action_name == _BATCH else {}
        self._batches += action_name == _BATCH
        # Not profiler.Trace and StepTrace: recorded operations cannot be run within the first, and the second runs them
        # once more in each step.
        span = torch_xla._XLAC.profiler.TraceMe(action_name, **numbered)
        span.__enter__()
        self._open.append((action_name, span))

    def stop(self, action_name: str) -> None:
        """End the range of that name that began last."""
        for index in range(len(self._open) - 1, -1, -1):
            if self._open[index][0] == action_name:
                self._open.pop(index)[1].__exit__(None, None, None)
                return

    def teardown(self, stage: str | None) -> None:
        """Stop listening."""
        self._server = None
        super().teardown(stage)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_open": [], "_server": None}
