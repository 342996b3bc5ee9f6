"""The columns of a RichProgressBar; imported with rich, when a bar is shown."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from rich.progress import ProgressColumn, Task
from rich.text import Text


class BatchesColumn(ProgressColumn):
    """Batches done of all, "--" where there is no end."""

    def __init__(self, style: Any) -> None:
        self.style = style
        super().__init__()

    def render(self, task: Task) -> Text:
        """Return the text."""
        total = "--" if task.total is None else str(int(task.total))
        return Text(f"{int(task.completed)}/{total}", style=self.style)


class TimeColumn(ProgressColumn):
    """Time elapsed and time to come."""

    def __init__(self, style: Any) -> None:
        self.style = style
        super().__init__()

    def render(self, task: Task) -> Text:
        """Return the text."""
        elapsed = task.finished_time if task.finished else task.elapsed
        return Text(f"{_clock(elapsed)} • {_clock(task.time_remaining)}", style=self.style)


class SpeedColumn(ProgressColumn):
    """Batches a second."""

    def __init__(self, style: Any) -> None:
        self.style = style
        super().__init__()

    def render(self, task: Task) -> Text:
        """Return the text."""
        speed = task.finished_speed or task.speed
        if speed is None and task.elapsed:
            speed = (task.completed - task.fields.get("initial", 0)) / task.elapsed
        return Text(f"{speed or 0:.2f}it/s", style=self.style)


class MetricsColumn(ProgressColumn):
    """The values of the run."""

    def __init__(self, style: Any, delimiter: str, number_format: str) -> None:
        self.style = style
        self._delimiter = delimiter
        self._format = number_format
        super().__init__()

    def render(self, task: Task) -> Text:
        """Return the text."""
        values = task.fields.get("metrics", {})
        return Text(self._delimiter.join(self._texts(values)), justify="left", style=self.style)

    def _texts(self, values: dict[str, Any]) -> Iterator[str]:
        for name, value in values.items():
            text = value
            # Whole numbers, such as the logger's version, stay whole.
            if not isinstance(value, str | int):
                try:
                    text = format(value, self._format)
                except (TypeError, ValueError):  # a number of another kind, or no number
                    text = str(value)
            yield f"{name}: {text}"


def _clock(seconds: float | None) -> str:
    return "-:--:--" if seconds is None else str(timedelta(seconds=int(seconds)))
