"""The line that shows a fit: what it says, and how it fits into a terminal, a pipe or a notebook."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tqdm.std import Bar  # type: ignore[attr-defined]
from tqdm.utils import disp_len, disp_trim

from hasten.callbacks.tqdm_bar import Tqdm
from hasten.record.pace import time_text

if TYPE_CHECKING:
    from tqdm import tqdm

    from hasten.loops.run import Run
    from hasten.record.pace import Pace, Speed
    from hasten.trainer import Trainer

# Waiting for data is shown above this share of the time.
WAITING_IS_SHOWN = 0.05
_SHORTEST_BAR, _LONGEST_BAR = 8, 40
# Where a notebook shows text, which has no width.
_NOTEBOOK_COLUMNS = 110
# In a pipe: the first line, the others at first, and later in a share of the time until then, at most.
_FIRST_LINE_SECONDS = 5.0
_LINE_SECONDS = 30.0
_LINE_SHARE = 0.05
_LONGEST_LINE_SECONDS = 600.0
# A value with such a name is the loss, which is shown anyway.
_LOSS = re.compile(r"(train(ing)?[/_.-]?)?loss([/_.-]?step)?", re.IGNORECASE)


@dataclass(frozen=True)
class Shown:
    """What is known about a fit besides the values that the program logs; empty texts are not shown."""

    # Batches after which an optimizer stepped, with the number of optimizer steps where that is the limit.
    step: str = ""
    loss: float | None = None  # Of training; None if a logged value shows it, or it has not arrived.
    speed: str = ""  # Samples, tokens or batches a second.
    waiting: str = ""  # The share of the time in which training waits for data, where it matters.
    memory: str = ""  # The most memory that the device held.
    left: str = ""  # The time to the end of the fit; or since its beginning, where no end is known.
    slowest: str = ""  # The process that all others wait for, where it matters.


def shown(trainer: Trainer, values: dict[str, Any], *, ended: bool = False) -> Shown:
    """Return what is known about the fit of a Trainer; nothing waits for the device."""
    run = trainer.current_run
    pace = run.observers.pace
    if not pace.measures:
        return Shown()
    speed, memory = pace.speed(), pace.memory_bytes()
    return Shown(
        step=_step_text(run),
        loss=None if any(map(_LOSS.fullmatch, values)) else run.logged.loss_value,
        speed="" if speed is None else _rate_text(speed),
        waiting="" if speed is None else _waiting_text(speed),
        slowest=_slowest_text(pace),
        memory="" if memory is None else f"GPU {memory / 1e9:.1f} GB",
        left="" if speed is None and not ended else _until_text(pace, ended=ended),
    )


def _step_text(run: Run) -> str:
    # As loggers count them: two optimizers that step for one batch are one step.
    steps, stepped, most = run.progress.logged_step, run.progress.global_step, run.limits.max_steps
    if math.isinf(most):
        return f"step {steps}"
    return f"step {steps}/{int(most)}" if steps == stepped else f"step {steps}  optimizer steps {stepped}/{int(most)}"


def _rate_text(speed: Speed) -> str:
    if speed.tokens is not None:
        return f"{rounded(speed.tokens)} tokens/s"
    if speed.samples is not None:
        return f"{rounded(speed.samples)} samples/s"
    return f"{rounded(speed.batches)} it/s"


def _waiting_text(speed: Speed) -> str:
    matters = speed.waiting is not None and speed.waiting > WAITING_IS_SHOWN
    return f"data wait {100 * (speed.waiting or 0.0):.0f}%" if matters else ""


def _slowest_text(pace: Pace) -> str:
    last = pace.slowest
    return f"rank {last.rank} {last.ratio:.1f}x" if last is not None and last.is_slow else ""


def _until_text(pace: Pace, *, ended: bool) -> str:
    if ended:
        return f"took {time_text(pace.seconds)}"
    left = pace.seconds_left()
    return f"{time_text(pace.seconds)} so far" if left is None else f"{time_text(left)} left"


def rounded(number: float) -> str:
    """Return a rate with three digits.

    Example::

        >>> rounded(3.14159), rounded(842), rounded(16_000), rounded(2_500_000)
        ('3.14', '842', '16.0k', '2.50M')

    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")):
        if number >= 0.9995 * limit or not unit:
            number /= limit
            return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f}{unit}"
    raise AssertionError


def value_text(value: object) -> str:
    """Return a logged value with about four digits, in a width that hardly changes; others as they are.

    Example::

        >>> value_text(0.25), value_text(0.012345), value_text(2.30258), value_text(399.0), value_text(12345.6)
        ('0.250', '0.0123', '2.303', '399.0', '12346')
        >>> value_text(1.5e-6), value_text(float("nan")), value_text(7), value_text("text")
        ('1.50e-06', 'nan', '7', 'text')

    """
    if not isinstance(value, float) or not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size and not 1e-3 <= size < 1e6:
        return f"{value:.2e}"
    return f"{value:.{0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 4 if 0 < size < 0.1 else 3}f}"


def _fields(values: dict[str, str], about: Shown) -> list[tuple[float, str]]:
    """Return (how much it matters, text) of all that is known, in the order in which it is shown."""
    loss = "" if about.loss is None else f"loss={value_text(about.loss)}"
    fields: list[tuple[float, str]] = [(1, about.step), (9, loss)]
    texts = [f"{name}={text}" for name, text in values.items()]
    # Of many values, the first matters more than why it is slow.
    fields += [(7 - index / len(texts) if index else 8.5, text) for index, text in enumerate(texts)]
    fields += [(5, about.speed), (8, about.waiting), (7.5, about.slowest), (0, about.memory), (10, about.left)]
    return [(matters, text) for matters, text in fields if text]


def line_text(
    label: str,
    n: int,
    total: float | None,
    values: dict[str, str],
    about: Shown,
    *,
    columns: int | None = None,
    charset: str = Bar.UTF,
    bar: str | None = None,
) -> str:
    """Return the line that shows the progress, such as "Epoch 1/9"; a long one loses its least important parts.

    Without ``columns``, those of the terminal, it says all there is, without a bar. The bar is drawn of the
    ``charset``, or ``bar`` stands for it, where something else draws it.

    Example::

        >>> about = Shown(step="step 412", loss=0.48211, speed="13.2k samples/s", left="4:12 left")
        >>> line_text("Epoch 1/9", 412, 1000, {"acc": "0.871"}, about)
        'Epoch 1/9:  41%  412/1000  step 412  loss=0.482  acc=0.871  13.2k samples/s  4:12 left'
        >>> line_text("Epoch 1/9", 412, 1000, {"acc": "0.871"}, about, columns=60, charset=" #")
        'Epoch 1/9:  41%|###      |  412/1000  loss=0.482  4:12 left'

    """
    fields = _fields(values, about)
    share = None if not total else min(1.0, n / total)
    count = f"{n:{len(f'{total:.0f}')}}/{total:.0f}" if total else f"{n}it"
    head = f"{label}: {100 * share:3.0f}%" if share is not None else f"{label}:"

    def joined() -> str:
        return "  ".join([count, *(text for _, text in fields)])

    if columns is None:
        return f"{head} {joined()}" if bar is None else f"{head}{bar}{joined()}"
    room = columns - 1 - disp_len(head) - (3 if share is not None else 1)
    shortest = 0 if share is None else _SHORTEST_BAR
    while fields and disp_len(joined()) + shortest > room:
        fields.remove(min(fields))
    text, left = joined(), room - disp_len(joined())
    if share is None or left < _SHORTEST_BAR:
        return str(disp_trim(f"{head} {text}", columns - 1))
    return f"{head}|{Bar(share, min(left, _LONGEST_BAR), charset)}| {text}"


class ProgressLine(Tqdm):
    """The bar of training: a line that says more, and shows validation too; with the arguments of ``tqdm``."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.line_state = LineState()
        self._began = time.monotonic()
        super().__init__(*args, **kwargs)
        self._next_line = self._began + _FIRST_LINE_SECONDS

    def set_postfix(
        self, ordered_dict: Mapping[str, object] | None = None, refresh: bool | None = True, **kwargs: object
    ) -> None:
        """Change the values."""
        self.line_state.values = {**(ordered_dict or {}), **kwargs}
        super().set_postfix(ordered_dict, refresh, **kwargs)

    def __str__(self) -> str:
        """Return the line as wide as the terminal."""
        shape: Any = self.dynamic_ncols  # A function that returns columns and rows, once it is on.
        columns = shape(self.fp)[0] if shape else self.ncols
        charset = Bar.ASCII if self.ascii is True else self.ascii or Bar.UTF
        return self.line_state.text(self, columns=columns or _NOTEBOOK_COLUMNS, charset=charset)

    def as_line(self) -> str:
        return self.line_state.text(self)

    def next_line_after(self, now: float) -> float:
        return now + min(_LONGEST_LINE_SECONDS, max(_LINE_SECONDS, _LINE_SHARE * (now - self._began)))


@dataclass
class LineState:
    """What a line shows besides its bar."""

    values: dict[str, Any] = field(default_factory=dict)
    # Returns what is known besides; called when the line is drawn.
    look: Callable[[], Shown] = Shown
    # The bar of the validation that goes on.
    validation: ValidationBar | None = None

    def text(
        self, line: tqdm[Any], *, columns: int | None = None, charset: str = Bar.UTF, bar: str | None = None
    ) -> str:
        """Return the text of ``line``; see ``line_text``."""
        label = (line.desc or "").removesuffix(": ")
        counted: Any = line if self.validation is None else self.validation
        if self.validation is not None:
            label += f" {self.validation.label}"
        values = {name: value_text(value).strip() for name, value in self.values.items()}
        return line_text(
            label, counted.n, counted.total, values, self.look(), columns=columns, charset=charset, bar=bar
        )


class ValidationBar:
    """The bar of validation within a fit: a part of the ``line`` of training, with the interface of tqdm's bars."""

    def __init__(self, line: tqdm[Any], label: str) -> None:
        # A ProgressLine, or its widget.
        shows: Any = line
        self._line, self._label = shows, label
        self.label = label
        self.n = self.initial = 0
        self.total: float | None = None
        self.postfix: Any = None
        shows.line_state.validation = self

    @property
    def disable(self) -> bool:
        """Whether nothing is shown."""
        return bool(self._line.disable)

    def set_description(self, description: str, refresh: bool = True) -> None:
        """Take the number of the loader from the description, where there are several."""
        number = re.search(r"DataLoader ([1-9]\d*)$", description)
        self.label = self._label if number is None else f"{self._label} {number[1]}"

    set_description_str = set_description

    def set_postfix(self, metrics: object = None, refresh: bool = True, **values: object) -> None:
        """Do nothing: the values are shown when the validation is over."""

    set_postfix_str = set_postfix

    def update(self, n: int = 1) -> None:
        """Count batches, and draw."""
        self.n += n
        self.refresh()

    def clear(self) -> None:
        """Do nothing: the line stays."""

    def reset(self, total: float | None = None) -> None:
        """Start again at 0."""
        self.n = 0
        self.refresh()

    def refresh(self) -> None:
        """Draw."""
        self._line.refresh()

    def write(self, text: str, *, file: Any = None, end: str = "\n") -> None:
        """Print above the line."""
        self._line.write(text, file=file, end=end)

    def close(self) -> None:
        """Show training again."""
        self._line.line_state.validation = None


def notebook_line(**options: object) -> Any:
    """Return the bar of training as a widget."""
    from tqdm.notebook import tqdm as widgets

    class NotebookLine(widgets):  # type: ignore[type-arg]
        """The widget of tqdm, with the text of a ProgressLine on its right."""

        def __init__(self, **options: object) -> None:
            self.line_state = LineState()
            super().__init__(**options)  # type: ignore[call-overload]

        def set_postfix(
            self, ordered_dict: Mapping[str, object] | None = None, refresh: bool | None = True, **kwargs: object
        ) -> None:
            self.line_state.values = {**(ordered_dict or {}), **kwargs}
            super().set_postfix(ordered_dict, refresh, **kwargs)

        def display(self, msg: str | None = None, *args: Any, **kwargs: Any) -> None:
            if msg is None and not kwargs.get("close"):
                msg = self.line_state.text(self, bar="<bar/>")
            super().display(msg, *args, **kwargs)
            counted = self if self.line_state.validation is None else self.line_state.validation
            self.container.children[1].max = counted.total or 1
            self.container.children[1].value = counted.n

    return NotebookLine(**options)
