"""Two fine-tuning programs as tutorials write them, with only the import lines changed."""

from __future__ import annotations

import csv
from pathlib import Path

from tests.programs import run_imported

COMMON = '''
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForSequenceClassification, DistilBertConfig
import torchmetrics


class Reviews(Dataset):
    """Random token ids whose label is whether the first is large."""

    def __init__(self, samples):
        generator = torch.Generator().manual_seed(samples)
        self.ids = torch.randint(5, 100, (samples, 12), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "label": int(ids[0] > 50)}


def tiny_model():
    config = DistilBertConfig(
        vocab_size=100, dim=16, hidden_dim=32, n_layers=1, n_heads=2, max_position_embeddings=16, num_labels=2
    )
    return AutoModelForSequenceClassification.from_config(config)


train_loader = DataLoader(Reviews(64), batch_size=8, shuffle=True, num_workers=1, drop_last=True)
val_loader = DataLoader(Reviews(24), batch_size=8, num_workers=1)
test_loader = DataLoader(Reviews(32), batch_size=8, num_workers=1)
'''

TRAINER = (
    """
import hasten as L
from hasten.callbacks import ModelCheckpoint
from hasten.loggers import CSVLogger
"""
    + COMMON
    + """

class LightningModel(L.LightningModule):
    def __init__(self, model, learning_rate=5e-3):
        super().__init__()
        self.learning_rate = learning_rate
        self.model = model
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=2)
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=2)
        self.test_acc = torchmetrics.Accuracy(task="multiclass", num_classes=2)

    def forward(self, input_ids, attention_mask, labels):
        return self.model(input_ids, attention_mask=attention_mask, labels=labels)

    def training_step(self, batch, batch_idx):
        outputs = self(batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["label"])
        self.log("train_loss", outputs["loss"])
        with torch.no_grad():
            predicted_labels = torch.argmax(outputs["logits"], 1)
            self.train_acc(predicted_labels, batch["label"])
            self.log("train_acc", self.train_acc, on_epoch=True, on_step=False)
        return outputs["loss"]

    def validation_step(self, batch, batch_idx):
        outputs = self(batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["label"])
        self.log("val_loss", outputs["loss"], prog_bar=True)
        predicted_labels = torch.argmax(outputs["logits"], 1)
        self.val_acc(predicted_labels, batch["label"])
        self.log("val_acc", self.val_acc, prog_bar=True)

    def test_step(self, batch, batch_idx):
        outputs = self(batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["label"])
        predicted_labels = torch.argmax(outputs["logits"], 1)
        self.test_acc(predicted_labels, batch["label"])
        self.log("accuracy", self.test_acc, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.trainer.model.parameters(), lr=self.learning_rate)


if __name__ == "__main__":
    torch.manual_seed(123)
    lightning_model = LightningModel(tiny_model())
    callbacks = [ModelCheckpoint(save_top_k=1, mode="max", monitor="val_acc")]
    logger = CSVLogger(save_dir="logs/", name="my-model")
    trainer = L.Trainer(
        max_epochs=3,
        callbacks=callbacks,
        accelerator="auto",
        devices="auto",
        precision="32-true",
        logger=logger,
        log_every_n_steps=2,
        deterministic=True,
    )
    trainer.fit(model=lightning_model, train_dataloaders=train_loader, val_dataloaders=val_loader)
    test_acc = trainer.test(lightning_model, dataloaders=test_loader, ckpt_path="best")
    print("RESULT", test_acc[0]["accuracy"], trainer.checkpoint_callback.best_model_path)
"""
)

FABRIC = (
    """
from hasten import Fabric
"""
    + COMMON
    + """

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    fabric.launch()
    fabric.seed_everything(123)
    model = tiny_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    model, optimizer = fabric.setup(model, optimizer)
    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)
    for epoch in range(3):
        model.train()
        for batch_idx, batch in enumerate(train_loader):
            outputs = model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["label"])
            optimizer.zero_grad()
            fabric.backward(outputs["loss"])
            optimizer.step()
            if not batch_idx % 4:
                fabric.print(f"Epoch: {epoch+1} | Batch {batch_idx} | Loss: {outputs['loss']:.4f}")
    with torch.no_grad():
        model.eval()
        test_acc = torchmetrics.Accuracy(task="multiclass", num_classes=2).to(fabric.device)
        for batch in test_loader:
            outputs = model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["label"])
            test_acc.update(torch.argmax(outputs["logits"], 1), batch["label"])
    fabric.print("RESULT", test_acc.compute().item())
"""
)


def execute(source: str, folder: Path) -> list[str]:
    program = folder / "program.py"
    program.write_text(source)
    done = run_imported(program, cwd=folder, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr[-4000:]
    return next(line.split() for line in done.stdout.splitlines() if line.startswith("RESULT"))


def test_trainer_program(tmp_path: Path) -> None:
    _, accuracy, best = execute(TRAINER, tmp_path)
    assert float(accuracy) > 0.6
    assert (tmp_path / best).exists()
    assert "my-model" in best
    (metrics,) = (tmp_path / "logs" / "my-model").rglob("metrics.csv")
    rows = list(csv.DictReader(metrics.open()))
    assert {"epoch", "step", "train_loss", "train_acc", "val_loss", "val_acc", "accuracy"} == set(rows[0])
    assert sum(bool(row["val_acc"]) for row in rows) == 3
    assert [row["step"] for row in rows if row["train_loss"]] == [str(k) for k in range(1, 24, 2)]


def test_fabric_program(tmp_path: Path) -> None:
    _, accuracy = execute(FABRIC, tmp_path)
    assert float(accuracy) > 0.6
