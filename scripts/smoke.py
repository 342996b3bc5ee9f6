"""Train, save, resume and evaluate with the hasten of this Python: what must work with every Python and torch.

Run: python scripts/smoke.py   (`make smoke`)

It takes some seconds on one core, and prints the versions. The weights after a resume in the middle of an epoch must
equal those of the undisturbed run, bit for bit, and both must equal those of a loop by hand.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.callbacks import ModelCheckpoint
from hasten.loggers import CSVLogger

EPOCHS, BATCHES = 3, 8


class Net(L.LightningModule):
    """A small classifier."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss, and log it."""
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss."""
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader() -> DataLoader[Any]:
    """Return a loader with batches in another order in each epoch."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCHES * 4, 8, generator=generator)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    return DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(2))


def by_hand() -> Net:
    """Return the module that a loop by hand trains."""
    net, batches = Net(), loader()
    optimizer = net.configure_optimizers()
    for _ in range(EPOCHS):
        for batch in batches:
            optimizer.zero_grad()
            net.loss(batch).backward()
            optimizer.step()
    return net


def check(said: str, is_true: bool) -> None:
    """Print what was checked; end the program if it is wrong."""
    print(f"{'ok' if is_true else 'FAILED':<7}{said}", flush=True)
    if not is_true:
        sys.exit(1)


def same(one: nn.Module, other: nn.Module) -> bool:
    """Return whether two modules have the same weights, bit for bit."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def main() -> None:
    """Run all checks in an empty folder."""
    print(f"hasten {L.__version__}, Python {platform.python_version()}, torch {torch.__version__}, {L.__file__}")
    shown: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    given: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": EPOCHS, **shown}
    whole = Net()
    trainer = L.Trainer(**given, logger=CSVLogger("."), log_every_n_steps=4)
    trainer.fit(whole, loader(), loader())
    given |= {"limit_val_batches": 0, "logger": False}
    check("a fit logs and evaluates", {"train_loss", "val_loss"} <= set(trainer.callback_metrics))
    check("its weights are those of the loop by hand", same(whole, by_hand()))

    stops = BATCHES + BATCHES // 2
    saves = ModelCheckpoint(dirpath="saved", every_n_train_steps=stops, save_top_k=-1, save_last=True)
    L.Trainer(**given, max_steps=stops, callbacks=[saves]).fit(Net(), loader())
    resumed = Net()
    L.Trainer(**given).fit(resumed, loader(), ckpt_path=saves.last_model_path)
    check("a run that is resumed in the middle of an epoch has the same weights", same(resumed, whole))
    loaded = Net.load_from_checkpoint(saves.last_model_path)
    contents = torch.load(saves.last_model_path, weights_only=True)
    check("torch.load reads the checkpoint", loaded.state_dict().keys() == contents["state_dict"].keys())

    fabric = L.Fabric(accelerator="cpu", devices=1)
    net = Net()
    model, optimizer = fabric.setup(net, net.configure_optimizers())
    model.mark_forward_method("loss")
    batches = fabric.setup_dataloaders(loader())
    for _ in range(EPOCHS):
        for batch in batches:
            optimizer.zero_grad()
            fabric.backward(model.loss(batch))
            optimizer.step()
    check("Fabric's weights are the same", same(net, whole))

    mixed = Net()
    L.Trainer(**given, precision="bf16-mixed").fit(mixed, loader())
    check("bfloat16 trains", all(bool(torch.isfinite(each).all()) for each in mixed.parameters()))
    L.Trainer(**(given | {"devices": 2}), strategy="ddp_spawn").fit(Net(), loader())
    check("two processes train", True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="hasten-smoke-") as name:
        os.chdir(name)
        main()
