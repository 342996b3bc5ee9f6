"""The program that the files beside this one start: it uses the processes that there are, and continues where it was.

python train.py --folder runs                         one process
torchrun --nproc-per-node 2 train.py --folder runs    two
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.callbacks import ModelCheckpoint


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.layers(images)
        self.log("accuracy", (logits.argmax(1) == labels).float().mean(), on_step=False, on_epoch=True, sync_dist=True)
        return torch.nn.functional.cross_entropy(logits, labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs", help="checkpoints: a path or a URL that all machines share")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=1, help="machines; torchrun and hasten launch count themselves")
    parser.add_argument("--devices", default="auto", help="processes on each machine")
    return parser


def main():
    given = options().parse_args()
    L.seed_everything(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    trainer = L.Trainer(
        devices=given.devices, num_nodes=given.nodes, max_epochs=given.epochs, default_root_dir=given.folder,
        callbacks=[ModelCheckpoint(given.folder, save_last=True)], logger=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Digits(), DataLoader(data, batch_size=32, shuffle=True), ckpt_path="last")
    if trainer.is_global_zero:
        accuracy = trainer.callback_metrics["accuracy"]
        print(f"result: accuracy {accuracy:.3f} after {trainer.global_step} steps of {trainer.world_size} processes")


if __name__ == "__main__":
    main()
