"""An ejected program trains the weights that the program with hasten trains, bit for bit."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from hasten_tools.demo import images, text
from hasten_tools.eject import EjectError
from tests.eject.running import check_form, eject, fits, same
from tests.programs import ROOT

pytest.importorskip("sklearn")
# What makes them short: the number of epochs or steps does not matter here.
SHORTER = {
    "gan.py": [("epochs: int = 30", "epochs: int = 2"), ("samples: int = 2048", "samples: int = 500")],
    "kfold.py": [("folds: int = 5, epochs: int = 5", "folds: int = 2, epochs: int = 1")],
    "finetuning.py": [("max_epochs=3", "max_epochs=1")],
    "ema_and_swa.py": [("max_epochs=8", "max_epochs=3")],
    "language_model.py": [("max_steps=150", "max_steps=5")],
}

EXAMPLES = {
    path.name: path for path in (*(ROOT / "examples").glob("*.py"), ROOT / "examples" / "engines" / "ray_train.py")
}


@pytest.mark.parametrize("name", SHORTER)
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = EXAMPLES[name].read_text(encoding="utf-8")
    for old, new in SHORTER[name]:
        assert old in text
        text = text.replace(old, new)
    plain = eject(text, tmp_path / name)
    check_form(plain, 220)
    assert same(fits(text, plain=False), fits(plain, plain=True))


# The programs that are refused, and why; docs/eject.md has the same table.
REFUSED = {
    "autoencoder_cli.py": "LightningCLI makes model and Trainer from the command line",
    "context_parallel.py": "Fabric leaves the loop to the program, which has one already",
    "pipeline_parallel.py": "Fabric leaves the loop to the program, which has one already",
    "predict_two_processes.py": "it does not call Trainer.fit",
    "ray_train.py": "Ray starts its processes",
}


def test_every_example_is_ejected_or_refused_as_the_docs_say() -> None:
    assert EXAMPLES.keys() == {*SHORTER, *REFUSED}
    page = (ROOT / "docs" / "eject.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `examples/(?:engines/)?(\w+\.py)` \| (.*?) \|$", page, re.MULTILINE))
    assert {name for name, verdict in rows.items() if verdict == "same bits"} == set(SHORTER)
    assert {name: verdict for name, verdict in rows.items() if name in REFUSED} == {
        name: f"refused: {why}" for name, why in REFUSED.items()
    }


def test_the_loop_on_the_page_is_the_one_that_is_written(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "eject.md").read_text(encoding="utf-8")
    program = page.split('```python title="train.py"\n')[1].split("```")[0]
    loop = page.split("<!-- output -->\n```text\n")[1].split("```")[0]
    assert loop in eject(program, tmp_path / "train.py")


@pytest.mark.parametrize("name", REFUSED)
def test_example_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(EjectError, match=re.escape(REFUSED[name])):
        eject(EXAMPLES[name].read_text(encoding="utf-8"), tmp_path / name)


# -- the demo's tasks, with the demo's model, data and optimizer, on few samples

DIGITS = """from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from sklearn.datasets import load_digits
from typing import cast

import hasten as L

CLASSES = 10


{classes}

class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = VisionTransformer(8, patch=2)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.model(batch["images"]), batch["labels"])

    def validation_step(self, batch, batch_idx):
        correct = self.model(batch["images"]).argmax(dim=-1) == batch["labels"]
        self.log("val_acc", correct.float().mean(), batch_size=len(correct), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    data = load_digits()
    pixels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8.0 - 1.0
    digits = Images(pixels, torch.tensor(data.target, dtype=torch.int64))
    torch.manual_seed(0)
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(digits.part(torch.arange(128)), batch_size=32, shuffle=True, generator=order)
    trainer.fit(Classifier(), loader, DataLoader(digits.part(torch.arange(128, 192)), batch_size=64))
"""
DOCSTRINGS = """from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import hasten as L

NEW_LAYERS = 30


{classes}

class Classifier(L.LightningModule):
    def __init__(self, learning_rate: float = 1e-4) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        sizes = {{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}}
        config = BertConfig(vocab_size=64, num_labels=5, max_position_embeddings=32, **sizes)
        self.model = BertForSequenceClassification(config)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        new: dict[bool, list[nn.Parameter]] = {{True: [], False: []}}
        for name, parameter in self.model.named_parameters():
            new["pooler" in name or "classifier" in name].append(parameter)
        fast: dict[str, Any] = {{"params": new[True], "lr": NEW_LAYERS * self.learning_rate}}
        return AdamW([{{"params": new[False]}}, fast], lr=self.learning_rate)


if __name__ == "__main__":
    L.seed_everything(0, verbose=False)
    samples = [{{"input_ids": torch.randint(64, (4 + i % 9,)), "label": i % 5}} for i in range(40)]
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(samples, batch_size=8, shuffle=True, generator=order, collate_fn=Pad(16))
    trainer = L.Trainer(max_epochs=2, accelerator="cpu", gradient_clip_val=1.0, enable_model_summary=False)
    trainer.fit(Classifier(), loader)
"""


def check(program: str, tmp_path: Path) -> None:
    plain = eject(program, tmp_path / "program.py")
    check_form(plain)
    assert same(fits(program, plain=False), fits(plain, plain=True))


def test_demo_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    classes = "\n\n".join(inspect.getsource(one) for one in (images.Images, images.VisionTransformer))
    check(DIGITS.format(classes=classes), tmp_path)


def test_demo_docstrings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    check(DOCSTRINGS.format(classes=inspect.getsource(text.Pad)), tmp_path)


PROCESSES = """import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hasten as L


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.layers(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=2.0)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


def loader(count: int, shuffle: bool) -> DataLoader:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=4, shuffle=shuffle)


L.seed_everything(3, verbose=False)
trainer = L.Trainer(
    max_epochs=4, devices=2, strategy="ddp", accelerator="cpu", accumulate_grad_batches=3, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Net(), loader(52, shuffle=True), loader(10, shuffle=False))
"""


@pytest.mark.world_size(2)
def test_two_processes(tmp_path: Path) -> None:
    rank = dist.get_rank()
    plain = eject(PROCESSES, tmp_path / f"program{rank}.py")
    check_form(plain)
    with_hasten = fits(PROCESSES, plain=False)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    assert same(with_hasten, fits(plain, plain=True))
