"""RichProgressBar: the bar drawn with rich."""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hasten._lib.errors import MisconfigurationException
from hasten._lib.optional import installed, need
from hasten.callbacks.progress_drawn import REFRESH_SECONDS, DrawnProgressBar, convert_inf

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer

_PURPOSE = "RichProgressBar()"


@dataclass
class RichProgressBarTheme:
    """The styles of a RichProgressBar, as rich writes them ("bold red", "#6206E0", a ``rich.style.Style``).

    Args:
        description: of "Epoch 0" and the like.
        progress_bar: of the part that is done.
        progress_bar_finished: of a bar that is complete.
        progress_bar_pulse: of a bar whose length is not known.
        batch_progress: of "10/50".
        time: of the time elapsed and remaining.
        processing_speed: of the batches a second.
        metrics: of the values.
        metrics_text_delimiter: between two values.
        metrics_format: how a number is written, as for ``format``.

    Example::

        >>> RichProgressBarTheme(metrics_format=".2e").metrics_format
        '.2e'

    Source of the styles: https://rich.readthedocs.io/en/stable/style.html

    """

    description: Any = ""
    progress_bar: Any = "#6206E0"
    progress_bar_finished: Any = "#6206E0"
    progress_bar_pulse: Any = "#6206E0"
    batch_progress: Any = ""
    time: Any = "dim"
    processing_speed: Any = "dim underline"
    metrics: Any = "italic"
    metrics_text_delimiter: str = " "
    metrics_format: str = ".3f"


class RichProgressBar(DrawnProgressBar):
    """A bar drawn with rich; otherwise it is as TQDMProgressBar.

    It is refreshed by time, at most ten times a second, and shows values that have arrived on the host: it
    never makes the device wait. In a pipe or a file it writes whole lines.

    Args:
        refresh_rate: refreshes a second, at most; 0 for no bar.
        leave: keep the bar of each epoch in the terminal.
        theme: the styles.
        console_kwargs: for ``rich.console.Console``.

    Raises:
        MisconfigurationException: ``refresh_rate`` is out of range.
        ModuleNotFoundError: rich is not installed.

    Example::

        >>> RichProgressBar(refresh_rate=0).is_enabled
        False

    """

    def __init__(
        self,
        refresh_rate: int = 100,
        leave: bool = False,
        theme: RichProgressBarTheme = RichProgressBarTheme(),  # noqa: B008 - the field's signature; never changed
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        need("rich", purpose=_PURPOSE)
        super().__init__()
        if isinstance(refresh_rate, bool) or not isinstance(refresh_rate, int | float) or refresh_rate < 0:
            raise MisconfigurationException(
                f"RichProgressBar(refresh_rate={refresh_rate!r}): use a number of refreshes a second, at least 0."
            )
        self._refresh_rate = refresh_rate
        self._refresh_seconds = max(REFRESH_SECONDS, 1 / refresh_rate) if refresh_rate else math.inf
        self._leave = leave
        self.theme = theme
        self._console_kwargs = console_kwargs or {}
        self._console: Any = None
        self.progress: Any = None
        self._shown: list[RichBar] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "progress": None, "_console": None, "_shown": []}

    @property
    def refresh_rate(self) -> float:
        """Refreshes a second, at most; 0 when off."""
        return self._refresh_rate

    @property
    def is_enabled(self) -> bool:
        """Whether the bar is shown."""
        return self._enabled and self._refresh_rate > 0

    @property
    def train_progress_bar(self) -> Any:
        """The rich task of training."""
        return self._bar("train").task

    @property
    def val_progress_bar(self) -> Any:
        """The rich task of validation."""
        return self._bar("val").task

    @property
    def test_progress_bar(self) -> Any:
        """The rich task of the test."""
        return self._bar("test").task

    @property
    def predict_progress_bar(self) -> Any:
        """The rich task of prediction."""
        return self._bar("predict").task

    @property
    def train_progress_bar_id(self) -> Any:
        """The id of the rich task of training; None where there is none."""
        return getattr(self._train_progress_bar, "id", None)

    @property
    def val_progress_bar_id(self) -> Any:
        """The id of the rich task of validation; None where there is none."""
        return getattr(self._val_progress_bar, "id", None)

    @property
    def test_progress_bar_id(self) -> Any:
        """The id of the rich task of the test; None where there is none."""
        return getattr(self._test_progress_bar, "id", None)

    @property
    def predict_progress_bar_id(self) -> Any:
        """The id of the rich task of prediction; None where there is none."""
        return getattr(self._predict_progress_bar, "id", None)

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        """Return the columns of a bar; override it to change them. The values come after them.

        Args:
            trainer: the Trainer.

        """
        from rich.progress import BarColumn, TextColumn

        from hasten.callbacks.rich_columns import BatchesColumn, SpeedColumn, TimeColumn

        theme = self.theme
        return [
            TextColumn("[progress.description]{task.description}", style=theme.description),
            BarColumn(
                complete_style=theme.progress_bar,
                finished_style=theme.progress_bar_finished,
                pulse_style=theme.progress_bar_pulse,
            ),
            BatchesColumn(theme.batch_progress),
            TimeColumn(theme.time),
            SpeedColumn(theme.processing_speed),
        ]

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return what is shown beside the bar; override it to change that."""
        return super().get_metrics(trainer, pl_module)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bars that are shown."""
        # rich takes over stdout while a bar is shown, and puts whole lines above it.
        print(*args, **{"flush": self.progress is None, **kwargs})

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the terminal in order."""
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the terminal in order: close all bars."""
        super().on_exception(trainer, pl_module, exception)
        self._stop()

    # -- inside

    def _open(self, name: str) -> Any:
        inside = name in ("sanity", "validation") and self.trainer.state.fn == "fit"
        description = getattr(self, f"{'sanity_check' if name == 'sanity' else name}_description")
        if self.is_disabled or not self._start_display():
            from hasten.callbacks.bars import Tqdm

            return Tqdm(
                desc=description,
                disable=self.is_disabled,
                file=None if self._console is None else self._console.file,
                leave=not inside,
                quiet_lines=inside,
            )
        bar = RichBar(self, description, leave=not inside, shows_metrics=name == "train")
        self._shown.append(bar)
        return bar

    def _start_display(self) -> bool:
        """Show the bars from now on; False where they cannot be drawn over themselves."""
        if self.progress is not None:
            return True
        from rich.console import Console
        from rich.progress import Progress

        from hasten.callbacks.rich_columns import MetricsColumn

        if self._console is None:
            self._console = Console(**self._console_kwargs)
        console = self._console
        drawn = installed("ipywidgets") if console.is_jupyter else console.is_terminal
        if not drawn:
            return False
        theme = self.theme
        self.progress = Progress(
            *self.configure_columns(self.trainer),
            MetricsColumn(theme.metrics, theme.metrics_text_delimiter, theme.metrics_format),
            # No thread that draws: the hooks do, when it is time to.
            auto_refresh=False,
            console=console,
        )
        self.progress.start()
        return True

    def _messages_above(self, bar: Any) -> None:
        self._redirected.close()
        if self.progress is not None:
            self._redirected = _log_through_console()

    def _ended(self, bar: RichBar) -> None:
        """Stop the display with its last bar, so that what follows is printed below it."""
        self._shown.remove(bar)
        if not self._shown:
            self._stop()

    def _stop(self) -> None:
        self._redirected.close()
        self._shown.clear()
        if self.progress is not None:
            progress, self.progress = self.progress, None
            progress.stop()

    def _epoch_description(self, trainer: Trainer) -> str:
        last = trainer.max_epochs
        text = super()._epoch_description(trainer)
        text += f"/{last - 1}" if last is not None and last > 0 else ""
        # As wide as the bar of validation, which comes and goes below it.
        return text if self.progress is None else f"{text:{len(self.validation_description)}}"


class RichBar:
    """One bar of a RichProgressBar, with the interface that tqdm's bars have.

    Args:
        owner: whose display it is part of.
        description: the text in front.
        leave: keep it on the screen when it is closed.
        shows_metrics: whether values stand behind it.

    """

    disable = False
    _draws = True

    def __init__(self, owner: RichProgressBar, description: str, *, leave: bool, shows_metrics: bool) -> None:
        self._owner = owner
        self._leave = leave
        self._shows_metrics = shows_metrics
        self._description = description
        self._closed = False
        self.n = 0
        self.total: float | None = None
        self.postfix: Any = None
        self.id = owner.progress.add_task(description, total=None, metrics={}, initial=0, visible=False)

    @property
    def task(self) -> Any:
        """Rich's task of this bar."""
        return next(task for task in self._owner.progress.tasks if task.id == self.id)

    @property
    def initial(self) -> int:
        """Batches done before this bar began to count."""
        return self._initial

    @initial.setter
    def initial(self, batches: int) -> None:
        self._initial = batches
        if batches and self._owner.progress is not None:
            # Anew, or the first refresh would look like a burst.
            self._owner.progress.reset(self.id, total=self.total, completed=batches, initial=batches)

    _initial = 0

    def set_description(self, description: str, refresh: bool = True) -> None:
        """Change the text in front."""
        self._description = description

    def set_postfix(self, metrics: dict[str, Any], refresh: bool = True) -> None:
        """Change the values behind."""
        self.postfix = metrics

    def reset(self, total: float | None = None) -> None:
        """Begin anew, with another total."""
        self.n, self.total, self._initial = 0, convert_inf(total), 0
        progress = self._owner.progress
        if progress is not None:
            progress.reset(self.id, total=self.total, description=self._description, visible=True, initial=0)

    def refresh(self) -> None:
        """Draw."""
        progress = self._owner.progress
        if progress is None or self._closed:
            return
        metrics = self.postfix if self._shows_metrics and self.postfix else {}
        progress.update(
            self.id,
            total=self.total,
            completed=self.n,
            description=self._description,
            metrics=metrics,
            visible=True,
        )
        progress.refresh()

    def write_line(self) -> None:
        """Do nothing: the bar itself is there."""

    def write(self, text: str, **_: Any) -> None:
        """Print above the bars."""
        print(text)

    def close(self) -> None:
        """End the bar."""
        progress = self._owner.progress
        if progress is None or self._closed:
            return
        if self._leave:
            self.refresh()
            progress.stop_task(self.id)
        else:
            progress.remove_task(self.id)
        self._closed = True
        self._owner._ended(self)


def _log_through_console() -> ExitStack:
    """Send log messages that go to the terminal through rich, which puts them above the bars."""
    import logging

    stack = ExitStack()
    # What rich put in the place of the terminal's streams, and knows those.
    for proxy in (sys.stdout, sys.stderr):
        terminal = getattr(proxy, "rich_proxied_file", None)
        for logger in (logging.root, logging.getLogger("hasten")):
            for handler in logger.handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is terminal is not None:
                    stack.callback(handler.setStream, handler.setStream(proxy))
    return stack
