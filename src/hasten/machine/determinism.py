"""Deterministic algorithms."""

from __future__ import annotations

import os

import torch


def set_deterministic(deterministic: bool | str | None, *, benchmark: bool | None = None) -> None:
    """Ask torch for deterministic algorithms.

    Args:
        deterministic: True for deterministic algorithms only (an operation that has none raises), "warn" to
            warn where there is none, False to take it back, None to leave all as it is.
        benchmark: let cuDNN time its algorithms and take the fastest; None leaves it, except that it is
            switched off with ``deterministic``, since timings differ from run to run.

    Example::

        >>> set_deterministic("warn")
        >>> torch.are_deterministic_algorithms_enabled()
        True
        >>> set_deterministic(False)

    """
    if deterministic and benchmark is None:
        benchmark = False
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark
    if deterministic is None:
        return
    torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
    if deterministic:
        # cuBLAS is deterministic only with a workspace of fixed size; it reads this when it starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
