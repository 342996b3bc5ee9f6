"""A GAN that draws digits, with manual optimization."""

import sys
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, LambdaCallback, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.aggregation import MeanMetric

sys.path.insert(0, str(Path(__file__).parents[1]))
import record


@record.hooks
class Digits(L.LightningDataModule):
    """Images of digits as vectors of 64 numbers in [-1, 1]."""

    def __init__(self, batch_size: int = 60):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        images, _ = load_digits(return_X_y=True)
        x = torch.tensor(images, dtype=torch.float32) / 8 - 1
        self.train, self.val = TensorDataset(x[:1200]), TensorDataset(x[1200:1500])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.hparams.batch_size)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    def teardown(self, stage):
        self.train = self.val = None


@record.hooks
class GAN(L.LightningModule):
    """Generator and discriminator, each with its optimizer; the generator learns every second batch."""

    def __init__(
        self,
        latent_dim: int = 16,
        width: int = 64,
        lr: float = 2e-3,
        betas: tuple = (0.5, 0.999),
        accumulate: int = 2,
        clip: float = 1.0,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latent_dim, width), nn.BatchNorm1d(width, 0.8), nn.LeakyReLU(0.2), nn.Linear(width, 64), nn.Tanh()
        )
        self.discriminator = nn.Sequential(nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))
        self.real_score = MeanMetric()
        self.register_buffer("validation_z", torch.randn(8, latent_dim))

    def forward(self, z):
        return self.generator(z)

    def noise(self, count, seed):
        """The noise of a batch depends on its number only: the same after a resume."""
        return torch.randn(count, self.hparams.latent_dim, generator=torch.Generator().manual_seed(seed))

    def adversarial_loss(self, logits, real):
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, batch, batch_idx):
        (images,) = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = self.noise(len(images), 1000 * self.current_epoch + batch_idx)

        # The generator, its gradients accumulated over some batches.
        last = (batch_idx + 1) % self.hparams.accumulate == 0
        self.toggle_optimizer(optimizer_g)
        frozen = [p.requires_grad for p in self.discriminator.parameters()]
        g_loss = self.adversarial_loss(self.discriminator(self(z)), True)
        self.manual_backward(g_loss / self.hparams.accumulate)
        if last:
            self.clip_gradients(optimizer_g, gradient_clip_val=self.hparams.clip, gradient_clip_algorithm="norm")
            optimizer_g.step()
            optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        # The discriminator, each batch.
        self.toggle_optimizer(optimizer_d)
        real = self.discriminator(images)
        fake = self.discriminator(self(z).detach())
        d_loss = (self.adversarial_loss(real, True) + self.adversarial_loss(fake, False)) / 2
        optimizer_d.zero_grad()
        self.manual_backward(d_loss)
        optimizer_d.step()
        self.untoggle_optimizer(optimizer_d)

        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True, on_step=True, on_epoch=True)
        self.log("frozen", float(sum(frozen)))
        return {"loss": d_loss, "fake": fake.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.real_score.update(torch.sigmoid(outputs["fake"]))

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log("fake_score", self.real_score.compute())
        self.real_score.reset()

    def validation_step(self, batch, batch_idx):
        (images,) = batch
        self.log("val_real", torch.sigmoid(self.discriminator(images)).mean())
        fake = self(self.noise(len(images), batch_idx))
        self.log("val_fake", torch.sigmoid(self.discriminator(fake)).mean(), on_step=True, on_epoch=True)

    def on_validation_epoch_end(self):
        images = (self(self.validation_z) + 1) / 2
        for logger in self.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_images("samples", images.view(-1, 1, 8, 8), self.current_epoch)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch)

    def configure_optimizers(self):
        betas = tuple(self.hparams.betas)
        optimizer_g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=betas)
        optimizer_d = torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=betas)
        schedulers = [
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer_g, 0.9), "name": "lr_generator"},
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer_d, 1, 0.8), "name": "lr_discriminator"},
        ]
        return [optimizer_g, optimizer_d], schedulers


@record.hooks
class StopWhenWon(Callback):
    """Stop when one of the two has won for good."""

    def __init__(self, patience=3):
        self.patience, self.epochs = patience, 0

    def on_train_epoch_end(self, trainer, pl_module):
        metrics = trainer.callback_metrics
        self.epochs = self.epochs + 1 if metrics.get("d_loss_epoch", 1.0) < 1e-3 else 0
        trainer.should_stop = trainer.should_stop or self.epochs >= self.patience

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict):
        self.epochs = state_dict["epochs"]


def make_trainer(epochs):
    """The Trainer of a run of so many epochs."""
    said = []
    record.note("said", said)
    callbacks = [
        StopWhenWon(),
        ModelCheckpoint(dirpath="checkpoints", filename="gan-{epoch}-{step}", save_top_k=-1),
        ModelCheckpoint(dirpath="by_step", every_n_train_steps=30, save_top_k=-1, filename="{step}"),
        LearningRateMonitor(),
        Timer(duration=timedelta(hours=1)),
        LambdaCallback(on_train_epoch_start=lambda trainer, module: said.append(trainer.current_epoch)),
    ]
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=callbacks,
        logger=[
            CSVLogger(".", name="csv", version=0),
            TensorBoardLogger(".", name="tb", version=0),
            record.RecordLogger(),
        ],
        log_every_n_steps=7,
        check_val_every_n_epoch=2,
        limit_val_batches=0.6,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main():
    """Train, go on from a checkpoint in another run, draw some digits."""
    torch.set_num_threads(1)
    L.seed_everything(3, workers=True)
    model, data, trainer = GAN(), Digits(), make_trainer(3)
    trainer.fit(model, datamodule=data)
    record.trainer("fit", trainer, model)
    (ckpt_path,) = Path("checkpoints").glob("gan-epoch=1-*.ckpt")
    model, trainer = GAN(), make_trainer(4)
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    record.trainer("resumed", trainer, model)
    record.checkpoints("checkpoints", ".")
    best = GAN.load_from_checkpoint(trainer.checkpoint_callback.best_model_path, map_location="cpu")
    drawn = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False).predict(
        best, DataLoader(model.noise(20, 5), batch_size=8)
    )
    record.note("drawn", [[list(part.shape), float(part.double().sum())] for part in drawn])
    record.note("hparams", {key: str(value) for key, value in sorted(best.hparams.items())})


if __name__ == "__main__":
    main()
