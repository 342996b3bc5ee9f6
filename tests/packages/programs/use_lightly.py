"""lightly: SimCLR on small random pictures, in a LightningModule as its documentation writes it."""

import pytorch_lightning as pl
import record
import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.utils.benchmarking import KNNClassifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SimCLR(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        )
        self.projection_head = SimCLRProjectionHead(8, 16, 8)
        self.criterion = NTXentLoss()

    def forward(self, x):
        return self.projection_head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        (pictures,) = batch
        views = pictures, pictures + 0.1 * torch.randn_like(pictures)
        loss = self.criterion(*(self(view) for view in views))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


pl.seed_everything(0)
pictures = torch.randn(48, 3, 16, 16)
labels = torch.arange(48) % 3
losses, knn_losses = record.KeepLosses(), record.KeepLosses()
quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
quiet["enable_checkpointing"] = False
model = SimCLR()
trainer = pl.Trainer(max_epochs=3, callbacks=[losses], **quiet)
trainer.fit(model, DataLoader(TensorDataset(pictures), 16, shuffle=True))

# The package's own LightningModule.
classifier = KNNClassifier(model.backbone, num_classes=3, knn_k=5, feature_dtype=torch.float32)
labelled = DataLoader(TensorDataset(pictures, labels), 16)
scores = pl.Trainer(max_epochs=1, **quiet)
scores.validate(classifier, [labelled, labelled], verbose=False)
record.write(
    losses=losses.losses,
    epochs=losses.epochs,
    scores={key: float(value) for key, value in sorted(scores.callback_metrics.items())},
)
