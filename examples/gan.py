"""A GAN with manual optimization: two optimizers, gradient accumulation, and only the gradients that are needed."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L


def points_on_a_ring(samples: int = 2048) -> TensorDataset:
    angle = 2 * math.pi * torch.rand(samples)
    radius = 2 + 0.1 * torch.randn(samples)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1))


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


class GAN(L.LightningModule):
    def __init__(self, accumulate: int = 2, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator, self.discriminator = network(8, 2), network(2, 1)

    def fake(self, samples: int) -> torch.Tensor:
        return self.generator(torch.randn(samples, 8, device=self.device))

    def loss(self, points: torch.Tensor, real: bool) -> torch.Tensor:
        logits = self.discriminator(points)
        return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, batch, batch_idx):
        (real,) = batch
        steps = (batch_idx + 1) % self.hparams.accumulate == 0
        for_generator, for_discriminator = self.optimizers()

        with for_discriminator.toggle_model(sync_grad=steps):
            d_loss = (self.loss(real, real=True) + self.loss(self.fake(len(real)), real=False)) / 2
            self.manual_backward(d_loss / self.hparams.accumulate)
            if steps:
                for_discriminator.step()
                for_discriminator.zero_grad()

        with for_generator.toggle_model(sync_grad=steps):
            g_loss = self.loss(self.fake(len(real)), real=True)
            self.manual_backward(g_loss / self.hparams.accumulate)
            if steps:
                for_generator.step()
                for_generator.zero_grad()

        self.log_dict({"d_loss": d_loss, "g_loss": g_loss}, prog_bar=True)

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=self.hparams.lr, betas=(0.5, 0.9))
                for part in (self.generator, self.discriminator)]  # fmt: skip


def train(epochs: int = 30) -> GAN:
    L.seed_everything(1, verbose=False)
    gan = GAN()
    loader = DataLoader(points_on_a_ring(), batch_size=64, shuffle=True)
    trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(gan, loader)
    return gan


if __name__ == "__main__":
    with torch.no_grad():
        radius = train().generator(torch.randn(1000, 8)).norm(dim=1)
    print(f"result: generated points have radius {radius.mean():.2f} +- {radius.std():.2f}; real ones 2.00 +- 0.10")
