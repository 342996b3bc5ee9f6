"""Ray Train starts two workers, on one machine or on several; each trains with a Trainer that joins their group.

Needs `pip install "ray[train]"`. Ray sets up torch.distributed in its workers, and the Trainer recognizes that: write
devices="auto", and nothing else. The callback gives Ray the metrics and the checkpoint of each epoch. After a failure,
FailureConfig lets Ray start the workers again, which then go on from the newest checkpoint that Ray has.
"""

import tempfile
from pathlib import Path

import ray.train
import torch
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import hasten as L


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


class Report(L.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(Path(folder, "model.ckpt"))  # all workers; the first one writes the file
            mine = ray.train.Checkpoint.from_directory(folder) if trainer.is_global_zero else None
            ray.train.report({"accuracy": trainer.callback_metrics["accuracy"].item()}, checkpoint=mine)


def train():
    L.seed_everything(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data).float() / 16, torch.tensor(digits.target))
    trainer = L.Trainer(
        accelerator="auto", devices="auto", max_epochs=5, callbacks=[Report()], logger=False, enable_progress_bar=False
    )
    checkpoint = ray.train.get_checkpoint()
    path = None if checkpoint is None else Path(checkpoint.to_directory(), "model.ckpt")
    trainer.fit(Digits(), DataLoader(data, batch_size=32, shuffle=True), ckpt_path=path)


if __name__ == "__main__":
    settings = ray.train.ScalingConfig(num_workers=2, use_gpu=torch.cuda.device_count() > 1)
    failures = ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=2))
    result = TorchTrainer(train, scaling_config=settings, run_config=failures).fit()
    print(
        f"result: accuracy {result.metrics['accuracy']:.3f} with 2 workers, checkpoint: {result.checkpoint is not None}"
    )
