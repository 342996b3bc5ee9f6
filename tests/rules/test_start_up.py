"""What a fit costs before and after its steps, counted in modules, passes of the collector and Python-level calls."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs import run_python
from tests.rules.test_import_time_and_weight import HEAVY, heavy

# A plain loop first: what torch itself imports for an optimizer, a loader and a file is not ours.
PROGRAM = """
import gc, json, os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.ones(40, 8))

def plain_loop():
    layer = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for (x,) in DataLoader(data, batch_size=4):
        optimizer.zero_grad()
        layer(x).mean().backward()
        optimizer.step()
    torch.save(layer.state_dict(), "plain.pt")

plain_loop()
gc.disable()
before = set(sys.modules)
import hasten as L

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

OFF = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)

def run(**options):
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", **options)
    trainer.fit(Model(), DataLoader(data, batch_size=4), DataLoader(data, batch_size=4))

def evaluate():
    trainer = L.Trainer(accelerator="cpu", **OFF)
    trainer.validate(Model(), DataLoader(data, batch_size=4), verbose=False)

def fabric():
    fabric = L.Fabric(accelerator="cpu")
    layer = torch.nn.Linear(8, 1)
    layer, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    for (x,) in fabric.setup_dataloaders(DataLoader(data, batch_size=4)):
        optimizer.zero_grad()
        fabric.backward(layer(x).mean())
        optimizer.step()

passes = 0
def note(phase, info):
    global passes
    passes += phase == "start" and info["generation"] == 2
gc.callbacks.append(note)

def calls_of(function):
    calls = 0
    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls

run()
fabric()
new = sorted(set(sys.modules) - before)
calls = {
    "plain": calls_of(plain_loop),
    "defaults": calls_of(run),
    "off": calls_of(lambda: run(**OFF)),
    "validate": calls_of(evaluate),
    "fabric": calls_of(fabric),
}
print(json.dumps({"new": new, "passes": passes, "calls": calls}))
"""

UNUSED = (
    "hasten.cli",
    "hasten.commands",
    "hasten.packed",
    "hasten.precision.bitsandbytes",
    "hasten.precision.float8",
    "hasten.precision.fsdp",
    "hasten.precision.transformer_engine",
    "hasten.strategies.ddp",
    "hasten.strategies.fsdp",
    "hasten.strategies.model_parallel",
    "hasten.strategies.optimizer_shard",
    "hasten.strategies.sharded",
    "hasten.tuner",
    "hasten_deepspeed",
    "hasten_lightning",
    "hasten_tools",
    "hasten_xla",
)
# Modules of hasten that a fit with defaults and a Fabric loop import together; it may only fall.
MOST_MODULES = 164


@pytest.fixture(scope="module")
def counted() -> dict[str, Any]:
    # Not in pytest's folder: Python's functions for paths make a call for each folder above, more of them under xdist.
    with tempfile.TemporaryDirectory() as folder:
        done = run_python("-W", "ignore", "-c", PROGRAM, cwd=Path(folder))
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_the_first_fit_imports_nothing_but_hasten(counted: dict[str, Any]) -> None:
    others = [name for name in counted["new"] if name.split(".")[0] != "hasten"]
    assert heavy(others, HEAVY) == []
    assert len(others) <= 5, others


def test_the_first_fit_imports_no_part_that_it_does_not_use(counted: dict[str, Any]) -> None:
    """Neither strategies for several devices, nor precisions of other packages, nor the tools."""
    assert heavy(counted["new"], UNUSED) == []
    mine = [name for name in counted["new"] if name.split(".")[0] == "hasten"]
    assert len(mine) <= MOST_MODULES, mine


def test_no_fit_makes_a_full_pass_of_the_garbage_collector(counted: dict[str, Any]) -> None:
    assert counted["passes"] == 0


@pytest.mark.parametrize(("what", "allowed"), [("defaults", 6000), ("off", 2930), ("validate", 700), ("fabric", 600)])
def test_a_repeated_call_costs_few_calls(counted: dict[str, Any], what: str, allowed: int) -> None:
    # A save and the optimizer call a few functions more in torch 2.14.
    of_torch = 20 if torch.__version__ >= (2, 14) else 0
    assert counted["calls"][what] <= counted["calls"]["plain"] + allowed + of_torch
