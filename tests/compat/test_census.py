"""What packages on PyPI import from Lightning, read from its objects and pass to it is in hasten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hasten_lightning
from tests.programs import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def alias() -> Iterator[None]:
    hasten_lightning.install()
    yield
    hasten_lightning.uninstall()


@pytest.fixture(scope="module")
def census() -> Any:
    return load_script("census")


def test_what_packages_use_is_there(census: Any) -> None:
    uses = census.read_list()
    assert len(uses) > 1000
    found = census.observe(uses)
    assert {use: problem for use, problem in found.items() if problem not in ("", census.OF_OTHERS)} == {}


SOURCE = """
import lightning.pytorch as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only as only
try:
    from lightning.pytorch.strategies import DDPShardedStrategy
except ImportError:
    DDPShardedStrategy = None

KIND = "lightning.pytorch.loggers.CSVLogger"

class Base(pl.LightningModule):
    def training_step(self, batch):
        self.own = 1
        self.log("loss", self.own, sync_dist=True)
        return self.trainer.fit_loop.epoch_progress.current.ready

class Below(Base):
    def forward(self):
        return self.hparams

class Keeps(ModelCheckpoint):
    def __init__(self):
        super().__init__(monitor="loss")
        super()._save_topk_checkpoint

def run(model, fabric, other):
    trainer = pl.Trainer(max_epochs=3)
    trainer.fit(model, ckpt_path="last")
    other.thing.call(x=1)
    return fabric.strategy.root_device, model.trainer.strategy.barrier("x")
"""


def test_the_sources_of_a_package_are_read(census: Any, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("import lightning\ndef f(:")
    (tmp_path / "a.yaml").write_text("_target_: lightning.fabric.Fabric\n")
    package = census.Package(tmp_path)
    model, keeps = "lightning.pytorch.LightningModule", "lightning.pytorch.callbacks.ModelCheckpoint"
    assert {text for kind, text in package.uses if kind == "name"} == {
        "lightning.pytorch", "lightning.pytorch.Trainer", model, keeps, "lightning.pytorch.loggers.CSVLogger",
        "lightning.pytorch.utilities.rank_zero_only", "lightning.fabric.Fabric",
    }  # fmt: skip
    assert set(package.guarded) == {("name", "lightning.pytorch.strategies.DDPShardedStrategy")}
    assert {text for kind, text in package.uses if kind == "attribute"} == {
        f"{model} training_step", f"{model} log", f"{model} forward", f"{model} hparams", f"{keeps} __init__",
        f"{keeps} _save_topk_checkpoint", "trainer fit_loop.epoch_progress.current.ready", "trainer fit",
        "trainer strategy.barrier", "fabric strategy.root_device",
    }  # fmt: skip
    assert {text for kind, text in package.uses if kind == "argument"} == {
        f"{model} log(sync_dist)", f"{keeps}(monitor)", "lightning.pytorch.Trainer(max_epochs)",
        "trainer fit(ckpt_path)",
    }  # fmt: skip


def test_the_tables_count_what_both_have(census: Any) -> None:
    row = {"version": "1", "uses": [["name", "lightning.a", 2], ["name", "lightning.b", 1], ["name", "lightning.c", 1]]}
    theirs = {"name lightning.a": "", "name lightning.b": "", "name lightning.c": "ImportError"}
    ours = {"name lightning.a": "", "name lightning.b": "hasten has no lightning.b. Use a.", "name lightning.c": ""}
    tables = census.Result({"darts": row}, theirs, ours).tables()
    assert (
        "1 packages use 2 names, attributes and arguments that Lightning 2.6 has; hasten has 1 of them, 50.0 %"
        in tables
    )
    assert "| darts 1 | time series | 1 of 2 |  |  |" in tables
    assert "| `lightning.b` | darts | Use a. |" in tables
