"""XLAProfiler: there is none; the name says so."""

from __future__ import annotations

from hasten.profilers.base import PassThroughProfiler


class XLAProfiler(PassThroughProfiler):
    """Not available: hasten does not run on TPUs.

    Args:
        port: unused.

    Raises:
        ModuleNotFoundError: always.

    """

    def __init__(self, port: int = 9012) -> None:
        raise ModuleNotFoundError(
            'XLAProfiler(): hasten does not run on TPUs, so there is nothing it could trace. Use profiler="pytorch" '
            "(PyTorchProfiler) for a trace of the CPU and of GPUs."
        )
