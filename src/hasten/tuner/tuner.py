"""Tuner: a batch size and a learning rate, found by trying."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from hasten._lib.errors import MisconfigurationException
from hasten._lib.names import did_you_mean
from hasten._lib.rank_zero import rank_zero_warn
from hasten.loops.preflight import check_call
from hasten.loops.run import Run
from hasten.module.datamodule import LightningDataModule
from hasten.tuner import attributes, batch_size, lr_find
from hasten.tuner.lr_find import LRFinder
from hasten.tuner.trial import STAGE_OF, Stage, Trial

if TYPE_CHECKING:
    from hasten.module import LightningModule
    from hasten.trainer import Trainer


class Tuner:
    """Searches on the user's own model and data, and leaves no trace but the value it found.

    Module, optimizers, random numbers, loaders with their samplers and datasets, counters, loggers and files are
    afterwards as they were before, also when a search fails. Callbacks and loggers do not take part; the hooks of the
    module and the datamodule do. What cannot be put back: what those hooks do outside of this process, and an iterator
    that can be read only once.

    Args:
        trainer: in whose precision and on whose devices to try.

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
        self._trainer = trainer

    def scale_batch_size(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        method: str = "fit",
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
            train_dataloaders: not for this: a loader that is passed in cannot be made with another size.
            val_dataloaders: see ``train_dataloaders``.
            dataloaders: see ``train_dataloaders``.
            datamodule: gives the data; the module's hooks do by default.
            method: "fit", "validate", "test" or "predict": what is to fit.
            mode: "power" doubles until memory runs out; "binsearch" then narrows it down.
            steps_per_trial: steps tried with each size.
            init_val: the first size.
            max_trials: how many sizes are tried at most.
            batch_arg_name: the attribute of module, hparams or datamodule that holds the size.
            margin: how much smaller than the largest found the result of "binsearch" is, as a share.
            max_val: no larger size is tried, and none above the number of samples.

        Returns:
            The size, which was really run; None with ``fast_dev_run``.

        Raises:
            ValueError: an option is wrong, or the size cannot be changed.
            RuntimeError: not even one sample fits.

        """
        owner = "Tuner.scale_batch_size"
        mode = batch_size.check_options(mode, steps_per_trial, init_val, max_trials, margin, max_val, owner)
        if self._skipped("scale_batch_size"):
            return None
        search = functools.partial(
            batch_size.search,
            method=cast("Stage", method),
            mode=mode,
            steps_per_trial=steps_per_trial,
            init_val=init_val,
            max_trials=max_trials,
            name=batch_arg_name,
            margin=margin,
            max_val=max_val,
        )
        size: int = self._run(
            search, method, model, train_dataloaders, val_dataloaders, dataloaders, datamodule
        )
        attributes.put(
            model, self._datamodule(datamodule, train_dataloaders, dataloaders), batch_arg_name, size
        )
        return size

    def lr_find(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        method: str = "fit",
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
            dataloaders: not for fit.
            datamodule: gives the data.
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
            ValueError: an option is wrong, or the module has not one optimizer of its own.

        """
        if method != "fit":
            raise MisconfigurationException(
                f"Tuner.lr_find(method={method!r}): only 'fit' has a learning rate."
            )
        mode = lr_find.check_options(
            mode, min_lr, max_lr, num_training, early_stop_threshold, "Tuner.lr_find"
        )
        if self._skipped("lr_find"):
            return None
        datamodule_in_use = self._datamodule(datamodule, train_dataloaders, dataloaders)
        name = lr_find.attribute_of(model, datamodule_in_use, attr_name, update_attr)
        search = functools.partial(
            lr_find.sweep,
            min_lr=min_lr,
            max_lr=max_lr,
            num_training=num_training,
            mode=mode,
            early_stop_threshold=early_stop_threshold,
        )
        found: LRFinder = self._run(
            search, "fit", model, train_dataloaders, val_dataloaders, dataloaders, datamodule
        )
        if update_attr and name is not None:
            suggestion = found.suggestion()
            if suggestion is not None:
                attributes.put(model, datamodule_in_use, name, suggestion)
        return found

    def _skipped(self, call: str) -> bool:
        if self._trainer.fast_dev_run:
            rank_zero_warn(f"Tuner.{call}(): skipped, since the Trainer has fast_dev_run.")
        return bool(self._trainer.fast_dev_run)

    def _run(
        self,
        search: Callable[[Trial], Any],
        method: str,
        model: LightningModule,
        train_dataloaders: Any,
        val_dataloaders: Any,
        dataloaders: Any,
        datamodule: LightningDataModule | None,
    ) -> Any:
        """Prepare a run without callbacks and loggers, and search in it."""
        if isinstance(train_dataloaders, LightningDataModule):
            datamodule, train_dataloaders = train_dataloaders, None
        if isinstance(dataloaders, LightningDataModule):
            datamodule, dataloaders = dataloaders, None
        if method not in STAGE_OF:
            raise MisconfigurationException(
                f"Tuner(method={method!r}): use one of {', '.join(STAGE_OF)}.{did_you_mean(str(method), STAGE_OF)}"
            )
        if method == "fit" and dataloaders is not None:
            raise MisconfigurationException(
                "Tuner(method='fit', dataloaders=...): for fit, pass train_dataloaders and val_dataloaders."
            )
        if method != "fit" and (train_dataloaders is not None or val_dataloaders is not None):
            raise MisconfigurationException(
                f"Tuner(method={method!r}): pass dataloaders=..., not train_dataloaders or val_dataloaders."
            )
        trainer = self._trainer
        given: dict[str, Any] = {"train": train_dataloaders, "validate": val_dataloaders}
        if method != "fit":
            given = {method: dataloaders}
        check_call(trainer._arguments, method, model, datamodule, *given.values())

        body = functools.partial(_in_a_run, search)
        return trainer.prepared_run(cast("Stage", method), model, given, datamodule, body)

    def _datamodule(self, *given: Any) -> Any:
        """Return the datamodule of a call: one that was passed, in whichever place, or the Trainer's last one."""
        passed = (each for each in given if isinstance(each, LightningDataModule))
        return next(passed, self._trainer.datamodule)


def _in_a_run(search: Callable[[Trial], Any], run: Run) -> Any:
    # In copies of this process the Trainer is another one.
    return search(Trial(run.module.trainer, run))
