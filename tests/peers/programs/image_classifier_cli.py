"""Classify images of digits from the command line: ``image_classifier_cli.py fit --config digits.yaml``."""

import sys
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

sys.path.insert(0, str(Path(__file__).parents[1]))
import record


@record.hooks
class DigitsDataModule(L.LightningDataModule):
    """1,797 images of 8 by 8 pixels.

    Args:
        batch_size: samples a batch.
        val_fraction: part of the images to validate on; as many are kept to test on.
        noise: standard deviation of what is added to training images.
        seed: of the split.

    """

    def __init__(self, batch_size: int = 64, val_fraction: float = 0.15, noise: float = 0.05, seed: int = 7):
        super().__init__()
        self.save_hyperparameters()
        self.times_asked = 0

    def prepare_data(self) -> None:
        load_digits()

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        data = TensorDataset(x, torch.tensor(labels))
        held_out = int(len(data) * self.hparams.val_fraction)
        train, val, test = random_split(
            data, [len(data) - 2 * held_out, held_out, held_out], torch.Generator().manual_seed(self.hparams.seed)
        )
        if stage == "fit":
            self.train_set = train
        if stage in ("fit", "validate"):
            self.val_set = val
        if stage in ("test", "predict"):
            self.test_set = test

    def train_dataloader(self) -> DataLoader:
        self.times_asked += 1
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size)

    def test_dataloader(self) -> list[DataLoader]:
        half = torch.utils.data.Subset(self.test_set, range(0, len(self.test_set), 2))
        return [DataLoader(part, batch_size=self.hparams.batch_size) for part in (self.test_set, half)]

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(self.test_set, batch_size=self.hparams.batch_size)

    def on_after_batch_transfer(self, batch: list[torch.Tensor], dataloader_idx: int) -> list[torch.Tensor]:
        if self.trainer.training:
            x, y = batch
            batch = [x + self.hparams.noise * torch.randn_like(x), y]
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"times_asked": self.times_asked}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.times_asked = state_dict["times_asked"]


@record.hooks
class DigitsClassifier(L.LightningModule):
    """A small convolutional network.

    Args:
        width: channels of the first layer.
        num_classes: classes to tell apart.
        label_smoothing: of the training loss.
        batch_size: what the loss is logged for; linked to the data.

    """

    def __init__(self, width: int = 8, num_classes: int = 10, label_smoothing: float = 0.05, batch_size: int = 64):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.1),
        )
        self.head = nn.Linear(2 * width * 16, num_classes)
        self.train_accuracy = MulticlassAccuracy(num_classes, average="micro")
        metrics = MetricCollection(
            {"acc": MulticlassAccuracy(num_classes, average="micro"), "f1": MulticlassF1Score(num_classes)}
        )
        self.val_metrics = metrics.clone(prefix="val/")
        self.test_metrics = nn.ModuleList([metrics.clone(prefix=f"test{i}/") for i in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y, label_smoothing=self.hparams.label_smoothing)
        self.train_accuracy(logits, y)
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.val_metrics.update(logits, y)
        self.log("val/loss", F.cross_entropy(logits, y), prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_metrics.compute())
        self.val_metrics.reset()

    def test_step(self, batch: list[torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        logits = self(x)
        self.test_metrics[dataloader_idx](logits, y)
        self.log("test/loss", F.cross_entropy(logits, y))
        self.log_dict(self.test_metrics[dataloader_idx], add_dataloader_idx=False)

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self(batch[0]).argmax(1)


@record.hooks
class BestSoFar(L.Callback):
    """Remember the best accuracy and the epoch it was reached in, through checkpoints.

    Args:
        metric: name of the value.

    """

    def __init__(self, metric: str = "val/acc"):
        self.metric, self.best, self.epoch = metric, 0.0, -1

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        value = float(trainer.callback_metrics[self.metric])
        if not trainer.sanity_checking and value > self.best:
            self.best, self.epoch = value, trainer.current_epoch

    def state_dict(self) -> dict[str, float]:
        return {"best": self.best, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self.best, self.epoch = state_dict["best"], state_dict["epoch"]


class DigitsCLI(LightningCLI):
    """The command line with what every run of this program shares."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.batch_size", "model.batch_size")
        parser.add_lightning_class_args(EarlyStopping, "early_stopping")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.add_lightning_class_args(LearningRateMonitor, "lr_monitor")
        parser.set_defaults({"early_stopping.monitor": "val/loss", "checkpoint.monitor": "val/acc"})
        parser.add_optimizer_args(torch.optim.AdamW)
        parser.add_lr_scheduler_args(torch.optim.lr_scheduler.CosineAnnealingLR)

    def before_fit(self) -> None:
        record.note("before_fit", sum(p.numel() for p in self.model.parameters()))

    def after_fit(self) -> None:
        record.note("best_model", Path(self.trainer.checkpoint_callback.best_model_path).name)
        record.note("best_score", float(self.trainer.checkpoint_callback.best_model_score))
        record.note("monitored", self.trainer.checkpoint_callback.monitor)


def main() -> None:
    torch.set_num_threads(1)
    cli = DigitsCLI(DigitsClassifier, DigitsDataModule, seed_everything_default=11)
    record.trainer(cli.subcommand, cli.trainer, cli.model)
    record.checkpoints("checkpoints", cli.trainer.default_root_dir)
    record.note("callbacks", [type(callback).__name__ for callback in cli.trainer.callbacks])
    for callback in cli.trainer.callbacks:
        if isinstance(callback, BestSoFar):
            record.note("best", [callback.best, callback.epoch])


if __name__ == "__main__":
    main()
