"""ProgressBar, the base of all progress bars, and the default one, which is drawn with tqdm."""

from __future__ import annotations

import functools
import io
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException
from hasten._lib.optional import installed
from hasten._lib.rank_zero import warn_once
from hasten.callbacks import tqdm_bar
from hasten.callbacks.progress_line import ProgressLine, ValidationBar, notebook_line, shown
from hasten.callbacks.tqdm_bar import LINE_INTERVAL_SECONDS as LINE_INTERVAL_SECONDS
from hasten.callbacks.tqdm_bar import Tqdm as Tqdm
from hasten.callbacks.tqdm_bar import is_terminal
from hasten.elsewhere import conventions
from hasten.hooks import use_hooks
from hasten.loggers.base import joined_versions
from hasten.machine.host import in_notebook
from hasten.module.callback import Callback
from hasten.types import RunningStage, TrainerFn

if TYPE_CHECKING:
    from tqdm import tqdm

    from hasten import LightningModule, Trainer
    from hasten.types import Batch, StepOutput

# In Lightning it is a package; ``hasten.extend.moved`` knows its modules.
__path__: list[str] = []

# A bar is drawn at most this often: the eye sees no more, and a step must not pay for it.
REFRESH_SECONDS = 0.1


class ProgressBar(Callback):
    """Base class of progress bars: counts batches and collects the values to show.

    Override the hooks that draw, and ``disable``, ``enable`` and ``print``.

    Example::

        >>> class Percent(ProgressBar):
        ...     def disable(self): pass
        ...     def enable(self): pass
        ...     def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        ...         print(f"{100 * (batch_idx + 1) / self.total_train_batches:.0f} %")

    """

    # Text in front of the bar in each stage; in training before the first epoch.
    sanity_check_description = "Sanity Checking"
    train_description = "Training"
    validation_description = "Validation"
    test_description = "Testing"
    predict_description = "Predicting"

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._current_eval_dataloader_idx: int | None = None

    @property
    def trainer(self) -> Trainer:
        """The Trainer; available from ``setup`` on."""
        if self._trainer is None:
            raise TypeError(f"The `{type(self).__name__}._trainer` reference has not been set yet.")
        return self._trainer

    @property
    def total_train_batches(self) -> float:
        """Batches of this training epoch; ``inf`` when unknown."""
        trainer = self.trainer
        if trainer.max_epochs == -1 and trainer.max_steps is not None and trainer.max_steps > 0:
            return min(trainer.num_training_batches, trainer.max_steps - trainer.global_step)
        return trainer.num_training_batches

    @property
    def total_val_batches(self) -> float:
        """Batches of all validation loaders, 0 in an epoch that does not validate; ``inf`` when unknown."""
        trainer = self.trainer
        every = trainer.check_val_every_n_epoch
        if not trainer.enable_validation or (every is not None and (trainer.current_epoch + 1) % every):
            return 0
        trainer.current_run.data.validation.load()
        return sum(trainer.num_val_batches)

    @property
    def total_val_batches_current_dataloader(self) -> float:
        """Batches of the current validation loader; ``inf`` when unknown."""
        trainer = self.trainer
        batches = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        return self._of_current_loader(batches)

    @property
    def total_test_batches_current_dataloader(self) -> float:
        """Batches of the current test loader; ``inf`` when unknown."""
        return self._of_current_loader(self.trainer.num_test_batches)

    @property
    def total_predict_batches_current_dataloader(self) -> float:
        """Batches of the current prediction loader; ``inf`` when unknown."""
        return self._of_current_loader(self.trainer.num_predict_batches)

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Return whether ``dataloader_idx`` differs from that of the previous call."""
        if self._current_eval_dataloader_idx == dataloader_idx:
            return False
        self._current_eval_dataloader_idx = dataloader_idx
        return True

    def reset_dataloader_idx_tracker(self) -> None:
        """Forget the current loader."""
        self._current_eval_dataloader_idx = None

    def disable(self) -> None:
        """Stop showing the bar; called on all processes but the first."""
        raise NotImplementedError(f"{type(self).__name__} must override disable().")

    def enable(self) -> None:
        """Show the bar again."""
        raise NotImplementedError(f"{type(self).__name__} must override enable().")

    def print(self, *args: object, sep: str = " ", **kwargs: object) -> None:
        """Print without breaking the bar; the arguments are those of Python's ``print``."""
        print(*args, sep=sep, **kwargs)  # type: ignore[call-overload]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep the Trainer; show the bar on the first process only."""
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the values shown beside the bar; override it to change them.

        These are the version of the logger as ``v_num``, and the values logged with ``prog_bar=True`` that have
        arrived on the host; a value of that name replaces the version.
        """
        standard, logged = get_standard_metrics(trainer), trainer.progress_bar_metrics
        for name in standard.keys() & logged.keys():
            warn_once(
                f"progress bar {name}",
                f"The progress bar already tracks a metric with the name(s) {name!r} and `self.log({name!r}, ..., "
                "prog_bar=True)` will overwrite this value.",
                fix="Log it under another name, or override get_metrics().",
            )
        return {**standard, **logged}

    def _of_current_loader(self, batches: float | list[float]) -> float:
        return batches[self._current_eval_dataloader_idx or 0] if isinstance(batches, list) else batches


def get_standard_metrics(trainer: Trainer) -> dict[str, int | str]:
    """Return what every bar shows: the versions of the loggers that have one."""
    version = joined_versions([logger for logger in trainer.loggers if logger.version not in ("", None)])
    if version is None or version == "":
        return {}
    return {"v_num": version[-4:] if isinstance(version, str) else version}


# The bar and the description of each stage of evaluation.
_EVALUATION = {
    RunningStage.SANITY_CHECKING: ("val", "sanity_check"),
    RunningStage.VALIDATING: ("val", "validation"),
    RunningStage.TESTING: ("test", "test"),
    RunningStage.PREDICTING: ("predict", "predict"),
}


def _bar_property(name: str, read: Callable[[DrawnProgressBar], Any], doc: str | None = None) -> Any:
    return property(read, lambda self, bar: self._bars.__setitem__(name, bar), doc=doc)


def bar_of(name: str, stage: str) -> Any:
    """Return the property of the bar of a stage."""
    return _bar_property(name, lambda self: self._public_bar(self._bar(name)), f"The bar of {stage}.")


def _bar_or_none(name: str) -> Any:
    return _bar_property(name, lambda self: self._bars.get(name))


class DrawnProgressBar(ProgressBar):
    """One bar for each stage, refreshed by time; the base of TQDMProgressBar and RichProgressBar.

    Subclasses create bars in ``_open``. A bar has the attributes of tqdm's: ``n``, ``total``, ``initial``,
    ``disable``, ``postfix``, ``set_description``, ``set_postfix``, ``reset``, ``refresh``, ``write``, ``close``.
    """

    # Programs written for Lightning read the count of a bar after each batch it shows; drawn it is by time.
    _counts = False
    # Only every n-th batch is shown; seconds between two refreshes.
    _every = 1
    _refresh_seconds = REFRESH_SECONDS

    train_progress_bar: Any = bar_of("train", "training")
    val_progress_bar: Any = bar_of("val", "validation")
    test_progress_bar: Any = bar_of("test", "the test")
    predict_progress_bar: Any = bar_of("predict", "prediction")
    # The names that subclasses written for Lightning read and set; None without a bar.
    _train_progress_bar: Any = _bar_or_none("train")
    _val_progress_bar: Any = _bar_or_none("val")
    _test_progress_bar: Any = _bar_or_none("test")
    _predict_progress_bar: Any = _bar_or_none("predict")

    def __init__(self) -> None:
        super().__init__()
        self._leave = False
        self._enabled = True
        self._next_refresh = 0.0
        # In a list: setting an attribute of a callback is not free, and this is set each step.
        self._train_batches = [-1]
        self._redirected = ExitStack()
        # "train", "val", "test", "predict", and which of the last three is current.
        self._bars: dict[str, Any] = {}
        self._evaluation = "val"

    def __getstate__(self) -> dict[str, Any]:
        # Bars hold open files and locks.
        return {**vars(self), "_bars": {}, "_redirected": ExitStack()}

    @property
    def is_enabled(self) -> bool:
        """Whether the bar is shown."""
        return self._enabled

    @property
    def is_disabled(self) -> bool:
        """Whether the bar is not shown."""
        return not self.is_enabled

    def disable(self) -> None:
        """Stop showing bars."""
        self._enabled = False
        self._use_batch_hooks()

    def enable(self) -> None:
        """Show bars again."""
        self._enabled = True
        self._use_batch_hooks()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Run hooks after each batch only if the bar is shown."""
        super().setup(trainer, pl_module, stage)
        self._counts = conventions.current().bars_have_counters
        self._use_batch_hooks()

    def _use_batch_hooks(self) -> None:
        stages = ("validation", "test", "predict")
        hooks = [f"on_{stage}_batch_{edge}" for stage in stages for edge in ("start", "end")]
        use_hooks(self, DrawnProgressBar, self.is_enabled, "on_train_batch_end", *hooks)

    def _open(self, name: str) -> Any:
        """Return a new bar: "sanity", "train", "validation", "test" or "predict"."""
        raise NotImplementedError

    def _public_bar(self, bar: Any) -> Any:
        return bar

    def _epoch_description(self, trainer: Trainer) -> str:
        if conventions.current().bars_have_counters:
            return f"Epoch {trainer.current_epoch}"
        return epoch_text(trainer.current_epoch, trainer.max_epochs)

    def _messages_above(self, bar: Any) -> None:
        """Show log messages for the terminal above ``bar`` until ``_redirected`` is closed."""
        self._redirected.close()
        if bar.disable or not draws(bar):
            return
        # Rich has replaced the terminal's streams by proxies.
        terminals = [getattr(stream, "rich_proxied_file", stream) for stream in (sys.stdout, sys.stderr)]
        for handler in (*logging.root.handlers, *logging.getLogger("hasten").handlers):
            if isinstance(handler, logging.StreamHandler) and handler.stream in terminals:
                above = _AboveBar(bar, handler.stream)
                self._redirected.callback(handler.setStream, handler.setStream(above))
        if sys.stderr in terminals and is_terminal(sys.stderr) and not hasattr(sys.stderr, "rich_proxied_file"):
            self._redirected.callback(_put_back, warnings.showwarning, shown := _warns_above(bar, warnings.showwarning))
            warnings.showwarning = shown

    # -- training

    def on_train_start(self, *_: object) -> None:
        """Open the bar of training, and show log messages above it."""
        self._bars["train"] = bar = self._open("train")
        progress = self.trainer.current_run.progress
        if progress.mid_epoch:
            # A run that resumes within an epoch does not call the hook of its beginning.
            self._begin_epoch(self.trainer)
            bar.initial = bar.n = progress.batch
        self._messages_above(bar)

    def on_train_epoch_start(self, trainer: Trainer, *_: object) -> None:
        if self._leave and self._bar("train").n:
            self._bars["train"] = self._open("train")
        self._begin_epoch(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        done, bar = self._train_batches, self._bars.get("train")
        if done[0] < 0 and bar is not None:
            # A resumed epoch starts in the middle: its speed is not counted from batch 0.
            bar.initial = batch_idx
        n = done[0] = batch_idx + 1
        if self._counts and bar is not None and not bar.disable and self._should_update(n, bar.total):
            bar.n = n
        if time.monotonic() >= self._next_refresh and bar is not None and self._should_update(n, bar.total):
            self._refresh(bar, n, self.get_metrics(trainer, pl_module))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        bar = self._bar("train")
        self._show_train_state(trainer, pl_module)
        _write_line(bar)
        if self._leave:
            bar.close()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        bar = self._bar("train")
        if not self._leave and draws(bar) and hasattr(bar, "line_state"):
            self._show_train_state(trainer, pl_module, ended=True)
        bar.close()
        self._redirected.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the terminal in order: close all bars."""
        for bar in self._bars.values():
            bar.close()
        self._redirected.close()

    # -- validation, test, prediction

    def on_sanity_check_start(self, *_: object) -> None:
        self._begin("val", "sanity")

    def on_sanity_check_end(self, *_: object) -> None:
        self._close("val")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._show_train_state(trainer, pl_module)
            self._begin(*_EVALUATION[trainer.state.stage])  # type: ignore[index]

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar; within fit, show the values of validation beside the bar of training."""
        self._close(self._evaluation)
        if self._evaluation == "val" and not trainer.sanity_checking:
            self._show_train_state(trainer, pl_module)
            bar = self._bars.get("train")
            if hasattr(bar, "line_state") and not trainer.is_last_batch:
                _write_line(bar)  # At the end of an epoch there is one anyway.

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.has_dataloader_changed(dataloader_idx):
            bar, name = _EVALUATION[trainer.state.stage]  # type: ignore[index]
            total = getattr(self, f"total_{bar}_batches_current_dataloader")
            description = getattr(self, f"{name}_description")
            _reset(self._bar(bar), total, f"{description} DataLoader {dataloader_idx}")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: StepOutput,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        bar, n = self._bars.get(self._evaluation), batch_idx + 1
        if self._counts and bar is not None and not bar.disable and self._should_update(n, bar.total):
            bar.n = n
        if bar is None or (time.monotonic() < self._next_refresh and n != bar.total):
            return
        if self._should_update(n, bar.total):
            self._refresh(bar, n)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def print(self, *args: object, sep: str = " ", **kwargs: object) -> None:
        """Print above the bars that are shown; the arguments are those of Python's ``print``."""
        # Programs for Lightning replace ``Tqdm.write``.
        written = conventions.current().bars_have_counters
        bars = (bar for bar in self._bars.values() if not bar.disable and (draws(bar) or written))
        shown = next(bars, None)
        if shown is None:
            print(*args, sep=sep, **{"flush": True, **kwargs})  # type: ignore[call-overload]
        else:
            kwargs.pop("flush", None)
            shown.write(sep.join(map(str, args)), **kwargs)

    # -- internal functions

    def _begin_epoch(self, trainer: Trainer) -> None:
        self._train_batches[0] = -1
        _reset(self._bar("train"), self.total_train_batches, self._epoch_description(trainer))

    def _bar(self, name: str) -> Any:
        if name not in self._bars:
            raise TypeError(f"The `{type(self).__name__}._{name}_progress_bar` reference has not been set yet.")
        return self._bars[name]

    def _begin(self, name: str, kind: str) -> None:
        self._evaluation = name
        self._bars[name] = self._open(kind)

    def _close(self, name: str) -> None:
        self._bar(name).close()
        self.reset_dataloader_idx_tracker()

    def _should_update(self, current: int, total: float | None) -> bool:
        return self.is_enabled and (current % self._every == 0 or current == total)

    def _refresh(self, bar: Any, n: int, metrics: dict[str, Any] | None = None) -> None:
        if bar.disable:
            return
        if bar.n != n:
            bar.n = n
        if metrics is not None:
            self._describe(bar, metrics)
        bar.refresh()
        self._next_refresh = time.monotonic() + self._refresh_seconds

    def _describe(self, bar: Any, metrics: dict[str, Any], *, ended: bool = False) -> None:
        """Show the values of ``get_metrics``, and what is known of the fit where a bar has room for it."""
        state, trainer = getattr(bar, "line_state", None), self._trainer
        if state is not None and trainer is not None:
            # It is in the folder's name, and says nothing of the training.
            if "v_num" in metrics and "v_num" not in trainer.current_run.logged.bar_values:
                metrics = {name: value for name, value in metrics.items() if name != "v_num"}
            bar.loss = trainer.current_run.logged.loss_value
            state.values, state.look = metrics, functools.partial(shown, trainer, metrics, ended=ended)
        bar.set_postfix(metrics, refresh=False)

    def _show_train_state(self, trainer: Trainer, pl_module: LightningModule, *, ended: bool = False) -> None:
        bar = self._bars.get("train")
        if bar is not None and not bar.disable and trainer.state.fn is TrainerFn.FITTING:
            if not self._counts:
                bar.n = max(self._train_batches[0], bar.n)
            self._describe(bar, self.get_metrics(trainer, pl_module), ended=ended)
            self._refresh(bar, bar.n)


class _AboveBar(io.TextIOBase):
    """A stream of text whose lines appear above a bar."""

    def __init__(self, bar: Any, stream: object) -> None:
        self._bar, self._stream = bar, stream

    def write(self, text: str) -> int:
        self._bar.write(text, file=self._stream, end="")
        return len(text)


def _warns_above(bar: Any, show: Callable[..., None]) -> Callable[..., None]:
    """Return what shows warnings above a bar, where ``show`` would write behind it."""

    @functools.wraps(show)
    def above(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: str | None = None
    ) -> None:
        if file is None and not bar.disable:
            bar.write(warnings.formatwarning(message, category, filename, lineno, line), file=sys.stderr, end="")
        else:
            show(message, category, filename, lineno, file, line)

    return above


def _put_back(show: Callable[..., None], above: Callable[..., None]) -> None:
    # Unless the program has set another one since.
    if warnings.showwarning is above:
        warnings.showwarning = show


def _reset(bar: Any, total: float | None, description: str) -> None:
    """Set a bar to zero of ``total``."""
    if bar.n and getattr(bar, "leave", False):
        _write_line(bar)  # of the previous loader
    bar.set_description(description, refresh=False)
    bar.postfix = None
    bar.total = convert_inf(total)  # ``reset(None)`` of tqdm keeps the old one
    # Programs replace ``Tqdm`` in this module, some with a Mock, which is not a class.
    bar.reset(*([] if isinstance(bar, tqdm_bar.Tqdm) else [bar.total]))


def epoch_text(current_epoch: int, max_epochs: int | None) -> str:
    """Return what stands in front of the bar of training: the epoch, and how many there are."""
    first = 0 if conventions.current().bars_have_counters else 1
    last = f"/{max_epochs - 1 + first}" if max_epochs is not None and max_epochs > 0 else ""
    return f"Epoch {current_epoch + first}{last}"


def convert_inf(total: float | None) -> float | None:
    """Return None for an unknown length, as tqdm writes it."""
    return total if total is not None and math.isfinite(total) else None


def _write_line(bar: Any) -> None:
    if hasattr(bar, "write_line"):
        bar.write_line()


def draws(bar: object) -> bool:
    """Return whether a bar is drawn over itself, rather than written as lines."""
    return bool(getattr(bar, "_draws", True))


class TQDMProgressBar(DrawnProgressBar):
    """The default bar, drawn with tqdm.

    It is refreshed by time, at most ten times a second, and shows values that have arrived on the host: the device
    never waits for it. To a pipe or a file it writes whole lines: one at the end of each epoch, and one each half
    minute in between. ``TQDM_DISABLE=1`` in the environment switches it off.

    Args:
        refresh_rate: refresh after every n-th batch only; 0 for no bar.
        process_position: leave this many lines above for other bars.
        leave: keep the bar of each epoch in the terminal.

    Raises:
        MisconfigurationException: a number is out of range.

    Example::

        >>> TQDMProgressBar(refresh_rate=0).is_enabled
        False

    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_noinv_fmt}{postfix}]"

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        check.declared(TQDMProgressBar.__init__, locals())
        super().__init__()
        for name, value in (("refresh_rate", refresh_rate), ("process_position", process_position)):
            check.whole("TQDMProgressBar", name, value, at_least=0, error=MisconfigurationException)
        self._refresh_rate = self._every = self._resolve_refresh_rate(refresh_rate)
        self._process_position = process_position
        self._leave = leave

    @staticmethod
    def _resolve_refresh_rate(refresh_rate: int) -> int:
        """Return what the environment makes of it; subclasses of programs for Lightning override it."""
        if os.environ.get("COLAB_GPU") and refresh_rate == 1:
            # Widgets in a browser far away.
            return 20
        minimum = os.environ.get("TQDM_MINITERS", "")
        return max(int(minimum), refresh_rate) if refresh_rate and minimum.isdigit() else refresh_rate

    @property
    def refresh_rate(self) -> int:
        """Batches between two refreshes; 0 when off."""
        return self._refresh_rate

    @property
    def process_position(self) -> int:
        """Lines left above."""
        return self._process_position

    @property
    def is_enabled(self) -> bool:
        """Whether the bar is shown."""
        disabled = os.environ.get("TQDM_DISABLE", "").lower() not in ("", "0", "false", "no", "off")
        return self._enabled and self._refresh_rate > 0 and not disabled

    def on_sanity_check_start(self, *_: object) -> None:
        """Open the bar of the sanity check; that of training is there already, and not shown."""
        self._bars.setdefault("train", Tqdm(disable=True))
        super().on_sanity_check_start()

    # -- the bars; override to change how they look

    def init_sanity_tqdm(self) -> tqdm[Any]:
        """Return the bar of the sanity check."""
        return self._make(self.sanity_check_description, leave=False)

    def init_train_tqdm(self) -> tqdm[Any]:
        """Return the bar of training."""
        options: dict[str, Any] = {"leave": True, "smoothing": 0}
        if conventions.current().bars_have_counters or self.BAR_FORMAT is not TQDMProgressBar.BAR_FORMAT:
            return self._make(self.train_description, **options)
        return self._make(self.train_description, text=ProgressLine, widget=notebook_line, **options)

    def init_predict_tqdm(self) -> tqdm[Any]:
        """Return the bar of prediction."""
        return self._make(self.predict_description, leave=True, smoothing=0)

    def init_validation_tqdm(self) -> tqdm[Any]:
        """Return the bar of validation: within the line of training, below another bar of training, or alone."""
        line, fits = self._bars.get("train"), self.trainer.state.fn is TrainerFn.FITTING
        if fits and line is not None and hasattr(line, "line_state"):
            return ValidationBar(line, self.validation_description.lower())  # type: ignore[return-value]
        inside = self.trainer.state.fn is not TrainerFn.VALIDATING
        return self._make(self.validation_description, leave=not inside, position=int(inside))

    def init_test_tqdm(self) -> tqdm[Any]:
        """Return the bar of the test."""
        return self._make(self.test_description, leave=True)

    def _make(
        self,
        description: str,
        *,
        position: int = 0,
        text: type[Tqdm] | None = None,
        widget: Callable[..., tqdm[Any]] | None = None,
        **options: Any,
    ) -> tqdm[Any]:
        options |= {
            "desc": description,
            "position": 2 * self._process_position + position,
            "disable": self.is_disabled,
            "dynamic_ncols": True,
            "file": sys.stdout,
            "bar_format": self.BAR_FORMAT,
        }
        if in_notebook() and installed("ipywidgets"):
            from tqdm.notebook import tqdm as widgets

            return widgets(**options) if widget is None else widget(**options)
        # Looked up here: programs replace it.
        return (Tqdm if text is None else text)(**options)

    def _open(self, name: str) -> Any:
        return getattr(self, f"init_{name}_tqdm")()
