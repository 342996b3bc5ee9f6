"""torch-geometric: graphs classified by a convolutional network, with the package's own data module and a reload."""

import lightning.pytorch as pl
import record
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch_geometric.data import Data
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.nn import GCN, global_mean_pool


class Classifier(pl.LightningModule):
    """Tells rings from chains."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = GCN(in_channels=2, hidden_channels=hidden, num_layers=2, out_channels=hidden, dropout=0.1)
        self.head = torch.nn.Linear(hidden, 2)

    def forward(self, data: Data) -> torch.Tensor:
        """Return the logits: (graph, class)."""
        return self.head(global_mean_pool(self.network(data.x, data.edge_index), data.batch))

    def training_step(self, data: Data, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch of graphs."""
        loss = torch.nn.functional.cross_entropy(self(data), data.y)
        self.log("loss", loss, on_epoch=True, batch_size=data.num_graphs)
        return loss

    def validation_step(self, data: Data, batch_idx: int) -> None:
        """Log how many graphs are recognized."""
        logits = self(data)
        self.log("val_loss", torch.nn.functional.cross_entropy(logits, data.y), batch_size=data.num_graphs)
        self.log("accuracy", (logits.argmax(-1) == data.y).float().mean(), batch_size=data.num_graphs)

    test_step = validation_step

    def predict_step(self, data: Data, batch_idx: int) -> torch.Tensor:
        """Return the logits."""
        return self(data)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


def graph(size: int, closed: int) -> Data:
    """Return a chain of nodes, or a ring."""
    edges = [(node, node + 1) for node in range(size - 1)] + [(size - 1, 0)] * closed
    both = torch.tensor(edges + [(end, start) for start, end in edges]).T
    return Data(x=torch.randn(size, 2), edge_index=both, y=torch.tensor([closed]))


pl.seed_everything(0)
graphs = [graph(size, closed) for size in range(3, 15) for closed in (0, 1)]
data = LightningDataset(graphs[:16], graphs[16:20], graphs[20:], graphs[20:], batch_size=4)
losses, checkpoints = record.KeepLosses(), ModelCheckpoint("checkpoints", monitor="val_loss", save_last=True)
trainer = pl.Trainer(
    max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[losses, checkpoints]
)
model = Classifier()
trainer.fit(model, datamodule=data)
(scores,) = trainer.test(model, datamodule=data, ckpt_path="best", verbose=False)
forecast = trainer.predict(Classifier.load_from_checkpoint(checkpoints.last_model_path), datamodule=data)
record.write(
    losses=losses.losses,
    epochs=losses.epochs,
    scores=scores,
    best=float(checkpoints.best_model_score),
    forecast=torch.cat(forecast).flatten().tolist(),
)
