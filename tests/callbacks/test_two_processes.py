"""Callbacks on two processes that log different values: what they do is the same on both."""

from __future__ import annotations

from pathlib import Path

from tests.callbacks.scripted import run_program

PROGRAM = """
from datetime import timedelta
from pathlib import Path
import torch
import hasten as L
from hasten.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from hasten.loggers import CSVLogger

folder = Path("FOLDER")

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
    def training_step(self, batch, batch_idx):
        return self.weight * 1.0
    def validation_step(self, batch, batch_idx):
        # Worse with each epoch on the second process, better on the first.
        sign = -1.0 if self.global_rank == 0 else 1.0
        self.log("val_loss", sign * (1 + self.current_epoch), sync_dist=False)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

best = ModelCheckpoint(folder / "best", "{epoch}-{val_loss:.0f}", "val_loss", save_last="link")
steps = ModelCheckpoint(folder / "time", "{step}", save_top_k=-1, train_time_interval=timedelta(0))
stopper = EarlyStopping("val_loss", patience=2)
trainer = L.Trainer(
    accelerator="cpu", devices=2, strategy="ddp_fork", max_epochs=6, num_sanity_val_steps=0,
    callbacks=[best, steps, stopper, Timer("1h"), LearningRateMonitor()],
    logger=CSVLogger(folder / "logs"), log_every_n_steps=1, enable_model_summary=False,
)

class Report(L.Callback):
    def on_fit_end(self, trainer, module):
        state = [best.best_model_path, float(best.best_model_score), sorted(best.best_k_models), best.last_model_path,
                 trainer.current_epoch, trainer.should_stop]
        (folder / f"rank{trainer.global_rank}").write_text(repr(state))

trainer.callbacks.append(Report())
if __name__ == "__main__":
    trainer.fit(Model(), [torch.zeros(2, 1)] * 4, [torch.zeros(2, 1)])
"""


def test_both_do_the_same(tmp_path: Path) -> None:
    done = run_program(PROGRAM.replace("FOLDER", str(tmp_path)))
    first, second = ((tmp_path / f"rank{rank}").read_text() for rank in (0, 1))
    assert first == second
    # The first process's values rank; either process may stop both.
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == [
        "epoch=2-val_loss=-3.ckpt",
        "last.ckpt",
    ]
    assert (tmp_path / "best" / "last.ckpt").resolve().name == "epoch=2-val_loss=-3.ckpt"
    assert "True" in first
    assert (tmp_path / "time" / "step=1.ckpt").exists()
    (logs,) = (tmp_path / "logs" / "lightning_logs").iterdir()
    rows = (logs / "metrics.csv").read_text().splitlines()
    assert "lr-SGD" in rows[0]
    assert done.stdout.count("Epoch 0: 4/4") == 1
