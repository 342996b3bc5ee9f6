"""``trainer._results`` and ``trainer._logger_connector`` under Lightning's names: what was logged, and to where."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hasten.runtime import ReadOnly
from hasten.trainer.parts import default_logger
from hasten_lightning.loops.views import evaluation_loop

if TYPE_CHECKING:
    from hasten.logged_value import LoggedValue
    from hasten.logged_values import LoggedValues
    from hasten.loggers.base import Logger
    from hasten.trainer.properties import TrainerView


@dataclass(frozen=True)
class Sync:
    """Whether a value is reduced over the processes."""

    should: bool


@dataclass(frozen=True)
class Metadata:
    """The name of a value, the hook that has logged it, and its options."""

    fx: str
    name: str
    prog_bar: bool
    logger: bool
    on_step: bool
    on_epoch: bool
    sync: Sync


@dataclass(frozen=True)
class ResultMetric:
    """A value that was logged; ``is_tensor`` is False for a metric of torchmetrics."""

    meta: Metadata
    is_tensor: bool


class Results(Mapping[str, ResultMetric]):
    """The values of a stage, by the name of the hook and of the value: ``"training_step.loss"``."""

    # The ending of their names where there are several loaders.
    DATALOADER_SUFFIX = "/dataloader_idx_{}"

    def __init__(self, logged: LoggedValues, *, training: bool) -> None:
        self._logged, self.training = logged, training

    def __getitem__(self, key: str) -> ResultMetric:
        return self._by_name()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name())

    def __len__(self) -> int:
        return len(self._by_name())

    @property
    def result_metrics(self) -> list[ResultMetric]:
        """What was logged, by hook and name."""
        return list(self.values())

    def metrics(self, on_step: bool) -> dict[str, dict[str, Any]]:
        """Return the values of the latest step, or of the epoch, for callbacks, loggers and progress bar."""
        logged = self._logged
        values = [each for each in self._of_stage() if (each.on_step if on_step else each.on_epoch)]
        names = {each.step_name if on_step else each.epoch_name for each in values}
        places: dict[str, tuple[Mapping[str, Any], set[str]]] = {
            "callback": (logged.callback_metrics(), names | {each.base_name for each in values}),
            "log": (logged.logged_metrics(), names),
            "pbar": (logged.bar_metrics(), names),
        }
        return {
            place: {name: value for name, value in shown.items() if name in wanted}
            for place, (shown, wanted) in places.items()
        }

    def _of_stage(self) -> list[LoggedValue]:
        return [each for each in self._logged.all_values() if (each.row.stage == "train") == self.training]

    def _by_name(self) -> dict[str, ResultMetric]:
        found = {}
        for each in self._of_stage():
            loader = each.loader_suffix.replace("/dataloader_idx_", ".")
            meta = Metadata(
                each.row.name + loader,
                each.name,
                each.prog_bar,
                each.logger,
                each.on_step,
                each.on_epoch,
                Sync(each.options is not None and each.options.sync_dist),
            )
            found[f"{each.row.name}.{each.name}{loader}"] = ResultMetric(meta, is_tensor=each.metric is None)
        return found


class LoggerConnector:
    """The values of a Trainer, and whether loggers get those of the present step; callbacks of programs read it."""

    # Whether this is the first batch of an epoch; programs put it back after a validation of their own.
    _first_loop_iter: bool | None = None

    def __init__(self, trainer: TrainerView) -> None:
        self.trainer = trainer

    callback_metrics = ReadOnly[dict[str, Tensor]]("trainer.callback_metrics", "See ``Trainer``.")
    logged_metrics = ReadOnly[dict[str, Tensor]]("trainer.logged_metrics", "See ``Trainer``.")
    progress_bar_metrics = ReadOnly[dict[str, float]]("trainer.progress_bar_metrics", "See ``Trainer``.")

    @property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """The values for callbacks, loggers and progress bar."""
        return {"callback": self.callback_metrics, "log": self.logged_metrics, "pbar": self.progress_bar_metrics}

    @property
    def active_loop(self) -> Any:
        """The loop of the running stage; None outside of a call."""
        trainer = self.trainer
        if trainer.training:
            return trainer.fit_loop
        if trainer.predicting:
            return trainer.predict_loop
        return evaluation_loop(trainer) if trainer.evaluating else None

    @property
    def should_update_logs(self) -> bool:
        """Whether loggers get the values of the present step."""
        trainer = self.trainer
        every, loop = trainer.log_every_n_steps, self.active_loop
        if not every or loop is None:
            return bool(every)
        fitting = loop is trainer.fit_loop
        step = loop.epoch_loop._batches_that_stepped + 1 if fitting else loop.batch_progress.current.ready
        return step % every == 0 or trainer.should_stop

    def configure_logger(self, logger: Logger | bool | Iterable[Logger] | None) -> None:
        """Replace the loggers: True for the default one, None or False for none, one, or an iterable of them."""
        if logger is True:
            logger = default_logger(self.trainer.default_root_dir)
        self.trainer.loggers = list(logger) if isinstance(logger, Iterable) else [logger] if logger else []

    def reset_metrics(self) -> None:
        """Forget the values for callbacks, loggers and progress bar."""
        self.trainer._logged.forget_callback_values()

    def reset_results(self) -> None:
        """Forget what the running stage has accumulated."""
        run = self.trainer._run
        for value in () if run is None else run.logged.of_stage(run.evaluation.stage or "train"):
            value.reset()
        self._first_loop_iter = None

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Pass numbers, or tensors of one element, to all loggers, by name.

        ``step`` is the x axis; by default the value called ``step``, or the number of steps so far.
        """
        trainer = self.trainer
        if not trainer.loggers or not metrics:
            return
        trainer.logged_metrics.update(metrics)
        row = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        if step is None:
            if "step" not in row:
                row.setdefault("epoch", trainer.current_epoch)
            step = int(row.pop("step", trainer.fit_loop.epoch_loop._batches_that_stepped))
        for logger in trainer.loggers:
            logger.log_metrics(metrics=dict(row), step=step)
            logger.save()
