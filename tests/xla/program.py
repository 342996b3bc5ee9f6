"""Train on several XLA devices: two processes with strategy="xla", or one with "xla_fsdp"; save the weights."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch

import hasten as L
from hasten.strategies import XLAFSDPStrategy, XLAStrategy
from tests.xla.models import BATCH, Manual, Net, loader, loss_of, network, optimizer_of, weights

QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}


def strategy_of(name: str) -> object:
    if name == "xla":
        return XLAStrategy(timeout=timedelta(seconds=60))
    return XLAFSDPStrategy(activation_checkpointing_policy={torch.nn.ReLU})


def train(name: str, folder: Path, kind: type[Net], ckpt_path: Path | None = None, **options: object) -> Net:
    L.seed_everything(3, verbose=False)
    module = kind("adamw", dropout=0.0)
    share = 2 if name == "xla" else 1
    where = {"accelerator": "tpu", "devices": 2, "strategy": strategy_of(name), "default_root_dir": folder}
    trainer = L.Trainer(max_epochs=2, **where, **QUIET, **options)
    trainer.fit(module, loader(batch_size=BATCH // share), loader(8), ckpt_path=ckpt_path)
    if trainer.is_global_zero:
        graphs = trainer.strategy.steps.graphs
        print(kind.__name__, trainer.world_size, graphs, float(trainer.callback_metrics["val_loss"]))
    return module


def fabric(name: str) -> list[torch.Tensor]:
    made = L.Fabric(accelerator="tpu", devices=2, strategy=strategy_of(name))
    made.launch()
    L.seed_everything(3, verbose=False)
    net = network(dropout=0.0)
    net, optimizer = made.setup(net, optimizer_of(net, "adamw"))
    data = made.setup_dataloaders(loader(batch_size=BATCH // (2 if name == "xla" else 1)))
    for _ in range(2):
        for batch in data:
            made.backward(loss_of(net, batch))
            optimizer.step()
            optimizer.zero_grad()
    return weights(net)


def main(name: str, folder: Path) -> None:
    saves = L.callbacks.ModelCheckpoint(dirpath=folder, every_n_train_steps=13, filename="{step}", save_top_k=-1)
    whole = weights(train(name, folder, Net, callbacks=[saves]))
    resumed = train(name, folder, Net, folder / "step=13.ckpt", enable_checkpointing=False)
    equal = all(map(torch.equal, whole, weights(resumed)))
    manual = weights(train(name, folder, Manual, enable_checkpointing=False))
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    accumulated = weights(train(name, folder, Net, enable_checkpointing=False, **options))
    by_fabric = fabric(name)
    if L.utilities.rank_zero_only.rank == 0:
        kept = {"whole": whole, "manual": manual, "accumulated": accumulated, "fabric": by_fabric, "resumed": equal}
        torch.save(kept, folder / "weights.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
