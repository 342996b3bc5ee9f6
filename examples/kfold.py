"""k-fold cross-validation: one Trainer per fold, and the mean of what they reach."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import KFold
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import hasten as L


class Classifier(L.LightningModule):
    def __init__(self, width: int = 64, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def test_step(self, batch, batch_idx):
        images, labels = batch
        self.log("accuracy", (self.layers(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


def digits() -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))


def cross_validate(folds: int = 5, epochs: int = 5) -> list[float]:
    data, accuracies = digits(), []
    for fold, (train, held_out) in enumerate(KFold(folds, shuffle=True, random_state=0).split(data)):
        L.seed_everything(fold, verbose=False)  # every fold can be repeated by itself
        trainer = L.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model = Classifier()
        trainer.fit(model, DataLoader(Subset(data, train), batch_size=32, shuffle=True))
        (result,) = trainer.test(model, DataLoader(Subset(data, held_out), batch_size=256), verbose=False)
        print(f"fold {fold}: trained on {len(train)}, accuracy on the other {len(held_out)}: {result['accuracy']:.3f}")
        accuracies.append(result["accuracy"])
    return accuracies


if __name__ == "__main__":
    reached = torch.tensor(cross_validate())
    print(f"result: accuracy {reached.mean():.3f} +- {reached.std():.3f} over {len(reached)} folds")
