"""MNIST, downloaded on first use, as a data set and as a LightningDataModule."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, random_split

from hasten._lib.errors import make_error
from hasten.module.datamodule import LightningDataModule

_FOLDER = "https://pl-public-data.s3.amazonaws.com/MNIST/processed"


class MNIST(Dataset[tuple[Tensor, int]]):
    """Handwritten digits: images of (1, 28, 28) in float32, and their numbers.

    Args:
        root: the folder for the downloaded files.
        train: the 60,000 images to train on, or the 10,000 to test with.
        normalize: the mean and deviation that images are standardized with; None to keep values of 0 to 1.
        download: fetch the files if they are not there.

    Raises:
        RuntimeError: the files are not there, and ``download`` is off.

    Source: LeCun et al., Gradient-based learning applied to document recognition, 1998.

    """

    def __init__(
        self,
        root: str = "./datasets",
        train: bool = True,
        normalize: tuple[float, float] | None = (0.1307, 0.3081),
        download: bool = True,
    ) -> None:
        self.root, self.train, self.normalize = root, train, normalize
        name = "training.pt" if train else "test.pt"
        path = os.path.join(root, "MNIST", "processed", name)
        if not os.path.isfile(path):
            if not download:
                what = f"MNIST(root={root!r}, download=False): there is no {path}. Use download=True."
                raise make_error(RuntimeError, what, argument="root")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            torch.hub.download_url_to_file(f"{_FOLDER}/{name}", path)
        self.data, self.targets = torch.load(path, weights_only=True)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.data[index].float().unsqueeze(0) / 255
        if self.normalize is not None:
            mean, deviation = self.normalize
            image = (image - mean) / deviation
        return image, int(self.targets[index])

    def __len__(self) -> int:
        return len(self.data)


class MNISTDataModule(LightningDataModule):
    """MNIST in batches: training, validation and test.

    Args:
        data_dir: the folder for the downloaded files.
        val_split: how many of the training images are for validation.
        num_workers: processes of each loader.
        normalize: standardize the images.
        seed: of the division into training and validation.
        batch_size: images of a batch.

    """

    name = "mnist"

    def __init__(
        self,
        data_dir: str = "./datasets",
        val_split: int = 5000,
        num_workers: int = 16,
        normalize: bool = False,
        seed: int = 42,
        batch_size: int = 32,
    ) -> None:
        super().__init__()
        self.data_dir, self.val_split, self.num_workers = data_dir, val_split, num_workers
        self.normalize, self.seed, self.batch_size = normalize, seed, batch_size
        self.dataset_train: Any = ...
        self.dataset_val: Any = ...

    @property
    def num_classes(self) -> int:
        """Ten digits."""
        return 10

    def _data(self, train: bool) -> MNIST:
        return MNIST(self.data_dir, train=train, normalize=(0.5, 0.5) if self.normalize else None)

    def prepare_data(self) -> None:
        """Download the files."""
        self._data(train=True)
        self._data(train=False)

    def setup(self, stage: str) -> None:
        """Divide the training images."""
        dataset = self._data(train=True)
        sizes = [len(dataset) - self.val_split, self.val_split]
        generator = torch.Generator().manual_seed(self.seed)
        self.dataset_train, self.dataset_val = random_split(dataset, sizes, generator=generator)

    def _loader(self, dataset: Any, *, shuffle: bool = False) -> DataLoader[Any]:
        return DataLoader(
            dataset, batch_size=self.batch_size, shuffle=shuffle, num_workers=self.num_workers, drop_last=True,
            pin_memory=True,
        )  # fmt: skip

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the training images, shuffled."""
        return self._loader(self.dataset_train, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the images kept for validation."""
        return self._loader(self.dataset_val)

    def test_dataloader(self) -> DataLoader[Any]:
        """Return the test images."""
        return self._loader(self._data(train=False))
