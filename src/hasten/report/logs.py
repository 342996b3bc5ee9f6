"""``plot_logs``, which another package draws."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from hasten.extend.entry_points import load


def plot_logs(log_dir: str | os.PathLike[str], output: str | os.PathLike[str] | None = None) -> list[Path]:
    """Draw loss and accuracy by epoch, training and validation, to ``loss`` and ``acc`` as pdf and png.

    Values logged at steps are averaged over their epoch, unless the epoch has a value itself.

    Args:
        log_dir: folder of a run, its ``metrics.csv`` or ``run.jsonl``, a folder of ``version_N``, of which the latest
            counts, or a folder above runs, of which the one written to last counts.
        output: folder for the pictures; by default the run's.

    Returns:
        The files written. What was not logged is left out.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: it contains neither a loss nor an accuracy.

    Example::

        >>> import tempfile
        >>> from hasten.loggers import CSVLogger
        >>> logger = CSVLogger(tempfile.mkdtemp())
        >>> for epoch in range(3):
        ...     logger.log_metrics({"epoch": epoch, "train_loss": 1 / (epoch + 1)}, step=10 * epoch)
        >>> logger.finalize("success")
        >>> [path.name for path in plot_logs(logger.log_dir)]
        ['loss.pdf', 'loss.png']

    """
    draw: Callable[..., list[Path]] = load("hasten.trainer", "plot_logs", purpose="hasten.plot_logs")
    return draw(log_dir, output)
