"""finetuning-scheduler: layers thawed in phases, each from the best checkpoint of the one before."""

import finetuning_scheduler as fts
import lightning.pytorch as pl
import record
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(pl.LightningModule):
    """Three layers, of which the last one is trained first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch."""
        x, y = batch
        return nn.functional.cross_entropy(self.last(torch.relu(self.norm(self.first(x)))), y)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss."""
        return self.loss(batch)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        """Log the loss."""
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> tuple[list, list]:
        """Return an optimizer whose rate falls."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


pl.seed_everything(1)
x = torch.randn(48, 8)
data = TensorDataset(x, (x[:, 0] > 0).long())
losses = record.KeepLosses()
scheduler = fts.FinetuningScheduler()
trainer = pl.Trainer(
    max_epochs=9,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[
        losses,
        scheduler,
        fts.FTSEarlyStopping(monitor="val_loss", patience=1, min_delta=0.05),
        fts.FTSCheckpoint(monitor="val_loss", save_top_k=2, dirpath="checkpoints"),
    ],
)
model = Model()
trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8))
(scores,) = trainer.validate(model, DataLoader(data, batch_size=8))
record.write(
    losses=losses.losses,
    epochs=losses.epochs,
    scores=scores,
    phases=[scheduler.curr_depth, trainer.current_epoch, trainer.global_step],
    groups=[[len(group["params"]), group["lr"]] for group in trainer.optimizers[0].param_groups],
)
