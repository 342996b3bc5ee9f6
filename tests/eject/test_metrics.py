"""Programs that log torchmetrics and keep hyperparameters: the plain program has the same results."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from tests.eject.running import check_form, eject

PROGRAM = """import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L
from hasten.callbacks import LearningRateMonitor, ModelCheckpoint
from hasten.loggers import CSVLogger


class Data(L.LightningDataModule):
    def __init__(self, batch_size=8):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
        self.rows = TensorDataset(x, x[:, :3].argmax(1))

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.rows, batch_size=self.hparams.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


class Net(L.LightningModule):
    def __init__(self, width=8, lr=0.1, **other):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        both = {"acc": torchmetrics.Accuracy(task="multiclass", num_classes=3, average="macro"),
                "recall": torchmetrics.Recall(task="multiclass", num_classes=3, average="macro")}
        self.both = torchmetrics.MetricCollection(both, prefix="val_")
        self.seen = []

    def training_step(self, batch, batch_idx):
        logits = self.layers(batch[0])
        self.train_acc(logits, batch[1])
        self.log("train_acc", self.train_acc, on_step=True, on_epoch=True)
        self.log("step_acc", self.train_acc)
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_end(self):
        self.folder = self.logger.log_dir
        self.seen.append(float(self.train_acc.compute()))

    def evaluate(self, batch, stage):
        logits = self.layers(batch[0])
        self.val_acc.update(logits, batch[1])
        self.both.update(logits, batch[1])
        self.log(f"{stage}_plain", self.val_acc, on_step=False, on_epoch=True)
        self.log_dict(self.both, on_step=False, on_epoch=True)

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self.evaluate(batch, "test")

    def predict_step(self, batch, batch_idx):
        return self.layers(batch[0]).argmax(1)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


L.seed_everything(1)
dm = Data()
model = Net(depth=2)
logger = CSVLogger("logs", name="metrics")
logger.log_hyperparams({"batch": 8})
checkpoint = ModelCheckpoint(monitor="val_acc", mode="max")
rates = LearningRateMonitor(logging_interval="step")
trainer = L.Trainer(max_epochs=3, accelerator="cpu", callbacks=[checkpoint, rates], logger=logger, log_every_n_steps=2)
trainer.fit(model, datamodule=dm)
found = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
best = Net.load_from_checkpoint(checkpoint.best_model_path)
tested = trainer.test(model, datamodule=dm, ckpt_path="best", verbose=False)
predicted = torch.cat(trainer.predict(model, datamodule=dm)).tolist()
result = (found, model.seen, dict(best.hparams), model.folder, tested, predicted)
"""


def run(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    folder.mkdir()
    monkeypatch.chdir(folder)
    names: dict[str, object] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(text, "program.py", "exec", dont_inherit=True), names)
    return names["result"]


def test_logged_torchmetrics_and_saved_arguments_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = eject(PROGRAM, tmp_path / "program.py")
    check_form(plain, 460)

    expected = run(PROGRAM, tmp_path / "with_hasten", monkeypatch)
    assert run(plain, tmp_path / "plain", monkeypatch) == expected
    written = [(tmp_path / name / "logs/metrics/version_0/hparams.yaml").exists() for name in ("with_hasten", "plain")]
    assert written == [True, True]


MANUAL = PROGRAM.replace(
    """        self.log("train_loss", loss)
        return loss
""",
    """        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()
""",
).replace("        self.seen = []", "        self.seen = []\n        self.automatic_optimization = False")


RATES = """
import torch, hasten as L
from torch.utils.data import DataLoader, TensorDataset
from hasten.callbacks import LearningRateMonitor
from hasten.loggers import CSVLogger

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return SCHEDULED

L.seed_everything(1)
data = DataLoader(TensorDataset(torch.randn(28, 4)), 4)
logger = CSVLogger("logs", name="rates")
trainer = L.Trainer(max_epochs=3, accelerator="cpu", callbacks=[LearningRateMonitor(INTERVAL)], logger=logger,
                    log_every_n_steps=3, enable_progress_bar=False)
trainer.fit(Net(), data)
rows = [(row["step"], row["epoch"], row["lr-SGD"]) for row in trainer.history if row.get("lr-SGD") is not None]
with open(f"{trainer.logger.log_dir}/metrics.csv") as file:
    rows.append(file.read().count("0.1,"))
result = rows, float(trainer.callback_metrics["lr-SGD"])
"""


@pytest.mark.parametrize("interval", ["", 'logging_interval="epoch"', 'logging_interval="step"'])
@pytest.mark.parametrize(
    "scheduled",
    [
        "optimizer",
        "[optimizer], [scheduler]",
        '[optimizer], [{"scheduler": scheduler, "interval": "step"}]',
    ],
)
def test_learning_rates_have_the_rows_that_they_have_with_hasten(
    interval: str, scheduled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = RATES.replace("INTERVAL", interval).replace("SCHEDULED", scheduled)
    plain = eject(program, tmp_path / "program.py")
    expected = run(program, tmp_path / "with_hasten", monkeypatch)
    assert run(plain, tmp_path / "plain", monkeypatch) == expected


def test_metrics_and_the_last_batch_with_manual_optimization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = eject(MANUAL, tmp_path / "program.py")
    expected = run(MANUAL, tmp_path / "with_hasten", monkeypatch)
    assert run(plain, tmp_path / "plain", monkeypatch) == expected
