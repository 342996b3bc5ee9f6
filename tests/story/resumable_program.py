"""A training program that tests kill and resume."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hasten as L
from hasten.callbacks import ModelCheckpoint
from tests.models import quiet


class Augmented(Dataset[Any]):
    """Samples (features (8,), label (), index ()) with noise from every random generator there is."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(samples, 8, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Any, Any, int]:
        noise = torch.randn(8) * 0.1 + random.random() * 0.1 + float(np.random.rand()) * 0.1
        return self.x[index] + noise, (self.x[index].sum() > 0).long(), index


class Model(L.LightningModule):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        from torchmetrics import MeanMetric

        self.options = options
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2))
        self.mean = MeanMetric()
        self.trace = open(options["trace"], "a")  # noqa: SIM115 - closed by the end of the process, killed or not

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, index = batch
        print(json.dumps([self.trainer.total_batch_idx + 1, index.tolist(), x.sum().item()]), file=self.trace)
        self.trace.flush()
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.mean(loss)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y, _ = batch
        self.log("val_loss", nn.functional.cross_entropy(self.layers(x), y))

    def on_train_epoch_end(self) -> None:
        epoch, metrics = self.current_epoch, self.trainer.callback_metrics
        values = [metrics["loss_epoch"].item(), metrics["mean"].item()]
        print(json.dumps(["epoch", epoch, values]), file=self.trace)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class KillsItself(L.Callback):
    """Sends this process a signal after some batch; SIGKILL ends it as the power would."""

    def __init__(self, at: int, number: int) -> None:
        self.at, self.number = at, number

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.total_batch_idx + 1 == self.at:
            os.kill(os.getpid(), self.number)


def digest(thing: Any) -> str:
    """Return the sha256 of nested tensors and numbers."""
    sha = hashlib.sha256()

    def feed(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            sha.update(part.detach().cpu().contiguous().numpy().tobytes())
        elif isinstance(part, dict):
            for key in part:
                sha.update(str(key).encode())
                feed(part[key])
        elif isinstance(part, (list, tuple)):
            for item in part:
                feed(item)
        else:
            sha.update(repr(part).encode())

    feed(thing)
    return sha.hexdigest()


def main(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    L.seed_everything(11)
    data = Augmented(44)
    train = DataLoader(
        data, 4, shuffle=True, num_workers=options["workers"], persistent_workers=options.get("persistent", False)
    )
    callbacks: list[Any] = [
        ModelCheckpoint(
            dirpath=options["folder"],
            save_last=True,
            every_n_train_steps=options.get("every", 2),
            save_top_k=-1 if options.get("keep_all") else 1,
            filename="{step}",
        ),
        ModelCheckpoint(dirpath=Path(options["folder"]) / "by-epoch", monitor="val_loss", save_last=True),
    ]
    if options.get("kill_at"):
        callbacks.append(KillsItself(options["kill_at"], options.get("kill_with", signal.SIGKILL)))
    trainer = quiet(
        max_epochs=3,
        accumulate_grad_batches=options.get("accumulate", 1),
        val_check_interval=4,
        callbacks=callbacks,
        enable_checkpointing=True,
    )
    model = Model(options)
    trainer.fit(model, train, DataLoader(data, 11), ckpt_path="last")
    result = {
        "weights": digest(model.state_dict()),
        "optimizer": digest(trainer.optimizers[0].state_dict()),
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.get_last_lr(),
        "step": trainer.global_step,
        "batches": trainer.total_batch_idx + 1,
        "rows": len(trainer.history),
        "history": digest([{name: row[name] for name in sorted(row) if name != "time"} for row in trainer.history]),
    }
    Path(options["result"]).write_text(json.dumps(result))


def run_each(runs: list[dict[str, Any]]) -> list[int]:
    """Run the program once for each of ``runs``, each in a process of its own; return the exit codes.

    The processes are forks of this one, which has imported everything and done nothing: imports are most of
    the time of a short run.
    """
    codes: list[Any] = []
    for options in runs:
        child = multiprocessing.get_context("fork").Process(target=main, args=(options,))
        child.start()
        child.join()
        codes.append(child.exitcode)
        if codes[-1] not in options.get("may_end_with", [0]):
            break
    return codes


def run_into(runs: list[dict[str, Any]], codes: Path, errors: Path) -> None:
    """Run the program once for each of ``runs``; write the exit codes, and what is said, to files."""
    warnings.simplefilter("ignore")
    # Not to pipes: the workers of a killed process may hold them open for a few seconds.
    with open(errors, "a", encoding="utf-8") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    codes.write_text(json.dumps(run_each(runs)))
