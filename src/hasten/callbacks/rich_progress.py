"""RichProgressBar: the bar drawn with rich."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException
from hasten._lib.optional import installed, need
from hasten.callbacks.progress import REFRESH_SECONDS, DrawnProgressBar, bar_of, convert_inf, epoch_text
from hasten.callbacks.progress_line import LineState, ProgressLine
from hasten.callbacks.tqdm_bar import Tqdm
from hasten.elsewhere import conventions

if TYPE_CHECKING:
    from rich.progress import ProgressColumn, Task, TaskID
    from rich.style import Style

    from hasten import LightningModule, Trainer


@dataclass
class RichProgressBarTheme:
    """The styles of a RichProgressBar, as rich writes them ("bold red", "#6206E0", a ``rich.style.Style``).

    Args:
        description: of "Epoch 1" and the like.
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

    description: str | Style = ""
    progress_bar: str | Style = "#6206E0"
    progress_bar_finished: str | Style = "#6206E0"
    progress_bar_pulse: str | Style = "#6206E0"
    batch_progress: str | Style = ""
    time: str | Style = "dim"
    processing_speed: str | Style = "dim underline"
    metrics: str | Style = "italic"
    metrics_text_delimiter: str = " "
    metrics_format: str = ".3f"


def _task_id(name: str, stage: str) -> Any:
    def show_task(self: RichProgressBar, task_id: TaskID | None) -> None:
        if task_id is not None and isinstance(bar := self._bars.get(name), RichBar):
            bar.show_task(task_id)

    return property(
        lambda self: getattr(self._bars.get(name), "id", None),
        show_task,
        doc=f"The id of the rich task of {stage}; None if there is none. Set it to show a task of your own.",
    )


class RichProgressBar(DrawnProgressBar):
    """A bar drawn with rich; see ``TQDMProgressBar`` for when it is refreshed and what it shows.

    Args:
        refresh_rate: refreshes a second, at most; 0 for no bar.
        leave: keep the bar of each epoch in the terminal.
        theme: the styles.
        console_kwargs: for ``rich.reconfigure``, which changes the console of ``rich.print``.

    Raises:
        MisconfigurationException: ``refresh_rate`` is out of range.
        ModuleNotFoundError: rich is not installed.

    Example::

        >>> RichProgressBar(refresh_rate=0).is_enabled
        False

    """

    train_progress_bar_id: Any = _task_id("train", "training")
    # The sanity check has the bar of validation.
    val_sanity_progress_bar_id: Any = _task_id("val", "the sanity check")
    val_sanity_check_bar: Any = bar_of("val", "the sanity check")
    val_progress_bar_id: Any = _task_id("val", "validation")
    test_progress_bar_id: Any = _task_id("test", "the test")
    predict_progress_bar_id: Any = _task_id("predict", "prediction")

    def __init__(
        self,
        refresh_rate: float = 100,
        leave: bool = False,
        theme: RichProgressBarTheme = RichProgressBarTheme(),  # noqa: B008 - never changed
        console_kwargs: dict[str, Any] | None = None,
    ) -> None:
        check.declared(RichProgressBar.__init__, locals())
        need("rich.progress", purpose="RichProgressBar()")
        super().__init__()
        unit, error = "refreshes a second", MisconfigurationException
        check.number("RichProgressBar", "refresh_rate", refresh_rate, at_least=0, unit=unit, error=error)
        self._refresh_rate = refresh_rate
        self._refresh_seconds = max(REFRESH_SECONDS, 1 / refresh_rate) if refresh_rate else math.inf
        self._leave = leave
        self.theme = theme
        self._console_kwargs = console_kwargs or {}
        self._console: Any = None
        # Rich's display of the bars; the last one stays when it has ended.
        self.progress: Any = None
        self._progress_stopped = True
        self._shown: list[RichBar] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "progress": None, "_progress_stopped": True, "_console": None, "_shown": []}

    @property
    def refresh_rate(self) -> float:
        """Refreshes a second, at most; 0 when off."""
        return self._refresh_rate

    @property
    def is_enabled(self) -> bool:
        """Whether the bar is shown."""
        return self._enabled and self._refresh_rate > 0

    def configure_columns(self, trainer: Trainer) -> list[str | ProgressColumn]:
        """Return the columns of a bar, before the values; override it to change them.

        Args:
            trainer: the Trainer whose run is shown.

        Returns:
            columns of rich, or strings with the fields of a ``rich.progress.Task``.

        Example::

            >>> class Short(RichProgressBar):
            ...     def configure_columns(self, trainer):
            ...         return ["{task.description}", "{task.completed}/{task.total}"]

        Source of the columns: https://rich.readthedocs.io/en/stable/progress.html#columns

        """
        from rich.progress import BarColumn, TextColumn

        theme = self.theme
        return [
            TextColumn("[progress.description]{task.description}", style=theme.description),
            BarColumn(
                complete_style=theme.progress_bar,
                finished_style=theme.progress_bar_finished,
                pulse_style=theme.progress_bar_pulse,
            ),
            _column(theme.batch_progress, batches_text),
            _column(theme.time, time_text),
            _column(theme.processing_speed, speed_text),
        ]

    def print(self, *args: object, sep: str = " ", **kwargs: object) -> None:
        """Print above the bars that are shown; the arguments are the same as of Python's ``print``."""
        # rich replaces stdout while a bar is shown, and puts whole lines above it.
        print(*args, sep=sep, **{"flush": self._progress_stopped, **kwargs})  # type: ignore[call-overload]

    def refresh(self, hard: bool = False) -> None:
        """Draw what has changed, if it is time or ``hard``."""
        if self.progress is not None and (hard or time.monotonic() >= self._next_refresh):
            self.progress.refresh()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop_progress()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close all bars, so that the terminal is usable."""
        super().on_exception(trainer, pl_module, exception)
        self._stop_progress()

    # -- internal functions

    def _public_bar(self, bar: Any) -> Any:
        return getattr(bar, "task", None)

    def _open(self, name: str) -> Any:
        inside = name in ("sanity", "validation") and self.trainer.state.fn == "fit"
        description = getattr(self, f"{'sanity_check' if name == 'sanity' else name}_description")
        shows_fit = name == "train" and not conventions.current().bars_have_counters
        if not self.is_disabled and self._progress_stopped:
            self._start_display()
        if self.is_disabled or self._progress_stopped:
            return Tqdm(desc=description, disable=True)
        line: Tqdm | None = None
        if self.progress.disable:
            kind = ProgressLine if shows_fit else Tqdm
            line = kind(desc=description, file=self._console.file, leave=not inside)
        bar = RichBar(self, description, leave=not inside, shows_fit=shows_fit, line=line)
        self._shown.append(bar)
        return bar

    def _start_display(self) -> None:
        """Start showing bars."""
        from rich import get_console, reconfigure

        # The console of ``rich.print``: on another one, what programs print with rich would overwrite the bar.
        if self._console_kwargs:
            reconfigure(**self._console_kwargs)
        self._console = get_console()
        if not hasattr(self._console, "_live_stack"):
            # Before rich 14.1 a console has one display only, and a second one is an error.
            self._console.clear_live()
        self._init_progress(self.trainer)
        self._progress_stopped = self.progress is None

    def _init_progress(self, trainer: Trainer) -> None:
        """Make ``progress`` and start it; subclasses of programs for Lightning override it."""
        from rich.progress import Progress

        theme, console = self.theme, self._console
        self.progress = Progress(
            *self.configure_columns(trainer),
            _column(theme.metrics, lambda task: metrics_text(task, theme.metrics_text_delimiter, theme.metrics_format)),
            # rich's drawing thread is off: the hooks draw when it is time.
            auto_refresh=False,
            console=console,
            # If bars cannot be redrawn in place, lines are written.
            disable=not (installed("ipywidgets") if console.is_jupyter else console.is_terminal),
        )
        self.progress.start()

    # What subclasses of programs for Lightning call.

    def _reset_progress_bar_ids(self) -> None:
        """Do nothing: the ids belong to the bars that are shown."""

    def _add_task(self, total_batches: float, description: str, visible: bool = True) -> TaskID:
        fields = {"metrics": {}, "initial": 0}
        task_id: TaskID = self.progress.add_task(
            description, total=convert_inf(total_batches), visible=visible, **fields
        )
        return task_id

    def _update(self, progress_bar_id: TaskID | None, current: int, visible: bool = True, hard: bool = False) -> None:
        if self.progress is None or self.is_disabled or progress_bar_id is None:
            return
        for bar in self._shown:
            if bar.id == progress_bar_id:
                bar.n = current
        self.progress.update(progress_bar_id, completed=current, visible=visible)
        self.refresh(hard=hard)

    def _update_metrics(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show_train_state(trainer, pl_module)

    def _ended(self, bar: RichBar) -> None:
        """Stop the display with its last bar, so that later output is printed below it."""
        self._shown.remove(bar)
        if not self._shown:
            self._stop_progress()

    def _stop_progress(self) -> None:
        self._redirected.close()
        self._shown.clear()
        if not self._progress_stopped:
            self._progress_stopped = True
            if not self.progress.disable:
                self.progress.stop()

    def _epoch_description(self, trainer: Trainer) -> str:
        return self._get_train_description(trainer.current_epoch)

    def _get_train_description(self, current_epoch: int) -> str:
        """Return the text in front of the bar of training; subclasses of programs for Lightning override it."""
        text = epoch_text(current_epoch, self.trainer.max_epochs)
        # As wide as the bar of validation, which comes and goes below it.
        return text if self._progress_stopped or self.progress.disable else f"{text:{len(self.validation_description)}}"


class RichBar:
    """One bar of a RichProgressBar, with the interface of tqdm's bars.

    ``shows_fit`` says whether it shows what is known of the fit. ``line`` writes the bar as lines, where the output
    cannot be redrawn in place.
    """

    disable = False

    def __init__(
        self,
        owner: RichProgressBar,
        description: str,
        *,
        leave: bool,
        shows_fit: bool = False,
        line: Tqdm | None = None,
    ) -> None:
        self._owner = owner
        self.leave = leave
        self._description = description
        self._initial = self.n = 0
        self.total: float | None = None
        self.postfix: Any = None
        self._line = line
        self._draws = line is None
        if shows_fit:
            self.line_state = line.line_state if isinstance(line, ProgressLine) else LineState()
        # None where rich has it no longer.
        self.id: Any = owner.progress.add_task(description, total=None, metrics={}, initial=0, visible=False)

    @property
    def _progress(self) -> Any:
        """Rich's display; None when it or this bar has ended."""
        return self._owner.progress if self in self._owner._shown else None

    @property
    def task(self) -> Task:
        """Rich's task of this bar."""
        tasks: list[Task] = self._owner.progress.tasks
        return next(task for task in tasks if task.id == self.id)

    def show_task(self, task_id: TaskID) -> None:
        """Show another task of rich instead."""
        self.id = task_id
        self.n, self.total, self._description = int(self.task.completed), self.task.total, self.task.description

    @property
    def initial(self) -> int:
        """Batches done before this bar started to count."""
        return self._initial

    @initial.setter
    def initial(self, batches: int) -> None:
        self._initial = batches
        if self._line is not None:
            self._line.initial = batches
        if batches and self._progress is not None:
            # Reset, or the first refresh would look like a burst.
            self._progress.reset(self.id, total=self.total, completed=batches, initial=batches)

    def set_description(self, description: str, refresh: bool = True) -> None:
        """Change the text in front."""
        self._description = description
        if self._line is not None:
            self._line.set_description(description, refresh=False)

    def set_postfix(self, metrics: dict[str, Any], refresh: bool = True) -> None:
        """Change the values behind."""
        self.postfix = metrics
        if self._line is not None:
            self._line.set_postfix(metrics, refresh=False)

    def reset(self, total: float | None = None) -> None:
        """Start again at 0, with another total."""
        self.n, self.total, self._initial = 0, convert_inf(total), 0
        if self._progress is not None:
            self._progress.reset(self.id, total=self.total, description=self._description, visible=True, initial=0)
        if (line := self._counted_line()) is not None:
            if self.postfix is None:
                line.postfix = None
            line.reset()

    def refresh(self) -> None:
        """Draw, or write a line if one is due."""
        if self._progress is not None:
            self._draw(self._progress)
        if (line := self._counted_line()) is not None:
            line.refresh()

    def _draw(self, progress: Any) -> None:
        progress.update(
            self.id,
            total=self.total,
            completed=self.n,
            description=self._description,
            metrics=self.postfix or {},
            shown=self.line_state.look() if self._draws and hasattr(self, "line_state") else None,
            visible=True,
        )
        progress.refresh()

    def _counted_line(self) -> Tqdm | None:
        """Return the bar that writes lines, with the count of this one; None where rich draws."""
        if self._line is not None:
            self._line.n, self._line.total = self.n, self.total
        return self._line

    def write_line(self) -> None:
        """Write the state as a line, where lines are written."""
        if (line := self._counted_line()) is not None:
            line.write_line()

    def write(self, text: str, *, end: str = "\n", **_: object) -> None:
        """Print above the bars."""
        print(text, end=end)

    def close(self) -> None:
        """End the bar."""
        if (line := self._counted_line()) is not None:
            line.close()
        progress = self._progress
        if progress is None:
            return
        if self.leave:
            self._draw(progress)
            progress.stop_task(self.id)
        else:
            progress.remove_task(self.id)
            self.id = None
        self._owner._ended(self)


# -- columns


def _column(style: str | Style, text: Callable[[Task], str]) -> Any:
    """Return a column of rich that shows ``text(task)``."""
    from rich.progress import ProgressColumn
    from rich.text import Text

    class Column(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(text(task), style=style, justify="left")

    return Column()


def batches_text(task: Task) -> str:
    """Return the batches of a bar, done and in all."""
    total = "--" if task.total is None else str(int(task.total))
    return f"{int(task.completed)}/{total}"


def time_text(task: Task) -> str:
    """Return the time of a bar, elapsed and remaining."""
    elapsed = task.finished_time if task.finished else task.elapsed
    if (about := task.fields.get("shown")) is not None and about.left:
        begun = "-:--:--" if elapsed is None else str(timedelta(seconds=int(elapsed)))
        return f"{begun} • {about.left}"
    times = (
        "-:--:--" if seconds is None else str(timedelta(seconds=int(seconds)))
        for seconds in (elapsed, task.time_remaining)
    )
    return " • ".join(times)


def speed_text(task: Task) -> str:
    """Return the batches a second of a bar."""
    if (about := task.fields.get("shown")) is not None and about.speed:
        return str(about.speed)
    speed = task.finished_speed or task.speed
    if speed is None and task.elapsed:
        speed = (task.completed - task.fields.get("initial", 0)) / task.elapsed
    return f"{speed or 0:.2f}it/s"


def metrics_text(task: Task, delimiter: str, number_format: str) -> str:
    """Return the values of a bar."""
    texts, about = [], task.fields.get("shown")
    values = dict(task.fields.get("metrics", {}))
    if about is not None and about.loss is not None:
        values = {"loss": about.loss, **values}
    for name, value in values.items():
        text = str(value)
        # Whole numbers, such as the logger's version, stay whole.
        if not isinstance(value, str | int):
            try:
                text = format(value, number_format)
            except (TypeError, ValueError):  # not a number, or of another kind
                pass
        texts.append(f"{name}: {text}")
    if about is not None:
        texts += [text for text in (about.waiting, about.memory) if text]
    return delimiter.join(texts)
