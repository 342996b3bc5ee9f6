"""Ray Train starts two workers, on one machine or on several; Ray Data feeds them, and each trains with a Trainer.

Needs `pip install "ray[train]"`. Ray sets up torch.distributed in its workers, and the Trainer recognizes that: write
devices="auto", and nothing else. The callback gives Ray the metrics and the checkpoint of each epoch. After a failure,
FailureConfig lets Ray start the workers again, which then go on from the newest checkpoint that Ray has:
`python ray_train.py lose` kills a worker in the third epoch.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

import ray.data
import ray.train
import torch
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits

import hasten as L


class Digits(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        logits, labels = self.layers(batch["image"]), batch["label"]
        self.log("accuracy", (logits.argmax(1) == labels).float().mean(), on_step=False, on_epoch=True, sync_dist=True)
        return torch.nn.functional.cross_entropy(logits, labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Batches:
    """What Ray gives to this worker. It is no DataLoader, so the Trainer reads it as it is."""

    def __iter__(self):
        yield from ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=32)


class Report(L.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(Path(folder, "model.ckpt"))  # all workers; the first one writes the file
            mine = ray.train.Checkpoint.from_directory(folder) if trainer.is_global_zero else None
            values = {"accuracy": trainer.callback_metrics["accuracy"].item(), "steps": trainer.global_step}
            ray.train.report(values, checkpoint=mine)


class Lose(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 2 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train(config):
    L.seed_everything(0)
    checkpoint = ray.train.get_checkpoint()
    path = None if checkpoint is None else Path(checkpoint.to_directory(), "model.ckpt")
    callbacks = [Report(), Lose()] if config["lose"] and path is None else [Report()]
    trainer = L.Trainer(devices="auto", max_epochs=5, callbacks=callbacks, logger=False, enable_progress_bar=False)
    trainer.fit(Digits(), Batches(), ckpt_path=path)


if __name__ == "__main__":
    digits = load_digits()
    rows = zip(digits.data.astype("float32") / 16, digits.target, strict=True)
    result = TorchTrainer(
        train,
        train_loop_config={"lose": "lose" in sys.argv},
        datasets={"train": ray.data.from_items([{"image": image, "label": label} for image, label in rows])},
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=torch.cuda.device_count() > 1),
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=2)),
    ).fit()
    print(f"result: accuracy {result.metrics['accuracy']:.3f} after {result.metrics['steps']} steps of 2 workers")
