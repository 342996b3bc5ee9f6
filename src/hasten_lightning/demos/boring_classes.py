"""The smallest models and data that use every part of a run, for experiments and tests.

Their values mean nothing; what they draw at random and compute is the same as in Lightning's classes of these names.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from hasten import LightningDataModule, LightningModule
from hasten.types import Batch, Dataloaders, OptimizerLRScheduler, StepOutput


class RandomDataset(Dataset[Tensor]):
    """Random features.

    Args:
        size: features of a sample.
        length: number of samples.

    Example::

        >>> RandomDataset(32, 64)[0].shape
        torch.Size([32])

    """

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class RandomDictDataset(Dataset[dict[str, Tensor]]):
    """Random features as dicts: ``a`` is random, ``b`` is ``a + 2``.

    Args:
        size: features of each of the two.
        length: number of samples.

    """

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.data[index]
        return {"a": row, "b": row + 2}

    def __len__(self) -> int:
        return self.len


class RandomIterableDataset(IterableDataset[Tensor]):
    """A stream of random features, new in each pass, without a length.

    Args:
        size: features of a sample.
        count: number of samples.

    """

    def __init__(self, size: int, count: int) -> None:
        self.count = count
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.randn(self.size) for _ in range(self.count))


class RandomIterableDatasetWithLen(RandomIterableDataset):
    """A stream of random features, new in each pass, with a length."""

    def __len__(self) -> int:
        return self.count


class BoringModel(LightningModule):
    """A linear layer from 32 features to 2, trained to return 1, with all steps and loaders.

    Subclass it and override what you want to try.

    Example::

        >>> import hasten as L
        >>> trainer = L.Trainer(fast_dev_run=True, accelerator="cpu", enable_progress_bar=False)
        >>> trainer.fit(BoringModel())
        >>> trainer.global_step
        1

    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output: (batch, 2)."""
        output: Tensor = self.layer(x)
        return output

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the mean squared distance to ``labels``, to 1 by default."""
        return F.mse_loss(preds, torch.ones_like(preds) if labels is None else labels)

    def step(self, batch: Batch) -> Tensor:
        """Return the loss on a batch."""
        return self.loss(self(batch))

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        """Return the loss as ``{"loss": ...}``."""
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        """Return the loss as ``{"x": ...}``."""
        return {"x": self.step(batch)}

    def test_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        """Return the loss as ``{"y": ...}``."""
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return SGD whose learning rate, 0.1, is divided by 10 after each epoch."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> Dataloaders:
        """Return 64 batches of one sample."""
        return DataLoader(RandomDataset(32, 64))

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class ManualOptimBoringModel(BoringModel):
    """``BoringModel`` with manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> StepOutput:
        """Make a step of the one optimizer, and return the loss."""
        optimizer: Any = self.optimizers()
        loss = self.step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class DemoModel(LightningModule):
    """A linear layer from 32 features, trained to make its positive outputs small.

    Args:
        out_dim: number of outputs.
        learning_rate: of Adam.

    """

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.l1 = nn.Linear(32, out_dim)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Tensor:
        """Return the positive outputs: (batch, out_dim)."""
        return torch.relu(self.l1(x.view(x.size(0), -1)))

    def training_step(self, batch: Batch, batch_nb: int) -> StepOutput:
        """Return the sum of the outputs."""
        total: Tensor = self(batch).sum()
        return total

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class Net(nn.Module):
    """A small convolutional network for images (batch, 1, 28, 28); it returns log-probabilities (batch, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities: (batch, 10)."""
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


class _DataByStage(LightningDataModule):
    """Makes the data of a stage in ``setup``, as attributes for "train", "val", "test" and "predict"."""

    _attribute = "random_{}"

    def setup(self, stage: str) -> None:
        """Make the datasets that ``stage`` uses."""
        parts = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",), "predict": ("predict",)}
        for part in parts.get(stage, ()):
            setattr(self, self._attribute.format(part), self._dataset(part))

    @abstractmethod
    def _dataset(self, part: str) -> Any:
        """Return the samples to "train", "val", "test" or "predict" with."""

    def _loaders(self, part: str) -> Dataloaders:
        data = getattr(self, self._attribute.format(part))
        return [DataLoader(each) for each in data] if isinstance(data, list) else DataLoader(data)

    def train_dataloader(self) -> Dataloaders:
        """Return the training data in batches of one sample."""
        return self._loaders("train")

    def val_dataloader(self) -> Dataloaders:
        """Return the validation data in batches of one sample."""
        return self._loaders("val")

    def test_dataloader(self) -> Dataloaders:
        """Return the test data in batches of one sample."""
        return self._loaders("test")

    def predict_dataloader(self) -> Dataloaders:
        """Return the data to predict in batches of one sample."""
        return self._loaders("predict")


class BoringDataModule(_DataByStage):
    """256 samples of 32 random features: a quarter each to train, validate, test and predict."""

    def __init__(self) -> None:
        super().__init__()
        self.random_full = RandomDataset(32, 64 * 4)

    def _dataset(self, part: str) -> Subset[Tensor]:
        first = 64 * ("train", "val", "test", "predict").index(part)
        return Subset(self.random_full, range(first, first + 64))


class BoringDataModuleNoLen(_DataByStage):
    """Random samples without a length: 512 to train, 128 to validate, 256 to test, 64 to predict."""

    def _dataset(self, part: str) -> RandomIterableDataset:
        return RandomIterableDataset(32, {"train": 512, "val": 128, "test": 256, "predict": 64}[part])


class IterableBoringDataModule(_DataByStage):
    """Two loaders for each stage, one with and one without a length, of 4 random features."""

    _attribute = "{}_datasets"

    def _dataset(self, part: str) -> list[Dataset[Tensor]]:
        samples = {"train": 16, "val": 32, "test": 64, "predict": 128}[part]
        return [RandomDataset(4, samples), RandomIterableDataset(4, samples)]
