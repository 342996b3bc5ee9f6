"""A Trainer's arguments as attributes: read at any time, and changed between two calls."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from hasten import arguments as checks
from hasten._lib.durations import Interval

if TYPE_CHECKING:
    from hasten.arguments import Arguments
    from hasten.loops.run import Run


class TrainerSettings:
    """The arguments; one that is assigned is checked as in ``Trainer(...)``.

    During fit it counts from the next batch on; only how much data there is (``limit_..._batches``,
    ``overfit_batches``, ``num_sanity_val_steps``, ``fast_dev_run``) is settled when a call begins.
    """

    _arguments: Arguments
    _given: dict[str, Any]
    _run: Run | None
    _accumulate_grad_batches: int

    def _change(self, name: str, value: Any) -> None:
        self._arguments = checks.changed(self._arguments, name, value)
        self._given = {**self._given, name: -1 if value == math.inf else value}
        if self._run is not None:
            self._run.change_arguments(self._arguments)

    @property
    def max_epochs(self) -> int | None:
        """Epochs to train; -1 for no limit."""
        return self._arguments.max_epochs

    @property
    def min_epochs(self) -> int | None:
        """Epochs to train before a callback may stop the run."""
        return self._arguments.min_epochs

    @property
    def max_steps(self) -> int:
        """Optimizer steps to train; -1 for no limit."""
        return self._arguments.max_steps

    @property
    def min_steps(self) -> int | None:
        """Optimizer steps to train before a callback may stop the run."""
        return self._arguments.min_steps

    @property
    def fast_dev_run(self) -> int:
        """Batches of a quick check; 0 when off."""
        return self._arguments.fast_dev_run

    @fast_dev_run.setter
    def fast_dev_run(self, value: Any) -> None:
        self._change("fast_dev_run", value)

    @property
    def log_every_n_steps(self) -> int:
        """Optimizer steps between two rows of the loggers."""
        return self._arguments.log_every_n_steps

    @log_every_n_steps.setter
    def log_every_n_steps(self, value: Any) -> None:
        self._change("log_every_n_steps", value)

    @property
    def val_check_interval(self) -> Any:
        """Batches, share of an epoch, optimizer steps or time between validations."""
        interval = self._arguments.val_check_interval
        return interval.time if isinstance(interval, Interval) and interval.time is not None else interval

    @val_check_interval.setter
    def val_check_interval(self, value: Any) -> None:
        self._change("val_check_interval", value)

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """Epochs between validations."""
        return self._arguments.check_val_every_n_epoch

    @check_val_every_n_epoch.setter
    def check_val_every_n_epoch(self, value: Any) -> None:
        self._change("check_val_every_n_epoch", value)

    @property
    def num_sanity_val_steps(self) -> float:
        """Validation batches run before training."""
        steps = self._arguments.num_sanity_val_steps
        return math.inf if steps == -1 else steps

    @num_sanity_val_steps.setter
    def num_sanity_val_steps(self, value: Any) -> None:
        self._change("num_sanity_val_steps", value)

    @property
    def limit_train_batches(self) -> Any:
        """Batches or share of the training data in an epoch."""
        return _one_if_none(self._arguments.limit_train_batches)

    @limit_train_batches.setter
    def limit_train_batches(self, value: Any) -> None:
        self._change("limit_train_batches", value)

    @property
    def limit_val_batches(self) -> Any:
        """Batches or share of the validation data."""
        return _one_if_none(self._arguments.limit_val_batches)

    @limit_val_batches.setter
    def limit_val_batches(self, value: Any) -> None:
        self._change("limit_val_batches", value)

    @property
    def limit_test_batches(self) -> Any:
        """Batches or share of the test data."""
        return _one_if_none(self._arguments.limit_test_batches)

    @limit_test_batches.setter
    def limit_test_batches(self, value: Any) -> None:
        self._change("limit_test_batches", value)

    @property
    def limit_predict_batches(self) -> Any:
        """Batches or share of the prediction data."""
        return _one_if_none(self._arguments.limit_predict_batches)

    @limit_predict_batches.setter
    def limit_predict_batches(self, value: Any) -> None:
        self._change("limit_predict_batches", value)

    @property
    def overfit_batches(self) -> int | float:
        """Batches or share to overfit on."""
        return self._arguments.overfit_batches

    @overfit_batches.setter
    def overfit_batches(self, value: Any) -> None:
        self._change("overfit_batches", value)

    @property
    def gradient_clip_val(self) -> float | None:
        """The largest gradient norm or value."""
        return self._arguments.gradient_clip_val

    @gradient_clip_val.setter
    def gradient_clip_val(self, value: Any) -> None:
        self._change("gradient_clip_val", value)

    @property
    def gradient_clip_algorithm(self) -> str | None:
        """ "norm" or "value"; None means norm."""
        return self._arguments.gradient_clip_algorithm

    @gradient_clip_algorithm.setter
    def gradient_clip_algorithm(self, value: Any) -> None:
        self._change("gradient_clip_algorithm", value)

    @property
    def reload_dataloaders_every_n_epochs(self) -> int:
        """Epochs after which loaders are asked for again; 0 for never."""
        return self._arguments.reload_dataloaders_every_n_epochs

    @reload_dataloaders_every_n_epochs.setter
    def reload_dataloaders_every_n_epochs(self, value: Any) -> None:
        self._change("reload_dataloaders_every_n_epochs", value)

    @property
    def accumulate_grad_batches(self) -> int:
        """Batches whose gradients an optimizer step takes."""
        return self._accumulate_grad_batches

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: Any) -> None:
        self._change("accumulate_grad_batches", value)
        self._accumulate_grad_batches = self._arguments.accumulate_grad_batches
        if self._run is not None:
            self._run.accumulate_grad_batches = self._accumulate_grad_batches

    @property
    def barebones(self) -> bool:
        """Whether all that is not training is off."""
        return self._arguments.barebones

    @property
    def default_root_dir(self) -> str:
        """Where logs and checkpoints go."""
        return self._arguments.default_root_dir

    @property
    def enable_autolog_hparams(self) -> bool:
        """Whether hyper-parameters are handed to the loggers."""
        return self._arguments.enable_autolog_hparams

    @property
    def val_check_batch(self) -> float:
        """Batches between two validations; infinite where that is not told in batches."""
        run = self._run
        if run is None or not run.train.loaded:
            return math.inf
        return run.checks.batches_between(run.train.limit)


def _one_if_none(value: Any) -> Any:
    return 1.0 if value is None else value
