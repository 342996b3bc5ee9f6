"""LightningDataModule: the data of a run in one reusable object."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hasten._lib.patched import replaced
from hasten.module.hparams import HyperparametersMixin, OnClassOnly, construct

if TYPE_CHECKING:
    from hasten.trainer import Trainer


class DataHooks:
    """The hooks about data, the same for a module and a datamodule.

    ``prepare_data_per_node``: call ``prepare_data`` once a machine (default), or once in the whole run.
    ``allow_zero_length_dataloader_with_multiple_devices``: a loader without batches is no error.
    """

    prepare_data_per_node = True
    allow_zero_length_dataloader_with_multiple_devices = False

    def prepare_data(self) -> None:
        """Download and write to disk here. Called once a node, before the processes work side by side."""

    def setup(self, stage: str) -> None:
        """Called on every process when fit, validate, test or predict begins."""

    def teardown(self, stage: str) -> None:
        """Called on every process when fit, validate, test or predict ends."""

    def train_dataloader(self) -> Any:
        """Return the training data: a DataLoader or any iterable of batches."""
        raise NotImplementedError(f"{type(self).__name__} has no train_dataloader().")

    def val_dataloader(self) -> Any:
        """Return the validation data: one or several DataLoaders or iterables."""
        raise NotImplementedError(f"{type(self).__name__} has no val_dataloader().")

    def test_dataloader(self) -> Any:
        """Return the test data: one or several DataLoaders or iterables."""
        raise NotImplementedError(f"{type(self).__name__} has no test_dataloader().")

    def predict_dataloader(self) -> Any:
        """Return the data to predict on: one or several DataLoaders or iterables."""
        raise NotImplementedError(f"{type(self).__name__} has no predict_dataloader().")

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch to ``device``. Override it for batches that are no collection of tensors."""
        from hasten._lib.tree import move_to

        return move_to(batch, device, non_blocking=device.type == "cuda")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch before it is moved to the device; return it."""
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch after it was moved to the device; return it."""
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Arguments are for programs that pass their own on to super().__init__().
        super().__init__()
        self.trainer: Trainer | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in _HOOKS:
            replaced(self)

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Dataset[Any] | Iterable[Dataset[Any]] | None = None,
        val_dataset: Dataset[Any] | Iterable[Dataset[Any]] | None = None,
        test_dataset: Dataset[Any] | Iterable[Dataset[Any]] | None = None,
        predict_dataset: Dataset[Any] | Iterable[Dataset[Any]] | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> LightningDataModule:
        """Make a datamodule from datasets; the training data is shuffled.

        Args:
            train_dataset: one dataset or several, likewise the others; None for a stage without data.
            val_dataset: see ``train_dataset``.
            test_dataset: see ``train_dataset``.
            predict_dataset: see ``train_dataset``.
            batch_size: samples a batch; handed to ``__init__`` too, where that takes it.
            num_workers: worker processes of each loader; handed to ``__init__`` too, where that takes it.
            datamodule_kwargs: passed to the datamodule's ``__init__``.

        """

        def loaders(data: Any, shuffle: bool = False) -> Any:
            if isinstance(data, Mapping):
                return {key: loaders(part, shuffle) for key, part in data.items()}
            if isinstance(data, Sequence) and not isinstance(data, Dataset):
                return [loaders(part, shuffle) for part in data]
            shuffle = shuffle and not isinstance(data, IterableDataset)
            return DataLoader(data, batch_size, shuffle=shuffle, num_workers=num_workers, pin_memory=_pins())

        taken = inspect.signature(cls).parameters
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values())
        for name, value in {"batch_size": batch_size, "num_workers": num_workers}.items():
            if takes_any or name in taken:
                datamodule_kwargs[name] = value
        datamodule = cls(**datamodule_kwargs)
        if train_dataset is not None:
            datamodule.train_dataloader = lambda: loaders(train_dataset, shuffle=True)  # type: ignore[method-assign]
        if val_dataset is not None:
            datamodule.val_dataloader = lambda: loaders(val_dataset)  # type: ignore[method-assign]
        if test_dataset is not None:
            datamodule.test_dataloader = lambda: loaders(test_dataset)  # type: ignore[method-assign]
        if predict_dataset is not None:
            datamodule.predict_dataloader = lambda: loaders(predict_dataset)  # type: ignore[method-assign]
        return datamodule

    @OnClassOnly
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: Any = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Make the datamodule again from the hyper-parameters and state in a checkpoint.

        Args:
            checkpoint_path: path or URL of the file.
            map_location: where tensors go; the CPU by default.
            hparams_file: a YAML file with hyper-parameters, for files that hold none.
            weights_only: False also reads files that hold Python objects: only for files you trust.
            kwargs: hyper-parameters that replace those stored.

        """
        return construct(cls, checkpoint_path, map_location, hparams_file, weights_only, kwargs)

    def __str__(self) -> str:
        """Say how many samples each loader reads, for those that can be asked for now."""
        parts = ("Train", "train"), ("Validation", "val"), ("Test", "test"), ("Predict", "predict")
        return "\n".join(
            f"{{{title} dataloader: {_sizes(getattr(self, name + '_dataloader'))}}}" for title, name in parts
        )

    def state_dict(self) -> dict[str, Any]:
        """Return state to store in checkpoints."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what ``state_dict`` returned."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when an exception ends the run."""


def _sizes(ask: Callable[[], Any]) -> str:
    try:
        given = ask()
    except Exception:
        return "None"
    if isinstance(given, Mapping):
        given = list(given.values())
    if not isinstance(given, (list, tuple)):
        return f"size={_size(given)}"
    return " ; ".join(f"{index}. size={_size(loader)}" for index, loader in enumerate(given, start=1))


def _size(loader: Any) -> str:
    try:
        return str(len(loader.dataset))
    except (AttributeError, TypeError, NotImplementedError):
        return "NA"


def _pins() -> bool:
    return torch.cuda.is_available()


_HOOKS = frozenset(
    name for base in (DataHooks, LightningDataModule) for name in vars(base) if not name.startswith("_")
)
