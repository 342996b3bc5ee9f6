"""The core trains, validates, saves and resumes where none of the other packages of the wheel can be imported."""

from __future__ import annotations

from pathlib import Path

from hasten.extend import origin
from tests.programs import fork_python

PROGRAM = """
import sys

BLOCKED = %r
sys.modules.update(dict.fromkeys(BLOCKED))

import torch
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten import callbacks, loggers, profilers, strategies


class Line(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
loader = DataLoader(data, batch_size=4)
# Before the first backward, after which torch cannot be forked. Spawned processes would run all of this file again.
L.Trainer(max_steps=2, accelerator="cpu", devices=2, strategy="ddp_fork", logger=False).fit(Line(), loader)
checkpoints = callbacks.ModelCheckpoint(monitor="val_loss", save_last=True)
given = dict(accelerator="cpu", logger=loggers.CSVLogger("."), callbacks=[checkpoints, callbacks.ModelSummary()])
model = Line()
trainer = L.Trainer(max_epochs=2, **given)
trainer.fit(model, loader, loader)
trainer.validate(model, loader)
L.Trainer(max_epochs=3, accelerator="cpu", logger=False, micro_batch="auto", matmul_precision="high").fit(
    Line(), loader, ckpt_path=checkpoints.last_model_path
)
print(trainer.history)

fabric = L.Fabric(accelerator="cpu", devices=1)
layer = torch.nn.Linear(4, 1)
layer, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
for x, y in fabric.setup_dataloaders(loader):
    optimizer.zero_grad()
    fabric.backward(torch.nn.functional.mse_loss(layer(x), y))
    optimizer.step()

assert [name for name in sys.modules if name.partition(".")[0] in BLOCKED and sys.modules[name] is not None] == []
"""


def test_the_core_needs_no_other_root(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM % sorted(origin.ROOTS - {"hasten"}), encoding="utf-8")
    # A copy of a process that has imported torch alone: nothing of hasten, where the others could be imported.
    done = fork_python("train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "History" in done.stdout
