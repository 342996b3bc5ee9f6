"""LightningDataModule: the data of a run in one reusable object."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hasten._lib.device import copies_in_background
from hasten._lib.errors import NoDataloader
from hasten._lib.observers import NotifiesOfHooks
from hasten.module.hparams import HyperparametersMixin, OnClassOnly, construct

if TYPE_CHECKING:
    from hasten.trainer import Trainer
    from hasten.types import Batch, Dataloaders, MapLocation, PathLike


class DataHooks(NotifiesOfHooks):
    """The hooks about data, the same for a module and a datamodule.

    Attributes:
        prepare_data_per_node: call ``prepare_data`` once per machine (True), or once in the whole run.
        allow_zero_length_dataloader_with_multiple_devices: accept loaders without batches.

    """

    prepare_data_per_node = True
    allow_zero_length_dataloader_with_multiple_devices = False

    def prepare_data(self) -> None:
        """Download data and write files. Called once per machine, before the other processes continue."""

    def setup(self, stage: str) -> None:
        """Called on every process when a call begins; ``stage`` is "fit", "validate", "test" or "predict"."""

    def teardown(self, stage: str) -> None:
        """Called on every process when a call ends; ``stage`` as for ``setup``."""

    def train_dataloader(self) -> Dataloaders:
        """Return the training data: a DataLoader, any iterable of batches, or a collection of them."""
        raise NoDataloader(
            f"{type(self).__name__} has no train_dataloader().",
            fix="Define it; self.trainer.estimated_stepping_batches is the number of steps, whoever has the loader.",
        )

    def val_dataloader(self) -> Dataloaders:
        """Return the validation data: one or several DataLoaders or iterables."""
        raise NoDataloader(f"{type(self).__name__} has no val_dataloader().")

    def test_dataloader(self) -> Dataloaders:
        """Return the test data: one or several DataLoaders or iterables."""
        raise NoDataloader(f"{type(self).__name__} has no test_dataloader().")

    def predict_dataloader(self) -> Dataloaders:
        """Return the data to predict on: one or several DataLoaders or iterables."""
        raise NoDataloader(f"{type(self).__name__} has no predict_dataloader().")

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Return ``batch`` on ``device``. Override it for batches that are not collections of tensors."""
        from hasten._lib.tree import move_to

        return move_to(batch, device, non_blocking=copies_in_background(device))

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Return ``batch``, changed if needed, before it is moved to the device."""
        return batch

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Return ``batch``, changed if needed, after it was moved to the device."""
        return batch


class LightningDataModule(DataHooks, HyperparametersMixin):
    """Datasets, splits and loaders in one place, usable with any module.

    Example::

        >>> import hasten as L, torch
        >>> class Numbers(L.LightningDataModule):
        ...     def train_dataloader(self):
        ...         return torch.utils.data.DataLoader(torch.arange(8.), batch_size=4)
        >>> len(Numbers().train_dataloader())
        2

    """

    name: str | None = None
    CHECKPOINT_HYPER_PARAMS_KEY = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "datamodule_hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "datamodule_hparams_type"

    def __init__(self, *args: object, **kwargs: object) -> None:
        # Programs may pass arguments of their own to super().__init__().
        super().__init__()
        self.trainer: Trainer | None = None

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Dataset[Any] | Iterable[Dataset[Any]] | None = None,
        val_dataset: Dataset[Any] | Iterable[Dataset[Any]] | None = None,
        test_dataset: Dataset[Any] | Iterable[Dataset[Any]] | None = None,
        predict_dataset: Dataset[Any] | Iterable[Dataset[Any]] | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: object,
    ) -> LightningDataModule:
        """Return a datamodule with a loader for each dataset; the training data is shuffled.

        Args:
            train_dataset: one dataset or several; None for a stage without data.
            val_dataset: as ``train_dataset``.
            test_dataset: as ``train_dataset``.
            predict_dataset: as ``train_dataset``.
            batch_size: samples of a batch; also passed to ``__init__`` if it has this parameter.
            num_workers: worker processes of each loader; also passed to ``__init__`` if it has this parameter.
            datamodule_kwargs: passed to ``__init__``.

        """

        def loaders(data: Any, shuffle: bool = False) -> Any:
            if isinstance(data, Mapping):
                return {key: loaders(part, shuffle) for key, part in data.items()}
            if isinstance(data, Sequence) and not isinstance(data, Dataset):
                return [loaders(part, shuffle) for part in data]
            shuffle = shuffle and not isinstance(data, IterableDataset)
            pin = torch.cuda.is_available()
            return DataLoader(data, batch_size, shuffle, num_workers=num_workers, pin_memory=pin)

        parameters = inspect.signature(cls).parameters
        takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        for name, value in {"batch_size": batch_size, "num_workers": num_workers}.items():
            if takes_any or name in parameters:
                datamodule_kwargs[name] = value
        datamodule = cls(**datamodule_kwargs)
        datasets = (train_dataset, val_dataset, test_dataset, predict_dataset)
        for name, dataset in zip(("train", "val", "test", "predict"), datasets, strict=True):
            if dataset is not None:
                # The datasets are bound here: a loader is made at each call.
                make = functools.partial(loaders, dataset, shuffle=name == "train")
                setattr(datamodule, f"{name}_dataloader", make)
        return datamodule

    @OnClassOnly
    def load_from_checkpoint(
        cls,
        checkpoint_path: PathLike,
        map_location: MapLocation = None,
        hparams_file: PathLike | None = None,
        weights_only: bool | None = None,
        **kwargs: object,
    ) -> Self:
        """Build the datamodule from the hyper-parameters and state in a checkpoint.

        Args:
            checkpoint_path: path or URL of the file.
            map_location: where tensors go; the CPU by default.
            hparams_file: a YAML or CSV file with hyper-parameters, for checkpoints without them.
            weights_only: False also reads files that hold Python objects: only for files you trust.
            kwargs: arguments of ``__init__``; they take precedence over those stored.

        """
        return construct(cls, checkpoint_path, map_location, hparams_file, weights_only, kwargs)

    def __str__(self) -> str:
        """Return the number of samples of each loader that can be made now."""
        parts = ("Train", "train"), ("Validation", "val"), ("Test", "test"), ("Predict", "predict")
        return "\n".join(
            f"{{{title} dataloader: {_sizes(getattr(self, name + '_dataloader'))}}}" for title, name in parts
        )

    def state_dict(self) -> dict[str, Any]:
        """Return state to store in checkpoints."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when an exception ends the run."""


def _sizes(make: Callable[[], Any]) -> str:
    try:
        given = make()
    except Exception:
        return "None"
    loaders = list(given.values()) if isinstance(given, Mapping) else given
    if not isinstance(loaders, (list, tuple)):
        return f"size={_size(loaders)}"
    return " ; ".join(f"{index}. size={_size(loader)}" for index, loader in enumerate(loaders, start=1))


def _size(loader: Any) -> str:
    try:
        return str(len(loader.dataset))
    except (AttributeError, TypeError, NotImplementedError):
        return "NA"


LightningDataModule.__hook_names__ = frozenset(
    name for base in (DataHooks, LightningDataModule) for name in vars(base) if not name.startswith("_")
)
