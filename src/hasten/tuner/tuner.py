"""Tuner: find a batch size that fits and a learning rate that learns by trying them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import nn

from hasten._lib import check
from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import without_unknown
from hasten._lib.rank_zero import rank_zero_info, rank_zero_warn
from hasten.callbacks.finders import BatchSizeFinder, LearningRateFinder
from hasten.elsewhere import conventions
from hasten.module.datamodule import LightningDataModule
from hasten.tuner import batch_size, lr_find
from hasten.tuner.lr_find import LRFinder
from hasten.tuner.tuned_value import TunedValue

if TYPE_CHECKING:
    from hasten import LightningModule, Trainer
    from hasten.loops.run import Run
    from hasten.types import Dataloaders

Method = Literal["fit", "validate", "test", "predict"]


class Tuner:
    """Searches on the user's model and data, and changes nothing but the value it found.

    Afterwards the Trainer shows the module and its loaders, as after ``fit``, with the value that was found. Module,
    optimizers, random numbers, loaders with their samplers and datasets, counters, loggers and files are restored,
    also when a search fails. Callbacks and loggers do not take part; the hooks of the module and the datamodule do.
    What cannot be restored: effects of those hooks outside of this process, and an iterator that can be read only
    once.

    Args:
        trainer: the Trainer whose precision and devices are used.

    Example::

        >>> import torch
        >>> import hasten as L
        >>> from hasten.demos.boring_classes import BoringModel
        >>> class Model(BoringModel):
        ...     lr = 0.1
        ...
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=self.lr)
        >>> trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        >>> model = Model()
        >>> found = Tuner(trainer).lr_find(model, num_training=20, early_stop_threshold=None)
        >>> len(found.results["loss"]), model.lr == found.suggestion()
        (20, True)

    """

    def __init__(self, trainer: Trainer) -> None:
        if isinstance(trainer, nn.Module):
            raise check.wrong_type("Tuner", "trainer", trainer, "a Trainer; the module goes to lr_find()")
        self._trainer = trainer

    @without_unknown
    def scale_batch_size(
        self,
        model: LightningModule,
        train_dataloaders: Dataloaders = None,
        val_dataloaders: Dataloaders = None,
        dataloaders: Dataloaders = None,
        datamodule: LightningDataModule | None = None,
        method: Method = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Return the largest batch size that fits into memory, and set it on the module or datamodule.

        Args:
            model: the module.
            train_dataloaders: refused: the batch size of a loader cannot be changed.
            val_dataloaders: see ``train_dataloaders``.
            dataloaders: see ``train_dataloaders``.
            datamodule: has the data; by default the module's hooks do.
            method: the call whose batches must fit.
            mode: "power" doubles until memory runs out; "binsearch" then narrows it down.
            steps_per_trial: steps with each size.
            init_val: the first size.
            max_trials: how many sizes are tried at most.
            batch_arg_name: the attribute of module, hparams or datamodule that holds the size.
            margin: how much smaller than the largest found the result of "binsearch" is, as a share.
            max_val: no larger size is tried, and none above the number of samples.

        Returns:
            The size, which was trained with; None with ``fast_dev_run``.

        Raises:
            ValueError: an option is wrong, or the size cannot be changed.
            RuntimeError: not even one sample fits.

        """
        owner, sizes = "Tuner.scale_batch_size", (steps_per_trial, init_val, max_trials)
        options = batch_size.BatchSizeOptions(owner, mode, *sizes, batch_arg_name, margin, max_val)
        if self._skipped("scale_batch_size"):
            return None
        if conventions.current().tunes_batch_size_alone and self._trainer.runtime.several_processes:
            # Before processes are started: programs may do without.
            raise MisconfigurationException(
                "Tuner.scale_batch_size(): tuning the batch size is not supported with distributed strategies.",
                fix="Use Trainer(devices=1) for it.",
            )
        data, datamodule = _data(method, train_dataloaders, val_dataloaders, dataloaders, datamodule)
        search = _Search(functools.partial(batch_size.search, method=method, options=options), method)
        size: int = self._trainer.prepared_run(method, model, data, datamodule, search)
        TunedValue(model, datamodule or self._trainer.datamodule, batch_arg_name).set(size)
        self._show(search, model, datamodule)
        return size

    @without_unknown
    def lr_find(
        self,
        model: LightningModule,
        train_dataloaders: Dataloaders = None,
        val_dataloaders: Dataloaders = None,
        dataloaders: Dataloaders = None,
        datamodule: LightningDataModule | None = None,
        method: Method = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LRFinder | None:
        """Train some steps with a growing learning rate, and suggest one.

        Args:
            model: the module, with one optimizer.
            train_dataloaders: the training data; or a datamodule, or the module's hooks.
            val_dataloaders: not read.
            dataloaders: refused: for the other methods.
            datamodule: has the data.
            method: "fit", the only one with a learning rate.
            min_lr: the rate of the first step.
            max_lr: the rate of the last step.
            num_training: steps of the sweep.
            mode: "exponential" or "linear" growth.
            early_stop_threshold: end where the smoothed loss is this many times the best; None for never.
            update_attr: set the suggestion on the module, its hparams or the datamodule.
            attr_name: the attribute; ``lr`` or ``learning_rate`` by default.

        Returns:
            The rates and losses, with ``suggestion()`` and ``plot()``; None with ``fast_dev_run``.

        Raises:
            ValueError: an option is wrong, or the module does not have exactly one optimizer.

        """
        if method != "fit":
            raise MisconfigurationException(
                f"method='fit' is the only valid configuration to run lr finder, not method={method!r}.",
                argument="method",
            )
        owner = "Tuner.lr_find"
        options = lr_find.SweepOptions(owner, mode, min_lr, max_lr, num_training, early_stop_threshold)
        if self._skipped("lr_find"):
            return None
        data, datamodule = _data(method, train_dataloaders, val_dataloaders, dataloaders, datamodule)
        holder = datamodule or self._trainer.datamodule
        value = lr_find.rate_of(model, holder, attr_name, update_attr)
        sweep = lr_find.LRSweep(options)
        search = _Search(lr_find.result_of, "fit", loaders=1)
        found: LRFinder = self._trainer.prepared_run("fit", model, data, datamodule, search, callbacks=[sweep])
        self._show(search, model, datamodule)
        suggestion = found.suggestion() if update_attr and value is not None else None
        if value is not None and suggestion is not None:
            if search.run is not None and value.get() != suggestion:
                lr_find.TUNED[model] = value.name, suggestion, lr_find.rates(search.run)
            value.set(suggestion)
            rank_zero_info(f"Learning rate set to {suggestion}")
        return found

    def _show(self, search: _Search, model: LightningModule, datamodule: LightningDataModule | None) -> None:
        """Make the Trainer show the module and its data, as after ``fit``."""
        model.trainer = self._trainer
        # None where other processes searched.
        if search.run is not None:
            self._trainer.show_run(search.method, search.run, datamodule)

    def _skipped(self, call: str) -> bool:
        finder = {"lr_find": LearningRateFinder, "scale_batch_size": BatchSizeFinder}[call]
        if any(isinstance(each, finder) for each in self._trainer.callbacks):
            raise MisconfigurationException(
                f"Tuner.{call}(): the Trainer is already configured with a {finder.__name__} callback, which would "
                "search again.",
                fix="Use one of the two.",
            )
        if self._trainer.fast_dev_run:
            what = {"lr_find": "learning rate finder", "scale_batch_size": "batch size scaler"}[call]
            rank_zero_warn(f"Skipping {what} since `fast_dev_run` is enabled: Tuner.{call}() does nothing.")
        return bool(self._trainer.fast_dev_run)


class _Search:
    """A search in a prepared run; afterwards the run has the loaders with what was found.

    ``method`` is the call whose loaders are made; ``loaders`` says how many sources of them to load again after the
    search: 1 for training, 2 with validation.
    """

    def __init__(self, find: Callable[[Run], Any], method: Method, *, loaders: int = 2) -> None:
        self._find, self.method, self._loaders = find, method, loaders
        self.run: Run | None = None

    def __call__(self, run: Run) -> Any:
        found = self._find(run)
        for source in run.data.of(self.method)[: self._loaders]:
            if not source.is_off():
                source.reload()
                source.load()
        self.run = run
        return found


def _data(
    method: Method,
    train: Dataloaders,
    validate: Dataloaders,
    other: Dataloaders,
    datamodule: LightningDataModule | None,
) -> tuple[dict[str, Any], LightningDataModule | None]:
    """Return the loaders of a call by stage, and the datamodule, whichever argument it was passed in."""
    if isinstance(train, LightningDataModule):
        datamodule, train = train, None
    if isinstance(other, LightningDataModule):
        datamodule, other = other, None
    check.one_of("Tuner", "method", method, get_args(Method), error=MisconfigurationException)
    if method == "fit" and other is not None:
        raise MisconfigurationException(
            "Tuner(method='fit', dataloaders=...): for fit, pass train_dataloaders and val_dataloaders.",
            argument="method",
        )
    if method != "fit" and (train is not None or validate is not None):
        what = f"Tuner(method={method!r}):"
        fix = "pass dataloaders=..., not train_dataloaders or val_dataloaders."
        raise MisconfigurationException(what, fix=fix, argument="method")
    data: dict[str, Any] = {"train": train, "validate": validate} if method == "fit" else {method: other}
    return data, datamodule
