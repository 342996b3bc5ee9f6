"""An image autoencoder with a command line: every argument of model, data and Trainer can be set from outside.

python examples/autoencoder_cli.py fit --model.code 16 --trainer.max_epochs 10
python examples/autoencoder_cli.py fit --print_config > config.yaml
python examples/autoencoder_cli.py test --config config.yaml --ckpt_path last.ckpt
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import hasten as L
from hasten.cli import LightningCLI


class Autoencoder(L.LightningModule):
    """Squeeze an image of 64 pixels into a few numbers, and draw it again from them.

    Args:
        code: how many numbers.
        width: of the hidden layers.
        lr: learning rate of Adam.
    """

    def __init__(self, code: int = 8, width: int = 64, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, code))
        self.decoder = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, 64), nn.Sigmoid())

    def loss(self, batch) -> torch.Tensor:
        (images,) = batch
        return nn.functional.mse_loss(self.decoder(self.encoder(images)), images)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Digits(L.LightningDataModule):
    """Images of digits, 8 by 8 pixels.

    Args:
        batch_size: images of a batch.
    """

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        images = torch.tensor(load_digits().data / 16, dtype=torch.float32)
        parts = random_split(TensorDataset(images), [0.8, 0.1, 0.1], torch.Generator().manual_seed(0))
        self.train, self.validation, self.held_out = parts

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.validation, self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.held_out, self.batch_size)


if __name__ == "__main__":
    cli = LightningCLI(
        Autoencoder,
        Digits,
        seed_everything_default=0,
        trainer_defaults={"max_epochs": 5, "accelerator": "cpu"},
    )
    for name, value in cli.trainer.callback_metrics.items():
        print(f"result: {name} {value:.4f}")
