"""Columns of a ``RichProgressBar`` and the display they are in, for bars that make their own. Needs rich."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID
from rich.text import Text

from hasten.callbacks.rich_progress import batches_text, metrics_text, speed_text, time_text

if TYPE_CHECKING:
    from rich.style import Style

    from hasten import Trainer


# A bar whose length is not known pulses by itself.
CustomBarColumn = BarColumn


class CustomProgress(Progress):
    """rich's display, to which bars of infinite length can be added."""

    def add_task(
        self,
        description: str,
        start: bool = True,
        total: float | None = 100.0,
        completed: int = 0,
        visible: bool = True,
        **fields: Any,
    ) -> TaskID:
        """Add a bar; ``total`` may be infinite."""
        length = total if total is not None and math.isfinite(total) else None
        return super().add_task(description, start, length, completed, visible, **fields)

    def soft_refresh(self) -> None:
        """Draw."""
        self.refresh()


class _StyledColumn(ProgressColumn):
    def __init__(self, style: str | Style) -> None:
        self.style = style
        super().__init__()

    def _text(self, task: Task) -> str:
        raise NotImplementedError

    def render(self, task: Task) -> Text:
        """Return what is shown for a bar."""
        return Text(self._text(task), style=self.style)


class CustomTimeColumn(_StyledColumn):
    """The time elapsed and remaining."""

    # Twice a second, or the numbers flicker.
    max_refresh = 0.5

    def _text(self, task: Task) -> str:
        return time_text(task)


class BatchesProcessedColumn(_StyledColumn):
    """The batches done and in all."""

    def _text(self, task: Task) -> str:
        return batches_text(task)


class ProcessingSpeedColumn(_StyledColumn):
    """The batches a second."""

    def _text(self, task: Task) -> str:
        return speed_text(task)


class MetricsTextColumn(ProgressColumn):
    """The values behind a bar of a Trainer, in rich's style, each number written by ``metrics_format``."""

    def __init__(self, trainer: Trainer, style: str | Style, text_delimiter: str, metrics_format: str) -> None:
        self._trainer, self._style = trainer, style
        self._text_delimiter, self._metrics_format = text_delimiter, metrics_format
        super().__init__()

    def update(self, metrics: dict[str, Any]) -> None:
        """Do nothing: the bar has its values."""

    def render(self, task: Task) -> Text:
        """Return what is shown for a bar."""
        return Text(metrics_text(task, self._text_delimiter, self._metrics_format), style=self._style, justify="left")
