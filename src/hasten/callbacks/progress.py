"""ProgressBar, the base of all progress bars, and the schedule that the bars of tqdm and rich share."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from hasten._lib.rank_zero import warn_once
from hasten.callbacks.unused_hooks import disable_hooks, enable_hooks
from hasten.loops.progress import RunningStage, TrainerFn
from hasten.module.callback import Callback

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer
    from hasten.types import Batch, StepOutput

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
        before, self._current_eval_dataloader_idx = self._current_eval_dataloader_idx, dataloader_idx
        return before != dataloader_idx

    def reset_dataloader_idx_tracker(self) -> None:
        """Forget the current loader."""
        self._current_eval_dataloader_idx = None

    def disable(self) -> None:
        """Stop showing the bar; called on all processes but the first."""
        raise NotImplementedError(f"{type(self).__name__} must override disable().")

    def enable(self) -> None:
        """Show the bar again."""
        raise NotImplementedError(f"{type(self).__name__} must override enable().")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print without breaking the bar."""
        print(*args, **kwargs)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep the Trainer; show the bar on the first process only."""
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Return the values shown beside the bar; override it to change them.

        These are the values logged with ``prog_bar=True`` that have arrived on the host, and the version of
        the logger as ``v_num``.
        """
        standard = get_standard_metrics(trainer)
        logged = trainer.progress_bar_metrics
        for name in standard.keys() & logged.keys():
            warn_once(
                f"progress bar {name}",
                f"The progress bar shows {name!r} by itself, and self.log({name!r}, ..., prog_bar=True) replaces it. "
                "Choose another name, or override get_metrics().",
            )
        return {**standard, **logged}

    def _of_current_loader(self, batches: float | list[float]) -> float:
        return batches[self._current_eval_dataloader_idx or 0] if isinstance(batches, list) else batches


def get_standard_metrics(trainer: Trainer) -> dict[str, int | str]:
    """Return what every bar shows: the version of the first logger that has one."""
    version = next((logger.version for logger in trainer.loggers if logger.version not in ("", None)), None)
    if version is None:
        return {}
    return {"v_num": version[-4:] if isinstance(version, str) else version}


# The bar, and the name of the description, of each stage of evaluation.
_EVALUATION = {
    RunningStage.SANITY_CHECKING: ("val", "sanity_check"),
    RunningStage.VALIDATING: ("val", "validation"),
    RunningStage.TESTING: ("test", "test"),
    RunningStage.PREDICTING: ("predict", "predict"),
}


def _bar_of(name: str, stage: str) -> Any:
    """Return a property for the bar of a stage."""
    attribute = f"_{name}_progress_bar"
    return property(
        lambda self: self._public_bar(self._bar(name)),
        lambda self, bar: setattr(self, attribute, bar),
        doc=f"The bar of {stage}.",
    )


class DrawnProgressBar(ProgressBar):
    """One bar for each stage, refreshed by time; the base of TQDMProgressBar and RichProgressBar.

    Subclasses create bars in ``_open``. A bar has the attributes of tqdm's: ``n``, ``total``, ``initial``,
    ``disable``, ``postfix``, ``set_description``, ``set_postfix``, ``reset``, ``refresh``, ``write``, ``close``.
    """

    # Only every n-th batch is shown; seconds between two refreshes.
    _every = 1
    _refresh_seconds = REFRESH_SECONDS

    train_progress_bar: Any = _bar_of("train", "training")
    val_progress_bar: Any = _bar_of("val", "validation")
    test_progress_bar: Any = _bar_of("test", "the test")
    predict_progress_bar: Any = _bar_of("predict", "prediction")

    def __init__(self) -> None:
        super().__init__()
        self._leave = False
        self._enabled = True
        self._next_refresh = 0.0
        # In a list: setting an attribute of a callback is not free, and this is set each step.
        self._train_batches = [-1]
        self._redirected = ExitStack()
        self._train_progress_bar: Any = None
        self._val_progress_bar: Any = None
        self._test_progress_bar: Any = None
        self._predict_progress_bar: Any = None
        # The attribute with the bar of the current validation, test or prediction.
        self._evaluation = "_val_progress_bar"

    def __getstate__(self) -> dict[str, Any]:
        # Bars hold open files and locks.
        state = {
            name: None if name.endswith("_progress_bar") else value for name, value in vars(self).items()
        }
        del state["_redirected"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _redirected=ExitStack())

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
        self._enable_batch_hooks()

    def enable(self) -> None:
        """Show bars again."""
        self._enabled = True
        self._enable_batch_hooks()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Run hooks after each batch only if the bar is shown."""
        super().setup(trainer, pl_module, stage)
        self._enable_batch_hooks()

    def _open(self, name: str) -> Any:
        """Return a new bar: "sanity", "train", "validation", "test" or "predict"."""
        raise NotImplementedError

    def _public_bar(self, bar: Any) -> Any:
        return bar

    def _epoch_description(self, trainer: Trainer) -> str:
        return f"Epoch {trainer.current_epoch}"

    def _messages_above(self, bar: Any) -> None:
        """Show log messages above ``bar`` until ``_redirected`` is closed."""

    # -- training

    def on_train_start(self, *_: object) -> None:
        """Open the bar of training, and show log messages above it."""
        self._train_progress_bar = self._open("train")
        self._messages_above(self._bar("train"))

    def on_train_epoch_start(self, trainer: Trainer, *_: object) -> None:
        """Reset the bar for an epoch."""
        if self._leave and self._bar("train").n:
            self._train_progress_bar = self._open("train")
        self._train_batches[0] = -1
        _reset(self._bar("train"), self.total_train_batches, self._epoch_description(trainer))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: StepOutput, batch: Batch, batch_idx: int
    ) -> None:
        """Refresh the bar, if it is time to."""
        done = self._train_batches
        if done[0] < 0 and self._train_progress_bar is not None:
            # A resumed epoch starts in the middle: its speed is not counted from batch 0.
            self._train_progress_bar.initial = batch_idx
        n = done[0] = batch_idx + 1
        if time.monotonic() < self._next_refresh:
            return
        bar = self._train_progress_bar
        if bar is not None and self._should_update(n, bar.total):
            self._refresh(bar, n, self.get_metrics(trainer, pl_module))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the epoch's last state."""
        bar = self._bar("train")
        if not bar.disable:
            self._refresh(bar, max(self._train_batches[0], bar.n), self.get_metrics(trainer, pl_module))
            _write_line(bar)
        if self._leave:
            bar.close()

    def on_train_end(self, *_: object) -> None:
        self._bar("train").close()
        self._redirected.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the terminal in order: close all bars."""
        for bar in self._bars():
            bar.close()
        self._redirected.close()

    # -- validation, test, prediction

    def on_sanity_check_start(self, *_: object) -> None:
        self._begin("val", "sanity")

    def on_sanity_check_end(self, *_: object) -> None:
        self._close("val")
        self._val_progress_bar = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the bar of validation."""
        if not trainer.sanity_checking:
            self._show_train_state(trainer, pl_module)
            self._begin("val", "validation")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close the bar of validation, and show its values beside that of training."""
        self._close("val")
        if not trainer.sanity_checking:
            self._val_progress_bar = None
            self._show_train_state(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin("test", "test")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close("test")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin("predict", "predict")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close("predict")

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Batch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Reset the bar for another loader."""
        if self.has_dataloader_changed(dataloader_idx):
            stage = trainer.state.stage
            assert stage is not None
            bar, name = _EVALUATION[stage]
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
        """Refresh the bar, if it is time to."""
        bar, n = getattr(self, self._evaluation), batch_idx + 1
        if bar is None or (time.monotonic() < self._next_refresh and n != bar.total):
            return
        if self._should_update(n, bar.total):
            self._refresh(bar, n, None)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print above the bars that are shown."""
        shown = next((bar for bar in self._bars() if not bar.disable and draws(bar)), None)
        if shown is None:
            print(*args, sep=sep, **{"flush": True, **kwargs})
        else:
            kwargs.pop("flush", None)
            shown.write(sep.join(map(str, args)), **kwargs)

    # -- inside

    def _bar(self, name: str) -> Any:
        bar = getattr(self, f"_{name}_progress_bar")
        if bar is None:
            raise TypeError(
                f"The `{type(self).__name__}._{name}_progress_bar` reference has not been set yet."
            )
        return bar

    def _bars(self) -> list[Any]:
        bars = (
            self._val_progress_bar,
            self._train_progress_bar,
            self._test_progress_bar,
            self._predict_progress_bar,
        )
        return [bar for bar in bars if bar is not None]

    def _begin(self, name: str, kind: str) -> None:
        self._evaluation = f"_{name}_progress_bar"
        setattr(self, self._evaluation, self._open(kind))

    def _close(self, name: str) -> None:
        self._bar(name).close()
        self.reset_dataloader_idx_tracker()

    def _should_update(self, current: int, total: float | None) -> bool:
        return self.is_enabled and (current % self._every == 0 or current == total)

    def _refresh(self, bar: Any, n: int, metrics: dict[str, Any] | None) -> None:
        if bar.disable:
            return
        bar.n = n
        if metrics is not None:
            bar.set_postfix(metrics, refresh=False)
        bar.refresh()
        self._next_refresh = time.monotonic() + self._refresh_seconds

    def _show_train_state(self, trainer: Trainer, pl_module: LightningModule) -> None:
        bar = self._train_progress_bar
        if bar is not None and not bar.disable and trainer.state.fn == TrainerFn.FITTING:
            self._refresh(bar, max(self._train_batches[0], bar.n), self.get_metrics(trainer, pl_module))

    def _enable_batch_hooks(self) -> None:
        stages = ("validation", "test", "predict")
        hooks = [f"on_{stage}_batch_{edge}" for stage in stages for edge in ("start", "end")]
        if self.is_enabled:
            enable_hooks(self, "on_train_batch_end", *hooks)
        else:
            disable_hooks(self, DrawnProgressBar, "on_train_batch_end", *hooks)


def _reset(bar: Any, total: float | None, description: str) -> None:
    """Set a bar to zero of ``total``."""
    if bar.disable:
        return
    if bar.n and not getattr(bar, "_quiet_lines", True):
        _write_line(bar)  # of the previous loader
    bar.set_description(description, refresh=False)
    bar.postfix = None
    bar.reset(total=convert_inf(total))
    if bar.total is not None and convert_inf(total) is None:
        bar.total = None


def convert_inf(total: float | None) -> float | None:
    """Return None for an unknown length, as tqdm writes it."""
    return None if total is None or math.isinf(total) or math.isnan(total) else total


def _write_line(bar: Any) -> None:
    write_line = getattr(bar, "write_line", None)
    if write_line is not None:
        write_line()


def draws(bar: Any) -> bool:
    """Return whether a bar is drawn over itself, rather than written as lines."""
    return bool(getattr(bar, "_draws", True))
